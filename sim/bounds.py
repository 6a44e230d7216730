"""Clairvoyant lower bounds on a rollout's makespan: no placement, order or choice among the strategies beats them.

`lower_bound_s` holds for every acceptance, where each request gains what is expected or replayed (a bound that no draw
can undercut would be half as high; a sampled rollout may undercut this one by chance):

    path = max_i alone_i            the longest response by itself, in a batch of 1, its tools' time included
    area = sum_i share_i / W        the work of all responses, shared by workers that are never idle
    bound = max(path, area)

An iteration takes T(b, S) = f(b) + c(b)*S. `alone_i` is the least time in which response i can be prefilled and decoded
in iterations of min_b f(b), where b ranges over the batches that a worker can hold: batch 1, unless a cost model has
larger batches run faster. `share_i` is the same with min_b f(b)/b, a request's least share. c is the least c(b).

The least decoding time of one response of L tokens, prompt p, under strategies s with cost fix_s + c*context:

- fluid: A_s tokens an iteration. One that starts at g costs the integral over [g, g + A_s] of h_s(x) =
  (fix_s + c*(p + x))/A_s - c/2, so the time is at least the integral of min_s h_s over [0, L]. That minimum is concave
  in x, hence the integral is at least L times the mean of its ends. Exact for one strategy.
- replayed: the shortest path over positions, exact.
- by request: as fluid, with the most that a request can get anywhere in its response. Where acceptance falls with
  context, the most in each stretch of it.

`shared_bound_s`, where all gain alike, weighs the path of every response against the work of all: who is fast takes
room. A worker that runs b requests under strategy s gives each A_s tokens in an iteration of f_s(b) + c*S seconds. To
get L tokens within T seconds a response must on average gain L/T tokens per second, and a higher rate means a smaller
batch, that is a larger share of a worker. In an iteration a response gains A_s tokens in at least f_s(b) + c*(own
context) seconds, and f_s(b)/b + c*(own context) of the worker's time are its own; these shares add up to the iteration.

Let g be the lower convex envelope of the points (rate A_s/f_s(b), share 1/b) and (0, 0): the least share of a worker at
which a response can gain at a mean rate. With own_i the seconds of response i's prefill and its contexts, it holds a
worker for at least own_i + T_i * g(L_i/T_i) seconds, T_i = T - own_i. The bound is the least T with

    sum_i own_i + T_i * g(L_i/T_i) <= W*T,    L_i/T_i within reach of g for all i.

The left side falls as T grows (g is convex, g(0) = 0), so T is found by bisection. The longest response alone (path)
and the work at the best batch (area) are its two ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tltlab.acceptance.base import Acceptance, RequestArrays
from tltlab.arrays import Floats, Ints
from tltlab.costs.base import CostModel
from tltlab.sim.engine.batch import TOLERANCE_TOKENS
from tltlab.sim.engine.regime import Regime, Regimes
from tltlab.sim.engine.requests import Requests

_HALVINGS = 40
_STRETCH_TOKENS = 256.0


@dataclass(frozen=True, kw_only=True)
class Floors:
    """The cheapest iterations of batches up to any size: row r is of `regimes[r]`, column b of batches of 1 to b + 1.

    `fixed_s` without the context's share, `each_s` likewise for one request of the batch, and `slope_s` per token of
    context. `options` are tokens, seconds without context and seconds per token of it, by strategy and batch size, and
    `envelopes` those of rates and shares by the largest batch, which RL steps of a run share as a rule.
    """

    regimes: Sequence[Regime]
    fixed_s: Floats
    each_s: Floats
    slope_s: Floats
    options: Floats
    envelopes: dict[int, tuple[Floats, Floats]] = field(default_factory=dict)

    @classmethod
    def of(cls, regimes: Regimes, most: int) -> Floors:
        """Work them out for batches of up to `most` requests."""
        every, batches = regimes.up_to(most), range(1, most + 1)
        fixed_s = np.array([[regime.fixed_s(b) for b in batches] for regime in every])
        slope_s = np.array([[regime.slope_s(b) for b in batches] for regime in every])
        at = [[regimes.at(s, b, loaded=not regimes.loads_late) for b in batches] for s in regimes.strategies]
        options = [[(r.tokens, r.fixed_s(b), r.slope_s(b)) for b, r in zip(batches, row, strict=True)] for row in at]
        return cls(
            regimes=every,
            fixed_s=np.minimum.accumulate(fixed_s, axis=1),
            each_s=np.minimum.accumulate(fixed_s / np.array(batches), axis=1),
            slope_s=np.minimum.accumulate(slope_s.min(axis=0)),
            options=np.moveaxis(np.array(options), 2, 0),
        )


def lower_bound_s(
    requests: Requests,
    floors: Floors,
    costs: CostModel,
    workers: int,
    acceptance: Acceptance | None,
    seed: int,
) -> float:
    """Seconds that no schedule of these requests on `workers` workers undercuts."""
    ids = np.flatnonzero(requests.lengths > 0)
    if not len(ids):
        return 0.0
    # With prefix caching a prompt may have been prefilled for another sample, or for the turn before.
    prefill = costs.prefill_s(1.0) * requests.uncached[ids].astype(np.float64)
    most = largest_batch(requests, costs)
    fixed = [floors.fixed_s[:, most - 1].tolist(), floors.each_s[:, most - 1].tolist()]
    slope_s = float(floors.slope_s[most - 1])
    decoding = _decoding_s(requests, ids.tolist(), floors.regimes, fixed, slope_s, acceptance, seed)
    alone, share = prefill + decoding[0], _held_s(prefill, costs) + decoding[1]
    if requests.turns is not None:
        seconds = dict(zip(ids.tolist(), (alone + np.array(requests.turns.tool_s)[ids]).tolist(), strict=True))
        chains = (requests.turns.chain(first) for first in requests.turns.first if first in seconds)
        alone = np.array([sum(seconds[turn] for turn in chain) for chain in chains])
    return float(max(alone.max(), share.sum() / workers))


def _held_s(prefill_s: Floats, costs: CostModel) -> Floats:
    """Lower bound of a worker's time in prefills: 0 where chunks may ride in iterations bound by memory."""
    return prefill_s if costs.max_num_batched_tokens is None else np.zeros_like(prefill_s)


