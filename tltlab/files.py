"""Files and folders that are there as a whole or not at all, what is written becoming `path` in one move; and locks.

Every file is whole after a kill; a durable one (`fsync`) also after the machine went down.
"""

import errno
import fcntl
import hashlib
import io
import json
import lzma
import os
import re
import shutil
import stat
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib import import_module
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, BinaryIO

from filelock import FileLock, Timeout

from .errors import ConfigError, InputError
from .records import Json

_SEAL = "sha256"
MOST_JSON_BYTES = 256 << 20
"""Most bytes of a JSON file, which is read as a whole."""
SUM_SUFFIX = ".sha256"
"""Suffix of the file with the SHA-256 of the one next to it."""
MOST_TIMES, UNPACKED_BYTES = 64, 64 << 20
"""Most bytes that a packed file may be unpacked to: this many times its own, and this many more."""
PACKED = (".gz", ".zst", ".zstd", ".bz2", ".xz", ".lz4", ".zip")
"""Endings of files that `open_unpacked` unpacks."""
_PACKINGS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2", b"\xfd7zXZ": "xz",
             b"\x04\x22\x4d\x18": "lz4"}  # fmt: skip
"""How a file is packed, by its first bytes."""
LOCK = "lock"
"""The file by which a folder is held."""
_PATIENCE_S = 0.2
"""How long a lock is waited for, seconds: somebody may only be asking whether it is held."""


