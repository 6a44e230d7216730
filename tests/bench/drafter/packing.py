"""What packing is worth: samples per second of drafter training with padding and with packing, on given lengths.

Both sides train the same EAGLE head with the same loss on the same batches: `batch` sequences drawn in random order,
forward, backward and optimizer step. The padded side is what the released TLT code does: every sequence of a batch is
filled up to the longest of it, the head and the LM head run over all of it, and the loss leaves out what was filled in.
It sorts nothing by length, as that code does not. Sides alternate within each round, and the ratio is of rounds.

TLT (arXiv 2511.16665, Fig. 17) reports 13.3 and 29.6 samples/s, 2.2 times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig

from tltlab.errors import ConfigError
from tltlab.runtime.drafter.heads.eagle import EagleHead
from tltlab.runtime.drafter.heads.head import DrafterHead
from tltlab.runtime.drafter.heads.loss import drafter_loss
from tltlab.runtime.drafter.heads.target import FrozenTarget
from tltlab.runtime.drafter.sequences import TrainingSequence, pack
from tltlab.runtime.recipe.drafter import LossConfig
from tltlab.stats import paired_interval

TLT_RATIO = 2.2


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """The head that is trained: the target's hidden size, its MLP, its attention heads and vocabulary."""

    hidden_size: int = 128
    intermediate_size: int = 256
    num_heads: int = 4
    vocab_size: int = 512


