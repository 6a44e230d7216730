"""What is known of a run: its trace, its events and logs, its settings, and how long plain decoding would take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from tltlab.arrays import Flags, Floats
from tltlab.calibration.iterations import recorded_rows
from tltlab.calibration.linear import fit_recorded, predict
from tltlab.costs.base import CostModel, LinearCosts
from tltlab.costs.load import load_costs
from tltlab.errors import TltlabError, TraceError
from tltlab.files import parse_json, read_object
from tltlab.importers.sources import read
from tltlab.policies.policy import SHIPPED, Policy
from tltlab.stats import Interval, paired_interval
from tltlab.strategy import NO_SPECULATION
from tltlab.traces.recording import recording_of
from tltlab.traces.trace import Trace

from .finding import NotChecked

ENOUGH_PLAIN = 50
"""Plain iterations from which a fit has several per term: four terms, and single iterations vary by some 10 %."""

ENOUGH_STEPS = 3
"""RL steps below which an interval over RL steps says nothing."""

COSTS_MAY_MISS = 0.15
"""Share by which costs from elsewhere may miss this run's time before nothing is concluded from them."""

LOG_TAIL_BYTES = 1 << 20
"""What is read of a log: what a run died of stands at its end."""

_BATCH_SLACK = 1.25
"""How far beyond the batches it was fitted to the plain time is believed: it is linear, and a band is 2 wide."""


@dataclass(frozen=True, kw_only=True)
class PlainTimes:
    """How long plain decoding takes: costs, the batches they were seen at, and where they are from."""

    costs: CostModel
    batches: tuple[float, float]
    source: str

    def seconds(self, batch: npt.ArrayLike, context: npt.ArrayLike) -> Floats:
        """Seconds of plain iterations of `batch` requests whose contexts sum to `context` tokens."""
        sizes, at = np.unique(np.asarray(batch, np.int64), return_inverse=True)
        cost = self.costs.iteration(NO_SPECULATION)
        fixed = np.array([cost.without_context_s(int(size)) for size in sizes])
        slope = np.array([cost.context_slope_s(int(size)) for size in sizes])
        seconds: Floats = fixed[at] + slope[at] * np.asarray(context, np.float64)
        return seconds

    def covers(self, batch: npt.ArrayLike) -> Flags:
        """Which batches lie within, or close to, those seen."""
        least, most = self.batches
        sizes = np.asarray(batch, np.float64)
        return (sizes >= least / _BATCH_SLACK) & (sizes <= most * _BATCH_SLACK)


