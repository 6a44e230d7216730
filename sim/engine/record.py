"""A simulated rollout, and the tables that a recorder would have written of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from tltlab.arrays import Array, Floats, Ints
from tltlab.sim.idle_training import SpotResult
from tltlab.traces.schema import KEY, TABLES, Row, columns, idle_spans, span, span_detail, strategy_columns

from .log import Columns, WorkerLog
from .memoryless import Drained
from .requests import Requests


@dataclass(slots=True, kw_only=True)
class Beside:
    """A lane whose GPU is part of the engine that logs in another lane, its `leader`, between these seconds."""

    lane: int
    leader: int
    start_s: float
    until_s: float = math.inf


@dataclass(slots=True)
class SimulatedRollout:
    """Result of one simulated RL step: times per request (nan: never ran), the workers' logs and the end.

    `old_tokens` of its responses were generated under the weights of earlier steps; `wasted_tokens` were generated for
    nothing. Where RL steps are not apart, `ages` are the updates since each response was begun; until now `num_begun`
    were, which come to `begun_tokens` when they have ended, and `num_dropped` of them were too old to train on. Where
    responses have turns, `submit_s` is when each came to the engine (None: all at 0), and calls waited `tool_wait_s`
    for a tool that was free. `gathered` has the shape of the engines that requests went to, by when.
    """

    requests: Requests
    worker_of: Ints
    first_token_s: Floats
    finish_s: Floats
    logs: list[WorkerLog]
    worker_end_s: list[float]
    makespan_s: float = 0.0
    spot: SpotResult | None = None
    old_tokens: float = 0.0
    wasted_tokens: float = 0.0
    ages: Ints | None = None
    num_begun: int = 0
    begun_tokens: int = 0
    num_dropped: int = 0
    submit_s: Floats | None = None
    tool_wait_s: float = 0.0
    drained: Drained | None = None
    beside: list[Beside] = field(default_factory=list)
    gathered: dict[float, str] = field(default_factory=dict)

    @classmethod
    def begun(cls, requests: Requests, queues: list[list[int]]) -> SimulatedRollout:
        """A rollout of which nothing has run; `queues` are the requests of each worker."""
        worker_of, _ = requests.placed(queues)
        return cls(
            requests=requests,
            worker_of=worker_of.copy(),
            first_token_s=np.full(len(requests), np.nan),
            finish_s=np.zeros(len(requests)),
            logs=[WorkerLog() for _ in queues],
            worker_end_s=[0.0] * len(queues),
        )

    def columns(self) -> tuple[Columns, Ints]:
        """All macro-steps, one worker after another, and the worker of each; `drained` is all of a rollout at once."""
        if self.drained is not None:
            num_steps = np.count_nonzero(self.drained.counts, axis=1)
            return self.drained.columns(range(len(self.logs))), np.repeat(np.arange(len(self.logs)), num_steps)
        parts = [log.columns for log in self.logs]
        return Columns.joined(parts), np.repeat(np.arange(len(parts)), list(map(len, parts)))

    def on_lanes(self) -> tuple[Columns, Ints]:
        """All macro-steps in each lane whose GPU took part in them, in order of lanes and time, and these lanes."""
        c, worker = self.columns()
        if not self.beside:
            return c, worker
        rows, lanes = [np.arange(len(c))], [worker]
        for beside in self.beside:
            led = (worker == beside.leader) & (c.start_s >= beside.start_s) & (c.start_s < beside.until_s)
            rows.append(np.flatnonzero(led))
            lanes.append(np.full(np.count_nonzero(led), beside.lane))
        at, lane = np.concatenate(rows), np.concatenate(lanes)
        order = np.lexsort((c.start_s[at], lane))
        return c.take(at[order]), lane[order]

    def settled(self) -> SimulatedRollout:
        """Itself, with its macro-steps as arrays: a fifth of the memory, where rollouts are kept."""
        if self.drained is None:
            for log in self.logs:
                len(log.columns)
        return self

    @property
    def busy_s(self) -> float:
        """Worker-seconds of switching, prefill and decoding; the rest up to workers * makespan is idle."""
        c, worker = self.on_lanes()
        ends = np.searchsorted(worker, np.arange(1, len(self.logs)))
        return math.fsum(float(part.sum()) for part in np.split(c.switch_s + c.prefill_s + c.seconds, ends))

    def note_drained(self, drained: Drained, workers: Sequence[int]) -> None:
        """Record what was run in closed form, its rows being these workers'."""
        present = drained.residents.present
        requests = drained.residents.requests[present]
        self.finish_s[requests] = drained.finish_s[:, 1:][present]
        self.note_first_tokens(requests, np.broadcast_to(drained.first_s[:, None], present.shape)[present])
        for row, worker in enumerate(workers):
            if present[row, -1]:
                self.logs[worker].extend(partial(drained.columns, [row]))

    def note_first_tokens(self, requests: Sequence[int] | Ints, now: float | Floats) -> None:
        """Record the first tokens of requests; a time from before a preemption stays."""
        at = np.asarray(requests, np.int64)
        before_s = self.first_token_s[at]
        self.first_token_s[at] = np.where(np.isnan(before_s), now, before_s)


