"""Fits the roofline's constants to measurements of several kinds at once, and tests them on data left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import least_squares  # type: ignore[import-untyped, unused-ignore]

from tltlab.arrays import Flags, Floats
from tltlab.costs.base import CalibratedRange
from tltlab.costs.roofline import (
    Constants,
    Ideal,
    RooflineCosts,
    context_slope_s,
    draft_level_s,
    forward_s,
    prefill_token_s,
)
from tltlab.errors import ConfigError
from tltlab.hardware import gpu, model

UNKNOWN_CONTEXT = (1024.0, 16384.0)
"""Where the context of a speed-up is not known, tokens per request: up to the mean of a response of 32 Ki tokens."""

# Typical value, least and most; a constant that the data say nothing about stays near the typical one. Engines take
# 0.1 to 3 ms a step and 4 to 65 us a request, BLIS finds 32 us a layer in vLLM, and all-reduces of small messages take
# 4.5 to 6.5 us from CUDA graphs on H100. HBM gives no more than 95 % of its nominal bandwidth.
_RANGES = {
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
_CONTEXT = "context_tokens"
_PRIOR_WEIGHT = 0.003
_TYPICAL_ERROR = 0.1


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Constants with what speaks for them.

    `predictions` is the table of measurements with `predicted` and `error` (relative). `residuals` has a row per
    source and batch: `source`, `batch`, `num_points`, `mean_abs_error`, `max_abs_error`. `cross_validation` the same
    per fold, each predicted by a fit without it: `fold`, `left_out`, ... `notes` says which constants the data leave
    open, and the context that was fitted where none was given (`context_tokens` per request, None where all are known).
    """

    constants: Constants
    context_tokens: float | None
    predictions: pd.DataFrame
    residuals: pd.DataFrame
    cross_validation: pd.DataFrame
    calibrated: CalibratedRange
    notes: tuple[str, ...]

    def costs(self, gpu: str, model: str, tp: int) -> RooflineCosts:
        """The cost model of `model` on `tp` of these GPUs, by these constants."""
        return RooflineCosts(
            gpu=gpu, model=model, tp=tp, constants=self.constants, calibrated=self.calibrated, notes=self.notes
        )


def fit(measurements: pd.DataFrame, folds: Sequence[str] = ()) -> Fitted:
    """Fit all constants that these measurements speak about; the same for every GPU, model and tp in them.

    The table is one of `tltlab.calibration.measurements.times`, or several put together. Relative errors, softened
    beyond 10 %; a weak pull (a factor e off weighs as much as an error of 0.3 % of one row) holds what the data leave
    open near typical values. Each of `folds` is a column of `measurements`: for each of its values the rows that have
    it are predicted by a fit to the others; rows without one are never left out.
    """
    if measurements.empty:
        raise ConfigError("nothing to fit: the table of measurements is empty")
    prepared = _Prepared.of(measurements)
    names = _names(prepared)
    best = _solve(prepared, names, None)
    values = dict(zip(names, np.exp(best), strict=True))
    predicted = prepared.predict(values)
    checked = [row for fold in folds for row in _left_out(prepared, names, measurements[fold], best)]
    context = float(values[_CONTEXT]) if _CONTEXT in values else None
    found = measurements.assign(predicted=predicted, error=predicted / prepared.measured - 1)
    errors = found["error"].abs().groupby([found["source"], found["batch"]]).agg(["size", "mean", "max"]).reset_index()
    errors.columns = pd.Index(["source", "batch", "num_points", "mean_abs_error", "max_abs_error"])
    columns = ["fold", "left_out", "num_points", "mean_abs_error", "max_abs_error"]
    return Fitted(
        constants=_constants(values),
        context_tokens=context,
        predictions=found,
        residuals=errors,
        cross_validation=pd.DataFrame(checked, columns=columns),
        calibrated=prepared.covered(context),
        notes=tuple(_notes(prepared, names, best, context)),
    )


