"""A check of `tltlab doctor`: a row with a name, the evidence that it needs, a test, a sentence and a remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from string import Formatter
from typing import Any, Generic, Literal, Self, TypeVar

from tltlab.errors import ConfigError, one_line
from tltlab.records import frozen

GIB = 1 << 30

Severity = Literal["problem", "hint", "fine"]
Facts = dict[str, Any]
Subject = TypeVar("Subject")


@frozen
class Finding:
    """One finding: `title` is its meaning, `evidence` the observation, `advice` what to do.

    "problem": something is broken or costs more than it gains; "hint": worth a look; "fine": looked at and good.
    `where` names RL steps, workers or batches, None where it is the whole run or the machine. A fine finding has no
    advice.
    """

    code: str
    severity: Severity
    title: str
    evidence: str
    advice: str = ""
    where: str | None = None


class NotChecked(Exception):
    """Evidence that a check needs is missing; the message names the evidence and how to get it."""


@dataclass(frozen=True)
class Check(Generic[Subject]):
    """One question to a run or a machine, to be completed by `problem` or `hint`.

    `test` returns the facts of each case in which the fault is there, or True where the sentence needs none. Title,
    evidence, advice and code may have braces for facts, and for the subject itself (`m`); the facts `where` and
    `severity` become those of the finding. `needs` names attributes of the subject that must be known, `good` is shown
    if there is no finding.
    """

    name: str
    test: Callable[[Subject], bool | Facts | list[Facts] | None]
    needs: tuple[str, ...] = ()
    good: str = ""
    severity: Severity = "problem"
    title: str = ""
    evidence: str = ""
    advice: str = ""
    code: str = ""

    def problem(self, title: str, evidence: str, advice: str, code: str = "") -> Self:
        """The check of something that is broken or costs more than it gains; its code is its name unless given."""
        return replace(self, title=title, evidence=evidence, advice=advice, code=code)

    def hint(self, title: str, evidence: str, advice: str, code: str = "") -> Self:
        """The check of something worth a look."""
        return replace(self.problem(title, evidence, advice, code), severity="hint")

    def look(self, subject: Subject) -> list[Finding]:
        """Return the findings; a defect of the test is a finding too. Raises NotChecked."""
        try:
            if missing := [name for name in self.needs if getattr(subject, name) is None]:
                raise NotChecked(f"{', '.join(missing)}: not known")
            found = self.test(subject)
        except NotChecked:
            raise
        except ConfigError as error:
            # A run may be too odd for one question, such as times of zero; the others still have answers.
            raise NotChecked(f"its figures allow no answer ({error})") from error
        except Exception as error:  # a defect of one check is no reason to withhold what the others found
            text = f"{type(error).__name__}: {one_line(error)}."
            advice = "This is a defect of the check, not of the run or machine; other checks are not concerned."
            title = f"could not look: {self.name}"
            return [Finding(code="could-not-look", severity="hint", title=title, evidence=text, advice=advice)]
        cases = [{}] if found is True else [found] if isinstance(found, dict) else found or []
        return [self._finding({"m": subject, **case}) for case in cases]

    def success(self, subject: Subject) -> Finding:
        """The finding that all is well."""
        title, evidence = self.name.replace("-", " "), _SENTENCES.vformat(self.good, (), {"m": subject})
        return Finding(code=self.name, severity="fine", title=title, evidence=evidence)

    def _finding(self, facts: Facts) -> Finding:
        texts = (self.code or self.name, self.title, self.evidence, self.advice)
        code, title, evidence, advice = (_SENTENCES.vformat(text, (), facts) for text in texts)
        severity, where = facts.get("severity", self.severity), facts.get("where")
        return Finding(code=code, severity=severity, title=title, evidence=evidence, advice=advice, where=where)


@frozen
class Diagnosis(Generic[Subject]):
    """Findings of checks, problems first; `good`: checks without a finding; `not_checked`: (name, why) of the others.

    `simulated`: the run is a simulation, so its figures are predictions; None where there is no run.
    """

    findings: tuple[Finding, ...] = ()
    good: tuple[Check[Subject], ...] = ()
    not_checked: tuple[tuple[str, str], ...] = ()
    simulated: bool | None = None

    @property
    def headline(self) -> str:
        """The first problem in a sentence; empty where there is none."""
        first = next((finding for finding in self.findings if finding.severity == "problem"), None)
        if first is None:
            return ""
        where = f" ({first.where})" if first.where else ""
        return f"PROBLEM: {first.title}{where}. {first.evidence}"


def look(checks: Iterable[Check[Subject]], subject: Subject) -> Diagnosis[Subject]:
    """Make checks in turn. Consecutive rows of one name are alternatives: only the first finding is reported."""
    findings: list[Finding] = []
    good, not_checked = [], []
    for name, group in groupby(checks, key=lambda check: check.name):
        rows = list(group)
        try:
            found: list[Finding] = next(filter(None, (row.look(subject) for row in rows)), [])
        except NotChecked as why:
            not_checked.append((name, str(why)))
            continue
        findings += found
        good += [] if found else rows[:1]
    findings.sort(key=lambda finding: finding.severity != "problem")
    return Diagnosis(findings=tuple(findings), good=tuple(good), not_checked=tuple(not_checked))


def rl_steps(values: Iterable[int], unit: str = "RL step") -> str:
    """RL steps in words, runs of them joined.

    >>> rl_steps([5, 0, 1, 2, 2])
    'RL steps 0-2, 5'
    """
    runs: list[list[int]] = []
    for value in sorted(set(map(int, values))):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return f"{unit}s " + ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


class _Sentences(Formatter):
    """str.format with a format for numbers of bytes: "{m.disk_bytes:bytes}" is '14.2 GiB'."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec != "bytes":
            return str(super().format_field(value, format_spec))
        return f"{value / GIB:.1f} GiB" if value >= GIB else f"{value / (1 << 20):.0f} MiB"


_SENTENCES = _Sentences()
