"""Traces from other programs' dumps: small dumps of the documented shapes, written here."""

import gzip
import json
import sys
from functools import partial
from importlib.util import find_spec

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.refused import refused
from tests.traces_of_lengths import import_dump
from tltlab.errors import ConfigError, TraceError
from tltlab.importers import rows
from tltlab.importers.sources import guess, read
from tltlab.importers.token_counts import CharsPerToken, FolderTokenizer, token_counter
from tltlab.traces import storage
from tltlab.traces.storage import check_parquet


class WordCounter:
    """One token per word."""

    note = "token counts are words"

    def count(self, texts):
        return [len(text.split()) for text in texts]


WORDS = WordCounter()
dump = partial(import_dump, tokens=WORDS)


def jsonl(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def verl_row(prompt, response, step, score=0.0, **extra):
    return {"input": prompt, "output": response, "gts": "4", "score": score, "step": step, **extra}


def check(trace, **expected):
    """Columns of the outcomes or else of the workload hold these values."""
    for name, values in expected.items():
        table = trace.outcomes if name in trace.outcomes else trace.workload
        np.testing.assert_array_equal(table[name], values, err_msg=name)


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
    return pd.DataFrame({"step": step, "prompt": prompts, "completion": completions, "advantage": 0.0, **columns})


@pytest.fixture
def trl(tmp_path):
    """An output folder of a GRPOTrainer: step 2 logs the completions of step 1 again."""
    folder = tmp_path / "out" / "completions"
    folder.mkdir(parents=True)
    first = ["hi there", "hi there"], ["one two three", "one"], [1.0, 0.0], [0.5, np.nan]
    third = ["hi there", "bye"], ["one", "two"], [np.nan, 0.0], [np.nan, 0.5]
    for step, (prompts, texts, accuracy, form) in enumerate((first, first, third), 1):
        frame = trl_frame(step, prompts, texts, accuracy_reward=accuracy, format_reward=form, note=["a", "b"])
        frame.to_parquet(folder / f"completions_{step:05d}.parquet")
    return folder.parent


# verl


def test_a_verl_dump_is_a_trace(verl):
    trace = dump(verl, workers=4)
    # The same input is the same prompt in every step.
    first, second = trace.workload["prompt_id"][:2]
    assert "é" not in second
    check(
        trace,
        rl_step=[2] * 4 + [10] * 2,
        prompt_id=[first, second, first, second, second, second],
        sample=[0, 0, 1, 1, 0, 1],
        epoch=[0, 0, 0, 0, 1, 1],
        prompt_tokens=[6, 2, 6, 2, 2, 2],
        response_tokens=[3, 1, 1, 1, 4, 1],
        reward=[1.0, np.nan, 0.0, -1.0, 0.5, 0.0],
    )
    manifest = trace.manifest
    assert (manifest.kind, manifest.source, manifest.num_workers) == ("imported", "verl rollout dump rollout_data", 4)
    assert (manifest.group_size, manifest.max_response_tokens, manifest.num_rl_steps) == (2, 4, 2)
    # A count of text may come out above the cap; a length of the engine may not.
    cut = dump(verl, max_response_tokens=3)
    check(cut, finish_reason=["length", *["stop"] * 3, "length", "stop"], response_tokens=[3, 1, 1, 1, 3, 1])


def test_counts_in_the_dump_need_no_tokenizer(tmp_path):
    row = verl_row("p", "text", 1, prompt_length=7, response_length=12.0)
    trace = import_dump(jsonl(tmp_path / "d" / "1.jsonl", row))
    check(trace, response_tokens=[12], prompt_tokens=[7])
    assert "token counts" not in trace.manifest.notes
    with refused(TraceError, naming=("1.jsonl", "1", "12", "8")):
        import_dump(tmp_path / "d", max_response_tokens=8)


def test_a_row_without_its_step_has_its_files(tmp_path):
    row = verl_row("p", "text", 1)
    del row["step"]
    assert dump(jsonl(tmp_path / "17.jsonl", row)).rl_steps == [17]
    with refused(TraceError, naming=("rows.jsonl", "1")):
        dump(jsonl(tmp_path / "rows.jsonl", row))


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ('{"input": "a", "output": "b", "sco', ("JSON",)),
        ("[" * 100_000, ("JSON",)),
        ('{"input": "a", "score": 1}', ("output",)),
        ('{"input": 3, "output": "b", "score": 1, "step": 1}', ("input", "3")),
        ('{"input": "a", "output": "b", "score": "x", "step": 1}', ("score", "x")),
        ('{"input": "a", "output": "b", "score": Infinity, "step": 1}', ("score",)),
        (f'{{"input": "a", "output": "b", "score": {10**399}, "step": 1}}', ("score",)),
        ('{"input": "a", "output": "b", "score": 0, "step": -1}', ("step", "-1")),
        ('{"input": "a", "output": "b", "score": 0, "step": true}', ("step",)),
        ('{"input": "a", "output": "b", "step": 1, "finish_reason": "?"}', ("finish_reason", "?")),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, facts):
    path = jsonl(tmp_path / "1.jsonl", verl_row("a", "b", 1))
    path.write_text(path.read_text() + line + "\n")
    with refused(TraceError, naming=("1.jsonl", 2, *facts)):
        dump(path)