@dataclass(frozen=True, kw_only=True)
class RunEvidence:
    """A run as its checks see it; what is not there is empty or None.

    `trace_complaint` says why there is no trace. `events` are the lines of events.jsonl, `logs` the ends of log files
    by name, `recipe` what run.json resolved, `policies` what was in force from which RL step on.
    """

    trace: Trace | None = None
    trace_complaint: str = ""
    unfinished: Path | None = None
    events: tuple[Mapping[str, Any], ...] = ()
    logs: Mapping[str, str] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    policies: tuple[tuple[int, str, Policy], ...] = ()
    costs: CostModel | None = None

    @classmethod
    def of(cls, run: str | Path | Trace, costs: str | Path | CostModel | None = None) -> RunEvidence:
        """Gather what a RUN folder, a trace folder or a Trace tells; `costs` say what plain decoding takes.

        Without `costs` the run's plain iterations tell it, or else its costs.json. Raises TraceError for a folder that
        holds no run, and for a damaged trace.
        """
        model = load_costs(str(costs)) if isinstance(costs, str | Path) else costs
        if isinstance(run, Trace):
            return cls(trace=run, costs=model)
        run = Path(run)
        trace, complaint, unfinished = _trace_of(run)
        folders = [run] if trace is None or trace.path in (None, run) else [run, trace.path]
        if model is None:
            model = next((load_costs(str(f / "costs.json")) for f in folders if (f / "costs.json").is_file()), None)
        return cls(
            trace=trace,
            trace_complaint=complaint,
            unfinished=unfinished,
            events=json_lines(run / "events.jsonl"),
            logs=_logs(run),
            recipe=read_object(run / "run.json").get("recipe") or {},
            policies=next((policies for f in folders if (policies := _policies(f))), ()),
            costs=model,
        )

    @property
    def known(self) -> Trace:
        """The trace. Raises NotChecked where there is none."""
        if self.trace is None:
            raise NotChecked(self.trace_complaint or "there is no trace")
        return self.trace

    def setting(self, name: str, default: Any = None) -> Any:
        """A recipe's setting by its dotted name, `default` where it is not known."""
        value: Any = self.recipe
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None else value

    @cached_property
    def iterations(self) -> pd.DataFrame:
        """The iterations in order of time. Raises NotChecked where none were recorded."""
        table = self.known.iterations
        if table is None or table.empty:
            raise NotChecked("the trace has no iterations (a simulation writes them with --record-iterations)")
        return table.sort_values(["rl_step", "worker", "iteration"], kind="stable", ignore_index=True)

    @cached_property
    def decoding(self) -> pd.DataFrame:
        """Iterations without prefill, of RL steps whose policy was not there to explore. Raises NotChecked."""
        table = self.iterations
        table = table[(table["prefill_tokens"] == 0) & ~table["rl_step"].isin(self.exploring)]
        if table.empty:
            raise NotChecked("all RL steps ran under policy explore, which tries everything on purpose")
        return table

    @cached_property
    def speculating(self) -> pd.DataFrame:
        """Those of `decoding` that verified, or could have verified, drafts. Raises NotChecked where none did."""
        table = self.decoding[self.decoding["draft_depth"] > 0]
        if table.empty:
            raise NotChecked("nothing was speculated outside policy explore")
        return table

    @cached_property
    def spot_training(self) -> pd.DataFrame:
        """Periods of drafter training on idle workers. Raises NotChecked where there was none."""
        rows = self.known.spot_training
        if rows is None or rows.empty:
            raise NotChecked("no drafter was trained on idle workers in this trace")
        return rows

    @cached_property
    def policy_of_step(self) -> dict[int, tuple[str, Policy | None]]:
        """Name and, where known, settings of the policy in force in each RL step."""
        steps = self.known.steps
        names = {} if steps is None else dict(zip(steps["rl_step"], steps["policy"], strict=True))
        policies: dict[int, tuple[str, Policy | None]] = {}
        for rl_step in self.known.rl_steps:
            in_force = [entry for entry in self.policies if entry[0] <= rl_step]
            name = str(names.get(rl_step) or (in_force[-1][1] if in_force else "unknown"))
            policies[rl_step] = (name, in_force[-1][2] if in_force else _named(name))
        return policies

    @cached_property
    def exploring(self) -> list[int]:
        """RL steps whose policy only explores, to be recorded: nobody means them to be fast."""
        return [
            rl_step
            for rl_step, (name, policy) in self.policy_of_step.items()
            if name == "explore" or (policy is not None and policy.selector.kind == "explore")
        ]

    @cached_property
    def plain(self) -> PlainTimes:
        """What plain decoding takes: from the run's own plain iterations, else from `costs`. Raises NotChecked."""
        table = self.iterations
        table = table[(table["draft_depth"] == 0) & (table["prefill_tokens"] == 0) & (table["duration"] > 0)]
        if len(table) >= ENOUGH_PLAIN and table["batch"].nunique() > 1:
            rows = recorded_rows(table)
            costs, _ = fit_recorded(rows)
            terms = {n: getattr(costs, n) or 0.0 for n in LinearCosts.model_fields if n.endswith("_s")}
            span = rows.covered.batch
            assert span is not None
            return PlainTimes(
                costs=costs.model_copy(update=terms),
                batches=(span[0], span[1]),
                source=f"predicted from {len(table)} plain iterations of this run",
            )
        if self.costs is not None:
            self._check_costs(self.costs)
            span = self.costs.calibrated.batch if self.costs.calibrated else None
            return PlainTimes(costs=self.costs, batches=span or (0.0, np.inf), source="predicted by the costs given")
        raise NotChecked(
            f"{len(table)} plain iterations are too few to know what plain decoding takes: run an RL step under policy "
            "none, or give a cost file with --costs"
        )

    def _check_costs(self, costs: CostModel) -> None:
        """Raise NotChecked where costs do not describe the engine of this run: they miss what its drafts took."""
        if not isinstance(costs, LinearCosts):
            return
        table = self.iterations[self.iterations["prefill_tokens"] == 0]
        off = float(predict(costs, recorded_rows(table)).sum() / table["duration"].sum())
        if abs(off - 1) > COSTS_MAY_MISS:
            raise NotChecked(
                f"the costs at hand are not this run's: they predict {off:.2f} of the time that its iterations took; "
                "run an RL step under policy none and calibrate this run"
            )


