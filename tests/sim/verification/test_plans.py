"""Runs with a planner: their rollouts predicted, and their plans made again."""

import json

import pandas as pd
import pytest

from bench.simulator import COSTS
from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.lengths.generate import log_normal
from tltlab.planning.planners import load_planner
from tltlab.planning.rollout import RolloutPlanner, Shape
from tltlab.planning.rollout_driver import plan_row
from tltlab.sim import simulate
from tltlab.sim.verification.plans import replay_plans
from tltlab.sim.verification.rollouts import verify
from tltlab.traces.trace import read

from ..workloads import with_terms
from .recorded import record

TAIL = with_terms(COSTS, base_s=COSTS.base_s / 2, per_request_s=COSTS.per_request_s * 3)
BY_BATCH = with_terms(COSTS, per_request_s=2e-3)
GATHER_S = 0.01


class Writing(RolloutPlanner):
    """A shipped planner whose plans are written down."""

    def __init__(self, name):
        self.planner, self.rows = load_planner(name), []

    def plan(self, state):
        actions = self.planner.plan(state)
        self.asked_below = self.planner.asked_below
        if len(state) and state.prompt_tokens[0] != 20.0:  # the example of the contract's check
            self.rows.append({"plan": len(self.rows), **plan_row(state, actions)})
        return actions

    def __deepcopy__(self, memo):
        return self


@pytest.fixture(scope="module", params=["gather", "rebalance"])
def run(request, tmp_path_factory):
    """A RUN whose recording is a simulation in which the planner moves requests in most RL steps."""
    source = log_normal(prompts=8, group_size=4, rl_steps=5, median=150, sigma=1.0, cap=1200, workers=2)
    planner, costs, how = Writing(request.param), BY_BATCH, {}
    if request.param == "gather":
        costs, how = COSTS, {"shapes": {Shape(engines=1, gpus=2): TAIL}, "gather_s": GATHER_S}
    made = simulate(source, "none", costs=costs, planner=planner, record_iterations=True, **how)
    rows = pd.DataFrame(planner.rows)
    rows["plan"] -= rows.groupby("rl_step")["plan"].transform("min")
    shapes = {"2x1": costs, "1x2": TAIL} if how else {"2x1": costs}
    known = {"source": request.param, "costs": {name: each.model_dump(mode="json") for name, each in shapes.items()}}
    out = record(tmp_path_factory.mktemp("planned"), made.trace, "none", planner=known, plans=rows)
    return out, rows


def test_rollouts_whose_requests_moved_are_predicted(run):
    out, rows = run
    assert (rows["actions"].map(len) > 0).any()
    found = verify(out, samples=1)
    assert found.worst_error < 0.02
    assert found.rows["step_time_ratio"].tolist() == pytest.approx([1.0] * 5, abs=0.02)
    assert found.rows["forecast_s"].iloc[2:].notna().all()


def test_plans_are_made_again(run):
    out, rows = run
    trace = read(out)
    found = replay_plans(trace)
    assert (found.share("same"), found.json()["num_decisions"]) == (1.0, len(rows)), found.text()
    # Later RL steps are planned with what is known of earlier ones.
    assert replay_plans(trace, rl_steps=[3]).rows.to_dict("records") == found.rows.to_dict("records")[3:4]
    tokens = rows["generated_tokens"].map(lambda each: [5 * n for n in each])
    (changed := trace.replace(plans=rows.assign(generated_tokens=tokens))).path = trace.path
    assert replay_plans(changed).share("same") < 1.0


@pytest.mark.parametrize("ask", [verify, replay_plans])
@pytest.mark.parametrize("planner", [None, {"source": "their:Planner", "costs": {}}])
def test_plans_of_an_unknown_planner_are_refused(run, tmp_path, planner, ask):
    trace = read(read(run[0]).write(tmp_path / "trace"))
    entries = json.loads((run[0] / "policies.json").read_text())
    (tmp_path / "policies.json").write_text(json.dumps(entries | {"planner": planner}))
    with refused(ConfigError, naming=("policies.json" if planner is None else "their:Planner",)):
        ask(trace)
