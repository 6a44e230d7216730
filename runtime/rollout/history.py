"""History of a run's drafters: whole responses by prompt, each once per node, bounded in size.

Workers hold nothing between rollouts: with its requests a worker receives the earlier responses to their prompts. A
restarted worker therefore drafts like the old one, and history is saved once, for any number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from tltlab.arrays import Tokens
from tltlab.drafters.base import Key
from tltlab.drafters.specs import DrafterSpec, SuffixSpec
from tltlab.policies.policy import Policy
from tltlab.runtime.engine.drafter_pool import DrafterPool
from tltlab.runtime.engine.generation import GenerationRequest, Rollout

from .collected import load_ragged, save_ragged

NextUse = Callable[[Sequence[str]], Sequence[int | None]]
"""For each of these prompt ids, the number of prompts before it occurs again; None for never."""

TEXTS_FILE = "responses.safetensors"
LOW = 15 / 16
"""Fill level after entries were dropped: the order of dropping is recomputed only now and then."""


def anytime(prompt_ids: Sequence[str]) -> list[int | None]:
    """Return 0 for each prompt: with unknown order any may be the next."""
    return [0] * len(prompt_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Visit:
    """The responses to a prompt in one RL step: a reference to a list of (key, prompt, response), int32."""

    number: int
    responses: Any
    num_responses: int
    num_bytes: int


_OF_OWN: dict[str, Any] = {"scopes": ("problem",), "window": None, "history_mib": 256.0}
"""Settings for drafter classes of a user's own: earlier responses to recurring prompts are kept."""


