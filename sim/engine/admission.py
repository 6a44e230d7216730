"""RL steps that begin more than they train, end early, and leave responses to later steps.

The trace is a stream of prompts that begins again when it has ended, so that every step finds more to begin. A
response that a step leaves is a request of the next one, its prefix part of the prompt, and the prefill of that is paid
under the new weights. With tool calls its remaining turns are requests, and a tool that ran when its step ended is
done. Lengths of samples beyond a trace's group are drawn from their prompt's own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from tltlab.planning.composition import Admission, SharedBuffer
from tltlab.planning.dispatch import may_start
from tltlab.records import frozen

from .random_numbers import request_seeds, uniforms
from .requests import Requests, of_responses, turns_of

MOST_ITERATIONS = 64
"""Iterations after which a worker looks whether the step has ended or something new may begin."""


@dataclass(slots=True, eq=False)
class Job:
    """One response: the `index`-th of its step in the trace, how far it has come, and the `version` of the weights that
    began it. Its tokens are those of all its turns."""

    source: int
    index: int
    sample: int
    length: int
    group: PromptGroup
    generated: float = 0.0
    old: float = 0.0
    began: bool = False
    done: bool = False
    version: int | None = None


@dataclass(slots=True, eq=False)
class PromptGroup:
    """The samples of one prompt; `needed` of them make it complete."""

    needed: int
    jobs: list[Job] = field(default_factory=list)
    num_done: int = 0


@frozen
class Round:
    """Work of an RL step: `requests` for the engine in order of admission, those of each of `jobs` in turn.

    `first_of` is the first request of a job; `job_of` is the job of a request, `turn_of` its turn in the trace, and
    `done_at` the tokens that the response has with it.
    """

    requests: Requests
    jobs: list[Job]
    first_of: list[int]
    job_of: list[Job]
    turn_of: list[int]
    done_at: list[int]
    most_running: float
    most_begun: float
    num_groups: int
    num_responses: int


class Stream:
    """The prompts of a trace, again and again, and what earlier steps have left of them."""

    def __init__(self, steps: Sequence[Requests], admission: Admission, seed: int):
        self.steps = steps
        self._whole = [step.whole() for step in steps]
        self.admission = admission
        self.seed = seed
        self.version = 0
        self.accepted = 0
        self.wasted_tokens = 0.0
        self.num_begun, self.begun_tokens, self.num_dropped = 0, 0, 0
        self._new = self._groups()
        self._open: list[PromptGroup] = []
        self._num_complete = 0
        """Open groups that have all they need."""
        self._num_done = 0
        """Responses that are done of the RL step's own."""
        self._restarts: deque[PromptGroup] = deque()
        self._ready: list[Job] = []
        """Whole responses that no step has trained on yet, where responses count by themselves."""

    def _groups(self) -> Iterator[PromptGroup]:
        repeat = 0
        while True:
            for source, step in enumerate(self._whole):
                members: dict[str, list[int]] = {}
                for i, key in enumerate(step.keys):
                    members.setdefault(key[1], []).append(i)
                for indices in members.values():
                    yield self._group(source, indices, repeat)
            repeat += 1

    def _group(self, source: int, indices: Sequence[int], repeat: int) -> PromptGroup:
        step = self._whole[source]
        group = PromptGroup(needed=len(indices))
        extra = math.ceil(self.admission.samples * len(indices)) - len(indices)
        (draws,) = uniforms(request_seeds(self.seed, [step.keys[indices[0]]]), np.array([(repeat + 1) << 41]), extra)
        # The order within a group is independent of lengths: samples are in the trace's order.
        for sample, i in enumerate([*indices, *(indices[int(u * len(indices))] for u in draws)]):
            group.jobs.append(Job(source=source, index=i, sample=sample, length=step.response_tokens[i], group=group))
        return group

    def begin(self, k: int) -> Round:
        """The work of RL step k: what is left comes first."""
        step, rule = self._whole[k], self.admission
        num_groups, num_responses = len({key[1] for key in step.keys}), len(step)
        most_running = math.inf if rule.concurrency is None else max(1.0, rule.concurrency * num_responses)
        if rule.max_age is not None:
            self._drop(rule.max_age)
        if rule.leftover == "restart" and len(self._restarts) >= num_groups:
            groups = [self._restarts.popleft() for _ in range(num_groups)]
            for group in groups:
                del group.jobs[group.needed :]
        else:
            groups, self._open = self._open, []
            if rule.concurrency is None:
                missing = math.ceil(rule.issue * num_groups) - len(groups)
                groups += [next(self._new) for _ in range(max(0, missing))]
            else:
                # As many as may begin, and no more than could ever run.
                num_jobs = sum(not job.done for group in groups for job in group.jobs)
                while num_jobs < most_running + num_responses:
                    groups.append(next(self._new))
                    num_jobs += len(groups[-1].jobs)
        self._open = groups
        self._num_complete = sum(group.num_done >= group.needed for group in groups)
        self._num_done = 0
        jobs = [job for group in groups for job in group.jobs if not job.done]
        # Begun responses come first; the rest stays in order.
        jobs.sort(key=lambda job: not job.began)
        running = sum(job.began for job in jobs)
        most_begun = math.inf
        if rule.staleness is not None:
            most_begun = may_start(
                running, self.accepted, self.version, batch=num_responses, staleness=rule.staleness,
                most_running=len(jobs),
            ) + running  # fmt: skip
        for job in jobs:
            job.old = job.generated
        return self._round(k, jobs, most_running, most_begun, num_groups, num_responses)

    def _drop(self, max_age: int) -> None:
        young = []
        for group in self._open:
            oldest = min((job.version for job in group.jobs if job.version is not None), default=self.version)
            if self.version - oldest <= max_age:
                young.append(group)
            else:
                self.num_dropped += sum(job.began for job in group.jobs)
                self.wasted_tokens += sum(job.generated for job in group.jobs)
        self._open = young

    def start(self, job: Job) -> None:
        """Begin a response, or continue with it."""
        job.began = True
        if job.version is None:
            job.version = self.version
            self.num_begun += 1
            self.begun_tokens += job.length

    def _round(
        self, k: int, jobs: list[Job], most_running: float, most_begun: float, num_groups: int, num_responses: int
    ) -> Round:
        step, several = self.steps[k], any(source.turns is not None for source in self.steps)
        job_of: list[Job] = []
        first_of: list[int] = []
        done_at: list[int] = []
        each: list[tuple[Requests, int]] = []
        prompt_tokens: list[int] = []
        response_tokens: list[int] = []
        after: list[int] = []
        for job in jobs:
            source, total, generated = self.steps[job.source], 0, math.floor(job.generated)
            chain = source.chains[job.index]
            first_of.append(len(job_of))
            for i in chain:
                total += source.response_tokens[i]
                if total <= generated and i != chain[-1]:
                    continue
                prefix = max(0, generated - (total - source.response_tokens[i]))
                job_of.append(job)
                done_at.append(total)
                each.append((source, i))
                prompt_tokens.append(source.prompt_tokens[i] + prefix)
                response_tokens.append(source.response_tokens[i] - prefix)
                after.append(len(job_of))
            after[-1] = -1
        keys = [
            (step.rl_step, source.keys[i][1], 10_000 * job.source + 100 * job.index + job.sample, n)
            for n, (job, (source, i)) in enumerate(zip(job_of, each, strict=True))
        ]
        requests = replace(
            step,
            make_keys=partial(list, keys),
            prompts=np.array(prompt_tokens, np.int64),
            caps=np.array([source.caps[i] for source, i in each], np.int64),
            lengths=np.array(response_tokens, np.int64),
            recorded_worker=np.full(len(job_of), np.nan),
            turns=turns_of(each, after, first_of, set(first_of)) if several else None,
        )
        return Round(
            requests=requests, jobs=jobs, first_of=first_of, job_of=job_of, turn_of=[i for _, i in each],
            done_at=done_at, most_running=most_running, most_begun=most_begun, num_groups=num_groups,
            num_responses=num_responses,
        )  # fmt: skip

    def finish(self, job: Job) -> None:
        """A response of the RL step has all its tokens."""
        job.began = job.done = True
        job.generated = float(job.length)
        job.group.num_done += 1
        self._num_done += 1
        self._num_complete += job.group.num_done == job.group.needed

    def is_enough(self, work: Round) -> bool:
        """True if the finished responses suffice to train on."""
        if self.admission.unit == "response":
            return len(self._ready) + self._num_done >= work.num_responses
        return self._num_complete >= work.num_groups

    def trained_on(self, work: Round, trained: Sequence[Job]) -> tuple[Requests, list[int | None]]:
        """The step's requests as a recorder would have them: those it trains on, and which of the round's each was."""
        counts: dict[str, int] = {}
        responses = []
        for job in trained:
            source = self.steps[job.source]
            chain = source.chains[job.index]
            key = source.keys[chain[0]]
            sample = counts[key[1]] = counts.get(key[1], -1) + 1
            responses.append((source, chain, (key[0], key[1], sample, 0)))
        at = {(id(job), turn): n for n, (job, turn) in enumerate(zip(work.job_of, work.turn_of, strict=True))}
        positions = [at.get((id(job), i)) for job, (_, chain, _) in zip(trained, responses, strict=True) for i in chain]
        return of_responses(work.requests, responses), positions

    def end(self, work: Round) -> list[Job]:
        """Close the step and return the jobs that it trains on, in order; the rule leaves the rest to later steps."""
        self.version += 1
        if self.admission.unit == "response":
            ready = [*self._ready, *(job for job in work.jobs if job.done)]
            trained, self._ready = ready[: work.num_responses], ready[work.num_responses :]
            self.accepted += len(ready) - len(self._ready)
            self._open = [group for group in self._open if group.num_done < len(group.jobs)]
            return trained
        complete = [group for group in self._open if group.num_done >= group.needed][: work.num_groups]
        trained = [job for group in complete for job in [job for job in group.jobs if job.done][: group.needed]]
        self.accepted += len(trained)
        leftover = [group for group in self._open if group not in complete]
        used = set(map(id, trained))
        self.wasted_tokens += sum(job.generated for g in complete for job in g.jobs if id(job) not in used)
        if self.admission.leftover == "restart":
            for group in leftover:
                self.wasted_tokens += sum(job.generated for job in group.jobs)
                for job in group.jobs:
                    job.generated, job.old, job.began, job.done, job.version = 0.0, 0.0, False, False, None
                group.num_done = 0
            self._restarts.extend(leftover)
            leftover = []
        self._open = leftover
        return trained


