"""`simulate`: worked examples, its inputs and their defaults, and what it writes."""

import json
import re
import time

import pytest

from tests.refused import refused
from tltlab.acceptance.load import load_acceptance
from tltlab.acceptance.measured import FittedDepth, MeasuredAcceptance
from tltlab.costs.evidence import CalibratedRange
from tltlab.costs.load import load_costs
from tltlab.drafters.specs import Drafters, LearnedSpec, SuffixSpec
from tltlab.errors import ConfigError
from tltlab.lengths.generate import log_normal
from tltlab.planning.composition import Admission, EarlierEpoch
from tltlab.policies.policy import Activation, Policy
from tltlab.policies.selector import Selector
from tltlab.policies.specs import FixedSpec
from tltlab.sim import simulate
from tltlab.sim.cli.simulate import simulate as command
from tltlab.sim.engine import record
from tltlab.sim.engine.requests import Requests
from tltlab.sim.study.compare import compare
from tltlab.sim.tuning.tune import TuneConfig, tune
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.traces import metrics
from tltlab.traces.trace import read

from ..traces_of_lengths import of_lengths
from .workloads import COSTS, FREE, ONE_SECOND, TINY, Handing, with_terms

TIGHT = with_terms(ONE_SECOND, kv_capacity_tokens=30)
CHAIN = Strategy.chain("ngram", 4)
PLAIN_COSTS = dict.fromkeys(("base_s", "per_request_s", "per_context_s", "prefill_per_token_s"), 1e-3)
WAYS_ON = ("TLTLAB_POLICY=explore", "tltlab trace annotate")
"""What somebody can do whose recording shows no speculation."""
PREFILLING = with_terms(COSTS, prefill_per_token_s=1e-3)
TRACE = log_normal(prompts=6, group_size=4, rl_steps=2, median=100, sigma=1.0, cap=800, workers=2)


def lengths(*response_tokens, workers=1, prompt_tokens=10, cap=1000):
    return of_lengths(response_tokens, workers=workers, prompt_tokens=prompt_tokens, max_response_tokens=cap)


def fixed(strategy=CHAIN, threshold=None):
    active = None if threshold is None else Activation(max_requests=threshold, hold_iterations=0)
    return Policy(selector=FixedSpec(strategy=strategy), activation=active)


@pytest.mark.parametrize(
    ("response_tokens", "terms", "options", "first_s", "finish_s"),
    [
        pytest.param((3, 7), {}, {}, [1, 1], [3, 7], id="an iteration per token"),
        # Contexts: 20, 22 with both; then 12 + 13 for the longer one alone.
        pytest.param((2, 4), {"base_s": 0.0, "per_context_s": 1.0}, {}, [20, 20], [42, 67], id="contexts grow"),
        pytest.param((1, 2), {"prefill_per_token_s": 0.1}, {}, [3, 3], [3, 4], id="prompts are prefilled first"),
        pytest.param((2, 5, 1, 1), {"max_num_seqs": 2}, {}, [1, 1, 3, 4], [2, 5, 3, 4], id="wait for a seat"),
        # Capacity 30: 10 + 10 prompt tokens and 5 generated each fit, the sixth does not. The second request goes back
        # with 5 tokens, waits for the first to finish at 8, is prefilled (15 tokens) and generates 3 more.
        pytest.param(
            (8, 8),
            {"kv_capacity_tokens": 30, "prefill_per_token_s": 0.01},
            {},
            [1.2, 1.2],
            [0.2 + 8, 0.2 + 8 + 0.15 + 3],
            id="an overflowing cache puts the newest back",
        ),
        # The same, but its 14 computed tokens stay where the first's growth to 18 leaves room for 11: 4 are left to do.
        pytest.param(
            (8, 8),
            {"kv_capacity_tokens": 30, "prefill_per_token_s": 0.01},
            {"prefix_caching": True},
            [1.2, 1.2],
            [0.2 + 8, 0.2 + 8 + 0.04 + 3],
            id="what others did not need of it is not prefilled again",
        ),
        # The first iteration has no draft to verify: 1, 3.5, 6, 8.5.
        pytest.param((7,), {}, {"policy": fixed(), "acceptance": "constant:2.5"}, [1], [4], id="surplus is dropped"),
        # 3 + 1 plain iterations, then 2 tokens at a time: the third request needs 6 more.
        pytest.param(
            (3, 4, 10),
            {},
            {"policy": fixed(threshold=1), "acceptance": "constant:2"},
            [1, 1, 1],
            [3, 4, 7],
            id="speculates below a threshold",
        ),
    ],
)
def test_worked_examples_take_the_time_of_their_iterations(response_tokens, terms, options, first_s, finish_s):
    result = simulate(lengths(*response_tokens), costs=with_terms(ONE_SECOND, **terms), **options)
    assert result.trace.outcomes["t_first_token"].tolist() == pytest.approx(first_s)
    assert result.trace.outcomes["t_finish"].tolist() == pytest.approx(finish_s)
    assert result.makespan_s == pytest.approx(max(finish_s))
    assert ("speculative_decode" in set(result.trace.spans["kind"])) == ("policy" in options)


