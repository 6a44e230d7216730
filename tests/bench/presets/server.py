"""Shipped engine profiles against a whole run: a load test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from tltlab.costs.load import load_costs
from tltlab.sim.simulate import simulate
from traces_of_lengths import of_samples

from .measurements import ERRORS, error_row, measured_table

_BATCHED_TOKENS = 2048


def rows(data: Path) -> pd.DataFrame:
    """Errors of the makespan, not unseen: seconds without prompts are in the fit. ConfigError for a missing file."""
    return pd.DataFrame(_load_test(data), columns=list(ERRORS))


def _load_test(data: Path) -> Iterator[tuple[object, ...]]:
    """Errors of the makespan with preempted requests prefilled again, and with what is left of them in the cache.

    300 requests, of which a tenth fits into the KV cache, arrived within 29 s and are simulated as if at once.
    """
    columns = ("input_toks", "output_toks", "queued_ts", "last_token_ts")
    requests = measured_table(data / "requests_rtx4090_llama_8b.csv", columns).sort_values("queued_ts")
    measured_s = float(requests["last_token_ts"].max() - requests["queued_ts"].min())
    costs = load_costs("vllm:RTX4090:Llama-3.1-8B").model_copy(update={"max_num_batched_tokens": _BATCHED_TOKENS})
    lengths, prompts = requests["output_toks"], requests["input_toks"]
    ids = [f"p{at}" for at in range(len(requests))]
    trace = of_samples(lengths, int(lengths.max()), prompt_id=ids, sample=0, prompt_tokens=prompts)
    for kept in (False, True):
        summary = simulate(trace, costs=costs, workers=1, prefix_caching=kept).summary
        error = abs(summary["makespan_s"] / measured_s - 1)
        what = "makespan of 300 requests, " + ("prefix caching" if kept else "preempted ones prefilled again")
        note = f"{summary['makespan_s']:.1f} s for {measured_s:.1f} s, {summary['prefilled_tokens']} tokens prefilled"
        yield error_row("vLLM 0.19, Llama-3.1-8B, RTX4090", f"{what}: {note}", True, np.array([error]), note)
