"""Responses in the records of other programs, and the trace tables that they make.

A record is a response, or as many as it has in a list. Its fields are found by their names (`fields.NAMES`), and its
lengths are, the first of these that is there: numbers of tokens, masks of generated tokens, lists of token ids, texts.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NoReturn

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tltlab.config import shown
from tltlab.errors import ConfigError, TraceError

from .cells import Ids, could_be_thousands, is_list, is_message, is_missing, lists_in, missing_in, number, numbers, parsed, speech_of
from .fields import NAMES, TIMES, kind_of, matches, plain, unit_of
from .length_table import RECORD
from .token_counts import NoTokenCounter, TokenCounter

Lists = Literal["lengths", "ids"]
TimeUnit = Literal["s", "ms", "us", "ns"]
SECONDS: dict[TimeUnit, float] = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
REASONS: dict[str, tuple[str, ...]] = {
    "stop": (
        "stop", "eos", "eos_token", "stop_sequence", "stop_token", "end_turn", "tool_calls", "tool_use", "function_call",
        "completed", "complete", "finished", "done", "success", "succeeded", "content_filter", "refusal", "repetition",
        "pause_turn", "eos_token_id", "stop_str",
    ),
    "length": (
        "length", "max_tokens", "max_length", "max_output_tokens", "max_new_tokens", "max_completion_tokens",
        "truncated", "incomplete", "token_limit", "model_context_window_exceeded", "context_length",
    ),
    "abort": (
        "abort", "aborted", "cancelled", "canceled", "error", "timeout", "failed", "failure", "pending", "in_progress",
        "rejected", "expired",
    ),
}  # fmt: skip
"""The trace's word for a program's finish reason."""
MOST_TOKENS = 2**31 - 1
RUN = "#run"
"""Column of the number of the record that a length was in a list of, where it does not say its RL step."""
_CHUNK = 2048
_SAMPLED = 256
"""Records by which a list's meaning is decided."""
_RESPONSE_KINDS = {"response_sizes", "response_tokens", "sizes", "tokens", "response_ids", "all_ids", "mask", "logprobs",
                   "response_text", "conversation"}  # fmt: skip
_SHARED = {"rl_step", "epoch", "prompt_id", "row_id", "prompt_text", "prompt_ids", "prompt_sizes", "prompt_tokens", "cap",
           "worker"}  # fmt: skip
"""Kinds of fields that hold for all responses of a record."""
_OWN = {"response_sizes": "response_tokens", "sizes": "response_tokens", "prompt_sizes": "prompt_tokens"}
"""Columns of a trace for which names are of several kinds."""
_RESPONSE_IDS = ("response_ids", "response_tokens", "response_text")
_PROMPT_IDS = ("prompt_ids", "prompt_tokens", "prompt_text")
"""Kinds of names under which lists of ids are."""
BY_OPTION = "`tltlab trace import` and `tltlab what-if` take {}"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a user says of a file; None is for the file to say.

    `column` has the lengths, `step_column` the RL steps, `group_column` what is the same for all samples of a prompt:
    each a field's name, with points where it is within objects. `lists` says what numbers in a list are, `time_unit`
    the unit of times. `responses` is their number in each RL step of a log. `tokens` counts texts. `needs` are columns
    of a trace that no record may lack.
    """

    column: str | None = None
    step_column: str | None = None
    group_column: str | None = None
    lists: Lists | None = None
    time_unit: TimeUnit | None = None
    group_size: int | None = None
    max_response_tokens: int | None = None
    responses: int | None = None
    reward_columns: tuple[str, ...] = ()
    tokens: TokenCounter = field(default_factory=NoTokenCounter)
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Records:
    """Some records of a file: cells by column, their places ("line 3"), and the RL step that the file's name says."""

    file: str
    frame: pd.DataFrame
    rl_step: int | None = None
    is_table: bool = False

    def place(self, at: int) -> str:
        label = self.frame.index[at]
        place = label if isinstance(label, str) else f"line {label}"
        return f"{self.file}, {place}"

    def fault(self, at: int, column: str, message: str) -> NoReturn:
        raise TraceError(f"{self.place(at)}, column {column}: {message}")


