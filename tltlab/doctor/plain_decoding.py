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
    """Rollouts with speculation take longer than plain decoding of the same responses would."""
    if not evidence.speculating["rl_step"].nunique() >= ENOUGH_STEPS:
        raise NotChecked(f"an interval needs {ENOUGH_STEPS} RL steps with speculation")
    worst: tuple[float, Finding] | None = None
    pairs = _decoding_s(evidence)
    names = {rl_step: evidence.policy_of_step[rl_step][0] for rl_step in pairs}
    judged = False
    for name in dict.fromkeys(names.values()):
        by_step = {rl_step: pair for rl_step, pair in pairs.items() if names[rl_step] == name}
        if len(by_step) < ENOUGH_STEPS:
            continue
        judged = True
        measured, plain = (np.array(side) for side in zip(*by_step.values(), strict=True))
        slowdown = ratio(measured, plain)
        if slowdown.low <= UNSURE:
            continue
        finding = problem(
            title=f"Policy {name} makes rollouts slower than no speculation",
            evidence=(
                f"Decoding took {measured.mean():.3g} s a rollout, plain decoding of the same responses would take "
                f"{plain.mean():.3g} s: {with_ends(slowdown)} times as long ({evidence.plain.source})."
            ),
            advice=(
                "Speculate at small batches only (activation.max_requests), draft less deep, or set rollout.policy = "
                "none; tltlab tune finds out which."
            ),
            where=f"RL steps {span(list(by_step))}",
        )
        if worst is None or slowdown.estimate > worst[0]:
            worst = (slowdown.estimate, finding)
    if not judged:
        raise NotChecked(f"no policy that speculates was in force for {ENOUGH_STEPS} RL steps")
    return worst[1] if worst else None


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


def _decoding_s(evidence: RunEvidence) -> dict[int, tuple[float, float]]:
    """By RL step with speculation: seconds of decoding on the slowest worker, measured and if plain.

    If plain, all responses of a worker run together from the start and end by length, which is exact where none waits.
    """
    outcomes, rows = evidence.known.outcomes, evidence.decoding
    waiting = rows["num_waiting"].fillna(0)
    if outcomes["worker"].isna().any() or waiting.max() > 0 or (outcomes["turn"] > 0).any():
        raise NotChecked("requests waited, came in turns, or ran on unknown workers: their plain decoding is not known")
    work = outcomes.merge(
        evidence.known.workload[["rl_step", "prompt_id", "sample", "turn", "prompt_tokens"]],
        on=["rl_step", "prompt_id", "sample", "turn"],
    )
    first = evidence.iterations.groupby(["rl_step", "worker"]).first()
    seconds_by_step: dict[int, tuple[float, float]] = {}
    for rl_step in sorted(evidence.speculating["rl_step"].unique().tolist()):
        measured = rows[rows["rl_step"] == rl_step].groupby("worker")["duration"].sum()
        plain = []
        for worker, responses in work[work["rl_step"] == rl_step].groupby("worker"):
            # A prefill that generates has made the first token already.
            head = first.loc[(rl_step, worker)] if (rl_step, worker) in first.index else None
            tokens_done = int(head is not None and head["prefill_tokens"] > 0 and head["num_generated"] > 0)
            plain.append(_plain_s(evidence, responses, tokens_done))
        if any(seconds is None for seconds in plain):
            continue
        longest = max(seconds or 0.0 for seconds in plain)
        if longest > 0:
            seconds_by_step[rl_step] = (float(measured.max()), longest)
    if not seconds_by_step:
        raise NotChecked("plain decoding was never seen at most of the batches that it would have run at")
    return seconds_by_step


def _plain_s(evidence: RunEvidence, work: pd.DataFrame, tokens_done: int) -> float | None:
    """Seconds of plain decoding of one worker's responses; None where its batches were mostly never seen."""
    lengths = np.sort(work["response_tokens"].to_numpy(np.int64) - tokens_done)
    order = np.argsort(work["response_tokens"].to_numpy(np.int64), kind="stable")
    prompts = work["prompt_tokens"].to_numpy(np.float64)[order]
    steps = np.arange(1, max(int(lengths[-1]), 0) + 1)
    ended = np.searchsorted(lengths, steps, side="left")
    batch = len(lengths) - ended
    running_prompts = np.concatenate([np.cumsum(prompts[::-1])[::-1], [0.0]])
    seconds = evidence.plain.seconds(batch, running_prompts[ended] + batch * (steps - 1 + tokens_done))
    covered = evidence.plain.covers(batch)
    if len(seconds) == 0 or seconds[covered].sum() < 0.8 * seconds.sum():
        return None
    return float(seconds.sum())


def _band(least: int) -> str:
    return str(least) if least == 1 else f"{least}-{2 * least - 1}"
