"""Engine profiles against measurements: errors inside the joint fit and on models, GPUs and engines left out of it.

`shipped` makes `tltlab/costs/profiles.json` anew. The measurements are other people's tables, which are not part of the
package (`tltlab.bench.published.profile_data`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from tltlab.arrays import Floats
from tltlab.bench.published.profile_data import EAGLE3_VOCAB, KERNEL_GPUS, measurements
from tltlab.bench.published.profiles import DRAFTING, PRIORS, Param, fit, predict, set_names, uncertainty
from tltlab.calibration.cross_validation import nine_in_ten
from tltlab.costs.evidence import SPECULATING
from tltlab.costs.profiles import Efficiencies, EngineProfile, LeftOut, MeasurementSet, Profiles, Quantised
from tltlab.costs.roofline import Numbers
from tltlab.hardware import model

FOLDS = {"model": "model", "gpu": "gpu", "engine": "family"}
"""What is left out, and by which column; kernel tables are no engine and stay."""
COLUMNS = (
    "source", "what", "n_points", "used_for_fit", "mean_abs_error", "max_abs_error", "note", "pooled", "left_out",
    "bias", "median_abs_error", "inside",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    """One profile: family and version in the fit, other versions that speak for it, and the drafter's vocabulary."""

    family: str
    version: str
    also: tuple[str, ...] = ()
    versions: str
    draft_vocab: int | None = EAGLE3_VOCAB


ENGINES = {
    "vllm": Shipped(family="vllm", version="0.18", also=("0.19",), versions="vLLM V1, 0.18 and 0.19"),
    "vllm-0.12": Shipped(family="vllm", version="0.12", versions="vLLM V1, 0.12"),
    "sglang": Shipped(family="sglang", version="0.5", versions="SGLang 0.5"),
    "sglang-0.4": Shipped(
        family="sglang", version="0.4", versions="SGLang 0.4 and TLT's, which is made of it", draft_vocab=None
    ),
    "tensorrt-llm": Shipped(family="tensorrt-llm", version="1.0", versions="TensorRT-LLM 1.0"),
}
NO_DRAFTS = (
    "No speculation was measured with this engine: its drafting terms are what other engines have in common, pooled."
)
TREE_CONTEXT = "TLT gives no context for its speed-ups: {:.0f} tokens per request fit best."


@dataclass(frozen=True, kw_only=True)
class ProfileFit:
    """`table` has a row per measurement: its `set`, `error` inside the fit and, once validated, one by fold.

    `open` is the standard deviation that the fit's parameters leave to its prediction, relative.

    `model_error`, `gpu_error` and `engine_error` are relative too, of fits without that model, GPU or engine's family.
    """

    values: dict[Param, float]
    table: pd.DataFrame

    def term(self, name: str, *, gpu: str = "", family: str = "", version: str = "") -> float:
        """A term for a GPU, a family and a version of it; a level without a name is left at its typical value."""
        levels = {"": "", "gpu": gpu, "family": family, "version": f"{family} {version}"}
        deviation = sum(self.values.get((name, level, value), 0.0) for level, value in levels.items())
        return PRIORS[name].typical * float(np.exp(deviation))


@cache
def fitted(data: Path) -> ProfileFit:
    """All measurements in one fit; ConfigError where a file is missing."""
    table = measurements(data)
    values = fit(table)
    errors = table.assign(set=set_names(table), error=_errors(table, values), open=uncertainty(table, values, table))
    return ProfileFit(values=values, table=errors)


@cache
def validated(data: Path) -> ProfileFit:
    """The fit, with each model, GPU and family of engines left out of another fit in turn and predicted by that."""
    fitting = fitted(data)
    table = fitting.table
    engine = table["family"] != "kernels"
    for fold, column in FOLDS.items():
        errors = pd.Series(np.nan, table.index)
        for value in table.loc[engine, column].unique():
            fold_rows = engine & (table[column] == value)
            errors[fold_rows] = _errors(table[fold_rows], fit(table[~fold_rows], fitting.values, tolerance=1e-4))
        table = table.assign(**{f"{fold}_error": errors})
    return ProfileFit(values=fitting.values, table=table)


