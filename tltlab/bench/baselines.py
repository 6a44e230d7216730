"""Two other ways to simulate plain decoding, for the benchmark: an event per iteration, and a pure closed form.

Both know neither speculation nor a full KV cache. The first is what public simulators do, written as fast as SimPy and
numpy allow: one process per worker, one timeout per decode step, the batch as arrays.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import simpy

from tltlab.costs.base import CostModel
from tltlab.sim.engine.requests import Requests
from tltlab.strategy import NO_SPECULATION


def per_iteration_makespan_s(requests: Requests, queues: list[list[int]], costs: CostModel) -> float:
    """Makespan of plain decoding with one SimPy event per decode iteration and worker."""
    cost = costs.iteration(NO_SPECULATION)
    env = simpy.Environment()

    def worker(queue: list[int]) -> Generator[simpy.Event, Any, None]:
        left = np.sort(requests.lengths[queue])
        context = int(requests.prompts[queue].sum())
        yield env.timeout(costs.prefill_s(float(context)))
        done, num_iterations = 0, 0
        contexts = (requests.prompts[queue] + requests.lengths[queue])[np.argsort(requests.lengths[queue])]
        while done < len(left):
            batch = len(left) - done
            yield env.timeout(cost.seconds(batch, context))
            num_iterations += 1
            context += batch
            while done < len(left) and left[done] <= num_iterations:
                context -= int(contexts[done])
                done += 1

    processes = [env.process(worker(queue)) for queue in queues if queue]
    env.run(until=env.all_of(processes))
    return float(env.now)


def closed_form_makespan_s(requests: Requests, queues: list[list[int]], costs: CostModel) -> float:
    """Makespan of plain decoding without events: T = sum over finishes of the time between two of them.

    With lengths ascending, batch b_j = n - j runs L_(j) - L_(j-1) iterations, its context growing by b_j in each.
    """
    cost = costs.iteration(NO_SPECULATION)
    ends = [0.0]
    for queue in queues:
        order = np.argsort(requests.lengths[queue])
        lengths = requests.lengths[queue][order].astype(np.float64)
        prompts = requests.prompts[queue][order].astype(np.float64)
        counts = np.diff(lengths, prepend=0.0)
        batch = np.arange(len(lengths), 0, -1)
        fixed = np.array([cost.without_context_s(int(b)) for b in batch])
        slope = np.array([cost.context_slope_s(int(b)) for b in batch])
        context = np.cumsum(prompts[::-1])[::-1] + batch * (lengths - counts)
        seconds = counts * (fixed + slope * context) + slope * batch * counts * (counts - 1) / 2
        ends.append(costs.prefill_s(float(prompts.sum())) + float(seconds.sum()))
    return max(ends)
