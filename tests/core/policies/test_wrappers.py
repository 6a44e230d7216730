from copy import deepcopy
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tltlab.policies.beg_mab import BegMab
from tltlab.policies.driver import PolicyDriver
from tltlab.policies.selector import Selector, chosen
from tltlab.policies.simple import BatchTable, Explore, Fixed
from tltlab.policies.wrappers import ElasticActivation
from tltlab.state import Choice, StepOutcome
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.testing import check_selector

from .iterations import at, pick

D4, D2 = Strategy.chain("ngram", 4), Strategy.chain("ngram", 2)


class Spy(Selector):
    """Chooses D4 and counts what it is asked and told."""

    strategies = (D4,)

    def __init__(self):
        self.asked, self.told = 0, []

    def choose(self, state):
        self.asked += 1
        return Choice(D4, propensity=0.25, bucket=3)

    def observe(self, choice, outcome):
        self.told.append(choice)

    def reward(self, choice, outcome):
        return 7.0


OUTCOME = StepOutcome(elapsed_s=0.01, batch=4)


def follow(selector, batches, rl_step=0):
    driver = PolicyDriver(selector)
    return [driver.ask(at(batch, rl_step)).strategy.speculates for batch in batches]


HOLDS = {
    "at and below the threshold": (0, [64, 33, 32, 1], [False, False, True, True]),
    "a switch stays for the hold": (
        3,
        [40, 32, 40, 40, 40, 32, 32, 32, 32],
        [False, True, True, True, False, False, False, True, True],
    ),
    "also in one batch": (3, [40, 32, 32, 32, 40, 40, 40, 32], [False, True, True, True, False, False, False, True]),
}


@pytest.mark.parametrize(("hold", "batches", "on"), HOLDS.values(), ids=HOLDS)
def test_it_speculates_up_to_the_threshold(hold, batches, on):
    assert follow(ElasticActivation(Fixed(D4), max_requests=32, hold_iterations=hold), batches) == on


def test_it_counts_the_waiting_requests_if_told_so():
    running = ElasticActivation(Fixed(D4), max_requests=8, hold_iterations=0)
    remaining = ElasticActivation(Fixed(D4), max_requests=8, count="remaining", hold_iterations=0)
    assert (pick(running, 8, waiting=1), pick(remaining, 8, waiting=1)) == (D4, NO_SPECULATION)


@given(st.lists(st.integers(1, 64), min_size=1, max_size=80), st.integers(0, 6))
def test_every_stretch_lasts_the_hold(batches, hold):
    on = follow(ElasticActivation(Fixed(D4), max_requests=32, hold_iterations=hold), batches)
    stretches = [1]
    for a, b in pairwise(on):
        if a == b:
            stretches[-1] += 1
        else:
            stretches.append(1)
    assert all(stretch >= hold for stretch in stretches[1:-1])


class Parity(Selector):
    """Memoryless, and never the same for two batches in a row."""

    strategies = (D4, D2)
    memoryless = True

    def choose(self, state):
        return self.strategies[state.batch % 2]


class Deep(Parity):
    """Says of its own choices how long they stay."""

    memoryless = False

    def choose(self, state):
        return Choice(D4 if state.batch > 5 else D2, learns=False, stays=True, least_batch=6 if state.batch > 5 else 0)


INNER = st.sampled_from([
    Fixed(D4), Parity(), Deep(), BatchTable([(2, D4), (5, D2), (9, NO_SPECULATION), (12, D2)]),
])  # fmt: skip


@given(
    INNER,
    st.integers(0, 12),
    st.sampled_from(["running", "remaining"]),
    st.integers(0, 3),
    st.lists(st.tuples(st.integers(1, 16), st.integers(0, 3)), min_size=1, max_size=30),
)
def test_a_choice_that_stays_keeps_its_promise(inner, most, count, hold, states):
    selector = ElasticActivation(deepcopy(inner), most, count, hold)
    for batch, waiting in states:
        choice = chosen(selector, at(batch, waiting=waiting))
        if not choice.stays:
            continue
        assert not choice.learns
        later = deepcopy(selector)
        least = batch if choice.least_batch is None else max(choice.least_batch, 1)
        for falling in [batch] * (hold + 2) + list(range(batch - 1, least - 1, -1)):
            again = chosen(later, at(falling, waiting=waiting))
            assert (again.strategy, again.bucket, again.propensity) == (choice.strategy, choice.bucket, 1.0)
        # Skipped asks change nothing.
        assert later.state_dict() == selector.state_dict()


def test_around_a_fixed_strategy_only_a_held_switch_does_not_stay():
    selector = ElasticActivation(Fixed(D4), max_requests=8, hold_iterations=3)
    choices = [chosen(selector, at(batch)) for batch in (9, 9, 8, 8, 8, 7, 9, 9, 9)]
    assert [choice.stays for choice in choices] == [True, True, False, False, True, True, False, False, True]
    assert [choice.least_batch for choice in choices if choice.stays] == [9, 9, 0, 0, 9]


def test_a_new_rl_step_ends_the_hold():
    selector = ElasticActivation(Fixed(D4), max_requests=32, hold_iterations=10)
    assert follow(selector, [64, 32], rl_step=0) == [False, True]
    assert follow(selector, [64], rl_step=1) == [False]


def test_while_off_only_own_choices_teach():
    spy, rewards = Spy(), []
    driver = PolicyDriver(ElasticActivation(spy, max_requests=8, hold_iterations=0))
    choices = [driver.ask(at(batch)) for batch in (64, 8, 9)]
    assert (spy.asked, choices[0].stays) == (1, True)
    assert choices[1] == Choice(D4, propensity=0.25, bucket=3)
    for choice in choices:
        driver.tell(choice, OUTCOME, rewards.append)
    assert (spy.told, rewards) == ([choices[1]], [7.0])
    driver.ask(at(8))
    assert driver.ask(at(9)).strategy == driver.ask(at(9)).strategy == NO_SPECULATION
    assert driver.ask(at(8)).strategy == D4
    assert spy.asked == 3


def test_strategies_and_memory_are_those_of_the_selector():
    assert ElasticActivation(Fixed(D4)).strategies == (NO_SPECULATION, D4)
    assert ElasticActivation(BatchTable([(1, D4), (8, NO_SPECULATION)])).strategies == (NO_SPECULATION, D4)
    explore = Explore([D4, D2], rng=np.random.default_rng(0))
    for inner, hold, memoryless in ((Fixed(D4), 0, True), (Fixed(D4), 1, False), (explore, 0, False)):
        assert ElasticActivation(inner, hold_iterations=hold).memoryless == memoryless


@pytest.mark.parametrize("count", ["running", "remaining"])
@pytest.mark.parametrize("hold_iterations", [0, 5])
def test_it_meets_the_contract_around_a_bandit(count, hold_iterations):
    def build(rng):
        inner = BegMab([(1, [D4, D2]), (9, [D2, NO_SPECULATION])], window=20, rng=rng)
        return ElasticActivation(inner, 32, count, hold_iterations)

    check_selector(build)
    check_selector(lambda rng: ElasticActivation(Fixed(D4), 32, count, hold_iterations))
