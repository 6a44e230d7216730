"""The planner of a run: asked again in the states that it was asked in, and in simulations of the run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from tltlab.costs.base import CostModel
from tltlab.errors import ConfigError
from tltlab.planning.beliefs import LengthBelief
from tltlab.planning.rollout import HELD, Action, EngineCosts, RolloutPlanner, RolloutState, Shape
from tltlab.planning.rollout_driver import PlanDriver, plan_row
from tltlab.traces.schema import KEY
from tltlab.traces.trace import Trace

from .decisions import Decisions
from .run_files import planner_of

REMEMBERED = 16
"""RL steps before a simulated one from which the planner's belief about lengths is made."""


def replay_plans(trace: Trace, *, rl_steps: Sequence[int] | None = None, allow_code: Collection[str] = ()) -> Decisions:
    """Ask the planner of a run with `plans` again in each recorded state, with what it knew then, and compare.

    The policy's decisions are not played again: a trace lacks the iterations at which requests that moved have joined
    and left their engines. ConfigError for a run whose files do not name its planner, a class of a module that
    `allow_code` does not name, and requests that the trace does not have.
    """
    planner, costs = planner_of(trace, allow_code)
    driver, belief, rows = PlanDriver(planner, lambda note: None), LengthBelief(), []
    for step in trace.iter_rl_steps():
        same = _made_again(step, driver, costs, belief)
        if same and (rl_steps is None or step.rl_steps[0] in rl_steps):
            about = {"rl_step": step.rl_steps[0], "policy": f"planner {type(planner).__name__}"}
            rows.append({**about, "decisions": len(same), "same": float(np.mean(same))})
        _learn(belief, step)
    if not rows:
        raise ConfigError(f"{trace.path or 'the trace'}: no RL step with plans was asked for")
    return Decisions(rows=pd.DataFrame(rows))


def _learn(belief: LengthBelief, step: Trace) -> None:
    rows = step.outcomes[step.outcomes["finish_reason"] != "abort"]
    belief.add(dict(zip(rows[list(KEY)].itertuples(index=False, name=None), rows["response_tokens"], strict=True)))


def _made_again(step: Trace, driver: PlanDriver, costs: Mapping[Shape, CostModel], belief: LengthBelief) -> list[bool]:
    """Return for each plan of an RL step whether it came out the same."""
    (rl_step,), plans, same = step.rl_steps, step.arrow("plans"), []
    rows = step.workload.merge(step.outcomes, on=list(KEY)).set_index(["prompt_id", "sample"])
    lengths: dict[Any, int] = rows["response_tokens"].to_dict()
    begun: list[tuple[str, int]] = []
    assert plans is not None
    for plan in plans.sort_by("plan").to_pylist():
        now = list(zip(plan["prompts"], plan["samples"], strict=True))
        # A round of dynamic sampling has requests of its own.
        begins = not {*now} <= {*begun}
        begun, running = now if begins else begun, {*now}
        if missing := {*begun} - lengths.keys():
            raise ConfigError(f"RL step {rl_step}: request {min(missing)} was planned, and the trace does not have it")
        mine, worker = rows.loc[now], np.array(plan["workers"], np.int64)
        worker[plan["held"]] = HELD
        engines = zip(costs.items(), plan["switch_s"], strict=True)
        state = RolloutState(
            now_s=plan["t_start"],
            rl_step=rl_step,
            active=Shape.of(plan["shape"]),
            keys=[(rl_step, *request, 0) for request in now],
            worker=worker,
            prompt_tokens=mine["prompt_tokens"].to_numpy(np.float64),
            generated_tokens=np.array(plan["generated_tokens"], np.float64),
            max_response_tokens=mine["max_response_tokens"].to_numpy(np.float64),
            ended={(rl_step, *request, 0): lengths[request] for request in begun if request not in running},
            engines={shape: EngineCosts(shape, model, switch_s=seconds) for (shape, model), seconds in engines},
            belief=belief,
        )
        again = driver.begin(state) if begins else driver.ask(state)
        same.append(plan_row(state, again)["actions"] == plan["actions"])
    return same


class InformedPlanner(RolloutPlanner):
    """A run's planner in simulations of an RL step: it knows the costs and the lengths that it knew in the run."""

    def __init__(self, planner: RolloutPlanner, costs: Mapping[Shape, CostModel], trace: Trace, rl_step: int):
        self.planner, self.costs, self.belief = planner, list(costs.values()), LengthBelief()
        for step in trace.select([s for s in trace.rl_steps if s < rl_step][-REMEMBERED:]).iter_rl_steps():
            _learn(self.belief, step)

    def plan(self, state: RolloutState) -> Sequence[Action]:
        if not state.ended:
            self.planner.asked_below = type(self.planner).asked_below
        actions: Sequence[Action] = ()
        if len(state) <= self.planner.asked_below:
            known = {
                shape: EngineCosts(shape, costs, switch_s=simulated.switch_s)
                for (shape, simulated), costs in zip(state.engines.items(), self.costs, strict=False)
            }
            actions = self.planner.plan(replace(state, engines=known, belief=self.belief))
        self.asked_below = self.planner.asked_below
        return actions
