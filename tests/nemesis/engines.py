"""The nemesis of whole runs: `tltlab train` on real engines, trainers and a drafter's trainer, each a process of Ray's.

    python -m tests.nemesis.engines FOLDER --seed 3 --faults 20

FOLDER has a recipe and its model. The run that is disturbed trains a drafter and never drafts with it, so its responses
are those of one that trains none.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
from safetensors.numpy import load_file

from tltlab.policies.policy import Policy
from tltlab.policies.specs import FixedSpec
from tltlab.strategy import Strategy

from . import checker
from .points import HERE, TARGET, Fault, environment, read_journal

PROMPTS, GROUP, STEPS = 4, 2, 6
PATIENCE_S, LEFT_S = 500.0, 150.0
START_UP = Path(__file__).parents[1] / "start_up"
COLUMNS = {
    "workload": ("epoch", "prompt_tokens", "max_response_tokens", "policy_version"),
    "outcomes": ("response_tokens", "finish_reason", "reward"),
    "tokens": ("prompt_token_ids", "token_ids", "logprobs", "token_versions"),
    "steps": ("policy_version", "reward_mean"),
}
# Agents of Ray's that hold nothing; they end by themselves, a minute after the driver.
LINGER = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


def settings(folder, *, learning):
    """The arguments of `tltlab train` for a small run, with or without a drafter that learns."""
    policy = folder / "nemesis-policy.json"
    Policy(selector=FixedSpec(strategy=Strategy.chain("ngram", 4))).write(policy)
    given = [
        # Responses so few and so long that one worker often waits for the other, and trains.
        str(folder / "recipe.toml"), f"train.steps={STEPS}", "rollout.max_response_tokens=100",
        f"rollout.policy={policy}", "rollout.repeat_every=0", "reward_pool.processes=0",
        f"rollout.prompts_per_step={PROMPTS}", f"rollout.group_size={GROUP}", "eval.num_prompts=0",
        "checkpoint.every=2", "faults.max_restarts=9", "faults.stopped_timeout_s=3", "log.tensorboard=false",
    ]  # fmt: skip
    learns = [
        # Updates so small that there is one even where a busy machine leaves little of a worker's idle time.
        "drafter.name=learned", 'drafter.schedule={"kind": "always"}', "drafter.tokens_per_update=32",
        "drafter.checkpoint_every=5", "drafter.nice=0",
    ]  # fmt: skip
    return given + (learns if learning else [])


class Driver:
    """`tltlab train` under faults, in its own process; a context manager, at whose end nothing of it is left."""

    def __init__(self, run, arguments, faults, journal, *, everything=False):
        self.run, self.log = run, run.with_name(run.name + ".log")
        paths = [START_UP, Path(arguments[0]).parent if arguments[0] != "--resume" else run]
        env = os.environ | environment(run, faults, journal, everything=everything)
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "import points; points.main()", "train", *arguments],
                env=env | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        self._family = set()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        gone(self._family)

    def wait(self):
        """Its exit code. Whenever it is stopped its folder is looked at, and it continues."""
        end = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            checker.require(time.monotonic() < end, "no end of the run:", self.said())
            self._look()
            time.sleep(0.05)
        return self.process.returncode

    def _look(self):
        try:
            me = psutil.Process(self.process.pid)
            self._family |= {child for child in me.children(recursive=True) if not title(child).startswith(LINGER)}
            if me.status() == psutil.STATUS_STOPPED:
                checker.killed(self.run, 0)
                self.process.send_signal(signal.SIGCONT)
        except psutil.NoSuchProcess:
            return

    def said(self):
        return self.log.read_text()[-3000:]


def title(process):
    try:
        return (process.cmdline() or [""])[0]
    except psutil.Error:
        return ""


def gone(family):
    """Wait until all of them have ended."""
    _, alive = psutil.wait_procs(list(family), timeout=LEFT_S)
    left = [t for t in map(title, alive) if t]
    checker.require(not left, f"still there after {LEFT_S:g} s: {left}")


def disturbed(run, arguments, faults, journal):
    """A run under faults, gone on with until it has finished; those that struck."""
    attempts = 0
    while True:
        begun = (run / "run.json").exists()
        if not begun and attempts:
            shutil.rmtree(run, ignore_errors=True)
        # A fault strikes once, whichever process it meets: a run that continues meets those that are left.
        resume = ["--resume", str(run), "--allow-code", "parity"]
        with Driver(run, resume if begun else arguments, faults, journal) as driver:
            code = driver.wait()
        struck = [row for row in read_journal(journal) if "struck" in row]
        did = [f"{row['action']} at {row['point']}" for row in struck]
        if code == 0:
            return struck
        attempts += 1
        checker.require(attempts <= len(faults) + 1 and struck, f"ended by {code} under {did}:", driver.said())
        checker.require(code in (1, 2, -signal.SIGKILL), f"ended by {code} under {did}:", driver.said())
        checker.require("Traceback" not in driver.said(), f"a traceback under {did}:", driver.said())
        checker.killed(run, newest(run))


def newest(run):
    """The RL steps that a run has told as durable: those before its newest checkpoint."""
    return max([0, *checker.checkpoints(run / "checkpoints")])


def check_finished(run, calm):
    """The run that was disturbed is the one that nobody disturbed, to the bit."""
    checker.same(checker.finished(run / "trace"), checker.finished(calm / "trace"), COLUMNS)
    ours, theirs = (load_file(folder / "checkpoints" / "final" / "model.safetensors") for folder in (run, calm))
    checker.require(all((ours[name] == theirs[name]).all() for name in theirs), "other weights than the calm run's")


def check_drafter(trace):
    """What the drafter was is told of the RL steps that count, once each: it went back with the run."""
    assert trace.steps["drafter_updates"].is_monotonic_increasing
    assert trace.steps["drafter_updates"].iloc[-1] > 0
    swapped = trace.steps["drafter_version"].diff().fillna(0)
    assert set(swapped) <= {0, 1}
    ages = list(trace.steps["drafter_age"])
    assert ages == [0, *(0 if swap else age + 1 for age, swap in zip(ages, swapped.iloc[1:], strict=False))]
    acceptance = trace.table("acceptance")
    assert not acceptance.duplicated(["rl_step", "prompt_id", "sample", "drafter_age"]).any()


def campaign(folder, first, faults, each=4):
    """Runs from seed `first` on, `each` of so many faults, until `faults` have struck: what struck where, what was
    wrong."""
    work = folder / "nemesis"
    work.mkdir(exist_ok=True)
    calm, points = work / "calm", work / "points.jsonl"
    if not (calm / "summary.json").exists():
        shutil.rmtree(calm, ignore_errors=True)
        with Driver(calm, [*settings(folder, learning=False), "--out", str(calm)], [], work / "none.jsonl") as driver:
            checker.require(driver.wait() == 0, driver.said())
    learning = settings(folder, learning=True)
    if not (work / "first" / "summary.json").exists():
        shutil.rmtree(work / "first", ignore_errors=True)
        arguments = [*learning, "--out", str(work / "first")]
        with Driver(work / "first", arguments, [], points, everything=True) as driver:
            checker.require(driver.wait() == 0, driver.said())
    most = sorted(Counter(row["point"] for row in read_journal(points)).items())
    struck = Counter()
    wrong = []
    seed = first
    while sum(struck.values()) < faults:
        rng, run, journal = random.Random(seed), work / f"run-{seed}", work / f"journal-{seed}.jsonl"
        try:
            disturbed(run, [*learning, "--out", str(run)], [drawn(rng, most) for _ in range(each)], journal)
            check_finished(run, calm)
        except (AssertionError, OSError, ValueError, KeyError) as error:
            wrong.append(f"TLTLAB_NEMESIS_SEED={seed}: {type(error).__name__}: {error} (left at {run})")
        new = [row for row in read_journal(journal) if "struck" in row]
        struck.update(f"{row['action']} {'after' if row['after'] else 'before'} {row['point']}" for row in new)
        print(json.dumps({"seed": seed, "struck": [f"{row['action']}: {row['point']} {row['nth']}" for row in new]}))
        print(*wrong[-1:], flush=True)
        seed += 1
    return struck, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=4)
    parser.add_argument("--each", type=int, default=4, help="faults in a run")
    asked = parser.parse_args()
    struck, wrong = campaign(asked.folder, asked.seed, asked.faults, asked.each)
    print(json.dumps({"faults": sum(struck.values()), "struck": struck, "wrong": wrong}, indent=1))
    sys.exit(bool(wrong))


def drawn(rng, points):
    """Any action at any point, each place of the source as likely as any other."""
    point, most = rng.choice(points)
    kinds = {"call": ("kill", *TARGET, "slow", "clock")}
    action = rng.choice(kinds.get(point.split(" ")[1], HERE))
    return Fault(point=point, nth=rng.randint(1, most), action=action, after=rng.random() < 0.5)


if __name__ == "__main__":
    main()
