"""What rewards pay for, how they are named and summed, and what is said of one that cannot be called."""

import pytest

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.runtime.rollout.rewards import (
    NotANumberError,
    boxed,
    boxed_format,
    gsm8k,
    load_reward,
    math,
    number_of,
)

MODULE = """
def of_one(response): return 1.0
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "some_rewards.py").write_text(MODULE)
    (tmp_path / "broken_rewards.py").write_text("f = 1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))


GSM8K = "1200 + 34 = <<1200+34=1234>>1234\n#### 1,234"


@pytest.mark.parametrize(
    ("reward", "answer", "right", "wrong"),
    [
        # What equals the answer.
        (math, "0.5", [r"So the answer is \boxed{\frac{1}{2}}."], []),
        (math, "4", [r"First \boxed{3}, no: \boxed{4}", r"\boxed{x = 4}"], [r"First \boxed{4}, no: \boxed{3}"]),
        (math, r"\frac{3}{4}", ["It is 3/4."], []),
        (math, "(1,2)", [r"\boxed{(1, 2)}"], [r"\boxed{(2, 1)}"]),
        (math, r"$\sqrt{12}$", [r"\boxed{2\sqrt{3}}"], []),
        (math, "1,234", [r"\boxed{1234}"], []),
        (math, "He counts 70 + 2 = 72\n#### 72", ["the answer is 72"], []),
        (math, "72", [], [r"\boxed{71}", r"\boxed{", "I give up", "", r"\boxed{\frac{1}{0}}"]),
        # The number after the mark, or the last one.
        (gsm8k, GSM8K, ["so 1200 + 34 = 1,234", "so $1,234.00.", "12\n#### 1234 dollars, 99 cents", "2468-1234"], []),
        (gsm8k, GSM8K, [], ["1234 first\n#### 12", "1234\n####", "-1234", "1,2,34", "none"]),
        # One box with something in it.
        (boxed_format, "", [r"so \boxed{\frac{1}{2}}", r"so \boxed{\{1, 2\}}"], []),
        (boxed_format, "", [], [r"\boxed{1} or \boxed{2}", r"\boxed{\boxed{1}}", r"\boxed{ }", r"\boxed{1", "1"]),
    ],
)
def test_a_reward_pays_for_what_is_right(reward, answer, right, wrong):
    assert {response: reward("", response, answer) for response in right} == dict.fromkeys(right, 1.0)
    assert {response: reward("", response, answer) for response in wrong} == dict.fromkeys(wrong, 0.0)


def test_boxes_are_found_in_linear_time():
    assert boxed(r"} \boxed{a \boxed{b} \boxed{c}") == ["b", "c"]
    assert boxed(r"\boxed{" * 100_000) == []
    assert boxed(r"\boxed{" * 100_000 + "}" * 100_000) == [r"\boxed{" * 99_999 + "}" * 99_999]


@pytest.mark.parametrize(
    ("value", "what"),
    [(float("inf"), "returned"), ("1.0", "str"), (None, "NoneType"), ([1.0, 0.0], "list"), (1e300, "float32")],
)
def test_a_reward_is_a_finite_number(value, what):
    assert number_of(2) == 2.0
    with refused(NotANumberError, naming=(what,)):
        number_of(value)


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
def test_a_reward_that_cannot_be_called_is_refused(path, complaint):
    with refused(ConfigError, naming=complaint):
        load_reward(path)
