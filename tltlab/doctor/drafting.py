"""Tests on drafts: how many are kept, how that changes as the policy and the drafter are trained, and switching."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pandas as pd

from tltlab.arrays import Floats
from tltlab.stats import Interval, student_margin

from .check import Facts, NotChecked, rl_steps
from .decoding import UNSURE
from .evidence import ENOUGH_STEPS, RunEvidence, accepted_pairs, ratio

ACCEPT_FLOOR = 1.2  # TLT's Fig 13 has its cheapest step at 1.71 plain ones; verification alone takes some 20 % more
SMALL_BATCH = 4  # batches up to here verify almost for free: a drafter that loses there loses everywhere
FALL = 0.1  # relative fall of acceptance over a run that counts
ENOUGH_FOR_TREND = 6  # RL steps from which a slope has an interval worth the name
ENOUGH_DRAFTS = 200  # drafts below which a rollout's acceptance is noise: its standard error is then some 5 %
FLIPS_PER_100 = 10  # on-off switches per 100 iterations: as many as a hold of 10, TLT's default, allows
SWITCH_SHARE = 0.05  # share of the time that eats a gain as large as that of choosing well (TLT's Table 4)
STARVED = 0.95  # mean length trained on over that generated below which the policy is taught to be short
WAITING = 0.02  # share of rollouts spent waiting for the drafter's trainers from which it is worth a setting
HALF = 0.5  # share of training periods, and of their time, that should bring updates


def acceptance_low(run: RunEvidence) -> Facts | None:
    """Even in small batches a drafter's drafts are kept too rarely to pay for themselves."""
    judged = {str(drafter): (rows, _tokens_per_draft(rows)) for drafter, rows in run.speculating.groupby("drafter")}
    if not any(accepted for _, accepted in judged.values()):
        raise NotChecked(f"no drafter made {ENOUGH_DRAFTS} drafts in {ENOUGH_STEPS} RL steps")
    for drafter, (rows, accepted) in judged.items():
        if accepted is None:
            continue
        lost: Interval | None = None
        with suppress(NotChecked):
            lost = run.against_plain(rows[rows["batch"] <= SMALL_BATCH])
        if lost.low <= UNSURE if lost else accepted.high >= ACCEPT_FLOOR:
            continue
        times = (
            f"; up to batch {SMALL_BATCH} its tokens take {lost:.2f} times what plain decoding would" if lost else ""
        )
        return {"drafter": drafter, "accepted": accepted, "times": times, "where": rl_steps(rows["rl_step"])}
    return None


def acceptance_falling(run: RunEvidence) -> Facts | None:
    """Acceptance goes down over the run, batches and drafts being the same."""
    levels = {str(drafter): _acceptance_by_step(rows) for drafter, rows in run.speculating.groupby("drafter")}
    levels = {drafter: level for drafter, level in levels.items() if len(level) >= ENOUGH_FOR_TREND}
    if not levels:
        raise NotChecked(f"a trend needs {ENOUGH_FOR_TREND} RL steps with {ENOUGH_DRAFTS} drafts each")
    for drafter, level in levels.items():
        slope = _slope(level.to_numpy(), level.index.to_numpy(np.float64))
        total = slope.estimate * float(np.ptp(level.index))
        if slope.high < 0 and total <= -FALL:
            return {"drafter": drafter, "slope": slope, "total": total, "where": rl_steps(level.index)}
    return None


def switching_time(run: RunEvidence) -> Facts | None:
    """Switching speculation on takes a good part of the time."""
    spans = run.known.spans
    if spans is None or spans.empty:
        return None
    on_worker = spans[spans["lane"].str.startswith("worker ")]
    working = on_worker[~on_worker["kind"].isin(["idle", "spot_train"])]["duration"].sum()
    switching = on_worker[on_worker["kind"] == "switch"]["duration"].sum()
    return {"seconds": switching, "share": switching / working} if switching > SWITCH_SHARE * working else None


def switches_often(run: RunEvidence) -> Facts | None:
    """Speculation switches on and off repeatedly."""
    table = run.decoding
    on = table["draft_depth"].to_numpy() > 0
    begins = table[["rl_step", "worker"]].diff().fillna(1).to_numpy().any(axis=1)
    flips = (on != np.roll(on, 1)) & ~begins
    rate = 100 * flips.sum() / len(table)
    facts = {"flips": flips.sum(), "iterations": len(table), "rate": rate}
    return facts | {"where": rl_steps(table.loc[flips, "rl_step"])} if rate > FLIPS_PER_100 else None


def idle_fragmented(run: RunEvidence) -> Facts | None:
    """Idle workers train, but their idle time comes in pieces too short for an update."""
    rows = run.known.spot_training
    if rows is None or rows.empty:
        raise NotChecked("no drafter was trained on idle workers in this trace")
    if len(rows) < 2 * ENOUGH_STEPS:
        raise NotChecked(f"{len(rows)} training periods are too few")
    seconds, trained = rows[["duration", "setup_s", "train_s"]].sum(), rows[rows["updates"] > 0]
    if not seconds["duration"] > 0:
        raise NotChecked(f"the {len(rows)} training periods took no time")
    shares, empty = seconds / seconds["duration"], 1 - len(trained) / len(rows)
    if shares["train_s"] >= HALF and empty <= HALF:
        return None
    update = "none was completed"
    if len(trained):
        update = f"one takes {trained['train_s'].sum() / trained['updates'].sum():.2g} s"
    facts = {"periods": len(rows), "median_s": rows["duration"].median(), "empty": empty, "update": update}
    return facts | {"setup": shares["setup_s"], "train": shares["train_s"], "where": rl_steps(rows["rl_step"])}


