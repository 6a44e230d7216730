import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.policies.bandits import Hedge, Ucb1
from tltlab.policies.policy import SHIPPED
from tltlab.policies.reward import Reward, Window
from tltlab.policies.selector import Selector
from tltlab.policies.simple import AcceptLadder, BatchTable, Explore
from tltlab.state import Choice, StepOutcome
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.testing import check_selector

from .iterations import at, pick, play, ran, teach

DEEP, SHALLOW = Strategy.chain("ngram", 8), Strategy.chain("ngram", 2)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_policy_meets_the_contract(name):
    check_selector(SHIPPED[name].selector.build)
    if SHIPPED[name].activation:
        check_selector(SHIPPED[name].build)


def test_a_table_looks_up_the_batch():
    table = BatchTable([(2, DEEP), (5, SHALLOW), (33, NO_SPECULATION)])
    found = [(choice.strategy, choice.bucket) for choice in map(table.choose, map(at, (1, 2, 4, 5, 32, 33, 4096)))]
    assert found == [(DEEP, 0)] * 3 + [(SHALLOW, 1)] * 2 + [(NO_SPECULATION, 2)] * 2

    # A strategy is listed once though rows repeat it.
    assert BatchTable([(1, DEEP), (4, SHALLOW), (8, DEEP)]).strategies == (DEEP, SHALLOW)


def test_exploration_is_uniform_in_blocks():
    explore = Explore([NO_SPECULATION, SHALLOW, DEEP], hold_iterations=5, rng=np.random.default_rng(0))
    choices = [explore.choose(at(8)) for _ in range(30_000)]
    picks = [choice.strategy for choice in choices]
    assert all(len(set(picks[i : i + 5])) == 1 for i in range(0, 30_000, 5))
    for strategy in explore.strategies:
        assert picks[::5].count(strategy) == pytest.approx(2000, abs=150)
    assert {choice.propensity for choice in choices} == {1 / 3}


# The window and the reward


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.integers(1, 12), st.sampled_from(["median", "mean"]))
def test_a_window_summarises_exactly_the_last_values(values, size, statistic):
    window = Window(size, statistic)
    assert window.value == float("inf"), "an empty one looks best"
    for i, value in enumerate(values, 1):
        window.push(value)
        last = values[max(0, i - size) : i]
        expected = np.median(last) if statistic == "median" else np.mean(last)
        assert window.value == pytest.approx(expected, rel=1e-9, abs=1e-6)
        assert window.range == (min(last), max(last))


D4, PLAIN = Strategy.chain("ngram", 4), NO_SPECULATION
KNOWN = [ran(PLAIN, 1, 0.01), ran(PLAIN, 4, 0.02)]
NOISY = [ran(PLAIN, 4, elapsed_s) for elapsed_s in (0.010, 0.012, 0.500)]
# Algorithm 1: a = 6 accepted / 2 requests + 1 bonus = 4; r = 4 * 2 / 0.1 s.
OF_PAPER = StepOutcome(elapsed_s=0.1, batch=2, drafted=(4, 4), accepted=(4, 2))

REWARDS = {
    "tokens per second": ("paper", [], D4, OF_PAPER, 80.0),
    "plain decoding": ("relative", KNOWN, PLAIN, ran(PLAIN, 4, 0.02), 1.0),
    "speed-up over it": ("relative", KNOWN, SHALLOW, ran(SHALLOW, 4, 0.02, 1.0), 2.0),
    "at the same batch": ("relative", KNOWN, SHALLOW, ran(SHALLOW, 1, 0.02, 1.0), 1.0),
    "the median is learned": ("relative", NOISY, SHALLOW, ran(SHALLOW, 4, 0.012, 1.5), 2.5),
    "nothing is learned yet": ("relative", [], SHALLOW, ran(SHALLOW, 4, 0.01), None),
    "plain is always 1": ("relative", [], PLAIN, ran(PLAIN, 4, 0.01), 1.0),
    "prefill": ("paper", [], SHALLOW, ran(SHALLOW, 4, 0.01, had_prefill=True), None),
    "no time": ("paper", [], SHALLOW, ran(SHALLOW, 4, 0.0), None),
    "prefill teaches nothing": (
        "relative",
        [ran(PLAIN, 4, 0.01, had_prefill=True)],
        SHALLOW,
        ran(SHALLOW, 4, 0.01),
        None,
    ),
}


