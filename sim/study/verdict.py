"""The answer of `what_if`: speed-ups with and without training, verdict, picture, JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from tltlab.acceptance.load import DEFAULT, EARLIER, WITH_EPOCHS
from tltlab.importers.sources import Imported
from tltlab.importers.step_metrics import SEVERAL_TURNS
from tltlab.policies.policy import Policy, load_policy
from tltlab.policies.specs import TableSpec
from tltlab.sim.config import SimulationConfig
from tltlab.sim.scenario import Scenario, policy_name
from tltlab.sim.simulate import SimResult, outside_calibration, simulated
from tltlab.sim.tuning.drafter_training import DrafterTraining
from tltlab.traces.trace import Manifest, Trace

from .band import SpeedUp, Times
from .logged import LoggedRun, Running
from .reduce import Comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAST, MOST = 0.5, 0.85
"""Acceptance values that are also tried where none was measured."""
WITHOUT_TRAINING, WITH_TRAINING = "without_training", "with_training"


@dataclass(frozen=True, kw_only=True)
class Answer(SpeedUp):
    """The best table of one drafter, and its speed-up over plain decoding.

    `placement_gain` is the rollout's time over that under a placement by expected lengths, `accept` the chance that a
    drafted token is accepted, None where it is not the same for all, and `acceptance` what was granted in words.
    """

    drafter: str
    trained: bool
    policy: Policy
    times: Times
    placement_gain: float
    accept: float | None
    acceptance: Mapping[str, str]

    @property
    def rows(self) -> tuple[Any, ...]:
        """Rows (min_batch, strategy) of the table."""
        selector = self.policy.selector
        return selector.rows if isinstance(selector, TableSpec) else ()

    @property
    def drafts(self) -> bool:
        """True if the table drafts at any batch size."""
        return any(row.strategy.speculates for row in self.rows)

    @property
    def condition(self) -> str:
        """The acceptance of the drafts, in words."""
        if self.accept is not None:
            return f"if {100 * self.accept:.0f} % of drafted tokens are accepted once those before them were"
        return f"with drafts accepted as in {' and '.join(self.acceptance.values())}"

    def json(self) -> dict[str, Any]:
        """The keys of an answer in `tltlab what-if --json`."""
        return {
            "policy": self.policy.model_dump(mode="json"),
            "drafters": [self.drafter],
            "acceptance": dict(self.acceptance),
            "rollout": self.band.ends_json(),
            "rl_step": self.rl_step_band and self.rl_step_band.ends_json(),
            "placement_gain": self.placement_gain,
        }


@dataclass(frozen=True, kw_only=True, repr=False)
class WhatIf:
    """The answer. Of `answers` the first is what needs no training, where there is one, and is what the rest is about.

    `source` is what was read, `config` are the settings that were asked for. `scenario` has the RL steps that were
    simulated, `plain` those rollouts without speculation, of the seconds `base`. `by_accept` are the times of the first
    answer's drafter's best tables by acceptance; `with_epochs` is the speed-up with drafts from earlier epochs of the
    same prompts, None where that is no question. `systems` are rows of `compare`, those of the answers' tables among
    them. `recorded` is true where the trace has the acceptance. `running` compares with what a log's own run drafts
    with. `training` is what training the drafter would bring, None where the trace does not know.
    """

    source: Imported
    config: SimulationConfig
    logged: LoggedRun
    scenario: Scenario
    plain: SimResult
    base: Times
    answers: tuple[Answer, ...]
    by_accept: Mapping[float, Times]
    with_epochs: float | None
    running: Running | None
    systems: Comparison
    recorded: bool
    decision_block: int
    training: DrafterTraining | None = None
    wall_s: float = 0.0

    @property
    def trace(self) -> Trace:
        return self.source.trace

    @property
    def best(self) -> Answer:
        """The answer that needs no training, else the only one."""
        return self.answers[0]

    @property
    def is_sampled(self) -> bool:
        """True if the RL steps that were simulated may be a sample."""
        return self.logged.scenarios.is_sampled

    @property
    def setting(self) -> str:
        """The machine, or its costs."""
        machine = self.logged.scenarios.machine
        return machine.name if machine else f"costs {self.scenario.costs_name}"

    @property
    def _evidence(self) -> dict[str, Any]:
        return self.scenario.evidence(self.best.policy.strategies)

    @property
    def evidence(self) -> str:
        """What the costs were measured on."""
        is_known = self.scenario.costs.evidence is not None
        return str(self._evidence["says"]) if is_known else f"costs {self.scenario.costs_name}"

    @property
    def distance(self) -> str:
        """How near the measurements of the costs are, without a profile whether the fit covered what is simulated."""
        if self.scenario.costs.evidence is not None:
            return str(self._evidence["distance"])
        if self.scenario.costs.calibrated is None:
            return "never measured"
        outside = outside_calibration(self.scenario, self.plain.rollouts)
        return "interpolated" if outside else "measured together"

    @property
    def notes(self) -> tuple[str, ...]:
        """What was read, measured or assumed."""
        machine = self.logged.scenarios.machine
        acceptance = f"acceptance: {self.scenario.acceptance_name}"
        return (*self.source.notes, *self.logged.notes, acceptance, *(machine.assumed if machine else ()))

    @property
    def rollout_share(self) -> float | None:
        """The rollout's share of the RL step: the log's, else it follows from assumed stages (`share_of`)."""
        if self.logged.share is not None or self.base.step_s is None:
            return self.logged.share
        return float(self.base.rollout_s.sum() / self.base.step_s.sum())

    @cached_property
    def crowded_share(self) -> float:
        """Share of busy worker time, without speculation, at batch sizes where the policy drafts nothing."""
        firsts = np.array([row.min_batch for row in self.best.rows])
        drafts = np.array([row.strategy.speculates for row in self.best.rows])
        crowded = total = 0.0
        for columns in (log.columns for rollout in self.plain.rollouts for log in rollout.logs):
            row = np.searchsorted(firsts, columns.batch, side="right") - 1
            total += float(columns.seconds.sum())
            crowded += float(columns.seconds[~drafts[row]].sum())
        return crowded / total if total else 0.0

    @property
    def verdict(self) -> str:
        """The answers in a few sentences."""
        best, others = self.best, self.answers[1:]
        head = self._head(best)
        if self.running is not None:
            head = f"{self.running.head}. Over plain decoding, s{head[1:]}"
        turns = next((note.removeprefix(SEVERAL_TURNS) for note in self.notes if note.startswith(SEVERAL_TURNS)), "")
        parts = [f"An upper bound: {turns}. {head}." if turns else f"{head}."]
        if round(best.band.low, 2) < 1.0 and best.drafts:
            parts.append("A slowdown is within that range.")
        if self.with_epochs is not None:
            parts.append(f"With earlier epochs of the same prompts to draft from {self.with_epochs:.2f}x.")
        for other in others:
            parts.append(f"With a trained drafter ({other.drafter}) {other.band}, {other.condition}.")
        if (gain := best.placement_gain - 1) >= 0.005:
            parts.append(f"Placement by expected lengths would make it {gain:.0%} faster still.")
        return " ".join([*parts, self.limited_by])

    def _head(self, best: Answer) -> str:
        need = "a trained drafter" if best.trained else "drafts that need no training"
        epochs = " from earlier epochs of the same prompts" if EARLIER in "".join(best.acceptance.values()) else ""
        accepted = "as many accepted as were recorded" if self.recorded else best.condition
        condition = f"with {need} ({best.drafter}{epochs}), {accepted}"
        step = (
            "" if (whole := best.rl_step_band) is None else f", the RL step {whole.estimate:.2f}x ({whole.range_text})"
        )
        at = self._speed_ups()
        beside = "; ".join(f"at {100 * chance:.0f} % {at[chance]:.2f}x" for chance in (LEAST, MOST) if chance in at)
        beside = f"; {beside}" if beside and best.drafts else ""
        if best.rollout.estimate < 1.005:
            return f"Speculation would not make the rollout faster {condition}: {best.band}{beside}"
        return f"Speculation would speed up the rollout {best.band}{step} {condition}{beside}"

    def _speed_ups(self, whole: bool = False) -> dict[float, float]:
        """Speed-ups of rollouts, or of whole RL steps, by acceptance."""
        found, own = {}, self.by_accept.get(self.best.accept or 0.0)
        for chance, times in self.by_accept.items():
            seconds = times.step_s if whole else times.rollout_s
            nominal = None if own is None else own.step_s if whole else own.rollout_s
            band = self.best.rl_step_band if whole else self.best.band
            if seconds is not None and nominal is not None and band is not None:
                found[chance] = band.estimate * float(nominal.sum() / seconds.sum())
        return found

    @property
    def limited_by(self) -> str:
        """The main limit of the speed-up."""
        rows, limits = self.best.rows, []
        drafts_to = max((row.min_batch for row in rows[1:]), default=1) - 1
        if not self.best.drafts:
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
        return f"Limited by: {'; '.join(limits or ['how many drafted tokens are accepted'])}."

    @property
    def policy(self) -> Policy:
        """The policy of the best answer, with its provenance."""
        best = self.best
        return best.policy.with_provenance(
            trace=[self.trace.manifest.name], machine=self.setting, costs=[self.scenario.costs_name],
            acceptance=[" and ".join(best.acceptance.values())], seed=self.config.seed,
            num_rl_steps=[len(self.trace.rl_steps)], makespan_s=float(best.times.rollout_s.mean()),
            compared_with="none", band={"rollout": [best.band.low, best.band.high]}, simulated=True,
        )  # fmt: skip

    @property
    def assumed(self) -> list[dict[str, str | None]]:
        """Each assumption, its value, and what the answer would be at the ends of its range, where that is known."""
        rows: list[dict[str, str | None]] = []
        for answer in self.answers:
            for drafter, text in answer.acceptance.items():
                if f"({DEFAULT}" in text:
                    ends = answer.band.of_input("acceptance")
                    effect = f"rollout {ends[0]:.2f}x to {ends[1]:.2f}x"
                    rows.append({"what": f"acceptance of {drafter}", "value": text, "effect": effect})
        if self.with_epochs is not None:
            value = " and ".join(f"{name} {text}" for name, text in WITH_EPOCHS.items())
            rows.append(
                {"what": "no earlier epochs of the same prompts", "value": "none in the trace",
                 "effect": f"with them {value}: rollout {self.with_epochs:.2f}x"}
            )  # fmt: skip
        noted = [note for note in self.notes if not note.startswith(("acceptance: ", SEVERAL_TURNS))]
        return rows + [{"what": note, "value": None, "effect": None} for note in noted]

    def timelines(self) -> tuple[Trace, Trace]:
        """Simulate the RL step of median rollout time without speculation and under the policy that was found."""
        manifest, found = Manifest(kind="simulated", num_workers=self.scenario.workers), self.best.policy
        # The lower of two.
        median = int(np.argsort(self.base.rollout_s, kind="stable")[(len(self.base.rollout_s) - 1) // 2])
        example = self.logged.scenarios.of([self.scenario.steps[median].rl_step])
        plain = simulated(example, load_policy("none"), "none", manifest)
        return plain.trace, simulated(example, found, policy_name(found), manifest).trace

    def to_frame(self) -> pd.DataFrame:
        """The systems, one row each."""
        return pd.DataFrame(self.systems)

    def json(self) -> dict[str, Any]:
        """The keys of `tltlab what-if --json`, without the systems' rows; `policy` is what a policy file holds."""
        best, whole = self.best, self._speed_ups(whole=True)
        names = ("verdict", "setting", "distance", "evidence", "with_epochs", "assumed", "rollout_share",
                 "crowded_share", "decision_block", "wall_s")  # fmt: skip
        return {name: getattr(self, name) for name in names} | {
            "answers": {WITH_TRAINING if a.trained else WITHOUT_TRAINING: a.json() for a in self.answers},
            "num_rl_steps": len(self.scenario.steps),
            "num_rl_steps_of": len(self.trace.rl_steps),
            "num_responses": self.trace.num_rows("outcomes"),
            "num_workers": self.scenario.workers,
            "costs": self.scenario.costs_name,
            "accept": best.accept,
            "drafters": [best.drafter],
            "acceptance": dict(best.acceptance),
            "speedup": {
                "rollout": best.band.ends_json(),
                "rl_step": best.rl_step_band and best.rl_step_band.ends_json(),
            },
            "band": best.band.json(),
            "by_accept": [
                {"accept": at, "rollout": {"mean": mean}, "rl_step": {"mean": whole[at]} if at in whole else None}
                for at, mean in self._speed_ups().items()
            ],
            "makespan_s": self.plain.makespan_s,
            "share_of": self.logged.share_of,
            "running": self.running and self.running.json(),
            "drafter_training": self.training and self.training.json(),
            "policy": self.policy.model_dump(mode="json"),
            "drafting": [{"min_batch": row.min_batch, "strategy": str(row.strategy)} for row in best.rows],
            "columns": {"used": dict(self.source.used), "ignored": list(self.source.ignored)},
            "notes": list(self.notes),
        }

    def plot(self) -> Figure:
        """The answers with their ranges, the first also at other acceptance where that is known; systems' rollouts."""
        from matplotlib.figure import Figure

        from tltlab.charts import bars

        drawn = {f"rollout, {answer.drafter}": (answer.band.estimate, answer.band) for answer in self.answers}
        if (whole := self.best.rl_step_band) is not None:
            drawn[f"RL step, {self.best.drafter}"] = (whole.estimate, whole)
        others = {at: ratio for at, ratio in self._speed_ups().items() if at != self.best.accept}
        speed_ups = {name: estimate for name, (estimate, _) in drawn.items()}
        speed_ups |= {f"{100 * at:.0f} % of {self.best.drafter}'s accepted": ratio for at, ratio in others.items()}
        low, high = (
            [getattr(band, end) for _, band in drawn.values()] + [None] * len(others) for end in ("low", "high")
        )
        # The systems' bars have room for their names, which are 9 points high.
        heights = 0.8 + 0.22 * len(speed_ups), 0.8 + 0.22 * len(self.systems)
        figure = Figure(figsize=(7.2, sum(heights) + 0.4), layout="constrained")
        top, below = figure.subplots(2, 1, height_ratios=heights)
        bars(list(speed_ups), list(speed_ups.values()), low, high, xlabel="speed-up, with its 90 % range",
             reference=1.0, axes=top, title=f"With speculation: {self.setting} (simulated)")  # fmt: skip
        frame = self.to_frame()
        bars(frame["title"].tolist(), frame["speed_up"].tolist(), frame["speed_up_low"].tolist(),
             frame["speed_up_high"].tolist(), xlabel="speed-up of the rollout over VeRL's (intervals: draws only)",
             title="Systems (simulated)", reference=1.0, axes=below)  # fmt: skip
        return figure

    def __repr__(self) -> str:
        return f"<WhatIf: {self.verdict}>"

    def _repr_html_(self) -> str:
        frame = self.to_frame()[["title", "drafters", "acceptance", "makespan_s", "speed_up", "regret"]]
        return f"<p><b>{self.verdict}</b></p>{frame.to_html(index=False, float_format=lambda v: f'{v:.3g}')}"
