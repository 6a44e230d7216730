"""Whole RL steps: stages in turn or on their own GPUs, who waits for whom, and what that costs in GPU-seconds."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refused import refused
from tltlab.costs.stages import (
    STAGES,
    InferenceCosts,
    RewardCosts,
    StageCosts,
    StepWorkload,
    SyncCosts,
    TrainCosts,
    served_s,
)
from tltlab.errors import ConfigError
from tltlab.sim import simulate
from tltlab.sim.rl_steps import Colocated, Pools, Separate, run_steps, summary
from tltlab.traces import metrics
from tltlab.traces.lanes import lanes
from tltlab.traces.trace import read

from .workloads import HALF, TINY, with_terms

STAGES_OF_TWO = StageCosts(
    inference=InferenceCosts(base_s=1.0), reward=RewardCosts(base_s=0.5), train=TrainCosts(base_s=4.0),
    sync=SyncCosts(base_s=0.25),
)  # fmt: skip
OVERLAP = Separate(max_staleness=1)


def fake_rollout(worker_end_s, rl_step):
    """A rollout of one response per worker, each of as many tokens as its worker takes seconds (at least 1)."""
    tokens = [max(1, int(end)) for end in worker_end_s]
    ids = [f"p{i}" for i in range(len(tokens))]
    rows = pd.DataFrame({"prompt_id": ids, "prompt_tokens": 0, "response_tokens": tokens})
    requests = SimpleNamespace(rl_step=rl_step, policy_version=rl_step, response_tokens=tokens, rows=rows)
    requests.work = lambda updates: StepWorkload.of_rows(requests.rows, num_updates=updates)
    return SimpleNamespace(
        worker_end_s=worker_end_s,
        finish_s=np.array(worker_end_s),
        makespan_s=max(worker_end_s, default=0.0),
        spot=None,
        requests=requests,
    )


@pytest.fixture(scope="module")
def tiny():
    return simulate(read(TINY), "none")


def rollouts(*ends):
    return SimpleNamespace(rollouts=[fake_rollout(e, k) for k, e in enumerate(ends)], trace=None)


def test_colocated_stages_follow_each_other():
    result = run_steps(rollouts([10.0, 6.0], [8.0, 8.0]), STAGES_OF_TWO)
    assert result.steps["step_s"].tolist() == [15.75, 13.75]
    assert result.steps["t_start"].tolist() == [0.0, 15.75]
    assert result.rollout_share == pytest.approx(18 / 29.5)
    trainer = result.spans[result.spans["rl_step"] == 0]
    assert trainer["kind"].tolist() == ["reward", "inference", "train", "weight_sync"]
    assert trainer["t_start"].tolist() == [10.0, 10.5, 11.5, 15.5]


@pytest.mark.parametrize(
    ("terms", "options", "stage", "seconds"),
    [
        ({"sleep_s": 1.0, "wake_s": 2.0}, {}, "sync_s", 3.25),
        ({"sleep_s": 1.0, "wake_s": 2.0}, {"topology": Separate()}, "sync_s", 0.25),
        ({"train": TrainCosts(per_update_s=2.0)}, {"num_updates": 8}, "train_s", 16.0),
        # Responses end at 2 and 10 s: graded one by one in the end, or during the rollout.
        ({"reward": RewardCosts(per_response_s=3.0)}, {}, "reward_s", 6.0),
        ({"reward": RewardCosts(per_response_s=3.0, when="overlapped")}, {}, "reward_s", 3.0),
    ],
)
def test_each_stage_takes_what_its_costs_say(terms, options, stage, seconds):
    result = run_steps(rollouts([10.0, 2.0]), with_terms(STAGES_OF_TWO, **terms), **options)
    assert result.steps[stage].tolist() == [seconds]
    engine = [kind for kind in result.spans["detail"].fillna("") if kind.startswith("engine")]
    assert engine == (["engine sleeps", "engine wakes"] * (seconds == 3.25))


def test_separate_gpus_wait_for_each_other():
    result = run_steps(rollouts([10.0, 6.0], [8.0, 8.0]), STAGES_OF_TWO, topology=Separate(train_gpus=3))
    assert result.steps["step_s"].tolist() == [15.75, 13.75]
    assert result.num_gpus == 5
    # The engines wait 5.5 s for the trainer in each RL step, the trainer 10 s and 8 s for the engines.
    # Beside these, 4 s of a worker's bubble and 0.5 s of grading in each.
    assert result.busy_gpu_s == pytest.approx(5 * 29.5 - (2 * 11 + 3 * 18) - 4 - 3 * 2 * 0.5)
    first = result.spans[result.spans["rl_step"] == 0]
    worker = first[first["lane"] == "worker 1"]
    assert list(zip(worker["kind"], worker["t_start"], worker["duration"], strict=True)) == [
        ("idle", 10.0, 5.5),
        ("weight_sync", 15.5, 0.25),
    ]
    assert first[first["lane"] == "trainer"]["kind"].tolist()[0] == "idle"


def test_one_step_off_rolls_out_during_training():
    result = run_steps(rollouts([10.0], [8.0], [3.0]), STAGES_OF_TWO, topology=OVERLAP)
    # Rollouts start at 0, 10 and 18.25; the trainer works 10-15.5 and syncs at 18, works 18.25-23.75, 24-29.5.
    assert result.steps["t_start"].tolist() == [0.0, 10.0, 18.25]
    assert result.steps["step_s"].cumsum().tolist() == [18.25, 24.0, 29.75]
    assert result.steps["policy_version"].tolist() == [0, 0, 1]
    assert result.run_s == 29.75


@pytest.mark.parametrize("laps", [1, 2, 8])
def test_mean_of_pipeline_is_that_of_any_length(laps):
    result = run_steps(rollouts(*[[10.0], [8.0], [3.0]] * laps), STAGES_OF_TWO, topology=OVERLAP)
    # A rollout and the update of the one before it at a time, then a sync; the update takes 5.5 s.
    assert result.step_s == pytest.approx((10.0 + 8.0 + 5.5) / 3 + 0.25)
    assert result.rollout_share == pytest.approx(7.0 / result.step_s)
    assert result.run_s > result.step_s * len(result.steps)


def test_rollouts_run_ahead_until_the_store_is_full():
    """Training takes the longest: the rollouts are three updates ahead in the end, and the step time is its own."""
    result = run_steps(rollouts(*[[1.0]] * 8), STAGES_OF_TWO, topology=Separate(max_staleness=3))
    assert result.steps["updates_behind"].tolist() == [0, 1, 2, 3, 3, 3, 3, 3]
    assert result.step_s == pytest.approx(5.75, rel=0.1)
    assert summary(result)["updates_behind"] == pytest.approx(18 / 8)


def groups_of(*ends):
    """A rollout of two samples for each prompt, of 100 tokens each: they end one by one."""
    simulated = rollouts(list(ends))
    rows = simulated.rollouts[0].requests.rows
    names = [f"p{i // 2}" for i in range(len(ends))]
    simulated.rollouts[0].requests.rows = rows.assign(prompt_id=names, response_tokens=100)
    return simulated


STREAM = StageCosts(train=TrainCosts(per_token_s=0.02, base_s=1.0), sync=SyncCosts(base_s=0.25))


def test_a_streaming_trainer_takes_groups_as_they_finish():
    """Groups whole at 4 s and 10 s, 4 s of training each, a second for the optimizer: 15 s, not 10 + 9 s."""
    simulated = groups_of(1.0, 4.0, 3.0, 10.0)
    streamed = run_steps(simulated, STREAM, topology=Separate(), streamed=True)
    assert streamed.step_s == pytest.approx(15.25)
    assert run_steps(simulated, STREAM, topology=Separate()).step_s == pytest.approx(19.25)
    trainer = streamed.spans[(streamed.spans["lane"] == "trainer") & (streamed.spans["kind"] == "train")]
    assert list(zip(trainer["t_start"], trainer["duration"], strict=True)) == [(4.0, 4.0), (10.0, 5.0)]
    assert streamed.steps["train_s"].tolist() == pytest.approx([9.0])


@pytest.mark.parametrize(("reward_s", "begins_s"), [(0.0, 1.0), (0.75, 2.0)])
def test_a_slower_trainer_never_waits_between_groups(reward_s, begins_s):
    """Groups whole at 1 s and 2 s, graded 0.75 s a response one by one: the first one's are at 2 s."""
    costs = with_terms(STREAM, reward=RewardCosts(per_response_s=reward_s))
    streamed = run_steps(groups_of(0.5, 1.0, 1.5, 2.0), costs, topology=Separate(), streamed=True)
    assert streamed.step_s == pytest.approx(begins_s + 9 + 0.25)


