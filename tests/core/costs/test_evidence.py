"""What speaks for a prediction: distances, errors to expect, and whether intervals hold as often as they say."""

import json
from math import expm1, hypot, log1p, sqrt

import numpy as np
import pytest

from tltlab.calibration.cross_validation import error_quantiles
from tltlab.costs.evidence import GOODPUT, LEVEL, Evidence, interval
from tltlab.costs.load import load_costs, presets

LEFT_OUT = {
    "model": (0.05, 0.1), "gpu": (0.1, 0.2), "engine": (0.2, 0.4),
    "model, speculating": (0.02, 0.05), "gpu, speculating": (0.1, 0.3), "engine, speculating": (0.3, 0.6),
}  # fmt: skip


def evidence(*unmeasured, **change):
    return Evidence(engine="mine", unmeasured=unmeasured, left_out=LEFT_OUT, draft_depth=(2, 5), **change)


def added(*errors):
    """Independent errors as one: factors' logarithms add up in squares."""
    return pytest.approx(expm1(hypot(*map(log1p, errors))), abs=1e-6)


def test_errors_grow_with_what_was_not_measured():
    assert evidence("model").error() == pytest.approx(0.1)
    assert evidence("gpu", "model").error() == added(0.1, 0.2)
    assert evidence("gpu", "model", "weights").error() == added(0.1, 0.2, 0.4)
    assert evidence("model").error(speculates=True) == added(0.1, 0.05)
    assert evidence("model", drafting_unmeasured=("gpu",)).speedup_error() == pytest.approx(0.3)
    assert evidence("model", speculation=False).speedup_error() is None
    served = evidence("model").model_copy(update={"left_out": LEFT_OUT | {f"model{GOODPUT}": (0.02, 0.04)}})
    assert served.speedup_error() == pytest.approx(0.04)
    assert served.error(speculates=True) == added(0.1, 0.05)


def test_interpolated_lies_between_measured_together_and_never_measured():
    fitted = {"all": (0.01, 0.03), "all, speculating": (0.02, 0.04)}
    together, apart, never = (evidence(*gaps, fitted=fitted) for gaps in ((), ("together",), ("engine",)))
    assert (together.error(), never.error()) == (0.03, pytest.approx(0.4))
    assert log1p(apart.error()) == pytest.approx(sqrt(log1p(0.03) * log1p(0.4)), rel=1e-4)
    assert together.error(extrapolated=True) == pytest.approx(0.4)
    assert together.error(speculates=True) == added(0.03, 0.04)
    assert together.beyond([0, 2, 5]) == []
    assert together.beyond([3, 8]) == ["draft depth"]
    assert evidence(speculation=False).beyond([3]) == ["speculation"]


def test_speculations_distance_is_its_farther_parts():
    one = evidence(drafting_unmeasured=("model",), fitted={"all": (0.01, 0.03)})
    assert one.distance_of() == "measured together"
    assert one.distance_of(beyond=["batch"]) == one.distance_of(speculates=True) == "never measured"
    assert all(fact in one.describe() for fact in ("measured together", "mine", "3%"))
    assert all(fact in one.describe(speculates=True) for fact in ("never measured", "speculation", "model"))
    assert all(fact in one.describe(beyond=["draft depth"]) for fact in ("never measured", "draft depth", "40%"))


@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Qwen3-30B-A3B"])
def test_errors_of_profiles_widen_with_distance(model):
    names = [f"sglang:H200:{model}", f"sglang:H100:{model}", f"sglang:A100:{model}", f"sglang:A100:{model}:int4"]
    found = [load_costs(name).evidence for name in names]
    for error in ([one.error() for one in found], [one.speedup_error() for one in found]):
        assert error == sorted(error)
    assert len({one.error() for one in found}) == 4


def test_an_interval_is_a_factor_either_way():
    assert interval(10.0, 0.25) == (8.0, 12.5)
    assert interval(10.0, 3.0) == (2.5, 40.0)
    assert interval(10.0, None) is None
    assert Evidence(engine="mine").interval(10.0) is None
    assert error_quantiles(np.array([-0.5])) == error_quantiles(np.array([1.0]))


def test_error_quantiles_are_exceeded_at_their_rate():
    rng = np.random.default_rng(0)
    for num in (3, 12, 40):
        sample = rng.normal(0.0, 0.1, (2000, num + 1))
        held = np.mean([abs(row[-1]) <= log1p(error_quantiles(np.expm1(row[:-1]))[1]) for row in sample])
        assert held == pytest.approx(LEVEL, abs=0.035)


def test_every_preset_names_its_evidence():
    found = {name: load_costs(name).evidence for name in presets()}
    assert all(one.error(speculates=True) is not None for one in found.values())
    gpus = {name: one.parameter for name, one in found.items() if one.engine.startswith("vLLM")}
    assert len(gpus) == 10
    assert all(0.01 < each.get(kind, 0.0) < 0.3 for each in gpus.values() for kind in ("all", "all, speculating"))
    # The data are of 32B on several GPUs, so they say the least of how a smaller model on one of them launches.
    assert gpus["h100-qwen2.5-7b"]["all"] > 10 * gpus["h100-qwen2.5-32b-tp4"]["all"]
    assert found["h100-qwen2.5-32b-tp4"].distance == "measured together"
    assert found["h200-llama-3.3-70b-tp4"].unmeasured == ("gpu", "model")
    assert found["h100-qwen2.5-32b-tp4"].error() < found["h100-qwen2.5-7b"].error()
    assert json.loads(json.dumps(found["cpu-small"].to_json()))["distance"] == "measured together"


def test_a_block_drafter_is_beyond_every_measurement():
    evidence = load_costs("sglang:H200:Qwen3-8B").evidence
    assert evidence is not None
    assert evidence.draft_depth is not None
    depth = int(evidence.draft_depth[0])
    assert (evidence.beyond([depth]), evidence.beyond([depth], blocks=True)) == ([], ["block drafts"])
    assert evidence.error(speculates=True, extrapolated=True) >= evidence.error(speculates=True)
