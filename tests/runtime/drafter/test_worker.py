"""The trainer beside a worker, between the coordinator's orders and a real feed; only the engine is missing."""

import contextlib
import math
import threading
import time
from dataclasses import replace

import pytest
import torch

from tltlab.coordination.machine import (
    CoordinatorConfig,
    CoordinatorState,
    Released,
    RolloutEnded,
    RolloutStarted,
    StopTraining,
    Train,
    TrainerFreed,
    TrainerReady,
    WorkerIdle,
    WorkerState,
    advance,
)
from tltlab.runtime.drafter.feed import SequenceSender
from tltlab.runtime.drafter.group import RendezvousServer
from tltlab.runtime.drafter.training import pooled
from tltlab.runtime.drafter.worker import SpotTrainer, TrainerPlacement
from tltlab.runtime.recipe.drafter import DrafterConfig, OptimConfig

from ..small_models import until
from . import drafting_text as text
from .drafting_text import same

CONFIG = DrafterConfig(
    optim=OptimConfig(lr=3e-3),
    coordinator=CoordinatorConfig(yield_timeout_s=100.0),
    tokens_per_update=128,
    checkpoint_every=5,
    ages=2,
    nice=0,
)


class Bench:
    """Worker 0 always generates; the trainers of the others are of this process, and calls to them are threads."""

    def __init__(self, folder, sockets):
        self.folder, self.sockets = folder, sockets
        text.head(folder / "target").save(folder / "head")
        self.rendezvous = RendezvousServer()
        self.trainers = {}
        self.senders = {}
        self.state = CoordinatorState(config=CONFIG.coordinator, workers={0: WorkerState()})
        self.released, self.rl_step = 0, -1
        self._lock = threading.RLock()
        self._periods = set()
        self._threads = []

    def add(self, worker, config=CONFIG):
        place = TrainerPlacement(
            worker=worker,
            feed=f"ipc://{self.sockets}/f{worker}",
            folder=self.folder / f"worker-{worker}",
            rendezvous=self.rendezvous.address,
            head=self.folder / "head",
            seed=0,
            max_depth=4,
            temperature=1.0,
        )
        trainer = SpotTrainer(place, config)
        trainer.start(text.frozen(), None, 0)
        self._start(trainer.run)
        self.trainers[worker] = trainer
        self.senders[worker] = SequenceSender(place.feed)
        self.tell(TrainerReady(worker=worker))
        return trainer

    def _start(self, work, *args):
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def tell(self, event):
        with self._lock:
            self.state, commands = advance(self.state, event, time.perf_counter())
            for command in commands:
                match command:
                    case Released():
                        self.released += 1
                    case Train() if (command.worker, command.term) not in self._periods:
                        self._periods.add((command.worker, command.term))
                        self._start(self._train, command)
                    case _:
                        self.trainers[command.worker].order(command)

    def _train(self, order):
        self.trainers[order.worker].train(order)
        self.tell(TrainerFreed(worker=order.worker))

    def teach(self, worker, sequences):
        trainer, num_before = self.trainers[worker], len(self.trainers[worker]._keys)
        for sequence in sequences:
            text.hand_over(self.senders[worker], sequence)
        until(lambda: len(trainer._keys) == num_before + len(sequences))

    def taught(self, config=CONFIG, worker=1, some=None):
        """The trainer of a worker in rollout 0, with something to learn from."""
        trainer = self.add(worker, config)
        self.begin(0)
        self.teach(worker, sequences() if some is None else some)
        return trainer

    def begin(self, rl_step):
        """A rollout starts."""
        self.rl_step = rl_step
        for trainer in self.trainers.values():
            trainer.begin(rl_step)
        self.tell(RolloutStarted(rl_step=rl_step))

    def idle(self, *workers):
        for worker in workers:
            self.tell(WorkerIdle(worker=worker))

    def trains(self, worker, num_updates):
        """A worker runs out of requests, and its trainer has done so many updates at least."""
        self.idle(worker)
        until(lambda: self.trainers[worker].training.updates >= num_updates)

    def ends(self):
        """The rollout ends, and nobody is waited for in vain; how long it waited."""
        begin, before = time.perf_counter(), self.released
        self.tell(RolloutEnded(rl_step=self.rl_step))
        until(lambda: self.released > before)
        return time.perf_counter() - begin

    def close(self):
        for trainer in self.trainers.values():
            trainer.close()
        for thread in self._threads:
            thread.join(120)
        self.rendezvous.close()
        assert not any(thread.is_alive() for thread in self._threads)


