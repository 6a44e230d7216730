"""What an experiment ends in: a verdict, a table and a picture, written as one folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from tltlab.charts import save_figure
from tltlab.errors import ConfigError, InputError
from tltlab.files import new_folder, write_json

RESULT, TABLE, PICTURE = "result.json", "table.csv", "picture.png"
_OURS = {RESULT, TABLE, PICTURE, "report.html"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExperimentResult:
    """An answer. `verdict` is one sentence with figures; `prediction` says that all of it is simulated or modelled.

    `rows` is the table; where some of its rows are measured and some predicted, a column says which. `settings` is what
    the experiment ran with, as JSON values; `notes` are what a reader must know to read the table right. `command` and
    `versions`, by program, are how to repeat it.
    """

    name: str
    question: str
    verdict: str
    rows: pd.DataFrame
    figure: Figure
    prediction: bool
    settings: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    command: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        """One JSON object; unknown figures are null."""
        known = self.rows.astype(object).where(self.rows.notna(), None)
        return {
            "name": self.name,
            "question": self.question,
            "verdict": self.verdict,
            "prediction": self.prediction,
            "settings": dict(self.settings),
            "rows": [{key: _plain(value) for key, value in row.items()} for row in known.to_dict("records")],
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
    """A number of numpy's as Python's; None for one that JSON does not know."""
    plain = value.item() if hasattr(value, "item") else value
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain
