"""Checkpoints of EAGLE and EAGLE-3 heads in published layouts, and of MTP layers, read into tltlab's heads.

- EAGLE's releases (SafeAILab/EAGLE `cnets1.py`, `cnets.py`) and SpecForge's (`LlamaForCausalLMEagle3`): `config.json`
  is the layer's own. An EAGLE-3 head's layer is called `midlayer`. EAGLE heads may have biases of `fc` and of q, k, v.
- speculators (type `eagle3`): the layer's config is nested, the layer is called `layers.0`, a Llama's or a Qwen3's.

Weights are in safetensors, one file or several, or in `pytorch_model.bin`. Biases are converted to Llama's form:
attention has them at q, k, v and o or nowhere. The bias b of an EAGLE head's `fc` is merged into them: W b into those
of q, k and v, b into that of o. Only these read the output of `fc`, and vLLM's class (`llama_eagle.py`) has no such
bias.
"""

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import LlamaConfig

from tltlab.errors import ConfigError, one_line
from tltlab.files import read_json

from .head import AUX_LAYERS, MTP_ARCHITECTURE, NORMS, DrafterHead, Eagle3Head, EagleHead, MtpHead, default_aux_layers
from .target import EMBEDDING, LM_HEAD, WEIGHTS_FILE, Tensors, local_folder, read_config, read_safetensors, read_weights

BIN_FILE = "pytorch_model.bin"
ATTENTION = "layers.0.self_attn."
LAYER_FIELDS = (
    "hidden_act", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling",
    "rope_parameters", "bos_token_id", "eos_token_id",
)  # fmt: skip


def load_head(name: str | Path, *, target: str | Path | None = None) -> DrafterHead:
    """Read the head in a folder or of the Hugging Face Hub, of any kind, in float32.

    Its copies of the `target`'s embedding and LM head are dropped; the LM head stays where it differs from the target's
    or no target is given. The head's context is as long as the target's. An EAGLE-3 head without a list of the target's
    layers reads the default ones. ConfigError for a checkpoint that is missing, broken or of another kind, or for a
    target of another shape.
    """
    folder = local_folder(name)
    config = _read_config(folder)
    if config.get("architectures") == [MTP_ARCHITECTURE]:
        mtp = MtpHead(LlamaConfig.from_dict(config))
        _check_fit(name, mtp.config, target)
        mtp.take_weights(name, {f"model.{key}": value for key, value in _read_weights(folder).items()})
        return mtp
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise ConfigError(f"{name}: a drafter of kind {kind!r} cannot be read; eagle and eagle3 can")
    layer = _layer_config(name, config if kind is None else config.get("transformer_layer_config"))
    _check_fit(name, layer, target)
    if target is not None:
        # Released configs have 2,048, where vLLM would stop drafting; it must stay where positions scale with it.
        positions = int(read_config(target).max_position_embeddings)
        if layer.rope_parameters.get("rope_type", "default") not in ("dynamic", "longrope"):
            layer.max_position_embeddings = max(layer.max_position_embeddings, positions)
    weights = _read_weights(folder)
    layer.attention_bias = _even_out_biases(weights)
    _check_embedding(name, weights.pop("embed_tokens.weight", None), target)
    head: DrafterHead
    if kind is None and "layers.0.hidden_norm.weight" not in weights:
        weights.pop("lm_head.weight", None)
        head = EagleHead(layer)
    else:
        vocabulary = _draft_vocabulary(name, weights, layer)
        if vocabulary is None and target is not None and _is_targets_lm_head(weights, target):
            del weights["lm_head.weight"]
        aux_layers = _aux_layers(name, config)
        qk_norm = f"{ATTENTION}q_norm.weight" in weights
        if qk_norm and layer.attention_bias:
            raise ConfigError(f"{name}: vLLM does not draft with a Qwen3 layer with biases")
        verifier = verifier_of(folder) if target is None else str(target)
        if aux_layers is None:
            if verifier is None:
                raise ConfigError(f"{name} does not list the layers of its target that it reads: name the target")
            aux_layers = default_aux_layers(read_config(verifier).num_hidden_layers)
        if target is not None and max(aux_layers) > (depth := read_config(target).num_hidden_layers):
            raise ConfigError(f"{name} reads layer {max(aux_layers)} of its target, {target} has {depth} layers")
        # vLLM's defaults for a config without these fields.
        flags = {"norm_before_residual": kind is not None} | config
        head = Eagle3Head(
            layer,
            aux_layers,
            vocabulary,
            verifier,
            own_lm_head="lm_head.weight" in weights,
            norms=frozenset(norm for norm in NORMS if flags.get(norm)),
            qk_norm=qk_norm,
        )
    head.take_weights(name, weights)
    return head


def is_head(folder: str | Path) -> bool:
    """Return True if a checkpoint folder holds an EAGLE or EAGLE-3 head rather than a language model."""
    path = Path(folder)
    try:
        if not (path / WEIGHTS_FILE).is_file() and (path / BIN_FILE).is_file():
            return "fc.weight" in _read_weights(path)
        with safe_open(path / WEIGHTS_FILE, "pt") as file:
            return "fc.weight" in file.keys()  # noqa: SIM118
    except (OSError, SafetensorError, ConfigError):
        return False


def verifier_of(folder: str | Path) -> str | None:
    """Return the target that a head's config names, if any."""
    config = _read_config(Path(folder))
    try:
        verifier = config["speculators_config"]["verifier"]["name_or_path"]
    except (KeyError, TypeError):
        return None
    return None if verifier is None else str(verifier)


