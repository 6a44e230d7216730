"""Acceptance models: means, distributions, files and their limits."""

from contextlib import nullcontext

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.acceptance.counterfactuals import counterfactuals
from tests.refused import refused
from tltlab.acceptance.base import (
    ChainAcceptance,
    ConstantAcceptance,
    GeometricAcceptance,
    LengthsAcceptance,
    RequestArrays,
    Scaled,
    chain_alpha,
    from_survival,
    scaled,
)
from tltlab.acceptance.freshness import FreshAcceptance, Freshness
from tltlab.acceptance.load import DEFAULTS, SHIPPED, granted, load_acceptance
from tltlab.acceptance.measured import FittedDepth, MeasuredAcceptance, copied_runs
from tltlab.acceptance.per_drafter import refuse_one_for_several
from tltlab.drafters.specs import Drafters, LearnedSpec
from tltlab.errors import ConfigError
from tltlab.state import DrafterState
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.traces.drafts import walked_drafts

MEASURED = {
    2: FittedDepth(accepted=(0.6, 0.1, 0.3), drafted=1.0),
    4: FittedDepth(accepted=(0.5, 0.2, 0.1, 0.1, 0.1), drafted=2.0, num_samples=10),
}
FITTED = MeasuredAcceptance.at_any_batch({"ngram": MEASURED, "learned": MEASURED})


BANDS = {
    "kind": "by-batch",
    "bands": [
        {"max_batch": end, "drafters": {"ngram": {1: {"accepted": (1 - kept, kept), "drafted": drafted}}}}
        for end, kept, drafted in ((4, 0.8, 1.0), (None, 0.3, 0.5))
    ],
}


def chain(depth):
    return Strategy.chain("ngram", depth)


def test_reach_is_what_an_iteration_can_accept():
    shapes = [chain(4), Strategy("ngram", 4, 1, 3), Strategy("learned", 4, 8, 48), Strategy("learned", 4, 2, 3)]
    assert [strategy.reach for strategy in (*shapes, NO_SPECULATION)] == [4, 2, 4, 2, 0]


def test_constant_yields_no_more_than_was_drafted():
    model = ConstantAcceptance(tokens=3.25)
    assert model.tokens_per_iteration(chain(4)) == 3.25
    assert model.distribution(chain(4)).tolist() == [0, 0, 0.75, 0.25, 0]
    assert ConstantAcceptance(tokens=9).tokens_per_iteration(chain(2)) == 3


def test_depth_between_is_larger_one_cut_short():
    assert FITTED.distribution(chain(2)).tolist() == [0.6, 0.1, 0.3]
    assert FITTED.distribution(Strategy.chain("learned", 3)) == pytest.approx([0.5, 0.2, 0.1, 0.2])
    assert FITTED.distribution(Strategy("learned", 4, 1, 2)) == pytest.approx([0.6, 0.4])
    assert [FITTED.num_drafted(chain(depth)) for depth in (3, 4)] == [1.5, 2.0]


def test_beyond_the_fit_nothing_is_known():
    for strategy, fact in (
        (Strategy.chain("learned", 17), 4),
        (Strategy.chain("ngram", 17), 4),
        (Strategy.chain("eagle", 2), "eagle"),
        (Strategy("ngram", 2, 4, 8), "tree"),
    ):
        with refused(ConfigError, naming=(fact,)):
            FITTED.tokens_per_iteration(strategy)


@pytest.mark.parametrize(
    "model",
    [
        FITTED,
        MeasuredAcceptance.model_validate(BANDS),
        FreshAcceptance(base=SHIPPED["seer-siblings"], freshness=Freshness(floor=0.25)),
        ChainAcceptance(kept=(0.8, 0.6)),
        LengthsAcceptance(lengths=(1.8, 2.4, 2.2)),
        *SHIPPED.values(),
    ],
    ids=lambda model: model.kind,
)
def test_a_file_gives_back_what_was_written(model, tmp_path):
    assert load_acceptance(model.write(tmp_path / "acceptance.json")) == model


