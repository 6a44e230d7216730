"""The canary: what it calls collapsed, how seldom it is wrong, and that it forgets nothing it must know."""

import json
import math
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from tests.refused import refused
from tltlab.coordination.canary import FALSE_ALARM, NUM_VERDICTS, Alarm, Canary, CanaryConfig, DraftCounts
from tltlab.errors import ConfigError

drafts = st.integers(1, 6).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted)))


def watching(predicted=0.8, **config):
    canary = Canary(CanaryConfig(**config))  # type: ignore[arg-type]
    canary.expect([predicted, predicted], "the swap")
    return canary


def play(canary, events):
    """The canary after so many drafts of which the first token is kept, or missed; a sync, a wake, a swap."""
    for event in events:
        kind, _, number = event.partition(" ")
        match kind:
            case "keep" | "miss":
                for _ in range(int(number or 1)):
                    canary.observe(2, int(kind == "keep"))
            case "swap":
                canary.expect([float(number)] * 2, event)
            case _:
                canary.reset(event, target_moved=kind == "sync")
    return canary


def kinds(canary):
    return [verdict.kind for verdict in canary.verdicts]


@given(st.lists(drafts))
def test_counts_per_position_are_those_of_every_draft(all_drafts):
    counts = DraftCounts()
    for drafted, kept in all_drafts:
        counts.add(drafted, kept)
    depth = max((drafted for drafted, _ in all_drafts), default=0)
    positions = counts.positions
    assert positions.drafted == tuple(sum(d > i for d, _ in all_drafts) for i in range(depth))
    assert positions.tried == tuple(sum(d > i and k >= i for d, k in all_drafts) for i in range(depth))
    assert positions.kept == tuple(sum(k > i for _, k in all_drafts) for i in range(depth))
    assert counts.first_kept == sum(k > 0 for _, k in all_drafts)
    assert DraftCounts(json.loads(json.dumps(counts.state_dict()))).positions == positions


COLLAPSED = ["swap 0.8", "miss 100", "sync", "wake", "keep 200"]


@pytest.mark.parametrize(
    ("events", "kinds", "trusted", "facts"),
    [
        (["swap 0.8", "keep 78", "miss 22"], ["fine"], True, ["0.780 of 100"]),
        (["swap 0.8", "keep 5", "miss 95"], ["collapsed"], False, ["0.050 of 100", "since swap 0.8", "stale weights"]),
        (["swap 0.8", "miss 99"], [], True, []),
        (["swap 0.04"], ["untrained"], False, ["0.040"]),
        (["swap 0.04", "miss 100"], ["untrained"], False, []),
        (["miss 500"], [], True, []),
        (COLLAPSED, ["collapsed"], False, []),
        ([*COLLAPSED, "swap 0.3"], ["collapsed"], True, []),
        ([*COLLAPSED, "swap 0.3", "keep 60", "miss 140"], ["collapsed", "fine"], True, []),
        (["swap 0.8", "keep 9000", "miss 1000", "wake", "miss 100"], ["fine", "collapsed"], False, ["wake"]),
    ],
)
def test_a_drafter_is_held_against_its_prediction(events, kinds, trusted, facts):
    canary = play(Canary(CanaryConfig(min_drafts=100)), events)
    assert [kind for kind, _ in groupby(verdict.kind for verdict in canary.verdicts)] == kinds
    assert canary.trusted == trusted
    assert (canary.collapsed is not None) == (not trusted and kinds[-1] == "collapsed")
    assert all(fact in canary.verdicts[-1].sentence for fact in facts)


def test_a_small_collapse_is_found_in_time():
    canary = watching(0.5, min_drafts=50)  # the bound is 0.25
    rng = np.random.default_rng(0)
    while canary.trusted:
        canary.observe(1, int(rng.random() < 0.15))
    assert kinds(canary) == ["fine", "collapsed"]
    assert 50 < canary.verdicts[-1].drafts <= 800


def test_moved_target_lowers_bound_and_wake_does_not():
    canary = watching(0.8, collapse=0.5, moved_target=0.1)
    canary.reset("a wake")
    assert canary.bound == pytest.approx(0.4)
    for _ in range(2):
        canary.reset("a weight sync", target_moved=True)
    assert canary.bound == pytest.approx(0.4 * 0.81)
    canary.expect([0.6], "the next swap")
    assert canary.bound == pytest.approx(0.3)


@pytest.mark.parametrize("chance", [math.nan, -0.1, 1.1, math.inf])
def test_a_number_that_is_no_probability_is_refused(chance):
    canary = watching(0.8)
    with refused(ConfigError, naming=("1",)):
        canary.expect([0.5, chance], "a broken training")
    assert canary.predicted == (0.8, 0.8)


@pytest.mark.parametrize(("predicted", "min_drafts"), [(0.8, 50), (0.4, 100), (1.0, 200), (0.25, 100)])
def test_a_drafter_at_the_bound_is_seldom_wronged(predicted, min_drafts):
    """Exact: the distribution of kept tokens from look to look, those that were judged collapsed taken out."""
    bound, alive, drafts = 0.5 * predicted, np.ones(1), 0
    for look in range(7):
        more = min_drafts * 2**look - drafts
        drafts += more
        alive = np.convolve(alive, binom.pmf(np.arange(more + 1), more, bound))
        worst = binom.cdf(np.arange(drafts + 1), drafts, bound) <= FALSE_ALARM / 2 ** (look + 1)
        alive[worst] = 0.0
        most = int(worst.sum()) - 1
        if look < 3:
            assert most >= 0, "the test needs a number of kept tokens that counts as collapsed"
            # Those kept come first, so that earlier looks find nothing.
            for kept, trusted in ((most, False), (most + 1, True)):
                canary = watching(predicted, min_drafts=min_drafts)
                assert play(canary, [f"keep {kept}", f"miss {drafts - kept}"]).trusted == trusted
    assert 0 < 1 - alive.sum() <= FALSE_ALARM