def shipped(fitting: ProfileFit) -> Profiles:
    """The profiles of a fit, four digits each; left-out errors where the fit has been validated."""
    table = fitting.table[fitting.table["family"] != "kernels"]
    gpus = sorted(table["gpu"].unique())
    return Profiles(
        knee=_round(fitting.term("knee")),
        expert_spread=_round(fitting.term("expert_spread")),
        quantised=Quantised(
            memory=_round(fitting.term("quantised_memory")), compute=_round(fitting.term("quantised_compute"))
        ),
        typical=_efficiencies(fitting, ""),
        gpus={name: _efficiencies(fitting, name) for name in gpus},
        engines={name: _engine(fitting, name, of) for name, of in ENGINES.items()},
        provenance=(
            f"Fitted jointly by tltlab.bench.profiles to {len(table)} published measurements of engines "
            f"(AIConfigurator, SpecBundle, EfficientRollout, LLMServingSim, TLT arXiv 2511.16665, EAGLE-3 arXiv "
            f"2503.01840) and sums of kernels on {', '.join(KERNEL_GPUS)} (AIConfigurator, Apache-2.0).",
            "Efficiencies are by GPU, terms by engine; where few were measured they stay near what all have in common.",
        ),
    )


def rows(data: Path, *, left_out: bool = True) -> pd.DataFrame:
    """Relative errors per set of measurements, inside the fit and by what was left out, and biases by size of model.

    `left_out` names that, "" inside the fit; `bias` is the median of signed errors. `inside` is the share of points
    in their 90 % intervals, of what was left out those that the engine's other sets give; nan for a set in no profile.
    Rows that are `pooled` hold all sets of an engine, or of a size. Without `left_out` errors inside the fit alone:
    leaving out takes a fit for each model, GPU and engine.
    """
    fitting = validated(data) if left_out else fitted(data)
    table = fitting.table[fitting.table["family"] != "kernels"]
    table = table.assign(
        engine=(table["family"] + " " + table["version"]).str.strip(),
        asked=np.where(table["draft_depth"] > 0, "speed-up", "plain"),
        **{f"{fold}_inside": np.nan for fold in ("", *FOLDS)},
    )
    _mark_inside(table, shipped(fitting))
    table_rows: list[tuple[object, ...]] = []
    for column in ("set", "engine"):
        for _, part in table.groupby([column, "asked"], sort=False):
            first = part.iloc[0]
            of = (
                f", {first['model']} {first['weights']} on {first['gpu']} ({first['source']})"
                if column == "set"
                else ""
            )
            for fold in ("", *(FOLDS if left_out else ())):
                table_rows.append(_row(first["engine"], f"{first['asked']}{of}", part, fold, pooled=not of))
    return pd.DataFrame([*table_rows, *(_by_size(table) if left_out else ())], columns=list(COLUMNS))


def _mark_inside(table: pd.DataFrame, ships: Profiles) -> None:
    """Which errors lie in the interval that the measurements' own profile gives, or what it has left without them."""
    for name, profile in ships.engines.items():
        parts = _rows_of(table, ENGINES[name]).groupby("set", sort=False)
        for measured, (_, part) in zip(profile.measured, parts, strict=True):
            remaining = profile.model_copy(update={"measured": tuple(m for m in profile.measured if m is not measured)})
            without = ships.model_copy(update={"engines": ships.engines | {name: remaining}})
            shape, kind = model(measured.model), SPECULATING if measured.draft_depth else ""
            bounds = {fold: most for fold, (_, most) in without.left_out(name, shape.experts > 0).items()}
            evidence = ships.evidence(name, measured.gpu, shape, measured.weights)
            bounds[kind] = (evidence.speedup_error() if kind else evidence.error()) or 0.0
            for fold in ("", *FOLDS):
                if bound := bounds.get(fold + kind):
                    size = part[_column(fold)].abs()
                    table.loc[part.index, f"{fold}_inside"] = (size <= bound).astype(float)


def _by_size(table: pd.DataFrame) -> list[tuple[object, ...]]:
    """Dense models, plain: errors by size with the model left out."""
    sizes = {name: model(name).stored_params / 1e9 for name in table["model"].unique() if not model(name).experts}
    plain = table[(table["asked"] == "plain") & table["model"].isin(list(sizes))]
    size = plain["model"].map(sizes)
    table_rows = []
    for least, most in ((0.0, 5.0), (5.0, 10.0), (10.0, 40.0), (40.0, 200.0)):
        part = plain[(size >= least) & (size < most)]
        if len(part):
            names = ", ".join(sorted(part["model"].unique()))
            table_rows.append(_row("all engines", f"plain, dense, {names}", part, "model", pooled=True))
    return table_rows


