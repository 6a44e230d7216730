"""The clairvoyant bounds against the exact optimum of small rollouts, found by searching all that a schedule can do."""

from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations, count, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.simulator import COSTS, example_table
from tltlab.acceptance.base import GeometricAcceptance
from tltlab.costs.linear import LinearCosts
from tltlab.planning.rollout import Shape
from tltlab.policies.policy import load_policy
from tltlab.sim import simulate
from tltlab.sim.bounds import Floors, fixed_bound_s, lower_bound_s, shared_bound_s
from tltlab.sim.engine.regime import Regimes
from tltlab.sim.placement import PLACEMENTS
from tltlab.sim.scenario import Scenario
from tltlab.strategy import NO_SPECULATION, Strategy

from ..traces_of_lengths import of_lengths
from .workloads import FEW, FREE, HALF, Handing, with_positions, with_terms

CHAIN = Strategy.chain("ngram", 3)
SHORT = Strategy.chain("ngram", 1)
BOTH = (NO_SPECULATION, CHAIN)
CLOSE = 1 + 1e-9


@dataclass(frozen=True)
class Small:
    """A rollout small enough to search: prompts and responses in tokens, seats and cache per worker."""

    prompts: tuple[int, ...]
    lengths: tuple[int, ...]
    costs: LinearCosts
    strategies: tuple[Strategy, ...]
    workers: int
    acceptance: str
    seed: int = 0

    def positions(self, request):
        """Drafted tokens that would be accepted at each position, where acceptance is replayed."""
        rng = np.random.default_rng([self.seed, request])
        return [int(x) for x in rng.integers(0, 4, self.lengths[request])]

    def trace(self):
        trace = of_lengths(
            self.lengths, workers=self.workers, prompt_tokens=np.array(self.prompts), max_response_tokens=100
        )
        return with_positions(trace, [self.positions(i) for i in range(len(self.lengths))])

    def gain(self):
        if self.acceptance == "trace":
            rows = [self.positions(i) for i in range(len(self.lengths))]
            return lambda request, generated, s: (
                1 + min(s.draft_depth, rows[request][int(generated)]) if s.speculates else 1
            )
        alpha = float(self.acceptance.removeprefix("geometric:"))
        return lambda request, generated, s: sum(alpha**i for i in range(s.draft_depth + 1))


def seconds(costs, strategies, strategy, batch, context):
    """One iteration, as the command line's documentation has it."""
    total = costs.need("base_s") + costs.need("per_request_s") * batch + costs.need("per_context_s") * context
    total += costs.need("per_token_s") * batch * strategy.tokens_to_verify
    if strategy.speculates:
        level = costs.need("draft_level_s") + costs.need("draft_level_per_request_s") * batch
        return total + costs.need("sd_base_s") + strategy.draft_depth * level
    return total + (costs.need("sd_idle_s") if any(s.speculates for s in strategies) else 0.0)


def optimum(small):
    """Least makespan: every split over the workers and, in each, every choice of batch and strategy, iteration by
    iteration.

    A worker may leave any request out of an iteration and take it up again without prefilling it anew, which engines
    cannot do; so nothing that an engine can do is faster. A worker's first iteration has no draft to verify.
    """
    n, gain, costs = len(small.lengths), small.gain(), small.costs
    seats = costs.max_num_seqs or n

    def over(request, generated):
        return generated >= small.lengths[request] - 1e-6

    @cache
    def left_s(state, strategies=small.strategies):
        """Least seconds to the end; a state is the tokens generated per request, None when finished."""
        todo = [i for i, at in enumerate(state) if at is not None]
        if not todo:
            return 0.0
        best = float("inf")
        for size in range(1, min(seats, len(todo)) + 1):
            for batch in combinations(todo, size):
                at = [(i, state[i] or 0.0) for i in batch]
                context = sum(small.prompts[i] + generated for i, generated in at)
                if size > 1 and costs.kv_capacity_tokens and context + size > costs.kv_capacity_tokens + 1e-6:
                    continue
                prefill = costs.prefill_s(sum(small.prompts[i] for i in batch if state[i] == 0.0))
                for strategy in strategies:
                    after = list(state)
                    for i, generated in at:
                        more = round(generated + gain(i, generated, strategy), 9)
                        after[i] = None if over(i, more) else more
                    loaded = small.strategies if strategy in small.strategies else ()
                    now = prefill + seconds(costs, loaded, strategy, size, context)
                    best = min(best, now + left_s(tuple(after)))
        return best

    def worker_s(assigned):
        return left_s(tuple(0.0 if i in assigned else None for i in range(n)), (NO_SPECULATION,))

    splits = product(range(small.workers), repeat=n)
    return min(
        max(worker_s([i for i in range(n) if split[i] == w]) for w in range(small.workers))
        for split in splits
        if split[0] == 0
    )


