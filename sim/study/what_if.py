"""Estimate of the speed-up of speculation for responses of these lengths: cells of a study, and the verdict of them."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from tltlab.acceptance.base import Acceptance, GeometricAcceptance
from tltlab.acceptance.context import ContextAcceptance
from tltlab.acceptance.freshness import FreshAcceptance, drafter_states
from tltlab.acceptance.load import DEFAULT, DEFAULTS, EARLIER, WITH_EPOCHS, load_acceptance, with_drafter
from tltlab.acceptance.per_drafter import PerDrafter
from tltlab.calibration.acceptance import fit_kind
from tltlab.calibration.logged import DRAFTED, MOST_DEPTH, LoggedDrafting
from tltlab.costs.deployment import GPUS
from tltlab.costs.profiles import profiles
from tltlab.drafters.specs import STANDARD
from tltlab.errors import ConfigError
from tltlab.importers.rows import Reading
from tltlab.importers.sources import Format, Imported, TraceSource, read_lengths
from tltlab.importers.step_metrics import ASSUMED_RESPONSES, DEFAULT_RESPONSES, SEVERAL_TURNS, UNKNOWN_LONGEST
from tltlab.options import option
from tltlab.planning.composition import System
from tltlab.planning.system_binding import BoundSystem
from tltlab.planning.systems import SYSTEMS, find_systems
from tltlab.policies.policy import Policy, load_policy
from tltlab.policies.specs import TableSpec
from tltlab.records import Json, frozen
from tltlab.sim.config import SimulationConfig, check_keywords, decision_interval, has_epochs
from tltlab.sim.options import Jobs
from tltlab.sim.placement import EXPECTED
from tltlab.sim.scenario import Scenario, policy_name
from tltlab.sim.simulate import SimResult, simulated
from tltlab.sim.tuning.search import best_table
from tltlab.state import DrafterState
from tltlab.stats import Interval, format_speed_up, interval_ends, paired_speed_up
from tltlab.traces.trace import Manifest, Trace, file_of_run

from .band import WORDS, Band, InputErrors, Source, SpeedUp, Times, bands
from .compare import attrs_of
from .logged import LoggedRun, Running
from .reduce import Comparison, compared, comparison, intervals_of, next_line
from .sample import Scenarios, samples, small
from .study import Cell, Study
from .systems import bind_all, replayable, system_cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAST, MOST = 0.5, 0.85
"""Acceptance values that are also tried where none was measured."""
MANY_CUT = 0.2
"""Share of cut responses above which the verdict is about the cap."""
COUNTS, PROMPT_TOKENS, TRAINED_AT, MOVES = (16, 2048), 1024, "2k", 0.02
"""Responses per RL step, prompt lengths, and the context at which a drafter was trained, that are also tried where
nothing states them; an assumption is named where one of these moves the speed-up by more than `MOVES`.
"""
SLOWDOWN = 0.8
"""Costs that may be such a slowdown, where they promise a speed-up, cannot say if drafts pay."""
MEASURE = "Measure it with `tltlab profile`"
TAKEN: dict[Source, str] = {
    "responses": str(DEFAULT_RESPONSES),
    "prompts": "0 tokens",
    "longest": "8 times the longest mean",
    "depth": "by tokens per draft and the share that is kept",
    "context": "longer than any response",
}
"""Values that are taken where nothing states them."""
WITHOUT_TRAINING, WITH_TRAINING = "without_training", "with_training"


@frozen
class Answer(SpeedUp):
    """The best table of one drafter, and its speed-up over plain decoding.

    `placement_gain` is the rollout's time over that under a placement by expected lengths, `gather_gain` that under the
    planner `gather` (1 where none can be simulated), `by_assumption` the speed-up of the rollout with other values of
    what is assumed, `accept` the chance that a drafted token is accepted, None where it is not the same for all, and
    `acceptance` what was granted in words.
    """

    drafter: str
    trained: bool
    policy: Policy
    times: Times
    placement_gain: float
    gather_gain: float
    accept: float | None
    acceptance: Mapping[str, str]
    by_assumption: Mapping[Source, Mapping[str, float]] = field(default_factory=dict)

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
            return f"{100 * self.accept:.0f} % of drafted tokens accepted"
        return f"drafts accepted as in {' and '.join(self.acceptance.values())}"

    def json(self) -> Json:
        """The keys of an answer in `tltlab what-if --json`."""
        return {
            "policy": self.policy.model_dump(mode="json"),
            "drafters": [self.drafter],
            "acceptance": dict(self.acceptance),
            "rollout": self.band.ends_json(),
            "rl_step": self.rl_step_band and self.rl_step_band.ends_json(),
            "placement_gain": self.placement_gain,
            "gather_gain": self.gather_gain,
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
    def is_enough(self) -> bool:
        """True if RL steps more would not make the speed-ups much surer, as their costs are off."""
        ratios = [ratio for a in self.answers for ratio in (a.rollout, a.rl_step) if ratio is not None]
        rows: Any = self.systems.to_dict("records")
        return small(ratios + intervals_of(rows), self._evidence["speedup_error"])

    @property
    def setting(self) -> str:
        """The machine, or its costs."""
        machine = self.logged.scenarios.machine
        return machine.name if machine else f"costs {self.scenario.costs_name}"

    @property
    def _evidence(self) -> Json:
        return self.scenario.evidence(self.best.policy.strategies)

    @property
    def evidence(self) -> str:
        """The engine, GPU and model of the measurements behind the costs."""
        is_known = self.scenario.costs.evidence is not None
        return str(self._evidence["says"]) if is_known else f"costs {self.scenario.costs_name}"

    @property
    def distance(self) -> str:
        """How near the measurements of the costs are, without a profile whether the fit covered what is simulated."""
        if self.scenario.costs.evidence is not None:
            return str(self._evidence["distance"])
        if self.scenario.costs.calibrated is None:
            return "never measured"
        return "interpolated" if self.plain.outside_calibration else "measured together"

    @property
    def notes(self) -> tuple[str, ...]:
        """Figures that were read, measured or assumed."""
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
        """The answer in up to three lines: the speed-up, with what it comes and its limit, and what to do next."""
        return "\n".join(filter(None, [self._answer, self._with, self._next]))

    @property
    def _answer(self) -> str:
        best, upper = self.best, ""
        for note in self.notes:
            if note.startswith(SEVERAL_TURNS):
                upper = f"An upper bound: {note.removeprefix(SEVERAL_TURNS)}. "
        if (cut := float((self.trace.outcomes["finish_reason"] == "length").mean())) > MANY_CUT:
            upper += f"About the cap: {cut:.0%} of the responses are cut, so their lengths are lower bounds. "
        found = "Speculation would"
        if self.running is not None:
            found = f"{self.running.head}. Over plain decoding, speculation would"
        if best.rollout.estimate < 1.005:
            return f"{upper}{found} not make the rollout faster: {best.band}."
        if best.band.low < SLOWDOWN and best.band.of_input("costs")[0] < 1.0:
            return f"{upper}Cannot say if speculation would speed up the rollout: {best.band}. {MEASURE}."
        whole = best.rl_step_band
        step = "" if whole is None else f", the RL step {whole.estimate:.2f}x ({whole.range_text})"
        loses = "; a slowdown is within that range" if round(best.band.low, 2) < 1.0 and best.drafts else ""
        return f"{upper}{found} speed up the rollout {best.band}{step}{loses}."

    @property
    def _with(self) -> str:
        best, at = self.best, self._speed_ups()
        need = "a trained drafter" if best.trained else "drafts that need no training"
        epochs = " from earlier epochs of the same prompts" if EARLIER in "".join(best.acceptance.values()) else ""
        accepted = "as many accepted as were recorded" if self.recorded else best.condition
        others = [f"at {100 * chance:.0f} % {at[chance]:.2f}x" for chance in (LEAST, MOST) if chance in at]
        beside = f" ({'; '.join(others)})" if others and best.drafts else ""
        parts = [f"With {need} ({best.drafter}{epochs}), {accepted}{beside}"]
        if self.with_epochs is not None:
            parts.append(f"with earlier epochs of the same prompts to draft from {self.with_epochs:.2f}x")
        for other in self.answers[1:]:
            found = f"{other.band.estimate:.2f}x ({other.band.range_text})"
            parts.append(f"with a trained drafter ({other.drafter}) {found}, {other.condition}")
        return f"{'; '.join(parts)}. {self.limited_by}"

    @property
    def _next(self) -> str:
        gains = {
            f"--placement {EXPECTED}": self.best.placement_gain,
            "--planner gather (the last responses on engines of more GPUs)": self.best.gather_gain,
        }
        command = "--policy-out policy.json, then TLTLAB_POLICY=policy.json python train.py"
        return next_line(gains, command if self.best.drafts else "")

    def _speed_ups(self, whole: bool = False) -> dict[float, float]:
        """Speed-ups of rollouts, or of whole RL steps, by acceptance."""
        own, band = self.by_accept.get(self.best.accept or 0.0), self.best.rl_step_band if whole else self.best.band
        if own is None or band is None:
            return {}
        return {chance: band.estimate * own.over(times, whole) for chance, times in self.by_accept.items()}

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
            limits.append(f"the rollout is {100 * self.rollout_share:.0f} % of the RL step: {most:.1f}x at most")
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
        """Each assumption, its value, and what the answer would be at the ends of its range, where that is known.

        Those that change the answer most come first.
        """
        found: list[tuple[float, dict[str, str | None]]] = []

        def assume(what: str, value: str, effect: str, *speed_ups: float) -> None:
            found.append((min(speed_ups) / max(speed_ups), {"what": what, "value": value, "effect": effect}))

        evidence = self.scenario.costs.evidence
        if evidence is not None and evidence.other_engines:
            ends = self.best.band.of_input("engine")
            effect = f"with {' or '.join(evidence.other_engines)} rollout {ends[0]:.2f}x to {ends[1]:.2f}x"
            version = profiles().engines[evidence.engine].versions
            assume("engine", f"{evidence.engine} ({version})", effect, *ends)
        for answer in self.answers:
            ends = answer.band.of_input("acceptance")
            effect = f"rollout {ends[0]:.2f}x to {ends[1]:.2f}x"
            for drafter, text in answer.acceptance.items():
                if f"({DEFAULT}" in text:
                    assume(f"acceptance of {drafter}", text, effect, *ends)
            if held := self.scenario.held(answer.policy.strategies):
                what = "drafts deeper than measured, each token kept with the last one's chance"
                assume(what, ", ".join(map(str, held)), effect, *ends)
            for name, others in answer.by_assumption.items():
                moved = max(abs(ratio / answer.band.estimate - 1.0) for ratio in others.values()) > MOVES
                if moved and (answer is self.best or name == "context"):
                    effect = ", ".join(f"with {value} rollout {ratio:.2f}x" for value, ratio in others.items())
                    assume(WORDS[name], TAKEN[name], effect, answer.band.estimate, *others.values())
        if self.with_epochs is not None:
            value = " and ".join(f"{name} {text}" for name, text in WITH_EPOCHS.items())
            effect = f"with them {value}: rollout {self.with_epochs:.2f}x"
            assume(
                "no earlier epochs of the same prompts", "none in the trace", effect, self.with_epochs,
                self.best.band.estimate,
            )  # fmt: skip
        noted = [note for note in self.notes if not note.startswith(("acceptance: ", SEVERAL_TURNS))]
        rows = [row for _, row in sorted(found, key=lambda each: each[0])]
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

    def json(self) -> Json:
        """The keys of `tltlab what-if --json`, without the systems' rows; `policy` is what a policy file holds."""
        best, own, whole = self.best, self.best.json(), self._speed_ups(whole=True)
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
            "drafters": own["drafters"],
            "acceptance": own["acceptance"],
            "speedup": {name: own[name] for name in ("rollout", "rl_step")},
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

        from tltlab.charts import Chart, bars

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
        figure = Chart(figsize=(7.2, sum(heights) + 0.4), layout="constrained")
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


