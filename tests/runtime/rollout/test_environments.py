"""Tools that responses call: who answers, what a call that fails costs, how turns become a response to learn from."""

import itertools
import os
from array import array
from concurrent.futures import Future, wait
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.runtime.engine.generation import GenerationRequest
from tltlab.runtime.models.make import make_tokenizer
from tltlab.runtime.models.tasks import TASKS
from tltlab.runtime.recipe.sections import EnvironmentConfig
from tltlab.runtime.rollout.environments import (
    Calculator,
    Conversations,
    EnvironmentPool,
    load_environment,
    stop_token_ids,
)
from tltlab.runtime.rollout.worker import EngineWorker
from tltlab.runtime.trainer.samples import Sample

from .scripted_engines import paid, recipe, response, rolled, tools_of, ways

TOKENIZER = make_tokenizer(TASKS["calculator"])
AT_ONCE = EnvironmentConfig(path="calculator", processes=0, max_turns=4)
OWN = """
import os, sys

class Own:
    def step(self, messages):
        said = messages[-1]["content"]
        if said == "hang":
            while True:
                pass
        if said == "raise":
            raise ValueError("the key is SECRET")
        if said == "leave":
            sys.exit(3)
        if said == "exit":
            os._exit(7)
        if said == "number":
            return 5
        if said == "bytes":
            return b"5"
        if said == "panic":
            raise BaseException("as Rust's")
        if said == "halves":
            return Odd("\\ud83d\\ude42 18 \\udcff")
        return None if said == "end" else f"{len(messages)} {os.getpid() != int(messages[0]['content'])}"

class Odd(str):
    def __str__(self):
        raise ValueError

    def __reduce__(self):
        raise ValueError

class Mute:
    pass

class Leaving:
    def __init__(self):
        sys.exit(3)

class Stops(Own):
    stop = 5

class Numbers(Own):
    stop = (5, "\\ud800")

class Whole(Own):
    stop = "= ="
"""


def ids(text):
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def test_the_calculator_answers_what_it_is_asked_last():
    answers = {"ask 3 + 4 =": "7", "ask 30 - 4 - 6 =": "20", "ask 2 + 2 = 4 ask 4 - 9 =": "-5"}
    answers |= dict.fromkeys(["ask 3 + =", "3 + 4 =", "ask 3 + 4 = 7", ""])
    for said, answer in answers.items():
        assert Calculator().step([{"role": "assistant", "content": said}]) == answer, said


def test_an_environment_that_cannot_be_asked_is_refused(tmp_path):
    (tmp_path / "own_env_a.py").write_text(OWN)
    code = [str(tmp_path)]
    assert load_environment("own_env_a:Own", code)
    missing = {"abacus": "calculator", "own_env_a:None_such": "'None_such'", "own_env_a:Mute": "step(messages)"}
    missing["own_env_a:Leaving"] = "SystemExit"
    for path, fact in (missing | {"no_such_module:A": "ModuleNotFoundError"}).items():
        with refused(ConfigError, naming=(path, fact)):
            load_environment(path, code)
    assert recipe({"environment": "calculator"}).rollout.environment == EnvironmentConfig(path="calculator")
    assert stop_token_ids(AT_ONCE, (), TOKENIZER) == tuple(ids("="))
    for stop in ("ask 3", "</tool>"):
        with refused(ConfigError):
            stop_token_ids(AT_ONCE.model_copy(update={"stop": (stop,)}), (), TOKENIZER)
    for name in ("Own", "Stops", "Numbers", "Whole"):
        with refused(ConfigError, naming=("rollout.environment.stop",)):
            stop_token_ids(EnvironmentConfig(path=f"own_env_a:{name}"), code, TOKENIZER)


