"""The worker coordinator over real sockets: through a bad network, with processes that die, and with keys."""

import contextlib
import random
import threading
import time

import pytest
import zmq

from tests.refused import refused
from tltlab.coordination.agent import Hold
from tltlab.coordination.machine import CoordinatorConfig
from tltlab.coordination.messages import Kill, RolloutEnded, StopTraining, Train, WorkerReport
from tltlab.errors import ConfigError, RunError
from tltlab.runtime.coordinator import sockets as coordinator_thread
from tltlab.runtime.coordinator.keys import ClientKeys, check_endpoint, make_keys
from tltlab.runtime.coordinator.sockets import CoordinatorClient, CoordinatorServer
from tltlab.runtime.coordinator.wire import MAX_BYTES, encode

from ..small_models import until

REPORT = WorkerReport(worker=0, seq=1, rl_step=0, busy=True)


class Worker:
    """A client with a trainer that does optimizer steps of `step_s` while it is ordered to."""

    def __init__(self, endpoint, index, step_s=0.01, heartbeat_s=0.1, keys=None):
        self.client = CoordinatorClient(endpoint, index, keys, heartbeat_s=heartbeat_s)
        self.index, self.step_s, self.training, self.orders = index, step_s, False, []
        self.step_ends = threading.Event()
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def _train(self):
        with contextlib.suppress(RunError):
            while True:
                order = self.client.wait_for_order(5.0)
                if not isinstance(order, Train) or not self.client.trainer(order.term):
                    continue
                self.training = True
                while isinstance(now := self.client.order, Train) and now.term == order.term:
                    if not self.orders or self.orders[-1] != now:
                        self.orders.append(now)
                    self.step_ends.wait(self.step_s)
                self.training = False
                self.client.trainer(None)

    def close(self):
        self.client.close()
        self._thread.join()


class OpenServer(CoordinatorServer):
    """A server that keeps every event and command, and counts messages: heard, dropped as nobody's."""

    def __init__(self, *args, **options):
        self.messages, self.heard, self.dropped = [], 0, 0
        super().__init__(*args, **options)

    def _process(self, frames):
        before = self.heard
        super()._process(frames)
        self.dropped += self.heard == before

    def _advance(self, event):
        self.heard += isinstance(event, WorkerReport)
        self.messages.append(event)
        super()._advance(event)

    def _carry_out(self, commands):
        self.messages += commands
        super()._carry_out(commands)


class LossyServer(OpenServer):
    """Loses 30 % of all messages, in both directions, and doubles 20 %."""

    def __init__(self, *args, **options):
        self.rng, self.lost = random.Random(0), 0
        super().__init__(*args, **options)

    def _copies(self):
        drawn = self.rng.random()
        self.lost += drawn < 0.3
        return 0 if drawn < 0.3 else 2 if drawn < 0.5 else 1

    def _process(self, frames):
        for _ in range(self._copies()):
            super()._process(frames)

    def _send(self, *frames):
        for _ in range(self._copies()):
            super()._send(*frames)


@pytest.fixture
def cluster(sockets):
    """Makes a server and its workers; closes them afterwards."""
    with contextlib.ExitStack() as stack:

        def make(num_workers=4, kind=OpenServer, on_kill=print, **config):
            settings = {"yield_timeout_s": 100.0, "resend_s": 0.1} | config
            server = kind(CoordinatorConfig(**settings), f"ipc://{sockets}/c", num_workers, on_kill)
            stack.callback(server.close)
            workers = [Worker(server.endpoint, i) for i in range(num_workers)]
            for worker in workers:
                stack.callback(worker.close)
            return server, workers

        yield make


def train(server, workers, *indices, rl_step=0):
    """Begin a rollout in which these workers run out of requests; returns once they all train."""
    server.rollout_started(rl_step)
    for worker in workers:
        worker.client.requests(rl_step, True)
    for i in indices:
        workers[i].client.requests(rl_step, False)
    until(lambda: all(workers[i].training for i in indices))