@pytest.mark.parametrize(
    "model",
    [
        ChainAcceptance(kept=(0.8, 0.4)),
        LengthsAcceptance(lengths=(1.8, 2.2)),
        MeasuredAcceptance.at_any_batch({"learned": {2: FittedDepth(accepted=(0.2, 0.4, 0.4), drafted=2.0)}}),
    ],
    ids=lambda model: model.kind,
)
def test_beyond_the_measured_depth_the_last_chance_is_held(model):
    """Half of what was kept is kept again: 1 + .8 + .4, then .2 and .1 more."""
    found = [model.tokens_per_iteration(Strategy.chain("learned", depth)) for depth in (2, 3, 4)]
    assert found == pytest.approx([2.2, 2.4, 2.5])
    assert [model.outside(Strategy.chain("learned", depth)) for depth in (2, 3)] == [[], ["draft_depth"]]


def test_deeper_blocks_may_yield_less():
    model = load_acceptance("ngram=0.42,block=lengths:1.8/2.4/2.2")
    lengths = [model.tokens_per_iteration(Strategy.chain("block", depth)) for depth in (1, 2, 3)]
    assert lengths == pytest.approx([1.8, 2.4, 2.2])
    chance = model.curve(Strategy("block", 3, 1, 3))
    assert chance.tolist() == model.curve(Strategy.chain("block", 3)).tolist()[:2], (
        "a draft that is cut is no shallower"
    )
    assert model.tokens_per_iteration(Strategy.chain("block", 4)) == pytest.approx(2.2)
    with refused(ConfigError, naming=("depth 2", "3.1")):
        load_acceptance("lengths:1.8/3.1")
    with refused(ConfigError, naming=("lengths",)):
        load_acceptance("lengths:1.8/x")


def test_models_by_name():
    assert load_acceptance("constant:2.5") == ConstantAcceptance(tokens=2.5)
    assert load_acceptance("geometric:0.7") == GeometricAcceptance(alpha=0.7)
    assert list(SHIPPED) == ["tlt-qwen2.5-32b", "tlt-qwen2.5-32b-fresh", "seer-siblings"]
    for name, model in SHIPPED.items():
        assert load_acceptance(name) is model
        assert any("arXiv" in note for note in model.notes)


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ("learned=geometric:0.7, ngram = 0.42", {"learned": "geometric:0.7", "ngram": "0.42"}),
        ({"learned": GeometricAcceptance(alpha=0.7), "ngram": {"kind": "geometric", "alpha": 0.42}},
         {"learned": "geometric:0.7", "ngram": "geometric:0.42"}),
        ("learned=0.7/0.49/0.343/0.2401,all=geometric:0.42",
         {"learned": "0.7/0.49/0.343/0.2401", "ngram": "geometric:0.42", "mine": "geometric:0.42"}),
        ("default", DEFAULTS),
        ("all=geometric:0.7", {"learned": "geometric:0.7", "ngram": "geometric:0.7"}),
    ],
)  # fmt: skip
def test_each_drafter_has_the_model_that_names_it(source, texts):
    model = load_acceptance(source)
    marked = {name: f"{text} (default)" if source == "default" else text for name, text in texts.items()}
    assert granted(model, None, texts) == marked
    assert model.varies_by == "nothing"
    for name, text in texts.items():
        strategy, alone = Strategy.chain(name, 4), load_acceptance(text)
        for settled in (model.in_state({}), model.at_best([name])):
            assert settled.tokens_per_iteration(strategy) == alone.tokens_per_iteration(strategy)
            assert settled.cdf(strategy).tolist() == alone.cdf(strategy).tolist()


def test_a_file_may_have_any_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("2.json", "a=b.json", "nano.json"):
        GeometricAcceptance(alpha=0.5).write(tmp_path / name)
        for source in (name, f"./{name}", f"all=./{name}"):
            assert load_acceptance(source).curve(chain(2)).tolist() == [0.5, 0.25]


def test_a_model_belongs_to_its_drafter():
    model = load_acceptance("mine=tlt-qwen2.5-32b-fresh,text=seer-siblings")
    assert (model.trained_drafter, model.knows("mine"), model.knows("text")) == ("mine", True, True)
    assert load_acceptance("all=tlt-qwen2.5-32b-fresh").trained_drafter == "learned"
    fresh, old = (model.in_state({"mine": DrafterState(age=age, updates=9)}) for age in (0, 50))
    tree = Strategy("mine", 8, 4, 48)
    assert fresh.curve(tree)[0] > old.curve(tree)[0]


