"""The tracker of iterations on a clock that is set by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tltlab.runtime.engine.tracker import IterationTracker
from tltlab.state import NO_CHOICE, Choice
from tltlab.strategy import Strategy

from .asking import rows_of, scheduled


class Engine:
    """Two requests, played on a clock; each choice is a chain whose depth is the number of the iteration + 1."""

    def __init__(self, **settings):
        self.now = 50.0
        self.notified = []
        self.tracker = IterationTracker(self.notify, worker=2, clock=lambda: self.now, **settings)
        self.tracker.begin(7)
        self.depth = 0

    def notify(self, choice, outcome, iteration):
        self.notified.append((choice, outcome))
        iteration.rewarded(10.0 * len(self.notified))

    def schedule(self, draft=0, *, learns=True, decided=True):
        drafts = {"a": [9] * draft, "b": [9] * draft} if draft else {}
        what = scheduled("b", "a", drafts=drafts, waiting=3, context_tokens=40)
        self.tracker.start()
        self.tracker.schedule(what)
        self.depth += 1
        strategy = Strategy.chain("ngram", self.depth)
        self.tracker.choose(Choice(strategy, 0.5, self.depth % 2, learns), decided=decided)
        return what

    def iterate(self, forward_s=1.0, draft_s=0.0, after_s=0.0, kept=0, **chosen):
        self.schedule(self.tracker.in_force.strategy.draft_depth, **chosen)
        self.now += forward_s
        self.tracker.sampled(self.tracker.verified([1, kept + 1]))
        since = self.now
        self.now += draft_s
        self.tracker.drafted(since, 0.0)
        self.now += after_s


SECONDS = st.floats(0.001, 10.0)


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=20))
def test_a_choice_includes_its_drafting_and_verification(times):
    engine = Engine()
    for forward_s, draft_s, after_s in times:
        engine.iterate(forward_s, draft_s, after_s)
    engine.tracker.end()
    drafted_in = [draft_s for _, draft_s, _ in times]
    without_drafting = [forward_s + after_s for forward_s, _, after_s in times]
    expected = [draft_s + rest_s for draft_s, rest_s in zip(drafted_in, without_drafting[1:], strict=False)]
    assert [outcome.elapsed_s for _, outcome in engine.notified] == pytest.approx(expected)
    assert [told.strategy.draft_depth for told, _ in engine.notified] == list(range(1, len(times)))


def test_row_has_what_its_iteration_verified_and_chose():
    engine = Engine()
    engine.iterate(2.0, 0.5)
    engine.iterate(3.0, 0.25, kept=1)
    engine.tracker.end()
    (first, second), (decision,) = rows_of(engine.tracker)
    assert (first["rl_step"], first["worker"], first["iteration"], first["drafter"]) == (7, 2, 0, "none")
    assert (first["t_start"], first["duration"], first["draft_duration"]) == (0.0, 2.5, 0.5)
    assert (second["t_start"], second["duration"], second["draft_duration"]) == (2.5, 3.25, 0.25)
    assert (first["next_draft_depth"], second["draft_depth"], second["next_draft_depth"]) == (1, 1, 2)
    assert (second["num_drafted"], second["num_accepted"], second["num_generated"]) == (2, 1, 3)
    assert second["accepted_per_request"] == [0, 1]  # in the order of the requests: b, a
    assert first["accepted_per_request"] is None
    assert decision == {
        "rl_step": 7, "worker": 2, "iteration": 1, "bucket": 1, "drafter": "ngram", "draft_depth": 1, "top_k": 1,
        "tokens_to_verify": 2, "propensity": 0.5, "reward": 10.0,
    }  # fmt: skip


def test_only_policy_choices_are_decisions():
    engine = Engine()
    engine.iterate(decided=False)
    engine.iterate(learns=False)
    engine.iterate()
    engine.iterate()
    engine.tracker.end()
    rows, decisions = rows_of(engine.tracker)
    assert [row["draft_depth"] for row in rows] == [0, 1, 2, 3]
    assert [(row["draft_depth"], row["reward"]) for row in decisions] == [(2, None), (3, 10.0)]


PAUSE, REST = IterationTracker.pause, IterationTracker.end_iteration


@pytest.mark.parametrize(("wait", "outlasts"), [(PAUSE, False), (REST, True)], ids=["pauses", "rests"])
def test_a_wait_is_no_iterations_time(wait, outlasts):
    """A choice outlasts a rest, and no pause."""
    engine = Engine()
    engine.iterate(1.0, 0.5)
    engine.now += 100.0
    wait(engine.tracker)
    assert (engine.tracker.in_force is not NO_CHOICE) is outlasts
    engine.iterate(1.0)
    engine.tracker.end()
    assert [each.duration_s for each in engine.tracker.ended] == [1.5, 1.0]
    assert len(engine.notified) == outlasts


@pytest.mark.parametrize("wait", [REST, PAUSE], ids=["rests", "pauses"])
def test_wait_ends_no_iteration_that_has_no_output(wait):
    engine = Engine()
    engine.schedule()
    wait(engine.tracker)
    engine.now += 2.0
    engine.tracker.sampled(engine.tracker.verified([1, 1]))
    engine.now += 50.0
    wait(engine.tracker)
    assert [each.duration_s for each in engine.tracker.ended] == [2.0]


def test_a_rollout_begins_at_0_with_the_choice():
    engine = Engine()
    engine.iterate()
    engine.tracker.end()
    engine.tracker.begin(8)
    engine.now += 0.5
    engine.iterate(2.0)
    engine.tracker.end()
    (row,) = rows_of(engine.tracker)[0]
    assert (row["rl_step"], row["iteration"], row["t_start"], row["draft_depth"]) == (8, 0, 0.5, 1)


def test_overlapped_iterations_run_from_output_to_output():
    engine = Engine(overlapped=True)
    engine.schedule()
    engine.now += 1.0
    engine.schedule(draft=1)
    for seconds, counts in ((1.0, [1, 1]), (3.0, [2, 2])):
        engine.now += seconds
        engine.tracker.sampled(engine.tracker.verified(counts))
    engine.tracker.end()
    rows = [(r["t_start"], r["duration"], r["draft_duration"]) for r in rows_of(engine.tracker)[0]]
    assert rows == [(0.0, 2.0, None), (2.0, 3.0, None)]
    ((told, outcome),) = engine.notified
    assert (told.strategy.draft_depth, outcome.elapsed_s, outcome.accepted) == (1, 3.0, [1, 1])


def test_iteration_in_flight_continues_in_next_rollout():
    engine = Engine(overlapped=True)
    engine.schedule()
    engine.now += 5.0
    engine.tracker.begin(8)
    engine.schedule()
    for _ in range(2):
        engine.now += 1.0
        engine.tracker.sampled(engine.tracker.verified([1, 1]))
    rows, _ = rows_of(engine.tracker)
    assert [(row["rl_step"], row["iteration"], row["t_start"], row["duration"]) for row in rows] == [
        (8, 0, 0.0, 1.0),
        (8, 1, 1.0, 1.0),
    ]
