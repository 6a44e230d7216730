"""Run a script for TRL as it is, and note when its RL steps ended.

`python -m bench.train.trl SCRIPT TIMES [--torch-linear]` where TRL can be imported. TIMES becomes a JSON
object: `seconds`, `rewards` (means) and `lengths` (mean tokens), one of each per RL step. Time begins when training
does, so imports and the start of an engine are not in it.
"""

from __future__ import annotations

import runpy
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, trainer

from bench.vllm.plain import keep_linear_weights
from tltlab.files import write_json
from tltlab.records import Json


class Clock(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Notes the time of each optimizer step and what is logged; writes the file when training ends."""

    def __init__(self, times: Path) -> None:
        self._times = times
        self._marks: list[float] = []
        self._logs: list[Json] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._marks = [time.perf_counter()]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._marks.append(time.perf_counter())

    def on_log(self, *_: Any, logs: Json, **__: Any) -> None:
        """TRL tells an RL step's reward."""
        if "reward" in logs:
            self._logs.append(logs)

    def on_train_end(self, args: Any, *_: Any, **__: Any) -> None:
        updates = args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps
        ends = self._marks[::updates]
        write_json(
            self._times,
            {
                "seconds": [end - start for start, end in pairwise(ends)],
                "rewards": [float(logs["reward"]) for logs in self._logs],
                "lengths": [float(logs["completions/mean_length"]) for logs in self._logs],
            },
        )


def main(script: str, times: str, *options: str) -> None:
    """Run the script with the clock in it."""
    trainer.DEFAULT_CALLBACKS.append(Clock(Path(times)))
    if "--torch-linear" in options:
        keep_linear_weights()
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
