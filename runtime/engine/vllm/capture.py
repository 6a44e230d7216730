"""The target's hidden states out of a live engine: every response that ends becomes a `TrainingSequence`.

Both model runners keep what a forward pass left (`execute_model_state`) until they sample from it, whatever they draft
with, if at all; that is where rows are taken. On CUDA they leave on a stream of their own, through pinned memory.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tltlab.arrays import Ints
from tltlab.runtime.drafter.sequences import TrainingSequence
from tltlab.runtime.engine.control import Live
from tltlab.runtime.engine.ledger import Stopwatch

from .row_store import Rows, RowStore

Sink = Callable[[TrainingSequence], None]

WAIT_ITERATIONS = 16
WAIT_ROWS = 1024
"""How many iterations of how many rows in all may wait, on a CPU, to be put away together."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """What a capture has handed over, in sequences and their rows, and what it cost.

    `skipped` requests found no room at their first row, `lost` ones later. `peak_bytes` is the most that running
    requests have held, `seconds` all the time it took of the engine's, the sink's included. `failure` says how the sink
    failed, which ended the capture.
    """

    sequences: int = 0
    rows: int = 0
    skipped: int = 0
    lost: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0
    failure: str = ""


class NoCapture:
    """Nothing is captured."""

    def enter(self, request_id: str) -> None:
        """A request came into the engine."""

    def landed(self) -> None:
        """The outcome of the oldest iteration in flight is known."""

    def leave(self, request_id: str, live: Live, finish_reason: str) -> None:
        """A request left the engine, after `landed` for its last iteration."""

    def stop(self) -> None:
        """Capture nothing more, and forget what running requests have."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Requests that come meanwhile are not captured."""
        yield

    @property
    def captured(self) -> Captured:
        """What it did so far."""
        return Captured()


class Capture(NoCapture):
    """Takes rows from `runner` and hands `sink` each request that came since, when it ends with "stop" or "length".

    `max_positions` is the engine's context in tokens, `max_tokens` the most an iteration computes. Begin with
    `attach`.
    """

    def __init__(self, runner: Any, sink: Sink, *, max_bytes: int, max_positions: int, max_tokens: int) -> None:
        self._runner = runner
        self._sink = sink
        self._store = RowStore(max_bytes, max_positions)
        self._way = _DirectWay() if runner.device.type == "cpu" else _PinnedWay(runner.device, max_tokens)
        self._on = True
        self._paused = False
        self._sequences = self._rows = 0
        self._stopwatch = Stopwatch(time.perf_counter)
        self._failure = ""

    def attach(self) -> None:
        """Take rows from now on, until `stop`."""
        runner, stock = self._runner, self._runner.sample_tokens

        def sample_tokens(*args: Any, **kwargs: Any) -> Any:
            with self._stopwatch:
                self._way.leave(self._store, _batch_of(runner) if self._store else None)
            try:
                return stock(*args, **kwargs)
            finally:
                # A graph's next replay writes its states where the last one's still are.
                self._way.clear()

        runner.sample_tokens = sample_tokens

    def enter(self, request_id: str) -> None:
        if self._on and not self._paused:
            self._store.open(request_id)

    def landed(self) -> None:
        with self._stopwatch:
            self._way.land(self._store)

    def leave(self, request_id: str, live: Live, finish_reason: str) -> None:
        with self._stopwatch:
            total = len(live.prompt) + len(live.output)
            whole = finish_reason in ("stop", "length")
            self._way.settle(self._store)
            rows = self._store.close(request_id, total - 1 if whole else 0)
            if rows is not None:
                self._hand_over(live, rows)

    def _hand_over(self, live: Live, rows: Rows) -> None:
        tokens = torch.tensor([*live.prompt, *live.output])
        sequence = TrainingSequence(
            key=live.key,
            token_ids=tokens[rows.first :].clone(),
            hidden=rows.hidden,
            aux=rows.aux,
            first_position=rows.first,
            prompt_tokens=max(len(live.prompt) - rows.first, 0),
        )
        try:
            self._sink(sequence)
        except Exception as error:  # what the sink does is its owner's, the rollout is everybody's
            self._failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            logger.error("the sink of captured hidden states failed, so capture ends: %s", self._failure)
            self.stop()
            return
        self._sequences += 1
        self._rows += sequence.num_rows

    def stop(self) -> None:
        self._on = False
        self._runner.__dict__.pop("sample_tokens", None)
        self._way = _DirectWay()
        self._store.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @property
    def captured(self) -> Captured:
        return Captured(
            sequences=self._sequences,
            rows=self._rows,
            skipped=self._store.skipped,
            lost=self._store.lost,
            peak_bytes=self._store.peak_bytes,
            seconds=self._stopwatch.seconds,
            failure=self._failure,
        )


