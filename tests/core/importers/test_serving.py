"""Requests of servers, benchmarks and traces of their load; means of RL steps."""

import json

import pandas as pd
import pytest

from tests.refused import refused
from tests.traces_of_lengths import import_dump
from tltlab.errors import TraceError
from tltlab.importers.sources import guess

from .test_formats import check
from .test_records import of

# Means of RL steps


@pytest.mark.parametrize(
    "header",
    [
        "step,mean_length",
        "step,response_length/mean",
        "iteration,avg_output_tokens",
        "rl_step,length_mean",
    ],
)
def test_means_of_steps_are_a_log(tmp_path, header):
    path = tmp_path / "means.csv"
    path.write_text(f"{header}\n1,311.5\n2,400.25\n3,380\n")
    trace = import_dump(path, responses=64)
    assert guess(path) == "metrics"
    means = trace.outcomes.groupby("rl_step")["response_tokens"].mean()
    assert (len(trace.outcomes), means.index.tolist()) == (192, [1, 2, 3])
    assert means.tolist() == pytest.approx([311.5, 400.25, 380], rel=0.02)


def test_one_number_in_each_step_is_asked_for(tmp_path):
    path = tmp_path / "one.csv"
    path.write_text("step,length\n1,311\n2,400\n3,380\n")
    with refused(TraceError, naming=("length", "--format csv", "--format metrics --column length")):
        import_dump(path)
    assert len(import_dump(path, form="csv").outcomes) == 3
    assert len(import_dump(path, form="metrics", column="length", responses=10).outcomes) == 30
    with refused(TraceError, naming=("one.csv", "len")):
        import_dump(path, form="metrics", column="len")


# Serving


def test_requests_of_servers_are_read(tmp_path):
    meta = {"id": "r", "prompt_tokens": 13, "spec_accept_length": 2.2}
    reasons = [{"type": "length"}, {"type": "stop", "matched": 7}, {"type": "abort"}]
    made = [100, 50, 0]
    rows = [
        {"text": "x", "meta_info": {**meta, "finish_reason": reason, "completion_tokens": n}}
        for reason, n in zip(reasons, made, strict=True)
    ]
    check(of(tmp_path, rows), response_tokens=made, prompt_tokens=[13] * 3, finish_reason=["length", "stop", "abort"])
    usage = {"input_tokens": 13, "output_tokens": 8, "output_tokens_details": {"reasoning_tokens": 5}}
    for more in ({"stop_reason": "max_tokens"}, {"status": "incomplete", "object": "response", "output": []}):
        trace = of(tmp_path, [{"id": "a", "usage": usage, **more}])
        check(trace, response_tokens=[8], prompt_tokens=[13], finish_reason=["length"])
    failed = {"custom_id": "b", "response": {"status_code": 500, "body": {"error": {"message": "x"}}}}
    body = {"usage": {"prompt_tokens": 4, "completion_tokens": 8}, "choices": [{"finish_reason": "stop"}]}
    answered = {"custom_id": "a", "response": {"status_code": 200, "body": body}, "error": None}
    trace = of(tmp_path, [failed, answered])
    check(trace, prompt_id=["b", "a"], response_tokens=[0, 8], finish_reason=["abort", "stop"])


def test_benchmarks_are_read_by_request(tmp_path):
    result = {
        "backend": "vllm", "duration": 9.5, "completed": 2, "total_output_tokens": 30, "accept_length": 2.5,
        "input_lens": [5, 6, 7], "output_lens": [10, 0, 20], "ttfts": [0.5, 0, 1], "itls": [[0.1], [], [0.2]],
        "errors": ["", "timed out", ""], "generated_texts": ["a", "", "b"],
    }  # fmt: skip
    trace = of(tmp_path, [result])
    check(trace, response_tokens=[10, 0, 20], prompt_tokens=[5, 6, 7], finish_reason=["stop", "abort", "stop"])
    check(of(tmp_path, [result, result]), rl_step=[0] * 3 + [1] * 3)
    summary = {name: value for name, value in result.items() if not isinstance(value, list)}
    with refused(TraceError, naming=("--save-detailed", "--output-details")):
        of(tmp_path, [summary])
    with refused(TraceError, naming=("steps", 2)):
        of(tmp_path, [{"task": "a", "steps": [{"usage": {"completion_tokens": 5}}] * 2}])


