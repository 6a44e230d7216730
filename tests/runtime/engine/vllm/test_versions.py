"""What the adapter touches in vLLM: asked of the one that is installed, and read in its sources."""

import json
import logging
import re
from importlib.metadata import version
from pathlib import Path
from typing import get_args

from tltlab.runtime.engine import vllm as adapter
from tltlab.runtime.engine.vllm import (
    CAPABILITIES,
    VERSIONS,
    cpu_head_sizes,
    dtypes,
    lacks,
    missing,
    plugin,
)

from .versions import Sources, has_each, table


def test_the_vllm_that_runs_its_sources_and_table_agree():
    installed = Sources.installed()
    assert installed is not None
    for name in CAPABILITIES:
        assert lacks(name) == installed.lacks(name), name
    versions = json.loads(VERSIONS.read_text())
    assert versions[installed.version()] == {"torch": installed.torch(), "has": has_each(installed)}


def test_vllms_own_command_finds_its_package():
    """`vllm serve` asks for metadata by this name, and the CPU build has another: `.ci/setup` writes them."""
    if (sources := Sources.installed()) is not None:
        assert version("vllm").partition("+")[0] == sources.version()


def test_the_readme_has_the_table_of_versions():
    versions = json.loads(VERSIONS.read_text())
    assert all(row["has"].keys() == CAPABILITIES.keys() for row in versions.values()), "write it anew from wheels"
    assert table(versions) in (Path(adapter.__file__).parents[2] / "README.md").read_text()


def test_head_sizes_and_types_are_read_as_vllm_has_them():
    from vllm.config.model import ModelDType
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert cpu_head_sizes() == CPUAttentionBackend.get_supported_head_sizes()
    assert dtypes() == list(get_args(ModelDType))


def test_what_the_adapter_asks_for_is_in_the_table():
    asked = set(plugin._CHANGES)
    for path in Path(adapter.__file__).parent.glob("*.py"):
        asked.update(re.findall(r'missing\("([^"]+)"', path.read_text()))
    assert {"policies", "weight versions", "depths in the V2 runner"} <= asked <= CAPABILITIES.keys()


def test_the_plugin_leaves_out_what_vllm_lacks(monkeypatch, caplog):
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
