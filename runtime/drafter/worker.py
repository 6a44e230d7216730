"""The trainer next to one rollout worker: it fills its buffer while the engine generates, and trains while it is idle.

It holds the engine's device only within a call of `train`; ordered to stop, it finishes at most the optimizer step
under way. A failure here ends the training period, never the rollout.
"""

import copy
import os
import shutil
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from pickle import UnpicklingError

import numpy as np
import ray
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tltlab.coordination.machine import StopTraining, Train
from tltlab.errors import ConfigError, RunError, disk_full, one_line
from tltlab.files import new_file
from tltlab.records import Fields, Json, frozen
from tltlab.runtime.recipe.drafter import BufferConfig, DrafterConfig
from tltlab.runtime.run.memory import ProcessMemory, tensor_bytes
from tltlab.traces.schema import key_columns

from .feed import SequenceReceiver
from .group import LOOPBACK, DrafterGroup, GroupLost, gather, rendezvous_store
from .heads.head import DrafterHead
from .heads.layouts import load_head
from .heads.target import FrozenTarget, Tensors
from .offline.chains import kept_along
from .sequences import HELD_OUT, TrainingSequence, prompt_draw
from .training import UNKNOWN, Acceptance, HeadTraining, TrainingPeriod

POLL_S = 0.02
"""Seconds between checks of a trainer without data."""

MEET_S = 0.002
"""Seconds between checks of members about to meet: the device is held meanwhile."""

MOST_HELD_OUT = 32
"""Most held-out sequences kept, the newest."""

SETTLE_S = 2.0
"""Most seconds for an engine's sequences to arrive; later ones are not in the checkpoint."""

Row = Json

LONGEST = 0.5
"""Share of the sequences of earlier RL steps that count as their longest."""
SHORTEST_STRETCH = 32
"""Rows below which a sequence is not cut to fill an update: text without context is unlike real drafting."""


@frozen
class TrainerPlacement:
    """Placement of a trainer: its worker, the address of the engine's sequences, its folder and the head's.

    `rendezvous` is the address of the run's `RendezvousServer`, and members of a group find this one at `host`.
    """

    worker: int
    feed: str
    folder: Path
    rendezvous: str
    head: Path
    seed: int
    max_depth: int
    temperature: float
    host: str = LOOPBACK


@frozen
class TrainerReport:
    """A trainer's new `rows` of `spot_training`, errors of checkpoints, and the updates of its state in all.

    `predicted`: acceptance on responses to held-out prompts. `candidate` and `served`: the same on those of the newest
    policy alone, for this drafter and the one in service. Empty without data, or where the drafter was not trained
    since it was published.
    """

    rows: list[Row]
    failures: list[str]
    updates: int
    predicted: Acceptance = UNKNOWN
    candidate: Acceptance = UNKNOWN
    served: Acceptance = UNKNOWN


