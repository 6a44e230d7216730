"""The rollout workers of a run: Ray actors, each around one engine in its own process."""

from __future__ import annotations

import os
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, replace
from math import ceil
from queue import SimpleQueue
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
import torch

from tltlab.config import counted
from tltlab.drafters.base import Key
from tltlab.errors import RunError
from tltlab.policies.policy import Policy
from tltlab.records import Json
from tltlab.runtime.drafter.feed import SequenceSender
from tltlab.runtime.drafter.offline.data import load_tokenizer
from tltlab.runtime.engine.engine import Engine, capture_room
from tltlab.runtime.engine.generation import (
    EngineDied,
    FollowUp,
    FollowUps,
    GenerationRequest,
    GenerationResponse,
    Rollout,
    Until,
)
from tltlab.runtime.engine.vllm.llm import AdapterUpdates
from tltlab.runtime.engine.weights import BucketSlots, visible
from tltlab.runtime.ray.scratch import register_memory
from tltlab.runtime.recipe.engines import EngineBuild
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.recipe.sections import EnvironmentConfig
from tltlab.runtime.run.memory import ProcessMemory
from tltlab.traces.schema import by_column

from .environments import Conversations, EnvironmentPool, stop_token_ids

_LORA_RANKS = (8, 16, 32, 64, 128, 256, 512)
"""Ranks that vLLM makes room for."""


class WorkerLost(RunError):
    """A worker's process or engine failed, with the reason and the last lines of the process's log."""

    def __init__(self, why: str, log_tail: str = ""):
        super().__init__(f"{why}; last lines of its log: {log_tail}" if log_tail else why)
        self.why = why


