"""Going on with a trace: what was recorded before stays, what is done again replaces what was, whatever gets killed."""

import os
import random
import shutil
import signal
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tltlab.errors import ConfigError, RunError
from tltlab.traces.recorder import Recorder, repair
from tltlab.traces.schema import Manifest
from tltlab.traces.trace import read

from .test_recorder import FORKING, begun, killed_after

MANIFEST = Manifest(kind="recorded", name="live", num_workers=2, model="m", group_size=1, seed=3, hardware="h")


def rows(step, attempt=0):
    """An RL step's rows; `attempt` shows in them, so that rows of one that was given up are told apart."""
    key = [{"rl_step": step, "prompt_id": f"p{i}", "sample": 0} for i in range(3)]
    return {
        "workload": [
            k | {"epoch": 0, "prompt_tokens": 3, "max_response_tokens": 9, "policy_version": step} for k in key
        ],
        "outcomes": [
            k | {"response_tokens": 1 + attempt, "finish_reason": "stop", "worker": 0, "t_submit": 0.0, "t_finish": 1.0}
            for k in key
        ],
        "tokens": [
            k | {"prompt_token_ids": [1], "token_ids": [step] * (1 + attempt), "token_versions": [step] * (1 + attempt)}
            for k in key
        ],
        "steps": [{"rl_step": step, "t_start": float(step), "policy_version": step}],
    }


def record(recorder, steps, attempt=0):
    for step in steps:
        for table, new in rows(step, attempt).items():
            recorder.append(table, new)
        if attempt == 1:
            recorder.append("spans", [{"rl_step": step, "lane": "x", "kind": "idle", "t_start": 0.0, "duration": 1.0}])
        recorder.flush()


def left(path, steps, *, how, attempt=0):
    """A trace that another process left at `path`: killed, closed, or killed and repaired."""
    recorder = Recorder(path, MANIFEST)
    record(recorder, range(steps), attempt)
    if how == "closed":
        recorder.close()
        return
    recorder._lock.close()
    if how == "repaired":
        repair(path)


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
def test_a_trace_that_was_reopened_is_the_unbroken_one(tmp_path_factory, attempts, data):
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
            if how == "repaired" and not (folder / "t").exists():
                repair(folder / "t")
    with Recorder.reopen(folder / "t", MANIFEST, have) as recorder:
        record(recorder, range(have, have + 2))
    assert same(read(folder / "t"), unbroken(folder / "u", have + 2))
    assert sorted(item.name for item in folder.iterdir()) == ["t", "u"]
    shutil.rmtree(folder)


def test_the_finished_trace_stays_readable_until_the_new_one_closes(tmp_path):
    left(tmp_path / "t", 5, how="closed")
    recorder = Recorder.reopen(tmp_path / "t", MANIFEST, 3)
    record(recorder, [3], attempt=2)
    assert read(tmp_path / "t").rl_steps == [0, 1, 2, 3, 4]
    recorder.close()
    assert read(tmp_path / "t").outcomes["response_tokens"].tolist() == [1] * 9 + [3] * 3


def test_a_recording_that_is_too_short_gives_way_to_the_finished_trace(tmp_path):
    left(tmp_path / "t", 5, how="closed")
    recorder = Recorder.reopen(tmp_path / "t", MANIFEST, 2)
    recorder._lock.close()
    with Recorder.reopen(tmp_path / "t", MANIFEST, 4) as recorder:
        record(recorder, [4, 5])
    assert same(read(tmp_path / "t"), unbroken(tmp_path / "u", 6))


def test_a_live_recorder_takes_rl_steps_back(tmp_path):
    with Recorder(tmp_path / "t", MANIFEST) as recorder:
        record(recorder, range(4), attempt=1)
        recorder.append("spans", [{"rl_step": 4, "lane": "x", "kind": "idle", "t_start": 0.0, "duration": 1.0}])
        recorder.rewind(0)
        record(recorder, range(3))
        record(recorder, [3, 4], attempt=1)
        recorder.rewind(3)
        record(recorder, [3])
    assert same(read(tmp_path / "t"), unbroken(tmp_path / "u", 4))


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_rl_steps_that_are_missing_are_named(tmp_path, how):
    left(tmp_path / "t", 3, how=how)
    with pytest.raises(RunError, match="lacks RL step 3"):
        Recorder.reopen(tmp_path / "t", MANIFEST, 5)
    assert Recorder.reopen(tmp_path / "t", MANIFEST, 3).snapshot().rl_steps == [0, 1, 2]
    with pytest.raises(RunError, match="nothing is recorded there"):
        Recorder.reopen(tmp_path / "none", MANIFEST, 1)