def _read_config(folder: Path) -> dict[str, Any]:
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise ConfigError(f"{folder}: no readable config.json of an EAGLE head: it is no object")
    return config


def _layer_config(name: str | Path, fields: Any) -> LlamaConfig:
    try:
        settings = {key: fields[key] for key in LAYER_FIELDS if fields.get(key) is not None}
        config = LlamaConfig(architectures=["LlamaForCausalLM"], tie_word_embeddings=False, **settings)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{name}: no readable config.json of an EAGLE head: {error}") from error
    if config.num_hidden_layers != 1:
        raise ConfigError(f"{name}: an EAGLE head here has one layer, its config has {config.num_hidden_layers}")
    if fields.get("target_hidden_size") not in (None, config.hidden_size):
        raise ConfigError(f"{name}: training needs target states of the head's own width")
    if "sliding_attention" in (fields.get("layer_types") or ()):
        raise ConfigError(f"{name}: its layer attends to a sliding window, which cannot be trained")
    return config


def _check_fit(name: str | Path, head: LlamaConfig, target: str | Path | None) -> None:
    """Raise ConfigError where a head's config is for a target of another shape."""
    if target is not None:
        config = read_config(target)
        for field in ("hidden_size", "vocab_size"):
            of_head, of_target = getattr(head, field), getattr(config, field)
            if of_head != of_target:
                raise ConfigError(f"{name} is for a target with {field} {of_head}, {target} has {of_target}")


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Read all weights by canonical name, without buffers that follow from others."""
    pickled = (folder / BIN_FILE).is_file() and not any(folder.glob(f"{WEIGHTS_FILE}*"))
    try:
        if pickled:
            tensors = torch.load(folder / BIN_FILE, map_location="cpu", weights_only=True)
        else:
            tensors = read_safetensors(folder)
    except (OSError, SafetensorError, UnpicklingError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"{folder}: no readable {WEIGHTS_FILE} or {BIN_FILE}: {one_line(error)[:200]}") from error
    named = {key.removeprefix("model.").replace("midlayer.", "layers.0."): value for key, value in tensors.items()}
    return {
        key: value for key, value in named.items() if key != "t2d" and "rotary" not in key and "verifier_" not in key
    }


def _even_out_biases(weights: dict[str, Tensor]) -> bool:
    """Convert biases to Llama's form, in place; return True if attention has any."""
    biases = {part: f"{ATTENTION}{part}_proj.bias" for part in "qkvo"}
    of_fc = weights.pop("fc.bias", None)
    if of_fc is not None and bool(of_fc.any()):
        for part, name in biases.items():
            weight = weights.get(f"{ATTENTION}{part}_proj.weight")
            if weight is not None:
                more = of_fc.float() if part == "o" else weight.float() @ of_fc.float()
                weights[name] = more + weights[name].float() if name in weights else more
    if not any(name in weights for name in biases.values()):
        return False
    for part, name in biases.items():
        weight = weights.get(f"{ATTENTION}{part}_proj.weight")
        if weight is not None and name not in weights:
            weights[name] = torch.zeros(weight.shape[0])
    return True


def _draft_vocabulary(name: str | Path, weights: dict[str, Tensor], config: LlamaConfig) -> Tensor | None:
    """Return the tokens that the head drafts, None for all; `d2t` is taken out of the weights."""
    d2t = weights.pop("d2t", None)
    if d2t is None:
        return None
    tokens = d2t.long() + torch.arange(len(d2t))
    if len(tokens.unique()) != len(tokens) or not 0 <= int(tokens.min()) <= int(tokens.max()) < config.vocab_size:
        raise ConfigError(f"{name}: its d2t is no map into a vocabulary of {config.vocab_size} tokens")
    return None if len(tokens) == config.vocab_size else tokens


def _aux_layers(name: str | Path, config: Mapping[str, Any]) -> tuple[int, ...] | None:
    nested = config.get("eagle_config") or {}
    layers = config.get(AUX_LAYERS) or nested.get(AUX_LAYERS)
    if nested.get("use_aux_hidden_state") is False:
        raise ConfigError(f"{name}: an EAGLE-3 head that reads no states of inner layers cannot be trained")
    if layers is None:
        return None
    if not isinstance(layers, list) or layers != sorted(set(layers)):
        raise ConfigError(f"{name}: {AUX_LAYERS} are {layers}; vLLM hands states over in rising order")
    return tuple(map(int, layers))


def _check_embedding(name: str | Path, embedding: Tensor | None, target: str | Path | None) -> None:
    """Raise ConfigError where a head's embedding is not its target's, up to rounding to half precision."""
    if embedding is None or target is None:
        return
    of_target = read_weights(target, [EMBEDDING]).get(EMBEDDING)
    if of_target is not None and (
        embedding.shape != of_target.shape or not torch.allclose(embedding.float(), of_target.float(), 1e-2, 1e-3)
    ):
        raise ConfigError(f"{name} has its own embedding; training needs that of {target}")


def _is_targets_lm_head(weights: Tensors, target: str | Path) -> bool:
    lm_head = weights.get("lm_head.weight")
    if lm_head is None:
        return False
    name = EMBEDDING if getattr(read_config(target), "tie_word_embeddings", False) else LM_HEAD
    of_target = read_weights(target, [name]).get(name)
    return of_target is not None and torch.equal(lm_head, of_target.to(lm_head.dtype))
