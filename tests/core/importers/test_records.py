"""Responses of other programs in the shapes that people bring: token ids, groups, numbers as text, packed files."""

import bz2
import gzip
import io
import json
import lzma
from functools import partial
from zipfile import ZipFile

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from tests.refused import refused
from tests.traces_of_lengths import import_dump
from tltlab.errors import TraceError
from tltlab.importers.fields import conversation_texts
from tltlab.importers.rows import Reading
from tltlab.importers.sources import read_lengths
from tltlab.importers.token_counts import CharsPerToken

from .test_formats import WORDS, check, jsonl

SIZES = [4, 7, 5, 12]
STEPS = {"step": 3}
dump = partial(import_dump, tokens=WORDS)


def ids(size, start=7):
    return [(start + 37 * i * i) % 3000 + 1 for i in range(size)]


def of(tmp_path, records, **options):
    """The trace of records in a file of JSON Lines."""
    return dump(jsonl(tmp_path / "records.jsonl", *records), **options)


# Lists


@pytest.mark.parametrize(
    "record",
    [
        lambda n: {"output_ids": ids(n), "logprobs": [-0.5] * n},
        lambda n: {"completion_ids": ids(n), "prompt_ids": [1, 2]},
        lambda n: {"generated_token_ids": ids(n)},
        lambda n: {"responses": ids(n), "prompts": [1, 2]},
        lambda n: {"response_tokens": ids(n), "sample_idx": n},
        lambda n: {"tokens": [1, 2, 3, *ids(n)], "response_length": n},
        lambda n: {"tokens": [1, 2, 3, *ids(n)], "loss_mask": [1] * n},
        lambda n: {"tokens": ids(n), "response_length": n, "loss_mask": [1] * n, "reward": 0.5, "response": "x"},
        lambda n: {"prompt": "q", "response": "x", "response_length": float(n), "total_length": n + 3, "reward": 0.5},
        lambda n: {"input_ids": [1, 2, 3, *ids(n)], "loss_mask": [0] * 3 + [1] * n, "logprobs": [0.0] * (n + 3)},
        lambda n: {"input_ids": [1, 2, 3], "output_ids": ids(n)},
        lambda n: {"input_ids": [1, 2, 3, *ids(n)], "responses": ids(n)},
        lambda n: {"response_ids": [*ids(n), 0, 0], "response_mask": [1] * n + [0, 0]},
        lambda n: {"response_ids": ids(n), "loss_mask": [0] * n},
        lambda n: {"response_ids": ids(n) + [0] * (20 - n), "uid": "a"},
        lambda n: {"logprobs": [-0.1] * n},
        lambda n: {"response_ids": ids(n), "logprobs": [[-0.1, token] for token in ids(n)]},
        lambda n: {"response": "x " * n, "tokens": [["x", -0.1]] * 2},
        lambda n: {"outputs": [{"index": 0, "text": "x", "token_ids": ids(n)}], "prompt_token_ids": [1]},
        lambda n: {"seqlen": n + 9, "prompt_len": 9, "completion": "x"},
        lambda n: {"token_ids": [1, 2, *ids(n)], "token_loss_mask": [0, 0] + [1] * n, "input_lengths": n + 2},
    ],
    ids=[
        "output_ids", "completion_ids", "generated", "responses", "one sample", "slime",
        "slime without length", "slime whole", "openrlhf", "areal", "sglang", "whole and response", "mask of padding",
        "mask without ones", "padded", "log-probs", "pairs", "text and pairs", "vllm", "areal dump",
        "nemo-rl",
    ],
)  # fmt: skip
def test_lists_of_token_ids_are_counted(tmp_path, record):
    trace = of(tmp_path, [STEPS | record(n) for n in SIZES])
    check(trace, response_tokens=SIZES, rl_step=[3] * 4)


@pytest.mark.parametrize(
    ("record", "prompt_tokens"),
    [
        ({"prompt_ids": [1, 2], "response_ids": [5]}, 2),
        ({"prompt_tokens": [8, 9, 4], "response_tokens": [5], "reward": 1.0, "finish_reason": "stop"}, 3),
        ({"tokens": [1, 2, 3, 5], "response_length": 1, "response": "x"}, 3),
        ({"input_ids": [1, 2, 3, 5], "response_ids": [5]}, 0),
        ({"input_ids": [1, 2, 3, 5], "loss_mask": [0, 0, 0, 1]}, 3),
        ({"usage": {"total_tokens": 9, "completion_tokens": 1}}, 8),
    ],
    ids=["lists", "tokens", "slime", "prompt or whole", "mask", "total"],
)
def test_prompts_are_the_rest_of_lists(tmp_path, record, prompt_tokens):
    check(of(tmp_path, [record]), response_tokens=[1], prompt_tokens=[prompt_tokens])


