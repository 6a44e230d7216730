import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tltlab.drafters.base import Draft
from tltlab.drafters.suffix import SuffixDrafter
from tltlab.testing import check_drafter

from .told import OTHER, A, B, told

pytest.importorskip("arctic_inference")

SCOPES = ("request", "group", "problem", "global")
LATER = (1, "p", 0, 0)
"""The first prompt again in the next RL step."""


@pytest.mark.parametrize("length", ["depth", "match", "doubling"])
@pytest.mark.parametrize("scopes", [*((scope,) for scope in SCOPES), SCOPES])
def test_it_meets_the_contract_of_drafters(scopes, length):
    check_drafter(lambda: SuffixDrafter(scopes, window=2, length=length))
    check_drafter(lambda: SuffixDrafter(scopes, window=None, length=length, live=False))
    # Room for one or two of its responses: who left must not be asked for.
    check_drafter(lambda: SuffixDrafter(scopes, window=None, length=length, history_mib=0.01))


def test_all_scopes_are_searched_and_first_wins_tie():
    drafter = SuffixDrafter(("group", "global"))
    told(drafter, B, [1, 2, 3])
    told(drafter, OTHER, [1, 2, 4])
    told(drafter, LATER, [1, 2, 4])
    told(drafter, A, [1, 2])
    # In the group 3 follows in one of two cases; everywhere 4 in two of four.
    assert drafter.propose(A, 1) == Draft([3], 0.5)
    told(drafter, (0, "r", 0, 0), [1, 2, 4])
    assert drafter.propose(A, 1) == Draft([4], pytest.approx(3 / 5))


def test_length_match_drafts_as_many_as_matched():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    lengths = {}
    for factor in (0.5, 1.0, 2.0):
        drafter = told(SuffixDrafter(length="match", match_factor=factor, min_match=1), A, text)
        lengths[factor] = len(drafter.propose(A, 16).tokens)
    assert lengths == {0.5: 1, 1.0: 3, 2.0: 6}
    assert told(SuffixDrafter(length="match", min_match=3), A, text).propose(A, 16).tokens == [4]


def test_length_doubling_follows_what_was_accepted():
    drafter = told(SuffixDrafter(length="doubling", max_draft=32), A, [*range(100), *range(50)])
    lengths = []
    for accepted in (2, 4, 8, 16, 3, 3, 0, 0, 0):
        lengths.append(len(drafter.propose(A, 20).tokens))
        drafter.observe(A, lengths[-1], accepted)
        drafter.observe(A, 0, 0)  # a draft that was not made
    assert lengths == [2, 4, 8, 16, 16, 8, 4, 2, 2]
    assert len(drafter.propose(A, 1).tokens) == 1


def test_trees_and_texts_that_nothing_needs_are_freed():
    drafter, group = SuffixDrafter(SCOPES, window=1), SuffixDrafter(("request", "group"))
    for problem in range(50):
        for one in (drafter, group):
            told(one, (problem, f"p{problem}", 0, 0), range(100), prompt=range(200, 300))
            one.begin(problem)
            one.close((problem, f"p{problem}", 0, 0))
    held = drafter.memory_bytes
    assert len(drafter.state_dict()["responses"]) == 50, "each problem keeps its last"
    drafter.forget()
    assert drafter.memory_bytes == 0
    assert 0 < group.memory_bytes < held / 20
    assert len(group.state_dict()["responses"]) == 1


def test_text_is_indexed_in_the_order_it_came():
    texts = [[1, 2, 3 + n % 3, 1, 2, 5 - n % 3] * 3 for n in range(4)]
    drafts = []
    for often in (False, True):
        drafter = SuffixDrafter()
        for n, _ in enumerate(texts):
            drafter.open((0, "p", n, 0), [9])
        for at in range(len(texts[0])):
            for n, text in enumerate(texts):
                drafter.extend((0, "p", n, 0), [text[at]])
                if often:
                    drafter.propose((0, "p", n, 0), 4)
        drafts.append(drafter.propose_all([((0, "p", n, 0), 4) for n in range(4)]))
    assert drafts[0] == drafts[1]
    assert all(draft.tokens for draft in drafts[0])


def test_what_is_remembered_twice_counts_once():
    drafter = SuffixDrafter()
    for _ in range(3):
        drafter.remember(A, [], [1, 2, 3])
    drafter.remember(B, [], [1, 2, 4])
    told(drafter, LATER, [1, 2])
    assert drafter.propose(LATER, 1).expected == pytest.approx(1 / 3)


def step(drafter, rl_step, problems, num_tokens=400, samples=2):
    """An RL step: `samples` responses to each problem, random except problem and sample."""
    drafter.begin(rl_step)
    for prompt_id in problems:
        keys = [(rl_step, prompt_id, sample, 0) for sample in range(samples)]
        for key in keys:
            told(drafter, key, text_of(prompt_id, key[2], num_tokens), prompt=[7, 8, 9])
        drafter.catch_up()
        for key in keys:
            drafter.close(key)


