"""What a rollout is given to work with, what it hands over for training, and its rounds put together by worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tltlab.runtime.data.prompts import Prompt
from tltlab.runtime.engine.engine import GenerationRequest, Response, Rollout

from .samples import Trajectory

Key = tuple[int, str, int, int]
Shares = list[list[GenerationRequest]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTools:
    """What the rollout of RL step `rl_step`, under policy version `policy_version`, may ask of engines and trainer.

    `generate(shares, round, quotas)` has every worker generate its share and returns one Rollout each, with a response
    to each request; with quotas worker n stops once that many of its prompts have all their requests answered, and the
    rest come back as "abort". `share(requests)` splits requests over workers in order. `rewards` gives one number per
    whole response. `score(pairs, distributions=False)` gives for pairs (prompt ids, response ids of N tokens) the
    policy's natural log-probs [N] at the sampling temperature, or with `distributions` all of them [N, V].
    """

    generate: Callable[[Shares, int, Sequence[int] | None], list[Rollout]]
    share: Callable[[list[GenerationRequest]], Shares]
    rewards: Callable[[list[Trajectory]], list[float]]
    score: Callable[..., list[np.ndarray]]
    rl_step: int
    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """One RL step's rollout: what is trained on, and what the engines did to get it.

    `trajectories` are whole groups with their rewards; `groups[i]` numbers the prompt of trajectory i. `requests[w][i]`
    is what `parts[w].responses[i]` answers on worker w; all rounds are merged, times are since the first began and
    iteration numbers go on. By key of the request: `epochs`, the `rewards` of responses that are whole (a cut one has
    none), and where it is not 0 the time when a request was handed to its engine, `submitted_s`. `rollout_s` runs from
    the first round to the end of the last, rewards between them included; `reward_s` is what came after and `score_s`
    the trainer's scoring; the three add up.
    """

    trajectories: list[Trajectory]
    groups: list[int]
    requests: Shares
    parts: list[Rollout]
    epochs: dict[Key, int]
    rewards: dict[Key, float]
    submitted_s: dict[Key, float] = field(default_factory=dict)
    rollout_s: float
    reward_s: float = 0.0
    score_s: float = 0.0
    notes: list[str] = field(default_factory=list)


class Rounds:
    """The generation rounds of one RL step: `generate` runs one more, `parts` is all of them by worker."""

    def __init__(self, tools: RolloutTools) -> None:
        self.requests: Shares = []
        self.parts: list[Rollout] = []
        self.submitted_s: dict[Key, float] = {}
        self.num_rounds = 0
        self.rollout_s = 0.0
        self._tools = tools
        self._start = time.perf_counter()

    def generate(self, shares: Shares, quotas: Sequence[int] | None = None) -> dict[Key, Response]:
        """Run a round; its responses by key. Requests that were cut before their first token leave no trace."""
        begun = time.perf_counter() - self._start if self.num_rounds else 0.0
        rollouts = self._tools.generate(shares, self.num_rounds, quotas)
        self.rollout_s = time.perf_counter() - self._start
        responses = {response.key: response for rollout in rollouts for response in rollout.responses}
        started = [[r for r in share if responses[r.key].token_ids] for share in shares]
        rollouts = [
            replace(rollout, responses=[responses[r.key] for r in share])
            for rollout, share in zip(rollouts, started, strict=True)
        ]
        if self.num_rounds:
            self.requests = [before + new for before, new in zip(self.requests, started, strict=True)]
            self.parts = [_joined(part, new, begun) for part, new in zip(self.parts, rollouts, strict=True)]
            self.submitted_s |= {request.key: begun for share in started for request in share}
        else:
            self.requests, self.parts = started, rollouts
        self.num_rounds += 1
        return responses


def requests_of(prompt: Prompt, rl_step: int, group_size: int, max_response_tokens: int) -> list[GenerationRequest]:
    """A whole group: `group_size` responses to a prompt."""
    return [
        GenerationRequest(
            key=(rl_step, prompt.prompt_id, sample, 0),
            prompt_token_ids=prompt.token_ids,
            max_response_tokens=max_response_tokens,
        )
        for sample in range(group_size)
    ]


def rewarded(trajectories: Sequence[Trajectory], tools: RolloutTools) -> list[Trajectory]:
    """The same with their rewards."""
    rewards = tools.rewards(list(trajectories))
    return [replace(t, reward=reward) for t, reward in zip(trajectories, rewards, strict=True)]


def rewards_by_key(trajectories: Iterable[Trajectory], rl_step: int) -> dict[Key, float]:
    return {(rl_step, t.prompt.prompt_id, t.sample, 0): t.reward for t in trajectories if t.reward is not None}


def _joined(part: Rollout, new: Rollout, begun: float) -> Rollout:
    """A worker's rollout so far, and a round more that began `begun` seconds after the first."""
    number = 1 + max((row["iteration"] for row in part.iterations), default=-1)
    return Rollout(
        responses=[
            *part.responses,
            *(replace(r, t_first_token=r.t_first_token + begun, t_finish=r.t_finish + begun) for r in new.responses),
        ],
        iterations=part.iterations
        + [_later(row, number) | {"t_start": row["t_start"] + begun} for row in new.iterations],
        decisions=part.decisions + [_later(row, number) for row in new.decisions],
        duration_s=begun + new.duration_s,
        recorder_s=part.recorder_s + new.recorder_s,
        policy_s=part.policy_s + new.policy_s,
    )


def _later(row: Mapping[str, Any], number: int) -> dict[str, Any]:
    return {**row, "iteration": row["iteration"] + number}


def left_behind(state: Mapping[str, Any], *, own: str = "") -> list[str]:
    """What of a checkpoint of another way to roll out is lost: a sentence for each kind of responses in the `state` of
    `Rollouts.state_dict`, but for those under the key `own`, which the run goes on with.

    >>> left_behind({"earlier": [["p0", 0, False], ["p0", 1, True]]})
    ['2 responses of the checkpoint are not used again: the run goes on without rollout.reuse']
    """
    said = []
    if own != "pending" and state.get("pending"):
        groups = state["pending"]
        whole = sum(sample["finish_reason"] is not None for group in groups for sample in group["samples"])
        said.append(
            f"{len(groups)} groups that were under way in the checkpoint are dropped, {whole} whole responses with "
            "them: the run goes on without rollout.partial"
        )
    if own != "earlier" and state.get("earlier"):
        said.append(
            f"{len(state['earlier'])} responses of the checkpoint are not used again: the run goes on without "
            "rollout.reuse"
        )
    return said
