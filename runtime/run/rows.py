"""A run's rows in its trace: one RL step as rows of the tables, and the figures of its progress."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from tltlab.arrays import Array
from tltlab.drafters.base import Key
from tltlab.drafters.specs import Drafters, DrafterSpec
from tltlab.errors import TraceError
from tltlab.files import found_in
from tltlab.records import frozen
from tltlab.runtime.engine.environment import hardware, versions
from tltlab.runtime.engine.generation import GenerationRequest, GenerationResponse, Rollout
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.recipe.sections import EvalConfig
from tltlab.strategy import Strategy
from tltlab.traces.metrics import bubble_fraction, mean_accept_length, tail_fraction, tokens_per_s
from tltlab.traces.schema import (
    GRAPH_KINDS,
    TABLES,
    Manifest,
    Row,
    Rows,
    by_column,
    columns,
    idle_spans,
    key_columns,
    span,
    span_detail,
)
from tltlab.traces.trace import Trace

_OFF_POLICY = {
    "staleness": "staleness/mean", "off_policy_share": "staleness/off_policy_share",
    "dropped_groups": "trained/dropped_groups", "length_bias": "trained/length_bias",
}  # fmt: skip

Shares = Sequence[Sequence[GenerationRequest]]
"""Requests by worker."""

_WAIT_S = 1e-3
"""Seconds between two iterations in which an engine has waited for requests."""

_KINDS = ("prefill", "speculative_decode", "decode")


@frozen
class StepReport:
    """Results of one RL step; seconds per stage and means over its responses.

    `recorder_s` is the engines' recording time, `record_s` the driver's for the trace, `step_s` the total. `measures`
    are for loggers, by name (`step_metrics`); `notes` are other events.
    """

    rl_step: int
    policy: str
    reward_mean: float
    num_tokens: int
    rollout_s: float
    reward_s: float = 0.0
    inference_s: float = 0.0
    train_s: float = 0.0
    sync_s: float = 0.0
    recorder_s: float = 0.0
    metrics: dict[str, float]
    record_s: float = 0.0
    step_s: float = 0.0
    measures: Mapping[str, float] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def stages(self) -> dict[str, float]:
        """Seconds by stage, in order."""
        return {name: getattr(self, f"{name}_s") for name in ("rollout", "reward", "inference", "train", "sync")}

    @property
    def seconds(self) -> float:
        """The step's own time, or the sum of its stages where that is unknown."""
        return self.step_s or sum(self.stages.values())

    def __str__(self) -> str:
        return (
            f"step {self.rl_step}: reward {self.reward_mean:.3f}, {self.num_tokens} tokens in {self.seconds:.2f} s, "
            f"policy {self.policy}"
        )


def step_rows(
    report: StepReport,
    shares: Shares,
    parts: Sequence[Rollout],
    *,
    rewards: Mapping[Key, float],
    epochs: Mapping[Key, int],
    policy_version: int,
    t_start: float,
    drafter: Mapping[str, Sequence[Row]],
    stages_s: float | None = None,
) -> dict[str, Rows]:
    """Return the step's rows by table, those of tokens and iterations by column.

    `parts[w].responses[i]` answers `shares[w][i]` on worker w. `rewards` are by the key of a request, none where it was
    cut, `epochs` by that of its first turn. `policy_version` is the version of responses without their own; `t_start`
    is in seconds since the start of the run. `drafter` are the rows of its training, of `steps` only some columns. The
    stages after the rollout began `stages_s` seconds after its start, by default at its end.
    """
    requests = [request for share in shares for request in share]
    placed = [(worker, response) for worker, part in enumerate(parts) for response in part.responses]
    workload: list[Row] = []
    outcomes: list[Row] = []
    for request, (worker, response) in zip(requests, placed, strict=True):
        key = key_columns(request.key)
        workload.append(
            columns(
                "workload",
                **key,
                epoch=epochs[*request.key[:3], 0],
                prompt_tokens=len(request.prompt_token_ids),
                max_response_tokens=request.max_response_tokens,
                policy_version=response.versions[0][0] if response.versions else policy_version,
            )
        )
        outcomes.append(
            columns(
                "outcomes",
                **key,
                response_tokens=len(response.token_ids),
                finish_reason=response.finish_reason,
                reward=rewards.get(request.key),
                worker=worker,
                t_submit=response.t_submit,
                t_first_token=response.t_first_token,
                t_finish=response.t_finish,
                tool_s=response.tool_s,
            )
        )
    step = columns(
        "steps",
        rl_step=report.rl_step,
        t_start=t_start,
        **{f"{name}_s": seconds for name, seconds in report.stages.items()},
        policy=report.policy,
        policy_version=policy_version,
        reward_mean=report.reward_mean,
        drift_kl=report.metrics["drift_kl"],
        **{column: report.metrics.get(name) for column, name in _OFF_POLICY.items()},
    )
    rows: dict[str, Rows] = {
        "workload": workload,
        "outcomes": outcomes,
        "tokens": _token_rows(requests, [response for _, response in placed], policy_version),
        "iterations": pa.concat_tables(by_column("iterations", part.iterations) for part in parts),
        "decisions": pa.concat_tables(by_column("decisions", part.decisions) for part in parts),
        "plans": [{"plan": number, **row} for number, row in enumerate(chain.from_iterable(p.plans for p in parts))],
        "steps": [step | columns for columns in drafter.get("steps", ())] or [step],
        "spans": list(_spans(report, parts, drafter.get("spot_training", ()), stages_s)),
    }
    return rows | {table: list(new) for table, new in drafter.items() if table != "steps"}


