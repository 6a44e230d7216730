"""The rollout workers of a run: a failed worker is restarted and its requests are reissued while the others continue.

Order of one rollout in which worker 1 fails:

    start      both workers: actor, engine, in parallel
    generate   both: snapshot of the policy's memory, then their shares; worker 1 fails (WorkerLost)
               worker 0 continues  worker 1: _note_failure   record it, the snapshot becomes its memory
                                             _start_worker   in the same place: actor, engine, weights, memory
                                             generate again  all requests reissued, same random state
               ends when both have answered; times count from the first call
    remember   responses go to `history`, their lengths to the budgets of the other workers
"""

import asyncio
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from tltlab.arrays import Tokens
from tltlab.config import counted
from tltlab.drafters.base import Key
from tltlab.drafters.specs import DrafterSpec, SuffixSpec
from tltlab.errors import ConfigError, RunError
from tltlab.planning.beliefs import LengthBelief
from tltlab.planning.placement import PLACEMENTS, PlacedRequest, Placement, placed
from tltlab.planning.rollout_driver import PlanDriver
from tltlab.policies.policy import Policy
from tltlab.records import Json, frozen
from tltlab.runtime.engine.drafter_pool import DrafterPool
from tltlab.runtime.engine.generation import GenerationRequest, Rollout
from tltlab.runtime.engine.weights import WeightTransport
from tltlab.runtime.ray.actors import (
    Waiting,
    actor_env,
    death_cause,
    error_of,
    last_line,
    last_lines,
    runtime_env,
    succeeded,
)
from tltlab.runtime.recipe.engines import EngineBuild, start_timeout_s
from tltlab.runtime.recipe.planner import costs_of_shapes, engine_gpus
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.run.rows import Shares
from tltlab.runtime.run.state import RunEvents
from tltlab.runtime.trainer.group import TrainerDied
from tltlab.traces.trace import Trace

from .collected import delayed, load_ragged, save_ragged, turns_of
from .planned import PlannedRollout, PlannedRolloutWorker
from .worker import FreeRolloutWorker, RolloutWorker, WorkerLost

EVALUATION = 1 << 31
"""Takes the place of the RL step in an evaluation's seed: no RL step has this number."""

Call = Callable[[int, Any], Any]
"""Starts a call: (worker number, actor handle) to an object reference."""
SendWeights = Callable[[Sequence[Any], int, WeightTransport], None]
"""Sends workers the weights of a version (`TrainerGroup.send_weights`)."""

NextUse = Callable[[Sequence[str]], Sequence[int | None]]
"""For each of these prompt ids, the number of prompts before it occurs again; None for never."""

TEXTS_FILE = "responses.safetensors"
LOW = 15 / 16
"""Fill level after entries were dropped: the order of dropping is recomputed only now and then."""


@frozen
class _Visit:
    """The responses to a prompt in one RL step: a reference to a list of (key, prompt, response), int32."""

    number: int
    responses: Any
    num_responses: int
    num_bytes: int


_OF_OWN: Json = {"scopes": ("problem",), "window": None, "history_mib": 256.0}
"""Settings for drafter classes of a user's own: earlier responses to recurring prompts are kept."""


