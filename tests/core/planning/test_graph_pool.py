"""The pool of captured graphs: what is captured, and what it takes."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.planning.graph_pool import CapturePlan, GraphPool, plan_bucketed, plan_for, sglang_sizes
from tltlab.policies.policy import Activation, Policy, load_policy
from tltlab.policies.specs import BegMabSpec, Bucket, ExploreSpec, FixedSpec, NoneSpec, TableRow, TableSpec
from tltlab.strategy import NO_SPECULATION, Strategy

SIZES = sglang_sizes(32)
DEEP, WIDE, SHORT = Strategy("learned", 8, 4, 48), Strategy("learned", 8, 8, 48), Strategy("learned", 4, 4, 8)
POOL = GraphPool(num_layers=32, hidden_size=4096, vocab_size=128_256, context_tokens=8192, bytes_per_layer=1e6)
ROWS = st.lists(
    st.tuples(st.integers(1, 32), st.sampled_from([DEEP, WIDE, SHORT, NO_SPECULATION])), min_size=1, max_size=5
)


@pytest.mark.parametrize(
    ("plan", "graphs"),
    [
        (plan_bucketed([(1, DEEP), (4, SHORT)], 8, (1, 2, 4, 8)), [(4, 8), (8, 8), (1, 48), (2, 48), (3, 48)]),
        (plan_bucketed([(1, DEEP), (1, WIDE)], 4, (1, 2, 4)), [(1, 48), (2, 48), (4, 48)]),
        (plan_bucketed([(4, DEEP)], 4, (1, 2, 4)), [(1, 48), (2, 48), (4, 48)]),
    ],
    ids=["a bucket's end", "equal widths", "below the first row"],
)
def test_the_targets_graphs_are(plan: CapturePlan, graphs: list[tuple[int, int]]):
    assert plan.target_graphs == graphs


def test_the_shipped_buckets_split_the_sizes():
    # The strategies of TLT's released code.
    rows = [(n, Strategy("learned", 8, 4, v)) for n, v in ((1, 48), (2, 32), (5, 16), (21, 8))]
    plan = plan_bucketed(rows, 32, SIZES)
    split = {48: (1,), 32: (2, 3, 4), 16: (5, 6, 7, 8, 10, 12, 14, 16, 18, 20), 8: (22, 24, 26, 28, 30, 32)}
    assert plan.target == split
    assert sorted(sum(plan.drafter.values(), ())) == list(SIZES)


def test_bytes_of_small_pool_are_its_terms():
    # One graph of batch 2, 3 tokens each, a model of 1 layer, width 10, 100 words, a context of 1000.
    pool = GraphPool(
        num_layers=1, hidden_size=10, vocab_size=100, context_tokens=1000, page_tables=1, workspace_bytes=5,
        bytes_per_layer=7,
    )  # fmt: skip
    plan = plan_bucketed([(1, Strategy("learned", 2, 1, 3))], 2, (2,))
    target = 7 * 2 + 6 * 20 + 6 * 400 + 6 * 200 + 2 * 4000 + 5
    drafter = 7 * 4 + 2 * (200 + 400) + 2 * (200 + 400) + 2 * 400 + 2 * 2 * 4000 + 10
    assert pool.memory_bytes(plan) == target + drafter


@given(ROWS)
def test_buckets_never_take_more_than_naive_capture(rows: list[tuple[int, Strategy]]):
    # Every bucket's end is captured, so only sizes that include the ends compare.
    sizes = range(1, 33)
    naive = sum(POOL.memory_bytes(plan_bucketed([(1, strategy)], 32, sizes)) for strategy in {s for _, s in rows})
    assert POOL.memory_bytes(plan_bucketed(rows, 32, sizes)) <= naive


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: plan_bucketed([], 8, SIZES), ("rows",)),
        (lambda: plan_bucketed([(0, DEEP)], 8, SIZES), ("min_batch",)),
        (lambda: plan_bucketed([(9, DEEP)], 8, SIZES), ("min_batch",)),
        (lambda: plan_bucketed([(1, DEEP)], 8, (0, 4)), ("1",)),
        (lambda: plan_bucketed([(1, DEEP)], 0, (1,)), ("1",)),
    ],
)
def test_what_cannot_be_captured_is_refused(wrong: Callable[[], object], message: tuple):
    with refused(ConfigError, naming=message):
        wrong()


TABLE = tuple(TableRow(min_batch=b, strategy=s) for b, s in ((2, DEEP), (3, SHORT), (5, NO_SPECULATION)))
ARMS = (Bucket(min_batch=1, strategies=(DEEP, WIDE)), Bucket(min_batch=3, strategies=(SHORT, NO_SPECULATION)))
OF_ARMS = [(DEEP, 1), (DEEP, 2), (SHORT, 4), (WIDE, 1), (WIDE, 2)]
PLAIN, OF_TABLE = [(1, 1), (2, 1), (4, 1), (8, 1)], [(1, 48), (2, 48), (4, 8), (8, 1)]
BOTH = sorted([*PLAIN, (1, 48), (2, 48), (4, 48)])
GROUPED = BegMabSpec(strategies=(DEEP, WIDE, SHORT), thresholds=(1, 3))
NEVER, FOUR = Activation(max_requests=0), Activation(max_requests=4)
WAITING = Activation(max_requests=4, count="remaining")


@pytest.mark.parametrize(
    ("selector", "activation", "max_batch", "target", "drafter"),
    [
        (NoneSpec(), None, 8, PLAIN, []),
        (FixedSpec(strategy=Strategy.chain("ngram", 4)), None, 2, [(1, 5), (2, 5)], []),
        (FixedSpec(strategy=DEEP), None, 2, [(1, 48), (2, 48)], [(DEEP, 1), (DEEP, 2)]),
        (FixedSpec(strategy=DEEP), NEVER, 8, PLAIN, []),
        (FixedSpec(strategy=DEEP), WAITING, 8, BOTH, [(DEEP, 1), (DEEP, 2), (DEEP, 4)]),
        (FixedSpec(strategy=DEEP), FOUR, 8, [(1, 48), (2, 48), (4, 48), (8, 1)], [(DEEP, 1), (DEEP, 2), (DEEP, 4)]),
        (TableSpec(rows=TABLE), None, 8, OF_TABLE, [(DEEP, 1), (DEEP, 2), (SHORT, 4)]),
        (BegMabSpec(buckets=ARMS), None, 4, [(1, 48), (2, 48), (4, 1), (4, 8)], OF_ARMS),
        (GROUPED, None, 4, [(1, 48), (2, 48), (4, 8)], OF_ARMS),
        (ExploreSpec(strategies=(SHORT,)), None, 2, [(1, 8), (2, 8)], [(SHORT, 1), (SHORT, 2)]),
    ],
)
def test_a_policy_is_captured_where_it_may_choose(selector, activation, max_batch, target, drafter):
    plan = plan_for(Policy(selector=selector, activation=activation), max_batch, (1, 2, 4, 8))
    assert sorted(plan.target_graphs) == target
    drafted = [(strategy, batch) for strategy, batches in plan.drafter.items() for batch in batches]
    assert sorted(drafted, key=str) == sorted(drafter, key=str)


@pytest.mark.parametrize("name", ["none", "fixed", "table", "epsilon-greedy", "ucb1", "beg-mab", "explore"])
def test_every_shipped_policy_has_a_plan(name: str):
    plan = plan_for(load_policy(name), 64, sglang_sizes(64))
    assert max(b for b, _ in plan.target_graphs) == 64
