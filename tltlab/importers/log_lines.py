"""Lines of logs as metrics of RL steps: fields of a line, whole or cut, and lines that a terminal wrapped.

A number counts where its end is there: a separator, a bracket or the end of a line that nothing cut. Lines that a
terminal, a file of fixed columns or a screenshot tool wrapped are joined where that yields more metrics than the lines
alone.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tltlab.files import parse_json

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\]8;[^\x07\x1b]*(?:\x07|\x1b\\)")
_RAY = re.compile(r"\(\w+ pid=\d+(?:, ip=[\d.]+)?\) ?")
_RAY_REPEATS = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
_NEARLY_ALL = 0.75
"""Share of lines from which the name that they end with is the usual one."""
_DIGITS_LESS, _MANY_DIGITS = 3, 6
"""Digits that a number may have less than others where these have so many that all are written."""
_SHORT = 200
"""Letters of a line that may lack what frameworks write of the whole RL step."""
_START_LETTERS = 16
"""Letters that show how lines of the log begin, apart from digits."""
_MOST_LETTERS = 1 << 18
"""Most letters of joined lines."""
_TRIMMED = 2
"""Blanks at most that a terminal takes from the end of a wrapped line: those of a separator."""
_CONTINUES = re.compile(
    r"\s*[-+\d.eE]*\s*(- [\w/@.-]+:|,\s*['\"]\w)|\s*[\w/@.-]+:\s*\S+ - |\s*['\"][\w/@.-]+['\"]\s*:|\s*\}"
)
"""A line in the midst of a record: the end of a number and a separator, or the end of a name and its value."""
_DICT_ITEM = re.compile(
    r"""(['"])(.+?)\1\s*:\s*('[^']*'|"[^"]*"|\[[^\[\]]*\]|[^,{}'"\[\]()]+(?:\([^()]*\))?)\s*(?=[,}])"""
)
_REST = re.compile(r"[\d.]+(?:[eE][-+]?\d+)?")
"""A number alone, which may be the rest of that of the line before."""
_ROW = re.compile(r"[│┃|]\s*[A-Za-z][\w/.@-]*\s*[│┃|]")
"""The begin of a row of names and values: a bar there would end the row before."""
_EQUALS = re.compile(r"([\w./@-]+)=(\S+?)(?:[,;|]*)(?=\s|$)")


@dataclass(frozen=True, slots=True)
class Line:
    """A line without colours; `is_full` where it is as long as others that are the longest.

    `is_ended` where a new line follows, `is_last` where no other text does.
    """

    number: int
    text: str
    is_ended: bool = True
    is_last: bool = False
    is_full: bool = False


@dataclass(frozen=True, slots=True)
class Form:
    """How a line of metrics begins, and the name in `ITEMS` of how its items are written.

    `block` stands before names in a block that are not in `names`, which has keys for what consoles print.
    """

    begins: re.Pattern[str]
    items: str
    block: str = ""
    names: Mapping[str, str] = field(default_factory=dict)

    def key(self, name: str) -> str:
        return self.names.get(name) or (f"{self.block}{name}" if self.items == "bullet" else name)


@dataclass(frozen=True, slots=True)
class LoggedFields:
    """Fields of a line; `last` is the field that ends with the line (None: each field has its own end).

    `is_cut`: the line was cut before its end.
    """

    rl_step: int | None
    line: Line
    form: Form
    fields: Mapping[str, Any]
    last: str | None = None
    is_cut: bool = False


def lines_of(binary: Iterable[bytes]) -> Iterator[Line]:
    """Return lines without colours; a progress bar ends in a carriage return, so several texts share a line."""
    before: Line | None = None
    for number, line in enumerate(binary, 1):
        text = _COLOURS.sub("", line.decode("utf-8", "replace"))
        parts = text.replace("\r", "\n").splitlines()
        for at, part in enumerate(parts, 1):
            if before is not None:
                yield before
            before = Line(number, part, is_ended=at < len(parts) or text.endswith("\n"))
    if before is not None:
        yield replace(before, is_last=True)


def entries_of(lines: Iterable[Line], forms: Sequence[Form], hints: Sequence[str]) -> Iterator[LoggedFields]:
    """The lines that have one of the forms, and a hint. Lines of a block have the block's number."""
    block: int | None = None
    in_block: dict[str, Any] = {}
    num_reports = 0
    for line in lines:
        if not any(hint in line.text for hint in hints):
            continue
        form = next((form for form in forms if form.begins.search(line.text)), None)
        if form is None:
            continue
        found = list(form.begins.finditer(line.text))
        if form.items not in _SEVERAL:
            found = [next((match for match in found if any(match.groups())), found[0])]
        # Two processes may have written into one line.
        ends = [*(match.start() for match in found[1:]), len(line.text)]
        for match, end in zip(found, ends, strict=True):
            rl_step = next((int(number) for number in match.groups() if number), None)
            if form.items == "open":
                block, in_block = rl_step, {}
                continue
            num_reports += form.items == "report"
            if form.items in _IN_BLOCKS:
                rl_step = block if form.items != "reported" else max(num_reports, 1)
                if rl_step is None:
                    continue
            elif form.items == "report":
                rl_step = num_reports
            fields, last, is_cut = ITEMS[form.items](line.text[match.end() : end])
            if form.items in ("table", "bullet"):
                if any(in_block.get(name, value) != value for name, value in fields.items()):
                    block = None  # The line that begins the next block is lost.
                    continue
                in_block |= fields
            if end < len(line.text) and last is not None:
                fields, last, is_cut = _without(fields, last), None, True
            yield LoggedFields(rl_step, line, form, fields, last, is_cut)


