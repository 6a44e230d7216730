"""Capture of the target's hidden states in a live engine: each ended response becomes a `TrainingSequence`.

Both model runners keep the states of a forward pass (`execute_model_state`) until they sample from it; `RunnerCapture`
copies rows there. On CUDA rows are copied on a separate stream, through pinned memory. Rank 0's
runner copies them, in its own process under tensor parallelism, and receives orders with the next iteration.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from tltlab.arrays import Array, Floats, Ints, Tokens
from tltlab.drafters.base import Key
from tltlab.drafters.budget import LengthClasses
from tltlab.records import frozen
from tltlab.runtime.drafter.sequences import TrainingSequence
from tltlab.runtime.engine.guard import Guard
from tltlab.runtime.engine.requests import LiveRequest, Observer
from tltlab.runtime.engine.tracker import Stopwatch

Sink = Callable[[TrainingSequence], None]

_ATTRIBUTE = "tltlab_capture"
"""Attribute of a model runner for its capture, and of a `SchedulerOutput` for orders to the capture."""

PAGE = 32
"""Rows per page."""

_UNKNOWN, _WAITS, _DROPPED = -1, -2, -3
# A slot has rows from `first` to before `end`, and pages from position `low` to before `high`.
_FIRST, _END, _LOW, _HIGH = range(4)


@frozen
class Captured:
    """Statistics of a capture: sequences and rows handed over, and its cost.

    `skipped` requests found no room at their first row, `lost` ones gave up theirs later. `peak_bytes` is the most that
    running requests have held, `seconds` all the time in the model runner's process, that of the sink included.
    `failure` describes the error, also of the sink, that ended the capture.
    """

    sequences: int = 0
    rows: int = 0
    skipped: int = 0
    lost: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0
    failure: str = ""


class NullCapture(Observer):
    """Null capture, and the interface between scheduler and capture; while `paused`, new requests are not captured."""

    paused = False

    def __init__(self, captured: Captured | None = None):
        self._previous = captured or Captured()

    def scheduled(self, output) -> None:
        """Note an iteration that goes to the model runner."""

    def stop(self) -> Captured:
        """Stop capturing, drop the rows of running requests and return the statistics."""
        return self.captured

    @property
    def captured(self) -> Captured:
        """Statistics of this capture, or of the one before it."""
        return self._previous


class Capture(NullCapture):
    """Captures each request that arrives from now on and ends with "stop" or "length", by the `executor`'s rank 0.

    Orders to its `RunnerCapture` are sent with the next iteration, or, when idle, in their own message.
    """

    def __init__(self, executor):
        self._executor = executor
        self._orders: list[tuple[str, tuple[Any, ...]]] = []

    def arrived(self, live: LiveRequest) -> None:
        if not self.paused:
            self._orders.append(("keep", (live.name, live.prompt_id, live.num_prompt_tokens)))

    def left(self, live: LiveRequest, reason: str | None) -> None:
        # A prompt of embeddings has no ids.
        whole = reason in ("stop", "length") and live.num_prompt_tokens == len(live.prompt)
        text = np.array([*live.prompt, *live.output], np.int32) if whole else None
        self._orders.append(("hand_over", (live.name, live.key, len(live.prompt), text)))

    def scheduled(self, output) -> None:
        if self._orders:
            setattr(output, _ATTRIBUTE, self._orders)
            self._orders = []

    def returned(self) -> None:
        self._orders.append(("returned", ()))

    def idle(self) -> None:
        orders, self._orders = self._orders, []
        if orders:
            self._ask("execute", orders)

    def stop(self) -> Captured:
        self._orders = []
        return cast(Captured, self._ask("stop"))

    @property
    def captured(self) -> Captured:
        return cast(Captured, self._ask("captured"))

    def _ask(self, name: str, *args):
        return self._executor.collective_rpc(_on_rank_0, args=(name, args))[0]


class RunnerCapture:
    """Copies rows from `runner`, in its process, and passes each ended request to `sink`.

    `max_positions` is the engine's context in tokens, `max_tokens` the most an iteration computes. Running requests
    hold at most `max_bytes`. Beyond that, requests likely to be in the tail are kept, judged by their length and by the
    lengths of responses to their prompt, or to all prompts (`LengthClasses`). Begin with `attach`. An exception here
    ends the capture, not the engine.
    """

    def __init__(self, runner, sink: Sink, *, max_bytes: int, max_positions: int, max_tokens: int):
        self._runner = runner
        self._sink = sink
        self._store = RowStore(max_bytes, max_positions, self._expected)
        self._copies = _HostCopies() if runner.device.type == "cpu" else _PinnedCopies(runner.device, max_tokens)
        self._lengths = LengthClasses()
        self._prompts: dict[str, tuple[str, int]] = {}
        self._active = True
        self._sequences = self._rows = 0
        self._stopwatch = Stopwatch(time.perf_counter)
        self._guard = Guard("capturing hidden states failed:", "capture ends and the engine continues", self.stop)

    def attach(self) -> None:
        """Capture rows from now on, until `stop`."""
        runner, execute, sample = self._runner, self._runner.execute_model, self._runner.sample_tokens

        def execute_model(scheduler_output, *args, **kwargs):
            self.execute(getattr(scheduler_output, _ATTRIBUTE, ()))
            return execute(scheduler_output, *args, **kwargs)

        def sample_tokens(*args, **kwargs):
            self._call(lambda: self._copies.leave(self._store, _batch_of(runner) if self._store else None))
            try:
                return sample(*args, **kwargs)
            finally:
                # The next replay of a graph overwrites its states.
                self._copies.clear()

        runner.execute_model, runner.sample_tokens = execute_model, sample_tokens

    def execute(self, orders: Sequence[tuple[str, tuple[Any, ...]]]) -> None:
        """Execute the orders of a `Capture`, in that order."""
        for name, args in orders:
            getattr(self, name)(*args)

    def keep(self, request_id: str, prompt_id: str, prompt_tokens: int) -> None:
        """Store the rows of this request from now on."""
        if self._active:
            self._store.open(request_id)
            self._prompts[request_id] = prompt_id, prompt_tokens

    def returned(self) -> None:
        """Note that the output of the oldest iteration in flight is known."""
        self._call(lambda: self._copies.land(self._store))

    def hand_over(self, *ended) -> None:
        """Hand over the rows of a request with the tokens of its text, or drop them for None."""
        self._call(self._hand_over, *ended)

    # Workers call this in inference mode, whose tensors cannot be used for training.
    @torch.inference_mode(False)
    def _hand_over(self, request_id: str, key: Key, prompt_tokens: int, text: Tokens | None) -> None:
        rows = self._store.close(request_id, 0 if text is None else len(text) - 1)
        self._prompts.pop(request_id, None)
        if text is None:
            return
        self._lengths.finished(key[1], len(text) - prompt_tokens)
        if rows is None:
            return
        sequence = TrainingSequence(
            key=key,
            token_ids=torch.from_numpy(text[rows.first :].astype(np.int64)),
            hidden=rows.hidden,
            aux=rows.aux,
            first_position=rows.first,
            prompt_tokens=max(prompt_tokens - rows.first, 0),
        )
        self._sink(sequence)
        self._sequences += 1
        self._rows += sequence.num_rows

    def _call(self, part: Callable[..., object], *args) -> None:
        """Call a part of the capture, timed; after an exception in it, also of the sink, the rollout continues."""
        with self._stopwatch:
            self._guard.call(part, *args)

    def _expected(self, request_ids: Sequence[str], ends: Array) -> Floats:
        """Return the expected response lengths of requests that end at these positions so far."""
        prompts, prompt_tokens = zip(*map(self._prompts.__getitem__, request_ids), strict=True)
        generated: Floats = np.maximum(ends - np.array(prompt_tokens), 0.0)
        expected = self._lengths.expect(prompts, generated)
        return generated if expected is None else generated + expected[1]

    def stop(self) -> Captured:
        """Stop capturing, drop the rows of running requests and return the statistics."""
        self._active = False
        for name in ("execute_model", "sample_tokens"):
            self._runner.__dict__.pop(name, None)
        self._copies = _HostCopies()
        self._store.clear()
        self._prompts.clear()
        return self.captured

    @property
    def captured(self) -> Captured:
        """Statistics of this capture."""
        return Captured(
            sequences=self._sequences,
            rows=self._rows,
            skipped=self._store.skipped,
            lost=self._store.lost,
            peak_bytes=self._store.peak_bytes,
            seconds=self._stopwatch.seconds,
            failure=self._guard.failure,
        )


def start_capture(core, sink: bytes | Sink | None, max_bytes: int) -> None:
    """Make the engine core of this process capture for `sink` from now on; None stops the capture.

    The sink is pickled for other processes. Running requests hold at most `max_bytes`.
    """
    before, control, executor = core.scheduler.capture, core.scheduler.control, core.model_executor
    capture = NullCapture(before.stop())
    if sink is not None:
        executor.collective_rpc(_attach, args=(sink, max_bytes))
        capture = Capture(executor)
    core.scheduler.capture = capture
    control.observers = (*(each for each in control.observers if each is not before), capture)


def _attach(worker, sink: bytes | Sink, max_bytes: int) -> None:
    if worker.rpc_rank:
        return
    config = worker.vllm_config
    capture = RunnerCapture(
        worker.model_runner,
        pickle.loads(sink) if isinstance(sink, bytes) else sink,
        max_bytes=max_bytes,
        max_positions=config.model_config.max_model_len,
        max_tokens=config.scheduler_config.max_num_batched_tokens,
    )
    capture.attach()
    setattr(worker.model_runner, _ATTRIBUTE, capture)


def _on_rank_0(worker, name: str, args: tuple[Any, ...]):
    if worker.rpc_rank:
        return None
    member = getattr(getattr(worker.model_runner, _ATTRIBUTE), name)
    return member(*args) if callable(member) else member


@dataclass(frozen=True, slots=True)
class _Batch:
    """The result of an iteration as `RowStore.put` takes it, its tensors on any device."""

    request_ids: Sequence[str]
    bounds: Ints
    positions: Tensor
    hidden: Tensor
    aux: Sequence[Tensor]

    def kept(self, positions: Tensor, hidden: Tensor, aux: Sequence[Tensor]) -> _Batch:
        """Return a copy with these tensors, independent of buffers that the runner's next iteration changes."""
        return _Batch(list(self.request_ids), self.bounds.copy(), positions, hidden, aux)

    def put_into(self, store: RowStore) -> None:
        store.put(self.request_ids, self.bounds, self.positions.numpy(), self.hidden, self.aux)


