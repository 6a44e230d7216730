"""Clairvoyant lower bounds on a rollout's makespan: no placement, order, move or choice among strategies beats them.

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

An engine's first iteration verifies no draft. A response is in one, which brings its first token, or waits for one on
its engine: so its path is `first_s`, the least such iteration, and [1, L] instead of [0, L]. Where plain decoding is no
strategy the first token counts for nothing in all else, as such an iteration may have brought it.

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

Moves and shapes. Nothing above says on which worker an iteration of a response is: a response is in one iteration at a
time, wherever, and a move only adds a prefill or a transfer. So these bounds hold for moves. They hold for several
shapes of the same GPUs too (8 engines of one GPU, 2 of four), where at any time each GPU serves an engine of one shape:

- path: in whichever shape an iteration is, it takes at least the least h_s(x) over the strategies of all shapes, each
  with its shape's f and c; prefill takes at least the least over shapes.
- area: an iteration of T seconds on an engine of t GPUs takes t*T seconds of GPUs, t*f(b)/b + t*c*(own context) of them
  for each of its requests, and all GPUs have their number times the makespan.
- shared: the points are those of all shapes, (A_s/f_s(b), t/b), and own_i is the least over shapes, once in seconds (in
  T_i) and once in seconds of GPUs (in what it holds). Both may be too small: the left side falls with T_i.

`fixed_bound_s` is for one shape and no moves: a response stays on one worker, with all its turns. While the longest of
a worker's responses runs, the worker pays for whole iterations, no matter how few others are left to share them, and
it cannot lend this time to another worker's responses. That is the part of the drain which no policy avoids at fixed
shapes; what moves could save of it is not said, as `lower_bound_s` is no higher on a single worker.

Take for each strategy a line below its iterations: f_s(b) >= base_s + more_s*b with base_s, more_s >= 0, for all b that
a worker can hold. So an iteration takes at least base_s, and more_s + c*(own context) for each request in it. Let j be
a response on a worker. Its iterations are one after another (turns too). Add up all of the worker's iterations, by
their requests, and drop base_s, which is not negative, from those without j:

    the worker is busy >= sum over iterations with j of base_s + more_s + c*(context of j)
                          + sum over i != j, over iterations with i, of more_s + c*(context of i)
                          + prefills of all, where these hold the worker
                       >= alone_j + prefill_j + sum over i != j of (added_i + prefill_i)

Here `alone_j` is the least decoding time, as above, at fix_s = base_s + more_s, and `added_i` that at fix_s = more_s.
With rest_j = alone_j - added_j >= 0 the right side is rest_j + the sum of added_i + prefill_i over all i of the worker,
j or not. It holds for every j, so the worker is busy for at least its largest rest and the sum. Nothing was assumed of
order: a request may wait, pause or be preempted.

Which worker has whom is free. `filled_s` finds a T which no assignment to W workers undercuts, where each takes its
largest rest and the sum of what its responses add. Sort responses by falling rest, and fill one worker after another in
this order, each with T - (rest of the first response not yet placed in full) seconds of what they add; a response may
be split. If T suffices for an assignment, it suffices for this filling: let the assignment's workers come by falling
largest rest. Claim: the first k workers filled hold at least what the first k of the assignment have room for, the sum
of T - (largest rest), or everything. It holds for k = 0. Let u be the next response after k workers filled. If u had
a larger rest than all on worker k + 1 of the assignment, u and all before it in order would be on its first k workers,
and add no more than those have room for. But with u they add more than the k workers filled hold. So u's rest is at
most the largest on worker k + 1, worker k + 1 filled has at least as much room, and the claim holds for k + 1.
Hence a T for which filling does not suffice is below every assignment's; the largest such T is found by bisection.

Any line makes a valid bound, as base_s is what is left of f_s below it, min_b f_s(b) - more_s*b. Those taken touch f_s
at batches of 1 and 16 and go up as steeply as f_s at larger batches allows, more_s at most min_b f_s(b)/b, so
that base_s >= 0; the largest bound counts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import field, replace

import numpy as np

from tltlab.acceptance.base import Acceptance, RequestArrays
from tltlab.arrays import Floats, Ints
from tltlab.costs.base import CostModel
from tltlab.planning.rollout import Shape
from tltlab.records import frozen
from tltlab.sim.engine.batch import TOLERANCE_TOKENS
from tltlab.sim.engine.regime import Regime, Regimes
from tltlab.sim.engine.requests import Requests

_HALVINGS = 40
_STRETCH_TOKENS = 256.0
_TOUCHED_BATCHES = (1, 16)


@frozen
class Floors:
    """Seconds of iterations on the engines of one shape, at batches of 1 in column 0, of 2 in column 1, and so on.

    `fixed_s` are without the context's share, row r of `regimes[r]`; `undrafted_s` is that of an engine's first
    iteration. `options` are tokens, seconds without context and
    seconds per token of it, by strategy and batch size, and `envelopes` those of rates and shares by the largest batch,
    which RL steps of a run share as a rule.
    """

    shape: Shape
    costs: CostModel
    regimes: Sequence[Regime]
    fixed_s: Floats
    undrafted_s: float
    options: Floats
    envelopes: dict[int, Floats] = field(default_factory=dict)

    @classmethod
    def of(cls, regimes: Regimes, costs: CostModel, shape: Shape, most: int) -> Floors:
        """Work them out for batches of up to `most` requests."""
        every, batches = regimes.up_to(most), range(1, most + 1)
        at = [[regimes.at(s, b, loaded=not regimes.loads_late) for b in batches] for s in regimes.strategies]
        options = [[(r.tokens, *r.terms(b)) for b, r in zip(batches, row, strict=True)] for row in at]
        return cls(
            shape=shape,
            costs=costs,
            regimes=every,
            fixed_s=np.array([[regime.terms(b)[0] for b in batches] for regime in every]),
            undrafted_s=min(regimes.undrafted(b, loaded=not regimes.loads_late).terms(b)[0] for b in batches),
            options=np.moveaxis(np.array(options), 2, 0),
        )

    @property
    def batches(self) -> Ints:
        return np.arange(1, self.fixed_s.shape[1] + 1)

    @property
    def slope_s(self) -> float:
        """Least seconds per token of context."""
        return float(self.options[2].min())

    @property
    def uncounted_tokens(self) -> float:
        """Tokens of each response that no strategy may have brought."""
        return float(all(regime.strategy.speculates for regime in self.regimes))

    @property
    def num_gpus(self) -> int:
        return self.shape.engines * self.shape.gpus

    def holding(self, requests: Requests) -> Floors:
        """Those of the batches that a worker can hold of these requests."""
        most = largest_batch(requests, self.costs)
        return replace(self, fixed_s=self.fixed_s[:, :most], options=self.options[:, :, :most])

    def costing(self, fixed_s: Floats, gpus: int = 1) -> Floats:
        """Seconds of so many GPUs: a row of the fixed costs of each regime, and one of those per token of context."""
        return gpus * np.array([fixed_s, np.full(len(fixed_s), self.slope_s)])

    def envelope(self) -> Floats:
        """The `envelope` of a response's rates and the GPUs that each takes."""
        most = len(self.batches)
        if most not in self.envelopes:
            tokens, fixed_s, _ = self.options
            gpus = np.broadcast_to(self.shape.gpus / self.batches, fixed_s.shape)
            self.envelopes[most] = np.array(envelope((tokens / fixed_s).ravel(), gpus.ravel()))
        return self.envelopes[most]


