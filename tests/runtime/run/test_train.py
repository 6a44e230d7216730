"""The loop on Ray: two engines, a trainer, a trace. One run serves most of the file."""

import pytest

import tltlab
from tltlab.files import found_in, read_json
from tltlab.policies.policy import Policy
from tltlab.runtime.recipe.recipe import load_recipe
from tltlab.runtime.run.grpo import GrpoRun

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_ray")]
POLICIES = ["none", "explore", "beg-mab", "parity:Halving"]


@pytest.fixture(scope="module")
def run(recipe_file, tmp_path_factory):
    """Four GRPO steps, the last under a user's own policy; the run's folder, its reports and held-out rewards."""
    out = tmp_path_factory.mktemp("run")
    with GrpoRun(load_recipe(recipe_file), out) as run:
        rewards = {"first": run.evaluate()}
        for name in POLICIES:
            with found_in([recipe_file.parent]):
                run.set_policy(name, name)
            run.step()
        rewards["last"] = run.evaluate()
        assert run.trace().rl_steps == [0, 1, 2, 3]
        run.save()
    return out, run.reports, rewards


def test_every_table_that_applies_is_recorded_and_valid(run):
    trace = tltlab.read(run[0] / "trace")
    assert trace.rl_steps == [0, 1, 2, 3]
    assert len(trace.outcomes) == 4 * 4 * 4
    assert trace.manifest.kind == "recorded"
    assert trace.manifest.num_workers == 2
    for name in ("tokens", "iterations", "decisions", "steps", "spans"):
        assert trace.table(name) is not None, name
    assert list(trace.steps["policy"]) == POLICIES
    assert list(trace.steps["policy_version"]) == [0, 1, 2, 3]
    assert set(trace.outcomes["finish_reason"]) <= {"stop", "length"}


def test_without_gpus_all_runs_without_graphs(run):
    assert set(tltlab.read(run[0] / "trace").iterations["graph"]) == {"eager"}
    graphs = read_json(run[0] / "graphs.json")
    assert graphs["planned"] is None
    assert [(engine["mode"], engine["full"]) for engine in graphs["captured"]] == [("NONE", [])] * 2
    assert all(report.measures["graphs/eager"] == 1.0 for report in run[1])


def test_rollouts_and_updates_are_what_is_recorded(run):
    trace = tltlab.read(run[0] / "trace")
    rollout_s = trace.steps.set_index("rl_step")["rollout_s"]
    for rl_step, step in trace.outcomes.groupby("rl_step"):
        assert list(step["worker"]) == [0] * 8 + [1] * 8, "requests go in order, groups stay together"
        rows = trace.iterations.query("rl_step == @rl_step")
        assert rows.groupby("worker")["duration"].sum().max() <= rollout_s[rl_step]
        assert rows["num_generated"].sum() >= step["response_tokens"].sum()
    for report in run[1]:
        # The trainer sees the distribution that the engines sampled from.
        assert abs(report.metrics["mismatch_kl"]) < 1e-6
        assert report.metrics["mismatch_abs"] < 1e-4
        assert 0 < report.recorder_s < report.rollout_s
        assert report.measures["reward/mixed_groups"] == report.metrics["trained_responses"] / 16
    assert any(report.metrics["trained_responses"] > 0 and report.metrics["grad_norm"] > 0 for report in run[1])


def test_a_repeated_rollout_is_the_same_work(run):
    repeats = read_json(run[0] / "repeats.json")["repeats"]
    assert [r["rl_step"] for r in repeats] == [0, 2]
    assert repeats[0]["same_tokens"]
    assert all(r["repeat_s"] > 0 for r in repeats)
    assert not tltlab.read(run[0] / "trace").outcomes.duplicated(["rl_step", "prompt_id", "sample"]).any()


def test_policies_in_force_are_written_down(run):
    policies = read_json(run[0] / "policies.json")
    assert [(p["rl_step"], p["name"]) for p in policies["policies"]] == list(enumerate(POLICIES))
    assert Policy.model_validate(policies["policies"][2]["policy"]).selector.kind == "beg-mab"
