"""The requests of one RL step, as columns: a request is an index, in workload order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd

from tltlab.acceptance.load import Key
from tltlab.arrays import Ints
from tltlab.errors import ConfigError
from tltlab.planning.composition import EarlierEpoch, Regrouped, Truncated, Workload
from tltlab.traces.schema import KEY
from tltlab.traces.trace import Trace

from .random_numbers import request_seeds, uniforms

BLOCK_TOKENS = 16
"""Tokens of a block of the KV cache, vLLM's default: only whole blocks are shared."""


@dataclass(frozen=True, kw_only=True)
class Requests:
    """One RL step's workload with what became of it. `recorded_worker` is None where the trace does not know it.

    With `prefix_caching` the samples of a group on one worker share their prompt's keys and values.
    """

    rl_step: int
    policy_version: int
    keys: list[Key]
    prompt_tokens: list[int]
    max_response_tokens: list[int]
    response_tokens: list[int]
    recorded_worker: list[int | None]
    rows: pd.DataFrame
    prefix_caching: bool = False

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

    @cached_property
    def groups(self) -> Ints:
        """The number of each request's group: samples of one prompt in one RL step."""
        number: dict[tuple[int, str], int] = {}
        return np.array([number.setdefault(key[:2], len(number)) for key in self.keys], np.int64)

    @cached_property
    def shared(self) -> Ints:
        """Tokens of each prompt that another sample of its group has in the cache: whole blocks, never the last token.

        The shortest prompt of a group is what its samples have in common: a response that goes on has its own text
        behind it. Zeros without prefix caching.
        """
        if not self.prefix_caching or not len(self):
            return np.zeros(len(self), np.int64)
        shortest = np.full(int(self.groups.max()) + 1, np.iinfo(np.int64).max)
        np.minimum.at(shortest, self.groups, self.prompts)
        common: Ints = np.maximum(shortest - 1, 0) // BLOCK_TOKENS * BLOCK_TOKENS
        return common[self.groups]


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


def changed(requests: Requests, workload: Workload | None, seed: int) -> Requests:
    """The requests as a system that changes them has them; what it draws is a hash of (seed, key)."""
    if workload is None:
        return requests
    luck = uniforms(request_seeds(seed, requests.keys), np.full(len(requests), _APART), 1)[:, 0]
    lengths = requests.lengths
    if isinstance(workload, Truncated):
        caps = np.array([max(1, int(cap * workload.share)) for cap in requests.max_response_tokens])
        rows = requests.rows.assign(response_tokens=np.minimum(lengths, caps), max_response_tokens=caps)
        return replace(
            requests, rows=rows, response_tokens=np.minimum(lengths, caps).tolist(), max_response_tokens=caps.tolist()
        )
    if isinstance(workload, EarlierEpoch):
        with np.errstate(divide="ignore"):
            run = np.log1p(-luck) / np.log(workload.keep) if workload.keep < 1 else np.full(len(luck), np.inf)
        kept = np.minimum(np.floor(run), lengths).astype(np.int64)
        return replace(
            requests, prompt_tokens=(requests.prompts + kept).tolist(), response_tokens=(lengths - kept).tolist()
        )
    assert isinstance(workload, Regrouped)
    of: dict[str, list[int]] = {}
    for i, key in enumerate(requests.keys):
        of.setdefault(key[1], []).append(i)
    groups = list(of.values())
    lengths_of = requests.response_tokens
    # Every factor-th prompt stands for those up to the next one: samples of its own lengths, drawn again.
    source = list(range(len(requests)))
    for at, group in enumerate(groups):
        first = groups[at - at % workload.factor]
        for i in group:
            source[i] = first[int(luck[i] * len(first))] if group is not first else i
    keys = [
        (key[0], requests.keys[j][1], i, key[3]) for i, (key, j) in enumerate(zip(requests.keys, source, strict=True))
    ]
    rows = requests.rows.assign(
        prompt_id=[key[1] for key in keys], sample=[key[2] for key in keys],
        response_tokens=[lengths_of[j] for j in source], prompt_tokens=[requests.prompt_tokens[j] for j in source],
    )  # fmt: skip
    return replace(
        requests, rows=rows, keys=keys, response_tokens=[lengths_of[j] for j in source],
        prompt_tokens=[requests.prompt_tokens[j] for j in source],
    )  # fmt: skip


_APART = 1 << 40
"""Where these draws begin in a request's: no iteration comes so far."""


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
