"""Going back, with stand-ins for actors that tell in which order they were asked."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tltlab.policies.policy import Policy
from tltlab.policies.specs import FixedSpec
from tltlab.runtime.drafter.drafting import NullDrafting
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.run.actors import RunActors
from tltlab.runtime.run.checkpoints import RunCheckpoints
from tltlab.runtime.run.data import RolloutsAhead
from tltlab.runtime.run.grpo import GrpoRun
from tltlab.runtime.run.recovery import Recovery
from tltlab.runtime.run.state import RunEvents, RunState
from tltlab.runtime.trainer.group import TrainerDied
from tltlab.strategy import NO_SPECULATION, Strategy

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


class Kept:
    def state_dict(self, folder: Path) -> list[Any]:
        return ["all"]

    def load_state_dict(self, rows: list[Any] | None, folder: Path) -> None:
        self.rows = rows


class Pool(Asked):
    handles = (None, None)

    def __init__(self, log: list[str]) -> None:
        super().__init__(log)
        self.history = Kept()

    def state_dicts(self) -> list[dict[str, Any]]:
        self.log.append("state_dicts")
        return [{}, {}]


class Data:
    def begin(self) -> None: ...

    def state_dict(self, folder: Path) -> dict[str, Any]:
        return {"order": {}, "rollouts": {}}

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None: ...


class Actors(Asked):
    def __init__(self, log: list[str]) -> None:
        super().__init__(log)
        self.pool, self.trainers = Pool(log), Asked(log)


def recovery(out: Path, policy: Policy) -> Recovery:
    recipe = Recipe.model_validate({"model": "m", "reward": "r:f", "data": {"train": "t"}})
    checkpoints = RunCheckpoints(out / "checkpoints", 2)
    return Recovery(recipe, policy, checkpoints, Data(), NullDrafting(), RunEvents(out / "events.jsonl"))  # type: ignore[arg-type]


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


def test_weights_come_back_before_what_is_known_of_drafters_and_trainers_load_on_their_turn(
    tmp_path: Path, saved: Path
):
    log: list[str] = []
    second, state = begun(tmp_path, PLAIN, log, saved)
    assert (state.rl_step, second.events.rl_step) == (2, 2)
    assert log[:4] == ["engines_turn", "state_dicts", "trainers_turn", "load_checkpoint"]
    assert log[4:] == ["push_weights 2", "set_policy 0", "load_state_dicts"]
    assert second.actors.pool.history.rows == ["all"]  # type: ignore[attr-defined]


def test_under_another_policy_engines_forget_what_they_have_learned_since_the_run_began(tmp_path: Path, saved: Path):
    log: list[str] = []
    second, state = begun(tmp_path, SUFFIX, log, saved)
    assert [entry["rl_step"] for entry in state.policies] == [0, 2]
    log.clear()
    second.restart(TrainerDied("killed"))
    assert log[log.index("push_weights 2") + 1 :] == ["set_policy 0", "load_state_dicts", "set_policy 2"]
    assert second.actors.pool.history.rows is None  # type: ignore[attr-defined]


def test_a_policy_that_was_set_after_the_checkpoint_is_in_force_again_when_its_rl_step_comes(tmp_path: Path):
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
    data = {"train": "t", "heldout": "h"}
    run.recipe = Recipe.model_validate({"model": "m", "reward": "r:f", "data": data, "eval": {"num_prompts": default}})
    run.data, run.state = SimpleNamespace(heldout=["a prompt", "another"]), RunState()  # type: ignore[assignment]
    run.actors = Actors(log)  # type: ignore[assignment]
    assert math.isnan(run.evaluate(asked))
    assert log == []


def test_a_repetition_that_does_not_count_is_said_and_not_noted(tmp_path: Path):
    run, said = GrpoRun.__new__(GrpoRun), []
    run.out, run.state, run.events = tmp_path, RunState(), SimpleNamespace(note=said.append)  # type: ignore[assignment]
    run.pool = SimpleNamespace(repeat=lambda shares, rl_step: [])  # type: ignore[assignment]
    run._repeat([[]], [], 1.0, 4)
    assert said == ["the rollout of RL step 4 was not repeated: a worker was started again"]
    assert run.state.repeats == []
    assert not (tmp_path / "repeats.json").exists()


def test_only_the_first_to_hold_a_run_lets_go_of_it(tmp_path: Path):
    run = GrpoRun.__new__(GrpoRun)
    run.out, run._locked = tmp_path / "run", False
    with run.locked():
        with run.locked():
            pass
        assert run._locked
    assert not run._locked


def test_trainers_that_die_at_their_start_start_again_unless_engines_have_failed(tmp_path: Path):
    starts: list[bool] = []

    def die() -> None:
        starts.append(True)
        raise TrainerDied("killed")

    recipe = Recipe.model_validate({"model": "m", "reward": "r:f", "data": {"train": "t"}})
    actors = RunActors(recipe, PLAIN, NullDrafting(), RunEvents(tmp_path / "events.jsonl"))
    actors.trainers = SimpleNamespace(handles=[], restart=die)  # type: ignore[assignment]
    with pytest.raises(TrainerDied):
        actors._with_trainers()
    assert len(starts) == 1 + recipe.faults.max_restarts
    starts.clear()
    actors._given_up = True
    with pytest.raises(TrainerDied):
        actors._with_trainers()
    assert len(starts) == 1