def lower_bound_s(requests: Requests, shapes: Sequence[Floors], acceptance: Acceptance | None) -> float:
    """Seconds that no schedule of these requests undercuts, on GPUs of which each may run any of the shapes."""
    shapes = [floors.holding(requests) for floors in shapes]
    regimes = [regime for floors in shapes for regime in floors.regimes]
    path = [each.costing(each.fixed_s.min(axis=1)) for each in shapes]
    area = [each.costing((each.fixed_s / each.batches).min(axis=1), each.shape.gpus) for each in shapes]
    costs = [np.concatenate(parts, axis=1) for parts in (path, area)]
    first_s, begins = 0.0, [shapes[0].uncounted_tokens] * 2
    if requests.turns is None and all(floors.costs.max_num_batched_tokens is None for floors in shapes):
        # Elsewhere a later turn may have a first iteration too, or a prompt ride in an iteration that it waits for.
        least_tokens = int(requests.prompts[requests.lengths > 0].min())
        first_s, begins[0] = min(each.undrafted_s + each.slope_s * least_tokens for each in shapes), 1.0
    decoding_s = _decoding_s(requests, regimes, costs, begins, acceptance)
    alone_s, held_s = _prefill_s(requests, shapes) + decoding_s
    if requests.turns is not None:
        alone_s += np.array(requests.turns.tool_s)[requests.lengths > 0]
    return float(max(first_s + _by_response(requests, alone_s).max(), held_s.sum() / shapes[0].num_gpus))


def _prefill_s(requests: Requests, shapes: Sequence[Floors]) -> Floats:
    """Least seconds in which each request that ran is prefilled; in a second row, seconds of GPUs that this holds.

    The latter are 0 where chunks may ride in iterations bound by memory. With prefix caching a prompt may have been
    prefilled for another sample, or for the turn before.
    """
    token_s = [floors.costs.prefill_s(1.0) for floors in shapes]
    gpus = [floors.shape.gpus * (floors.costs.max_num_batched_tokens is None) for floors in shapes]
    return np.outer([min(token_s), np.multiply(token_s, gpus).min()], requests.uncached[requests.lengths > 0])


