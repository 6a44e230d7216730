"""Settings of an experiment from key=value, and its result: verdict, table and picture in one folder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_origin, get_type_hints

import pandas as pd
from matplotlib.figure import Figure
from pydantic import TypeAdapter

from tltlab.charts import save_figure
from tltlab.config import faults_in
from tltlab.console import json_rows
from tltlab.errors import ConfigError, InputError
from tltlab.files import new_folder, write_json

RESULT, TABLE, PICTURE = "result.json", "table.csv", "picture.png"
_OURS = {RESULT, TABLE, PICTURE, "report.html"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExperimentResult:
    """An answer: `verdict`, one sentence with figures, its table `rows` and `notes` on how to read them.

    `prediction`: whether all of it is simulated or modelled; where only some rows are, a column marks them. The
    command fills in the fields after that.
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
        names = ("name", "question", "verdict", "prediction", "settings", "rows", "notes", "command", "versions")
        return {name: getattr(self, name) for name in names} | {"rows": json_rows(self.rows), "notes": [*self.notes]}

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
    inside = {path.name for path in out.iterdir()} if out.is_dir() else {out.name} if out.exists() else set()
    if inside and (RESULT not in inside or inside - _OURS):
        raise ConfigError(
            f"{out} would be replaced, and holds {', '.join(sorted(inside - _OURS))} beside or instead of an earlier "
            f"{RESULT}; move that, or name another folder with --out"
        )


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


def read_settings(kind: type[S], changes: Mapping[str, Any] | None = None, overrides: Sequence[str] = ()) -> S:
    """The defaults of the dataclass `kind`, with `changes` (those of --fast), then with key=value `overrides`.

    Values are checked against the field's type and its pydantic constraints; those of a tuple are separated by commas.
    ConfigError for an unknown key, which lists the known ones with their values, and for a value that is none.
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


def settings_json(settings: Any, **more: Any) -> dict[str, Any]:
    """The settings as JSON values, with `more` of them behind."""
    adapter: TypeAdapter[Any] = TypeAdapter(type(settings))
    return {**adapter.dump_python(settings, mode="json"), **more}


def describe_settings(settings: Any) -> str:
    """Settings as the command line takes them, one by one."""
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return " ".join(f"{key}={','.join(map(str, v)) if isinstance(v, tuple) else v}" for key, v in values.items())
