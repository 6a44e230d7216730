"""The trainer beside a worker, between a real coordinator and a real feed; only the engine is missing."""

import contextlib
import threading
import time
from dataclasses import replace

import pytest
import torch

from tltlab.coordination.machine import CoordinatorConfig
from tltlab.coordination.messages import Train
from tltlab.runtime.coordinator.sockets import CoordinatorServer
from tltlab.runtime.drafter.feed import FeedSender
from tltlab.runtime.drafter.group import RendezvousServer
from tltlab.runtime.drafter.worker import HELD_OUT, SpotTrainer, TrainerPlacement
from tltlab.runtime.recipe.drafter import DrafterConfig, OptimConfig

from ..small_models import until
from . import drafting_text as text
from .drafting_text import same

CONFIG = DrafterConfig(
    optim=OptimConfig(lr=3e-3),
    coordinator=CoordinatorConfig(yield_timeout_s=100.0, resend_s=0.1),
    tokens_per_update=128,
    checkpoint_every=5,
    ages=2,
    nice=0,
)


class Bench:
    """Worker 0 always generates; the trainers of the others are threads of this process."""

    def __init__(self, folder, sockets):
        self.folder, self.sockets = folder, sockets
        text.head(folder / "target").save(folder / "head")
        self.server = CoordinatorServer(CONFIG.coordinator, f"ipc://{sockets}/c", 3, self._kill)
        self.rendezvous = RendezvousServer()
        self.trainers = {}
        self.senders = {}
        self._threads = []
        self.status(0, 0, busy=True)

    def _kill(self, worker):
        raise AssertionError(f"worker {worker} did not yield")

    def add(self, worker, config=CONFIG):
        place = TrainerPlacement(
            worker=worker,
            coordinator=self.server.endpoint,
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
        self._threads.append(threading.Thread(target=trainer.run, daemon=True))
        self._threads[-1].start()
        self.trainers[worker] = trainer
        return trainer

    def status(self, worker, rl_step, *, busy):
        if worker not in self.senders:
            self.senders[worker] = FeedSender(f"ipc://{self.sockets}/f{worker}")
        self.senders[worker].status(rl_step, busy=busy)

    def teach(self, worker, sequences):
        trainer, num_before = self.trainers[worker], len(self.trainers[worker]._keys)
        for sequence in sequences:
            self.senders[worker].sequence(sequence)
        until(lambda: len(trainer._keys) == num_before + len(sequences))

    def taught(self, config=CONFIG, worker=1, some=None):
        """The trainer of a worker in rollout 0, with something to learn from."""
        trainer = self.add(worker, config)
        self.begin(0)
        self.teach(worker, sequences() if some is None else some)
        return trainer

    def begin(self, rl_step):
        """A rollout starts, and all trainers have heard of it."""
        self.server.rollout_started(rl_step)
        for worker, trainer in self.trainers.items():
            self.status(worker, rl_step, busy=True)
            until(lambda trainer=trainer: trainer._rl_step == rl_step)

    def trains(self, worker, rl_step, num_updates):
        """A worker runs out of requests, and its trainer has done so many updates at least."""
        self.status(worker, rl_step, busy=False)
        until(lambda: self.trainers[worker].num_updates() >= num_updates)

    def ends(self, rl_step):
        """The rollout ends, and nobody is waited for in vain; how long it waited."""
        waited = self.server.rollout_ended(rl_step)
        assert waited < CONFIG.coordinator.yield_timeout_s
        return waited

    def close(self):
        for trainer in self.trainers.values():
            trainer.close()
        for thread in self._threads:
            thread.join(120)
        for sender in self.senders.values():
            sender.close()
        self.server.close()
        self.rendezvous.close()
        assert not any(thread.is_alive() for thread in self._threads)


@pytest.fixture
def bench(tmp_path, sockets):
    bench = Bench(tmp_path, sockets)
    with contextlib.closing(bench):
        yield bench


def sequences(rl_step=0, number=24):
    return [text.sequence(100 * rl_step + n, rl_step=rl_step) for n in range(number)]


def test_an_idle_worker_trains_until_the_rollout_ends(bench):
    trainer = bench.taught()
    assert trainer.num_updates() == 0, "it trains while its engine generates"
    before = trainer.predicted()
    update, late = trainer.training.update, []

    def watched(*args, **kwargs):
        late.append(not isinstance(trainer._client.order, Train))
        return update(*args, **kwargs)

    trainer.training.update = watched
    bench.trains(1, 0, 30)
    waited = bench.ends(0)
    (row,) = trainer.take_rows()
    assert trainer.take_rows() == []
    assert (row["rl_step"], row["worker"], row["members"], row["ended"]) == (0, 1, 1, "stopped")
    assert row["updates"] == trainer.num_updates() >= 30
    assert row["tokens"] >= 100 * row["updates"]
    assert row["checkpoints"] == row["updates"] // 5 + (row["updates"] % 5 > 0)
    assert sum(late) <= 1, "the optimizer step under way was to be the last"
    assert 0 < row["yield_s"] <= waited
    assert row["train_s"] > 0
    assert row["setup_s"] + row["train_s"] + row["wait_s"] + row["blocked_s"] <= row["duration"]
    assert trainer.predicted()[0] > before[0] + 0.05
    done = trainer.num_updates()
    time.sleep(0.1)
    assert trainer.num_updates() == done


@pytest.mark.parametrize(("most", "ended"), [(0, "stopped"), (6, "declined")], ids=["requests", "updates"])
def test_requests_or_enough_updates_end_training(bench, most, ended):
    trainer = bench.taught(CONFIG.model_copy(update={"max_updates": most}) if most else CONFIG)
    bench.trains(1, 0, most or 3)
    if not most:
        bench.status(1, 0, busy=True)
    (row,) = until(trainer.take_rows)
    assert row["ended"] == ended
    assert row["updates"] == trainer.num_updates() >= (most or 3)
    assert not most or row["updates"] == most
    bench.ends(0)


def test_one_sequence_is_enough_to_train(bench):
    trainer = bench.taught(some=[])
    sample, empty = trainer.buffer.sample, threading.Event()

    def watched(*args):
        empty.set()
        return sample(*args)

    trainer.buffer.sample = watched
    bench.status(1, 0, busy=False)
    assert empty.wait(300)
    assert trainer.num_updates() == 0
    bench.teach(1, sequences(number=1))
    until(lambda: trainer.num_updates() >= 3)
    bench.ends(0)
    (row,) = trainer.take_rows()
    assert row["wait_s"] > 0
    assert row["tokens"] == 24 * row["updates"]
    assert trainer.predicted() == []
    assert all(torch.isfinite(value).all() for value in trainer.weights().values())


def test_states_not_finite_end_the_period_only(bench):
    broken = [replace(s, hidden=torch.full_like(s.hidden, torch.nan)) for s in sequences(number=16)]
    trainer = bench.taught(some=broken)
    good = trainer.weights()
    bench.status(1, 0, busy=False)
    (row,) = until(trainer.take_rows)
    assert row["ended"] == "failed"
    assert "not finite" in row["detail"]
    assert (row["updates"], trainer.num_updates(), trainer.training.skipped) == (0, 0, 3)
    assert same(trainer.weights(), good)
    assert trainer.predicted() == [], "the run has nothing new to serve"
    bench.ends(0)
    bench.begin(1)
    bench.begin(2)
    bench.teach(1, sequences(2))
    bench.trains(1, 2, 4)
    bench.ends(2)


def test_a_group_starts_from_its_furthest_member(bench):
    """The leader is the lowest worker, here one that has just started; what the other one has trained is kept."""
    old = bench.taught(worker=2)
    bench.trains(2, 0, 20)
    bench.ends(0)
    new = bench.add(1)
    before = old.num_updates()
    bench.begin(1)
    bench.teach(1, sequences(1))
    bench.trains(1, 1, 1)
    bench.status(2, 1, busy=False)
    until(lambda: new.num_updates() > before + 5)
    period = bench.server._state.period
    assert period.leader == 1
    bench.server.rollout_ended(1)
    assert same(new.state(), old.state())
    rows = [new.take_rows()[-1], old.take_rows()[-1]]
    assert [row["members"] for row in rows] == [2, 2]
    assert rows[1]["updates"] == old.num_updates() - before


def test_every_eighth_response_is_held_out(bench):
    trainer = bench.taught(some=sequences(number=2 * HELD_OUT))
    assert len(trainer.buffer) == 2 * HELD_OUT - 2
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
    some = [text.sequence(n, rows=24, prompt=10) for n in range(6 * HELD_OUT)]
    most = 3 * some[0].nbytes
    config = CONFIG.model_copy(update={"buffer": CONFIG.buffer.model_copy(update={"max_bytes": 8 * most})})
    trainer = bench.taught(config, some=some)
    assert 1 < len(trainer._heldout) <= 3
    assert 1 < len(trainer._prompts) <= 7
    assert trainer._prompt_bytes == sum(prompt.nbytes for prompt in trainer._prompts.values()) <= most


def test_others_continue_without_a_hanging_member(bench):
    # Members wait for one another half as long as the coordinator waits for them.
    soon = CONFIG.model_copy(update={"coordinator": CoordinatorConfig(yield_timeout_s=6.0)})
    here, hanging = bench.add(1, soon), bench.add(2, soon)
    bench.begin(0)
    for worker in (1, 2):
        bench.teach(worker, sequences())
        bench.status(worker, 0, busy=False)
    until(lambda: min(here.num_updates(), hanging.num_updates()) > 3)
    update, wakes = hanging.training.update, threading.Event()

    def late(*args, **kwargs):
        wakes.wait(400)
        return update(*args, **kwargs)

    hanging.training.update = late
    try:
        until(lambda: here.num_updates() > hanging.num_updates() + 5)
    finally:
        wakes.set()
    bench.server.rollout_ended(0)
    (row,) = here.take_rows()
    assert (row["ended"], row["members"]) == ("stopped", 2)
    assert "hangs" in row["detail"]
