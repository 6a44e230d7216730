"""Checkpoints of a run: whole or not there, the newest stay, whatever kills the writer or fills the disk."""

import contextlib
import errno
import hashlib
import json
import os
import random
import shutil
from pathlib import Path

import pytest

from tests.refused import refused
from tltlab.errors import ConfigError, RunError
from tltlab.files import read_json, write_sum
from tltlab.runtime.run.checkpoints import MOST_HASHED_BYTES, RunCheckpoints, checkpoints_in, fault_of, step_of
from tltlab.traces.recorder import Recorder
from tltlab.traces.schema import Manifest

from ...crash_states import Disk, crashes, put


def writer(number, size=100, then=lambda folder: None):
    def write(folder):
        (folder / "trainer").mkdir()
        (folder / "state.json").write_text(json.dumps({"number": number}))
        (folder / "trainer" / "weights.bin").write_bytes(bytes([number % 256]) * size)
        then(folder)

    return write


def saved(folder, *steps, keep=2, size=100):
    checkpoints = RunCheckpoints(folder, keep=keep)
    for step in steps:
        assert checkpoints.save(step, writer(step, size)).name == f"step-{step:06d}"
    return checkpoints


def flip(file, bit):
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def whole(checkpoints):
    """Those that are, once what a killed writer left is tidied up."""
    checkpoints.latest()
    return [path for path in checkpoints_in(checkpoints.folder) if fault_of(path) is None]


def names(checkpoints):
    return [path.name for path in whole(checkpoints)]


def test_the_newest_stay(tmp_path):
    assert RunCheckpoints(tmp_path / "c", keep=2).latest() is None
    checkpoints = saved(tmp_path / "c", 2, 4, 6)
    assert names(checkpoints) == ["step-000004", "step-000006"]
    assert read_json(checkpoints.latest() / "state.json") == {"number": 6}
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == names(checkpoints)
    assert step_of(checkpoints.latest()) == 6


def test_going_back_leaves_the_other_future(tmp_path):
    checkpoints = saved(tmp_path, 2, 4, 6, keep=3)
    checkpoints.save(4, writer(40))
    assert names(checkpoints) == ["step-000002", "step-000004"]
    assert read_json(checkpoints.latest() / "state.json") == {"number": 40}


LARGE, WEIGHTS = MOST_HASHED_BYTES + 1, Path("trainer/weights.bin")


@pytest.mark.parametrize(
    ("size", "damage", "facts"),
    [
        (100, lambda c: (c / WEIGHTS).write_bytes(b"1" * 99), ("weights.bin", "99", "100")),
        (100, lambda c: (c / WEIGHTS).write_bytes(b"x" * 100), ("weights.bin",)),
        (100, lambda c: (c / "state.json").unlink(), ("state.json",)),
        (100, lambda c: (c / "checkpoint.json").unlink(), ("checkpoint.json",)),
        (100, lambda c: (c / "checkpoint.json").write_text('{"files": '), ()),
        (LARGE, lambda c: flip(c / WEIGHTS, 4 * LARGE), ("weights.bin",)),
        (LARGE, lambda c: os.truncate(c / WEIGHTS, LARGE - 1), ("weights.bin", str(LARGE - 1))),
    ],
)
def test_the_one_before_a_damaged_one_is_newest(tmp_path, size, damage, facts):
    checkpoints = saved(tmp_path, 1, 2, size=size)
    damage(damaged := checkpoints.latest())
    complaints = []
    assert checkpoints.latest(complaints.append).name == "step-000001"
    (complaint,) = complaints
    assert all(fact in complaint for fact in ("step-000002", *facts))
    # What shows without hashing a large file is worth nothing, so it does not count among those that stay.
    second = "step-000001" if fault_of(damaged) else damaged.name
    checkpoints.save(3, writer(3))
    assert names(checkpoints) == [second, "step-000003"]


def test_a_writers_own_sum_is_believed(tmp_path):
    """What the disk makes of it between the write and the seal is damage too."""

    def damaged(folder):
        write_sum(folder / WEIGHTS, hashlib.sha256(bytes([1]) * LARGE).hexdigest())
        flip(folder / WEIGHTS, 5)

    checkpoints = RunCheckpoints(tmp_path, keep=1)
    checkpoints.save(1, writer(1, LARGE, damaged))
    complaints = []
    assert checkpoints.latest(complaints.append) is None
    assert "weights.bin" in complaints[0]


def test_no_single_bit_of_a_checkpoint_flips_unseen(tmp_path):
    """Or all that is loaded is as it was. TLTLAB_FLIPS: how many bits."""
    checkpoints = RunCheckpoints(tmp_path, keep=1)
    path = checkpoints.save(7, writer(7, 3000))
    files = sorted(file for file in path.rglob("*") if file.is_file())
    whole = {file: file.read_bytes() for file in files}
    draw = random.Random(5)
    for _ in range(int(os.environ.get("TLTLAB_FLIPS", 100))):
        file = draw.choice(files)
        flip(file, draw.randrange(8 * len(whole[file])))
        if checkpoints.latest() is not None:
            assert file.name == "checkpoint.json", file
        file.write_bytes(whole[file])
    assert checkpoints.latest() == path


