"""A policy as vLLM's settings: depths by batch, graphs as vLLM itself would capture and use them, and their memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tltlab.cli.app import main
from tltlab.drafters.specs import SYSTEM_DRAFTERS, LearnedSpec
from tltlab.errors import ConfigError
from tltlab.planning.graph_pool import GraphPool
from tltlab.policies.policy import Activation, ExploreSpec, FixedSpec, Policy, TableRow, TableSpec, load_policy
from tltlab.runtime.cli.export_policy import graph_pool
from tltlab.runtime.engine.graphs import (
    GIB,
    GraphPlan,
    check_memory,
    memory_bytes,
    plan_graphs,
    vllm_batches,
)
from tltlab.runtime.engine.vllm.dispatch import captured_bytes, keep_captured_bytes
from tltlab.strategy import Strategy

POOL = GraphPool(num_layers=32, hidden_size=4096, vocab_size=128_256, context_tokens=1, bytes_per_layer=1e6)
EAGLE = {"learned": LearnedSpec(method="eagle", model="heads/eagle")}


def table(*rows: tuple[int, int], drafter: str = "learned", **also: Any) -> Policy:
    """Chains of one drafter: (min_batch, K) each."""
    strategies = [TableRow(min_batch=n, strategy=Strategy.chain(drafter, k)) for n, k in rows]
    return Policy(selector=TableSpec(rows=tuple(strategies)), drafters=EAGLE, **also)


def vllms_own(plan: GraphPlan) -> Any:
    """vLLM's `CudaGraphManager` of these settings: its candidates, with nothing captured."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    settings = plan.settings()
    speculative = settings.get("speculative_config", {})
    most = speculative.get("num_speculative_tokens", 0)
    schedule = speculative.get("num_speculative_tokens_per_batch_size")
    manager = CudaGraphManager.__new__(CudaGraphManager)
    manager.vllm_config = SimpleNamespace(
        speculative_config=SimpleNamespace(
            uses_dynamic_speculative_decoding=lambda: schedule is not None,
            num_speculative_tokens_per_batch_size=schedule,
        ),
        num_speculative_tokens=most,
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
    )
    manager.compilation_config = SimpleNamespace(**settings["compilation_config"])
    manager.max_num_reqs = settings["max_num_seqs"]
    manager.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    manager.decode_query_len, manager.varlen_decode = most + 1, False
    manager.lora_capture_cases, manager._lora_dispatch_map, manager.ubatch_runner = [0], {}, None
    manager._candidates, manager._capture_descs, manager._graphs_captured = {}, {}, True
    manager._init_candidates()
    return manager


@pytest.mark.parametrize("policy", ["none", "fixed", "table", "beg-mab", "explore", table((1, 7), (5, 3), (20, 0))])
@pytest.mark.parametrize("fill", [False, True])
def test_the_graphs_are_those_that_vllm_captures_and_finds_for_each_batch(policy: str | Policy, fill: bool):
    from vllm.config.compilation import CUDAGraphMode

    plan = plan_graphs(load_policy(policy), 40, fill=fill)
    manager = vllms_own(plan)
    full = {(d.num_tokens, d.uniform_token_count - 1) for d in manager._capture_descs[CUDAGraphMode.FULL]}
    assert set(plan.full_graphs()) == full
    assert [d.num_tokens for d in manager._capture_descs[CUDAGraphMode.PIECEWISE]][::-1] == list(plan.capture_sizes)

    modes = {(n, k): manager.dispatch(n, n * (k + 1), k + 1, 0).cg_mode for n, k in plan.may_run}
    assert {pair for pair, mode in modes.items() if mode == CUDAGraphMode.PIECEWISE} == set(plan.without_full_graph())
    assert set(modes.values()) <= {CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE}
    assert not (fill and plan.without_full_graph())


WHOLE_SUFFIX = {"suffix": SYSTEM_DRAFTERS["suffix-decoding"]}
SUFFIX = Policy(selector=FixedSpec(strategy=Strategy.chain("suffix", 8)))


def exported(policy: Policy, folder: Path, capsys: pytest.CaptureFixture[str], *more: object) -> tuple[int, Any, str]:
    policy.write(folder / "policy.json")
    with pytest.raises(SystemExit) as ended:
        main(["export-policy", str(folder / "policy.json"), "--max-batch", "32", "--json", *map(str, more)])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), json.loads(out) if out else None, err


