"""Responses with tool calls: a turn leaves the engine, its tool runs, the next turn comes back behind what it said."""

import numpy as np
import pandas as pd
import pytest

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.lengths.generate import ToolUse, generate
from tltlab.lengths.model import REGIMES
from tltlab.planning.composition import Admission, EarlierEpoch, SharedBuffer, Truncated
from tltlab.planning.systems import SYSTEMS
from tltlab.policies.policy import load_policy
from tltlab.sim import simulate
from tltlab.sim.engine.admission import RoundFeed, Stream
from tltlab.sim.engine.batch import FluidBatch
from tltlab.sim.engine.regime import Regimes
from tltlab.sim.engine.worker import RolloutSimulator
from tltlab.sim.study.compare import compare
from tltlab.sim.workload import changed, requests_by_step
from tltlab.strategy import NO_SPECULATION
from tltlab.traces.schema import Manifest
from tltlab.traces.trace import Trace

from ..workloads import COSTS, assert_above_its_bounds, with_terms
from ..workloads import ONE_SECOND as SECOND

PREFILL = with_terms(SECOND, prefill_per_token_s=0.1)


def trace_of(*responses, **columns):
    """One RL step; a response is its turns, each of prompt tokens, tokens and seconds at the tool before it."""
    rows = [
        {"rl_step": 0, "prompt_id": f"p{n}", "sample": 0, "turn": turn, "prompt_tokens": prompt, "epoch": 0,
         "response_tokens": tokens, "tool_s": tool_s, "max_response_tokens": 99, "policy_version": 0, "worker": 0,
         "finish_reason": "stop"}
        for n, turns in enumerate(responses) for turn, (prompt, tokens, tool_s) in enumerate(turns)
    ]  # fmt: skip
    table = pd.DataFrame(rows).assign(**columns)
    key = ["rl_step", "prompt_id", "sample", "turn"]
    of_outcomes = ["response_tokens", "finish_reason", "tool_s", "worker", *columns]
    return Trace.from_tables(
        Manifest(kind="imported", num_workers=1),
        {
            "workload": table[[*key, "epoch", "prompt_tokens", "max_response_tokens", "policy_version"]],
            "outcomes": table[list(dict.fromkeys([*key, *of_outcomes]))],
        },
    )


CALL = [(20, 10, 0.0), (35, 5, 3.0)]


@pytest.mark.parametrize(
    ("prefix", "seconds"), [("kept", 2.0 + 10 + 3 + 0.5 + 5), ("recomputed", 2.0 + 10 + 3 + 3.5 + 5)]
)
def test_a_prefix_is_kept_or_computed_again(prefix, seconds):
    result = simulate(trace_of(CALL), costs=PREFILL, prefix=prefix)
    assert result.makespan_s == pytest.approx(seconds)
    assert result.summary["lower_bound_s"] == pytest.approx(seconds)
    outcomes = result.trace.outcomes
    assert outcomes["t_submit"].tolist() == pytest.approx([0.0, 15.0])
    assert outcomes["t_finish"].tolist() == pytest.approx([12.0, seconds])
    turns = result.summary["multi_turn"]
    assert (turns["num_responses"], turns["turns_per_response"], turns["tool_s"]) == (1, 2.0, 3.0)
    assert (turns["prompt_tokens"], turns["prefilled_tokens"]) == (55, 25.0 if prefix == "kept" else 55.0)


@pytest.mark.parametrize("mode", ["fluid", "sampled"])
@pytest.mark.parametrize("policy", ["none", "table"])
def test_it_joins_batch_at_iteration_after_its_tool(mode, policy):
    """One response leaves at 4 s, is back at 6.5 s, in the middle of the other's seventh iteration, and ends at 9 s."""
    trace = trace_of([(1, 4, 0.0), (6, 2, 2.5)], [(1, 20, 0.0)])
    settings = {"costs": SECOND, "mode": mode, "acceptance": "constant:1"}
    result = simulate(trace, policy, record_iterations=True, **settings)
    assert result.trace.outcomes["t_finish"].tolist() == pytest.approx([4.0, 9.0, 20.0])
    iterations = result.trace.iterations
    assert iterations["batch"].tolist() == [2] * 4 + [1] * 3 + [2] * 2 + [1] * 11
    assert iterations["t_start"].tolist() == pytest.approx(list(range(20)))


def test_worker_whose_requests_are_all_away_is_idle():
    result = simulate(trace_of([(1, 4, 0.0), (6, 2, 3.0)]), costs=SECOND, record_iterations=True)
    assert result.makespan_s == pytest.approx(9.0)
    assert result.summary["bubble_fraction"] == pytest.approx(3 / 9)
    spans = result.trace.table("spans").query("kind == 'idle'")
    assert spans[["t_start", "duration"]].values.tolist() == [[4.0, 3.0]]
    assert result.trace.table("iterations")["t_start"].tolist() == pytest.approx([0, 1, 2, 3, 7, 8])


