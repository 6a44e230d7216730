"""The longest response and the makespan of another RL step: medians, intervals, and how often they hold."""

import json
import math

import numpy as np
import pytest

from tltlab.lengths.fit import Longest, longest, makespan, outlook, step_score
from tltlab.lengths.generate import generate
from tltlab.lengths.model import REGIMES, LengthModel, ParetoTail

LAW = LengthModel(
    quantiles=((0.1, 150), (0.5, 500), (0.9, 1100), (0.99, 4000)), prompt_share=0.0, max_response_tokens=10**6
)


def maxima(law, steps=400, prompts=64, group=8, seed=0):
    trace = generate(law, num_rl_steps=steps, prompts_per_step=prompts, group_size=group, seed=seed)
    return trace.outcomes.groupby("rl_step")["response_tokens"].max().to_numpy()


def test_a_law_predicts_its_own_maxima():
    found, drawn = longest(LAW, 512), maxima(LAW)
    for end, level in ((found.low, 0.05), (found.median, 0.5), (found.high, 0.95)):
        assert (drawn < end).mean() == pytest.approx(level, abs=0.05)


def test_scores_of_maxima_are_standard_normal():
    scores = np.array([step_score(LAW, tokens, 512) for tokens in maxima(LAW).tolist()])
    assert scores.mean() == pytest.approx(0, abs=0.15)
    assert scores.std() == pytest.approx(1, abs=0.12)


def test_steps_that_vary_more_than_law_widen_interval():
    plain, steady, wild = (
        longest(LAW.model_copy(update={"step_scores": scores}), 512)
        for scores in ((), (0.5, -0.5, 0.8, -0.8, 1.2, -1.2) * 4, (3.0, -3.0, 2.0, -2.0, 3.0, -3.0))
    )
    assert math.log(steady.high / steady.low) == pytest.approx(math.log(plain.high / plain.low), rel=0.15)
    assert wild.low < steady.low < steady.high < wild.high
    one = longest(LAW.model_copy(update={"step_scores": (0.0,)}), 512)
    assert one.low < steady.low < steady.high < one.high


def test_the_error_of_the_shape_widens_the_interval():
    known, unsure = (
        longest(LAW.model_copy(update={"tail": ParetoTail(scale=1500, shape=0.3, shape_error=error)}), 512)
        for error in (0.0, 0.3)
    )
    assert unsure.median == known.median
    assert unsure.low < known.low < known.high < unsure.high


def test_no_end_is_beyond_the_cap():
    found = longest(LAW.with_changes(max_response_tokens=9000), 512)
    assert found.low < found.median <= found.high <= 9000
    assert longest(LAW.with_changes(max_response_tokens=9000), 4096).high == pytest.approx(9000)


def test_intervals_hold_another_step_drawn():
    hits = []
    for seed in range(24):
        lengths = maxima(LAW, steps=1, seed=1000 + seed)
        seen = generate(LAW, num_rl_steps=4, prompts_per_step=64, group_size=8, seed=seed)
        found = outlook(seen).longest
        assert found.num_steps == 4
        hits.append(found.low <= lengths[0] <= found.high)
    assert np.mean(hits) >= 0.8


def timed(trace, workers=2):
    """The trace with ends of 5 s and 10 ms a token."""
    outcomes = trace.outcomes
    outcomes = outcomes.assign(t_submit=0.0, t_finish=5.0 + 0.01 * outcomes["response_tokens"], worker=0)
    return trace.replace(outcomes=outcomes)


def test_the_makespan_follows_the_longest_response():
    trace = timed(generate(LAW, num_rl_steps=4, prompts_per_step=16, group_size=8))
    found = outlook(trace)
    for end in ("median", "low", "high"):
        assert getattr(found.makespan, end) == pytest.approx(5 + 0.01 * getattr(found.longest, end))
    assert outlook(generate(LAW, num_rl_steps=4, prompts_per_step=16, group_size=8)).makespan is None


def test_steps_of_other_work_widen_the_makespan():
    ahead = Longest(num_responses=2, num_steps=2, level=0.9, median=300.0, low=200.0, high=500.0)
    tokens = np.array([100.0, 200.0])
    same, other = (
        [(tokens, 0.01 * tokens + first, 2.0 + first) for first in starts] for starts in ((4.0, 4.0), (2.0, 6.0))
    )
    steady, varied = makespan(same, ahead), makespan(other, ahead)
    assert (steady.low, steady.median, steady.high) == pytest.approx((6.0, 7.0, 9.0))
    assert varied.low < steady.low < steady.high < varied.high
    assert makespan([(tokens, 9.0 - 0.01 * tokens, 8.0)], ahead) is None
    assert makespan([], ahead) is None


def test_the_commands_print_another_step(command, tmp_path):
    code, text, _ = command("trace", "generate", "--prompts", 16, "--out", tmp_path / "t", "--json")
    assert code == 0
    assert json.loads(text)["longest"]["num_responses"] == 128
    timed(generate(REGIMES["base-rl"], num_rl_steps=3, prompts_per_step=20, group_size=8)).write(tmp_path / "timed")
    described = json.loads(command("trace", "describe", tmp_path / "timed", "--json")[1])
    for name in ("longest", "makespan"):
        assert described[name]["low"] < described[name]["median"] < described[name]["high"]
        assert described[name]["num_steps"] == 3