def test_lists_of_one_size_need_not_be_padded(tmp_path):
    check(of(tmp_path, [{"response_ids": [7] * 9}, {"response_ids": [7] * 9}]), response_tokens=[9, 9])
    with refused(TraceError, naming=("seqlen", 1)):
        of(tmp_path, [{"seqlen": 5, "prompt_len": 9}])


def test_a_recorded_number_wins_over_its_list(tmp_path):
    trace = of(tmp_path, [{"response_length": 9, "response_ids": ids(n)} for n in (9, 8)])
    check(trace, response_tokens=[9, 9])
    assert "1 responses have another number of response_ids than response_length" in trace.manifest.notes


@pytest.mark.parametrize(
    "records",
    [
        [{"step": 1, "response_tokens": [310, 4096, 95]}],
        [{"step": n, "tokens": [310, 4096, 95, 120]} for n in range(3)],
        [{"response_tokens": [*ids(n - 1), 150_000]} for n in SIZES],
        [{"response_tokens": [*ids(n - 1), 2]} for n in SIZES],
    ],
    ids=["response_tokens", "tokens", "above vocabulary of lengths", "same end"],
)
def test_lists_of_two_readings_are_refused(tmp_path, records):
    with refused(TraceError, naming=("records.jsonl", "--lists lengths", "--lists ids")):
        of(tmp_path, records)
    name = next(name for name, value in records[0].items() if isinstance(value, list))
    lists = [record[name] for record in records]
    check(of(tmp_path, records, lists="ids", column=name), response_tokens=list(map(len, lists)))
    check(of(tmp_path, records, lists="lengths"), response_tokens=[n for one in lists for n in one])


@pytest.mark.parametrize("record", [{"token_ids": ids(4)}, {"tokens": ids(4), "finish_reason": "stop"}])
def test_tokens_of_prompt_or_response_are_refused(tmp_path, record):
    name = next(iter(record))
    with refused(TraceError, naming=(name, "--column")):
        of(tmp_path, [record])
    check(of(tmp_path, [record], column=name), response_tokens=[4])


@pytest.mark.parametrize("more", [{"finish_reason": "stop"}, {"response": "one text"}], ids=["reason", "text"])
def test_lengths_beside_one_response_are_refused(tmp_path, more):
    record = {"step": 1, "response_lengths": [310, 95], **more}
    with refused(TraceError, naming=(next(iter(more)), "--lists ids")):
        of(tmp_path, [record])
    check(of(tmp_path, [record], lists="ids"), response_tokens=[2])


def test_a_batch_in_a_record_is_spread(tmp_path):
    batch = {
        "prompt_token_ids": [[1, 2], [1, 2], [3], [3]], "response_ids": list(map(ids, SIZES)),
        "rewards": [0.0, 1.0, 0.5, 0.0],
        "loss_masks": [[1] * n for n in SIZES], "stop_reasons": ["stop", "length", "stop", "stop"],
    }  # fmt: skip
    trace = of(tmp_path, [batch])
    check(trace, response_tokens=SIZES, prompt_tokens=[2, 2, 1, 1], reward=batch["rewards"], sample=[0, 1, 0, 1])
    check(trace, finish_reason=batch["stop_reasons"])
    texts = [{"prompt": f"q {i}", "responses": ["a b", "a b c"]} for i in range(2)]
    check(of(tmp_path, texts), response_tokens=[2, 3, 2, 3], sample=[0, 1, 0, 1])
    with refused(TraceError, naming=("responses", 2, "response_lens", 3)):
        of(tmp_path, [{"responses": ["a", "b"], "response_lens": [1, 2, 3]}])


