"""The worker's side of the coordinator: what it reports, and which orders reach its trainer."""

import pytest

from tltlab.coordination.agent import Hold, WorkerAgent
from tltlab.coordination.messages import StopTraining, Train


def idle_agent(first_seq=1000, **settings):
    agent = WorkerAgent(worker=1, first_seq=first_seq, **settings)
    agent.requests(0, True, 0.0)
    agent.requests(0, False, 1.0)
    return agent


def training_agent():
    """Its trainer has the device, for term 3."""
    agent = idle_agent()
    agent.receive(train(seq=7), 2.0)
    agent.trainer(3, 2.1)
    return agent


def train(seq=7, term=3, **changes):
    fields = {"worker": 1, "group": seq, "rl_step": 0, "leader": 1, "members": (1, 2), "incarnation": 1000}
    return Train(seq=seq, term=term, **(fields | changes))


def stop(seq=8, term=3):
    return StopTraining(worker=1, seq=seq, term=term)


def test_reports_are_numbered_upwards_from_the_process_number():
    agent = WorkerAgent(worker=1, first_seq=1000)
    reports = agent.requests(0, True, 0.0) + agent.requests(0, False, 1.0) + agent.tick(9.0)
    assert [(r.seq, r.incarnation, r.busy) for r in reports] == [
        (1000, 1000, True),
        (1001, 1000, False),
        (1002, 1000, False),
    ]


def test_a_report_is_sent_at_each_change_and_repeated_as_a_heartbeat():
    agent = idle_agent(heartbeat_s=2.0)
    assert agent.requests(0, False, 1.5) == ()
    assert agent.wakeup_s == 3.0
    assert agent.tick(2.9) == ()
    assert len(agent.tick(3.0)) == 1
    assert agent.tick(3.1) == ()


def test_an_order_to_train_is_obeyed_and_the_device_counts_as_held_from_then_on():
    agent = idle_agent()
    (report,) = agent.receive(train(), 2.0)
    assert (report.term, report.acked) == (3, 7)
    assert agent.order == train()
    assert agent.held is None


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(train(worker=2), id="for another worker"),
        pytest.param(train(rl_step=1), id="for another rollout"),
        pytest.param(train(incarnation=999), id="for an earlier process of this worker"),
        pytest.param(train(seq=0), id="already handled"),
    ],
)
def test_an_order_that_is_not_for_it_changes_nothing(command):
    agent = idle_agent()
    assert all(report.term is None for report in agent.receive(command, 2.0))
    assert agent.order == Hold()


@pytest.mark.parametrize("why", ["older term", "busy"])
def test_an_order_of_an_older_term_or_to_a_busy_worker_is_not_obeyed(why):
    agent = idle_agent()
    if why == "busy":
        agent.requests(0, True, 2.0)
    else:
        agent.receive(stop(seq=5, term=4), 2.0)
    (report,) = agent.receive(train(seq=7, term=3), 3.0)
    assert (report.term, report.acked, agent.order) == (None, 7, Hold())


def test_a_doubled_order_is_acknowledged_again_and_an_older_one_does_not_undo_a_stop():
    agent = idle_agent()
    first = agent.receive(train(seq=7), 2.0)
    second = agent.receive(train(seq=7), 2.1)
    assert (first[0].term, first[0].acked) == (second[0].term, second[0].acked) == (3, 7)
    agent.receive(stop(seq=9), 3.0)
    (report,) = agent.receive(train(seq=8), 3.1)
    assert (report.term, report.acked, agent.order) == (None, 9, Hold())


def test_after_a_stop_the_device_is_reported_free_only_once_the_trainer_gave_it_back():
    agent = training_agent()
    (report,) = agent.receive(stop(), 3.0)
    assert (report.term, agent.order) == (3, Hold())
    (report,) = agent.trainer(None, 3.2)
    assert report.term is None


def test_a_trainer_that_comes_too_late_does_not_get_the_device():
    agent = idle_agent()
    agent.receive(train(), 2.0)
    agent.receive(stop(), 3.0)
    assert agent.trainer(3, 3.1) == ()
    assert agent.held is None


def test_requests_that_arrive_take_the_device_back_without_the_coordinator():
    agent = training_agent()
    (report,) = agent.requests(0, True, 3.0)
    assert (report.busy, report.term, agent.order) == (True, 3, Hold())


def test_a_new_rollout_ends_the_order_of_the_last_and_news_of_older_ones_is_ignored():
    agent = idle_agent()
    agent.receive(train(), 2.0)
    (report,) = agent.requests(1, False, 3.0)
    assert (report.rl_step, report.term, agent.order) == (1, None, Hold())
    assert agent.requests(0, True, 4.0) == ()


def test_a_change_of_the_group_reaches_a_trainer_that_is_at_work():
    agent = training_agent()
    agent.receive(train(seq=9, members=(1, 2, 0)), 3.0)
    assert (agent.order.group, agent.order.members, agent.held) == (9, (1, 2, 0), 3)


def test_a_trainer_that_still_yields_is_not_started_again():
    agent = training_agent()
    agent.receive(stop(seq=8), 3.0)
    (report,) = agent.receive(train(seq=9, term=4), 3.1)
    assert (report.term, report.acked, agent.order) == (3, 9, Hold())


@pytest.mark.parametrize("took_the_device", [True, False])
def test_a_trainer_that_fails_reports_a_free_device(took_the_device):
    agent = idle_agent()
    agent.receive(train(), 2.0)
    if took_the_device:
        agent.trainer(3, 2.1)
    (report,) = agent.failed(3.0)
    assert (report.term, agent.order, agent.held) == (None, Hold(), None)


def test_a_trainer_that_ends_by_itself_gives_the_order_up():
    agent = training_agent()
    agent.trainer(None, 3.0)
    assert agent.order == Hold()