def test_one_step_off_it_streams_beside_update_before():
    simulated = SimpleNamespace(rollouts=[*groups_of(1.0, 4.0, 3.0, 10.0).rollouts] * 3, trace=None)
    result = run_steps(simulated, STREAM, topology=OVERLAP, streamed=True)
    # The first is trained at 15 s; its weights wait for the second rollout's end, at 20 s, which is trained at 25 s.
    assert result.steps["step_s"].cumsum().tolist()[0] == pytest.approx(20.25)


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=8), st.floats(0, 20))
def test_one_server_takes_work_as_it_arrives(work, free_s):
    arrive, takes = np.array(work).T
    ends, now = {}, free_s
    for at in np.argsort(arrive, kind="stable"):
        now = ends[at] = max(now, arrive[at]) + takes[at]
    assert served_s(arrive, takes, free_s) == pytest.approx([ends[i] for i in range(len(work))])


seconds = st.floats(0.01, 50)
runs = st.integers(1, 3).flatmap(
    lambda workers: st.lists(st.lists(seconds, min_size=workers, max_size=workers), min_size=1, max_size=6)
)
costs = st.builds(
    lambda inference, reward, train, per_token, sync: StageCosts(
        inference=InferenceCosts(base_s=inference),
        reward=RewardCosts(per_response_s=reward),
        train=TrainCosts(base_s=train, per_token_s=per_token),
        sync=SyncCosts(base_s=sync),
    ),
    *(st.floats(0, 20) for _ in range(3)), st.floats(0, 1), st.floats(0, 5),
)  # fmt: skip
topologies = st.sampled_from([Colocated(), Separate(), OVERLAP])


