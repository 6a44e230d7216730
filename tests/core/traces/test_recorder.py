"""The recorder: a kill at any moment loses only what was not flushed, and repair makes a valid trace of the rest."""

import contextlib
import errno
import json
import os
import subprocess
import sys
import threading
from types import MappingProxyType

import pytest

from tests.core.traces.damage import check_flips
from tests.refused import refused
from tltlab.errors import ConfigError, InputError, RunError, TraceError
from tltlab.traces import schema as schema_module
from tltlab.traces.recorder import Recorder, repair
from tltlab.traces.schema import TABLES, Contents
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


def files_in(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}


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


def test_a_disk_that_refuses_is_named(tmp_path, monkeypatch):
    interrupted(tmp_path / "t", *of_rl_step(0))
    with monkeypatch.context() as here:
        here.setattr(schema_module, "replace_durably", disk_full)
        with refused(RunError, naming=("No space left", tmp_path / "t")):
            Recorder.reopen(tmp_path / "t", MANIFEST, 1)
        with refused(ConfigError):
            Recorder(tmp_path / "new", MANIFEST)
    recorder = Recorder.reopen(tmp_path / "t", MANIFEST, 1)
    with monkeypatch.context() as here:
        here.setattr(schema_module, "replace_durably", disk_full)
        with refused(InputError):
            recorder.close()
    assert Recorder.reopen(tmp_path / "t", MANIFEST, 1).snapshot().rl_steps == [0]


def test_a_recording_that_is_there_is_not_overwritten(tmp_path):
    interrupted(tmp_path / "t")
    left(tmp_path / "closed", 1, how="closed")
    for name in ("t", "closed"):
        with refused(ConfigError):
            Recorder(tmp_path / name, MANIFEST)
    with refused(ConfigError, naming=("repair",)):
        read(tmp_path / "closed").write(tmp_path / "t")
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


@pytest.mark.parametrize(("name", "folder"), [("run", "."), ("run/trace", "."), (".", "run")])
def test_what_was_interrupted_is_read_by_any_name(tmp_path, monkeypatch, capsys, name, folder):
    (tmp_path / "run").mkdir()
    interrupted(
        tmp_path / "run" / "trace",
        *of_rl_step(0), ("iterations", 0), ("workload", 1), ("outcomes", 1, 2), ("workload", 2)
    )  # fmt: skip
    before = files_in(tmp_path / "run" / "trace")
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
    assert files_in(tmp_path / "run" / "trace") == before
    written = repair(name, tmp_path / "other")
    assert all(written.arrow(table).equals(trace.arrow(table)) for table in trace.names)
    assert repair(name).path.resolve() == tmp_path / "run" / "trace"
    assert read(name).outcomes.equals(trace.outcomes)


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
    assert closed.outcomes.equals(trace.outcomes)
    assert not (tmp_path / "t" / "lock").exists()


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


def test_a_fault_between_tables_keeps_the_recording(tmp_path):
    recorder = Recorder(tmp_path / "t", MANIFEST)
    recorder.append("outcomes", rows(0)["outcomes"])
    with refused(TraceError):
        recorder.close()
    assert repair(tmp_path / "t").rl_steps == []


def test_every_table_survives_a_crash(tmp_path):
    whole, recorder = full_trace(), Recorder(tmp_path / "t", MANIFEST)
    for name in TABLES:
        recorder.append(name, whole.arrow(name).to_pylist())
    recorder.flush()
    recorder._lock.close()
    for look in (read, repair):
        saved = look(tmp_path / "t")
        assert all(saved.arrow(name) == whole.arrow(name) for name in TABLES)


def test_flushes_of_an_rl_step_are_joined(tmp_path):
    """Their files are as many as a counter's binary digits, and the rows are in order."""
    recorder = Recorder(tmp_path / "t", MANIFEST)
    for number in range(40):
        # Rows of an earlier RL step come late.
        spans = [
            {"rl_step": step, "lane": str(number), "kind": "idle", "t_start": 0.0, "duration": 1.0} for step in (0, 1)
        ]
        recorder.append("spans", spans)
        recorder.flush()
        assert len(list((tmp_path / "t" / "spans").iterdir())) == 2 * (number + 1).bit_count()
    recorder.close()
    assert read(tmp_path / "t").spans["lane"].tolist() == [str(number) for number in range(40)] * 2