def test_samples_share_their_prompt_where_prefixes_are_cached():
    costs = with_terms(FREE, prefill_per_token_s=1e-3)
    apart, shared = (simulate(TRACE, costs=costs, prefix_caching=on).summary for on in (False, True))
    prompt = int(TRACE.workload["prompt_tokens"].iloc[0])
    assert (apart["prefix_caching"], shared["prefix_caching"]) == (False, True)
    assert apart["prefilled_tokens"] == 2 * 6 * 4 * prompt
    # Three groups of four to each worker, 112 of the 128 tokens of a prompt in whole blocks before its last token.
    assert shared["prefilled_tokens"] == 2 * 6 * (prompt + 3 * (prompt - 112))
    assert shared["makespan_s"] == pytest.approx(3e-3 * (prompt + 3 * (prompt - 112)))
    assert shared["lower_bound_s"] <= shared["fixed_bound_s"] <= shared["makespan_s"]


def test_a_response_aborted_at_once_takes_no_time():
    trace = lengths(1, 2)
    outcomes = trace.outcomes.assign(response_tokens=[0, 2], finish_reason=["abort", "stop"])
    result = simulate(trace.replace(outcomes=outcomes), costs=ONE_SECOND)
    assert result.trace.outcomes["t_finish"].tolist() == [0.0, 2.0]
    assert result.trace.outcomes["t_first_token"].isna().tolist() == [True, False]


@pytest.mark.parametrize(
    ("response_tokens", "workers", "idle"),
    [((4, 2), 2, [["worker 1", 2.0, 2.0]]), ((50,), 3, [["worker 1", 0.0, 50.0], ["worker 2", 0.0, 50.0]])],
)
def test_idle_workers_are_bubbles(response_tokens, workers, idle):
    result = simulate(lengths(*response_tokens, workers=workers), costs=ONE_SECOND)
    spans = result.trace.spans.query("kind == 'idle'")
    assert spans[["lane", "t_start", "duration"]].values.tolist() == idle
    share = sum(seconds for *_, seconds in idle) / (workers * result.makespan_s)
    assert result.summary["bubble_fraction"] == pytest.approx(share)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"policy": "none"}, id="closed form"),
        pytest.param({"policy": fixed(threshold=3), "mode": "sampled"}, id="sampled"),
        pytest.param({"policy": "none", "admission": Admission(max_age=2)}, id="steps not apart"),
        pytest.param({"policy": "none", "workload": EarlierEpoch(keep=0.9)}, id="part of an earlier epoch"),
        pytest.param({"policy": fixed(), "spot": "tlt"}, id="idle workers train"),
    ],
)
def test_the_summary_equals_the_traces_metrics(settings, monkeypatch):
    result = simulate(TRACE, acceptance="geometric:0.7", **{"costs": PREFILLING, **settings})
    with monkeypatch.context() as without_tables:
        without_tables.setattr(record, "tables", None)
        if "admission" not in settings:
            without_tables.setattr(Requests, "rows", None)
        summary = result.summary
    expected = metrics.summary(result.trace)
    for name, value in expected.items():
        assert summary[name] == pytest.approx(value, rel=1e-12), name


