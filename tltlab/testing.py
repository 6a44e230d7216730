"""The contracts of `Selector`, `DraftBudget` and `Drafter` as checks: run them on your own in your tests.

    from tltlab.testing import check_selector

    def test_my_policy_keeps_the_contract():
        check_selector(lambda rng: MyPolicy(depth=4, rng=rng))  # or the class itself, or an instance

Every broken promise raises AssertionError with a sentence that says which one and where. Exceptions of what is checked
come through as they are.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np

from tltlab.drafters.base import Draft, Drafter, Key
from tltlab.drafters.budget import DraftBudget
from tltlab.policies.selector import Selector

from .state import DrafterState, RequestState, StepOutcome, StepState
from .strategy import NO_SPECULATION, Strategy

Factory = Callable[[np.random.Generator], Selector]
NUM_ITERATIONS = 150
BATCHES = (4096, 512, 200, 64, 40, 33, 32, 31, 21, 20, 9, 8, 5, 4, 3, 2, 1)


def check_selector(source: Factory | type[Selector] | Selector) -> None:
    """Check that the selectors `source(rng)` builds keep every promise of `Selector`; AssertionError if one does not.

    `source` may be a class too, which gets `rng` where it takes one, or an instance, which is copied.

    They choose only from `strategies`, with a propensity in (0, 1]; the same generator seed gives the same choices;
    `state_dict` survives JSON and a restored selector goes on identically; `reward` changes nothing; no requests in the
    state, a batch of 1 or 4096, an outcome with nothing accepted, a prefill or an outcome that arrives one choice late
    do no harm; and a `memoryless` selector looks only at batch and waiting.
    """
    factory = _factory(source)
    check_strategies(factory)
    check_choices(factory)
    check_repeatable(factory)
    check_state_round_trip(factory)
    check_late_outcomes(factory)
    check_memoryless(factory)


def _factory(source: Factory | type[Selector] | Selector) -> Factory:
    if isinstance(source, Selector):
        return lambda rng: deepcopy(source)
    if isinstance(source, type):
        draws = "rng" in inspect.signature(source).parameters
        return lambda rng: source(**({"rng": rng} if draws else {}))
    return source


def check_strategies(factory: Factory) -> None:
    selector = factory(np.random.default_rng(0))
    assert isinstance(selector, Selector), f"the factory built a {type(selector).__name__}, not a Selector"
    strategies = selector.strategies
    assert isinstance(strategies, tuple), f"strategies must be a tuple, got {strategies!r}"
    assert strategies, "strategies must list everything choose may return, it is empty"
    for strategy in strategies:
        assert isinstance(strategy, Strategy), f"strategies must hold Strategy values, got {strategy!r}"
    assert len(set(strategies)) == len(strategies), f"strategies lists one twice: {_names(strategies)}"


def check_choices(factory: Factory) -> None:
    selector = factory(np.random.default_rng(0))
    for i in range(NUM_ITERATIONS):
        state = _state(i, requests=i % 3 == 0)
        chosen = _choose(selector, state, i)
        outcome = _outcome(chosen, state.batch, i)
        selector.observe(chosen, outcome)
    for batch in (1, 4096):
        for accepted in ((0,) * batch, ()):
            chosen = _choose(selector, StepState(rl_step=99, batch=batch, requests=_NoRequests()), batch)
            selector.observe(chosen, StepOutcome(elapsed_s=0.01, batch=batch, accepted=accepted))


def check_repeatable(factory: Factory) -> None:
    first, second = _run(factory(np.random.default_rng(7))), _run(factory(np.random.default_rng(7)))
    _same(first, second, "two selectors built with the same seed differ; draw only from the rng that was given")
    rewarded = _run(factory(np.random.default_rng(7)), ask_reward=True)
    _same(first, rewarded, "asking reward() changed what is chosen; it must not change the selector")


def check_state_round_trip(factory: Factory) -> None:
    original = factory(np.random.default_rng(7))
    _run(original, 0, NUM_ITERATIONS // 2)
    restored = factory(np.random.default_rng(8))
    _run(restored, 0, 5)
    _reload(original, restored)
    goes_on = _run(original, NUM_ITERATIONS // 2, NUM_ITERATIONS)
    after_restore = _run(restored, NUM_ITERATIONS // 2, NUM_ITERATIONS)
    broken = "a restored selector goes on differently; state_dict must hold all that was learned, the rng too"
    _same(goes_on, after_restore, broken)


def check_late_outcomes(factory: Factory) -> None:
    """An engine that drafts one iteration ahead reports each outcome after the next choice."""
    selector = factory(np.random.default_rng(0))
    last: tuple[Strategy, StepState] | None = None
    for i in range(NUM_ITERATIONS):
        state = _state(i)
        chosen = _choose(selector, state, i)
        if last is not None:
            selector.observe(last[0], _outcome(last[0], last[1].batch, i))
        last = chosen, state


def check_memoryless(factory: Factory) -> None:
    selector = factory(np.random.default_rng(0))
    if not selector.memoryless:
        return
    chosen = {batch: _choose(selector, StepState(rl_step=0, batch=batch), batch) for batch in BATCHES}
    for i, batch in enumerate(BATCHES):
        for strategy in selector.strategies:
            selector.observe(strategy, _outcome(strategy, batch, i))
    for i, batch in enumerate(reversed(BATCHES)):
        state = StepState(
            rl_step=3,
            batch=batch,
            worker=1,
            context_tokens=1e6,
            free_kv_tokens=10.0,
            strategy=selector.strategies[-1],
            drafters=_drafters(i),
            requests=_requests(batch, i),
        )
        assert _choose(selector, state, i) == chosen[batch], (
            f"memoryless is set, but the choice at batch {batch} changed after observe or with something in the state "
            f"other than batch and waiting"
        )


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


def _reload(original: Selector | DraftBudget | Drafter, restored: Selector | DraftBudget | Drafter) -> None:
    text = _json(original.state_dict())
    restored.load_state_dict(json.loads(text))
    assert _json(restored.state_dict()) == text, "state_dict after load_state_dict is not the one that was loaded"


def _json(state: Any) -> str:
    assert isinstance(state, dict), f"state_dict must return a dict, got {type(state).__name__}"
    try:
        text = json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"state_dict must hold JSON types only (no NaN, no infinity): {error}") from error
    assert json.loads(text) == state, "state_dict changes on its way through JSON; use lists and string keys"
    return text


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


class _NoRequests(tuple[RequestState, ...]):
    """An empty view that says so when it is indexed blindly."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return ()
        raise AssertionError(f"choose read state.requests[{index}] where the caller gave no requests: ask len() first")


