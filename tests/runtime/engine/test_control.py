"""The book that is kept between a policy and an engine, on an engine that is only played."""

import random
import time
from pathlib import Path

import numpy as np
import pytest

from tests.fakes.drafting import Parrot, Script
from tests.refused import refused
from tltlab.drafters.budget import DraftBudget
from tltlab.drafters.specs import LearnedSpec, NgramSpec, SuffixSpec
from tltlab.errors import ConfigError
from tltlab.policies.policy import Policy
from tltlab.policies.specs import ExploreSpec
from tltlab.runtime.engine.control import Control
from tltlab.runtime.engine.drafter_pool import DrafterPool
from tltlab.strategy import NO_SPECULATION, Strategy

from .asking import raising, rows_of, scheduled

LEARNED = LearnedSpec(method="eagle", model="a/head")


class Played:
    """An engine of some requests: an iteration keeps `kept` tokens of each one's draft and adds one."""

    def __init__(self, control, names="r", max_tokens=100):
        self.control = control
        self.outputs = {name: [] for name in names}
        self.drafts = {}
        self.depths = []
        self.learned = []
        control.begin(0)
        for name, output in self.outputs.items():
            control.add(name, (0, name, 0, 0), [1, 2, 3], output, max_tokens)

    def goes_on(self, *kept):
        """So many iterations, which keep so much each; the last one's drafts."""
        for each in kept:
            drafts = self.iterate(each)
        return drafts

    def iterate(self, kept=0):
        """The drafts of all requests, the last one's first."""
        ids = list(self.outputs)
        self.control.iteration_starts()
        what = scheduled(*ids, drafts={name: draft for name, draft in self.drafts.items() if draft})
        self.depths.append(self.control.scheduled(what))
        self.control.sampled([kept + 1] * len(ids))
        for name, output in self.outputs.items():
            output += [*self.drafts.get(name, ())[:kept], 9]
        drafts = self.control.drafts(ids[::-1], [self.learned] * len(ids), 0.0)
        self.drafts = dict(zip(ids[::-1], drafts, strict=bool(drafts)))
        return drafts

    @property
    def draft(self):
        """The draft of the only request."""
        return self.drafts.get("r", [])


KEY = (0, "r", 0, 0)


def played(*choices, names="r", max_tokens=100, clock=time.perf_counter, **drafters):
    control = Control(DrafterPool(drafters or {"parrot": Parrot()}, 8), clock=clock)
    script = Script(*choices)
    control.set_selector(script)
    return Played(control, names, max_tokens), script


def chain(depth, drafter="parrot"):
    return Strategy.chain(drafter, depth)


def test_choice_is_judged_by_iteration_that_verifies_it():
    engine, script = played(chain(4), chain(2), NO_SPECULATION, NO_SPECULATION)
    engine.goes_on(0, 3, 1, 0)
    rows, decisions = rows_of(engine.control)
    found = [(r["draft_depth"], r["num_drafted"], r["num_accepted"]) for r in rows]
    assert found == [(0, 0, 0), (4, 4, 3), (2, 2, 1), (0, 0, 0)]
    assert [row["next_draft_depth"] for row in rows] == [4, 2, 0, 0]
    assert script.outcomes == [(4, [3]), (2, [1]), (0, [])]
    assert [d["iteration"] for d in decisions] == [1, 2, 3]


def test_a_request_is_never_drafted_beyond_its_cap():
    engine, _ = played(*[chain(8)] * 3, max_tokens=5)
    engine.iterate()
    assert engine.draft == [9, 9, 9]  # one is out, three drafted, and the target adds the fifth
    engine.iterate(kept=2)
    assert engine.draft == []


def test_finished_requests_get_no_drafts():
    engine, _ = played(chain(2), chain(2))
    engine.iterate()
    assert engine.control.finish("r").key == KEY
    assert engine.control.drafts(["r"], [[]], 0.0) == [[]]
    assert engine.control.finish("r") is None


def test_learning_at_the_end_is_policy_time():
    class Slow(Script):
        def observe(self, choice, outcome):
            time.sleep(0.02)

    engine, _ = played(chain(2))
    engine.control.set_selector(Slow(chain(2), chain(2)))
    engine.goes_on(0, 0)
    engine.control.finish("r")
    engine.control.idle()
    assert engine.control.inside.seconds >= engine.control.deciding.seconds >= 0.02


def test_drafters_and_policies_receive_accepted_tokens():
    parrot = Parrot()
    engine, script = played(*[chain(4)] * 3, parrot=parrot)
    engine.goes_on(0, 3, 2)
    assert parrot.seen == [(KEY, 4, 3), (KEY, 4, 2)]
    assert script.state.requests[0].recent_acceptance == pytest.approx(3 - 0.2)
    assert script.state.requests[0].generated_tokens == 8


