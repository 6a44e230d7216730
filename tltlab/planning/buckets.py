"""Buckets chosen exactly: which strategy for which batch sizes, within a memory cap for their CUDA graphs.

As responses end, a worker's batch falls, and it generates w_b tokens per request at batch b (`batch_times`). Under
strategy s they take w_b * t_s(b) / A_s seconds: t_s(b) seconds an iteration, A_s tokens a request and iteration. A plan
gives contiguous ranges of batch sizes one strategy each; borders may lie anywhere in 1..max_batch. Its graphs take what
`graph_pool` counts, to rounding.

Without a cap each batch takes its fastest strategy, and a limit on the number of rows is a dynamic programme over
(batch, rows, strategy). A cap couples the ranges, since strategies share runners and a runner is paid at its largest
batch: then a label-setting search is made. All are exact. HiGHS (scipy.optimize.milp) finds the same seconds from the
integer programme that `bucket_bounds` relaxes, but took 93 ms in the median and up to 4.9 s for 32 batch sizes x 16
strategies where the search took 62 and 228 ms, and does not find the smallest of equals.

A label is a choice for all batches above b: seconds, bytes, the runners that are open, the strategy in force and the
rows so far. One label makes another superfluous when it is no slower and could copy whatever the other does next for no
more memory: it pays for the runners that only the other has open (at most their opening at b), for a row's end where
the other just goes on, and for that row. The rest is pruned by `bucket_bounds` against a plan found by a narrow search.

`batch_times` has w_b from the lengths of a trace. A worker whose responses have the lengths L_(1) >= L_(2) >= .. runs
them all at once and ends them shortest first, so batch b runs for w_b = L_(b) - L_(b+1) plain decode iterations, with
L_(n+1) = 0. A strategy that yields A tokens an iteration needs w_b / A. Lengths do not depend on the policy, so neither
does w_b.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tltlab.arrays import Floats, Ints, Words
from tltlab.drafters.specs import STANDARD, Drafters
from tltlab.errors import ConfigError
from tltlab.strategy import Strategy
from tltlab.traces.trace import Trace

from .bucket_bounds import Bounds, BucketProblem
from .graph_pool import GraphPool, plan_bucketed, sglang_sizes

WIDTHS = (20, 300, 2000)
ROUNDING = 1e-12
MAX_RUNNERS = 63


def batch_times(trace: Trace, workers: int | None = None) -> tuple[dict[int, float], dict[int, float]]:
    """By batch size: w_b in plain decode iterations, summed over workers and averaged over RL steps; and the mean
    context while b requests run, prompts and generated tokens summed over the batch.

    `workers` is the trace's number unless given. Requests are where they ran if the trace knows that and the number is
    not changed, else contiguous. Raises ConfigError where the number is not known.

    >>> batch_times(of_lengths([10, 4], workers=1, prompt_tokens=100))  # doctest: +SKIP
    ({1: 6.0, 2: 4.0}, {1: 106.5, 2: 203.0})
    """
    weights: dict[int, float] = defaultdict(float)
    contexts: dict[int, float] = defaultdict(float)
    for lengths, prompts in _loads(trace, workers):
        generated = 0
        for length in np.unique(lengths).tolist():
            running, steps = lengths >= length, length - generated
            b = int(running.sum())
            # Iteration i of a stretch reads what was there before it: i generated tokens more per request.
            contexts[b] += steps * (float(prompts[running].sum()) + b * (generated + (steps - 1) / 2))
            weights[b] += steps
            generated = length
    sizes = sorted(b for b in weights if weights[b])
    return {b: weights[b] / len(trace.rl_steps) for b in sizes}, {b: contexts[b] / weights[b] for b in sizes}


def _loads(trace: Trace, workers: int | None) -> Iterator[tuple[Ints, Ints]]:
    """Response and prompt lengths of each worker in each RL step."""
    number = workers or trace.manifest.num_workers
    if number is None or number < 1:
        raise ConfigError("the trace does not say how many workers it had: give workers, 1 or more")
    recorded = "worker" in trace.outcomes and bool(trace.outcomes["worker"].notna().all())
    for step in trace.iter_rl_steps():
        lengths = step.outcomes["response_tokens"].to_numpy(np.int64)
        prompts = step.workload["prompt_tokens"].to_numpy(np.int64)
        if recorded and workers in (None, trace.manifest.num_workers):
            of = step.outcomes["worker"].to_numpy(np.int64)
        else:
            of = np.arange(len(lengths)) * number // max(len(lengths), 1)
        for worker in np.unique(of):
            yield lengths[of == worker], prompts[of == worker]


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """(min_batch, strategy) rows as a `BatchTable` takes them, the seconds they need and the bytes of their graphs.

    `seconds` is the sum of w_b * t_s(b) / A_s; `memory_bytes` is 0 where no pool was given.
    """

    rows: tuple[tuple[int, Strategy], ...]
    seconds: float
    memory_bytes: float


def plan_buckets(
    weights: Mapping[int, float],
    seconds_per_token: Callable[[Strategy, int], float],
    strategies: Sequence[Strategy],
    *,
    pool: GraphPool | None = None,
    cap_bytes: float | None = None,
    sizes: Sequence[int] | None = None,
    max_batch: int,
    max_buckets: int | None = None,
    drafters: Drafters = STANDARD,
) -> BucketPlan:
    """The plan for batches 1..max_batch with the fewest seconds; of equals the one with the least memory or rows.

    `weights` are w_b by batch size, those above `max_batch` do not count. `seconds_per_token(s, b)` is t_s(b) / A_s,
    asked only where w_b > 0. `sizes` are the captured batch sizes, SGLang's up to `max_batch` where none are given.
    Raises ConfigError where no plan fits into `cap_bytes`.

    >>> from tltlab.strategy import NO_SPECULATION
    >>> speed = {("ngram", 1): 0.5, ("ngram", 2): 2.0, ("none", 1): 1.0, ("none", 2): 1.0}
    >>> arms = [NO_SPECULATION, Strategy.chain("ngram", 4)]
    >>> plan = plan_buckets({1: 90.0, 2: 10.0}, lambda s, b: speed[s.drafter, b], arms, max_batch=2)
    >>> [(b, str(s)) for b, s in plan.rows]
    [(1, 'ngram:4'), (2, 'none')]
    """
    strategies = _checked(weights, strategies, pool, cap_bytes, max_batch, max_buckets)
    sizes = sglang_sizes(max_batch) if sizes is None else tuple(sizes)
    seconds = _seconds(weights, seconds_per_token, strategies, max_batch)
    max_rows = max_batch if max_buckets is None else min(max_buckets, max_batch)
    floor_s, choice = _without_cap(seconds, max_rows)
    plan = _plan(choice, seconds, strategies, pool, sizes, drafters)
    if pool is None or cap_bytes is None or plan.memory_bytes <= cap_bytes:
        return plan
    fitting = cheapest(BucketProblem.of(seconds, strategies, pool, sizes, cap_bytes, drafters), floor_s, max_rows)
    if fitting is None:
        least = min(pool.memory_bytes(plan_bucketed([(1, s)], max_batch, sizes, drafters=drafters)) for s in strategies)
        raise ConfigError(
            f"no plan of {', '.join(map(str, strategies))} fits into {cap_bytes:.4g} bytes; the smallest of them alone "
            f"takes {least:.4g} for batches to {max_batch}: raise the cap, or lower max_batch or the captured sizes"
        )
    return _plan(fitting, seconds, strategies, pool, sizes, drafters)


def _without_cap(seconds: Floats, max_rows: int) -> tuple[Floats, list[int]]:
    """The least seconds [b, k, s] of batches 1..b below a row of s, with k rows more; the best choice for all batches.

    Of equally fast choices one with the fewest rows, so that a batch of no weight goes with its neighbour.
    """
    num_strategies, num_batches = seconds.shape
    floor_s = np.zeros((num_batches + 1, max_rows, num_strategies))
    for b in range(1, num_batches + 1):
        goes_on = floor_s[b - 1] + seconds[:, b - 1]
        floor_s[b] = goes_on
        floor_s[b, 1:] = np.minimum(goes_on[1:], goes_on[:-1].min(axis=1, keepdims=True))
    totals = (floor_s[-2] + seconds[:, -1]).min(axis=1)
    k = int(totals.argmin())
    choice = [int((floor_s[-2, k] + seconds[:, -1]).argmin())]
    for b in range(num_batches - 1, 0, -1):
        goes_on = floor_s[b - 1] + seconds[:, b - 1]
        s = choice[-1]
        if k and goes_on[k - 1].min() < goes_on[k, s]:
            k -= 1
            s = int(goes_on[k].argmin())
        choice.append(s)
    return floor_s, choice[::-1]


def _plan(
    choice: Sequence[int],
    seconds: Floats,
    strategies: Sequence[Strategy],
    pool: GraphPool | None,
    sizes: Sequence[int],
    drafters: Drafters,
) -> BucketPlan:
    rows = tuple((b + 1, strategies[s]) for b, s in enumerate(choice) if b == 0 or s != choice[b - 1])
    memory = 0.0 if pool is None else pool.memory_bytes(plan_bucketed(rows, len(choice), sizes, drafters=drafters))
    return BucketPlan(
        rows=rows, seconds=math.fsum(seconds[s, b] for b, s in enumerate(choice)), memory_bytes=float(memory)
    )


def _seconds(
    weights: Mapping[int, float],
    seconds_per_token: Callable[[Strategy, int], float],
    strategies: Sequence[Strategy],
    max_batch: int,
) -> Floats:
    seconds = np.zeros((len(strategies), max_batch))
    for b in range(1, max_batch + 1):
        if not (weight := weights.get(b, 0.0)):
            continue
        for i, strategy in enumerate(strategies):
            value = weight * seconds_per_token(strategy, b)
            if not 0.0 <= value < math.inf:
                raise ConfigError(f"seconds of {strategy} at batch {b} must be finite and not negative, got {value}")
            seconds[i, b - 1] = value
    return seconds


def _checked(
    weights: Mapping[int, float],
    strategies: Sequence[Strategy],
    pool: GraphPool | None,
    cap_bytes: float | None,
    max_batch: int,
    max_buckets: int | None,
) -> tuple[Strategy, ...]:
    strategies = tuple(dict.fromkeys(strategies))
    if not strategies:
        raise ConfigError("no strategies to choose buckets from: give at least one")
    if max_batch < 1:
        raise ConfigError(f"max_batch must be at least 1, got {max_batch}")
    if max_buckets is not None and max_buckets < 1:
        raise ConfigError(f"max_buckets must be at least 1, got {max_buckets}")
    if bad := [b for b, w in weights.items() if b < 1 or not 0.0 <= w < math.inf]:
        raise ConfigError(f"weights map batch sizes from 1 to times from 0 up, got {bad[0]}: {weights[bad[0]]}")
    if cap_bytes is not None and pool is None:
        raise ConfigError("a memory cap needs a graph pool that says what graphs take: give pool as well")
    if cap_bytes is not None and not cap_bytes > 0:
        raise ConfigError(f"cap_bytes must be above 0, got {cap_bytes}")
    if cap_bytes is not None and 2 * len(strategies) > MAX_RUNNERS:
        raise ConfigError(
            f"{len(strategies)} strategies under a memory cap: at most {MAX_RUNNERS // 2} can be searched"
        )
    return strategies


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Columns of all labels at one batch; `parent` is the row in the labels of the batch above."""

    seconds: Floats
    memory: Floats
    open: Words
    last: Ints
    num_rows: Ints
    parent: Ints
    bound: Floats

    def __len__(self) -> int:
        return len(self.seconds)

    def take(self, rows: Ints) -> Labels:
        return Labels(**{name: getattr(self, name)[rows] for name in self.__slots__})


