"""What all of tltlab on an engine's critical path costs it: processor time per iteration, without a model.

vLLM's scheduler runs under a policy, and a worker is played to it: the tokens are those of texts made up beforehand,
and a draft is kept as far as it agrees with them. A clock of this thread's processor time runs while code of tltlab
does and stands while vLLM's own does, wherever one calls the other: choosing, the book, feeding drafters, look-ups,
sharing out, and requests that come and go. Work that vLLM saves or adds because of tltlab is not included.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.gpu import shape
from bench.harness import Goals, Progress, Table, quiet, shown
from tltlab.errors import ConfigError
from tltlab.policies.policy import SHIPPED, Activation, Policy

if TYPE_CHECKING:
    from bench.vllm.played import PlayedEngine, World

BATCHES = (1, 8, 32, 128, 256, 512)
RECORD, CAPTURE = "record", "capture"
"""Beside policies: `none` with a trace, and `none` with the target's hidden states captured."""
CASES = (*SHIPPED, RECORD, CAPTURE)
GOALS_US = {"none": {256: 60.0}, "off": {256: 150.0, 512: 300.0}}
"""Microseconds per iteration: of `none` and record-only, and of any policy while it does not draft."""
PER_REQUEST_US, FEW = 3.0, 32
"""Microseconds per request and iteration of model-free drafting, beyond the look-ups and insertions of its index; from
that batch on, below it what an iteration costs whatever its batch is more."""
RESPONSE_TOKENS, PROMPT_TOKENS, GROUP = 1024, 64, 8


def bench_seam(
    cases: Sequence[str] = CASES,
    batches: Sequence[int] = BATCHES,
    *,
    iterations: int = 200,
    cold: bool = False,
    progress: Progress = quiet,
) -> dict[str, Any]:
    """A row per case, batch and whether it drafts; `iterations` of each are measured, those that draft where it does.

    `us_per_iteration` is the median, `p99_us` the 99th percentile and `mean_us` the mean over iterations, in
    microseconds; `parts` are medians by what vLLM calls: `schedule`, `outputs` and `drafts`, with `policy` the part of
    them in which the policy chooses, shares out and learns; means of `requests`, in which requests come and go.
    `lookup_us` and `insert_us` are what the drafters' indices alone take for an iteration's calls, measured in every
    third iteration, and `beyond_us` is what the others take without it, strategy by strategy, `beyond_se_us` its
    standard error; `vllm_us` is what vLLM's own scheduler takes. While off, elastic activation keeps speculation off.
    With `cold` the caches are emptied before each call, as a forward pass on the same processor does. `python_ns` is
    what a turn of an empty loop took meanwhile, by which runs on busy machines can be compared. ConfigError for a case
    that there is not.
    """
    if unknown := [case for case in cases if case not in CASES]:
        raise ConfigError(f"no case {unknown[0]!r} of bench seam; there are: {', '.join(CASES)}")
    from tltlab.runtime.engine.environment import hardware, versions
    from tltlab.runtime.engine.vllm import starting

    rows, turns = [], []
    with tempfile.TemporaryDirectory() as folder, starting():
        world = _world(Path(folder), max(batches))
        for case in cases:
            for batch in batches:
                for drafting in (False, True):
                    policy = _policy(case, drafting)
                    if policy is None:
                        continue
                    row = _played(world, case, policy, batch, cold=cold).measure(iterations, drafting=drafting)
                    turns.append(_loop_ns())
                    if row is not None:
                        rows.append({"policy": case, "batch": batch, "drafting": drafting, **row})
            progress(f"{case}: {len(rows)} rows")
    about = {"hardware": hardware(), "versions": versions(), "iterations": iterations, "cold": cold}
    about["python_ns"] = float(np.median(turns))
    return about | {"rows": rows, "goals": goals(rows)}


