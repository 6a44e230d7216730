"""What a recipe's engines are built for: drafters, depths and graphs of its policy, refused where they are too many."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.runtime.engine.graphs import GIB, CapturedGraphs
from tltlab.runtime.recipe.dry_run import plan_of
from tltlab.runtime.recipe.graphs import EngineBuild, engines_of
from tltlab.runtime.recipe.recipe import load_recipe

RECIPE = "qwen2.5-1.5b-gsm8k"


def build(*overrides: str, recipe: str = RECIPE) -> EngineBuild:
    return engines_of(load_recipe(recipe, ["cluster.gpu=H100", *overrides]))


def test_plain_decoding_is_built_without_speculation_so_that_every_batch_has_a_full_graph():
    built = build("rollout.policy=none")
    assert (built.drafters, built.max_draft_depth) == ({}, 0)
    assert built.graphs is not None
    assert built.graphs.runner == "V2"
    assert not built.graphs.without_full_graph()


def test_a_learned_drafter_alone_takes_the_v2_runner_and_a_fallback_that_drafts_without_a_network_the_v1_runner():
    alone = build("rollout.policy=table", 'drafter={"name":"ngram","fallback":null}')
    assert alone.graphs.runner == "V2"  # type: ignore[union-attr]
    built = build("rollout.policy=table", 'drafter={"name":"ngram","fallback":"suffix"}')
    assert sorted(built.drafters) == ["ngram", "suffix"]
    assert built.graphs is not None
    assert (built.graphs.runner, built.graphs.any_lengths) == ("V1", True)


def test_engines_are_as_deep_as_their_policy_and_have_the_drafters_it_names():
    built = build("rollout.policy=table", "rollout.max_draft_depth=16")
    assert built.max_draft_depth == 8
    assert list(built.drafters) == ["ngram"]


def test_without_flash_attention_3_the_cost_of_adaptivity_is_said():
    notes = plan_of(load_recipe(RECIPE, ["cluster.gpu=A100"])).notes
    assert any("the V1 runner has them for K = 8 alone" in note for note in notes)
    notes = plan_of(load_recipe(RECIPE, ["cluster.gpu=H100"])).notes
    assert any("V1 runner, K in 0, 1, 2, 4, 8" in note for note in notes)


def test_what_the_user_says_of_graphs_is_left_alone():
    for override in (
        "rollout.graphs=stock", "rollout.vllm.enforce_eager=true",
        'rollout.vllm.compilation_config={"cudagraph_mode":"PIECEWISE"}',
    ):  # fmt: skip
        built = build(override)
        assert (built.graphs, built.max_draft_depth) == (None, 8)


def test_graphs_that_take_too_much_are_refused_with_the_field_that_says_how_much():
    taken = build().graph_bytes
    assert taken is not None
    with refused(ConfigError, naming=("rollout.graphs", "rollout.graph_gib")):
        build("rollout.graph_gib=0.1")
    coarser = build(f"rollout.graph_gib={0.99 * taken / GIB}")
    assert coarser.graph_bytes is not None
    assert coarser.graph_bytes < taken
    parts: list[Any] = [part for memory in plan_of(load_recipe(RECIPE)).memory for part in memory.parts]
    assert taken in [part.num_bytes for part in parts if part.name == "CUDA graphs"]


def test_a_run_says_what_was_captured_and_where_vllm_took_something_else():
    built = build()
    full = CapturedGraphs(runner="V1", mode="FULL", full=((9, None),), num_bytes=GIB)
    (sentence,) = built.sentences(full)
    assert sentence == "an engine has 1 full and 0 piecewise CUDA graphs in 1.00 GiB (V1 runner, FULL)"
    fallen_back = CapturedGraphs(runner="V1", mode="FULL_AND_PIECEWISE", full=((9, 8),), piecewise=(9,))
    assert "but for drafts of 8 tokens iterations run in piecewise graphs" in list(built.sentences(fallen_back))[1]
    assert not list(built.sentences(CapturedGraphs(runner="V1", mode="NONE")))


def test_a_run_tells_the_plan_and_what_was_captured():
    built = build()
    captured = CapturedGraphs(runner="V1", mode="FULL", full=((9, None),), num_bytes=1)
    told = built.as_json([captured])
    assert told["planned"]["full"] == [[tokens, None] for tokens, _ in built.graphs.full_graphs()]  # type: ignore[union-attr]
    assert told["captured"] == [asdict(captured)]
    assert told["captured"][0]["full"] == ((9, None),)
