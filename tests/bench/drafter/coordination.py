"""What training in idle time costs the rollout, and how much of the idle time it uses."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.train.figures import as_text, decimals
from tltlab.console import table
from tltlab.errors import ConfigError, RunError
from tltlab.files import read_json, write_json
from tltlab.runtime.data.order import prompt_batch
from tltlab.runtime.drafter.offline.runs import IdleTime, idle_times
from tltlab.runtime.models.runs import Progress, fixed_depth, recipe_of, trained_beside
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.rollout.collected import requests_of
from tltlab.runtime.run.grpo import GrpoRun
from tltlab.runtime.run.rows import StepReport
from tltlab.stats import LEVEL, Interval, interval_json, student_margin
from tltlab.traces.trace import Trace

from .runs import BenchSizes, run_steps

GOAL = 0.05
FEWEST_WORKERS = 4
HELD = "held.json"


class PairedRun(GrpoRun):
    """Every rollout runs twice from the same state, once without trainers, in turn after and before the other one.

    `held.json`: the seconds of those without, by RL step, and in `other_work` the steps in which it was other work.
    """

    def __init__(self, recipe: Recipe, out: Path) -> None:
        super().__init__(recipe, out)
        self._without_s: dict[int, float] = {}
        self._other_work: list[int] = []

    def step(self) -> StepReport:
        rl_step = self.rl_step
        if rl_step % 2:
            rollout, recipe = self.recipe.rollout, self.recipe
            picked = prompt_batch(len(self.data.train), rl_step, rollout.prompts_per_step, recipe.seed)
            groups = [
                requests_of(self.data.train[n], rl_step, rollout.group_size, rollout.max_response_tokens)
                for _, n in picked
            ]
            shares = self.pool.share([request for group in groups for request in group])
            start = time.perf_counter()
            parts = self.pool.rehearse(shares, rl_step, ahead=True)
            self._without_s[rl_step] = time.perf_counter() - start
            report = super().step()
            same = report.num_tokens == sum(len(r.token_ids) for part in parts for r in part.responses)
        else:
            report = super().step()
            self._without_s[rl_step], same = self.state.repeats[-1]["repeat_s"], self.state.repeats[-1]["same_tokens"]
        if not same:
            self._other_work.append(rl_step)
        held_s = {str(step): seconds for step, seconds in self._without_s.items()}
        write_json(self.out / HELD, {"held_s": held_s, "other_work": self._other_work})
        return report


def bench_coordination(
    model: Path, head: Path, out: Path, sizes: BenchSizes, *, seed: int, progress: Progress
) -> dict[str, Any]:
    """One GRPO run, each rollout done twice: with idle workers training, and with none of the drafter's machinery.

    The second kind captures no hidden states and knows no trainer, so `slow_down` is of all of it: capture, feed,
    coordinator, updates and waiting for trainers to yield. Whichever comes first finds caches cold, so they take turns
    and both orders weigh the same. The first pair warms up; pairs without an update, and those that did not come to the
    same tokens, are left out. ConfigError for fewer than four workers: of two only one is ever idle.
    """
    if sizes.workers < FEWEST_WORKERS:
        raise ConfigError(f"{sizes.workers} workers: coordination is measured with at least {FEWEST_WORKERS}")
    policy = fixed_depth(out / "policy.json", sizes.draft_depth)
    recipe = recipe_of(model, sizes, seed=seed, policy=policy, drafter=trained_beside(head, sizes), repeat_every=2)
    progress(f"{sizes.pairs} rollouts of {sizes.workers} workers, each with and without training")
    folder = out / "run"
    trace = run_steps(recipe, folder, sizes.pairs, progress, kind=PairedRun)
    record = read_json(folder / HELD)
    without_s = {int(step): float(s) for step, s in record["held_s"].items() if int(step) not in record["other_work"]}
    return {
        "workers": sizes.workers,
        "pairs": sizes.pairs,
        "other_work": len(record["other_work"]),
        "goal": GOAL,
        **figures(trace, without_s),
    }


def figures(trace: Trace, held_s: Mapping[int, float]) -> dict[str, Any]:
    """The figures of a run with training, and of its rollouts without, whose seconds are `held_s` by RL step.

    Those came first in odd RL steps. RunError where no rollout had an update.
    """
    times = [t for t in idle_times(trace) if t.rl_step != min(trace.rl_steps) and t.updates]
    if not times:
        raise RunError("no drafter was trained in any rollout but the first: its workers were never idle long enough")
    logs: tuple[list[float], list[float]] = ([], [])
    for t in times:
        if t.rl_step in held_s:
            logs[t.rl_step % 2].append(math.log(t.rollout_s / held_s[t.rl_step]))
    slow_down = mean_over_orders(logs) if any(logs) else None
    idle = sum(t.idle_s for t in times)
    yields = [seconds for t in times for seconds in t.yield_s]
    waits = [t.wait_s for t in times]
    return {
        "slow_down": _as_share(interval_json(slow_down)),
        "met": None if slow_down is None or math.isnan(slow_down.high) else math.expm1(slow_down.high) <= GOAL,
        "idle_share": idle / (_num_workers(trace) * sum(t.ran_s for t in times)),
        "idle_held": sum(t.held_s for t in times) / idle if idle else None,
        "idle_trained": sum(t.train_s for t in times) / idle if idle else None,
        "yield_s": _spread(yields),
        "wait_s": _spread(waits),
        "wait_share": sum(waits) / sum(t.rollout_s for t in times),
        "updates_per_rollout": float(np.mean([t.updates for t in times])),
        "rows": [_row(t, held_s.get(t.rl_step)) for t in times],
    }


def mean_over_orders(groups: Sequence[Sequence[float]]) -> Interval:
    """The mean of values measured in different orders, each order weighing the same, with Student's interval.

    What an order does to all its values so cancels, and does not widen the interval: its spread is that within orders.
    Orders without a value are left out; at least one value is needed.
    """
    orders = [np.asarray(group, np.float64) for group in groups if len(group)]
    mean = float(np.mean([group.mean() for group in orders]))
    freedom = sum(len(group) - 1 for group in orders)
    margin = math.nan
    if freedom > 0:
        spread = sum(float(((group - group.mean()) ** 2).sum()) for group in orders) / freedom
        error = math.sqrt(spread * sum(1 / len(group) for group in orders)) / len(orders)
        margin = student_margin(error, freedom)
    return Interval(estimate=mean, low=mean - margin, high=mean + margin, level=LEVEL, method="none")


def _num_workers(trace: Trace) -> int:
    assert trace.iterations is not None
    return trace.manifest.num_workers or int(trace.iterations["worker"].nunique())


def _as_share(log_ratio: dict[str, Any] | None) -> dict[str, Any] | None:
    """A slow-down as a share: the logarithm of 1.02 is 0.02."""
    if log_ratio is None:
        return None
    ends = ("estimate", "low", "high")
    return log_ratio | {end: None if log_ratio[end] is None else math.expm1(log_ratio[end]) for end in ends}


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"median": float(np.median(values)), "max": float(max(values)), "count": len(values)}


def _row(times: IdleTime, held_s: float | None) -> dict[str, Any]:
    names = ("idle_s", "held_s", "train_s", "wait_s", "updates")
    begins = {"rl_step": times.rl_step, "rollout_s": times.rollout_s, "held_rollout_s": held_s}
    return begins | {name: getattr(times, name) for name in names}


def text(result: Mapping[str, Any]) -> str:
    """The result for people."""
    lines = [f"{result['workers']} workers, {len(result['rows'])} rollouts with training, each also without"]
    rows = [
        (
            row["rl_step"], f"{row['rollout_s']:.2f}", decimals(row["held_rollout_s"]),
            *(f"{row[key]:.2f}" for key in ("idle_s", "held_s", "train_s")), row["updates"],
        )
        for row in result["rows"]
    ]  # fmt: skip
    header = ("step", "rollout s", "without s", "idle s", "held s", "trained s", "updates")
    lines.append(table(header, rows, left=0))
    lines.append(
        f"the rollout is slower by {as_text(result['slow_down'])} (goal: upper end at most {result['goal']}); workers "
        f"idle {result['idle_share']:.0%} of it; {result['wait_share']:.1%} is waiting after the last token"
    )
    if result["idle_held"] is not None:
        lines += [f"of idle time {result['idle_held']:.0%} held by trainers, {result['idle_trained']:.0%} in updates"]
    for name, label in (("yield_s", "from the order to stop to the free device"), ("wait_s", "after the last token")):
        if (spread := result[name]) is not None:
            lines.append(f"{label}: median {spread['median'] * 1e3:.0f} ms, at most {spread['max'] * 1e3:.0f} ms")
    return "\n".join(lines)
