"""Going on with a trace: what was recorded before stays, what is done again replaces what was, whatever gets killed."""

import os
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.refused import refused
from tests.traces_of_lengths import of_samples
from tltlab.errors import ConfigError, RunError, TraceError
from tltlab.traces.recorder import Recorder, repair
from tltlab.traces.schema import Manifest
from tltlab.traces.trace import read, read_one, together

from .recordings import FORKING, MANIFEST, add, go_on, iterations, left, record


def unbroken(path, steps):
    with Recorder(path, MANIFEST) as recorder:
        record(recorder, range(steps))
    return read(path)


def same(one, other):
    assert one.names == other.names
    for name in one.names:
        assert one.arrow(name).equals(other.arrow(name)), name
    assert one.manifest.model_copy(update={"notes": None}) == other.manifest.model_copy(update={"notes": None})
    return True


@settings(deadline=None, max_examples=6)
@given(
    attempts=st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["killed", "closed", "repaired"])), max_size=3),
    data=st.data(),
)
def test_trace_that_was_reopened_is_unbroken_one(tmp_path_factory, attempts, data):
    folder = tmp_path_factory.mktemp("reopen")
    have = 0
    for number, (more, how) in enumerate(attempts):
        start = data.draw(st.integers(0, have))
        recorder = Recorder.reopen(folder / "t", MANIFEST, start)
        assert recorder.snapshot().rl_steps == list(range(start))
        # Those that a later attempt keeps must be as in the unbroken run.
        record(recorder, range(start, start + more))
        record(recorder, range(start + more, start + more + 2), attempt=1 + number % 2)
        have = start + more
        if how == "closed":
            recorder.close()
        else:
            recorder._lock.close()
            if how == "repaired":
                repair(folder / "t")
    go_on(folder / "t", have, range(have, have + 2))
    assert same(read(folder / "t"), unbroken(folder / "u", have + 2))
    assert sorted(item.name for item in folder.iterdir()) == ["t", "u"]
    shutil.rmtree(folder)


def test_a_live_recorder_takes_rl_steps_back(tmp_path):
    with Recorder(tmp_path / "t", MANIFEST) as recorder:
        record(recorder, range(4), attempt=1)
        add(recorder, 4, attempt=1)
        recorder.rewind(0)
        record(recorder, range(3))
        record(recorder, [3, 4], attempt=1)
        recorder.rewind(3)
        record(recorder, [3])
    assert same(read(tmp_path / "t"), unbroken(tmp_path / "u", 4))


def test_a_trace_of_one_file_a_table_is_gone_on_with(tmp_path):
    """As earlier versions left it."""
    trace = unbroken(tmp_path / "parts", 4)
    assert same(read(trace.write(tmp_path / "t")), trace)
    recorder = Recorder.reopen(tmp_path / "t", MANIFEST, 4)
    assert {file.parent for file in (tmp_path / "t").rglob("*.parquet")} == {tmp_path / "t"}
    recorder._lock.close()
    go_on(tmp_path / "t", 2, [2])
    assert not (tmp_path / "t" / "outcomes.parquet").exists()
    assert same(read(tmp_path / "t"), unbroken(tmp_path / "u", 3))


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_rl_steps_that_are_missing_are_named(tmp_path, how):
    left(tmp_path / "t", 3, how=how)
    with refused(RunError, naming=("3",)):
        Recorder.reopen(tmp_path / "t", MANIFEST, 5)
    assert Recorder.reopen(tmp_path / "t", MANIFEST, 3).snapshot().rl_steps == [0, 1, 2]
    with refused(RunError):
        Recorder.reopen(tmp_path / "none", MANIFEST, 1)


@pytest.mark.parametrize("table", ["outcomes", "tokens"])
def test_a_damaged_part_counts_as_not_there(tmp_path, table):
    left(tmp_path / "t", 4, how="killed")
    part = tmp_path / "t" / table / "part-000002.parquet"
    part.write_bytes(part.read_bytes()[:50])
    with refused(RunError, naming=("2",)):
        Recorder.reopen(tmp_path / "t", MANIFEST, 4)
    go_on(tmp_path / "t", 2, [2])
    assert same(read(tmp_path / "t"), unbroken(tmp_path / "u", 3))


