"""What people read where a file holds what it should not."""

import json

import pytest

from tests.refused import refused
from tltlab.acceptance.load import load_acceptance
from tltlab.costs.load import load_costs, load_stages
from tltlab.errors import ConfigError, TraceError
from tltlab.hardware import model, per_gpu_heads
from tltlab.lengths.model import LengthModel
from tltlab.policies.policy import load_policy
from tltlab.traces.schema import Contents

LONG = "x" * 10_000
ROOFLINE = load_costs("h100-qwen2.5-7b").model_dump(mode="json")
TABLE = load_costs("h100-qwen2.5-32b-tp4-table").model_dump(mode="json")
STAGES = {"kind": "roofline", "gpu": "H100", "model": "Qwen2.5-7B", "num_gpus": 8}
POLICY = {"format": "tltlab-policy", "version": 1, "selector": {"kind": "none"}}


def file(folder, value):
    path = folder / "manifest.json"
    path.write_text(json.dumps(value))
    return path


@pytest.mark.parametrize(
    ("load", "value", "says"),
    [
        (load_costs, {"kind": "linear", "base_s": LONG}, "base_s: "),
        (load_costs, {"kind": LONG}, "kind is 'xxx"),
        (load_costs, ROOFLINE | {"gpu": "H900"}, "unknown GPU 'H900'"),
        (load_costs, ROOFLINE | {"tp": 3}, "tp 3 does not divide the 28 heads of Qwen2.5-7B"),
        (load_costs, ROOFLINE | {"calibrated": {"batch": [64, 1]}}, "calibrated.batch: a range is (least, most)"),
        (load_costs, TABLE | {"roofline": {"gpu": "H900", "model": "Qwen2.5-7B"}}, "unknown GPU 'H900'"),
        (load_costs, TABLE | {"roofline": TABLE["roofline"] | {"tp": 3}}, "tp 3 does not divide the 40 heads"),
        (load_acceptance, {"alpha": 0.5}, "its 'kind' is missing"),
        (load_stages, STAGES | {"gpu": "H900"}, "unknown GPU 'H900'"),
        (load_stages, STAGES | {"num_gpus": LONG}, "num_gpus: "),
        (load_policy, POLICY | {"selector": {"kind": LONG}}, "selector: kind is 'xxx"),
        (LengthModel.load, {"format": "tltlab-lengths", "quantiles": LONG}, "quantiles: "),
        (lambda path: Contents.read(path.parent), {"format": "tltlab-trace", "version": 1, "kind": LONG}, "kind: "),
    ],
)
def test_a_bad_file_is_named_and_cut(tmp_path, load, value, says):
    path = file(tmp_path, value)
    with refused((ConfigError, TraceError), naming=(says,)) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert message.count(str(path)) == 1
    assert ": :" not in message
    assert len(message) < len(str(path)) + 600
    assert "Value error" not in message


@pytest.mark.parametrize(("tp", "heads"), [(28, (1, 1)), (4, (7, 1)), (3, None), (7, None), (0, None)])
def test_heads_are_shared_out_among_gpus_or_refused(tp, heads):
    if heads is None:
        with refused(ConfigError, naming=("tp", tp)):
            per_gpu_heads(model("Qwen2.5-7B"), tp)
    else:
        assert per_gpu_heads(model("Qwen2.5-7B"), tp) == heads