def write_json(path: Path, value: Any) -> None:
    """Write JSON as `write_file` does. Raises ValueError for what JSON does not know."""
    write_file(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def parse_json(data: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError, also for what is nested deeper than Python's parser goes.

    A name twice in an object is a ValueError too, as it is in a table.
    """
    try:
        return json.loads(data, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    if len(fields := dict(pairs)) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{name!r} is there twice")
    return fields


def json_lines(path: Path) -> tuple[Json, ...]:
    """The objects of a JSON-lines file, none where there is no file; a torn last line is left out."""
    values = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        with suppress(ValueError):
            values.append(parse_json(line))
    return tuple(value for value in values if isinstance(value, dict))


def sealed(value: Mapping[str, Any]) -> Json:
    """A JSON object that `unsealed` takes for damaged once a bit of its content is another.

    Its "sha256" is the SHA-256 of the rest as ASCII JSON, keys sorted, without spaces.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return {**value, _SEAL: hashlib.sha256(text.encode()).hexdigest()}


def unsealed(data: str | bytes) -> Any:
    """As `parse_json`, for files of tltlab: a `sealed` object is checked and loses its seal. Raises ValueError."""
    value = parse_json(data)
    if isinstance(value, dict) and _SEAL in value and value.pop(_SEAL) != sealed(value)[_SEAL]:
        raise ValueError(f"its {_SEAL} is that of another content: damaged, or changed by hand (then remove it)")
    return value


def open_input(path: Path) -> BufferedReader:
    """A file to read from. Raises OSError, also for a pipe, whose writer would be waited for."""
    if stat.S_ISFIFO(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is a pipe, give a file", str(path))
    return open(path, "rb")


def open_unpacked(path: Path) -> BinaryIO:
    """Open a file, unpacked where its first bytes are those of gzip, zstd, bz2, xz, lz4 or zip. Raises OSError.

    Later reads raise OSError too. What is unpacked is read once, from its start.
    """
    file = open_input(path)
    head = file.peek(6)[:6]
    if head.startswith(b"PK\x03\x04"):
        return io.BufferedReader(_Unpacked(file, _zip_member(file)))
    how = next((how for sign, how in _PACKINGS.items() if head.startswith(sign)), None)
    if how is None:
        return file
    opener: Any = lzma.open if how == "xz" else partial(import_module("pyarrow").input_stream, compression=how)
    return io.BufferedReader(_Unpacked(file, opener(file)))


def _zip_member(file: IO[bytes]) -> IO[bytes]:
    try:
        archive = zipfile.ZipFile(file)
        names = [name for name in archive.namelist() if not name.endswith("/")]
        if len(names) == 1:
            return archive.open(names[0])
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
        raise OSError(f"it cannot be unpacked: {error}") from error
    raise OSError(
        f"it is an archive of {len(names)} files, as Excel, torch.save and numpy.savez write: save it as CSV, JSON or "
        "Parquet"
    )


class _Unpacked(io.RawIOBase):
    """Content of a packed file, unpacked as it is read; OSError where it is `MOST_TIMES` as long as the file."""

    def __init__(self, file: IO[bytes], stream: Any):
        self._stream, self._left = stream, MOST_TIMES * os.fstat(file.fileno()).st_size + UNPACKED_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(len(buffer))
        except OSError:
            raise
        except Exception as error:  # each way of packing has its own errors
            raise OSError(f"it cannot be unpacked: {error}") from error
        self._left -= len(data)
        if self._left < 0:
            raise OSError(errno.EFBIG, f"what is packed is more than {MOST_TIMES} times its size: unpack it first")
        buffer[: len(data)] = data
        return len(data)


def read_text(path: Path, most_bytes: int = MOST_JSON_BYTES, *, encoding: str = "utf-8", errors: str = "strict") -> str:
    """The text of a file, which is read as a whole. Raises OSError, also for more than `most_bytes`, and ValueError."""
    blocks, remaining = [], most_bytes
    with open_input(path) as file:
        # In blocks: `read(n)` would ask for the memory of n bytes first.
        while block := file.read(1 << 20):
            remaining -= len(block)
            if remaining < 0:
                raise OSError(errno.EFBIG, f"it has more than {most_bytes >> 20} MiB, the most that is read", str(path))
            blocks.append(block)
    return b"".join(blocks).decode(encoding, errors)


def read_json(path: Path) -> Any:
    """Read JSON as `unsealed`; a missing or broken file is a ConfigError that names it."""
    try:
        return unsealed(read_text(path, MOST_JSON_BYTES))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error


def read_object(path: Path) -> Json:
    """A JSON object, empty where there is none to read: a killed run may leave anything."""
    return dict(_read_as(dict, path))


def _read_as(kind: type, path: Path) -> Any:
    with suppress(ConfigError):
        if isinstance(value := read_json(path), kind):
            return value
    return kind()


def check_writable(path: Path | None, *endings: str) -> None:
    """Refuse a `path` that no file can be written to, or of none of these endings, before any work is done for it.

    Makes no folders. Raises ConfigError or InputError.
    """
    if path is None:
        return
    if path.is_dir() or (endings and path.suffix not in endings):
        ending = f" that ends in {', '.join(endings)}" if endings else ""
        raise ConfigError(f"cannot write {path}: name a file{ending}")
    try:
        with tempfile.TemporaryFile(dir=next(parent for parent in path.absolute().parents if parent.exists())):
            pass
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def write_file(path: Path, data: str | bytes) -> None:
    """Write a file in one move, parents made, text as UTF-8. Raises InputError where the disk refuses."""
    try:
        with new_file(Path(path)) as new:
            new.write_bytes(data.encode() if isinstance(data, str) else data)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Give a place to write to, which becomes `path` when the block ends well; parents are made. Raises OSError."""
    make_folder(path.parent, durable=False)
    with _beside(path) as folder:
        yield folder / path.name
        os.replace(folder / path.name, path)


@contextmanager
def new_folder(path: Path, *, durable: bool = False, replace: bool = True) -> Iterator[Path]:
    """Give an empty folder, which becomes `path` when the block ends well; else `path` stays unchanged.

    The parents of `path` are made. `durable` makes the names in both durable; what is in the files is for who writes
    them. Raises OSError, without `replace` also where there is something at `path`.
    """
    make_folder(path.parent, durable=durable)
    with _beside(path) as beside:
        new, old = beside / "new", beside / "old"
        new.mkdir()
        yield new
        if durable:
            fsync_folder(new)
        try:
            if replace and path.exists():
                os.replace(path, old)
            os.replace(new, path)
        except BaseException:
            if old.exists() and not path.exists():
                os.replace(old, path)
            raise
        if durable:
            # Before what it replaced is removed.
            fsync_folder(path.parent)


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A folder beside `path` that goes when the block ends; those of writers of `path` that were killed go first.

    A writer that lives holds its own, which the kernel lets go of when it is killed. Where folders cannot be held, as
    on NFS, nothing is swept. O(names in the parent folder).
    """
    prefix = f".{path.name}.tltlab-"
    for name in os.listdir(path.parent):
        if name.startswith(prefix):
            leftover = path.parent / name
            with suppress(OSError), _locked_folder(leftover, fcntl.LOCK_EX | fcntl.LOCK_NB):
                if (leftover / "old").exists() and not path.exists():
                    os.replace(leftover / "old", path)
                shutil.rmtree(leftover, ignore_errors=True)
    while True:
        with (
            tempfile.TemporaryDirectory(dir=path.parent, prefix=prefix, ignore_cleanup_errors=True) as folder,
            ExitStack() as stack,
        ):
            with suppress(OSError):
                stack.enter_context(_locked_folder(Path(folder), fcntl.LOCK_EX))
            # Before it was held another writer may have taken it for one that was left.
            if os.path.exists(folder):
                yield Path(folder)
                return


@contextmanager
def _locked_folder(folder: Path, how: int) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


class Hashing:
    """A binary file to write to that knows the SHA-256 of what was written, as `hexdigest`; else it is `file`.

    For what is written front to back: seeking would make it another file than the one hashed.
    """

    def __init__(self, file: IO[bytes]):
        self._file = file
        self._sum = hashlib.sha256()
        self.hexdigest = self._sum.hexdigest

    def write(self, data: Any) -> int:
        self._sum.update(data)
        return self._file.write(data)

    def seekable(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def replace_durably(path: Path, data: bytes | memoryview) -> None:
    """Write a file in one move and wait until it is on the disk. Raises OSError.

    It is written as `path` with the ending `.tmp`, which a kill may leave behind.
    """
    new = path.with_suffix(".tmp")
    try:
        write_durably(new, data)
        os.replace(new, path)
        fsync_folder(path.parent)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def write_durably(path: Path, data: bytes | memoryview) -> None:
    """Write a file and wait until it is on the disk; a kill may leave half of it."""
    path.write_bytes(data)
    fsync_file(path)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, which is read in blocks. Raises OSError."""
    with open_input(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sum(path: Path, sha256: str) -> None:
    """Write the SHA-256 of a file next to it, durably and in the format of sha256sum."""
    write_durably(path.with_name(path.name + SUM_SUFFIX), f"{sha256}  {path.name}\n".encode())


def written_sum(path: Path) -> str | None:
    """The SHA-256 that `write_sum` wrote: None where there is none, "" where that is damaged. Raises OSError."""
    if not (beside := path.with_name(path.name + SUM_SUFFIX)).is_file():
        return None
    sha256, _, name = beside.read_text(encoding="utf-8", errors="replace").partition("  ")
    return sha256 if name == f"{path.name}\n" else ""


def make_folder(path: Path, *, durable: bool = True) -> None:
    """Make a folder, and the parents that it lacks, where it is not there yet. Raises OSError."""
    if not path.is_dir():
        make_folder(path.parent, durable=durable)
        path.mkdir(exist_ok=True)
        if durable:
            fsync_folder(path.parent)


def fsync_file(path: Path) -> None:
    """Wait until a file is on the disk; of a folder, the names in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


fsync_folder = fsync_file


def fsync_tree(path: Path) -> None:
    """Wait until a file, or a folder with all that is in it, is on the disk; links are left out."""
    if path.is_symlink():
        return
    for item in path.iterdir() if path.is_dir() else ():
        fsync_tree(item)
    fsync_file(path)


def lock(folder: Path, activity: str = "this recording") -> ExitStack:
    """Hold a folder until this process closes what is returned, or ends: the kernel lets go of it even after kill -9.

    Raises ConfigError where somebody holds it for `activity`, and where it cannot be written to.
    """
    held = ExitStack()
    try:
        held.enter_context(FileLock(folder / LOCK, timeout=_PATIENCE_S, poll_interval=0.01, thread_local=False))
    except Timeout as error:
        raise ConfigError(f"{folder}: {activity} is in progress in another process") from error
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from error
    return held


def in_progress(folder: Path) -> bool:
    """Return whether a process, this one included, is writing the recording; changes nothing and blocks no process."""
    try:
        # `FileLock` would ask for the right to write, and make the file where there is none.
        with open(folder / LOCK, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
    return False


SCRATCH = re.compile(r"tltlab-\d+-\w{8}")
ELSEWHERE = "registered_leftovers.json"
_OF_RUNS = re.compile(r"session_\d{4}-\d\d-\d\d_[\d_-]+|(psm_|vllm_dist_|sem\.mp-)[\w:\[\]-]+")
"""Names of what runs leave elsewhere: Ray's sessions, shared memory of vLLM's processes, semaphores of Python's."""
SHARED = Path("/dev/shm")


def leftovers() -> list[Path]:
    """Paths that ended processes of this user left in the temporary folder, and elsewhere."""
    paths = []
    for folder in sorted(Path(tempfile.gettempdir()).glob("tltlab-*-*")):
        with suppress(OSError):
            status = folder.lstat()
            ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and (folder / LOCK).is_file()
            if ours and SCRATCH.fullmatch(folder.name) and not in_progress(folder):
                paths += [*filter(is_leftover, registered_leftovers(folder)), folder]
    return paths


def registered_leftovers(folder: Path) -> list[Path]:
    """Paths registered with `leaves` outside the scratch folder of a run."""
    return [Path(path) for path in _read_as(list, folder / ELSEWHERE) if isinstance(path, str)]


def is_leftover(path: Path) -> bool:
    """Return whether the path exists and may be left by a run: by its name, in its place, of this user."""
    placed = path.parent == SHARED or path.parent.name == "ray"
    try:
        return placed and bool(_OF_RUNS.fullmatch(path.name)) and path.lstat().st_uid == os.getuid()
    except OSError:
        return False


@contextmanager
def found_in(folders: Iterable[str | Path]) -> Iterator[None]:
    """Within, modules are looked up in these folders too, after all other places; what was imported stays."""
    added = [str(folder) for folder in folders if str(folder) not in sys.path]
    sys.path += added
    try:
        yield
    finally:
        for folder in added:
            sys.path.remove(folder)