RULES = {
    "first": lambda batch, decisions: 0,
    "last": lambda batch, decisions: -1,
    "deep when alone": lambda batch, decisions: batch == 1,
    "in turn": lambda batch, decisions: decisions,
}


def simulated(small, rule="last", placement="round_robin"):
    """Makespan of one simulation, and its lower bounds with and without moves."""
    decisions, chosen = count(1), small.strategies
    policy = Handing(*chosen, rule=lambda state: chosen[RULES[rule](state.batch, next(decisions)) % len(chosen)])
    result = simulate(
        small.trace(), policy, costs=small.costs, acceptance=small.acceptance, workers=small.workers,
        placement=placement, seed=small.seed,
    )  # fmt: skip
    return result.makespan_s, *result.scenario.bounds_s(small.strategies)[:, 0]


costs = partial(with_terms, FREE)


def small(*lengths, workers=1, prompt=2, **terms):
    """Plain decoding of responses with equal prompts."""
    return Small(
        prompts=(prompt,) * len(lengths), lengths=lengths, costs=costs(**terms), strategies=(NO_SPECULATION,),
        workers=workers, acceptance="trace",
    )  # fmt: skip


@st.composite
def smalls(draw):
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    prompts = draw(st.lists(st.integers(0, 8), min_size=len(lengths), max_size=len(lengths)))
    return Small(
        prompts=tuple(prompts),
        lengths=tuple(lengths),
        costs=costs(
            base_s=draw(st.sampled_from([1e-3, 1e-2])),
            per_request_s=draw(st.sampled_from([0.0, 1e-3, 1e-2])),
            per_token_s=draw(st.sampled_from([0.0, 1e-3])),
            per_context_s=draw(st.sampled_from([0.0, 1e-4, 1e-3])),
            sd_base_s=draw(st.sampled_from([0.0, 5e-3])),
            sd_idle_s=draw(st.sampled_from([0.0, 1e-3])),
            draft_level_s=draw(st.sampled_from([0.0, 1e-3])),
            draft_level_per_request_s=draw(st.sampled_from([0.0, 5e-4])),
            prefill_per_token_s=draw(st.sampled_from([0.0, 1e-3])),
            max_num_seqs=draw(st.sampled_from([None, 1, 2])),
            kv_capacity_tokens=draw(st.sampled_from([None, 16, 24])),
        ),
        strategies=draw(st.sampled_from([(NO_SPECULATION,), (CHAIN,), BOTH, (SHORT, CHAIN)])),
        workers=draw(st.integers(1, 3)),
        acceptance=draw(st.sampled_from(["trace", "geometric:0.4", "geometric:0.9"])),
        seed=draw(st.integers(0, 9)),
    )


@FEW
@given(smalls(), st.sampled_from(list(RULES)), st.sampled_from(PLACEMENTS[:4]))
def test_optimum_lies_between_bound_and_every_simulation(instance, rule, placement):
    best = optimum(instance)
    makespan, bound, fixed = simulated(instance, rule, placement)
    assert bound <= fixed <= best * CLOSE
    assert best <= makespan * CLOSE


@pytest.mark.parametrize(
    "instance",
    [
        # A lone response, or a worker for each: the path of the longest.
        small(6, base_s=1.0),
        small(6, base_s=1e-2, per_request_s=1e-3, per_context_s=1e-3, prefill_per_token_s=1e-2),
        small(6, per_token_s=1.0, per_context_s=1.0),
        small(6, 3, 2, workers=3, base_s=1e-2, per_request_s=1e-3, per_context_s=1e-4),
        # Four equal responses, two seats a worker: every iteration is full and all workers end together, at the area.
        *(small(4, 4, 4, 4, workers=n, base_s=1e-2, per_request_s=2e-3, max_num_seqs=2) for n in (1, 2)),
    ],
)
def test_where_path_or_area_decides_bound_is_optimum(instance):
    makespan, bound, _ = simulated(instance)
    assert makespan == pytest.approx(optimum(instance), rel=1e-12)
    assert bound == pytest.approx(makespan, rel=1e-6)


@FEW
@given(st.integers(1, 12), st.integers(0, 20), st.sampled_from([(CHAIN,), BOTH, (SHORT, CHAIN)]))
def test_a_lone_replayed_response_meets_the_best_path(length, seed, strategies):
    instance = Small(
        prompts=(3,), lengths=(length,), strategies=strategies, workers=1, acceptance="trace", seed=seed,
        costs=costs(base_s=1e-2, per_token_s=1e-3, per_context_s=1e-4, draft_level_s=2e-3, prefill_per_token_s=1e-3),
    )  # fmt: skip
    assert simulated(instance)[1] == pytest.approx(optimum(instance), rel=1e-9)


