"""Engines of a rehearsal in turn, within the minutes that there are; what was played stays on disk."""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import product
from pathlib import Path

from tltlab.console import progress
from tltlab.errors import ConfigError, RunError
from tltlab.files import read_object, write_json
from tltlab.runtime.rollout.played import PLAN, STOCK, RehearsalPlan, engine_file, pending_rollouts, played

START_S = {True: 60.0, False: 20.0}
"""Seconds that an engine is expected to take to start, on a GPU and without one, until one has."""
_PATIENCE_S = 30.0
"""An engine is killed so long after the deadline."""


def rehearse(
    plan: RehearsalPlan, out: Path, *, minutes: float | None = None, report: Callable[[str], None] = progress
) -> None:
    """Play what is planned and not yet in `out`; each rollout is on disk as soon as it is over.

    Workers' engines run side by side where there are as many GPUs, else one after another. Rollouts that do not fit
    into `minutes` are left out and reported. ConfigError where `out` holds anything else, RunError where an engine
    fails.
    """
    described = plan.model_dump(mode="json")
    there = read_object(out / PLAN) | {"plain_batches": described["plain_batches"]}
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and there != described:
        raise ConfigError(f"{out} holds something else than this rehearsal: choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / PLAN, described)
    write_json(out / "model" / "config.json", plan.config)
    deadline = None if minutes is None else time.time() + 60 * minutes
    for stock in (True, False):
        workers = [worker for worker in range(len(plan.lengths)) if pending_rollouts(plan, out, worker, stock)]
        for first in range(0, len(workers), at_once := max(1, plan.gpus)):
            starts = [row["seconds"] for row in played(out) if row["row"] == "started"]
            if deadline is None or time.time() + max(starts, default=START_S[plan.gpus > 0]) < deadline:
                names = ", ".join(plan.of_engine(stock))
                report(f"starting {'stock vLLM' if stock else f'an engine for {names}'}")
                _run(plan, out, workers[first : first + at_once], stock, deadline)
    left = Counter[str]()
    for engine in product(range(len(plan.lengths)), (True, False)):
        left.update(visit.policy for visit in pending_rollouts(plan, out, *engine))
    if left:
        report(f"left out for lack of time, rollouts of {', '.join(f'{name} ({n})' for name, n in left.items())}")


def _run(plan: RehearsalPlan, out: Path, workers: Sequence[int], stock: bool, deadline: float | None) -> None:
    """Play on engines side by side, each in a process and on its own GPU; none outlives this call."""
    engine = STOCK if stock else "ours"
    running: list[tuple[Path, subprocess.Popen[bytes]]] = []
    try:
        for device, worker in enumerate(workers):
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(workers))))).split(",")
            own = {"CUDA_VISIBLE_DEVICES": visible[device]} if len(workers) > 1 else {}
            command = [sys.executable, "-m", "tltlab.runtime.rollout.played", str(out), str(worker), engine]
            log_file = out / f"{engine_file(worker, stock)}.log"
            with ExitStack() as files:
                log = files.enter_context(log_file.open("ab"))
                process = subprocess.Popen(
                    command + ([] if deadline is None else [str(deadline)]), stdout=log, stderr=log,
                    env={"OMP_NUM_THREADS": "1", **os.environ, **own},
                )  # fmt: skip
            running.append((log_file, process))
        for log_file, process in running:
            left = None if deadline is None else max(deadline - time.time(), 0.0) + _PATIENCE_S
            with suppress(subprocess.TimeoutExpired):
                if process.wait(left):
                    said = log_file.read_text(errors="replace").strip().splitlines()[-1:]
                    raise RunError(f"{', '.join(plan.of_engine(stock))} failed: {' '.join(said)} ({log_file})")
    finally:
        for _, process in running:
            process.kill()
            process.wait()
