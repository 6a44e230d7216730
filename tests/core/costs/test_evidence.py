"""What speaks for a prediction: distances, errors to expect, and whether intervals hold as often as they say."""

import json
from math import hypot

import numpy as np
import pytest

from tltlab.calibration.cross_validation import most_errors
from tltlab.costs.evidence import LEVEL, Evidence, interval
from tltlab.costs.load import load_costs, presets
from tltlab.costs.profiles import profiles

LEFT_OUT = {
    "model": (0.05, 0.1), "gpu": (0.1, 0.2), "engine": (0.2, 0.4),
    "model, speculating": (0.02, 0.05), "gpu, speculating": (0.1, 0.3), "engine, speculating": (0.3, 0.6),
}  # fmt: skip


def evidence(*unmeasured: str, **change) -> Evidence:
    return Evidence(engine="mine", unmeasured=unmeasured, left_out=LEFT_OUT, draft_depth=(2, 5), **change)


def test_errors_grow_with_what_was_not_measured():
    assert evidence("model").error() == 0.1
    assert evidence("together").error() == 0.2
    assert evidence("gpu", "model").error() == pytest.approx(hypot(0.1, 0.2))
    assert evidence("gpu", "model", "weights").error() == pytest.approx(hypot(0.1, 0.2, 0.2))
    assert evidence("model").error(speculates=True) == pytest.approx(hypot(0.1, 0.05))
    assert evidence("model", speculation=False).speedup_error() == 0.6


def test_what_is_open_of_the_parameters_widens_every_error():
    one = evidence("model", parameter={"all": 0.24, "all, speculating": 0.12})
    assert one.error() == pytest.approx(0.26)
    assert one.speedup_error() == pytest.approx(0.13)
    assert one.model_copy(update={"unmeasured": (), "fitted": {"all": (0.01, 0.07)}}).error() == pytest.approx(0.25)


def test_measured_together_has_the_error_measured():
    near = evidence(fitted={"all": (0.01, 0.03), "all, speculating": (0.02, 0.04)})
    assert near.error() == 0.03
    assert near.error(speculates=True) == pytest.approx(0.05)
    assert near.error(extrapolated=True) == 0.2
    assert near.beyond([0, 2, 5]) == []
    assert near.beyond([3, 8]) == ["draft depth"]
    assert all(fact in near.says() for fact in ("measured together", "mine", "3%"))
    assert all(fact in near.says(beyond=["draft depth"]) for fact in ("never measured", "draft depth", "20%"))
    assert evidence(speculation=False).beyond([3]) == ["speculation"]


def test_a_measurement_met_by_chance_is_not_exact():
    (one,) = [m for m in profiles().engines["sglang-0.4"].measured if m.of("H100", "Qwen2.5-7B", "bf16")]
    _, most = one.fitted
    assert most < 0.01 < one.parameter
    assert load_costs("sglang-0.4:H100:Qwen2.5-7B").evidence.error() == pytest.approx(
        hypot(most, one.parameter), rel=0.01
    )
    # Files from before it was written.
    old = one.model_validate(one.model_dump(exclude={"parameter"}))
    assert old.parameter == 0.0


def test_an_interval_follows_from_the_error():
    assert interval(10.0, 0.25) == (8.0, pytest.approx(40 / 3))
    assert interval(10.0, 3.0) == (2.5, 40.0)
    assert interval(10.0, None) is None
    assert Evidence(engine="mine").interval(10.0) is None


def test_most_errors_are_exceeded_as_often_as_said():
    rng = np.random.default_rng(0)
    for num in (3, 12, 40):
        sample = rng.normal(0.0, 0.1, (2000, num + 1))
        held = np.mean([abs(row[-1]) <= most_errors(row[:-1])[1] for row in sample])
        assert held == pytest.approx(LEVEL, abs=0.035)


def test_every_preset_says_what_it_rests_on():
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