def floors_of(costs, workers, most, strategies=(NO_SPECULATION,), model=None, gpus=1):
    return Floors.of(Regimes(strategies, costs, model), costs, Shape(engines=workers, gpus=gpus), most)


def step_of(lengths, prompts=128):
    return Scenario.of(of_lengths(lengths, workers=1, prompt_tokens=prompts)).steps[0]


def moving_optimum(small, shapes):
    """Least makespan where a request, with its keys and values, may be in any engine's next iteration for nothing.

    `shapes` have costs by the GPUs of an engine; GPUs change their shape for nothing. Iterations are tried in every
    order of their starts, each as soon as its GPUs are free, its requests' last ones over and the one before begun.
    """
    gain, num = small.gain(), len(small.lengths)
    engines = [(c, range(g, g + gpus)) for gpus, c in shapes.items() for g in range(0, small.workers, gpus)]

    def after(tokens, batch, strategy):
        """Tokens generated by each request, None when finished."""
        done = list(tokens)
        for i in batch:
            more = round(tokens[i] + gain(i, tokens[i], strategy if tokens[i] else NO_SPECULATION), 9)
            done[i] = None if more >= small.lengths[i] - 1e-6 else more
        return tuple(done)

    @cache
    def left_s(tokens, ready_s, free_s):
        """Least seconds to the end; when requests are ready and GPUs free is from the start of the last iteration."""
        todo = [i for i in range(num) if tokens[i] is not None]
        best = float("inf") if todo else max(ready_s)
        for costs, on in engines:
            for size in range(1, min(len(todo), costs.max_num_seqs or num) + 1):
                for batch, strategy in product(combinations(todo, size), {*small.strategies, NO_SPECULATION}):
                    # A request that has no token yet has no draft either, nor has an engine in its first iteration.
                    if strategy not in (small.strategies if any(tokens[i] for i in batch) else {NO_SPECULATION}):
                        continue
                    start_s = max(0.0, *(free_s[g] for g in on), *(ready_s[i] for i in batch))
                    end_s = start_s + costs.prefill_s(sum(small.prompts[i] for i in batch if not tokens[i]))
                    context = sum(small.prompts[i] + tokens[i] for i in batch)
                    loaded = small.strategies if strategy in small.strategies else ()
                    end_s += seconds(costs, loaded, strategy, size, context)
                    ready = [round(max(0.0, (end_s if i in batch else t) - start_s), 9) for i, t in enumerate(ready_s)]
                    # Whose times are the same does not matter where shapes are of one GPU or of all.
                    free = sorted(round(max(0.0, (end_s if g in on else t) - start_s), 9) for g, t in enumerate(free_s))
                    best = min(best, start_s + left_s(after(tokens, batch, strategy), tuple(ready), tuple(free)))
        return best

    return left_s((0.0,) * num, (0.0,) * num, (0.0,) * small.workers)


@FEW
@given(smalls(), st.sampled_from([0.2, 0.5, 1.0]), st.sampled_from([0.5, 1.0, 2.0]))
def test_no_moves_and_no_changes_of_shape_undercut_the_bound(instance, base, share):
    instance = replace(
        instance, workers=2, prompts=instance.prompts[:3], lengths=tuple(min(n, 3) for n in instance.lengths[:3]),
        costs=with_terms(instance.costs, kv_capacity_tokens=None),
    )  # fmt: skip
    small = instance.costs
    large = {name: share * small.need(name) for name in ("per_request_s", "per_context_s", "prefill_per_token_s")}
    shapes = {1: small, 2: with_terms(small, base_s=base * small.need("base_s"), **large)}
    scenario = Scenario.of(instance.trace(), costs=small, acceptance=instance.acceptance, workers=2)
    floors = [
        floors_of(costs, 2 // gpus, 3, instance.strategies, scenario.acceptance, gpus) for gpus, costs in shapes.items()
    ]
    (step,), model = scenario.steps, scenario.acceptance
    for known, chosen in ((floors[:1], {1: small}), (floors, shapes)):
        best = moving_optimum(instance, chosen)
        assert lower_bound_s(step, known, model) <= best * CLOSE
        if model.varies_by == "nothing":
            assert shared_bound_s(step, known) <= best * CLOSE
    staying = moving_optimum(instance, {1: small})
    assert best <= staying
    if instance.strategies == (NO_SPECULATION,):
        # `optimum` has drafts for requests without a token too, but in a worker's first iteration.
        assert staying <= optimum(instance) * CLOSE


@HALF
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=20),
    st.integers(1, 4),
    st.sampled_from(PLACEMENTS[:4]),
    st.booleans(),
    st.one_of(st.none(), st.integers(1, 6)),
)
def test_no_placement_and_no_policy_beats_shared_bound(lengths, workers, placement, speculates, seats):
    costs, model = with_terms(COSTS, max_num_seqs=seats), GeometricAcceptance(alpha=0.7)
    policy = example_table() if speculates else load_policy("none")
    scenario = Scenario.of(of_lengths(lengths, workers=workers), costs=costs, acceptance=model, placement=placement)
    step, floors = scenario.steps[0], floors_of(costs, workers, len(lengths), policy.strategies, model)
    bound_s = shared_bound_s(step, [floors])
    rollout_s = scenario.rollouts(policy)[0].makespan_s
    assert bound_s <= rollout_s * CLOSE
    older_s = lower_bound_s(step, [floors], model)
    assert bound_s >= 0.999 * older_s if not speculates else bound_s > 0
    assert 0 < fixed_bound_s(step, floors, model) <= rollout_s * CLOSE


