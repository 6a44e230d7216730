"""What a run says and where its metrics go."""

import contextlib
import json
import os
import pty
import sys
import threading
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tltlab.errors import ConfigError
from tltlab.runtime import run_log
from tltlab.runtime.recipe import LogConfig
from tltlab.runtime.run_log import RunLog
from tltlab.runtime.step_rows import StepReport

RECORDS = """
import json, os
CALLS = os.environ["CALLS"]

def called(*call):
    with open(CALLS, "a") as file:
        file.write(json.dumps(call) + "\\n")
"""

WANDB = (
    RECORDS
    + """
class Settings:
    def __init__(self, console):
        self.console = console

class Run:
    def __init__(self, id):
        self.id = id

    def log(self, metrics, step):
        if metrics.get("fail"):
            raise ConnectionError("no answer from https://me:hunter2@example.org/api")
        called("log", metrics, step)

    def finish(self, exit_code):
        called("finish", exit_code)

def init(project, name, dir, id, resume, config, settings):
    assert os.path.isdir(dir)
    if project == "locked":
        raise RuntimeError("no login")
    called("init", project, name, id, config)
    return Run(id or "w-1")
"""
)

MLFLOW = (
    RECORDS
    + """
from types import SimpleNamespace

def set_experiment(project):
    called("set_experiment", project)

def start_run(run_id, run_name):
    called("start_run", run_id, run_name)
    return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "m-1"))

def log_params(params):
    called("log_params", params)

def log_metrics(metrics, step, synchronous):
    called("log_metrics", metrics, step)

def end_run(status):
    called("end_run", status)
"""
)


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
def services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Stand-ins for W&B and MLflow that note their calls; returns what reads the notes."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "wandb.py").write_text(WANDB)
    (folder / "mlflow.py").write_text(MLFLOW)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    for name in ("wandb", "mlflow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield lambda: [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    for name in ("wandb", "mlflow"):
        sys.modules.pop(name, None)


def test_tensorboard_shows_each_metric_at_its_rl_step(tmp_path: Path):
    with RunLog(LogConfig(), tmp_path, 2) as log:
        log.step(report(0), {"reward/mean": 0.5, "time/step_s": 2.5})
        assert scalars(tmp_path, "reward/mean") == {0: 0.5}  # it is there as soon as the step is done
        log.step(report(1), {"reward/mean": 0.75})
    assert scalars(tmp_path, "reward/mean") == {0: 0.5, 1: 0.75}
    assert scalars(tmp_path, "time/step_s") == {0: 2.5}


def test_a_resumed_run_takes_the_place_of_the_steps_it_repeats(tmp_path: Path):
    with RunLog(LogConfig(), tmp_path, 4) as log:
        for rl_step in range(3):
            log.step(report(rl_step), {"reward/mean": float(rl_step)})
    with RunLog(LogConfig(), tmp_path, 4, resume_from=1) as log:
        log.step(report(1), {"reward/mean": 10.0})
    assert scalars(tmp_path, "reward/mean") == {0: 0.0, 1: 10.0}


def test_without_loggers_nothing_is_written(tmp_path: Path):
    with RunLog(LogConfig(tensorboard=False), tmp_path, 1) as log:
        log.step(report(), {"reward/mean": 0.5})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("forced", ["", "1"])
def test_where_there_is_no_terminal_a_step_is_plain_lines(tmp_path: Path, forced: str, monkeypatch, capfd):
    monkeypatch.setenv("FORCE_COLOR", forced)  # as CI services do
    monkeypatch.setenv("TERM", "xterm-256color")
    with RunLog(LogConfig(), tmp_path, 1) as log:
        log.say("held-out reward before training 0.500")
        log.step(report(), {})
    out, err = capfd.readouterr()
    assert out == ""
    assert err == f"held-out reward before training 0.500\n{report()}\n"


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
    monkeypatch.setenv("COLUMNS", "200")
    with os.fdopen(its_end, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with RunLog(LogConfig(tensorboard=False), tmp_path, 3, resume_from=1) as log:
            log.say("[bold]not markup[/bold]")
            log.step(report(1, reward=0.625), {})
            print('{"only": "json"}')
        monkeypatch.undo()
    watching.join(timeout=30)
    os.close(terminal)
    text = b"".join(seen).decode()
    assert capsys.readouterr().out == '{"only": "json"}\n'
    assert "[bold]not markup[/bold]" in text
    assert "step 1: reward 0.625, 100 tokens" in text
    assert text.index("1/3") < text.index("2/3")
    assert "reward 0.625" in text[text.rindex("RL steps") :]


def test_wandb_gets_every_step_and_a_resumed_run_goes_on_in_the_same_one(tmp_path: Path, services):
    out = tmp_path / "run"
    config = LogConfig(tensorboard=False, wandb="tails")
    with RunLog(config, out, 3, settings={"lr": 0.1}) as log:
        log.step(report(0), {"reward/mean": 0.5})
    with contextlib.suppress(KeyboardInterrupt), RunLog(config, out, 3, resume_from=1) as log:
        log.step(report(1), {"reward/mean": 0.6})
        raise KeyboardInterrupt
    assert services() == [
        ["init", "tails", "run", None, {"lr": 0.1}],
        ["log", {"reward/mean": 0.5}, 0],
        ["finish", 0],
        ["init", "tails", "run", "w-1", {}],
        ["log", {"reward/mean": 0.6}, 1],
        ["finish", 1],
    ]


def test_mlflow_gets_every_step_and_a_resumed_run_goes_on_in_the_same_one(tmp_path: Path, services):
    out = tmp_path / "run"
    config = LogConfig(tensorboard=False, mlflow="tails")
    with RunLog(config, out, 3, settings={"recipe": {"train": {"lr": 0.1}, "drafters": {}}, "argv": ["x"]}) as log:
        log.step(report(0), {"reward/mean": 0.5})
    with RunLog(config, out, 3, resume_from=1, settings={"lr": 0.1}) as log:
        log.step(report(1), {"reward/mean": 0.6})
    assert services() == [
        ["set_experiment", "tails"],
        ["start_run", None, "run"],
        ["log_params", {"recipe.train.lr": 0.1, "recipe.drafters": {}, "argv": ["x"]}],
        ["log_metrics", {"reward/mean": 0.5}, 0],
        ["end_run", "FINISHED"],
        ["set_experiment", "tails"],
        ["start_run", "m-1", "run"],
        ["log_metrics", {"reward/mean": 0.6}, 1],
        ["end_run", "FINISHED"],
    ]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_logger_that_is_not_installed_is_named_before_anything_starts(tmp_path: Path, name: str, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"pip install {name}"):
        RunLog(LogConfig(**{name: "tails"}), tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_logger_that_does_not_start_is_an_error_and_ends_the_others(tmp_path: Path, services):
    with pytest.raises(ConfigError, match=r"W&B did not start: RuntimeError: no login; check log\.wandb"):
        RunLog(LogConfig(wandb="locked"), tmp_path / "run", 1)
    (tmp_path / "run" / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="TensorBoard did not start"):
        RunLog(LogConfig(), tmp_path / "run" / "file", 1)


def test_a_logger_that_fails_later_is_left_out_and_the_run_goes_on(tmp_path: Path, services, capfd):
    with RunLog(LogConfig(wandb="tails"), tmp_path / "run", 3) as log:
        log.step(report(0), {"fail": 1.0})
        log.step(report(1), {"fail": 1.0})
    err = capfd.readouterr().err
    assert err.count("W&B failed and gets nothing more: ConnectionError") == 1
    assert "hunter2" not in err
    assert scalars(tmp_path / "run", "fail") == {0: 1.0, 1: 1.0}
    assert [call[0] for call in services()] == ["init"]


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
