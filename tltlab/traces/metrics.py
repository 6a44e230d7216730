"""The metrics, each defined once, for recorded and simulated traces alike.

Notation, for one RL step: responses r with submit and finish times s_r, f_r and lengths L_r; W workers; the rollout
lasts from t0 = min s_r for D seconds. Every function takes a trace and covers all its RL steps as ratios of sums, over
those where the quantity is known; `trace.select([k])` gives one RL step. None means "unknown" (no times, no workers).
A trace larger than memory is read in parts of neighbouring RL steps.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow.compute as pc

from tltlab.arrays import Floats, Ints
from tltlab.errors import TraceError
from tltlab.records import Json, frozen
from tltlab.stats import intraclass_correlation

from .trace import Trace

ROLLOUT_KINDS = ("prefill", "decode", "speculative_decode", "switch", "move")
"""Spans in which a worker works for the rollout. Spot training fills a bubble, so the bubble is still one."""
_BUSY_KINDS = (*ROLLOUT_KINDS, "spot_train")

TAIL_SHARE = 1 / 8
"""The tail begins when fewer than this share of an RL step's responses are still running."""


@frozen
class MeasuredRollout:
    """One RL step for the metrics: L_r, the f_r that are known, t0, D, and the seconds in which each worker lane was
    busy; D and those are None where unknown."""

    rl_step: int
    lengths: Ints
    finish_s: Floats
    start_s: float
    rollout_s: float | None
    busy_s: dict[str, float] | None


Source = Trace | Sequence[MeasuredRollout]
"""Rollouts, or the trace that has them."""


def rollout_s(trace: Source) -> dict[int, float | None]:
    """Seconds each RL step's rollout took: `steps.rollout_s`, else D = max f_r - min s_r.

    Responses of 2 s and 5 s, both submitted at 0: {0: 5.0}.
    """
    return {step.rl_step: step.rollout_s for step in rollouts(trace)}


def makespan_s(trace: Source) -> float | None:
    """Mean of D over the RL steps. Rollouts of 4 s and 6 s: 5.0."""
    durations = [step.rollout_s for step in rollouts(trace) if step.rollout_s is not None]
    return float(np.mean(durations)) if durations else None


def num_tokens(trace: Source) -> int:
    """Response tokens, sum of L_r."""
    return sum(int(step.lengths.sum()) for step in rollouts(trace))


def tokens_per_s(trace: Source) -> float | None:
    """Response tokens per second of rollout, sum L_r / sum D. 100 and 300 tokens in a rollout of 8 s: 50.0."""
    steps = [(step.rollout_s, int(step.lengths.sum())) for step in rollouts(trace) if step.rollout_s]
    return _ratio(sum(tokens for _, tokens in steps), sum(seconds for seconds, _ in steps))


def bubble_fraction(trace: Source, *, workers: int | None = None, idle: bool = False) -> float | None:
    """Idle worker-seconds / worker-seconds during rollout, sum (W D - sum_w busy_w) / sum W D.

    A worker is busy for the union of its ROLLOUT_KINDS spans in the rollout; in an RL step without worker spans, from
    t0 until its last response finishes. W is the manifest's, or `workers`. Two workers, done at 5 s and 10 s:
    (0 + 5) / 20 = 0.25. With `idle` a worker that trains a drafter is busy too.
    """
    workers = num_workers(trace) if workers is None and isinstance(trace, Trace) else workers
    known = _busy(trace, idle)
    total = (workers or 0) * sum(duration for duration, _ in known)
    return _ratio(total - sum(sum(busy.values()) for _, busy in known), total)


def _busy(trace: Source, idle: bool) -> list[tuple[float, dict[str, float]]]:
    """Seconds of each rollout and of its busy workers, where both are known."""
    steps = rollouts(trace, _BUSY_KINDS if idle else ROLLOUT_KINDS)
    return [(s.rollout_s, s.busy_s) for s in steps if s.rollout_s is not None and s.busy_s is not None]


