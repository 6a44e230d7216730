"""Runs that stop and continue: the same as if they never had, on real engines."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

import tltlab
from tests.refused import refused
from tests.typed import typed
from tltlab.errors import ConfigError
from tltlab.files import json_lines, read_json
from tltlab.policies.policy import Policy
from tltlab.policies.specs import FixedSpec
from tltlab.runtime.recipe.recipe import load_recipe, resumed_recipe
from tltlab.runtime.run.checkpoints import checkpoints_in, step_of
from tltlab.runtime.run.grpo import train
from tltlab.runtime.run.logging import RunLog
from tltlab.strategy import Strategy

from ...nemesis.engines import check_finished

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_ray")]
STEPS = 3
COMMON = [
    f"train.steps={STEPS}",
    "checkpoint.every=2",
    "checkpoint.keep=9",
    "rollout.repeat_every=0",
    "eval.num_prompts=0",
]

EPOCH_A_STEP = ["rollout.prompts_per_step=32", "rollout.group_size=2"]


def whole_run(recipe_file, out, *overrides):
    train(load_recipe(recipe_file, [*COMMON, *overrides]), out)
    return out


def killed(run, folder):
    """What a run would have left had it been killed after the checkpoint of its second RL step."""
    out = folder / "run"
    shutil.copytree(run, out, ignore=shutil.ignore_patterns("final", "summary.json"))
    for checkpoint in (out / "checkpoints").iterdir():
        if checkpoint.name != "step-000002":
            shutil.rmtree(checkpoint)
    return out


def resumed(run, **options):
    train(resumed_recipe(run, (), ["parity"]), run, resume=True, **options)
    return run


@pytest.fixture(scope="module")
def fixed(recipe_file, tmp_path_factory):
    """An unbroken run that always drafts four tokens from suffix trees, on two engines, and cuts what is too long.

    Engines and two trainer ranks share the devices, and the ranks each response. Of few prompts, which come again
    within the run.
    """
    folder = tmp_path_factory.mktemp("fixed")
    prompts = (recipe_file.parent / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(prompts[:12]))
    Policy(selector=FixedSpec(strategy=Strategy.chain("suffix", 4))).write(folder / "policy.json")
    return whole_run(
        recipe_file,
        folder / "run",
        f"rollout.policy={folder / 'policy.json'}",
        f"data.train={folder / 'train.jsonl'}",
        "cluster.placement=colocated",
        "train.ranks=2",
        "train.sequence_parallel=2",
        'rollout.partial={"concurrency": 8}',
        "rollout.max_response_tokens=64",
    )


@pytest.fixture(scope="module")
def learning(recipe_file, tmp_path_factory):
    """An unbroken run whose policy learns, on one engine; every RL step is an epoch and keeps prefixes of the last."""
    return whole_run(
        recipe_file,
        tmp_path_factory.mktemp("learning") / "run",
        "rollout.policy=explore",
        "rollout.num_workers=1",
        "rollout.prompts_per_step=32",
        "rollout.group_size=2",
        "rollout.reuse={}",
    )


PARTS = """
from tltlab.drafters.base import Draft, TextDrafter
from tltlab.planning.placement import Placement

class Echo(TextDrafter):
    def __init__(self):
        super().__init__()
        self.earlier = {}

    def recall(self, responses):
        self.earlier = {key[1:3]: list(response) for key, prompt, response in responses}

    def forget(self):
        super().forget()
        self.earlier.clear()

    def open(self, key, tokens):
        super().open(key, tokens)
        self.texts[key] = self.earlier.get(key[1:3], []) + self.texts[key]

    def propose(self, key, depth):
        *before, last = self.texts[key]
        at = before.index(last) + 1 if last in before else len(before)
        return Draft(before[at:][:depth], 0.0)

