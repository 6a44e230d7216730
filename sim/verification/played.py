"""Policies played on real engines beside the simulator: the same cells in both backends, and how far apart they are.

A session is a RUN with one RL step for each rollout (`tltlab.runtime.rollout.session`). Each rollout is a cell that is
simulated with its own recorded lengths, and with costs and acceptance fitted to the session's rollouts under the
*other* policies, so errors are those of step times and acceptance.
"""

from __future__ import annotations

import importlib.util
import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tltlab.acceptance.base import Acceptance
from tltlab.acceptance.load import granted
from tltlab.console import json_rows, made_by
from tltlab.errors import ConfigError, TltlabError
from tltlab.files import write_json
from tltlab.own import split
from tltlab.policies.policy import EXPLORE, Policy, load_policy
from tltlab.records import Json, frozen
from tltlab.sim.study.reduce import granted_text
from tltlab.sim.study.study import PLAYED, SIMULATED, Cell, Study
from tltlab.stats import kendall_tau, mean_of_few, non_overlapping_pairs
from tltlab.strategy import drafters_of
from tltlab.traces import metrics
from tltlab.traces.trace import read

from .errors import Errors
from .rollouts import Fit, RecordedRun
from .run_files import ActivePolicy, policies_in_force, repeats

DEFAULT = ("none", "ngram:1", "ngram:2", "ngram:8", "ngram:4@1", "ngram:4@4", "ngram:4@16", "table", "beg-mab")
WITH_SUFFIX = ("suffix:1", "suffix:8")
SAMPLES = 8
"""Sampled simulations per prediction: random acceptance moves a single one by some percent."""
FITTED = "fitted to the other policies' rollouts"


def listed_policies(text: str, fewest: int = 2) -> dict[str, Policy]:
    """Return policies by name from a list, each as `load_policy` takes it.

    "default" is a set that is spread out, with the suffix drafter where its library is installed. A policy file is
    named as without its folder, or as it was given where another policy has that name.

    >>> list(listed_policies("none,ngram:4@8"))
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
            wrong = "is there twice" if name in policies else "always runs beside the others, to calibrate on"
            raise ConfigError(f"--policies {text}: {name!r} {wrong}")
        policies[name] = load_policy(part)
    if len(policies) < fewest:
        raise ConfigError(f"--policies {text!r}: name at least {fewest} policies to put in order, or 'default'")
    return policies


@frozen
class Session(RecordedRun):
    """A recorded session, with the policy of each RL step.

    `known` has the acceptance of a policy's drafts where nothing is to be fitted. Policies that are `unlike` the others
    are not fitted to.
    """

    forces: Mapping[int, ActivePolicy]
    known: Mapping[str, Acceptance] = field(default_factory=dict)
    unlike: Container[str] = ()

    @cached_property
    def rounds(self) -> dict[int, int]:
        """The round of each RL step."""
        done, rounds = Counter[str](), {}
        for rl_step, force in self.forces.items():
            rounds[rl_step] = done[force.name]
            done[force.name] += 1
        return rounds

    def played(self) -> pd.DataFrame:
        """Return each rollout as a row of a study's table without details, whose seed is the round."""
        rows = []
        seconds = metrics.rollout_s(self.trace)
        for rl_step, force in self.forces.items():
            drafters = drafters_of(force.policy.strategies)
            known = self.known.get(force.name)
            row = {
                "policy": force.name, "backend": PLAYED, "rl_step": rl_step, "seed": self.rounds[rl_step],
                "makespan_s": seconds[rl_step] or math.nan, "drafters": drafters,
                "acceptance": granted(known, None if known else FITTED, drafters),
            }  # fmt: skip
            rows.append(row)
        return pd.DataFrame(rows)

    def predictions(self, name: str) -> Iterator[Cell]:
        """Yield the cells that predict a policy's rollouts.

        The axis `speed` is how much slower than fitted the other policies' iterations were in the round. Raises
        ConfigError where the others lack what the fit needs.
        """
        # Drafts that a budget cut short hardly inform about whole ones.
        others = [
            rl_step
            for rl_step, force in self.forces.items()
            if force.name != name and force.name not in self.unlike and force.policy.budget is None
        ]
        costs = self.costs(others)
        steps = {rl_step: force for rl_step, force in self.forces.items() if force.name == name}
        acceptance = self.known.get(name) or self._acceptance(others, next(iter(steps.values())))
        whole = costs.model_copy(update={"outside_s": float(self.overhead_s.loc[others].median())})
        fit = Fit(costs={"": whole}, acceptance=acceptance)
        for rl_step, force in steps.items():
            beside = self.timed(fit.costs, [s for s in others if self.rounds[s] == self.rounds[rl_step]])
            speed = float(beside["duration"].sum() / beside["predicted"].sum()) if len(beside) else math.nan
            yield from self.cells(force, self.scenario([rl_step], fit), speed=speed)

    def _acceptance(self, rl_steps: Collection[int], force: ActivePolicy) -> Acceptance | None:
        fitted = self.accepted(self.of(rl_steps))
        known = set() if fitted is None else set(fitted.bands[0].drafters_by_depth)
        if missing := sorted({*drafters_of(force.policy.strategies)} - known):
            raise ConfigError(
                f"policy {force.name} drafts with {' and '.join(missing)}, which the other rollouts do not use: "
                "more --repeats"
            )
        return fitted


