"""The 90 % range of a verdict: which inputs make it wide, and that it is never narrower for knowing less."""

import numpy as np
import pandas as pd
import pytest

import tltlab
from tests.core.conftest import shared_data  # noqa: F401
from tltlab.acceptance.base import GeometricAcceptance, Scaled
from tltlab.acceptance.load import DEFAULTS, load_acceptance
from tltlab.costs.evidence import Evidence
from tltlab.costs.profiles import profiles
from tltlab.policies.policy import load_policy
from tltlab.sim.scenario import Scenario
from tltlab.sim.study.band import (
    LEARNED,
    UNMEASURED,
    InputErrors,
    Times,
    bands,
    chance_ratio,
    recorded_tokens,
    resampled,
    with_overhead,
)
from tltlab.sim.study.what_if import what_if
from tltlab.strategy import NO_SPECULATION, Strategy

from ..workloads import FREE, grouped, with_terms

RNG = np.random.default_rng(0)
LENGTHS = np.minimum(RNG.lognormal(5.5, 1, (12, 32)).astype(int) + 1, 2000)
LINEAR = with_terms(
    FREE, base_s=8e-3, per_request_s=1e-5, per_token_s=1e-5, per_context_s=1e-9, sd_base_s=1e-3, draft_level_s=5e-4
)
ERRORS = {"RL steps": (0.005, 0.01), "RL steps, speculating": (0.01, 0.02)}
MEASURED = with_terms(LINEAR, evidence=Evidence(engine="mine", left_out=ERRORS))
FAST = {"systems": "verl", "workers": 2}


def width(band):
    return float(np.log(band.high / band.low))


def test_never_measured_is_wider_than_measured():
    known, unknown = (what_if(LENGTHS, costs=costs, **FAST).best.band for costs in (MEASURED, LINEAR))
    assert known.estimate == unknown.estimate
    assert unknown.low < known.low < known.high < unknown.high
    assert unknown.shares["costs"] > known.shares["costs"]


def test_unmeasured_profiles_are_less_sure():
    """Whatever the engine, GPU and model: the worst that was measured bounds those below that were not."""
    trace, strategies = tltlab.read(LENGTHS[:1]), [Strategy.chain("learned", 3)]
    found = {True: [], False: []}
    for engine in profiles().engines:
        for gpu in ("A100", "H100", "H200", "B200"):
            for model in ("Qwen2.5-7B", "Llama-3.1-8B", "Qwen3-30B-A3B"):
                scenario = Scenario.of(trace, costs=f"{engine}:{gpu}:{model}", workers=1, acceptance="default")
                error = InputErrors.of(scenario, strategies, trace, recorded=False).speed_up
                found[scenario.evidence(strategies)["distance"] == "measured together"].append(error)
    bare = Scenario.of(trace, costs=LINEAR, workers=1, acceptance="default")
    unmeasured = InputErrors.of(bare, strategies, trace, recorded=False).speed_up
    assert max(found[True]) < min(found[False])
    assert max(found[False]) < unmeasured == UNMEASURED


def test_everything_measured_leaves_a_narrow_range():
    """Recorded acceptance, measured costs, twelve RL steps: a few per cent each way."""
    trace = tltlab.simulate(LENGTHS, "ngram:4", costs=LINEAR, workers=2, acceptance="ngram=geometric:0.6",
                            record_iterations=True, mode="sampled").trace  # fmt: skip
    recorded = what_if(trace, costs=MEASURED, systems="verl", workers=2)
    assert recorded.recorded
    band = recorded.best.band
    assert 0.95 < band.low / band.estimate < band.high / band.estimate < 1.05
    assert 0 < band.shares["acceptance"] < 1
    assumed = what_if(LENGTHS, costs=MEASURED, drafter="ngram", **FAST)
    assert width(assumed.best.band) > 3 * width(band)
    assert max(assumed.best.band.shares.items(), key=lambda pair: pair[1])[0] == "acceptance"


def test_what_a_user_gives_is_taken_as_given():
    given = what_if(LENGTHS, costs=MEASURED, accept=0.7, **FAST).best.band
    assert given.effects["acceptance"] == (0.0, 0.0)
    assert width(given) < width(what_if(LENGTHS, costs=MEASURED, drafter="learned", **FAST).best.band)


def test_costs_at_range_ends_are_scenarios():
    scenario = Scenario.of(LENGTHS, costs=LINEAR, workers=2, acceptance="learned=0.7")
    policy = load_policy("learned:4")
    plain, drafting = (
        Times(rollout_s=np.array([r.makespan_s for r in scenario.rollouts(load_policy(name))]))
        for name in ("none", "learned:4")
    )
    errors = InputErrors(speed_up=0.25, seconds=0.1, tokens={})
    band, whole = bands(scenario, lambda end: policy, plain, drafting, errors)
    assert whole is None
    costs = band.json()["parts"]["costs"]
    # All iterations but a first one draft, and prompts take no time here: the speed-up is off as its iterations are.
    assert costs["low"] == pytest.approx(band.estimate / 1.25, rel=1e-3)
    assert costs["high"] == pytest.approx(band.estimate * 1.25, rel=1e-3)
    assert band.effects["lengths"][1] > 0


