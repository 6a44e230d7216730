"""Tokens per second of an engine at forced batch sizes, under each fixed strategy and under a policy that learns.

Requests go on from within long responses that the model gave before, and past the end of the text where they come to
it, so that the batch stays what it is. Only iterations of the whole batch without prefill count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tltlab.drafters.base import Key
from tltlab.drafters.specs import DEFAULT_DRAFTERS
from tltlab.errors import ConfigError, RunError
from tltlab.policies.policy import Policy
from tltlab.policies.simple import Fixed
from tltlab.strategy import NO_SPECULATION, Strategy

if TYPE_CHECKING:
    from .batch_size import Settings

TEMPERATURE = 1.0
_UNSETTLED = 2
"""Iterations after a prefill that do not count: the first has nothing to verify yet."""
_STALL = 3.0
"""An iteration that takes longer than so many medians waited for something else on the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is measured: the settings' rounds of every batch size under every arm and the policy."""

    settings: Settings
    arms: tuple[Strategy, ...]
    policy: Policy

    @property
    def batches(self) -> list[int]:
        return sorted(set(self.settings.batches))


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One arm, or the policy, for which `arm` is None, at one batch size in one round.

    `seconds` are those of its iterations, stalls cut; `ran` counts them by strategy. `drafts` were verified and
    `accepted` of their tokens kept. Of `generated` tokens `past_end` came after the end of a text.
    """

    batch: int
    arm: Strategy | None
    round: int
    seconds: float
    num_tokens: int
    drafts: int
    accepted: int
    ran: Mapping[Strategy, int]
    past_end: int
    generated: int


def measure(model: Path, work: Work, *, seed: int, progress: Callable[[str], None]) -> list[Visit]:
    """All visits, on an engine that is closed afterwards. ConfigError where `model` has no prompts of its own."""
    import torch
    from transformers import AutoConfig

    from tltlab.runtime.engine.engine import Engine

    torch.set_num_threads(1)
    config = AutoConfig.from_pretrained(model)
    room = int(config.max_position_embeddings)
    depth = max(arm.draft_depth for arm in (*work.arms, *work.policy.strategies))
    progress(f"starting an engine on {model}")
    engine = Engine(
        str(model),
        drafters={**DEFAULT_DRAFTERS, **work.policy.drafters},
        max_draft_depth=depth,
        seed=seed,
        vllm_args={"max_num_seqs": max(work.batches), "max_model_len": room, "gpu_memory_utilization": 0.4},
    )
    try:
        engine.warm_up(TEMPERATURE)
        rng = np.random.default_rng(seed)
        bench = _Bench(engine, work, _starts(engine, model, work, room), room, config.eos_token_id, rng)
        return bench.run(seed, progress)
    finally:
        engine.close()


def _starts(engine: Any, model: Path, work: Work, room: int) -> list[list[int]]:
    """Token ids to go on from: prompts, each with the first half of a response among the longest."""
    from tltlab.runtime.engine.engine import GenerationRequest
    from tltlab.runtime.models.runs import prompts_of

    prompts = prompts_of(model, "train", 4 * max(work.batches))
    cap = min(4 * work.settings.tokens, room // 2)
    requests = [
        GenerationRequest(key=(0, prompt.prompt_id, 0, 0), prompt_token_ids=prompt.token_ids, max_response_tokens=cap)
        for prompt in prompts
    ]
    texts = engine.generate(requests, rl_step=0, temperature=TEMPERATURE).responses
    found = [
        prompt.token_ids + text.token_ids[: len(text.token_ids) // 2]
        for prompt, text in sorted(zip(prompts, texts, strict=True), key=lambda both: -len(both[1].token_ids))
    ]
    if len(found) < max(work.batches):
        raise ConfigError(
            f"{model / 'train.jsonl'} has {len(found)} prompts: a batch of {max(work.batches)} needs more"
        )
    return found[: max(max(work.batches), work.settings.requests)]


class _Bench:
    """The engine, what is asked of it, and the number of the next batch of requests, which is its RL step."""

    def __init__(
        self, engine: Any, work: Work, starts: Sequence[list[int]], room: int, end: Any, rng: np.random.Generator
    ) -> None:
        self.engine, self.work, self.starts, self.room, self.rng = engine, work, starts, room, rng
        self.ends = set(end) if isinstance(end, list) else {end}
        self.number = 0

    def run(self, seed: int, progress: Callable[[str], None]) -> list[Visit]:
        """Every batch size in turn within a round, arms and policy in a new order at each."""
        work = self.work
        learning = {
            batch: (work.policy.build(np.random.default_rng([seed, batch])), work.policy.build_budget())
            for batch in work.batches
        }
        for batch in work.batches:
            self._visit(batch, None, learning[batch], self._order(), -1, iterations=work.settings.warm_up)
        progress(f"the policy has learned for {work.settings.warm_up} iterations at {len(work.batches)} batch sizes")
        visits = []
        for round_ in range(work.settings.rounds):
            for batch in work.batches:
                order = self._order()
                modes: list[Strategy | None] = [*work.arms, None]
                for at in self.rng.permutation(len(modes)):
                    visits.append(self._visit(batch, modes[at], learning[batch], order, round_))
            seconds = sum(visit.seconds for visit in visits if visit.round == round_)
            progress(f"round {round_ + 1} of {work.settings.rounds}: {seconds:.1f} s")
        return visits

    def _order(self) -> list[int]:
        return [int(n) for n in self.rng.permutation(len(self.starts))]

    def _visit(
        self, batch: int, arm: Strategy | None, learning: Any, order: Sequence[int], round_: int, iterations: int = 0
    ) -> Visit:
        """Generate at one batch size: for at least so many `iterations`, or where they are 0 for the visit's tokens."""
        control = self.engine.control
        control.set_selector(*(learning if arm is None else (Fixed(arm), None)))
        # What drafters know of these texts must not depend on who went first.
        self.engine.forget()
        rows: list[dict[str, Any]] = []
        past = generated = 0
        loops = 0
        while len(rows) < iterations if iterations else loops * batch < self.work.settings.requests:
            chosen = [self.starts[order[(loops * batch + n) % len(order)]] for n in range(batch)]
            more, responses = self._generate(batch, chosen)
            if not more:
                raise RunError(f"no iteration ran all {batch} requests: take fewer tokens or smaller batches")
            rows += more
            past += sum(self._past_end(response.token_ids) for response in responses)
            generated += sum(len(response.token_ids) for response in responses)
            loops += 1
        verifying = [row for row in rows if row["num_drafted"]]
        return Visit(
            batch=batch,
            arm=arm,
            round=round_,
            seconds=_seconds(rows),
            num_tokens=sum(row["num_generated"] for row in rows),
            drafts=sum(len(row["accepted_per_request"]) for row in verifying),
            accepted=sum(row["num_accepted"] for row in verifying),
            ran=Counter(_strategy(row) for row in rows),
            past_end=past,
            generated=generated,
        )

    def _generate(self, batch: int, starts: Sequence[list[int]]) -> tuple[list[dict[str, Any]], Sequence[Any]]:
        """Rows that count, and the responses; it ends after the `tokens` of the work for each request on average."""
        from tltlab.runtime.engine.engine import GenerationRequest

        self.number += 1
        requests = [
            GenerationRequest(
                key=(self.number, f"start-{n}", 0, 0),
                prompt_token_ids=start,
                max_response_tokens=self.room - len(start),
                ignore_eos=True,
            )
            for n, start in enumerate(starts)
        ]
        done = seen = 0

        def enough(ended: Sequence[Key]) -> bool:
            nonlocal done, seen
            rows = self.engine.control.ledger.iterations
            done += sum(row["num_generated"] for row in rows[seen:])
            seen = len(rows)
            # A request that has reached the model's context leaves a smaller batch.
            return bool(ended) or done >= batch * self.work.settings.tokens

        rollout = self.engine.generate(requests, rl_step=self.number, temperature=TEMPERATURE, until=enough)
        rows = [row for row in rollout.iterations if row["batch"] == batch and not row["prefill_tokens"]]
        return rows[_UNSETTLED:], rollout.responses

    def _past_end(self, tokens: Sequence[int]) -> int:
        end = next((n for n, token in enumerate(tokens) if token in self.ends), len(tokens) - 1)
        return len(tokens) - 1 - end


def _seconds(rows: Sequence[Mapping[str, Any]]) -> float:
    """The sum of durations, each at most `_STALL` times the median of its strategy's in the visit."""
    by_strategy: dict[Strategy, list[float]] = {}
    for row in rows:
        by_strategy.setdefault(_strategy(row), []).append(row["duration"])
    return float(sum(np.minimum(each, _STALL * np.median(each)).sum() for each in by_strategy.values()))


def _strategy(row: Mapping[str, Any]) -> Strategy:
    """What an iteration verified."""
    if not row["draft_depth"]:
        return NO_SPECULATION
    return Strategy(row["drafter"], row["draft_depth"], row["top_k"], row["tokens_to_verify"])