def ratio(measured: Sequence[float] | Floats, reference: Sequence[float] | Floats) -> Interval:
    """Sum of `measured` over sum of `reference` with its 95 % interval over RL steps; the same for the same data."""
    return paired_interval(measured, reference, rng=np.random.default_rng(0))


def with_ends(interval: Interval) -> str:
    """An estimate with its interval: '1.20 (1.10 to 1.30)'."""
    return f"{interval.estimate:.2f} ({interval.low:.2f} to {interval.high:.2f})"


def accepted_pairs(table: pd.DataFrame) -> pd.Series:
    """(request, iteration) pairs of each row, as `metrics.mean_accept_length` counts them."""
    lengths = table["accepted_per_request"].astype(object).str.len()
    return lengths.astype(np.float64).fillna(table["batch"])


def _trace_of(run: Path) -> tuple[Trace | None, str, Path | None]:
    """The trace, or why there is none, and a recording that was never finished. Raises TraceError."""
    places = [run, run / "trace"]
    unfinished = next((recording_of(place) for place in places if recording_of(place).is_dir()), None)
    try:
        trace = read(run)
        if unfinished is not None and not trace.rl_steps:
            return None, f"the recording {unfinished} was never finished and has no whole response", unfinished
        return trace, "", unfinished
    except TraceError as error:
        if unfinished is not None:
            return None, f"the recording {unfinished} was never finished, and cannot be read: {error}", unfinished
        if not any((run / name).is_file() for name in ("run.json", "events.jsonl")) or (run / "trace").exists():
            raise
        return None, f"{run} has no trace ({error})", None


def json_lines(path: Path) -> tuple[dict[str, Any], ...]:
    """The objects of a JSON-lines file, none where there is no file; a torn last line is left out."""
    values = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        with suppress(ValueError):
            values.append(parse_json(line))
    return tuple(value for value in values if isinstance(value, dict))


def _logs(run: Path) -> dict[str, str]:
    """The ends of the run's log files."""
    tails = {}
    for path in sorted([*run.glob("*.log"), *run.glob("logs/*.log")]):
        with suppress(OSError), path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            tails[path.name] = file.read().decode(errors="replace")
    return tails


def _named(name: str) -> Policy | None:
    """A shipped policy, or the file that a simulation was given, where it is still there."""
    if name in SHIPPED or not name.endswith(".json"):
        return SHIPPED.get(name)
    try:
        return Policy.model_validate(read_object(Path(name)), context={"folder": Path(name).parent})
    except (ValueError, TltlabError):
        return None


def _policies(folder: Path) -> tuple[tuple[int, str, Policy], ...]:
    """(first RL step, name, policy) of policies.json, else policy.json from RL step 0 on."""
    entries = read_object(folder / "policies.json").get("policies") or []
    if not entries and (single := read_object(folder / "policy.json")):
        entries = [{"rl_step": 0, "name": None, "policy": single}]
    policies = []
    for entry in entries:
        try:
            policy = Policy.model_validate(entry["policy"], context={"folder": folder})
            policies.append((int(entry["rl_step"]), str(entry.get("name") or policy.selector.kind), policy))
        except (KeyError, TypeError, ValueError, TltlabError):
            # Written by another version, or naming a class that is not installed here: then it is not known.
            continue
    return tuple(sorted(policies, key=lambda entry: entry[0]))
