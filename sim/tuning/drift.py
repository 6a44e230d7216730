"""Whether training the drafter pays: RL steps in which it drifts, learns and costs time, under a training schedule.

What a rollout takes, how many updates its idle time is good for and how long it waits for trainers are simulated at
several levels of the drafter, on a trace's lengths and costs; `LevelDrift` is how the level moves from step to step.
Schedules are those of a run (`tltlab.coordination.schedule`), and see what a run sees, with its noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from tltlab.acceptance.freshness import Base, Freshness
from tltlab.arrays import Floats
from tltlab.coordination.gate import Attempt
from tltlab.coordination.schedule import ScheduleConfig, TrainingSchedule
from tltlab.errors import ConfigError
from tltlab.policies.policy import Policy
from tltlab.policies.specs import TableRow, TableSpec
from tltlab.sim.scenario import Scenario
from tltlab.sim.simulate import accept_length
from tltlab.state import DrafterState
from tltlab.stats import Interval, mean_of_few, paired_interval
from tltlab.strategy import Strategy

from .oracle import ExpectedIteration

DEPTHS = (1, 2, 4, 8)
LEVELS = (0.1, 0.4, 0.55, 0.7, 0.8, 0.9, 1.0)
SCHEDULES = {"frozen": "never", "idle time": "always", "gated": "gated", "acceptance drops": "acceptance-drops"}
"""Names of what is compared, and the kinds of `ScheduleConfig`."""

DRAFTS = 3000
ROLLOUT_NOISE, TEXT_NOISE, PAIR_NOISE = 0.04, 0.03, 0.005
"""Relative scatter of a rollout's seconds, of accepted lengths from text to text, and of two drafters on one text."""


@dataclass(frozen=True, kw_only=True)
class LevelDrift:
    """How a drafter's level moves: the chance of its tokens over that of a fresh and fully trained one's.

    `ageing(t)` is by how many RL steps' worth of `freshness` the policy moves after RL step t, counted from 0, `start`
    the level that the run begins with. Training leads to the level `best`, by the updates that freshness says, and
    stretches the rollout beside it by the share `slowdown`.
    """

    name: str
    about: str
    freshness: Freshness
    ageing: Callable[[int], float] = lambda t: 1.0
    start: float = 1.0
    best: float = 1.0
    slowdown: float = 0.0

    def aged(self, level: float, rl_step: int) -> float:
        """What is left of a level after the policy's update of an RL step; one below the floor stays."""
        floor = min(self.freshness.floor, level)
        return floor + (level - floor) * math.exp(-self.ageing(rl_step) / self.freshness.age_steps)

    def trained(self, level: float, updates: float) -> float:
        return self.best - (self.best - level) * math.exp(-updates / self.freshness.updates_to_train)


@dataclass(frozen=True, kw_only=True)
class Surface:
    """A trace's rollouts at each of the levels: seconds, updates in the idle time and the wait for trainers to yield.

    `rollout_s`, `updates` and `delay_s` are (levels, RL steps); `accept_length` has the tokens per draft by level. The
    drafts are the best at each batch for that level, or none. `rest_s` is what an RL step takes besides.
    """

    levels: Floats
    rollout_s: Floats
    updates: Floats
    delay_s: Floats
    accept_length: Floats
    tokens: Floats
    idle_share: float
    rest_s: float = 0.0

    @classmethod
    def of(cls, scenario: Scenario, acceptance: Base, drafter: str, rest_s: float = 0.0) -> Surface:
        """Simulate the scenario, whose idle workers train, at each level. ConfigError where nothing can be drafted."""
        best = acceptance.at_best([drafter])
        strategies = [s for s in (Strategy.chain(drafter, depth) for depth in DEPTHS) if not best.outside(s)]
        if not strategies:
            raise ConfigError(f"the acceptance covers no chain of {drafter!r} of depth {', '.join(map(str, DEPTHS))}")
        rollout_s, updates, delay_s, accept, idle_s, worker_s = [], [], [], [], 0.0, 0.0
        for level in LEVELS:
            scaled = replace(scenario, acceptance=acceptance.scaled(drafter, level))
            rollouts = scaled.rollouts(_best_by_batch(scaled, strategies))
            rollout_s.append([r.makespan_s for r in rollouts])
            spots = [r.spot for r in rollouts if r.spot is not None]
            updates.append([s.trained.updates for s in spots])
            delay_s.append([s.release_delay_s for s in spots])
            idle_s += sum(s.idle_worker_s for s in spots)
            worker_s += sum(r.makespan_s * scenario.workers for r in rollouts)
            length = accept_length(rollouts)
            accept.append(math.nan if length is None else max(length, 1.0))
        lengths = np.array(accept)
        if np.isnan(lengths).all():
            raise ConfigError("with these costs and this acceptance no draft pays at any batch: nothing to train for")
        return cls(
            levels=np.array(LEVELS),
            rollout_s=np.array(rollout_s),
            updates=np.array(updates, np.float64),
            delay_s=np.array(delay_s, np.float64),
            accept_length=np.maximum.accumulate(np.where(np.isnan(lengths), 1.0, lengths)),
            tokens=np.array([float(sum(step.response_tokens)) for step in scenario.steps]),
            idle_share=idle_s / worker_s if worker_s else 0.0,
            rest_s=rest_s,
        )

    def at(self, values: Floats, level: float, rl_step: int) -> float:
        """One of the tables at a level, of the trace's RL steps over and over."""
        column = values if values.ndim == 1 else values[:, rl_step % values.shape[1]]
        return float(np.interp(level, self.levels, column))


