"""Reasoning tasks in words that a small model can learn from scratch: problems, traces to imitate, rewards.

Every task has a checkable answer and traces whose length comes from the reasoning itself. Traces have flaws (giving up,
trusting a wrong sum, skipping the check) for reinforcement learning to remove.
"""

import re
from collections.abc import Callable

import numpy as np

from tltlab.records import frozen


@frozen
class TaskProblem:
    """The model's prompt and the checker's answer. Words are separated by single spaces."""

    prompt: str
    answer: str


@frozen
class Task:
    """One task: `problem` draws a problem, `trace` one flawed solution of it, `reward` is an import path."""

    words: tuple[str, ...]
    problem: Callable[[np.random.Generator], TaskProblem]
    trace: Callable[[TaskProblem, np.random.Generator], str]
    reward: str


# ---- subset-sum: the length is mostly random ------------------------------------------------------------------------

SUBSET_SUM_MAX_GOAL = 30
_SUBSET_SUM_END = re.compile(r"(?:^| )try (\d+)((?: \+ \d+ = \d+)*) yes$")
_PICK = re.compile(r"\+ (\d+) =")
_MIN_TRY_SUCCESS = 0.02
# Probability of keeping a problem by the whole part of -log2 of a try's success probability; 1 beyond.
_KEEP_BY_HALVINGS = (0.05, 0.1, 0.3)


def try_success(numbers: list[int], goal: int) -> float:
    """Return the probability that numbers drawn one by one without replacement hit `goal` before passing it.

    A set S of k numbers that sums to the goal is the first k draws of n with probability 1 / C(n, k); these events
    exclude each other, so the probabilities of all such sets add up.

    >>> try_success([1, 2, 3], 3)
    0.6666666666666666
    """
    n = len(numbers)
    ways = np.zeros((n + 1, goal + 1))
    ways[0, 0] = 1
    for number in numbers:
        if number <= goal:
            ways[1:, number:] += ways[:-1, : goal + 1 - number].copy()
    chance, orders = 0.0, 1.0
    for k in range(1, n + 1):
        orders *= (n - k + 1) / k
        chance += ways[k, goal] / orders
    return float(chance)


def subset_sum_problem(rng: np.random.Generator) -> TaskProblem:
    """Draw different numbers and a goal that some of them sum to; a random try succeeds with probability .4 to .02.

    Half are dense, of small numbers; half are multiples of 3 with one or two numbers that the goal needs. Problems that
    most tries solve are thinned out, so that the probability is spread over its logarithm.
    """
    while True:
        if rng.random() < 0.5:
            numbers = rng.permutation(np.arange(1, 13))[: rng.integers(4, 8)].tolist()
            size = int(rng.integers(2, min(4, len(numbers) - 1) + 1))
        else:
            needed = rng.permutation([1, 4, 7, 10])[: rng.integers(1, 3)].tolist()
            numbers = needed + rng.permutation(np.arange(3, 22, 3))[: rng.integers(3, 7)].tolist()
            size = len(needed) + int(rng.integers(1, 3))
        goal = sum(numbers[:size])
        if goal > SUBSET_SUM_MAX_GOAL:
            continue
        chance = try_success(numbers, goal)
        if chance < _MIN_TRY_SUCCESS:
            continue
        halvings = int(-np.log2(chance))
        if halvings < len(_KEEP_BY_HALVINGS) and rng.random() > _KEEP_BY_HALVINGS[halvings]:
            continue
        order = rng.permutation(len(numbers))
        listed = " ".join(str(numbers[i]) for i in order)
        return TaskProblem(prompt=f"nums {listed} goal {goal} go", answer=str(goal))


