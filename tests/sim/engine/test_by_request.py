"""Requests with gains or their own drafts: batches against an oracle, fluid against sampled, budgets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.curves import CurveAcceptance
from tests.refused import refused
from tltlab.acceptance.base import GeometricAcceptance, RequestArrays
from tltlab.acceptance.curves import SiblingAcceptance
from tltlab.acceptance.load import load_acceptance
from tltlab.drafters.budget import UniformBudget
from tltlab.errors import ConfigError
from tltlab.lengths.generate import generate, log_normal
from tltlab.lengths.model import of_regime
from tltlab.policies.policy import LengthAwareBudgetSpec, Policy
from tltlab.policies.specs import FixedSpec
from tltlab.sim import Scenario, simulate
from tltlab.sim.engine.by_request import Rates
from tltlab.sim.engine.random_numbers import request_seeds, uniforms
from tltlab.sim.engine.regime import Regimes
from tltlab.sim.engine.worker import RolloutSimulator
from tltlab.sim.scenario import exchange_responses
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.traces.trace import read

from ..workloads import COSTS, FREE, HALF, TINY, requests_of, up_to, with_terms
from .slow_oracle import finish_times

CHAINS = (Strategy.chain("ngram", 5), Strategy("ngram", 4, 1, 3))
CURVES = CurveAcceptance(keep_logits=(0.2, 0.6, 0.9), drift=0.3)
SIBLINGS = SiblingAcceptance(alone=0.3, most=0.8, exponent=0.6, own_tokens=300)
BY_CONTEXT = load_acceptance("0.8@1k")


def nominal(chain, costs=COSTS):
    """Costs of the strategies; the gain in them is not used by batches that have their own."""
    return Regimes((NO_SPECULATION, chain), costs, GeometricAcceptance(alpha=0.0))


def run(requests, rates, chain, *, most=99, asks=0):
    selectors = [up_to(most, chain, memoryless=not asks)]
    ahead = False if asks == 1 else None
    engine = RolloutSimulator(costs=rates.costs, selectors=selectors, decision_block=asks or 1, ahead=ahead)
    engine.prepare(nominal(chain, rates.costs), rates)
    return engine.rollout(requests, [list(range(len(requests)))])


class Walker:
    """The oracle's gains, one iteration of one request at a time, from the model's own chances for that request."""

    def __init__(self, requests, model, seed, sampled):
        self.requests, self.model, self.sampled = requests, model, sampled
        self.seeds = request_seeds(seed, requests.keys)
        self.done = set()
        self.finishing = []

    def __call__(self, request, generated, num_speculative, regime):
        if not regime.strategy.speculates:
            gain = 1.0
        else:
            mine = self.requests.keys[request][1]
            beside = sum(self.requests.keys[other][1] == mine for other in self.done)
            prompt = self.requests.prompt_tokens[request]
            one = (np.array([x], float) for x in (generated, beside, prompt))
            kept = self.model.survival(regime.strategy, RequestArrays(*one))[0]
            if self.sampled:
                u = uniforms(self.seeds[[request]], np.array([num_speculative]), 1)[0, 0]
                gain = 1.0 + sum(u >= 1.0 - p for p in kept)
            else:
                gain = 1.0 + float(kept.sum())
        if generated + gain >= self.requests.response_tokens[request] - 1e-6:
            self.finishing.append(request)
        return gain

    def settling(self, costs, chain):
        """Regimes that count the requests finished in one iteration as done when the next one begins."""
        walker = self

        class Settling(Regimes):
            def at(self, strategy, batch, *, loaded=True):
                walker.done.update(walker.finishing)
                return super().at(strategy, batch)

        return Settling((NO_SPECULATION, chain), costs, GeometricAcceptance(alpha=0.0))


def slowly(requests, rates, chain, *, most=99):
    walker = Walker(requests, rates.model, rates.seed, rates.sampled)
    regimes, queue = walker.settling(rates.costs, chain), list(range(len(requests)))
    return finish_times(requests, queue, up_to(most, chain), regimes, rates.costs, gain=walker)


@HALF
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=10),
    st.sampled_from(CHAINS),
    st.sampled_from([CURVES, SIBLINGS, GeometricAcceptance(alpha=0.6), load_acceptance("0.8@12")]),
    st.booleans(),
    st.integers(0, 12),
    st.none() | st.integers(90, 220),
    st.sampled_from([0, 1, 3]),
)
def test_asked_at_every_iteration_it_takes_their_time(lengths, chain, model, sampled, most, capacity, asks):
    requests, costs = requests_of(lengths, group=4), with_terms(COSTS, kv_capacity_tokens=capacity)
    rates = Rates(model=model, costs=costs, seed=3, sampled=sampled, refresh=1)
    fast = run(requests, rates, chain, most=most, asks=asks)
    for request, finish in slowly(requests, rates, chain, most=most).items():
        assert fast.finish_s[request] == pytest.approx(finish, rel=1e-9)


@pytest.mark.parametrize("model", [CURVES, SIBLINGS, BY_CONTEXT], ids=["curves", "siblings", "context"])
@pytest.mark.parametrize("sampled", [False, True])
def test_chances_held_for_many_iterations_stay_close(model, sampled):
    requests = requests_of(drawn_lengths(1, 6.3, 0.8, 4000), group=4)
    rates = Rates(model=model, costs=COSTS, seed=3, sampled=sampled, refresh=model.refresh_iterations)
    fast, slow = run(requests, rates, CHAINS[0]), slowly(requests, rates, CHAINS[0])
    error = np.array([fast.finish_s[r] / t - 1 for r, t in slow.items()])
    assert abs(fast.makespan_s / max(slow.values()) - 1) < 0.005
    assert np.abs(error).mean() < 0.01


def drawn_lengths(seed, mu, sigma, cap):
    return np.random.default_rng(seed).lognormal(mu, sigma, 24).astype(int).clip(1, cap).tolist()


@pytest.mark.parametrize(
    ("model", "budget"),
    [
        (CURVES, None),
        (SIBLINGS, None),
        (BY_CONTEXT, None),
        (CURVES, UniformBudget()),
        (GeometricAcceptance(alpha=0.7), UniformBudget()),
    ],
    ids=["curves", "siblings", "context", "curves with a budget", "alike with a budget"],
)
def test_fluid_is_the_mean_of_sampled_runs(model, budget):
    requests = requests_of(drawn_lengths(2, 7.0, 0.7, 8000), group=4)
    chain = Strategy("ngram", 8, 1, 5) if budget else CHAINS[0]

    def makespan(seed, sampled):
        rates = Rates(model=model, costs=COSTS, seed=seed, sampled=sampled, budgets=[budget] if budget else [])
        return run(requests, rates, chain).makespan_s

    sampled = np.mean([makespan(seed, True) for seed in range(10)])
    assert makespan(0, False) == pytest.approx(sampled, rel=0.01)


def test_what_ended_elsewhere_helps_only_after_it_did():
    requests = requests_of([40, 400], group=2)
    rates = Rates(model=SIBLINGS, costs=COSTS)
    first, second = rates(requests), rates(requests)
    first.admit((0, 0.0))
    second.admit((1, 0.0))
    regime = nominal(CHAINS[0]).at(CHAINS[0], 1)
    while len(first):
        first.advance(regime, np.inf, np.inf)
    alone = rates(requests_of([40, 400], group=2))
    alone.admit((1, 0.0))
    expected = alone.advance(regime, 1, np.inf).tokens
    assert second.advance(regime, 1, np.inf).tokens == expected
    first.settle()
    assert second.advance(regime, 1, np.inf).tokens > expected + 0.1


def running(rates, lengths):
    """A batch of samples of four to a prompt, all admitted."""
    batch = rates(requests_of(lengths, group=4))
    for request in range(len(lengths)):
        batch.admit((request, 0.0))
    return batch


class Noting(UniformBudget):
    """An even split, or the tokens that are given, which notes what was accepted lately and which requests finished."""

    def __init__(self, *tokens):
        self.tokens = tokens
        self.seen = []
        self.ended = []

    def allot(self, state, strategy):
        self.seen.append([request.recent_acceptance for request in state.requests])
        return list(self.tokens[: state.batch]) if self.tokens else super().allot(state, strategy)

    def finished(self, request, *, drafted, accepted):
        self.ended.append((request.key, request.generated_tokens, drafted, accepted))


@pytest.mark.parametrize("sampled", [False, True])
def test_budget_is_paid_for_by_tokens_it_verifies(sampled):
    chain = Strategy("ngram", 6, 1, 4)
    rates = Rates(model=GeometricAcceptance(alpha=1.0), costs=COSTS, budgets=[Noting(0, 1, 5)], sampled=sampled)
    batch = running(rates, [900, 900, 900])
    macro = batch.advance(nominal(chain).at(chain, 3), 1, np.inf)
    assert macro.gains[:, 0].tolist() == [1, 2, 6]
    cost = COSTS.iteration(Strategy.chain("ngram", 5), tokens_to_verify=3.0, drafter_loaded=True)
    assert macro.seconds == pytest.approx(cost.seconds(3, 60))
    assert macro.regime.num_drafted == 2.0
    assert macro.regime.strategy == chain


class Cutting(Noting):
    """A budget that cuts drafts which were made to their full depth."""

    drafts_whole = True


def test_drafts_that_are_cut_are_paid_for_whole():
    chain = Strategy.chain("learned", 6)
    rates = Rates(model=GeometricAcceptance(alpha=1.0), costs=COSTS, budgets=[Cutting(0, 0, 3)])
    macro = running(rates, [900, 900, 900]).advance(nominal(chain).at(chain, 3), 1, np.inf)
    cost = COSTS.iteration(chain, tokens_to_verify=2.0, drafter_loaded=True)
    assert macro.seconds == pytest.approx(cost.seconds(3, 60))
    assert macro.gains[:, 0].tolist() == [1, 1, 4]


def test_a_budget_sees_what_was_accepted_lately():
    budget = Noting()
    rates = Rates(model=CURVES, costs=COSTS, budgets=[budget], sampled=True)
    run(requests_of([300, 300], group=4), rates, CHAINS[0])
    assert budget.seen[0] == [None, None]
    first, second = budget.seen[1]
    assert first != second
    assert 0 <= first <= 5


@pytest.mark.parametrize("tokens", [(1,), (1, 9), (-1, 2)])
def test_a_budget_that_breaks_its_contract_is_refused(tokens):
    batch = running(Rates(model=CURVES, costs=COSTS, budgets=[Noting(*tokens)]), [50, 50])
    with refused(ConfigError):
        batch.advance(nominal(CHAINS[0]).at(CHAINS[0], 2), 1, np.inf)


def test_trees_have_no_budget():
    tree = Strategy("learned", 8, 4, 48)
    model = load_acceptance("tlt-qwen2.5-32b")
    batch = running(Rates(model=model, costs=COSTS, budgets=[UniformBudget()]), [50])
    regimes = Regimes((NO_SPECULATION, tree), COSTS, model)
    with refused(ConfigError, naming=("trees",)):
        batch.advance(regimes.at(tree, 1), 1, np.inf)


# Verified tokens are dear: 80 of them take as long as all else.
DEAR = with_terms(FREE, base_s=4e-3, per_request_s=4e-5, per_token_s=1e-4, per_context_s=2e-8, prefill_per_token_s=1e-6)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_budget_is_reported_of_each_request_once(sampled):
    chain, budget, lengths = CHAINS[0], Noting(), [24, 41, 90]
    rates = Rates(model=GeometricAcceptance(alpha=1.0), costs=DEAR, budgets=[budget], sampled=sampled, refresh=3)
    batch, regimes = running(rates, lengths), nominal(chain, DEAR)
    while len(batch):
        batch.advance(regimes.at(chain, len(batch)), np.inf, np.inf)
    assert len(budget.ended) == 2, "the last one counts when its time has passed"
    batch.settle()
    passes = [-(-tokens // 6) for tokens in lengths]
    assert budget.ended == [((0, "p0", i, 0), lengths[i], 5 * n, 5 * n) for i, n in enumerate(passes)]


def test_workers_are_reported_of_each_other_s_requests():
    trace = log_normal(prompts=6, group_size=2, rl_steps=1, workers=3)
    (rollout,) = simulate(trace, costs=DEAR).rollouts
    budgets = [Noting() for _ in range(3)]
    exchange_responses(budgets, rollout)
    for worker, budget in enumerate(budgets):
        elsewhere = np.flatnonzero(rollout.worker_of != worker)
        assert [key for key, *_ in budget.ended] == [rollout.requests.keys[r] for r in elsewhere]
        assert all(drafted == accepted == 0 for *_, drafted, accepted in budget.ended)


@pytest.mark.parametrize(("tokens_to_verify", "most"), [(9, 0.8), (5, 0.96)])
def test_drafting_by_length_beats_drafting_evenly(tokens_to_verify, most):
    """Prompts come back: from the second RL step on their lengths are known. The even split has the same total."""
    trace = generate(
        of_regime("reasoning"), num_rl_steps=3, prompts_per_step=16, group_size=8, num_prompts=16, seed=1, num_workers=2
    )
    scenario = Scenario.of(trace, costs=DEAR, acceptance="geometric:0.6")
    chosen = FixedSpec(strategy=Strategy("suffix", 8, 1, tokens_to_verify))
    by_length, even = (
        np.mean([rollout.makespan_s for rollout in scenario.rollouts(Policy(selector=chosen, budget=budget))[1:]])
        for budget in (LengthAwareBudgetSpec(base_s=8e-3, token_s=1e-4), None)
    )
    assert by_length < most * even


def test_the_shipped_budget_runs_and_repeats_itself():
    runs = [simulate(read(TINY), "das", acceptance="geometric:0.6", rl_steps=[0, 1]) for _ in range(2)]
    assert runs[0].summary["makespan_s_per_step"] == runs[1].summary["makespan_s_per_step"]
    assert runs[0].summary["regret"] is None, "the bound drafts for all alike"
    with refused(ConfigError, naming=("suffix",)):
        simulate(read(TINY.parent / "subset-sum-small"), "das")
