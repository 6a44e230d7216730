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
# # 4. Does a drafter stay good if it is trained in the bubbles?
#
# The best guesses come from a small network trained to imitate the model, the **drafter**. But training moves the
# model: after every RL step the drafter imitates a model that no longer exists. TLT trains it on, while workers are
# idle.

# %%
from dataclasses import replace

from tltlab import Strategy, load_policy
from tltlab.acceptance.base import GeometricAcceptance
from tltlab.acceptance.freshness import FreshAcceptance
from tltlab.charts import lines
from tltlab.lengths.generate import log_normal
from tltlab.sim import Scenario, simulate
from tltlab.state import DrafterState

# %% [markdown]
# Twelve RL steps with lengths as reasoning models have them, on eight workers at the costs of a 7B model on H100s. One
# drafter was trained well before the run and then left alone. The other starts untrained and trains whenever workers
# are idle, at the rates that TLT reports. How fast a drafter ages is an **assumption** (`Freshness`): nobody has
# reported it.

# %%
drafting = FreshAcceptance(base=GeometricAcceptance(alpha=0.8), drafter="learned")
chain = Strategy.chain("learned", 4)
reasoning = log_normal(prompts=16, group_size=8, rl_steps=12, median=3000, sigma=0.9, cap=16384)
setting = {"costs": "h100-qwen2.5-7b", "acceptance": drafting, "workers": 8}

once = [DrafterState(age=step, updates=1000) for step in range(12)]
left_alone = replace(Scenario.of(reasoning, **setting), drafter_states=tuple(once)).rollouts(load_policy("learned:4"))
trained = simulate(reasoning, "learned:4", spot="tlt", **setting)
in_bubbles = [DrafterState(), *(rollout.spot.drafter for rollout in trained.rollouts)][:-1]


def tokens_per_pass(states):
    return range(12), [1.0 + float(drafting.at_freshness(state).curve(chain).sum()) for state in states]


lines(
    {"trained in bubbles": tokens_per_pass(in_bubbles), "trained once, left alone": tokens_per_pass(once)},
    xlabel="RL step",
    ylabel="tokens per pass",
    title="what each drafter yields (simulated)",
)

# %%
seconds = [sum(rollout.makespan_s for rollout in rollouts) for rollouts in (left_alone, trained.rollouts)]
idle = trained.summary["spot_training"]
print(f"rollouts {seconds[0]:.0f} s left alone, {seconds[1]:.0f} s trained in bubbles")
print(f"{idle['updates']} updates in {idle['used_share']:.0%} of the idle worker time")

# %% [markdown]
# **The idle time is more than enough to keep it fresh, if a drafter ages as assumed here; the gap between the two lines
# is as large as that assumption makes it.** `tltlab calibrate RUN` fits `Freshness` to a run that trained in bubbles,
# and `tltlab report RUN` shows its own drafter on the same responses before and after.