@pytest.mark.parametrize("error", [IndexError("no such arm"), SystemExit("no such arm")], ids=["raises", "exits"])
@pytest.mark.parametrize("where", ["choose", "observe", "reward"])
def test_a_policy_that_raises_is_asked_no_more(where, error, caplog):
    calls, stock = [], getattr(Script, where)

    def third_raises(self, *args):
        calls.append(where)
        if len(calls) == 3:
            raise error
        return stock(self, *args)

    policy = type("Raising", (Script,), {where: third_raises})(*[chain(2)] * 9)
    engine, _ = played(chain(2))
    engine.control.set_selector(policy)
    drafted = []
    for _ in range(8):
        engine.iterate()
        drafted.append(len(engine.draft))
    # What the third choice brought is known two iterations later.
    assert drafted == ([2, 2, 0, 0, 0, 0, 0, 0] if where == "choose" else [2, 2, 2, 2, 0, 0, 0, 0])
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "raise error" in text)
    (record,) = caplog.records
    facts = (f"{type(error).__name__}: no such arm", __file__, f"line {line}")
    assert all(fact in record.getMessage() for fact in facts)
    rows, _ = rows_of(engine.control)
    assert [row["draft_depth"] for row in rows] == [0, *drafted[:-1]]
    assert len(calls) == 3
    engine.control.set_selector(Script(chain(2)))
    assert engine.control.failure == ""
    engine.iterate()
    assert engine.draft == [9, 9]


@pytest.mark.parametrize(("shares", "draft"), [([1], [9]), ([], []), (None, [])], ids=["one", "too few", "raises"])
def test_a_budget_shares_out_until_it_fails(shares, draft, caplog):
    class Shares(DraftBudget):
        def allot(self, state, strategy):
            return list(shares)

        def finished(self, request, *, drafted, accepted):
            assert draft, "who has failed is asked no more"

    engine, script = played(*[chain(4)] * 3)
    engine.control.set_selector(script, Shares())
    engine.goes_on(0, 0)
    assert engine.draft == draft
    assert engine.control.finish("r") is not None
    assert len(caplog.records) == (not draft)
    assert engine.control.failure in caplog.text


@pytest.mark.parametrize("drafting", ["none", "none beside"])
def test_some_requests_are_decoded_plainly_beside_others(drafting):
    engine, _ = played(*[chain(4)] * 9, names="ab")
    engine.iterate()
    other = engine.control.add("c", (0, "c", 0, 0), [1, 2], [3, 3], 100, drafting)
    asked = engine.control.drafts(["a", "c"], [[], []], None)
    assert asked == [[9] * 4 if drafting == "none" else [], []]
    assert engine.control.allot(["a", "c"]) == [4 if drafting == "none" else 0, 0]
    assert other is engine.control.finish("c")
    assert engine.control.drafts(["a"], [[]], None) == [[9] * 4]


def test_drafters_hear_each_request_once_they_are_asked():
    """And in the order of admission."""
    asked, other = Parrot(), Parrot()
    choices = [*[NO_SPECULATION] * 4, chain(2, "asked"), chain(2, "other"), chain(2, "asked")]
    batch, _ = played(*choices, names="bac", asked=asked, other=other)
    assert batch.goes_on(0, 0, 0, 0) == []
    assert asked.told == other.told == []
    assert batch.iterate() == [[9, 9]] * 3
    assert (asked.told, other.told) == ([("b", 5), ("a", 5), ("c", 5)], [])
    batch.iterate()
    assert other.told == [("b", 6), ("a", 6), ("c", 6)]
    batch.control.finish("a")
    assert (asked.told[3:], other.told[3:]) == ([("a", 1)], [])
    assert asked.texts.keys() == {(0, "b", 0, 0), (0, "c", 0, 0)}


def test_a_choice_pays_for_its_own_tokens_alone():
    slow = Parrot(token_s=1.0)
    choices = [chain(1, "slow"), *[NO_SPECULATION] * 3, *[chain(1, "slow")] * 3]
    batch, script = played(*choices, names="a", clock=lambda: slow.now_s, slow=slow)
    batch.goes_on(*[0] * 7)
    rows, _ = rows_of(batch.control)
    # What came before the first draft of a rollout is paid by nobody, of the four tokens after the pause one is paid.
    assert [row["draft_duration"] for row in rows] == [0, 0, 0, 0, 1, 1, 1]
    assert [outcome.elapsed_s for _, outcome in script.told] == [0, 0, 0, 0, 1, 1]
    assert slow.told == [("a", 1), ("a", 4), ("a", 1), ("a", 1)]


