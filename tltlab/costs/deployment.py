"""GPUs with a model on them: costs of the rollout workers and of the other stages of an RL step."""

from __future__ import annotations

import re

from tltlab.errors import ConfigError
from tltlab.hardware import MEMORY_FRACTION, Gpu, ModelShape, kv_capacity_tokens
from tltlab.hardware import model as find_shape
from tltlab.records import frozen

from .profiles import find_gpu, find_model, listed, profile_costs
from .roofline import RooflineCosts
from .stages import RooflineStages, StageCosts

GPUS = "8xH100"
MODEL = "Qwen2.5-7B"
"""Default GPUs and model of a question that names only one of them."""


@frozen
class Deployment:
    """GPUs with a model on them: costs of one rollout worker of `costs.tp` GPUs, and of the other stages."""

    name: str
    num_gpus: int
    costs: RooflineCosts
    stages: StageCosts
    engine: str | None
    device: Gpu
    model: ModelShape

    @classmethod
    def of(
        cls,
        gpus: str | None = None,
        model: str | ModelShape | None = None,
        *,
        engine: str | None = None,
        tp: int | None = None,
        tokens: int = 0,
    ) -> Deployment:
        """Return the deployment for `gpus` such as 8xH100 or 8H100, and a model's name, `config.json` or its folder.

        `gpus` and `model` default to `GPUS` and `MODEL`.

        The engine is `profiles.ENGINE` unless one is named. A worker has the fewest GPUs that hold the weights and a
        request of `tokens`. Raises ConfigError for what is unknown or does not fit.
        """
        gpus = GPUS if gpus is None else gpus
        several = re.fullmatch(r"([1-9]\d*)x?(\D.*)", gpus)
        num_gpus, device = (int(several[1]), find_gpu(several[2])) if several else (1, find_gpu(gpus))
        shape = find_model(MODEL if model is None else model)
        if 0 < shape.max_context < tokens:
            raise ConfigError(
                f"a prompt and its response have up to {tokens:,} tokens, {shape.name} takes {shape.max_context:,} "
                "(max_position_embeddings of its config.json): lower the cap, or raise it there, as for scaled RoPE"
            )
        sizes = [n for n in range(1, num_gpus + 1) if num_gpus % n == 0 and n & (n - 1) == 0]
        if tp is not None:
            if tp < 1 or num_gpus % tp:
                raise ConfigError(f"{num_gpus} GPUs are no whole number of workers of {tp} GPUs")
            sizes = [tp]
        fault = ConfigError(f"{shape.name} and a request of {tokens} tokens do not fit on {num_gpus} x {device.name}")
        for size in sizes:
            try:
                costs = profile_costs(engine, device, shape, size)
            except ConfigError as error:
                fault = error
                continue
            if costs.kv_capacity_tokens is None or costs.kv_capacity_tokens >= tokens:
                break
        else:
            raise fault
        stages = RooflineStages(kind="roofline", gpu=listed(device), model=listed(shape), num_gpus=num_gpus)
        return cls(
            name=f"{shape.name} on {num_gpus} x {device.name}",
            num_gpus=num_gpus,
            costs=costs,
            stages=stages.build(),
            engine=engine,
            device=device,
            model=shape,
        )

    def at(self, tp: int) -> RooflineCosts:
        """Costs of an engine of `tp` of the same GPUs, which hold the weights of both.

        ConfigError where it does not divide the heads, and where the weights do not fit beside each other.
        """
        if self.model.heads % tp:
            raise ConfigError(f"{tp} GPUs do not divide the {self.model.heads} heads of {self.model.name}")
        costs = profile_costs(self.engine, self.device, self.model, tp)
        beside = self.model.stored_bytes(costs.weights) / self.costs.tp / self.device.memory_bytes
        room = MEMORY_FRACTION - beside
        room_tokens = kv_capacity_tokens(self.device, self.model, tp, room, weights=costs.weights, kv=costs.kv)
        return costs.model_copy(update={"kv_capacity_tokens": room_tokens})

    @property
    def workers(self) -> int:
        return self.num_gpus // self.costs.tp

    @property
    def assumed(self) -> tuple[str, ...]:
        """Assumptions about the stages outside the rollout; empty for a dense model."""
        if not find_shape(self.costs.model).experts:
            return ()
        return (
            "RL steps of mixtures of experts do not follow from the data sheets: exchange of tokens between GPUs and "
            "uneven experts are left out of training and log-probs; give measured --stages",
        )
