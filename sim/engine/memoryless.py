"""Memoryless policies: asked once for each batch and queue, and followed to the end of a rollout in closed form.

Such a policy depends on nothing but batch and waiting. While nothing waits and every resident gains alike, the whole
course is known: residents finish in order of the tokens they lack, and between two finishes batch, strategy and gain
stay the same, so that all macro-steps come out of a few array operations. Where each has a gain of its own, they finish
in order of the iterations they lack, which is another one for each strategy: one such sort for each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tltlab.arrays import Floats, Ints
from tltlab.errors import ConfigError
from tltlab.policies.selector import Selector
from tltlab.state import StepState
from tltlab.strategy import Strategy

from .batch import TOLERANCE_TOKENS
from .log import Columns
from .regime import Regime, Regimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a policy chose, and the bucket and propensity it gave."""

    strategy: Strategy
    bucket: int | None
    propensity: float


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


class MemorylessChoices:
    """The choices of a memoryless selector, remembered for all workers.

    The arrays are over the batch with nothing waiting; their index 0 is unused.
    """

    def __init__(self, selector: Selector, regimes: Regimes) -> None:
        self._selector = selector
        self._regimes = regimes
        self._choices: dict[tuple[int, int], Choice] = {}
        self._by_batch: list[tuple[Choice, Regime]] = []
        self._tokens: Floats = np.zeros(1)
        self._fixed_s: Floats = np.zeros(1)
        self._slope_s: Floats = np.zeros(1)
        self._speculates: Floats = np.zeros(1)
        self._propensity: Floats = np.ones(1)
        self._buckets, self._regime_of = np.zeros(1, object), np.zeros(1, object)

    def choose(self, batch: int, waiting: int, rl_step: int) -> Choice:
        """What the selector chooses at this batch and queue."""
        choice = self._choices.get((batch, waiting))
        if choice is None:
            selector = self._selector
            strategy = selector.choose(StepState(rl_step=rl_step, batch=batch, waiting=waiting))
            check_listed(strategy, self._regimes)
            choice = Choice(strategy=strategy, bucket=selector.bucket_, propensity=selector.propensity_)
            self._choices[batch, waiting] = choice
        return choice

    def up_to(self, batch: int, rl_step: int) -> MemorylessChoices:
        """Itself, with arrays that reach `batch`."""
        if batch > len(self._by_batch):
            sizes = range(len(self._by_batch) + 1, batch + 1)
            choices = [self.choose(size, 0, rl_step) for size in sizes]
            regimes = [self._regimes.at(c.strategy, size) for c, size in zip(choices, sizes, strict=True)]
            pairs = list(zip(regimes, sizes, strict=True))
            self._by_batch += zip(choices, regimes, strict=True)
            self._tokens = np.append(self._tokens, [r.tokens for r in regimes])
            self._fixed_s = np.append(self._fixed_s, [r.fixed_s(size) for r, size in pairs])
            self._slope_s = np.append(self._slope_s, [r.slope_s(size) for r, size in pairs])
            self._speculates = np.append(self._speculates, [r.strategy.speculates for r in regimes])
            self._propensity = np.append(self._propensity, [c.propensity for c in choices])
            self._buckets = np.append(self._buckets, np.array([c.bucket for c in choices], object))
            self._regime_of = np.append(self._regime_of, np.array(regimes, object))
        return self

    def drain(
        self,
        requests: Ints,
        *,
        prompts: Floats,
        left: Floats,
        generated: Floats,
        start_s: float,
        prefill_s: float,
        prefill_tokens: float,
        switch_s: float,
        gains: Callable[[Strategy, int], Floats] | None,
        from_the_start: bool,
        drafter_ready: bool,
    ) -> Drained:
        """Run `requests` to their ends, `left` tokens each, after a prefill; the arrays must reach their number.

        `gains` of a strategy at a batch size are the tokens of every request of the rollout in an iteration, None where
        all gain what the regime says. `switch_s` is paid when speculation first comes in, unless the rollout begins
        here and with it.
        """
        if gains is None:
            order = np.argsort(left, kind="stable")
            first_of, last_of, clocks, each, counts = _events(left[order], self._tokens)
            batch = len(requests) - first_of
            # Tokens that those still there began with, summed from the last to finish backwards.
            base = np.cumsum((prompts + generated)[order][::-1])[::-1][first_of]
            context, growth = base + batch * clocks, batch * each
        else:
            order, first_of, last_of, counts, context, growth = self._events_apart(
                requests, left, prompts + generated, gains
            )
            batch = len(requests) - first_of
        num_steps = len(first_of)
        slope_s = self._slope_s[batch]
        fixed_s, met = self._fixed_s[batch], self._regime_of[batch].tolist()
        speculates = np.flatnonzero(self._speculates[batch])
        if self._regimes.loads_late and not drafter_ready:
            for step, size in enumerate(batch[: speculates[0] if len(speculates) else None].tolist()):
                regime = met[step] = self._regimes.at(met[step].strategy, size, loaded=False)
                fixed_s[step] = regime.fixed_s(size)
        first_s = fixed_s + slope_s * context
        seconds = counts * first_s + slope_s * growth * (counts * (counts - 1) / 2)
        switches, prefills, prefilled = np.zeros(num_steps), np.zeros(num_steps), np.zeros(num_steps)
        prefills[0], prefilled[0] = prefill_s, prefill_tokens
        if len(speculates) and (speculates[0] > 0 or not from_the_start):
            switches[speculates[0]] = switch_s
        finish_s = start_s + np.cumsum(seconds + switches + prefills)
        columns = Columns(
            start_s=finish_s - (seconds + switches + prefills),
            switch_s=switches,
            prefill_s=prefills,
            prefill_tokens=prefilled,
            chunk_tokens=np.zeros(num_steps),
            waiting=np.zeros(num_steps, np.int64),
            num_iterations=counts,
            batch=batch,
            seconds=seconds,
            context_tokens=context,
            tokens=counts * growth,
            asked=np.ones(num_steps, dtype=bool),
            bucket=self._buckets[batch].tolist(),
            propensity=self._propensity[batch],
            reward=[None] * num_steps,
            regime=met,
            gains=[None] * num_steps,
            noise=[None] * num_steps,
        )
        return Drained(
            columns=columns,
            order=requests[order],
            finish_s=np.repeat(finish_s, last_of - first_of),
            first_s=start_s + float(prefills[0] + switches[0] + first_s[0]),
        )

    def _events_apart(
        self, requests: Ints, left: Floats, context: Floats, gains: Callable[[Strategy, int], Floats]
    ) -> tuple[Ints, Ints, Ints, Ints, Floats, Floats]:
        """Macro-steps until all are done, where each request gains its own: order of the ends, and per macro-step the
        range [first, last) of it that ends, its iterations, the context before it and what that grows by in each."""
        there, left, context = np.arange(len(requests)), left.copy(), context.copy()
        orders, parts = [], []
        done = 0
        while len(there):
            batch = len(there)
            choice, regime = self._by_batch[batch - 1]
            smallest = batch
            while smallest > 1 and self._by_batch[smallest - 2][1] is regime:
                smallest -= 1
            gain = gains(choice.strategy, batch)[requests[there]]
            needed = np.maximum(np.ceil((left[there] - TOLERANCE_TOKENS) / gain), 1.0).astype(np.int64)
            order = np.argsort(needed, kind="stable")
            needed, gain, there = needed[order], gain[order], there[order]
            # All that end with the one whose end leaves fewer than `smallest`.
            last = int(np.searchsorted(needed, needed[batch - smallest], side="right"))
            first = _begins(needed[:last])
            reached = needed[first]
            before = np.concatenate([[0], reached[:-1]])
            growth = np.cumsum(gain[::-1])[::-1][first]
            held = np.cumsum(context[there][::-1])[::-1][first]
            ends = np.append(first[1:], last)
            parts.append((done + first, done + ends, reached - before, held + growth * before, growth))
            orders.append(there[:last])
            done += last
            there, gain = there[last:], gain[last:]
            left[there] -= gain * reached[-1]
            context[there] += gain * reached[-1]
        first_of, last_of, counts, contexts, growths = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        return np.concatenate(orders), first_of, last_of, counts, contexts, growths


