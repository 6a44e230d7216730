"""Training during rollouts on real engines: its bound, continuing from a checkpoint, and engines that die meanwhile."""

import json
import os

import pytest

from tltlab.files import json_lines, read_json
from tltlab.runtime.recipe.recipe import load_recipe
from tltlab.runtime.rollout.partial import PENDING_FILE
from tltlab.runtime.run.grpo import GrpoRun

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_ray")]
BOUND, STEPS, PER_STEP, GROUP, WORKERS = 2, 4, 4, 4, 2
# A worker imports its policy's module, and only engines of runs with this one die: in the midst of a rollout, and when
# told that the weights of a version are whole, of which none has come into force.
DYING = """
import os, signal
from pathlib import Path
from tltlab import NO_SPECULATION, Selector, Strategy
from tltlab.runtime.rollout.worker import EngineWorker

class Plain(Selector):
    strategies = (NO_SPECULATION, Strategy.chain("ngram", 2))

    def choose(self, state):
        return NO_SPECULATION

def die_once(name):
    try:
        (Path({folder!r}) / name).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)

generate, take_weights = EngineWorker._generate, EngineWorker.weights

def generating(self, requests, rl_step, seed, until=None):
    iterations = 0

    def counted(ended):
        nonlocal iterations
        iterations += 1
        if self.number == 0 and rl_step >= 1 and iterations == 2:
            die_once("died in a rollout")
        return until is not None and until(ended)

    return generate(self, requests, rl_step, seed, counted)

def weights(self, call, info, data=None):
    if call == "finish" and self.number == 1 and info == 1:
        die_once("died in a swap")
    return take_weights(self, call, info, data)

if os.getpid() != {driver}:
    EngineWorker._generate, EngineWorker.weights = generating, weights
"""


def recipe(recipe_file, *more):
    settings = {
        "rollout.staleness": BOUND, "rollout.num_workers": WORKERS, "rollout.prompts_per_step": PER_STEP,
        "rollout.group_size": GROUP, "rollout.max_response_tokens": 96, "rollout.vllm.max_num_seqs": 8,
        "rollout.repeat_every": 0, "rollout.max_draft_depth": 2, "train.lr": 5e-3, "train.steps": STEPS,
        "checkpoint.every": 0, "eval.num_prompts": 0, "reward_pool.processes": 0,
    }  # fmt: skip
    return load_recipe(recipe_file, [*(f"{key}={value}" for key, value in settings.items()), *more])


def check(trace, reports):
    """No token is older than the bound or of a policy to come, and every response is there once, from its first token
    to its last."""
    assert trace.rl_steps == list(range(STEPS)) == [report.rl_step for report in reports]
    key = ["rl_step", "prompt_id", "sample", "turn"]
    assert not trace.tokens.duplicated(key).any()
    rows = trace.tokens.merge(trace.outcomes, on=key).sort_values(key)
    for _, parts in rows.groupby(["prompt_id", "sample"]):
        text = list(parts["prompt_token_ids"].iloc[0])
        for row in parts.itertuples():
            assert list(row.prompt_token_ids) == text, "it goes on behind what it had"
            text += list(row.token_ids)
            assert list(row.token_versions) == sorted(row.token_versions)
            assert row.rl_step - BOUND <= row.token_versions[0] <= row.token_versions[-1] <= row.rl_step
        assert (parts["finish_reason"] == "abort").tolist()[:-1] == [True] * (len(parts) - 1)
        assert (parts["reward"].notna() == (parts["finish_reason"] != "abort")).all()
    assert rows["reward"].notna().sum() >= STEPS * PER_STEP * GROUP
    assert (trace.steps["staleness"] <= BOUND).all()
    assert trace.steps["dropped_groups"].tolist() == [0] * STEPS
    for report in reports:
        assert report.metrics["staleness/max"] <= BOUND
        assert report.metrics["trained/dropped_groups"] == 0
        assert report.metrics["trained/length_bias"] == 1.0


def events(run):
    return [row["event"] for row in json_lines(run / "events.jsonl")]


def test_a_run_resumes_with_responses_under_way(recipe_file, tmp_path):
    asked, out = recipe(recipe_file, "checkpoint.every=2"), tmp_path / "run"
    with GrpoRun(asked, out) as run:
        for _ in range(2):
            run.step()
        under_way = list(run.data.rollouts.under_way)
    assert len(under_way) == BOUND * PER_STEP
    with GrpoRun(asked, out, resume=True) as run:
        saved = out / "checkpoints" / "step-000002" / "rollouts"
        again = json.loads(json.dumps(run.data.state_dict(tmp_path / "again")))
        assert again["rollouts"] == read_json(saved.parent / "state.json")["rollouts"]
        assert (tmp_path / "again" / PENDING_FILE).read_bytes() == (saved / PENDING_FILE).read_bytes()
        assert (run.rl_step, run.data.rollouts.under_way) == (2, under_way)
        for _ in range(2):
            run.step()
        assert run.state.policy_version == STEPS
        reports = run.reports
        check(run.trace(), reports)
    # What began in RL step 0 and was not trained then is older in the next.
    assert max(report.metrics["staleness/mean"] for report in reports) > 0
    mismatch = [report.metrics["mismatch_abs"] for report in reports]
    assert mismatch[0] < 1e-4 < max(mismatch)


def test_a_dying_engine_costs_time_only(recipe_file, tmp_path):
    (recipe_file.parent / "dying.py").write_text(DYING.format(folder=str(tmp_path), driver=os.getpid()))
    with GrpoRun(recipe(recipe_file, "rollout.policy=dying:Plain"), tmp_path / "run") as run:
        for _ in range(STEPS):
            run.step()
        trace, reports = run.trace(), run.reports
    assert {path.name for path in tmp_path.glob("died*")} == {"died in a rollout", "died in a swap"}
    check(trace, reports)
    told = events(tmp_path / "run")
    for worker in range(WORKERS):
        assert sum(event.startswith(f"rollout worker {worker} failed in RL step") for event in told) == 1, told
    assert list(trace.steps["policy_version"]) == sorted(trace.steps["policy_version"])
    assert run.state.policy_version == STEPS
