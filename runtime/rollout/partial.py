"""Partial rollouts: running responses are cut, and continue later or begin anew.

At a fixed concurrency (CoPRIS, arXiv 2511.05589), of more prompts or samples than are trained (APRIL, arXiv 2509.18521;
RollPacker, arXiv 2509.21009), or in parallel with training, with bounded staleness (AReaL, arXiv 2505.24298).
"""

import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path

import numpy as np

from tltlab.config import counted
from tltlab.errors import ConfigError
from tltlab.records import Fields, Json, frozen
from tltlab.runtime.data.order import DataOrder
from tltlab.runtime.data.prompts import Prompt
from tltlab.runtime.engine.generation import GenerationRequest
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.recipe.sections import PartialConfig

from .collected import (
    Collected,
    Rollouts,
    RolloutTools,
    Rounds,
    Trajectory,
    ages,
    load_ragged,
    rewarded,
    rewards_by_key,
    save_ragged,
)

PENDING_FILE = "pending-responses.safetensors"

_PER_TOKEN = {"token_ids": np.int32, "logprobs": np.float64, "token_versions": np.int32}


@frozen
class PartialGroup:
    """The responses so far to a prompt, which is number `number` of the data; it is whole with `needed` of them."""

    number: int
    samples: list[Trajectory]
    needed: int

    @property
    def oldest_version(self) -> int | None:
        """The policy version of its oldest token, None before it has any."""
        return min((sample.token_versions[0] for sample in self.samples if sample.token_versions), default=None)

    @property
    def whole(self) -> bool:
        return len(self.trained) == self.needed

    @property
    def trained(self) -> list[Trajectory]:
        """The first whole responses, as many as a group needs."""
        return [sample for sample in self.samples if sample.finish_reason is not None][: self.needed]

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def num_cut(self) -> int:
        return sum(1 for sample in self.samples if sample.token_ids and sample.finish_reason is None)


@dataclass
class TrainedLengths:
    """Responses trained on and generated so far, and their tokens: the length bias of training.

    Generated responses are those trained on or dropped; a dropped one counts with its tokens so far, so the bias of a
    run that drops is at least this far below 1. Responses under way count as neither. `wasted_tokens` were generated
    for nothing so far.
    """

    num_trained: int = 0
    trained_tokens: int = 0
    num_generated: int = 0
    generated_tokens: int = 0
    dropped_groups: int = 0
    wasted_tokens: int = 0

    def train(self, groups: Sequence[PartialGroup]) -> None:
        for group in groups:
            tokens = sum(len(sample.token_ids) for sample in group.trained)
            self.num_trained += len(group.trained)
            self.trained_tokens += tokens
            self.num_generated += sum(1 for sample in group.samples if sample.token_ids)
            self.generated_tokens += group.num_tokens
            self.wasted_tokens += group.num_tokens - tokens

    def drop(self, groups: Sequence[PartialGroup]) -> None:
        self.num_generated += sum(len(group.samples) for group in groups)
        self.generated_tokens += sum(group.num_tokens for group in groups)
        self.dropped_groups += len(groups)
        self.restart(groups)

    def restart(self, groups: Sequence[PartialGroup]) -> None:
        """Count what is generated again: the lengths of these prompts' responses are not known yet."""
        self.wasted_tokens += sum(group.num_tokens for group in groups)

    def figures(self) -> dict[str, float]:
        """Return mean lengths trained on and generated, `trained/length_bias`, their ratio, and what was dropped."""
        if not self.num_trained:
            return {}
        trained, generated = self.trained_tokens / self.num_trained, self.generated_tokens / self.num_generated
        return {
            "trained/dropped_groups": float(self.dropped_groups),
            "trained/wasted_tokens": float(self.wasted_tokens),
            "trained/length_mean": trained,
            "generated/length_mean": generated,
            "trained/length_bias": trained / generated,
        }


