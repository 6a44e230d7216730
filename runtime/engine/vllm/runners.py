"""How long an engine's workers draft: measured around vLLM's own propose, handed on with the drafts themselves."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def time_drafting() -> None:
    """Have both model runners say with the drafts they hand over how many seconds these took, as `draft_s`.

    On CUDA the time is the device's, between two events. Under asynchronous scheduling drafts are not handed over.
    """
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2Runner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1Runner

    if hasattr(V1Runner.take_draft_token_ids, "timed_by_tltlab"):
        return
    V1Runner.propose_draft_token_ids = _timed(V1Runner.propose_draft_token_ids, lambda args: _stopwatch(args[0]))
    for runner in (V1Runner, V2Runner):
        runner.take_draft_token_ids = _with_time(runner.take_draft_token_ids)


class _Stopwatch:
    """Seconds within `with`, on the device where there is one."""

    def __init__(self) -> None:
        self.events: tuple[Any, Any] | None = None
        self.seconds = 0.0

    def __enter__(self) -> None:
        if torch.cuda.is_available():
            self.events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.events[0].record()
        self.seconds = -time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.seconds += time.perf_counter()
        if self.events is not None:
            self.events[1].record()

    def read(self) -> float:
        """The seconds of the last interval, once."""
        seconds, events = self.seconds, self.events
        if events is not None:
            events[1].synchronize()
            seconds = events[0].elapsed_time(events[1]) / 1e3
        self.seconds, self.events = 0.0, None
        return seconds


def _timed(function: Any, watch_of: Callable[[tuple[Any, ...]], _Stopwatch]) -> Any:
    @wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with watch_of(args):
            return function(*args, **kwargs)

    timed.timed_by_tltlab = True  # type: ignore[attr-defined]
    return timed


def _with_time(take: Any) -> Any:
    @wraps(take)
    def take_draft_token_ids(self: Any) -> Any:
        watch = _stopwatch(self)
        speculator = getattr(self, "speculator", None)
        if speculator is not None and not hasattr(speculator.propose, "timed_by_tltlab"):
            # The V2 runner's drafter is an object of its own; its first drafts pass untimed.
            speculator.propose = _timed(speculator.propose, lambda args: watch)
        drafts = take(self)
        if drafts is not None:
            drafts.draft_s = watch.read()
        return drafts

    take_draft_token_ids.timed_by_tltlab = True  # type: ignore[attr-defined]
    return take_draft_token_ids


def _stopwatch(runner: Any) -> _Stopwatch:
    watch: _Stopwatch = runner.__dict__.setdefault("tltlab_stopwatch", _Stopwatch())
    return watch
