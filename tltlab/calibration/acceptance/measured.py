"""Fits accepted tokens per drafter, depth and batch size to recorded iterations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import pandas as pd

from tltlab.acceptance.base import chain_alpha, from_survival
from tltlab.acceptance.measured import Band, FittedDepth, MeasuredAcceptance
from tltlab.arrays import Flags, Floats, Ints
from tltlab.drafters.specs import STANDARD, Drafters

BANDS = (4, 16, 48)
"""Upper ends of the batch bands; a last one is open."""
ENOUGH = 64
"""Least request-iterations of a cell; a cell with fewer uses the nearest band with enough."""


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
    drafts = _Drafts.of(whole)
    number = np.searchsorted(BANDS, drafts.batch)
    copies = drafters.copying(map(str, whole["drafter"].unique()))
    bands: list[dict[str, dict[int, FittedDepth]]] = [{} for _ in range(len(BANDS) + 1)]
    for drafter, depth in whole[["drafter", "draft_depth"]].drop_duplicates().sort_values("draft_depth").to_numpy():
        of_drafter = (whole["drafter"] == drafter).to_numpy()
        copied = copies[str(drafter)]
        cells = [drafts.fit(of_drafter & (number == b), copied, int(depth)) for b in range(len(bands))]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drafts:
    """Iterations as columns; `accepted` has the tokens of one request after another, `num_lists` of each iteration.

    An iteration that is not `known` has none there.
    """

    batch: Ints
    depth: Ints
    num_drafted: Floats
    num_accepted: Floats
    known: Flags
    accepted: Ints
    num_lists: Ints

    @classmethod
    def of(cls, rows: pd.DataFrame) -> Self:
        lists = rows["accepted_per_request"]
        known, each = lists.notna().to_numpy(dtype=bool), lists.dropna().tolist()
        num_lists = np.zeros(len(rows), np.int64)
        num_lists[known] = [len(x) for x in each]
        return cls(
            batch=rows["batch"].to_numpy(np.int64),
            depth=rows["draft_depth"].to_numpy(np.int64),
            num_drafted=rows["num_drafted"].to_numpy(np.float64),
            num_accepted=rows["num_accepted"].to_numpy(np.float64),
            known=known,
            accepted=np.concatenate([np.zeros(0, np.int64), *each]).astype(np.int64),
            num_lists=num_lists,
        )

    def fit(self, rows: Flags, copied: bool, depth: int) -> FittedDepth | None:
        """One drafter's iterations in one band as the chain of `depth`; None without any at least as deep."""
        rows = rows & (self.depth >= depth)
        same_depth = rows & (self.depth == depth)
        sample = same_depth if same_depth.any() else rows
        if copied and int(self.batch[same_depth].sum()) >= ENOUGH:
            rows = same_depth
        requests = int(self.batch[sample].sum())
        if requests == 0:
            return None
        drafted = float(np.nansum(self.num_drafted[sample] * depth / self.depth[sample])) / requests
        if self.known[rows].all():
            accepted = self.accepted[np.repeat(rows, self.num_lists)]
            num_samples = len(accepted)
            p = np.bincount(np.minimum(accepted, depth), minlength=depth + 1) / num_samples
        else:
            num_samples = requests
            most = self.batch[sample] * depth
            mean = float(np.nansum(np.minimum(self.num_accepted[sample], most))) / requests
            alpha = chain_alpha(min(mean, depth), depth)
            p = from_survival(np.power(alpha, np.arange(1, depth + 1, dtype=np.float64)))
        return FittedDepth(accepted=tuple(p.tolist()), drafted=min(drafted, depth), num_samples=num_samples)
