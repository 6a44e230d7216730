"""EAGLE and EAGLE-3 heads in torch: one Llama decoder layer each. `layouts` reads other checkpoints.

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
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from .head import DrafterHead, Layer
from .target import FrozenTarget

Norm = Literal["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"]
NORMS: tuple[Norm, ...] = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Differences of an EAGLE-3 head from the first ones, by their names in configs and vLLM."""
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"


class EagleHead(DrafterHead):
    """An EAGLE head; its parameters have the checkpoint's names."""

    method: ClassVar[Literal["eagle", "eagle3"]] = "eagle"

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, Layer(config, config.hidden_size))
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def first_states(self, hidden: Tensor, aux: Tensor | None) -> Tensor:
        return hidden

    def inputs(self, embeddings: Tensor, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        joined = self.fc(torch.cat([embeddings, states], -1))
        return joined, joined

    def features(self, states: Tensor) -> Tensor:
        return states

    def config_dict(self) -> dict[str, Any]:
        return dict(self.config.to_dict())


class NormedLayer(Layer):
    """The decoder layer with the norms of its two inputs, embedding and state."""

    def __init__(self, config: LlamaConfig, *, qk_norm: bool) -> None:
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

    method: ClassVar[Literal["eagle", "eagle3"]] = "eagle3"

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
    ) -> None:
        super().__init__(config, NormedLayer(config, qk_norm=qk_norm))
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
        layer = self.layer
        assert isinstance(layer, NormedLayer)
        normed = layer.hidden_norm(states)
        residual = normed if "norm_before_residual" in self.norms else states
        return torch.cat([layer.input_layernorm(embeddings), normed], -1), residual

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        states = super().finish(residual, attended)
        return self.norm(states) if "norm_output" in self.norms else states

    def features(self, states: Tensor) -> Tensor:
        return states if "norm_output" in self.norms else self.norm(states)

    def output_weight(self, frozen: FrozenTarget) -> Tensor:
        return frozen.lm_head if self.lm_head is None else self.lm_head.weight

    def config_dict(self) -> dict[str, Any]:
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