def tail_fraction(trace: Source) -> float | None:
    """Share of the rollout in which fewer than 1/8 of the responses are still running, sum tail / sum D.

    With N responses the tail begins at the finish after which N - k < N / 8, and lasts until the rollout ends.
    16 responses, 15 done by 4 s and one at 10 s: the tail is 4 s to 10 s, 0.6.
    """
    tail = total = 0.0
    for step in rollouts(trace):
        if (window := _tail(step)) is not None:
            total += step.rollout_s or 0.0
            tail += window[1] - window[0]
    return _ratio(tail, total)


def tail_window(trace: Trace, rl_step: int) -> tuple[float, float] | None:
    """Start and end of an RL step's tail in seconds since the RL step's start, see `tail_fraction`: (4.0, 10.0)."""
    return _tail(rollouts(trace.select([rl_step]))[0])


def tail_start(ends: npt.ArrayLike) -> float:
    """Where the tail of responses that end at `ends`, at least one, begins: at a time, or at a length, see
    `tail_fraction`. Ends 1, 2, ..., 16: 15.0, after which one of 16 is left."""
    ordered = np.sort(np.asarray(ends, np.float64))
    return float(ordered[int(np.floor(len(ordered) * (1 - TAIL_SHARE)))])


def mean_accept_length(trace: Trace) -> float | None:
    """Tokens per request and speculative iteration, bonus token included; None without speculation.

    1 + sum of accepted tokens / number of (request, iteration) pairs that verified a draft, over iterations with
    num_drafted > 0; the pairs are the entries of `accepted_per_request`, the batch where it is unknown.
    Two requests accepting 3 and 1: 1 + 4 / 2 = 3.0.
    """
    num_accepted = num_pairs = 0
    for part in trace.parts():
        if (table := part.arrow("iterations")) is not None:
            table = table.filter(pc.greater(table["num_drafted"], 0))
            pairs = pc.coalesce(pc.list_value_length(table["accepted_per_request"]), table["batch"])
            num_pairs += pc.sum(pairs).as_py() or 0
            num_accepted += pc.sum(table["num_accepted"]).as_py() or 0
    return 1.0 + num_accepted / num_pairs if num_pairs else None


def running_requests(trace: Trace, rl_step: int) -> tuple[Floats, Ints]:
    """Requests submitted and not finished over time, as a step curve: counts[i] from times[i] until times[i + 1].

    Raises TraceError where no finish time is known. Two requests from 0, done at 2 and 5: ([0, 2, 5], [2, 1, 0]).
    """
    outcomes = trace.table("outcomes", rl_step=rl_step)
    assert outcomes is not None
    outcomes = outcomes[outcomes["t_finish"].notna()]
    if outcomes.empty:
        raise TraceError(f"rl_step {rl_step}: no finish times; simulate the trace first")
    submitted, finished = outcomes["t_submit"].fillna(0.0).to_numpy(), outcomes["t_finish"].to_numpy()
    events = np.concatenate([submitted, finished])
    change = np.repeat([1, -1], len(outcomes))
    times, at = np.unique(events, return_inverse=True)
    return times, np.cumsum(np.bincount(at, weights=change)).astype(np.int64)


def length_percentiles(trace: Trace, percentiles: Sequence[float] = (50, 95, 100)) -> list[float]:
    """Percentiles of L_r, linear between ranks. Lengths 1, 2, 3: [2.0, 2.9, 3.0]."""
    lengths = np.concatenate([part.outcomes["response_tokens"].to_numpy() for part in trace.parts()])
    return [float(p) for p in np.percentile(lengths, percentiles)] if len(lengths) else []


