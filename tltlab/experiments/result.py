"""What an experiment begins with and ends in: settings from key=value; verdict, table and picture, one folder."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_origin, get_type_hints

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from pydantic import TypeAdapter

from tltlab.charts import save_figure
from tltlab.config import faults_in
from tltlab.errors import ConfigError, InputError
from tltlab.files import new_folder, write_json

from . import Progress

RESULT, TABLE, PICTURE = "result.json", "table.csv", "picture.png"
_OURS = {RESULT, TABLE, PICTURE, "report.html"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExperimentResult:
    """An answer. `verdict` is one sentence with figures; `prediction` says that all of it is simulated or modelled.

    `rows` is the table; where some of its rows are measured and some predicted, a column says which; `notes` are what a
    reader must know to read it right. What follows is filled in by the command: which experiment it was, its settings
    as JSON values, and how to repeat it.
    """

    verdict: str
    rows: pd.DataFrame
    figure: Figure
    prediction: bool
    notes: tuple[str, ...] = ()
    name: str = ""
    question: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    command: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        """One JSON object; unknown and infinite figures are null."""
        return {
            "name": self.name,
            "question": self.question,
            "verdict": self.verdict,
            "prediction": self.prediction,
            "settings": dict(self.settings),
            "rows": [{key: _plain(value) for key, value in row.items()} for row in self.rows.to_dict("records")],
            "notes": list(self.notes),
            "command": self.command,
            "versions": dict(self.versions),
        }

    def text(self) -> str:
        """The same for people: question, table, notes, verdict."""
        table = self.rows.to_string(index=False, na_rep="-", float_format=lambda value: f"{value:.4g}")
        marked = "\n(predicted, not measured)" if self.prediction else ""
        notes = "".join(f"\n- {note}" for note in self.notes)
        return f"{self.question}{marked}\n\n{table}\n{notes}\n\n{self.verdict}"

    def write(self, out: Path) -> None:
        """Write `result.json`, `table.csv` and `picture.png` as the folder `out`, in one move.

        An earlier result in `out` is replaced, with the page that `tltlab report` made of it. ConfigError where `out`
        holds something else, InputError where the disk refuses; `out` is then as it was.
        """
        check_replaceable(out)
        try:
            with new_folder(out) as new:
                write_json(new / RESULT, self.json())
                self.rows.to_csv(new / TABLE, index=False)
                save_figure(self.figure, new / PICTURE)
        except OSError as error:
            raise InputError(f"cannot write {out}: {error.strerror}") from error


def check_replaceable(out: Path) -> None:
    """ConfigError unless `out` is absent, an empty folder or an earlier result: call it before a long experiment."""
    above = next(folder for folder in out.absolute().parents if folder.exists())
    if not above.is_dir():
        raise ConfigError(f"{above} is a file; name a folder with --out")
    if not out.exists():
        return
    inside = {path.name for path in out.iterdir()} if out.is_dir() else {out.name}
    if inside and RESULT not in inside:
        raise ConfigError(f"{out} exists and has no {RESULT} of ours; name another folder with --out")
    if inside - _OURS:
        raise ConfigError(
            f"{out} would be replaced, and holds {', '.join(sorted(inside - _OURS))} besides an earlier result; "
            "move that, or name another folder with --out"
        )


def _plain(value: Any) -> Any:
    """None for a number that JSON does not know."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def whole_numbers(axes: Axes) -> None:
    """Ticks of the horizontal axis at whole numbers only, also where there is a single one."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def with_interval(estimate: float | None, low: float | None, high: float | None, form: str = ".2f") -> str:
    """An estimate with its ends where they are known.

    >>> with_interval(1.5, 1.4, 1.6)
    '1.50 [1.40, 1.60]'
    """
    if estimate is None or not math.isfinite(estimate):
        return "an unknown number of"
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return f"{estimate:{form}} (no interval)"
    return f"{estimate:{form}} [{low:{form}}, {high:{form}}]"


S = TypeVar("S")


class Case(Protocol):
    """What an experiment tries one after the other."""

    @property
    def name(self) -> str: ...

    @property
    def about(self) -> str: ...


C = TypeVar("C", bound=Case)


def read_settings(kind: type[S], changes: Mapping[str, Any] | None = None, overrides: Sequence[str] = ()) -> S:
    """The defaults of the dataclass `kind`, with `changes` (those of --fast), then with key=value `overrides`.

    Values are checked against the field's type and its pydantic constraints; those of a tuple are separated by commas.
    ConfigError for an unknown key, which lists the known ones with their values, and for a value that is none.

    >>> read_settings(BatchSizeSettings, overrides=["rounds=3", "depths=2,4"]).depths  # doctest: +SKIP
    (2, 4)
    """
    hints = get_type_hints(kind)
    values: dict[str, Any] = dict(changes or {})
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or key not in hints:
            wrong = f"no setting named {key!r}" if equals else f"{override!r} is not key=value"
            raise ConfigError(f"{wrong}; settings: {describe_settings(read_settings(kind))}")
        values[key] = value.split(",") if get_origin(hints[key]) is tuple else value
    with faults_in("settings"):
        return TypeAdapter(kind).validate_python(values)


def select_cases(kind: str, cases: Iterable[C], only: Sequence[str], progress: Progress) -> Iterator[C]:
    """The cases that `only` names, all where it is empty; `progress` says each when its turn comes.

    Raises ConfigError for a name that no case of this `kind` has.
    """
    named = {case.name: case for case in cases}
    if unknown := [name for name in only if name not in named]:
        raise ConfigError(f"only: no {kind} named {unknown[0]!r}; there are {', '.join(named)}")
    for name, case in named.items():
        if not only or name in only:
            progress(f"{name}: {case.about}")
            yield case


def settings_json(settings: Any, **more: Any) -> dict[str, Any]:
    """The settings as JSON values, with `more` of them behind."""
    adapter: TypeAdapter[Any] = TypeAdapter(type(settings))
    return {**adapter.dump_python(settings, mode="json"), **more}


def describe_settings(settings: Any) -> str:
    """Settings as the command line takes them, one after the other."""
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return " ".join(f"{key}={','.join(map(str, v)) if isinstance(v, tuple) else v}" for key, v in values.items())
