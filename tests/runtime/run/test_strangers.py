"""A run goes on with what it began with: prompts, answers, model, tokenizer and reward are compared by content."""

import json

import pytest

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.runtime.data.prompts import Prompt
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.run import inputs
from tltlab.runtime.run.inputs import check_inputs


class Data:
    """Prompts of a run, as `RunData` holds them."""

    def __init__(self, **changed):
        row = {"text": "q", "answer": "4", "token_ids": [1, 2]}
        self.train = [Prompt(prompt_id=f"p{at}", **row) for at in range(3)]
        self.train[1] = Prompt(**({"prompt_id": "p1"} | row | changed))
        self.heldout = {}


@pytest.fixture
def recipe(tmp_path):
    """A recipe with a model's folder and a run with a copy of its reward."""
    for name, content in {
        "m/config.json": "{}",
        "m/model.safetensors": "w" * 100,
        "mine.py": "A",
        "run/code/mine.py": "A",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    code = (str(tmp_path / "run" / "code"), str(tmp_path))
    return Recipe.model_validate(
        {"model": str(tmp_path / "m"), "reward": "mine:r", "data": {"train": "t.jsonl"}, "code": code}
    )


@pytest.mark.parametrize(
    ("changed", "files", "facts"),
    [
        ({"text": "r"}, {}, ("data.train", "t.jsonl", "prompt 1", "'p1'")),
        ({"answer": "999"}, {}, ("t.jsonl", "prompt 1")),
        ({"token_ids": [1, 3]}, {}, ("t.jsonl", "prompt 1")),
        ({}, {"m/config.json": "{ }"}, ("model/config.json",)),
        ({}, {"m/model.safetensors": "w" * 50 + "x" + "w" * 49}, ("model/model.safetensors",)),
        ({}, {"mine.py": "B"}, ("mine.py", "source")),
        ({}, {"run/code/mine.py": "B"}, ("code/mine.py",)),
    ],
    ids=["text", "answer", "tokenizer", "config", "weights", "reward", "copy of the reward"],
)
def test_a_run_goes_on_with_what_it_began_with(recipe, tmp_path, monkeypatch, changed, files, facts):
    monkeypatch.setattr(inputs, "_WHOLE_BYTES", 50)
    monkeypatch.setattr(inputs, "_BLOCK_BYTES", 10)
    run = tmp_path / "run"
    assert check_inputs(recipe, Data(), run, resume=False, allow_other=False) == []
    assert check_inputs(recipe, Data(), run, resume=True, allow_other=False) == []
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    before = (run / "inputs.json").read_bytes()
    with refused(ConfigError, naming=("--allow-other-data", *facts)):
        check_inputs(recipe, Data(**changed), run, resume=True, allow_other=False)
    assert (run / "inputs.json").read_bytes() == before
    (difference,) = check_inputs(recipe, Data(**changed), run, resume=True, allow_other=True)
    assert facts[0] in difference
    assert check_inputs(recipe, Data(**changed), run, resume=True, allow_other=False) == []


def test_a_moved_run_goes_on_and_one_without_digests_too(recipe, tmp_path):
    run, data = tmp_path / "run", Data()
    check_inputs(recipe, data, run, resume=False, allow_other=False)
    data.train = data.train[:2]
    with refused(ConfigError, naming=("3 prompts", "has 2")):
        check_inputs(recipe, data, run, resume=True, allow_other=False)
    (tmp_path / "mine.py").unlink()
    (tmp_path / "m").rename(tmp_path / "n")
    moved = recipe.model_copy(update={"model": str(tmp_path / "n")})
    assert check_inputs(moved, Data(), run, resume=True, allow_other=False) == []
    known = json.loads((run / "inputs.json").read_text())
    assert {"model/config.json", "code/mine.py", "data.train"} <= known.keys()
    (run / "inputs.json").unlink()
    assert check_inputs(recipe, data, run, resume=True, allow_other=False) == []
