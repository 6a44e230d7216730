"""Models small enough for an exact distribution: a target of five tokens and drafters for it.

Weights are random, not trained. The target's next token is far from uniform (1.1 nats of 1.6) and depends on the whole
text. The drafters use the last token's embedding, so verification both accepts and rejects their drafts.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from tltlab.records import frozen
from tltlab.runtime.drafter.heads.head import DrafterHead, Eagle3Head, EagleHead, layer_config

WORDS = ("a", "b", "c", "d", "<eos>")
EOS = 4
MAX_POSITIONS = 256
_HIDDEN, _MLP, _HEADS, _HEAD_SIZE, _LAYERS = 64, 128, 2, 32, 4
# Inputs of EAGLE-3: vLLM's default layers collide in a target of four.
_AUX_LAYERS = [1, 2, 3]


@frozen
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
        _eagle(target).save(models.eagle)
        _eagle3(target).save(models.eagle3)
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


def _eagle(target: LlamaForCausalLM) -> EagleHead:
    """An EAGLE head that passes the last token's embedding to the target's LM head, nearly unchanged."""
    head = EagleHead(layer_config(target.config))
    _draw(head)
    of_states = 0.1 * head.fc.weight[:, _HIDDEN:]
    head.fc.weight.copy_(torch.cat([torch.eye(_HIDDEN), of_states], 1))
    return head


def _eagle3(target: LlamaForCausalLM) -> Eagle3Head:
    """An EAGLE-3 head whose attention finds tokens like the last one and passes on its embedding."""
    head = Eagle3Head(layer_config(target.config), _AUX_LAYERS, own_lm_head=True)
    _draw(head)
    attention = head.layer.self_attn
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.weight.copy_(torch.eye(_HIDDEN, 2 * _HIDDEN))
    attention.o_proj.weight.copy_(torch.eye(_HIDDEN))
    head.fc.weight.mul_(0.1)
    assert head.lm_head is not None
    head.lm_head.weight.copy_(target.lm_head.weight)
    return head


def _draw(head: DrafterHead) -> None:
    """Draw a head's matrices; what its layer adds to its input is small."""
    for name, weight in head.named_parameters():
        if weight.dim() == 2:
            small = 0.1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            weight.normal_(0.0, small * weight.shape[1] ** -0.5)


def _save(model: LlamaForCausalLM, folder: Path) -> None:
    model.save_pretrained(folder)
    save_tokenizer(folder)


def save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=WORDS[EOS]).save_pretrained(folder)
