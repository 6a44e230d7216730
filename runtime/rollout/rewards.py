"""Reward functions: loading, and rewards for math answers and formats.

A reward function is called as reward(prompt, response, answer) -> float. Recipes name those here as in `reward =
"tltlab.runtime.rollout.rewards:math"`. Response length does not count here: see `train.overlong`.
"""

import logging
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from importlib.util import find_spec
from math import isfinite
from typing import Any, NamedTuple

from tltlab.files import found_in
from tltlab.own import load_function

Reward = Callable[[str, str, str], float]

LARGEST_REWARD = 3.4028234663852886e38
"""Largest float32: advantages are computed from rewards in it."""

_NUMBER = re.compile(r"(?:(?<!\d)-)?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
_BOXED = r"\boxed{"
_BRACES = re.compile(r"\\boxed\{|\\.|[{}]", re.DOTALL)


class NotANumberError(Exception):
    """A reward function returned no number, or none that is finite as float32; the message omits the value."""


class Scored(NamedTuple):
    """A response's reward, and the values of its terms, in the recipe's order."""

    reward: float
    terms: tuple[float, ...] = ()


def number_of(value: Any) -> float:
    """Return what a reward function returned as a number; NotANumberError where it is none."""
    try:
        # Text and bytes are numbers to `float`.
        number = float("" if isinstance(value, (str, bytes, bytearray)) else value)
    except (TypeError, ValueError):
        raise NotANumberError(f"returned a {type(value).__name__}") from None
    if not isfinite(number):
        raise NotANumberError(f"returned {number}")
    if abs(number) > LARGEST_REWARD:
        raise NotANumberError("returned a number beyond what float32 holds")
    return number


def load_rewards(paths: Sequence[str], code: Sequence[str] = ()) -> list[Reward]:
    """Import functions by path, searched last in the folders `code`; ConfigError as `load_reward`."""
    with found_in(code):
        return [load_reward(path) for path in paths]


def load_reward(path: str) -> Reward:
    """Import `package.module:function`; ConfigError for one that cannot be imported or called."""
    function = load_function(path, f"reward {path!r}", "prompt, response, answer")
    if function is math and find_spec("math_verify") is None:
        # Reported before a run begins: within a run, an exception only costs a response its reward.
        raise ModuleNotFoundError("No module named 'math_verify'", name="math_verify")
    return function


def math(prompt: str, response: str, answer: str) -> float:
    r"""1.0 where the response's answer equals `answer` in value, by math-verify.

    The response's answer is its last \boxed{}, else the last expression that math-verify finds. `answer` is plain or
    LaTeX, or a GSM8K solution whose answer follows "####". An answer that does not parse is 0.0. No time limit applies
    here.

    >>> math("", r"thus \boxed{\frac{1}{2}}", "0.5")
    1.0
    """
    # Imported here: SymPy is slow to import, and most runs do not need it.
    import math_verify

    # It warns that it has no time limit: its own needs signals, and the pool of reward processes has one.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold = answer.rpartition("####")[2].strip()
    boxes = boxed(response)
    expected = math_verify.parse(gold if "$" in gold or boxed(gold) else _in_box(gold), parsing_timeout=None)
    parsed = math_verify.parse(_in_box(boxes[-1]) if boxes else response, parsing_timeout=None)
    return float(math_verify.verify(expected, parsed, timeout_seconds=None))


def gsm8k(prompt: str, response: str, answer: str) -> float:
    """1.0 where the response's number equals the answer's: the first after the last "####", else the last of the text.

    >>> gsm8k("", "She pays 1,200 + 34 = $1,234.00 in all.", "1200 + 34 = 1234\\n#### 1,234")
    1.0
    """
    expected = _final_number(answer)
    return float(expected is not None and expected == _final_number(response))


def boxed_format(prompt: str, response: str, answer: str) -> float:
    r"""1.0 where the response has exactly one \boxed{}, which is not empty."""
    boxes = boxed(response)
    return float(len(boxes) == 1 == response.count(_BOXED) and bool(boxes[0].strip()))


def boxed(text: str) -> list[str]:
    r"""Return the contents of every \boxed{} whose braces match, in order; of nested ones the outer.

    >>> boxed(r"\boxed{1} and \boxed{\frac{1}{2}}")
    ['1', '\\frac{1}{2}']
    """
    opened: list[int | None] = []
    spans: list[tuple[int, int]] = []
    for brace in _BRACES.finditer(text):
        if brace[0] == "}":
            begin = opened.pop() if opened else None
            if begin is not None:
                while spans and spans[-1][0] > begin:
                    spans.pop()
                spans.append((begin, brace.start()))
        elif brace[0].endswith("{") and brace[0] != r"\{":
            opened.append(brace.end() if brace[0] == _BOXED else None)
    return [text[begin:end] for begin, end in spans]


def _in_box(text: str) -> str:
    return f"{_BOXED}{text}}}"


def _final_number(text: str) -> Decimal | None:
    _, mark, solution = text.rpartition("####")
    numbers = _NUMBER.findall(solution)
    if not numbers:
        return None
    return Decimal(numbers[0 if mark else -1].replace(",", "").replace("$", ""))
