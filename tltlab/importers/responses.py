"""Responses in the records of other programs.

A record is a response, or as many as it has in a list. Its fields are found by their names (`fields.NAMES`), and its
lengths are, the first of these that is there: numbers of tokens, masks of generated tokens, lists of token ids, texts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tltlab.config import shown
from tltlab.errors import TraceError
from tltlab.records import Json
from tltlab.traces.storage import MOST_ROWS

from .fields import (
    APART,
    KINDS,
    NAMES,
    REASONS,
    conversation_texts,
    is_list,
    is_message,
    is_missing,
    kind_of,
    lists_in,
    matches,
    missing_in,
    number,
    numbers,
    of_many,
    parsed,
    plain,
)
from .rows import BY_OPTION, MOST_COLUMNS, Reading, Records, Row, flat, placed, text_id
from .token_counts import NoTokenCounter

RECORD = "#record"
"""Column of the number of the record that a response was in a list of."""
RUN = "#run"
"""Column of the number of the record that a length was in a list of, where it has no RL step."""
_CHUNK = 2048
_TURNS = (
    "responses have several turns, whose tokens (and prompts, where a count adds them up) are those of one response: "
    "text of tools and users is not counted as generated"
)
_SAMPLED = 256
"""Records by which a list's meaning is decided."""
_ENOUGH_TEXTS = 4
"""Sizes of texts by which lengths are those of the texts."""
_OF_TEXT = {"response_text", "conversation"}
_MOST_EPOCHS = 1e6
_NO_ERROR: tuple[Any, ...] = ("False", "0", 0, [], {})
_FAILURES: dict[str, Callable[[Any], bool]] = {
    "error": lambda cell: not (is_missing(cell) or cell in _NO_ERROR),
    "success": lambda cell: number(cell, booleans=True) == 0,
    "status_code": lambda cell: number(cell) >= 400,
    "status": lambda cell: str(cell).lower() in REASONS["abort"],
}
"""Kinds of fields whose cells mean that a request failed."""
MOST_TOKENS = 2**24 - 1
"""More than any model's context; a file that states more counts something else."""
_OWN = {
    "epoch": "rl_step",
    "response_sizes": "response_tokens",
    "sizes": "response_tokens",
    "prompt_sizes": "prompt_tokens",
}
"""Columns of a trace for which names are of several kinds."""


_Flat = tuple[str, Json]
_Cell = tuple[str, Json, Any]
"""A record's place, its fields, and one of them."""
_SIZES = {"response_sizes", "sizes"}
_RESPONSE_IDS = ("response_ids", "response_tokens", "response_text", "response_sizes", "sizes")
_PROMPT_IDS = ("prompt_ids", "prompt_tokens", "prompt_text")
"""Kinds of names under which lists of ids are."""


