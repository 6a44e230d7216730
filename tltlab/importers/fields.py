"""Fields of records: names under which programs keep what a trace needs (`fields.toml`), and values as written.

A name is compared by its letters and digits in lower case: `response_tokens` is also "Response tokens" and
`responseTokens`. A field within objects has its path, `usage.completion_tokens`, and is found by its last part. Values
are numbers, lists of token ids, texts and conversations.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache, lru_cache
from importlib.resources import files
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tltlab.files import parse_json

_TABLE = tomllib.loads(files(__package__).joinpath("fields.toml").read_text(encoding="utf-8"))


def _expanded(name: str) -> Iterator[str]:
    """The names that a name of `fields.toml` stands for."""
    parts = re.split(r"<(\w+)>", name)
    yield from map("".join, product(*(_TABLE["lists"][part] if at % 2 else [part] for at, part in enumerate(parts))))


NAMES = {kind: tuple(n for name in names for n in _expanded(name)) for kind, names in _TABLE["names"].items()}
"""Names by kind, the first that is there counts."""

_IN_ENVELOPES, ENVELOPES = set(_TABLE["envelopes"]["kinds"]), set(_TABLE["envelopes"]["names"])
REASONS: dict[str, list[str]] = _TABLE["finish_reasons"]
KINDS = {meaning: set(kinds) for meaning, kinds in _TABLE["kinds"].items()}
"""Kinds by what their fields mean in a record."""
APART = set(_TABLE["apart"]["names"])
"""Names of counts that are beside the response's or the prompt's."""
WRAPPERS = _TABLE["envelopes"]["lists"]
FORMATS = _TABLE["formats"]


@lru_cache(1 << 12)
def plain(name: object) -> str:
    """Return a name by its letters and digits, parts of a path by their points.

    >>> plain("Response Tokens"), plain("usage.completionTokens")
    ('responsetokens', 'usage.completiontokens')
    """
    return re.sub(r"[^a-z0-9.]", "", str(name).lower())


def matches(columns: Iterable[str], *kinds: str, fits: Callable[[str], Any] = lambda column: True) -> list[str]:
    """Return the columns with a name of the kinds that fit, kind by kind.

    Of a kind those least deep in objects are first, then in the order of names.
    """
    found = []
    for place, kind in enumerate(kinds):
        order = {name: at for at, name in enumerate(NAMES[kind])}
        for column in columns:
            *around, last = plain(column).split(".")
            name = next((n for n in ("".join(around[-1:]) + last, last) if n in order), None)
            if kind == "row_id" and around and last in ("index", "idx"):
                continue  # Words of a choice among several.
            if name is None or (kind in _IN_ENVELOPES and not ENVELOPES.issuperset(around)) or not fits(column):
                continue
            found.append((place, len(around), order[name], column))
    return [column for *_, column in sorted(found, key=lambda item: item[:3])]


@cache
def kind_of(column: str) -> frozenset[str]:
    """Return the kinds that a column's name is one of."""
    return frozenset(kind for kind in NAMES if matches([column], kind))


_NULLS = set(_TABLE["cells"]["missing"])


def is_missing(cell: Any) -> bool:
    """Return True for an empty cell: null, NaN, or a text that stands for one of them.

    >>> [is_missing(cell) for cell in (None, "", "None", float("nan"), 0, "0", [])]
    [True, True, True, True, False, False, False]
    """
    if isinstance(cell, str):
        return cell.strip().lower() in _NULLS
    return bool(pd.api.types.is_scalar(cell) and pd.isna(cell))


def missing_in(cells: pd.Series[Any]) -> NDArray[np.bool_]:
    """Return whether each cell `is_missing`."""
    if cells.dtype == "str":
        return (cells.isna() | cells.str.strip().str.lower().isin(_NULLS)).to_numpy(bool)
    return cells.isna().to_numpy() if cells.dtype != object else np.array([is_missing(cell) for cell in cells], bool)


def lists_in(cells: pd.Series[Any]) -> NDArray[np.bool_]:
    """Return whether each cell is a list."""
    if cells.dtype != object:
        return np.zeros(len(cells), bool)
    return np.array([is_list(cell) for cell in cells], bool)


def number(cell: Any, *, booleans: bool = False) -> float:
    """Return the number in a cell, NaN where there is none, and infinite for what no float holds.

    >>> number("12"), number("1,234"), number("True"), number("True", booleans=True), number(10**400)
    (12.0, nan, nan, 1.0, inf)
    """
    if not booleans and isinstance(cell, bool | np.bool_):
        return float("nan")
    try:
        if isinstance(cell, str):
            text = cell.strip()
            if booleans and text.lower() in ("true", "false"):
                return float(text.lower() == "true")
            # Python would take `1_2` for 12.
            return float("nan") if "_" in text else float(text)
        return float(cell) if isinstance(cell, int | float | np.number | np.bool_ | Decimal) else float("nan")
    except OverflowError:
        return float("inf")
    except ValueError:
        return float("nan")