def test_drafter_without_model_is_refused_by_name():
    model = load_acceptance("learned=geometric:0.7,ngram=geometric:0.4")
    assert (model.drafters, model.knows("learned"), model.knows("block")) == (
        ("learned", "ngram", "suffix"),
        True,
        False,
    )
    for ask in (model.outside, model.in_state({}).check, model.in_state({}).tokens_per_iteration):
        with refused(ConfigError, naming=("'block'", "learned", "ngram")):
            ask(Strategy.chain("block", 2))


def test_one_drafter_differs_by_request():
    model = load_acceptance("learned=geometric:0.7,ngram=seer-siblings")
    some = RequestArrays(np.zeros(2), np.array([0.0, 5.0]))
    settled = model.in_state({})
    assert model.varies_by == "request"
    text = SHIPPED["seer-siblings"].survival(chain(2), some)
    assert settled.survival(chain(2), some).tolist() == text.tolist()
    assert settled.survival(Strategy.chain("learned", 2), some) == pytest.approx(np.array([[0.7, 0.49]] * 2))
    lower = Scaled(settled, ("learned",), 0.5)
    assert lower.curve(Strategy.chain("learned", 1))[0] == pytest.approx(0.35)


@pytest.mark.parametrize(
    ("source", "names", "is_refused"),
    [
        ("geometric:0.7", ["learned", "ngram"], True),
        ("0.7/0.5", ["learned", "suffix"], True),
        ("geometric:0.7", ["suffix", "ngram"], False),
        ("geometric:0.7", ["mine", "ngram"], True),
        ("all=geometric:0.7", ["learned", "ngram"], False),
        ("learned=geometric:0.7,ngram=0.4", ["learned", "ngram"], False),
        ("seer-siblings", ["learned", "ngram"], False),
        (FITTED, ["learned", "ngram"], False),
        (FreshAcceptance(base=GeometricAcceptance(alpha=0.7)), ["learned", "ngram"], True),
    ],
)
def test_one_model_for_several_kinds_is_refused(source, names, is_refused):
    drafters = Drafters({"mine": LearnedSpec(method="mtp")})
    with refused(ConfigError, naming=("some-model", *names, "all=some-model")) if is_refused else nullcontext():
        refuse_one_for_several(load_acceptance(source), "some-model", names, drafters)


@given(st.floats(0, 0.99), st.integers(1, 16))
def test_survival_agrees_with_the_distribution(alpha, depth):
    model = GeometricAcceptance(alpha=alpha)
    p = model.distribution(chain(depth))
    assert (len(p), p.sum()) == (depth + 1, pytest.approx(1))
    assert from_survival(model.curve(chain(depth))) == pytest.approx(p, abs=1e-12)
    mean = model.tokens_per_iteration(chain(depth))
    assert 1 + model.curve(chain(depth)).sum() == pytest.approx(mean)
    assert mean == pytest.approx((1 - alpha ** (depth + 1)) / (1 - alpha)), "Leviathan's"


@given(st.floats(0.01, 1), st.floats(0, 3), st.integers(1, 16))
def test_scaling_multiplies_every_chance_up_to_one(alpha, ratio, depth):
    kept = scaled(GeometricAcceptance(alpha=alpha).curve(chain(depth)), ratio)
    assert kept == pytest.approx(min(1.0, alpha * ratio) ** np.arange(1, depth + 1))


GEOMETRIC = {"kind": "geometric", "alpha": 0.5}
SIBLINGS = {"kind": "siblings", "alone": 0.5, "most": 0.6, "exponent": 1}
AGES = ({"untrained": 0.4, "floor": 0.5}, {"untrained": 2}, {"age_steps": 0}, {"updates_to_train": -1}, {"floor": -1})


