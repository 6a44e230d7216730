"""Synthetic traces: workload and outcomes drawn from a model of lengths, RL step by RL step."""

import math
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pandas as pd

from tltlab.arrays import Floats, Ints
from tltlab.config import faults_in
from tltlab.errors import ConfigError
from tltlab.records import frozen
from tltlab.traces.schema import Manifest
from tltlab.traces.trace import Trace

from .model import REGIMES, LengthModel

StepTables = tuple[pd.DataFrame, pd.DataFrame]

_SPREAD = 1.0
"""Standard deviation of the logarithm of a tool's seconds and of its output tokens; assumed."""


@frozen
class ToolUse:
    """Cuts drawn responses into turns with tools between them.

    The number of turns is geometric with mean `turns`, and a response's tokens are cut at random places; a tool takes
    log-normal seconds about the median `tool_s` and returns log-normal tokens about `observation_tokens`. All assumed.
    """

    turns: float
    tool_s: float = 2.0
    observation_tokens: float = 200.0

    def __post_init__(self) -> None:
        for name, least in (("turns", 1.0), ("tool_s", 0.0), ("observation_tokens", 0.0)):
            if not least <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be a number of {least:g} or more")

    def cut(self, tables: StepTables, seed: int) -> StepTables:
        """Workload and outcomes of an RL step with a row for each turn, in the order of responses, then turns.

        Example: for a response of 100 tokens to a prompt of 10, in turns of 60 and 40 with 5 tool tokens between them,
        the second turn's prompt has 75.
        """
        workload, outcomes = tables
        rng = np.random.default_rng([seed, int(workload["rl_step"].iloc[0])])
        lengths = outcomes["response_tokens"].to_numpy(np.int64)
        counts = np.minimum(rng.geometric(1 / self.turns, len(lengths)), lengths)
        parts = []
        for length, count in zip(lengths.tolist(), counts.tolist(), strict=True):
            cuts = np.sort(rng.choice(length - 1, count - 1, replace=False)) + 1
            parts.append(np.diff(np.concatenate([[0], cuts, [length]])))
        tokens = np.concatenate(parts)
        of, turn = np.repeat(np.arange(len(lengths)), counts), np.concatenate([np.arange(count) for count in counts])
        factors = np.exp(_SPREAD * rng.standard_normal((2, len(of))))
        observations = np.where(turn > 0, np.rint(self.observation_tokens * factors[0]), 0).astype(np.int64)
        before = np.concatenate([np.cumsum(part) - part for part in parts])
        observed = pd.Series(observations).groupby(of).cumsum().to_numpy()
        last = np.arange(len(of)) == np.cumsum(counts)[of] - 1
        prompts, caps = (workload[name].to_numpy(np.int64)[of] for name in ("prompt_tokens", "max_response_tokens"))
        prompt_tokens = np.minimum(prompts + before + observed, 2**31 - 1).astype(np.int32)
        key = {"turn": turn.astype(np.int32)}
        return (
            workload.iloc[of].assign(
                **key, prompt_tokens=prompt_tokens, max_response_tokens=(caps - before).astype(np.int32)
            ),
            outcomes.iloc[of].assign(
                **key,
                response_tokens=tokens.astype(np.int32),
                finish_reason=np.where(last, outcomes["finish_reason"].to_numpy()[of], "stop"),
                tool_s=np.where(turn > 0, self.tool_s * factors[1], 0.0),
            ),
        )


def generate(
    model: LengthModel,
    *,
    num_rl_steps: int,
    prompts_per_step: int,
    group_size: int,
    seed: int = 0,
    num_prompts: int | None = None,
    num_workers: int | None = None,
    name: str | None = None,
    tools: ToolUse | None = None,
) -> Trace:
    """Draw a synthetic trace; with `tools` its responses have turns.

    See `generate_steps`, which serves where a trace is larger than memory.
    """
    manifest = manifest_of(model, group_size=group_size, num_workers=num_workers, seed=seed, name=name)
    steps = generate_steps(
        model, num_rl_steps=num_rl_steps, prompts_per_step=prompts_per_step, group_size=group_size, seed=seed,
        num_prompts=num_prompts,
    )  # fmt: skip
    if tools is not None:
        steps = (tools.cut(step, seed) for step in steps)
    workload, outcomes = (pd.concat(tables, ignore_index=True) for tables in zip(*steps, strict=True))
    return Trace.from_tables(manifest, {"workload": workload, "outcomes": outcomes})


def log_normal(
    *,
    median: float = 800.0,
    sigma: float = 1.0,
    prompt_share: float = 0.05,
    cap: int = 16384,
    rl_steps: int = 4,
    prompts: int = 64,
    group_size: int = 8,
    workers: int | None = None,
    seed: int = 0,
) -> Trace:
    """Draw a trace with log-normal lengths, the plainest long tail; `generate` knows more of what is measured.

    >>> log_normal(prompts=2, group_size=2, rl_steps=1).outcomes.response_tokens.tolist()
    [2421, 171, 22, 1627]
    """
    shape = {"prompt_share": prompt_share, "max_response_tokens": cap, "prompt_tokens_sigma": 0.0}
    model = REGIMES["base-rl"].with_changes(sigma=sigma, median=median, prompt_tokens_median=128.0, **shape)
    return generate(
        model, num_rl_steps=rl_steps, prompts_per_step=prompts, group_size=group_size, seed=seed, num_workers=workers,
        name="log-normal",
    )  # fmt: skip


