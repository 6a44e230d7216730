"""The recipe that gathers each RL step's last requests onto an engine of two ranks: trained on, traced, and resumed."""

import numpy as np
import pytest

import tltlab
from tltlab.planning.rollout import Gather, Hold, RolloutPlanner
from tltlab.runtime.recipe.recipe import load_recipe
from tltlab.runtime.run.grpo import GrpoRun, train
from tltlab.sim.verification.plans import replay_plans

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_ray")]
STEPS, RESPONSES = 2, 16


class GatherLast(RolloutPlanner):
    """Holds two requests, and gathers with them what else is left once one has ended: never too late."""

    def plan(self, state):
        if not state.ended and not state.generated_tokens.any():
            return [Hold(key=key) for key in state.keys[-2:]]
        wide = [shape for shape in state.engines if shape.gpus > state.active.gpus]
        return [Gather(shape=wide[0], queues=())] if wide and state.ended else []


def recipe_of(random_model, *more):
    """Of the recipe, what is not of its model."""
    own = [
        f"model={random_model}", f'code=["{random_model}"]', "reward=parity:reward",
        f"data.train={random_model / 'train.jsonl'}", "data.heldout=null",
        "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_response_tokens=96",
        f"rollout.planner={__name__}:GatherLast",
        "rollout.vllm.max_model_len=128", "rollout.vllm.kv_cache_memory_bytes=33554432",
    ]  # fmt: skip
    return load_recipe("gather_smoke", [*own, *more])


@pytest.fixture(scope="module")
def run(random_model, tmp_path_factory):
    out = tmp_path_factory.mktemp("gathered")
    with GrpoRun(recipe_of(random_model, "checkpoint.every=2"), out) as run:
        for _ in range(STEPS):
            run.step()
        return out, run.reports, run.pool.belief.state_dict()


def test_gathered_responses_are_whole_and_trained_on(run):
    trace = tltlab.read(run[0] / "trace")
    assert len(trace.outcomes) == STEPS * RESPONSES
    assert set(trace.outcomes["finish_reason"]) <= {"stop", "length"}
    tokens = trace.table("tokens")
    for row in tokens.itertuples():
        assert len(row.logprobs) == len(row.token_ids)
    for report in run[1]:
        # The trainer sees the distribution that the engines of both shapes sampled from.
        assert abs(report.metrics["mismatch_kl"]) < 1e-6
        assert report.metrics["mismatch_abs"] < 1e-4
    for _, spans in trace.spans.groupby("rl_step"):
        for lane in (spans[spans["lane"] == f"worker {n}"] for n in range(2)):
            since = lane[lane["kind"] == "move"]["t_start"].iloc[0]
            after = lane[(lane["t_start"] > since) & lane["kind"].isin(["decode", "prefill"])]
            assert len(after), "the GPUs of both work on"
            ends = (lane["t_start"] + lane["duration"]).to_numpy()
            assert np.all(lane["t_start"].to_numpy()[1:] >= ends[:-1] - 1e-3)


def test_plans_of_a_run_are_made_again(run):
    trace = tltlab.read(run[0])
    plans = trace.table("plans")
    num_actions = plans["actions"].map(len).groupby(plans["rl_step"]).sum()
    assert num_actions.min() >= 3, "two are held, all gathered"
    found = replay_plans(trace, allow_code=[__name__])
    assert (found.share("same"), found.rows["rl_step"].tolist()) == (1.0, list(range(STEPS))), found.text()


def test_a_run_that_gathers_is_resumed(run, random_model):
    with GrpoRun(recipe_of(random_model, f"train.steps={STEPS + 1}"), run[0], resume=True) as again:
        assert again.pool.belief.state_dict() == run[2]
        again.step()
        trace = again.trace()
    assert trace.rl_steps == [0, 1, 2]
    assert len(trace.outcomes.query("rl_step == 2")) == RESPONSES


def test_seer_takes_from_one_buffer(recipe_file, tmp_path):
    settings = ["rollout.repeat_every=0", "eval.num_prompts=0", "train.steps=2", "rollout.vllm.max_num_seqs=3"]
    train(load_recipe(recipe_file, ["rollout.system=seer", *settings]), tmp_path / "run")
    trace = tltlab.read(tmp_path / "run" / "trace")
    assert trace.iterations["batch"].max() <= 3
    assert "suffix" in set(trace.iterations["drafter"])
    assert "goes on without it" not in (tmp_path / "run" / "events.jsonl").read_text()
    plans = trace.table("plans")
    for actions in plans[plans["plan"] == 0]["actions"]:
        held = [action for action in actions if action.startswith("hold")]
        assert len(held) == RESPONSES - 6
        assert not any(action.endswith(", 0, 0)") for action in held), "probes are among the six that begin at once"
    for _, rows in trace.outcomes.groupby("rl_step"):
        assert len(rows) == RESPONSES
        assert set(rows["finish_reason"]) <= {"stop", "length"}
