"""Lists in records, of tokens, of responses or of messages, and records spread to one response each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd

from tltlab.config import shown
from tltlab.errors import TraceError

from .fields import is_list, is_message, is_missing, kind_of, number, plain
from .length_table import RECORD
from .rows import BY_OPTION, Reading, Records, flat

RUN = "#run"
"""Column of the number of the record that a length was in a list of, where it has no RL step."""
_CHUNK = 2048
_SAMPLED = 256
"""Records by which a list's meaning is decided."""
_RESPONSE_KINDS = {"response_sizes", "response_tokens", "sizes", "tokens", "response_ids", "all_ids", "response_text",
                   "conversation"}  # fmt: skip
"""Kinds of fields that are lists of responses where they hold lists; log-probs may be pairs."""
_OF_TEXT = {"response_text", "conversation"}
_SHARED = {"rl_step", "epoch", "prompt_id", "row_id", "prompt_text", "prompt_ids", "prompt_sizes", "prompt_tokens",
           "cap", "worker"}  # fmt: skip
"""Kinds of fields that hold for all responses of a record."""
_NAMED = {"rl_step", "epoch", "prompt_id", "prompt_text", "prompt_ids"}
"""Kinds of fields that name the RL step or the prompt of a record's responses."""


class ListReader:
    """Reader of records, chunk by chunk, that collects the columns used and ignored, and assumptions."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.used: dict[str, str] = {}
        self.columns: dict[str, None] = {}
        self.counts: Counter[str] = Counter()
        self.notes: dict[str, None] = {}
        self._lists: dict[str, str] = {}
        self._seen: set[str] = set()
        self._scales: dict[str, float | None] = {}
        self._record = 0

    @property
    def ignored(self) -> list[str]:
        """Columns with a name that were not read."""
        return [name for name in self.columns if name and name not in self._seen]

    def use(self, name: str, column: str) -> None:
        self.used.setdefault(name, column)
        self._seen.add(column)

    def described(self) -> str:
        """Note on the columns that were read and those that were not."""
        names = ", ".join(name if name == column else f"{name} from {column}" for name, column in self.used.items())
        return f"columns read: {names}" + (f" (not read: {', '.join(self.ignored)})" if self.ignored else "")

    def assumed(self) -> list[str]:
        """Notes on what was assumed."""
        notes = list(self.notes)
        if self.counts["text"]:
            notes.append(self.reading.tokens.note)
        for name, count in self.counts.items():
            column, _, number = name.partition("\n")
            if number and count:
                notes.append(f"{count} responses have another number of {column} than {number}, which counts")
            elif name.startswith("block ") and count:
                notes.append(f"{name.removeprefix('block ')} in {count} messages is not counted")
        if self.counts["turns"]:
            notes.append(
                f"{self.counts['turns']} responses have several turns, whose tokens (and prompts, where a count adds "
                "them up) are those of one response: text of tools and users is not counted as generated"
            )
        if self.counts["empty"]:
            notes.append(f"{self.counts['empty']} records have an empty list of responses")
        if self.counts["aborted"]:
            notes.append(f"{self.counts['aborted']} requests failed or made no token and count as aborted")
        return notes

    def _given(self, records: Records, name: str) -> str:
        """The column that an option names, as it is written in the file."""
        own = list(map(str, records.frame.columns))
        column = name if name in own else next((c for c in own if plain(c) == plain(name)), None)
        if column is None:
            place = records.file if records.is_table else records.place(0)
            raise TraceError(f"{place}: no column {name!r}; there are: {', '.join(own)}")
        return column

    def chunks(
        self, rows: Iterator[tuple[str, Mapping[str, Any]]], file: str, rl_step: int | None
    ) -> Iterator[Records]:
        """Flat records, those with lists of responses spread; `rows` are places and fields."""
        flats = ((place, flat(fields)) for place, fields in rows)
        while chunk := list(islice(flats, _CHUNK)):
            for _ in range(3):
                self._learn(file, chunk)
                if not (spread := self._spread(file, chunk)):
                    break
                chunk = spread
            frame = pd.DataFrame([fields for _, fields in chunk], index=[place for place, _ in chunk], dtype=object)
            yield Records(file=file, frame=frame, rl_step=rl_step)

    def _learn(self, file: str, chunk: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Decide what the lists in each column are, by the first records that have the column."""
        cells: dict[str, list[tuple[str, dict[str, Any], Any]]] = {}
        for place, fields in chunk[:_SAMPLED]:
            for name, value in fields.items():
                if is_list(value) and len(value):
                    cells.setdefault(name, []).append((place, fields, value))
        for name, found in cells.items():
            kinds = kind_of(name) | (frozenset({"tokens"}) if name == self.reading.column else frozenset())
            first = next((item for item in found[0][2] if item is not None), None)
            if isinstance(first, Mapping):
                others = "responses" if "response_text" in kinds else ""
                self._lists[name] = "messages" if is_message(first) else others
            elif first is not None and is_list(first):
                is_batch = kinds & _RESPONSE_KINDS and (
                    kinds & _OF_TEXT or all(isinstance(item, int) for item in first)
                )
                self._lists[name] = "responses" if is_batch else ""
            elif isinstance(first, str):
                is_text = not kinds & {"tokens", "response_tokens"}
                self._lists[name] = "responses" if "response_text" in kinds else "" if is_text else "ids"
            elif name not in self._lists or self._lists[name] not in ("ids", "lengths"):
                self._lists[name] = self._numbers_in_lists(file, name, kinds, found)

    def _numbers_in_lists(
        self, file: str, name: str, kinds: frozenset[str], found: Sequence[tuple[str, dict[str, Any], Any]]
    ) -> str:
        """Return "ids" for lists with an entry for each token, "lengths" for one for each response, else ""."""
        if kinds & {"response_ids", "all_ids", "mask", "logprobs", "prompt_ids", "response_text", "prompt_text"}:
            return "ids"
        sizes, tokens = bool(kinds & {"response_sizes", "sizes"}), bool(kinds & {"response_tokens", "tokens"})
        if not sizes and not tokens:
            return "ids" if kinds & {"prompt_tokens"} and not self._has_lengths(found[0][1]) else ""
        if self.reading.lists is not None:
            return self.reading.lists
        evidence = next(filter(None, (self._evidence(name, fields, values) for _, fields, values in found)), None)
        if evidence is None and tokens:
            evidence = self._evidence_of_values([cell for _, _, cell in found])
        if tokens and evidence:
            self.notes[f"{name}: token ids, which are counted (a record {evidence})"] = None
            return "ids"
        if sizes and not evidence:
            return "lengths"
        place, _, cell = found[0]
        reason = f": a record {evidence}" if evidence else ""
        raise TraceError(
            f"{file}, {place}, column {name}: {shown(list(cell)[:6])[:-1]}, ...] may be {len(cell)} lengths or the ids "
            f"of {len(cell)} tokens{reason}; choose one: {BY_OPTION.format('--lists lengths or --lists ids')}"
        )

    def _evidence_of_values(self, lists: Sequence[Sequence[Any]]) -> str | None:
        """Return the evidence in lists of numbers that they are token ids; None where there is none."""
        values = np.array([item for cell in lists for item in cell if isinstance(item, int | float)])
        varied = len({len(cell) for cell in lists}) > 1
        ends = {cell[-1] for cell in lists}
        cap = self.reading.max_response_tokens or 1 << 17
        if (values < 0).any():
            return "has numbers below 0"
        if (values > cap).any():
            return f"has numbers above {cap}"
        if varied and len(lists) > 3 and len(ends) == 1 and max(values) not in ends:
            return f"always ends in {ends.pop()}"
        return None

    def _has_lengths(self, fields: Mapping[str, Any]) -> bool:
        return any(is_list(v) and kind_of(n) & {"response_sizes", "sizes"} for n, v in fields.items())

    def _evidence(self, name: str, fields: Mapping[str, Any], values: Sequence[Any]) -> str | None:
        """Return the evidence that a record is one response, so that its list has an entry for each token."""
        for other, value in fields.items():
            if other == name or is_missing(value):
                continue
            kinds = kind_of(other)
            if is_list(value):
                if kinds & {"mask", "logprobs"} and len(value) and not is_list(value[0]):
                    return f"has one {other}"
            elif (
                kinds & {"finish_reason", "sample"}
                or (kinds & {"is_cut"} and isinstance(value, bool))
                or (kinds & {"response_text"} and isinstance(value, str))
                or (kinds & {"response_sizes"} and number(value) <= len(values))
            ):
                return f"has one {other}"
        return None

    def _spread(
        self, file: str, chunk: Sequence[tuple[str, dict[str, Any]]]
    ) -> list[tuple[str, dict[str, Any]]] | None:
        """Records with a list of responses as one record for each; None where there are none."""
        drivers = [name for name, what in self._lists.items() if what in ("responses", "lengths")]
        if not any(is_list(fields.get(name)) for name in drivers for _, fields in chunk):
            return None
        result: list[tuple[str, dict[str, Any]]] = []
        for place, fields in chunk:
            sizes = {name: len(fields[name]) for name in drivers if is_list(fields.get(name))}
            self._record += 1
            if not sizes:
                result.append((place, fields))
                continue
            if len(set(sizes.values())) > 1:
                described = ", ".join(f"{name} {size}" for name, size in sizes.items())
                raise TraceError(
                    f"{file}, {place}: lists of different sizes, which should have a response each: {described}"
                )
            size = next(iter(sizes.values()))
            self.counts["empty"] += not size
            shared, lists = {}, {}
            kinds = {kind for name in fields for kind in kind_of(name)}
            if all(self._lists[name] == "responses" for name in sizes):
                shared[RECORD] = fields.get(RECORD, self._record)
            elif not (kinds & _NAMED or self.reading.step_column):
                shared[RUN] = self._record - 1
            for name, value in fields.items():
                if is_list(value) and len(value) == size and self._lists.get(name) not in ("ids", "messages"):
                    lists[name] = value
                elif kind_of(name) & _SHARED or name in (self.reading.step_column, self.reading.group_column):
                    shared[name] = value
                elif size > 1 and kind_of(name) & {"response_sizes", "response_tokens"} and not is_list(value):
                    raise TraceError(
                        f"{file}, {place}, column {name}: got {shown(value)} for {size} responses "
                        f"({', '.join(sizes)}); a record has to be one response (n = 1), or to have a length for each"
                    )
                elif size == 1:
                    shared[name] = value
            for at in range(size):
                cells = {name: values[at] for name, values in lists.items()}
                result.append((f"{place}, response {at}", shared | flat(cells)))
                objects = [name for name, value in cells.items() if isinstance(value, Mapping)]
                self._lists |= dict.fromkeys(objects, "")
        return result
