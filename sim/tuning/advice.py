"""Is a trained drafter worth its time here: `advise`, from a trace's or run's own drift, acceptance and idle time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

import numpy as np
import pandas as pd

from tltlab.acceptance.base import Acceptance, GeometricAcceptance
from tltlab.acceptance.freshness import Base, FreshAcceptance, Freshness
from tltlab.acceptance.replay import TraceAcceptance
from tltlab.calibration.acceptance.freshness import fit_freshness
from tltlab.calibration.acceptance.measured import fit_acceptance
from tltlab.calibration.idle_training import fit_spot, recorded_updates
from tltlab.console import table
from tltlab.coordination.gate import Attempt, RolloutDrift, training_cost
from tltlab.coordination.progress import SpotTraining
from tltlab.coordination.schedule import ScheduleConfig, TrainingSchedule
from tltlab.costs.stages import STAGES
from tltlab.errors import ConfigError
from tltlab.importers.sources import TraceSource, read
from tltlab.planning.system_binding import LEARNED_DEFAULT
from tltlab.sim.config import SimulationConfig, load_spot_training
from tltlab.sim.scenario import Scenario
from tltlab.stats import Interval, interval_json
from tltlab.strategy import MODEL_FREE
from tltlab.traces.trace import Trace

from .drift import SCHEDULES, LevelDrift, Surface, compared, saved

ASSUMED_ACCEPT = 0.7
AGE_FACTOR = 5.0
"""Where the drift is assumed, its RL steps lie between this part and this multiple of the default's."""

_ENOUGH = 2
"""Rollouts with and without training from which what it takes of them can be told."""


