"""A made-up target without a model: each token has a likely successor, and the hidden state says which."""

import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache

import torch
from transformers import LlamaConfig

from tltlab.runtime.drafter.heads.kinds import new_head
from tltlab.runtime.drafter.heads.target import FrozenTarget
from tltlab.runtime.drafter.sequences import TrainingSequence

from ..small_models import small_shape, until

VOCAB, HIDDEN = 24, 32


def same(one, other, atol=0.0):
    """Whether all tensors of `one` are in `other`, number by number, or nearly."""
    return all(torch.allclose(value, other[name], rtol=0, atol=atol) for name, value in one.items())


def together(calls):
    """What calls return that run at once, each in its own thread."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [call.result() for call in [threads.submit(call) for call in calls]]


def hand_over(sender, sequence):
    """Send a sequence until it is taken: what comes before a trainer is connected is dropped."""

    def taken():
        dropped = sender.dropped
        sender.sequence(sequence)
        return sender.dropped == dropped

    until(taken)


@contextmanager
def largest_file(size):
    """Writing more to one file fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


@cache
def frozen():
    generator = torch.Generator().manual_seed(5)
    return FrozenTarget(
        embedding=torch.randn(VOCAB, HIDDEN, generator=generator),
        lm_head=torch.nn.functional.normalize(torch.randn(VOCAB, HIDDEN, generator=generator), dim=-1),
    )


def sequence(seed, rows=24, prompt=4, rl_step=0, temperature=1.0):
    """A text of `rows` + 1 tokens sampled from the target at a temperature, with its states."""
    generator = torch.Generator().manual_seed(seed)
    lm_head = frozen().lm_head
    tokens, states = [int(torch.randint(VOCAB, (), generator=generator))], []
    for _ in range(rows):
        states.append(8.0 * lm_head[(tokens[-1] * 7 + 3) % VOCAB])
        chances = torch.softmax(lm_head @ states[-1] / temperature, -1)
        tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
    return TrainingSequence(
        key=(rl_step, f"p{seed}", 0, 0),
        token_ids=torch.tensor(tokens),
        hidden=torch.stack(states),
        prompt_tokens=prompt,
    )


def head(folder, seed=0):
    LlamaConfig(**small_shape(hidden_size=HIDDEN, intermediate_size=64, head_dim=16)).save_pretrained(folder)
    return new_head(folder, "eagle", seed)
