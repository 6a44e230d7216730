"""Tensors of a model, each gathered from the ranks that share it, and the model's decoder layers."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from tltlab.runtime.engine.weights import TensorMeta


class WholeTensors:
    """Parameters and persistent buffers of a model by name, gathered one by one; floating ones in `dtype`.

    Tied tensors come once. All ranks of a sharded model iterate in step, and each gets the gathered tensor, on its
    device. A `weights.WeightSource`.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype):
        self._module, self._dtype = module, dtype

    def metadata(self) -> list[TensorMeta]:
        """Describe the tensors to come, without gathering them."""
        return [TensorMeta(name, self._dtype_of(tensor), tuple(tensor.shape)) for name, tensor in self._tensors()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors():
            yield name, self._whole(name, tensor.detach(), self._dtype_of(tensor))

    def _whole(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        # Ranks send each other what engines get: in bfloat16 half of what they hold.
        return whole_tensor(tensor.to(dtype))

    def _state(self) -> dict[str, Tensor]:
        return self._module.state_dict(keep_vars=True)

    def _tensors(self) -> list[tuple[str, Tensor]]:
        state = self._state()
        first = {id(tensor): name for name, tensor in reversed(state.items())}
        return [(name, tensor) for name, tensor in state.items() if first[id(tensor)] == name]

    def _dtype_of(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if tensor.is_floating_point() else tensor.dtype


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return a sharded tensor gathered, any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, any other whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers of a Hugging Face model."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
