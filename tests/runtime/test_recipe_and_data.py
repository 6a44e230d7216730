"""What a run is told: recipes, prompts and rewards, and what is said when they are wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from tltlab.errors import ConfigError
from tltlab.runtime.data import load_prompts, load_reward, prompt_batch
from tltlab.runtime.recipe import DataConfig, load_recipe

RECIPE = """
model = "m"
reward = "a:b"
[data]
train = "t.jsonl"
[train]
steps = 3
"""


class Words:
    """A tokenizer that counts letters."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_an_override_replaces_a_field_by_its_dotted_name(tmp_path: Path):
    recipe = load_recipe(written(tmp_path / "r.toml", RECIPE), ["train.lr=1e-3", "rollout.policy=beg-mab"])
    assert (recipe.train.steps, recipe.train.lr, recipe.rollout.policy) == (3, 1e-3, "beg-mab")


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("train.stepz=3", "train.stepz"),
        ("train.steps=0", "train.steps"),
        ("train.steps", "not key=value"),
        ("model.x=1", "not a section"),
    ],
)
def test_a_wrong_override_is_named(tmp_path: Path, override: str, complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        load_recipe(written(tmp_path / "r.toml", RECIPE), [override])


def test_all_faults_of_a_recipe_are_told_at_once(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"model.*reward.*data"):
        load_recipe(written(tmp_path / "r.toml", "seed = 1"))


def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="not TOML"):
        load_recipe(written(tmp_path / "r.toml", "model = "))
    with pytest.raises(ConfigError, match="cannot read recipe"):
        load_recipe(tmp_path / "none.toml")


ROWS = [{"prompt": "a bb", "answer": "1"}, {"prompt": "ccc", "answer": "2"}]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_prompts_come_from_jsonl_and_parquet(tmp_path: Path, kind: str):
    path = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    else:
        pd.DataFrame(ROWS).to_parquet(path)
    prompts = load_prompts(str(path), DataConfig(train=str(path)), Words())
    assert [(p.prompt_id, p.text, p.answer, p.token_ids) for p in prompts] == [
        ("0", "a bb", "1", [1, 2]),
        ("1", "ccc", "2", [3]),
    ]


def test_prompts_come_from_a_saved_dataset(tmp_path: Path):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "set"))
    prompts = load_prompts(str(tmp_path / "set"), DataConfig(train="x"), Words())
    assert [p.answer for p in prompts] == ["1", "2"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"prompt": "a"}\n', "row 0 has no column 'answer'"),
        ("{\n", "line 1 is not JSON"),
        ("", "no rows"),
        ('{"prompt": "a", "answer": "1", "prompt_id": "x"}\n' * 2, "not unique"),
    ],
)
def test_a_broken_data_file_is_refused_with_its_fault(tmp_path: Path, text: str, complaint: str):
    path = written(tmp_path / "data.jsonl", text)
    with pytest.raises(ConfigError, match=complaint):
        load_prompts(str(path), DataConfig(train="x"), Words())


def test_a_missing_data_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none\.jsonl"):
        load_prompts(str(tmp_path / "none.jsonl"), DataConfig(train="x"), Words())


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("json", "package.module:function"),
        ("no_such_module_here:f", "does not import"),
        ("json:no_such_function", "has no 'no_such_function'"),
        ("json:__name__", "not a function"),
    ],
)
def test_a_reward_that_cannot_be_called_is_refused(path: str, complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        load_reward(path)


def test_an_epoch_shows_every_prompt_once_in_an_order_of_the_seed():
    epoch = [prompt_batch(12, step, 4, seed=5) for step in range(3)]
    assert sorted(number for batch in epoch for _, number in batch) == list(range(12))
    assert {e for batch in epoch for e, _ in batch} == {0}
    assert prompt_batch(12, 3, 4, seed=5)[0][0] == 1
    assert prompt_batch(12, 1, 4, seed=5) == epoch[1]
    assert prompt_batch(12, 1, 4, seed=6) != epoch[1]


def test_fewer_prompts_than_a_batch_make_a_smaller_batch():
    assert len(prompt_batch(3, 0, 8, seed=0)) == 3
