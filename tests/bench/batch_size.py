"""Policies at forced batch sizes on one engine: their speed over plain decoding and over the best fixed strategy.

Requests continue from within long responses that the model gave before, and past the end of the text, so that the batch
keeps its size. Only iterations of the whole batch without prefill count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from bench.harness import Progress, Table, Text, in_turn, ratio
from tltlab.arrays import Floats
from tltlab.drafters.base import Key
from tltlab.drafters.specs import DEFAULT_DRAFTERS
from tltlab.errors import ConfigError, RunError
from tltlab.policies.policy import load_policy
from tltlab.records import Json
from tltlab.runtime.engine.engine import Engine
from tltlab.runtime.engine.environment import hardware, versions
from tltlab.runtime.engine.generation import GenerationRequest
from tltlab.runtime.models.runs import prompts_of
from tltlab.runtime.rollout.collected import requests_of
from tltlab.strategy import NO_SPECULATION, Strategy

PLAIN = "none"
TEMPERATURE = 1.0
UNSETTLED = 2
"""Iterations after a prefill that do not count: the first has nothing to verify yet."""
REQUESTS = 8
"""Fewest requests of a visit, batch after batch."""
Visits = Mapping[str, Sequence[Mapping[str, Any]]]
"""What each policy's visits to a batch size gave, by round."""


