"""Kernel tables: interpolation and sums."""

import numpy as np
import pandas as pd
import pytest

from bench.presets.kernels import Kernels
from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.hardware import gpu, model


def write_kernels(folder, utilisation=0.5):
    """Tables of a GPU that always reaches the same share of the roofline, and reads keys at 1 us per 1,000 tokens."""
    device = gpu("H100")
    axes = [2**e for e in (0, 3, 6, 8, 10, 12)], [2**e for e in (5, 10, 13, 16)]
    grid = [(m, n, k) for m in axes[0] for n in axes[1] for k in axes[1]]
    gemm = pd.DataFrame(grid, columns=["m", "n", "k"]).assign(gpu="h100")
    m, n, k = (gemm[c].to_numpy(float) for c in "mnk")
    moved, compute = 2 * (m * k + k * n + m * n) / device.hbm_bytes_per_s, 2 * m * n * k / device.peak_flops
    gemm["latency_ms"] = 1e3 * (moved**4 + compute**4) ** 0.25 / utilisation
    cells = [(b, h, kv, s) for b in (1, 8, 64) for h, kv in ((24, 4), (32, 4)) for s in (255, 1023, 4095, 16383)]
    attention = pd.DataFrame(cells, columns=["batch_size", "num_heads", "num_key_value_heads", "step"])
    attention["latency_ms"] = 0.01 + 1e-6 * attention["batch_size"] * attention["step"]
    reduce = pd.DataFrame({"num_gpus": 4, "message_size": [1024, 2048], "latency_ms": [0.01, 0.02]})
    gemm.to_parquet(folder / "gemm_bf16.parquet")
    attention.assign(gpu="h100").to_parquet(folder / "decode_attention_bf16.parquet")
    reduce.assign(gpu="h100", kernel_source="vLLM_custom_graph").to_parquet(folder / "allreduce_bf16.parquet")
    return Kernels.read(folder, "H100")


def test_kernels_between_their_grid_follow_the_roofline(tmp_path):
    kernels = write_kernels(tmp_path)
    products = ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944))
    for tokens in (1.0, 100.0, 3000.0):
        layer = sum(float(kernels.ideal_gemm_s(np.asarray(tokens), n, k)) / 0.5 for n, k in products)
        assert kernels.layers_s(model("Qwen2.5-7B"), 1, tokens) == pytest.approx(28 * layer)
    assert kernels.all_reduce_s(4, [1024, 1536, 4096]) == pytest.approx([1e-5, 1.5e-5, 4e-5])
    assert kernels.all_reduce_s(1, 1024) == 0


def test_attention_is_interpolated_between_batches_contexts_and_heads(tmp_path):
    kernels = write_kernels(tmp_path)
    for batch, past in ((1, 255), (5, 3000), (64, 16383), (64, 50000)):
        expected = 28 * (1e-5 + 1e-9 * batch * past)
        assert kernels.attention_s(model("Qwen2.5-7B"), 1, batch, past) == pytest.approx(expected)


def test_kernels_that_were_not_measured_are_named(tmp_path):
    with refused(ConfigError, naming=("gemm_bf16.parquet",)):
        Kernels.read(tmp_path, "H100")
    kernels = write_kernels(tmp_path)
    with refused(ConfigError, naming=("H200",)):
        Kernels.read(tmp_path, "H200")
    with refused(ConfigError, naming=("heads",)):
        kernels.attention_s(model("Qwen2.5-32B"), 4, 1, 255)
    with refused(ConfigError, naming=("3",)):
        kernels.forward_s(model("Qwen2.5-7B"), 3, 1)


@pytest.mark.parametrize(
    ("gpu_name", "model_name", "tp", "published"),
    [
        ("H100", "Qwen2.5-7B", 1, (5.14, 5.65, 5.67, 5.59, 5.88, 6.39, 6.53, 9.81, 18.8, 38.0)),
        ("H200", "Qwen2.5-32B", 4, (5.54, 5.77, 6.14, 6.49, 7.16, 8.19, 9.24, 15.5, 27.8, 55.7)),
        ("H100", "Llama-3.3-70B", 4, (13.1, 14.3, 14.5, 15.1, 16.6, 18.2, 19.7, 31.2, 58.4, 115)),
    ],
)
def test_sums_of_measured_kernels(shared_data, gpu_name, model_name, tp, published):
    """Milliseconds of a forward pass without attention, against sums made independently of the same tables."""
    tokens = (1, 16, 32, 64, 128, 192, 256, 512, 1024, 2048)
    summed = 1e3 * Kernels.read(shared_data, gpu_name).forward_s(model(model_name), tp, tokens)
    off = np.abs(summed / published - 1)
    assert off.mean() < 0.015
    assert off.max() < 0.045
