"""A model of our own: the folder others load, that a seed fixes it, and what is said about it."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.files import json_lines, read_json
from tltlab.runtime.cli.make_model import _text
from tltlab.runtime.cli.make_model import make_model as command
from tltlab.runtime.models.make import (
    NUM_HELDOUT_PROMPTS,
    NUM_TRAIN_PROMPTS,
    SIZES,
    Size,
    _batches,
    draw_problems,
    make_model,
    make_tokenizer,
    pretrain,
)
from tltlab.runtime.models.measure import sample
from tltlab.runtime.models.tasks import TASKS

from ..small_models import small_shape

SMALLEST = Size(hidden=64, layers=1, mlp=64, steps=25, tokens_per_batch=512, measured_prompts=2, samples_per_prompt=2)


def make(out, *, seed=0, task="subset-sum", size=SMALLEST, progress=lambda message: None):
    return make_model(out, size=size, task=task, seed=seed, progress=progress)


@pytest.fixture(scope="module", autouse=True)
def short_responses():
    """Models that have learned nothing yet seldom end a response."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tltlab.runtime.models.make.MAX_RESPONSE_TOKENS", 64)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("models") / "small"
    said = []
    return out, make(out, progress=said.append), said


@pytest.fixture(autouse=True)
def few_prompts(made, monkeypatch):
    """Drawing as many as the first model has takes longer than training one."""
    for split in ("TRAIN", "HELDOUT"):
        monkeypatch.setattr(f"tltlab.runtime.models.make.NUM_{split}_PROMPTS", 64)
    monkeypatch.setattr("tltlab.runtime.models.make._POOL_ROWS", 64)


def test_the_folder_loads_as_an_ordinary_model(made):
    out, report, _ = made
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.dtype == torch.float32
    assert sum(p.numel() for p in model.parameters()) == report["parameters"]
    ids = tokenizer("nums 9 7 goal 16 go")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert len(ids) == 7
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "nums 9 7 goal 16 go"


def test_held_out_prompts_are_not_trained_on(made):
    rows = {split: json_lines(made[0] / f"{split}.jsonl") for split in ("train", "heldout")}
    train, heldout = ({row["prompt"] for row in rows[split]} for split in ("train", "heldout"))
    assert (len(train), len(heldout)) == (NUM_TRAIN_PROMPTS, NUM_HELDOUT_PROMPTS)
    assert not train & heldout
    assert set(rows["train"][0]) == {"prompt_id", "prompt", "answer"}


def test_the_report_is_that_of_the_file(made):
    out, report, said = made
    assert read_json(out / "report.json") == report
    assert any("loss" in message for message in said)


def test_training_lowers_the_loss(made, tmp_path):
    torch.manual_seed(3)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    untrained = make(tmp_path / "m", size=replace(SMALLEST, steps=1))
    assert made[1]["final_loss"] < untrained["final_loss"]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_two_threads_take_the_step_of_one(made):
    tokenizer, task = AutoTokenizer.from_pretrained(made[0]), TASKS["subset-sum"]
    problems, _ = draw_problems(task, seed=0)
    batches = _batches(tokenizer, task, problems, 512, np.random.default_rng(0))
    ids, labels = next((ids, labels) for ids, labels in batches if len(ids) > 2 and len(ids) % 2)
    models = [AutoModelForCausalLM.from_pretrained(made[0]) for _ in range(2)]
    loss = pretrain(models[0], iter([(ids, labels)]), replace(SMALLEST, steps=1), progress=lambda message: None)
    whole = models[1](input_ids=ids).logits.transpose(1, 2)
    expected = torch.nn.functional.cross_entropy(whole, labels)
    expected.backward()
    assert loss == pytest.approx(expected.item())
    for name, param in models[0].named_parameters():
        torch.testing.assert_close(param.grad, models[1].get_parameter(name).grad, msg=name, rtol=1e-3, atol=1e-5)


def test_a_seed_fixes_the_weights(tmp_path):
    folders = [tmp_path / name for name in ("first", "same", "other")]
    for folder, seed in zip(folders, (0, 0, 1), strict=True):
        make(folder, seed=seed, size=replace(SMALLEST, steps=4))
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1] != weights[2]
    assert (folders[0] / "train.jsonl").read_bytes() == (folders[1] / "train.jsonl").read_bytes()


def test_only_an_earlier_model_is_replaced(tmp_path):
    def full_disk(message):
        raise RuntimeError(message)

    with pytest.raises(RuntimeError):
        make(tmp_path / "out", progress=full_disk)
    assert not list(tmp_path.iterdir())
    quick = replace(SMALLEST, steps=1)
    out = tmp_path / "deep" / "model"
    make(out, size=quick)
    make(out, size=quick, task="gcd")
    assert read_json(out / "report.json")["task"] == "gcd"
    assert [path.name for path in out.parent.iterdir()] == ["model"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with refused(ConfigError, naming=("exists",)):
        make(tmp_path / "mine", size=quick)


def test_the_command_prints_the_report(tmp_path, monkeypatch, capsys, as_json):
    monkeypatch.setitem(SIZES, "tiny", replace(SMALLEST, steps=1))
    command(size="tiny", out=tmp_path / "m")
    printed = json.loads(capsys.readouterr().out)
    assert (printed["out"], printed["sampled"]["num_prompts"]) == (str(tmp_path / "m"), 2)
    assert str(tmp_path / "m") in _text(tmp_path / "m", printed)


@pytest.mark.parametrize("wrong", [{"size": "huge"}, {"task": "chess"}])
def test_a_wrong_name_is_refused(tmp_path, wrong):
    with refused(ConfigError, naming=tuple(wrong.values())):
        make(tmp_path / "out", **wrong)
    assert not list(tmp_path.iterdir())


def test_sampling_follows_the_plain_model():
    torch.manual_seed(0)
    tokenizer = make_tokenizer(TASKS["gcd"])
    model = LlamaForCausalLM(LlamaConfig(**small_shape(vocab_size=192, initializer_range=0.3))).eval()
    prompts = [tokenizer(text)["input_ids"] for text in ("gcd 12 18 6 go", "gcd go", "5")]
    # So cold that only the likeliest token can be drawn.
    cold = sample(model, prompts, temperature=1e-4, max_tokens=12, seed=0)
    for prompt, response in zip(prompts, cold, strict=True):
        ids = list(prompt)
        for token in response:
            assert int(model(torch.tensor([ids])).logits[0, -1].argmax()) == token
            ids.append(token)
