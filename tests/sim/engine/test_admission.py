"""RL steps that begin more than they train: what begins, when a step ends, what is left, and that no work is lost."""

import json
from dataclasses import replace

import numpy as np
import pytest

from bench.simulator import COSTS
from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.lengths.generate import log_normal
from tltlab.planning.composition import Admission, SharedBuffer, asynchronous
from tltlab.sim import simulate
from tltlab.sim.cli.simulate import simulate as command
from tltlab.sim.engine.admission import BufferFeed, RoundFeed, Stream
from tltlab.sim.workload import requests_by_step

from ..workloads import with_terms

PROMPTS, GROUP = 8, 4


@pytest.fixture(scope="module")
def trace():
    return log_normal(prompts=PROMPTS, group_size=GROUP, rl_steps=4, median=300, cap=4000, workers=4)


def one_round(trace, rule):
    stream = Stream(requests_by_step(trace), rule, 0)
    feed = RoundFeed(stream, stream.begin(0), 2)
    return stream, feed, feed.first()


def test_over_issue_ends_with_whole_groups(trace):
    stream, feed, queues = one_round(trace, Admission(issue=1.5))
    assert [len(queue) for queue in queues] == [24, 24]
    for request in range(PROMPTS * GROUP - 1):
        assert not feed.finished([request], request % 2)
        assert not feed.stopped
    feed.finished([PROMPTS * GROUP - 1], 1)
    assert feed.stopped
    feed.leave(40, 7.0)
    trained = stream.end(feed.work)
    assert [job.index for job in trained] == list(range(PROMPTS * GROUP))
    following = stream.begin(1)
    # Four groups are left and eight begin anew; what had come furthest is no longer to be generated.
    assert len(following.jobs) == 48
    again = following.jobs.index(feed.work.jobs[40])
    assert again < 16
    assert following.requests.response_tokens[again] == feed.work.jobs[40].length - 7
    assert following.requests.prompt_tokens[again] == feed.work.requests.prompt_tokens[40] + 7


def test_with_fixed_concurrency_next_begins_where_one_ended(trace):
    _, feed, queues = one_round(trace, Admission(concurrency=0.5))
    assert sum(map(len, queues)) == PROMPTS * GROUP // 2
    assert feed.finished([0], 0) == [16]
    assert feed.finished([], 0) == []


def test_restart_forgets_and_long_round_ends_it(trace):
    rule = Admission(issue=2.0, leftover="restart")
    stream, feed, _ = one_round(trace, rule)
    feed.finished(list(range(PROMPTS * GROUP)), 0)
    feed.leave(PROMPTS * GROUP, 11.0)
    assert feed.stopped
    stream.end(feed.work)
    assert stream.wasted_tokens == 11.0
    long_round = stream.begin(1)
    assert len(long_round.jobs) == PROMPTS * GROUP
    assert long_round.jobs[0] is feed.work.jobs[PROMPTS * GROUP]
    assert long_round.jobs[0].generated == 0.0
    assert not stream.is_enough(long_round)


def test_samples_beyond_group_have_lengths_of_their_prompt(trace):
    _, feed, _ = one_round(trace, Admission(samples=1.5))
    step = requests_by_step(trace)[0]
    assert len(feed.work.jobs) == PROMPTS * 6
    for job in feed.work.jobs:
        own = [n for key, n in zip(step.keys, step.response_tokens, strict=True) if key[1] == step.keys[job.index][1]]
        assert job.length in own


def test_a_bound_on_staleness_limits_what_may_begin(trace):
    free, bound = (one_round(trace, Admission(unit="response", concurrency=4.0, staleness=eta))[2] for eta in (8, 0))
    assert sum(map(len, free)) == 4 * PROMPTS * GROUP
    assert sum(map(len, bound)) == PROMPTS * GROUP


@pytest.mark.parametrize(
    "rule",
    [
        Admission(issue=1.5), Admission(concurrency=1.5), Admission(issue=1.25, samples=1.25, leftover="restart"),
        Admission(unit="response", concurrency=2.0, staleness=4),
    ],
)  # fmt: skip
def test_every_step_trains_as_many_responses_each_time(trace, rule):
    result, again = (simulate(trace, "none", costs=COSTS, admission=rule) for _ in range(2))
    assert [rollout.makespan_s for rollout in result.rollouts] == [r.makespan_s for r in again.rollouts]
    for rollout in result.rollouts:
        assert len(rollout.requests) == PROMPTS * GROUP
        assert len(set(rollout.requests.keys)) == PROMPTS * GROUP
        assert 0 <= rollout.old_tokens <= rollout.requests.lengths.sum()
        assert (rollout.finish_s <= rollout.makespan_s).all()
    assert len(result.trace.outcomes) == 4 * PROMPTS * GROUP