def _best_by_batch(scenario: Scenario, strategies: Sequence[Strategy]) -> Policy:
    """At each batch the strategy of the least expected seconds per token, at the middle of a response's context."""
    expected = ExpectedIteration(scenario, strategies)
    lengths = [float(n) for step in scenario.steps for n in step.response_tokens]
    context = float(np.mean(lengths)) / 2 + float(np.mean([n for step in scenario.steps for n in step.prompt_tokens]))
    rows: list[TableRow] = []
    for batch in range(1, max(map(len, scenario.steps)) + 1):
        best = min(expected.strategies, key=lambda s: expected.seconds_per_token(s, batch, batch * context))
        if not rows or rows[-1].strategy != best:
            rows.append(TableRow(min_batch=batch, strategy=best))
    return Policy(selector=TableSpec(rows=tuple(rows)))


@dataclass(frozen=True, kw_only=True)
class ScheduleRun:
    """A run of RL steps under a schedule: `step_s` seconds each, levels in service, and the RL steps that trained."""

    step_s: Floats
    levels: Floats
    trained: tuple[int, ...]
    served: tuple[int, ...]


def play(surface: Surface, drift: LevelDrift, kind: str, rl_steps: int, seed: int) -> ScheduleRun:
    """Play `rl_steps` RL steps under the schedule `kind`; the same seed gives every kind the same luck.

    A trainer goes on from what it made, also where that did not go into service.
    """
    schedule = TrainingSchedule(ScheduleConfig(kind=kind), pretrained=True)  # type: ignore[arg-type]
    noise = np.random.default_rng([seed, 1]).standard_normal((rl_steps, 5))
    served = trainer = drift.start
    step_s, levels, trained, swapped = np.zeros(rl_steps), np.zeros(rl_steps), [], []
    for t in range(rl_steps):
        train = schedule.decide(t, DrafterState(updates=1)).train
        levels[t] = served
        luck = math.exp(ROLLOUT_NOISE * noise[t, 0] - ROLLOUT_NOISE**2 / 2)
        rollout_s = surface.at(surface.rollout_s, served, t) * luck
        updates = surface.at(surface.updates, served, t) if train else 0.0
        delay_s = surface.at(surface.delay_s, served, t) if updates >= 1.0 else 0.0
        if updates >= 1.0:
            rollout_s = rollout_s * (1.0 + drift.slowdown) + delay_s
            trained.append(t)
            trainer = drift.trained(trainer, updates)
            attempt = _judged(surface, t, delay_s, trainer, served, noise[t])
            schedule.attempted(attempt)
            if schedule.serves(attempt):
                served = trainer
                swapped.append(t)
                schedule.trained(t, updates=round(updates))
        length = surface.at(surface.accept_length, levels[t], t)
        spread = TEXT_NOISE * noise[t, 1] + math.sqrt(max(1.0 - 1.0 / length, 0.0) / DRAFTS) * noise[t, 4]
        tokens = int(surface.tokens[t % len(surface.tokens)])
        schedule.rollout_done(t, max(1.0, length * math.exp(spread)), drafts=DRAFTS, rollout_s=rollout_s, tokens=tokens)
        step_s[t] = rollout_s + surface.rest_s
        served, trainer = drift.aged(served, t), drift.aged(trainer, t)
    return ScheduleRun(step_s=step_s, levels=levels, trained=tuple(trained), served=tuple(swapped))