class RunHistory:
    """The whole responses of a run that its drafters can draft from, an object in Ray's store per prompt and step.

    Workers hold nothing between rollouts: with its requests a worker receives the earlier responses to their prompts. A
    restarted worker therefore drafts like the old one, and history is saved once, for any number of workers.

    `serve` sets the policy. Drafters with scope "problem" need the responses to the prompts of the rollout, drafters
    with scope "global" all responses, others none (`of`). For each prompt the newest visits that fill the drafters'
    window are kept, in all `max_bytes` of tokens, the largest `history_mib` of the drafters in use. Prompts that do not
    occur again in the run are dropped at once; over the bound the prompts that occur last are dropped. For drafters
    with scope "global" the oldest visits are dropped.
    """

    def __init__(self, specs: Mapping[str, DrafterSpec]):
        self._drafters = DrafterPool(specs, 0)
        self._visits: dict[str, list[_Visit]] = {}
        self._next = 0
        self.window = 0.0
        self.max_bytes = 0.0
        self.everything = False

    def serve(self, policy: Policy) -> None:
        """Keep from now on the responses that the drafters of `policy` can draft from."""
        names = self._drafters.model_free(policy.strategies)
        specs = [spec for spec in (self._drafters.specs[name] for name in names) if getattr(spec, "remembers", False)]
        memories = [spec.arguments() if isinstance(spec, SuffixSpec) else _OF_OWN for spec in specs]
        self.everything = any("global" in settings["scopes"] for settings in memories)
        self.window = max((settings["window"] or math.inf for settings in memories), default=0.0)
        self.max_bytes = max(((settings["history_mib"] or math.inf) * 2**20 for settings in memories), default=0.0)

    @property
    def num_bytes(self) -> int:
        return sum(visit.num_bytes for visits in self._visits.values() for visit in visits)

    def of(self, requests: Sequence[GenerationRequest]) -> list[Any]:
        """Return references to the history for these requests, oldest first: lists of (key, prompt, response)."""
        if not self.window:
            return []
        if self.everything:
            return [visit.responses for visit in self._in_order()]
        prompts = dict.fromkeys(request.key[1] for request in requests)
        return [visit.responses for prompt_id in prompts for visit in self._visits.get(prompt_id, ())]

    def add(self, shares: Shares, parts: Sequence[Rollout], due: NextUse) -> None:
        """Add the whole responses of an RL step. O(tokens)."""
        if not self.window:
            return
        prompts = {request.key: request.prompt_token_ids for share in shares for request in share}
        texts: dict[str, list[tuple[Key, Sequence[int], Sequence[int]]]] = {}
        for part in parts:
            for response in part.responses:
                if response.finish_reason != "abort":
                    key = response.key
                    texts.setdefault(key[1], []).append((key, prompts[key], response.token_ids))
        coming = [True] * len(texts) if self.everything else [turn is not None for turn in due(list(texts))]
        for (prompt_id, responses), comes in zip(texts.items(), coming, strict=True):
            if comes:
                self._store(prompt_id, responses)
                visits = self._visits[prompt_id]
                while sum(visit.num_responses for visit in visits[1:]) >= self.window:
                    del visits[0]
            else:
                self._visits.pop(prompt_id, None)
        self._keep_bound(due)

    def state_dict(self, folder: Path) -> list[Any]:
        """Return the keys of the responses, as JSON types; the texts go to a file in `folder`, which is made."""
        folder.mkdir()
        tokens: list[Tokens] = []
        rows = []
        for visit in self._in_order():
            keys, last_prompt = [], None
            for key, prompt, response in ray.get(visit.responses):
                new = last_prompt is None or not np.array_equal(prompt, last_prompt)
                tokens += [prompt, response] if new else [response]
                keys.append([*key, new])
                last_prompt = prompt
            rows.append(keys)
        save_ragged(folder / TEXTS_FILE, tokens=tokens)
        return rows

    def load_state_dict(self, rows: Sequence[Any] | None, folder: Path) -> None:
        """Restore the result of `state_dict`; None, of a checkpoint without it, is an empty history."""
        self._visits = {}
        tokens = iter(load_ragged(folder / TEXTS_FILE)["tokens"] if rows else ())
        prompt: Tokens = np.empty(0, np.int32)
        for visit in rows or ():
            responses: list[tuple[Key, Any, Any]] = []
            for rl_step, prompt_id, sample, turn, new in visit:
                prompt = next(tokens) if new else prompt
                responses.append(((rl_step, prompt_id, sample, turn), prompt, next(tokens)))
            self._store(visit[0][1], responses)

    def _store(self, prompt_id: str, responses: Sequence[tuple[Key, Sequence[int], Sequence[int]]]) -> None:
        packed: list[tuple[Key, Tokens, Tokens]] = []
        last: tuple[Sequence[int], Tokens] | None = None
        num_tokens = 0
        for key, prompt, response in responses:
            if last is None or (last[0] is not prompt and list(last[0]) != list(prompt)):
                # One array for all samples, also after its way through Ray.
                last = prompt, np.array(prompt, np.int32)
                num_tokens += len(prompt)
            packed.append((key, last[1], np.array(response, np.int32)))
            num_tokens += len(response)
        new = _Visit(number=self._next, responses=ray.put(packed), num_responses=len(packed), num_bytes=4 * num_tokens)
        self._next += 1
        self._visits.setdefault(prompt_id, []).append(new)

    def _keep_bound(self, due: NextUse) -> None:
        surplus = self.num_bytes - self.max_bytes
        if surplus <= 0:
            return
        surplus += (1 - LOW) * self.max_bytes
        names = list(self._visits)
        if self.everything:
            order = sorted(names, key=lambda name: self._visits[name][-1].number)
        else:
            turns = {name: math.inf if turn is None else turn for name, turn in zip(names, due(names), strict=True)}
            order = sorted(names, key=lambda name: (-turns[name], self._visits[name][-1].number))
        for name in order:
            if surplus <= 0:
                return
            surplus -= sum(visit.num_bytes for visit in self._visits.pop(name))

    def _in_order(self) -> list[_Visit]:
        """Return all visits, the oldest first."""
        visits = [visit for of_prompt in self._visits.values() for visit in of_prompt]
        return sorted(visits, key=lambda visit: visit.number)


