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
# # 8. A field guide
#
# Some thirty systems fight the long tail of rollouts. They come in few families: plain decoding, drafts from text that
# is there already, drafts from a network that is trained on, a better order of requests, and combinations. Which pays
# for *your* workload, and what would have to be true for that to change? Every figure below is computed here.

# %%
from dataclasses import replace
from pathlib import Path

import pandas as pd
from IPython.display import display

import tltlab
from tltlab.charts import heat_maps, lines
from tltlab.costs.stages import RooflineStages
from tltlab.lengths.generate import ToolUse, generate
from tltlab.lengths.model import of_regime
from tltlab.planning.composition import asynchronous
from tltlab.planning.systems import SYSTEMS
from tltlab.sim import StudyConfig

# %matplotlib inline

root = next(folder for folder in [Path.cwd(), *Path.cwd().parents] if (folder / "traces").is_dir())

# %% [markdown]
# ## Where does each family pay?
#
# A small map: the same responses on few or many GPUs, cut at two lengths, for a dense and a sparse model. Each family
# is a system of the literature, and the fastest RL step is named: a question mark where the 95 % interval of its
# speed-up over plain decoding reaches down to 1. `tltlab compare --systems` compares others, on your lengths.

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
display(
    heat_maps(
        times, texts=texts, xlabel="GPUs that share the responses", ylabel="length limit", title="RL step (simulated)"
    )
)

# %% [markdown]
# ## What turns the answer?
#
# The same trained drafter with other chances that a drafted token is accepted once those before it were. Where a line
# crosses 1, drafting is just as fast as not drafting: the further to the left, the safer the conclusion.

# %%
chances = {f"learned={chance}": chance for chance in (0.1, 0.4, 0.7)}
cells = tltlab.compare(trace, config=config, systems="tlt", model="Qwen3-30B-A3B", acceptance=list(chances))
by_gpus = cells[cells["system"] == "tlt"].groupby("gpus", sort=False)
display(
    lines(
        {gpus: (rows["acceptance"].map(chances), rows["step_speed_up"]) for gpus, rows in by_gpus},
        xlabel="chance that a drafted token is accepted",
        ylabel="RL step, times as fast as without",
        title="Qwen3-30B-A3B with TLT (simulated)",
    )
)

# %% [markdown]
# ## What each costs in purity
#
# Drafts change no token and no policy. Systems that cut, put off or resume responses are often the fastest per RL step,
# and train on older tokens or on another mix of lengths: below 1, `length_bias` means that long responses are starved.

# %%
systems = "verl,tlt-base,das,hedgespec,copris,april,spec-rl,streamrl"
table = tltlab.compare(root / "traces" / "tiny", systems=systems, rl_steps=[0, 1])
columns = ["system", "ratio", "ratio_low", "ratio_high", "lossless", "on_policy", "off_policy_share", "length_bias"]
display(table[columns].round(3))

# %% [markdown]
# ## Where TLT's paper leaves it open
#
# Asynchronous RL, responses that are all long, several turns with tools: each against the same system without drafts,
# on workers of four H100 with Qwen2.5-32B, with TLT's threshold of 32 running requests and without it. Responses are
# few and short here; `cap, load = 32_768, 64` is the full size. Notebook 10 simulates the set-ups of TLT's
# scripts beside its claim.

# %%
cap, load, workers, gpus = 512, 8, 2, 4
reasoning = of_regime("reasoning").with_changes(median=0.18 * cap, max_response_tokens=cap)
all_long = reasoning.with_changes(median=0.5 * cap, sigma=0.1)
half_trains = {
    "admission": asynchronous(4),
    "topology": "separate",
    "generating_share": 0.5,
    "max_staleness": 1,
    "on_policy": False,
}
workloads = {
    "synchronous": (reasoning, None, {}),
    "asynchronous": (reasoning, None, half_trains),
    "uniformly long": (all_long, None, {}),
    "multi-turn": (reasoning, ToolUse(turns=4.0, tool_s=10.0 * cap / 32_768), {}),
}
stages = RooflineStages(kind="roofline", gpu="H100", model="Qwen2.5-32B", num_gpus=workers * gpus).build()
tried = [SYSTEMS["verl"], SYSTEMS["tlt"], replace(SYSTEMS["tlt"], name="tlt, no threshold", activation=None)]


def answer(name, lengths, tools, changes):
    """How much faster TLT's RL steps are, with the 95 % interval over RL steps."""
    trace = generate(
        lengths, num_rl_steps=2, prompts_per_step=workers * load // 8, group_size=8, num_workers=workers, tools=tools
    )
    systems = [replace(system, **changes) for system in tried]
    engine = f"sglang-0.4:{gpus}xH100:Qwen2.5-32B"
    options = {"costs": engine, "workers": workers, "stages": stages, "gpus_per_worker": gpus}
    found = tltlab.compare(trace, systems=systems, **options, decision_block=cap // 256).set_index("system")
    tlt, always = found.loc["tlt"], found.loc["tlt, no threshold"]
    low, high = tlt.step_speed_up_low, tlt.step_speed_up_high
    says = "pays" if low > 1 else "does not pay" if high <= 1 else "no clear effect"
    return {
        "workload": name,
        "TLT": says,
        "RL step": tlt.step_speed_up,
        "low": low,
        "high": high,
        "no threshold": always.step_speed_up,
        "bubble": found.loc["verl", "bubble_fraction"],
    }


display(pd.DataFrame([answer(name, *workload) for name, workload in workloads.items()]).round(2))

# %% [markdown]
# ## How much of the gain needs a drafter trained on long responses?
#
# The tail of a rollout is long contexts, and beyond the length at which a drafter was trained its chances fall
# (`ContextAcceptance`, with its source). TLT with the same drafter, trained at 2K tokens, at 8K, and on whole responses
# as those of TLT's buffer, for a base model's responses of up to 32K tokens: most of the gain needs long responses, and
# 8K is nearly enough here. With longer responses (`median=4000`) a drafter trained at 2K makes the rollout slower.

# %%
long_tail = generate(
    of_regime("base-rl").with_changes(median=1500, max_response_tokens=32_768),
    num_rl_steps=2, prompts_per_step=32, group_size=8, num_workers=4,
)  # fmt: skip
gains = {}
for trained in ("short", "8k", "long"):
    drafter = f"learned=tlt-qwen2.5-32b-fresh@{trained}"
    options = {"gpus": "8xH100", "model": "Qwen2.5-32B", "acceptance": drafter, "decision_block": 64}
    row = tltlab.compare(long_tail, systems="verl,tlt", **options).set_index("system").loc["tlt"]
    gains[trained] = {"rollout": row.speed_up, "RL step": row.step_speed_up}
display(pd.DataFrame(gains).T.round(2))

# %% [markdown]
# ## The rule of thumb
#
# Ask, in this order: how many responses does a worker still hold in the second half of its rollout; do prompts come
# again, or have siblings; may training be a step behind; may it train on what was begun under older weights. Then
# simulate *your* lengths: a conclusion holds for its load and its acceptance, and the cells above say how far.
