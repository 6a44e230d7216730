"""How well an acceptance model predicts RL steps that its fit has not seen: mean tokens per draft, bonus included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Generic, TypeVar

import numpy as np
import pandas as pd

from tltlab.arrays import Floats, Ints
from tltlab.errors import ConfigError
from tltlab.state import DrafterState
from tltlab.strategy import Strategy

from .base import known_drafter
from .load import (
    BatchAcceptance,
    CurveAcceptance,
    FreshAcceptance,
    SiblingAcceptance,
)

Fitted = TypeVar("Fitted", BatchAcceptance, CurveAcceptance, SiblingAcceptance, FreshAcceptance)

_LEVELS = np.array([NormalDist().inv_cdf((i + 0.5) / 10) for i in range(10)])
MEANS = ("measured_tokens", "predicted_tokens", "constant_tokens")


@dataclass(frozen=True, kw_only=True)
class Way(Generic[Fitted]):
    """How a kind of model is fitted to drafts, and the mean tokens per draft it foresees for each row of drafts.

    A row is `num` drafts of one `drafter` and `reach` in an RL step, with `tokens` in all; kinds need further columns.
    Means over the rows that are alike in `by` are compared.
    """

    fit: Callable[[pd.DataFrame], Fitted]
    tokens: Callable[[Fitted, pd.DataFrame], Floats]
    by: tuple[str, ...] = ("rl_step", "drafter")

    @property
    def columns(self) -> list[str]:
        """Of what `held_out` finds."""
        return [*self.by, "num_drafts", *MEANS]


def held_out(way: Way[Fitted], rows: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    """Two fits, to every other RL step and to the rest, predict each other's steps: a row per cell of `way.by`.

    The constant beside them is the mean of the other half per drafter and reach, or of all of it where it lacks these.
    What one half cannot tell is left out and noted; a single RL step leaves nothing.
    """
    found = []
    for train, held in _halves(rows):
        try:
            each = way.tokens(way.fit(train), held)
        except ConfigError as error:
            notes.append(f"acceptance of RL steps {_span(held)} is not predicted by that of the others: {error}")
            continue
        by = train.groupby(["drafter", "reach"])[["tokens", "num"]].sum()
        mean = float(by["tokens"].sum() / by["num"].sum())
        cells = pd.MultiIndex.from_frame(held[["drafter", "reach"]])
        constant = (by["tokens"] / by["num"]).reindex(cells).fillna(mean).to_numpy()
        tokens = (held["tokens"], each * held["num"], constant * held["num"])
        each_cell = held[[*way.by, "num"]].assign(**dict(zip(MEANS, tokens, strict=True)))
        sums = each_cell.rename(columns={"num": "num_drafts"}).groupby(list(way.by), as_index=False).sum()
        sums[list(MEANS)] = sums[list(MEANS)].div(sums["num_drafts"], axis=0)
        found.append(sums)
    if not found:
        return pd.DataFrame(columns=way.columns)
    return pd.concat(found, ignore_index=True)[way.columns].sort_values(list(way.by), ignore_index=True)


def _halves(rows: pd.DataFrame) -> Iterator[tuple[pd.DataFrame, pd.DataFrame]]:
    """Every other RL step to fit to and the rest to predict, then the other way round; nothing for a single one."""
    steps = np.sort(rows["rl_step"].unique())
    even = rows["rl_step"].isin(steps[::2])
    for train in (even, ~even) if len(steps) > 1 else ():
        yield rows[train].reset_index(drop=True), rows[~train].reset_index(drop=True)


def _span(rows: pd.DataFrame) -> str:
    return ", ".join(str(step) for step in sorted(rows["rl_step"].unique()))


def tokens_at_batch(model: BatchAcceptance, rows: pd.DataFrame) -> Floats:
    """Of rows that know their `batch`."""
    cells = rows[["batch", "drafter", "reach"]].astype({"drafter": str})
    known = {
        key: model.at(int(key[0])).tokens_per_iteration(Strategy.chain(key[1], int(key[2])))
        for key in cells.drop_duplicates().itertuples(index=False, name=None)
    }
    return np.array([known[key] for key in cells.itertuples(index=False, name=None)], np.float64)


def tokens_of_strangers(model: CurveAcceptance, rows: pd.DataFrame) -> Floats:
    """Of responses whose levels are unknown: averaged over levels as drafts meet them.

    A response with a higher level needs fewer drafts for its tokens, so the mean over drafts is the harmonic one.
    """
    found = np.empty(len(rows))
    for at, strategy in _groups(rows):
        known_drafter(strategy, model.curves, "the acceptance model")
        spread, position = model.curves[strategy.drafter].spread, rows["generated_tokens"].to_numpy(np.float64)[at]
        none = np.zeros(len(at))
        each = [1.0 + model.survival(strategy, none + spread * z, position, none).sum(axis=1) for z in _LEVELS]
        found[at] = 1.0 / np.mean([1.0 / tokens for tokens in each], axis=0)
    return found


def tokens_beside_siblings(model: SiblingAcceptance, rows: pd.DataFrame) -> Floats:
    """Of rows that know how many siblings had finished."""
    found = np.empty(len(rows))
    for at, strategy in _groups(rows):
        position, beside = (rows[name].to_numpy(np.float64)[at] for name in ("generated_tokens", "num_siblings"))
        found[at] = 1.0 + model.survival(strategy, np.zeros(len(at)), position, beside).sum(axis=1)
    return found


def tokens_at_age(model: FreshAcceptance, rows: pd.DataFrame) -> Floats:
    """Of rows that know the drafter's `age` and `updates`; the base is one for all batches."""
    found = np.empty(len(rows))
    for at, strategy in _groups(rows):
        states = rows.iloc[at][["age", "updates"]]
        for age, updates in states.drop_duplicates().itertuples(index=False):
            here = at[((states["age"] == age) & (states["updates"] == updates)).to_numpy()]
            fresh = model.at_freshness(DrafterState(age=int(age), updates=int(updates))).by_request().at(1)
            none = np.zeros(1)
            found[here] = 1.0 + float(fresh.survival(strategy, none, none, none)[0].sum())
    return found


def _groups(rows: pd.DataFrame) -> Iterator[tuple[Ints, Strategy]]:
    """Positions of the rows of each drafter and reach, and the chain that these are of."""
    drafters, reaches = rows["drafter"].to_numpy(str), rows["reach"].to_numpy(np.int64)
    for drafter, reach in sorted(set(zip(drafters.tolist(), reaches.tolist(), strict=True))):
        yield np.flatnonzero((drafters == drafter) & (reaches == reach)), Strategy.chain(drafter, reach)
