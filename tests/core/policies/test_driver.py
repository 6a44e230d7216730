"""The driver: in which order a policy is asked and receives the outcomes of its choices."""

from types import SimpleNamespace

import pytest

import tltlab
from tests.refused import refused
from tltlab.drafters.budget import DraftBudget, UniformBudget
from tltlab.errors import ConfigError, RunError
from tltlab.policies.driver import PolicyDriver, refuse_needs
from tltlab.policies.selector import WHOLE_TOKENS, Selector
from tltlab.state import NO_CHOICE, Choice, StepOutcome
from tltlab.strategy import NO_SPECULATION, Strategy

from .iterations import at

D4, D2 = Strategy.chain("ngram", 4), Strategy.chain("ngram", 2)


class Logged(Selector):
    """Writes down its calls: `c0` chooses for the first time, `o0` is the outcome of that choice."""

    strategies = (NO_SPECULATION, D4, D2)

    def __init__(self, **fields):
        self.fields = fields
        self.num_made, self.log = 0, []

    def choose(self, state):
        self.log.append(f"c{self.num_made}")
        self.num_made += 1
        return Choice(D4, bucket=self.num_made - 1, **self.fields)

    def observe(self, choice, outcome):
        self.log.append(f"o{choice.bucket}")

    def reward(self, choice, outcome):
        return 10.0 + choice.bucket

    def state_dict(self):
        return {"num_made": self.num_made}

    def load_state_dict(self, state):
        self.num_made = state["num_made"]


def outcome(batch=4):
    return StepOutcome(elapsed_s=0.01, batch=batch)


def driven(delay=0, **fields):
    selector = Logged(**fields)
    return selector, PolicyDriver(selector, delay=delay)


def tell(driver, *choices):
    for choice in choices:
        driver.tell(choice, outcome())


@pytest.mark.parametrize(
    ("ahead", "delay", "calls"),
    [
        (True, 0, "c0 c1 o0 c2 o1 c3 o2 c4 o3"),
        (False, 0, "c0 o0 c1 o1 c2 o2 c3 o3 c4 o4"),
        (False, 1, "c0 c1 o0 c2 o1 c3 o2 c4 o3"),
        (False, 3, "c0 c1 c2 c3 o0 c4 o1"),
    ],
    ids=["an engine", "at once", "one choice late", "three choices late"],
)
def test_outcomes_come_in_order_and_late(ahead, delay, calls):
    """A caller that is `ahead` verifies a choice in the iteration after the one that it was made in."""
    selector, driver = driven(delay)
    driver.begin(0)
    verified, rewards = None, []
    for _ in range(5):
        made = driver.ask(at(4))
        verified, made = (made, verified) if ahead else (made, made)
        if made is not None:
            driver.tell(made, outcome(), rewards.append)
    assert selector.log == calls.split()
    assert rewards == [10.0 + i for i in range(calls.count("o"))]


@pytest.mark.parametrize(("fields", "memoryless"), [({"stays": True}, False), ({}, True)], ids=["stays", "memoryless"])
@pytest.mark.parametrize("change", [(5, 0, 0), (4, 1, 0), (4, 0, 1)], ids=["batch", "waiting", "RL step"])
def test_a_choice_that_holds_is_replayed_unasked(fields, memoryless, change):
    selector, driver = driven(**fields)
    selector.memoryless = memoryless
    first = driver.ask(at(4))
    assert driver.again(4, 0, 0) is driver.ask(at(4)) is first
    assert driver.again(*change) is None
    # Each time that it is made it has an outcome, from which a memoryless policy learns nothing.
    tell(driver, first, first, first, first)
    assert selector.log == (["c0"] if memoryless else ["c0", "o0", "o0", "o0"])
    batch, waiting, rl_step = change
    selector.fields = {}
    driver.ask(at(batch, rl_step, waiting=waiting))
    if not memoryless:
        # The promise ended with the change.
        assert driver.again(4, 0, 0) is None
        assert driver.again(*change) is None
    driver.begin(0)
    assert driver.again(*change) is None


def test_a_choice_replayed_counts_for_the_delay():
    selector, driver = driven(delay=1, stays=True)
    tell(driver, driver.ask(at(4)))
    assert selector.log == ["c0"]
    assert driver.again(4, 0, 0) is not None
    assert selector.log == ["c0", "o0"]


def test_outcomes_that_have_no_meaning_are_dropped():
    selector, driver = driven()
    lost, kept, never = (driver.ask(at(4)) for _ in range(3))
    tell(driver, NO_CHOICE, Choice(D4, bucket=1), kept, kept, lost)
    assert selector.log[3:] == ["o1"], "neither strangers nor any twice, nor after a later one"
    other = Logged()
    driver.take(other)
    tell(driver, never)
    assert (selector.log[4:], other.log) == ([], [])

    selector, driver = driven(delay=1)
    held = driver.ask(at(4))
    tell(driver, held)
    driver.take(other)
    driver.ask(at(4))
    assert (selector.log, other.log) == (["c0"], ["c0"])
    selector, driver = driven(learns=False)
    tell(driver, driver.ask(at(4)))
    assert selector.log == ["c0"]


