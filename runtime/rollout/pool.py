"""The rollout workers together: who dies is started again and does its work again, while the others go on."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from tltlab.drafters.base import Key
from tltlab.errors import ConfigError, RunError
from tltlab.planning.placement import PLACEMENTS, PlacedRequest, Placement, placed
from tltlab.policies.policy import Policy
from tltlab.runtime.engine.generation import GenerationRequest, Rollout
from tltlab.runtime.engine.weights import Way
from tltlab.runtime.ray.actors import (
    Waiting,
    actor_env,
    error_of,
    last_line,
    last_lines,
    runtime_env,
    succeeded,
    why_lost,
)
from tltlab.runtime.recipe.graphs import EngineBuild
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.run.state import RunEvents
from tltlab.runtime.trainer.group import TrainerDied
from tltlab.traces.trace import Trace

from .collected import delayed, turns_of
from .history import ComesAgain, RunHistory, anytime
from .in_flight import FreeRolloutWorker
from .worker import RolloutWorker

EVALUATION = 1 << 31
"""Stands for the RL step in an evaluation's seed: no RL step has this number."""

Ask = Callable[[int, Any], Any]
Shares = Sequence[Sequence[GenerationRequest]]
SendWeights = Callable[[Sequence[Any], int, Way], None]
"""Brings workers the weights of a version (`TrainerGroup.send_weights`)."""


class WorkerLost(RunError):
    """A worker's process or engine is gone; the message says why, and what its process said last."""

    def __init__(self, why: str, last_words: str = "") -> None:
        super().__init__(f"{why}; it said last: {last_words}" if last_words else why)
        self.why = why


@dataclass(slots=True, kw_only=True)
class _Worker:
    """What is known of a worker, and what it is told when it starts again.

    `memory` is what its policy and budget had learned under `learned_by`, as a dict or a reference to one; `since` are
    the lengths that its budget has been told from then on, as arguments of `learn_lengths`. `snapshot` is the memory
    that a rollout under way began with.
    """

    alive: bool = False
    deaths: int = 0
    learned_by: tuple[Policy, int] | None = None
    memory: Any = None
    since: list[tuple[Any, int | None]] = field(default_factory=list)
    snapshot: Any = None
    replayed: list[dict[str, Any]] = field(default_factory=list)


