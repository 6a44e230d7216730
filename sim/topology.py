"""Assignment of GPUs in an RL step: engines and trainer share them or have separate pools."""

from __future__ import annotations

from dataclasses import dataclass

from tltlab.costs.stages import StageCosts
from tltlab.errors import ConfigError

from .config import at_least


@dataclass(frozen=True, kw_only=True)
class Pools:
    """GPUs that generate and GPUs that train; `shared` where they are the same."""

    rollout_gpus: int
    train_gpus: int
    shared: bool

    @property
    def num_gpus(self) -> int:
        return self.rollout_gpus if self.shared else self.rollout_gpus + self.train_gpus


@dataclass(frozen=True, kw_only=True)
class Colocated:
    """All GPUs roll out, then compute log-probs, train and sync in turn, as in VeRL and TLT."""

    gpus_per_worker: int = 1

    name = "colocated"
    max_staleness = 0

    def __post_init__(self) -> None:
        at_least(1, gpus_per_worker=self.gpus_per_worker)

    def pools(self, num_workers: int, stages: StageCosts) -> Pools:
        num_gpus = num_workers * self.gpus_per_worker
        if stages.num_gpus not in (None, num_gpus):
            raise ConfigError(
                f"the stage costs are for {stages.num_gpus} GPUs, but {num_workers} workers of {self.gpus_per_worker} "
                f"are {num_gpus}: take stage costs for {num_gpus} GPUs or other workers"
            )
        return Pools(rollout_gpus=num_gpus, train_gpus=num_gpus, shared=True)


@dataclass(frozen=True, kw_only=True)
class Separate:
    """Engines and trainer on separate GPUs, as in Open-R1.

    With `max_staleness` 0 one side waits for the other; with 1 the next rollout runs during training, on weights one
    update old, with more rollouts run ahead of training where it is the slower side for a while. `train_gpus` defaults
    to what the stage costs are for, else to as many as generate.
    """

    gpus_per_worker: int = 1
    train_gpus: int | None = None
    max_staleness: int = 0

    name = "separate"

    def __post_init__(self) -> None:
        at_least(1, gpus_per_worker=self.gpus_per_worker, train_gpus=self.train_gpus)
        if self.max_staleness < 0:
            raise ConfigError(f"max_staleness {self.max_staleness}: give 0 (synchronous), 1 (one step off) or more")

    def pools(self, num_workers: int, stages: StageCosts) -> Pools:
        rollout_gpus = num_workers * self.gpus_per_worker
        train_gpus = self.train_gpus or stages.num_gpus or rollout_gpus
        if stages.num_gpus not in (None, train_gpus):
            raise ConfigError(
                f"the stage costs are for {stages.num_gpus} GPUs, but {train_gpus} train: take stage costs for "
                f"{train_gpus} GPUs or train_gpus = {stages.num_gpus}"
            )
        return Pools(rollout_gpus=rollout_gpus, train_gpus=train_gpus, shared=False)


Topology = Colocated | Separate
"""GPUs that do what, and how many updates the weights of a rollout may lag behind."""


def load_topology(name: str, *, gpus_per_worker: int = 1, max_staleness: int = 0) -> Topology:
    """A topology by its name, `colocated` or `separate`; ConfigError for another and for what it does not take."""
    if name == Separate.name:
        return Separate(gpus_per_worker=gpus_per_worker, max_staleness=max_staleness)
    if name != Colocated.name:
        raise ConfigError(f"no topology named {name!r}; there are {Colocated.name}, {Separate.name}")
    if max_staleness:
        raise ConfigError(
            "colocated GPUs train themselves and never overlap: train_gpus and max_staleness need separate"
        )
    return Colocated(gpus_per_worker=gpus_per_worker)
