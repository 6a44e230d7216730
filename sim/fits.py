"""Costs, acceptance, stages and drafter training from a trace, a training log or a table, by one call."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import BaseModel

from tltlab.acceptance.base import Acceptance
from tltlab.acceptance.freshness import FreshAcceptance
from tltlab.calibration.acceptance import KINDS as ACCEPTANCE_KINDS
from tltlab.calibration.acceptance import AcceptanceFit, fit_kind
from tltlab.calibration.api import parse_rl_steps
from tltlab.calibration.costs import KINDS, CostFit, fit_points, fit_trace
from tltlab.calibration.idle_training import SpotFit, fit_spot
from tltlab.calibration.iterations import read_step_times
from tltlab.calibration.residuals import held_out_table, residuals_table
from tltlab.calibration.stages import StageFit, fit_stages
from tltlab.config import faults_in
from tltlab.console import table
from tltlab.costs.base import CostModel
from tltlab.costs.profiles import find_gpu, find_model, listed
from tltlab.costs.roofline import Hardware
from tltlab.costs.table import TableCosts
from tltlab.errors import ConfigError
from tltlab.importers.sources import guess, read
from tltlab.options import check, option
from tltlab.records import Json, frozen
from tltlab.sim.options import LogCosts, LogWorkers, RlSteps
from tltlab.sim.verification.training_log import LogFit, fit_log, is_log
from tltlab.traces.trace import Trace

TABLES = (".csv", ".parquet")
"""Endings of tables of measured iterations."""


@frozen
class CalibrateConfig:
    """Settings of `fit_all`, the options of `tltlab calibrate`; `outs` and `targets` have the outputs by field."""

    out: Path | None = option("Where the cost model goes (JSON).", parse=Path)
    acceptance_out: Path | None = option(
        "Where the acceptance model goes. [default: acceptance.json beside --out]", parse=Path
    )
    rl_steps: RlSteps = None
    kind: str = option(f"Kind of costs: {', '.join(KINDS)}.", "linear")
    gpu: str | None = option("GPU of the data, such as H100, or a JSON file: gives a table its shape.")
    model: str | None = option("Model of the data, such as Qwen2.5-32B, or its config.json.")
    tp: int | None = option("GPUs that each worker ran on.")
    acceptance: str = option(f"Kind of acceptance: {', '.join(ACCEPTANCE_KINDS)}.", "by-batch")
    stages_out: Path | None = option(
        "Fit inference, reward, train and sync times too, and write them here.", parse=Path
    )
    spot_out: Path | None = option(
        "Fit drafter training on idle workers too, for simulate --spot-training.", parse=Path
    )
    log_costs: LogCosts = None
    workers: LogWorkers = None

    def __post_init__(self) -> None:
        check(self)
        if not self.targets:
            raise ConfigError(
                "nothing to fit: name an output, --out COSTS.json for costs, or --acceptance-out, --stages-out "
                "or --spot-out"
            )

    @property
    def outs(self) -> dict[str, Path | None]:
        names = ("out", "acceptance_out", "stages_out", "spot_out")
        return {name: getattr(self, name) for name in names}

    @property
    def targets(self) -> list[str]:
        return [name for name, path in self.outs.items() if path is not None]

    def chosen(self, trace: Trace) -> Trace:
        """Return the trace of the RL steps that are named."""
        steps = parse_rl_steps(self.rl_steps, trace.rl_steps)
        return trace if steps is None else trace.select(steps)


def fit_all(source: Path, config: CalibrateConfig) -> tuple[Fits, dict[str, Path | None]]:
    """Fit what was asked for; with the paths to write to, None where there is nothing to write."""
    machine, targets, outs = hardware(config.gpu, config.model, config.tp), config.targets, config.outs
    is_history = source.suffix == ".csv" and source.is_file() and guess(source) == "metrics"
    if (is_history or source.suffix not in TABLES) and is_log(trace := read(source)):
        if targets not in (["out"], ["out", "stages_out"]):
            raise ConfigError(f"{source} has no iterations: only costs (--out) and --stages-out can be fitted to it")
        if machine is not None or config.kind != "linear":
            raise ConfigError("--kind, --gpu, --model and --tp are for iterations: name a log's engine by --log-costs")
        trace = config.chosen(trace)
        stages = fit_stages(trace) if config.stages_out else None
        return Fits(log=fit_log(trace, config.log_costs, config.workers), stages=stages), outs
    if config.log_costs is not None or config.workers is not None:
        raise ConfigError("--log-costs and --workers are for training logs: traces with iterations have their own")
    if source.is_file():
        if targets != ["out"] or config.acceptance != "by-batch":
            raise ConfigError(f"{source} is a table of measured iterations: only costs (--out) can be fitted to it")
        return Fits(costs=fit_points(_points(source, config.rl_steps), config.kind, machine)), outs
    trace = config.chosen(read(source))
    if config.out is not None and trace.iterations is None and trace.acceptance is not None:
        raise ConfigError(
            f"{source} has no iterations.parquet to fit costs to, but an acceptance.parquet: leave --out away "
            "and name the output with --acceptance-out"
        )
    if config.out is not None and config.acceptance_out is None:
        outs["acceptance_out"] = config.out.parent / "acceptance.json"
    fits = Fits(
        costs=fit_trace(trace, config.kind, machine) if outs["out"] else None,
        acceptance=fit_kind(trace, config.acceptance) if outs["acceptance_out"] else None,
        stages=fit_stages(trace) if outs["stages_out"] else None,
        spot=fit_spot(trace) if outs["spot_out"] else None,
    )
    if fits.acceptance is not None and fits.acceptance.model is None:
        if config.out is None:
            raise ConfigError(f"{source}: {'; '.join(fits.acceptance.notes)}")
        outs["acceptance_out"] = None
    return fits, outs


def hardware(gpu: str | None, model: str | None, tp: int | None) -> Hardware | None:
    """Hardware of the measurements, None where none was named; ConfigError for a part of it or an unknown name."""
    if gpu is None and model is None and tp is None:
        return None
    if gpu is None or model is None or tp is None:
        missing = [f"--{name}" for name, value in (("gpu", gpu), ("model", model), ("tp", tp)) if value is None]
        raise ConfigError(f"GPU, model and tp belong together: give {' and '.join(missing)} too")
    with faults_in("hardware"):
        return Hardware(gpu=listed(find_gpu(gpu)), model=listed(find_model(model)), tp=tp)


@frozen
class Fits:
    """Models that one call fitted; None where a model was not requested."""

    costs: CostFit | None = None
    log: LogFit | None = None
    acceptance: AcceptanceFit | None = None
    stages: StageFit | None = None
    spot: SpotFit | None = None

    def models(self) -> dict[str, BaseModel | None]:
        """Return the models by output."""
        fits = (
            ("out", self.costs or self.log, "costs"), ("acceptance_out", self.acceptance, "model"),
            ("stages_out", self.stages, "costs"), ("spot_out", self.spot, "model"),
        )  # fmt: skip
        return {name: getattr(fit, attribute, None) for name, fit, attribute in fits}

    @property
    def notes(self) -> list[str]:
        costs = fitted.costs.notes if (fitted := self.costs or self.log) else ()
        fit_notes = [fit.notes for fit in (self.acceptance, self.spot) if fit is not None]
        return list(dict.fromkeys([*costs, *(note for notes in fit_notes for note in notes)]))

    def json(self, outs: Mapping[str, Path | None]) -> Json:
        """The keys of `tltlab calibrate --json`."""
        keys = ("kind", "costs", "residuals", "sums", "cross_validation", "held_out_error", "acceptance", "stages",
                "spot")  # fmt: skip
        data: Json = dict.fromkeys(keys)
        if (fit := self.costs) is not None:
            data |= {
                "kind": fit.kind,
                "costs": fit.costs.model_dump(mode="json", exclude={"notes"}),
                "residuals": _records(fit.residuals),
                "sums": _records(fit.sums),
                "cross_validation": _records(fit.cross_validation),
                "held_out_error": fit.held_out_error,
            }
        if (log := self.log) is not None:
            data |= {"kind": "log", "costs": log.costs.model_dump(mode="json", exclude={"notes"}), "log": log.json()}
        if (accepted := self.acceptance) is not None and accepted.model is not None:
            data["acceptance"] = {"kind": accepted.model.kind, **_freshness(accepted.model)}
        if (stages := self.stages) is not None:
            data["stages"] = {"costs": stages.costs.model_dump(mode="json"), "held_out": _records(stages.residuals)}
        if (spot := self.spot) is not None:
            data["spot"] = {
                "model": spot.model.model_dump(mode="json"),
                "residuals": _records(spot.residuals),
            }
        return data | {"notes": self.notes} | {name: None if path is None else str(path) for name, path in outs.items()}

    def text(self) -> str:
        """The same for people."""
        parts = []
        if (fit := self.costs) is not None:
            parts += [
                _named(_terms(fit.costs), "not identified"),
                residuals_table(fit.residuals, fit.sums),
                held_out_table(fit.cross_validation),
            ]
        if self.log is not None:
            parts.append(self.log.text())
        if (accepted := self.acceptance) is not None and accepted.model is not None:
            parts.append(f"acceptance {accepted.model.kind}, of {', '.join(accepted.model.drafters)}")
            if by_age := _freshness(accepted.model):
                parts.append(_named(by_age))
        if self.stages is not None:
            parts.append(self.stages.table())
        if (spot := self.spot) is not None:
            parts += [_named({name: getattr(spot.model, name) for name in _SPOT_TERMS}), spot.table()]
        return "\n\n".join(parts) + "".join(f"\nnote: {note}" for note in self.notes)


_SPOT_TERMS = (
    "samples_per_s", "samples_per_update", "sample_tokens", "scaling_efficiency", "start_s", "join_s",
    "checkpoint_every", "checkpoint_s", "yield_s",
)  # fmt: skip


def _freshness(model: Acceptance) -> Json:
    """Return how acceptance depends on the drafter's age and updates; empty where it does not."""
    return dict(model.freshness) if isinstance(model, FreshAcceptance) else {}


