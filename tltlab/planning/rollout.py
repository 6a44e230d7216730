"""A rollout as a whole: what a planner sees of it, and what it may do between iterations.

    plan      RolloutPlanner.plan(RolloutState) -> actions            once at the start, then at ends and joins
    check     PlanDriver: what a planner returns is checked, what it raises is caught
    do        a simulator or a pool of engines moves, gathers, holds and admits requests

Neither planner nor driver can tell whether engines are real.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from tltlab.arrays import Floats, Ints
from tltlab.costs.base import CostModel
from tltlab.errors import ConfigError
from tltlab.own import OwnPart
from tltlab.records import frozen
from tltlab.state import Key
from tltlab.strategy import NO_SPECULATION, Strategy

HELD = -1
"""In place of a worker: the request is with no engine."""
LENGTHS = "lengths"
"""A need of planners that read the true lengths, which only a simulator has."""


@frozen
class Shape:
    """So many `engines` of so many `gpus` each: `8x1` is eight engines without tensor parallelism.

    >>> Shape.of("2x4"), str(Shape(engines=2, gpus=4))
    (Shape(engines=2, gpus=4), '2x4')
    """

    engines: int
    gpus: int

    def __str__(self) -> str:
        return f"{self.engines}x{self.gpus}"

    @classmethod
    def of(cls, text: str) -> Shape:
        """Read `2x4`; ConfigError for another text."""
        if (found := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text.strip())) is None:
            raise ConfigError(f"{text!r} is no shape: write engines x GPUs of each, such as 2x4")
        return cls(engines=int(found[1]), gpus=int(found[2]))

    def check_same_gpus(self, other: Shape) -> None:
        """ConfigError unless both have the same GPUs, and an engine of the one those of whole engines of the other."""
        if self.engines * self.gpus != other.engines * other.gpus or max(self.gpus, other.gpus) % min(
            self.gpus, other.gpus
        ):
            raise ConfigError(
                f"{other} does not divide the {self.engines * self.gpus} GPUs of {self}: engines x GPUs must be as "
                "many, and an engine must take those of whole other engines"
            )


class EngineCosts:
    """Seconds on an engine of a `shape`, drafting as is best at each batch among `strategies`.

    `tokens(strategy, batch)` is what a request gains in an iteration. By default nothing is drafted.
    """

    def __init__(
        self,
        shape: Shape,
        costs: CostModel,
        strategies: Sequence[Strategy] = (NO_SPECULATION,),
        tokens: Callable[[Strategy, int], float] = lambda strategy, batch: 1.0,
        switch_s: float = 0.0,
    ):
        self.shape = shape
        self.costs = costs
        self.strategies = tuple(strategies)
        self.switch_s = switch_s
        """Seconds until the engines of the shape run once those of another have stopped."""
        self._tokens = tokens
        self._rows = np.zeros((3, len(self.strategies), 1))

    @property
    def max_num_seqs(self) -> float:
        return self.costs.max_num_seqs or math.inf

    @property
    def kv_capacity_tokens(self) -> float:
        return self.costs.kv_capacity_tokens or math.inf

    def prefill_s(self, tokens: float) -> float:
        """Seconds to prefill so many tokens."""
        return self.costs.prefill_s(tokens) if tokens > 0 else 0.0

    def token_s(self, batch: Ints, context_tokens: Floats) -> Floats:
        """Seconds in which each of `batch` requests gains a token, their contexts summing to `context_tokens`."""
        self._know(int(batch.max(initial=0)))
        tokens, fixed_s, slope_s = self._rows[:, :, batch]
        seconds: Floats = ((fixed_s + slope_s * context_tokens) / tokens).min(axis=0)
        return seconds

    def _know(self, most: int) -> None:
        known = self._rows.shape[2]
        if most < known:
            return
        each = [
            [(self._tokens(s, b), cost.without_context_s(b), cost.context_slope_s(b)) for b in range(known, most + 1)]
            for s in self.strategies
            for cost in [self.costs.iteration(s, drafter_loaded=any(other.speculates for other in self.strategies))]
        ]
        self._rows = np.concatenate([self._rows, np.moveaxis(np.array(each), 2, 0)], axis=2)

    def finish_s(self, remaining: Floats, context: Floats) -> Floats:
        """Seconds until each of these requests ends where they run together on one engine.

        `remaining` tokens by case and request, `context` tokens by request or by both, in order of admission. Contexts
        are taken in the middle of each stretch between two ends; requests beyond `max_num_seqs` begin once as many
        tokens as theirs have been generated at the largest batch. Times of one case are in the order of requests.
        """
        cases, num = remaining.shape
        context = np.broadcast_to(context, remaining.shape)
        late_s = np.zeros(cases)
        if num > self.max_num_seqs:
            most = int(self.max_num_seqs)
            full = self.token_s(np.full(cases, most), context[:, :most].sum(axis=1))
            late_s = remaining[:, most:].sum(axis=1) / most * full
        order = np.argsort(remaining, axis=1, kind="stable")
        ends = np.take_along_axis(remaining, order, axis=1)
        held = np.take_along_axis(context, order, axis=1)[:, ::-1].cumsum(axis=1)[:, ::-1]
        begins = np.concatenate([np.zeros((cases, 1)), ends[:, :-1]], axis=1)
        batch = np.minimum(np.arange(num, 0, -1), min(num, self.max_num_seqs)).astype(np.int64)
        each_s = self.token_s(np.broadcast_to(batch, ends.shape), held + batch * (begins + ends) / 2)
        times = ((ends - begins) * each_s).cumsum(axis=1) + late_s[:, None]
        found: Floats = np.empty_like(times)
        np.put_along_axis(found, order, times, axis=1)
        return found


Remaining = Callable[["RolloutState", Floats], Floats]
"""Tokens that requests of a state still generate, by request and quantile."""


@dataclass(frozen=True, kw_only=True)
class RolloutState:
    """A rollout at a moment: all requests that have not ended, on whichever engine, one place each in the arrays.

    `worker` is the engine's number in the `active` shape, HELD for requests that are held. `engines` has the costs of
    every shape that the GPUs can take, the active one among them; None where costs are not known. `ended` has the
    tokens of the responses that have ended. Nothing here may be changed.
    """

    now_s: float
    rl_step: int
    active: Shape
    keys: Sequence[Key]
    worker: Ints
    prompt_tokens: Floats
    generated_tokens: Floats
    max_response_tokens: Floats
    ended: Mapping[Key, int]
    engines: Mapping[Shape, EngineCosts] = field(default_factory=dict)
    belief: Remaining | None = None
    lengths: Mapping[Key, int] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def context_tokens(self) -> Floats:
        """Prompt and generated tokens of each request."""
        return self.prompt_tokens + self.generated_tokens

    @cached_property
    def left_tokens(self) -> Floats:
        """Tokens up to the cap of each request, at least one."""
        return np.maximum(1.0, self.max_response_tokens - self.generated_tokens)

    def remaining(self, quantiles: Floats) -> Floats:
        """Tokens that each request still generates, by request and quantile (0 to 1), as is believed.

        Without a belief any number up to the cap is as likely. ValueError for a belief that is not finite, or of
        another shape.
        """
        if self.belief is None:
            return np.maximum(1.0, self.left_tokens[:, None] * quantiles)
        believed = np.asarray(self.belief(self, quantiles), np.float64)
        if believed.shape != (len(self), len(quantiles)) or not np.isfinite(believed).all():
            raise ValueError(
                f"the belief about lengths must be finite, {len(self)} requests by {len(quantiles)} quantiles, got "
                f"{believed.shape} with {int((~np.isfinite(believed)).sum())} that are not"
            )
        clipped: Floats = np.clip(believed, 1.0, self.left_tokens[:, None])
        return clipped


@frozen
class Move:
    """Continue this request on another engine of the active shape, or begin it there where it is held."""

    key: Key
    worker: int


@frozen
class Gather:
    """Continue all requests on the engines of another shape: `queues` has those of each engine, in order.

    What no queue has goes to the engine with the fewest; what has ended meanwhile is passed over.
    """

    shape: Shape
    queues: tuple[tuple[Key, ...], ...]


@frozen
class Hold:
    """Take a request that has not begun from its engine, until a `Move` begins it."""

    key: Key


Action = Move | Gather | Hold


class RolloutPlanner(ABC):
    """Moves requests of a rollout between engines. One method is enough for a planner of your own.

    >>> class LastOnes(RolloutPlanner):
    ...     def plan(self, state):
    ...         shape = max(state.engines, key=lambda shape: shape.gpus)
    ...         if len(state) > 4 or shape == state.active:
    ...             return []
    ...         return [Gather(shape=shape, queues=())]

    It is asked when a rollout begins, and whenever a request has ended or joined while at most `asked_below` are left,
    which `plan` may set. `needs` names what it cannot do without (LENGTHS).
    """

    needs: frozenset[str] = frozenset()
    asked_below: float = math.inf

    @abstractmethod
    def plan(self, state: RolloutState) -> Sequence[Action]:
        """Return what is to be done now, in order; nothing as a rule."""

    def failed(self, action: Action, why: str) -> None:  # noqa: B027
        """Learn that an action could not be carried out; its requests are where they were, or begin anew."""


class OwnPlanner(OwnPart):
    """A planner class of the user's own."""

    base = RolloutPlanner
    part = "planner"
    contract = "check_planner"
