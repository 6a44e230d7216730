"""Checkpoints of a run: whole or not there, the newest stay, whatever kills the writer or fills the disk."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.refused import refused
from tltlab.errors import ConfigError, RunError
from tltlab.files import write_sum
from tltlab.runtime.run.checkpoints import MOST_HASHED_BYTES, RunCheckpoints, checkpoints_in, fault_of, step_of
from tltlab.traces.recorder import Recorder
from tltlab.traces.schema import Manifest

from ...crash_states import Disk, crashes, put


def writer(number: int, size: int = 100):
    def write(folder: Path) -> None:
        (folder / "trainer").mkdir()
        (folder / "state.json").write_text(json.dumps({"number": number}))
        (folder / "trainer" / "weights.bin").write_bytes(bytes([number % 256]) * size)

    return write


def flip(file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def whole(checkpoints: RunCheckpoints) -> list[Path]:
    """Those that are, once what a killed writer left is tidied up."""
    checkpoints.latest()
    return [path for path in checkpoints_in(checkpoints.folder) if fault_of(path) is None]


def names(checkpoints: RunCheckpoints) -> list[str]:
    return [path.name for path in whole(checkpoints)]


def test_the_newest_stay(tmp_path: Path):
    checkpoints = RunCheckpoints(tmp_path / "c", keep=2)
    assert checkpoints.latest() is None
    for step in (2, 4, 6):
        assert checkpoints.save(step, writer(step)).name == f"step-{step:06d}"
    assert names(checkpoints) == ["step-000004", "step-000006"]
    assert json.loads((checkpoints.latest() / "state.json").read_text()) == {"number": 6}
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == names(checkpoints)
    assert step_of(checkpoints.latest()) == 6


def test_a_run_that_went_back_leaves_its_other_future(tmp_path: Path):
    checkpoints = RunCheckpoints(tmp_path, keep=3)
    for step in (2, 4, 6):
        checkpoints.save(step, writer(step))
    checkpoints.save(4, writer(40))
    assert names(checkpoints) == ["step-000002", "step-000004"]
    assert json.loads((checkpoints.latest() / "state.json").read_text()) == {"number": 40}


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda c: (c / "trainer" / "weights.bin").write_bytes(b"1" * 99), "weights.bin has 99 bytes instead of 100"),
        (lambda c: (c / "trainer" / "weights.bin").write_bytes(b"x" * 100), "weights.bin is not what was written"),
        (lambda c: (c / "state.json").unlink(), "state.json is missing"),
        (lambda c: (c / "checkpoint.json").unlink(), "checkpoint.json is missing"),
        (lambda c: (c / "checkpoint.json").write_text('{"files": '), "Expecting value"),
    ],
)
def test_a_damaged_one_is_passed_over_with_a_sentence(tmp_path: Path, damage, says: str):
    checkpoints = RunCheckpoints(tmp_path, keep=2)
    for step in (1, 2):
        checkpoints.save(step, writer(step))
    damage(checkpoints.latest())
    assert checkpoints.latest().name == "step-000001"
    assert len(checkpoints.complaints) == 1
    assert says in checkpoints.complaints[0]
    # It is worth nothing, so it does not count among those that stay.
    checkpoints.save(3, writer(3))
    assert names(checkpoints) == ["step-000001", "step-000003"]
    assert checkpoints.complaints == []


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda file: flip(file, 8 * (MOST_HASHED_BYTES // 2)), "weights.bin is not what was written"),
        (lambda file: os.truncate(file, MOST_HASHED_BYTES), "weights.bin has"),
    ],
)
def test_a_large_file_that_is_damaged_makes_the_one_before_the_newest(tmp_path: Path, damage, says: str):
    checkpoints = RunCheckpoints(tmp_path, keep=2)
    first, second = (checkpoints.save(step, writer(step, MOST_HASHED_BYTES + 1)) for step in (1, 2))
    assert checkpoints.latest() == second
    damage(second / "trainer" / "weights.bin")
    assert checkpoints.latest() == first
    (complaint,) = checkpoints.complaints
    assert str(second) in complaint
    assert says in complaint


def test_a_writer_that_hashes_what_it_writes_is_taken_at_its_word(tmp_path: Path):
    """What the disk makes of it between the write and the seal is damage too."""
    size = MOST_HASHED_BYTES + 1

    def write(folder: Path) -> None:
        writer(1, size)(folder)
        write_sum(folder / "trainer" / "weights.bin", hashlib.sha256(bytes([1]) * size).hexdigest())
        flip(folder / "trainer" / "weights.bin", 5)

    checkpoints = RunCheckpoints(tmp_path, keep=1)
    checkpoints.save(1, write)
    assert checkpoints.latest() is None
    assert "weights.bin is not what was written" in checkpoints.complaints[0]


def test_no_single_bit_of_a_checkpoint_flips_unseen(tmp_path: Path):
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


def test_what_a_killed_writer_left_goes_when_a_run_begins_again(tmp_path: Path):
    checkpoints = RunCheckpoints(tmp_path, keep=1)
    path = checkpoints.save(1, writer(1))
    for name in (".step-000000.gone", ".step-000002.partial", ".step-000001.replaced"):
        shutil.copytree(path, tmp_path / name)
    assert RunCheckpoints(tmp_path, keep=1).latest() == path
    assert [*tmp_path.iterdir()] == [path]


def test_an_old_checkpoint_that_cannot_be_removed_ends_no_run_and_a_newer_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    checkpoints = RunCheckpoints(tmp_path, keep=1)
    checkpoints.save(2, writer(2))

    def refuse(old: Path, new: Path, rename: Any = os.rename) -> None:
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


def test_a_full_disk_and_a_writer_that_fails_leave_those_before(tmp_path: Path):
    checkpoints = RunCheckpoints(tmp_path, keep=1)
    checkpoints.save(1, writer(1))

    def full(folder: Path) -> None:
        writer(2)(folder)
        Path("/dev/full").write_bytes(b"1" * 10_000)

    def failing(folder: Path) -> None:
        writer(2)(folder)
        raise KeyError("weights")

    with refused(RunError):
        checkpoints.save(2, full)
    with pytest.raises(KeyError):
        checkpoints.save(2, failing)
    assert names(checkpoints) == ["step-000001"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_other_things_in_the_folder_are_left_alone(tmp_path: Path):
    for name in ("final", "step-1", "step-000009.old"):
        (tmp_path / name).mkdir()
    checkpoints = RunCheckpoints(tmp_path, keep=1)
    checkpoints.save(3, writer(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final", "step-000003", "step-000009.old", "step-1"]
    assert checkpoints_in(tmp_path) == [tmp_path / "step-000003"]
    assert checkpoints_in(tmp_path / "none") == []
    with refused(ConfigError, naming=("step-NNNNNN",)):
        step_of(tmp_path / "final")


def keep_saving(folder: Path, first: int, again: bool, told: Connection) -> None:
    checkpoints = RunCheckpoints(folder, keep=1)

    def write(partial: Path) -> None:
        for part in range(4):
            (partial / f"part-{part}").mkdir()
            (partial / f"part-{part}" / "step.json").write_text(json.dumps(step))

    for number in range(1_000_000):
        step = first if again else first + number
        checkpoints.save(step, write)
        told.send(step)


@pytest.mark.parametrize("again", [False, True])
def test_a_writer_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, again: bool):
    """With `again` each one takes the place of one of the same RL step, and is the only one there."""
    moments = random.Random(0)
    forking = multiprocessing.get_context("fork")
    step = 0
    for _ in range(12):
        ours, theirs = forking.Pipe(duplex=False)
        child = forking.Process(target=keep_saving, args=(tmp_path, step, again, theirs))
        child.start()
        theirs.close()
        time.sleep(moments.uniform(0.0, 0.08))
        child.kill()
        child.join()
        told = []
        with contextlib.suppress(EOFError):
            while True:
                told.append(ours.recv())
        checkpoints = RunCheckpoints(tmp_path, keep=1)
        left = whole(checkpoints)
        assert checkpoints.complaints == []
        if told or step:
            # One may be done that was not told yet.
            least = told[-1] if told else step - (not again)
            assert step_of(left[-1]) in (least, least + (not again))
        for path in left:
            assert [json.loads((path / f"part-{n}" / "step.json").read_text()) for n in range(4)] == [step_of(path)] * 4
        if left:
            step = step_of(left[-1]) + (not again)
    checkpoints.save(step, lambda folder: None)
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{step:06d}"]


def content(folder: Path | None) -> dict[str, bytes] | None:
    """What `writer` wrote into a checkpoint, by the number that it has."""
    if folder is None:
        return None
    return {name: (folder / name).read_bytes() for name in ("state.json", "trainer/weights.bin")}


def test_the_power_may_go_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The newest checkpoint that was saved is there to the last bit, and the recording holds all RL steps before it."""
    root, place = tmp_path / "disk", tmp_path / "after"
    root.mkdir()
    manifest = Manifest(kind="recorded", num_workers=1)
    with Disk(root) as disk:
        told: list[tuple[int, dict[str, bytes] | None]] = [(disk.look(), None)]
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
        saved = RunCheckpoints(place / "run" / "checkpoints", keep=1)
        newest = saved.latest()
        assert content(newest) in (before, after)
        if newest is not None:
            with Recorder.reopen(place / "run" / "trace", manifest, step_of(newest)) as recorder:
                assert recorder.snapshot().rl_steps == list(range(step_of(newest)))
        # It goes on from there.
        assert content(saved.save(9, writer(9))) == content(saved.latest())
        looked_at += 1
    assert looked_at >= 30
