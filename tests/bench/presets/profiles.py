"""Engine profiles against measurements: errors inside the joint fit and on models, GPUs and engines left out of it.

`shipped` makes `tltlab/costs/profiles.json` anew. The measurements are other people's tables, which are not part of the
package (`bench.presets.profile_data`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pandas as pd
from pydantic import BaseModel

from bench.presets.measurements import ERRORS, REPEATED, error_row
from bench.presets.profile_data import EAGLE3_VOCAB, KERNEL_GPUS, VLLM, measurements
from bench.presets.profile_fit import DRAFTING, ENOUGH, PRIORS, Param, era_of, eras, fit, limited, predict, set_names
from tltlab.arrays import Floats
from tltlab.costs.evidence import GOODPUT, LEVEL, SPECULATING, Distance
from tltlab.costs.profiles import (
    LEFT_OUT,
    MEASURED,
    Bound,
    Efficiencies,
    EngineProfile,
    Experts,
    MeasurementSet,
    Profiles,
    Quantised,
)
from tltlab.costs.roofline import Numbers
from tltlab.hardware import model

PART, SET = "third", "set"
APART = ("model", "gpu", "engine", "weights")
FOLDS = {"model": "model", "gpu": "gpu", "engine": "family", "weights": "weights", PART: PART, SET: "cell"}
"""Parts left out, and their columns; kernel tables are no engine and stay, and so do weights in bf16."""
COLUMNS = (*ERRORS, "pooled", "left_out", "bias", "median_abs_error", "inside", "sign")
KINDS: dict[Literal["dense", "experts"], bool] = {"dense": False, "experts": True}
ASKED = {"": "plain", SPECULATING: "speed-up of iterations", GOODPUT: "speed-up of goodput"}
NO_DIFFERENCE = 0.03
"""Measured speed-ups that are nearer to 1 have no sign: repeats of one cell differ by as much."""


@dataclass(frozen=True, kw_only=True)
class Residuals:
    """Errors on what was left out of a fit: `rows` has a cell's `set`, `fold`, `experts`, `asked`, `off`, `weight`.

    `off` is the absolute logarithm of predicted over measured, `right` 1 where a speed-up is predicted on the right
    side of 1 (NaN: none was asked for or measured). A set counts as at most `ENOUGH` cells, as in the fit.
    """

    rows: pd.DataFrame

    @classmethod
    def of(cls, table: pd.DataFrame) -> Residuals:
        folds = [fold for fold in ("", *FOLDS) if _column(fold) in table]
        shared = table[["set"]].assign(
            experts=[model(name).experts > 0 for name in table["model"]], asked=_asked(table)
        )
        parts = [
            shared.assign(fold=fold, cell=table.index, off=_off(table[_column(fold)]), right=_right(table, fold))
            for fold in folds
        ]
        rows = pd.concat(parts, ignore_index=True).dropna(subset="off")
        size = rows.groupby(["set", "fold"])["off"].transform("size")
        return cls(rows=rows.assign(weight=size.clip(upper=ENOUGH) / size, apart=rows["fold"].isin(APART)))

    def where(self, chosen: pd.Series[bool]) -> Residuals:
        return Residuals(rows=self.rows[chosen])

    def distance(self, name: str) -> Residuals:
        """Those of `MEASURED` or `LEFT_OUT`."""
        return self.where(self.rows["apart"] if name == LEFT_OUT else self.rows["fold"] == PART)

    def kind(self, *, experts: bool, asked: str) -> Residuals:
        """Those of models with or without experts, of what is asked; where one set alone has them, of what is nearest.

        A single set says nothing of the next one. The nearest are other speed-ups, then all models.
        """
        rows = self.rows
        same, kin = rows["experts"] == experts, rows["asked"] == asked
        for chosen in (same & kin, same & (rows["asked"] != "") & bool(asked)):
            if rows["set"][chosen].nunique() > 1:
                return self.where(chosen)
        return self.where(kin)

    def most(self) -> float:
        """The logarithm that nine in ten cells of a further set do not exceed.

        The further set is one of n + 1: of the n known the tail is n/(n + 1) as large.
        """
        rows = self.rows.sort_values("off", kind="stable")
        num = rows["set"].nunique()
        reached = rows["weight"].cumsum() / rows["weight"].sum() >= 1 - (1 - LEVEL) * num / (num + 1) - 1e-9
        return float(rows["off"][reached].iloc[0])

    def bound(self, *, experts: bool, asked: str) -> tuple[float, float]:
        """(median, what nine in ten do not exceed) of these, as factors less 1."""
        kind = self.kind(experts=experts, asked=asked)
        own = self.where((self.rows["experts"] == experts) & (self.rows["asked"] == asked))
        own = own if len(own.rows) else kind
        return _round(np.expm1(own.rows["off"].median())), _round(np.expm1(max(own.most(), kind.most())))

    def held(self) -> pd.Series[float]:
        """True where a cell lies in the interval of the other sets for its distance and kind."""
        held = pd.Series(np.nan, self.rows.index)
        for name in (MEASURED, LEFT_OUT):
            near = self.distance(name)
            for (experts, asked), cells in near.rows.groupby(["experts", "asked"]):
                kind = near.kind(experts=bool(experts), asked=str(asked))
                for of, own in cells.groupby("set"):
                    if (others := kind.where(kind.rows["set"] != of)).rows.size:
                        held[own.index] = (own["off"] <= others.most()).astype(float)
        return held


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    """One profile: family and version in the fit, and the drafter's vocabulary."""

    family: str
    version: str
    versions: str
    draft_vocab: int | None = EAGLE3_VOCAB


