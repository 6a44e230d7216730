"""The adaptive drafter on real GRPO runs: what training it during the rollout is worth, and what that costs."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.harness import Progress, Table, Text, shown
from bench.idle import by_position, idle_times
from bench.models import folder_or_temporary, made_model
from tltlab.coordination.schedule import Kind
from tltlab.errors import ConfigError, RunError
from tltlab.files import read_json, write_json
from tltlab.runtime.drafter.offline.runs import (
    AcceptedDrafts,
    annotated_drafts,
    drafts_of,
    last_third,
)
from tltlab.runtime.engine.environment import hardware, versions
from tltlab.runtime.models.runs import (
    DRAFTER,
    Sizes,
    prompts_of,
    recipe_of,
    trained_beside,
    warmed_up,
)
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.rollout.collected import requests_of
from tltlab.runtime.run.grpo import GrpoRun
from tltlab.runtime.run.rows import StepReport
from tltlab.stats import Interval, interval_json, paired_interval, student_margin
from tltlab.traces.trace import Trace, read

RESULT = "drafter.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSizes(Sizes):
    """RL steps are `steps` frozen and adaptive, over `seeds` seeds, and `pairs` of coordination."""

    seeds: int = 1
    pairs: int = 16


FAST = BenchSizes(
    model="tiny",
    prompts_per_step=6,
    group_size=4,
    max_response_tokens=128,
    steps=4,
    warm_up_texts=48,
    warm_up_length=1.5,
    warm_up_updates=60,
    tokens_per_update=512,
    pairs=3,
    heldout=32,
)


LENGTH_GOAL = 1.15
RUN = 1_000_000
KINDS: dict[str, Kind] = {"frozen": "never", "adaptive": "always"}


def run_steps(recipe: Recipe, out: Path, steps: int, progress: Progress, *, kind: type[GrpoRun] = GrpoRun) -> Trace:
    """Run RL steps into the folder `out` and save. Returns the trace."""
    with kind(recipe, out) as run:
        for _ in range(steps):
            progress(str(run.step()))
        run.save()
    trace = read(out / "trace")
    if trace.steps is None:
        raise RunError(f"{out}: the run recorded no RL step")
    return trace


def bench_adaptive(
    model: Path, head: Path, out: Path, sizes: BenchSizes, *, seed: int, progress: Progress
) -> dict[str, Any]:
    """Two GRPO runs per seed from the same model, head, seed and prompts, drafting at the same fixed depth.

    In one the drafter stays unchanged, in the other idle workers train it in every rollout. `live` is what the engines
    kept, step by step; `paired` the adaptive runs' own responses as the first drafter would have drafted them beside
    the one in service. Ratios are of the last third of the RL steps, their intervals from resampled RL steps; `goal` is
    what is to be reached.
    """
    warmed_on = {prompt.prompt_id for prompt in prompts_of(model, "train", sizes.warm_up_texts)}
    runs = []
    for number in range(seed, seed + sizes.seeds):
        traces = {}
        for name, kind in KINDS.items():
            progress(f"{name} drafter, seed {number}, {sizes.steps} RL steps of {sizes.workers} workers")
            drafter = trained_beside(head, sizes, kind)
            recipe = recipe_of(model, sizes, seed=number, drafter=drafter, **sizes.drafting)
            traces[name] = run_steps(recipe, out / f"{name}-{number}", sizes.steps, progress)
        runs.append(compared(traces["frozen"], traces["adaptive"], warmed_on))
    return {
        "workers": sizes.workers,
        "steps": sizes.steps,
        "draft_depth": sizes.draft_depth,
        "goal": LENGTH_GOAL,
        **summary(runs, np.random.default_rng(seed)),
        "runs": [{"seed": seed + n, **_json(run)} for n, run in enumerate(runs)],
    }


Compared = dict[str, dict[str, list[AcceptedDrafts]]]


def compared(frozen: Trace, adaptive: Trace, seen: Collection[str]) -> Compared:
    """Drafts in the traces of two runs: `live` and `paired` drafts by RL step. RunError where nothing was drafted.

    `seen`: prompts of the warm-up, which `paired` leaves out.
    """
    live = {name: live_drafts(trace, DRAFTER) for name, trace in (("frozen", frozen), ("adaptive", adaptive))}
    for name, steps in live.items():
        if not steps:
            raise RunError(f"the learned drafter drafted nothing in the {name} run; its notes may say why")
    pairs = annotated_drafts(adaptive, seen)
    return {"live": live, "paired": {"initial": [first for first, _ in pairs], "in_service": [now for _, now in pairs]}}


def _json(run: Compared) -> dict[str, Any]:
    return {
        part: {
            name: [asdict(step) | {"accept_length": step.accept_length} for step in steps] for name, steps in of.items()
        }
        for part, of in run.items()
    }


def live_drafts(trace: Trace, drafter: str) -> list[AcceptedDrafts]:
    """Return the accepted drafts of one drafter, by RL step; RL steps without drafts of it are left out.

    Iterations in which some request had fewer drafted tokens than the others, near its end, are not counted: rows do
    not identify the request.
    """
    rows = trace.iterations
    if rows is None:
        return []
    rows = rows[(rows["drafter"] == drafter) & (rows["num_drafted"] > 0)]
    by_step: dict[int, list[int]] = {}
    depth = 0
    for step, deep, drafted, accepted in zip(
        rows["rl_step"], rows["draft_depth"], rows["num_drafted"], rows["accepted_per_request"], strict=True
    ):
        if drafted == deep * len(accepted):
            by_step.setdefault(int(step), []).extend(int(n) for n in accepted)
            depth = max(depth, int(deep))
    return [drafts_of(step, accepted, depth) for step, accepted in sorted(by_step.items())]


def summary(runs: Sequence[Compared], rng: np.random.Generator) -> dict[str, Any]:
    """The figures of all seeds together, from what each run's `compared` gave."""
    late: defaultdict[str, list[AcceptedDrafts]] = defaultdict(list)
    for n, run in enumerate(runs):
        last = last_third([step.rl_step for step in run["live"]["adaptive"]])
        for name, steps in (run["live"] | run["paired"]).items():
            # Those of run n are numbered from n `RUN` on.
            late[name] += [replace(step, rl_step=n * RUN + step.rl_step) for step in steps if step.rl_step in last]
    lengths = {name: [step.accept_length for step in late[name]] for name in KINDS}
    return {
        "accept_length_at_start": {name: runs[0]["live"][name][0].accept_length for name in KINDS},
        "accept_length": {name: float(np.mean(found)) if found else None for name, found in lengths.items()},
        "ratio": interval_json(length_ratio(late["adaptive"], late["frozen"], rng)),
        "paired_ratio": interval_json(length_ratio(late["in_service"], late["initial"], rng)),
        "by_position": {name: by_position(late[name]) for name in KINDS},
    }


