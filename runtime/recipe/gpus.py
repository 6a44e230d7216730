"""GPUs of a recipe: one bundle per rollout worker, one per trainer rank, or shared ones."""

from collections.abc import Iterator
from math import ceil
from typing import Literal

from tltlab.errors import refuse
from tltlab.records import frozen

from .recipe import Recipe


@frozen
class Bundles:
    """GPUs, or shares of one, that stay on one node: `workers[n]` of rollout worker n, `ranks[r]` of trainer rank r.

    Colocated rank r uses the r-th GPU of the workers' and has no bundle: `ranks` is then empty. With a tail shape
    `workers[n]` are of its engine n, and of the workers that share its GPUs.
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

    def place_of(self, gpu: int) -> tuple[int, int]:
        """Return the bundle of the workers' GPU of this number, and its index there.

        >>> Bundles(workers=(2.0, 2.0), ranks=(), colocated=True).place_of(3)
        (1, 1)
        """
        return divmod(gpu, int(self.workers[0]))


def bundles_of(recipe: Recipe) -> Bundles:
    """Return the bundles of a recipe. ConfigError where its counts do not add up.

    A worker takes tensor_parallel_size GPUs, or `gpus_per_worker`; a rank takes 1 or `train.gpus`. On nodes without
    GPUs, the default without `cluster.gpus_per_node`, actors take none unless these two fields are set. Colocated
    trainers are as many as GPUs, each on one.
    """
    rollout, train, cluster = recipe.rollout, recipe.train, recipe.cluster
    default = float(cluster.gpus_per_node > 0)
    per_worker = default * rollout.tensor_parallel_size if rollout.gpus_per_worker is None else rollout.gpus_per_worker
    per_rank = default if train.gpus is None else train.gpus
    # Sums are meaningful only once each actor's GPUs are valid.
    refuse(_of_an_actor(recipe, per_worker, per_rank))
    colocated = cluster.placement == "colocated" and per_worker > 0
    workers = (per_worker,) * rollout.num_workers
    for tail in rollout.shapes[1:]:
        workers = (default * tail.gpus,) * tail.engines
    bundles = Bundles(workers=workers, ranks=() if colocated else (per_rank,) * train.ranks, colocated=colocated)
    refuse(_of_the_cluster(recipe, bundles))
    return bundles


def weight_transport(recipe: Recipe) -> Literal["host", "nccl", "ipc"]:
    """Return the transport of the policy's weights to engines: `cluster.weights`; "auto" is over devices if possible.

    "ipc" where trainers and engines share devices, "nccl" where each has its own whole devices, else "host".
    """
    transport, of_devices = recipe.cluster.weights, _device_transport(recipe, bundles_of(recipe))
    if transport == "auto":
        return "host" if recipe.train.backend == "gloo" or recipe.train.served_adapter else of_devices
    return transport


def _device_transport(recipe: Recipe, bundles: Bundles) -> Literal["host", "nccl", "ipc"]:
    cluster = recipe.cluster
    if bundles.colocated or (bundles.num_gpus and cluster.num_nodes * cluster.gpus_per_node == 1):
        return "ipc"
    return "nccl" if min((*bundles.workers, *bundles.ranks)) >= 1 else "host"


def _of_an_actor(recipe: Recipe, per_worker: float, per_rank: float) -> Iterator[str]:
    tp, cluster = recipe.rollout.tensor_parallel_size, recipe.cluster
    if per_worker and tp > 1 and per_worker != tp:
        yield f"rollout.gpus_per_worker = {per_worker:g} is not rollout.tensor_parallel_size = {tp}: leave it out"
    for name, gpus in (("rollout.gpus_per_worker", per_worker), ("train.gpus", per_rank)):
        if gpus > 1 and not gpus.is_integer():
            yield f"{name} = {gpus:g}: a whole number of GPUs, or a share of one"
    if per_worker > 1 and tp == 1:
        yield f"rollout.gpus_per_worker = {per_worker:g}: set rollout.tensor_parallel_size to use them"
    if per_rank > 1:
        yield f"train.gpus = {per_rank:g}: a trainer rank uses one GPU; raise train.ranks to use more"
    if cluster.placement == "colocated" and per_worker and (per_worker < 1 or recipe.train.gpus not in (None, 1)):
        yield "cluster.placement = 'colocated' takes whole GPUs: leave out rollout.gpus_per_worker and train.gpus"


def _of_the_cluster(recipe: Recipe, bundles: Bundles) -> Iterator[str]:
    cluster, tp, num_workers = recipe.cluster, recipe.rollout.tensor_parallel_size, recipe.rollout.num_workers
    if bundles.colocated and recipe.train.ranks != bundles.num_gpus:
        yield (
            f"train.ranks = {recipe.train.ranks}: colocated, there is one for each of the {bundles.num_gpus:g} GPUs of "
            f"{num_workers} workers x {tp}"
        )
    if cluster.weights not in ("auto", "host", _device_transport(recipe, bundles)):
        needs = "trainers and engines that share GPUs" if cluster.weights == "ipc" else "whole GPUs for each of them"
        yield f"cluster.weights = {cluster.weights!r} needs {needs}: ask for them, or take 'host' or 'auto'"
    if not cluster.gpus_per_node:
        return
    num_gpus = cluster.num_nodes * cluster.gpus_per_node
    size = f"{cluster.num_nodes} x {cluster.gpus_per_node} GPUs (cluster.num_nodes x cluster.gpus_per_node)"
    if (most := max(bundles.workers)) > cluster.gpus_per_node:
        name = "tensor_parallel_size" if recipe.rollout.tail_shape is None else "tail_shape"
        yield f"rollout.{name}: {most:g} GPUs of an engine exceed cluster.gpus_per_node = {cluster.gpus_per_node}"
    elif bundles.colocated and bundles.num_gpus != num_gpus:
        yield f"{num_workers} workers x {tp} GPUs are {bundles.num_gpus:g}; colocated, they must fill {size}"
    elif bundles.num_gpus > num_gpus + 1e-9:
        yield (
            f"workers ask for {sum(bundles.workers):g} GPUs and trainer ranks for {sum(bundles.ranks):g}, and the "
            f"cluster has {size}: take fewer, or cluster.placement = 'colocated'"
        )
    elif max(nodes_of(bundles, cluster.gpus_per_node), default=0) >= cluster.num_nodes:
        yield (
            f"rollout workers of {tp} GPUs, each on one node, and the other actors do not fit onto {size}: take "
            "fewer, or a tensor_parallel_size that divides gpus_per_node"
        )


def nodes_of(bundles: Bundles, gpus_per_node: int) -> list[int]:
    """Return the node of each bundle in `bundles.all`: the largest first, each onto the first node with room.

    The order is Ray's packing, with nodes in numeric order. With 0 GPUs per node their size is unknown: all bundles are
    on one.

    >>> nodes_of(Bundles(workers=(4.0, 4.0), ranks=(0.5, 0.5), colocated=False), 8)
    [0, 0, 1, 1]
    """
    size = gpus_per_node or sum(ceil(gpus) for gpus in bundles.all)
    nodes: list[list[float]] = []
    found: dict[int, int] = {}
    for number, gpus in sorted(enumerate(bundles.all), key=lambda bundle: -bundle[1]):
        share, count = min(gpus, 1.0), max(int(gpus), 1)
        node, own_gpus = next(
            (node, fitting[:count])
            for node, free in enumerate([*nodes, [1.0] * size])
            if len(fitting := [gpu for gpu, free_share in enumerate(free) if free_share >= share - 1e-9]) >= count
        )
        if node == len(nodes):
            nodes.append([1.0] * size)
        for gpu in own_gpus:
            nodes[node][gpu] -= share
        found[number] = node
    return [found[number] for number in sorted(found)]