class RequestFeed(ABC):
    """Hands requests to workers during a rollout, until it has `stopped`."""

    stopped = False

    @abstractmethod
    def finished(self, requests: Sequence[int], worker: int, room_tokens: float = math.inf) -> list[int]:
        """Mark requests as done; return those that begin on this worker, in the room left in its KV cache."""

    def leave(self, request: int, generated: float) -> None:  # noqa: B027
        """A request that the rollout leaves, with what it has generated in it."""


class BufferFeed(RequestFeed):
    """One buffer for all workers: probes first, then the group with the largest estimate (`SharedBuffer`).

    Running requests may outgrow their reservation; then the scheduler preempts as ever. O(waiting) per request taken
    where estimates have changed.
    """

    def __init__(self, requests: Requests, num_workers: int, capacity: int | None, rule: SharedBuffer):
        self._requests = requests
        self._rule = rule
        self._capacity = math.inf if capacity is None else float(capacity)
        self._reserved = [0.0] * num_workers
        self._counts = [0] * num_workers
        self._longest: dict[str, int] = {}
        self._ordered = False
        self._first = {chain[-1]: chain[0] for chain in requests.chains}
        """First turn by a response's last: a response continues where it began, and is finished with its last turn."""
        self._tokens = {chain[0]: sum(requests.response_tokens[i] for i in chain) for chain in requests.chains}
        # From the back: the last is the next.
        self._waiting = [chain[0] for chain in requests.chains if requests.response_tokens[chain[0]]][::-1]

    def _priority(self, request: int) -> tuple[bool, int]:
        key = self._requests.keys[request]
        # Seer's L_g (arXiv 2511.14617, Alg. 2): the longest finished sample of a group, the cap before any.
        return key[2] == 0, self._longest.get(key[1], self._requests.max_response_tokens[request])

    def _needs(self, request: int) -> float:
        chunk = min(self._rule.chunk_tokens, self._requests.max_response_tokens[request])
        return float(self._requests.prompt_tokens[request] + chunk)

    def _take(self, worker: int, room_tokens: float) -> int | None:
        """The next request where the worker has room for it; one that runs nothing always has."""
        if not self._waiting:
            return None
        if not self._ordered:
            self._waiting.sort(key=self._priority)
            self._ordered = True
        needs = self._needs(self._waiting[-1])
        if self._counts[worker] and needs > min(room_tokens, self._capacity - self._reserved[worker]):
            return None
        self._reserved[worker] += needs
        self._counts[worker] += 1
        return self._waiting.pop()

    def first(self) -> list[list[int]]:
        """Return the first queue of each worker: a request goes where least is reserved, then where the fewest are."""
        workers = range(len(self._counts))
        queues: list[list[int]] = [[] for _ in workers]
        while True:
            worker = min(workers, key=lambda w: (self._reserved[w], self._counts[w]))
            chosen = self._take(worker, self._capacity)
            if chosen is None:
                return queues
            queues[worker].append(chosen)

    def finished(self, requests: Sequence[int], worker: int, room_tokens: float = math.inf) -> list[int]:
        for request in (self._first[last] for last in requests if last in self._first):
            name = self._requests.keys[request][1]
            self._longest[name] = max(self._longest.get(name, 0), self._tokens[request])
            self._reserved[worker] -= self._needs(request)
            self._counts[worker] -= 1
            self._ordered = False
        admissions: list[int] = []
        while (chosen := self._take(worker, room_tokens)) is not None:
            admissions.append(chosen)
            room_tokens -= self._needs(chosen)
        return admissions


