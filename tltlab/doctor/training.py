"""Failure signatures of drafter training on idle workers: time in pieces, weights that nobody gets."""

from __future__ import annotations

from .evidence import ENOUGH_STEPS, RunEvidence
from .finding import Finding, NotChecked, check, problem, span

HALF = 0.5
"""Share of the training periods, and of their time, that should bring updates: below it most is set-up."""


@check("idle-fragmented", good="idle time is long enough to train in")
def idle_fragmented(evidence: RunEvidence) -> Finding | None:
    """Idle workers train, but their idle time comes in pieces too short for an update."""
    rows = evidence.spot_training
    trained = rows[rows["updates"] > 0]
    set_up, useful = float(rows["setup_s"].sum()), float(rows["train_s"].sum())
    total = float(rows["duration"].sum())
    empty = 1 - len(trained) / len(rows)
    if len(rows) < 2 * ENOUGH_STEPS:
        raise NotChecked(f"{len(rows)} training periods are too few")
    if not total > 0:
        raise NotChecked(f"the {len(rows)} training periods took no time")
    if useful >= HALF * total and empty <= HALF:
        return None
    update = "none was completed"
    if len(trained):
        update = f"one takes {(trained['train_s'].sum() / trained['updates'].sum()):.2g} s"
    return problem(
        title="Idle time comes in pieces too short to train in",
        evidence=(
            f"{len(rows)} periods of {rows['duration'].median():.2g} s (median): {set_up / total:.0%} of the time set "
            f"trainers up, {useful / total:.0%} trained; {empty:.0%} of the periods made no update ({update})."
        ),
        advice=(
            "Smaller updates (drafter.tokens_per_update), training in fewer rollouts (drafter.schedule.kind = every), "
            "a group that waits for more idle workers (drafter.coordinator.min_idle_workers) or takes no late ones "
            "(drafter.coordinator.late_join = false)."
        ),
        where=f"RL steps {span(rows['rl_step'].unique().tolist())}",
    )


@check("drafter-never-published", good="new drafter weights went into service")
def drafter_never_published(evidence: RunEvidence) -> Finding | None:
    """The recipe trains a drafter, yet engines never got new weights of it."""
    steps = evidence.known.steps
    if evidence.setting("drafter") is None or steps is None:
        raise NotChecked("the run trains no drafter of its own")
    if evidence.setting("drafter.schedule.kind") == "never":
        raise NotChecked("drafter.schedule.kind is never: no new weights were meant")
    if len(steps) < ENOUGH_STEPS:
        raise NotChecked(f"the run has fewer than {ENOUGH_STEPS} RL steps")
    if (steps["drafter_version"].fillna(0) > 0).any():
        return None
    rows = evidence.known.spot_training
    updates = 0 if rows is None else int(rows["updates"].sum())
    return problem(
        title="The trained drafter never went into service",
        evidence=(
            f"In {len(steps)} RL steps the engines stayed on the drafter they began with; training made {updates} "
            "updates."
        ),
        advice=(
            "No updates: are workers ever idle before the rollout ends (tltlab timeline), and for longer than an "
            "update takes (drafter.tokens_per_update)? Else events.jsonl says why its weights were refused."
        ),
    )
