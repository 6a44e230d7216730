"""Parts of a report page, and its HTML: one file that loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Any, Literal, ParamSpec

import jinja2
from markupsafe import Markup
from matplotlib.figure import Figure

from tltlab.charts import data_uri
from tltlab.records import Fields, frozen

_TEMPLATES = Path(__file__).parent / "templates"
SCRIPT = (_TEMPLATES / "report.js").read_text(encoding="utf-8")
"""Sorts tables, shows one of several pictures, enlarges them; without it everything can be read."""
_SHA = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{_SHA}'"
"""Content security policy of the page: a browser refuses whatever is not in the file itself, and any other script."""
_COLUMN = re.compile(r"([^;]+?): \{([^:}]+):?([^}]*)\}(?:; )?")
"""Heading, key and number format of a table's column."""
_CHART_IN = 8.0
"""Width in inches of the widest figure that stands beside another on a page."""


@frozen
class Picture:
    """A chart in the page, the image at `source`: `alt` describes it, `caption` explains how to read it."""

    source: str
    alt: str
    caption: str
    shape: Literal["wide", "chart", "square"] = "wide"

    @classmethod
    def of(cls, figure: Figure, *, alt: str, caption: str, shape: Literal["square"] | None = None) -> Picture:
        """The picture of a figure, inside the page."""
        looks = shape or ("wide" if figure.get_figwidth() > _CHART_IN else "chart")
        return cls(source=data_uri(figure), alt=alt, caption=caption, shape=looks)


@frozen
class Pictures:
    """Pictures of one kind, of which a slider shows one at a time, `first` at first; without script all, in order.

    `label` names what differs ("RL step"), `names` its values.
    """

    pictures: tuple[Picture, ...]
    label: str
    names: tuple[str, ...]
    first: int = 0


@frozen
class PageTable:
    """Rows of cells that are text already; all but the first column are set flush right unless `text_columns` has them.

    A table with `summary` is folded under it: for figures that few read. `links` are where the rows' first cells lead;
    with `choose` rows can be ticked, and their first cells are sent there as `run`.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: frozenset[int] = frozenset({0})
    summary: str | None = None
    links: tuple[str, ...] = ()
    choose: str = ""


@frozen
class Facts:
    """Names and values, such as versions."""

    rows: tuple[tuple[str, str], ...]


@frozen
class Items:
    """A list of sentences, each under a short label."""

    rows: tuple[tuple[str, str], ...]


@frozen
class Code:
    """Commands or a configuration, to be copied; `folded` under its label."""

    code: str
    label: str
    folded: bool = False


@frozen
class Piece:
    """Text of one origin: `drafter` 1 to 4 is the colour of its drafter, 0 the model's own; `title` has details."""

    text: str
    drafter: int = 0
    title: str = ""


@frozen
class Transcript:
    """Prompt and response of a model, in pieces; `label` has the facts."""

    label: str
    pieces: tuple[Piece, ...]
    prompt: str = ""


Block = str | Picture | Pictures | PageTable | Facts | Items | Code | Transcript
"""A text is a paragraph."""


@frozen
class Section:
    """A part of the page under its own heading."""

    title: str
    blocks: tuple[Block, ...]

    @property
    def anchor(self) -> str:
        return "-".join("".join(c if c.isalnum() else " " for c in self.title.lower()).split())


@frozen
class Absent:
    """A part that the page does not have, and why in one line."""

    title: str
    reason: str


Part = Section | Absent
Arguments = ParamSpec("Arguments")


class Lacking(Exception):
    """Data for a part of a page is missing; the message is the reason that the page shows."""


def titled(title: str) -> Callable[[Callable[Arguments, Sequence[Block]]], Callable[Arguments, Part]]:
    """Return a decorator that makes a part of the blocks that a function returns, `Absent` where it raises Lacking."""

    def decorate(blocks: Callable[Arguments, Sequence[Block]]) -> Callable[Arguments, Part]:
        @wraps(blocks)
        def made(*args: Arguments.args, **options: Arguments.kwargs) -> Part:
            try:
                return Section(title=title, blocks=tuple(blocks(*args, **options)))
            except Lacking as why:
                return Absent(title=title, reason=str(why))

        return made

    return decorate


@frozen
class Page:
    """A whole report: the `verdict` and `key_figures` (name, value) stand on top, parts below in their order.

    `tltlab ui` sets `home`, which leads to the list, and `live` where the run continues: the page is then loaded again
    every ten seconds.
    """

    title: str
    subtitle: str = ""
    key_figures: tuple[tuple[str, str], ...] = ()
    parts: tuple[Part, ...] = ()
    verdict: str = ""
    home: str = ""
    live: bool = False

    @property
    def sections(self) -> tuple[Section, ...]:
        return tuple(part for part in self.parts if isinstance(part, Section))

    @property
    def absent(self) -> tuple[Absent, ...]:
        return tuple(part for part in self.parts if isinstance(part, Absent))


def render(page: Page) -> str:
    """The page as HTML. Every text is escaped; same page, same characters."""
    # jinja2 would write quotes of the constant policy as entities, which is right but hard to read.
    return _template().render(page=page, policy=Markup(POLICY), script=Markup(SCRIPT))


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["kind"] = lambda block: type(block).__name__
    return environment.get_template("report.html")


def number(value: Any, form: str = ".3g", suffix: str = "") -> str:
    """A figure as text, "–" where it is unknown; a text is itself.

    >>> number(0.12345, ".1%"), number(None), number(float("nan")), number(2.5, ".1f", " s")
    ('12.3%', '–', '–', '2.5 s')
    """
    if value is None or value != value:
        return "–"
    return format(value, "" if isinstance(value, str) else form) + suffix


def records(rows: Sequence[Fields], columns: str, *, caption: str, summary: str | None = None) -> PageTable:
    """A table of dicts. Keys that no row knows are left out, and a key is there once.

    `columns` has headings, each with its key and the format of its numbers, or none for text: "RL step: {rl_step:d};
    policy: {policy}".
    """
    each = {column[1]: column for column in _COLUMN.findall(columns)}
    known = [column for key, column in each.items() if any(row.get(key) is not None for row in rows)]
    return PageTable(
        caption=caption,
        columns=tuple(heading for heading, _, _ in known),
        rows=tuple(tuple(number(row.get(key), form) for _, key, form in known) for row in rows),
        text_columns=frozenset({0, *(at for at, (_, _, form) in enumerate(known) if not form)}),
        summary=summary,
    )