def _by_response(requests: Requests, seconds: Floats) -> Floats:
    """Sum what requests that ran take over the turns of each response."""
    if requests.turns is None:
        return seconds
    response = np.empty(len(requests), np.int64)
    for n, chain in enumerate(requests.chains):
        response[chain] = n
    return np.bincount(response[requests.lengths > 0], seconds).astype(np.float64)


def fixed_bound_s(requests: Requests, floors: Floors, acceptance: Acceptance | None) -> float:
    """Seconds that no schedule undercuts where every response stays on its worker, all of one shape."""
    floors = floors.holding(requests)
    fixed_s, batches = floors.fixed_s, floors.batches
    costs: list[Floats] = []
    for b in _TOUCHED_BATCHES:
        more_s = (fixed_s / batches).min(axis=1)
        if b < len(batches):
            steepest_s = (fixed_s[:, b:] - fixed_s[:, b - 1 : b]) / (batches[b:] - b)
            more_s = np.clip(steepest_s.min(axis=1), 0.0, more_s)
        base_s = (fixed_s - more_s[:, None] * batches).min(axis=1)
        costs += [floors.costing(base_s + more_s), floors.costing(more_s)]
    begins = [floors.uncounted_tokens] * len(costs)
    decoding_s = _decoding_s(requests, floors.regimes, costs, begins, acceptance)
    prefill_s = _prefill_s(requests, [floors])[1] / floors.shape.gpus
    bounds_s = []
    for alone_s, added_s in zip(decoding_s[::2], decoding_s[1::2], strict=True):
        rest_s, work_s = (_by_response(requests, each_s) for each_s in (alone_s - added_s, prefill_s + added_s))
        bounds_s.append(filled_s(rest_s, work_s, floors.shape.engines))
    return max(bounds_s)


def filled_s(rest_s: Floats, added_s: Floats, workers: int) -> float:
    """Least time in which workers can be filled with work, in order of falling rest; no assignment takes less."""
    order = np.argsort(-rest_s, kind="stable")
    rests_s, ends_s = rest_s[order].tolist(), np.cumsum(added_s[order]).tolist()

    def fits(makespan_s: float) -> bool:
        placed_s = 0.0
        for _ in range(workers):
            at = bisect_right(ends_s, placed_s)
            if at == len(ends_s):
                break
            if rests_s[at] > makespan_s:
                return False
            placed_s += makespan_s - rests_s[at]
        return bool(placed_s >= ends_s[-1])

    return _least(fits, rests_s[0] + ends_s[-1])


def _least(fits: Callable[[float], bool], high: float) -> float:
    """The least number from 0 that fits, by bisection from below; where `high` does not fit, it is doubled first."""
    low = 0.0
    while not fits(high):
        low, high = high, 2 * high + 1e-12
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low


