"""Where each request goes."""

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tltlab
from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.planning.placement import Placement
from tltlab.sim.placement import PLACEMENTS, place

from .workloads import requests_of


def requests(lengths, prompts=10):
    made = requests_of(lengths, prompts, cap=100)
    return replace(made, recorded_worker=np.where(np.arange(len(made)) == 3, np.nan, made.recorded_worker))


@pytest.mark.parametrize(
    ("placement", "lengths", "prompts", "queues"),
    [
        ("contiguous", [1] * 5, 10, [[0, 1, 2], [3, 4]]),
        ("round_robin", [1] * 5, 10, [[0, 2, 4], [1, 3]]),
        # By prompts and caps, not by responses.
        ("least_loaded", [90, 1, 1], [50, 10, 10], [[0], [1, 2]]),
        # Longest processing time first.
        ("longest_first", [3, 9, 5, 4], 10, [[1, 0], [2, 3]]),
    ],
)
def test_each_placement_splits_the_workload_in_its_way(placement, lengths, prompts, queues):
    assert place(requests(lengths, prompts), 2, placement) == queues


def test_recorded_needs_a_worker_for_each_response():
    assert place(requests([1] * 3), 2, "recorded") == [[0, 2], [1]]
    with refused(ConfigError):
        place(requests([1] * 4), 2, "recorded")
    with refused(ConfigError, naming=("1",)):
        place(requests([1] * 2), 1, "recorded")


class Reversed(Placement):
    """The last request first; remembers what it was told."""

    told: ClassVar[list[dict[str, list[int]]]] = []

    def place(self, workload, workers, history):
        self.told.append({name: list(lengths) for name, lengths in history.items()})
        return [list(range(len(workload)))[::-1], *([[]] * (workers - 1))]


def test_a_users_placement_is_reported_what_came_before():
    trace = tltlab.read([[5, 6], [7, 8]])
    for placement in (Reversed, Reversed()):
        Reversed.told.clear()
        result = tltlab.simulate(trace, placement=placement, workers=2)
        assert result.scenario.queues == ([[1, 0], []], [[1, 0], []])
        keys = [(p, s) for _, p, s, _ in result.scenario.steps[0].keys]
        lengths = {}
        for (prompt, _), tokens in zip(keys, (5, 6), strict=True):
            lengths.setdefault(prompt, []).append(tokens)
        assert Reversed.told[-2:] == [{}, lengths]
        assert "placement Reversed" in result.manifest.notes


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 6), st.sampled_from(PLACEMENTS[:4]))
def test_every_request_is_placed_once(lengths, workers, placement):
    queues = place(requests(lengths), workers, placement)
    assert len(queues) == workers
    assert sorted(r for queue in queues for r in queue) == list(range(len(lengths)))
