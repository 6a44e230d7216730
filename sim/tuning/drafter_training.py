"""Speed-up of a rollout by training its drafter, for a trace that shows how acceptance depends on it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tltlab.acceptance.freshness import FreshAcceptance, drafter_states
from tltlab.calibration.acceptance import fit_kind
from tltlab.errors import ConfigError
from tltlab.policies.policy import Policy
from tltlab.sim.config import SimulationConfig
from tltlab.sim.scenario import Scenario
from tltlab.state import DrafterState
from tltlab.stats import Interval, format_speed_up, interval_ends, paired_speed_up
from tltlab.strategy import Strategy
from tltlab.traces.trace import Trace

from .cases import TuningCase
from .search import Prices

_MAX_ROWS = 4


@dataclass(frozen=True, kw_only=True)
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

    def json(self) -> dict[str, Any]:
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
    those of an acceptance.json of kind fresh: just trained, and never again.
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
    delays = None if spot is None or spot.empty else spot.groupby("rl_step")["yield_s"].max().fillna(0.0)
    return DrafterTraining(
        drafter=model.drafter,
        source=source,
        level=model.ratio(worst) / model.ratio(best),
        speed_up=paired_speed_up(untrained, trained, scenario.seed),
        saved_s=float((untrained - trained).mean()),
        delay_s=None if delays is None else float(delays.mean()),
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


def best_table(scenario: Scenario, strategies: Sequence[Strategy]) -> Policy:
    """The exact table of at most four rows by batch size, for the scenario's costs and acceptance."""
    prices = Prices.of([TuningCase(name="best table", trace=0, scenario=scenario)], strategies)
    return Policy(selector=prices.table(_MAX_ROWS))
