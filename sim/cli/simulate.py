"""The simulator on the command line."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tltlab.acceptance.base import Acceptance
from tltlab.console import emit, parse_strategy, table
from tltlab.costs.base import CostModel
from tltlab.costs.linear import LinearCosts
from tltlab.costs.load import load_costs, load_stages
from tltlab.errors import ConfigError
from tltlab.importers.sources import read
from tltlab.options import ALLOW_CODE_OPTION, command, option
from tltlab.own import code_allowed
from tltlab.planning.composition import asynchronous
from tltlab.planning.systems import SYSTEMS
from tltlab.policies.policy import Activation, Policy, load_policy
from tltlab.policies.specs import FixedSpec
from tltlab.sim.config import SimulationConfig, Source
from tltlab.sim.printed import summary_lines
from tltlab.sim.rl_steps import Colocated, Separate, Topology
from tltlab.sim.rl_steps import summary as whole_steps
from tltlab.sim.scenario import Scenario, policy_name
from tltlab.sim.study.sample import Scenarios
from tltlab.sim.study.study import Cell
from tltlab.sim.study.systems import cell_named
from tltlab.traces.schema import MANIFEST_FILE


@command
def simulate(
    trace: Annotated[Path, typer.Argument(help="A trace or RUN folder.")],
    config: SimulationConfig,
    policy: str = option("Shipped name, drafts (ngram:4@8), policy file or package.module:Class.", "none"),
    system: str | None = option(f"A system from the literature in place of a policy: {', '.join(SYSTEMS)}."),
    strategy: str | None = option("One strategy throughout, ngram:4 or D,K,V as 4,1,5; replaces --policy."),
    sd_threshold: int | None = option("Speculate only while at most this many requests run on the worker."),
    staleness: int = option("Engines go on from RL step to RL step, bounded to so many updates. [0: synchronous]", 0),
    stale: str = option("With --staleness: hold (begin no more than that allows) or drop (what is older).", "hold"),
    concurrency: float = option("With --staleness: responses in flight, as a multiple of what an RL step trains.", 1.0),
    out: Path | None = option("Write the simulated trace to this folder; an earlier simulation is replaced."),
    record_iterations: bool = option("Write iterations and decisions too.", False),
    stages: str | None = option("Stage costs, a file or preset: simulate whole RL steps, not rollouts alone."),
    topology: str | None = option(
        "With --stages: colocated (all GPUs do all stages) or separate (GPUs that train apart). "
        "[default: colocated, or the system's]"
    ),
    gpus_per_worker: int | None = option(
        "With --stages: GPUs of a rollout worker. [default: the costs' tp, else 1]", min=1
    ),
    max_staleness: int = option(
        "With --topology separate: rollouts may run on weights that many updates old.", 0, min=0
    ),
    allow_code: list[str] | None = ALLOW_CODE_OPTION,
) -> None:
    """Replay a trace's responses under a policy, a cost model and a placement.

    Example: tltlab simulate traces/tiny --strategy 4,1,5 --sd-threshold 8 --acceptance geometric:0.7 --json
    """
    source = read(trace)
    if out is not None and (out / MANIFEST_FILE).exists() and (kind := read(out).manifest.kind) != "simulated":
        raise ConfigError(
            f"{out} holds a trace of kind {kind!r}, which a simulation must not replace: choose another --out"
        )
    config = replace(config, admission=asynchronous(staleness, stale=stale, concurrency=concurrency))
    config, machine = config.on_trace(source)
    others = stages if stages or machine is None else machine.stages
    if others is None and (topology is not None or gpus_per_worker is not None or max_staleness):
        raise ConfigError(
            "--topology, --gpus-per-worker and --max-staleness place the stages of RL steps: give --stages or --gpus"
        )
    priced = None if others is None else load_stages(others)
    speed_up: dict[str, float | None] | None = None
    if system is not None:
        if policy != "none" or strategy is not None or sd_threshold is not None:
            raise ConfigError("--system brings its own policy: leave out --policy, --strategy, --sd-threshold")
        if topology is not None or max_staleness:
            raise ConfigError("--system brings its own topology: leave out --topology and --max-staleness")
        if staleness:
            raise ConfigError("--system sets what its RL steps begin: leave out --staleness")
        cell = cell_named(system, Scenarios(source, config), priced, gpus_per_worker)
    else:
        drafter = "" if strategy is None else default_drafter(config.find_acceptance(source)[0], config.costs)
        with code_allowed(allow_code or ()):
            chosen = choose_policy(policy, strategy, sd_threshold, drafter)
        scenario = Scenario.of(source, config)
        gpus = gpus_per_worker or scenario.costs.tensor_parallel
        placed: Topology = Colocated(gpus_per_worker=gpus)
        if topology == Separate.name:
            placed = Separate(gpus_per_worker=gpus, max_staleness=max_staleness)
        elif topology not in (None, Colocated.name):
            raise ConfigError(f"no topology named {topology!r}; there are {Colocated.name}, {Separate.name}")
        elif max_staleness:
            raise ConfigError("--max-staleness: colocated GPUs never overlap, it needs --topology separate")
        cell = Cell(
            name=policy_name(chosen), policy=chosen, scenario=scenario, stages=priced, topology=placed,
            manifest=source.manifest,
        )  # fmt: skip
    result, whole = cell.simulate(record_iterations)
    drafts = any(each.speculates for each in cell.policy.strategies)
    if cell.system is None and drafts and not staleness and config.spot is None:
        plain, plain_whole = replace(cell, name="none", policy=load_policy("none")).simulate()
        times = None if whole is None or plain_whole is None else plain_whole.step_s / whole.step_s
        speed_up = {"rollout": plain.makespan_s / result.makespan_s, "rl_step": times}
    assumptions = () if cell.system is None else cell.system.assumptions
    if machine is not None and whole is not None and not stages:
        assumptions = (*assumptions, *machine.assumed)
    composed = {} if system is None else {"system": system, "assumptions": list(assumptions)}
    summary = result.summary | {"speedup": speed_up} | composed | ({} if whole is None else whole_steps(whole))
    if out is not None:
        (whole or result).trace.write(out)
    lines, granted = summary_lines(summary), result.scenario.acceptance
    if config.spot is not None and (granted is None or granted.trained_drafter is None):
        lines.append(("", "it changes nothing here: only acceptance of kind fresh depends on training"))
    lines += [("assumed", note) for note in assumptions]
    emit(summary, table([], lines, words=True))


def default_drafter(model: Acceptance | None, costs: CostModel | type[CostModel] | Source | None) -> str:
    """The drafter that `--strategy D,K,V` leaves open: drafts of a learned one cost time, those of n-grams do not."""
    if model is not None and model.trained_drafter is not None:
        return model.trained_drafter
    if model is not None and len(model.drafters) == 1:
        return model.drafters[0]
    return "ngram" if costs is None or isinstance(load_costs(costs), LinearCosts) else "learned"


def choose_policy(name: str, strategy: str | None, sd_threshold: int | None, drafter: str) -> Policy:
    """The policy that --policy, --strategy and --sd-threshold together mean."""
    if strategy is not None and name != "none":
        raise ConfigError(f"--strategy {strategy} and --policy {name} exclude each other")
    if strategy is None:
        chosen = load_policy(name)
        if sd_threshold is not None and chosen.activation is not None:
            raise ConfigError(f"--sd-threshold: policy {name} has its own activation; change max_requests there")
    else:
        chosen = Policy(selector=FixedSpec(strategy=parse_strategy(strategy, drafter)))
    if sd_threshold is None:
        return chosen
    if sd_threshold < 0:
        raise ConfigError(f"--sd-threshold counts requests, got {sd_threshold}")
    active = Activation(max_requests=sd_threshold, count="running", hold_iterations=0)
    return chosen.model_copy(update={"activation": active})
