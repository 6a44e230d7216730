"""What engine and trainer tell one another, and what happens where one of them is not there."""

import threading
import time
from itertools import product

import msgspec
import pytest
import torch
import zmq

from tests.refused import refused
from tltlab.runtime.drafter.feed import REPEAT_S, FeedReceiver, FeedSender
from tltlab.runtime.drafter.sequences import TrainingSequence

from ..small_models import until
from . import drafting_text as text


class Heard:
    """A trainer's end that keeps what it hears."""

    def __init__(self, endpoint):
        self.statuses = []
        self.sequences = []
        self.rollout_s = []
        self.feed = FeedReceiver(endpoint, self._on_status, self.sequences.append)

    def _on_status(self, rl_step, busy, rollout_s):
        self.statuses.append((rl_step, busy))
        self.rollout_s.append(rollout_s)


@pytest.fixture
def endpoint(sockets):
    return f"ipc://{sockets}/feed"


@pytest.fixture
def sender(endpoint):
    sender = FeedSender(endpoint)
    yield sender
    sender.close()


@pytest.fixture
def heard(endpoint, sender):
    """A trainer's end that is connected."""
    heard = Heard(endpoint)
    until(lambda: heard.statuses)
    yield heard
    heard.feed.close()


def test_a_sequence_arrives_bit_by_bit(heard, sender):
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for dtype, rows, with_aux in product(dtypes, (1, 24), (False, True)):
        hidden = torch.randn(rows, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
        one = torch.randn(rows, 24, generator=torch.Generator().manual_seed(2)).to(dtype) if with_aux else None
        sent = TrainingSequence(
            key=(3, "ä prompt", 2, 1),
            token_ids=torch.arange(rows + 1) * 7,
            hidden=hidden,
            aux=one,
            first_position=5,
            prompt_tokens=rows // 2,
        )
        sender.sequence(sent)
        until(lambda: heard.sequences)
        got = heard.sequences.pop()
        assert (got.key, got.first_position, got.prompt_tokens) == (sent.key, 5, rows // 2)
        assert got.token_ids.tolist() == sent.token_ids.tolist()
        assert got.hidden.dtype == dtype
        assert torch.equal(got.hidden, hidden)
        assert (got.aux is None) == (one is None)
        assert one is None or (got.aux is not None and torch.equal(got.aux, one))
    sender.sequence(TrainingSequence(key=(0, "p", 0, 0), token_ids=torch.zeros(1), hidden=torch.zeros(0, 64)))
    sender.sequence(text.sequence(1))
    until(lambda: heard.sequences)
    assert (len(heard.sequences), heard.feed.malformed) == (1, 0), "one without states is not sent"


def test_without_a_trainer_everything_is_dropped(endpoint, sender):
    begin = time.monotonic()
    sequence = text.sequence(1)
    for _ in range(2000):
        sender.sequence(sequence)
    sender.status(7, busy=True)
    assert time.monotonic() - begin < 120.0
    assert sender.dropped >= 2001
    began = time.monotonic()
    sender.status(8, busy=True)
    for busy in (True, False):
        sender.status(8, busy=busy)
        heard = Heard(endpoint)
        until(lambda heard=heard: heard.statuses)
        assert set(heard.statuses) == {(8, busy)}
        assert 0 <= time.monotonic() - began - heard.rollout_s[0] < 200.0
        assert heard.sequences == []
        heard.feed.close()


def test_a_trainer_that_hangs_holds_nobody_up(endpoint, sender):
    """Messages beyond what may wait are dropped; when it continues, what it hears last is how it stands."""
    hangs, goes_on = threading.Event(), threading.Event()
    statuses = []

    def hang(sequence):
        hangs.set()
        goes_on.wait()

    feed = FeedReceiver(endpoint, lambda *status: statuses.append(status[:2]), hang)
    until(lambda: statuses)
    large = TrainingSequence(key=(0, "p", 0, 0), token_ids=torch.zeros(2001), hidden=torch.zeros(2000, 64))
    begin = time.monotonic()
    for _ in range(1500):
        sender.sequence(large)
    assert time.monotonic() - begin < 300, "who waits for a trainer that hangs waits for ever"
    assert hangs.wait(300)
    assert sender.dropped > 500
    assert not feed.settle(0.3), "what was handed over is still to be dealt with"
    sender.status(4, busy=False)
    goes_on.set()
    until(lambda: statuses[-1] == (4, False))
    assert feed.settle(300)
    feed.close()


def test_a_status_never_overtakes_a_newer_one(heard, sender):
    for rl_step in range(500):
        sender.status(rl_step, busy=True)
        sender.status(rl_step, busy=False)
    until(lambda: heard.statuses[-1] == (499, False))
    time.sleep(2 * REPEAT_S)
    known = [(-1, True)] + [(rl_step, busy) for rl_step in range(500) for busy in (True, False)]
    places = [known.index(status) for status in heard.statuses]
    assert places == sorted(places)


def test_what_is_no_message_is_dropped_and_counted(endpoint):
    heard = Heard(endpoint)
    stranger = zmq.Context.instance().socket(zmq.PUSH)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(endpoint)
    header = {
        "type": "_Sequence", "key": [0, "p", 0, 0], "first_position": 0, "prompt_tokens": 1, "dtype": "torch.float32",
        "width": 4, "aux_width": 0,
    }  # fmt: skip
    tokens, hidden = torch.zeros(3, dtype=torch.int32).numpy().tobytes(), torch.zeros(2, 4).numpy().tobytes()
    bad = [
        [b"\xff\xff"],
        [msgspec.msgpack.encode({"type": "_Status", "rl_step": "zero", "busy": True, "rollout_s": 0.0})],
        [msgspec.msgpack.encode(header)],
        [msgspec.msgpack.encode(header), tokens],
        [msgspec.msgpack.encode(header), tokens, hidden[:-1]],
        [msgspec.msgpack.encode(header), tokens, hidden[:16]],
        [msgspec.msgpack.encode(header | {"dtype": "torch.float64"}), tokens, hidden],
        [msgspec.msgpack.encode(header | {"width": 0}), tokens, hidden],
        [msgspec.msgpack.encode(header | {"aux_width": 4}), tokens, hidden, hidden[:16]],
    ]
    for frames in bad:
        stranger.send_multipart(frames)
    stranger.send_multipart([msgspec.msgpack.encode(header), tokens, hidden])
    until(lambda: heard.sequences)
    assert heard.feed.malformed == len(bad)
    assert heard.statuses == []
    stranger.close()
    heard.feed.close()


def test_a_listener_that_fails_reports_it(endpoint, sender):
    def fail(sequence):
        raise RuntimeError("no room")

    statuses = []
    feed = FeedReceiver(endpoint, lambda rl_step, busy, rollout_s: statuses.append(busy), fail)
    until(lambda: statuses)
    feed.check()
    sender.sequence(text.sequence(1))
    until(lambda: not feed._thread.is_alive())
    with refused(RuntimeError, naming=("room",)):
        feed.check()
    feed.close()
