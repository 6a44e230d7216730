import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tltlab.errors import ConfigError
from tltlab.ngram import NgramDrafter


def drafter_of(tokens, **settings):
    drafter = NgramDrafter(**settings)
    drafter.open("a", "g", [])
    drafter.extend("a", tokens)
    return drafter


def test_a_repetition_is_continued():
    assert drafter_of([1, 2, 3, 1, 2]).propose("a", 4) == [3, 1, 2, 3]


def test_nothing_is_proposed_where_nothing_matches():
    assert drafter_of([1, 2, 3, 4, 5]).propose("a", 4) == []
    assert drafter_of([1]).propose("a", 4) == []
    assert drafter_of([]).propose("a", 4) == []


def test_a_match_needs_min_match_tokens():
    tokens = [1, 9, 5, 7, 9]
    assert drafter_of(tokens, min_match=2).propose("a", 1) == []
    assert drafter_of(tokens, min_match=1).propose("a", 1) == [5]


def test_a_draft_ends_where_the_text_is_unknown():
    # After 1 2 came 3 4, and what follows "3 4 9" was never seen.
    drafter = NgramDrafter(min_match=2, max_match=3)
    drafter.open("a", "g", [])
    drafter.extend("a", [1, 2, 3])
    drafter.open("b", "g", [])
    drafter.extend("b", [1, 2])
    assert drafter.propose("b", 8) == [3]


def test_the_longest_match_wins_over_a_more_frequent_shorter_one():
    # "2 3" was followed by 8 twice, but "1 2 3" by 4.
    tokens = [9, 2, 3, 8, 7, 2, 3, 8, 1, 2, 3, 4, 1, 2, 3]
    assert drafter_of(tokens, max_match=3).propose("a", 1) == [4]
    assert drafter_of(tokens, max_match=2).propose("a", 1) == [8]


def test_the_most_frequent_continuation_wins_then_the_most_recent():
    assert drafter_of([1, 2, 5, 1, 2, 6, 1, 2, 5, 1, 2], max_match=2).propose("a", 1) == [5]
    assert drafter_of([1, 2, 5, 1, 2, 6, 1, 2], max_match=2).propose("a", 1) == [6]


def test_the_second_sample_drafts_the_firsts_continuation():
    drafter = NgramDrafter()
    drafter.open("a", "g", [1, 2, 3])
    drafter.extend("a", [10, 11, 12, 13])
    drafter.open("b", "g", [1, 2, 3])
    assert drafter.propose("b", 8) == [10, 11, 12, 13]
    drafter.extend("b", [10])
    assert drafter.propose("b", 2) == [11, 12]


def test_prompt_tokens_are_drafted_from_too():
    drafter = NgramDrafter()
    drafter.open("a", "g", [5, 6, 7, 8])
    drafter.extend("a", [1, 5, 6])
    assert drafter.propose("a", 2) == [7, 8]


def test_a_prompt_counts_once_however_many_samples_share_it():
    drafter = NgramDrafter(max_match=2)
    for key in "abcd":
        drafter.open(key, "g", [1, 2, 3])
    drafter.extend("a", [1, 2, 9, 1, 2, 9, 1, 2])
    assert drafter.propose("a", 1) == [9]


def test_groups_do_not_leak_into_each_other():
    drafter = NgramDrafter()
    drafter.open("a", "g", [1, 2, 3, 4])
    drafter.open("b", "h", [1, 2])
    assert drafter.propose("b", 4) == []


def test_with_request_scope_a_response_sees_only_itself():
    drafter = NgramDrafter(scope="request")
    drafter.open("a", "g", [1, 2, 3, 4])
    drafter.open("b", "g", [1, 2])
    assert drafter.propose("b", 4) == []
    drafter.extend("b", [7, 1, 2])
    assert drafter.propose("b", 1) == [7]


def test_proposing_changes_nothing():
    drafter = drafter_of([1, 2, 3, 1, 2])
    assert drafter.propose("a", 3) == drafter.propose("a", 3)


@pytest.mark.parametrize("scope", ["group", "request"])
def test_a_dropped_group_is_forgotten(scope):
    drafter = NgramDrafter(scope=scope)
    drafter.open("a", "g", [1, 2, 3])
    drafter.open("b", "h", [4, 5, 6, 4, 5])
    drafter.drop_group("g")
    drafter.drop_group("g")
    drafter.open("a", "g", [1, 2])
    assert drafter.propose("a", 4) == []
    assert drafter.propose("b", 1) == [6]


def slow_propose(texts, context, min_match, max_match, depth):
    """The definition, by brute force over all texts (in order of time)."""
    draft = []
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
    return draft


TEXT = st.lists(st.integers(0, 3), max_size=40)


@given(st.lists(TEXT, min_size=1, max_size=3), st.integers(1, 3), st.integers(0, 3), st.integers(0, 8))
@settings(max_examples=150, deadline=None)
def test_it_agrees_with_a_search_through_all_text(texts, min_match, more, depth):
    drafter = NgramDrafter(min_match, min_match + more)
    for key, text in enumerate(texts):
        drafter.open(key, "g", [])
        drafter.extend(key, text[:7])
        drafter.extend(key, text[7:])
    for key, text in enumerate(texts):
        draft = drafter.propose(key, depth)
        assert draft == slow_propose(texts, text, min_match, min_match + more, depth)
        assert len(draft) <= depth


@given(TEXT, TEXT)
@settings(deadline=None)
def test_token_by_token_is_the_same_as_all_at_once(prompt, response):
    whole, single = NgramDrafter(), NgramDrafter()
    whole.open("a", "g", prompt)
    single.open("a", "g", prompt)
    whole.extend("a", response)
    for token in response:
        single.extend("a", [token])
    assert whole.propose("a", 8) == single.propose("a", 8)


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="got 3 and 2"):
        NgramDrafter(min_match=3, max_match=2)
    with pytest.raises(ConfigError, match="'group' or 'request', got 'all'"):
        NgramDrafter(scope="all")


def test_it_keeps_up_with_an_engine():
    tokens = np.random.default_rng(0).integers(0, 200, 20_000).tolist()
    drafter = NgramDrafter()
    drafter.open("a", "g", [])
    start = time.perf_counter()
    drafter.extend("a", tokens)
    inserted = time.perf_counter()
    drafted = 0
    for i in range(2_000):
        drafter.open(i, "g", tokens[i : i + 5])
        drafted += len(drafter.propose(i, 8))
    proposed = time.perf_counter()
    assert drafted > 8_000
    assert (inserted - start) / len(tokens) < 24e-6, "about 2 us on an idle machine; the design asks for 8"
    assert (proposed - inserted) / drafted < 15e-6, "about 1 us on an idle machine; the design asks for 5"
