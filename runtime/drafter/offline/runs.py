"""Figures of a learned drafter from a run's trace: acceptance of its drafts, costs and results of its training."""

from collections.abc import Collection, Sequence

import numpy as np
import pandas as pd

from tltlab.calibration.idle_training import recorded_updates
from tltlab.records import frozen
from tltlab.traces.trace import Trace

from .chains import chances, walk


@frozen
class AcceptedDrafts:
    """Drafts of one RL step. `kept[i]`: the number of drafts with at least i + 1 accepted tokens."""

    rl_step: int
    drafts: int
    kept: tuple[int, ...]

    @property
    def accept_length(self) -> float:
        """Tokens per verified draft, the bonus token included."""
        return 1.0 + sum(self.kept) / self.drafts


def annotated_drafts(trace: Trace, seen: Collection[str] = ()) -> list[tuple[AcceptedDrafts, AcceptedDrafts]]:
    """Return drafts of the initial drafter and of the one in service, on the same responses, by RL step.

    Of responses to prompts that neither has seen: those of earlier RL steps are left out, and `seen`, of its warm-up.

    From the rows of `acceptance`: the fewest and the most updates annotated of a response; RL steps in which the
    initial one was not annotated are left out. Drafts are those that an engine would verify one by one.
    """
    rows, workload = trace.acceptance, trace.workload
    if rows is None:
        return []
    first = workload.groupby("prompt_id")["rl_step"].min()
    rows = rows[(rows["rl_step"] == rows["prompt_id"].map(first)) & ~rows["prompt_id"].isin(seen)]
    pairs = []
    for step in sorted(set(rows["rl_step"].tolist())):
        of_step = rows[rows["rl_step"] == step]
        updates = of_step["drafter_updates"]
        if updates.min() > 0:
            continue
        depth = int(of_step["max_depth"].max())
        initial, in_service = (
            drafts_of(int(step), _verified_drafts(of_step[updates == count]), depth) for count in (0, updates.max())
        )
        if initial.drafts and in_service.drafts:
            pairs.append((initial, in_service))
    return pairs


def _verified_drafts(rows: pd.DataFrame) -> list[int]:
    rows_kept = [[int(n) for n in kept] for kept in rows["accept_if_drafted"]]
    return [kept[at] for kept in rows_kept for at in walk(kept)]


def drafts_of(rl_step: int, accepted: Sequence[int], depth: int) -> AcceptedDrafts:
    """Return the drafts of an RL step of which `accepted[i]` of at most `depth` tokens were kept."""
    counts = np.asarray(accepted, np.int64)
    return AcceptedDrafts(
        rl_step=rl_step, drafts=len(counts), kept=tuple(int((counts > i).sum()) for i in range(depth))
    )


def by_position(steps: Sequence[AcceptedDrafts]) -> list[float | None]:
    """Return `chances` of the drafts of some RL steps."""
    depth = max((len(step.kept) for step in steps), default=0)
    kept = [sum(step.kept[i] for step in steps if i < len(step.kept)) for i in range(depth)]
    return chances(sum(step.drafts for step in steps), kept)


def last_third(steps: Sequence[int]) -> list[int]:
    """The last third of some RL steps, at least one.

    >>> last_third([0, 1, 2, 3, 4, 5, 6])
    [5, 6]
    """
    return list(steps)[-max(len(steps) // 3, 1) :]


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