def bench_batch_size(
    model: Path,
    policies: Sequence[str],
    batches: Sequence[int],
    *,
    rounds: int,
    tokens: int,
    warm_up: int,
    seed: int,
    progress: Progress,
) -> Json:
    """Have every policy, and plain decoding, visit every batch size in each round; return a row for each pair.

    A visit generates `tokens` for each request on average, of at least REQUESTS requests. Policies learn for `warm_up`
    iterations at each batch size before the first round, apart for each, and continue from round to round.
    """
    chosen = {name: load_policy(name) for name in dict.fromkeys([PLAIN, *policies])}
    drafters: Json = dict(DEFAULT_DRAFTERS)
    for policy in chosen.values():
        drafters |= policy.drafters
    torch.set_num_threads(1)
    room, widest = int(AutoConfig.from_pretrained(model).max_position_embeddings), max(batches)
    prompts = prompts_of(model, "train", 4 * widest)
    if len(prompts) < widest:
        raise ConfigError(f"{model / 'train.jsonl'} has {len(prompts)} prompts: a batch of {widest} needs more")
    depth = max(arm.draft_depth for policy in chosen.values() for arm in policy.strategies)
    vllm_args = {"max_num_seqs": widest, "max_model_len": room, "gpu_memory_utilization": 0.4}
    learning = {
        (batch, name): (policy.build(np.random.default_rng([seed, batch])), policy.build_budget())
        for batch, (name, policy) in product(batches, chosen.items())
    }
    with closing(
        Engine(str(model), drafters=drafters, max_draft_depth=depth, seed=seed, vllm_args=vllm_args)
    ) as engine:
        engine.warm_up(TEMPERATURE)
        cap = min(4 * tokens, room // 2)
        requests = [request for prompt in prompts for request in requests_of(prompt, 0, 1, cap)]
        texts = engine.generate(requests, rl_step=0, temperature=TEMPERATURE).responses
        longest = sorted(zip(prompts, texts, strict=True), key=lambda pair: -len(pair[1].token_ids))
        starts = [[*prompt.token_ids, *text.token_ids[: len(text.token_ids) // 2]] for prompt, text in longest]
        forced = ForcedBatches(engine, starts[: max(widest, REQUESTS)], room, tokens)

        def visit(case: tuple[int, str], number: int) -> Json:
            order = np.random.default_rng([seed, case[0], number + 1]).permutation(len(forced.starts))
            engine.control.set_selector(*learning[case])
            return forced.visit(case[0], order, iterations=warm_up if number < 0 else 0)

        rng = np.random.default_rng(seed)
        visits = in_turn(learning, visit, rounds, rng=rng, progress=progress)
    fixed = [name for name, policy in chosen.items() if len(policy.strategies) == 1]
    return {
        "model": str(model), "rounds": rounds, "tokens": tokens, "warm_up": warm_up, "seed": seed,
        "hardware": hardware(), "versions": versions(),
        "rows": [
            {"batch": batch, **row}
            for batch in batches
            for row in rows_of({name: visits[batch, name] for name in chosen}, fixed)
        ],
    }  # fmt: skip


class ForcedBatches:
    """Batches of requests on an engine; each continues from one of `starts`, token ids, in a context of `room`."""

    def __init__(self, engine: Engine, starts: Sequence[list[int]], room: int, tokens: int) -> None:
        self.engine, self.starts, self.room, self.tokens = engine, starts, room, tokens
        self._number = 0

    def visit(self, batch: int, order: Sequence[int] | np.ndarray, *, iterations: int = 0) -> Json:
        """Generate at one batch size, from the starts in `order`: REQUESTS requests, or at least `iterations`.

        Return tokens per second, the number of verified drafts and of their accepted tokens, and the number of
        iterations by strategy (`ran`).
        """
        # What drafters know of these texts must not depend on the order of policies.
        self.engine.forget()
        rows: list[Mapping[str, Any]] = []
        num_requests = 0
        while len(rows) < iterations if iterations else num_requests < REQUESTS:
            rows += self._generate([self.starts[order[(num_requests + n) % len(order)]] for n in range(batch)])
            num_requests += batch
        verifying = [row for row in rows if row["num_drafted"]]
        return {
            "tokens_per_s": sum(row["num_generated"] for row in rows) / sum(row["duration"] for row in rows),
            "drafts": sum(len(row["accepted_per_request"]) for row in verifying),
            "accepted": sum(row["num_accepted"] for row in verifying),
            "ran": Counter(_strategy(row) for row in rows),
        }

    def _generate(self, starts: Sequence[list[int]]) -> list[Mapping[str, Any]]:
        """Return the iterations that count of one batch, which ends after `tokens` for each request on average."""
        self._number += 1
        requests = [
            GenerationRequest(
                key=(self._number, f"start-{n}", 0, 0),
                prompt_token_ids=start,
                max_response_tokens=self.room - len(start),
                ignore_eos=True,
            )
            for n, start in enumerate(starts)
        ]

        def enough(ended: Sequence[Key]) -> bool:
            # A request that has reached the model's context leaves a smaller batch.
            generated = sum(each.num_generated for each in self.engine.control.tracker.ended)
            return bool(ended) or generated >= len(starts) * self.tokens

        rollout = self.engine.generate(requests, rl_step=self._number, temperature=TEMPERATURE, until=enough)
        rows = [
            row for row in rollout.iterations.to_pylist() if row["batch"] == len(starts) and not row["prefill_tokens"]
        ]
        if len(rows) <= UNSETTLED:
            raise RunError(f"no iteration ran all {len(starts)} requests: take fewer tokens or smaller batches")
        return rows[UNSETTLED:]


def rows_of(visits: Visits, fixed: Sequence[str]) -> list[Json]:
    """Return a row for each policy at one batch size; those of a single strategy are `fixed`.

    `speed_up` is over plain decoding. `best` marks the fastest fixed policy. `of_best` is the speed of a policy that
    learns over that of the fixed one which is fastest in the other rounds, so that the noise of a round does not choose
    its own reference. `picks` is the strategy that ran most, in a share `picked` of the iterations.
    """
    speeds = {name: np.array([visit["tokens_per_s"] for visit in of]) for name, of in visits.items()}
    best = max(fixed, key=lambda name: float(speeds[name].mean()))
    rows = []
    for name, of in visits.items():
        drafts = sum(visit["drafts"] for visit in of)
        ran = sum((visit["ran"] for visit in of), Counter[str]())
        ((picks, most),) = ran.most_common(1)
        rows.append(
            {
                "policy": name,
                "tokens_per_s": float(speeds[name].mean()),
                "speed_up": None if name == PLAIN else ratio(speeds[name], speeds[PLAIN]),
                "accept_length": 1 + sum(visit["accepted"] for visit in of) / drafts if drafts else None,
                "picks": picks,
                "picked": most / ran.total(),
                "best": name == best,
                "of_best": None if name in fixed else of_best(speeds[name], np.array([speeds[f] for f in fixed])),
            }
        )
    return rows


def of_best(speed: Floats, fixed: Floats) -> dict[str, float | None]:
    """Return speeds by round over those of the row of `fixed` that is fastest in the other rounds."""
    others = fixed.sum(axis=1, keepdims=True) - fixed if fixed.shape[1] > 1 else fixed
    return ratio(speed, fixed[others.argmax(axis=0), np.arange(fixed.shape[1])])


def _strategy(row: Mapping[str, Any]) -> str:
    """Return the strategy of an iteration as text."""
    if not row["draft_depth"]:
        return str(NO_SPECULATION)
    return str(Strategy(row["drafter"], row["draft_depth"], row["top_k"], row["tokens_to_verify"]))


TEXT: Text = (
    "tokens per second over plain decoding at forced batch sizes, {rounds} rounds, {hardware}; of best: over the fixed "
    "strategy fastest in the other rounds; drafters forget before each visit",
    Table(
        "rows",
        "batch: {batch}; policy: {policy}; tokens/s: {tokens_per_s:.0f}; speed-up: {speed_up}; "
        "accept: {accept_length:.2f}; runs most: {picks}; in: {picked:.0%}; : {best:best||}; of best: {of_best}",
        left=2,
    ),
)
