"""What the adapter touches in vLLM: asked of the one that is installed, and told by version."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import get_args

import pytest

from tltlab.runtime.engine.vllm import capabilities, plugin
from tltlab.runtime.engine.vllm.capabilities import CAPABILITIES, by_version, cpu_head_sizes, dtypes, lacks, missing

ADAPTER = Path(capabilities.__file__).parent


def test_a_version_in_the_table_is_told_what_goes_without_and_another_one_nothing():
    told = by_version("0.29.0+cpu")
    assert told.keys() == CAPABILITIES.keys()
    assert told["policies"] == ""
    assert told["graph counters"] == "traces do not say which CUDA graphs of the V2 model runner ran"
    assert by_version("0.1.0") == {}


def test_head_sizes_and_types_are_read_as_vllm_has_them():
    from vllm.config.model import ModelDType
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert cpu_head_sizes() == CPUAttentionBackend.get_supported_head_sizes()
    assert dtypes() == list(get_args(ModelDType))


def test_what_the_adapter_asks_for_is_in_the_table():
    asked = set(plugin._CHANGES)
    for path in ADAPTER.glob("*.py"):
        asked.update(re.findall(r'missing\("([^"]+)"', path.read_text()))
    assert {"policies", "weight versions", "depths in the V2 runner"} <= asked <= CAPABILITIES.keys()


def test_the_plugin_leaves_out_what_vllm_has_no_room_for_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    from vllm.v1.engine.utils import CoreEngineProcManager
    from vllm.v1.sample.ops import topk_topp_sampler

    plugin.register()
    monkeypatch.delattr(CoreEngineProcManager, "shutdown")
    monkeypatch.delattr(topk_topp_sampler, "apply_top_k_only")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    lacks.cache_clear()
    try:
        plugin.register()
        said = [record.getMessage() for record in caplog.records]
        assert [text for text in said if "CoreEngineProcManager.shutdown" in text and "trace repair" in text]
        assert [text for text in said if "apply_top_k_only" in text and "top-p" in text]
        assert "CoreEngineProcManager.shutdown" in missing("traces of servers")
        assert not missing("policies")
    finally:
        lacks.cache_clear()
