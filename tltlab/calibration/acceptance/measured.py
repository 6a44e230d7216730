"""Fits accepted tokens per drafter, depth and batch size to recorded iterations."""

from __future__ import annotations

import numpy as np
import pandas as pd

from tltlab.acceptance.measured import Band, FittedDepth, MeasuredAcceptance
from tltlab.arrays import Floats
from tltlab.drafters.specs import STANDARD, Drafters

BANDS = (4, 16, 48)
"""Upper ends of the batch bands; a last one is open."""
ENOUGH = 64
"""Request-iterations that make a cell of its own; one with fewer takes over the nearest band that has enough."""


def fit_acceptance(
    iterations: pd.DataFrame, drafters: Drafters = STANDARD
) -> tuple[MeasuredAcceptance | None, list[str]]:
    """The distribution of accepted tokens and the mean tokens drafted, and notes; None where nothing was speculated.

    One sample is one request in one iteration. The first d tokens of a longer chain are the chain of depth d, so depth
    d also learns from min(accepted, d) of deeper drafts; not where a drafter copies text and depth d has ENOUGH of its
    own (`copied_runs`). Where `accepted_per_request` is unknown only the mean is, and the distribution is the one of a
    chain whose tokens are kept with equal probability. Only whole chains are fitted: trees and trimmed chains are
    counted in a note. Raises ConfigError for a drafter that is not among `drafters`.
    """
    spec = iterations[iterations["draft_depth"] > 0]
    whole = spec[(spec["top_k"] == 1) & (spec["tokens_to_verify"] == spec["draft_depth"] + 1)]
    notes = []
    if len(whole) < len(spec):
        notes.append(f"acceptance: {len(spec) - len(whole)} iterations with trees or trimmed chains left out")
    number = np.searchsorted(BANDS, whole["batch"].to_numpy())
    copies = drafters.copying(map(str, whole["drafter"].unique()))
    bands: list[dict[str, dict[int, FittedDepth]]] = [{} for _ in range(len(BANDS) + 1)]
    for drafter, depth in whole[["drafter", "draft_depth"]].drop_duplicates().sort_values("draft_depth").to_numpy():
        of_drafter = (whole["drafter"] == drafter).to_numpy()
        copied = copies[str(drafter)]
        cells = [_fit(whole[of_drafter & (number == b)], copied, int(depth)) for b in range(len(bands))]
        for b, fitted in enumerate(_fill(cells)):
            if fitted is not None:
                bands[b].setdefault(str(drafter), {})[int(depth)] = fitted
    if not bands[0]:
        return None, notes
    return MeasuredAcceptance(
        copies=copies,
        bands=tuple(
            Band(max_batch=end, drafters_by_depth=drafters) for end, drafters in zip((*BANDS, None), bands, strict=True)
        ),
    ), notes


def _fill(cells: list[FittedDepth | None]) -> list[FittedDepth | None]:
    """Each band's fit, or that of the nearest band with enough samples, or of the one with most."""
    samples = [cell.num_samples or 0 if cell else 0 for cell in cells]
    enough = [b for b, n in enumerate(samples) if n >= ENOUGH] or [int(np.argmax(samples))]
    return [cells[min(enough, key=lambda e: (abs(e - b), e))] for b in range(len(cells))]


def _fit(rows: pd.DataFrame, copied: bool, depth: int) -> FittedDepth | None:
    """One drafter's iterations in one band as the chain of `depth`; None without any at least as deep."""
    rows = rows[rows["draft_depth"] >= depth]
    same_depth = rows[rows["draft_depth"] == depth]
    sample = same_depth if len(same_depth) else rows
    if copied and int(same_depth["batch"].sum()) >= ENOUGH:
        rows = same_depth
    requests = int(sample["batch"].sum())
    if requests == 0:
        return None
    drafted = float((sample["num_drafted"] * depth / sample["draft_depth"]).sum()) / requests
    lists = rows["accepted_per_request"].dropna()
    if len(lists) == len(rows):
        accepted = np.concatenate([np.asarray(x, np.int64) for x in lists])
        num_samples = len(accepted)
        p = np.bincount(np.minimum(accepted, depth), minlength=depth + 1) / num_samples
    else:
        num_samples = requests
        accepted_mean = float((sample["num_accepted"]).clip(upper=sample["batch"] * depth).sum()) / requests
        p = equal_chain(min(accepted_mean, depth), depth)
    return FittedDepth(accepted=tuple(p.tolist()), drafted=min(drafted, depth), num_samples=num_samples)


def equal_chain(mean: float, depth: int) -> Floats:
    """P(accepted = j), j = 0..depth, of a chain with equal chances and this mean: alpha + ... + alpha^depth = mean."""
    low, high = 0.0, 1.0
    for _ in range(60):
        alpha = (low + high) / 2
        low, high = (alpha, high) if float((alpha ** np.arange(1, depth + 1)).sum()) < mean else (low, alpha)
    survival = low ** np.arange(depth + 1)
    chances: Floats = np.append(survival[:-1] - survival[1:], survival[-1])
    return chances
