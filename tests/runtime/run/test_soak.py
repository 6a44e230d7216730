"""Many RL steps of the smallest model: no process grows, and none gathers descriptors or threads.

`TLTLAB_SOAK=2000` says how many, and -s shows what each process gained; without it nothing is run.
"""

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import psutil
import pytest

from tltlab.policies.policy import Policy
from tltlab.policies.specs import FixedSpec
from tltlab.strategy import Strategy

STEPS = int(os.environ.get("TLTLAB_SOAK") or 0)
MOST_MIB = 0.02
"""A process may gain per RL step, once as many as a third of all are over: caches fill until then."""
pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(0),
    pytest.mark.skipif(STEPS < 6, reason="TLTLAB_SOAK says of how many RL steps, at least 6"),
]
DRAFTER = """
[drafter]
tokens_per_update = 256
schedule = {kind = "always"}
canary = {min_drafts = 30}
"""


def counts_of(process):
    status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    kib = sum(int(line.split()[1]) for line in status if line.startswith(("RssAnon:", "RssShmem:")))
    return kib / 1024, process.num_fds(), process.num_threads()


def sample(run, into, titles):
    for process in [run, *run.children(recursive=True)]:
        try:
            # Ray's say there what they are doing.
            titles[process.pid] = " ".join(process.cmdline()[:4]).partition(".generate")[0][-60:]
            into[process.pid].append(counts_of(process))
        except (OSError, psutil.Error):
            continue  # it has ended meanwhile


@pytest.mark.parametrize("drafter", ["", "learned"])
def test_no_process_grows(recipe_file, tmp_path, drafter):
    Policy(selector=FixedSpec(strategy=Strategy.chain(drafter or "suffix", 3))).write(tmp_path / "policy.json")
    recipe = tmp_path / "recipe.toml"
    policy = f'[rollout]\npolicy = "{tmp_path / "policy.json"}"'
    recipe.write_text(recipe_file.read_text().replace("[rollout]", policy) + (DRAFTER if drafter else ""))
    # So little is learned that every RL step trains: a model that has learned all gets no advantages.
    options = ["train.lr=1e-7", "eval.num_prompts=0", "rollout.repeat_every=0", "checkpoint.every=10"]
    seen = defaultdict(list)
    titles = {}
    command = [sys.executable, "-m", "tltlab", "train", str(recipe), *options, f"train.steps={STEPS}"]
    with subprocess.Popen(
        [*command, "--out", str(tmp_path / "run")],
        env=os.environ | {"PYTHONPATH": str(recipe_file.parent)},
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        for line in run.stderr:
            if line.startswith("step "):
                sample(psutil.Process(run.pid), seen, titles)
    assert run.returncode == 0
    rows = {f"{pid} {titles[pid]}": np.array(each) for pid, each in seen.items() if len(each) > 0.9 * STEPS}
    assert any("RolloutWorker" in name for name in rows), titles
    print(f"\n{'MiB/step':>9} {'+-':>6} {'MiB':>6} {'fds':>9} {'threads':>9}")
    grown = []
    for name, each in rows.items():
        later = each[STEPS // 3 :]
        (slope, _), cov = np.polyfit(np.arange(len(later)), later[:, 0], 1, cov=True)
        ends = [f"{int(later[:5, n].max())}-{int(later[-5:, n].max())}" for n in (1, 2)]
        print(f"{slope:9.3f} {cov[0, 0] ** 0.5:6.3f} {later[-1, 0]:6.0f} {ends[0]:>9} {ends[1]:>9}  {name}")
        # Two steps are no trend: what few of them tell is as wide as their scatter.
        if slope - 3 * cov[0, 0] ** 0.5 > MOST_MIB or (later[-5:, 1:].max(0) > later[:5, 1:].max(0) + 2).any():
            grown.append(name)
    assert not grown