class Reader:
    """Reader of records, chunk by chunk, to a row of numbers for each response.

    It collects the columns used and ignored, and assumptions.
    """

    def __init__(self, reading: Reading):
        self.reading = reading
        self.used: dict[str, str] = {}
        self.columns: dict[str, None] = {}
        self.counts: Counter[str] = Counter()
        self.notes: dict[str, None] = {}
        self._lists: dict[str, str] = {}
        self._seen: set[str] = set()
        self._record = 0

    @property
    def ignored(self) -> list[str]:
        """Columns with a name that were not read."""
        return [name for name in self.columns if name and name not in self._seen]

    def use(self, name: str, column: str) -> None:
        self.used.setdefault(name, column)
        self._seen.add(column)

    def note(self, text: str) -> None:
        self.notes[text] = None

    def described(self) -> str:
        """Note on the columns that were read and those that were not."""
        names = ", ".join(name if name == column else f"{name} from {column}" for name, column in self.used.items())
        return f"columns read: {names}" + (f" (not read: {', '.join(self.ignored)})" if self.ignored else "")

    def assumed(self) -> list[str]:
        """Notes on what was assumed."""
        return [*self.notes, *(f"{num} {text}" for text, num in self.counts.items() if num)]

    def _given(self, records: Records, name: str) -> str:
        """The column that an option names, as it is written in the file."""
        own = list(map(str, records.frame.columns))
        column = name if name in own else next((c for c in own if plain(c) == plain(name)), None)
        if column is None:
            place = records.file if records.is_table else records.place(0)
            raise TraceError(f"{place}: no column {name!r}; there are: {', '.join(own)}")
        return column

    def chunks(self, rows: Iterator[Row], file: str, rl_step: int | None) -> Iterator[Records]:
        """Flat records, those with lists of responses spread."""
        flats = ((place, flat(fields)) for place, fields in rows)
        while chunk := list(islice(flats, _CHUNK)):
            for _ in range(3):
                self._learn(file, chunk)
                if not (spread := self._spread(file, chunk)):
                    break
                chunk = spread
            if (num := len({name for _, fields in chunk for name in fields})) > MOST_COLUMNS:
                raise TraceError(f"{file}: its records have {num:,} names, and at most {MOST_COLUMNS:,} are read")
            frame = pd.DataFrame([fields for _, fields in chunk], index=[place for place, _ in chunk], dtype=object)
            yield Records(file=file, frame=frame, rl_step=rl_step)

    def _learn(self, file: str, chunk: Sequence[_Flat]) -> None:
        """Decide what the lists in each column are, by the first records that have the column."""
        cells: dict[str, list[_Cell]] = {}
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
                is_batch = kinds & KINDS["batched"] and (kinds & _OF_TEXT or all(isinstance(i, int) for i in first))
                self._lists[name] = "responses" if is_batch else ""
            elif isinstance(first, str):
                is_text = not kinds & {"tokens", "response_tokens"}
                self._lists[name] = "responses" if "response_text" in kinds else "" if is_text else "ids"
            elif name not in self._lists or self._lists[name] not in ("ids", "lengths"):
                self._lists[name] = self._numbers_in_lists(file, name, kinds, found)

    def _numbers_in_lists(self, file: str, name: str, kinds: frozenset[str], found: Sequence[_Cell]) -> str:
        """Return "ids" for lists with an entry for each token, "lengths" for one for each response, else ""."""
        if kinds & KINDS["per_token"]:
            return "ids"
        tokens = kinds & {"response_tokens", "tokens"}
        if not tokens and not kinds & _SIZES:
            others = [kind_of(other) for other, value in found[0][1].items() if is_list(value)]
            return "ids" if kinds & {"prompt_tokens"} and not any(_SIZES & other for other in others) else ""
        if self.reading.lists is not None:
            return self.reading.lists
        if kinds & _SIZES:
            return "lengths"
        if all(_is_one_response(fields) for _, fields, _ in found):
            return "ids"
        place, _, cell = found[0]
        raise TraceError(
            f"{file}, {place}, column {name}: {shown(list(cell)[:6])[:-1]}, ...] may be {len(cell)} lengths or the ids "
            f"of {len(cell)} tokens; choose one: {BY_OPTION.format('--lists lengths or --lists ids')}"
        )

    def _spread(self, file: str, chunk: Sequence[_Flat]) -> list[_Flat] | None:
        """Records with a list of responses as one record for each; None where there are none."""
        drivers = [name for name, what in self._lists.items() if what in ("responses", "lengths")]
        if not any(is_list(fields.get(name)) for name in drivers for _, fields in chunk):
            return None
        result: list[_Flat] = []
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
            self.counts["records have an empty list of responses"] += not size
            shared, lists = {}, {}
            kinds = {kind for name in fields for kind in kind_of(name)}
            if all(self._lists[name] == "responses" for name in sizes):
                shared[RECORD] = fields.get(RECORD, self._record)
            elif not (kinds & KINDS["named"] or self.reading.step_column):
                shared[RUN] = self._record - 1
            for name, value in fields.items():
                if is_list(value) and len(value) == size and self._lists.get(name) not in ("ids", "messages"):
                    lists[name] = value
                elif kind_of(name) & KINDS["shared"] or name in (self.reading.step_column, self.reading.group_column):
                    shared[name] = value
                elif size > 1 and kind_of(name) & KINDS["each"] and _is_scalar(value):
                    raise TraceError(
                        f"{file}, {place}, column {name}: got {shown(value)} for {size} responses "
                        f"({', '.join(sizes)}); a record has to be one response (n = 1), or to have one for each; "
                        f"lists of ids: {BY_OPTION.format('--lists ids')}"
                    )
                elif size == 1:
                    shared[name] = value
            for at in range(size):
                cells = {name: values[at] for name, values in lists.items()}
                result.append((f"{place}, response {at}", shared | flat(cells)))
                objects = [name for name, value in cells.items() if isinstance(value, Mapping)]
                self._lists |= dict.fromkeys(objects, "")
        return result

    def _whole(
        self, records: Records, column: str, at_least: int, *, may_miss: bool = False, failed: Any = False
    ) -> NDArray[np.float64]:
        """A column's whole numbers; missing ones are NaN where they may be, and 0 where the request failed."""
        cells = records.frame[column]
        values = numbers(cells)
        absent = np.isnan(values)
        if absent.any():
            absent = absent & missing_in(cells) & (failed | np.bool_(may_miss))
            values = np.where(absent & failed, 0.0, values)
        ok = absent | ((values >= at_least) & (values <= MOST_TOKENS) & (values == np.floor(values)))
        # 1.000 may be one, or a thousand.
        ok &= ~cells.astype(str).str.fullmatch(r"\s*\d{1,3}(\.\d{3})+\s*").to_numpy(bool)
        wanted = f"a whole number from {at_least} to {MOST_TOKENS}, without marks between thousands"
        records.require(ok, column, wanted)
        return values

    def _column(self, records: Records, *kinds: str, fits: Callable[[str], Any] | None = None) -> str | None:
        """Return the column of these kinds, the least deep in objects first; None where there is none.

        Cells of the others fill its missing ones. Raises TraceError where lengths or RL steps of several differ.
        """
        frame = records.frame

        def is_there(column: str) -> bool:
            cells = frame[column]
            if fits is not None:
                return bool(fits(column))
            return not (lists_in(cells).any() or missing_in(cells).all())

        found = matches(frame.columns, *kinds, fits=is_there)
        if not found:
            return None
        own = _OWN.get(kinds[0], kinds[0])
        chosen = next((column for column in found if plain(column) == plain(own)), found[0])
        for other in found if len(found) > 1 else ():
            unknown = missing_in(frame[other]) | missing_in(frame[chosen])
            differs = (numbers(frame[other]) != numbers(frame[chosen])) & ~unknown
            same_depth = other.count(".") == chosen.count(".")
            if differs.any() and same_depth and plain(chosen) != plain(own) and kinds[0] in (*_OWN, "rl_step"):
                option = "--step-column" if own == "rl_step" else "--column"
                raise TraceError(
                    f"{records.place(int(np.argmax(differs)))}: columns {chosen} and {other} differ and either could "
                    f"be {own}: keep one, call it {own}, or name one ({BY_OPTION.format(option)})"
                )
            frame[chosen] = frame[chosen].where(~missing_in(frame[chosen]), frame[other])
        self._seen.update(found)
        if own != "total":
            self.use({"cap": "max_response_tokens"}.get(own, own), chosen)
        return chosen

    def _rl_steps(self, records: Records) -> Any:
        frame = records.frame
        if self.reading.step_column is not None:
            column: str | None = self._given(records, self.reading.step_column)
            self.use("rl_step", str(column))
        else:
            column = self._column(records, "rl_step")
            if column is None and records.rl_step is None and "rl_step" not in self.reading.needs:
                column = self._column(records, "epoch", fits=lambda c: (numbers(frame[c]) < _MOST_EPOCHS).all())
        values = np.full(len(frame), np.nan)
        if column is not None:
            frame[column] = frame[column].map(of_many)
            values = self._whole(records, column, 0, may_miss=records.rl_step is not None)
        elif RUN in frame:
            values = frame[RUN].to_numpy(np.float64)
            if len(set(values)) > 1:
                self.note("each list of lengths is an RL step")
        if records.rl_step is None and "rl_step" in self.reading.needs:
            records.refuse(np.isnan(values), "no step; wanted a field step")
        return np.where(np.isnan(values), records.rl_step or 0, values).astype(np.int64)

    def _failed(self, records: Records) -> NDArray[np.bool_]:
        """Return for each request True if it failed, by its error, success or status code."""
        frame = records.frame
        failed = np.full(len(frame), False)
        for kind, means_failure in _FAILURES.items():
            columns = matches(frame.columns, kind)
            if kind == "error":
                columns += [column for column in frame.columns if "error" in plain(column).split(".")[:-1]]
            for column in columns:
                failed |= np.array([means_failure(cell) for cell in frame[column]], bool)
            self._seen.update(columns)
        return failed

    def _reasons(self, records: Records, aborted: NDArray[np.bool_]) -> Any:
        """Return the trace's finish reason of each response; None is unknown."""
        frame = records.frame
        reasons: Any = np.full(len(frame), None, object)
        known = {word: reason for reason, words in REASONS.items() for word in words}
        for kind in ("finish_reason", "status", "is_cut"):
            for column in matches(frame.columns, kind, fits=lambda c: not missing_in(frame[c]).all())[:1]:
                for at, cell in enumerate(frame[column]):
                    if is_missing(cell) or reasons[at] is not None:
                        continue
                    if kind == "is_cut":
                        reasons[at] = "length" if number(cell, booleans=True) == 1 else "stop"
                    elif (reason := known.get(str(cell).strip().lower().rpartition(".")[2])) is not None:
                        reasons[at] = reason
                    elif "stopreason" in plain(column) and not isinstance(cell, str):
                        reasons[at] = "stop"  # The id of the token that stopped it.
                    elif kind == "finish_reason":
                        records.fault(at, column, f"got {shown(cell)}, known are: {', '.join(sorted(known))}")
                if kind != "status" or any(reason is not None for reason in reasons):
                    self.use("finish_reason", column)
        reasons[aborted] = "abort"
        self.counts["requests failed or made no token and count as aborted"] += int(aborted.sum())
        return reasons

    def _rewards(self, records: Records) -> Any:
        """The reward of each response: the sum of the named columns, of what is known; NaN is unknown."""
        frame = records.frame
        strict = "reward" in self.reading.needs or bool(self.reading.reward_columns)
        names = list(self.reading.reward_columns)
        if not names:
            names = matches(frame.columns, "reward", fits=lambda c: not lists_in(frame[c]).any())[:1]
            texts = [frame[name][~missing_in(frame[name])] for name in names]
            if not strict and any(np.isnan(numbers(cells, booleans=True)).any() for cells in texts):
                return np.full(len(frame), np.nan)
        total = np.full(len(frame), np.nan)
        for name in names:
            column = self._given(records, name)
            self.use("reward", column)
            values = numbers(frame[column], booleans=True)
            if strict:
                records.require(np.isfinite(values) | missing_in(frame[column]), column, "a number")
            total = np.where(np.isfinite(values), np.nan_to_num(total) + values, total)
        return total

    def read(self, records: Records) -> pd.DataFrame:
        """Return a row of numbers for each response of some records, with candidates for its prompt's name."""
        records = self._counted(records)
        frame = records.frame
        self.columns |= dict.fromkeys(name for name in map(str, frame.columns) if not name.startswith("#"))
        own = list(frame.columns)
        failed = self._failed(records)
        lengths, exact = self._response_tokens(records, failed)
        lengths, known = self._settled(records, lengths, self._known_prompts(records), exact & ~failed)
        prompts = self._prompt_tokens(records, lengths, known)
        if self.reading.column is None:
            self._beside_text(records, "response", lengths, exact & (lengths > 0))
            self._beside_text(records, "prompt", prompts, prompts > 0)
        result = pd.DataFrame({"response_tokens": lengths, "is_exact": exact, "prompt_tokens": prompts})
        result["rl_step"] = self._rl_steps(records)
        result["place"] = frame.index.to_numpy()
        result["file"] = records.file
        result["finish_reason"] = self._reasons(records, failed | (lengths == 0))
        result["reward"] = self._rewards(records)
        for name, least in (("cap", 1), ("worker", 0), ("sample", 0)):
            column = self._column(records, name)
            result[name] = np.nan if column is None else self._whole(records, column, least, may_miss=True)
        result["sample_is_ours"] = "sample" in frame
        result["turn"], result["session"], result["tool_s"] = self._turns(records)
        self._note_turns(records)
        result["text"] = self._prompts(records)
        said = self._text_columns(records, "response_text")[:1]
        result["said"] = [text_id(cell) for cell in frame[said[0]]] if said else None
        wanted = self.reading.group_column and self._given(records, self.reading.group_column)
        if numbering := matches(own, "row_id"):
            # Logs of several programs call it differently.
            frame = frame.assign(**{numbering[0]: frame[numbering].bfill(axis=1).iloc[:, 0]})
        names = [wanted] if wanted else [*matches(own, "prompt_id"), *numbering]
        # Few numbers in the place of a prompt's text are what its samples share.
        names = names or matches(own, "prompt_text", fits=lambda c: _are_few(numbers(frame[c])))
        for name in names:
            if not (missing := missing_in(frame[name])).any() and not lists_in(frame[name]).any():
                result[f"id:{name}"] = frame[name].map(_identity).to_numpy(object)
            elif not missing.all() and "prompt_id" in kind_of(name):
                self.note(f"{name} is not one value in each record: it does not name the prompts")
            if wanted:
                records.require(~missing, name, "a value, as it was named as the column of groups")
        if RECORD in frame:
            result[RECORD] = frame[RECORD].to_numpy()
        return result

    def _turns(self, records: Records) -> tuple[Any, Any, Any]:
        """Return for records of turns their numbers, conversations and seconds of tools; None where it is no turn."""
        frame = records.frame
        asked = {"turn": self.reading.turn_column, "session": self.reading.conversation_column}
        turn, session = (
            self._given(records, named)
            if named is not None
            else next(iter(matches(frame.columns, kind, fits=lambda c: not lists_in(frame[c]).any())), None)
            for kind, named in asked.items()
        )
        if turn is None:
            records.refuse(np.full(len(frame), asked["session"] is not None), "no number of turns (--turn-column)")
            return None, None, None
        if session is None or missing_in(frame[session]).any():
            self._seen.add(turn)
            why = "no column has the same value for all turns of one (--conversation-column)"
            self.note(f"{turn}: each turn counts as a separate response, as {why}")
            return None, None, None
        self.use("turn", turn)
        self._seen.add(session)
        tools = np.full(len(frame), np.nan)
        for kind, unit in (("tool_s", 1.0), ("tool_ms", 1e-3)):
            for column in matches(frame.columns, kind)[:1]:
                self.use("tool_s", column)
                values = numbers(frame[column])
                records.require((values >= 0) & np.isfinite(values) | missing_in(frame[column]), column, "seconds")
                tools = np.where(np.isnan(tools), unit * values, tools)
        return self._whole(records, turn, 0), frame[session].map(_identity).to_numpy(object), tools

    def _counted(self, records: Records) -> Records:
        """Return the records of a histogram, lengths and how many responses have them, as one for each response."""
        frame = records.frame
        columns, kinds = matches(frame.columns, "count"), {kind for column in frame for kind in kind_of(str(column))}
        if not columns or not kinds & {*_SIZES, "response_tokens"} or kinds & KINDS["of_response"]:
            return records
        counts = self._whole(records, columns[0], 0)
        if counts.sum() > MOST_ROWS:
            raise TraceError(f"{records.file}: {counts.sum():,.0f} responses, and at most {MOST_ROWS:,} are read")
        self.use("count", columns[0])
        self.note(f"a row stands for as many responses as {columns[0]} says")
        return replace(records, frame=frame.iloc[np.repeat(np.arange(len(frame)), counts.astype(np.int64))])

    def _prompts(self, records: Records) -> Any:
        """The `text_id` of each prompt's text, of what a conversation begins with, or of its token ids; else None."""
        frame, texts = records.frame, self._text_columns(records, "prompt_text")
        talks = [] if texts else self._text_columns(records, "conversation")
        column = next(iter([*texts, *talks, *self._listed(frame, *_PROMPT_IDS)]), None)
        if column is None:
            return None
        self._seen.add(column)
        cells = (
            [getattr(conversation_texts(parsed(c)), "before", "") for c in frame[column]] if talks else frame[column]
        )
        return [text_id(cell) for cell in cells]

    def _response_tokens(self, records: Records, failed: NDArray[np.bool_]) -> tuple[Any, NDArray[np.bool_]]:
        """Tokens of each response, 0 of failed requests, and whether they are more than a count of the text."""
        frame, size = records.frame, len(records.frame)
        values, exact = np.full(size, np.nan), np.full(size, True)
        lists = self._listed(frame, "mask", *_RESPONSE_IDS, "logprobs")
        texts = self._text_columns(records, "response_text", "conversation")
        chosen = self.reading.column and self._given(records, self.reading.column)
        if chosen:
            self.use("response_tokens", chosen)
            if self._lists.get(chosen) == "ids":
                lists, texts = [chosen], []
            elif np.isnan(numbers(frame[chosen])).all() and self._text_of(records, chosen):
                lists, texts = [], [chosen]
            else:
                return self._whole(records, chosen, 0, failed=failed), exact
        chosen = self._column(records, "response_sizes", "response_tokens") or self._column(records, "sizes", "tokens")
        others = self._listed(frame, "all_ids", "tokens")
        wholes = {_sizes(frame[column]).tobytes() for column in others}
        # Log-probs of the prompt too are no length of the response.
        lists = [
            column
            for column in lists
            if "logprobs" not in kind_of(column) or _sizes(frame[column]).tobytes() not in wholes
        ]
        if chosen:
            has_others = bool(lists or texts)
            values = self._whole(records, chosen, 0, may_miss=has_others, failed=failed)
            self._compare(frame, chosen, values, [*lists, *others])
        for column in lists:
            if (open_ := np.isnan(values) & ~failed).any():
                self.use("response_tokens", column)
                values = np.where(open_, self._tokens_in(frame, column), values)
        known = self._known_prompts(records) if np.isnan(values[~failed]).any() else None
        if known is not None and (total := self._column(records, "total")) is not None:
            self.use("response_tokens", total)
            values = np.where(np.isnan(values) & ~failed, self._whole(records, total, 0, may_miss=True) - known, values)
            self.note(f"response tokens are {total} less the prompt's")
        if (open_ := np.isnan(values) & ~failed).any() and texts:
            column = texts[0]
            self.use("response_tokens", column)
            values[open_] = self._count(records, column, np.flatnonzero(open_))
            exact = exact & ~open_
            self.note(self.reading.tokens.note)
        values = np.where(np.isnan(values) & failed, 0.0, values)
        if records.is_table and list(frame.columns) == ["c0"]:
            values = self._whole(records, "c0", 0)
        records.require(~(values < 0), self.used.get("response_tokens", ""), "at least the prompt's tokens")
        records.refuse(
            np.isnan(values),
            "no length of the response; wanted response_tokens, output_len, usage, token ids or a text, or name it "
            f"({BY_OPTION.format('--column')})",
        )
        return values, exact

    def _listed(self, frame: pd.DataFrame, *kinds: str) -> list[str]:
        """Columns of these kinds whose lists have an entry for each token."""
        return matches(frame.columns, *kinds, fits=lambda c: self._lists.get(c) == "ids" and lists_in(frame[c]).any())

    def _tokens_in(self, frame: pd.DataFrame, column: str, end: str = "tail") -> Any:
        """Tokens of each list: the ones of a mask, else its entries without padding at an end; NaN without a list."""
        sizes = _sizes(frame[column])
        if "mask" in kind_of(column):
            ones = _ones(frame[column])
            if np.nansum((sizes - ones)[ones > 0]) > 0:
                self.note(f"{column}: ones are the tokens generated, zeros (tools' tokens, padding) are left out")
            if ((ones == 0) & (sizes > 0)).any():
                self.note(f"{column}: where it has no ones its size is taken")
            return np.where(ones == 0, sizes, ones)
        step = 1 if end == "head" else -1
        runs = np.array([_run(cell[::step]) if is_list(cell) else 0 for cell in frame[column]])
        if len(sizes) > 1 and len(set(sizes)) == 1 and 2 * (runs > 0).sum() > len(sizes):
            self.note(f"{column}: lists of one size with repeated ids at the {end}, which are taken for padding")
            return sizes - runs
        return sizes

    def _compare(self, frame: pd.DataFrame, chosen: str, values: Any, columns: Sequence[str]) -> None:
        """Note lists whose size is not the recorded number, which counts."""
        for column in columns:
            self._seen.add(column)
            sizes, kinds = _sizes(frame[column]), kind_of(column)
            differs = sizes < values if kinds & {"all_ids", "tokens"} else ~np.isnan(sizes) & (values != sizes)
            if "mask" in kinds:
                differs &= values != _ones(frame[column])
            self.counts[f"responses have another number of {column} than {chosen}, which counts"] += int(differs.sum())

    def _known_prompts(self, records: Records) -> Any:
        """Tokens of each prompt by numbers or lists; None where there is neither."""
        frame = records.frame
        if (column := self._column(records, "prompt_sizes", "prompt_tokens")) is not None:
            return self._whole(records, column, 0, may_miss=True)
        if columns := self._listed(frame, *_PROMPT_IDS):
            column = columns[0]
            self.use("prompt_tokens", column)
            return self._tokens_in(frame, column, "head")
        return None

    def _settled(self, records: Records, lengths: Any, prompts: Any, counted: Any) -> tuple[Any, Any]:
        """Return tokens of responses and prompts with those that are counted beside them, as each total says.

        Raises TraceError for a total that is no sum of them, and for a part that is more than its whole.
        """
        if self.reading.column:
            return lengths, prompts
        asked = np.full(len(lengths), np.nan) if prompts is None else prompts
        response, response_apart, names = self._parts(records, "response_part")
        prompt, prompt_apart, _ = self._parts(records, "prompt_part")
        column, whole = self._column(records, "total"), self.used.get("response_tokens", "the response")
        total = np.full(len(lengths), np.nan) if column is None else self._whole(records, column, 0, may_miss=True)
        said, known = lengths + np.where(counted, response_apart, 0.0), asked + prompt_apart
        open_ = counted & ~np.isnan(total)
        if (wrong := counted & ~open_ & (response - response_apart > lengths)).any():
            at = int(np.argmax(wrong))
            choose = f"a field total_tokens decides, or {BY_OPTION.format('--column')}"
            records.fault(at, whole, f"got {lengths[at]:g}, and {' + '.join(names)} is {response[at]:g}: {choose}")
        for more_asked in (0.0, prompt):
            for more in (0.0, response):
                fits = open_ & (total == lengths + more + asked + more_asked)
                said, known = np.where(fits, lengths + more, said), np.where(fits, asked + more_asked, known)
                open_ = open_ & ~fits
        if (wrong := open_ & ((total < said) | ~np.isnan(asked))).any():
            at = int(np.argmax(wrong))
            wanted = f"more than {said[at]:g}, {whole}"
            if not np.isnan(asked[at]):
                wanted = f"{said[at] + known[at]:g}, the sum of {whole} and {self.used['prompt_tokens']}"
            choose = f"name the lengths of responses: {BY_OPTION.format('--column')}"
            records.fault(at, str(column), f"got {total[at]:g}, wanted {wanted}; {choose}")
        if (said != lengths).any():
            self.note(f"response tokens have {' and '.join(names)} added, which are beside them")
        return said, known if prompts is not None else None

    def _parts(self, records: Records, kind: str) -> tuple[Any, Any, list[str]]:
        """Tokens that may be beside others, those of them that always are, and the columns."""
        there = matches(records.frame.columns, kind, fits=lambda c: not missing_in(records.frame[c]).all())
        columns = {plain(column).rpartition(".")[2]: column for column in reversed(there)}
        parts, apart = np.zeros(len(records.frame)), np.zeros(len(records.frame))
        for name, column in columns.items():
            values = np.nan_to_num(self._whole(records, column, 0, may_miss=True))
            self._seen.add(column)
            parts, apart = parts + values, apart + values * (name in APART)
        return parts, apart, list(columns.values())

    def _prompt_tokens(self, records: Records, lengths: Any, known: Any) -> Any:
        """Tokens of each prompt, NaN unknown: as recorded, of a list, the whole less the response, or of its text."""
        frame = records.frame
        known = np.full(len(frame), np.nan) if known is None else known
        for column in self._listed(frame, "all_ids", "tokens") if np.isnan(known).any() else ():
            # What is called input_ids may be the prompt alone.
            masks = self._listed(frame, "mask")
            if self.used.get("response_tokens") == column or (plain(column).endswith("inputids") and not masks):
                continue
            sizes = _sizes(frame[column])
            rest = sizes - lengths
            for mask in masks:
                rest = np.where(sizes == _sizes(frame[mask]), frame[mask].map(_zeros_before), rest)
            known = np.where(np.isnan(known) & (rest >= 0), rest, known)
            self.use("prompt_tokens", column)
        total = self._column(records, "total") if np.isnan(known).all() else None
        if total is not None:
            whole = self._whole(records, total, 0, may_miss=True) - lengths
            known = np.where(whole >= 0, whole, np.nan)
        open_ = np.flatnonzero(np.isnan(known))
        texts = self._text_columns(records, "prompt_text", "conversation")
        if len(open_) and texts and not isinstance(self.reading.tokens, NoTokenCounter):
            self.use("prompt_tokens", texts[0])
            known[open_] = self._count(records, texts[0], open_, is_prompt=True)
            self.note(self.reading.tokens.note)
        elif "prompt_tokens" in self.reading.needs:
            records.refuse(np.isnan(known), "no prompt length; wanted a field prompt_tokens or input_len")
        return known

    def _text_columns(self, records: Records, *kinds: str) -> list[str]:
        return matches(records.frame.columns, *kinds, fits=lambda c: self._text_of(records, c))

    def _text_of(self, records: Records, column: str) -> bool:
        """Return True if the first cell with a value is a text (in a table: no number) or a conversation."""
        cells = records.frame[column]
        first = next((cell for cell in cells if not is_missing(cell)), None)
        if first is None:
            # An empty response is a text, and so is one such as "NULL".
            return not records.is_table and any(isinstance(cell, str) for cell in cells)
        if isinstance(first, str):
            return not records.is_table or bool(np.isnan(numbers(cells)).all())
        return self._lists.get(column) != "ids" and conversation_texts(first) is not None

    def _count(self, records: Records, column: str, rows: Any, *, is_prompt: bool = False) -> list[int]:
        """Tokens of the texts in some rows of a column: of a response what was generated, at least 1, its end."""
        texts, cells = [], records.frame[column]
        is_conversation = "conversation" in kind_of(column)
        for at in rows:
            cell = cells.iloc[at]
            if isinstance(cell, str) and cell.startswith("[{") and is_list(messages := parsed(cell)):
                cell = messages if all(map(is_message, messages)) else cell
            if (speech := conversation_texts(cell)) is None:
                records.fault(int(at), column, f"got {shown(cells.iloc[at])}, wanted a text or messages")
            for kind in () if is_prompt and is_conversation else speech.unread:
                self.counts[f"messages have {kind}, which is not counted"] += 1
            parts = speech.generated
            if is_prompt:
                parts = speech.before if is_conversation and speech.turns else [*speech.others, *speech.generated]
            elif is_conversation and not speech.turns:
                records.fault(int(at), column, "no message of the model: these are prompts without responses")
            elif not is_prompt:
                parts = [*self._reasoning(records.frame, int(at), parts), *parts]
            texts.append("\n".join(parts))
        unique = list(dict.fromkeys(texts))
        count_of = dict(zip(unique, self.reading.tokens.count(unique), strict=True))
        return [count_of[text] if is_prompt else max(1, count_of[text]) for text in texts]

    def _beside_text(self, records: Records, of: str, lengths: Any, counted: Any) -> None:
        """Raise TraceError for lengths of the text beside them in another unit than tokens, and for too short texts.

        Texts of one size are cut, or stand for others, and those with their reasoning elsewhere are shorter.
        """
        frame, texts = records.frame, self._text_columns(records, f"{of}_text")[:1]
        name, rows = self.used.get(f"{of}_tokens", ""), np.flatnonzero(counted)[:_SAMPLED]
        if not texts or name in texts:
            return
        cells, tokens = frame[texts[0]].iloc[rows], lengths[rows]
        letters, choose = cells.str.len(), BY_OPTION.format(f"--column {self.used['response_tokens']}")
        if letters.nunique() < _ENOUGH_TEXTS:
            return
        units = {"characters": tokens == letters, "words": tokens == cells.str.count(r"\S+")}
        fault = next((f"the number of {unit}" for unit, are_equal in units.items() if are_equal.all()), "")
        is_longer = tokens > cells.str.encode("utf-8", "replace").map(len, na_action="ignore")
        if (
            of == "response"
            and is_longer.mean() > 0.5
            and not matches(frame.columns, "response_part", "reasoning_text")
        ):
            fault = "more than the bytes"
        if fault:
            records.fault(rows[0], name, f"got {tokens[0]:g}, {fault} of {texts[0]}; if it is of tokens, {choose}")

    def _reasoning(self, frame: pd.DataFrame, at: int, parts: Sequence[str]) -> list[str]:
        """Texts of a record's reasoning that are not in its response."""
        texts: list[str] = []
        for column in matches(frame.columns, "reasoning_text"):
            speech = conversation_texts(parsed(frame[column].iloc[at]))
            text = "" if speech is None or is_missing(frame[column].iloc[at]) else "\n".join(speech.generated)
            self._seen.add(column)
            if text and not any(text.strip() in part for part in (*parts, *texts)):
                texts.append(text)
        self.counts["responses have their reasoning beside them, which is counted"] += bool(texts)
        return texts

    def _note_turns(self, records: Records) -> None:
        """Count responses with several turns, by their number or by messages after the first generated one."""
        if matches(records.frame.columns, "turn"):
            return
        if (number := self._column(records, "turns")) is not None:
            self.counts[_TURNS] += int((numbers(records.frame[number]) > 1).sum())
            return
        columns = matches(records.frame.columns, "response_text", "conversation")
        for column in [column for column in columns if self._lists.get(column) == "messages"][:1]:
            conversations = [conversation_texts(cell) for cell in records.frame[column] if is_list(cell)]
            several = sum(s is not None and (s.turns > 1 or len(s.others) > len(s.before) > 0) for s in conversations)
            self.counts[_TURNS] += several
            self._seen.add(column)


