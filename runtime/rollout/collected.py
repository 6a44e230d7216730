"""An RL step's responses: what a way to get them is given, what it hands over for training, and what all ways share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import safetensors.numpy

from tltlab.drafters.base import Key
from tltlab.runtime.data.order import DataOrder
from tltlab.runtime.data.prompts import Prompt
from tltlab.runtime.engine.generation import GenerationRequest, GenerationResponse, Rollout
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.traces.recorder import ColumnRows

Shares = list[list[GenerationRequest]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A response to a prompt as far as it has come, whatever RL steps its tokens are from; `epoch` is the data's.

    Per token its id, its behaviour log-prob and the policy version that drew it, 4 bytes each ("i", "f", "i").
    `finish_reason` is "stop" or "length" once it is whole. Where tools said something, `told` is 1 for each of its
    tokens, whose log-probs are 0, and 0 for those that a policy drew; else it is empty.
    """

    prompt: Prompt
    epoch: int
    sample: int
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    token_versions: array[int] = field(default_factory=lambda: array("i"))
    finish_reason: str | None = None
    reward: float | None = None
    told: array[int] = field(default_factory=lambda: array("b"))

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    def key(self, rl_step: int) -> Key:
        return rl_step, self.prompt.prompt_id, self.sample, 0

    def request(self, rl_step: int, max_response_tokens: int) -> GenerationRequest:
        """For what is missing, behind prompt and prefix."""
        return GenerationRequest(
            key=self.key(rl_step),
            # One list for a group that has just begun: it travels once.
            prompt_token_ids=[*self.prompt.token_ids, *self.token_ids] if self.token_ids else self.prompt.token_ids,
            max_response_tokens=max_response_tokens - len(self.token_ids),
            prompt_text=self.prompt.text,
        )

    def extended(self, response: GenerationResponse, version: int, max_response_tokens: int) -> Trajectory:
        """With what `response` adds, drawn by policy `version` where it does not say by which."""
        token_ids = _after(self.token_ids, response.token_ids)
        reason: str | None = response.finish_reason
        if reason == "abort":
            reason = "length" if len(token_ids) == max_response_tokens else None
        versions = self.token_versions
        for drawn_by, num_tokens in response.versions or [(version, len(response.token_ids))]:
            versions = versions + array("i", [drawn_by]) * num_tokens
        return replace(
            self,
            token_ids=token_ids,
            logprobs=_after(self.logprobs, response.logprobs),
            token_versions=versions,
            finish_reason=reason,
            told=self.told + array("b", bytes(len(response.token_ids))) if self.told else self.told,
        )

    def observed(self, token_ids: Sequence[int], version: int) -> Trajectory:
        """With what a tool said behind it."""
        told = self.told or array("b", bytes(len(self.token_ids)))
        return replace(
            self,
            token_ids=_after(self.token_ids, token_ids),
            logprobs=self.logprobs + array("f", bytes(4 * len(token_ids))),
            token_versions=self.token_versions + array("i", [version]) * len(token_ids),
            told=told + array("b", [1]) * len(token_ids),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTools:
    """What the rollout of RL step `rl_step`, under policy version `policy_version`, may ask of engines and trainer.

    `generate(shares, round, quotas)` has every worker generate its share and returns one Rollout each, with a response
    to each request; with quotas worker n stops once that many of its prompts have all their requests answered, and the
    rest come back as "abort". `share(requests)` splits requests over workers as `rollout.placement` says. `rewards`
    gives one number per whole response. `score(pairs, distributions=False)` gives for pairs (prompt ids, response ids
    of N tokens) the policy's natural log-probs [N] at the sampling temperature, or with `distributions` all of them
    [N, V].
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
    the trainer's scoring; the three add up. `figures` are for the RL step's metrics, by name.
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
    figures: dict[str, float] = field(default_factory=dict)


class Rounds:
    """The generation rounds of one RL step: `generate` runs one more, `parts` is all of them by worker."""

    def __init__(self, tools: RolloutTools) -> None:
        self.requests: Shares = []
        self.parts: list[Rollout] = []
        self.submitted_s: dict[Key, float] = {}
        self.notes: list[str] = []
        self.num_rounds = 0
        self.rollout_s = 0.0
        self._tools = tools
        self._start = time.perf_counter()

    def generate(self, shares: Shares, quotas: Sequence[int] | None = None) -> dict[Key, GenerationResponse]:
        """Run a round; its responses by key. Requests that were cut before their first token leave no trace."""
        start_s = time.perf_counter() - self._start if self.num_rounds else 0.0
        rollouts = self._tools.generate(shares, self.num_rounds, quotas)
        self.rollout_s = time.perf_counter() - self._start
        responses = {response.key: response for rollout in rollouts for response in rollout.responses}
        self.notes += [note for rollout in rollouts for note in rollout.notes]
        started = [[r for r in share if responses[r.key].token_ids] for share in all_requests(shares, rollouts)]
        rollouts = [
            replace(rollout, responses=[responses[r.key] for r in share])
            for rollout, share in zip(rollouts, started, strict=True)
        ]
        if self.num_rounds:
            self.requests = [before + new for before, new in zip(self.requests, started, strict=True)]
            self.parts = [_joined(part, new, start_s) for part, new in zip(self.parts, rollouts, strict=True)]
            self.submitted_s |= {request.key: start_s for share in started for request in share}
        else:
            self.requests, self.parts = started, rollouts
        self.num_rounds += 1
        return responses


class Rollouts(ABC):
    """A way to get an RL step's responses. `carries` is the key of `state_dict` for what it takes to later RL steps."""

    on_policy: bool
    """Whether every response is distributed as the policy that is about to be trained draws it."""
    carries = ""

    def __init__(self, recipe: Recipe, prompts: Sequence[Prompt], order: DataOrder) -> None:
        self.recipe = recipe
        self.prompts = prompts
        self.order = order
        self._drop_notes: list[str] = []

    @abstractmethod
    def collect(self, tools: RolloutTools) -> Collected:
        """Roll out one RL step."""

    @property
    def under_way(self) -> Collection[int]:
        """Numbers of the prompts whose responses go on in the next RL step."""
        return ()

    def state_dict(self, folder: Path) -> dict[str, Any]:
        """What later RL steps depend on, as JSON types; arrays go to files in `folder`."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], folder: Path) -> None:
        """Go back to what `state_dict` gave; the next RL step notes what another way to roll out left in it.

        ConfigError where the run cannot go on with it.
        """
        self._drop_notes = [
            sentence(state[key]) for key, sentence in _DROP_NOTES.items() if key != self.carries and state.get(key)
        ]
        self._load(state.get(self.carries), folder)

    def _load(self, carried: list[Any] | None, folder: Path) -> None:  # noqa: B027
        """Take what `state_dict` has under `carries`, None where it was of another way to roll out."""

    def _blank(self, number: int, epoch: int) -> list[Trajectory]:
        """A group of responses to prompt `number`, of which nothing has come yet."""
        samples = range(self.recipe.rollout.group_size)
        return [Trajectory(prompt=self.prompts[number], epoch=epoch, sample=sample) for sample in samples]

    def _extended(
        self, trajectories: Sequence[Trajectory], responses: Mapping[Key, GenerationResponse], tools: RolloutTools
    ) -> list[Trajectory]:
        """Each with its response, where it has one."""
        cap = self.recipe.rollout.max_response_tokens
        extended = []
        for t in trajectories:
            for response in turns_of(t.key(tools.rl_step), responses):
                if len(response.observed):
                    t = t.observed(response.observed, tools.policy_version)
                t = t.extended(response, tools.policy_version, cap)
            extended.append(t)
        return extended

    def _take_drop_notes(self) -> list[str]:
        """Sentences to be said once."""
        sentences, self._drop_notes = self._drop_notes, []
        return sentences


def _pending_dropped(groups: Sequence[Mapping[str, Any]]) -> str:
    ended = sum(sample["finish_reason"] is not None for group in groups for sample in group["samples"])
    return (
        f"{len(groups)} groups that were under way in the checkpoint are dropped, {ended} whole responses with them: "
        "the run goes on without rollout.partial"
    )


def _earlier_dropped(responses: Sequence[Any]) -> str:
    return f"{len(responses)} responses of the checkpoint are not used again: the run goes on without rollout.reuse"


_DROP_NOTES: dict[str, Callable[[Sequence[Any]], str]] = {"pending": _pending_dropped, "earlier": _earlier_dropped}


Number = TypeVar("Number", int, float)


def _after(before: array[Number], new: Sequence[Number]) -> array[Number]:
    """Both in one array; what began with `new` shares it, for nobody changes either."""
    after = new if isinstance(new, array) else array(before.typecode, new)
    return before + after if before else after


def all_requests(shares: Shares, parts: Sequence[Rollout]) -> Shares:
    """Each worker's requests with those of later turns, in the order of its responses."""
    return [[*share, *part.follow_ups] for share, part in zip(shares, parts, strict=True)]


def turns_of(key: Key, responses: Mapping[Key, GenerationResponse]) -> Iterator[GenerationResponse]:
    """The response of this key and those of the turns after it."""
    while key in responses:
        yield responses[key]
        key = (*key[:3], key[3] + 1)


def requests_of(prompt: Prompt, rl_step: int, group_size: int, max_response_tokens: int) -> list[GenerationRequest]:
    """A whole group: `group_size` responses to a prompt."""
    group = [Trajectory(prompt=prompt, epoch=0, sample=sample) for sample in range(group_size)]
    return [trajectory.request(rl_step, max_response_tokens) for trajectory in group]


def rewarded(trajectories: Sequence[Trajectory], tools: RolloutTools) -> list[Trajectory]:
    """The same with their rewards."""
    rewards = tools.rewards(list(trajectories))
    return [replace(t, reward=reward) for t, reward in zip(trajectories, rewards, strict=True)]


def rewards_by_key(trajectories: Iterable[Trajectory], rl_step: int) -> dict[Key, float]:
    return {t.key(rl_step): t.reward for t in trajectories if t.reward is not None}


def ages(trajectories: Sequence[Trajectory], rl_step: int) -> dict[str, float]:
    """By how many updates the policies that drew the tokens trained on are behind the one that learns from them."""
    versions = [np.array(sample.token_versions, np.int64) for sample in trajectories]
    staleness = rl_step - np.concatenate([np.empty(0, np.int64), *versions])
    if not len(staleness):
        return {}
    return {
        "staleness/mean": float(staleness.mean()),
        "staleness/max": float(staleness.max()),
        "staleness/off_policy_share": float((staleness > 0).mean()),
        "staleness/versions_per_response": float(np.mean([len(set(each.tolist())) for each in versions])),
    }


def delayed(rollout: Rollout, seconds: float) -> Rollout:
    """The same rollout with its clock set back: all happened `seconds` later."""
    return replace(
        rollout,
        responses=[
            replace(
                r,
                t_submit=r.t_submit + seconds if r.t_submit else 0.0,
                t_first_token=r.t_first_token + seconds,
                t_finish=r.t_finish + seconds,
            )
            for r in rollout.responses
        ],
        iterations=(ran := ColumnRows.of("iterations", rollout.iterations)).with_column(
            "t_start", ran.column("t_start") + seconds
        ),
        duration_s=rollout.duration_s + seconds,
    )


def _joined(part: Rollout, new: Rollout, start_s: float) -> Rollout:
    """A worker's rollout so far, and a round more that began `begun` seconds after the first."""
    first = 1 + int(ColumnRows.of("iterations", part.iterations).column("iteration").max(initial=-1))
    new = delayed(new, start_s)

    def joined(name: str, before: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> ColumnRows:
        after = ColumnRows.of(name, rows)
        return ColumnRows.joined(name, [before, after.with_column("iteration", after.column("iteration") + first)])

    return Rollout(
        responses=part.responses + new.responses,
        iterations=joined("iterations", part.iterations, new.iterations),
        decisions=joined("decisions", part.decisions, new.decisions),
        duration_s=new.duration_s,
        recorder_s=part.recorder_s + new.recorder_s,
        policy_s=part.policy_s + new.policy_s,
        drafting_s=part.drafting_s + new.drafting_s,
    )


def save_ragged(path: Path, **columns: Sequence[np.ndarray]) -> None:
    """Write a safetensors file of columns, each whole, and the lengths to cut them by.

    The columns have equally many arrays; array i of every column has the same length N_i, [N_i] or [N_i, V].
    """
    flat = {
        name: np.concatenate(list(arrays)) if len(arrays) else np.empty(0, np.int32) for name, arrays in columns.items()
    }
    lengths = np.array([len(array) for array in next(iter(columns.values()))], np.int64)
    safetensors.numpy.save_file(flat | {"lengths": lengths}, path)


def load_ragged(path: Path) -> dict[str, list[np.ndarray]]:
    """What `save_ragged` wrote, by column."""
    flat = safetensors.numpy.load_file(path)
    cuts = np.cumsum(flat.pop("lengths"))
    return {name: np.split(array, cuts[:-1]) if len(cuts) else [] for name, array in flat.items()}