def settings_in(lines: Iterable[Line], patterns: Mapping[str, Sequence[re.Pattern[str]]]) -> dict[str, str | None]:
    """Return the values of settings in a printed configuration, each from the first of its patterns that matches.

    A setting with several different values is None, a setting without a match is left out.
    """
    said: dict[str, dict[int, set[str]]] = {name: {} for name in patterns}
    for line in lines:
        for name, listed in patterns.items():
            for at, pattern in enumerate(listed):
                for match in pattern.finditer(line.text):
                    said[name].setdefault(at, set()).add(match[1])
    firsts = {name: found[min(found)] for name, found in said.items() if found}
    return {name: next(iter(values)) if len(values) == 1 else None for name, values in firsts.items()}


Items = tuple[dict[str, Any], str | None, bool]


def _split(separator: str, colon: str) -> Callable[[str], Items]:
    """Return a reader of items with a separator between them; the last one ends with the line."""

    def read(text: str) -> Items:
        fields: dict[str, Any] = {}
        name = None
        for item in _RAY_REPEATS.sub("", text).split(separator):
            name, found, value = item.partition(colon)
            name = name.strip()
            if found:
                fields[name] = value.strip()
        is_cut = separator == " - " and name not in fields and bool(name or not text)
        return fields, name if name in fields else None, is_cut

    return read


def _equals(text: str) -> Items:
    fields = dict(_EQUALS.findall(text))
    return fields, next(reversed(fields), None), False


def _dict(text: str) -> Items:
    """A dictionary as Python or JSON prints it; items that nothing ends are left out."""
    text = text.lstrip()
    end = _closing(text)
    whole = text if end is None else text[: end + 1]
    if end is not None and re.match(r'\{\s*"', whole):
        try:
            fields = parse_json(whole)
        except ValueError:
            pass
        else:
            return fields if isinstance(fields, dict) else {}, None, False
    return {name: value.strip().strip("'\"") for _, name, value in _DICT_ITEM.findall(whole)}, None, end is None


def _closing(text: str) -> int | None:
    """Where the bracket that a text begins with is closed; None where it is not."""
    depth, quote, escaped = 0, "", False
    for at, letter in enumerate(text):
        if quote:
            if escaped or letter == "\\":
                escaped = not escaped
            elif letter == quote:
                quote = ""
        elif letter in "'\"":
            quote = letter
        elif letter in "{[(":
            depth += 1
        elif letter in ")]}":
            depth -= 1
            if depth <= 0:
                return at
    return None


def _table(text: str) -> Items:
    """A row of names and values between bars, which has one at its end."""
    cells = [cell.strip() for cell in re.split(r"[│┃|]", text)]
    return dict(zip(cells[1:-1:2], cells[2:-1:2], strict=False)), None, bool(cells[-1])


