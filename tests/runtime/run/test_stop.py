"""Ctrl-C in a run: the first is a wish, the second an order, and so is the first where the RL step takes long."""

import os
import signal
import threading

import pytest

from tltlab.console import sigterm_handler
from tltlab.runtime.run import grpo
from tltlab.runtime.run.grpo import Stop

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True, params=[signal.SIG_DFL, signal.default_int_handler], ids=["notebook", "command"])
def sigterm(request):
    """SIGTERM's action by itself, and under our commands; a shell may have started the tests with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with sigterm_handler(request.param):
        yield
        assert signal.getsignal(signal.SIGTERM) == request.param
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def press():
    os.kill(os.getpid(), signal.SIGINT)


def test_first_is_wish_second_order():
    heard = threading.Event()

    def wait():
        assert not stopping.requested
        press()
        assert heard.wait(30)
        assert stopping.requested
        press()
        threading.Event().wait()

    with Stop(heard.set) as stopping, pytest.raises(KeyboardInterrupt):
        wait()


def test_a_long_rl_step_is_not_waited_for():
    with Stop(lambda: None) as stopping:
        stopping.due(grpo.STOP_S - 1)
        press()
    assert stopping.requested
    with Stop(lambda: None) as stopping:
        stopping.due(grpo.STOP_S + 60)
        with pytest.raises(KeyboardInterrupt):
            press()
    assert not stopping.requested


def test_step_that_takes_longer_than_thought_is_ended(monkeypatch):
    monkeypatch.setattr(grpo, "STOP_S", 0.01)

    def wait():
        press()
        threading.Event().wait()

    with Stop(lambda: None), pytest.raises(KeyboardInterrupt):
        wait()


def test_where_ctrl_c_is_ignored_it_stays_so():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Stop(lambda: None) as stopping:
            press()
        assert not stopping.requested
    finally:
        signal.signal(signal.SIGINT, before)