def cheapest(problem: BucketProblem, floor_s: Floats, max_rows: int) -> list[int] | None:
    """The strategy of each batch 1..B in the fastest plan that fits, of those the smallest; None where none fits.

    `floor_s`[b, k, s] are the least seconds of batches 1..b below a row of s, with at most k rows more.
    """
    bounds = Bounds.of(problem)
    best_s, choice = np.inf, None
    # A narrow search finds a good plan; a wider one that leaves nothing out below its seconds proves the best.
    for width in (*WIDTHS, None):
        plan_s, choice, complete = _search(problem, bounds, floor_s, max_rows, best_s * (1.0 + 1e-9), width)
        if complete:
            break
        best_s = min(best_s, plan_s)
    return choice


def _search(
    p: BucketProblem, bounds: Bounds, floor_s: Floats, max_rows: int, most_s: float, width: int | None
) -> tuple[float, list[int] | None, bool]:
    """Seconds and choice of the best plan of at most `most_s`, and whether nothing was left out for the width."""
    none = np.zeros(1, np.int64)
    labels = Labels(
        seconds=np.zeros(1), memory=np.zeros(1), open=np.zeros(1, np.uint64), last=none - 1, num_rows=none, parent=none,
        bound=np.zeros(1),
    )  # fmt: skip
    steps, complete = [], True
    for i in reversed(range(p.seconds.shape[1])):
        labels = _bounded(p, bounds, floor_s, max_rows, _extended(p, labels, i), i, most_s)
        if width is not None and len(labels) > 4 * width:
            labels, complete = _narrowed(labels, 4 * width), False
        labels = _undominated(p, labels, i)
        if width is not None and len(labels) > width:
            labels, complete = _narrowed(labels, width), False
        if not len(labels):
            return np.inf, None, complete
        steps.append(labels)
    row = int(np.lexsort((labels.num_rows, labels.memory, labels.seconds))[0])
    best_s, choice = float(labels.seconds[row]), []
    for labels in reversed(steps):
        choice.append(int(labels.last[row]))
        row = int(labels.parent[row])
    return best_s, choice, complete