_DEFAULT_SYSTEMS = ("verl", "tlt", "tlt-base", "vllm-dynamic")


@dataclass(frozen=True, kw_only=True)
class WhatIfConfig(SimulationConfig):
    """Settings of an estimate, beside those of its simulations; where no machine is named see `with_default_machine`.

    `accept` is short for the chance that a token of `drafter` ("learned") is accepted once those before it were, all
    other drafters as in `tltlab.acceptance.load.DEFAULTS`. With a `drafter` its table alone is found. `systems` are
    compared beside. `jobs` processes (None: one per core) share the cells. Raises ConfigError for an `accept` that is
    no chance or stands beside an acceptance.
    """

    accept: float | None = option(
        "Short for the chance of --drafter's tokens, the others' as usual. [default: 0.7 of learned]"
    )
    drafter: str | None = option("The only drafter to find a table for. [default: all of the acceptance]")
    systems: str | Sequence[str] | None = option(
        f"Systems of the table: all, or of {', '.join(SYSTEMS)}. [default: four of them]"
    )
    jobs: Jobs = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.accept is not None and not 0.0 < self.accept < 1.0:
            raise ConfigError(f"accept is a chance between 0 and 1, such as 0.7, got {self.accept:g}")
        if self.accept is not None and self.acceptance is not None:
            raise ConfigError(
                f"accept {self.accept:g} is short for an acceptance of one drafter: leave out one of the two"
            )


