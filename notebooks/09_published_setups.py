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
# # 9. TLT in its published set-ups
#
# TLT's paper has RL steps 1.7 to 2.1 times as fast as VeRL's. Its scripts give every worker 256 responses of up to 32K
# tokens: a 7B model on 8 GPUs, a 32B model on 64. What does the simulator predict for them, on H100 and on A100?
# Nothing below was fitted to the paper.

# %%
import pandas as pd
from IPython.display import display

from tltlab.charts import bars
from tltlab.costs.profiles import nearest_engine, profile_costs
from tltlab.costs.stages import RooflineStages
from tltlab.lengths.generate import generate
from tltlab.lengths.model import of_regime
from tltlab.planning.claims import CLAIMS
from tltlab.sim.comparison.systems import compare_systems

# %matplotlib inline

SETUPS = {"7B": ("Qwen2.5-7B", 2, 4), "32B": ("Qwen2.5-32B", 8, 8)}  # the model, workers, GPUs of each
RL_STEPS, LOAD, CAP = 4, 256, 32_768
lengths = of_regime("reasoning").with_changes(median=0.18 * CAP, max_response_tokens=CAP)

# %% [markdown]
# The lengths are those of reasoning models, an **assumption**: one response in fifty reaches the limit. Log-probs,
# training and weight sync follow from FLOPs, and grading takes no time.


# %%
def compared(model, workers, tp, gpu):
    """Rows of the systems on responses of a set-up, each with whole RL steps."""
    load = {"num_rl_steps": RL_STEPS, "prompts_per_step": workers * LOAD // 8, "group_size": 8, "num_workers": workers}
    costs = profile_costs(nearest_engine(gpu, model, "bf16"), gpu, model, tp, weights="bf16")
    stages = RooflineStages(kind="roofline", gpu=gpu, model=model, num_gpus=workers * tp).build()
    options = {"costs": costs, "stages": stages, "workers": workers, "gpus_per_worker": tp}
    systems = "verl,open-r1,tlt-base,tlt"
    return compare_systems(generate(lengths, **load), systems, decision_block=CAP // 256, ranges=True, **options)


# %% [markdown]
# `low` to `high` is the 95 % interval over RL steps. `least` to `most` is over what was assumed: acceptance, its loss
# where the drafter is untrained or old, 30 % of speculation's costs.

# %%
settings = [(f"{name}, {gpu}", *setup, gpu) for name, setup in SETUPS.items() for gpu in ("H100", "A100")]
rows = pd.concat([compared(*setup).assign(setting=name) for name, *setup in settings], ignore_index=True)
ratios = {"speed-up": "step_ratio", "low": "step_ratio_high", "high": "step_ratio_low"}
ratios |= {"least": "ratio_most", "most": "ratio_least", "rollout": "ratio"}
speed_ups = pd.DataFrame({name: 1 / rows[column] for name, column in ratios.items()})
table = rows[["setting", "title"]].join(speed_ups).join(rows[["rollout_share", "step_s"]])
display(table.round(2))

# %%
values = [table[name] for name in ("speed-up", "low", "high")]
labels = table["title"] + ", " + table["setting"]
display(bars(labels, *values, xlabel="speed-up", reference=1.0, title="RL step, VeRL = 1 (simulated)"))
tlt, claim = table[table["title"] == "TLT"], CLAIMS["tlt"]
print(f"TLT: {tlt['speed-up'].min():.2f} to {tlt['speed-up'].max():.2f}x; the paper {claim.least} to {claim.most}x")

# %% [markdown]
# **Be careful.** A worker of 256 responses decodes plainly until 32 of them are left: then only does TLT speculate.
# Fewer responses a worker or a heavier tail bring more, and `tltlab compare --systems` computes it for your lengths.
