"""Every policy on many traces and regimes, simulated, against the best fixed strategy in hindsight.

The best fixed strategy is chosen on the same RL steps and random numbers. Rivals are built from public descriptions,
listed in SOURCES. The cost profile and the verify budget are given the true costs of the start; the
constants of `adaptive` were chosen while looking at these regimes, the others run as published or shipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench.harness import Progress, Table, Text, quiet
from tltlab.errors import ConfigError
from tltlab.policies.bandits import Ucb1
from tltlab.policies.beg_mab import BegMab, paper_buckets
from tltlab.policies.engines import AcceptedThresholds
from tltlab.policies.goodput import Goodput
from tltlab.policies.policy import Policy
from tltlab.policies.simple import BatchTable, bucket_of
from tltlab.policies.specs import AdaptiveSpec, CustomSpec, NoneSpec
from tltlab.sim.study.jobs import side_by_side
from tltlab.state import Choice, StepState
from tltlab.stats import paired_interval
from tltlab.strategy import NO_SPECULATION, Strategy

from .regimes import PolicyRegime, best_fixed, regimes

Row = dict[str, Any]
ADAPTIVE, ORACLE = "adaptive", "oracle"
SEVERAL = "beg-mab, several arms"
SOURCES: Mapping[str, str] = {
    ADAPTIVE: "this package",
    "goodput": "TurboSpec, arXiv 2406.14066; costs from the file",
    "table by batch": "vLLM #32374, with TLT's thresholds",
    "table by context": "vLLM #54801, the example of its text",
    "verify budget": "vLLM #52228, by position: drafts whole, verifies what pays",
    "accepted thresholds": "SGLang #21599, its defaults",
    "cost profile": "SGLang #28045, costs measured at the start",
    "ucb1": "Auer, Cesa-Bianchi and Fischer 2002, relative rewards",
    "beg-mab published": "TLT, arXiv 2511.16665, Algorithm 1",
    SEVERAL: "the same with several depths a bucket",
    "beg-mab, all repairs": "that, buckets whose batches differ by 2 at most, means, rewards over plain decoding",
    "none": "no speculation",
    ORACLE: "knows costs and acceptance, not luck",
}
BANDS = (1, 2, 4, 8, 16, 32, 64)
"""Batches from which buckets begin that pool no rewards of batches further apart than twice."""

GOAL_WORST, GOAL_MEAN, GOAL_ORACLE = 1.02, 0.98, 1.03


class ContextTable(BatchTable):
    """A strategy for each range of mean context per request, in tokens: vLLM's proposal #54801.

    `rows` are (min_tokens, strategy) with ascending min_tokens, as in `BatchTable`.
    """

    memoryless = False

    def choose(self, state: StepState) -> Choice:
        bucket = bucket_of(self.thresholds, int(state.context_tokens / max(state.batch, 1)))
        return Choice(self.rows[bucket], bucket=bucket)


def policies_for(regime: PolicyRegime) -> dict[str, Policy]:
    """Every policy by name, over the regime's drafters, or its first one where a policy knows no more."""
    name = regime.drafters[0]
    stated_costs, start = regime.file_costs, regime.phases[0].costs
    few = [Strategy.chain(name, depth) for depth in (8, 4, 2, 1)]
    chains = [s for s in regime.strategies if s.speculates]
    rows = list(zip((1, 5, 17, 33), (*few[:3], NO_SPECULATION), strict=True))
    arms = [(1, [*few[:3], NO_SPECULATION]), (5, [*few[1:], NO_SPECULATION]), (17, [*few[2:], NO_SPECULATION])]
    bands = [(batch, [*few, NO_SPECULATION]) for batch in BANDS]
    contexts = [(1, Strategy.chain(name, 5)), (32768, Strategy.chain(name, 3)), (131072, NO_SPECULATION)]
    trimmed = [Strategy(name, 7, 1, verified) for verified in range(2, 9)]
    published = paper_buckets([*few[:3], NO_SPECULATION], (1, 5, 17, 33))
    built: dict[str, Any] = {
        ADAPTIVE: AdaptiveSpec(drafters=regime.drafters),
        "goodput": lambda rng: Goodput(chains, stated_costs, rng=rng),
        "table by batch": lambda rng: BatchTable(rows),
        "table by context": lambda rng: ContextTable(contexts),
        "verify budget": lambda rng: Goodput(trimmed, start, epsilon=0.0, rng=rng),
        "accepted thresholds": lambda rng: AcceptedThresholds(name),
        "cost profile": lambda rng: Goodput(chains, start, epsilon=0.0, rng=rng),
        "ucb1": lambda rng: Ucb1([NO_SPECULATION, *few], exploration=0.1, reward="relative"),
        "beg-mab published": lambda rng: BegMab(published, rng=rng),
        SEVERAL: lambda rng: BegMab(arms, rng=rng),
        "beg-mab, all repairs": lambda rng: BegMab(bands, statistic="mean", reward="relative", rng=rng),
        "none": NoneSpec(),
    }
    return {name: Policy(selector=CustomSpec.holding(spec) if callable(spec) else spec) for name, spec in built.items()}


