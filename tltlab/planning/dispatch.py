"""Published dispatch of requests to workers: StreamRL's pools, RhymeRL's rank groups, Seer's group estimates, AReaL's
bound on staleness. Pure rules; the simulator's placements and admissions are built on them.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from tltlab.errors import ConfigError

Seconds = Callable[[int, float], float]
"""Seconds per token at a batch size and a response length."""


def split_pools(
    num_long: int, num_regular: int, long_tokens: float, regular_tokens: float, workers: int, token_s: Seconds
) -> tuple[int, int]:
    """Workers for the long and for the regular requests: StreamRL's search (arXiv 2504.15930).

    All splits (N_l, N_r) are tried; the one with the least of the larger latency wins, a pool's latency being

        PTL(BS) * L * ceil(M / BS),    M = ceil(requests / workers) requests on a worker, BS = M.

    Ties go to fewer workers for the long ones. A kind without requests gets no worker. Raises ConfigError for fewer
    workers than kinds.

    >>> split_pools(8, 32, 1000.0, 100.0, 4, lambda batch, tokens: 1.0 + 0.25 * batch)
    (3, 1)
    """
    if workers < (num_long > 0) + (num_regular > 0):
        raise ConfigError(f"{workers} worker cannot be split into a pool for long responses and one for the others")
    if not num_long or not num_regular:
        return (workers, 0) if num_long else (0, workers)

    def latency(requests: int, share: int, tokens: float) -> float:
        batch = math.ceil(requests / share)
        return token_s(batch, tokens) * tokens

    splits = range(1, workers)
    best = min(
        splits, key=lambda n: max(latency(num_long, n, long_tokens), latency(num_regular, workers - n, regular_tokens))
    )
    return best, workers - best


def rank_groups(expected: Sequence[float], workers: int, token_s: Seconds) -> list[int]:
    """The worker of each request by its expected tokens: RhymeRL's intra-step tier (arXiv 2508.18588).

    Requests sorted by falling length are cut into as many rank groups as there are workers, one each, so that no
    group takes longer than the least possible time T: the longest of a group of n takes its tokens times the seconds
    per token at batch n. T is found by bisection, as groups can be filled greedily for any T.

    >>> rank_groups([100, 90, 10, 10, 10, 10], 2, lambda batch, tokens: 1.0 + 0.5 * batch)
    [0, 0, 1, 1, 1, 1]
    """
    order = sorted(range(len(expected)), key=lambda i: -expected[i])

    def filled(limit_s: float) -> list[list[int]]:
        groups: list[list[int]] = []
        for i in order:
            if groups and expected[groups[-1][0]] * token_s(len(groups[-1]) + 1, expected[groups[-1][0]]) <= limit_s:
                groups[-1].append(i)
            else:
                groups.append([i])
        return groups

    longest = max(expected, default=0.0)
    low, high = 0.0, longest * token_s(max(1, len(expected)), longest)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if len(filled(middle)) <= workers else (middle, high)
    worker_of = [0] * len(expected)
    for worker, group in enumerate(filled(high)):
        for i in group:
            worker_of[i] = min(worker, workers - 1)
    return worker_of


def predicted_long(expected: Mapping[str, float], share: float, recall: float, draws: Mapping[str, float]) -> set[str]:
    """The prompts that a length ranker calls long: the `share` longest, of which it finds `recall`.

    `draws` is a uniform random number in [0, 1) per prompt: a long prompt at or above `recall` is missed, and the next
    longest takes its place.

    >>> sorted(predicted_long({"a": 9, "b": 8, "c": 2, "d": 1}, 0.5, 0.87, {"a": 0.1, "b": 0.9, "c": 0.5, "d": 0.5}))
    ['a', 'c']
    """
    order = sorted(expected, key=lambda name: (-expected[name], name))
    long = order[: round(share * len(order))]
    recalled = [name for name in long if draws[name] < recall]
    return {*recalled, *order[len(long) : 2 * len(long) - len(recalled)]}


def stage_left(finish_s: Sequence[float], tokens: Sequence[int], free_s: Sequence[float], stage_s: float) -> float:
    """Seconds that a stage still takes when a rollout ends, of `stage_s` on all workers: RLHFuse's fusion of stages.

    From `free_s[w]` on worker w computes the stage (log-probs, reference, reward) of responses that have ended
    (`finish_s`, `tokens`), in a time proportional to their tokens, work shared by all that are free
    (arXiv 2409.13221). O(n log n).

    >>> stage_left([4.0, 10.0], [100, 100], [4.0, 10.0], 4.0)
    2.0
    """
    total = sum(tokens)
    if not total or stage_s <= 0.0:
        return 0.0
    rate = total / (stage_s * len(free_s))
    events = sorted([*((at, float(n), 0.0) for at, n in zip(finish_s, tokens, strict=True)),
                     *((at, 0.0, rate) for at in free_s)])  # fmt: skip
    now = backlog = speed = 0.0
    for at, arrived, more in events:
        backlog = max(0.0, backlog - speed * (at - now)) + arrived
        now, speed = at, speed + more
    return stage_s * backlog / total


def may_start(running: int, accepted: int, version: int, *, batch: int, staleness: int, most_running: int) -> int:
    """Rollouts that AReaL may start now: min(most - running, (eta + version + 1) * batch - (accepted + running)).

    As in arXiv 2505.24298, no response is trained on more than eta versions after it was begun; at least 0.

    >>> may_start(running=100, accepted=512, version=1, batch=512, staleness=4, most_running=4096)
    2460
    """
    return max(0, min(most_running - running, (staleness + version + 1) * batch - (accepted + running)))
