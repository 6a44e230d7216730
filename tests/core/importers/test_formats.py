"""Traces from other programs' dumps: small dumps of the documented shapes, written here."""

import gzip
import json
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.refused import refused
from tltlab.errors import ConfigError, TraceError
from tltlab.importers import rows
from tltlab.importers.formats import guess, import_dump
from tltlab.importers.sources import read
from tltlab.importers.token_counts import CharsPerToken, FolderTokenizer, token_counter
from tltlab.traces import storage
from tltlab.traces.storage import check_parquet


class WordCounter:
    """One token per word."""

    note = "token counts are words"

    def count(self, texts):
        return [len(text.split()) for text in texts]


WORDS = WordCounter()


def jsonl(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def verl_row(prompt, response, step, score=0.0, **extra):
    return {"input": prompt, "output": response, "gts": "4", "score": score, "step": step, **extra}


@pytest.fixture
def verl(tmp_path):
    """Two steps of a verl dump; the rows of a group are apart, as its batch balancing leaves them."""
    folder = tmp_path / "rollout_data"
    jsonl(
        folder / "2.jsonl",
        verl_row("what is 2 + 2 ?", "it is four", 2, 1.0, acc=True, request_id="a"),
        verl_row("say é", "é", 2, float("nan")),
        verl_row("what is 2 + 2 ?", "five", 2, 0.0),
        verl_row("say é", "", 2, -1.0),
    )
    jsonl(folder / "10.jsonl", verl_row("say é", "é é é é", 10, 0.5), verl_row("say é", "no", 10))
    return folder


def trl_frame(step, prompts, completions, **columns):
    return pd.DataFrame(
        {"step": step, "prompt": prompts, "completion": completions, **columns, "advantage": np.zeros(len(prompts))}
    )


@pytest.fixture
def trl(tmp_path):
    """An output folder of a GRPOTrainer: step 2 logs the completions of step 1 again."""
    folder = tmp_path / "out" / "completions"
    folder.mkdir(parents=True)
    first = {"accuracy_reward": [1.0, 0.0], "format_reward": [0.5, np.nan], "note": ["a", "b"]}
    for step in (1, 2):
        frame = trl_frame(step, ["hi there", "hi there"], ["one two three", "one"], **first)
        frame.to_parquet(folder / f"completions_{step:05d}.parquet")
    third = {"accuracy_reward": [np.nan, 0.0], "format_reward": [np.nan, 0.5], "note": ["c", "d"]}
    trl_frame(3, ["hi there", "bye"], ["one", "two"], **third).to_parquet(folder / "completions_00003.parquet")
    return folder.parent


# verl


def test_a_verl_dump_is_a_trace(verl):
    trace = import_dump(verl, tokens=WORDS, workers=4)
    assert trace.rl_steps == [2, 10]
    outcomes, workload = trace.outcomes, trace.workload
    assert outcomes["response_tokens"].tolist() == [3, 1, 1, 1, 4, 1]
    assert workload["prompt_tokens"].tolist() == [6, 2, 6, 2, 2, 2]
    assert outcomes["sample"].tolist() == [0, 0, 1, 1, 0, 1]
    np.testing.assert_array_equal(outcomes["reward"], [1.0, np.nan, 0.0, -1.0, 0.5, 0.0])
    manifest = trace.manifest
    assert (manifest.kind, manifest.source, manifest.num_workers) == ("imported", "verl rollout dump rollout_data", 4)
    assert (manifest.group_size, manifest.max_response_tokens, manifest.num_rl_steps) == (2, 4, 2)
    # The same input is the same prompt in every step.
    first, second = workload["prompt_id"].iloc[0], workload["prompt_id"].iloc[1]
    assert workload["prompt_id"].tolist() == [first, second, first, second, second, second]
    assert "é" not in second
    assert workload["epoch"].tolist() == [0, 0, 0, 0, 1, 1]


def test_a_response_of_the_caps_length_was_cut(verl):
    trace = import_dump(verl, tokens=WORDS, max_response_tokens=3)
    assert trace.outcomes["finish_reason"].tolist() == ["length", "stop", "stop", "stop", "length", "stop"]
    # A count of text may come out above the cap; a length of the engine may not.
    assert trace.outcomes["response_tokens"].max() == 3


def test_counts_in_the_dump_need_no_tokenizer(tmp_path):
    row = verl_row("p", "text", 1, prompt_length=7, response_length=12.0)
    trace = import_dump(jsonl(tmp_path / "d" / "1.jsonl", row))
    assert trace.outcomes["response_tokens"].tolist() == [12]
    assert trace.workload["prompt_tokens"].tolist() == [7]
    assert "token counts" not in trace.manifest.notes
    with refused(TraceError, naming=("1.jsonl", "1", "12", "8")):
        import_dump(tmp_path / "d", max_response_tokens=8)


def test_a_row_without_its_step_has_that_of_its_file(tmp_path):
    row = verl_row("p", "text", 1)
    del row["step"]
    assert import_dump(jsonl(tmp_path / "17.jsonl", row), tokens=WORDS).rl_steps == [17]
    with refused(TraceError, naming=("rows.jsonl", "1")):
        import_dump(jsonl(tmp_path / "rows.jsonl", row), tokens=WORDS)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"input": "a", "output": "b", "sco', ("2", "JSON")),
        ("[1]", ("2", "0", "1", "JSON")),
        ("3", ("2", "3", "JSON")),
        ('{"input": "a", "score": 1}', ("2",)),
        ('{"input": 3, "output": "b", "score": 1, "step": 1}', ("2", "3")),
        ('{"input": "a", "output": "b", "score": "x", "step": 1}', ("x", "2")),
        ('{"input": "a", "output": "b", "score": Infinity, "step": 1}', ("2",)),
        (f'{{"input": "a", "output": "b", "score": {10**399}, "step": 1}}', ("2", "score")),
        ("[" * 100_000, ("2", "JSON")),
        ('{"input": "a", "output": "b", "score": 0, "step": -1}', ("2", "-1")),
        ('{"input": "a", "output": "b", "score": 0, "step": true}', ("2",)),
        (
            '{"input": "a", "output": "b", "step": 1, "finish_reason": "?"}',
            ("?", "2", "finish_reason"),
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, says):
    path = jsonl(tmp_path / "1.jsonl", verl_row("a", "b", 1))
    path.write_text(path.read_text() + line + "\n")
    with refused(TraceError, naming=("1.jsonl", *says)):
        import_dump(path, tokens=WORDS)


def test_bytes_that_are_no_text_and_empty_files_are_refused(tmp_path):
    (tmp_path / "1.jsonl").write_bytes(b'{"input": "\xff"}\n')
    with refused(TraceError, naming=("1.jsonl",)):
        import_dump(tmp_path / "1.jsonl", tokens=WORDS)
    (tmp_path / "2.jsonl").write_text("\n\n")
    with refused(TraceError, naming=("2.jsonl",)):
        import_dump(tmp_path / "2.jsonl", tokens=WORDS)


# TRL


def test_trl_completions_are_a_trace_and_those_logged_again_are_read_once(trl):
    trace = import_dump(trl, tokens=WORDS)
    assert trace.rl_steps == [1, 3]
    assert trace.outcomes["response_tokens"].tolist() == [3, 1, 1, 1]
    assert trace.workload["prompt_tokens"].tolist() == [2, 2, 2, 1]
    assert trace.outcomes["sample"].tolist() == [0, 1, 0, 0]
    assert trace.manifest.group_size is None
    notes = trace.manifest.notes
    assert "1 logged steps repeat the completions of the step before and are left out" in notes


def test_rewards_of_trl_are_added_and_the_manifest_says_which(trl):
    trace = import_dump(trl, tokens=WORDS)
    np.testing.assert_array_equal(trace.outcomes["reward"], [1.5, 0.0, np.nan, 0.5])
    assert "reward: accuracy_reward + format_reward" in trace.manifest.notes
    assert import_dump(trl, tokens=WORDS, reward_columns=["format_reward"]).outcomes["reward"][0] == 0.5
    with refused(TraceError, naming=("0",)):
        import_dump(trl, tokens=WORDS, reward_columns=["speed"])


@pytest.mark.parametrize("shape", ["parquet", "table", "lines", "list", "chat"])
def test_trl_completions_in_any_file_say_the_same(tmp_path, shape):
    frame = trl_frame(4, ["hi there", "hi there"], ["one two three", "one"], reward=[1.0, 0.0])
    path = tmp_path / f"saved.{'parquet' if shape == 'parquet' else 'json'}"
    records = frame.to_dict("records")
    if shape == "parquet":
        frame.to_parquet(path)
    elif shape == "table":
        path.write_text(json.dumps({"columns": list(frame), "data": frame.to_numpy().tolist()}, indent=1))
    elif shape == "lines":
        jsonl(path, *records)
    elif shape == "list":
        path.write_text(json.dumps(records, indent=1))
    else:
        chats = [{**r, "prompt": [{"role": "user", "content": r["prompt"]}]} for r in records]
        jsonl(path, *chats)
    trace = import_dump(path, tokens=WORDS)
    assert trace.rl_steps == [4]
    assert trace.outcomes["response_tokens"].tolist() == [3, 1]
    assert trace.outcomes["reward"].tolist() == [1.0, 0.0]
    assert trace.workload["prompt_tokens"].tolist() == [2, 2]


def test_a_table_with_a_short_row_is_refused(tmp_path):
    table = {"columns": ["step", "prompt", "completion"], "data": [[1, "p", "c"], [1, "p"]]}
    with refused(TraceError, naming=("p", "1", "[1", "]", "3")):
        import_dump(jsonl(tmp_path / "t.json", table), tokens=WORDS)


# vLLM


def test_a_csv_of_requests_keeps_when_each_came_and_went(tmp_path):
    path = tmp_path / "requests.csv"
    path.write_text(
        "request_id,input_toks,output_toks,arrival_time,queued_ts,first_token_ts,last_token_ts\n"
        "bench-0,2358,531,2026-08-20 23:19:40.08,27536.5,27537.25,27554.5\n"
        "bench-1,1034,769,2026-08-20 23:19:40.34,27537.0,27537.25,27562.0\n"
    )
    trace = import_dump(path)
    assert trace.workload["prompt_tokens"].tolist() == [2358, 1034]
    assert trace.outcomes["response_tokens"].tolist() == [531, 769]
    assert (trace.outcomes["t_finish"] - trace.outcomes["t_submit"]).tolist() == [18.0, 25.0]
    assert (trace.outcomes["t_first_token"] - trace.outcomes["t_submit"]).tolist() == [0.75, 0.25]


def test_requests_of_a_log_go_by_many_names(tmp_path):
    path = jsonl(
        tmp_path / "log.jsonl",
        {"request_id": "a", "prompt_tokens": 5, "completion_tokens": 9, "arrival_time": 50.0, "ttft_ms": 250.0,
         "e2e_latency": 2.0, "finish_reason": "stop", "dp_rank": 1, "max_tokens": 16},
        {"request_id": "b", "input_len": 5, "output_len": 16, "arrival_time": 51.0, "first_token_time": 51.5,
         "finish_time": 60.0, "finish_reason": "length", "dp_rank": 0, "max_tokens": 16},
        {"id": "c", "usage": {"prompt_tokens": 4, "completion_tokens": 3}, "max_tokens": 8,
         "choices": [{"finish_reason": "tool_calls"}]},
        {"custom_id": "d", "error": None, "max_tokens": 8,
         "response": {"body": {"id": "x", "usage": {"prompt_tokens": 4, "completion_tokens": 8}}}},
    )  # fmt: skip
    trace = import_dump(path)
    outcomes = trace.outcomes
    assert outcomes["prompt_id"].tolist() == ["a", "b", "c", "d"]
    assert outcomes["response_tokens"].tolist() == [9, 16, 3, 8]
    assert outcomes["finish_reason"].tolist() == ["stop", "length", "stop", "length"]
    assert trace.workload["max_response_tokens"].tolist() == [16, 16, 8, 8]
    assert outcomes["worker"].tolist()[:2] == [1, 0]
    assert outcomes["t_finish"].tolist()[:2] == [2.0, 10.0]
    assert outcomes["t_first_token"].tolist()[:2] == [0.25, 1.5]
    assert outcomes["t_submit"].isna().tolist() == [False, False, True, True]
    assert "2 requests have no start time: their times are unknown" in trace.manifest.notes


def test_a_request_that_failed_or_made_no_token_counts_as_aborted(tmp_path):
    row = {"prompt_tokens": 5, "start_time": 7.0, "latency": 2.0}
    path = jsonl(
        tmp_path / "log.jsonl",
        row | {"output_tokens": 9}, row | {"output_tokens": 0}, row | {"error": "timed out"},
        row | {"output_tokens": 3, "success": False},
    )  # fmt: skip
    trace = import_dump(path, max_response_tokens=9)
    assert trace.outcomes["finish_reason"].tolist() == ["length", "abort", "abort", "abort"]
    assert trace.outcomes["response_tokens"].tolist() == [9, 0, 0, 3]
    assert "3 requests failed or made no token and count as aborted" in trace.manifest.notes


def test_groups_of_a_log(tmp_path):
    row = {"prompt_tokens": 5, "output_tokens": 9}
    by_id = jsonl(tmp_path / "a.jsonl", *[{**row, "prompt_id": p, "rl_step": 3} for p in "xyx"])
    assert import_dump(by_id).outcomes[["rl_step", "prompt_id", "sample"]].to_numpy().tolist() == [
        [3, "x", 0], [3, "y", 0], [3, "x", 1]
    ]  # fmt: skip
    by_text = jsonl(tmp_path / "b.jsonl", *[{**row, "prompt": p} for p in ("one", "two", "one")])
    assert import_dump(by_text).outcomes["sample"].tolist() == [0, 0, 1]
    by_place = jsonl(tmp_path / "c.jsonl", *[{**row, "request_id": i} for i in range(4)])
    assert import_dump(by_place, group_size=2).outcomes["prompt_id"].tolist() == ["s0-p0", "s0-p0", "s0-p1", "s0-p1"]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"usage": {"completion_tokens": 3}, "choices": [{}, {}]}, ("2",)),
        ({"output_tokens": 3, "words": 7}, ("prompt_tokens",)),
        ({"prompt_tokens": 4, "output_tokens": 1.5}, ("output_tokens", "1", "5")),
        (
            {"prompt_tokens": 4, "output_tokens": 3, "start_time": "now"},
            ("now", "start_time"),
        ),
        (
            {"prompt_tokens": 4, "output_tokens": 3, "start_time": 101.0, "latency": -2.0},
            ("99", "0", "101"),
        ),
    ],
)
def test_a_wrong_request_is_refused(tmp_path, row, says):
    with refused(TraceError, naming=says):
        import_dump(jsonl(tmp_path / "log.jsonl", row), form="vllm")


