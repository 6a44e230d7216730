"""Tests on drafts: how many are kept, how that changes as the policy and the drafter are trained, and switching."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pandas as pd

from tltlab.arrays import Floats
from tltlab.stats import Interval, mean_of_few, student_margin
from tltlab.strategy import MODEL_FREE

from .check import Facts, NotChecked, rl_steps
from .decoding import UNSURE, timed_steps
from .evidence import ENOUGH_STEPS, RunEvidence, accepted_pairs, ratio

ACCEPT_FLOOR = 1.2  # TLT's Fig 13 has its cheapest step at 1.71 plain ones; verification alone takes some 20 % more
SMALL_BATCH = 4  # batches up to here verify almost for free: a drafter that loses there loses everywhere
FALL = 0.1  # relative fall of acceptance over a run that counts: three times `DROP`
DROP = 0.03  # relative fall of acceptance per update that counts, as in `training_schedule`
ENOUGH_FOR_TREND = 6  # RL steps from which a slope has an interval worth the name
ENOUGH_DRAFTS = 200  # drafts below which a rollout's acceptance is noise: its standard error is then some 5 %
FLIPS_PER_100 = 10  # on-off switches per 100 iterations: as many as a hold of 10, TLT's default, allows
SWITCH_SHARE = 0.05  # share of the time that eats a gain as large as that of choosing well (TLT's Table 4)
STARVED = 0.95  # mean length trained on over that generated below which the policy is taught to be short
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


def target_too_fast(run: RunEvidence) -> Facts | None:
    """The larger the policy update before a rollout, the lower a learned drafter's acceptance in it.

    From one RL step to the next the change of acceptance is regressed on the change of the distance, in KL of the
    updates, between the policy and the one that the drafter was trained for; whether new weights came is accounted for.
    """
    steps = run.steps.set_index("rl_step")
    kl, version, age = steps["drift_kl"], steps["drafter_version"], steps["drafter_age"]
    if kl.notna().sum() < ENOUGH_FOR_TREND:
        raise NotChecked(
            f"how far updates move the policy (steps.drift_kl) is known of fewer than {ENOUGH_FOR_TREND} RL steps"
        )
    rows = run.speculating[~run.speculating["drafter"].isin(MODEL_FREE)]
    if rows.empty:
        raise NotChecked("no learned drafter drafted: model-free ones draft from what was just generated")
    level, first = _acceptance_by_step(rows), int(steps.index.min())
    # Trained on the rollout before it was published, it has missed the update after that one and all later ones.
    since = {s: first if pd.isna(age.get(s)) else max(first, s - 1 - int(age[s])) for s in level.index}
    moved = {s: sum(kl.get(k, np.nan) for k in range(since[s], s)) for s in level.index}
    pairs = [(s - 1, s) for s in level.index if s - 1 in moved]
    change = [(level[b] - level[a], moved[b] - moved[a], float(version.get(a) != version.get(b))) for a, b in pairs]
    samples = np.array([row for row in change if np.isfinite(row).all()])
    if len(samples) < ENOUGH_FOR_TREND or not np.ptp(samples[:, 1]):
        raise NotChecked(
            f"{len(samples)} pairs of RL steps in a row tell both acceptance and update KL; it takes {ENOUGH_FOR_TREND}"
        )
    usual = float(kl.median())
    slope = _slope(samples[:, 0], samples[:, 1], samples[:, 2], unit=usual)
    if slope.high >= 0 or slope.estimate > -DROP:
        return None
    return {"slope": slope, "usual": usual, "pairs": len(samples), "where": rl_steps(level.index)}


def worse_when_trained(run: RunEvidence) -> Facts | None:
    """Acceptance falls on the RL steps that follow a training of the drafter."""
    rows = timed_steps(run)
    if "drafter_age" not in rows or rows["drafter_age"].isna().all():
        raise NotChecked("the RL steps do not say when the drafter was trained")
    just = rows["drafter_age"] == 0
    # Against the RL steps around it, so that a trend over the run is none of it.
    usual = rows["accept_length"].where(~just).interpolate(limit_area="inside")
    change = (rows["accept_length"] / usual - 1)[just].dropna()
    if len(change) < ENOUGH_STEPS:
        raise NotChecked(f"fewer than {ENOUGH_STEPS} RL steps after a training lie between others")
    fall = mean_of_few(change.to_numpy(np.float64))
    if not fall.high < 0 or fall.estimate > -DROP:
        return None
    return {"times": len(change), "fall": fall, "where": rl_steps(rows.loc[change.index, "rl_step"])}


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
    """Speculation goes on and off again and again."""
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


def never_published(run: RunEvidence) -> Facts | None:
    """The recipe trains a drafter, yet engines never got new weights of it."""
    if run.setting("drafter") is None:
        raise NotChecked("the run trains no drafter of its own")
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
        raise NotChecked("RL steps are apart, or the trace does not tell what was dropped (steps.length_bias)")
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


def _slope(y: Floats, x: Floats, *others: Floats, unit: float = 1.0) -> Interval:
    """Least-squares slope of y per `unit` of x, accounting for `others`, with Student's interval."""
    design = np.column_stack([x, *others, np.ones(len(x))])
    coefficients, _, rank, _ = np.linalg.lstsq(design, y, rcond=None)
    freedom = max(len(x) - int(rank), 1)
    variance = np.sum((y - design @ coefficients) ** 2) / freedom * np.linalg.pinv(design.T @ design)[0, 0]
    slope, margin = unit * float(coefficients[0]), unit * student_margin(float(np.sqrt(variance)), freedom)
    return Interval(estimate=slope, low=slope - margin, high=slope + margin, level=0.95, method="t")
