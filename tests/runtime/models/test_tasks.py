"""Our own tasks: problems can be solved, traces show how, and rewards cannot be talked into anything."""

import itertools
import math
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tltlab.runtime.models.tasks import TASKS, gcd_reward, subset_sum_reward, try_success
from tltlab.stats import intraclass_correlation

NUMS = "nums 9 7 5 4 goal 20 go"


def test_subset_sum_pays_for_the_last_try():
    for last_try in ("try 9 + 7 = 16 + 4 = 20 yes", "try 9 + 7 = 15 + 4 = 20 yes"):
        assert subset_sum_reward(NUMS, f"try 7 + 9 = 16 + 5 = 21 no > 20 so next {last_try}", "20") == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "",
        "yes",
        "try yes",
        "try 20 yes",
        "try 9 + 7 = 16 + 4 = 20",
        "try 9 + 7 = 16 + 4 = 20 yes yes",
        "try 9 + 7 = 16 + 4 = 20 yes so stop",
        "try 9 + 7 = 16 + 4 yes",
        "try 9 + 7 = 16 4 = 20 yes",
        "try 9 + 7 = 16 + 5 = 20 yes",
        "try 5 + 5 = 10 + 5 = 15 + 5 = 20 yes",
        "try 9 + 11 = 20 yes",
        "try 9 + 7 = 16 + 4 = 20 yes try 9 + 7 = 16 no > 20 so stop",
        "9 + 7 = 16 + 4 = 20 yes",
    ],
)
def test_subset_sum_pays_nothing_for_anything_else(response):
    assert subset_sum_reward(NUMS, response, "20") == 0.0


def test_gcd_pays_for_one_right_answer():
    for response in (", 12 6 6 , 6 6 , 6 ans 6", "ans 6"):
        assert gcd_reward("gcd 12 18 6 go", response, "6") == 1.0
    for response in (", 12 6 6 , 6 6 , 6 ans", ", 6 ans 3", ", 6 ans 6 6", ", 6 ans 3 , ans 6", ", 12 6 6", ""):
        assert gcd_reward("gcd 12 18 6 go", response, "6") == 0.0


@given(numbers=st.lists(st.integers(1, 8), min_size=1, max_size=5), goal=st.integers(1, 12))
def test_a_trys_chance_is_over_all_orders(numbers, goal):
    orders = list(itertools.permutations(numbers))
    hits = sum(goal in itertools.accumulate(order) for order in orders)
    assert try_success(numbers, goal) == pytest.approx(hits / len(orders))


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_traces_are_of_the_vocabulary_and_earn_whole(task):
    rng, again = (np.random.default_rng(0) for _ in range(2))
    for _ in range(200):
        problem = task.problem(rng)
        words = task.trace(problem, rng).split()
        assert {*problem.prompt.split(), *words} <= set(task.words)
        assert problem == task.problem(again)
        assert words == task.trace(problem, again).split()
        for end in (len(words) // 2, len(words) - 1):
            assert _reward(task)(problem.prompt, " ".join(words[:end]), problem.answer) == 0.0


def test_a_gcd_problems_answer_is_the_gcd():
    rng = np.random.default_rng(0)
    answers = []
    for _ in range(300):
        problem = TASKS["gcd"].problem(rng)
        answers.append(problem.answer)
        assert int(problem.answer) == math.gcd(*map(int, problem.prompt.split()[1:-1]))
    assert max(answers.count(answer) for answer in set(answers)) < 0.4 * len(answers)


@pytest.mark.parametrize(
    ("name", "prompt_decides", "reward"), [("subset-sum", (0.0, 0.25), (0.25, 0.5)), ("gcd", (0.6, 1.0), (0.75, 0.95))]
)
def test_traces_have_a_long_tail_and_own_lengths(name, prompt_decides, reward):
    task, rng = TASKS[name], np.random.default_rng(0)
    problems = [task.problem(rng) for _ in range(200)]
    traces = [[task.trace(problem, rng) for _ in range(8)] for problem in problems]
    lengths = np.array([[len(trace.split()) + 1 for trace in group] for group in traces])
    rewards = [_reward(task)(p.prompt, t, p.answer) for p, group in zip(problems, traces, strict=True) for t in group]
    assert np.percentile(lengths, 95) > 4 * np.median(lengths)
    logs = np.log(lengths)
    between = logs.shape[1] * logs.mean(axis=1).var(ddof=1)
    share = intraclass_correlation(between, logs.var(axis=1, ddof=1).mean(), logs.shape[1])
    assert prompt_decides[0] <= share <= prompt_decides[1]
    assert reward[0] < np.mean(rewards) < reward[1]


def _reward(task):
    module, _, name = task.reward.partition(":")
    return getattr(import_module(module), name)
