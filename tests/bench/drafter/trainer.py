"""What a drafter's training costs by itself: packing against padding, saving beside it, training recipes.

TLT's own figures (arXiv 2511.16665, Fig. 17 and Table 7) stand beside ours.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig

from bench.harness import Progress, Table, Text, in_turn, quiet, seconds_of
from tltlab.errors import ConfigError, RunError
from tltlab.runtime.drafter.checkpoint import DrafterCheckpoint
from tltlab.runtime.drafter.heads.eagle import EagleHead
from tltlab.runtime.drafter.heads.head import DrafterHead
from tltlab.runtime.drafter.heads.kinds import fit_inputs, new_head
from tltlab.runtime.drafter.heads.loss import drafter_loss
from tltlab.runtime.drafter.heads.target import FrozenTarget
from tltlab.runtime.drafter.offline.chains import acceptance_along
from tltlab.runtime.drafter.offline.data import Epochs, TargetStates, load_target
from tltlab.runtime.drafter.offline.warm_up import FIT_TOKENS
from tltlab.runtime.drafter.sequences import TrainingSequence, pack
from tltlab.runtime.drafter.training import DrafterTraining
from tltlab.runtime.engine.environment import hardware, versions
from tltlab.runtime.models.runs import prompts_of, sample_texts
from tltlab.runtime.recipe.drafter import LossConfig, OptimConfig
from tltlab.stats import interval_json, paired_interval

from .sizes import BenchSizes

TLT_RATIO = 2.2
Loss = Callable[[DrafterHead, FrozenTarget, Sequence[TrainingSequence]], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """A head to train: the target's hidden size, its MLP, its attention heads and vocabulary."""

    hidden_size: int = 128
    intermediate_size: int = 256
    num_heads: int = 4
    vocab_size: int = 512

    def head(self, seed: int) -> EagleHead:
        """A new EAGLE head."""
        torch.manual_seed(seed)
        return EagleHead(
            LlamaConfig(
                hidden_size=self.hidden_size, intermediate_size=self.intermediate_size, num_hidden_layers=1,
                num_attention_heads=self.num_heads, num_key_value_heads=self.num_heads, vocab_size=self.vocab_size,
            )
        )  # fmt: skip

    def frozen(self) -> FrozenTarget:
        """Embedding and LM head of a target."""
        generator = torch.Generator().manual_seed(0)
        embedding, lm_head = (torch.randn(self.vocab_size, self.hidden_size, generator=generator) for _ in range(2))
        return FrozenTarget(embedding=embedding, lm_head=lm_head)

    def sequence(self, num_tokens: int, seed: int = 0) -> TrainingSequence:
        """Random tokens and hidden states."""
        generator = torch.Generator().manual_seed(seed)
        return TrainingSequence(
            key=(0, "bench", seed, 0),
            token_ids=torch.randint(0, self.vocab_size, (num_tokens + 1,), generator=generator),
            hidden=torch.randn(num_tokens, self.hidden_size, generator=generator),
        )


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
    """Train on `samples` sequences a round, `batch` at a time, their lengths drawn from `lengths` (tokens).

    Both sides train the same head with the same loss on the same batches. The padded side does what the released TLT
    code does: every sequence is filled up to the longest of its batch, unsorted, and the loss leaves out what was
    filled in. Lengths are scaled down together where the longest of them is above `longest`. Returns `samples_per_s` of
    `padded` and `packed`, `ratio` with its 95 % interval, `filled`, the share of the padded side's rows that is
    padding, and the settings. ConfigError for fewer lengths than a batch.
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
    losses: dict[str, Loss] = {"padded": padded_loss, "packed": packed_loss}
    heads = {side: shape.head(seed) for side in losses}
    optimizers = {side: torch.optim.AdamW(head.parameters(), lr=1e-4) for side, head in heads.items()}
    frozen = shape.frozen()

    def train(side: str, batches: Sequence[Sequence[TrainingSequence]]) -> None:
        for sequences in batches:
            optimizers[side].zero_grad()
            losses[side](heads[side], frozen, sequences).backward()
            optimizers[side].step()

    def measure(side: str, number: int) -> float:
        # What torch does only once in a process is no side's cost: round -1 is of short sequences.
        batches = in_batches[number].tolist() if number >= 0 else [[8] * batch]
        return seconds_of(train, side, [[shape.sequence(n, seed + number + 1) for n in row] for row in batches])

    seconds = in_turn(losses, measure, rounds, rng=np.random.default_rng(seed))
    interval = paired_interval(seconds["padded"], seconds["packed"], rng=rng)
    rows = sum(int(row.size * row.max()) for lengths_now in in_batches for row in lengths_now)
    num_samples = num_batches * batch * rounds
    return {
        "samples_per_s": {name: round(num_samples / sum(took), 2) for name, took in seconds.items()},
        "ratio": {name: round(getattr(interval, name), 3) for name in ("estimate", "low", "high")},
        "tlt_ratio": TLT_RATIO,
        "filled": round(1 - sum(int(row.sum()) for row in in_batches) / rows, 3),
        "batch": batch,
        "rounds": rounds,
        "samples": num_samples,
        "mean_tokens": round(float(np.mean([row.mean() for row in in_batches])), 1),
        "longest_tokens": max(int(row.max()) for row in in_batches),
        "scale": round(scale, 4),
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "seed": seed,
    }


PACKING: Text = (
    "padded {samples_per_s.padded:.1f} samples/s, packed {samples_per_s.packed:.1f}: {ratio} times; TLT {tlt_ratio}",
    "{samples} sequences of {mean_tokens:.0f} tokens in the mean and {longest_tokens} at most, {batch} to a batch; "
    "{filled:.0%} of the padded rows are padding",
)


def packed_loss(head: DrafterHead, frozen: FrozenTarget, sequences: Sequence[TrainingSequence]) -> Tensor:
    """The EAGLE loss of sequences back to back."""
    return drafter_loss(head, frozen, pack(sequences, frozen.embedding.device), LossConfig()).loss


def padded_loss(head: DrafterHead, frozen: FrozenTarget, sequences: Sequence[TrainingSequence]) -> Tensor:
    """The EAGLE loss of a batch filled up to its longest sequence, in which what was filled in counts nothing."""
    tokens = pad_sequence([s.token_ids[1:-1] for s in sequences], batch_first=True)
    hidden = pad_sequence([s.hidden[:-1] for s in sequences], batch_first=True)
    target = pad_sequence([s.hidden[1:] for s in sequences], batch_first=True)
    rows = torch.arange(tokens.shape[1], device=tokens.device)
    ends = torch.tensor([s.num_rows - 1 for s in sequences], device=tokens.device)
    starts = torch.tensor([s.prompt_tokens - 2 for s in sequences], device=tokens.device)
    counted = ((rows < ends[:, None]) & (rows >= starts[:, None])).float()
    states = head(functional.embedding(tokens, frozen.embedding), hidden, rows.expand(len(sequences), -1))
    distance = functional.smooth_l1_loss(states, target, reduction="none").mean(-1)
    probabilities = torch.softmax(target @ frozen.lm_head.T, -1)
    cross = -(probabilities * torch.log_softmax(head.logits(states, frozen), -1)).sum(-1)
    config = LossConfig()
    per_row = config.hidden_weight * distance + config.token_weight * cross
    return (per_row * counted).sum() / counted.sum()


TLT_MS = {"full": 893.0, "full, async": 280.0, "selective, async": 97.0}


@dataclass(frozen=True, kw_only=True)
class StateShape:
    """What decides the sizes of a drafter's state; the defaults are Qwen2.5-7B's."""

    hidden: int = 3584
    intermediate: int = 18944
    kv_width: int = 512
    vocabulary: int = 152064

    def trained(self) -> dict[str, int]:
        """Weights of an EAGLE head by name."""
        square, kv, mlp = self.hidden**2, self.kv_width * self.hidden, self.intermediate * self.hidden
        return {
            "fc": 2 * square, "q_proj": square, "k_proj": kv, "v_proj": kv, "o_proj": square,
            "gate_proj": mlp, "up_proj": mlp, "down_proj": mlp, "norm": self.hidden,
        }  # fmt: skip

    def state(self, numbers: int, seed: int) -> dict[str, Tensor]:
        """Embedding, LM head, head and AdamW's two moments, about `numbers` float32 in these proportions."""
        sizes = dict.fromkeys(("frozen.embedding", "frozen.lm_head"), self.vocabulary * self.hidden)
        for part in ("head", "exp_avg", "exp_avg_sq"):
            sizes |= {f"{part}.{name}": size for name, size in self.trained().items()}
        share = numbers / sum(sizes.values())
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(max(1, round(size * share)), generator=generator) for name, size in sizes.items()}


