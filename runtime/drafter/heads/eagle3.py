"""An EAGLE-3 head in torch: one Llama decoder layer that drafts from the target's states at several depths.

`fc` makes the first state of the inputs of three of the target's layers; from the second drafted token on the state is
what the layer gave before. Attention reads the normed embedding of token t + 1 beside the normed state at t, and what
the layer gives goes through a norm of its own to the LM head. This is EAGLE-3 (arXiv 2503.01840) as vLLM runs it
(`Eagle3LlamaForCausalLM`, method "eagle3").

A checkpoint is a folder in the format of `speculators` 0.9: `config.json` and `model.safetensors` with `fc.weight`
(H, A H), `norm.weight`, `layers.0.` `self_attn.{q,k,v}_proj.weight` (.., 2 H), `self_attn.o_proj.weight`,
`mlp.{gate,up,down}_proj.weight`, `{hidden_norm,input_layernorm,post_attention_layernorm}.weight`. A head of the whole
vocabulary shares the target's LM head. One that drafts D tokens only has its own, `lm_head.weight` (D, H), and
`d2t` (D), what to add to a draft's id for the token's, and `t2d` (V), which tokens it can draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tltlab.errors import ConfigError

from .head import WEIGHTS_FILE, DrafterHead, Layer, read_layer_config
from .target import FrozenTarget

SPECULATIVE_TOKENS = 5
"""The depth that a checkpoint's config proposes to who serves it by its folder alone."""


class NormedLayer(Layer):
    """The decoder layer with the norms of its two inputs, embedding and state."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class Eagle3Head(DrafterHead):
    """The head; its parameters carry the checkpoint's names.

    `aux_layers`: the target's layers whose inputs it reads, rising; the number of layers itself means what the last one
    gives. `draft_vocabulary`: the token ids that it drafts, rising, None for all. `verifier`: the target's name or
    folder, for who serves the checkpoint by its folder alone.
    """

    method: ClassVar[Literal["eagle", "eagle3"]] = "eagle3"

    def __init__(
        self,
        config: LlamaConfig,
        aux_layers: Sequence[int],
        draft_vocabulary: Tensor | None = None,
        verifier: str | None = None,
    ) -> None:
        super().__init__(config, NormedLayer(config))
        # vLLM hands over the states in rising order whatever the config's.
        assert list(aux_layers) == sorted(set(aux_layers))
        self.aux_layers, self.verifier = tuple(aux_layers), verifier
        self.fc = nn.Linear(len(aux_layers) * config.hidden_size, config.hidden_size, bias=False)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head: nn.Linear | None = None
        if draft_vocabulary is not None:
            self.lm_head = nn.Linear(config.hidden_size, len(draft_vocabulary), bias=False)
            self.register_buffer("d2t", draft_vocabulary - torch.arange(len(draft_vocabulary)))
            self.register_buffer("t2d", torch.zeros(config.vocab_size).index_fill(0, draft_vocabulary, 1.0).bool())

    @property
    def draft_ids(self) -> Tensor | None:
        if self.lm_head is None:
            return None
        d2t = self.get_buffer("d2t")
        return d2t + torch.arange(len(d2t), device=d2t.device)

    def first_states(self, hidden: Tensor, aux: Tensor | None) -> Tensor:
        assert aux is not None, "an EAGLE-3 head reads the target's states at several depths"
        states: Tensor = self.fc(aux)
        return states

    def inputs(self, embeddings: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.layer
        assert isinstance(layer, NormedLayer)
        return torch.cat([layer.input_layernorm(embeddings), layer.hidden_norm(states)], -1), states

    def features(self, states: Tensor) -> Tensor:
        normed: Tensor = self.norm(states)
        return normed

    def output_weight(self, frozen: FrozenTarget) -> Tensor:
        return frozen.lm_head if self.lm_head is None else self.lm_head.weight

    def config_dict(self) -> dict[str, Any]:
        vocabulary, hidden = self.config.vocab_size, self.config.hidden_size
        layer = self.config.to_dict() | {"num_aux_hidden_states": len(self.aux_layers)}
        return {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0",
            "speculators_config": {
                "algorithm": "eagle3",
                "proposal_methods": [
                    {
                        "proposal_type": "greedy",
                        "speculative_tokens": SPECULATIVE_TOKENS,
                        "verifier_accept_k": 1,
                        "accept_tolerance": 0.0,
                    }
                ],
                "default_proposal_method": "greedy",
                "verifier": {"name_or_path": self.verifier, "architectures": []},
            },
            "transformer_layer_config": layer,
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "draft_vocab_size": vocabulary if self.lm_head is None else self.lm_head.out_features,
            "eagle_aux_hidden_state_layer_ids": list(self.aux_layers),
            # The residual is the state as it came, as in the first EAGLE-3 checkpoints.
            "norm_before_residual": False,
            "norm_before_fc": False,
            "fc_norm": False,
            "norm_output": False,
            "embed_requires_grad": False,
            "tie_word_embeddings": False,
        }

    @classmethod
    def load(cls, folder: str | Path, dtype: torch.dtype = torch.float32) -> Eagle3Head:
        """Read a checkpoint. Raises ConfigError for one that is missing, broken or of another layout."""
        folder = Path(folder)
        config, said = read_layer_config(folder, "transformer_layer_config")
        try:
            layers = [int(layer) for layer in said["eagle_aux_hidden_state_layer_ids"]]
            verifier = said["speculators_config"]["verifier"]["name_or_path"]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{folder}: config.json lacks what an EAGLE-3 head's must say: {error}") from error
        unlike = [n for n in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output") if said.get(n)]
        if unlike:
            raise ConfigError(f"{folder}: an EAGLE-3 head with {unlike[0]} is of another layout than ours")
        head = cls(config, layers, _draft_vocabulary(folder), verifier)
        head.take_weights(folder, "an EAGLE-3 head of one layer that shares the target's embedding")
        return head.to(dtype)


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Those that vLLM and TLT take, 2, L / 2 and L - 3, for a target of L layers, or the last three inputs and outputs
    of a target too shallow to tell those apart.

    >>> default_aux_layers(32), default_aux_layers(4), default_aux_layers(2)
    ((2, 16, 29), (2, 3, 4), (0, 1, 2))
    """
    usual = (2, num_layers // 2, num_layers - 3)
    if list(usual) == sorted(set(usual)):
        return usual
    return tuple(range(max(num_layers - 2, 0), num_layers + 1))


def _draft_vocabulary(folder: Path) -> Tensor | None:
    try:
        with safe_open(folder / WEIGHTS_FILE, "pt") as file:
            if "d2t" not in set(file.keys()):
                return None
            d2t: Tensor = file.get_tensor("d2t")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{folder}: no readable {WEIGHTS_FILE}: {error}") from error
    return d2t + torch.arange(len(d2t))