def test_what_a_killed_writer_left_goes(tmp_path):
    checkpoints = RunCheckpoints(tmp_path, keep=1)
    path = checkpoints.save(1, writer(1))
    shutil.copytree(path, tmp_path / ".step-000000.gone")
    shutil.copytree(path, tmp_path / ".step-000002.tltlab-left" / "new")
    shutil.copytree(path, tmp_path / ".step-000001.tltlab-left" / "old")
    assert RunCheckpoints(tmp_path, keep=1).latest() == path
    assert [*tmp_path.iterdir()] == [path]
    (left := tmp_path / ".step-000001.tltlab-left").mkdir()  # killed between two renames
    path.rename(left / "old")
    assert checkpoints.latest() == path


def test_only_a_newer_irremovable_checkpoint_ends_a_run(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path, 2, keep=1)

    def refuse(old, new, rename=os.rename):
        if Path(old).name == "step-000002":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(old, new)

    with monkeypatch.context() as here:
        here.setattr(os, "rename", refuse)
        third = checkpoints.save(3, writer(3))
        assert checkpoints.latest() == third
        with refused(RunError, naming=("step-000002", "Input/output")):
            checkpoints.save(1, writer(1))
    fourth = checkpoints.save(4, writer(4))
    assert [*tmp_path.iterdir()] == [fourth]


def test_failed_writes_leave_earlier_checkpoints(tmp_path):
    checkpoints = saved(tmp_path, 1, keep=1)
    with refused(RunError, naming=("disk is full", "--resume")):
        checkpoints.save(2, writer(2, then=lambda folder: Path("/dev/full").write_bytes(b"1" * 10_000)))
    with pytest.raises(KeyError):
        checkpoints.save(2, writer(2, then=lambda folder: {}["weights"]))
    assert names(checkpoints) == ["step-000001"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_other_things_in_the_folder_are_left_alone(tmp_path):
    for name in ("final", "step-1", "step-000009.old"):
        (tmp_path / name).mkdir()
    saved(tmp_path, 3, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final", "step-000003", "step-000009.old", "step-1"]
    assert checkpoints_in(tmp_path) == [tmp_path / "step-000003"]
    assert checkpoints_in(tmp_path / "none") == []
    with refused(ConfigError, naming=("step-NNNNNN",)):
        step_of(tmp_path / "final")


def content(folder):
    """What `writer` wrote into a checkpoint, by the number that it has."""
    if folder is None:
        return None
    return {name: (folder / name).read_bytes() for name in ("state.json", "trainer/weights.bin")}


def test_the_power_may_go_at_any_moment(tmp_path, monkeypatch):
    """The newest checkpoint that was saved is there to the last bit, and the recording holds all RL steps before it."""
    root, place = tmp_path / "disk", tmp_path / "after"
    root.mkdir()
    manifest = Manifest(kind="recorded", num_workers=1)
    with Disk(root) as disk:
        told = [(disk.look(), None)]
        checkpoints = RunCheckpoints(root / "run" / "checkpoints", keep=1)
        with contextlib.suppress(KeyboardInterrupt), Recorder(root / "run" / "trace", manifest) as recorder:
            for number, step in enumerate((1, 2, 2, 3)):
                for _ in range(2):  # the first time a trainer dies, and the run goes back
                    recorder.rewind(step - (number != 2))
                    key = {"rl_step": step - 1, "prompt_id": "a", "sample": 0}
                    given = {"epoch": 0, "prompt_tokens": 3, "max_response_tokens": 9, "policy_version": 0}
                    if number != 2:
                        recorder.append("workload", [key | given])
                        recorder.append("outcomes", [key | {"response_tokens": 1, "finish_reason": "stop"}])
                    recorder.flush()
                saved_now = content(checkpoints.save(step, writer(number)))
                told.append((disk.look(), saved_now))
            raise KeyboardInterrupt
    monkeypatch.setattr(os, "fsync", lambda file: None)
    looked_at = 0
    for (before, after), state in crashes(disk, told, short=30):
        put(state, place)
        left = RunCheckpoints(place / "run" / "checkpoints", keep=1)
        newest = left.latest()
        assert content(newest) in (before, after)
        if newest is not None:
            with Recorder.reopen(place / "run" / "trace", manifest, step_of(newest)) as recorder:
                assert recorder.snapshot().rl_steps == list(range(step_of(newest)))
        # It continues from there.
        assert content(left.save(9, writer(9))) == content(left.latest())
        looked_at += 1
    assert looked_at >= 30
