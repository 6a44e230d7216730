"""What rewards pay for, how they are named and summed, and what is said of one that cannot be called."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.runtime.rollout.rewards import (
    NotANumberError,
    boxed,
    boxed_format,
    gsm8k,
    load_reward,
    load_rewards,
    math,
    think_format,
)

MODULE = """
def two(prompt, response, answer): return 2
def infinite(prompt, response, answer): return float("inf")
def text(prompt, response, answer): return "1.0"
def nothing(prompt, response, answer): return None
def of_one(response): return 1.0
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_rewards.py").write_text(MODULE)
    (tmp_path / "broken_rewards.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        (r"So the answer is \boxed{\frac{1}{2}}.", "0.5", 1.0),
        (r"First \boxed{3}, no: \boxed{4}", "4", 1.0),
        (r"First \boxed{4}, no: \boxed{3}", "4", 0.0),
        ("It is 3/4.", r"\frac{3}{4}", 1.0),
        (r"\boxed{x = 4}", "4", 1.0),
        (r"\boxed{(1, 2)}", "(1,2)", 1.0),
        (r"\boxed{(2, 1)}", "(1,2)", 0.0),
        (r"\boxed{2\sqrt{3}}", r"$\sqrt{12}$", 1.0),
        (r"\boxed{1234}", "1,234", 1.0),
        ("the answer is 72", "He counts 70 + 2 = 72\n#### 72", 1.0),
        (r"\boxed{71}", "72", 0.0),
        (r"\boxed{", "72", 0.0),
        ("I give up", "72", 0.0),
        ("", "72", 0.0),
        (r"\boxed{\frac{1}{0}}", "72", 0.0),
    ],
)
def test_math_pays_for_a_value_that_equals_the_answer(response: str, answer: str, reward: float):
    assert math("", response, answer) == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("so 1200 + 34 = 1,234", 1.0),
        ("so $1,234.00.", 1.0),
        ("12 first\n#### 1234 dollars, 99 cents", 1.0),
        ("1234 first\n#### 12", 0.0),
        ("1234\n####", 0.0),
        ("-1234", 0.0),
        ("2468-1234", 1.0),
        ("1,2,34", 0.0),
        ("none", 0.0),
    ],
)
def test_gsm8k_pays_for_the_number_after_the_mark_or_the_last_one(response: str, reward: float):
    assert gsm8k("", response, "1200 + 34 = <<1200+34=1234>>1234\n#### 1,234") == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (r"so \boxed{\frac{1}{2}}", 1.0),
        (r"so \boxed{\{1, 2\}}", 1.0),
        (r"\boxed{1} or \boxed{2}", 0.0),
        (r"\boxed{\boxed{1}}", 0.0),
        (r"\boxed{ }", 0.0),
        (r"\boxed{1", 0.0),
        ("1", 0.0),
    ],
)
def test_boxed_format_pays_for_one_box_with_something_in_it(response: str, reward: float):
    assert boxed_format("", response, "") == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<think>3 + 4\n= 7</think>\n7", 1.0),
        ("  <think>7</think>7", 1.0),
        ("<think></think>7", 0.0),
        ("<think>7</think> ", 0.0),
        ("well <think>7</think>7", 0.0),
        ("<think>7</think>7</think>7", 0.0),
        ("<think>7", 0.0),
        ("7", 0.0),
    ],
)
def test_think_format_pays_for_a_thought_and_then_an_answer(response: str, reward: float):
    assert think_format("", response, "") == reward


def test_boxes_are_found_in_time_that_grows_with_the_text():
    assert boxed(r"} \boxed{a \boxed{b} \boxed{c}") == ["b", "c"]
    assert boxed(r"\boxed{" * 100_000) == []
    assert boxed(r"\boxed{" * 100_000 + "}" * 100_000) == [r"\boxed{" * 99_999 + "}" * 99_999]


@pytest.mark.parametrize(("name", "what"), [("infinite", ("returned",)), ("text", ()), ("nothing", ("NoneType",))])
def test_a_reward_is_a_finite_number(name: str, what: tuple):
    with refused(NotANumberError, naming=what):
        load_rewards([("some_rewards:two", 1.0), (f"some_rewards:{name}", 1.0)])("", "", "")


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("json", ("module:function",)),
        (":f", ("module:function",)),
        ("no_such_module_here:f", ()),
        ("some_rewards.py:of_one", ("some_rewards:of_one",)),
        ("broken_rewards:f", ("ZeroDivisionError",)),
        ("json:no_such_function", ("no_such_function",)),
        ("json:__name__", ()),
        ("some_rewards:of_one", ()),
    ],
)
def test_a_reward_that_cannot_be_called_is_refused(path: str, complaint: tuple):
    with refused(ConfigError, naming=complaint):
        load_reward(path)


def test_a_sum_of_no_rewards_or_of_a_weight_that_is_no_number_is_refused():
    with refused(ConfigError):
        load_rewards([])
    with refused(ConfigError):
        load_rewards([("some_rewards:two", float("nan"))])


def test_a_sum_that_is_not_finite_or_that_float32_does_not_hold_is_no_reward():
    assert load_rewards([("some_rewards:two", 1e38)])("", "", "") == 2e38
    for weights, complaint in (([1e308, 1e308], "returned inf"), ([1e300], "beyond what float32 holds")):
        with pytest.raises(NotANumberError, match=complaint):
            load_rewards([("some_rewards:two", weight) for weight in weights])("", "", "")
