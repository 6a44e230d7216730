"""The experiment systems: every row of the table runs or says why not, and what runs is a recipe of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tltlab.errors import ConfigError
from tltlab.experiments import find
from tltlab.experiments.systems import (
    CHANGES,
    ONE_STEP_OFF,
    WHY_NOT,
    SystemsSettings,
    policy_of,
    recipe_for,
    run,
)
from tltlab.planning.systems import SYSTEMS


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "report.json").write_text(json.dumps({"reward": "a:b"}))
    (tmp_path / "model" / "train.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(60)))
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


def test_every_system_runs_or_says_why_not():
    assert not CHANGES.keys() & WHY_NOT.keys()
    assert CHANGES.keys() | WHY_NOT.keys() == {*SYSTEMS, ONE_STEP_OFF}
    assert find("systems").load().run is run


def test_each_that_runs_is_a_recipe_and_no_two_are_the_same(model: Path, tmp_path: Path):
    settings = SystemsSettings(prompts=4, group_size=4, cap=64)
    recipes = {
        name: recipe_for(settings, name, model, tmp_path / "head", tmp_path / "runs" / name, 0) for name in CHANGES
    }
    assert len((tmp_path / "runs" / "prompts.jsonl").read_text().splitlines()) == 8
    assert recipes["copris"].rollout.partial.concurrency == 24
    assert (recipes["areal"].rollout.staleness, recipes[ONE_STEP_OFF].rollout.one_step_off) == (1, True)
    assert recipes["spec-rl-exact"].rollout.reuse.residual == "exact"
    drafting = {name for name in CHANGES if policy_of(name) is not None}
    assert drafting == {"tlt", "tlt-base", "vllm-dynamic", "vllm-static", "das", "seer-drafts", "histospec"}
    kinds = {name: recipe.drafter.schedule.kind for name, recipe in recipes.items() if recipe.drafter is not None}
    assert kinds == {"tlt": "always", "vllm-dynamic": "never", "vllm-static": "never"}
    for name in drafting:
        assert recipes[name].rollout.policy == str(tmp_path / "runs" / f"{name}.json")
        policy = recipes[name].read_policy()
        assert max(s.draft_depth for s in policy.strategies) == recipes[name].rollout.max_draft_depth
    assert len({recipe.rollout.model_dump_json() for recipe in recipes.values()}) == len(CHANGES)


def test_what_cannot_be_asked_for_is_a_sentence(model: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="only: no system named 'areol'; there are verl"):
        run(SystemsSettings(model=model, only=("areol",)), folder=tmp_path, seed=0, progress=print)