def test_a_long_response_needs_room_of_its_own():
    per_request = costs(base_s=1.0, per_request_s=0.5)
    step, floors = step_of([1000] + [200] * 30), floors_of(per_request, 2, 31)
    assert shared_bound_s(step, [floors]) > 1.1 * lower_bound_s(step, [floors], None)


@pytest.mark.parametrize("acceptance", ["ngram=0.8@1k", "ngram=0.8@3k", "ngram=0.8"])
@pytest.mark.parametrize("lengths", [[12_000], [300, 4000, 12_000, 9000]])
def test_a_bound_follows_acceptance_that_falls_with_context(acceptance, lengths):
    trace = of_lengths(lengths, prompt_tokens=200)
    scenario = Scenario.of(trace, costs=COSTS, acceptance=acceptance, workers=len(lengths))
    for strategies in ((CHAIN,), BOTH):
        bound_s, _ = scenario.bounds_s(strategies)
        policies = [Handing(*strategies, rule=lambda state, s=s: s, memoryless=True) for s in strategies]
        rollout_s = min(scenario.rollouts(policy)[0].makespan_s for policy in policies)
        assert bound_s <= rollout_s * CLOSE
        if len(strategies) == 1:
            assert bound_s > 0.97 * rollout_s


@pytest.mark.parametrize(
    ("lengths", "per_context_s", "seconds"),
    [
        # On each worker two long responses: 300 iterations of 1 s, .1 s for each response in one.
        ([300] * 4 + [30] * 10, 0.0, 300 + 2 * 30 + 5 * 3),
        # Sums of contexts for 100 tokens behind a prompt of 100 are 14,950.
        ([100] * 6, 1e-3, 100 + 3 * (10 + 14.95)),
    ],
)
def test_without_moves_a_drain_is_optimal(lengths, per_context_s, seconds):
    terms = costs(base_s=1.0, per_request_s=0.1, per_context_s=per_context_s)
    step, floors = step_of(lengths, prompts=100), floors_of(terms, 2, len(lengths))
    trace = of_lengths(lengths, workers=2, prompt_tokens=100)
    assert simulate(trace, costs=terms, placement="longest_first").makespan_s == pytest.approx(seconds)
    assert fixed_bound_s(step, floors, None) == pytest.approx(seconds)
    assert lower_bound_s(step, [floors], None) < 0.95 * seconds


SPLIT = with_terms(COSTS, base_s=2e-3, per_context_s=6e-9, per_token_s=6e-6)
"""Costs of a worker of four GPUs."""


@HALF
@given(st.lists(st.integers(1, 900), min_size=1, max_size=20), st.integers(1, 2))
def test_bound_of_two_shapes_is_at_most_that_of_either(lengths, large):
    step, small, most = step_of(lengths), 4 * large, len(lengths)
    shapes = [floors_of(COSTS, small, most), floors_of(SPLIT, large, most, gpus=4)]
    for bound in (lambda shapes: lower_bound_s(step, shapes, None), lambda shapes: shared_bound_s(step, shapes)):
        both_s = bound(shapes)
        assert 0 < both_s <= min(bound([floors]) for floors in shapes) * CLOSE
        assert both_s == pytest.approx(bound(shapes[::-1]))
        # One shape has the same bound however it is counted.
        again = [floors_of(COSTS, small, most, gpus=3)], shapes[:1] * 2
        assert [bound(shapes) for shapes in again] == pytest.approx([bound(shapes[:1])] * 2)