def predict(constants: Constants, measurements: pd.DataFrame, context_tokens: float | None = None) -> Floats:
    """What these constants say about measurements; `context_tokens` per request where a speed-up does not give its own.

    A GPU or model that is not known is a ConfigError, and so is speculation that the constants do not know.
    """
    prepared = _Prepared.of(measurements)
    if context_tokens is None and prepared.context_unknown.any():
        raise ConfigError("speed-ups without context_tokens: say how many tokens of context a request had")
    values = {name: value for name, value in constants.model_dump().items() if value is not None}
    if context_tokens is not None:
        values[_CONTEXT] = context_tokens
    return prepared.predict(values)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Prepared:
    """Measurements as arrays."""

    ideal: Ideal
    kind: npt.NDArray[np.str_]
    batch: Floats
    verified: Floats
    depth: Floats
    levels: Floats
    top_k: Floats
    context: Floats
    context_unknown: Flags
    isl: Floats
    osl: Floats
    prefill: Floats
    ttft: Floats
    accepted: Floats
    measured: Floats

    @classmethod
    def of(cls, table: pd.DataFrame) -> _Prepared:
        ideals = {
            (g, m, t): Ideal.of(gpu(g), model(m), int(t))
            for g, m, t in table[["gpu", "model", "tp"]].drop_duplicates().itertuples(index=False)
        }
        each = [ideals[key] for key in table[["gpu", "model", "tp"]].itertuples(index=False, name=None)]
        stacked = {f.name: np.array([getattr(i, f.name) for i in each], np.float64) for f in fields(Ideal)}

        def column(name: str, missing: float) -> Floats:
            return np.asarray(table[name].fillna(missing), np.float64)

        kind = table["kind"].to_numpy(str)
        return cls(
            ideal=Ideal(**stacked),
            kind=kind,
            batch=column("batch", np.nan),
            verified=column("tokens_to_verify", 1),
            depth=column("draft_depth", 0),
            levels=np.asarray(table["draft_levels"].fillna(table["draft_depth"]).fillna(0), np.float64),
            top_k=column("top_k", 1),
            context=column("context_tokens", 0),
            context_unknown=(kind == "speedup") & table["context_tokens"].isna().to_numpy(),
            isl=column("input_tokens", 0),
            osl=column("output_tokens", 1),
            prefill=column("prefill_tokens", 0),
            ttft=column("ttft_s", 0),
            accepted=column("accept_length", 1),
            measured=column("measured", np.nan),
        )

    def without(self, out: Flags) -> _Prepared:
        rest = {f.name: getattr(self, f.name)[~out] for f in fields(self) if f.name != "ideal"}
        return _Prepared(ideal=Ideal(**{f.name: getattr(self.ideal, f.name)[~out] for f in fields(Ideal)}), **rest)

    def predict(self, values: dict[str, float]) -> Floats:
        c = _constants(values)
        context = np.where(self.context_unknown, values.get(_CONTEXT, 0.0), self.context)
        found = np.empty_like(self.measured)
        kinds = {"tpot": self._tpot, "wave": self._wave, "speedup": self._speedup, "iteration": self._iteration}
        for kind, of in kinds.items():
            if (self.kind == kind).any():
                found = np.where(self.kind == kind, of(c, context), found)
        return found

    def _iteration(self, c: Constants, context: Floats) -> Floats:
        took = self._forward(c, self.batch, self.verified, context) + self._drafting(c)
        return np.asarray(took + prefill_token_s(self.ideal, c) * self.prefill, np.float64)

    def _speedup(self, c: Constants, context: Floats) -> Floats:
        plain = self._forward(c, self.batch, np.ones_like(self.batch), context)
        return self.accepted * plain / (self._forward(c, self.batch, self.verified, context) + self._drafting(c))

    def _tpot(self, c: Constants, context: Floats) -> Floats:
        """A request that ends is replaced by one that has to be prefilled, and the others wait meanwhile.

        So per token of output there are batch/osl prefills; while its own lasts a request does not decode.
        """
        prefill = np.asarray(prefill_token_s(self.ideal, c) * self.isl, np.float64)
        decoding, one = self.batch, np.ones_like(self.batch)
        tpot = prefill
        for _ in range(4):
            step = self._forward(c, decoding, one, self.isl + self.osl / 2)
            tpot = step + decoding * prefill / self.osl
            decoding = self.batch * self.osl * tpot / (self.osl * tpot + prefill + tpot)
        return tpot

    def _wave(self, c: Constants, context: Floats) -> Floats:
        """Prefills go first: a request that had its own early waits for the rest of them before it decodes."""
        prefills = np.asarray(self.batch * prefill_token_s(self.ideal, c) * self.isl, np.float64)
        step = self._forward(c, self.batch, np.ones_like(self.batch), self.isl + self.osl / 2)
        return step + np.maximum(prefills - self.ttft, 0.0) / self.osl

    def _forward(self, c: Constants, batch: Floats, queries: Floats, context: Floats) -> Floats:
        slope = context_slope_s(self.ideal, c, queries=queries)
        took = forward_s(self.ideal, c, tokens=batch * queries, batch=batch) + slope * batch * context
        return np.asarray(took, np.float64)

    def _drafting(self, c: Constants) -> Floats:
        took = np.zeros_like(self.batch)
        if (self.depth > 0).any():
            took = took + (self.depth > 0) * c.need("sd_base_s")
        if (self.levels > 0).any():
            took = took + self.levels * draft_level_s(self.ideal, c, batch=self.batch, top_k=self.top_k)
        return np.asarray(took, np.float64)

    def covered(self, context_tokens: float | None) -> CalibratedRange:
        in_loop = self.isl + self.osl / 2
        known = np.where(self.context_unknown, context_tokens or 0.0, self.context)
        context = self.batch * np.where(np.isin(self.kind, ("tpot", "wave")), in_loop, known)
        tokens = self.batch * self.verified
        plain = np.where(self.kind == "speedup", self.batch, tokens)
        return CalibratedRange(
            batch=(float(self.batch.min()), float(self.batch.max())),
            verified_tokens=(float(plain.min()), float(tokens.max())),
            context_tokens=(float(np.floor(context.min())), float(np.ceil(context.max()))),
        )