@pytest.mark.parametrize("rl_steps", [None, [1]])
def test_tables_may_be_in_any_order(rl_steps):
    outcomes = TRACE.outcomes.sample(frac=1.0, random_state=0)
    mixed = simulate(TRACE.replace(outcomes=outcomes), "none", costs=COSTS, rl_steps=rl_steps)
    in_order = simulate(TRACE, "none", costs=COSTS, rl_steps=rl_steps)
    assert mixed.summary["makespan_s_per_step"] == in_order.summary["makespan_s_per_step"]
    assert mixed.trace.outcomes.equals(in_order.trace.outcomes)


def test_rewards_are_those_of_the_recorded_run():
    recorded, unknown = read(TINY), lengths(3)
    assert simulate(recorded).trace.steps["reward_mean"].tolist() == recorded.steps["reward_mean"].tolist()
    assert simulate(unknown, costs=COSTS).trace.steps["reward_mean"].isna().all()


def test_a_policy_is_asked_one_iteration_ahead():
    running = []

    def look(state):
        running.append([(request.prompt_id, request.generated_tokens) for request in state.requests])
        return CHAIN

    policy = Handing(NO_SPECULATION, CHAIN, rule=look)
    costs = with_terms(ONE_SECOND, prefill_per_token_s=0.1)
    simulate(lengths(4, 6), policy, costs=costs, acceptance="constant:2")
    (selector,) = policy.built
    assert [s.batch for s in selector.states] == [2, 2, 2, 1]
    assert [s.context_tokens for s in selector.states] == [20, 22, 26, 15]
    assert [s.strategy for s in selector.states] == [NO_SPECULATION, CHAIN, CHAIN, CHAIN]
    assert running == [[("p0", n), ("p1", n)] for n in (0, 1, 3)] + [[("p1", 5)]]
    # The first iteration, which prefills, verifies no choice.
    assert [o.elapsed_s for o in selector.outcomes] == [1.0, 1.0, 1.0]
    assert not any(o.had_prefill for o in selector.outcomes)
    assert selector.outcomes[0].drafted == (4.0, 4.0)
    assert selector.outcomes[0].accepted == (1.0, 1.0)
    simulate(lengths(4, 6), policy, costs=costs, acceptance="constant:2", decision_block=2)
    # Tokens of the first request: 1, 3, 5.
    assert [(o.elapsed_s, o.batch) for o in policy.built[1].outcomes] == [(1.0, 2), (1.0, 1)]


def test_selectors_live_through_all_rl_steps():
    policy = Handing(NO_SPECULATION, CHAIN)
    simulate(TRACE, policy, costs=COSTS, acceptance="constant:2")
    assert len(policy.built) == 2
    assert {s.rl_step for s in policy.built[0].states} == {0, 1}


def test_decisions_are_recorded_with_their_rewards():
    result = simulate(TRACE, "beg-mab", costs=COSTS, acceptance="geometric:0.7", record_iterations=True)
    decisions = result.trace.decisions
    assert decisions["propensity"].between(0, 1, inclusive="right").all()
    assert decisions["reward"].notna().any()
    # No policy chose the first iteration of a rollout.
    assert set(decisions["iteration"]) == set(result.trace.iterations["iteration"]) - {0}


