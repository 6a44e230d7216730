"""Verdicts on RL steps alone, as a training log tells them: where the time goes, and what drafting gains."""

from __future__ import annotations

import numpy as np
import pandas as pd

from tltlab.stats import mean_of_few

from .evidence import ENOUGH_STEPS, RunEvidence, ratio
from .finding import Finding, NotChecked, check, hint, problem, span

DRAFTED = 1.05
"""Tokens per draft from which an RL step counts as one that speculated."""

FALL = 0.03
"""Relative fall of the accept length right after a drafter's training that counts, as in `speculation.DROP`."""


@check("rollout-share", good="the rollout is less than half of the RL step")
def rollout_share(evidence: RunEvidence) -> Finding | None:
    """The rollout is most of an RL step: how much faster the step can get at best."""
    steps = evidence.known.steps
    rows = pd.DataFrame() if steps is None else steps.reindex(columns=["rollout_s", "step_s"]).dropna()
    if len(rows) < ENOUGH_STEPS:
        raise NotChecked(f"fewer than {ENOUGH_STEPS} RL steps time rollout and whole RL step (a training log does)")
    share = ratio(rows["rollout_s"].to_numpy(np.float64), rows["step_s"].to_numpy(np.float64))
    if share.low < 0.5:
        return None
    at_best = 1 / max(1 - share.estimate, 1e-3)
    return hint(
        title=f"The rollout is {share.estimate:.0%} of the RL step",
        evidence=(
            f"{rows['rollout_s'].median():.1f} of {rows['step_s'].median():.1f} s ({share.low:.0%} to "
            f"{share.high:.0%}): a rollout twice as fast makes RL steps {1 / (1 - share.estimate / 2):.2f} times as "
            f"fast, one in no time {at_best:.1f} times."
        ),
        advice="tltlab calibrate LOG --out costs.json, then tltlab compare LOG --costs costs.json: what gains most.",
    )


@check("drafts-lose-time", good="RL steps that draft are no slower per token than those that do not")
def drafts_lose_time(evidence: RunEvidence) -> Finding | None:
    """Rollouts that speculate take longer for their lengths than those that do not: speculation is net negative."""
    rows = _rows(evidence)
    drafted, plain = rows[rows["accept_length"] >= DRAFTED], rows[rows["accept_length"] < DRAFTED]
    if min(len(drafted), len(plain)) < ENOUGH_STEPS:
        raise NotChecked(f"RL steps with and without speculation, {ENOUGH_STEPS} of each, are needed")
    terms = ["longest", "tokens"]
    if len(plain) < 2 * len(terms):
        terms = ["tokens"]
    # What plain rollouts take by their lengths, with relative errors.
    x, y = plain[terms].to_numpy(np.float64), plain["rollout_s"].to_numpy(np.float64)
    coefficients = np.linalg.lstsq(x / y[:, None], np.ones(len(y)), rcond=None)[0]
    expected = drafted[terms].to_numpy(np.float64) @ coefficients
    if (expected <= 0).any():
        raise NotChecked("plain rollouts do not tell what their lengths take")
    off = float(np.sqrt(np.mean((x @ coefficients / y - 1) ** 2)))
    least_error = off / np.sqrt(len(plain))
    cost = mean_of_few((drafted["rollout_s"] / expected).to_numpy(np.float64), least_error=float(least_error))
    if not cost.low > 1.0:
        return None
    return problem(
        title="Speculation is net negative",
        evidence=(
            f"{len(drafted)} rollouts that draft ({drafted['accept_length'].mean():.2f} tokens each) take "
            f"{cost.estimate:.2f} times ({cost.low:.2f} to {cost.high:.2f}) what {len(plain)} plain ones would for "
            "these lengths."
        ),
        advice="Draft below a batch only (tltlab tune finds it), draft less deep, or switch it off.",
        where=f"RL steps {span(drafted['rl_step'].astype(int).tolist())}",
    )


@check("worse-when-just-trained", good="a drafter that was just trained accepts no less")
def worse_when_just_trained(evidence: RunEvidence) -> Finding | None:
    """Acceptance falls on the RL steps that follow a training of the drafter."""
    rows = _rows(evidence)
    if "drafter_age" not in rows or rows["drafter_age"].isna().all():
        raise NotChecked("the RL steps do not say when the drafter was trained")
    just = rows["drafter_age"] == 0
    # Against the RL steps around it, so that a trend over the run is none of it.
    usual = rows["accept_length"].where(~just).interpolate(limit_area="inside")
    change = (rows["accept_length"] / usual - 1)[just].dropna()
    if len(change) < ENOUGH_STEPS:
        raise NotChecked(f"fewer than {ENOUGH_STEPS} RL steps after a training lie between others")
    fall = mean_of_few(change.to_numpy(np.float64))
    if not fall.high < 0 or fall.estimate > -FALL:
        return None
    return problem(
        title="Acceptance falls on RL steps right after the drafter was trained",
        evidence=(
            f"{len(change)} times the accept length is {fall.estimate:+.1%} ({fall.low:+.1%} to {fall.high:+.1%}) "
            "off that of the RL steps around."
        ),
        advice="The drafter learns the wrong thing or is published half: compare its loss on the next rollout, check "
        "learning rate and which weights the engine loads.",
        where=f"RL steps {span(rows.loc[change.index, 'rl_step'].astype(int).tolist())}",
    )


def _rows(evidence: RunEvidence) -> pd.DataFrame:
    """RL steps with a rollout time and an accept length: these, longest response and tokens. Raises NotChecked."""
    steps = evidence.known.steps
    if steps is None or "accept_length" not in steps:
        raise NotChecked("the RL steps do not say how many tokens a draft yields (a training log may)")
    timed = steps[(steps["rollout_s"] > 0)].assign(accept_length=steps["accept_length"].astype(np.float64).fillna(1.0))
    lengths = evidence.known.outcomes.groupby("rl_step")["response_tokens"].agg(longest="max", tokens="sum")
    rows = timed.merge(lengths, left_on="rl_step", right_index=True).reset_index(drop=True)
    if rows.empty:
        raise NotChecked("no RL step says how long its rollout took")
    return rows
