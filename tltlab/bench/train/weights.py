"""How long weights take from a trainer to an engine by way of the host, beside one copy of them in memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import ray
import torch

from tltlab import hardware
from tltlab.console import table
from tltlab.errors import RunError
from tltlab.runtime.engine.weights import (
    BUCKET_BYTES,
    Bucket,
    Engines,
    Mapped,
    Slots,
    TensorMeta,
    send_buckets,
    visible,
)
from tltlab.runtime.ray.start import start_ray
from tltlab.stats import interval_json, paired_interval

WARM_UP = 1
SHAPE = "Qwen2.5-0.5B"
LARGEST_COPY_BYTES = 1 << 30
"""Memory that the copy goes into, again and again: more than caches hold."""


def tensors_of(num_bytes: float, shape: str = SHAPE) -> list[TensorMeta]:
    """Those of a model in bfloat16 with as many layers as come to so many bytes at least, by Hugging Face name."""
    m = hardware.model(shape)
    width, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
    layer = {
        "self_attn.q_proj": (width, m.hidden), "self_attn.k_proj": (kv, m.hidden), "self_attn.v_proj": (kv, m.hidden),
        "self_attn.o_proj": (m.hidden, width), "mlp.gate_proj": (m.intermediate, m.hidden),
        "mlp.up_proj": (m.intermediate, m.hidden), "mlp.down_proj": (m.hidden, m.intermediate),
        "input_layernorm": (m.hidden,), "post_attention_layernorm": (m.hidden,),
    }  # fmt: skip
    found = [TensorMeta("model.embed_tokens.weight", torch.bfloat16, (m.vocab, m.hidden))]
    layers = 0
    while sum(tensor.nbytes for tensor in found) < num_bytes:
        found += [TensorMeta(f"model.layers.{layers}.{n}.weight", torch.bfloat16, size) for n, size in layer.items()]
        layers += 1
    return found


@ray.remote(num_cpus=0)
class Reader:
    """An engine's side without the engine: it copies each tensor to where its own is, as vLLM's loaders do."""

    def __init__(self, tensors: Sequence[TensorMeta]) -> None:
        torch.set_num_threads(1)
        self.mapped = Mapped()
        self.own = {meta.name: torch.zeros(meta.shape, dtype=meta.dtype) for meta in tensors}

    def weights(self, call: str, info: Any, data: Any = None) -> bool:
        """`RolloutWorker.weights`."""
        if call == "start":
            return visible(*info)
        if call == "bucket":
            assert isinstance(info, Bucket)
            for name, tensor in self.mapped.tensors(info):
                self.own[name].copy_(tensor)
        return True

    def sums(self) -> list[int]:
        return [_sum(tensor) for tensor in self.own.values()]


def _sum(tensor: torch.Tensor) -> int:
    return int(tensor.view(torch.int16).sum(dtype=torch.int64))


def bench_weights(
    gigabytes: Sequence[float], *, rounds: int, bucket_bytes: int = BUCKET_BYTES, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Transfer and copy in turn, `rounds` times for each size after one that warms up; seconds and their ratio.

    Takes twice the largest size in memory, and a copy of 1 GiB. RunError where what came is not what was sent.
    """
    torch.set_num_threads(1)
    started = start_ray()
    try:
        rows = []
        for size in gigabytes:
            rows.append(_measured(size, rounds, bucket_bytes))
            progress(f"{size:g} GB: {rows[-1]['ratio']['estimate']:.2f} times a copy")
    finally:
        if started:
            ray.shutdown()
    return {"rounds": rounds, "bucket_bytes": bucket_bytes, "shape": SHAPE, "rows": rows}


def _measured(gigabytes: float, rounds: int, bucket_bytes: int) -> dict[str, Any]:
    metas = tensors_of(gigabytes * 1e9)
    noise = torch.randint(-(2**14), 2**14, (1 << 20,), dtype=torch.int16)
    weights = {}
    for number, meta in enumerate(metas):
        weights[meta.name] = torch.empty(meta.shape, dtype=meta.dtype)
        flat = weights[meta.name].view(torch.int16).view(-1)
        for begin in range(0, len(flat), len(noise)):
            flat[begin : begin + len(noise)] = noise[: len(flat) - begin] + number
    num_bytes = sum(meta.nbytes for meta in metas)
    target = torch.zeros(min(num_bytes, LARGEST_COPY_BYTES) // 2, dtype=torch.bfloat16)
    reader = Reader.remote(metas)  # type: ignore[attr-defined]
    transfers, copies = [], []
    with closing(Slots.fit(metas, bucket_bytes)) as slots:
        for _ in range(WARM_UP + rounds):
            begun = time.perf_counter()
            engines = Engines([reader], 1)
            send_buckets(weights.items(), slots, engines)
            transfers.append(time.perf_counter() - begun)
            if engines.failed:
                raise RunError(f"the reader failed: {engines.failed[0]}")
            begun, at = time.perf_counter(), 0
            for tensor in weights.values():
                at = at if at + tensor.numel() <= len(target) else 0
                target[at : at + tensor.numel()].view(tensor.shape).copy_(tensor)
                at += tensor.numel()
            copies.append(time.perf_counter() - begun)
    if ray.get(reader.sums.remote()) != [_sum(tensor) for tensor in weights.values()]:
        raise RunError("what came is not what was sent")
    ray.kill(reader)
    transfers, copies = transfers[WARM_UP:], copies[WARM_UP:]
    ratio = paired_interval(transfers, copies, rng=np.random.default_rng(0))
    return {
        "bytes": num_bytes, "tensors": len(metas), "transfer_s": transfers, "copy_s": copies,
        "ratio": interval_json(ratio),
    }  # fmt: skip


def text(found: dict[str, Any]) -> str:
    """The result for people: a row for each size."""
    rows = []
    for row in found["rows"]:
        ratio = row["ratio"]
        seconds = (sum(row[name]) / len(row[name]) for name in ("transfer_s", "copy_s"))
        span = "" if ratio["low"] is None else f" [{ratio['low']:.2f}, {ratio['high']:.2f}]"
        rows.append((f"{row['bytes'] / 1e9:.2f} GB", *(f"{s:.3f}" for s in seconds), f"{ratio['estimate']:.2f}{span}"))
    return table(("weights", "to an engine s", "one copy s", "ratio"), rows)
