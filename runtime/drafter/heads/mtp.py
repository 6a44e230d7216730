"""The MTP layer of a model's own, in torch: MiMo's, which the run may train as it trains other heads.

Input t joins the target's hidden state at t, before its final norm, with the embedding of token t + 1, both normed; the
embedding at position 0 counts as 0. A Qwen2 layer and its own norm follow, and the target's LM head on that gives
token t + 2. From the second drafted token on the state is the norm's previous output. MiMo's MTP (arXiv 2505.07608) as
vLLM runs it (`MiMoMTP`, method "mtp"): one layer drafts any number of tokens.

In the model's checkpoint and in tltlab's its weights are `model.mtp_layers.0.` `{token,hidden,final}_layernorm.weight`,
`input_proj.weight` (H, 2 H), and a layer's: `self_attn.{q,k,v}_proj.{weight,bias}`, `self_attn.o_proj.weight`,
`mlp.{gate,up,down}_proj.weight`, `{input,post_attention}_layernorm.weight`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tltlab.errors import ConfigError

from .head import DrafterHead, Layer, layer_config
from .target import MIMO, WEIGHTS_FILE, is_mimo, local_folder, read_config, read_weights

PREFIX = "model.mtp_layers.0."
ARCHITECTURE = "MiMoMTPModel"
_LAYER = "layers.0."


class MtpLayer(Layer):
    """A Qwen2 layer: its input norm, and biases of queries, keys and values alone."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, config.hidden_size)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)


class MtpHead(DrafterHead):
    """The layer and the norms around it; `serving_weights` have the checkpoint's names."""

    method: ClassVar[Literal["mtp"]] = "mtp"

    def __init__(self, config: LlamaConfig) -> None:
        config.attention_bias = True
        super().__init__(config, MtpLayer(config))
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.token_layernorm = LlamaRMSNorm(hidden, eps=eps)
        self.hidden_layernorm = LlamaRMSNorm(hidden, eps=eps)
        self.input_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.final_layernorm = LlamaRMSNorm(hidden, eps=eps)

    def first_states(self, hidden: Tensor, aux: Tensor | None) -> Tensor:
        return hidden

    def inputs(self, embeddings: Tensor, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.layer
        assert isinstance(layer, MtpLayer)
        embeddings = torch.where(positions[..., None] == 0, 0.0, embeddings)
        joined = self.input_proj(torch.cat([self.hidden_layernorm(states), self.token_layernorm(embeddings)], -1))
        return layer.input_layernorm(joined), joined

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        states: Tensor = self.final_layernorm(super().finish(residual, attended))
        return states

    def features(self, states: Tensor) -> Tensor:
        return states

    def serving_weights(self) -> dict[str, Tensor]:
        return {PREFIX + name.removeprefix(_LAYER): value for name, value in super().serving_weights().items()}

    def take_serving_weights(self, weights: Mapping[str, Tensor]) -> None:
        self.load_state_dict(self._by_own_names(weights))

    def config_dict(self) -> dict[str, Any]:
        return {**self.config.to_dict(), "architectures": [ARCHITECTURE]}

    def take_checkpoint(self, name: str | Path, weights: Mapping[str, Tensor]) -> None:
        """Load the weights of a checkpoint, by its names. ConfigError where one is missing or of another shape."""
        self.take_weights(name, self._by_own_names(weights))

    def _by_own_names(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        names = {PREFIX + key.removeprefix(_LAYER): key for key in self.state_dict()}
        return {names.get(key, key): value for key, value in weights.items()}


def mtp_of_model(target_folder: str | Path) -> MtpHead:
    """Read the MTP layer of the model in a folder. ConfigError for one that has none, or another than MiMo's."""
    target = read_config(target_folder)
    if not is_mimo(target):
        raise ConfigError(
            f"{target_folder} is no MiMo with an MTP layer, the only kind trained here; MTP layers of other models "
            'draft as they are: rollout.drafters.mtp = {kind = "learned", method = "mtp"}'
        )
    head = MtpHead(layer_config(target))
    head.take_checkpoint(target_folder, mtp_weights(target_folder))
    return head


def mtp_weights(target_folder: str | Path) -> dict[str, Tensor]:
    """Read the weights of the MTP layer of the model in a folder or of the Hub; empty where it has none."""
    folder = local_folder(target_folder)
    return read_weights(folder, MtpHead(layer_config(read_config(folder))).serving_weights())


def fresh_mtp(target: PretrainedConfig, seed: int) -> MtpHead:
    """Return an MTP layer of random weights for a target of this shape; its branches add nothing yet."""
    head = MtpHead(layer_config(target))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in sorted(head.named_parameters()):
            if value.dim() == 2:
                value.normal_(0.0, value.shape[1] ** -0.5, generator=generator)
            if name.endswith(("bias", "o_proj.weight", "down_proj.weight")):
                value.zero_()
    return head


def read_mtp(folder: Path) -> MtpHead | None:
    """Read the MTP layer that a run has saved in a folder; None for anything else, ConfigError if damaged."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict) or config.get("architectures") != [ARCHITECTURE]:
        return None
    head = MtpHead(LlamaConfig.from_dict(config))
    try:
        head.take_checkpoint(folder, load_file(folder / WEIGHTS_FILE))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{folder}: no readable MTP layer: {error}") from error
    return head


def save_with_mtp(model: Any, folder: str | Path, weights: Mapping[str, Tensor], layer: Mapping[str, Tensor]) -> None:
    """Write a transformers model as a MiMo: its `weights`, and those of the MTP `layer` that it lacks."""
    model.save_pretrained(folder, state_dict={**weights, **layer}, max_shard_size="5GB")
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text()) | {"architectures": [MIMO], "num_nextn_predict_layers": 1}
    path.write_text(json.dumps(config, indent=2) + "\n")
