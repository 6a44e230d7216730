"""Going back, with stand-ins for actors that tell in which order they were asked."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from tltlab.policies.policy import Policy
from tltlab.policies.specs import FixedSpec
from tltlab.runtime.drafter.run import NullDrafting
from tltlab.runtime.run.checkpoints import RunCheckpoints
from tltlab.runtime.run.data import RolloutsAhead
from tltlab.runtime.run.grpo import GrpoRun, Recovery, RunActors
from tltlab.runtime.run.state import RunEvents, RunState
from tltlab.runtime.trainer.group import TrainerDied
from tltlab.strategy import NO_SPECULATION, Strategy

from ..small_models import small_recipe

PLAIN = Policy(selector=FixedSpec(strategy=NO_SPECULATION))
SUFFIX = Policy(selector=FixedSpec(strategy=Strategy.chain("suffix", 4)))


class Asked:
    """Does nothing, and notes what it was asked in `log`."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def do(*args: Any) -> None:
            self.log.append(" ".join([name, *(str(arg) for arg in args if isinstance(arg, int))]))

        return do


class AcceptedDrafts:
    """Has state, and keeps what is loaded."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def begin(self) -> None: ...

    def state_dict(self, folder: Path) -> Any:
        return self._state

    def load_state_dict(self, state: Any, folder: Path) -> None:
        self.loaded = state


class Pool(Asked):
    handles = (None, None)
    lengths: ClassVar = {}

    def __init__(self, log: list[str]) -> None:
        super().__init__(log)
        self.history = AcceptedDrafts(["all"])

    def state_dicts(self) -> list[dict[str, Any]]:
        self.log.append("state_dicts")
        return [{}, {}]


class Actors(Asked):
    def __init__(self, log: list[str]) -> None:
        super().__init__(log)
        self.pool, self.trainers = Pool(log), Asked(log)


def recovery(out: Path, policy: Policy) -> Recovery:
    checkpoints, data = RunCheckpoints(out / "checkpoints", 2), AcceptedDrafts({"order": {}, "rollouts": {}})
    return Recovery(small_recipe(), policy, checkpoints, data, NullDrafting(), RunEvents(out / "events.jsonl"))  # type: ignore[arg-type]


def begun(out: Path, policy: Policy, log: list[str], folder: Path | None = None) -> tuple[Recovery, RunState]:
    found, state = recovery(out, policy), RunState()
    state.in_force(policy)
    return found, found.begin(Actors(log), state, folder)  # type: ignore[arg-type]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of RL step 2 under the policy PLAIN."""
    first, state = begun(tmp_path, PLAIN, [])
    state.rl_step = state.policy_version = 2
    return first.save(state)


def test_weights_come_back_before_what_drafters_know(tmp_path: Path, saved: Path):
    log: list[str] = []
    second, state = begun(tmp_path, PLAIN, log, saved)
    assert (state.rl_step, second.events.rl_step) == (2, 2)
    assert log[:4] == ["engines_turn", "state_dicts", "trainers_turn", "load_checkpoint"]
    assert log[4:] == ["push_weights 2", "set_policy 0", "load_state_dicts"]
    assert second.actors.pool.history.loaded == ["all"]  # type: ignore[attr-defined]


def test_under_another_policy_engines_forget(tmp_path: Path, saved: Path):
    log: list[str] = []
    second, state = begun(tmp_path, SUFFIX, log, saved)
    assert [entry["rl_step"] for entry in state.policies] == [0, 2]
    log.clear()
    second.restart(TrainerDied("killed"))
    assert log[log.index("push_weights 2") + 1 :] == ["set_policy 0", "load_state_dicts", "set_policy 2"]
    assert second.actors.pool.history.loaded is None  # type: ignore[attr-defined]


def test_a_policy_set_later_recurs(tmp_path: Path):
    log: list[str] = []
    found, state = begun(tmp_path, PLAIN, log)
    run = GrpoRun.__new__(GrpoRun)
    run.out, run.recipe, run.recovery, run.state = tmp_path, found.recipe, found, state
    run.pool, run._recorder = Pool(log), Asked([])  # type: ignore[assignment]
    run._ahead = RolloutsAhead(run.recipe, lambda rl_step: pytest.fail("nothing is rolled out"))
    done: list[tuple[int, str]] = []

    def step() -> None:
        done.append((run.rl_step, run.state.policy_name))
        if len(done) == 3:
            raise TrainerDied("killed")
        run.state.rl_step += 1

    run._step = step  # type: ignore[method-assign,assignment]
    run.set_policy(SUFFIX, "mine")
    run.step()
    run.step()
    run.set_policy(PLAIN, "plain")
    run.step()
    assert done == [(0, "mine"), (1, "mine"), (2, "plain"), (0, "mine"), (1, "mine"), (2, "plain")]
    assert [entry["name"] for entry in run.state.policies] == ["mine", "plain"]


@pytest.mark.parametrize(("asked", "default"), [(0, 8), (None, 0)])
def test_an_evaluation_of_no_prompts_asks_no_engine(asked: int | None, default: int, tmp_path: Path):
    run, log = GrpoRun.__new__(GrpoRun), []
    run.recipe = small_recipe(data={"train": "t", "heldout": "h"}, eval={"num_prompts": default})
    run.data, run.state = SimpleNamespace(heldout=["a prompt", "another"]), RunState()  # type: ignore[assignment]
    run.actors = Actors(log)  # type: ignore[assignment]
    assert math.isnan(run.evaluate(asked))
    assert log == []


def test_a_repetition_that_does_not_count_is_reported(tmp_path: Path):
    run, said = GrpoRun.__new__(GrpoRun), []
    run.out, run.state, run.events = tmp_path, RunState(), SimpleNamespace(note=said.append)  # type: ignore[assignment]
    run.pool = SimpleNamespace(repeat=lambda shares, rl_step: [])  # type: ignore[assignment]
    run._repeat([[]], [], 1.0, 4)
    assert ["RL step 4" in each for each in said] == [True]
    assert run.state.repeats == []
    assert not (tmp_path / "repeats.json").exists()


def test_only_the_first_holder_lets_go(tmp_path: Path):
    run = GrpoRun.__new__(GrpoRun)
    run.out, run._locked = tmp_path / "run", False
    with run.locked():
        with run.locked():
            pass
        assert run._locked
    assert not run._locked


def test_trainers_that_die_at_their_start_start_again(tmp_path: Path):
    starts: list[bool] = []

    def die() -> None:
        starts.append(True)
        raise TrainerDied("killed")

    actors = RunActors(small_recipe(), PLAIN, NullDrafting(), RunEvents(tmp_path / "events.jsonl"))
    actors.trainers = SimpleNamespace(handles=[], restart=die)  # type: ignore[assignment]
    for engines_failed, most in ((False, 1 + small_recipe().faults.max_restarts), (True, 1)):
        actors._given_up = engines_failed
        starts.clear()
        with pytest.raises(TrainerDied):
            actors._with_trainers()
        assert len(starts) == most
