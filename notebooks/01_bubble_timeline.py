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
# # 1. Where the time goes: bubbles in a rollout
#
# Reinforcement learning of a reasoning model repeats one loop, the *RL step*: generate responses (the **rollout**),
# score them, train on them, and hand the new weights back. Responses are of very different length. Workers that have
# finished theirs wait for the one that generates the longest, and a worker with two responses left uses a small part of
# its processor. This notebook shows both on a small recording from a real run: 4 RL steps of GRPO, two vLLM workers.

# %%
import tempfile
from pathlib import Path

import pandas as pd
from IPython.display import display

import tltlab
from tltlab.charts import lines
from tltlab.report.timeline import write_perfetto
from tltlab.sim import simulate
from tltlab.traces import metrics

root = next(folder for folder in [Path.cwd(), *Path.cwd().parents] if (folder / "traces").is_dir())
trace = tltlab.read(root / "traces" / "tiny")
print(trace.manifest.kind, "on", trace.manifest.hardware, "with", trace.manifest.engine)

# %% [markdown]
# ## One RL step
#
# A lane per worker, the trainer below them. Under it: how many requests are still running. The **tail** is the time in
# which fewer than one in eight are. The strip at the right is each worker's **bubble**: the share of the rollout in
# which it had nothing to do.

# %%
tltlab.timeline(trace, rl_step=3)

# %% [markdown]
# Look for two things. The grey end of a lane is idle time that nothing fills. And most of the requests are done in the
# first half; the rest of the rollout serves very few. Dark blue is speculative decoding, which helps exactly there: it
# yields several tokens per pass of the model, and a small batch leaves the processor room for the extra work.
#
# This recording tried depths at random, hence the changes of colour. It was made to measure, not to be fast.

# %% [markdown]
# ## All RL steps in figures

# %%
columns = ["rl_step", "num_responses", "p50_tokens", "max_tokens", "rollout_s", "bubble_fraction", "tail_fraction"]
display(pd.DataFrame(metrics.per_step(trace))[columns].round(3))
tltlab.timeline(trace, rl_step="all")

# %% [markdown]
# ## What makes the tail: lengths
#
# The curve says which share of the responses is longer than a number of tokens. A straight fall would mean lengths that
# are alike; the long foot to the right is the tail.

# %%
tokens = trace.outcomes["response_tokens"].sort_values().to_numpy()
left = [1 - (i + 1) / len(tokens) for i in range(len(tokens))]
lines(
    {"recorded responses": (tokens, left)},
    xlabel="response tokens",
    ylabel="share of responses that are longer",
    title="lengths in traces/tiny",
)

# %% [markdown]
# ## Where the seconds went
#
# From the shortest rollout that any choice allows (the bound) to the measured one, in steps. Each is a simulation with
# one thing changed. Half of the rollout could not be avoided; of the rest, the largest part is the choice of depth,
# which was random here, and then the drain: workers that wait for the longest response.

# %%
tltlab.waterfall(trace).plot()

# %% [markdown]
# ## Idle time is not lost for good
#
# TLT trains its drafter in the bubbles. In the simulation below of the same responses on four workers, idle workers
# may train. The rates are made up to suit rollouts of a second, so read the picture for its shape only. The bubble
# share counts such time as idle: it says how much there is to fill.

# %%
training = {"samples_per_update": 1, "sample_tokens": 64, "padded_samples_per_s": 100, "start_s": 0.01, "join_s": 0.005}
filled = simulate(trace, "fixed", workers=4, spot=training)
tltlab.timeline(filled, rl_step=3, title="simulated, four workers, training when idle")

# %% [markdown]
# ## Take it with you
#
# The same lanes as a file for [Perfetto](https://ui.perfetto.dev), where every engine iteration can be clicked. On the
# command line: `tltlab timeline traces/tiny --out timeline.json`.

# %%
with tempfile.TemporaryDirectory() as folder:
    written = write_perfetto(Path(folder) / "timeline.json", trace)
    print(f"{written.name}: {written.stat().st_size / 1024:.0f} KiB")

# %% [markdown]
# **Be careful.** Four RL steps on a CPU say nothing about the size of bubbles in a large run; there, rollouts last
# minutes and responses reach 32,000 tokens. `traces/reasoning-32k` has such lengths, without times.
