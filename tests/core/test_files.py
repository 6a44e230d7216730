"""Files and folders are there as a whole or not at all, whatever the disk says."""

import errno
import json
import os
import posix
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.refused import refused
from tltlab import files
from tltlab.errors import ConfigError, InputError
from tltlab.files import (
    new_folder,
    read_json,
    read_object,
    read_text,
    replace_durably,
    sealed,
    sha256_of,
    write_json,
    write_sum,
    written_sum,
)


@pytest.fixture(autouse=True)
def _disk(monkeypatch):
    """The real `fsync`, without which other tests do."""
    monkeypatch.setattr(os, "fsync", posix.fsync)


@contextmanager
def full_disk():
    """No file may grow beyond a few bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("durable", [False, True])
def test_a_full_disk_leaves_the_old_file_alone(tmp_path, durable):
    path = tmp_path / "new" / "a.json"
    write_json(path, {"rows": 1})
    with full_disk(), refused(OSError if durable else InputError, naming=("large",) if durable else ("a.json",)):
        replace_durably(path, b"[1, 2, 3, 4]") if durable else write_json(path, {"rows": list(range(100))})
    assert read_json(path) == {"rows": 1}
    assert [file.name for file in path.parent.iterdir()] == ["a.json"]


def test_what_json_does_not_know_is_not_written(tmp_path):
    with refused(ValueError, naming=("JSON",)):
        write_json(tmp_path / "a.json", {"loss": float("nan")})
    assert list(tmp_path.iterdir()) == []
    write_json(tmp_path / "a.json", [1])
    (tmp_path / "b.json").write_text(json.dumps([1]))
    assert (tmp_path / "a.json").stat().st_mode == (tmp_path / "b.json").stat().st_mode


def test_a_folder_takes_its_place_whole(tmp_path):
    out = tmp_path / "above" / "out"
    with new_folder(out) as folder:
        (folder / "a").write_text("first")
    with pytest.raises(FileNotFoundError), new_folder(out) as folder:
        (folder / "a").rename(folder / "b")
    assert (out / "a").read_text() == "first"
    with new_folder(out, durable=True) as folder:
        (folder / "b").write_text("third")
    assert [file.name for file in out.iterdir()] == ["b"]
    assert [file.name for file in out.parent.iterdir()] == ["out"]


def test_a_new_folder_replaces_nothing(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").write_text("theirs")
    with refused(OSError, naming=("empty",)), new_folder(tmp_path / "out", replace=False) as folder:
        (folder / "a").write_text("ours")
    assert (tmp_path / "out" / "a").read_text() == "theirs"
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from tltlab.files import new_folder

left, real = int(sys.argv[2]), os.replace

def replace(old, new):
    global left
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    real(old, new)

os.replace = replace
with new_folder(Path(sys.argv[1])) as new:
    (new / "a").write_text("2")
"""


@pytest.mark.parametrize("moves", [0, 1])
def test_next_writer_mends_what_killed_one_left(tmp_path, moves):
    out = tmp_path / "out"
    with new_folder(out) as folder:
        (folder / "a").write_text("1")
    with new_folder(tmp_path / "other"):
        subprocess.run([sys.executable, "-c", KILLED_WRITER, str(out), str(moves)], check=False)
        assert out.exists() == (moves == 0)
        (left,) = tmp_path.glob(".out.*")
        (tmp_path / ".out.settings").mkdir()
        with pytest.raises(KeyError), new_folder(out):
            raise KeyError("it fails as well")
        assert (out / "a").read_text() == "1"
        assert not left.exists()
        # Who lives keeps what is his.
        assert len([*tmp_path.glob(".other.*")]) == 1
        with new_folder(tmp_path / "other"):
            assert len([*tmp_path.glob(".other.*")]) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"out", "other", ".out.settings"}


@pytest.mark.parametrize("text", [None, "{", "[1]"])
def test_an_object_that_cannot_be_read_is_empty(tmp_path, text):
    if text is not None:
        (tmp_path / "a.json").write_text(text)
    assert read_object(tmp_path / "a.json") == {}


def test_what_is_sealed_is_what_was_written(tmp_path):
    content = {"b": [1, 2.5, None], "a": {"text": "ü"}}
    write_json(tmp_path / "a.json", sealed(content))
    assert read_json(tmp_path / "a.json") == content
    text = (tmp_path / "a.json").read_text()
    (tmp_path / "a.json").write_text(text.replace("2.5", "2.4"))
    with refused(ConfigError, naming=("a.json", "JSON", "sha256")):
        read_json(tmp_path / "a.json")
    (tmp_path / "a.json").write_text("[" * 100_000)
    with refused(ConfigError):
        read_json(tmp_path / "a.json")


def test_a_pipe_is_not_waited_for(tmp_path):
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    with refused(ConfigError, naming=("pipe",)):
        read_json(pipe)
    with refused(OSError, naming=(pipe,)):
        sha256_of(pipe)


def test_an_endless_file_is_not_read_fully(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST_JSON_BYTES", 1 << 20)
    with refused(ConfigError, naming=("/dev/full", "1", "MiB")):
        read_json(Path("/dev/full"))
    with refused(OSError, naming=("1", "MiB")):
        read_text(Path("/dev/zero"), 1 << 20)
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbf1\n2")
    assert read_text(tmp_path / "a", encoding="utf-8-sig") == "1\n2"


def test_sum_stands_beside_file_as_sha256sum_writes_it(tmp_path):
    file = tmp_path / "a b"
    file.write_bytes(b"abc")
    assert written_sum(file) is None
    write_sum(file, sha256_of(file))
    assert written_sum(file) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert subprocess.run(["sha256sum", "-c", "a b.sha256"], cwd=tmp_path, capture_output=True).returncode == 0
    (tmp_path / "a b.sha256").write_bytes(b"\xff")
    assert written_sum(file) == ""


def test_file_is_written_where_folders_cannot_be_held(tmp_path, monkeypatch):
    def refuse(descriptor, how):
        raise OSError(errno.EBADF, "as NFS says of a folder")

    monkeypatch.setattr("fcntl.flock", refuse)
    left = tmp_path / ".there.tltlab-left"
    left.mkdir()
    files.write_file(tmp_path / "there", "written")
    assert (tmp_path / "there").read_text() == "written"
    assert sorted(path.name for path in tmp_path.iterdir()) == [left.name, "there"]
