"""Goodput: what promises the most tokens per second, by known costs and by acceptance that is learned."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tltlab.costs.linear import LinearCosts
from tltlab.policies.goodput import Goodput
from tltlab.state import StepOutcome
from tltlab.strategy import NO_SPECULATION, Strategy

from .iterations import at, pick, teach

CHAINS = tuple(Strategy.chain("ngram", depth) for depth in (1, 2, 4, 8))
COSTS = LinearCosts(
    base_s=4e-3, per_request_s=1e-5, per_token_s=1e-4, per_context_s=1e-8, sd_base_s=2e-4, sd_idle_s=1e-4,
    draft_level_s=1e-4, draft_level_per_request_s=0.0,
)  # fmt: skip


def goodput(*strategies, **settings):
    settings = {"epsilon": 0.0, "rng": np.random.default_rng(0)} | settings
    return Goodput(strategies or CHAINS, COSTS, **settings)


def keep(policy, strategy, chance, times, batch=8, seed=1):
    """Tell `policy` of iterations that kept each token of the draft with `chance` while all before it were kept."""
    rng = np.random.default_rng(seed)
    for _ in range(times):
        kept = np.cumprod(rng.random((batch, strategy.draft_depth)) < chance, axis=1).sum(axis=1)
        drafted = (strategy.draft_depth,) * batch
        teach(policy, strategy, StepOutcome(elapsed_s=0.01, batch=batch, drafted=drafted, accepted=kept.tolist()))


@given(st.floats(0.05, 0.95), st.integers(1, 256), st.floats(0, 1e6))
def test_it_chooses_what_brute_force_finds_best(chance, batch, context):
    policy = goodput(prior=chance)
    chain = sum(chance**i for i in range(1, 9))

    def rate(strategy):
        tokens = 1.0 + sum(chance**i for i in range(1, strategy.draft_depth + 1))
        return batch * tokens / COSTS.iteration(strategy, drafter_loaded=True).seconds(batch, context)

    assert policy.tokens(CHAINS[3]) == pytest.approx(1.0 + chain)
    best = max(rate(s) for s in (NO_SPECULATION, *CHAINS))
    assert rate(pick(policy, batch, context_tokens=context)) == pytest.approx(best)


@pytest.mark.parametrize(
    ("prior", "drafted", "chance", "asked", "tokens"),
    [
        pytest.param(0.9, 4, 0.5, 4, 1 + 0.5 + 0.25 + 0.125 + 0.0625, id="what is accepted"),
        pytest.param(0.9, 4, 0.5, 2, 1 + 0.5 + 0.25, id="for shorter chains too"),
        pytest.param(0.6, 2, 1.0, 8, 3 + sum(0.6**i for i in range(1, 7)), id="beyond it the prior"),
    ],
)
def test_it_learns_what_each_position_brings(prior, drafted, chance, asked, tokens):
    policy = goodput(prior=prior)
    keep(policy, Strategy.chain("ngram", drafted), chance, times=200)
    assert policy.tokens(Strategy.chain("ngram", asked)) == pytest.approx(tokens, rel=0.05)


@pytest.mark.parametrize("chance", [0.4, 0.6, 0.8])
def test_expected_values_teach_what_their_samples_would(chance):
    """The simulator's fluid mode reports the mean; from it the shallower chains must not look too good."""
    policy, means = goodput(window=10_000), {d: sum(chance**i for i in range(1, d + 1)) for d in (1, 2, 4, 8)}
    for _ in range(200):
        teach(policy, CHAINS[3], StepOutcome(elapsed_s=0.01, batch=9, drafted=(8.0,) * 9, accepted=(means[8],) * 9))
    found = {chain.draft_depth: policy.tokens(chain) - 1.0 for chain in CHAINS}
    assert found == pytest.approx(means, rel=0.04)


def test_more_than_the_strategy_verifies_counts_as_all():
    """A budget may draft 8 tokens for one request and none for another where the strategy verifies 4 of each."""
    trimmed = Strategy("ngram", 8, 1, 5)
    policy = goodput(trimmed, window=10_000)
    for _ in range(200):
        teach(policy, trimmed, StepOutcome(elapsed_s=0.01, batch=10, drafted=(8.0,) * 10, accepted=(5.5,) * 10))
    assert 4.9 <= policy.tokens(trimmed) <= 5.0


def test_a_refused_drafter_is_tried_again_later():
    policy = goodput(window=100)
    assert pick(policy, 8).speculates
    keep(policy, CHAINS[2], 0.0, times=50)
    assert pick(policy, 8) == NO_SPECULATION
    back_on = []
    for _ in range(1000):
        teach(policy, NO_SPECULATION, StepOutcome(elapsed_s=0.01, batch=8))
        back_on.append(pick(policy, 8).speculates)
    assert not any(back_on[:100])
    assert back_on[-1]


def test_exploration_happens_with_the_chance_that_is_recorded():
    policy = goodput(epsilon=0.25)
    chosen = []
    for _ in range(4000):
        choice = policy.choose(at(512))
        chosen.append(choice.strategy)
        assert choice.propensity == pytest.approx(0.05 + 0.75 * (choice.strategy == NO_SPECULATION))
    assert chosen.count(CHAINS[0]) / len(chosen) == pytest.approx(0.05, abs=0.015)


def test_drafters_are_distinguished():
    suffix = Strategy.chain("suffix", 4)
    two = goodput(CHAINS[2], suffix)
    keep(two, CHAINS[2], 0.2, times=100)
    keep(two, suffix, 0.8, times=100)
    assert pick(two, 4) == suffix
