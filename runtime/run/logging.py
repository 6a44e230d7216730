"""Outputs for watching a run: lines, TensorBoard, and W&B by the recipe.

A logger that cannot start is an error at once; one that fails later is reported once and dropped. A resumed run
continues in the same run of W&B, and a repeated RL step is not logged again there, since it cannot delete values.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Self

from torch.utils.tensorboard import SummaryWriter

from tltlab.console import progress
from tltlab.errors import ConfigError, one_line
from tltlab.files import read_object, sealed, write_json
from tltlab.records import Fields
from tltlab.runtime.recipe.sections import LogConfig

from .rows import LENGTH_PERCENTILES, StepReport

RUN_IDS = "log_runs.json"
"""File with this run's id in W&B, and the newest RL step that it received."""

EVERY_STEP = "time/step_s"
"""A measure of every RL step only: a logger that has it has the step."""


class RunLog:
    """Printed lines of `train`, and its metrics of each RL step.

    `out` is the run's folder, `total_steps` the RL steps from 0 on, `resume_from` the first that this process runs. For
    a step repeated by a later process or after a trainer's failure, TensorBoard shows the later values, W&B the earlier
    ones. `settings` are shown with the run by W&B; give nothing secret. Standard error gets each step's figures
    (`step_text`). ConfigError where a logger of `config` does not start.
    """

    def __init__(
        self,
        config: LogConfig,
        out: Path,
        total_steps: int,
        *,
        resume_from: int = 0,
        settings: Fields | None = None,
    ):
        chosen = {name: getattr(config, name) for name in LOGGERS if getattr(config, name) not in (None, False)}
        self._loggers: dict[str, Logger] = {}
        self._total_steps = total_steps
        self._pace: deque[float] = deque(maxlen=PACE_STEPS)
        self._noted: list[str] = []
        for name, project in chosen.items():
            title, logger = LOGGERS[name]
            try:
                self._loggers[title] = logger(project, Path(out), resume_from, settings or {})
            except BaseException as error:
                self.close(failed=True)
                if not isinstance(error, Exception):
                    raise
                raise ConfigError(f"{title} did not start: {_short(error)}; check or leave out log.{name}") from error
        # Engines take minutes to start, without further output.
        steps = f"RL steps {resume_from} to {total_steps - 1} into {out}"
        if resume_from >= total_steps:
            steps = f"all {total_steps} RL steps are in {out}"
        self.print(f"{steps}: starting workers and trainer")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close(failed=error is not None)

    def print(self, text: str) -> None:
        """Print a line; a closed terminal loses it."""
        with contextlib.suppress(OSError, ValueError):
            progress(text)

    def note(self, sentence: str) -> None:
        """Print a note at once; the report of its RL step does not repeat it."""
        self._noted.append(sentence)
        self.print(sentence)

    def step(self, report: StepReport, metrics: Mapping[str, float]) -> None:
        """Print and log a finished RL step."""
        new = [note for note in report.notes if note not in self._noted]
        self._noted = [note for note in self._noted if note not in report.notes]
        self._pace.append(report.seconds)
        # Without evaluations and checkpoints between the steps.
        left_s = fmean(self._pace) * max(self._total_steps - report.rl_step - 1, 0)
        self.print(step_text(replace(report, notes=new), metrics, str(timedelta(seconds=math.ceil(left_s)))))
        self.measured(report.rl_step, metrics)

    def measured(self, rl_step: int, metrics: Mapping[str, float]) -> None:
        """Log measures taken after RL step `rl_step`, without printing."""
        self._each(lambda logger: logger.step(rl_step, metrics))

    def close(self, *, failed: bool = False) -> None:
        """End every logger; those that take it receive whether the run `failed`. Nothing is raised."""
        self._each(lambda logger: logger.close(failed=failed))
        self._loggers.clear()

    def _each(self, act: Callable[[Logger], None]) -> None:
        for name, logger in list(self._loggers.items()):
            try:
                act(logger)
            except Exception as error:
                # A disk or a network may fail in any way, which must not end the run.
                del self._loggers[name]
                self.print(f"{name} failed and receives nothing more: {_short(error)}")


def _short(error: Exception) -> str:
    text = re.sub(r"://[^/@\s]*@", "://***@", one_line(error))  # hides a server's user and password
    return f"{type(error).__name__}: {text[:300]}"


