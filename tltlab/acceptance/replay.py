"""Acceptance replayed per position from acceptance.parquet, with the drafter as old as it is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from typing import ClassVar, NoReturn

import numpy as np
import pandas as pd

from tltlab.arrays import Bytes
from tltlab.drafters.specs import STANDARD, Drafters
from tltlab.errors import ConfigError
from tltlab.state import DrafterState, Key
from tltlab.strategy import Strategy

from .base import Acceptance, RequestArrays, Variation, known_drafter, only_chains
from .measured import FittedDepth, MeasuredAcceptance

_KEY = ("rl_step", "prompt_id", "sample", "turn")
_Row = tuple[int, Bytes]


class TraceAcceptance(Acceptance):
    """Counterfactual acceptance per position, from acceptance.parquet: a draft at position p keeps min(reach, row[p]).

    Position p is before the request's token p (p tokens stand). Where a request and drafter have rows at several ages,
    the row with the smallest age of at least `drafter_age` counts; where all are younger, the oldest. Nothing is
    interpolated. None asks for the youngest.
    """

    varies_by: ClassVar[Variation] = "position"
    drafters: tuple[str, ...] = ()

    def __init__(self, table: pd.DataFrame, drafter_age: int | None = None):
        self.drafters = tuple(sorted(table["drafter"].unique()))
        self.drafter_age = drafter_age
        self._rows: dict[tuple[str, Key], dict[int, _Row]] = {}
        columns = [table[c].tolist() for c in (*_KEY, "drafter", "drafter_age", "max_depth", "accept_if_drafted")]
        for rl_step, prompt_id, sample, turn, drafter, age, max_depth, listed in zip(*columns, strict=True):
            ages = self._rows.setdefault((drafter, (rl_step, prompt_id, sample, turn)), {})
            ages[age] = max_depth, np.asarray(listed, np.uint8)

    def pooled(self, drafters: Drafters = STANDARD) -> MeasuredAcceptance:
        """All positions and responses alike, by each drafter's youngest rows, as deep as all of them go."""
        rows: dict[str, list[_Row]] = {}
        for (drafter, _), ages in self._rows.items():
            if len(ages[min(ages)][1]):
                rows.setdefault(drafter, []).append(ages[min(ages)])
        fitted = {}
        for drafter, recordings in rows.items():
            depth = min(max_depth for max_depth, _ in recordings)
            accepted = np.concatenate([positions for _, positions in recordings]).astype(np.int64)
            fitted[drafter] = {depth: FittedDepth.counted(accepted, depth)} if depth else {}
        return MeasuredAcceptance.at_any_batch(fitted, copies=drafters.copying(fitted))

    def in_state(self, drafters: Mapping[str, DrafterState]) -> TraceAcceptance:
        """Takes the age of the one drafter that it has a state for, and its youngest rows where it has none."""
        ages = [drafters[name].age for name in self.drafters if name in drafters]
        return self._of_rows(self._rows, ages[0]) if len(ages) == 1 else self

    def at_best(self, drafters: Iterable[str]) -> TraceAcceptance:
        """The most that any of the recorded ages accepts at each position."""
        best = {
            key: {0: (min(depth for depth, _ in ages.values()), np.max([row for _, row in ages.values()], axis=0))}
            for key, ages in self._rows.items()
        }
        return self._of_rows(best, None)

    def survival(self, strategy: Strategy, requests: RequestArrays) -> NoReturn:
        raise ConfigError("a budget needs an acceptance model, and acceptance.parquet is replayed: name a model")

    def check(self, strategy: Strategy) -> None:
        """Raise ConfigError for a strategy that the recorded counterfactuals do not cover."""
        only_chains(strategy, "the trace's acceptance.parquet")
        known_drafter(strategy, self.drafters, "the trace's acceptance.parquet")
        deepest = min(self._row(name, key)[0] for name, key in self._rows if name == strategy.drafter)
        if strategy.reach > deepest:
            raise ConfigError(
                f"the trace's acceptance.parquet goes to depth {deepest} of drafter {strategy.drafter!r}; "
                f"{strategy} is deeper: annotate the trace with a larger max_depth"
            )

    def positions(self, drafter: str, key: Key, num_tokens: int) -> Bytes:
        """Acceptable tokens at positions 0..num_tokens-1 of one request; ConfigError where the trace has none."""
        if (drafter, key) not in self._rows:
            raise ConfigError(f"acceptance.parquet has no row for drafter {drafter!r} and response {key}")
        row = self._row(drafter, key)[1]
        if len(row) < num_tokens:
            raise ConfigError(
                f"acceptance.parquet has {len(row)} positions for {key}, its response has {num_tokens} tokens"
            )
        return row[:num_tokens]

    def _of_rows(self, rows: dict[tuple[str, Key], dict[int, _Row]], drafter_age: int | None) -> TraceAcceptance:
        model = copy(self)
        model.drafter_age, model._rows = drafter_age, rows
        return model

    def _row(self, drafter: str, key: Key) -> _Row:
        ages = self._rows[drafter, key]
        if self.drafter_age is None:
            return ages[min(ages)]
        return ages[min((age for age in ages if age >= self.drafter_age), default=max(ages))]
