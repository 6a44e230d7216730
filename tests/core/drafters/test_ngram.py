from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tltlab.drafters.base import Draft
from tltlab.drafters.ngram import NgramDrafter
from tltlab.testing import check_drafter

from .told import OTHER, A, B, told


def drafter_of(tokens, **settings):
    return told(NgramDrafter(**settings), A, tokens)


def test_drafts_are_of_the_groups_text():
    check_drafter(NgramDrafter)
    drafter = told(NgramDrafter(), A, [1, 2, 3])
    for key in (B, OTHER):
        told(drafter, key, [1, 2])
    assert drafter.propose(B, 1).tokens == [3]
    assert drafter.propose(OTHER, 4) == Draft([], 0.0)
    drafter.close(A)
    assert drafter.propose(B, 1).tokens == [3], "a closed response stays for its siblings"
    drafter.extend(B, [7, 1, 2])
    assert drafter.propose(B, 1).tokens == [7]


def test_prompt_counts_once_however_many_samples_share_it():
    drafter = NgramDrafter(max_match=2)
    for sample in range(4):
        drafter.open((0, "p", sample, 0), [1, 2, 3])
    drafter.extend(A, [1, 2, 9, 1, 2, 9, 1, 2])
    assert drafter.propose(A, 1).tokens == [9]


def test_groups_without_requests_leave_over_a_bound():
    # A text of 500 random tokens takes 0.2 MB.
    drafter = drafter_of([*range(500)], history_mib=1)
    for n in range(20):
        key = (0, f"q{n}", 0, 0)
        told(drafter, key, np.random.default_rng(n).integers(0, 30_000, 500).tolist())
        drafter.close(key)
        assert drafter.memory_bytes <= 2**20
    drafter.extend(A, [3, 4])
    assert drafter.propose(A, 2).tokens == [5, 6], "one that runs stays"


def slow_propose(texts, context, min_match, max_match, depth):
    """The definition, by brute force over all texts (in order of time)."""
    draft, share, expected = [], 1.0, 0.0
    while len(draft) < depth:
        tail, best = [*context, *draft], None
        for n in range(min(max_match, len(tail)), min_match - 1, -1):
            follows = [
                text[i + n] for text in texts for i in range(len(text) - n) if text[i : i + n] == tail[len(tail) - n :]
            ]
            if follows:
                count = Counter(follows)
                last = {token: i for i, token in enumerate(follows)}
                best = max(count, key=lambda token: (count[token], last[token]))
                break
        if best is None:
            break
        draft.append(best)
        share *= count[best] / count.total()
        expected += share
    return Draft(draft, pytest.approx(expected))


TEXT = st.lists(st.integers(0, 3), max_size=40)


@given(
    st.lists(TEXT, min_size=1, max_size=5), st.integers(1, 3), st.integers(0, 3), st.integers(0, 8), st.integers(1, 40)
)
def test_it_agrees_with_a_search_through_all_text(texts, min_match, more, depth, piece):
    drafter = NgramDrafter(min_match, min_match + more)
    # An earlier RL step, of which one group still runs.
    for prompt_id in "xy":
        told(drafter, (0, prompt_id, 0, 0), [0, 1, 2, 3] * 8)
    drafter.close((0, "x", 0, 0))
    drafter.begin(1)
    keys = [(1, f"p{sample % 2}", sample, 0) for sample in range(len(texts))]
    for key, text in zip(keys, texts, strict=True):
        drafter.open(key, [])
        for at in range(0, len(text), piece):
            drafter.extend(key, text[at : at + piece])
    for n, draft in enumerate(drafter.propose_all([(key, depth) for key in keys])):
        assert draft == slow_propose(texts[n % 2 :: 2], texts[n], min_match, min_match + more, depth)
