"""Measured kernel times of one GPU, and what a forward pass takes by them.

Three files in a folder, bf16: `gemm_bf16.parquet` (gpu, m, n, k, latency_ms), `decode_attention_bf16.parquet` (gpu,
batch_size, num_heads, num_key_value_heads, step, latency_ms; one query per request over `step` past tokens, heads of
128) and `allreduce_bf16.parquet` (gpu, num_gpus, message_size, latency_ms, kernel_source; the size counts values). They
are extracts of the tables of AIConfigurator (Apache-2.0), which gives them per system and engine version.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.interpolate import RegularGridInterpolator

from tltlab.arrays import Floats
from tltlab.costs.roofline import rounded_max
from tltlab.costs.table import KNEE
from tltlab.errors import ConfigError
from tltlab.hardware import BYTES_PER_VALUE, Gpu, ModelShape, gpu, per_gpu_heads

from .measurements import measured_table

_GRAPH = "vLLM_custom_graph"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kernels:
    """The tables of one GPU.

    Matrix products are interpolated by utilisation in the logarithms of m, n and k, constant beyond the grid.
    Attention is interpolated by time, linear in the batch and in the past tokens, and continues with its last slopes.
    """

    gpu: Gpu
    tokens: Floats
    n: Floats
    k: Floats
    gemm: Floats  # (tokens, n, k) seconds
    batches: Floats
    past: Floats
    attention: dict[tuple[int, int], Floats]  # (heads, kv heads) -> (batches, past) seconds
    reduce: dict[int, tuple[Floats, Floats]]  # GPUs -> values, seconds

    @classmethod
    @cache
    def read(cls, data: Path, gpu_name: str) -> Kernels:
        """The tables of the GPU of that name, read once; ConfigError where `data` has none of it."""
        device = gpu(gpu_name)
        gemm = _rows(data, "gemm_bf16.parquet", device, ("m", "n", "k"))
        shape_columns = ("batch_size", "num_heads", "num_key_value_heads", "step")
        attention = _rows(data, "decode_attention_bf16.parquet", device, shape_columns)
        reduce = _rows(data, "allreduce_bf16.parquet", device, ("num_gpus", "message_size"), ("kernel_source",))
        reduce = reduce[reduce["kernel_source"] == _GRAPH].sort_values("message_size")
        (tokens, n, k), times = _grid(gemm, ["m", "n", "k"])
        shapes = {}
        cells = ["batch_size", "step"]
        axes, _ = _grid(attention.drop_duplicates(cells), cells)
        by = ["num_heads", "num_key_value_heads"]
        for _, rows in attention.groupby(by):
            heads, kv_heads = map(int, rows[by].iloc[0])
            shapes[heads, kv_heads] = _grid(rows, cells, axes)[1]
        return cls(
            gpu=device, tokens=tokens, n=n, k=k, gemm=times, batches=axes[0], past=axes[1], attention=shapes,
            reduce={
                int(num): (rows["message_size"].to_numpy(np.float64), rows["latency_ms"].to_numpy(np.float64) * 1e-3)
                for num, rows in ((num, reduce[reduce["num_gpus"] == num]) for num in reduce["num_gpus"].unique())
            },
        )  # fmt: skip

    def gemm_s(self, m: npt.ArrayLike, n: float, k: float) -> Floats:
        """Seconds of an (m x k) times (k x n) product for each of `m`."""
        axes, rows = (self.tokens, self.n, self.k), np.asarray(m, np.float64)
        ideal = self.ideal_gemm_s(self.tokens[:, None, None], self.n[None, :, None], self.k[None, None, :])
        excess = RegularGridInterpolator([np.log(axis) for axis in axes], _filled(np.log(self.gemm / ideal)))
        at = [
            np.log(np.clip(x, axis[0], axis[-1])) for axis, x in zip(axes, np.broadcast_arrays(rows, n, k), strict=True)
        ]
        return np.asarray(self.ideal_gemm_s(rows, n, k) * np.exp(excess(tuple(at))).reshape(rows.shape), np.float64)

    def ideal_gemm_s(self, m: Floats, n: Floats | float, k: Floats | float) -> Floats:
        compute = 2 * m * n * k / self.gpu.peak_flops
        moved = BYTES_PER_VALUE * (m * k + k * n + m * n) / self.gpu.hbm_bytes_per_s
        return np.asarray(rounded_max(moved, compute, KNEE), np.float64)

    def all_reduce_s(self, tp: int, values: npt.ArrayLike) -> Floats:
        """Seconds to sum `values` numbers over `tp` GPUs; nothing for one."""
        if tp == 1:
            return np.zeros(np.shape(values))
        if tp not in self.reduce:
            raise ConfigError(f"no all-reduce over {tp} GPUs was measured: tp is one of 1, {_listed(self.reduce)}")
        sizes, seconds = self.reduce[tp]
        per_value = seconds[-1] / sizes[-1]
        counts = np.asarray(values, np.float64)
        return np.asarray(np.interp(counts, sizes, seconds) + per_value * np.maximum(counts - sizes[-1], 0), np.float64)

    def layers_s(self, shape: ModelShape, tp: int, tokens: npt.ArrayLike) -> Floats:
        """Seconds of all layers on `tokens` tokens, attention apart: four matrix products and two all-reduces each."""
        heads, kv_heads = per_gpu_heads(shape, tp)
        inner = shape.intermediate / tp
        products = (
            ((heads + 2 * kv_heads) * shape.head_dim, shape.hidden),
            (shape.hidden, heads * shape.head_dim),
            (2 * inner, shape.hidden),
            (shape.hidden, inner),
        )
        values = np.asarray(tokens, np.float64) * shape.hidden
        reduces = 2 * self.all_reduce_s(tp, values)
        layer = np.sum([self.gemm_s(tokens, n, k) for n, k in products], axis=0)
        return np.asarray(shape.layers * (layer + reduces), np.float64)

    def forward_s(self, shape: ModelShape, tp: int, tokens: npt.ArrayLike) -> Floats:
        """Seconds of a forward pass without attention: the layers, and the LM head on every token."""
        return self.layers_s(shape, tp, tokens) + self.gemm_s(tokens, shape.vocab / tp, shape.hidden)

    def attention_table(self, shape: ModelShape, tp: int) -> Floats:
        """(batches, past) seconds of decode attention over all layers; NaN where it was not measured.

        A number of heads that was not measured is interpolated between its neighbours with as many KV heads.
        """
        heads, kv_heads = per_gpu_heads(shape, tp)
        if (heads, kv_heads) in self.attention:
            return shape.layers * self.attention[heads, kv_heads]
        measured_heads = sorted(h for h, kv in self.attention if kv == kv_heads)
        below, above = [h for h in measured_heads if h < heads], [h for h in measured_heads if h > heads]
        if not below or not above:
            raise ConfigError(
                f"{shape.name} with tp {tp} has {heads} heads and {kv_heads} KV heads per GPU; measured with as many "
                f"KV heads are {_listed(measured_heads)} heads"
            )
        share = (heads - below[-1]) / (above[0] - below[-1])
        low, high = self.attention[below[-1], kv_heads], self.attention[above[0], kv_heads]
        return shape.layers * ((1 - share) * low + share * high)

    def attention_s(self, shape: ModelShape, tp: int, batch: float, past_tokens: float) -> float:
        """Seconds of decode attention over all layers, `batch` requests with `past_tokens` each."""
        i = int(np.clip(np.searchsorted(self.batches, batch, side="right"), 1, len(self.batches) - 1))
        pair = [_on(self.past, row, past_tokens) for row in self.attention_table(shape, tp)[i - 1 : i + 1]]
        return float(np.interp(batch, self.batches[i - 1 : i + 1], pair))


def _rows(data: Path, name: str, device: Gpu, columns: Sequence[str], texts: Sequence[str] = ()) -> pd.DataFrame:
    path = data / name
    table = measured_table(path, ("latency_ms", *columns), ("gpu", *texts))
    rows = table[table["gpu"].str.lower() == device.name.lower()]
    if rows.empty:
        raise ConfigError(f"{path} has no {device.name}: it has {_listed(table['gpu'].unique())}")
    return rows


def _grid(rows: pd.DataFrame, columns: list[str], axes: list[Floats] | None = None) -> tuple[list[Floats], Floats]:
    """The axes of a table, its own unless given, and its seconds on them; NaN where there is no row."""
    axes = axes or [np.sort(rows[c].unique()).astype(np.float64) for c in columns]
    seconds = rows.set_index(columns)["latency_ms"].reindex(pd.MultiIndex.from_product(axes)).to_numpy(np.float64)
    return axes, seconds.reshape([len(a) for a in axes]) * 1e-3


def _filled(excess: Floats) -> Floats:
    """Missing cells take the value before them along the last axis: the same utilisation."""
    filled = pd.DataFrame(excess.reshape(-1, excess.shape[-1])).ffill(axis=1)
    return filled.to_numpy(np.float64).reshape(excess.shape)


def _on(past: Floats, seconds: Floats, tokens: float) -> float:
    """Linear in the past tokens through what was measured, and on with the last slope."""
    measured = ~np.isnan(seconds)
    x, y = past[measured], seconds[measured]
    beyond = max(0.0, tokens - x[-1]) * (y[-1] - y[-2]) / (x[-1] - x[-2])
    return float(np.interp(tokens, x, y) + beyond)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(sorted(map(str, values)))