class SpotTrainer:
    """Buffer and drafter of one worker: `start` it, then `run` it until `close`.

    Made to be a Ray actor with several threads: `run` receives sequences in one of them, one of its own trains, another
    one takes orders meanwhile, such as that to stop, and the rest answer other calls.
    """

    def __init__(self, place: TrainerPlacement, config: DrafterConfig):
        # Engines that still generate have priority.
        os.nice(config.nice)
        torch.set_num_threads(config.threads)
        self.place, self.config = place, config
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.rng = np.random.default_rng([place.seed, place.worker])
        self.buffer = DataBuffer(config.buffer)
        self._lock = threading.Lock()
        self._data = threading.Lock()
        self._closed = threading.Event()
        self._device = threading.Lock()
        self._orders = threading.Lock()
        self._order: Train | StopTraining | None = None
        self._order_since = 0.0
        self._term = 0
        self._rl_step = -1
        self._began = time.perf_counter()
        self._sample: list[TrainingSequence] = []
        self._keys: set[tuple[int, str, int, int]] = set()
        self._heldout: deque[TrainingSequence] = deque(maxlen=MOST_HELD_OUT)
        self._prompts: OrderedDict[tuple[int, str], TrainingSequence] = OrderedDict()
        self._prompt_bytes = 0
        self._most_extra = config.buffer.extra_bytes
        self._published: OrderedDict[int, tuple[int, DrafterHead]] = OrderedDict()
        self._rows: list[Row] = []

    def start(
        self,
        target: FrozenTarget,
        state: Json | None = None,
        rl_step: int = 0,
        *,
        anew: bool = False,
        data: Path | None = None,
    ) -> int:
        """Load the head and listen to the engine; return the number of this process.

        From `rl_step` on the engines draft with `state`, None for the head as it is. Training continues from it, or
        from the newest checkpoint in the folder if that is further; with `anew` the folder is cleared first. `data` is
        a folder in which `save_data` may have left training data.
        """
        place, config = self.place, self.config
        if anew:
            shutil.rmtree(place.folder, ignore_errors=True)
        if data is not None and (path := data_path(data, place.worker)).exists():
            sequences, random_state = read_data(path)
            for sequence in sequences:
                self._keep(sequence)
            self.rng.bit_generator.state = random_state
        head = load_head(place.head)
        self.training = HeadTraining(
            head, target, config.loss, config.optim, self.device, temperature=place.temperature
        )
        self.publish(state, rl_step)
        self.checkpoint = DrafterCheckpoint(place.folder)
        saved = self.checkpoint.load()
        if saved is not None and int(saved["counters"][0]) >= self.training.updates:
            self.training.load_state_dict(saved)
        # Before a rollout waits for it.
        self.training.warm_up()
        # The folder may be missing on another machine than the driver's.
        Path(place.feed.removeprefix("ipc://")).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._feed = SequenceReceiver(place.feed, self._on_sequence)
        return os.getpid()

    def run(self) -> None:
        """Receive the engine's sequences until `close`, then end training and release everything."""
        try:
            self._feed.receive()
        finally:
            self._closed.set()
            with self._device:
                self.checkpoint.close()

    def close(self) -> None:
        """Make `run` end, after at most the optimizer step under way."""
        self._closed.set()
        self._feed.close()

    @ray.method(concurrency_group="orders")
    def ping(self) -> None:
        """Answer."""

    def begin(self, rl_step: int, rollout_s: float = 0.0) -> None:
        """Note that `rl_step` generates since `rollout_s` seconds."""
        with self._data:
            self._begin(rl_step, time.perf_counter() - rollout_s)

    @ray.method(concurrency_group="train")
    def train(self, order: Train) -> None:
        """Train in the group of `order` and in those that newer orders name; return once the device is free.

        At most once per term: a doubled call only waits.
        """
        self.order(order)
        with self._device:
            newest = self._order
            if not isinstance(newest, Train) or newest.term != order.term or order.term <= self._term:
                return
            self._term = order.term
            with self._data:
                self._begin(order.rl_step, time.perf_counter())
            self._period(newest)

    @ray.method(concurrency_group="orders")
    def order(self, order: Train | StopTraining) -> None:
        """Follow this order from the next pass on, unless a newer one has come before it."""
        with self._orders:
            if self._order is None or order.number > self._order.number:
                self._order, self._order_since = order, time.perf_counter()

    def publish(self, state: Json | None, rl_step: int) -> None:
        """Note that engines draft with this state from `rl_step` on, None for the state here; train on from it."""
        with self._lock:
            if state is not None:
                self.training.load_state_dict(state)
            self._updates_before = self.training.updates
            self._published[rl_step] = (self.training.updates, copy.deepcopy(self.training.head))
            while len(self._published) > self.config.ages + 1:
                self._published.popitem(last=False)

    def set_target(self, target: FrozenTarget) -> None:
        """Use the embedding and LM head of the target's new weights."""
        with self._lock:
            self.training.set_target(target)

    def report(self, compare: bool = False) -> TrainerReport:
        """Return what is new since the last report, and the drafter's measured acceptance if it was trained.

        With `compare` also that of the drafter in service.
        """
        failures = list(self.checkpoint.failures)
        del self.checkpoint.failures[: len(failures)]
        with self._data:
            rows, self._rows = self._rows, []
            heldout = [sequence for sequence in self._heldout if bool(sequence.hidden.isfinite().all())]
        newest = [sequence for sequence in heldout if sequence.rl_step == self._rl_step]
        report = TrainerReport(rows=rows, failures=failures, updates=self.training.updates)
        with self._lock:
            if report.updates == self._updates_before:
                return report
            report = replace(report, predicted=self.training.predict(heldout))
            if not compare:
                return report
            served = next(reversed(self._published.values()))[1]
            return replace(
                report, candidate=self.training.predict(newest), served=self.training.predict(newest, served)
            )

    def state(self) -> Json:
        """Return the last good training state, on the host."""
        with self._lock:
            return self.training.state_dict()

    def weights(self) -> dict[str, Tensor]:
        """Return the last good weights under the names that vLLM loads."""
        with self._lock:
            return self.training.head.serving_weights()

    def data_bytes(self) -> int:
        """Return the bytes that `save_data` would write."""
        with self._data:
            return self.buffer.nbytes + _nbytes(self._heldout)

    def save_data(self, folder: Path) -> None:
        """Write the training data into a checkpoint's folder, between two rollouts; nothing if there is none.

        The data are the buffer, the held-out sequences and the state of the generator that draws from them.
        """
        self._feed.settle(SETTLE_S)
        with self._data:
            sequences, random_state = [*self.buffer.sequences(), *self._heldout], self.rng.bit_generator.state
        if sequences:
            write_data(data_path(folder, self.place.worker), sequences, random_state)

    def memory(self) -> ProcessMemory:
        """Return the memory of this process."""
        with self._lock, self._data:
            published = [value for _, head in self._published.values() for value in head.parameters()]
            parts = self.training.held_bytes() | {
                "drafter, heads served": tensor_bytes(published),
                "drafter buffer": self.buffer.nbytes,
                "drafter, held out": _nbytes(self._heldout) + self._prompt_bytes,
            }
            return ProcessMemory.now("drafter trainer", self.place.worker, parts)

    def annotate(self) -> list[Row]:
        """Return rows of `acceptance` of a sample of this RL step's responses, for this drafter and older ones."""
        rows = []
        with self._data:
            sample = list(self._sample)
        with self._lock, torch.inference_mode(), self.training.autocast():
            for sequence in sample:
                if not sequence.prompt_tokens or sequence.first_position:
                    continue
                for published, (updates, head) in self._published.items():
                    kept = kept_along(head, self.training.frozen, sequence, self.place.max_depth)
                    rows.append(
                        key_columns(sequence.key)
                        | {
                            "drafter": self.config.name,
                            "drafter_age": sequence.rl_step - published,
                            "drafter_updates": updates,
                            "max_depth": self.place.max_depth,
                            "accept_if_drafted": kept.tolist(),
                        }
                    )
        return rows

    def _begin(self, rl_step: int, began: float) -> None:
        if rl_step > self._rl_step:
            self._rl_step, self._began = rl_step, began
            self._sample, self._keys = [], set()
            self._prompts.clear()
            self._prompt_bytes = 0
            self.buffer.begin(rl_step)

    def _on_sequence(self, sequence: TrainingSequence) -> None:
        with self._data:
            self._begin(sequence.rl_step, time.perf_counter())
            whole = self._with_prompt(sequence)
            if whole.key in self._keys:
                # Its worker failed in the rollout and repeated it: the later one is the response.
                self._sample = [whole if sampled.key == whole.key else sampled for sampled in self._sample]
                return
            self._keys.add(whole.key)
            self._keep(whole)
            # A uniform sample of the RL step's responses, for `annotate`.
            if len(self._sample) < self.config.annotate:
                self._sample.append(whole)
            elif (slot := int(self.rng.integers(len(self._keys)))) < self.config.annotate:
                self._sample[slot] = whole

    def _keep(self, sequence: TrainingSequence) -> None:
        if prompt_draw(sequence.key[1], self.place.seed) >= HELD_OUT:
            self.buffer.add(sequence)
            return
        self._heldout.append(sequence)
        while len(self._heldout) > 1 and _nbytes(self._heldout) > self._most_extra:
            self._heldout.popleft()

    def _with_prompt(self, sequence: TrainingSequence) -> TrainingSequence:
        """Prepend the states of the cached start of its prompt, computed by another sample, to a sequence."""
        prompt = sequence.key[:2]
        if sequence.first_position == 0:
            if prompt not in self._prompts:
                # A copy of its states: the buffer bounds the memory of the response's.
                rows = min(sequence.prompt_tokens, sequence.num_rows)
                self._prompts[prompt] = sequence.stretch(0, rows).on_host()
                self._prompt_bytes += self._prompts[prompt].nbytes
                while len(self._prompts) > 1 and self._prompt_bytes > self._most_extra:
                    self._prompt_bytes -= self._prompts.popitem(last=False)[1].nbytes
            return sequence
        sibling, start = self._prompts.get(prompt), sequence.first_position
        if sibling is None or sibling.num_rows < start:
            return sequence
        aux = None if sequence.aux is None or sibling.aux is None else torch.cat([sibling.aux[:start], sequence.aux])
        return TrainingSequence(
            key=sequence.key,
            token_ids=torch.cat([sibling.token_ids[:start], sequence.token_ids]),
            hidden=torch.cat([sibling.hidden[:start], sequence.hidden]),
            aux=aux,
            prompt_tokens=start + sequence.prompt_tokens,
        )

    def _period(self, order: Train) -> None:
        """Take part in the group of `order` and in those that follow under its term."""
        period = TrainingPeriod(rl_step=order.rl_step, term=order.term, began=time.perf_counter())
        try:
            next_order: Train | None = order
            while next_order is not None:
                next_order = self._in_group(next_order, period)
        except Exception as error:  # the rollout continues with the drafter it has
            period.ended, period.detail = "failed", f"{type(error).__name__}: {one_line(error)[:200]}"
        if period.unsaved:
            self._save(period)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        freed = time.perf_counter()
        stopped = period.ended == "stopped" and self._order_since > period.began
        period.yield_s = freed - self._order_since if stopped else None
        with self._data:
            self._rows.append(period.row(self.place.worker, self._began, freed))

    def _in_group(self, order: Train, period: TrainingPeriod) -> Train | None:
        """Train in one composition of the group; return the order for the next one, None at the end of the period."""
        begin = time.perf_counter()
        period.members = max(period.members, len(order.members))
        try:
            with self._meet(order) as group:
                if group is not None:
                    with self._lock:
                        self.training.share(group)
                period.setup_s += time.perf_counter() - begin
                self._train(order, group, period)
        except OrderWithdrawn:
            period.setup_s += time.perf_counter() - begin
        except GroupLost as error:
            period.detail = str(error)
            # Until the coordinator, which may take a lost member for alive for a while, has another order.
            self._train(order, None, period)
        # The next order of the same term, after the group has parted; without one the device is freed.
        deadline = time.perf_counter() + self.config.coordinator.yield_timeout_s
        while self._order is order and not self._closed.wait(MEET_S):
            if time.perf_counter() > deadline:
                raise RunError("its training group parted and the coordinator sent no order")
        next_order = self._order
        if self._closed.is_set() or not isinstance(next_order, Train) or next_order.term != order.term:
            return None
        return next_order

    def _train(self, order: Train, group: DrafterGroup | None, period: TrainingPeriod) -> None:
        """Update until this member, or another one, has to leave."""

        def must_yield() -> bool:
            return self._order is not order or self._closed.is_set()

        while True:
            leaves = must_yield()
            if leaves and group is None:
                return
            begin = time.perf_counter()
            with self._data:
                sequences = [] if leaves else self.buffer.sample(self.config.tokens_per_update, self.rng)
            if not sequences and group is None:
                self._closed.wait(POLL_S)
                period.wait_s += time.perf_counter() - begin
                continue
            with self._lock:
                report = self.training.update(sequences, group, leave=must_yield)
            period.train_s += time.perf_counter() - begin
            if report.tokens:
                period.learned(report)
                if order.leader == self.place.worker and period.unsaved >= self.config.checkpoint_every:
                    self._save(period)
            elif group is not None and not report.leave:
                # No member has data: do not spin.
                self._closed.wait(POLL_S)
            if report.leave:
                return

    @contextmanager
    def _meet(self, order: Train) -> Iterator[DrafterGroup | None]:
        """Form the group of an order, None for a member alone. Withdrawn if the order is withdrawn before."""
        if len(order.members) == 1:
            yield None
            return
        timeout_s = self.config.coordinator.yield_timeout_s / 2
        store = rendezvous_store(self.place.rendezvous, f"group-{order.number}", timeout_s)
        ranks = gather(
            store,
            self.place.worker,
            order.members,
            self.training.updates,
            lambda: self._order is not order or self._closed.wait(MEET_S),
        )
        if not ranks:
            raise OrderWithdrawn
        rank = ranks.index(self.place.worker)
        with DrafterGroup.join(store, rank, len(ranks), timeout_s, host=self.place.host) as group:
            yield group

    def _save(self, period: TrainingPeriod) -> None:
        """Save in the background; an error of the previous save is recorded, and training continues."""
        period.blocked_s += self.checkpoint.save(self.training.live_state())
        period.checkpoints += 1
        period.unsaved = 0


