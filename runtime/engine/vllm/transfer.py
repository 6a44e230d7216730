"""Weight updates in engines: in buckets of shared memory, or over one of vLLM's own backends.

Also the trainer's side of these backends: NCCL between devices, CUDA IPC where both are on the same one.
"""

import socket
from dataclasses import dataclass, field
from typing import Any

import torch

from tltlab.errors import RunError
from tltlab.records import Json
from tltlab.runtime.engine.weights import Engines, MappedMemory, WeightBucket, WeightSource, WeightTransport

from . import missing, starting

LOCAL_BACKEND = "tltlab-local"
FIRST_RANK = 1
"""First rank of the engines, in a group that they share with the trainer's rank 0."""

DEVICE_BUCKET_BYTES = 256 << 20
"""Bytes of a bucket on a device with models; vLLM's default is 1 GiB."""


def register_backend() -> None:
    """Let vLLM find `LOCAL_BACKEND`. Safe to call twice."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if LOCAL_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(LOCAL_BACKEND, local_weight_transfer())


def local_weight_transfer() -> type:
    """Return the class that loads weights in every engine: those in a `bucket`, or over a `device`.

    A `device` update uses the backend of vLLM's that `init_info` names. Loading goes layer by layer as in vLLM's own
    backends: the CPU build empties the checkpoint-layout weights after packing them, so a plain `load_weights` finds
    nothing to load into.
    """
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    @dataclass
    class LocalInit(WeightTransferInitInfo):
        backend: str = ""
        info: Json = field(default_factory=dict)

    @dataclass
    class LocalUpdate(WeightTransferUpdateInfo):
        bucket: Any = None
        device: Json | None = None

    class LocalWeightTransfer(WeightTransferEngine):
        init_info_cls = LocalInit
        update_info_cls = LocalUpdate

        def __init__(self, *args):
            super().__init__(*args)
            self._mapped = MappedMemory()
            self._device: Any = None
            self._next_bucket = 0
            self._on_device = False

        def init_transfer_engine(self, init_info: LocalInit) -> None:
            if not init_info.backend:
                return
            # The previous one may wait for a dead peer: it is left unchanged.
            self._device = WeightTransferEngineFactory.create_engine(
                WeightTransferConfig(backend=init_info.backend), self.vllm_config, self.device, self.model
            )
            self._device.init_transfer_engine(self._device.parse_init_info(init_info.info))

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)
            self._next_bucket, self._on_device = 0, False

        def receive_weights(self, update_info: LocalUpdate) -> None:
            with torch.no_grad():
                if update_info.device is not None:
                    self._on_device = True
                    self._device.set_weight_update_target(self.model, self.model_config)
                    self._device.receive_weights(self._device.parse_update_info(update_info.device))
                else:
                    self._load_bucket(WeightBucket(**update_info.bucket))

        def _load_bucket(self, bucket: WeightBucket) -> None:
            if bucket.number != self._next_bucket:
                raise ValueError(f"bucket {bucket.number} came where {self._next_bucket} is next")
            self.model.load_weights(self._mapped.tensors(bucket))
            for layer in self.model.modules():
                # A tensor that a layer keeps until it is complete must not lie in memory that a later bucket
                # overwrites.
                for _, call in get_layerwise_info(layer).loaded_weights:
                    for name, value in call.arguments.items():
                        if isinstance(value, torch.Tensor) and self._mapped.holds(value):
                            call.arguments[name] = value.clone()
            self._next_bucket = -1 if bucket.last else bucket.number + 1

        def finish_weight_update(self) -> None:
            if self._next_bucket > 0:
                raise ValueError(f"the weights ended before bucket {self._next_bucket}")
            for name, layer in self.model.named_modules():
                info = get_layerwise_info(layer)
                total = info.load_numel_total or 0
                if isinstance(getattr(layer, "quant_method", None), UnquantizedLinearMethod) and (
                    info.can_load() and 0 < info.load_numel < total
                ):
                    # vLLM would fill the rest with uninitialised memory.
                    raise ValueError(f"{name} got {info.load_numel} of its {total} numbers")
            if self._on_device:
                self._device.finish_weight_update()
            else:
                finalize_layerwise_reload(self.model, self.model_config)
            # Release the memory of a trainer that has ended.
            self._mapped = MappedMemory()

        def shutdown(self) -> None:
            if self._device is not None:
                self._device.shutdown()

    return LocalWeightTransfer


class DeviceSender:
    """A trainer rank's side of vLLM's backends; the group is formed anew whenever the set of engines changes."""

    def __init__(self, source: WeightSource, rank: int, transport: WeightTransport):
        self.source, self.rank, self.transport = source, rank, transport
        self._members: tuple[Any, ...] = ()
        self._sender: Any = None

    def send(self, engines: Engines) -> None:
        members = tuple(worker._actor_id for worker in engines.workers.values())
        if members != self._members:
            # An older group is left unchanged: ending it waits for members, which may be dead.
            self._sender = self._join(engines)
            self._members = members
        self._sender.client = engines
        self._sender.send_weights()

    def _join(self, engines: Engines):
        with starting():
            if without := missing("weights over NCCL and IPC"):
                raise RunError(f"{without}: set cluster.weights to host")
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine
            from vllm.distributed.weight_transfer.nccl_engine import (
                NCCLTrainerInitInfo,
                NCCLTrainerWeightTransferEngine,
            )

        largest = max(tensor.nbytes for tensor in self.source.metadata())
        # This class has all that vLLM uses of a `WeightSource`.
        source: Any = self.source
        if self.transport == "ipc":
            # A bucket must hold the largest tensor: no tensor is split.
            ipc = IPCTrainerInitInfo(
                rank=self.rank, packed=True, packed_buffer_size_bytes=max(largest, DEVICE_BUCKET_BYTES)
            )
            return IPCTrainerWeightTransferEngine.trainer_init(ipc, client=engines, source=source)
        address, port = _meeting_point() if self.rank == 0 else ("", 0)
        nccl = NCCLTrainerInitInfo(
            address, port, FIRST_RANK + engines.num_ranks, rank=self.rank, packed_buffer_size_bytes=DEVICE_BUCKET_BYTES
        )
        return NCCLTrainerWeightTransferEngine.trainer_init(nccl, client=engines, source=source)


def _meeting_point() -> tuple[str, int]:
    import ray

    address = ray.util.get_node_ip_address()
    with socket.socket() as free:
        free.bind((address, 0))
        return address, free.getsockname()[1]