def length_ratio(
    adaptive: Sequence[AcceptedDrafts], frozen: Sequence[AcceptedDrafts], rng: np.random.Generator
) -> Interval | None:
    """Mean accept length of one over that of the other in the RL steps that both have; None where there is none."""
    first, second = ({step.rl_step: step.accept_length for step in steps} for steps in (adaptive, frozen))
    shared = sorted(first.keys() & second.keys())
    if not shared:
        return None
    return paired_interval([first[s] for s in shared], [second[s] for s in shared], rng=rng)


ADAPTIVE: Text = (
    "{steps} GRPO steps, {workers} workers, draft depth {draft_depth}: tokens per draft, live",
    "at step 0: frozen {accept_length_at_start.frozen:.2f}, adaptive {accept_length_at_start.adaptive:.2f}; last "
    "third: frozen {accept_length.frozen:.2f}, adaptive {accept_length.adaptive:.2f}",
    "adaptive / frozen in the last third  {ratio:.3f} (goal {goal})",
    "the same responses, in service / initial drafter  {paired_ratio:.3f}",
)


SLOW_DOWN_GOAL = 0.05
FEWEST_WORKERS = 4
HELD = "held.json"
IDLE = ("rl_step", "rollout_s", "idle_s", "held_s", "train_s", "wait_s", "updates")


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
            rollout = self.recipe.rollout
            picked = deepcopy(self.data.order).take(rollout.prompts_per_step)
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

    `slow_down` is of all of it: capture, feed, coordinator, updates and waiting for trainers to yield. Whichever comes
    first finds caches cold, so they take turns and both orders weigh the same. The first pair warms up; pairs without
    an update, and those that did not come to the same tokens, are left out. ConfigError for fewer than four workers.
    """
    if sizes.workers < FEWEST_WORKERS:
        raise ConfigError(f"{sizes.workers} workers: coordination is measured with at least {FEWEST_WORKERS}")
    drafter = trained_beside(head, sizes)
    recipe = recipe_of(model, sizes, seed=seed, drafter=drafter, repeat_every=2, **sizes.drafting)
    progress(f"{sizes.pairs} rollouts of {sizes.workers} workers, each with and without training")
    folder = out / "run"
    trace = run_steps(recipe, folder, sizes.pairs, progress, kind=PairedRun)
    record = read_json(folder / HELD)
    without_s = {int(step): float(s) for step, s in record["held_s"].items() if int(step) not in record["other_work"]}
    return {
        "workers": sizes.workers,
        "pairs": sizes.pairs,
        "other_work": len(record["other_work"]),
        "goal": SLOW_DOWN_GOAL,
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
    assert trace.iterations is not None
    num_workers = trace.manifest.num_workers or int(trace.iterations["worker"].nunique())
    yields = [seconds for t in times for seconds in t.yield_s]
    waits = [t.wait_s for t in times]
    return {
        "slow_down": _as_share(interval_json(slow_down)),
        "met": None if slow_down is None or math.isnan(high := slow_down.high) else math.expm1(high) <= SLOW_DOWN_GOAL,
        "idle_share": idle / (num_workers * sum(t.rollout_s - t.wait_s for t in times)),
        "idle_held": sum(t.held_s for t in times) / idle if idle else None,
        "idle_trained": sum(t.train_s for t in times) / idle if idle else None,
        "yield_s": _spread(yields),
        "wait_s": _spread(waits),
        "wait_share": sum(waits) / sum(t.rollout_s for t in times),
        "updates_per_rollout": float(np.mean([t.updates for t in times])),
        "rows": [{name: getattr(t, name) for name in IDLE} | {"held_rollout_s": held_s.get(t.rl_step)} for t in times],
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
    return Interval(estimate=mean, low=mean - margin, high=mean + margin)


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


COORDINATION: Text = (
    "{workers} workers, rollouts with training, each also without",
    Table(
        "rows",
        "step: {rl_step}; rollout s: {rollout_s:.2f}; without s: {held_rollout_s:.2f}; idle s: {idle_s:.2f}; "
        "held s: {held_s:.2f}; trained s: {train_s:.2f}; updates: {updates}",
        left=0,
    ),
    "the rollout is slower by {slow_down:.3f} (goal: upper end at most {goal}); workers idle {idle_share:.0%} of it; "
    "{wait_share:.1%} is waiting after the last token",
    "of idle time {idle_held:.0%} held by trainers, {idle_trained:.0%} in updates",
    "from the order to stop to the free device: median {yield_s.median:1e3*.0f} ms, at most {yield_s.max:1e3*.0f} ms",
    "after the last token: median {wait_s.median:1e3*.0f} ms, at most {wait_s.max:1e3*.0f} ms",
)


PARTS: dict[str, tuple[Callable[..., dict[str, Any]], Text]] = {
    "adaptive": (bench_adaptive, ADAPTIVE),
    "coordination": (bench_coordination, COORDINATION),
}
"""Each part's work in a folder of its name, and its result for people."""


