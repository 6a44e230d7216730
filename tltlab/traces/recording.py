"""The folder in which a trace is recorded: whole chunks of rows, which of them a run took back, and reading them.

    manifest.json   the manifest
    NNNNNN-S.arrow  one chunk per flush, numbered from 0 on, an Arrow IPC file of one row: a column for each table that
                    got rows, which holds them as a list of structs; S are the first 16 hex digits of its SHA-256
    cuts.json       {"cuts": [{"chunks": 7, "rl_steps": 5}, ...]}: of chunks before 7, rows from RL step 5 on are void

A chunk is one file because a durable file costs milliseconds, however small it is; so its sum is part of its name.
Taking rows back writes one small file and touches no row: it has happened as a whole or not at all. Both JSON files are
sealed (`files.sealed`).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from tltlab.arrays import Flags, Ints
from tltlab.errors import ConfigError, TraceError
from tltlab.files import (
    new_folder,
    read_text,
    replace_durably,
    replaced_durably,
    sealed,
    sha256_of,
    unsealed,
    write_durably,
)
from tltlab.records import frozen

from .schema import KEY, MANIFEST_FILE, REQUIRED_TABLES, SUFFIX, TABLES, UNIQUE, Manifest
from .storage import StoredTable, fixed_bytes
from .validate import TablePart

CUTS_FILE = "cuts.json"
_CHUNK = re.compile(r"(\d+)-[0-9a-f]{16}\.arrow")
_WITHOUT_SUM = re.compile(r"\d+(\.arrow)?")


def recording_of(path: Path) -> Path:
    """The folder in which the trace `path` is recorded."""
    if path.name in ("", ".."):
        path = path.resolve()
        if not path.name:
            return path / SUFFIX
    return path.with_name(path.name + SUFFIX)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One flush; its rows of RL step `below` and later are void, None: of none."""

    path: Path
    below: int | None

    @property
    def number(self) -> int:
        return int(self.path.stem.partition("-")[0])

    def check(self) -> None:
        """Raise TraceError unless the digest of the file begins as its name does."""
        try:
            if not sha256_of(self.path).startswith(self.path.stem.partition("-")[2]):
                raise TraceError(f"{self.path}: not what was written (damaged)")
        except OSError as error:
            raise TraceError(f"{self.path}: cannot be read (damaged?): {error}") from error

    def tables(self, names: Iterable[str] = TABLES) -> dict[str, pa.Table]:
        """Its valid rows of some tables, of those that it has rows of. Raises TraceError for a damaged file."""
        tables = {}
        try:
            with pa.OSFile(str(self.path), "rb") as source, pa.ipc.open_file(source) as file:
                # The chunk's one row has each table's rows as a list.
                value = file.read_all()
            for name in names:
                if name in value.column_names:
                    rows = value[name].combine_chunks()
                    rows.validate(full=True)
                    if not pa.types.is_list(rows.type) or not pa.types.is_struct(rows.type.value_type):
                        raise ValueError(f"its column {name} has type {rows.type}, which holds no rows")
                    tables[name] = pa.Table.from_struct_array(rows.flatten()).cast(TABLES[name])
        except (OSError, ValueError, pa.ArrowException) as error:
            raise TraceError(f"{self.path}: cannot be read (damaged?): {error}") from error
        if self.below is not None:
            tables = {name: table.filter(pc.less(table["rl_step"], self.below)) for name, table in tables.items()}
        return {name: table for name, table in tables.items() if len(table)}