def test_no_window_of_a_sound_drafter_collapses():
    """Drafts of one request have one chance, spread widely about the prediction: they are not independent."""
    rng = np.random.default_rng(1)
    for predicted in (0.3, 0.6, 0.9):
        canary = watching(predicted, min_drafts=100)
        for window in range(60):
            canary.reset(f"window {window}")
            for chance in rng.beta(4 * predicted, 4 * (1 - predicted), size=16):
                for kept in rng.random(50) < chance:
                    canary.observe(1, int(kept))
        assert set(kinds(canary)) == {"fine"}


@given(
    st.lists(st.sampled_from(["keep", "miss", "sync", "wake", "swap 0.9", "swap 0.01"]), min_size=1, max_size=200),
    st.integers(0, 200),
)
def test_a_state_taken_at_any_time_continues(events, split):
    config = CanaryConfig(min_drafts=5)
    whole, first, second = Canary(config), Canary(config), Canary(config)
    play(whole, events)
    play(first, events[:split])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    play(second, events[split:])
    assert second.state_dict() == whole.state_dict()


def test_it_keeps_only_the_newest_verdicts():
    canary = watching(min_drafts=1)
    for window in range(100):
        canary.reset(f"window {window}")
        canary.observe(1, 1)
    assert len(canary.verdicts) == NUM_VERDICTS
    assert canary.verdicts[-1].why == "window 99"


class Engine:
    """Drafts of 8 requests an iteration, and what the alarm says of them."""

    def __init__(self, *, has_network=True):
        self.said = []
        self.alarm = Alarm(self.said.append)
        self._has_network = has_network
        self._random = np.random.default_rng(3)

    def drafts(self, number, rate):
        for _ in range(number // 8):
            kept = self._random.random(8) < rate
            self.alarm.observe("x", [(3, 2 * int(each)) for each in kept], has_network=self._has_network)
        return self

    def happens(self, *events):
        for event in events:
            self.alarm.note_event(event)
        return self

    def idle(self):
        self.alarm.idle()
        return self


NETWORK, TEXT = True, False
STORIES = {
    "a network's falls to 0": (NETWORK, [(200, 0.6), (128, 0.0)], 1),
    "a network's nearly does": (NETWORK, [(200, 0.6), (512, 0.02)], 1),
    "a network's halves": (NETWORK, [(200, 0.6), (4096, 0.3)], 0),
    "text's falls to 0": (TEXT, [(200, 0.6), (128, 0.0)], 1),
    "text's nearly does": (TEXT, [(200, 0.6), (4096, 0.02)], 0),
    "few drafts": (NETWORK, [(200, 0.6), (24, 0.0)], 0),
    "small rollouts": (NETWORK, [(24, 0.6), (24, 0.6), (24, 0.0), (24, 0.0), (24, 0.0), (24, 0.0), (24, 0.0)], 1),
    "a network that never drafted well": (NETWORK, [(512, 0.0)], 1),
    "a network that drafts badly from the start": (NETWORK, [(4096, 0.01)], 0),
    "text that nothing is found in": (TEXT, [(4096, 0.0), (4096, 0.0)], 0),
    "ever since": (NETWORK, [(200, 0.6), (128, 0.0), (128, 0.0), (128, 0.0)], 1),
    "again, once it was mended": (NETWORK, [(200, 0.6), (128, 0.0), (256, 0.6), (128, 0.0)], 2),
}


@pytest.mark.parametrize(("has_network", "windows", "alarms"), STORIES.values(), ids=STORIES)
def test_the_alarm_is_for_a_collapse_alone(has_network, windows, alarms):
    engine = Engine(has_network=has_network)
    for n, (number, rate) in enumerate(windows):
        engine.happens(*["the engine woke"] * bool(n)).drafts(number, rate).idle()
    assert len(engine.said) == alarms
    assert bool(engine.alarm.collapsed["x"]) == (alarms > 0)


def test_an_alarm_names_drafter_rates_and_events():
    engine = Engine().drafts(256, 1.0).happens("the engine woke", "new weights (load)", "the engine woke")
    (sentence,) = engine.drafts(128, 0.0).said
    for fact in (
        "drafter x",
        "since the engine woke and new weights (load)",
        "0.000 of",
        "1.000 before",
        "weights anew",
    ):
        assert fact in sentence
    assert "\n" not in sentence


def test_half_the_acceptance_raises_no_alarm():
    engine = Engine()
    for _ in range(300):
        engine.drafts(256, 0.4).happens("up").drafts(256, 0.2).idle().happens("down")
    assert engine.said == []


def test_an_engine_that_falls_idle_thousands_of_times_is_looked_at():
    engine = Engine().drafts(256, 0.6)
    for _ in range(1200):
        engine.drafts(64, 0.6).idle()
    assert engine.said == []
