"""Shipped engine profiles against whole runs and against times of another kind: a load test, and GPU time alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from tltlab.costs.load import load_costs
from tltlab.costs.roofline import RooflineCosts
from tltlab.sim.simulate import simulate
from tltlab.strategy import NO_SPECULATION
from traces_of_lengths import of_samples

from .measurements import ERRORS, error_row, measured_table

_BATCHED_TOKENS = 2048


def rows(data: Path) -> pd.DataFrame:
    """Both; ConfigError where a file is missing.

    Neither is unseen: the load test's seconds without prompts and the GPU times are in the fit of the profiles.
    """
    return pd.DataFrame([*_load_test(data), *_gpu_time(data)], columns=list(ERRORS))


def _gpu_time(data: Path) -> Iterator[tuple[object, ...]]:
    """Plain iterations of EfficientRollout on an A100, timed on the GPU: an engine's times have the host's in them."""
    took = measured_table(data / "step_times_a100_qwen2.5_7b.csv", ("batch", "seq", "median_ms"), ("mode",))
    # Above 512 tokens contexts are nominal.
    took = took[(took["mode"] == "target_decode") & took["seq"].between(1, 512)]
    shipped = load_costs("vllm:A100:Qwen2.5-7B")
    assert isinstance(shipped, RooflineCosts)
    on_gpu = shipped.constants.model_copy(update={"step_s": 0.0, "per_request_s": 0.0})
    for what, constants in (("host terms", shipped.constants), ("no host terms", on_gpu)):
        iteration = shipped.model_copy(update={"constants": constants}).iteration(NO_SPECULATION)
        predicted = [iteration.seconds(int(b), b * s) for b, s in took[["batch", "seq"]].to_numpy(np.float64)]
        error = np.asarray(predicted) / (took["median_ms"].to_numpy(np.float64) * 1e-3) - 1
        note = f"bias {np.median(error):+.1%}"
        yield error_row(
            "EfficientRollout, Qwen2.5-7B, A100, GPU time", f"plain iteration of vllm's profile, {what}: {note}", True,
            error, note,
        )  # fmt: skip


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