@pytest.mark.parametrize("trace", ["", "trace"])
def test_a_trace_brings_its_costs_and_acceptance(tmp_path, trace):
    lengths(8).write(tmp_path / "it" / trace)
    ONE_SECOND.write(tmp_path / "it" / "costs.json")
    (tmp_path / "it" / "acceptance.json").write_text('{"kind": "constant", "tokens": 4.0}')
    assert simulate(read(tmp_path / "it")).makespan_s == 8.0
    drafted = simulate(read(tmp_path / "it"), fixed())
    assert (drafted.makespan_s, drafted.summary["mean_accept_length"]) == (3.0, 4.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, ("workers",)),
        ({"mode": "exact"}, ("mode",)),
        ({"placement": "nearest"}, ("nearest",)),
        ({"rl_steps": [7]}, ("rl_step",)),
        ({"acceptance": "trace"}, ("acceptance.parquet",)),
        ({"decision_block": 0}, ("decision_block",)),
        ({"costs": {"kind": "linear", "base_s": 1e-3}}, ("per_request_s",)),
        (
            {"costs": {"kind": "linear", **PLAIN_COSTS}, "policy": "beg-mab", "acceptance": "default"},
            ("sd_idle_s", *WAYS_ON),
        ),
        ({"trace": lengths(21), "costs": TIGHT}, ("kv_capacity_tokens", 30, 31)),
        ({"max_response_tokens": 0}, ("max_response_tokens",)),
        # It chooses what it does not list.
        ({"policy": Handing(NO_SPECULATION, rule=lambda state: CHAIN)}, (CHAIN, NO_SPECULATION)),
        ({"trace": log_normal(prompts=1, rl_steps=1)}, ("num_workers",)),
        ({"trace": TRACE.replace(outcomes=TRACE.outcomes.query("rl_step == 0"))}, ("rl_step", 1)),
    ],
)
def test_impossible_simulations_are_refused(options, message):
    with refused(ConfigError, naming=message):
        simulate(**{"trace": TRACE} | options)


def test_the_command_prints_the_summary(tmp_path, capsys, as_json):
    folder, out = TRACE.write(tmp_path / "trace"), tmp_path / "out"
    options = {"strategy": "4,1,5", "sd_threshold": 4, "acceptance": "geometric:0.7", "rl_steps": "1:2"}
    command(folder, out=out, **options)
    printed = capsys.readouterr()
    shown = json.loads(printed.out)
    expected = simulate(TRACE, fixed(threshold=4), acceptance="geometric:0.7", rl_steps=[1])
    assert printed.err == ""
    assert shown["makespan_s"] == expected.summary["makespan_s"]
    assert set(shown) == {*expected.summary, "speedup"}
    written = read(out)
    assert (written.manifest.kind, written.rl_steps) == ("simulated", [1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "4,1"}, ()),
        ({"strategy": "4,1,9", "acceptance": "constant:2"}, ("5",)),
        ({"strategy": "4,1,5", "policy": "fixed"}, ()),
        ({"sd_threshold": 4, "policy": "beg-mab"}, ()),
        ({"sd_threshold": -1}, ("requests",)),
        ({"policy": "no-such-policy"}, ("no-such-policy",)),
        ({"policy": "beg-mab-suffix"}, ("--acceptance", "default", "suffix=geometric:ALPHA", *WAYS_ON)),
        ({"model": "Qwen2.5-7B", "workers": 2}, ("--model Qwen2.5-7B", "--workers")),
        ({"rl_steps": "5:9"}, ()),
        ({"topology": "separate"}, ("--stages",)),
        ({"stages": "cpu-small", "max_staleness": 1}, ("--max-staleness", "separate")),
        ({"stages": "cpu-small", "topology": "hybrid"}, ("hybrid",)),
        ({"gpus_per_worker": 4}, ("--stages",)),
        ({"max_staleness": 1}, ("--stages",)),
    ],
)
def test_the_command_refuses_bad_input(tmp_path, options, message):
    folder = TRACE.write(tmp_path / "trace")
    with refused(ConfigError, naming=message):
        command(trace=folder, **options)


