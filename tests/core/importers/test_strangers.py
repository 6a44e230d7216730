"""Files of others that contradict themselves, or say what is needed under another name: read right or refused."""

import json

import pytest

from tests.refused import refused
from tests.traces_of_lengths import import_dump
from tltlab.errors import TraceError
from tltlab.importers.token_counts import CharsPerToken

from .test_formats import check, jsonl


@pytest.mark.parametrize(
    ("usage", "tokens", "prompt_tokens"),
    [
        ({"promptTokenCount": 5, "candidatesTokenCount": 9, "thoughtsTokenCount": 70, "totalTokenCount": 84}, 79, 5),
        ({"promptTokenCount": 5, "candidatesTokenCount": 9, "thoughtsTokenCount": 70}, 79, 5),
        ({"candidatesTokenCount": 9, "thoughtsTokenCount": 70, "totalTokenCount": 84}, 79, 5),
        ({"prompt_tokens": 5, "completion_tokens": 79, "reasoning_tokens": 70, "total_tokens": 84}, 79, 5),
        ({"prompt_tokens": 5, "completion_tokens": 9, "reasoning_tokens": 70, "total_tokens": 84}, 79, 5),
        (
            {"prompt_tokens": 5, "completion_tokens": 79, "completion_tokens_details": {"reasoning_tokens": 70}},
            79, 5,
        ),
        (
            {"input_tokens": 5, "output_tokens": 9, "cache_read_input_tokens": 90, "cache_creation_input_tokens": 5},
            9, 100,
        ),
        (
            {"prompt_tokens": 100, "completion_tokens": 9, "cache_read_input_tokens": 90, "total_tokens": 109},
            9, 100,
        ),
        (
            {"promptTokenCount": 5, "toolUsePromptTokenCount": 20, "candidatesTokenCount": 9, "totalTokenCount": 34},
            9, 25,
        ),
    ],
)  # fmt: skip
def test_a_total_says_what_is_beside_a_response(tmp_path, usage, tokens, prompt_tokens):
    plain = {"prompt": "q", "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}}
    trace = import_dump(jsonl(tmp_path / "a.jsonl", {"prompt": "q", "usage": usage}))
    check(trace, response_tokens=[tokens], prompt_tokens=[prompt_tokens])
    check(import_dump(jsonl(tmp_path / "b.jsonl", plain)), response_tokens=[3], prompt_tokens=[7])


@pytest.mark.parametrize(
    ("usage", "facts"),
    [
        (
            {"prompt_tokens": 5, "completion_tokens": 9, "total_tokens": 84},
            ("total_tokens", 84, "completion_tokens", 14),
        ),
        ({"completion_tokens": 9, "total_tokens": 5}, ("total_tokens", 5, "completion_tokens", 9)),
        ({"completion_tokens": 9, "reasoning_tokens": 70}, ("reasoning_tokens", 70, "completion_tokens", 9)),
    ],
)  # fmt: skip
def test_counts_that_do_not_add_up_are_refused(tmp_path, usage, facts):
    path = jsonl(tmp_path / "a.jsonl", usage)
    with refused(TraceError, naming=("line 1", "--column", *facts)):
        import_dump(path)
    check(import_dump(path, column="completion_tokens"), response_tokens=[9])


@pytest.mark.parametrize(
    "record",
    [
        {"thinking": "t" * 40, "response": "r" * 8},
        {"reasoning_content": "t" * 40, "completion": "r" * 8},
        {"thoughts": ["t" * 20, "t" * 19], "output": "r" * 8},
        {"result": {"chain_of_thought": "t" * 40, "response": "r" * 8}},
        {"thinking": "t" * 40, "response": f"<t>{'t' * 40}</>rrr"},
        {"reasoning": None, "response": "r" * 49},
        {"thinking": "t" * 40, "response": [{"role": "assistant", "content": "r" * 8}]},
    ],
)
def test_reasoning_beside_a_response_counts(tmp_path, record):
    trace = import_dump(jsonl(tmp_path / "a.jsonl", {"prompt": "q"} | record), tokens=CharsPerToken(1))
    check(trace, response_tokens=[49])
    said = {name: value if isinstance(value, str) else json.dumps(value) for name, value in record.items()}
    rows = jsonl(tmp_path / "b.jsonl", {"prompt": "q"} | said)
    check(import_dump(rows, tokens=CharsPerToken(1)), response_tokens=[49])