@pytest.mark.parametrize("content", [b'{"input": "\xff"}\n', b"\n\n"])
def test_files_without_text_are_refused(tmp_path, content):
    (tmp_path / "1.jsonl").write_bytes(content)
    with refused(TraceError, naming=("1.jsonl",)):
        dump(tmp_path / "1.jsonl")


# TRL


def test_trl_completions_are_read_once(trl):
    trace = dump(trl)
    check(
        trace,
        rl_step=[1, 1, 3, 3],
        sample=[0, 1, 0, 0],
        prompt_tokens=[2, 2, 2, 1],
        response_tokens=[3, 1, 1, 1],
        reward=[1.5, 0.0, np.nan, 0.5],
    )
    assert trace.manifest.group_size is None
    assert "1 logged steps repeat" in trace.manifest.notes
    assert "reward: accuracy_reward + format_reward" in trace.manifest.notes
    assert dump(trl, reward_columns=["format_reward"]).outcomes["reward"][0] == 0.5
    with refused(TraceError, naming=("speed", "0")):
        dump(trl, reward_columns=["speed"])


SAVED = trl_frame(4, ["hi there", "hi there"], ["one two three", "one"], reward=[1.0, 0.0])
RECORDS = SAVED.to_dict("records")
CHATS = [{**record, "prompt": [{"role": "user", "content": record["prompt"]}]} for record in RECORDS]


@pytest.mark.parametrize(
    "text",
    [
        None,
        json.dumps({"columns": list(SAVED), "data": SAVED.to_numpy().tolist()}, indent=1),
        "\n".join(map(json.dumps, RECORDS)),
        json.dumps(RECORDS, indent=1),
        "\n".join(map(json.dumps, CHATS)),
    ],
    ids=["parquet", "table", "lines", "list", "chat"],
)
def test_trl_completions_are_read_from_any_file(tmp_path, text):
    path = tmp_path / f"saved.{'parquet' if text is None else 'json'}"
    SAVED.to_parquet(path) if text is None else path.write_text(text)
    check(dump(path), rl_step=[4, 4], response_tokens=[3, 1], reward=[1.0, 0.0], prompt_tokens=[2, 2])


def test_a_table_with_a_short_row_is_refused(tmp_path):
    table = {"columns": ["step", "prompt", "completion"], "data": [[1, "p", "c"], [1, "p"]]}
    with refused(TraceError, naming=("p", "1", "[1", "]", "3")):
        dump(jsonl(tmp_path / "t.json", table))


# vLLM


def test_requests_of_a_log_go_by_many_names(tmp_path):
    path = jsonl(
        tmp_path / "log.jsonl",
        {"request_id": "a", "prompt_tokens": 5, "completion_tokens": 9, "finish_reason": "stop", "dp_rank": 1,
         "max_tokens": 16},
        {"request_id": "b", "input_len": 5, "output_len": 16, "finish_reason": "length", "dp_rank": 0,
         "max_tokens": 16},
        {"id": "c", "usage": {"prompt_tokens": 4, "completion_tokens": 3}, "max_tokens": 8,
         "choices": [{"finish_reason": "tool_calls"}]},
    )  # fmt: skip
    trace = import_dump(path)
    check(
        trace,
        prompt_id=["a", "b", "c"],
        response_tokens=[9, 16, 3],
        finish_reason=["stop", "length", "stop"],
        max_response_tokens=[16, 16, 8],
        worker=[1, 0, np.nan],
    )


def test_requests_that_made_nothing_are_aborted(tmp_path):
    made = ({"output_tokens": 9}, {"output_tokens": 0}, {"error": "timed out"}, {"output_tokens": 3, "success": False})
    trace = import_dump(
        jsonl(tmp_path / "log.jsonl", *({"prompt_tokens": 5} | more for more in made)), max_response_tokens=9
    )
    check(trace, finish_reason=["length", "abort", "abort", "abort"], response_tokens=[9, 0, 0, 3])
    assert "3 requests failed" in trace.manifest.notes


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        ({"usage": {"completion_tokens": 3}, "choices": [{}, {}]}, ("2",)),
        ({"output_tokens": 3, "words": 7}, ("prompt_tokens",)),
        ({"prompt_tokens": 4, "output_tokens": 1.5}, ("output_tokens", "1.5")),
    ],
)
def test_a_wrong_request_is_refused(tmp_path, row, facts):
    with refused(TraceError, naming=facts):
        import_dump(jsonl(tmp_path / "log.jsonl", row), form="vllm")