@pytest.mark.parametrize(
    ("room", "cap", "answer", "cut"),
    [(18, 40, "7", 1), (64, 12, "7", 1), (64, 40, "7 " * 99, 0), (64, 40, "7" * (1 << 24), 0), (64, 40, None, None)],
    ids=["context", "cap", "long", "huge", "over"],
)
def test_a_tool_that_leaves_no_room_cuts(room, cap, answer, cut):
    first, turns = request("calc 3 + 4 go", cap=cap), ["ask 3 + 4 ="] * 2
    pool = EnvironmentPool(AT_ONCE, ())
    pool.ask = lambda messages: ended_with(answer)
    made = Conversations(pool, AT_ONCE, TOKENIZER, ids("="), room)
    asked = first
    for turn in turns:
        made.ended(asked, ids(turn), 0.0)
        asked = next((follow_up.request for follow_up in made.ready(lambda: 0.0, wait_for_one=True)), asked)
        if made.cut or asked is first:
            break
    assert made.cut == (set() if cut is None else {(3, "p", 1, cut)})


def test_a_cut_conversation_counts_as_truncated():
    worker = EngineWorker(recipe({"environment": "calculator"}), 0, cast(Any, None), None)
    worker.environment = EnvironmentPool(AT_ONCE, ()), AT_ONCE, TOKENIZER, tuple(ids("="))

    def generate(requests, follow_ups, **_):
        for asked in requests:
            follow_ups.ended(asked, ids("ask 3 + 4 ="), 0.0)
        assert len(follow_ups.ready(lambda: 0.0, wait_for_one=True)) == 1
        return rolled([response(r.key, ids("ask 3 + 4 =")) for r in requests])

    worker.engine = cast(Any, SimpleNamespace(max_model_len=64, reseed=lambda seed: None, generate=generate))
    requests = [request("calc 3 + 4 go", cap=cap) for cap in (40, 6)]
    requests[1] = replace(requests[1], key=(3, "p", 2, 0))
    got = worker._generate(requests, 3, [0])
    assert [response.finish_reason for response in got.responses] == ["stop", "length"]
    (note,) = got.notes
    assert note.startswith("1 response ")


def ended_with(answer):
    future = Future()
    future.set_result((answer, ""))
    return future


@pytest.mark.parametrize("processes", [0, 1])
def test_a_failed_call_ends_only_its_response(tmp_path, processes):
    (tmp_path / "own_env_b.py").write_text(OWN)
    pool = EnvironmentPool(EnvironmentConfig(path="own_env_b:Own", processes=processes, timeout_s=120), [str(tmp_path)])
    said = ["raise", "leave", *(["exit", "panic"] if processes else []), "number", "bytes", "end", "ask", "halves"]
    first = {"role": "user", "content": str(os.getpid())}
    with closing(pool):
        tasks = [pool.ask([first, {"role": "assistant", "content": text}]) for text in said]
        wait(tasks)
        answers = [pool.answer(task) for task in tasks]
    # As tltlab counts the tokens of such a text.
    assert answers == [None] * (len(said) - 2) + [f"2 {bool(processes)}", "?? 18 ?"]
    failures = pool.take_failures()
    assert len(failures) == (6 if processes else 4)
    assert not any("SECRET" in failure for failure in failures)
    assert any("1 tool call returned a int" in failure for failure in failures)
    assert not pool.take_failures()


def test_a_call_that_takes_too_long_is_ended(tmp_path):
    (tmp_path / "own_env_c.py").write_text(OWN)
    pool = EnvironmentPool(EnvironmentConfig(path="own_env_c:Own", timeout_s=0.2), [str(tmp_path)])
    with closing(pool):
        assert pool.answer(pool.ask([{"role": "assistant", "content": "hang"}])) is None
    (failure,) = pool.take_failures()
    assert "1 tool call took more than 0.2 s" in failure


def request(prompt, cap=40):
    return GenerationRequest(key=(3, "p", 1, 0), prompt_token_ids=[1, *ids(prompt)], max_response_tokens=cap)


def conversation(first, turns, room=64, config=AT_ONCE):
    """What follows each of these turns."""
    made = Conversations(EnvironmentPool(config, ()), config, TOKENIZER, ids("="), room)
    clock = itertools.count(10)
    follow_ups = []
    for turn in turns:
        made.ended(follow_ups[-1].request if follow_ups else first, ids(turn), float(next(clock)))
        come = made.ready(lambda: float(next(clock)), wait_for_one=True)
        assert not made.pending
        follow_ups += come
        if not come:
            break
    return follow_ups


