"""The scatter of iteration times around a cost model."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from tests.refused import refused
from tltlab.calibration.api import calibrate
from tltlab.costs.load import load_costs
from tltlab.costs.noise import Block, IterationNoise, fit_noise
from tltlab.traces.trace import read


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_fit_finds_distribution_that_made_data(rng):
    model = rng.uniform(2e-3, 9e-3, 40_000)
    ratio = np.exp(0.3 * rng.standard_normal(len(model)) - 0.045)
    noise = fit_noise(model * ratio, model)
    assert np.mean(noise.ratios) == pytest.approx(1.0)
    assert noise.ratios == pytest.approx(_parts(ratio), rel=0.02)
    assert sum(block.share for block in noise.blocks) < 0.05


def test_the_fit_finds_how_long_an_excess_lasts(rng):
    lasting = np.repeat(rng.standard_normal(5_000), 16)
    scores = np.sqrt(0.7) * lasting + np.sqrt(0.3) * rng.standard_normal(len(lasting))
    noise = fit_noise(np.exp(0.2 * scores), np.ones(len(scores)), series=np.arange(len(scores)) // 800)
    assert dict(noise.components)[16] == pytest.approx(0.7, abs=0.08)
    assert sum(share for _, share in noise.components) == pytest.approx(1.0)


def test_rollout_that_ran_slow_throughout_is_no_noise():
    slow = np.repeat([1.0, 2.0], 400)
    assert fit_noise(slow, np.ones(800), series=np.repeat([0, 1], 400)) is None
    assert fit_noise(slow, np.ones(800)) is not None


def test_too_little_data_gives_no_noise(rng):
    assert fit_noise(rng.uniform(1, 2, 150), np.ones(150)) is None


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"ratios": (1.5, 0.5)}, ("ascend",)),
        ({"ratios": (1.0, 1.5)}, ("1",)),
        ({"ratios": (1.0,), "blocks": (Block(iterations=4, share=0.7), Block(iterations=16, share=0.7))}, ("more",)),
    ],
)
def test_what_is_no_noise_is_refused(fields, what):
    with refused(ValidationError, naming=what):
        IterationNoise.model_validate(fields)


def test_calibration_measures_it_and_costs_carry_it(tmp_path):
    costs = calibrate(read("traces/subset-sum-small").select(range(4))).costs
    assert 0.1 < costs.noise.spread < 0.5
    assert load_costs(costs.write(tmp_path / "costs.json")) == costs


def _parts(ratio):
    parts = np.array([part.mean() for part in np.array_split(np.sort(ratio), 100)])
    return (parts / parts.mean()).tolist()
