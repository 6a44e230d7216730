"""The offline warm-up of a drafter: responses of its target, the target's states along them, updates, a checkpoint."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError

from tltlab.config import counted
from tltlab.console import marked_folder
from tltlab.errors import ConfigError, RunError
from tltlab.files import write_json
from tltlab.records import Json
from tltlab.runtime.drafter.heads.head import DrafterHead
from tltlab.runtime.drafter.heads.kinds import fit_inputs, new_head
from tltlab.runtime.drafter.heads.layouts import load_head
from tltlab.runtime.drafter.heads.loss import drafter_loss
from tltlab.runtime.drafter.heads.target import FrozenTarget, read_config
from tltlab.runtime.drafter.sequences import TrainingSequence, pack
from tltlab.runtime.drafter.training import HeadTraining
from tltlab.runtime.recipe.drafter import WarmUpConfig

from .chains import acceptance_along
from .data import (
    Epochs,
    PromptedText,
    TargetStates,
    generate_responses,
    load_target,
    load_tokenizer,
    read_texts,
    split_by_prompt,
    usable_texts,
)

MARKER = "training.json"
GB = 1e9
FIT_TOKENS = 8192
"""Tokens for the initial fit of a fresh EAGLE head's first layer."""


def train_drafter(
    model: str | Path, data: str | Path, out: str | Path, config: WarmUpConfig, progress: Callable[[str], None]
) -> Json:
    """Train a drafter for the model in a folder on texts of `data`; write its checkpoint to `out` atomically.

    Return the contents of `training.json`: settings, data, and held-out acceptance and loss `before` and `after`. An
    earlier checkpoint there is replaced; anything else is an InputError, as is wrong input. The same arguments give the
    same weights on the same machine, except for text that an engine generates.

    >>> train_drafter("tiny", "tiny/train.jsonl", "heads/tiny", WarmUpConfig(), print)  # doctest: +SKIP
    """
    out = Path(out)
    began = time.perf_counter()
    with marked_folder(out, MARKER, SafetensorError) as folder:
        head = _head(Path(model), config)
        texts, heldout = _texts(str(model), data, config, progress)
        target, frozen = load_target(model)
        states = TargetStates(target, head.aux_layers, int(config.memory_gb * GB))
        rng = np.random.default_rng([config.seed, 1])
        epochs = Epochs(texts, states, rng)
        prepared_s = time.perf_counter() - began

        began = time.perf_counter()
        training = HeadTraining(head, frozen, config.loss, config.optim, target.device)
        before = after = _measured(head, frozen, heldout, states, config)
        progress(f"update 0: accept length {_length(before)} on {len(heldout)} held-out responses")
        if config.updates and config.head is None and config.loss.method == "eagle":
            fit_inputs(head, frozen, pack(epochs.take(FIT_TOKENS), target.device))
        tokens, checks, reached = 0, [], _reaches(before, config)
        while training.updates < config.updates and not reached:
            update = training.update(epochs.take(config.tokens_per_update))
            tokens += update.tokens
            if update.skipped:
                continue
            if training.updates % config.check_every == 0 or training.updates == config.updates:
                after = _measured(head, frozen, heldout, states, config)
                checks.append({"update": training.updates, "tokens": tokens, **after})
                progress(
                    f"update {training.updates}: accept length {_length(after)}, held-out loss {after['loss']:.4f}, "
                    f"{time.perf_counter() - began:.0f} s"
                )
                reached = _reaches(after, config)
        train_s = time.perf_counter() - began

        head.to("cpu").save(folder)
        report = {
            "model": str(Path(model).resolve()),
            "data": str(Path(data).resolve()),
            "recipe": config.loss.kind,
            "method": head.method,
            "settings": config.model_dump(mode="json"),
            "responses": len(texts) + len(heldout),
            "heldout_responses": len(heldout),
            "parameters": sum(p.numel() for p in head.parameters()),
            "updates": training.updates,
            "skipped_updates": training.skipped,
            "tokens": tokens,
            "prepare_s": round(prepared_s, 2),
            "train_s": round(train_s, 2),
            "target_tokens": states.computed,
            "before": before,
            "after": after,
            "checks": checks,
        }
        write_json(folder / MARKER, report)
    return {"out": str(out), **report}


def _head(model: Path, config: WarmUpConfig) -> DrafterHead:
    """Return the head to train. ConfigError where the given one does not fit the loss or the model."""
    if not model.is_dir():
        raise ConfigError(f"{model}: no such folder; the target is a Hugging Face model in a folder")
    if config.head is None:
        return new_head(model, config.loss.method, config.seed)
    head = load_head(config.head, target=model)
    if head.method != config.loss.method:
        raise ConfigError(
            f"{config.head} holds an {head.method} head, and {config.loss.kind} trains {config.loss.method} heads"
        )
    return head


def _texts(
    model: str, data: str | Path, config: WarmUpConfig, progress: Callable[[str], None]
) -> tuple[list[PromptedText], list[PromptedText]]:
    """Return texts to train on and held-out ones, their responses generated where the data has none."""
    shape = read_config(model)
    texts = read_texts(data, config.texts, load_tokenizer(model), np.random.default_rng([config.seed, 0]))
    if not any(text.token_ids for text in texts):
        progress(f"{counted(len(texts), 'prompt')}, answered by the model at temperature {config.texts.temperature:g}")
        texts = generate_responses(model, texts, config.texts, seed=config.seed, progress=progress)
    texts = usable_texts(texts, shape.vocab_size, shape.max_position_embeddings)
    trained, heldout = split_by_prompt(texts, config.heldout, config.seed)
    progress(
        f"{len(trained)} responses of {sum(len(t.token_ids) for t in trained)} tokens to train on, "
        f"{len(heldout)} held out"
    )
    return trained, heldout


@torch.no_grad()
def _measured(
    head: DrafterHead, frozen: FrozenTarget, heldout: Sequence[PromptedText], states: TargetStates, config: WarmUpConfig
) -> Json:
    """Return acceptance and mean loss of a row on held-out texts. RunError where that loss is not finite."""
    total, rows = 0.0, 0

    def each() -> Iterator[TrainingSequence]:
        nonlocal total, rows
        for text in heldout:
            sequence = states.of(text)
            if sequence.num_rows >= 2:
                result = drafter_loss(head, frozen, pack([sequence], frozen.embedding.device), config.loss)
                total, rows = total + float(result.loss) * result.rows, rows + result.rows
            yield sequence

    acceptance = acceptance_along(head, frozen, each(), config.depth)
    if not math.isfinite(total):
        raise RunError("the loss on held-out responses is not finite: look for NaN in the model's hidden states")
    return {**asdict(acceptance), "loss": total / rows if rows else 0.0}


def _reaches(measured: Json, config: WarmUpConfig) -> bool:
    least = config.until_accept_length
    return least is not None and float(measured["accept_length"]) >= least


def _length(measured: Json) -> float:
    return round(float(measured["accept_length"]), 3)