@frozen
class DrafterTraining:
    """A rollout with a drafter at its best against one at its worst, each with the best table of draft depths.

    `level` is the chance of a drafted token at worst over that at best, `speed_up` how many times as fast the rollout
    is, `saved_s` the mean seconds of it. `delay_s` are mean seconds by which the recorded trainings held a rollout up,
    None where none was recorded. `source` names the evidence for the dependence.
    """

    drafter: str
    source: str
    level: float
    speed_up: Interval
    saved_s: float
    delay_s: float | None

    def json(self) -> Json:
        """The keys of `drafter_training` in `tltlab what-if --json`."""
        values = {"drafter": self.drafter, "source": self.source, "level": self.level}
        values |= {"speedup": interval_ends(self.speed_up), "saved_s": self.saved_s, "delay_s": self.delay_s}
        return values | {"says": str(self)}

    def __str__(self) -> str:
        held = "" if self.delay_s is None else f"; recorded trainings held a rollout up by {self.delay_s:.2g} s"
        return (
            f"Training the drafter {self.drafter} would speed up the rollout {format_speed_up(self.speed_up)}, "
            f"{self.saved_s:.2g} s less; untrained, a token of it is accepted {self.level:.2f} times as often "
            f"({self.source}){held}."
        )


def drafter_training(trace: Trace, scenario: Scenario) -> DrafterTraining | None:
    """Simulate the scenario with the trace's drafter trained and untrained; None where the trace does not know both.

    The two are the best and the worst of the states in acceptance.parquet, where it has several of one drafter, else
    those of an acceptance.json of kind fresh: just trained, and never again. A run annotates an RL step's responses
    with drafters trained before it, to which its prompts are new unless they come again.
    """
    known = _known(trace)
    if known is None:
        return None
    model, best, worst, source = known
    seconds = []
    for state in (best, worst):
        settled = replace(scenario, acceptance=model.at_freshness(state))
        strategies, _ = settled.covered_chains([model.drafter])
        if not strategies:
            return None
        policy = best_table(settled, strategies)
        seconds.append(np.array([rollout.makespan_s for rollout in settled.rollouts(policy)]))
    trained, untrained = seconds
    spot = trace.spot_training
    delay_s = None
    if spot is not None and not spot.empty:
        delay_s = float(spot.groupby("rl_step")["yield_s"].max().fillna(0.0).mean())
    return DrafterTraining(
        drafter=model.drafter,
        source=source,
        level=model.ratio(worst) / model.ratio(best),
        speed_up=paired_speed_up(untrained, trained, scenario.seed),
        saved_s=float((untrained - trained).mean()),
        delay_s=delay_s,
    )