@dataclass(frozen=True, kw_only=True)
class Agreement(Errors):
    """A row per policy in `rows` and per rollout in `rollouts`: played, and simulated.

    Columns of `rows`: `policy`, its `drafters` and in words the `acceptance` of each; `measured_s`, the mean over the
    rounds, with its interval `low`, `high` (nan with one round); `predicted_s` and `error`, predicted / measured - 1;
    `predicted_at_speed_s` and `error_at_speed`, the same times how much slower than fitted the other policies'
    iterations were in the same round. `why_not` has the reason by policy where there is no prediction.

    Tau is Kendall's over the `num_pairs` pairs of policies whose measured intervals do not overlap.
    """

    columns = (
        "policy: {policy}; measured s: {measured_s:.2f}; 95 %: [{low:.2f}, {high:.2f}]; "
        "predicted s: {predicted_s:.2f}; error: {error:+.1%}; at the round's speed: {error_at_speed:+.1%}"
    )
    sentences = ("order of the {num_pairs} pairs whose intervals do not overlap: Kendall tau {kendall_tau:.2f}",)
    advice = (
        "more --repeats, or policies further apart, show more of the order",
        "TLTLAB_POLICY=NAME python train.py, with the fastest of these",
    )

    rollouts: pd.DataFrame
    num_pairs: int
    kendall_tau: float | None
    why_not: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, table: pd.DataFrame, **known: Any) -> Agreement:
        """Reduce a study's rows of both backends; those simulated are averaged over the seeds of a rollout."""
        played = table[table["backend"] == PLAYED].sort_values("rl_step", ignore_index=True)
        simulated = (
            table[table["backend"] == SIMULATED].groupby("rl_step").agg({"makespan_s": "mean", "speed": "first"})
        )
        rollouts = played[["rl_step", "seed", "policy", "makespan_s"]].set_axis(
            ["rl_step", "round", "policy", "measured_s"], axis=1
        )
        rollouts["predicted_s"] = rollouts["rl_step"].map(simulated["makespan_s"])
        rollouts["speed"] = rollouts["rl_step"].map(simulated["speed"])
        rollouts["error"] = rollouts["predicted_s"] / rollouts["measured_s"] - 1
        rows = []
        for name, of_policy in rollouts.groupby("policy", sort=False):
            first = played.loc[of_policy.index[0]]
            mean = mean_of_few(of_policy["measured_s"].to_numpy(np.float64))
            means = {"measured_s": mean.estimate, "low": mean.low, "high": mean.high}
            row = {"policy": name, "drafters": first["drafters"], "acceptance": first["acceptance"], **means}
            for at, factor in (("", 1.0), ("_at_speed", of_policy["speed"])):
                row[f"predicted{at}_s"] = float((of_policy["predicted_s"] * factor).mean())
                row[f"error{at}"] = row[f"predicted{at}_s"] / row["measured_s"] - 1
            rows.append(row)
        policies = pd.DataFrame(rows).sort_values("measured_s", ignore_index=True)
        apart = non_overlapping_pairs(list(zip(policies["low"], policies["high"], strict=True)))
        measured, predicted = policies[["measured_s", "predicted_s"]].to_numpy(np.float64).T
        tau = kendall_tau(measured, predicted, apart)
        return cls(rows=policies, rollouts=rollouts, num_pairs=len(apart), kendall_tau=tau, **known)

    @property
    def num_rounds(self) -> int:
        return int(self.rollouts["round"].nunique())

    def json(self) -> Json:
        """The keys of `tltlab verify RUN --policies ... --json`."""
        at_speed = self.rows["error_at_speed"].abs()
        names = ("median_error", "worst_error", "repeat_spread", "repeat_bias", "num_pairs", "kendall_tau")
        return self.judged({
            "policies": json_rows(self.rows),
            **{name: getattr(self, name) for name in names},
            "median_error_at_speed": float(at_speed.median()),
            "worst_error_at_speed": float(at_speed.max()),
            "median_rollout_error": float(self.rollouts["error"].abs().median()),
            "num_rounds": self.num_rounds,
            "rounds": json_rows(self.rollouts),
            **made_by(),
        })  # fmt: skip

    def text(self, lists: Mapping[str, Sequence[str]] = {}) -> str:
        """The same for people."""
        granted = filter(None, [granted_text(self.rows.to_dict("records"), "policy")])
        return super().text({"assumed": [*granted], **lists})