def _names(prepared: _Prepared) -> list[str]:
    unknown = () if (prepared.levels > 0).any() else _DRAFTING
    if not (prepared.depth > 0).any():
        unknown = (*unknown, "sd_base_s")
    names = [name for name in _RANGES if name not in unknown]
    return [*names, _CONTEXT] if prepared.context_unknown.any() else names


def _range(name: str) -> tuple[float, float, float]:
    least, most = UNKNOWN_CONTEXT
    return (float(np.sqrt(least * most)), least, most) if name == _CONTEXT else _RANGES[name]


def _solve(prepared: _Prepared, names: list[str], start: Floats | None) -> Floats:
    typical, least, most = (np.log([_range(name)[i] for name in names]) for i in range(3))

    def residuals(x: Floats) -> Floats:
        error = prepared.predict(dict(zip(names, np.exp(x), strict=True))) / prepared.measured - 1
        softened = np.sign(error) * _TYPICAL_ERROR * np.sqrt(2 * (np.sqrt(1 + (error / _TYPICAL_ERROR) ** 2) - 1))
        return np.concatenate([softened, _PRIOR_WEIGHT * (x - typical)])

    start = typical if start is None else np.clip(start, least, most)
    found = least_squares(residuals, start, bounds=(least - 1e-9, most + 1e-9), x_scale="jac", max_nfev=500)
    return np.asarray(np.clip(found.x, least, most), np.float64)


def _left_out(prepared: _Prepared, names: list[str], fold: pd.Series[str], start: Floats) -> list[tuple[object, ...]]:
    found: list[tuple[object, ...]] = []
    for value in sorted(fold.dropna().unique()):
        out = (fold == value).to_numpy(bool)
        if out.all():
            raise ConfigError(f"fold {fold.name} has one value only, {value}: nothing would be left to fit")
        rest = prepared.without(out)
        missing = set(names) - set(_names(rest))
        if missing:
            raise ConfigError(f"without {fold.name} {value} the rest does not show {', '.join(sorted(missing))}")
        values = dict(zip(names, np.exp(_solve(rest, names, start)), strict=True))
        error = np.abs(prepared.predict(values) / prepared.measured - 1)[out]
        found.append((fold.name, value, len(error), float(error.mean()), float(error.max())))
    return found


def _notes(prepared: _Prepared, names: list[str], best: Floats, context: float | None) -> list[str]:
    notes: list[str] = []
    if context is not None:
        notes.append(f"the context of the speed-ups is not known: fitted, {context:.0f} tokens per request")

    def predicted(x: Floats) -> Floats:
        return np.log(prepared.predict(dict(zip(names, np.exp(x), strict=True))))

    step = 1e-4
    slopes = np.column_stack([predicted(best + step * e) - predicted(best - step * e) for e in np.eye(len(names))])
    slopes /= 2 * step
    spread = np.linalg.inv(slopes.T @ slopes + _PRIOR_WEIGHT**2 * np.eye(len(names)))
    held = [name for name, s in zip(names, np.diag(spread), strict=True) if s * _PRIOR_WEIGHT**2 > 0.5]
    if held:
        notes.append(f"not identified by these data, held near typical values: {', '.join(held)}")
    at_end = [n for n, x in zip(names, best, strict=True) if min(abs(x - np.log(_range(n)[1:]))) < 1e-6]
    if at_end:
        notes.append(f"at the end of the range allowed: {', '.join(at_end)}")
    return notes


def _constants(values: dict[str, float]) -> Constants:
    return Constants.model_construct(None, **{name: float(v) for name, v in values.items() if name != _CONTEXT})