def chunks_of(folder: Path) -> list[Chunk]:
    """The whole chunks of a recording, in the order of their flushes.

    Raises TraceError for damaged cuts, and for chunks without a sum in their name, as earlier versions wrote them.
    """
    if any(_WITHOUT_SUM.fullmatch(chunk.name) for chunk in folder.iterdir()):
        raise TraceError(f"{folder} was recorded by an earlier version of tltlab: repair it with that one")
    cuts = _cuts(folder)
    files = sorted((int(name[1]), chunk) for chunk in folder.glob("*.arrow") if (name := _CHUNK.fullmatch(chunk.name)))
    limits = [[cut["rl_steps"] for cut in cuts if number < cut["chunks"]] for number, _ in files]
    return [Chunk(chunk, min(limit, default=None)) for (_, chunk), limit in zip(files, limits, strict=True)]


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
        self._first_rows = np.cumsum([0, *(len(rows) for _, rows, _ in self._pieces)])
        self._lowest = np.array([steps.min() for _, _, steps in self._pieces])
        self._highest = np.array([steps.max() for _, _, steps in self._pieces])

    def _pieces_with(self, rl_steps: Sequence[int] | Ints) -> Iterator[tuple[int, Chunk, Ints, Ints, Ints]]:
        """Pieces with rows of these RL steps: number, chunk, rows and RL steps, and where among them those are.

        Only pieces between the first and the last RL step are looked through.
        """
        if not len(rl_steps) or not self._pieces:
            return
        near = (self._lowest <= np.max(rl_steps)) & (self._highest >= np.min(rl_steps))
        for number in np.flatnonzero(near).tolist():
            chunk, rows, steps = self._pieces[number]
            if len(at := np.flatnonzero(np.isin(steps, rl_steps))):
                yield number, chunk, rows, steps, at

    def select(self, rl_steps: Sequence[int]) -> RecordedTable:
        pieces = [(chunk, rows[at], steps[at]) for _, chunk, rows, steps, at in self._pieces_with(rl_steps)]
        return RecordedTable(self.name, self.folder, pieces, self.row_bytes)

    def part(self, rl_steps: Sequence[int] | None) -> TablePart:
        tables, numbers = [TABLES[self.name].empty_table()], [np.arange(0)]
        for number, chunk, rows, _, at in self._pieces_with(self.rl_steps if rl_steps is None else rl_steps):
            if (table := chunk.tables([self.name]).get(self.name)) is None:
                raise TraceError(f"{chunk.path}: its rows of {self.name} were taken back while they were read")
            # A copy, not a slice: a slice would keep the whole chunk.
            tables.append(table if len(at) == len(table) else table.take(pa.array(rows[at])))
            numbers.append(self._first_rows[number] + at)
        place = f"{self.folder} ({self.name})"
        return TablePart(name=self.name, file=place, table=pa.concat_tables(tables), rows=np.concatenate(numbers))


def recorded_tables(folder: Path, notes: list[str], *, salvage: bool) -> dict[str, RecordedTable]:
    """The tables of a recording, of the rows that are there now; those of `REQUIRED_TABLES` may be without any.

    With `salvage` rows without which the trace is valid are left out, each kind with a note: responses that are not
    whole, rows recorded twice, chunks that cannot be read. Else a damaged chunk is a TraceError. One chunk at a time is
    in memory, and all keys.
    """
    pieces: dict[str, list[tuple[Chunk, Ints, Ints]]] = {name: [] for name in TABLES}
    keys: dict[str, list[pa.Table]] = {name: [] for name in UNIQUE}
    num_bytes = dict.fromkeys(TABLES, 0)
    for chunk, chunk_tables in read_chunks(chunks_of(folder), notes if salvage else None):
        for name, table in chunk_tables.items():
            pieces[name].append((chunk, np.arange(len(table)), table["rl_step"].to_numpy()))
            num_bytes[name] += table.nbytes
            if salvage and name in UNIQUE:
                keys[name].append(table.select(UNIQUE[name]))
    masks = _salvage_masks({name: pa.concat_tables(parts).to_pandas() for name, parts in keys.items() if parts}, notes)
    tables = {}
    for name, of_table in pieces.items():
        ends = np.cumsum([len(rows) for _, rows, _ in of_table]).tolist()
        row_bytes = max(num_bytes[name] / max([1, *ends]), fixed_bytes(name))
        if name in masks:
            split = np.split(masks[name], ends[:-1])
            of_table = [(c, rows[at], steps[at]) for (c, rows, steps), at in zip(of_table, split, strict=True)]
        if of_table or name in REQUIRED_TABLES:
            tables[name] = RecordedTable(name, folder, of_table, row_bytes)
    return tables


def read_chunks(chunks: Iterable[Chunk], notes: list[str] | None) -> Iterator[tuple[Chunk, dict[str, pa.Table]]]:
    """Each chunk with its tables. A chunk that cannot be read is left out with a note; without `notes` TraceError."""
    for chunk in chunks:
        try:
            chunk.check()
            tables = chunk.tables()
        except TraceError:
            if notes is None:
                raise
            notes.append(f"chunk {chunk.number:06d} could not be read and was dropped")
        else:
            yield chunk, tables


