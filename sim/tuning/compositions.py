"""A search over compositions of systems' parts for one trace: who drafts and decides, in which order requests run.

Half of the RL steps choose, the other half judge: the best of many is the luckiest too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from tltlab.errors import ConfigError
from tltlab.importers.sources import TraceSource, read
from tltlab.planning.composition import SharedBuffer, System
from tltlab.planning.systems import SYSTEMS
from tltlab.policies.policy import load_policy
from tltlab.sim.study.sample import Scenarios
from tltlab.sim.study.systems import compare_systems, ratios_are_small
from tltlab.sim.config import SimulationConfig, at_least
from tltlab.sim.simulate import outside_calibration
from tltlab.traces.trace import Trace

DRAFTING = ("verl", "tlt", "tlt-base", "das", "vllm-static", "vllm-dynamic", "vllm-adaptive", "sglang-adaptive",
            "sglang-tiers", "seer-drafts", "histospec")  # fmt: skip
"""Rows whose drafter, selector and budget are tried with every order; all lossless and on-policy."""
ORDERS: dict[str, dict[str, Any]] = {
    "": {},
    "longest-first": {"placement": "longest_expected"},
    "one-buffer": {"admission": SharedBuffer()},
}
"""As the row has it, the longest prompts of an epoch before first, or Seer's buffer."""
FINALISTS = 5


def compositions() -> Iterator[System]:
    """Every drafting row in every order; rows that stand already keep their names.

    >>> sum(1 for system in compositions() if "+" in system.name)
    22
    """
    for name in DRAFTING:
        row = SYSTEMS[name]
        for order, changes in ORDERS.items():
            if not order:
                yield row
                continue
            note = f"requests in the order {order}, which {row.title} does not state"
            yield replace(
                row, name=f"{name}+{order}", title=f"{row.title}, {order}", assumptions=(*row.assumptions, note),
                source=f"a composition: {row.source}", **changes,
            )  # fmt: skip


def search_systems(
    trace: TraceSource,
    config: SimulationConfig = SimulationConfig(),
    *,
    finalists: int = FINALISTS,
    **options: Any,
) -> pd.DataFrame:
    """The compositions that are fastest on every other RL step, judged on the others, as `compare_systems` has them.

    A trace of more than 24 RL steps gives a sample of them, where `config` names none.

    The rows are `verl`, which is the baseline, and the `finalists` fastest; `attrs["searched"]` counts the
    compositions, `attrs["chosen_on"]` has the RL steps that chose. `options` are those of `compare_systems`. Costs
    O(compositions x responses). Raises ConfigError for fewer than two RL steps.
    """
    at_least(1, finalists=finalists)
    source: Trace = read(trace)
    named = config.steps_of(source)
    every: Sequence[int] = sorted(source.rl_steps if named is None else named)
    if len(every) < 2:
        raise ConfigError("a search chooses on half of the RL steps and judges on the others: give at least two")

    scenarios = Scenarios(source, replace(config, placement=None, spot=None))

    def search(rl_steps: Sequence[int]) -> pd.DataFrame:
        chosen_on, judged_on = sorted(rl_steps)[::2], sorted(rl_steps)[1::2]
        tried = list(compositions())
        first = compare_systems(source, tried, replace(config, rl_steps=chosen_on), **options | {"ranges": False})
        fastest = [name for name in first["system"] if name != "verl"][:finalists]
        judged = [system for system in tried if system.name in ("verl", *fastest)]
        table = compare_systems(source, judged, replace(config, rl_steps=judged_on), **options)
        scenario = scenarios.of(rl_steps)
        outside = outside_calibration(scenario, scenario.rollouts(load_policy("none"))) or {}
        table.attrs |= {"searched": len(tried), "chosen_on": chosen_on, "outside_calibration": outside}
        return table

    return scenarios.answer(search, ratios_are_small)