def _is_one_response(fields: Mapping[str, Any]) -> bool:
    """Return True if a record has one value for what each response has, or one for each token of a response."""
    return any(
        _is_scalar(value) if kind_of(name) & KINDS["each"] else is_list(value) and kind_of(name) & {"mask", "logprobs"}
        for name, value in fields.items()
    )


def _is_scalar(cell: Any) -> bool:
    return isinstance(cell, str | int | float) and not is_missing(cell)


def _sizes(cells: pd.Series[Any]) -> NDArray[np.float64]:
    """Entries of each list, NaN without a list."""
    return np.array([len(cell) if is_list(cell) else np.nan for cell in cells], np.float64)


def _ones(cells: pd.Series[Any]) -> NDArray[np.int64]:
    """Ones in each mask, 0 without a mask."""
    return np.array([sum(one == 1 for one in cell) if is_list(cell) else 0 for cell in cells], np.int64)


def _run(values: Sequence[Any]) -> int:
    """How many equal values begin a list; 0 for one, and for all of them."""
    run = next((at for at, value in enumerate(values) if value != values[0]), len(values))
    return 0 if run in (1, len(values)) else run


def _zeros_before(mask: Any) -> int:
    """Return how many zeros begin a mask, all of one without ones."""
    return next((at for at, one in enumerate(mask) if one), len(mask)) if is_list(mask) else 0


