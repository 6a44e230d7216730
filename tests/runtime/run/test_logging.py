"""What a run says and where its metrics go."""

import contextlib
import os
import sys
from copy import deepcopy
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.runtime.recipe.sections import LogConfig
from tltlab.runtime.run.logging import PACE_STEPS, RunLog, step_text
from tltlab.runtime.run.rows import StepReport
from tltlab.runtime.run.state import RunEvents


def module(name, **members):
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    vars(made).update(members)
    return made


def wandb_like(called):
    """A stand-in for W&B that tells `called` what it was asked to do."""

    def log(metrics, step, commit):
        assert commit
        if metrics.get("fail"):
            raise ConnectionError("no answer from https://me:hunter2@example.org/api")
        called("log", metrics, step)

    def init(project, name, dir, id, resume, config, settings):
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


MEASURES = {
    "rollout/bubble_fraction": 0.25, "rollout/mean_accept_length": 2.31, "mismatch/kl": 2.2e-13,
    "length/p50": 20.0, "length/p90": 117.5, "length/p99": 128.0, "length/truncated_fraction": 0.125,
}  # fmt: skip


def report(rl_step=0, reward=0.5):
    return StepReport(
        rl_step=rl_step, policy="none", reward_mean=reward, num_tokens=100, rollout_s=2.0, reward_s=0.1,
        inference_s=0.2, train_s=0.3, sync_s=0.1, recorder_s=0.01, metrics={}, notes=["worker 1 was started again"],
    )  # fmt: skip


def scalars(out, name):
    """What TensorBoard reads back: value by RL step."""
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(name)}


@pytest.fixture
def services(monkeypatch):
    """A stand-in for W&B; what it is asked to do, in order."""
    calls = []
    monkeypatch.setitem(sys.modules, "wandb", wandb_like(lambda *call: calls.append(deepcopy(list(call)))))
    return calls


def test_a_repeated_step_replaces_its_first_figures(tmp_path):
    with RunLog(LogConfig(), tmp_path, 4) as log:
        for rl_step in range(3):
            log.step(report(rl_step), figures(float(rl_step)))
            # It is there as soon as the step is done.
            assert scalars(tmp_path, "reward/mean") == {step: float(step) for step in range(rl_step + 1)}
    with RunLog(LogConfig(), tmp_path, 4, resume_from=1) as log:
        log.step(report(1), figures(10.0))
        assert scalars(tmp_path, "reward/mean") == {0: 0.0, 1: 10.0}
        for rl_step, reward in ((2, 20.0), (3, 30.0), (2, 21.0)):  # a trainer had died
            log.step(report(rl_step), figures(reward))
            log.measured(rl_step, {"reward/heldout": reward})
    assert scalars(tmp_path, "reward/mean") == {0: 0.0, 1: 10.0, 2: 21.0}
    assert scalars(tmp_path, "reward/heldout") == {2: 21.0}
    assert scalars(tmp_path, "time/step_s") == {0: 2.0, 1: 2.0, 2: 2.0}


@pytest.mark.parametrize("forced", ["", "1"])
def test_without_a_terminal_a_step_is_plain_lines(tmp_path, forced, monkeypatch, capfd):
    monkeypatch.setenv("FORCE_COLOR", forced)  # as CI services do
    monkeypatch.setenv("TERM", "xterm-256color")
    with RunLog(LogConfig(), tmp_path, 1) as log:
        log.print("held-out reward before training 0.500")
        log.step(report(), MEASURES)
    out, err = capfd.readouterr()
    start, said, step = err.split("\n", 2)
    assert (out, said) == ("", "held-out reward before training 0.500")
    assert step == f"{step_text(report(), MEASURES, '0:00:00')}\n"
    assert str(tmp_path) in start


def test_a_note_is_reported_once(tmp_path, capfd):
    with RunLog(LogConfig(tensorboard=False), tmp_path, 2) as log:
        events = RunEvents(tmp_path / "events.jsonl")
        events.watch = log.note
        events.note("worker 1 was started again")
        assert capfd.readouterr().err.splitlines()[1:] == ["worker 1 was started again"]
        log.step(replace(report(0), notes=events.take()), MEASURES)
        assert "started again" not in capfd.readouterr().err
        log.step(report(1), MEASURES)
        assert "  worker 1 was started again\n" in capfd.readouterr().err


def test_a_step_states_its_times_and_measures():
    said = step_text(report(3), MEASURES, "0:01:20")
    facts = "step 3|reward 0.500|100 tokens in 2.70 s|0:01:20|rollout 2.00|reward 0.10|inference 0.20|train 0.30"
    facts += "|sync 0.10|50 tokens/s|25%|2.31|2.2e-13|p50 20|p90 118|p99 128|12%|worker 1"
    assert [fact for fact in facts.split("|") if fact not in said] == []
    assert len(step_text(report(), {}, "0:00:00").splitlines()) == 4  # nothing is made up


