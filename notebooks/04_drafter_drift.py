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
# # 4. A drafter drifts
#
# The best guesses come from a small network trained to imitate the model, the **drafter**. But training moves the
# model: after every RL step the drafter imitates a model that no longer exists, and fewer of its guesses are kept. TLT
# therefore trains it on, in the bubbles. This notebook shows the drift, first where there is none, then in a model of
# it, and last in a real run, if you have one.

# %%
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from IPython.display import display

import tltlab
from tltlab import Policy, Strategy
from tltlab.acceptance.base import GeometricAcceptance
from tltlab.acceptance.freshness import FreshAcceptance
from tltlab.charts import lines
from tltlab.lengths.generate import log_normal
from tltlab.policies.specs import FixedSpec
from tltlab.sim import Scenario, simulate
from tltlab.state import DrafterState
from tltlab.traces import metrics

# %matplotlib inline

root = next(folder for folder in [Path.cwd(), *Path.cwd().parents] if (folder / "traces").is_dir())
trace = tltlab.read(root / "traces" / "tiny")

# %% [markdown]
# ## Recorded: a drafter that cannot drift
#
# The small recording drafts by looking up n-grams of earlier text. It imitates nobody, so it has no age. What moves is
# the text itself, as the model learns. (Depths were tried at random, so single RL steps vary.)

# %%
steps = pd.DataFrame(metrics.per_step(trace))
display(
    lines(
        {"n-grams, recorded": (steps["rl_step"], steps["mean_accept_length"])},
        xlabel="RL step",
        ylabel="tokens per pass",
        title="recorded in traces/tiny",
    )
)

# %% [markdown]
# ## Modelled: a drafter that drifts
#
# `Freshness` says how good a drafter is by its *age* (RL steps since its last update) and its *updates*. Its ends are
# taken from TLT's paper, how fast it ages is an **assumption**: nobody has reported it. A level of 1 is a drafter that
# is fresh and fully trained.

# %%
drafting = FreshAcceptance(base=GeometricAcceptance(alpha=0.8), drafter="learned")
chain = Strategy.chain("learned", 4)


def tokens_per_pass(state):
    return 1.0 + float(drafting.at_freshness(state).curve(chain).sum())


ages = list(range(0, 31, 2))
curves = {
    f"after {n} updates": (ages, [tokens_per_pass(DrafterState(age=a, updates=n)) for a in ages]) for n in (0, 3, 30)
}
picture = lines(curves, xlabel="RL steps since the last update", ylabel="tokens per pass", title="the assumed drift")
display(picture)

# %% [markdown]
# ## Simulated: trained once, or trained in the bubbles
#
# Twelve RL steps with lengths as reasoning models have them, on eight workers at the costs of a 7B model on H100s. One
# drafter was trained well before the run and then left alone. The other starts untrained and trains whenever workers
# are idle, at the rates that TLT reports.

# %%
reasoning = log_normal(prompts=16, group_size=8, rl_steps=12, median=3000, sigma=0.9, cap=16384)
setting = {"costs": "h100-qwen2.5-7b", "acceptance": drafting, "workers": 8}
policy = Policy(selector=FixedSpec(strategy=chain))
once = [DrafterState(age=step, updates=1000) for step in range(12)]
left_alone = replace(Scenario.of(reasoning, **setting), drafter_states=tuple(once)).rollouts(policy)
trained = simulate(reasoning, policy, spot="tlt", **setting)

in_bubbles = [DrafterState(), *(rollout.spot.drafter for rollout in trained.rollouts)][:-1]
both = {
    "trained in bubbles": (range(12), [tokens_per_pass(state) for state in in_bubbles]),
    "trained once, left alone": (range(12), [tokens_per_pass(state) for state in once]),
}
display(lines(both, xlabel="RL step", ylabel="tokens per pass", title="simulated: what each drafter yields"))

# %%
seconds = {
    "trained in bubbles": (range(12), [rollout.makespan_s for rollout in trained.rollouts]),
    "trained once, left alone": (range(12), [rollout.makespan_s for rollout in left_alone]),
}
display(lines(seconds, xlabel="RL step", ylabel="seconds of rollout", title="simulated: how long rollouts take"))
idle = trained.summary["spot_training"]
print(f"{idle['updates']} updates in {100 * idle['used_share']:.0f} % of the idle worker time")
display(tltlab.timeline(trained, rl_step=6, title="simulated"))

# %% [markdown]
# The training (hatched) fills idle time only, so it delays nothing here. Many more updates fit in than this model of
# drift asks for: it takes a few to be fresh again. Rollouts differ among themselves because their lengths do, so
# compare the two lines at one RL step.

# %% [markdown]
# ## Recorded: your own run
#
# Set `TLTLAB_RUN` to a run with a trained drafter (`tltlab demo` leaves one in its folder `adaptive`) and run this
# again. The drafter's age and updates come from the run. `first` and `in service` are the drafter that the run began
# with and the one it used, judged on the *same* responses, so nothing but training tells them apart.

# %%
run = os.environ.get("TLTLAB_RUN")
if run is None:
    print("TLTLAB_RUN is not set: nothing of your own to show")
else:
    own = tltlab.read(run)
    rows = pd.DataFrame(metrics.per_step(own))[["rl_step", "rollout_s", "bubble_fraction", "mean_accept_length"]]
    display(rows.merge(own.steps[["rl_step", "drafter_age", "drafter_updates", "drift_kl"]], on="rl_step").round(4))
    if own.acceptance is None:
        print("the run has no acceptance table: its drafter was not judged on recorded responses")
    else:
        judged = own.acceptance.assign(kept=own.acceptance["accept_if_drafted"].map(np.mean))
        kept = judged.groupby(["rl_step", "drafter_updates"])["kept"].mean().reset_index()
        first = kept[kept["drafter_updates"] == 0]
        served = kept.loc[kept.groupby("rl_step")["drafter_updates"].idxmax()]
        series = {"in service": (served["rl_step"], served["kept"]), "first": (first["rl_step"], first["kept"])}
        display(lines(series, xlabel="RL step", ylabel="guessed tokens kept", title="recorded, on the same responses"))

# %% [markdown]
# **Be careful.** The gap between the two simulated drafters is as large as the assumed ageing makes it. It shows what
# training in bubbles *could* be worth, not what it is. `tltlab calibrate` fits `Freshness` to a run that has both.