class RunHistory:
    """The whole responses of a run that its drafters can draft from, an object in Ray's store per prompt and step.

    `serve` sets the policy. Drafters with scope "problem" need the responses to the prompts of the rollout, drafters
    with scope "global" all responses, others none (`of`). For each prompt the newest visits that fill the drafters'
    window are kept, in all `max_bytes` of tokens, the largest `history_mib` of the drafters in use. Prompts that do not
    occur again in the run are dropped at once; over the bound the prompts that occur last are dropped. For drafters
    with scope "global" the oldest visits are dropped.
    """

    def __init__(self, specs: Mapping[str, DrafterSpec]) -> None:
        self._drafters = DrafterPool(specs, 0)
        self._visits: dict[str, list[_Visit]] = {}
        self._next = 0
        self.window = 0.0
        self.max_bytes = 0.0
        self.everything = False

    def serve(self, policy: Policy) -> None:
        """Keep from now on the responses that the drafters of `policy` can draft from."""
        names = self._drafters.model_free(policy.strategies)
        specs = [spec for spec in (self._drafters.specs[name] for name in names) if getattr(spec, "remembers", False)]
        memories = [spec.arguments() if isinstance(spec, SuffixSpec) else _OF_OWN for spec in specs]
        self.everything = any("global" in settings["scopes"] for settings in memories)
        self.window = max((settings["window"] or math.inf for settings in memories), default=0.0)
        self.max_bytes = max(((settings["history_mib"] or math.inf) * 2**20 for settings in memories), default=0.0)

    @property
    def num_bytes(self) -> int:
        return sum(visit.num_bytes for visits in self._visits.values() for visit in visits)

    def of(self, requests: Sequence[GenerationRequest]) -> list[Any]:
        """Return references to the history for these requests, oldest first: lists of (key, prompt, response)."""
        if not self.window:
            return []
        if self.everything:
            return [visit.responses for visit in self._in_order()]
        prompts = dict.fromkeys(request.key[1] for request in requests)
        return [visit.responses for prompt_id in prompts for visit in self._visits.get(prompt_id, ())]

    def add(self, shares: Sequence[Sequence[GenerationRequest]], parts: Sequence[Rollout], due: NextUse) -> None:
        """Add the whole responses of an RL step. O(tokens)."""
        if not self.window:
            return
        prompts = {request.key: request.prompt_token_ids for share in shares for request in share}
        texts: dict[str, list[tuple[Key, Sequence[int], Sequence[int]]]] = {}
        for part in parts:
            for response in part.responses:
                if response.finish_reason != "abort":
                    key = response.key
                    texts.setdefault(key[1], []).append((key, prompts[key], response.token_ids))
        coming = [True] * len(texts) if self.everything else [turn is not None for turn in due(list(texts))]
        for (prompt_id, responses), comes in zip(texts.items(), coming, strict=True):
            if comes:
                self._store(prompt_id, responses)
                visits = self._visits[prompt_id]
                while sum(visit.num_responses for visit in visits[1:]) >= self.window:
                    del visits[0]
            else:
                self._visits.pop(prompt_id, None)
        self._keep_bound(due)

    def state_dict(self, folder: Path) -> list[Any]:
        """Return the keys of the responses, as JSON types; the texts go to a file in `folder`, which is made."""
        folder.mkdir()
        tokens: list[Tokens] = []
        rows = []
        for visit in self._in_order():
            keys, last_prompt = [], None
            for key, prompt, response in ray.get(visit.responses):
                new = last_prompt is None or not np.array_equal(prompt, last_prompt)
                tokens += [prompt, response] if new else [response]
                keys.append([*key, new])
                last_prompt = prompt
            rows.append(keys)
        save_ragged(folder / TEXTS_FILE, tokens=tokens)
        return rows

    def load_state_dict(self, rows: Sequence[Any] | None, folder: Path) -> None:
        """Restore the result of `state_dict`; None, of a checkpoint without it, is an empty history."""
        self._visits = {}
        tokens = iter(load_ragged(folder / TEXTS_FILE)["tokens"] if rows else ())
        prompt: Tokens = np.empty(0, np.int32)
        for visit in rows or ():
            responses: list[tuple[Key, Any, Any]] = []
            for rl_step, prompt_id, sample, turn, new in visit:
                prompt = next(tokens) if new else prompt
                responses.append(((rl_step, prompt_id, sample, turn), prompt, next(tokens)))
            self._store(visit[0][1], responses)

    def _store(self, prompt_id: str, responses: Sequence[tuple[Key, Sequence[int], Sequence[int]]]) -> None:
        packed: list[tuple[Key, Tokens, Tokens]] = []
        last: tuple[Sequence[int], Tokens] | None = None
        num_tokens = 0
        for key, prompt, response in responses:
            if last is None or (last[0] is not prompt and list(last[0]) != list(prompt)):
                # One array for all samples, also after its way through Ray.
                last = prompt, np.array(prompt, np.int32)
                num_tokens += len(prompt)
            packed.append((key, last[1], np.array(response, np.int32)))
            num_tokens += len(response)
        new = _Visit(number=self._next, responses=ray.put(packed), num_responses=len(packed), num_bytes=4 * num_tokens)
        self._next += 1
        self._visits.setdefault(prompt_id, []).append(new)

    def _keep_bound(self, due: NextUse) -> None:
        surplus = self.num_bytes - self.max_bytes
        if surplus <= 0:
            return
        surplus += (1 - LOW) * self.max_bytes
        names = list(self._visits)
        if self.everything:
            order = sorted(names, key=lambda name: self._visits[name][-1].number)
        else:
            turns = {name: math.inf if turn is None else turn for name, turn in zip(names, due(names), strict=True)}
            order = sorted(names, key=lambda name: (-turns[name], self._visits[name][-1].number))
        for name in order:
            if surplus <= 0:
                return
            surplus -= sum(visit.num_bytes for visit in self._visits.pop(name))

    def _in_order(self) -> list[_Visit]:
        """Return all visits, the oldest first."""
        visits = [visit for of_prompt in self._visits.values() for visit in of_prompt]
        return sorted(visits, key=lambda visit: visit.number)