def _salvage_masks(keys: Mapping[str, pd.DataFrame], notes: list[str]) -> dict[str, Flags]:
    """Which rows of each table to keep, by their keys; what goes is noted."""
    keep: dict[str, Flags] = {}
    for name, rows in keys.items():
        keep[name] = ~rows.duplicated().to_numpy()
        if repeats := int((~keep[name]).sum()):
            notes.append(f"{repeats} rows of {name} recorded twice were dropped")
    for name, parent in (("outcomes", "workload"), ("tokens", "outcomes"), ("acceptance", "outcomes")):
        if name in keys:
            with_parent = rows_in(keys[name], keys[parent][keep[parent]] if parent in keys else None)
            if orphans := int((keep[name] & ~with_parent).sum()):
                notes.append(f"{orphans} rows of {name} without their {parent} were dropped")
            keep[name] &= with_parent
    if "workload" in keys:
        with_outcome = rows_in(keys["workload"], keys["outcomes"][keep["outcomes"]] if "outcomes" in keys else None)
        if (lost := keep["workload"] & ~with_outcome).any():
            steps = ", ".join(map(str, sorted(set(keys["workload"]["rl_step"][lost]))))
            notes.append(f"{int(lost.sum())} requests (rl_step {steps}) have no outcome")
        # A request that was under way is left out; an RL step of nothing else would be one without responses.
        keep["workload"] &= with_outcome
    return keep


def rows_in(keys: pd.DataFrame, among: pd.DataFrame | None) -> Flags:
    """Which rows have the key of a response that is `among` others."""
    if among is None:
        return np.zeros(len(keys), bool)
    columns = list(KEY)
    return np.asarray(pd.MultiIndex.from_frame(keys[columns]).isin(pd.MultiIndex.from_frame(among[columns])))


@frozen
class EngineTrace:
    """Recording of one of several engines of a run: its tables, and `place`, its location for messages."""

    place: str
    manifest: Manifest
    tables: Mapping[str, pa.Table]

    @property
    def created_s(self) -> float | None:
        """When the recording began, in seconds since 1970."""
        return None if self.manifest.created is None else datetime.fromisoformat(self.manifest.created).timestamp()

    @property
    def times(self) -> dict[int, tuple[float, float]]:
        """Start and end of each RL step in seconds since 1970, for RL steps in `steps`."""
        if self.created_s is None or "steps" not in self.tables:
            return {}
        starts = self.tables["steps"].select(["rl_step", "t_start"]).to_pandas().set_index("rl_step")["t_start"]
        lasted = self.tables["outcomes"].select(["rl_step", "t_finish"]).to_pandas().groupby("rl_step")["t_finish"]
        steps = pd.DataFrame({"start": starts, "lasted": lasted.max()}).dropna(subset="start").fillna(0.0)
        starts_s = self.created_s + steps["start"]
        return dict(zip(steps.index.tolist(), zip(starts_s, starts_s + steps["lasted"], strict=True), strict=True))

    def overlaps(self, other: EngineTrace) -> bool:
        """Return True if both were recorded at once, by engines of the same kind."""
        same = ("model", "engine", "kind", "source")
        if any(getattr(self.manifest, name) != getattr(other.manifest, name) for name in same):
            return False
        ends = [max((end for _, end in part.times.values()), default=-np.inf) for part in (self, other)]
        return (other.created_s or 0.0) <= ends[0] and (self.created_s or 0.0) <= ends[1]


