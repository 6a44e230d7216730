"""How a drafter's acceptance falls with its age and rises with its training, on top of any other model; and its fit.

A run annotates its responses with the drafter in service and with older ones, so the same text is drafted by drafters
of several ages and numbers of updates. Some texts are easier than others, so each RL step has its own factor, with the
spread of its responses. Drafters are compared on the same text first and across RL steps second.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from tltlab.arrays import Floats
from tltlab.config import FiniteModel, Share
from tltlab.errors import ConfigError
from tltlab.state import DrafterState
from tltlab.strategy import Strategy

from .base import Acceptance, AcceptanceModel, RequestArrays, Scaled, Wrapped
from .context import ContextAcceptance
from .curves import Alike, SiblingAcceptance

if TYPE_CHECKING:
    import pandas as pd

Base = Alike | SiblingAcceptance | ContextAcceptance
_FOREVER = 1e9
_PRIOR_SD = 2.0
"""How far each parameter may lie from where it starts, in log-odds or logarithms, before data have to pay for it.

So wide that a hundred drafts outweigh it; a parameter that the data do not identify stays where it starts.
"""
_NARROWED = 0.5
"""A parameter counts as identified where the data narrow it to this share of `_PRIOR_SD`."""
_CONFOUNDED = 0.97
"""Correlation from which on the effects of age and of training count as one."""
_STEP_SPREAD = 0.1
"""Relative spread of an RL step's level where no RL step has two responses of the same drafter."""


class Freshness(FiniteModel):
    """A drafter's level: the chance of a drafted token over that of a fully trained, fresh drafter's, 0 to 1.

        fresh(updates)      = 1 - (1 - untrained) * exp(-updates / updates_to_train)
        level(age, updates) = floor + (fresh(updates) - floor) * exp(-age / age_steps)

    `age` counts RL steps since the last update, `updates` the updates so far. A drafter that is never updated falls to
    `floor`.

    The defaults are an assumption, not a fit. TLT accepts 6.53 tokens with an adaptive drafter and 4.59 with the one it
    began with (arXiv 2511.16665, table 6, bonus included): `untrained` is the factor on every token's chance that leads
    from the one to the other on the curve fitted to its figure 13, at 8 levels, 4 branches, 48 tokens. A stale drafter
    is taken to fall back to that. Figure 15 shows top-3 accuracy dropping at each target update and back within a few
    training iterations, hence the few updates. No source reports over how many RL steps acceptance falls without
    updates.
    """

    untrained: Share = 0.885
    updates_to_train: PositiveFloat = 3.0
    floor: Share = 0.885
    age_steps: PositiveFloat = 10.0

    @model_validator(mode="after")
    def _ages_downwards(self) -> Freshness:
        if self.floor > self.untrained:
            raise ValueError(f"floor = {self.floor} is above untrained = {self.untrained}: age would improve a drafter")
        return self

    def level(self, age: float, updates: float) -> float:
        """The drafter's level, 1 for a fresh and fully trained one.

        >>> Freshness(untrained=0.5, floor=0.5, age_steps=10).level(age=0, updates=0)
        0.5
        """
        return float(self.levels(np.array(age), np.array(updates)))

    def levels(self, age: Floats, updates: Floats) -> Floats:
        """The levels of many states."""
        fresh = 1.0 - (1.0 - self.untrained) * np.exp(-updates / self.updates_to_train)
        return np.asarray(self.floor + (fresh - self.floor) * np.exp(-age / self.age_steps), np.float64)


class MeasuredState(FiniteModel):
    """The drafter's state in which the base model was measured."""

    age: NonNegativeFloat = 0.0
    updates: NonNegativeFloat