def largest_batch(requests: Requests, costs: CostModel) -> int:
    """Most requests that a worker can run at once."""
    prompts = (requests.prompts - requests.shared)[requests.lengths > 0]
    most = min(len(prompts), costs.max_num_seqs or len(prompts))
    if costs.kv_capacity_tokens is not None and len(prompts):
        most = min(most, costs.kv_capacity_tokens // (int(prompts.min()) + 1))
    return max(1, most)


def _decoding_s(
    requests: Requests,
    ids: list[int],
    regimes: Sequence[Regime],
    fixed: list[list[float]],
    slope_s: float,
    acceptance: Acceptance | None,
    seed: int,
) -> list[Floats]:
    """Least seconds to decode each response that ran, for each row of `fixed`: the fixed cost of each regime."""
    speculates = any(regime.strategy.speculates for regime in regimes)
    if speculates and acceptance is not None and acceptance.varies_by == "position":
        return [_replayed(requests, ids, list(zip(regimes, row, strict=True)), slope_s, acceptance) for row in fixed]
    prompts = requests.prompts[ids].astype(np.float64)
    lengths = requests.lengths[ids].astype(np.float64) - TOLERANCE_TOKENS

    levels: dict[str, Floats] = {}
    siblings = np.zeros(len(ids))
    by_request = acceptance is not None and acceptance.varies_by == "request"
    if by_request:
        keys = [requests.keys[i] for i in ids]
        size = Counter(key[:2] for key in requests.keys)
        siblings = np.array([size[key[:2]] - 1.0 for key in keys])
        for name in {regime.strategy.drafter for regime in regimes if regime.strategy.speculates}:
            assert acceptance is not None
            levels[name] = acceptance.levels(name, keys, seed)

    def most(regime: Regime, begin: float) -> Floats | float:
        if acceptance is None or not by_request or not regime.strategy.speculates:
            return regime.tokens
        # The iteration that brings token `begin` may have started with less context.
        context_tokens = max(0.0, begin - regime.most - 1.0) + float(prompts.min())
        arrays = RequestArrays(levels[regime.strategy.drafter], lengths, siblings, prompts)
        return acceptance.at_context(context_tokens).most_tokens(regime.strategy, arrays)

    # Acceptance that falls with context has a bound for each stretch of a response.
    longest = float(lengths.max())
    falls = by_request and acceptance is not None and acceptance.at_context(0.0) is not acceptance
    begins = np.arange(0.0, longest, _STRETCH_TOKENS) if falls else [0.0]
    least = [np.zeros(len(ids)) for _ in fixed]
    for begin in begins:
        gains = [most(regime, float(begin)) for regime in regimes]
        end = np.minimum(lengths, begin + _STRETCH_TOKENS) if falls else lengths
        width = np.maximum(end - begin, 0.0)
        for row, seconds in zip(fixed, least, strict=True):
            ends = []
            for x in (begin, begin + width):
                per_token = [(fix + slope_s * (prompts + x)) / gain for gain, fix in zip(gains, row, strict=True)]
                ends.append(np.min(per_token, axis=0) - slope_s / 2)
            seconds += width * (ends[0] + ends[1]) / 2
    return least


def _replayed(
    requests: Requests,
    ids: list[int],
    strategies: list[tuple[Regime, float]],
    slope_s: float,
    acceptance: Acceptance,
) -> Floats:
    """Shortest path from position 0 to the end, for all responses at once, from the last position backwards."""
    order = np.argsort(-requests.lengths[ids], kind="stable")
    longest_first = np.array(ids)[order]
    lengths, prompts = requests.lengths[longest_first], requests.prompts[longest_first]
    ends = np.cumsum(lengths)
    accepted_of = {
        name: np.concatenate(
            [acceptance.positions(name, requests.keys[i], requests.response_tokens[i]) for i in longest_first]
        )
        for name in {r.strategy.drafter for r, _ in strategies if r.strategy.speculates}
    }
    window = 2 + max(r.most for r, _ in strategies)
    # best[j, r % window]: least seconds for the last r tokens of response j; column 0 at r = 0 is the end itself.
    best = np.zeros((len(order), window))
    active_until = np.searchsorted(-lengths, -np.arange(1, int(lengths[0]) + 1), side="right")
    for tokens_left, active in enumerate(active_until, start=1):
        rows = np.arange(active)
        options = []
        for regime, fix in strategies:
            gain: int | Ints = 1
            if regime.strategy.speculates:
                accepted = accepted_of[regime.strategy.drafter][ends[:active] - tokens_left]
                gain = 1 + np.minimum(accepted, regime.most).astype(np.int64)
            tokens_after = np.maximum(tokens_left - gain, 0)
            options.append(fix + np.where(tokens_after > 0, best[rows, tokens_after % window], 0.0))
        context = prompts[:active] + lengths[:active] - tokens_left
        best[:active, tokens_left % window] = np.min(options, axis=0) + slope_s * context
    result = np.empty(len(ids))
    result[order] = best[np.arange(len(order)), lengths % window]
    return result


def shared_bound_s(requests: Requests, floors: Floors, costs: CostModel, workers: int) -> float:
    """Seconds that no schedule of these requests undercuts, where all gain alike."""
    nonempty = requests.lengths > 0
    if not nonempty.any():
        return 0.0
    most = largest_batch(requests, costs)
    tokens, fixed_s, slopes_s = floors.options[:, :, :most]
    if fixed_s.min() <= 0.0:
        return 0.0  # An iteration without a fixed cost has no rate: only the other bounds hold.
    if most not in floors.envelopes:
        batches = np.broadcast_to(np.arange(1, most + 1), fixed_s.shape)
        floors.envelopes[most] = envelope((tokens / fixed_s).ravel(), (1.0 / batches).ravel())
    (rate, share), slope_s, gain = floors.envelopes[most], slopes_s.min(), tokens.max()
    lengths = requests.lengths[nonempty] - TOLERANCE_TOKENS
    prompts = requests.prompts[nonempty].astype(np.float64)
    contexts = np.maximum((prompts * lengths + lengths**2 / 2) / gain - lengths / 2, 0.0)
    prefill_s = costs.prefill_s(1.0) * requests.uncached[nonempty].astype(np.float64)
    own_s, held_own_s = (seconds + slope_s * contexts for seconds in (prefill_s, _held_s(prefill_s, costs)))

    def fits(makespan_s: float) -> bool:
        left_s = makespan_s - own_s
        if (left_s <= 0).any() or (lengths > rate[-1] * left_s).any():
            return False
        held_s = held_own_s + left_s * np.interp(lengths / left_s, rate, share)
        return bool(held_s.sum() <= workers * makespan_s)

    low = 0.0
    high = float((own_s + lengths / rate[-1]).max())
    while not fits(high):
        low, high = high, 2 * high + 1e-12
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low


def envelope(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Corners of the lower convex envelope of points and the origin, from x = 0 to the largest x; y >= 0.

    >>> [corner.tolist() for corner in envelope(np.array([1.0, 2.0, 4.0]), np.array([0.25, 0.6, 1.0]))]
    [[0.0, 4.0], [0.0, 1.0]]
    """
    corners = [(0.0, 0.0)]
    for i in np.lexsort((y, x)):
        point = (float(x[i]), float(y[i]))
        if point[0] <= corners[-1][0]:
            continue
        # A corner goes that lies on or above the line from the one before it to this point.
        while len(corners) > 1:
            (x0, y0), (x1, y1) = corners[-2:]
            if (y1 - y0) * (point[0] - x0) < (point[1] - y0) * (x1 - x0):
                break
            corners.pop()
        corners.append(point)
    xs, ys = zip(*corners, strict=True)
    return np.array(xs), np.array(ys)
