"""What a run is told: recipes, and what is said when they are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tltlab.errors import ConfigError
from tltlab.runtime.recipe import load_recipe

RECIPE = """
model = "m"
reward = "a:b"
[data]
train = "t.jsonl"
[train]
steps = 3
"""


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
