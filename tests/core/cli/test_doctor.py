"""`tltlab doctor` as a command: reports on a run and a simulation."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest

import tltlab.report.write
import tltlab.sim
from tltlab.policies.bandits import EpsilonGreedy
from tltlab.policies.policy import Policy
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.traces.trace import read

TRACES = Path(__file__).resolve().parents[3] / "traces"


@pytest.fixture
def doctor(command):
    return partial(command, "doctor")


def test_a_recorded_run_is_reported_in_both_formats(doctor):
    code, out, err = doctor(TRACES / "subset-sum-small", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert set(found) == {"run", "simulated", "findings", "fine", "not_checked", "ok", "verdict"}
    # Sixteen RL steps on a CPU, most of whose time went into training; its policy was picked and does gain.
    assert [finding["code"] for finding in found["findings"]] == ["rollout-not-bottleneck"]
    assert {"drafts-lose-time", "acceptance-low"} <= {check["name"] for check in found["fine"]}
    assert all(missing["why"] for missing in found["not_checked"])
    code, out, _ = doctor(TRACES / "subset-sum-small")
    assert code == 0
    assert found["findings"][0]["title"] in out
    assert out.startswith(found["verdict"])
    assert out.count(found["findings"][0]["evidence"]) == 1


def test_a_run_may_be_the_current_folder(doctor, tmp_path, monkeypatch):
    read(TRACES / "tiny").select([0]).write(tmp_path / "run" / "trace")
    deep = "[" * 100_000
    (tmp_path / "run" / "events.jsonl").write_text(f'{deep}\n{{"event": "began", "rl_step": 0}}\n')
    for folder in ("run", "run/trace"):
        monkeypatch.chdir(tmp_path / folder)
        assert doctor(".", "--json")[0] == 0
    monkeypatch.chdir(tmp_path / "run")
    page = tltlab.report.write.report(Path("."), verify=False)
    assert "Events" in {section.title for section in page.sections}


def test_a_folder_of_runs_names_them(doctor, tmp_path):
    """A log next to them is not taken for the folder's own."""
    for name in ("first", "second"):
        read(TRACES / "tiny").select([0]).write(tmp_path / "runs" / name / "trace")
        (tmp_path / "runs" / name / "tensorboard").mkdir()
        (tmp_path / "runs" / name / "tensorboard" / "events.out.tfevents.1.host.2").touch()
    (tmp_path / "runs" / "notes").mkdir()
    os.utime(tmp_path / "runs" / "first", (1, 1))
    code, out, err = doctor(tmp_path / "runs")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert f"tltlab doctor {tmp_path / 'runs' / 'second'}" in err
    assert " first " in err
    assert "notes" not in err


def test_a_simulated_run_is_reported_as_a_prediction(tmp_path, doctor):
    arms = (NO_SPECULATION, Strategy.chain("ngram", 8), Strategy.chain("ngram", 1))
    policy = Policy(selector=EpsilonGreedy.Spec(strategies=arms, epsilon=0.9, reward="relative"))
    result = tltlab.sim.simulate(read(TRACES / "tiny"), policy=policy, mode="sampled", record_iterations=True)
    result.trace.write(tmp_path / "trace")
    code, out, _ = doctor(tmp_path / "trace", "--json")
    found = json.loads(out)
    told = {finding["code"] for finding in found["findings"]}
    assert (code, found["simulated"]) == (0, True)
    assert "switches-often" in told
    assert "simulated" in doctor(tmp_path / "trace")[1]
