"""A memoryless policy as arrays over the batch size: what it chooses with nothing waiting, what that costs and yields.

Such a policy depends on nothing but batch and waiting, so it is asked once for each of these, and for all workers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tltlab.errors import ConfigError
from tltlab.policies.selector import Selector
from tltlab.state import StepState
from tltlab.strategy import Strategy

from .batch import TOLERANCE_TOKENS
from .log import Columns, Floats, Ints
from .regime import Regime, Regimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a policy chose, and the bucket and propensity it gave."""

    strategy: Strategy
    bucket: int | None
    propensity: float


class Plan:
    """The choices of a memoryless selector, remembered; index 0 of the arrays is unused."""

    def __init__(self, selector: Selector, regimes: Regimes) -> None:
        self._selector = selector
        self._known = regimes
        self._choices: dict[tuple[int, int], Choice] = {}
        self._regime_at: list[Regime] = []
        self._choice_at: list[Choice] = []
        self.tokens: Floats = np.zeros(1)
        self.fixed_s: Floats = np.zeros(1)
        self.slope_s: Floats = np.zeros(1)
        self.speculates: Floats = np.zeros(1)

    def choose(self, batch: int, waiting: int, rl_step: int) -> Choice:
        """What the selector chooses at this batch and queue."""
        found = self._choices.get((batch, waiting))
        if found is None:
            selector = self._selector
            strategy = selector.choose(StepState(rl_step=rl_step, batch=batch, waiting=waiting))
            check_known(strategy, self._known)
            found = Choice(strategy=strategy, bucket=selector.bucket_, propensity=selector.propensity_)
            self._choices[batch, waiting] = found
        return found

    def regime(self, batch: int) -> Regime:
        """The regime at a batch that `up_to` has reached."""
        return self._regime_at[batch - 1]

    def choice(self, batch: int) -> Choice:
        """The choice at a batch that `up_to` has reached."""
        return self._choice_at[batch - 1]

    def up_to(self, batch: int, rl_step: int) -> Plan:
        """Itself, with arrays that reach `batch`."""
        if batch > len(self._regime_at):
            sizes = range(len(self._regime_at) + 1, batch + 1)
            choices = [self.choose(size, 0, rl_step) for size in sizes]
            regimes = [self._known.at(c.strategy, size) for c, size in zip(choices, sizes, strict=True)]
            pairs = list(zip(regimes, sizes, strict=True))
            self._choice_at += choices
            self._regime_at += regimes
            self.tokens = np.append(self.tokens, [r.tokens for r in regimes])
            self.fixed_s = np.append(self.fixed_s, [r.fixed_s(size) for r, size in pairs])
            self.slope_s = np.append(self.slope_s, [r.slope_s(size) for r, size in pairs])
            self.speculates = np.append(self.speculates, [r.strategy.speculates for r in regimes])
        return self