class FreshAcceptance(Wrapped, AcceptanceModel):
    """Any model as it holds for a drafter of some age and training: ask `at_freshness`.

    Only strategies of `drafter` are touched. `measured` is the state that the base describes, None the fresh and fully
    trained one: chances are scaled by level(state) / level(measured).
    """

    kind: Literal["fresh"] = "fresh"
    base: Annotated[Base, Field(discriminator="kind")]
    drafter: str = "learned"
    freshness: Freshness = Freshness()
    measured: MeasuredState | None = None
    notes: tuple[str, ...] = ()

    # For drafters in a known state the base sets `varies_by`; before that, no two drafts need be alike.
    varies_by = "request"

    @property
    def trained_drafter(self) -> str:
        return self.drafter

    def with_parts(self, parts: Sequence[Acceptance]) -> FreshAcceptance:
        return FreshAcceptance.model_validate({**dict(self), "base": parts[0]})

    def in_state(self, drafters: Mapping[str, DrafterState]) -> Scaled:
        return self.at_freshness(drafters.get(self.drafter, DrafterState()))

    def at_best(self, drafters: Iterable[str]) -> Scaled:
        return self.in_state(dict.fromkeys(drafters, DrafterState(age=0, updates=sys.maxsize)))

    def survival(self, strategy: Strategy, requests: RequestArrays) -> Floats:
        raise TypeError("acceptance depends on the drafter's age and training: ask in_state(drafters)")

    def ratio(self, state: DrafterState) -> float:
        """Factor on the chance of every drafted token."""
        level = self.freshness.level(state.age, state.updates)
        if self.measured is None:
            return level
        reference = self.freshness.level(self.measured.age, self.measured.updates)
        if reference <= 0.0:
            raise ConfigError(
                f"freshness: the level of the measured drafter (age {self.measured.age:g}, "
                f"{self.measured.updates:g} updates) is 0: nothing can be scaled from it"
            )
        return level / reference

    def at_freshness(self, state: DrafterState) -> Scaled:
        """The model for a drafter in this state."""
        return Scaled(self.base, (self.drafter,), self.ratio(state))


def fit_freshness(acceptance: pd.DataFrame, drafter: str) -> tuple[Freshness, tuple[str, ...]]:
    """Fit age and training to acceptance.parquet, where it has a drafter at several ages or numbers of updates.

    The notes name parameters that the data hardly narrow, which stay near an assumption.

    A variable that does not vary is not identified: it has no effect, and a note. A drafter's age is the RL step less
    the one that it was published for, so a trend of the text over RL steps is confounded with ageing and training; no
    trend is assumed. Raises ConfigError where neither age nor updates
    vary.
    """
    rows = _tries(drafter_states(acceptance[acceptance["drafter"] == drafter]))
    aging, training = rows["age"].nunique() > 1, rows["updates"].nunique() > 1
    if not (aging or training):
        raise ConfigError(
            f"acceptance.parquet has {drafter or 'the drafter'!r} at one age and number of updates only: freshness "
            f"needs several; annotate the trace with older drafters, or state an assumption"
        )
    likelihood = _FreshnessLikelihood(rows, aging=aging, training=training)
    # Ageing towards a floor far below and towards one just below may both be a local optimum.
    starts: tuple[dict[str, float], ...] = ({}, {"floor": -1.0, "age_steps": np.log(4.0 * (1.0 + rows["age"].max()))})
    solution = min((likelihood.solve(start) for start in starts), key=lambda solution: float(solution.cost))
    chance, freshness = likelihood.model(solution.x)
    unidentified, confounded = likelihood.unidentified(solution.jac)
    notes = [] if aging else [f"{drafter}: one age only, so acceptance is taken not to fall with age"]
    notes += [] if training else [f"{drafter}: one number of updates only, so the gain from training is unknown"]
    if unidentified:
        fitted = {"chance": chance} | freshness.model_dump()
        values = ", ".join(f"{name} ({fitted[name]:.3g})" for name in unidentified)
        notes.append(
            f"{drafter}: the ages and updates in the data do not identify {values} by themselves: the level holds "
            f"within the recorded range, beyond it these are near an assumption"
        )
    if confounded:
        notes.append(f"{drafter}: age and updates vary together, so that the effect of each alone is uncertain")
    return freshness, tuple(notes)