def prompt_share(trace: Trace) -> float | None:
    """Share of the variance of log L that the prompt explains: the one-way random-effects ICC(1), not below 0.

    (MSB - MSW) / (MSB + (n0 - 1) MSW) with the mean squares between and within groups and n0 the (bias-corrected) group
    size; groups are compared within their RL step, so drift over the steps does not count. Lengths below 1 are left
    out. None without two groups in an RL step or a group of two. Groups {2, 2} and {8, 8}: 1.0.
    """
    squares = np.sum([_squares(part.outcomes) for part in trace.parts()], axis=0)
    num, num_groups, num_steps, between, within, squared_sizes = squares.tolist()
    between_df, within_df = num_groups - num_steps, num - num_groups
    if between_df < 1 or within_df < 1:
        return None
    return intraclass_correlation(between / between_df, within / within_df, (num - squared_sizes) / between_df)


def summary(trace: Source, *, workers: int | None = None) -> Json:
    """The keys of `tltlab simulate --json` that a trace has too; None where unknown.

    Rollouts alone do not know on how many `workers` they ran.
    """
    return {
        "makespan_s": makespan_s(trace),
        "makespan_s_per_step": list(rollout_s(trace).values()),
        "tokens_per_s": tokens_per_s(trace),
        "num_responses": sum(len(step.lengths) for step in rollouts(trace)),
        "num_tokens": num_tokens(trace),
        "bubble_fraction": bubble_fraction(trace, workers=workers),
        "tail_fraction": tail_fraction(trace),
    }


def per_step(trace: Trace) -> list[Json]:
    """One dict per RL step: lengths, prompt share and the metrics above; RL steps are read one by one."""
    rows = []
    for step in trace.iter_rl_steps():
        outcomes, measured = step.outcomes, rollouts(step, ROLLOUT_KINDS)
        p50, p95, longest = length_percentiles(step) or (None, None, None)
        rows.append(
            {
                "rl_step": step.rl_steps[0],
                "num_responses": len(outcomes),
                "num_tokens": num_tokens(measured),
                "num_cut": int((outcomes["finish_reason"] == "length").sum()),
                "num_aborted": int((outcomes["finish_reason"] == "abort").sum()),
                "p50_tokens": p50,
                "p95_tokens": p95,
                "max_tokens": longest,
                "prompt_share": prompt_share(step),
                "rollout_s": measured[0].rollout_s,
                "bubble_fraction": bubble_fraction(measured, workers=num_workers(step)),
                "idle_fraction": bubble_fraction(step, idle=True),
                "tail_fraction": tail_fraction(measured),
                "mean_accept_length": mean_accept_length(step),
            }
        )
    return rows


def _squares(outcomes: pd.DataFrame) -> Floats:
    """Sums for the analysis of variance of log L, which add up over RL steps.

    Responses, groups, RL steps, squares between and within groups, and squared group sizes / responses of the RL step.
    """
    outcomes = outcomes[outcomes["response_tokens"] >= 1]
    y = outcomes["response_tokens"].astype(np.float64).apply(np.log)
    of_step = y.groupby(outcomes["rl_step"])
    of_group = y.groupby([outcomes["rl_step"], outcomes["prompt_id"]])
    mean, sizes = of_group.transform("mean"), of_group.size()
    between = ((mean - of_step.transform("mean")) ** 2).sum()
    squared_sizes = (sizes**2 / of_step.size().reindex(sizes.index, level=0)).sum()
    squares = between, ((y - mean) ** 2).sum(), squared_sizes
    return np.array([len(y), len(sizes), of_step.ngroups, *squares], np.float64)


def rollouts(source: Source, busy_kinds: Sequence[str] = ()) -> Sequence[MeasuredRollout]:
    """The rollouts; those of a trace know when workers were busy with spans of these kinds."""
    return list(_read(source, busy_kinds)) if isinstance(source, Trace) else source


