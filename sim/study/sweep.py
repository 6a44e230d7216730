"""Many policies on the same responses with common random numbers: makespans, ratios with paired intervals, regret.

A scenario is prepared once; policies run one after another, or over processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from tltlab.arrays import Floats
from tltlab.errors import ConfigError
from tltlab.importers.sources import TraceSource, read
from tltlab.policies.policy import Policy, PolicySource
from tltlab.sim.config import SimulationConfig, at_least
from tltlab.sim.scenario import Scenario, budgets_of, is_memoryless, named_policies, strategies_run
from tltlab.sim.simulate import outside_calibration
from tltlab.stats import LEVEL, Interval, paired_ratio

from .jobs import side_by_side
from .sample import Scenarios, small

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DRAFTERS_CHARACTERS = 16
Policies = Mapping[str, PolicySource] | Sequence[PolicySource] | str


class Comparison(pd.DataFrame):
    """A comparison's rows: a DataFrame that draws itself."""

    @property
    def _constructor(self) -> Callable[..., pd.DataFrame]:
        """Parts of it are DataFrames and nothing else."""
        return pd.DataFrame

    def to_frame(self) -> pd.DataFrame:
        """A plain DataFrame of the same rows."""
        return pd.DataFrame(self)

    def plot(self) -> Figure:  # type: ignore[override]
        """The speed-up of each row over the baseline, with its interval of draws only."""
        from tltlab.charts import bars

        names = self["policy" if "policy" in self else "title"].tolist()
        low, high = (1.0 / self[end] for end in ("ratio_high", "ratio_low"))
        return bars(names, (1.0 / self["ratio"]).tolist(), low.tolist(), high.tolist(), title="Rollouts (simulated)",
                    xlabel="speed-up over the baseline (intervals: draws only)", reference=1.0)  # fmt: skip


def sweep(
    scenario: Scenario | TraceSource, policies: Policies, *, jobs: int | None = 1, outside: bool = False
) -> pd.DataFrame:
    """Simulate every policy on the scenario: one row per policy and RL step, in order, with `makespan_s`.

    `scenario` may be a trace as `simulate` takes it, from which `Scenario.of` makes one. `policies` are a dict of
    policies by name, a list or names with commas between, each as `simulate` takes it.
    `jobs` processes share the policies; the numbers do not depend on them. With `outside` the table's `attrs` has
    `outside_calibration` of each policy. ConfigError for jobs < 1.

    >>> sweep("traces/tiny", "none,beg-mab").makespan_s.tolist()  # doctest: +SKIP
    """
    at_least(1, jobs=jobs)
    scenario = scenario if isinstance(scenario, Scenario) else Scenario.of(scenario)
    policies = named_policies(policies)
    scenario.check_acceptance(policies.values())
    # The longest begin first: the last to end then ends about when the others do.
    seconds = {name: expected_s(scenario, policy) for name, policy in policies.items()}
    order = sorted(policies, key=lambda name: -seconds[name])
    tasks = [partial(_simulated, scenario, policies[name], outside) for name in order]
    results = side_by_side(tasks, jobs=jobs, expected_s=[seconds[name] for name in order])
    found = dict(zip(order, results, strict=True))
    steps = [step.rl_step for step in scenario.steps]
    table = pd.DataFrame(
        {
            "policy": np.repeat(list(policies), len(steps)),
            "rl_step": steps * len(policies),
            "makespan_s": [seconds for name in policies for seconds in found[name][0]],
        }
    )
    table.attrs["outside"] = {name: found[name][1] for name in policies}
    return table


def expected_s(scenario: Scenario, policy: Policy) -> float:
    """Approximate seconds of a simulation, by decisions where a policy learns, else by requests."""
    if is_memoryless(policy):
        return _REQUEST_S * sum(map(len, scenario.steps))
    rollouts = zip(scenario.steps, scenario.queues, strict=True)
    longest = (step.lengths[queue].max() for step, queues in rollouts for queue in queues if len(queue))
    return _DECISION_S * float(sum(longest)) / scenario.decision_block


_REQUEST_S, _DECISION_S = 2e-6, 3e-5