def test_lists_in_columns_of_tables_are_counted(tmp_path):
    frame = pd.DataFrame({"uid": [*"aabb"], "response_ids": [np.array(ids(n)) for n in SIZES]})
    frame.to_parquet(tmp_path / "a.parquet")
    frame.assign(response_ids=frame["response_ids"].map(list)).to_csv(tmp_path / "a.csv", index=False)
    for source in (tmp_path / "a.parquet", tmp_path / "a.csv", frame):
        check(read_lengths(source).trace, response_tokens=SIZES, prompt_id=[*"aabb"])


# Identity


@pytest.mark.parametrize("name", ["uid", "request_id", "prompt_id", "group_id", "problem_id", "prompt_idx", "index"])
@pytest.mark.parametrize(
    "record",
    [
        {"input": "same", "output": "x y", "score": 1.0, "step": 1},
        {"prompt": "same", "completion": "x", "step": 1},
        {"prompt_tokens": 3, "completion_tokens": 4},
    ],
    ids=["verl", "trl", "request"],
)
def test_a_record_has_its_group(tmp_path, name, record):
    trace = of(tmp_path, [record | {name: value, "n": n} for n, value in enumerate("abba")])
    groups = trace.workload["prompt_id"].tolist()
    assert (groups[0] == groups[3] != groups[1] == groups[2], trace.manifest.group_size) == (True, 2)
    pd.DataFrame([{name: value, "length": 4} for value in "abba"]).to_csv(tmp_path / "a.csv", index=False)
    assert import_dump(tmp_path / "a.csv").manifest.group_size == 2


def test_ids_of_each_request_are_no_groups(tmp_path):
    rows = [{"input": f"q{i // 2}", "output": "x", "score": 0, "step": 1, "request_id": f"r{i}"} for i in range(4)]
    assert of(tmp_path, rows).manifest.group_size == 2
    same = [row | {"input": "q"} for row in rows]
    trace = of(tmp_path, same, group_size=2)
    check(trace, sample=[0, 1, 0, 1])
    assert "same text" in trace.manifest.notes
    lengths = [{"id": i, "response_length": 3} for i in range(4)]
    assert of(tmp_path, lengths, group_size=2).workload["prompt_id"].nunique() == 2


def test_prompts_keep_their_names_across_steps(tmp_path):
    def rows(uid):
        steps = ((step, prompt) for step in (1, 2) for prompt in "ab" for _ in range(2))
        return [{"input": p, "output": "x", "score": 0, "step": s, "uid": uid(s, p)} for s, p in steps]

    # Made anew in each RL step, or the same: the text says that prompts come back.
    for uid in (lambda s, p: f"{s}{p}", lambda s, p: p):
        check(of(tmp_path, rows(uid)), epoch=[0] * 4 + [1] * 4)
    numbered = [{"step": s, "prompt_idx": p, "response_length": 3} for s in (1, 2) for p in (0, 0, 1, 1)]
    trace = of(tmp_path, numbered)
    check(trace, epoch=[0] * 8)
    assert "prompt_idx counts" in trace.manifest.notes
    task = [{"task_id": "math", "response_length": 3, "prompt_len": 3 + i} for i in range(4)]
    trace = of(tmp_path, task)
    assert (trace.manifest.group_size, "task_id is the same" in trace.manifest.notes) == (None, True)


NESTED = [
    {"step": s, "usage": {"completion_tokens": n}, "meta": {"info": {"len": n + 1}}, "grp": p, "at": {"it": s + 5}}
    for s in (1, 2) for p, n in ((0, 4), (0, 5), (1, 6))
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"column": "meta.info.len"}, {"response_tokens": [5, 6, 7] * 2, "rl_step": [1, 1, 1, 2, 2, 2]}),
        ({"column": "usage.completion_tokens"}, {"response_tokens": [4, 5, 6] * 2, "rl_step": [1, 1, 1, 2, 2, 2]}),
        ({"step_column": "at.it"}, {"rl_step": [6, 6, 6, 7, 7, 7]}),
        ({"group_column": "grp", "column": "meta.info.len"}, {"sample": [0, 1, 0] * 2}),
    ],
)
def test_named_columns_leave_the_others(tmp_path, options, expected):
    check(of(tmp_path, NESTED, **options), **expected)


@pytest.mark.parametrize("option", ["column", "step_column", "group_column", "turn_column"])
def test_a_column_that_is_not_there_is_named(tmp_path, option):
    with refused(TraceError, naming=("'usage.x'", "usage.completion_tokens")):
        of(tmp_path, NESTED, **{option: "usage.x"})


