"""The drafter's age and updates in each RL step of a run that trains it, for `verify`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tltlab.acceptance.base import from_survival, scaled
from tltlab.acceptance.freshness import FreshAcceptance, MeasuredState, fit_freshness
from tltlab.acceptance.measured import BatchBand, MeasuredAcceptance, fit_acceptance
from tltlab.errors import ConfigError
from tltlab.state import DrafterState
from tltlab.traces.trace import Trace


@dataclass(frozen=True, kw_only=True)
class DrafterStates:
    """The drafters recorded in a trace, and their acceptance as an estimate for another drafter state."""

    trace: Trace

    @cached_property
    def by_step(self) -> dict[int, DrafterState]:
        """The learned drafter in service in each RL step whose row in `steps` has its age and updates."""
        steps = self.trace.steps
        if steps is None:
            return {}
        rows = steps.dropna(subset=["drafter_age", "drafter_updates"])
        columns = (rows[name].astype(np.int64) for name in ("rl_step", "drafter_age", "drafter_updates"))
        return {step: DrafterState(age=age, updates=done) for step, age, done in zip(*columns, strict=True)}

    def acceptance(
        self, base: MeasuredAcceptance | None, step: int, fit_on: Sequence[int], seen_steps: Sequence[int]
    ) -> MeasuredAcceptance | FreshAcceptance | None:
        """Acceptance of some RL steps as it holds for the drafter of another one.

        Each of them is scaled by the level of its drafter, with a freshness fitted to acceptance.parquet in the RL
        steps `seen_steps` but `step`. Without several ages or numbers of updates there, or with an RL step whose
        drafter is unknown, it is the base itself.
        """
        table, iterations = self.trace.acceptance, self.trace.iterations
        if base is None or table is None or iterations is None or not {*fit_on, step} <= self.by_step.keys():
            return base
        history = table[table["rl_step"].isin([rl_step for rl_step in seen_steps if rl_step != step])]
        drafted = iterations.loc[iterations["rl_step"].isin(fit_on) & (iterations["draft_depth"] > 0), "drafter"]
        for drafter in sorted(set(base.drafters) & set(history["drafter"]) & set(drafted)):
            try:
                freshness, _ = fit_freshness(history, drafter)
            except ConfigError:
                continue
            state = self.by_step[step]
            level = {s: freshness.level(self.by_step[s].age, self.by_step[s].updates) for s in (*fit_on, step)}
            ratios = [(level[step] / level[s], self._drafted(drafter, s)) for s in fit_on if level[s] > 0.0]
            return FreshAcceptance(
                base=rescaled(base, drafter, ratios),
                drafter=drafter,
                freshness=freshness,
                measured=MeasuredState(age=state.age, updates=state.updates),
            )
        return base

    def _drafted(self, drafter: str, step: int) -> MeasuredAcceptance | None:
        """Return the acceptance fitted to a drafter's drafts of one RL step, cached; None without drafts."""
        if (drafter, step) not in self._fits:
            rows = self.trace.iterations
            assert rows is not None
            drafts = (rows["rl_step"] == step) & (rows["draft_depth"] > 0) & (rows["drafter"] == drafter)
            self._fits[drafter, step] = fit_acceptance(rows[drafts], self.trace.drafters)[0]
        return self._fits[drafter, step]

    @cached_property
    def _fits(self) -> dict[tuple[str, int], MeasuredAcceptance | None]:
        return {}


def rescaled(
    base: MeasuredAcceptance, drafter: str, each: Sequence[tuple[float, MeasuredAcceptance | None]]
) -> MeasuredAcceptance:
    """The base with a drafter's distributions pooled from RL steps after each one's chances were multiplied.

    Pooled first and multiplied then they would be too long: long drafts of a good drafter and short ones of a bad one
    are more tokens than as many of a drafter between them.
    """
    bands = []
    for at, band in enumerate(base.bands):
        pooled = {}
        for depth, cell in band.drafters_by_depth.get(drafter, {}).items():
            total = np.zeros(depth + 1)
            for ratio, fitted in each:
                measured = None if fitted is None else fitted.bands[at].drafters_by_depth.get(drafter, {}).get(depth)
                if measured is not None:
                    survival = np.cumsum(np.array(measured.accepted)[::-1])[::-1][1:]
                    total += (measured.num_samples or 1) * np.clip(from_survival(scaled(survival, ratio)), 0.0, 1.0)
            accepted = cell.accepted if total.sum() <= 0 else tuple((total / total.sum()).tolist())
            pooled[depth] = cell.model_copy(update={"accepted": accepted})
        cells_of = {name: cells for name, cells in band.drafters_by_depth.items() if name != drafter}
        bands.append(
            BatchBand(max_batch=band.max_batch, drafters_by_depth=cells_of | ({drafter: pooled} if pooled else {}))
        )
    return MeasuredAcceptance(bands=tuple(bands), copies=base.copies)
