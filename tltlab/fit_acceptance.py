"""Fits accepted tokens per drafter and depth to recorded iterations."""

from __future__ import annotations

import numpy as np
import pandas as pd

from .acceptance import FittedAcceptance, FittedDepth


def fit_acceptance(iterations: pd.DataFrame) -> tuple[FittedAcceptance | None, list[str]]:
    """The distribution of accepted tokens and the mean tokens drafted, and notes; None where nothing was speculated.

    One sample is one request in one iteration. Where `accepted_per_request` is unknown only the mean is, and the
    distribution is the one of a chain whose tokens are kept with equal probability. Only whole chains are fitted:
    trees and trimmed chains are counted in a note.
    """
    spec = iterations[iterations["draft_depth"] > 0]
    whole = spec[(spec["top_k"] == 1) & (spec["tokens_to_verify"] == spec["draft_depth"] + 1)]
    notes = []
    if len(whole) < len(spec):
        notes.append(f"acceptance: {len(spec) - len(whole)} iterations with trees or trimmed chains left out")
    found: dict[str, dict[int, FittedDepth]] = {}
    for drafter, depth in whole[["drafter", "draft_depth"]].drop_duplicates().sort_values("draft_depth").to_numpy():
        fitted = _fit(whole[(whole["drafter"] == drafter) & (whole["draft_depth"] == depth)], int(depth))
        if fitted is not None:
            found.setdefault(str(drafter), {})[int(depth)] = fitted
    return (FittedAcceptance(drafters_by_depth=found), notes) if found else (None, notes)


def _fit(rows: pd.DataFrame, depth: int) -> FittedDepth | None:
    lists = rows["accepted_per_request"].dropna() if "accepted_per_request" in rows else pd.Series(dtype=object)
    if len(lists) == len(rows):
        accepted = np.concatenate([np.asarray(x, np.int64) for x in lists])
        num_samples = len(accepted)
        if num_samples == 0:
            return None
        p = np.bincount(np.minimum(accepted, depth), minlength=depth + 1) / num_samples
    else:
        num_samples = int(rows["batch"].sum())
        if num_samples == 0:
            return None
        p = equal_chain(min(float(rows["num_accepted"].sum()) / num_samples, depth), depth)
    drafted = min(float(rows["num_drafted"].sum()) / num_samples, depth)
    return FittedDepth(accepted=tuple(p.tolist()), drafted=drafted, num_samples=num_samples)


def equal_chain(mean: float, depth: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """P(accepted = j), j = 0..depth, of a chain with equal chances and this mean: alpha + ... + alpha^depth = mean."""
    low, high = 0.0, 1.0
    for _ in range(60):
        alpha = (low + high) / 2
        low, high = (alpha, high) if float((alpha ** np.arange(1, depth + 1)).sum()) < mean else (low, alpha)
    kept = low ** np.arange(depth + 1)
    return np.append(kept[:-1] - kept[1:], kept[-1])
