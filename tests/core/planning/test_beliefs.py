"""Beliefs about lengths: exact where the model is simple, equal to a slow oracle, right about their range."""

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refused import refused
from tests.traces_of_lengths import of_samples
from tltlab.errors import ConfigError
from tltlab.planning.beliefs import FEW, FEW_SHARE, MOST_OWN, ROUNDS, LengthBelief, judge
from tltlab.planning.rollout import RolloutState, Shape

NORMAL = NormalDist()
RANGE = np.array([0.1, 0.5, 0.9])


def rollout(running, ended=(), cap=1000):
    """A rollout of `running` pairs of prompt and tokens generated, and of `ended` ones of prompt and length."""
    keys = [(0, prompt, i, 0) for i, (prompt, _) in enumerate([*running, *ended])]
    num = len(running)
    return RolloutState(
        now_s=0.0, rl_step=0, active=Shape.of("1x1"), keys=keys[:num], worker=np.zeros(num, np.int64),
        prompt_tokens=np.zeros(num), generated_tokens=np.array([age for _, age in running], float),
        max_response_tokens=np.full(num, float(cap)),
        ended={key: length for key, (_, length) in zip(keys[num:], ended, strict=True)},
    )  # fmt: skip


def alone(lengths):
    return [(f"q{i}", length) for i, length in enumerate(lengths)]


FOUR = alone([100, 200, 300, 400])


@pytest.mark.parametrize(
    ("running", "ended", "quantiles", "remaining"),
    [
        ([("p", 0)], FOUR, [0.1, 0.25, 0.5, 0.75, 1.0], [100, 100, 200, 300, 400]),
        ([("p", 150)], FOUR, [0.3, 0.5, 0.9], [50, 150, 250]),
        # 6 of whom 2 are known to exceed 250 leave 2/3 beyond 200, and 1/3 beyond 300.
        ([("p", 0), ("r", 250), ("s", 250)], FOUR, [0.3, 0.5, 0.8], [200, 300, 400]),
        ([("p", 990)], FOUR, [0.0, 1.0], [1, 10]),
        ([("p", 0)], alone([1000, 1000, 10]), [0.3, 0.6], [10, 1000]),
        ([("p", 0)], [], [0.25, 0.5, 1.0], [250, 500, 1000]),
    ],
)
def test_without_own_lengths_all_count_alike(running, ended, quantiles, remaining):
    believed = LengthBelief()(rollout(running, ended), np.array(quantiles))
    assert believed[0] == pytest.approx(remaining, rel=5e-3)


def test_beyond_the_longest_the_rate_stays_up_to_the_cap():
    state = rollout([("p", 400)], FOUR, cap=900)
    # 2 end in the 100 + 200 + 200 tokens from 200 on.
    believed = LengthBelief()(state, np.array([0.5, 0.999]))[0]
    assert believed == pytest.approx([250 * math.log(2), 500], rel=0.03)


def test_own_lengths_count_more_the_more_there_are():
    everywhere = {f"q{i}": [20 * i + 20] for i in range(40)}
    state = rollout([("p", 0)])
    medians = [
        LengthBelief(everywhere | {"p": [100] * num})(state, RANGE)[0, 1] for num in (0, 1, 4, 16)
    ]  # fmt: skip
    assert medians == sorted(medians, reverse=True)
    assert medians[0] == pytest.approx(400, rel=0.05)
    assert medians[-1] < 200


def test_siblings_tell_even_of_those_that_outlived_them():
    short, long = ([(name, 50 + i) for i in range(6)] for name in "ab")
    long = [(name, 17 * length) for name, length in long]
    spread = alone(range(60, 1000, 6))
    believed = LengthBelief()(rollout([("a", 200), ("b", 200), ("c", 200)], [*short, *long, *spread]), RANGE)
    assert believed[0, 1] < believed[2, 1] < believed[1, 1]


def test_an_rl_step_that_ended_is_learnt():
    belief = LengthBelief({"p": [100] * 40})
    belief.add({"p": [800] * 40})
    once = LengthBelief({"p": [100] * MOST_OWN + [800] * MOST_OWN})
    state = rollout([("p", 0), ("q", 0)])
    ends = RANGE[[0, 2]]
    assert belief(state, ends) == pytest.approx(once(state, ends))
    assert belief(state, ends)[0].tolist() == [100, 800]
    assert belief(rollout([]), RANGE).shape == (0, 3)


@pytest.mark.parametrize("lengths", [[3, math.nan], [-1], [math.inf]])
def test_a_length_that_is_none_is_refused(lengths):
    with refused(ConfigError, naming=("'bad'",)):
        LengthBelief({"good": [1], "bad": lengths})


def survival(ended, ages, at, *, equal=False):
    """Share longer than `at` by Kaplan and Meier, one length after the other; lengths no shorter if `equal`."""
    share = 1.0
    for length in sorted(set(ended)):
        if length < at or (length == at and not equal):
            share *= 1 - ended.count(length) / sum(other >= length for other in [*ended, *ages])
    return share


def excess(over):
    return NORMAL.pdf(over) / NORMAL.cdf(-over)


