"""The benchmarks of batch sizes and of systems: figures from made-up readings, recipes, and one engine."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from bench import systems
from bench.batch_size import TEXT, bench_batch_size, of_best, rows_of
from bench.harness import quiet, shown
from bench.models import made_model, own_model
from bench.systems import FAST, FULL, bench_systems, recipe_for
from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.planning.execution import missing_part
from tltlab.planning.systems import SYSTEMS
from tltlab.runtime.models.make import Size


def visits(tokens_per_s, picks, rounds=8):
    """Visits at so many tokens per second, give or take one in a hundred."""
    noise = np.random.default_rng(int(tokens_per_s)).normal(1, 0.01, rounds)
    return [
        {"tokens_per_s": tokens_per_s * each, "drafts": 10, "accepted": 20, "ran": Counter({picks: 9, "none": 1})}
        for each in noise
    ]


def test_a_policy_is_held_against_the_best_fixed_one():
    paces = {"none": (500, "none"), "ngram:2": (600, "ngram:2"), "bandit": (400, "ngram:8")}
    found = rows_of({name: visits(*each) for name, each in paces.items()}, ["none", "ngram:2"])
    plain, fixed, bandit = found
    assert plain["speed_up"] is plain["of_best"] is fixed["of_best"] is None
    assert fixed["speed_up"]["low"] < 1.2 < fixed["speed_up"]["high"] * 1.02
    assert [row["best"] for row in found] == [False, True, False]
    assert bandit["of_best"]["ratio"] == pytest.approx(400 / 600, rel=0.02)
    assert (bandit["picks"], bandit["picked"], bandit["accept_length"]) == ("ngram:8", 0.9, 3.0)
    text = shown({"rounds": 8, "hardware": "here", "rows": [{"batch": 4, **row} for row in found]}, TEXT)
    assert "ngram:8" in text.splitlines()[-1]


def test_other_rounds_name_the_best_fixed_policy():
    # By chance each wins its own round; chosen in hindsight the policy would look behind, yet all are alike.
    assert of_best(np.ones(2), np.array([[1.1, 1.0], [1.0, 1.1]]))["ratio"] == 1.0


def test_systems_and_folders_are_checked_before_an_engine(tmp_path):
    with refused(ConfigError, naming=("rlhfuse", "log-probs")):
        bench_systems(["rlhfuse"], FULL, model=None, out=tmp_path, seed=0, progress=quiet)
    (tmp_path / "runs").mkdir()
    with refused(ConfigError, naming=("runs", "--out")):
        bench_systems(["verl"], FULL, model=None, out=tmp_path, seed=0, progress=quiet)
    model = tmp_path / "models" / "subset-sum-tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    assert own_model(None, tmp_path, size="tiny", progress=quiet) == model
    with refused(ConfigError, naming=("train.jsonl",)):
        own_model(model, tmp_path, size="tiny", progress=quiet)


def test_rewards_are_compared_seed_by_seed():
    rows = [
        {"system": system, "seed": seed, "heldout_reward": reward}
        for system, rewards in (("tlt", (0.5, 0.5, 0.5)), ("verl", (0.4, 0.42, 0.44)))
        for seed, reward in enumerate(rewards)
    ]
    (found,) = systems.rewards([*rows, {"system": "das", "why_not": "no engine"}], "verl", 10_000)
    assert (found["system"], found["over"], found["seeds"], found["equal"]) == ("tlt", "verl", 3, False)
    assert found["difference"]["estimate"] == pytest.approx(0.08)


def test_every_system_that_can_run_is_a_recipe(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "report.json").write_text(json.dumps({"reward": "a:b"}))
    (model / "train.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(60)))
    sizes = replace(FULL, prompts_per_step=4, group_size=4)

    def recipe(name):
        return recipe_for(sizes, SYSTEMS[name], model, tmp_path / "head", tmp_path / "runs" / name, 0)

    with refused(ConfigError, naming=("open-r1", "cluster.gpus_per_node")):
        recipe("open-r1")
    recipes = {
        name: recipe(name) for name, s in SYSTEMS.items() if missing_part(s) is None and name not in ("open-r1", "pat")
    }
    assert len((tmp_path / "runs" / "prompts.jsonl").read_text().splitlines()) == 8
    kinds = {name: recipe.drafter.schedule.kind for name, recipe in recipes.items() if recipe.drafter is not None}
    static = ("vllm-dynamic", "vllm-static", "vllm-adaptive", "sglang-adaptive", "sglang-tiers", "hedgespec")
    assert kinds == {"tlt": "always"} | dict.fromkeys(static, "never")
    for name, ours in recipes.items():
        depth = max(s.draft_depth for s in ours.read_policy().strategies)
        assert (ours.rollout.system, ours.rollout.max_draft_depth, ours.checkpoint.every) == (name, depth, 0)
    assert len({recipe.rollout.model_dump_json() for recipe in recipes.values()}) == len(recipes)


@pytest.mark.engine
def test_forced_batches_run_every_policy(random_model):
    found = bench_batch_size(
        random_model, ["ngram:8", "beg-mab"], [1, 6], rounds=1, tokens=32, warm_up=4, seed=0, progress=quiet
    )
    rows = {(row["batch"], row["policy"]): row for row in found["rows"]}
    assert set(rows) == {(batch, name) for batch in (1, 6) for name in ("none", "ngram:8", "beg-mab")}
    for (_, name), row in rows.items():
        assert row["tokens_per_s"] > 0
        assert (row["of_best"] is None) == (name != "beg-mab")


@pytest.mark.engine
@pytest.mark.usefixtures("one_ray")
def test_what_cannot_run_is_named_beside_what_ran(tmp_path):
    size = Size(hidden=64, layers=1, mlp=64, steps=40, measured_prompts=2, samples_per_prompt=2)
    model = made_model(tmp_path / "model", quiet, size=size)
    sizes = replace(FAST, steps=3, max_response_tokens=32, heldout=4)
    names = ["rlhfuse", "open-r1", "verl"]
    found = bench_systems(names, sizes, model=model, out=tmp_path / "out", seed=0, progress=quiet)
    rows = {row["system"]: row for row in found["rows"]}
    assert "log-probs" in rows["rlhfuse"]["why_not"]
    assert "cluster.gpus_per_node" in rows["open-r1"]["why_not"]
    assert rows["verl"]["why_not"] is None
    assert all(rows["verl"][figure] > 0 for figure in ("rollout_s", "predicted_s", "tokens_per_s", "step_s"))
    assert found == json.loads((tmp_path / "out" / "systems.json").read_text())