def _events(ends: Floats, tokens: Floats) -> tuple[Ints, Ints, Floats, Floats, Ints]:
    """Macro-steps that bring a clock past the ascending `ends`; `tokens[b]` is its step while b are left.

    Returns, per macro-step: the range [first, last) of `ends` that it passes, the clock before it, its gain, and its
    iterations. While the gain stays the same the clock need not be advanced event by event.
    """
    n = len(ends)
    # The batches at which the gain is another one than at the next smaller batch.
    changes = np.flatnonzero(tokens[2 : n + 1] != tokens[1:n]) + 2
    firsts, lasts, clocks, gains, counts = [], [], [], [], []
    clock, done = 0.0, 0
    while done < n:
        batch = n - done
        gain = float(tokens[batch])
        at = int(np.searchsorted(changes, batch, side="right"))
        smallest = int(changes[at - 1]) if at else 1
        run = ends[done : n - smallest + 1]
        steps = np.maximum(np.ceil((run - clock - TOLERANCE_TOKENS) / gain), 1.0).astype(np.int64)
        first = _begins(steps)
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


def _begins(values: Ints) -> Ints:
    """Where another value begins, the first included."""
    new = np.ones(len(values), dtype=bool)
    np.not_equal(values[1:], values[:-1], out=new[1:])
    return np.flatnonzero(new)


def check_listed(strategy: Strategy, regimes: Regimes) -> None:
    """ConfigError when a policy chose a strategy that it did not list."""
    if strategy not in regimes.strategies:
        listed = ", ".join(map(str, regimes.strategies))
        raise ConfigError(f"the policy chose {strategy}, which is not among its strategies: {listed}")