def slowly(state, history, quantile):
    """The belief, response by response, as its docstring says it; no response runs that is longer than all ended."""
    earlier = [length for lengths in history.values() for length in lengths]
    ended, ages = [*state.ended.values(), *earlier], state.generated_tokens.tolist()
    near = 1e-12
    alive = [min(max(survival(ended, ages, age), near), 1 - near) for age in ages]
    prompts = dict.fromkeys(key[1] for key in state.keys)
    scores = {}
    for prompt in prompts:
        own = [length for key, length in state.ended.items() if key[1] == prompt] + list(history.get(prompt, ()))
        middles = [(survival(ended, ages, at) + survival(ended, ages, at, equal=True)) / 2 for at in own]
        scores[prompt] = [-NORMAL.inv_cdf(middle) for middle in middles]
    share, shared = FEW_SHARE, dict.fromkeys(prompts, 0.0)
    for _ in range(ROUNDS):
        noise, found, squares = math.sqrt(1 - share), [], 0.0
        over = [(-NORMAL.inv_cdf(a) - shared[key[1]]) / noise for a, key in zip(alive, state.keys, strict=True)]
        precisions = {}
        for prompt in prompts:
            mine = [x for x, key in zip(over, state.keys, strict=True) if key[1] == prompt]
            own = scores[prompt]
            weights = len(own) + sum(excess(x) * (excess(x) - x) for x in mine)
            precisions[prompt] = 1 / share + weights / noise**2
        for x, key in zip(over, state.keys, strict=True):
            others = precisions[key[1]] - excess(x) * (excess(x) - x) / noise**2
            found.append((shared[key[1]] - excess(x) / noise / others, math.sqrt(noise**2 + 1 / others)))
        for prompt in prompts:
            mine = [x for x, key in zip(over, state.keys, strict=True) if key[1] == prompt]
            pull = sum(z - shared[prompt] for z in scores[prompt]) + noise * sum(map(excess, mine))
            shared[prompt] += (pull / noise**2 - shared[prompt] / share) / precisions[prompt]
            squares += shared[prompt] ** 2 + 1 / precisions[prompt]
        share = min(max((squares + FEW * FEW_SHARE) / (len(prompts) + FEW), 0.01), 0.95)
    remaining = []
    for (mean, spread), a, age in zip(found, alive, ages, strict=True):
        left = NORMAL.cdf((NORMAL.inv_cdf(a) + mean) / spread) * (1 - quantile)
        level = NORMAL.cdf(spread * NORMAL.inv_cdf(left) - mean)
        length = next(at for at in sorted(set(ended)) if survival(ended, ages, at) <= level * (1 + 1e-6))
        remaining.append(max(1.0, length - age))
    return remaining


@given(st.integers(0, 2**32 - 1))
def test_any_small_rollout_is_believed_as_slowly(seed):
    rng = np.random.default_rng(seed)
    names = "abcd"[: rng.integers(1, 5)]
    running = [(str(rng.choice(list(names))), int(rng.integers(0, 300))) for _ in range(rng.integers(1, 8))]
    ended = [(str(rng.choice(list(names))), int(rng.integers(1, 600))) for _ in range(rng.integers(0, 12))]
    history = {name: rng.integers(1, 600, rng.integers(1, 6)).tolist() for name in names[:2]} | {"e": [700, 710]}
    state, quantile = rollout(running, ended), float(rng.random())
    believed = LengthBelief(history)(state, np.array([quantile]))[:, 0]
    assert believed == pytest.approx(slowly(state, history, quantile))


def drawn(share, rl_steps=6):
    """Log-normal lengths of 64 prompts in groups of 8 that come in every RL step."""
    rng = np.random.default_rng(0)
    prompt, rl_step = np.tile(np.repeat(range(64), 8), rl_steps), np.repeat(range(rl_steps), 512)
    score = math.sqrt(share) * rng.normal(size=64)[prompt] + math.sqrt(1 - share) * rng.normal(size=len(prompt))
    lengths = 1 + np.exp(6 + score).astype(int)
    sample = np.tile(range(8), 64 * rl_steps)
    return of_samples(lengths, 16384, prompt_id=[f"p{i}" for i in prompt], sample=sample, rl_step=rl_step)


@pytest.mark.parametrize("share", [0.0, 0.8])
def test_four_in_five_fall_into_the_range(share):
    """And where prompts decide, it tells whose lengths are known."""
    known = judge(drawn(share))
    # Of eight, seven are the siblings; the mean of those knows the prompt's part but for a seventh of the noise.
    of_mean = share**2 / (share + (1 - share) / 7) if share else 0.0
    assert known["siblings_share"] == pytest.approx(of_mean, abs=0.05)
    assert known["last_epoch_share"] == pytest.approx(of_mean, abs=0.05)
    assert 0.75 < known["coverage"] < 0.88
    assert 0.75 < known["pooled_coverage"] < 0.88
    error = known["median_error_tokens"] / known["pooled_median_error_tokens"]
    assert error < 0.85 if share else 0.95 < error < 1.05


def test_nothing_is_judged_where_nothing_is_known():
    trace = of_samples([7], 9, prompt_id=["p"], sample=[0])
    aborted = trace.replace(outcomes=trace.outcomes.assign(finish_reason="abort"))
    for one in (trace, aborted, trace.select([])):
        assert set(judge(one).values()) == {None}
