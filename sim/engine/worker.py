"""One RL step's rollout as a discrete-event simulation: one SimPy process per worker, one timeout per macro-step.

A worker's round: its scheduler preempts or admits, its policy is asked, its batch advances until something happens, and
the policy is told. Once nothing waits, a memoryless policy over requests whose gains stay the same has a closed form:
one timeout to the end. Where gains are drawn or replayed, one timeout passes all iterations before it first drafts.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import simpy

from tltlab.arrays import Floats, Ints
from tltlab.costs.base import CostModel
from tltlab.costs.noise import IterationNoise
from tltlab.policies.selector import Selector
from tltlab.sim.idle_training import SpotResult
from tltlab.state import DrafterState, StepOutcome, StepState
from tltlab.strategy import NO_SPECULATION

from .admission import RequestFeed
from .batch import Batch, MacroStep, RequestsView
from .log import Entry, WorkerLog
from .memoryless import Drained, MemorylessChoices, check_listed
from .random_numbers import NoiseDraws
from .regime import Regime, Regimes
from .requests import Requests, Residents, Tools, check_fits
from .scheduler import Scheduler

_ROUNDING = 1e-9
"""Of a number of iterations that is a quotient of times, and of seconds at which requests come back together."""


class IdleUse(Protocol):
    """What idle workers do while others still run; called at the virtual time at which it happens.

    A rollout begins; a worker that is about to be idle has finished responses of these lengths, and has nothing left
    to do in this rollout; all workers are done.
    """

    def rollout_started(self, num_workers: int, now: float) -> None: ...
    def responses_finished(self, response_tokens: Sequence[float], now: float) -> None: ...
    def worker_idle(self, worker: int, now: float) -> None: ...
    def rollout_ended(self, now: float) -> None: ...


class LeaveIdle:
    """Idle workers stay idle."""

    def rollout_started(self, num_workers: int, now: float) -> None: ...
    def responses_finished(self, response_tokens: Sequence[float], now: float) -> None: ...
    def worker_idle(self, worker: int, now: float) -> None: ...
    def rollout_ended(self, now: float) -> None: ...


@dataclass(slots=True)
class SimulatedRollout:
    """What one RL step's simulation leaves: times per request (nan: never ran), the workers' logs and the end.

    `old_tokens` of its responses were generated under the weights of earlier steps; `wasted_tokens` were generated for
    nothing. Where RL steps are not apart, `ages` are the updates since each response was begun; until now `num_begun`
    were, which come to `begun_tokens` when they have ended, and `num_dropped` of them were too old to train on. Where
    responses have turns, `submit_s` is when each came to the engine (None: all at 0), and calls waited `tool_wait_s`
    for a tool that was free.
    """

    requests: Requests
    worker_of: Ints
    first_token_s: Floats
    finish_s: Floats
    logs: list[WorkerLog]
    worker_end_s: list[float]
    makespan_s: float = 0.0
    spot: SpotResult | None = None
    old_tokens: float = 0.0
    wasted_tokens: float = 0.0
    ages: Ints | None = None
    num_begun: int = 0
    begun_tokens: int = 0
    num_dropped: int = 0
    submit_s: Floats | None = None
    tool_wait_s: float = 0.0

    @property
    def busy_s(self) -> float:
        """Worker-seconds of switching, prefill and decoding; the rest up to workers * makespan is idle."""
        return math.fsum(
            float((c.switch_s + c.prefill_s + c.seconds).sum()) for c in (log.columns for log in self.logs)
        )

    def note_first_tokens(self, requests: Sequence[int], now: float) -> None:
        """These have got tokens by now; what is known of one from before a preemption stays."""
        for request in requests:
            if math.isnan(self.first_token_s[request]):
                self.first_token_s[request] = now


@dataclass(slots=True)
class RolloutSimulator:
    """What all rollouts of a simulation share. Selectors persist across RL steps, one per worker.

    `noise` multiplies the time of each iteration, drawn from `seed`; prefill and switches have none.
    """

    costs: CostModel
    selectors: list[Selector]
    decision_block: int = 1
    record_rewards: bool = False
    idle_use: IdleUse = field(default_factory=LeaveIdle)
    regimes: Regimes = field(init=False)
    new_batch: Callable[[Requests], Batch] = field(init=False)
    drafters: Mapping[str, DrafterState] = field(default_factory=dict)
    noise: IterationNoise | None = None
    seed: int = 0
    max_tools: int | None = None
    choices: MemorylessChoices = field(init=False)

    def prepare(self, regimes: Regimes, new_batch: Callable[[Requests], Batch]) -> RolloutSimulator:
        """Set what strategies yield, which may change from one RL step to the next; the selectors stay."""
        self.regimes, self.new_batch = regimes, new_batch
        self.choices = MemorylessChoices(self.selectors[0], regimes)
        return self

    def rollout(self, requests: Requests, queues: list[list[int]], feed: RequestFeed | None = None) -> SimulatedRollout:
        """Simulate one RL step; `queues` are the requests of each worker in order of admission.

        With a `feed` they are those that it begins with.
        """
        check_fits(requests, self.costs.kv_capacity_tokens)
        n = len(requests)
        worker_of, residents = requests.placed(queues)
        result = SimulatedRollout(
            requests=requests,
            worker_of=worker_of.copy(),
            first_token_s=np.full(n, np.nan),
            finish_s=np.zeros(n),
            logs=[WorkerLog() for _ in queues],
            worker_end_s=[0.0] * len(queues),
        )
        self.idle_use.rollout_started(len(queues), 0.0)
        batches = [self.new_batch(requests) for _ in queues]
        # The rest of a rollout has a closed form where gains stay the same, nothing is learned and costs are exact.
        exact = self.noise is None and feed is None and requests.turns is None
        closed = exact and all(s.memoryless for s in self.selectors)
        if closed and all(batch.is_steady for batch in batches) and self._fits_at_once(residents):
            self._drain_all(result, residents, batches[0])
        else:
            env, tools = simpy.Environment(), None
            if requests.turns is not None:
                result.submit_s, tools = np.zeros(n), Tools(requests.turns, self.max_tools)
            workers, stop = [], env.event()
            for w, queue in enumerate(queues):
                worker = Worker(self, w, queue, batches[w], result, stop, feed, tools, closed)
                workers.append(env.process(worker.run(env)))
            env.run(until=env.all_of(workers))
            result.tool_wait_s = 0.0 if tools is None else tools.waited_s
        result.makespan_s = max(result.worker_end_s)
        self.idle_use.rollout_ended(result.makespan_s)
        return result

    def _fits_at_once(self, residents: Residents) -> bool:
        """Whether every worker can admit all that it has, without ever running out of memory."""
        costs, most = self.costs, residents.remaining.shape[1]
        grows_to = (
            residents.context_sums[:, :1].sum(axis=1) + residents.remaining.sum(axis=1) + residents.present.sum(axis=1)
        )
        return (
            most > 0
            and costs.max_num_batched_tokens is None
            and most <= (costs.max_num_seqs or math.inf)
            and float(grows_to.max()) <= (costs.kv_capacity_tokens or math.inf)
        )

    def _drain_all(self, result: SimulatedRollout, residents: Residents, batch: Batch) -> None:
        """The whole rollout in closed form."""
        drained = self.drain(result, range(len(result.logs)), residents, batch, self.costs.outside_s)
        result.worker_end_s = np.where(residents.present[:, -1], drained.finish_s[:, -1], 0.0).tolist()
        for w, end_s in sorted(enumerate(result.worker_end_s), key=lambda pair: pair[1]):
            self.idle_use.responses_finished(residents.remaining[w, residents.present[w]].tolist(), end_s)
            self.idle_use.worker_idle(w, end_s)

    def drain(
        self,
        result: SimulatedRollout,
        workers: Sequence[int],
        residents: Residents,
        batch: Batch,
        start_s: float,
        *,
        from_the_start: bool = True,
        drafter_ready: bool = False,
        down_to: int = 0,
    ) -> Drained:
        """Prefill residents of these workers and decode them to their ends, in closed form, beside `down_to` more."""
        drained = self.choices.up_to(residents.remaining.shape[1] + down_to, result.requests.rl_step).drain(
            residents,
            start_s=start_s,
            prefill_s=np.array([self.costs.prefill_s(tokens) for tokens in residents.to_prefill.tolist()]),
            switch_s=self.costs.switch_s,
            gains=batch.steady_gains,
            from_the_start=from_the_start,
            drafter_ready=drafter_ready,
            down_to=down_to,
        )
        requests = drained.requests[residents.present]
        result.finish_s[requests] = drained.finish_s[residents.present]
        before_s = result.first_token_s[requests]
        first_s = np.broadcast_to(drained.first_s[:, None], residents.remaining.shape)[residents.present]
        result.first_token_s[requests] = np.where(np.isnan(before_s), first_s, before_s)
        for row, worker in enumerate(workers):
            if residents.present[row, -1]:
                result.logs[worker].extend(partial(drained.columns, row))
        return drained


class PolicySeat:
    """A worker's policy: asked for a strategy before a macro-step, told its outcome after it.

    A memoryless policy depends on batch and queue alone: it is asked when these change, and learns nothing.
    """

    def __init__(self, simulator: RolloutSimulator, worker: int, requests: Requests, scheduler: Scheduler) -> None:
        self.simulator = simulator
        self.worker = worker
        self.requests = requests
        self.scheduler = scheduler
        self.selector = simulator.selectors[worker]
        self.memoryless = self.selector.memoryless
        self.max_iterations = math.inf if self.memoryless else simulator.decision_block
        self.strategy = NO_SPECULATION
        self.bucket: int | None = None
        self.propensity = 1.0
        self._asked_at: tuple[int, int] | None = None

    def ask(self, batch: int, waiting: int) -> bool:
        """Have a strategy chosen for what runs and waits now; whether the policy had to be asked for it."""
        if self.memoryless:
            if (batch, waiting) == self._asked_at:
                return False
            self._asked_at = (batch, waiting)
            choice = self.simulator.choices.choose(batch, waiting, self.requests.rl_step)
            self.strategy, self.bucket, self.propensity = choice.strategy, choice.bucket, choice.propensity
            return True
        before = self.strategy
        self.strategy = self.selector.choose(self._state(batch, waiting))
        self.bucket, self.propensity = self.selector.bucket_, self.selector.propensity_
        if self.strategy is not before:
            check_listed(self.strategy, self.simulator.regimes)
        return True

    def regime(self, batch: int, drafter_ready: bool) -> Regime:
        """What the strategy in force costs and yields at this batch."""
        regimes = self.simulator.regimes
        return regimes.at(self.strategy, batch, loaded=drafter_ready or not regimes.loads_late)

    def tell(self, macro: MacroStep, prefill_s: float, had_prefill: bool) -> float | None:
        """Give the policy the mean of a macro-step's iterations; its reward where rewards are recorded."""
        if self.memoryless:
            return None
        speculates = self.strategy.speculates
        outcome = StepOutcome(
            elapsed_s=(prefill_s + macro.seconds) / macro.num_iterations,
            batch=macro.batch,
            drafted=(macro.regime.num_drafted,) * macro.batch if speculates else (),
            accepted=macro.accepted if speculates else (),
            had_prefill=had_prefill,
        )
        reward = self.selector.reward(self.strategy, outcome) if self.simulator.record_rewards else None
        self.selector.observe(self.strategy, outcome)
        return reward

    def _state(self, batch: int, waiting: int) -> StepState:
        room_tokens = self.scheduler.room_tokens
        return StepState(
            rl_step=self.requests.rl_step,
            worker=self.worker,
            batch=batch,
            waiting=waiting,
            context_tokens=self.scheduler.batch.context_tokens,
            free_kv_tokens=None if room_tokens == math.inf else max(0.0, room_tokens + batch),
            strategy=self.strategy,
            drafters=self.simulator.drafters,
            requests=RequestsView(self.scheduler.batch),
        )


