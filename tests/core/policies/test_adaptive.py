"""Adaptive: learns what iterations take and bring, and then drafts what is best."""

import json

import numpy as np
import pytest

from tltlab.costs.linear import LinearCosts
from tltlab.policies.adaptive import Adaptive
from tltlab.policies.policy import Policy, load_policy
from tltlab.policies.specs import AdaptiveSpec
from tltlab.state import StepOutcome
from tltlab.strategy import NO_SPECULATION
from tltlab.testing import check_selector

from .iterations import at, pick, teach

COSTS = LinearCosts(
    base_s=4e-3, per_request_s=1e-5, per_token_s=1e-4, per_context_s=1e-8, sd_base_s=2e-4, sd_idle_s=0.0,
    draft_level_s=1e-4, draft_level_per_request_s=0.0,
)  # fmt: skip


class World:
    """Decoding where each drafted token is kept with a chance by drafter and iterations take what `costs` say."""

    def __init__(self, kept, costs=COSTS, seed=0):
        self.kept, self.costs, self.rng = kept, costs, np.random.default_rng(seed)

    def seconds(self, strategy, batch):
        return self.costs.iteration(strategy).seconds(batch, 500.0 * batch)

    def tokens(self, strategy):
        return 1.0 + sum(self.kept[strategy.drafter] ** i for i in range(1, strategy.draft_depth + 1))

    def decode(self, policy, iterations, batch, rl_step=0, after=lambda choice: None):
        """Let the policy choose; the share of time that its choices lost, and they. `after` sees each of them."""
        lost, total, chosen = 0.0, 0.0, []
        takes = {s: self.seconds(s, batch) for s in policy.strategies}
        rates = {s: self.tokens(s) / takes[s] for s in takes}
        loss = {s: 1.0 - rates[s] / max(rates.values()) for s in rates}
        for _ in range(iterations):
            choice = policy.choose(at(batch, rl_step, context_tokens=500.0 * batch))
            strategy = choice.strategy
            depth, seconds = strategy.draft_depth, takes[strategy]
            alive = self.rng.random((batch, depth)) < self.kept.get(strategy.drafter, 0.0)
            accepted = np.cumprod(alive, axis=1).sum(axis=1).tolist() if depth else ()
            elapsed_s = seconds * float(self.rng.lognormal(0.0, 0.08))
            policy.observe(choice, StepOutcome(elapsed_s=elapsed_s, batch=batch, accepted=accepted))
            lost += seconds * loss[strategy]
            total += seconds
            chosen.append(strategy)
            after(choice)
        return lost / total, chosen


def adaptive(*drafters, **settings):
    return Adaptive(drafters or ("ngram",), **({"rng": np.random.default_rng(3)} | settings))


def test_it_meets_the_contract_of_selectors():
    check_selector(lambda rng: Adaptive(("learned", "suffix"), rng=rng, switch_s=0.05, exploration=0.0))


@pytest.mark.parametrize("kept", [0.05, 0.5, 0.85])
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_it_finds_the_best_strategy(kept, batch):
    world, policy = World({"ngram": kept}), adaptive()
    world.decode(policy, 600, batch)
    lost, _ = world.decode(policy, 1500, batch)
    assert lost < 0.015
    best, context = policy.strategies[policy.best_], 500.0 * batch
    assert policy.seconds(batch, context)[policy.best_] == pytest.approx(world.seconds(best, batch), rel=0.05)
    assert policy.tokens(batch)[policy.best_] == pytest.approx(world.tokens(best), rel=0.05)


