"""Rollouts whose requests a planner moves between real engines: nothing is lost, and greedy tokens stay the same."""

import json
import os
import re
import signal
from contextlib import closing
from dataclasses import replace

import pytest

from tests.conformance.test_plans import STORIES, Scripted, key, outcome
from tests.runtime.engine.asking import raising, request
from tltlab.planning.rollout import Gather, Hold, Move, RolloutPlanner, Shape
from tltlab.runtime.recipe.engines import EngineBuild
from tltlab.runtime.recipe.recipe import load_recipe
from tltlab.runtime.rollout.pool import WorkerPool
from tltlab.runtime.run.state import RunEvents

pytestmark = pytest.mark.engine
PROMPTS, GROUP, CAP = 4, 3, 60
TAIL = Shape(engines=1, gpus=2)


class Stay(RolloutPlanner):
    def plan(self, state):
        return []


class Script(RolloutPlanner):
    """Does once what it is made with, once so many are left, and keeps what it saw.

    Until then it holds the last four requests: on a busy machine all others may end before it is asked again.
    """

    def __init__(self, left, do):
        self.left, self.do, self.seen, self.told = left, do, [], []

    def plan(self, state):
        self.seen.append(state)
        if self.do is None:
            return []
        if len(state) > self.left:
            return [Hold(key=key) for key in state.keys[-4:]] if len(self.seen) == 1 else []
        do, self.do = self.do, None
        return do(state)

    def failed(self, action, why):
        self.told.append((action, why))


@pytest.fixture(scope="module")
def pool(one_ray, recipe_file, tmp_path_factory):
    greedy = ["rollout.top_k=1", "faults.max_restarts=100"]
    planned = [f"rollout.planner={__name__}:Stay", "rollout.tail_shape=1x2", "rollout.repeat_every=0"]
    recipe = load_recipe(recipe_file, [*greedy, *planned])
    anywhere = {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": "DEFAULT", "env_vars": {}}
    pool = WorkerPool(
        recipe,
        EngineBuild(drafters={}, max_draft_depth=0, graphs=None),
        lambda number: None,
        lambda number: anywhere,
        events=RunEvents(tmp_path_factory.mktemp("pool") / "events.jsonl"),
        on_restart=lambda number: None,
    )
    with closing(pool):
        pool.start()
        yield pool


def requests():
    return [
        request(f"p{n}", sample, [1, 4 + n, 9 + sample, 4 + n, 9], CAP, ignore_eos=False)
        for n in range(PROMPTS)
        for sample in range(GROUP)
    ]


def rolled_out(pool, planner):
    pool.driver.planner = planner
    return pool.generate(pool.share(requests()), 0)


def answers(parts):
    for part in parts:
        assert [r.key for r in part.responses] == [r.key for r in part.asked]
    found = [r for part in parts for r in part.responses]
    assert sorted(r.key for r in found) == sorted(r.key for r in requests())
    for r in found:
        assert len(r.logprobs) == len(r.token_ids)
        assert 0 <= r.t_submit <= r.t_first_token <= r.t_finish
        assert r.finish_reason in ("stop", "length")
        assert r.tool_s is None
    return {r.key: (list(r.token_ids), r.finish_reason) for r in found}


@pytest.fixture(scope="module")
def alone(pool):
    """Greedy answers without moves."""
    return answers(rolled_out(pool, Stay()))


def events(pool):
    path = pool.events.path
    return [json.loads(line)["event"] for line in path.read_text().splitlines()] if path.exists() else []


def away(state):
    """Every running request to the other engine, and what was held to the second."""
    return [Move(key=key, worker=min(1 - int(n), 1)) for key, n in zip(state.keys, state.worker, strict=True)]


def test_a_planner_sees_and_does_what_is_simulated(pool):
    story = STORIES["one after another"]
    asked = [request(key(n)[1], 0, [1, 4 + n, 9], tokens) for n, tokens in enumerate(story.lengths)]
    pool.driver.planner = planner = Scripted(story.rule, prompt=3, caps=story.lengths)
    parts = pool.generate(pool.share(asked), 0)
    found = {r.key: (r.t_finish, n) for n, part in enumerate(parts) for r in part.responses}
    facts = [*planner.facts, *outcome(parts[0].moves, [found[r.key] for r in asked])]

    def untimed(facts):
        return [re.sub(r"[\d.e-]+ s", "", fact) for fact in facts]

    assert untimed(facts) == untimed(story.facts)


def test_planner_that_does_nothing_changes_no_draw(pool):
    sampled = [replace(r, top_k=0) for r in requests()]
    drawn = []
    for planner in (None, Stay(), Script(PROMPTS * GROUP, raising(ValueError("oh")))):
        pool.driver.planner = planner
        parts = pool.generate(pool.share(sampled), 1)
        drawn.append([(r.key, list(r.token_ids), list(r.logprobs)) for part in parts for r in part.responses])
    assert sorted(drawn[0]) == sorted(drawn[1]) == sorted(drawn[2])
    assert any("planner Script: oh" in event for event in events(pool))


def test_requests_move_between_engines(pool, alone):
    planner = Script(8, away)
    parts = rolled_out(pool, planner)
    assert answers(parts) == alone
    assert not planner.told
    begin = planner.seen[0]
    assert len(begin) == PROMPTS * GROUP
    assert begin.worker.tolist() == [0] * 6 + [1] * 6
    assert not begin.generated_tokens.any()
    later = planner.seen[-1]
    assert all(later.ended[key] == len(alone[key][0]) for key in later.ended)
    assert len(planner.seen) >= 2


def test_all_gather_on_an_engine_of_another_shape(pool, alone):
    planner = Script(8, lambda state: [Gather(shape=TAIL, queues=())])
    parts = rolled_out(pool, planner)
    assert answers(parts) == alone
    assert all(0 < part.moves[0][2] <= 8 for part in parts)
    assert planner.seen[-1].active == TAIL
    assert [bool(part.lent) for part in parts] == [False, True]
    assert answers(rolled_out(pool, Stay())) == alone, "and back"


@pytest.mark.parametrize("killed", [0, 1, 2], ids=["source", "destination", "tail"])
def test_killed_engine_loses_nothing(pool, alone, killed):
    """It dies with a move, or a gather, under way."""

    def kill_and_move(state):
        os.kill(pool.pids[killed], signal.SIGKILL)
        if killed == 2:
            return [Gather(shape=TAIL, queues=())]
        return [move for move in away(state) if move.worker == 1]

    before = len(events(pool))
    assert answers(rolled_out(pool, Script(8, kill_and_move))) == alone
    assert answers(rolled_out(pool, Stay())) == alone
    assert any(f"rollout worker {killed} failed" in event for event in events(pool)[before:])
