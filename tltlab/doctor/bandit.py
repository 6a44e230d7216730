"""Failure signatures of a bandit: nothing to choose from, or exploring that costs more than choosing gains."""

from __future__ import annotations

import numpy as np
import pandas as pd

from tltlab.policies.beg_mab import BegMab
from tltlab.strategy import Strategy

from .evidence import ENOUGH_STEPS, RunEvidence, ratio
from .finding import Finding, NotChecked, check, problem, span

BANDITS = ("epsilon-greedy", "ucb1", "beg-mab")

ENOUGH_REWARDS = 10
"""Rewards of an arm from which its mean is one: single iterations vary by some 10 %."""

LOST_REWARD = 0.02
"""Share of the reward that exploring may cost: what telling arms apart is worth in TLT's Table 4 is 4 to 5 %."""

ENOUGH_DECISIONS = 100
"""Decisions from which an arm that was never taken is one that could not be taken."""


@check("explores-too-much", good="bandits find more than they spend")
def explores_more_than_it_finds(evidence: RunEvidence) -> list[Finding]:
    """Each bandit that loses more reward by arms that are not the best than it gains over an arm picked blindly.

    Rewards count relative to the mean at their batch, so that arms are compared on like work. The best arm of a bucket
    is found on every other decision and judged on the rest: the luckiest arm must not look the best.
    """
    rewards = _rewards(evidence)
    findings: list[Finding] = []
    judged = False
    for name, decisions in rewards.groupby("policy"):
        tables = [scores for _, bucket in decisions.groupby("bucket") if (scores := _scores(bucket)) is not None]
        if not tables:
            continue
        table = pd.concat(tables)
        by_step = table.groupby("rl_step")[["got", "best", "blind"]].sum()
        if len(by_step) < ENOUGH_STEPS:
            continue
        judged = True
        lost = ratio(by_step["got"].to_numpy(), by_step["best"].to_numpy())
        missed = 1 - lost.estimate
        gained = by_step["got"].sum() / by_step["blind"].sum() - 1
        if 1 - lost.high < LOST_REWARD or missed <= gained:
            continue
        off = float((table["arm"] != table["best_arm"]).mean())
        findings.append(
            problem(
                title=f"Bandit {name} explores more than it finds",
                evidence=(
                    f"{off:.0%} of its {len(table)} decisions went to other arms than the best of their bucket; that "
                    f"cost {missed:.1%} of the reward (95 %: {1 - lost.high:.1%} to {1 - lost.low:.1%}), while "
                    f"choosing gained {gained:+.1%} over arms picked blindly."
                ),
                advice=(
                    "Lower epsilon (ucb1: exploration), give the bandit fewer arms or a longer window, use reward = "
                    'relative; or take the best arm per batch as a table (rollout.policy = "table", tltlab tune).'
                ),
                where=f"RL steps {span(by_step.index.tolist())}",
            )
        )
    if not judged:
        raise NotChecked(f"no bucket has two arms with {ENOUGH_REWARDS} rewards each, in {ENOUGH_STEPS} RL steps")
    return findings


@check("one-arm-per-bucket", good="buckets have arms to choose from")
def one_arm_per_bucket(evidence: RunEvidence) -> list[Finding]:
    """BEG-MAB whose buckets hold one strategy each: it is a table, whatever epsilon and rewards are."""
    bandits = {name: policy for name, policy in evidence.policy_of_step.values() if _is_bandit(name, policy, "beg-mab")}
    if not bandits:
        raise NotChecked("no BEG-MAB chose in this run")
    findings = []
    for name, policy in bandits.items():
        rl_steps = [s for s, (policy_name, _) in evidence.policy_of_step.items() if policy_name == name]
        built = None if policy is None else policy.selector.build(np.random.default_rng(0))
        arms = [len(arms) for arms in built.arms] if isinstance(built, BegMab) else _arms_taken(evidence, rl_steps)
        if max(arms) > 1:
            continue
        findings.append(
            problem(
                title=f"Bandit {name} never chooses",
                evidence=f"Each of its {len(arms)} buckets has one strategy, so epsilon and rewards change nothing.",
                advice=(
                    "List several depths or drafters in each of selector.buckets; the paper's grouping by "
                    "tokens_to_verify leaves one arm a bucket where drafts are chains, as TLT's released settings do."
                ),
                where=f"RL steps {span(rl_steps)}",
            )
        )
    return findings


