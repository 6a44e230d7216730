"""How long a rollout's workers spend at each batch size, from the lengths of its responses.

A worker whose responses have the lengths L_(1) >= L_(2) >= .. runs them all at once and ends them shortest first, so
batch b runs for w_b = L_(b) - L_(b+1) plain decode iterations, with L_(n+1) = 0. A strategy that yields A tokens an
iteration needs w_b / A. Response lengths do not depend on the policy, so neither do these weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Literal

import numpy as np

from tltlab.arrays import Ints
from tltlab.errors import ConfigError
from tltlab.traces.trace import Trace

BatchPlacement = Literal["contiguous", "round_robin", "recorded"]


def batch_times(
    trace: Trace,
    workers: int | None = None,
    placement: BatchPlacement | None = None,
    max_batch: int | None = None,
) -> tuple[dict[int, float], dict[int, float]]:
    """By batch size: w_b in plain decode iterations, summed over workers and averaged over RL steps; and the mean
    context while b requests run, prompts and generated tokens summed over the batch.

    `workers` is the trace's number unless given. `placement` is `recorded` where the trace knows the workers and their
    number is not changed, else `contiguous`. Where a worker has more requests than `max_batch`, the next one begins
    when one ends, in workload order.

    >>> batch_times(of_lengths([10, 4], workers=1, prompt_tokens=100))  # doctest: +SKIP
    ({1: 6.0, 2: 4.0}, {1: 106.5, 2: 203.0})
    """
    weights: dict[int, float] = defaultdict(float)
    contexts: dict[int, float] = defaultdict(float)
    for lengths, prompts in _loads(trace, workers, placement):
        for b, weight, context in _drain(lengths, prompts, max_batch):
            weights[b] += weight
            contexts[b] += weight * context
    sizes = sorted(weights)
    return {b: weights[b] / len(trace.rl_steps) for b in sizes}, {b: contexts[b] / weights[b] for b in sizes}


def _drain(lengths: Ints, prompts: Ints, max_batch: int | None) -> Iterator[tuple[int, float, float]]:
    """(batch, plain iterations, mean context) of each stretch between two changes of a worker's batch."""
    waiting = list(range(len(lengths)))[::-1]
    slots = len(lengths) if max_batch is None else max_batch
    left: Ints = np.zeros(0, np.int64)
    context: Ints = np.zeros(0, np.int64)
    while waiting or len(left):
        new = [waiting.pop() for _ in range(min(slots - len(left), len(waiting)))]
        left, context = np.append(left, lengths[new]), np.append(context, prompts[new])
        if steps := int(left.min()):
            # Iteration i of a stretch reads what was there before it: i generated tokens more per request.
            yield len(left), float(steps), float(context.sum() + len(left) * (steps - 1) / 2)
        left, context = left - steps, context + steps
        left, context = left[left > 0], context[left > 0]


def _loads(trace: Trace, workers: int | None, placement: BatchPlacement | None) -> Iterator[tuple[Ints, Ints]]:
    """Response and prompt lengths of each worker in each RL step."""
    number = workers or trace.manifest.num_workers
    if number is None or number < 1:
        raise ConfigError("the trace does not say how many workers it had: give workers, 1 or more")
    recorded = "worker" in trace.outcomes and bool(trace.outcomes["worker"].notna().all())
    same = workers in (None, trace.manifest.num_workers)
    how = placement or ("recorded" if recorded and same else "contiguous")
    if how == "recorded" and not recorded:
        raise ConfigError("placement 'recorded': outcomes.parquet has no worker for some requests; give 'contiguous'")
    if how not in ("contiguous", "round_robin", "recorded"):
        raise ConfigError(f"no placement named {how!r}; there are contiguous, round_robin, recorded")
    for step in trace.iter_rl_steps():
        lengths = step.outcomes["response_tokens"].to_numpy(np.int64)
        prompts = step.workload["prompt_tokens"].to_numpy(np.int64)
        index = np.arange(len(lengths))
        if how == "recorded":
            of = step.outcomes["worker"].to_numpy(np.int64)
        else:
            of = index % number if how == "round_robin" else index * number // max(len(lengths), 1)
        for worker in np.unique(of):
            yield lengths[of == worker], prompts[of == worker]