def test_what_came_while_drafter_was_off_costs_nobody():
    class Piecemeal(Parrot):
        """Puts in a token a second, at most three at once."""

        piece_tokens = 3 - 8
        waiting = 0

        def extend(self, key, tokens):
            super().extend(key, tokens)
            self.waiting += len(tokens)

        def catch_up(self, most=None):
            put_in = self.waiting if most is None else min(most, self.waiting)
            self.waiting -= put_in
            self.now_s += put_in
            return not self.waiting

    slow = Piecemeal()
    choices = [*[NO_SPECULATION] * 9, *[chain(1, "slow")] * 6]
    batch, script = played(*choices, names="a", clock=lambda: slow.now_s, slow=slow)
    batch.goes_on(*[0] * 15)
    rows, _ = rows_of(batch.control)
    # Ten tokens, then one more each: 3 of 10, 3 of 8, 3 of 6, 3 of 4, 2 of 2, 1 of 1.
    assert slow.told == [("a", 10), *[("a", 1)] * 5]
    assert slow.waiting == 0
    # Nor is anything learned from the four drafts that were made meanwhile.
    assert [choice.strategy.draft_depth for choice, _ in script.told] == [0] * 9 + [1]
    # What came before the first draft of a rollout is paid by nobody, nor is what was left to wait.
    assert [row["draft_duration"] for row in rows] == [0] * 14 + [1]


def test_the_learned_drafter_drafts_only_when_requested():
    engine, _ = played(chain(3, "learned"), chain(2), NO_SPECULATION, learned=LEARNED, parrot=Parrot())
    engine.learned = [5, 6, 7, 8]
    for draft in ([5, 6, 7], [9, 9], []):
        engine.iterate()
        assert engine.draft == draft
    assert engine.depths == [3, 0, 0]


@pytest.mark.parametrize(
    ("strategy", "complaint"), [(chain(9), ("8",)), (Strategy("parrot", 4, 4, 16), ()), (chain(2, "x"), ("parrot",))]
)
def test_unmet_needs_are_refused_before_activation(strategy, complaint):
    engine, script = played(NO_SPECULATION)
    with refused(ConfigError, naming=complaint):
        engine.control.set_selector(Script(strategy))
    assert engine.control.driver.selector is script


def test_drafter_that_cannot_be_built_leaves_policy(monkeypatch):
    engine, script = played(NO_SPECULATION, suffix=SuffixSpec())
    monkeypatch.setattr(SuffixSpec, "make", raising(ConfigError("no library")))
    with refused(ConfigError, naming=("library",)):
        engine.control.set_selector(Script(chain(2, "suffix")))
    assert engine.control.driver.selector is script


def test_a_policys_randomness_is_its_seeds():
    """The same seed makes the same choices whatever the global generators are at, another one makes others."""
    policy = Policy(selector=ExploreSpec(strategies=tuple(map(chain, range(1, 5))), hold_iterations=1))

    def depths(*seed):
        control = Control(DrafterPool({"parrot": Parrot()}, 4))
        control.set_policy(policy, list(seed))
        engine = Played(control)
        for _ in range(20):
            engine.iterate()
            random.random()
            np.random.random()
        return [row["draft_depth"] for row in rows_of(control)[1]]

    first = depths(1, 2)
    assert len(set(first)) > 1
    assert [depths(*seed) == first for seed in ((1, 2), (1, 3), (2, 2))] == [True, False, False]


def test_selector_receives_outcomes_of_its_own_choices_alone():
    engine, before = played(chain(4), chain(4), chain(4))
    engine.goes_on(0, 3, 2)
    after = Script(chain(2), chain(2))
    engine.control.set_selector(after)
    engine.goes_on(1, 1)
    _, decisions = rows_of(engine.control)
    assert (before.outcomes, after.outcomes) == ([(4, [3])], [(2, [1])])
    assert [d["draft_depth"] for d in decisions] == [4, 4, 4, 2]


def test_without_rollouts_no_rows_accumulate():
    engine, _ = played(*[chain(2, "ngram")] * 4, ngram=NgramSpec(min_match=1))
    control = engine.control
    engine.goes_on(0, 0)
    assert len(rows_of(control)[0]) == 2
    engine.goes_on(0, 0)
    assert control.tracker.ended == []
    control.finish("r")
    assert control.drafters._drafter("ngram").memory_bytes > 0
    control.advance(1)
    assert control.drafters._drafter("ngram").memory_bytes == 0
