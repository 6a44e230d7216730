"""A placement of a user's own splits the rollouts of a training run, and is told what came before."""

import pytest

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.runtime.recipe.engines import EngineBuild
from tltlab.runtime.rollout.pool import WorkerPool
from tltlab.runtime.run.state import RunEvents

from ..engine.asking import request
from .scripted_engines import recipe, response, rolled

OWN = """
from tltlab.planning.placement import Placement

class Longest(Placement):
    def __init__(self, unknown=0):
        self.unknown = unknown

    def place(self, workload, workers, history):
        told = {name: list(lengths) for name, lengths in history.items()}
        order = sorted(range(len(workload)), key=lambda i: -max(told.get(workload[i].key[1], [self.unknown])))
        return [*([i] for i in order[: workers - 1]), *[[]] * (workers - 1 - len(order)), order[workers - 1 :]]
"""


@pytest.fixture
def pool(tmp_path, monkeypatch):
    """Two workers that are not started, under a placement that gives the first one the longest response alone."""
    (tmp_path / "placing.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    ours = recipe({"num_workers": 2, "placement": "placing:Longest(unknown=20)"})
    events = RunEvents(tmp_path / "events.jsonl")
    build = EngineBuild(drafters={}, max_draft_depth=0, graphs=None)
    return WorkerPool(ours, build, lambda n: None, lambda n: {}, events=events, on_restart=lambda n: None)


def names(shares):
    return [[r.key[1] for r in share] for share in shares]


def test_earlier_lengths_place_rollouts_not_evaluations(pool):
    asked = [request(name, 0, [1, 2], 100) for name in ("a", "b", "c")]
    assert names(pool.share(asked, pool.placement)) == [["a"], ["b", "c"]]
    turns = (("a", 0, 10), ("b", 0, 15), ("b", 1, 9))
    ended = [response((0, name, 0, turn), [5] * tokens) for name, turn, tokens in turns]
    parts = [rolled(ended), rolled([response((0, "c", 0, 0), [5] * 90, finish_reason="abort")])]
    pool.remember([asked, []], parts)
    assert pool.lengths == {"a": [10], "b": [24]}, "of all turns, and of whole responses alone"
    assert names(pool.share(asked, pool.placement)) == [["b"], ["c", "a"]]
    assert names(pool.share(asked)) == [["a", "b"], ["c"]]


def test_plan_that_loses_request_ends_run(pool):
    pool.placement.place = lambda *_: [[0], []]
    with refused(ConfigError, naming=("Longest", 2)):
        pool.share([request("a", n, [1], 9) for n in range(2)], pool.placement)
