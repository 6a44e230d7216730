"""What a run says and where its metrics go."""

import contextlib
import os
import pty
import sys
import threading
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.runtime.recipe.sections import LogConfig
from tltlab.runtime.run import logging as run_log
from tltlab.runtime.run.logging import PACE_STEPS, RunLog, step_text
from tltlab.runtime.run.rows import StepReport
from tltlab.runtime.run.state import RunEvents


def wandb_like(called: Callable[..., None]) -> ModuleType:
    """A stand-in for W&B that tells `called` what it was asked to do."""

    def log(metrics: dict[str, float], step: int, commit: bool) -> None:
        assert commit
        if metrics.get("fail"):
            raise ConnectionError("no answer from https://me:hunter2@example.org/api")
        called("log", metrics, step)

    def init(project: str, name: str, dir: str, id: str | None, resume: str, config: Any, settings: Any) -> Any:
        assert os.path.isdir(dir)
        if project == "locked":
            raise RuntimeError("no login")
        called("init", project, name, id, config)
        return SimpleNamespace(
            id=id or "w-1",
            define_metric=lambda name, step_metric: None,
            log=log,
            finish=lambda exit_code: called("finish", exit_code),
        )

    return module("wandb", init=init, Settings=lambda console, quiet: None)


def mlflow_like(called: Callable[..., None]) -> ModuleType:
    """The same for MLflow."""
    logged: list[int] = []

    def log_metrics(metrics: dict[str, float], step: int, run_id: str) -> None:
        if metrics.get("fail"):
            raise ConnectionError("no answer")
        called("log_metrics", metrics, step)
        logged.append(step)

    class MlflowClient:
        def create_run(self, experiment_id: str, run_name: str) -> Any:
            called("create_run", experiment_id, run_name)
            return SimpleNamespace(info=SimpleNamespace(run_id="m-1"))

        def update_run(self, run_id: str, status: str) -> None:
            called("update_run", run_id, status)

        def get_metric_history(self, run_id: str, key: str) -> list[Any]:
            return [SimpleNamespace(step=step) for step in logged]

        def set_terminated(self, run_id: str, status: str) -> None:
            called("set_terminated", run_id, status)

    return module(
        "mlflow",
        MlflowClient=MlflowClient,
        set_experiment=lambda project: SimpleNamespace(experiment_id=project),
        log_params=lambda params, run_id: called("log_params", params),
        log_metrics=log_metrics,
    )


def module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    vars(made).update(members)
    return made


MEASURES = {
    "rollout/bubble_fraction": 0.25, "rollout/mean_accept_length": 2.31, "mismatch/kl": 2.2e-13,
    "length/p50": 20.0, "length/p90": 117.5, "length/p99": 128.0, "length/truncated_fraction": 0.125,
}  # fmt: skip


def report(rl_step: int = 0, reward: float = 0.5) -> StepReport:
    return StepReport(
        rl_step=rl_step, policy="none", reward_mean=reward, num_tokens=100, rollout_s=2.0, reward_s=0.1,
        inference_s=0.2, train_s=0.3, sync_s=0.1, recorder_s=0.01, metrics={}, notes=["worker 1 was started again"],
    )  # fmt: skip


def scalars(out: Path, name: str) -> dict[int, float]:
    """What TensorBoard reads back: value by RL step."""
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(name)}


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """Stand-ins for W&B and MLflow; what they are asked to do, in order."""
    calls: list[list[Any]] = []
    for stand_in in (wandb_like, mlflow_like):
        made = stand_in(lambda *call: calls.append(deepcopy(list(call))))
        monkeypatch.setitem(sys.modules, made.__name__, made)
    return calls


def test_tensorboard_shows_each_metric_at_its_rl_step(tmp_path: Path):
    with RunLog(LogConfig(), tmp_path, 2) as log:
        log.step(report(0), {"reward/mean": 0.5, "time/step_s": 2.5})
        assert scalars(tmp_path, "reward/mean") == {0: 0.5}  # it is there as soon as the step is done
        log.step(report(1), {"reward/mean": 0.75})
    assert scalars(tmp_path, "reward/mean") == {0: 0.5, 1: 0.75}
    assert scalars(tmp_path, "time/step_s") == {0: 2.5}


