"""The folder in which a trace is recorded: whole chunks of rows, which of them a run took back, and reading them.

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
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from weakref import WeakValueDictionary

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from tltlab.arrays import Flags, Ints
from tltlab.errors import ConfigError, TraceError
from tltlab.files import new_folder, replace_durably, replaced_durably, write_durably

from .schema import KEY, MANIFEST_FILE, REQUIRED_TABLES, TABLES, UNIQUE, Manifest
from .storage import StoredTable, fixed_bytes
from .validate import Part

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


class RecordedTable(StoredTable):
    """A table in the chunks of a recording, or the rows of some RL steps in it; only chunks that hold them are read.

    `pieces` are some rows of each chunk: their positions, ascending, and the RL step of each. Reading some RL steps
    takes the memory of their rows and of one chunk.
    """

    def __init__(self, name: str, folder: Path, pieces: Sequence[tuple[Chunk, Ints, Ints]], row_bytes: float):
        self.name, self.folder, self.row_bytes = name, folder, row_bytes
        self._pieces = [piece for piece in pieces if len(piece[1])]
        self.rl_steps, counts = np.unique(
            np.concatenate([np.arange(0), *(steps for _, _, steps in self._pieces)]), return_counts=True
        )
        self.rows_per_step = counts.astype(np.int64)

    def select(self, rl_steps: Sequence[int]) -> RecordedTable:
        here = [np.isin(steps, rl_steps) for _, _, steps in self._pieces]
        pieces = [(c, rows[at], steps[at]) for (c, rows, steps), at in zip(self._pieces, here, strict=True)]
        return RecordedTable(self.name, self.folder, pieces, self.row_bytes)

    def part(self, rl_steps: Sequence[int] | None) -> Part:
        tables, numbers, first = [TABLES[self.name].empty_table()], [np.arange(0)], 0
        for chunk, rows, steps in self._pieces:
            wanted = np.arange(len(rows)) if rl_steps is None else np.flatnonzero(np.isin(steps, rl_steps))
            if len(wanted):
                table = chunk.load(self.name)
                if table is None:
                    raise TraceError(f"{chunk.path}: its rows of {self.name} were taken back while they were read")
                # A copy, not a slice: a slice would keep the whole chunk.
                tables.append(table if len(wanted) == len(table) else table.take(pa.array(rows[wanted])))
                numbers.append(first + wanted)
            first += len(rows)
        where = f"{self.folder} ({self.name})"
        return Part(name=self.name, file=where, table=pa.concat_tables(tables), rows=np.concatenate(numbers))


def recorded_tables(folder: Path, notes: list[str], *, salvage: bool) -> dict[str, RecordedTable]:
    """The tables of a recording, of the rows that are there now; those of `REQUIRED_TABLES` may be without any.

    With `salvage` rows without which the trace is valid are left out, each kind with a note: responses that are not
    whole, rows recorded twice, chunks that cannot be read. Else a damaged chunk is a TraceError. One chunk at a time is
    in memory, and all keys.
    """
    chunks = chunks_of(folder)
    if salvage:
        chunks = readable(chunks, notes)
    pieces: dict[str, list[tuple[Chunk, Ints, Ints]]] = {name: [] for name in TABLES}
    keys: dict[str, list[pa.Table]] = {name: [] for name in UNIQUE}
    num_bytes = dict.fromkeys(TABLES, 0)
    for chunk in chunks:
        for name in TABLES:
            if (table := chunk.load(name)) is not None:
                pieces[name].append((chunk, np.arange(len(table)), table["rl_step"].to_numpy()))
                num_bytes[name] += table.nbytes
                if salvage and name in UNIQUE:
                    keys[name].append(table.select(UNIQUE[name]))
    masks = _salvaged({name: pa.concat_tables(found).to_pandas() for name, found in keys.items() if found}, notes)
    tables = {}
    for name, found in pieces.items():
        ends = np.cumsum([len(rows) for _, rows, _ in found]).tolist()
        row_bytes = max(num_bytes[name] / max([1, *ends]), fixed_bytes(name))
        if name in masks:
            each = np.split(masks[name], ends[:-1])
            found = [(c, rows[at], steps[at]) for (c, rows, steps), at in zip(found, each, strict=True)]
        if found or name in REQUIRED_TABLES:
            tables[name] = RecordedTable(name, folder, found, row_bytes)
    return tables


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


def _salvaged(keys: Mapping[str, pd.DataFrame], notes: list[str]) -> dict[str, Flags]:
    """Which rows of each table to keep, by their keys; what goes is noted."""
    keep: dict[str, Flags] = {}
    for name, rows in keys.items():
        keep[name] = ~rows.duplicated().to_numpy()
        _note_lost(notes, int((~keep[name]).sum()), f"rows of {name} recorded twice were dropped")
    for name, parent in (("outcomes", "workload"), ("tokens", "outcomes"), ("acceptance", "outcomes")):
        if name in keys:
            there = rows_in(keys[name], keys[parent][keep[parent]] if parent in keys else None)
            _note_lost(notes, int((keep[name] & ~there).sum()), f"rows of {name} without their {parent} were dropped")
            keep[name] &= there
    if "workload" in keys:
        ended = rows_in(keys["workload"], keys["outcomes"][keep["outcomes"]] if "outcomes" in keys else None)
        lost = keep["workload"] & ~ended
        steps = sorted(set(keys["workload"]["rl_step"][lost]))
        _note_lost(notes, int(lost.sum()), f"requests (rl_step {', '.join(map(str, steps))}) have no outcome")
        # A request that was under way is left out; an RL step of nothing else would be one without responses.
        keep["workload"] &= ended
    return keep


def rows_in(keys: pd.DataFrame, among: pd.DataFrame | None) -> Flags:
    """Which rows have the key of a response that is `among` others."""
    if among is None:
        return np.zeros(len(keys), bool)
    columns = list(KEY)
    here: Flags = pd.MultiIndex.from_frame(keys[columns]).isin(pd.MultiIndex.from_frame(among[columns]))
    return here


def _note_lost(notes: list[str], count: int, what: str) -> None:
    if count:
        notes.append(f"{count} {what}")


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
    for patience_s in (0.01, 0.05, 0.1, 0.0):
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError) as error:
            if not patience_s:
                file.close()
                raise ConfigError(f"{folder}: {what} is in progress in another process") from error
            # Somebody may only be asking whether it is held.
            time.sleep(patience_s)
    held = os.fstat(file.fileno())
    _held[os.getpid(), held.st_dev, held.st_ino] = file
    return file


_held: WeakValueDictionary[tuple[int, int, int], IO[bytes]] = WeakValueDictionary()
"""The lock files of this process. It loses its lock when it closes any of its handles of the file, so none is opened
just to ask."""


def in_progress(folder: Path) -> bool:
    """Whether some process, this one included, is writing the recording; nothing is changed, nobody is kept waiting."""
    try:
        there = os.stat(folder / "lock")
        ours = _held.get((os.getpid(), there.st_dev, there.st_ino))
        if ours is not None and not ours.closed:
            return True
        with open(folder / "lock", "rb") as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


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
