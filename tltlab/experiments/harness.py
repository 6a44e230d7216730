"""The course of every experiment: its cases are measured in turn and become a table, a picture and a sentence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import pandas as pd
from matplotlib.figure import Figure

from . import Progress
from .result import ExperimentResult

Row = dict[str, Any]
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Case:
    """One case: its name in the table, the progress message `about` it, and the argument `given` to its measurement."""

    name: str
    about: str
    given: Any = None


class Experiment(ABC, Generic[S]):
    """An experiment under way; `run` calls each of the methods that a subclass has.

    `Settings` is the frozen dataclass of what may be set as key=value, `FAST` what --fast changes. `folder` is where
    the command writes, for what is kept between experiments, as a trained model. Resources opened on `stack` are closed
    at the end, also where a case fails. `prediction`: whether all figures are simulated or modelled.
    """

    Settings: ClassVar[type[Any]]
    FAST: ClassVar[Mapping[str, Any]]
    prediction = False

    def __init__(self, settings: S, *, folder: Path, seed: int, progress: Progress) -> None:
        self.settings, self.folder, self.seed, self.progress = settings, folder, seed, progress
        self.stack = ExitStack()

    @abstractmethod
    def cases(self) -> Iterable[Case]:
        """Open what the cases need, and return them. ConfigError for settings that make no sense."""

    @abstractmethod
    def measure(self, case: Case) -> Iterable[Row]:
        """Return what a case shows: rows, or readings of which `table` makes rows."""

    def table(self, readings: Sequence[Row]) -> Sequence[Row]:
        """Return the rows of all cases."""
        return readings

    @abstractmethod
    def verdict(self, rows: pd.DataFrame) -> str:
        """Return the answer, one sentence with figures."""

    @abstractmethod
    def picture(self, rows: pd.DataFrame) -> Figure:
        """Return the picture of the table."""

    @abstractmethod
    def notes(self, rows: pd.DataFrame) -> Iterable[str]:
        """Return what a reader must know to read the table right."""

    def run(self) -> ExperimentResult:
        """Measure all cases and return the answer."""
        readings: list[Row] = []
        with self.stack:
            for case in self.cases():
                self.progress(f"{case.name}: {case.about}")
                readings += self.measure(case)
        rows = pd.DataFrame(self.table(readings))
        return ExperimentResult(
            verdict=self.verdict(rows),
            rows=rows,
            figure=self.picture(rows),
            prediction=self.prediction,
            notes=tuple(self.notes(rows)),
        )
