"""One RL step's rollout as a discrete-event simulation: one SimPy process per worker, one timeout per macro-step.

A worker's scheduling round, as vLLM's: preempt the newest while the next iteration does not fit, otherwise admit
waiting requests in order while they fit; prefill what was admitted; ask the policy; run. An iteration fits while the
contexts plus one token per resident fit into the KV cache (drafted tokens are not counted). A preempted request goes to
the head of the queue and has its prompt and generated tokens prefilled again.

Where the cost model limits the tokens of an iteration (`max_num_batched_tokens`), prompts are prefilled in chunks: the
running requests come first, what they leave goes to the admitted prompts in order, and a request decodes from the
iteration after its prompt is done. Its KV space is taken at admission.

Once nothing waits, a memoryless policy over requests that all gain alike has a closed form: one timeout.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

import numpy as np
import simpy

from tltlab.costs.base import CostModel
from tltlab.costs.noise import IterationNoise
from tltlab.errors import ConfigError
from tltlab.policies.selector import Selector
from tltlab.sim.idle_training import SpotResult
from tltlab.state import DrafterState, StepOutcome, StepState
from tltlab.strategy import NO_SPECULATION, Strategy

from .batch import TOLERANCE_TOKENS, Batch, Floats, FluidBatch, Ints, MacroStep, RequestsView
from .log import Entry, WorkerLog
from .memoryless import Drained, Plan, check_known, drain
from .random_numbers import NoiseDraws
from .regime import Regime, Regimes
from .requests import Requests


class IdleUse(Protocol):
    """What idle workers do while others still run; called at the virtual time at which it happens."""

    def attach(self, env: simpy.Environment, num_workers: int) -> None:
        """A rollout begins."""

    def responses_finished(self, response_tokens: Sequence[float], now: float) -> None:
        """A worker that is about to be idle has finished responses of these lengths."""

    def worker_idle(self, worker: int, now: float) -> None:
        """A worker has nothing left to do in this rollout."""

    def rollout_ended(self, now: float) -> None:
        """All workers are done."""


class LeaveIdle:
    """Idle workers stay idle."""

    def attach(self, env: simpy.Environment, num_workers: int) -> None: ...
    def responses_finished(self, response_tokens: Sequence[float], now: float) -> None: ...
    def worker_idle(self, worker: int, now: float) -> None: ...
    def rollout_ended(self, now: float) -> None: ...


@dataclass(slots=True)
class Rollout:
    """What one RL step's simulation leaves: times per request (nan: never ran), the workers' logs and the end."""

    requests: Requests
    worker_of: Ints
    first_token_s: Floats
    finish_s: Floats
    logs: list[WorkerLog]
    worker_end_s: list[float]
    makespan_s: float = 0.0
    spot: SpotResult | None = None


@dataclass(slots=True)
class Engine:
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
    plan: Plan = field(init=False)

    def prepare(self, regimes: Regimes, new_batch: Callable[[Requests], Batch]) -> Engine:
        """Set what strategies yield, which may change from one RL step to the next; the selectors stay."""
        self.regimes, self.new_batch = regimes, new_batch
        self.plan = Plan(self.selectors[0], regimes)
        return self

    def rollout(self, requests: Requests, queues: list[list[int]]) -> Rollout:
        """Simulate one RL step; `queues` are the requests of each worker in order of admission."""
        check_fits(requests, self.costs.kv_capacity_tokens)
        n = len(requests)
        result = Rollout(
            requests=requests,
            worker_of=np.zeros(n, np.int64),
            first_token_s=np.full(n, np.nan),
            finish_s=np.zeros(n),
            logs=[WorkerLog() for _ in queues],
            worker_end_s=[0.0] * len(queues),
        )
        env = simpy.Environment()
        self.idle_use.attach(env, len(queues))
        workers = []
        for w, queue in enumerate(queues):
            result.worker_of[queue] = w
            workers.append(env.process(Worker(self, w, queue, result).run(env)))
        env.run(until=env.all_of(workers))
        result.makespan_s = max(result.worker_end_s)
        self.idle_use.rollout_ended(result.makespan_s)
        return result


def check_fits(requests: Requests, capacity: int | None) -> None:
    """ConfigError when a single response is larger than the KV cache: it could never finish."""
    if capacity is None:
        return
    needed = requests.prompts + requests.lengths
    if len(over := np.flatnonzero(needed > capacity)):
        i = int(over[0])
        raise ConfigError(
            f"kv_capacity_tokens = {capacity} is too small: response {requests.keys[i]} alone needs {int(needed[i])}, "
            f"{requests.prompt_tokens[i]} of them for its prompt"
        )


class Worker:
    """One engine: its queue, its batch and its selector."""

    def __init__(self, engine: Engine, index: int, queue: list[int], result: Rollout) -> None:
        costs = engine.costs
        self.engine = engine
        self.index = index
        self.result = result
        self.log = result.logs[index]
        self.requests = result.requests
        self.selector = engine.selectors[index]
        self.batch = engine.new_batch(result.requests)
        # A response without tokens (an abort before its first) takes no time.
        self.queue = np.array(queue, np.int64)
        self.queue = self.queue[self.requests.lengths[self.queue] > 0]
        self.waiting: deque[tuple[int, float]] = deque()
        self.prefilling: deque[list[float]] = deque()
        self.capacity: float = costs.kv_capacity_tokens or math.inf
        self.limited = costs.kv_capacity_tokens is not None
        self.max_num_seqs: float = costs.max_num_seqs or math.inf
        self.token_budget: float = costs.max_num_batched_tokens or math.inf
        self.forgetful = self.selector.memoryless
        self.limit = math.inf if self.forgetful else engine.decision_block
        self.iteration = 0
        self.strategy = NO_SPECULATION
        self.drafter_ready = False
        self.known: tuple[Strategy, int, Regime] | None = None
        self.asked_at: tuple[int, int] | None = None
        self.bucket: int | None = None
        self.propensity = 1.0
        noise = engine.noise
        self.noise = None if noise is None else NoiseDraws(noise, engine.seed, self.requests.rl_step, index)

    def run(self, env: simpy.Environment) -> Generator[simpy.Event, Any, None]:
        """The SimPy process: macro-step after macro-step until nothing runs or waits."""
        if len(self.queue):
            if self._all_at_once():
                yield from self._drain(env, self.queue, np.zeros(len(self.queue)), 0.0, 0.0)
            else:
                self.waiting.extend((request, 0.0) for request in self.queue.tolist())
                yield from self._rounds(env)
        self.result.worker_end_s[self.index] = env.now
        idle_use = self.engine.idle_use
        idle_use.responses_finished(self.requests.lengths[self.queue].tolist(), env.now)
        idle_use.worker_idle(self.index, env.now)

    def _rounds(self, env: simpy.Environment) -> Generator[simpy.Event, Any, None]:
        batch = self.batch
        admitted: list[int] = []
        while self.waiting or self.prefilling or len(batch):
            start_s = env.now
            tokens = 0.0
            if not (self.limited and self._preempt()):
                if self.waiting:
                    self._admit()
                if not len(batch):
                    tokens += self._prefill_until_one_is_done(admitted)
                elif self.prefilling and self.token_budget == math.inf:
                    tokens += self._prefill(math.inf, admitted)
            prefill_s = self.engine.costs.prefill_s(tokens)
            waiting = len(self.waiting) + len(self.prefilling)
            if waiting == 0 and self._drains(batch) and batch.grows_to <= self.capacity:
                yield from self._finish(env, batch, prefill_s, tokens, admitted)
                return
            asked, switch_s = self._ask(waiting)
            limit, chunk = self.limit, 0.0
            if self.prefilling:
                limit, chunk = self._chunk(limit)
            macro = batch.advance(self._regime(), limit, self._room() if self.limited else math.inf)
            drawn = self._make_noise(macro)
            in_chunks = min(chunk * macro.num_iterations, self._prefill_left()) if chunk else 0.0
            chunks_s = self.engine.costs.prefill_s(in_chunks)
            ready_s = start_s + switch_s + prefill_s
            yield env.timeout(switch_s + prefill_s + chunks_s + macro.seconds)
            batch.settle()
            # The first iteration also prefills its chunk.
            first_s = macro.first_s + chunks_s / macro.num_iterations
            self._note_times(admitted, ready_s + first_s, macro, env.now)
            admitted = []
            had_prefill = tokens + in_chunks > 0
            if self.prefilling:
                self._prefill(in_chunks, admitted)
            reward = None
            if asked and not self.forgetful:
                reward = self._tell(macro, prefill_s + chunks_s, had_prefill)
            self.log.append(
                Entry(
                    start_s=start_s,
                    switch_s=switch_s,
                    prefill_s=prefill_s + chunks_s,
                    prefill_tokens=tokens + in_chunks,
                    chunk_tokens=in_chunks,
                    waiting=waiting,
                    num_iterations=macro.num_iterations,
                    batch=macro.batch,
                    seconds=macro.seconds,
                    context_tokens=macro.context_tokens,
                    tokens=macro.tokens,
                    asked=asked,
                    bucket=self.bucket,
                    propensity=self.propensity,
                    reward=reward,
                    regime=macro.regime,
                    gains=macro.gains,
                    noise=drawn,
                )
            )
            self.iteration += macro.num_iterations

    def _all_at_once(self) -> bool:
        """Whether everything can be admitted at the start, and all that follows is a drain."""
        return (
            self._drains(self.batch)
            and self.token_budget == math.inf
            and len(self.queue) <= self.max_num_seqs
            and (self.requests.prompts[self.queue] + self.requests.lengths[self.queue] + 1).sum() <= self.capacity
        )

    def _drains(self, batch: Batch) -> TypeGuard[FluidBatch]:
        """Whether a drain has a closed form: all gain alike, nothing is learned, and iterations take what costs say."""
        return self.forgetful and self.noise is None and isinstance(batch, FluidBatch)

    def _make_noise(self, macro: MacroStep) -> Floats | None:
        """Multiply a macro-step's time by the mean of its iterations' noise; they hardly differ in length."""
        if self.noise is None:
            return None
        drawn = self.noise.between(self.iteration, macro.num_iterations)
        macro.first_s *= float(drawn[0])
        macro.seconds *= self.noise.mean(self.iteration, macro.num_iterations)
        return drawn

    def _finish(
        self, env: simpy.Environment, batch: FluidBatch, prefill_s: float, tokens: float, admitted: list[int]
    ) -> Generator[simpy.Event, Any, None]:
        residents, generated = batch.generated_so_far()
        first_s = yield from self._drain(env, residents, generated, prefill_s, tokens)
        self._note_first(admitted, first_s)

    def _drain(
        self, env: simpy.Environment, residents: Ints, generated: Floats, prefill_s: float, tokens: float
    ) -> Generator[simpy.Event, Any, float]:
        """Decode `residents` to their ends. At the start of a rollout they are prefilled first."""
        at_start = not self.iteration and not tokens
        prompts = self.requests.prompts[residents].astype(np.float64)
        if at_start:
            tokens = float(prompts.sum())
            prefill_s = self.engine.costs.prefill_s(tokens)
        done: Drained = drain(
            self.engine.plan.up_to(len(residents), self.requests.rl_step),
            residents,
            prompts,
            self.requests.lengths[residents] - generated,
            generated,
            start_s=env.now,
            prefill_s=prefill_s,
            prefill_tokens=tokens,
            switch_s=0.0 if self.drafter_ready else self.engine.costs.switch_s,
            from_the_start=not self.iteration,
        )
        yield env.timeout(done.end_s - env.now)
        self.result.finish_s[done.order] = done.finish_s
        if at_start:
            self.result.first_token_s[residents] = done.first_s
        self.log.extend(done.columns)
        return done.first_s

    def _room(self) -> float:
        """Tokens that the contexts may still grow by before the next iteration no longer fits."""
        if self.capacity == math.inf:
            return math.inf
        taken = sum(total + 1 for _, _, total in self.prefilling)
        return self.capacity - len(self.batch) - self.batch.context_tokens - taken

    def _preempt(self) -> bool:
        preempted = False
        while self._room() < -TOLERANCE_TOKENS:
            if self.prefilling and len(self.batch):
                request, _, total = self.prefilling.pop()
                self.waiting.appendleft((int(request), total - self.requests.prompt_tokens[int(request)]))
            elif len(self.batch) > 1:
                self.waiting.appendleft(self.batch.preempt())
            else:
                break
            preempted = True
        return preempted

    def _admit(self) -> None:
        """Take waiting requests into prefill, in order, while they fit."""
        room = self._room()
        while self.waiting and len(self.batch) + len(self.prefilling) < self.max_num_seqs:
            request, generated = self.waiting[0]
            tokens = self.requests.prompt_tokens[request] + generated
            room -= tokens + 1
            if room < -TOLERANCE_TOKENS and (len(self.batch) or self.prefilling):
                break
            self.waiting.popleft()
            self.prefilling.append([request, tokens, tokens])

    def _prefill_left(self) -> float:
        return sum(left for _, left, _ in self.prefilling)

    def _prefill(self, tokens: float, admitted: list[int]) -> float:
        """Spend up to `tokens` on the prompts in order; those that are done join the batch. Returns what was spent."""
        spent = 0.0
        while self.prefilling:
            request, left, total = self.prefilling[0]
            used = min(left, tokens - spent)
            spent += used
            if used < left - TOLERANCE_TOKENS:
                self.prefilling[0][1] = left - used
                break
            self.prefilling.popleft()
            self.batch.admit(int(request), total - self.requests.prompt_tokens[int(request)])
            admitted.append(int(request))
        return spent

    def _prefill_until_one_is_done(self, admitted: list[int]) -> float:
        """With nothing to decode, whole budgets go to the prompts until one of them is done."""
        if self.token_budget == math.inf:
            return self._prefill(math.inf, admitted)
        return self._prefill(max(1, math.ceil(self.prefilling[0][1] / self.token_budget)) * self.token_budget, admitted)

    def _chunk(self, limit: float) -> tuple[float, float]:
        """Iterations until a prompt may be done, and the prefill tokens in each."""
        chunk = max(0.0, self.token_budget - len(self.batch) * self._regime().cost.tokens_to_verify)
        if self.limited and len(self.batch) == 1:
            limit = 1  # A lone request always fits, but not beside prompts that hold room.
        left = self.prefilling[0][1]
        if chunk == 0.0 and left > 0:
            return limit, 0.0
        return min(limit, max(1.0, (left + TOLERANCE_TOKENS) // chunk if chunk else 1.0)), chunk

    def _regime(self) -> Regime:
        """What the strategy in force costs and yields at this batch."""
        batch = len(self.batch)
        if self.known is None or self.known[0] is not self.strategy or self.known[1] != batch:
            self.known = (self.strategy, batch, self.engine.regimes.at(self.strategy, batch))
        return self.known[2]

    def _ask(self, waiting: int) -> tuple[bool, float]:
        """Ask the policy; whether it was asked, and the seconds of a switch into speculation."""
        batch, selector, before = len(self.batch), self.selector, self.strategy
        if self.forgetful:
            if (batch, waiting) == self.asked_at:
                return False, 0.0
            self.asked_at = (batch, waiting)
            choice = self.engine.plan.choose(batch, waiting, self.requests.rl_step)
            self.strategy, self.bucket, self.propensity = choice.strategy, choice.bucket, choice.propensity
        else:
            self.strategy = selector.choose(self._state(batch, waiting))
            self.bucket, self.propensity = selector.bucket_, selector.propensity_
            if self.strategy is not before:
                check_known(self.strategy, self.engine.regimes)
        return True, self._switch_s()

    def _switch_s(self) -> float:
        """Bringing speculation in costs once in a rollout, and nothing where a rollout begins with it."""
        if self.drafter_ready or not self.strategy.speculates:
            return 0.0
        self.drafter_ready = True
        return self.engine.costs.switch_s if self.iteration else 0.0

    def _state(self, batch: int, waiting: int) -> StepState:
        room = self._room() if self.limited else math.inf
        return StepState(
            rl_step=self.requests.rl_step,
            worker=self.index,
            batch=batch,
            waiting=waiting,
            context_tokens=self.batch.context_tokens,
            free_kv_tokens=None if room == math.inf else max(0.0, room + batch),
            strategy=self.strategy,
            drafters=self.engine.drafters,
            requests=RequestsView(self.requests, self.batch),
        )

    def _tell(self, macro: MacroStep, prefill_s: float, had_prefill: bool) -> float | None:
        speculates = self.strategy.speculates
        outcome = StepOutcome(
            elapsed_s=(prefill_s + macro.seconds) / macro.num_iterations,
            batch=macro.batch,
            drafted=(macro.regime.num_drafted,) * macro.batch if speculates else (),
            accepted=macro.accepted if speculates else (),
            had_prefill=had_prefill,
        )
        reward = self.selector.reward(self.strategy, outcome) if self.engine.record_rewards else None
        self.selector.observe(self.strategy, outcome)
        return reward

    def _note_first(self, admitted: list[int], first_s: float) -> None:
        for request in admitted:
            if math.isnan(self.result.first_token_s[request]):
                self.result.first_token_s[request] = first_s

    def _note_times(self, admitted: list[int], first_s: float, macro: MacroStep, now: float) -> None:
        self._note_first(admitted, first_s)
        for request in macro.finished:
            self.result.finish_s[request] = now
