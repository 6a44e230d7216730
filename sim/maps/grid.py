"""The points of a map: a model with its weights on GPUs, a schedule, a length limit, a load; and the families tried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, get_args

from tltlab.costs.profiles import nearest_engine, profile_costs, profiles
from tltlab.costs.roofline import RooflineCosts
from tltlab.costs.stages import RooflineStages, StageCosts
from tltlab.drafters.specs import SYSTEM_DRAFTERS
from tltlab.errors import ConfigError
from tltlab.hardware import Dtype, model
from tltlab.lengths.generate import generate
from tltlab.lengths.model import of_regime
from tltlab.planning.composition import Rung, System
from tltlab.planning.systems import SYSTEMS
from tltlab.sim.what_if import smallest_worker
from tltlab.traces.trace import Trace

Schedule = Literal["synchronous", "one step off"]
GROUP_SIZE = 8
MEDIAN_SHARE = 0.18
"""Of the length limit: as in traces/reasoning-32k, where a response in fifty reaches it."""
MOST_CONTEXT = 131_072

WARM_UP_STEPS = 1
"""RL steps that come before those that count: no drafter is trained yet, and one step off has nothing to train on."""

_FIXED = System(
    name="model-free",
    title="fixed model-free drafts",
    source="suffix decoding (arXiv 2411.04975) on the group's own responses, four tokens at every batch size",
    algorithm="a chain of four tokens of the longest match, always",
    exact=("the same draft length at every batch size",),
    drafters=("suffix",),
    ladder=(Rung(min_batch=1, chains=(4,)),),
    specs=(("suffix", SYSTEM_DRAFTERS["seer"]),),
    assumptions=("four tokens a draft",),
)

FAMILIES: dict[str, System] = {
    "off": SYSTEMS["verl"],
    "model-free": _FIXED,
    "trained": SYSTEMS["tlt"],
    "order": replace(SYSTEMS["verl"], name="order", title="longest prompts first", placement="longest_expected"),
    "trained + order": replace(
        SYSTEMS["tlt"], name="trained-order", title="TLT, longest prompts first", placement="longest_expected"
    ),
}
"""No speculation; a fixed model-free drafter; a trained one under a bandit (TLT); prompts that were
long an epoch before first, each to the worker with the fewest tokens to expect, the most that orders by prompt can
bring (Seer, StreamRL and RhymeRL estimate it); and the last two together, which nobody has published."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One combination. `context` is the limit of a response in tokens, `load` responses to a worker where all generate.

    `one step off` generates on half of the workers' GPUs while the other half trains.
    """

    model: str
    weights: Dtype
    schedule: Schedule
    context: int
    load: int

    @property
    def kind(self) -> Literal["dense", "MoE"]:
        return "MoE" if model(self.model).experts else "dense"

    @property
    def name(self) -> str:
        return f"{self.model} {self.weights}, {self.schedule}, {shown_tokens(self.context)}, {self.load} a worker"


@dataclass(frozen=True, kw_only=True)
class MapGrid:
    """All combinations of these, on `workers` workers of one kind of GPU.

    Lengths are drawn from a `regime` (`tltlab.lengths.model.REGIMES`) stretched to each length limit; `rl_steps`
    RL steps count, behind a first one. A worker has the fewest GPUs that hold the weights and a response of the whole
    length. Raises ConfigError for an empty or unknown value.

    >>> len(list(MapGrid(contexts=(32768,), loads=(64,)).points()))
    8
    """

    models: Sequence[str] = ("Qwen3-32B", "Qwen3-30B-A3B")
    weights: Sequence[Dtype] = ("bf16", "fp8")
    schedules: Sequence[Schedule] = ("synchronous", "one step off")
    contexts: Sequence[int] = (16_384, 32_768, 131_072)
    loads: Sequence[int] = (8, 32, 128)
    gpu: str = "H100"
    workers: int = 4
    regime: str = "reasoning"
    rl_steps: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("models", "weights", "schedules", "contexts", "loads"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"map: {name} must have at least one value, each once; got {list(values)}")
        for name in self.models:
            model(name)
        for kinds, values in ((get_args(Dtype), self.weights), (get_args(Schedule), self.schedules)):
            if unknown := [value for value in values if value not in kinds]:
                raise ConfigError(f"map: no {unknown[0]!r}; there are {', '.join(kinds)}")
        if not all(256 <= context <= MOST_CONTEXT for context in self.contexts):
            raise ConfigError(f"map: contexts are 256 to {MOST_CONTEXT} tokens, got {list(self.contexts)}")
        if not all(2 <= load <= 4096 for load in self.loads):
            raise ConfigError(f"map: loads are 2 to 4096 responses to a worker, got {list(self.loads)}")
        if self.workers < 2 or self.workers % 2:
            raise ConfigError(
                f"map: workers must be an even number, half of them train one step off; got {self.workers}"
            )
        if self.rl_steps < 2:
            raise ConfigError(f"map: an interval needs at least 2 RL steps, got {self.rl_steps}")
        of_regime(self.regime)

    def points(self) -> Iterator[Point]:
        """In order: model, weights, schedule, context, load."""
        for name, weights, schedule in product(self.models, self.weights, self.schedules):
            for context, load in product(self.contexts, self.loads):
                yield Point(model=name, weights=weights, schedule=schedule, context=context, load=load)

    def trace(self, point: Point) -> Trace:
        """The point's responses; the same for all models, weights and schedules."""
        lengths = of_regime(self.regime).with_changes(
            median=MEDIAN_SHARE * point.context, max_response_tokens=point.context
        )
        return generate(
            lengths, num_rl_steps=WARM_UP_STEPS + self.rl_steps,
            prompts_per_step=max(1, self.workers * point.load // GROUP_SIZE), group_size=GROUP_SIZE, seed=self.seed,
            num_workers=self.workers, name=point.name,
        )  # fmt: skip

    def costs(self, point: Point) -> RooflineCosts:
        """Of the engine measured nearest; ConfigError where eight GPUs do not hold the weights and a response."""
        shape = model(point.model)
        engine = nearest_engine(self.gpu, shape.name, point.weights)
        fault = ConfigError(f"{point.name}: a response does not fit on 8 x {self.gpu}")
        return smallest_worker(
            lambda tp: profile_costs(engine, self.gpu, shape, tp, weights=point.weights), (1, 2, 4, 8),
            point.context + 4096, fault,
        )  # fmt: skip

    def stages(self, point: Point, costs: RooflineCosts) -> StageCosts:
        """Log-probs, training and weight sync of all workers' GPUs, by FLOPs."""
        num_gpus = self.workers * costs.tensor_parallel
        return RooflineStages(kind="roofline", gpu=self.gpu, model=point.model, num_gpus=num_gpus).build()


def scheduled(system: System, schedule: Schedule) -> System:
    """The system under a schedule: one step off, half of the GPUs generate and half train at the same time."""
    if schedule == "synchronous":
        return system
    return replace(system, topology="separate", generating_share=0.5, max_staleness=1, on_policy=False)


def beyond_measured(costs: RooflineCosts, context: int) -> list[str]:
    """What of a context lies beyond the engine's measurements: nothing, or that it is longer than all of them."""
    assert costs.evidence is not None
    engine = costs.evidence.engine
    longest = max(m.context_tokens[1] for m in profiles().engines[engine].measured)
    return ["context"] if context > longest else []


def shown_tokens(tokens: int) -> str:
    """
    >>> shown_tokens(131072), shown_tokens(1000)
    ('128K', '1000')
    """
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)
