"""Placement of a run's actors: bundles of GPUs that Ray reserves, and the options that put an actor into its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tltlab.errors import ConfigError
from tltlab.runtime.recipe.gpus import Bundles, bundles_of
from tltlab.runtime.recipe.planner import engine_gpus
from tltlab.runtime.recipe.recipe import Recipe

READY_S = 30.0
"""Most seconds for Ray to reserve existing GPUs: those of a run that just ended are not free at once."""


ActorOptions = dict[str, Any]
"""Arguments of Ray's `Actor.options`; "env_vars" belongs into its `runtime_env`."""


class GpuPlacement:
    """The GPUs of a run, reserved while the context lasts; Ray must be running.

    A bundle lies on one node, so tensor parallelism never crosses nodes. Separate actors take their bundle's GPUs from
    Ray. Colocated ones share them: one holder per bundle takes the GPUs, and worker and ranks run in the same bundle
    with num_gpus 0 and CUDA_VISIBLE_DEVICES set to what the holder was given. Without GPUs nothing is reserved: actors
    take no logical CPUs, so any number of them starts on any machine; on several nodes they spread.

    ConfigError, at once or within `READY_S` seconds, where the cluster lacks what the recipe asks for.
    """

    def __init__(self, recipe: Recipe):
        self.bundles: Bundles = bundles_of(recipe)
        # Several actors may have the same GPUs.
        self._shares = self.bundles.colocated or (recipe.rollout.tail_shape is not None and bool(self.bundles.all))
        self._gpus = engine_gpus(recipe)
        self.num_nodes = recipe.cluster.num_nodes
        self._group: PlacementGroup | None = None
        self._holders: list[Any] = []
        self._visible: list[list[str]] = []

    def __enter__(self) -> GpuPlacement:
        if not self.bundles.all:
            return self
        self._check()
        self._group = placement_group([{"GPU": gpus} for gpus in self.bundles.all], strategy="PACK")
        try:
            if not self._group.wait(timeout_seconds=READY_S):
                raise ConfigError(self._missing(f"are not free within {READY_S:g} s"))
            if self._shares:
                self._hold()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def worker_options(self, number: int) -> ActorOptions:
        """Return `Actor.options` for rollout worker `number`; "env_vars" belongs into its runtime_env."""
        if not self._shares:
            return self._options(number, self.bundles.workers[0])
        gpus = self._gpus[number]
        bundle, first = self.bundles.place_of(gpus[0])
        return self._options(bundle, 0, self._visible[bundle][first : first + len(gpus)])

    def trainer_options(self, rank: int) -> ActorOptions:
        """Return the same for trainer rank `rank`."""
        if self.bundles.colocated:
            bundle, gpu = self.bundles.place_of(rank)
            return self._options(bundle, 0, [self._visible[bundle][gpu]])
        return self._options(sum(1 for num_gpus in self.bundles.workers if num_gpus) + rank, self.bundles.ranks[rank])

    def close(self) -> None:
        """Release the GPUs; actors that still run in a bundle are ended."""
        for holder in self._holders:
            ray.kill(holder)
        if self._group is not None:
            remove_placement_group(self._group)
        self._group, self._holders, self._visible = None, [], []

    def _options(self, bundle: int, gpus: float, visible: Sequence[str] = ()) -> ActorOptions:
        """Return options of an actor that has GPUs to itself, sees those of a bundle, or has none."""
        env = {}
        if visible:
            # For an actor without GPUs Ray keeps the variable unless this override empties it.
            env = {"CUDA_VISIBLE_DEVICES": ",".join(visible), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        anywhere = "SPREAD" if self.num_nodes > 1 else "DEFAULT"
        strategy = self._in(bundle) if gpus or visible else anywhere
        return {"num_cpus": 0, "num_gpus": gpus, "scheduling_strategy": strategy, "env_vars": env}

    def _in(self, bundle: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(
            placement_group=self._group,
            placement_group_bundle_index=bundle,
            # Otherwise children of an actor, such as a drafter's trainer, would be bound to the group's GPUs too.
            placement_group_capture_child_tasks=False,
        )

    def _hold(self) -> None:
        self._holders = [
            _Holder.options(  # type: ignore[attr-defined]
                num_cpus=0, num_gpus=gpus, scheduling_strategy=self._in(bundle)
            ).remote()
            for bundle, gpus in enumerate(self.bundles.workers)
        ]
        try:
            self._visible = ray.get([holder.visible.remote() for holder in self._holders], timeout=READY_S)
        except GetTimeoutError as error:
            raise ConfigError(f"Ray did not start the holders of GPUs within {READY_S:g} s") from error

    def _check(self) -> None:
        """Raise ConfigError where the cluster, all its GPUs free, would not do."""
        nodes = [node for node in ray.nodes() if node["Alive"]]
        if len(nodes) < self.num_nodes:
            raise ConfigError(f"cluster.num_nodes = {self.num_nodes}, and Ray has {len(nodes)} nodes")
        sizes = [node["Resources"].get("GPU", 0) for node in nodes]
        if self.bundles.num_gpus > sum(sizes) + 1e-9 or max(self.bundles.all) > max(sizes):
            raise ConfigError(self._missing("are more than that"))

    def _missing(self, why: str) -> str:
        sizes = sorted((node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]), reverse=True)
        workers, ranks = self.bundles.workers, self.bundles.ranks
        demand = f"{len(workers)} rollout workers of {workers[0]:g} GPUs"
        if ranks:
            demand += f" and {len(ranks)} trainer ranks of {ranks[0]:g}"
        return f"Ray's nodes have {', '.join(f'{size:g}' for size in sizes)} GPUs, and {demand} {why}"


@ray.remote
class _Holder:
    """Keeps a bundle's GPUs for the actors that share them."""

    def visible(self) -> list[str]:
        """Return the GPUs by the names of CUDA_VISIBLE_DEVICES."""
        return os.environ["CUDA_VISIBLE_DEVICES"].split(",")
