"""Acceptance by context: the published head, presets, texts and files, and what holds around it."""

import csv

import numpy as np
import pytest

from tests.refused import refused
from tltlab.acceptance.base import GeometricAcceptance, RequestArrays
from tltlab.acceptance.context import TRAINED_TOKENS, ContextAcceptance
from tltlab.acceptance.curves import SiblingAcceptance
from tltlab.acceptance.freshness import FreshAcceptance
from tltlab.acceptance.load import acceptance_text, granted, load_acceptance
from tltlab.acceptance.per_drafter import PerDrafter
from tltlab.errors import ConfigError
from tltlab.state import DrafterState
from tltlab.strategy import Strategy
from tltlab.testing import check_acceptance

CHAIN = Strategy.chain("learned", 3)
SHORT = ContextAcceptance(base=GeometricAcceptance(alpha=0.64), trained_tokens=2048)


def tokens(model, context, prompt=0.0, strategy=CHAIN):
    """Tokens of an iteration at a context, `prompt` of them in the prompt."""
    zero = np.zeros(1)
    kept = model.survival(strategy, RequestArrays(zero + context - prompt, zero, zero + prompt))
    return 1.0 + float(kept.sum())


def test_the_published_head_is_met_within_5_percent(shared_data):
    with (shared_data / "accept_length_by_context.csv").open() as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    for row in rows:
        assert tokens(SHORT, row["context_k"] * 1024) == pytest.approx(row["eagle3"], rel=0.05)
    window = load_acceptance("0.37@window")
    for row in rows:
        assert tokens(window, row["context_k"] * 1024) == pytest.approx(row["eagle3_sliding_window"], rel=0.05)


@pytest.mark.parametrize(("times", "share"), [(0, 1.0), (1, 1.0), (3, 0.75), (5, 0.5), (9, 0.0), (20, 0.0)])
def test_chance_falls_on_line_beyond_trained_length(times, share):
    for trained in (512, 2048.0, 32_768):
        model = ContextAcceptance(base=GeometricAcceptance(alpha=0.8), trained_tokens=trained)
        one = Strategy.chain("learned", 1)
        assert tokens(model, times * trained, strategy=one) == pytest.approx(1.0 + 0.8 * share)


def test_prompt_and_response_count_alike():
    assert tokens(SHORT, 8192) == tokens(SHORT, 8192, prompt=5000) < tokens(SHORT, 3192)


def test_every_token_of_draft_loses_same_share():
    model = load_acceptance("0.8/0.6/0.3@1k")
    zero = np.zeros(1)
    kept = model.survival(CHAIN, RequestArrays(zero + 5 * 1024, zero))[0]
    assert kept == pytest.approx([0.4, 0.4 * 0.375, 0.4 * 0.375 * 0.25])


@pytest.mark.parametrize("name", sorted(TRAINED_TOKENS))
def test_presets_are_written_by_name(name):
    model = load_acceptance(f"geometric:0.7@{name}")
    assert isinstance(model, ContextAcceptance)
    assert model.trained_tokens == TRAINED_TOKENS[name]
    assert load_acceptance(acceptance_text(model)) == model
    check_acceptance(model)


@pytest.mark.parametrize(
    ("text", "trained"), [("0.7@2k", 2048), ("geometric:0.7@1.5K", 1536), ("constant:3@700", 700), ("0.8/0.6@4k", 4096)]
)
def test_texts_and_files_come_back_as_they_were(text, trained, tmp_path):
    model = load_acceptance(text)
    assert isinstance(model, ContextAcceptance)
    assert model.trained_tokens == trained
    path = tmp_path / "acceptance@2k.json"
    path.write_text(model.model_dump_json())
    assert load_acceptance(path) == load_acceptance(acceptance_text(model)) == model


def test_file_may_have_trained_length_behind_it(tmp_path):
    path = tmp_path / "acceptance.json"
    path.write_text(GeometricAcceptance(alpha=0.64).model_dump_json())
    assert load_acceptance(f"{path}@short") == SHORT


@pytest.mark.parametrize(
    ("text", "named"),
    [("0.7@far", "far"), ("0.7@0", "@0"), ("0.7@2k@4k", "2k"), ("default@short", "learned="), ("0.7@2m", "2m")],
)
def test_what_is_no_trained_length_is_refused(text, named):
    with refused(ConfigError, naming=(named,)):
        load_acceptance(text)


def test_each_drafter_has_its_own_trained_length():
    model = load_acceptance("learned=geometric:0.64@2k,ngram=geometric:0.64")
    copied = Strategy.chain("ngram", 3)
    assert tokens(model, 8192) == tokens(SHORT, 8192)
    assert tokens(model, 8192, strategy=copied) == tokens(SHORT, 0)
    assert granted(model, None, ["learned"]) == {"learned": "geometric:0.64@2k"}


def test_freshness_holds_beside_it():
    fresh = load_acceptance("tlt-qwen2.5-32b-fresh@short")
    assert isinstance(fresh, FreshAcceptance)
    plain = load_acceptance("tlt-qwen2.5-32b-fresh")
    trained, new = (model.in_state({"learned": DrafterState(updates=100)}) for model in (fresh, plain))
    assert tokens(trained, 2000) == tokens(new, 2000) == tokens(new, 9000) > tokens(trained, 9000)


def test_within_the_trained_length_it_is_the_base():
    model = load_acceptance("learned=geometric:0.64@2k,ngram=0.5")
    assert SHORT.within(2048) is SHORT.base
    assert SHORT.within(2049) is SHORT
    assert isinstance(inside := model.within(2048), PerDrafter)
    assert inside.varies_by == "nothing"
    assert model.within(9000) is model
    assert load_acceptance("0.7@window").varies_by == "nothing"


def test_at_one_context_requests_are_alike():
    for model in (SHORT, load_acceptance("learned=geometric:0.64@2k,ngram=0.5")):
        at = model.at_context(8192)
        assert at.varies_by == "nothing"
        assert at.tokens_per_iteration(CHAIN) == pytest.approx(tokens(SHORT, 8192))


def test_most_tokens_hold_between_ends_of_response():
    rising = SiblingAcceptance(alone=0.1, most=0.95, exponent=1.0, own_tokens=300.0)
    model = PerDrafter({"learned": ContextAcceptance(base=rising, trained_tokens=400)})
    zero = np.zeros(1)
    (most,) = model.most_tokens(CHAIN, RequestArrays(zero + 3000, zero, 100.0))
    assert all(tokens(model, 100.0 + at, prompt=100.0) <= most for at in range(0, 3000, 50))


@pytest.mark.parametrize("text", ["0.7@300", "constant:2.5@200", "seer-siblings@400", "tlt-qwen2.5-32b@100"])
def test_it_meets_the_contract_of_acceptance(text):
    check_acceptance(load_acceptance(text))  # type: ignore[arg-type]
