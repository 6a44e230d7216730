"""A policy as vLLM's settings: depths by batch, graphs as vLLM itself would capture and use them, and their memory."""

import json
from types import SimpleNamespace

import pytest

from tests.refused import refused
from tltlab.cli.app import main
from tltlab.drafters.specs import SYSTEM_DRAFTERS, HybridSpec, LearnedSpec, NgramSpec
from tltlab.errors import ConfigError
from tltlab.policies.policy import SHIPPED, Activation, Policy, load_policy
from tltlab.policies.specs import BegMabSpec, Bucket, ExploreSpec, FixedSpec, NoneSpec, TableRow, TableSpec
from tltlab.runtime.engine.graphs import (
    differences,
    fitting_plan,
    memory_bytes,
    plan_graphs,
)
from tltlab.runtime.engine.vllm.runners import captured_graphs
from tltlab.strategy import NO_SPECULATION, Strategy

from .asking import fixed
from .dispatching import dispatched_kinds, v1_dispatcher, v2_manager

SHAPE = (32, 128_256)
"""Layers and vocabulary."""
EAGLE = {"learned": LearnedSpec(method="eagle", model="heads/eagle")}


def table(*rows, drafter="learned", **also):
    """Chains of one drafter: (min_batch, K) each."""
    strategies = [TableRow(min_batch=n, strategy=Strategy.chain(drafter, k)) for n, k in rows]
    return Policy(selector=TableSpec(rows=tuple(strategies)), drafters=EAGLE, **also)


POLICIES = ["none", "fixed", "table", "beg-mab", "explore", table((1, 7), (5, 3), (20, 0))]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fill", [False, True])
def test_graphs_are_those_of_vllms_v2_runner(policy, fill):
    from vllm.config.compilation import CUDAGraphMode

    plan = plan_graphs(load_policy(policy), 40, fill=fill)
    captured = v2_manager(plan)._capture_descs
    full = {(d.num_tokens, d.uniform_token_count - 1) for d in captured[CUDAGraphMode.FULL]}
    assert set(plan.full_graphs()) == full
    assert [d.num_tokens for d in captured[CUDAGraphMode.PIECEWISE]][::-1] == list(plan.piecewise_graphs())
    assert plan.kinds() == dispatched_kinds(plan)
    assert set(plan.kinds().values()) <= {"full", "piecewise"}
    assert not (fill and plan.without_full_graph())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("any_lengths", [False, True])
@pytest.mark.parametrize("max_tokens", [100, 8192])
def test_graphs_are_those_of_vllms_v1_dispatcher(policy, any_lengths, max_tokens):
    sizes = {"deepest": 9, "max_tokens": max_tokens}
    plan = plan_graphs(load_policy(policy), 40, runner="V1", any_lengths=any_lengths, plain=True, **sizes)
    runner = SimpleNamespace(model_runner=SimpleNamespace(cudagraph_dispatcher=v1_dispatcher(plan)))
    captured = captured_graphs(runner)
    assert captured.full == plan.full_graphs()
    assert captured.piecewise == plan.piecewise_graphs()
    assert plan.kinds() == dispatched_kinds(plan)


def test_any_lengths_give_the_v1_runner_full_graphs():
    policy = load_policy("beg-mab-suffix")
    stock, planned = (plan_graphs(policy, 64, runner="V1", any_lengths=any_lengths) for any_lengths in (False, True))
    assert {k for (_, k), kind in dispatched_kinds(stock).items() if kind == "full"} == {8}
    assert dispatched_kinds(stock)[1, 0] == "piecewise"
    assert set(dispatched_kinds(planned).values()) == {"full"}
    # Where attention takes uniform batches alone, vLLM goes back to its default by itself.
    assert dispatched_kinds(planned, uniform_only=True) == dispatched_kinds(stock)
    assert any("falls back" in note for note in planned.notes())
    # Drafts of unequal length, which no K describes.
    mode, _ = v1_dispatcher(planned).dispatch(37, uniform_decode=False)
    assert mode.name == "FULL"


def test_the_v1_runner_gets_no_depth_table():
    speculative = {"method": "eagle", "model": "head", "num_speculative_tokens": 8}
    policy = table((1, 8), (5, 2), (17, 0))
    v1 = plan_graphs(policy, 64, runner="V1", any_lengths=True).engine_settings(speculative)
    assert v1["speculative_config"] == {**speculative, "enforce_eager": True}
    assert v1["compilation_config"]["cudagraph_mode"] == "FULL"
    v2 = plan_graphs(policy, 64).engine_settings(speculative)
    assert v2["speculative_config"]["num_speculative_tokens_per_batch_size"] == [[1, 4, 8], [5, 16, 2], [17, 64, 0]]
    assert "cudagraph_mode" not in v2["compilation_config"]