def _known(trace: Trace) -> tuple[FreshAcceptance, DrafterState, DrafterState, str] | None:
    """The model, the drafter at its best and at its worst, and where that is from."""
    with suppress(ConfigError):
        fitted = fit_kind(trace, "fresh").model
        assert isinstance(fitted, FreshAcceptance)
        assert trace.acceptance is not None
        rows = drafter_states(trace.acceptance[trace.acceptance["drafter"] == fitted.drafter])
        pairs = rows[["age", "updates"]].drop_duplicates().itertuples(index=False)
        states = [DrafterState(age=int(age), updates=int(updates)) for age, updates in pairs]
        states.sort(key=fitted.ratio)
        worst, best = states[0], states[-1]
        source = "acceptance.parquet: age {0.age} and {0.updates} updates against age {1.age} and {1.updates}"
        return fitted, best, worst, source.format(worst, best)
    model, _ = SimulationConfig().find_acceptance(trace)
    if not isinstance(model, FreshAcceptance):
        return None
    return model, DrafterState(updates=sys.maxsize), DrafterState(age=sys.maxsize), "acceptance.json"


def what_if(
    lengths: TraceSource,
    config: WhatIfConfig = WhatIfConfig(),
    *,
    reading: Reading = Reading(),
    form: Format | None = None,
    **settings: Any,
) -> WhatIf:
    """Simulate these responses with and without speculation; the answer is `verdict`, the rest is behind it.

    `lengths` are whatever `read_lengths` takes: a file of any of its formats, a trace, a DataFrame, an array.
    `settings` are fields of `WhatIfConfig` and of `Reading` (such as the `column` of the lengths) that replace those of
    `config` and `reading`; `form` is the file's format. For a training log with stages, rollouts and stages take the
    log's seconds, and one that drafts is compared with its own run first (`WhatIf.running`). Acceptance that is not
    given is the recorded one, else `tltlab.acceptance.load.DEFAULTS`.

    The best table of draft depths by batch size is found for every drafter that the acceptance names: the tables that
    `tune` searches too. The answers are the fastest of drafters that need no training and the fastest of trained ones,
    each with its range and with what `EXPECTED` placement would add. By default a sample is simulated of more than 24
    RL steps (`samples`). Costs O(responses) per policy, most of it the bandits among `systems`.

    >>> what_if([200] * 500 + [4000] * 12, gpus="8xH100", model="Qwen2.5-7B").verdict  # doctest: +SKIP
    """
    started = time.perf_counter()
    of_reading = {each.name for each in fields(Reading)} & settings.keys()
    check_keywords(settings, [each.name for each in (*fields(config), *fields(Reading))], what_if)
    reading = replace(reading, **{name: settings.pop(name) for name in of_reading})
    source = read_lengths(lengths, reading, form)
    trace = source.trace
    asked = with_default_machine(replace(config, **settings), trace)
    config, drafter, recorded = _with_acceptance(asked, trace)
    logged = LoggedRun.of(Scenarios(trace, config))
    compared_with = list(find_systems(config.systems or _DEFAULT_SYSTEMS))
    # All results are relative to VeRL, which does not speculate.
    verl = SYSTEMS["verl"]
    drafters = [drafter] if drafter else logged.scenarios.of(trace.rl_steps[:1]).searched_drafters()
    ask = _Question(
        source=source, config=asked, drafters=drafters, recorded=recorded, logged=logged,
        systems=compared_with if verl in compared_with else [verl, *compared_with], block=decision_interval(trace),
    )  # fmt: skip
    for rl_steps in samples(trace.rl_steps, config.steps_of(trace)):
        found = ask.answer(rl_steps)
        if found.is_enough:
            break
    others = _others(source, config, lambda **facts: read_lengths(lengths, replace(reading, **facts), form).trace)
    for name, runs in others.items():
        # Drafters that need no training have no context that they were trained at.
        answers = (a if name == "context" and not a.trained else ask.with_others(found, a, name, runs)
                   for a in found.answers)  # fmt: skip
        found = replace(found, answers=tuple(answers))
    training = drafter_training(trace, found.scenario)
    return replace(found, training=training, wall_s=time.perf_counter() - started)


