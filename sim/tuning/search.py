"""The policies that tuning tries: fixed strategies, elastic ones, exact tables, and by Optuna the settings of a bandit
or of policies that a user names.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from tltlab.config import json_or_text
from tltlab.errors import ConfigError
from tltlab.planning.buckets import plan_buckets
from tltlab.policies.policy import Activation, Policy, load_policy
from tltlab.policies.selector import SelectorSpec
from tltlab.policies.specs import BegMabSpec, Bucket, CustomSpec, FixedSpec, TableRow, TableSpec
from tltlab.records import Fields, Json, frozen
from tltlab.sim.scenario import Scenario
from tltlab.sim.study.study import Journal
from tltlab.strategy import NO_SPECULATION, Strategy

from .cases import ExpectedIteration, batch_times

EPSILONS = (0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
WINDOWS = (10, 30, 100, 300, 1000)
SHIPPED_SETTINGS = {
    "epsilon": 0.1, "window": 300, "reward": "relative", "statistic": "median", "num_arms": 4, "num_buckets": 3,
    "max_requests": 32,
}  # fmt: skip
MOST_ROWS = 4
"""Most rows of a table and buckets of a bandit."""
_TRIALS_AT_ONCE = 4
_LEAST_WEIGHT = 1e-6
_RANGE_VALUES = 17


@frozen
class Prices:
    """Seconds that a strategy takes for what the workers do at a batch size, summed over the traces of a tuning."""

    strategies: tuple[Strategy, ...]
    seconds: Mapping[tuple[Strategy, int], float]
    max_batch: int

    @classmethod
    def of(cls, scenarios: Sequence[Scenario], strategies: Sequence[Strategy]) -> Prices:
        """With NO_SPECULATION first. A batch that no rollout meets counts a little, at its neighbour's context."""
        every = tuple(dict.fromkeys((NO_SPECULATION, *strategies)))
        times = [batch_times(scenario) for scenario in scenarios]
        most = max(max(t, default=1) for t in times)
        seconds: dict[tuple[Strategy, int], float] = {}
        for scenario, batches in zip(scenarios, times, strict=True):
            expected, near = ExpectedIteration(scenario, strategies), (1, 0.0)
            for b in range(1, most + 1):
                weight, context = batches.get(b, (0.0, near[1] * b / near[0]))
                near = (b, context)
                for s in every:
                    spent = (weight + _LEAST_WEIGHT) * expected.seconds_per_token(s, b, context)
                    seconds[s, b] = seconds.get((s, b), 0.0) + spent
        return cls(strategies=every, seconds=seconds, max_batch=most)

    def best(self, first: int, last: int, count: int) -> list[Strategy]:
        """The cheapest strategies for batches first..last, the best one first."""
        total = {s: sum(self.seconds[s, b] for b in range(first, last + 1)) for s in self.strategies}
        return sorted(self.strategies, key=lambda s: total[s])[:count]

    def table(self, most: int = MOST_ROWS) -> SelectorSpec:
        """The exact table of at most so many rows."""
        rows = plan_buckets(
            lambda s, b: self.seconds[s, b], self.strategies, max_batch=self.max_batch, max_buckets=most
        )
        return TableSpec(rows=tuple(TableRow(min_batch=b, strategy=s) for b, s in rows))

    @cached_property
    def tables(self) -> list[SelectorSpec]:
        """The exact tables of at most 1, 2, ... rows, each once."""
        return list(dict.fromkeys(self.table(most) for most in range(1, MOST_ROWS + 1)))