def test_the_fitting_plan_with_most_graphs_wins():
    def plan(spacing, fill=False):
        return plan_graphs(table((1, 8), (5, 2), (17, 0)), 64, spacing=spacing, fill=fill)

    finest, coarsest = memory_bytes(plan(1.0, True), *SHAPE), memory_bytes(plan(2.0), *SHAPE)
    assert fitting_plan(plan, *SHAPE, finest) == plan(1.0, True)
    smaller = fitting_plan(plan, *SHAPE, finest - 1)
    assert memory_bytes(smaller, *SHAPE) < finest
    assert smaller.without_full_graph() == ()
    assert fitting_plan(plan, *SHAPE, coarsest) == plan(2.0)
    with refused(ConfigError, naming=("more",)):
        fitting_plan(plan, *SHAPE, coarsest - 1)


SUFFIX = fixed("suffix", 8)
HEAD = LearnedSpec(method="draft_model", model="MODEL")


def of(policy, **drafters):
    """The policy with these drafters."""
    return policy.model_copy(update={"drafters": drafters})


MIXED = TableSpec(
    rows=(
        TableRow(min_batch=1, strategy=Strategy.chain("suffix", 4)),
        TableRow(min_batch=4, strategy=Strategy.chain("learned", 4)),
    )
)
STOCK = {
    **SHIPPED,
    "suffix": SUFFIX,
    "suffix-decoding": of(SUFFIX, suffix=SYSTEM_DRAFTERS["suffix-decoding"]),
    "suffix that comes on": SUFFIX.model_copy(update={"activation": Activation(max_requests=16)}),
    "table of suffix": table((1, 8), (5, 0), drafter="suffix"),
    "head": of(table((1, 7), (5, 3), (20, 0)), learned=HEAD),
    "head that falls back": of(
        fixed("learned", 3), learned=HEAD.model_copy(update={"fallback": "suffix", "max_age": 2})
    ),
    "untrained": of(fixed("learned", 3), learned=HEAD.model_copy(update={"trained": False})),
    "unknown": fixed("learned", 2),
    "hybrid": of(fixed("both", 3), learned=HEAD, both=HybridSpec()),
    "head and suffix": of(Policy(selector=MIXED), learned=HEAD),
}
RUNS_IN_STOCK = {"none", "fixed", "table", "das", "suffix", "suffix-decoding", "head", "head that falls back"}
NAMED = {
    "beg-mab-suffix": ("suffix and ngram",),
    "suffix that comes on": ("suffix", "K"),
    "table of suffix": ("suffix", "K"),
    "unknown": ("drafter learned",),
    "hybrid": ("suffix and learned",),
    "head and suffix": ("suffix and learned",),
    "goodput": ("K = 0, 1, 2, 4, 8",),
}
"""What a refusal names."""