def _bullet(text: str) -> Items:
    name, _, value = text.partition(":")
    return {name.strip(): value.strip()}, name.strip(), False


ITEMS: dict[str, Callable[[str], Items]] = {
    "dashes": _split(" - ", ":"), "bars": _split(" | ", ":"), "commas": _split(", ", ":"),
    "report": _split(", ", ":"), "reported": _split(", ", ":"), "equals": _equals, "dict": _dict, "table": _table,
    "bullet": _bullet,
}  # fmt: skip
"""Readers of items by name: fields, the field that ends with the text, and True if the text is incomplete."""
_IN_BLOCKS = ("table", "bullet", "reported")
_SEVERAL = ("dashes", "bars", "open")


def settled(
    entries: Sequence[LoggedFields], is_known: Callable[[LoggedFields, str], bool], is_step: Callable[[str], bool]
) -> list[LoggedFields]:
    """Return entries without a last number that may be cut; `is_cut` marks these entries.

    A line may be cut at the end of the file, and where it is as long as others that are the longest. Its last number is
    whole where it has a unit, and where it has as many decimals as with its name at the end of lines that are whole. At
    the end of the file the line must have a name with which others end, anywhere that with which nearly all do; among
    the longest lines it must be that one. Lines that are all of one length must end alike, in decimals as others there,
    and a long line must have a key for which `is_step` is true: the time of the whole RL step.
    """
    usual = _usual(entries)
    sure = _shapes(entry for entry in entries if not entry.line.is_full and not entry.line.is_last)
    others = _shapes(entry for entry in entries if not entry.line.is_last)

    def is_whole(entry: LoggedFields, name: str) -> bool:
        items, (decimals, unit) = entry.form.items, _shape(entry)
        peers = (sure if entry.line.is_full else others).get(items, {})
        of_name = peers.get(name, set())
        # Numbers that are written with all their digits have now and then a few less.
        fewest = min(of_name)[0] if of_name else 0
        fewest -= _DIGITS_LESS * (len(of_name) > 1 or fewest > _MANY_DIGITS)
        if unit == "e" or (of_name and (unit not in {unit for _, unit in of_name} or decimals < fewest)):
            return False
        if unit or items == "bullet":
            return entry.line.is_ended or bool(of_name)
        if not entry.line.is_full:
            return any(end in entry.fields for end in peers) if peers else entry.line.is_ended
        if peers:
            return bool(of_name) or (decimals > 0 and any(end in list(entry.fields)[:-1] for end in peers))
        alike = [other for other in entries if other.line.is_full and other.form.items == items]
        if any(other.last != name or _shape(other) != (decimals, unit) for other in alike):
            return False
        if not is_known(entry, name):
            return True
        texts = [str(value) for other, value in entry.fields.items() if other != name]
        fewest = max(1, min((len(text.partition(".")[2]) for text in texts if "." in text), default=1))
        ends = len(entry.line.text) < _SHORT or any(map(is_step, map(entry.form.key, entry.fields)))
        return ends and items in ("dashes", "equals") and fewest <= decimals <= _MANY_DIGITS

    def settle(entry: LoggedFields) -> LoggedFields:
        name = entry.last
        doubtful = entry.line.is_full or entry.line.is_last
        if name is None or (is_whole(entry, name) if doubtful else usual.get(entry.form.items, name) in entry.fields):
            return entry
        return replace(entry, fields=_without(entry.fields, name), last=None, is_cut=True)

    return [*map(settle, entries)]


