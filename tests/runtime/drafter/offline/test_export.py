"""The by-product: a checkpoint that stock vLLM serves, handed out only if it drafts there as it should."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.refused import refused
from tltlab.errors import ConfigError, RunError
from tltlab.files import read_json
from tltlab.runtime.drafter.heads.kinds import new_head
from tltlab.runtime.drafter.heads.layouts import load_head
from tltlab.runtime.drafter.offline.export import (
    ExportCheck,
    ExportConfig,
    ExportSource,
    compare,
    export_drafter,
    find_source,
)
from tltlab.runtime.drafter.offline.warm_up import train_drafter
from tltlab.runtime.recipe.drafter import LossConfig, OptimConfig, WarmUpConfig

from .easy_target import LONG_CONTEXT, easy_target, quiet, sampled_rows, write_rows

torch.set_num_threads(1)
CHECK = ExportConfig(max_response_tokens=60)


@pytest.fixture(scope="module")
def target(random_model, tmp_path_factory):
    return easy_target(random_model, tmp_path_factory.mktemp("easy"), LONG_CONTEXT)


@pytest.fixture(scope="module")
def heads(target, tmp_path_factory):
    """An EAGLE and an EAGLE-3 head that have learned something."""
    folder = tmp_path_factory.mktemp("heads")
    data = write_rows(folder / "responses.jsonl", sampled_rows(target, 48, 40))
    for kind in ("eagle", "eagle3"):
        config = WarmUpConfig(
            loss=LossConfig(kind=kind, token_weight=1.0), optim=OptimConfig(lr=3e-3), updates=40, tokens_per_update=512
        )
        train_drafter(target, data, folder / kind, config, quiet)
    return {kind: folder / kind for kind in ("eagle", "eagle3")}


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_stock_vllm_keeps_as_many_drafts_as_expected(target, heads, tmp_path, kind, monkeypatch):
    out = tmp_path / "exported"
    from vllm.engine.arg_utils import EngineArgs

    # From another folder, and to one that is named from there.
    monkeypatch.chdir(tmp_path)
    report = export_drafter(find_source(Path(os.path.relpath(heads[kind]))), "exported", CHECK, quiet)
    for way in ("greedy", "sampled"):
        length = report[way]["accept_length"]
        assert length["measured"] == pytest.approx(length["expected"], rel=0.01)
        assert length["measured"] > 1.7
        first = report[way]["positions"]
        assert first["measured"][0] == pytest.approx(first["expected"][0], abs=0.02)
    assert report["prompts"] == 10
    assert read_json(out / "export.json") | {"out": "exported"} == report
    assert report["speculative_config"]["model"] == str(out)
    assert report["head"] == str(heads[kind])
    weights, own = load_file(out / "model.safetensors"), load_file(target / "model.safetensors")
    assert torch.equal(weights["embed_tokens.weight"], own["model.embed_tokens.weight"])
    config = read_json(out / "config.json")
    if kind == "eagle3":
        assert torch.equal(weights["lm_head.weight"], own["lm_head.weight"])
        assert config["speculators_model_type"] == "eagle3"
        named = {"name_or_path": str(target.resolve()), "architectures": ["LlamaForCausalLM"]}
        assert config["speculators_config"]["verifier"] == named
        # By its folder alone: vLLM's own reader of speculators' configs finds the target and how deep to draft.
        served = EngineArgs(model=str(out), max_model_len=128, kv_cache_memory_bytes=1 << 25).create_engine_config()
        assert served.model_config.model == str(target.resolve())
        drafting = served.speculative_config
        assert (drafting.method, drafting.model, drafting.num_speculative_tokens) == ("eagle3", str(out), CHECK.depth)
        assert drafting.draft_model_config.hf_config.architectures == ["Eagle3LlamaForCausalLM"]
    else:
        assert "lm_head.weight" not in weights
        assert config["num_hidden_layers"] == 1


@pytest.mark.engine
def test_a_head_that_learned_nothing_is_not_exported(target, heads, tmp_path):
    dead = load_head(heads["eagle"])
    with torch.no_grad():
        for value in dead.parameters():
            value.zero_()
    dead.save(tmp_path / "dead")
    source = ExportSource(head=tmp_path / "dead", target=target, prompts=target / "heldout.jsonl")
    with refused(RunError, naming=("learned",)) as caught:
        export_drafter(source, tmp_path / "exports" / "dead", CHECK, quiet)
    assert caught.value.exit_code == 1
    assert list((tmp_path / "exports").iterdir()) == []


@pytest.mark.engine
def test_what_stock_vllm_does_not_load_is_reported(target, heads, tmp_path):
    load_head(heads["eagle"]).save(tmp_path / "odd")
    weights = load_file(tmp_path / "odd" / "model.safetensors")
    save_file(weights | {"lm_head.weight": torch.zeros(24, 64)}, tmp_path / "odd" / "model.safetensors")
    with refused(RunError) as caught:
        compare(tmp_path / "odd", load_head(heads["eagle"]), target, [[4, 5, 6]], CHECK)
    assert "\n" not in str(caught.value)


def comparison(**given):
    settings = {
        "temperature": 0.0, "expected_accept_length": 2.0, "measured_accept_length": 2.0, "expected_positions": [0.6],
        "measured_positions": [0.6], "passes": 100, "first_kept": 0.6, "commonest": 0.2,
    }  # fmt: skip
    return ExportCheck(**settings | given)


def test_rounding_is_forgiven_and_a_shortfall_is_not():
    assert [comparison(measured_accept_length=length).fault for length in (2.0, 1.95, 2.5)] == [""] * 3
    assert "1.80" in comparison(measured_accept_length=1.8).fault
    assert "commonest token" in comparison(first_kept=0.1).fault


def test_what_a_run_names_is_found(target, tmp_path, monkeypatch):
    """As it was named where the run was started: a folder above the run, or one that its recipe has."""
    project, run, elsewhere = tmp_path / "project", tmp_path / "project" / "runs" / "first", tmp_path / "elsewhere"
    run.mkdir(parents=True)
    (elsewhere / "models" / "small").mkdir(parents=True)
    shutil.copytree(target, project / "models" / "small")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "heldout.jsonl").write_text("")
    data = {"train": "train.jsonl", "heldout": "data/heldout.jsonl", "chat": True}
    recipe = {"model": "models/small", "data": data, "code": [str(tmp_path)]}
    (run / "run.json").write_text(json.dumps({"recipe": recipe}))
    with refused(ConfigError):
        find_source(run)
    new_head(target, "eagle", 0).save(run / "drafter" / "final")
    (run / "drafter" / "final" / "training.json").write_text(json.dumps({"model": "models/small"}))
    for folder, to_run in ((project, "runs/first"), (run, "."), (elsewhere, "../project/runs/first")):
        monkeypatch.chdir(folder)
        found = find_source(to_run)
        assert found.head.resolve() == run / "drafter" / "final"
        assert found.target == project / "models" / "small"
        assert found.prompts == tmp_path / "data" / "heldout.jsonl"
        assert find_source(Path(to_run) / "drafter" / "final").target == found.target
    head = run / "drafter" / "final"
    assert find_source(run).chat
    mine = ExportSource(head=head, target=target, prompts=Path("mine.jsonl"), prompt_column="q")
    assert find_source(run, target, "mine.jsonl", prompt_column="q", chat=False) == mine
    (run / "checkpoints" / "final").mkdir(parents=True)
    assert find_source(run).target == run / "checkpoints" / "final"


def test_wrong_input_is_refused_and_nothing_is_written(target, tmp_path):
    new_head(target, "eagle", 0).save(tmp_path / "bare")
    (tmp_path / "nothing").mkdir()
    for path, model, naming in (
        (tmp_path / "nowhere", None, ("nowhere",)),
        (tmp_path / "bare", None, ("--model",)),
        (tmp_path / "bare", tmp_path / "nowhere", ("nowhere",)),
        (tmp_path / "bare", tmp_path / "nothing", ("--prompts",)),
    ):
        with refused(ConfigError, naming=naming):
            find_source(path, model, None)
    other = tmp_path / "other"
    other.mkdir()
    shape = read_json(target / "config.json")
    (other / "config.json").write_text(json.dumps(shape | {"vocab_size": 99}))
    new_head(other, "eagle", 0).save(tmp_path / "foreign")
    (other / "config.json").write_text(json.dumps(shape | {"num_hidden_layers": 9, "layer_types": None}))
    (other / "model.safetensors").write_bytes((target / "model.safetensors").read_bytes())
    new_head(other, "eagle3", 0).save(tmp_path / "deep")
    for head, prompts, facts in (
        ("foreign", target / "heldout.jsonl", ("vocab_size", 99)),
        ("deep", target / "heldout.jsonl", ("layer 6",)),
        ("nothing", target / "heldout.jsonl", ("config",)),
        ("bare", tmp_path / "nowhere.jsonl", ("nowhere.jsonl",)),
    ):
        source = ExportSource(head=tmp_path / head, target=target, prompts=prompts)
        with refused(ConfigError, naming=facts):
            export_drafter(source, tmp_path / "out", CHECK, quiet)
    assert not (tmp_path / "out").exists()
