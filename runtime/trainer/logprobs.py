"""Log-probs of given tokens from hidden states, without ever holding the logits of all of them.

R positions, hidden size H, vocabulary V. Logits are made a chunk of rows at a time and once more for the gradient: for
a vocabulary of 150,000 and 8,000 tokens they would take 5 GB in float32 and as much again for their gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LOGITS_AT_A_TIME = 1 << 26
"""Logits held at a time, 256 MiB in float32."""


def token_logprobs(hidden: Tensor, head: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """log softmax(hidden @ head^T / temperature) at `tokens`: [R] in float32, natural logarithms.

    `hidden` [R, H] and `head` [V, H] of one dtype, `tokens` [R]. The softmax is in float32 whatever their dtype; the
    head's gradient is summed over chunks in float32. Gradients reach `hidden` and `head`.
    """
    return _TokenLogprobs.apply(hidden, head, tokens, temperature)  # type: ignore[no-any-return, no-untyped-call]


def distributions(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    """log softmax(hidden @ head^T / temperature) whole: [R, V] in float32, without gradient."""
    with torch.no_grad():
        return torch.log_softmax((hidden @ head.T).float() / temperature, -1)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        logprobs = hidden.new_empty(len(hidden), dtype=torch.float32)
        normaliser = torch.empty_like(logprobs)
        for rows in _chunks(len(hidden), len(head)):
            logits = (hidden[rows] @ head.T).float().div_(temperature)
            normaliser[rows] = torch.logsumexp(logits, -1)
            logprobs[rows] = logits.gather(1, tokens[rows, None])[:, 0] - normaliser[rows]
        ctx.save_for_backward(hidden, head, tokens, normaliser)
        ctx.temperature = temperature
        return logprobs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, head, tokens, normaliser = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden)
        of_head = torch.zeros_like(head, dtype=torch.float32)
        for rows in _chunks(len(hidden), len(head)):
            logits = (hidden[rows] @ head.T).float().div_(ctx.temperature)
            # d logp / d logits = (one-hot - softmax) / temperature
            scale = gradient[rows, None] / ctx.temperature
            of_logits = logits.sub_(normaliser[rows, None]).exp_().mul_(-scale)
            of_logits.scatter_add_(1, tokens[rows, None], scale)
            of_logits = of_logits.to(head.dtype)
            of_hidden[rows] = of_logits @ head
            of_head += of_logits.T @ hidden[rows]
        return of_hidden, of_head.to(head.dtype), None, None


def _chunks(rows: int, vocabulary: int) -> list[slice]:
    size = max(LOGITS_AT_A_TIME // vocabulary, 1)
    return [slice(start, start + size) for start in range(0, rows, size)]