def test_a_resumed_run_takes_the_place_of_the_steps_it_repeats_and_so_does_one_that_went_back(tmp_path: Path):
    with RunLog(LogConfig(), tmp_path, 4) as log:
        for rl_step in range(3):
            log.step(report(rl_step), figures(float(rl_step)))
    with RunLog(LogConfig(), tmp_path, 4, resume_from=1) as log:
        log.step(report(1), figures(10.0))
        assert scalars(tmp_path, "reward/mean") == {0: 0.0, 1: 10.0}
        for rl_step, reward in ((2, 20.0), (3, 30.0), (2, 21.0)):  # a trainer had died
            log.step(report(rl_step), figures(reward))
            log.measured(rl_step, {"reward/heldout": reward})
    assert scalars(tmp_path, "reward/mean") == {0: 0.0, 1: 10.0, 2: 21.0}
    assert scalars(tmp_path, "reward/heldout") == {2: 21.0}


@pytest.mark.parametrize("forced", ["", "1"])
def test_where_there_is_no_terminal_a_step_is_plain_lines(tmp_path: Path, forced: str, monkeypatch, capfd):
    monkeypatch.setenv("FORCE_COLOR", forced)  # as CI services do
    monkeypatch.setenv("TERM", "xterm-256color")
    with RunLog(LogConfig(), tmp_path, 1) as log:
        log.say("held-out reward before training 0.500")
        log.step(report(), MEASURES)
    out, err = capfd.readouterr()
    assert out == ""
    assert err == (
        f"RL steps 0 to 0 into {tmp_path}: starting workers and trainer\n"
        "held-out reward before training 0.500\n"
        f"{step_text(report(), MEASURES, '0:00:00')}\n"
    )


def test_a_note_is_said_at_once_and_not_again_with_its_step(tmp_path: Path, capfd):
    with RunLog(LogConfig(tensorboard=False), tmp_path, 2) as log:
        events = RunEvents(tmp_path / "events.jsonl")
        events.watch = log.note
        events.note("worker 1 was started again")
        assert capfd.readouterr().err.splitlines()[1:] == ["worker 1 was started again"]
        log.step(replace(report(0), notes=events.take()), MEASURES)
        assert "started again" not in capfd.readouterr().err
        log.step(report(1), MEASURES)
        assert "  worker 1 was started again\n" in capfd.readouterr().err


def test_a_run_that_has_no_step_left_says_so(tmp_path: Path, capfd):
    with RunLog(LogConfig(tensorboard=False), tmp_path, 3, resume_from=3):
        pass
    assert capfd.readouterr().err == f"all 3 RL steps are in {tmp_path}: starting workers and trainer\n"


def test_a_step_says_its_time_by_stage_and_what_the_measures_have():
    assert step_text(report(3), MEASURES, "0:01:20").splitlines() == [
        "step 3: reward 0.500, 100 tokens in 2.70 s, policy none, 0:01:20 left",
        "  seconds: rollout 2.00, reward 0.10, inference 0.20, train 0.30, sync 0.10",
        "  50 tokens/s, bubble 25%, accept length 2.31, mismatch KL 2.2e-13",
        "  length p50 20, p90 118, p99 128, cut 12%",
        "  worker 1 was started again",
    ]
    assert len(step_text(report(), {}, "0:00:00").splitlines()) == 4  # nothing is made up
    assert str(report(3)).splitlines() == [
        "step 3: reward 0.500, 100 tokens in 2.00 s (50/s), train 0.50 s, sync 0.10 s, none",
        "  worker 1 was started again",
    ]


def test_the_time_left_follows_from_the_newest_steps(tmp_path: Path, capfd):
    with RunLog(LogConfig(tensorboard=False), tmp_path, 40) as log:
        for rl_step in range(1 + PACE_STEPS):
            log.step(replace(report(rl_step), step_s=1000.0 if rl_step == 0 else 90.0), {})
    lefts = [line.split(", ")[-1] for line in capfd.readouterr().err.splitlines() if line.startswith("step")]
    assert lefts[0] == "10:50:00 left"
    assert lefts[-1] == "0:46:30 left"  # 31 steps of 90 s
    assert list(tmp_path.iterdir()) == [], "without loggers nothing is written"