def test_the_command_simulates_whole_rl_steps(tmp_path, capsys, as_json):
    TRACE.write(tmp_path / "t")
    command(tmp_path / "t", costs="cpu-small", stages="cpu-small", out=tmp_path / "out")
    whole = json.loads(capsys.readouterr().out)
    assert whole["step_s"] == pytest.approx(sum(whole["stages"].values()))
    assert whole["stages"]["rollout_s"] == pytest.approx(whole["makespan_s"])
    assert 0 < whole["rollout_share"] < 1
    steps = read(tmp_path / "out").steps
    assert (steps["train_s"] > 0).all()
    command(tmp_path / "t", costs="cpu-small", stages="cpu-small", topology="separate", max_staleness=1)
    assert json.loads(capsys.readouterr().out)["step_s"] < whole["step_s"]


def test_a_lower_cap_cuts_and_is_in_the_trace():
    trace = simulate(lengths(20, 200), "none", costs=ONE_SECOND, max_response_tokens=50).trace
    assert trace.outcomes["response_tokens"].tolist() == [20, 50]
    assert trace.outcomes["finish_reason"].tolist() == ["stop", "length"]
    assert trace.workload["max_response_tokens"].max() == trace.outcomes["t_finish"].max() == 50


def test_a_simulation_never_replaces_a_recording(tmp_path):
    folder = TRACE.write(tmp_path / "trace")
    with refused(ConfigError):
        command(folder, costs="cpu-small", out=folder)
    assert read(folder).manifest.kind == TRACE.manifest.kind
    command(folder, costs="cpu-small", out=tmp_path / "out")
    command(folder, costs="cpu-small", out=tmp_path / "out", placement="round_robin")
    assert "round_robin" in str(read(tmp_path / "out").manifest.notes)


def test_makespans_have_the_error_of_their_costs():
    assert "cpu-small" in simulate(TRACE, "none").summary["costs"]
    plain, drafted = (
        simulate(TRACE, policy, costs="sglang:H200:Qwen3-32B", acceptance="geometric:0.6").summary
        for policy in ("none", fixed())
    )
    evidence = load_costs("sglang:H200:Qwen3-32B").evidence
    error = evidence.error()
    assert (plain["evidence"]["distance"], plain["evidence"]["error"]) == ("interpolated", error)
    expected = plain["makespan_s"] / (1 + error), plain["makespan_s"] * (1 + error)
    assert plain["makespan_interval_s"] == pytest.approx(expected)
    assert drafted["evidence"]["error"] > error
    assert drafted["acceptance"] == "geometric:0.6"
    unknown = simulate(TRACE, "none", costs=COSTS).summary
    assert (unknown["evidence"]["distance"], unknown["makespan_interval_s"]) == ("unknown", None)
    assert (unknown["costs"], unknown["acceptance"]) == ("linear", None)


def test_a_simulation_takes_what_its_run_accepted(tmp_path):
    setting = {"costs": COSTS, "mode": "sampled"}
    run = simulate(TRACE, fixed(), **setting, acceptance="geometric:0.6", record_iterations=True).trace
    again = simulate(run, fixed(), **setting)
    assert again.summary["mean_accept_length"] == pytest.approx(metrics.mean_accept_length(run), rel=0.02)
    assert simulate(run, fixed(), **setting, acceptance="trace").summary["acceptance"] == again.summary["acceptance"]
    # The command takes the drafter of --strategy from there too.
    command(run.write(tmp_path / "run"), strategy="2,1,3", costs="cpu-small")
    tuned = tune(run, TuneConfig(costs=COSTS, trials=0, repeats=1))
    assert {s.drafter for s in tuned.policy.strategies if s.speculates} <= {"ngram"}
    with refused(ConfigError):
        simulate(TRACE, fixed(), costs=COSTS)


