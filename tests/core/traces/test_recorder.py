"""The recorder: a kill at any moment loses only what was not flushed, and repair makes a valid trace of the rest."""

import contextlib
import errno
import json
import os
import subprocess
import sys
import threading
from types import MappingProxyType

import pyarrow as pa
import pytest

from tests.core.traces.damage import flipped
from tests.refused import refused
from tltlab.errors import ConfigError, InputError, RunError, TraceError
from tltlab.traces import recorder as recorder_module
from tltlab.traces import recovery as recovery_module
from tltlab.traces.recorder import Recorder
from tltlab.traces.recording import chunks_of, new_recording, write_chunk
from tltlab.traces.recovery import repair
from tltlab.traces.schema import TABLES
from tltlab.traces.trace import read

from .recordings import FORKING, MANIFEST, add, iterations, left, record, rows
from .test_trace import full_trace


def disk_full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupted(path, *appends, **manifest):
    """A recording whose process is gone: rows of a table, an RL step and so many responses are flushed in turn."""
    recorder = Recorder(path, MANIFEST.model_copy(update=manifest))
    for table, step, *num in appends:
        made = iterations(step) if table == "iterations" else rows(step)[table]
        recorder.append(table, made[: num[0]] if num else made)
        recorder.flush()
    recorder._lock.close()


def of_rl_step(step):
    return ("workload", step), ("outcomes", step)


AT_EXIT = """
import atexit, json, sys
from tltlab.traces.recorder import Recorder
from tltlab.traces.schema import Manifest

recorder = Recorder(sys.argv[1], Manifest(kind="recorded"))
atexit.register(recorder.close)
for table, rows in json.loads(sys.argv[2]).items():
    recorder.append(table, rows)
    recorder.flush(wait=False)
"""


def test_a_program_that_exits_can_still_close(tmp_path):
    subprocess.run([sys.executable, "-c", AT_EXIT, str(tmp_path / "t"), json.dumps(rows(0))], check=True, timeout=400)
    assert read(tmp_path / "t").outcomes["response_tokens"].tolist() == [1, 2, 3, 4]


def test_rows_are_mappings_without_unknown_columns(tmp_path):
    with Recorder(tmp_path / "t", MANIFEST) as recorder:
        recorder.append("workload", [MappingProxyType(row) for row in rows(0)["workload"]])
        recorder.append("outcomes", rows(0)["outcomes"])
    trace = read(tmp_path / "t")
    assert trace.workload["prompt_id"].tolist() == ["p0", "p1", "p2", "p3"]
    assert trace.outcomes["reward"].isna().all()
    assert (trace.outcomes["turn"] == 0).all()


def test_a_disk_that_refuses_a_reopening_is_named(tmp_path, monkeypatch):
    interrupted(tmp_path / "t", *of_rl_step(0))
    with monkeypatch.context() as here:
        here.setattr(recovery_module, "cut", disk_full)
        with refused(RunError):
            Recorder.reopen(tmp_path / "t", MANIFEST, 1)
    lock_file = tmp_path / "t.recording" / "lock"
    lock_file.unlink()
    lock_file.mkdir()
    with refused(ConfigError):
        Recorder.reopen(tmp_path / "t", MANIFEST, 1)


def test_a_recording_that_cannot_be_removed_goes_later(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path / "t", MANIFEST)
    add(recorder, 0)
    with monkeypatch.context() as here:
        here.setattr(recovery_module.os, "rename", disk_full)
        with refused(InputError, naming=("t.recording",)):
            recorder.close()
    recorder._lock.close()
    assert len(repair(tmp_path / "t").outcomes) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_a_recording_that_is_there_is_not_overwritten(tmp_path):
    interrupted(tmp_path / "t")
    with refused(ConfigError):
        Recorder(tmp_path / "t", MANIFEST)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("x")
    with refused(ConfigError, naming=("another",)):
        Recorder(tmp_path / "notes", MANIFEST)


OUTCOME = rows(0)["outcomes"][0]