ENGINES = {
    "vllm": Shipped(family="vllm", version=VLLM, versions="vLLM V1, 0.16 to 0.24"),
    "vllm-0.12": Shipped(family="vllm", version="0.12", versions="vLLM V1, 0.12"),
    "sglang": Shipped(family="sglang", version="0.5", versions="SGLang 0.5"),
    "sglang-0.4": Shipped(
        family="sglang", version="0.4", versions="SGLang 0.4 and TLT's, which is made of it", draft_vocab=None
    ),
    "tensorrt-llm": Shipped(family="tensorrt-llm", version="1.0", versions="TensorRT-LLM 1.0 to 1.2"),
}
NO_DRAFTS = (
    "No speculation was measured with this engine: its drafting terms are what others of its generation, {}, have in "
    "common, pooled."
)
TREE_CONTEXT = "TLT gives no context for its speed-ups: {:.0f} tokens per request fit best."


@dataclass(frozen=True, kw_only=True)
class ProfileFit:
    """`table` has a row per measurement: `set`, relative `error` inside the fit and, once validated, one by fold."""

    values: dict[Param, float]
    table: pd.DataFrame

    def term(self, name: str, *, gpu: str = "", family: str = "", version: str = "") -> float:
        """A term for a GPU, a family and a version of it; a level without a name is left at its typical value."""
        levels = {"": "", "gpu": gpu, "era": era_of(version), "family": family, "version": f"{family} {version}"}
        deviation = sum(self.values.get((name, level, value), 0.0) for level, value in levels.items())
        return PRIORS[name].typical * float(np.exp(deviation))


@cache
def fitted(data: Path) -> ProfileFit:
    """All measurements in one fit; ConfigError where a file is missing."""
    table = measurements(data)
    values = fit(table)
    return ProfileFit(values=values, table=table.assign(set=set_names(table), error=_errors(table, values)))


@cache
def validated(data: Path) -> ProfileFit:
    """The fit, with each model, GPU, family of engines and type of weights left out of another fit in turn.

    So are thirds of every set by length of context or else by batch, and all sets of one GPU, model and type with an
    engine. Each fit predicts what was left out of it, except rows that lack something else in it as well: measurements
    of their weights' type, or any speculation of their engine's version; of a set each of GPU, model and type.
    """
    fitting = fitted(data)
    table = fitting.table
    engine, drafting = table["family"] != "kernels", table["draft_depth"] > 0
    server, era = table["family"] + "|" + table["version"], eras(table)
    together = server + "|" + table["gpu"] + "|" + table["model"] + "|" + table["weights"]
    thirds = pd.concat([_thirds(part) for _, part in table[engine].groupby("set")])
    table = table.assign(cell=together, third=thirds.reindex(table.index))
    for fold, column in FOLDS.items():
        errors = pd.Series(np.nan, table.index)
        for value in set(table.loc[engine, column].dropna()) - {"bf16"}:
            fold_rows = engine & (table[column] == value)
            rest = ~fold_rows
            lacking = ~table["weights"].isin(table["weights"][rest]) & (fold != "weights")
            lacking |= ~table["kv"].isin(table["kv"][rest])
            lacking |= drafting & ~era.isin(era[drafting & rest])
            lacking |= drafting & ~server.isin(server[drafting & rest]) & (fold != "engine")
            for asked in ("gpu", "model", "weights") if fold == SET else ():
                known = server + table[asked] + np.where(drafting, SPECULATING, "")
                lacking |= ~known.isin(known[rest])
            if (predicted := fold_rows & ~lacking).any():
                errors[predicted] = _errors(table[predicted], fit(table[rest], fitting.values, tolerance=1e-4))
        table = table.assign(**{_column(fold): errors})
    return ProfileFit(values=fitting.values, table=table)


