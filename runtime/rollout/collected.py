"""An RL step's responses: arguments and results of all ways to collect them, and their common parts."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import safetensors.numpy

from tltlab.config import counted
from tltlab.drafters.base import Key
from tltlab.records import Fields, Json, frozen
from tltlab.runtime.data.order import DataOrder
from tltlab.runtime.data.prompts import Prompt
from tltlab.runtime.engine.generation import GenerationRequest, GenerationResponse, Rollout
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.trainer.samples import Sample, useful_groups
from tltlab.traces.schema import Rows, by_column

from .rewards import Scored

Shares = list[list[GenerationRequest]]


@frozen
class Trajectory:
    """A response to a prompt so far, its tokens from one or more RL steps; `epoch` is the data's.

    Per token its id, its behaviour log-prob and the policy version that drew it, 4 bytes each ("i", "f", "i").
    `finish_reason` is "stop" or "length" once it is whole, and `terms` are the values of its reward's terms. Where
    tools answered, `from_tool` is 1 for each of their tokens, whose log-probs are 0, and 0 for tokens that a policy
    drew; else it is empty.
    """

    prompt: Prompt
    epoch: int
    sample: int
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    token_versions: array[int] = field(default_factory=lambda: array("i"))
    finish_reason: str | None = None
    reward: float | None = None
    terms: tuple[float, ...] = ()
    from_tool: array[int] = field(default_factory=lambda: array("b"))

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    def key(self, rl_step: int) -> Key:
        return rl_step, self.prompt.prompt_id, self.sample, 0

    def request(self, rl_step: int, max_response_tokens: int) -> GenerationRequest:
        """Return the request for the missing tokens, after prompt and prefix."""
        return GenerationRequest(
            key=self.key(rl_step),
            # One list for a new group: it is serialised once.
            prompt_token_ids=[*self.prompt.token_ids, *self.token_ids] if self.token_ids else self.prompt.token_ids,
            max_response_tokens=max_response_tokens - len(self.token_ids),
            prompt_text=self.prompt.text,
        )

    def extended(self, response: GenerationResponse, version: int, max_response_tokens: int) -> Trajectory:
        """Return the trajectory with the tokens of `response`, drawn by `version` where the response has none."""
        token_ids = after(self.token_ids, response.token_ids)
        reason: str | None = response.finish_reason
        if reason == "abort":
            reason = "length" if len(token_ids) == max_response_tokens else None
        versions = self.token_versions
        for drawn_by, num_tokens in response.versions or [(version, len(response.token_ids))]:
            versions = versions + array("i", [drawn_by]) * num_tokens
        return replace(
            self,
            token_ids=token_ids,
            logprobs=after(self.logprobs, response.logprobs),
            token_versions=versions,
            finish_reason=reason,
            from_tool=self.from_tool + array("b", bytes(len(response.token_ids))) if self.from_tool else self.from_tool,
        )

    def observed(self, token_ids: Sequence[int], version: int) -> Trajectory:
        """Return the trajectory with a tool's answer appended."""
        from_tool = self.from_tool or array("b", bytes(len(self.token_ids)))
        return replace(
            self,
            token_ids=after(self.token_ids, token_ids),
            logprobs=self.logprobs + array("f", bytes(4 * len(token_ids))),
            token_versions=self.token_versions + array("i", [version]) * len(token_ids),
            from_tool=from_tool + array("b", [1]) * len(token_ids),
        )


@frozen
class RolloutTools:
    """Calls to engines and trainer that the rollout of `rl_step`, under version `policy_version`, may make.

    `generate(shares, round, quotas)` generates each worker's share and returns one Rollout each, with a response to
    each request. With quotas worker n stops once the requests of that many prompts are answered, and the rest return as
    "abort". `share(requests)` splits requests over workers by `rollout.placement`. `rewards` gives the reward of each
    whole response. `score(pairs)` gives for pairs (prompt ids, response ids of N tokens) the policy's natural log-probs
    [N] at the sampling temperature.
    """

    generate: Callable[[Shares, int, Sequence[int] | None], list[Rollout]]
    share: Callable[[list[GenerationRequest]], Shares]
    rewards: Callable[[list[Trajectory]], list[Scored]]
    score: Callable[[Sequence[tuple[Sequence[int], Sequence[int]]]], list[np.ndarray]]
    rl_step: int
    policy_version: int