def test_calls_wait_for_a_tool_that_is_free():
    call = [(1, 4, 0.0), (6, 2, 3.0)]
    alone, shared = (simulate(trace_of(call, call), costs=SECOND, max_tools=tools) for tools in (2, 1))
    assert alone.trace.outcomes["t_submit"].tolist() == pytest.approx([0.0, 7.0, 0.0, 7.0])
    assert shared.trace.outcomes["t_submit"].tolist() == pytest.approx([0.0, 7.0, 0.0, 10.0])
    assert shared.summary["multi_turn"]["tool_wait_s"] == pytest.approx(3.0)
    assert shared.summary["lower_bound_s"] >= 6.0


def test_cached_tokens_are_evicted_for_running_requests():
    """The other response grows to 100 tokens beside the 30 that the first turn left: of 120 it leaves them 19."""
    trace = trace_of([(20, 10, 0.0), (30, 2, 50.0)], [(40, 60, 0.0)])
    roomy, tight = (
        simulate(trace, costs=with_terms(SECOND, kv_capacity_tokens=room)).summary["multi_turn"] for room in (1000, 120)
    )
    assert (roomy["prefilled_tokens"], tight["prefilled_tokens"]) == (60.0, 71.0)


@pytest.mark.parametrize(
    "cut",
    [
        lambda trace: requests_by_step(trace, max_response_tokens=4)[0],
        lambda trace: changed(requests_by_step(trace)[0], Truncated(share=4 / 99), 0),
    ],
    ids=["a lower cap", "truncation"],
)
def test_a_turn_that_is_cut_is_the_last(cut):
    step = cut(trace_of(CALL, [(20, 3, 0.0), (25, 5, 1.0)]))
    assert step.response_tokens == [4, 3, 4]
    assert (step.turns.after, step.turns.first) == ([-1, 2, -1], [0, 1])


def test_all_turns_run_on_one_worker():
    trace = trace_of([(5, 10, 0.0), (15, 30, 1.0)], [(5, 30, 0.0)], [(5, 5, 0.0), (10, 5, 1.0)])
    result = simulate(trace, costs=SECOND, workers=2, placement="longest_first")
    assert result.trace.outcomes["worker"].tolist() == [0, 0, 1, 1, 1]


UNTIMED = trace_of([(20, 10, 0.0), (35, 5, None)])


@pytest.mark.parametrize(
    ("trace", "options", "naming"),
    [
        (trace_of(CALL, turn=[0, 2]), {}, ("p0", 2, 0, 1)),
        (UNTIMED, {}, ("tool_s", "--tool")),
        (trace_of([(20, 10, None), (35, 5, None)], t_submit=[0.0, 3.0], t_finish=[5.0, 9.0]), {}, (3, 5)),
        (trace_of(CALL), {"tool_s": -1.0}, (-1.0,)),
        (trace_of(CALL), {"max_tools": 0}, ("max_tools",)),
        (trace_of(CALL), {"prefix": "lost"}, ("lost",)),
    ],
)
def test_turns_that_cannot_follow_each_other_are_refused(trace, options, naming):
    with refused(ConfigError, naming=naming):
        simulate(trace, costs=SECOND, **options)


def test_times_of_tools_are_read_or_assumed():
    timed = trace_of([(20, 10, None), (35, 5, None)], t_submit=[0.0, 14.0], t_finish=[12.0, 20.0])
    assert simulate(timed, costs=SECOND).makespan_s == pytest.approx(17.0)
    assert simulate(UNTIMED, costs=SECOND, tool_s=4.0).makespan_s == pytest.approx(19.0)


@pytest.fixture(scope="module")
def drawn():
    """Two RL steps of 4 x 4 responses of three turns."""
    model = REGIMES["base-rl"].with_changes(max_response_tokens=200, median=40.0)
    tools = ToolUse(turns=3, tool_s=0.5, observation_tokens=20)
    return generate(model, num_rl_steps=2, prompts_per_step=4, group_size=4, num_workers=2, tools=tools)