def test_a_damaged_chunk_counts_as_not_there(tmp_path):
    left(tmp_path / "t", 4, how="killed")
    chunk = tmp_path / "t.recording" / "000002.arrow"
    chunk.write_bytes(chunk.read_bytes()[:50])
    with pytest.raises(RunError, match="lacks RL step 2"):
        Recorder.reopen(tmp_path / "t", MANIFEST, 4)
    with Recorder.reopen(tmp_path / "t", MANIFEST, 2) as recorder:
        record(recorder, [2])
    trace = read(tmp_path / "t")
    assert same(trace, unbroken(tmp_path / "u", 3))
    assert trace.manifest.notes == "chunk 000002 could not be read and was dropped"


def test_what_is_recorded_in_the_place_of_a_damaged_chunk_stays(tmp_path):
    left(tmp_path / "t", 4, how="killed")
    Recorder.reopen(tmp_path / "t", MANIFEST, 2)._lock.close()
    (tmp_path / "t.recording" / "000003.arrow").write_bytes(b"")
    with Recorder.reopen(tmp_path / "t", MANIFEST, 2) as recorder:
        record(recorder, [2])
    assert same(read(tmp_path / "t"), unbroken(tmp_path / "u", 3))


def test_the_trace_of_another_run_is_refused(tmp_path):
    for how in ("killed", "closed"):
        left(tmp_path / how, 2, how=how)
        with pytest.raises(ConfigError, match="its seed is 3, this run's 4"):
            Recorder.reopen(tmp_path / how, MANIFEST.model_copy(update={"seed": 4}), 1)


def test_a_run_that_goes_on_elsewhere_says_so(tmp_path):
    left(tmp_path / "t", 2, how="closed")
    with Recorder.reopen(tmp_path / "t", MANIFEST.model_copy(update={"hardware": "other"}), 2):
        pass
    assert read(tmp_path / "t").manifest.hardware == "h"
    assert read(tmp_path / "t").manifest.notes == "from RL step 2 on hardware other"


def go_on(path, start, steps, told):
    """Reopen and record, and close where `steps` are few; `told` hears of each RL step that is flushed."""
    recorder = Recorder.reopen(path, MANIFEST, start)
    for step in range(start, start + steps):
        record(recorder, [step])
        told.send(step)
    if steps < 9:
        recorder.close()
    time.sleep(60)


def test_a_kill_at_any_moment_of_going_on_loses_nothing(tmp_path):
    moments = random.Random(1)
    last = -1
    for number in range(8):
        # From the newest RL step, or from one before; few RL steps in every other round, so that kills hit the closing.
        start = max(last + 1 - number % 3, 0)
        steps = 3 if number % 2 else 10_000
        told = killed_after(moments.uniform(0.0, 0.12), *begun(go_on, tmp_path / "t", start, steps))
        last = max(told, start - 1)
    with Recorder.reopen(tmp_path / "t", MANIFEST, last + 1) as recorder:
        record(recorder, [last + 1])
    assert same(read(tmp_path / "t"), unbroken(tmp_path / "u", last + 2))


def test_a_recording_in_progress_is_not_taken_over(tmp_path):
    child, told = begun(go_on, tmp_path / "t", 0, 10_000)
    assert told.recv() == 0
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(ConfigError, match="in progress"):
        Recorder.reopen(tmp_path / "t", MANIFEST, 0)
    child.kill()
    child.join()
    assert Recorder.reopen(tmp_path / "t", MANIFEST, 1).snapshot().rl_steps == [0]


def reopen_and_die(path, number):
    """Reopen at RL step 2, and end before the rename, replacement or removal of this number."""
    done = 0

    def dying(stock):
        def call(*args, **kwargs):
            nonlocal done
            if done == number:
                os._exit(9)
            done += 1
            return stock(*args, **kwargs)

        return call

    os.rename, os.replace, shutil.rmtree = dying(os.rename), dying(os.replace), dying(shutil.rmtree)
    Recorder.reopen(path, MANIFEST, 2)
    os._exit(0)


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_an_end_between_any_two_operations_leaves_the_old_or_the_new(tmp_path, how):
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
        # What ended early may also go on from where the old one was.
        for rl_steps in (2, 3) if ended else (2,):
            copy = tmp_path / f"{number}-{rl_steps}"
            shutil.copytree(place, copy)
            with Recorder.reopen(copy / "t", MANIFEST, rl_steps) as recorder:
                record(recorder, range(rl_steps, 4))
            assert same(read(copy / "t"), whole)
        number += 1
    assert number >= 2