def test_rollouts_go_through_a_lossy_network(cluster):
    server, workers = cluster(kind=LossyServer)
    waits = []
    while len(waits) < 6 or server.lost <= 20:
        rl_step = len(waits)
        train(server, workers, 3, 1, rl_step=rl_step)
        workers[2].client.requests(rl_step, False)
        workers[0].client.requests(rl_step, False)
        waits.append(server.rollout_ended(rl_step))
        assert not any(worker.training for worker in workers), "released while one trains"
    assert max(waits) < server.config.yield_timeout_s, "somebody was given up"
    orders = [order for worker in workers for order in worker.orders]
    assert {order.rl_step for order in orders} == set(range(len(waits)))
    assert len({(order.term, order.leader) for order in orders}) == len({order.term for order in orders})
    assert len({(order.group, order.members) for order in orders}) == len({order.group for order in orders})
    for worker in workers:
        terms = [order.term for order in worker.orders]
        assert terms == sorted(terms), "an older term was obeyed"


def test_workers_join_and_leave_a_period(cluster):
    server, workers = cluster()
    train(server, workers, 2)
    workers[1].client.requests(0, False)
    until(lambda: workers[1].training)
    assert server._state.period.members == (2, 1)
    workers[1].client.requests(0, True)
    until(lambda: not workers[1].training)
    until(lambda: not server.trains(1))
    assert server._state.period.members == (2,)
    assert (server.trains(2), server.term) == (True, server._state.period.term)
    server.rollout_ended(0)
    assert server._state.period is None
    assert not server.trains(2)
    assert list(dict.fromkeys(m.worker for m in server.messages if isinstance(m, StopTraining))) == [1, 2]


def test_heartbeats_continue_while_the_main_thread_works(cluster):
    server, workers = cluster(num_workers=2, gone_after_s=100.0)
    train(server, workers, 1)
    heard, end = server.heard, time.monotonic() + 300.0
    # Two workers, a heartbeat of each every 0.1 s.
    while server.heard < heard + 4:
        assert time.monotonic() < end, "nothing is heard"
        sum(i * i for i in range(1000))
    assert workers[1].training
    assert len({message.term for message in server.messages if isinstance(message, Train)}) == 1
    assert not [message for message in server.messages if isinstance(message, Kill)]


def test_a_changed_order_gives_no_device(cluster):
    server, _ = cluster(num_workers=0)
    client = CoordinatorClient(server.endpoint, 0)
    assert not client.trainer(3)
    assert client.order == Hold()
    assert client.trainer(None)
    client.close()
    with refused(RunError, naming=("closed",)):
        client.requests(0, True)


def test_a_lost_worker_ends_the_period_only(cluster):
    server, workers = cluster()
    train(server, workers, 0, 1, 2)
    first = server._state.period
    workers[1].close()
    server.worker_gone(1)
    until(lambda: (period := server._state.period) and period.term > first.term and len(period.members) == 2)
    with contextlib.closing(Worker(server.endpoint, 1)) as again:
        again.client.requests(0, False)
        until(lambda: again.training)
        assert server._state.period.members == (0, 2, 1), "its next process joins"
        server.rollout_ended(0)
        assert not any(worker.training for worker in (workers[0], workers[2], again))


def test_a_hanging_worker_is_waited_for_the_bound(cluster):
    killed = []
    server, workers = cluster(on_kill=killed.append, yield_timeout_s=2.0, gone_after_s=300.0)
    workers[2].step_s = 300.0
    train(server, workers, 0, 1, 2)
    assert 2.0 <= server.rollout_ended(0) < 62.0
    assert killed == [2]
    workers[2].step_ends.set()
    train(server, workers, 3, rl_step=1)


