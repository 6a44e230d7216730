"""Policies on the same responses with the same luck: ratios with paired intervals, and regret to the bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from tltlab.errors import ConfigError
from tltlab.stats import paired_interval

from .scenario import PolicyLike, Scenario, budgets_of
from .sweep import sweep


def compare(
    scenario: Scenario,
    policies: Mapping[str, PolicyLike],
    *,
    baseline: str | None = None,
    repeats: int = 1,
    jobs: int = 1,
    ray_address: str | None = None,
    level: float = 0.95,
) -> pd.DataFrame:
    """One row per policy, the fastest first.

    Columns: `policy`, `makespan_s` (mean over RL steps and repeats), `ratio` to the `baseline` (the first policy; below
    1 is faster) with its paired bootstrap interval `ratio_low` to `ratio_high` over the RL steps, and `regret` to the
    clairvoyant bound over all strategies of all policies (None under a per-request budget). `repeats` are seeds; each
    shares its luck among the policies, and a step's repeats are averaged before resampling, since they share its
    lengths. Raises ConfigError.
    """
    names = list(policies)
    baseline = names[0] if names and baseline is None else baseline
    if baseline is None or baseline not in policies:
        raise ConfigError(f"the baseline {baseline!r} is none of the policies {', '.join(names) or '(none given)'}")
    if repeats < 1:
        raise ConfigError(f"repeats must be at least 1, got {repeats}")
    strategies = tuple(dict.fromkeys(s for policy in policies.values() for s in policy.strategies))
    seeded = [replace(scenario, seed=scenario.seed + k) for k in range(repeats)]
    tables = [sweep(one, policies, jobs=jobs, ray_address=ray_address) for one in seeded]
    means = pd.concat(tables).groupby(["policy", "rl_step"])["makespan_s"].mean()
    bound_s = float(np.mean([one.bounds_s(strategies) for one in seeded]))
    base = means[baseline].to_numpy()
    rows = []
    for name in names:
        own = means[name].to_numpy()
        ratio = paired_interval(own, base, level=level, rng=np.random.default_rng(scenario.seed))
        makespan_s = float(own.mean())
        rows.append(
            {
                "policy": name,
                "makespan_s": makespan_s,
                "ratio": ratio.estimate,
                "ratio_low": ratio.low,
                "ratio_high": ratio.high,
                "regret": makespan_s / bound_s - 1 if bound_s > 0 and not budgets_of(policies[name], 1) else None,
            }
        )
    return pd.DataFrame(rows).sort_values("makespan_s", kind="stable", ignore_index=True)