def _without(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {other: value for other, value in fields.items() if other != name}


def _usual(entries: Sequence[LoggedFields]) -> dict[str, str]:
    """The last name of nearly all lines whose items are written in a way, where it is."""
    lasts: dict[str, Counter[str]] = {}
    for entry in entries:
        if entry.last is not None and entry.form.items != "bullet":
            lasts.setdefault(entry.form.items, Counter())[entry.last] += 1
    usual = {items: counts.most_common(1)[0] for items, counts in lasts.items()}
    return {n: name for n, (name, num) in usual.items() if num >= max(_NEARLY_ALL * lasts[n].total(), 3)}


def _shapes(entries: Iterable[LoggedFields]) -> dict[str, dict[str, set[tuple[int, str]]]]:
    """By how items are written and by last names: decimals and units of the numbers there."""
    shapes: dict[str, dict[str, set[tuple[int, str]]]] = defaultdict(lambda: defaultdict(set))
    for entry in entries:
        if entry.last is not None:
            shapes[entry.form.items][entry.last].add(_shape(entry))
    return shapes


def _shape(entry: LoggedFields) -> tuple[int, str]:
    """Decimals and unit of the last number of a line."""
    match = re.match(r"[-+\d,]*(?:\.(\d*))?(?:[eE][-+]?\d\d)?\s*([A-Za-z%(]?)", str(entry.fields[entry.last or ""]))
    assert match is not None
    return len(match[1] or ""), match[2]


@dataclass(kw_only=True)
class Wrapping:
    """How a log's lines may have been wrapped: `width`, and how lines begin that follow a shorter one.

    `num_joined` counts the lines that `joined` found to continue.
    """

    width: int = 0
    num_full: int = 0
    starts: set[str] = field(default_factory=set)
    num_joined: int = 0

    @classmethod
    def of(cls, lines: Callable[[], Iterable[Line]]) -> Wrapping:
        """Look at all lines of a log, twice."""
        lengths = Counter(len(line.text) for line in lines())
        width = max(lengths, default=0)
        found = cls(width=width, num_full=lengths[width])
        before = 0
        for line in lines():
            if before < width - _TRIMMED and line.text.strip():
                found.starts.add(_start(line.text))
            before = _length(line.text, width)
        return found

    def joined(
        self, lines: Iterable[Line], read: Callable[[str], LoggedFields | None], blanks: int = 0
    ) -> Iterator[Line]:
        """Yield lines, with wrapped lines joined; `read` parses a text into an entry.

        `blanks`: number of blanks that were stripped from the ends of the longest lines.
        """
        whole: Line | None = None
        before = self.num_joined = 0
        for line in lines:
            if whole is None:
                whole, before = line, _length(line.text, self.width)
                continue
            goes_on = before >= self.width - _TRIMMED and _start(line.text) not in self.starts
            goes_on = goes_on and _ROW.match(line.text) is None
            fill = " " * (self.width + blanks - before) if goes_on else ""
            text = line.text
            if not goes_on:
                # Ray puts its prefix before each line of what was printed in one go.
                prefix = _RAY.match(text)
                text = text.removeprefix(prefix[0]) if prefix and whole.text.startswith(prefix[0]) else text
                more = whole.text.endswith(" -") or _CONTINUES.match(text)
                entry = read(whole.text) if more and read(text) is None else None
                goes_on = entry is not None and (entry.is_cut or entry.last is not None)
                fill = " " if text[:1] == "-" or (text[:1] != " " and whole.text[-1:] in ("-", ",")) else ""
            if goes_on and len(whole.text) < _MOST_LETTERS:
                self.num_joined += 1
                whole = replace(line, number=whole.number, text=whole.text + fill + text)
            else:
                yield replace(whole, is_full=True) if _REST.fullmatch(line.text) else whole
                whole = line
            before = _length(line.text, self.width)
        if whole is not None:
            yield whole

    def marked(self, lines: Iterable[Line]) -> Iterator[Line]:
        """The lines; marked are those as long as the longest, where there are several, and before a number alone."""
        before: Line | None = None
        for line in lines:
            if before is not None:
                yield replace(before, is_full=True) if _REST.fullmatch(line.text) else before
            is_full = self.num_full > 1 and len(line.text) == self.width
            before = replace(line, is_full=True) if is_full else line
        if before is not None:
            yield before


def _start(text: str) -> str:
    return re.sub(r"\d+", "0", text[: 2 * _START_LETTERS])[:_START_LETTERS]


def _length(text: str, width: int) -> int:
    """Letters of a text; `width` where it has that many bytes or columns instead."""
    if text.isascii():
        return len(text)
    columns = sum(1 + (unicodedata.east_asian_width(letter) in "WF") for letter in text)
    return width if width in (columns, len(text.encode())) else len(text)


def few(numbers: Iterable[Any]) -> str:
    """The first five of some numbers.

    >>> few(range(7))
    '0, 1, 2, 3, 4, ...'
    """
    values = list(numbers)
    return ", ".join(map(str, values[:5])) + (", ..." if len(values) > 5 else "")
