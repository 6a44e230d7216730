"""The worker's side of the coordinator: what it reports, and which orders reach its trainer."""

import pytest

from tltlab.coordination.agent import Hold, WorkerAgent
from tltlab.coordination.messages import StopTraining, Train


def idle_agent(**settings):
    agent = WorkerAgent(worker=1, first_seq=1000, **settings)
    agent.requests(0, True, 0.0)
    agent.requests(0, False, 1.0)
    return agent


def train(seq=7, term=3, **changes):
    fields = {"worker": 1, "group": seq, "rl_step": 0, "leader": 1, "members": (1, 2), "incarnation": 1000}
    return Train(seq=seq, term=term, **(fields | changes))


def stop(seq=8, term=3):
    return StopTraining(worker=1, seq=seq, term=term)


def test_reports_are_sent_at_changes_and_repeated():
    agent = idle_agent(heartbeat_s=2.0)
    assert agent.requests(0, False, 1.5) == ()
    assert agent.wakeup_s == 3.0
    assert agent.tick(2.9) == ()
    assert len(agent.tick(3.0)) == 1
    assert agent.tick(3.1) == ()


def tell(agent, event, now):
    """A command, "failed", whether requests are left, or the term for which the trainer takes the device."""
    match event:
        case bool():
            return agent.requests(0, event, now)
        case "failed":
            return agent.failed(now)
        case int() | None:
            return agent.trainer(event, now)
    return agent.receive(event, now)


LARGER = train(seq=9, members=(1, 2, 0))


@pytest.mark.parametrize(
    ("events", "reported", "order", "held"),
    [
        pytest.param([train()], [(3, 7)], train(), None, id="an order is obeyed, the device counts as held"),
        pytest.param([train(worker=2)], [], Hold(), None, id="for another worker"),
        pytest.param([train(rl_step=1)], [(None, 7)], Hold(), None, id="for another rollout"),
        pytest.param([train(incarnation=999)], [(None, 7)], Hold(), None, id="for an earlier process"),
        pytest.param([train(seq=0)], [(None, 0)], Hold(), None, id="already handled"),
        pytest.param([stop(seq=5, term=4), train()], [(None, 7)], Hold(), None, id="of an older term"),
        pytest.param([True, train()], [(None, 7)], Hold(), None, id="to a busy worker"),
        pytest.param([train(), train()], [(3, 7)], train(), None, id="a doubled order is acknowledged again"),
        pytest.param([train(), stop(9), train(8)], [(None, 9)], Hold(), None, id="an older order undoes no stop"),
        pytest.param([train(), 3, stop()], [(3, 8)], Hold(), 3, id="a stopped trainer still holds the device"),
        pytest.param([train(), 3, stop(), None], [(None, 8)], Hold(), None, id="until it gives it back"),
        pytest.param([train(), stop(), 3], [], Hold(), None, id="a late trainer does not get the device"),
        pytest.param([train(), 3, True], [(3, 7)], Hold(), 3, id="requests take the device back"),
        pytest.param([train(), 3, LARGER], [(3, 9)], LARGER, 3, id="a trainer learns of a changed group"),
        pytest.param([train(), 3, stop(), train(9, 4)], [(3, 9)], Hold(), 3, id="who yields is not started again"),
        pytest.param([train(), "failed"], [(None, 7)], Hold(), None, id="failed before it took the device"),
        pytest.param([train(), 3, "failed"], [(None, 7)], Hold(), None, id="failed with the device"),
        pytest.param([train(), 3, None], [(None, 7)], Hold(), None, id="a trainer that ends gives the order up"),
    ],
)
def test_what_a_worker_reports_obeys_and_holds(events, reported, order, held):
    agent, reports = idle_agent(), ()
    for now, event in enumerate(events, 2):
        reports = tell(agent, event, now)
    assert [(report.term, report.acked) for report in reports] == reported
    assert all(report.busy is any(event is True for event in events) for report in reports)
    assert (agent.order, agent.held) == (order, held)


def test_a_new_rollout_ends_the_last_ones_order():
    agent = idle_agent()
    agent.receive(train(), 2.0)
    (report,) = agent.requests(1, False, 3.0)
    assert (report.rl_step, report.term, agent.order) == (1, None, Hold())
    assert agent.requests(0, True, 4.0) == ()