def measured_state(freshness: Freshness, ages: Floats, updates: Floats, weights: Floats) -> MeasuredState:
    """One state with the mean level of several: what a model describes that was pooled over drafters in these states.

    >>> half = Freshness(untrained=0.5, floor=0.5, updates_to_train=2.0)
    >>> measured_state(half, np.zeros(2), np.array([0.0, 1e9]), np.ones(2)).updates  # level 0.75
    1.3862943611198906
    """
    share = weights / max(float(weights.sum()), 1e-9)
    mean_age, to_gain = float(share @ ages), 1.0 - freshness.untrained
    level = float(share @ freshness.levels(ages, updates))
    fresh = freshness.floor + (level - freshness.floor) * float(np.exp(min(mean_age / freshness.age_steps, 30.0)))
    if to_gain <= 0.0 or fresh >= 1.0:
        return MeasuredState(age=mean_age, updates=float(share @ updates))
    gap = float(np.clip((1.0 - fresh) / to_gain, 1e-12, 1.0))
    return MeasuredState(age=mean_age, updates=abs(freshness.updates_to_train * float(np.log(gap))))


class _FreshnessLikelihood:
    """Chances per RL step and state of the drafter, and the least squares of their log-likelihood.

    Parameters are the log-odds of `chance`, of `untrained` and of `floor` / `untrained`, and the logarithms of the two
    spans. An RL step's factor is 1 + d with d ~ N(0, spread); for given parameters the best d is known in closed form.
    """

    def __init__(self, rows: pd.DataFrame, *, aging: bool, training: bool):
        by = ["rl_step", "age", "updates"]
        cells = rows.groupby(by, as_index=False)[["tried", "kept", "weight"]].sum()
        self.age, self.updates = cells["age"].to_numpy(np.float64), cells["updates"].to_numpy(np.float64)
        self.chance = (cells["kept"] / cells["tried"]).to_numpy(np.float64)
        self.step = np.unique(cells["rl_step"], return_inverse=True)[1]
        self.spread = _step_spread(rows.merge(cells[by].assign(chance=self.chance), on=by))
        noise = np.clip(self.chance, 0.02, 0.98)
        self.weight = cells["weight"].to_numpy(np.float64) / (noise * (1.0 - noise))
        most = float(np.clip(self.chance.max(), 1e-6, 1 - 1e-6))
        self.start = {"chance": float(np.log(most / (1.0 - most)))}
        if training:
            self.start |= {"untrained": 1.0, "updates_to_train": float(np.log1p(self.updates.max() / 4))}
        if aging:
            self.start |= {"floor": 1.0, "age_steps": float(np.log1p(self.age.max() / 2))}
        self.names = list(self.start)

    def solve(self, start: Mapping[str, float]) -> Any:
        """Solve from the usual start unless `start` is given, with the usual prior. Returns SciPy's solution."""
        from scipy.optimize import least_squares  # type: ignore[import-untyped, unused-ignore]

        initial = [start.get(name, value) for name, value in self.start.items()]
        return least_squares(self._residuals, initial, x_scale="jac", max_nfev=500)

    def model(self, p: Floats) -> tuple[float, Freshness]:
        """Chance of the fresh and trained drafter, and its level by age and training."""
        at = dict(zip(self.names, p.tolist(), strict=True))
        untrained = _share(at["untrained"]) if "untrained" in at else 1.0
        return _share(at["chance"]), Freshness(
            untrained=untrained,
            updates_to_train=_span(at["updates_to_train"]) if "updates_to_train" in at else 1.0,
            floor=untrained * _share(at["floor"]) if "floor" in at else untrained,
            age_steps=_span(at["age_steps"]) if "age_steps" in at else _FOREVER,
        )

    def unidentified(self, jacobian: Floats) -> tuple[tuple[str, ...], bool]:
        """Parameters that the data hardly constrain, and True if age and training are confounded."""
        covariance = np.linalg.pinv(jacobian.T @ jacobian)
        sd = np.sqrt(np.diag(covariance))
        unidentified = tuple(n for n, s in zip(self.names, sd.tolist(), strict=True) if s > _NARROWED * _PRIOR_SD)
        related = np.abs(covariance / np.outer(sd, sd))
        at = {name: i for i, name in enumerate(self.names)}
        pairs = [(a, b) for a in ("untrained", "updates_to_train") for b in ("floor", "age_steps")]
        return unidentified, any(a in at and b in at and related[at[a], at[b]] > _CONFOUNDED for a, b in pairs)

    def _predict(self, p: Floats) -> tuple[Floats, Floats]:
        """The chance of every cell with its RL step's factor, and what each factor adds to 1."""
        chance, freshness = self.model(p)
        plain = chance * freshness.levels(self.age, self.updates)
        num_steps = int(self.step.max()) + 1
        if num_steps == 1:
            return plain, np.zeros(1)
        pull = np.bincount(self.step, self.weight * plain * (self.chance - plain), num_steps)
        stiff = np.bincount(self.step, self.weight * plain**2, num_steps) + 1.0 / self.spread**2
        factor = pull / stiff
        return plain * (1.0 + factor[self.step]), factor

    def _residuals(self, p: Floats) -> Floats:
        predicted, factor = self._predict(p)
        prior = (p - np.array(list(self.start.values()))) / _PRIOR_SD
        return np.concatenate([np.sqrt(self.weight) * (predicted - self.chance), factor / self.spread, prior])


