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
from tltlab.policies.driver import refuse_needs
from tltlab.policies.selector import Selector, as_choice

from .errors import ConfigError
from .state import Choice, DrafterState, RequestState, StepOutcome, StepState
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
    state, a batch of 1 or 4096, an outcome with nothing accepted, a prefill, outcomes that arrive several choices late
    from another batch size, or never, do no harm; and a `memoryless` selector looks only at batch and waiting.
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
    for name in ("propensity_", "bucket_"):
        assert not hasattr(selector, name), f"{name} is not read: return Choice(strategy, propensity, bucket)"
    try:
        refuse_needs(selector)
    except ConfigError as error:
        raise AssertionError(str(error)) from error
    if drafters is not None:
        try:
            drafters.check(strategies)
        except ConfigError as error:
            raise AssertionError(f"strategies: {error}") from error


def check_choices(factory: Factory) -> None:
    selector = factory(np.random.default_rng(0))
    for i in range(NUM_ITERATIONS):
        state = _state(i, requests=i % 3 == 0)
        choice = _choose(selector, state, i)
        selector.observe(choice, _outcome(choice, state.batch, i))
    for batch in (1, 4096):
        for kept in (0, None):
            choice = _choose(selector, StepState(rl_step=99, batch=batch, requests=_NoRequests()), batch)
            accepted = () if kept is None else (kept,) * batch
            selector.observe(choice, StepOutcome(elapsed_s=0.01, batch=batch, accepted=accepted))


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
    """Deliver outcomes one and three choices late, some of them never: batches have changed meanwhile."""
    for delay in (1, 3):
        selector = factory(np.random.default_rng(0))
        made: list[Choice] = []
        for i in range(NUM_ITERATIONS):
            made.append(_choose(selector, _state(i), i))
            if i >= delay and i % 5:
                # The batch that ran is a later one than the choice was made for.
                selector.observe(made[i - delay], _outcome(made[i - delay], _state(i - delay + 1).batch, i))


def check_memoryless(factory: Factory) -> None:
    selector = factory(np.random.default_rng(0))
    if not selector.memoryless:
        return
    made = {batch: _choose(selector, StepState(rl_step=0, batch=batch), batch) for batch in BATCHES}
    for i, batch in enumerate(BATCHES):
        for strategy in selector.strategies:
            selector.observe(Choice(strategy), _outcome(Choice(strategy), batch, i))
    for i, batch in enumerate(reversed(BATCHES)):
        state = StepState(
            rl_step=3,
            batch=batch,
            worker=1,
            context_tokens=1e6,
            strategy=selector.strategies[-1],
            drafters=_drafters(i),
            requests=_requests(batch, i),
        )
        assert _choose(selector, state, i) == made[batch], (
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
        drafters=_drafters(i),
        requests=_requests(min(batch, 16), i) if requests else _NoRequests(),
    )


def _drafters(i: int) -> dict[str, DrafterState]:
    return {"ngram": DrafterState(age=i % 3, updates=i)}


def _requests(num: int, i: int) -> tuple[RequestState, ...]:
    return tuple(
        RequestState(key=(0, f"p{j}", 0, 0), prompt_id=f"p{j}", generated_tokens=i + j, max_response_tokens=4096)
        for j in range(num)
    )


def _outcome(choice: Choice, batch: int, i: int) -> StepOutcome:
    """A made-up iteration: now nothing is accepted, now everything; now and then a prefill rides along."""
    depth = choice.strategy.draft_depth
    accepted = tuple((i + j) % (depth + 1) if i % 4 else 0 for j in range(batch)) if depth else ()
    drafted = (depth,) * batch if depth else ()
    elapsed_s = 0.01 * (1.0 + 0.1 * depth) + 1e-5 * batch + 1e-4 * (i % 7)
    return StepOutcome(elapsed_s=elapsed_s, batch=batch, drafted=drafted, accepted=accepted, had_prefill=i % 11 == 0)


def _choose(selector: Selector, state: StepState, i: int) -> Choice:
    answer = selector.choose(state)
    assert isinstance(answer, Strategy | Choice), f"choose must return a Strategy or a Choice, got {answer!r}"
    choice = as_choice(selector, answer)
    assert choice.strategy in selector.strategies, (
        f"choose returned {choice.strategy!r} at batch {state.batch}, which is not in strategies "
        f"({_names(selector.strategies)})"
    )
    chance, bucket = choice.propensity, choice.bucket
    assert isinstance(chance, float), f"the propensity must be a float, got {chance!r}"
    assert 0.0 < chance <= 1.0, f"the propensity must be in (0, 1], got {chance} at batch {state.batch} (call {i})"
    assert bucket is None or bucket >= 0, f"the bucket must be None or an index, got {bucket}"
    return choice


def _run(selector: Selector, start: int = 0, stop: int = NUM_ITERATIONS, *, ask_reward: bool = False) -> list[Choice]:
    """Ask and tell through iterations start ... stop - 1; the choices."""
    made = []
    for i in range(start, stop):
        state = _state(i)
        choice = _choose(selector, state, i)
        made.append(choice)
        outcome = _outcome(choice, state.batch, i)
        if ask_reward:
            reward = selector.reward(choice, outcome)
            assert reward is None or math.isfinite(reward), f"reward() must be None or finite, got {reward} (call {i})"
            selector.reward(Choice(NO_SPECULATION), outcome)
        selector.observe(choice, outcome)
    return made


def _same(first: list[Choice], second: list[Choice], broken: str) -> None:
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        shown = " against ".join(f"{choice.strategy} with propensity {choice.propensity:g}" for choice in (a, b))
        assert a == b, f"{broken} (call {i}: {shown})"


def _names(strategies: Sequence[Strategy]) -> str:
    return ", ".join(map(str, strategies))