@pytest.mark.parametrize(("kind", "plain", "strategy", "outcome", "reward"), REWARDS.values(), ids=REWARDS)
def test_the_reward_of_an_iteration(kind, plain, strategy, outcome, reward):
    found = Reward(kind)
    for each in plain:
        found.learn(PLAIN, each)
    assert found(strategy, outcome) == (reward and pytest.approx(reward))


def test_plain_time_is_interpolated_between_batches():
    reward = Reward("relative")
    for batch, elapsed_s in ((2, 0.01), (4, 0.02)):
        reward.learn(PLAIN, ran(PLAIN, batch, elapsed_s))
    assert [reward.plain_s(batch) for batch in (1, 2, 3, 4, 64)] == pytest.approx([0.01, 0.01, 0.015, 0.02, 0.02])


# Bandits without buckets


def test_ucb1_tries_every_arm_then_prefers_the_best():
    ucb = Ucb1([NO_SPECULATION, SHALLOW, DEEP], exploration=0.3)
    picks = play(ucb, {NO_SPECULATION: 100.0, SHALLOW: 150.0, DEEP: 120.0}, 400)
    assert picks[:3] == [NO_SPECULATION, SHALLOW, DEEP]
    assert picks.count(SHALLOW) > 300


def test_ucb1s_bonus_matters_at_any_reward_scale():
    """The released TLT code adds a bonus of about 1 to thousands of tokens per second and so never comes back."""

    def tries_of_the_worse(scale):
        picks = play(Ucb1([NO_SPECULATION, SHALLOW]), {NO_SPECULATION: 1.0 * scale, SHALLOW: 1.1 * scale}, 300)
        return picks.count(NO_SPECULATION)

    assert 5 <= tries_of_the_worse(1.0) <= 50
    assert tries_of_the_worse(4096.0) == tries_of_the_worse(1.0)


def test_ucb1_follows_arm_that_becomes_better_one():
    ucb = Ucb1([SHALLOW, DEEP], exploration=0.3, window=100)
    play(ucb, {SHALLOW: 100.0, DEEP: 150.0}, 300)
    picks = play(ucb, {SHALLOW: 150.0, DEEP: 100.0}, 300)
    assert picks[200:].count(SHALLOW) > 80


OTHER = Strategy.chain("suffix", 8)


def test_hedge_weighs_a_loss_by_its_chance():
    check_selector(Hedge.Spec(strategies=(DEEP, OTHER)).build)
    hedge, again = (Hedge([DEEP, OTHER], rng=np.random.default_rng(seed)) for seed in (0, 1))
    choice = hedge.choose(at(1))
    hedge.observe(choice, ran(choice.strategy, 2, 0.1, accepted=4.0))
    assert sorted(hedge.losses_) == [0.0, 0.5 / 0.5]
    # In the second round eta is sqrt(8 ln 2 / 2).
    assert min(hedge.chances) == pytest.approx(1 / (1 + math.exp(math.sqrt(4 * math.log(2)))))
    again.load_state_dict(json.loads(json.dumps(hedge.state_dict())))
    assert [hedge.choose(at(1)) for _ in range(9)] == [again.choose(at(1)) for _ in range(9)]
    with refused(ConfigError, naming=("suffix:8",)):
        Hedge([DEEP], rng=np.random.default_rng(0)).load_state_dict(hedge.state_dict())


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_hedge_weighs_by_choice_outcome_belongs_to(delay):
    kept = {DEEP: 5.0, OTHER: 2.0}
    hedge = Hedge([OTHER, DEEP], rng=np.random.default_rng(0))
    picks = play(hedge, dict.fromkeys(kept, 100.0), 2000, kept=kept, delay=delay)
    assert picks.count(DEEP) / len(picks) > 0.95