@pytest.mark.parametrize("how", ["killed", "closed", "repaired"])
def test_what_is_taken_back_is_gone(tmp_path, how):
    left(tmp_path / "t", 4, how=how)
    recorder = Recorder.reopen(tmp_path / "t", MANIFEST, 2)
    assert {file.name for file in (tmp_path / "t").rglob("*.parquet")} == {f"part-00000{n}.parquet" for n in (0, 1)}
    assert read(tmp_path / "t").rl_steps == [0, 1]
    record(recorder, [2])
    recorder.rewind(1)
    assert {file.name for file in (tmp_path / "t").rglob("*.parquet")} == {"part-000000.parquet"}
    recorder._lock.close()


def test_the_trace_of_another_run_is_refused(tmp_path):
    for how in ("killed", "closed"):
        left(tmp_path / how, 2, how=how)
        with refused(ConfigError, naming=("3", "4")):
            Recorder.reopen(tmp_path / how, MANIFEST.model_copy(update={"seed": 4}), 1)


def test_a_run_that_continues_elsewhere_reports_it(tmp_path):
    left(tmp_path / "t", 2, how="closed")
    Recorder.reopen(tmp_path / "t", MANIFEST.model_copy(update={"hardware": "other"}), 2).close()
    assert read(tmp_path / "t").manifest.hardware == "h"
    assert all(fact in read(tmp_path / "t").manifest.notes for fact in ("RL step 2", "other"))


def reopen_and_die(path, number):
    """Reopen at RL step 2, record it, and end before the rename, replacement, removal or sync of this number."""
    done = 0

    def dying(stock):
        def call(*args, **kwargs):
            nonlocal done
            if done == number:
                os._exit(9)
            done += 1
            return stock(*args, **kwargs)

        return call

    os.rename, os.replace, os.unlink, os.fsync = map(dying, (os.rename, os.replace, os.unlink, os.fsync))
    record(Recorder.reopen(path, MANIFEST, 2), [2])
    os._exit(0)


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_an_end_between_operations_leaves_old_or_new(tmp_path, how):
    left(tmp_path / "before" / "t", 3, how=how)
    whole = unbroken(tmp_path / "u", 4)
    number, ended = 0, 9
    while ended == 9:
        place = tmp_path / str(number)
        shutil.copytree(tmp_path / "before", place)
        child = FORKING.Process(target=reopen_and_die, args=(place / "t", number))
        child.start()
        child.join()
        ended = child.exitcode
        # What ended before it had taken anything back may also continue from where the old one was.
        for rl_steps in range(2, len(read(place / "t").rl_steps) + 1):
            copy = tmp_path / f"{number}-{rl_steps}"
            shutil.copytree(place, copy)
            go_on(copy / "t", rl_steps, range(rl_steps, 4))
            assert same(read(copy / "t"), whole)
        number += 1
    assert number >= 8


def engine(path, *steps, created_s=0, version=None, closed=True, keys=None, model="m"):
    """What one engine of several recorded: RL steps as (number, seconds since its start, lengths of responses)."""
    created = f"2026-01-01T00:{created_s // 60:02d}:{created_s % 60:02d}.500+00:00"
    manifest = Manifest(kind="recorded", created=created, model=model, num_workers=1, source="tltlab", hardware="h")
    recorder = Recorder(path, manifest)
    for step, start, lengths in steps:
        trace = of_samples(lengths, 99, prompt_id=keys or "p", rl_step=step, worker=0, t_submit=0.0, t_finish=lengths)
        policy_version = step if version is None else version
        recorder.append("steps", [{"rl_step": step, "t_start": start, "policy_version": policy_version}])
        recorder.append("workload", trace.workload.assign(policy_version=policy_version).to_dict("records"))
        recorder.append("outcomes", trace.arrow("outcomes"))
        recorder.append("iterations", iterations(step))
    if closed:
        recorder.close()
    else:
        recorder.flush()
        recorder._lock.close()


def places(trace):
    rows = trace.outcomes
    return list(zip(rows["rl_step"], rows["sample"], rows["worker"], rows["response_tokens"], strict=True))