def merge_recordings(parts: Sequence[EngineTrace]) -> tuple[Manifest, dict[str, pd.DataFrame]]:
    """One trace of what the engines of a run recorded each for itself: workers 0 to N - 1, in this order.

    RL steps are taken for one that have one number, or, where numbers do not go together, that overlap in time; times
    then count from its earliest start. A prompt's samples are numbered on where several parts have the same ones.
    Raises TraceError for traces of other models, and for tables that only a trainer's trace has.
    """
    first = parts[0].manifest
    for part in parts:
        if part.manifest.model != first.model:
            raise TraceError(f"{part.place} is of {part.manifest.model}, {parts[0].place} of {first.model}: two runs")
        if foreign := {"spans", "spot_training"} & {name for name, table in part.tables.items() if len(table)}:
            raise TraceError(f"{part.place} has {min(foreign)}, so it is a whole run's, not one engine's")
    places, (workers, num_workers) = _places(parts), _workers(parts)
    tables: dict[str, pd.DataFrame] = {}
    for name in TABLES:
        frames = [part.tables[name].to_pandas().assign(part=n) for n, part in enumerate(parts) if name in part.tables]
        if frames:
            tables[name] = _placed(name, pd.concat(frames, ignore_index=True), places, workers)
    keys = tables["workload"]
    twice = keys.duplicated(["whole", "prompt_id", "sample", "turn"], keep=False)
    ambiguous = keys[twice.groupby([keys["whole"], keys["prompt_id"]]).transform("any")]
    samples = _offsets(ambiguous, "sample", ["whole", "prompt_id"], ["part", "rl_step"])
    for name, rows in tables.items():
        if "sample" in rows:
            _count_on(rows, "sample", samples)
        if "iteration" in rows:
            _count_on(rows, "iteration", _offsets(rows, "iteration", ["part", "whole"], ["rl_step"]))
        tables[name] = rows.assign(rl_step=rows["whole"])
    steps = tables.pop("steps", None)
    if steps is not None and all("steps" in part.tables for part in parts):
        # One row for each RL step of the whole, since the first recording began.
        created_s = np.array([part.created_s or 0.0 for part in parts])
        starts_s = steps["t_start"] + created_s[steps["part"]] - created_s.min()
        steps = steps[steps["whole"].isin(keys["whole"])].assign(t_start=starts_s, rollout_s=None)
        tables["steps"] = steps.sort_values(["whole", "t_start"], kind="stable").drop_duplicates("whole")
    notes = [note for note in dict.fromkeys(part.manifest.notes for part in parts) if note]
    notes.append(f"put together from {', '.join(Path(part.place).name for part in parts)}: workers in this order")
    hardware = ", ".join(dict.fromkeys(part.manifest.hardware for part in parts if part.manifest.hardware))
    update = {"num_workers": num_workers, "num_rl_steps": None, "notes": "; ".join(notes), "hardware": hardware or None}
    drafters = {name: traits for part in parts for name, traits in part.manifest.drafters.items()}
    named = [part.manifest.without_iterations for part in parts]
    without = None
    if all(steps is not None for steps in named):
        # RL steps without iterations in any part.
        there = set(tables["iterations"]["whole"]) if "iterations" in tables else set()
        moved = {places.get((at, step), (step, 0.0))[0] for at, steps in enumerate(named) for step in steps or ()}
        without = tuple(sorted(moved - there))
    return first.model_copy(update=update | {"drafters": drafters, "without_iterations": without}), tables


_Places = dict[tuple[int, int], tuple[int, float]]
"""For a part's RL step: the RL step of the whole, and the seconds by which the part began later."""


def _places(parts: Sequence[EngineTrace]) -> _Places:
    numbers = [(at, step) for at, part in enumerate(parts) for step in np.unique(part.tables["workload"]["rl_step"])]
    times = {(at, step): span for at, part in enumerate(parts) for step, span in part.times.items()}
    if any(piece not in times for piece in numbers):
        return {(at, step): (step, 0.0) for at, step in numbers}
    overlaps: list[list[tuple[int, int]]] = []
    end_s = -np.inf
    for piece in sorted(numbers, key=lambda piece: times[piece]):
        if times[piece][0] > end_s:
            overlaps.append([])
        overlaps[-1].append(piece)
        end_s = max(end_s, times[piece][1])
    numbers_agree = all(len({step for _, step in pieces}) == 1 for pieces in overlaps)
    if numbers_agree or _overlap_in_turn(parts, overlaps):
        by_number: dict[int, list[tuple[int, int]]] = {}
        for at, step in numbers:
            by_number.setdefault(step, []).append((at, step))
        groups = sorted(by_number.items())
    else:
        groups = list(enumerate(overlaps))
    starts = {number: min(times[piece][0] for piece in pieces) for number, pieces in groups}
    return {piece: (number, times[piece][0] - starts[number]) for number, pieces in groups for piece in pieces}


def _overlap_in_turn(parts: Sequence[EngineTrace], overlaps: Sequence[Sequence[tuple[int, int]]]) -> bool:
    """Return True if RL steps of new weights begin before those of old ones end, so that time does not separate any."""
    versions = [
        dict(zip(*(part.tables["steps"][name].to_pylist() for name in ("rl_step", "policy_version")), strict=True))
        for part in parts
    ]
    return any(
        len({versions[at][step] for at, step in pieces if at == engine}) > 1
        for pieces in overlaps
        for engine in {at for at, _ in pieces}
    )