@pytest.mark.parametrize(
    ("response_tokens", "policy", "measured", "outside"),
    [
        ([*[10] * 9, 40], "none", {"batch": (1, 8), "context_tokens": (0, 10**6)}, {"batch": 10 / 40}),
        ([10], "none", {"batch": (1, 8), "context_tokens": (0, 10**6)}, {}),
        ([10], "none", None, None),
        ([4000], "none", {"context_tokens": (0, 1000)}, {"context_tokens": pytest.approx(3009 / 4000)}),
        ([4000], "none", {"context_tokens": (2000, 10**6)}, {"context_tokens": pytest.approx(1990 / 4000)}),
        ([10], fixed(Strategy("learned", 8, 8, 48)), None, None),
        ([10], fixed(Strategy.chain("learned", 8)), None, {"acceptance": 0.75}),
    ],
)
def test_iterations_outside_what_was_measured_are_counted(response_tokens, policy, measured, outside):
    costs = with_terms(COSTS, calibrated=measured and CalibratedRange(**measured))
    trace = lengths(*response_tokens, cap=4000)
    found = simulate(trace, policy, costs=costs, acceptance="tlt-qwen2.5-32b").summary["outside_calibration"]
    assert found == outside


def test_chunks_of_prompts_are_prefilled_beside_decoding():
    costs = with_terms(ONE_SECOND, max_num_batched_tokens=11, prefill_per_token_s=0.1)
    trace = lengths(30, 30, prompt_tokens=100, cap=100)
    result = simulate(trace, "none", costs=costs, record_iterations=True)
    rows = result.trace.iterations
    assert rows["prefill_tokens"].sum() == 200
    assert rows["prefill_tokens"].iloc[1:].max() <= 11
    ends = rows["t_start"] + rows["duration"]
    # The first prompt takes 10 its own budgets; its first token comes beside the second one's first chunk.
    assert result.rollouts[0].first_token_s[0] == pytest.approx(11.0 + 1.0 + 1.0)
    assert ends.iloc[-1] == pytest.approx(result.makespan_s)


def test_recorded_acceptance_adds_up():
    drafter = MeasuredAcceptance.at_any_batch(
        {"ngram": {4: FittedDepth(accepted=(0.7, 0.05, 0.05, 0.05, 0.15), drafted=1.2)}}
    )
    result = simulate(TRACE, fixed(), costs=COSTS, acceptance=drafter, mode="sampled", record_iterations=True)
    rows = result.trace.iterations.query("draft_depth > 0")
    assert (rows["num_accepted"] == rows["accepted_per_request"].map(sum)).all()
    assert (rows["num_drafted"] >= rows["num_accepted"]).all()
    assert metrics.mean_accept_length(result.trace) == pytest.approx(result.summary["mean_accept_length"])


def test_drafter_is_what_it_is_by_any_name(tmp_path):
    trace = read("traces/tiny")
    settings = {"costs": "h100-qwen2.5-7b", "acceptance": "geometric:0.7"}
    kinds = {"recent": {"kind": "suffix"}, "head": {"kind": "learned", "method": "mtp"}}
    seconds = {
        name: simulate(trace, {"selector": {"kind": "fixed", "strategy": f"{name}:8"}, "drafters": kinds}, **settings)
        for name in ("recent", "head", "suffix", "learned")
    }
    took = {name: result.makespan_s for name, result in seconds.items()}
    assert took["recent"] == took["suffix"] < took["learned"] == took["head"]
    # The simulation's trace says what they are, and is one to simulate again.
    seconds["recent"].trace.write(tmp_path / "simulated")
    again = simulate(tmp_path / "simulated", Strategy.chain("recent", 8), **settings)
    assert again.makespan_s == took["recent"]
    kind = {"kind": "goodput", "strategies": ["suffix:8", "suffix:2"], "costs": settings["costs"]}
    own = {"selector": kind | {"strategies": ["recent:8", "recent:2"]}, "drafters": kinds}
    assert len(set(compare(trace, {"own": own, "known": kind}, **settings)["makespan_s"])) == 1


