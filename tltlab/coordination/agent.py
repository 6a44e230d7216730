"""The worker's side of the worker coordinator, without its wires: what it reports and which order its trainer is under.

`WorkerAgent` keeps the rules of `messages`. The agent connects three parties. The engine reports if requests are left.
The coordinator sends commands. The trainer follows `order`, takes the device with `trainer(term)` before using it, and
returns it with `trainer(None)`.
"""

from __future__ import annotations

from tltlab.records import frozen

from .messages import StopTraining, Train, WorkerReport


@frozen
class Hold:
    """Do not train: finish at most the optimizer step under way, and give the device back."""


Order = Hold | Train


class WorkerAgent:
    """One process of worker `worker`; each method returns the reports to send, and none of them raises.

    `first_seq` numbers the process and its first report, and must be above every report number that an earlier process
    of this worker used: a clock in milliseconds serves. `now` is in seconds of any clock that does not go back. A
    report is sent at each change, and repeated `heartbeat_s` after the last one by `tick`.

    >>> agent = WorkerAgent(worker=1, first_seq=1000)
    >>> agent.requests(0, busy=False, now=5.0)[0].seq
    1000
    >>> train = Train(worker=1, seq=7, term=3, group=7, rl_step=0, leader=1, members=(1,), incarnation=1000)
    >>> agent.receive(train, now=5.1)[0].term
    3
    >>> agent.order == train
    True
    >>> agent.requests(0, busy=True, now=6.0)[0].term is None  # the trainer had not yet taken the device
    True
    >>> agent.order
    Hold()
    """

    def __init__(self, *, worker: int, first_seq: int, heartbeat_s: float = 1.0) -> None:
        self.worker, self.incarnation, self.heartbeat_s = worker, first_seq, heartbeat_s
        self.order: Order = Hold()
        self.held: int | None = None
        """The term for which the trainer has the device."""
        self.wakeup_s = 0.0
        """When the next `tick` is due."""
        self._seq = first_seq
        self._acked = 0
        self._highest_term = 0
        self._rl_step, self._busy = -1, False

    def requests(self, rl_step: int, busy: bool, now: float) -> tuple[WorkerReport, ...]:
        """Record whether requests of RL step `rl_step` are left, and update `order`. Older RL steps are ignored."""
        if rl_step < self._rl_step or (rl_step, busy) == (self._rl_step, self._busy):
            return ()
        if busy or rl_step > self._rl_step:
            self.order = Hold()
        self._rl_step, self._busy = rl_step, busy
        return self._report(now)

    def receive(self, command: Train | StopTraining, now: float) -> tuple[WorkerReport, ...]:
        """Handle a command and acknowledge it; an old or doubled one is only acknowledged again."""
        if command.worker != self.worker:
            return ()
        if command.seq > self._acked:
            self._acked = command.seq
            self.order = command if isinstance(command, Train) and self._can_obey(command) else Hold()
            self._highest_term = max(self._highest_term, command.term)
        return self._report(now)

    def trainer(self, term: int | None, now: float) -> tuple[WorkerReport, ...]:
        """Let the trainer take the device for `term`, or with None give it back; `held` is then the term that holds it.

        The trainer does not get the device if its order has changed in the meantime. A trainer that gives the device
        back while ordered to train has ended by itself: the coordinator starts no other one in this rollout.
        """
        if term == self.held:
            return ()
        if term is not None and not (self.held is None and isinstance(self.order, Train) and self.order.term == term):
            return ()
        self.held = term
        if term is not None:
            return ()
        self.order = Hold()
        return self._report(now)

    def failed(self, now: float) -> tuple[WorkerReport, ...]:
        """The trainer cannot follow its order, or broke; the device is free, and this rollout asks it no more.

        A collective operation that breaks because another member left is no failure of this one: an order follows.
        """
        self.held, self.order = None, Hold()
        return self._report(now)

    def tick(self, now: float) -> tuple[WorkerReport, ...]:
        """The heartbeat, where it is due."""
        return self._report(now) if now >= self.wakeup_s else ()

    def _can_obey(self, train: Train) -> bool:
        addressed = train.incarnation == self.incarnation and train.term >= self._highest_term
        idle = not self._busy and train.rl_step == self._rl_step
        # A trainer that still yields, of any term, has not freed its device.
        free = self.held is None or (isinstance(self.order, Train) and self.held == train.term)
        return addressed and idle and free

    def _report(self, now: float) -> tuple[WorkerReport, ...]:
        # A device that was promised counts as held: the trainer may take it any moment.
        promised = self.order.term if isinstance(self.order, Train) else None
        report = WorkerReport(
            worker=self.worker,
            seq=self._seq,
            rl_step=self._rl_step,
            busy=self._busy,
            term=promised if self.held is None else self.held,
            acked=self._acked,
            incarnation=self.incarnation,
        )
        self._seq += 1
        self.wakeup_s = now + self.heartbeat_s
        return (report,)
