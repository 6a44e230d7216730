"""Fits accepted tokens per drafter, depth and batch size to recorded iterations."""

from __future__ import annotations

import numpy as np
import pandas as pd

from tltlab.acceptance.base import chain_alpha, from_survival
from tltlab.acceptance.measured import BatchBand, FittedDepth, MeasuredAcceptance
from tltlab.drafters.specs import STANDARD, Drafters

BANDS = (4, 16, 48)
"""Upper ends of the batch bands; a last one is open."""
ENOUGH = 64
"""Least request-iterations of a cell; a cell with fewer uses the nearest band with enough."""
_ACCEPTED = "accepted_per_request"


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
    is_whole = (spec["top_k"] == 1) & (spec["tokens_to_verify"] == spec["draft_depth"] + 1)
    whole = spec.loc[is_whole, ["drafter", "draft_depth", "batch", "num_drafted", "num_accepted", _ACCEPTED]]
    notes = []
    if len(whole) < len(spec):
        notes.append(f"acceptance: {len(spec) - len(whole)} iterations with trees or trimmed chains left out")
    number = np.searchsorted(BANDS, whole["batch"])
    copies = drafters.copying(map(str, whole["drafter"].unique()))
    bands: list[dict[str, dict[int, FittedDepth]]] = [{} for _ in range(len(BANDS) + 1)]
    for drafter, depth in whole[["drafter", "draft_depth"]].drop_duplicates().sort_values("draft_depth").to_numpy():
        deep_enough = (whole["drafter"] == drafter) & (whole["draft_depth"] >= depth)
        cells = [_fit(whole[deep_enough & (number == b)], int(depth), copies[str(drafter)]) for b in range(len(bands))]
        for b, fitted in enumerate(_fill(cells)):
            if fitted is not None:
                bands[b].setdefault(str(drafter), {})[int(depth)] = fitted
    if not bands[0]:
        return None, notes
    return MeasuredAcceptance(
        copies=copies,
        bands=tuple(
            BatchBand(max_batch=end, drafters_by_depth=drafters)
            for end, drafters in zip((*BANDS, None), bands, strict=True)
        ),
    ), notes


def _fill(cells: list[FittedDepth | None]) -> list[FittedDepth | None]:
    """Each band's fit, or that of the nearest band with enough samples, or of the one with most."""
    samples = [cell.num_samples or 0 if cell else 0 for cell in cells]
    enough = [b for b, n in enumerate(samples) if n >= ENOUGH] or [int(np.argmax(samples))]
    return [cells[min(enough, key=lambda e: (abs(e - b), e))] for b in range(len(cells))]


def _fit(rows: pd.DataFrame, depth: int, copied: bool) -> FittedDepth | None:
    """Iterations of one drafter in one band, at least `depth` deep, as the chain of that depth; None without any."""
    same_depth = rows[rows["draft_depth"] == depth]
    sample = rows if same_depth.empty else same_depth
    if copied and same_depth["batch"].sum() >= ENOUGH:
        rows = same_depth
    if (requests := int(sample["batch"].sum())) == 0:
        return None
    drafted = float((sample["num_drafted"] * depth / sample["draft_depth"]).sum()) / requests
    num_samples = requests
    if rows[_ACCEPTED].notna().all():
        accepted = np.concatenate(rows[_ACCEPTED].tolist()).astype(np.int64)
        num_samples = len(accepted)
        p = np.bincount(np.minimum(accepted, depth), minlength=depth + 1) / num_samples
    else:
        mean = float(np.minimum(sample["num_accepted"], sample["batch"] * depth).sum()) / requests
        alpha = chain_alpha(min(mean, depth), depth)
        p = from_survival(np.power(alpha, np.arange(1, depth + 1, dtype=np.float64)))
    return FittedDepth(accepted=tuple(p.tolist()), drafted=min(drafted, depth), num_samples=num_samples)