@dataclass
class _Basis:
    """What the verdict rests on, as sentences: what the trace shows, and what had to be assumed."""

    known: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The verdict on training a drafter, with what it rests on.

    `rows` are those of `drift.compared`; `known` and `assumed` say where each part comes from, as sentences.
    `idle_share` is that of the workers' time in rollouts, `updates` what it is good for in an RL step, `step_s` an RL
    step with the drafter frozen, and `saved_s` what each schedule saves of it, net of what training takes, with 95 %
    intervals over luck and over what is assumed.
    """

    verdict: str
    train: str
    rows: pd.DataFrame
    rl_steps: int
    step_s: float
    idle_share: float
    updates: float
    drafter: str
    known: tuple[str, ...]
    assumed: tuple[str, ...]

    @property
    def saved_s(self) -> dict[str, Interval]:
        return {name: saved(self.rows, name) for name in SCHEDULES}

    def json(self) -> dict[str, Any]:
        """One JSON object; ends of intervals that are not known are null."""
        schedules = []
        for row in self.rows.to_dict("records"):
            schedules.append(
                {
                    "name": row["schedule"], "step_s": row["step_s"],
                    "saved_s": interval_json(self.saved_s[row["schedule"]]),
                    "trainings": row["trainings"], "swaps": row["swaps"], "level": row["level"],
                    "over_best": row["over_best"],
                }
            )  # fmt: skip
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "rows"}
        return values | {"schedules": schedules, "figures": "simulated"}

    def text(self) -> str:
        """The same for people, words first."""
        cells = [
            (
                row["schedule"], f"{row['step_s']:.4g}", f"{row['saved_s']:+.3g}",
                f"[{row['saved_low']:+.3g}, {row['saved_high']:+.3g}]", f"{row['trainings']:.0f}",
                f"{row['level']:.0%}",
            )
            for row in self.rows.to_dict("records")
        ]  # fmt: skip
        header = ["drafter", "RL step s", "saved s", "95 % interval", "trained", "mean level"]
        facts = [("known", line) for line in self.known] + [("assumed", line) for line in self.assumed]
        rows = table(header, cells)
        return "\n".join([self.verdict, "", rows, "", table([], facts, words=True)])


def advise(
    source: TraceSource,
    config: SimulationConfig = SimulationConfig(),
    *,
    slowdown: float | None = None,
    rl_steps: int = 100,
    seeds: int = 8,
) -> Advice:
    """Whether to leave the drafter frozen, train it in idle time, or train it with a gate, over `rl_steps` RL steps.

    The trace's RL steps are simulated over and over, while the drafter drifts and learns. `slowdown` is the share by
    which training beside it stretches a rollout, None for what the trace shows. `config` names costs, acceptance,
    workers and spot training that replace the trace's. Raises ConfigError for what is missing and for fewer than 10
    RL steps or 2 seeds.
    """
    if rl_steps < 10 or seeds < 2:
        raise ConfigError(f"advise plays at least 10 RL steps under 2 seeds, got {rl_steps} and {seeds}")
    if slowdown is not None and not 0.0 <= slowdown <= 10.0:
        raise ConfigError(f"slowdown is a share from 0 to 10 of the rollout's time, got {slowdown:g}")
    trace = read(source)
    basis = _Basis()
    acceptance, drafter = _acceptance(trace, config, basis)
    spot = _spot(trace, config, basis)
    freshness = acceptance.freshness if isinstance(acceptance, FreshAcceptance) else None
    base = acceptance.base if isinstance(acceptance, FreshAcceptance) else cast("Base", acceptance)
    scenario = Scenario.of(trace, replace(config, acceptance=base, spot=spot))
    basis.known.append(f"costs: {scenario.costs_name}; {scenario.workers} workers")
    surface = Surface.of(scenario, base, drafter, _rest_s(trace, basis))
    if freshness is not None:
        basis.known.append("drift: the acceptance file's freshness")
    if slowdown is None:
        slowdown = _slowdown(trace, basis)
    draw = _drift(trace, drafter, freshness, surface, slowdown, basis)
    rng = np.random.default_rng([config.seed, 7])
    drifts = [draw(rng) for _ in range(seeds)]
    rows = compared(surface, drifts, rl_steps, [config.seed + i for i in range(seeds)])
    updates = float(surface.updates[-1].mean())
    verdict, train = _verdict(rows, surface, updates)
    return Advice(
        verdict=verdict,
        train=train,
        rows=rows,
        rl_steps=rl_steps,
        step_s=float(rows["step_s"].iloc[0]),
        idle_share=surface.idle_share,
        updates=updates,
        drafter=drafter,
        known=tuple(basis.known),
        assumed=tuple(basis.assumed),
    )


def _verdict(rows: pd.DataFrame, surface: Surface, updates: float) -> tuple[str, str]:
    """The sentence, and the name of the schedule that it recommends."""
    step_s = float(rows["step_s"].iloc[0])
    if updates < 1.0 and not surface.updates.any():
        return (
            f"simulated, leave the drafter frozen: workers are idle for {surface.idle_share:.0%} of their time in "
            "rollouts, and never long enough for one update",
            "frozen",
        )
    idle, gated = saved(rows, "idle time"), saved(rows, "gated")
    best = "gated" if gated.estimate >= idle.estimate else "idle time"
    gain = gated if best == "gated" else idle
    second = idle if best == "gated" else gated
    action = "train the drafter with a gate" if best == "gated" else "train the drafter in all idle time"
    alternative = f"{'without a gate' if best == 'gated' else 'with a gate'} it would be {second.estimate:+.3g} s"
    size = f"{gain.estimate:+.3g} s of {step_s:.4g} s per RL step, 95 % interval {gain.low:+.3g} to {gain.high:+.3g}"
    if gain.low > 0:
        return f"simulated, {action}: it saves {size}; {alternative}", best
    reason = "training takes more than it brings" if gain.high < 0 else "training is not sure to save anything"
    return f"simulated, leave the drafter frozen: {reason} ({size}; {alternative})", "frozen"


def _acceptance(trace: Trace, config: SimulationConfig, basis: _Basis) -> tuple[Acceptance, str]:
    """A model whose chances can be scaled, and the drafter to train."""
    model, name = config.find_acceptance(trace)
    if isinstance(model, TraceAcceptance) or (model is not None and model.varies_by == "position"):
        rows = trace.iterations
        model, name = (None if rows is None else fit_acceptance(rows)[0]), "measured in the trace's iterations"
    drafters = [] if model is None else [d for d in model.drafters if d not in MODEL_FREE]
    if model is not None and (drafters or model.knows("learned")):
        basis.known.append(f"acceptance: {name}")
        return model, model.trained_drafter or (drafters[0] if drafters else "learned")
    basis.assumed.append(
        f"acceptance: the trace knows no learned drafter; one is taken whose tokens are kept with {ASSUMED_ACCEPT:g} "
        "when it is fresh"
    )
    return GeometricAcceptance(alpha=ASSUMED_ACCEPT), "learned"


def _spot(trace: Trace, config: SimulationConfig, basis: _Basis) -> SpotTraining:
    if config.spot is not None:
        basis.known.append("training's rates: as given")
        return load_spot_training(config.spot)
    try:
        fitted = fit_spot(trace).model
    except ConfigError:
        basis.assumed.append(
            "training's rates: TLT's, one worker trains 29.6 samples of 2,048 tokens a second after 5 s"
        )
        return SpotTraining()
    basis.known.append("training's rates: fitted to spot_training.parquet")
    # The runtime's trainers finish the update under way, and that is what yielding takes.
    return fitted.model_copy(update={"on_stop": "finish", "yield_s": 0.0})


def _rest_s(trace: Trace, basis: _Basis) -> float:
    """Mean seconds of the stages behind the rollout."""
    steps = trace.steps
    if steps is None or steps[list(STAGES)].isna().all().all():
        basis.assumed.append("the other stages: none, so an RL step is its rollout")
        return 0.0
    rest_s = float(steps[list(STAGES)].fillna(0.0).sum(axis=1).mean())
    basis.known.append(f"the other stages: {rest_s:.3g} s of an RL step, recorded")
    return rest_s


def _rollouts(trace: Trace, drafter: str) -> list[tuple[RolloutDrift, int]]:
    """The recorded rollouts with their drafts by the drafter; accepted lengths from iterations, else from `steps`."""
    steps, iterations = trace.steps, trace.iterations
    if steps is None:
        return []
    tokens = trace.outcomes.groupby("rl_step")["response_tokens"].sum()
    lengths: dict[int, tuple[float, int]] = {}
    if "accept_length" in steps:
        lengths = {
            int(r): (float(a), 1000) for r, a in zip(steps["rl_step"], steps["accept_length"], strict=True) if a > 0
        }
    if iterations is not None:
        mine = iterations[(iterations["draft_depth"] > 0) & (iterations["drafter"] == drafter)]
        for rl_step, rows in mine.groupby("rl_step"):
            drafts = int(rows["batch"].sum())
            lengths[int(str(rl_step))] = (1.0 + float(rows["num_accepted"].sum()) / drafts, drafts)
    rollouts = []
    for rl_step, rollout_s in zip(steps["rl_step"].tolist(), steps["rollout_s"].tolist(), strict=True):
        length, drafts = lengths.get(rl_step, (None, 0))
        took = rollout_s if rollout_s == rollout_s else 0.0
        row = RolloutDrift(rl_step=rl_step, rollout_s=took, tokens=int(tokens.get(rl_step, 0)), accept_length=length)
        rollouts.append((row, drafts))
    return rollouts


def _slowdown(trace: Trace, basis: _Basis) -> float:
    """The share by which training stretches a rollout, by the fit that the gate makes."""
    rows, spot = [row for row, _ in _rollouts(trace, "learned")], trace.spot_training
    updates = {} if spot is None else recorded_updates(spot)
    trained = {step for step, num_updates in updates.items() if num_updates}
    with_it = sum(row.rl_step in trained for row in rows)
    if spot is None or min(with_it, len(rows) - with_it) < _ENOUGH:
        basis.assumed.append(
            "training beside a rollout does not slow it down: the trace cannot tell; say it with --slowdown"
        )
        return 0.0
    delays = spot.groupby("rl_step")["yield_s"].max().fillna(0.0)
    attempts = [Attempt(rl_step=step, delay_s=float(delays[step])) for step in sorted(trained)]
    slowdown = max(0.0, training_cost(rows, attempts).slowdown)
    basis.known.append(f"training beside a rollout slows it by {slowdown:.1%}, fitted to {len(rows)} rollouts")
    return slowdown


def _drift(
    trace: Trace,
    drafter: str,
    freshness: Freshness | None,
    surface: Surface,
    slowdown: float,
    basis: _Basis,
) -> Callable[[np.random.Generator], LevelDrift]:
    """How the drafter drifts, as a function that draws one of the drifts which the trace leaves possible."""
    updates = max(float(surface.updates[-1].mean()), 1.0)
    table_ = trace.acceptance
    if freshness is None and table_ is not None:
        mine = table_["drafter"] == drafter
        try:
            freshness = fit_freshness(table_[mine & (table_["drafter_age"] >= 0)], drafter).freshness
            basis.known.append("drift: fitted to the ages and updates in acceptance.parquet")
        except (ConfigError, KeyError):
            freshness = None
    if freshness is not None:
        fitted = freshness
        return lambda rng: LevelDrift(name="the trace's", about="", freshness=fitted, slowdown=slowdown)
    schedule = TrainingSchedule(ScheduleConfig(kind="never"), pretrained=True)
    updates_of = {} if trace.spot_training is None else recorded_updates(trace.spot_training)
    for row, drafts in _rollouts(trace, drafter):
        schedule.rollout_done(row.rl_step, row.accept_length, drafts=drafts)
        schedule.trained(row.rl_step, updates_of.get(row.rl_step, 0))
    drift = schedule.summary()
    default = Freshness()
    if not math.isnan(drift.change):
        basis.known.append(f"drift: {drift.sentence[0].lower()}{drift.sentence[1:]}")
        spread = (drift.high - drift.low) / 4.0
        floor = 0.4

        def measured(rng: np.random.Generator) -> LevelDrift:
            change = min(float(rng.normal(drift.change, spread)), -1e-6)
            top = float(surface.accept_length[-1])
            level = float(np.interp(top * (1.0 + change), surface.accept_length, surface.levels))
            steps = (1.0 - floor) / max(1.0 - level, 1e-9)
            fresh = Freshness(untrained=floor, floor=floor, age_steps=steps, updates_to_train=default.updates_to_train)
            return LevelDrift(name="the trace's", about="", freshness=fresh, slowdown=slowdown)

        return measured
    basis.assumed.append(
        f"drift: the trace does not show it; {default.age_steps / AGE_FACTOR:g} to {default.age_steps * AGE_FACTOR:g} "
        f"RL steps until a frozen drafter has lost two thirds of what training brought, a factor of {default.floor:g} "
        f"on each token's chance ({LEARNED_DEFAULT})"
    )

    def guessed(rng: np.random.Generator) -> LevelDrift:
        age_steps = default.age_steps * AGE_FACTOR ** rng.uniform(-1.0, 1.0)
        fresh = default.model_copy(update={"age_steps": age_steps, "updates_to_train": min(3.0, updates)})
        return LevelDrift(name="assumed", about="", freshness=fresh, slowdown=slowdown)

    return guessed
