"""Engines of programs that know nothing of tltlab: as the environment says, or with options handed on by a framework.

Their configuration is made as for a start; engines start in `test_process`.
"""

import argparse
import copy
import importlib.metadata
import json
import os
import tomllib
from types import SimpleNamespace

import pytest
import yaml

from tests.refused import refused
from tltlab.drafters.specs import LearnedSpec
from tltlab.errors import ConfigError
from tltlab.policies.policy import load_policy
from tltlab.runtime import vllm_options
from tltlab.runtime.engine.control import Control
from tltlab.runtime.engine.drafter_pool import DrafterPool
from tltlab.runtime.engine.recording import LiveRecording
from tltlab.runtime.engine.vllm import VARIABLES, options, starting
from tltlab.runtime.engine.vllm.options import Attachment, Variables, check_engine
from tltlab.traces.storage import is_unfinished

from ..asking import fixed

arg_utils = pytest.importorskip("vllm.engine.arg_utils")

OURS = "tltlab.runtime.engine.vllm.scheduler."
SMALL = {"max_model_len": 64, "enforce_eager": True, "dtype": "float32", "kv_cache_memory_bytes": 1 << 25}


@pytest.fixture
def environment(monkeypatch):
    """Sets our variables, and no others of them; what they have set is unset again."""
    for name in (*VARIABLES, "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def put(**values):
        for name, value in values.items():
            monkeypatch.setenv(f"TLTLAB_{name.upper()}", value)

    return put


def configured(model, kind="EngineArgs", **arguments):
    """vLLM's configuration of an engine, as `LLM` makes it, or `AsyncLLM` of AsyncEngineArgs."""
    return getattr(arg_utils, kind)(model=str(model), **{**SMALL, **arguments}).create_engine_config()


def attached(config):
    """What the engine is told of tltlab."""
    settings = config.additional_config.get("tltlab")
    return None if settings is None else Attachment.model_validate(settings)


def serve_parser():
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = arg_utils.AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--config")
    return parser


def test_a_programs_engine_follows_the_policy_and_records(random_model, tmp_path, environment, capfd):
    load_policy("beg-mab").write(tmp_path / "policy.json")
    environment(policy=str(tmp_path / "policy.json"), record=str(tmp_path / "x"), options='{"max_draft_depth": 8}')
    for kind in ("EngineArgs", "AsyncEngineArgs"):
        config = configured(random_model, kind)
        assert config.scheduler_config.scheduler_cls == OURS + "policy_scheduler"
        assert config.scheduler_config.async_scheduling is False
        assert config.speculative_config.num_speculative_tokens == 8
        found = attached(config)
        assert (found.policy, found.record) == (load_policy("beg-mab"), str(tmp_path / "x"))
        [said] = [line for line in capfd.readouterr().err.splitlines() if line.startswith("tltlab: ")]
        assert str(tmp_path / "policy.json") in said
        assert str(tmp_path / "x") in said


def test_front_ends_follow_the_environment(random_model, environment, capfd):
    environment(policy=load_policy("beg-mab").model_dump_json())
    parsed = serve_parser().parse_args(["--model", str(random_model), "--max-model-len", "64"])
    # Each of several front ends makes the configuration once more, and says nothing.
    for more in ({}, {"_api_process_count": 2, "_api_process_rank": 1}):
        arguments = arg_utils.AsyncEngineArgs.from_cli_args(parsed)
        vars(arguments).update(more)
        assert attached(arguments.create_engine_config()).policy == load_policy("beg-mab")
        assert ("tltlab: " in capfd.readouterr().err) != bool(more)


def test_recording_alone_changes_nothing_of_vllms(random_model, tmp_path, environment):
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    stock = configured(random_model, speculative_config=dict(ngram))
    environment(record=str(tmp_path / "x"))
    config = configured(random_model, speculative_config=dict(ngram))
    found = attached(config)
    assert (found.policy, found.record) == (None, str(tmp_path / "x"))
    assert config.scheduler_config.async_scheduling == stock.scheduler_config.async_scheduling
    assert config.speculative_config.method == "ngram"
    assert config.scheduler_config.scheduler_cls is None
    assert config.observability_config == stock.observability_config


def test_a_policy_controls_a_programs_own_head(random_model, environment, capfd):
    def drafting(depth):
        head = {"method": "draft_model", "model": str(random_model), "num_speculative_tokens": depth}
        config = configured(random_model, speculative_config=head)
        assert config.speculative_config.num_speculative_tokens == depth
        return attached(config)

    environment(policy=fixed("learned", 2).model_dump_json())
    found = drafting(4)
    assert found.drafters["learned"] == LearnedSpec(method="draft_model", model=str(random_model))
    assert found.max_draft_depth == 4
    assert drafting(1) is None
    assert "depths up to 1" in capfd.readouterr().err
    # For suffix trees beside the head vLLM's V1 runner is taken, and only for them.
    environment(policy="beg-mab-learned")
    assert drafting(4) is None
    assert "VLLM_USE_V2_MODEL_RUNNER" not in os.environ
    assert drafting(8) is not None
    assert os.environ.pop("VLLM_USE_V2_MODEL_RUNNER") == "0"


BEG_MAB, THEIRS = {"policy": "beg-mab"}, {"method": "ngram", "num_speculative_tokens": 2}
WRONG = [
    ({"policy": "gone/policy.json"}, {}, "gone/policy.json"),
    ({"policy": "{selector"}, {}, "TLTLAB_POLICY"),
    (BEG_MAB | {"options": '{"depth": 4}'}, {}, "TLTLAB_OPTIONS: depth"),
    ({"options": "{}"}, {}, "neither TLTLAB_POLICY nor TLTLAB_RECORD"),
    (BEG_MAB | {"options": '{"max_draft_depth": 2}'}, {}, "depths up to 2"),
    ({"policy": "beg-mab-learned"}, {}, "learned"),
    (BEG_MAB, {"scheduler_cls": "their.Scheduler"}, "their.Scheduler"),
    (BEG_MAB, {"speculative_config": THEIRS}, "speculates by itself"),
    (BEG_MAB, {"additional_config": {"tltlab": {}}}, "options of tltlab's"),
    (BEG_MAB, {"runner": "pooling"}, "pools"),
    (BEG_MAB, {"logits_processors": ["their.module:Ban"]}, "their.module:Ban"),
    (BEG_MAB, {"structured_outputs_config": {"backend": "lm-format-enforcer"}}, "lm-format-enforcer"),
    ({"record": "/dev/null/x"}, {}, "/dev/null is not"),
    (BEG_MAB | {"options": '{"max_batch": 4}'}, {"max_num_seqs": 8}, "max_num_seqs=8"),
]


@pytest.mark.parametrize("case", WRONG, ids=[why for *_, why in WRONG])
def test_what_cannot_be_followed_leaves_the_programs_engine(case, random_model, environment, capfd):
    values, arguments, why = case
    arguments = {"async_scheduling": False, **arguments}
    engine_args = arg_utils.EngineArgs(model=str(random_model), **{**SMALL, **arguments})
    given = vars(engine_args).copy()
    environment(**values)
    config = engine_args.create_engine_config()
    said = capfd.readouterr().err
    assert said.count("tltlab: ") == 1
    assert why in said
    assert config.scheduler_config.scheduler_cls == arguments.get("scheduler_cls")
    assert engine_args.additional_config == given["additional_config"]
    assert engine_args.scheduler_cls == given["scheduler_cls"]


@pytest.mark.parametrize(
    ("part", "setting"),
    [
        ("model_config", {"enable_trace_replay": True}),
        ("parallel_config", {"prefill_context_parallel_size": 2}),
        ("kv_transfer_config", {"kv_connector": "MoRIIOConnector"}),
        ("compilation_config", {"max_cudagraph_capture_size": 8, "cudagraph_mode": "FULL"}),
    ],
    ids=str,
)
def test_settings_that_vllm_refuses_late_are_refused_early(part, setting, random_model, environment):
    from vllm.config import CUDAGraphMode

    environment(policy="beg-mab")
    config = copy.copy(configured(random_model))
    check_engine(config, attached(config), plugged_in=True, sound=True)
    changed = copy.copy(getattr(config, part)) or SimpleNamespace()
    for name, value in setting.items():
        setattr(changed, name, CUDAGraphMode[value] if name == "cudagraph_mode" else value)
    object.__setattr__(config, part, changed)
    with refused(ConfigError, naming=(next(iter(setting.values())),)):
        check_engine(config, attached(config), plugged_in=True, sound=True)


def test_logits_processors_of_installed_packages_leave_policy_out(random_model, environment, monkeypatch, capfd):
    """Beside speculation vLLM drops them without a word."""
    point = importlib.metadata.EntryPoint("ban", "their.plugin:Ban", "vllm.logits_processors")
    monkeypatch.setattr(options, "entry_points", lambda *, group: [point] if group == point.group else [])
    environment(policy="beg-mab")
    assert configured(random_model).speculative_config is None
    assert "their.plugin:Ban" in capfd.readouterr().err


@pytest.mark.parametrize(("policy", "speculates"), [("beg-mab", True), ("none", False)])
def test_the_line_names_requests_without_drafts(policy, speculates, random_model, environment, capfd):
    environment(policy=policy)
    configured(random_model)
    said = capfd.readouterr().err
    assert all((fact in said) == speculates for fact in ("min_p", "logit_bias", "seed"))


@pytest.mark.parametrize(("option", "fact"), [("max_draft_depth", "2"), ("depth", "TLTLAB_OPTIONS")])
def test_strictness_gives_no_engine_instead(option, fact, random_model, environment):
    environment(policy="beg-mab", options=json.dumps({option: 2, "strict": True}))
    with refused(ConfigError, naming=(fact,)):
        configured(random_model)


@pytest.mark.parametrize("policy", ["beg-mab-learned", "gone/policy.json"])
def test_engine_records_without_policy_it_cannot_follow(policy, random_model, tmp_path, environment, capfd):
    environment(policy=policy, record=str(tmp_path / "x"))
    found = attached(configured(random_model))
    assert (found.policy, found.record) == (None, str(tmp_path / "x"))
    assert str(tmp_path / "x") in capfd.readouterr().err


def test_ranks_that_schedule_record_once(random_model, tmp_path, environment, monkeypatch):
    """TRL's colocated engines under tensor parallelism: a scheduler on each rank, and all must choose the same."""
    environment(policy="beg-mab", record=str(tmp_path / "x"))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    found = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
        found.append(attached(configured(random_model, **ranks)))
    assert (found[0].policy, found[0].record) == (None, str(tmp_path / "x"))
    assert found[1] is None


def test_every_engine_start_states_its_purpose(environment):
    environment(policy="beg-mab", record="x")
    with starting():
        assert Variables.read(os.environ) is None
    assert os.environ["TLTLAB_POLICY"] == "beg-mab"


def test_engines_of_one_name_record_separately(tmp_path):
    (tmp_path / "x").mkdir()

    def started():
        control = Control(DrafterPool(None, 0), worker=0)
        return LiveRecording.numbered(tmp_path / "x", control, model="m", hardware="h", engine="e")

    two = [started(), started()]
    assert [recording.path.name for recording in two] == ["x", "x-1"]
    two[0].close()
    # A trace is not written over, and what was interrupted stays for repair.
    assert started().path.name == "x-2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "x-1", "x-2"]
    assert [is_unfinished(tmp_path / name) for name in ("x", "x-1", "x-2")] == [False, True, True]


def old_verl(options):
    """A command line, from which False is left out."""
    words = []
    for name, value in options.items():
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        words += [] if value is False else [f"--{name}"] if value is True else [f"--{name}", text]
    return words


def toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {toml(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


def parsed(words, model):
    return arg_utils.AsyncEngineArgs.from_cli_args(serve_parser().parse_args([*words, "--model", str(model)]))


def of_yaml(options, model, folder):
    """vLLM's own `--config FILE`."""
    (folder / "serve.yaml").write_text(yaml.safe_dump(dict(options)))
    words = ["serve", str(model), "--config", str(folder / "serve.yaml")]
    found = serve_parser()._pull_args_from_config(words)
    return parsed([word for word in found[1:] if word != str(model)], model)


def of_namespace(options, model, _):
    """Arguments set one by one on what a parser made of nothing, as SkyRL does."""
    namespace = serve_parser().parse_args([])
    for name, value in {"model": str(model), **options}.items():
        setattr(namespace, name, value)
    return arg_utils.AsyncEngineArgs.from_cli_args(namespace)


def of_toml(options, model, _):
    """A table of a TOML file, which a parser is given as what it has parsed already, as prime-rl does."""
    table = tomllib.loads("\n".join(f"{name} = {toml(value)}" for name, value in options.items()))
    namespace = argparse.Namespace(model=str(model), **table)
    return arg_utils.AsyncEngineArgs.from_cli_args(serve_parser().parse_args([], namespace=namespace))


HANDED_ON = {
    "vllm": lambda options, model, _: arg_utils.EngineArgs(model=str(model), **options),
    "vllm serve": of_yaml,
    "verl": lambda options, model, _: parsed(old_verl(options), model),
    "nemo-rl": lambda options, model, _: arg_utils.AsyncEngineArgs(
        model=str(model), **yaml.safe_load(yaml.safe_dump(dict(options)))
    ),
    "skyrl": of_namespace,
    "prime-rl": of_toml,
}


def the_same(engine_args, options):
    """Whether an engine is told what `options` say."""
    both = (engine_args.additional_config, options["additional_config"])
    given, wanted = (Attachment.model_validate(of["tltlab"]) for of in both)
    names = ("scheduler_cls", "async_scheduling", "speculative_config", "cudagraph_metrics")
    return given == wanted and all(getattr(engine_args, name) == options[name] for name in names)


@pytest.mark.parametrize("program", HANDED_ON)
def test_options_reach_engines_of_frameworks(program, random_model, tmp_path, environment):
    policy, more = load_policy("beg-mab"), {"record": tmp_path / "x", "seed": 5, "async_scheduling": False}
    engine_args = HANDED_ON[program](vllm_options(policy, **more, for_=program), random_model, tmp_path)
    assert the_same(engine_args, vllm_options(policy, **more))


@pytest.mark.parametrize("program", ["openrlhf", "trl"])
def test_frameworks_take_the_environment(program, random_model, tmp_path, environment):
    policy = load_policy("beg-mab").model_copy(update={"provenance": {"trace": "x"}})
    for source in (policy, "beg-mab"):
        more = {"record": tmp_path / "x", "seed": 5, "max_draft_depth": 8}
        asked = vllm_options(source, **more, for_=program)
        environment(**{name.removeprefix("TLTLAB_").lower(): value for name, value in asked.items()})
        # OpenRLHF's engine, and TRL's: neither has a place for more.
        found = attached(configured(random_model, "AsyncEngineArgs", seed=7, enable_prefix_caching=True))
        wanted = vllm_options(source, **more)
        assert found == Attachment.model_validate(wanted["additional_config"]["tltlab"])
