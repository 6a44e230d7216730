"""What depends on the drafter's age and on each request: freshness, spot training, budgets, per-request acceptance."""

import json

import pytest

from bench.simulator import COSTS
from tests.refused import refused
from tltlab.acceptance.base import GeometricAcceptance
from tltlab.acceptance.freshness import FreshAcceptance, Freshness
from tltlab.coordination.progress import SpotTraining
from tltlab.errors import ConfigError
from tltlab.lengths.generate import log_normal
from tltlab.sim import simulate
from tltlab.sim.config import load_spot_training
from tltlab.strategy import Strategy

from ..workloads import Handing

TRACE = log_normal(prompts=8, group_size=4, rl_steps=3, median=400, sigma=0.9, cap=4000, workers=4)
AGING = FreshAcceptance(
    base=GeometricAcceptance(alpha=0.8),
    freshness=Freshness(untrained=0.6, floor=0.5, age_steps=2.0, updates_to_train=5.0),
)
QUICK = SpotTraining(start_s=0.01, join_s=0.0, samples_per_s=2225.0)


def accept_lengths(**options):
    """Tokens per speculative iteration of the first RL step, the first two and all three."""
    parts = [TRACE.select(TRACE.rl_steps[:end]) for end in (1, 2, 3)]
    return [simulate(part, "learned:5", costs=COSTS, **options).summary["mean_accept_length"] for part in parts]


def test_drafter_grows_stale_unless_idle_time_trains_it():
    aged, trained = accept_lengths(acceptance=AGING), accept_lengths(acceptance=AGING, spot=QUICK)
    assert aged[0] > aged[1] > aged[2]
    assert trained[0] == aged[0]
    assert trained[1] > aged[1]
    assert trained[2] > trained[1] > trained[0]


def test_spot_training_does_not_change_rollout_beside_it():
    alone, beside = (
        simulate(TRACE, "learned:5", costs=COSTS, acceptance="geometric:0.8", spot=s) for s in (None, QUICK)
    )
    assert alone.makespan_s == beside.makespan_s
    found = beside.summary["spot_training"]
    assert found["updates"] > 0
    assert 0 < found["used_share"] <= 1
    assert alone.summary["spot_training"] is None
    assert alone.summary["bubble_fraction"] == pytest.approx(beside.summary["bubble_fraction"])


def test_a_policy_sees_how_fresh_its_drafter_is():
    policy = Handing(Strategy.chain("learned", 5))
    simulate(TRACE, policy, costs=COSTS, acceptance="geometric:0.5", decision_block=50)
    ages = [state.drafters["learned"].age for selector in policy.built for state in selector.states]
    assert list(dict.fromkeys(ages)) == [0, 1, 2]


def test_spot_training_comes_from_file_or_by_name(tmp_path):
    path = tmp_path / "spot.json"
    path.write_text(json.dumps(QUICK.model_dump(mode="json")))
    assert load_spot_training(path) == QUICK
    assert load_spot_training("tlt") == SpotTraining()
    with refused(ConfigError, naming=("start_s",)):
        load_spot_training({"start_s": -1})
