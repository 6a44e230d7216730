"""Forecast of a recipe's run: seconds and hours, host memory, disk, and whether model and data can be had."""

import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from tltlab.acceptance.load import DEFAULT
from tltlab.console import table, table_text
from tltlab.costs.evidence import LEVEL
from tltlab.errors import ConfigError, one_line
from tltlab.importers.sources import read
from tltlab.lengths.generate import generate
from tltlab.lengths.model import REGIMES
from tltlab.runtime.recipe.dry_run import RunPlan
from tltlab.runtime.recipe.engines import shape_of
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.sim.config import SimulationConfig, decision_interval
from tltlab.sim.rl_steps import Colocated, Separate, Topology
from tltlab.sim.scenario import Scenario
from tltlab.sim.study.study import Cell
from tltlab.sim.study.systems import on_gpus
from tltlab.traces.trace import Trace

from .records import Json, frozen

RL_STEPS = 2
"""RL steps that are simulated for each law of lengths."""
BETWEEN = ("base-rl", "reasoning")
"""Laws of lengths between which a run is expected."""
TRAINER_BYTES = 12
"""Bytes of a parameter in a checkpoint: float32 weights and two moments."""
TOKEN_BYTES = 8
"""Bytes of a recorded token in a trace, at most: its number and its log-probability."""
HUB_S = 5.0
"""Seconds that the Hugging Face Hub may take to answer."""


@frozen
class StepTime:
    """Simulated seconds of an RL step with responses of some lengths; `low` and `high` are the 90 % range of costs."""

    lengths: str
    rollout_s: float
    step_s: float
    low_s: float | None
    high_s: float | None


@frozen
class Forecast:
    """The forecast; sizes are bytes, `*_here` those of this machine.

    `unknown` has the reason where no RL step can be timed. `disk_bytes` holds the checkpoints that are kept and, at
    most, the trace of all RL steps. `parts` are the model and the data with what was found of each.
    """

    times: tuple[StepTime, ...]
    unknown: str | None
    num_steps: int
    host_bytes: float
    host_bytes_here: float
    disk_bytes: float
    disk_bytes_here: float
    parts: tuple[tuple[str, str], ...]
    command: str

    def as_json(self) -> Json:
        """The forecast as JSON types."""
        return asdict(self) | {"level": LEVEL}

    def text(self) -> str:
        """The forecast for people."""
        rows = [*self.parts]
        rows.append(("host memory", _needed(self.host_bytes, self.host_bytes_here, "on the fullest host")))
        rows.append(("disk", _needed(self.disk_bytes, self.disk_bytes_here, "at most, of checkpoints and trace")))
        rows += [("RL step", f"not simulated: {self.unknown}")] if self.unknown else []
        lines = ["before it starts", table([], rows, left=2, indent=2)]
        if self.times:
            times = pd.DataFrame([asdict(time) for time in self.times]).astype({"low_s": float, "high_s": float})
            hours = times[["step_s", "low_s", "high_s"]] * self.num_steps / 3600
            columns = (
                "lengths: {lengths}; rollout s: {rollout_s:.0f}; RL step s: {step_s:.0f}; "
                "90 % range: {low_s:.0f} to {high_s:.0f} s; "
                f"hours of {self.num_steps} RL steps: {{step_h:.1f}}; 90 %: {{low_h:.1f}} to {{high_h:.1f}}"
            )
            simulated = times.join(hours.set_axis(["step_h", "low_h", "high_h"], axis=1))
            lines += ["simulated, the range is that of costs", table_text(simulated, columns, left=1, indent=2)]
        return "\n".join([*lines, f"next: {self.command}"])


def forecast(recipe: Recipe, plan: RunPlan, out: Path, command: str, lengths: Path | None = None) -> Forecast:
    """Forecast a run of `recipe`, whose plan is `plan`, in the folder `out`; `command` starts the run.

    RL steps are simulated as synchronous ones, with the responses of the file `lengths` (None: of each regime, cut at
    the recipe's cap) and the usual acceptance of each drafter. The Hugging Face Hub is asked for a model and a dataset
    that are not here. Nothing is started or written. Raises what `read` does for `lengths`.
    """
    times: tuple[StepTime, ...] = ()
    unknown = None
    laws = _drawn(recipe) if lengths is None else {str(lengths): read(lengths)}
    try:
        times = tuple(_timed(recipe, name, trace) for name, trace in laws.items())
    except ConfigError as error:
        unknown = one_line(error)
    tokens = plan.responses_per_step * recipe.rollout.max_response_tokens
    checkpoints = recipe.checkpoint.keep * TRAINER_BYTES * plan.num_params
    hosts = [memory.total_bytes for memory in plan.memory if memory.device == "host"]
    folder = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    return Forecast(
        times=times,
        unknown=unknown,
        num_steps=recipe.train.steps,
        host_bytes=max(hosts, default=0.0),
        host_bytes_here=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        disk_bytes=float(checkpoints + recipe.train.steps * tokens * TOKEN_BYTES),
        disk_bytes_here=float(shutil.disk_usage(folder).free),
        parts=(("model", _found(recipe.model, "model")), ("data", _found(recipe.data.train, "dataset"))),
        command=command,
    )


