"""Failure signatures of drafting: acceptance too low, falling, outrun by the target; switching too often."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pandas as pd

from tltlab.arrays import Floats
from tltlab.stats import Interval, student_margin
from tltlab.strategy import MODEL_FREE

from .evidence import ENOUGH_STEPS, RunEvidence, accepted_pairs, ratio, with_ends
from .finding import Finding, NotChecked, check, hint, problem, span
from .plain_decoding import UNSURE, against_plain

ACCEPT_FLOOR = 1.2
"""Tokens per draft below which no engine gains: TLT's Fig 13 puts its cheapest step at 1.71 plain ones, and a free
drafter's verification alone takes some 20 % more."""

SMALL_BATCH = 4
"""Batches up to here verify almost for free: a drafter that loses there loses everywhere."""

FALL = 0.1
"""Relative fall of acceptance over a run that counts: three times what one more training is due for (`drop`)."""

DROP = 0.03
"""Relative fall of acceptance per policy update that counts, as in `training_schedule`."""

ENOUGH_FOR_TREND = 6
"""RL steps from which a slope has an interval worth the name."""

ENOUGH_DRAFTS = 200
"""Drafts below which a rollout's acceptance is noise: its standard error is then some 5 %."""

FLIPS_PER_100 = 10
"""On-off switches per 100 iterations: what a hold of 10 iterations, TLT's default, allows at most."""

SWITCH_SHARE = 0.05
"""Share of the workers' time in switching that eats a gain as large as that of choosing well (TLT's Table 4)."""


@check("acceptance-low", good="drafts are kept often enough")
def acceptance_low(evidence: RunEvidence) -> Finding | None:
    """Even in small batches a drafter's drafts are kept too rarely to pay for themselves."""
    table = evidence.speculating
    small = table[table["batch"] <= SMALL_BATCH]
    judged = {str(drafter): (rows, _accept_length(rows)) for drafter, rows in table.groupby("drafter")}
    if not any(accepted for _, accepted in judged.values()):
        raise NotChecked(f"no drafter made {ENOUGH_DRAFTS} drafts in {ENOUGH_STEPS} RL steps")
    for drafter, (rows, accepted) in judged.items():
        if accepted is None:
            continue
        summary = f"{drafter} yields {with_ends(accepted)} tokens per draft, the bonus token included"
        lost: Interval | None = None
        with suppress(NotChecked):
            lost = against_plain(evidence, small[small["drafter"] == drafter])
        if lost is not None and lost.low > UNSURE:
            summary += f"; up to batch {SMALL_BATCH} its tokens take {with_ends(lost)} times what plain decoding would"
        elif lost is not None or accepted.high >= ACCEPT_FLOOR:
            continue
        learned = drafter not in MODEL_FREE
        return problem(
            title=f"The drafts of {drafter} are kept too rarely to pay",
            evidence=summary + ".",
            advice=(
                "Train it before the run (tltlab train-drafter, then drafter.checkpoint) or more within it "
                "(drafter.schedule.kind = always); until then set drafter.fallback or another rollout.policy."
                if learned
                else "Model-free drafts need text that repeats itself: draft less deep, or give the run a learned "
                "drafter ([drafter] in the recipe, rollout.policy = beg-mab-learned)."
            ),
            where=f"RL steps {span(rows['rl_step'].unique().tolist())}",
        )
    return None