# All


def test_the_content_says_the_format(tmp_path, verl, trl):
    assert guess(verl) == "verl"
    assert guess(trl) == guess(trl / "completions") == "trl"
    assert guess(jsonl(tmp_path / "b.jsonl", {"usage": {"completion_tokens": 1}})) == "vllm"
    (tmp_path / "lengths.csv").write_text("5\n9\n")
    assert guess(tmp_path / "lengths.csv") == "csv"
    with refused(TraceError, naming=("--format",)):
        guess(jsonl(tmp_path / "c.jsonl", {"a": 1, "b": 2}))
    benchmark = {"model_id": "m", "completed": 2, "total_output_tokens": 30, "output_lens": [10, 20], "ttfts": [0.5, 1]}
    with refused(TraceError, naming=("model_id", "output_lens")):
        guess(jsonl(tmp_path / "d.json", benchmark))
    (tmp_path / "empty").mkdir()
    with refused(TraceError, naming=("neither",)):
        guess(tmp_path / "empty")
    with refused(TraceError):
        import_dump(tmp_path / "nothing")


@pytest.mark.parametrize(("form", "says"), [("verl", ("<step>.jsonl",)), ("trl", ("completions_<step>.parquet",))])
def test_a_folder_of_something_else_is_refused(tmp_path, form, says):
    with refused(TraceError, naming=(*says, "in")):
        import_dump(tmp_path, form=form, tokens=WORDS)


