"""JSON files are there as a whole or not at all, whatever the disk says."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tltlab.errors import InputError
from tltlab.files import read_json, write_json


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond a few bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path):
    path = tmp_path / "new" / "a.json"
    write_json(path, {"rows": 1})
    with full_disk(), pytest.raises(InputError, match=r"cannot write .*a\.json: File too large"):
        write_json(path, {"rows": list(range(100))})
    assert read_json(path) == {"rows": 1}
    assert [file.name for file in path.parent.iterdir()] == ["a.json"]


def test_what_json_does_not_know_is_not_half_written(tmp_path: Path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"loss": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_others_may_read_a_file_as_they_may_any_that_we_write(tmp_path: Path):
    write_json(tmp_path / "a.json", [1])
    (tmp_path / "b.json").write_text(json.dumps([1]))
    assert (tmp_path / "a.json").stat().st_mode == (tmp_path / "b.json").stat().st_mode
