"""A training log in place of presets: its rollouts' seconds, its stages and its acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pandas as pd

from tltlab.arrays import Floats
from tltlab.calibration.logged import LoggedDrafting
from tltlab.calibration.stages import mean_stages, measured_stages, rollout_rows, rollout_share
from tltlab.costs.base import CostModel
from tltlab.costs.scaled import ScaledCosts
from tltlab.costs.stages import StageCosts
from tltlab.policies.policy import Policy
from tltlab.policies.specs import FixedSpec
from tltlab.records import Json, frozen
from tltlab.stats import interval_ends
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.traces.trace import Trace

from .band import SpeedUp, Times
from .jobs import side_by_side
from .sample import Scenarios, samples
from .study import Cell


def logged_stages(trace: Trace) -> tuple[pd.DataFrame | None, float | None]:
    """Seconds by stage of a trace made of a log (`measured_stages`), and the share that rollouts take of RL steps.

    None and None for other traces, and where the share is not logged.
    """
    if trace.steps is None or trace.manifest.kind != "imported" or trace.iterations is not None:
        return None, None
    table = measured_stages(trace.steps)
    share = rollout_share(table)
    return (None, None) if share is None else (table, share.estimate)


@frozen
class LoggedRun:
    """A simulation in the terms of its trace's log; of another trace, or a log without stages, `scenarios` as given.

    `scenarios` have costs scaled so that rollouts drafted as in the log take the log's seconds. `stages` of
    a log are the mean seconds of each of its stages. `share` is the rollout's of the RL step in the log (None: not
    logged), `drafting` what the log's run drafts with (None: nothing, or not logged).
    """

    scenarios: Scenarios
    stages: StageCosts | None
    drafting: LoggedDrafting | None
    share: float | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, scenarios: Scenarios) -> LoggedRun:
        """Read the log's figures and fit the level to as many of its RL steps as a first sample has."""
        trace, machine = scenarios.trace, scenarios.machine
        run = cls(
            scenarios=scenarios, stages=None if machine is None else machine.stages, drafting=LoggedDrafting.of(trace)
        )
        table, share = logged_stages(trace)
        if table is None:
            return run
        rows, part = rollout_rows(table)
        timed = [step for step in (scenarios.config.steps_of(trace) or trace.rl_steps) if step in rows.index]
        if not timed:
            return run
        sample = next(samples(timed))
        measured_s = rows.loc[sample, part].to_numpy()
        level = float(measured_s.sum() / run.seconds(sample).sum())

        def scaled(own: CostModel) -> CostModel:
            return ScaledCosts.wrapping(
                own, level=level, switch_s=own.switch_s * level, outside_s=own.outside_s * level
            )

        costs, shapes = scenarios.config.find_costs(trace)[0], scenarios.config.find_shapes()
        subject = "rollouts" if part == "rollout" else "waiting for rollouts, which overlap training"
        note = (
            f"{subject}: {np.median(measured_s):.3g} s in the log, {share:.0%} of the RL step, {level:.2f} "
            f"times those of {machine.name if machine else scenarios.costs_name}: simulated ones are scaled to them"
        )
        return replace(
            run, scenarios=scenarios.under(costs=scaled(costs), shapes={s: scaled(of) for s, of in shapes.items()}),
            stages=mean_stages(table, trace.manifest.name or "a log"),
            share=share, notes=(note,),
        )  # fmt: skip

    @property
    def share_of(self) -> Literal["log", "preset"] | None:
        """Where the rollout's share of the RL step is from; None where it is not known."""
        return "log" if self.share is not None else None if self.stages is None else "preset"

    def strategy(self, rl_step: int) -> Strategy:
        """Strategy of the log's run in an RL step."""
        if self.drafting is None or not self.drafting.accept_length.get(rl_step, np.nan) >= 1.0:
            return NO_SPECULATION
        return self.drafting.strategy

    def seconds(self, rl_steps: Sequence[int], jobs: int | None = 1) -> Floats:
        """Simulated seconds of rollouts that draft as the log's did, each with its own accept length.

        `jobs` processes (None: one per core) share the RL steps.
        """
        tasks = []
        for rl_step in rl_steps:
            strategy, changes = self.strategy(rl_step), Json()
            if self.drafting is not None and strategy.speculates:
                changes["acceptance"] = self.drafting.acceptance(float(self.drafting.accept_length[rl_step]))
            scenario, policy = self.scenarios.of([rl_step], **changes), Policy(selector=FixedSpec(strategy=strategy))
            tasks.append(Cell(name="as logged", policy=policy, scenario=scenario).makespans)
        return np.array([row["makespan_s"] for (row,) in side_by_side(tasks, jobs=jobs)])

    def running(self, rl_steps: Sequence[int], plain: Times) -> Times | None:
        """Seconds of the log's own run in these RL steps; None where the log has no drafting."""
        if self.drafting is None or all(not self.strategy(step).speculates for step in rl_steps):
            return None
        rollout_s = self.seconds(rl_steps)
        return Times(rollout_s=rollout_s, step_s=None if plain.step_s is None else rollout_s + plain.others_s())

    @property
    def policy(self) -> Policy | None:
        """The policy of the log's run where its drafts were kept all along, so that one acceptance describes it."""
        drafting = self.drafting
        if drafting is None or len(drafting.kept) < len(drafting.accept_length):
            return None
        return Policy(selector=FixedSpec(strategy=drafting.strategy))


@frozen
class Running(SpeedUp):
    """Speed-up of the policy that was found over what the log's own run drafts with."""

    drafting: LoggedDrafting

    @property
    def head(self) -> str:
        """The answer to a log that speculates already."""
        lengths = self.drafting.accept_length
        collapsed = lengths.notna().sum() - len(self.drafting.kept)
        fallen = f", of which none are kept in {collapsed} of {lengths.notna().sum()} RL steps" if collapsed else ""
        step = "" if self.rl_step_band is None else f", the RL step {self.rl_step_band}"
        return (
            f"The log already drafts ({self.drafting.strategy}, {self.drafting.mean_accept_length:.2f} tokens per "
            f"draft{fallen}): the best table would speed up its rollout {self.band}{step}"
        )

    def json(self) -> Json:
        """The keys of `running` in `tltlab what-if --json`."""
        return {
            "strategy": str(self.drafting.strategy),
            "depth_from": self.drafting.depth_from,
            "accept_length": self.drafting.mean_accept_length,
            "rollout": interval_ends(self.rollout),
            "rl_step": interval_ends(self.rl_step),
            "band": {"rollout": self.band.json(), "rl_step": self.rl_step_band and self.rl_step_band.json()},
        }