@pytest.mark.parametrize(
    ("table", "row", "says"),
    [
        ("outcome", {}, ("outcome",)),
        ("outcomes", {"tokens": 3}, ("tokens",)),
        ("outcomes", {**OUTCOME, "response_tokens": "3"}, ("response_tokens",)),
        ("outcomes", {**OUTCOME, "response_tokens": None}, ("response_tokens", "0")),
        ("outcomes", {**OUTCOME, "t_finish": float("nan")}, ("t_finish", "0")),
        ("outcomes", {**OUTCOME, "finish_reason": "eos"}, ("finish_reason", "0")),
    ],
)
def test_wrong_row_is_refused_when_it_is_recorded(tmp_path, table, row, says):
    recorder = Recorder(tmp_path / "t", MANIFEST)
    with refused(TraceError, naming=says):
        recorder.append(table, [row])
        recorder.flush()
    recorder._lock.close()


def test_an_exception_leaves_a_recording_to_repair(tmp_path):
    with refused(RuntimeError, naming=("engine",)), Recorder(tmp_path / "t", MANIFEST) as recorder:
        add(recorder, 0)
        raise RuntimeError("engine died")
    assert len(read(tmp_path / "t").outcomes) == 4
    assert len(repair(tmp_path / "t").outcomes) == 4


@pytest.mark.parametrize(
    ("name", "folder"), [("run", "."), ("run/trace", "."), ("run/trace.recording", "."), (".", "run")]
)
def test_what_was_interrupted_is_read_by_any_name(tmp_path, monkeypatch, capsys, name, folder):
    (tmp_path / "run").mkdir()
    interrupted(
        tmp_path / "run" / "trace",
        *of_rl_step(0), ("iterations", 0), ("workload", 1), ("outcomes", 1, 2), ("workload", 2)
    )  # fmt: skip
    before = {path: path.read_bytes() for path in (tmp_path / "run" / "trace.recording").iterdir()}
    monkeypatch.chdir(tmp_path / folder)
    trace = read(name)
    assert trace.outcomes["response_tokens"].tolist() == [1, 2, 3, 4, 1, 2]
    # Requests that were under way are left out, and RL steps of nothing else.
    assert trace.rl_steps == [0, 1]
    assert len(trace.workload) == 6
    assert trace.iterations["iteration"].tolist() == [0, 1]
    assert [len(one.outcomes) for one in trace.iter_rl_steps()] == [4, 2]
    for notes in (trace.manifest.notes, capsys.readouterr().err):
        assert all(fact in notes for fact in ("unfinished", "6 requests", "rl_step 1, 2"))
    assert {path: path.read_bytes() for path in (tmp_path / "run" / "trace.recording").iterdir()} == before
    written = repair(name, tmp_path / "other")
    assert all(written.arrow(table).equals(trace.arrow(table)) for table in trace.names)
    assert repair(name).path.resolve() == tmp_path / "run" / "trace"


def test_a_recording_in_progress_is_read(tmp_path):
    with Recorder(tmp_path / "t", MANIFEST) as recorder:
        for step in range(2):
            record(recorder, [step])
            trace = read(tmp_path / "t")
            assert trace.rl_steps == list(range(step + 1))
            assert "unfinished" in trace.manifest.notes
        # A process that closes any handle of a locked file has lost its lock.
        with FORKING.Pool(1) as other:
            for work, *args in ((repair,), (Recorder.reopen, MANIFEST, 0)):
                with refused(ConfigError):
                    other.apply(work, (tmp_path / "t", *args))
    closed = read(tmp_path / "t")
    assert closed.manifest == MANIFEST.model_copy(update={"num_rl_steps": 2})
    # What was read is in memory: the recording is gone.
    assert closed.outcomes.equals(trace.outcomes)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def record_and_tell(path, steps, told):
    """Record and close; `told` hears how many RL steps are flushed, first that none is."""
    with Recorder(path, MANIFEST) as recorder:
        told.send(0)
        for step in range(steps):
            record(recorder, [step])
            told.send(step + 1)


def test_reading_what_another_process_records_is_safe(tmp_path):
    ours, theirs = FORKING.Pipe(duplex=False)
    child = FORKING.Process(target=record_and_tell, args=(tmp_path / "t", 40, theirs))
    child.start()
    theirs.close()
    flushed = ours.recv()
    while child.is_alive():
        with contextlib.suppress(EOFError):
            while ours.poll():
                flushed = ours.recv()
        trace = read(tmp_path / "t")
        assert len(trace.rl_steps) >= flushed
        assert trace.outcomes["response_tokens"].tolist() == [1, 2, 3, 4] * len(trace.rl_steps)
    child.join()
    assert child.exitcode == 0
    assert read(tmp_path / "t").rl_steps == list(range(40))


