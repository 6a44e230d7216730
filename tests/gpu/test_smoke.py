"""One GPU, everything: the seam beside stock vLLM, and a recipe with weight sync and a drafter swapped in."""

import json
import statistics
import time

import pytest

from bench import gpu
from tltlab.runtime.engine.graphs import GIB
from tltlab.traces.trace import read

from .conftest import run_tltlab

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.usefixtures("vllm_on_cuda")]

WITHIN_S = 600


def test_the_seam_costs_less_than_a_tenth(model):
    """At batch 256, beside stock vLLM."""
    rates = {}
    modes = ("stock, synchronous, one process", "policy none")
    for mode in modes:
        arguments = {"model": str(model), "batches": [256], "rounds": 3, "tokens": 128, "kv_bytes": GIB, "mode": mode}
        row = gpu._alone("seam", arguments, {})
        assert "failed" not in row, row
        rates[mode] = row["tokens_per_s"]["256"]
    stock, ours = (statistics.median(rates[mode]) for mode in modes)
    assert ours > 0.9 * stock


def test_the_smoke_recipe_runs_its_first_steps(model, tmp_path):
    begun, run = time.monotonic(), tmp_path / "run"
    overrides = [f"model={model}", *(f"data.{name}={model / name}.jsonl" for name in ("train", "heldout"))]
    run_tltlab("train", "gpu_smoke", *overrides, "--out", str(run))
    assert time.monotonic() - begun < WITHIN_S
    summary = json.loads((run / "summary.json").read_text())
    assert summary["grpo_steps"] == 2
    assert summary["drafter"]["swaps"] >= 1
    iterations = read(run / "trace").iterations
    assert iterations["num_accepted"].sum() > 0, "nothing was ever drafted and kept"
    assert iterations["next_draft_depth"].nunique() > 1, "drafts of one depth only"