def test_acceptance_states_what_drafters_of_other_names_are():
    depth = {"4": {"accepted": [0.4, 0.1, 0.1, 0.1, 0.3], "drafted": 4.0}}
    bands = [{"max_batch": None, "drafters": {"mine": depth}}]
    measured = {"kind": "by-batch", "bands": bands, "copies": {"mine": True}}
    found = tune("traces/tiny", costs="h100-qwen2.5-7b", acceptance=measured, depths=(4,), trials=0, repeats=1)
    assert {strategy.drafter for strategy in found.policy.strategies} <= {"none", "mine"}
    # A model of trees, or of siblings, that names no drafter serves every drafter of the kind.
    drafters = Drafters({"recent": SuffixSpec(), "mtp": LearnedSpec(method="mtp")})
    for model, kind in (
        ("tlt-qwen2.5-32b", ["mtp", "learned", "block"]),
        ("seer-siblings", ["recent", "ngram", "suffix"]),
    ):
        acceptance = load_acceptance(model)
        assert {name for name in drafters if acceptance.knows(name, drafters)} == set(kind)


class Ngarm(Selector):
    strategies = (Strategy.chain("ngarm", 4),)

    def choose(self, state):
        return self.strategies[0]


UNKNOWN = ("'ngarm'", "'ngram'")


@pytest.mark.parametrize(
    ("ask", "options", "naming"),
    [
        *((simulate, {"policy": unknown}, UNKNOWN) for unknown in ("ngarm:4", Ngarm.strategies[0], Ngarm)),
        (compare, {"policies": [Ngarm]}, UNKNOWN),
        (tune, {"drafters": ("ngarm",)}, UNKNOWN),
        (simulate, {"policy": "ngram:4x2/7"}, ("ngram:4x2/7", "top_k", 2)),
        (
            compare,
            {"policies": {"a": "ngram:4", "b": {
                "selector": {"kind": "fixed", "strategy": "ngram:2"},
                "drafters": {"ngram": {"kind": "learned", "method": "mtp"}},
            }}},
            ("policy b", "'ngram'"),
        ),
    ],
)  # fmt: skip
def test_what_no_drafter_of_run_drafts_is_refused(ask, options, naming):
    with refused(ConfigError, naming=naming):
        ask("traces/tiny", acceptance="geometric:0.7", **options)


def test_an_engine_that_waits_takes_its_waiting_longer():
    costs = "vllm:1xH200:Qwen2.5-7B"
    as_is, fast, slow = (
        simulate(lengths(100), "none", costs=costs, scheduling=scheduling).summary
        for scheduling in (None, "asynchronous", "synchronous")
    )
    assert as_is["makespan_s"] == fast["makespan_s"]
    longer_s = 100 * load_costs(costs).waiting.seconds(1)
    assert slow["makespan_s"] - fast["makespan_s"] == pytest.approx(longer_s, rel=0.02)
    assert slow["costs"] == f"{costs}, synchronous"
    with refused(ConfigError, naming=("waiting", "tltlab profile")):
        simulate(lengths(100), "none", costs="cpu-small", scheduling="synchronous")


def test_costs_of_nothing_have_no_regret():
    summary = simulate(lengths(10), "none", costs=FREE).summary
    assert (summary["makespan_s"], summary["lower_bound_s"], summary["regret"]) == (0.0, 0.0, None)


class Pondering(Selector):
    """Drafts four tokens, after a while."""

    strategies = (Strategy.chain("ngram", 4),)

    def choose(self, state):
        time.sleep(2e-4)
        return self.strategies[0]


def test_a_slow_policy_is_reported_with_the_block_that_helps(monkeypatch, capsys):
    monkeypatch.setattr("tltlab.sim.engine.policy_time.HINT_S", 0.05)
    simulate("traces/tiny", Pondering, acceptance="ngram=0.7")
    (hint,) = capsys.readouterr().err.splitlines()
    assert re.search(r"\d\d% of the .* --decision-block \d+", hint)
