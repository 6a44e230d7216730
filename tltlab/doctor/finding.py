"""What a check of `tltlab doctor` says: a finding, or why it could not look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar

from tltlab.errors import ConfigError

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


class NotChecked(Exception):
    """A check has not the data that it needs; the message says which and how to get them."""


def problem(title: str, evidence: str, advice: str, where: str | None = None, code: str = "") -> Finding:
    """Something that is broken, or costs more than it gains; without a code it goes by its check's name."""
    return Finding(code=code, severity="problem", title=title, evidence=evidence, advice=advice, where=where)


def hint(title: str, evidence: str, advice: str, where: str | None = None, code: str = "") -> Finding:
    """Something worth a look."""
    return Finding(code=code, severity="hint", title=title, evidence=evidence, advice=advice, where=where)


def fine(evidence: str) -> Finding:
    """Something that was looked at and is good; its title is the check's name."""
    return Finding(code="", severity="fine", title="", evidence=evidence)


Subject = TypeVar("Subject")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check(Generic[Subject]):
    """One question to a run or a machine: `find` says what is wrong; `good` is what it means where that is nothing."""

    name: str
    good: str = ""
    find: Callable[[Subject], Finding | list[Finding] | None]

    def look(self, subject: Subject) -> list[Finding]:
        """What it finds; where the check fails that is a finding too. Raises NotChecked."""
        try:
            findings = self.find(subject)
        except NotChecked:
            raise
        except ConfigError as error:
            # A run may be too odd for one question, such as times of zero; the others still have answers.
            raise NotChecked(f"its figures allow no answer ({error})") from error
        except Exception as error:  # a defect of one check is no reason to withhold what the others found
            findings = hint(
                code="could-not-look",
                title=f"could not look: {self.name}",
                evidence=f"{type(error).__name__}: {' '.join(str(error).split())}.",
                advice="That is a defect of the check, not of what it looked at; the other checks are not concerned.",
            )
        named = findings if isinstance(findings, list) else [findings] if findings else []
        title = self.name.replace("-", " ")
        return [replace(each, code=each.code or self.name, title=each.title or title) for each in named]


def check(name: str, *, good: str) -> Callable[[Callable[[Subject], Finding | list[Finding] | None]], Check[Subject]]:
    """Make a function a Check of this name; `good` is what it means where it finds nothing."""

    def named(find: Callable[[Subject], Finding | list[Finding] | None]) -> Check[Subject]:
        return Check(name=name, good=good, find=find)

    return named


def span(values: list[int]) -> str:
    """Whole numbers in words, runs of them joined.

    >>> span([5, 0, 1, 2, 2])
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
