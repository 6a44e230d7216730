"""The canary on a real engine: broken drafter weights cost speed, never a token, and never go unnoticed."""

import pytest

from tests.refused import refused
from tltlab.coordination.canary import CanaryConfig
from tltlab.errors import ConfigError, RunError

from .asking import fixed, requests, texts

pytestmark = pytest.mark.engine
LEARNED = fixed("learned")
WATCH = CanaryConfig(min_drafts=50)


@pytest.fixture
def engine(roomy, good):
    """The engine with its own weights on both sides, and a sound prediction."""
    roomy.guard_drafter(WATCH)
    roomy.update_draft_weights(good.items(), [0.95] * 4)
    yield roomy
    roomy.update_weights(good.items(), 0)
    roomy.update_draft_weights(good.items())


def generate(engine, policy=LEARNED, **more):
    engine.set_policy(policy)
    return engine.generate(requests(8, 100), rl_step=0, temperature=0.0, **more)


PLAIN = []


@pytest.fixture
def plain(engine):
    """What is said without drafts, by every engine of these weights."""
    if not PLAIN:
        PLAIN.extend(texts(generate(engine, None)))
        engine.forget()
    return PLAIN


def test_a_sound_drafter_is_found_fine_and_looked_at_after_a_wake(engine, plain):
    assert texts(generate(engine)) == plain
    report = engine.drafter_report()
    assert [verdict.kind for verdict in report.verdicts] == ["fine"]
    assert (report.drafter, report.serves, report.age) == ("learned", True, 0)
    assert min(chance or 0 for chance in report.measured) > 0.95
    assert report.positions["learned"].drafted[0] >= report.positions["learned"].drafted[3] > 100
    engine.sleep()
    engine.wake_up()
    assert texts(generate(engine)) == plain
    assert ["woke" in v.why for v in engine.drafter_report().verdicts] == [False, True]


def test_the_fallback_serves_once_it_collapses(engine, bad, good, plain):
    engine.update_draft_weights(bad.items(), [0.9] * 4)
    assert texts(generate(engine)) == plain
    report = engine.drafter_report()
    assert (report.trusted, report.serves) == (False, False)
    assert report.verdicts[-1].kind == "collapsed"
    assert "swap" in report.verdicts[-1].why
    assert report.positions["learned"].drafted[0] <= WATCH.min_drafts + 2 * 8
    assert report.positions["suffix"].drafted[0] > 100
    engine.update_draft_weights(good.items(), [0.95] * 4)
    assert texts(generate(engine)) == plain
    assert engine.drafter_report().serves


def test_what_no_training_predicted_is_compared_with_before(engine, bad, good, plain, capfd):
    for weights, collapsed in ((good, False), (bad, True)):
        engine.update_draft_weights(weights.items())
        assert texts(generate(engine)) == plain
        assert bool(engine.control.alarm.collapsed["learned"]) == collapsed
        assert ("learned has collapsed since new weights" in capfd.readouterr().err) == collapsed


def test_drafter_that_target_update_leaves_behind_is_found(engine, bad):
    generate(engine)
    engine.update_weights(bad.items(), 7)
    told = generate(engine, None)
    assert texts(generate(engine)) == texts(told)
    verdict = engine.drafter_report().verdicts[-1]
    assert verdict.kind == "collapsed"
    assert "weights 7" in verdict.why


def test_it_stops_where_told_to(engine, bad, good, plain):
    engine.guard_drafter(WATCH.model_copy(update={"on_collapse": "stop"}))
    engine.update_draft_weights(bad.items(), [0.9] * 4)
    for facts in (("worker 0", "collapsed", "50", "0.900"), ("collapsed",)):
        with refused(RunError, naming=facts):
            generate(engine)
        assert not engine.llm.llm_engine.has_unfinished_requests()
        assert engine.control.live == {}
    engine.update_draft_weights(good.items(), [0.9] * 4)
    assert texts(generate(engine)) == plain


def test_swapping_weights_loses_nothing(engine, bad, good, plain):
    """Bad weights after 5 iterations, good ones after 15: what is said stays, what is kept of the drafts changes."""
    iterations = 0

    def swap(ended):
        nonlocal iterations
        iterations += 1
        if iterations in (5, 15):
            engine.update_draft_weights((bad if iterations == 5 else good).items())
        return False

    rollout = generate(engine, until=swap)
    assert texts(rollout) == plain
    assert [response.finish_reason for response in rollout.responses] == ["length"] * 8
    kept = [row["num_accepted"] / max(row["num_drafted"], 1) for row in rollout.iterations.to_pylist()]
    assert min(kept[2:5]) > 0.9
    assert max(kept[7:15]) < 0.5
    assert max(kept[17:]) > 0.9


def test_a_broken_prediction_swaps_nothing(engine, bad, plain):
    updates = engine.drafter_report().updates
    with refused(ConfigError):
        engine.update_draft_weights(bad.items(), [float("nan")])
    generate(engine)
    report = engine.drafter_report()
    assert (report.updates, report.trusted) == (updates, True)
    assert report.measured[0] == 1.0
