"""Transfer of new weights from trainers to engines: shared memory, and the calls that go with it.

On the host rank 0 fills a bucket of shared memory with whole tensors as they are gathered, while engines load the
previous one. "nccl" and "ipc" are vLLM's own backends between devices (`vllm.transfer`). A rank holds its shards, the
tensor that is being gathered and the buckets; only the places of tensors are pickled.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import Tensor

from tltlab.errors import RunError, one_line
from tltlab.records import Json, frozen

WeightTransport = Literal["host", "nccl", "ipc"]
BUCKET_BYTES = 32 << 20
"""Bytes of a bucket; more where a single tensor takes more."""

_ALIGNED = 64


class TensorMeta(NamedTuple):
    """Name, dtype and shape of a tensor to come, as vLLM's `ParamMeta`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


TensorPlace = tuple[str, str, list[int], int]
"""Name, dtype, shape, offset in bytes."""


class WeightSource(Protocol):
    """Whole weights by Hugging Face name, one by one, any number of times; as vLLM's `WeightSource`.

    Ranks that share the weights iterate in step: gathering is a collective.
    """

    def metadata(self) -> list[TensorMeta]: ...

    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...


@frozen
class WeightBucket:
    """Places of whole tensors: (name, dtype, shape, offset) each, from byte `start` on in the memory at `path`.

    `number` counts the buckets of an update from 0. `token` identifies the memory.
    """

    path: str
    token: str
    start: int
    nbytes: int
    tensors: list[TensorPlace]
    number: int
    last: bool


class BucketSlots:
    """Memory for `num` buckets of `size` bytes, used in turn: an anonymous file that processes of this machine can map.

    It is at `path`, identified by `token`, and ends with the last process that maps it: a killed process leaves nothing
    behind, and the size of /dev/shm does not matter. A bucket takes no further tensor that would make it more than
    `full_at` bytes.
    """

    def __init__(self, size: int, num: int = 2, *, full_at: int = 0):
        self.size, self.num = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE, num
        self.full_at = full_at or size
        self.token = secrets.token_hex(8)
        self._file = os.memfd_create(f"tltlab-weights-{self.token}")
        os.ftruncate(self._file, self.size * num)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.memory = _map(self._file)

    def close(self) -> None:
        """Close the file; the memory ends with its last mapping."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def __del__(self) -> None:
        self.close()

    @classmethod
    def fit(cls, weights: Iterable[TensorMeta | Tensor], bucket_bytes: int = 0) -> BucketSlots:
        """Buckets full at `bucket_bytes`, by default BUCKET_BYTES, with room for the largest tensor."""
        full_at = bucket_bytes or BUCKET_BYTES
        return cls(max([full_at, *(tensor.nbytes for tensor in weights)]), full_at=full_at)

    def filled(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[WeightBucket]:
        """Copy tensors of at most `size` bytes in, bucket by bucket.

        Asking for the next bucket overwrites the last but `num - 1`: its reader must be done.
        """
        number, used = 0, 0
        tensors: list[TensorPlace] = []
        for name, tensor in weights:
            if tensors and used + tensor.nbytes > self.full_at:
                yield self._bucket(number, used, tensors, last=False)
                number, used, tensors = number + 1, 0, []
            start = number % self.num * self.size + used
            place = self.memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor.detach())
            tensors.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), used))
            used += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        yield self._bucket(number, used, tensors, last=True)

    def _bucket(self, number: int, used: int, tensors: list[TensorPlace], *, last: bool) -> WeightBucket:
        start = number % self.num * self.size
        return WeightBucket(
            path=self.path,
            token=self.token,
            start=start,
            nbytes=min(used, self.size),
            tensors=tensors,
            number=number,
            last=last,
        )

    def bytes_of(self, bucket: WeightBucket) -> npt.NDArray[np.uint8]:
        """Return a view of a bucket's bytes, for a machine that cannot map them."""
        return self.memory[bucket.start : bucket.start + bucket.nbytes].numpy()

    def copy_in(self, bucket: WeightBucket, data: npt.NDArray[np.uint8]) -> WeightBucket:
        """Copy `data`, a bucket of another machine, into this memory; return it as a bucket of this memory."""
        self.memory[: len(data)].numpy()[:] = data
        return replace(bucket, path=self.path, token=self.token, start=0)


class MappedMemory:
    """Memory of another process's buckets, mapped once per memory."""

    def __init__(self) -> None:
        self._token = ""
        self._memory = torch.empty(0, dtype=torch.uint8)

    def tensors(self, bucket: WeightBucket) -> list[tuple[str, Tensor]]:
        """Return views of a bucket's tensors, by name. RunError where its memory is gone."""
        if bucket.token != self._token:
            if not visible(bucket.path, bucket.token):
                raise RunError(f"the weights in {bucket.path} are gone: their trainer has ended")
            file = os.open(bucket.path, os.O_RDWR)
            try:
                self._memory, self._token = _map(file), bucket.token
            finally:
                os.close(file)
        views = []
        for name, dtype_name, shape, offset in bucket.tensors:
            dtype = getattr(torch, dtype_name)
            begin = bucket.start + offset
            end = begin + TensorMeta(name, dtype, tuple(shape)).nbytes
            views.append((name, self._memory[begin:end].view(dtype).view(shape)))
        return views

    def holds(self, tensor: Tensor) -> bool:
        """Return True if a tensor lies in this memory: the next bucket but one may overwrite it."""
        return tensor.untyped_storage().data_ptr() == self._memory.untyped_storage().data_ptr()


