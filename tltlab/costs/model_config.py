"""Shapes of models as a Hugging Face `config.json` describes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from tltlab.errors import ConfigError
from tltlab.hardware import Dtype, ModelShape

_MOE_KEYS = {
    "experts": ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    "experts_per_token": (
        "num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k",
    ),
    "expert_intermediate": ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size"),
    "shared": ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"),
    "shared_intermediate": (
        "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size",
        "share_expert_dim",
    ),
    "every": ("interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_freq", "moe_layer_interval"),
    "from": ("first_k_dense_replace", "moe_layer_start_index"),
}  # fmt: skip
"""Keys of a `config.json` about experts: Qwen, DeepSeek, Kimi, GLM, Llama-4, Mixtral, MiniMax, GPT-OSS, Granite,
Hunyuan, Ernie, Ling, OLMoE."""
_MOE_LAYERS = ("mlp_only_layers", "moe_layers", "moe_layer_end_index", "mlp_layer_types")
_ABOUT_EXPERTS = re.compile("expert|moe|hybrid_override_pattern", re.IGNORECASE)
_NO_SHAPE = re.compile(
    "rout(er|ing)|aux|loss|gate|gating|scor|group|norm|scal|dtype|drop|capacity|backend|parallel|bias|jitter|hidden_act|impl"
)
"""Settings of experts that change no shape."""


def shape_of_config(config: Mapping[str, Any], name: str = "") -> ModelShape:
    """The shape that a Hugging Face `config.json` describes; its text model where it has several.

    Reads experts (`_MOE_KEYS`), latent attention, sliding, chunked and linear layers and the quantization of the
    checkpoint. Raises ConfigError that names a key which is missing, or one about experts that is not understood.
    """
    text: Mapping[str, Any] = config.get("text_config") or config
    first = partial(_first, text)
    hidden, layers, heads = first("hidden_size"), first("num_hidden_layers"), first("num_attention_heads")
    experts = _experts(text, layers)
    latent = first("kv_lora_rank", default=0)
    rope = first("qk_rope_head_dim", default=0) if latent else 0
    head_dim = first("head_dim", default=hidden // heads)
    if latent:
        head_dim = first("qk_nope_head_dim", default=head_dim) + rope
    kinds = text.get("layer_types") or ()
    window = first("sliding_window", "attention_chunk_size", default=0)
    sliding = sum(kind in ("sliding_attention", "chunked_attention") for kind in kinds)
    if not kinds and text.get("attention_chunk_size"):
        # Llama-4: layers without rotary embeddings, every fourth, see the whole context.
        sliding, kinds = sum(text.get("no_rope_layers") or [i % 4 != 3 for i in range(layers)]), ("chunked",)
    if window and not kinds and text.get("use_sliding_window", True):
        sliding = layers
    return ModelShape(
        name=name or str(config.get("_name_or_path") or config.get("model_type") or "model"),
        hidden=hidden,
        intermediate=first("intermediate_size_mlp", "intermediate_size", default=0 if experts else None),
        layers=layers,
        heads=heads,
        kv_heads=heads if latent else first("num_key_value_heads", default=heads),
        head_dim=head_dim,
        vocab=first("vocab_size"),
        tied_embeddings=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        **experts,
        latent=latent + rope,
        latent_queries=first("q_lora_rank", default=0) if latent else 0,
        value_dim=first("v_head_dim", default=0) if latent else 0,
        window=window if sliding else 0,
        window_layers=sliding,
        state_layers=sum(kind in ("linear_attention", "mamba") for kind in kinds),
        qk_norm=str(text.get("model_type", config.get("model_type"))).startswith(_QK_NORM)
        or bool(text.get("use_qk_norm")),
        weights=_checkpoint_type(config.get("quantization_config") or text.get("quantization_config")),
    )


def _first(text: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    """Return the first of these keys that is set; a list has one value for all layers, else it is a ConfigError."""
    for key in keys:
        if (value := text.get(key)) is not None:
            values = set(value) if isinstance(value, list) else {value}
            if len(values) > 1:
                raise ConfigError(f"the model's config.json has a {key} that differs by layer, which is not understood")
            return int(values.pop()) if values else 0
    if default is None:
        raise ConfigError(f"the model's config.json has no {' or '.join(keys)}")
    return default


def _experts(text: Mapping[str, Any], layers: int) -> dict[str, int]:
    """Return the fields of `ModelShape` about experts, none where there are none."""
    understood = {key for keys in _MOE_KEYS.values() for key in keys} | set(_MOE_LAYERS)
    about = [key for key, value in text.items() if value and _ABOUT_EXPERTS.search(key) and key not in understood]
    if strange := [key for key in about if not _NO_SHAPE.search(key.lower())]:
        raise ConfigError(
            f"the model's config.json has settings of experts that are not understood: {', '.join(strange)}; describe "
            "the model by the fields of ModelShape"
        )
    first = partial(_first, text)
    experts = first(*_MOE_KEYS["experts"], default=0)
    if not experts:
        return {}
    width = first(*_MOE_KEYS["expert_intermediate"])
    # Llama-4 has one shared expert and no key for it.
    implicit = int(str(text.get("model_type", "")).startswith("llama4"))
    shared = first(*_MOE_KEYS["shared"], default=implicit) * width
    return {
        "experts": experts,
        "experts_per_token": first(*_MOE_KEYS["experts_per_token"]),
        "expert_intermediate": width,
        "shared_intermediate": first(*_MOE_KEYS["shared_intermediate"], default=shared),
        "dense_layers": layers - _sparse_layers(text, layers),
    }


def _sparse_layers(text: Mapping[str, Any], layers: int) -> int:
    """Return how many layers have experts."""
    if kinds := text.get("mlp_layer_types"):
        return sum(kind == "sparse" for kind in kinds)
    if listed := text.get("moe_layers"):
        return len(listed)
    dense, frequency = text.get("mlp_only_layers") or (), text.get("moe_layer_freq")
    start, end = _first(text, *_MOE_KEYS["from"], default=0), text.get("moe_layer_end_index") or layers
    if isinstance(frequency, list):
        return sum(bool(value) for i, value in enumerate(frequency) if start <= i <= end)
    every = _first(text, *_MOE_KEYS["every"], default=1)
    # DeepSeek counts every n-th layer from 0, others from 1.
    first = 0 if frequency else 1
    return sum((i + first) % every == 0 and start <= i <= end and i not in dense for i in range(layers))


_QUANTIZED: dict[str, Dtype] = {
    "fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "fp4", "nvfp4": "fp4", "awq": "int4", "gptq": "int4",
}  # fmt: skip


_QK_NORM = ("qwen3", "minimax_m2", "olmo2", "olmo3", "gemma3", "glm4_moe")
"""Model types that normalise queries and keys."""


def _checkpoint_type(quantization: Mapping[str, Any] | None) -> Dtype:
    """The type of a checkpoint's matrices by its `quantization_config`; ConfigError for one that is not known."""
    if not quantization:
        return "bf16"
    method = str(quantization.get("quant_method", quantization.get("quant_algo", ""))).lower()
    if method in _QUANTIZED:
        return _QUANTIZED[method]
    # compressed-tensors and ModelOpt describe the weights' numbers themselves.
    for group in (quantization.get("config_groups") or {}).values():
        numbers = group.get("weights") or {}
        kinds: dict[tuple[str, int], Dtype] = {
            ("float", 8): "fp8", ("int", 8): "int8", ("float", 4): "fp4", ("int", 4): "int4"
        }  # fmt: skip
        if (kind := kinds.get((str(numbers.get("type")), int(numbers.get("num_bits", 0))))) is not None:
            return kind
    algorithm = str(quantization.get("quant_algo", "")).lower()
    if algorithm in _QUANTIZED:
        return _QUANTIZED[algorithm]
    raise ConfigError(f"the checkpoint's quantization {method or quantization!r} is not known: name the weights' type")