@dataclass(slots=True, kw_only=True)
class _PoolWorker:
    """State of one worker, and what a restarted one needs.

    `memory` is the state of policy and budget learned under `learned_by`, a dict or a reference to one; `since` are
    lengths delivered after it, as arguments of `learn_lengths`. `snapshot` is the memory before the current rollout.
    """

    alive: bool = False
    failures: int = 0
    learned_by: tuple[Policy, int] | None = None
    memory: Any = None
    since: list[tuple[Any, int | None]] = field(default_factory=list)
    snapshot: Any = None
    replayed: list[Json] = field(default_factory=list)

    def keep(self, policy: tuple[Policy, int] | None, memory: Any) -> None:
        """Keep the memory of a worker under `policy` for its next restart."""
        self.learned_by, self.memory, self.since = policy, memory, []


class WorkerPool:
    """The rollout workers of a run: `handles` are their actors, `pids` their processes, both replaced at a restart.

    `feed(n)` is the address for worker n's drafter training data, `options(n)` the placement of its actor
    (`GpuPlacement.worker_options`); `on_restart(n)` is called after worker n was restarted.

    A worker that fails in a call, or before it, is recorded in `events` and restarted in the same place, at most
    `faults.max_restarts` times. A restart restores policy, weights, decisions to replay, the memory of policy and
    budget at the start of the last rollout, and lengths received since. Drafters' memory lies in `history` and travels
    with the requests. All requests are reissued: keeping finished responses would favour short ones. Every rollout
    has its own random state, so a fixed strategy yields the same responses as without the failure. No worker starts
    while engines sleep; `wake_up` restarts a failed one.

    With `rollout.tail_shape` there are engines of that shape too, numbered after the others. They sleep, on the same
    GPUs, until a planner gathers requests onto them; then the others do.

    Raises RunError when a worker fails too often or does not start in time, and at once when all fail in the same way
    before one has started; ConfigError for settings that engines cannot run. A worker's TltlabError is raised as is.
    """

    def __init__(
        self,
        recipe: Recipe,
        build: EngineBuild,
        feed: Callable[[int], str | None],
        options: Callable[[int], Json],
        *,
        events: RunEvents,
        on_restart: Callable[[int], None],
    ):
        self.costs, self._gpus = costs_of_shapes(recipe), engine_gpus(recipe)
        self.base, *tail = recipe.rollout.shapes
        num_workers = len(self._gpus)
        self.workers = range(self.base.engines)
        self._tails = range(self.base.engines, num_workers)
        self.shapes = {self.base: self.workers} | dict.fromkeys(tail, self._tails)
        self._awake: Sequence[int] = self.workers
        self._late: set[int] = set()  # engines of another shape without the newest weights
        self.recipe = recipe
        self.build = build
        self.history = RunHistory(build.drafters)
        self.placement = recipe.read_placement()
        self.driver = PlanDriver(recipe.read_planner(), events.note)
        self.belief = LengthBelief()  # for planners
        self.lengths: dict[str, list[int]] = {}  # of whole responses by prompt id, for placements that read them
        self.feed, self.options = feed, options
        self.events, self.on_restart = events, on_restart
        self.handles: list[Any] = [None] * num_workers
        self.pids = [0] * num_workers
        self._workers = [_PoolWorker() for _ in range(num_workers)]
        self._policy: tuple[Policy, int] | None = None
        self._weights: tuple[SendWeights, int] | None = None
        self._seeds: list[list[int]] = [[] for _ in range(num_workers)]
        self._failures_before: list[int] = []  # per worker, at the start of the last rollout
        self._longest_call_s = 0.0
        self._running = self._closed = False
        self._waiting = Waiting()

    def start(self) -> None:
        """Start all workers in parallel, then those of another shape, and have these sleep.

        Failed ones are restarted after each has been tried once.
        """
        self._start()
        if self._tails:
            # An engine measures free memory when it starts.
            self.sleep()
            self._awake = self._tails
            self._start()
            self._waiting.run(self.hand_over(self.workers))
        self._running = True

    def _start(self) -> None:
        losses = [lost for lost in self._ask_all(None, once=True) if lost is not None]
        # Numbers differ between workers. One alone may have been killed by chance, unless its engine gave a reason.
        reasons = {re.sub(r"\d+", "", lost.why) for lost in losses}
        systematic = len(losses) > 1 or (losses and isinstance(losses[0].__cause__, RayTaskError))
        if systematic and len(losses) == len(self._awake) and len(reasons) == 1:
            raise RunError(f"no engine can start: each fails at its start with {losses[0]}") from losses[0]
        self._ask_all(None)

    def share(
        self, requests: Sequence[GenerationRequest], placement: Placement = PLACEMENTS["contiguous"]
    ) -> list[list[GenerationRequest]]:
        """Split requests over the workers; by default in order, request i of N to worker i * W // N."""
        workload = [PlacedRequest(r.key, len(r.prompt_token_ids), r.max_response_tokens) for r in requests]
        queues = placed(placement, workload, len(self.workers), self.lengths)
        return [[requests[i] for i in queue] for queue in queues]

    def set_policy(self, policy: Policy, rl_step: int) -> None:
        """Give every engine a fresh selector of `policy`, seeded by the run, the worker and the RL step."""
        self._policy = policy, rl_step
        self._set_all(_calling("set_policy", policy, rl_step))
        self.history.serve(policy)

    def replay(self, trace: Trace) -> None:
        """Have engine n follow the decisions of worker n in the trace until they are used up."""
        if (decisions := trace.decisions) is None:
            raise ConfigError("a trace without decisions cannot be replayed: it has no decisions.parquet")
        for number, worker in enumerate(self._workers):
            worker.replayed = decisions[decisions["worker"] == number].to_dict("records")  # type: ignore[assignment]
        self._set_all(lambda n, handle: handle.ask_engine.remote("replay", self._workers[n].replayed))

    def generate(
        self,
        shares: Shares,
        rl_step: int,
        *,
        round: int = 0,
        repeatable: bool = False,
        quotas: Sequence[int] | None = None,
        on_idle: Callable[[int], None] = lambda n: None,
    ) -> list[Rollout]:
        """Generate each worker's share, in its random state of this RL step and round.

        `on_idle(n)` is called as soon as worker n has done its share.
        With quotas worker n stops once all requests of that many prompts are answered; the rest return as "abort".
        `repeatable` permits a `repeat`. Times count from this call, time lost to failed workers included. A planner may
        move requests: then a part has the responses that ended at its worker (`Rollout.asked`).
        """
        recalled = self._begin(shares, rl_step, round)
        if self.driver.planner is not None:
            return self._planned(shares, rl_step)

        def call(n: int, handle: Any) -> Any:
            self._workers[n].snapshot = handle.state_dict.remote()
            quota = None if quotas is None else quotas[n]
            return handle.generate.remote(
                list(shares[n]), rl_step, self._seeds[n], recalled[n], repeatable=repeatable, quota=quota
            )

        parts = self._rollouts(call, shares, on_idle)
        self._keep_snapshots(_lengths(parts))
        return parts

    def _keep_snapshots(self, lengths: Sequence[list[tuple[Key, int]]]) -> None:
        for n, worker in enumerate(self._workers):
            if worker.snapshot is not None:
                worker.keep(self._policy, worker.snapshot)
                worker.snapshot, worker.since = None, [(lengths[n : n + 1], None)]

    # ---- rollouts of a planner (`planned`) ----

    def _planned(self, shares: Shares, rl_step: int) -> list[Rollout]:
        try:
            parts = self._waiting.run(PlannedRollout(self, shares, rl_step, self._seeds).run())
        except TrainerDied:
            # Weights for engines of another shape were cut off.
            self._waiting.run(self.hand_over(self.workers))
            raise
        self._keep_snapshots(_lengths(parts))
        return parts

    def lanes(self, n: int) -> range:
        """Return the workers that have the GPUs of engine n."""
        gpus, each = self._gpus[n], self.base.gpus
        return range(gpus.start // each, gpus.stop // each)

    async def bring_up(self, n: int) -> None:
        """Start engine n where it is not alive; WorkerLost where it fails."""
        worker = self._workers[n]
        if not worker.alive:
            await self._start_worker(n)
        if worker.snapshot is None:
            worker.snapshot = self.handles[n].state_dict.remote()

    async def asked(self, n: int, method: str, *args: Any) -> Any:
        """Return the answer of engine n; WorkerLost where it fails."""
        return await self._answer(n, getattr(self.handles[n], method).remote(*args))

    def failed(self, n: int, lost: WorkerLost, lost_work: str) -> None:
        """Record that engine n failed; RunError above `faults.max_restarts`, or where the pool is closed."""
        if self._closed:
            raise lost
        self._note_failure(n, lost, lost_work)

    async def hand_over(self, numbers: Sequence[int]) -> None:
        """Put the engines that are awake to sleep and wake others, with the newest weights.

        On a CPU sleep frees nothing.
        """
        before, self._awake = self._awake, ()
        await self._each(_calling("ask_engine", "sleep"), before)
        self._awake = numbers
        await self._each(_calling("ask_engine", "wake_up"), numbers, set_at_start=True)
        if self._weights is not None and (late := self._late.intersection(numbers)):
            send, version = self._weights
            await asyncio.to_thread(send, [self.handles[n] for n in late], version, "host")
            await self._each(_calling("has_weights", version), late, set_at_start=True)
            self._late -= late

    def repeat(self, shares: Shares, rl_step: int) -> list[Rollout]:
        """Run the last rollout, a repeatable one, again from its initial state, and restore all state.

        Empty where a worker was restarted since that rollout began: its time would be of other work.
        """
        if self._num_failures() != self._failures_before:
            return []
        parts = self._ask_all(lambda n, handle: handle.repeat.remote(list(shares[n]), rl_step, self._seeds[n]))
        return [] if self._num_failures() != self._failures_before else parts

    def rehearse(self, shares: Shares, rl_step: int, *, ahead: bool = False) -> list[Rollout]:
        """Run a rollout and restore all state; its random state is always the same, or `ahead` the RL step's."""
        recalled = self._begin(shares, *([rl_step, 0] if ahead else []))
        return self._rollouts(
            lambda n, handle: handle.rehearse.remote(list(shares[n]), rl_step, self._seeds[n], recalled[n]), shares
        )

    def evaluate(self, requests: Sequence[GenerationRequest]) -> list[list[int]]:
        """Return the tokens of each response, all turns, in the order of the requests, without speculation.

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

    def remember(
        self, shares: Shares, parts: Sequence[Rollout], next_use: NextUse = lambda ids: [0] * len(ids)
    ) -> None:
        """Keep responses for drafters of later rollouts, and deliver each budget the lengths of the other workers.

        `next_use` gives the number of prompts before each of these recurs, None for never; by default any may be next.
        """
        self.history.add(shares, parts, next_use)
        if self.driver.planner is not None:
            self.belief.add(dict(chain.from_iterable(_lengths(parts))))
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
        self._set_all(lambda n, handle: handle.learn_lengths.remote(lengths, n))

    def update_weights(self, send: SendWeights, version: int, transport: WeightTransport = "host") -> None:
        """Have `send` bring the weights of `version` to every engine, and later to those of restarted workers.

        A restarted worker gets the trainers' current weights through the host; the next update makes all equal again.
        TrainerDied when a trainer fails in the transfer; engines with partial weights are ended. Under
        `rollout.staleness` engines may be in a rollout, which finds and restarts the failed workers.
        """
        self._weights, self._late = (send, version), set(self._tails)
        alive = [n for n in self.workers if self._workers[n].alive]
        in_flight = self.recipe.rollout.staleness
        try:
            send([self.handles[n] for n in alive], version, transport)
        except TrainerDied as error:
            why = f"its transfer of weights was cut off: {error}"
            for n in alive if transport == "nccl" else ():
                # Its engine waits in a collective that never ends.
                self._note_failure(n, WorkerLost(why), "")
            if in_flight:
                self._ask_alive(_calling("weights", "cut off", why))
            raise
        if in_flight:
            self._ask_alive(_calling("has_weights", version))
        else:
            self._set_all(_calling("has_weights", version), self.workers)

    def sleep(self, level: int = 1) -> None:
        """Free the engines' memory until `wake_up`; at level 2 weights too, and an update of weights must follow."""
        self._ask_all(_calling("ask_engine", "sleep", level), self.workers)
        self._awake = ()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the engines' memory again, all or that of "weights" or "kv_cache"."""
        self._awake = self.workers
        self._set_all(_calling("ask_engine", "wake_up", tags), self.workers)

    @property
    def all_alive(self) -> bool:
        """True when no worker is known to have failed, so that the next call restarts none."""
        return all(self._workers[n].alive for n in self.workers)

    def state_dicts(self) -> list[Json]:
        """Return each worker's state of policy, budget and drafters, as JSON types; a failed one's last known."""
        states = self._ask_all(_calling("state_dict"))
        for n, worker in enumerate(self._workers):
            if worker.alive:
                worker.keep(self._policy, states[n])
            else:
                states[n] = ray.get(worker.memory) if isinstance(worker.memory, ray.ObjectRef) else worker.memory or {}
        return states

    def load_state_dicts(self, states: Sequence[Json]) -> None:
        """Restore the result of `state_dicts`, under the active policy at that time."""
        for worker, state in zip(self._workers, states, strict=True):
            worker.keep(self._policy, state)
        self._set_all(lambda n, handle: handle.ask_engine.remote("load_state_dict", states[n]))

    def ask(self, method: str, *args: Any) -> list[Any]:
        """Call any method of every worker and return the answers; the method must be safe to call twice."""
        return self._ask_all(_calling(method, *args))

    def close(self) -> None:
        """End all workers, and calls to workers that wait in other threads."""
        self._closed = True
        for handle in self.handles:
            if handle is not None:
                ray.kill(handle)
        # After Ray's end no answer comes, and no error.
        self._waiting.close()

    # ---- calls that survive the failure of a worker ----

    def _num_failures(self) -> list[int]:
        return [worker.failures for worker in self._workers]

    def _begin(self, shares: Shares, *step: int) -> list[Any]:
        """Seed a rollout with the run, the worker and `step`; return what drafters recall for each share."""
        self._seeds = [[self.recipe.seed, n, *step] for n in range(len(self.handles))]
        self._failures_before = self._num_failures()
        return [self.history.of(share) for share in shares]

    def _rollouts(self, call: Call, shares: Shares, on_idle: Callable[[int], None] = lambda n: None) -> list[Rollout]:
        """Return rollouts whose times count from now, also where a worker's requests were reissued."""
        start = time.perf_counter()
        call_times = [start] * len(self.handles)

        def timed(n: int, handle: Any) -> Any:
            call_times[n] = time.perf_counter()
            return call(n, handle)

        async def rollout(n: int, share: Sequence[GenerationRequest]) -> Rollout:
            lost_work = f", {counted(len(share), 'request')} reissued"
            part: Rollout = await self._retried(n, timed, False, lost_work, False)
            on_idle(n)
            return part

        parts = self._gather(rollout(n, share) for n, share in enumerate(shares))
        return [delayed(part, call_times[n] - start) for n, part in enumerate(parts)]

    def _set_all(self, call: Call, numbers: Sequence[int] | None = None) -> None:
        """Call every worker, or those `numbers`, with a setting that a restarted one receives anyway."""
        self._ask_all(call, numbers, set_at_start=True)

    def _ask_all(self, call: Call | None, numbers: Collection[int] | None = None, **how: bool) -> list[Any]:
        """Return the answer of each worker (`_each`)."""
        return self._waiting.run(self._each(call, numbers, **how))

    async def _each(
        self,
        call: Call | None,
        numbers: Collection[int] | None = None,
        *,
        set_at_start: bool = False,
        once: bool = False,
    ) -> list[Any]:
        """Return the answer of each worker, or of those `numbers`.

        A failed worker is restarted and called again, independently of the others.
        """
        numbers = range(len(self.handles)) if numbers is None else numbers
        return await asyncio.gather(*(self._retried(n, call, set_at_start, "", once) for n in numbers))

    def _ask_alive(self, call: Call) -> list[Any]:
        """Return each live worker's answer. A worker that fails is ended, for a later call to restart; None for it."""

        async def answer(n: int) -> Any:
            # A rollout in another thread may replace the handle meanwhile; the new worker must not be ended.
            handle = self.handles[n]
            try:
                return await self._answer(n, call(n, handle)) if self._workers[n].alive else None
            except WorkerLost as lost:
                # Its process may still run: the current rollout must find it failed.
                self.events.record(f"rollout worker {n} is ended: {lost}", worker=n)
                ray.kill(handle)
                return None

        return self._gather(map(answer, range(len(self.handles))))

    def _gather(self, answers: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
        async def gathered() -> list[Any]:
            return await asyncio.gather(*answers)

        return self._waiting.run(gathered())

    async def _retried(self, n: int, call: Call | None, set_at_start: bool, lost_work: str, once: bool) -> Any:
        """Return worker n's answer to `call`, restarting it as often as needed; with `once` return its WorkerLost."""
        while True:
            try:
                if not self._workers[n].alive:
                    if n not in self._awake:
                        return None
                    await self._start_worker(n)
                    if set_at_start:
                        return None
                return None if call is None else await self._answer(n, call(n, self.handles[n]))
            except WorkerLost as lost:
                self.failed(n, lost, lost_work)
                if once:
                    return lost

    async def _start_worker(self, n: int) -> None:
        """Start worker n, and bring it to the state of the run: weights, `on_restart`, `_restoring_calls`."""
        handle = await self._start_actor(n, restarted=self._workers[n].failures > 0)
        if self._weights is not None:
            send, version = self._weights
            try:
                await asyncio.to_thread(send, [handle], version, "host")
            except asyncio.CancelledError:
                ray.kill(handle)  # ends the thread's transfer, for which asyncio waits
                raise
            await self._answer(n, handle.has_weights.remote(version))
            self._late.discard(n)
        if self._running:
            try:
                self.on_restart(n)
            except RunError:
                # Raises WorkerLost where the worker failed again.
                await self._answer(n, handle.place.remote())
                raise
        for call in self._restoring_calls(n, handle):
            await self._answer(n, call)
        self._workers[n].alive = True

    async def _start_actor(self, n: int, *, restarted: bool) -> Any:
        """Replace the actor of worker n, start its engine, and return its handle."""
        if self.handles[n] is not None:
            ray.kill(self.handles[n])
        placed, timeout_s = dict(self.options(n)), start_timeout_s(self.recipe)
        env = actor_env(placed.pop("env_vars", {}), self.recipe.cluster.host)
        worker_of: Any = FreeRolloutWorker if self.recipe.rollout.staleness else RolloutWorker
        if self.driver.planner is not None:
            worker_of = PlannedRolloutWorker
        # Rows of an engine of another shape are those of the first worker whose GPUs it has.
        lane, rollout = self.lanes(n)[0], self.recipe.rollout
        own = rollout.model_copy(update={"tensor_parallel_size": len(self._gpus[n])})
        handle = self.handles[n] = worker_of.options(**placed, runtime_env=runtime_env(env)).remote(
            self.recipe.model_copy(update={"rollout": own}), lane, self.build, self.feed(lane)
        )
        try:
            async with asyncio.timeout(timeout_s):
                self.pids[n] = await self._answer(n, handle.pid.remote())
                await self._answer(n, handle.start.remote())
        except TimeoutError:
            raise RunError(
                f"rollout worker {n} did not start within faults.start_timeout_s = {timeout_s:g} s: a large model?"
            ) from None
        except ConfigError as error:
            if not restarted:
                raise
            # The same settings started before: the cause may pass, such as memory not yet freed.
            raise WorkerLost(f"it cannot start: {error}") from error
        return handle

    def _restoring_calls(self, n: int, handle: Any) -> Iterator[Any]:
        """Calls that restore policy, memory, lengths and replay; draft weights must be there before."""
        worker = self._workers[n]
        if worker.memory is not None and worker.learned_by is not None:
            yield handle.set_policy.remote(*worker.learned_by)
            yield handle.ask_engine.remote("load_state_dict", worker.memory)
        if self._policy is not None and (worker.memory is None or worker.learned_by != self._policy):
            yield handle.set_policy.remote(*self._policy)
        for lengths, excluded in worker.since:
            yield handle.learn_lengths.remote(lengths, excluded)
        if worker.replayed:
            yield handle.ask_engine.remote("replay", worker.replayed)

    def _note_failure(self, n: int, lost: WorkerLost, lost_work: str) -> None:
        """Record a failure, end the process and keep its snapshot; RunError above `faults.max_restarts`."""
        worker, limit = self._workers[n], self.recipe.faults.max_restarts
        worker.alive = False
        worker.failures += 1
        if worker.snapshot is not None:
            if succeeded(worker.snapshot):
                worker.keep(self._policy, worker.snapshot)
            worker.snapshot = None
        ray.kill(self.handles[n])
        when = f"in RL step {self.events.rl_step}" if self._running else "at its start"
        again = f"; restarted{lost_work}" if self._running else ""
        if worker.failures > limit:
            raise RunError(
                f"rollout worker {n} failed {counted(worker.failures, 'time')}; faults.max_restarts is {limit}: {lost}"
            ) from lost
        self.events.note(f"rollout worker {n} failed {when} ({lost}){again}", worker=n)

    async def _answer(self, n: int, call: Any) -> Any:
        """Await a call to worker n; WorkerLost where the worker fails or does not answer, else our own error."""
        clock, most_s = asyncio.get_running_loop().time, self.recipe.faults.patience_s(self._longest_call_s)
        # Another call may find the failure first, and replace the handle.
        start, handle = clock(), self.handles[n]
        try:
            # Not `wait_for`, which before Python 3.12 may swallow a cancellation.
            async with asyncio.timeout(most_s):
                answer = await call
            self._longest_call_s = max(self._longest_call_s, clock() - start)
            return answer
        except TimeoutError as error:
            raise WorkerLost(f"it did not answer a call within {most_s:g} s") from error
        except RayError as error:
            if why := death_cause(error, handle):
                # A failed engine reports its reason; for a process that ended the log may hold it.
                log_tail = "" if isinstance(error, RayTaskError) else last_lines(self.pids[n])
                raise WorkerLost(why, log_tail) from error
            if isinstance(error, RayTaskError | RayActorError):
                raise error_of(error, died=TrainerDied) from error
            raise RunError(f"Ray failed a rollout worker: {last_line(error)}") from error


def _calling(method: str, *args: Any) -> Call:
    """Call a method of workers."""
    return lambda n, handle: getattr(handle, method).remote(*args)


def _lengths(parts: Sequence[Rollout]) -> list[list[tuple[Key, int]]]:
    """Keys and tokens of each worker's whole responses; aborted ones would bias a budget."""
    return [[(r.key, len(r.token_ids)) for r in part.responses if r.finish_reason != "abort"] for part in parts]