def shipped(fitting: ProfileFit) -> Profiles:
    """The profiles of a fit, four digits each; left-out errors where the fit has been validated."""
    table = fitting.table[fitting.table["family"] != "kernels"]
    gpus = sorted(table["gpu"].unique())
    return Profiles(
        knee=_round(fitting.term("knee")),
        quantised=Quantised(**_terms(fitting, Quantised, "quantised_")),
        int4=Quantised(**_terms(fitting, Quantised, "int4_")),
        experts=Experts(**_terms(fitting, Experts)),
        typical=Efficiencies(**_terms(fitting, Efficiencies)),
        gpus={name: Efficiencies(**_terms(fitting, Efficiencies, gpu=name)) for name in gpus},
        engines={name: _engine(fitting, name, of) for name, of in ENGINES.items()},
        errors=_class_errors(table) if _column(PART) in table else {},
        provenance=(
            f"Fitted jointly to {len(table)} published measurements of engines "
            f"(AIConfigurator, SpecBundle, EfficientRollout, LLMServingSim, SpecDecoding-Study-vLLM-SGLang, TLT arXiv "
            "2511.16665, EAGLE-3 arXiv 2503.01840) and sums of kernels on "
            f"{', '.join(KERNEL_GPUS)} (AIConfigurator, Apache-2.0).",
            "Efficiencies are by GPU, terms by engine; where few were measured they stay near what all have in common.",
        ),
    )


def _class_errors(table: pd.DataFrame) -> dict[Literal["dense", "experts"], dict[str, Bound]]:
    """`Profiles.errors`."""
    residuals = _of_engines(table)
    return {
        kind: {
            name + asked: residuals.distance(name).bound(experts=experts, asked=asked)
            for name in (MEASURED, LEFT_OUT)
            for asked in ASKED
        }
        for kind, experts in KINDS.items()
    }


def coverage(data: Path) -> pd.DataFrame:
    """How many cells lie in 90 % intervals, by distance and by what was left out; `left_out` "" pools a distance's.

    The interval of a cell is what the other sets of measurements give; of `interpolated` cells, which are few, what
    ships. `width` is the stated error, `median` the one met; both are factors less 1.
    """
    fitting = validated(data)
    residuals, errors = _of_engines(fitting.table), shipped(fitting).errors
    rows = residuals.rows.assign(held=residuals.held())
    found: list[dict[str, object]] = []
    for (kind, experts), (asked, what) in product(KINDS.items(), ASKED.items()):
        near, far = (errors[kind][name + asked][1] for name in (MEASURED, LEFT_OUT))
        between = float(np.expm1(np.sqrt(np.log1p(near) * np.log1p(far))))
        found_of = rows[(rows["experts"] == experts) & (rows["asked"] == asked)]
        found_of.loc[found_of["fold"] == SET, "held"] = (found_of["off"] <= np.log1p(between)).astype(float)
        for distance, width, folds in zip(
            get_args(Distance), (near, between, far), ((PART,), (SET,), APART), strict=True
        ):
            for fold in folds if len(folds) == 1 else ("", *folds):
                cells = found_of[found_of["fold"].isin(folds) if not fold else found_of["fold"] == fold]
                if len(cells):
                    found.append(
                        {"kind": kind, "asked": what, "distance": distance,
                         "left_out": fold, "sets": cells["set"].nunique(), "n_points": len(cells),
                         "median": float(np.expm1(cells["off"].median())), "width": width,
                         "inside": float(cells["held"].mean()), "sign": float(cells["right"].mean())}
                    )  # fmt: skip
    return pd.DataFrame(found)


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
        asked=_asked(table).map(ASKED),
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
                if (known := part[part[_column(fold)].notna()]).size:
                    table_rows.append(_row(first["engine"], f"{first['asked']}{of}", known, fold, pooled=not of))
    return pd.DataFrame(table_rows, columns=list(COLUMNS))


def _mark_inside(table: pd.DataFrame, ships: Profiles) -> None:
    """Which errors lie in the interval that the measurements' own profile gives, or what the other sets give."""
    residuals = _of_engines(table)
    for fold, cells in residuals.rows.assign(held=residuals.held()).groupby("fold"):
        table.loc[cells["cell"], f"{fold}_inside"] = cells["held"].to_numpy()
    for name, of in ENGINES.items():
        for _, part in _rows_of(table, of).groupby("set", sort=False):
            first = part.iloc[0]
            evidence = ships.evidence(name, first["gpu"], model(first["model"]), first["weights"])
            bound = evidence.speedup_error() if first["draft_depth"] > 0 else evidence.error()
            if bound is not None:
                table.loc[part.index, "_inside"] = (_off(part["error"]) <= np.log1p(bound)).astype(float)


