"""The experiments staleness, batch-size and lossless by their commands, on engines."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
pytest.importorskip("tltlab.runtime")

from tltlab.experiments import lossless
from tltlab.experiments.staleness import Staleness

from ..conftest import Command


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of our own that was hardly trained: it answers anything, to the cap."""
    from tltlab.runtime.models.make import Size, make_model

    folder = tmp_path_factory.mktemp("model") / "subset-sum"
    size = Size(hidden=64, layers=1, mlp=64, steps=40, measured_prompts=2, samples_per_prompt=2)
    make_model(folder, size=size, task="subset-sum", seed=0, progress=print)
    return folder


def told(command: Command, out: Path, *args: str) -> dict:
    code, printed, _ = command("experiment", *args, "--fast", "--out", out, "--json")
    assert code == 0
    # Whatever engines print to stdout would be before the object, and break who reads it.
    found = json.loads(printed)
    assert not found["prediction"]
    assert found["verdict"].startswith("measured here, ")
    assert sorted(path.name for path in out.iterdir()) == [args[0]]
    assert sorted(path.name for path in (out / args[0]).iterdir()) == ["picture.png", "result.json", "table.csv"]
    assert (out / args[0] / "picture.png").stat().st_size > 5000
    return found


@pytest.mark.engine
def test_forced_batches_run_every_arm_and_the_bandit(small_model: Path, tmp_path: Path, command):
    found = told(command, tmp_path, "batch-size", "--model", str(small_model), "batches=1,6", "depths=8", "rounds=1")
    rows = found["rows"]
    for batch in (1, 6):
        here = {row["arm"]: row for row in rows if row["batch"] == batch}
        assert {"none", "ngram:8", "ngram:4", "ngram:2", "beg-mab"} <= set(here)
        assert all(row["tokens_per_s"] > 0 for row in here.values())
        assert here["none"]["speedup"] == pytest.approx(1)
        assert sum(row["share"] for row in here.values() if row["share"] is not None) == pytest.approx(1)
        assert [row["best"] for row in here.values()].count(True) == 1
        assert here["beg-mab"]["of_best"] > 0
    # From batch 5 on the shipped bandit has no arm of depth 8.
    assert next(row for row in rows if row["batch"] == 6 and row["arm"] == "ngram:8")["share"] == 0
    assert "too few rounds" in found["verdict"]


@pytest.mark.engine
@pytest.mark.usefixtures("one_ray")
def test_an_untrained_drafter_ages(small_model: Path, tmp_path: Path, command, monkeypatch):
    asked: dict[str, tuple[int, object]] = {}
    run = Staleness.rolled_out

    def only_the_stopped_one(self, name, seed, stop):
        """The other runs differ in when training stops alone: its trace stands for theirs."""
        if not asked:
            asked["trace"] = (1, run(self, name, seed, 1))
        asked[f"{name}-{seed}"] = (stop, None)
        return asked["trace"][1]

    monkeypatch.setattr(Staleness, "rolled_out", only_the_stopped_one)
    found = told(
        command, tmp_path, "staleness", "--model", str(small_model), "prompts=4", "cap=48", "warm_up_updates=5",
        "warm_up_length=1.01", "tokens_per_update=128",
    )  # fmt: skip
    assert {name: stop for name, (stop, _) in asked.items()} == {
        "trace": 1, "frozen-0": 0, "stopped-0": 1, "adaptive-0": 3,
    }  # fmt: skip
    live = {(row["run"], row["rl_step"]): row for row in found["rows"]}
    assert [name for name, step in live if step == 2] == ["frozen", "stopped", "adaptive"]
    assert live["stopped", 0]["drafter_updates"] == 0
    trained = live["stopped", 1]["drafter_updates"]
    assert live["stopped", 2]["drafter_updates"] == trained
    assert live["stopped", 2]["drafter_age"] == live["stopped", 1]["drafter_age"] + 1
    assert all(1 <= row["accept_length"] <= 5 for row in found["rows"])


@pytest.mark.engine
@pytest.mark.usefixtures("one_ray")
def test_rewards_are_held_against_plain_decoding(small_model: Path, tmp_path: Path, command, monkeypatch):
    run = lossless.rewards_of_run

    def plain_decoding_is_known(recipe, out, steps, progress):
        if out.name.startswith("without"):
            assert recipe.drafter is None
            assert recipe.rollout.policy == "none"
            return {"held_out": 0.25, "trained": 0.5}, [0.5] * steps
        assert recipe.drafter is not None
        return run(recipe, out, steps, progress)

    monkeypatch.setattr(lossless, "rewards_of_run", plain_decoding_is_known)
    found = told(
        command, tmp_path, "lossless", "--model", str(small_model), "prompts=4", "cap=32", "warm_up_updates=5",
        "warm_up_length=1.01", "heldout=4", "seeds=1", "steps=1",
    )  # fmt: skip
    rewards = found["rows"]
    assert [row["case"] for row in rewards] == ["held-out reward at the end", "mean reward over the RL steps"]
    for row, without in zip(rewards, (0.25, 0.5), strict=True):
        assert row["difference"] == pytest.approx(row["with"] - without)
        assert row["verdict"] == "unknown"
    assert found["verdict"].count("(no interval) over 1 seeds") == 2