def generate_steps(
    model: LengthModel,
    *,
    num_rl_steps: int,
    prompts_per_step: int,
    group_size: int,
    seed: int = 0,
    num_prompts: int | None = None,
) -> Iterator[StepTables]:
    """Yield workload and outcomes of RL step 0, 1, ...; memory holds one RL step and two numbers per recurring prompt.

    With `num_prompts` the prompts come back: every epoch is a new order of them, and its last ones that do not fill an
    RL step are left out. Without it every prompt is new. Same arguments, same rows, and a longer trace begins with the
    rows of a shorter one. Nothing is aborted; rewards, times and workers stay unknown. Raises ConfigError at the call.
    """
    counts = {"RL steps": num_rl_steps, "prompts": prompts_per_step, "group size": group_size}
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}, it must be at least 1")
    if num_prompts is not None and num_prompts < prompts_per_step:
        raise ConfigError(
            f"{prompts_per_step} prompts per RL step, but only {num_prompts} in all; give at least as many"
        )
    if seed < 0:
        raise ConfigError(f"seed is {seed}, it must be at least 0")
    prompt_rng, sample_rng, tail_rng = (np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(3))
    if num_prompts is None:
        prompts = _new_prompts(model, prompts_per_step, prompt_rng)
    else:
        prompts = _recurring_prompts(model, prompts_per_step, num_prompts, prompt_rng)
    return (
        _tables(model.drawn(tail_rng), rl_step, group, group_size, sample_rng)
        for rl_step, group in enumerate(islice(prompts, num_rl_steps))
    )


def manifest_of(
    model: LengthModel, *, group_size: int, num_workers: int | None, seed: int, name: str | None
) -> Manifest:
    """The manifest of a trace drawn from `model`. Raises ConfigError."""
    notes = (
        f"lengths drawn: median {model.quantile(0.5):.0f} in RL step 0, growing by {model.median_growth:.3g} per step "
        f"(above the median by a further {model.tail_growth:.3g}), prompt share {model.prompt_share:.3g}"
    )
    with faults_in("the trace to draw"):
        return Manifest(
            kind="synthetic", name=name, num_workers=num_workers, max_response_tokens=model.max_response_tokens,
            group_size=group_size, seed=seed, notes=notes,
        )  # fmt: skip


_Group = tuple[int, Ints, Floats, Ints]
"""The prompts of one RL step: epoch, their numbers, scores and tokens."""


def _new_prompts(model: LengthModel, count: int, rng: np.random.Generator) -> Iterator[_Group]:
    first = 0
    while True:
        scores = rng.standard_normal(count)
        yield 0, np.arange(first, first + count), scores, _prompt_tokens(model, scores, rng)
        first += count


def _recurring_prompts(model: LengthModel, count: int, num_prompts: int, rng: np.random.Generator) -> Iterator[_Group]:
    memory = model.prompt_memory
    scores = rng.standard_normal(num_prompts)
    tokens = _prompt_tokens(model, scores, rng)
    epoch = 0
    while True:
        order = rng.permutation(num_prompts)
        for first in range(0, num_prompts - count + 1, count):
            numbers = order[first : first + count]
            yield epoch, numbers, scores[numbers], tokens[numbers]
        scores = memory * scores + math.sqrt(1 - memory**2) * rng.standard_normal(num_prompts)
        epoch += 1


def _prompt_tokens(model: LengthModel, scores: Floats, rng: np.random.Generator) -> Ints:
    along = model.prompt_length_correlation
    spread = along * scores + math.sqrt(1 - along**2) * rng.standard_normal(len(scores))
    tokens = model.prompt_tokens_median * np.exp(model.prompt_tokens_sigma * spread)
    whole: Ints = np.minimum(np.rint(tokens), 2**31 - 1).astype(np.int64)
    return whole


def _tables(model: LengthModel, rl_step: int, group: _Group, group_size: int, rng: np.random.Generator) -> StepTables:
    epoch, numbers, scores, prompt_tokens = group
    share, cap = model.prompt_share, model.max_response_tokens
    noise = rng.standard_normal((len(numbers), group_size))
    mixed = math.sqrt(share) * scores[:, None] + math.sqrt(1 - share) * noise
    log_tokens = model.log_tokens(mixed.ravel(), rl_step)
    cut = log_tokens >= math.log(cap)
    lengths = np.clip(np.rint(np.exp(np.minimum(log_tokens, math.log(cap)))), 1, cap).astype(np.int32)
    key = pd.DataFrame(
        {
            "rl_step": np.full(len(lengths), rl_step, np.int32),
            "prompt_id": np.repeat(np.array([f"p{number}" for number in numbers], object), group_size),
            "sample": np.tile(np.arange(group_size, dtype=np.int32), len(numbers)),
            "turn": np.zeros(len(lengths), np.int32),
        }
    )
    workload = key.assign(
        epoch=np.int32(epoch),
        prompt_tokens=np.repeat(prompt_tokens, group_size).astype(np.int32),
        max_response_tokens=np.int32(cap),
        policy_version=np.int32(rl_step),
    )
    return workload, key.assign(response_tokens=lengths, finish_reason=np.where(cut, "length", "stop"))
