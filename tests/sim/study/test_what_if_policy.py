"""The policy that `tltlab what-if` finds is a file for the next command."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.sim.workloads import typed
from tltlab.policies.policy import load_policy
from tltlab.sim.study.what_if import what_if
from tltlab.traces.metrics import rollout_s

MACHINE = ("--gpus", "2xH100", "--model", "Qwen2.5-7B")
ASKED = (*MACHINE, "--systems", "verl")


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.csv"
    path.write_text("length\n" + "120\n" * 60 + "3000\n" * 4)
    return path


@pytest.mark.parametrize(
    "options",
    [MACHINE, ("--costs", "h100-qwen2.5-7b", "--workers", "2", "--accept", "0.8"), ("--rl-steps", "0", "--seed", "3")],
)
def test_the_command_printed_simulates_the_policy_found(lengths: Path, capsys, options: tuple[str, ...]):
    out = lengths.parent / "policy file.json"
    asked = ("what-if", str(lengths), *options, "--systems", "verl", "--policy-out", str(out))
    code, printed, _ = typed(capsys, *asked, "--json")
    found = json.loads(printed)
    assert (code, found["policy_out"]) == (0, str(out))
    told = load_policy(out).provenance
    assert told["command"] == found["command"]
    assert told["simulated"]
    assert (told["versions"]["tltlab"], told["machine"]) == (version("tltlab"), found["setting"])
    line = next(line for line in typed(capsys, *asked)[1].splitlines() if "tltlab simulate" in line)
    _, *command = shlex.split(line.partition(": ")[2])
    replayed = json.loads(typed(capsys, *command, "--json")[1])
    row = next(row for row in found["systems"] if row["system"] == "verdict-table")
    assert replayed["makespan_s"] == pytest.approx(row["makespan_s"])
    for name, ratio in found["speedup"].items():
        assert replayed["speedup"][name] == (ratio and pytest.approx(ratio["mean"]))
    assert f"{replayed['speedup']['rollout']:.2f}x" in typed(capsys, *command)[1]


def test_the_verdict_is_first_and_last(lengths: Path, capsys):
    lines = [line for line in typed(capsys, "what-if", str(lengths), *ASKED)[1].splitlines() if line]
    assert lines.count(lines[0]) == 2
    assert "--policy-out" in lines[-1]


def test_a_folder_is_no_policy_file(lengths: Path, capsys):
    code, out, err = typed(capsys, "what-if", str(lengths), *ASKED, "--policy-out", str(lengths.parent))
    assert (code, out) == (2, "")
    assert str(lengths.parent) in err


def test_the_page_shows_lengths_and_both_rollouts(lengths: Path, capsys):
    page = lengths.parent / "page.html"
    assert typed(capsys, "what-if", str(lengths), *ASKED, "--out", str(page))[0] == 0
    text = page.read_text()
    assert all(title in text for title in ("Response lengths", "Timelines", "without speculation"))


def test_the_timelines_are_of_the_median_step():
    found = what_if([[100, 400], [100, 3000], [100, 900]], costs="h100-qwen2.5-7b", workers=1, systems="verl")
    plain, drafting = found.timelines()
    assert list(plain.rl_steps) == list(drafting.rl_steps) == [2]
    assert rollout_s(drafting)[2] < rollout_s(plain)[2]
