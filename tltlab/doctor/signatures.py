"""The known failure signatures, as a table of checks, and what they find in a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tltlab.costs.base import CostModel
from tltlab.errors import ConfigError
from tltlab.traces.trace import Trace

from .bandit import explores_more_than_it_finds, one_arm_per_bucket
from .evidence import RunEvidence
from .finding import Finding, NotChecked, could_not_look
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question to a run: `look` finds its signature, or None; `good` is what None means."""

    name: str
    good: str
    look: Callable[[RunEvidence], Finding | list[Finding] | None]


CHECKS: tuple[Check, ...] = (
    Check(name="deaths", good="nothing died", look=deaths),
    Check(name="interrupted", good="the recording is whole", look=interrupted),
    Check(name="slower-than-plain", good="rollouts are not slower than plain decoding", look=slower_than_plain),
    Check(name="acceptance-low", good="drafts are kept often enough", look=acceptance_low),
    Check(name="acceptance-falling", good="acceptance holds over the run", look=acceptance_falling),
    Check(name="target-too-fast", good="the drafter keeps up with the policy", look=target_too_fast),
    Check(name="large-batches", good="no speculation at too large batches", look=large_batches),
    Check(name="speculation-unused", good="speculation runs where it gains", look=speculation_unused),
    Check(name="switches-often", good="few switches", look=switches_often),
    Check(name="explores-too-much", good="bandits find more than they spend", look=explores_more_than_it_finds),
    Check(name="one-arm-per-bucket", good="buckets have arms to choose from", look=one_arm_per_bucket),
    Check(name="canary", good="the drafter's canary is content", look=canary),
    Check(name="drafter-in-use", good="what is trained is used", look=serves_nobody),
    Check(name="drafter-never-published", good="new drafter weights went into service", look=drafter_never_published),
    Check(name="training-fails", good="drafter training ended well", look=training_fails),
    Check(name="idle-fragmented", good="idle time is long enough to train in", look=idle_fragmented),
    Check(name="rollout-not-bottleneck", good="the rollout is the bottleneck", look=rollout_not_bottleneck),
    Check(name="prefill-bound", good="prefill is a small part", look=prefill_bound),
    Check(name="waiting-queue", good="no queue and no preemption", look=waiting_queue),
    Check(name="workers-uneven", good="the split is even enough", look=workers_uneven),
    Check(name="slow-worker", good="workers are equally fast", look=slow_worker),
    Check(name="time-outside", good="little time outside iterations", look=time_outside),
    Check(name="no-graph", good="iterations have CUDA graphs", look=no_graph),
    Check(name="cut-at-cap", good="responses end by themselves", look=cut_at_cap),
    Check(name="noisy-machine", good="the machine repeats its times", look=noisy_machine),
)
"""In the order in which what they find is told: what broke, what speculation does, what is around it."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What the checks found in a run; `good` has those that found nothing, `not_checked` (name, why) of the others.

    `simulated` says that the run is a simulation, so its figures are predictions.
    """

    findings: tuple[Finding, ...]
    good: tuple[Check, ...]
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
    good: list[Check] = []
    missing: list[tuple[str, str]] = []
    for check in CHECKS:
        told: Finding | list[Finding] | None
        try:
            told = check.look(evidence)
        except NotChecked as why:
            missing.append((check.name, str(why)))
            continue
        except ConfigError as error:
            # A run may be too odd for one question, such as times of zero; the others still have answers.
            missing.append((check.name, f"its figures allow no answer ({error})"))
            continue
        except Exception as error:  # a defect of one check is no reason to withhold what the others found
            told = could_not_look(check.name, error)
        if not told:
            good.append(check)
        else:
            found += told if isinstance(told, list) else [told]
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
