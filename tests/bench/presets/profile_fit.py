"""Fits engine profiles to all published measurements at once: hardware shared by engines, engines' terms pooled.

Every term is exp(shared + by GPU + by family + by version), with normal priors on each deviation: where data are thin
an engine stays near its family and that near the shared value. Kernel tables count as an engine of their own that has
no terms but those of kernels, and hold the hardware's share down from 0.5B to 70B.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import least_squares

from tltlab.arrays import Flags, Floats
from tltlab.costs.profiles import MOST_EFFICIENT, capped
from tltlab.costs.roofline import Constants, rounded_max
from tltlab.hardware import DTYPE_BYTES, model

from .fit import UNKNOWN_CONTEXT, PublishedRows, softened
from .measurements import REPEATED


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """A term's typical value and how far it may lie off: standard deviations of its logarithm, 0 for none.

    `shared` is of the value for all, the others of deviations from it; engines of one family have several versions.
    """

    typical: float
    shared: float
    gpu: float = 0.0
    era: float = 0.0
    family: float = 0.0
    version: float = 0.0


_TABLE = tomllib.loads(Path(__file__).with_name("priors.toml").read_text())
PRIORS = {term: Prior(**prior) for term, prior in _TABLE.items()}
LEVELS = ("gpu", "era", "family", "version")
DRAFTING = ("sd_base_s", "draft_level_s", "draft_level_per_request_s", "tree_s", "verify_token_s")
EXPERTS = ("expert_layer_s", "expert_efficiency", "expert_rows", "expert_prefill", "draft_spread")
OLDER = ("0.4", "0.12")
"""Versions of 2025: drafting took their hosts longer than any later one's."""
PACKED = ("H100", "H200", "B200")
"""GPUs whose attention kernels read keys and values once for all heads and queries that share them."""
_FLOOR = 40.0
"""How sharply a value is kept above its least."""
_TYPICAL_ERROR, _TYPICAL_ERROR_REPEATED = 0.05, 0.025
"""Relative errors of one measurement, and of the speed-ups of a study that ran every cell three times."""
_STEP = 1e-5
_KERNELS = 1.4
"""Weight of sums of kernels beside measurements of engines."""
ENOUGH = 25
"""A set of measurements counts as at most so many: it is one model on one server, however often that was asked."""
_MOST_ROWS = 60
"""Rows of each set that the fit uses, evenly spaced."""
_Value = TypeVar("_Value", float, Floats)
Param = tuple[str, str, str]
"""Term, level ("" for the shared value) and the level's value."""


class RowTerms(SimpleNamespace):
    """The roofline's `Constants` and `prompt_layer_s`, an array of each with one value for every measurement."""

    def need(self, term: str) -> Floats:
        return np.asarray(getattr(self, term), np.float64)

    def where(self, chosen: Flags) -> Any:
        """Those of some of the measurements, for the roofline's functions, to which numbers and arrays are one."""
        return RowTerms(**{name: values[chosen] for name, values in vars(self).items()})


