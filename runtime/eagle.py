"""An EAGLE head in torch: one Llama decoder layer that drafts from the target's last hidden states.

Input t joins the embedding of token t + 1 with the target's hidden state at t (after its final norm); output t stands
for the hidden state at t + 1, so the target's LM head on it predicts token t + 2. Positions are those of the hidden
states. This is EAGLE (arXiv 2401.15077) as vLLM runs it (`EagleLlamaForCausalLM`, method "eagle").

A checkpoint is a folder with `config.json` (a Llama config of one layer) and `model.safetensors`: `fc.weight` (H, 2 H),
`layers.0.` `self_attn.{q,k,v,o}_proj.weight`, `mlp.{gate,up,down}_proj.weight`, `post_attention_layernorm.weight`.
There is no input norm and no bias; embedding and LM head are the target's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from tltlab.errors import ConfigError

WEIGHTS_FILE = "model.safetensors"


class Attention(nn.Module):
    """The projections of grouped-query attention with rotary positions."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, width
        self.q_proj = nn.Linear(hidden, self.num_heads * width, bias=False)
        self.k_proj = nn.Linear(hidden, self.num_kv_heads * width, bias=False)
        self.v_proj = nn.Linear(hidden, self.num_kv_heads * width, bias=False)
        self.o_proj = nn.Linear(self.num_heads * width, hidden, bias=False)

    def project(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Of x (B, T, H): queries (B, heads, T, D), keys and values (B, KV heads, T, D)."""
        q, k, v = (
            p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *rotation)
        return q, k, v


class Layer(nn.Module):
    """A Llama decoder layer without its input norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """What follows attention: of x (B, T, H) and attended values (B, heads, T, D), the output (B, T, H)."""
        x = x + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleHead(nn.Module):
    """The head; its parameters carry the checkpoint's names.

    >>> head = random_head("my-target", seed=0)                                                     # doctest: +SKIP
    >>> head(embeddings[:, 1:], hidden[:, :-1]).shape                                               # doctest: +SKIP
    torch.Size([1, 99, 128])
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(config)])
        self.rotary = LlamaRotaryEmbedding(config)

    @property
    def layer(self) -> Layer:
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    def inputs(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """The layer's inputs (..., H) from embeddings of tokens t + 1 and hidden states at t, both (..., H)."""
        joined: Tensor = self.fc(torch.cat([embeddings, hidden], -1))
        return joined

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (B, T, D) of positions (B, T)."""
        cos, sin = self.rotary(self.fc.weight, positions)
        return cos, sin

    def forward(self, embeddings: Tensor, hidden: Tensor, positions: Tensor | None = None) -> Tensor:
        """One causal pass over (B, T, H); `positions` (B, T) are 0..T-1 where not given. The hidden states drafted."""
        x = self.inputs(embeddings, hidden)
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)[None]
        q, k, v = self.layer.self_attn.project(x, self.rotation(positions))
        return self.layer.finish(x, functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))

    def save(self, folder: str | Path) -> Path:
        """Write the checkpoint, folder made; the weights are complete before `config.json` names them."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
        save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        config = self.config.to_dict() | {"dtype": str(self.fc.weight.dtype).removeprefix("torch.")}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        return folder

    @classmethod
    def load(cls, folder: str | Path, dtype: torch.dtype = torch.float32) -> EagleHead:
        """Read a checkpoint. Raises ConfigError for one that is missing, broken or of another layout."""
        head = cls(_read_config(Path(folder)))
        try:
            weights = load_file(Path(folder) / WEIGHTS_FILE)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{folder}: no readable {WEIGHTS_FILE}: {error}") from error
        own = head.state_dict()
        wrong = sorted(set(own) ^ set(weights)) or sorted(n for n in own if own[n].shape != weights[n].shape)
        if wrong:
            raise ConfigError(
                f"{folder}: not an EAGLE head of one layer that shares the target's embedding and LM head: "
                f"{wrong[0]} is missing, unknown or of another shape"
            )
        head.load_state_dict(weights)
        return head.to(dtype)


def random_head(target_folder: str | Path, seed: int, std: float = 0.02) -> EagleHead:
    """A head with normal random weights of standard deviation `std` that fits the target in a folder."""
    target = _target_config(Path(target_folder))
    config = LlamaConfig(
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
    head = EagleHead(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in head.named_parameters():
            if not name.endswith("layernorm.weight"):
                value.normal_(0.0, std, generator=generator)
    return head


def is_eagle_head(folder: str | Path) -> bool:
    """Whether a checkpoint folder holds an EAGLE head rather than a language model."""
    try:
        with safe_open(Path(folder) / WEIGHTS_FILE, "pt") as file:
            return "fc.weight" in file.keys()  # noqa: SIM118
    except (OSError, SafetensorError):
        return False


def _read_config(folder: Path) -> LlamaConfig:
    try:
        text: dict[str, Any] = json.loads((folder / "config.json").read_text())
        config = LlamaConfig.from_dict(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: no readable config.json of an EAGLE head: {error}") from error
    if config.num_hidden_layers != 1:
        raise ConfigError(f"{folder}: an EAGLE head here has one layer, its config says {config.num_hidden_layers}")
    return config


def _target_config(folder: Path) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: no model there: {' '.join(str(error).split())[:300]}") from error
