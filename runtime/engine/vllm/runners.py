"""What is changed in vLLM's model runners: drafting is timed, and iterations without drafts cost what plain ones do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch


def spare_speculation() -> None:
    """Have the V1 runner run an iteration that verifies nothing as an engine built without speculation does.

    This holds where nothing drafts in the runner (`NoProposer`): drafts come from beside the scheduler, so no
    iteration has anything to keep up. vLLM else gathers the logits of no drafts, samples by rejection and proposes, in
    all a quarter of an iteration of a small model.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1Runner

    if hasattr(V1Runner.execute_model, "spared_by_tltlab"):
        return
    execute_stock, sample_stock = V1Runner.execute_model, V1Runner.sample_tokens

    @wraps(execute_stock)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        with _without_speculation(self, not scheduler_output.scheduled_spec_decode_tokens):
            return execute_stock(self, scheduler_output, *args, **kwargs)

    @wraps(sample_stock)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = self.execute_model_state
        with _without_speculation(self, state is not None and state.spec_decode_metadata is None):
            return sample_stock(self, *args, **kwargs)

    execute_model.spared_by_tltlab = True  # type: ignore[attr-defined]
    V1Runner.execute_model, V1Runner.sample_tokens = execute_model, sample_tokens


@contextmanager
def _without_speculation(runner: Any, wanted: bool) -> Iterator[None]:
    """Within, if `wanted`, the runner has no speculative_config. Hybrid models keep their states by it in each pass."""
    if not (wanted and getattr(runner, "drafter", None).__class__ is NoProposer) or runner.model_config.is_hybrid:
        yield
        return
    speculative, runner.speculative_config = runner.speculative_config, None
    try:
        yield
    finally:
        runner.speculative_config = speculative


class NoProposer:
    """A `custom_class` proposer that drafts nothing: model-free drafts are made beside the scheduler."""

    def __init__(self, vllm_config: Any) -> None:
        pass

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to load."""

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]


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
