"""A rollout worker whose engine loads new weights while it generates, for asynchronous training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import ray

from tltlab.drafters.base import Key
from tltlab.runtime.engine.generation import FollowUp, FollowUps, GenerationRequest, GenerationResponse, Rollout
from tltlab.runtime.recipe.engines import EngineBuild
from tltlab.runtime.recipe.recipe import Recipe

from .worker import EngineWorker


@ray.remote(concurrency_groups={"aside": 1})
class FreeRolloutWorker(EngineWorker):
    """One engine that loads new weights while it generates, between two iterations; its requests continue.

    Requests continue with their keys and values, computed under older weights. Requests that may begin only under later
    weights begin once those are loaded.
    """

    def __init__(self, recipe: Recipe, number: int, build: EngineBuild, feed: str | None) -> None:
        super().__init__(recipe, number, build, feed)
        self.calls = DeferredCalls()
        self.queue: QueuedRequests | None = None

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
        until: Callable[[Sequence[Key]], bool] | None = None,
    ) -> Rollout:
        swaps: list[tuple[int, dict[Key, int]]] = []
        live, tracker = self.engine.control.live, self.engine.control.tracker

        def after_iteration(ended: Sequence[Key]) -> bool:
            if self.calls.waiting:
                before, running = self._version(), {each.key: len(each.output) for each in live.values()}
                seconds = self._take_weights()
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

    def __init__(self) -> None:
        self._lock, self._busy = Lock(), False
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


class QueuedRequests:
    """The requests of a rollout, some of which wait for weights of later versions (`FollowUps`)."""

    def __init__(self, requests: Sequence[GenerationRequest], version: Callable[[], int]) -> None:
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

    def ended(self, request: GenerationRequest, token_ids: Sequence[int], now_s: float) -> None:
        """Do nothing: nothing follows."""

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
