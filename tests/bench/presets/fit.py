"""Fits the roofline's constants to published measurements of several kinds at once, and tests them on data left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pandas as pd

from tltlab.arrays import Flags, Floats
from tltlab.calibration.cross_validation import error_quantiles
from tltlab.costs.evidence import CalibratedRange
from tltlab.costs.roofline import (
    Constants,
    Ideal,
    RooflineRows,
    constants_of,
    fit_constants,
    notes_of,
    prefill_token_s,
    uncertainty,
)
from tltlab.errors import ConfigError
from tltlab.hardware import gpu, model

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
class PublishedRows(RooflineRows):
    """Measurements of any `kind`; `isl`, `osl`, `ttft` and `accepted` are those of servers and of speed-ups."""

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

    @property
    def ranges(self) -> Mapping[str, tuple[float, float, float]]:
        least, most = UNKNOWN_CONTEXT
        context = {_CONTEXT: (float(np.sqrt(least * most)), least, most)} if self.context_unknown.any() else {}
        return {**super().ranges, **context}

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

    def prompt_s(self, c: Constants) -> Floats:
        """Seconds to prefill the prompt of one request."""
        return np.asarray(prefill_token_s(self.ideal, c) * self.isl, np.float64)

    def _speedup(self, c: Constants, context: Floats) -> Floats:
        plain = self.forward_s(c, self.batch, np.ones_like(self.batch), context)
        return self.accepted * plain / (self.forward_s(c, self.batch, self.verified, context) + self.drafting_s(c))

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
    "iteration": PublishedRows.iteration_s,
}
"""By the kind of a measurement, what it took."""


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
