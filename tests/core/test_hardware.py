"""GPUs and models: what their data sheets and shapes come to, and what does not fit."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.refused import refused
from tltlab.config import entries
from tltlab.costs.profiles import shape_of_config
from tltlab.errors import ConfigError
from tltlab.hardware import (
    RUNTIME_BYTES,
    Gpu,
    ModelShape,
    activation_bytes,
    gpu,
    kv_capacity_tokens,
    model,
)


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes"),
    [("Qwen2.5-7B", 7.07, 57_344), ("Qwen2.5-32B", 31.98, 262_144), ("Qwen3-32B", 31.98, 262_144),
     ("Llama-3.3-70B", 69.50, 327_680), ("Llama-3.1-8B", 7.50, 131_072), ("Qwen2.5-72B", 71.46, 327_680),
     ("Llama-3.1-405B", 403.75, 516_096)],
)  # fmt: skip
def test_weight_bytes_per_step_and_kv_bytes(name, billions, kv_bytes):
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


def test_cache_has_blocks_that_engine_counted(shared_data):
    """2,588 blocks of 16 on an RTX 4090; the timeline's largest share of them in use is one of whole blocks."""
    blocks = 2588
    assert kv_capacity_tokens(gpu("RTX4090"), model("Llama-3.1-8B"), 1) == blocks * 16
    assert f"{blocks:,} blocks of 16" in (shared_data / "README.md").read_text()


def test_the_cache_is_what_the_rest_leaves():
    shape, device = model("Llama-3.1-8B"), gpu("RTX4090")
    left = device.memory_bytes * 0.8 - shape.stored_params * 2 - activation_bytes(device, shape, 1) - RUNTIME_BYTES
    assert kv_capacity_tokens(device, shape, 1, 0.8) == left // (16 * 131_072) * 16
    # 2,048 tokens of 4 x 4,096 + 3 x 14,336 values in bf16; logits of 256 requests at 10 bytes.
    assert activation_bytes(device, shape, 1) == 2048 * 2 * (4 * 4096 + 3 * 14336) + 256 * 128256 * 10
    assert activation_bytes(device, shape, 2) < activation_bytes(device, shape, 1)


def test_a_gpu_has_one_kv_head_at_least():
    # Qwen2.5-7B has four KV heads: eight GPUs hold each of them twice.
    shape, device = model("Qwen2.5-7B"), gpu("H200")
    per_gpu = device.memory_bytes * 0.9 - shape.stored_params / 8 * 2 - activation_bytes(device, shape, 8)
    assert kv_capacity_tokens(device, shape, 8) == (per_gpu - RUNTIME_BYTES) // (16 * 28 * 2 * 128 * 2) * 16
    latent = shape_of_config(DEEPSEEK, "V3")
    rest = device.memory_bytes * 0.9 - latent.stored_bytes() / 8 - activation_bytes(device, latent, 8) - RUNTIME_BYTES
    assert kv_capacity_tokens(device, latent, 8) == rest // (16 * 61 * 576 * 2) * 16


DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
GEMMA = {
    "model_type": "gemma3", "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "sliding_window": 1024,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    },
}  # fmt: skip


def test_latent_attention_and_experts_are_read_off_config():
    shape = shape_of_config(DEEPSEEK, "DeepSeek-V3")
    assert shape == model("deepseek-ai/DeepSeek-V3")
    assert shape.stored_params / 1e9 == pytest.approx(671, rel=0.02)
    assert shape.active_params / 1e9 == pytest.approx(37, rel=0.05)
    assert shape.layer_kv_values == 576
    assert shape.kv_bytes_per_token == 61 * 576 * 2
    assert (shape.expert_layers, shape.weights) == (58, "fp8")


def test_layers_of_a_sliding_window_keep_no_context():
    shape = shape_of_config(GEMMA)
    assert (shape.window, shape.window_layers, shape.full_layers) == (1024, 5, 1)
    assert shape.kv_bytes_per_token == 2 * 4 * 256 * 2
    assert shape.qk_norm


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        ({"name": "B300", "memory_gib": "268 GB"}, ("entry B300", "memory_gib")),
        ({"name": "B300", "memory_gib": 268, "peakflops": 1e15}, ("entry B300", "peakflops", "peak_flops")),
        ({"memory_gib": 268}, ("entry 2", "name")),
    ],
)
def test_a_wrong_entry_of_the_table_is_named(row, facts):
    good = {"name": "B200", "hbm_bytes_per_s": 8e12, "peak_flops": 2e15, "memory_gib": 2, "link_bytes_per_s": 9e11}
    assert entries(Gpu, [good], "hardware.json")[0].memory_bytes == 2 * 2**30
    with refused(ConfigError, naming=("hardware.json", *facts)):
        entries(Gpu, [good, row], "hardware.json")


