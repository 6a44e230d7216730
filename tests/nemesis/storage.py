"""The nemesis of what a run keeps on disk: recording, checkpoints, trace; without engines, hundreds of faults a minute.

    python -m tests.nemesis.storage --seed 3 --faults 300

A run here does what `grpo.train` does between its actors, with the classes that it does it with: rows are made from
weights, recorded, weights moved, checkpoints saved, the trace closed. It runs in a fork. Each case disturbs one run up
to three times at points drawn by its seed, resumes it until it has finished, and compares.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tltlab.errors import TltlabError
from tltlab.files import lock, write_file, write_json
from tltlab.runtime.drafter.worker import DrafterCheckpoint
from tltlab.runtime.run.checkpoints import RunCheckpoints
from tltlab.runtime.trainer.trainer import load_trainer, save_trainer
from tltlab.traces.recorder import Recorder, repair
from tltlab.traces.schema import Manifest
from tltlab.traces.trace import read

from . import checker
from .points import HERE, Fault, Points, install, read_journal

STEPS, EVERY, PROMPTS, GROUP = 5, 2, 3, 2
MANIFEST = Manifest(kind="recorded", name="nemesis", num_workers=1, max_response_tokens=9, group_size=GROUP, seed=0)
COLUMNS = {
    "workload": ("epoch", "prompt_tokens", "max_response_tokens", "policy_version"),
    "outcomes": ("response_tokens", "finish_reason", "reward"),
    "tokens": ("prompt_token_ids", "token_ids"),
    "steps": ("t_start", "policy_version", "reward_mean"),
}
FINISHED, REFUSED, BROKEN = 0, 2, 70


def rows_at(rl_step, weights):
    """The rows of an RL step, which depend on all that came before by way of the weights."""
    rng = np.random.default_rng([rl_step, *np.frombuffer(weights.tobytes(), np.uint32)])
    keys = [{"rl_step": rl_step, "prompt_id": f"p{p}", "sample": s} for p in range(PROMPTS) for s in range(GROUP)]
    ids = [rng.integers(0, 20, rng.integers(1, 10)).tolist() for _ in keys]
    ask = {"epoch": 0, "prompt_tokens": 2, "max_response_tokens": 9, "policy_version": rl_step}
    return {
        "workload": [key | ask for key in keys],
        "outcomes": [
            key | {"response_tokens": len(i), "finish_reason": "stop", "reward": float(i[0] % 2)}
            for key, i in zip(keys, ids, strict=True)
        ],
        "tokens": [key | {"prompt_token_ids": [1, 2], "token_ids": i} for key, i in zip(keys, ids, strict=True)],
        "steps": [{"rl_step": rl_step, "t_start": 1.0 * rl_step, "policy_version": rl_step, "reward_mean": 0.5}],
    }


class Learner:
    """What trainers hold: a module, an optimizer, and how often it was updated."""

    def __init__(self):
        torch.manual_seed(0)
        self.module = torch.nn.Linear(4, 4)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.1)

    @property
    def weights(self):
        return self.module.weight.detach().numpy()

    def update(self, value):
        # Not by a backward pass: whose threads would be in the way of forks.
        for number, parameter in enumerate(self.module.parameters()):
            parameter.grad = torch.full_like(parameter, value - number)
        self.optimizer.step()


def drive(run, tell):
    """Run, or continue from the newest checkpoint, to the end. `tell` hears what is durable once it is.

    A drafter's trainer saves what it has learned next to it: here a number, of the RL step.
    """
    run.mkdir(parents=True, exist_ok=True)
    with lock(run, "this run"):
        checkpoints, drafter = RunCheckpoints(run / "checkpoints", keep=2), DrafterCheckpoint(run / "drafter")
        newest, begins_at, learner, learned = checkpoints.latest(), 0, Learner(), {"n": torch.zeros(1)}
        if newest is not None:
            begins_at = json.loads((newest / "state.json").read_text())["rl_step"]
            load_trainer(newest / "trainer", learner.module, learner.optimizer, rank=0)
        tell("begins", begins_at)
        learned = drafter.load() or learned
        tell("remembers", int(learned["n"]))
        with Recorder.reopen(run / "trace", MANIFEST, begins_at) as recorder:
            for rl_step in range(begins_at, STEPS):
                done = rl_step + 1
                rows = rows_at(rl_step, learner.weights)
                for table, new in rows.items():
                    recorder.append(table, new)
                recorder.flush(wait=False)
                learner.update(float(sum(row["response_tokens"] for row in rows["outcomes"])))
                if done % EVERY == 0 or done == STEPS:
                    tell("learning", done)
                    drafter.save({"n": torch.full((1,), float(done))})
                    recorder.flush()
                    tell("durable", done)

                    def write(folder, done=done):
                        save_trainer(folder / "trainer", learner.module, learner.optimizer, steps=done, rank=0)
                        write_json(folder / "state.json", {"rl_step": done})

                    checkpoints.save(done, write)
                    tell("saved", done)
                    drafter.finish()
                    if not drafter.failures:
                        tell("learned", done)
        drafter.close()
        write_file(run / "final.npy", learner.weights.tobytes())
        write_json(run / "summary.json", {"steps": STEPS})


@dataclass
class Told:
    """What a run has told before it ended, and how it ended: the exit code, or less than 0 by a signal."""

    code: int = BROKEN
    begins: int = 0
    durable: int = 0
    saved: int = 0
    remembers: int = -1
    learning: int = -1
    learned: int = -1
    said: str = ""


def forked(do, meanwhile=lambda: None):
    """Do something in a fork; `meanwhile` is done whenever it was stopped, then it continues."""
    told = Told()
    hear, say = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(hear)
        code = BROKEN
        try:
            do(lambda what, value: os.write(say, f"{what} {value}\n".encode()))
            code = FINISHED
        except TltlabError as error:
            code = REFUSED
            os.write(say, f"said {json.dumps(str(error))}\n".encode())
        except BaseException:
            os.write(say, f"said {json.dumps(traceback.format_exc())}\n".encode())
        finally:
            os._exit(code)
    os.close(say)
    while True:
        _, status = os.waitpid(pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            break
        meanwhile()
        os.kill(pid, signal.SIGCONT)
    told.code = os.waitstatus_to_exitcode(status)
    with open(hear) as lines:
        for line in lines:
            what, value = line.rstrip("\n").split(" ", 1)
            setattr(told, what, json.loads(value))
    return told


def disturbed(run, faults, journal, *, everything=False):
    """Drive a run under faults. While it is stopped others read, and one tries to drive it too."""

    def do(tell):
        install(Points(run, faults, journal, lambda: "driver", everything=everything))
        drive(run, tell)

    def meanwhile():
        checker.killed(run, 0)
        before = contents(run)
        reading = forked(lambda tell: look(run))
        checker.require(reading.code in (FINISHED, REFUSED), "a reader meanwhile:", reading.said)
        second = forked(lambda tell: drive(run, tell))
        if "in progress in another process" in second.said:
            checker.require(contents(run) == before, run, "was changed by a driver that was refused")
        else:
            # The first was stopped before it had the lock.
            checker.require(second.code == FINISHED, "a second driver:", second.said)

    return forked(do, meanwhile)


def look(run):
    """As commands read a run, whoever writes it."""
    if (run / "trace").exists():
        trace = read(run / "trace")
        assert len(trace.outcomes) % (PROMPTS * GROUP) == 0, "half an RL step"


def contents(run):
    files = {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}
    return {name: data for name, data in files.items() if Path(name).name != "lock"}


def points_of(folder):
    """All points that a run passes and how often: undisturbed, resumed at its middle, resumed at its end."""
    run, journal = folder / "run", folder / "points.jsonl"
    middle = Fault(point="driver rename checkpoints/step-N", nth=2, action="kill")
    disturbed(run, [middle], journal, everything=True)
    for _ in range(2):
        told = disturbed(run, [], journal, everything=True)
        checker.require(told.code == FINISHED, told.said)
    most = {}
    for row in read_journal(journal):
        most[row["point"]] = max(most.get(row["point"], 0), row["nth"])
    return sorted(most.items())


def case(seed, points, twin, folder):
    """One run, disturbed by faults that `seed` draws; those that struck. Raises AssertionError with what is wrong."""
    rng = random.Random(seed)
    run, journal = folder / "run", folder / "journal.jsonl"
    struck = []
    saved = 0
    # What the drafter's trainer may remember: what was durable last, or anything it was saving since.
    may_remember = {0}
    for attempt in range(rng.randint(1, 3)):
        faults = []
        for _ in range(rng.choice((1, 1, 2))):
            point, most = rng.choice(points)
            faults.append(
                Fault(point=point, nth=rng.randint(1, most), action=rng.choice(HERE), after=rng.random() < 0.5)
            )
        here = folder / f"journal-{attempt}.jsonl"
        told = disturbed(run, faults, here)
        struck += (new := read_journal(here))
        did = [row["action"] for row in new]
        saved = max(saved, told.saved)
        checker.require(told.remembers in {-1, *may_remember}, "a drafter of", told.remembers, "not", may_remember)
        if told.learned >= 0:
            may_remember = {told.learned}
        if told.learning >= 0:
            may_remember |= set(range(max(told.learned, told.begins) + 1, told.learning + 1))
        if "stop" in did:
            # Another may have driven it to its end before this one had the lock.
            may_remember.add(STEPS)
        ended = f"attempt {attempt} under {did} ended by {told.code}: {told.said}"
        checker.require(told.code in (FINISHED, REFUSED, -signal.SIGKILL), ended)
        checker.require(told.code != -signal.SIGKILL or "kill" in did, ended)
        checker.require(told.code != REFUSED or {"error", "full", "stop"} & set(did), ended)
        checker.require(told.code != REFUSED or 'File "' not in told.said, "a sentence has a traceback in it:", ended)
        checker.killed(run, told.durable or told.begins)
        whole = RunCheckpoints(run / "checkpoints", keep=2).latest()
        checker.require(saved == 0 or (whole is not None and f"step-{saved:06d}" <= whole.name), whole, "not", saved)
        if rng.random() < 0.3 and (run / "trace").exists():
            shutil.copytree(run, folder / "copy")
            mended = forked(lambda tell: repaired(folder / "copy"))
            checker.require(mended.code == FINISHED, "repair:", mended.said)
            shutil.rmtree(folder / "copy")
    told = disturbed(run, [], journal)
    checker.require(told.code == FINISHED, "resumed without a fault:", told.said)
    ours, theirs = checker.finished(run / "trace"), checker.finished(twin / "trace")
    checker.same(ours, theirs, COLUMNS)
    checker.require((run / "final.npy").read_bytes() == (twin / "final.npy").read_bytes(), "other weights")
    checker.require({4, 5} <= set(checker.checkpoints(run / "checkpoints")), "lacks checkpoint 4 or 5")
    files = [str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()]
    left = [name for name in files if "/." in f"/{name}" or name.endswith(".tmp")]
    checker.require(not left, "left behind:", left)
    return struck


def repaired(copy):
    repair(copy / "trace")
    checker.finished(copy / "trace")


def campaign(first, faults, folder):
    """Cases from seed `first` on until so many faults have struck: how often what struck where, and what went wrong."""
    # What this imports every fork has; it starts no threads.
    learner = Learner()
    learner.update(1.0)
    save_trainer(folder / "trainer", learner.module, learner.optimizer, steps=1, rank=0)
    load_trainer(folder / "trainer", learner.module, learner.optimizer, rank=0)
    twin = folder / "twin"
    told = disturbed(twin / "run", [], folder / "none.jsonl")
    assert told.code == FINISHED, told.said
    points = points_of(folder / "points")
    struck = Counter()
    wrong = []
    seed = first
    while sum(struck.values()) < faults:
        here = folder / f"case-{seed}"
        here.mkdir()
        try:
            for row in case(seed, points, twin / "run", here):
                struck[row["action"], row["point"]] += 1
            shutil.rmtree(here)
        except (AssertionError, OSError, ValueError, KeyError) as error:
            wrong.append(f"TLTLAB_NEMESIS_SEED={seed}: {type(error).__name__}: {error} (left at {here})")
            struck["?", "a case that failed"] += 1
        seed += 1
    return struck, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=1)
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="nemesis-"))
    struck, wrong = campaign(asked.seed, asked.faults, folder)
    by = {"actions": Counter(), "points": Counter()}
    for (action, point), times in struck.items():
        by["actions"][action] += times
        by["points"][point] += times
    print(json.dumps({"faults": sum(struck.values()), **by, "wrong": wrong}, indent=1))
    if not wrong:
        shutil.rmtree(folder)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
