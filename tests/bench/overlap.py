"""What of the host's work a device waits for, scheduled asynchronously and not: processor time per iteration, on a CPU.

The model is tiny and its weights are random. Its forward pass, logits and sampler stand for the device, and a clock of
this thread's processor time runs while nothing of them does. With synchronous scheduling a device waits for all of
that: until the tokens of an iteration are there nothing of the next one begins. With asynchronous scheduling it waits
for drafts of the host alone, from those tokens on, as long as its own work takes longer than the rest of the host's.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu import shape
from bench.harness import Goals, Progress, Table, Text, in_turn, quiet, ratio
from tltlab.policies.policy import load_policy

STOCK, STOCK_SYNC, OURS, OURS_SYNC = "stock", "stock, synchronous", "ours", "ours, synchronous"
BATCHES = (1, 8, 64, 256)
PROMPT_TOKENS, TOKENS, DEPTH = 64, 48, 4
VOCABULARY = 1024
"""Of the tiny model."""
MOST_ADDED_US, OF_BATCH = 300.0, 64
"""Most microseconds that a device may wait for suffix drafts, at that batch."""
CASES = (
    (STOCK_SYNC, "none"), (STOCK, "none"),
    *product((OURS_SYNC, OURS), ("none", f"ngram:{DEPTH}", f"suffix:{DEPTH}")),
)  # fmt: skip


class _Clock:
    """Processor time of the host by iteration of one engine: `host_us` of all, `waits_us` from its `waiting` on."""

    def __init__(self, engine: Any, *, waits: bool) -> None:
        self._engine, self._always = engine, waits
        core = engine.llm.llm_engine.engine_core.engine_core
        self._runner = core.model_executor.driver_worker.model_runner
        for module, name in ((self._runner.model, "compute_logits"), (self._runner.sampler, "forward")):
            setattr(module, name, self._device(getattr(module, name)))
        if hasattr(self._runner, "rejection_sampler"):
            self._runner.rejection_sampler.forward = self._device(self._runner.rejection_sampler.forward)
        self._runner.model.forward = self._device(self._runner.model.forward, ends=True)
        if hasattr(core.scheduler, "_ahead"):
            core.scheduler._ahead = self._waiting(core.scheduler._ahead)
        self.begin()

    def begin(self) -> None:
        self.rows: list[tuple[int, float, float]] = []
        self._host_us, self._waits_us, self._on, self._waits = 0.0, 0.0, time.thread_time_ns(), self._always

    def _stop(self) -> None:
        took_us = (time.thread_time_ns() - self._on) / 1e3
        self._host_us += took_us
        self._waits_us += took_us * self._waits

    def _device(self, work: Callable[..., Any], *, ends: bool = False) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._stop()
            if ends:
                self.rows.append((self._runner.input_batch.num_reqs, self._host_us, self._waits_us))
                self._host_us, self._waits_us, self._waits = 0.0, 0.0, self._always
            try:
                return work(*args, **kwargs)
            finally:
                self._on = time.thread_time_ns()

        return run

    def _waiting(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def ahead(*args: Any) -> Any:
            self._stop()
            self._on, self._waits = time.thread_time_ns(), True
            return wait(*args)

        return ahead


def bench_overlap(
    batches: Sequence[int] = BATCHES, *, rounds: int = 5, tokens: int = TOKENS, progress: Progress = quiet
) -> dict[str, Any]:
    """A row per engine, policy and batch: medians over iterations of the whole batch, then over rounds in turn.

    `host_us` is all of the host's time in an iteration and `waits_us` the part that a device waits for, in
    microseconds; `over_synchronous` is the ratio of the latter to that of our synchronous engine, with its interval
    over rounds. `equal` says whether all engines gave the same greedy tokens.
    """
    from bench.vllm.asynchronous import asynchronous
    from tltlab.runtime.engine.engine import Engine
    from tltlab.runtime.engine.environment import hardware, versions
    from tltlab.runtime.engine.generation import GenerationRequest
    from tltlab.runtime.engine.vllm.stock import PlainStock

    most = max(batches)
    rng, phrase = np.random.default_rng(0), 16
    # Each has phrases of its own, some more than once.
    phrases = rng.integers(0, VOCABULARY, (most, 3, phrase))
    picked = rng.integers(0, 3, (most, PROMPT_TOKENS // phrase))
    prompts = np.take_along_axis(phrases, picked[..., None], 1).reshape(most, -1).tolist()
    said: dict[tuple[int, int], set[str]] = {}
    with ExitStack() as stack:
        model = str(shape("tiny-shape", Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        args: dict[str, Any] = {
            "load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": most,
            "max_model_len": PROMPT_TOKENS + tokens + DEPTH + 1,
        }  # fmt: skip
        stack.enter_context(asynchronous())
        engines: dict[str, Any] = {}
        for name in (STOCK_SYNC, STOCK, OURS_SYNC, OURS):
            scheduling = args | {"async_scheduling": "synchronous" not in name}
            made = (
                PlainStock(model, vllm_args=scheduling)
                if name.startswith(STOCK)
                else Engine(model, max_draft_depth=DEPTH, vllm_args=scheduling)
            )
            engines[name] = stack.enter_context(closing(made))
        clocks = {name: _Clock(engine, waits="synchronous" in name) for name, engine in engines.items()}

        def measure(case: tuple[int, tuple[str, str]], number: int) -> tuple[float, float]:
            batch, (name, policy) = case
            engine, clock = engines[name], clocks[name]
            if name.startswith("ours"):
                engine.set_policy(load_policy(policy))
                engine.forget()
            about: dict[str, Any] = {"max_response_tokens": tokens, "ignore_eos": True}
            requests = [
                GenerationRequest(key=(number + 1, f"p{n}", 0, 0), prompt_token_ids=prompts[n], **about)
                for n in range(batch)
            ]
            clock.begin()
            rollout = engine.generate(requests, rl_step=number + 1, temperature=0.0)
            said.setdefault((batch, number), set()).add(str([list(r.token_ids) for r in rollout.responses]))
            whole = [row[1:] for row in clock.rows[4:] if row[0] == batch]
            host_us, waits_us = np.median(whole, 0).tolist()
            return host_us, waits_us

        taken = in_turn(product(batches, CASES), measure, rounds, progress=progress)
    rows: list[dict[str, Any]] = []
    for (batch, (name, policy)), measured in taken.items():
        host_us, waits_us = np.array(measured).T
        base = np.array(taken[batch, (OURS_SYNC, policy)])[:, 1]
        rows.append({
            "batch": batch, "engine": name, "policy": policy, "host_us": float(np.median(host_us)),
            "waits_us": float(np.median(waits_us)), "over_synchronous": ratio(waits_us, base),
        })  # fmt: skip
    added = [row for row in rows if (row["engine"], row["batch"]) == (OURS, OF_BATCH)]
    goals = [{**row, "at_most": MOST_ADDED_US, "met": row["waits_us"] <= MOST_ADDED_US} for row in added]
    equal = all(len(texts) == 1 for texts in said.values())
    return {"hardware": hardware(), "versions": versions(), "equal": equal, "rows": rows, "goals": goals}


TEXT: Text = (
    "microseconds of the host's processor time per iteration; all engines gave the same tokens: {equal}",
    Table(
        "rows",
        "engine: {engine}; policy: {policy}; batch: {batch}; host: {host_us:.0f}; a device waits: {waits_us:.0f}; "
        "of synchronous: {over_synchronous:.2f}",
        left=2,
    ),
    Goals("goals", "{policy}, batch {batch}: a device waits {waits_us:.0f} us, at most {at_most:g}"),
)