class EngineWorker:
    """One engine in its own process."""

    def __init__(self, recipe: Recipe, number: int, build: EngineBuild, feed: str | None):
        # A policy's class is built here.
        sys.path += [folder for folder in recipe.code if folder not in sys.path]
        self.recipe = recipe
        self.number = number
        self.build = build
        self.feed = feed
        self.temperature = recipe.rollout.temperature
        self.before: Any = None
        self._recalled: dict[Any, Any] = {}
        self.environment: tuple[EnvironmentPool, EnvironmentConfig, Any, tuple[int, ...]] | None = None
        self.slots: BucketSlots | None = None

    def pid(self) -> int:
        return os.getpid()

    def start(self) -> None:
        """Build the engine and warm it up. Not in the constructor, whose errors Ray would not pass on."""
        torch.set_num_threads(1)
        self.engine = Engine(
            self.recipe.model,
            worker=self.number,
            drafters=self.build.drafters,
            max_draft_depth=self.build.max_draft_depth,
            graphs=self.build.graphs,
            seed=self.recipe.seed + self.number,
            vllm_args=engine_args(self.recipe, cuda=torch.cuda.is_available()),
        )
        if (lora := self.recipe.train.served_adapter) is not None:
            self.engine.weights = AdapterUpdates(self.engine.llm, self.recipe.model, lora.alpha)
        try:
            self.engine.warm_up(self.temperature)
        except EngineDied as error:
            # The lost responses do not matter here.
            cause = error.__cause__
            why = f"{type(cause).__name__}: {' '.join(str(cause).split())[:500]}" if cause is not None else str(error)
            raise EngineDied(f"the engine's first batch failed: {why}") from cause
        rollout, tokenizer, code = self.recipe.rollout, load_tokenizer(self.recipe.model), self.recipe.code
        if rollout.stop:
            self.engine.stop_at(rollout.stop, tokenizer, rollout.max_response_tokens)
        if (config := rollout.environment) is not None:
            stops = stop_token_ids(config, code, tokenizer)
            self.environment = EnvironmentPool(config, code), config, tokenizer, stops
        if self.feed is not None:
            self.engine.capture(SequenceSender(self.feed).sequence, max_bytes=capture_bytes(self.recipe))
        register_memory()

    def ask_engine(self, method: str, *args: Any) -> Any:
        """Call a method of the engine."""
        return getattr(self.engine, method)(*args)

    def place(self) -> tuple[str, dict[str, str]]:
        """Return the node, and the environment in which another process sees the same devices."""
        devices = os.environ.get("CUDA_VISIBLE_DEVICES")
        return ray.get_runtime_context().get_node_id(), {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}

    def set_policy(self, policy: Policy, rl_step: int) -> None:
        self.engine.set_policy(policy, seed=[self.recipe.seed, self.number, rl_step])

    def state_dict(self) -> Json:
        """Return learned state of policy and budget, and the drafters' acceptance, as JSON types; without history."""
        return self.engine.state_dict(history=False)

    def weights(self, call: str, info: Any, data: npt.NDArray[np.uint8] | None = None) -> bool:
        """Execute one call of a weight update (`weights.Engines`).

        `start` returns True if a bucket's memory is on this machine. If not, buckets come with their `data`.
        """
        weights = self.engine.weights
        if call == "init":
            weights.join(*info)
        elif call == "start":
            weights.refused = None
            self.engine.check_alive()
            weights.start()
            return info is None or visible(*info)
        elif call == "bucket":
            if data is not None:
                if self.slots is None or self.slots.size < len(data):
                    self.slots = BucketSlots(len(data), 1)
                info = self.slots.copy_in(info, data)
            weights.load(bucket=asdict(info))
        elif call == "device":
            weights.load(device=info)
        elif call == "cut off":
            weights.refused = RunError(str(info)) if weights.unusable else None
        else:
            weights.finish(str(info))
            self.engine.target_updated(info)
        return True

    def has_weights(self, version: int) -> None:
        """Raise RunError where vLLM refused the weights of `version`, EngineDied where they are incomplete."""
        weights = self.engine.weights
        if weights.refused is not None:
            raise weights.refused
        self.engine.check_alive()
        if weights.version != str(version):
            raise EngineDied(f"its new weights did not arrive: it has version {weights.version or 0}, not {version}")

    def update_draft_weights(self, weights: dict[str, torch.Tensor], predicted: Sequence[float], updates: int) -> None:
        self.engine.update_draft_weights(weights.items(), predicted, updates)

    def memory(self) -> ProcessMemory:
        """Return the memory of this process."""
        return ProcessMemory.now("rollout worker", self.number, self.engine.held_bytes())

    def generate(
        self,
        requests: list[GenerationRequest],
        rl_step: int,
        seed: list[int],
        history: list[Any],
        *,
        repeatable: bool,
        quota: int | None,
    ) -> Rollout:
        """Roll out from random state `seed`; `repeatable` keeps the state before, so that `repeat` can follow.

        Drafters have the history `history` alone, references to lists of (key, prompt, response) (`RunHistory.of`).
        With `quota` the rollout ends once all requests of that many prompts are answered; the rest return cut.
        """
        self._recall(history)
        self.before = self.engine.snapshot() if repeatable else None
        return self._generate(requests, rl_step, seed, None if quota is None else enough(requests, quota))

    def repeat(self, requests: list[GenerationRequest], rl_step: int, seed: list[int]) -> Rollout | None:
        """Repeat the last, repeatable, rollout from its initial state, and restore all state.

        None from a restarted worker, which does not have that state.
        """
        return None if self.before is None else self._from(self.before, requests, rl_step, seed)

    def rehearse(self, requests: list[GenerationRequest], rl_step: int, seed: list[int], history: list[Any]) -> Rollout:
        """Run a rollout ahead of time, and restore all state."""
        self._recall(history)
        self.before = self.engine.snapshot()
        return self._from(self.before, requests, rl_step, seed)

    def _from(self, state: Any, requests: list[GenerationRequest], rl_step: int, seed: list[int]) -> Rollout:
        after = self.engine.snapshot()
        self.engine.restore(state)
        try:
            with self.engine.uncaptured():
                return self._generate(requests, rl_step, seed)
        finally:
            self.engine.restore(after)

    def _recall(self, history: list[Any]) -> None:
        # What the last rollout had is here.
        new = [ref for ref in history if ref not in self._recalled]
        known = self._recalled | dict(zip(new, ray.get(new), strict=True))
        self._recalled = {ref: known[ref] for ref in history}
        self.engine.recall([response for visit in self._recalled.values() for response in visit])

    def learn_lengths(self, lengths: list[list[tuple[Key, int]]], excluded: int | None) -> None:
        """Deliver the lengths of responses of every worker but number `excluded` to the budget."""
        self.engine.learn_lengths([length for n, part in enumerate(lengths) if n != excluded for length in part])

    def evaluate(self, requests: list[GenerationRequest], seed: list[int]) -> Rollout:
        """Generate without speculation, with the rollouts' sampling settings, at `eval.temperature`."""
        rollout = self.recipe.rollout
        requests = [replace(r, top_p=rollout.top_p, top_k=rollout.top_k, min_p=rollout.min_p) for r in requests]
        self.engine.reseed(seed)
        requests, conversations = self._conversations(requests)
        temperature = self.recipe.eval.temperature
        temperature = self.temperature if temperature is None else temperature
        return packed(self.engine.evaluate(requests, temperature=temperature, follow_ups=conversations))

    def _generate(
        self,
        requests: list[GenerationRequest],
        rl_step: int,
        seed: list[int],
        until: Until | None = None,
    ) -> Rollout:
        config = self.recipe.rollout
        self.engine.reseed(seed)
        requests, conversations = self._conversations(requests)
        rollout = packed(
            self.engine.generate(
                requests,
                rl_step=rl_step,
                temperature=self.temperature,
                top_p=config.top_p,
                top_k=config.top_k,
                min_p=config.min_p,
                until=until,
                follow_ups=conversations,
            )
        )
        if self.environment is None or not isinstance(conversations, Conversations):
            return rollout
        notes, cut = self.environment[0].take_failures(), conversations.cut
        if cut:
            notes.append(
                f"{counted(len(cut), 'response')} ended at a tool's answer longer than the context or "
                "rollout.max_response_tokens permit, and counted as truncated"
            )
        responses = [replace(r, finish_reason="length") if r.key in cut else r for r in rollout.responses]
        return replace(rollout, responses=responses, notes=notes)

    def _conversations(self, requests: list[GenerationRequest]) -> tuple[list[GenerationRequest], FollowUps | None]:
        """Return the requests with stops at tool calls, and their follow-ups; unchanged without an environment."""
        if self.environment is None:
            return requests, None
        pool, config, tokenizer, stops = self.environment
        conversations = Conversations(pool, config, tokenizer, stops, self.engine.max_model_len)
        return [replace(request, stop_token_ids=stops) for request in requests], conversations


