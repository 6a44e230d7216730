"""Acceptance by a parametric curve: of draft trees, and one that grows with finished siblings, with its fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import NonNegativeFloat, PositiveFloat, model_validator

from tltlab.arrays import Floats, Ints
from tltlab.config import FrozenModel, Share
from tltlab.drafters.specs import STANDARD, Drafters
from tltlab.errors import ConfigError
from tltlab.strategy import Strategy

from .base import (
    AcceptanceModel,
    ChainAcceptance,
    ConstantAcceptance,
    GeometricAcceptance,
    LengthsAcceptance,
    RequestArrays,
    known_drafter,
    only_chains,
)
from .measured import MeasuredAcceptance

Span = tuple[int, int]
CELL_TOKENS = 16
"""Drafts that begin within so many tokens of each other are counted together."""
MIN_DRAFTS = 32


class TreeRange(FrozenModel):
    """The strategies that a fit has seen, each as (least, most)."""

    draft_depth: Span
    top_k: Span
    tokens_to_verify: Span


class OfOneDrafter(AcceptanceModel):
    """Acceptance of one drafter by name; without a name of any with a network, or `of_text` of any without."""

    of_text: ClassVar[bool]

    if TYPE_CHECKING:
        drafter: str | None

    @property
    def drafters(self) -> tuple[str, ...]:
        return () if self.drafter is None else (self.drafter,)

    def knows(self, drafter: str, drafters: Drafters = STANDARD) -> bool:
        return drafter in self.drafters if self.drafters else drafters[drafter].has_network != self.of_text

    def check_drafter(self, strategy: Strategy) -> None:
        """ConfigError for a strategy of another drafter."""
        if self.drafter is not None:
            known_drafter(strategy, self.drafters, "the acceptance model")


class TreeAcceptance(OfOneDrafter):
    """Trees as in EAGLE-2 and TLT: the tokens_to_verify - 1 most probable nodes of a tree of some depth and branching.

    Level i of a tree of n nodes loses the target's path, given that level i - 1 held it, with probability

        h_i = exp(top_k_penalty * ln(top_k / best_top_k)^2)
              * (late_miss * (1 - exp(-(i / onset_levels)^onset_shape)) + pruned * i / n),        at most 1.

    The first term is the drafter: its guesses get worse as it feeds on its own. The second is the budget: the deeper
    the level and the fewer the nodes, the likelier the right node was pruned. Means follow as 1 + sum_i prod (1 - h_i).

    A chain (top_k = 1) has i nodes down to level i, so its budget term is `pruned` at every level, and branching does
    not enter: the first d tokens of a longer chain are the chain of depth d. A chain is extrapolated where the fit saw
    trees only; `outside` reports it. The spread around the mean, too, follows from h_i and was not measured.
    """

    of_text = False
    kind: Literal["tree"] = "tree"
    drafter: str | None = None
    late_miss: Share
    onset_levels: PositiveFloat
    onset_shape: PositiveFloat
    pruned: Share
    best_top_k: PositiveFloat = 8.0
    top_k_penalty: NonNegativeFloat = 0.0
    calibrated: TreeRange | None = None
    notes: tuple[str, ...] = ()

    def survival(self, strategy: Strategy, requests: RequestArrays) -> Floats:
        self.check_drafter(strategy)
        level = np.arange(1, strategy.reach + 1, dtype=np.float64)
        chain = strategy.top_k == 1
        share = np.ones_like(level) if chain else level / (strategy.tokens_to_verify - 1)
        branching = 1.0 if chain else np.exp(self.top_k_penalty * np.log(strategy.top_k / self.best_top_k) ** 2)
        late = self.late_miss * (1.0 - np.exp(-((level / self.onset_levels) ** self.onset_shape)))
        return requests.alike(np.cumprod(1.0 - np.minimum(1.0, branching * (late + self.pruned * share))))

    def outside(self, strategy: Strategy) -> list[str]:
        """Names of the settings that lie outside what was measured; all of them where nothing is known.

        >>> from tltlab.acceptance.load import load_acceptance
        >>> load_acceptance("tlt-qwen2.5-32b").outside(Strategy("eagle", 8, 8, 256))
        ['tokens_to_verify']
        """
        names = ("draft_depth", "top_k", "tokens_to_verify")
        if self.calibrated is None:
            return list(names)
        spans = {name: getattr(self.calibrated, name) for name in names}
        return [name for name, (least, most) in spans.items() if not least <= getattr(strategy, name) <= most]


Alike = (
    ConstantAcceptance | GeometricAcceptance | ChainAcceptance | LengthsAcceptance | MeasuredAcceptance | TreeAcceptance
)
"""Models in files that treat all requests alike."""


class SiblingAcceptance(OfOneDrafter):
    """A model-free drafter that retrieves from its group: acceptance grows with the samples that have finished.

    A drafted token is kept, while all before it were, with probability

        alpha = most - (most - alone) * (1 + r)^-exponent,      r = finished siblings + generated / own_tokens:

    from `alone` with nothing to retrieve from towards `most`. `own_tokens` generated tokens of the response itself are
    worth one finished sibling, None: they are worth nothing. The text of siblings that still run does not count.
    """

    varies_by = "request"
    of_text = True
    kind: Literal["siblings"] = "siblings"
    drafter: str | None = None
    alone: Share
    most: Share
    exponent: PositiveFloat
    own_tokens: PositiveFloat | None = None
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _grows(self) -> SiblingAcceptance:
        if self.most < self.alone:
            raise ValueError(f"most = {self.most} is less than alone = {self.alone}: siblings can only help")
        return self

    def alpha(self, num_siblings: Floats, generated_tokens: Floats) -> Floats:
        """The chance to keep one more token."""
        references = num_siblings + (0.0 if self.own_tokens is None else generated_tokens / self.own_tokens)
        return self.most - (self.most - self.alone) * (1.0 + references) ** -self.exponent

    def survival(self, strategy: Strategy, requests: RequestArrays) -> Floats:
        only_chains(strategy, "sibling acceptance")
        self.check_drafter(strategy)
        alpha = self.alpha(requests.num_siblings, requests.generated_tokens)
        return alpha[:, None] ** np.arange(1, strategy.reach + 1)


def fit_siblings(
    drafter: str, *, num_siblings: Floats, generated_tokens: Ints, reach: Ints, accepted: Ints
) -> SiblingAcceptance:
    """Fit the growth curve to drafts, one entry each: weighted least squares on counted chances.

    `reach` is the most tokens that could be kept. Raises ConfigError below MIN_DRAFTS drafts.
    """
    from scipy.optimize import least_squares  # type: ignore[import-untyped, unused-ignore]

    if len(accepted) < MIN_DRAFTS:
        raise ConfigError(
            f"drafter {drafter!r} has {len(accepted)} drafts with a known number of finished siblings, "
            f"at least {MIN_DRAFTS} are needed"
        )
    cells, at = np.unique(np.stack([num_siblings, generated_tokens // CELL_TOKENS]), axis=1, return_inverse=True)
    siblings, at = cells[0], at.ravel()
    position = np.bincount(at, generated_tokens) / np.bincount(at)
    tried = np.bincount(at, np.minimum(accepted + 1, reach))
    rate = np.bincount(at, accepted) / tried

    def model(p: Floats) -> SiblingAcceptance:
        low, gap = 1.0 / (1.0 + np.exp(-np.clip(p[:2], -30, 30)))
        return SiblingAcceptance(
            drafter=drafter,
            alone=float(low),
            most=float(low + gap * (1.0 - low)),
            exponent=float(np.exp(np.clip(p[2], -3, 2))),
            own_tokens=float(np.exp(np.clip(p[3], 0, 10))),
        )

    def residuals(p: Floats) -> Floats:
        # One draft's tokens are kept or lost together more often than apart; weights need only the right proportions.
        return np.asarray(np.sqrt(tried) * (model(p).alpha(siblings, position) - rate), np.float64)

    return model(least_squares(residuals, [-1.0, 0.0, -0.7, 4.0], x_scale="jac", max_nfev=2000).x)