def _row(source: str, what: str, part: pd.DataFrame, fold: str, *, pooled: bool) -> tuple[object, ...]:
    error = part[_column(fold)]
    size, bias, inside = error.abs(), float(error.median()), float(part[f"{fold}_inside"].mean())
    note = f"bias {bias:+.1%}, median {size.median():.1%}"
    how = f"{fold} left out" if fold else "fitted"
    errors = float(size.mean()), float(size.max()), note, pooled, fold, bias, float(size.median()), inside
    return source, f"{what}: {how}: {note}", len(error), not fold, *errors


def _column(fold: str) -> str:
    return f"{fold}_error" if fold else "error"


def _errors(table: pd.DataFrame, values: dict[Param, float]) -> Floats:
    return np.asarray(predict(table, values) / table["measured"].to_numpy(np.float64) - 1, np.float64)


def _efficiencies(fitting: ProfileFit, gpu: str) -> Efficiencies:
    names = ("memory", "compute", "kv", "link", "launch")
    return Efficiencies(**{name: _round(fitting.term(name, gpu=gpu)) for name in names})


def _engine(fitting: ProfileFit, name: str, of: Shipped) -> EngineProfile:
    table = fitting.table
    measurements = _rows_of(table, of)
    at = {"family": of.family, "version": of.version}
    seconds = (
        "step_s", "layer_s", "qk_norm_layer_s", "quantised_layer_s", "expert_layer_s", "allreduce_s", "per_request_s",
        *DRAFTING,
    )  # fmt: skip
    notes = []
    if not (measurements["draft_depth"] > 0).any():
        notes.append(NO_DRAFTS)
    if (measurements["source"] == "TLT").any():
        notes.append(TREE_CONTEXT.format(fitting.term("context_tokens")))
    return EngineProfile(
        engine=name,
        versions=of.versions,
        memory=_round(fitting.term("memory", **at) / fitting.term("memory")),
        prefill_efficiency=_round(fitting.term("prefill", **at)),
        expert_efficiency=_round(fitting.term("expert_efficiency", **at)),
        draft_vocab=of.draft_vocab,
        measured=tuple(_measured(part) for _, part in measurements.groupby("set", sort=False)),
        notes=tuple(notes),
        **{term: _round(fitting.term(term, **at)) for term in seconds},
    )


def _rows_of(table: pd.DataFrame, of: Shipped) -> pd.DataFrame:
    return table[(table["family"] == of.family) & table["version"].isin([of.version, *of.also])]


def _measured(part: pd.DataFrame) -> MeasurementSet:
    first = part.iloc[0]
    served = part["input_tokens"].notna()
    context = part["context_tokens"].where(~served, part["input_tokens"] + part["output_tokens"] / 2).dropna()
    drafted = part["draft_depth"][part["draft_depth"] > 0]
    return MeasurementSet(
        gpu=first["gpu"],
        model=first["model"],
        weights=first["weights"],
        tp=tuple(sorted({int(tp) for tp in part["tp"]})),
        batch=_span(part["batch"]),
        context_tokens=_span(context) if len(context) else (0.0, 0.0),
        draft_depth=_span(drafted) if len(drafted) else None,
        source=first["source"],
        fitted=_fold_errors(part["error"]),
        parameter=nine_in_ten(part["open"].to_numpy(np.float64)),
        left_out={fold: _fold_errors(part[f"{fold}_error"]) for fold in FOLDS if f"{fold}_error" in part},
    )


def _span(values: pd.Series[float]) -> tuple[float, float]:
    return _round(float(values.min())), _round(float(values.max()))


def _fold_errors(error: pd.Series[float]) -> LeftOut:
    size = error.abs()
    numbers = (error.median(), size.median(), size.quantile(0.9), size.max())
    bias, median, most, worst = (round(float(number), 4) for number in numbers)
    return LeftOut(num_points=len(error), bias=bias, median=median, most=most, worst=worst)


def _round(value: Numbers) -> float:
    return float(f"{value:.4g}")
