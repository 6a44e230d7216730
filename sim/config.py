"""Settings of a simulation, and their defaults from a trace."""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
import pyarrow.compute as pc

from tltlab.acceptance.base import UNKNOWN, Acceptance, AcceptanceModel
from tltlab.acceptance.load import DEFAULT, acceptance_text, load_acceptance
from tltlab.acceptance.measured import fit_acceptance
from tltlab.acceptance.per_drafter import PerDrafter
from tltlab.acceptance.replay import TraceAcceptance
from tltlab.calibration.api import parse_rl_steps
from tltlab.calibration.logged import LoggedDrafting
from tltlab.config import faults_in
from tltlab.coordination.progress import SpotTraining
from tltlab.costs.base import CostModel
from tltlab.costs.deployment import Deployment
from tltlab.costs.load import load_costs
from tltlab.costs.scaled import scheduled
from tltlab.errors import ConfigError, did_you_mean
from tltlab.files import read_json
from tltlab.hardware import ModelShape
from tltlab.options import check, option
from tltlab.own import is_own, split
from tltlab.planning.composition import Admission, SharedBuffer, Workload
from tltlab.planning.placement import Placement
from tltlab.planning.planners import PLANNERS
from tltlab.planning.rollout import RolloutPlanner, Shape
from tltlab.records import Fields, Json
from tltlab.sim.placement import PLACEMENTS
from tltlab.sim.workload import Prefix
from tltlab.traces.trace import Trace, file_of_run

Mode = Literal["fluid", "sampled"]
Scheduling = Literal["synchronous", "asynchronous"]
Source = Json | str | Path
"""A model as users name it: its values, a shipped name or a file."""


