"""Models small enough for an exact distribution: a target of five tokens and drafters for it.

Weights are random, not trained. The target's next token is far from uniform (1.1 nats of 1.6) and depends on the whole
text. The drafters use the last token's embedding, so verification both accepts and rejects their drafts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

WORDS = ("a", "b", "c", "d", "<eos>")
EOS = 4
MAX_POSITIONS = 256
_HIDDEN, _MLP, _HEADS, _HEAD_SIZE, _LAYERS = 64, 128, 2, 32, 4
# Inputs of EAGLE-3: vLLM's default layers collide in a target of four.
_AUX_LAYERS = [1, 2, 3]

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModels:
    """Checkpoint folders: a target, the target after a weight update, and its drafters by vLLM's method name."""

    target: Path
    updated: Path
    draft_model: Path
    eagle: Path
    eagle3: Path


def make_tiny_models(folder: Path) -> TinyModels:
    """Write the models below `folder`, always with the same weights; torch's random state is restored."""
    disable_progress_bar()
    models = TinyModels(**{name: folder / name for name in ("target", "updated", "draft_model", "eagle", "eagle3")})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        target = _target()
        _save(target, models.target)
        first_layer = LlamaForCausalLM(_config(layers=1))
        first_layer.load_state_dict({name: target.state_dict()[name] for name in first_layer.state_dict()})
        _save(first_layer, models.draft_model)
        _save_head(_eagle(), {}, models.eagle)
        aux = {"draft_vocab_size": len(WORDS), "eagle_aux_hidden_state_layer_ids": _AUX_LAYERS}
        _save_head(_eagle3(target), aux, models.eagle3)
        for weight in target.parameters():
            weight.add_(0.3 * weight.std() * torch.randn_like(weight) if weight.dim() == 2 else 0.0)
        _save(target, models.updated)
    return models


def _config(layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=_HIDDEN,
        intermediate_size=_MLP,
        num_hidden_layers=layers,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS,
        head_dim=_HEAD_SIZE,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=EOS,
    )


def _target() -> LlamaForCausalLM:
    model = LlamaForCausalLM(_config(_LAYERS)).eval()
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            weight.normal_(0.0, 1.0 if "embed" in name else weight.shape[1] ** -0.5)
    # Wide logits reveal a wrong temperature; a rare end token leaves responses long enough for deep drafts.
    model.lm_head.weight.mul_(1.5)
    model.lm_head.weight[EOS].mul_(0.5)
    return model


def _eagle() -> Weights:
    """An EAGLE head that passes the last token's embedding to the target's LM head, nearly unchanged.

    vLLM's layout: `fc` [H, 2H] takes (embedding, target's hidden state), one decoder layer without input norm follows.
    """
    fc = torch.cat([torch.eye(_HIDDEN), 0.1 * _random(_HIDDEN, _HIDDEN)], 1)
    return _layer("layers.0", _HIDDEN) | {"fc.weight": fc}


def _eagle3(target: LlamaForCausalLM) -> Weights:
    """An EAGLE-3 head whose attention finds tokens like the last one and passes on its embedding.

    vLLM's layout: `fc` [H, 3H] takes three of the target's hidden states, the layer reads (embedding, hidden) [2H].
    """
    embedding_only = torch.cat([torch.eye(_HIDDEN), torch.zeros(_HIDDEN, _HIDDEN)], 1)
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm")
    return (
        _layer("midlayer", 2 * _HIDDEN)
        | {f"midlayer.self_attn.{name}_proj.weight": embedding_only.clone() for name in "qkv"}
        | {"midlayer.self_attn.o_proj.weight": torch.eye(_HIDDEN)}
        | {f"{name}.weight": torch.ones(_HIDDEN) for name in norms}
        | {"fc.weight": 0.1 * _random(_HIDDEN, 3 * _HIDDEN), "lm_head.weight": target.lm_head.weight.clone()}
    )


def _layer(prefix: str, width: int) -> Weights:
    """A Llama decoder layer whose attention reads vectors of `width`."""
    weights = {f"{prefix}.self_attn.{name}_proj.weight": _random(_HEADS * _HEAD_SIZE, width) for name in "qkv"}
    return weights | {
        f"{prefix}.self_attn.o_proj.weight": 0.1 * _random(_HIDDEN, _HEADS * _HEAD_SIZE),
        f"{prefix}.mlp.gate_proj.weight": _random(_MLP, _HIDDEN),
        f"{prefix}.mlp.up_proj.weight": _random(_MLP, _HIDDEN),
        f"{prefix}.mlp.down_proj.weight": 0.1 * _random(_HIDDEN, _MLP),
        f"{prefix}.post_attention_layernorm.weight": torch.ones(_HIDDEN),
    }


def _random(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns) * float(columns**-0.5)


def _save(model: LlamaForCausalLM, folder: Path) -> None:
    model.save_pretrained(folder)
    save_tokenizer(folder)


def save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=WORDS[EOS]).save_pretrained(folder)


def _save_head(weights: Weights, extra: dict[str, object], folder: Path) -> None:
    folder.mkdir(parents=True)
    config = _config(layers=1).to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "float32"} | extra
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