def largest_batch(requests: Requests, costs: CostModel) -> int:
    """Most requests that a worker can run at once."""
    prompts = (requests.prompts - requests.shared)[requests.lengths > 0]
    most = min(len(prompts), costs.max_num_seqs or len(prompts))
    if costs.kv_capacity_tokens is not None and len(prompts):
        most = min(most, costs.kv_capacity_tokens // (int(prompts.min()) + 1))
    return max(1, most)


def _decoding_s(
    requests: Requests,
    regimes: Sequence[Regime],
    costs: Sequence[Floats],
    begins: Sequence[float],
    acceptance: Acceptance | None,
) -> Floats:
    """Least seconds to decode each response that ran, from the token at which each row begins.

    A row for each of `costs`, which `Floors.costing` makes.
    """
    ids = np.flatnonzero(requests.lengths > 0)
    # By costs, regime and response.
    fixed_s, slopes_s = np.moveaxis(np.array(costs), 1, 0)[..., None]
    speculates = any(regime.strategy.speculates for regime in regimes)
    if speculates and acceptance is not None and acceptance.varies_by == "position":
        return _replayed(requests, ids, regimes, fixed_s, slopes_s, np.array(begins, np.int64), acceptance)
    prompts = requests.prompts[ids].astype(np.float64)
    lengths = requests.lengths[ids].astype(np.float64) - TOLERANCE_TOKENS

    siblings = np.zeros(len(ids))
    by_request = acceptance is not None and acceptance.varies_by == "request"
    if by_request:
        keys = [requests.keys[i] for i in ids]
        size = Counter(key[:2] for key in requests.keys)
        siblings = np.array([size[key[:2]] - 1.0 for key in keys])

    def most(regime: Regime, begin: float) -> Floats | float:
        if acceptance is None or not by_request or not regime.strategy.speculates:
            return regime.tokens
        # The iteration that brings token `begin` may have started with less context.
        context_tokens = max(0.0, begin - regime.most - 1.0) + float(prompts.min())
        arrays = RequestArrays(lengths, siblings, prompts)
        return acceptance.at_context(context_tokens).most_tokens(regime.strategy, arrays)

    # Acceptance that falls with context has a bound for each stretch of a response.
    longest = float(lengths.max())
    falls = by_request and acceptance is not None and acceptance.at_context(0.0) is not acceptance
    stretches = np.arange(0.0, longest, _STRETCH_TOKENS) if falls else [0.0]
    least_s = np.zeros((len(costs), len(ids)))
    for begin in stretches:
        gains = np.array([np.broadcast_to(most(regime, float(begin)), len(ids)) for regime in regimes])
        end = np.minimum(lengths, begin + _STRETCH_TOKENS) if falls else lengths
        start = np.maximum(begin, begins)[:, None, None]
        width = np.maximum(end - start, 0.0)
        ends = [(fixed_s + slopes_s * (prompts + x)) / gains - slopes_s / 2 for x in (start, start + width)]
        least_s += width[:, 0] * (ends[0].min(axis=1) + ends[1].min(axis=1)) / 2
    # Short responses behind short prompts may seem to take less than nothing.
    return np.maximum(least_s, 0.0)


def _replayed(
    requests: Requests,
    ids: Ints,
    regimes: Sequence[Regime],
    fixed_s: Floats,
    slopes_s: Floats,
    begins: Ints,
    acceptance: Acceptance,
) -> Floats:
    """Shortest path to the end, for all costs and responses at once, from the last position back."""
    order = np.argsort(-requests.lengths[ids], kind="stable")
    longest_first = ids[order]
    lengths, prompts = requests.lengths[longest_first], requests.prompts[longest_first]
    ends = np.cumsum(lengths)
    names = sorted({r.strategy.drafter for r in regimes if r.strategy.speculates})
    keys, tokens = requests.keys, requests.response_tokens
    positions = [[acceptance.positions(name, keys[i], tokens[i]) for i in longest_first] for name in names]
    accepted = np.array([np.concatenate(each) for each in positions])
    drafter = [names.index(r.strategy.drafter) if r.strategy.speculates else 0 for r in regimes]
    most = np.array([[r.most] for r in regimes])
    window = 2 + int(most.max())
    # best[row, j, r % window]: least seconds for the last r tokens of response j; the last column is the end itself.
    best = np.zeros((len(fixed_s), len(order), window + 1))
    active_until = np.searchsorted(-lengths, -np.arange(1, int(lengths[0]) + 1), side="right")
    for tokens_left, active in enumerate(active_until, start=1):
        kept = np.minimum(accepted[:, ends[:active] - tokens_left][drafter], most)
        tokens_after = tokens_left - 1 - kept
        column = np.where(tokens_after > 0, tokens_after % window, window)
        context = prompts[:active] + lengths[:active] - tokens_left
        seconds = fixed_s + best[:, np.arange(active), column] + slopes_s * context
        best[:, :active, tokens_left % window] = seconds.min(axis=1)
    result = np.empty(best.shape[:2])
    wanted = lengths - begins[:, None]
    columns = np.where(wanted > 0, wanted % window, window)
    result[:, order] = best[np.arange(len(best))[:, None], np.arange(len(order)), columns]
    return result


def shared_bound_s(requests: Requests, shapes: Sequence[Floors]) -> float:
    """Seconds that no schedule of these requests undercuts, where all gain alike, on GPUs that may run any shape."""
    ids = np.flatnonzero(requests.lengths > 0)
    shapes = [floors.holding(requests) for floors in shapes]
    if min(floors.fixed_s.min() for floors in shapes) <= 0.0:
        return 0.0  # An iteration without a fixed cost has no rate: only the other bounds hold.
    rate, gpus = envelope(*np.concatenate([floors.envelope() for floors in shapes], axis=1))
    gain = max(floors.options[0].max() for floors in shapes)
    lengths = requests.lengths[ids] - TOLERANCE_TOKENS - shapes[0].uncounted_tokens
    prompts = requests.prompts[ids].astype(np.float64)
    contexts = np.maximum((prompts * lengths + lengths**2 / 2) / gain - lengths / 2, 0.0)
    slopes_s = [min(each.slope_s for each in shapes), min(each.shape.gpus * each.slope_s for each in shapes)]
    own_s, held_own_s = _prefill_s(requests, shapes) + np.outer(slopes_s, contexts)

    def fits(makespan_s: float) -> bool:
        left_s = makespan_s - own_s
        if (left_s <= 0).any() or (lengths > rate[-1] * left_s).any():
            return False
        held_s = held_own_s + left_s * np.interp(lengths / left_s, rate, gpus)
        return bool(held_s.sum() <= shapes[0].num_gpus * makespan_s)

    return _least(fits, float((own_s + lengths / rate[-1]).max()))


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