def _batch_of(runner) -> _Batch | None:
    state = runner.execute_model_state
    if state is None:
        return None
    # The V2 runner passes its batch with the states; the V1 runner has only one.
    batch = getattr(state, "input_batch", None)
    if batch is None:
        batch, bounds, positions = runner.input_batch, runner.query_start_loc.np, runner.positions
    else:
        bounds, positions = batch.query_start_loc_np, batch.positions
    ends = bounds[: batch.num_reqs + 1]
    return _Batch(batch.req_ids, ends, positions, state.hidden_states, state.aux_hidden_states or ())


class _HostCopies:
    """States that are already on the host: their rows are stored at once."""

    def leave(self, store: RowStore, batch: _Batch | None) -> None:
        """Take over an iteration's states, on the device."""
        if batch is not None:
            batch.put_into(store)

    def clear(self) -> None:
        """Protect the states from work that is queued on the device from now on."""

    def land(self, store: RowStore) -> None:
        """Note that the output of the oldest iteration that left is known."""


class _PinnedCopies(_HostCopies):
    """Copies of iterations that leave a CUDA device while it samples and drafts, and land with their outputs."""

    def __init__(self, device: torch.device, max_tokens: int):
        self._stream = torch.cuda.Stream(device)
        self._max_tokens = max_tokens
        self._transfers: deque[tuple[_Batch, list[Tensor], Any] | None] = deque()
        self._free_buffers: list[list[Tensor]] = []

    def leave(self, store: RowStore, batch: _Batch | None) -> None:
        if batch is None:
            self._transfers.append(None)
            return
        sources = [batch.positions, batch.hidden, *batch.aux]
        pinned = self._free_buffers.pop() if self._free_buffers else [self._pinned(source) for source in sources]
        count = int(batch.bounds[-1])
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for target, source in zip(pinned, sources, strict=True):
                target[:count].copy_(source[:count], non_blocking=True)
        arriving = batch.kept(pinned[0], pinned[1], pinned[2:])
        self._transfers.append((arriving, pinned, self._stream.record_event()))

    def _pinned(self, source: Tensor) -> Tensor:
        return torch.empty((self._max_tokens, *source.shape[1:]), dtype=source.dtype, pin_memory=True)

    def clear(self) -> None:
        if self._transfers and self._transfers[-1] is not None:
            torch.cuda.current_stream().wait_event(self._transfers[-1][2])

    def land(self, store: RowStore) -> None:
        oldest = self._transfers.popleft() if self._transfers else None
        if oldest is None:
            return
        batch, pinned, arrived = oldest
        arrived.synchronize()
        batch.put_into(store)
        self._free_buffers.append(pinned)