@pytest.fixture
def bench(tmp_path, sockets):
    bench = Bench(tmp_path, sockets)
    with contextlib.closing(bench):
        yield bench


def predicted(trainer):
    return pooled([trainer.training.predict(trainer._heldout)])


def sequences(rl_step=0, number=24):
    return [text.sequence(100 * rl_step + n, rl_step=rl_step) for n in range(number)]


def test_an_idle_worker_trains_until_the_rollout_ends(bench):
    trainer = bench.taught()
    assert trainer.training.updates == 0, "it trains while its engine generates"
    before = predicted(trainer)
    update, late = trainer.training.update, []

    def watched(*args, **kwargs):
        late.append(not isinstance(trainer._order, Train))
        return update(*args, **kwargs)

    trainer.training.update = watched
    bench.trains(1, 30)
    waited = bench.ends()
    report = trainer.report()
    (row,) = report.rows
    assert (report.updates, pooled([report.predicted])) == (row["updates"], predicted(trainer))
    assert trainer.report().rows == []
    assert (row["rl_step"], row["worker"], row["members"], row["ended"]) == (0, 1, 1, "stopped")
    assert row["updates"] == trainer.training.updates >= 30
    assert row["tokens"] >= 100 * row["updates"]
    assert row["checkpoints"] == row["updates"] // 5 + (row["updates"] % 5 > 0)
    assert sum(late) <= 1, "the optimizer step under way was to be the last"
    assert 0 < row["yield_s"] <= waited
    assert row["train_s"] > 0
    assert row["setup_s"] + row["train_s"] + row["wait_s"] + row["blocked_s"] <= row["duration"]
    assert predicted(trainer)[0] > before[0] + 0.05
    done = trainer.training.updates
    time.sleep(0.1)
    assert trainer.training.updates == done


def test_orders_that_overtake_or_repeat_one_another_train_once(bench):
    trainer = bench.taught()
    train = Train(worker=1, number=1, term=1, rl_step=0, members=(1, 2))
    trainer.order(StopTraining(worker=1, number=2))
    trainer.train(train)
    assert trainer._rows == [], "it was stopped before it began"
    alone = Train(worker=1, number=4, term=2, rl_step=0, members=(1,))
    trainer.order(alone)
    bench._start(trainer.train, replace(train, number=3, term=2))
    until(lambda: trainer.training.updates > 2)
    trainer.order(StopTraining(worker=1, number=5))
    trainer.train(alone)
    (row,) = trainer._rows
    assert (row["term"], row["members"]) == (2, 1), "the newest order of its term counts, and once"


def test_one_sequence_is_enough_to_train(bench):
    trainer = bench.taught(some=[])
    sample, empty = trainer.buffer.sample, threading.Event()

    def watched(*args):
        empty.set()
        return sample(*args)

    trainer.buffer.sample = watched
    bench.idle(1)
    assert empty.wait(300)
    assert trainer.training.updates == 0
    bench.teach(1, sequences(number=1))
    until(lambda: trainer.training.updates >= 3)
    bench.ends()
    (row,) = trainer._rows
    assert row["wait_s"] > 0
    assert row["tokens"] == 24 * row["updates"]
    assert predicted(trainer) == []
    assert all(torch.isfinite(value).all() for value in trainer.weights().values())


def test_states_not_finite_end_the_period_only(bench):
    broken = [replace(s, hidden=torch.full_like(s.hidden, torch.nan)) for s in sequences(number=16)]
    trainer = bench.taught(some=broken)
    good = trainer.weights()
    bench.idle(1)
    (row,) = until(lambda: trainer._rows)
    assert row["ended"] == "failed"
    assert "not finite" in row["detail"]
    assert (row["updates"], trainer.training.updates, trainer.training.skipped) == (0, 0, 3)
    assert same(trainer.weights(), good)
    assert not trainer.report().predicted.rows, "the run has nothing new to serve"
    bench.ends()
    bench.begin(1)
    bench.begin(2)
    bench.teach(1, sequences(2))
    bench.trains(1, 4)
    bench.ends()
    assert math.isfinite(trainer.report().predicted.chances[0])


