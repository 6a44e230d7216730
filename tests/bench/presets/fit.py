"""Fits the roofline's constants to published measurements of several kinds at once, and tests them on data left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import least_squares

from tltlab.arrays import Flags, Floats, Ints
from tltlab.calibration.cross_validation import error_quantiles
from tltlab.costs.evidence import CalibratedRange
from tltlab.costs.roofline import (
    Constants,
    Ideal,
    added_prefill_s,
    context_slope_s,
    draft_level_s,
    forward_s,
    prefill_token_s,
)
from tltlab.costs.samples import chosen as chosen_rows
from tltlab.errors import ConfigError
from tltlab.hardware import gpu, model

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
_SOFT = 0.1
"""Relative errors beyond this weigh less and less."""
_NOISE, _NOISE_ROWS = 0.03, 3.0
UNKNOWN_CONTEXT = (1024.0, 16384.0)
"""Where the context of a speed-up is not known, tokens per request: up to the mean of a response of 32 Ki tokens."""
_CONTEXT = "context_tokens"


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Constants with their evidence.

    `predictions` is the table of measurements with `predicted` and `error` (relative). `cross_validation` has a row per
    fold, each predicted by a fit without it: `fold`, `left_out`, `num_points`, `mean_abs_error`, `max_abs_error`, and
    `median_error` and `most_error` as in `error_quantiles`. `notes` lists the constants that the data leave open, and
    the context that was fitted where none was given (`context_tokens` per request, None where all are known).
    """

    constants: Constants
    context_tokens: float | None
    predictions: pd.DataFrame
    cross_validation: pd.DataFrame
    calibrated: CalibratedRange
    notes: tuple[str, ...]

    def open(self, queries: pd.DataFrame, constants: Constants) -> Floats:
        """Standard deviation that the measurements leave to predictions of a table like them, relative, by Laplace.

        `constants` are those of the hardware of `queries`, in proportion to the fitted ones.
        """
        rows, context = PublishedRows.of_table(self.predictions), {_CONTEXT: self.context_tokens or 0.0}
        values = self.constants.model_dump(exclude_none=True) | context
        fitted_values = {name: values[name] for name in rows.ranges}
        there = constants.model_dump(exclude_none=True) | context
        return uncertainty(rows, fitted_values, (PublishedRows.of_table(queries), there))


def fit(measurements: pd.DataFrame, folds: Sequence[str] = ()) -> Fitted:
    """Fit all constants that these measurements can identify; the same for every GPU, model and tp in them.

    Each of `folds` is a column: for each of its values the rows that have it are predicted by a fit to the others.
    """
    if measurements.empty:
        raise ConfigError("nothing to fit: the table of measurements is empty")
    rows = PublishedRows.of_table(measurements)
    values = fit_constants(rows)
    predicted = rows.predict(values)
    context = values.get(_CONTEXT)
    context_notes = [] if context is None else [
        f"the context of the speed-ups is not known: fitted, {context:.0f} tokens per request"
    ]  # fmt: skip
    table = measurements.assign(predicted=predicted, error=predicted / rows.measured - 1)
    columns = ["fold", "left_out", "num_points", "mean_abs_error", "max_abs_error", "median_error", "most_error"]
    return Fitted(
        constants=constants_of(values),
        context_tokens=context,
        predictions=table,
        cross_validation=pd.DataFrame(
            [row for fold in folds for row in _fold_errors(values, measurements, fold)], columns=columns
        ),
        calibrated=rows.covered_with(context),
        notes=(*context_notes, *notes_of(rows, values)),
    )


def predict(constants: Constants, measurements: pd.DataFrame, context_tokens: float | None = None) -> Floats:
    """Predictions of these constants for measurements; `context_tokens` per request where a speed-up does not give its
    own.

    A GPU or model that is not known is a ConfigError, and so is speculation that the constants do not know.
    """
    rows = PublishedRows.of_table(measurements)
    if context_tokens is None and rows.context_unknown.any():
        raise ConfigError("speed-ups without context_tokens: say how many tokens of context a request had")
    values = constants.model_dump(exclude_none=True)
    if context_tokens is not None:
        values[_CONTEXT] = context_tokens
    return rows.predict(values)


