"""Going back, with stand-ins for actors that tell in which order they were asked."""

import math
from functools import partial
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import Mock

import pytest

from tltlab.planning.beliefs import LengthBelief
from tltlab.policies.policy import Policy
from tltlab.policies.specs import FixedSpec
from tltlab.runtime.data.prompts import Prompt
from tltlab.runtime.drafter.run import NoDrafting
from tltlab.runtime.rollout.reward_pool import RewardPool
from tltlab.runtime.rollout.rewards import Scored
from tltlab.runtime.run.checkpoints import RunCheckpoints
from tltlab.runtime.run.data import RolloutsAhead
from tltlab.runtime.run.grpo import GrpoRun, RunActors
from tltlab.runtime.run.state import RunEvents, RunState
from tltlab.runtime.trainer.group import TrainerDied
from tltlab.strategy import NO_SPECULATION, Strategy

from ..small_models import small_recipe

PLAIN = Policy(selector=FixedSpec(strategy=NO_SPECULATION))
SUFFIX = Policy(selector=FixedSpec(strategy=Strategy.chain("suffix", 4)))


class Asked:
    """Does nothing, and notes what it was asked in `log`."""

    def __init__(self, log):
        self.log = log

    def __getattr__(self, name):
        def do(*args):
            self.log.append(" ".join([name, *(str(arg) for arg in args if isinstance(arg, int))]))

        return do


class AcceptedDrafts:
    """Has state, and keeps what is loaded."""

    def __init__(self, state):
        self._state = state

    def begin(self): ...

    def state_dict(self, folder):
        return self._state

    def load_state_dict(self, state, folder):
        self.loaded = state


class Pool(Asked):
    handles = (None, None)
    lengths: ClassVar = {}

    def __init__(self, log):
        super().__init__(log)
        self.history, self.belief = AcceptedDrafts(["all"]), LengthBelief()

    def state_dicts(self):
        self.log.append("state_dicts")
        return [{}, {}]


class Actors(Asked):
    def __init__(self, log):
        super().__init__(log)
        self.pool, self.trainers = Pool(log), Asked(log)


def begun(out, policy, log, folder=None):
    run = GrpoRun.__new__(GrpoRun)
    run.out, run.recipe, run.policy, run.state = out, small_recipe(), policy, RunState()
    run.checkpoints, run.data = RunCheckpoints(out / "checkpoints", 2), AcceptedDrafts({"order": {}, "rollouts": {}})
    run.drafting, run.events, run._recorder = NoDrafting(), RunEvents(out / "events.jsonl"), Asked([])
    run._replay, run._restarts, run._origin_drafter, run.actors = None, 0, {}, Actors(log)
    run.pool, run.trainers = run.actors.pool, run.actors.trainers
    run.state.in_force(policy)
    run._begin(folder)
    return run


def test_under_another_policy_engines_forget(tmp_path):
    first, log = begun(tmp_path, PLAIN, []), []
    first.state.rl_step = first.state.policy_version = 2
    second = begun(tmp_path, SUFFIX, log, first._save_checkpoint())
    assert [entry["rl_step"] for entry in second.state.policies] == [0, 2]
    log.clear()
    second._restart(TrainerDied("killed"))
    assert log[log.index("push_weights 2") + 1 :] == ["set_policy 0", "load_state_dicts", "set_policy 2"]
    assert second.pool.history.loaded is None


def test_a_policy_set_later_recurs(tmp_path):
    run = begun(tmp_path, PLAIN, [])
    run._ahead = RolloutsAhead(run.recipe, lambda rl_step: pytest.fail("nothing is rolled out"))
    done = []

    def step():
        done.append((run.rl_step, run.state.policy_name))
        if len(done) == 3:
            raise TrainerDied("killed")
        run.state.rl_step += 1

    run._step = step
    run.set_policy(SUFFIX, "mine")
    run.step()
    run.step()
    run.set_policy(PLAIN, "plain")
    run.step()
    assert done == [(0, "mine"), (1, "mine"), (2, "plain"), (0, "mine"), (1, "mine"), (2, "plain")]
    assert [entry["name"] for entry in run.state.policies] == ["mine", "plain"]


@pytest.mark.parametrize(("asked", "default"), [(0, 8), (None, 0)])
def test_an_evaluation_of_no_prompts_asks_no_engine(asked, default, tmp_path):
    run, log = GrpoRun.__new__(GrpoRun), []
    run.recipe = small_recipe(data={"train": "t", "heldout": "h"}, eval={"num_prompts": default})
    run.data, run.state = SimpleNamespace(heldout={"": ["a prompt", "another"]}), RunState()
    run.actors = Actors(log)
    assert math.isnan(run.evaluate(asked))
    assert log == []