def test_a_group_starts_from_its_furthest_member(bench):
    """The leader is the lowest worker, here one that has just started; what the other one has trained is kept."""
    old = bench.taught(worker=2)
    bench.trains(2, 20)
    bench.ends()
    new = bench.add(1)
    before = old.training.updates
    bench.begin(1)
    bench.teach(1, sequences(1))
    bench.trains(1, 1)
    bench.idle(2)
    until(lambda: new.training.updates > before + 5)
    assert bench.state.members == (1, 2)
    bench.ends()
    assert same(new.state(), old.state())
    rows = [new._rows[-1], old._rows[-1]]
    assert [row["members"] for row in rows] == [2, 2]
    assert rows[1]["updates"] == old.training.updates - before


def test_what_is_trained_on_anywhere_judges_nowhere(bench):
    """Samples of a prompt go to several workers, in any order, and come again in later RL steps."""
    trainers = [bench.add(worker) for worker in (1, 2)]
    for rl_step in range(3):
        some = [replace(text.sequence(n), key=(rl_step, f"p{n}", m, 0)) for n in range(64) for m in range(2)]
        for trainer, share in zip(trainers, (some, reversed(some)), strict=True):
            for each in share:
                trainer._on_sequence(each)
    trained = {each.key[1] for trainer in trainers for each in trainer.buffer.sequences()}
    judging = {each.key[1] for trainer in trainers for each in trainer._heldout}
    assert not trained & judging
    assert len(trained | judging) == 64
    assert 4 <= len(judging) <= 14


def test_drafters_of_several_ages_are_annotated(bench):
    trainer = bench.taught(some=sequences())
    for rl_step in (4, 5, 6):
        trainer.publish(None, rl_step)
    rows = trainer.annotate()
    assert len({(row["prompt_id"], row["sample"]) for row in rows}) == CONFIG.annotate
    assert {row["drafter_age"] for row in rows} == {-4, -5, -6}, "ages + 1 drafters are kept"
    assert all(len(row["accept_if_drafted"]) == 25 - 4 for row in rows)


def test_a_response_rolled_out_again_replaces_the_first(bench):
    first = sequences(number=2)
    trainer = bench.taught(some=first)
    trainer._on_sequence(replace(text.sequence(7, rows=20), key=first[0].key))
    assert (len(trainer._keys), len(trainer.buffer)) == (2, 2)
    lengths = {(row["prompt_id"], row["sample"]): len(row["accept_if_drafted"]) for row in trainer.annotate()}
    assert len(trainer._sample) == len(lengths) == 2
    assert lengths[first[0].key[1:3]] < lengths[first[1].key[1:3]]


def test_a_cached_prompts_states_come_from_a_sibling(bench):
    whole = text.sequence(5, rows=24, prompt=10)
    cached = replace(text.sequence(6, rows=20, prompt=2), key=(0, "p5", 1, 0), first_position=8)
    trainer = bench.taught(some=[whole, cached])
    joined = next(s for s in trainer.buffer._sequences.values() if s.key == cached.key)
    assert (joined.first_position, joined.prompt_tokens, joined.num_rows) == (0, 10, 28)
    assert torch.equal(joined.hidden[:8], whole.hidden[:8])
    assert torch.equal(joined.hidden[8:], cached.hidden)
    assert joined.token_ids.tolist() == whole.token_ids[:8].tolist() + cached.token_ids.tolist()
    (kept,) = trainer._prompts.values()
    assert kept.num_rows == 10, "the sibling's response is the buffer's"


def test_what_is_kept_beside_the_buffer_is_bounded(bench):
    some = [text.sequence(n, rows=24, prompt=10) for n in range(48)]
    most = 3 * some[0].nbytes
    config = CONFIG.model_copy(update={"buffer": CONFIG.buffer.model_copy(update={"max_bytes": 8 * most})})
    trainer = bench.taught(config, some=some)
    assert 1 < len(trainer._heldout) <= 3
    assert 1 < len(trainer._prompts) <= 7
    assert trainer._prompt_bytes == sum(prompt.nbytes for prompt in trainer._prompts.values()) <= most
