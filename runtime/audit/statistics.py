"""Tests of samples against an exact distribution: two chi-square tests, and the deviation they can detect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.stats import chi2, ncx2

from tltlab.arrays import Floats, Ints

LEAST_EXPECTED = 5.0
"""Cells that expect fewer samples are pooled: below about five the chi-square approximation is poor."""
POWER = 0.9

_CRESSIE_READ = 2 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ChiSquare:
    """A statistic that is chi-square with `dof` where the samples follow their distribution.

    The statistic is infinite where an impossible outcome occurred. `num_samples` is the denominator of frequencies.
    """

    statistic: float
    dof: int
    num_samples: int

    @property
    def p_value(self) -> float:
        return float(chi2.sf(self.statistic, self.dof)) if self.dof else float(np.isfinite(self.statistic))

    def threshold(self, false_alarm_rate: float) -> float:
        """Return the statistic that a correct engine exceeds at this rate."""
        return float(chi2.isf(false_alarm_rate, self.dof)) if self.dof else 0.0

    def detectable_tv(self, false_alarm_rate: float) -> float:
        """Return the least total-variation distance that the test detects with power 0.9, in any form.

        The noncentrality is n * sum (q - p)^2 / p, and at a distance d = sum |q - p| / 2 it is at least 4 n d^2 (the
        worst case moves d from one half of the probability to the other). The distance is that of the pooled cells.
        """
        if not self.dof:
            return 1.0
        threshold = self.threshold(false_alarm_rate)
        needed = brentq(lambda nc: ncx2.sf(threshold, self.dof, nc) - POWER, 1e-6, 10 * threshold + 1e3)
        return min(1.0, float(np.sqrt(needed / (4 * self.num_samples))))


def combined(checks: Sequence[ChiSquare]) -> ChiSquare:
    """Combine checks of independent parts."""
    return ChiSquare(
        statistic=sum(check.statistic for check in checks),
        dof=sum(check.dof for check in checks),
        num_samples=sum(check.num_samples for check in checks),
    )


def cells_check(observed: Mapping[tuple[int, ...], int], joint: Mapping[tuple[int, ...], float]) -> ChiSquare:
    """Test counts of whole outcomes against `joint`, their exact probabilities, which sum to 1.

    The statistic is Cressie and Read's (1984) with lambda 2/3: at 1e-5 its tail agrees with chi-square, while Pearson's
    is exceeded two to three times too often.

    >>> cells_check({(0,): 60, (1,): 40}, {(0,): 0.5, (1,): 0.5}).dof
    1
    """
    num = sum(observed.values())
    if any(joint.get(cell, 0.0) <= 0.0 for cell in observed):
        return ChiSquare(statistic=float("inf"), dof=max(len(joint) - 1, 1), num_samples=num)
    cells = [cell for cell, p in joint.items() if p > 0.0]
    expected_counts = num * np.array([joint[cell] for cell in cells])
    groups = pooled(expected_counts)
    expected = np.bincount(groups, expected_counts)
    counts = np.bincount(groups, [observed.get(cell, 0) for cell in cells])
    terms = counts * ((counts / expected) ** _CRESSIE_READ - 1)
    statistic = 2 / (_CRESSIE_READ * (_CRESSIE_READ + 1)) * float(terms.sum())
    return ChiSquare(statistic=statistic, dof=len(expected) - 1, num_samples=num)


def pooled(expected: Floats) -> Ints:
    """Return the group of each cell [K]: cells expecting fewer than 5 are one group, with the next rarest if needed.

    >>> pooled(np.array([50.0, 3.0, 2.0, 1.0]))
    array([1, 0, 0, 0])
    """
    order = np.argsort(expected, kind="stable")
    common = np.cumsum(expected[order]) >= LEAST_EXPECTED
    first = int(np.argmax(common)) if common.any() else len(order) - 1
    rare = int(np.searchsorted(expected[order], LEAST_EXPECTED))
    groups = np.maximum(np.arange(len(order)) - max(first, rare - 1), 0) if rare else np.arange(len(order))
    by_cell = np.empty(len(order), np.int64)
    by_cell[order] = groups
    return by_cell


def ranks_check(ranks: Ints, probabilities: Floats, positions: Ints) -> ChiSquare:
    """Test the frequencies of the tokens' ranks against the exact conditionals, position by position.

    For each token: its rank in its own conditional distribution (0 the likeliest) [N], that distribution from the
    likeliest down [N, V], and its position in the response [N]. At a position the excess of each rank over its
    expectation is a sum of martingale differences, so Rao's score statistic r' C^-1 r, with C the sum of the
    conditionals' covariances, is chi-square. A wrong temperature, a draft accepted too easily or a logit row of the
    wrong token all make ranks too frequent or too rare, at any depth in a draft.
    """
    tokens, num_ranks = probabilities.shape
    if (probabilities[np.arange(tokens), ranks] <= 0.0).any():
        return ChiSquare(statistic=float("inf"), dof=num_ranks - 1, num_samples=tokens)
    checks = []
    for position in np.unique(positions):
        at = positions == position
        p = probabilities[at]
        groups = pooled(p.sum(0))
        if groups.max() == 0:
            continue
        merge = np.eye(groups.max() + 1)[groups]
        p = p @ merge
        excess = (np.bincount(groups[ranks[at]], minlength=p.shape[1]) - p.sum(0))[1:]
        covariance = (np.diag(p.sum(0)) - p.T @ p)[1:, 1:]
        statistic = float(excess @ np.linalg.solve(covariance, excess))
        checks.append(ChiSquare(statistic=statistic, dof=len(excess), num_samples=len(p)))
    return combined(checks)
