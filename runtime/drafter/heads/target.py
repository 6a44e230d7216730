"""The frozen parts of the target that a drafter shares, embedding and LM head, and the target's hidden states."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, PretrainedConfig

from tltlab.errors import ConfigError, one_line
from tltlab.records import Json, frozen

MIMO = "MiMoForCausalLM"
"""The architecture whose hidden states vLLM hands over before its final norm, as its MTP layer reads them."""

Tensors = Mapping[str, Tensor]
"""Tensors by name."""

WEIGHTS_FILE = "model.safetensors"
EMBEDDING, LM_HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@frozen
class FrozenTarget:
    """The target's embedding (V, H) and LM head (V, H); one tensor where the target ties them. No gradient reaches it.

    A target whose states come before its final RMSNorm also has weight `norm` (H) and epsilon.

    >>> FrozenTarget.from_folder("my-target").lm_head.shape                                         # doctest: +SKIP
    torch.Size([24, 64])
    """

    embedding: Tensor
    lm_head: Tensor
    norm: Tensor | None = None
    eps: float = 0.0

    def __post_init__(self) -> None:
        assert self.embedding.shape == self.lm_head.shape

    @classmethod
    def from_folder(cls, folder: str | Path) -> FrozenTarget:
        """Read from a checkpoint folder, one file of safetensors or several. ConfigError where that fails."""
        weights, config = read_weights(folder, (EMBEDDING, LM_HEAD, FINAL_NORM)), read_config(folder)
        names = [EMBEDDING] if getattr(config, "tie_word_embeddings", False) else [EMBEDDING, LM_HEAD]
        if is_mimo(config):
            names.insert(0, FINAL_NORM)
        missing = [name for name in names if name not in weights]
        if missing:
            raise ConfigError(f"the target's weights have no {missing[0]}, which its drafter reads")
        norm, eps = (weights[FINAL_NORM], config.rms_norm_eps) if is_mimo(config) else (None, 0.0)
        return cls(embedding=weights[EMBEDDING], lm_head=weights[names[-1]], norm=norm, eps=eps)

    @classmethod
    def of(cls, model: Any, take: Callable[[Tensor], Tensor] = Tensor.detach) -> FrozenTarget:
        """Take the tensors of a Hugging Face model, each by `take`."""
        weight, output, config = model.get_input_embeddings().weight, model.get_output_embeddings().weight, model.config
        embedding = take(weight)
        lm_head = embedding if output is weight else take(output)
        norm, eps = (take(model.base_model.norm.weight), config.rms_norm_eps) if is_mimo(config) else (None, 0.0)
        return cls(embedding=embedding, lm_head=lm_head, norm=norm, eps=eps)

    def logits(self, states: Tensor) -> Tensor:
        """Return logits (..., V) of the target's captured hidden states (..., H)."""
        if self.norm is not None:
            states = functional.rms_norm(states, states.shape[-1:], self.norm, self.eps)
        return states @ self.lm_head.T

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> FrozenTarget:
        """Return a copy on a device, in another dtype if one is given; tied tensors stay tied."""
        embedding = self.embedding.to(device, dtype)
        tied = self.lm_head is self.embedding
        return replace(
            self,
            embedding=embedding,
            lm_head=embedding if tied else self.lm_head.to(device, dtype),
            norm=None if self.norm is None else self.norm.to(device, dtype),
        )


def is_mimo(config: Any) -> bool:
    """Return True if a target's states are those before its final norm."""
    return bool(getattr(config, "architectures", None) == [MIMO])


def local_folder(name: str | Path) -> Path:
    """Return a model's folder: `name` itself, or that in the Hugging Face Hub's cache, downloaded if possible.

    ConfigError where there is none.
    """
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(str(name), allow_patterns=["*.json", "*.safetensors", "*.bin"]))
    except ValueError as error:
        raise ConfigError(f"{name}: no such folder") from error
    except OSError as error:
        cause = one_line(error)[:200]
        raise ConfigError(
            f"{name}: no such folder, and it cannot be downloaded from the Hugging Face Hub: {cause}"
        ) from error


def read_config(folder: str | Path) -> PretrainedConfig:
    """The config of a model in a folder. ConfigError where there is none."""
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: no model there: {one_line(error)[:300]}") from error


def read_weights(folder: str | Path, names: Collection[str]) -> dict[str, Tensor]:
    """Read those of the named weights that a checkpoint folder holds. ConfigError where it is unreadable."""
    folder = local_folder(folder)
    try:
        return read_safetensors(folder, names)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder}: no readable safetensors of a model: {error}") from error


def read_safetensors(folder: Path, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Read the tensors of a folder's file or files, all or those of `names` that are there.

    Raises OSError, SafetensorError, ValueError and KeyError for unreadable files.
    """
    index, files = folder / f"{WEIGHTS_FILE}.index.json", [WEIGHTS_FILE]
    if index.is_file():
        file_of = json.loads(index.read_text())["weight_map"]
        files = sorted({file for name, file in file_of.items() if names is None or name in names})
    tensors: dict[str, Tensor] = {}
    for file in files:
        with safe_open(folder / file, "pt") as weights:
            present = weights.keys()
            tensors |= {name: weights.get_tensor(name) for name in present if names is None or name in names}
    return tensors


@torch.no_grad()
def hidden_states_of(model: Any, token_ids: Tensor, aux_layers: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """Return the hidden states of a Hugging Face model along `token_ids` (N), by one pass.

    The first result are the last states, after the final norm (before it, where `is_mimo`), (N, H). The second are the
    inputs of the layers `aux_layers`, side by side in that order, (N, A H), or None for no layers. The number of layers
    itself means the output of the last layer, before the final norm, as in vLLM.
    """
    base = model.base_model
    entering: dict[int, Tensor] = {}

    def keep(layer: int) -> Callable[[Any, tuple[Any, ...], Json], None]:
        def hook(_: Any, args: tuple[Any, ...], named: Json) -> None:
            entering[layer] = (args[0] if args else named["hidden_states"])[0]

        return hook

    modules = [*base.layers, base.norm]
    layers = {*aux_layers, *([len(base.layers)] if is_mimo(model.config) else [])}
    hooks = [modules[layer].register_forward_pre_hook(keep(layer), with_kwargs=True) for layer in layers]
    try:
        hidden = base(input_ids=token_ids.to(model.device)[None], use_cache=False).last_hidden_state[0]
    finally:
        for hook in hooks:
            hook.remove()
    if is_mimo(model.config):
        hidden = entering[len(base.layers)]
    return hidden, torch.cat([entering[layer] for layer in aux_layers], -1) if aux_layers else None
