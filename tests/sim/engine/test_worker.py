"""The macro-step engine against the slow oracle: same finish times, whatever the workload, costs and policy."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tltlab.acceptance.load import (
    Band,
    BatchAcceptance,
    FittedDepth,
    GeometricAcceptance,
    SpreadAcceptance,
    TraceAcceptance,
)
from tltlab.costs.base import CostModel, LinearCosts
from tltlab.costs.load import load_costs
from tltlab.costs.roofline import RooflineCosts
from tltlab.hardware import Gpu
from tltlab.lengths.generate import log_normal
from tltlab.policies.selector import Selector
from tltlab.sim.engine.batch import FluidBatch
from tltlab.sim.engine.by_request import Rates
from tltlab.sim.engine.drawn import ReplayBatch, SampledBatch
from tltlab.sim.engine.random_numbers import request_seeds, uniforms
from tltlab.sim.engine.regime import Regime, Regimes
from tltlab.sim.engine.requests import Requests
from tltlab.sim.engine.worker import RolloutSimulator
from tltlab.sim.placement import PLACEMENTS, place
from tltlab.state import StepState
from tltlab.strategy import NO_SPECULATION, Strategy

from ..workloads import COSTS, requests_of
from .slow_oracle import expected, finish_times

SECONDS = st.floats(0, 1e-2)
H100 = load_costs("h100-qwen2.5-7b")
assert isinstance(H100, RooflineCosts)
# It computes so slowly that the knee lies at 16 tokens.
SLOW = Gpu(name="slow", hbm_bytes_per_s=1e12, peak_flops=16e12, link_bytes_per_s=1e11, memory_bytes=80e9)
ROOFLINE = H100.model_copy(update={"gpu": SLOW})
CHAINS = (Strategy.chain("ngram", 2), Strategy.chain("ngram", 5), Strategy("ngram", 4, 1, 3))


class Threshold(Selector):
    """Deep drafts at small batches, plain decoding above; forgetful or asked at every iteration."""

    def __init__(self, deep: int, shallow: int, memoryless: bool) -> None:
        self.strategies = (NO_SPECULATION, *CHAINS)
        self.deep, self.shallow, self.memoryless = deep, shallow, memoryless

    def choose(self, state: StepState) -> Strategy:
        if state.batch <= self.deep:
            return CHAINS[1]
        if state.batch <= self.shallow:
            return CHAINS[state.waiting % 2 * 2]
        return NO_SPECULATION


@st.composite
def requests(draw: st.DrawFn) -> Requests:
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=12))
    n = len(lengths)
    prompts = draw(st.lists(st.integers(0, 30), min_size=n, max_size=n))
    made = requests_of(lengths, prompts, cap=64, group=draw(st.integers(1, 4)))
    return replace(made, prefix_caching=draw(st.booleans()))


@st.composite
def costs(draw: st.DrawFn) -> LinearCosts:
    names = (
        "base_s", "per_request_s", "per_token_s", "sd_base_s", "sd_idle_s", "draft_level_s",
        "draft_level_per_request_s", "prefill_per_token_s",
    )  # fmt: skip
    return LinearCosts(
        **{name: draw(SECONDS) for name in names},
        per_context_s=draw(st.sampled_from([0.0, 1e-6, 1e-3])),
        kv_capacity_tokens=draw(st.none() | st.integers(90, 200)),
        max_num_seqs=draw(st.none() | st.integers(1, 4)),
        max_num_batched_tokens=draw(st.none() | st.integers(1, 40)),
        graph_sizes=draw(st.none() | st.lists(st.integers(1, 24), min_size=1, max_size=4).map(tuple)),
        switch_s=draw(st.sampled_from([0.0, 0.5])),
    )


def assert_agree(
    req: Requests,
    cost: CostModel,
    regimes: Regimes,
    new_batch: Callable[[Requests], Any],
    selector: Callable[[], Selector],
    workers: int,
    placement: str,
    gain: Callable[..., float] = expected,
) -> None:
    engine = RolloutSimulator(costs=cost, selectors=[selector() for _ in range(workers)]).prepare(regimes, new_batch)
    queues = place(req, workers, placement)
    result = engine.rollout(req, queues)
    makespan = 0.0
    for queue in queues:
        slow = finish_times(req, queue, selector(), regimes, cost, gain=gain)
        assert set(slow) == set(queue)
        for request, finish in slow.items():
            assert result.finish_s[request] == pytest.approx(finish, rel=1e-9, abs=1e-12)
        makespan = max([makespan, *slow.values()])
    assert result.makespan_s == pytest.approx(makespan, rel=1e-9, abs=1e-12)


@given(requests(), costs(), st.integers(1, 3), st.sampled_from(PLACEMENTS[:4]))
def test_plain_decoding_takes_the_time_of_its_iterations(req, cost, workers, placement):
    found = Regimes([NO_SPECULATION], cost, None)
    assert_agree(req, cost, found, FluidBatch, lambda: Plain(), workers, placement)


@given(requests(), costs(), st.floats(0, 1), st.integers(0, 6), st.integers(0, 12), st.booleans(), st.integers(1, 40))
def test_prompts_that_ride_in_iterations_take_the_time_of_these(req, cost, alpha, deep, shallow, memoryless, budget):
    riding = ROOFLINE.model_copy(update=cost.limits() | {"max_num_batched_tokens": budget})
    found = Regimes((NO_SPECULATION, *CHAINS), riding, GeometricAcceptance(alpha=alpha))
    assert_agree(req, riding, found, FluidBatch, lambda: Threshold(deep, shallow, memoryless), 2, "round_robin")


class Plain(Selector):
    strategies = (NO_SPECULATION,)
    memoryless = True

    def choose(self, state: StepState) -> Strategy:
        return NO_SPECULATION


@given(requests(), costs(), st.floats(0, 1), st.integers(0, 6), st.integers(0, 12), st.booleans(), st.integers(1, 3))
def test_fluid_speculation_takes_the_time_of_its_iterations(req, cost, alpha, deep, shallow, memoryless, workers):
    found = Regimes((NO_SPECULATION, *CHAINS), cost, GeometricAcceptance(alpha=alpha))
    assert_agree(req, cost, found, FluidBatch, lambda: Threshold(deep, shallow, memoryless), workers, "round_robin")


@given(requests(), costs(), st.floats(0, 1), st.integers(0, 6), st.integers(0, 12), st.booleans(), st.integers(0, 9))
def test_sampled_speculation_takes_the_time_of_its_iterations(req, cost, alpha, deep, shallow, memoryless, seed):
    found = Regimes((NO_SPECULATION, *CHAINS), cost, GeometricAcceptance(alpha=alpha))
    seeds = request_seeds(seed, req.keys)

    def luck(request: int, generated: float, num_speculative: int, regime: Regime) -> float:
        u = uniforms(seeds[[request]], np.array([num_speculative]), 1)[0, 0]
        return 1.0 if regime.cdf is None else 1.0 + float((regime.cdf <= u).sum())

    assert_agree(
        req,
        cost,
        found,
        lambda r: SampledBatch(r, seed),
        lambda: Threshold(deep, shallow, memoryless),
        2,
        "contiguous",
        luck,
    )


@given(requests(), costs(), st.integers(0, 6), st.integers(0, 12), st.booleans(), st.integers(1, 4))
def test_acceptance_that_differs_by_batch_takes_the_time_of_its_iterations(
    req: Requests, cost: LinearCosts, deep: int, shallow: int, memoryless: bool, border: int
) -> None:
    deepest = max(chain.draft_depth for chain in CHAINS)

    def band(end: int | None, kept: float) -> Band:
        accepted = (1 - kept, *[0.0] * (deepest - 1), kept)
        return Band(
            max_batch=end, drafters_by_depth={"ngram": {deepest: FittedDepth(accepted=accepted, drafted=deepest)}}
        )

    acceptance = BatchAcceptance(bands=(band(border, 0.8), band(None, 0.2)))
    found = Regimes((NO_SPECULATION, *CHAINS), cost, acceptance)
    assert_agree(req, cost, found, FluidBatch, lambda: Threshold(deep, shallow, memoryless), 2, "contiguous")


@given(requests(), costs(), st.floats(0, 1), st.integers(0, 6), st.integers(0, 12), st.booleans(), st.integers(0, 9))
def test_requests_with_an_acceptance_of_their_own_take_the_time_of_their_iterations(
    req: Requests, cost: LinearCosts, alpha: float, deep: int, shallow: int, memoryless: bool, seed: int
) -> None:
    model = SpreadAcceptance(base=GeometricAcceptance(alpha=alpha), spread=1.0)
    found, levels = Regimes((NO_SPECULATION, *CHAINS), cost, model), model.levels("ngram", req.keys, seed)

    def own(request: int, generated: float, num_speculative: int, regime: Regime) -> float:
        if not regime.strategy.speculates:
            return 1.0
        level = levels[[request]]
        return 1.0 + float(model.survival(regime.strategy, level, level, level).sum())

    batches = Rates(model=model, costs=cost, seed=seed)
    assert_agree(req, cost, found, batches, lambda: Threshold(deep, shallow, memoryless), 2, "contiguous", own)


@given(requests(), costs(), st.integers(0, 6), st.integers(0, 12), st.integers(1, 4))
def test_the_end_of_a_rollout_in_closed_form_is_that_of_its_iterations_also_where_acceptance_differs_by_batch(
    req: Requests, cost: LinearCosts, deep: int, shallow: int, border: int
) -> None:
    bands = tuple(
        Band(max_batch=end, drafters_by_depth={"ngram": {5: FittedDepth(accepted=(1 - p, 0, 0, 0, 0, p), drafted=5)}})
        for end, p in ((border, 0.8), (None, 0.2))
    )
    model = SpreadAcceptance(base=BatchAcceptance(bands=bands), spread=0.7)
    found = Regimes((NO_SPECULATION, *CHAINS), cost, model)
    made = []
    for memoryless in (True, False):
        selectors: list[Selector] = [Threshold(deep, shallow, memoryless)]
        engine = RolloutSimulator(costs=cost, selectors=selectors).prepare(found, Rates(model=model, costs=cost))
        made.append(engine.rollout(req, [list(range(len(req)))]))
    assert made[0].finish_s == pytest.approx(made[1].finish_s, rel=1e-9, abs=1e-12)
    assert made[0].first_token_s == pytest.approx(made[1].first_token_s, rel=1e-9, abs=1e-12)


@given(requests(), costs(), st.integers(0, 6), st.integers(0, 12), st.booleans(), st.integers(0, 9))
def test_replayed_acceptance_takes_the_time_of_its_iterations(req, cost, deep, shallow, memoryless, seed):
    table = counterfactuals(req, seed)
    acceptance = TraceAcceptance(table)
    found = Regimes((NO_SPECULATION, *CHAINS), cost, acceptance)

    def recorded(request: int, generated: float, num_speculative: int, regime: Regime) -> float:
        positions = table["accept_if_drafted"][request]
        return 1.0 + min(regime.most, int(positions[int(generated)]))

    assert_agree(
        req,
        cost,
        found,
        lambda r: ReplayBatch(r, acceptance),
        lambda: Threshold(deep, shallow, memoryless),
        2,
        "contiguous",
        recorded,
    )


def counterfactuals(req: Requests, seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    table = pd.DataFrame(req.keys, columns=["rl_step", "prompt_id", "sample", "turn"])
    positions = [rng.integers(0, 6, n).astype(np.uint8) for n in req.response_tokens]
    return table.assign(drafter="ngram", drafter_age=0, max_depth=5, accept_if_drafted=positions)


def test_a_long_rollout_agrees_too() -> None:
    trace = log_normal(prompts=4, group_size=4, rl_steps=1, median=900, cap=4000, workers=2)
    req = requests_of(trace.outcomes["response_tokens"].tolist(), 128, cap=4000, group=4)
    found = Regimes((NO_SPECULATION, *CHAINS), COSTS, GeometricAcceptance(alpha=0.7))
    assert_agree(req, COSTS, found, FluidBatch, lambda: Threshold(2, 5, True), 2, "longest_first")