def test_overhead_errors_move_deep_drafts_most():
    scenario = Scenario.of(LENGTHS, costs=LINEAR, workers=2, acceptance="learned=0.7")
    strategies = [Strategy.chain("learned", depth) for depth in (2, 8)]
    cheap, dear = with_overhead(scenario, strategies, 0.25)

    def seconds(costs, strategy):
        return costs.iteration(strategy).seconds(4, 0.0)

    for strategy in (NO_SPECULATION, *strategies):
        times = [seconds(each.costs, strategy) for each in (cheap, scenario, dear)]
        assert times == sorted(times)
        assert strategy.speculates == (times[0] < times[2])
    ratios = [seconds(dear.costs, s) / seconds(scenario.costs, s) for s in strategies]
    assert ratios[0] < 1.25 < ratios[1]
    assert with_overhead(scenario, [NO_SPECULATION], 0.25) == []


def test_a_table_without_drafts_has_a_range():
    dear = with_terms(LINEAR, sd_base_s=1.8e-2)
    found = what_if(LENGTHS, costs=dear, **FAST)
    assert not any(answer.drafts for answer in found.answers)
    for answer, gains in zip(found.answers, (False, True), strict=True):
        assert answer.band.estimate == 1.0
        assert (answer.band.high > 1.0) == gains, "only more tokens of a learned drafter would pay here"
        assert answer.band.low == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("drafter", ["learned", "ngram"])
def test_a_ratio_of_chances_brings_the_tokens(drafter):
    model = load_acceptance("default")
    for factor in (0.64, 0.9, 1.0, 1.2):
        ratio = chance_ratio(model, drafter, factor)
        before, after = (
            m.tokens_per_iteration(Strategy.chain(drafter, 5)) for m in (model, Scaled(model, (drafter,), ratio))
        )
        assert after == pytest.approx(factor * before, rel=1e-6)


def test_draws_of_groups_keep_groups_whole():
    scenario = Scenario.of(grouped(LENGTHS[:1], 10), costs=LINEAR, workers=2, acceptance="default")
    drawn = resampled(scenario, np.random.default_rng(1))
    (step,) = drawn.steps
    names, counts = np.unique([key[1] for key in step.keys], return_counts=True)
    assert len(step) == 32
    assert len(names) < 8
    assert set(counts % 4) == {0}
    assert sorted(request for queue in drawn.queues[0] for request in queue) == list(range(32))
    pairs = set(zip(scenario.steps[0].prompt_tokens, scenario.steps[0].response_tokens, strict=True))
    assert set(zip(step.prompt_tokens, step.response_tokens, strict=True)) <= pairs


def test_draws_keep_the_turns_of_a_response():
    rows = [(0, f"p{i}", 0, turn, 20 + 30 * turn, 5 + i) for i in range(6) for turn in range(3)]
    columns = ["rl_step", "prompt_id", "sample", "turn", "prompt_tokens", "response_tokens"]
    frame = pd.DataFrame(rows, columns=columns)
    trace = tltlab.read(LENGTHS[:1, :6])
    made = trace.replace(
        workload=frame.drop(columns="response_tokens").assign(epoch=0, max_response_tokens=100, policy_version=0),
        outcomes=frame.drop(columns="prompt_tokens").assign(finish_reason="stop", tool_s=1.0),
    )
    scenario = Scenario.of(made, costs=LINEAR, workers=1, acceptance="default", tool_s=1.0)
    (step,) = resampled(scenario, np.random.default_rng(3)).steps
    assert step.turns is not None
    assert [len(chain) for chain in step.chains] == [3] * 6
    for chain in step.chains:
        assert len({step.keys[i][1] for i in chain}) == 1
        assert [step.keys[i][3] for i in chain] == [0, 1, 2]


def test_recorded_tokens_are_surer_the_more_there_are():
    trace = tltlab.read("traces/tiny")
    all_of, some = recorded_tokens(trace, "ngram"), recorded_tokens(trace.select(trace.rl_steps[:1]), "ngram")
    assert all_of is not None
    assert some is not None
    assert some[0] < all_of[0] < 1 < all_of[1] < some[1]
    assert recorded_tokens(trace, "learned") is None
    lengths = [2.0, 2.2, 2.4, 2.2]
    steps = pd.DataFrame({"rl_step": range(4), "t_start": 0.0, "policy_version": 0, "accept_length": lengths})
    steps["draft_rate"] = 0.4
    log = tltlab.read(LENGTHS[:4]).replace(steps=steps)
    of_steps = recorded_tokens(log, "learned")
    assert of_steps is not None
    margin = 2.353 * np.std(lengths, ddof=1) / 2 / 2.2
    assert of_steps == pytest.approx((1 - margin, 1 + margin), rel=1e-3)


def test_measured_heads_are_within_range_of_assumption(shared_data):  # noqa: F811
    """Nine in ten pairs of a head and a workload, against the default at the same depth."""
    table = pd.read_csv(shared_data / "eagle3_sglang_h200.csv").query("topk == 1")
    usual = GeometricAcceptance(alpha=float(DEFAULTS["learned"].partition(":")[2]))
    expected = [usual.tokens_per_iteration(Strategy.chain("learned", int(depth))) for depth in table["steps"]]
    ratio = (table["accept"] / expected).groupby([table["drafter"], table["bench"]]).mean()
    inside = ratio.between(*LEARNED).mean()
    assert 0.85 <= inside <= 0.97
