"""Tests on how RL steps change over a run: stages that grow, drafts that are kept no more, turns and tools."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pandas as pd

from tltlab.arrays import Floats

from .check import Facts, NotChecked, rl_steps
from .evidence import NO_LOG, RunEvidence, stage_label

LEAST_SIDE = 2  # RL steps before and behind a change: a single slow one is none
GROWN_SHARE = 0.1  # share of the RL step by which a stage must grow: below it there is little to gain
LARGE_SHARE = 0.3  # share of the RL step from which a stage that grew is a problem
COLLAPSED = 1.05  # accept length up to which no draft is kept, up to rounding
KEPT = 1.2  # accept length of a drafter that did work: TLT's Fig 13 has its cheapest step at 1.71 plain ones
LOST = 0.5  # share of the tokens gained per draft that a fall must take
SLOWER = 1.3  # seconds per token over those before: single rollouts vary by some 10 %

TIMES = "; rollouts take {took_s:.3g} s after {before_s:.3g} s, {times:.2f} times as long per token"


def stage_grows(run: RunEvidence) -> Facts | None:
    """A stage takes far more of the RL step late in the run than early."""
    stages = run.stages
    if len(stages) < 2 * LEAST_SIDE + 1:
        raise NotChecked(f"a change needs {2 * LEAST_SIDE + 1} RL steps whose stages are timed")
    found: list[Facts] = []
    for name in stages.columns.difference(["step", "rollout"]):
        timed = stages[stages[name].notna() & (stages["step"] > 0)]
        at = change(timed[name].to_numpy(np.float64))
        if at is None:
            continue
        before, behind = timed.iloc[:at], timed.iloc[at:]
        # A stage that is not in every RL step is a smaller share of all of them.
        whole_before, whole_behind = (
            stages.loc[(stages.index >= rows.index[0]) & (stages.index <= rows.index[-1]), "step"].sum()
            for rows in (before, behind)
        )
        was, share = before[name].sum() / whole_before, behind[name].sum() / whole_behind
        if share - was < GROWN_SHARE:
            continue
        busy = whole_behind - (behind["wait"].sum() if "wait" in behind and name != "wait" else 0.0)
        own = behind[name].sum() / busy
        waiting = "" if round(own, 2) == round(share, 2) else f", {own:.0%} of it without waiting for rollouts"
        found.append({
            "title": stage_label(name)[:1].upper() + stage_label(name)[1:], "first": int(behind.index[0]), "was": was,
            "share": share, "own": own, "waiting": waiting, "took_s": behind[name].median(),
            "took_before_s": before[name].median(), "step_s": behind["step"].median(), "remedy": run.remedy(name),
            "severity": "problem" if share >= LARGE_SHARE else "hint", "where": rl_steps(behind.index),
        })  # fmt: skip
    return max(found, key=lambda facts: float(facts["share"] - facts["was"]), default=None)


def drafts_collapse(run: RunEvidence) -> Facts | None:
    """Accept length falls, to one token or far down, while drafts continue."""
    rows = _drafted(run)
    length = rows["accept_length"].to_numpy(np.float64)
    none_kept = length <= COLLAPSED
    if none_kept.all():
        at = 0
    elif none_kept.any():
        at = int(none_kept.argmax())
    else:
        split = change(-length)
        if split is None or np.median(length[split:]) - 1 > LOST * (np.median(length[:split]) - 1):
            return None
        at = split
    bad = rows[none_kept] if none_kept.any() else rows.iloc[at:]
    before = rows.iloc[:at] if at else rows[~none_kept]
    on = bool(bad["has_drafts"].all())
    if (len(before) and before["accept_length"].median() < KEPT) or len(bad) < (1 if on else LEAST_SIDE):
        return None
    slower = _slower(run, before["rl_step"], bad["rl_step"])
    # A log may write one token per draft where nothing was drafted.
    sure = on or (len(before) > 0 and slower is not None and slower["times"] >= KEPT)
    if not sure and not len(before):
        raise NotChecked("accept length is 1 in all RL steps, and the log has no number of drafts")
    first, kept = int(bad["rl_step"].iloc[0]), "kept no more" if none_kept.any() else "kept far less"
    if run.log is not None and run.log["accept_length"].isna().all():
        subject, name, form = "The share of drafted tokens that is kept", "draft_rate", ".0%"
    else:
        subject, name, form = "Accept length", "accept_length", ".2f"
    was, now = (format(rows[name].median(), form) for rows in (before, bad))
    return {
        "title": f"Drafts are {kept} from {run.unit} {first} on" if at else "Drafts are not kept",
        "fall": f"{subject} falls from {was} to {now}" if len(before) else f"{subject} is {now}",
        "going_on": "while drafts continue" if on else "or nothing was drafted, which the log does not show",
        "rate": _rates(before, bad) if name == "accept_length" else "",
        "times": "" if slower is None else TIMES.format(**slower),
        "severity": "problem" if sure else "hint", "where": rl_steps(bad["rl_step"], run.unit),
    }  # fmt: skip


def rollout_slower(run: RunEvidence) -> Facts | None:
    """Rollouts take longer for the same lengths late in the run than early, and it is not for the drafts."""
    rows = run.per_token
    at = change(rows["per_token"].to_numpy(np.float64))
    if at is None:
        return None
    before, behind = rows.iloc[:at], rows.iloc[at:]
    facts = _slower(run, before["rl_step"], behind["rl_step"])
    longest = behind["per_longest"].median() / before["per_longest"].median()
    if facts is None or min(facts["times"], longest) < SLOWER:
        return None
    collapse = None
    with suppress(NotChecked):
        collapse = drafts_collapse(run)
    if collapse is not None:
        raise NotChecked("drafts that are not kept explain what rollouts take")
    return facts | {"first": int(behind["rl_step"].iloc[0]), "where": rl_steps(behind["rl_step"])}


def several_turns(run: RunEvidence) -> Facts | None:
    """Responses have several turns, or wait for tools: lengths and rollout times are not those of generation."""
    if run.turns is None:
        raise NotChecked(NO_LOG if run.log is None else "the log has no number of turns per response")
    return {"note": run.turns[:1].upper() + run.turns[1:]} if run.turns else None


def change(values: Floats) -> int | None:
    """Where a series rises for good: the first index behind; None where it does not.

    The change is the split with the largest variance between both sides; at most one value in ten may overlap.
    """
    num = len(values)
    if num < 2 * LEAST_SIDE + 1 or not np.isfinite(values).all():
        return None
    sums, at = np.cumsum(values), np.arange(LEAST_SIDE, num - LEAST_SIDE + 1)
    rise = (sums[-1] - sums[at - 1]) / (num - at) - sums[at - 1] / at
    best = int(at[np.argmax(np.sign(rise) * rise**2 * at * (num - at))])
    least = np.quantile(values[best:], 0.1, method="lower")
    return best if least > np.quantile(values[:best], 0.9, method="higher") else None


def _drafted(run: RunEvidence) -> pd.DataFrame:
    """RL steps of a log that have the number of tokens per draft."""
    if run.log is None:
        raise NotChecked(NO_LOG)
    log = run.log
    if log["accept_length"].isna().all():
        # A lower bound: the accepted share counts tokens, and a draft has one or more.
        log = log.assign(accept_length=1.0 + log["draft_rate"])
    rows = log[log["accept_length"].notna()].reset_index(drop=True)
    if rows.empty:
        raise NotChecked("the log has no tokens per draft")
    if len(rows) < 2 * LEAST_SIDE:
        raise NotChecked(f"a change needs {2 * LEAST_SIDE} RL steps with drafts")
    return rows


def _rates(before: pd.DataFrame, bad: pd.DataFrame) -> str:
    rates = [rows["draft_rate"].median() for rows in (before, bad)]
    if pd.isna(rates[1]):
        return ""
    was = "" if pd.isna(rates[0]) else f" after {rates[0]:.0%}"
    return f", {rates[1]:.0%} of the drafted tokens are kept{was}"


def _slower(run: RunEvidence, before: pd.Series, behind: pd.Series) -> Facts | None:
    """Seconds of rollouts, and per token over those before; None where they are not known."""
    try:
        rows = run.per_token.set_index("rl_step")
    except NotChecked:
        return None
    was, now = rows[rows.index.isin(before)], rows[rows.index.isin(behind)]
    if was.empty or now.empty:
        return None
    return {
        "took_s": now["rollout_s"].median(), "before_s": was["rollout_s"].median(),
        "times": now["per_token"].median() / was["per_token"].median(),
    }  # fmt: skip
