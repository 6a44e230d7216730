"""What a check of `tltlab doctor` says: a finding, or why it could not look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["problem", "hint", "fine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was found: `title` says what it means, `evidence` what was seen, `advice` what to do.

    "problem": something is broken or costs more than it gains; "hint": worth a look; "fine": looked at and good.
    `where` names RL steps, workers or batches, None where it is the whole run or the machine. A fine finding has no
    advice.

    >>> Finding(code="threads", severity="hint", title="Engines may use all cores", evidence="OMP_NUM_THREADS is unset")
    Finding(code='threads', severity='hint', title='Engines may use all cores', evidence='OMP_NUM_THREADS is unset', \
advice='', where=None)
    """

    code: str
    severity: Severity
    title: str
    evidence: str
    advice: str = ""
    where: str | None = None

    def json(self) -> dict[str, Any]:
        """The finding as `tltlab doctor --json` prints it."""
        return {
            "code": self.code,
            "severity": self.severity,
            "title": self.title,
            "evidence": self.evidence,
            "advice": self.advice,
            "where": self.where,
        }


class NotChecked(Exception):
    """A check has not the data that it needs; the message says which and how to get them."""


def could_not_look(name: str, error: Exception) -> Finding:
    """What stands in place of the findings of the check `name` that failed: the run may be sound."""
    return Finding(
        code="could-not-look",
        severity="hint",
        title=f"could not look: {name}",
        evidence=f"{type(error).__name__}: {' '.join(str(error).split())}.",
        advice="That is a defect of the check, not of what it looked at; the other checks are not concerned.",
    )


def span(values: list[int]) -> str:
    """Whole numbers in words, runs of them joined.

    >>> span([0, 1, 2, 5])
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
