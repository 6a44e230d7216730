"""One RL step's rollout as a discrete-event simulation: one SimPy process per worker, one timeout per macro-step.

A worker's scheduling round, as vLLM's: preempt the newest while the next iteration does not fit, otherwise admit
waiting requests in order while they fit; prefill what was admitted; ask the policy; run. An iteration fits while the
contexts plus one token per resident fit into the KV cache (drafted tokens are not counted). A preempted request goes to
the head of the queue and has its prompt and generated tokens prefilled again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import simpy

from tltlab.cost import CostModel
from tltlab.errors import ConfigError
from tltlab.selector import Selector
from tltlab.state import DrafterState, StepOutcome, StepState
from tltlab.strategy import NO_SPECULATION

from .batch import TOLERANCE_TOKENS, Batch, MacroStep
from .regime import Regimes
from .requests import Requests
from .view import RequestsView


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """A macro-step as it took place: prefill from `start_s`, then decoding. `asked` marks a decision of the policy."""

    start_s: float
    prefill_s: float
    prefill_tokens: float
    waiting: int
    first_iteration: int
    macro: MacroStep
    asked: bool
    bucket: int | None
    propensity: float
    reward: float | None


@dataclass(slots=True)
class Rollout:
    """What one RL step's simulation leaves: times per request (None: never ran), the workers' logs and the end."""

    requests: Requests
    worker_of: list[int]
    first_token_s: list[float | None]
    finish_s: list[float]
    logs: list[list[Logged]]
    worker_end_s: list[float]
    makespan_s: float = 0.0


@dataclass(slots=True)
class Engine:
    """What all rollouts of a simulation share. Selectors persist across RL steps, one per worker."""

    costs: CostModel
    regimes: Regimes
    selectors: list[Selector]
    new_batch: Callable[[Requests], Batch]
    decision_block: int = 1
    drafters: dict[str, DrafterState] = field(default_factory=dict)

    def rollout(self, requests: Requests, queues: list[list[int]]) -> Rollout:
        """Simulate one RL step; `queues` are the requests of each worker in order of admission."""
        check_fits(requests, self.costs.kv_capacity_tokens)
        n = len(requests)
        result = Rollout(requests, [0] * n, [None] * n, [0.0] * n, [[] for _ in queues], [0.0] * len(queues))
        env = simpy.Environment()
        workers = []
        for w, queue in enumerate(queues):
            for request in queue:
                result.worker_of[request] = w
            workers.append(env.process(Worker(self, w, queue, result).run(env)))
        env.run(until=env.all_of(workers))
        result.makespan_s = max(result.worker_end_s)
        return result


def check_fits(requests: Requests, capacity: int | None) -> None:
    """ConfigError when a single response is larger than the KV cache: it could never finish."""
    if capacity is None:
        return
    for key, prompt, length in zip(requests.keys, requests.prompt_tokens, requests.response_tokens, strict=True):
        if prompt + length > capacity:
            raise ConfigError(
                f"kv_capacity_tokens = {capacity} is too small: response {key} alone needs {prompt + length}, "
                f"{prompt} of them for its prompt"
            )


class Worker:
    """One engine: its queue, its batch and its selector."""

    def __init__(self, engine: Engine, index: int, queue: list[int], result: Rollout) -> None:
        self.engine = engine
        self.index = index
        self.result = result
        self.requests = result.requests
        self.selector = engine.selectors[index]
        self.batch = engine.new_batch(result.requests)
        # A response without tokens (an abort before its first) takes no time.
        self.waiting = deque((r, 0.0) for r in queue if self.requests.response_tokens[r] > 0)
        self.capacity: float = engine.costs.kv_capacity_tokens or math.inf
        self.max_num_seqs: float = engine.costs.max_num_seqs or math.inf
        self.limit = math.inf if self.selector.memoryless else engine.decision_block
        self.iteration = 0
        self.strategy = NO_SPECULATION
        self.asked_at: tuple[int, int] | None = None

    def run(self, env: simpy.Environment) -> Generator[simpy.Event, Any, None]:
        """The SimPy process: macro-step after macro-step until nothing runs or waits."""
        batch, log = self.batch, self.result.logs[self.index]
        while self.waiting or len(batch):
            start_s = env.now
            admitted, prefill_tokens = ([], 0.0) if self._preempt() or not self.waiting else self._admit()
            prefill_s = self.engine.costs.prefill_s(prefill_tokens)
            waiting = len(self.waiting)
            asked = self._ask(waiting)
            macro = batch.advance(self.engine.regimes.at(self.strategy, len(batch)), self.limit, self._room())
            yield env.timeout(prefill_s + macro.seconds)
            self._note_times(admitted, start_s + prefill_s + macro.first_s, macro, env.now)
            bucket, propensity = self.selector.bucket_, self.selector.propensity_
            reward = self._tell(macro, prefill_s, bool(admitted)) if asked and not self.selector.memoryless else None
            log.append(
                Logged(
                    start_s=start_s,
                    prefill_s=prefill_s,
                    prefill_tokens=prefill_tokens,
                    waiting=waiting,
                    first_iteration=self.iteration,
                    macro=macro,
                    asked=asked,
                    bucket=bucket,
                    propensity=propensity,
                    reward=reward,
                )
            )
            self.iteration += macro.num_iterations
        self.result.worker_end_s[self.index] = env.now

    def _room(self) -> float:
        """Tokens that the contexts may still grow by before the next iteration no longer fits."""
        if self.capacity == math.inf:
            return math.inf
        return self.capacity - len(self.batch) - self.batch.context_tokens

    def _preempt(self) -> bool:
        preempted = False
        while math.isfinite(self.capacity) and len(self.batch) > 1 and self._room() < -TOLERANCE_TOKENS:
            self.waiting.appendleft(self.batch.preempt())
            preempted = True
        return preempted

    def _admit(self) -> tuple[list[int], float]:
        admitted: list[int] = []
        prefill_tokens = 0.0
        room = self._room()
        while self.waiting and len(self.batch) < self.max_num_seqs:
            request, generated = self.waiting[0]
            tokens = self.requests.prompt_tokens[request] + generated
            room -= tokens + 1
            if room < -TOLERANCE_TOKENS and len(self.batch):
                break
            self.waiting.popleft()
            self.batch.admit(request, generated)
            admitted.append(request)
            prefill_tokens += tokens
        return admitted, prefill_tokens

    def _ask(self, waiting: int) -> bool:
        seen = (len(self.batch), waiting)
        if self.selector.memoryless and seen == self.asked_at:
            return False
        self.asked_at = seen
        room = self._room()
        state = StepState(
            rl_step=self.requests.rl_step,
            worker=self.index,
            batch=len(self.batch),
            waiting=waiting,
            context_tokens=self.batch.context_tokens,
            free_kv_tokens=None if math.isinf(room) else max(0.0, room + len(self.batch)),
            strategy=self.strategy,
            drafters=self.engine.drafters,
            requests=() if self.selector.memoryless else self._view(),
        )
        self.strategy = self.selector.choose(state)
        if self.strategy not in self.engine.regimes.strategies:
            known = ", ".join(map(str, self.engine.regimes.strategies))
            raise ConfigError(f"the policy chose {self.strategy}, which is not among its strategies: {known}")
        return True

    def _view(self) -> RequestsView:
        return RequestsView(self.requests, self.batch)

    def _tell(self, macro: MacroStep, prefill_s: float, had_prefill: bool) -> float | None:
        speculates = self.strategy.speculates
        outcome = StepOutcome(
            elapsed_s=(prefill_s + macro.seconds) / macro.num_iterations,
            batch=macro.batch,
            drafted=(macro.regime.num_drafted,) * macro.batch if speculates else (),
            accepted=macro.accepted if speculates else (),
            had_prefill=had_prefill,
        )
        reward = self.selector.reward(self.strategy, outcome)
        self.selector.observe(self.strategy, outcome)
        return reward

    def _note_times(self, admitted: list[int], first_s: float, macro: MacroStep, now: float) -> None:
        for request in admitted:
            if self.result.first_token_s[request] is None:
                self.result.first_token_s[request] = first_s
        for request in macro.finished:
            self.result.finish_s[request] = now