class RoundFeed(RequestFeed):
    """Hands the requests of a round to its workers, and signals the end of the round.

    Requests that may run at once go in order to the worker with the fewest; each end lets the next begin.
    """

    def __init__(self, stream: Stream, work: Round, num_workers: int):
        self.stream = stream
        self.work = work
        self.counts = [0] * num_workers
        self._next = 0
        self._running = 0
        # A response without tokens (an abort before its first) takes no time.
        for job in work.jobs:
            if job.length <= job.generated:
                stream.start(job)
                stream.finish(job)

    def first(self) -> list[list[int]]:
        """The requests with which each worker begins."""
        queues: list[list[int]] = [[] for _ in self.counts]
        while (chosen := self._take()) is not None:
            worker = self.counts.index(min(self.counts))
            self.counts[worker] += 1
            queues[worker].append(chosen)
        self.stopped = self.stream.is_enough(self.work)
        return queues

    def _take(self) -> int | None:
        jobs = self.work.jobs
        while self._next < len(jobs) and jobs[self._next].done:
            self._next += 1
        if self._next >= min(len(jobs), self.work.most_begun) or self._running >= self.work.most_running:
            return None
        self._next += 1
        self._running += 1
        self.stream.start(jobs[self._next - 1])
        return self.work.first_of[self._next - 1]

    def finished(self, requests: Sequence[int], worker: int, room_tokens: float = math.inf) -> list[int]:
        work, num_ended = self.work, 0
        for request in requests:
            job = work.job_of[request]
            job.generated = float(work.done_at[request])
            if work.requests.turns is None or work.requests.turns.after[request] < 0:
                self.stream.finish(job)
                num_ended += 1
        self.counts[worker] -= num_ended
        self._running -= num_ended
        self.stopped = self.stopped or (num_ended > 0 and self.stream.is_enough(work))
        admissions: list[int] = []
        while not self.stopped and len(admissions) < num_ended and (chosen := self._take()) is not None:
            self.counts[worker] += 1
            admissions.append(chosen)
        return admissions

    def leave(self, request: int, generated: float) -> None:
        self.work.job_of[request].generated += generated
