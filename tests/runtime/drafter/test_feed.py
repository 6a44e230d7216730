"""What an engine hands to its trainer, and what happens where one of them is not there."""

import threading
import time
from itertools import product

import pytest
import torch

from tltlab.runtime.drafter.feed import SequenceReceiver, SequenceSender
from tltlab.runtime.drafter.sequences import TrainingSequence

from ..small_models import until
from . import drafting_text as text


class Heard:
    """A trainer's end that keeps what it hears, until `close`."""

    def __init__(self, endpoint, on_sequence=None):
        self.sequences = []
        self.failure = None
        self.feed = SequenceReceiver(endpoint, on_sequence or self.sequences.append)
        self.thread = threading.Thread(target=self._receive, daemon=True)
        self.thread.start()

    def _receive(self):
        try:
            self.feed.receive()
        except RuntimeError as failure:
            self.failure = failure

    def close(self):
        self.feed.close()
        self.thread.join(300)


@pytest.fixture
def endpoint(sockets):
    return f"ipc://{sockets}/feed"


@pytest.fixture
def sender(endpoint):
    return SequenceSender(endpoint)


def connect(sender, heard):
    """Send until a sequence arrives: those sent before the connection are dropped."""

    def arrived():
        sender.sequence(text.sequence(1))
        return heard.sequences

    until(arrived)
    assert heard.feed.settle(300)
    heard.sequences.clear()


@pytest.fixture
def heard(endpoint, sender):
    """A trainer's end that is connected."""
    heard = Heard(endpoint)
    connect(sender, heard)
    yield heard
    heard.close()


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
    assert len(heard.sequences) == 1, "one without states is not sent"


def test_without_a_trainer_everything_is_dropped(endpoint, sender):
    begin = time.monotonic()
    sequence = text.sequence(1)
    for _ in range(2000):
        sender.sequence(sequence)
    assert time.monotonic() - begin < 120.0
    assert sender.dropped == 2000
    # A trainer that is started again listens at the same address.
    for _ in range(2):
        heard = Heard(endpoint)
        connect(sender, heard)
        heard.close()


def test_a_trainer_that_hangs_holds_nobody_up(endpoint, sender):
    """Sequences beyond those that may wait are dropped."""
    hangs, goes_on, got = threading.Event(), threading.Event(), []

    def hang(sequence):
        got.append(sequence)
        hangs.set()
        goes_on.wait()

    heard = Heard(endpoint, hang)
    large = TrainingSequence(key=(0, "p", 0, 0), token_ids=torch.zeros(2001), hidden=torch.zeros(2000, 64))
    until(lambda: sender.sequence(large) or hangs.is_set())
    before, begin = sender.dropped, time.monotonic()
    for _ in range(1500):
        sender.sequence(large)
    assert time.monotonic() - begin < 300, "who waits for a trainer that hangs waits for ever"
    assert sender.dropped - before > 500
    assert not heard.feed.settle(0.3), "what was handed over is still to be dealt with"
    goes_on.set()
    assert heard.feed.settle(300)
    assert len(got) > 1
    heard.close()


def test_a_listener_that_fails_reports_it(endpoint, sender):
    def fail(sequence):
        raise RuntimeError("no room")

    heard = Heard(endpoint, fail)
    until(lambda: sender.sequence(text.sequence(1)) or heard.failure)
    assert "room" in str(heard.failure)
