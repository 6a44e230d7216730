"""Drafts and tokens of a recording, with request and time of each, also where batches do not name their requests.

Drafts are one row each. Columns: the request's key, `drafter`, `reach` (most tokens that could be kept),
`generated_tokens` before it, `accepted` without the bonus token, and from recorded iterations `num_siblings`, the
samples of the same group that had finished.

Tokens get their times from the best of three sources that an RL step of a worker has:
- iterations with accepted_per_request (or without speculation) give the number of tokens of each response per
  iteration: all of them at its end;
- outcomes with t_first_token and t_finish: tokens are spread evenly between the two;
- nothing: one token per tick, all responses of the RL step side by side, a turn after the turn before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from tltlab.arrays import Array, Flags, Floats, Ints
from tltlab.drafters.base import Key
from tltlab.errors import ConfigError, TraceError

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
    for *key, drafter, max_depth, lengths in zip(*columns, strict=True):
        if depth > max_depth:
            raise ConfigError(f"acceptance.parquet goes to depth {max_depth} for {tuple(key)}, asked for {depth}")
        positions = np.asarray(lengths, np.int64)
        if len(wrong := positions[(positions < 0) | (positions > max_depth)]):
            raise TraceError(
                f"acceptance.parquet: accept_if_drafted of {tuple(key)}, drafter {drafter!r}: got {wrong[0]}, "
                f"outside [0, max_depth = {max_depth}]"
            )
        accepted = np.minimum(positions, depth).tolist()
        at = 0
        while at < len(accepted):
            rows.append((*key, drafter, depth, at, accepted[at]))
            at += accepted[at] + 1
    return pd.DataFrame(rows, columns=list(COLUMNS))


def recorded_drafts(trace: Trace) -> tuple[pd.DataFrame, list[str]]:
    """The drafts of recorded iterations, and notes on what had to be left out.

    Iterations list accepted tokens in order of admission and name nobody; who ran follows from the lengths: a worker's
    responses are admitted in the order they were submitted and leave when their tokens are out. Where the batch does
    not match that (preemption, chunked prefill), the worker's RL step is left out. Trees are left out.
    """
    iterations = trace.iterations
    if iterations is None:
        return _no_drafts(), ["the trace has no accepted_per_request: its drafts cannot be attributed to requests"]
    responses = trace.workload.merge(trace.outcomes, on=list(KEY), how="inner", sort=False)
    if responses["worker"].isna().any() or responses["t_finish"].isna().any():
        return _no_drafts(), ["outcomes lack worker or t_finish: drafts cannot be attributed to requests"]
    groups = responses.groupby(["rl_step", "prompt_id"])["t_finish"]
    finishes = {group: np.sort(times.to_numpy()) for group, times in groups}
    ordered = responses.sort_values("t_submit", kind="stable") if responses["t_submit"].notna().all() else responses
    parts, skipped, periods = [], 0, iterations.groupby(["rl_step", "worker"], sort=True)
    for (rl_step, worker), rows in periods:
        requests = ordered[(ordered["rl_step"] == rl_step) & (ordered["worker"] == worker)]
        part = _drafts_of(requests.reset_index(drop=True), rows.sort_values("iteration"), finishes)
        parts += [] if part is None else [part]
        skipped += part is None
    notes = [f"{skipped} of {len(periods)} workers' RL steps left out: batches do not follow from lengths"]
    drafts = pd.concat(parts, ignore_index=True) if parts else _no_drafts()
    return drafts, notes if skipped else []


def _no_drafts() -> pd.DataFrame:
    return pd.DataFrame(columns=[*COLUMNS, "num_siblings"])


class AttributedBatch(NamedTuple):
    """One recorded iteration with its requests. `accepted` is per entry of `running`, without the bonus token.

    `before` is the number of tokens that each running request had generated by then; `drafting` marks the requests with
    a draft: the first iteration of a request is its prefill, without a draft.
    """

    row: dict[str, Any]
    running: Ints
    before: Ints
    accepted: Ints
    drafting: Flags


def computed_tokens(outcomes: pd.DataFrame) -> Ints:
    """Number of tokens that were computed for each response, those included that its client did not get."""
    return np.asarray(outcomes["response_tokens"] + outcomes["discarded_tokens"].fillna(0), np.int64)


def attributed_batches(lengths: Ints, iterations: pd.DataFrame) -> list[AttributedBatch] | None:
    """One worker's iterations that brought tokens, as they follow from its responses' lengths in order of admission.

    `lengths` are `computed_tokens`, since a request runs until its client aborts it. `iterations` are its rows of one
    RL step in order. None where the batches do not follow from the lengths.
    """
    generated = np.zeros(len(lengths), np.int64)
    batches: list[AttributedBatch] = []
    names = [str(name) for name in iterations.columns]
    for values in iterations.itertuples(index=False, name=None):
        row = dict(zip(names, values, strict=True))
        running = np.flatnonzero(generated < lengths)
        if len(running) != row["batch"]:
            return None
        if row["num_generated"] == 0 and row["prefill_tokens"] > 0:
            continue
        before, accepted = generated[running], np.zeros(len(running), np.int64)
        if row["draft_depth"] > 0:
            per_request = row["accepted_per_request"]
            if per_request is None or len(per_request) != len(running):
                return None
            accepted = np.asarray(per_request, np.int64)
            most = min(row["draft_depth"], row["tokens_to_verify"] - 1)
            if (wrong := accepted[(accepted < 0) | (accepted > most)]).size:
                start = row["t_start"]
                raise TraceError(f"iterations: accepted_per_request holds {wrong[0]}, outside [0, {most}] at {start} s")
        drafting = (before > 0) & (row["draft_depth"] > 0)
        batches.append(AttributedBatch(row, running, before, accepted, drafting))
        generated[running] += 1 + accepted
    return batches


def _drafts_of(requests: pd.DataFrame, iterations: pd.DataFrame, finishes: dict[Any, Floats]) -> pd.DataFrame | None:
    """One worker's drafts in one RL step; None where its batches do not follow from the lengths."""
    batches = attributed_batches(computed_tokens(requests), iterations)
    if batches is None:
        return None
    group = list(zip(requests["rl_step"], requests["prompt_id"], strict=True))
    pieces: list[tuple[Array, ...]] = []
    for row, running, before, accepted, drafting in batches:
        if row["top_k"] != 1 or not drafting.any():
            continue
        request = running[drafting]
        siblings = [int(np.searchsorted(finishes[group[r]], row["t_start"], side="right")) for r in request]
        most = min(row["draft_depth"], row["tokens_to_verify"] - 1)
        drafter = np.full(len(request), row["drafter"], dtype=object)
        reach = np.full(len(request), most)
        pieces.append((request, drafter, reach, before[drafting], accepted[drafting], np.array(siblings)))
    if not pieces:
        return _no_drafts()
    request, *columns = (np.concatenate(column) for column in zip(*pieces, strict=True))
    drafts: pd.DataFrame = requests[list(KEY)].iloc[request].reset_index(drop=True)
    names = ("drafter", "reach", "generated_tokens", "accepted", "num_siblings")
    return drafts.assign(**dict(zip(names, columns, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedResponse:
    """A response with its text.

    `times_s`, one per token and ascending, are comparable within its worker; what has equal times came at once.
    `opened_s` is when the request was submitted, at the latest its first token's time; `worker` None is unknown.
    """

    key: Key
    worker: int | None
    prompt_token_ids: list[int]
    token_ids: list[int]
    opened_s: float
    times_s: Floats


def recorded_responses(step: Trace) -> list[RecordedResponse]:
    """The responses of a one-step trace whose tokens it has, in workload order. Raises TraceError."""
    tokens = step.tokens
    if tokens is None:
        return []
    outcomes = step.workload[list(KEY)].merge(step.outcomes, on=list(KEY), sort=False)
    rows = outcomes.merge(tokens, on=list(KEY), sort=False).reset_index(drop=True)
    # Batches do not name their requests, so iterations give times only if every response of the worker is there.
    exact = _iteration_times(outcomes, step.iterations)
    ticks = _turn_starts(outcomes)
    responses = []
    columns = ("prompt_token_ids", "token_ids", "worker", "t_submit", "t_first_token", "t_finish")
    for row in rows[[*KEY, *columns]].itertuples(index=False, name=None):
        key, (prompt, response, worker, submit, first, finish) = row[:4], row[4:]
        if key in exact:
            times: Array = exact[key]
        elif pd.notna(first) and pd.notna(finish):
            times = np.linspace(first, max(first, finish), len(response))
        else:
            times, submit = ticks[key] + 1.0 + np.arange(len(response)), ticks[key] + 0.5
        first_s = times[0] if len(times) else 0.0
        responses.append(
            RecordedResponse(
                key=key,
                worker=None if pd.isna(worker) else int(worker),
                prompt_token_ids=prompt.tolist(),
                token_ids=response.tolist(),
                opened_s=float(min(submit, first_s) if pd.notna(submit) else first_s),
                times_s=times,
            )
        )
    return responses


def _turn_starts(outcomes: pd.DataFrame) -> dict[Key, float]:
    """Tokens of the earlier turns of the same sample."""
    ordered = outcomes.sort_values(list(KEY), kind="stable")
    lengths = ordered.groupby(["rl_step", "prompt_id", "sample"], sort=False)["response_tokens"]
    starts = lengths.cumsum() - ordered["response_tokens"]
    return dict(zip(ordered[list(KEY)].itertuples(index=False, name=None), starts.astype(float), strict=True))


def _iteration_times(outcomes: pd.DataFrame, iterations: pd.DataFrame | None) -> dict[Key, Floats]:
    """Token times by key, of the workers whose iterations determine them."""
    if iterations is None or outcomes["worker"].isna().any():
        return {}
    ordered = outcomes.sort_values("t_submit", kind="stable") if outcomes["t_submit"].notna().all() else outcomes
    times: dict[Key, Floats] = {}
    for worker, rows in iterations.groupby("worker", sort=True):
        responses = ordered[ordered["worker"] == worker]
        lengths = responses["response_tokens"].to_numpy(np.int64)
        batches = attributed_batches(computed_tokens(responses), rows.sort_values("iteration"))
        if batches is None:
            continue
        pieces: list[list[Floats]] = [[] for _ in lengths]
        for batch in batches:
            end = batch.row["t_start"] + batch.row["duration"]
            for request, num in zip(batch.running.tolist(), (batch.accepted + 1).tolist(), strict=True):
                pieces[request].append(np.full(num, end))
        token_times = [np.concatenate([np.zeros(0), *parts]) for parts in pieces]
        if all(len(t) >= n for t, n in zip(token_times, lengths, strict=True)):
            keys = responses[list(KEY)].itertuples(index=False, name=None)
            times |= {key: np.maximum.accumulate(t[:n]) for key, t, n in zip(keys, token_times, lengths, strict=True)}
    return times
