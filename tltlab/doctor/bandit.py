"""Tests on bandits: nothing to choose from, or exploring that costs more than choosing gains."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from tltlab.policies.beg_mab import BegMab
from tltlab.strategy import Strategy

from .check import Facts, NotChecked, rl_steps
from .evidence import ENOUGH_STEPS, RunEvidence, ratio

BANDITS = ("epsilon-greedy", "ucb1", "beg-mab")
ENOUGH_REWARDS = 10  # rewards of an arm from which its mean is one: single iterations vary by some 10 %
LOST_REWARD = 0.02  # share of the reward that exploring may cost: telling arms apart is worth 4 to 5 % in TLT's Table 4
ENOUGH_DECISIONS = 100  # decisions from which an arm that was never taken is one that could not be taken


def explores_too_much(run: RunEvidence) -> list[Facts]:
    """Each bandit that loses more reward by arms that are not the best than it gains over an arm picked blindly.

    Rewards count relative to the mean at their batch, so that arms are compared on like work. The best arm of a bucket
    is found on every other decision and judged on the rest: the luckiest arm must not look the best.
    """
    found, judged = [], False
    for name, decisions in _rewards(run).groupby("policy"):
        tables = [scores for _, bucket in decisions.groupby("bucket") if (scores := _scores(bucket)) is not None]
        table = pd.concat(tables) if tables else pd.DataFrame(columns=["rl_step", "got", "best", "blind"])
        by_step = table.groupby("rl_step")[["got", "best", "blind"]].sum()
        if len(by_step) < ENOUGH_STEPS:
            continue
        judged = True
        kept = ratio(by_step["got"], by_step["best"])
        lost = replace(kept, estimate=1 - kept.estimate, low=1 - kept.high, high=1 - kept.low)
        gained = by_step["got"].sum() / by_step["blind"].sum() - 1
        if lost.low >= LOST_REWARD and lost.estimate > gained:
            off = (table["arm"] != table["best_arm"]).mean()
            facts = {"bandit": name, "off": off, "decisions": len(table), "lost": lost, "gained": gained}
            found.append(facts | {"where": rl_steps(by_step.index)})
    if not judged:
        raise NotChecked(f"no bucket has two arms with {ENOUGH_REWARDS} rewards each, in {ENOUGH_STEPS} RL steps")
    return found


def one_arm_per_bucket(run: RunEvidence) -> list[Facts]:
    """BEG-MAB whose buckets hold one strategy each: it is a table, whatever epsilon and rewards are."""
    bandits = {name: policy for name, kind, policy in run.policy_of_step.values() if _is_bandit(name, kind, "beg-mab")}
    if not bandits:
        raise NotChecked("no BEG-MAB chose in this run")
    found = []
    for name, policy in bandits.items():
        steps = [rl_step for rl_step, of_step in run.policy_of_step.items() if of_step[0] == name]
        built = None if policy is None else policy.selector.build(np.random.default_rng(0))
        arms = [len(arms) for arms in built.arms] if isinstance(built, BegMab) else _arms_taken(run, steps)
        if max(arms) == 1:
            found.append({"bandit": name, "buckets": len(arms), "where": rl_steps(steps)})
    return found


def _is_bandit(name: str, kind: str | None, *kinds: str) -> bool:
    if name == "none":  # plain RL steps between those of the policy that policies.json names
        return False
    return kind in kinds if kind is not None else name.startswith(kinds)


def _arms_taken(run: RunEvidence, steps: list[int]) -> list[int]:
    """Strategies taken per bucket in the decisions of some RL steps, where the policy itself is not known."""
    decisions = run.known.decisions
    rows = None if decisions is None else decisions[decisions["rl_step"].isin(steps) & decisions["bucket"].notna()]
    if rows is None or len(rows) < ENOUGH_DECISIONS:
        raise NotChecked("neither the bandit's settings (policies.json) nor enough of its decisions are known")
    return [len(bucket.groupby(["drafter", "draft_depth"])) for _, bucket in rows.groupby("bucket")]


def _rewards(run: RunEvidence) -> pd.DataFrame:
    """Decisions of bandits that brought a reward, relative to the mean at their batch.

    A policy of unknown settings counts as one: only what learns logs rewards.
    """
    policies = {
        s: name for s, (name, kind, _) in run.policy_of_step.items() if not kind or _is_bandit(name, kind, *BANDITS)
    }
    if not policies:
        raise NotChecked("no bandit chose in this run")
    decisions = run.known.decisions
    if decisions is None or decisions["reward"].notna().sum() < ENOUGH_DECISIONS:
        raise NotChecked(f"the trace has fewer than {ENOUGH_DECISIONS} decisions with a reward")
    rows = decisions[decisions["rl_step"].isin(list(policies)) & decisions["reward"].notna()]
    rows = rows.merge(
        run.iterations[["rl_step", "worker", "iteration", "batch"]], on=["rl_step", "worker", "iteration"]
    )
    rows = rows.assign(bucket=rows["bucket"].fillna(0), policy=rows["rl_step"].map(policies))
    arms = zip(rows["drafter"], rows["draft_depth"], rows["top_k"], rows["tokens_to_verify"], strict=True)
    rows["arm"] = [str(Strategy(*arm)) for arm in arms]
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
