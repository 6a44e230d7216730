"""Low-rank adapters (LoRA, arXiv 2106.09685) of a policy, by `peft`: they are trained, and the base stands still."""

from itertools import chain
from typing import Any

import peft
import torch
import torch.distributed as dist
from peft.helpers import rescale_adapter_scale
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tltlab.errors import ConfigError, one_line
from tltlab.runtime.recipe.sections import LoraConfig

from .whole import WholeTensors, decoder_layers, local_part, whole_tensor

_NAME = "default"
"""peft's name of the only adapter."""


def add_adapters(network: nn.Module, config: LoraConfig, model: str) -> None:
    """Add adapters to `network`, in place; all else is frozen. ConfigError as `targets_of`.

    The second matrix of each is 0: the model computes what it did.
    """
    targets = targets_of(network, config, model)
    settings = peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets)
    peft.inject_adapter_in_model(settings, network, adapter_name=_NAME)


def targets_of(network: nn.Module, config: LoraConfig, model: str) -> list[str]:
    """Return the names of the linear modules to adapt. ConfigError for one that no decoder layer of `network` has."""
    parts = chain.from_iterable(layer.named_modules() for layer in decoder_layers(network))
    found = sorted({name.rpartition(".")[2] for name, part in parts if isinstance(part, nn.Linear)})
    targets = found if config.targets == "all-linear" else list(config.targets)
    if not targets or set(targets) - set(found):
        raise ConfigError(
            f"train.lora.targets = {config.targets}: the linear modules in layers of {model} are "
            f"{', '.join(found) or 'none'}"
        )
    return targets


def outline(model: str) -> nn.Module:
    """Return the network of a model's folder without weights. ConfigError where there is none."""
    try:
        with torch.device("meta"):
            network: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read a model from {model}: {one_line(error)[:300]}") from error
    return network


def base_sum(module: nn.Module) -> int:
    """Return a sum over the bits of all frozen weights, the same for any number of ranks that share them."""
    frozen = [local_part(p.detach()) for p in module.parameters() if not p.requires_grad]
    total = torch.stack([n * part.view(torch.int32).sum() for n, part in enumerate(frozen, start=1)]).sum()
    if dist.is_initialized():
        dist.all_reduce(total)
    return int(total)


class BasePolicy(nn.Module):
    """A policy without its adapters, called as the policy is; it has no tensors of its own."""

    def __init__(self, policy: nn.Module):
        super().__init__()
        self._policy = (policy,)  # in a tuple, so that it is no submodule

    def forward(self, *args: Any, **options: Any) -> Tensor:
        (policy,) = self._policy
        with rescale_adapter_scale(policy, 0.0):
            result: Tensor = policy(*args, **options)
        return result


class MergedTensors(WholeTensors):
    """A model's tensors with its adapters merged in, by the names that they have without adapters."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, *, touched: bool = False):
        super().__init__(module, dtype)
        self._adapted: dict[str, Any] = {
            name: part for name, part in module.named_modules() if isinstance(part, LoraLayer)
        }
        # Engines fuse the matrices of a block, such as q, k and v, and need all of them.
        self._blocks = {name.rpartition(".")[0] for name in self._adapted} if touched else None

    def _state(self) -> dict[str, Tensor]:
        state = {name.replace(".base_layer.", "."): tensor for name, tensor in super()._state().items()}
        return {
            name: tensor
            for name, tensor in state.items()
            if ".lora_" not in name and (self._blocks is None or name.rsplit(".", 2)[0] in self._blocks)
        }

    def _whole(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        layer = self._adapted.get(name.removesuffix(".weight"))
        if layer is None:
            return super()._whole(name, tensor, dtype)
        a, b = (whole_tensor(part[_NAME].weight.detach()) for part in (layer.lora_A, layer.lora_B))
        return torch.addmm(whole_tensor(tensor), b, a, alpha=layer.scaling[_NAME]).to(dtype)


class AdapterTensors(WholeTensors):
    """A model's adapters alone, by their names in peft's files."""

    def _state(self) -> dict[str, Tensor]:
        state = super()._state().items()
        return {f"base_model.model.{name.replace(f'.{_NAME}.', '.')}": p for name, p in state if ".lora_" in name}
