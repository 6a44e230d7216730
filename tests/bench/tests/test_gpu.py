"""`tltlab bench gpu`: its rows are kept as they come, and its parts run on whatever device there is."""

import json
import re

import pytest

from bench import gpu
from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.runtime.engine.vllm import starting, uncompiled


def measured(part, model, out=None, **options):
    settings = {
        "batches": [2],
        "rounds": 1,
        "tokens": 8,
        "kv_bytes": 64 << 20,
        "progress": lambda message: None,
    } | options
    return gpu.bench_gpu(part, model, out=out, **settings)


def test_shape_is_what_transformers_reads_as_that_model(tmp_path):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(gpu.shape("Qwen2.5-1.5B", tmp_path / "shape", layers=2))
    assert (config.hidden_size, config.num_hidden_layers, config.num_key_value_heads) == (1536, 2, 2)


def test_model_that_is_not_there_is_one_sentence(tmp_path):
    with refused(ConfigError, naming=("config.json",)):
        measured("seam", tmp_path)


def test_rows_are_in_file_before_next_engine_starts(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    out, lengths = tmp_path / "rows.json", []

    def engine(part, arguments, environment):
        lengths.append(len(json.loads(out.read_text())["rows"]) if out.exists() else 0)
        return {"failed": "Traceback\nOut of memory"} if len(lengths) == 1 else {"seconds": 1.0, "tokens_per_s": {}}

    monkeypatch.setattr(gpu, "_alone", lambda *arguments: engine(*arguments) | {"seconds": 1.0})
    found = measured("seam", tmp_path, out)
    assert lengths == list(range(len(gpu.SEAM_MODES)))
    assert re.search(r"stock, synchronous, one process .* Out of memory", gpu.text(found))


def test_a_failed_engine_reports_from_its_process():
    row = gpu._alone("seam", {"mode": "stock"}, {})
    assert "missing 5 required positional arguments" in row["failed"]
    assert row["seconds"] > 0


@pytest.mark.engine
def test_engines_measure_the_seam_of_stock_and_policy(random_model, monkeypatch):
    monkeypatch.setattr(gpu, "SEAM_MODES", gpu.SEAM_MODES[:2])
    # In this process and uncompiled: on a CPU either would else take most of a minute.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setattr(gpu, "_WITHOUT_WEIGHTS", gpu._WITHOUT_WEIGHTS | {"enforce_eager": True})
    monkeypatch.setattr(gpu, "_alone", lambda part, arguments, environment: gpu._seam(**arguments) | {"seconds": 1.0})
    with starting(), uncompiled(True):
        rows = measured("seam", random_model)["rows"]
    assert [row["mode"] for row in rows] == list(gpu.SEAM_MODES)
    assert all(rate > 0 for row in rows for rate in row["tokens_per_s"][2])