def _state(i: int, *, requests: bool = False) -> StepState:
    """The i-th state of a fixed story: batches fall from 4096 to 1, twice, over two RL steps, with some flutter."""
    step, at = divmod(i, NUM_ITERATIONS // 2)
    batch = BATCHES[min(at * len(BATCHES) // (NUM_ITERATIONS // 2) + (i % 5 == 0), len(BATCHES) - 1)]
    return StepState(
        rl_step=step,
        batch=batch,
        waiting=max(0, 20 - at),
        context_tokens=100.0 * batch + i,
        free_kv_tokens=None if i % 2 else 1000.0,
        drafters=_drafters(i),
        requests=_requests(min(batch, 16), i) if requests else _NoRequests(),
    )


def _drafters(i: int) -> dict[str, DrafterState]:
    return {"ngram": DrafterState(age=i % 3, updates=i, accept_estimate=1.5 if i % 2 else None)}


def _requests(num: int, i: int) -> tuple[RequestState, ...]:
    return tuple(
        RequestState(key=(0, f"p{j}", 0, 0), prompt_id=f"p{j}", generated_tokens=i + j, max_response_tokens=4096)
        for j in range(num)
    )


def _outcome(strategy: Strategy, batch: int, i: int) -> StepOutcome:
    """A made-up iteration: now nothing is accepted, now everything; now and then a prefill rides along."""
    depth = strategy.draft_depth
    accepted = tuple((i + j) % (depth + 1) if i % 4 else 0 for j in range(batch)) if depth else ()
    drafted = (depth,) * batch if depth else ()
    elapsed_s = 0.01 * (1.0 + 0.1 * depth) + 1e-5 * batch + 1e-4 * (i % 7)
    return StepOutcome(elapsed_s=elapsed_s, batch=batch, drafted=drafted, accepted=accepted, had_prefill=i % 11 == 0)


def _choose(selector: Selector, state: StepState, i: int) -> Strategy:
    chosen = selector.choose(state)
    assert chosen in selector.strategies, (
        f"choose returned {chosen!r} at batch {state.batch}, which is not in strategies ({_names(selector.strategies)})"
    )
    propensity, bucket = selector.propensity_, selector.bucket_
    assert isinstance(propensity, float), f"propensity_ must be a float, got {propensity!r}"
    assert 0.0 < propensity <= 1.0, f"propensity_ must be in (0, 1], got {propensity} at batch {state.batch} (call {i})"
    assert bucket is None or bucket >= 0, f"bucket_ must be None or an index, got {bucket}"
    return chosen


def _run(selector: Selector, start: int = 0, stop: int = NUM_ITERATIONS, *, ask_reward: bool = False) -> list[Any]:
    """Ask and tell through iterations start ... stop - 1; the (choice, propensity, bucket) of each."""
    record = []
    for i in range(start, stop):
        state = _state(i)
        chosen = _choose(selector, state, i)
        record.append((chosen, selector.propensity_, selector.bucket_))
        outcome = _outcome(chosen, state.batch, i)
        if ask_reward:
            reward = selector.reward(chosen, outcome)
            assert reward is None or math.isfinite(reward), f"reward() must be None or finite, got {reward} (call {i})"
            selector.reward(NO_SPECULATION, outcome)
        selector.observe(chosen, outcome)
    return record


def _same(first: list[Any], second: list[Any], broken: str) -> None:
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        shown = " against ".join(f"{strategy} with propensity {chance:g}" for strategy, chance, _ in (a, b))
        assert a == b, f"{broken} (call {i}: {shown})"


def _names(strategies: Sequence[Strategy]) -> str:
    return ", ".join(map(str, strategies))
