"""Common part of EAGLE and EAGLE-3 heads: one Llama decoder layer that drafts from the target's states.

Input t joins the embedding of token t + 1 with a state at t; output t is the state at t + 1, from which token t + 2
follows. On the first step states are the target's, on later ones the head's own outputs.

EAGLE and EAGLE-3 heads are one Llama decoder layer each. `layouts` reads other checkpoints.

EAGLE (arXiv 2401.15077), which HASS trains too, as vLLM runs it (`EagleLlamaForCausalLM`, method "eagle"). Input t
joins the embedding of token t + 1 with the target's hidden state at t (after its final norm). Output t stands for the
hidden state at t + 1, so the target's LM head on it predicts token t + 2. A checkpoint here is a folder with
`config.json` (a Llama config of one layer) and `model.safetensors`: `fc.weight` (H, 2 H), `layers.0.`
`self_attn.{q,k,v,o}_proj.{weight,bias}`, `mlp.{gate,up,down}_proj.weight`, `post_attention_layernorm.weight`. There is
no input norm; embedding and LM head are the target's.

EAGLE-3 (arXiv 2503.01840) as vLLM runs it (`Eagle3LlamaForCausalLM`, method "eagle3"). `fc` maps the inputs of three of
the target's layers to the first state; from the second drafted token on the state is the layer's previous output.
Attention reads the normed embedding of token t + 1 beside the normed state at t, and the layer's output passes a norm
of its own to the LM head. A checkpoint here is a folder in the format of `speculators` 0.9: `config.json` and
`model.safetensors` with `fc.weight` (H, A H), `norm.weight`, `layers.0.` `self_attn.{q,k,v}_proj.weight` (.., 2 H),
`self_attn.o_proj.weight`, their biases with `attention_bias`, `mlp.{gate,up,down}_proj.weight`,
`{hidden_norm,input_layernorm,post_attention_layernorm}.weight`. A fresh head shares the target's LM head. Another may
have its own, `lm_head.weight`, of V rows, or of D for a head that drafts D tokens only. Such a head has `d2t` (D), the
difference between a token's id and its draft id, and `t2d` (V), True for tokens it can draft.

An MTP layer is a model's own: MiMo's, which the run may train as it trains other heads.

Input t joins the target's hidden state at t, before its final norm, with the embedding of token t + 1, both normed; the
embedding at position 0 counts as 0. A Qwen2 layer and its own norm follow, and the target's LM head on that gives
token t + 2. From the second drafted token on the state is the norm's previous output. MiMo's MTP (arXiv 2505.07608) as
vLLM runs it (`MiMoMTP`, method "mtp"): one layer drafts any number of tokens.

In the model's checkpoint and in tltlab's its weights are `model.mtp_layers.0.` `{token,hidden,final}_layernorm.weight`,
`input_proj.weight` (H, 2 H), and a layer's: `self_attn.{q,k,v}_proj.{weight,bias}`, `self_attn.o_proj.weight`,
`mlp.{gate,up,down}_proj.weight`, `{input,post_attention}_layernorm.weight`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from tltlab.errors import ConfigError
from tltlab.files import read_json, write_json
from tltlab.records import Json

from .target import MIMO, WEIGHTS_FILE, FrozenTarget, Tensors, is_mimo, local_folder, read_config, read_weights

Norm = Literal["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"]
NORMS: tuple[Norm, ...] = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Differences of an EAGLE-3 head from the first ones, by their names in configs and vLLM."""
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"

MTP_ARCHITECTURE = "MiMoMTPModel"