@check("acceptance-falling", good="acceptance holds over the run")
def acceptance_falling(evidence: RunEvidence) -> Finding | None:
    """Acceptance goes down over the run, batches and drafts being the same."""
    levels = {str(drafter): _acceptance_by_step(rows) for drafter, rows in evidence.speculating.groupby("drafter")}
    levels = {drafter: level for drafter, level in levels.items() if len(level) >= ENOUGH_FOR_TREND}
    if not levels:
        raise NotChecked(f"a trend needs {ENOUGH_FOR_TREND} RL steps with {ENOUGH_DRAFTS} drafts each")
    for drafter, level in levels.items():
        steps = level.index.to_numpy(np.float64)
        slope, low, high = _slope(steps, level.to_numpy())
        total = slope * float(np.ptp(steps))
        if high >= 0 or total > -FALL:
            continue
        learned = drafter not in MODEL_FREE
        return problem(
            title=f"The acceptance of {drafter} falls during the run",
            evidence=(
                f"At like batches and depths the share of drafted tokens kept changes by {slope:+.1%} per RL step "
                f"(95 %: {low:+.1%} to {high:+.1%}), {total:+.0%} in all."
            ),
            advice=(
                "The drafter ages: train it more often (drafter.schedule.kind = always, or a smaller "
                "drafter.schedule.drop) or more per RL step (drafter.max_updates)."
                if learned
                else "The policy writes ever less of what it wrote before: shorter drafts, or a learned drafter "
                "([drafter] in the recipe)."
            ),
            where=f"RL steps {span(level.index.tolist())}",
        )
    return None


@check("target-too-fast", good="the drafter keeps up with the policy")
def target_too_fast(evidence: RunEvidence) -> Finding | None:
    """The larger the policy update before a rollout, the lower a learned drafter's acceptance in it.

    From one RL step to the next the change of acceptance is regressed on the change of the distance, in KL of the
    updates, between the policy and the one that the drafter was trained for; whether new weights came is accounted for.
    """
    steps = evidence.known.steps
    if steps is None or steps["drift_kl"].notna().sum() < ENOUGH_FOR_TREND:
        raise NotChecked(
            f"how far updates move the policy (steps.drift_kl) is known of fewer than {ENOUGH_FOR_TREND} RL steps"
        )
    rows = evidence.speculating
    rows = rows[~rows["drafter"].isin(MODEL_FREE)]
    if rows.empty:
        raise NotChecked("no learned drafter drafted: model-free ones draft from what was just generated")
    level = _acceptance_by_step(rows)
    kl = steps.set_index("rl_step")["drift_kl"]
    version = steps.set_index("rl_step")["drafter_version"]
    age = steps.set_index("rl_step")["drafter_age"]
    first = int(steps["rl_step"].min())
    # Trained on the rollout before it was published, it has missed the update after that one and all later ones.
    since = {s: first if pd.isna(age.get(s)) else max(first, s - 1 - int(age[s])) for s in level.index}
    moved = {s: sum(kl.get(k, np.nan) for k in range(since[s], s)) for s in level.index}
    pairs = [(s - 1, s) for s in level.index if s - 1 in moved]
    change = [(moved[b] - moved[a], float(version.get(a) != version.get(b)), level[b] - level[a]) for a, b in pairs]
    samples = np.array([row for row in change if np.isfinite(row).all()])
    if len(samples) < ENOUGH_FOR_TREND or not np.ptp(samples[:, 0]):
        raise NotChecked(
            f"{len(samples)} pairs of RL steps in a row tell both acceptance and update KL; it takes {ENOUGH_FOR_TREND}"
        )
    slope, low, high = _slope(samples[:, 0], samples[:, 2], samples[:, 1])
    usual = float(kl.median())
    if high >= 0 or slope * usual > -DROP:
        return None
    return problem(
        title="The policy moves faster than the drafter follows",
        evidence=(
            f"Acceptance changes by {slope * usual:+.1%} for each update of usual size (KL {usual:.2g} nats per token; "
            f"95 %: {low * usual:+.1%} to {high * usual:+.1%}, {len(samples)} pairs of RL steps)."
        ),
        advice=(
            "Train the drafter each RL step and more (drafter.schedule.kind = always, drafter.max_updates), or take "
            "smaller policy updates (train.lr, train.minibatches, train.kl_coef)."
        ),
        where=f"RL steps {span(level.index.tolist())}",
    )


