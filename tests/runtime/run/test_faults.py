"""A run whose processes are killed at random moments, against one that nobody disturbs.

`TLTLAB_FAULTS=30 pytest tests/runtime/run/test_faults.py` kills thirty times; by default each kind dies once, at
moments that `TLTLAB_FUZZ=1` draws anew.
The run trains a drafter and never drafts with it, so that its responses are those of a run that trains none.
"""

import math
import os
import random
import re
import signal
import subprocess
import time
from contextlib import ExitStack
from itertools import cycle, islice

import psutil
import pytest

import tltlab
from prefork import RUNNING
from tltlab.runtime.recipe.recipe import load_recipe
from tltlab.runtime.run.grpo import train

from ...nemesis import checker
from ...nemesis.engines import LINGER, PATIENCE_S, check_drafter, check_finished, gone, newest, settings, title

SEED = int(os.environ.get("TLTLAB_FAULTS_SEED", time.time_ns() if os.environ.get("TLTLAB_FUZZ") else "2"))
VICTIMS = {
    "worker": "ray::RolloutWorker",
    "trainer": "ray::TrainerActor",
    "drafter's trainer": "ray::SpotTrainer",
    "driver": "",
}
NUM_KILLS = int(os.environ.get("TLTLAB_FAULTS", len(VICTIMS)))
NUM_STEPS = 4 + 2 * NUM_KILLS
MOST_STEPS_BETWEEN, MOST_BETWEEN_S = 1, 0.5
pytestmark = [pytest.mark.engine, pytest.mark.timeout(900 + 60 * NUM_KILLS)]


ALLOWED = ("--allow-code", "parity")
TRAIN = """
import os, sys
from pathlib import Path
from tltlab.cli.app import main
from tltlab.runtime.ray import start

if __name__ == "__main__":
    script, forks, *arguments = sys.argv
    Path(script).with_suffix(".pid").write_text(str(os.getpid()))
    start.worker_commands.append(forks)
    main(["train", *arguments])
"""


class Driver:
    """`tltlab train` in its own process. It and its actors are forks of the process that has imported all."""

    def __init__(self, run, log, *arguments, path):
        self.run = run
        self.log = log
        self._since = time.time_ns()
        (forks,) = RUNNING
        self._forks = psutil.Process(forks._process.pid)
        script = log.with_name("train.py")
        script.write_text(TRAIN)
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [*forks.command.split(), str(script), forks.command, *arguments],
                env=os.environ | {"PYTHONPATH": str(path)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def under_way(self):
        """Wait until everything is started."""
        description = self.run / "run.json"
        self._wait_until(lambda: description.exists() and description.stat().st_mtime_ns > self._since)

    def gets_on(self, steps, within_s=math.inf):
        """Wait for so many RL steps more, or so many seconds."""
        target, end = self.steps + steps, time.monotonic() + within_s
        self._wait_until(lambda: self.steps >= target or time.monotonic() > end)

    def _wait_until(self, done):
        """Or until the run is over."""
        end = time.monotonic() + PATIENCE_S
        while self.process.poll() is None and not done():
            assert time.monotonic() < end, self.log.read_text()[-2000:]
            time.sleep(0.02)

    @property
    def steps(self):
        return len(re.findall(r"^step \d+:", self.log.read_text(), re.MULTILINE))

    def offspring(self):
        """All processes of the run that end with it."""
        children = self._forks.children(recursive=True)
        return [child for child in children if not title(child).startswith(LINGER)]

    def kill(self, victim, rng):
        """Kill -9; whether there was somebody to kill."""
        assert self.process.poll() is None, f"the run was over too soon: {self.log.read_text()[-3000:]}"
        if victim == "driver":
            family = self.offspring()
            os.kill(int(self.log.with_name("train.pid").read_text()), signal.SIGKILL)
            self.process.wait()
            gone(family)
            return True
        found = [process for process in self.offspring() if title(process).startswith(VICTIMS[victim])]
        try:
            rng.choice(found).kill()
        except (IndexError, psutil.NoSuchProcess):
            return False
        return True

    def finish(self):
        """Wait for the end of the run, which must be a good one."""
        family = self.offspring()
        code = self.process.wait(PATIENCE_S)
        assert code == 0, self.log.read_text()[-3000:]
        gone(family)

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def test_nothing_is_lost_whoever_is_killed(recipe_file, tmp_path, monkeypatch):
    print(f"TLTLAB_FAULTS_SEED={SEED}")
    rng = random.Random(SEED)
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    path, longer = recipe_file.parent, [f"train.steps={NUM_STEPS}", f"faults.max_restarts={NUM_KILLS + 1}"]
    with monkeypatch.context() as here:
        here.syspath_prepend(str(path))
        recipe, *overrides = settings(path, learning=False)
        train(load_recipe(recipe, [*overrides, *longer]), calm)
    arguments = [*settings(path, learning=True), *longer, "--out", str(killed)]
    driver = Driver(killed, tmp_path / "killed.log", *arguments, path=path)
    with ExitStack() as ends:
        ends.callback(driver.end)
        for victim in islice(cycle(rng.sample(sorted(VICTIMS), len(VICTIMS))), NUM_KILLS):
            driver.under_way()
            driver.gets_on(rng.randint(0, MOST_STEPS_BETWEEN))
            # On a fast machine several RL steps would pass, and the run be over before all are killed.
            driver.gets_on(1, rng.uniform(0.0, MOST_BETWEEN_S))
            while not driver.kill(victim, rng):
                # Just now another one is started in its place.
                time.sleep(0.05)
            if victim == "driver":
                checker.killed(killed, newest(killed))
                driver = Driver(killed, tmp_path / "killed.log", "--resume", str(killed), *ALLOWED, path=path)
                ends.callback(driver.end)
        driver.finish()
    check_finished(killed, calm)
    trace = tltlab.read(killed)
    assert trace.rl_steps == list(range(NUM_STEPS))
    check_drafter(trace)