@frozen
class Rows:
    """The contiguous run of a request's rows from position `first` on: `hidden` (N, H), `aux` (N, A H) or None."""

    first: int
    hidden: Tensor
    aux: Tensor | None


Expected = Callable[[Sequence[str], Array], Floats | Array]
"""Expected lengths of these requests, whose rows end before these positions."""


class RowStore:
    """Stores each row of an opened request; a later row of the same position replaces it.

    Memory is reserved at the first rows, at most `max_bytes`, and touched only as it fills. Once the store is full,
    requests `expected` to stay shorter than the one that needs room lose all their rows (`lost`): the shortest first,
    no more than necessary. Where they do not have enough, the request that needs room loses its own rows, or is
    `skipped` if it has none yet. By default the requests with fewer rows are expected to stay shorter. `max_positions`
    is one more than the highest position.
    """

    def __init__(self, max_bytes: int, max_positions: int, expected: Expected = lambda request_ids, ends: ends):
        self.max_bytes = max_bytes
        self._expected = expected
        self.skipped = 0
        self.lost = 0
        self.peak_bytes = 0
        self._width = max_positions // PAGE + 1
        self._page_bytes = 0
        self.clear()

    def clear(self) -> None:
        """Drop every request, and release the memory."""
        self._slots: dict[str, int] = {}
        self._batch_ids: Sequence[str] = ()
        self._unused: list[int] = []
        self._spans = np.empty((4, 0), np.int64)
        self._table = np.empty((0, self._width), np.int64)
        self._add_slots()
        self._free: list[int] = []
        self._num_pages = self._num_touched = 0
        self._hidden: Tensor | None = None
        self._aux: Tensor | None = None

    def __len__(self) -> int:
        return len(self._slots)

    def open(self, request_id: str) -> None:
        """Store the rows of this request from now on."""
        self._slots.setdefault(request_id, _WAITS)
        self._batch_ids = ()

    def put(
        self, request_ids: Sequence[str], bounds: Array, positions: Array, hidden: Tensor, aux: Sequence[Tensor] | None
    ) -> None:
        """Store an iteration's rows: those of `request_ids[i]` are bounds[i] to bounds[i + 1], in order of position.

        `positions`, `hidden` (.., H) and each of `aux` (.., H) are on the host and may extend beyond the last bound.
        """
        if self._hidden is None:
            self._reserve(hidden, aux)
        slots = self._slots_of(request_ids)
        counts = np.diff(bounds)
        starts = positions[bounds[:-1]]
        ends = starts + counts
        first, end, _, high = self._spans[:, slots]
        # Odd is a request without a slot, one whose rows do not continue those before, and one that needs another page:
        # one of these numbers is negative then, and a bitwise OR is negative where any of its numbers is.
        odd = np.flatnonzero((slots | (starts - first) | (end - starts) | (high - ends)) < 0)
        if len(odd):
            for i in odd:
                self._settle(request_ids[i], int(starts[i]), int(ends[i]))
            slots = self._slots_of(request_ids)
            is_open = slots >= 0
            if not is_open.all():
                rows = np.flatnonzero(is_open.repeat(counts))
                source = torch.from_numpy(rows)
                positions, hidden, aux = positions[rows], hidden[source], [states[source] for states in aux or ()]
                slots, counts, ends = slots[is_open], counts[is_open], ends[is_open]
        self._spans[_END, slots] = ends
        num_rows = int(counts.sum())
        owners = slots if num_rows == len(slots) else slots.repeat(counts)
        into = self._rows(owners, positions[:num_rows])
        assert self._hidden is not None
        self._hidden.index_copy_(0, into, hidden[:num_rows])
        for layer, states in enumerate(aux or ()):
            assert self._aux is not None
            self._aux[:, layer].index_copy_(0, into, states[:num_rows])

    def close(self, request_id: str, num_rows: int = 0) -> Rows | None:
        """Drop a request and return its rows below position `num_rows`; None where some of the last are missing."""
        slot = self._slots.get(request_id, _UNKNOWN)
        rows = None
        if slot >= 0:
            first, end = self._spans[:_LOW, slot].tolist()
            if first < num_rows <= end:
                assert self._hidden is not None
                at = self._rows(slot, np.arange(first, num_rows))
                aux = self._aux.index_select(0, at).flatten(1) if self._aux is not None else None
                rows = Rows(first=first, hidden=self._hidden.index_select(0, at), aux=aux)
            elif num_rows:
                self.lost += 1
            self._drop(request_id)
        self._slots.pop(request_id, None)
        self._batch_ids = ()
        return rows

    def _slots_of(self, request_ids: Sequence[str]) -> Array:
        # Most iterations have the batch of the previous one.
        if request_ids != self._batch_ids:
            self._batch_ids = list(request_ids)
            self._batch_slots = np.array([self._slots.get(name, _UNKNOWN) for name in request_ids], np.int64)
        return self._batch_slots

    def _rows(self, slots: Array | int, positions: Array) -> Tensor:
        page, row = np.divmod(positions, PAGE)
        return torch.from_numpy(self._table[slots, page] * PAGE + row)

    def _reserve(self, hidden: Tensor, aux: Sequence[Tensor] | None) -> None:
        num_states = 1 + len(aux or ())
        self._page_bytes = PAGE * hidden.shape[1] * hidden.element_size() * num_states
        self._num_pages = self.max_bytes // self._page_bytes
        num_rows = self._num_pages * PAGE
        # Outside of inference mode, even if the caller is in it: slices of these tensors are trained on.
        with torch.inference_mode(False):
            self._hidden = torch.empty((num_rows, hidden.shape[1]), dtype=hidden.dtype)
            if aux:
                self._aux = torch.empty((num_rows, len(aux), aux[0].shape[1]), dtype=aux[0].dtype)

    def _settle(self, request_id: str, start: int, end: int) -> None:
        """Make room for rows from position `start` to before `end`, and note where the contiguous run begins."""
        slot = self._slots.get(request_id, _UNKNOWN)
        new = slot == _WAITS
        if new:
            if not self._unused:
                self._add_slots()
            slot = self._slots[request_id] = self._unused.pop()
            self._batch_ids = ()
            self._spans[:, slot] = start, start, start, start
        if slot < 0:
            return
        if not self._grow(slot, start, end, request_id):
            self._drop(request_id)
            self.skipped += new
            self.lost += not new
            return
        if start < self._spans[_FIRST, slot] or start > self._spans[_END, slot]:
            self._spans[_FIRST, slot] = start
        # The next request that needs room compares with this length.
        self._spans[_END, slot] = end

    def _grow(self, slot: int, start: int, end: int, request_id: str) -> bool:
        """Give the slot pages for positions from `start` to `end`; return False, and give none, without room."""
        low, high = self._spans[_LOW:, slot].tolist()
        low, high = min(start, low) // PAGE, -(-max(end, high) // PAGE)
        missing = low + np.flatnonzero(self._table[slot, low:high] < 0)
        surplus = len(missing) - len(self._free) - (self._num_pages - self._num_touched)
        if surplus > 0 and not self._make_room(surplus, request_id, end):
            return False
        self._table[slot, missing] = [self._page() for _ in missing]
        self._spans[_LOW:, slot] = low * PAGE, high * PAGE
        self.peak_bytes = max(self.peak_bytes, (self._num_touched - len(self._free)) * self._page_bytes)
        return True

    def _page(self) -> int:
        if self._free:
            return self._free.pop()
        self._num_touched += 1
        return self._num_touched - 1

    def _make_room(self, num_pages: int, request_id: str, end: int) -> bool:
        """Drop the fewest requests, expected to stay shorter, with `num_pages`; return False if they have fewer.

        O(requests), and each request is dropped only once.
        """
        names = [name for name, slot in self._slots.items() if slot >= 0 and name != request_id]
        slots = [self._slots[name] for name in names]
        ends = np.append(self._spans[_END, slots], end)
        # Requests with equal expectations are ordered by their length so far.
        lengths = list(zip(self._expected([*names, request_id], ends).tolist(), ends.tolist(), strict=True))
        shorter = sorted((length, name) for length, name in zip(lengths, names, strict=False) if length < lengths[-1])
        victims: list[str] = []
        while num_pages > 0 and len(victims) < len(shorter):
            victims.append(shorter[len(victims)][1])
            num_pages -= int((self._table[self._slots[victims[-1]]] >= 0).sum())
        if num_pages > 0:
            return False
        for name in victims:
            self._drop(name)
        self.lost += len(victims)
        return True

    def _drop(self, request_id: str) -> None:
        slot, self._slots[request_id] = self._slots[request_id], _DROPPED
        pages = self._table[slot]
        self._free += pages[pages >= 0].tolist()
        pages[:] = -1
        self._unused.append(slot)
        self._batch_ids = ()

    def _add_slots(self) -> None:
        before = len(self._table)
        more = max(before, 64)
        self._unused = list(range(before, before + more))[::-1]
        self._table = np.concatenate([self._table, np.full((more, self._width), -1, np.int64)])
        self._spans = np.concatenate([self._spans, np.zeros((4, more), np.int64)], axis=1)