def test_nothing_is_written_to_where_something_is_recorded(tmp_path):
    left(tmp_path / "t", 1, how="closed")
    interrupted(tmp_path / "u", *of_rl_step(0))
    with refused(ConfigError):
        read(tmp_path / "t").write(tmp_path / "u.recording")


def test_a_fault_between_tables_keeps_the_recording(tmp_path):
    recorder = Recorder(tmp_path / "t", MANIFEST)
    recorder.append("outcomes", rows(0)["outcomes"])
    with refused(TraceError):
        recorder.close()
    assert repair(tmp_path / "t").rl_steps == []


def test_repair_states_what_was_lost(tmp_path):
    again = ("outcomes", 0, 1), ("workload", 1, 3), ("outcomes", 1, 2), ("outcomes", 2, 1)
    interrupted(tmp_path / "t", *of_rl_step(0), *again)
    trace = repair(tmp_path / "t")
    assert trace.outcomes["rl_step"].tolist() == [0, 0, 0, 0, 1, 1]
    assert trace.manifest.num_rl_steps == 2
    notes = trace.manifest.notes
    assert [notes.count(fact) for fact in ("1 rows of outcomes", "1 requests (rl_step 1)")] == [2, 1]
    assert not (tmp_path / "t.recording").exists()


def test_every_table_survives_a_crash(tmp_path):
    """Rows recorded twice are there once; spans have no key, so nothing tells that one was."""
    whole, recorder = full_trace(), Recorder(tmp_path / "t", MANIFEST)
    for rows_of in (slice(None), slice(1)):
        for name in set(TABLES) - {"spans"}:
            recorder.append(name, whole.arrow(name).to_pylist()[rows_of])
        recorder.flush()
    recorder._lock.close()
    saved = repair(tmp_path / "t")
    assert all(saved.arrow(name) == whole.arrow(name) for name in set(TABLES) - {"spans"})


@pytest.mark.parametrize(
    "damaged", [lambda data: data[:50], lambda data: data.replace(b"stop", b"st\xffp")], ids=["cut off", "changed"]
)
def test_repair_drops_a_chunk_that_cannot_be_read(tmp_path, damaged):
    interrupted(tmp_path / "t", *of_rl_step(0), ("outcomes", 1))
    (chunk,) = (tmp_path / "t.recording").glob("000002-*.arrow")
    chunk.write_bytes(damaged(chunk.read_bytes()))
    trace = repair(tmp_path / "t")
    assert len(trace.outcomes) == 4
    assert "chunk 000002" in trace.manifest.notes


def test_no_single_bit_of_a_recording_flips_unseen(tmp_path):
    """It is refused, or what is read of it has a note more."""
    with Recorder(tmp_path / "t", MANIFEST) as recorder:
        record(recorder, range(3))
        recorder.rewind(2)
        folder = tmp_path / "t.recording"
        whole = read(folder)
        assert {file.suffix for file in folder.iterdir() if file.stat().st_size} == {".arrow", ".json"}
        for file in flipped(folder, seed=11):
            with contextlib.suppress(TraceError):
                trace = read(folder)
                told = f"chunk {file.name[:6]} could not be read" in trace.manifest.notes
                same = trace.manifest == whole.manifest and trace.outcomes.equals(whole.outcomes)
                assert told if file.suffix == ".arrow" else same


def test_a_chunk_written_again_replaces_the_first(tmp_path):
    folder = tmp_path / "t.recording"
    new_recording(folder, MANIFEST)
    for step in (0, 1):
        made = [row | {"turn": 0} for row in rows(step)["workload"]]
        write_chunk(folder, 0, {"workload": pa.Table.from_pylist(made, TABLES["workload"])})
    (chunk,) = chunks_of(folder)
    assert set(chunk.tables()["workload"]["rl_step"].to_pylist()) == {1}


def test_repair_leaves_a_finished_trace_as_it_is(tmp_path):
    left(tmp_path / "t", 1, how="closed")
    before = {path.name: path.read_bytes() for path in (tmp_path / "t").iterdir()}
    assert repair(tmp_path / "t").manifest.notes is None
    assert {path.name: path.read_bytes() for path in (tmp_path / "t").iterdir()} == before
    (tmp_path / "t" / "outcomes.parquet").write_bytes(before["outcomes.parquet"][:-20])
    with refused(TraceError, naming=("outcomes",)):
        repair(tmp_path / "t")


