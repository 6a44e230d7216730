"""Noise of iteration times in the simulator: common to all policies, gone in fluid mode, and never in the mean."""

import numpy as np
import pytest

from bench.simulator import COSTS
from tltlab.costs.noise import Block, IterationNoise
from tltlab.lengths.generate import log_normal
from tltlab.sim import simulate
from tltlab.sim.engine.random_numbers import NoiseDraws

from ..workloads import with_terms

TRACE = log_normal(prompts=6, group_size=4, rl_steps=2, median=150, cap=1000, workers=2)
NOISE = IterationNoise(ratios=(0.5, 0.75, 1.0, 1.75), blocks=(Block(iterations=16, share=0.6),))
NOISY = with_terms(COSTS, noise=NOISE)
OPTIONS = {"acceptance": "geometric:0.7", "mode": "sampled"}


def test_draws_have_fitted_distribution_and_last_as_long():
    drawn = np.stack([NoiseDraws(NOISE, 1, step, 0).between(0, 4_000) for step in range(20)])
    assert drawn.mean() == pytest.approx(1.0, abs=0.02)
    assert [float((drawn == ratio).mean()) for ratio in NOISE.ratios] == pytest.approx([0.25] * 4, abs=0.02)
    near = np.corrcoef(drawn[:, 1:].ravel(), drawn[:, :-1].ravel())[0, 1]
    far = np.corrcoef(drawn[:, 20:].ravel(), drawn[:, :-20].ravel())[0, 1]
    assert near > 0.35
    assert abs(far) < 0.03


def test_a_draw_does_not_depend_on_earlier_ones():
    whole, pieces = NoiseDraws(NOISE, 0, 0, 1), NoiseDraws(NOISE, 0, 0, 1)
    parts = [pieces.between(first, 7) for first in range(0, 2100, 7)]
    assert np.concatenate(parts).tolist() == whole.between(0, 2100).tolist()
    assert pieces.mean(3, 2000) == pytest.approx(whole.between(3, 2000).mean())
    assert NoiseDraws(NOISE, 0, 0, 0).between(0, 50).tolist() != whole.between(0, 50).tolist()


@pytest.mark.parametrize("policy", ["none", "fixed", "table"])
def test_iterations_take_the_noise_of_their_number(policy):
    plain = simulate(TRACE, policy, costs=COSTS, record_iterations=True, **OPTIONS).trace.iterations
    result = simulate(TRACE, policy, costs=NOISY, record_iterations=True, **OPTIONS)
    noisy = result.trace.iterations
    sums = noisy.groupby(["rl_step", "worker"])["duration"].sum()
    assert sums.tolist() == pytest.approx([end for rollout in result.rollouts for end in rollout.worker_end_s])
    for (step, worker), rows in noisy[noisy["draft_depth"] == 0].groupby(["rl_step", "worker"]):
        before = plain.loc[rows.index]
        clean = (rows["prefill_tokens"] == 0) & (rows["next_draft_depth"] == 0)
        met = NoiseDraws(NOISE, 0, step, worker).between(0, int(rows["iteration"].max()) + 1)[rows["iteration"]]
        found = (rows["duration"] / before["duration"])[clean]
        # A macro-step's iterations share the mean of their noise: they grow a little while it lasts.
        assert found.to_numpy() == pytest.approx(met[clean.to_numpy()], rel=5e-3)


def test_fluid_mode_has_no_noise():
    for policy in ("none", "table", "beg-mab"):
        noisy = simulate(TRACE, policy, costs=NOISY, acceptance="geometric:0.7").makespan_s
        assert noisy == simulate(TRACE, policy, costs=COSTS, acceptance="geometric:0.7").makespan_s