def rollout_alone(
    rl_step: int,
    policy: str,
    shares: Shares,
    parts: Sequence[Rollout],
    *,
    epochs: Mapping[Key, int],
    t_start: float,
) -> dict[str, Rows]:
    """Return the rows of an RL step that is only a rollout, as `step_rows`: no reward, and no later stage."""
    report = StepReport(
        rl_step=rl_step, policy=policy, reward_mean=math.nan, metrics={"drift_kl": math.nan},
        num_tokens=sum(len(response.token_ids) for part in parts for response in part.responses),
        rollout_s=max(part.duration_s for part in parts), recorder_s=max(part.recorder_s for part in parts),
    )  # fmt: skip
    rows = step_rows(report, shares, parts, rewards={}, epochs=epochs, policy_version=0, t_start=t_start, drafter={})
    unknown = {"reward_mean", "reward_s", "inference_s", "train_s", "sync_s", "drift_kl"}
    steps = [{**row, **dict.fromkeys(row.keys() & unknown)} for row in rows["steps"]]
    return {**rows, "steps": steps, "spans": [row for row in rows["spans"] if row["lane"] != "trainer"]}


def repeat_row(
    rl_step: int, parts: Sequence[Rollout], again: Sequence[Rollout], *, rollout_s: float, repeat_s: float
) -> Row:
    """Return the row in `repeats.json` of a repeated rollout: its seconds, and True if its tokens were the same."""
    tokens = [[r.token_ids for part in rollout for r in part.responses] for rollout in (parts, again)]
    return {"rl_step": rl_step, "rollout_s": rollout_s, "repeat_s": repeat_s, "same_tokens": tokens[0] == tokens[1]}


def _token_rows(
    requests: Sequence[GenerationRequest], responses: Sequence[GenerationResponse], policy_version: int
) -> pa.Table:
    """Return the rows of `tokens`, without an object per token."""
    schema = TABLES["tokens"]
    keys = zip(*(request.key for request in requests), strict=True) if requests else [()] * 4
    drawn_by = [r.versions or [(policy_version, len(r.token_ids))] for r in responses]
    lists: tuple[Sequence[Any], ...] = (
        [request.prompt_token_ids for request in requests],
        [response.token_ids for response in responses],
        [response.logprobs for response in responses],
        [np.repeat(*np.array(spans, np.int32).T) for spans in drawn_by],
    )
    columns = [pa.array(part, kind) for part, kind in zip(keys, schema.types, strict=False)]
    for parts, kind in zip(lists, schema.types[len(columns) :], strict=True):
        columns.append(pa.array([np.asarray(part, kind.value_type.to_pandas_dtype()) for part in parts], kind))
    return pa.table(columns, names=schema.names)


