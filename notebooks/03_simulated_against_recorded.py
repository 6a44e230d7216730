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
# # 3. How well is a rollout predicted that nothing was fitted to?
#
# A simulator that was fitted to a recording and then reproduces it has proved little. So each RL step is predicted by
# costs and acceptance that were fitted to the *others*. The recording is from one H200 at the shape of a 7B model, two
# RL steps under each of three policies.

# %%
from pathlib import Path

from IPython.display import display

from tltlab.charts import bars
from tltlab.sim import verify

root = next(folder for folder in [Path.cwd(), *Path.cwd().parents] if (folder / "traces").is_dir())
checked = verify(root / "traces" / "h200-rehearsal")
rows = checked.rows
display(rows[["rl_step", "measured_s", "predicted_s", "error", "step_time_ratio"]].round(3))

# %%
names = [f"RL step {step}, {what}" for step in rows["rl_step"] for what in ("measured", "predicted")]
seconds = rows[["measured_s", "predicted_s"]].to_numpy().ravel().tolist()
bars(
    names,
    seconds,
    measured=[True, False] * len(rows),
    xlabel="seconds of a rollout",
    title="one H200, shape of a 7B model",
)

# %%
print(f"median error {checked.median_error:.1%}, worst {checked.worst_error:.1%}")
small = verify(root / "traces" / "subset-sum-small")
known = small.median_error_at_step_time
print(f"a CPU that others used too: median {small.median_error:.1%}; had its speed been known, {known:.1%}")

# %% [markdown]
# **On a machine that keeps its speed, rollouts are predicted within a few percent; where the machine itself drifts
# (`step_time_ratio`: how much longer an iteration took than the others had taught), no fit to other RL steps can
# know.** For your own run: `tltlab verify RUN`, and `tltlab verify RUN --policies default` asks the harder question,
# whether policies are ranked as your machine ranks them.