@check("switches-often", good="few switches")
def switches_often(evidence: RunEvidence) -> Finding | None:
    """Speculation goes on and off again and again, or switching takes a good part of the time."""
    spans = evidence.known.spans
    if spans is not None and len(spans):
        on_worker = spans[spans["lane"].str.startswith("worker ")]
        working = on_worker[~on_worker["kind"].isin(["idle", "spot_train"])]["duration"].sum()
        switching = on_worker[on_worker["kind"] == "switch"]["duration"].sum()
        if working > 0 and switching / working > SWITCH_SHARE:
            return problem(
                title="Switching speculation on takes a good part of the rollout",
                evidence=f"{switching:.3g} s, {switching / working:.0%} of the workers' busy time, went into switches.",
                advice="Switch once, late: a smaller activation.max_requests, a longer activation.hold_iterations.",
            )
    table = evidence.decoding
    evidence.speculating  # noqa: B018 - without speculation there is nothing to switch
    on = table["draft_depth"].to_numpy() > 0
    begins = table[["rl_step", "worker"]].diff().fillna(1).to_numpy().any(axis=1)
    flips = (on != np.roll(on, 1)) & ~begins
    rate = 100 * flips.sum() / len(table)
    if rate <= FLIPS_PER_100:
        return None
    counts = table.loc[flips, "rl_step"].value_counts()
    return hint(
        title="Speculation goes on and off again and again",
        evidence=f"{int(flips.sum())} switches in {len(table)} iterations, {rate:.0f} per 100.",
        advice=(
            "Where it hardly matters whether drafts are made, fix one: a longer activation.hold_iterations, a smaller "
            "epsilon, or no speculation as an arm only where it wins."
        ),
        where=f"RL steps {span(counts.index.tolist())}",
    )


def _accept_length(rows: pd.DataFrame) -> Interval | None:
    """Tokens per draft with an interval over RL steps, None where there are too few drafts."""
    by_step = _drafts(rows).groupby("rl_step")[["pairs", "num_accepted"]].sum()
    if by_step["pairs"].sum() < ENOUGH_DRAFTS or len(by_step) < ENOUGH_STEPS:
        return None
    return ratio((by_step["pairs"] + by_step["num_accepted"]).to_numpy(), by_step["pairs"].to_numpy())


def _acceptance_by_step(rows: pd.DataFrame) -> pd.Series:
    """Share of drafted tokens kept in each RL step over that of like drafts in all, minus 1; steps with enough drafts.

    Drafts are alike that go to the same depth at about the same batch, so that another mix of them is no change.
    """
    drafts = _drafts(rows)
    cell = drafts["draft_depth"] * 100 + np.log2(drafts["batch"].clip(lower=1)).astype(int)
    of_cell = drafts.groupby(cell)[["num_accepted", "num_drafted"]].sum()
    drafts["expected"] = drafts["num_drafted"] * cell.map(of_cell["num_accepted"] / of_cell["num_drafted"])
    by_step = drafts.groupby("rl_step")[["pairs", "num_accepted", "expected"]].sum()
    by_step = by_step[(by_step["pairs"] >= ENOUGH_DRAFTS) & (by_step["expected"] > 0)]
    level: pd.Series = by_step["num_accepted"] / by_step["expected"] - 1.0
    return level


def _drafts(rows: pd.DataFrame) -> pd.DataFrame:
    """Iterations that verified drafts, with the `pairs` of request and iteration in each."""
    drafts = rows[rows["num_drafted"] > 0].astype({"num_drafted": np.float64, "num_accepted": np.float64})
    return drafts.assign(pairs=accepted_pairs(drafts))


def _slope(x: Floats, y: Floats, covariate: Floats | None = None) -> tuple[float, float, float]:
    """Least-squares slope of y on x with its 95 % interval; `other`, where it varies, is accounted for."""
    lost = 2
    if covariate is not None and np.ptp(covariate):
        # Frisch-Waugh: residuals on the other variable, and one degree of freedom less.
        x, y = (v - np.polyval(np.polyfit(covariate, v, 1), covariate) for v in (x, y))
        lost = 3
    from scipy.stats import linregress

    fit = linregress(x, y)
    free = max(len(x) - lost, 1)
    error = float(fit.stderr) * np.sqrt((len(x) - 2) / free)
    reach = student_margin(error, free)
    return float(fit.slope), float(fit.slope) - reach, float(fit.slope) + reach
