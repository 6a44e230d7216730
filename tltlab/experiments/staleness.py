"""staleness: the same GRPO run with a drafter that is trained throughout, for the first RL steps only, and not at all.

Speculation is lossless, so the policy goes the same way in all three but for chance. `live` rows are what the engines
kept of the drafts. In the run that trains throughout, every drafter that ever served is annotated on later responses
too: `same responses` rows compare the one that training would have left with the one in service, text by text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field

from tltlab.charts import COLORS, finish
from tltlab.coordination.schedule import DriftSummary, ScheduleConfig, TrainingSchedule
from tltlab.errors import ConfigError, RunError
from tltlab.stats import Interval, paired_interval
from tltlab.traces.trace import Trace, read

from . import Progress, models
from .models import Count, Prepared, RunSettings, on_devices, prepared
from .result import ExperimentResult, whole_numbers, with_interval

FROZEN, STOPPED, ADAPTIVE = "frozen", "stopped", "adaptive"
_ENOUGH_STEPS = 5
_NEXT_SEED = 1_000_000
"""RL steps of the run with the n-th seed are numbered from n times this on where seeds are taken together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessSettings(RunSettings):
    """`steps` RL steps of each run, `stop_after` the ones in which the stopped one still trains, over `seeds` seeds.

    Rollouts run on `workers` engines; their idle ones train. `annotate` responses per engine and RL step are annotated.
    """

    steps: Annotated[int, Field(ge=2)] = 12
    stop_after: Count = 4
    seeds: Count = 1
    workers: Annotated[int, Field(ge=2)] = 4
    annotate: Count = 8


FAST: Mapping[str, Any] = models.FAST | {"steps": 3, "stop_after": 1, "workers": 2}


def run(settings: StalenessSettings, *, folder: Path, seed: int, progress: Progress) -> ExperimentResult:
    """The experiment; a model that is trained stays in `folder`/models. RunError where nothing was drafted."""
    if settings.stop_after >= settings.steps:
        raise ConfigError(f"stop_after={settings.stop_after}: of steps={settings.steps} none is left without training")
    stops = {FROZEN: 0, STOPPED: settings.stop_after, ADAPTIVE: settings.steps}
    rows: list[dict[str, Any]] = []
    with prepared(settings, folder, progress, workers=settings.workers, steps=settings.steps, heldout=0) as work:
        for number in range(seed, seed + settings.seeds):
            traces = {}
            for name, stop in stops.items():
                progress(f"{name}: {settings.steps} RL steps, training in the first {stop}, seed {number}")
                traces[name] = _run(settings, work, work.out / f"{name}-{number}", number, stop, progress)
            rows += [row for name, trace in traces.items() for row in live_rows(trace, name, number)]
            rows += same_responses(traces[ADAPTIVE], settings.stop_after, number)
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
    drafter = trained_beside(work.head, work.sizes).model_copy(update={"annotate": settings.annotate})
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
        _row("live", name, seed, step.rl_step)
        | {
            "drafter_age": int(steps[step.rl_step]["drafter_age"]),
            "drafter_updates": int(steps[step.rl_step]["drafter_updates"]),
            "accept_length": step.accept_length,
            "drafts": step.drafts,
            "target_moved": float(steps[step.rl_step]["drift_kl"]),
        }
        for step in drafts
    ]


def same_responses(trace: Trace, stop_after: int, seed: int) -> list[dict[str, Any]]:
    """Two rows per RL step from `stop_after` on: the drafter that came into service then, and the one in service now.

    RL steps in which either was not annotated are left out.
    """
    from tltlab.runtime.drafter.offline.chains import walk

    rows = trace.acceptance
    if rows is None:
        return []
    pairs = []
    for step in sorted({int(n) for n in rows["rl_step"]} - set(range(stop_after + 1))):
        of_step = rows[rows["rl_step"] == step]
        sides = []
        for name, age in ((STOPPED, step - stop_after), (ADAPTIVE, int(of_step["drafter_age"].min()))):
            drafter = of_step[of_step["drafter_age"] == age]
            texts = [[int(n) for n in tokens] for tokens in drafter["accept_if_drafted"]]
            accepted = [text[at] for text in texts for at in walk(text)]
            if accepted:
                sides.append(
                    _row("same responses", name, seed, step)
                    | {
                        "drafter_age": age,
                        "drafter_updates": int(drafter["drafter_updates"].iloc[0]),
                        "accept_length": 1 + sum(accepted) / len(accepted),
                        "drafts": len(accepted),
                        "target_moved": None,
                    }
                )
        pairs += sides if len(sides) == 2 else []
    return pairs


def _row(part: str, name: str, seed: int, rl_step: int) -> dict[str, Any]:
    return {"part": part, "run": name, "seed": seed, "rl_step": rl_step}


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """Accept lengths over those of the drafter that is trained throughout, in the RL steps after the stop, and `aging`,
    how that of the stopped drafter changes with its age. None where no RL step tells.
    """

    stopped: Interval | None
    frozen: Interval | None
    same_responses: Interval | None
    aging: DriftSummary
    num_steps: int


