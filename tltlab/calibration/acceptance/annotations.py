"""Annotated acceptance against what happened: the same drafts, at the same positions of the same responses."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyarrow as pa

from tltlab.traces.drafts import recorded_drafts
from tltlab.traces.schema import KEY
from tltlab.traces.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """One drafter's annotation against its recorded drafts, both cut at the drafted depth, the text's end and the cap.

    `equal_share` is the share of drafts that kept exactly as many tokens; `difference` is the mean of annotated minus
    recorded, in tokens per draft, between `low` and `high` with 95 % (normal, responses are the units; NaN with one).
    """

    drafter: str
    num_drafts: int
    equal_share: float
    annotated_mean: float
    recorded_mean: float
    difference: float
    low: float
    high: float


class AgreementCheck:
    """Compares RL step by RL step; `result` has one entry per drafter that both drafted and was annotated."""

    def __init__(self) -> None:
        self._parts: list[pd.DataFrame] = []
        self.notes: list[str] = []

    def add(self, step: Trace, acceptance: pa.Table) -> None:
        """Compare one RL step; of several ages of a drafter the youngest counts. Raises TraceError."""
        if step.num_rows("iterations") == 0:
            return
        drafts, notes = recorded_drafts(step)
        self.notes += [note for note in notes if note not in self.notes]
        rows = acceptance.to_pandas().sort_values("drafter_age", kind="stable")
        rows = rows.drop_duplicates([*KEY, "drafter"])
        caps = step.workload[[*KEY, "max_response_tokens"]]
        pairs = drafts.merge(rows, on=[*KEY, "drafter"], sort=False).merge(caps, on=list(KEY), sort=False)
        pairs = pairs[pairs["generated_tokens"] < pairs["accept_if_drafted"].map(len)]
        if pairs.empty:
            return
        at, lists = pairs["generated_tokens"].to_numpy(np.int64), pairs["accept_if_drafted"].tolist()
        # A draft is followed by a token of the target's own, so the runtime never drafts the last token under the cap.
        worth = pairs["max_response_tokens"].to_numpy(np.int64) - at - 1
        most = np.minimum(np.minimum(pairs["reach"].to_numpy(np.int64), pairs["max_depth"].to_numpy(np.int64)), worth)
        tokens_left = np.array([len(row) for row in lists], np.int64) - at
        annotated = np.array([row[position] for position, row in zip(at, lists, strict=True)], np.int64)
        self._parts.append(
            pairs[[*KEY, "drafter"]].assign(
                annotated=np.minimum(annotated, most),
                # An engine also counts drafted tokens that it kept past the end of the response, and drops them.
                recorded=np.minimum(np.minimum(pairs["accepted"].to_numpy(np.int64), most), tokens_left),
            )
        )

    def result(self) -> list[Agreement]:
        if not self._parts:
            return []
        drafts = pd.concat(self._parts, ignore_index=True)
        return [_agreement(str(drafter), rows) for drafter, rows in drafts.groupby("drafter", sort=True)]


def _agreement(drafter: str, drafts: pd.DataFrame) -> Agreement:
    difference = drafts["annotated"] - drafts["recorded"]
    mean, num = float(difference.mean()), len(drafts)
    # The error of a ratio of two sums over responses, by linearisation.
    of_response = (difference - mean).groupby([drafts[name] for name in KEY], sort=False).sum()
    units = len(of_response)
    spread = float((of_response**2).sum()) * units / (units - 1) if units > 1 else math.nan
    half = 1.96 * math.sqrt(spread) / num
    return Agreement(
        drafter=drafter,
        num_drafts=num,
        equal_share=float((difference == 0).mean()),
        annotated_mean=float(drafts["annotated"].mean()),
        recorded_mean=float(drafts["recorded"].mean()),
        difference=mean,
        low=mean - half,
        high=mean + half,
    )