class TensorBoard:
    """Event files; `out` is the run's folder, which begins at the RL step `resume_from`."""

    _last: int

    def __init__(self, project: bool, out: Path, resume_from: int, settings: Fields):
        self._folder, self._last = str(out / "tensorboard"), resume_from
        self._begin(resume_from)

    def step(self, rl_step: int, metrics: Mapping[str, float]) -> None:
        if EVERY_STEP in metrics:
            if rl_step <= self._last:
                self._writer.close()
                self._begin(rl_step)
            self._last = rl_step
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, rl_step)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        self._writer.close()

    def _begin(self, rl_step: int) -> None:
        """Begin a file that makes TensorBoard hide earlier values, also of earlier processes, from this step on."""
        self._writer = SummaryWriter(self._folder, purge_step=rl_step)
        self._last = rl_step - 1


class Wandb:
    """Rows of `project` over `rl_step`. A process killed offline loses the last five seconds or so of W&B's values."""

    def __init__(self, project: str, out: Path, resume_from: int, settings: Fields):
        import wandb

        out.mkdir(parents=True, exist_ok=True)  # otherwise W&B takes a temporary folder
        self._out = out
        earlier = read_object(out / RUN_IDS).get("wandb", {})
        self._earlier: int = earlier.get("rl_step", -1)
        self._row = -1
        self._run = wandb.init(
            project=project,
            name=out.absolute().name,
            dir=str(out),
            id=earlier.get("id"),
            resume="allow",
            config=dict(settings),
            # Its summary would end the run's own lines; questions at a terminal are still asked.
            settings=wandb.Settings(console="off", quiet=True),
        )
        self._run.define_metric("*", step_metric="rl_step")
        self._keep()

    def step(self, rl_step: int, metrics: Mapping[str, float]) -> None:
        if EVERY_STEP in metrics and rl_step <= self._earlier:
            return
        # W&B's own steps only rise and hold one row each: an RL step has its figures and measures taken before and
        # after it. Without `commit` a row waits for the next, and is lost with a killed process.
        self._row = max(3 * rl_step, self._row + 1)
        self._run.log({**metrics, "rl_step": rl_step}, step=self._row, commit=True)
        if EVERY_STEP in metrics:
            self._earlier = rl_step
            self._keep()

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))

    def _keep(self) -> None:
        write_json(self._out / RUN_IDS, sealed({"wandb": {"id": self._run.id, "rl_step": self._earlier}}))


Logger = TensorBoard | Wandb

LOGGERS: dict[str, tuple[str, type[Logger]]] = {
    "tensorboard": ("TensorBoard", TensorBoard),
    "wandb": ("W&B", Wandb),
}
"""By the recipe's field, which is also the name of the package."""


PACE_STEPS = 8
"""Number of newest RL steps that predict the time left: responses grow, so the first steps predict little."""

_FIGURES = (
    ("rollout/bubble_fraction", "bubble", "{:.0%}"),
    ("rollout/mean_accept_length", "accept length", "{:.2f}"),
    ("mismatch/kl", "mismatch KL", "{:.1e}"),
)


def step_text(report: StepReport, measures: Mapping[str, float], time_left: str) -> str:
    """Return the lines printed for an RL step.

    Reward, tokens and time; seconds by stage; further `measures` (`step_metrics`), in lines of about 80 columns; notes.
    `time_left` is the time until the run's end.

    >>> print(step_text(report, report.measures, "0:01:20"))  # doctest: +SKIP
    step 3: reward 0.250, 652 tokens in 2.72 s, policy beg-mab, 0:01:20 left
      seconds: rollout 2.39, reward 0.01, inference 0.02, train 0.18, sync 0.12
      273 tokens/s, bubble 46%, accept length 2.31, mismatch KL 2.2e-13
      length p50 20, p90 118, p99 128, cut 12%
    """
    stages = [f"{name} {seconds:.2f}" for name, seconds in report.stages.items()]
    figures = [f"{name} {form.format(measures[key])}" for key, name, form in _FIGURES if key in measures]
    if report.rollout_s:
        figures.insert(0, f"{report.num_tokens / report.rollout_s:.0f} tokens/s")
    lengths = [f"p{rank} {measures[key]:.0f}" for rank in LENGTH_PERCENTILES if (key := f"length/p{rank}") in measures]
    if "length/truncated_fraction" in measures:
        lengths.append(f"cut {measures['length/truncated_fraction']:.0%}")
    return "\n".join(
        [
            f"{report}, {time_left} left",
            f"  seconds: {', '.join(stages)}",
            *([f"  {', '.join(figures)}"] if figures else []),
            *([f"  length {', '.join(lengths)}"] if lengths else []),
            *(f"  {note}" for note in report.notes),
        ]
    )