LENGTHS = [310, 4096, 95, 120]
STEPS = [1, 1, 2, 2]
ROWS = list(zip(STEPS, LENGTHS, strict=True))


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("a.csv", ["global_step,group,len_s,response_length", *(f"{s},g{s},0.5,{n}" for s, n in ROWS)]),
        ("a.csv", ["Step;Response Length", *(f"{s};{n}" for s, n in ROWS)]),
        ("a.tsv", ["iteration\tcompletion_length", *(f"{s}\t{n}" for s, n in ROWS)]),
        ("a.csv", ["epoch,length", *(f"{s},{n}" for s, n in ROWS)]),
        ("a.jsonl", [json.dumps({"step": s, "response_len": n, "text": "x"}) for s, n in ROWS]),
        ("a.jsonl", [json.dumps({"step": s, "response_lengths": [n for t, n in ROWS if t == s]}) for s in (1, 2)]),
        ("a.json", [json.dumps([{"step": s, "tokens": n} for s, n in ROWS])]),
    ],
)
def test_a_table_of_lengths_is_read_whatever_it_is_written_as(tmp_path: Path, name: str, lines: list[str]):
    (tmp_path / name).write_text("\n".join(lines) + "\n")
    trace = read(tmp_path / name)
    assert trace.outcomes["response_tokens"].tolist() == LENGTHS
    assert trace.outcomes["rl_step"].tolist() == STEPS
    assert trace.manifest.kind == "imported"