@pytest.mark.parametrize("acceptance", ["constant:2", "geometric:0.6"])
@pytest.mark.parametrize("mode", ["fluid", "sampled"])
def test_no_policy_undercuts_bound_and_all_tokens_come(drawn, mode, acceptance):
    costs = with_terms(COSTS, kv_capacity_tokens=1000, max_num_batched_tokens=256)
    for policy in ("none", "table", "beg-mab"):
        result = simulate(drawn, policy, costs=costs, mode=mode, acceptance=acceptance, max_tools=3)
        assert result.summary["regret"] >= -1e-9
        assert_above_its_bounds(result)
        outcomes = result.trace.outcomes
        assert outcomes["response_tokens"].sum() == drawn.outcomes["response_tokens"].sum()
        order = outcomes.sort_values(["rl_step", "prompt_id", "sample", "turn"])
        waits = order["t_submit"] - order["t_finish"].shift() - order["tool_s"]
        assert (waits[order["turn"] > 0] > -1e-9).all()


def test_every_system_runs_on_responses_of_several_turns(drawn):
    table = compare(drawn, systems="all", costs=SECOND, acceptance="all=geometric:0.6", decision_block=16)
    table = table.set_index("system")
    assert set(table.index) == set(SYSTEMS) - {"pat"}
    # A mean over RL steps of tokens per second: that of the trace's own tokens where these are what is trained on.
    tokens = drawn.outcomes.groupby("rl_step")["response_tokens"].sum().to_numpy()
    verl = tokens / [rollout.makespan_s for rollout in simulate(drawn, costs=SECOND).rollouts]
    assert table.loc["verl", "tokens_per_s"] == pytest.approx(verl.mean())
    assert (table["tokens_per_s"] > 0).all()
    assert table.loc["spec-rl", "makespan_s"] < table.loc["verl", "makespan_s"]


def test_an_earlier_epoch_covers_whole_turns_and_tools():
    """Of 10 and 5 tokens the first 12 are kept, nothing, or all."""
    (step,) = requests_by_step(trace_of(CALL))
    seen = {}
    for seed in range(200):
        made = changed(step, EarlierEpoch(keep=0.9), seed)
        seen[sum(step.response_tokens) - sum(made.response_tokens)] = made
    assert seen[12].response_tokens == [0, 3]
    assert seen[12].prompt_tokens == [30, 37]
    assert seen[12].turns is not None
    assert (seen[12].turns.first, seen[12].turns.tool_s, seen[12].turns.cached_tokens) == ([1], [0.0, 0.0], [0, 0])
    assert (seen[0].response_tokens, seen[0].turns.first, seen[0].turns.tool_s) == ([10, 5], [0], [0.0, 3.0])
    assert seen[15].response_tokens == [0, 0]
    assert simulate_one(seen[12]) == pytest.approx(3.0)
    assert simulate_one(seen[15]) == 0.0


def simulate_one(step):
    selector = load_policy("none").build(np.random.default_rng(0))
    simulator = RolloutSimulator(costs=SECOND, selectors=[selector])
    simulator.prepare(Regimes((NO_SPECULATION,), SECOND, None), FluidBatch)
    return simulator.rollout(step, [step.turns.first]).makespan_s


@pytest.mark.parametrize("rule", [Admission(), SharedBuffer(chunk_tokens=10**6)])
def test_stream_and_buffer_are_plain_rollout(drawn, rule):
    """One worker for each response: nobody waits, so that nothing but the rule's own bookkeeping could differ."""
    plain, ruled = (
        simulate(drawn, costs=PREFILL, workers=16, placement="round_robin", admission=admission)
        for admission in (None, rule)
    )
    # Of a stream the rounds before have been trained on, and it hands out its prompts in order.
    assert [r.makespan_s for r in ruled.rollouts] == pytest.approx([r.makespan_s for r in plain.rollouts])
    assert sum(r.requests.lengths.sum() for r in ruled.rollouts) == drawn.outcomes["response_tokens"].sum()
    assert ruled.summary["multi_turn"]["tool_s"] == pytest.approx(plain.summary["multi_turn"]["tool_s"])


def test_step_ending_in_tool_call_continues_after():
    """A response of 10 and 5 tokens is left with 6 of them, or at its tool: then the 5 are left, their tool done."""
    for tokens, left, prompt in ((6.0, [4, 5], 26), (10.0, [5], 35)):
        stream = Stream(requests_by_step(trace_of([(20, 3, 0.0)], CALL)), Admission(issue=2.0), 0)
        work = stream.begin(0)
        feed = RoundFeed(stream, work, 2)
        assert feed.first()[1][0] == 1
        if tokens == 10.0:
            assert feed.finished([1], 1) == []
        else:
            feed.leave(1, tokens)
        assert work.jobs[1].generated == tokens
        feed.finished([0], 0)
        stream.end(work)
        again = stream.begin(0)
        assert again.jobs[0] is work.jobs[1]
        assert again.requests.response_tokens[: len(left)] == left
        assert again.requests.prompt_tokens[0] == prompt
        assert again.requests.turns.tool_s[0] == 0.0