def text_of(prompt_id, sample, num_tokens=400):
    return np.random.default_rng([*prompt_id.encode(), sample]).integers(0, 30_000, num_tokens)


def remembered(drafter):
    return list(dict.fromkeys(prompt_id for _, prompt_id, *_ in drafter.state_dict()["responses"]))


def drafted_after(drafter, key, tokens):
    """The draft for a request of this key that has generated `tokens`; it is gone then."""
    told(drafter, key, tokens, prompt=[7, 8, 9])
    draft = drafter.propose(key, 8)
    drafter.close(key)
    return draft


@pytest.mark.parametrize("scopes", [("problem",), ("global",), ("request", "group", "problem")])
def test_history_stays_within_its_budget(scopes):
    drafter = SuffixDrafter(scopes, None, history_mib=0.5)
    unbounded = SuffixDrafter(scopes, None, history_mib=None)
    held = []
    for rl_step in range(40):
        for one in (drafter, unbounded) if rl_step < 20 else (drafter,):
            step(one, rl_step, [f"p{rl_step}-{n}" for n in range(4)])
        held.append(drafter.memory_bytes / 2**20)
    assert max(held) < 0.5
    assert max(held[20:]) < 1.1 * max(held[:20]), "flat once the budget is reached"
    assert unbounded.memory_bytes / 2**20 > 4 * max(held)
    # The texts are held ten times as long as the trees, and the newest of them are there.
    num = len(remembered(drafter))
    assert remembered(drafter) == [f"p{n // 4}-{n % 4}" for n in range(160 - num, 160)]
    assert 10 < num < 60


def test_a_problem_that_recurs_is_drafted_as_before():
    # A tree takes 240 kB, texts of 800 tokens 5 kB.
    bounded, unbounded = SuffixDrafter(history_mib=1), SuffixDrafter(history_mib=None)
    for one in (bounded, unbounded):
        for rl_step in range(20):
            step(one, rl_step, [f"p{rl_step}"])
    assert remembered(bounded) == [f"p{n}" for n in range(20)]
    assert bounded.memory_bytes < unbounded.memory_bytes / 2
    for n in range(20):
        start = text_of(f"p{n}", 1)[100:110].tolist()
        found = [drafted_after(one, (20, f"p{n}", 0, 0), start) for one in (bounded, unbounded)]
        assert found[0] == found[1]
        assert found[0].tokens == text_of(f"p{n}", 1)[110:118].tolist()


def test_the_oldest_visits_leave_first_those_of_running_prompts_last():
    # Texts of two responses take 5.3 kB: eight problems fit into a quarter of 0.17 MiB.
    drafter = SuffixDrafter(history_mib=0.17)
    step(drafter, 0, "abcd")
    step(drafter, 1, "efgh")
    assert remembered(drafter) == list("abcdefgh")
    drafter.open((2, "a", 0, 0), [7, 8, 9])
    step(drafter, 2, "i")
    assert set(remembered(drafter)) == set("acdefghi"), "a runs"
    drafter.close((2, "a", 0, 0))
    step(drafter, 3, "jk")
    assert (0, "a") not in {tuple(row[:2]) for row in drafter.state_dict()["responses"]}
    assert set("efghijk") <= set(remembered(drafter))
    state = json.loads(json.dumps(drafter.state_dict()))
    restored = SuffixDrafter(history_mib=0.17)
    restored.load_state_dict(state)
    for one in (drafter, restored):
        step(one, 5, "mno")
    assert restored.state_dict() == drafter.state_dict()


def test_a_group_over_budget_loses_its_oldest():
    drafter = SuffixDrafter(window=None, history_mib=1)
    drafter.open(A, [7, 8, 9])
    for sample in range(1, 21):
        told(drafter, (0, "p", sample, 0), text_of("p", sample), prompt=[7, 8, 9])
        drafter.close((0, "p", sample, 0))
    assert drafter.memory_bytes < 2**20
    for sample, knows in ((1, False), (20, True)):
        drafter.extend(A, text_of("p", sample)[:10])
        assert bool(drafter.propose(A, 4).tokens) == knows
    drafter.close(A)
    assert drafter.memory_bytes < 2**20


def test_recalling_replaces_all_that_was_remembered():
    drafter, fresh = SuffixDrafter(window=3), SuffixDrafter(window=3)
    step(drafter, 0, ["p", "q"])
    told_of = [((0, "p", n, 0), [7, 8, 9], text_of("p", n)) for n in range(4)]
    for one in (drafter, fresh):
        one.recall(told_of)
    assert drafter.state_dict() == fresh.state_dict()
    assert [row[2] for row in drafter.state_dict()["responses"]] == [1, 2, 3], "the window's newest"
    assert drafter.memory_bytes < 3 * (4 * 400 + 2048), "no tree is built before a request asks for it"
    assert drafted_after(drafter, (1, "p", 0, 0), text_of("p", 3)[50:60]).tokens == text_of("p", 3)[60:68].tolist()
    drafter.recall([])
    assert drafter.memory_bytes == 0