@pytest.mark.parametrize(
    ("source", "facts"),
    [
        *((name, (name,)) for name in ("constant:0.5", "geometric:1.5", "geometric:often", "constant:nan", "golden")),
        ("tlt", ("constant:A", "geometric:ALPHA", "'trace'", *SHIPPED)),
        ({}, ("kind",)),
        ("0.5/0.6", ("0.5", "0.6")),
        ("ngram=geometric:0.4,ngram=geometric:0.5", ("ngram", "twice")),
        ("ngram=geometric:0.4,0.5", ("0.5",)),
        ("ngram=golden", ("golden",)),
        ("ngram=default", ("ngram", "default")),
        *((SIBLINGS | wrong, ("acceptance",)) for wrong in ({"most": 0.4}, {"most": 1.4}, {"exponent": 0})),
        *(({"kind": "fresh", "base": GEOMETRIC, "freshness": wrong}, ("freshness",)) for wrong in AGES),
        *(
            (BANDS | {"bands": [{"max_batch": None, "drafters": {"ngram": {"2": depth}}}]}, ("drafters",))
            for depth in ({"accepted": (0.5, 0.4), "drafted": 1}, {"accepted": (0.5, 0.5, 0.0, 0.0), "drafted": 1})
        ),
        *(
            ({"kind": "by-batch", "bands": [{"max_batch": end, "drafters": {}} for end in ends]}, ("max_batch",))
            for ends in ((), (4,), (8, 4, None), (None, 4))
        ),
    ],
)
def test_nonsense_is_refused(source, facts):
    with refused(ConfigError, naming=facts):
        load_acceptance(source)


@given(st.floats(0, 1), st.integers(1, 12))
def test_a_mean_alone_gives_its_chain(share, depth):
    model = GeometricAcceptance(alpha=chain_alpha(share * depth, depth))
    assert model.tokens_per_iteration(chain(depth)) == pytest.approx(1 + share * depth, abs=1e-6)


def test_batch_sizes_have_bands_of_their_own():
    model = load_acceptance(BANDS)
    assert [model.at(batch).tokens_per_iteration(chain(1)) for batch in (1, 4, 5, 500)] == [1.8, 1.8, 1.3, 1.3]
    assert model.drafters == ("ngram",)


# Drafters that copy text, at depths that were not measured


def walked(runs, depth):
    """P(accepted = j) of drafts of `depth` along runs of text that can be copied, each followed by one that cannot."""
    counts = np.zeros(depth + 1)
    while len(runs):
        counts += np.bincount(np.minimum(runs, depth), minlength=depth + 1)
        runs = runs[runs > depth] - depth - 1
    return counts / counts.sum()


@pytest.mark.parametrize(("measured", "asked"), [(8, 1), (8, 3), (4, 2), (5, 4), (2, 8), (3, 7)])
def test_copies_at_another_depth_are_of_same_runs(measured, asked):
    # Most runs never begin; one that does continues with chance .8, so two tokens of it tell the rest.
    rng = np.random.default_rng(0)
    runs = np.where(rng.random(60_000) < 0.7, 0, rng.geometric(0.2, 60_000))
    true = walked(runs, asked)
    found = copied_runs(walked(runs, measured).tolist(), asked)
    assert found == pytest.approx(true, abs=0.006)
    if measured > asked:
        cut = np.minimum(np.arange(measured + 1), asked)
        assert 1 + walked(runs, measured) @ cut < 0.98 * (1 + true @ np.arange(asked + 1))


@given(st.lists(st.integers(0, 50), min_size=2, max_size=9), st.integers(1, 16))
def test_copies_have_a_distribution_whatever_was_measured(counts, depth):
    counts[0] += 1
    p = copied_runs((np.array(counts) / sum(counts)).tolist(), depth)
    assert p.shape == (depth + 1,)
    assert p.sum() == pytest.approx(1.0)
    assert (p > -1e-9).all()
    same = copied_runs((np.array(counts) / sum(counts)).tolist(), len(counts) - 1)
    assert same.shape == (len(counts),)


def test_real_copies_are_met_within_a_percent(shared_data):
    texts = pd.read_parquet(shared_data / "accept_traces_llama31_8b.parquet")
    for _, of in texts.groupby("dataset"):
        rows = [(0, "p", i, 0, "ngram", 0, None, 255, np.subtract(a, 1)) for i, a in enumerate(of["acc_ngram"])]
        true = {}
        for depth in (1, 2, 4, 8):
            accepted = walked_drafts(counterfactuals(rows), depth)["accepted"]
            true[depth] = np.bincount(accepted, minlength=depth + 1) / len(accepted)
        for measured, asked in ((8, 4), (8, 1), (4, 2), (2, 8), (4, 8)):
            tokens = [1 + p @ np.arange(asked + 1) for p in (copied_runs(true[measured].tolist(), asked), true[asked])]
            assert tokens[0] == pytest.approx(tokens[1], rel=0.006)
