"""Logged decisions joined with what came of them: one row per decision, with its state, propensity and reward.

Recorder and simulator both number a decision by the iteration that verified its drafts, the first of them where one
decision holds for several. By the trace's attribution (its iterations draft for the next one) the decision's seconds
are the sum of duration[i] - draft_duration[i] + draft_duration[i - 1] over its iterations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from sklearn.isotonic import IsotonicRegression

from tltlab.errors import ConfigError, TraceError
from tltlab.policies.reward import Reward, RewardKind
from tltlab.state import StepOutcome, StepState
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.traces.trace import Trace

PLACE = ["rl_step", "worker"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """One decision: what was known, what was chosen with which chance, and what came of it."""

    state: StepState
    strategy: Strategy
    propensity: float
    outcome: StepOutcome
    reward: float

    @property
    def at_random(self) -> bool:
        return self.propensity < 1.0 - 1e-6


def logged_decisions(trace: Trace, reward: RewardKind = "relative") -> tuple[list[Logged], Reward]:
    """The decisions of a trace in the order of RL step, worker and iteration, and what their rewards are made with.

    Decisions over an iteration with prefill have no reward and are left out, as bandits leave them out. `relative`
    needs plain iterations in the log: their median time by batch size, made monotone, is what speed-up is measured
    against.
    A recorded choice is made while the iteration before runs, so that one's batch is its state; a simulated one sees
    its own. Raises ConfigError where the trace has no decisions or no plain iteration.
    """
    decisions, iterations = trace.decisions, trace.iterations
    if decisions is None or iterations is None or not len(decisions):
        raise ConfigError(
            f"{trace.path or 'the trace'} has no decisions: record with iterations, or simulate --record-iterations"
        )
    rows = _joined(decisions, iterations, own_state=trace.manifest.kind == "simulated")
    kind = _reward(rows, reward)
    logged: list[Logged] = []
    before: dict[tuple[int, int], Strategy] = {}
    for row in rows.to_dict("records"):
        strategy = Strategy(row["drafter"], int(row["draft_depth"]), int(row["top_k"]), int(row["tokens_to_verify"]))
        batch = int(row["batch"])
        place = (int(row["rl_step"]), int(row["worker"]))
        previous, before[place] = before.get(place, NO_SPECULATION), strategy
        outcome = StepOutcome(
            elapsed_s=float(row["elapsed_s"]),
            batch=batch,
            drafted=(float(row["drafted"]) / batch,) * batch if strategy.speculates else (),
            accepted=tuple(row["accepted"]) if strategy.speculates else (),
            had_prefill=row["prefill_tokens"] > 0,
        )
        value = kind(strategy, outcome)
        if value is None:
            continue
        state = StepState(
            rl_step=place[0],
            worker=place[1],
            batch=int(row["state_batch"]),
            waiting=int(row["state_waiting"]),
            context_tokens=float(row["state_context"]),
            strategy=previous,
        )
        chance = float(row["propensity"])
        logged.append(Logged(state=state, strategy=strategy, propensity=chance, outcome=outcome, reward=value))
    if not logged:
        raise ConfigError("no decision has a reward: all of them fell on iterations with prefill")
    return logged, kind


def _joined(decisions: pd.DataFrame, iterations: pd.DataFrame, own_state: bool) -> pd.DataFrame:
    order = [*PLACE, "iteration"]
    table = iterations.sort_values(order, kind="stable").reset_index(drop=True)
    draft_s = table["draft_duration"].fillna(0.0) if "draft_duration" in table else pd.Series(0.0, table.index)
    same = [table[name] for name in PLACE]
    table["elapsed_s"] = table["duration"] - draft_s + draft_s.groupby(same).shift(fill_value=0.0)
    waiting = table["num_waiting"].fillna(0) if "num_waiting" in table else pd.Series(0, table.index)
    for name, values in {"batch": table["batch"], "waiting": waiting, "context": table["context_tokens"]}.items():
        table[f"state_{name}"] = values if own_state else values.groupby(same).shift().fillna(values)
    chosen = decisions.sort_values(order, kind="stable").assign(decision=np.arange(len(decisions)))
    columns = [*order, "decision", "propensity", "drafter", "draft_depth", "top_k", "tokens_to_verify"]
    table = table.drop(columns=["drafter", "draft_depth", "top_k", "tokens_to_verify"], errors="ignore")
    table = table.merge(chosen[columns], on=order, how="left", validate="one_to_one")
    if int(table["decision"].notna().sum()) != len(chosen):
        raise TraceError("decisions.parquet: a decision belongs to an iteration that iterations.parquet does not have")
    table["decision"] = table.groupby(PLACE)["decision"].ffill()
    table = table[table["decision"].notna() & (table["batch"] > 0)]
    # A decision that holds for several iterations: seconds and tokens of the mean one.
    groups = table.groupby("decision", sort=True)
    rows = groups.first()
    rows["elapsed_s"] = groups["elapsed_s"].mean()
    rows["prefill_tokens"] = groups["prefill_tokens"].sum()
    rows["drafted"] = groups["num_drafted"].mean()
    tokens = groups["num_accepted"].mean()
    single = groups.size() == 1
    each = rows["accepted_per_request"] if "accepted_per_request" in rows else pd.Series(None, rows.index, dtype=object)
    rows["accepted"] = [
        list(counts) if alone and counts is not None and len(counts) == batch else [total / batch] * int(batch)
        for counts, alone, total, batch in zip(each, single, tokens, rows["batch"], strict=True)
    ]
    return rows.reset_index()


def _reward(rows: pd.DataFrame, kind: RewardKind) -> Reward:
    if kind == "paper":
        return Reward("paper")
    plain = rows[(rows["draft_depth"] == 0) & (rows["prefill_tokens"] == 0) & (rows["elapsed_s"] > 0)]
    if not len(plain):
        raise ConfigError(
            "reward 'relative' compares with plain decoding, and the log has no plain iteration: take reward 'paper'"
        )
    # Medians of few iterations scatter; plain time does not fall with the batch, so neighbours may be pooled.
    groups = plain.groupby("batch")["elapsed_s"]
    medians = groups.median().sort_index()
    batches = medians.index.to_numpy(np.float64)
    weights = groups.size().sort_index()
    seconds = IsotonicRegression().fit(batches, medians, sample_weight=weights).predict(batches)
    return Reward("relative", {int(b): float(b / s) for b, s in zip(batches, seconds, strict=True)})