@pytest.mark.parametrize(
    ("record", "prompt_tokens"),
    [
        ({"usage": {"input_tokens": 5, "output_tokens": 9}}, 5),
        ({"usageMetadata": {"promptTokenCount": 5, "candidatesTokenCount": 9}, "candidates": [{"index": 0}]}, 5),
        ({"prompt_eval_count": 5, "eval_count": 9, "total_duration": 10**10}, 5),
        ({"details": {"generated_tokens": 9, "prefill": []}}, 0),
        ({"tokens_evaluated": 5, "tokens_predicted": 9}, 5),
        ({"number_input_tokens": 5, "number_output_tokens": 9}, 5),
        ({"metrics": {"output_sequence_length": {"value": 9, "unit": "tokens"}}}, 0),
        ({"result": {"message": {"role": "assistant", "content": [], "usage": {"output_tokens": 9}}}}, 0),
        ({"response": {"usage": {"completion_tokens": 9}}, "completion_tokens": 9, "prompt_tokens": 5}, 5),
        ({"usage": '{"completion_tokens": 9, "prompt_tokens": 5}'}, 5),
    ],
    ids=[
        "openai",
        "gemini",
        "ollama",
        "tgi",
        "llama.cpp",
        "llmperf",
        "aiperf",
        "anthropic batch",
        "litellm",
        "json in json",
    ],
)
def test_servers_count_under_many_names(tmp_path, record, prompt_tokens):
    check(of(tmp_path, [record]), response_tokens=[9], prompt_tokens=[prompt_tokens])
    cells = {name: value if isinstance(value, str) else json.dumps(value) for name, value in record.items()}
    pd.DataFrame([cells]).to_csv(tmp_path / "a.csv", index=False)
    check(import_dump(tmp_path / "a.csv"), response_tokens=[9], prompt_tokens=[prompt_tokens])


def test_an_answer_with_an_error_is_aborted(tmp_path):
    failed = {"custom_id": "b", "result": {"type": "errored", "error": {"type": "overloaded"}}}
    made = {"custom_id": "a", "result": {"message": {"usage": {"output_tokens": 9}}}}
    check(of(tmp_path, [made, failed]), response_tokens=[9, 0], finish_reason=["stop", "abort"])
    with refused(TraceError, naming=(2, "usage.completion_tokens")):
        of(tmp_path, [{"usage": {"completion_tokens": 4}}, {"usage": None}])


def test_records_within_an_object_are_read(tmp_path):
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a b"}]
    runs = {"info": {}, "simulations": [{"task_id": t, "trial": k, "messages": said} for t in (0, 1) for k in (0, 1)]}
    check(of(tmp_path, [runs]), response_tokens=[2] * 4, prompt_id=["0", "0", "1", "1"], sample=[0, 1, 0, 1])


def test_turns_of_a_record_are_noted(tmp_path):
    row = {"input": "q", "output": "x", "score": 0, "step": 1}
    notes = of(tmp_path, [row | {"num_turns": n} for n in (1, 4, 2)]).manifest.notes
    assert "2 responses have several turns" in notes


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("Time,Input,Output\n1,374,44\n2,396,109\n", ("Time", "Output", "--column")),
        ("prompt_id,mean_length\na,311.2\nb,400.1\n", ("mean_length", "prompt")),
        ("tokens_in,tokens_out\n1,374\n2,396\n", ("tokens_out", "--column")),
    ],
    ids=["numbers under names of texts", "means of prompts", "unknown names"],
)
def test_columns_of_unknown_meaning_are_refused(tmp_path, text, facts):
    (tmp_path / "a.csv").write_text(text)
    with refused(TraceError, naming=facts):
        import_dump(tmp_path / "a.csv")
