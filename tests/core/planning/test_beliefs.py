"""Beliefs about lengths: exact where the model is simple, equal to a slow oracle, right about their range."""

import json
import math
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tltlab.planning.beliefs import FIRST_SHARE, MOST_SHARE, ROUNDS, LengthBelief, judge
from tltlab.planning.rollout import RolloutState, Shape
from tltlab.traces.trace import read

NORMAL = NormalDist()
RANGE = np.array([0.1, 0.5, 0.9])


def requests(pairs):
    """Lengths by request of pairs of prompt and length."""
    return {(0, prompt, i, 0): length for i, (prompt, length) in enumerate(pairs)}


def learnt(*rl_steps):
    """A belief that has learnt RL steps, each of lengths by prompt."""
    belief = LengthBelief()
    for step in rl_steps:
        belief.add(requests((prompt, length) for prompt, lengths in step.items() for length in lengths))
    return belief


def rollout(running, ended=(), cap=1000, belief=None):
    """A rollout of `running` pairs of prompt and tokens generated, and of `ended` ones of prompt and length."""
    keys = [(0, prompt, i, 0) for i, (prompt, _) in enumerate([*running, *ended])]
    num = len(running)
    return RolloutState(
        now_s=0.0, rl_step=0, active=Shape.of("1x1"), keys=keys[:num], worker=np.zeros(num, np.int64),
        prompt_tokens=np.zeros(num), generated_tokens=np.array([age for _, age in running], float),
        max_response_tokens=np.full(num, float(cap)),
        ended={key: length for key, (_, length) in zip(keys[num:], ended, strict=True)},
        belief=LengthBelief() if belief is None else belief,
    )  # fmt: skip


def alone(lengths):
    return [(f"q{i}", length) for i, length in enumerate(lengths)]


FOUR = alone([100, 200, 300, 400])


@pytest.mark.parametrize(
    ("running", "ended", "quantiles", "remaining"),
    [
        ([("p", 0)], FOUR, [0.1, 0.2, 0.45, 0.7, 1.0], [100, 100, 200, 300, 400]),
        ([("p", 150)], FOUR, [0.3, 0.5, 0.9], [50, 150, 250]),
        # 6 of whom 2 are known to exceed 250 leave 2/3 beyond 200, and 1/3 beyond 300.
        ([("p", 0), ("r", 250), ("s", 250)], FOUR, [0.3, 0.5, 0.8], [200, 300, 400]),
        ([("p", 990)], FOUR, [0.0, 1.0], [1, 10]),
        ([("p", 0)], alone([1000, 1000, 10]), [0.3, 0.6], [10, 1000]),
        ([("p", 0)], [], [0.25, 0.5, 1.0], [250, 500, 1000]),
    ],
)
def test_without_own_lengths_all_count_alike(running, ended, quantiles, remaining):
    believed = rollout(running, ended).remaining(np.array(quantiles))
    assert believed[0] == pytest.approx(remaining, rel=5e-3)


@pytest.mark.parametrize("longer", [0, 5000])
def test_beyond_the_longest_the_rate_stays_up_to_the_cap(longer):
    running = [("p", 400), *([("r", 200 + longer)] if longer else [])]
    believed = rollout(running, FOUR, cap=900 + longer).remaining(np.array([0.5, 0.999]))[0]
    # 2 end in the 100 + 200 + 200 tokens from 200 on, and in those of whoever runs on.
    assert believed == pytest.approx([(500 + longer) / 2 * math.log(2), 500 + longer], rel=0.03)


def test_a_response_that_outlives_all_by_far_has_finite_lengths_left():
    state = rollout([("p", 30_000)], [("q", 100)] * 5000, cap=32_768, belief=learnt({"p": [0, 5]}))
    assert np.isfinite(state.belief(state, np.array([0.0, 0.5, 1.0]))).all()


def test_own_lengths_count_more_the_more_there_are():
    everywhere = {f"q{i}": [20 * i + 20] for i in range(40)}
    medians = [
        rollout([("p", 0)], belief=learnt(everywhere | {"p": [100] * num})).remaining(RANGE)[0, 1]
        for num in (0, 1, 4, 16)
    ]
    assert medians == sorted(medians, reverse=True)
    assert medians[0] == pytest.approx(400, rel=0.05)
    assert medians[-1] < 200