def visible(path: str, token: str) -> bool:
    """Return True if that memory is of this machine and still there."""
    try:
        return token in os.readlink(path)
    except OSError:
        return False


def _map(file: int) -> Tensor:
    # Map all pages at once: else each of 4 KiB is a page fault in the first update.
    memory = mmap.mmap(file, 0, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    return torch.frombuffer(memory, dtype=torch.uint8)


Calls = list[tuple[int, Any]]


class Engines:
    """Rollout workers that receive new weights, called like vLLM's `VLLMWeightSyncClient`: all live ones at once.

    A call returns when all have answered. `failed` has the error of each failed worker by number. `gpus_each`: the
    ranks of an engine.
    """

    def __init__(
        self, workers: Sequence[Any], version: int, *, transport: WeightTransport = "host", gpus_each: int = 1
    ):
        self.workers = dict(enumerate(workers))
        self.version = version
        self.transport = transport
        self.gpus_each = gpus_each
        self.failed: dict[int, str] = {}
        self.far: set[int] = set()

    @property
    def num_ranks(self) -> int:
        return len(self.workers) * self.gpus_each

    def init_weight_transfer_engine(self, init_info: Json) -> None:
        infos = self.joining(init_info)
        self.wait(
            [(n, worker.weights.remote("init", (self.transport, infos[n]))) for n, worker in self.workers.items()]
        )

    def joining(self, init_info: Json) -> dict[int, Json]:
        """Return each engine's arguments: its ranks follow those of the previous engine in one shared group."""
        if "rank_offset" not in init_info:
            return dict.fromkeys(self.workers, init_info)
        first = init_info["rank_offset"]
        return {n: init_info | {"rank_offset": first + n * self.gpus_each} for n in self.workers}

    def start_weight_update(self, memory: BucketSlots | None = None) -> None:
        """Start an update; find the workers that cannot map `memory`, which receive its contents."""
        place = None if memory is None else (memory.path, memory.token)
        visibility = self.wait(self._ask("start", place))
        self.far = {n for n, is_visible in visibility.items() if not is_visible}

    def update_weights(self, update_info: Any) -> None:
        self.wait(self._ask("device", update_info))

    def load(self, bucket: WeightBucket, data: npt.NDArray[np.uint8]) -> Calls:
        """Start loading a bucket with the contents `data`; `wait` waits for it."""
        if not self.far:
            return self._ask("bucket", bucket)
        import ray

        return self._ask("bucket", bucket, ray.put(data))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.wait(self._ask("finish", self.version))

    def _ask(self, call: str, info: Any, far: Any = None) -> Calls:
        """Call all workers; `far` goes to those that cannot map this machine's memory."""
        return [
            (n, worker.weights.remote(call, info, far if n in self.far else None)) for n, worker in self.workers.items()
        ]

    def wait(self, calls: Calls) -> dict[int, Any]:
        """Return the result of each call that did not fail, by number."""
        import ray
        from ray.exceptions import RayError

        numbers = {ref: n for n, ref in calls}
        answers = {}
        while numbers:
            # In order of completion: in an exchange between devices the others wait for a failed one.
            (ref,), _ = ray.wait(list(numbers), num_returns=1)
            n = numbers.pop(ref)
            try:
                answers[n] = ray.get(ref)
            except RayError as error:
                self.failed[n] = one_line(error)[-300:]
                self.workers.pop(n, None)
                if self.transport == "nccl":
                    # This process waits in a collective that never ends; only exiting gets it out.
                    print(f"a rollout worker failed in the transfer of weights: {self.failed[n]}", file=sys.stderr)
                    os._exit(1)
        return answers


def load_buckets(weights: Iterable[tuple[str, Tensor]], slots: BucketSlots, engines: Engines) -> None:
    """Fill a bucket while engines, whose update has started, load the previous one; then end the update."""
    previous: Calls = []
    for bucket in slots.filled(weights):
        calls = engines.load(bucket, slots.bytes_of(bucket))
        engines.wait(previous)
        previous = calls
    engines.wait(previous)
    engines.finish_weight_update()


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], alpha: int, model: str) -> None:
    """Write LoRA adapters of `model`, by peft's names, as a folder in its format."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "r": next(tensor.shape[0] for name, tensor in tensors.items() if ".lora_A." in name),
        "lora_alpha": alpha,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=1))