def _extended(p: BucketProblem, labels: Labels, i: int) -> Labels:
    """Every label with every strategy at index i, as far as that fits."""
    opening = ((1.0 - p.has(labels.open)) * p.opening[:, i]) @ p.uses.T
    switches = labels.last[:, None] != np.arange(len(p.seconds))
    memory = labels.memory[:, None] + np.where(switches, p.end[:, i], p.stay[:, i]) + opening
    parent, last = np.nonzero(memory <= p.cap * (1.0 + ROUNDING))
    return Labels(
        seconds=labels.seconds[parent] + p.seconds[last, i],
        memory=memory[parent, last],
        open=labels.open[parent] | p.bits[last],
        last=last,
        num_rows=labels.num_rows[parent] + switches[parent, last],
        parent=parent,
        bound=labels.bound[parent],
    )


def _bounded(
    p: BucketProblem, bounds: Bounds, floor_s: Floats, max_rows: int, labels: Labels, i: int, most_s: float
) -> Labels:
    """Labels that may still end within `most_s`, the cap and `max_rows`, with their bounds, the fastest first."""
    labels = labels.take(np.flatnonzero(labels.num_rows <= max_rows))
    if i == 0 or not len(labels):
        rows = np.flatnonzero(labels.seconds <= most_s)
        return labels.take(rows[np.lexsort((labels.memory[rows], labels.seconds[rows]))])
    below = bounds.below(labels.open, labels.last, i)
    priced = (below[:, 1:] - bounds.prices * (p.cap - labels.memory)[:, None]).max(axis=1)
    least_s = floor_s[i, max_rows - labels.num_rows, labels.last]
    bound = labels.seconds + np.maximum(priced, least_s)
    fits = labels.memory + below[:, 0] <= p.cap * (1.0 + ROUNDING)
    rows = np.flatnonzero(fits & (bound <= most_s))
    order = rows[np.lexsort((labels.memory[rows], labels.seconds[rows]))]
    return replace(labels.take(order), bound=bound[order])