def _judged(surface: Surface, t: int, delay_s: float, trainer: float, served: float, noise: Floats) -> Attempt:
    text = math.exp(TEXT_NOISE * noise[1])
    candidate, current = (
        max(1.0, surface.at(surface.accept_length, level, t) * text * math.exp(PAIR_NOISE * pair_noise))
        for level, pair_noise in ((trainer, noise[2]), (served, noise[3]))
    )
    return Attempt(rl_step=t, delay_s=delay_s, candidate=candidate, served=current)


def compared(surface: Surface, drifts: Sequence[LevelDrift], rl_steps: int, seeds: Sequence[int]) -> pd.DataFrame:
    """A row per schedule: seconds of an RL step, what it saves against frozen, and its ratio to the better one.

    Each seed has its own of the `drifts`, which are as many.

    `step_s`, `saved_s` with `saved_low` and `saved_high` (95 %, over seeds), `trainings` and `swaps` per run, `level`
    in service, `over_best`: time over that of the better of frozen and idle time, with `over_low` and `over_high`.
    """
    pairs = list(zip(drifts, seeds, strict=True))
    played = {name: [play(surface, d, kind, rl_steps, s) for d, s in pairs] for name, kind in SCHEDULES.items()}
    mean_s = {name: np.array([run.step_s.mean() for run in runs]) for name, runs in played.items()}
    best = min(("frozen", "idle time"), key=lambda name: float(mean_s[name].mean()))
    rows = []
    for name, runs in played.items():
        saved = mean_of_few(mean_s["frozen"] - mean_s[name])
        over = paired_interval(mean_s[name], mean_s[best], rng=np.random.default_rng(0))
        rows.append(
            {
                "regime": drifts[0].name, "schedule": name, "step_s": float(mean_s[name].mean()),
                "saved_s": saved.estimate, "saved_low": saved.low, "saved_high": saved.high,
                "trainings": float(np.mean([len(run.trained) for run in runs])),
                "swaps": float(np.mean([len(run.served) for run in runs])),
                "level": float(np.mean([run.levels.mean() for run in runs])),
                "over_best": over.estimate, "over_low": over.low, "over_high": over.high,
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def regimes(updates: float) -> tuple[LevelDrift, ...]:
    """Drift in eight regimes, for a surface whose RL steps come to so many updates."""

    def freshness(floor: float = 0.6, *, age_steps: float = 20.0, steps_to_train: float = 0.5) -> Freshness:
        spans = {"updates_to_train": max(steps_to_train * updates, 1e-3), "age_steps": age_steps}
        return Freshness(untrained=floor, floor=floor, **spans)

    def jumps(at: Callable[[int], bool]) -> Callable[[int], float]:
        return lambda t: 1e3 if at(t) else 0.0

    def still(t: int) -> float:
        return 0.0

    return (
        LevelDrift(name="no drift", about="well trained before, the policy hardly moves, training costs 2 %",
              freshness=freshness(), ageing=still, slowdown=0.02),
        LevelDrift(name="slow drift", about="a third of what training brought is gone in 40 RL steps",
              freshness=freshness(age_steps=100.0), slowdown=0.01),
        LevelDrift(name="fast drift", about="half of it is gone in 7 RL steps", freshness=freshness(age_steps=10.0)),
        LevelDrift(name="jump", about="the policy jumps once, at 40 RL steps; training costs 5 %",
              freshness=freshness(), ageing=jumps(lambda t: t == 40), slowdown=0.05),
        LevelDrift(name="recurrent", about="the policy jumps every 25 RL steps; training costs 5 %",
              freshness=freshness(), ageing=jumps(lambda t: t % 25 == 24), slowdown=0.05),
        LevelDrift(name="drafter improves", about="from untrained, over 20 RL steps of training",
              freshness=freshness(steps_to_train=10.0), ageing=still, start=0.6, slowdown=0.01),
        LevelDrift(name="costly", about="slow drift, and training makes rollouts 38 % longer",
              freshness=freshness(age_steps=200.0), slowdown=0.38),
        LevelDrift(name="harmful", about="what is trained on the tail drafts worse than what was there",
              freshness=freshness(), ageing=still, best=0.85, slowdown=0.05),
    )  # fmt: skip


def saved(rows: pd.DataFrame, schedule: str) -> Interval:
    """Net seconds that a schedule saves per RL step, of the rows that `compared` gives for one regime."""
    row = rows[rows["schedule"] == schedule].iloc[0]
    return Interval(
        estimate=float(row["saved_s"]), low=float(row["saved_low"]), high=float(row["saved_high"]), level=0.95,
        method="none",
    )  # fmt: skip
