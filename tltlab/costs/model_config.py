"""Shapes of models as a Hugging Face `config.json` describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tltlab.errors import ConfigError
from tltlab.hardware import Dtype, ModelShape


def shape_of_config(config: Mapping[str, Any], name: str = "") -> ModelShape:
    """The shape that a Hugging Face `config.json` describes; its text model where it has several.

    Reads experts (Qwen, DeepSeek, Mixtral, MiniMax, GPT-OSS names), latent attention, sliding and linear layers and
    the quantization of the checkpoint. Raises ConfigError that names a key which is missing.
    """
    text: Mapping[str, Any] = config.get("text_config") or config

    def first(*keys: str, default: int | None = None) -> int:
        for key in keys:
            if text.get(key) is not None:
                return int(text[key])
        if default is None:
            raise ConfigError(f"the model's config.json has no {' or '.join(keys)}")
        return default

    hidden, layers, heads = first("hidden_size"), first("num_hidden_layers"), first("num_attention_heads")
    experts = first("num_experts", "n_routed_experts", "num_local_experts", default=0)
    inner = first("intermediate_size", default=0) if experts else first("intermediate_size")
    per_expert = first("moe_intermediate_size", default=inner) if experts else 0
    shared = first("shared_expert_intermediate_size", default=first("n_shared_experts", default=0) * per_expert)
    dense = first("first_k_dense_replace", default=len(text.get("mlp_only_layers") or ())) if experts else 0
    latent = first("kv_lora_rank", default=0)
    rope = first("qk_rope_head_dim", default=0) if latent else 0
    head_dim = first("head_dim", default=hidden // heads)
    if latent:
        head_dim = first("qk_nope_head_dim", default=head_dim) + rope
    kinds = text.get("layer_types") or ()
    window = first("sliding_window", default=0)
    sliding = sum(kind == "sliding_attention" for kind in kinds)
    if window and not kinds and text.get("use_sliding_window", True):
        sliding = layers
    return ModelShape(
        name=name or str(config.get("_name_or_path") or config.get("model_type") or "model"),
        hidden=hidden,
        intermediate=inner,
        layers=layers,
        heads=heads,
        kv_heads=heads if latent else first("num_key_value_heads", default=heads),
        head_dim=head_dim,
        vocab=first("vocab_size"),
        tied_embeddings=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        experts=experts,
        experts_per_token=first("num_experts_per_tok", "experts_per_token") if experts else 0,
        expert_intermediate=per_expert,
        shared_intermediate=shared if experts else 0,
        dense_layers=dense,
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