def test_the_time_left_follows_the_newest_steps(tmp_path, capfd):
    with RunLog(LogConfig(tensorboard=False), tmp_path, 40) as log:
        for rl_step in range(1 + PACE_STEPS):
            log.step(replace(report(rl_step), step_s=1000.0 if rl_step == 0 else 90.0), {})
    lefts = [line.split(", ")[-1] for line in capfd.readouterr().err.splitlines() if line.startswith("step")]
    assert lefts[0] == "10:50:00 left"
    assert lefts[-1] == "0:46:30 left"  # 31 steps of 90 s
    assert list(tmp_path.iterdir()) == [], "without loggers nothing is written"


def figures(reward):
    return {"time/step_s": 2.0, "reward/mean": reward}


SENT = [
    ["init", "tails", "run", None, {"recipe": {"lr": 0.1, "drafters": {}}, "argv": ["x"]}],
    ["log", {"reward/heldout": 0.4, "rl_step": 0}, 0],
    ["log", figures(0.5) | {"rl_step": 0}, 1],
    ["log", {"reward/heldout": 0.6, "rl_step": 0}, 2],
    ["log", figures(0.6) | {"rl_step": 1}, 3],
    ["finish", 0],
    ["init", "tails", "run", "w-1", {}],
    ["log", figures(0.8) | {"rl_step": 2}, 6],
    ["finish", 1],
]


def test_a_service_gets_every_step_once(tmp_path, services):
    """The second process continues, in the same run, from RL step 1, which the first did twice, and is interrupted."""
    config = LogConfig(tensorboard=False, wandb="tails")
    settings = {"recipe": {"lr": 0.1, "drafters": {}}, "argv": ["x"]}
    with RunLog(config, tmp_path / "run", 3, settings=settings) as log:
        log.measured(0, {"reward/heldout": 0.4})
        log.step(report(0), figures(0.5))
        log.measured(0, {"reward/heldout": 0.6})
        log.step(report(1), figures(0.6))
        log.step(report(1), figures(0.65))  # a trainer had died
    with contextlib.suppress(KeyboardInterrupt), RunLog(config, tmp_path / "run", 3, resume_from=1) as log:
        log.step(report(1), figures(0.7))
        log.step(report(2), figures(0.8))
        raise KeyboardInterrupt
    assert services == SENT


def test_a_logger_that_does_not_start_is_refused(tmp_path, services):
    with refused(ConfigError, naming=("W&B", "RuntimeError", "log.wandb")):
        RunLog(LogConfig(wandb="locked"), tmp_path / "run", 1)
    (tmp_path / "run" / "file").write_text("in the way")
    with refused(ConfigError, naming=("TensorBoard",)):
        RunLog(LogConfig(), tmp_path / "run" / "file", 1)


def test_a_service_that_fails_is_left_out(tmp_path, services, capfd):
    with RunLog(LogConfig(wandb="tails"), tmp_path / "run", 3) as log:
        for rl_step in (0, 1):
            log.step(report(rl_step), {"fail": 1.0})
    err = capfd.readouterr().err
    assert (err.count("W&B failed"), err.count("ConnectionError")) == (1, 1)
    assert "hunter2" not in err
    assert scalars(tmp_path / "run", "fail") == {0: 1.0, 1: 1.0}
    assert [call[0] for call in services] == ["init"]


def test_a_full_disk_costs_the_event_file_only(tmp_path, capfd, monkeypatch):
    with RunLog(LogConfig(), tmp_path, 3) as log:
        log.step(report(0), {"reward/mean": 0.5})
        full = open("/dev/full", "wb")  # noqa: SIM115
        writer = log._loggers["TensorBoard"]._writer.file_writer.event_writer._async_writer
        for place, name in ((writer, "_writer"), (writer._worker, "_record_writer")):
            monkeypatch.setattr(place, name, RecordWriter(full))
        log.step(report(1), {"reward/mean": 0.6})
        log.step(report(2), {"reward/mean": 0.7})
    err = capfd.readouterr().err
    assert err.count("TensorBoard failed") == err.count("[Errno 28]") == 1
    assert "step 2" in err
    assert scalars(tmp_path, "reward/mean") == {0: 0.5}
    full.raw.close()


def test_a_lost_terminal_stops_no_run(tmp_path, monkeypatch):
    with RunLog(LogConfig(), tmp_path, 1) as log, open("/dev/full", "w") as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        log.step(report(), {"reward/mean": 0.5})
        monkeypatch.undo()
        gone.buffer.raw.close()
    assert scalars(tmp_path, "reward/mean") == {0: 0.5}
