"""Places on the host for a rank's tensors while an engine has the device."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .whole import local_part

LEAST_PINNED = 1 << 20
"""Bytes from which on memory is pinned: less shares its pages with other data."""


def pinned(place: Tensor) -> Tensor:
    """Return a tensor of the host, pinned where there is a CUDA device: copies are then fast and asynchronous.

    Not by torch's `pin_memory`, which takes powers of two: up to twice as much. Where CUDA refuses, the memory remains
    as it is.
    """
    if torch.cuda.is_available() and place.nbytes >= LEAST_PINNED:
        torch.cuda.cudart().cudaHostRegister(place.data_ptr(), place.nbytes, 0)
    return place


class HostPlaces:
    """A place for each of a list of tensors, made once: later lists begin with the same tensors."""

    def __init__(self) -> None:
        self._places: list[Tensor] = []

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's parts of the tensors, in their places; all copies are under way at once."""
        for tensor in tensors[len(self._places) :]:
            self._places.append(pinned(torch.empty_like(local_part(tensor.detach()), device="cpu")))
        for place, tensor in zip(self._places, tensors, strict=True):
            place.copy_(local_part(tensor.detach()), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return list(self._places)


def with_part(tensor: Tensor, part: Tensor) -> Tensor:
    """Return a tensor sharded as `tensor` is, with this rank's `part`."""
    return DTensor(part, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else part