@HALF
@given(runs, costs)
def test_overlap_is_never_slower_than_waiting(ends, stages):
    result = run_steps(rollouts(*ends), stages, topology=OVERLAP)
    steps = result.steps
    rollout, sync = steps["rollout_s"].to_numpy(), steps["sync_s"].to_numpy()
    train = steps[["inference_s", "reward_s", "train_s"]].sum(axis=1).to_numpy()
    expected = rollout[0] + np.maximum(rollout[1:], train[:-1]).sum() + train[-1] + sync.sum()
    assert result.run_s == pytest.approx(expected)
    assert result.run_s <= run_steps(rollouts(*ends), stages, topology=Separate()).run_s * (1 + 1e-9)


@HALF
@given(runs, costs, topologies)
def test_no_rl_step_is_shorter_than_its_work(ends, stages, topology):
    result = run_steps(rollouts(*ends), stages, topology=topology)
    steps, total = result.steps, result.steps[["rollout_s", *STAGES]].sum()
    longest = steps[["rollout_s", *STAGES]].max(axis=1)
    assert (steps["latency_s"] >= longest * (1 - 1e-9)).all()
    if isinstance(topology, Colocated):
        assert steps["step_s"].tolist() == pytest.approx(steps[["rollout_s", *STAGES]].sum(axis=1).tolist())
    if topology.max_staleness == 0:
        assert (steps["step_s"] >= longest * (1 - 1e-9)).all()
    trained_s = total["inference_s"] + total["reward_s"] + total["train_s"]
    assert result.run_s >= (max(total["rollout_s"], trained_s) + total["sync_s"]) * (1 - 1e-9)