@pytest.mark.parametrize(
    "policy",
    ["none", "fixed", "table", "beg-mab", "das", SUFFIX, SUFFIX.model_copy(update={"drafters": WHOLE_SUFFIX})],
)
def test_stock_vllm_takes_what_the_command_writes(
    policy: str | Policy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Through vLLM's own argument parser and its own checks; a suffix drafter's settings are all there."""
    from vllm.config import SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    code, told, _ = exported(load_policy(policy), tmp_path, capsys)
    assert code == 0
    flags = [f"--{name.replace('_', '-')}={json.dumps(value)}" for name, value in told["vllm"].items()]
    parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(flags)
    assert parsed.max_num_seqs == 32
    if "speculative_config" in told["vllm"]:
        config = SpeculativeConfig(**parsed.speculative_config)
        assert config.method in ("ngram", "suffix")
        # Stock suffix decoding asserts that K never varies.
        assert config.method == "ngram" or config.num_speculative_tokens_per_batch_size is None
        assert config.num_speculative_tokens <= config.suffix_decoding_max_tree_depth


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (load_policy("beg-mab-suffix"), "one drafter per engine, and the policy drafts with suffix and ngram"),
        (load_policy("beg-mab-learned"), "one drafter per engine"),
        (table((1, 8), (5, 0), drafter="suffix"), "suffix decoding has one K for all batches"),
        (
            SUFFIX.model_copy(update={"activation": Activation(max_requests=16)}),
            "suffix decoding has one K for all batches",
        ),
        (Policy(selector=FixedSpec(strategy=Strategy.chain("learned", 2))), "does not say what its drafter learned is"),
    ],
)
def test_what_stock_vllm_would_refuse_or_die_of_is_refused(
    policy: Policy, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    code, told, err = exported(policy, tmp_path, capsys, "--out", tmp_path / "vllm.json")
    assert (code, told, err.count("\n")) == (2, None, 1)
    assert why in err
    assert not (tmp_path / "vllm.json").exists()
    code, told, _ = exported(policy, tmp_path, capsys, "--model-shape", "Llama-3-8B")
    assert (code, told["vllm"]) == (0, None)
    assert told["predicted_graph_gib"] > 0
    assert why in told["notes"][-1]


@pytest.mark.parametrize("name", ["fixed", "table", "beg-mab"])
def test_vllm_takes_the_schedule_and_has_every_depth_in_it(name: str):
    from vllm.config import CompilationConfig, SpeculativeConfig
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    plan = plan_graphs(load_policy(name), 64)
    config = SpeculativeConfig(**plan.settings()["speculative_config"])
    graphs = CompilationConfig(**plan.settings()["compilation_config"])
    assert graphs.cudagraph_capture_sizes == list(plan.capture_sizes)
    assert config.num_speculative_tokens == plan.depths[-1]
    if plan.schedule:
        lookup = build_dynamic_sd_schedule_lookup(
            config.num_speculative_tokens_per_batch_size, plan.max_num_seqs, config.num_speculative_tokens
        )
        assert set(lookup[1:]) == set(plan.depths)
        if not plan.chosen_at_run_time:
            assert set(enumerate(lookup[1:], start=1)) == set(plan.may_run)


def test_a_table_is_vllms_schedule():
    plan = plan_graphs(table((1, 8), (5, 2), activation=Activation(max_requests=16, hold_iterations=0)), 64)
    assert plan.schedule == ((1, 4, 8), (5, 16, 2), (17, 64, 0))
    assert plan.settings()["speculative_config"] == {
        "method": "eagle",
        "model": "heads/eagle",
        "num_speculative_tokens": 8,
        "num_speculative_tokens_per_batch_size": [[1, 4, 8], [5, 16, 2], [17, 64, 0]],
    }


def test_capture_sizes_are_the_buckets_own_and_equal_sizes_are_shared():
    plan = plan_graphs(table((1, 7), (5, 3), drafter="ngram"), 8)
    assert plan.asked == ((1, 7), (2, 7), (4, 7), (8, 3))
    assert plan.capture_sizes == (8, 16, 32)
    assert plan.settings()["compilation_config"]["max_cudagraph_capture_size"] == 32
    # Each is captured for each depth, whatever its bucket.
    assert plan.full_graphs() == ((8, 3), (8, 7), (16, 3), (16, 7), (32, 3), (32, 7))


def test_a_network_that_drafts_level_by_level_has_graphs_of_one_token_per_request():
    plan = plan_graphs(table((1, 7), (5, 3)), 8)
    assert plan.capture_sizes == (1, 2, 4, 8, 16, 32)
    assert {graph[1] for graph in plan.captured().drafter_graphs} == {1, 2, 4, 8}
    assert plan_graphs(table((1, 7), (5, 3), drafter="ngram"), 8).captured().drafter == ()


def test_a_depth_that_never_varies_needs_no_schedule():
    policy = Policy(selector=FixedSpec(strategy=Strategy.chain("ngram", 4)))
    assert plan_graphs(policy, 8).settings()["speculative_config"] == {
        "method": "ngram",
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 5,
        "num_speculative_tokens": 4,
    }
    assert "speculative_config" not in plan_graphs(load_policy("none"), 8).settings()


def test_where_the_policy_learns_the_schedule_only_names_every_depth():
    arms = tuple(Strategy.chain("ngram", k) for k in (0, 2, 6))
    plan = plan_graphs(Policy(selector=ExploreSpec(strategies=arms)), 16)
    assert plan.schedule == ((1, 1, 6), (2, 2, 2), (3, 16, 0))
    assert "own scheduler" in plan.notes[0]
    with pytest.raises(ConfigError, match="3 depths, more than the 2 batch sizes"):
        plan_graphs(Policy(selector=ExploreSpec(strategies=arms)), 2)


def test_a_hold_and_drafters_that_vllm_cannot_have_are_noted():
    held = plan_graphs(table((1, 4), activation=Activation(max_requests=4, hold_iterations=10)), 8)
    assert any("hold" in note for note in held.notes)
    rows = (TableRow(min_batch=1, strategy=Strategy.chain("suffix", 4)),)
    mixed = Policy(selector=TableSpec(rows=(*rows, TableRow(min_batch=4, strategy=Strategy.chain("learned", 2)))))
    plan = plan_graphs(mixed, 8)
    assert "one drafter per engine, and the policy drafts with suffix and learned" in plan.refused()
    assert any("one drafter per engine" in note for note in plan.notes)
    assert plan.networks == ("learned",)


@pytest.mark.parametrize(("name", "noted"), [("fixed", True), ("das", True), ("none", False)])
def test_what_vllm_searches_is_noted_to_be_its_own(name, noted):
    assert any("searches the request alone" in note for note in plan_graphs(load_policy(name), 8).notes) == noted


def test_trees_are_refused():
    policy = Policy(selector=FixedSpec(strategy=Strategy("learned", 8, 8, 48)))
    with pytest.raises(ConfigError, match=r"vLLM drafts chains only: strategy learned:8,8,48 is a tree"):
        plan_graphs(policy, 8)


def test_asking_for_more_sizes_leaves_no_batch_without_a_full_graph():
    policy = table((1, 8), (5, 4), (17, 2), (33, 0))
    assert plan_graphs(policy, 64).without_full_graph()
    filled = plan_graphs(policy, 64, fill=True)
    assert not filled.without_full_graph()
    assert set(plan_graphs(policy, 64).asked) < set(filled.asked)


def test_memory_beyond_the_cap_is_refused_with_the_numbers():
    plan = plan_graphs(table((1, 8), (5, 2), (17, 0)), 32)
    needed = memory_bytes(POOL, plan)
    assert check_memory(POOL, plan, needed) == needed
    with pytest.raises(ConfigError, match=rf"take {needed / GIB:.2f} GiB, more than 0\.50"):
        check_memory(POOL, plan, 0.5 * GIB)


def test_memory_grows_with_graphs_and_with_a_drafters_network():
    policy = table((1, 8), (5, 2), (17, 0))
    plan = plan_graphs(policy, 32)
    assert memory_bytes(POOL, plan_graphs(policy, 64)) > memory_bytes(POOL, plan)
    assert memory_bytes(POOL, replace(plan, networks=())) < memory_bytes(POOL, plan)
    assert memory_bytes(POOL.model_copy(update={"page_tables": 0}), plan) == memory_bytes(POOL, plan)


def test_measured_memory_is_what_capture_returned():
    class Runner:
        def capture_model(self, *, profile_only: bool = False) -> int:
            return 3 * GIB

    worker = SimpleNamespace(model_runner=Runner())
    keep_captured_bytes(Runner)
    assert captured_bytes(worker) is None
    assert worker.model_runner.capture_model(profile_only=False) == captured_bytes(worker) == 3 * GIB


def test_vllms_batch_sizes_end_with_the_largest():
    assert vllm_batches(1) == (1,)
    assert vllm_batches(20) == (1, 2, 4, 8, 16, 20)
    assert vllm_batches(272)[-2:] == (256, 272)


def test_the_command_writes_arguments_of_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from tltlab.runtime.cli.export_policy import export_policy

    table((1, 8), (5, 2), (17, 0)).write(tmp_path / "policy.json")
    export_policy(str(tmp_path / "policy.json"), 32, False, tmp_path / "vllm.json", "Llama-3-8B", 64.0, 1, 1.0, True)
    told = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "vllm.json").read_text()) == told["vllm"]
    assert told["vllm"]["max_num_seqs"] == 32
    assert 0 < told["predicted_graph_gib"] < 64


def test_the_shape_of_a_model_comes_from_its_folder(tmp_path: Path):
    config = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 24}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    assert graph_pool(str(tmp_path), 1, 1e6).hidden_size == 64
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64}))
    with pytest.raises(ConfigError, match="has no num_hidden_layers, vocab_size"):
        graph_pool(str(tmp_path), 1, 1e6)
