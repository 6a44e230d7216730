"""Engine profiles against measurements: errors inside the joint fit and on models, GPUs and engines left out of it.

`shipped` makes `tltlab/costs/profiles.json` anew, `set_errors` the errors of each set that these are pooled from,
`profile_errors.json`. The measurements are other people's tables, which are not part of the
package (`bench.presets.profile_data`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
from pydantic import Field, TypeAdapter

from bench.presets.profile_data import EAGLE3_VOCAB, KERNEL_GPUS, VLLM, measurements
from bench.presets.profile_fit import DRAFTING, PRIORS, Param, fit, predict, set_names, uncertainty
from tltlab.arrays import Floats
from tltlab.calibration.cross_validation import nine_in_ten
from tltlab.config import FrozenModel
from tltlab.costs.evidence import LEVEL, SPECULATING
from tltlab.costs.profiles import Efficiencies, EngineProfile, MeasurementSet, Profiles, Quantised
from tltlab.costs.roofline import Numbers
from tltlab.hardware import model

ENOUGH_SETS = 5
"""Sets of measurements from which on an engine has left-out errors of its own."""
FOLDS = {"model": "model", "gpu": "gpu", "engine": "family", "weights": "weights"}
"""What is left out, and by which column; kernel tables are no engine and stay, and so do weights in bf16."""
COLUMNS = (
    "source", "what", "n_points", "used_for_fit", "mean_abs_error", "max_abs_error", "note", "pooled", "left_out",
    "bias", "median_abs_error", "inside", "sign",
)  # fmt: skip
NO_DIFFERENCE = 0.03
"""Measured speed-ups that are nearer to 1 have no sign: repeats of one cell differ by as much."""


class LeftOut(FrozenModel):
    """Relative errors of predictions: `bias` the median of the signed ones, `most` what nine in ten do not exceed."""

    num_points: Annotated[int, Field(gt=0)]
    bias: float
    median: Annotated[float, Field(ge=0)]
    most: Annotated[float, Field(ge=0)]
    worst: Annotated[float, Field(ge=0)]

    @property
    def spread(self) -> tuple[float, float, float]:
        return self.median, self.most, self.worst


class SetErrors(FrozenModel):
    """Errors of one set of measurements inside the fit, and by what was left out of it."""

    fitted: LeftOut
    left_out: dict[str, LeftOut] = Field(default_factory=dict)


ByEngine = Mapping[str, list[tuple[MeasurementSet, SetErrors]]]
"""The sets of each engine, with their errors."""


def shipped_errors() -> dict[str, list[SetErrors]]:
    """The errors of each set behind the profiles that ship, by engine and in the order of its `measured`."""
    text = Path(__file__).with_name("profile_errors.json").read_text()
    return TypeAdapter(dict[str, list[SetErrors]]).validate_json(text)


def pooled_by_fold(sets: ByEngine, engine: str, experts: bool) -> dict[str, tuple[float, float]]:
    """By fold, plain and speculating apart, of models with or without experts: (median, nine in ten) of the errors.

    An engine with fewer than `ENOUGH_SETS` sets in a fold has the errors of all engines.
    """
    of_all: dict[str, list[LeftOut]] = {}
    of_engine: dict[str, list[LeftOut]] = {}
    for name, pairs in sets.items():
        for measured, errors in pairs:
            if bool(model(measured.model).experts) == experts:
                for fold, error in errors.left_out.items():
                    key = fold + (SPECULATING if measured.draft_depth else "")
                    of_all.setdefault(key, []).append(error)
                    if name == engine:
                        of_engine.setdefault(key, []).append(error)
    enough = of_all | {fold: errors for fold, errors in of_engine.items() if len(errors) >= ENOUGH_SETS}
    # A further set is none of these: the fewer they are the larger a share of them it takes (conformal prediction).
    return {
        fold: (
            pooled([error.spread for error in errors], 0.5),
            pooled([error.spread for error in errors], min(LEVEL * (1 + 1 / len(errors)), 1.0)),
        )
        for fold, errors in enough.items()
    }


def pooled(errors: Iterable[tuple[float, float, float]], level: float = LEVEL) -> float:
    """The error that the share `level` of measurements does not exceed, sets of them counting alike.

    Each set is (median, what nine in ten do not exceed, worst), its distribution linear between those.

    >>> pooled([(0.1, 0.2, 0.3)]), pooled([(0.1, 0.2, 0.3), (0.0, 0.0, 0.0)], 0.75)
    (0.2, 0.1)
    """
    sets = [sorted(quantiles) for quantiles in errors]
    low, high = 0.0, max(quantiles[-1] for quantiles in sets)
    for _ in range(50):
        middle = (low + high) / 2
        if sum(_share_within(quantiles, middle) for quantiles in sets) / len(sets) < level:
            low = middle
        else:
            high = middle
    return round(high, 6)


def _share_within(errors: list[float], bound: float) -> float:
    """Share of a set's errors that do not exceed `bound`."""
    knots = zip([0.0, *errors], [0.0, 0.5, LEVEL, 1.0], strict=True)
    (at, share), *later = knots
    for error, below in later:
        if bound < error:
            return share + (below - share) * (bound - at) / (error - at)
        at, share = error, below
    return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    """One profile: family and version in the fit, and the drafter's vocabulary."""

    family: str
    version: str
    versions: str
    draft_vocab: int | None = EAGLE3_VOCAB


