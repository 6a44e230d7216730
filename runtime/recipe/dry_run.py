"""Plan of a recipe: its actors, their GPUs, the memory they need, and the options that are off-policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from tltlab.console import table
from tltlab.hardware import Gpu

from .gpus import Bundles, places_of
from .memory import (
    DRIVER,
    PHASES,
    PROCESSES,
    RANK,
    RAY,
    REWARDS,
    SPOT,
    STORE,
    WORKER,
    Device,
    MemoryPart,
    MemoryPlan,
    MemorySizes,
    memory_table,
)
from .recipe import Recipe
from .rules import uneven_minibatches
from .system import system_settings

Place = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """One process of a run: number `number` of its kind, on `node`, with `share` of each of the GPUs `gpus`.

    Ray may number nodes differently; here numbers only identify nodes.
    """

    kind: str
    number: int
    node: int
    gpus: tuple[int, ...]
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of a GPU, a host or, without GPUs, one process, at its peak in a phase."""

    where: str
    device: Device
    phase: str
    parts: tuple[MemoryPart, ...]
    total_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A setting that decides if training data follow the policy that is trained."""

    name: str
    on_policy: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A recipe's plan.

    `fits` is None where no GPU is named to compare memory with; `system` is None, or the settings that execute the
    recipe's system.
    """

    model: str
    num_params: int
    system: dict[str, Any] | None
    placement: str
    num_nodes: int
    gpus_per_node: int
    gpu: str | None
    gpu_bytes: float | None
    responses_per_step: int
    tokens_per_response: int
    actors: tuple[Actor, ...]
    memory: tuple[Memory, ...]
    fits: bool | None
    options: tuple[Option, ...]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON types."""
        return asdict(self)

    def text(self) -> str:
        """Return the plan as text."""
        gpus = f" x {self.gpus_per_node} {self.gpu or 'GPUs'}" if self.gpus_per_node else ""
        run = [
            ("model", f"{self.model}, {self.num_params / 1e9:.3g} B parameters"),
            ("cluster", f"{self.num_nodes} node{'s' * (self.num_nodes > 1)}{gpus}, {self.placement}"),
            ("RL step", f"{self.responses_per_step} responses of up to {self.tokens_per_response} tokens, "
                        "prompt included"),
        ]  # fmt: skip
        if self.system is not None:
            settings = [f"{name} = {value}" for name, value in self.system["settings"].items()]
            drafts = ", ".join(self.system["strategies"])
            run.append(("system", ", ".join([f"{self.system['title']}: drafts {drafts}", *settings])))
        lines = [table((), run, left=2), "actors", table((), _actor_rows(self.actors), left=4, indent=2)]
        lines += ["memory, GB by phase", *_memory_tables(self.memory, self.gpu_bytes)]
        if self.fits is not None:
            lines.append("it fits" if self.fits else "it DOES NOT FIT")
        options = [("on-policy" if o.on_policy else "OFF-POLICY", f"{o.name}: {o.why}") for o in self.options]
        lines += ["trained on", table((), options, left=2, indent=2)]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


def plan_of(recipe: Recipe) -> RunPlan:
    """Return a recipe's plan; needs neither GPUs nor Ray nor the model's weights.

    ConfigError where its GPUs do not add up, tensor parallelism does not divide the model, or the model's shape or the
    GPU is unknown. A plan that does not fit is no error: see `fits`.
    """
    sizes = MemorySizes(recipe)
    shape, bundles, gpu, build = sizes.shape, sizes.bundles, sizes.gpu, sizes.build
    table, actors = memory_table(sizes), _actors(recipe, bundles)
    memory = _memory(table, bundles, actors)
    fits = None if gpu is None else _fits(bundles, memory, gpu)
    system, notes = system_settings(recipe)
    if table.at_once < sizes.running:
        notes.append(
            f"an engine's KV cache holds {table.at_once} responses of full length, up to {sizes.running} run at a "
            "time: if all grow long, vLLM preempts some"
        )
    if recipe.train.sampling_rounds > 1:
        notes.append(
            f"train.sampling_rounds = {recipe.train.sampling_rounds}: an RL step rolls out up to as many times, for "
            "prompts whose rewards do not differ"
        )
    notes += uneven_minibatches(recipe)
    if sizes.on_gpu:
        notes.append(
            "when trainers start, rank 0 reads the whole model in float32 on its host: "
            f"{4e-9 * shape.stored_params:.1f} GB beside what is counted"
        )
    if build.graphs is not None:
        notes += [f"CUDA graphs: {note}" for note in (build.graphs.summary(), *build.graphs.shortfalls())]
    if recipe.data.max_prompt_tokens is None and "max_model_len" not in recipe.rollout.vllm:
        notes.append("data.max_prompt_tokens is not set: prompts are taken to have up to 1024 tokens")
    return RunPlan(
        model=shape.name,
        num_params=shape.stored_params,
        system=system,
        placement=recipe.cluster.placement,
        num_nodes=recipe.cluster.num_nodes,
        gpus_per_node=recipe.cluster.gpus_per_node,
        gpu=gpu.name if gpu else None,
        gpu_bytes=gpu.memory_bytes if gpu else None,
        responses_per_step=sizes.responses,
        tokens_per_response=sizes.tokens,
        actors=actors,
        memory=memory,
        fits=fits,
        options=_options(recipe),
        notes=tuple(notes),
    )


def _actors(recipe: Recipe, bundles: Bundles) -> tuple[Actor, ...]:
    places = iter(places_of(bundles, recipe.cluster.gpus_per_node))
    workers = [next(places) if gpus else (0, ()) for gpus in bundles.workers]
    if bundles.colocated:
        shared = [bundles.worker_of_rank(rank) for rank in range(recipe.train.ranks)]
        ranks: list[Place] = [(workers[n][0], (workers[n][1][gpu],)) for n, gpu in shared]
    else:
        ranks = [next(places) if gpus else (0, ()) for gpus in bundles.ranks]
    kinds: list[tuple[str, list[Place], float]] = [
        (WORKER, workers, min(bundles.workers[0], 1.0)),
        (RANK, ranks, 1.0 if bundles.colocated else bundles.ranks[0]),
        (SPOT, workers if recipe.drafter is not None else [], min(bundles.workers[0], 1.0)),
        (REWARDS, [(0, ())] * recipe.reward_pool.processes, 0.0),
    ]
    return tuple(
        Actor(kind=kind, number=number, node=node, gpus=gpus, share=share)
        for kind, places_of_kind, share in kinds
        for number, (node, gpus) in enumerate(places_of_kind)
    )


def _memory(table: MemoryPlan, bundles: Bundles, actors: tuple[Actor, ...]) -> tuple[Memory, ...]:
    """Return memory by place and phase: a GPU or process of each kind, then the fullest host."""
    if bundles.colocated:
        places = {"a GPU": [WORKER, RANK, SPOT]}
    elif bundles.all:
        places = {"a rollout worker's GPU": [WORKER, SPOT], "a trainer rank's GPU": [RANK]}
    else:
        places = {f"a {process}'s process": [process] for process in (WORKER, RANK, SPOT)}
    found: list[tuple[str, Device, str, list[MemoryPart]]] = [
        (place, table.device, phase, [part for process in processes for part in table.of(process, table.device, phase)])
        for place, processes in places.items()
        for phase in PHASES
    ]
    # The driver's node is the first: ranks and workers fill nodes in order.
    counts = Counter(actor.kind for actor in actors if actor.node == 0) + Counter([DRIVER, STORE, RAY])
    for phase in PHASES:
        on_host = [
            replace(part, num_bytes=count * part.num_bytes, formula=f"{count} x ({part.formula})")
            if (count := counts[process]) > 1
            else part
            for process in PROCESSES
            if counts[process]
            for part in table.of(process, "host", phase)
        ]
        found.append(("the driver's host", "host", phase, on_host))
    return tuple(
        Memory(where=where, device=device, phase=phase, parts=tuple(parts), total_bytes=sum(p.num_bytes for p in parts))
        for where, device, phase, parts in found
        if parts
    )


def _memory_tables(memory: Sequence[Memory], gpu_bytes: float | None) -> Iterator[str]:
    """Yield a table for each place: a row for each part, a column for each phase."""
    for place, group in groupby(memory, key=lambda entry: entry.where):
        phases = list(group)
        parts = {(part.process, part.name): part for entry in phases for part in entry.parts}
        sizes = [{(part.process, part.name): part.num_bytes for part in entry.parts} for entry in phases]
        rows = [
            (*name, *(f"{size[name] / 1e9:.3f}" if name in size else "-" for size in sizes), part.formula)
            for name, part in parts.items()
        ]
        limit = f"of {gpu_bytes / 1e9:.0f} GB" if gpu_bytes and phases[0].device == "GPU" else ""
        rows.append(("", "total", *(f"{entry.total_bytes / 1e9:.3f}" for entry in phases), limit))
        yield table((place, "", *(entry.phase for entry in phases), ""), rows, left=2, words=True, indent=2)


def _fits(bundles: Bundles, memory: tuple[Memory, ...], gpu: Gpu) -> bool:
    """Return True if each phase fits; actors that share a GPU must fit into it together."""
    share_of = {
        "a rollout worker's GPU": min(bundles.workers[0] or 1, 1.0),
        "a trainer rank's GPU": min((*bundles.ranks, 1.0)[0] or 1, 1.0),
    }
    return all(
        entry.total_bytes <= gpu.memory_bytes * share_of.get(entry.where, 1.0) + 1e-3
        for entry in memory
        if entry.device == "GPU"
    )


def _options(recipe: Recipe) -> tuple[Option, ...]:
    rollout, train = recipe.rollout, recipe.train
    options = [(rollout.chosen_by, True, "verification keeps the distribution")]
    if rollout.partial is not None:
        options.append(("rollout.partial", False, "a response's tokens are of several versions"))
    if rollout.reuse is not None:
        exact = rollout.reuse.residual == "exact" and rollout.reuse.leniency == 1
        why = "the prefix is verified, its end drawn anew from the residual" if exact else "prefixes are of older ones"
        options.append(("rollout.reuse", exact, why))
    if rollout.one_step_off:
        options.append(("rollout.one_step_off", False, "responses are of the weights before the last update"))
    if rollout.staleness:
        options.append((f"rollout.staleness = {rollout.staleness}", False, "tokens are up to that many updates old"))
    if train.accept_biased_sampling and (rollout.top_p < 1 or rollout.top_k or rollout.min_p):
        options.append(("top_p, top_k, min_p", False, "tokens of nonzero probability are cut off"))
    if train.minibatches > 1:
        why = "after the first of them the policy has moved: the clipped ratio accounts for it"
        options.append((f"train.minibatches = {train.minibatches}", False, why))
    return tuple(Option(name=name, on_policy=on_policy, why=why) for name, on_policy, why in options)


def _actor_rows(actors: tuple[Actor, ...]) -> Iterator[tuple[str, str, str, str]]:
    """Yield one row for all actors of a kind on a node."""
    for (kind, node), group in groupby(actors, key=lambda actor: (actor.kind, actor.node)):
        same_kind = list(group)
        gpus, share = sorted({gpu for actor in same_kind for gpu in actor.gpus}), same_kind[0].share
        each = f"{len(same_kind[0].gpus)} each" if share in (0.0, 1.0) else f"{share:g} of one each"
        gpus_text = f"GPUs {_range(gpus)}, {each}" if gpus else "no GPU"
        yield kind, _range([actor.number for actor in same_kind]), f"node {node}", gpus_text


def _range(numbers: list[int]) -> str:
    contiguous = len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]}-{numbers[-1]}" if contiguous else ", ".join(map(str, numbers))