def _named(values: Mapping[str, float | None], unknown: str = "never") -> str:
    return table([], [(name, unknown if value is None else f"{value:.4g}") for name, value in values.items()], left=2)


def _points(source: Path, rl_steps: str | None) -> pd.DataFrame:
    points = read_step_times(source)
    if rl_steps is None:
        return points
    if "rl_step" not in points:
        raise ConfigError(f"--rl-steps {rl_steps}: {source} has no column rl_step")
    chosen = parse_rl_steps(rl_steps, sorted(points["rl_step"].unique().tolist()))
    return points[points["rl_step"].isin(chosen or [])].reset_index(drop=True)


def _records(frame: pd.DataFrame) -> list[dict[Any, Any]]:
    """Rows for JSON: what is not known is null."""
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


def _terms(costs: CostModel) -> dict[str, float | None]:
    named: dict[str, float | None] = {}
    if isinstance(costs, TableCosts):
        named |= {f"{k.tokens:g} tokens": k.seconds for k in costs.forward}
        named |= {f"batch {k.batch}, attention fixed_s": k.fixed_s for k in costs.attention}
        named |= {f"batch {k.batch}, per_context_s": k.per_context_s for k in costs.attention}
    named |= {name: value for name, value in costs.model_dump().items() if name.endswith("_s") and name != "switch_s"}
    if costs.noise is not None:
        named["noise (spread, relative)"] = costs.noise.spread
    return named
