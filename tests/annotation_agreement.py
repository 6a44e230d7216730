"""Annotated acceptance against what a recording's own drafts had kept, at the same positions of the same responses."""

import numpy as np
import pandas as pd

from tltlab.traces.drafts import recorded_drafts
from tltlab.traces.schema import KEY


def agreement(trace, drafter):
    """A row per draft that the trace recorded: `annotated` and `recorded`, tokens kept without the bonus.

    Both are cut at the drafted depth, the text's end and the response's cap.
    """
    drafts, notes = recorded_drafts(trace)
    assert notes == []
    rows = trace.acceptance.query("drafter == @drafter and drafter_age == 0")
    caps = trace.workload[[*KEY, "max_response_tokens"]]
    pairs = drafts.merge(rows, on=[*KEY, "drafter"]).merge(caps, on=list(KEY))
    length = pairs["accept_if_drafted"].map(len)
    pairs = pairs[pairs["generated_tokens"] < length]
    at = pairs["generated_tokens"]
    annotated = [row[position] for position, row in zip(at, pairs["accept_if_drafted"], strict=True)]
    # A draft is followed by a token of the target's own, so the runtime never drafts the last token under the cap. An
    # engine also counts drafted tokens that it kept past the end of the response, and drops them.
    most = np.minimum.reduce([pairs["reach"], pairs["max_depth"], pairs["max_response_tokens"] - at - 1])
    recorded = np.minimum.reduce([pairs["accepted"], most, length[pairs.index] - at])
    return pd.DataFrame({"annotated": np.minimum(annotated, most), "recorded": recorded})