# All


def test_the_content_determines_the_format(tmp_path, verl, trl):
    (tmp_path / "lengths.csv").write_text("5\n9\n")
    requests = jsonl(tmp_path / "b.jsonl", {"usage": {"completion_tokens": 1}})
    places = (verl, trl, trl / "completions", requests, tmp_path / "lengths.csv")
    assert [guess(place) for place in places] == ["verl", "trl", "trl", "csv", "csv"]
    (tmp_path / "empty").mkdir()
    for place, facts in (
        (jsonl(tmp_path / "c.jsonl", {"a": 1, "b": 2}), ("--format",)),
        (tmp_path / "empty", ("empty",)),
        (tmp_path / "nothing", ("nothing",)),
    ):
        with refused(TraceError, naming=facts):
            import_dump(place)


@pytest.mark.parametrize(("form", "file"), [("verl", "<step>.jsonl"), ("trl", "completions_<step>.parquet")])
def test_a_folder_of_something_else_is_refused(tmp_path, form, file):
    with refused(TraceError, naming=(file,)):
        dump(tmp_path, form=form)


LENGTHS = [310, 4096, 95, 120]
STEPS = [1, 1, 2, 2]
ROWS = list(zip(STEPS, LENGTHS, strict=True))


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("a.csv", ["global_step,group,len_s,response_length", *(f"{s},g{s},0.5,{n}" for s, n in ROWS)]),
        ("a.csv", ["epoch,length", *(f"{s},{n}" for s, n in ROWS)]),
        ("a.jsonl", [json.dumps({"step": s, "response_len": n, "text": "x"}) for s, n in ROWS]),
        ("a.jsonl", [json.dumps({"step": s, "response_lengths": [n for t, n in ROWS if t == s]}) for s in (1, 2)]),
        ("a.json", [json.dumps([{"step": s, "tokens": n} for s, n in ROWS])]),
    ],
)
def test_a_table_of_lengths_has_many_shapes(tmp_path, name, lines):
    (tmp_path / name).write_text("\n".join(lines) + "\n")
    check(read(tmp_path / name), response_tokens=LENGTHS, rl_step=STEPS)


def test_lengths_are_read_from_parquet_arrays_and_frames(tmp_path):
    frame = pd.DataFrame({"step": STEPS, "num_tokens": LENGTHS, "reward": 0.5})
    frame.to_parquet(tmp_path / "a.parquet")
    for source in (tmp_path / "a.parquet", frame, np.reshape(LENGTHS, (2, 2))):
        assert read(source).outcomes["rl_step"].value_counts().tolist() == [2, 2]
        check(read(source), response_tokens=LENGTHS)
    (tmp_path / "a.json").write_text(json.dumps(LENGTHS))
    (tmp_path / "a.txt").write_text("310\n4096\n95\n120\n")
    alone = (LENGTHS, np.array(LENGTHS), pd.Series(LENGTHS), tuple(LENGTHS))
    for source in (*alone, tmp_path / "a.json", tmp_path / "a.txt"):
        check(read(source), response_tokens=LENGTHS)


@pytest.mark.parametrize(
    ("source", "facts"),
    [([3, -1], ("1", "-1")), ([1.5], ("1.5",)), (np.zeros((2, 2, 2)), ("(2, 2, 2)",)), ([], ("[]",))],
)
def test_what_is_no_length_is_named(source, facts):
    with refused(TraceError, naming=facts):
        read(source)


def test_fields_missing_in_a_csv_are_noted(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("5\n9\n9\n2\n7\n")
    notes = import_dump(path, group_size=2).manifest.notes
    for facts in ("cap is unknown", "(9 tokens)", "prompt tokens are unknown: 0", "1 of 2 samples"):
        assert facts in notes
    path.write_text("length,prompt_tokens,id\n5,3,a\n9,4,b\n")
    trace = import_dump(path, group_size=2, max_response_tokens=9)
    check(trace, finish_reason=["stop", "length"])
    assert trace.manifest.notes.startswith("columns read: response_tokens from length, prompt_tokens (not read: id); ")
    assert "no column names the RL steps" in trace.manifest.notes
    path.write_text("prompt,length\n" + "".join(f"{at // 4},{5 + at}\n" for at in range(16)))
    trace = import_dump(path)
    assert trace.workload["prompt_id"].nunique() == 4
    assert "names the prompts" not in trace.manifest.notes
    path.write_text("length\n5\n9\n")
    assert "no column names the prompts" in import_dump(path).manifest.notes


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"responses": 2}, ("verl",)),
        ({"reward_columns": ["x"]}, ("verl",)),
        ({"workers": 0}, ("0",)),
        ({"max_response_tokens": 0}, ("0",)),
    ],
)
def test_options_of_other_formats_are_refused(verl, options, facts):
    with refused(ConfigError, naming=facts):
        dump(verl, **options)


