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
# # 2. How far from the best possible does a policy stay?
#
# Speculative decoding guesses some tokens ahead and lets the model check them in one pass. Guess too few and little is
# gained; guess too many in a large batch and checking costs more than it saves. *When and how far to guess* is the
# policy. Here several meet the same recorded responses in the simulator, with the same random numbers, so that only the
# policy differs.

# %%
from pathlib import Path

from IPython.display import display

import tltlab

root = next(folder for folder in [Path.cwd(), *Path.cwd().parents] if (folder / "traces").is_dir())
trace = tltlab.read(root / "traces" / "tiny")

# %% [markdown]
# `none` never guesses, `ngram:8` always guesses eight tokens by looking up earlier text, `ngram:4@8` four while at most
# eight requests run. `table` has the best depth for each batch size, from the costs and the acceptance that were fitted
# to the recording. `beg-mab` is TLT's bandit and `adaptive` estimates both itself: these two learn while they run.

# %%
policies = ["none", "ngram:2", "ngram:4", "ngram:8", "ngram:4@8", "table", "beg-mab", "adaptive"]
rows = tltlab.compare(trace, policies, placement="recorded", mode="sampled", repeats=5)
display(rows[["policy", "makespan_s", "speed_up", "speed_up_low", "speed_up_high", "regret"]].round(3))
rows.plot()

# %% [markdown]
# The thin lines are 95 % intervals over the RL steps, paired: a hard RL step counts against nobody. `regret` is the
# time above a bound that knows every length.
#
# **Guessing at all is worth more than guessing cleverly: the best fixed depth, the table and what `adaptive` learns lie
# within each other's intervals, and a bandit pays for its trials in rollouts as short as these.** `tltlab bench
# regimes` asks the same of more workloads.
