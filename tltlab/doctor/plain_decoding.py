"""Failure signatures of speculation against plain decoding: slower, or at too large batches."""

from __future__ import annotations

import numpy as np
import pandas as pd

from tltlab.stats import Interval

from .evidence import ENOUGH_STEPS, RunEvidence, ratio, with_ends
from .finding import Finding, NotChecked, check, problem, span

UNSURE = 1.05
"""Time against plain decoding from which speculation surely loses: fitted plain times miss held-out rollouts by up to
5 %, which an interval over RL steps does not see."""

LOSING_SHARE = 0.02
"""Share of decoding time in losing batches below which a change is not worth the trouble."""


@check("slower-than-plain", good="rollouts are not slower than plain decoding")
def slower_than_plain(evidence: RunEvidence) -> Finding | None:
    """Decoding under a policy that speculates takes longer than plain decoding of as many tokens would."""
    rows = evidence.decoding[evidence.decoding["rl_step"].isin(evidence.speculating["rl_step"])]
    names = rows["rl_step"].map({rl_step: name for rl_step, (name, _) in evidence.policy_of_step.items()})
    intervals = {str(name): against_plain(evidence, of_policy) for name, of_policy in rows.groupby(names)}
    judged = {name: slowdown for name, slowdown in intervals.items() if slowdown is not None}
    if not judged:
        raise NotChecked(f"no policy speculated in {ENOUGH_STEPS} RL steps at batches of which plain times are known")
    name, slowdown = max(judged.items(), key=lambda policy: policy[1].low)
    if slowdown.low <= UNSURE:
        return None
    return problem(
        title=f"Policy {name} makes rollouts slower than no speculation",
        evidence=(
            f"Decoding takes {with_ends(slowdown)} times as long as plain decoding of as many tokens at the same "
            f"batches would ({evidence.plain.source})."
        ),
        advice=(
            "Speculate at small batches only (activation.max_requests), draft less deep, or set rollout.policy = "
            "none; tltlab tune finds out which."
        ),
        where=f"RL steps {span(rows.loc[names == name, 'rl_step'].unique().tolist())}",
    )


@check("large-batches", good="no speculation at too large batches")
def large_batches(evidence: RunEvidence) -> Finding | None:
    """Speculation goes on at batches where it loses, though it gains at smaller ones."""
    bands = _bands(evidence)
    gaining = [least for least, slowdown in bands.items() if slowdown.high < 1]
    if not gaining:
        raise NotChecked("speculation surely gains at no batch size, so none is too large")
    losing = [least for least, slowdown in bands.items() if slowdown.low > UNSURE and least > min(gaining)]
    if not losing:
        return None
    table = evidence.decoding
    lost = evidence.speculating[evidence.speculating["batch"] >= min(losing)]
    share = lost["duration"].sum() / table["duration"].sum()
    if share < LOSING_SHARE:
        return None
    most = min(losing) - 1
    return problem(
        title="Speculation goes on at batches too large for it",
        evidence=(
            "Time against plain decoding of the same tokens: "
            + ", ".join(f"batch {_band(least)} {with_ends(slowdown)}" for least, slowdown in bands.items())
            + f"; {share:.0%} of the decoding time goes into drafts from batch {min(losing)} on "
            f"({evidence.plain.source})."
        ),
        advice=f"Set activation.max_requests to {most}, or give those batches a bucket with no speculation in it.",
        where=f"batches from {min(losing)}",
    )


def against_plain(evidence: RunEvidence, rows: pd.DataFrame) -> Interval | None:
    """Time of these iterations over that of plain decoding of as many tokens; None where too few are known."""
    rows = rows[evidence.plain.covers(rows["batch"])]
    rows = rows[rows["num_generated"] > 0]
    if rows["rl_step"].nunique() < ENOUGH_STEPS:
        return None
    plain = evidence.plain.seconds(rows["batch"], rows["context_tokens"]) * (rows["num_generated"] / rows["batch"])
    by_step = rows.assign(plain=plain).groupby("rl_step")[["duration", "plain"]].sum()
    return ratio(by_step["duration"].to_numpy(), by_step["plain"].to_numpy())


def _bands(evidence: RunEvidence) -> dict[int, Interval]:
    """`against_plain` of what speculated by batch, in bands from each power of 2 to below the next."""
    rows = evidence.speculating
    bands = 2 ** np.log2(rows["batch"].clip(lower=1)).astype(int)
    intervals = {int(least): against_plain(evidence, in_band) for least, in_band in rows.groupby(bands)}
    if not (by_band := {least: interval for least, interval in sorted(intervals.items()) if interval is not None}):
        raise NotChecked(f"no batch size was both decoded plainly and speculated at in {ENOUGH_STEPS} RL steps")
    return by_band


def _band(least: int) -> str:
    return str(least) if least == 1 else f"{least}-{2 * least - 1}"