@dataclass(frozen=True, kw_only=True, eq=False)
class ProfileRows(PublishedRows):
    """Measurements of engines and of kernels.

    A prompt's queries attend to half of it on average, and what a prompt takes whatever its length (iterations with
    one run without a CUDA graph) is `prompt_layer_s` per layer: it is no part of a roofline's costs.
    """

    def prompt_s(self, c: Constants) -> Floats:
        attending = self.ideal.query_context_s * self.isl**2 / 2 / (c.compute_efficiency * c.prefill_efficiency)
        launching = c.need("prompt_layer_s") * self.ideal.layers
        return np.asarray(super().prompt_s(c) + attending + launching, np.float64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Design:
    """Which parameters each row's terms are made of."""

    rows: PublishedRows
    params: list[Param]
    index: Mapping[str, list[npt.NDArray[np.intp]]]
    sets: npt.NDArray[np.str_]
    weight: Floats
    masks: Mapping[str, Flags]

    @classmethod
    def of(cls, table: pd.DataFrame) -> Design:
        levels = {
            "": np.zeros(len(table), str),
            "gpu": table["gpu"].to_numpy(str),
            "era": eras(table).to_numpy(str),
            "family": table["family"].to_numpy(str),
            "version": (table["family"] + " " + table["version"]).to_numpy(str),
        }
        rows = ProfileRows.of_table(table.assign(kind=table["kind"].replace("attention", "iteration")))
        masks = _term_rows(rows, table)
        params: list[Param] = []
        index: dict[str, list[npt.NDArray[np.intp]]] = {}
        for term, prior in PRIORS.items():
            index[term] = []
            mask = masks.get(term, np.ones(len(table), bool))
            for level in ("", *LEVELS):
                if not getattr(prior, level or "shared") or not mask.any():
                    continue
                values, at = np.unique(levels[level][mask], return_inverse=True)
                # Rows that a term does not act on point past the end, where the deviation is 0.
                places = np.full(len(table), -1)
                places[mask] = at + len(params)
                index[term].append(places)
                params += [(term, level, str(value)) for value in values]
        sets = set_names(table)
        size = pd.Series(sets).map(pd.Series(sets).value_counts()).to_numpy(np.float64)
        kinds = table["kind"].to_numpy(str)
        return cls(
            rows=rows,
            params=params,
            index=index,
            sets=sets,
            weight=np.sqrt(np.minimum(size, ENOUGH) / size)
            / np.where((kinds == "speedup") & (table["source"] == REPEATED), _TYPICAL_ERROR_REPEATED, _TYPICAL_ERROR)
            * np.where(masks["step_s"], 1.0, _KERNELS),
            masks=masks,
        )

    @property
    def spread(self) -> Floats:
        """Spread of each parameter's prior."""
        return np.array([getattr(PRIORS[term], level or "shared") for term, level, _ in self.params], np.float64)

    def values(self, x: Floats) -> dict[str, Floats]:
        """Each term's value in every row, of parameters `x`: logarithms, in the order of `params`."""
        deviation, none = np.append(x, 0.0), np.zeros(len(self.sets))
        return {
            term: PRIORS[term].typical * np.exp(sum((deviation[places] for places in at), start=none))
            for term, at in self.index.items()
        }

    def slopes(self, x: Floats) -> Floats:
        """Derivative of the logarithm of every prediction by every parameter.

        A row depends on its own terms alone, so one difference per term serves all of that term's parameters.
        """
        value = self.values(x)
        base, slopes = np.log(self.predict(value)), np.zeros((len(self.sets), len(self.params)))
        for term, at in self.index.items():
            moved = np.log(self.predict(value | {term: value[term] * np.exp(_STEP)}))
            slope = (moved - base) / _STEP
            for places in at:
                rows = np.flatnonzero(places >= 0)
                slopes[rows, places[rows]] = slope[rows]
        return slopes

    def predict(self, value: Mapping[str, Floats]) -> Floats:
        """Predictions for every row from values of the terms."""
        rows, masks = self.rows, self.masks
        int4, quantised, kv8 = (masks[name] for name in ("int4_memory", "quantised_layer_s", "quantised_kv"))
        experts = np.asarray(rows.ideal.expert_layers, np.float64) / np.asarray(rows.ideal.layers, np.float64)
        of_memory, of_compute = (
            np.where(int4, value[f"int4_{rate}"], np.where(quantised, value[f"quantised_{rate}"], 1.0))
            for rate in ("memory", "compute")
        )
        layer = value["layer_s"]
        for name in ("qk_norm_layer_s", "quantised_layer_s", "quantised_kv_layer_s"):
            layer = layer + value[name] * masks[name]
        layer = layer + value["expert_layer_s"] * experts + value["shared_layer_s"] * masks["shared_layer_s"]
        terms = RowTerms(
            memory_efficiency=capped(value["memory"] * of_memory, MOST_EFFICIENT),
            compute_efficiency=capped(value["compute"] * of_compute, MOST_EFFICIENT),
            kv_efficiency=capped(value["kv"] * np.where(kv8, value["quantised_kv"], 1.0), MOST_EFFICIENT),
            link_efficiency=capped(value["link"], MOST_EFFICIENT),
            prefill_efficiency=value["prefill"] * np.where(masks["expert_prefill"], value["expert_prefill"], 1.0),
            expert_rows=value["expert_rows"],
            verify_reads=1.0 + value["verify_reads"],
            expert_efficiency=capped(value["expert_efficiency"], MOST_EFFICIENT),
            draft_spread=capped(value["draft_spread"], 1.0),
            knee=np.clip(value["knee"], 1.0, 20.0),
            step_s=value["step_s"] * masks["step_s"],
            layer_s=layer * value["launch"],
            allreduce_s=value["allreduce_s"],
            per_request_s=value["per_request_s"] * masks["step_s"],
            prompt_layer_s=value["prompt_layer_s"],
            **{name: value[name] for name in DRAFTING}
            | {"sd_base_s": value["sd_base_s"] + value["sd_quantised_kv_s"] * kv8},
        )
        context = value["context_tokens"][rows.context_unknown]
        unknown = float(np.clip(context[0], *UNKNOWN_CONTEXT)) if len(context) else 0.0
        seconds = rows.predict_with(terms.where, unknown)
        if (attention := masks["attention_layer_s"]).any():
            fixed = value["attention_layer_s"] * rows.ideal.layers
            reading = rows.batch * rows.context * rows.ideal.context_s / terms.kv_efficiency
            seconds = np.where(attention, fixed + reading, seconds)
        return np.asarray(seconds, np.float64)


def _term_rows(rows: PublishedRows, table: pd.DataFrame) -> dict[str, Flags]:
    """Which rows a term acts on, where that is not all."""
    engine = (table["family"] != "kernels").to_numpy()
    parallel = (table["tp"] > 1).to_numpy()
    quantised = np.array([DTYPE_BYTES[w] < 2 for w in table["weights"]])
    experts = np.asarray(rows.ideal.experts_s, np.float64) > 0
    drafting = rows.depth > 0
    kv8 = (table["kv"] != "bf16").to_numpy()
    served = table["kind"].isin(["tpot", "served", "wave"]).to_numpy()
    return {
        **dict.fromkeys(("step_s", "per_request_s"), engine),
        **dict.fromkeys(("allreduce_s", "link"), parallel),
        **dict.fromkeys(("quantised_memory", "quantised_compute"), quantised & (table["weights"] != "int4").to_numpy()),
        "quantised_layer_s": quantised,
        **dict.fromkeys(("int4_memory", "int4_compute"), (table["weights"] == "int4").to_numpy()),
        **dict.fromkeys(("quantised_kv", "quantised_kv_layer_s"), kv8),
        "sd_quantised_kv_s": kv8 & drafting,
        "qk_norm_layer_s": engine & np.array([model(name).qk_norm for name in table["model"]]),
        **dict.fromkeys(
            ("expert_layer_s", "expert_efficiency", "draft_spread", "expert_rows", "expert_prefill"), experts
        ),
        "shared_layer_s": np.array([model(name).shared_intermediate > 0 for name in table["model"]]),
        **dict.fromkeys(DRAFTING, drafting),
        "verify_reads": drafting & ~table["gpu"].isin(PACKED).to_numpy(),
        "tree_s": drafting & (rows.top_k > 1),
        **dict.fromkeys(("prefill", "prompt_layer_s"), served),
        "attention_layer_s": (table["kind"] == "attention").to_numpy(),
        "context_tokens": rows.context_unknown,
    }


def limited(term: str, value: _Value) -> _Value:
    """What a term of the fit stands for: shares are at most 1, and the context is read at least once."""
    if term in ("expert_efficiency", "draft_spread"):
        return capped(value, 1.0)
    return rounded_max(value, 1.0, _FLOOR) if term == "verify_reads" else value


def era_of(version: str) -> str:
    """The generation of an engine, whose overhead of drafting is pooled over families."""
    return "2025" if version in OLDER else "2026"


def eras(table: pd.DataFrame) -> pd.Series[str]:
    return table["version"].map(era_of)


def set_names(table: pd.DataFrame) -> npt.NDArray[np.str_]:
    """Subject of one row of the accuracy table: engine, version, GPU, model, weights, plain or speculating."""
    speculates = np.where(table["draft_depth"].fillna(0) > 0, "speculating", "plain")
    named = table["family"] + "|" + table["version"] + "|" + table["gpu"] + "|" + table["model"]
    return np.asarray(named + "|" + table["weights"] + "|" + table["source"] + "|" + speculates, str)


def fit(
    table: pd.DataFrame, start: Mapping[Param, float] | None = None, *, tolerance: float = 1e-6
) -> dict[Param, float]:
    """The parameters of least softened relative error, held by their priors; at most `_MOST_ROWS` rows of each set.

    `start` is where the search begins; it ends when its sum of squares falls by less than the share `tolerance`.
    """
    # Goodput and times between tokens are of the same runs: either is told by the other.
    design = Design.of(_thinned(table[table["kind"] != "goodput"]))
    spread = design.spread

    def residuals(x: Floats) -> Floats:
        error = np.log(design.predict(design.values(x * spread)) / design.rows.measured)
        return np.concatenate([design.weight * softened(error)[0], x])

    def slopes(x: Floats) -> Floats:
        return np.concatenate([_residual_slopes(design, x), np.eye(len(x))])

    begin = np.array([(start or {}).get(param, 0.0) for param in design.params]) / spread
    solution = least_squares(residuals, begin, jac=slopes, max_nfev=100, ftol=tolerance, xtol=1e-6)
    return dict(zip(design.params, (solution.x * spread).tolist(), strict=True))


def _thinned(table: pd.DataFrame) -> pd.DataFrame:
    """At most `_MOST_ROWS` rows of each set, evenly spaced."""
    sets = pd.Series(set_names(table))
    order = sets.groupby(sets).cumcount()
    step = -(-sets.groupby(sets).transform("size") // _MOST_ROWS)
    return table[(order % step == 0).to_numpy()]


def _residual_slopes(design: Design, x: Floats) -> Floats:
    """Jacobian of the softened, weighted residuals, with parameters in units of their priors' spreads."""
    error = np.log(design.predict(design.values(x * design.spread)) / design.rows.measured)
    by_row = (design.weight * softened(error)[1])[:, None] * design.slopes(x * design.spread) * design.spread
    return np.asarray(by_row, np.float64)


def predict(table: pd.DataFrame, values: Mapping[Param, float]) -> Floats:
    """Predictions of fitted parameters; an unknown GPU, family or version deviates by 0."""
    design = Design.of(table)
    return design.predict(design.values(np.array([values.get(param, 0.0) for param in design.params])))
