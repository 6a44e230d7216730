"""Events that the worker coordinator receives, commands that it sends, and the rules that a worker keeps.

Messages may be lost, doubled and reordered, so each is complete: a report is the worker's whole state and a
command the whole of what its worker shall do, and the latest one wins.

A worker
- numbers its reports upwards, over restarts too (a clock in milliseconds serves as the first number), sends one at
  each change and after each command, and repeats itself, under a new number, as a heartbeat;
- handles a command once: one whose `seq` is not above `acked`, the highest it has handled, changes nothing;
- does not obey `Train` while it has requests, outside the rollout of `rl_step`, for an older term than the highest it
  received, or where it was meant for an earlier process of this worker: the report then acknowledges the command with
  `term` None;
- after `StopTraining` finishes at most the optimizer step under way, and reports `term` None once its device is free.

`agent.WorkerAgent` keeps them.
"""

from __future__ import annotations

from tltlab.records import frozen


@frozen
class WorkerReport:
    """Report of a worker on itself.

    `busy`: it has requests of RL step `rl_step` left. `term`: the training period for which a trainer holds its
    device, even if still being set up; None where the device is free of training. `acked`: the `seq` of the last
    command it handled. `incarnation`: the number of the first report of this worker's process, larger for each that
    replaces another.

    >>> WorkerReport(worker=3, seq=17, rl_step=0, busy=False).term is None
    True
    """

    worker: int
    seq: int
    rl_step: int
    busy: bool
    term: int | None = None
    acked: int = 0
    incarnation: int = 0


@frozen
class WorkerGone:
    """The process of this worker has ended; the supervisor of processes sends this event.

    A later report of that process brings the worker back: drop late reports, repeat this event, or set `gone_after_s`.
    """

    worker: int


@frozen
class RolloutStarted:
    """RL step `rl_step` generates from now on; every worker counts as busy until it reports otherwise."""

    rl_step: int


@frozen
class RolloutEnded:
    """RL step `rl_step` needs all devices; `Released` answers it, and answers it again when it is repeated."""

    rl_step: int


@frozen
class Tick:
    """Time has passed; due at `machine.wakeup_s`."""


Event = WorkerReport | WorkerGone | RolloutStarted | RolloutEnded | Tick


@frozen
class Train:
    """Be in this group: set it up, join it, or continue in it with other members from the next optimizer step on.

    `members` are in rank order, the leader first. `term` numbers the training period: a term has one leader. `group`
    numbers the composition, the same for all its members and larger at each change: enough to name their rendezvous by.
    `incarnation` identifies the process that the command is for.
    """

    worker: int
    seq: int
    term: int
    group: int
    rl_step: int
    leader: int
    members: tuple[int, ...]
    incarnation: int = 0


@frozen
class StopTraining:
    """Free the device of any training, of whatever term: save in the background and yield."""

    worker: int
    seq: int
    term: int


@frozen
class Kill:
    """End this worker's trainer by force, it did not yield in time; what it had not saved is lost.

    For what watches over processes, not for the worker; takes effect whether or not messages get through.
    """

    worker: int
    seq: int
    term: int


@frozen
class Released:
    """For the RL step's driver: its rollout has ended and no device trains the drafter."""

    rl_step: int


Command = Train | StopTraining | Kill | Released
