# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 5. Is a policy that was tuned in the simulator faster in vLLM?
#
# A policy is tuned on a recording, then the very same object drives real rollouts: GRPO with vLLM on this machine.

# %%
# ruff: noqa: E402, RUF100
# Hints about progress widgets, which this page does not use.
import logging
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")
logging.getLogger("ray.widgets.util").setLevel(logging.ERROR)

# %%
import contextlib
import io
import os
import statistics
import tempfile
from pathlib import Path

import pandas as pd
from IPython.display import display

import tltlab
from tltlab import load_policy
from tltlab.charts import bars
from tltlab.runtime.models.make import Size, make_model
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.run.grpo import GrpoRun
from tltlab.sim.tuning.tune import tune
from tltlab.traces import metrics

root = next(folder for folder in [Path.cwd(), *Path.cwd().parents] if (folder / "traces").is_dir())
scratch = tempfile.TemporaryDirectory(prefix="tltlab-")
work = Path(scratch.name)

# %% [markdown]
# `tune` searches on half of the RL steps and judges on the other half. Few trials here, to be quick. The result is a
# policy file, which `tltlab simulate`, `tltlab train` and `tltlab export-policy` load.

# %%
result = tune(tltlab.read(root / "traces" / "tiny"), depths=(2, 4, 8), trials=4, repeats=2)
result.policy.write(work / "policy.json")
print(result.verdict)

# %% [markdown]
# Set `TLTLAB_MODEL` to a folder from `tltlab make-model`. Without it a very small model is trained now, for some
# seconds. It solves little, but its text has the form of the recorded one. Then RL steps without speculation and under
# the tuned policy take turns, after one that warms the engine up.

# %%
model = Path(os.environ.get("TLTLAB_MODEL", work / "model"))
if not model.exists():
    small = Size(hidden=64, layers=2, mlp=128, steps=400, measured_prompts=2, samples_per_prompt=2)
    make_model(model, size=small, task="subset-sum", seed=0, progress=lambda line: None)
vllm = {"max_num_seqs": 16, "max_model_len": 512, "kv_cache_memory_bytes": 2**25}
recipe = Recipe.model_validate(
    {
        "model": str(model),
        "reward": "tltlab.runtime.models.tasks:subset_sum_reward",
        "data": {"train": str(model / "train.jsonl")},
        "rollout": {"num_workers": 1, "prompts_per_step": 4, "group_size": 4, "max_response_tokens": 384, "vllm": vllm},
        "train": {"threads": 1},
        "eval": {"num_prompts": 0},
    }
)
policies = {"none": load_policy("none"), "tuned": load_policy(work / "policy.json")}
# The engine's own lines would fill the page.
with contextlib.redirect_stderr(io.StringIO()), GrpoRun(recipe, work / "run") as run:
    for name in ("none", "tuned", *("none", "tuned") * 4):
        run.set_policy(policies[name], name=name)
        run.step()
    recorded = run.trace()

# %%
steps = pd.DataFrame(metrics.per_step(recorded)).merge(recorded.steps[["rl_step", "policy"]], on="rl_step")[2:]
rates = (steps["num_tokens"] / steps["rollout_s"]).groupby(steps["policy"]).apply(list)
times = [tuned / plain for tuned, plain in zip(rates["tuned"], rates["none"], strict=True)]
here = tltlab.compare(recorded, policies, rl_steps=steps["rl_step"].tolist()).set_index("policy").loc["tuned"]
before = {row.name: row.makespan_s for row in result.candidates}
names = ["simulated before, on the recording tuned on", "simulated after, from this run", "measured in this run"]
values = [before["none"] / before[result.name], here.speed_up, statistics.median(times)]
low, high = [None, here.speed_up_low, min(times)], [None, here.speed_up_high, max(times)]
display(steps[["rl_step", "policy", "num_tokens", "rollout_s", "mean_accept_length"]].round(2))
bars(
    names,
    values,
    low,
    high,
    measured=[False, False, True],
    reference=1.0,
    xlabel="tokens per second, times those of no speculation",
    title=result.name,
)

# %% [markdown]
# The line at the measured bar is the range of four pairs of RL steps. Tokens per second and not seconds are compared,
# because a model samples anew in every RL step.
#
# **Simulated and measured gains agree within the scatter of RL steps as short as these; how large they are depends on
# how many guesses are kept (`mean_accept_length`).** `tltlab verify RUN --policies default` measures on your model with
# repeats, and `tltlab demo` runs the whole loop.
