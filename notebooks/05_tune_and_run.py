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
# # 5. Tune a policy, then run it
#
# Everything so far happened in the simulator. Here a policy is tuned there and then drives real rollouts: GRPO with
# vLLM on this machine, with the very same policy object.

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

# %matplotlib inline

root = next(folder for folder in [Path.cwd(), *Path.cwd().parents] if (folder / "traces").is_dir())
trace = tltlab.read(root / "traces" / "tiny")
scratch = tempfile.TemporaryDirectory(prefix="tltlab-")
work = Path(scratch.name)

# %% [markdown]
# ## Tune
#
# `tune` tries fixed depths, depths below a threshold and tables by batch size, and searches the settings of TLT's
# bandit. It does so on half of the RL steps and judges on the other half. Few trials here, to be quick.

# %%
result = tune(trace, depths=(2, 4, 8), trials=4, repeats=2)
print(result.verdict)
display(pd.DataFrame(result.json()["candidates"]).round(3))

# %%
rows = result.candidates
display(
    bars(
        [row.name for row in rows],
        [1 / row.ratio for row in rows],
        [1 / row.ratio_high for row in rows],
        [1 / row.ratio_low for row in rows],
        xlabel="speed-up over the best fixed strategy (simulated, RL steps not tuned on)",
        title="longer is faster; the line is the best fixed strategy",
        reference=1.0,
    )
)

# %% [markdown]
# Read the verdict before the picture. If the intervals of the clever policies cross the line, the simple one is as good
# and is what `tune` returns. Distrust a narrow
# interval here: it stands on two RL steps.
#
# The result is a policy file. `tltlab simulate`, `tltlab train` and `tltlab export-policy` all load it.

# %%
result.policy.write(work / "policy.json")
print((work / "policy.json").read_text()[:300], "...")

# %% [markdown]
# ## A model to run it on
#
# Set `TLTLAB_MODEL` to a folder from `tltlab make-model`. Without it, a very small model is trained now for a few
# seconds: it writes text of the right form but solves nothing. Look at its speed only.

# %%
model = Path(os.environ.get("TLTLAB_MODEL", work / "model"))
if not model.exists():
    small = Size(hidden=64, layers=2, mlp=128, steps=100, measured_prompts=2, samples_per_prompt=2)
    report = make_model(model, size=small, task="subset-sum", seed=0, progress=lambda line: None)
    print(f"{report['parameters']:,} parameters, trained for {report['train_s']:.0f} s")

# %% [markdown]
# ## Run it
#
# Two RL steps without speculation, then two under the tuned policy, in one run. The first RL step also warms the
# engine up.

# %%
recipe = Recipe.model_validate(
    {
        "model": str(model),
        "reward": "tltlab.runtime.models.tasks:subset_sum_reward",
        "data": {"train": str(model / "train.jsonl")},
        "rollout": {
            "num_workers": 1,
            "prompts_per_step": 4,
            "group_size": 4,
            "max_response_tokens": 256,
            "policy": str(work / "policy.json"),
            "vllm": {"max_num_seqs": 16, "max_model_len": 512, "kv_cache_memory_bytes": 2**25},
        },
        "train": {"threads": 1},
        "eval": {"num_prompts": 0},
    }
)
# The engine's own lines would fill the page.
with contextlib.redirect_stderr(io.StringIO()), GrpoRun(recipe, work / "run") as run:
    run.set_policy(load_policy("none"))
    run.step()
    run.step()
    run.set_policy(load_policy(work / "policy.json"), name="tuned")
    run.step()
    run.step()
    recorded = run.trace()

# %%
measured = pd.DataFrame(metrics.per_step(recorded))[["rl_step", "num_tokens", "rollout_s", "mean_accept_length"]]
measured = measured.merge(recorded.steps[["rl_step", "policy"]], on="rl_step")
measured["tokens_per_s"] = measured["num_tokens"] / measured["rollout_s"]
display(measured.round(2))
display(tltlab.timeline(recorded, rl_step="all", title="measured on this machine: RL steps 0, 1 plain, 2, 3 tuned"))

# %% [markdown]
# Compare tokens per second and not seconds: the model samples anew in every RL step, so the lengths differ. And look at
# `mean_accept_length` first. The quick model's text is close to random and seldom repeats itself, so few of the guesses
# are kept (near 1 is none) and a policy tuned for a better model need not win. With a model from `tltlab make-model`
# most of them are.
#
# **Be careful.** Four RL steps are an anecdote. The policy was tuned on a recording of *another* model; what it is
# worth on yours, `tltlab verify RUN --policies default` measures with repeats, and `tltlab demo` runs the whole loop.
