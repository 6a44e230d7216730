"""Fits the roofline's constants to measured iterations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Protocol, Self

import numpy as np

from tltlab.arrays import Flags, Floats, Ints
from tltlab.costs.roofline import (
    Constants,
    Hardware,
    Ideal,
    RooflineCosts,
    added_prefill_s,
    context_slope_s,
    draft_level_s,
    forward_s,
    prefill_token_s,
)
from tltlab.errors import ConfigError
from tltlab.hardware import gpu, model

from .iterations import CostEstimator, Iterations
from .residuals import REGIMES, regimes

# Typical value, least and most; a constant that the data do not identify stays near the typical one. Engines take
# 0.1 to 3 ms a step and 4 to 65 us a request, BLIS finds 32 us a layer in vLLM, and all-reduces of small messages take
# 4.5 to 6.5 us from CUDA graphs on H100. HBM gives no more than 95 % of its nominal bandwidth.
RANGES = {
    "memory_efficiency": (0.85, 0.5, 0.95),
    "compute_efficiency": (0.75, 0.3, 0.95),
    "kv_efficiency": (0.8, 0.3, 0.95),
    "link_efficiency": (0.7, 0.2, 1.0),
    "knee": (2.0, 1.0, 20.0),
    "step_s": (1e-3, 1e-5, 2e-2),
    "layer_s": (3e-5, 1e-7, 2e-4),
    "allreduce_s": (5e-6, 1e-6, 5e-5),
    "per_request_s": (5e-5, 1e-7, 5e-4),
    "sd_base_s": (3e-3, 1e-6, 3e-2),
    "draft_level_s": (4e-4, 1e-6, 5e-3),
    "draft_level_per_request_s": (2e-5, 1e-8, 1e-3),
}
_DRAFTING = ("draft_level_s", "draft_level_per_request_s")
_PRIOR_WEIGHT = 0.003
_TYPICAL_ERROR = 0.1
_NOISE, _NOISE_ROWS = 0.03, 3.0
_LEVEL = 0.02
"""Outliers that add less to a rollout than this are left alone."""
_ENOUGH = 400


class Measurements(Protocol):
    """Measured times to which constants are fitted."""

    @property
    def ranges(self) -> Mapping[str, tuple[float, float, float]]:
        """Typical value, least and most of each constant that these measurements can identify."""

    @property
    def measured(self) -> Floats: ...

    def predict(self, values: Mapping[str, float]) -> Floats: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class RooflineRows:
    """Iterations as the roofline sees them: tokens to verify and context per request, in `measured` seconds."""

    ideal: Ideal
    batch: Floats
    verified: Floats
    depth: Floats
    levels: Floats
    top_k: Floats
    context: Floats
    prefill: Floats
    measured: Floats

    @classmethod
    def of(cls, rows: Iterations, hardware: Hardware) -> RooflineRows:
        wrong = ~(rows.seconds > 0) | ~(rows.batch > 0)
        if wrong.any():
            raise ConfigError(f"row {int(np.flatnonzero(wrong)[0])} has no positive batch, tp and measured value")
        ideal = Ideal.of(gpu(hardware.gpu), model(hardware.model), hardware.tp)
        return cls(
            ideal=Ideal(**{f.name: np.full(len(rows), getattr(ideal, f.name), np.float64) for f in fields(Ideal)}),
            batch=rows.batch,
            verified=rows.tokens_to_verify,
            depth=rows.drafted_depth,
            levels=rows.levels,
            top_k=rows.top_k,
            context=rows.context / rows.batch,
            prefill=rows.prefill,
            measured=rows.seconds,
        )

    def where(self, mask: Flags | Ints) -> Self:
        """Return the selected rows."""
        arrays = {f.name: getattr(self, f.name)[mask] for f in fields(self) if f.name != "ideal"}
        return type(self)(ideal=Ideal(**{f.name: getattr(self.ideal, f.name)[mask] for f in fields(Ideal)}), **arrays)

    @property
    def ranges(self) -> Mapping[str, tuple[float, float, float]]:
        unknown = () if (self.levels > 0).any() else _DRAFTING
        if not (self.depth > 0).any():
            unknown = (*unknown, "sd_base_s")
        return {name: span for name, span in RANGES.items() if name not in unknown}

    def predict(self, values: Mapping[str, float]) -> Floats:
        return self.iteration_s(constants_of(values), self.context)

    def iteration_s(self, c: Constants, context: Floats) -> Floats:
        seconds = self.forward_s(c, self.batch, self.verified, context) + self.drafting_s(c)
        if self.prefill.any():
            # As `RooflineIteration.beside_s` has it: prompts ride where reading weights bounds the iteration.
            added = added_prefill_s(self.ideal, c, tokens=self.batch * self.verified, prompt_tokens=self.prefill)
            seconds = seconds + np.minimum(added, prefill_token_s(self.ideal, c) * self.prefill)
        return np.asarray(seconds, np.float64)

    def forward_s(self, c: Constants, batch: Floats, queries: Floats, context: Floats) -> Floats:
        slope = context_slope_s(self.ideal, c, queries=queries)
        seconds = forward_s(self.ideal, c, tokens=batch * queries, batch=batch) + slope * batch * context
        return np.asarray(seconds, np.float64)

    def drafting_s(self, c: Constants) -> Floats:
        seconds = np.zeros_like(self.batch)
        if (self.depth > 0).any():
            seconds = seconds + (self.depth > 0) * (c.need("sd_base_s") + c.verify_token_s * self.batch * self.verified)
        if (self.levels > 0).any():
            level = draft_level_s(self.ideal, c, batch=self.batch, top_k=self.top_k)
            seconds = seconds + self.levels * level + c.tree_s * ((self.levels > 0) & (self.top_k > 1))
        return np.asarray(seconds, np.float64)

    def subsampled(self) -> Self:
        """At most `_ENOUGH` rows, evenly spaced, of each regime: a dozen constants need no more."""
        regime = regimes(self.prefill, self.depth > 0)
        parts = [np.flatnonzero(regime == number) for number in range(len(REGIMES))]
        return self.where(np.sort(np.concatenate([part[:: -(-len(part) // _ENOUGH)] for part in parts if len(part)])))


class RooflineEstimator(CostEstimator):
    """Roofline costs. `recorded` rows are thinned, and their level is that of typical rollouts."""

    def __init__(self, hardware: Hardware, *, recorded: bool) -> None:
        self.hardware, self.recorded = hardware, recorded

    def fit(self, rows: Iterations) -> Self:
        all_rows = RooflineRows.of(rows, self.hardware)
        sample = all_rows.subsampled() if self.recorded else all_rows
        values, level = fit_constants(sample), 1.0
        notes = notes_of(sample, values)
        if self.recorded:
            sums = rows.sums(all_rows.predict(values))
            level = float((sums["measured_s"] / sums["predicted_s"]).median())
        if abs(level - 1.0) > _LEVEL:
            # Constants have bounds, so the level cannot simply multiply them.
            sample = replace(sample, measured=sample.measured * level)
            values = fit_constants(sample)
            notes = notes_of(sample, values)
            notes.append(
                f"outliers: typical iterations times {level:.3f} give a typical rollout's time, as these costs do"
            )
        constants = constants_of(values)
        if constants.sd_base_s is not None:
            # Whatever a loaded drafter takes in plain iterations is in their times, and so in the constants.
            notes.append(
                "what a loaded drafter costs in plain decoding is inside the other constants: sd_idle_s is written 0"
            )
            constants = constants.model_copy(update={"sd_idle_s": 0.0})
        # The largest iteration with prompts limits what rides in the simulator's.
        tokens = (rows.verified + rows.prefill)[rows.prefill > 0]
        self.costs_ = RooflineCosts(
            gpu=self.hardware.gpu,
            model=self.hardware.model,
            tp=self.hardware.tp,
            constants=constants,
            calibrated=rows.covered,
            max_num_batched_tokens=math.ceil(tokens.max()) if len(tokens) else None,
            notes=tuple(notes),
        )
        self.constants_ = constants
        self.predictions_ = self.predict(rows)
        self.open_ = uncertainty(sample, values)
        return self

    def predict(self, rows: Iterations) -> Floats:
        return RooflineRows.of(rows, self.hardware).predict(known_terms(self.constants_))


def fit_constants(rows: Measurements, start: Mapping[str, float] | None = None) -> dict[str, float]:
    """All constants that the measurements can identify.

    Relative errors, softened beyond 10 %; a weak pull (a factor e off weighs as much as an error of 0.3 % of one row)
    holds what the data leave open near typical values.
    """
    from scipy.optimize import least_squares

    names = list(rows.ranges)
    typical, least, most = np.log(list(rows.ranges.values())).T

    def residuals(x: Floats) -> Floats:
        error = rows.predict(dict(zip(names, np.exp(x), strict=True))) / rows.measured - 1
        softened = np.sign(error) * _TYPICAL_ERROR * np.sqrt(2 * (np.sqrt(1 + (error / _TYPICAL_ERROR) ** 2) - 1))
        return np.concatenate([softened, _PRIOR_WEIGHT * (x - typical)])

    initial = typical if start is None else np.clip(np.log([start[name] for name in names]), least, most)
    solution = least_squares(residuals, initial, bounds=(least - 1e-9, most + 1e-9), x_scale="jac", max_nfev=500)
    return dict(zip(names, np.exp(np.clip(solution.x, least, most)), strict=True))


def notes_of(rows: Measurements, values: Mapping[str, float]) -> list[str]:
    """Which constants the measurements leave open, and which lie at the end of their range."""
    names, best = list(values), np.log(list(values.values()))
    spread = np.linalg.inv(_precision(_slopes(rows, values)))
    vague = [name for name, s in zip(names, np.diag(spread), strict=True) if s * _PRIOR_WEIGHT**2 > 0.5]
    notes = [f"not identified by these data, held near typical values: {', '.join(vague)}"] if vague else []
    at_end = [n for n, x in zip(names, best, strict=True) if min(abs(x - np.log(rows.ranges[n][1:]))) < 1e-6]
    if at_end:
        notes.append(f"at the end of the range allowed: {', '.join(at_end)}")
    return notes


def uncertainty(
    rows: Measurements, values: Mapping[str, float], target: tuple[Measurements, Mapping[str, float]] | None = None
) -> Floats:
    """Standard deviation of each prediction that the number of rows leaves, relative, by Laplace.

    `target`, where given, is predicted instead: other rows, and constants there, in proportion to `values`. A single
    measurement errs as the rows beyond the degrees of freedom of the constants do, with `_NOISE` for `_NOISE_ROWS`
    more: as many constants as rows would meet them exactly. A constant that the rows do not identify lies anywhere in
    its range, if it has one.
    """
    slopes = _slopes(rows, values)
    precision = _precision(slopes)
    error = rows.predict(values) / rows.measured - 1
    beyond = max(len(error) - float(np.einsum("ij,jk,ik->", slopes, np.linalg.inv(precision), slopes)), 0.0)
    variance = (float((error**2).sum()) + _NOISE_ROWS * _NOISE**2) / (beyond + _NOISE_ROWS)
    spans = [rows.ranges.get(name, (1.0, 0.0, np.inf)) for name in values]
    anywhere = [12 / np.log(most / least) ** 2 if least else 0.0 for _, least, most in spans]
    spread = np.linalg.inv(precision / variance + np.diag(anywhere))
    if target is not None:
        slopes = _slopes(target[0], {name: target[1][name] for name in values})
    return np.asarray(np.sqrt(np.einsum("ij,jk,ik->i", slopes, spread, slopes)), np.float64)


def _precision(slopes: Floats) -> Floats:
    """Precision matrix of the logarithms of constants, for errors of spread 1: the inverse of their covariance."""
    return np.asarray(slopes.T @ slopes + _PRIOR_WEIGHT**2 * np.eye(slopes.shape[1]), np.float64)


def _slopes(rows: Measurements, values: Mapping[str, float]) -> Floats:
    """Derivatives of the logarithms of predictions by the logarithms of constants."""
    names, best = list(values), np.log(list(values.values()))

    def predicted(x: Floats) -> Floats:
        return np.log(rows.predict(dict(zip(names, np.exp(x), strict=True))))

    step = 1e-4
    slopes = np.column_stack([predicted(best + step * e) - predicted(best - step * e) for e in np.eye(len(names))])
    return np.asarray(slopes / (2 * step), np.float64)


def constants_of(values: Mapping[str, float]) -> Constants:
    """Values by name as constants; those of other names are left out."""
    return Constants.model_construct(None, **{n: float(v) for n, v in values.items() if n in Constants.model_fields})


def known_terms(constants: Constants) -> dict[str, float]:
    return {name: value for name, value in constants.model_dump().items() if value is not None}
