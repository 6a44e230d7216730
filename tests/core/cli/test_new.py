"""Files that `new` writes run as they stand; `settings` lists all of them; Tab completes what there is."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.refused import refused
from tltlab.cli.app import command_names
from tltlab.policies.policy import Policy
from tltlab.policies.specs import FixedSpec
from tltlab.runtime.recipe.recipe import Recipe, load_recipe
from tltlab.strategy import Strategy

TINY = Path("traces/tiny").resolve()


@pytest.fixture
def said(command, tmp_path, monkeypatch):
    """Runs a command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return command


PARTS = {
    "policy": ["--policy", "quarter_step:QuarterStep(few=2)"],
    "drafter": ["--policy", "policy.json", "--allow-code", "quarter_step"],
    "placement": ["--placement", "quarter_step:QuarterStep"],
    "planner": ["--planner", "quarter_step:QuarterStep", "--gpus", "8xH100", "--model", "Qwen2.5-7B"],
    "costs": ["--costs", "quarter_step:QuarterStep(step_s=0.01)"],
    "acceptance": ["--policy", "ngram:4", "--acceptance", "quarter_step:QuarterStep(first=0.5)"],
}


@pytest.mark.parametrize("kind", PARTS)
def test_a_new_part_meets_its_contract_and_serves(said, tmp_path, capsys, monkeypatch, kind):
    code, out, _ = said("new", kind, "quarter_step")
    assert (code, out) == (0, "wrote quarter_step.py; next: python quarter_step.py\n")
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "quarter_step", raising=False)
    runpy.run_path(str(tmp_path / "quarter_step.py"), run_name="__main__")
    assert "makespan" in (shown := capsys.readouterr().out) or "SimResult" in shown
    drafters = {"mine": {"kind": "custom", "path": "quarter_step:QuarterStep"}}
    Policy(selector=FixedSpec(strategy=Strategy.chain("mine", 4)), drafters=drafters).write("policy.json")
    code, out, err = said("simulate", TINY, "--acceptance", "geometric:0.7", *PARTS[kind], "--json")
    assert code == 0, err
    assert json.loads(out)["makespan_s"] > 0
    monkeypatch.delitem(sys.modules, "quarter_step")


def test_a_new_recipe_and_reward_pass_their_checks(said, tmp_path):
    code, out, err = said("new", "recipe", "mine", "--model", "Qwen/Qwen2.5-7B", "--json")
    assert (code, json.loads(out)["files"]) == (0, ["mine/recipe.toml", "mine/reward.py", "mine/prompts.jsonl"]), err
    assert load_recipe(tmp_path / "mine" / "recipe.toml").model == "Qwen/Qwen2.5-7B"
    code, out, err = said("train", "mine/recipe.toml", "--dry-run")
    assert code == 0, err
    assert "7.62 B parameters" in out
    with refused(SystemExit, naming=("0",)):
        runpy.run_path(str(tmp_path / "mine" / "reward.py"), run_name="__main__")


def test_settings_lists_every_field_with_its_default(said):
    rows = json.loads(said("settings", "--json")[1])["settings"]
    told = {(row["section"], row["name"]): row for row in rows}
    for section in ("data", "rollout", "train", "eval", "cluster", "faults"):
        for name, field in Recipe.model_fields[section].annotation.model_fields.items():  # type: ignore[union-attr]
            assert (section, name) in told or any(row["section"] == f"{section}.{name}" for row in rows), name
            if (section, name) in told and isinstance(field.default, int | float) and field.default is not True:
                assert told[section, name]["default"] == repr(field.default)
    assert told["train", "lr"]["type"] == "float > 0"
    assert told["recipe", "model"]["default"] == "required"
    for row in rows:
        assert f"`{row['name']}`" in row["about"], row
        assert row["about"].endswith((".", '"')), row
    code, out, _ = said("settings", "eval")
    assert code == 0
    assert out.splitlines()[0] == "[eval]"


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("", command_names()),
        ("si", ["simulate"]),
        ("simulate x.csv --pol", ["--policy"]),
        ("trace va", ["validate"]),
        ("trace import --to", ["--tokenizer"]),
        ("--sh", ["--show-completion"]),
        ("nothing --x", []),
        ("off-policy --x", []),
    ],
)
def test_tab_offers_commands_options_and_subcommands(command, monkeypatch, line, offered):
    monkeypatch.setenv("_TLTLAB_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"tltlab {line}")
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) or 1))
    code, out, err = command()
    assert (code, out.split(), err) == (0, offered, "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_completion_script(command, monkeypatch, shell):
    monkeypatch.setenv("_TLTLAB_COMPLETE", f"source_{shell}")
    code, out, _ = command()
    assert code == 0
    assert f"_TLTLAB_COMPLETE=complete_{shell}" in out
