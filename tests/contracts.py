"""The contract of `DraftBudget` as a check.

Every broken promise raises AssertionError that names the promise and its place. Exceptions of what is checked
come through as they are.
"""

from dataclasses import replace

from tltlab.drafters.budget import DraftBudget
from tltlab.state import StepState
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.testing import BATCHES, NUM_ITERATIONS, _NoRequests, _reload, _requests


def check_budget(factory):
    """Check that the budgets `factory()` builds keep the promises of `DraftBudget`; AssertionError if one does not.

    They give each request of the batch a whole number of tokens from 0 to the draft depth, no more in all than the
    strategy verifies, nothing without speculation, the same after the same calls, and need no requests in the state,
    before and after they heard of finished requests; `state_dict` survives JSON and a restored budget continues
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


def _share_out(budget, start=0, stop=NUM_ITERATIONS):
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


def _allotted(budget, state, strategy, place):
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


def _budget_state(i):
    """Requests that know nothing, some of them or all of their recent acceptance; now and then none are listed."""
    batch = BATCHES[::-1][i % 12]
    acceptance = [None if (i + j) % 3 == 0 else (j * 7 + i) % 11 / 2 for j in range(batch)] if i % 4 else [None] * batch
    requests = tuple(replace(r, recent_acceptance=a) for r, a in zip(_requests(batch, i), acceptance, strict=True))
    return StepState(rl_step=0, batch=batch, requests=_NoRequests() if i % 7 == 0 else requests)