def verify_policies(
    policies: Mapping[str, Policy],
    roll_out: Callable[[Path], None],
    *,
    samples: int = SAMPLES,
    seed: int = 0,
    out: Path | None = None,
    jobs: int | None = 1,
) -> Agreement:
    """Predict every rollout of a session that `roll_out` records into a folder with these policies, and compare.

    The folder is `out`, which must not exist yet and keeps the session with its `summary.json`, else a temporary one.
    """
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already: choose another --out")
    modules = {part.module for policy in policies.values() for part in policy.own_parts}
    with nullcontext(out) if out is not None else tempfile.TemporaryDirectory(prefix="tltlab-verify-") as folder:
        roll_out(Path(folder))
        found = judge(Path(folder), samples=samples, seed=seed, allow_code=modules, jobs=jobs)
        if found.why_not:
            raise ConfigError(next(iter(found.why_not.values())))
        if out is not None:
            write_json(out / "summary.json", found.json())
    return found


def judge(
    path: Path,
    *,
    known: Mapping[str, Acceptance] = {},
    unlike: Container[str] = (),
    samples: int = SAMPLES,
    seed: int = 0,
    allow_code: Collection[str] = (),
    jobs: int | None = 1,
) -> Agreement:
    """Predict the rollouts of the session in a folder, as `Session` has them, and compare.

    Classes that its policies name are imported from the modules in `allow_code` alone. `jobs` processes (None: one per
    core) share the rollouts.
    """
    trace = read(path)
    session = Session(
        trace=trace, forces=policies_in_force(trace, allow_code), known=known, unlike=unlike, samples=samples, seed=seed
    )  # fmt: skip
    played = session.played()
    played = played[played["policy"] != EXPLORE]
    names, why, cells = list(dict.fromkeys(played["policy"])), dict[str, str](), list[Cell]()
    for name in names:
        try:
            cells += session.predictions(name)
        except ConfigError as error:
            why[name] = str(error)
    simulated = pd.DataFrame(columns=["backend", "rl_step", "makespan_s", "speed"])
    try:
        if cells:
            simulated = Study(cells=cells, details=False, jobs=jobs).table()
    except TltlabError as error:
        why = dict.fromkeys(names, str(error)) | why
    failed = simulated.attrs.get("failed", {})
    why |= {cell.name: failed[cell.label] for cell in cells if cell.label in failed}
    table = pd.concat([played, simulated], ignore_index=True)
    return Agreement.of(table, why_not=why, **repeats(trace))