OWN_GPU = {"name": "mine", "peak_flops": 1e12, "memory_bytes": 1e9, "link_bytes_per_s": 1e9}
OWN_MODEL = {"name": "mine", "hidden": 8, "intermediate": 8, "layers": 1, "head_dim": 4, "vocab": 8}


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (lambda: gpu("H900"), ("H900", "H100", "H200", "A100")),
        (lambda: gpu("h1000"), ("h1000", "did you mean 'H100'")),
        (lambda: model("gpt-2"), ("gpt-2", "Qwen2.5-7B")),
        (lambda: model("Llama-405B"), ("did you mean 'Llama-3.1-405B'",)),
        (lambda: kv_capacity_tokens(gpu("H100"), model("Llama-3.3-70B"), 1), ("Llama-3.3-70B", 131, "GiB", "H100", 68)),
        (lambda: kv_capacity_tokens(gpu("H100"), model("Qwen2.5-7B"), 0), ("memory_fraction",)),
        (lambda: kv_capacity_tokens(gpu("H100"), model("Qwen2.5-7B"), 1, 0.0), ("memory_fraction",)),
        (lambda: Gpu(hbm_bytes_per_s=0, **OWN_GPU), ("hbm_bytes_per_s",)),
        (lambda: ModelShape(heads=3, kv_heads=2, **OWN_MODEL), ("kv_heads",)),
        (lambda: shape_of_config({"hidden_size": 8}), ("num_hidden_layers",)),
        (lambda: shape_of_config(DEEPSEEK | {"quantization_config": {"quant_method": "hqq"}}), ("hqq",)),
    ],
)
def test_unknown_or_unfitting_hardware_is_refused(make, facts):
    with refused((ConfigError, ValidationError), naming=facts):
        make()


@pytest.mark.parametrize(
    ("quantization", "kind"),
    [
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "mxfp4"}, "fp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "fp4"),
        ({"quant_method": "modelopt", "config_groups": {"0": {"weights": {"type": "float", "num_bits": 8}}}}, "fp8"),
        ({"quant_method": "modelopt", "config_groups": {"0": {"weights": {"type": "int", "num_bits": 8}}}}, "int8"),
    ],
)  # fmt: skip
def test_type_of_checkpoint_is_read_off_its_config(quantization, kind):
    assert shape_of_config(DEEPSEEK | {"quantization_config": quantization}).weights == kind


def test_fewer_bits_leave_room_for_context():
    shape, device = model("meta-llama/llama-3.3-70b-Instruct"), gpu("h100")
    assert (shape.name, device.name) == ("Llama-3.3-70B", "H100"), "names go without case, organisation or instruct"
    assert kv_capacity_tokens(device, shape, 2, weights="fp8") > 0
    fp8 = kv_capacity_tokens(device, shape, 4, weights="fp8")
    assert fp8 > 1.4 * kv_capacity_tokens(device, shape, 4)
    assert kv_capacity_tokens(device, shape, 4, weights="fp8", kv="fp8") == pytest.approx(2 * fp8, abs=16)


FAMILIES = json.loads(Path(__file__).with_name("model_families.json").read_text())
"""Parts of the config.json of models with experts, by family."""


@pytest.mark.parametrize(
    ("family", "active", "stored"),
    [("llama4", 17, 109), ("glm4_moe", 12, 106), ("hunyuan", 13, 80), ("ernie", 3, 21), ("qwen2_moe", 14, 57),
     ("interleaved", 17, 400)],
    ids=str,
)  # fmt: skip
def test_experts_of_a_family_are_its_billions(family, active, stored):
    """What its authors call it: active weights with the input embedding, and all of them."""
    shape = shape_of_config(FAMILIES[family])
    embedding = 0 if shape.tied_embeddings else shape.head_params
    assert (shape.active_params + embedding) / 1e9 == pytest.approx(active, rel=0.15)
    assert shape.stored_params / 1e9 == pytest.approx(stored, rel=0.05)


def test_three_of_four_layers_of_llama4_see_chunk():
    shape = shape_of_config(FAMILIES["llama4"])
    assert (shape.window, shape.window_layers, shape.full_layers) == (8192, 36, 12)


def test_expert_layers_are_read_under_all_names():
    dense = [
        {"moe_layer_freq": [0, 1, 1, 0] * 7},
        {"moe_layers": list(range(14))},
        {"mlp_layer_types": ["dense", "sparse"] * 14},
        {"decoder_sparse_step": 2},
        {"mlp_only_layers": list(range(14))},
    ]
    for rule in dense:
        assert shape_of_config(FAMILIES["qwen2_moe"] | rule).dense_layers == 14, rule


@pytest.mark.parametrize("key", ["zero_expert_num", "expert_layer_period", "moe_every_n", "hybrid_override_pattern"])
def test_an_unknown_key_about_experts_is_refused(key):
    with refused(ConfigError, naming=(key,)):
        shape_of_config(FAMILIES["qwen2_moe"] | {key: 2})


def test_experts_that_differ_by_layer_are_refused():
    with refused(ConfigError, naming=("moe_topk",)):
        shape_of_config(FAMILIES["hunyuan"] | {"moe_topk": [8, 4] * 16})
