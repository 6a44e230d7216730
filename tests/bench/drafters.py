"""Measures model-free drafters on recorded or made-up text: time and memory of their index, and what is accepted."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import Table, Text, alone, resident_bytes
from tltlab.drafters.base import Drafter
from tltlab.drafters.specs import SYSTEM_DRAFTERS, ModelFreeSpec, NgramSpec, SuffixSpec
from tltlab.errors import ConfigError, InputError
from tltlab.traces.trace import read

CASES: dict[str, ModelFreeSpec] = {
    "ngram, request": NgramSpec(scope="request"),
    "suffix, request": SuffixSpec(scopes=("request",)),
    **SYSTEM_DRAFTERS,
}


@dataclass(frozen=True, kw_only=True)
class Visits:
    """The responses to one prompt: those of earlier visits, and those that are replayed."""

    prompt_id: str
    prompt: list[int]
    earlier: list[list[int]]
    replayed: list[list[int]]


def bench_drafters(
    trace: Path | None = None,
    *,
    num_groups: int | None = None,
    response_tokens: int = 16_384,
    depth: int = 8,
    cases: Mapping[str, ModelFreeSpec] = CASES,
) -> dict[str, Any]:
    """Replay the same responses through every drafter, each in its own process.

    The text is that of `trace` (its first `num_groups` prompts; None: all) or made up (None: 2 prompts, 8 responses
    each). A prompt's last visit is replayed, all responses at once: `first` as if it were the only one, where only
    siblings help, then with `later`'s earlier visits remembered. A draft token is accepted while it equals the recorded
    text, then one more recorded token follows, as in an engine; at a temperature above 0 that is a cautious measure. A
    drafter that is not `live` indexes nothing meanwhile, so its insertion and memory are not seen.
    """
    groups = made_up(num_groups or 2, 8, response_tokens) if trace is None else recorded(trace, num_groups)
    rows = []
    for name, spec in cases.items():
        first, later = (alone(visit, spec, groups, depth, history) for history in (False, True))
        rows.append({"drafter": name, "settings": spec.model_dump(mode="json"), "first": first, "later": later})
    return {"num_tokens": sum(len(text) for g in groups for text in g.replayed), "depth": depth, "rows": rows}


def recorded(path: Path, num_groups: int | None = None) -> list[Visits]:
    """The prompts of a trace with tokens, by their last visit and what came before; later turns are left out.

    Where a prompt was visited once, half of its samples stand for an earlier visit; one sample is not enough.
    """
    tokens = read(path).tokens
    if tokens is None:
        raise InputError(f"{path}: no tokens.parquet in it, and drafters are replayed over recorded tokens")
    groups = []
    for prompt_id, rows in tokens[tokens["turn"] == 0].groupby("prompt_id", sort=False):
        prompt = rows["prompt_token_ids"].iloc[0].tolist()
        last = rows["rl_step"] == rows["rl_step"].max()
        earlier = [text.tolist() for text in rows["token_ids"][~last]]
        replayed = [text.tolist() for text in rows["token_ids"][last]]
        if not earlier:
            half = len(replayed) // 2
            earlier, replayed = replayed[:half], replayed[half:]
        if earlier:
            groups.append(Visits(prompt_id=str(prompt_id), prompt=prompt, earlier=earlier, replayed=replayed))
    if not groups:
        raise InputError(f"{path}: every prompt has one sample only, so there is no history to draft from")
    return groups[:num_groups]


def made_up(num_groups: int, num_samples: int, response_tokens: int) -> list[Visits]:
    """Responses that string together the phrases of their problem, with a stray token now and then.

    It has the length of reasoning text, not its statistics: what is accepted on it says nothing about a model.
    """
    if response_tokens < 2:
        raise ConfigError(f"response_tokens is {response_tokens}, it must be at least 2")
    rng = np.random.default_rng(0)
    groups = []
    for number in range(num_groups):
        phrases = [rng.integers(0, 32_000, rng.integers(8, 25)).tolist() for _ in range(1000)]
        texts = []
        for _ in range(num_samples):
            text: list[int] = []
            while len(text) < response_tokens:
                text += phrases[min(int(rng.zipf(1.3)), 1000) - 1]
                if rng.random() < 0.5:
                    text.append(int(rng.integers(0, 32_000)))
            texts.append(text[:response_tokens])
        prompt, half = rng.integers(0, 32_000, 256).tolist(), num_samples // 2
        groups.append(Visits(prompt_id=f"p{number}", prompt=prompt, earlier=texts[:half], replayed=texts[half:]))
    return groups


def visit(spec: ModelFreeSpec, groups: Sequence[Visits], depth: int, with_history: bool) -> dict[str, float | None]:
    """Replay the responses in this process with a fresh drafter."""
    drafter = spec.make()
    drafter.begin(0)
    gc.collect()
    before = resident_bytes()
    if with_history:
        for group in groups:
            for sample, text in enumerate(group.earlier):
                drafter.remember((0, group.prompt_id, sample, 0), group.prompt, text)
        drafter.begin(1)
    figures = replay(drafter, groups, depth)
    gc.collect()
    after = resident_bytes()
    num_tokens = [len(group.prompt) + sum(len(text) for text in group.replayed) for group in groups]
    bytes_per_token = None if before is None or after is None or with_history else (after - before) / sum(num_tokens)
    return figures | {"bytes_per_token": bytes_per_token}


def replay(drafter: Drafter, groups: Sequence[Visits], depth: int) -> dict[str, float | None]:
    """Run all responses side by side, an iteration of each in turn; they stay open."""
    open_ = {(1, group.prompt_id, i, 0): text for group in groups for i, text in enumerate(group.replayed) if text}
    for group in groups:
        for i in range(len(group.replayed)):
            drafter.open((1, group.prompt_id, i, 0), group.prompt)
    at = dict.fromkeys(open_, 1)
    for key, text in open_.items():
        drafter.extend(key, text[:1])
    drafter.catch_up()
    insert_s = lookup_s = 0.0
    lookups = inserted = drafted = accepted = 0
    while open_ := {key: text for key, text in open_.items() if at[key] < len(text)}:
        start = time.perf_counter()
        drafts = drafter.propose_all([(key, min(depth, len(text) - at[key])) for key, text in open_.items()])
        lookup_s += time.perf_counter() - start
        news = []
        for (key, text), (draft, _) in zip(open_.items(), drafts, strict=True):
            done = at[key]
            num_accepted = next((i for i, token in enumerate(draft) if token != text[done + i]), len(draft))
            drafter.observe(key, len(draft), num_accepted)
            news.append((key, text[done : done + num_accepted + 1]))
            at[key] += num_accepted + 1
            drafted += len(draft)
            accepted += num_accepted
        start = time.perf_counter()
        for key, new in news:
            drafter.extend(key, new)
        drafter.catch_up()
        insert_s += time.perf_counter() - start
        lookups += len(news)
        inserted += sum(len(new) for _, new in news)
    return {
        "insert_us_per_token": insert_s / max(inserted, 1) * 1e6,
        "lookup_us": lookup_s / max(lookups, 1) * 1e6,
        "drafted": drafted / max(lookups, 1),
        "accepted": accepted / max(lookups, 1),
    }


TEXT: Text = (
    "{num_tokens} tokens replayed, drafts of up to {depth}; accepted per look-up (of drafted)",
    Table(
        "rows",
        "drafter: {drafter}; insert us/token: {first.insert_us_per_token:.2f}; look-up us: {later.lookup_us:.2f}; "
        "B/token: {first.bytes_per_token:.0f}; first visit: {first.accepted:.2f} ({first.drafted:.2f}); "
        "with history: {later.accepted:.2f} ({later.drafted:.2f})",
    ),
)