def bench_learned(
    parts: Collection[str],
    sizes: BenchSizes,
    *,
    model: Path | None = None,
    out: Path | None = None,
    seed: int = 0,
    progress: Progress,
) -> dict[str, Any]:
    """Do the named parts, in the order of `PARTS`; what each found, under its name.

    `model` is a folder of `tltlab make-model`, None for one that is trained first. Runs, model, head and, after each
    part, drafter.json stay in `out`, None for a folder that is removed. ConfigError where `out` holds such runs.
    """
    # Two threads on a busy machine stall for seconds.
    torch.set_num_threads(1)
    with folder_or_temporary(out, "tltlab-bench-") as folder:
        folder.mkdir(parents=True, exist_ok=True)
        if earlier := [name for name in parts if (folder / name).exists()]:
            raise ConfigError(
                f"{folder / earlier[0]} holds runs of an earlier benchmark; name another folder with --out"
            )
        model = model or made_model(folder / "model", progress, size=sizes.model)
        head = warmed_up(model, folder / "head", sizes, progress)
        result: dict[str, Any] = {"hardware": hardware(), "versions": versions(), "seconds": {}}
        for name, (work, _) in PARTS.items():
            if name in parts:
                progress(f"{name} begins")
                began = time.perf_counter()
                result[name] = work(model, head, folder / name, sizes, seed=seed, progress=progress)
                result["seconds"][name] = time.perf_counter() - began
                write_json(folder / RESULT, result)
    return result


def text(result: Mapping[str, Any]) -> str:
    """The parts' results for people, one under the other."""
    return "\n\n".join(
        f"{name} ({result['seconds'][name]:.0f} s)\n{shown(result[name], part_text)}"
        for name, (_, part_text) in PARTS.items()
        if name in result
    )
