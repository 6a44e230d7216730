"""GPUs and models: what their data sheets and shapes come to, and what does not fit."""

import pytest
from pydantic import ValidationError

from tltlab.errors import ConfigError
from tltlab.hardware import Gpu, ModelShape, gpu, kv_capacity_tokens, model


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes"),
    [("Qwen2.5-7B", 7.07, 57_344), ("Qwen2.5-32B", 31.98, 262_144), ("Qwen3-32B", 31.98, 262_144),
     ("Llama-3.3-70B", 69.50, 327_680), ("Llama-3.1-8B", 7.50, 131_072)],
)  # fmt: skip
def test_weights_read_per_step_and_kv_bytes_per_token(name: str, billions: float, kv_bytes: int):
    shape = model(name)
    assert round(shape.weight_params / 1e9, 2) == billions
    assert shape.kv_bytes_per_token == kv_bytes


def test_weights_are_the_sum_of_the_matrices():
    shape = model("Llama-3.1-8B")
    queries_and_output, keys_and_values = 2 * 4096 * 4096, 2 * 4096 * 1024
    layer = queries_and_output + keys_and_values + 3 * 4096 * 14336
    assert shape.weight_params == 32 * layer + 4096 * 128256
    assert shape.stored_params - shape.weight_params == 4096 * 128256
    assert shape.model_copy(update={"tied_embeddings": True}).stored_params == shape.weight_params


@pytest.mark.parametrize(
    ("gpu_name", "name", "tp", "residents"),
    [("H100", "Qwen2.5-7B", 1, 233), ("H100", "Qwen2.5-32B", 4, 199), ("H100", "Llama-3.3-70B", 4, 103),
     ("H200", "Qwen2.5-7B", 1, 466), ("H200", "Qwen2.5-32B", 4, 404), ("H200", "Llama-3.3-70B", 4, 267)],
)  # fmt: skip
def test_requests_of_4096_tokens_that_fit(gpu_name: str, name: str, tp: int, residents: int):
    assert kv_capacity_tokens(gpu(gpu_name), model(name), tp) // 4096 == residents


def test_names_are_found_without_case_organisation_or_instruct():
    assert model("meta-llama/llama-3.3-70b-Instruct") is model("Llama-3.3-70B")
    assert gpu("h100") is gpu("H100")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown GPU 'H900'.*H100, H200, A100"):
        gpu("H900")
    with pytest.raises(ConfigError, match=r"unknown model 'gpt-2'.*Qwen2.5-7B"):
        model("gpt-2")


@pytest.mark.parametrize(
    ("name", "tp", "fraction", "message"),
    [
        ("Llama-3.3-70B", 1, 0.9, r"Llama-3.3-70B needs 141 GB .* 1 x H100 give 70 GB"),
        ("Qwen2.5-7B", 0, 0.9, "memory_fraction"),
        ("Qwen2.5-7B", 1, 0.0, "memory_fraction"),
        ("Qwen2.5-7B", 1, 1.1, "memory_fraction"),
    ],
)
def test_what_does_not_fit_or_is_no_share_is_refused(name: str, tp: int, fraction: float, message: str):
    with pytest.raises(ConfigError, match=message):
        kv_capacity_tokens(gpu("H100"), model(name), tp, fraction)


def test_records_of_ones_own_are_checked():
    with pytest.raises(ValidationError, match="hbm_bytes_per_s"):
        Gpu(name="mine", hbm_bytes_per_s=0, peak_flops=1e12, memory_bytes=1e9, link_bytes_per_s=1e9)
    with pytest.raises(ValidationError, match="multiple of kv_heads"):
        ModelShape(name="mine", hidden=8, intermediate=8, layers=1, heads=3, kv_heads=2, head_dim=4, vocab=8)
