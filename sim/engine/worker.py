"""One RL step's rollout as a discrete-event simulation: one SimPy process per worker, one timeout per macro-step.

Workers that nothing connects before their ends run one after another, each on its own clock (`OwnTime`).

A macro-step is a number of iterations that are alike: until something happens where the choice stays, as that of a
memoryless policy does, else one (`decision_block`). In each, in order:

    schedule   preempt or admit requests                                    `Scheduler`
    ask        choose what the next iteration verifies                      `PolicyDriver`
    advance    verify what the choice before drafted: tokens and seconds    `Batch`
    (timeout)  virtual time passes
    settle     requests that have ended leave, their groups and budgets learn
    tell       the outcome of the choice that was verified                  `PolicyDriver`

So a policy that learns is one choice ahead of its outcomes, as in an engine. A memoryless policy does not depend on
the delay, so its choice holds at once; so does one for a block of iterations (`decision_block`), whose outcome then
comes after the next block's choice. Whatever the policy, the first iteration of an engine that had nothing to do
verifies no draft: nobody was there to draft for (`NO_CHOICE`).

Once nothing waits, a memoryless policy over requests whose gains stay the same has a closed form: one timeout to the
end. Where gains are drawn or replayed, one timeout passes all iterations before it first drafts. A choice that stays as
the batch falls (`least_batch`) has the same form for as long.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import simpy

from tltlab.arrays import Floats
from tltlab.costs.base import CostModel
from tltlab.costs.noise import IterationNoise
from tltlab.policies.driver import PolicyDriver
from tltlab.policies.selector import Selector
from tltlab.sim.idle_training import IdleUse
from tltlab.state import NO_CHOICE, Choice, DrafterState, StepOutcome, StepState

from .admission import MOST_ITERATIONS, RequestFeed
from .batch import Batch, MacroStep, RequestsView
from .log import LogEntry
from .memoryless import MemorylessChoices
from .random_numbers import NoiseDraws
from .record import SimulatedRollout
from .regime import Regime, Regimes
from .requests import Requests, Residents, Tools, check_fits
from .scheduler import Scheduler

_ROUNDING = 1e-9
"""Tolerance for iteration counts derived from times, and for seconds at which requests come back together."""


@dataclass(slots=True)
class OwnTime:
    """Virtual time of a worker that meets no other: what a SimPy environment is to the others."""

    now: float = 0.0

    def timeout(self, delay_s: float) -> float:
        return delay_s


@dataclass(slots=True)
class RolloutSimulator:
    """State shared by all rollouts of a simulation. Selectors persist across RL steps, one per worker.

    `noise` multiplies the time of each iteration, drawn from `seed`; prefill and switches have none. A choice is made
    one iteration `ahead` of the one that verifies it, and its outcome arrives `delay` choices after that iteration
    ends. Where both are None, learning policies are ahead, and outcomes of blocks arrive one block late.
    """

    costs: CostModel
    selectors: list[Selector]
    decision_block: int = 1
    record_rewards: bool = False
    ahead: bool | None = None
    delay: int | None = None
    idle_use: IdleUse = field(default_factory=IdleUse)
    regimes: Regimes = field(init=False)
    new_batch: Callable[[Requests], Batch] = field(init=False)
    drafters: Mapping[str, DrafterState] = field(default_factory=dict)
    noise: IterationNoise | None = None
    seed: int = 0
    max_tools: int | None = None
    drivers: list[PolicyDriver] = field(init=False)
    choices: MemorylessChoices = field(init=False)
    kept: dict[Choice, MemorylessChoices] = field(init=False)

    def __post_init__(self) -> None:
        delay = int(self.decision_block > 1) if self.delay is None else self.delay
        # A memoryless policy has one driver for all workers.
        own = self.selectors[:1] if self.memoryless else self.selectors
        drivers = [PolicyDriver(selector, worker=w, delay=delay) for w, selector in enumerate(own)]
        self.drivers = drivers * len(self.selectors) if self.memoryless else drivers

    @property
    def memoryless(self) -> bool:
        """True if every choice depends on batch and queue alone, and holds at once."""
        return not self.ahead and all(selector.memoryless for selector in self.selectors)

    def prepare(self, regimes: Regimes, new_batch: Callable[[Requests], Batch]) -> RolloutSimulator:
        """Set what strategies yield, which may change from one RL step to the next; the selectors stay."""
        self.regimes, self.new_batch = regimes, new_batch
        self.choices, self.kept = MemorylessChoices(self.drivers[0].ask, regimes), {}
        return self

    def keeping(self, choice: Choice) -> MemorylessChoices:
        """Choices that are all this one."""
        if choice not in self.kept:
            self.kept[choice] = MemorylessChoices(lambda state: choice, self.regimes)
        return self.kept[choice]

    def rollout(self, requests: Requests, queues: list[list[int]], feed: RequestFeed | None = None) -> SimulatedRollout:
        """Simulate one RL step; `queues` are the requests of each worker in order of admission.

        With a `feed` they are those that it begins with.
        """
        check_fits(requests, self.costs.kv_capacity_tokens)
        _, residents = requests.placed(queues)
        result = SimulatedRollout.begun(requests, queues)
        self.idle_use.rollout_started(len(queues), 0.0)
        batches = [self.new_batch(requests) for _ in queues]
        # The rest of a rollout has a closed form where gains stay the same, nothing is learned and costs are exact.
        exact = self.noise is None and feed is None and requests.turns is None
        steady = all(batch.is_steady for batch in batches)
        if exact and self.memoryless and steady and self._fits_at_once(residents):
            self._drain_all(result, residents)
        else:
            env, tools = simpy.Environment(), None
            if requests.turns is not None:
                result.submit_s, tools = np.zeros(len(requests)), Tools(requests.turns, self.max_tools)
            stop = env.event()
            workers = [
                Worker(self, w, queue, batches[w], result, stop, feed, tools, exact) for w, queue in enumerate(queues)
            ]
            if feed is None and tools is None and all(batch.source.is_apart for batch in batches):
                for worker in workers:
                    time = OwnTime()
                    for delay_s in worker.run(time):
                        time.now += delay_s
            else:
                env.run(until=env.all_of([env.process(worker.run(env)) for worker in workers]))
            result.tool_wait_s = 0.0 if tools is None else tools.waited_s
            self._notify_idle_use(result)
        result.makespan_s = max(result.worker_end_s)
        self.idle_use.rollout_ended(result.makespan_s)
        return result

    def _fits_at_once(self, residents: Residents) -> bool:
        """True if every worker can admit all its requests without ever running out of memory."""
        costs, most = self.costs, residents.remaining.shape[1]
        peak_kv_tokens = (
            residents.context_sums[:, :1].sum(axis=1) + residents.remaining.sum(axis=1) + residents.present.sum(axis=1)
        )
        return (
            most > 0
            and costs.max_num_batched_tokens is None
            and most <= (costs.max_num_seqs or math.inf)
            and float(peak_kv_tokens.max()) <= (costs.kv_capacity_tokens or math.inf)
        )

    def _drain_all(self, result: SimulatedRollout, residents: Residents) -> None:
        start_s, rl_step = self.costs.outside_s, result.requests.rl_step
        drained = self.choices.drain(residents, start_s=start_s, rl_step=rl_step, from_the_start=True)
        result.note_drained(drained, range(len(result.logs)))
        result.drained = drained
        result.worker_end_s = np.where(residents.present[:, -1], drained.finish_s[:, -1], 0.0).tolist()
        self._notify_idle_use(result)

    def _notify_idle_use(self, result: SimulatedRollout) -> None:
        """Workers are idle from their ends."""
        for w, end_s in sorted(enumerate(result.worker_end_s), key=lambda pair: pair[1]):
            self.idle_use.worker_idle(w, end_s)


class Asked(NamedTuple):
    """The choice that is verified now, whether the policy made it anew, and seconds to bring speculation in."""

    choice: Choice
    is_decision: bool
    switch_s: float


class Worker:
    """One engine in virtual time, stepped from macro-step to macro-step in the order that the module draws."""

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
        exact: bool,
    ):
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
        self.driver = simulator.drivers[index]
        self.log = rollout.logs[index]
        # A response without tokens (an abort before its first) takes no time.
        self.queue = np.array(queue, np.int64)
        self.queue = self.queue[self.requests.lengths[self.queue] > 0]
        self.iteration = 0
        self.drafter_ready = False
        noise = simulator.noise
        self.noise = None if noise is None else NoiseDraws(noise, simulator.seed, self.requests.rl_step, index)
        self.shares_out = batch.source.shares_out
        self.closed = exact and batch.advances_plain
        self.memoryless = simulator.memoryless
        self.ahead = not self.memoryless and simulator.decision_block == 1 and simulator.ahead is not False
        # The active choice, whether the policy made it, at which batch and queue, and whether that is verified until
        # one of them changes.
        self.in_force, self.decided = NO_CHOICE, False
        self.asked_at, self.keeps = (0, 0), self.memoryless

    def run(self, env: simpy.Environment | OwnTime) -> Generator[Any, Any, None]:
        """The SimPy process, or its delays: everything until nothing runs or waits."""
        self.driver.begin(self.requests.rl_step)
        if len(self.queue) and self.simulator.costs.outside_s:
            yield env.timeout(self.simulator.costs.outside_s)
        self.scheduler.waiting.extend(zip(self.queue.tolist(), repeat(0.0)))
        yield from self._decode(env)
        self.driver.idle()
        self.rollout.worker_end_s[self.index] = env.now

    def _decode(self, env: simpy.Environment | OwnTime) -> Generator[Any, Any, None]:
        scheduler = self.scheduler
        while (self.away or not scheduler.is_done) and not (self.feed is not None and self.feed.stopped):
            if scheduler.is_done:
                # All requests are away: what was chosen for the next iteration has no meaning.
                self._idle()
                # Its time is not compared: a timeout may end an ulp before it.
                back: Any = env.timeout(max(0.0, self.away[0][0] - env.now))
                yield back if self.feed is None else back | self.stop
                if self.stop.triggered:
                    break
                scheduler.waiting.append((heapq.heappop(self.away)[1], 0.0))
            while self.away and self.away[0][0] <= env.now + _ROUNDING:
                scheduler.waiting.append((heapq.heappop(self.away)[1], 0.0))
            up_front = scheduler.schedule()
            batch = len(self.batch)
            if not batch and self.batch.lags:
                self.batch.land()
                self.driver.deliver()
                continue
            if self.closed and (self.memoryless or self.in_force.stays) and not scheduler.num_waiting:
                choices, down_to = self._drain_target()
                if down_to < batch:
                    yield env.timeout(self._drain(choices, down_to, up_front, env.now) - env.now)
                    if not down_to:
                        return
                    continue
            asked = self._ask(batch, scheduler.num_waiting)
            entry, first_s = self._advance(asked, up_front, env.now)
            yield env.timeout(entry.switch_s + entry.prefill_s + entry.macro.seconds)
            self._settle(asked.choice, entry, first_s, env.now)
        if self.feed is not None:
            for request, generated in scheduler.unfinished():
                self.feed.leave(request, generated)

    def _advance(self, asked: Asked, up_front: float, start_s: float, most: float = math.inf) -> tuple[LogEntry, float]:
        """Run the batch until something happens, at most so many iterations.

        Returns the macro-step, and the time at which its first iteration ends.
        """
        scheduler, waiting, batch = self.scheduler, self.scheduler.num_waiting, len(self.batch)
        choice, is_decision, switch_s = asked
        prefill_s = self.simulator.costs.prefill_s(up_front) if up_front else 0.0
        regimes = self.simulator.regimes
        loaded = self.drafter_ready or not regimes.loads_late
        if choice is NO_CHOICE:
            regime, most = regimes.undrafted(batch, loaded=loaded), 1.0
        else:
            regime = regimes.at(choice.strategy, batch, loaded=loaded)
        if not self.keeps:
            most = min(most, self.simulator.decision_block)
        if self.feed is not None:
            most = min(most, MOST_ITERATIONS)
        if self.away:
            most = min(most, self._until(regime, self.away[0][0] - start_s - switch_s - prefill_s))
        limit, chunk = scheduler.chunk(regime.cost.tokens_to_verify, most) if scheduler.prefilling else (most, 0.0)
        if self.shares_out:
            self.batch.state = replace(self._state(batch, waiting), requests=())
        room_tokens = scheduler.room_tokens
        macro = self.batch.advance(regime, limit, room_tokens)
        if scheduler.cached_tokens:
            scheduler.evict(room_tokens - macro.tokens)
        noise = None if self.noise is None else self._add_noise(self.noise, macro)
        beside = min(chunk * macro.num_iterations, scheduler.prefill_left_tokens) if chunk else 0.0
        added_s = self._added_s(macro, beside) if beside else 0.0
        # The first iteration also prefills its chunk.
        first_s = start_s + switch_s + prefill_s + (macro.first_s + added_s / macro.num_iterations)
        prefill_s, prefill_tokens = prefill_s + added_s, up_front + beside
        # Keywords would double the time that an entry takes.
        entry = LogEntry(
            start_s, switch_s, prefill_s, prefill_tokens, beside,
            waiting, is_decision, choice.bucket, choice.propensity, None, noise, macro,
        )  # fmt: skip
        return entry, first_s

    def _ask(self, batch: int, waiting: int) -> Asked:
        """Ask the policy where it is to choose anew."""
        anew, self.asked_at = (batch, waiting) != self.asked_at, (batch, waiting)
        verified, decided = self.in_force, self.decided
        ahead = self.ahead or verified is NO_CHOICE
        if self.memoryless:
            if anew:
                self.in_force = self.simulator.choices.choose(batch, waiting, self.requests.rl_step)
            switch_s = self._switch_s(self.in_force)
            if ahead and self.in_force.strategy.speculates:
                self.asked_at = (0, 0)
                return Asked(verified, False, switch_s)
            return Asked(self.in_force, anew, switch_s)
        chosen = self.driver.again(batch, waiting, self.requests.rl_step)
        if chosen is None:
            chosen = self.driver.ask(self._state(batch, waiting))
        self.in_force, self.decided = chosen, True
        self.keeps = chosen.stays and (verified == chosen or not self.ahead) and self._needs_no_outcome
        switch_s = 0.0 if self.drafter_ready else self._switch_s(chosen)
        return Asked(verified, decided, switch_s) if ahead else Asked(chosen, True, switch_s)

    def _idle(self) -> None:
        """Nothing runs: no draft will be there for the next iteration."""
        self.driver.idle()
        self.in_force, self.decided, self.asked_at = NO_CHOICE, False, (0, 0)

    def _state(self, batch: int, waiting: int) -> StepState:
        return StepState(
            rl_step=self.requests.rl_step,
            worker=self.index,
            batch=batch,
            waiting=waiting,
            context_tokens=self.batch.context_tokens,
            strategy=self.in_force.strategy,
            drafters=self.simulator.drafters,
            requests=RequestsView(self.batch),
        )

    def _settle(self, choice: Choice, entry: LogEntry, first_s: float, now: float) -> None:
        """A macro-step's time has passed: finished requests leave, the policy receives the outcome."""
        scheduler, macro = self.scheduler, entry.macro
        if macro.finished:
            self.batch.settle()
        if scheduler.joined:
            self.rollout.note_first_tokens(scheduler.take_joined(), first_s)
        for request in macro.finished:
            self.rollout.finish_s[request] = now
        if self.tools is not None:
            self._call_tools(self.tools, macro.finished, now)
        if self.feed is not None:
            room_tokens = 0.0 if scheduler.num_waiting else scheduler.room_tokens
            for request in self.feed.finished(macro.finished, self.index, room_tokens):
                self.rollout.worker_of[request] = self.index
                scheduler.waiting.append((request, 0.0))
            if self.feed.stopped and not self.stop.triggered:
                self.stop.succeed()
        if scheduler.prefilling:
            scheduler.prefill(entry.chunk_tokens)
        self.log.append(entry)
        # Asynchronously the end of the last request is known, and all choices forgotten, before this outcome.
        if choice.learns and not (self.batch.lags and scheduler.is_done):
            rewarded = self.log.reward_of_last() if self.simulator.record_rewards else None
            self.driver.tell(choice, self._outcome(choice, entry), rewarded)
        self.iteration += macro.num_iterations

    def _outcome(self, choice: Choice, entry: LogEntry) -> StepOutcome:
        macro, speculates = entry.macro, choice.strategy.speculates
        return StepOutcome(
            elapsed_s=(entry.prefill_s + macro.seconds) / macro.num_iterations,
            batch=macro.batch,
            drafted=macro.drafted if speculates else (),
            accepted=macro.accepted if speculates else (),
            had_prefill=entry.prefill_tokens > 0,
        )

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

    def _added_s(self, macro: MacroStep, tokens: float) -> float:
        """Seconds that prompts of so many tokens add to a macro-step, whose iterations share them evenly."""
        each = tokens / macro.num_iterations
        apart_s = self.simulator.costs.prefill_s(each)
        return macro.num_iterations * macro.regime.cost.added_s(macro.batch, each, apart_s)

    def _until(self, regime: Regime, seconds: float) -> float:
        """Iterations until this much time has passed: n f + g n (n - 1) / 2 >= seconds, with the expected growth."""
        batch = len(self.batch)
        fixed_s, slope_s = regime.terms(batch)
        first_s = fixed_s + slope_s * self.batch.context_tokens
        half = slope_s * batch * (1.0 if math.isnan(regime.tokens) else regime.tokens) / 2
        if half <= 0.0:
            return max(1.0, math.ceil(seconds / first_s - _ROUNDING)) if first_s > 0.0 else math.inf
        b = first_s - half
        n = (math.sqrt(b * b + 4 * half * max(0.0, seconds)) - b) / (2 * half)
        return max(1.0, math.ceil(n - _ROUNDING))

    @property
    def _needs_no_outcome(self) -> bool:
        """True if the active choice has no use for outcomes, and none of earlier choices waits for the next ones."""
        return not self.in_force.learns and not self.driver.holds_back

    def _drain_target(self) -> tuple[MemorylessChoices, int]:
        """Choices that are known, and how many residents the closed form leaves with them.

        None are left where gains stay the same, else those drafted for; a choice that stays leaves those for whom it
        promises nothing.
        """
        batch, choices, least = len(self.batch), self.simulator.choices, 0
        if not self.memoryless:
            # Where nothing waits, the batch only falls.
            kept, (_, waiting) = self.in_force, self.asked_at
            if kept.least_batch is None or batch < kept.least_batch or waiting or not self._needs_no_outcome:
                return choices, batch
            choices, least = self.simulator.keeping(kept), max(0, kept.least_batch - 1)
        if self.batch.peak_kv_tokens > self.scheduler.kv_capacity_tokens:
            return choices, batch
        drafted = choices.up_to(batch, self.requests.rl_step).largest_drafting_batch(batch)
        if self.batch.is_steady and not least and (self.in_force is not NO_CHOICE or drafted < batch):
            return choices, 0
        return choices, max(least, drafted)

    def _drain(self, choices: MemorylessChoices, down_to: int, to_prefill: float, now: float) -> float:
        """Decode residents until so few are left, after a prefill; returns when the last of the others ends."""
        running, generated = self.batch.generated_so_far()
        remaining, context = self.requests.lengths[running] - generated, self.requests.prompts[running] + generated
        residents = Residents.of([np.arange(len(running))], remaining, context, [to_prefill])
        residents = replace(residents, requests=running[residents.requests])
        drained = choices.drain(
            residents.but_last(down_to),
            start_s=now,
            rl_step=self.requests.rl_step,
            drafter_ready=self.drafter_ready,
            down_to=down_to,
        )
        self.in_force = choices.choose(len(running), 0, self.requests.rl_step)
        self.rollout.note_drained(drained, [self.index])
        end_s = float(drained.finish_s[0, -1])
        if down_to:
            num_iterations = int(drained.counts.sum())
            self.iteration += num_iterations
            self.batch.advance_plain(num_iterations)
            self.rollout.note_first_tokens(self.scheduler.take_joined(), float(drained.first_s[0]))
            # Some of the remaining responses may end here; the end of the others is still to come.
            self.rollout.finish_s[residents.requests[0, residents.remaining.shape[1] - down_to :]] = end_s
        return end_s

    def _switch_s(self, choice: Choice) -> float:
        """Bringing speculation in costs once in a rollout, and nothing where a rollout begins with it."""
        if self.drafter_ready or not choice.strategy.speculates:
            return 0.0
        self.drafter_ready = True
        return self.simulator.costs.switch_s if self.iteration else 0.0

    def _add_noise(self, noise: NoiseDraws, macro: MacroStep) -> Floats:
        """Multiply a macro-step's time by the mean of its iterations' noise; they hardly differ in length."""
        drawn = noise.between(self.iteration, macro.num_iterations)
        macro.first_s *= float(drawn[0])
        macro.seconds *= noise.mean(self.iteration, macro.num_iterations)
        return drawn