@ray.remote
class RolloutWorker(EngineWorker):
    """One engine, which runs one call at a time."""


def packed(rollout: Rollout) -> Rollout:
    """Return the rollout in the form sent to the driver: 8 bytes a token and rows by column."""
    return replace(
        rollout,
        responses=[compact(response) for response in rollout.responses],
        iterations=by_column("iterations", rollout.iterations),
        decisions=by_column("decisions", rollout.decisions),
    )


def compact(response: GenerationResponse) -> GenerationResponse:
    return replace(response, token_ids=array("i", response.token_ids), logprobs=array("f", response.logprobs))


def engine_args(recipe: Recipe, *, cuda: bool) -> Json:
    """Return vLLM's arguments for one engine of a recipe; `rollout.vllm` overrides all but the fixed concurrency.

    >>> recipe = Recipe(model="m", reward="r:f", data={"train": "t"}, rollout={"partial": {"concurrency": 9}})
    >>> engine_args(recipe, cuda=False)["max_num_seqs"]
    5
    """
    rollout = recipe.rollout
    args: Json = {"tensor_parallel_size": rollout.tensor_parallel_size}
    if cuda and (recipe.cluster.placement == "colocated" or rollout.tail_shape is not None):
        args["enable_sleep_mode"] = True
    if (lora := recipe.train.served_adapter) is not None:
        from tltlab.runtime.trainer.lora import outline, targets_of

        # Only these modules: a drafter shares the embedding, and calls it with tokens of its own.
        targets = targets_of(outline(recipe.model), lora, recipe.model)
        rank = next(rank for rank in _LORA_RANKS if rank >= lora.rank)
        args |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank, "lora_target_modules": targets}
    args |= rollout.vllm
    if rollout.partial is not None and rollout.partial.concurrency is not None:
        args["max_num_seqs"] = ceil(rollout.partial.concurrency / rollout.num_workers)
    return args


