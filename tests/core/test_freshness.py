"""Freshness: acceptance falls with age, rises with training, and wraps any other model."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tltlab.acceptance import (
    BatchAcceptance,
    FreshAcceptance,
    Freshness,
    GeometricAcceptance,
    TraceAcceptance,
    fresh,
    load_acceptance,
)
from tltlab.acceptance_model import AcceptanceModel, RequestAcceptance
from tltlab.errors import ConfigError, TraceError
from tltlab.freshness import fit_freshness
from tltlab.state import DrafterState
from tltlab.strategy import Strategy

CHAIN = Strategy.chain("learned", 5)
HALF = Freshness(untrained=0.5, updates_to_train=2.0, floor=0.25, age_steps=4.0)


def wrapped(alpha: float = 0.8, **settings) -> FreshAcceptance:
    return FreshAcceptance(base=GeometricAcceptance(alpha=alpha), **{"freshness": HALF, **settings})


def test_levels_at_the_ends():
    assert HALF.level(age=0, updates=0) == 0.5
    assert HALF.level(age=0, updates=1e6) == pytest.approx(1.0)
    assert HALF.level(age=1e6, updates=1e6) == pytest.approx(0.25)


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0, 10), st.floats(0, 10))
def test_training_helps_and_age_harms(age: float, updates: float, older: float, more: float):
    now = HALF.level(age, updates)
    assert 0.25 - 1e-12 <= now <= 1.0
    assert HALF.level(age + older, updates) <= now + 1e-12
    assert HALF.level(age, updates + more) >= now - 1e-12


def test_the_level_multiplies_the_chance_of_every_token():
    model = wrapped().at_freshness(DrafterState(age=0, updates=0))
    expected = GeometricAcceptance(alpha=0.4)
    assert isinstance(model, AcceptanceModel)
    assert model.distribution(CHAIN) == pytest.approx(expected.distribution(CHAIN))
    assert model.tokens_per_iteration(CHAIN) == pytest.approx(expected.tokens_per_iteration(CHAIN))
    assert model.num_drafted(CHAIN) == 5


def test_a_base_that_was_measured_stale_improves_with_training():
    model = wrapped(alpha=0.3, measured={"age": 0, "updates": 0})
    same = model.at_freshness(DrafterState())
    better = model.at_freshness(DrafterState(updates=1000))
    assert same.survival(CHAIN) == pytest.approx(0.3 ** np.arange(1, 6))
    assert better.survival(CHAIN) == pytest.approx(0.6 ** np.arange(1, 6))


def test_a_chance_never_exceeds_one():
    model = wrapped(alpha=0.9, measured={"age": 0, "updates": 0}).at_freshness(DrafterState(updates=1000))
    assert model.survival(CHAIN) == pytest.approx(np.ones(5))


def test_other_drafters_are_left_alone():
    model = wrapped().at_freshness(DrafterState())
    chain = Strategy.chain("ngram", 5)
    assert model.distribution(chain) == pytest.approx(GeometricAcceptance(alpha=0.8).distribution(chain))


@pytest.mark.parametrize("base", ["tlt-qwen2.5-32b", "seer-siblings"])
def test_any_model_can_be_wrapped_and_read_back(base, tmp_path):
    inner = load_acceptance(base)
    model = FreshAcceptance(base=inner, freshness=HALF)
    assert load_acceptance(model.write(tmp_path / "fresh.json")) == model
    stale, new = model.at_freshness(DrafterState(age=50)), model.at_freshness(DrafterState(updates=1000))
    if isinstance(stale, RequestAcceptance):
        assert isinstance(new, RequestAcceptance)
        zeros = np.zeros(2)
        siblings = np.array([0.0, 7.0])
        assert (stale.survival(CHAIN, zeros, zeros, siblings) < new.survival(CHAIN, zeros, zeros, siblings)).all()
        assert (stale.levels("learned", [(0, "p", 0, 0)], 1) == inner.levels("learned", [(0, "p", 0, 0)], 1)).all()
    else:
        tree = Strategy("learned", 8, 4, 48)
        assert stale.tokens_per_iteration(tree) < new.tokens_per_iteration(tree)


def test_batch_bands_keep_their_identity():
    band = {"learned": {1: {"accepted": (0.2, 0.8), "drafted": 1.0}}}
    base = BatchAcceptance(
        bands=({"max_batch": 4, "drafters": band}, {"max_batch": None, "drafters": band})  # type: ignore[arg-type]
    )
    model = FreshAcceptance(base=base, freshness=HALF).at_freshness(DrafterState())
    assert model.at(1) is model.at(4)
    assert model.at(1) is not model.at(5)
    assert model.at(1).tokens_per_iteration(Strategy.chain("learned", 1)) == pytest.approx(1.4)


def test_the_assumption_gives_the_published_step_from_base_to_adaptive():
    # arXiv 2511.16665, table 6: 4.59 with the drafter that RL began with, 6.53 with the adaptive one.
    tree = Strategy("learned", 8, 4, 48)
    curve = load_acceptance("tlt-qwen2.5-32b")
    adaptive = FreshAcceptance(base=curve, freshness=Freshness(untrained=0.976, floor=0.5))
    level = adaptive.at_freshness(DrafterState())
    assert level.tokens_per_iteration(tree) == pytest.approx(6.53, rel=0.005)
    untrained = 0.976 * Freshness().untrained
    base = FreshAcceptance(base=curve, freshness=Freshness(untrained=untrained, floor=0.5))
    assert base.at_freshness(DrafterState()).tokens_per_iteration(tree) == pytest.approx(4.59, rel=0.01)


@pytest.mark.parametrize(
    "settings",
    [{"untrained": 0.4, "floor": 0.5}, {"untrained": 1.5}, {"age_steps": 0}, {"updates_to_train": -1}, {"floor": -0.1}],
)
def test_nonsense_is_refused(settings: dict[str, float]):
    with pytest.raises(ConfigError, match="freshness"):
        load_acceptance({"kind": "fresh", "base": {"kind": "geometric", "alpha": 0.5}, "freshness": settings})


def test_nothing_scales_from_a_level_of_zero():
    model = wrapped(freshness=Freshness(untrained=0, floor=0), measured={"age": 0, "updates": 0})
    with pytest.raises(ConfigError, match="is 0"):
        model.at_freshness(DrafterState())


def recorded(ages: list[int], updates: list[int | None], tokens: int = 4000) -> pd.DataFrame:
    """Counterfactuals drawn from HALF on top of a chance of 0.8."""
    rng = np.random.default_rng(0)
    rows = []
    for sample, (age, count) in enumerate((a, u) for a in ages for u in updates):
        chance = 0.8 * HALF.level(age, count or 0)
        accepted = np.minimum(rng.geometric(1 - chance, tokens) - 1, 6)
        rows.append((0, "p", sample, 0, "learned", age, count, 6, accepted))
    names = [
        "rl_step",
        "prompt_id",
        "sample",
        "turn",
        "drafter",
        "drafter_age",
        "drafter_updates",
        "max_depth",
        "accept_if_drafted",
    ]
    return pd.DataFrame(rows, columns=names)


def test_a_fit_finds_what_made_the_data():
    found = fit_freshness(recorded([0, 1, 3, 6, 12], [0, 1, 3, 8, 30], tokens=20_000), "learned")
    assert found.chance == pytest.approx(0.8, rel=0.02)
    for age, updates in ((0, 0), (2, 4), (12, 30), (0, 100)):
        assert found.freshness.level(age, updates) == pytest.approx(HALF.level(age, updates), abs=0.02)
    assert found.worst < 0.02
    assert found.notes == ()


def test_what_did_not_vary_has_no_effect_and_is_said():
    by_age = fit_freshness(recorded([0, 2, 8], [5]), "learned")
    assert by_age.freshness.level(0, 0) == by_age.freshness.level(0, 99)
    assert by_age.freshness.level(8, 0) < 0.8 * by_age.freshness.level(0, 0)
    assert ["number of updates" in note for note in by_age.notes] == [True]
    by_training = fit_freshness(recorded([0], [0, 2, 8]), "learned")
    assert by_training.freshness.level(50, 8) == pytest.approx(by_training.freshness.level(0, 8))
    assert ["one age" in note for note in by_training.notes] == [True]


def test_a_trace_with_one_age_cannot_be_fitted():
    with pytest.raises(ConfigError, match="needs several"):
        fit_freshness(recorded([3], [7]), "learned")
    with pytest.raises(ConfigError, match="needs several"):
        fit_freshness(recorded([0, 1], [7]), "other")


def test_acceptance_outside_the_draft_is_refused():
    table = recorded([0, 1], [7], tokens=3)
    table.at[1, "accept_if_drafted"] = [0, 7, 1]
    with pytest.raises(TraceError, match=r"7 is outside \[0, max_depth = 6\]"):
        fit_freshness(table, "learned")


def test_the_state_of_the_drafters_settles_any_model():
    states = {"learned": DrafterState(age=3, updates=2)}
    plain = GeometricAcceptance(alpha=0.5)
    assert fresh(plain, states) is plain
    model = fresh(wrapped(), states)
    assert isinstance(model, AcceptanceModel)
    assert model.survival(CHAIN)[0] == pytest.approx(0.8 * HALF.level(3, 2))
    table = recorded([0, 3], [2], tokens=5).assign(sample=0)
    trace = TraceAcceptance(table)
    replayed = fresh(trace, states)
    assert isinstance(replayed, TraceAcceptance)
    assert replayed.drafter_age == 3
    assert fresh(trace, {}) is trace


def test_the_shipped_trees_come_with_an_assumed_freshness_too():
    base, model = load_acceptance("tlt-qwen2.5-32b"), load_acceptance("tlt-qwen2.5-32b-fresh")
    assert isinstance(model, FreshAcceptance)
    assert model.base == base
    assert model.freshness == Freshness()
    assert "assumption" in model.notes[0]
    tree = Strategy("learned", 8, 8, 48)
    best = fresh(model, {"learned": DrafterState(age=0, updates=10**6)})
    stale = fresh(model, {"learned": DrafterState(age=10**6, updates=10**6)})
    assert best.tokens_per_iteration(tree) == pytest.approx(base.tokens_per_iteration(tree))
    assert stale.tokens_per_iteration(tree) < best.tokens_per_iteration(tree)
    with pytest.raises(ConfigError, match=r"tlt-qwen2.5-32b-fresh.*assumed effect of the drafter's age"):
        load_acceptance("tlt-qwen2.5-32b-stale")