class Longest(Placement):
    def place(self, workload, workers, history):
        tokens = [sum(history.get(request.key[1], [48])) for request in workload]
        order = sorted(range(len(workload)), key=lambda i: -tokens[i])
        return [order[w * len(order) // workers : (w + 1) * len(order) // workers] for w in range(workers)]

def advantage(rewards, groups, lengths, truncated, terms):
    return terms["reward"] - lengths / 48
"""


def test_run_with_own_parts_equals_unbroken_one(recipe_file, tmp_path, monkeypatch):
    (tmp_path / "parts.py").write_text(PARTS)
    prompts = (recipe_file.parent / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(prompts[:6]))
    monkeypatch.chdir(tmp_path)
    calm = whole_run(
        recipe_file,
        tmp_path / "calm",
        f"data.train={tmp_path / 'train.jsonl'}",
        'rollout.drafters={"echo":{"kind":"custom","path":"parts:Echo"}}',
        "rollout.policy=echo:4",
        "rollout.placement=parts:Longest",
        "train.advantage=parts:advantage",
    )
    trace = tltlab.read(calm / "trace")
    assert set(trace.iterations["drafter"][trace.iterations["num_drafted"] > 0]) == {"echo"}
    (tmp_path / "parts.py").unlink()
    run = killed(calm, tmp_path)
    with refused(ConfigError, naming=("--allow-code parts",)):
        resumed(run)
    train(resumed_recipe(run, (), ["parity", "parts"]), run, resume=True)
    check_finished(run, calm)


def test_a_resumed_run_equals_the_unbroken_one(fixed, tmp_path):
    run, newest = killed(fixed, tmp_path), f"step-{STEPS:06d}"
    shutil.copytree(fixed / "checkpoints" / newest, run / "checkpoints" / newest)
    assert read_json(run / "checkpoints" / "step-000002" / "state.json")["history"]
    state = run / "checkpoints" / newest / "state.json"
    state.write_text(state.read_text()[:-20])
    (run / "checkpoints" / ".step-000003.tltlab-left").mkdir()
    check_finished(resumed(run), fixed)
    events = json_lines(run / "events.jsonl")
    assert any(f"{newest} is passed over" in event["event"] for event in events)
    assert [event["rl_step"] for event in events if event["event"] == "continues with RL step 2"] == [2]


def test_a_learning_run_resumes_with_replayed_decisions(learning, tmp_path):
    again = resumed(killed(learning, tmp_path), replay=learning / "trace")
    check_finished(again, learning)


@pytest.mark.parametrize(
    ("system", "settings"),
    [
        # Drafts from a prompt's earlier responses, shared out by a budget that learns lengths.
        ("das", [*EPOCH_A_STEP, "rollout.num_workers=1"]),
        ("rhymerl", EPOCH_A_STEP),
        ("streamrl", EPOCH_A_STEP),
        ("april", ["rollout.group_size=2", "rollout.max_response_tokens=96"]),
        ("rollpacker", ["rollout.group_size=4"]),
    ],
)
def test_a_systems_run_resumes_as_its_own(recipe_file, tmp_path, system, settings):
    unbroken = whole_run(recipe_file, tmp_path / "whole", f"rollout.system={system}", *settings)
    trace = tltlab.read(unbroken / "trace")
    shares = trace.outcomes.groupby("rl_step")["worker"].sum().tolist()
    if system in ("das", "rhymerl"):
        assert "suffix" in set(trace.iterations["drafter"])
    if system in ("rhymerl", "streamrl"):
        assert shares[0] == 32 != shares[-1], "the first is contiguous, the last by lengths"
    if system in ("april", "rollpacker"):
        assert "abort" in set(trace.outcomes["finish_reason"])
    check_finished(resumed(killed(unbroken, tmp_path)), unbroken)


def test_cut_responses_continue_a_step_later(fixed):
    trace = tltlab.read(fixed / "trace")
    rows = trace.outcomes.merge(trace.workload, on=["rl_step", "prompt_id", "sample", "turn"])
    rows = rows.set_index(["rl_step", "prompt_id", "sample"])
    cut = rows[(rows["finish_reason"] == "abort") & (rows.index.get_level_values("rl_step") < STEPS - 1)]
    assert len(cut)
    for (rl_step, prompt_id, sample), row in cut.iterrows():
        goes_on = rows.loc[(rl_step + 1, prompt_id, sample)]
        assert goes_on["prompt_tokens"] == row["prompt_tokens"] + row["response_tokens"], "its tokens are its prefix"


def test_prefixes_of_the_epoch_before_are_kept(learning):
    checkpoints = {path.name for path in (learning / "checkpoints").iterdir()}
    assert f"step-{STEPS:06d}" in checkpoints, "a run that has ended can go on with more steps"
    generated = tltlab.read(learning / "trace").outcomes.groupby("rl_step")["response_tokens"].sum()
    assert generated[1] < 0.9 * generated[0], "the second epoch generates less"


def test_ctrl_c_leaves_a_checkpoint_to_resume(
    request,
    recipe_file,
    tmp_path,
    monkeypatch,
    capsys,
):
    """The RL steps rolled out ahead are done too; there is no checkpoint of the recipe's own."""
    logged, run = RunLog.step, tmp_path / "run"

    def interrupted(log, report, metrics):
        logged(log, report, metrics)
        if report.rl_step == 0:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)

    # A shell may have started the tests with SIGINT ignored.
    request.addfinalizer(
        partial(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))
    )
    monkeypatch.setattr(RunLog, "step", interrupted)
    own = ["checkpoint.every=0", "rollout.one_step_off=true", "rollout.num_workers=1", "train.steps=5"]
    code, _, told = typed(capsys, "train", recipe_file, *COMMON, *own, f"--out={run}")
    assert code == 130
    assert "Traceback" not in told
    step = step_of(checkpoints_in(run / "checkpoints")[-1])
    assert 1 <= step <= 2
    assert tltlab.read(run / "trace").rl_steps == list(range(step))
    (command,) = [line.partition(": ")[2] for line in told.splitlines() if f"RL step {step}: " in line]
    monkeypatch.undo()
    code, out, _ = typed(capsys, *shlex.split(command)[1:])
    assert code == 0
    assert tltlab.read(run / "trace").rl_steps == list(range(5))
    assert f"--resume {run} --allow-code=parity train.steps=10" in out


def test_only_one_process_resumes_a_run(fixed, tmp_path):
    run = killed(fixed, tmp_path)
    before = files(run)
    other = f"from tltlab.files import *; held = lock(Path({str(run)!r})); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", other], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        with refused(ConfigError):
            resumed(run)
        holder.kill()
    assert files(run) == before, "a logger's file would hide steps of the other process"


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
