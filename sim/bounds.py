"""A clairvoyant lower bound on a rollout's makespan: no placement, order or choice among the strategies beats it.

    path = max_i alone_i            the longest response by itself, in a batch of 1
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
- by request: as fluid, with the most that a request can get anywhere in its response (reach + 1 when sampled).
- sampled: the draws u_1, u_2, ... are fixed and used up in order. For any price lam per token (at most the cost of a
  plain iteration, where there is one), sum fix_s >= lam*L - max_K sum_{k<=K} max_s(lam*gain_s(u_k) - fix_s). With a_k
  the best gain of draw k, A its mean, R the largest rise of the walk of steps a_k/A - 1, the contexts sum to at least
  (p*L + L^2/2)/A - max(a)*L/(2*A) - (p + L)*R: summation by parts, as contexts only grow. Nor are there fewer
  iterations than the best gains allow, which is the better bound on both for short responses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tltlab.acceptance.load import FloatArray, RequestAcceptance, Settled, TraceAcceptance
from tltlab.costs.base import CostModel
from tltlab.sim.engine.batch import TOLERANCE_TOKENS
from tltlab.sim.engine.random_numbers import request_seeds, uniforms
from tltlab.sim.engine.regime import Regime
from tltlab.sim.engine.requests import Requests


def lower_bound_s(
    requests: Requests,
    regimes: Sequence[Regime],
    costs: CostModel,
    workers: int,
    acceptance: Settled | None,
    mode: str,
    seed: int,
) -> float:
    """Seconds that no schedule of these requests on `workers` workers undercuts."""
    ran = [i for i, length in enumerate(requests.response_tokens) if length > 0]
    if not ran:
        return 0.0
    prefill = costs.prefill_s(1.0) * np.array([requests.prompt_tokens[i] for i in ran], np.float64)
    most = largest_batch(requests, costs)
    batches = range(1, most + 1)
    fixed = [
        [min(r.fixed_s(b) for b in batches) for r in regimes],
        [min(r.fixed_s(b) / b for b in batches) for r in regimes],
    ]
    slope_s = min(r.slope_s(b) for r in regimes for b in batches)
    decoding = _decoding_s(requests, ran, regimes, fixed, slope_s, acceptance, mode, seed)
    alone, share = (prefill + seconds for seconds in decoding)
    return float(max(alone.max(), share.sum() / workers))


def largest_batch(requests: Requests, costs: CostModel) -> int:
    """Most requests that a worker can run at once."""
    prompts = requests.prompts[requests.lengths > 0]
    most = min(len(prompts), costs.max_num_seqs or len(prompts))
    if costs.kv_capacity_tokens is not None and len(prompts):
        most = min(most, costs.kv_capacity_tokens // (int(prompts.min()) + 1))
    return max(1, most)


def _decoding_s(
    requests: Requests,
    ran: list[int],
    regimes: Sequence[Regime],
    fixed: list[list[float]],
    slope_s: float,
    acceptance: Settled | None,
    mode: str,
    seed: int,
) -> list[FloatArray]:
    """Least seconds to decode each response that ran, for each row of `fixed`: the fixed cost of each regime."""
    if any(regime.strategy.speculates for regime in regimes):
        if isinstance(acceptance, TraceAcceptance):
            return [
                _replayed(requests, ran, list(zip(regimes, row, strict=True)), slope_s, acceptance) for row in fixed
            ]
        if mode == "sampled" and not isinstance(acceptance, RequestAcceptance):
            return _sampled(requests, ran, regimes, fixed, slope_s, seed)
    prompts = np.array([requests.prompt_tokens[i] for i in ran], np.float64)
    lengths = np.array([requests.response_tokens[i] for i in ran], np.float64) - TOLERANCE_TOKENS

    def most(regime: Regime) -> FloatArray | float:
        if not isinstance(acceptance, RequestAcceptance) or not regime.strategy.speculates:
            return regime.tokens
        if mode == "sampled":
            return regime.most + 1.0
        keys = [requests.keys[i] for i in ran]
        size = Counter(key[:2] for key in requests.keys)
        siblings = np.array([size[key[:2]] - 1.0 for key in keys])
        levels = acceptance.levels(regime.strategy.drafter, keys, seed)
        return acceptance.most_tokens(regime.strategy, levels, lengths, siblings)

    gains = [most(regime) for regime in regimes]

    def cheapest(x: FloatArray | float, row: list[float]) -> FloatArray:
        per_token = [(fix + slope_s * (prompts + x)) / gain for gain, fix in zip(gains, row, strict=True)]
        least: FloatArray = np.min(per_token, axis=0) - slope_s / 2
        return least

    return [lengths * (cheapest(0.0, row) + cheapest(lengths, row)) / 2 for row in fixed]


def _replayed(
    requests: Requests,
    ran: list[int],
    strategies: list[tuple[Regime, float]],
    slope_s: float,
    acceptance: TraceAcceptance,
) -> FloatArray:
    """Shortest path from position 0 to the end, for all responses at once, from the last position backwards."""
    order = sorted(range(len(ran)), key=lambda j: -requests.response_tokens[ran[j]])
    lengths = np.array([requests.response_tokens[ran[j]] for j in order], np.int64)
    prompts = np.array([requests.prompt_tokens[ran[j]] for j in order], np.int64)
    ends = np.cumsum(lengths)
    kept = {
        name: np.concatenate(
            [acceptance.positions(name, requests.keys[ran[j]], requests.response_tokens[ran[j]]) for j in order]
        )
        for name in {r.strategy.drafter for r, _ in strategies if r.strategy.speculates}
    }
    window = 2 + max(r.most for r, _ in strategies)
    # best[j, r % window]: least seconds for the last r tokens of response j; column 0 at r = 0 is the end itself.
    best = np.zeros((len(order), window))
    active_until = np.searchsorted(-lengths, -np.arange(1, int(lengths[0]) + 1), side="right")
    for left, active in enumerate(active_until, start=1):
        rows = np.arange(active)
        options = []
        for regime, fix in strategies:
            gain: int | npt.NDArray[np.int64] = 1
            if regime.strategy.speculates:
                found = kept[regime.strategy.drafter][ends[:active] - left]
                gain = 1 + np.minimum(found, regime.most).astype(np.int64)
            after = np.maximum(left - gain, 0)
            options.append(fix + np.where(after > 0, best[rows, after % window], 0.0))
        context = prompts[:active] + lengths[:active] - left
        best[:active, left % window] = np.min(options, axis=0) + slope_s * context
    result = np.empty(len(ran))
    result[order] = best[np.arange(len(order)), lengths % window]
    return result


def _sampled(
    requests: Requests,
    ran: list[int],
    regimes: Sequence[Regime],
    fixed: list[list[float]],
    slope_s: float,
    seed: int,
) -> list[FloatArray]:
    seeds = request_seeds(seed, [requests.keys[i] for i in ran])
    cdfs = [r.cdf for r in regimes if r.cdf is not None]
    grid = _gains(cdfs, (np.arange(2048) + 0.5) / 2048)
    mean = float(grid.max(axis=0).mean())
    priced = []
    for row in fixed:
        drawn = np.array([fix for r, fix in zip(regimes, row, strict=True) if r.cdf is not None])[:, None]
        plain = [fix for r, fix in zip(regimes, row, strict=True) if r.cdf is None]
        priced.append((min([_fair_price(grid, drawn), *plain]), drawn))
    least = np.empty((len(fixed), len(ran)))
    for j, i in enumerate(ran):
        length, prompt = requests.response_tokens[i], requests.prompt_tokens[i]
        gains = _gains(cdfs, uniforms(seeds[j : j + 1], np.zeros(1, np.int64), length)[0])
        best = gains.max(axis=0)
        walk = np.concatenate([[0.0], np.cumsum(best / mean - 1.0)])
        rise = float((walk - np.minimum.accumulate(walk)).max())
        n = int(np.searchsorted(np.cumsum(best), length)) + 1
        contexts = max(
            n * prompt + n * (n - 1) / 2,
            (prompt * length + length**2 / 2 - best.max() * length / 2) / mean - (prompt + length) * rise,
        )
        for k, (price, drawn) in enumerate(priced):
            surplus = max(0.0, float(np.cumsum((price * gains - drawn).max(axis=0)).max()))
            # The factor forgives the rounding of a sum of as many terms as the response has tokens.
            paid = (price * length - surplus) * (1 - 1e-10)
            least[k, j] = max(paid, n * min(fixed[k])) + slope_s * contexts
    return list(least)


def _gains(cdfs: list[FloatArray], u: FloatArray) -> npt.NDArray[np.int64]:
    """Tokens that each strategy gets out of each draw, shape (strategies, draws)."""
    return np.stack([1 + np.searchsorted(cdf, u, side="right") for cdf in cdfs])


def _fair_price(gains: npt.NDArray[np.int64], fixed: npt.NDArray[np.float64]) -> float:
    """Seconds per token at which the best strategy for each draw, known beforehand, breaks even on average."""
    low, high = 0.0, float((fixed[:, 0] / gains.mean(axis=1)).min())
    for _ in range(50):
        price = (low + high) / 2
        surplus = float((price * gains - fixed).max(axis=0).mean())
        low, high = (low, price) if surplus > 0 else (price, high)
    return low
