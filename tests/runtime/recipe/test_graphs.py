"""What a recipe's engines are built for: drafters, depths and graphs of its policy, refused where they are too many."""

import json
from dataclasses import asdict, replace

import pytest

from tests.refused import refused
from tltlab.drafters.specs import NETWORK, TEXT
from tltlab.errors import ConfigError
from tltlab.runtime.engine.graphs import GIB, CapturedGraphs
from tltlab.runtime.recipe.dry_run import plan_of
from tltlab.runtime.recipe.engines import drafters_of, engines_of
from tltlab.runtime.recipe.recipe import load_recipe
from tltlab.runtime.run.rows import run_manifest

RECIPE = "qwen2.5-1.5b-gsm8k"


def build(*overrides, recipe=RECIPE):
    return engines_of(load_recipe(recipe, ["cluster.gpu=H100", *overrides]))


@pytest.mark.parametrize(
    ("overrides", "depth", "drafters", "runner", "any_lengths"),
    [
        (("rollout.policy=none",), 0, [], "V2", False),
        (("rollout.policy=table", "rollout.max_draft_depth=16"), 8, ["ngram"], "V1", True),
        (("rollout.policy=table", 'drafter={"name":"ngram","fallback":null}'), 8, ["ngram"], "V2", False),
        # A fallback drafts without a network.
        (("rollout.policy=table", 'drafter={"name":"ngram","fallback":"suffix"}'), 8, ["ngram", "suffix"], "V1", True),
    ],
)
def test_engines_are_built_for_their_policy(overrides, depth, drafters, runner, any_lengths):
    built = build(*overrides)
    assert (built.max_draft_depth, sorted(built.drafters)) == (depth, drafters)
    assert (built.graphs.runner, built.graphs.any_lengths) == (runner, any_lengths)
    assert depth or not built.graphs.without_full_graph()


@pytest.mark.parametrize(("gpu", "fact"), [("A100", "K = 8 alone"), ("H100", "K in 0, 1, 2, 4, 8")])
def test_without_flash_attention_3_adaptivity_costs_graphs(gpu, fact):
    notes = plan_of(load_recipe(RECIPE, [f"cluster.gpu={gpu}"])).notes
    assert any("V1 runner" in note and fact in note for note in notes)


def test_the_users_graphs_are_left_alone():
    for override in (
        "rollout.graphs=stock", "rollout.vllm.enforce_eager=true",
        'rollout.vllm.compilation_config={"cudagraph_mode":"PIECEWISE"}',
    ):  # fmt: skip
        built = build(override)
        assert (built.graphs, built.max_draft_depth) == (None, 8)


def test_graphs_that_take_too_much_are_refused():
    taken = build().graph_bytes
    with refused(ConfigError, naming=("rollout.graphs", "rollout.graph_gib")):
        build("rollout.graph_gib=0.1")
    coarser = build(f"rollout.graph_gib={0.99 * taken / GIB}")
    assert coarser.graph_bytes < taken
    parts = [part for memory in plan_of(load_recipe(RECIPE)).memory for part in memory.parts]
    assert taken in [part.num_bytes for part in parts if part.name == "CUDA graphs"]


def test_a_run_shows_planned_and_captured_graphs():
    built = build()
    full = CapturedGraphs(runner="V1", mode="FULL", full=((9, None),), num_bytes=GIB)
    (sentence,) = built.sentences(full)
    assert all(fact in sentence for fact in ("1 full", "0 piecewise", "1.00 GiB", "V1 runner", "FULL"))
    fallen_back = CapturedGraphs(runner="V1", mode="FULL_AND_PIECEWISE", full=((9, 8),), piecewise=(9,))
    assert "drafts of 8 tokens" in list(built.sentences(fallen_back))[1]
    assert not list(built.sentences(CapturedGraphs(runner="V1", mode="NONE")))
    told = built.as_json([full])
    assert told["planned"]["full"] == [[tokens, None] for tokens, _ in built.graphs.full_graphs()]
    assert told["captured"] == [asdict(full)]


def test_trace_of_run_states_what_its_drafters_are(tmp_path):
    policy = {"selector": {"kind": "fixed", "strategy": "recent:4"}, "drafters": {"recent": {"kind": "suffix"}}}
    (tmp_path / "policy.json").write_text(json.dumps(policy | {"format": "tltlab-policy", "version": 1}))
    both = 'rollout.drafters={"both":{"kind":"hybrid","first":"ngram"}}'
    recipe = load_recipe(RECIPE, [f"rollout.policy={tmp_path / 'policy.json'}", both, "cluster.gpu=H100"])
    drafters = drafters_of(recipe, recipe.read_policy())
    hybrid = replace(NETWORK, needs_text=True, draws_trees=False)
    assert run_manifest(recipe, "run", drafters).drafters == {"recent": TEXT, "both": hybrid}
