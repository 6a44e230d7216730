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
# # 8. For which workloads does which family of systems pay?
#
# Some thirty systems fight the long tail of rollouts. They come in few families: plain decoding, drafts from text that
# is there already, drafts from a network that is trained on, a better order of requests, and combinations. Each is
# stood for by a system of the literature here.

# %%
import tltlab
from tltlab.charts import heat_maps
from tltlab.lengths.generate import generate
from tltlab.lengths.model import of_regime
from tltlab.sim import StudyConfig

# %% [markdown]
# The same responses on few or many GPUs, cut at two lengths, for a dense and a sparse model. The fastest RL step is
# named: a question mark where the 95 % interval of its speed-up over plain decoding reaches down to 1.

# %%
FAMILIES = {"seer-drafts": "text", "tlt": "trained", "streamrl": "order", "seer": "order + text"}
lengths = of_regime("reasoning").with_changes(median=1500, max_response_tokens=8192)
trace = generate(lengths, num_rl_steps=3, prompts_per_step=32, group_size=8, num_workers=2)
gpus = ["2xH100", "8xH100", "32xH100"]
published = "learned=tlt-qwen2.5-32b-fresh,all=seer-siblings"
config = StudyConfig(gpus=gpus, decision_block=64, acceptance=published)


def named(row):
    """The speed-up of a system's RL step and its family."""
    return f"{row.step_speed_up:.2f} {FAMILIES.get(row.system, 'plain')}" + "?" * (row.step_speed_up_low <= 1)


times, texts = {}, {}
for model in ("Qwen3-32B", "Qwen3-30B-A3B"):
    cells = tltlab.compare(trace, config=config, systems=list(FAMILIES), model=model, max_response_tokens=[1024, 8192])
    fastest = cells.loc[cells.groupby(["max_response_tokens", "gpus"], sort=False)["step_speed_up"].idxmax()]
    fastest = fastest.assign(text=[named(row) for row in fastest.itertuples()])
    times[model], texts[model] = (
        fastest.pivot_table(index="max_response_tokens", columns="gpus", values=column, sort=False, aggfunc="first")
        for column in ("step_speed_up", "text")
    )
heat_maps(
    times, texts=texts, xlabel="GPUs that share the responses", ylabel="length limit", title="RL step (simulated)"
)

# %% [markdown]
# **Ask, in this order: how many responses does a worker still hold in the second half of its rollout; do prompts come
# again, or have siblings; may training be a step behind.** Systems that cut, put off or resume responses are often the
# fastest per RL step, and train on older tokens or on another mix of lengths: `tltlab compare --systems` says so beside
# each, on your lengths.