def counts_of(texts, longest):
    """How often every run of up to `longest` tokens occurs, a table of (run) -> count."""
    return Counter(
        tuple(text[i:j])
        for text in texts
        for i in range(len(text))
        for j in range(i + 1, min(i + longest, len(text)) + 1)
    )


def greedy_drafts(counts, match, depth, longest, min_prob):
    """All (tokens, expected) that follow `match` by always taking a most frequent next token; several only at ties."""
    found, paths = [], [((), 0.0)]
    while paths:
        path, expected = paths.pop()
        follows = {run[-1]: n for run, n in counts.items() if run[:-1] == match + path and len(run) <= longest}
        most = max(follows.values(), default=0)
        if len(path) == depth or not most or most / counts[match] < min_prob:
            found.append((path, expected))
        else:
            paths += [((*path, t), expected + n / counts[match]) for t, n in follows.items() if n == most]
    return found


TOKENS = st.lists(st.integers(0, 2), max_size=9)
RESPONSES = st.lists(st.tuples(st.integers(0, 1), st.sampled_from("pq"), TOKENS, TOKENS, st.booleans()), max_size=6)


@given(
    st.lists(st.sampled_from(SCOPES), min_size=1, max_size=2, unique=True),
    RESPONSES,
    st.sampled_from([None, 1, 2]),
    st.booleans(),
    st.integers(1, 2),
    st.sampled_from([0.0, 0.123, 0.45]),
    st.sampled_from(["depth", "match"]),
)
def test_it_agrees_with_a_search_through_all_text(scopes, responses, window, live, min_match, min_prob, length):
    max_match, max_draft, depth = 3, 4, 4
    drafter = SuffixDrafter(
        scopes, window, max_match=max_match, max_draft=max_draft, min_match=min_match, min_token_prob=min_prob,
        length=length, live=live,
    )  # fmt: skip
    seen = [((s, p, i, 0), prompt, text, done) for i, (s, p, prompt, text, done) in enumerate(responses)]
    for key, prompt, text, _ in seen:
        told(drafter, key, text[:4], prompt)
        drafter.extend(key, text[4:])
    for key, _, _, done in seen:
        if done:
            drafter.close(key)

    def texts(scope, key):
        """What the tree of `scope` that serves `key` must hold."""
        inside = {
            "request": lambda k: k == key, "group": lambda k: k[:2] == key[:2], "problem": lambda k: k[1] == key[1],
            "global": lambda k: True,
        }[scope]  # fmt: skip
        members = [m for m in seen if inside(m[0])]
        if scope == "request":
            return [m[1] + m[2] for m in members]
        finished = [m for m in members if m[3]][-(window or 99) :]
        kept = [m for m in members if not m[3]] + finished
        before = 0 if scope == "global" else max_match
        responses = [m[1][-before:] * bool(before) + m[2] * (live or m[3]) for m in kept]
        return responses + [list(p) for p in {tuple(m[1]) for m in kept} if before]

    for key, prompt, text, done in seen:
        if done:
            continue
        context, allowed, least = tuple(prompt + text), [], 0.0
        for scope in scopes:
            counts = counts_of(texts(scope, key), max_match + max_draft)
            for n in range(min_match, min(max_match, len(context)) + 1):
                if counts[context[-n:]]:
                    most = depth if length == "depth" else min(depth, n - min_match + 1)
                    drafts = greedy_drafts(counts, context[-n:], most, max_match + max_draft, min_prob)
                    allowed += drafts
                    least = max(least, min(expected for _, expected in drafts))
        draft = drafter.propose(key, depth)
        assert draft.expected >= least - 1e-5, (draft, least)
        if draft.tokens:
            assert any(tuple(draft.tokens) == t and abs(draft.expected - e) < 1e-5 for t, e in allowed), (
                draft,
                allowed,
            )


@given(st.lists(st.sampled_from(SCOPES), min_size=1, unique=True), RESPONSES, st.sampled_from([None, 2]))
def test_a_restored_drafter_drafts_the_same(scopes, responses, window):
    drafter = SuffixDrafter(scopes, window, live=False)
    for i, (rl_step, prompt_id, prompt, text, _) in enumerate(responses):
        drafter.remember((rl_step, prompt_id, i, 0), prompt, text)
    drafter.begin(1)
    state = drafter.state_dict()
    restored = told(SuffixDrafter(scopes, window, live=False), A, [1, 1, 1])
    restored.load_state_dict(json.loads(json.dumps(state)))
    assert restored.state_dict() == state
    reopened = SuffixDrafter(scopes, window, live=False)
    reopened.load_state_dict(restored.state_dict())
    for key, prompt in (((1, "p", 99, 0), [0, 1]), ((1, "q", 99, 0), [1, 1, 2])):
        for one in (restored, reopened):
            one.open(key, prompt)
        assert restored.propose(key, 4) == reopened.propose(key, 4)
        if window is None:
            drafter.open(key, prompt)
            assert drafter.propose(key, 4) == restored.propose(key, 4)