@dataclass(frozen=True, slots=True)
class _Batch:
    """What an iteration computed, as `RowStore.put` takes it, wherever its tensors are."""

    request_ids: Sequence[str]
    bounds: Ints
    positions: Tensor
    hidden: Tensor
    aux: Sequence[Tensor]

    def kept(self, positions: Tensor, hidden: Tensor, aux: Sequence[Tensor]) -> _Batch:
        """The same with these tensors, and nothing of the runner's own that its next iteration changes."""
        return _Batch(list(self.request_ids), self.bounds.copy(), positions, hidden, aux)

    def put_into(self, store: RowStore) -> None:
        store.put(self.request_ids, self.bounds, self.positions.numpy(), self.hidden, self.aux)


def _batch_of(runner: Any) -> _Batch | None:
    state = runner.execute_model_state
    if state is None:
        return None
    # The V2 runner hands its batch on with the states, the V1 runner has but one.
    batch = getattr(state, "input_batch", None)
    if batch is None:
        batch, bounds, positions = runner.input_batch, runner.query_start_loc.np, runner.positions
    else:
        bounds, positions = batch.query_start_loc_np, batch.positions
    ends = bounds[: batch.num_reqs + 1]
    return _Batch(batch.req_ids, ends, positions, state.hidden_states, state.aux_hidden_states or ())


class _DirectWay:
    """The states are on the host, and fresh tensors each time, so that they can wait.

    Rows are put away several iterations at a time: after a forward pass nothing of the store is in the cache, and that
    is what most of its time goes into.
    """

    def __init__(self) -> None:
        self._waiting: list[_Batch] = []
        self._num_rows = 0

    def leave(self, store: RowStore, batch: _Batch | None) -> None:
        """An iteration's states are there, on the device."""
        if batch is None:
            return
        num_rows = int(batch.bounds[-1])
        self._waiting.append(batch.kept(batch.positions[:num_rows].clone(), batch.hidden, batch.aux))
        self._num_rows += num_rows
        if len(self._waiting) >= WAIT_ITERATIONS or self._num_rows >= WAIT_ROWS:
            self.settle(store)

    def clear(self) -> None:
        """What is queued on the device from now on may write over them."""

    def land(self, store: RowStore) -> None:
        """The outcome of the oldest iteration that left is known."""

    def settle(self, store: RowStore) -> None:
        """A request of the iterations that landed is about to go."""
        waiting, self._waiting, self._num_rows = self._waiting, [], 0
        for batch in waiting:
            batch.put_into(store)


class _PinnedWay(_DirectWay):
    """Iterations leave a CUDA device while it samples and drafts, and land when their outcomes do."""

    def __init__(self, device: torch.device, max_tokens: int) -> None:
        super().__init__()
        self._stream = torch.cuda.Stream(device)
        self._max_tokens = max_tokens
        self._under_way: deque[tuple[_Batch, list[Tensor], Any] | None] = deque()
        self._idle: list[list[Tensor]] = []

    def leave(self, store: RowStore, batch: _Batch | None) -> None:
        if batch is None:
            self._under_way.append(None)
            return
        sources = [batch.positions, batch.hidden, *batch.aux]
        pinned = self._idle.pop() if self._idle else [self._pinned(source) for source in sources]
        count = int(batch.bounds[-1])
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for target, source in zip(pinned, sources, strict=True):
                target[:count].copy_(source[:count], non_blocking=True)
        arriving = batch.kept(pinned[0], pinned[1], pinned[2:])
        self._under_way.append((arriving, pinned, self._stream.record_event()))

    def _pinned(self, source: Tensor) -> Tensor:
        return torch.empty((self._max_tokens, *source.shape[1:]), dtype=source.dtype, pin_memory=True)

    def clear(self) -> None:
        if self._under_way and self._under_way[-1] is not None:
            torch.cuda.current_stream().wait_event(self._under_way[-1][2])

    def land(self, store: RowStore) -> None:
        oldest = self._under_way.popleft() if self._under_way else None
        if oldest is None:
            return
        batch, pinned, arrived = oldest
        arrived.synchronize()
        batch.put_into(store)
        self._idle.append(pinned)
