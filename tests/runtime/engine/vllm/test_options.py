"""The options of a policy on vLLM as other people start it: `vllm.LLM(**vllm_options(...))`, or `vllm serve`."""

import os
import re
from contextlib import nullcontext
from pathlib import Path

import pytest

import tltlab.runtime
from tests.refused import refused
from tltlab.drafters.specs import HybridSpec, LearnedSpec, SuffixSpec, check_drafter, check_sampled_drafts
from tltlab.errors import ConfigError
from tltlab.policies.policy import Activation, load_policy
from tltlab.runtime import vllm_options
from tltlab.runtime.engine.graphs import plan_graphs
from tltlab.runtime.engine.vllm import starting
from tltlab.runtime.engine.vllm.options import Attachment

from ..asking import fixed

HEAD = LearnedSpec(method="eagle", model="some/head")


def test_engine_is_built_for_policys_deepest_draft():
    speculative = vllm_options(fixed("suffix", 5))["speculative_config"]
    assert (speculative["num_speculative_tokens"], speculative["method"]) == (5, "custom_class")
    assert "speculative_config" not in vllm_options("none")


def test_a_learned_drafter_is_vllms_own():
    policy = fixed("head", 3).model_copy(update={"drafters": {"head": HEAD, "das": SuffixSpec(window=16)}})
    options = vllm_options(policy, async_scheduling=True)
    assert options["speculative_config"] == {"method": "eagle", "model": "some/head", "num_speculative_tokens": 3}
    assert options["async_scheduling"] is True
    assert set(options["additional_config"]["tltlab"]["drafters"]) == {"ngram", "suffix", "head", "das"}


def test_model_free_drafts_are_told_of():
    deep, helped = fixed("head", 3), HEAD.model_copy(update={"fallback": "suffix"})
    plain = [{"policy": "none"}, {"policy": "none", "max_draft_depth": 4}, {"policy": deep, "drafters": {"head": HEAD}}]
    on_host = [{"policy": "beg-mab"}, {"policy": deep, "drafters": {"head": helped}}]
    for asked in (*plain, *on_host):
        options = vllm_options(**asked)
        assert "async_scheduling" not in options
        assert options["additional_config"]["tltlab"]["host_drafts"] is (asked in on_host)
    for wanted in (False, True):
        assert vllm_options("none", async_scheduling=wanted)["async_scheduling"] is wanted


@pytest.mark.parametrize("policy", ["table", "beg-mab"])
def test_graphs_are_captured_for_every_depth_of_policy(policy):
    """As planned for the V1 runner, which model-free drafts take; a schedule would leave it piecewise graphs alone."""
    options = vllm_options(policy, max_batch=64)
    assert options["max_num_seqs"] == 64
    plan = plan_graphs(load_policy(policy), 64, runner="V1", any_lengths=True)
    assert options["compilation_config"] == plan.engine_settings(None)["compilation_config"]
    assert "num_speculative_tokens_per_batch_size" not in options["speculative_config"]


def test_learned_drafter_alone_has_schedule_of_depths():
    comes_on = {"activation": Activation(max_requests=8), "drafters": {"learned": HEAD}}
    policy = fixed("learned", 4).model_copy(update=comes_on)
    options = vllm_options(policy, max_batch=64)
    assert options["speculative_config"]["num_speculative_tokens_per_batch_size"] == [[1, 8, 4], [9, 64, 0]]
    assert {5, 40, 64} <= set(options["compilation_config"]["cudagraph_capture_sizes"])


@pytest.mark.parametrize(
    ("policy", "more", "facts"),
    [
        ("learned:4x4/16", {"drafters": {"learned": HEAD}}, ("learned:4x4/16",)),
        ("beg-mab", {"max_draft_depth": 2}, (2,)),
        ("eagle:2", {}, ("eagle:2",)),
    ],
)
def test_what_vllm_cannot_run_is_refused(policy, more, facts):
    with refused(ConfigError, naming=facts):
        vllm_options(policy, **more)


def test_data_parallel_engines_are_workers():
    assert [Attachment(worker=2).of_replica(index).worker for index in range(2)] == [2, 3]


def test_vllm_logs_beside_results_and_not_among_them(monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "")
    monkeypatch.delenv("VLLM_LOGGING_STREAM")
    with starting():
        assert os.environ["VLLM_LOGGING_STREAM"] == "ext://sys.stderr"
    assert "VLLM_LOGGING_STREAM" not in os.environ


@pytest.mark.parametrize(
    ("method", "name", "fits"),
    [("draft_model", "vocab_size", False), ("draft_model", "hidden_size", True), ("eagle", "hidden_size", False)],
)
def test_a_drafter_of_another_width_is_refused(method, name, fits, random_model, tmp_path):
    config = (random_model / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace(f'"{name}": ', f'"{name}": 1'))
    with nullcontext() if fits else refused(ConfigError, naming=(name,)):
        check_drafter(str(random_model), "learned", LearnedSpec(method=method, model=str(tmp_path)))


def test_a_hybrid_beside_sampled_drafts_is_refused():
    """It would not be lossless."""
    drafters = {"learned": HEAD, "hybrid": HybridSpec()}
    check_sampled_drafts(drafters, {"draft_sample_method": "greedy"})
    with refused(ConfigError, naming=("probabilistic",)):
        check_sampled_drafts(drafters, {"draft_sample_method": "probabilistic"})


def test_only_the_adapter_imports_vllm():
    runtime = Path(tltlab.runtime.__file__).parent
    bench = Path(__file__).parents[3] / "bench"
    for path in (*runtime.rglob("*.py"), *bench.rglob("*.py")):
        if path.parent.name in ("vllm", "tests"):
            continue
        assert not re.search(r"^ *(import|from) vllm\b", path.read_text(), re.MULTILINE), path.name