def test_resumed_work_is_conserved_in_the_long_run(trace):
    """Every token is generated once: what a pass generates is, except what is under way, what it trains."""
    result = simulate(trace, "none", costs=COSTS, admission=Admission(issue=1.5))
    generated = sum(float(log.columns.tokens.sum()) for r in result.rollouts for log in r.logs)
    trained = sum(int(r.requests.lengths.sum()) for r in result.rollouts)
    recorded = sum(int(step.lengths.sum()) for step in requests_by_step(trace))
    assert generated == pytest.approx(trained, rel=0.35)
    assert trained == pytest.approx(recorded, rel=0.35)
    assert np.mean([r.old_tokens for r in result.rollouts]) > 0


def test_dropping_stale_groups_starves_long_responses(trace):
    """Both run on; what is trained on is as old as allowed, or as long as what is generated."""
    results = [
        simulate(trace, "none", costs=COSTS, admission=asynchronous(1, stale=stale, concurrency=2.0))
        for stale in ("drop", "hold")
    ]
    drop, hold = (result.summary["asynchronous"] for result in results)
    for result in results:
        steps = result.trace.steps
        assert steps["length_bias"].iloc[-1] == pytest.approx(result.summary["asynchronous"]["length_bias"])
        assert ((steps["staleness"] > 0) == (steps["off_policy_share"] > 0)).all()
    assert drop["staleness_max"] <= 1
    assert drop["dropped_share"] > 0.02
    assert drop["wasted_share"] > 0.02
    assert drop["length_bias"] < 0.9
    assert hold["dropped_share"] == hold["wasted_share"] == 0.0
    assert drop["length_bias"] < hold["length_bias"]
    assert hold["mean_length_generated"] == pytest.approx(trace.outcomes["response_tokens"].mean(), rel=0.15)


def test_a_staleness_bound_of_zero_is_synchronous():
    assert asynchronous(0) is None
    for wrong in ({"staleness": -1}, {"staleness": 1, "stale": "keep"}, {"staleness": 1, "concurrency": 0.0}):
        with refused(ConfigError, naming=[*wrong][-1:]):
            asynchronous(**wrong)


def test_the_command_reports_staleness_and_bias(trace, tmp_path, capsys, as_json):
    folder = trace.write(tmp_path / "trace")
    told = []
    for staleness in (0, 2):
        command(trace=folder, staleness=staleness, stale="drop")
        told.append(json.loads(capsys.readouterr().out)["asynchronous"])
    assert told[0] is None
    assert {"length_bias", "staleness_mean", "staleness_max", "off_policy_share"} <= set(told[1])


def test_one_buffer_hands_out_probes_then_longest_group(trace):
    step = requests_by_step(trace)[0]
    keys, one = step.keys, step.prompt_tokens[0] + 1
    step = replace(step, prompts=np.full(len(step), step.prompts[0]))
    feed = BufferFeed(step, 2, one * PROMPTS // 2, SharedBuffer(chunk_tokens=1))
    queues = feed.first()
    # There is room for as many as there are groups: the probes, shared out evenly.
    assert sorted(keys[i][2] for queue in queues for i in queue) == [0] * PROMPTS
    assert [len(queue) for queue in queues] == [PROMPTS // 2] * 2
    # Worker 1's are done while worker 0 has no room in its cache, then it takes as many as have ended there.
    assert feed.finished([], 0, 0.0) == []
    taken = feed.finished(queues[1], 1)
    assert len(taken) == PROMPTS // 2
    # Groups that have not finished any count as the cap: theirs go first, in the order of the batch.
    unfinished = [keys[i][1] for i in queues[0]]
    assert [keys[i][1] for i in taken] == ([unfinished[0]] * 3 + [unfinished[1]])
    rest = feed.finished(queues[0], 0) + feed.finished(taken, 1)
    probes = sorted((i for queue in queues for i in queue), key=lambda i: -step.response_tokens[i])
    assert [keys[i][1] for i in rest[:1]] == [keys[probes[0]][1]]


def test_no_worker_ends_while_requests_wait_in_buffer():
    long = log_normal(prompts=16, group_size=4, rl_steps=1, median=1000, prompt_share=0.9, cap=4000, workers=4)
    costs = with_terms(COSTS, kv_capacity_tokens=16000)
    rule = SharedBuffer(chunk_tokens=2000)
    shared = simulate(long, "none", costs=costs, admission=rule).rollouts[0]
    assert not np.isnan(shared.first_token_s).any()
    assert shared.makespan_s == max(shared.finish_s)
    assert shared.wasted_tokens == shared.old_tokens == 0.0
    # The last request was taken from the buffer a few iterations before its first token.
    assert shared.first_token_s.max() > 5.0
    assert min(shared.worker_end_s) > shared.first_token_s.max() - 0.1
