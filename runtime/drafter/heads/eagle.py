"""An EAGLE head in torch: one Llama decoder layer that drafts from the target's last hidden states.

Input t joins the embedding of token t + 1 with the target's hidden state at t (after its final norm); output t stands
for the hidden state at t + 1, so the target's LM head on it predicts token t + 2. Positions are those of the hidden
states. This is EAGLE (arXiv 2401.15077) as vLLM runs it (`EagleLlamaForCausalLM`, method "eagle").

A checkpoint is a folder with `config.json` (a Llama config of one layer) and `model.safetensors`: `fc.weight` (H, 2 H),
`layers.0.` `self_attn.{q,k,v,o}_proj.weight`, `mlp.{gate,up,down}_proj.weight`, `post_attention_layernorm.weight`.
There is no input norm and no bias; embedding and LM head are the target's. HASS trains the same head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import LlamaConfig

from .head import WEIGHTS_FILE, DrafterHead, Layer, read_layer_config


class EagleHead(DrafterHead):
    """The head; its parameters carry the checkpoint's names."""

    method: ClassVar[Literal["eagle", "eagle3"]] = "eagle"

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, Layer(config, config.hidden_size))
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def first_states(self, hidden: Tensor, aux: Tensor | None) -> Tensor:
        return hidden

    def inputs(self, embeddings: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        joined = self.fc(torch.cat([embeddings, states], -1))
        return joined, joined

    def features(self, states: Tensor) -> Tensor:
        return states

    def config_dict(self) -> dict[str, Any]:
        return dict(self.config.to_dict())

    @classmethod
    def load(cls, folder: str | Path, dtype: torch.dtype = torch.float32) -> EagleHead:
        """Read a checkpoint. Raises ConfigError for one that is missing, broken or of another layout."""
        config, _ = read_layer_config(Path(folder))
        head = cls(config)
        head.take_weights(Path(folder), "an EAGLE head of one layer that shares the target's embedding and LM head")
        return head.to(dtype)


def is_eagle_head(folder: str | Path) -> bool:
    """Whether a checkpoint folder holds an EAGLE or EAGLE-3 head rather than a language model."""
    try:
        with safe_open(Path(folder) / WEIGHTS_FILE, "pt") as file:
            return "fc.weight" in file.keys()  # noqa: SIM118
    except (OSError, SafetensorError):
        return False
