"""The macro-step engine against the slow oracle: same finish times, whatever the workload, costs and policy."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.curves import CurveAcceptance
from tltlab.acceptance.base import GeometricAcceptance, RequestArrays
from tltlab.acceptance.measured import BatchBand, FittedDepth, MeasuredAcceptance
from tltlab.acceptance.replay import TraceAcceptance
from tltlab.costs.linear import LinearCosts
from tltlab.costs.load import load_costs
from tltlab.costs.roofline import RooflineCosts
from tltlab.hardware import Gpu
from tltlab.policies.policy import load_policy
from tltlab.policies.selector import Selector, chosen
from tltlab.policies.simple import BatchTable, Fixed
from tltlab.policies.wrappers import ElasticActivation, Wrapper
from tltlab.sim.engine.batch import Batch, Expected, FluidBatch, Gains
from tltlab.sim.engine.by_request import Drawn, Rates, Replayed
from tltlab.sim.engine.random_numbers import num_reached, request_seeds, uniforms
from tltlab.sim.engine.regime import Regimes
from tltlab.sim.engine.worker import RolloutSimulator
from tltlab.sim.idle_training import IdleUse
from tltlab.sim.placement import PLACEMENTS, place
from tltlab.state import Choice
from tltlab.strategy import NO_SPECULATION, Strategy

from ..workloads import COSTS, HALF, Ruled, counterfactuals, requests_of, with_terms
from .slow_oracle import expected, finish_times

SECONDS = st.floats(0, 1e-2)
H100 = load_costs("h100-qwen2.5-7b")
assert isinstance(H100, RooflineCosts)
# It computes so slowly that the knee lies at 16 tokens.
SLOW = Gpu(name="slow", hbm_bytes_per_s=1e12, peak_flops=16e12, link_bytes_per_s=1e11, memory_bytes=80e9)
ROOFLINE = with_terms(H100, gpu=SLOW)
PLAIN = load_policy("none")
CHAINS = (Strategy.chain("ngram", 2), Strategy.chain("ngram", 5), Strategy("ngram", 4, 1, 3))


def drafting(deep, shallow, kind):
    """Deep drafts at small batches, plain decoding above: memoryless, asked again and again, or with what it learns.

    One that learns looks at how many outcomes have come, so that none may come earlier or later than it does.
    """

    def rule(state):
        if kind == "learns":
            return selector.strategies[(len(selector.outcomes) + (state.batch <= deep)) % 4]
        if state.batch <= deep:
            return CHAINS[1]
        return CHAINS[state.waiting % 2 * 2] if state.batch <= shallow else NO_SPECULATION

    selector = Ruled((NO_SPECULATION, *CHAINS), rule, memoryless=kind == "memoryless")
    return selector


@st.composite
def requests(draw):
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=12))
    n = len(lengths)
    prompts = draw(st.lists(st.integers(0, 30), min_size=n, max_size=n))
    made = requests_of(lengths, prompts, cap=64, group=draw(st.integers(1, 4)))
    return replace(made, prefix_caching=draw(st.booleans()))


@st.composite
def costs(draw):
    return LinearCosts(
        **{name: draw(SECONDS) for name in sorted(COSTS.model_fields_set - {"per_context_s"})},
        per_context_s=draw(st.sampled_from([0.0, 1e-6, 1e-3])),
        kv_capacity_tokens=draw(st.none() | st.integers(90, 200)),
        max_num_seqs=draw(st.none() | st.integers(1, 4)),
        max_num_batched_tokens=draw(st.none() | st.integers(1, 40)),
        graph_sizes=draw(st.none() | st.lists(st.integers(1, 24), min_size=1, max_size=4).map(tuple)),
        switch_s=draw(st.sampled_from([0.0, 0.5])),
    )


def assert_agree(
    req,
    cost,
    acceptance,
    new_batch,
    threshold,
    *,
    workers=2,
    placement="contiguous",
    gain=expected,
    **asked,
):
    """`drafting` by a threshold, of which None is plain decoding, takes the time that the slow oracle says.

    A policy that is not memoryless, or one within another, is asked in the same states, and receives the same outcomes.
    """

    def selector():
        if callable(threshold):
            return threshold()
        return PLAIN.build(np.random.default_rng(0)) if threshold is None else drafting(*threshold)

    regimes = Regimes(selector().strategies, cost, acceptance)
    engine = RolloutSimulator(costs=cost, selectors=[selector() for _ in range(workers)], **asked)
    engine.prepare(regimes, new_batch)
    queues = place(req, workers, placement)
    result = engine.rollout(req, queues)
    makespan = 0.0
    for fast, queue in zip(engine.selectors, queues, strict=True):
        oracle = selector()
        slow = finish_times(req, queue, oracle, regimes, cost, gain=gain, **asked)
        assert set(slow) == set(queue)
        for request, finish in slow.items():
            assert result.finish_s[request] == pytest.approx(finish, rel=1e-9, abs=1e-12)
        makespan = max([makespan, *slow.values()])
        if isinstance(fast, Wrapper) and isinstance(oracle, Wrapper):
            fast, oracle = fast.inner, oracle.inner
        if isinstance(fast, Ruled) and isinstance(oracle, Ruled) and not fast.memoryless:
            assert_same_calls(fast, oracle)
    assert result.makespan_s == pytest.approx(makespan, rel=1e-9, abs=1e-12)


def assert_same_calls(fast, slow):
    for a, b in zip(fast.states, slow.states, strict=True):
        assert (a.batch, a.waiting, a.strategy) == (b.batch, b.waiting, b.strategy)
        assert a.context_tokens == pytest.approx(b.context_tokens)
    for one, other in zip(fast.outcomes, slow.outcomes, strict=True):
        assert (one.batch, one.drafted, one.had_prefill) == (other.batch, other.drafted, other.had_prefill)
        assert one.elapsed_s == pytest.approx(other.elapsed_s, rel=1e-9, abs=1e-12)
        assert one.accepted == pytest.approx(other.accepted, rel=1e-9, abs=1e-9)


def by_batch(border):
    """Four in five drafts are kept whole up to a batch, one in five above."""
    return MeasuredAcceptance(
        bands=tuple(
            BatchBand(
                max_batch=end,
                drafters_by_depth={"ngram": {5: FittedDepth(accepted=(1 - kept, 0, 0, 0, 0, kept), drafted=5)}},
            )
            for end, kept in ((border, 0.8), (None, 0.2))
        )
    )


THRESHOLDS = st.tuples(st.integers(0, 6), st.integers(0, 12), st.sampled_from(["memoryless", "asked", "learns"]))
ALPHAS, SEEDS, ASKED = st.floats(0, 1), st.integers(0, 9), st.sampled_from([None, True])


FLUID = st.sampled_from([FluidBatch, lambda requests: Batch(requests, Expected())])
"""The general batch too, of which `FluidBatch` is an optimisation."""


@given(
    requests(),
    costs(),
    ALPHAS,
    st.none() | THRESHOLDS,
    st.integers(1, 3),
    st.sampled_from(PLACEMENTS[:4]),
    FLUID,
    ASKED,
)
def test_fluid_decoding_takes_the_time_of_its_iterations(req, cost, alpha, threshold, workers, placement, batch, ahead):
    model = None if threshold is None else GeometricAcceptance(alpha=alpha)
    assert_agree(req, cost, model, batch, threshold, workers=workers, placement=placement, ahead=ahead)


@HALF
@given(requests(), costs(), ALPHAS, THRESHOLDS, st.integers(1, 40))
def test_prompts_that_ride_take_the_time_of_iterations(req, cost, alpha, threshold, budget):
    riding = ROOFLINE.model_copy(update=cost.limits() | {"max_num_batched_tokens": budget})
    model = GeometricAcceptance(alpha=alpha)
    assert_agree(req, riding, model, FluidBatch, threshold, placement="round_robin")


@HALF
@given(requests(), costs(), ALPHAS, THRESHOLDS, SEEDS)
def test_sampled_speculation_takes_the_time_of_its_iterations(req, cost, alpha, threshold, seed):
    seeds = request_seeds(seed, req.keys)

    def luck(request, generated, num_speculative, regime):
        u = uniforms(seeds[[request]], np.array([num_speculative]), 1)[0, 0]
        return 1.0 if regime.cdf is None else 1.0 + float((regime.cdf <= u).sum())

    model = GeometricAcceptance(alpha=alpha)
    assert_agree(req, cost, model, lambda r: Batch(r, Drawn(r, seed)), threshold, gain=luck)


@HALF
@given(requests(), costs(), THRESHOLDS, st.integers(1, 4))
def test_acceptance_by_batch_takes_time_of_its_iterations(req, cost, threshold, border):
    assert_agree(req, cost, by_batch(border), FluidBatch, threshold)


@HALF
@given(requests(), costs(), ALPHAS, THRESHOLDS, SEEDS)
def test_acceptance_by_request_takes_time_of_its_iterations(req, cost, alpha, threshold, seed):
    model = CurveAcceptance(keep_logits=(4.0 * alpha - 2.0,))
    (kept,) = model.survival(Strategy.chain("ngram", 8), RequestArrays.zeros(1))

    def own(request, generated, num_speculative, regime):
        if not regime.strategy.speculates:
            return 1.0
        return 1.0 + float(kept[: regime.strategy.reach].sum())

    assert_agree(req, cost, model, Rates(model=model, costs=cost, seed=seed), threshold, gain=own)


@HALF
@given(requests(), costs(), THRESHOLDS, SEEDS)
def test_replayed_acceptance_takes_the_time_of_its_iterations(req, cost, threshold, seed):
    rng = np.random.default_rng(seed)
    positions = [rng.integers(0, 6, n) for n in req.response_tokens]
    acceptance = TraceAcceptance(counterfactuals(req.keys, positions, 5))

    def recorded(request, generated, num_speculative, regime):
        return 1.0 + min(regime.most, int(positions[request][int(generated)]))

    assert_agree(req, cost, acceptance, lambda r: Batch(r, Replayed(r, acceptance)), threshold, gain=recorded)


INNER = st.one_of(
    st.builds(lambda chain: lambda: Fixed(chain), st.sampled_from(CHAINS)),
    st.builds(
        lambda border: lambda: BatchTable([(1, CHAINS[1]), (border, CHAINS[0]), (border + 2, NO_SPECULATION)]),
        st.integers(2, 6),
    ),
    THRESHOLDS.map(lambda threshold: lambda: drafting(*threshold)),
)
ACTIVATIONS = st.fixed_dictionaries({
    "max_requests": st.integers(0, 9),
    "count": st.sampled_from(["running", "remaining"]),
    "hold_iterations": st.sampled_from([0, 1, 4]),
})  # fmt: skip


@given(requests(), costs(), ALPHAS, INNER, st.none() | ACTIVATIONS, FLUID, ASKED, st.integers(1, 4))
def test_elastic_activation_takes_the_time_of_its_iterations(req, cost, alpha, inner, activation, batch, ahead, block):
    # A choice for a block of iterations holds until something happens. With one worker the batch falls through every
    # border.
    if block > 1:
        cost, ahead = with_terms(cost, max_num_batched_tokens=None), None
    assert_agree(
        req,
        cost,
        GeometricAcceptance(alpha=alpha),
        batch,
        lambda: inner() if activation is None else ElasticActivation(inner(), **activation),
        workers=1,
        ahead=ahead,
        decision_block=block,
    )


class Unstayed(Wrapper):
    """Makes the choices of a selector, each of them only once, so that the engine goes iteration by iteration."""

    def __init__(self, inner):
        super().__init__(inner)
        self.memoryless = False

    def choose(self, state):
        return replace(chosen(self.inner, state), stays=False, least_batch=None)


class LateLearner(Selector):
    """Learns while many run, stays with few, and with one request chooses by the outcomes that have come."""

    strategies = (NO_SPECULATION, *CHAINS)

    def __init__(self):
        self.num_outcomes = 0

    def choose(self, state):
        if state.batch > 2:
            return Choice(CHAINS[0])
        if state.batch == 2:
            return Choice(NO_SPECULATION, learns=False, stays=True, least_batch=2)
        return Choice(self.strategies[self.num_outcomes % 4])

    def observe(self, choice, outcome):
        self.num_outcomes += 1


@pytest.mark.parametrize("delay", [0, 1, 5])
@pytest.mark.parametrize("length", range(6, 14))
def test_outcomes_held_back_come_after_as_many_choices(length, delay):
    req = requests_of([length, 20, 27, 60])
    made = []
    for wrap in (lambda inner: inner, Unstayed):
        selector = wrap(LateLearner())
        engine = RolloutSimulator(costs=COSTS, selectors=[selector], ahead=False, delay=delay)
        engine.prepare(Regimes(LateLearner.strategies, COSTS, GeometricAcceptance(alpha=0.6)), FluidBatch)
        made.append(engine.rollout(req, [[0, 1, 2, 3]]))
    assert made[0].finish_s == pytest.approx(made[1].finish_s, rel=1e-12)


@pytest.mark.parametrize("capacity", [None, 9000])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("hold", [0, 10])
def test_choices_that_stay_pass_many_iterations(hold, sampled, capacity):
    lengths = np.random.default_rng(0).lognormal(5.0, 0.8, 96).astype(int) + 1
    req, cost = requests_of(lengths.tolist()), with_terms(COSTS, kv_capacity_tokens=capacity)
    made, num_steps = [], []
    for wrap in (lambda inner: inner, Unstayed):
        inner = BatchTable([(1, CHAINS[1]), (4, CHAINS[0])])
        selectors = [wrap(ElasticActivation(inner, 12, hold_iterations=hold)) for _ in range(2)]
        # Without a hold a choice takes effect at once, as that of a memoryless policy does.
        engine = RolloutSimulator(costs=cost, selectors=list(selectors), ahead=bool(hold))
        batches = (lambda req: Batch(req, Drawn(req, 0))) if sampled else FluidBatch
        engine.prepare(Regimes(selectors[0].strategies, cost, GeometricAcceptance(alpha=0.6)), batches)
        made.append(engine.rollout(req, place(req, 2, "contiguous")))
        num_steps.append(sum(len(log.columns) for log in made[-1].logs))
    quick, slow = made
    assert quick.finish_s == pytest.approx(slow.finish_s, rel=1e-12)
    assert quick.first_token_s == pytest.approx(slow.first_token_s, rel=1e-12)
    for name in ("num_iterations", "tokens", "seconds", "switch_s", "prefill_tokens"):
        sums = [[float(getattr(log.columns, name).sum()) for log in rollout.logs] for rollout in made]
        assert sums[0] == pytest.approx(sums[1]), name
    # One for each response that ends, and those around a switch; memory that runs out adds preemptions.
    assert num_steps[0] < (120 if capacity is None and not sampled else 0.5 * num_steps[1])


class Noted(IdleUse):
    """Keeps every call."""

    def __init__(self):
        self.calls = []

    def worker_idle(self, worker, now):
        self.calls.append((worker, now))


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("capacity", [None, 150])
def test_a_clock_of_its_own_changes_nothing(sampled, capacity, monkeypatch):
    req = requests_of([7, 30, 12, 55, 3, 41, 9], [5] * 7, cap=64, group=2)
    cost, acceptance = with_terms(COSTS, kv_capacity_tokens=capacity), GeometricAcceptance(alpha=0.6)
    outcomes = []
    for is_apart in (True, False):
        monkeypatch.setattr(Gains, "is_apart", is_apart)
        idle_use, selectors = Noted(), [drafting(3, 6, "learns") for _ in range(3)]
        engine = RolloutSimulator(costs=cost, selectors=list(selectors), idle_use=idle_use)
        batches = (lambda req: Batch(req, Drawn(req, 0))) if sampled else FluidBatch
        engine.prepare(Regimes(selectors[0].strategies, cost, acceptance), batches)
        result = engine.rollout(req, place(req, 3, "contiguous"))
        assert [now for _, now in idle_use.calls] == sorted(result.worker_end_s)
        outcomes.append((
            result.finish_s.tolist(), result.first_token_s.tolist(), idle_use.calls,
            [selector.outcomes for selector in selectors],
        ))  # fmt: skip
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("size", [(3, 4), (5, 2000)])
@pytest.mark.parametrize("thresholds", [1, 8, 300])
def test_thresholds_reached_are_counted_as_by_a_search(size, thresholds):
    rng = np.random.default_rng(0)
    ascending = np.sort(rng.random((size[0], thresholds)), axis=1)
    drawn = np.where(rng.random(size) < 0.5, rng.choice(ascending[0], size), rng.random(size))
    by_row = [np.searchsorted(row, numbers, side="right") for row, numbers in zip(ascending, drawn, strict=True)]
    assert num_reached(drawn, ascending).tolist() == np.array(by_row).tolist()
    assert num_reached(drawn, ascending[0]).tolist() == np.searchsorted(ascending[0], drawn, side="right").tolist()
