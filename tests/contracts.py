"""The contracts of `DraftBudget` and `Drafter` as checks.

Every broken promise raises AssertionError with a sentence that says which one and where. Exceptions of what is checked
come through as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tltlab.drafters.base import Draft, Drafter, Key
from tltlab.drafters.budget import DraftBudget
from tltlab.state import StepState
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.testing import BATCHES, NUM_ITERATIONS, _NoRequests, _reload, _requests


def check_budget(factory: Callable[[], DraftBudget]) -> None:
    """Check that the budgets `factory()` builds keep the promises of `DraftBudget`; AssertionError if one does not.

    They give each request of the batch a whole number of tokens from 0 to the draft depth, no more in all than the
    strategy verifies, nothing without speculation, the same after the same calls, and need no requests in the state,
    before and after they heard of finished requests; `state_dict` survives JSON and a restored budget goes on
    identically.
    """
    budget = factory()
    assert isinstance(budget, DraftBudget), f"the factory built a {type(budget).__name__}, not a DraftBudget"
    later, original, restored = 2 * NUM_ITERATIONS // 3, factory(), factory()
    begins = _share_out(original, 0, later)
    _share_out(restored, NUM_ITERATIONS // 3, NUM_ITERATIONS // 3 + 5)
    _reload(original, restored)
    goes_on = _share_out(original, later)
    for (place, allotted), (_, again) in zip(_share_out(budget), begins + goes_on, strict=True):
        assert again == allotted, f"allot differs between two budgets built alike {place}"
    for (place, allotted), (_, after) in zip(goes_on, _share_out(restored, later), strict=True):
        assert after == allotted, f"a restored budget goes on differently; state_dict must hold all {place}"


def _share_out(budget: DraftBudget, start: int = 0, stop: int = NUM_ITERATIONS) -> list[tuple[str, list[int]]]:
    """Ask and tell through iterations start ... stop - 1, after a third of them requests finish; where and what."""
    strategies = (NO_SPECULATION, Strategy.chain("ngram", 4), Strategy("ngram", 8, 1, 5), Strategy("ngram", 8, 1, 2))
    record = []
    for i in range(start, stop):
        state = _budget_state(i)
        for strategy in strategies:
            place = f"(state {i}, {strategy})"
            record.append((place, _allotted(budget, state, strategy, place)))
        if i >= NUM_ITERATIONS // 3:
            for j in range(i % 3):
                request = replace(_requests(3, i * i % 997)[j], generated_tokens=i * i % 997 + 200 * j)
                drafted = 0 if i % 5 == 0 else 3 * i
                budget.finished(request, drafted=drafted, accepted=drafted // (j + 1))
    return record


def _allotted(budget: DraftBudget, state: StepState, strategy: Strategy, place: str) -> list[int]:
    allotted = budget.allot(state, strategy)
    assert len(allotted) == state.batch, f"allot gave {len(allotted)} numbers for {state.batch} requests {place}"
    for tokens in allotted:
        assert isinstance(tokens, int), f"allot must give ints, got {tokens!r} {place}"
        assert 0 <= tokens <= strategy.draft_depth, (
            f"allot gave {tokens} tokens, outside [0, draft_depth = {strategy.draft_depth}] {place}"
        )
    most = state.batch * (strategy.tokens_to_verify - 1)
    assert sum(allotted) <= most, f"allot gave {sum(allotted)} tokens in all, the strategy verifies {most} {place}"
    return allotted


def check_drafter(factory: Callable[[], Drafter]) -> None:
    """Check that the drafters `factory()` builds keep the promises of `Drafter`; AssertionError if one does not.

    They draft at most as deep as asked, nothing at depth 0, in whole numbers, and expect no more than they draft;
    proposing changes nothing; the same calls give the same drafts; one call with all tokens is as good as many. A
    request may be empty, closed and opened again; `remember` needs no open request, `observe` no draft that was
    proposed, `begin` leaves open requests alone, and `forget` and `load_state_dict({})` leave a drafter as good as new.
    `state_dict` survives JSON, and loading it gives it back.
    """
    drafter, again, at_once, restored = factory(), factory(), factory(), factory()
    assert isinstance(drafter, Drafter), f"the factory built a {type(drafter).__name__}, not a Drafter"
    fresh = _drafts(drafter)
    assert _drafts(again) == fresh, "two drafters built alike differ; a drafter draws nothing and holds no clock"
    assert _drafts(at_once, split=1) == fresh, "drafts depend on how the tokens were cut into calls of extend"
    assert drafter.memory_bytes >= 0, f"memory_bytes is {drafter.memory_bytes}"
    _reload(drafter, restored)
    restored.load_state_dict({})
    assert _drafts(restored) == fresh, "after load_state_dict({}) a drafter goes on differently from a new one"
    drafter.forget()
    assert _drafts(drafter) == fresh, "after forget() a drafter goes on differently from a new one"
    stranger = (4, "never seen", 0, 0)
    drafter.open(stranger, [])
    _propose(drafter, stranger, 8)
    drafter.begin(9)
    drafter.extend(stranger, [5, 6, 7, 5, 6])
    _propose(drafter, stranger, 8)
    drafter.close(stranger)


def _drafts(drafter: Drafter, split: int = 4) -> list[Draft]:
    """The drafts along a fixed story: two RL steps, two prompts, two samples each, one of them remembered."""
    drafts = []
    for rl_step in (0, 1):
        drafter.begin(rl_step)
        keys: list[Key] = [(rl_step, prompt_id, sample, 0) for prompt_id in ("p", "q") for sample in (0, 1)]
        for key in keys:
            drafter.open(key, _text(7, len(key[1])))
        for i, key in enumerate(keys):
            text = _text(40 + i, i)
            for at in range(0, len(text), len(text) // split):
                drafter.extend(key, text[at : at + len(text) // split])
        for key in keys:
            for depth in (0, 1, 3, 8):
                drafts.append(_propose(drafter, key, depth))
                drafter.observe(key, depth, depth // 2)
        drafter.remember((rl_step, "q", 2, 0), _text(7, 1), _text(30, 5))
        drafts.append(_propose(drafter, keys[-1], 8))
        for key in keys:
            drafter.close(key)
        drafter.open(keys[0], _text(7, 1))
        drafts.append(_propose(drafter, keys[0], 8))
        drafter.close(keys[0])
    return drafts


def _text(length: int, seed: int) -> list[int]:
    """Tokens that repeat themselves with a flaw now and then."""
    return [(i % 5 + i // 11 + seed) % 9 for i in range(length)]


def _propose(drafter: Drafter, key: Key, depth: int) -> Draft:
    draft = drafter.propose(key, depth)
    place = f"(request {key}, depth {depth})"
    assert len(draft.tokens) <= depth, f"propose gave {len(draft.tokens)} tokens, deeper than asked {place}"
    assert all(isinstance(token, int) for token in draft.tokens), f"tokens must be ints, got {draft.tokens} {place}"
    assert 0 <= draft.expected <= len(draft.tokens) + 1e-6, (
        f"expected is {draft.expected}, outside [0, {len(draft.tokens)} drafted] {place}"
    )
    assert drafter.propose(key, depth) == draft, f"proposing twice gave two drafts {place}"
    return Draft(list(draft.tokens), draft.expected)


def _budget_state(i: int) -> StepState:
    """Requests that know nothing, some of them or all of their recent acceptance; now and then none are listed."""
    batch = BATCHES[::-1][i % 12]
    acceptance = [None if (i + j) % 3 == 0 else (j * 7 + i) % 11 / 2 for j in range(batch)] if i % 4 else [None] * batch
    requests = tuple(replace(r, recent_acceptance=a) for r, a in zip(_requests(batch, i), acceptance, strict=True))
    return StepState(rl_step=0, batch=batch, requests=_NoRequests() if i % 7 == 0 else requests)
