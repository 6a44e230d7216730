"""The known failure signatures, as a table of checks, and what they find in a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tltlab.traces.trace import Trace

from . import bandit, log, plain_decoding, run, speculation, steps, training
from .evidence import RunEvidence
from .finding import Check, Finding, NotChecked

CHECKS: tuple[Check[RunEvidence], ...] = (
    log.deaths, run.interrupted, plain_decoding.slower_than_plain, steps.drafts_lose_time, speculation.acceptance_low,
    speculation.acceptance_falling, steps.worse_when_just_trained, speculation.target_too_fast,
    plain_decoding.large_batches, speculation.switches_often, bandit.explores_more_than_it_finds,
    bandit.one_arm_per_bucket, log.canary, training.drafter_never_published, training.idle_fragmented,
    run.rollout_not_bottleneck, steps.rollout_share, run.waiting_queue, run.slow_worker, run.no_graph, run.long_starved,
)  # fmt: skip
"""In the order in which what they find is told: what broke, what speculation does, what is around it."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What the checks found in a run; `good` has those that found nothing, `not_checked` (name, why) of the others.

    `simulated` says that the run is a simulation, so its figures are predictions.
    """

    findings: tuple[Finding, ...]
    good: tuple[Check[RunEvidence], ...]
    not_checked: tuple[tuple[str, str], ...]
    simulated: bool


def diagnose(run: str | Path | Trace) -> Diagnosis:
    """Look for every signature in a RUN folder, a trace folder or a Trace. Raises TraceError for what is no run."""
    return examine(RunEvidence.of(run))


def examine(evidence: RunEvidence) -> Diagnosis:
    """Look for every signature in what is known of a run."""
    findings: list[Finding] = []
    good: list[Check[RunEvidence]] = []
    missing: list[tuple[str, str]] = []
    for check in CHECKS:
        try:
            of_check = check.look(evidence)
        except NotChecked as why:
            missing.append((check.name, str(why)))
        else:
            findings += of_check
            good += [] if of_check else [check]
    trace = evidence.trace
    return Diagnosis(
        findings=tuple(sorted(findings, key=lambda finding: finding.severity != "problem")),
        good=tuple(good),
        not_checked=tuple(missing),
        simulated=trace is not None and trace.manifest.kind == "simulated",
    )