def rollout_waits(run: RunEvidence) -> Facts | None:
    """Rollouts end when the drafter's trainers let go, and not with their last response."""
    rows = run.known.spot_training
    if rows is None or rows.empty:
        raise NotChecked("no drafter was trained on idle workers in this trace")
    last_s = run.known.outcomes.groupby("rl_step")["t_finish"].max()
    freed_s = rows.assign(end=rows["t_start"] + rows["duration"]).groupby("rl_step")["end"].max()
    took_s = run.steps.set_index("rl_step")["rollout_s"].astype(np.float64)
    late = (pd.concat([freed_s, took_s], axis=1).min(axis=1) - last_s).dropna().clip(lower=0.0)
    share = late.sum() / took_s.reindex(late.index).sum()
    facts = {"seconds": late.max(), "share": share, "where": rl_steps(late.index[late > 0])}
    return facts if share > WAITING else None


def never_published(run: RunEvidence) -> Facts | None:
    """The recipe trains a drafter, yet engines never got new weights of it."""
    if run.setting("drafter") is None:
        raise NotChecked("the run trains no drafter")
    if run.setting("drafter.schedule.kind") == "never":
        raise NotChecked("drafter.schedule.kind is never: no new weights were meant")
    if len(run.steps) < ENOUGH_STEPS:
        raise NotChecked(f"the run has fewer than {ENOUGH_STEPS} RL steps")
    rows = run.known.spot_training
    facts = {"steps": len(run.steps), "updates": 0 if rows is None else int(rows["updates"].sum())}
    return None if (run.steps["drafter_version"].fillna(0) > 0).any() else facts


def long_starved(run: RunEvidence) -> Facts | None:
    """Groups dropped for their age leave training with shorter responses than were generated."""
    rows = run.steps[run.steps["length_bias"].notna()]
    if rows.empty:
        raise NotChecked("RL steps are apart, or the trace has no record of dropped responses (steps.length_bias)")
    bias, dropped = rows["length_bias"].iloc[-1], rows["dropped_groups"].iloc[-1]
    groups = "" if pd.isna(dropped) else f" {dropped:.0f} groups were dropped for their age."
    return {"bias": bias, "groups": groups} if bias < STARVED else None


def _tokens_per_draft(rows: pd.DataFrame) -> Interval | None:
    """Tokens per draft with an interval over RL steps, None where there are too few drafts."""
    by_step = _drafts(rows).groupby("rl_step")[["pairs", "num_accepted"]].sum()
    if by_step["pairs"].sum() < ENOUGH_DRAFTS or len(by_step) < ENOUGH_STEPS:
        return None
    return ratio(by_step["pairs"] + by_step["num_accepted"], by_step["pairs"])


def _acceptance_by_step(rows: pd.DataFrame) -> pd.Series:
    """Share of drafted tokens kept in each RL step over that of like drafts in all, minus 1; steps with enough drafts.

    Drafts are alike that go to the same depth at about the same batch, so that another mix of them is no change.
    """
    drafts = _drafts(rows)
    cell = drafts.groupby(["draft_depth", np.log2(drafts["batch"].clip(lower=1)).astype(int)])
    share = cell["num_accepted"].transform("sum") / cell["num_drafted"].transform("sum")
    drafts["expected"] = drafts["num_drafted"] * share
    by_step = drafts.groupby("rl_step")[["pairs", "num_accepted", "expected"]].sum()
    by_step = by_step[(by_step["pairs"] >= ENOUGH_DRAFTS) & (by_step["expected"] > 0)]
    level: pd.Series = by_step["num_accepted"] / by_step["expected"] - 1.0
    return level


def _drafts(rows: pd.DataFrame) -> pd.DataFrame:
    """Iterations that verified drafts, with the `pairs` of request and iteration in each."""
    drafts = rows[rows["num_drafted"] > 0].astype({"num_drafted": np.float64, "num_accepted": np.float64})
    return drafts.assign(pairs=accepted_pairs(drafts))


def _slope(y: Floats, x: Floats) -> Interval:
    """Least-squares slope of y over x, with Student's interval."""
    design = np.column_stack([x, np.ones(len(x))])
    coefficients, _, rank, _ = np.linalg.lstsq(design, y, rcond=None)
    freedom = max(len(x) - int(rank), 1)
    variance = np.sum((y - design @ coefficients) ** 2) / freedom * np.linalg.pinv(design.T @ design)[0, 0]
    slope, margin = float(coefficients[0]), student_margin(float(np.sqrt(variance)), freedom)
    return Interval(estimate=slope, low=slope - margin, high=slope + margin, level=0.95, method="t")
