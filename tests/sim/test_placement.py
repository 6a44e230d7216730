"""Where each request goes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tltlab.errors import ConfigError
from tltlab.sim.engine.requests import Requests
from tltlab.sim.placement import PLACEMENTS, place

from .workloads import requests_of


def requests(lengths: list[int], prompts: list[int] | int = 10) -> Requests:
    made = requests_of(lengths, prompts, cap=100)
    return replace(made, recorded_worker=[None if i == 3 else w for i, w in enumerate(made.recorded_worker)])


def test_contiguous_splits_the_workload_in_order():
    assert place(requests([1] * 5), 2, "contiguous") == [[0, 1, 2], [3, 4]]


def test_round_robin_deals_out():
    assert place(requests([1] * 5), 2, "round_robin") == [[0, 2, 4], [1, 3]]


def test_least_loaded_counts_prompts_and_caps_not_responses():
    assert place(requests([90, 1, 1], [50, 10, 10]), 2, "least_loaded") == [[0], [1, 2]]


def test_longest_first_is_lpt():
    assert place(requests([3, 9, 5, 4]), 2, "longest_first") == [[1, 0], [2, 3]]


def test_recorded_needs_a_worker_for_each_response():
    assert place(requests([1] * 3), 2, "recorded") == [[0, 2], [1]]
    with pytest.raises(ConfigError, match="no worker for"):
        place(requests([1] * 4), 2, "recorded")
    with pytest.raises(ConfigError, match="worker 1 of 1"):
        place(requests([1] * 2), 1, "recorded")


def test_an_unknown_placement_is_named():
    with pytest.raises(ConfigError, match="'nearest'"):
        place(requests([1]), 1, "nearest")


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 6), st.sampled_from(PLACEMENTS[:4]))
def test_every_request_is_placed_once(lengths: list[int], workers: int, placement: str):
    queues = place(requests(lengths), workers, placement)
    assert len(queues) == workers
    assert sorted(r for queue in queues for r in queue) == list(range(len(lengths)))
