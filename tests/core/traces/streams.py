"""Measures how fast a long trace is written, checked, described and read, and that its length costs no memory."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from bench.harness import alone, peak_rss_bytes
from tltlab.errors import ConfigError
from tltlab.traces.schema import Manifest
from tltlab.traces.stream import StreamWriter, count, describe
from tltlab.traces.trace import read

Phase = Literal["validate", "describe", "iterate"]
PHASES: tuple[Phase, ...] = ("validate", "describe", "iterate")
CAP = 32_768


def bench_stream(
    num_responses: int,
    *,
    step_responses: int = 16_384,
    phases: Sequence[Phase] = PHASES,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Write a synthetic trace, then validate, describe and iterate it, each in a process of its own.

    `step_responses` responses per RL step in groups of 16, and as many RL steps as `num_responses` take,
    the last one full. The trace goes to a temporary folder in `folder` and is removed. Returns `num_responses`,
    `num_rl_steps`, `trace_bytes` (on disk) and `phases`: for "write" and each of `phases` its `wall_s`, `rows_per_s`
    and `peak_rss_bytes` (of the process, with the interpreter and its libraries). Raises ConfigError.
    """
    if num_responses < 1:
        raise ConfigError(f"num_responses is {num_responses}, it must be at least 1")
    num_rl_steps = -(-num_responses // step_responses)
    measured = {}
    with tempfile.TemporaryDirectory(dir=folder, prefix="stream-bench.") as temporary:
        path = Path(temporary) / "trace"
        for phase in ("write", *phases):
            wall_s, peak = alone(run, phase, path, num_rl_steps, step_responses)
            rows_per_s = num_rl_steps * step_responses / wall_s
            measured[phase] = {"wall_s": wall_s, "rows_per_s": rows_per_s, "peak_rss_bytes": peak}
        trace_bytes = sum(file.stat().st_size for file in path.iterdir())
    return {
        "num_responses": num_rl_steps * step_responses,
        "num_rl_steps": num_rl_steps,
        "trace_bytes": trace_bytes,
        "phases": measured,
    }


def run(phase: str, path: Path, num_rl_steps: int, step_responses: int) -> tuple[float, int]:
    """One phase in this process: its wall time in seconds and the peak resident bytes of the process."""
    started = time.perf_counter()
    if phase == "write":
        write(path, num_rl_steps, step_responses, 16, 0)
    elif phase == "validate":
        count(read(path))
    elif phase == "describe":
        describe(read(path))
    else:
        for step in read(path).iter_rl_steps():
            _ = step.workload, step.outcomes
    return time.perf_counter() - started, peak_rss_bytes()


def write(path: Path, num_rl_steps: int, step_responses: int, group_size: int, seed: int) -> None:
    """Write a trace of log-normal lengths with all times known; every RL step has prompts of its own."""
    rng = np.random.default_rng(seed)
    manifest = Manifest(kind="synthetic", num_workers=64, max_response_tokens=CAP, group_size=group_size, seed=seed)
    number = np.arange(step_responses, dtype=np.int32)
    group = number // group_size
    worker = number % 64
    with StreamWriter(path, manifest) as writer:
        for rl_step in range(num_rl_steps):
            names = [f"step{rl_step}-prompt{i}" for i in range(int(group[-1]) + 1)]
            key = {
                "rl_step": np.full(step_responses, rl_step, np.int32),
                "prompt_id": pa.DictionaryArray.from_arrays(group, names),
                "sample": number % group_size,
                "turn": np.zeros(step_responses, np.int32),
            }
            tokens = np.clip(rng.lognormal(7.0, 1.2, step_responses), 1, CAP).astype(np.int32)
            constant = {"epoch": 0, "prompt_tokens": 256, "max_response_tokens": CAP, "policy_version": rl_step}
            workload = {**key, **{name: np.full(step_responses, value, np.int32) for name, value in constant.items()}}
            outcomes = {
                **key,
                "response_tokens": tokens,
                "finish_reason": pa.DictionaryArray.from_arrays((tokens == CAP).astype(np.int8), ["stop", "length"]),
                "reward": rng.integers(0, 2, step_responses).astype(np.float32),
                "worker": worker,
                "t_submit": np.zeros(step_responses),
                "t_first_token": rng.uniform(0.1, 1.0, step_responses),
                "t_finish": 1.0 + tokens * 0.01,
            }
            writer.append(pa.table(workload), pa.table(outcomes))
