"""Random heads and sequences, and what a head does computed slowly: one chain at a time, with no packing."""

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig

from tltlab.runtime.drafter.heads.head import Eagle3Head, EagleHead
from tltlab.runtime.drafter.heads.target import FrozenTarget
from tltlab.runtime.drafter.sequences import TrainingSequence

from ..small_models import small_shape

VOCABULARY, HIDDEN, AUX = 13, 32, 3
HALF = [1, 2, 5, 7, 8, 12]
"""A draft vocabulary: words of a head that drafts not all."""


def made_head(method, *, seed=0, std=0.25, vocabulary=None):
    """A head of random weights, wide enough that every input matters."""
    shape = small_shape(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
    )  # fmt: skip
    config = LlamaConfig(**shape)
    drafted = None if vocabulary is None else torch.tensor(vocabulary)
    head = EagleHead(config) if method == "eagle" else Eagle3Head(config, (0, 1, 2), drafted)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, value in sorted(head.named_parameters()):
            value.normal_(0.0, std, generator=generator)
            if value.dim() == 1:
                value.add_(1.0)
    return head


def made_target():
    generator = torch.Generator().manual_seed(1)
    embedding, lm_head = (torch.randn(VOCABULARY, HIDDEN, generator=generator) for _ in range(2))
    return FrozenTarget(embedding=embedding, lm_head=lm_head)


def made_sequence(rows, *, seed=2, first_position=0, prompt_tokens=0):
    generator = torch.Generator().manual_seed(seed)
    return TrainingSequence(
        key=(0, "p", seed, 0),
        token_ids=torch.randint(0, VOCABULARY, (rows + 1,), generator=generator),
        hidden=torch.randn(rows, HIDDEN, generator=generator),
        aux=torch.randn(rows, AUX * HIDDEN, generator=generator),
        first_position=first_position,
        prompt_tokens=prompt_tokens,
    )


def one_pass(head, frozen, tokens, states, first_position=0):
    """The states (T, H) that a head makes of tokens (T) and states (T, H) in one causal pass."""
    positions = torch.arange(len(states))[None] + first_position
    x, residual = head.inputs(frozen.embedding[tokens][None], states[None], positions)
    q, k, v = head.layer.self_attn.project(x, head.rotation(positions))
    return head.finish(residual, scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))[0]


def drafted_states(head, frozen, sequence, start, num_steps, *, detached=False):
    """The states (H) that the chain from row `start` makes, each by a pass of its own over all that comes before.

    Inputs up to `start` read the target's states, later ones the chain's, if `detached` without their gradient; tokens
    are the text's.
    """
    states = head.first_states(sequence.hidden, sequence.aux)[: start + 1]
    made = []
    for step in range(num_steps):
        rows = start + step + 1
        out = one_pass(head, frozen, sequence.token_ids[1 : rows + 1], states, sequence.first_position)[-1]
        made.append(out)
        states = torch.cat([states, (out.detach() if detached else out)[None]])
    return made