def test_the_caller_continues_while_a_flush_runs(tmp_path, monkeypatch):
    written, disk = threading.Event(), threading.Event()
    write_chunk = recorder_module.write_chunk

    def slow(*args):
        assert disk.wait(300)
        write_chunk(*args)
        written.set()

    monkeypatch.setattr(recorder_module, "write_chunk", slow)
    with Recorder(tmp_path / "t", MANIFEST) as recorder:
        add(recorder, 0)
        recorder.flush(wait=False)
        add(recorder, 1)
        assert not written.is_set()
        disk.set()
        assert recorder.snapshot().rl_steps == [0]
        recorder.rewind(1)
        assert recorder.snapshot().rl_steps == [0]
        add(recorder, 1)
        recorder.flush(wait=False)
    assert read(tmp_path / "t").rl_steps == [0, 1]


def test_what_flush_could_not_write_is_written_later(tmp_path, monkeypatch):
    with Recorder(tmp_path / "t", MANIFEST) as recorder:
        add(recorder, 0)
        recorder.set_manifest(notes="said while the disk is full")
        with monkeypatch.context() as patch:
            patch.setattr(recorder_module, "replace_durably", disk_full)
            recorder.flush(wait=False)
            add(recorder, 1)
            with refused(RunError):
                recorder.flush(wait=False)
        recorder.flush()
    trace = read(tmp_path / "t")
    assert trace.rl_steps == [0, 1]
    assert trace.manifest.notes == "said while the disk is full"


def gone_on(path, *steps):
    """The recording of a run that continued from the finished trace's first RL step, did these and was killed."""
    recorder = Recorder.reopen(path, MANIFEST, 1)
    record(recorder, steps)
    recorder._lock.close()


def test_repair_puts_a_resumed_run_in_its_place(tmp_path):
    left(tmp_path / "t", 2, how="closed")
    (tmp_path / "t" / "costs.json").write_text("{}")
    gone_on(tmp_path / "t", 1, 2)
    trace = repair(tmp_path / "t")
    assert trace.rl_steps == [0, 1, 2]
    assert len(trace.outcomes) == 12
    assert (tmp_path / "t" / "costs.json").exists()
    assert not (tmp_path / "t.recording").exists()


@pytest.mark.parametrize("steps", [(), (1,)])
def test_repair_loses_no_response_of_a_finished_trace(tmp_path, steps):
    left(tmp_path / "t", 3, how="closed")
    gone_on(tmp_path / "t", *steps)
    for out in (None, tmp_path / "t"):
        with refused(ConfigError, naming=(1 + len(steps), "--out")):
            repair(tmp_path / "t", out)
    assert repair(tmp_path / "t", tmp_path / "other").rl_steps == [0, *steps]
    assert read(tmp_path / "t").rl_steps == [0, 1, 2]
    assert (tmp_path / "t.recording").exists()


def test_repair_does_not_replace_trace_of_another_run(tmp_path):
    left(tmp_path / "t", 1, how="closed")
    interrupted(tmp_path / "t", ("workload", 0), seed=7)
    with refused(ConfigError, naming=("t.recording", "--out")):
        repair(tmp_path / "t")


def test_repair_on_full_disk_may_be_tried_again(tmp_path, monkeypatch):
    interrupted(tmp_path / "t", *of_rl_step(0))
    with monkeypatch.context() as patched:
        patched.setattr("pyarrow.parquet.ParquetWriter.write_table", disk_full)
        with refused(InputError):
            repair(tmp_path / "t")
    assert len(repair(tmp_path / "t").outcomes) == 4


@pytest.mark.parametrize("chunk", ["000000", "000000.arrow"])
def test_a_recording_without_sums_is_refused(tmp_path, chunk):
    Recorder(tmp_path / "t", MANIFEST)._lock.close()
    (tmp_path / "t.recording" / chunk).touch()
    with refused(TraceError, naming=("t.recording",)):
        repair(tmp_path / "t")
    assert (tmp_path / "t.recording" / chunk).exists()
