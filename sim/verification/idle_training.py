"""What `verify` knows of a run that trains its drafter: its age and updates in each RL step, the idle time used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from tltlab.acceptance.base import from_survival, scaled
from tltlab.acceptance.freshness import FreshAcceptance, MeasuredState
from tltlab.acceptance.measured import Band, BatchAcceptance
from tltlab.arrays import Floats
from tltlab.calibration.acceptance.freshness import fit_freshness
from tltlab.calibration.acceptance.measured import fit_acceptance
from tltlab.calibration.idle_training import fit_spot, recorded_updates
from tltlab.console import table
from tltlab.coordination.machine import CoordinatorConfig
from tltlab.coordination.progress import SpotTraining
from tltlab.errors import ConfigError
from tltlab.sim.idle_training import SpotResult
from tltlab.state import DrafterState
from tltlab.traces.trace import Trace

_AT_ONCE_S = 0.05
"""Clocks of workers and of the coordinator agree within this."""


@dataclass(frozen=True, kw_only=True)
class SpotRun:
    """The training and the drafters that a trace tells of; one without spot_training.parquet tells of no training."""

    trace: Trace

    @cached_property
    def updates(self) -> dict[int, int]:
        """Of each RL step in which a worker trained."""
        return {} if self._rows is None else recorded_updates(self._rows)

    @cached_property
    def states(self) -> dict[int, DrafterState]:
        """The learned drafter in service in each RL step whose row in `steps` tells its age and updates."""
        steps = self.trace.steps
        if steps is None:
            return {}
        rows = steps.dropna(subset=["drafter_age", "drafter_updates"])
        columns = (rows[name].astype(np.int64) for name in ("rl_step", "drafter_age", "drafter_updates"))
        return {step: DrafterState(age=age, updates=done) for step, age, done in zip(*columns, strict=True)}

    def model(self, step: int, fit_on: Sequence[int]) -> SpotTraining | None:
        """Rates fitted to RL steps near by, else to all but this one; None where it did not train or none other did."""
        if step not in self.updates:
            return None
        for chosen in (fit_on, [rl_step for rl_step in self.updates if rl_step != step]):
            try:
                return fit_spot(self.trace, chosen).model
            except ConfigError:
                continue
        return None

    def coordinator(self, step: int) -> CoordinatorConfig:
        """As many idle workers to begin with as the fewest that were idle when another RL step's training began."""
        assert self._rows is not None
        rows = self._rows[self._rows["rl_step"] != step]
        begins = rows.groupby(["rl_step", "term"], as_index=False)["t_start"].min()
        fewest = [
            int((self._ends(rl_step) <= begin + _AT_ONCE_S).sum())
            for rl_step, begin in zip(begins["rl_step"].tolist(), begins["t_start"].tolist(), strict=True)
        ]
        return CoordinatorConfig(min_idle_workers=max(1, min(fewest, default=1)))

    def acceptance(
        self, base: BatchAcceptance | None, step: int, fit_on: Sequence[int], seen_steps: Sequence[int]
    ) -> BatchAcceptance | FreshAcceptance | None:
        """Acceptance of some RL steps as it holds for the drafter of another one.

        Each of them is scaled by the level of its drafter, with a freshness fitted to acceptance.parquet in the RL
        steps `seen_steps` but `step`. Without several ages or numbers of updates there, or with an RL step whose
        drafter is unknown, it is the base itself.
        """
        table, iterations = self.trace.acceptance, self.trace.iterations
        if base is None or table is None or iterations is None or not {*fit_on, step} <= self.states.keys():
            return base
        history = table[table["rl_step"].isin([rl_step for rl_step in seen_steps if rl_step != step])]
        drafted = iterations.loc[iterations["rl_step"].isin(fit_on) & (iterations["draft_depth"] > 0), "drafter"]
        for drafter in sorted(set(base.drafters) & set(history["drafter"]) & set(drafted)):
            try:
                fitted = fit_freshness(history, drafter)
            except ConfigError:
                continue
            state = self.states[step]
            level = {s: fitted.freshness.level(self.states[s].age, self.states[s].updates) for s in (*fit_on, step)}
            ratios = [(level[step] / level[s], self._drafted(drafter, s)) for s in fit_on if level[s] > 0.0]
            return FreshAcceptance(
                base=rescaled(base, drafter, ratios),
                drafter=drafter,
                freshness=fitted.freshness,
                measured=MeasuredState(age=state.age, updates=state.updates),
            )
        return base

    def _drafted(self, drafter: str, step: int) -> BatchAcceptance | None:
        """What a drafter's drafts of one RL step say, fitted once; None where there are none."""
        if (drafter, step) not in self._fits:
            rows = self.trace.iterations
            assert rows is not None
            drafts = (rows["rl_step"] == step) & (rows["draft_depth"] > 0) & (rows["drafter"] == drafter)
            self._fits[drafter, step] = fit_acceptance(rows[drafts])[0]
        return self._fits[drafter, step]

    @cached_property
    def _fits(self) -> dict[tuple[str, int], BatchAcceptance | None]:
        return {}

    def columns(self, step: int, simulated: Sequence[SpotResult | None]) -> dict[str, Any]:
        """What training adds to the row of an RL step; predictions are NaN where there is none.

        Where workers stopped by themselves in other RL steps, no more updates are predicted than these came to.
        """
        if self._rows is None:
            return {}
        results = [result for result in simulated if result is not None]
        declined = self._rows[(self._rows["ended"] == "declined") & (self._rows["rl_step"] != step)]
        most = max((self.updates[int(rl_step)] for rl_step in declined["rl_step"]), default=math.inf)
        updates = float(np.mean([r.trained.updates for r in results])) if results else float("nan")
        used = float(np.mean([r.used_share for r in results])) if results else float("nan")
        allowed = min(1.0, most / updates) if updates > 0 else 1.0
        ends = self._ends(step)
        idle_s = float((ends.max() - ends).sum())
        rows = self._rows[self._rows["rl_step"] == step]
        # The last update may outlast the idle time: a row's updates count in proportion to what lies within.
        begin, end = rows["t_start"], rows["t_start"] + rows["duration"]
        within_s = end.clip(upper=ends.max()) - begin.clip(lower=pd.Series(ends[rows["worker"]], index=rows.index))
        trained_s = float((rows["train_s"] * (within_s / rows["duration"]).clip(0.0, 1.0)).sum())
        return {
            "updates": self.updates.get(step, 0),
            "predicted_updates": updates * allowed,
            "used_share": trained_s / idle_s if idle_s > 0 else 0.0,
            "predicted_used_share": used * allowed,
        }

    @cached_property
    def _rows(self) -> pd.DataFrame | None:
        table = self.trace.spot_training
        if table is None:
            return None
        return table[(table["duration"] > 0) & table["rl_step"].isin(self.trace.rl_steps)]

    def _ends(self, step: int) -> Floats:
        """When each worker had nothing left; 0 for one that never had anything."""
        assert self._rows is not None
        rows = self._last_iterations
        mine = rows[rows["rl_step"] == step]
        last = pd.concat([rows["worker"], self._rows["worker"]]).max()
        ends = np.zeros(max(self.trace.manifest.num_workers or 1, 1 + int(last)))
        ends[mine["worker"].to_numpy(np.int64)] = mine["end"]
        return ends

    @cached_property
    def _last_iterations(self) -> pd.DataFrame:
        rows = self.trace.iterations
        assert rows is not None
        ends = rows[["rl_step", "worker"]].assign(end=rows["t_start"] + rows["duration"])
        return ends.groupby(["rl_step", "worker"], as_index=False).max()