def tables(rollouts: Sequence[SimulatedRollout], policy: str, *, iterations: bool) -> dict[str, pd.DataFrame]:
    """Workload, outcomes, steps and spans; with `iterations` also iterations and decisions, row by row."""
    rows = [r.requests.rows for r in rollouts]
    built = {
        "workload": pd.concat([each[TABLES["workload"].names] for each in rows], ignore_index=True),
        "outcomes": pd.concat(map(_outcomes, rollouts, rows), ignore_index=True),
        "steps": _steps(rollouts, policy, rows),
        "spans": _one_table("spans", map(_spans, rollouts)),
    }
    if iterations:
        built["iterations"] = _one_table("iterations", map(_iterations, _workers(rollouts)))
        built["decisions"] = _one_table("decisions", map(_decisions, _workers(rollouts)))
    return built


class _Worker(NamedTuple):
    """A worker in a rollout, and its macro-steps."""

    rollout: SimulatedRollout
    worker: int
    columns: Columns


def _workers(rollouts: Sequence[SimulatedRollout]) -> Iterator[_Worker]:
    """Yield those that did anything."""
    for rollout in rollouts:
        for worker, log in enumerate(rollout.logs):
            if len(log.columns):
                yield _Worker(rollout, worker, log.columns)


def _one_table(name: str, parts: Iterable[Row]) -> pd.DataFrame:
    """One frame of the tables by column, each of which is an array, a list, or a value of all rows."""
    joined: dict[str, list[Any]] = {column: [] for column in TABLES[name].names}
    for part in parts:
        num_rows = max(len(value) for value in part.values() if isinstance(value, list | np.ndarray))
        for column, value in part.items():
            joined[column].append(value if isinstance(value, list | np.ndarray) else np.full(num_rows, value))
    filled = {column: values for column, values in joined.items() if values}
    if not filled:
        return pd.DataFrame(columns=TABLES[name].names)
    arrays = {c: list(chain(*v)) if isinstance(v[0], list) else np.concatenate(v) for c, v in filled.items()}
    return pd.DataFrame(arrays)


def _outcomes(rollout: SimulatedRollout, rows: pd.DataFrame) -> pd.DataFrame:
    extra = [c for c in ("reward", "tool_s") if c in rows]
    out = rows[[*KEY, "response_tokens", "finish_reason", *extra]].copy()
    out["worker"] = rollout.worker_of
    out["t_submit"] = 0.0 if rollout.submit_s is None else rollout.submit_s
    out["t_first_token"] = rollout.first_token_s
    out["t_finish"] = rollout.finish_s
    return out


def _steps(rollouts: Sequence[SimulatedRollout], policy: str, requests: Sequence[pd.DataFrame]) -> pd.DataFrame:
    lengths = np.array([r.makespan_s for r in rollouts])
    rewards = [rows.get("reward") for rows in requests]
    table = columns(
        "steps",
        rl_step=[r.requests.rl_step for r in rollouts],
        t_start=np.cumsum(lengths) - lengths,
        rollout_s=lengths,
        policy=policy,
        policy_version=[r.requests.policy_version for r in rollouts],
        reward_mean=np.array([np.nan if each is None else each.mean() for each in rewards]),
    )
    steps = pd.DataFrame(table)
    trained = np.empty(0, np.int64)
    for n, rollout in enumerate(rollouts):
        if rollout.ages is None:
            continue
        tokens = rollout.requests.whole().lengths
        total, trained = max(1, int(tokens.sum())), np.concatenate([trained, tokens])
        mean_length = rollout.begun_tokens / max(1, rollout.num_begun)
        bias = float(trained.mean()) / mean_length if mean_length and len(trained) else np.nan
        stale = float(rollout.ages @ tokens) / total, rollout.old_tokens / total, bias
        steps.loc[n, ["staleness", "off_policy_share", "length_bias"]] = stale
    return steps