def bench_regimes(
    names: Sequence[str], *, traces: Path, rl_steps: int, seeds: Sequence[int], jobs: int, progress: Progress = quiet
) -> dict[str, Any]:
    """Judge every policy on the regimes of those `names`, on all where there are none, shared by `jobs` processes.

    `rows` has each policy on each regime, `policies` its mean ratio with the least and the largest over the regimes.
    Raises ConfigError for a name that no regime has.
    """
    every = {regime.name: regime for regime in regimes(traces, rl_steps)}
    if unknown := [name for name in names if name not in every]:
        raise ConfigError(f"no regime named {unknown[0]!r}; there are {', '.join(every)}")
    picked = [regime for name, regime in every.items() if not names or name in names]
    found = side_by_side([partial(judged, regime, seeds) for regime in picked], jobs=jobs)
    rows: list[Row] = []
    for regime, judgement in zip(picked, found, strict=True):
        progress(f"{regime.name}: {regime.about}")
        rows += judgement
    table = pd.DataFrame(rows)
    by_policy = table.groupby("policy").agg(
        mean=("ratio", "mean"), least=("ratio", "min"), most=("ratio", "max"), over_oracle=("over_oracle", "max")
    )
    policies = by_policy.assign(source=pd.Series(SOURCES)).sort_values("mean").reset_index()
    return {"rows": rows, "policies": policies.to_dict("records"), "verdict": verdict(table)}


TEXT: Text = (
    Table(
        "policies",
        "policy: {policy}; time over the best fixed, mean: {mean:.3f}; least: {least:.3f}; most: {most:.3f}; "
        "over the oracle, most: {over_oracle:.3f}; after: {source}",
    ),
    "{verdict}",
)


def judged(regime: PolicyRegime, seeds: Sequence[int]) -> list[Row]:
    """A row per policy: seconds of an RL step, and ratios to the best fixed strategy, with its interval, and oracle."""
    best, fixed_by_seed = best_fixed(regime, seeds)
    fixed = np.concatenate([fixed_by_seed[seed] for seed in seeds])
    policies: dict[str, Policy | None] = {**policies_for(regime), ORACLE: None}
    found = {name: np.concatenate([regime.seconds(each, seed) for seed in seeds]) for name, each in policies.items()}
    rows = []
    for name, seconds in found.items():
        ratio = paired_interval(seconds, fixed, rng=np.random.default_rng(0))
        rows.append(
            {
                "regime": regime.name, "policy": name, "seconds": float(seconds.mean()),
                "best_fixed": str(best),
                "ratio": ratio.estimate, "ratio_low": ratio.low, "ratio_high": ratio.high,
                "over_oracle": float(seconds.sum() / found[ORACLE].sum()), "source": SOURCES[name],
            }
        )  # fmt: skip
    return rows


def verdict(rows: pd.DataFrame) -> str:
    """Verdict: if `adaptive` clears the bar, where it is worst, and which policies are better on average."""
    ours = rows[rows["policy"] == ADAPTIVE]
    worst = ours.sort_values("ratio").iloc[-1]
    means = rows[rows["policy"] != ORACLE].groupby("policy")["ratio"].mean().sort_values()
    mean, over = float(means[ADAPTIVE]), float(ours["over_oracle"].max())
    clears = worst["ratio"] <= GOAL_WORST and mean < GOAL_MEAN and over <= GOAL_ORACLE
    better = [f"{name} {value:.3f}" for name, value in means.items() if value < mean]
    return (
        f"simulated, adaptive takes {mean:.3f} times as long as the best fixed strategy in hindsight over {len(ours)} "
        f"regimes, {worst['ratio']:.3f} at worst ({worst['regime']}), and up to {over:.3f} times the oracle: it "
        f"{'clears' if clears else 'does not clear'} the bar of {GOAL_MEAN:g}, {GOAL_WORST:g} and {GOAL_ORACLE:g}; "
        + (f"better on average: {', '.join(better)}." if better else "no other is better on average.")
    )