def _simulated(scenario: Scenario, policy: Policy, outside: bool) -> tuple[list[float], dict[str, float]]:
    """Seconds of each RL step's rollout, and if asked the shares of iterations outside what was measured."""
    if not outside:
        return [rollout.makespan_s for rollout in scenario.each_rollout(policy)], {}
    rollouts = tuple(rollout.settled() for rollout in scenario.each_rollout(policy))
    return [rollout.makespan_s for rollout in rollouts], outside_calibration(scenario, rollouts) or {}


def compare(
    scenario: Scenario | TraceSource,
    policies: Policies,
    config: SimulationConfig = SimulationConfig(),
    *,
    baseline: str | None = None,
    repeats: int = 1,
    jobs: int | None = 1,
    **settings: Any,
) -> Comparison:
    """Compare policies, given as `sweep` takes them: one row each, the fastest first.

    For a trace, `settings` are the fields of `SimulationConfig` (costs, acceptance, workers, ...), which replace those
    of `config`. Where `rl_steps` are left open in a trace of more than 24, those of a sample are simulated
    (`Scenarios.answer`).

    Columns: `policy`, its `drafters` and the `acceptance` granted to each, `makespan_s` (mean over RL steps and
    repeats), `ratio` to the `baseline` (the first policy; below 1 is faster) with its paired interval `ratio_low` to
    `ratio_high` over the RL steps (`paired_ratio`: Student's below ten), `speed_up` (how many times as fast as the
    baseline, 1 / `ratio`), and `regret` to the clairvoyant bound over all strategies of all policies (None under a
    per-request budget). `repeats` are seeds, each with common random numbers for all policies; a step's repeats are
    averaged before resampling, since they share its lengths. `attrs` has `baseline`, `num_rl_steps` of the trace's
    `num_rl_steps_of`, the names of `costs` and `acceptance`, `evidence` (`Scenario.evidence`) and, of the baseline and
    the fastest, the largest `outside_calibration`. Raises ConfigError.
    """
    if isinstance(scenario, Scenario) and (settings or config != SimulationConfig()):
        given = ", ".join(settings) or "config"
        raise ConfigError(f"a Scenario has its settings already: leave out {given}, or give the trace")
    policies = named_policies(policies)
    baseline = next(iter(policies)) if baseline is None else baseline
    if baseline not in policies:
        raise ConfigError(f"the baseline {baseline!r} is none of the policies {', '.join(policies)}")
    at_least(1, repeats=repeats)
    if isinstance(scenario, Scenario):
        return _compared(scenario, policies, baseline, repeats, jobs)
    scenarios = Scenarios(read(scenario), config.changed(settings, compare))

    def is_enough(table: Comparison) -> bool:
        return small(intervals_of(table, "ratio"), table.attrs["evidence"]["speedup_error"])

    table = scenarios.answer(lambda steps: _compared(scenarios.of(steps), policies, baseline, repeats, jobs), is_enough)
    table.attrs["num_rl_steps_of"] = len(scenarios.run)
    return table


def _compared(
    scenario: Scenario, policies: Mapping[str, Policy], baseline: str, repeats: int, jobs: int | None
) -> Comparison:
    strategies = strategies_run(*policies.values())
    drafters = scenario.registry_of(policies)
    seeded = [replace(scenario, seed=scenario.seed + k) for k in range(repeats)]
    tables = [sweep(repeat, policies, jobs=jobs, outside=repeat is seeded[0]) for repeat in seeded]
    means = pd.concat(tables).groupby(["policy", "rl_step"])["makespan_s"].mean()
    bound_s = float(np.mean([repeat.bounds_s(strategies, drafters) for repeat in seeded]))
    base = means[baseline].to_numpy()
    rows = []
    for name in policies:
        seconds = means[name].to_numpy()
        makespan_s = float(seconds.mean())
        rows.append(
            {
                "policy": name,
                **scenario.granted(policies[name].strategies),
                "makespan_s": makespan_s,
                **ratio_columns("ratio", seconds, base, scenario.seed),
                "speed_up": float(base.sum() / seconds.sum()) if seconds.any() else None,
                "regret": makespan_s / bound_s - 1 if bound_s > 0 and not budgets_of(policies[name], 1) else None,
            }
        )
    table = Comparison(pd.DataFrame(rows).sort_values("makespan_s", kind="stable", ignore_index=True))
    shares = [tables[0].attrs["outside"][name] for name in (baseline, str(table["policy"][0]))]
    outside = {str(name): share for name, share in pd.DataFrame(shares).max().items()}
    table.attrs.update(
        baseline=baseline,
        num_rl_steps=len(scenario.steps),
        num_rl_steps_of=len(scenario.steps),
        costs=scenario.costs_name,
        acceptance=scenario.acceptance_name,
        evidence=scenario.evidence((s for policy in policies.values() for s in policy.strategies), outside),
        outside_calibration=outside,
    )
    return table