def _spans(rollout: SimulatedRollout) -> Row:
    """Spans of each worker in order of time, then what its idle time was for."""
    c, worker = rollout.on_lanes()
    rl_step, lanes = rollout.requests.rl_step, np.array([f"worker {w}" for w in range(len(rollout.logs))], object)
    kinds = np.where(c.speculates, "speculative_decode", "decode").astype(object)
    details = np.array([span_detail(regime.strategy) for regime in c.regime], object)
    waits, shapes = _waits(c, worker), _gathered(rollout, c)
    # Spans of one worker and start come in this order.
    every: list[tuple[Any, ...]] = [
        (kinds, c.decode_start_s, c.seconds, c.batch, details),
        (np.where(shapes.astype(bool), "move", "switch"), c.start_s, c.switch_s, c.batch, shapes),
        ("prefill", c.start_s + c.switch_s, c.prefill_s, c.batch, None),
        ("idle", c.start_s - waits, waits, 0, None),
    ]
    parts = []
    for n, row in enumerate(every):
        kept = np.flatnonzero(row[2] > 0) if n else np.arange(len(c))
        parts.append([np.broadcast_to(column, len(c))[kept] for column in (worker, *row)])
    at, kind, start_s, duration_s, batch, detail = map(np.concatenate, zip(*parts, strict=True))
    order = np.lexsort((start_s, at))
    rows = [row for w in range(len(rollout.logs)) for row in _idle(rollout, w)]
    if rollout.spot is not None:
        rows += [span(rl_step, s.lane, s.kind, s.start_s, s.end_s - s.start_s, 0, s.detail) for s in rollout.spot.spans]
    spans = span(rl_step, lanes[at], kind, start_s, duration_s, batch, detail)
    for name, values in spans.items():
        if name != "rl_step":
            spans[name] = np.append(values[order], np.array([row[name] for row in rows], values.dtype))
    return spans


def _waits(columns: Columns, worker: Ints) -> Floats:
    """Seconds before each macro-step in which its worker had no request: all were away, or with other workers."""
    waits, ends = np.zeros(len(columns)), columns.decode_start_s + columns.seconds
    waits[1:] = np.where(worker[1:] == worker[:-1], columns.start_s[1:] - ends[:-1], 0.0)
    return np.where(waits > _ROUNDING_S, waits, 0.0)


def _gathered(rollout: SimulatedRollout, columns: Columns) -> Array:
    """The shape of the engine of each macro-step that is the first one after a gather, None of others."""
    return np.array([rollout.gathered.get(start_s) for start_s in columns.start_s.tolist()], object)


_ROUNDING_S = 1e-9


def _idle(rollout: SimulatedRollout, worker: int) -> Iterator[Row]:
    """The times after a worker's last request in which it does not even train the drafter."""
    spans = rollout.spot.spans if rollout.spot else ()
    busy = [(span.start_s, span.end_s) for span in spans if span.lane == f"worker {worker}"]
    return idle_spans(rollout.requests.rl_step, worker, rollout.worker_end_s[worker], rollout.makespan_s, busy)


