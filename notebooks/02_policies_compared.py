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
# # 2. Policies compared
#
# Speculative decoding guesses some tokens ahead and lets the model check them in one pass. Guess too few and little is
# gained; guess too many in a large batch and the checking costs more than it saves. *When and how far to guess* is the
# policy. Here several policies meet the same recorded responses in the simulator, so that only the policy differs.

# %%
from pathlib import Path

from IPython.display import display

import tltlab
from tltlab import Policy, Strategy, load_policy
from tltlab.acceptance.load import load_acceptance
from tltlab.charts import bars, lines
from tltlab.costs.load import load_costs
from tltlab.policies.policy import Activation
from tltlab.policies.specs import FixedSpec
from tltlab.sim import compare, simulate

# %matplotlib inline

root = next(folder for folder in [Path.cwd(), *Path.cwd().parents] if (folder / "traces").is_dir())
trace = tltlab.read(root / "traces" / "tiny")

# %% [markdown]
# ## What a policy weighs
#
# From the recording, `tltlab calibrate` fitted what an iteration costs and how many guessed tokens are kept. Together
# they say how fast tokens come, for each batch size and depth. The drafter here looks up earlier text (n-grams): it
# needs no training.

# %%
costs = load_costs(root / "traces" / "tiny" / "costs.json")
acceptance = load_acceptance(root / "traces" / "tiny" / "acceptance.json")
batches = [1, 2, 4, 8, 16]
speeds = {}
for depth in (0, 2, 4, 8):
    strategy = Strategy.chain("ngram", depth)
    gained = [1.0 if depth == 0 else float(acceptance.at(b).curve(strategy).sum()) + 1.0 for b in batches]
    speeds[str(strategy)] = (
        batches,
        [b * a / costs.iteration(strategy).seconds(b, 60.0 * b) for b, a in zip(batches, gained, strict=True)],
    )
display(lines(speeds, xlabel="running requests", ylabel="tokens per second", title="speed by batch, from the fits"))

# %% [markdown]
# With few running requests the deepest draft is the fastest: a pass costs much before its first token, so checking more
# of them is nearly free. With sixteen it is slower than no guessing at all. The order turns round with the batch, which
# is why a policy looks at it.

# %% [markdown]
# ## The contest
#
# `none` never speculates. `ngram:d` always drafts d tokens; one of them only while at most 8 requests run. `beg-mab` is
# TLT's bandit, which learns while it runs. All have common random numbers: the same
# tokens are accepted at the same places.


# %%
def always(depth, max_requests=None):
    active = None if max_requests is None else Activation(max_requests=max_requests)
    return Policy(selector=FixedSpec(strategy=Strategy.chain("ngram", depth)), activation=active)


policies = {
    "none": load_policy("none"),
    "ngram:2": always(2),
    "ngram:4": always(4),
    "ngram:8": always(8),
    "ngram:4, at most 8 running": always(4, max_requests=8),
    "beg-mab": load_policy("beg-mab"),
}
table = compare(trace, policies, placement="recorded", mode="sampled", repeats=5)
display(table[["policy", "makespan_s", "speed_up", "speed_up_low", "speed_up_high", "regret"]].round(3))

# %%
display(
    bars(
        table["policy"].tolist(),
        table["speed_up"].tolist(),
        table["speed_up_low"].tolist(),
        table["speed_up_high"].tolist(),
        xlabel="speed-up of the rollout over no speculation (simulated)",
        title="longer is faster; the line is no speculation",
        reference=1.0,
    )
)

# %% [markdown]
# The thin lines are 95 % intervals over the RL steps. They are paired: every policy is compared on the same responses,
# so a hard RL step does not count against one of them. Where two intervals overlap widely, this trace does not say
# which policy is better.
#
# `ngram:8`, the worst choice for a large batch, comes out well here. No contradiction: batches are large only at the
# start, and most of the rollout is tail.

# %% [markdown]
# ## What it looks like

# %%
plain = simulate(trace, policies["none"], placement="recorded", mode="sampled")
adaptive = simulate(trace, policies["beg-mab"], placement="recorded", mode="sampled")
display(tltlab.timeline(plain, compare=adaptive, rl_step=1, title=("none", "beg-mab")))

# %% [markdown]
# **Be careful.** Four RL steps are few, and an interval over four of anything is rough. The times are simulated: the
# next notebook asks how far to trust them. And a bandit pays for looking: in rollouts this short it has little time to
# earn that back.