def test_siblings_tell_even_of_those_that_outlived_them():
    short, long = ([(name, 50 + i) for i in range(6)] for name in "ab")
    long = [(name, 17 * length) for name, length in long]
    spread = alone(range(60, 1000, 6))
    believed = rollout([("a", 200), ("b", 200), ("c", 200)], [*short, *long, *spread]).remaining(RANGE)
    assert believed[0, 1] < believed[2, 1] < believed[1, 1]


def test_rl_steps_that_ended_are_learnt_and_older_ones_fade():
    others = {f"q{i}": [20 * i + 20] for i in range(40)}
    short, long = others | {"p": [100] * 8}, others | {"p": [700] * 8}
    medians = [
        rollout([("p", 0)], belief=learnt(*[short] * 6, *[long] * num)).remaining(RANGE)[0, 1] for num in range(7)
    ]
    assert medians == sorted(medians)
    assert medians[0] < 200
    assert medians[-1] > 600


def test_the_order_of_requests_does_not_count_so_that_a_run_resumes_alike():
    rng = np.random.default_rng(0)
    steps = [requests((f"p{i // 4}", int(x)) for i, x in enumerate(rng.integers(1, 900, 400))) for _ in range(3)]
    one, other = LengthBelief(), LengthBelief()
    rollout([("new", 5), ("p3", 7)], belief=other).remaining(RANGE)
    for step in steps:
        one.add(step)
        other.add({key: step[key] for key in reversed(step)})
        other = LengthBelief(**json.loads(json.dumps(other.state_dict())))
        rollout([("new", 5)], belief=other).remaining(RANGE)
    state = rollout([("new", 50), ("p3", 70)], [("p4", 60)])
    assert one(state, RANGE).tolist() == other(state, RANGE).tolist()


def test_no_request_and_no_length_make_no_trouble():
    belief = LengthBelief()
    belief.add({})
    assert rollout([], belief=belief).remaining(RANGE).shape == (0, 3)
    assert rollout([("p", 3)], [("p", 0)], belief=belief).remaining(RANGE).shape == (1, 3)


def survival(ended, ages, at, *, equal=False):
    """Share longer than `at` by Kaplan and Meier, one length after the other; lengths no shorter if `equal`."""
    share = 1.0
    for length in sorted(set(ended)):
        if length < at or (length == at and not equal):
            share *= 1 - ended.count(length) / sum(other >= length for other in [*ended, *ages])
    return share


def score(ended, ages, at):
    return -NORMAL.inv_cdf((survival(ended, ages, at) + survival(ended, ages, at, equal=True)) / 2)


def excess(over):
    return NORMAL.pdf(over) / NORMAL.cdf(-over)


def slowly(state, history, quantile):
    """The belief, response by response, as its docstring says it; no response runs that is longer than all ended.

    For each the least and the most tokens left, as scores are read as lengths between those of a table.
    """
    earlier = [length for lengths in history.values() for length in lengths]
    ended, ages = [*state.ended.values(), *earlier], state.generated_tokens.tolist()
    alive = [min(survival(ended, ages, age), 1 - 1e-12) for age in ages]
    prompts = dict.fromkeys([*history, *(key[1] for key in [*state.keys, *state.ended])])
    scores = {
        prompt: [score(ended, ages, length) for key, length in state.ended.items() if key[1] == prompt]
        + [score(earlier, [], length) for length in history.get(prompt, ())]
        for prompt in prompts
    }
    share, shared = FIRST_SHARE, dict.fromkeys(prompts, 0.0)
    for _ in range(ROUNDS):
        noise, squares = math.sqrt(1 - share), 0.0
        over = [(-NORMAL.inv_cdf(a) - shared[key[1]]) / noise for a, key in zip(alive, state.keys, strict=True)]
        precisions = {}
        for prompt in prompts:
            mine = [x for x, key in zip(over, state.keys, strict=True) if key[1] == prompt]
            weights = len(scores[prompt]) + sum(excess(x) * (excess(x) - x) for x in mine)
            precisions[prompt] = 1 / share + weights / noise**2
            pull = sum(z - shared[prompt] for z in scores[prompt]) + noise * sum(map(excess, mine))
            shared[prompt] += (pull / noise**2 - shared[prompt] / share) / precisions[prompt]
            squares += shared[prompt] ** 2 + 1 / precisions[prompt]
        share = min(squares / len(prompts), MOST_SHARE)
    remaining = []
    for x, a, age, key in zip(over, alive, ages, state.keys, strict=True):
        others = precisions[key[1]] - excess(x) * (excess(x) - x) / noise**2
        mean, spread = shared[key[1]] - excess(x) / noise / others, math.sqrt(noise**2 + 1 / others)
        left = NORMAL.cdf((NORMAL.inv_cdf(a) + mean) / spread) * (1 - quantile)
        found = mean - spread * NORMAL.inv_cdf(left)
        levels = [NORMAL.cdf(-found - aside) for aside in (-1 / 32, 1 / 32)]
        lengths = [next(at for at in sorted(set(ended)) if survival(ended, ages, at) <= level) for level in levels]
        remaining.append([max(1.0, length - age) for length in lengths])
    return np.array(remaining)


