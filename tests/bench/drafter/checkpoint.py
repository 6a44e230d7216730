"""For how long a checkpoint holds training up: everything at once, everything beside training, and what is trained."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from tltlab.console import table
from tltlab.errors import ConfigError, RunError
from tltlab.runtime.drafter.checkpoint import DrafterCheckpoint
from tltlab.runtime.engine.environment import hardware, versions
from tltlab.stats import paired_interval

TLT_MS = {"full": 893.0, "full, async": 280.0, "selective, async": 97.0}
"""TLT's own (arXiv 2511.16665, Fig. 17)."""


@dataclass(frozen=True, kw_only=True)
class StateShape:
    """What decides the sizes of a drafter's state; the defaults are Qwen2.5-7B's."""

    hidden: int = 3584
    intermediate: int = 18944
    kv_width: int = 512
    vocabulary: int = 152064

    def trained(self) -> dict[str, int]:
        """Weights of an EAGLE head by name."""
        hidden = self.hidden
        return {
            "fc": 2 * hidden * hidden,
            "q_proj": hidden * hidden,
            "k_proj": self.kv_width * hidden,
            "v_proj": self.kv_width * hidden,
            "o_proj": hidden * hidden,
            "gate_proj": self.intermediate * hidden,
            "up_proj": self.intermediate * hidden,
            "down_proj": self.intermediate * hidden,
            "norm": hidden,
        }

    def frozen(self) -> dict[str, int]:
        """The target's weights that a drafter shares."""
        return {"embedding": self.vocabulary * self.hidden, "lm_head": self.vocabulary * self.hidden}


def bench_checkpoint(
    megabytes: int = 240,
    rounds: int = 12,
    *,
    folder: Path | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Save a drafter's state of random float32 numbers in three ways, in random order, `rounds` times after a first.

    "full": embedding, LM head, head and AdamW's two moments, synchronously. "full, async": the same, staged and then
    written beside training. "selective, async": head and moments alone, as the trainer saves. The state has the
    proportions of Qwen2.5-7B's, scaled to `megabytes` in all. All three use PyTorch DCP with the same writer, which
    flushes to the disk under `folder` (None: the system's temporary folder). A save blocks until its caller may change
    the state; what is written beside is waited for before the next, not counted.

    Returns `rows`, for each way its bytes and the median of `blocking_s` and of `complete_s`, until it was on the disk;
    `ratio`, synchronous full over selective async, and `async_ratio`, over full async, of the sums with 95 % intervals;
    TLT's own milliseconds; and every measurement.
    """
    if megabytes < 1 or rounds < 1:
        raise ConfigError("a checkpoint is measured on at least 1 MB and once")
    shape = StateShape()
    full = _state(shape, megabytes * 1_000_000 // 4, seed)
    trained = {name: value for name, value in full.items() if not name.startswith("frozen.")}
    ways: dict[str, Mapping[str, Tensor]] = {"full": full, "full, async": full, "selective, async": trained}
    measured: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    order = np.random.default_rng(seed)
    place = Path(tempfile.mkdtemp(dir=folder, prefix="checkpoints-"))
    savers = {way: DrafterCheckpoint(place / way.replace(", ", "-"), keep=1) for way in ways if way != "full"}
    try:
        for round_ in range(rounds + 1):
            for way in order.permutation(list(ways)).tolist():
                began = time.perf_counter()
                if way == "full":
                    save(full, checkpoint_id=place / f"full-{round_}", no_dist=True)
                    blocking = time.perf_counter() - began
                else:
                    blocking = savers[way].save(ways[way])
                    savers[way].finish()
                measured[way].append((blocking, time.perf_counter() - began))
                shutil.rmtree(place / f"full-{round_}", ignore_errors=True)
            progress(f"round {round_} of {rounds}" + (", to warm up" * (not round_)))
    finally:
        for saver in savers.values():
            saver.close()
        shutil.rmtree(place, ignore_errors=True)
    failures = [sentence for saver in savers.values() for sentence in saver.failures]
    if failures:
        raise RunError(f"a checkpoint of the benchmark was not written: {failures[0]}")
    counted = {way: times[1:] for way, times in measured.items()}
    rows: list[dict[str, Any]] = [
        {
            "way": way,
            "bytes": sum(value.nbytes for value in ways[way].values()),
            "blocking_s": statistics.median(blocking for blocking, _ in times),
            "complete_s": statistics.median(complete for _, complete in times),
            "tlt_ms": TLT_MS[way],
        }
        for way, times in counted.items()
    ]

    def ratio(way: str) -> dict[str, Any]:
        slow, fast = ([blocking for blocking, _ in counted[name]] for name in ("full", way))
        return asdict(paired_interval(slow, fast, rng=np.random.default_rng(seed)))

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


def text(result: Mapping[str, Any]) -> str:
    """A table of what `bench_checkpoint` returned."""
    rows = [
        (
            row["way"], f"{row['bytes'] / 1e6:.0f}", f"{row['blocking_s'] * 1e3:.1f}",
            f"{row['complete_s'] * 1e3:.0f}", f"{row['tlt_ms']:.0f}",
        )
        for row in result["rows"]
    ]  # fmt: skip
    lines = [table(("way", "MB", "blocks ms", "on disk ms", "TLT ms"), rows)]
    ratio = result["ratio"]
    lines.append(
        f"selective async blocks {ratio['estimate']:.1f} [{ratio['low']:.1f}, {ratio['high']:.1f}] times shorter than "
        f"a synchronous full save (medians {result['median_ratio']:.1f}; TLT {result['tlt_ratio']:.1f}); "
        f"{result['trained_share']:.0%} of the state is trained"
    )
    return "\n".join(lines)


def _state(shape: StateShape, numbers: int, seed: int) -> dict[str, Tensor]:
    """Tensors in the proportions of `shape`, about `numbers` float32 in all."""
    frozen, trained = shape.frozen(), shape.trained()
    share = numbers / (sum(frozen.values()) + 3 * sum(trained.values()))
    sizes = {f"frozen.{name}": size for name, size in frozen.items()}
    for part in ("head", "exp_avg", "exp_avg_sq"):
        sizes |= {f"{part}.{name}": size for name, size in trained.items()}
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(max(1, round(size * share)), generator=generator) for name, size in sizes.items()}