def _narrowed(labels: Labels, width: int) -> Labels:
    return labels.take(np.sort(np.argsort(labels.bound, kind="stable")[:width]))


def _undominated(p: BucketProblem, labels: Labels, i: int) -> Labels:
    """`labels`, fastest first, without those that an earlier one can copy for no more memory; i is the last index."""
    if i:
        opening, ends = p.opening[:, i - 1], p.end[:, i - 1] - p.stay[:, i - 1]
    else:
        opening, ends = np.zeros(len(p.opening)), np.zeros(len(p.seconds))
    runners = p.has(labels.open)
    price = runners * opening
    whole, memory, last, num_rows = price.sum(axis=1), labels.memory, labels.last, labels.num_rows
    rows, at = np.arange(len(labels)), 0
    while at + 1 < len(rows):
        after = slice(at + 1, None)
        switches = last[after] != last[at]
        extra = whole[after] - price[after] @ runners[at] + np.where(switches, ends[last[after]], 0.0)
        beaten = (memory[at] + extra <= memory[after]) & (num_rows[at] + switches <= num_rows[after])
        if beaten.any():
            survivors = np.concatenate([np.arange(at + 1), at + 1 + np.flatnonzero(~beaten)])
            rows, runners, price, whole = rows[survivors], runners[survivors], price[survivors], whole[survivors]
            memory, last, num_rows = memory[survivors], last[survivors], num_rows[survivors]
        at += 1
    return labels.take(rows)
