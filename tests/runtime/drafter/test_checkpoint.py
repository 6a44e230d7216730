"""Checkpoints of a trainer: complete or not there, and never the end of training."""

import pickle
import threading

import torch
from safetensors.torch import save_file

from tltlab.runtime.drafter import worker as checkpoint
from tltlab.runtime.drafter.training import HeadTraining
from tltlab.runtime.drafter.worker import DrafterCheckpoint
from tltlab.runtime.recipe.drafter import LossConfig, OptimConfig

from .drafting_text import frozen, head, largest_file, same, sequence


def state(value, size=1000):
    return {"head.fc.weight": torch.full((size,), value), "counters": torch.tensor([int(value), 0])}


def save(saved, tensors):
    """Until it is written."""
    saved.save(tensors)
    saved.finish()


def loaded(folder):
    found = DrafterCheckpoint(folder).load()
    if found is None:
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
    after.load_state_dict(saved.load())
    assert after.updates == 1
    after.update([sequence(1)])
    after.update([sequence(2)])
    assert same(training.state_dict(), after.state_dict())
    saved.close()


def test_the_newest_is_kept(tmp_path):
    assert loaded(tmp_path) is None
    for n in (1.0, 2.0):
        saved = DrafterCheckpoint(tmp_path)
        assert 0 < saved.save(state(n)) < 60
        saved.close()
        assert saved.failures == []
        assert loaded(tmp_path) == n
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]


def test_on_a_full_disk_the_last_checkpoint_stays(tmp_path):
    saved = DrafterCheckpoint(tmp_path)
    save(saved, state(1.0, 100_000))
    with largest_file(50_000):
        saved.save(state(2.0, 100_000))
        # The next save waits for it, and says what became of it.
        save(saved, state(3.0, 100_000))
    assert len(saved.failures) == 2
    assert all(fact in saved.failures[0] for fact in (str(saved.path), "File too large"))
    assert loaded(tmp_path) == 1.0
    assert list(tmp_path.iterdir()) == [saved.path]
    save(saved, state(4.0, 100_000))
    assert len(saved.failures) == 2
    assert loaded(tmp_path) == 4.0


def test_a_folder_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "file").write_text("in the way")
    saved = DrafterCheckpoint(tmp_path / "file" / "folder")
    save(saved, state(1.0))
    assert "NotADirectoryError" in saved.failures[0] or "FileExistsError" in saved.failures[0]


def test_a_file_that_is_no_state_is_reported(tmp_path):
    saved = DrafterCheckpoint(tmp_path)
    save(saved, state(1.0))
    whole = saved.path.read_bytes()
    # The last one runs what it says where it is unpickled.
    for data in (whole[:50], b"", pickle.dumps(Opened(tmp_path / "opened"))):
        saved.path.write_bytes(data)
        assert saved.load() is None
        assert str(saved.path) in saved.failures[-1]
    assert not (tmp_path / "opened").exists()
    saved.path.write_bytes(whole)
    assert loaded(tmp_path) == 1.0


class Opened:
    """Pickled, makes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_only_the_next_save_waits(tmp_path, monkeypatch):
    first, second = threading.Event(), threading.Event()

    def slow(tensors, file):
        assert (second if saved.path.exists() else first).wait(300)
        save_file(tensors, file)

    monkeypatch.setattr(checkpoint, "save_file", slow)
    saved = DrafterCheckpoint(tmp_path)
    saved.save(state(1.0))
    assert loaded(tmp_path) is None
    threading.Timer(0.1, first.set).start()
    assert saved.save(state(2.0)) > 0
    assert loaded(tmp_path) == 1.0
    second.set()
    saved.close()
    assert loaded(tmp_path) == 2.0