def test_delayed_outcomes_arrive_at_the_end():
    selector, driver = driven(delay=3)
    choices = [driver.ask(at(4)) for _ in range(3)]
    tell(driver, *choices[:2])
    assert selector.log == ["c0", "c1", "c2"]
    driver.idle()
    assert selector.log == ["c0", "c1", "c2", "o0", "o1"]
    tell(driver, choices[2])
    driver.idle()
    assert selector.log[5:] == []


class NeedsWholeTokens(Selector):
    strategies = (NO_SPECULATION, D4)
    needs = frozenset({WHOLE_TOKENS})

    def choose(self, state):
        return D4


def test_a_policy_with_unmet_needs_is_refused():
    refuse_needs(NeedsWholeTokens())
    with refused(ConfigError, naming=("NeedsWholeTokens", WHOLE_TOKENS, "no scales")):
        refuse_needs(NeedsWholeTokens(), {WHOLE_TOKENS: "no scales"})
    with refused(ConfigError, naming=("Thirsty", "'water'", WHOLE_TOKENS)):
        refuse_needs(type("Thirsty", (NeedsWholeTokens,), {"needs": {"water"}})())


def test_the_fluid_mode_refuses_who_needs_whole_tokens():
    asked = {"policy": NeedsWholeTokens, "costs": "h100-qwen2.5-7b", "acceptance": "geometric:0.7"}
    with refused(ConfigError, naming=("NeedsWholeTokens", WHOLE_TOKENS, "fluid", "sampled")):
        tltlab.simulate("traces/tiny", mode="fluid", **asked)
    assert tltlab.simulate("traces/tiny", mode="sampled", **asked).makespan_s > 0


@pytest.mark.parametrize("shares", [[4], [4, 4, 4], [4, 5], [-1, 0]])
def test_shares_that_do_not_fit_batch_are_refused(shares):
    class Given(DraftBudget):
        allot = staticmethod(lambda state, strategy: shares)

    assert PolicyDriver().shares(at(2), D4) == [4, 4]
    with refused(ConfigError, naming=(shares, 2, 4, D4)):
        PolicyDriver(budget=Given()).shares(at(2), D4)


def row(rl_step, iteration, strategy):
    fields = ("drafter", "draft_depth", "top_k", "tokens_to_verify")
    return {"rl_step": rl_step, "iteration": iteration, "bucket": iteration, "propensity": 0.5} | {
        name: getattr(strategy, name) for name in fields
    }


ROWS = [row(0, 1, D2), row(0, 2, D4), row(1, 1, NO_SPECULATION), row(1, 2, D2)]


def rollout(driver, rl_step, num):
    driver.begin(rl_step)
    return [driver.ask(at(4, rl_step)).strategy for _ in range(num)]


def test_replayed_decisions_learn_from_outcomes():
    selector, driver = driven()
    with refused(ConfigError):
        PolicyDriver().replay(ROWS)
    driver.replay(ROWS)
    driver.begin(0)
    made = [driver.ask(at(4)) for _ in range(3)]
    assert made == [Choice(D2, 0.5, 1), Choice(D4, 0.5, 2), NO_CHOICE]
    tell(driver, *made)
    assert selector.log == ["c0", "c1", "c2", "o1", "o2"]
    with refused(RunError, naming=("RL step 0", "iteration 3")):
        driver.ask(at(4))
    assert [rollout(driver, 1, 3), rollout(driver, 2, 2)] == [[NO_SPECULATION, D2, NO_SPECULATION], [D4, D4]]


def test_an_always_drafting_policy_is_replayed_fully():
    class Always(Logged):
        strategies = (D4, D2)

    driver = PolicyDriver(Always())
    driver.replay(ROWS[:2])
    assert rollout(driver, 0, 3) == [D2, D4, NO_SPECULATION]


@pytest.mark.parametrize("order", ["replay first", "state first"])
def test_a_replay_continues_where_it_was(order):
    _, first = driven()
    first.replay(ROWS)
    rollout(first, 0, 3)
    state = first.state_dict()
    selector, second = driven()
    steps = [lambda: second.replay(ROWS), lambda: second.load_state_dict(state)]
    for step in steps if order == "replay first" else steps[::-1]:
        step()
    assert selector.num_made == 3
    assert second.state_dict() == state
    assert rollout(second, 1, 2) == [NO_SPECULATION, D2]


def test_a_budgets_state_is_in_the_driver():
    ended = []

    class Learns(UniformBudget):
        def finished(self, request, *, drafted, accepted):
            ended.append((request.key, drafted, accepted))

        def state_dict(self):
            return {"ended": len(ended)}

    driver = PolicyDriver(budget=Learns())
    driver.finished(SimpleNamespace(key=(0, "p", 0, 0)), drafted=8, accepted=3)
    assert ended == [((0, "p", 0, 0), 8, 3)]
    assert driver.state_dict()["budget"] == {"ended": 1}