@HALF
@given(runs, costs, topologies)
def test_every_gpu_second_is_accounted_for_and_repeats(ends, stages, topology):
    result, again = (run_steps(rollouts(*ends), stages, topology=topology) for _ in range(2))
    pd.testing.assert_frame_equal(result.steps, again.steps, check_exact=True)
    pd.testing.assert_frame_equal(result.spans, again.spans, check_exact=True)
    assert 0 <= result.busy_gpu_s <= result.num_gpus * result.run_s * (1 + 1e-9)
    lag = np.arange(len(result.steps)) - result.steps["policy_version"].to_numpy()
    assert 0 <= lag.min() <= lag.max() <= topology.max_staleness
    # Lanes are busy or idle, and never two things.
    start = result.steps.set_index("rl_step")["t_start"]
    assert (result.spans["t_start"] >= 0).all()
    for lane, rows in result.spans.groupby("lane"):
        at, duration = (rows["t_start"] + rows["rl_step"].map(start)).to_numpy(), rows["duration"].to_numpy()
        order = np.lexsort((duration, at.round(9)))
        assert (np.diff(at[order]) >= duration[order][:-1] - 1e-8).all()
        if lane == "trainer" and not isinstance(topology, Colocated):
            assert duration.sum() == pytest.approx(result.run_s)


@pytest.mark.parametrize("topology", [Colocated(), Separate(), OVERLAP])
def test_a_simulation_becomes_a_trace_with_stages(tiny, topology):
    result = run_steps(tiny, STAGES_OF_TWO, topology=topology)
    trace = result.trace
    assert trace.manifest.kind == "simulated"
    assert topology.name in trace.manifest.notes
    assert trace.steps["train_s"].tolist() == [4.0] * 4
    assert trace.steps["t_start"].tolist() == result.steps["t_start"].tolist()
    versions = trace.workload.groupby("rl_step")["policy_version"].first()
    assert versions.tolist() == result.steps["policy_version"].tolist()
    assert metrics.bubble_fraction(trace) == pytest.approx(metrics.bubble_fraction(tiny.trace))
    drawn = lanes(trace, "all")
    assert {"inference", "reward", "train", "weight_sync"} <= set(drawn.loc[drawn["lane"] == "trainer", "kind"])
    assert drawn["end_s"].max() == pytest.approx(result.run_s)


def test_summary_has_keys_of_command_line():
    found = summary(run_steps(rollouts([10.0, 6.0]), STAGES_OF_TWO, topology=Colocated(gpus_per_worker=4)))
    assert found == {
        "step_s": 15.75,
        "rollout_share": pytest.approx(10 / 15.75),
        "stages": {"rollout_s": 10.0, "inference_s": 1.0, "reward_s": 0.5, "train_s": 4.0, "sync_s": 0.25},
        "topology": "colocated",
        "updates_behind": 0.0,
        "num_gpus": 8,
        "idle_gpu_fraction": pytest.approx(20 / (8 * 15.75)),
    }


def test_a_topology_of_one_s_own():
    late = SimpleNamespace(
        name="two late",
        max_staleness=2,
        pools=lambda workers, stages: Pools(rollout_gpus=workers, train_gpus=1, shared=False),
    )
    result = run_steps(rollouts(*[[4.0]] * 6), STAGES_OF_TWO, topology=late)
    assert (np.arange(6) - result.steps["policy_version"]).max() == 2
    assert result.num_gpus == 2


EMPTY = rollouts([1.0])
EMPTY.rollouts[0].requests.rows = EMPTY.rollouts[0].requests.rows.iloc[:0]


@pytest.mark.parametrize(
    ("simulated", "stages", "options", "naming"),
    [
        (rollouts(), STAGES_OF_TWO, {}, ("rollout",)),
        (rollouts([]), STAGES_OF_TWO, {}, ("workers",)),
        (EMPTY, STAGES_OF_TWO, {}, ("responses",)),
        (rollouts([1.0]), with_terms(STAGES_OF_TWO, reward=None), {}, ()),
        (rollouts([1.0]), StageCosts(num_gpus=8), {"topology": Colocated(gpus_per_worker=3)}, ("8",)),
        (rollouts([1.0]), StageCosts(num_gpus=8), {"topology": Separate(train_gpus=4)}, ("8",)),
        # GPUs that all generate cannot train meanwhile.
        (rollouts([1.0]), STREAM, {"streamed": True}, ()),
    ],
)
def test_what_cannot_be_run_is_refused(simulated, stages, options, naming):
    with refused(ConfigError, naming=naming):
        run_steps(simulated, stages, **options)