def test_a_ladder_counts_outcomes_of_its_rung_only():
    rungs = [Strategy.chain("ngram", depth) for depth in (1, 3, 5)]
    ladder = AcceptLadder(rungs, ema=1.0, warmup=1, hold=1)
    teach(ladder, rungs[0], ran(rungs[0], 1, 0.01, accepted=1.0))
    climbed = ladder.state_dict()
    assert pick(ladder, 1) == rungs[1]
    for late in (rungs[0], rungs[2]):
        teach(ladder, late, ran(late, 1, 0.01, accepted=float(late.draft_depth)))
    assert ladder.state_dict() == climbed
    teach(ladder, rungs[1], ran(rungs[1], 1, 0.01, accepted=0.0))
    assert pick(ladder, 1) == rungs[0]


# The state of a generator


@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64])
def test_a_generators_position_survives_json(kind):
    first, other = (Explore([NO_SPECULATION], rng=np.random.Generator(kind(seed))) for seed in (1, 2))
    first.rng.random(7)
    other.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert other.rng.random(5).tolist() == first.rng.random(5).tolist()


# The contract suite finds what it should find


class Good(Selector):
    strategies = (NO_SPECULATION, DEEP)

    def __init__(self):
        self.calls_ = self.seen_ = 0

    def choose(self, state):
        return self.strategies[state.batch <= 8]


class Remembers(Good):
    def observe(self, choice, outcome):
        self.seen_ += 1

    def state_dict(self):
        return {"seen": self.seen_}

    def load_state_dict(self, state):
        self.seen_ = state["seen"]


class ForgetsItsState(Good):
    def choose(self, state):
        self.calls_ += 1
        return self.strategies[self.calls_ > 100]


class ImpureReward(Remembers):
    def choose(self, state):
        return self.strategies[self.seen_ > 200]

    def reward(self, choice, outcome):
        self.seen_ += 1
        return 0.0


class LearnsAtOnce(Good):
    """Loses track where an outcome is not that of the latest choice."""

    def choose(self, state):
        self.latest_ = Choice(self.strategies[state.batch <= 8], bucket=state.batch)
        return self.latest_

    def observe(self, choice, outcome):
        assert choice is self.latest_


def by(condition):
    return lambda self, state: self.strategies[condition(self, state)]


def test_the_contract_suite_passes_a_good_selector():
    reads = by(lambda self, state: bool(state.requests) and state.requests[0].generated_tokens > 100)
    for good in (Good, Remembers, type("Reads", (Good,), {"choose": reads})):
        check_selector(lambda rng, good=good: good())


@pytest.mark.parametrize(
    ("base", "broken", "sentence"),
    [
        (object, {}, ()),
        (Good, {"choose": lambda self, state: SHALLOW}, ()),
        (Good, {"choose": lambda self, state: "none"}, ("Choice", "'none'")),
        (Good, {"choose": lambda self, state: Choice(DEEP, propensity=0.0)}, ("propensity", 0.0)),
        (Good, {"choose": lambda self, state: Choice(DEEP, bucket=-1)}, ("bucket", -1)),
        (Good, {"needs": {"luck"}}, ("'luck'", "whole_tokens")),
        (LearnsAtOnce, {}, ()),
        (Good, {"choose": by(lambda self, state: state.requests[0].generated_tokens > 100)}, ("ask",)),
        (Good, {"propensity_": 0.0}, ("propensity_",)),
        (Good, {"choose": by(lambda self, state: np.random.random() < 0.5)}, ("same",)),
        (ForgetsItsState, {}, ()),
        (Good, {"state_dict": lambda self: {"best": np.int64(3)}}, ("JSON",)),
        (Good, {"state_dict": lambda self: {"best": float("inf")}}, ("JSON",)),
        (Remembers, {"memoryless": True, "choose": by(lambda self, state: self.seen_ > 0)}, ()),
        (ImpureReward, {}, ("changed",)),
        (Good, {"strategies": ()}, ()),
    ],
)
def test_the_contract_suite_names_the_broken_promise(base, broken, sentence):
    with refused(AssertionError, naming=sentence):
        check_selector(lambda rng: type("Broken", (base,), broken)())
