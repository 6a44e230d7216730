"""The exact distribution of a lossless engine, by Hugging Face forward passes of the same checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from tltlab.arrays import Flags, Floats
from tltlab.records import frozen

_CUT_MARGIN = 1e-5
"""Cumulative probabilities this close to top_p may fall on either side of it by rounding."""


@frozen
class Sampling:
    """A request's sampling settings; `top_p` 1 and `top_k` 0 filter nothing."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0


def probabilities(logits: torch.Tensor, sampling: Sampling) -> tuple[Floats, Flags]:
    """Return next-token probabilities [..., V] of `logits` as vLLM processes them: temperature, top-k, then top-p.

    Top-p keeps the likeliest tokens until their sum reaches it. The second result [...] is False where rounding could
    move that cut.
    """
    p = torch.softmax(logits.double() / sampling.temperature, -1)
    ordered, order = p.sort(-1, descending=True)
    if sampling.top_k:
        ordered[..., sampling.top_k :] = 0.0
        ordered /= ordered.sum(-1, keepdim=True)
    sure = torch.ones(p.shape[:-1], dtype=torch.bool)
    if sampling.top_p < 1.0:
        before = ordered.cumsum(-1) - ordered
        sure = ((before - sampling.top_p).abs() > _CUT_MARGIN).all(-1)
        ordered[before >= sampling.top_p] = 0.0
        ordered /= ordered.sum(-1, keepdim=True)
    return torch.zeros_like(p).scatter_(-1, order, ordered).numpy(), sure.numpy()


class ExactModel:
    """The checkpoint in `folder` in float32, as Hugging Face computes it."""

    def __init__(self, folder: Path):
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.eos = self.model.config.eos_token_id

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return logits [N, T, V] before each token of responses [N, T] to `prompt`, shorter ones padded."""
        longest = max(map(len, responses))
        rows = torch.tensor([[*prompt, *r, *[0] * (longest - len(r))] for r in responses])
        logits: torch.Tensor = self.model(rows).logits
        return logits[:, len(prompt) - 1 : -1]

    @torch.no_grad()
    def logits_after_update(
        self, before: ExactModel, prompt: Sequence[int], response: Sequence[int], num_before: int
    ) -> torch.Tensor:
        """Return logits [T - n, V] before the tokens of `response` from number n = `num_before` on.

        The first n tokens were sampled by `before` and an engine kept its keys and values, except those of the last of
        the n, which runs first through the new weights.
        """
        old = [*prompt, *response[: num_before - 1]]
        cache = before.model(torch.tensor([old]), use_cache=True).past_key_values
        new = torch.tensor([response[num_before - 1 :]])
        logits: torch.Tensor = self.model(new, past_key_values=cache).logits
        return logits[0, :-1]

    def joint(self, prompt: Sequence[int], sampling: Sampling, length: int) -> dict[tuple[int, ...], float]:
        """Return P of every response to `prompt` of `length` tokens, or fewer where it ends with the end token."""
        finished: dict[tuple[int, ...], float] = {}
        going: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(length):
            prefixes = list(going)
            # The pad takes the place of the next token: only the logits before it are read.
            logits = self.logits(prompt, [(*prefix, 0) for prefix in prefixes])[:, -1]
            p, _ = probabilities(logits, sampling)
            grown = {
                (*prefix, token): going[prefix] * float(p[row, token])
                for row, prefix in enumerate(prefixes)
                for token in range(p.shape[1])
            }
            finished |= {r: q for r, q in grown.items() if r[-1] == self.eos}
            going = {r: q for r, q in grown.items() if r[-1] != self.eos and q > 0.0}
        return finished | going
