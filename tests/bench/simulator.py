"""How fast the simulator is: wall times and ratios, measured in turn in one run.

Beside it stand two other ways to simulate plain decoding, an event per iteration and a pure closed form, which know
neither speculation nor a full KV cache. The first is what public simulators do, written as fast as SimPy and numpy
allow: one process per worker, one timeout per decode step, the batch as arrays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import simpy

from bench.harness import Table, Text, in_turn, ratio
from tltlab.costs.base import CostModel
from tltlab.costs.linear import LinearCosts
from tltlab.costs.load import load_costs
from tltlab.lengths.generate import log_normal
from tltlab.policies.policy import Policy, load_policy
from tltlab.policies.specs import BegMabSpec, Bucket, TableRow, TableSpec
from tltlab.records import Json
from tltlab.sim.engine.requests import Requests
from tltlab.sim.scenario import Scenario
from tltlab.sim.study.study import Cell, Study
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.traces.trace import Trace

COSTS = LinearCosts(
    base_s=4e-3,
    per_request_s=4e-5,
    per_token_s=2e-5,
    per_context_s=2e-8,
    sd_base_s=1e-3,
    sd_idle_s=0.0,
    draft_level_s=3e-4,
    draft_level_per_request_s=1e-5,
    prefill_per_token_s=1e-6,
)
DECISION_BLOCK = 32
SWEEP_S = 15.0
"""Seconds that a sweep of 1,000 tables should take on one core."""
LEAST_S = 0.1
"""A case runs at least this long in each round, as often as it takes."""


def lengths(prompts: int, rl_steps: int = 1, stretch: int = 1) -> Trace:
    """`prompts` groups of 8 responses, log-normal around 4,024 tokens, sigma 0.9, cut at 32K: 24 M tokens at 512."""
    median, cap = float(np.exp(8.3)) * stretch, 32768 * stretch
    return log_normal(prompts=prompts, group_size=8, rl_steps=rl_steps, median=median, sigma=0.9, cap=cap, seed=0)


EXPERTS = "vllm:4xH100:MiniMax-M2.5:fp8"
"""Costs of a mixture of experts: how many of them an iteration touches depends on its tokens."""


Case = tuple[Callable[[], float], float | None]
"""Something to time, and the milliseconds that it should stay below; None for a baseline."""


def cases() -> dict[str, Case]:
    """Rollouts of one RL step: plain, table, elastic and bandit, fluid and sampled, longer, with experts."""
    step, large, long = lengths(512), lengths(2048), lengths(512, stretch=10)
    table, bandit, plain = example_table(), example_bandit(), load_policy("none")
    elastic, as_table = load_policy("learned:4@32"), table_of((1, Strategy.chain("learned", 4)), (33, NO_SPECULATION))

    def scenario(trace: Trace, costs: CostModel = COSTS, workers: int = 8, **options: Any) -> Scenario:
        return Scenario.of(trace, costs=costs, acceptance="geometric:0.7", workers=workers, **options)

    base, stretched = scenario(step), scenario(long)
    # Costs that engines measured limit the requests of a worker; without a limit both decode the same batches.
    experts = load_costs(EXPERTS).model_copy(update={"kv_capacity_tokens": None, "max_num_seqs": None})
    tight = COSTS.model_copy(update={"kv_capacity_tokens": 1_000_000})

    def makespan(scenario: Scenario, policy: Policy) -> Callable[[], float]:
        return lambda: scenario.rollouts(policy)[0].makespan_s

    requests, queues = base.steps[0], base.queues[0]
    return {
        "plain": (makespan(base, plain), 20),
        "plain, an event per iteration": (lambda: per_iteration_makespan_s(requests, queues, COSTS), None),
        "plain, closed form": (lambda: closed_form_makespan_s(requests, queues, COSTS), None),
        "plain, mixture of experts": (makespan(scenario(step, costs=experts), plain), None),
        "plain, lengths x 10": (makespan(stretched, plain), None),
        "plain, KV cache of 1 M tokens": (makespan(scenario(step, costs=tight), plain), None),
        "plain, 16,384 responses, 64 workers": (makespan(scenario(large, workers=64), plain), 100),
        "table, fluid": (makespan(base, table), 30),
        "table, fluid, lengths x 10": (makespan(stretched, table), None),
        "learned:4@32": (makespan(base, elastic), None),
        "learned:4@32 as a table": (makespan(base, as_table), None),
        "learned:4@32, sampled": (makespan(scenario(step, mode="sampled"), elastic), None),
        "learned:4@32 as a table, sampled": (makespan(scenario(step, mode="sampled"), as_table), None),
        "BEG-MAB, fluid": (makespan(scenario(step, decision_block=DECISION_BLOCK), bandit), 60),
        "table, sampled": (makespan(scenario(step, mode="sampled"), table), 100),
    }


RATIOS: dict[str, tuple[str, str, float | None]] = {
    "per_iteration_over_plain": ("plain, an event per iteration", "plain", None),
    "plain_over_closed_form": ("plain", "plain, closed form", 1.3),
    "plain_lengths_x10_over_plain": ("plain, lengths x 10", "plain", None),
    "experts_over_plain": ("plain, mixture of experts", "plain", 3.0),
    "table_lengths_x10_over_table": ("table, fluid, lengths x 10", "table, fluid", None),
    "elastic_over_table": ("learned:4@32", "learned:4@32 as a table", 4.0),
    "elastic_over_table_sampled": ("learned:4@32, sampled", "learned:4@32 as a table, sampled", 3.0),
}
"""Two cases each, and what their ratio should not exceed."""


def bench_sim(rounds: int, configurations: int, jobs: int) -> Json:
    """Time every case once per round; then the sweep."""
    chosen = cases()
    makespans: dict[str, float] = {}

    def wall_ms_of(name: str, number: int) -> float:
        began, runs = time.perf_counter(), 0
        while not runs or time.perf_counter() - began < LEAST_S:
            makespans[name] = chosen[name][0]()
            runs += 1
        return (time.perf_counter() - began) / runs * 1e3

    wall_ms = in_turn(chosen, wall_ms_of, rounds)
    medians = {name: float(np.median(took)) for name, took in wall_ms.items()}
    result = {
        "cases": [
            {
                "case": name,
                "wall_ms": medians[name],
                "wall_ms_least": min(wall_ms[name]),
                "wall_ms_most": max(wall_ms[name]),
                "goal_ms": goal_ms,
                "met": None if goal_ms is None else medians[name] <= goal_ms,
                "makespan_s": makespans[name],
            }
            for name, (_, goal_ms) in chosen.items()
        ],
        "ratios": {
            name: ratio(wall_ms[above], wall_ms[below]) | {"goal": most}
            for name, (above, below, most) in RATIOS.items()
        },
        "decision_block": DECISION_BLOCK,
        "rounds": rounds,
    }
    return result | ({"sweep": bench_sweep(configurations, jobs)} if configurations else {})


TEXT: Text = (
    Table(
        "cases",
        "case: {case}; median ms: {wall_ms:.2f}; least: {wall_ms_least:.2f}; most: {wall_ms_most:.2f}; "
        "goal: {goal_ms:.0f}; : {met:|MISSED|}",
    ),
    Table(
        "ratios",
        "ratio: {name}; : {ratio:.2f} [{low:.2f}, {high:.2f}]; goal: {goal}",
    ),
    "a bandit decides once per {decision_block} iterations; {rounds} rounds, in turn",
    "sweep: {sweep.configurations} tables x {sweep.rl_steps} RL steps of 4,096 responses in {sweep.wall_s:.1f} s on "
    "{sweep.jobs} processes; goal {sweep.goal_s:.1f}",
)


def bench_sweep(configurations: int, jobs: int) -> Json:
    """`configurations` batch-size tables on ten RL steps of 4,096 responses each."""
    scenario = Scenario.of(lengths(512, rl_steps=10), costs=COSTS, acceptance="geometric:0.7", workers=8)
    cells = [
        Cell(name=name, policy=policy, scenario=scenario) for name, policy in random_tables(configurations).items()
    ]
    began = time.perf_counter()
    table = Study(cells=cells, details=False, jobs=jobs).table()
    wall_s = time.perf_counter() - began
    means = table.groupby("policy")["makespan_s"].mean()
    return {
        "configurations": configurations,
        "rl_steps": 10,
        "jobs": jobs,
        "wall_s": wall_s,
        "goal_s": SWEEP_S * configurations / 1000 / jobs,
        "best_makespan_s": float(means.min()),
        "worst_makespan_s": float(means.max()),
    }


def random_tables(count: int) -> dict[str, Policy]:
    """Batch-size tables with random borders and falling depths."""
    rng = np.random.default_rng(0)
    tables = {}
    for i in range(count):
        borders = [1, *sorted(rng.choice(np.arange(2, 513), size=3, replace=False).tolist())]
        depths = sorted(rng.choice([0, 1, 2, 3, 4, 6, 8, 12], size=4, replace=False).tolist(), reverse=True)
        chains = [Strategy.chain("learned", depth) for depth in depths]
        tables[f"table {i}"] = table_of(*zip(borders, chains, strict=True))
    return tables


def example_table() -> Policy:
    """Deep drafts in the tail, none in large batches."""
    return table_of((1, Strategy.chain("learned", 8)), (5, Strategy.chain("learned", 4)), (33, NO_SPECULATION))


def table_of(*rows: tuple[int, Strategy]) -> Policy:
    return Policy(selector=TableSpec(rows=tuple(TableRow(min_batch=b, strategy=s) for b, s in rows)))


def example_bandit() -> Policy:
    """BEG-MAB with two arms in each of three buckets."""
    deep, middle, shallow = (Strategy.chain("learned", depth) for depth in (8, 4, 2))
    buckets = ((1, (deep, middle)), (9, (middle, shallow)), (65, (shallow, NO_SPECULATION)))
    specs = tuple(Bucket(min_batch=b, strategies=arms) for b, arms in buckets)
    return Policy(selector=BegMabSpec(buckets=specs))


def per_iteration_makespan_s(requests: Requests, queues: list[list[int]], costs: CostModel) -> float:
    """Makespan of plain decoding with one SimPy event per decode iteration and worker."""
    cost = costs.iteration(NO_SPECULATION)
    env = simpy.Environment()

    def worker(queue: list[int]) -> Generator[simpy.Event, Any, None]:
        lengths = np.sort(requests.lengths[queue])
        context = int(requests.prompts[queue].sum())
        yield env.timeout(costs.prefill_s(float(context)))
        done, num_iterations = 0, 0
        contexts = (requests.prompts[queue] + requests.lengths[queue])[np.argsort(requests.lengths[queue])]
        while done < len(lengths):
            batch = len(lengths) - done
            yield env.timeout(cost.seconds(batch, context))
            num_iterations += 1
            context += batch
            while done < len(lengths) and lengths[done] <= num_iterations:
                context -= int(contexts[done])
                done += 1

    processes = [env.process(worker(queue)) for queue in queues if queue]
    env.run(until=env.all_of(processes))
    return float(env.now)


def closed_form_makespan_s(requests: Requests, queues: list[list[int]], costs: CostModel) -> float:
    """Makespan of plain decoding without events: T = sum over finishes of the time between two of them.

    With lengths ascending, batch b_j = n - j runs L_(j) - L_(j-1) iterations, its context growing by b_j in each.
    """
    cost = costs.iteration(NO_SPECULATION)
    ends = [0.0]
    for queue in queues:
        order = np.argsort(requests.lengths[queue])
        lengths = requests.lengths[queue][order].astype(np.float64)
        prompts = requests.prompts[queue][order].astype(np.float64)
        counts = np.diff(lengths, prepend=0.0)
        batch = np.arange(len(lengths), 0, -1)
        fixed = np.array([cost.without_context_s(int(b)) for b in batch])
        slope = np.array([cost.context_slope_s(int(b)) for b in batch])
        context = np.cumsum(prompts[::-1])[::-1] + batch * (lengths - counts)
        seconds = counts * (fixed + slope * context) + slope * batch * counts * (counts - 1) / 2
        ends.append(costs.prefill_s(float(prompts.sum())) + float(seconds.sum()))
    return max(ends)