def _drawn(recipe: Recipe) -> dict[str, Trace]:
    """RL steps of the recipe's size by regime, cut at its cap."""
    rollout = recipe.rollout
    laws = {name: REGIMES[name].with_changes(max_response_tokens=rollout.max_response_tokens) for name in BETWEEN}
    return {
        f"{name} (median {law.quantile(0.5):.0f} tokens, {law.cap_mass():.1%} cut)": generate(
            law, num_rl_steps=RL_STEPS, prompts_per_step=rollout.prompts_per_step, group_size=rollout.group_size,
            num_workers=rollout.num_workers, seed=recipe.seed,
        )
        for name, law in laws.items()
    }  # fmt: skip


def _timed(recipe: Recipe, name: str, trace: Trace) -> StepTime:
    """Simulate RL steps with these responses; ConfigError where the recipe's machine or a drafter is not known."""
    rollout = recipe.rollout
    if recipe.cluster.gpu is None:
        raise ConfigError("cluster.gpu names no GPU, so that costs are not known")
    tp = rollout.tensor_parallel_size
    config = SimulationConfig(
        gpus=f"{rollout.num_workers * tp}x{recipe.cluster.gpu}", model=shape_of(recipe.model), engine="vllm", tp=tp,
        acceptance=DEFAULT, seed=recipe.seed, decision_block=decision_interval(trace),
        rl_steps=trace.rl_steps[:RL_STEPS],
    )  # fmt: skip
    config, machine = config.on_trace(trace)
    assert machine is not None
    topology: Topology = Colocated(gpus_per_worker=tp)
    stages = machine.stages
    if recipe.cluster.placement == "separate":
        ranks = recipe.train.ranks
        topology, stages = Separate(gpus_per_worker=tp, train_gpus=ranks), on_gpus(stages, ranks)
    policy, scenario = recipe.read_policy(), Scenario.of(trace, config)
    cell = Cell(
        name=rollout.policy, policy=policy, scenario=scenario, stages=stages, topology=topology,
        num_updates=recipe.train.minibatches,
    )  # fmt: skip
    rows = cell.rows()
    rollout_s, step_s = (float(np.mean([row[of] for row in rows])) for of in ("makespan_s", "step_s"))
    evidence = scenario.costs.evidence
    drafts = any(strategy.speculates for strategy in policy.strategies)
    ends = None if evidence is None else evidence.interval(rollout_s, speculates=drafts)
    low_s, high_s = (None, None) if ends is None else (step_s - rollout_s + end for end in ends)
    return StepTime(lengths=name, rollout_s=rollout_s, step_s=step_s, low_s=low_s, high_s=high_s)


def _found(name: str, kind: Literal["model", "dataset"]) -> str:
    """Where a model or a dataset is: here, on the Hugging Face Hub, or nowhere that was looked at."""
    if Path(name).exists():
        return f"{name}: here"
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return f"{name}: not looked for, HF_HUB_OFFLINE is set"
    # Imported here: it takes long, and most models are folders.
    from huggingface_hub import HfApi

    try:
        HfApi().repo_info(name, repo_type=kind, timeout=HUB_S)
    except Exception as error:  # of huggingface_hub, or of its HTTP library
        return f"{name}: not to be had from the Hugging Face Hub ({type(error).__name__}: {one_line(error)[:120]})"
    return f"{name}: on the Hugging Face Hub"


def _needed(num_bytes: float, here: float, of: str) -> str:
    short = ", TOO LITTLE for a run here" if num_bytes > here else ""
    return f"{num_bytes / 1e9:.3g} GB {of}; this machine has {here / 1e9:.3g} GB{short}"
