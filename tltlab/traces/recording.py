"""The folder in which a trace is recorded: whole chunks of rows, and which of them a run took back.

    manifest.json                  the manifest
    000000.arrow 000001.arrow ...  one chunk per flush, an Arrow IPC file of one row: a column for each table that got
                                   rows, which holds them as a list of structs
    cuts.json                      [{"chunks": 7, "rl_steps": 5}, ...]: of chunks before 7, rows from RL step 5 on are
                                   void

A chunk is one file because a durable file costs milliseconds, however small it is. Taking rows back writes one small
file and touches no row: it has happened as a whole or not at all.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc

from tltlab.errors import ConfigError, TraceError
from tltlab.files import new_folder, replace_durably, replaced_durably, write_durably

from .schema import MANIFEST_FILE, TABLES, Manifest

SUFFIX = ".recording"
CUTS_FILE = "cuts.json"


def recording_of(path: Path) -> Path:
    """The folder in which the trace `path` is recorded."""
    return path.with_name(path.name + SUFFIX)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One flush; its rows of RL step `below` and later are void, None: of none."""

    path: Path
    below: int | None

    @property
    def number(self) -> int:
        return int(self.path.stem)

    def load(self, name: str, columns: Sequence[str] | None = None) -> pa.Table | None:
        """Its valid rows of a table, None where there are none. Raises TraceError for a damaged file."""
        try:
            with pa.OSFile(str(self.path), "rb") as source:
                at = pa.ipc.open_file(source).schema.get_field_index(name)
                if at < 0:
                    return None
                only = pa.ipc.IpcReadOptions(included_fields=[at])
                rows = pa.ipc.open_file(source, options=only).read_all().column(0).combine_chunks()
            rows.validate(full=True)  # Arrow trusts a file, and a damaged one has no checksums
            table = pa.Table.from_struct_array(rows.flatten()).cast(TABLES[name])
        except (OSError, ValueError, pa.ArrowException) as error:
            raise TraceError(f"{self.path}: cannot be read (damaged?): {error}") from error
        if self.below is not None:
            table = table.filter(pc.less(table["rl_step"], self.below))
        if not len(table):
            return None
        return table if columns is None else table.select(columns)


def chunks_of(folder: Path) -> list[Chunk]:
    """The whole chunks of a recording, in the order of their flushes.

    Raises TraceError for damaged cuts, and for chunks that are folders, as earlier versions wrote them.
    """
    if any(chunk.is_dir() and chunk.name.isdigit() for chunk in folder.iterdir()):
        raise TraceError(f"{folder} was recorded by an earlier version of tltlab: repair it with that one")
    found = sorted(chunk for chunk in folder.glob("*.arrow") if chunk.stem.isdigit())
    cuts = _cuts(folder)
    limits = [[cut["rl_steps"] for cut in cuts if int(chunk.stem) < cut["chunks"]] for chunk in found]
    return [Chunk(chunk, min(limit, default=None)) for chunk, limit in zip(found, limits, strict=True)]


def tables_of(chunks: Iterable[Chunk], name: str) -> Iterator[pa.Table]:
    """The valid rows of one table, chunk by chunk."""
    for chunk in chunks:
        table = chunk.load(name)
        if table is not None:
            yield table


def readable(chunks: Iterable[Chunk], notes: list[str]) -> list[Chunk]:
    """The chunks that can be read; a note for each of the others."""
    good = []
    for chunk in chunks:
        try:
            for name in TABLES:
                chunk.load(name)
            good.append(chunk)
        except TraceError:
            notes.append(f"chunk {chunk.path.stem} could not be read and was dropped")
    return good


def write_chunk(folder: Path, number: int, tables: Mapping[str, pa.Table]) -> None:
    """Add a chunk: after a kill it is there as a whole or not at all. Raises OSError, and leaves nothing then."""
    final = folder / f"{number:06d}.arrow"
    columns = {name: _as_one_value(table) for name, table in tables.items()}
    schema = pa.schema([(name, column.type) for name, column in columns.items()])
    # Straight into the file: a chunk may be as large as all that is left of the memory.
    with replaced_durably(final) as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(pa.record_batch(columns))


def new_recording(folder: Path, manifest: Manifest, chunks: Iterable[Mapping[str, pa.Table]] = ()) -> None:
    """Make the folder of a recording, in one move and with these chunks in it. Raises ConfigError if it cannot."""
    try:
        with new_folder(folder, durable=True, replace=False) as new:
            write_durably(new / MANIFEST_FILE, manifest.to_json().encode())
            for number, tables in enumerate(chunks):
                write_chunk(new, number, tables)
    except OSError as error:
        raise ConfigError(f"cannot record to {folder}: {error.strerror}") from error


def cut(folder: Path, rl_steps: int) -> int:
    """Take back every row of RL step `rl_steps` and later, and half-written chunks; the number of the next chunk."""
    for left in folder.glob("*.tmp"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink()
    cuts = _cuts(folder)
    # Chunks may be gone that an earlier cut counted: what is recorded now is not for it to take.
    after: int = max([0, *(chunk.number + 1 for chunk in chunks_of(folder)), *(cut["chunks"] for cut in cuts)])
    entry = {"chunks": after, "rl_steps": rl_steps}
    if entry not in cuts:
        replace_durably(folder / CUTS_FILE, json.dumps([*cuts, entry]).encode())
    return after


def lock(folder: Path, what: str = "this recording") -> IO[bytes]:
    """Hold a folder while this process lives: the kernel lets go of it even after kill -9.

    Raises ConfigError where another process holds it; `what` it is.
    """
    file = open(folder / "lock", "ab")  # noqa: SIM115 - held until the recording closes
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.close()
        raise ConfigError(f"{folder}: {what} is in progress in another process") from error
    return file


def _cuts(folder: Path) -> list[dict[str, Any]]:
    file = folder / CUTS_FILE
    if not file.exists():
        return []
    try:
        cuts: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TraceError(f"{file}: cannot be read (damaged?): {error}") from error
    return cuts


def _as_one_value(table: pa.Table) -> pa.ListArray:
    """A table as one list of structs."""
    rows = table.combine_chunks().to_struct_array()
    rows = rows.combine_chunks() if isinstance(rows, pa.ChunkedArray) else rows
    return pa.ListArray.from_arrays(pa.array([0, len(rows)], pa.int32()), rows)