def test_lengths_are_read_from_parquet_arrays_and_frames(tmp_path: Path):
    frame = pd.DataFrame({"step": STEPS, "num_tokens": LENGTHS, "reward": 0.5})
    frame.to_parquet(tmp_path / "a.parquet")
    for source in (tmp_path / "a.parquet", frame, np.reshape(LENGTHS, (2, 2))):
        by_step = read(source).outcomes.groupby("rl_step")["response_tokens"].apply(list).tolist()
        assert by_step == [[310, 4096], [95, 120]]
    (tmp_path / "a.json").write_text(json.dumps(LENGTHS))
    (tmp_path / "a.txt").write_text("310\n4096\n95\n120\n")
    alone = (LENGTHS, np.array(LENGTHS), pd.Series(LENGTHS), tuple(LENGTHS))
    for source in (*alone, tmp_path / "a.json", tmp_path / "a.txt"):
        assert read(source).outcomes["response_tokens"].tolist() == LENGTHS


def test_lengths_that_are_none_are_named_with_their_place():
    cases = (([3, 0], "line 1: got '0'"), ([1.5], "got '1.5'"), (np.zeros((2, 2, 2)), "got shape"), ([], r"got \[\]"))
    for source, told in cases:
        with pytest.raises(TraceError, match=told):
            read(source)


