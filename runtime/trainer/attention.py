"""Causal attention over packed sequences, each alone, and that of chains which go on from any of their rows.

A chain is what a drafter does at inference: from row s on it reads states of its own making instead of the target's.
Its step i sees the keys that the target's states gave up to row s, and those of its own steps 1 to i. All chains of a
batch, one from each row, are followed side by side: step i is one query per row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 256
"""Queries whose scores are held at a time."""


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


def chain_attention(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, lengths: Sequence[int]) -> Tensor:
    """Step i of the chains from all T rows: row s sees the keys of its sequence up to s, and its own i.

    Queries (1, heads, T, D), shared keys and values (1, KV heads, T, D), own ones (1, KV heads, T, i, D). Returns
    (1, heads, T, D).
    """
    num_kv, width = k.shape[1], q.shape[-1]
    grouped = q[0].unflatten(0, (num_kv, -1)) / width**0.5  # (KV heads, heads per KV head, T, D)
    own = torch.einsum("kgtd,ktsd->kgts", grouped, own_k[0])
    attended, begin = [], 0
    for length in lengths:
        for start in range(0, length, CHUNK):
            stop = min(start + CHUNK, length)
            rows = slice(begin + start, begin + stop)
            # Keys beyond the last query of the chunk are seen by none of them.
            before = slice(begin, begin + stop)
            unseen = torch.ones(stop - start, stop, dtype=torch.bool, device=q.device).triu(start + 1)
            shared = (grouped[:, :, rows] @ k[0, :, None, before].transpose(2, 3)).masked_fill(unseen, -torch.inf)
            weights = torch.softmax(torch.cat([shared, own[:, :, rows]], -1).float(), -1).to(v.dtype)
            mixed = weights[..., :stop] @ v[0, :, None, before]
            mixed = mixed + torch.einsum("kgts,ktsd->kgtd", weights[..., stop:], own_v[0, :, rows])
            attended.append(mixed)
        begin += length
    return torch.cat(attended, 2).flatten(0, 1)[None] if attended else q


def two_part_attention(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, own_k: Tensor, own_v: Tensor) -> Tensor:
    """Attention of A queries (A, heads, D) over shared keys (KV heads, T, D) and own ones (A, KV heads, S, D).

    `seen` (A, T) says which of the shared keys a query may see. Returns (A, heads, D).
    """
    num_kv, width = keys.shape[0], q.shape[-1]
    grouped = q.unflatten(1, (num_kv, -1))  # (A, KV heads, heads per KV head, D)
    shared = torch.einsum("akgd,ktd->akgt", grouped, keys).masked_fill(~seen[:, None, None], -torch.inf)
    own = torch.einsum("akgd,aksd->akgs", grouped, own_k)
    scores = torch.cat([shared, own], -1).float() / width**0.5
    weights = torch.softmax(scores, -1).to(values.dtype)
    length = keys.shape[1]
    mixed = torch.einsum("akgt,ktd->akgd", weights[..., :length], values)
    mixed = mixed + torch.einsum("akgs,aksd->akgd", weights[..., length:], own_v)
    return mixed.flatten(1, 2)
