"""Repair beside a finished trace, and on a full disk: no response that was there before is lost."""

import errno
import os

import pytest

from tltlab.errors import ConfigError, InputError, TraceError
from tltlab.traces.recorder import Recorder, repair
from tltlab.traces.trace import read

from .test_recorder import MANIFEST, interrupted, outcomes, workload


def finished(path, num_steps):
    with Recorder(path, MANIFEST) as recorder:
        for step in range(num_steps):
            recorder.append("workload", workload(step))
            recorder.append("outcomes", outcomes(step))


def gone_on(path, *steps):
    """The recording of a run that went on from the finished trace's first RL step, did these and was killed."""
    recorder = Recorder.reopen(path, MANIFEST, 1)
    for step in steps:
        recorder.append("workload", workload(step))
        recorder.append("outcomes", outcomes(step))
        recorder.flush()
    recorder._lock.close()


def test_repair_puts_a_resumed_run_in_the_place_of_its_finished_part(tmp_path):
    finished(tmp_path / "t", 2)
    (tmp_path / "t" / "costs.json").write_text("{}")
    gone_on(tmp_path / "t", 1, 2)
    trace = repair(tmp_path / "t")
    assert trace.rl_steps == [0, 1, 2]
    assert len(trace.outcomes) == 12
    assert (tmp_path / "t" / "costs.json").exists()
    assert not (tmp_path / "t.recording").exists()


@pytest.mark.parametrize("steps", [(), (1,)])
def test_repair_loses_no_response_of_a_finished_trace(tmp_path, steps):
    finished(tmp_path / "t", 3)
    gone_on(tmp_path / "t", *steps)
    for out in (None, tmp_path / "t"):
        with pytest.raises(ConfigError, match=rf"lacks 4 of its responses in RL step {1 + len(steps)}; .* --out"):
            repair(tmp_path / "t", out)
    assert repair(tmp_path / "t", tmp_path / "other").rl_steps == [0, *steps]
    assert read(tmp_path / "t").rl_steps == [0, 1, 2]
    assert (tmp_path / "t.recording").exists()


def test_repair_does_not_replace_the_trace_of_another_run(tmp_path):
    finished(tmp_path / "t", 1)
    recorder = Recorder(tmp_path / "t", MANIFEST.model_copy(update={"seed": 7}))
    recorder.append("workload", workload(0))
    recorder.append("outcomes", outcomes(0))
    recorder.flush()
    recorder._lock.close()
    with pytest.raises(ConfigError, match=r"recording .*t\.recording is of another run; .* --out"):
        repair(tmp_path / "t")


def test_repair_on_a_full_disk_is_one_sentence_and_may_be_tried_again(tmp_path, monkeypatch):
    interrupted(tmp_path / "t", ("workload", workload(0)), ("outcomes", outcomes(0)))
    with monkeypatch.context() as patched:
        patched.setattr("pyarrow.parquet.ParquetWriter.write_table", disk_full)
        with pytest.raises(InputError, match=r"cannot write the trace .*t: No space left on device"):
            repair(tmp_path / "t")
    assert not (tmp_path / "t.recording" / "together.tmp").exists()
    assert len(repair(tmp_path / "t").outcomes) == 4


def disk_full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_recording_of_an_earlier_version_is_left_as_it_is(tmp_path):
    Recorder(tmp_path / "t", MANIFEST)._lock.close()
    (tmp_path / "t.recording" / "000000").mkdir()
    with pytest.raises(TraceError, match="recorded by an earlier version"):
        repair(tmp_path / "t")
    assert (tmp_path / "t.recording" / "000000").is_dir()