def check_known(strategy: Strategy, regimes: Regimes) -> None:
    """ConfigError when a policy chose a strategy that it did not list."""
    if strategy not in regimes.strategies:
        known = ", ".join(map(str, regimes.strategies))
        raise ConfigError(f"the policy chose {strategy}, which is not among its strategies: {known}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """Macro-steps until a worker is empty; `order` lists the requests as they finish, `finish_s` when each does."""

    columns: Columns
    order: Ints
    finish_s: Floats
    first_s: float

    @property
    def end_s(self) -> float:
        return float(self.finish_s[-1])


def drain(
    plan: Plan,
    requests: Ints,
    prompts: Floats,
    left: Floats,
    generated: Floats,
    *,
    start_s: float,
    prefill_s: float,
    prefill_tokens: float,
    switch_s: float,
    from_the_start: bool,
) -> Drained:
    """Run `requests` to their ends, `left` tokens each; prefill comes first.

    `switch_s` is paid when speculation first comes in, unless the rollout begins here and with it. `plan` must reach
    the number of requests.
    """
    order = np.argsort(left, kind="stable")
    ends = left[order]
    first_of, last_of, clocks, gains, counts = _events(ends, plan.tokens)
    n = len(requests)
    batch = n - first_of
    # Tokens that those still there began with, summed from the last to finish backwards.
    base = np.cumsum((prompts + generated)[order][::-1])[::-1][first_of]
    context = base + batch * clocks
    slope_s = plan.slope_s[batch]
    growth = batch * gains
    first_s = plan.fixed_s[batch] + slope_s * context
    seconds = counts * first_s + slope_s * growth * (counts * (counts - 1) / 2)
    switches = np.zeros(len(batch))
    speculates = np.flatnonzero(plan.speculates[batch])
    if len(speculates) and (speculates[0] > 0 or not from_the_start):
        switches[speculates[0]] = switch_s
    prefill = np.zeros(len(batch))
    prefill[0] = prefill_s
    finish_s = start_s + np.cumsum(seconds + switches + prefill)
    prefilled = np.zeros(len(batch))
    prefilled[0] = prefill_tokens
    sizes = batch.tolist()
    choices = [plan.choice(size) for size in sizes]
    columns = Columns(
        start_s=finish_s - (seconds + switches + prefill),
        switch_s=switches,
        prefill_s=prefill,
        prefill_tokens=prefilled,
        chunk_tokens=np.zeros(len(batch)),
        waiting=np.zeros(len(batch), np.int64),
        num_iterations=counts,
        batch=batch,
        seconds=seconds,
        context_tokens=context,
        tokens=counts * growth,
        asked=np.ones(len(batch), dtype=bool),
        bucket=[choice.bucket for choice in choices],
        propensity=np.array([choice.propensity for choice in choices]),
        reward=[None] * len(sizes),
        regime=[plan.regime(size) for size in sizes],
        gains=[None] * len(sizes),
        noise=[None] * len(sizes),
    )
    return Drained(
        columns=columns,
        order=requests[order],
        finish_s=np.repeat(finish_s, last_of - first_of),
        first_s=start_s + float(prefill[0] + switches[0] + first_s[0]),
    )


def _events(ends: Floats, tokens: Floats) -> tuple[Ints, Ints, Floats, Floats, Ints]:
    """Macro-steps that bring a clock past the ascending `ends`; `tokens[b]` is its step while b are left.

    Returns, per macro-step: the range [first, last) of `ends` that it passes, the clock before it, its gain, and its
    iterations. While the gain stays the same the clock need not be advanced event by event.
    """
    n = len(ends)
    # last_batch[b]: the smallest batch down to which the gain is that of b.
    changes = np.flatnonzero(np.diff(tokens[1 : n + 1])) + 2
    firsts, lasts, clocks, gains, counts = [], [], [], [], []
    clock, done = 0.0, 0
    while done < n:
        batch = n - done
        gain = float(tokens[batch])
        at = int(np.searchsorted(changes, batch, side="right"))
        smallest = int(changes[at - 1]) if at else 1
        run = ends[done : n - smallest + 1]
        steps = np.maximum(np.ceil((run - clock - TOLERANCE_TOKENS) / gain), 1.0).astype(np.int64)
        first = np.flatnonzero(np.diff(steps, prepend=0))
        reached = steps[first]
        before = np.concatenate([[0], reached[:-1]])
        end = int(np.searchsorted(ends, clock + reached[-1] * gain + TOLERANCE_TOKENS, side="right"))
        firsts.append(done + first)
        lasts.append(np.append(done + first[1:], max(end, done + len(run))))
        clocks.append(clock + before * gain)
        gains.append(np.full(len(first), gain))
        counts.append(reached - before)
        clock += float(reached[-1]) * gain
        done = int(lasts[-1][-1])
    return tuple(np.concatenate(parts) for parts in (firsts, lasts, clocks, gains, counts))  # type: ignore[return-value]
