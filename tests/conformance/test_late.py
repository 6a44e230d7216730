"""Every shipped policy that learns, with its outcomes one and three choices late, against outcomes at once."""

import math
from functools import cache
from pathlib import Path

import pytest

from tltlab.policies.engines import AcceptedThresholds
from tltlab.policies.policy import load_policy
from tltlab.sim.scenario import Scenario

TRACES = Path(__file__).resolve().parents[2] / "traces"
SEEDS = range(2)
MOST_LOST = 0.02

POLICIES = {
    **{name: name for name in ("beg-mab", "epsilon-greedy", "ucb1", "goodput", "adaptive", "explore")},
    "a few at a time": "ngram:4@16",
    "ladder": {"kind": "ladder", "strategies": ["ngram:1", "ngram:3", "ngram:7"]},
    "doubling": {"kind": "ladder", "strategies": ["suffix:2", "suffix:4", "suffix:8"], "warmup": 1, "hold": 1},
    "hedge": {"kind": "hedge", "strategies": ["suffix:4", "ngram:4", "ngram:1"]},
    "thresholds": AcceptedThresholds,
}  # fmt: skip


@cache
def scenarios():
    """Recorded traces with costs of a GPU, on which drafting pays less the larger the batch is."""
    return tuple(
        Scenario.of(
            TRACES / name, costs="h100-qwen2.5-7b", acceptance="geometric:0.7", mode="sampled", seed=seed,
            rl_steps=rl_steps,
        )
        for name, rl_steps in (("tiny", None), ("gcd-small", None), ("subset-sum-small", [0, 5, 10]))
        for seed in SEEDS
    )  # fmt: skip


def busy_s(policy, delay):
    """Worker-seconds for all tokens of all traces."""
    chosen = load_policy(policy, held=True)
    return math.fsum(r.busy_s for scenario in scenarios() for r in scenario.rollouts(chosen, delay=delay))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_late_outcomes_cost_a_policy_little(policy):
    at_once = busy_s(policy, 0)
    lost = {delay: busy_s(policy, delay) / at_once - 1 for delay in (1, 3)}
    assert max(lost.values()) <= MOST_LOST, lost