def test_failures_of_an_evaluation_are_its_own(tmp_path):
    """A later rollout took them for its own."""
    (tmp_path / "failing_reward.py").write_text("def reward(prompt, response, answer): raise ValueError")
    run, said = GrpoRun.__new__(GrpoRun), []
    run.recipe = small_recipe(reward="failing_reward:reward", code=[str(tmp_path)], reward_pool={"processes": 0})
    prompts = [Prompt(prompt_id=f"p{n}", text="", answer="", token_ids=[1]) for n in range(2)]
    run.data, run.state, run.actors = SimpleNamespace(heldout={"": prompts}), RunState(), Actors([])
    run.pool = SimpleNamespace(evaluate=lambda requests: ["a response"] * len(requests))
    run.reward_pool, run.events = RewardPool(run.recipe), SimpleNamespace(note=said.append)
    run._ahead = RolloutsAhead(run.recipe, lambda rl_step: pytest.fail("nothing is rolled out"))
    assert run.evaluate() == 0.0
    assert ["evaluation" in each and "2 of 2" in each for each in said] == [True]
    assert run.reward_pool.take_failures() == []


def test_each_term_of_a_reward_has_a_mean():
    run = GrpoRun.__new__(GrpoRun)
    run.recipe = small_recipe(reward=[{"path": "a:right"}, {"path": "a:b", "name": "short"}])
    run._scored = [Scored(3.0, (1.0, 2.0)), Scored(0.0, (0.0, 0.0))]
    assert run._term_means() == {"reward/terms/right": 0.5, "reward/terms/short": 1.0}


def test_the_best_policy_is_kept_whole(tmp_path):
    run = GrpoRun.__new__(GrpoRun)
    run.actors, run.state, run.checkpoints = Actors([]), RunState(), RunCheckpoints(tmp_path, 2)

    def save(method, folder):
        if run.rl_step == 9:
            raise KeyboardInterrupt

    run.trainers = SimpleNamespace(ask=save)
    for rl_step, reward, kept in ((2, 0.5, 2), (4, 0.5, 2), (6, 0.7, 6), (8, 0.2, 6), (4, 0.2, 4), (6, 0.7, 6)):
        run.state.rl_step = rl_step
        run.keep_best(reward)
        assert run.best["rl_step"] == kept
    run.state.rl_step = 9
    with pytest.raises(KeyboardInterrupt):
        run.keep_best(0.9)
    assert run.best["rl_step"] == 6
    (left := tmp_path / ".best.tltlab-left").mkdir()  # killed between two renames
    (tmp_path / "best").rename(left / "old")
    run.state.rl_step = 10
    run.keep_best(0.9)
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_a_repetition_that_does_not_count_is_reported(tmp_path):
    run, said = GrpoRun.__new__(GrpoRun), []
    run.out, run.state, run.events = tmp_path, RunState(), SimpleNamespace(note=said.append)
    run.pool = SimpleNamespace(repeat=lambda shares, rl_step: [])
    run._repeat([[]], [], 1.0, 4)
    assert ["RL step 4" in each for each in said] == [True]
    assert run.state.repeats == []
    assert not (tmp_path / "repeats.json").exists()


def test_trainers_that_die_at_their_start_start_again(tmp_path):
    starts = []

    def die():
        starts.append(True)
        raise TrainerDied("killed")

    actors = RunActors(small_recipe(), PLAIN, NoDrafting(), RunEvents(tmp_path / "events.jsonl"))
    actors.trainers = SimpleNamespace(handles=[], restart=die)
    for engines_failed, most in ((False, 1 + small_recipe().faults.max_restarts), (True, 1)):
        actors._given_up = engines_failed
        starts.clear()
        with pytest.raises(TrainerDied):
            actors._with_trainers()
        assert len(starts) == most


@pytest.mark.parametrize("transport", ["ipc", "host"])
def test_engines_wake_once_trainers_have_released_their_device(tmp_path, transport):
    actors = RunActors(small_recipe(), PLAIN, NoDrafting(), RunEvents(tmp_path / "events.jsonl"))
    actors._colocated, actors._transport = True, transport
    calls = Mock(**{"pool.all_alive": True})
    actors.pool, actors.trainers = calls.pool, calls.trainers
    for turn in (actors.trainers_turn, partial(actors.push_weights, 1), actors.trainers_turn, actors.engines_turn):
        turn()
    order = [
        str(call).removeprefix("call.").replace("()", "") for call in calls.mock_calls if "update" not in str(call)
    ]
    there, back = ["pool.sleep(1)", "trainers.onload"], ["trainers.release", "pool.wake_up"]
    pushed = [
        "trainers.release(keep=True)",
        "pool.wake_up(['weights'])",
        "trainers.release",
        "pool.wake_up(['kv_cache'])",
    ]
    assert order == [*there, *(pushed if transport == "ipc" else back), *there, *back]