def bench_checkpoint(
    megabytes: int = 240, rounds: int = 12, *, folder: Path | None = None, seed: int = 0, progress: Progress = quiet
) -> dict[str, Any]:
    """Save a drafter's state, `megabytes` of random float32 in Qwen2.5-7B's proportions, in three ways in random order.

    "full": embedding, LM head, head and AdamW's two moments, synchronously. "full, async": the same, staged and then
    written beside training. "selective, async": head and moments alone, as the trainer saves. All use PyTorch DCP with
    the same writer, which flushes to the disk under `folder` (None: the system's temporary folder). A save blocks until
    its caller may change the state; what is written beside is waited for before the next, not counted.

    Returns `rows`, for each way its bytes and the median of `blocking_s` and of `complete_s`, until it was on the disk;
    `ratio`, synchronous full over selective async, and `async_ratio`, over full async, with 95 % intervals.
    """
    if megabytes < 1 or rounds < 1:
        raise ConfigError("a checkpoint is measured on at least 1 MB and once")
    shape = StateShape()
    full = shape.state(megabytes * 1_000_000 // 4, seed)
    trained = {name: value for name, value in full.items() if not name.startswith("frozen.")}
    ways: dict[str, Mapping[str, Tensor]] = {"full": full, "full, async": full, "selective, async": trained}
    place = Path(tempfile.mkdtemp(dir=folder, prefix="checkpoints-"))
    savers = {way: DrafterCheckpoint(place / way.replace(", ", "-"), keep=1) for way in ways if way != "full"}

    def measure(way: str, number: int) -> tuple[float, float]:
        began = time.perf_counter()
        if way == "full":
            save(full, checkpoint_id=place / f"full{number}", no_dist=True)
            took_s = time.perf_counter() - began
            shutil.rmtree(place / f"full{number}")
            return took_s, took_s
        blocking_s = savers[way].save(ways[way])
        savers[way].finish()
        return blocking_s, time.perf_counter() - began

    try:
        counted = in_turn(ways, measure, rounds, rng=np.random.default_rng(seed), progress=progress)
    finally:
        for saver in savers.values():
            saver.close()
        shutil.rmtree(place, ignore_errors=True)
    if failures := [sentence for saver in savers.values() for sentence in saver.failures]:
        raise RunError(f"a checkpoint of the benchmark was not written: {failures[0]}")
    blocking = {way: [times[0] for times in measured] for way, measured in counted.items()}
    rows: list[dict[str, Any]] = [
        {
            "way": way,
            "bytes": sum(value.nbytes for value in ways[way].values()),
            "blocking_s": statistics.median(blocking[way]),
            "complete_s": statistics.median(times[1] for times in measured),
            "tlt_ms": TLT_MS[way],
        }
        for way, measured in counted.items()
    ]

    def ratio(way: str) -> dict[str, Any]:
        return asdict(paired_interval(blocking["full"], blocking[way], rng=np.random.default_rng(seed)))

    return {
        "rows": rows,
        "ratio": ratio("selective, async"),
        "async_ratio": ratio("full, async"),
        "median_ratio": rows[0]["blocking_s"] / rows[2]["blocking_s"],
        "tlt_ratio": TLT_MS["full"] / TLT_MS["selective, async"],
        "trained_share": rows[2]["bytes"] / rows[0]["bytes"],
        "megabytes": megabytes,
        "shape": asdict(shape),
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "seed": seed,
        "hardware": hardware(),
        "versions": versions(),
        "seconds": {way: [{"blocking_s": b, "complete_s": c} for b, c in times] for way, times in counted.items()},
    }


CHECKPOINT: Text = (
    Table(
        rows="rows",
        columns={
            "way": "{way}", "MB": "{bytes:1e-6*.0f}", "blocks ms": "{blocking_s:1e3*.1f}",
            "on disk ms": "{complete_s:1e3*.0f}", "TLT ms": "{tlt_ms:.0f}",
        },
    ),
    "selective async blocks {ratio:.1f} times shorter than a synchronous full save (medians {median_ratio:.1f}; TLT "
    "{tlt_ratio:.1f}); {trained_share:.0%} of the state is trained",
)  # fmt: skip

Recipe = Literal["eagle", "hass", "eagle3"]
TABLE_7: dict[Recipe, dict[str, float]] = {
    "eagle": {"accept_length": 6.53, "cost": 1.0},
    "hass": {"accept_length": 6.67, "cost": 3.0},
    "eagle3": {"accept_length": 6.83, "cost": 7.0},
}
MAX_BYTES = 1 << 29
"""Hidden states of the target that are kept at a time."""
DEPTH = 8
TOKENS_PER_UPDATE = 2048
MOST_MORE = 20
"""A recipe gets at most so many times the updates to use up its seconds."""


def bench_recipes(model: Path, sizes: BenchSizes, *, seed: int, progress: Progress) -> dict[str, Any]:
    """Train a fresh head by each recipe on the model's own responses, `sizes.updates` updates in turn.

    All see the same texts in the same order. Then those that took less time go on until all have had the same seconds
    of updates. Accept lengths are of drafts of 8 tokens on responses to held-out prompts. `cost` is the seconds of an
    update over those of EAGLE's. ConfigError where the model's responses teach nothing.
    """
    target, frozen = load_target(model)
    learned, heldout = (
        sample_texts(target, prompts_of(model, split, count), max_tokens=sizes.max_response_tokens, seed=seed + n)
        for n, (split, count) in enumerate((("train", 2 * sizes.warm_up_texts), ("heldout", sizes.texts)))
    )
    if not learned or not heldout:
        raise ConfigError(f"{model} answers in one token: there is nothing to draft")
    by_layers: dict[tuple[int, ...], TargetStates] = {}
    states: dict[Recipe, TargetStates] = {}
    trainings: dict[Recipe, DrafterTraining] = {}
    epochs: dict[Recipe, Epochs] = {}
    for kind in TABLE_7:
        loss = LossConfig(kind=kind)
        head = new_head(model, loss.method, seed)
        along = TargetStates(target, head.aux_layers, MAX_BYTES)
        states[kind] = by_layers.setdefault(tuple(head.aux_layers), along)
        first = Epochs(learned, states[kind], np.random.default_rng(seed)).take(FIT_TOKENS)
        fit_inputs(head, frozen, pack(first, target.device))
        epochs[kind] = Epochs(learned, states[kind], np.random.default_rng(seed))
        trainings[kind] = DrafterTraining(head, frozen, loss, OptimConfig(warmup=20), target.device)

    def update(kind: Recipe, number: int = 0) -> float:
        return trainings[kind].update(epochs[kind].take(TOKENS_PER_UPDATE)).seconds

    def reached() -> dict[Recipe, float]:
        return {
            kind: acceptance_along(
                training.head, training.frozen, (states[kind].of(text) for text in heldout), DEPTH
            ).accept_length
            for kind, training in trainings.items()
        }

    took = in_turn(TABLE_7, update, sizes.updates, warm_up=0)
    by_updates = reached()
    progress(f"after {sizes.updates} updates: {by_updates}")
    budget_s = max(sum(seconds) for seconds in took.values())
    for kind, training in trainings.items():
        seconds_left = budget_s - sum(took[kind])
        while seconds_left > 0 and training.updates < MOST_MORE * sizes.updates:
            seconds_left -= update(kind)
    by_seconds = reached()
    rng = np.random.default_rng(seed)
    return {
        "model": str(model),
        "responses": len(learned),
        "heldout_responses": len(heldout),
        "depth": DEPTH,
        "updates": sizes.updates,
        "seconds": budget_s,
        "tokens_per_update": TOKENS_PER_UPDATE,
        "threads": torch.get_num_threads(),
        "seed": seed,
        "rows": [
            {
                "recipe": kind,
                "accept_length": by_updates[kind],
                "update_s": float(np.median(took[kind])),
                "cost": interval_json(paired_interval(took[kind], took["eagle"], rng=rng)),
                "accept_length_same_seconds": by_seconds[kind],
                "updates_same_seconds": training.updates,
                "parameters": sum(p.numel() for p in training.head.parameters()),
                "tlt": TABLE_7[kind],
            }
            for kind, training in trainings.items()
        ],
    }


RECIPES: Text = (
    "{responses} responses to learn from, {heldout_responses} held out, drafts of {depth} tokens: after {updates} "
    "updates, then after {seconds:.0f} s each",
    Table(
        rows="rows",
        columns={
            "recipe": "{recipe}", "accept length": "{accept_length:.2f}", "cost of an update": "{cost}",
            "after the same seconds": "{accept_length_same_seconds:.2f}", "updates": "{updates_same_seconds}",
            "TLT: length": "{tlt.accept_length:.2f}", "cost": "{tlt.cost:.0f}x",
        },
    ),
)  # fmt: skip
