"""A clairvoyant lower bound that weighs the path of every response against the work of all: who is fast takes room.

A worker that runs b requests under strategy s gives each A_s tokens in an iteration of f_s(b) + c*S seconds. To get L
tokens within T seconds a response must on average gain L/T tokens per second, and a higher rate means a smaller batch,
that is a larger share of a worker. In an iteration a response gains A_s tokens in at least f_s(b) + c*(own context)
seconds, and f_s(b)/b + c*(own context) of the worker's time are its own; these shares add up to the iteration.

Let g be the lower convex envelope of the points (rate A_s/f_s(b), share 1/b) and (0, 0): the least share of a worker at
which a response can gain at a mean rate. With own_i the seconds of response i's prefill and its contexts, it holds a
worker for at least own_i + T_i * g(L_i/T_i) seconds, T_i = T - own_i. The bound is the least T with

    sum_i own_i + T_i * g(L_i/T_i) <= W*T,    L_i/T_i within reach of g for all i.

The left side falls as T grows (g is convex, g(0) = 0), so T is found by bisection. The longest response alone (path)
and the work at the best batch (area) are its two ends.
"""

from __future__ import annotations

import numpy as np

from tltlab.costs.base import CostModel
from tltlab.sim.engine.batch import TOLERANCE_TOKENS
from tltlab.sim.engine.regime import Regimes
from tltlab.sim.engine.requests import Floats, Requests

_HALVINGS = 40


def shared_bound_s(requests: Requests, regimes: Regimes, costs: CostModel, workers: int, most: int) -> float:
    """Seconds that no schedule of these requests undercuts, where all gain alike; `most` requests fit on a worker."""
    ran = requests.lengths > 0
    if not ran.any():
        return 0.0
    met = [(regimes.at(strategy, b), b) for strategy in regimes.strategies for b in range(1, most + 1)]
    if min(regime.fixed_s(b) for regime, b in met) <= 0.0:
        return 0.0  # An iteration without a fixed cost has no rate: the other bounds say what can be said.
    rates = np.array([regime.tokens / regime.fixed_s(b) for regime, b in met])
    rate, share = envelope(rates, np.array([1.0 / b for _, b in met]))
    slope_s = min(regime.slope_s(b) for regime, b in met)
    gain = max(regime.tokens for regime, _ in met)
    lengths = requests.lengths[ran] - TOLERANCE_TOKENS
    prompts = requests.prompts[ran].astype(np.float64)
    contexts = np.maximum((prompts * lengths + lengths**2 / 2) / gain - lengths / 2, 0.0)
    own_s = costs.prefill_s(1.0) * prompts + slope_s * contexts

    def fits(makespan_s: float) -> bool:
        left_s = makespan_s - own_s
        if (left_s <= 0).any() or (lengths > rate[-1] * left_s).any():
            return False
        held_s = own_s + left_s * np.interp(lengths / left_s, rate, share)
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
    [[0.0, 1.0, 4.0], [0.0, 0.25, 1.0]]
    """
    corners = [(0.0, 0.0)]
    for i in np.lexsort((y, x)):
        point = (float(x[i]), float(y[i]))
        if point[0] <= corners[-1][0]:
            continue
        while len(corners) > 1 and _above(corners[-2], corners[-1], point):
            corners.pop()
        corners.append(point)
    found = np.array(corners)
    return found[:, 0], found[:, 1]


def _above(first: tuple[float, float], middle: tuple[float, float], last: tuple[float, float]) -> bool:
    """Whether `middle` lies on or above the line from `first` to `last`."""
    rise = (last[1] - first[1]) * (middle[0] - first[0])
    return (middle[1] - first[1]) * (last[0] - first[0]) >= rise