@pytest.mark.parametrize("how", ["killed", "closed"])
@pytest.mark.parametrize("table", ["outcomes", "tokens", "iterations"])
def test_repair_drops_what_is_damaged(tmp_path, table, how):
    left(tmp_path / "t", 3, how="killed")
    with Recorder.reopen(tmp_path / "t", MANIFEST, 3) as recorder:
        recorder.append("iterations", [row for step in range(3) for row in iterations(step)])
        recorder.set_manifest(without_iterations=())
        recorder.flush()
        if how == "killed":
            contents = Contents.read(tmp_path / "t")
    if how == "killed":
        contents.write(tmp_path / "t")
    part = tmp_path / "t" / table / "part-000001.parquet"
    part.write_bytes(part.read_bytes()[:-9])
    with refused(TraceError, naming=(f"{table}/part-000001", "repair")):
        read(tmp_path / "t")
    before = files_in(tmp_path / "t")
    elsewhere = repair(tmp_path / "t", tmp_path / "other")
    assert files_in(tmp_path / "t") == before
    trace = repair(tmp_path / "t")
    assert all(trace.arrow(name).equals(elsewhere.arrow(name)) for name in TABLES if name in trace.names)
    assert ("interrupted" in trace.manifest.notes) == (how == "killed")
    assert f"{table}/part-000001.parquet was damaged" in trace.manifest.notes
    rest = [0, 2]
    assert trace.rl_steps == (rest if table == "outcomes" else [0, 1, 2])
    assert set(trace.table(table)["rl_step"]) == set(rest)
    assert trace.manifest.without_iterations == ((1,) if table == "iterations" else ())
    assert files_in(tmp_path / "t").keys() == {"manifest.json", *(f"{name}.parquet" for name in trace.names)}


def test_no_single_bit_of_a_recording_flips_unseen(tmp_path):
    recorder = Recorder(tmp_path / "t", MANIFEST)
    record(recorder, range(3))
    recorder.rewind(2)
    check_flips(tmp_path / "t", seed=11)
    recorder.close()


def test_repair_leaves_a_finished_trace_as_it_is(tmp_path):
    left(tmp_path / "t", 1, how="closed")
    before = files_in(tmp_path / "t")
    assert repair(tmp_path / "t").manifest.notes is None
    assert files_in(tmp_path / "t") == before
    outcomes = read(tmp_path / "t").write(tmp_path / "u") / "outcomes.parquet"
    outcomes.write_bytes(outcomes.read_bytes()[:-20])
    with refused(TraceError, naming=("outcomes",)):
        repair(tmp_path / "u")


def test_the_caller_continues_while_a_flush_runs(tmp_path, monkeypatch):
    written, disk = threading.Event(), threading.Event()
    replace_durably = schema_module.replace_durably

    def slow(*args):
        assert disk.wait(300)
        replace_durably(*args)
        written.set()

    with Recorder(tmp_path / "t", MANIFEST) as recorder:
        monkeypatch.setattr(schema_module, "replace_durably", slow)
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
            patch.setattr(schema_module, "replace_durably", disk_full)
            recorder.flush(wait=False)
            add(recorder, 1)
            with refused(RunError):
                recorder.flush(wait=False)
        recorder.flush()
    trace = read(tmp_path / "t")
    assert trace.rl_steps == [0, 1]
    assert trace.manifest.notes == "said while the disk is full"


def test_repair_on_full_disk_may_be_tried_again(tmp_path, monkeypatch):
    interrupted(tmp_path / "t", *of_rl_step(0))
    with monkeypatch.context() as patched:
        patched.setattr("pyarrow.parquet.ParquetWriter.write_table", disk_full)
        with refused(InputError):
            repair(tmp_path / "t")
    assert len(repair(tmp_path / "t").outcomes) == 4
