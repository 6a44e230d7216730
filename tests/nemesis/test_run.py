"""A run of real engines whose processes are killed, stopped and cut off at named points, against one left in peace.

For a night: with `TLTLAB_NEMESIS=1000` so many faults strike at points drawn by chance too, four to a run, from
`TLTLAB_NEMESIS_SEED` on. In every `make test` it is `tests/runtime/run/test_faults.py` that kills.
"""

import os

import pytest

import tltlab
from tltlab.runtime.recipe.recipe import load_recipe
from tltlab.runtime.run.grpo import train

from .engines import STEPS, campaign, check_drafter, check_finished, disturbed, settings
from .points import Fault

MANY = int(os.environ.get("TLTLAB_NEMESIS", 0))
pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900 + 600 * MANY),
    pytest.mark.skipif(not MANY, reason="TLTLAB_NEMESIS=1000 has so many faults strike, for a night"),
]
FAULTS = (
    Fault(point="driver call RolloutWorker.generate", nth=3, action="kill target", after=True),
    Fault(point="driver call SpotTrainer.train", nth=2, action="stop target", after=True),
    Fault(point="SpotTrainer rename drafter/worker-N/state.safetensors", nth=2, action="kill"),
    Fault(point="driver call TrainerActor.ask", nth=5, action="kill target", after=True),
    Fault(point="driver rename checkpoints/step-N", nth=2, action="kill"),
    Fault(point="driver call RolloutWorker.generate", nth=5, action="stop target"),
)


def test_nothing_is_lost_or_doubled_by_faults(recipe_file, tmp_path, monkeypatch):
    calm, run, folder = tmp_path / "calm", tmp_path / "run", recipe_file.parent
    with monkeypatch.context() as here:
        here.syspath_prepend(str(folder))
        recipe, *overrides = settings(folder, learning=False)
        train(load_recipe(recipe, overrides), calm)
    arguments = [*settings(folder, learning=True), "--out", str(run)]
    struck = disturbed(run, arguments, FAULTS, tmp_path / "journal.jsonl")
    assert sorted(row["struck"] for row in struck) == list(range(len(FAULTS)))
    check_finished(run, calm)
    trace = tltlab.read(run)
    assert trace.rl_steps == list(range(STEPS))
    check_drafter(trace)


def test_so_it_is_wherever_faults_strike(recipe_file):
    _, wrong = campaign(recipe_file.parent, int(os.environ.get("TLTLAB_NEMESIS_SEED", "0")), MANY)
    assert not wrong