def rescaled(
    base: BatchAcceptance, drafter: str, each: Sequence[tuple[float, BatchAcceptance | None]]
) -> BatchAcceptance:
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
        bands.append(Band(max_batch=band.max_batch, drafters_by_depth=cells_of | ({drafter: pooled} if pooled else {})))
    return BatchAcceptance(bands=tuple(bands))


def median_error(rows: pd.DataFrame) -> float | None:
    """Median absolute error of predicted updates over RL steps with updates; None where none could be predicted."""
    if "updates" not in rows:
        return None
    predicted = rows[(rows["updates"] > 0) & rows["predicted_updates"].notna()]
    return float((predicted["predicted_updates"] / predicted["updates"] - 1).abs().median()) if len(predicted) else None


def text(rows: pd.DataFrame) -> list[str]:
    """Lines for people, nothing for a run that did not train."""
    if "updates" not in rows:
        return []
    cells = []
    for row in rows.to_dict("records"):
        ahead = f"{row['predicted_updates']:.1f}", f"{row['used_share']:.1%}", f"{row['predicted_used_share']:.1%}"
        cells.append((row["rl_step"], row["updates"], *(() if np.isnan(row["predicted_updates"]) else ahead)))
    lines = ["", table(["step", "updates", "predicted", "idle time used", "predicted"], cells, left=0)]
    error = median_error(rows)
    total = "no RL step's drafter updates could be predicted from the others"
    if error is not None:
        total = f"drafter updates on steps not fitted on: median error {error:.1%}"
    return [*lines, "", total]
