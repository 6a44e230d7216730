"""As many RL steps as an answer needs, spread over the run: a figure from a sample, whose size it finds itself.

A comparison is off by what its costs are off by, and by the draw of its RL steps. More RL steps narrow only the latter:
a sample is large enough once its band is small compared with that of the costs. RL steps of a run drift (lengths grow),
so a sample has the middle one of each of n parts of the run that are equally long. Three times as many parts have these
among their middles, so that a sample grows by adding to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np

from tltlab.planning.placement import PLACEMENTS
from tltlab.sim.config import SimulationConfig, load_spot_training
from tltlab.sim.scenario import Scenario, described
from tltlab.state import DrafterState
from tltlab.stats import Interval
from tltlab.traces.schema import REQUIRED_TABLES
from tltlab.traces.storage import MemoryTable
from tltlab.traces.trace import Trace

FIRST, ALL_OF = 8, 24
"""RL steps to begin with, of a run of more than `ALL_OF`; of others all."""
SMALL, UNKNOWN = 1 / 3, 0.05
"""A band is small whose half-width is at most this share of the costs', and where that is not known, this itself."""


def spread(rl_steps: Sequence[int], num: int) -> list[int]:
    """`num` of the RL steps, spread over the run.

    >>> spread(range(100), 4), set(spread(range(100), 4)) <= set(spread(range(100), 12))
    ([12, 37, 62, 87], True)
    """
    num = min(num, len(rl_steps))
    return [rl_steps[(2 * part + 1) * len(rl_steps) // (2 * num)] for part in range(num)]


def small(ratios: Iterable[Interval], cost_error: float | None) -> bool:
    """True if every ratio's relative interval is small compared with the costs' relative error (None: not known)."""
    most = UNKNOWN if cost_error is None else SMALL * cost_error
    return all((ratio.high - ratio.low) / 2 <= most * ratio.estimate for ratio in ratios if ratio.estimate > 0)


def samples(rl_steps: Sequence[int], named: Sequence[int] | None = None) -> Iterator[list[int]]:
    """Yield 8 of these RL steps, 24, 72, ..., all; of 24 or fewer all at once. Where some are `named`, only those."""
    if named is not None:
        yield list(named)
        return
    num = FIRST if len(rl_steps) > ALL_OF else len(rl_steps)
    while num < len(rl_steps):
        yield spread(rl_steps, num)
        num *= 3
    yield list(rl_steps)


def sample_text(nums: Iterable[int], num_of: int, *, sampled: bool) -> str:
    """How many of `num_of` RL steps were simulated, in words; `sampled` if the command chose them.

    >>> sample_text([8], 300, sampled=True), sample_text([24, 8], 300, sampled=False), sample_text([4], 4, sampled=True)
    ('8 of 300 RL steps, spread over the run (--rl-steps all: every one)', '8 to 24 of 300 RL steps', '4 RL steps')
    """
    least, *_, most = sorted({*nums}) * 2
    text = f"{least}" if least == most else f"{least} to {most}"
    if least == num_of:
        return f"{text} RL steps"
    return f"{text} of {num_of} RL steps" + (", spread over the run (--rl-steps all: every one)" if sampled else "")


class Scenarios:
    """Scenarios of some RL steps of a trace at a time, under settings that are those of the whole trace.

    Its longest response and its acceptance are measured once, in all of the trace. Scenarios of
    the same RL steps that have the same requests on the same workers share them.
    """

    def __init__(self, trace: Trace, config: SimulationConfig):
        self.trace = trace
        self.run = trace.rl_steps
        self.is_sampled = config.rl_steps is None
        model, name = config.find_acceptance(trace)
        known = config if model is None else replace(config, acceptance=model)
        settled, self.machine = known.on_trace(trace)
        if model is None and self.machine is not None:
            model, name = settled.find_acceptance(trace)
        self.acceptance, self.acceptance_name = model, name
        costs, self.costs_name = settled.find_costs(trace)
        self.config = replace(settled, costs=costs, acceptance=model)
        self._shared: dict[tuple[Any, ...], Scenario] = {}

    def under(self, **settings: Any) -> Scenarios:
        """The same with other costs, or another decision block."""
        other = copy(self)
        other.config, other._shared = replace(self.config, **settings), {} if "costs" in settings else self._shared
        return other

    def of(self, rl_steps: Sequence[int], **changes: Any) -> Scenario:
        """The scenario of these RL steps; `changes` are fields of `Scenario`.

        In a sample a drafter that rollouts do not train is as old, or as long trained, as it is there in the run.
        """
        known = {"acceptance": self.acceptance, "acceptance_name": self.acceptance_name, "costs_name": self.costs_name}
        names = ("costs", "seed", "workload", "placement", "workers")
        config = replace(self.config, rl_steps=list(rl_steps), **{n: changes[n] for n in names if n in changes})
        scenario = self._placed(config)
        spot = changes.get("spot", self.config.spot)
        values = known | {name: getattr(config, name) for name in ("costs", "seed", "decision_block")} | changes
        values |= {"spot": None if spot is None else load_spot_training(spot), "workers": scenario.workers}
        values["registry"] = described(self.trace.drafters, values["acceptance"])
        if self.is_sampled and spot is None and len(rl_steps) < len(self.run):
            updates = values.get("online_updates", config.online_updates)
            at = map(self.run.index, rl_steps)
            states = (DrafterState(updates=n * updates) if updates else DrafterState(age=n) for n in at)
            values["drafter_states"] = tuple(states)
        return replace(scenario, **values)

    def _placed(self, config: SimulationConfig) -> Scenario:
        """A scenario with the requests and queues of these settings."""
        placement, rl_steps = config.placement, config.steps_of(self.trace) or ()
        blind = placement is None or (isinstance(placement, str) and placement in PLACEMENTS)
        # Scenarios keep the objects alive whose ids are used.
        rule = placement if placement is None or isinstance(placement, str) else id(placement)
        drawn = None if config.workload is None else (config.workload, config.seed)
        key = (tuple(rl_steps), drawn, rule, config.workers, None if blind else id(config.costs))
        if key not in self._shared:
            self._shared[key] = Scenario.of(self._part(rl_steps), replace(config, spot=None))
        return self._shared[key]

    def _part(self, rl_steps: Sequence[int]) -> Trace:
        """The trace of these RL steps; all of it where one is not in it, which `Scenario.of` refuses."""
        if not set(rl_steps) < set(self.trace.rl_steps):
            return self.trace
        part = self.trace.select(rl_steps)
        loaded = ((name, part.arrow(name)) for name in REQUIRED_TABLES)
        # A copy, since Arrow pickles all that a slice is part of; the other tables are not simulated.
        tables = {name: MemoryTable(name, rows.take(np.arange(len(rows)))) for name, rows in loaded if rows is not None}
        return Trace(part.manifest, tables, part.rl_steps, part.path)