class Attention(nn.Module):
    """The projections of grouped-query attention with rotary positions, of inputs `width` wide.

    With `qk_norm` queries and keys are normed by head before they are rotated, as in Qwen3.
    """

    def __init__(self, config: LlamaConfig, width: int, *, qk_norm: bool = False):
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

    def __init__(self, config: LlamaConfig, width: int, *, qk_norm: bool = False):
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

    Subclasses have the `layer`. `method` is vLLM's name for its kind. `aux_layers` are the target's layers whose inputs
    it reads, none where it reads the last hidden state. `draft_ids` (D) are the tokens it can draft, None for all.
    """

    method: ClassVar[Literal["eagle", "eagle3", "mtp"]]
    aux_layers: tuple[int, ...] = ()

    @property
    def draft_ids(self) -> Tensor | None:
        return None

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.rotary = LlamaRotaryEmbedding(config)

    @property
    def layer(self) -> Layer:
        return cast(Layer, self.get_submodule("layers.0"))

    def first_states(self, hidden: Tensor, aux: Tensor | None) -> Tensor:
        """Return the states (..., H) of the first step, from the target's hidden states or its `aux` (..., A H)."""
        return hidden

    @abstractmethod
    def inputs(self, embeddings: Tensor, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return attention's inputs and the residual, from embeddings of tokens t + 1 and states at t, both (..., H).

        `positions` (...) are the states'.
        """

    def features(self, states: Tensor) -> Tensor:
        """Return the LM head's input for states of the head, (..., H)."""
        return states

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Return states (B, T, H) from the residual (B, T, H) and attended values (B, heads, T, D)."""
        return self.layer.finish(residual, attended)

    def output_weight(self, frozen: FrozenTarget) -> Tensor:
        """The LM head (V, H): the target's, or (D, H) for a head that drafts D tokens only."""
        return frozen.lm_head

    def logits(self, states: Tensor, frozen: FrozenTarget) -> Tensor:
        """Return logits of states of the head (..., H): (..., V), or (..., D) for a head with `draft_ids`."""
        return self.features(states) @ self.output_weight(frozen).T

    def likeliest(self, logits: Tensor) -> Tensor:
        """Return the likeliest token by each of the head's logits (..., V) or (..., D): token ids (...)."""
        best = logits.argmax(-1)
        return best if self.draft_ids is None else self.draft_ids[best]

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (B, T, D) of positions (B, T)."""
        cos, sin = self.rotary(self.layer.self_attn.o_proj.weight, positions)
        return cos, sin

    def serving_weights(self) -> dict[str, Tensor]:
        """Return copies of the weights on the host, by the names that vLLM loads and the checkpoint has."""
        return host_copies(self.state_dict())

    @abstractmethod
    def config_dict(self) -> Json:
        """Return the contents of `config.json`, without the dtype."""

    def take_weights(self, name: str | Path, weights: Tensors) -> None:
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
        write_json(folder / "config.json", self.config_dict() | {"dtype": dtype})
        return folder


def check_tensors(refusal: str, expected: Tensors, tensors: Tensors) -> None:
    """Raise ConfigError, beginning with `refusal`, where tensors differ in name or shape from those expected."""
    faulty = sorted(expected.keys() ^ tensors.keys()) or [
        n for n in sorted(expected) if expected[n].shape != tensors[n].shape
    ]
    if faulty:
        raise ConfigError(f"{refusal}: {faulty[0]} is missing, unknown or of another shape")


def host_copies(tensors: Tensors) -> dict[str, Tensor]:
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


class EagleHead(DrafterHead):
    """An EAGLE head; its parameters have the checkpoint's names."""

    method = "eagle"

    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        self.layers = nn.ModuleList([Layer(config, config.hidden_size)])
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def inputs(self, embeddings: Tensor, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        joined = self.fc(torch.cat([embeddings, states], -1))
        return joined, joined

    def config_dict(self) -> Json:
        return dict(self.config.to_dict())


class NormedLayer(Layer):
    """The decoder layer with the norms of its two inputs, embedding and state."""

    def __init__(self, config: LlamaConfig, *, qk_norm: bool):
        super().__init__(config, 2 * config.hidden_size, qk_norm=qk_norm)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class Eagle3Head(DrafterHead):
    """An EAGLE-3 head; its parameters have the checkpoint's names.

    `aux_layers`: the target's layers whose inputs it reads, rising; the number of layers itself means the output of the
    last one. `draft_vocabulary`: the token ids that it drafts, None for all; it has its own LM head for them, and
    with `own_lm_head` for all too. `verifier`: the target's name or folder, for serving the checkpoint by its folder
    alone, as are `verifier_architectures` and the `depth` to draft. `qk_norm`: its layer is a Qwen3's. `norms`: its
    differences from the first EAGLE-3 heads: the residual may be the normed state, `fc` may read normed states,
    together or layer by layer, and its next state may be the LM head's input (EAGLE-3.1).
    """

    method = "eagle3"

    def __init__(
        self,
        config: LlamaConfig,
        aux_layers: Sequence[int],
        draft_vocabulary: Tensor | None = None,
        verifier: str | None = None,
        *,
        own_lm_head: bool = False,
        norms: frozenset[Norm] = frozenset(),
        qk_norm: bool = False,
    ):
        super().__init__(config)
        self.layers = nn.ModuleList([NormedLayer(config, qk_norm=qk_norm)])
        # vLLM hands over the states in rising order, independent of the config's.
        assert list(aux_layers) == sorted(set(aux_layers))
        self.aux_layers, self.verifier, self.norms, self.qk_norm = tuple(aux_layers), verifier, norms, qk_norm
        self.verifier_architectures: tuple[str, ...] = ()
        self.depth = 5
        hidden, eps, num_aux = config.hidden_size, config.rms_norm_eps, len(aux_layers)
        self.fc = nn.Linear(num_aux * hidden, hidden, bias=False)
        self.norm = LlamaRMSNorm(hidden, eps=eps)
        if "norm_before_fc" in norms:
            self.input_norm = LlamaRMSNorm(num_aux * hidden, eps=eps)
        if "fc_norm" in norms:
            self.fc_norm = nn.ModuleList([LlamaRMSNorm(hidden, eps=eps) for _ in aux_layers])
        self.lm_head: nn.Linear | None = None
        if own_lm_head or draft_vocabulary is not None:
            drafted = config.vocab_size if draft_vocabulary is None else len(draft_vocabulary)
            self.lm_head = nn.Linear(hidden, drafted, bias=False)
        if draft_vocabulary is not None:
            self.register_buffer("d2t", draft_vocabulary - torch.arange(len(draft_vocabulary)))
            self.register_buffer("t2d", torch.zeros(config.vocab_size).index_fill(0, draft_vocabulary, 1.0).bool())

    @property
    def layer(self) -> NormedLayer:
        return cast(NormedLayer, self.layers[0])

    @property
    def draft_ids(self) -> Tensor | None:
        if not hasattr(self, "d2t"):
            return None
        d2t = self.get_buffer("d2t")
        return d2t + torch.arange(len(d2t), device=d2t.device)

    def first_states(self, hidden: Tensor, aux: Tensor | None) -> Tensor:
        assert aux is not None, "an EAGLE-3 head reads the target's states at several depths"
        if "norm_before_fc" in self.norms:
            aux = self.input_norm(aux)
        if "fc_norm" in self.norms:
            parts = aux.chunk(len(self.fc_norm), -1)
            aux = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        states: Tensor = self.fc(aux)
        return states

    def inputs(self, embeddings: Tensor, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.layer.hidden_norm(states)
        residual = normed if "norm_before_residual" in self.norms else states
        return torch.cat([self.layer.input_layernorm(embeddings), normed], -1), residual

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        states = super().finish(residual, attended)
        return self.norm(states) if "norm_output" in self.norms else states

    def features(self, states: Tensor) -> Tensor:
        return states if "norm_output" in self.norms else self.norm(states)

    def output_weight(self, frozen: FrozenTarget) -> Tensor:
        return frozen.lm_head if self.lm_head is None else self.lm_head.weight

    def config_dict(self) -> Json:
        vocabulary, hidden = self.config.vocab_size, self.config.hidden_size
        layer = self.config.to_dict() | {"num_aux_hidden_states": len(self.aux_layers)}
        if self.qk_norm:
            layer |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
        return {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0",
            "speculators_config": {
                "algorithm": "eagle3",
                "proposal_methods": [
                    {
                        "proposal_type": "greedy",
                        "speculative_tokens": self.depth,
                        "verifier_accept_k": 1,
                        "accept_tolerance": 0.0,
                    }
                ],
                "default_proposal_method": "greedy",
                "verifier": {"name_or_path": self.verifier, "architectures": list(self.verifier_architectures)},
            },
            "transformer_layer_config": layer,
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "draft_vocab_size": vocabulary if self.lm_head is None else self.lm_head.out_features,
            AUX_LAYERS: list(self.aux_layers),
            **{norm: norm in self.norms for norm in NORMS},
            "embed_requires_grad": False,
            "tie_word_embeddings": False,
        }


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Return vLLM's and TLT's default layers, 2, L / 2 and L - 3, for a target of L layers.

    A target too shallow for three distinct ones has its last three inputs and outputs.

    >>> default_aux_layers(32), default_aux_layers(4), default_aux_layers(2)
    ((2, 16, 29), (2, 3, 4), (0, 1, 2))
    """
    usual = (2, num_layers // 2, num_layers - 3)
    if list(usual) == sorted(set(usual)):
        return usual
    return tuple(range(max(num_layers - 2, 0), num_layers + 1))


class MtpLayer(Layer):
    """A Qwen2 layer, with its input norm and biases of queries, keys and values alone, and the modules around it."""

    def __init__(self, config: LlamaConfig):
        hidden, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(config, hidden)
        self.input_layernorm = LlamaRMSNorm(hidden, eps=eps)
        self.self_attn.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, hidden, bias=False)
        self.token_layernorm = LlamaRMSNorm(hidden, eps=eps)
        self.hidden_layernorm = LlamaRMSNorm(hidden, eps=eps)
        self.input_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.final_layernorm = LlamaRMSNorm(hidden, eps=eps)


class MtpHead(DrafterHead):
    """An MTP layer, under the names that it has in its model."""

    method = "mtp"

    def __init__(self, config: LlamaConfig):
        config.attention_bias = True
        super().__init__(config)
        self.model = nn.ModuleDict({"mtp_layers": nn.ModuleList([MtpLayer(config)])})

    @property
    def layer(self) -> MtpLayer:
        return cast(MtpLayer, self.get_submodule("model.mtp_layers.0"))

    def inputs(self, embeddings: Tensor, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.layer
        embeddings = torch.where(positions[..., None] == 0, 0.0, embeddings)
        joined = layer.input_proj(torch.cat([layer.hidden_layernorm(states), layer.token_layernorm(embeddings)], -1))
        return layer.input_layernorm(joined), joined

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        states: Tensor = self.layer.final_layernorm(super().finish(residual, attended))
        return states

    def config_dict(self) -> Json:
        return {**self.config.to_dict(), "architectures": [MTP_ARCHITECTURE]}


def mtp_of_model(target_folder: str | Path) -> MtpHead:
    """Read the MTP layer of the model in a folder. ConfigError for one that has none, or another than MiMo's."""
    target = read_config(target_folder)
    if not is_mimo(target):
        raise ConfigError(
            f"{target_folder} is no MiMo with an MTP layer, the only kind trained here; MTP layers of other models "
            'draft as they are: rollout.drafters.mtp = {kind = "learned", method = "mtp"}'
        )
    head = MtpHead(layer_config(target))
    head.take_weights(target_folder, mtp_weights(target_folder))
    return head


def mtp_weights(target_folder: str | Path) -> dict[str, Tensor]:
    """Read the weights of the MTP layer of the model in a folder or of the Hub; empty where it has none."""
    folder = local_folder(target_folder)
    return read_weights(folder, MtpHead(layer_config(read_config(folder))).state_dict())


def save_with_mtp(model: Any, folder: str | Path, weights: Tensors, layer: Tensors) -> None:
    """Write a transformers model as a MiMo: its `weights`, and those of the MTP `layer` that it lacks."""
    model.save_pretrained(folder, state_dict={**weights, **layer}, max_shard_size="5GB")
    path = Path(folder) / "config.json"
    write_json(path, read_json(path) | {"architectures": [MIMO], "num_nextn_predict_layers": 1})