def subset_sum_trace(problem: TaskProblem, rng: np.random.Generator) -> str:
    """Search at random, with running sums: `try 9 + 7 = 16 + 5 = 21 no > 20 so next try 9 + 7 = 16 + 4 = 20 yes`.

    Flaws: most writers are impatient and soon write `so stop`; one in ten sums that are off by one passes as `yes`.
    """
    numbers, goal = _parse_subset_sum(problem.prompt)
    stop = 0.5 if rng.random() < 0.55 else 0.004
    words: list[str] = []
    while True:
        total = 0
        for i in rng.permutation(len(numbers)):
            words += ["+", str(numbers[i]), "=", str(total + numbers[i])] if total else ["try", str(numbers[i])]
            total += numbers[i]
            if total >= goal or (total == goal - 1 and rng.random() < 0.1):
                break
        if total <= goal or (total == goal + 1 and rng.random() < 0.1):
            return " ".join([*words, "yes"])
        words += ["no", ">", str(goal), "so"]
        if rng.random() < stop:
            return " ".join([*words, "stop"])
        words.append("next")


def subset_sum_reward(prompt: str, response: str, answer: str) -> float:
    """1.0 where the last try ends in `yes` and its numbers, each one of the list and used once, sum to the goal.

    >>> subset_sum_reward("nums 9 7 4 goal 20 go", "try 9 + 7 = 16 + 4 = 20 yes", "20")
    1.0
    """
    numbers, goal = _parse_subset_sum(prompt)
    last_try = _SUBSET_SUM_END.search(response)
    if last_try is None:
        return 0.0
    picks = [int(last_try[1]), *(int(pick) for pick in _PICK.findall(last_try[2]))]
    distinct = len(set(picks)) == len(picks)
    return float(distinct and set(picks) <= set(numbers) and sum(picks) == goal == int(answer))


def _parse_subset_sum(prompt: str) -> tuple[list[int], int]:
    words = prompt.split()
    goal = words.index("goal")
    return [int(word) for word in words[words.index("nums") + 1 : goal]], int(words[goal + 1])


SUBSET_SUM = Task(
    words=(
        *map(str, range(51)),
        *["nums", "goal", "go", "try", "+", "=", "yes", "no", ">", "so", "next", "stop", "ans"],
    ),
    problem=subset_sum_problem,
    trace=subset_sum_trace,
    reward="tltlab.runtime.models.tasks:subset_sum_reward",
)

# ---- gcd: the length is mostly decided by the problem ----------------------------------------------------------------

GCD_MAX_NUMBER = 99
# Probability of keeping a problem by the whole part of log2 of its number of subtractions.
_KEEP_BY_DOUBLINGS = (1.0, 1.0, 1.0, 0.25, 0.25, 1.0, 1.0)


