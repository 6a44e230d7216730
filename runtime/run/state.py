"""State of a run between two RL steps, besides weights and learned state: the JSON part of its checkpoints.

Also its events, `events.jsonl`.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from dataclasses import fields as fields_of
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tltlab.errors import ConfigError
from tltlab.files import read_json, write_json
from tltlab.own import code_allowed, named_in
from tltlab.policies.policy import Policy, parse_policy
from tltlab.records import Fields, Json
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.recipe.user_code import code_of
from tltlab.stats import finite

from .rows import StepReport

STATE = "state.json"
FORMAT, VERSION = "tltlab-checkpoint", 1


@dataclass(slots=True, kw_only=True)
class RunState:
    """The next RL step, the policies with their first RL step, reports, and the first held-out reward.

    `repeats` are the repeated rollouts. `policies` and `repeats` have the form of the run's `policies.json` and
    `repeats.json`.
    """

    rl_step: int = 0
    policy_version: int = 0
    policies: list[Json] = field(default_factory=list)
    repeats: list[Json] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)
    reward_first: float | None = None

    @property
    def policy_name(self) -> str:
        """Name of the active policy."""
        return str(self.policies[-1]["name"])

    def in_force(self, policy: Policy, name: str | None = None) -> None:
        """Note that engines choose by `policy` from this RL step on."""
        self.policies = [earlier for earlier in self.policies if earlier["rl_step"] != self.rl_step]
        entry = {"name": name or policy.name or policy.selector.kind, "policy": policy.model_dump(mode="json")}
        self.policies.append({"rl_step": self.rl_step, **entry})

    def copy(self) -> RunState:
        """Return an independent copy."""
        return replace(self, policies=[*self.policies], repeats=[*self.repeats], reports=[*self.reports])


def write_state(
    folder: Path,
    state: RunState,
    parts: Fields,
    workers: Sequence[Fields],
    recipe: Recipe,
) -> None:
    """Write `state.json`, and `worker-N.json` for the learned state of each engine's policy and drafters.

    `parts` are the states of the run's other parts by name, as JSON types.
    """
    fields: Json = {item.name: getattr(state, item.name) for item in fields_of(state)}
    fields["reports"] = [
        _with_floats(asdict(report), lambda v: finite(v) if isinstance(v, float) else v) for report in state.reports
    ]
    made_by = {"format": FORMAT, "version": VERSION, "model": recipe.model, "seed": recipe.seed}
    write_json(folder / STATE, made_by | {"num_workers": recipe.rollout.num_workers} | fields | dict(parts))
    for number, worker in enumerate(workers):
        write_json(folder / f"worker-{number}.json", worker)


def read_state(folder: Path, recipe: Recipe) -> tuple[RunState, Json]:
    """Read `state.json`: the state and the other parts.

    ConfigError where it is of another program or of a run that the recipe cannot continue, and where the policy in
    force cannot be read.
    """
    parts = read_json(folder / STATE)
    if not isinstance(parts, dict) or (parts.get("format"), parts.get("version")) != (FORMAT, VERSION):
        raise ConfigError(f"{folder / STATE} is no state of a run that this version of tltlab can continue")
    try:
        return _state_of(parts, folder, recipe)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ConfigError(f"{folder / STATE} is no whole state of a run: {type(error).__name__}: {error}") from error


def _state_of(parts: Json, folder: Path, recipe: Recipe) -> tuple[RunState, Json]:
    # The model's folder may have moved.
    parts["model"], model = (Path(name).name for name in (parts["model"], recipe.model))
    for name, own in (("model", model), ("seed", recipe.seed), ("num_workers", recipe.rollout.num_workers)):
        if parts[name] != own:
            raise ConfigError(f"{folder} is of a run with {name} {parts[name]!r}, and the recipe has {own!r}")
    fields = {item.name: parts.pop(item.name) for item in fields_of(RunState)}
    path = folder / STATE
    if fields["policies"]:
        latest = fields["policies"][-1]
        latest["policy"] = parse_policy(latest["policy"], path, "policies").model_dump(mode="json")
        # A policy of a class that the recipe neither names nor allows is refused.
        with named_in(path), code_allowed(code_of(recipe)):
            for part in Policy.model_validate(latest["policy"]).own_parts:
                part.refuse_unasked(path)
    if "recipe_policy" in parts:
        parts["recipe_policy"] = parse_policy(parts["recipe_policy"], path, "recipe_policy").model_dump(mode="json")
    fields["reports"] = [
        StepReport(**_with_floats(report, lambda v: math.nan if v is None else v)) for report in fields["reports"]
    ]
    return RunState(**fields), parts


def _with_floats(report: Fields, change: Callable[[Any], Any]) -> Json:
    return {name: _with_floats(v, change) if isinstance(v, Mapping) else change(v) for name, v in report.items()}


class RunEvents:
    """Events of a run besides its steps: a line of JSON in `path` for each, written at once.

    Every line has `time` (ISO 8601, UTC), `rl_step` (the step under way) and `event`, a sentence; further fields depend
    on the event. A full disk costs the line, not the run. Safe to use from several threads. `watch` receives each note
    at once.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self.rl_step = 0
        self._lock = threading.Lock()
        self._notes: list[str] = []
        self.watch: Callable[[str], None] = lambda sentence: None

    def note(self, sentence: str, **fields: Any) -> None:
        """Record an event that users of the run should see."""
        with self._lock:
            self._notes.append(sentence)
        self.record(sentence, **fields)
        self.watch(sentence)

    def record(self, sentence: str, **fields: Any) -> None:
        """Record an event in the file alone."""
        row = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "rl_step": self.rl_step, "event": sentence}
        line = (json.dumps(row | fields) + "\n").encode()
        with self._lock, suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # One write in append mode keeps lines separate.
            with self.path.open("ab", buffering=0) as file:
                end = file.tell()
                if file.write(line) < len(line):
                    file.truncate(end)

    def take(self) -> list[str]:
        """Return and clear the notes."""
        with self._lock:
            notes, self._notes = self._notes, []
        return notes
