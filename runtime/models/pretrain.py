"""Imitation of a task's traces from scratch: what gives a model of our own its first, flawed policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tltlab.runtime.trainer.muon import Muon

from .tasks import Problem, Task

_IGNORED = -100
_POOL_ROWS = 1024
_WARMUP_STEPS = 20
_LOSS_WINDOW_STEPS = 50
_EMBEDDING_STD = 0.3
_EMBEDDED_WAVE = 0.5
_OUTPUT_WAVE = 0.1


def pretrain(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task: Task,
    problems: Sequence[Problem],
    *,
    num_steps: int,
    tokens_per_batch: int,
    matrix_lr: float,
    other_lr: float,
    max_response_tokens: int,
    seed: int,
    progress: Callable[[str], None],
) -> float:
    """Train `model` in place on fresh traces of `problems`; return the mean loss of the last steps, nats per token.

    Only response tokens count. Block matrices are moved by Muon, the rest by AdamW; learning rates rise over the first
    steps, stay, and fall to 0 over the last 60 %. Nothing depends on the clock.
    """
    initialise(model, tokenizer)
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    of_blocks = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in of_blocks]
    optimizers: list[torch.optim.Optimizer] = [
        Muon(matrices, lr=matrix_lr),
        torch.optim.AdamW(rest, lr=other_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    base_lr = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    batches = _batches(tokenizer, task, problems, tokens_per_batch, max_response_tokens, np.random.default_rng(seed))
    losses: list[float] = []
    model.train()
    for step in range(num_steps):
        ids, labels = next(batches)
        scored = labels != _IGNORED
        # Padding is on the right, where a causal model cannot see it, so no attention mask is needed.
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        loss = cross_entropy(model.lm_head(hidden[scored]), labels[scored])
        loss.backward()
        for optimizer, lr in zip(optimizers, base_lr, strict=True):
            optimizer.param_groups[0]["lr"] = lr * _schedule(step, num_steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % (max(num_steps // 10, 1)) == 0:
            progress(f"step {step + 1} of {num_steps}: loss {np.mean(losses[-_LOSS_WINDOW_STEPS:]):.3f}")
    model.eval()
    return float(np.mean(losses[-_LOSS_WINDOW_STEPS:]))


def _schedule(step: int, num_steps: int) -> float:
    return min(1.0, (step + 1) / _WARMUP_STEPS, (num_steps - step) / (0.6 * num_steps))


@torch.no_grad()
def initialise(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Start `model` where it learns fastest: blocks that add nothing yet, and numbers that lie in order.

    Embeddings are wide (standard deviation .3) and the last matrix of each block branch is 0, so depth costs no steps
    early on. The rows of number words, in the embedding and the output, get sines and cosines of their value with
    wavelengths from 2 to four times the largest number: there a sum is a rotation and a comparison is linear.
    """
    embedding, output = model.model.embed_tokens.weight, model.lm_head.weight
    embedding.normal_(std=_EMBEDDING_STD)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    numbers = {int(word): row for word, row in tokenizer.get_vocab().items() if word.isdecimal()}
    rows = torch.tensor(list(numbers.values()))
    num_waves = model.config.hidden_size // 4
    wavelength = torch.logspace(math.log10(2), math.log10(4 * max(numbers)), num_waves)
    angle = 2 * math.pi * torch.tensor(list(numbers), dtype=torch.float32)[:, None] / wavelength
    waves = torch.cat([angle.cos(), angle.sin()], dim=1)
    embedding[rows, : 2 * num_waves] += _EMBEDDED_WAVE * waves
    output[rows, : 2 * num_waves] += _OUTPUT_WAVE * waves


def _batches(
    tokenizer: PreTrainedTokenizerFast,
    task: Task,
    problems: Sequence[Problem],
    tokens_per_batch: int,
    max_response_tokens: int,
    rng: np.random.Generator,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield inputs and labels, both [rows, width], of traces of similar length; rows * width <= tokens_per_batch."""
    vocab = tokenizer.get_vocab()
    while True:
        pool = []
        for i in rng.integers(len(problems), size=_POOL_ROWS):
            prompt = [vocab["<bos>"], *(vocab[word] for word in problems[i].prompt.split())]
            response = [*(vocab[word] for word in task.trace(problems[i], rng).split()), vocab["<eos>"]]
            pool.append((prompt, response[:max_response_tokens]))
        pool.sort(key=lambda row: len(row[0]) + len(row[1]))
        batches: list[list[tuple[list[int], list[int]]]] = [[]]
        for row in pool:
            if batches[-1] and (len(batches[-1]) + 1) * (len(row[0]) + len(row[1]) - 1) > tokens_per_batch:
                batches.append([])
            batches[-1].append(row)
        for i in rng.permutation(len(batches)):
            yield _pad(batches[i])


def _pad(rows: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(prompt) + len(response) for prompt, response in rows) - 1
    ids = torch.zeros((len(rows), width), dtype=torch.long)
    labels = torch.full((len(rows), width), _IGNORED)
    for i, (prompt, response) in enumerate(rows):
        both = torch.tensor(prompt + response)
        ids[i, : len(both) - 1] = both[:-1]
        labels[i, len(prompt) - 1 : len(both) - 1] = both[len(prompt) :]
    return ids, labels