def bench_packing(
    lengths: Sequence[int],
    *,
    shape: HeadShape = HeadShape(),
    batch: int = 8,
    samples: int = 96,
    rounds: int = 8,
    longest: int = 2048,
    seed: int = 0,
) -> dict[str, Any]:
    """Train on `samples` sequences a round, their lengths drawn from `lengths` (tokens) without replacement.

    Lengths are scaled down together where the longest of them is above `longest`. Returns a record for JSON:
    `samples_per_s` of `padded` and `packed` over all rounds, `ratio` with its 95 % interval, `filled`, the share of the
    padded side's rows that is padding, and the settings. ConfigError for fewer lengths than a batch.
    """
    usable = np.asarray([length for length in lengths if length >= 2], dtype=np.int64)
    if len(usable) < batch or batch < 1 or rounds < 1:
        raise ConfigError(
            f"{len(usable)} lengths of 2 tokens and more do not fill a batch of {batch} in {rounds} rounds"
        )
    scale = min(1.0, longest / int(usable.max()))
    rng = np.random.default_rng(seed)
    num_batches = max(min(samples, len(usable)) // batch, 1)
    drawn = [rng.permutation(usable)[: num_batches * batch] for _ in range(rounds)]
    in_batches = [np.maximum(np.round(row * scale), 2).astype(np.int64).reshape(num_batches, batch) for row in drawn]
    sides: dict[str, Callable[[DrafterHead, FrozenTarget, Sequence[TrainingSequence]], Tensor]] = {
        "padded": padded_loss,
        "packed": lambda head, frozen, texts: (
            drafter_loss(head, frozen, pack(texts, frozen.embedding.device), LossConfig()).loss
        ),
    }
    trained = {name: _Side(shape, seed, loss) for name, loss in sides.items()}
    frozen = _target(shape, seed)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    # What torch does only once in a process is no side's cost.
    warm = [[_sequence(shape, 8, seed)] * batch]
    for side in trained.values():
        side.train(frozen, warm)
    for number, lengths_now in enumerate(in_batches):
        data = [[_sequence(shape, int(n), seed + number) for n in row] for row in lengths_now]
        for name in sorted(sides, reverse=bool(number % 2)):
            seconds[name].append(trained[name].train(frozen, data))
    per_round = num_batches * batch
    interval = paired_interval(seconds["padded"], seconds["packed"], rng=rng)
    rows = sum(int(row.size * row.max()) for lengths_now in in_batches for row in lengths_now)
    return {
        "samples_per_s": {name: round(per_round * rounds / sum(took), 2) for name, took in seconds.items()},
        "ratio": {name: round(getattr(interval, name), 3) for name in ("estimate", "low", "high")},
        "tlt_ratio": TLT_RATIO,
        "filled": round(1 - sum(int(row.sum()) for row in in_batches) / rows, 3),
        "batch": batch,
        "rounds": rounds,
        "samples": per_round * rounds,
        "mean_tokens": round(float(np.mean([row.mean() for row in in_batches])), 1),
        "longest_tokens": max(int(row.max()) for row in in_batches),
        "scale": round(scale, 4),
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "seed": seed,
    }


def text(result: dict[str, Any]) -> str:
    """A record of `bench_packing` in a few lines."""
    speed, ratio = result["samples_per_s"], result["ratio"]
    return (
        f"padded {speed['padded']:.1f} samples/s, packed {speed['packed']:.1f}: {ratio['estimate']:.2f}x "
        f"(95 % {ratio['low']:.2f} to {ratio['high']:.2f}); TLT reports {result['tlt_ratio']}x\n"
        f"{result['samples']} sequences of {result['mean_tokens']:.0f} tokens in the mean and "
        f"{result['longest_tokens']} at most, {result['batch']} to a batch; {result['filled']:.0%} of the padded rows "
        f"are padding"
    )


def padded_loss(head: DrafterHead, frozen: FrozenTarget, sequences: Sequence[TrainingSequence]) -> Tensor:
    """The EAGLE loss of a batch filled up to its longest sequence, in which what was filled in counts nothing."""
    tokens = pad_sequence([s.token_ids[1:-1] for s in sequences], batch_first=True)
    hidden = pad_sequence([s.hidden[:-1] for s in sequences], batch_first=True)
    target = pad_sequence([s.hidden[1:] for s in sequences], batch_first=True)
    rows = torch.arange(tokens.shape[1], device=tokens.device)
    ends = torch.tensor([s.num_rows - 1 for s in sequences], device=tokens.device)
    starts = torch.tensor([s.prompt_tokens - 2 for s in sequences], device=tokens.device)
    counted = ((rows < ends[:, None]) & (rows >= starts[:, None])).float()
    positions = rows.expand(len(sequences), -1)
    states = head(functional.embedding(tokens, frozen.embedding), hidden, positions)
    distance = functional.smooth_l1_loss(states, target, reduction="none").mean(-1)
    probabilities = torch.softmax(target @ frozen.lm_head.T, -1)
    cross = -(probabilities * torch.log_softmax(head.logits(states, frozen), -1)).sum(-1)
    config = LossConfig()
    per_row = config.hidden_weight * distance + config.token_weight * cross
    return (per_row * counted).sum() / counted.sum()


class _Side:
    """One way to train, with a head and moments of its own."""

    def __init__(
        self,
        shape: HeadShape,
        seed: int,
        loss: Callable[[DrafterHead, FrozenTarget, Sequence[TrainingSequence]], Tensor],
    ) -> None:
        torch.manual_seed(seed)
        self.loss = loss
        self.head = EagleHead(
            LlamaConfig(
                hidden_size=shape.hidden_size,
                intermediate_size=shape.intermediate_size,
                num_hidden_layers=1,
                num_attention_heads=shape.num_heads,
                num_key_value_heads=shape.num_heads,
                vocab_size=shape.vocab_size,
            )
        )
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=1e-4)

    def train(self, frozen: FrozenTarget, batches: Sequence[Sequence[TrainingSequence]]) -> float:
        """One update a batch. Returns the seconds."""
        started = time.perf_counter()
        for sequences in batches:
            self.optimizer.zero_grad()
            self.loss(self.head, frozen, sequences).backward()
            self.optimizer.step()
        return time.perf_counter() - started


def _target(shape: HeadShape, seed: int) -> FrozenTarget:
    generator = torch.Generator().manual_seed(seed)
    embedding, lm_head = (torch.randn(shape.vocab_size, shape.hidden_size, generator=generator) for _ in range(2))
    return FrozenTarget(embedding=embedding, lm_head=lm_head)


def _sequence(shape: HeadShape, num_tokens: int, seed: int) -> TrainingSequence:
    generator = torch.Generator().manual_seed(seed)
    return TrainingSequence(
        key=(0, "bench", seed, 0),
        token_ids=torch.randint(0, shape.vocab_size, (num_tokens + 1,), generator=generator),
        hidden=torch.randn(num_tokens, shape.hidden_size, generator=generator),
    )
