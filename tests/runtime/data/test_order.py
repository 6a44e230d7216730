"""The order in which prompts come: epochs of a seed, batches of them, what is excluded, and continuing after a stop."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.runtime.data.order import DataOrder

SIZES = st.integers(1, 12)
# What one call asks for: how many, and which prompts not.
TAKES = st.lists(st.tuples(st.integers(0, 14), st.frozensets(st.integers(0, 12), max_size=8)), max_size=20)


def batches(num_prompts, size, seed, num):
    order = DataOrder(num_prompts, seed)
    return [order.take(size) for _ in range(num)]


def test_an_epoch_shows_every_prompt_once():
    *epoch, later = batches(12, 4, 5, 4)
    assert sorted(number for batch in epoch for _, number in batch) == list(range(12))
    assert {e for batch in epoch for e, _ in batch} == {0}
    assert later[0][0] == 1
    assert batches(12, 4, 5, 4) == [*epoch, later]
    assert batches(12, 4, 6, 4) != [*epoch, later]


@given(num_prompts=SIZES, takes=TAKES)
def test_no_prompt_comes_twice_in_an_epoch(num_prompts, takes):
    order = DataOrder(num_prompts, seed=1)
    seen = set()
    for size, exclude in takes:
        batch = order.take(size, exclude)
        numbers = [number for _, number in batch]
        assert len(set(numbers)) == len(numbers) == min(size, len(set(range(num_prompts)) - exclude))
        assert not exclude & set(numbers)
        assert not seen & set(batch)
        seen |= set(batch)


@given(num_prompts=SIZES, before=TAKES, after=TAKES)
def test_an_order_continues_from_its_state(num_prompts, before, after):
    unbroken, resumed = DataOrder(num_prompts, seed=2), DataOrder(num_prompts, seed=2)
    for size, exclude in before:
        unbroken.again(unbroken.take(size, exclude)[:2])
    resumed.load_state_dict(json.loads(json.dumps(unbroken.state_dict())))
    for size, exclude in after:
        batch = resumed.take(size, exclude)
        assert batch == unbroken.take(size, exclude)
        assert len(set(batch)) == len(batch)
        for order in (unbroken, resumed):
            order.again(batch[1:3])


@given(num_prompts=SIZES, before=TAKES)
def test_an_order_knows_when_each_prompt_comes_next(num_prompts, before):
    order = DataOrder(num_prompts, seed=2)
    for size, exclude in before:
        order.again(order.take(size, exclude)[:2])
    turns = order.turns()
    came = [order.take(1)[0][1] for _ in range(2 * num_prompts)]
    assert [came.index(number) for number in range(num_prompts)] == turns.tolist()


def test_an_excluded_prompt_keeps_its_turn():
    order = DataOrder(8, seed=0)
    first = DataOrder(8, seed=0).take(1)[0][1]
    held_up = order.take(4, exclude=[first])
    assert order.take(4)[0] == (0, first)
    assert (0, first) not in held_up


def test_a_prompt_given_back_comes_again_in_its_epoch():
    order = DataOrder(6, seed=0)
    first, second, *_ = order.take(4)
    order.again([first, (-1, second[1])])
    assert order.take(3)[-1] == first
    order.again([first])
    assert order.take(2)[0][0] == 1, "what does not fill a batch waits for the next epoch"


@pytest.mark.parametrize(("num_prompts", "seed", "complaint"), [(9, 0, ("num_prompts", "8")), (8, 1, ("0",))])
def test_other_data_or_seeds_are_not_resumed(num_prompts, seed, complaint):
    with refused(ConfigError, naming=complaint):
        DataOrder(num_prompts, seed).load_state_dict(DataOrder(8, seed=0).state_dict())
