"""Length classes: borders, start classes, and what a running request may expect, against counting by hand."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tltlab.drafters.budget import LengthClasses


def learned(*finished):
    classes = LengthClasses()
    for prompt, tokens in finished:
        classes.finished(prompt, tokens)
    return classes


THREE = [("a", 10), ("b", 100), ("c", 1000)] * 4


def expect(classes, prompt, generated):
    found = classes.expect([prompt], np.array([generated]))
    assert found is not None
    return int(found[0][0]), float(found[1][0])


def test_without_history_nothing_is_expected():
    assert LengthClasses().expect(["a"], np.array([5.0])) is None
    assert learned(*THREE[:7]).expect(["a"], np.array([5.0])) is None
    assert learned(*THREE[:8]).expect(["a"], np.array([5.0])) is not None


def test_only_the_last_responses_count(monkeypatch):
    monkeypatch.setattr("tltlab.drafters.budget._WINDOW", 16)
    classes = learned(*[("a", 10)] * 50, *[("a", 500)] * 20)
    assert expect(classes, "a", 0) == (2, 500.0)


def test_uncounted_responses_survive_json():
    rng = np.random.default_rng(0)
    finished = [(f"p{n % 9}", int(tokens)) for n, tokens in enumerate(rng.lognormal(5, 1, 300))]
    classes, again = learned(*finished[:200]), LengthClasses()
    again.load_state_dict(json.loads(json.dumps(classes.state_dict())))
    assert again.state_dict()["pending"]
    prompts, generated = [f"p{n}" for n in range(12)], np.linspace(0, 900, 12)
    for prompt, tokens in finished[200:]:
        for one in (classes, again):
            one.finished(prompt, tokens)
        first, second = (one.expect(prompts, generated) for one in (classes, again))
        np.testing.assert_array_equal(first, second)


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 40)), min_size=8, max_size=40),
    st.sampled_from("abcde"),
    st.integers(0, 45),
)
def test_expectations_are_those_of_counting_by_hand(finished, prompt, generated):
    classes = learned(*finished)
    borders = np.quantile([n for _, n in finished], (1 / 3, 2 / 3), method="higher")
    of = [sum(n >= b for b in borders) for _, n in finished]

    def start(name, but=None):
        votes = [c for i, ((p, _), c) in enumerate(zip(finished, of, strict=True)) if p == name and i != but]
        return max(votes, key=lambda c: (votes.count(c), c)) if votes else None

    longer = [i for i, (_, n) in enumerate(finished) if n > generated]
    alike = [i for i in longer if start(prompt) is not None and start(finished[i][0], but=i) == start(prompt)] or longer
    if not longer:
        assert expect(classes, prompt, generated) == (2, max(generated, 1))
        return
    likely = max((0, 1, 2), key=lambda c: (sum(of[i] == c for i in alike), c))
    mean = np.mean([finished[i][1] for i in alike if of[i] == likely])
    assert expect(classes, prompt, generated) == (likely, pytest.approx(mean - generated))
