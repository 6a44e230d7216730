"""What holds for every drafter that looks text up: n-grams and suffix trees."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tltlab.drafters.base import Draft
from tltlab.drafters.ngram import NgramDrafter
from tltlab.drafters.suffix import SuffixDrafter

from .told import A, B, told


@pytest.fixture(scope="module", params=["ngram", "suffix, group", "suffix, problem"])
def make(request):
    """Builds new drafters of a kind and scope."""
    kind, _, scope = request.param.partition(", ")
    if kind == "ngram":
        return NgramDrafter
    pytest.importorskip("arctic_inference")
    return lambda **settings: SuffixDrafter((scope,), **settings)


def test_a_later_rl_step_drops_groups_without_requests(make, request):
    drafter = told(make(), A, [1, 2, 3, 1, 2])
    drafter.close(A)
    drafter.open(B, [1, 2])
    for rl_step in (0, 1):
        drafter.begin(rl_step)
        assert drafter.propose(B, 1).tokens == [3], "one that runs keeps its group"
    drafter.close(B)
    drafter.begin(1)
    remembers = "problem" in request.node.name
    assert (drafter.memory_bytes > 0) == remembers
    drafter.open((0, "p", 2, 0), [1, 2])
    assert drafter.propose((0, "p", 2, 0), 1).tokens == [3] * remembers


@given(texts=st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=4), piece=st.integers(1, 5))
def test_text_put_in_by_pieces_gives_same_drafts(make, texts, piece):
    keys = [(0, "p", n, 0) for n in range(len(texts))]
    drafters = whole, pieces, looked_up = [make(min_match=1) for _ in range(3)]
    for drafter in drafters:
        for key, text in zip(keys, texts, strict=True):
            told(drafter, key, text, prompt=[1, 2])
    calls = [0, 0]
    while not pieces.catch_up(piece):
        calls[0] += 1
    while not looked_up.catch_up(piece):
        calls[1] += 1
        drafts = looked_up.propose_all([(key, 4) for key in keys])
        assert make is not NgramDrafter or drafts[-1] == Draft([], 0.0) or not texts[-1]
    assert calls[0] == calls[1], "a look-up puts nothing in"
    assert calls[0] <= (5 * len(texts) + sum(map(len, texts))) / piece
    assert [pieces.propose(key, 4) for key in keys] == [whole.propose(key, 4) for key in keys]
