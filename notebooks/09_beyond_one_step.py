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
# # 9. What is left beyond one iteration?
#
# A policy chooses how far each iteration guesses ahead, and there the best table is close to the best choice in every
# iteration. But while the last responses run, most GPUs are idle. A *planner* sees all workers' requests: it can gather
# what is left onto fewer engines of more GPUs each, at the price of a switch and of prefilling all of it again.

# %%
from pathlib import Path

from IPython.display import display

import tltlab
from tltlab.charts import bars
from tltlab.sim import Scenario, simulate
from tltlab.sim.tuning.search import best_table

root = next(folder for folder in [Path.cwd(), *Path.cwd().parents] if (folder / "traces").is_dir())
machine = {"gpus": "8xH100", "model": "Qwen2.5-7B", "engine": "vllm"}

# %% [markdown]
# ## The ladder
#
# Each step keeps what is above it: no speculation; the best table of depths; responses placed by their expected
# lengths; the planner `gather`, which believes what earlier RL steps and ended siblings say about lengths; the same
# with the true lengths; and the seconds that no schedule undercuts.


# %%
def ladder(name, rl_steps):
    trace = tltlab.read(root / "traces" / name)
    scenario = Scenario.of(trace, rl_steps=rl_steps, **machine)
    table = best_table(scenario, scenario.covered_chains(["ngram"])[0])
    rungs = {
        "none": ("none", "contiguous", "stay"),
        "table": (table, "contiguous", "stay"),
        "longest expected": (table, "longest_expected", "stay"),
        "gather": (table, "longest_expected", "gather"),
        "clairvoyant": (table, "longest_expected", "clairvoyant"),
    }
    found = {
        rung: simulate(trace, policy, placement=placement, planner=planner, rl_steps=rl_steps, **machine)
        for rung, (policy, placement, planner) in rungs.items()
    }
    seconds = {rung: result.makespan_s for rung, result in found.items()}
    return found, seconds | {"bound": float(found["clairvoyant"].bounds_s()[0].mean())}


results = {}
for name, rl_steps in {"base-rl-16k": [0, 3], "reasoning-32k": [0, 1], "subset-sum-small": [2, 4]}.items():
    results[name], seconds = ladder(name, rl_steps)
    display(bars(list(seconds), list(seconds.values()), xlabel="mean seconds of a rollout (simulated)", title=name))

# %% [markdown]
# Where a few responses run long, gathering takes off more than placement and depth had left over; where drafts have
# already made the tail short, or many responses run to the cap, the planner stays.

# %% [markdown]
# ## The tail, before and after

# %%
for rung in ("longest expected", "gather"):
    display(results["base-rl-16k"][rung].plot())