@dataclass(frozen=True, kw_only=True, eq=False)
class PublishedRows:
    """Measurements of any `kind`, with tokens to verify and context per request.

    `isl`, `osl`, `ttft` and `accepted` are those of servers and of speed-ups.
    """

    ideal: Ideal
    batch: Floats
    verified: Floats
    depth: Floats
    levels: Floats
    top_k: Floats
    context: Floats
    prefill: Floats
    measured: Floats
    kind: npt.NDArray[np.str_]
    context_unknown: Flags
    isl: Floats
    osl: Floats
    ttft: Floats
    accepted: Floats

    @classmethod
    def of_table(cls, table: pd.DataFrame) -> Self:
        hardware = ["gpu", "model", "tp", "weights", "kv", "draft_vocab"]
        named = table.reindex(columns=hardware)
        keys: list[Any] = [
            (g, m, int(t), w, kv or "bf16", v and int(v))
            for g, m, t, w, kv, v in named.astype(object).where(named.notna(), None).itertuples(index=False, name=None)
        ]
        ideals = {key: Ideal.of(gpu(key[0]), model(key[1]), *key[2:]) for key in set(keys)}
        each = [ideals[key] for key in keys]

        def column(name: str, missing: float) -> Floats:
            return np.asarray(table[name].fillna(missing), np.float64)

        kind = table["kind"].to_numpy(str)
        return cls(
            ideal=Ideal(**{f.name: np.array([getattr(i, f.name) for i in each], np.float64) for f in fields(Ideal)}),
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

    def where(self, mask: Flags | Ints) -> Self:
        """Return the selected rows."""
        return replace(chosen_rows(self, mask), ideal=chosen_rows(self.ideal, mask))

    @property
    def ranges(self) -> Mapping[str, tuple[float, float, float]]:
        """Typical value, least and most of each constant that these measurements can identify."""
        unknown = () if (self.levels > 0).any() else _DRAFTING
        if not (self.depth > 0).any():
            unknown = (*unknown, "sd_base_s")
        least, most = UNKNOWN_CONTEXT
        context = {_CONTEXT: (float(np.sqrt(least * most)), least, most)} if self.context_unknown.any() else {}
        return {name: span for name, span in RANGES.items() if name not in unknown} | context

    def predict(self, values: Mapping[str, float]) -> Floats:
        constants = constants_of(values)
        return self.predict_with(lambda chosen: constants, values.get(_CONTEXT, 0.0))

    def predict_with(self, terms: Callable[[Flags], Constants], unknown_context: float) -> Floats:
        """Predictions of these terms, given for the chosen rows, for every measurement."""
        context = np.where(self.context_unknown, unknown_context, self.context)
        predicted = np.empty_like(self.measured)
        for kind, chosen, rows in self._by_kind:
            predicted[chosen] = _SECONDS[kind](rows, terms(chosen), context[chosen])
        return predicted

    @cached_property
    def _by_kind(self) -> list[tuple[str, Flags, Self]]:
        chosen = {str(kind): self.kind == kind for kind in np.unique(self.kind)}
        return [(kind, rows, self.where(rows)) for kind, rows in chosen.items()]

    def iteration_s(self, c: Constants, context: Floats) -> Floats:
        seconds = self.forward_s(c, self.batch, self.verified, context) + self.drafting_s(c)
        if self.prefill.any():
            # As `RooflineIteration.added_s` has it: prompts ride where reading weights bounds the iteration.
            tokens = self.batch * self.verified
            added = added_prefill_s(self.ideal, c, tokens=tokens, batch=self.batch, prompt_tokens=self.prefill)
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

    def prompt_s(self, c: Constants) -> Floats:
        """Seconds to prefill the prompt of one request."""
        return np.asarray(prefill_token_s(self.ideal, c) * self.isl, np.float64)

    def _speedup(self, c: Constants, context: Floats) -> Floats:
        plain = self.forward_s(c, self.batch, np.ones_like(self.batch), context)
        return self.accepted * plain / (self.forward_s(c, self.batch, self.verified, context) + self.drafting_s(c))

    def _goodput(self, c: Constants, context: Floats) -> Floats:
        """The same of tokens per second: either way a request's prompt takes `ttft` beside the others' decoding."""
        plain = self.forward_s(c, self.batch, np.ones_like(self.batch), context)
        drafted = self.forward_s(c, self.batch, self.verified, context) + self.drafting_s(c)
        prompts = self.batch * self.ttft / self.osl
        return np.asarray((plain + prompts) / (drafted / self.accepted + prompts), np.float64)

    def _served(self, c: Constants, context: Floats) -> Floats:
        """`_tpot`, with the measured time until a request's first token."""
        return self._closed_loop(c, np.maximum(self.ttft, self.prompt_s(c)))

    def _tpot(self, c: Constants, context: Floats) -> Floats:
        return self._closed_loop(c, self.prompt_s(c))

    def _closed_loop(self, c: Constants, first: Floats) -> Floats:
        """A request that ends is replaced by one that has to be prefilled, and the others wait meanwhile.

        So per token of output there are batch/osl prefills; until its `first` token a request does not decode.
        """
        prefill = self.prompt_s(c)
        decoding, tokens = self.batch, np.ones_like(self.batch)
        tpot = prefill
        for _ in range(4):
            step = self.forward_s(c, decoding, tokens, self.isl + self.osl / 2)
            tpot = step + decoding * prefill / self.osl
            decoding = self.batch * self.osl * tpot / (self.osl * tpot + first + tpot)
        return tpot

    def _wave(self, c: Constants, context: Floats) -> Floats:
        """Prefills go first: a request that had its own early waits for the rest of them before it decodes."""
        prefills = self.batch * self.prompt_s(c)
        step = self.forward_s(c, self.batch, np.ones_like(self.batch), self.isl + self.osl / 2)
        return step + np.maximum(prefills - self.ttft, 0.0) / self.osl

    def covered_with(self, context_tokens: float | None) -> CalibratedRange:
        """The span of the measurements, speed-ups without a context having this one."""
        in_loop = self.isl + self.osl / 2
        per_request = np.where(self.context_unknown, context_tokens or 0.0, self.context)
        context = self.batch * np.where(np.isin(self.kind, ("tpot", "wave")), in_loop, per_request)
        tokens = self.batch * self.verified
        plain = np.where(self.kind == "speedup", self.batch, tokens)
        return CalibratedRange(
            batch=(float(self.batch.min()), float(self.batch.max())),
            verified_tokens=(float(plain.min()), float(tokens.max())),
            context_tokens=(float(np.floor(context.min())), float(np.ceil(context.max()))),
        )


_SECONDS: dict[str, Callable[[Any, Constants, Floats], Floats]] = {
    "tpot": PublishedRows._tpot,
    "served": PublishedRows._served,
    "wave": PublishedRows._wave,
    "speedup": PublishedRows._speedup,
    "goodput": PublishedRows._goodput,
    "iteration": PublishedRows.iteration_s,
}
"""By the kind of a measurement, what it took."""


def fit_constants(rows: PublishedRows, start: Mapping[str, float] | None = None) -> dict[str, float]:
    """All constants that the measurements can identify.

    Relative errors, softened beyond 10 %; a weak pull (a factor e off weighs as much as an error of 0.3 % of one row)
    holds what the data leave open near typical values.
    """
    names = list(rows.ranges)
    typical, least, most = np.log(list(rows.ranges.values())).T

    def residuals(x: Floats) -> Floats:
        error = rows.predict(dict(zip(names, np.exp(x), strict=True))) / rows.measured - 1
        return np.concatenate([softened(error)[0], _PRIOR_WEIGHT * (x - typical)])

    initial = typical if start is None else np.clip(np.log([start[name] for name in names]), least, most)
    solution = least_squares(residuals, initial, bounds=(least - 1e-9, most + 1e-9), x_scale="jac", max_nfev=500)
    return dict(zip(names, np.exp(np.clip(solution.x, least, most)), strict=True))


def softened(error: Floats) -> tuple[Floats, Floats]:
    """Residuals that grow as the root of errors far beyond 10 %, and their derivatives by the error."""
    root = np.sqrt(1 + (error / _SOFT) ** 2)
    share = np.sqrt(2 / (1 + root))
    return error * share, 1 / (root * share)


def notes_of(rows: PublishedRows, values: Mapping[str, float]) -> list[str]:
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
    rows: PublishedRows, values: Mapping[str, float], target: tuple[PublishedRows, Mapping[str, float]] | None = None
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


def _slopes(rows: PublishedRows, values: Mapping[str, float]) -> Floats:
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


def _fold_errors(values: Mapping[str, float], measurements: pd.DataFrame, column: str) -> Iterator[tuple[object, ...]]:
    if measurements[column].nunique(dropna=False) < 2:
        value = measurements[column].iloc[0]
        raise ConfigError(f"fold {column} has one value only, {value}: nothing would be left to fit")

    for value in sorted(measurements[column].dropna().unique()):
        out = measurements[column] == value
        rest, test = PublishedRows.of_table(measurements[~out]), measurements[out]
        if missing := set(values) - set(rest.ranges):
            raise ConfigError(f"without {column} {value} the rest does not show {', '.join(sorted(missing))}")
        predicted = PublishedRows.of_table(test).predict(fit_constants(rest, values))
        error = np.abs(predicted / test["measured"].to_numpy(np.float64) - 1)
        yield column, value, len(error), float(error.mean()), float(error.max()), *error_quantiles(error)
