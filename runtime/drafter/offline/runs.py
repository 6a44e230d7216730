"""Acceptance of a learned drafter's drafts from a run's trace: of the one it began with, and of later ones."""

from collections.abc import Collection, Sequence

import numpy as np
import pandas as pd

from tltlab.records import frozen
from tltlab.traces.trace import Trace

from .chains import walk


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


def last_third(steps: Sequence[int]) -> list[int]:
    """The last third of some RL steps, at least one.

    >>> last_third([0, 1, 2, 3, 4, 5, 6])
    [5, 6]
    """
    return list(steps)[-max(len(steps) // 3, 1) :]
