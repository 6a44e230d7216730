"""The answer of `what_if`: speed-ups, verdict, picture, JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pandas as pd

from tltlab.importers.step_metrics import SEVERAL_TURNS
from tltlab.policies.policy import Policy, load_policy
from tltlab.policies.specs import TableSpec
from tltlab.sim.config import SimulationConfig
from tltlab.sim.scenario import Scenario, policy_name
from tltlab.sim.simulate import simulated
from tltlab.sim.tuning.drafter_training import DrafterTraining
from tltlab.stats import Interval
from tltlab.traces.trace import Manifest, Trace

from .band import Band, Times
from .logged import Running, ShareOf

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAST, MOST = 0.5, 0.85
"""Acceptance values that are also tried where none was measured."""


@dataclass(frozen=True, kw_only=True)
class SpeedUp:
    """Speed-up over plain decoding at one acceptance (None: the recorded one); intervals are 95 %, of draws only.

    `rl_step` is None where the other stages' costs are unknown.
    """

    accept: float | None
    rollout: Interval
    rl_step: Interval | None
    times: Times
    policy: Policy


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """The answer; `speed_ups` are by rising acceptance, `chosen` is the one that was asked for.

    `systems` are `compare_systems`' rows, that of `THE_VERDICT` among them. `used` maps columns of a trace to the
    source's, `ignored` are its others. `drafters` are those of the verdict's table, `acceptance` has in words
    what was granted to each, `recorded` is true where the trace has it.
    `plain_s` is a rollout's mean seconds without speculation, `rollout_share` its share of the RL step, which is
    the log's or follows from assumed stages (`share_of`); `running` compares with what a log's own run drafts with.
    `crowded_share` the share of worker time with more requests than the policy drafts for. `band` is the range of the
    rollout's speed-up, `rl_step_band` that of the RL step's, None as in `SpeedUp`. `training` is what
    training the drafter would bring, None where the trace does not know. `num_rl_steps` were simulated, `is_sampled`
    if they are a sample. `example` is the RL step of median rollout time, `config` are the settings that
    were asked for.
    """

    trace: Trace
    used: Mapping[str, str]
    ignored: Sequence[str]
    setting: str
    costs_name: str
    distance: str
    evidence: str
    workers: int
    chosen: SpeedUp
    speed_ups: tuple[SpeedUp, ...]
    plain_s: float
    rollout_share: float | None
    share_of: ShareOf | None
    crowded_share: float
    band: Band
    rl_step_band: Band | None
    running: Running | None
    training: DrafterTraining | None
    systems: pd.DataFrame
    drafters: tuple[str, ...]
    acceptance: Mapping[str, str]
    recorded: bool
    decision_block: int
    num_rl_steps: int
    is_sampled: bool
    wall_s: float
    example: Scenario = field(repr=False)
    config: SimulationConfig = field(repr=False)
    notes: tuple[str, ...] = field(default=())

    @property
    def verdict(self) -> str:
        """The answer in a sentence or two."""
        chosen, speed_ups = self.chosen, [s for s in self.speed_ups if s.accept in (LEAST, MOST)]
        names = " or ".join(self.drafters)
        if chosen.accept is not None:
            chance = f"{100 * chosen.accept:.0f} %"
            condition = f"if a token drafted by {names} is accepted {chance} of the time once those before it were"
        elif self.recorded:
            condition = f"with as many tokens drafted by {names} accepted as were recorded"
        else:
            condition = f"with drafts of {names} accepted as in {' and '.join(self.acceptance.values())}"
        whole = self.rl_step_band
        step = "" if whole is None else f", the RL step {whole.estimate:.2f}x ({whole.range_text})"
        if chosen.rollout.estimate < 1.005:
            head = f"Speculation would not make the rollout faster {condition}: {self.band}"
        else:
            head = f"Speculation would speed up the rollout {self.band}{step}, {condition}"
        if self.running is not None:
            head = f"{self.running.head}. Over plain decoding, s{head[1:]}"
        beside = ", ".join(f"at {100 * (s.accept or 0):.0f} % {s.rollout.estimate:.2f}x" for s in speed_ups)
        sure = " A slowdown is within that range." if self.band.loses and self.drafts else ""
        turns = next((note.removeprefix(SEVERAL_TURNS) for note in self.notes if note.startswith(SEVERAL_TURNS)), "")
        bound = f"An upper bound: {turns}. " if turns else ""
        return f"{bound}{head}{f'; {beside}' if beside else ''}.{sure} {self.limited_by}"

    @property
    def limited_by(self) -> str:
        """The main limit of the speed-up."""
        rows = self.drafting
        drafts_to = max((row.min_batch for row in rows[1:]), default=1) - 1
        limits = []
        if not self.drafts:
            limits.append("drafting costs more than it saves at every batch size")
        elif self.crowded_share > 0.05 and not rows[-1].strategy.speculates:
            limits.append(
                f"for {100 * self.crowded_share:.0f} % of their time workers run more than {drafts_to} requests, where "
                "drafting does not pay"
            )
        if self.rollout_share is not None:
            most = 1.0 / max(1.0 - self.rollout_share, 1e-9)
            limits.append(
                f"the rollout is {100 * self.rollout_share:.0f} % of the RL step, so that no rollout could make it "
                f"more than {most:.1f}x as fast"
            )
        if not limits:
            limits.append("how many drafted tokens are accepted")
        return f"Limited by: {'; '.join(limits)}."

    @property
    def policy(self) -> Policy:
        """The policy that was found, with its provenance."""
        return self.chosen.policy.with_provenance(
            trace=[self.trace.manifest.name], machine=self.setting, costs=[self.costs_name],
            acceptance=[" and ".join(self.acceptance.values())], seed=self.config.seed,
            num_rl_steps=[len(self.trace.rl_steps)], makespan_s=float(self.chosen.times.rollout_s.mean()),
            compared_with="none", band={"rollout": [self.band.low, self.band.high]}, simulated=True,
        )  # fmt: skip

    @property
    def drafting(self) -> tuple[Any, ...]:
        """Rows (min_batch, strategy) of the policy that was found."""
        selector = self.chosen.policy.selector
        return selector.rows if isinstance(selector, TableSpec) else ()

    @property
    def drafts(self) -> bool:
        """True if the policy that was found drafts at any batch size."""
        return any(row.strategy.speculates for row in self.drafting)

    def timelines(self) -> tuple[Trace, Trace]:
        """Simulate the RL step of median rollout time without speculation and under the policy that was found."""
        manifest = Manifest(kind="simulated", num_workers=self.workers)
        found = self.chosen.policy
        return simulated(self.example, load_policy("none"), "none", manifest).trace, simulated(
            self.example, found, policy_name(found), manifest
        ).trace

    def to_frame(self) -> pd.DataFrame:
        """The systems, one row each, with `speed_up` beside `ratio`."""
        return self.systems.assign(speed_up=1.0 / self.systems["ratio"])

    def json(self) -> dict[str, Any]:
        """The keys of `tltlab what-if --json`, without the systems' rows; `policy` is what a policy file holds."""
        bands = {"rollout": self.band, "rl_step": self.rl_step_band}
        return {
            "verdict": self.verdict,
            "num_rl_steps": self.num_rl_steps,
            "num_rl_steps_of": len(self.trace.rl_steps),
            "num_responses": self.trace.num_rows("outcomes"),
            "num_workers": self.workers,
            "setting": self.setting,
            "costs": self.costs_name,
            "distance": self.distance,
            "evidence": self.evidence,
            "accept": self.chosen.accept,
            "drafters": list(self.drafters),
            "acceptance": dict(self.acceptance),
            "speedup": {name: band and band.ends_json() for name, band in bands.items()},
            "band": {name: band and band.json() for name, band in bands.items()},
            "by_accept": [
                {"accept": s.accept}
                | {
                    name: each and {"mean": each.estimate}
                    for name, each in (("rollout", s.rollout), ("rl_step", s.rl_step))
                }
                for s in self.speed_ups
            ],
            "makespan_s": self.plain_s,
            "rollout_share": self.rollout_share,
            "share_of": self.share_of,
            "running": self.running and self.running.json(),
            "crowded_share": self.crowded_share,
            "drafter_training": None if self.training is None else self.training.json(),
            "policy": self.policy.model_dump(mode="json"),
            "drafting": [{"min_batch": row.min_batch, "strategy": str(row.strategy)} for row in self.drafting],
            "columns": {"used": dict(self.used), "ignored": list(self.ignored)},
            "decision_block": self.decision_block,
            "notes": list(self.notes),
            "wall_s": self.wall_s,
        }

    def plot(self) -> Figure:
        """The verdict with its range; speed-ups by acceptance, where it is not known; and the systems' rollouts."""
        from matplotlib.figure import Figure

        from tltlab.charts import bars

        points = [s for s in self.speed_ups if s.accept is not None]
        # The systems' bars have room for their names, which are 9 points high.
        heights = (1.4, *((2.8,) if points else ()), 0.8 + 0.22 * len(self.systems))
        figure = Figure(figsize=(7.2, sum(heights) + 0.4), layout="constrained")
        top, *curves, below = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        known = {"rollout": self.band, "RL step": self.rl_step_band}
        drawn = {name: band for name, band in known.items() if band is not None}
        bars(list(drawn), [b.estimate for b in drawn.values()], [b.low for b in drawn.values()],
             [b.high for b in drawn.values()], xlabel="speed-up, with its 90 % range", reference=1.0, axes=top,
             title=f"With speculation: {self.setting} (simulated)")  # fmt: skip
        for axes in curves:
            self._plot_speed_ups(axes, points)
        frame = self.to_frame()
        bars(frame["title"].tolist(), frame["speed_up"].tolist(), (1 / frame["ratio_high"]).tolist(),
             (1 / frame["ratio_low"]).tolist(), xlabel="speed-up of the rollout over VeRL's (intervals: draws only)",
             title="Systems (simulated)", reference=1.0, axes=below)  # fmt: skip
        return figure

    def _plot_speed_ups(self, above: Axes, speed_ups: Sequence[SpeedUp]) -> None:
        """Speed-ups over acceptance, and the range at the acceptance of the verdict."""
        from tltlab.charts import COLORS, DASHES, finish

        for i, (name, band) in enumerate((("rollout", self.band), ("rl_step", self.rl_step_band))):
            points = [(s.accept, interval) for s in speed_ups if (interval := getattr(s, name)) is not None]
            if points and band is not None:
                x, y = zip(*((accept, interval.estimate) for accept, interval in points), strict=True)
                label = name.replace("rl_step", "RL step")
                above.plot(x, y, color=COLORS[i], linestyle=DASHES[i], marker="o", markersize=4, label=label)
                away = [[band.estimate - band.low], [band.high - band.estimate]]
                # Two ranges at one acceptance stand side by side.
                at = (self.chosen.accept or 0.0) + 0.004 * (2 * i - 1)
                above.errorbar([at], [band.estimate], yerr=away, color=COLORS[i], capsize=3, fmt="none")
        above.axhline(1.0, color="#a0452a", linewidth=1.0, linestyle=(0, (4, 2)))
        above.legend(fontsize=8, frameon=False)
        finish(above, title="By acceptance; the 90 % range where the verdict is", grid="both",
               xlabel="drafted tokens accepted, each", ylabel="speed-up")  # fmt: skip

    def __repr__(self) -> str:
        return f"<WhatIf: {self.verdict}>"

    def _repr_html_(self) -> str:
        frame = self.to_frame()[["title", "drafters", "acceptance", "makespan_s", "speed_up", "regret"]]
        return f"<p><b>{self.verdict}</b></p>{frame.to_html(index=False, float_format=lambda v: f'{v:.3g}')}"
