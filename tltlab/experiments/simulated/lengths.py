"""lengths: what prompts, history, siblings and what was generated so far say of lengths, in seconds of a rollout.

Simulated. Predictions place responses longest first, before the rollout or once in mid-rollout, without speculation; or
they say whom `adaptive` is to draft for. All are held against the same with the true lengths, which nobody knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field
from scipy.stats import spearmanr  # type: ignore[import-untyped, unused-ignore]

from tltlab.acceptance.base import GeometricAcceptance
from tltlab.arrays import Ints
from tltlab.charts import bars
from tltlab.drafters.base import Key
from tltlab.drafters.budget import DraftBudget, UniformBudget
from tltlab.errors import ConfigError
from tltlab.experiments import Progress
from tltlab.experiments.result import ExperimentResult
from tltlab.lengths.predict import LengthPredictor, features, is_cut
from tltlab.policies.policy import SHIPPED, Policy
from tltlab.policies.selector import Selector
from tltlab.sim.engine.requests import Requests, requests_by_step
from tltlab.sim.placement import longest_first, place
from tltlab.sim.scenario import PolicyLike, Scenario
from tltlab.state import StepState
from tltlab.stats import resampled_ratio
from tltlab.strategy import Strategy
from tltlab.traces.trace import Trace, read

SYNTHETIC_COSTS = "h100-qwen2.5-7b"
LEAST_GAIN = 0.02
"""Share of the rollout below which there is nothing to gain from true lengths, and no share of it either."""

BEFORE, MID, DRAFTS = "before the rollout", "in mid-rollout", "in drafting for the longest"
LONG, KEPT = 0.5, 0.7
"""With drafts: who has at least this share of the longest's tokens to come is drafted for, and tokens are kept with
this chance."""
SHUFFLES = 4
"""Random placements whose mean stands for knowing nothing."""

QUESTIONS: Mapping[tuple[str, str], tuple[str, ...]] = {
    (BEFORE, "nothing: dealt out in turn"): (),
    (BEFORE, "prompt"): ("prompt",),
    (BEFORE, "prompt, history"): ("prompt", "history"),
    (MID, "generated"): (),
    (MID, "generated, prompt, history"): ("prompt", "history"),
    (MID, "generated, prompt, history, siblings"): ("prompt", "history", "siblings"),
    (DRAFTS, "prompt, history"): ("prompt", "history"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthsSettings:
    """Traces by name in the folder `traces`, on `workers` each; of the second half, `rl_steps` are predicted."""

    names: tuple[str, ...] = ("tiny", "subset-sum-small", "gcd-small", "h100-smoke", "base-rl-16k", "reasoning-32k")
    traces: Path = Path("traces")
    workers: Annotated[int, Field(ge=2)] = 6
    rl_steps: Annotated[int, Field(ge=1)] = 8


FAST: Mapping[str, Any] = {"rl_steps": 1}


class LongestBudget(DraftBudget):
    """Full drafts for who still has the most tokens to come by `lengths`, none for those with less than half of it."""

    def __init__(self, lengths: Mapping[Key, float]) -> None:
        self.lengths = lengths

    def allot(self, state: StepState, strategy: Strategy) -> list[int]:
        tokens_left = [max(self.lengths[r.key] - r.generated_tokens, 1.0) for r in state.requests]
        return [strategy.draft_depth if tokens >= LONG * max(tokens_left) else 0 for tokens in tokens_left]


@dataclass(frozen=True)
class DraftsForLongest:
    """`adaptive` in the simulator, which drafts for the longest by `lengths`, or for all alike where they are None."""

    lengths: Mapping[Key, float] | None
    policy: Policy = SHIPPED["adaptive"]

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        return self.policy.strategies

    def build(self, rng: np.random.Generator) -> Selector:
        return self.policy.build(rng)

    def build_budget(self) -> DraftBudget:
        return UniformBudget() if self.lengths is None else LongestBudget(self.lengths)


def run(settings: LengthsSettings, *, folder: Path, seed: int, progress: Progress) -> ExperimentResult:
    """The experiment; ConfigError for a trace that is not there or has one RL step only."""
    rows: list[dict[str, Any]] = []
    for name in settings.names:
        progress(name)
        rows += on_trace(read(settings.traces / name), settings.workers, settings.rl_steps, name)
    frame = pd.DataFrame(rows)
    notes = (
        "share: of the time that longest first with the true lengths saves against as many responses on each worker, "
        "dealt out at random, what the prediction saves; intervals of 95 % over RL steps",
        "dealt out in turn, the siblings of a prompt are spread over the workers, which needs no prediction; where "
        "predictions of siblings are alike, as before the rollout, it may be all that they can do",
        f"no share where true lengths save less than {LEAST_GAIN:.1%} of the rollout: there is nothing to reach",
        f"in drafting: adaptive drafts for those with {LONG:.0%} or more of the longest's tokens to come, by true and "
        f"by predicted lengths, against drafts for all; {KEPT:.0%} of the tokens are kept",
        "rank: Spearman's correlation with the tokens to come, over the responses of an RL step",
        "each RL step is predicted from those before it; in mid-rollout all that run have as many tokens as half of "
        "the earlier responses had in all, and what they have is prefilled again where they go",
        "the mid-rollout saving is of what is left of the rollout then",
    )
    return ExperimentResult(verdict=verdict(frame), rows=frame, figure=_picture(frame), prediction=True, notes=notes)


def on_trace(trace: Trace, workers: int, most_steps: int, name: str) -> list[dict[str, Any]]:
    """A row per question: the clairvoyant saving, the share that the prediction reaches, and its rank correlation."""
    steps = trace.rl_steps
    if len(steps) < 2:
        raise ConfigError(f"{name}: one RL step only; there is nothing to learn lengths from")
    costs = None if trace.path is not None and (trace.path / "costs.json").is_file() else SYNTHETIC_COSTS
    scenario = Scenario.of(trace, costs=costs, acceptance=None, workers=workers)
    requests = {step.rl_step: step for step in requests_by_step(trace)}
    table = trace.workload.merge(trace.outcomes, on=["rl_step", "prompt_id", "sample", "turn"], sort=False)
    chosen = steps[len(steps) // 2 :][-most_steps:]
    rows = []
    for (moment, knows), names in QUESTIONS.items():
        plays = [_step(scenario, requests[step], table, step, moment, names) for step in chosen]
        plain, true, predicted = (np.array([row[i] for row in plays]) for i in range(3))
        gain, reached = plain - true, plain - predicted
        worth = gain.sum() > LEAST_GAIN * plain.sum()
        low, high = resampled_ratio(reached, gain) if worth and len(plays) > 2 and (gain > 0).all() else (math.nan,) * 2
        rows.append(
            {
                "trace": name, "moment": moment, "knows": knows, "rl_steps": len(plays),
                "rollout_s": float(plain.mean()),
                "clairvoyant_saves": float(gain.sum() / plain.sum()),
                "share": float(reached.sum() / gain.sum()) if worth else math.nan, "share_low": low, "share_high": high,
                "rank": float(np.mean([row[3] for row in plays])),
            }
        )  # fmt: skip
    return rows


def _step(
    scenario: Scenario, requests: Requests, table: pd.DataFrame, step: int, moment: str, knows: Sequence[str]
) -> tuple[float, float, float, float]:
    """Seconds as placed, by true lengths and by predicted ones, and the rank correlation."""
    earlier = (table["rl_step"] < step).to_numpy()
    in_step = (table["rl_step"] == step).to_numpy()
    tokens = table["response_tokens"].to_numpy(np.float64)
    mid = moment == MID
    at = float(np.median(tokens[earlier])) if mid else 0.0
    x = features(table, at, knows)
    train, test = earlier & (tokens > at), in_step & (tokens > at)
    cut = is_cut(table)
    tokens_left = tokens - at
    predictor = LengthPredictor()
    try:
        expected = predictor.fit(x[train], tokens_left[train], cut[train]).predict(x[test])
    except ConfigError:
        expected = np.ones(int(test.sum()))
    indices: Ints = np.flatnonzero(test[in_step]).astype(np.int64)
    if mid:
        requests = _remainder(requests, indices, round(at))
    lengths = requests.response_tokens
    rng = np.random.default_rng([step, mid])
    guess = [round(value) for value in expected.tolist()]
    varied = len(lengths) > 2 and np.ptp(expected) > 0 and np.ptp(lengths) > 0
    rank = float(spearmanr(expected, lengths).statistic) if varied else 0.0
    if moment == DRAFTS:
        drafting = replace(scenario, acceptance=GeometricAcceptance(alpha=KEPT))
        queues = place(requests, scenario.workers, "round_robin")
        hints = (None, *(dict(zip(requests.keys, tokens, strict=True)) for tokens in (lengths, guess)))
        alike_s, true_s, predicted_s = (_seconds(drafting, requests, queues, DraftsForLongest(hint)) for hint in hints)
        return alike_s, true_s, predicted_s, rank
    dealt = [np.array_split(rng.permutation(len(lengths)), scenario.workers) for _ in range(SHUFFLES)]
    plain_s = float(np.mean([_seconds(scenario, requests, [q.tolist() for q in queues]) for queues in dealt]))
    true_s = _seconds(scenario, requests, longest_first(lengths, scenario.workers))
    predicted_s = _seconds(scenario, requests, longest_first(guess, scenario.workers))
    return plain_s, true_s, predicted_s, rank


def _remainder(requests: Requests, indices: Ints, at: int) -> Requests:
    """What is left of the responses that still run when all have `at` tokens."""
    chosen = indices.tolist()
    return replace(
        requests,
        keys=[requests.keys[i] for i in chosen],
        prompt_tokens=[requests.prompt_tokens[i] + at for i in chosen],
        max_response_tokens=[max(1, requests.max_response_tokens[i] - at) for i in chosen],
        response_tokens=[requests.response_tokens[i] - at for i in chosen],
        recorded_worker=[None for _ in chosen],
        rows=requests.rows.iloc[chosen].reset_index(drop=True),
    )


def _seconds(
    scenario: Scenario, requests: Requests, queues: list[list[int]], policy: PolicyLike = SHIPPED["none"]
) -> float:
    placed = replace(scenario, steps=(requests,), queues=(queues,))
    return float(placed.rollouts(policy)[0].makespan_s)


def verdict(rows: pd.DataFrame) -> str:
    """What predictions from all that is known reach at each moment, where most and where least."""
    clauses = []
    for moment in (BEFORE, MID, DRAFTS):
        reached = rows[(rows["moment"] == moment) & rows["share"].notna()]
        if reached.empty:
            clauses.append(f"{moment} there is nothing to gain")
            continue
        # The last question of a moment is the one that knows most.
        best = reached.groupby("trace").tail(1).sort_values("share")
        worst, top = best.iloc[0], best.iloc[-1]
        clauses.append(
            f"{moment} predictions reach {worst['share']:.0%} ({worst['trace']}) to {top['share']:.0%} "
            f"({top['trace']}) of what true lengths save, "
            f"{best['clairvoyant_saves'].min():.1%} to {best['clairvoyant_saves'].max():.1%}"
        )
    return f"simulated, {'; '.join(clauses)}"


def _picture(rows: pd.DataFrame) -> Figure:
    """Shares by trace and knowledge."""
    shown = rows[rows["share"].notna()]
    labels = [f"{row['trace']}, {row['moment']}: {row['knows']}" for row in shown.to_dict("records")]
    return bars(
        labels, shown["share"].to_numpy(), shown["share_low"].to_numpy(), shown["share_high"].to_numpy(),
        xlabel="share of the clairvoyant gain", title="Longest first by predicted lengths (simulated)", reference=1.0,
    )  # fmt: skip
