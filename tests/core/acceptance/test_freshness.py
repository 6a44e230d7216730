"""Freshness: acceptance falls with age, rises with training, and wraps any other model."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.acceptance.counterfactuals import counterfactuals
from tests.refused import refused
from tltlab.acceptance.base import GeometricAcceptance, RequestArrays
from tltlab.acceptance.freshness import FreshAcceptance, Freshness, fit_freshness, measured_state
from tltlab.acceptance.load import load_acceptance
from tltlab.errors import ConfigError
from tltlab.state import DrafterState
from tltlab.strategy import Strategy

CHAIN = Strategy.chain("learned", 5)
HALF = Freshness(untrained=0.5, updates_to_train=2.0, floor=0.25, age_steps=4.0)


def wrapped(alpha=0.8, **settings):
    return FreshAcceptance(base=GeometricAcceptance(alpha=alpha), **{"freshness": HALF, **settings})


def test_levels_at_the_ends():
    assert HALF.level(age=0, updates=0) == 0.5
    assert HALF.level(age=0, updates=1e6) == pytest.approx(1.0)
    assert HALF.level(age=1e6, updates=1e6) == pytest.approx(0.25)


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0, 10), st.floats(0, 10))
def test_training_helps_and_age_harms(age, updates, older, more):
    now = HALF.level(age, updates)
    assert 0.25 - 1e-12 <= now <= 1.0
    assert HALF.level(age + older, updates) <= now + 1e-12
    assert HALF.level(age, updates + more) >= now - 1e-12


def test_the_level_multiplies_the_chance_of_every_token():
    model = wrapped().at_freshness(DrafterState(age=0, updates=0))
    with pytest.raises(TypeError, match="in_state"):
        wrapped().curve(CHAIN)
    expected = GeometricAcceptance(alpha=0.4)
    assert model.distribution(CHAIN) == pytest.approx(expected.distribution(CHAIN))
    assert model.tokens_per_iteration(CHAIN) == pytest.approx(expected.tokens_per_iteration(CHAIN))
    assert model.num_drafted(CHAIN) == 5
    assert model.curve(Strategy.chain("ngram", 5)) == pytest.approx(0.8 ** np.arange(1, 6)), "another drafter's"


@pytest.mark.parametrize(("alpha", "trained"), [(0.3, 0.6), (0.9, 1.0)])
def test_a_base_measured_stale_improves_with_training(alpha, trained):
    model = wrapped(alpha=alpha, measured={"age": 0, "updates": 0})
    for updates, chance in ((0, alpha), (1000, trained)):
        curve = model.at_freshness(DrafterState(updates=updates)).curve(CHAIN)
        assert curve == pytest.approx(chance ** np.arange(1, 6))


def test_a_model_that_differs_by_request_can_be_wrapped():
    inner = load_acceptance("seer-siblings")
    model = FreshAcceptance(base=inner, freshness=HALF)
    stale, new = model.at_freshness(DrafterState(age=50)), model.at_freshness(DrafterState(updates=1000))
    requests = RequestArrays(np.zeros(2), np.array([0.0, 7.0]))
    assert (stale.survival(CHAIN, requests) < new.survival(CHAIN, requests)).all()


def test_the_assumption_gives_the_published_step():
    # arXiv 2511.16665, table 6: 4.59 with the drafter that RL began with, 6.53 with the adaptive one.
    tree = Strategy("learned", 8, 4, 48)
    curve = load_acceptance("tlt-qwen2.5-32b")
    adaptive = FreshAcceptance(base=curve, freshness=Freshness(untrained=0.976, floor=0.5))
    level = adaptive.at_freshness(DrafterState())
    assert level.tokens_per_iteration(tree) == pytest.approx(6.53, rel=0.005)
    untrained = 0.976 * Freshness().untrained
    base = FreshAcceptance(base=curve, freshness=Freshness(untrained=untrained, floor=0.5))
    assert base.at_freshness(DrafterState()).tokens_per_iteration(tree) == pytest.approx(4.59, rel=0.01)


def test_nothing_scales_from_a_level_of_zero():
    model = wrapped(freshness=Freshness(untrained=0, floor=0), measured={"age": 0, "updates": 0})
    with refused(ConfigError, naming=("0",)):
        model.at_freshness(DrafterState())


def recorded(ages, updates, tokens=4000):
    """Counterfactuals drawn from HALF on top of a chance of 0.8."""
    rng = np.random.default_rng(0)
    rows = []
    for sample, (age, count) in enumerate((a, u) for a in ages for u in updates):
        chance = 0.8 * HALF.level(age, count or 0)
        accepted = np.minimum(rng.geometric(1 - chance, tokens) - 1, 6)
        rows.append((0, "p", sample, 0, "learned", age, count, 6, accepted))
    return counterfactuals(rows)


def test_what_did_not_vary_has_no_effect():
    by_age, notes = fit_freshness(recorded([0, 2, 8], [5]), "learned")
    assert by_age.level(0, 0) == by_age.level(0, 99)
    assert by_age.level(8, 0) < 0.8 * by_age.level(0, 0)
    assert ["number of updates" in note for note in notes] == [True]
    by_training, notes = fit_freshness(recorded([0], [0, 2, 8]), "learned")
    assert by_training.level(50, 8) == pytest.approx(by_training.level(0, 8))
    assert ["one age" in note for note in notes] == [True]


def test_rows_without_freshness_are_refused():
    for ages, drafter in (([3], "learned"), ([0, 1], "other")):
        with refused(ConfigError, naming=(drafter,)):
            fit_freshness(recorded(ages, [7]), drafter)


def run_like(truth, *, steps=10, every=1, per_step=16, ages=3, tokens=150, seed=0):
    """Rows as a run writes them: the drafter in service and those of the last trainings along the same responses.

    Some responses are easier than others, by a fifth; a fresh and trained drafter's token is kept with chance 0.7.
    """
    rng = np.random.default_rng(seed)
    published, rows = [(0, 0)], []
    for step in range(steps):
        if step and step % every == 0:
            published.append((step, published[-1][1] + int(rng.integers(10, 30))))
        for sample in range(per_step):
            ease, length = np.exp(rng.normal(-0.02, 0.2)), max(5, int(rng.lognormal(np.log(tokens), 0.6)))
            for since, updates in published[-1 - ages :]:
                chance = min(0.98, 0.7 * ease * truth.level(step - since, updates))
                accepted = np.minimum(rng.geometric(1 - chance, length) - 1, 4)
                rows.append((step, "p", sample, 0, "learned", step - since, updates, 4, accepted))
    return counterfactuals(rows)


AGES = Freshness(untrained=0.4, updates_to_train=50, floor=0.2, age_steps=6)
FROZEN_TARGET = Freshness(untrained=0.4, updates_to_train=50, floor=0.4, age_steps=1e8)


def effects(model):
    """Levels after three RL steps without training, and after none of a hundred updates."""
    trained = model.level(0, 100)
    return model.level(3, 100) / trained, model.level(0, 0) / trained


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("truth", [AGES, FROZEN_TARGET])
def test_a_fit_separates_ageing_from_training(truth, every):
    fits = [fit_freshness(run_like(truth, every=every, seed=seed), "learned")[0] for seed in range(4)]
    ages, trainings = zip(*map(effects, fits), strict=True)
    of_age, of_training = effects(truth)
    assert np.array(ages) == pytest.approx(of_age, abs=0.06)
    assert np.array(trainings) == pytest.approx(of_training, abs=0.08)
    assert np.mean(ages) == pytest.approx(of_age, abs=0.03)


def test_recorded_states_are_described_where_no_parameter_is():
    table = run_like(AGES, steps=2, tokens=600)
    found, notes = fit_freshness(table, "learned")
    assert any("do not identify" in note for note in notes)
    states = sorted({(a, u) for a, u in zip(table["drafter_age"], table["drafter_updates"], strict=True)})
    ratios = [found.level(*state) / AGES.level(*state) for state in states]
    assert ratios == pytest.approx([np.mean(ratios)] * len(ratios), rel=0.15)
    trained = run_like(AGES).assign(drafter_updates=lambda rows: rows["drafter_updates"] + 10_000)
    assert any("untrained" in note for note in fit_freshness(trained, "learned")[1])


def test_easy_rl_steps_are_not_taken_for_training():
    """Along the same text both drafters are alike; the later RL step, with a later drafter, is the easier one."""
    rng = np.random.default_rng(0)
    rows = []
    for step in range(6):
        for sample in range(8):
            chance = min(0.95, (0.4 + 0.05 * step) * np.exp(rng.normal(0, 0.5)))
            for age in range(min(step, 3) + 1):
                accepted = np.minimum(rng.geometric(1 - chance, 200) - 1, 4)
                rows.append((step, "p", sample, 0, "learned", age, 20 * (step - age), 4, accepted))
    # Training would seem to bring 0.91 where each RL step's own ease is not taken out.
    assert min(effects(fit_freshness(counterfactuals(rows), "learned")[0])) > 0.95


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 200), st.floats(0.1, 10)), min_size=1, max_size=6))
def test_one_state_stands_for_several_of_its_level(states):
    age, updates, weight = np.array(states, float).T
    fresh = Freshness(untrained=0.5, updates_to_train=50.0, floor=0.5, age_steps=1e6)
    found = measured_state(fresh, age, updates, weight)
    mean = float((fresh.levels(age, updates) * weight).sum() / weight.sum())
    assert fresh.level(found.age, found.updates) == pytest.approx(mean, abs=1e-4)


def test_shipped_trees_come_with_assumed_freshness_too():
    base, model = load_acceptance("tlt-qwen2.5-32b"), load_acceptance("tlt-qwen2.5-32b-fresh")
    assert model.base == base
    assert model.freshness == Freshness()
    assert "assumption" in model.notes[0]
    tree = Strategy("learned", 8, 8, 48)
    best = model.in_state({"learned": DrafterState(age=0, updates=10**6)})
    stale = model.in_state({"learned": DrafterState(age=10**6, updates=10**6)})
    assert best.tokens_per_iteration(tree) == pytest.approx(base.tokens_per_iteration(tree))
    assert stale.tokens_per_iteration(tree) < best.tokens_per_iteration(tree)