class OrderWithdrawn(Exception):
    """The order to train in a group was withdrawn before the group met."""


def _nbytes(sequences: Iterable[TrainingSequence]) -> int:
    return sum(sequence.nbytes for sequence in sequences)


class DataBuffer:
    """Sequences of the last RL steps, for one-step-off sampling (TLT, arXiv 2511.16665, section 4.2).

    During a rollout only its short responses are there; the long ones come from earlier RL steps. Over `max_bytes` the
    oldest RL step is dropped first, within a step the shortest sequences, since long ones are rare. A sequence larger
    than the whole buffer keeps its end. A sequence is not kept if nothing can be learned from it (no token of the
    response follows two states) or its RL step is too old.
    """

    def __init__(self, config: BufferConfig):
        self.config = config
        self.nbytes = 0
        """Bytes held, at most `max_bytes`."""
        self._sequences: dict[int, TrainingSequence] = {}
        self._used: set[int] = set()
        self._num_added = 0
        self._rl_step = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def sequences(self) -> list[TrainingSequence]:
        """Sequences in order of arrival: added to an empty buffer, they restore this one."""
        return list(self._sequences.values())

    def begin(self, rl_step: int) -> None:
        """Begin RL step `rl_step`: sequences of earlier ones are carried over, those that are too old dropped."""
        self._rl_step = rl_step
        self._used.clear()
        for number, sequence in list(self._sequences.items()):
            if self._too_old(sequence.rl_step):
                self._drop(number)

    def add(self, sequence: TrainingSequence) -> None:
        """Add a sequence, copied to the host if it is elsewhere or a view of something larger."""
        tensors = [t for t in (sequence.token_ids, sequence.hidden, sequence.aux) if t is not None]
        # One more token than rows: below 0 if not even a token fits.
        token = sequence.token_ids.element_size()
        most = (self.config.max_bytes - token) // sum(t[:1].nbytes for t in tensors)
        if most < sequence.num_rows:
            sequence = sequence.stretch(sequence.num_rows - max(most, 0), max(most, 0))
        if not sequence.teaches or self._too_old(sequence.rl_step):
            return
        self._sequences[self._num_added] = sequence = sequence.on_host()
        self._num_added += 1
        self.nbytes += sequence.nbytes
        held = self._sequences
        while self.nbytes > self.config.max_bytes:
            self._drop(min(held, key=lambda n: (held[n].rl_step, held[n].num_rows, n)))

    def sample(self, tokens: int, rng: np.random.Generator) -> list[TrainingSequence]:
        """Return sequences of at most `tokens` rows in all, none twice; fewer rows only where no more are held.

        `carried_share` of the rows come from the longest half of the sequences of earlier RL steps, the rest from this
        RL step. A shortage on one side is filled from the other, and only a shortage on both from the shorter half.
        Each side is drawn from without replacement until it is used up, then anew. A sequence that does not fit in the
        remaining rows is cut to a random stretch, or skipped where they are few.
        """
        current = [n for n, s in self._sequences.items() if s.rl_step >= self._rl_step]
        earlier = [n for n, s in self._sequences.items() if s.rl_step < self._rl_step]
        earlier.sort(key=lambda n: -self._sequences[n].num_rows)
        longest = earlier[: int(np.ceil(LONGEST * len(earlier)))]
        carried = round(tokens * self.config.carried_share)
        drawn: dict[int, TrainingSequence] = {}
        lacking = self._draw(longest, carried, drawn, rng)
        lacking = self._draw(current, tokens - carried + lacking, drawn, rng)
        lacking = self._draw(longest, lacking, drawn, rng)
        self._draw(earlier, lacking, drawn, rng)
        return list(drawn.values())

    def _draw(
        self, side: Collection[int], room: int, drawn: dict[int, TrainingSequence], rng: np.random.Generator
    ) -> int:
        """Add sequences of one side to `drawn`; return the rows left unfilled."""
        shortest = max(2, min(SHORTEST_STRETCH, room))
        for _ in range(2):
            fresh = [n for n in side if n not in self._used]
            for n in rng.permutation(np.array(fresh, np.int64)).tolist():
                sequence = self._sequences[n]
                if sequence.num_rows > room:
                    if room < shortest:
                        continue
                    # At most half prompt where the response is long enough.
                    last = sequence.num_rows - room
                    first = min(max(0, sequence.prompt_tokens - room // 2), last)
                    sequence = sequence.stretch(int(rng.integers(first, last + 1)), room)
                self._used.add(n)
                drawn[n] = sequence
                room -= sequence.num_rows
            if room < 2 or any(n not in self._used for n in side):
                break
            self._used.difference_update(n for n in side if n not in drawn)
        return room

    def _too_old(self, rl_step: int) -> bool:
        return rl_step <= self._rl_step - self.config.rl_steps

    def _drop(self, number: int) -> None:
        self.nbytes -= self._sequences.pop(number).nbytes
        self._used.discard(number)


def data_path(folder: Path, worker: int) -> Path:
    """Path in a checkpoint's folder for the data of the trainer beside worker `worker`."""
    return folder / f"data-{worker}.pt"


def write_data(path: Path, sequences: Sequence[TrainingSequence], random_state: Fields) -> None:
    """Write a trainer's sequences and its generator's state atomically. RunError where the disk fails."""
    rows = [{field.name: getattr(sequence, field.name) for field in fields(sequence)} for sequence in sequences]
    try:
        with new_file(path) as new:
            torch.save((rows, random_state), new)
    except (OSError, RuntimeError) as error:
        cause = one_line(error)[:200]
        raise RunError(
            disk_full(error, path) or f"cannot write training data to {path}, is the disk full? ({cause})"
        ) from error


def read_data(path: Path) -> tuple[list[TrainingSequence], Fields]:
    """Read the result of `write_data`. ConfigError where the file is damaged."""
    try:
        rows, random_state = torch.load(path, weights_only=True)
        return [TrainingSequence(**row) for row in rows], random_state
    except (OSError, RuntimeError, UnpicklingError, ValueError, TypeError) as error:
        cause = one_line(error)[:200]
        raise ConfigError(f"{path} does not hold training data of a drafter: {cause}") from error


class DrafterCheckpoint:
    """The state of a trainer in a file of `folder`, for the process that replaces it in the same run.

    As in TLT (arXiv 2511.16665, Fig. 17) it has only trained tensors. A save copies the state into buffers on the host,
    which stay from save to save, and a thread writes them while training continues; the file is replaced when it is
    complete. Nothing is synced to disk: a run that continues after the machine has gone begins with its own checkpoint.
    A save that fails stops nothing: its error goes to `failures`, and the file before it stays.

    >>> saved = DrafterCheckpoint("run/drafter")                                                    # doctest: +SKIP
    >>> saved.save(training.live_state())                                                           # doctest: +SKIP
    0.0048
    """

    def __init__(self, folder: str | Path):
        self.path = Path(folder) / "state.safetensors"
        self.failures: list[str] = []
        self._staged: dict[str, Tensor] = {}
        self._thread = ThreadPoolExecutor(1, "tltlab-checkpoint")
        self._writing: Future[None] | None = None

    def save(self, state: Tensors) -> float:
        """Save tensors by name; return the seconds for which the caller was blocked.

        Waits for a save still under way.
        """
        began = time.perf_counter()
        self.finish()
        try:
            for name, value in state.items():
                if name not in self._staged:
                    self._staged[name] = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
                self._staged[name].copy_(value, non_blocking=value.is_cuda)
            if any(value.is_cuda for value in state.values()):
                torch.cuda.synchronize()
        except RuntimeError as error:
            self._failed("not saved, the one before it stays", error)
        else:
            self._writing = self._thread.submit(self._write)
        return time.perf_counter() - began

    def finish(self) -> None:
        """Wait until the last save is written, or has failed."""
        writing, self._writing = self._writing, None
        if writing is not None and (error := writing.exception()) is not None:
            self._failed("not saved, the one before it stays", error)

    def load(self) -> dict[str, Tensor] | None:
        """Return the state in the file; None where there is none that can be read, whose error goes to `failures`."""
        self.finish()
        if self.path.exists():
            try:
                return load_file(self.path)
            except (OSError, SafetensorError) as error:
                self._failed("cannot be read", error)
        return None

    def close(self) -> None:
        """Wait for the save under way and release the buffers."""
        self.finish()
        self._thread.shutdown()
        self._staged = {}

    def _write(self) -> None:
        with new_file(self.path) as new:
            save_file(self._staged, new)

    def _failed(self, what: str, error: BaseException) -> None:
        self.failures.append(f"{self.path}: {what}: {type(error).__name__}: {one_line(error)[:400]}")