@given(st.integers(0, 2**32 - 1))
def test_any_small_rollout_is_believed_as_slowly(seed):
    rng = np.random.default_rng(seed)
    names = "abcd"[: rng.integers(1, 5)]
    running = [(str(rng.choice(list(names))), int(rng.integers(0, 300))) for _ in range(rng.integers(1, 8))]
    ended = [(str(rng.choice(list(names))), int(rng.integers(1, 600))) for _ in range(rng.integers(0, 12))]
    history = {name: rng.integers(1, 600, rng.integers(1, 6)).tolist() for name in names[:2]} | {"e": [700, 710]}
    state, quantile = rollout(running, ended, belief=learnt(history)), float(rng.random())
    believed = state.remaining(np.array([quantile]))[:, 0]
    least, most = slowly(state, history, quantile).T
    assert (least <= believed + 1e-6).all()
    assert (believed <= most + 1e-6).all()


@pytest.mark.parametrize(("share", "gain"), [(0.0, 1.05), (0.8, 0.75)])
def test_four_in_five_fall_into_the_range(share, gain):
    """Log-normal lengths, half of the responses ended: the range holds, and siblings help where prompts decide."""
    rng = np.random.default_rng(0)
    errors, inside = {True: [], False: []}, []
    for _ in range(6):
        decided = np.repeat(rng.normal(size=64), 8)
        earlier, lengths = (
            np.exp(6 + math.sqrt(share) * decided + math.sqrt(1 - share) * rng.normal(size=512)).astype(int) + 1
            for _ in range(2)
        )
        age = int(np.median(lengths))
        history = {f"{i}": earlier[8 * i : 8 * i + 8].tolist() for i in range(64)}
        for whose in (True, False):
            names = [f"{i // 8}" if whose else f"alone {i}" for i in range(512)]
            pairs = list(zip(names, lengths.tolist(), strict=True))
            running = [(name, age) for name, length in pairs if length > age]
            ended = [pair for pair in pairs if pair[1] <= age]
            believed = rollout(running, ended, cap=16384, belief=learnt(history)).remaining(RANGE)
            truth = lengths[lengths > age] - age
            errors[whose].append(np.abs(believed[:, 1] - truth).mean())
            if whose:
                inside.append(((believed[:, 0] <= truth) & (truth <= believed[:, 2])).mean())
    assert 0.7 < np.mean(inside) < 0.9
    assert np.mean(errors[True]) < gain * np.mean(errors[False])


def test_siblings_and_the_last_epoch_tell_where_prompts_decide():
    judged = judge(read(Path(__file__).parents[3] / "traces" / "reasoning-32k"))
    errors = [judged[known]["median_error_tokens"] for known in ("history", "siblings", "all")]
    assert errors[0] < 0.95 * errors[1] < 0.8 * errors[2]
    assert all(0.7 < figures["coverage"] < 0.9 for figures in judged.values())
