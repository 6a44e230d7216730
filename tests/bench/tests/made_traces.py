"""Traces of made-up rows."""

import pandas as pd

from tltlab.traces.schema import TABLES
from tltlab.traces.trace import Manifest, Trace


def trace_of(num_workers=2, **tables):
    """A trace of some tables' rows; columns that a row leaves out are 0, or unknown where they may be."""
    steps = sorted({row["rl_step"] for rows in tables.values() for row in rows})
    key = [{"rl_step": step, "prompt_id": "p", "sample": 0, "turn": 0} for step in steps]
    tables = {
        "workload": [k | {"epoch": 0, "prompt_tokens": 3, "max_response_tokens": 9, "policy_version": 0} for k in key],
        "outcomes": [k | {"response_tokens": 6, "finish_reason": "stop"} for k in key],
        **tables,
    }
    frames = {}
    for name, rows in tables.items():
        schema = TABLES[name]
        empty = {f.name: None if f.nullable else 0 for f in schema}
        frames[name] = pd.DataFrame([empty | row for row in rows], columns=schema.names)
    return Trace.from_tables(Manifest(kind="recorded", num_workers=num_workers), frames)