class WorkerPool:
    """The rollout workers of a run, which live and are replaced in `handles`; `pids` are their processes.

    `feed(n)` is where worker n hands over what its responses can teach a drafter, `options(n)` how its actor is placed
    (`Placement.worker_options`), `on_restart(n)` is called when worker n has been started again.

    A worker that dies in a call, or was dead before it, is noted in `events`, started again in the same place, up to
    `faults.max_restarts` times, and told what the others know: policy, weights, decisions to replay, and what policy
    and budget had learned when the last rollout began, with the lengths of responses since then. What drafters remember
    of earlier rollouts lies in `history` and not in workers: each is told with its requests. What the selector learned
    in a rollout that was lost stays lost. Then it does its work again, all of it: to keep the responses that had ended
    before it died would favour short ones. Every rollout begins in a random state of its own, so under a fixed strategy
    the responses are the same as if nobody had died. Meanwhile the others go on. While engines sleep nobody is started:
    who dies then is back when they are woken.

    Raises RunError when a worker dies too often or does not start in time, and at once when all die in the same way
    before one has started; ConfigError for what engines cannot do, and what a worker raises of ours as itself.
    """

    def __init__(
        self,
        recipe: Recipe,
        build: EngineBuild,
        feed: Callable[[int], str | None],
        options: Callable[[int], dict[str, Any]],
        *,
        events: RunEvents,
        on_restart: Callable[[int], None],
    ) -> None:
        num_workers = recipe.rollout.num_workers
        self.recipe = recipe
        self.build = build
        self.history = RunHistory(build.drafters)
        self.placement = recipe.read_placement()
        self.lengths: dict[str, list[int]] = {}  # of whole responses by prompt id, for placements that read them
        self.feed, self.options = feed, options
        self.events, self.on_restart = events, on_restart
        self.handles: list[Any] = [None] * num_workers
        self.pids = [0] * num_workers
        self._workers = [_Worker() for _ in range(num_workers)]
        self._policy: tuple[Policy, int] | None = None
        self._weights: tuple[SendWeights, int] | None = None
        self._seeds: list[list[int]] = [[] for _ in range(num_workers)]
        self._deaths: list[int] = []  # of each worker, when the last rollout began
        self._longest_s = 0.0  # of the calls to workers so far
        self._asleep = False
        self._running = False
        self._closed = False
        self._waiting = Waiting()

    def start(self) -> None:
        """Start all workers, side by side; who dies is started again when all have been tried once."""
        losses = [lost for lost in self._ask_all(None, once=True) if lost is not None]
        # Numbers differ from worker to worker. One alone may have been killed by chance, unless its engine says why.
        reasons = {re.sub(r"\d+", "", lost.why) for lost in losses}
        systematic = len(losses) > 1 or (losses and isinstance(losses[0].__cause__, RayTaskError))
        if systematic and len(losses) == len(self.handles) and len(reasons) == 1:
            raise RunError(f"no engine can start: each dies of this at its start: {losses[0]}") from losses[0]
        self._ask_all(None)
        self._running = True

    def share(
        self, requests: Sequence[GenerationRequest], placement: Placement = PLACEMENTS["contiguous"]
    ) -> list[list[GenerationRequest]]:
        """Split requests over the workers; by default in order, request i of N to worker i * W // N."""
        workload = [PlacedRequest(r.key, len(r.prompt_token_ids), r.max_response_tokens) for r in requests]
        queues = placed(placement, workload, len(self.handles), self.lengths)
        return [[requests[i] for i in queue] for queue in queues]

    def place(self, requests: Sequence[GenerationRequest]) -> list[list[GenerationRequest]]:
        """Split the requests of a rollout over the workers as `rollout.placement` says."""
        return self.share(requests, self.placement)

    def set_policy(self, policy: Policy, rl_step: int) -> None:
        """Let every engine choose with a fresh selector of `policy`, seeded by the run, the worker and the RL step."""
        self._policy = policy, rl_step
        self._tell_all(lambda n, handle: handle.set_policy.remote(policy, rl_step))
        self.history.serve(policy)

    def replay(self, trace: Trace) -> None:
        """Let every engine follow the trace's decisions of the worker of its number, for as long as there are any."""
        decisions = trace.decisions
        if decisions is None:
            raise ConfigError("a trace without decisions cannot be replayed: it has no decisions.parquet")
        for number, worker in enumerate(self._workers):
            worker.replayed = decisions[decisions["worker"] == number].to_dict("records")  # type: ignore[assignment]
        self._tell_all(lambda n, handle: handle.replay.remote(self._workers[n].replayed))

    def generate(
        self,
        shares: Shares,
        rl_step: int,
        *,
        round: int = 0,
        repeatable: bool = False,
        quotas: Sequence[int] | None = None,
    ) -> list[Rollout]:
        """Every worker's share of a rollout, in its random state of this RL step and round.

        With quotas worker n stops once that many prompts of its share have all their requests answered; the rest come
        back as "abort". With `repeatable` a `repeat` may follow. Times are since this call, the time of workers that
        died included.
        """
        self._seeds = [[self.recipe.seed, n, rl_step, round] for n in range(len(self.handles))]
        self._deaths = self._deaths_so_far()
        recalled = [self.history.of(share) for share in shares]

        def ask(n: int, handle: Any) -> Any:
            self._workers[n].snapshot = handle.state_dict.remote()
            quota = None if quotas is None else quotas[n]
            return handle.generate.remote(
                list(shares[n]), rl_step, self._seeds[n], recalled[n], repeatable=repeatable, quota=quota
            )

        parts = self._rollouts(ask, shares)
        for worker, lengths in zip(self._workers, _lengths(parts), strict=True):
            worker.learned_by, worker.memory, worker.snapshot = self._policy, worker.snapshot, None
            worker.since = [([lengths], None)]
        return parts

    def repeat(self, shares: Shares, rl_step: int) -> list[Rollout]:
        """Do the last rollout, a repeatable one, again from the state it started in, and leave no trace of it.

        Empty where a worker was started again since that rollout began: its time would be of other work.
        """
        if self._deaths_so_far() != self._deaths:
            return []
        parts = self._ask_all(lambda n, handle: handle.repeat.remote(list(shares[n]), rl_step, self._seeds[n]))
        return [] if self._deaths_so_far() != self._deaths else parts

    def rehearse(self, shares: Shares, rl_step: int, *, ahead: bool = False) -> list[Rollout]:
        """Do a rollout and leave no trace of it. Every rehearsal has the same random state, unless it is one `ahead`.

        Then it has that of the RL step's own, which is still to come.
        """
        step = [rl_step, 0] if ahead else []
        self._seeds = [[self.recipe.seed, n, *step] for n in range(len(self.handles))]
        self._deaths = self._deaths_so_far()
        recalled = [self.history.of(share) for share in shares]
        return self._rollouts(
            lambda n, handle: handle.rehearse.remote(list(shares[n]), rl_step, self._seeds[n], recalled[n]), shares
        )

    def evaluate(self, requests: Sequence[GenerationRequest]) -> list[list[int]]:
        """Tokens of responses, all turns of each, in the order of the requests, without speculation.

        Every evaluation has the same random state.
        """
        shares = self.share(requests)
        seeds = [[self.recipe.seed, n, EVALUATION] for n in range(len(shares))]
        parts = self._rollouts(lambda n, handle: handle.evaluate.remote(shares[n], seeds[n]), shares)
        responses = {response.key: response for part in parts for response in part.responses}
        return [
            [token for turn in turns_of(request.key, responses) for token in (*turn.observed, *turn.token_ids)]
            for request in requests
        ]

    def remember(self, shares: Shares, parts: Sequence[Rollout], comes_again: ComesAgain = anytime) -> None:
        """Keep what was generated for drafters that meet its prompts again, and tell each budget the others' lengths.

        `comes_again` says how many prompts come before each of these comes again, None for never.
        """
        self.history.add(shares, parts, comes_again)
        if self.placement not in PLACEMENTS.values():
            whole: Counter[Key] = Counter()
            for key, tokens in chain.from_iterable(_lengths(parts)):
                whole[(*key[:3], 0)] += tokens
            for key, tokens in whole.items():
                self.lengths.setdefault(key[1], []).append(tokens)
        if len(self.handles) == 1 or self._policy is None or self._policy[0].budget is None:
            return
        lengths = ray.put(_lengths(parts))
        for n, worker in enumerate(self._workers):
            worker.since = [*worker.since, (lengths, n)]
        self._tell_all(lambda n, handle: handle.learn_lengths.remote(lengths, n))

    def update_weights(self, send: SendWeights, version: int, way: Way = "host") -> None:
        """Have `send` bring the weights of `version` to every engine; later to those of workers that start again.

        They come to those by way of the host, from whatever weights the trainers have then: the next, at the latest,
        are the same for all. TrainerDied where a trainer dies in it; engines that got but a part are dead then. Under
        `rollout.staleness` engines may be in a rollout meanwhile, in which whoever failed is found out and replaced.
        """
        self._weights = send, version
        alive = [n for n, worker in enumerate(self._workers) if worker.alive]
        try:
            send([self.handles[n] for n in alive], version, way)
        except TrainerDied as error:
            for n in alive if way == "nccl" else ():
                # They wait in a collective that never ends.
                self._note_death(n, WorkerLost(f"its transfer of weights was cut off: {error}"), "")
            if self.recipe.rollout.staleness:
                why = f"its transfer of weights was cut off: {error}"
                self._ask_all(lambda n, handle: handle.weights.remote("cut off", why), mend=False)
            raise
        if self.recipe.rollout.staleness:
            self._ask_all(lambda n, handle: handle.has_weights.remote(version), mend=False)
        else:
            self._tell_all(lambda n, handle: handle.has_weights.remote(version))

    def sleep(self, level: int = 1) -> None:
        """Give the engines' memory away until `wake_up`; at level 2 weights too, and new ones must follow."""
        self._ask_all(lambda n, handle: handle.sleep.remote(level))
        self._asleep = True

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take it back, all or that of "weights" or "kv_cache"."""
        self._asleep = False
        self._tell_all(lambda n, handle: handle.wake_up.remote(tags))

    @property
    def all_alive(self) -> bool:
        """Whether nobody is known to be dead, who would be started again by the next call."""
        return all(worker.alive for worker in self._workers)

    def state_dicts(self) -> list[dict[str, Any]]:
        """What each engine's policy and budget have learned and how drafters did, as JSON types; of one that is dead,
        what is known."""
        states = self._ask_all(lambda n, handle: handle.state_dict.remote())
        for n, worker in enumerate(self._workers):
            if worker.alive:
                worker.learned_by, worker.memory, worker.since = self._policy, states[n], []
            else:
                states[n] = ray.get(worker.memory) if isinstance(worker.memory, ray.ObjectRef) else worker.memory or {}
        return states

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Go back to what `state_dicts` gave, under the policy that was in force then."""
        for worker, state in zip(self._workers, states, strict=True):
            worker.learned_by, worker.memory, worker.since = self._policy, state, []
        self._tell_all(lambda n, handle: handle.load_state_dict.remote(states[n]))

    def ask(self, method: str, *args: Any) -> list[Any]:
        """Call any method of every worker and return the answers; it must bear to be called once more."""
        return self._ask_all(lambda n, handle: getattr(handle, method).remote(*args))

    def close(self) -> None:
        """End all workers, and with them what another thread asks of them."""
        self._closed = True
        for handle in self.handles:
            if handle is not None:
                ray.kill(handle)
        # After Ray's end no answer comes, and no error.
        self._waiting.close()

    # ---- calls that survive the death of a worker ----

    def _deaths_so_far(self) -> list[int]:
        return [worker.deaths for worker in self._workers]

    def _rollouts(self, ask: Ask, shares: Shares) -> list[Rollout]:
        """Rollouts whose times are since now, whenever a worker was asked for the last time."""
        start = time.perf_counter()
        ask_times = [start] * len(self.handles)

        def timed(n: int, handle: Any) -> Any:
            ask_times[n] = time.perf_counter()
            return ask(n, handle)

        parts = self._ask_all(timed, doing=[f", {len(share)} requests re-issued" for share in shares])
        return [delayed(part, ask_times[n] - start) for n, part in enumerate(parts)]

    def _tell_all(self, ask: Ask) -> None:
        """Tell every worker what one that is started again is told anyway."""
        self._ask_all(ask, told_at_start=True)

    def _ask_all(
        self,
        ask: Ask | None,
        *,
        told_at_start: bool = False,
        doing: Sequence[str] = (),
        once: bool = False,
        mend: bool = True,
    ) -> list[Any]:
        """Each worker's answer. A coroutine waits for each worker: what one goes through holds no other up.

        Without `mend` who is dead, or dies of it, is left to another call, and its answer is None.
        """
        parts = doing or [""] * len(self.handles)

        async def answer(n: int) -> Any:
            # A rollout in another thread may start the next one in its place meanwhile, which is not to be ended.
            handle = self.handles[n]
            try:
                return await self._answer(n, ask(n, handle)) if ask and self._workers[n].alive else None
            except WorkerLost as lost:
                # It may live on as it was: the rollout under way finds it dead.
                self.events.record(f"rollout worker {n} is ended: {lost}", worker=n)
                ray.kill(handle)
                return None

        async def answers() -> list[Any]:
            lives = (
                self._retried(n, ask, told_at_start, part, once) if mend else answer(n) for n, part in enumerate(parts)
            )
            return await asyncio.gather(*lives)

        return self._waiting.run(answers())

    async def _retried(self, n: int, ask: Ask | None, told_at_start: bool, doing: str, once: bool) -> Any:
        """Worker n's answer to `ask`, None without one: it is asked again for as long as it dies and may come back.

        With `once` it is not, and the answer is what it died of.
        """
        while True:
            try:
                if not self._workers[n].alive:
                    if self._asleep:
                        return None
                    await self._start_worker(n)
                    if told_at_start:
                        return None
                return None if ask is None else await self._answer(n, ask(n, self.handles[n]))
            except WorkerLost as lost:
                if self._closed:
                    raise
                self._note_death(n, lost, doing)
                if once:
                    return lost

    async def _start_worker(self, n: int) -> None:
        """Start worker n, and tell it what it should know."""
        worker, restarted, timeout_s = self._workers[n], self._workers[n].deaths > 0, self.recipe.faults.start_timeout_s
        if self.handles[n] is not None:
            ray.kill(self.handles[n])
        placed = dict(self.options(n))
        env = actor_env(placed.pop("env_vars", {}), self.recipe.cluster.host)
        worker_of: Any = FreeRolloutWorker if self.recipe.rollout.staleness else RolloutWorker
        handle = worker_of.options(**placed, runtime_env=runtime_env(env)).remote(
            self.recipe, n, self.build, self.feed(n)
        )
        self.handles[n] = handle
        try:
            async with asyncio.timeout(timeout_s):
                self.pids[n] = await self._answer(n, handle.pid.remote())
                await self._answer(n, handle.start.remote())
        except TimeoutError:
            raise RunError(
                f"rollout worker {n} did not start within {timeout_s:g} s (faults.start_timeout_s): "
                "the model may be too large for it, or the machine too busy"
            ) from None
        except ConfigError as error:
            if not restarted:
                raise
            # It could start before: now something is in its way that may pass, such as memory not yet given back.
            raise WorkerLost(f"it cannot start: {error}") from error
        if self._weights is not None:
            send, version = self._weights
            try:
                await asyncio.to_thread(send, [handle], version, "host")
            except asyncio.CancelledError:
                ray.kill(handle)  # the thread is waited for, and sends no longer than somebody takes it
                raise
            await self._answer(n, handle.has_weights.remote(version))
        if self._running:
            try:
                self.on_restart(n)
            except RunError:
                # Did it fail because the worker has died again?
                await self._answer(n, handle.place.remote())
                raise
        for call in self._memories(n, handle):
            await self._answer(n, call)
        worker.alive = True

    def _memories(self, n: int, handle: Any) -> Iterator[Any]:
        """Calls that bring policy and drafters to where they were; what they say of draft weights counts once those
        are there."""
        worker = self._workers[n]
        if worker.memory is not None and worker.learned_by is not None:
            yield handle.set_policy.remote(*worker.learned_by)
            yield handle.load_state_dict.remote(worker.memory)
        if self._policy is not None and (worker.memory is None or worker.learned_by != self._policy):
            yield handle.set_policy.remote(*self._policy)
        for lengths, excluded in worker.since:
            yield handle.learn_lengths.remote(lengths, excluded)
        if worker.replayed:
            yield handle.replay.remote(worker.replayed)

    def _note_death(self, n: int, lost: WorkerLost, doing: str) -> None:
        worker, limit = self._workers[n], self.recipe.faults.max_restarts
        worker.alive = False
        worker.deaths += 1
        if worker.snapshot is not None:
            if succeeded(worker.snapshot):
                worker.learned_by, worker.memory, worker.since = self._policy, worker.snapshot, []
            worker.snapshot = None
        ray.kill(self.handles[n])
        when = f"in RL step {self.events.rl_step}" if self._running else "at its start"
        again = f"; started again{doing}" if self._running else ""
        if worker.deaths > limit:
            raise RunError(
                f"rollout worker {n} died {worker.deaths} times, and faults.max_restarts is {limit}; at last: {lost}"
            ) from lost
        self.events.note(f"rollout worker {n} died {when} ({lost}){again}", worker=n)

    async def _answer(self, n: int, call: Any) -> Any:
        """What a call to worker n returns; WorkerLost where it dies of it or never answers, else an error of ours."""
        clock, most_s = asyncio.get_running_loop().time, self.recipe.faults.patience_s(self._longest_s)
        start = clock()
        try:
            # Not `wait_for`, which before Python 3.12 may swallow a cancellation.
            async with asyncio.timeout(most_s):
                answer = await call
            self._longest_s = max(self._longest_s, clock() - start)
            return answer
        except TimeoutError as error:
            raise WorkerLost(f"it did not answer a call within {most_s:g} s") from error
        except RayError as error:
            why = why_lost(error, self.handles[n])
            if why:
                # An engine that failed has told why; of a process that ended its log may.
                last_words = "" if isinstance(error, RayTaskError) else last_lines(self.pids[n])
                raise WorkerLost(why, last_words) from error
            if isinstance(error, RayTaskError | RayActorError):
                raise error_of(error, died=TrainerDied) from error
            raise RunError(f"Ray failed a rollout worker: {last_line(error)}") from error


def _lengths(parts: Sequence[Rollout]) -> list[list[tuple[Key, int]]]:
    """Of each worker's whole responses. Those of cut ones mislead."""
    return [[(r.key, len(r.token_ids)) for r in part.responses if r.finish_reason != "abort"] for part in parts]
