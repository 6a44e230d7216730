"""A load test of one vLLM server against its simulation: 300 requests, more than its KV cache holds at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from tltlab.costs.load import load_costs
from tltlab.importers.length_table import tables_of_lengths
from tltlab.sim.simulate import simulate
from tltlab.traces.schema import Manifest
from tltlab.traces.trace import Trace

from .measurements import measured_table

_COLUMNS = ["source", "what", "n_points", "used_for_fit", "mean_abs_error", "max_abs_error", "note"]
_BATCHED_TOKENS = 2048


def rows(data: Path) -> pd.DataFrame:
    """Errors of the makespan with preempted requests prefilled again, and with what is left of them in the cache.

    Requests arrived within 29 s; they are simulated as if they had come at once. ConfigError where the file is missing.
    """
    columns = ("input_toks", "output_toks", "queued_ts", "last_token_ts")
    requests = measured_table(data / "requests_rtx4090_llama_8b.csv", columns).sort_values("queued_ts")
    measured_s = float(requests["last_token_ts"].max() - requests["queued_ts"].min())
    costs = load_costs("vllm:RTX4090:Llama-3.1-8B").model_copy(update={"max_num_batched_tokens": _BATCHED_TOKENS})
    found = []
    for kept in (False, True):
        summary = simulate(_trace(requests), costs=costs, prefix_caching=kept).summary
        error = abs(summary["makespan_s"] / measured_s - 1)
        what = "makespan of 300 requests, " + ("prefix caching" if kept else "preempted ones prefilled again")
        note = f"{summary['makespan_s']:.1f} s for {measured_s:.1f} s, {summary['prefilled_tokens']} tokens prefilled"
        found.append(("vLLM 0.19, Llama-3.1-8B, RTX4090", f"{what}: {note}", 1, False, error, error, note))
    return pd.DataFrame(found, columns=_COLUMNS)


def _trace(requests: pd.DataFrame) -> Trace:
    """One RL step of these requests, in order, to prompts of their own."""
    num = len(requests)
    key = pd.DataFrame({"rl_step": 0, "prompt_id": [f"p{at}" for at in range(num)], "sample": 0, "turn": 0})
    lengths, prompts = (requests[name].to_numpy(np.int64) for name in ("output_toks", "input_toks"))
    tables = tables_of_lengths(key, lengths, prompts, int(lengths.max()), np.zeros(num, bool))
    return Trace.from_tables(Manifest(kind="imported", num_workers=1, max_response_tokens=int(lengths.max())), tables)