def capture_bytes(recipe: Recipe) -> int:
    """Return the bytes of hidden states of one engine's running responses: a share of free memory.

    The engines that a machine may have share alike.
    """
    rollout, gpus = recipe.rollout, recipe.cluster.gpus_per_node
    engines = min(rollout.num_workers, max(gpus // rollout.tensor_parallel_size, 1)) if gpus else rollout.num_workers
    return capture_room(engines)


def enough(requests: Sequence[GenerationRequest], quota: int) -> Until:
    """Return a stop test: `quota` prompts, but for what they have to `spare`, and all `due` requests are answered.

    The test is for one rollout: its argument is a list of keys that grows.
    """
    num_left = Counter(request.key[:2] for request in requests)
    num_left.subtract({request.key[:2]: request.spare for request in requests})
    due = {request.key for request in requests if request.due}
    num_counted = num_answered = 0

    def until(ended: Sequence[Key]) -> bool:
        nonlocal num_counted, num_answered
        for key in ended[num_counted:]:
            num_left[key[:2]] -= 1
            num_answered += num_left[key[:2]] == 0
            due.discard(key)
        num_counted = len(ended)
        return num_answered >= quota and not due

    return until


@ray.remote(concurrency_groups={"aside": 1})
class FreeRolloutWorker(EngineWorker):
    """One engine that loads new weights while it generates, between two iterations; its requests continue.

    Requests continue with their keys and values, computed under older weights. Requests that may begin only under later
    weights begin once those are loaded.
    """

    queue: QueuedRequests | None = None

    def start(self) -> None:
        self.calls = DeferredCalls()
        super().start()

    @ray.method(concurrency_group="aside")
    def weights(self, call: str, info: Any, data: npt.NDArray[np.uint8] | None = None) -> bool:
        result: bool = self.calls.call(lambda: EngineWorker.weights(self, call, info, data))
        return result

    @ray.method(concurrency_group="aside")
    def has_weights(self, version: int) -> None:
        super().has_weights(version)

    def _version(self) -> int:
        return int(self.engine.weights.version or 0)

    def _generate(
        self,
        requests: list[GenerationRequest],
        rl_step: int,
        seed: list[int],
        until: Until | None = None,
    ) -> Rollout:
        swaps: list[tuple[int, dict[Key, int]]] = []
        live, tracker = self.engine.control.live, self.engine.control.tracker

        def after_iteration(ended: Sequence[Key]) -> bool:
            if self.calls.waiting:
                before, seconds = self._version(), self._take_weights()
                # The first of these waits for an iteration in flight.
                running = {each.key: len(each.output) for each in live.values()}
                if running:
                    tracker.interrupted(seconds)
                if self._version() != before:
                    swaps.append((before, running))
            return until is not None and until(ended)

        with self.calls.busy():
            self._take_weights()
            self.queue = queue = QueuedRequests(requests, self._version)
            try:
                rollout = super()._generate(queue.take(), rl_step, seed, after_iteration)
            finally:
                self.queue = None
            swaps.append((self._version(), {}))
        return queue.whole(rollout, swaps)

    def _conversations(self, requests: list[GenerationRequest]) -> tuple[list[GenerationRequest], FollowUps | None]:
        return requests, self.queue

    def _take_weights(self) -> float:
        """Serve the calls of the sender of weights until they are complete; return the seconds spent."""
        weights = self.engine.weights
        seconds = self.calls.serve(lambda: bool(weights.unusable) and weights.refused is None)
        self.engine.check_alive()
        return seconds


class DeferredCalls:
    """Calls of another thread that wait for a moment in which this thread can serve them."""

    def __init__(self, busy: bool = False):
        self._lock, self._busy = Lock(), busy
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()

    @property
    def waiting(self) -> bool:
        return not self._calls.empty()

    def call(self, do: Callable[[], Any]) -> Any:
        """Return the result of `do`: at once where not `busy`, else when it is served."""
        with self._lock:
            if not self._busy:
                return do()
            task: Future[Any] = Future()
            self._calls.put((do, task))
        return task.result()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Defer calls to `serve` within the block; calls still waiting at the end are done then."""
        with self._lock:
            self._busy = True
        try:
            yield
        finally:
            with self._lock:
                self._busy = False
                self.serve(lambda: False)

    def serve(self, unfinished: Callable[[], bool]) -> float:
        """Do waiting calls, and wait for more while `unfinished`; return the seconds spent."""
        start = time.perf_counter()
        while self.waiting or unfinished():
            do, task = self._calls.get()
            try:
                task.set_result(do())
            except BaseException as error:  # raised in the caller's thread
                task.set_exception(error)
        return time.perf_counter() - start


class QueuedRequests(FollowUps):
    """The requests of a rollout, some of which wait for weights of later versions (`FollowUps`)."""

    def __init__(self, requests: Sequence[GenerationRequest], version: Callable[[], int]):
        self._requests, self._version = requests, version
        self._waiting = list(requests)
        self._began: dict[Key, int] = {}

    def take(self) -> list[GenerationRequest]:
        """Return the requests that may begin now, once each."""
        version = self._version()
        ready = [request for request in self._waiting if request.from_version <= version]
        self._waiting = [request for request in self._waiting if request.from_version > version]
        self._began |= dict.fromkeys((request.key for request in ready), version)
        return ready

    @property
    def pending(self) -> int:
        version = self._version()
        return sum(request.from_version <= version for request in self._waiting)

    def ready(self, now_s: Callable[[], float], *, wait_for_one: bool) -> list[FollowUp]:
        return [FollowUp(request=request, observed=[], submit_s=now_s(), tool_s=0.0) for request in self.take()]

    def whole(self, rollout: Rollout, swaps: Sequence[tuple[int, Mapping[Key, int]]]) -> Rollout:
        """Return the rollout with a response to every request, in their order; those that never began are empty aborts.

        `swaps` are the active weights, in order: (version, tokens at their end by key of running requests).
        """
        responses = {
            request.key: GenerationResponse(
                key=request.key, token_ids=[], logprobs=[], finish_reason="abort", t_first_token=0.0, t_finish=0.0
            )
            for request in self._requests
        }
        for r in rollout.responses:
            since = [swap for swap in swaps if swap[0] >= self._began[r.key]]
            responses[r.key] = replace(r, tool_s=None, versions=version_spans(since, r.key, len(r.token_ids)))
        return replace(rollout, responses=list(responses.values()), follow_ups=[])


def version_spans(
    swaps: Sequence[tuple[int, Mapping[Key, int]]], key: Key, num_tokens: int
) -> tuple[tuple[int, int], ...]:
    """Return (version, tokens) of a response's spans; a response absent from a swap had ended before it.

    >>> key = (0, "p", 0, 0)
    >>> version_spans([(3, {key: 5}), (4, {key: 5}), (5, {})], key, 9)
    ((3, 5), (5, 4))
    """
    spans, before = [], 0
    for version, running in swaps:
        now = running.get(key, num_tokens)
        if now > before:
            spans.append((version, now - before))
            before = now
    return tuple(spans)