@pytest.mark.parametrize(
    "name", ["response_chars", "responseWords", "Latency (ms)", "generation_time", "score", "uid", "n"]
)
def test_a_lone_column_of_another_name_is_refused(tmp_path, name):
    (tmp_path / "a.csv").write_text(f"{name}\n7\n9\n")
    with refused(TraceError, naming=("a.csv", name, "--column")):
        import_dump(tmp_path / "a.csv")
    check(import_dump(tmp_path / "a.csv", column=name), response_tokens=[7, 9])


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_index_of_data_frame_has_no_name(tmp_path, mark):
    pd.DataFrame({"response_length": [7, 9]}).to_csv(tmp_path / "a.csv", sep=mark)
    check(import_dump(tmp_path / "a.csv"), response_tokens=[7, 9])


def test_column_of_dump_may_be_its_text(tmp_path):
    rows = [{"input": "q", "output": "x", "long": "a b c", "score": 0, "step": s} for s in (1, 2)]
    trace = dump(jsonl(tmp_path / "d" / "1.jsonl", *rows).parent, column="long")
    check(trace, response_tokens=[3, 3], rl_step=[1, 2])


# Values


def test_numbers_may_be_texts(tmp_path):
    written = ["1234", " 1234", "1234.0", 1234.0]
    row = {"input": "q", "output": "x", "step": "2", "score": "0.5", "prompt_length": "12", "acc": "True"}
    rows = [row | {"response_length": n} for n in written]
    check(of(tmp_path, rows), response_tokens=[1234] * 4, prompt_tokens=[12] * 4, rl_step=[2] * 4, reward=[0.5] * 4)


@pytest.mark.parametrize(
    ("cells", "facts"),
    [
        (("1.234", "99"), (2, "1.234", "thousands")),
        (("99", "1.000"), (3, "1.000", "thousands")),
        (("1,234", "99"), (2, "1,234", "thousands")),
        (("1.234.567", "99"), (2, "1.234.567")),
        (("12k", "99"), (2, "12k")),
        (("1,23", "99"), (2, "1,23")),
        (("99", "-1"), (3, "-1")),
        (("99", ""), (3, "''")),
        (("99", "1e9"), (3, "1e9", 2**24 - 1)),
    ],
)
def test_a_number_that_is_none_is_named(tmp_path, cells, facts):
    (tmp_path / "a.csv").write_text("step;length\n" + "".join(f"1;{cell}\n" for cell in cells))
    with refused(TraceError, naming=("a.csv", "length", *facts)):
        import_dump(tmp_path / "a.csv")


CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "get", "arguments": '{"a": 1}'}}]}
TOOL = {"role": "tool", "content": "not counted at all"}
BLOCKS = [{"type": "text", "text": "two words"}, {"type": "image_url", "image_url": {"url": "x"}}]


@pytest.mark.parametrize(
    ("said", "generated"),
    [
        ([CALL, TOOL, {"role": "assistant", "content": "done"}], ['get{"a": 1}', "done"]),
        ([{"role": "assistant", "content": BLOCKS}], ["two words"]),
        ([{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {"b": 2}}]}], ['f{"b": 2}']),
        ([{"role": "assistant", "content": None}], [""]),
        ([{"role": "assistant", "reasoning_content": "hm", "content": "so"}], ["hmso"]),
        ([{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], ["a"]),
        ([{"type": "function_call", "name": "f", "arguments": "{}"}, {"type": "function_call_output", "output": "no"},
          {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "y"}]}], ["f{}", "y"]),
        (BLOCKS, ["two words"]),
        ({"role": "assistant", "content": "one message"}, ["one message"]),
        ("text", ["text"]),
    ],
    ids=["tool call", "blocks", "tool use", "null", "reasoning", "sharegpt", "responses", "bare blocks", "one", "text"],
)  # fmt: skip
def test_generated_text_counts(said, generated):
    assert "".join(conversation_texts(said).generated) == "".join(generated)


