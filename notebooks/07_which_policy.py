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
# # 7. Which policy, and why
#
# A question that the papers leave open: what is the least that is never worse than a fixed number of guessed tokens?
# Everything here is simulated, and small, so that it runs in seconds; `tltlab bench regimes` is the long version.

# %%
import sys
from pathlib import Path

import pandas as pd
from IPython.display import display

from tltlab.charts import bars

# %matplotlib inline

root = next(folder for folder in [Path.cwd(), *Path.cwd().parents] if (folder / "traces").is_dir())
sys.path.append(str(root / "tests"))

from bench.contest import by_part, judged, verdict  # noqa: E402
from bench.regimes import regimes  # noqa: E402

found = {regime.name: regime for regime in regimes(root / "traces", rl_steps=2)}
chosen = [found[name] for name in ("tiny", "h100-smoke", "gcd-small")]

# %% [markdown]
# ## The contest
#
# The yardstick is hard: the best fixed strategy *in hindsight*, chosen for each regime after all were tried on the
# same responses with common random numbers. Below 1 is faster. `oracle` knows costs and acceptance, as no real policy
# does.

# %%
rows = pd.DataFrame([row for regime in chosen for row in judged(regime, [0])])
table = rows.pivot(index="policy", columns="regime", values="ratio")
table["mean"] = table.mean(axis=1)
display(table.sort_values("mean").round(3))
print(verdict(rows))

# %% [markdown]
# A policy with a table or a cost file is only as good as that file. `adaptive` needs none: it learns the time of an
# iteration and the acceptance, and drafts for the most tokens per second. Learning has a price, which short rollouts
# show most.
#
# ## Where the time is lost
#
# Each rollout in three parts, by how many requests still run. A bar is the time above the oracle's, as a share of all
# of it, so a policy's bars add up to its regret.

# %%
lost = by_part(found["tiny"], ["adaptive", "goodput", "table by batch", "beg-mab published"], 0)
display(
    bars(
        [f"{row['policy']}, {row['part']}" for row in lost.to_dict("records")],
        lost["lost"].to_numpy(),
        xlabel="time lost against the oracle, share of the rollout (simulated)",
        title="regret by part of the rollout, tiny",
        reference=0.0,
    )
)
display(lost.pivot(index="policy", columns="part", values="lost").round(3))
