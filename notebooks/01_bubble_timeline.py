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
# # 1. Where do the seconds of a rollout go?
#
# Reinforcement learning of a reasoning model repeats one loop, the *RL step*: generate responses (the **rollout**),
# score them, train on them, hand the new weights back. A few responses are much longer than the rest, and workers that
# have finished theirs wait. Here is a small recording of a real run: GRPO with two vLLM workers.

# %%
from pathlib import Path

import tltlab

root = next(folder for folder in [Path.cwd(), *Path.cwd().parents] if (folder / "traces").is_dir())
trace = tltlab.read(root / "traces" / "tiny")
print(trace.manifest.kind, "on", trace.manifest.hardware, "with", trace.manifest.engine)

# %% [markdown]
# A lane per worker, the trainer below them; what is hatched is a **bubble**, in which a worker had nothing to do. Under
# it: how many requests still run. Most are done in the first half; the rest of the rollout, the **tail**, serves very
# few. Dark blue is speculative decoding, whose depth this recording tried at random.

# %%
tltlab.timeline(trace, rl_step=3)

# %% [markdown]
# The answer, over all RL steps: from the shortest rollout that any choice allows (the bound) to the measured one, each
# step a simulation with one thing changed.

# %%
tltlab.waterfall(trace).plot()

# %% [markdown]
# **Half of the rollout could not be avoided; the rest went to depths that were random here, and to workers that waited
# for the longest response.** On the command line: `tltlab report traces/tiny`, and `tltlab timeline traces/tiny --out
# timeline.json` for [Perfetto](https://ui.perfetto.dev). Four RL steps on a CPU say nothing about the size of bubbles
# in a large run.
