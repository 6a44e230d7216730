"""How long weights take from a trainer to an engine by way of the host, beside one copy of them in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import ray
import torch

from bench.harness import Progress, Table, Text, in_turn, seconds_of, shown
from tltlab import hardware
from tltlab.errors import RunError
from tltlab.runtime.engine.weights import (
    BUCKET_BYTES,
    Engines,
    Home,
    Mapped,
    TensorMeta,
    WeightBucket,
    WeightSender,
    visible,
)
from tltlab.runtime.ray.start import start_ray
from tltlab.stats import interval_json, paired_interval

SHAPE = "Qwen2.5-0.5B"
LARGEST_COPY_BYTES = 1 << 30
"""Memory that the copy goes into, again and again: more than caches hold."""


def tensors_of(num_bytes: float) -> list[TensorMeta]:
    """Those of a model in bfloat16 with as many layers as come to so many bytes at least, by Hugging Face name."""
    m = hardware.model(SHAPE)
    width, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
    layer = {
        "self_attn.q_proj": (width, m.hidden), "self_attn.k_proj": (kv, m.hidden), "self_attn.v_proj": (kv, m.hidden),
        "self_attn.o_proj": (m.hidden, width), "mlp.gate_proj": (m.intermediate, m.hidden),
        "mlp.up_proj": (m.intermediate, m.hidden), "mlp.down_proj": (m.hidden, m.intermediate),
        "input_layernorm": (m.hidden,), "post_attention_layernorm": (m.hidden,),
    }  # fmt: skip
    tensors = [TensorMeta("model.embed_tokens.weight", torch.bfloat16, (m.vocab, m.hidden))]
    layers = 0
    while sum(tensor.nbytes for tensor in tensors) < num_bytes:
        tensors += [TensorMeta(f"model.layers.{layers}.{n}.weight", torch.bfloat16, size) for n, size in layer.items()]
        layers += 1
    return tensors


@ray.remote(num_cpus=0)
class Reader:
    """An engine's side without the engine: it copies each tensor to where its own is, as vLLM's loaders do."""

    def __init__(self, tensors: Sequence[TensorMeta]) -> None:
        torch.set_num_threads(1)
        self.mapped = Mapped()
        self.tensors = {meta.name: torch.zeros(meta.shape, dtype=meta.dtype) for meta in tensors}

    def weights(self, call: str, info: Any, data: Any = None) -> bool:
        """`RolloutWorker.weights`."""
        if call == "start":
            return visible(*info)
        if call == "bucket":
            assert isinstance(info, WeightBucket)
            for name, tensor in self.mapped.tensors(info):
                self.tensors[name].copy_(tensor)
        elif call == "finish":
            # As an engine does.
            self.mapped = Mapped()
        return True

    def sums(self) -> list[int]:
        return [_sum(tensor) for tensor in self.tensors.values()]


def _sum(tensor: torch.Tensor) -> int:
    return int(tensor.view(torch.int16).sum(dtype=torch.int64))


class Weights:
    """A `weights.WeightSource` of tensors that lie there."""

    def __init__(self, metas: Sequence[TensorMeta]) -> None:
        noise = torch.randint(-(2**14), 2**14, (1 << 20,), dtype=torch.int16)
        self.metas = list(metas)
        self.tensors = {meta.name: torch.empty(meta.shape, dtype=meta.dtype) for meta in metas}
        for number, tensor in enumerate(self.tensors.values()):
            flat = tensor.view(torch.int16).view(-1)
            for begin in range(0, len(flat), len(noise)):
                flat[begin : begin + len(noise)] = noise[: len(flat) - begin] + number

    def metadata(self) -> list[TensorMeta]:
        return self.metas

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())


def bench_weights(gigabytes: Sequence[float], *, rounds: int, progress: Progress) -> dict[str, Any]:
    """Two transfers and a copy in turn, `rounds` times for each size after one that warms up; seconds and ratios.

    "in place": weights live in memory that the reader maps, as those of a trainer's only rank on a CPU do. "buckets":
    they are copied into buckets first, as are those that ranks gather. Takes twice the largest size in memory, and 1
    GiB for the copy. RunError where what came is not what was sent.
    """
    torch.set_num_threads(1)
    started = start_ray()
    try:
        rows = []
        for size in gigabytes:
            rows += _measured(tensors_of(size * 1e9), rounds)
            progress(shown({"rows": rows[-2:]}, TEXT))
    finally:
        if started:
            ray.shutdown()
    return {"rounds": rounds, "bucket_bytes": BUCKET_BYTES, "shape": SHAPE, "rows": rows}


def _measured(metas: Sequence[TensorMeta], rounds: int) -> list[dict[str, Any]]:
    weights = Weights(metas)
    home = Home(weights.tensors.values())
    senders = {"in place": WeightSender(weights, 0, home), "buckets": WeightSender(weights, 0)}
    num_bytes = sum(meta.nbytes for meta in metas)
    target = torch.zeros(min(num_bytes, LARGEST_COPY_BYTES) // 2, dtype=torch.bfloat16)
    reader = Reader.remote(metas)  # type: ignore[attr-defined]
    expected = [_sum(tensor) for tensor in weights.tensors.values()]

    def copied() -> None:
        at = 0
        for tensor in weights.tensors.values():
            at = at if at + tensor.numel() <= len(target) else 0
            target[at : at + tensor.numel()].view(tensor.shape).copy_(tensor)
            at += tensor.numel()

    def sent(way: str) -> None:
        engines = Engines([reader], 1)
        if failed := senders[way].send(engines):
            raise RunError(f"the reader failed: {failed[0]}")

    def measure(name: str, number: int) -> float:
        took_s = seconds_of(copied) if name == "copy" else seconds_of(sent, name)
        if number < 0 and name != "copy" and ray.get(reader.sums.remote()) != expected:
            raise RunError("what came is not what was sent")
        return took_s

    seconds = in_turn(("copy", *senders), measure, rounds)
    ray.kill(reader)
    return [
        {
            "bytes": num_bytes, "tensors": len(metas), "way": way, "transfer_s": seconds[way],
            "copy_s": seconds["copy"],
            "ratio": interval_json(paired_interval(seconds[way], seconds["copy"], rng=np.random.default_rng(0))),
        }
        for way in senders
    ]  # fmt: skip


TEXT: Text = (
    Table(
        "rows",
        "weights: {bytes:1e-9*.2f} GB; way: {way}; to an engine s: {transfer_s:.3f}; one copy s: {copy_s:.3f}; "
        "ratio: {ratio}",
        left=2,
    ),
)