def test_a_turn_continues_behind_what_the_tool_said():
    first = request("calc 3 + 4 - 5 go")
    one, two = conversation(first, ["ask 3 + 4 =", "ask 7 - 5 =", "ans 2"])
    assert (one.request.key, two.request.key) == ((3, "p", 1, 1), (3, "p", 1, 2))
    assert two.request.prompt_token_ids == [1, *ids("calc 3 + 4 - 5 go ask 3 + 4 = 7 ask 7 - 5 = 2")]
    assert (one.observed, two.observed) == (ids("7"), ids("2"))
    assert two.request.max_response_tokens == 40 - 12
    assert (one.submit_s, one.tool_s) == (11.0, 1.0)


def test_it_ends_at_its_limits():
    asks, one_turn = ["ask 3 + 4 ="] * 6, AT_ONCE.model_copy(update={"max_turns": 1})
    first = request("calc 3 + 4 go")
    for more, num in (({}, 3), ({"config": one_turn}, 0), ({"room": 6 + 13}, 2), ({"room": 6 + 12}, 1)):
        assert len(conversation(first, asks, **more)) == num
    for cap, num in ((13, 2), (12, 1)):
        assert len(conversation(request("calc 3 + 4 go", cap=cap), asks)) == num
    wrapped = conversation(first, asks, config=AT_ONCE.model_copy(update={"before": "ans ", "after": " go"}))
    assert wrapped[0].observed == ids("ans 7 go")


def test_turns_become_one_response_with_model_tokens():
    """Two workers; of prompt p0 sample 1 has a second turn."""
    stops, reply = ids("="), ids("7")
    turn = {"t_submit": 3.0, "tool_s": 0.5, "observed": reply}
    config = {"prompts_per_step": 2, "group_size": 2, "environment": "calculator", "max_response_tokens": 20}

    def goes_on(r):
        text, left = [*r.prompt_token_ids, 8, *stops, *reply], r.max_response_tokens - 3
        return replace(r, key=(*r.key[:3], 1), prompt_token_ids=text, max_response_tokens=left)

    def generate(shares, number, quotas):
        said = {"token_ids": [8, *stops], "logprobs": [-1.0, -2.0]}
        parts = []
        for share in shares:
            later = [goes_on(r) for r in share if r.key[1:3] == ("p0", 1)]
            responses = [response(r.key, **said) for r in share]
            responses += [response(r.key, **said, **turn) for r in later]
            parts.append(rolled(responses, 4.0, follow_ups=later, notes=["1 tool call failed"] if later else []))
        return parts

    def halves(requests):
        return [requests[:2], requests[2:]]

    got = ways(config, 2).collect(
        tools_of(generate, 0, halves, rewards=paid(lambda t: float(len(t.token_ids))), policy_version=5)
    )
    (long,) = [t for t in got.trajectories if t.from_tool]
    assert (long.prompt.prompt_id, long.sample) == ("p0", 1)
    assert long.token_ids == array("i", [8, *stops, *reply, 8, *stops])
    assert (list(long.from_tool), list(long.logprobs)) == ([0, 0, 1, 0, 0], [-1.0, -2.0, 0.0, -1.0, -2.0])
    assert list(long.token_versions) == [5] * 5
    assert long.reward == 5.0
    assert [len(t.token_ids) for t in got.trajectories if not t.from_tool] == [2] * 3
    assert got.notes == ["1 tool call failed"]
    drawn = {"token_ids": long.token_ids, "logprobs": long.logprobs, "from_tool": long.from_tool}
    sample = Sample(prompt_token_ids=[1], reward=5.0, group=0, **drawn)
    assert sample.in_arrays().without_tokens().num_drawn == 4
    assert sample.drawn().tolist() == [True, True, False, True, True]

    assert [[r.key for r in share] for share in got.requests] == [[r.key for r in part.responses] for part in got.parts]