class PartialRollouts(Rollouts):
    """Generates until prompts_per_step groups are whole, and cuts the rest.

    Every worker's engine stops at its share of the groups. Cut responses continue first, in the order in which their
    groups were first requested, on any worker, from prompt and prefix; then follow unstarted ones and new prompts.

    With `concurrency` an engine runs at most its share of it. A worker receives as many groups as keep its engine full
    to the end in the worst case: with G groups to complete and C requests at a time G - 1 + C, since G - 1 groups may
    be whole and each of the others down to one request. Without it an RL step has `issue` x prompts_per_step groups of
    `samples` x group_size responses.

    A response that spans RL steps has the log-probs and versions of the policies that drew its tokens, so it is
    off-policy. A group with a token of a policy more than `max_age` versions old is dropped, and its prompt comes again
    at the end of its epoch. In the trace each RL step's part of a response is its own row, "abort" where it was cut; a
    response cut before its first token has none.

    With "restart" groups that are not whole lose their responses and wait until they are prompts_per_step, or until the
    data has too few other prompts: an RL step then takes them alone, and runs to their end.
    """

    carries = "pending"

    def __init__(self, recipe: Recipe, prompts: Sequence[Prompt], order: DataOrder, config: PartialConfig):
        super().__init__(recipe, prompts, order)
        self.config = config
        self._pending: list[PartialGroup] = []
        self._lengths = TrainedLengths()

    def collect(self, tools: RolloutTools) -> Collected:
        """Roll out one RL step; `_trainable` selects the groups to train on."""
        # RL step k trains policy version k.
        current = [group for group in self._pending if not self._too_old(group, tools.rl_step)]
        dropped = [group for group in self._pending if self._too_old(group, tools.rl_step)]
        self._lengths.drop(dropped)
        self.order.again((group.samples[0].epoch, group.number) for group in dropped)
        groups, later = self._begun(current, tools)
        unfinished = [group for group in groups if not group.whole]
        num_workers = self.recipe.rollout.num_workers
        shares = [unfinished[worker::num_workers] for worker in range(num_workers)]
        num_missing = max(self.recipe.rollout.prompts_per_step - (len(groups) - len(unfinished)), 0)
        each, remainder = divmod(num_missing, num_workers)
        # The first workers complete one more.
        quotas = [min(each + (worker < remainder), len(share)) for worker, share in enumerate(shares)]
        rounds = Rounds(tools)
        responses = rounds.generate([self._requests(part, tools.rl_step) for part in shares], quotas)

        start = time.perf_counter()
        groups = [replace(g, samples=self._extended(g.samples, responses, tools)) for g in groups]
        finished = [t for g in groups for t in g.samples if t.finish_reason is not None and t.reward is None]
        by_key = {t.key(tools.rl_step): t for t in rewarded(finished, tools)}
        groups = [replace(g, samples=[by_key.get(t.key(tools.rl_step), t) for t in g.samples]) for g in groups]
        whole = self._trainable([group for group in groups if group.whole])
        trained_ids = {id(group) for group in whole}
        left = [group for group in groups if id(group) not in trained_ids]
        num_cut = sum(group.num_cut for group in groups)
        if self.config.leftover == "restart":
            self._lengths.restart(left)
            left = [self._blank_group(group.number, group.samples[0].epoch) for group in left]
        self._pending = [*later, *left]
        self._lengths.train(whole)
        num_aborted = sum(response.finish_reason == "abort" for response in responses.values())
        return Collected(
            groups=[group.trained for group in whole],
            requests=rounds.requests,
            parts=rounds.parts,
            epochs={t.key(tools.rl_step): t.epoch for group in groups for t in group.samples},
            rewards=rewards_by_key(by_key.values(), tools.rl_step),
            rollout_s=rounds.rollout_s,
            reward_s=time.perf_counter() - start,
            notes=self._take_drop_notes() + self._notes(current, len(dropped), num_aborted, num_cut),
            figures=ages([t for group in whole for t in group.trained], tools.rl_step) | self._lengths.figures(),
        )

    @property
    def under_way(self) -> list[int]:
        return [group.number for group in self._pending]

    def _too_old(self, group: PartialGroup, rl_step: int) -> bool:
        oldest, limit = group.oldest_version, self.config.max_age
        return oldest is not None and limit is not None and rl_step - oldest > limit

    def _trainable(self, whole: list[PartialGroup]) -> list[PartialGroup]:
        """Return the whole groups that this RL step trains on: all."""
        return whole

    def _begun(self, pending: list[PartialGroup], tools: RolloutTools) -> tuple[list[PartialGroup], list[PartialGroup]]:
        """Return this RL step's groups, and those of the pending ones that wait for another."""
        per_step = self.recipe.rollout.prompts_per_step
        if self.config.leftover == "resume":
            return [*pending, *self._new_groups(pending, tools)], []
        if len(pending) < per_step <= len(self.prompts) - len(pending):
            return self._draw_groups(len(pending) + ceil(self.config.issue * per_step), pending), pending
        return [*pending[:per_step], *self._draw_groups(per_step, pending)], pending[per_step:]

    def _new_groups(self, pending: Sequence[PartialGroup], tools: RolloutTools) -> list[PartialGroup]:
        """Return the new groups of an RL step: with a concurrency as many as keep engines full until it ends."""
        rollout = self.recipe.rollout
        if self.config.concurrency is None:
            return self._draw_groups(ceil(self.config.issue * rollout.prompts_per_step), pending)
        per_engine = -(-self.config.concurrency // rollout.num_workers)
        return self._draw_groups(rollout.prompts_per_step + rollout.num_workers * (per_engine - 1), pending)

    def _draw_groups(self, total: int, pending: Sequence[PartialGroup]) -> list[PartialGroup]:
        """Return new groups that fill `pending` up to `total`."""
        batch = self.order.take(max(total - len(pending), 0), exclude=[group.number for group in pending])
        return [self._blank_group(number, epoch, self.config.samples) for epoch, number in batch]

    def _blank_group(self, number: int, epoch: int, samples: float = 1.0) -> PartialGroup:
        needed = self.recipe.rollout.group_size
        return PartialGroup(number=number, samples=self._blank(number, epoch, ceil(samples * needed)), needed=needed)

    def _requests(self, groups: Sequence[PartialGroup], rl_step: int) -> list[GenerationRequest]:
        """Return requests for the rest of `groups`: those with a prefix first."""
        unfinished = [(t, g) for g in groups for t in g.samples if t.finish_reason is None]
        unfinished.sort(key=lambda each: not each[0].token_ids)
        cap = self.recipe.rollout.max_response_tokens
        return [replace(t.request(rl_step, cap), spare=len(g.samples) - g.needed) for t, g in unfinished]

    def _notes(self, resumed: Sequence[PartialGroup], num_dropped: int, num_aborted: int, num_cut: int) -> list[str]:
        if self.config.leftover == "restart":
            return [f"{num_cut} responses cut, {counted(len(self._pending), 'prompt')} to begin anew"]
        continued = sum(group.num_cut for group in resumed)
        note = f"{counted(continued, 'cut response')} continued, {num_cut} cut now, {num_aborted - num_cut} not begun"
        if num_dropped:
            note += (
                f"; {counted(num_dropped, 'group')} older than {counted(self.config.max_age or 0, 'RL step')} dropped"
            )
        return [note]

    def state_dict(self, folder: Path) -> Json:
        """Return the groups that are not whole; their tokens go to `PENDING_FILE` in `folder`."""
        samples = [sample for group in self._pending for sample in group.samples]
        save_ragged(
            folder / PENDING_FILE,
            **{name: [np.array(getattr(s, name), kind) for s in samples] for name, kind in _PER_TOKEN.items()},
        )
        return {
            "lengths": asdict(self._lengths),
            "pending": [
                {
                    "prompt_id": self.prompts[group.number].prompt_id,
                    "number": group.number,
                    "epoch": group.samples[0].epoch,
                    "needed": group.needed,
                    "samples": [
                        {"finish_reason": s.finish_reason, "reward": s.reward, "terms": s.terms} for s in group.samples
                    ],
                }
                for group in self._pending
            ],
        }

    def _load(self, state: Fields, folder: Path) -> None:
        """Raise ConfigError where the data has changed, the cap is below a response that is to continue, or the state
        is another release's.
        """
        self._pending, self._lengths = [], TrainedLengths()
        if "pending" not in state:
            return
        try:
            self._lengths = TrainedLengths(**state["lengths"])
        except TypeError as error:
            raise ConfigError(f"{folder} is of another release of tltlab: go on with that one") from error
        cap = self.recipe.rollout.max_response_tokens
        columns = load_ragged(folder / PENDING_FILE)
        tokens = iter(zip(*(columns[name] for name in _PER_TOKEN), strict=True))
        pending = []
        for group in state["pending"]:
            number = group["number"]
            if number >= len(self.prompts) or self.prompts[number].prompt_id != group["prompt_id"]:
                raise ConfigError(
                    f"prompt {group['prompt_id']!r} of the checkpoint is not number {number} here: resume with its data"
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
                        **sample | {"terms": tuple(sample["terms"])},
                    )
                )
            longest = max((len(s.token_ids) for s in samples if s.finish_reason is None), default=0)
            if longest >= cap:
                raise ConfigError(f"rollout.max_response_tokens = {cap} is below a response to continue, {longest}")
            pending.append(PartialGroup(number=number, samples=samples, needed=group["needed"]))
        self._pending = pending