def _spans(
    report: StepReport, parts: Sequence[Rollout], training: Sequence[Row], stages_s: float | None
) -> Iterator[Row]:
    """Yield the step's lanes: each worker's iterations, idle end and training, and the stages after the rollout."""
    for worker, part in enumerate(parts):
        at = report.rl_step, f"worker {worker}"
        ran = pa.concat_tables([by_column("iterations", part.iterations), *part.lent]).sort_by("t_start")
        names = ("t_start", "duration", "batch", "prefill_tokens", "num_drafted")
        starts, durations, batches, prefilled, drafted = (ran[name].fill_null(0).to_numpy() for name in names)
        rows, busy, free = [], [], 0.0
        if len(starts):
            ends = starts + durations
            free = float(ends[-1])
            kinds = np.where(prefilled > 0, 0, np.where(drafted > 0, 1, 2))
            details = _details(ran)
            details[kinds != 1] = None
            # Where requests move an engine may be without any.
            waits = (starts[1:] - ends[:-1] > _WAIT_S) & (part.asked is not None)
            changes = (
                np.diff(kinds).astype(bool) | np.diff(batches).astype(bool) | (details[1:] != details[:-1]) | waits
            )
            first = [0, *(np.flatnonzero(changes) + 1).tolist()]
            untils = [ends[i - 1] if waits[i - 1] else starts[i] for i in first[1:]]
            for i, start, until in zip(first, starts[first].tolist(), [*map(float, untils), free], strict=True):
                rows.append(span(*at, _KINDS[kinds[i]], start, until - start, int(batches[i]), details[i]))
                busy.append((start, until))
        for move in part.moves:
            rows.append(span(*at, "move", *move))
            busy.append((move[0], move[0] + move[1]))
        for row in sorted((row for row in training if row["worker"] == worker), key=lambda row: row["t_start"]):
            start, free = max(row["t_start"], free), max(row["t_start"] + row["duration"], free)
            rows.append(span(*at, "spot_train", start, free - start, 0, f"term {row['term']}"))
            busy.append((start, start + (free - start)))
        rows += idle_spans(report.rl_step, worker, 0.0, report.rollout_s, sorted(busy))
        yield from sorted(rows, key=lambda row: row["t_start"])
    start, (_, *stages) = report.rollout_s if stages_s is None else stages_s, report.stages.items()
    for stage, seconds in stages:
        yield span(report.rl_step, "trainer", {"sync": "weight_sync"}.get(stage, stage), start, seconds)
        start += seconds


def _details(ran: pa.Table) -> Array:
    """Return the `detail` of spans by the strategy that each iteration verified, None where unknown."""
    each = list(zip(*(ran[name].to_pylist() for name in Strategy.__slots__), strict=True))
    details = {verified: span_detail(Strategy(*verified)) if all(verified) else None for verified in set(each)}
    return np.array([details[verified] for verified in each], object)


def run_manifest(recipe: Recipe, name: str, drafters: Mapping[str, DrafterSpec], notes: str | None = None) -> Manifest:
    """Return the manifest of a run by `recipe` with these drafters that begins now, recorded as `name`."""
    rollout = recipe.rollout
    with found_in(recipe.code):
        own = Drafters(drafters).own
    return Manifest(
        kind="recorded",
        name=name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        model=Path(recipe.model).name,
        hardware=hardware(),
        engine=f"vllm {versions()['vllm']}",
        num_workers=rollout.num_workers,
        max_response_tokens=rollout.max_response_tokens,
        group_size=rollout.group_size,
        license="Apache-2.0",
        source="tltlab",
        seed=recipe.seed,
        notes=notes,
        drafters=own,
    )


LENGTH_PERCENTILES = (50, 90, 99)
_TABLES = ("workload", "outcomes", "iterations", "steps", "spans")
_FIGURES = (tokens_per_s, bubble_fraction, tail_fraction, mean_accept_length)


