"""Checkpoints of a trainer: complete or not there, and never the end of training."""

import os
import pickle
import random
import threading

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from tltlab.runtime.drafter import worker as checkpoint
from tltlab.runtime.drafter.training import HeadTraining
from tltlab.runtime.drafter.worker import DrafterCheckpoint
from tltlab.runtime.recipe.drafter import LossConfig, OptimConfig

from ...crash_states import Disk, crashes, put
from .drafting_text import frozen, head, largest_file, same, sequence


def state(value, size=1000):
    return {"head.fc.weight": torch.full((size,), value), "counters": torch.tensor([int(value), 0])}


def save(saved, tensors):
    """Until it is written."""
    saved.save(tensors)
    saved.finish()


def loaded(folder, size=1000):
    found = state(-1.0, size)
    path = DrafterCheckpoint(folder).load(found)
    if path is None:
        return None
    (value,) = set(found["head.fc.weight"].tolist())
    assert found["counters"].tolist() == [int(value), 0]
    return float(value)


def test_training_continues_bit_by_bit(tmp_path):
    optim = OptimConfig(lr=3e-3, warmup=4)
    training = HeadTraining(head(tmp_path / "a"), frozen(), LossConfig(), optim)
    saved = DrafterCheckpoint(tmp_path / "saved")
    training.update([sequence(0)])
    saved.save(training.live_state())
    # What comes after the save must not reach what is written.
    training.update([sequence(1)])
    training.update([sequence(2)])
    after = HeadTraining(head(tmp_path / "b", seed=4), frozen(), LossConfig(), optim)
    found = after.state_dict()
    assert saved.load(found) == saved.latest() == tmp_path / "saved/checkpoint-00000000"
    after.load_state_dict(found)
    assert after.updates == 1
    after.update([sequence(1)])
    after.update([sequence(2)])
    assert same(training.state_dict(), after.state_dict())
    saved.close()


def test_two_are_kept_and_numbers_continue(tmp_path):
    assert DrafterCheckpoint(tmp_path).latest() is None
    assert loaded(tmp_path) is None
    for first in (0, 3):
        saved = DrafterCheckpoint(tmp_path)
        for n in range(first, first + 3):
            assert 0 < saved.save(state(float(n))) < 60
        saved.close()
        assert saved.failures == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-00000004", "checkpoint-00000005"]
    partial = tmp_path / ".checkpoint-00000006.tltlab-killed"
    partial.mkdir()
    assert loaded(tmp_path) == 5.0
    assert partial.is_dir(), "who reads takes nothing away from who may be writing"
    save(DrafterCheckpoint(tmp_path), state(6.0))
    assert loaded(tmp_path) == 6.0
    assert not partial.exists()


def test_on_a_full_disk_the_last_checkpoint_stays(tmp_path):
    saved = DrafterCheckpoint(tmp_path)
    save(saved, state(1.0, 100_000))
    with largest_file(50_000):
        saved.save(state(2.0, 100_000))
        # The next save waits for it, and says what became of it.
        save(saved, state(3.0, 100_000))
    assert len(saved.failures) == 2
    assert all(fact in saved.failures[0] for fact in ("checkpoint-00000001", "File too large"))
    assert loaded(tmp_path, 100_000) == 1.0
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-00000000"]
    save(saved, state(4.0, 100_000))
    assert len(saved.failures) == 2
    assert loaded(tmp_path, 100_000) == 4.0


def test_a_folder_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "file").write_text("in the way")
    saved = DrafterCheckpoint(tmp_path / "file" / "folder")
    save(saved, state(1.0))
    assert "NotADirectoryError" in saved.failures[0] or "FileExistsError" in saved.failures[0]


def test_a_damaged_checkpoint_gives_way(tmp_path):
    saved = DrafterCheckpoint(tmp_path)
    for n in (1.0, 2.0):
        save(saved, state(n))
    newest = tmp_path / "checkpoint-00000001"
    draw = random.Random(3)
    for file in sorted(newest.iterdir()):
        whole = file.read_bytes()
        flipped = [bytearray(whole) for _ in range(5)]
        for data in flipped:
            bit = draw.randrange(8 * len(whole))
            data[bit // 8] ^= 1 << bit % 8
        for data in (whole[:50], *flipped):
            file.write_bytes(data)
            found = state(-1.0)
            assert saved.load(found) == tmp_path / "checkpoint-00000000"
            assert set(found["head.fc.weight"].tolist()) == {1.0}
            assert "checkpoint-00000001" in saved.failures[-1]
        file.write_bytes(whole)
    assert saved.load(state(-1.0)) == newest


def test_a_pickled_index_is_not_read(tmp_path):
    """DCP's own storage has one, and reading it runs what it says."""
    old = tmp_path / "checkpoint-00000004"
    torch_save(dict(state(4.0)), storage_writer=FileSystemWriter(old), no_dist=True)
    (old / ".metadata").write_bytes(pickle.dumps(Opened(tmp_path / "opened")))
    saved = DrafterCheckpoint(tmp_path)
    assert saved.load(state(-1.0)) is None
    assert not (tmp_path / "opened").exists()
    assert str(old) in saved.failures[0]


class Opened:
    """Pickled, makes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_only_the_next_save_waits(tmp_path, monkeypatch):
    first, second = threading.Event(), threading.Event()

    def slow(tensors, file):
        assert (second if saved.latest() else first).wait(300)
        save_file(tensors, file)

    monkeypatch.setattr(checkpoint, "save_file", slow)
    saved = DrafterCheckpoint(tmp_path)
    saved.save(state(1.0))
    assert saved.latest() is None
    threading.Timer(0.1, first.set).start()
    assert saved.save(state(2.0)) > 0
    assert loaded(tmp_path) == 1.0
    second.set()
    saved.close()
    assert loaded(tmp_path) == 2.0


def test_the_power_may_go_at_any_moment(tmp_path, monkeypatch):
    root, place = tmp_path / "disk", tmp_path / "after"
    root.mkdir()
    with Disk(root) as disk:
        told = [(disk.look(), None)]
        saved = DrafterCheckpoint(root / "run" / "drafter", keep=1)
        for value in (1.0, 2.0):
            save(saved, state(value, 10))
            told.append((disk.look(), value))
        saved.close()
    monkeypatch.setattr(os, "fsync", lambda file: None)
    looked_at = 0
    for (before, after), there in crashes(disk, told, short=20):
        put(there, place)
        assert loaded(place / "run" / "drafter", 10) in (before, after)
        again = DrafterCheckpoint(place / "run" / "drafter", keep=1)
        save(again, state(3.0, 10))
        again.close()
        assert loaded(place / "run" / "drafter", 10) == 3.0
        looked_at += 1
    assert looked_at >= 20
