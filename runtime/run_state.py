"""What a run is between two RL steps, besides weights and what is learned: the JSON part of its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tltlab.cli import read_json, write_json
from tltlab.errors import ConfigError

from .recipe import Recipe
from .step_rows import StepReport

STATE = "state.json"
FORMAT, VERSION = "tltlab-checkpoint", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The next RL step, the policies in force now, so far and by the recipe, what was reported, and the data's order.

    `rollouts` are the responses that are still to be finished or used again, `drafter` is what its training knows.
    """

    rl_step: int
    policy_version: int
    policy: Mapping[str, Any]
    policies: Sequence[Mapping[str, Any]]
    recipe_policy: Mapping[str, Any]
    repeats: Sequence[Mapping[str, Any]]
    reports: Sequence[StepReport]
    reward_first: float | None
    order: Mapping[str, Any]
    rollouts: Mapping[str, Any]
    drafter: Mapping[str, Any]


def write_state(folder: Path, state: RunState, workers: Sequence[Mapping[str, Any]], recipe: Recipe) -> None:
    """Write `state.json`, and `worker-N.json` for what each engine's policy and drafters have learned."""
    fields = {name: getattr(state, name) for name in RunState.__dataclass_fields__}
    fields["reports"] = [_plain(asdict(report)) for report in state.reports]
    made_by = {"format": FORMAT, "version": VERSION, "model": recipe.model, "seed": recipe.seed}
    write_json(folder / STATE, made_by | {"num_workers": len(workers)} | fields)
    for number, worker in enumerate(workers):
        write_json(folder / f"worker-{number}.json", worker)


def read_state(folder: Path, recipe: Recipe) -> RunState:
    """Read `state.json`; ConfigError where it is of another program or of a run that the recipe does not go on with."""
    found = read_json(folder / STATE)
    if not isinstance(found, dict) or (found.get("format"), found.get("version")) != (FORMAT, VERSION):
        raise ConfigError(f"{folder / STATE} is no state of a run that this version of tltlab can go on with")
    for name, ours in (("model", recipe.model), ("seed", recipe.seed), ("num_workers", recipe.rollout.num_workers)):
        if found[name] != ours:
            raise ConfigError(f"{folder} is of a run with {name} {found[name]!r}, and the recipe has {ours!r}")
    fields = {name: found[name] for name in RunState.__dataclass_fields__}
    fields["reports"] = [StepReport(**_known(report)) for report in found["reports"]]
    return RunState(**fields)


def read_workers(folder: Path, num_workers: int) -> list[dict[str, Any]]:
    """What each engine's policy and drafters had learned."""
    return [read_json(folder / f"worker-{number}.json") for number in range(num_workers)]


def json_number(value: Any) -> Any:
    """JSON knows no NaN and nothing infinite: such a number is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(report: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(v) if isinstance(v, Mapping) else json_number(v) for name, v in report.items()}


def _known(report: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _known(value) if isinstance(value, Mapping) else math.nan if value is None else value
        for name, value in report.items()
    }
