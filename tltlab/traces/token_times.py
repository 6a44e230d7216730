"""When each recorded token came: from iterations where they tell whose they are, else between first token and finish.

Three sources, the best that an RL step of a worker has:
- iterations with accepted_per_request (or without speculation) say how many tokens each response got in which
  iteration: all of them at its end;
- outcomes with t_first_token and t_finish: tokens are spread evenly between the two;
- nothing: one token per tick, all responses of the RL step side by side, a turn after the turn before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from tltlab.drafters.base import Key

from .drafts import attributed_batches
from .schema import KEY
from .trace import Trace

FloatArray = npt.NDArray[np.floating]


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
    times_s: FloatArray


def recorded_responses(step: Trace) -> list[RecordedResponse]:
    """The responses of a one-step trace whose tokens it has, in workload order. Raises TraceError."""
    tokens = step.tokens
    if tokens is None:
        return []
    known = step.workload[list(KEY)].merge(step.outcomes, on=list(KEY), sort=False)
    joined = known.merge(tokens, on=list(KEY), sort=False).reset_index(drop=True)
    # A worker's batches name nobody, so its iterations tell only if every response of the worker is there.
    exact = _iteration_times(known, step.iterations)
    ticks = _turn_starts(known)
    responses = []
    columns = ("prompt_token_ids", "token_ids", "worker", "t_submit", "t_first_token", "t_finish")
    for row in joined[[*KEY, *columns]].itertuples(index=False, name=None):
        key, (prompt, response, worker, submit, first, finish) = row[:4], row[4:]
        if key in exact:
            times = exact[key]
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


def _turn_starts(known: pd.DataFrame) -> dict[Key, float]:
    """Tokens of the earlier turns of the same sample."""
    ordered = known.sort_values(list(KEY), kind="stable")
    lengths = ordered.groupby(["rl_step", "prompt_id", "sample"], sort=False)["response_tokens"]
    starts = lengths.cumsum() - ordered["response_tokens"]
    return dict(zip(ordered[list(KEY)].itertuples(index=False, name=None), starts.astype(float), strict=True))


def _iteration_times(known: pd.DataFrame, iterations: pd.DataFrame | None) -> dict[Key, FloatArray]:
    """Token times by key, of the workers whose iterations tell them."""
    if iterations is None or known["worker"].isna().any():
        return {}
    if "accepted_per_request" not in iterations:
        iterations = iterations.assign(accepted_per_request=None)
    ordered = known.sort_values("t_submit", kind="stable") if known["t_submit"].notna().all() else known
    times: dict[Key, FloatArray] = {}
    for worker, rows in iterations.groupby("worker", sort=True):
        mine = ordered[ordered["worker"] == worker]
        lengths = mine["response_tokens"].to_numpy(np.int64)
        batches = attributed_batches(lengths, rows.sort_values("iteration"))
        if batches is None:
            continue
        pieces: list[list[FloatArray]] = [[] for _ in lengths]
        for batch in batches:
            end = batch.row["t_start"] + batch.row["duration"]
            for who, num in zip(batch.running.tolist(), (batch.accepted + 1).tolist(), strict=True):
                pieces[who].append(np.full(num, end))
        told = [np.concatenate([np.zeros(0), *parts]) for parts in pieces]
        if all(len(t) >= n for t, n in zip(told, lengths, strict=True)):
            keys = mine[list(KEY)].itertuples(index=False, name=None)
            times |= {key: np.maximum.accumulate(t[:n]) for key, t, n in zip(keys, told, lengths, strict=True)}
    return times
