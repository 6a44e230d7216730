"""How fast the simulator is: wall times and ratios, measured in turn in one run.

Beside it stand two other ways to simulate plain decoding, an event per iteration and a pure closed form, which know
neither speculation nor a full KV cache. The first is what public simulators do, written as fast as SimPy and numpy
allow: one process per worker, one timeout per decode step, the batch as arrays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy

from tltlab.console import table
from tltlab.costs.base import CostModel, LinearCosts
from tltlab.costs.load import load_costs
from tltlab.lengths.generate import log_normal
from tltlab.policies.policy import Policy, load_policy
from tltlab.policies.specs import BegMabSpec, Bucket, TableRow, TableSpec
from tltlab.sim.engine.requests import Requests
from tltlab.sim.scenario import Scenario
from tltlab.sim.sweep import sweep
from tltlab.stats import paired_interval
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
"""What a sweep of 1,000 tables should take on one core."""
LEAST_S = 0.1
"""A case runs at least this long in each round, as often as it takes."""


@dataclass(frozen=True, kw_only=True)
class TimedRun:
    """Something to time; `goal_ms` is what it should stay below, None for a baseline."""

    name: str
    run: Callable[[], float]
    goal_ms: float | None = None


def lengths(prompts: int, rl_steps: int = 1, stretch: int = 1) -> Trace:
    """`prompts` groups of 8 responses, log-normal around 4,024 tokens, sigma 0.9, cut at 32K: 24 M tokens at 512."""
    median, cap = float(np.exp(8.3)) * stretch, 32768 * stretch
    return log_normal(prompts=prompts, group_size=8, rl_steps=rl_steps, median=median, sigma=0.9, cap=cap, seed=0)


EXPERTS = "vllm:4xH100:MiniMax-M2.5:fp8"
"""Costs of a mixture of experts: how many of them an iteration touches depends on its tokens."""
SPREAD = 0.8
"""Standard deviation, in logits, of acceptance between requests."""


def cases() -> list[TimedRun]:
    """What rollouts of one RL step take: plain, table and bandit, fluid and sampled, and ten times longer responses.

    Beside linear costs and requests that are all accepted alike, plain decoding of a mixture of experts, and a table
    where every request has an acceptance of its own.
    """
    step, large, long = lengths(512), lengths(2048), lengths(512, stretch=10)
    table, bandit, plain = example_table(), example_bandit(), load_policy("none")

    def scenario(trace: Trace, costs: CostModel = COSTS, workers: int = 8, **options: Any) -> Scenario:
        return Scenario.of(trace, costs=costs, acceptance="geometric:0.7", workers=workers, **options)

    base, many, stretched = scenario(step), scenario(large, workers=64), scenario(long)
    sampled, blocks = scenario(step, mode="sampled"), scenario(step, decision_block=DECISION_BLOCK)
    # Costs that engines measured limit the requests of a worker; without a limit both decode the same batches.
    experts = load_costs(EXPERTS).model_copy(update={"kv_capacity_tokens": None, "max_num_seqs": None})
    routed, apart = scenario(step, costs=experts), scenario(step, acceptance_spread=SPREAD)
    tight = scenario(step, costs=COSTS.model_copy(update={"kv_capacity_tokens": 1_000_000}))

    def makespan(scenario: Scenario, policy: Policy) -> Callable[[], float]:
        return lambda: scenario.rollouts(policy)[0].makespan_s

    requests, queues = base.steps[0], base.queues[0]
    return [
        TimedRun(name="plain", run=makespan(base, plain), goal_ms=20),
        TimedRun(name="plain, an event per iteration", run=lambda: per_iteration_makespan_s(requests, queues, COSTS)),
        TimedRun(name="plain, closed form", run=lambda: closed_form_makespan_s(requests, queues, COSTS)),
        TimedRun(name="plain, mixture of experts", run=makespan(routed, plain)),
        TimedRun(name="plain, lengths x 10", run=makespan(stretched, plain)),
        TimedRun(name="plain, KV cache of 1 M tokens", run=makespan(tight, plain)),
        TimedRun(name="plain, 16,384 responses, 64 workers", run=makespan(many, plain), goal_ms=100),
        TimedRun(name="table, fluid", run=makespan(base, table), goal_ms=30),
        TimedRun(name="table, fluid, each request's own acceptance", run=makespan(apart, table)),
        TimedRun(name="table, fluid, lengths x 10", run=makespan(stretched, table)),
        TimedRun(name="BEG-MAB, fluid", run=makespan(blocks, bandit), goal_ms=60),
        TimedRun(name="table, sampled", run=makespan(sampled, table), goal_ms=100),
    ]


def bench_sim(rounds: int, configurations: int, jobs: int) -> dict[str, Any]:
    """Time every case once per round, in turn, so that a busy machine slows all of them; then the sweep."""
    chosen = cases()
    for case in chosen:
        case.run()
    wall_ms: dict[str, list[float]] = {case.name: [] for case in chosen}
    makespans: dict[str, float] = {}
    for _ in range(rounds):
        for case in chosen:
            began, runs = time.perf_counter(), 0
            while not runs or time.perf_counter() - began < LEAST_S:
                makespans[case.name] = case.run()
                runs += 1
            wall_ms[case.name].append((time.perf_counter() - began) / runs * 1e3)
    rng = np.random.default_rng(0)
    result: dict[str, Any] = {
        "cases": [_row(case, wall_ms[case.name], makespans[case.name]) for case in chosen],
        "ratios": {
            "per_iteration_over_plain": _ratio(wall_ms, "plain, an event per iteration", "plain", rng),
            "plain_over_closed_form": _ratio(wall_ms, "plain", "plain, closed form", rng, most=1.3),
            "plain_lengths_x10_over_plain": _ratio(wall_ms, "plain, lengths x 10", "plain", rng),
            "experts_over_plain": _ratio(wall_ms, "plain, mixture of experts", "plain", rng, most=3.0),
            "own_acceptance_over_table": _ratio(
                wall_ms, "table, fluid, each request's own acceptance", "table, fluid", rng, most=3.0
            ),
            "table_lengths_x10_over_table": _ratio(wall_ms, "table, fluid, lengths x 10", "table, fluid", rng),
        },
        "decision_block": DECISION_BLOCK,
        "rounds": rounds,
    }
    if configurations:
        result["sweep"] = bench_sweep(configurations, jobs)
    return result


def bench_sweep(configurations: int, jobs: int) -> dict[str, Any]:
    """`configurations` batch-size tables on ten RL steps of 4,096 responses each."""
    scenario = Scenario.of(lengths(512, rl_steps=10), costs=COSTS, acceptance="geometric:0.7", workers=8)
    policies = random_tables(configurations)
    began = time.perf_counter()
    table = sweep(scenario, policies, jobs=jobs)
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
        rows = [
            TableRow(min_batch=b, strategy=Strategy.chain("learned", d)) for b, d in zip(borders, depths, strict=True)
        ]
        tables[f"table {i}"] = Policy(selector=TableSpec(rows=tuple(rows)))
    return tables


def example_table() -> Policy:
    """Deep drafts in the tail, none in large batches."""
    rows = ((1, Strategy.chain("learned", 8)), (5, Strategy.chain("learned", 4)), (33, NO_SPECULATION))
    return Policy(selector=TableSpec(rows=tuple(TableRow(min_batch=b, strategy=s) for b, s in rows)))


def example_bandit() -> Policy:
    """BEG-MAB with two arms in each of three buckets."""
    deep, middle, shallow = (Strategy.chain("learned", depth) for depth in (8, 4, 2))
    buckets = ((1, (deep, middle)), (9, (middle, shallow)), (65, (shallow, NO_SPECULATION)))
    specs = tuple(Bucket(min_batch=b, strategies=arms) for b, arms in buckets)
    return Policy(selector=BegMabSpec(buckets=specs))


def _row(case: TimedRun, wall_ms: list[float], makespan_s: float) -> dict[str, Any]:
    median = float(np.median(wall_ms))
    return {
        "case": case.name,
        "wall_ms": median,
        "wall_ms_least": min(wall_ms),
        "wall_ms_most": max(wall_ms),
        "goal_ms": case.goal_ms,
        "met": None if case.goal_ms is None else median <= case.goal_ms,
        "makespan_s": makespan_s,
    }


def _ratio(
    wall_ms: dict[str, list[float]], above: str, below: str, rng: np.random.Generator, *, most: float | None = None
) -> dict[str, float | None]:
    """The ratio of two cases with its interval; `goal` is what it should not exceed, None for a comparison."""
    interval = paired_interval(np.array(wall_ms[above]), np.array(wall_ms[below]), rng=rng)
    return {"ratio": interval.estimate, "low": interval.low, "high": interval.high, "goal": most}


def text(result: dict[str, Any]) -> str:
    """The result for people."""
    cases = [
        (
            row["case"], *(f"{row[key]:.2f}" for key in ("wall_ms", "wall_ms_least", "wall_ms_most")),
            "" if row["goal_ms"] is None else f"{row['goal_ms']:.0f}",
            "" if row["goal_ms"] is None or row["met"] else "MISSED",
        )
        for row in result["cases"]
    ]  # fmt: skip
    ratios = [
        (
            name.replace("_", " "),
            f"{ratio['ratio']:.2f}x",
            f"[{ratio['low']:.2f}, {ratio['high']:.2f}]",
            "" if ratio["goal"] is None else f"goal {ratio['goal']:g}x",
        )
        for name, ratio in result["ratios"].items()
    ]
    lines = [table(("case", "median ms", "least", "most", "goal", ""), cases), "", table((), ratios)]
    lines.append(f"a bandit decides once per {result['decision_block']} iterations; {result['rounds']} rounds, in turn")
    if "sweep" in result:
        s = result["sweep"]
        lines.append(
            f"sweep: {s['configurations']} tables x {s['rl_steps']} RL steps of 4,096 responses in {s['wall_s']:.1f} s "
            f"({s['jobs']} process{'es' if s['jobs'] > 1 else ''}; goal {s['goal_s']:.1f})"
        )
    return "\n".join(lines)


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
