"""An EAGLE head in torch: one Llama decoder layer that drafts from the target's last hidden states.

Input t joins the embedding of token t + 1 with the target's hidden state at t (after its final norm); output t stands
for the hidden state at t + 1, so the target's LM head on it predicts token t + 2. Positions are those of the hidden
states. This is EAGLE (arXiv 2401.15077) as vLLM runs it (`EagleLlamaForCausalLM`, method "eagle").

A checkpoint of ours is a folder with `config.json` (a Llama config of one layer) and `model.safetensors`: `fc.weight`
(H, 2 H), `layers.0.` `self_attn.{q,k,v,o}_proj.{weight,bias}`, `mlp.{gate,up,down}_proj.weight`,
`post_attention_layernorm.weight`. Attention has biases where `attention_bias` says so; there is no input norm.
Embedding and LM head are the target's. HASS trains the same head. `layouts` reads others.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from .head import DrafterHead, Layer


class EagleHead(DrafterHead):
    """The head; its parameters carry the checkpoint's names."""

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
