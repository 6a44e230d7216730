"""staleness: the same GRPO run with a drafter that is trained throughout, for the first RL steps only, and not at all.

Speculation is lossless, so the policy goes the same way in all three but for chance. Accept lengths are of what engines
kept of the drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field

from tltlab.charts import COLORS, finish
from tltlab.coordination.schedule import ScheduleConfig
from tltlab.errors import ConfigError, RunError
from tltlab.stats import Interval, paired_interval
from tltlab.traces.trace import Trace, read

from . import Progress, models
from .models import Count, Prepared, RunSettings, on_devices, prepared
from .result import ExperimentResult, whole_numbers, with_interval

FROZEN, STOPPED, ADAPTIVE = "frozen", "stopped", "adaptive"
_ENOUGH_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessSettings(RunSettings):
    """`steps` RL steps of each run, `stop_after` the ones in which the stopped one still trains, over `seeds` seeds.

    Rollouts run on `workers` engines; their idle ones train.
    """

    steps: Annotated[int, Field(ge=2)] = 12
    stop_after: Count = 4
    seeds: Count = 1
    workers: Annotated[int, Field(ge=2)] = 4


FAST: Mapping[str, Any] = models.FAST | {"steps": 3, "stop_after": 1, "workers": 2}


def run(settings: StalenessSettings, *, folder: Path, seed: int, progress: Progress) -> ExperimentResult:
    """The experiment; a model that is trained stays in `folder`/models. RunError where nothing was drafted."""
    if settings.stop_after >= settings.steps:
        raise ConfigError(f"stop_after={settings.stop_after}: of steps={settings.steps} none is left without training")
    stops = {FROZEN: 0, STOPPED: settings.stop_after, ADAPTIVE: settings.steps}
    rows: list[dict[str, Any]] = []
    with prepared(settings, folder, progress, workers=settings.workers, steps=settings.steps, heldout=0) as work:
        for number in range(seed, seed + settings.seeds):
            for name, stop in stops.items():
                progress(f"{name}: {settings.steps} RL steps, training in the first {stop}, seed {number}")
                trace = _run(settings, work, work.out / f"{name}-{number}", number, stop, progress)
                rows += live_rows(trace, name, number)
    losses = summary(rows, settings.stop_after, np.random.default_rng(seed))
    frame = pd.DataFrame(rows)
    return ExperimentResult(
        verdict=verdict(losses, settings.stop_after),
        rows=frame,
        figure=_picture(frame, settings.stop_after),
        prediction=False,
        notes=_notes(settings, work.model, losses),
    )


def _run(settings: StalenessSettings, work: Prepared, out: Path, seed: int, stop: int, progress: Progress) -> Trace:
    """A run whose idle workers train the drafter in the first `stop` RL steps, and never after."""
    from tltlab.runtime.models.runs import fixed_depth, recipe_of, trained_beside
    from tltlab.runtime.run.grpo import GrpoRun

    policy = fixed_depth(work.out / "policy.json", settings.draft_depth)
    drafter = trained_beside(work.head, work.sizes).model_copy(update={"annotate": 0})
    recipe = recipe_of(work.model, work.sizes, seed=seed, policy=policy, drafter=drafter)
    with GrpoRun(on_devices(recipe, settings), out) as grpo:
        for rl_step in range(settings.steps):
            if rl_step == stop:
                drafting: Any = grpo.drafting
                drafting.schedule.config = ScheduleConfig(kind="never")
            progress(str(grpo.step()))
    return read(out / "trace")


def live_rows(trace: Trace, name: str, seed: int) -> list[dict[str, Any]]:
    """A row per RL step: the drafter's age and updates, what was kept of its drafts, how far the policy then moved."""
    from tltlab.runtime.drafter.offline.runs import live_drafts
    from tltlab.runtime.models.runs import DRAFTER

    assert trace.steps is not None
    steps: Any = trace.steps.set_index("rl_step").to_dict("index")
    drafts = live_drafts(trace, DRAFTER)
    if not drafts:
        raise RunError(f"the learned drafter drafted nothing in the run {name}")
    return [
        {
            "run": name,
            "seed": seed,
            "rl_step": step.rl_step,
            "drafter_age": int(steps[step.rl_step]["drafter_age"]),
            "drafter_updates": int(steps[step.rl_step]["drafter_updates"]),
            "accept_length": step.accept_length,
            "drafts": step.drafts,
            "target_moved": float(steps[step.rl_step]["drift_kl"]),
        }
        for step in drafts
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """Accept lengths over those of the drafter that is trained throughout, in the RL steps after the stop.

    None where no RL step tells.
    """

    stopped: Interval | None
    frozen: Interval | None
    num_steps: int


def summary(rows: Sequence[Mapping[str, Any]], stop_after: int, rng: np.random.Generator) -> Staleness:
    """The figures of the verdict, of all seeds together; intervals are over RL steps."""
    late = [row for row in rows if row["rl_step"] > stop_after]
    stopped, trained = _lengths(late, STOPPED), _lengths(late, ADAPTIVE)
    return Staleness(
        stopped=_ratio(stopped, trained, rng),
        frozen=_ratio(_lengths(late, FROZEN), trained, rng),
        num_steps=len(stopped),
    )


def _lengths(rows: Sequence[Mapping[str, Any]], name: str) -> dict[tuple[int, int], float]:
    return {(row["seed"], row["rl_step"]): row["accept_length"] for row in rows if row["run"] == name}


def _ratio(
    ours: Mapping[tuple[int, int], float], theirs: Mapping[tuple[int, int], float], rng: np.random.Generator
) -> Interval | None:
    keys = sorted(ours.keys() & theirs.keys())
    return paired_interval([ours[key] for key in keys], [theirs[key] for key in keys], rng=rng) if keys else None


def verdict(losses: Staleness, stop_after: int) -> str:
    """What is lost without training."""
    few = ", though so few RL steps tell little" if losses.num_steps < _ENOUGH_STEPS else ""
    return (
        f"measured here, a drafter trained in its first {_steps(stop_after)} and then left alone keeps "
        f"{_of(losses.stopped)} times the accept length of one trained throughout over {_steps(losses.num_steps)} "
        f"after that (never trained {_of(losses.frozen)}){few}."
    )


def _steps(num: int) -> str:
    return f"{num} RL step{'s' * (num != 1)}"


def _of(interval: Interval | None) -> str:
    return "an unknown number of" if interval is None else with_interval(interval.estimate, interval.low, interval.high)


def _notes(settings: StalenessSettings, model: Path, losses: Staleness) -> tuple[str, ...]:
    return (
        f"{model}: runs of the same seed have the same prompts, model and first drafter; in each the drafter serves at "
        f"depth {settings.draft_depth} throughout, and what training leaves of an RL step serves from the next one on",
        "accept_length is tokens per verified draft, bonus included; intervals are of 95 % over RL steps"
        + (", too narrow below ten" if losses.num_steps < 10 else ""),
        "idle workers train as long as they are idle, so drafter_updates differ from run to run",
        "target_moved is how far the update of the policy after the RL step moved it, in nats per token",
    )


def _picture(frame: pd.DataFrame, stop_after: int) -> Figure:
    """Accept length by RL step of the three runs, with the stopped drafter's age."""
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.subplots()
    by_step = frame.groupby(["run", "rl_step"])[["accept_length", "drafter_age"]].mean()
    for name, color, dash, marker in (
        (ADAPTIVE, COLORS[0], "-", "o"),
        (STOPPED, "#a0452a", (0, (5, 2)), "s"),
        (FROZEN, "#6f6f6f", (0, (1, 1.2)), "^"),
    ):
        rows = by_step.loc[name]
        axes.plot(rows.index, rows["accept_length"], color=color, linestyle=dash, marker=marker, markersize=4,
                   linewidth=1.5, label=name)  # fmt: skip
    axes.axvline(stop_after - 0.5, color="#a0452a", linewidth=0.8)
    aged = by_step.loc[STOPPED]
    for step, row in aged[aged.index > stop_after].iterrows():
        axes.annotate(f"{row['drafter_age']:.0f}", (step, row["accept_length"]), xytext=(0, -11), fontsize=7,
                       textcoords="offset points", ha="center", color="#a0452a")  # fmt: skip
    axes.legend(fontsize=8, frameon=False)
    # 1 is a draft of which nothing is kept.
    axes.set_ylim(bottom=1.0)
    whole_numbers(axes)
    finish(axes, title="Accept length of live drafts; below the stopped drafter's points its age", xlabel="RL step",
           ylabel="tokens per draft")  # fmt: skip
    return figure
