"""Recipes that name a system of the literature: what it decides, and what in the recipe it does not go with."""

import json
from dataclasses import replace

import pytest

from tests.refused import refused
from tests.typed import typed
from tltlab.errors import ConfigError
from tltlab.files import write_json
from tltlab.planning.systems import SYSTEMS
from tltlab.policies.policy import load_policy
from tltlab.runtime.engine.environment import run_json
from tltlab.runtime.recipe.recipe import Recipe, load_recipe, resumed_recipe
from tltlab.runtime.recipe.sections import PartialConfig

RECIPE = """
reward = "tltlab.runtime.rollout.rewards:math"
[data]
train = "t.jsonl"
[rollout]
prompts_per_step = 10
group_size = 8
policy = "beg-mab"
max_draft_depth = 4
max_response_tokens = 64
"""
HEAD = 'drafter={"checkpoint":"head","name":"eagle"}'
GPUS = 'cluster={"gpus_per_node":3,"gpu":"H100"}'


@pytest.fixture
def recipe_file(tmp_path, monkeypatch, random_model):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.jsonl").write_text('{"prompt": "w1 w2", "answer": "2"}\n' * 10)
    (tmp_path / "r.toml").write_text(f'model = "{random_model}"\n{RECIPE}')
    return tmp_path / "r.toml"


@pytest.mark.parametrize(
    ("system", "overrides", "decided"),
    [
        ("copris", [], {"policy": "none", "max_draft_depth": 0}),
        ("copris", ["rollout.partial.concurrency=120", "rollout.group_size=8"], {"max_draft_depth": 0}),
        ("april", [], {"partial": PartialConfig(issue=1.5).model_dump()}),
        ("rollpacker", ["train.correction=none"], {"max_draft_depth": 0, "workload": None}),
        ("dler", ["rollout.max_response_tokens=80"], {"max_response_tokens": 10, "group_size": 8, "workload": "dler"}),
        ("brorl", ["rollout.prompts_per_step=12"], {"prompts_per_step": 3, "group_size": 32, "workload": "brorl"}),
        ("spec-rl", [], {"reuse": {"leniency": 1.6487212707001282}}),
        ("areal", [], {"staleness": 4, "one_step_off": False}),
        ("one-step-off", [], {"staleness": 0, "one_step_off": True}),
        ("histospec", [], {"policy": "system", "max_draft_depth": 16}),
        ("tlt-base", ["rollout.max_draft_depth=9"], {"policy": "system", "max_draft_depth": 9}),
        ("verl", [HEAD], {"policy": "none", "max_draft_depth": 1, "schedule": "never"}),
        ("tlt", [HEAD], {"policy": "system", "max_draft_depth": 8, "schedule": "always"}),
        ("vllm-static", [HEAD], {"max_draft_depth": 3, "schedule": "never"}),
        ("open-r1", [GPUS], {"policy": "none"}),
        ("seer", [], {"planner": "buffer", "policy": "system", "tail_shape": None}),
        ("pat", ["rollout.tail_shape=1x2"], {"planner": "gather"}),
        ("rhymerl", ["rollout.placement=rank_groups"], {"one_step_off": True, "placement": "rank_groups"}),
        ("streamrl", [], {"one_step_off": False, "placement": "two_pools"}),
        ("das", ["rollout.placement=round_robin"], {"placement": "round_robin"}),
    ],
)
def test_a_system_over_a_recipe_decides(recipe_file, system, overrides, decided):
    """The file's own policy and depth give way."""
    recipe = load_recipe(recipe_file, [f"rollout.system={system}", *overrides])
    fields = recipe.model_dump(mode="json")
    schedule = {} if recipe.drafter is None else {"schedule": fields["drafter"]["schedule"]["kind"]}
    assert decided.items() <= (fields["rollout"] | schedule).items()
    if recipe.rollout.policy == "system":
        assert recipe.read_policy().provenance["system"] == system
    again = Recipe.model_validate(json.loads(recipe.model_dump_json()))
    assert again == recipe, "what is stored is resolved already"