def test_what_engines_recorded_at_once_is_one_trace(tmp_path, capsys):
    # The second starts a second later and leaves out what would be RL step 1; then its numbers are behind.
    engine(tmp_path / "x", (0, 0.0, [5, 20]), (1, 30.0, [7]), (2, 60.0, [9, 3]))
    engine(tmp_path / "x-1", (0, 0.0, [4]), (1, 61.0, [8]), created_s=1, closed=False)
    engine(tmp_path / "x-2", created_s=3)
    engine(tmp_path / "x-3", (0, 0.0, [6]), created_s=600)
    trace = read(tmp_path / "x")
    assert "unfinished" in capsys.readouterr().err
    assert places(trace) == [(0, 0, 0, 5), (0, 1, 0, 20), (0, 2, 1, 4), (1, 0, 0, 7), (2, 0, 0, 9), (2, 1, 0, 3),
                             (2, 2, 1, 8)]  # fmt: skip
    assert trace.outcomes["t_finish"].tolist() == [5.0, 20.0, 5.0, 7.0, 9.0, 3.0, 10.0]
    assert trace.steps["t_start"].tolist() == [0.0, 30.0, 60.0]
    assert trace.iterations.groupby("worker").size().tolist() == [6, 4]
    assert "x, x-1" in trace.manifest.notes
    assert trace.manifest.num_workers == 2
    # The others stand for themselves: a later run, and the second engine.
    assert read(tmp_path / "x-3").rl_steps == [0]
    assert read(tmp_path / "x-1").manifest.num_workers == 1
    with refused(TraceError, naming=("/x",)):
        read(tmp_path)


def test_a_folder_is_the_trace_of_its_engines(tmp_path):
    for number in range(3):
        engine(tmp_path / f"x-{number}", (0, 0.0, [5 + number]), (1, 9.0, [5]), created_s=number, keys=[f"p{number}"])
    trace = read(tmp_path)
    assert places(trace) == [(0, 0, n, 5 + n) for n in range(3)] + [(1, 0, n, 5) for n in range(3)]
    assert trace.path is None
    (tmp_path / "other").mkdir()
    assert read(tmp_path).rl_steps == [0, 1]
    with refused(TraceError, naming=("manifest.json",)):
        read(tmp_path / "other")


def test_engine_idle_within_rollout_recorded_one_step(tmp_path):
    engine(tmp_path / "x", (0, 0.0, [50]), (1, 60.0, [20]))
    engine(tmp_path / "x-1", (0, 0.0, [5]), (1, 30.0, [5]), (2, 60.0, [5]), version=0)
    trace = read(tmp_path / "x")
    assert places(trace) == [(0, 0, 0, 50), (0, 1, 1, 5), (0, 2, 1, 5), (1, 0, 0, 20), (1, 1, 1, 5)]
    assert trace.outcomes["t_finish"].tolist() == [50.0, 5.0, 35.0, 20.0, 5.0]
    assert trace.iterations.query("worker == 1 and rl_step == 0")["iteration"].tolist() == [0, 1, 2, 3]


def test_overlapping_rl_steps_go_by_their_numbers(tmp_path):
    """Weights are updated while responses to the last ones still grow."""
    for name in ("x", "x-1"):
        engine(tmp_path / name, (0, 0.0, [50]), (1, 40.0, [50]), (2, 80.0, [50]), keys=[name])
    assert places(read(tmp_path / "x")) == [(step, 0, worker, 50) for step in range(3) for worker in range(2)]


def test_traces_of_other_models_are_not_put_together(tmp_path):
    engine(tmp_path / "x", (0, 0.0, [5]))
    engine(tmp_path / "x-1", (0, 0.0, [5]), model="another")
    assert read(tmp_path / "x").manifest.num_workers == 1
    with refused(TraceError):
        together([read(tmp_path / "x"), read(tmp_path / "x-1")])


@pytest.mark.parametrize("lacking", [1, 2], ids=["one engine", "both engines"])
def test_rl_step_has_iterations_of_any_engine(tmp_path, lacking):
    parts = []
    for n, name in enumerate(("x", "x-1")):
        engine(tmp_path / name, (0, 0.0, [5]), (1, 9.0, [5]), keys=[name])
        trace = read_one(tmp_path / name)
        without = (1,) if n < lacking else ()
        manifest = trace.manifest.model_copy(update={"without_iterations": without})
        rows = trace.iterations[~trace.iterations["rl_step"].isin(without)]
        parts.append(trace.replace(manifest=manifest, iterations=rows))
    assert together(parts).manifest.without_iterations == (() if lacking == 1 else (1,))
    unset = parts[1].with_manifest(parts[1].manifest.model_copy(update={"without_iterations": None}))
    assert together([parts[0], unset]).manifest.without_iterations is None
