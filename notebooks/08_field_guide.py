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

from tltlab.charts import lines
from tltlab.costs.stages import RooflineStages
from tltlab.lengths.generate import ToolUse, generate
from tltlab.lengths.model import of_regime
from tltlab.planning.composition import asynchronous
from tltlab.planning.systems import SYSTEMS
from tltlab.sim.maps import MapGrid, break_even, survey
from tltlab.sim.systems import compare_systems

# %matplotlib inline

root = next(folder for folder in [Path.cwd(), *Path.cwd().parents] if (folder / "traces").is_dir())

# %% [markdown]
# ## Where does each family pay?
#
# A small map: a dense and a sparse model, generation and training in turn or at the same time, few or many responses to
# a worker. `tltlab map` draws the large one, with FP8 and length limits to 128K.

# %%
grid = MapGrid(weights=["bf16"], contexts=[4096], loads=[4, 64], workers=2, rl_steps=3)
surveyed = survey(grid)
print(surveyed.verdict)
display(surveyed.plot())

# %% [markdown]
# ## What turns the answer?
#
# By what would the chance of each drafted token have to be multiplied until drafting is just as fast as not drafting?
# 1 is what was measured elsewhere (TLT's trained drafter, Seer's text of siblings). The lower the number, the safer the
# conclusion; above 1 drafting does not pay, and would have to be so much better.

# %%
points = [p for p in grid.points() if p.schedule == "synchronous"]
safe = {
    family: [break_even(grid, point, family, within=0.1) for point in points if point.model == grid.models[0]]
    for family in ("model-free", "trained")
}
display(
    lines(
        {family: (grid.loads, [float("nan") if x is None else x for x in found]) for family, found in safe.items()},
        xlabel="responses to a worker",
        ylabel="break-even factor on acceptance",
        title=f"{grid.models[0]}, synchronous (simulated)",
    )
)

# %% [markdown]
# ## What each costs in purity
#
# Drafts change no token and no policy. Systems that cut, put off or resume responses are often the fastest per RL step,
# and train on older tokens or on another mix of lengths: below 1, `length_bias` says that long responses are starved.

# %%
table = compare_systems(
    root / "traces" / "tiny", "verl,tlt-base,das,hedgespec,copris,april,spec-rl,streamrl", rl_steps=[0, 1], ranges=False
)
columns = ["system", "ratio", "ratio_low", "ratio_high", "lossless", "on_policy", "off_policy_share", "length_bias"]
display(table[columns].round(3))

# %% [markdown]
# ## The rule of thumb
#
# Ask, in this order: how many responses does a worker still hold in the second half of its rollout; do prompts come
# again, or have siblings; may training be a step behind; may it train on what was begun under older weights. Then
# simulate *your* lengths: a conclusion holds for its load and its acceptance, and the cells above say how far.

# %% [markdown]
# ## Where TLT's paper leaves it open
#
# Asynchronous RL, responses that are all long, several turns with tools: each against the same system without drafts,
# on workers of four H100 with Qwen2.5-32B, with TLT's threshold of 32 running requests and without it. Responses are
# few and short here; `cap, load = 32_768, 64` is the full size. `tltlab experiment baseline parts=predicted` simulates
# the set-ups of TLT's scripts beside its claim.

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
    """How much faster TLT's RL steps are, with the range that lengths and assumptions leave open."""
    trace = generate(
        lengths, num_rl_steps=2, prompts_per_step=workers * load // 8, group_size=8, num_workers=workers, tools=tools
    )
    systems = [replace(system, **changes) for system in tried]
    engine = f"sglang-0.4:{gpus}xH100:Qwen2.5-32B"
    options = {"costs": engine, "workers": workers, "stages": stages, "gpus_per_worker": gpus}
    found = compare_systems(trace, systems, **options, decision_block=cap // 256, ranges=True).set_index("system")
    tlt, always = found.loc["tlt"], found.loc["tlt, no threshold"]
    low = 1 / max(tlt.step_ratio_high, tlt.ratio_most)
    least = min(tlt.step_ratio_low, tlt.ratio_least)
    high = 1 / least if least > 0 else float("inf")
    says = "pays" if low > 1 else "does not pay" if high <= 1 else "is not told from no gain"
    return {
        "workload": name,
        "TLT": says,
        "RL step": 1 / tlt.step_ratio,
        "low": low,
        "high": high,
        "no threshold": 1 / always.step_ratio,
        "bubble": found.loc["verl", "bubble_fraction"],
    }


display(pd.DataFrame([answer(name, *workload) for name, workload in workloads.items()]).round(2))
