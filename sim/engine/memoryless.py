"""Memoryless policies: asked once for each batch and queue, and followed to the end of a rollout in closed form.

Such a policy depends on nothing but batch and waiting. While nothing waits and every resident gains alike, residents
finish in order of their remaining tokens. Between two finishes batch, strategy and gain stay the same, so a few array
operations compute all macro-steps. Where gains are drawn or replayed, all this holds as long as the policy does without
a drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from tltlab.arrays import Array, Flags, Floats
from tltlab.records import frozen
from tltlab.state import NO_CHOICE, Choice, StepState

from .batch import TOLERANCE_TOKENS
from .log import Columns
from .regime import Regime, Regimes
from .requests import Residents


@frozen
class Drained:
    """Macro-steps of workers until `down_to` requests are left, in rows and columns as `residents`.

    A macro-step has `counts` iterations, 0 where none begins, in `seconds`, with a drafter `loaded` or not yet;
    `growth` is what each adds to the `context` before it. In front of the residents' columns is that of a first
    iteration which verifies no draft though the choice drafts. Macro-steps, and the residents of their columns, end at
    `finish_s`; a worker's first iteration ends at `first_s`.
    """

    choices: MemorylessChoices
    residents: Residents
    finish_s: Floats
    first_s: Floats
    switch_s: Floats
    prefill_s: Floats
    counts: Floats
    seconds: Floats
    context: Floats
    growth: Floats
    loaded: Flags
    down_to: int

    def columns(self, rows: Sequence[int]) -> Columns:
        """Return the macro-steps of these rows' workers, one worker after another."""
        of, at = np.nonzero(self.counts[rows])
        row = np.asarray(rows, np.int64)[of]
        opens, counts, num_steps = at == 0, self.counts[row, at], len(at)
        batch = self.counts.shape[1] + self.down_to - np.maximum(at, self.residents.present.argmax(axis=1)[row] + 1)
        codes, chosen_at = np.unique(3 * batch + np.where(opens, 2, self.loaded[row, at]), return_inverse=True)
        options = [self.choices.of(code // 3, loaded=code % 3) for code in codes.tolist()]
        chosen = [options[i] for i in chosen_at.tolist()]
        first = np.diff(of, prepend=-1) > 0
        to_prefill = self.residents.to_prefill
        prefills, prefilled = np.where(first, self.prefill_s[row], 0.0), np.where(first, to_prefill[row], 0.0)
        switches, seconds = self.switch_s[row, at], self.seconds[row, at]
        return Columns(
            start_s=self.finish_s[row, at] - (seconds + switches + prefills),
            switch_s=switches,
            prefill_s=prefills,
            prefill_tokens=prefilled,
            chunk_tokens=np.zeros(num_steps),
            waiting=np.zeros(num_steps, np.int64),
            num_iterations=counts.astype(np.int64),
            batch=batch,
            seconds=seconds,
            context_tokens=self.context[row, at],
            tokens=counts * self.growth[row, at],
            is_decision=~opens,
            bucket=[choice.bucket for choice, _ in chosen],
            propensity=np.array([choice.propensity for choice, _ in chosen]),
            reward=[None] * num_steps,
            regime=[regime for _, regime in chosen],
            gains=[None] * num_steps,
            noise=[None] * num_steps,
        )


class MemorylessChoices:
    """The choices of a memoryless policy, or the one that a policy keeps to, remembered for all workers."""

    def __init__(self, ask: Callable[[StepState], Choice], regimes: Regimes):
        self._ask = ask
        self._regimes = regimes
        self._choices: dict[tuple[int, int], Choice] = {}
        self._by_batch: list[tuple[Choice, Regime]] = []
        self._terms: Floats = np.zeros((7, 1))
        """By batch, with nothing waiting: tokens, seconds without context, those before a drafter is loaded, seconds
        per token of context, whether it speculates, and both seconds of an iteration that verifies no draft."""
        self._drafts_from = [0]
        """By batch, the largest up to it that drafts, 0 for none."""

    def choose(self, batch: int, waiting: int, rl_step: int) -> Choice:
        """The policy's choice at this batch and queue."""
        choice = self._choices.get((batch, waiting))
        if choice is None:
            choice = self._ask(StepState(rl_step=rl_step, batch=batch, waiting=waiting))
            self._choices[batch, waiting] = choice
        return choice

    def up_to(self, batch: int, rl_step: int) -> MemorylessChoices:
        """Itself, ready to drain this many requests."""
        terms = []
        for size in range(len(self._by_batch) + 1, batch + 1):
            choice = self.choose(size, 0, rl_step)
            regime = self._regimes.at(choice.strategy, size)
            fixed_s, slope_s = regime.terms(size)
            unloaded_s = fixed_s
            if self._regimes.loads_late:
                unloaded_s = self._regimes.at(choice.strategy, size, loaded=False).terms(size)[0]
            self._by_batch.append((choice, regime))
            self._drafts_from.append(size if choice.strategy.speculates else self._drafts_from[-1])
            plain = self._regimes.undrafted(size).terms(size)
            terms.append((regime.tokens, fixed_s, unloaded_s, slope_s, choice.strategy.speculates, *plain))
        if terms:
            self._terms = np.append(self._terms, np.array(terms, np.float64).T, axis=1)
        return self

    def of(self, batch: int, loaded: int) -> tuple[Choice, Regime]:
        """The choice at a batch that `up_to` has reached, and its regime where a drafter is loaded, or not yet.

        2 stands for a first iteration, which verifies no draft.
        """
        if loaded == 2:
            return NO_CHOICE, self._regimes.undrafted(batch)
        choice, regime = self._by_batch[batch - 1]
        return choice, regime if loaded else self._regimes.at(choice.strategy, batch, loaded=False)

    def largest_drafting_batch(self, batch: int) -> int:
        """The largest batch up to this one, which `up_to` must have reached, that drafts; 0 for none."""
        return self._drafts_from[batch]

    def drain(
        self,
        residents: Residents,
        *,
        start_s: float,
        rl_step: int,
        from_the_start: bool = False,
        drafter_ready: bool = False,
        down_to: int = 0,
    ) -> Drained:
        """Run residents to their ends after a prefill of each worker.

        `down_to` further residents, which lack at least as much, keep running. A switch is paid when speculation first
        comes in, unless the rollout begins here and with it; then the first iteration has no draft to verify.
        """
        workers, n = np.arange(len(residents.remaining)), residents.remaining.shape[1]
        self.up_to(n + down_to, rl_step)
        costs = self._regimes.costs
        prefill_s = np.array([costs.prefill_s(tokens) for tokens in residents.to_prefill.tolist()])
        begin = workers, residents.present.argmax(axis=1)
        sizes = n - begin[1] + down_to
        opens = residents.present[:, -1] & (self._terms[4, sizes] > 0) & from_the_start
        undrafted_s, more_s = self._terms[5:, sizes]
        opening_s = opens * (undrafted_s + more_s * residents.context_sums[begin])
        batch = np.arange(n, 0, -1) + down_to
        tokens, fixed_s, unloaded_s, slope_s, speculates = self._terms[:5, n + down_to : down_to : -1]
        counts, clocks = _drain_uniform(residents.remaining, tokens, opens)
        context, growth = residents.context_sums + batch * clocks, np.broadcast_to(batch * tokens, counts.shape)
        loaded, switches = np.ones(counts.shape, dtype=bool), np.zeros(counts.shape)
        if self._regimes.loads_late and not drafter_ready:
            drafts = ((counts > 0) & (speculates > 0)) | opens[:, None]
            loaded = np.logical_or.accumulate(drafts, axis=1)
            switch = drafts.argmax(axis=1)
            paid = loaded[:, -1] & ~opens
            switches[workers[paid], switch[paid]] = costs.switch_s
            fixed_s = np.where(loaded, fixed_s, unloaded_s)
        first_s = fixed_s + slope_s * context
        seconds = counts * first_s + slope_s * growth * (counts * (counts - 1) / 2)
        return Drained(
            choices=self,
            residents=residents,
            finish_s=start_s + np.cumsum(np.column_stack([prefill_s + opening_s, seconds + switches]), axis=1),
            first_s=start_s + (prefill_s + np.where(opens, opening_s, switches[begin] + first_s[begin])),
            switch_s=np.column_stack([np.zeros(len(workers)), switches]),
            prefill_s=prefill_s,
            counts=np.column_stack([opens, counts]),
            seconds=np.column_stack([opening_s, seconds]),
            context=np.column_stack([residents.context_sums[begin], context]),
            growth=np.column_stack([sizes, growth]),
            loaded=np.column_stack([opens, loaded]),
            down_to=down_to,
        )


def _drain_uniform(remaining: Floats, tokens: Floats, gained: Array) -> tuple[Floats, Floats]:
    """Macro-steps until all are done whose `remaining` tokens ascend along each row; all gain `tokens[c]` in column c.

    Each request of a row has `gained` a token or none. Returns the iterations of each, and the tokens that a request
    gained before it. While the gain stays the same the clock need not be advanced event by event.
    """
    counts, clocks = np.zeros(remaining.shape), np.zeros(remaining.shape)
    clock = passed = gained[:, None].astype(np.float64)
    for begin, end in _runs(tokens):
        gain, run = tokens[begin], remaining[:, begin:end]
        steps = np.maximum(np.ceil((run - clock - TOLERANCE_TOKENS) / gain), 1.0)
        # Responses that the clock has passed ended with the macro-step before.
        steps[run <= passed] = 0.0
        before = np.pad(steps, ((0, 0), (1, 0)))[:, :-1]
        counts[:, begin:end] = steps - before
        clocks[:, begin:end] = clock + before * gain
        clock = clock + steps[:, -1:] * gain
        passed = clock + TOLERANCE_TOKENS
    return counts, clocks


def _runs(values: Array) -> Iterator[tuple[int, int]]:
    """The ranges [begin, end) in which they stay the same."""
    return pairwise([0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)])