@frozen
class Collected:
    """One RL step's rollout: the training data, and the engines' work for it.

    `groups` are the whole responses to a prompt each, with their rewards.
    `parts[w].responses[i]` answers `requests[w][i]` on worker w. All rounds are merged: times are since the first began
    and iterations are numbered through. By key of the request: `epochs`, and the `rewards` of whole responses (a cut
    one has none). `num_dropped` more groups cannot train. `rollout_s` runs from the first round to the end of the last,
    rewards between them included; `reward_s` is the time of later rewards and `score_s` that of the trainer's scoring;
    the three add up. `figures` are for the RL step's metrics, by name.
    """

    groups: list[list[Trajectory]]
    requests: Shares
    parts: list[Rollout]
    epochs: dict[Key, int]
    rewards: dict[Key, float]
    num_dropped: int = 0
    rollout_s: float
    reward_s: float = 0.0
    score_s: float = 0.0
    notes: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def trajectories(self) -> list[Trajectory]:
        return [t for group in self.groups for t in group]


class Rounds:
    """The generation rounds of one RL step: `generate` runs one more, `parts` are all of them by worker."""

    def __init__(self, tools: RolloutTools):
        self.requests: Shares = []
        self.parts: list[Rollout] = []
        self.notes: list[str] = []
        self.num_rounds = 0
        self.rollout_s = 0.0
        self._tools = tools
        self._start = time.perf_counter()

    def generate(self, shares: Shares, quotas: Sequence[int] | None = None) -> dict[Key, GenerationResponse]:
        """Run a round; return its responses by key. Requests cut before their first token are dropped."""
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
            self.parts = [joined(part, new, start_s) for part, new in zip(self.parts, rollouts, strict=True)]
        else:
            self.requests, self.parts = started, rollouts
        self.num_rounds += 1
        return responses


class Rollouts(ABC):
    """A way to collect an RL step's responses. `carries` is its key in `state_dict` for state of later RL steps."""

    carries = ""

    def __init__(self, recipe: Recipe, prompts: Sequence[Prompt], order: DataOrder):
        self.recipe = recipe
        self.prompts = prompts
        self.order = order
        self._drop_notes: list[str] = []

    @abstractmethod
    def collect(self, tools: RolloutTools) -> Collected:
        """Roll out one RL step."""

    @property
    def under_way(self) -> Collection[int]:
        """Numbers of the prompts whose responses continue in the next RL step."""
        return ()

    def state_dict(self, folder: Path) -> Json:
        """Return the state that later RL steps depend on, as JSON types; arrays go to files in `folder`."""
        return {}

    def load_state_dict(self, state: Fields, folder: Path) -> None:
        """Restore the result of `state_dict`; the next RL step notes dropped state of another way to roll out.

        ConfigError where the run cannot continue with it.
        """
        self._drop_notes = [
            f"{counted(len(state[key]), noun)} of the checkpoint dropped: the run continues without {setting}"
            for key, (noun, setting) in _CARRIED.items()
            if key != self.carries and state.get(key)
        ]
        self._load(state, folder)

    def _load(self, state: Fields, folder: Path) -> None:  # noqa: B027
        """Restore the state, without the key `carries` where it is of another way to roll out."""

    def _blank(self, number: int, epoch: int, num: int | None = None) -> list[Trajectory]:
        """Return `num` responses to prompt `number`, by default group_size, all still empty."""
        samples = range(self.recipe.rollout.group_size if num is None else num)
        return [Trajectory(prompt=self.prompts[number], epoch=epoch, sample=sample) for sample in samples]

    def _extended(
        self, trajectories: Sequence[Trajectory], responses: Mapping[Key, GenerationResponse], tools: RolloutTools
    ) -> list[Trajectory]:
        """Return each trajectory with its response, where it has one."""
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
        """Return and clear notes on dropped state."""
        sentences, self._drop_notes = self._drop_notes, []
        return sentences