@pytest.mark.parametrize(
    ("overrides", "facts"),
    [
        (["copri"], ("rollout.system", "'copri'", "did you mean 'copris'")),
        (["dvi"], ("rollout.system", "dvi", "first layers")),
        (["spec-rl-exact"], ("rollout.system", "spec-rl-exact", "old distribution")),
        (["verl", "rollout.reuse.residual=exact"], ("rollout.reuse.residual", "no such field")),
        (["pat"], ("pat", "rollout.tail_shape")),
        (["seer", "rollout.planner=rebalance"], ("rollout.planner", "rebalance", "seer", "buffer")),
        (["copris", "rollout.policy=ngram:4"], ("rollout.policy", "ngram:4", "copris")),
        (["copris", "rollout.partial.concurrency=9"], ("rollout.partial", 9, "copris", 120)),
        (["april", "train.correction=none"], ("rollout.partial", "train.correction")),
        (["brorl"], ("brorl", "rollout.prompts_per_step", 10, 4)),
        (["brorl", "rollout.group_size=500", "rollout.prompts_per_step=4"], ("brorl", "rollout.group_size", 500)),
        (["verl", "rollout.partial.max_age=2"], ("concurrency", "issue", "samples")),
        (["verl", 'rollout.partial={"concurrency":9,"leftover":"restart"}'], ("leftover", "restart")),
        (["dler", "train.overlong=keep"], ("train.overlong", "keep", "dler", "zero")),
        (["verl", "rollout.workload=dler"], ("rollout.workload", "dler", "rollout.system")),
        (["areal", "rollout.staleness=1"], ("rollout.staleness", 1, "areal", 4)),
        (["histospec", "rollout.max_draft_depth=8"], ("rollout.max_draft_depth", 8, "histospec", 16)),
        (["das", 'rollout.drafters={"suffix":{"kind":"suffix","window":3}}'], ("rollout.drafters.suffix", "das")),
        (["das", GPUS.replace(',"gpu":"H100"', "")], ("das", "cluster.gpu")),
        (["tlt"], ("tlt", "[drafter]")),
        (["vllm-static"], ("vllm-static", "[drafter]")),
        (["vllm-static", "drafter={}"], ("vllm-static", "drafter.checkpoint")),
        (["tlt", HEAD, "drafter.schedule.kind=gated"], ("drafter.schedule.kind", "gated", "tlt", "always")),
        (["streamrl", "rollout.placement=round_robin"], ("rollout.placement", "round_robin", "two_pools")),
        (["streamrl", 'cluster={"placement":"colocated"}'], ("streamrl", "cluster.placement")),
        (["open-r1"], ("open-r1", "cluster.gpus_per_node", "cluster.placement")),
        (["areal", HEAD], ("rollout.staleness", "[drafter]")),
    ],
)
def test_what_system_does_not_go_with_is_refused(recipe_file, overrides, facts):
    with refused(ConfigError, naming=facts):
        load_recipe(recipe_file, [f"rollout.system={overrides[0]}", *overrides[1:]])


def test_system_in_file_contradicts_what_stands_beside_it(recipe_file):
    recipe_file.write_text(recipe_file.read_text() + 'system = "copris"\n')
    with refused(ConfigError, naming=("rollout.policy", "beg-mab", "copris")):
        load_recipe(recipe_file)
    assert load_recipe(recipe_file, ["rollout.system=null"]).rollout.policy == "beg-mab"
    with refused(ConfigError, naming=("'system'",)):
        load_recipe(recipe_file, ["rollout.system=null", "rollout.policy=system"]).read_policy()


def test_resumed_run_keeps_policy_that_its_system_had(recipe_file, tmp_path, monkeypatch):
    run = tmp_path / "run"
    recipe = load_recipe(recipe_file, ["rollout.system=das"])
    write_json(run / "run.json", run_json(recipe))
    recipe.read_policy().write(run / "policy.json")
    again = resumed_recipe(run)
    assert again.rollout.model_copy(update={"policy": "system"}) == recipe.rollout
    assert again.read_policy() == recipe.read_policy()
    # The row of a later version.
    monkeypatch.setitem(SYSTEMS, "das", replace(SYSTEMS["das"], budget=None))
    assert resumed_recipe(run).read_policy() == load_policy(run / "policy.json") != recipe.read_policy()


def dry_run(capsys, *overrides):
    code, out, err = typed(capsys, "train", "r.toml", *overrides, "--dry-run")
    return code, err if code else out


@pytest.mark.parametrize(
    ("system", "settings", "strategies", "says"),
    [
        (
            "copris",
            {"rollout.max_draft_depth": 0, "rollout.partial.concurrency": 120},
            ["none"],
            "rollout.partial.concurrency = 120",
        ),
        ("das", {}, ["suffix:8"], "drafts suffix:8"),
        ("areal", {"rollout.max_draft_depth": 0, "rollout.staleness": 4}, ["none"], "note: areal: an RL step"),
    ],
)
def test_a_dry_run_shows_what_a_system_became(recipe_file, capsys, system, settings, strategies, says):
    code, text = dry_run(capsys, f"rollout.system={system}")
    assert (code, says in text, SYSTEMS[system].title in text) == (0, True, True)
    _, text = dry_run(capsys, f"rollout.system={system}", "--json")
    plan = json.loads(text)["system"]
    assert (plan["name"], plan["settings"], plan["strategies"]) == (system, settings, strategies)