def text_id(value: Any) -> str:
    """A name for a prompt that is the same in every RL step and does not hold its text: 16 hexadecimal digits."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def flat(fields: Mapping[Any, Any], before: str = "") -> dict[str, Any]:
    """Return a record with the fields of its objects beside its own, by paths such as `usage.completion_tokens`.

    A list of one choice is that choice. Messages stay whole, and `{"type": "length"}` as a finish reason is its type.
    """
    result: dict[str, Any] = {}
    for key, value in fields.items():
        name = f"{before}{key}"
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if is_list(value) and len(value) == 1 and isinstance(value[0], Mapping) and not is_message(value[0]):
            value = value[0] if plain(key) in NAMES["response_text"] else value
        if not isinstance(value, Mapping):
            result[name] = value
        elif plain(key) in NAMES["finish_reason"]:
            result[name] = value.get("type")
        elif is_message(value) and not (value.keys() & {"usage", "output"}):
            result[name] = value
        else:
            result |= flat(value, f"{name}.")
    return result


class Reader:
    """Reads records to numbers, chunk by chunk, and remembers what was used, ignored and assumed."""

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
        """Columns that no column of a trace is read from."""
        return [name for name in self.columns if name not in self._seen]

    def use(self, name: str, column: str) -> None:
        self.used.setdefault(name, column)
        self._seen.add(column)

    def described(self) -> str:
        """Which columns were read, and which were not."""
        names = ", ".join(name if name == column else f"{name} from {column}" for name, column in self.used.items())
        return f"columns read: {names}" + (f" (not read: {', '.join(self.ignored)})" if self.ignored else "")

    def assumed(self) -> list[str]:
        """What was assumed of all that was read."""
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
                f"{self.counts['turns']} responses have several turns, whose tokens count as those of one response: what "
                "tools and users said is not counted as generated"
            )
        if self.counts["aborted"]:
            notes.append(f"{self.counts['aborted']} requests failed or made no token and count as aborted")
        return notes

    def chunks(self, rows: Iterator[tuple[str, Mapping[str, Any]]], file: str, rl_step: int | None) -> Iterator[Records]:
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
            kinds = kind_of(name) | ({"tokens"} if name == self.reading.column else set())
            first = next((item for item in found[0][2] if item is not None), None)
            if isinstance(first, Mapping):
                self._lists[name] = "messages" if is_message(first) else "responses" if kinds & {"response_text"} else ""
            elif is_list(first):
                self._lists[name] = "responses" if kinds & _RESPONSE_KINDS else ""
            elif isinstance(first, str):
                is_text = not kinds & {"response_ids", "all_ids", "tokens", "response_tokens", "logprobs"}
                self._lists[name] = "responses" if "response_text" in kinds else "" if is_text else "ids"
            elif name not in self._lists or self._lists[name] not in ("ids", "lengths"):
                self._lists[name] = self._numbers_in_lists(file, name, kinds, found)

    def _numbers_in_lists(
        self, file: str, name: str, kinds: set[str], found: Sequence[tuple[str, dict[str, Any], Any]]
    ) -> str:
        """What a list of numbers is: "ids", an entry for each token, or "lengths", one for each response."""
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
            f"of {len(cell)} tokens{reason}; say which: {BY_OPTION.format('--lists lengths or --lists ids')}"
        )

    def _evidence_of_values(self, lists: Sequence[Sequence[Any]]) -> str | None:
        """What in lists of numbers shows that they are token ids, which have the vocabulary's size and end alike."""
        values = np.array([item for cell in lists for item in cell if isinstance(item, int | float)])
        varied = len({len(cell) for cell in lists}) > 1
        ends = {cell[-1] for cell in lists}
        cap = self.reading.max_response_tokens or 1 << 17
        if (values < 0).any() or (varied and (values == 0).any()):
            return "has numbers below 1"
        if (values > cap).any():
            return f"has numbers above {cap}"
        if varied and len(lists) > 3 and len(ends) == 1 and max(values) not in ends:
            return f"always ends in {ends.pop()}"
        return None

    def _has_lengths(self, fields: Mapping[str, Any]) -> bool:
        return any(is_list(v) and kind_of(n) & {"response_sizes", "sizes"} for n, v in fields.items())

    def _evidence(self, name: str, fields: Mapping[str, Any], values: Sequence[Any]) -> str | None:
        """What shows that a record is one response, so that a list in it has an entry for each token."""
        for other, value in fields.items():
            if other == name or is_missing(value):
                continue
            kinds = kind_of(other)
            if is_list(value):
                if kinds & {"mask", "logprobs"} and len(value) == len(values) and not is_list(value[0]):
                    return f"has {other} of the same size"
            elif kinds & {"finish_reason", "is_cut", "sample"} or (kinds & {"response_text"} and isinstance(value, str)):
                return f"has one {other}"
            elif kinds & {"response_sizes"} and number(value) <= len(values):
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
                raise TraceError(f"{file}, {place}: lists of different sizes, which should have a response each: {described}")
            size = next(iter(sizes.values()))
            shared, lists = {}, {}
            kinds = {kind for name in fields for kind in kind_of(name)}
            if any(self._lists[name] == "responses" for name in sizes):
                shared[RECORD] = fields.get(RECORD, self._record)
            elif not kinds & {"rl_step", "epoch", "prompt_id", "prompt_text", "prompt_ids"} and not self.reading.step_column:
                shared[RUN] = self._record - 1
            for name, value in fields.items():
                if is_list(value) and len(value) == size and self._lists.get(name) not in ("ids", "messages"):
                    lists[name] = value
                elif kind_of(name) & _SHARED or name in (self.reading.step_column, self.reading.group_column):
                    shared[name] = value
                elif size > 1 and kind_of(name) & {"response_sizes", "response_tokens"} and not is_list(value):
                    raise TraceError(
                        f"{file}, {place}, column {name}: got {shown(value)} for {size} responses ({', '.join(sizes)}); "
                        "a record has to be one response (n = 1), or to have a length for each"
                    )
                elif size == 1:
                    shared[name] = value
            for at in range(size):
                cells = {name: values[at] for name, values in lists.items()}
                result.append((f"{place}, response {at}", shared | flat(cells)))
                objects = [name for name, value in cells.items() if isinstance(value, Mapping)]
                self._lists |= {name: "" for name in objects}
        return result

    def read(self, records: Records) -> pd.DataFrame:
        """Return a row of numbers for each response of some records, with what may say which prompt it answers."""
        frame = records.frame
        self.columns |= dict.fromkeys(name for name in map(str, frame.columns) if not name.startswith("#"))
        own = list(frame.columns)
        size = len(frame)
        failed = self._failed(records)
        lengths, exact = self._response_tokens(records, failed)
        prompts = self._prompt_tokens(records, lengths)
        self._note_turns(records)
        result = pd.DataFrame(
            {"response_tokens": lengths, "is_exact": exact, "prompt_tokens": prompts}, index=np.arange(size)
        )
        result["rl_step"] = self._rl_steps(records)
        result["place"] = [f"line {place}" if isinstance(place, int) else place for place in frame.index]
        result["file"] = records.file
        result["finish_reason"] = self._reasons(records, failed | (lengths == 0))
        result["reward"] = self._rewards(records)
        for name, least in (("cap", 1), ("worker", 0), ("sample", 0)):
            column = self._column(records, name)
            result[name] = np.nan if column is None else self._whole(records, column, least, may_miss=True)
        result["sample_is_ours"] = "sample" in frame
        result = result.assign(**self._times(records))
        result["text"] = self._prompts(records)
        said = self._text_columns(records, "response_text")[:1]
        result["said"] = [text_id(cell) for cell in frame[said[0]]] if said else None
        wanted = self.reading.group_column
        if numbering := matches(own, "row_id"):
            # Logs of several programs call it differently.
            frame = frame.assign(**{numbering[0]: frame[numbering].bfill(axis=1).iloc[:, 0]})
        names = [wanted] if wanted else [*matches(own, "prompt_id"), *numbering]
        for name in names:
            if name not in frame:
                raise TraceError(f"{records.file}: no column {name!r}; there are: {', '.join(map(str, own))}")
            if not (missing := missing_in(frame[name])).any() and not lists_in(frame[name]).any():
                is_text = frame[name].dtype == "str"
                result[f"id:{name}"] = (frame[name] if is_text else frame[name].map(_identity)).to_numpy(object)
            elif wanted:
                records.fault(int(np.argmax(missing)), name, "no value, and it was said to have the groups")
        if RECORD in frame:
            result[RECORD] = frame[RECORD].to_numpy()
        return result

    def _prompts(self, records: Records) -> Any:
        """The `text_id` of each prompt's text, of what a conversation begins with, or of its token ids; else None."""
        frame = records.frame
        for column in self._text_columns(records, "prompt_text"):
            self._seen.add(column)
            return [text_id(cell) for cell in frame[column]]
        for column in self._text_columns(records, "conversation"):
            self._seen.add(column)
            return [text_id(getattr(speech_of(parsed(cell)), "before", "")) for cell in frame[column]]
        for column in self._listed(frame, *_PROMPT_IDS):
            self._seen.add(column)
            return [text_id(cell) for cell in frame[column]]
        return None

    def _whole(
        self, records: Records, column: str, at_least: int, *, may_miss: bool = False, failed: Any = False
    ) -> NDArray[np.float64]:
        """A column's whole numbers; missing ones are NaN where they may be, and 0 where the request failed."""
        cells = records.frame[column]
        values = numbers(cells)
        missing = np.isnan(values)
        if missing.any():
            absent = missing & missing_in(cells) & (failed | np.bool_(may_miss))
            values = np.where(absent & failed, 0.0, values)
            missing = absent
        ok = missing | ((values >= at_least) & (values <= MOST_TOKENS) & (values == np.floor(values)))
        if not ok.all():
            at = int(np.argmin(ok))
            hint = ""
            if isinstance(cells.iloc[at], str) and could_be_thousands(cells.iloc[[at]]):
                hint = "; thousands are written 1234 or 1,234"
            records.fault(at, column, f"got {shown(cells.iloc[at])}, wanted a whole number >= {at_least}{hint}")
        if (text := could_be_thousands(cells)) is not None:
            at = cells.to_list().index(text)
            records.fault(at, column, f"{text} may be {float(text):g} or thousands: write {text.replace('.', '')} or {float(text):g}")
        return values

    def _column(self, records: Records, *kinds: str, fits: Any = None) -> str | None:
        """The column of these kinds: least deep in objects first; of several that say different things none is taken.

        Raises TraceError for several that differ where lengths or RL steps are at stake.
        """
        frame = records.frame  # Other names' cells fill those that are missing.

        def is_there(column: str) -> bool:
            cells = frame[column]
            if fits is not None:
                return bool(fits(column))
            return not (lists_in(cells).any() or missing_in(cells).all())

        found = [c for kind in kinds for c in matches(frame.columns, kind, is_there)]
        if not found:
            return None
        own = _OWN.get(kinds[0], kinds[0])
        chosen = next((column for column in found if plain(column) == plain(own)), found[0])
        for other in found if len(found) > 1 else ():
            differs = (numbers(frame[other]) != numbers(frame[chosen])) & ~(
                missing_in(frame[other]) | missing_in(frame[chosen])
            )
            same_depth = other.count(".") == chosen.count(".")
            if differs.any() and same_depth and plain(chosen) != plain(own) and kinds[0] in (*_OWN, "rl_step"):
                option = "--step-column" if own == "rl_step" else "--column"
                raise TraceError(
                    f"{records.place(int(np.argmax(differs)))}: columns {chosen} and {other} differ and either could be "
                    f"{own}: keep one, call it {own}, or name one ({BY_OPTION.format(option)})"
                )
            frame[chosen] = frame[chosen].where(~missing_in(frame[chosen]), frame[other])
        self._seen.update(found)
        if own != "total":
            self.use({"cap": "max_response_tokens"}.get(own, own), chosen)
        return chosen

    def _given(self, records: Records, name: str) -> str:
        """The column that an option names, as it is written in the file."""
        own = list(map(str, records.frame.columns))
        column = name if name in own else next((c for c in own if plain(c) == plain(name)), None)
        if column is None:
            raise TraceError(f"{records.place(0)}: no column {name!r}; there are: {', '.join(own)}")
        return column

    def _response_tokens(self, records: Records, failed: NDArray[np.bool_]) -> tuple[Any, NDArray[np.bool_]]:
        """Tokens of each response, and whether they are the engine's, not a count of the text; 0 for failed requests."""
        frame, size = records.frame, len(records.frame)
        values, exact = np.full(size, np.nan), np.full(size, True)
        lists = [c for k in ("mask", *_RESPONSE_IDS, "logprobs") for c in self._listed(frame, k)]
        texts = self._text_columns(records, "response_text") or self._text_columns(records, "conversation")
        chosen = self.reading.column and self._given(records, self.reading.column)
        if chosen:
            self.use("response_tokens", chosen)
            if self._lists.get(chosen) == "ids":
                lists, texts = [chosen], []
                chosen = None
            elif np.isnan(numbers(frame[chosen])).all() and self._text_of(records, chosen):
                lists, texts = [], [chosen]
                chosen = None
            else:
                values = self._whole(records, chosen, 0, failed=failed)
                return values, exact
        chosen = self._column(records, "response_sizes", "response_tokens") or self._column(records, "sizes", "tokens")
        others = self._listed(frame, "all_ids", "tokens")
        if chosen:
            has_others = bool(lists or texts)
            values = self._whole(records, chosen, 0, may_miss=has_others, failed=failed)
            self._compare(frame, chosen, values, [*lists, *others])
        for column in lists:
            values = self._fill(values, failed, column, lambda column=column: self._sizes(frame, column))
        if np.isnan(values[~failed]).any():
            values = self._fill_from_whole(records, values, failed, [] if texts else others)
        if (open_ := np.isnan(values) & ~failed).any() and texts:
            column = texts[0]
            self.use("response_tokens", column)
            values[open_] = self._count(records, column, np.flatnonzero(open_))
            exact = exact & ~open_
            self.counts["text"] += int(open_.sum())
        values = np.where(np.isnan(values) & failed, 0.0, values)
        if np.isnan(values).all() and records.is_table and (chosen := self._only_numbers(records)):
            self.use("response_tokens", chosen)
            values = self._whole(records, chosen, 0, failed=failed)
        if np.isnan(values).any():
            at = int(np.argmax(np.isnan(values)))
            fields = ", ".join(n for n in map(str, frame.columns) if n[0] != "#" and not is_missing(frame[n].iloc[at]))
            raise TraceError(
                f"{records.place(at)}: no length of the response; wanted response_tokens, output_len, usage, token ids or "
                f"a text; there are: {fields}; name it ({BY_OPTION.format('--column')})"
            )
        return values, exact

    def _only_numbers(self, records: Records) -> str | None:
        """The only column of a table, but for those that are known as something else, or the only one of numbers."""
        known = set(self.used.values()) | {c for c in records.frame.columns if kind_of(str(c)) - {"reward"}}
        left = [str(name) for name in records.frame.columns if name not in known]
        numeric = [name for name in left if not np.isnan(numbers(records.frame[name])).any()]
        chosen = next((group[0] for group in (numeric, left) if len(group) == 1), None)
        if chosen is None:
            raise TraceError(
                f"{records.file}: cannot tell which column holds the lengths: {', '.join(map(str, records.frame.columns))}; "
                f"name one ({BY_OPTION.format('--column')})"
            )
        return chosen

    def _listed(self, frame: pd.DataFrame, *kinds: str) -> list[str]:
        """Columns of these kinds whose lists have an entry for each token."""
        return [
            column for kind in kinds for column in matches(frame.columns, kind)
            if self._lists.get(column) == "ids" and lists_in(frame[column]).any()
        ]  # fmt: skip

    def _ids(self, frame: pd.DataFrame, column: str) -> list[Ids | None]:
        return [Ids.of(cell) if is_list(cell) else None for cell in frame[column]]

    def _sizes(self, frame: pd.DataFrame, column: str) -> NDArray[np.float64]:
        """Tokens of each list: the ones of a mask, else its entries without padding; NaN where there is no list."""
        lists = self._ids(frame, column)
        sizes = np.array([np.nan if ids is None else ids.size for ids in lists])
        if "mask" in kind_of(column):
            ones = np.array([np.nan if ids is None else ids.ones or ids.size for ids in lists])
            if (left := int(np.nansum(sizes - ones))) > 0:
                self.notes[f"{column}: its ones are the tokens generated; zeros, such as tools' tokens, are left out"] = None
            if any(ids is not None and ids.size and not ids.ones for ids in lists):
                self.notes[f"{column}: where it has no ones its size is taken"] = None
            return ones if left else sizes
        padded = [ids for ids in lists if ids is not None and ids.tail > 1]
        if len(lists) > 1 and len(set(sizes)) == 1 and 2 * len(padded) > len(lists) and "logprobs" not in kind_of(column):
            self.notes[f"{column}: lists of one size that end in repeated ids: these are taken for padding"] = None
            return np.array([ids.size - (ids.tail if ids.tail > 1 else 0) if ids else np.nan for ids in lists])
        return sizes

    def _fill(self, values: Any, failed: Any, column: str, sizes: Any) -> Any:
        open_ = np.isnan(values) & ~failed
        if open_.any():
            self.use("response_tokens", column)
            values = np.where(open_, sizes(), values)
        return values

    def _compare(self, frame: pd.DataFrame, chosen: str, values: Any, columns: Sequence[str]) -> None:
        """Note lists whose size is not the recorded number, which counts."""
        for column in columns:
            self._seen.add(column)
            lists = self._ids(frame, column)
            whole = bool(kind_of(column) & {"all_ids", "tokens"})
            differ = sum(
                ids is not None and (ids.size < value if whole else value not in (ids.size, ids.ones))
                for ids, value in zip(lists, values, strict=True)
            )
            if differ:
                self.counts[f"{column}\n{chosen}"] += differ

    def _fill_from_whole(self, records: Records, values: Any, failed: Any, others: Sequence[str]) -> Any:
        """Fill in what lists or numbers of prompt and response together say, less the prompt."""
        frame = records.frame
        known = self._known_prompts(records)
        for column in others:
            lists = self._ids(frame, column)
            sizes = np.array([np.nan if ids is None else ids.size for ids in lists])
            alone = plain(column).rpartition(".")[2] in ("tokens", "tokenids", "ids", "toks") or column == self.reading.column
            begins = [
                is_list(cell) and any(is_list(p) and len(p) and list(cell[: len(p)]) == list(p) for p in prompts)
                for cell, *prompts in zip(frame[column], *(frame[c] for c in self._listed(frame, *_PROMPT_IDS)), strict=True)
            ]
            if known is not None and (not alone or all(begins)):
                values = self._fill(values, failed, column, lambda sizes=sizes: sizes - known)
            elif alone:
                values = self._fill(values, failed, column, lambda sizes=sizes: sizes)
                self.notes[f"{column} are taken for the tokens of the response alone"] = None
        total = self._column(records, "total") if known is not None and np.isnan(values[~failed]).any() else None
        if total is not None:
            values = self._fill(values, failed, total, lambda: self._whole(records, total, 0, may_miss=True) - known)
            self.notes[f"response tokens are {total} less the prompt's"] = None
        return values

    def _known_prompts(self, records: Records) -> Any:
        """Tokens of each prompt as numbers or lists say; None where neither does."""
        frame = records.frame
        if (column := self._column(records, "prompt_sizes", "prompt_tokens")) is not None:
            return self._whole(records, column, 0, may_miss=True)
        if columns := self._listed(frame, *_PROMPT_IDS):
            column = columns[0]
            self.use("prompt_tokens", column)
            lists = self._ids(frame, column)
            sizes = np.array([np.nan if ids is None else ids.size for ids in lists])
            padded = [ids for ids in lists if ids is not None and ids.head > 1]
            if len(lists) > 1 and len(set(sizes)) == 1 and 2 * len(padded) > len(lists):
                self.notes[f"{column}: lists of one size that begin with repeated ids: these are taken for padding"] = None
                return np.array([ids.size - (ids.head if ids.head > 1 else 0) if ids else np.nan for ids in lists])
            return sizes
        return None

    def _prompt_tokens(self, records: Records, lengths: Any) -> Any:
        """Tokens of each prompt: as recorded, of a list, the whole less the response, or of its text; NaN is unknown."""
        frame = records.frame
        known = self._known_prompts(records)
        known = np.full(len(frame), np.nan) if known is None else known.copy()
        for column in self._listed(frame, "mask"):
            for at, mask in enumerate(frame[column]):
                # A prompt's length that is the whole's.
                lead = next((i for i, one in enumerate(mask) if one), 0) if is_list(mask) else 0
                known[at] = lead if lead and known[at] >= lead + lengths[at] else known[at]
        for column in self._listed(frame, "all_ids", "tokens") if np.isnan(known).any() else ():
            if self.used.get("response_tokens") == column:
                continue
            masks, answers = self._listed(frame, "mask"), self._listed(frame, *_RESPONSE_IDS)
            is_prompt = plain(column).endswith("inputids")
            for at, cell in enumerate(frame[column]):
                if not is_list(cell) or not np.isnan(known[at]):
                    continue
                answer = next((list(frame[c].iloc[at]) for c in answers if is_list(frame[c].iloc[at])), None)
                mask = next((frame[c].iloc[at] for c in masks if is_list(frame[c].iloc[at])), ())
                if len(mask) == len(cell):
                    known[at] = next((i for i, one in enumerate(mask) if one), len(cell))
                elif answer is not None and is_prompt and (not answer or list(cell[-len(answer) :]) != answer):
                    known[at] = len(cell)
                elif is_prompt and answer is None and not mask:
                    known[at] = len(cell)
                elif len(cell) >= lengths[at]:
                    known[at] = len(cell) - max(lengths[at], len(mask) if len(mask) <= len(cell) else 0)
            self.use("prompt_tokens", column)
        total = self._column(records, "total") if np.isnan(known).all() else None
        if total is not None:
            whole = self._whole(records, total, 0, may_miss=True) - lengths
            known = np.where(whole >= 0, whole, np.nan)
        open_ = np.flatnonzero(np.isnan(known))
        texts = self._text_columns(records, "prompt_text") or self._text_columns(records, "conversation")
        if len(open_) and texts and not isinstance(self.reading.tokens, NoTokenCounter):
            self.use("prompt_tokens", texts[0])
            known[open_] = self._count(records, texts[0], open_, is_prompt=True)
            self.counts["text"] += len(open_)
        elif len(open_) and "prompt_tokens" in self.reading.needs:
            raise TraceError(
                f"{records.place(int(open_[0]))}: no prompt length; wanted a field prompt_tokens or input_len, there are: "
                f"{', '.join(map(str, frame.columns))}"
            )
        return known

    def _text_columns(self, records: Records, kind: str) -> list[str]:
        return [column for column in matches(records.frame.columns, kind) if self._text_of(records, column)]

    def _text_of(self, records: Records, column: str) -> bool:
        """Whether the first cell with a value is a text or a conversation; a text of a table that is no number."""
        cells = records.frame[column]
        first = next((cell for cell in cells if not is_missing(cell)), None)
        if first is None:
            return bool((cells == "").any()) and not records.is_table
        if isinstance(first, str):
            return not records.is_table or bool(np.isnan(numbers(cells)).all())
        return self._lists.get(column) != "ids" and speech_of(first) is not None

    def _count(self, records: Records, column: str, rows: Any, *, is_prompt: bool = False) -> list[int]:
        """Tokens of the texts in some rows of a column: of a response what the model said, at least 1, its end."""
        texts, cells = [], records.frame[column]
        is_conversation = "conversation" in kind_of(column)
        for at in rows:
            cell = parsed(cells.iloc[at]) if records.is_table or is_conversation else cells.iloc[at]
            if (speech := speech_of(cell)) is None:
                records.fault(int(at), column, f"got {shown(cells.iloc[at])}, wanted a text or messages")
            for kind in () if is_prompt and is_conversation else speech.unread:
                self.counts[f"block {kind}"] += 1
            if is_prompt:
                texts.append("\n".join(speech.before if is_conversation and speech.turns else [*speech.others, *speech.generated]))
                continue
            if is_conversation and not speech.turns:
                records.fault(int(at), column, "no message of the model: these are prompts without responses")
            texts.append("\n".join(speech.generated))
        unique = list(dict.fromkeys(texts))
        count_of = dict(zip(unique, self.reading.tokens.count(unique), strict=True))
        return [count_of[text] if is_prompt else max(1, count_of[text]) for text in texts]

    def _note_turns(self, records: Records) -> None:
        """Count responses in whose messages others speak after the model."""
        for kind in ("response_text", "conversation"):
            for column in matches(records.frame.columns, kind):
                if self._lists.get(column) == "messages":
                    spoken = [speech_of(cell) for cell in records.frame[column] if is_list(cell)]
                    several = sum(s is not None and (s.turns > 1 or len(s.others) > len(s.before) > 0) for s in spoken)
                    self.counts["turns"] += several
                    self._seen.add(column)
                    return

    def _rl_steps(self, records: Records) -> Any:
        frame = records.frame
        if self.reading.step_column is not None:
            column: str | None = self._given(records, self.reading.step_column)
            self.use("rl_step", str(column))
        else:
            column = self._column(records, "rl_step")
            if column is None and records.is_table:
                column = self._column(records, "epoch")
                if column is not None:
                    self.use("rl_step", column)
        values = np.full(len(frame), np.nan)
        if column is not None:
            values = self._whole(records, column, 0, may_miss=records.rl_step is not None)
        elif RUN in frame:
            values = frame[RUN].to_numpy(np.float64)
            if len(set(values)) > 1:
                self.notes["each list of lengths is an RL step"] = None
        if records.rl_step is None and "rl_step" in self.reading.needs and np.isnan(values).any():
            at = int(np.argmax(np.isnan(values)))
            raise TraceError(
                f"{records.place(at)}: no step; wanted a field step, there are: {', '.join(map(str, frame.columns))}"
            )
        return np.where(np.isnan(values), records.rl_step or 0, values).astype(np.int64)

    def _failed(self, records: Records) -> NDArray[np.bool_]:
        """Whether each request failed, as an error, a success or a status code says."""
        frame = records.frame
        failed = np.full(len(frame), False)
        for column in matches(frame.columns, "error"):
            failed |= np.array([not is_missing(c) and c is not False and c not in ("False", "0", 0, [], {}) for c in frame[column]])
            self._seen.add(column)
        for column in matches(frame.columns, "success"):
            failed |= np.array([number(cell, booleans=True) == 0 for cell in frame[column]])
            self._seen.add(column)
        for column in matches(frame.columns, "status_code"):
            failed |= numbers(frame[column]) >= 400
            self._seen.add(column)
        for column in matches(frame.columns, "status"):
            failed |= np.array([str(cell).lower() in REASONS["abort"] for cell in frame[column]])
        return failed

    def _reasons(self, records: Records, aborted: NDArray[np.bool_]) -> Any:
        """The trace's words for how each response ended; None is unknown."""
        frame = records.frame
        reasons: Any = np.full(len(frame), None, object)
        known = {word: reason for reason, words in REASONS.items() for word in words}
        for kind in ("finish_reason", "status", "is_cut"):
            for column in matches(frame.columns, kind, lambda c: not missing_in(frame[c]).all())[:1]:
                for at, cell in enumerate(frame[column]):
                    if is_missing(cell) or reasons[at] is not None:
                        continue
                    if kind == "is_cut":
                        reasons[at] = "length" if number(cell, booleans=True) == 1 else "stop"
                    elif (reason := known.get(str(cell).strip().lower().rpartition(".")[2])) is not None:
                        reasons[at] = reason
                    elif kind == "finish_reason" and not isinstance(cell, str):
                        reasons[at] = "stop"  # The id of the token that stopped it.
                    elif kind == "finish_reason":
                        records.fault(at, column, f"got {shown(cell)}, known are: {', '.join(sorted(known))}")
                if kind != "status" or any(reason is not None for reason in reasons):
                    self.use("finish_reason", column)
        reasons[aborted] = "abort"
        self.counts["aborted"] += int(aborted.sum())
        return reasons

    def _rewards(self, records: Records) -> Any:
        """The reward of each response: the sum of the named columns, of what is known; NaN is unknown."""
        frame = records.frame
        strict = "reward" in self.reading.needs or bool(self.reading.reward_columns)
        names = list(self.reading.reward_columns)
        if not names:
            names = matches(frame.columns, "reward", lambda c: not lists_in(frame[c]).any())[:1]
            if not strict and any(np.isnan(numbers(frame[c], booleans=True)[~missing_in(frame[c])]).any() for c in names):
                return np.full(len(frame), np.nan)
        columns = []
        for name in names:
            column = self._given(records, name)
            self.use("reward", column)
            values = numbers(frame[column], booleans=True)
            wrong = ~np.isfinite(values) & ~missing_in(frame[column])
            if wrong.any() and strict:
                at = int(np.argmax(wrong))
                records.fault(at, column, f"got {shown(frame[column].iloc[at])}, wanted a number")
            columns.append(np.where(np.isfinite(values), values, np.nan))
        if not columns:
            return np.full(len(frame), np.nan)
        stacked = np.stack(columns)
        return np.where(np.isnan(stacked).all(axis=0), np.nan, np.nansum(stacked, axis=0))

    def _times(self, records: Records) -> dict[str, Any]:
        """Seconds of submission, first token and finish on the dump's clock; NaN where the first is unknown."""
        nothing = np.full(len(records.frame), np.nan)
        found = {kind: nothing if (time := self._time(records, kind)) is None else time for kind in TIMES}
        submit = found["t_submit"]
        ends = {
            "t_first_token": np.where(np.isnan(found["t_first_token"]), submit + found["ttft"], found["t_first_token"]),
            "t_finish": np.where(np.isnan(found["t_finish"]), submit + found["latency"], found["t_finish"]),
        }
        for name, times in ends.items():
            if (times < submit).any():
                at = int(np.argmax(times < submit))
                records.fault(at, name, f"got {times[at]}, before the start {submit[at]}")
        return {"t_submit": submit} | ends

    def _time(self, records: Records, kind: str) -> Any:
        """A kind of time in seconds; None where no column has it, or its unit cannot be known."""
        frame = records.frame
        columns = matches(frame.columns, kind, lambda c: not missing_in(frame[c]).all() and not lists_in(frame[c]).any())
        dated, result = None, None
        for column in columns:
            values = numbers(frame[column])
            if np.isnan(values[~missing_in(frame[column])]).any():
                dated = dated or column
                continue
            self.use(kind, column)
            scale = unit_of(column) or (SECONDS[self.reading.time_unit] if self.reading.time_unit else None)
            if scale is None and column not in self._scales:
                self._scales[column] = self._scale(frame, kind, column, values)
            if (scale := scale or self._scales[column]) is not None:
                result = values * scale if result is None else np.where(np.isnan(result), values * scale, result)
        if result is not None:
            return result
        if dated is None or kind in ("ttft", "latency"):
            return None
        times = pd.to_datetime(frame[dated].astype(object), errors="coerce", utc=True, format="mixed")
        is_date = frame[dated].map(lambda cell: not isinstance(cell, str) or any(map(str.isdigit, cell)))
        wrong = (times.isna() | ~is_date) & ~missing_in(frame[dated])
        if wrong.any():
            at = int(np.argmax(wrong))
            records.fault(at, dated, f"got {shown(frame[dated].iloc[at])}, wanted a time")
        self._seen.add(dated)
        return (times - pd.Timestamp(0, tz="utc")).dt.total_seconds().to_numpy()

    def _scale(self, frame: pd.DataFrame, kind: str, column: str, values: Any) -> float | None:
        """Seconds of the unit of a time whose name does not say it, by its size and by the file's other columns."""
        names = {plain(name) for name in frame.columns}
        largest = np.nanmax(np.abs(values), initial=0.0)
        whole = bool((np.isnan(values) | (values == np.floor(values))).all())
        if "hashids" in names and whole:
            self.notes[f"{column}: milliseconds, as Mooncake's traces have them"] = None
            return 1e-3
        if kind not in ("ttft", "latency"):
            for least, unit in ((1e17, "ns"), (1e14, "us"), (1e11, "ms")):
                if largest >= least:
                    self.notes[f"{column}: taken for {unit} since 1970, by its size"] = None
                    return SECONDS[unit]  # type: ignore[index]
        if "logtype" in names or largest >= 1e8 or not whole or largest < (100 if kind in ("ttft", "latency") else 1000):
            return 1.0
        unknown = f"{column} has whole numbers without a unit: times are not read ({BY_OPTION.format('--time-unit s or ms')})"
        self.notes[unknown] = None
        return None


def _identity(cell: Any) -> str:
    """What names a prompt, the same however a number is written."""
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)
    return json.dumps(cell, sort_keys=True, default=str) if isinstance(cell, list | dict) else str(cell)