class Worker:
    """One engine in virtual time: its scheduler and its policy, stepped from macro-step to macro-step."""

    def __init__(
        self,
        simulator: RolloutSimulator,
        index: int,
        queue: list[int],
        batch: Batch,
        rollout: SimulatedRollout,
        stop: simpy.Event,
        feed: RequestFeed | None,
        tools: Tools | None,
        closed: bool,
    ) -> None:
        self.stop = stop
        self.feed = feed
        self.tools = tools
        self.away: list[tuple[float, int]] = []  # when each request comes back, a heap
        self.simulator = simulator
        self.index = index
        self.rollout = rollout
        self.requests = rollout.requests
        self.batch = batch
        self.scheduler = Scheduler(self.requests.prompt_tokens, self.batch, simulator.costs)
        self.policy = PolicySeat(simulator, index, self.requests, self.scheduler)
        # A response without tokens (an abort before its first) takes no time.
        self.queue = np.array(queue, np.int64)
        self.queue = self.queue[self.requests.lengths[self.queue] > 0]
        self.iteration = 0
        self.drafter_ready = False
        noise = simulator.noise
        self.noise = None if noise is None else NoiseDraws(noise, simulator.seed, self.requests.rl_step, index)
        self.closed = closed and (batch.is_steady or batch.passes_plainly)

    def run(self, env: simpy.Environment) -> Generator[simpy.Event, Any, None]:
        """The SimPy process: everything until nothing runs or waits."""
        if len(self.queue) and self.simulator.costs.outside_s:
            yield env.timeout(self.simulator.costs.outside_s)
        self.scheduler.waiting.extend((request, 0.0) for request in self.queue.tolist())
        yield from self._decode(env)
        self.rollout.worker_end_s[self.index] = env.now
        idle_use = self.simulator.idle_use
        idle_use.responses_finished(self._response_tokens(), env.now)
        idle_use.worker_idle(self.index, env.now)

    def _decode(self, env: simpy.Environment) -> Generator[simpy.Event, Any, None]:
        """Schedule, ask the policy, advance the batch, tell the policy: one timeout per macro-step."""
        costs, scheduler, policy = self.simulator.costs, self.scheduler, self.policy
        while (self.away or not scheduler.is_done) and not (self.feed is not None and self.feed.stopped):
            if self.away and scheduler.is_done:
                # Its time is not compared: a timeout may end an ulp before it.
                back = env.timeout(max(0.0, self.away[0][0] - env.now))
                yield back if self.feed is None else back | self.stop
                if self.stop.triggered:
                    break
                scheduler.waiting.append((heapq.heappop(self.away)[1], 0.0))
            while self.away and self.away[0][0] <= env.now + _ROUNDING:
                scheduler.waiting.append((heapq.heappop(self.away)[1], 0.0))
            start_s = env.now
            up_front = scheduler.schedule()
            waiting = scheduler.num_waiting
            batch = len(self.batch)
            if self.closed and not waiting and (down_to := self._drains_to()) < batch:
                yield env.timeout(self._drain(down_to, up_front, env.now) - env.now)
                if not down_to:
                    return
                continue
            is_decision, switch_s = policy.ask(batch, waiting), self._switch_s()
            prefill_s = costs.prefill_s(up_front) if up_front else 0.0
            regime = policy.regime(batch, self.drafter_ready)
            most = policy.max_iterations if self.feed is None else min(policy.max_iterations, self.feed.max_iterations)
            if self.away:
                most = min(most, self._until(regime, self.away[0][0] - start_s - switch_s - prefill_s))
            limit, chunk = scheduler.chunk(regime.cost.tokens_to_verify, most)
            macro = self.batch.advance(regime, limit, scheduler.room_tokens)
            noise = self._add_noise(macro)
            beside = min(chunk * macro.num_iterations, scheduler.prefill_left_tokens) if chunk else 0.0
            beside_s = self._beside_s(macro, beside) if beside else 0.0
            yield env.timeout(switch_s + prefill_s + beside_s + macro.seconds)
            self.batch.settle()
            # The first iteration also prefills its chunk.
            first_s = start_s + switch_s + prefill_s + (macro.first_s + beside_s / macro.num_iterations)
            if scheduler.joined:
                self.rollout.note_first_tokens(scheduler.take_joined(), first_s)
            for request in macro.finished:
                self.rollout.finish_s[request] = env.now
            if self.tools is not None:
                scheduler.evict(macro.context_tokens + macro.tokens)
                self._call_tools(self.tools, macro.finished, env.now)
            if self.feed is not None:
                room_tokens = 0.0 if scheduler.num_waiting else scheduler.room_tokens
                for request in self.feed.finished(macro.finished, self.index, room_tokens):
                    self.rollout.worker_of[request] = self.index
                    scheduler.waiting.append((request, 0.0))
                if self.feed.stopped and not self.stop.triggered:
                    self.stop.succeed()
            if scheduler.prefilling:
                scheduler.prefill(beside)
            prefill_s, tokens = prefill_s + beside_s, up_front + beside
            reward = policy.tell(macro, prefill_s, tokens > 0) if is_decision else None
            entry = Entry(
                start_s=start_s, switch_s=switch_s, prefill_s=prefill_s, prefill_tokens=tokens, chunk_tokens=beside,
                waiting=waiting, is_decision=is_decision, bucket=policy.bucket, propensity=policy.propensity,
                reward=reward, noise=noise, macro=macro,
            )  # fmt: skip
            self.rollout.logs[self.index].append(entry)
            self.iteration += macro.num_iterations
        if self.feed is not None:
            for request, generated in scheduler.unfinished():
                self.feed.leave(request, generated)

    def _call_tools(self, tools: Tools, finished: Sequence[int], now: float) -> None:
        """Turns that have ended leave the engine for a tool, and what they left behind stays in the cache."""
        assert self.rollout.submit_s is not None
        for request in finished:
            if (following := tools.turns.after[request]) >= 0:
                back_s = self.rollout.submit_s[following] = tools.call(following, now)
                self.rollout.worker_of[following] = self.index
                if cached := tools.turns.cached_tokens[following]:
                    self.scheduler.cached_tokens[following] = cached
                heapq.heappush(self.away, (back_s, following))

    def _beside_s(self, macro: MacroStep, tokens: float) -> float:
        """What prompts of so many tokens add to a macro-step's iterations, which share them evenly."""
        each = tokens / macro.num_iterations
        apart_s = self.simulator.costs.prefill_s(each)
        return macro.num_iterations * macro.regime.cost.beside_s(macro.batch, each, apart_s)

    def _until(self, regime: Regime, seconds: float) -> float:
        """Iterations until this much time has passed: n f + g n (n - 1) / 2 >= seconds, with the expected growth."""
        batch = len(self.batch)
        first_s = regime.fixed_s(batch) + regime.slope_s(batch) * self.batch.context_tokens
        half = regime.slope_s(batch) * batch * (1.0 if math.isnan(regime.tokens) else regime.tokens) / 2
        if half <= 0.0:
            return max(1.0, math.ceil(seconds / first_s - _ROUNDING)) if first_s > 0.0 else math.inf
        b = first_s - half
        n = (math.sqrt(b * b + 4 * half * max(0.0, seconds)) - b) / (2 * half)
        return max(1.0, math.ceil(n - _ROUNDING))

    def _response_tokens(self) -> list[int]:
        """Of the responses that this worker began, all turns together."""
        if self.tools is None:
            return list(self.requests.lengths[self.queue].tolist())
        lengths = self.requests.response_tokens
        return [sum(lengths[turn] for turn in self.tools.turns.chain(request)) for request in self.queue.tolist()]

    def _drains_to(self) -> int:
        """How many residents the closed form leaves: none where gains stay the same, else those drafted for."""
        batch, choices = len(self.batch), self.simulator.choices
        down_to = 0 if self.batch.is_steady else choices.up_to(batch, self.requests.rl_step).plain_down_to(batch)
        return down_to if down_to < batch and self.batch.grows_to <= self.scheduler.kv_capacity_tokens else batch

    def _drain(self, down_to: int, to_prefill: float, now: float) -> float:
        """Decode residents until so few are left, after a prefill; returns when the last of the others ends."""
        running, generated = self.batch.generated_so_far()
        remaining, context = self.requests.lengths.astype(np.float64), self.requests.prompts.astype(np.float64)
        remaining[running] -= generated
        context[running] += generated
        residents = Residents.of([running], remaining, context, [to_prefill])
        drained = self.simulator.drain(
            self.rollout,
            [self.index],
            residents.but_last(down_to),
            self.batch,
            now,
            from_the_start=not self.iteration,
            drafter_ready=self.drafter_ready,
            down_to=down_to,
        )
        end_s = float(drained.finish_s[0, -1])
        if self.batch.passes_plainly:
            num_iterations = int(drained.counts.sum())
            self.iteration += num_iterations
            self.batch.pass_plainly(num_iterations)
            self.rollout.note_first_tokens(self.scheduler.take_joined(), float(drained.first_s[0]))
            # Of those left over some may end with the last; the end of the others is still to come.
            self.rollout.finish_s[residents.requests[0, residents.remaining.shape[1] - down_to :]] = end_s
        return end_s

    def _switch_s(self) -> float:
        """Bringing speculation in costs once in a rollout, and nothing where a rollout begins with it."""
        if self.drafter_ready or not self.policy.strategy.speculates:
            return 0.0
        self.drafter_ready = True
        return self.simulator.costs.switch_s if self.iteration else 0.0

    def _add_noise(self, macro: MacroStep) -> Floats | None:
        """Multiply a macro-step's time by the mean of its iterations' noise; they hardly differ in length."""
        if self.noise is None:
            return None
        drawn = self.noise.between(self.iteration, macro.num_iterations)
        macro.first_s *= float(drawn[0])
        macro.seconds *= self.noise.mean(self.iteration, macro.num_iterations)
        return drawn
