"""The known failure signatures, as a table of checks, and what they find in a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tltlab.costs.base import CostModel
from tltlab.traces.trace import Trace

from .bandit import explores_more_than_it_finds, one_arm_per_bucket
from .evidence import RunEvidence
from .finding import Check, Finding, NotChecked
from .log import canary, deaths, serves_nobody
from .plain_decoding import large_batches, slower_than_plain, speculation_unused
from .run import (
    cut_at_cap,
    interrupted,
    no_graph,
    noisy_machine,
    prefill_bound,
    rollout_not_bottleneck,
    slow_worker,
    time_outside,
    waiting_queue,
    workers_uneven,
)
from .speculation import (
    acceptance_falling,
    acceptance_low,
    switches_often,
    target_too_fast,
)
from .training import drafter_never_published, idle_fragmented, training_fails

__all__ = ["CHECKS", "Check", "Diagnosis", "Finding", "NotChecked", "diagnose", "examine", "findings"]


CHECKS: tuple[Check[RunEvidence], ...] = (
    Check(name="deaths", good="nothing died", find=deaths),
    Check(name="interrupted", good="the recording is whole", find=interrupted),
    Check(name="slower-than-plain", good="rollouts are not slower than plain decoding", find=slower_than_plain),
    Check(name="acceptance-low", good="drafts are kept often enough", find=acceptance_low),
    Check(name="acceptance-falling", good="acceptance holds over the run", find=acceptance_falling),
    Check(name="target-too-fast", good="the drafter keeps up with the policy", find=target_too_fast),
    Check(name="large-batches", good="no speculation at too large batches", find=large_batches),
    Check(name="speculation-unused", good="speculation runs where it gains", find=speculation_unused),
    Check(name="switches-often", good="few switches", find=switches_often),
    Check(name="explores-too-much", good="bandits find more than they spend", find=explores_more_than_it_finds),
    Check(name="one-arm-per-bucket", good="buckets have arms to choose from", find=one_arm_per_bucket),
    Check(name="canary", good="the drafter's canary is content", find=canary),
    Check(name="drafter-in-use", good="what is trained is used", find=serves_nobody),
    Check(name="drafter-never-published", good="new drafter weights went into service", find=drafter_never_published),
    Check(name="training-fails", good="drafter training ended well", find=training_fails),
    Check(name="idle-fragmented", good="idle time is long enough to train in", find=idle_fragmented),
    Check(name="rollout-not-bottleneck", good="the rollout is the bottleneck", find=rollout_not_bottleneck),
    Check(name="prefill-bound", good="prefill is a small part", find=prefill_bound),
    Check(name="waiting-queue", good="no queue and no preemption", find=waiting_queue),
    Check(name="workers-uneven", good="the split is even enough", find=workers_uneven),
    Check(name="slow-worker", good="workers are equally fast", find=slow_worker),
    Check(name="time-outside", good="little time outside iterations", find=time_outside),
    Check(name="no-graph", good="iterations have CUDA graphs", find=no_graph),
    Check(name="cut-at-cap", good="responses end by themselves", find=cut_at_cap),
    Check(name="noisy-machine", good="the machine repeats its times", find=noisy_machine),
)
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


def diagnose(run: str | Path | Trace, costs: str | Path | CostModel | None = None) -> Diagnosis:
    """Look for every signature in a RUN folder, a trace folder or a Trace.

    `costs` tell what plain decoding takes where the run never decoded plainly. Raises TraceError for what is no run.
    """
    return examine(RunEvidence.of(run, costs))


def examine(evidence: RunEvidence) -> Diagnosis:
    """Look for every signature in what is known of a run."""
    found: list[Finding] = []
    good: list[Check[RunEvidence]] = []
    missing: list[tuple[str, str]] = []
    for check in CHECKS:
        try:
            told = check.look(evidence)
        except NotChecked as why:
            missing.append((check.name, str(why)))
        else:
            found += told
            good += [] if told else [check]
    trace = evidence.trace
    return Diagnosis(
        findings=tuple(sorted(found, key=lambda finding: finding.severity != "problem")),
        good=tuple(good),
        not_checked=tuple(missing),
        simulated=trace is not None and trace.manifest.kind == "simulated",
    )


def findings(run: str | Path | Trace, costs: str | Path | CostModel | None = None) -> list[Finding]:
    """The problems and hints of `diagnose`, problems first.

    >>> [finding.code for finding in findings("run")]  # doctest: +SKIP
    ['large-batches', 'rollout-not-bottleneck']
    """
    return list(diagnose(run, costs).findings)