def _read(trace: Trace, busy_kinds: Sequence[str]) -> Iterator[MeasuredRollout]:
    for part in trace.parts():
        nothing, steps = part.outcomes[:0], part.steps
        outcomes = dict(iter(part.outcomes.groupby("rl_step")))
        spans = {} if part.spans is None else dict(iter(part.spans.groupby("rl_step")))
        measured = {} if steps is None else steps.set_index("rl_step")["rollout_s"].dropna().to_dict()
        for rl_step in part.rl_steps:
            rows = outcomes.get(rl_step, nothing)
            start = rows["t_submit"].min()
            start_s = 0.0 if pd.isna(start) else float(start)
            end = rows["t_finish"].max()
            duration = measured.get(rl_step, None if pd.isna(end) else float(end) - start_s)
            lengths = rows["response_tokens"].to_numpy(np.int64)
            finish_s = rows["t_finish"].dropna().to_numpy()
            busy_s = None
            if duration is not None and busy_kinds:
                busy_s = _busy_s(rows, spans.get(rl_step), busy_kinds, start_s, start_s + duration)
            yield MeasuredRollout(
                rl_step=rl_step, lengths=lengths, finish_s=finish_s, start_s=start_s, rollout_s=duration, busy_s=busy_s
            )


def _tail(step: MeasuredRollout) -> tuple[float, float] | None:
    if step.rollout_s is None or not len(step.finish_s):
        return None
    end = step.start_s + step.rollout_s
    return min(tail_start(step.finish_s), end), end


def num_workers(trace: Trace) -> int:
    """Workers of the manifest, or as many as the outcomes name."""
    highest = [part.outcomes["worker"].max() for part in trace.parts()]
    return max(trace.manifest.num_workers or 0, *(0 if pd.isna(worker) else int(worker) + 1 for worker in highest))


def _busy_s(
    outcomes: pd.DataFrame, spans: pd.DataFrame | None, kinds: Sequence[str], start: float, end: float
) -> dict[str, float] | None:
    """Busy seconds of each worker lane from the start to the end of a rollout; None where unknown."""
    if spans is not None and (on_worker := spans["lane"].str.startswith("worker ")).any():
        work = spans[on_worker & spans["kind"].isin(kinds)]
        starts = work["t_start"].clip(start, end)
        ends = (work["t_start"] + work["duration"]).clip(start, end)
        return {
            str(lane): union_s(starts.loc[rows].to_numpy(), ends.loc[rows].to_numpy())
            for lane, rows in work.groupby("lane").groups.items()
        }
    last = last_finish_s(outcomes).clip(start, end) - start
    return None if last.empty else {str(lane): float(busy) for lane, busy in last.items()}


def last_finish_s(outcomes: pd.DataFrame) -> pd.Series:
    """When the last response of each worker lane finished, in the order of workers."""
    finished = outcomes[outcomes["worker"].notna() & outcomes["t_finish"].notna()]
    return finished.groupby(finished["worker"].astype(int))["t_finish"].max().rename("worker {}".format)


def union_s(starts: Floats, ends: Floats) -> float:
    """Length of the union of intervals."""
    order = np.argsort(starts)
    starts, ends = starts[order], ends[order]
    covered = np.maximum.accumulate(np.concatenate([[-np.inf], ends]))[:-1]
    return float(np.maximum(0.0, ends - np.maximum(starts, covered)).sum())


def _ratio(numerator: float, denominator: float) -> float | None:
    return float(numerator / denominator) if denominator > 0 else None


def describe(trace: Trace) -> Json:
    """The keys of `tltlab trace describe --json`: manifest, rows of each table, one dict per RL step, prompt share."""
    return {
        "manifest": trace.manifest.model_dump(),
        "tables": {name: trace.num_rows(name) for name in trace.names},
        "rl_steps": per_step(trace),
        "prompt_share": prompt_share(trace),
    }


def count(trace: Trace) -> Json:
    """RL steps, responses and tokens of a trace, and the names of its tables."""
    return {
        "num_rl_steps": len(trace.rl_steps),
        "num_responses": trace.num_rows("outcomes"),
        "num_tokens": num_tokens(trace),
        "tables": list(trace.names),
    }