def _row(source: str, what: str, part: pd.DataFrame, fold: str, *, pooled: bool) -> tuple[object, ...]:
    error = part[_column(fold)]
    size, bias, inside = error.abs(), float(error.median()), float(part[f"{fold}_inside"].mean())
    sign = float(_right(part, fold).mean())
    note = f"bias {bias:+.1%}, median {size.median():.1%}"
    how = f"{fold} left out" if fold else "fitted"
    figures = pooled, fold, bias, float(size.median()), inside, sign
    return *error_row(source, f"{what}: {how}: {note}", not fold, error, note), *figures


def _asked(table: pd.DataFrame) -> pd.Series[str]:
    """Key of `ASKED` of every measurement: speed-ups are of tokens per second where nobody says otherwise."""
    speedup = table["source"].eq(REPEATED).map({True: SPECULATING, False: GOODPUT})
    return speedup.where(table["draft_depth"] > 0, "")


def _column(fold: str) -> str:
    return f"{fold}_error" if fold else "error"


def _errors(table: pd.DataFrame, values: dict[Param, float]) -> Floats:
    return np.asarray(predict(table, values) / table["measured"].to_numpy(np.float64) - 1, np.float64)


def _terms(fitting: ProfileFit, of: type[BaseModel], kind: str = "", gpu: str = "") -> dict[str, float]:
    values = {name: fitting.term(kind + name, gpu=gpu) for name in of.model_fields}
    return {name: _round(limited(name, value)) for name, value in values.items()}


def _engine(fitting: ProfileFit, name: str, of: Shipped) -> EngineProfile:
    table = fitting.table
    measurements = _rows_of(table, of)
    measurements = measurements[measurements["kind"] != "goodput"]
    at = {"family": of.family, "version": of.version}
    seconds = (
        "step_s", "layer_s", "qk_norm_layer_s", "quantised_layer_s", "quantised_kv_layer_s", "expert_layer_s",
        "allreduce_s", "per_request_s", *DRAFTING,
    )  # fmt: skip
    notes = []
    if not (measurements["draft_depth"] > 0).any():
        notes.append(NO_DRAFTS.format(era_of(of.version)))
    if (measurements["source"] == "TLT").any():
        notes.append(TREE_CONTEXT.format(fitting.term("context_tokens")))
    return EngineProfile(
        engine=name,
        versions=of.versions,
        memory=_round(fitting.term("memory", **at) / fitting.term("memory")),
        prefill_efficiency=_round(fitting.term("prefill", **at)),
        draft_vocab=of.draft_vocab,
        measured=tuple(_measured(part) for _, part in measurements.groupby("set", sort=False)),
        notes=tuple(notes),
        **{term: _round(fitting.term(term, **at)) for term in seconds},
    )


def _rows_of(table: pd.DataFrame, of: Shipped) -> pd.DataFrame:
    return table[(table["family"] == of.family) & (table["version"] == of.version)]


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
    )


def _thirds(part: pd.DataFrame) -> pd.Series[float]:
    """1 to 3: the place of each measurement of a set by context, by batch where contexts are alike; NaN for too few."""
    if len(part) < 3:
        return pd.Series(np.nan, part.index)
    context = part["context_tokens"].fillna(part["input_tokens"] + part["output_tokens"] / 2)
    place = (context if context.nunique() > 2 else part["batch"]).rank(method="dense")
    if place.max() < 3:
        place = pd.Series(range(1, len(part) + 1), part.index, dtype=float)
    return pd.Series(np.ceil(place / place.max() * 3), part.index)


def _of_engines(table: pd.DataFrame) -> Residuals:
    """Those of engines that have a profile."""
    families = {of.family for of in ENGINES.values()}
    return Residuals.of(table[table["family"].isin(families)])


def _right(table: pd.DataFrame, fold: str) -> pd.Series[float]:
    """1 where a speed-up that differs from 1 is predicted on the right side of it, else 0; NaN for what has no side."""
    measured = table["measured"]
    right = (measured * (1 + table[_column(fold)]) > 1) == (measured > 1)
    return right.astype(float).where((table["draft_depth"] > 0) & ((measured - 1).abs() > NO_DIFFERENCE))


def _off(error: pd.Series[float]) -> pd.Series[float]:
    """By the logarithm of which factor predictions of this relative error are off."""
    return pd.Series(np.abs(np.log1p(error)), error.index)


def _span(values: pd.Series[float]) -> tuple[float, float]:
    return _round(float(values.min())), _round(float(values.max()))


def _round(value: Numbers) -> float:
    return float(f"{value:.4g}")