def _others(source: Imported, config: WhatIfConfig, read: Callable[..., Trace]) -> dict[Source, dict[str, LoggedRun]]:
    """Runs with other values of each assumption; `read` reads the lengths again with other facts."""
    trace, drafting = source.trace, LoggedDrafting.of(source.trace)
    traces: dict[Source, dict[str, Trace]] = {}
    if any(note.endswith(ASSUMED_RESPONSES) for note in source.notes):
        traces["responses"] = {str(num): read(responses=num) for num in COUNTS}
    if trace.manifest.kind == "imported" and not trace.workload["prompt_tokens"].any():
        prompts = trace.workload.assign(prompt_tokens=np.int32(PROMPT_TOKENS))
        traces["prompts"] = {f"{PROMPT_TOKENS} tokens": trace.replace(workload=prompts)}
    if any(note.startswith(UNKNOWN_LONGEST) for note in source.notes):
        cap = int(trace.workload["max_response_tokens"].max())
        traces["longest"] = {f"{most} tokens": read(max_response_tokens=most) for most in (cap // 2, 2 * cap)}
    if drafting is not None and drafting.depth_from != DRAFTED:
        # A draft of no more than its tokens, or one twice as deep.
        least = math.ceil(drafting.accept_length.max() - 1.0)
        depths = least, max(least, min(2 * drafting.strategy.reach, MOST_DEPTH))
        traces["depth"] = {f"depth {depth}": read(drafted=f"learned:{depth}") for depth in depths}
    runs = {
        name: {value: LoggedRun.of(Scenarios(other, config)) for value, other in others.items()}
        for name, others in traces.items()
    }
    if config.acceptance == DEFAULT:
        trained = replace(config, acceptance=f"learned={DEFAULTS['learned']}@{TRAINED_AT}")
        runs["context"] = {TRAINED_AT: LoggedRun.of(Scenarios(trace, trained))}
    return runs


def with_default_machine(config: WhatIfConfig, trace: Trace) -> WhatIfConfig:
    """Return the settings; where they name no machine that of the trace's costs, else `GPUS`."""
    counted = config.workers is not None or trace.manifest.num_workers is not None
    has_costs = counted and file_of_run(trace, "costs.json") is not None
    if config.is_on_machine or config.costs is not None or has_costs:
        return config
    return replace(config, gpus=GPUS)


def _with_acceptance(config: WhatIfConfig, trace: Trace) -> tuple[WhatIfConfig, str | None, bool]:
    """Return the settings with the acceptance that is asked for, the only drafter, and whether the trace has it."""
    known = config.find_acceptance(trace)[0]
    drafter = "learned" if config.accept is not None and config.drafter is None else config.drafter
    if drafter is not None and (known is None or drafter not in known.drafters):
        STANDARD[drafter]  # Refuses a name that no drafter has.
    if config.accept is not None and drafter is not None:
        usual, own = load_acceptance(DEFAULT, epochs=has_epochs(trace)), GeometricAcceptance(alpha=config.accept)
        return replace(config, acceptance=with_drafter(usual, drafter, own), accept=None), drafter, False
    if known is None:
        return replace(config, acceptance=DEFAULT), drafter, False
    return config, drafter, config.acceptance in (None, "trace")


@frozen
class _Question:
    """A question without its RL steps."""

    source: Imported
    config: WhatIfConfig
    drafters: Sequence[str]
    systems: Sequence[System]
    recorded: bool
    block: int
    logged: LoggedRun

    def answer(self, rl_steps: Sequence[int]) -> WhatIf:
        """Simulate these RL steps without speculation, under the best table of each drafter, and under each system."""
        scenario, none = self.logged.scenarios.of(rl_steps), load_policy("none")
        tables, placed = self._tables(scenario), scenario.placed(EXPECTED)
        cells = [self._cell("none", none, scenario)]
        for name, policy in tables.items():
            cells += [self._cell(name, policy, scenario), self._cell(f"{name} {EXPECTED}", policy, placed)]
            if gathers := scenario.planned(policy).get("gather"):
                cells.append(self._cell(f"{name} gather", policy, gathers))
        times = self._times(cells)
        base = times["none"]
        by_time = sorted(tables, key=lambda name: float(times[name].rollout_s.sum()))
        fastest = {scenario.registry[name].has_network: name for name in reversed(by_time)}
        # Drafters that need no training, then those with a network.
        best = [fastest[trained] for trained in sorted(fastest)]
        answers = tuple(self._answer(scenario, name, tables[name], times) for name in best)
        by_accept = self._times(self._at_chances(rl_steps, best[0]))
        epochs = [base.over(found) for found in self._times(self._with_epochs(rl_steps)).values()]
        return WhatIf(
            source=self.source, config=self.config, logged=self.logged, recorded=self.recorded,
            decision_block=self.block, scenario=scenario, base=base, answers=answers,
            plain=simulated(scenario, none, "none", self.source.trace.manifest),
            by_accept={float(chance): found for chance, found in by_accept.items()},
            with_epochs=max(epochs, default=None),
            running=self._running(scenario, answers[0], base),
            systems=self._compared(rl_steps, {name: tables[name] for name in best}),
        )  # fmt: skip

    def _tables(self, scenario: Scenario) -> dict[str, Policy]:
        """Return the best table of each drafter. ConfigError where the acceptance covers no chain of any."""
        tables = {}
        for name in self.drafters:
            chains, _ = scenario.covered_chains([name])
            if chains:
                tables[name] = best_table(scenario, chains)
        if not tables:
            raise ConfigError(
                f"the acceptance covers no chain 1 to 8 deep of {' or '.join(self.drafters)}: give --acceptance "
                f"{self.drafters[0]}=geometric:ALPHA"
            )
        return tables

    def _cell(self, name: str, policy: Policy, scenario: Scenario) -> Cell:
        return Cell(name=name, policy=policy, scenario=scenario, stages=self.logged.stages)

    def _times(self, cells: Iterable[Cell]) -> dict[str, Times]:
        """Simulate the cells; return the seconds of each by its name."""
        cells, found = list(cells), {}
        table = Study(cells=cells, jobs=self.config.jobs).table()
        for at, cell in enumerate(cells):
            rows = table[table["cell"] == at]
            rollout_s, step_s = (rows[name].to_numpy(np.float64) for name in ("makespan_s", "step_s"))
            found[cell.name] = Times(rollout_s=rollout_s, step_s=step_s if np.isfinite(step_s).all() else None)
        return found

    def _answer(self, scenario: Scenario, name: str, policy: Policy, times: Mapping[str, Times]) -> Answer:
        own, base = times[name], times["none"]
        return Answer.of(
            base, own, self._ranges(scenario, policy, name, own, base), scenario.seed, drafter=name,
            trained=scenario.registry[name].has_network, policy=policy, times=own,
            placement_gain=own.over(times[f"{name} {EXPECTED}"]),
            gather_gain=own.over(times.get(f"{name} gather", own)),
            accept=self._chance(name), acceptance=scenario.granted([*scenario.covered_chains([name])[0]])["acceptance"],
        )  # fmt: skip

    def with_others(self, found: WhatIf, answer: Answer, name: Source, runs: Mapping[str, LoggedRun]) -> Answer:
        """The answer with the range that other values of an assumption make, each with its best table."""
        rl_steps, ratios, wholes = [step.rl_step for step in found.scenario.steps], dict[str, float](), list[float]()
        for value, logged in runs.items():
            scenario = logged.scenarios.of(rl_steps)
            table = best_table(scenario, scenario.covered_chains([answer.drafter])[0])
            ask, policies = replace(self, logged=logged), {"none": load_policy("none"), "table": table}
            base, own = ask._times(ask._cell(*each, scenario) for each in policies.items()).values()
            ratios[value] = base.over(own)
            if answer.rl_step_band is not None:
                wholes.append(base.over(own, whole=True))
        whole = answer.rl_step_band and answer.rl_step_band.with_ends(name, wholes)
        band, found_at = answer.band.with_ends(name, list(ratios.values())), {**answer.by_assumption, name: ratios}
        return replace(answer, band=band, rl_step_band=whole, by_assumption=found_at)

    def _running(self, scenario: Scenario, answer: Answer, base: Times) -> Running | None:
        """Return the speed-up over the log's own run; None where that does not draft."""
        drafting, own = self.logged.drafting, self.logged.running([step.rl_step for step in scenario.steps], base)
        if drafting is None or own is None:
            return None
        ranges = self._ranges(scenario, answer.policy, answer.drafter, answer.times, own, self.logged.policy)
        return Running.of(own, answer.times, ranges, scenario.seed, drafting=drafting)

    def _ranges(
        self, scenario: Scenario, policy: Policy, drafter: str, own: Times, base: Times, baseline: Policy | None = None
    ) -> tuple[Band, Band | None]:
        """Return the ranges of an answer; a table without drafts has those of the best ones at the inputs' ends."""
        chains, _ = scenario.covered_chains([drafter])
        strategies = [s for s in policy.strategies if s.speculates]
        errors = InputErrors.of(scenario, strategies or chains, self.source.trace, recorded=self.recorded)
        if self.logged.share is not None:
            errors = replace(errors, seconds=0.0, stages=0.0)

        def policy_at(end: Scenario) -> Policy:
            return policy if strategies else best_table(end, chains)

        return bands(scenario, policy_at, base, own, errors, baseline=baseline, jobs=self.config.jobs)

    def _granted(self, drafter: str) -> Acceptance | None:
        model = self.logged.scenarios.acceptance
        return model.of(drafter) if isinstance(model, PerDrafter) else model

    def _chance(self, drafter: str) -> float | None:
        """Return the chance that a token of a drafter is accepted, where it is the same for all of them."""
        part = self._granted(drafter)
        inner = part.base if isinstance(part, ContextAcceptance) else part
        return inner.alpha if isinstance(inner, GeometricAcceptance) and not self.recorded else None

    def _at_chances(self, rl_steps: Sequence[int], drafter: str) -> Iterator[Cell]:
        """Yield the best tables at other chances of the drafter's tokens; none where these were recorded."""
        if (known := self._chance(drafter)) is None:
            return
        part = self._granted(drafter)
        for chance in sorted({LEAST, MOST, known}):
            own = GeometricAcceptance(alpha=chance)
            # The chances are those within the trained length.
            model = part.with_parts([own]) if isinstance(part, ContextAcceptance) else own
            yield self._best_cell(str(chance), rl_steps, drafter, model)

    def _best_cell(self, name: str, rl_steps: Sequence[int], drafter: str, model: Acceptance) -> Cell:
        """Return the best table of a drafter of this acceptance."""
        granted = self.logged.scenarios.acceptance
        assert granted is not None
        scenario = self.logged.scenarios.of(rl_steps, acceptance=with_drafter(granted, drafter, model))
        return self._cell(name, best_table(scenario, scenario.covered_chains([drafter])[0]), scenario)

    def _with_epochs(self, rl_steps: Sequence[int]) -> Iterator[Cell]:
        """Yield the best tables of drafts from earlier epochs of the same prompts.

        None where the trace has earlier epochs, and where the acceptance of those drafters was given.
        """
        granted = self.logged.scenarios.acceptance
        for name, text in WITH_EPOCHS.items():
            usual = f"{DEFAULTS[name]} ({DEFAULT})"
            if name in self.drafters and isinstance(granted, PerDrafter) and granted.texts.get(name) == usual:
                yield self._best_cell(name, rl_steps, name, load_acceptance(text))

    def _compared(self, rl_steps: Sequence[int], tables: Mapping[str, Policy]) -> Comparison:
        """Compare systems, and the answers' tables with the acceptance that is given beside them."""
        scenarios = self.logged.scenarios.under(decision_block=self.block)
        nominal = scenarios.of(rl_steps)
        bound = bind_all(self.systems, nominal)
        acceptance = replayable(nominal.acceptance, nominal.steps)
        for name, policy in tables.items():
            row = System(
                name=f"table-{name}",
                title=f"Best table of {name}",
                source="tltlab what-if, the table under drafting",
                algorithm="the exact table of up to four draft depths by batch size for these costs and this "
                "acceptance",
                assumptions=("a static split, as VeRL's; the acceptance that the verdict names",),
            )
            bound.append(
                BoundSystem(system=row, policy=policy, acceptance=acceptance, spot=None, assumptions=row.assumptions)
            )
        cells = [system_cell(binding, scenarios, rl_steps, self.logged.stages) for binding in bound]
        table = Study(cells=cells, jobs=self.config.jobs).table()
        found = compared(cells, table, nominal, "verl")
        return comparison(found, {}, attrs_of(scenarios, nominal, self.systems, cells, table, found, "verl"))