def step_metrics(report: StepReport, rows: Mapping[str, Rows]) -> dict[str, float]:
    """Return the figures of an RL step by name, all finite; unknown ones are left out.

    `reward/*`: mean, standard deviation, the mean of each term where there are several (`reward/terms/NAME`), and
    `reward/mixed_groups`: of the groups trained on and of those that dynamic sampling dropped, the share that can train
    (`tltlab.runtime.trainer.samples.useful_groups`).
    `time/*_s`: seconds per stage, `step_s` the step's, or their sum where unknown. `rollout/*`: `tltlab.traces.metrics`
    of this step. `length/*`: tokens of the responses that ended, percentiles linear between ranks; `truncated_fraction`
    ended at a cap. `graphs/*`: shares of the engines' iterations by kind of CUDA graph. `mismatch/*` and `train/*`:
    measures of the trainer. `staleness/*`, `trained/*`, `generated/*`: where rollouts span updates, the age of training
    tokens, and the lengths trained on and generated so far. `drafter/*`: the drafter in service, its age in RL steps
    and its updates. `recorder/share`: time for the trace, in engines and driver, over that of the step.
    """
    figures: dict[str, float | None] = {f"time/{name}_s": seconds for name, seconds in report.stages.items()}
    figures["time/step_s"] = report.seconds
    figures["recorder/share"] = (report.recorder_s + report.record_s) / report.seconds if report.seconds else None
    figures |= _rewards(report, rows["outcomes"]) | _rollout(report.rollout_s, rows) | _lengths(rows["outcomes"])
    figures |= _graphs(by_column("iterations", rows["iterations"])["graph"])
    for name, value in report.metrics.items():
        kind, _, measure = name.partition("_")
        figures[f"mismatch/{measure}" if kind == "mismatch" else name if "/" in name else f"train/{name}"] = value
    for step in rows.get("steps", []):
        figures |= {f"drafter/{name}": step.get(f"drafter_{name}") for name in ("age", "updates")}
    return {name: float(value) for name, value in figures.items() if value is not None and math.isfinite(value)}


def heldout_figures(name: str, rewards: Sequence[float], config: EvalConfig) -> dict[str, float]:
    """Return the measures of an evaluation's rewards on the held-out set `name`, empty for the only one.

    `rewards` are those of `config.samples` responses to each prompt, prompt by prompt.
    """
    place, n = f"reward/heldout/{name}".rstrip("/"), config.samples
    figures = {place: sum(rewards) / len(rewards) if rewards else math.nan}
    passed = [sum(reward > config.pass_above for reward in rewards[i : i + n]) for i in range(0, len(rewards), n)]
    for k in config.pass_at:
        solved = [1 - math.comb(n - c, k) / math.comb(n, k) for c in passed]
        figures[f"{place}/pass@{k}"] = fmean(solved) if solved else math.nan
    return figures


def _graphs(kinds: pa.ChunkedArray) -> dict[str, float | None]:
    recorded = kinds.drop_null()
    counts = {each["values"]: each["counts"] for each in recorded.value_counts().to_pylist()}
    return {f"graphs/{kind}": counts.get(kind, 0) / len(recorded) for kind in GRAPH_KINDS} if counts else {}


def _rewards(report: StepReport, outcomes: Rows) -> dict[str, float | None]:
    rewards = [row["reward"] for row in outcomes if row.get("reward") is not None]
    return {"reward/mean": report.reward_mean, "reward/std": float(np.std(rewards)) if rewards else None}


def _rollout(rollout_s: float, rows: Mapping[str, Rows]) -> dict[str, float | None]:
    """Return tokens per second, bubble, tail and accept length, as `tltlab.traces.metrics` defines them."""
    # All responses were reused from an earlier epoch (`prefix_reuse`): no engine generated anything.
    if not rows["outcomes"] or not rollout_s:
        return {}
    tables = {
        name: table_rows if isinstance(table_rows, pa.Table) else pd.DataFrame(table_rows)
        for name in _TABLES
        if len(table_rows := rows[name])
    }
    # Every worker has a lane, also one without work: its idle time is part of the bubble.
    num_workers = len({row["lane"] for row in rows["spans"] if row["lane"].startswith("worker ")})
    try:
        trace = Trace.from_tables(Manifest(kind="recorded", num_workers=num_workers), tables)
    except TraceError:
        # Readers of the recording report the fault; it must not end the run.
        return {}
    return {f"rollout/{figure.__name__}": figure(trace) for figure in _FIGURES}


def _lengths(outcomes: Rows) -> dict[str, float | None]:
    ended = [row for row in outcomes if row["finish_reason"] != "abort"]
    if not ended:
        return {}
    lengths = np.array([row["response_tokens"] for row in ended])
    return {
        **{f"length/p{rank}": float(np.percentile(lengths, rank)) for rank in LENGTH_PERCENTILES},
        "length/max": float(lengths.max()),
        "length/mean": float(lengths.mean()),
        "length/truncated_fraction": sum(row["finish_reason"] == "length" for row in ended) / len(ended),
    }
