"""What whoever watches a run sees: text of each RL step, above a progress bar where there is a terminal."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from statistics import fmean

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tltlab.console import progress

from .metrics import LENGTH_PERCENTILES
from .rows import StepReport

PACE_STEPS = 8
"""The time left follows from so many of the newest RL steps: responses grow, and what the first took says little."""

_FIGURES = (
    ("rollout/bubble_fraction", "bubble", "{:.0%}"),
    ("rollout/mean_accept_length", "accept length", "{:.2f}"),
    ("mismatch/kl", "mismatch KL", "{:.1e}"),
)


def step_text(report: StepReport, measures: Mapping[str, float], left: str) -> str:
    """What is said of an RL step: reward, tokens and time; seconds by stage; what else `measures`
    (`metrics.step_metrics`) has, in lines of about 80 columns; notes. `left` is the time that the run still takes.

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
            f"step {report.rl_step}: reward {report.reward_mean:.3f}, {report.num_tokens} tokens "
            f"in {report.seconds:.2f} s, policy {report.policy}, {left} left",
            f"  seconds: {', '.join(stages)}",
            *([f"  {', '.join(figures)}"] if figures else []),
            *([f"  length {', '.join(lengths)}"] if lengths else []),
            *(f"  {note}" for note in report.notes),
        ]
    )


class Screen:
    """Says what happens on standard error, as plain lines; `total_steps` are the RL steps from 0 on."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._pace: deque[float] = deque(maxlen=PACE_STEPS)

    def say(self, text: str) -> None:
        progress(text)

    def step(self, report: StepReport, measures: Mapping[str, float]) -> None:
        """Say what an RL step did."""
        self._pace.append(report.seconds)
        # Evaluations and checkpoints between the steps are not in it.
        left_s = fmean(self._pace) * max(self._total_steps - report.rl_step - 1, 0)
        left = str(timedelta(seconds=math.ceil(left_s)))
        self.say(step_text(report, measures, left))
        self._done(report, left)

    def close(self) -> None:
        pass

    def _done(self, report: StepReport, left: str) -> None:
        pass


class Bar(Screen):
    """The lines pass above a progress bar at the bottom of the terminal."""

    def __init__(self, console: Console, total_steps: int, resume_from: int) -> None:
        super().__init__(total_steps)
        self._progress = Progress(
            TextColumn("RL steps"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[reward]}"),
            TimeElapsedColumn(),
            # Not rich's own, which forgets steps of more than half a minute.
            TextColumn("{task.fields[left]}"),
            console=console,
            expand=True,
            refresh_per_second=2,
            redirect_stdout=False,  # --json's object goes there
        )
        self._task = self._progress.add_task("", total=total_steps, completed=resume_from, reward="", left="")
        self._progress.start()

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()

    def _done(self, report: StepReport, left: str) -> None:
        reward = f"reward {report.reward_mean:.3f}"
        self._progress.update(self._task, completed=report.rl_step + 1, reward=reward, left=f"left {left}")


def screen(total_steps: int, resume_from: int) -> Screen:
    """A progress bar from `resume_from` to `total_steps` where standard error is a terminal, else plain lines."""
    console = Console(stderr=True)
    # FORCE_COLOR, which CI services set, makes rich see a terminal in a file.
    if console.is_terminal and not console.is_dumb_terminal and console.file.isatty():
        return Bar(console, total_steps, resume_from)
    return Screen(total_steps)