@pytest.mark.parametrize(
    "record",
    [
        {"input": [{"role": "user", "content": "q w"}], "output": "SAID", "score": 1, "step": 1},
        {"prompt": [{"role": "user", "content": "q w"}], "completion": "SAID", "step": 1},
        {"messages": "WHOLE"},
        {"responses_create_params": {"input": [{"role": "user", "content": "q w"}]}, "response": {"output": "SAID"}},
        {"task_id": 1, "traj": "WHOLE", "reward": 1.0, "trial": 0},
        {"conversations": "WHOLE"},
    ],
    ids=["verl", "trl", "messages", "nemo gym", "tau-bench", "sharegpt"],
)
def test_conversations_are_counted(tmp_path, record):
    said = [CALL, TOOL, {"role": "assistant", "content": "it is done"}]
    whole = [{"role": "user", "content": "q w"}, *said]
    text = json.dumps(record).replace('"SAID"', json.dumps(said)).replace('"WHOLE"', json.dumps(whole))
    trace = of(tmp_path, [json.loads(text)])
    check(trace, response_tokens=[5], prompt_tokens=[2])
    assert "1 responses have several turns" in trace.manifest.notes


def test_unanswered_messages_are_refused(tmp_path):
    with refused(TraceError, naming=("messages", "1")):
        of(tmp_path, [{"messages": [{"role": "user", "content": "q"}]}])


# Packed files


def zipped(data):
    buffer = io.BytesIO()
    with ZipFile(buffer, "w") as archive:
        archive.writestr("one", data)
    return buffer.getvalue()


PACKERS = {
    "gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zip": zipped,
    "zst": lambda data: pa.Codec("zstd").compress(data, asbytes=True),
    "lz4": lambda data: pa.Codec("lz4").compress(data, asbytes=True),
}  # fmt: skip
ROWS = [{"input": "q", "output": "x y", "score": 0.5, "step": 2, "uid": uid} for uid in "aabb"]
CONTENTS = {
    "l.csv": b"step,uid,length\n1,a,5\n1,a,9\n",
    "l.tsv": b"step\tuid\tlength\n1\ta\t5\n1\ta\t9\n",
    "l.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS).encode(),
    "l.json": json.dumps(ROWS, indent=1).encode(),
    "l.txt": b"5\n9\n",
    "run.log": b"step:1 - response_length/mean:31.5 - response_length/max:90\n" * 3,
}


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("how", PACKERS)
def test_a_packed_file_is_the_same_trace(tmp_path, name, how):
    plain, packed = tmp_path / name, tmp_path / f"{name}.{how}"
    plain.write_bytes(CONTENTS[name])
    packed.write_bytes(PACKERS[how](CONTENTS[name]))
    expected, found = read_lengths(plain).trace, read_lengths(packed).trace
    assert expected.outcomes.equals(found.outcomes)
    assert expected.workload.equals(found.workload)


def test_a_folder_of_packed_steps_is_read(tmp_path):
    for step in (1, 12):
        rows = "".join(json.dumps({**row, "step": step}) + "\n" for row in ROWS)
        (tmp_path / f"{step}.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    check(dump(tmp_path), rl_step=[1] * 4 + [12] * 4)
    (tmp_path / "12.jsonl").write_text("{}")
    with refused(TraceError, naming=("12.jsonl", "12.jsonl.gz")):
        dump(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "facts"),
    [
        ("a.jsonl.gz", gzip.compress(b"{}" * 99)[:-9], ("a.jsonl.gz",)),
        ("a.csv.zst", b"(\xb5/\xfd" + b"broken" * 9, ("a.csv.zst",)),
        ("a.jsonl.zst", b"not packed", ("a.jsonl.zst", "JSON")),
        ("a.pt", b"PK\x03\x04", (".pt", "JSON Lines")),
        ("a.csv", b"PK\x03\x04broken", ("a.csv",)),
        ("a.parquet.gz", gzip.compress(pd.DataFrame({"length": [1]}).to_parquet()), ("a.parquet.gz", "Parquet")),
    ],
    ids=["cut", "damaged", "not packed", "torch", "excel", "packed twice"],
)
def test_what_cannot_be_unpacked_is_named(tmp_path, name, content, facts):
    (tmp_path / name).write_bytes(content)
    with refused(TraceError, naming=facts):
        import_dump(tmp_path / name)


def test_lengths_are_read_by_the_reading(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", *({"step": 1, "response_tokens": ids(n), "gid": n} for n in (5, 5)))
    found = read_lengths(path, Reading(lists="ids", group_column="gid", tokens=CharsPerToken(2.0)))
    check(found.trace, response_tokens=[5, 5], sample=[0, 1])
    assert found.used == {"response_tokens": "response_tokens", "rl_step": "step", "prompt_id": "gid"}
