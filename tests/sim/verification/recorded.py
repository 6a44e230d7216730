"""Simulations written as the RUN that would have recorded them, so that `verify` can be held against a known truth."""

import json
from collections.abc import Mapping

import pandas as pd

from tltlab.policies.policy import load_policy
from tltlab.traces.trace import Trace


def record(
    out,
    made,
    policies,
    planner=None,
    **tables,
):
    """Write the RUN `out` of one simulation, or several of other RL steps; `tables` replace what they have.

    `policies` are those in force from an RL step on: a shipped one has its own name, any other is "ours".
    `planner` is what policies.json has of one.
    """
    parts = [made] if isinstance(made, Trace) else list(made)
    whole = {
        name: pd.concat([part.table(name) for part in parts], ignore_index=True)
        for name in ("workload", "outcomes", "steps", "spans", "iterations")
    } | tables
    since = policies if isinstance(policies, Mapping) else {0: policies}
    names = {step: policy if isinstance(policy, str) else "ours" for step, policy in since.items()}
    whole["steps"]["policy"] = whole["steps"]["rl_step"].map(names).ffill()
    manifest = parts[0].manifest.model_copy(update={"kind": "recorded", "num_rl_steps": None})
    Trace.from_tables(manifest, whole).write(out / "trace")
    entries = [
        {"rl_step": step, "name": names[step], "policy": load_policy(policy).model_dump(mode="json")}
        for step, policy in since.items()
    ]
    (out / "policies.json").write_text(json.dumps({"seed": 0, "policies": entries, "planner": planner}))
    return out