def ratio_columns(name: str, seconds: Floats, base: Floats, seed: int) -> dict[str, float]:
    """The ratio of two series of RL steps, and its paired 95 % interval as `name`_low and `name`_high."""
    ratio = paired_ratio(seconds, base, rng=np.random.default_rng(seed))
    return {name: ratio.estimate, f"{name}_low": ratio.low, f"{name}_high": ratio.high}


def intervals_of(table: pd.DataFrame, name: str) -> list[Interval]:
    """The ratios of a table that `ratio_columns` made, with their intervals."""
    columns = table[[name, f"{name}_low", f"{name}_high"]].to_numpy(np.float64).tolist()
    return [Interval(estimate=v, low=low, high=high, level=LEVEL, method="none") for v, low, high in columns]


def drafters_text(names: Sequence[str]) -> str:
    """The drafters of a row in a table's cell; many are counted, and `granted_text` has their names.

    >>> drafters_text(["learned", "ngram"]), drafters_text([])
    ('learned+ngram', 'none')
    """
    text = "+".join(names) or "none"
    return text if len(text) <= _DRAFTERS_CHARACTERS else f"{len(names)} drafters"


def granted_text(rows: Sequence[Mapping[Any, Any]], name: str, granted: str = "acceptance") -> str:
    """A line with the acceptance granted to each drafter in a table's `rows`; "" where none drafts.

    Rows are named, by their `name`, where a drafter has another acceptance in another row.

    >>> granted_text([{"policy": "fixed", "drafters": ["ngram"], "acceptance": {"ngram": "geometric:0.4"}}], "policy")
    'acceptance: ngram geometric:0.4'
    """
    rows_of: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for drafter, text in row[granted].items():
            rows_of.setdefault((drafter, text), []).append(str(row[name]))
    several = {drafter for drafter, _ in rows_of if sum(other == drafter for other, _ in rows_of) > 1}
    parts = [
        f"{drafter} {text}" + (f" ({', '.join(dict.fromkeys(names))})" if drafter in several else "")
        for (drafter, text), names in sorted(rows_of.items())
    ]
    counted = {str(row[name]): row["drafters"] for row in rows if len("+".join(row["drafters"])) > _DRAFTERS_CHARACTERS}
    parts += [f"{row} drafts with {', '.join(names)}" for row, names in counted.items()]
    return f"acceptance: {'; '.join(parts)}" if parts else ""


def speed_ups(name: str, row: Mapping[Any, Any] | pd.Series[Any], ratio: str) -> dict[str, float | None]:
    """The reciprocals of a ratio and of the ends of its interval; None for an end that is unknown or has none."""
    ends = {"": row[ratio], "_low": row[f"{ratio}_high"], "_high": row[f"{ratio}_low"]}
    return {name + end: 1.0 / float(value) if value > 0 else None for end, value in ends.items()}


def speed_up_cells(row: Mapping[str, Any], name: str) -> tuple[str, str]:
    """A speed-up and its interval, as `speed_ups` has them, for a table."""
    value, low, high = (row[f"{name}{end}"] for end in ("", "_low", "_high"))
    times = "" if value is None else f"{value:.2f}x"
    if low is None:
        return times, "one RL step"
    return times, f"[{low:.2f}, {'inf' if high is None else format(high, '.2f')}]"
