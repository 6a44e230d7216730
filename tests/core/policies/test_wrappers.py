from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tltlab.policies.beg_mab import BegMab
from tltlab.policies.driver import PolicyDriver
from tltlab.policies.selector import Selector
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
