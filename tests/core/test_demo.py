"""The whole loop, as `make demo` runs it, with less of everything."""

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

import tltlab
from tests.refused import refused
from tltlab.cli.app import main
from tltlab.cli.demo import make_room
from tltlab.demo import FAST, FULL, demo_recipe
from tltlab.errors import ConfigError
from tltlab.files import read_json
from tltlab.policies.policy import load_policy

pytestmark = pytest.mark.timeout(800)


@pytest.fixture(scope="module")
def demo(one_ray, tmp_path_factory):
    """Its folder and its summary, with one engine where it has two, and fewer prompts and steps."""
    from tltlab.runtime.models.make import SIZES
    from tltlab.runtime.models.runs import Sizes

    def smaller(*args):
        recipe = demo_recipe(*args)
        rollout = recipe.rollout.model_copy(update={"num_workers": 1, "prompts_per_step": 10})
        return recipe.model_copy(update={"rollout": rollout})

    setting = replace(
        FAST,
        size=replace(SIZES["tiny"], steps=200, measured_prompts=4),
        plain_steps=1,
        tuned_steps=1,
        adaptive_steps=1,
        heldout=48,
        drafter=Sizes(
            workers=2, prompts_per_step=8, max_response_tokens=256, tokens_per_update=512, steps=3, heldout=0,
            warm_up_texts=64, warm_up_length=1.8, warm_up_updates=100,
        ),
    )  # fmt: skip
    out, printed = tmp_path_factory.mktemp("demo") / "out", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr("tltlab.demo.demo_recipe", smaller)
        patch.setattr("tltlab.demo.FAST", setting)
        with pytest.raises(SystemExit) as ended:
            main(["demo", "--fast", "--out", str(out), "--json"])
    assert not ended.value.code
    shown = json.loads(printed.getvalue())
    assert shown == read_json(out / "summary.json")
    return out, shown


@pytest.mark.engine
def test_the_summary_tells_the_whole_story(demo):
    out, summary = demo
    assert summary["grpo_steps"] == len(summary["steps"]) >= 4
    assert 0 <= summary["reward_first"] <= 1
    assert 0 <= summary["reward_last"] <= 1
    assert summary["heldout_prompts"] == 48
    assert summary["mean_accept_length"] > 1
    assert {step["policy"] for step in summary["steps"]} == {"none", "explore", "tuned", "adaptive"}
    for step in summary["steps"]:
        assert step["predicted_rollout_s"] > 0
        assert 0 < step["recorder_s"] < step["rollout_s"]
    assert summary["verify"]["num_steps"] == summary["grpo_steps"]
    assert summary["verify"]["repeat_spread"] > 0
    assert summary["versions"]["vllm"].startswith("0.32")
    for name in ("trace", "policy", "costs", "timeline"):
        assert (out / summary[name]).exists(), name
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")
    events = read_json(out / "timeline.json")["traceEvents"]
    assert {"M", "X"} <= {event["ph"] for event in events}
    trace = tltlab.read(out)
    result = tltlab.sim.simulate(trace, out / "policy.json", placement="recorded")
    assert result.summary["num_responses"] == len(trace.outcomes)
    assert result.summary["regret"] >= 0


@pytest.mark.engine
def test_the_tuned_steps_ran_the_policy_file(demo):
    out, summary = demo
    policy = load_policy(out / summary["policy"])
    assert policy.provenance["candidates"] > 10
    trace = tltlab.read(out)
    tuned = [step["rl_step"] for step in summary["steps"] if step["policy"] == "tuned"]
    chosen = trace.decisions[trace.decisions["rl_step"].isin(tuned)]
    asked = {(s.drafter, s.draft_depth) for s in policy.strategies}
    assert set(zip(chosen["drafter"], chosen["draft_depth"], strict=True)) <= asked
    explored = [step["rl_step"] for step in summary["steps"] if step["policy"] == "explore"]
    deciding = [*explored, *(tuned if any(s.speculates for s in policy.strategies) else [])]
    assert set(deciding) <= set(trace.decisions["rl_step"])
    assert trace.decisions[trace.decisions["rl_step"].isin(explored)]["draft_depth"].nunique() > 1


@pytest.mark.engine
def test_training_moved_the_policy_without_harm(demo):
    from safetensors.numpy import load_file

    out, summary = demo
    assert tltlab.read(out).steps["drift_kl"].max() > 0
    first, last = (load_file(out / folder / "model.safetensors") for folder in ("model", "checkpoints/final"))
    assert any((first[name] != last[name]).any() for name in first)
    # Five standard errors of the difference of two shares among so few prompts, each with a success more than it had.
    count = summary["heldout_prompts"]
    share = (summary["reward_first"] + summary["reward_last"]) / 2 + 1 / count
    assert summary["reward_last"] >= summary["reward_first"] - 5 * (2 * share * (1 - share) / count) ** 0.5


@pytest.mark.engine
def test_a_drafter_learned_on_idle_workers(demo):
    out, summary = demo
    drafter = summary["drafter"]
    assert drafter["frozen_accept_length"] > 1.5
    # Both drafted on the same responses: equal drafts would be those of a drafter that never changed. Which of the two
    # is ahead after some fifty updates is chance; a drafter that training broke has next to nothing accepted.
    assert drafter["adaptive_accept_length"] - 1 > 0.3 * (drafter["frozen_accept_length"] - 1)
    assert drafter["updates"] > 0
    trace = tltlab.read(out / drafter["run"])
    assert trace.manifest.num_workers == 2
    assert trace.spot_training["updates"].sum() >= drafter["updates"]
    assert {"spot_train", "idle"} <= set(trace.spans["kind"])
    assert trace.acceptance["drafter_age"].max() > 0
    assert (out / drafter["timeline"]).read_bytes().startswith(b"\x89PNG")
    assert drafter["verify"]["num_steps"] == len(trace.rl_steps)


@pytest.mark.parametrize("setting", [FAST, FULL])
def test_every_setting_makes_a_recipe(setting):
    reward = {"reward": "tltlab.runtime.models.tasks:subset_sum_reward"}
    recipe = demo_recipe(Path("model"), setting, reward, seed=0)
    assert recipe.eval.num_prompts == setting.heldout


def test_an_earlier_demo_alone_is_moved_aside(tmp_path):
    (tmp_path / "demo" / "model").mkdir(parents=True)
    (tmp_path / "demo" / "model" / "report.json").touch()
    make_room(tmp_path / "demo")
    assert not (tmp_path / "demo").exists()
    assert (tmp_path / "demo.1" / "model" / "report.json").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with refused(ConfigError):
        make_room(tmp_path / "mine")