@dataclass(frozen=True, kw_only=True)
class SimulationConfig:
    """Settings of a simulation, apart from trace and policy.

    Where left open: costs from the trace folder's `costs.json`, else the preset `cpu-small`; acceptance from the
    trace's acceptance.parquet, else the folder's `acceptance.json`, else what the recorded iterations accepted
    ("trace": without the file), else the accept length of a training log; workers from the manifest; placement
    contiguous, or what a system or a tuning takes; all RL steps. `rl_steps` may be
    text as on the command line.

    `gpus` such as 8xH100 and a `model` (a name or `config.json`), with an `engine` and `tp` GPUs per worker where
    those are not to be found, bring costs and workers (`Deployment.of`); acceptance that is not known is then
    `tltlab.acceptance.load.DEFAULTS`. `acceptance` is one model, or one for each drafter (`load_acceptance`).
    `scheduling` other than that of the costs takes what waiting for the host takes from their iterations, or adds it.

    In `fluid` mode every request gains the expected tokens in each iteration, in `sampled` mode they are drawn from the
    seed, and so is the costs' noise; acceptance "trace" is the same in both. A learning policy is asked once per
    `decision_block` iterations and receives their mean. `max_response_tokens` cuts longer responses.

    With `prefix_caching` samples of a group on one worker share their prompt: it is prefilled, and held, once. A
    preempted request continues from what is left of it in the cache.

    `workload` is what a system changes about the responses, `online_updates` how often its drafter is trained beside
    each rollout, and `admission` what its RL steps begin and leave (`tltlab.planning.composition`).

    `spot` (settings, a file, or "tlt") trains the drafter on idle workers: the next RL step finds it with these
    updates and age 0, which counts where the acceptance is of kind "fresh"; without it the drafter ages.

    In a response of several turns, the KV cache of a turn is kept for the next one while there is room, or computed
    again (`prefix`). At most `max_tools` tools run at once; each takes `tool_s` where the trace has no time.

    Raises ConfigError for an unknown mode, and a decision block or seed out of range.

    >>> SimulationConfig(acceptance="geometric:0.7", workers=8, mode="sampled").seed
    0
    """

    workers: int | None = option("Rollout workers. [default: the manifest's]", min=1)
    costs: CostModel | type[CostModel] | Source | None = option(
        "Cost file, preset or module:Class. [default: the trace's costs.json, else cpu-small]"
    )
    gpus: str | None = option("Such as 8xH100, in place of costs and workers. [with --model: 8xH100]")
    model: str | ModelShape | None = option(
        "On --gpus: Qwen/Qwen2.5-7B or another name, or a config.json. [default: Qwen2.5-7B]"
    )
    engine: str | None = option("On --gpus: the engine's profile. [default: vllm; the others are in the range]")
    tp: int | None = option("On --gpus: GPUs of a worker. [default: the fewest that hold it]", min=1)
    scheduling: Scheduling | None = option(
        "Of iterations: synchronous (engines wait for the host) or asynchronous. [default: as in the costs]",
        choices=get_args(Scheduling),
    )
    acceptance: Acceptance | type[AcceptanceModel] | Source | None = option(
        "By drafter, learned=geometric:0.7,ngram=geometric:0.42, or all=MODEL; a MODEL is geometric:ALPHA, "
        "constant:A, 0.8/0.6/0.5 by token, lengths:1.8/2.4 by depth, a fitted file, module:Class; MODEL@2k falls "
        "beyond the 2,048 tokens at which the drafter was trained (@short, @window, @long, @mtp); also trace, "
        "default. [default: what the trace has, else with --gpus the default of each drafter]"
    )
    placement: str | Placement | type[Placement] | None = option(
        f"One of {', '.join(PLACEMENTS)}, or module:Class. [default: contiguous, or the system's]"
    )
    planner: str | RolloutPlanner | type[RolloutPlanner] | None = option(
        f"Who moves requests between engines: {', '.join(PLANNERS)}, or module:Class. [default: stay, all do where "
        "they were placed]"
    )
    shapes: str | Mapping[Shape, CostModel] | None = option(
        "Engines x GPUs of each, onto which a planner may gather: 2x4, or 1x2=COSTS with a cost file. "
        "[default: with --gpus all wider ones]"
    )
    gather_s: float = option(
        "Seconds from the end of engines to the start of those of another shape, prefill apart.", 0.3, min=0
    )
    mode: str = option("fluid (expected tokens) or sampled.", "fluid", choices=get_args(Mode))
    seed: int = option("Seed of policies, of searches and of what is sampled.", 0, min=0)
    rl_steps: Sequence[int] | str | None = option("a:b, RL steps a to b - 1; or one; or all. [default: all]")
    max_response_tokens: int | None = option("Cut longer responses, as a lower cap would.", min=1)
    prefix_caching: bool = option(
        "A group's prompt is prefilled, and held, once on each worker, and a preempted request goes on from what "
        "is left of it in the KV cache: engines' own default.",
        False,
    )
    prefix: str = option(
        "Between turns a prefix is kept (cached while there is room) or recomputed.", "kept", choices=get_args(Prefix)
    )
    max_tools: int | None = option("Tools that may run at once; other calls wait. [default: any]", min=1)
    tool_s: float | None = option(
        "Seconds of a tool between turns where the trace does not know. [default: refuse]",
        names=("--tool-seconds",),
        min=0,
    )
    decision_block: int = option("Iterations per decision of a learning policy; more is faster.", 1, min=1)
    spot: SpotTraining | Source | None = option(
        "Train the drafter on idle workers: a file of rates and costs, or tlt.", names=("--spot-training",)
    )
    workload: Workload | None = None
    online_updates: int = 0
    admission: Admission | SharedBuffer | None = None

    def __post_init__(self) -> None:
        check(self)
        asked = [f"--{name} {value}" for name, value in self._machine.items() if value is not None]
        for name in ("costs", "workers"):
            if asked and getattr(self, name) is not None:
                raise ConfigError(f"{' '.join(asked)} brings costs and workers: leave out --{name}")

    @property
    def _machine(self) -> Json:
        return {name: getattr(self, name) for name in ("gpus", "model", "engine", "tp")}

    @property
    def is_on_machine(self) -> bool:
        """True if GPUs or a model bring costs and workers."""
        return any(value is not None for value in self._machine.values())

    def on_trace(self, trace: Trace) -> tuple[Self, Deployment | None]:
        """Replace RL steps in words by their numbers, and GPUs and model by their costs, workers and acceptance.

        The deployment is None where neither GPUs nor a model are set.
        """
        if isinstance(self.rl_steps, str):
            return replace(self, rl_steps=self.steps_of(trace)).on_trace(trace)
        if not self.is_on_machine:
            return self, None
        cap = math.inf if self.max_response_tokens is None else self.max_response_tokens
        responses = np.minimum(trace.outcomes["response_tokens"].to_numpy(), cap)
        tokens = int((trace.workload["prompt_tokens"].to_numpy() + responses).max(initial=0))
        machine = Deployment.of(self.gpus, self.model, engine=self.engine, tp=self.tp, tokens=tokens)
        known = self.acceptance is not None or self.find_acceptance(trace)[0] is not None
        resolved = replace(
            self, costs=machine.costs, workers=machine.workers, shapes=self._shapes_on(machine),
            acceptance=self.acceptance if known else DEFAULT,
            gpus=None, model=None, engine=None, tp=None,
        )  # fmt: skip
        return resolved, machine

    def _shapes_on(self, machine: Deployment) -> Mapping[Shape, CostModel] | str | None:
        """Costs of the shapes that the settings name, of all of wider engines where they name none."""
        if isinstance(self.shapes, Mapping) or "=" in (self.shapes or ""):
            return self.shapes
        active = Shape(engines=machine.workers, gpus=machine.costs.tp)
        if self.shapes is not None:
            named = [Shape.of(part) for part in split(self.shapes)]
            for shape in named:
                active.check_same_gpus(shape)
            return {shape: machine.at(shape.gpus) for shape in named}
        wider = dict[Shape, CostModel]()
        for engines in (n for n in range(active.engines - 1, 0, -1) if active.engines % n == 0):
            shape = Shape(engines=engines, gpus=machine.num_gpus // engines)
            with suppress(ConfigError):
                wider[shape] = machine.at(shape.gpus)
        return wider

    def find_shapes(self) -> dict[Shape, CostModel]:
        """Costs of the shapes onto which a planner may gather. ConfigError for one without costs."""
        found = {} if isinstance(self.shapes, str) else dict(self.shapes or {})
        for part in split(self.shapes) if isinstance(self.shapes, str) else ():
            shape, equals, costs = part.partition("=")
            if not equals:
                raise ConfigError(f"shape {part} has no costs: write {part}=COSTS, or give --gpus and --model")
            found[Shape.of(shape)] = load_costs(costs)
        if self.scheduling is None:
            return found
        return {shape: scheduled(of, synchronous=self.scheduling == "synchronous") for shape, of in found.items()}

    def steps_of(self, trace: Trace) -> Sequence[int] | None:
        """Return the RL steps of the trace that the settings name; None where they name none."""
        return parse_rl_steps(self.rl_steps, trace.rl_steps) if isinstance(self.rl_steps, str) else self.rl_steps

    def changed(self, settings: Fields, function: Callable[..., Any]) -> Self:
        """With these fields in place of its own; ConfigError for a keyword that neither they nor `function` have."""
        names = [field.name for field in fields(self)]
        check_keywords(settings, names, function)
        return replace(self, **settings)

    def num_workers(self, trace: Trace) -> int:
        """The workers to simulate; ConfigError where neither the settings nor the manifest name them."""
        workers = trace.manifest.num_workers if self.workers is None else self.workers
        if workers is None:
            raise ConfigError("the trace's manifest has no num_workers: set the number to simulate with --workers")
        return workers

    def find_costs(self, trace: Trace) -> tuple[CostModel, str]:
        """The cost model, and what a user calls it."""
        beside = file_of_run(trace, "costs.json")
        default = str(beside or "cpu-small (the default: the trace has no costs)")
        model = load_costs(self.costs if self.costs is not None else beside or "cpu-small")
        if self.scheduling is None:
            return model, named(self.costs, default)
        model = scheduled(model, synchronous=self.scheduling == "synchronous")
        return model, f"{named(self.costs, default)}, {self.scheduling}"

    def find_acceptance(self, trace: Trace) -> tuple[Acceptance | None, str | None]:
        """The acceptance model, and its name or source; None where no acceptance is known."""
        if self.acceptance is not None and self.acceptance != "trace":
            model = load_acceptance(self.acceptance, epochs=has_epochs(trace))
            written = isinstance(self.acceptance, str | Path) and not isinstance(model, PerDrafter)
            return model, str(self.acceptance) if written else acceptance_text(model)
        table = trace.acceptance
        if table is not None and len(table):
            return TraceAcceptance(table), "the trace's own"
        if self.acceptance is None and (beside := file_of_run(trace, "acceptance.json")):
            return load_acceptance(beside), min(str(beside), os.path.relpath(beside), key=len)
        rows = trace.arrow("iterations")
        if rows is not None and pc.any(pc.greater(rows["draft_depth"], 0)).as_py():
            measured, _ = fit_acceptance(rows.to_pandas(), trace.drafters)
            if measured is not None:
                return measured, f"measured in the trace's iterations ({', '.join(measured.drafters)})"
        if (logged := LoggedDrafting.of(trace)) is not None:
            return logged.acceptance(), logged.text
        if self.acceptance is not None:
            raise ConfigError(f"acceptance 'trace': {UNKNOWN.format('ngram')}")
        return None, None


def has_epochs(trace: Trace) -> bool:
    """Return whether prompts of the trace were rolled out in an earlier epoch."""
    return bool((trace.workload["epoch"] > 0).any())


def decision_interval(trace: Trace) -> int:
    """Iterations between decisions of systems: 1, of many or long responses so many that each gets some hundred."""
    cap = trace.workload["max_response_tokens"].max()
    # The share of a trace without responses is NaN, and not above anything.
    return max(1, int(cap) // 256) if cap >= 4096 or trace.num_rows("outcomes") > 1024 else 1


def check_keywords(keywords: Iterable[str], names: Sequence[str], function: Callable[..., Any]) -> None:
    """Raise ConfigError for the first keyword that is none of these names; it lists parameters of `function` too."""
    parameters = [p.name for p in signature(function).parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    for name in keywords:
        if name not in names:
            words = sorted({*names, *parameters} - {"self", "cls", "config"})
            near = did_you_mean(name, words)
            raise ConfigError(f"{function.__qualname__} has no keyword {name!r}{near}; there are {', '.join(words)}")


def load_spot_training(source: SpotTraining | Source) -> SpotTraining:
    """Spot training from itself, a dict, a JSON file, or "tlt" for the defaults. Raises ConfigError."""
    if isinstance(source, SpotTraining):
        return source
    if source == "tlt":
        return SpotTraining()
    value = source if isinstance(source, dict) else read_json(Path(source))
    with faults_in("spot training"):
        return SpotTraining.model_validate(value)


def named(source: object, default: str) -> str:
    """The name that a user gave the source, else its kind."""
    if source is None:
        return default
    if isinstance(source, dict):
        return str(source.get("kind", "linear"))
    if isinstance(source, str | Path):
        return str(source)
    if is_own(source):
        return (source if isinstance(source, type) else type(source)).__name__
    return str(getattr(source, "name", getattr(source, "kind", "trace")))
