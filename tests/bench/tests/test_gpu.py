"""`tltlab bench gpu`: its rows are kept as they come, and its parts run on whatever device there is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu
from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.runtime.engine.vllm import starting, uncompiled


def measured(part: str, model: Path, out: Path | None = None, **options: Any) -> dict[str, Any]:
    settings = {
        "batches": [2],
        "rounds": 1,
        "tokens": 8,
        "kv_bytes": 64 << 20,
        "progress": lambda message: None,
    } | options
    return gpu.bench_gpu(part, model, out=out, **settings)


def test_shape_is_what_transformers_reads_as_that_model(tmp_path: Path):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(gpu.shape("Qwen2.5-1.5B", tmp_path / "shape", layers=2))
    assert (config.hidden_size, config.num_hidden_layers, config.num_key_value_heads) == (1536, 2, 2)


def test_model_that_is_not_there_is_one_sentence(tmp_path: Path):
    with refused(ConfigError, naming=("config.json",)):
        measured("seam", tmp_path)


def test_rows_are_in_file_before_next_engine_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "config.json").write_text("{}")
    out, lengths = tmp_path / "rows.json", []

    def engine(part: str, arguments: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
        lengths.append(len(json.loads(out.read_text())["rows"]) if out.exists() else 0)
        return {"failed": "Traceback\nOut of memory"} if len(lengths) == 1 else {"seconds": 1.0, "tokens_per_s": {}}

    monkeypatch.setattr(gpu, "_alone", lambda *arguments: engine(*arguments) | {"seconds": 1.0})
    found = measured("seam", tmp_path, out)
    assert lengths == list(range(len(gpu.SEAM_MODES)))
    assert re.search(r"stock, synchronous, one process .* Out of memory", gpu.text(found))


def test_update_is_timed_with_deterministic_algorithms_and_without(random_model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu, "_alone", lambda part, arguments, environment: gpu._update(**arguments) | {"seconds": 1.0})
    found = measured("update", random_model)
    assert not torch.are_deterministic_algorithms_enabled()
    (row,) = found["rows"]
    assert len(row["plain_s"]) == len(row["deterministic_s"]) == found["rounds"]
    assert "times as long" in gpu.text(found)


def test_plain_steps_of_adaptive_and_plain_engines_compare():
    def engine(plan: str, runner: str, graphs: str, median_s: float) -> dict[str, Any]:
        cells = [{"batch": 8, "depth": depth, "median_s": median_s, "ran_in": {"full": 9}} for depth in (0, 4)]
        return {"plan": plan, "runner": runner, "graphs": graphs, "cells": cells, "memory": {}}

    rows = [
        engine("bucketed", "V1", "stock", 0.006),
        engine("bucketed", "V1", "planned", 0.0042),
        engine("no speculation", "V2", "planned", 0.004),
        {"plan": "bucketed", "runner": "V2", "graphs": "planned", "failed": "out of memory"},
    ]
    assert gpu.plain_steps(rows) == {
        8: {"bucketed, V1 stock": pytest.approx(1.5), "bucketed, V1 planned": pytest.approx(1.05)}
    }
    told = gpu.text({"part": "graphs", "model": "m", "hardware": "h", "rows": rows})
    assert re.search(r"bucketed, V1 stock +8 +0 +6\.00 .* 1\.50", told)


def test_a_failed_engine_reports_from_its_process():
    row = gpu._alone("seam", {"mode": "stock"}, {})
    assert "missing 5 required positional arguments" in row["failed"]
    assert row["seconds"] > 0


@pytest.mark.engine
def test_engines_measure_the_seam_of_stock_and_policy(random_model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu, "SEAM_MODES", gpu.SEAM_MODES[:2])
    # In this process and uncompiled: on a CPU either would else take most of a minute.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setattr(gpu, "_WITHOUT_WEIGHTS", gpu._WITHOUT_WEIGHTS | {"enforce_eager": True})
    monkeypatch.setattr(gpu, "_alone", lambda part, arguments, environment: gpu._seam(**arguments) | {"seconds": 1.0})
    with starting(), uncompiled(True):
        rows = measured("seam", random_model)["rows"]
    assert [row["mode"] for row in rows] == list(gpu.SEAM_MODES)
    assert all(rate > 0 for row in rows for rate in row["tokens_per_s"][2])


def test_what_one_gpu_did_is_shown():
    quick = json.loads((gpu.TRACE.parent / "h200-rehearsal" / "quick.json").read_text())
    shown = gpu.show(quick)
    assert re.search(r"Qwen2.5-7B +tltlab +synchronous +planned +rollout, adaptive +6.02 s, 6.36 s", shown)
    assert re.search(r"Qwen2.5-7B +stock +asynchronous .*4.85 at 1, 4.98 at 8, 5.31 at 64, 12.02 at 256", shown)