class AsynchronousRollouts(PartialRollouts):
    """Collects RL step after RL step of prompts_per_step groups each, ahead of the trainer by `staleness` at most.

    A group begins by AReaL's rule (`tltlab.planning.dispatch.may_start`): with N = `staleness`, P groups a step and k P
    of them trained, group number i of those in flight, from 0, begins once engines have version ceil((k P + i + 1) / P)
    - N - 1. Engines receive groups of later versions in advance, and begin them with those versions.

    This bounds the groups in flight by (N + 1) P, but not the age of one that others overtake. With `stale` = "hold" an
    RL step waits for as many of the oldest groups as later RL steps, of P groups each, could not train in time: in RL
    step k for all that began by version k - N. Then no token trained on is more than N versions old, and every response
    is trained on. With "drop" no RL step waits: groups that grow older are dropped, which biases training against long
    responses.

    Requests running at the end of a collection are cut and continue in the next at once, from the engine's prefix cache
    where it has room; new weights come between two iterations and cut nothing.
    """

    def __init__(self, recipe: Recipe, prompts: Sequence[Prompt], order: DataOrder, staleness: int):
        drops = recipe.rollout.stale == "drop"
        config = PartialConfig(concurrency=1, max_age=staleness if drops else None)
        super().__init__(recipe, prompts, order, config)
        self._staleness, self._holds = staleness, not drops
        self._from_version: dict[int, int] = {}
        self._due: set[int] = set()

    def _new_groups(self, pending: Sequence[PartialGroup], tools: RolloutTools) -> list[PartialGroup]:
        """Return all groups that may begin before the trainer needs this RL step, at the version of its number."""
        per_step, rl_step = self.recipe.rollout.prompts_per_step, tools.rl_step
        new = self._draw_groups((self._staleness + 1) * per_step, pending)
        self._from_version, begins = {}, []
        for n, group in enumerate([*pending, *new]):
            first, oldest = first_version(n, rl_step, per_step, self._staleness), group.oldest_version
            self._from_version[group.number] = first
            # Engines have at least this version already.
            begins.append((max(first, tools.policy_version) if oldest is None else oldest, n, group.number))
        self._due = set()
        for n, (version, *_) in enumerate(begins := sorted(begins)):
            # At least `now` of these and older groups must be trained now, since later RL steps take per_step each; any
            # of the youngest will do.
            now = n + 1 - (version + self._staleness - rl_step) * per_step
            if self._holds and version < begins[-1][0]:
                self._due.update(number for *_, number in begins[: max(now, 0)])
        return new

    def _requests(self, groups: Sequence[PartialGroup], rl_step: int) -> list[GenerationRequest]:
        by_prompt = {group.samples[0].prompt.prompt_id: group for group in groups}
        requests = []
        for request in super()._requests(groups, rl_step):
            group = by_prompt[request.key[1]]
            first = self._from_version[group.number] if group.oldest_version is None else 0
            requests.append(replace(request, from_version=first, due=group.number in self._due))
        return requests

    def _trainable(self, whole: list[PartialGroup]) -> list[PartialGroup]:
        """Return the prompts_per_step oldest groups."""
        oldest = sorted(whole, key=lambda group: group.oldest_version or 0)
        return oldest[: self.recipe.rollout.prompts_per_step]


def first_version(number: int, rl_step: int, per_step: int, staleness: int) -> int:
    """Return the version at which group `number` in flight may begin, RL step `rl_step` being trained next.

    >>> [first_version(n, rl_step=5, per_step=2, staleness=1) for n in range(4)]
    [4, 4, 5, 5]
    """
    return max(-(-(rl_step * per_step + number + 1) // per_step) - staleness - 1, 0)