def gcd_problem(rng: np.random.Generator) -> TaskProblem:
    """Draw two or three different numbers below 100 whose greatest common divisor is 1 to 6, about equally likely.

    The numbers are uniform in their logarithm: a small one among large ones takes many subtractions. Problems of
    middling length are thinned out, so that the number of subtractions is spread over its logarithm.
    """
    while True:
        divisor = int(rng.integers(1, 7))
        size = 2 if rng.random() < 0.3 else 3
        numbers = np.exp(rng.uniform(0, np.log(GCD_MAX_NUMBER // divisor + 1), size=size)).astype(int).tolist()
        if len(set(numbers)) < size or np.gcd.reduce(numbers) != 1:
            continue
        steps = _subtract(numbers, rng, check=0.0, slip=0.0).count(",")
        if rng.random() <= _KEEP_BY_DOUBLINGS[int(np.log2(steps))]:
            listed = " ".join(str(number * divisor) for number in numbers)
            return TaskProblem(prompt=f"gcd {listed} go", answer=str(divisor))


def gcd_trace(problem: TaskProblem, rng: np.random.Generator) -> str:
    """Subtract until one number is left: `, 12 6 6 , 12 6 check 6 + 6 = 12 ok , 6 6 , 6 ans 6` for `gcd 12 18 6 go`.

    Each step picks two numbers at random and writes the remaining numbers. Flaws: one difference in 50 is off by 1 or
    by 10, and half of the writers seldom check; a check finds such a slip, writes `no`, and the step is repeated.
    """
    numbers = [int(word) for word in problem.prompt.split()[1:-1]]
    words = _subtract(numbers, rng, check=0.3 if rng.random() < 0.5 else 0.05, slip=0.02)
    return " ".join([*words, "ans", words[-1]])


def _subtract(numbers: list[int], rng: np.random.Generator, *, check: float, slip: float) -> list[str]:
    words: list[str] = []
    while len(numbers) > 1:
        larger, smaller = rng.permutation(len(numbers))[:2].tolist()
        if numbers[larger] < numbers[smaller]:
            larger, smaller = smaller, larger
        subtrahend = numbers[smaller]
        right = numbers[larger] - subtrahend
        if not right:
            numbers = numbers[:larger] + numbers[larger + 1 :]
            words += [",", *map(str, numbers)]
            continue
        difference = right
        if rng.random() < slip:
            difference = int(np.clip(right + rng.choice([-10, -1, 1, 10]), 1, GCD_MAX_NUMBER))
        while True:
            numbers = [*numbers[:larger], difference, *numbers[larger + 1 :]]
            words += [",", *map(str, numbers)]
            if rng.random() >= check:
                break
            verdict = "ok" if difference == right else "no"
            words += ["check", str(difference), "+", str(subtrahend), "=", str(difference + subtrahend), verdict]
            if difference == right:
                break
            difference = right
    return words


def gcd_reward(prompt: str, response: str, answer: str) -> float:
    """1.0 where the response ends in `ans` and the answer, and names no other answer before.

    >>> gcd_reward("gcd 12 18 6 go", ", 12 6 6 , 12 6 , 6 6 , 6 ans 6", "6")
    1.0
    """
    words = response.split()
    return float(words[-2:] == ["ans", answer] and words.count("ans") == 1)


GCD = Task(
    words=(*map(str, range(120)), "gcd", "go", ",", "check", "+", "=", "ok", "no", "ans"),
    problem=gcd_problem,
    trace=gcd_trace,
    reward="tltlab.runtime.models.tasks:gcd_reward",
)

# ---- calculator: a tool in the middle of the response ---------------------------------------------------------------

CALCULATOR_MAX_NUMBER = 200


def calculator_problem(rng: np.random.Generator) -> TaskProblem:
    """Draw a sum of three to seven numbers up to 40 whose running totals are within 0 and 200."""
    while True:
        numbers = rng.integers(1, 41, size=rng.integers(3, 8)).tolist()
        signs = [1, *np.where(rng.random(len(numbers) - 1) < 0.6, 1, -1).tolist()]
        totals = np.cumsum(np.multiply(numbers, signs))
        if totals.min() >= 0 and totals.max() <= CALCULATOR_MAX_NUMBER:
            terms = [word for sign, n in zip(signs[1:], numbers[1:], strict=True) for word in ("-+"[sign > 0], str(n))]
            return TaskProblem(prompt=f"calc {numbers[0]} {' '.join(terms)} go", answer=str(totals[-1]))


def calculator_trace(problem: TaskProblem, rng: np.random.Generator) -> str:
    """Ask the tool for one sum after another: `ask 17 + 25 = 42 ask 42 - 9 = 33 ans 33` for `calc 17 + 25 - 9 go`.

    The word after each `=` is the tool's. Flaws: half of the writers are impatient, and may give an intermediate total
    as the answer; one asked number in 25 is miscopied.
    """
    first, *terms = problem.prompt.split()[1:-1]
    stop = 0.25 if rng.random() < 0.5 else 0.0
    words: list[str] = []
    total = int(first)
    for sign, number in zip(terms[::2], terms[1::2], strict=True):
        if words and rng.random() < stop:
            break
        step = (1 if sign == "+" else -1) * (int(rng.integers(1, 41)) if rng.random() < 0.04 else int(number))
        if not 0 <= total + step <= CALCULATOR_MAX_NUMBER:
            step = 0
        words += ["ask", str(total), sign, str(abs(step)), "=", str(total + step)]
        total += step
    return " ".join([*words, "ans", str(total)])


CALCULATOR = Task(
    words=(*map(str, range(CALCULATOR_MAX_NUMBER + 1)), "calc", "go", "ask", "+", "-", "=", "ans"),
    problem=calculator_problem,
    trace=calculator_trace,
    reward="tltlab.runtime.models.tasks:gcd_reward",
)

TASKS = {"subset-sum": SUBSET_SUM, "gcd": GCD, "calculator": CALCULATOR}