class SynchronousRollouts(Rollouts):
    """Every RL step draws prompts_per_step groups anew, and ends with the last response.

    With `train.sampling_rounds` above 1 groups that cannot train (`useful_groups`) are replaced by as many new prompts
    in another round (dynamic sampling of DAPO, arXiv 2503.14476, section 3.2), and with `train.sampling_term` those
    that could not by that term of the reward alone. The soft penalty for length is ignored, as in DAPO's scripts, which
    compare accuracies, and an own `train.advantage`, which is for whole batches. The trace has every response of every
    round. Training uses the groups that can train, fewer than prompts_per_step where the rounds do not yield enough.
    """

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
            begun = self._begun(batch, tools)
            unfinished = [t for t in begun if t.finish_reason is None]
            requests = [t.request(tools.rl_step, rollout.max_response_tokens) for t in unfinished]
            responses = rounds.generate(tools.share(requests))
            start = time.perf_counter()
            trajectories = rewarded(self._extended(begun, responses, tools), tools)
            reward_s = time.perf_counter() - start
            epochs |= {t.key(tools.rl_step): t.epoch for t in trajectories}
            rewards |= rewards_by_key(trajectories, tools.rl_step)
            new = [trajectories[i : i + rollout.group_size] for i in range(0, len(trajectories), rollout.group_size)]
            useful = range(len(new)) if max_rounds == 1 else sorted(self._useful(new))
            groups += [new[number] for number in useful]
        return Collected(
            groups=groups,
            requests=rounds.requests,
            parts=rounds.parts,
            epochs=epochs,
            rewards=rewards,
            num_dropped=len(numbers) - len(groups),
            rollout_s=rounds.rollout_s,
            reward_s=reward_s,
            notes=self._take_drop_notes() + rounds.notes + self._notes(len(groups), len(numbers), rounds.num_rounds),
        )

    def _begun(self, batch: Sequence[tuple[int, int]], tools: RolloutTools) -> list[Trajectory]:
        """Return the responses to (epoch, prompt number), group by group, as engines get them: still empty."""
        return [t for epoch, number in batch for t in self._blank(number, epoch)]

    def _useful(self, groups: Sequence[Sequence[Trajectory]]) -> set[int]:
        """Return the places of the groups to train on."""
        train, cap = self.recipe.train, self.recipe.rollout.max_response_tokens
        if train.overlong == "penalty":
            train = train.model_copy(update={"overlong": "keep"})
        samples = samples_of(groups)
        useful = useful_groups(samples, train, cap)
        if train.sampling_term is not None:
            term = [term.label for term in self.recipe.reward_terms].index(train.sampling_term)
            useful &= useful_groups([replace(s, reward=s.terms[term]) for s in samples], train, cap)
        return useful

    def _notes(self, num_kept: int, num_asked: int, num_rounds: int) -> list[str]:
        num_prompts = self.recipe.rollout.prompts_per_step
        if self.recipe.train.sampling_rounds == 1 or (num_rounds == 1 and num_kept == num_prompts):
            return []
        note = f"{num_kept} of {counted(num_asked, 'group')} of {counted(num_rounds, 'round')} can train"
        return [note if num_kept == num_prompts else f"{note}: trained on those, not on {num_prompts}"]


_CARRIED = {"pending": ("unfinished group", "rollout.partial"), "earlier": ("earlier response", "rollout.reuse")}
"""Data stored under each `Rollouts.carries`, and their setting."""

Number = TypeVar("Number", int, float)


def after(before: array[Number], new: Sequence[Number]) -> array[Number]:
    """Concatenate two arrays; an empty first one shares the second, since neither is changed later."""
    after = new if isinstance(new, array) else array(before.typecode, new)
    return before + after if before else after


def all_requests(shares: Sequence[Sequence[GenerationRequest]], parts: Sequence[Rollout]) -> Shares:
    """Return each worker's requests with those of later turns, in the order of its responses."""
    return [
        [*share, *part.follow_ups] if part.asked is None else part.asked
        for share, part in zip(shares, parts, strict=True)
    ]


def turns_of(key: Key, responses: Mapping[Key, GenerationResponse]) -> Iterator[GenerationResponse]:
    """Yield the response of this key and those of the turns after it."""
    while key in responses:
        yield responses[key]
        key = (*key[:3], key[3] + 1)