def _iterations(of: _Worker) -> Row:
    """One row per iteration, in the recorder's attribution: what an iteration drafts, the next one verifies.

    So row i lasts from the start of its verification to the start of the next one and includes the drafting for i + 1.
    The first row of a macro-step includes its switch, but that of a gather, and its prefill before the first iteration;
    the very first row also includes its own drafting. Chunks of prompts are spread over the iterations in which they
    were prefilled.
    """
    rollout, worker, c = of
    counts = c.num_iterations
    at = np.repeat(np.arange(len(c)), counts)
    first = (np.cumsum(counts) - counts)[at] == np.arange(counts.sum())
    sizes = list(zip(c.regime, c.batch.tolist(), strict=True))
    batch = c.batch[at]
    gained = [_tokens(c, i) for i in range(len(c))]
    tokens = np.concatenate(gained)
    context = np.concatenate([start + np.cumsum(t) - t for start, t in zip(c.context_tokens, gained, strict=True)])
    drafting = np.array([regime.cost.draft_s(b) for regime, b in sizes])
    draft_s = drafting[at]
    fixed_s, slope_s = np.array([regime.terms(b) for regime, b in sizes]).T
    verify_s = (fixed_s - drafting)[at] + slope_s[at] * context
    if any(noise is not None for noise in c.noise):
        noise = _noise(c, verify_s + draft_s)
        draft_s, verify_s = draft_s * noise, verify_s * noise
    next_draft_s = np.append(draft_s[1:], 0.0)
    moves_s = np.where(_gathered(rollout, c).astype(bool), c.switch_s, 0.0)
    up_front = 1.0 - _share(c.chunk_tokens, c.prefill_tokens)
    duration = np.where(first, (c.switch_s - moves_s + c.prefill_s * up_front)[at], 0.0) + verify_s + next_draft_s
    duration += (c.prefill_s * (1.0 - up_front) / counts)[at]
    prefilled = np.where(first, (c.prefill_tokens - c.chunk_tokens)[at], 0.0) + (c.chunk_tokens / counts)[at]
    duration[0] += draft_s[0]
    start = np.cumsum(duration) - duration + np.cumsum(_waits(c, np.zeros(len(c), np.int64)) + moves_s)[at]
    strategies = strategy_columns([regime.strategy for regime in c.regime], at)
    depth = strategies["draft_depth"]
    drafted = _whole(np.array([b * regime.num_drafted for regime, b in sizes])[at])
    accepted = _whole(tokens - batch)
    # Accepted tokens are exact, drafted tokens an average only.
    drafted = np.maximum.reduce([drafted, accepted, (depth > 0).astype(np.int64)])
    return columns(
        "iterations",
        rl_step=rollout.requests.rl_step,
        worker=worker,
        iteration=np.arange(len(at)),
        t_start=start,
        duration=duration,
        draft_duration=next_draft_s,
        batch=batch,
        num_waiting=c.waiting[at],
        context_tokens=np.rint(context).astype(np.int64),
        prefill_tokens=_whole(prefilled),
        **strategies,
        num_drafted=drafted,
        num_accepted=accepted,
        num_generated=batch + accepted,
        accepted_per_request=[row for i in range(len(c)) for row in _accepted_rows(c, i)],
        next_draft_depth=np.append(depth[1:], 0),
    )


def _noise(columns: Columns, modelled_s: Floats) -> Floats:
    """The factor of each iteration, such that a macro-step's iterations add up to its seconds."""
    counts = columns.num_iterations
    parts = [np.ones(n) if noise is None else noise for noise, n in zip(columns.noise, counts.tolist(), strict=True)]
    drawn = np.concatenate(parts)
    summed = np.add.reduceat(drawn * modelled_s, np.cumsum(counts) - counts)
    return drawn * np.repeat(_share(columns.seconds, summed), counts)


def _share(part: Floats, whole: Floats) -> Floats:
    return np.divide(part, whole, out=np.zeros_like(whole), where=whole > 0)


def _tokens(columns: Columns, i: int) -> Floats:
    """Tokens that came out of each iteration of a macro-step."""
    gains, n = columns.gains[i], int(columns.num_iterations[i])
    if gains is None:
        return np.full(n, columns.tokens[i] / n)
    return np.broadcast_to(np.asarray(gains.sum(axis=0), np.float64), n)


def _accepted_rows(columns: Columns, i: int) -> list[list[int] | None]:
    gains = columns.gains[i]
    if gains is None or not np.issubdtype(gains.dtype, np.integer):
        return [None] * int(columns.num_iterations[i])
    rows: list[list[int] | None] = (gains.T - 1).tolist()
    return rows


def _whole(expected: Floats) -> Ints:
    """Whole numbers whose running sum stays within a half of the expected one."""
    return np.diff(np.rint(np.cumsum(expected)).astype(np.int64), prepend=0)


def _decisions(of: _Worker) -> Row:
    rollout, worker, c = of
    rows = np.flatnonzero(c.is_decision)
    return columns(
        "decisions",
        rl_step=rollout.requests.rl_step,
        worker=worker,
        iteration=(np.cumsum(c.num_iterations) - c.num_iterations)[rows],
        **strategy_columns([c.regime[i].strategy for i in rows]),
        bucket=[c.bucket[i] for i in rows],
        propensity=c.propensity[rows],
        reward=[c.reward[i] for i in rows],
    )
