"""What idle workers did in a run with a drafter's trainer, and chances of its drafts by position."""

from collections.abc import Sequence

import pandas as pd

from tltlab.calibration.idle_training import recorded_updates
from tltlab.records import frozen
from tltlab.runtime.drafter.offline.chains import chances
from tltlab.runtime.drafter.offline.runs import AcceptedDrafts
from tltlab.traces.trace import Trace


def by_position(steps: Sequence[AcceptedDrafts]) -> list[float | None]:
    """Return `chances` of the drafts of some RL steps."""
    depth = max((len(step.kept) for step in steps), default=0)
    kept = [sum(step.kept[i] for step in steps if i < len(step.kept)) for i in range(depth)]
    return chances(sum(step.drafts for step in steps), kept)


@frozen
class IdleTime:
    """One RL step's rollout, in seconds summed over workers.

    `idle_s` after a worker's last token, of which trainers `held_s` the device, in which `train_s` were updates.
    `wait_s`: from the last token of all to the rollout's end. `yield_s`: from the order to stop to the free device, for
    each trainer that received one.
    """

    rl_step: int
    rollout_s: float
    idle_s: float
    held_s: float
    train_s: float
    wait_s: float
    updates: int
    yield_s: tuple[float, ...]


def idle_times(trace: Trace) -> list[IdleTime]:
    """Return the use of the workers' idle time, by RL step, from `steps`, `iterations` and `spot_training`.

    Idle time ends with the last token of the rollout: later time is waiting. Only the part of a trainer's period in its
    worker's idle time counts, and its updates in proportion.
    """
    steps, iterations, training = trace.steps, trace.iterations, trace.spot_training
    if steps is None or iterations is None:
        return []
    times = []
    updates = {} if training is None else recorded_updates(training)
    ends = (iterations["t_start"] + iterations["duration"]).groupby([iterations["rl_step"], iterations["worker"]]).max()
    for step, rollout_s in zip(steps["rl_step"], steps["rollout_s"], strict=True):
        if step not in ends.index.get_level_values(0):
            continue
        end = ends.loc[step]
        last = float(end.max())
        rows = [] if training is None else training[training["rl_step"] == step].to_dict("records")
        held_s = []
        for row in rows:
            begun = max(row["t_start"], end.get(row["worker"], 0.0))
            held_s.append(max(float(min(row["t_start"] + row["duration"], last) - begun), 0.0))
        times.append(
            IdleTime(
                rl_step=int(step),
                rollout_s=float(rollout_s),
                idle_s=float((last - end).sum()),
                held_s=sum(held_s),
                train_s=sum(w * row["train_s"] / row["duration"] for w, row in zip(held_s, rows, strict=True) if w),
                wait_s=max(float(rollout_s) - last, 0.0),
                updates=updates.get(int(step), 0),
                yield_s=tuple(float(row["yield_s"]) for row in rows if not pd.isna(row["yield_s"])),
            )
        )
    return times
