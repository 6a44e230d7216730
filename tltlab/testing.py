"""The contract of `Selector` as a check: run it on your own in your tests.

    from tltlab.testing import check_selector

    def test_my_policy_keeps_the_contract():
        check_selector(lambda rng: MyPolicy(depth=4, rng=rng))  # or the class itself, or an instance

Every broken promise raises AssertionError with a sentence that names the promise and the place. Exceptions of the
checked class come through as they are.
"""

import inspect
import json
import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np

from tltlab.acceptance.base import Acceptance, AcceptanceModel, RequestArrays
from tltlab.costs.base import CostModel, IterationCost
from tltlab.costs.load import load_costs
from tltlab.drafters.base import Draft, Drafter, Key
from tltlab.drafters.specs import STANDARD, Drafters
from tltlab.planning.placement import PlacedRequest, Placement
from tltlab.planning.rollout import HELD, LENGTHS, EngineCosts, RolloutPlanner, RolloutState, Shape
from tltlab.planning.rollout_driver import check_actions
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
    `state_dict` survives JSON and a restored selector continues identically; `reward` changes nothing; no requests in
    the state, a batch of 1 or 4096, an outcome with nothing accepted, a prefill, outcomes that arrive several choices
    late from another batch size, or never, do no harm; and a `memoryless` selector looks only at batch and waiting.
    """
    factory = _factory(source)
    check_strategies(factory, drafters)
    check_choices(factory)
    check_repeatable(factory)
    check_state_round_trip(factory)
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
        if drafters is not None:
            drafters.check(strategies)
    except ConfigError as error:
        raise AssertionError(str(error)) from error


def check_choices(factory: Factory) -> None:
    """Deliver outcomes at once, then one and three choices late, some of them never: batches have changed meanwhile."""
    for delay in (0, 1, 3):
        selector = factory(np.random.default_rng(0))
        made: list[Choice] = []
        for i in range(NUM_ITERATIONS):
            made.append(_choose(selector, _state(i, requests=i % 3 == 0), i))
            if i >= delay and (i % 5 or not delay):
                # The batch that ran is a later one than a late choice was made for.
                batch = _state(i - delay + (delay > 0)).batch
                selector.observe(made[i - delay], _outcome(made[i - delay], batch, i))
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
    broken = "a restored selector continues differently; state_dict must contain all learned state, the rng too"
    _same(goes_on, after_restore, broken)


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


def _reload(original: Selector | Drafter, restored: Selector | Drafter) -> None:
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
    """An empty view that raises an explanatory error when it is indexed blindly."""

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


def check_drafter(source: Callable[[], Drafter] | Drafter) -> None:
    """Check that a drafter keeps every promise of `Drafter`; AssertionError if it does not. An instance is copied.

    It proposes at most as many tokens as are asked for, and expects no more to be kept; the same calls give the same
    drafts, and one `extend` as many; asking changes nothing, and the tokens that it is handed stay unchanged;
    `propose_all` is `propose` of each; `remember` needs no open request, `observe` no draft that was proposed, `begin`
    leaves open requests alone, and closed ones may be opened again. After `recall` nothing of earlier rollouts shows
    but what was recalled, so that a worker that starts again drafts as before; after `forget` and `load_state_dict({})`
    a drafter is as good as new; its state survives JSON. Drafts are made in the engine's core.
    """

    def fresh() -> Drafter:
        drafter: Drafter = _part(source, Drafter)
        return drafter

    drafter, again = fresh(), fresh()
    for name in ("has_network", "needs_text", "draws_trees"):
        value = getattr(drafter, name, False)
        assert isinstance(value, bool), f"{name} must be True or False, got {value!r}"
    made_by = getattr(drafter, "made_by", "engine")
    assert made_by == "engine", f"made_by must be 'engine', where a user's drafter is asked, got {made_by!r}"
    first = _drafts(drafter)
    assert first == _drafts(fresh()), "two drafters that received the same tokens draft differently; draw nothing"
    assert first == _drafts(fresh(), cut=True), "drafts depend on how tokens were cut into calls of extend"
    memory = drafter.memory_bytes
    assert type(memory) is int, f"memory_bytes must be a whole number, got {memory!r}"
    assert memory >= 0, f"memory_bytes must be 0 or more, got {memory!r}"
    for each in (drafter, again):
        each.recall([((0, "p0", 0, 0), [1, 2, 3, 1, 2], [3, 1, 2, 3, 4])])
    broken = "after recall the drafts depend on an earlier rollout; override recall, or keep nothing of closed requests"
    assert _drafts(drafter, 2) == _drafts(again, 2), broken
    _reload(drafter, again)
    again.load_state_dict({})
    drafter.forget()
    for each, call in ((drafter, "forget()"), (again, "load_state_dict({})")):
        assert _drafts(each) == first, f"after {call} the drafts are not those of a new drafter"


def _drafts(drafter: Drafter, rl_step: int = 0, *, cut: bool = False) -> list[Any]:
    """Drafts in two made-up rollouts of two groups that repeat themselves; responses end early and are remembered."""
    made: list[Any] = []
    handed: list[tuple[list[int], list[int]]] = []

    def hand(method: Callable[[Key, list[int]], None], key: Key, tokens: list[int]) -> None:
        handed.append((tokens, list(tokens)))
        method(key, tokens)

    for step in (rl_step, rl_step + 1):
        drafter.begin(step)
        keys = [(step, f"p{i // 2}", i % 2, 0) for i in range(4)]
        for key in keys:
            hand(drafter.open, key, [1, 2, 3, 1, 2] if key[1] == "p0" else [5, 6, 5])
        for turn in range(6):
            for i, key in enumerate(keys):
                tokens = [3 if i % 2 else 1, 1 + turn % 3, 2]
                for part in ([token] for token in tokens) if cut else (tokens,):
                    hand(drafter.extend, key, part)
            done = drafter.catch_up(64)
            assert isinstance(done, bool), f"catch_up must return True or False, got {done!r}"
            queries = [(key, (turn + i) % 5) for i, key in enumerate(keys)]
            made.append(_asked(drafter, queries))
            drafter.observe_all([(key, depth, turn % (depth + 1)) for key, depth in queries])
            if turn == 3:
                drafter.remember((step, "p1", 9, 0), [5, 6, 5], [6, 5, 1, 6])
                drafter.close(keys.pop())
        for key in keys:
            drafter.close(key)
        drafter.open(keys[0], [1, 2, 3, 1, 2])
        drafter.begin(step)
        made.append(_asked(drafter, [(keys[0], 4)]))
        drafter.close(keys[0])
    for now, before in handed:
        assert now == before, f"open or extend changed the tokens {before} that it was handed to {now}"
    return made


def _asked(drafter: Drafter, queries: Sequence[tuple[Key, int]]) -> list[Any]:
    """Drafts for these keys and depths, asked for one by one, again, and all together."""
    drafts, again = ([_draft(drafter.propose(key, depth), depth) for key, depth in queries] for _ in range(2))
    assert drafts == again, f"asked twice, propose drafts {drafts} and then {again}; asking must change nothing"
    together = [_draft(draft, depth) for draft, (_, depth) in zip(drafter.propose_all(queries), queries, strict=True)]
    assert drafts == together, f"propose_all drafts {together}, and propose {drafts}"
    return drafts


def _draft(draft: Any, depth: int) -> tuple[list[int], float]:
    assert isinstance(draft, Draft), f"propose must return a Draft, got {type(draft).__name__}"
    tokens, expected = list(draft.tokens), draft.expected
    assert len(tokens) <= depth, f"propose returned {len(tokens)} tokens where {depth} were asked for"
    assert all(isinstance(token, int | np.integer) for token in tokens), f"a draft holds token ids, got {tokens!r}"
    assert 0 <= expected <= len(tokens) + 1e-6, f"expected must lie between 0 and {len(tokens)} tokens, got {expected}"
    return tokens, float(expected)


def check_placement(source: Callable[[], Placement] | Placement) -> None:
    """Check that a placement keeps every promise of `Placement`; AssertionError if it does not.

    It returns a queue for each worker, with each request in one of them, and the same queues when it is asked again;
    also without requests, with more workers than requests, and without a history; it changes none of its arguments.
    """
    placement = _part(source, Placement)
    for workers, num in ((1, 5), (2, 0), (3, 16), (8, 3)):
        workload = tuple(PlacedRequest((1, f"p{i // 4}", i % 4, 0), 10 + i, 64) for i in range(num))
        for history in ({}, {"p0": [60, 50], "p1": [5, 9], "other": [1]}):
            given = deepcopy(history)
            queues, again = ([list(q) for q in placement.place(workload, workers, given)] for _ in range(2))
            about = f"for {num} requests on {workers} workers"
            assert given == history, f"place changed the history {about}"
            assert len(queues) == workers, f"place must return a queue for each worker, got {len(queues)} {about}"
            found = sorted(i for queue in queues for i in queue)
            assert found == list(range(num)), f"each request must be in one queue once, got {found} {about}"
            assert queues == again, f"place returned {queues} and then {again} {about}"


def check_planner(source: Callable[[], RolloutPlanner] | RolloutPlanner) -> None:
    """Check that a planner returns actions that can be done in the rollouts of an example; AssertionError if not.

    Rollouts of 0 to 40 requests on four engines, some held, with and without ended ones and costs of another shape.
    """
    planner = _part(source, RolloutPlanner)
    costs = load_costs("cpu-small")
    shapes = [Shape(engines=4, gpus=1), Shape(engines=1, gpus=4)]
    engines = {shape: EngineCosts(shape, costs) for shape in shapes}
    for num in (0, 1, 5, 40):
        keys = [(1, f"p{i // 4}", i % 4, 0) for i in range(num)]
        for begun, known in ((False, {}), (True, dict(list(engines.items())[:1])), (True, engines)):
            state = RolloutState(
                now_s=0.0,
                rl_step=1,
                active=shapes[0],
                keys=keys,
                worker=np.array([HELD if i == 7 else i % 4 for i in range(num)], np.int64),
                prompt_tokens=np.full(num, 20.0),
                generated_tokens=np.arange(num, dtype=np.float64) * begun,
                max_response_tokens=np.full(num, 64.0),
                ended={(1, "p0", 9, 0): 30} if begun else {},
                engines=known,
                lengths={key: 40 + i % 20 for i, key in enumerate(keys)} if LENGTHS in planner.needs else None,
            )
            try:
                check_actions(list(planner.plan(state)), state)
            except ConfigError as error:
                raise AssertionError(f"for {num} requests plan returned what cannot be done: {error}") from error
            assert not math.isnan(planner.asked_below), "asked_below must be a number"


def check_costs(source: Callable[[], CostModel] | CostModel) -> None:
    """Check that a cost model keeps every promise of `CostModel`; AssertionError if it does not.

    Seconds are finite, 0 or more, linear in the context, and the same when asked again; drafting is a part of them,
    and none of plain decoding; `tokens_to_verify` is the one that was given; a prompt that is prefilled in chunks
    takes what it takes as a whole, and during decoding not more than by itself.
    """
    costs = _part(source, CostModel)
    strategies = [NO_SPECULATION, *(Strategy.chain(name, depth) for name in ("ngram", "learned") for depth in (1, 4))]
    for strategy in strategies:
        try:
            cost, again = costs.iteration(strategy), costs.iteration(strategy)
            fewer = costs.iteration(strategy, tokens_to_verify=1.5)
        except ConfigError:
            assert strategy.speculates, "iteration raised ConfigError for plain decoding, which costs must know"
            continue
        assert isinstance(cost, IterationCost), f"iteration must return an IterationCost, got {type(cost).__name__}"
        for made, verified in ((cost, strategy.tokens_to_verify), (fewer, 1.5)):
            assert made.tokens_to_verify == verified, (
                f"iteration({strategy}) has tokens_to_verify {made.tokens_to_verify}, asked for were {verified}"
            )
        for batch in (1, 7, 64, 512):
            about = f"at {strategy} and batch {batch}"
            parts = {n: getattr(cost, n)(batch) for n in ("without_context_s", "context_slope_s", "draft_s")}
            for name, value in parts.items():
                assert 0 <= value < math.inf, f"{name} must be 0 or more, got {value} {about}"
                assert value == getattr(again, name)(batch), f"{name} differs when asked again {about}"
            draft_s = parts["draft_s"]
            assert draft_s <= parts["without_context_s"], f"draft_s is more than without_context_s {about}"
            assert strategy.speculates or not draft_s, f"plain decoding drafts nothing, draft_s is {draft_s} {about}"
            for context in (0.0, 1e3, 1e6):
                linear = parts["without_context_s"] + parts["context_slope_s"] * context
                assert math.isclose(cost.seconds(batch, context), linear, rel_tol=1e-9, abs_tol=1e-15), (
                    f"seconds is not without_context_s + context_slope_s * context at context {context:g} {about}"
                )
            added_s = cost.added_s(batch, 100.0, 0.5)
            assert 0 <= added_s <= 0.5, f"added_s must be between 0 and apart_s = 0.5, got {added_s} {about}"
    whole_s, parts_s = costs.prefill_s(300.0), costs.prefill_s(100.0) + costs.prefill_s(200.0)
    assert 0 <= whole_s < math.inf, f"prefill_s must be 0 or more, got {whole_s}"
    assert math.isclose(whole_s, parts_s, rel_tol=1e-9), f"chunks of a prompt take {parts_s} s, the whole {whole_s} s"


def check_acceptance(source: Callable[[], AcceptanceModel] | AcceptanceModel) -> None:
    """Check that an acceptance model keeps every promise of its base class; AssertionError if it does not.

    P(accepted >= i) lies in [0, 1] and falls with i, one row per request, the same row where requests are alike;
    answers are the same when asked again; no more tokens are accepted than drafted; `most_tokens` is never exceeded.
    """
    model = _part(source, AcceptanceModel)
    assert model.varies_by in ("nothing", "request"), f"varies_by must be nothing or request, got {model.varies_by!r}"
    covered = 0
    for drafter in model.drafters or ("ngram", "learned"):
        for depth in (1, 4, 8):
            strategy = Strategy.chain(drafter, depth)
            try:
                model.in_state({drafter: DrafterState()}).check(strategy)
            except ConfigError:
                continue
            covered += 1
            _check_strategy(model.in_state({drafter: DrafterState()}), strategy)
    assert covered, "check refuses every chain of depth 1, 4 and 8: the model covers nothing"


def _check_strategy(model: Acceptance, strategy: Strategy) -> None:
    reach = strategy.reach
    drafted = model.num_drafted(strategy)
    assert 0 <= drafted <= strategy.tokens_to_verify - 1, f"num_drafted of {strategy} is {drafted}"
    zeros, longest, beside = np.zeros(6), np.full(6, 1000.0), np.full(6, 3.0)
    rows = {}
    for name, at, siblings in (("early", zeros, zeros), ("late", longest, zeros), ("last", longest, beside)):
        requests = RequestArrays(at, siblings)
        rows[name] = survival = np.asarray(model.survival(strategy, requests))
        assert survival.shape == (6, reach), (
            f"survival of {strategy} must have shape (6, {reach}), got {survival.shape}"
        )
        assert ((survival >= 0) & (survival <= 1)).all(), f"survival of {strategy} must lie between 0 and 1"
        assert (np.diff(survival, axis=1) <= 1e-12).all(), f"survival of {strategy} rises with the position"
        again = model.survival(strategy, requests)
        assert np.array_equal(survival, again), f"survival of {strategy} differs when asked again"
    steady = all(np.array_equal(rows["early"], row) for row in rows.values())
    if model.varies_by == "nothing":
        alike = steady and np.array_equal(rows["early"], model.survival(strategy, RequestArrays.zeros(6)))
        assert alike, f"varies_by is nothing, but the survival of {strategy} differs by request"
        accepted = model.tokens_per_iteration(strategy) - 1
        assert accepted <= drafted + 1e-9, f"{strategy}: {accepted:g} tokens are accepted of {drafted:g} drafted"
    most = model.most_tokens(strategy, RequestArrays(longest, beside)) + 1e-9
    exceeded = any((1 + survival.sum(axis=1) > most).any() for survival in rows.values())
    assert not exceeded, f"{strategy}: more tokens than most_tokens returns"


def _part(source: Any, base: type[Any]) -> Any:
    """A fresh object: `source` copied, or built of a class or function."""
    part = deepcopy(source) if isinstance(source, base) else source()
    assert isinstance(part, base), f"a {base.__name__} was expected, got {type(part).__name__}"
    return part
