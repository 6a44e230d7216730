"""Turns simulated rollouts into the tables a recorder writes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from tltlab.schema import KEY, TABLES

from .batch import MacroStep
from .engine import Rollout

WORKLOAD = (*KEY, "epoch", "prompt_tokens", "max_response_tokens", "policy_version")


def tables(rollouts: Sequence[Rollout], policy: str, *, iterations: bool) -> dict[str, pd.DataFrame]:
    """Workload, outcomes, steps and spans; with `iterations` also iterations and decisions, row by row."""
    built = {
        "workload": pd.concat([r.requests.rows[list(WORKLOAD)] for r in rollouts], ignore_index=True),
        "outcomes": pd.concat([_outcomes(r) for r in rollouts], ignore_index=True),
        "steps": _steps(rollouts, policy),
        "spans": pd.concat([_spans(r) for r in rollouts], ignore_index=True),
    }
    if iterations:
        built["iterations"] = _concat("iterations", [_iterations(r, w) for r in rollouts for w in range(len(r.logs))])
        built["decisions"] = _concat("decisions", [_decisions(r, w) for r in rollouts for w in range(len(r.logs))])
    return built


def _concat(table: str, parts: list[pd.DataFrame]) -> pd.DataFrame:
    filled = [part for part in parts if len(part)]
    return pd.concat(filled, ignore_index=True) if filled else pd.DataFrame(columns=TABLES[table].names)


def _outcomes(rollout: Rollout) -> pd.DataFrame:
    kept = [c for c in ("reward", "tool_s") if c in rollout.requests.rows]
    out = rollout.requests.rows[[*KEY, "response_tokens", "finish_reason", *kept]].copy()
    out["worker"] = rollout.worker_of
    out["t_submit"] = 0.0
    out["t_first_token"] = np.array(rollout.first_token_s, dtype=np.float64)
    out["t_finish"] = rollout.finish_s
    return out


def _steps(rollouts: Sequence[Rollout], policy: str) -> pd.DataFrame:
    lengths = np.array([r.makespan_s for r in rollouts])
    return pd.DataFrame(
        {
            "rl_step": [r.requests.rl_step for r in rollouts],
            "t_start": np.cumsum(lengths) - lengths,
            "rollout_s": lengths,
            "policy": policy,
            "policy_version": [r.requests.policy_version for r in rollouts],
        }
    )


def _spans(rollout: Rollout) -> pd.DataFrame:
    rows: list[tuple[str, str, float, float, int | None, str | None]] = []
    for w, log in enumerate(rollout.logs):
        lane = f"worker {w}"
        for entry in log:
            macro = entry.macro
            if entry.prefill_s > 0:
                rows.append((lane, "prefill", entry.start_s, entry.prefill_s, macro.batch, None))
            strategy = macro.regime.strategy
            kind, detail = ("speculative_decode", str(strategy)) if strategy.speculates else ("decode", None)
            rows.append((lane, kind, entry.start_s + entry.prefill_s, macro.seconds, macro.batch, detail))
        idle_s = rollout.makespan_s - rollout.worker_end_s[w]
        if idle_s > 0:
            rows.append((lane, "idle", rollout.worker_end_s[w], idle_s, 0, None))
    spans = pd.DataFrame(rows, columns=["lane", "kind", "t_start", "duration", "batch", "detail"])
    spans.insert(0, "rl_step", rollout.requests.rl_step)
    return spans


def _iterations(rollout: Rollout, worker: int) -> pd.DataFrame:
    """One row per iteration, in the recorder's attribution: what an iteration drafts, the next one verifies.

    So row i lasts from the start of its verification to the start of the next one and holds the drafting for i + 1;
    the first row of a step also holds its prefill and its own drafting.
    """
    log = rollout.logs[worker]
    if not log:
        return pd.DataFrame()
    counts = np.array([e.macro.num_iterations for e in log])
    of = np.repeat(np.arange(len(log)), counts)
    first = (np.cumsum(counts) - counts)[of] == np.arange(counts.sum())

    def each(values: list[float]) -> npt.NDArray[np.float64]:
        return np.array(values, dtype=np.float64)[of]

    macros = [e.macro for e in log]
    batch = each([m.batch for m in macros])
    gained = [_tokens(m) for m in macros]
    tokens = np.concatenate(gained)
    context = np.concatenate([m.context_tokens + np.cumsum(t) - t for m, t in zip(macros, gained, strict=True)])
    draft_s = each([m.regime.cost.draft_s(m.batch) for m in macros])
    verify_s = each([m.regime.fixed_s(m.batch) - m.regime.cost.draft_s(m.batch) for m in macros])
    verify_s += each([m.regime.slope_s(m.batch) for m in macros]) * context
    next_draft_s = np.append(draft_s[1:], 0.0)
    prefill_s = np.where(first, each([e.prefill_s for e in log]), 0.0)
    duration = prefill_s + verify_s + next_draft_s
    duration[0] += draft_s[0]
    depth = each([m.regime.strategy.draft_depth for m in macros]).astype(np.int64)
    drafted = _whole(each([m.batch * m.regime.num_drafted for m in macros]))
    accepted = np.minimum(_whole(tokens - batch), drafted)
    return pd.DataFrame(
        {
            "rl_step": rollout.requests.rl_step,
            "worker": worker,
            "iteration": np.arange(len(of)),
            "t_start": np.cumsum(duration) - duration,
            "duration": duration,
            "draft_duration": next_draft_s,
            "batch": batch.astype(np.int64),
            "num_waiting": each([e.waiting for e in log]).astype(np.int64),
            "context_tokens": np.rint(context).astype(np.int64),
            "prefill_tokens": np.where(first, np.rint(each([e.prefill_tokens for e in log])), 0).astype(np.int64),
            "drafter": np.array([m.regime.strategy.drafter for m in macros], dtype=object)[of],
            "draft_depth": depth,
            "top_k": each([m.regime.strategy.top_k for m in macros]).astype(np.int64),
            "tokens_to_verify": each([m.regime.strategy.tokens_to_verify for m in macros]).astype(np.int64),
            "num_drafted": drafted,
            "num_accepted": accepted,
            "num_generated": batch.astype(np.int64) + accepted,
            "accepted_per_request": [row for entry in log for row in _accepted_rows(entry.macro)],
            "next_draft_depth": np.append(depth[1:], 0),
        }
    )


def _tokens(macro: MacroStep) -> npt.NDArray[np.float64]:
    """Tokens that came out of each iteration of a macro-step."""
    if macro.gains is None:
        return np.full(macro.num_iterations, macro.batch * macro.regime.tokens)
    return np.asarray(macro.gains.sum(axis=0), np.float64)


def _accepted_rows(macro: MacroStep) -> list[list[int] | None]:
    if macro.gains is None:
        return [None] * macro.num_iterations
    rows: list[list[int] | None] = (macro.gains.T - 1).tolist()
    return rows


def _whole(expected: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Whole numbers whose running sum stays within a half of the expected one."""
    return np.diff(np.rint(np.cumsum(expected)).astype(np.int64), prepend=0)


def _decisions(rollout: Rollout, worker: int) -> pd.DataFrame:
    rows = []
    for entry in rollout.logs[worker]:
        if entry.asked:
            s = entry.macro.regime.strategy
            strategy = (s.drafter, s.draft_depth, s.top_k, s.tokens_to_verify)
            rows.append((entry.first_iteration, entry.bucket, *strategy, entry.propensity, entry.reward))
    names = ["iteration", "bucket", "drafter", "draft_depth", "top_k", "tokens_to_verify", "propensity", "reward"]
    table = pd.DataFrame(rows, columns=names)
    table.insert(0, "rl_step", rollout.requests.rl_step)
    table.insert(1, "worker", worker)
    return table