def summary(rows: Sequence[Mapping[str, Any]], stop_after: int, rng: np.random.Generator) -> Staleness:
    """The figures of the verdict, of all seeds together; intervals are over RL steps."""
    late = [row for row in rows if row["rl_step"] > stop_after]
    stopped = _lengths(late, "live", STOPPED)
    schedule = TrainingSchedule(ScheduleConfig(kind="never"), pretrained=True)
    seeds = sorted({row["seed"] for row in rows})
    for n, seed in enumerate(seeds):
        # A level of its own for each seed: to the schedule, a training lies between them.
        schedule.trained(n * _NEXT_SEED + stop_after - 1, updates=1)
        for row in rows:
            if (row["part"], row["run"], row["seed"]) == ("live", STOPPED, seed) and row["rl_step"] >= stop_after:
                schedule.rollout_done(
                    n * _NEXT_SEED + row["rl_step"], row["accept_length"], row["target_moved"], drafts=row["drafts"]
                )
    return Staleness(
        stopped=_ratio(stopped, _lengths(late, "live", ADAPTIVE), rng),
        frozen=_ratio(_lengths(late, "live", FROZEN), _lengths(late, "live", ADAPTIVE), rng),
        same_responses=_ratio(
            _lengths(late, "same responses", STOPPED), _lengths(late, "same responses", ADAPTIVE), rng
        ),
        aging=schedule.summary(),
        num_steps=len(stopped),
    )


def _lengths(rows: Sequence[Mapping[str, Any]], part: str, name: str) -> dict[tuple[int, int], float]:
    return {
        (row["seed"], row["rl_step"]): row["accept_length"] for row in rows if (row["part"], row["run"]) == (part, name)
    }


def _ratio(
    ours: Mapping[tuple[int, int], float], theirs: Mapping[tuple[int, int], float], rng: np.random.Generator
) -> Interval | None:
    keys = sorted(ours.keys() & theirs.keys())
    return paired_interval([ours[key] for key in keys], [theirs[key] for key in keys], rng=rng) if keys else None


def verdict(losses: Staleness, stop_after: int) -> str:
    """What is lost without training, and whether the drafter itself goes stale or only learns no more."""
    aging = losses.aging
    few = ", though so few RL steps tell little" if losses.num_steps < _ENOUGH_STEPS else ""
    sentence = (
        f"measured here, a drafter trained in its first {_steps(stop_after)} and then left alone keeps "
        f"{_of(losses.stopped)} times the accept length of one trained throughout over {_steps(losses.num_steps)} "
        f"after that (on the same responses {_of(losses.same_responses)}; never trained {_of(losses.frozen)}){few}"
    )
    if math.isnan(aging.change):
        return f"{sentence}; too few RL steps to say how it ages by itself."
    change = with_interval(100 * aging.change, 100 * aging.low, 100 * aging.high, "+.2f")
    if aging.high < 0:
        meaning = "so it goes stale as the target moves"
    elif aging.low > 0:
        meaning = "so it does not go stale: later texts are easier to draft for"
    else:
        meaning = "a fall that cannot be told from none" if aging.change < 0 else "which is no fall"
        if losses.stopped is not None and losses.stopped.high < 1:
            meaning += ", so what it lacks against the other is training more than freshness"
    moved = "" if aging.drift_kl is None else f"; the target moves {aging.drift_kl:.2g} nats per token and RL step"
    return f"{sentence}; by itself it changes by {change} % per RL step of age, {meaning}{moved}."


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
        "idle workers train as long as they are idle, so drafter_updates differ from run to run; on the same responses "
        "both drafters are of one run",
        "target_moved is how far the update of the policy after the RL step moved it, in nats per token",
    )


def _picture(frame: pd.DataFrame, stop_after: int) -> Figure:
    """Accept length by RL step of the three runs with the stopped drafter's age, and on the same responses by age."""
    figure = Figure(figsize=(7.2, 5.2), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(3, 2))
    live = frame[frame["part"] == "live"].groupby(["run", "rl_step"])[["accept_length", "drafter_age"]].mean()
    for name, color, dash, marker in (
        (ADAPTIVE, COLORS[0], "-", "o"),
        (STOPPED, "#a0452a", (0, (5, 2)), "s"),
        (FROZEN, "#6f6f6f", (0, (1, 1.2)), "^"),
    ):
        rows = live.loc[name]
        above.plot(rows.index, rows["accept_length"], color=color, linestyle=dash, marker=marker, markersize=4,
                   linewidth=1.5, label=name)  # fmt: skip
    above.axvline(stop_after - 0.5, color="#a0452a", linewidth=0.8)
    aged = live.loc[STOPPED]
    for step, row in aged[aged.index > stop_after].iterrows():
        above.annotate(f"{row['drafter_age']:.0f}", (step, row["accept_length"]), xytext=(0, -11), fontsize=7,
                       textcoords="offset points", ha="center", color="#a0452a")  # fmt: skip
    above.legend(fontsize=8, frameon=False)
    # 1 is a draft of which nothing is kept.
    above.set_ylim(bottom=1.0)
    whole_numbers(above)
    finish(above, title="Accept length of live drafts; below the stopped drafter's points its age", xlabel="RL step",
           ylabel="tokens per draft")  # fmt: skip
    same = frame[frame["part"] == "same responses"]
    if len(same):
        ages = same[same["run"] == STOPPED].set_index(["seed", "rl_step"])
        fresh = same[same["run"] == ADAPTIVE].set_index(["seed", "rl_step"])["accept_length"]
        below.plot(ages["drafter_age"], ages["accept_length"] / fresh, linestyle="none", marker="s", markersize=5,
                   color="#a0452a")  # fmt: skip
    below.axhline(1.0, color="#6f6f6f", linewidth=0.9, linestyle=(0, (4, 2)))
    below.set_xlim(0.7, live.index.get_level_values("rl_step").max() - stop_after + 0.3)
    whole_numbers(below)
    finish(below, title=f"The drafter of RL step {stop_after} over the one in service, on the same responses",
           xlabel="its age, RL steps", ylabel="accept length, ratio")  # fmt: skip
    return figure
