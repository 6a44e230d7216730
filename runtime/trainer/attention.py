"""Causal attention over packed sequences, each alone, on one rank or several, and attention of drafted chains.

A chain continues from any row as a drafter does at inference: from row s on it reads its own states instead of the
target's. Its step i attends to the keys of the target's states up to row s, and to those of its own steps 1 to i. The
chains of a batch are computed side by side: step i is one query per chain.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from tltlab.records import frozen

CHUNK = 256
"""Queries whose scores are held at a time."""


@frozen
class SequenceGroup:
    """P ranks that compute the same T packed tokens together, T / P each, as DeepSpeed-Ulysses does (arXiv 2309.14509).

    All but attention is done token by token, on each rank's own tokens. For attention they swap: each gets all T tokens
    for a P-th of the heads, attends as one rank would, and returns the outputs. The result is exact for any packed
    lengths, and P must divide heads and KV heads.

    Memory per rank: activations of T / P tokens, and the logits of as many; only token ids and log-probs are whole.
    Communication: per layer each rank sends (P - 1) / P^2 * T * 2 (heads + KV heads) * D numbers in its forward pass
    (queries, keys and values there, outputs back), as many in its backward pass, and once more where activations are
    recomputed: 101 MB in bfloat16 for 32,768 tokens of Qwen2.5-7B (28 heads, 4 KV heads, D 128) and P = 4. For any P,
    log-probs are summed once per micro-batch, 4 T bytes.

    torch's own context parallelism (ring attention) requires batches of one length and CUDA kernels (torch 2.13,
    `torch.distributed.tensor.experimental._context_parallel`), so neither packed sequences nor a CPU.
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1

    def swap(self, tensor: Tensor) -> Tensor:
        """Exchange this rank's (P a, b, D) for (a, P b, D): its share of the first dimension, all ranks' of the second.

        Gradients are swapped back.
        """
        if self.group is None:
            return tensor
        parts = tensor.unflatten(0, (self.size, -1))
        received: Tensor = _Exchanged.apply(parts, self.group)  # type: ignore[no-untyped-call]
        return received.transpose(0, 1).flatten(1, 2)

    def join(self, part: Tensor, rows: slice, num: int) -> Tensor:
        """Return all `num_rows` rows from this rank's `part` and the others'; bitwise the same on every rank.

        All ranks continue alike from there, so a rank's part has the gradient of its own rows.
        """
        if self.group is None:
            return part
        joined = part.new_zeros(num, *part.shape[1:])
        joined[rows] = part.detach()
        if joined.numel():
            # Adding zeros to one number is exact.
            dist.all_reduce(joined, group=self.group)
        return torch.cat([joined[: rows.start], part, joined[rows.stop :]])


ALONE = SequenceGroup()
"""The group of one rank: nothing is swapped or joined."""


class _Exchanged(torch.autograd.Function):
    """Part r of (P, ...) goes to rank r; part r of the result comes from rank r."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Exchanged.apply(gradient, ctx.group), None  # type: ignore[no-untyped-call]


def causal_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """Attend within each of the sequences of `lengths` rows, T in all.

    Queries (1, heads, T, D), keys and values (1, KV heads, T, D); returns (1, heads, T, D).
    """
    parts = zip(*(tensor.split(list(lengths), 2) for tensor in (q, k, v)), strict=True)
    attended = [
        functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        for queries, keys, values in parts
    ]
    return torch.cat(attended, 2) if attended else q


def chain_attention(
    q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, rows: Tensor, firsts: Tensor
) -> Tensor:
    """Compute step i of chains from the rows `rows` (A): one from row s attends to the keys of its sequence up to s.

    It also attends to its own i keys. `rows` rise; `firsts` (A) are the first rows of their sequences. Queries (1,
    heads, A, D), shared keys and values (1, KV heads, T, D), own ones (1, KV heads, A, i, D). Returns (1, heads, A, D).
    """
    if not len(rows):
        return q
    attended = []
    parts = zip(*(tensor[0].split(CHUNK, 1) for tensor in (q, own_k, own_v)), strict=True)
    for (query, chain_k, chain_v), last, first in zip(parts, rows.split(CHUNK), firsts.split(CHUNK), strict=True):
        keys = torch.arange(int(first[0]), int(last[-1]) + 1, device=q.device)
        seen = (keys >= first[:, None]) & (keys <= last[:, None])
        grouped = query.unflatten(0, (k.shape[1], -1)) / q.shape[-1] ** 0.5  # (KV heads, heads per KV head, A, D)
        shared = torch.einsum("kgad,ktd->kgat", grouped, k[0, :, keys]).masked_fill(~seen, -torch.inf)
        own = torch.einsum("kgad,kasd->kgas", grouped, chain_k)
        weights = torch.softmax(torch.cat([shared, own], -1).float(), -1).to(v.dtype)
        of_shared, of_own = weights.split([len(keys), own.shape[-1]], -1)
        mixed = torch.einsum("kgat,ktd->kgad", of_shared, v[0, :, keys])
        attended.append((mixed + torch.einsum("kgas,kasd->kgad", of_own, chain_v)).flatten(0, 1))
    return torch.cat(attended, 1)[None]
