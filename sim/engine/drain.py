"""The rest of a worker's rollout in closed form: nothing waits, the policy is memoryless, every resident gains alike.

Then the whole course is known: residents finish in order of the tokens they lack, and between two finishes batch,
strategy and gain stay the same, so that all macro-steps come out of a few array operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .batch import TOLERANCE_TOKENS
from .log import Columns, Floats, Ints
from .memoryless import Plan


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
