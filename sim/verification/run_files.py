"""Files of a run other than its trace: the active policy of each RL step, and the time of a repeated rollout."""

from collections.abc import Collection
from typing import TypeVar

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat

from tltlab.config import faults_in
from tltlab.costs.base import CostModel
from tltlab.costs.load import load_costs
from tltlab.errors import ConfigError
from tltlab.files import read_json
from tltlab.own import OwnPart, code_allowed, named_in
from tltlab.planning.planners import load_planner
from tltlab.planning.rollout import OwnPlanner, RolloutPlanner, Shape
from tltlab.policies.policy import SHIPPED, Policy, policy_of_drafts
from tltlab.records import Json, frozen
from tltlab.traces.trace import Trace, run_folder

_File = TypeVar("_File", bound="_RunFile")


@frozen
class ActivePolicy:
    """A policy, its name, and the RL step at which it was set afresh; `seed` is the run's."""

    name: str
    policy: Policy
    since: int
    seed: int

    def entropy(self, workers: int) -> list[list[int]]:
        """Return the seeds of each worker's selector."""
        return [[self.seed, worker, self.since] for worker in range(workers)]


def policies_in_force(trace: Trace, allow_code: Collection[str] = ()) -> dict[int, ActivePolicy]:
    """The policy of each RL step: from the run's policies.json, else shipped policies by the name in `steps`;
    none where neither names a policy and nothing was speculated.

    Where only names are known, a policy counts as set when its name first came up in a row. Raises ConfigError where
    that is a class of a module that `allow_code` does not name: a run must not choose what code is imported here.
    """
    file = _beside(trace, "policies.json", _Policies, allow_code)
    set_at = _by_name(trace) if file is None else {each.rl_step: (each.name, each.policy) for each in file.policies}
    seed = (trace.manifest.seed or 0) if file is None else file.seed
    in_force = {}
    for step in trace.rl_steps:
        since = max((s for s in set_at if s <= step), default=None)
        if since is None:
            raise ConfigError(f"policies.json: no policy was active at RL step {step}")
        name, policy = set_at[since]
        for part in policy.own_parts:
            _refuse_unasked(part, f"RL step {step} was chosen for", allow_code)
        in_force[step] = ActivePolicy(name=name, policy=policy, since=since, seed=seed)
    return in_force


def _refuse_unasked(part: OwnPart, what: str, allow_code: Collection[str]) -> None:
    if part.module not in allow_code:
        raise ConfigError(
            f"{what} by {part.path}, a class of the run's own, which is not imported unasked: where you trust it, "
            f"tltlab verify --allow-code {part.module}"
        )


def planner_of(trace: Trace, allow_code: Collection[str] = ()) -> tuple[RolloutPlanner, dict[Shape, CostModel]]:
    """The run's planner, and by shape the costs that it knew, those of the first engines first.

    ConfigError where policies.json has none, and for a class of a module that `allow_code` does not name.
    """
    file = _beside(trace, "policies.json", _Policies, allow_code)
    if file is None or file.planner is None:
        raise ConfigError(f"{trace.path or 'the trace'}: a planner moved its requests, and policies.json names none")
    source = file.planner.source
    if (own := OwnPlanner.parse(source)) is not None:
        _refuse_unasked(own, "requests were moved", allow_code)
    planner = load_planner(source)
    assert planner is not None, "a run without a planner has no plans"
    return planner, {Shape.of(shape): load_costs(costs) for shape, costs in file.planner.costs.items()}


def _by_name(trace: Trace) -> dict[int, tuple[str, Policy]]:
    """Return shipped policies by the RL step at which their name first came up in a row."""
    assert trace.steps is not None
    plain = trace.iterations is not None and not (trace.iterations["draft_depth"] > 0).any()
    names = trace.steps.set_index("rl_step")["policy"]
    set_at: dict[int, tuple[str, Policy]] = {}
    last = None
    for step in trace.rl_steps:
        # An engine that only recorded names no policy.
        name = names.get(step)
        if pd.isna(name):
            name = "none" if plain else None
        policy = SHIPPED.get(str(name)) or policy_of_drafts(str(name))
        if policy is None:
            raise ConfigError(
                f"{trace.path or 'the trace'}: RL step {step} ran policy {name!r}, which no policies.json has and "
                "which is not shipped"
            )
        if name != last:
            set_at[step] = str(name), policy
        last = name
    return set_at


def repeats(trace: Trace) -> dict[str, float]:
    """The `repeat_bias` of `Errors`, the slowdown of repeated rollouts, and their `repeat_spread`; {} without any."""
    file = _beside(trace, "repeats.json", _Repeats)
    twice = [] if file is None else [r for r in file.repeats if r.same_tokens]
    if not twice:
        return {}
    ratios = np.array([r.repeat_s / r.rollout_s for r in twice])
    typical = float(np.median(ratios))
    return {"repeat_bias": typical - 1, "repeat_spread": float(np.median(np.abs(ratios / typical - 1)))}


class _RunFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _SetPolicy(_RunFile):
    rl_step: int
    name: str
    policy: Policy


class _Planner(_RunFile):
    source: str
    costs: dict[str, Json]


class _Policies(_RunFile):
    seed: NonNegativeInt
    planner: _Planner | None = None
    policies: tuple[_SetPolicy, ...]


class _Repeat(_RunFile):
    rl_step: int
    rollout_s: PositiveFloat
    repeat_s: PositiveFloat
    same_tokens: bool


class _Repeats(_RunFile):
    repeats: tuple[_Repeat, ...]


def _beside(trace: Trace, name: str, kind: type[_File], allow_code: Collection[str] = ()) -> _File | None:
    """A file of the RUN that a trace belongs to, or of the trace's own folder; None where there is none."""
    if trace.path is None:
        return None
    path = run_folder(trace.path) / name
    if not path.is_file():
        return None
    with named_in(path), code_allowed(allow_code), faults_in(f"{path} (a run writes this file, take it away)"):
        return kind.model_validate(read_json(path), context={"folder": path.parent})
