"""The contract of `Selector` as a check: run it on your own in your tests.

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
from typing import Any

import numpy as np

from tltlab.drafters.specs import STANDARD, Drafters
from tltlab.errors import ConfigError
from tltlab.policies.selector import Selector

from .state import DrafterState, RequestState, StepOutcome, StepState
from .strategy import NO_SPECULATION, Strategy

Factory = Callable[[np.random.Generator], Selector]
NUM_ITERATIONS = 150
BATCHES = (4096, 512, 200, 64, 40, 33, 32, 31, 21, 20, 9, 8, 5, 4, 3, 2, 1)


def check_selector(source: Factory | type[Selector] | Selector, drafters: Drafters | None = STANDARD) -> None:
    """Check that the selectors `source(rng)` builds keep every promise of `Selector`; AssertionError if one does not.

    `source` may be a class too, which gets `rng` where it takes one, or an instance, which is copied. `drafters` are
    those that strategies may name; None leaves that open.

    They choose only from `strategies`, with a propensity in (0, 1]; the same generator seed gives the same choices;
    `state_dict` survives JSON and a restored selector goes on identically; `reward` changes nothing; no requests in the
    state, a batch of 1 or 4096, an outcome with nothing accepted, a prefill or an outcome that arrives one choice late
    do no harm; and a `memoryless` selector looks only at batch and waiting.
    """
    factory = _factory(source)
    check_strategies(factory, drafters)
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


def check_strategies(factory: Factory, drafters: Drafters | None = None) -> None:
    selector = factory(np.random.default_rng(0))
    assert isinstance(selector, Selector), f"the factory built a {type(selector).__name__}, not a Selector"
    strategies = selector.strategies
    assert isinstance(strategies, tuple), f"strategies must be a tuple, got {strategies!r}"
    assert strategies, "strategies must list everything choose may return, it is empty"
    for strategy in strategies:
        assert isinstance(strategy, Strategy), f"strategies must hold Strategy values, got {strategy!r}"
    assert len(set(strategies)) == len(strategies), f"strategies lists one twice: {_names(strategies)}"
    if drafters is not None:
        try:
            drafters.check(strategies)
        except ConfigError as error:
            raise AssertionError(f"strategies: {error}") from error


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


def _reload(original: Selector, restored: Selector) -> None:
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