def goals(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The bounds that a row has, with what it took; `per_request` ones are of a request, beyond its index."""
    bounds = []
    for row in rows:
        policy, batch, took, bound = row["policy"], row["batch"], row["us_per_iteration"], None
        if not row["drafting"]:
            kind = "none" if policy in ("none", RECORD) else "off"
            bound = None if policy == CAPTURE else GOALS_US[kind].get(batch)
        elif policy != "beg-mab-learned" and batch >= FEW:
            took = row["beyond_us"] / batch
            bound = PER_REQUEST_US
        if bound is not None:
            names = {"policy": policy, "batch": batch, "drafting": row["drafting"]}
            bounds.append(names | {"us": took, "at_most": bound, "met": took <= bound})
    return bounds


def text(result: dict[str, Any]) -> str:
    """Medians and 99th percentiles by batch, then the goals that are missed."""
    rows: dict[tuple[str, bool], dict[str, Any]] = {}
    for row in result["rows"]:
        at = rows.setdefault((row["policy"], row["drafting"]), {"policy": row["policy"], "drafting": row["drafting"]})
        at[f"at {row['batch']}"] = f"{row['us_per_iteration']:.0f} ({row['p99_us']:.0f})"
    batches = sorted({row["batch"] for row in result["rows"]})
    columns = "; ".join(["policy: {policy}", ": {drafting:drafting|off}", *(f"batch {n}: {{at {n}}}" for n in batches)])
    goal = "{policy}, {drafting:drafting|off}, batch {batch}: {us:.1f} us, at most {at_most:g}"
    text = (
        "microseconds of processor time per iteration, median (99th percentile)",
        Table("by_batch", columns, left=2),
        Goals("goals", goal, missed_only=True),
    )
    return shown(result | {"by_batch": list(rows.values())}, text)


def _policy(case: str, drafting: bool) -> Policy | None:
    """The case's policy with activation that never, or always, lets it speculate; None where it never does."""
    policy = SHIPPED.get(case, SHIPPED["none"])
    if not any(strategy.speculates for strategy in policy.strategies):
        return None if drafting else policy
    return policy.model_copy(update={"activation": None if drafting else Activation(max_requests=0)})


def _loop_ns() -> float:
    turns = 20_000
    began = time.thread_time_ns()
    for _ in range(turns):
        pass
    return (time.thread_time_ns() - began) / turns


def _world(folder: Path, max_batch: int) -> World:
    """A small model and texts for `max_batch` requests at a time."""
    from bench.vllm.played import World

    prompts, texts = [], []
    rng = np.random.default_rng(0)
    for _ in range(-(-max_batch // GROUP)):
        phrases = [rng.integers(0, 32_000, rng.integers(8, 25)).tolist() for _ in range(1000)]
        texts.append([_strung(phrases, rng) for _ in range(2 * GROUP)])
        prompts.append(rng.integers(0, 32_000, 256).tolist()[:PROMPT_TOKENS])
    return World(
        folder=folder,
        model=str(shape("Qwen2.5-0.5B", folder / "model", layers=1)),
        prompts=prompts,
        texts=texts,
        max_batch=max_batch,
        group=GROUP,
        response_tokens=RESPONSE_TOKENS,
    )


def _strung(phrases: Sequence[list[int]], rng: np.random.Generator) -> list[int]:
    """A response that strings together the phrases of its problem, with a stray token now and then."""
    text: list[int] = []
    while len(text) < RESPONSE_TOKENS:
        text += phrases[min(int(rng.zipf(1.3)), len(phrases)) - 1]
        if rng.random() < 0.5:
            text.append(int(rng.integers(0, 32_000)))
    return text[:RESPONSE_TOKENS]


def _played(world: World, case: str, policy: Policy, batch: int, *, cold: bool = False) -> PlayedEngine:
    from bench.vllm.played import PlayedEngine

    learned, record, capture = (case == name for name in ("beg-mab-learned", RECORD, CAPTURE))
    return PlayedEngine(world, policy, batch, learned=learned, record=record, capture=capture, cold=cold)