def _is_bandit(name: str, policy: object, *kinds: str) -> bool:
    if name == "none":  # plain RL steps between those of the policy that policies.json names
        return False
    kind = getattr(getattr(policy, "selector", None), "kind", None)
    return kind in kinds if kind is not None else any(name.startswith(bandit) for bandit in kinds)


def _arms_taken(evidence: RunEvidence, rl_steps: list[int]) -> list[int]:
    """Strategies taken per bucket in the decisions of some RL steps, where the policy itself is not known."""
    decisions = evidence.known.decisions
    rows = None if decisions is None else decisions[decisions["rl_step"].isin(rl_steps) & decisions["bucket"].notna()]
    if rows is None or len(rows) < ENOUGH_DECISIONS:
        raise NotChecked("neither the bandit's settings (policies.json) nor enough of its decisions are known")
    return [len(bucket.groupby(["drafter", "draft_depth"])) for _, bucket in rows.groupby("bucket")]


def _rewards(evidence: RunEvidence) -> pd.DataFrame:
    """Decisions of bandits that brought a reward, relative to the mean at their batch. Raises NotChecked.

    A policy of unknown settings counts as one: only what learns logs rewards.
    """
    policies = evidence.policy_of_step.items()
    choosing = [s for s, (name, policy) in policies if policy is None or _is_bandit(name, policy, *BANDITS)]
    if not choosing:
        raise NotChecked("no bandit chose in this run")
    decisions = evidence.known.decisions
    if decisions is None or decisions["reward"].notna().sum() < ENOUGH_DECISIONS:
        raise NotChecked(f"the trace has fewer than {ENOUGH_DECISIONS} decisions with a reward")
    rows = decisions[decisions["rl_step"].isin(choosing) & decisions["reward"].notna()]
    batches = evidence.iterations[["rl_step", "worker", "iteration", "batch"]]
    rows = rows.merge(batches, on=["rl_step", "worker", "iteration"])
    rows["bucket"] = rows["bucket"].fillna(0)
    rows["policy"] = rows["rl_step"].map({s: evidence.policy_of_step[s][0] for s in choosing})
    rows["arm"] = [
        str(Strategy(*arm))
        for arm in zip(rows["drafter"], rows["draft_depth"], rows["top_k"], rows["tokens_to_verify"], strict=True)
    ]
    mean = rows.groupby(["policy", "batch"])["reward"].transform("mean")
    rows["relative"] = rows["reward"] / mean.where(mean > 0)
    return rows[rows["relative"].notna()].sort_values(["rl_step", "worker", "iteration"], ignore_index=True)


def _scores(bucket: pd.DataFrame) -> pd.DataFrame | None:
    """Decisions of one bucket with what they `got`, and what the `best` and a `blind` pick of arm would have."""
    judge = bucket.iloc[1::2]
    first, means = _means(bucket.iloc[::2]), _means(judge)
    arms = first.index.intersection(means.index)
    if len(arms) < 2:
        return None
    best = str(first[arms].idxmax())
    scores = judge.loc[judge["arm"].isin(arms), ["rl_step", "arm", "relative"]].rename(columns={"relative": "got"})
    return scores.assign(best_arm=best, best=float(means[best]), blind=float(means[arms].mean()))


def _means(rows: pd.DataFrame) -> pd.Series:
    """Mean reward of each arm that has enough of them."""
    by_arm = rows.groupby("arm")["relative"]
    means: pd.Series = by_arm.mean()[by_arm.size() >= ENOUGH_REWARDS]
    return means