def test_what_a_csv_does_not_say_is_noted(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("5\n9\n9\n2\n7\n")
    notes = import_dump(path, group_size=2).manifest.notes
    assert "the cap is unknown: the longest response (9 tokens) is taken for it" in notes
    assert "prompt tokens are unknown: 0" in notes
    assert "the last group is incomplete: 1 of 2 samples" in notes
    path.write_text("length,prompt_tokens,id\n5,3,a\n9,4,b\n")
    notes = import_dump(path, group_size=2, max_response_tokens=9).manifest.notes
    assert notes == "columns read: response_tokens from length, prompt_tokens (not read: id)"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"group_size": 2}, ()),
        ({"column": "x"}, ()),
        ({"reward_columns": ["x"]}, ()),
        ({"workers": 0}, ("0",)),
        ({"max_response_tokens": 0}, ("0",)),
    ],
)
def test_options_that_do_not_go_with_the_format_are_refused(verl, options, says):
    with refused(ConfigError, naming=says):
        import_dump(verl, tokens=WORDS, **options)


texts = st.text(st.characters(blacklist_categories=["Cs"]), max_size=12)


@settings(max_examples=15, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(0, 3), texts, texts), min_size=1, max_size=20))
def test_any_verl_dump_keeps_every_response_and_its_length(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dump")
    for step in {row[0] for row in rows}:
        jsonl(folder / f"{step}.jsonl", *[verl_row(p, r, step) for s, p, r in rows if s == step])
    trace = import_dump(folder, form="verl", tokens=CharsPerToken(2.0))
    expected = [max(1, -(-len(r) // 2)) for step in sorted({row[0] for row in rows}) for s, _, r in rows if s == step]
    assert trace.outcomes["response_tokens"].tolist() == expected
    groups = trace.workload.groupby(["rl_step", "prompt_id"]).ngroups
    assert groups == len({(step, prompt) for step, prompt, _ in rows})


# Token counts


def test_characters_per_token():
    assert CharsPerToken(3.6).count(["", "a", "seventeen letters"]) == [0, 1, 5]
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with refused(ConfigError, naming=("0",)):
            CharsPerToken(wrong)
    with refused(ConfigError):
        token_counter("folder", 3.6)


def test_a_tokenizer_of_a_folder_counts_all_tokens_of_the_text_and_no_special_ones(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "<s>": 2}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    counter = FolderTokenizer(tmp_path)
    assert counter.count(["a b c", "", "a"] * 200) == [3, 0, 1] * 200
    assert counter.count(["\ud83d a"]) == [2]
    assert "tokenized again" in counter.note


def test_a_folder_without_a_tokenizer_is_refused(tmp_path, monkeypatch):
    with refused(ConfigError, naming=("tokenizer.json",)):
        FolderTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    if find_spec("tokenizers"):
        with refused(ConfigError):
            FolderTokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with refused(ConfigError, naming=("tltlab[dumps]", "--chars-per-token")):
        FolderTokenizer(tmp_path)


# The command


@pytest.fixture
def importing(command):
    return partial(command, "trace", "import")


def test_the_command_writes_a_valid_trace_and_says_what_it_assumed(importing, verl, tmp_path):
    code, out, err = importing(verl, "--out", tmp_path / "t", "--chars-per-token", 3.6, "--workers", 8, "--json")
    assert code == 0
    assert json.loads(out) == {
        "num_rl_steps": 2, "num_responses": 6, "num_tokens": 10, "tables": ["workload", "outcomes"],
        "path": str(tmp_path / "t"),
    }  # fmt: skip
    assert "assumed: token counts are an approximation: characters / 3.6" in err
    manifest = read(tmp_path / "t").manifest
    assert manifest.num_workers == 8
    assert manifest.notes == (
        "token counts are an approximation: characters / 3.6; the cap is unknown: the longest response (3 tokens) is "
        "taken for it; 6 responses do not say how they ended: they count as finished"
    )


def test_the_command_adds_rewards_by_name(importing, trl, tmp_path):
    args = ["--chars-per-token", 3, "--reward", "format_reward", "--reward", "accuracy_reward"]
    assert importing(trl, "--out", tmp_path / "t", *args)[0] == 0
    assert "reward: format_reward + accuracy_reward" in read(tmp_path / "t").manifest.notes


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "give --tokenizer FOLDER, the model's tokenizer, or --chars-per-token 3.6 for an approximation"),
        (["--format", "slime"], "--format is 'slime'; there are: verl, trl, vllm, csv"),
        (["--tokenizer", "nowhere"], "nowhere: no such file"),
    ],
)
def test_wrong_input_of_the_command_is_exit_code_2_and_one_line(importing, verl, tmp_path, args, says):
    code, out, err = importing(verl, "--out", tmp_path / "t", *args)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert says in err
    assert not (tmp_path / "t").exists()


def test_a_line_without_end_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "MOST_JSON_BYTES", 1 << 20)
    (tmp_path / "endless.jsonl").symlink_to("/dev/full")
    with refused(TraceError, naming=("1", "MiB")):
        list(rows.rows_of(tmp_path / "endless.jsonl"))