ENGINES = {
    "vllm": Shipped(family="vllm", version=VLLM, versions="vLLM V1, 0.18 to 0.24"),
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
    """`table` has a row per measurement: its `set`, `error` inside the fit and, once validated, one by fold; relative.

    `open` is the standard deviation that the fit's parameters leave to its prediction.
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
    """The fit, with each model, GPU, family of engines and type of weights left out of another fit in turn.

    That fit predicts what was left out of it, but for rows that lack something else in it as well: measurements of
    their weights' type, or any speculation of their engine's version.
    """
    fitting = fitted(data)
    table = fitting.table
    engine, drafting = table["family"] != "kernels", table["draft_depth"] > 0
    server = table["family"] + table["version"]
    for fold, column in FOLDS.items():
        errors = pd.Series(np.nan, table.index)
        for value in set(table.loc[engine, column]) - {"bf16"}:
            fold_rows = engine & (table[column] == value)
            rest = table[~fold_rows]
            lacking = ~table["weights"].isin(rest["weights"]) & (fold != "weights")
            lacking |= drafting & ~server.isin(server[drafting & ~fold_rows]) & (fold != "engine")
            if (predicted := fold_rows & ~lacking).any():
                errors[predicted] = _errors(table[predicted], fit(rest, fitting.values, tolerance=1e-4))
        table = table.assign(**{f"{fold}_error": errors})
    return ProfileFit(values=fitting.values, table=table)


def shipped(fitting: ProfileFit) -> Profiles:
    """The profiles of a fit, four digits each; left-out errors where the fit has been validated."""
    table = fitting.table[fitting.table["family"] != "kernels"]
    gpus = sorted(table["gpu"].unique())
    sets = set_errors(fitting)
    return Profiles(
        knee=_round(fitting.term("knee")),
        quantised=_quantised(fitting, "quantised"),
        int4=_quantised(fitting, "int4"),
        typical=_efficiencies(fitting, ""),
        gpus={name: _efficiencies(fitting, name) for name in gpus},
        engines={name: _engine(fitting, name, of, sets) for name, of in ENGINES.items()},
        provenance=(
            f"Fitted jointly to {len(table)} published measurements of engines "
            f"(AIConfigurator, SpecBundle, EfficientRollout, LLMServingSim, SpecDecoding-Study-vLLM-SGLang, TLT arXiv "
            "2511.16665, EAGLE-3 arXiv 2503.01840) and sums of kernels on "
            f"{', '.join(KERNEL_GPUS)} (AIConfigurator, Apache-2.0).",
            "Efficiencies are by GPU, terms by engine; where few were measured they stay near what all have in common.",
        ),
    )


def set_errors(fitting: ProfileFit) -> ByEngine:
    """Each engine's sets of measurements, with their errors; left-out ones where the fit has been validated."""
    parts = {name: _rows_of(fitting.table, of).groupby("set", sort=False) for name, of in ENGINES.items()}
    return {name: [_measured(part) for _, part in grouped] for name, grouped in parts.items()}


def rows(data: Path, *, left_out: bool = True) -> pd.DataFrame:
    """Relative errors per set of measurements, inside the fit and by what was left out.

    `left_out` names that, "" inside the fit; `bias` is the median of signed errors. `inside` is the share of points
    in their 90 % intervals, of what was left out those that the engine's other sets give. `sign` is the share of
    speed-ups predicted on the right side of 1, of those measured more than `NO_DIFFERENCE` from it. Rows that are
    `pooled` hold all sets of an engine. Without `left_out` errors inside the fit alone.
    """
    fitting = validated(data) if left_out else fitted(data)
    table = fitting.table[fitting.table["family"] != "kernels"]
    table = table.assign(
        engine=(table["family"] + " " + table["version"]).str.strip(),
        asked=np.where(table["draft_depth"] > 0, "speed-up", "plain"),
        **{f"{fold}_inside": np.nan for fold in ("", *FOLDS)},
    )
    _mark_inside(table, shipped(fitting), set_errors(fitting))
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
                if (known := part[part[_column(fold)].notna()]).size:
                    table_rows.append(_row(first["engine"], f"{first['asked']}{of}", known, fold, pooled=not of))
    return pd.DataFrame(table_rows, columns=list(COLUMNS))


def _mark_inside(table: pd.DataFrame, ships: Profiles, sets: ByEngine) -> None:
    """Which errors lie in the interval that the measurements' own profile gives, or what it has left without them."""
    for name, pairs in sets.items():
        parts = _rows_of(table, ENGINES[name]).groupby("set", sort=False)
        for (measured, _), (_, part) in zip(pairs, parts, strict=True):
            without = {**sets, name: [pair for pair in pairs if pair[0] is not measured]}
            shape, kind = model(measured.model), SPECULATING if measured.draft_depth else ""
            bounds = {fold: most for fold, (_, most) in pooled_by_fold(without, name, shape.experts > 0).items()}
            evidence = ships.evidence(name, measured.gpu, shape, measured.weights)
            bounds[kind] = (evidence.speedup_error() if kind else evidence.error()) or 0.0
            for fold in ("", *FOLDS):
                if bound := bounds.get(fold + kind):
                    size = part[_column(fold)].abs()
                    table.loc[part.index, f"{fold}_inside"] = (size <= bound).astype(float)


def _row(source: str, what: str, part: pd.DataFrame, fold: str, *, pooled: bool) -> tuple[object, ...]:
    error = part[_column(fold)]
    size, bias, inside = error.abs(), float(error.median()), float(part[f"{fold}_inside"].mean())
    differs = (part["draft_depth"] > 0) & ((part["measured"] - 1).abs() > NO_DIFFERENCE)
    sign = float((((part["measured"] * (1 + error)) > 1) == (part["measured"] > 1))[differs].mean())
    note = f"bias {bias:+.1%}, median {size.median():.1%}"
    how = f"{fold} left out" if fold else "fitted"
    errors = float(size.mean()), float(size.max()), note, pooled, fold, bias, float(size.median()), inside, sign
    return source, f"{what}: {how}: {note}", len(error), not fold, *errors


def _column(fold: str) -> str:
    return f"{fold}_error" if fold else "error"


def _errors(table: pd.DataFrame, values: dict[Param, float]) -> Floats:
    return np.asarray(predict(table, values) / table["measured"].to_numpy(np.float64) - 1, np.float64)


def _efficiencies(fitting: ProfileFit, gpu: str) -> Efficiencies:
    return Efficiencies(**{name: _round(fitting.term(name, gpu=gpu)) for name in Efficiencies.model_fields})


def _quantised(fitting: ProfileFit, kind: str) -> Quantised:
    return Quantised(**{rate: _round(fitting.term(f"{kind}_{rate}")) for rate in Quantised.model_fields})


def _engine(fitting: ProfileFit, name: str, of: Shipped, sets: ByEngine) -> EngineProfile:
    table = fitting.table
    measurements = _rows_of(table, of)
    at = {"family": of.family, "version": of.version}
    seconds = (
        "step_s", "layer_s", "qk_norm_layer_s", "quantised_layer_s", "quantised_kv_layer_s", "expert_layer_s",
        "allreduce_s", "per_request_s", "expert_spread", *DRAFTING,
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
        measured=tuple(measured for measured, _ in sets[name]),
        left_out={"dense": pooled_by_fold(sets, name, False), "experts": pooled_by_fold(sets, name, True)},
        notes=tuple(notes),
        **{term: _round(fitting.term(term, **at)) for term in seconds},
    )


def _rows_of(table: pd.DataFrame, of: Shipped) -> pd.DataFrame:
    return table[(table["family"] == of.family) & (table["version"] == of.version)]


def _measured(part: pd.DataFrame) -> tuple[MeasurementSet, SetErrors]:
    first = part.iloc[0]
    served = part["input_tokens"].notna()
    context = part["context_tokens"].where(~served, part["input_tokens"] + part["output_tokens"] / 2).dropna()
    drafted = part["draft_depth"][part["draft_depth"] > 0]
    fitted = _fold_errors(part["error"])
    validated_folds = [fold for fold in FOLDS if f"{fold}_error" in part and part[f"{fold}_error"].notna().all()]
    left_out = {fold: _fold_errors(part[f"{fold}_error"]) for fold in validated_folds}
    measured = MeasurementSet(
        gpu=first["gpu"],
        model=first["model"],
        weights=first["weights"],
        tp=tuple(sorted({int(tp) for tp in part["tp"]})),
        batch=_span(part["batch"]),
        context_tokens=_span(context) if len(context) else (0.0, 0.0),
        draft_depth=_span(drafted) if len(drafted) else None,
        source=first["source"],
        fitted=(fitted.median, fitted.most),
        parameter=nine_in_ten(part["open"].to_numpy(np.float64)),
    )
    return measured, SetErrors(fitted=fitted, left_out=left_out)


def _span(values: pd.Series[float]) -> tuple[float, float]:
    return _round(float(values.min())), _round(float(values.max()))


def _fold_errors(error: pd.Series[float]) -> LeftOut:
    size = error.abs()
    numbers = (error.median(), size.median(), size.quantile(0.9), size.max())
    bias, median, most, worst = (round(float(number), 4) for number in numbers)
    return LeftOut(num_points=len(error), bias=bias, median=median, most=most, worst=worst)


def _round(value: Numbers) -> float:
    return float(f"{value:.4g}")
