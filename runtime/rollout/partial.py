"""Partial rollouts at a fixed concurrency (CoPRIS, arXiv 2511.05589): what still runs is cut and goes on later."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tltlab.errors import ConfigError
from tltlab.runtime.data.order import DataOrder
from tltlab.runtime.data.prompts import Prompt
from tltlab.runtime.engine.generation import GenerationRequest
from tltlab.runtime.recipe.recipe import PartialConfig, Recipe

from .collected import (
    Collected,
    Rollouts,
    RolloutTools,
    Rounds,
    Trajectory,
    load_ragged,
    rewarded,
    rewards_by_key,
    save_ragged,
)

PENDING_FILE = "pending-responses.safetensors"

_PER_TOKEN = {"token_ids": np.int32, "logprobs": np.float64, "token_versions": np.int32}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialGroup:
    """The `group_size` responses to a prompt, which is number `number` of the data, as far as they have come."""

    number: int
    samples: list[Trajectory]

    @property
    def oldest_version(self) -> int | None:
        """The policy version of its oldest token, None before it has any."""
        return min((sample.token_versions[0] for sample in self.samples if sample.token_versions), default=None)

    @property
    def whole(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.samples)

    @property
    def num_cut(self) -> int:
        return sum(1 for sample in self.samples if sample.token_ids and sample.finish_reason is None)


class PartialRollouts(Rollouts):
    """Runs `concurrency` requests at any time until prompts_per_step groups are whole, and cuts the rest.

    Every worker's engine runs its share of `concurrency` at most and stops at its share of the groups. Cut responses go
    on first, in the order in which their groups were first asked for, on whatever worker, from prompt and prefix; then
    come what never started and new prompts. A worker is given as many groups as keep its engine full to the end
    however uneven they are: with G groups to complete and C requests at a time G - 1 + C, for G - 1 groups may be whole
    and each of the others down to one request. A response that spans RL steps has the log-probs and versions of the
    policies that drew its tokens, so it is off-policy. A group with a token of a policy more than `max_age` versions
    old is dropped. In the trace each RL step's part of a response is a row of its own, "abort" where it was cut; what
    was cut before its first token has none.
    """

    on_policy = False
    carries = "pending"

    def __init__(self, recipe: Recipe, prompts: Sequence[Prompt], order: DataOrder, config: PartialConfig) -> None:
        super().__init__(recipe, prompts, order)
        self.config = config
        self._pending: list[PartialGroup] = []

    def collect(self, tools: RolloutTools) -> Collected:
        """Roll out one RL step; trained are all groups that are whole at its end."""
        young = [group for group in self._pending if not self._too_old(group, tools.policy_version)]
        num_dropped = len(self._pending) - len(young)
        groups = [*young, *self._new_groups(young)]
        num_workers = self.recipe.rollout.num_workers
        placed = [groups[worker::num_workers] for worker in range(num_workers)]
        quotas = [min(quota, len(part)) for quota, part in zip(self._quotas(), placed, strict=True)]
        rounds = Rounds(tools)
        responses = rounds.generate([self._requests(part, tools.rl_step) for part in placed], quotas)

        start = time.perf_counter()
        groups = [replace(g, samples=self._extended(g.samples, responses, tools)) for g in groups]
        ended = [t for g in groups for t in g.samples if t.finish_reason is not None and t.reward is None]
        scored = {t.key(tools.rl_step): t for t in rewarded(ended, tools)}
        groups = [replace(g, samples=[scored.get(t.key(tools.rl_step), t) for t in g.samples]) for g in groups]
        whole = [group for group in groups if group.whole]
        self._pending = [group for group in groups if not group.whole]
        num_aborted = sum(response.finish_reason == "abort" for response in responses.values())
        return Collected(
            trajectories=[t for group in whole for t in group.samples],
            groups=[n for n, group in enumerate(whole) for _ in group.samples],
            requests=rounds.requests,
            parts=rounds.parts,
            epochs={t.key(tools.rl_step): t.epoch for group in groups for t in group.samples},
            rewards=rewards_by_key(scored.values(), tools.rl_step),
            rollout_s=rounds.rollout_s,
            reward_s=time.perf_counter() - start,
            notes=self._take_left_behind() + self._notes(young, num_dropped, num_aborted),
        )

    @property
    def under_way(self) -> list[int]:
        return [group.number for group in self._pending]

    def _too_old(self, group: PartialGroup, version: int) -> bool:
        oldest, limit = group.oldest_version, self.config.max_age
        return oldest is not None and limit is not None and version - oldest > limit

    def _new_groups(self, pending: Sequence[PartialGroup]) -> list[PartialGroup]:
        """As many as keep every engine full until its last group is whole."""
        rollout = self.recipe.rollout
        per_engine = -(-self.config.concurrency // rollout.num_workers)
        wanted = rollout.prompts_per_step + rollout.num_workers * (per_engine - 1)
        picked = self.order.take(max(wanted - len(pending), 0), exclude=[group.number for group in pending])
        return [PartialGroup(number=number, samples=self._blank(number, epoch)) for epoch, number in picked]

    def _quotas(self) -> list[int]:
        """How many groups each worker completes: prompts_per_step in all, the first workers one more."""
        rollout = self.recipe.rollout
        share, more = divmod(rollout.prompts_per_step, rollout.num_workers)
        return [share + (worker < more) for worker in range(rollout.num_workers)]

    def _requests(self, groups: Sequence[PartialGroup], rl_step: int) -> list[GenerationRequest]:
        """What is left of `groups`: those with a prefix first."""
        left = [t for group in groups for t in group.samples if t.finish_reason is None]
        left.sort(key=lambda t: not t.token_ids)
        return [t.request(rl_step, self.recipe.rollout.max_response_tokens) for t in left]

    def _notes(self, resumed: Sequence[PartialGroup], num_dropped: int, num_aborted: int) -> list[str]:
        went_on, cut = (sum(group.num_cut for group in groups) for groups in (resumed, self._pending))
        note = f"{went_on} cut responses went on, {cut} are cut now, {num_aborted - cut} were not begun"
        if num_dropped:
            note += f"; {num_dropped} groups older than {self.config.max_age} RL steps dropped"
        return [note]

    def state_dict(self, folder: Path) -> dict[str, Any]:
        """The groups that are not whole; their tokens go to `PENDING_FILE` in `folder`."""
        samples = [sample for group in self._pending for sample in group.samples]
        save_ragged(
            folder / PENDING_FILE,
            **{name: [np.array(getattr(s, name), kind) for s in samples] for name, kind in _PER_TOKEN.items()},
        )
        return {
            "pending": [
                {
                    "prompt_id": self.prompts[group.number].prompt_id,
                    "number": group.number,
                    "epoch": group.samples[0].epoch,
                    "samples": [{"finish_reason": s.finish_reason, "reward": s.reward} for s in group.samples],
                }
                for group in self._pending
            ]
        }

    def _load(self, carried: list[Any] | None, folder: Path) -> None:
        """ConfigError where the data is not what it was, or the cap is lower than a response that is to go on."""
        self._pending = []
        if carried is None:
            return
        cap = self.recipe.rollout.max_response_tokens
        columns = load_ragged(folder / PENDING_FILE)
        tokens = iter(zip(*(columns[name] for name in _PER_TOKEN), strict=True))
        pending = []
        for group in carried:
            number = group["number"]
            if number >= len(self.prompts) or self.prompts[number].prompt_id != group["prompt_id"]:
                raise ConfigError(
                    f"the checkpoint goes on with prompt {group['prompt_id']!r} as number {number} of the data, which "
                    "it no longer is: resume with the data that the run began with"
                )
            samples = []
            for n, sample in enumerate(group["samples"]):
                token_ids, logprobs, versions = next(tokens)
                samples.append(
                    Trajectory(
                        prompt=self.prompts[number],
                        epoch=group["epoch"],
                        sample=n,
                        token_ids=array("i", token_ids.tolist()),
                        logprobs=array("f", logprobs.tolist()),
                        token_versions=array("i", versions.tolist()),
                        **sample,
                    )
                )
            longest = max((len(s.token_ids) for s in samples if s.finish_reason is None), default=0)
            if longest >= cap:
                raise ConfigError(
                    f"the checkpoint goes on with a response of {longest} tokens, and rollout.max_response_tokens is "
                    f"{cap}: resume with more"
                )
            pending.append(PartialGroup(number=number, samples=samples))
        self._pending = pending