def test_on_a_terminal_lines_pass_above_a_progress_bar_and_stdout_stays_clean(tmp_path: Path, monkeypatch, capsys):
    terminal, its_end = pty.openpty()
    seen: list[bytes] = []

    def watch() -> None:
        with contextlib.suppress(OSError):  # which says that the other end was closed
            while chunk := os.read(terminal, 4096):
                seen.append(chunk)

    watching = threading.Thread(target=watch)
    watching.start()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    with os.fdopen(its_end, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with RunLog(LogConfig(tensorboard=False), tmp_path, 3, resume_from=1) as log:
            log.say("[bold]not markup[/bold]")
            log.step(report(1, reward=0.625), {})
            print('{"only": "json"}')
        monkeypatch.undo()
    watching.join(timeout=300)
    os.close(terminal)
    text = b"".join(seen).decode()
    assert capsys.readouterr().out == '{"only": "json"}\n'
    assert "[bold]not markup[/bold]" in text
    assert "step 1: reward 0.625, 100 tokens" in text
    assert text.index("1/3") < text.index("2/3")
    end = text[text.rindex("RL steps") :]
    assert "reward 0.625" in end
    assert "left 0:00:03" in end  # nothing is cut off at 80 columns


def figures(reward: float) -> dict[str, float]:
    return {"time/step_s": 2.0, "reward/mean": reward}


def log_in_two_processes(config: LogConfig, out: Path, settings: dict[str, Any]) -> None:
    """The second goes on from RL step 1, which the first did twice, and is interrupted."""
    with RunLog(config, out, 3, settings=settings) as log:
        log.measured(0, {"reward/heldout": 0.4})
        log.step(report(0), figures(0.5))
        log.measured(0, {"reward/heldout": 0.6})
        log.step(report(1), figures(0.6))
        log.step(report(1), figures(0.65))  # a trainer had died
    with contextlib.suppress(KeyboardInterrupt), RunLog(config, out, 3, resume_from=1) as log:
        log.step(report(1), figures(0.7))
        log.step(report(2), figures(0.8))
        raise KeyboardInterrupt


def test_wandb_gets_every_step_once_and_a_resumed_run_goes_on_in_the_same_one(tmp_path: Path, services):
    log_in_two_processes(LogConfig(tensorboard=False, wandb="tails"), tmp_path / "run", {"lr": 0.1})
    assert services == [
        ["init", "tails", "run", None, {"lr": 0.1}],
        ["log", {"reward/heldout": 0.4, "rl_step": 0}, 0],
        ["log", figures(0.5) | {"rl_step": 0}, 1],
        ["log", {"reward/heldout": 0.6, "rl_step": 0}, 2],
        ["log", figures(0.6) | {"rl_step": 1}, 3],
        ["finish", 0],
        ["init", "tails", "run", "w-1", {}],
        ["log", figures(0.8) | {"rl_step": 2}, 6],
        ["finish", 1],
    ]


def test_mlflow_gets_every_step_once_and_a_resumed_run_goes_on_in_the_same_one(tmp_path: Path, services):
    settings = {"recipe": {"train": {"lr": 0.1}, "drafters": {}}, "argv": ["x"]}
    log_in_two_processes(LogConfig(tensorboard=False, mlflow="tails"), tmp_path / "run", settings)
    assert services == [
        ["create_run", "tails", "run"],
        ["log_params", {"recipe.train.lr": 0.1, "recipe.drafters": {}, "argv": ["x"]}],
        ["log_metrics", {"reward/heldout": 0.4}, 0],
        ["log_metrics", figures(0.5), 0],
        ["log_metrics", {"reward/heldout": 0.6}, 0],
        ["log_metrics", figures(0.6), 1],
        ["set_terminated", "m-1", "FINISHED"],
        ["update_run", "m-1", "RUNNING"],
        ["log_metrics", figures(0.8), 2],
        ["set_terminated", "m-1", "FAILED"],
    ]


def test_the_real_mlflow_keeps_every_step_once(tmp_path: Path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.chdir(tmp_path)
    config = LogConfig(tensorboard=False, mlflow="tails")
    settings = {"recipe": {f"setting_{number}": "x" * 7000 for number in range(150)}}
    with RunLog(config, tmp_path / "run", 3, settings=settings) as log:
        for rl_step in (0, 1):
            log.step(report(rl_step), {"time/step_s": 1.0 + rl_step})
    with contextlib.suppress(KeyboardInterrupt), RunLog(config, tmp_path / "run", 3, resume_from=1) as log:
        for rl_step in (1, 2):
            log.step(report(rl_step), {"time/step_s": 10.0 + rl_step})
        raise KeyboardInterrupt
    (run,) = mlflow.search_runs(experiment_names=["tails"], output_format="list")
    assert (run.info.status, run.info.run_name, len(run.data.params)) == ("FAILED", "run", 150)
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "time/step_s")
    assert {metric.step: metric.value for metric in history} == {0: 1.0, 1: 2.0, 2: 12.0}
    assert len(history) == 3


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_logger_that_is_not_installed_is_named_before_anything_starts(tmp_path: Path, name: str, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with refused(ConfigError, naming=("install", name)):
        RunLog(LogConfig(**{name: "tails"}), tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_logger_that_does_not_start_is_an_error_and_ends_the_others(tmp_path: Path, services):
    with refused(ConfigError, naming=("W&B", "RuntimeError", "log.wandb")):
        RunLog(LogConfig(wandb="locked"), tmp_path / "run", 1)
    (tmp_path / "run" / "file").write_text("in the way")
    with refused(ConfigError, naming=("TensorBoard",)):
        RunLog(LogConfig(), tmp_path / "run" / "file", 1)


def test_a_logger_that_fails_later_is_left_out_and_the_run_goes_on(tmp_path: Path, services, capfd):
    with RunLog(LogConfig(wandb="tails"), tmp_path / "run", 3) as log:
        log.step(report(0), {"fail": 1.0})
        log.step(report(1), {"fail": 1.0})
    err = capfd.readouterr().err
    assert err.count("W&B failed and gets nothing more: ConnectionError") == 1
    assert "hunter2" not in err
    assert scalars(tmp_path / "run", "fail") == {0: 1.0, 1: 1.0}
    assert [call[0] for call in services] == ["init"]


def test_what_mlflow_fails_at_in_its_thread_is_said_and_the_run_goes_on(tmp_path: Path, services, capfd):
    with RunLog(LogConfig(tensorboard=False, mlflow="tails"), tmp_path / "run", 3) as log:
        log.step(report(0), {"fail": 1.0})
    assert capfd.readouterr().err.count("MLflow failed and gets nothing more: ConnectionError: no answer") == 1
    assert [call[0] for call in services] == ["create_run", "log_params"]


def test_a_full_disk_costs_the_event_file_and_not_the_run(tmp_path: Path, capfd, monkeypatch):
    with RunLog(LogConfig(), tmp_path, 3) as log:
        log.step(report(0), {"reward/mean": 0.5})
        full = open("/dev/full", "wb")  # noqa: SIM115
        monkeypatch.setattr(log._loggers["TensorBoard"], "_records", run_log.RecordWriter(full))
        monkeypatch.setattr(log._loggers["TensorBoard"], "_file", full)
        log.step(report(1), {"reward/mean": 0.6})
        log.step(report(2), {"reward/mean": 0.7})
    err = capfd.readouterr().err
    assert err.count("TensorBoard failed and gets nothing more: OSError: [Errno 28]") == 1
    assert "step 2" in err
    assert scalars(tmp_path, "reward/mean") == {0: 0.5}
    full.raw.close()


def test_a_terminal_that_is_gone_does_not_stop_the_run(tmp_path: Path, monkeypatch):
    with RunLog(LogConfig(), tmp_path, 1) as log, open("/dev/full", "w") as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        log.step(report(), {"reward/mean": 0.5})
        monkeypatch.undo()
        gone.buffer.raw.close()
    assert scalars(tmp_path, "reward/mean") == {0: 0.5}
