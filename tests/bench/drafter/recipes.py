"""EAGLE, HASS and EAGLE-3 on the same responses of one model: what they reach, and what an update of each costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from bench.train.figures import as_text, decimals
from tltlab.console import table
from tltlab.errors import ConfigError
from tltlab.runtime.drafter.heads.head import DrafterHead
from tltlab.runtime.drafter.heads.kinds import fit_inputs, new_head
from tltlab.runtime.drafter.offline.chains import acceptance_along
from tltlab.runtime.drafter.offline.data import Epochs, TargetStates, load_target
from tltlab.runtime.drafter.offline.warm_up import FIT_TOKENS
from tltlab.runtime.drafter.sequences import pack
from tltlab.runtime.drafter.training import DrafterTraining
from tltlab.runtime.models.runs import Progress, prompts_of, sample_texts
from tltlab.runtime.recipe.drafter import LossConfig, OptimConfig
from tltlab.stats import interval_json, paired_interval

from .runs import MAX_BYTES, BenchSizes

Kind = Literal["eagle", "hass", "eagle3"]

TABLE_7: dict[Kind, dict[str, float]] = {
    "eagle": {"accept_length": 6.53, "cost": 1.0},
    "hass": {"accept_length": 6.67, "cost": 3.0},
    "eagle3": {"accept_length": 6.83, "cost": 7.0},
}
"""TLT's own (arXiv 2511.16665, Table 7)."""

DEPTH = 8
TOKENS_PER_UPDATE = 2048
MOST_MORE = 20
"""A recipe gets at most so many times the updates to use up its seconds."""


@dataclass(kw_only=True)
class _Student:
    """One recipe's head in training, and the seconds of each update."""

    kind: Kind
    head: DrafterHead
    training: DrafterTraining
    epochs: Epochs
    seconds: list[float] = field(default_factory=list)

    def update(self) -> None:
        """One update on the next texts, whose hidden states are not counted."""
        sequences = self.epochs.take(TOKENS_PER_UPDATE)
        self.seconds.append(self.training.update(sequences).seconds)


def bench_recipes(model: Path, sizes: BenchSizes, *, seed: int, progress: Progress) -> dict[str, Any]:
    """Train a fresh head by each recipe on the model's own responses, `sizes.updates` updates in turn.

    All see the same texts in the same order. Then those that took less time go on until all have had the same seconds
    of updates. Accept lengths are of drafts of 8 tokens on responses to held-out prompts. `cost` is the seconds of an
    update over those of EAGLE's. ConfigError where the model's responses teach nothing.
    """
    target, frozen = load_target(model)
    learned, heldout = (
        sample_texts(
            target,
            prompts_of(model, split, count),
            max_tokens=sizes.max_response_tokens,
            seed=seed + n,
        )
        for n, (split, count) in enumerate((("train", 2 * sizes.warm_up_texts), ("heldout", sizes.texts)))
    )
    if not learned or not heldout:
        raise ConfigError(f"{model} answers in one token: there is nothing to draft")
    states: dict[tuple[int, ...], TargetStates] = {}
    students = []
    for kind in TABLE_7:
        loss = LossConfig(kind=kind)
        head = new_head(model, loss.method, seed)
        along = states.setdefault(tuple(head.aux_layers), TargetStates(target, head.aux_layers, MAX_BYTES))
        epochs = Epochs(learned, along, np.random.default_rng(seed))
        training = DrafterTraining(head, frozen, loss, OptimConfig(warmup=20), target.device)
        first = Epochs(learned, along, np.random.default_rng(seed)).take(FIT_TOKENS)
        fit_inputs(head, frozen, pack(first, target.device))
        students.append(_Student(kind=kind, head=head, training=training, epochs=epochs))

    def reached() -> dict[Kind, float]:
        return {
            s.kind: acceptance_along(
                s.head, s.training.frozen, (states[tuple(s.head.aux_layers)].of(text) for text in heldout), DEPTH
            ).accept_length
            for s in students
        }

    # In turn, so that what else the machine does meets all alike.
    for _ in range(sizes.updates):
        for student in students:
            student.update()
    by_updates = reached()
    progress(f"after {sizes.updates} updates: {_lengths_text(by_updates)}")
    took = {s.kind: list(s.seconds) for s in students}
    budget_s = max(sum(seconds) for seconds in took.values())
    for student in students:
        while sum(student.seconds) < budget_s and student.training.updates < MOST_MORE * sizes.updates:
            student.update()
    by_seconds = reached()
    progress(f"after {budget_s:.0f} s of updates each: {_lengths_text(by_seconds)}")
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
                "recipe": s.kind,
                "accept_length": by_updates[s.kind],
                "update_s": float(np.median(took[s.kind])),
                "cost": interval_json(paired_interval(took[s.kind], took["eagle"], rng=rng)),
                "accept_length_same_seconds": by_seconds[s.kind],
                "updates_same_seconds": s.training.updates,
                "parameters": sum(p.numel() for p in s.head.parameters()),
                "tlt": TABLE_7[s.kind],
            }
            for s in students
        ],
    }


def _lengths_text(lengths: Mapping[Kind, float]) -> str:
    return ", ".join(f"{kind} {length:.2f}" for kind, length in lengths.items())


def text(result: Mapping[str, Any]) -> str:
    """The result for people."""
    lines = [
        f"{result['responses']} responses to learn from, {result['heldout_responses']} held out, drafts of "
        f"{result['depth']} tokens",
    ]
    rows = [
        (
            row["recipe"], decimals(row["accept_length"]), as_text(row["cost"]),
            decimals(row["accept_length_same_seconds"]), row["updates_same_seconds"],
            f"{row['tlt']['accept_length']:.2f}, {row['tlt']['cost']:.0f}x",
        )
        for row in result["rows"]
    ]  # fmt: skip
    after = (f"after {result['updates']} updates", "cost of an update", f"after {result['seconds']:.0f} s")
    lines.append(table(("recipe", *after, "updates", "TLT: length, cost"), rows))
    return "\n".join(lines)
