"""How an RL step gets its responses: the protocol, and the synchronous way, whole groups under one policy."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tltlab.runtime.data.order import DataOrder
from tltlab.runtime.data.prompts import Prompt
from tltlab.runtime.recipe.recipe import Recipe

from .collected import Collected, Key, RolloutTools, Rounds, left_behind, requests_of, rewarded, rewards_by_key
from .partial import PartialRollouts
from .prefix_reuse import ReusingRollouts
from .samples import Trajectory

__all__ = ["Collected", "RolloutTools", "Rollouts", "SynchronousRollouts", "rollouts_of"]


class Rollouts(Protocol):
    """A way to get an RL step's responses. What it carries from step to step is in `state_dict`."""

    @property
    def on_policy(self) -> bool:
        """Whether every response is distributed as the policy that is about to be trained draws it."""

    def collect(self, tools: RolloutTools) -> Collected:
        """Roll out one RL step."""

    def state_dict(self, folder: Path) -> dict[str, Any]:
        """What later RL steps depend on, as JSON types; arrays go to files in `folder`."""

    def load_state_dict(self, state: Mapping[str, Any], folder: Path) -> None:
        """Go back to what `state_dict` gave; the next RL step notes what another way to roll out left in it."""


class SynchronousRollouts:
    """Every RL step draws prompts_per_step groups anew, and ends with the last response.

    With `train.sampling_rounds` above 1 groups whose rewards are all equal, which teach nothing, are replaced by as
    many new prompts in another round (dynamic sampling of DAPO, arXiv 2503.14476, section 3.2). A truncated response
    counts with what `train.overlong` = "zero" leaves of its reward; the soft penalty for length makes no difference, as
    in DAPO's scripts, which compare accuracies. Every response of every round is in the trace; trained are the groups
    with a difference, and where the rounds do not bring enough, those that there are.
    """

    on_policy = True

    def __init__(self, recipe: Recipe, prompts: Sequence[Prompt], order: DataOrder) -> None:
        self.recipe = recipe
        self.prompts = prompts
        self.order = order
        self._left_behind: list[str] = []

    def collect(self, tools: RolloutTools) -> Collected:
        """Roll out one RL step; every round asks for exactly the groups that are missing."""
        rollout, max_rounds = self.recipe.rollout, self.recipe.train.sampling_rounds
        rounds = Rounds(tools)
        asked: list[int] = []
        epochs: dict[Key, int] = {}
        rewards: dict[Key, float] = {}
        kept: list[list[Trajectory]] = []
        reward_s = 0.0
        while rounds.num_rounds < max_rounds and len(kept) < rollout.prompts_per_step:
            picked = self.order.take(rollout.prompts_per_step - len(kept), exclude=asked)
            if not picked:
                break
            asked += [number for _, number in picked]
            requests = {
                number: requests_of(
                    self.prompts[number], tools.rl_step, rollout.group_size, rollout.max_response_tokens
                )
                for _, number in picked
            }
            responses = rounds.generate(tools.share([r for group in requests.values() for r in group]))
            start = time.perf_counter()
            drawn = rewarded(
                [
                    Trajectory(
                        prompt=self.prompts[number],
                        epoch=epoch,
                        sample=request.key[2],
                        token_ids=responses[request.key].token_ids,
                        logprobs=responses[request.key].logprobs,
                        token_versions=[tools.policy_version] * len(responses[request.key].token_ids),
                        truncated=responses[request.key].finish_reason == "length",
                    )
                    for epoch, number in picked
                    for request in requests[number]
                ],
                tools,
            )
            reward_s = time.perf_counter() - start
            epochs |= {request.key: epoch for epoch, number in picked for request in requests[number]}
            rewards |= rewards_by_key(drawn, tools.rl_step)
            groups = [drawn[i : i + rollout.group_size] for i in range(0, len(drawn), rollout.group_size)]
            kept += [g for g in groups if max_rounds == 1 or self._differs(g)]
        said, self._left_behind = self._left_behind, []
        return Collected(
            trajectories=[t for group in kept for t in group],
            groups=[n for n, group in enumerate(kept) for _ in group],
            requests=rounds.requests,
            parts=rounds.parts,
            epochs=epochs,
            rewards=rewards,
            submitted_s=rounds.submitted_s,
            rollout_s=rounds.rollout_s,
            reward_s=reward_s,
            notes=said + self._notes(len(kept), len(asked), rounds.num_rounds),
        )

    def _differs(self, group: Sequence[Trajectory]) -> bool:
        zero = self.recipe.train.overlong == "zero"
        return len({min(t.reward or 0.0, 0.0) if zero and t.truncated else t.reward for t in group}) > 1

    def _notes(self, num_kept: int, num_asked: int, num_rounds: int) -> list[str]:
        wanted = self.recipe.rollout.prompts_per_step
        if self.recipe.train.sampling_rounds == 1 or (num_rounds == 1 and num_kept == wanted):
            return []
        said = f"rewards differ within {num_kept} of {num_asked} groups of {num_rounds} rounds"
        return [said if num_kept == wanted else f"{said}: trained on those, not on {wanted}"]

    def state_dict(self, folder: Path) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any], folder: Path) -> None:
        self._left_behind = left_behind(state)


def rollouts_of(recipe: Recipe, prompts: Sequence[Prompt], order: DataOrder) -> Rollouts:
    """The recipe's way of rolling out; ConfigError for what does not fit together."""
    if recipe.rollout.partial is not None:
        return PartialRollouts(recipe, prompts, order, recipe.rollout.partial)
    if recipe.rollout.reuse is not None:
        return ReusingRollouts(recipe, prompts, order, recipe.rollout.reuse)
    return SynchronousRollouts(recipe, prompts, order)