def _share(log_odds: float) -> float:
    return float(1.0 / (1.0 + np.exp(-np.clip(log_odds, -30, 30))))


def _span(logarithm: float) -> float:
    return float(np.exp(np.clip(logarithm, -7, 14)))


def drafter_states(acceptance: pd.DataFrame) -> pd.DataFrame:
    """acceptance.parquet with each row's `age` and `updates`; unknown updates of one drafter count as none."""
    updates = acceptance["drafter_updates"].astype(np.float64)
    is_known = updates.notna().groupby(acceptance["drafter"]).transform("all")
    return acceptance.assign(age=acceptance["drafter_age"], updates=updates.where(is_known, 0.0))


def _tries(rows: pd.DataFrame) -> pd.DataFrame:
    """Per response: drafted tokens that were tried, those of them that were kept, and how many tries they are worth."""
    tried, kept = [], []
    for most, lengths in zip(rows["max_depth"].tolist(), rows["accept_if_drafted"].tolist(), strict=True):
        accepted = np.asarray(lengths, np.int64)
        tried.append(int(np.minimum(accepted + 1, most).sum()))
        kept.append(int(accepted.sum()))
    # A text's position is tried by every draft that reaches it, so its tokens are all the evidence there is.
    weight = np.minimum(rows["accept_if_drafted"].map(len), tried)
    table = rows[["rl_step", "age", "updates"]].assign(tried=tried, kept=kept, weight=weight)
    return table[table["tried"] > 0]


def _step_spread(rows: pd.DataFrame) -> float:
    """Relative standard deviation of an RL step's mean that the spread of its responses leaves; `chance`: the mean."""
    variances = []
    for _, cell in rows.groupby(["rl_step", "age", "updates"]):
        if len(cell) > 1 and (mean := float(cell["chance"].iloc[0])) > 0:
            share = cell["tried"] / cell["tried"].sum()
            deviation = share * (cell["kept"] / cell["tried"] / mean - 1.0)
            variances.append(float((deviation**2).sum()) * len(cell) / (len(cell) - 1))
    return max(0.005, float(np.sqrt(np.median(variances)))) if variances else _STEP_SPREAD