def thresholds(max_batch: int) -> list[int]:
    """Activation thresholds to try below a batch size: 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    every = sorted({size for k in range(14) for size in (2**k, 3 * 2**k)})
    return [size for size in every if size < max_batch]


def fixed(strategies: Sequence[Strategy]) -> dict[str, Policy]:
    """Plain decoding, and each strategy throughout."""
    named = {f"fixed {s}": Policy(selector=FixedSpec(strategy=s)) for s in strategies if s.speculates}
    return {"none": load_policy("none"), **named}


def elastic(strategies: Sequence[Strategy], max_batch: int) -> dict[str, Policy]:
    """Each strategy while at most so many requests run, for every threshold."""
    return {
        f"{s} up to {most} requests": Policy(
            selector=FixedSpec(strategy=s), activation=Activation(max_requests=most, hold_iterations=0)
        )
        for s in strategies
        if s.speculates
        for most in thresholds(max_batch)
    }


def tables(prices: Sequence[Prices]) -> dict[str, Policy]:
    """Exact tables of two rows or more for each of the prices."""
    specs = {table for each in prices for table in each.tables}
    of_several_rows = [spec for spec in sorted(specs, key=lambda s: (len(s.rows), str(s.rows))) if len(spec.rows) > 1]
    return {
        " ".join(["table", *(f"{row.min_batch}+:{row.strategy}" for row in spec.rows)]): Policy(selector=spec)
        for spec in of_several_rows
    }


@frozen
class Space:
    """Settings that a search tries with their values, in order where these are numbers, and those to begin with.

    `policy` makes that of a trial.
    """

    policy: Callable[[Fields], Policy]
    choices: Mapping[str, tuple[Any, ...]]
    first: Fields


def parameters(base: Policy, values: Mapping[str, tuple[Any, ...]]) -> Space:
    """Settings of a policy that a user names. ConfigError for a value that it does not take."""
    selector, first = base.selector, {}
    settings = selector.args if isinstance(selector, CustomSpec) else dict(selector)
    for name, each in values.items():
        for value in each:
            base.with_settings({name: value}).build(np.random.default_rng(0))
        if isinstance(settings.get(name), int | float) and not isinstance(each[0], str):
            first[name] = settings[name]
    return Space(policy=base.with_settings, choices=values, first=first)


def values_of(name: str, text: str) -> tuple[Any, ...]:
    """The values of a setting that `low..high` or `a|b|c` stands for; ConfigError for another text.

    Whole numbers are all tried in a range of at most 32, else 17 of them. Positive ranges of a factor of ten or more
    are divided by ratios, others by differences.

    >>> values_of("few", "2..5"), values_of("epsilon", "0.01..0.1")[::8], values_of("reward", "paper|relative")
    ((2, 3, 4, 5), (0.01, 0.031622777, 0.1), ('paper', 'relative'))
    """
    if ends := re.fullmatch(r"(.+?)\.\.(.+)", text):
        low, high = (json_or_text(end) for end in ends.groups())
        numbers = all(isinstance(end, int | float) and not isinstance(end, bool) for end in (low, high))
        if not numbers or not -math.inf < low < high < math.inf:
            raise ConfigError(f"--search {name}={text}: a range is low..high, two numbers, the lower one first")
        spaced = np.geomspace if low > 0 and high >= 10 * low else np.linspace
        if not (isinstance(low, int) and isinstance(high, int)):
            return tuple(float(f"{value:.8g}") for value in spaced(low, high, _RANGE_VALUES))
        whole = range(low, high + 1) if high - low < 32 else spaced(low, high, _RANGE_VALUES).round()
        return tuple(dict.fromkeys(int(value) for value in whole))
    values = tuple(dict.fromkeys(json_or_text(value) for value in text.split("|")))
    if len(values) < 2:
        raise ConfigError(f"--search {name}={text}: give a range, low..high, or values with | between them")
    return values


def bandits(prices: Prices) -> Space:
    """BEG-MAB policies: buckets are the rows of an exact table, arms the strategies cheapest there."""

    def policy(settings: Fields) -> Policy:
        """The policy of a trial. A relative reward needs no speculation as an arm, which then comes on top."""
        rows = prices.tables[settings["num_buckets"] - 1].rows
        ends = [row.min_batch - 1 for row in rows[1:]] + [prices.max_batch]
        buckets = []
        for row, end in zip(rows, ends, strict=True):
            arms = prices.best(min(row.min_batch, end), end, settings["num_arms"])
            if settings["reward"] == "relative" and NO_SPECULATION not in arms:
                arms.append(NO_SPECULATION)
            buckets.append(Bucket(min_batch=row.min_batch, strategies=tuple(arms)))
        most, same = settings["max_requests"], ("epsilon", "window", "reward", "statistic")
        return Policy(
            selector=BegMabSpec(buckets=tuple(buckets), **{name: settings[name] for name in same}),
            activation=Activation(max_requests=most) if most else None,
        )

    choices = {
        "epsilon": EPSILONS,
        "window": WINDOWS,
        "reward": ("relative", "paper"),
        "statistic": ("median", "mean"),
        "num_arms": tuple(range(2, min(4, len(prices.strategies)) + 1)),
        "num_buckets": tuple(range(1, len(prices.tables) + 1)),
        # 0 is no activation.
        "max_requests": (0, *[t for t in (4, 8, 16, 32, 64, 128) if t < prices.max_batch]),
    }
    return Space(policy=policy, choices=choices, first=SHIPPED_SETTINGS)


@frozen
class Trial:
    """Settings that were tried and their score."""

    settings: Json
    policy: Policy
    score: float
    number: int = 0
    """When it was asked for, from 0 on."""


def search(
    space: Space,
    score: Callable[[Mapping[str, Policy]], Mapping[str, float]],
    *,
    trials: int,
    seed: int,
    on_stage: Callable[[str], None],
    journal: Journal,
) -> list[Trial]:
    """Optuna's TPE over a policy's settings, its present ones first. Return the trials, the best one first.

    `on_stage` receives each trial in words.

    No more than `trials` combinations are all tried instead.

    Four trials are asked for at a time, however many processes score them: the numbers do not depend on that. Nor on
    an interruption: scores are kept in `journal` by policy, and trials whose policy is there are asked for again, so
    that the sampler is where it was, and not scored again.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    choices, first = space.choices, space.first
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True, n_startup_trials=12)
    study = optuna.create_study(sampler=sampler)
    combinations = math.prod(map(len, choices.values()))
    if combinations <= trials:
        trials = combinations
        for places in product(*(range(len(values)) for values in choices.values())):
            study.enqueue_trial(dict(zip(choices, places, strict=True)))
    else:
        study.enqueue_trial({name: _nearest(first[name], values) for name, values in choices.items() if name in first})
    scores: dict[str, float] = journal.known
    finished: list[Trial] = []
    for begin in range(0, trials, _TRIALS_AT_ONCE):
        open_trials = [study.ask() for _ in range(min(_TRIALS_AT_ONCE, trials - begin))]
        settings = [_suggested(trial, choices) for trial in open_trials]
        policies = [space.policy(combination) for combination in settings]
        keys = [policy.model_dump_json() for policy in policies]
        new = {key: p for key, p in zip(keys, policies, strict=True) if key not in scores}
        for key, value in (score(new) if new else {}).items():
            journal.add(key, value)
        for trial, chosen, policy, key in zip(open_trials, settings, policies, keys, strict=True):
            study.tell(trial, scores[key])
            finished.append(Trial(settings=chosen, policy=policy, score=scores[key], number=trial.number))
            on_stage(f"trial {len(finished)} of {trials}, best {min(scores.values()):.4g} s")
    return sorted(finished, key=lambda trial: trial.score)


def _suggested(trial: Any, choices: Mapping[str, tuple[Any, ...]]) -> Json:
    """Values are suggested by their place; of numbers the sampler knows which lie beside one another."""
    settings = {}
    for name, values in choices.items():
        last = len(values) - 1
        named = isinstance(values[0], str)
        at = trial.suggest_categorical(name, range(last + 1)) if named else trial.suggest_int(name, 0, last)
        settings[name] = values[at]
    return settings


def _nearest(value: Any, values: Sequence[Any]) -> int:
    if isinstance(value, str):
        return values.index(value)
    return min(range(len(values)), key=lambda i: abs(values[i] - value))


def best_table(scenario: Scenario, strategies: Sequence[Strategy]) -> Policy:
    """The exact table of at most four rows by batch size, for the scenario's costs and acceptance."""
    return Policy(selector=Prices.of([scenario], strategies).table())
