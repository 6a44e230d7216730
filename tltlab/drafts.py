"""Every draft of a recording, one row each: whose it was, where it began, how many of its tokens were kept.

Columns: the request's key, `drafter`, `reach` (most tokens that could be kept), `generated_tokens` before it,
`accepted` without the bonus token, and from recorded iterations `num_siblings`, the samples of the same group that had
finished.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from .errors import ConfigError, TraceError
from .schema import KEY
from .trace import Trace

COLUMNS = (*KEY, "drafter", "reach", "generated_tokens", "accepted")


def walked_drafts(acceptance: pd.DataFrame, depth: int) -> pd.DataFrame:
    """The drafts that decoding at `depth` would make along acceptance.parquet, first position to last.

    A draft at position p that keeps a tokens is followed by one at p + a + 1: what a run meets, while a mean over all
    positions counts a long match once for each of its tokens. Of several drafter ages the youngest is walked. Raises
    TraceError for an accepted length outside [0, max_depth], ConfigError for a depth that was not recorded.
    """
    if depth < 1:
        raise ConfigError(f"drafts of depth {depth}: give at least 1")
    youngest = acceptance.sort_values("drafter_age", kind="stable").drop_duplicates([*KEY, "drafter"]).sort_index()
    rows: list[tuple[Any, ...]] = []
    columns = [youngest[c].tolist() for c in (*KEY, "drafter", "max_depth", "accept_if_drafted")]
    for *key, drafter, max_depth, listed in zip(*columns, strict=True):
        if depth > max_depth:
            raise ConfigError(f"acceptance.parquet goes to depth {max_depth} for {tuple(key)}, asked for {depth}")
        positions = np.asarray(listed, np.int64)
        if len(wrong := positions[(positions < 0) | (positions > max_depth)]):
            raise TraceError(
                f"acceptance.parquet: accept_if_drafted of {tuple(key)}, drafter {drafter!r}: got {wrong[0]}, "
                f"outside [0, max_depth = {max_depth}]"
            )
        kept = np.minimum(positions, depth).tolist()
        at = 0
        while at < len(kept):
            rows.append((*key, drafter, depth, at, kept[at]))
            at += kept[at] + 1
    return pd.DataFrame(rows, columns=list(COLUMNS))


def recorded_drafts(trace: Trace) -> tuple[pd.DataFrame, list[str]]:
    """The drafts of recorded iterations, and notes on what had to be left out.

    Iterations list accepted tokens in order of admission and name nobody; who ran follows from the lengths: a worker's
    responses are admitted in the order they were submitted and leave when their tokens are out. Where the batch does
    not match that (preemption, chunked prefill), the worker's RL step is left out. Trees are left out.
    """
    iterations = trace.iterations
    if iterations is None or "accepted_per_request" not in iterations:
        return _no_drafts(), ["the trace has no accepted_per_request: its drafts cannot be told apart by request"]
    joined = trace.workload.merge(trace.outcomes, on=list(KEY), how="inner", sort=False)
    if joined["worker"].isna().any() or joined["t_finish"].isna().any():
        return _no_drafts(), ["outcomes lack worker or t_finish: drafts cannot be told apart by request"]
    groups = {group: np.sort(rows["t_finish"].to_numpy()) for group, rows in joined.groupby(["rl_step", "prompt_id"])}
    ordered = joined.sort_values("t_submit", kind="stable") if joined["t_submit"].notna().all() else joined
    parts, skipped, periods = [], 0, iterations.groupby(["rl_step", "worker"], sort=True)
    for (rl_step, worker), rows in periods:
        mine = ordered[(ordered["rl_step"] == rl_step) & (ordered["worker"] == worker)]
        part = _attributed(mine.reset_index(drop=True), rows.sort_values("iteration"), groups)
        parts += [] if part is None else [part]
        skipped += part is None
    notes = [f"{skipped} of {len(periods)} workers' RL steps left out: batches do not follow from lengths"]
    found = pd.concat(parts, ignore_index=True) if parts else _no_drafts()
    return found, notes if skipped else []


def _no_drafts() -> pd.DataFrame:
    return pd.DataFrame(columns=[*COLUMNS, "num_siblings"])


def _attributed(
    requests: pd.DataFrame, iterations: pd.DataFrame, finishes: dict[Any, npt.NDArray[np.float64]]
) -> pd.DataFrame | None:
    """One worker's drafts in one RL step; None where its batches do not follow from the lengths."""
    lengths = requests["response_tokens"].to_numpy(np.int64)
    group = list(zip(requests["rl_step"], requests["prompt_id"], strict=True))
    generated = np.zeros(len(lengths), np.int64)
    pieces: list[tuple[npt.NDArray[Any], ...]] = []
    columns = ("batch", "num_generated", "draft_depth", "top_k", "tokens_to_verify", "drafter", "t_start")
    listed = iterations["accepted_per_request"].tolist()
    for i, (batch, num, depth, top_k, verify, drafter, start) in enumerate(
        iterations[list(columns)].itertuples(index=False, name=None)
    ):
        running = np.flatnonzero(generated < lengths)
        if len(running) != batch:
            return None
        if num == 0:
            continue
        accepted = np.zeros(batch, np.int64)
        if depth > 0:
            if listed[i] is None or len(listed[i]) != batch:
                return None
            accepted = np.asarray(listed[i], np.int64)
            most = min(depth, verify - 1)
            if (wrong := accepted[(accepted < 0) | (accepted > most)]).size:
                raise TraceError(f"iterations: accepted_per_request holds {wrong[0]}, outside [0, {most}] at {start} s")
            # A request's first iteration prefills it: nothing was drafted for it yet.
            drafting = generated[running] > 0
            if top_k == 1 and drafting.any():
                who = running[drafting]
                beside = [int(np.searchsorted(finishes[group[r]], start, side="right")) for r in who]
                count = np.full(len(who), most)
                named = np.full(len(who), drafter, dtype=object)
                pieces.append((who, named, count, generated[who], accepted[drafting], np.array(beside)))
        generated[running] += 1 + accepted
    if not pieces:
        return _no_drafts()
    who, named, most_kept, before, kept, beside_ = (np.concatenate(column) for column in zip(*pieces, strict=True))
    drafts = requests[list(KEY)].iloc[who].reset_index(drop=True)
    return drafts.assign(drafter=named, reach=most_kept, generated_tokens=before, accepted=kept, num_siblings=beside_)
