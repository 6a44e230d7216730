"""The synchronous collection of an RL step's responses, whole groups under one policy, and a recipe's choice."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tltlab.config import counted
from tltlab.drafters.base import Key
from tltlab.runtime.data.order import DataOrder
from tltlab.runtime.data.prompts import Prompt
from tltlab.runtime.recipe.recipe import Recipe

from .collected import Collected, Rollouts, RolloutTools, Rounds, Trajectory, rewarded, rewards_by_key
from .partial import AsynchronousRollouts, PartialRollouts
from .prefix_reuse import ReusingRollouts


class SynchronousRollouts(Rollouts):
    """Every RL step draws prompts_per_step groups anew, and ends with the last response.

    With `train.sampling_rounds` above 1 groups whose rewards are all equal, which have no gradient, are replaced by as
    many new prompts in another round (dynamic sampling of DAPO, arXiv 2503.14476, section 3.2). A truncated response
    counts with its reward after `train.overlong` = "zero"; the soft penalty for length is ignored, as in DAPO's
    scripts, which compare accuracies. The trace has every response of every round. Training uses the groups with a
    difference, or fewer than prompts_per_step where the rounds do not yield enough.
    """

    on_policy = True

    def collect(self, tools: RolloutTools) -> Collected:
        """Roll out one RL step; every round requests exactly the missing groups."""
        rollout, max_rounds = self.recipe.rollout, self.recipe.train.sampling_rounds
        rounds = Rounds(tools)
        numbers: list[int] = []
        epochs: dict[Key, int] = {}
        rewards: dict[Key, float] = {}
        groups: list[list[Trajectory]] = []
        reward_s = 0.0
        while rounds.num_rounds < max_rounds and len(groups) < rollout.prompts_per_step:
            batch = self.order.take(rollout.prompts_per_step - len(groups), exclude=numbers)
            if not batch:
                break
            numbers += [number for _, number in batch]
            blank = [t for epoch, number in batch for t in self._blank(number, epoch)]
            requests = [t.request(tools.rl_step, rollout.max_response_tokens) for t in blank]
            responses = rounds.generate(tools.share(requests))
            start = time.perf_counter()
            trajectories = rewarded(self._extended(blank, responses, tools), tools)
            reward_s = time.perf_counter() - start
            epochs |= {t.key(tools.rl_step): t.epoch for t in trajectories}
            rewards |= rewards_by_key(trajectories, tools.rl_step)
            new = [trajectories[i : i + rollout.group_size] for i in range(0, len(trajectories), rollout.group_size)]
            groups += [group for group in new if max_rounds == 1 or self._differs(group)]
        return Collected(
            trajectories=[t for group in groups for t in group],
            groups=[n for n, group in enumerate(groups) for _ in group],
            requests=rounds.requests,
            parts=rounds.parts,
            epochs=epochs,
            rewards=rewards,
            submitted_s=rounds.submitted_s,
            rollout_s=rounds.rollout_s,
            reward_s=reward_s,
            notes=self._take_drop_notes() + rounds.notes + self._notes(len(groups), len(numbers), rounds.num_rounds),
        )

    def _differs(self, group: Sequence[Trajectory]) -> bool:
        zero = self.recipe.train.overlong == "zero"
        return len({min(t.reward or 0.0, 0.0) if zero and t.truncated else t.reward for t in group}) > 1

    def _notes(self, num_kept: int, num_asked: int, num_rounds: int) -> list[str]:
        num_prompts = self.recipe.rollout.prompts_per_step
        if self.recipe.train.sampling_rounds == 1 or (num_rounds == 1 and num_kept == num_prompts):
            return []
        note = f"rewards differ within {num_kept} of {counted(num_asked, 'group')} of {counted(num_rounds, 'round')}"
        return [note if num_kept == num_prompts else f"{note}: trained on those, not on {num_prompts}"]


def rollouts_of(recipe: Recipe, prompts: Sequence[Prompt], order: DataOrder) -> Rollouts:
    """Return the recipe's way of rolling out; ConfigError for contradictory settings."""
    if recipe.rollout.staleness:
        return AsynchronousRollouts(recipe, prompts, order, recipe.rollout.staleness)
    if recipe.rollout.partial is not None:
        return PartialRollouts(recipe, prompts, order, recipe.rollout.partial)
    if recipe.rollout.reuse is not None:
        return ReusingRollouts(recipe, prompts, order, recipe.rollout.reuse)
    return SynchronousRollouts(recipe, prompts, order)