def test_what_is_packed_is_unpacked_up_to_a_size_and_a_number_of_lines(tmp_path, monkeypatch):
    for name, text in (("few", b"3\n5\n"), ("bomb", b"0" * (1 << 20) + b"1"), ("long", b"1\n" * 200)):
        (tmp_path / f"{name}.csv.gz").write_bytes(gzip.compress(text))
    for trace in (read(tmp_path / "few.csv.gz"), import_dump(tmp_path / "few.csv.gz")):
        assert trace.outcomes["response_tokens"].tolist() == [3, 5]
    monkeypatch.setattr(rows, "MOST_JSON_BYTES", 1 << 20)
    monkeypatch.setattr(rows, "MOST_ROWS", 100)
    for name, limit in (("bomb", "1 MiB"), ("long", "100")):
        for reader in (read, partial(import_dump, form="csv")):
            with pytest.raises(TraceError) as refused:
                reader(tmp_path / f"{name}.csv.gz")
            assert f"{name}.csv.gz" in str(refused.value)
            assert limit in str(refused.value)


def test_a_parquet_file_of_too_many_rows_or_values_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(storage, "MOST_ROWS", 100)
    pq.write_table(pa.table({"a": [0] * 101}), tmp_path / "long.parquet")
    pq.write_table(pa.table({"a": [[0] * 50, [0] * 51]}), tmp_path / "wide.parquet")
    pq.write_table(pa.table({"a": [0] * 100}), tmp_path / "whole.parquet")
    check_parquet(tmp_path / "whole.parquet")
    for name in ("long", "wide"):
        with refused(OSError, naming=("101", "100")):
            check_parquet(tmp_path / f"{name}.parquet")
    with refused(OSError):
        check_parquet(tmp_path)


def test_a_dump_of_too_many_rows_is_refused_before_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "MOST_ROWS", 100)
    pq.write_table(pa.table({"response_tokens": [7] * 101}), tmp_path / "t.parquet")
    with refused(TraceError, naming=("101", "100")):
        list(rows.rows_of(tmp_path / "t.parquet"))
    with refused(TraceError, naming=("101", "100")):
        import_dump(tmp_path / "t.parquet", form="csv")
    row = {"rl_step": 0, "prompt_id": "p", "sample": 0, "turn": 0, "response_tokens": 7, "finish_reason": "stop"}
    pq.write_table(pa.Table.from_pylist([row] * 101), tmp_path / "o.parquet")
    with refused(TraceError, naming=("101", "100")):
        storage.FileTable("outcomes", tmp_path / "o.parquet")