def of_many(cell: Any) -> Any:
    """Return "5" for "5/100", the fifth of a hundred; any other cell as it is."""
    return (
        cell.partition("/")[0] if isinstance(cell, str) and re.fullmatch(r"\s*+\d++\s*+/\s*+\d++\s*+", cell) else cell
    )


def numbers(cells: pd.Series[Any], *, booleans: bool = False) -> NDArray[np.float64]:
    """Return the `number` of each cell."""
    if pd.api.types.is_numeric_dtype(cells) and (booleans or cells.dtype != bool):
        return cells.to_numpy(np.float64, na_value=np.nan)
    if cells.dtype == "str" and (fast := pd.to_numeric(cells, errors="coerce")).notna().all():
        return fast.to_numpy(np.float64)
    return np.array([number(cell, booleans=booleans) for cell in cells], np.float64)


def is_list(cell: Any) -> bool:
    return isinstance(cell, list | tuple | np.ndarray)


def parsed(cell: Any) -> Any:
    """Return the list or object that a text of JSON, or one that Python printed, holds; any other cell as it is.

    >>> parsed("[np.int64(3), 4]"), parsed("[3 4]"), parsed("[3 ... 4]"), parsed("{'role': 'user'}")
    ([3, 4], [3, 4], '[3 ... 4]', {'role': 'user'})
    """
    if not isinstance(cell, str) or cell.lstrip()[:1] not in ("[", "{"):
        return cell
    with suppress(ValueError):
        return parse_json(cell)
    text = re.sub(r"np\.\w+\(([^()]*)\)", r"\1", cell.strip())
    if re.fullmatch(r"\[[-+\d.e\s]*\]", text) and "..." not in text:
        text = re.sub(r"(?<=\S)\s+(?=\S)", ", ", text)
    with suppress(ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return ast.literal_eval(text)
    return cell


_MESSAGES: dict[str, list[str]] = _TABLE["messages"]


@dataclass
class ConversationTexts:
    """The texts of a conversation: those generated, and the rest; `unread` are kinds of blocks without text."""

    generated: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)
    turns: int = 0
    before: list[str] = field(default_factory=list)
    """Texts before the first one generated."""


def is_message(value: Any) -> bool:
    """Return True if a JSON object is a message of a conversation, or a block of one."""
    if not isinstance(value, Mapping):
        return False
    named = value.get("type") if isinstance(value.get("type"), str) else value.get("role") or value.get("from")
    return isinstance(named, str) and ("index" not in value or "role" in value or "from" in value)


def conversation_texts(value: Any) -> ConversationTexts | None:
    """Return the texts of a cell that holds a text, or messages or blocks; None where it holds neither.

    A message consists of its content (text or blocks), its reasoning, and the names and arguments of its tool calls.
    Messages of tools, users and systems are not generated, those without a role are. A turn is a run of generated
    messages.
    """
    speech = ConversationTexts()
    if value is None or isinstance(value, str):
        speech.generated.append(value or "")
        speech.turns = 1
        return speech
    messages = [value] if isinstance(value, Mapping) else list(value) if is_list(value) else None
    if messages is None or not all(
        isinstance(m, str) or is_message(m) or "content" in m for m in messages if m or m == ""
    ):
        return None
    was_generated = False
    for message in messages:
        text = "".join(_texts(message, speech.unread))
        if is_generated := _is_generated(message):
            speech.generated.append(text)
            speech.turns += not was_generated
        else:
            (speech.others if speech.turns else speech.before).append(text)
        was_generated = is_generated
    speech.others = [*speech.before, *speech.others]
    return speech


def _is_generated(message: Any) -> bool:
    if not isinstance(message, Mapping):
        return True
    role = str(message.get("role") or message.get("from") or "").lower()
    if role:
        return role not in _MESSAGES["others"]
    return not str(message.get("type") or "").endswith(("_output", "_result"))


def _texts(value: Any, unread: set[str]) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif is_list(value):
        for item in value:
            yield from _texts(item, unread)
    elif isinstance(value, Mapping):
        kind = str(value.get("type") or "")
        calls = value.get("tool_calls")
        if is_list(calls):
            for call in calls or ():
                yield from _call(call)
        elif isinstance(call := value.get("function_call"), Mapping):
            yield from _call(call)
        if kind in _MESSAGES["calls"]:
            yield from _call(value)
            return
        texts = [value[name] for name in _MESSAGES["texts"] if value.get(name) is not None]
        texts += [value[name] for name in _MESSAGES["outputs"] if value.get(name) is not None and not texts]
        if not texts and kind and "role" not in value and kind != "reasoning":
            unread.add(kind)
        for text in texts:
            yield from _texts(text, unread)


def _call(call: Any) -> Iterator[str]:
    """The name and the arguments of a tool call."""
    inner = call.get("function") if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping) else call
    if isinstance(inner, Mapping):
        yield str(inner.get("name") or "")
        arguments = next((inner[n] for n in _MESSAGES["arguments"] if inner.get(n) is not None), "")
        yield arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    elif call is not None:
        yield str(call)
