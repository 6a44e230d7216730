"""Replay per position: which rows count at which drafter age, and what is refused."""

import pytest

from tests.core.acceptance.counterfactuals import counterfactuals
from tests.refused import refused
from tltlab.acceptance.per_drafter import PerDrafter
from tltlab.acceptance.replay import TraceAcceptance
from tltlab.errors import ConfigError
from tltlab.state import DrafterState
from tltlab.strategy import Strategy

KEY_A, KEY_B = (0, "a", 0, 0), (0, "b", 0, 0)


TABLE = counterfactuals(
    [
        (*KEY_A, "learned", 5, None, 4, [0, 0, 0]),
        (*KEY_A, "learned", 1, None, 4, [4, 2, 0]),
        (*KEY_A, "learned", 2, None, 3, [3, 1, 0]),
        (*KEY_B, "learned", 2, None, 4, [1]),
    ]
)


@pytest.mark.parametrize(
    ("age", "kept"),
    [(None, [4, 2, 0]), (0, [4, 2, 0]), (1, [4, 2, 0]), (2, [3, 1, 0]), (3, [0, 0, 0]), (99, [0, 0, 0])],
)
def test_nearest_age_that_is_not_younger_is_replayed(age, kept):
    for table in (TABLE, TABLE.iloc[::-1]):
        model = TraceAcceptance(table, drafter_age=age)
        assert model.positions("learned", KEY_A, 3).tolist() == kept
        assert model.positions("learned", KEY_B, 1).tolist() == [1], "each response has its own ages"


def test_a_state_of_the_drafter_chooses_the_age():
    model = TraceAcceptance(TABLE)
    assert model.in_state({}) is model
    older = model.in_state({"learned": DrafterState(age=2, updates=7)})
    assert older.positions("learned", KEY_A, 3).tolist() == [3, 1, 0]
    assert model.positions("learned", KEY_A, 3).tolist() == [4, 2, 0]
    assert older.drafters == ("learned",)


def test_a_trace_states_what_it_lacks():
    model, old = TraceAcceptance(TABLE), TraceAcceptance(TABLE, drafter_age=2)
    model.check(Strategy.chain("learned", 4))
    for of, shape, fact in (
        (old, ("learned", 4, 1, 5), 3),
        (model, ("learned", 5, 1, 6), 4),
        (model, ("ngram", 2, 1, 3), "learned"),
        (model, ("learned", 3, 2, 6), "chain"),
    ):
        with refused(ConfigError, naming=(fact,)):
            of.check(Strategy(*shape))
    for key, num_tokens, fact in (((0, "c", 0, 0), 1, "c"), (KEY_B, 2, "1 positions")):
        with refused(ConfigError, naming=(fact,)):
            model.positions("learned", key, num_tokens)
    with refused(ConfigError):
        model.curve(Strategy.chain("learned", 4))
    with refused(ConfigError, naming=("replayed",)):
        PerDrafter({"learned": model})