def _identity(cell: Any) -> str:
    """Return a prompt's name as a text, the same for 1 and 1.0."""
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)
    return json.dumps(cell, sort_keys=True, default=str) if isinstance(cell, list | dict) else str(cell)


def _are_few(values: NDArray[np.float64]) -> bool:
    """Return True for numbers each of which is there about twice or more."""
    return bool(np.isfinite(values).all()) and 2 * len(np.unique(values)) <= len(values)


def tables_of_responses(
    frame: pd.DataFrame, reading: Reading, *, names_prompts: bool
) -> tuple[dict[str, pd.DataFrame], list[str], str | None]:
    """Workload and outcomes of responses, notes on what was assumed, and the column that names the prompts.

    `frame` has what `responses.Reader.read` gives. Samples of a prompt without a number are numbered in their
    order. `epoch` counts the earlier RL steps with the same prompt. With `max_response_tokens` a response
    that long was cut ("length"); a longer one is a TraceError, or cut to it where lengths are counts of text. Without,
    the longest response is the cap. `names_prompts` numbers unnamed prompts within their RL step, else through all.
    """
    frame = frame.sort_values("rl_step", kind="stable", ignore_index=True)
    notes: list[str] = []
    if has_turns := bool(frame["turn"].notna().all()):
        frame = _by_turn(frame, notes)
    lengths = frame["response_tokens"].to_numpy(np.int64)
    if not lengths.any():
        raise TraceError(f"{frame['file'][0]}: no response has a token")
    known_cap = reading.max_response_tokens is not None
    caps = np.full(len(frame), reading.max_response_tokens or max(1, lengths.max()))
    if frame["cap"].notna().all():
        known_cap, caps = True, frame["cap"].to_numpy(np.int64)
    if (over := (lengths > caps) & frame["is_exact"].to_numpy(bool)).any():
        at = int(np.argmax(over))
        place = placed(frame["file"][at], frame["place"][at])
        raise TraceError(f"{place}: the response has {lengths[at]} tokens, more than its maximum of {caps[at]}")
    reason = frame["finish_reason"].to_numpy(object)
    unknown = pd.isna(reason)
    if not known_cap:
        all_finished = ", all count as finished" if unknown.all() and not names_prompts else ""
        notes.append(f"the cap is unknown: the longest response ({lengths.max()} tokens) is taken for it{all_finished}")
    if unknown.any() and (names_prompts or not unknown.all()):
        rule = "as cut where they reach the cap, else as finished" if known_cap else "as finished"
        notes.append(f"{unknown.sum()} responses have no finish reason: they count {rule}")
    prompts = frame["prompt_tokens"].to_numpy()
    if np.isnan(prompts).any():
        some = "" if np.isnan(prompts).all() else f" of {int(np.isnan(prompts).sum())} responses"
        notes.append(f"prompt tokens{some} are unknown: 0")
    first = frame[frame["turn"] == 0] if has_turns else frame
    key = first[["rl_step"]].copy()
    key["prompt_id"], named_by = _prompt_ids(first, reading, names_prompts, notes)
    key["sample"] = first["sample"]
    if first["sample"].isna().any() or (key.duplicated().any() and not first["sample_is_ours"].all()):
        if first["sample"].notna().all():
            notes.append("samples have numbers that repeat within a prompt: they are numbered anew")
        key["sample"] = key.groupby(["rl_step", "prompt_id"], sort=False).cumcount()
    key["sample"] = key["sample"].astype(np.int64)
    if has_turns:
        key = key.loc[frame["first"]].reset_index(drop=True).assign(turn=frame["turn"])
    cut = (lengths >= caps) & known_cap
    tables = tables_of_lengths(key, np.minimum(lengths, caps), np.nan_to_num(prompts).astype(np.int64), caps, cut)
    outcomes = tables["outcomes"].join(frame[["reward", "worker", "tool_s"]].astype(np.float64))
    outcomes["finish_reason"] = outcomes["finish_reason"].where(unknown, reason)
    return tables | {"outcomes": outcomes}, notes, named_by


