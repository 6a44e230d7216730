"""Goodput: draft what promises the most tokens per second, by a cost model and the acceptance seen so far."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, ValidationInfo

from tltlab.arrays import Floats
from tltlab.config import InFile
from tltlab.costs.base import CostModel
from tltlab.costs.load import load_costs, presets
from tltlab.drafters.specs import STANDARD, Drafters
from tltlab.errors import ConfigError
from tltlab.files import read_json
from tltlab.records import Json
from tltlab.state import Choice, StepOutcome, StepState
from tltlab.strategy import NO_SPECULATION, Strategy

from .selector import Selector, StrategyField
from .simple import checked_strategies

PRIOR_DRAFTS = 16.0
"""Drafts that the prior counts for."""
_NEWTON_STEPS = 10


def _written_out(costs: Any, info: ValidationInfo) -> Any:
    """Content of the file that `costs` names, so that a policy is whole anywhere; other values as they are.

    The file is looked up in the folder that the validation's context names, the policy file's, then in the current one,
    then in those above the first.
    """
    if not isinstance(costs, str) or costs in presets():
        return costs
    beside = Path((info.context or {}).get("folder", ".")).resolve()
    places = (folder / costs for folder in (beside, Path.cwd(), *beside.parents))
    path = next((path for path in places if path.is_file()), None)
    if path is None:
        return costs
    try:
        load_costs(path)
        return read_json(path)
    except ConfigError as error:
        raise ValueError(str(error)) from error


COSTS = InFile(Annotated[str | Json, BeforeValidator(_written_out)], load_costs)
"""In a file, costs are a preset's name, a cost model's file, or a cost model written out."""


class Goodput(Selector, kind="goodput"):
    """The strategy with the most expected tokens per second, batch * (1 + E[accepted]) / seconds of an iteration.

    The rule of TurboSpec (arXiv 2406.14066) and of Seer's T_SD (arXiv 2511.14617) with a cost model for the seconds.
    Plain decoding is always among the strategies and wins ties, so speculation is off where it does not pay.

    E[accepted] of a chain is the sum of its survival, the product of the chances to keep each drafted token once all
    before it were kept. Rates are counted per drafter and depth: accepted over reached. A token that was requested and
    not drafted counts as not accepted. Counts lose their weight over `window` iterations under whatever strategy, while
    each depth starts with, and so falls back to, 16 drafts that kept a token with chance `prior`: a drafter that is off
    looks as good as new after a while. With chance `epsilon` a strategy is picked at random.

    >>> from tltlab.costs.linear import LinearCosts
    >>> costs = LinearCosts(base_s=4e-3, per_request_s=0, per_token_s=1e-4, per_context_s=0, sd_base_s=1e-3,
    ...                     sd_idle_s=0, draft_level_s=0, draft_level_per_request_s=0)
    >>> goodput = Goodput([Strategy.chain("ngram", 4)], costs, epsilon=0.0, rng=np.random.default_rng(0))
    >>> [str(goodput.choose(StepState(rl_step=0, batch=batch)).strategy) for batch in (1, 64)]
    ['ngram:4', 'none']
    """

    state_names = ("reached_", "kept_")
    by_arm = True

    def __init__(
        self,
        strategies: Sequence[StrategyField],
        costs: Annotated[CostModel, COSTS],
        window: int = 300,
        epsilon: float = 0.02,
        prior: float = 0.6,
        *,
        rng: np.random.Generator,
    ):
        self.strategies = tuple(dict.fromkeys((NO_SPECULATION, *checked_strategies(strategies))))
        if trees := [str(s) for s in self.strategies if s.top_k > 1]:
            raise ConfigError(f"goodput: acceptance is counted along chains, and {trees[0]} is a tree")
        if window < 1:
            raise ConfigError(f"goodput: window must be at least 1 iteration, got {window}")
        if not 0.0 <= epsilon <= 1.0 or not 0.0 <= prior <= 1.0:
            raise ConfigError(f"goodput: epsilon and prior are probabilities, got {epsilon} and {prior}")
        self.window = window
        self.epsilon = epsilon
        self.prior = prior
        self.rng = rng
        self._costs = costs
        self.drafts_with(STANDARD)
        depths: dict[str, int] = {}
        for strategy in self.strategies:
            depths[strategy.drafter] = max(depths.get(strategy.drafter, 0), strategy.draft_depth)
        # Per drafter and position: how often a draft got there, and how often its token was kept.
        self.reached_ = {name: [0.0] * depth for name, depth in depths.items() if depth}
        self.kept_ = {name: [0.0] * depth for name, depth in depths.items() if depth}
        self._tokens = dict.fromkeys(self.strategies, 1.0)
        self._estimate()

    def drafts_with(self, drafters: Drafters) -> None:
        # Traits of other drafters become known with the run.
        known = [s for s in self.strategies if not s.speculates or s.drafter in drafters]
        loaded = any(s.speculates for s in self.strategies)
        self._iterations = {s: self._costs.iteration(s, drafter_loaded=loaded, drafters=drafters) for s in known}
        self._seconds: dict[int, list[tuple[Strategy, float, float]]] = {}

    def tokens(self, strategy: Strategy) -> float:
        """Tokens per request and iteration that `strategy` is expected to yield, the bonus token included."""
        return self._tokens[strategy]

    def choose(self, state: StepState) -> Choice:
        batch, context = max(state.batch, 1), state.context_tokens
        if batch not in self._seconds:
            costs = self._iterations.items()
            self._seconds[batch] = [(s, c.without_context_s(batch), c.context_slope_s(batch)) for s, c in costs]
        best, most = NO_SPECULATION, -1.0
        for strategy, fixed_s, slope_s in self._seconds[batch]:
            seconds = fixed_s + slope_s * context
            rate = self._tokens[strategy] / seconds if seconds > 0 else self._tokens[strategy]
            if rate > most:
                best, most = strategy, rate
        chosen = best
        if self.epsilon and self.rng.random() < self.epsilon:
            chosen = self.strategies[int(self.rng.random() * len(self.strategies))]
        return Choice(chosen, self.epsilon / len(self.strategies) + (1.0 - self.epsilon if chosen == best else 0.0))

    def observe(self, choice: Choice, outcome: StepOutcome) -> None:
        strategy = choice.strategy
        forget = 1.0 - 1.0 / self.window
        for counts in (self.reached_, self.kept_):
            for name, of_drafter in counts.items():
                counts[name] = [forget * count for count in of_drafter]
        if strategy.speculates and strategy in self._tokens and len(outcome.accepted):
            depth = strategy.reach
            accepted = np.asarray(outcome.accepted, np.float64)
            kept = kept_by_position(accepted, depth).sum(axis=0).tolist()
            reached = [float(len(accepted)), *kept[:-1]]
            for counts, new in ((self.reached_, reached), (self.kept_, kept)):
                of_drafter = counts[strategy.drafter]
                of_drafter[:depth] = [old + more for old, more in zip(of_drafter, new, strict=False)]
        self._estimate()

    def _estimate(self) -> None:
        prior = PRIOR_DRAFTS * self.prior
        yields: dict[str, list[float]] = {}
        for name, reached in self.reached_.items():
            survival, tokens = 1.0, 1.0
            yields[name] = expected = []
            for count, kept in zip(reached, self.kept_[name], strict=True):
                survival *= (kept + prior) / (count + PRIOR_DRAFTS)
                tokens += survival
                expected.append(tokens)
        for strategy in self.strategies:
            if strategy.speculates:
                self._tokens[strategy] = yields[strategy.drafter][strategy.reach - 1]

    def load_state_dict(self, state: Json) -> None:
        super().load_state_dict(state)
        self._estimate()


def kept_by_position(accepted: Floats, depth: int) -> Floats:
    """Acceptance by position, (requests, depth): 1s and then 0s that sum to `accepted` where it is whole.

    Else it is an expected value, of the simulator's fluid mode, and the chances are those of the geometric distribution
    with that mean: position i was kept with alpha^i.
    """
    position = np.arange(1, depth + 1)
    kept = (position <= accepted[:, None]).astype(np.float64)
    partly = accepted % 1.0 > 0.0
    if partly.any():
        # A budget may draft deeper for one request than the strategy verifies on average.
        mean = np.minimum(accepted[partly, None], depth)
        # Newton's method from above, on a sum that rises and is convex: it converges.
        alpha = np.minimum(mean, 1.0)
        for _ in range(_NEWTON_STEPS):
            slope = (position * alpha ** (position - 1)).sum(axis=1, keepdims=True)
            alpha = alpha - ((alpha**position).sum(axis=1, keepdims=True) - mean) / slope
        kept[partly] = alpha**position
    return kept
