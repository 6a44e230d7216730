"""The one builder of a trace's rows: columns in the order of the format, rows of columns, strategies by column."""

from __future__ import annotations

import numpy as np
import pytest

from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.traces.schema import TABLES, as_rows, columns, key_columns, strategy_columns


def test_columns_come_in_the_order_of_the_format():
    row = columns("steps", policy_version=2, t_start=0.5, rl_step=1)
    assert list(row.items()) == [("rl_step", 1), ("t_start", 0.5), ("policy_version", 2)]
    assert as_rows({"rl_step": 1, "worker": [0, 1]}) == [{"rl_step": 1, "worker": 0}, {"rl_step": 1, "worker": 1}]
    assert as_rows({"rl_step": 1, "worker": []}) == []


@pytest.mark.parametrize(("values", "named"), [({"rl_step": 1}, "t_start"), ({"rl_step": 1, "colour": 2}, "colour")])
def test_missing_and_unknown_columns_are_assertions(values: dict[str, int], named: str):
    with pytest.raises(AssertionError, match=named):
        columns("steps", **values)


def test_strategies_and_keys_are_columns_of_the_format():
    strategies = [NO_SPECULATION, Strategy("learned", 8, 4, 48)]
    each = strategy_columns(strategies)
    assert each == {"drafter": ["none", "learned"], "draft_depth": [0, 8], "top_k": [0, 4], "tokens_to_verify": [1, 48]}
    repeated = strategy_columns(strategies, np.array([1, 1, 0]))
    assert {name: array.tolist() for name, array in repeated.items()} == {
        name: [values[1], values[1], values[0]] for name, values in each.items()
    }
    assert strategy_columns([]).keys() == each.keys() <= set(TABLES["decisions"].names)
    assert list(key_columns((1, "p", 2, 0)).values()) == [1, "p", 2, 0]