def _by_turn(frame: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    """Return the turns of responses in order, numbered from 0, with the row of each one's `first` turn.

    Tools that work after a turn are those before the next one. TraceError for a turn that is there twice.
    """
    whole = ["rl_step", "session"]
    frame = frame.sort_values([*whole, "turn"], kind="stable", ignore_index=True)
    if (twice := frame.duplicated([*whole, "turn"])).any():
        row = frame[twice].iloc[0]
        place = placed(row["file"], row["place"])
        raise TraceError(f"{place}: turn {row['turn']:g} of {row['session']} is there twice")
    turns = frame.groupby(whole, sort=False)
    frame["turn"], frame["first"] = turns.cumcount(), turns["turn"].transform("idxmin")
    is_first = frame["turn"] == 0
    frame["reward"] = turns["reward"].transform("last").where(is_first)
    if (frame["tool_s"][is_first] > 0).any():
        frame["tool_s"] = turns["tool_s"].shift()
        notes.append("the first turns have seconds of tools, so a turn's are those after it")
    frame.loc[is_first, "tool_s"] = np.nan
    return frame


def _prompt_ids(frame: pd.DataFrame, reading: Reading, names_prompts: bool, notes: list[str]) -> tuple[Any, str | None]:
    """Return the name of each response's prompt, and the column that the names are from.

    A column qualifies if several responses share a value, and different prompts of an RL step never do. Without such
    a column the prompt's text is the name, and prompts that are the same in different RL steps share a name.
    """
    step, text = frame["rl_step"], frame["text"] if frame["text"].notna().all() else None
    group_size = reading.group_size
    for column in [name for name in frame.columns if name.startswith("id:")]:
        name, ids = column[3:], frame[column]
        if ids.isna().any():
            continue
        sizes = frame.groupby([step, ids], sort=False).size()
        repeats = (sizes > 1).any()
        is_own, is_named = plain(name) == "promptid", plain(name).rpartition(".")[2] in NAMES["prompt_id"]
        if reading.group_column is None:
            text_repeats = text is not None and pd.concat([step, text], axis=1).duplicated().any()
            # Numbers of rows begin anew in each RL step.
            is_of_row = not (is_named or is_own) and (text is not None or ids.duplicated().any())
            if not repeats and (text_repeats or is_of_row or (group_size and not is_own)):
                continue
            different = next((c for c in ("text", "prompt_tokens") if frame[c].notna().all()), None)
            # Groups of one size are groups, whatever was written of their prompts.
            is_group = is_own or (is_named and sizes.nunique() == 1 and ids.nunique() > 1)
            # Prompts differ where one id has several values of this column in an RL step.
            if repeats and different and not is_group and frame.groupby([step, ids])[different].nunique().max() > 1:
                notes.append(f"{name} is the same for different prompts: it does not name them")
                continue
        if group_size and repeats and set(sizes) != {group_size}:
            notes.append(f"groups are those of {name}, not of the given group size")
        return _across_rl_steps(step, ids, text, name, notes), name
    if text is not None:
        within = frame.groupby([step, text], sort=False).cumcount()
        if group_size and (within >= group_size).any():
            notes.append(f"prompts of the same text are separated after every {group_size} responses")
            return text + (within // group_size).map(lambda at: f"-{at}" if at else ""), None
        return text, None
    records = frame.get(RECORD)
    if records is not None and not group_size and records.notna().all() and records.nunique() > step.nunique():
        return "r" + records.astype(np.int64).astype(str), None
    group = group_size or 1
    at = frame.groupby("rl_step").cumcount() // group
    sizes = frame.groupby([step, at], sort=False).size()
    if len(incomplete := sizes[sizes < group]):
        subject = "the last group" if len(incomplete) == 1 else f"the last group of {len(incomplete)} RL steps"
        notes.append(f"{subject} is incomplete: {incomplete.iloc[0]} of {group} samples")
    if names_prompts:
        return "s" + step.astype(str) + "-p" + at.astype(str), None
    return "p" + frame.groupby([step, at], sort=False).ngroup().astype(str), None


def _across_rl_steps(
    step: pd.Series[Any], ids: pd.Series[Any], text: pd.Series[Any] | None, name: str, notes: list[str]
) -> pd.Series[Any]:
    """Names of prompts that are the same in all RL steps: the ids, or texts where ids are made anew in each RL step."""
    pairs = pd.DataFrame({"rl_step": step, "id": ids})
    if text is not None:
        pairs["text"] = text
        in_step = pairs.drop_duplicates()
    if text is not None and not in_step.duplicated(["rl_step", "id"]).any():
        if in_step.duplicated(["rl_step", "text"]).any():
            again = pairs[["id", "text"]].drop_duplicates()["id"].duplicated().any()
            return "s" + step.astype(str) + "-" + ids if again else ids
        overall = pairs[["id", "text"]].drop_duplicates()
        return text if overall["text"].duplicated().any() or overall["id"].duplicated().any() else ids
    if step.nunique() > 1 and plain(name).endswith(("idx", "index")):
        found = [set(part["id"]) for _, part in pairs.drop_duplicates().groupby("rl_step")]
        if all(part == set(map(str, range(len(part)))) for part in found):
            notes.append(f"{name} counts the prompts of each RL step: those of different RL steps are different")
            return "s" + step.astype(str) + "-p" + ids
    return ids


def tables_of_lengths(
    key: pd.DataFrame, lengths: Any, prompt_tokens: Any, cap: Any, cut: Any
) -> dict[str, pd.DataFrame]:
    """Workload and outcomes of responses known by their lengths alone; `cut` marks those that reached the cap.

    One cap counts for all, an array has one for each. `epoch` counts the earlier RL steps with the same prompt.
    """
    visits = key[["rl_step", "prompt_id"]].drop_duplicates().sort_values("rl_step", kind="stable")
    visits["epoch"] = visits.groupby("prompt_id", sort=False).cumcount()
    epoch = key.merge(visits, on=["rl_step", "prompt_id"], how="left")["epoch"].to_numpy()
    key = key if "turn" in key else key.assign(turn=0)
    workload = key.assign(
        epoch=epoch, prompt_tokens=prompt_tokens, max_response_tokens=cap, policy_version=key["rl_step"]
    )
    outcomes = key.assign(response_tokens=lengths, finish_reason=np.where(cut, "length", "stop"))
    return {"workload": workload, "outcomes": outcomes}


def group_size_of(workload: pd.DataFrame) -> int | None:
    """Samples per prompt, where all groups have as many."""
    sizes = workload[workload["turn"] == 0].groupby(["rl_step", "prompt_id"], sort=False).size().unique()
    return int(sizes[0]) if len(sizes) == 1 else None
