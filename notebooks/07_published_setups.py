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
# # 7. What does TLT bring in its published set-ups?
#
# TLT's paper has RL steps 1.7 to 2.1 times as fast as VeRL's. Its scripts give every worker 256 responses of up to 32K
# tokens: a 7B model on 8 GPUs, a 32B model on 64. What does the simulator predict for them, on H100 and on A100?
# Nothing below was fitted to the paper.

# %%
import pandas as pd
from IPython.display import display

import tltlab
from tltlab.charts import bars
from tltlab.lengths.generate import generate
from tltlab.lengths.model import of_regime
from tltlab.planning.claims import CLAIMS

SETUPS = {"7B": ("Qwen2.5-7B", 2, 4), "32B": ("Qwen2.5-32B", 8, 8)}  # the model, workers, GPUs of each
RL_STEPS, LOAD, CAP = 4, 256, 32_768
PUBLISHED = "learned=tlt-qwen2.5-32b-fresh,all=seer-siblings"  # curves of TLT's and Seer's papers
lengths = of_regime("reasoning").with_changes(median=0.18 * CAP, max_response_tokens=CAP)

# %% [markdown]
# The lengths are those of reasoning models, an **assumption**: one response in fifty reaches the limit. Log-probs,
# training and weight sync follow from FLOPs, and grading takes no time. `low` to `high` is the 95 % interval over RL
# steps, without the errors of costs and acceptance.

# %%
rows = []
for name, (model, workers, tp) in SETUPS.items():
    load = {"num_rl_steps": RL_STEPS, "prompts_per_step": workers * LOAD // 8, "group_size": 8, "num_workers": workers}
    found = tltlab.compare(
        generate(lengths, **load), systems="verl,open-r1,tlt-base,tlt", model=model, tp=tp,
        gpus=[f"{workers * tp}xH100", f"{workers * tp}xA100"], decision_block=CAP // 256, acceptance=PUBLISHED,
    )  # fmt: skip
    rows.append(found.assign(setting=name + ", " + found["gpus"]))
table = pd.concat(rows, ignore_index=True)
names = {"step_speed_up": "speed-up", "step_speed_up_low": "low", "step_speed_up_high": "high", "speed_up": "rollout"}
table = table.rename(columns=names)[["setting", "title", *names.values(), "rollout_share", "step_s"]]
display(table.round(2))

# %%
tlt, claim = table[table["title"] == "TLT"], CLAIMS["tlt"]
names = [*tlt["setting"], "the paper, least", "the paper, most"]
values = [*tlt["speed-up"], claim.least, claim.most]
low, high = ([*tlt[end], None, None] for end in ("low", "high"))
measured = [False] * len(tlt) + [True, True]
bars(
    names,
    values,
    low,
    high,
    measured=measured,
    xlabel="RL step, times as fast as VeRL's",
    reference=1.0,
    title="TLT: simulated, and reported",
)

# %% [markdown]
# **With 256 responses on every worker less than the paper reports: a worker decodes plainly until 32 of them are left,
# and then only does TLT speculate.** Fewer responses a worker or a heavier tail bring more; `tltlab compare --systems`
# computes it for your lengths.
