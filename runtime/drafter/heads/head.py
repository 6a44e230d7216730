"""Common part of EAGLE and EAGLE-3 heads: one Llama decoder layer that drafts from the target's states.

Input t joins the embedding of token t + 1 with a state at t; output t is the state at t + 1, from which token t + 2
follows. On the first step states are the target's, on later ones the head's own outputs.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from tltlab.errors import ConfigError
from tltlab.runtime.trainer.attention import causal_attention

from .target import WEIGHTS_FILE, FrozenTarget


class Attention(nn.Module):
    """The projections of grouped-query attention with rotary positions, of inputs `width` wide.

    With `qk_norm` queries and keys are normed by head before they are rotated, as in Qwen3.
    """

    def __init__(self, config: LlamaConfig, width: int, *, qk_norm: bool = False) -> None:
        super().__init__()
        hidden, size, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, size
        self.q_proj = nn.Linear(width, self.num_heads * size, bias=bias)
        self.k_proj = nn.Linear(width, self.num_kv_heads * size, bias=bias)
        self.v_proj = nn.Linear(width, self.num_kv_heads * size, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * size, hidden, bias=bias)
        self.q_norm = LlamaRMSNorm(size, eps=config.rms_norm_eps) if qk_norm else nn.Identity()
        self.k_norm = LlamaRMSNorm(size, eps=config.rms_norm_eps) if qk_norm else nn.Identity()

    def project(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Project x (B, T, width) to queries (B, heads, T, D), keys and values (B, KV heads, T, D)."""
        q, k, v = (
            p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(self.q_norm(q), self.k_norm(k), *rotation)
        return q, k, v


class Layer(nn.Module):
    """A Llama decoder layer without its input norm, whose attention reads inputs `width` wide."""

    def __init__(self, config: LlamaConfig, width: int, *, qk_norm: bool = False) -> None:
        super().__init__()
        self.self_attn = Attention(config, width, qk_norm=qk_norm)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Return states (B, T, H) from the residual (B, T, H) and attended values (B, heads, T, D)."""
        x = residual + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        states: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return states


class DrafterHead(nn.Module, ABC):
    """A drafter head; its parameters have the checkpoint's names, without the target's embedding and LM head.

    `method` is vLLM's name for its kind. `aux_layers` are the target's layers whose inputs it reads, none where it
    reads the last hidden state. `draft_ids` (D) are the tokens it can draft, None for all.
    """

    method: ClassVar[Literal["eagle", "eagle3", "mtp"]]
    aux_layers: tuple[int, ...] = ()

    @property
    def draft_ids(self) -> Tensor | None:
        return None

    def __init__(self, config: LlamaConfig, layer: Layer) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList([layer])
        self.rotary = LlamaRotaryEmbedding(config)

    @property
    def layer(self) -> Layer:
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    @abstractmethod
    def first_states(self, hidden: Tensor, aux: Tensor | None) -> Tensor:
        """Return the states (..., H) of the first step, from the target's hidden states or its `aux` (..., A H)."""

    @abstractmethod
    def inputs(self, embeddings: Tensor, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return attention's inputs and the residual, from embeddings of tokens t + 1 and states at t, both (..., H).

        `positions` (...) are the states'.
        """

    @abstractmethod
    def features(self, states: Tensor) -> Tensor:
        """Return the LM head's input for states of the head, (..., H)."""

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Return states (B, T, H) from the residual (B, T, H) and attended values (B, heads, T, D)."""
        return self.layer.finish(residual, attended)

    def output_weight(self, frozen: FrozenTarget) -> Tensor:
        """The LM head (V, H): the target's, or (D, H) for a head that drafts D tokens only."""
        return frozen.lm_head

    def logits(self, states: Tensor, frozen: FrozenTarget) -> Tensor:
        """Return logits of states of the head (..., H): (..., V), or (..., D) for a head with `draft_ids`."""
        return self.features(states) @ self.output_weight(frozen).T

    def greedy(self, states: Tensor, frozen: FrozenTarget) -> Tensor:
        """Return the likeliest token after each state (..., H) of the head: token ids (...)."""
        best = self.logits(states, frozen).argmax(-1)
        return best if self.draft_ids is None else self.draft_ids[best]

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (B, T, D) of positions (B, T)."""
        cos, sin = self.rotary(self.layer.self_attn.o_proj.weight, positions)
        return cos, sin

    def forward(self, embeddings: Tensor, states: Tensor, positions: Tensor | None = None) -> Tensor:
        """Run one causal pass over embeddings and states (B, T, H); return the drafted states, (B, T, H).

        `positions` (B, T) are counted from 0 where not given.
        """
        length = states.shape[1]
        if positions is None:
            positions = torch.arange(length, device=states.device)[None]
        x, residual = self.inputs(embeddings, states, positions)
        q, k, v = self.layer.self_attn.project(x, self.rotation(positions))
        return self.finish(residual, causal_attention(q, k, v, [length]))

    def serving_weights(self) -> dict[str, Tensor]:
        """Return copies of the weights on the host, by the names that vLLM loads and the checkpoint has."""
        return host_copies(self.state_dict())

    def take_serving_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load the result of `serving_weights` of a head of this shape."""
        self.load_state_dict(weights)

    @abstractmethod
    def config_dict(self) -> dict[str, Any]:
        """Return the contents of `config.json`, without the dtype."""

    def take_weights(self, name: str | Path, weights: Mapping[str, Tensor]) -> None:
        """Load the weights of checkpoint `name`. ConfigError where one is missing, unknown or of another shape."""
        expected = {key: value for key, value in self.state_dict().items() if key not in ("d2t", "t2d")}
        check_tensors(f"{name}: not an {self.method} head of one layer", expected, weights)
        self.load_state_dict(weights, strict=False)

    def save(self, folder: str | Path) -> Path:
        """Write the checkpoint, folder made; the weights are complete before `config.json` names them."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.serving_weights(), folder / WEIGHTS_FILE, metadata={"format": "pt"})
        dtype = str(self.layer.self_attn.o_proj.weight.dtype).removeprefix("torch.")
        (folder / "config.json").write_text(json.dumps(self.config_dict() | {"dtype": dtype}, indent=2) + "\n")
        return folder


def check_tensors(refusal: str, expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Raise ConfigError, beginning with `refusal`, where tensors differ in name or shape from those expected."""
    faulty = sorted(expected.keys() ^ tensors.keys()) or [
        n for n in sorted(expected) if expected[n].shape != tensors[n].shape
    ]
    if faulty:
        raise ConfigError(f"{refusal}: {faulty[0]} is missing, unknown or of another shape")


def host_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, value in tensors.items()
    }


def layer_config(target: PretrainedConfig) -> LlamaConfig:
    """The config of one Llama layer of the target's own shape."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        num_hidden_layers=1,
        hidden_act="silu",
        tie_word_embeddings=False,
        **{
            name: getattr(target, name)
            for name in (
                "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size",
                "max_position_embeddings", "rms_norm_eps", "rope_parameters", "bos_token_id", "eos_token_id",
            )
        },
        head_dim=getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads,
    )  # fmt: skip