def test_drafts_not_found_cost_what_was_verified():
    """A text drafter finds much in a small batch, little in a large one, where depth 8 then costs little."""
    rng, policy = np.random.default_rng(5), adaptive("suffix")
    found, depth = {8: 0.9, 96: 0.05}, np.arange(9)

    def seconds(batch, drafted, deep):
        tokens = COSTS.per_request_s * batch + COSTS.per_token_s * (batch + drafted)
        return COSTS.base_s + tokens + (deep > 0) * (COSTS.sd_base_s + COSTS.draft_level_s * deep)

    for i in range(1500):
        batch = 96 if i % 100 < 50 else 8
        strategy = pick(policy, batch)
        deep = strategy.draft_depth
        drafts = np.where(rng.random(batch) < found[batch], deep, 0)
        kept = np.minimum(np.cumprod(rng.random((batch, deep)) < 0.8, axis=1).sum(axis=1), drafts)
        elapsed_s = float(seconds(batch, int(drafts.sum()), deep)) * float(rng.lognormal(0.0, 0.08))
        drafted, accepted = (drafts.tolist(), kept.tolist()) if deep else ((), ())
        teach(policy, strategy, StepOutcome(elapsed_s=elapsed_s, batch=batch, drafted=drafted, accepted=accepted))
    for batch, share in found.items():
        takes = seconds(batch, batch * share * depth, depth)
        assert policy.seconds(batch, 0.0)[[0, 4, 8]] == pytest.approx(takes[[0, 4, 8]], rel=0.1)


def test_it_takes_the_better_drafter_at_its_depth():
    world, policy = World({"ngram": 0.3, "suffix": 0.8}), adaptive("ngram", "suffix")
    world.decode(policy, 800, 4)
    lost, chosen = world.decode(policy, 500, 4)
    assert lost < 0.015
    assert sum(strategy.drafter == "suffix" for strategy in chosen) > 450


def test_a_stale_drafter_is_dropped():
    world, policy = World({"ngram": 0.85}), adaptive()
    _, before = world.decode(policy, 800, 32)
    world.kept["ngram"] = 0.02
    world.decode(policy, 60, 32, rl_step=1)
    _, after = world.decode(policy, 300, 32, rl_step=1)
    assert np.mean([s.draft_depth for s in before[-300:]]) > 2
    assert np.mean([s.draft_depth for s in after]) < 1


def test_a_machine_that_slows_down_is_learned_anew():
    world, policy = World({"ngram": 0.7}), adaptive()
    world.decode(policy, 1500, 16)
    before = policy.strategies[policy.best_]
    world.costs = COSTS.model_copy(update={"per_token_s": 8e-4})
    rates = {s: world.tokens(s) / world.seconds(s, 16) for s in policy.strategies}
    world.decode(policy, 400, 16)
    lost, _ = world.decode(policy, 500, 16)
    assert rates[before] < 0.9 * max(rates.values())
    assert lost < 0.05


def test_propensities_are_the_chances_that_were_drawn_from():
    world, policy = World({"ngram": 0.6}), adaptive(exploration=0.05)
    world.decode(policy, 300, 8)
    drawn, tried = [], []

    def look(choice):
        index, total = policy.strategies.index(choice.strategy), policy.chances_[-1]
        chance = policy.chances_[index] - (policy.chances_[index - 1] if index else 0.0)
        assert choice.propensity == pytest.approx(1.0 - total if index == policy.best_ else chance)
        tried.append(index != policy.best_)
        drawn.append(total)

    world.decode(policy, 4000, 8, after=look)
    # As often as the chances say, give or take four standard deviations.
    assert abs(sum(tried) - sum(drawn)) < 4 * sum(drawn) ** 0.5


def test_a_drafter_waits_until_its_switch_pays():
    world, policy = World({"ngram": 0.85}), adaptive(switch_s=0.2)
    world.decode(policy, 2000, 4)
    _, chosen = world.decode(policy, 600, 4, rl_step=1)
    first = next(i for i, strategy in enumerate(chosen) if strategy is not NO_SPECULATION)
    best = max(policy.strategies, key=lambda s: world.tokens(s) / world.seconds(s, 4))
    saved_s = world.seconds(NO_SPECULATION, 4) - world.seconds(best, 4) / world.tokens(best)
    assert first * saved_s == pytest.approx(0.2, rel=0.3)


def test_it_needs_no_file_and_is_one():
    policy = load_policy("adaptive")
    assert [str(s) for s in policy.strategies] == ["none", *(f"ngram:{depth}" for depth in range(1, 9))]
    two = Policy(selector=AdaptiveSpec(drafters=("learned", "suffix"), max_depth=3))
    assert load_policy(json.loads(two.model_dump_json())).strategies == two.strategies
