"""Budgets that learn, in simulation: what they are told, and what drafting by length is worth on a long tail."""

from pathlib import Path

import numpy as np
import pytest

import tltlab
from tests.refused import refused
from tltlab.acceptance.base import GeometricAcceptance
from tltlab.drafters.budget import UniformBudget
from tltlab.errors import ConfigError
from tltlab.lengths.generate import generate, log_normal
from tltlab.lengths.model import of_regime
from tltlab.policies.policy import LengthAwareBudgetSpec, Policy
from tltlab.policies.specs import FixedSpec
from tltlab.sim import Scenario, simulate
from tltlab.sim.engine.by_request import Rates
from tltlab.sim.engine.regime import Regimes
from tltlab.sim.engine.requests import requests_by_step
from tltlab.sim.scenario import tell_each_other
from tltlab.state import RequestState
from tltlab.strategy import NO_SPECULATION, Strategy

from ..workloads import FREE

TRACES = Path(__file__).resolve().parents[3] / "traces"
# Verified tokens are dear: 80 of them take as long as all else.
COSTS = FREE.model_copy(
    update={
        "base_s": 4e-3, "per_request_s": 4e-5, "per_token_s": 1e-4, "per_context_s": 2e-8, "prefill_per_token_s": 1e-6
    }
)  # fmt: skip


class Listening(UniformBudget):
    """An even split that notes what it is told of."""

    def __init__(self) -> None:
        self.heard: list[tuple[tuple[int, str, int, int], int, int, int]] = []

    def finished(self, request: RequestState, *, drafted: int, accepted: int) -> None:
        self.heard.append((request.key, request.generated_tokens, drafted, accepted))


def by_length(tokens_to_verify: int, **settings) -> Policy:
    """Drafts of up to 8 tokens, tokens_to_verify - 1 on average, shared out by expected length."""
    chosen = FixedSpec(strategy=Strategy("suffix", 8, 1, tokens_to_verify))
    return Policy(selector=chosen, budget=LengthAwareBudgetSpec(**settings))


@pytest.mark.parametrize("sampled", [False, True])
def test_a_budget_hears_of_each_request_once_with_all_that_was_drafted_and_kept(sampled: bool):
    chain, budget = Strategy.chain("suffix", 4), Listening()
    trace = log_normal(prompts=1, group_size=3, rl_steps=1, median=40, cap=90, workers=1)
    (requests,) = requests_by_step(trace)
    batch = Rates(model=GeometricAcceptance(alpha=1.0), costs=COSTS, budgets=[budget], sampled=sampled, refresh=3)(
        requests
    )
    for request in range(3):
        batch.admit(request, 0.0)
    regimes = Regimes((NO_SPECULATION, chain), COSTS, GeometricAcceptance(alpha=1.0))
    while len(batch):
        batch.advance(regimes.at(chain, len(batch)), np.inf, np.inf)
    assert len(budget.heard) == 2, "the last one counts when its time has passed"
    batch.settle()
    passes = [-(-tokens // 5) for tokens in requests.response_tokens]
    wanted = zip(requests.keys, requests.response_tokens, passes, strict=True)
    assert sorted(budget.heard) == sorted((key, tokens, 4 * n, 4 * n) for key, tokens, n in wanted)


def test_after_a_rollout_each_worker_hears_of_what_finished_on_the_others():
    trace = log_normal(prompts=6, group_size=2, rl_steps=1, workers=3)
    (rollout,) = simulate(trace, costs=COSTS).rollouts
    budgets = [Listening() for _ in range(3)]
    tell_each_other(budgets, rollout)
    for worker, budget in enumerate(budgets):
        elsewhere = np.flatnonzero(rollout.worker_of != worker)
        assert [key for key, *_ in budget.heard] == [rollout.requests.keys[r] for r in elsewhere]
        assert all(drafted == accepted == 0 for *_, drafted, accepted in budget.heard)


def test_drafting_by_length_beats_drafting_evenly_where_verifying_is_dear():
    """Prompts come back: from the second RL step on their lengths are known. The even split has the same total."""
    trace = generate(
        of_regime("reasoning"), num_rl_steps=3, prompts_per_step=16, group_size=8, num_prompts=16, seed=1, num_workers=2
    )
    scenario = Scenario.of(trace, costs=COSTS, acceptance="geometric:0.6")

    def later_s(policy: Policy) -> float:
        return float(np.mean([rollout.makespan_s for rollout in scenario.rollouts(policy)[1:]]))

    for tokens_to_verify, most in ((9, 0.8), (5, 0.96)):
        even = Policy(selector=FixedSpec(strategy=Strategy("suffix", 8, 1, tokens_to_verify)))
        by_class = by_length(tokens_to_verify, base_s=8e-3, token_s=1e-4)
        assert later_s(by_class) < most * later_s(even)


def test_the_shipped_policy_runs_and_repeats_itself():
    trace = tltlab.read(TRACES / "tiny")
    runs = [simulate(trace, "das", acceptance="geometric:0.6", rl_steps=[0, 1]) for _ in range(2)]
    assert runs[0].summary["makespan_s_per_step"] == runs[1].summary["makespan_s_per_step"]
    assert runs[0].summary["regret"] is None, "the bound drafts for all alike"


def test_the_shipped_policy_says_which_drafters_acceptance_is_missing():
    with refused(ConfigError, naming=("suffix",)):
        simulate(tltlab.read(TRACES / "subset-sum-small"), "das")