def test_bytes_that_are_no_message_are_counted(cluster):
    server, workers = cluster()
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(server.endpoint)
    bad = [b"", b"\xff" * 100, b"x" * (MAX_BYTES + 1), encode(REPORT), encode(StopTraining(worker=0, seq=1, term=1))]
    for data in bad:
        stranger.send(data)
    stranger.send_multipart([b"two", b"frames"])
    until(lambda: server.dropped == len(bad) + 1)
    context.destroy(linger=0)
    train(server, workers, 1)
    assert not [message for message in server.messages if message == REPORT], "only worker 0 may speak for worker 0"


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:*", "ipc://{}/c"])
def test_only_workers_with_their_own_key_are_heard(endpoint, sockets):
    keys, clients = make_keys(3)
    server = OpenServer(CoordinatorConfig(), endpoint.format(sockets), 3, print, keys)
    stranger = make_keys(1)[1][0]
    wrong = ClientKeys(public=stranger.public, secret=stranger.secret, server=keys.public)
    links = [
        CoordinatorClient(server.endpoint, 0, clients[0]),
        CoordinatorClient(server.endpoint, 1, wrong),
        CoordinatorClient(server.endpoint, 1),
        CoordinatorClient(server.endpoint, 2, clients[1]),
    ]
    until(lambda: server.heard and server.dropped)
    time.sleep(0.3)
    heard = {message.worker for message in server.messages if isinstance(message, WorkerReport)}
    assert heard == {0}, "no key, an unknown key, and another worker's key are not heard"
    for link in links:
        link.close()
    server.close()
    assert keys.secret.decode() not in repr(keys)


@pytest.mark.parametrize(
    ("endpoint", "refusal"),
    [
        *((endpoint, None) for endpoint in ("ipc:///tmp/x", "tcp://127.0.0.1:1", "tcp://localhost:1", "tcp://[::1]:1")),
        *((f"tcp://{host}:5555", (host, "CURVE")) for host in ("*", "10.0.0.1", "node7")),
        *((endpoint, ("ipc://PATH", "tcp://HOST:PORT")) for endpoint in ("inproc://here", "127.0.0.1:5555")),
    ],
)
def test_addresses_that_others_can_reach_need_keys(endpoint, refusal):
    if refusal is None:
        check_endpoint(endpoint, None)
        return
    with refused(ConfigError, naming=refusal):
        CoordinatorServer(CoordinatorConfig(), endpoint, 2, print)
    with refused(ConfigError, naming=refusal):
        CoordinatorClient(endpoint, 0)


def test_a_used_address_is_refused():
    server = CoordinatorServer(CoordinatorConfig(), "tcp://127.0.0.1:*", 2, print)
    with refused(RunError, naming=("tcp://127.0.0.1",)):
        CoordinatorServer(CoordinatorConfig(), server.endpoint, 2, print)
    server.close()


def test_a_failed_thread_is_reported(cluster):
    def cannot(worker):
        raise OSError("no such process")

    server, workers = cluster(on_kill=cannot, yield_timeout_s=0.3)
    workers[1].step_s = 60.0
    train(server, workers, 1)
    with refused(RunError, naming=("no such process",)):
        server.rollout_ended(0)
    with refused(RunError):
        server.rollout_started(1)
    workers[1].step_ends.set()


def test_a_hanging_server_is_left_behind(monkeypatch, cluster):
    monkeypatch.setattr(coordinator_thread, "_CLOSE_S", 0.2)
    goes_on, hangs = threading.Event(), threading.Event()

    def on_kill(worker):
        hangs.set()
        goes_on.wait(500)

    server, workers = cluster(on_kill=on_kill, yield_timeout_s=0.1)
    workers[1].step_s = 60.0
    train(server, workers, 1)
    server._tell(RolloutEnded(rl_step=0))
    assert hangs.wait(300)
    begin = time.perf_counter()
    server.close()
    assert time.perf_counter() - begin < 120.0
    with refused(RunError, naming=("closed",)):
        server.rollout_ended(0)
    workers[1].step_ends.set()
    goes_on.set()
    server._thread.join(300)
    assert not server._thread.is_alive()