def requests_of(prompt: Prompt, rl_step: int, group_size: int, max_response_tokens: int) -> list[GenerationRequest]:
    """Return the requests of a group: `group_size` responses to a prompt."""
    group = [Trajectory(prompt=prompt, epoch=0, sample=sample) for sample in range(group_size)]
    return [trajectory.request(rl_step, max_response_tokens) for trajectory in group]


def rewarded(trajectories: Sequence[Trajectory], tools: RolloutTools) -> list[Trajectory]:
    """Return the trajectories with their rewards."""
    scored = tools.rewards(list(trajectories))
    return [replace(t, reward=reward, terms=terms) for t, (reward, terms) in zip(trajectories, scored, strict=True)]


def samples_of(groups: Sequence[Sequence[Trajectory]]) -> list[Sample]:
    """Return the training samples of whole responses, each group those to a prompt."""
    return [
        Sample(
            prompt_token_ids=t.prompt.token_ids,
            token_ids=t.token_ids,
            logprobs=t.logprobs,
            reward=t.reward if t.reward is not None else 0.0,
            group=number,
            truncated=t.truncated,
            from_tool=t.from_tool,
            name=f"sample {t.sample} of prompt {t.prompt.prompt_id}",
            terms=t.terms,
        )
        for number, group in enumerate(groups)
        for t in group
    ]


def rewards_by_key(trajectories: Iterable[Trajectory], rl_step: int) -> dict[Key, float]:
    return {t.key(rl_step): t.reward for t in trajectories if t.reward is not None}


def ages(trajectories: Sequence[Trajectory], rl_step: int) -> dict[str, float]:
    """Return statistics of the age, in updates, of the policies that drew the training tokens."""
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
    """Return the rollout with all times `seconds` later."""
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
        iterations=_later(by_column("iterations", rollout.iterations), "t_start", seconds),
        duration_s=rollout.duration_s + seconds,
    )


def _later(rows: pa.Table, column: str, by: float) -> pa.Table:
    """Return the rows with a number more in a column."""
    at = rows.column_names.index(column)
    field = rows.schema.field(at)
    return rows.set_column(at, field, pc.add(rows[column], pa.scalar(by, field.type)))


def joined(part: Rollout, new: Rollout, start_s: float) -> Rollout:
    """Return a worker's rollout so far, joined with one that began `start_s` seconds after the first."""
    ran = by_column("iterations", part.iterations)
    first = 1 + pc.max(ran["iteration"]).as_py() if len(ran) else 0
    new = delayed(new, start_s)

    def rows_of(name: str, before: Rows, rows: Rows) -> pa.Table:
        return pa.concat_tables([by_column(name, before), _later(by_column(name, rows), "iteration", first)])

    return Rollout(
        responses=part.responses + [replace(r, t_submit=r.t_submit or start_s) for r in new.responses],
        iterations=rows_of("iterations", part.iterations, new.iterations),
        decisions=rows_of("decisions", part.decisions, new.decisions),
        duration_s=new.duration_s,
        recorder_s=part.recorder_s + new.recorder_s,
        policy_s=part.policy_s + new.policy_s,
        drafting_s=part.drafting_s + new.drafting_s,
        asked=new.asked,
        moves=(*part.moves, *((move[0] + start_s, *move[1:]) for move in new.moves)),
        plans=[*part.plans, *new.plans],
        lent=[*part.lent, *(_later(rows, "t_start", start_s) for rows in new.lent)],
    )


def save_ragged(path: Path, **columns: Sequence[np.ndarray]) -> None:
    """Write a safetensors file of columns, each concatenated, and the lengths to split them by.

    The columns have equally many arrays; array i of every column has the same length.
    """
    flat = {
        name: np.concatenate(list(arrays)) if len(arrays) else np.empty(0, np.int32) for name, arrays in columns.items()
    }
    lengths = np.array([len(array) for array in next(iter(columns.values()))], np.int64)
    safetensors.numpy.save_file(flat | {"lengths": lengths}, path)


def load_ragged(path: Path) -> dict[str, list[np.ndarray]]:
    """Read the result of `save_ragged`, by column."""
    flat = safetensors.numpy.load_file(path)
    cuts = np.cumsum(flat.pop("lengths"))
    return {name: np.split(array, cuts[:-1]) if len(cuts) else [] for name, array in flat.items()}