def _workers(parts: Sequence[EngineTrace]) -> tuple[dict[tuple[int, int | None], int], int]:
    """The number of each part's workers in the whole, None for one that no response names, and how many there are."""
    numbers: dict[tuple[int, int | None], int] = {}
    num_workers = 0
    for at, part in enumerate(parts):
        own = sorted(pc.unique(part.tables["outcomes"]["worker"].drop_null()).to_pylist())
        numbers |= {(at, worker): num_workers + n for n, worker in enumerate(own)} | {(at, None): num_workers}
        num_workers += max(1, len(own))
    return numbers, num_workers


def _placed(
    name: str, rows: pd.DataFrame, places: _Places, workers: Mapping[tuple[int, int | None], int]
) -> pd.DataFrame:
    """Rows of all parts with the RL step of the whole as `whole`, and times and workers of the whole."""
    # Iterations may be of RL steps of which no response is whole.
    pieces = zip(rows["part"].tolist(), rows["rl_step"].tolist(), strict=True)
    place = [places.get(piece, (piece[1], 0.0)) for piece in pieces]
    rows["whole"], later_s = np.array([p[0] for p in place], np.int64), np.array([p[1] for p in place])
    for time_s in ("t_submit", "t_first_token", "t_finish", "t_start") if name != "steps" else ():
        if time_s in rows:
            rows[time_s] += later_s
    if "worker" in rows:
        numbers = zip(rows["part"].tolist(), rows["worker"].tolist(), strict=True)
        rows["worker"] = [None if pd.isna(w) else workers.get((part, w), workers[part, None]) for part, w in numbers]
    return rows


def _offsets(rows: pd.DataFrame, column: str, group: list[str], pieces: list[str]) -> pd.Series[int]:
    """By how much the numbers in each piece of a group count on from those of the pieces before it."""
    sizes = rows.groupby([*group, *pieces])[column].max() + 1
    return sizes.groupby(group).cumsum() - sizes


def _count_on(rows: pd.DataFrame, column: str, offsets: pd.Series[int]) -> None:
    at = pd.MultiIndex.from_frame(rows[list(offsets.index.names)])
    rows[column] += offsets.reindex(at).fillna(0).to_numpy(np.int64)


def write_chunk(folder: Path, number: int, tables: Mapping[str, pa.Table]) -> None:
    """Add a chunk: after a kill it is there as a whole or not at all. Raises OSError, and leaves nothing then."""
    earlier = [*folder.glob(f"{number:06d}*.arrow")]
    columns = {name: _as_one_value(table) for name, table in tables.items()}
    schema = pa.schema([(name, column.type) for name, column in columns.items()])
    plain = folder / f"{number:06d}.arrow"
    # Straight into the file: a chunk may be as large as all that is left of the memory.
    with replaced_durably(plain, partial(_chunk_name, number)) as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(pa.record_batch(columns))
    # A chunk that was written, but could not be made durable, is written again with other rows.
    for chunk in earlier:
        if chunk.name != _chunk_name(number, file.hexdigest()):
            chunk.unlink()


def _chunk_name(number: int, sha256: str) -> str:
    return f"{number:06d}-{sha256[:16]}.arrow"


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
    for leftover in folder.glob("*.tmp"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink()
    cuts = _cuts(folder)
    # Chunks may be gone that an earlier cut counted: what is recorded now is not for it to take.
    after: int = max([0, *(chunk.number + 1 for chunk in chunks_of(folder)), *(cut["chunks"] for cut in cuts)])
    entry = {"chunks": after, "rl_steps": rl_steps}
    if entry not in cuts:
        replace_durably(folder / CUTS_FILE, json.dumps(sealed({"cuts": [*cuts, entry]})).encode())
    return after


def _cuts(folder: Path) -> list[dict[str, Any]]:
    file = folder / CUTS_FILE
    if not file.exists():
        return []
    try:
        cuts: list[dict[str, Any]] = unsealed(read_text(file))["cuts"]
        if not all(isinstance(cut["chunks"], int) and isinstance(cut["rl_steps"], int) for cut in cuts):
            raise ValueError("its numbers are none")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{file}: cannot be read (damaged?): {error}") from error
    return cuts


def _as_one_value(table: pa.Table) -> pa.ListArray:
    """A table as one list of structs."""
    rows = pa.concat_arrays([batch.to_struct_array() for batch in table.combine_chunks().to_batches()])
    return pa.ListArray.from_arrays(pa.array([0, len(rows)], pa.int32()), rows)