@pytest.mark.parametrize("name", list(STOCK))
def test_stock_vllm_takes_what_is_written(name, random_model, tmp_path, capsys):
    """Through vLLM's own argument parser and all checks of an engine's configuration; the rest is refused."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    policy, policy_file, written = STOCK[name], tmp_path / "policy.json", tmp_path / "vllm.json"
    if "learned" in policy.drafters:
        spec = policy.drafters["learned"].model_copy(update={"model": str(random_model)})
        policy = of(policy, **{**policy.drafters, "learned": spec})
    policy.write(policy_file)
    with pytest.raises(SystemExit) as ended:
        main(["export-policy", str(policy_file), "--max-batch", "32", "--json", "--out", str(written)])
    out, err = capsys.readouterr()
    assert (ended.value.code == 0) == (name in RUNS_IN_STOCK)
    if ended.value.code:
        assert (ended.value.code, out, err.count("\n"), written.exists()) == (2, "", 1, False)
        assert all(fact in err for fact in NAMED.get(name, ()))
        return
    settings = json.loads(written.read_text())
    assert settings == json.loads(out)["vllm"]
    flags = [f"--{key.replace('_', '-')}={json.dumps(value)}" for key, value in settings.items()]
    flags += [f"--model={random_model}", "--max-model-len=128", "--kv-cache-memory-bytes=33554432"]
    parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(flags)
    config = EngineArgs.from_cli_args(parsed).create_engine_config()
    assert config.scheduler_config.max_num_seqs == 32
    depths = sorted(strategy.draft_depth for strategy in policy.strategies if strategy.speculates)
    drafting = config.speculative_config
    assert (drafting is not None) == bool(depths)
    if drafting is not None:
        method = settings["speculative_config"]["method"]
        assert (drafting.num_speculative_tokens, drafting.method) == (depths[-1], method)
        table = drafting.num_speculative_tokens_per_batch_size
        assert table is None or {k for _, _, k in table} - {0} == set(depths)


@pytest.mark.parametrize("name", ["fixed", "table", "beg-mab"])
def test_vllm_takes_a_schedule_with_every_depth(name):
    from vllm.config import CompilationConfig, SpeculativeConfig
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    plan = plan_graphs(load_policy(name), 64)
    config = SpeculativeConfig(**plan.settings()["speculative_config"])
    graphs = CompilationConfig(**plan.settings()["compilation_config"])
    assert graphs.cudagraph_capture_sizes == list(plan.capture_sizes)
    assert config.num_speculative_tokens == plan.depths[-1]
    if plan.schedule:
        schedule, deepest = config.num_speculative_tokens_per_batch_size, config.num_speculative_tokens
        lookup = build_dynamic_sd_schedule_lookup(schedule, plan.max_num_seqs, deepest)
        assert set(lookup[1:]) == set(plan.depths)
        if not plan.chosen_at_run_time:
            assert set(enumerate(lookup[1:], start=1)) == set(plan.may_run)


def test_level_by_level_drafting_has_single_token_graphs():
    plan = plan_graphs(table((1, 7), (5, 3)), 8)
    assert plan.capture_sizes == (1, 2, 4, 8, 16, 32)
    without = plan_graphs(table((1, 7), (5, 3), drafter="ngram"), 8)
    assert without.capture_sizes == (8, 16, 32)
    assert memory_bytes(without, *SHAPE) < memory_bytes(plan, *SHAPE)


@pytest.mark.parametrize(
    ("name", "spec", "standard"), [("own", NgramSpec(), "ngram"), ("head", EAGLE["learned"], "learned")]
)
def test_a_renamed_drafter_has_the_same_graphs(name, spec, standard):
    given = plan_graphs(table((1, 7), (5, 3), drafter=name), 8, drafters={name: spec})
    known = plan_graphs(table((1, 7), (5, 3), drafter=standard), 8)
    assert (given.settings(), given.full_graphs()) == (known.settings(), known.full_graphs())
    assert (given.uneven, memory_bytes(given, *SHAPE)) == (known.uneven, memory_bytes(known, *SHAPE))
    with refused(ConfigError, naming=(f"'{name}'",)):
        plan_graphs(table((1, 7), (5, 3), drafter=name), 8)


def test_a_policy_that_learns_has_every_depth_scheduled():
    policy = Policy(selector=ExploreSpec(strategies=tuple(Strategy.chain("ngram", k) for k in (0, 2, 6))))
    assert plan_graphs(policy, 16).schedule == ((1, 1, 6), (2, 2, 2), (3, 16, 0))
    with refused(ConfigError, naming=("3", "2")):
        plan_graphs(policy, 2)


@pytest.mark.parametrize(
    ("policy", "noted", "is_noted"),
    [
        (table((1, 4), activation=Activation(max_requests=4, hold_iterations=10)), "hold", True),
        ("fixed", "searches the request alone", True),
        ("das", "searches the request alone", True),
        ("none", "searches the request alone", False),
    ],
)
def test_what_vllm_does_otherwise_is_noted(policy, noted, is_noted):
    policy = load_policy(policy)
    assert any(noted in note for note in differences(policy, plan_graphs(policy, 8))) == is_noted


def test_trees_are_refused():
    policy = Policy(selector=FixedSpec(strategy=Strategy("learned", 8, 8, 48)))
    with refused(ConfigError, naming=("learned:8x8/48",)):
        plan_graphs(policy, 8)


DEEP, SHORT, PLAIN = Strategy.chain("learned", 8), Strategy.chain("learned", 2), NO_SPECULATION
ROWS = tuple(TableRow(min_batch=b, strategy=s) for b, s in ((2, DEEP), (3, SHORT), (5, PLAIN)))
ARMS = (Bucket(min_batch=1, strategies=(DEEP,)), Bucket(min_batch=3, strategies=(SHORT, PLAIN)))
GROUPED = BegMabSpec(strategies=(DEEP, SHORT), thresholds=(1, 3))
EVERYWHERE = [(1, 0), (2, 0), (4, 0), (8, 0)]
NEVER, FOUR = Activation(max_requests=0), Activation(max_requests=4)
WAITING = Activation(max_requests=4, count="remaining")


@pytest.mark.parametrize(
    ("selector", "activation", "max_batch", "asked"),
    [
        (NoneSpec(), None, 8, EVERYWHERE),
        (FixedSpec(strategy=DEEP), None, 2, [(1, 8), (2, 8)]),
        (FixedSpec(strategy=DEEP), NEVER, 8, EVERYWHERE),
        (FixedSpec(strategy=DEEP), WAITING, 8, sorted([*EVERYWHERE, (1, 8), (2, 8), (4, 8)])),
        (FixedSpec(strategy=DEEP), FOUR, 8, [(1, 8), (2, 8), (4, 8), (8, 0)]),
        (TableSpec(rows=ROWS), None, 8, [(1, 8), (2, 8), (4, 2), (8, 0)]),
        (BegMabSpec(buckets=ARMS), None, 4, [(1, 8), (2, 8), (4, 0), (4, 2)]),
        (GROUPED, None, 4, [(1, 8), (2, 8), (4, 2)]),
        (ExploreSpec(strategies=(SHORT,)), None, 2, [(1, 2), (2, 2)]),
        (TableSpec(rows=ROWS[:2]), None, 7, [(1, 8), (2, 8), (4, 2), (7, 2)]),
    ],
)
def test_a_policy_has_graphs_where_it_may_choose(selector, activation, max_batch, asked):
    policy = Policy(selector=selector, activation=activation, drafters=EAGLE)
    assert list(plan_graphs(policy, max_batch, runner="V1").asked) == asked