texts = st.text(st.characters(blacklist_categories=["Cs"]), max_size=12)


@settings(max_examples=15, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(0, 3), texts, texts), min_size=1, max_size=20))
@example(rows=[(0, "", "NULL")])
@example(rows=[(0, "None", "nan"), (0, "null", "")])
def test_verl_dumps_keep_every_response_and_length(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dump")
    for step in {row[0] for row in rows}:
        jsonl(folder / f"{step}.jsonl", *[verl_row(p, r, step) for s, p, r in rows if s == step])
    trace = import_dump(folder, form="verl", tokens=CharsPerToken(2.0))
    expected = [max(1, -(-len(r) // 2)) for step in sorted({row[0] for row in rows}) for s, _, r in rows if s == step]
    assert trace.outcomes["response_tokens"].tolist() == expected
    assert trace.workload.groupby(["rl_step", "prompt_id"]).ngroups == len({row[:2] for row in rows})


# Token counts


def test_characters_per_token():
    assert CharsPerToken(3.6).count(["", "a", "seventeen letters"]) == [0, 1, 5]
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with refused(ConfigError, naming=(wrong,)):
            CharsPerToken(wrong)
    with refused(ConfigError, naming=("tokenizer",)):
        token_counter("folder", 3.6)


def test_a_folders_tokenizer_counts_no_special_tokens(tmp_path):
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


def test_the_command_writes_a_trace_and_its_assumptions(command, verl, tmp_path):
    options = ("--chars-per-token", 3.6, "--workers", 8, "--json")
    code, out, err = command("trace", "import", verl, "--out", tmp_path / "t", *options)
    assert code == 0
    counts = {"num_rl_steps": 2, "num_responses": 6, "num_tokens": 10, "tables": ["workload", "outcomes"]}
    assert json.loads(out) == counts | {"path": str(tmp_path / "t")}
    manifest = read(tmp_path / "t").manifest
    assert manifest.num_workers == 8
    for facts in ("3.6", "(3 tokens)", "6 responses"):
        assert facts in manifest.notes
        assert facts in err


@pytest.mark.parametrize(
    ("args", "facts"),
    [
        ([], ("--tokenizer", "--chars-per-token")),
        (["--format", "slime"], ("--format", "slime", "'verl', 'trl', 'vllm', 'csv'")),
        (["--tokenizer", "nowhere"], ("nowhere",)),
    ],
)
def test_wrong_input_is_exit_code_2(command, verl, tmp_path, args, facts):
    code, out, err = command("trace", "import", verl, "--out", tmp_path / "t", *args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert all(fact in err for fact in facts)
    assert not (tmp_path / "t").exists()


def test_a_line_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "MOST_JSON_BYTES", 1 << 20)
    (tmp_path / "endless.jsonl").symlink_to("/dev/full")
    with refused(TraceError, naming=("1", "MiB")):
        list(rows.rows_of(tmp_path / "endless.jsonl"))


def test_what_is_packed_is_unpacked_within_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "MOST_JSON_BYTES", 1 << 20)
    monkeypatch.setattr(rows, "MOST_ROWS", 100)
    for text, limit in ((b"0" * (1 << 20) + b"1", "1 MiB"), (b"1\n" * 200, "100")):
        (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text))
        for reader in (read, partial(import_dump, form="csv")):
            with refused(TraceError, naming=("a.csv.gz", limit)):
                reader(tmp_path / "a.csv.gz")


def test_parquet_files_of_too_many_values_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "MOST_ROWS", 100)
    for name, column in (("whole", [0] * 100), ("long", [0] * 101), ("wide", [[0] * 50, [0] * 51])):
        pq.write_table(pa.table({"response_tokens": column}), tmp_path / f"{name}.parquet")
    row = {"rl_step": 0, "prompt_id": "p", "sample": 0, "turn": 0, "response_tokens": 7, "finish_reason": "stop"}
    pq.write_table(pa.Table.from_pylist([row] * 101), tmp_path / "outcomes.parquet")
    check_parquet(tmp_path / "whole.parquet")
    with refused(OSError):
        check_parquet(tmp_path)
    for error, look, name in (
        (OSError, check_parquet, "long"),
        (OSError, check_parquet, "wide"),
        (TraceError, lambda path: list(rows.rows_of(path)), "long"),
        (TraceError, partial(import_dump, form="csv"), "long"),
        (TraceError, lambda path: storage.StoredTable.open("outcomes", [path]), "outcomes"),
    ):
        with refused(error, naming=("101", "100")):
            look(tmp_path / f"{name}.parquet")
