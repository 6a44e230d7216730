"""The requests of one RL step, as columns: a request is an index, in workload order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from tltlab.acceptance.load import Key
from tltlab.arrays import Ints
from tltlab.errors import ConfigError
from tltlab.traces.schema import KEY
from tltlab.traces.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Requests:
    """One RL step's workload with what became of it. `recorded_worker` is None where the trace does not know it."""

    rl_step: int
    policy_version: int
    keys: list[Key]
    prompt_tokens: list[int]
    max_response_tokens: list[int]
    response_tokens: list[int]
    recorded_worker: list[int | None]
    rows: pd.DataFrame

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def prompts(self) -> Ints:
        """`prompt_tokens` as an array."""
        return np.array(self.prompt_tokens, np.int64)

    @cached_property
    def lengths(self) -> Ints:
        """`response_tokens` as an array."""
        return np.array(self.response_tokens, np.int64)


def requests_by_step(
    trace: Trace, rl_steps: Sequence[int] | None = None, max_response_tokens: int | None = None
) -> list[Requests]:
    """Workload joined with outcomes, per RL step in ascending order; ConfigError for steps that are not there.

    `max_response_tokens` cuts longer responses, as a run with that cap would have.
    """
    if max_response_tokens is not None and max_response_tokens < 1:
        raise ConfigError(f"max_response_tokens must be at least 1, got {max_response_tokens}")
    recorded = trace.rl_steps
    chosen = recorded if rl_steps is None else sorted(set(rl_steps))
    if missing := [s for s in chosen if s not in recorded]:
        span = f"{recorded[0]}..{recorded[-1]}" if recorded else "none"
        raise ConfigError(f"the trace has no rl_step {missing[0]}; its RL steps are {span}")
    if not chosen:
        raise ConfigError("no RL step to simulate: the selection is empty")
    joined = trace.workload.merge(trace.outcomes, on=list(KEY), how="inner", sort=False)
    if (joined["turn"] > 0).any():
        raise ConfigError("the trace has multi-turn responses (turn > 0), which the simulator cannot replay yet")
    if max_response_tokens is not None:
        joined = cut(joined, max_response_tokens)
    return [_step(int(step), joined[joined["rl_step"] == step]) for step in chosen]


def cut(rows: pd.DataFrame, max_response_tokens: int) -> pd.DataFrame:
    """Responses under a lower cap: longer ones end there, with finish reason "length"."""
    longer = rows["response_tokens"] > max_response_tokens
    return rows.assign(
        response_tokens=rows["response_tokens"].clip(upper=max_response_tokens),
        max_response_tokens=rows["max_response_tokens"].clip(upper=max_response_tokens),
        finish_reason=rows["finish_reason"].astype(object).where(~longer, "length"),
    )


def _step(rl_step: int, rows: pd.DataFrame) -> Requests:
    if rows.empty:
        raise ConfigError(f"rl_step {rl_step} has no outcomes to replay")
    worker = rows["worker"] if "worker" in rows else pd.Series([None] * len(rows))
    columns = [rows[c].tolist() for c in KEY]
    return Requests(
        rl_step=rl_step,
        policy_version=int(rows["policy_version"].iloc[0]),
        keys=[(int(a), str(b), int(c), int(d)) for a, b, c, d in zip(*columns, strict=True)],
        prompt_tokens=[int(n) for n in rows["prompt_tokens"].tolist()],
        max_response_tokens=[int(n) for n in rows["max_response_tokens"].tolist()],
        response_tokens=[int(n) for n in rows["response_tokens"].tolist()],
        recorded_worker=[None if pd.isna(w) else int(w) for w in worker.tolist()],
        rows=rows.reset_index(drop=True),
    )
