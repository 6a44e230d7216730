"""Which GPUs a recipe asks for: one bundle per rollout worker, one per trainer rank, or shared ones."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from math import ceil

from tltlab.errors import ConfigError

from .recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundles:
    """GPUs, or shares of one, that stay on one node: `workers[n]` of rollout worker n, `ranks[r]` of trainer rank r.

    Colocated ranks live on the workers' GPUs, rank r on the r-th of them, and have no bundles: `ranks` is then empty.
    """

    workers: tuple[float, ...]
    ranks: tuple[float, ...]
    colocated: bool

    @property
    def all(self) -> tuple[float, ...]:
        """Every bundle with GPUs, the workers' first."""
        return tuple(gpus for gpus in self.workers + self.ranks if gpus)

    @property
    def num_gpus(self) -> float:
        return sum(self.all)

    def worker_of_rank(self, rank: int) -> tuple[int, int]:
        """The worker whose GPU a colocated rank shares, and which of that worker's GPUs.

        >>> Bundles(workers=(2.0, 2.0), ranks=(), colocated=True).worker_of_rank(3)
        (1, 1)
        """
        places = chain.from_iterable(((n, gpu) for gpu in range(int(gpus))) for n, gpus in enumerate(self.workers))
        return list(places)[rank]


def bundles_of(recipe: Recipe) -> Bundles:
    """What a recipe asks for. ConfigError where its counts do not add up.

    A worker takes tensor_parallel_size GPUs, or `gpus_per_worker`; a rank takes 1 or `train.gpus`. On nodes without
    GPUs, which is what a recipe without `cluster.gpus_per_node` has, nobody takes any unless these two say so.
    Colocated trainers are as many as GPUs, each on one.
    """
    rollout, train, cluster = recipe.rollout, recipe.train, recipe.cluster
    tp = rollout.tensor_parallel_size
    default = float(cluster.gpus_per_node > 0)
    per_worker = rollout.gpus_per_worker if rollout.gpus_per_worker is not None else default * tp
    per_rank = train.gpus if train.gpus is not None else default
    colocated = cluster.placement == "colocated" and per_worker > 0
    if recipe.drafter is not None and tp > 1:
        raise ConfigError(
            f"[drafter] with rollout.tensor_parallel_size = {tp}: a drafter learns from hidden states, which are only "
            "captured where a whole model runs in one process; take 1, or leave [drafter] out"
        )
    if per_worker and tp > 1 and per_worker != tp:
        raise ConfigError(
            f"rollout.gpus_per_worker = {per_worker:g} with rollout.tensor_parallel_size = {tp}: a worker that spans "
            "several GPUs takes all of each; leave gpus_per_worker out"
        )
    for name, gpus in (("rollout.gpus_per_worker", per_worker), ("train.gpus", per_rank)):
        if gpus > 1 and not gpus.is_integer():
            raise ConfigError(f"{name} = {gpus:g}: a whole number of GPUs, or a share of one")
    if per_worker > 1 and tp == 1:
        raise ConfigError(f"rollout.gpus_per_worker = {per_worker:g}: set rollout.tensor_parallel_size to use them")
    if per_rank > 1:
        raise ConfigError(f"train.gpus = {per_rank:g}: a trainer rank uses one GPU; raise train.ranks to use more")
    if colocated and (per_worker < 1 or (train.gpus is not None and train.gpus != 1)):
        raise ConfigError(
            "cluster.placement = 'colocated' gives every worker and every rank whole GPUs: leave out "
            "rollout.gpus_per_worker and train.gpus"
        )
    workers = (per_worker,) * rollout.num_workers
    made = Bundles(workers=workers, ranks=() if colocated else (per_rank,) * train.ranks, colocated=colocated)
    if colocated and train.ranks != made.num_gpus:
        raise ConfigError(
            f"cluster.placement = 'colocated' puts a trainer rank on each of the {made.num_gpus:g} GPUs of "
            f"{rollout.num_workers} workers x {tp}, got train.ranks = {train.ranks}: set it to {made.num_gpus:g}"
        )
    if cluster.gpus_per_node:
        _check_cluster(recipe, made)
    return made


def places_of(bundles: Bundles, gpus_per_node: int) -> list[tuple[int, tuple[int, ...]]]:
    """Node and GPUs of each bundle in `bundles.all`: the largest first, each onto the first node with room.

    As Ray packs them, but nodes go by number here. With 0 GPUs per node their size is not known: all lie on one.

    >>> places_of(Bundles(workers=(4.0, 4.0), ranks=(0.5, 0.5), colocated=False), 8)
    [(0, (0, 1, 2, 3)), (0, (4, 5, 6, 7)), (1, (0,)), (1, (0,))]
    """
    size = gpus_per_node or sum(ceil(gpus) for gpus in bundles.all)
    nodes: list[list[float]] = []
    places: dict[int, tuple[int, tuple[int, ...]]] = {}
    for number, gpus in sorted(enumerate(bundles.all), key=lambda bundle: -bundle[1]):
        share, count = min(gpus, 1.0), max(int(gpus), 1)
        node, taken = next(
            (node, fitting[:count])
            for node, free in enumerate([*nodes, [1.0] * size])
            if len(fitting := tuple(gpu for gpu, left in enumerate(free) if left >= share - 1e-9)) >= count
        )
        if node == len(nodes):
            nodes.append([1.0] * size)
        for gpu in taken:
            nodes[node][gpu] -= share
        places[number] = (node, taken)
    return [places[number] for number in sorted(places)]


def _check_cluster(recipe: Recipe, bundles: Bundles) -> None:
    cluster, tp = recipe.cluster, recipe.rollout.tensor_parallel_size
    have = cluster.num_nodes * cluster.gpus_per_node
    what = f"{cluster.num_nodes} x {cluster.gpus_per_node} GPUs (cluster.num_nodes x cluster.gpus_per_node)"
    if tp > cluster.gpus_per_node:
        raise ConfigError(
            f"rollout.tensor_parallel_size = {tp} with cluster.gpus_per_node = {cluster.gpus_per_node}: tensor "
            "parallelism does not cross nodes"
        )
    if bundles.colocated and bundles.num_gpus != have:
        raise ConfigError(
            f"{recipe.rollout.num_workers} workers x {tp} GPUs are {bundles.num_gpus:g}, and the cluster has {what}: "
            "colocated, they must be as many"
        )
    if bundles.num_gpus > have + 1e-9:
        raise ConfigError(
            f"workers ask for {sum(bundles.workers):g} GPUs and trainer ranks for {sum(bundles.ranks):g}, and the "
            f"cluster has {what}: take fewer, or cluster.placement = 'colocated'"
        )
    nodes = 1 + max((node for node, _ in places_of(bundles, cluster.gpus_per_node)), default=0)
    if nodes > cluster.num_nodes:
        raise ConfigError(
            f"rollout workers of {tp} GPUs, each on one node, and what else asks for GPUs do not fit onto {what}: take "
            "fewer, or a tensor_parallel_size that divides gpus_per_node"
        )
