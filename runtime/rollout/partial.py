"""Partial rollouts at a fixed concurrency (CoPRIS, arXiv 2511.05589): what still runs is cut and goes on later."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from tltlab.errors import ConfigError
from tltlab.runtime.data.order import DataOrder
from tltlab.runtime.data.prompts import Prompt
from tltlab.runtime.engine.engine import GenerationRequest, Response
from tltlab.runtime.recipe.recipe import PartialConfig, Recipe

from .collected import Collected, Key, RolloutTools, Rounds, left_behind, rewarded, rewards_by_key
from .samples import Trajectory, load_ragged, save_ragged

PENDING_FILE = "pending-responses.safetensors"

_PER_TOKEN = {"token_ids": np.int32, "logprobs": np.float64, "token_versions": np.int32}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialSample:
    """A response as far as it has come: per token its id, behaviour log-prob and policy version.

    `finish_reason` is "stop" or "length" once it is whole, and then it has its reward.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    token_versions: tuple[int, ...] = ()
    finish_reason: str | None = None
    reward: float | None = None

    def extended(self, response: Response, version: int, max_response_tokens: int) -> PartialSample:
        """With what `response`, drawn by policy `version`, adds."""
        token_ids = (*self.token_ids, *response.token_ids)
        reason = response.finish_reason
        if reason == "abort":
            reason = "length" if len(token_ids) == max_response_tokens else None
        return PartialSample(
            token_ids=token_ids,
            logprobs=(*self.logprobs, *response.logprobs),
            token_versions=self.token_versions + (version,) * len(response.token_ids),
            finish_reason=reason,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialGroup:
    """A prompt by its number in the data and the epoch it came up in, with its `group_size` samples."""

    number: int
    epoch: int
    samples: tuple[PartialSample, ...]

    @property
    def oldest_version(self) -> int | None:
        """The policy version of its oldest token, None before it has any."""
        return min((sample.token_versions[0] for sample in self.samples if sample.token_versions), default=None)

    @property
    def whole(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.samples)


class PartialRollouts:
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

    def __init__(self, recipe: Recipe, prompts: Sequence[Prompt], order: DataOrder, config: PartialConfig) -> None:
        self.recipe = recipe
        self.prompts = prompts
        self.order = order
        self.config = config
        self._pending: list[PartialGroup] = []
        self._left_behind: list[str] = []

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
        groups = [self._extended(group, responses, tools) for group in groups]
        num_cut = sum(response.finish_reason == "abort" for response in responses.values())
        drawn = {
            (n, sample): self._trajectory(group, sample)
            for n, group in enumerate(groups)
            for sample, found in enumerate(group.samples)
            if found.finish_reason is not None and found.reward is None
        }
        scored = dict(zip(drawn, rewarded(list(drawn.values()), tools), strict=True))
        groups = [_with_rewards(group, n, scored) for n, group in enumerate(groups)]
        whole = [group for group in groups if group.whole]
        self._pending = [group for group in groups if not group.whole]
        said, self._left_behind = self._left_behind, []
        return Collected(
            trajectories=[self._trajectory(group, sample) for group in whole for sample in range(len(group.samples))],
            groups=[n for n, group in enumerate(whole) for _ in group.samples],
            requests=rounds.requests,
            parts=rounds.parts,
            epochs={
                (tools.rl_step, self.prompts[group.number].prompt_id, sample, 0): group.epoch
                for group in groups
                for sample in range(len(group.samples))
            },
            rewards=rewards_by_key(scored.values(), tools.rl_step),
            rollout_s=rounds.rollout_s,
            reward_s=time.perf_counter() - start,
            notes=said + self._notes(young, num_dropped, num_cut),
        )

    def _too_old(self, group: PartialGroup, version: int) -> bool:
        oldest, limit = group.oldest_version, self.config.max_age
        return oldest is not None and limit is not None and version - oldest > limit

    def _new_groups(self, pending: Sequence[PartialGroup]) -> list[PartialGroup]:
        """As many as keep every engine full until its last group is whole."""
        rollout = self.recipe.rollout
        per_engine = -(-self.config.concurrency // rollout.num_workers)
        wanted = rollout.prompts_per_step + rollout.num_workers * (per_engine - 1)
        picked = self.order.take(max(wanted - len(pending), 0), exclude=[group.number for group in pending])
        samples = (PartialSample(),) * rollout.group_size
        return [PartialGroup(number=number, epoch=epoch, samples=samples) for epoch, number in picked]

    def _quotas(self) -> list[int]:
        """How many groups each worker completes: prompts_per_step in all, the first workers one more."""
        rollout = self.recipe.rollout
        share, more = divmod(rollout.prompts_per_step, rollout.num_workers)
        return [share + (worker < more) for worker in range(rollout.num_workers)]

    def _requests(self, groups: Sequence[PartialGroup], rl_step: int) -> list[GenerationRequest]:
        """What is left of `groups`: those with a prefix first."""
        requests = [
            (
                not sample.token_ids,
                GenerationRequest(
                    key=(rl_step, self.prompts[group.number].prompt_id, number, 0),
                    prompt_token_ids=[*self.prompts[group.number].token_ids, *sample.token_ids],
                    max_response_tokens=self.recipe.rollout.max_response_tokens - len(sample.token_ids),
                ),
            )
            for group in groups
            for number, sample in enumerate(group.samples)
            if sample.finish_reason is None
        ]
        return [request for _, request in sorted(requests, key=lambda request: request[0])]

    def _extended(self, group: PartialGroup, responses: Mapping[Key, Response], tools: RolloutTools) -> PartialGroup:
        prompt_id = self.prompts[group.number].prompt_id
        samples = []
        for number, sample in enumerate(group.samples):
            response = responses.get((tools.rl_step, prompt_id, number, 0))
            if response is not None:
                sample = sample.extended(response, tools.policy_version, self.recipe.rollout.max_response_tokens)
            samples.append(sample)
        return replace(group, samples=tuple(samples))

    def _trajectory(self, group: PartialGroup, number: int) -> Trajectory:
        sample = group.samples[number]
        return Trajectory(
            prompt=self.prompts[group.number],
            epoch=group.epoch,
            sample=number,
            token_ids=list(sample.token_ids),
            logprobs=list(sample.logprobs),
            token_versions=list(sample.token_versions),
            truncated=sample.finish_reason == "length",
            reward=sample.reward,
        )

    def _notes(self, resumed: Sequence[PartialGroup], num_dropped: int, num_cut: int) -> list[str]:
        went_on = sum(1 for group in resumed for s in group.samples if s.token_ids and s.finish_reason is None)
        cut = sum(1 for group in self._pending for s in group.samples if s.token_ids and s.finish_reason is None)
        said = f"{went_on} cut responses went on, {cut} are cut now, {num_cut - cut} were not begun"
        if num_dropped:
            said += f"; {num_dropped} groups older than {self.config.max_age} RL steps dropped"
        return [said]

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
                    "epoch": group.epoch,
                    "samples": [{"finish_reason": s.finish_reason, "reward": s.reward} for s in group.samples],
                }
                for group in self._pending
            ]
        }

    def load_state_dict(self, state: Mapping[str, Any], folder: Path) -> None:
        """Go on with the groups of `state`, none where it is of another way to roll out.

        ConfigError where the data is not what it was, or the cap is lower than a response that is to go on.
        """
        self._left_behind = left_behind(state, own="pending")
        if "pending" not in state:
            self._pending = []
            return
        cap = self.recipe.rollout.max_response_tokens
        columns = load_ragged(folder / PENDING_FILE)
        tokens = ({name: tuple(column[n].tolist()) for name, column in columns.items()} for n in count())
        pending = []
        for group in state["pending"]:
            number = group["number"]
            if number >= len(self.prompts) or self.prompts[number].prompt_id != group["prompt_id"]:
                raise ConfigError(
                    f"the checkpoint goes on with prompt {group['prompt_id']!r} as number {number} of the data, which "
                    "it no longer is: resume with the data that the run began with"
                )
            samples = tuple(PartialSample(**next(tokens), **sample) for sample in group["samples"])
            longest = max((len(s.token_ids) for s in samples if s.finish_reason is None), default=0)
            if longest >= cap:
                raise ConfigError(
                    f"the checkpoint goes on with a response of {longest} tokens, and rollout.max_response_tokens is "
                    f"{cap}: resume with more"
                )
            pending.append(PartialGroup(number=number, epoch=group["epoch"], samples=samples))
        self._pending = pending


def _with_rewards(group: PartialGroup, n: int, scored: Mapping[tuple[int, int], Trajectory]) -> PartialGroup:
    samples = [
        replace(sample, reward=scored[n, number].reward) if (n, number) in scored else sample
        for number, sample in enumerate(group.samples)
    ]
    return replace(group, samples=tuple(samples))
