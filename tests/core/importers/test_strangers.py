"""Files of others that contradict themselves, or say what is needed under another name: read right or refused."""

import gzip
import json
import random
import re
import time
from functools import partial

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.refused import refused
from tests.traces_of_lengths import import_dump
from tltlab import files
from tltlab.doctor.signatures import SIGNATURES
from tltlab.errors import TraceError
from tltlab.importers import fields, metrics_log, responses, rows, step_metrics
from tltlab.importers.token_counts import CharsPerToken

from .test_formats import check, jsonl
from .test_records import PACKERS


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
        ({"prompt_tokens": 5, "completion_tokens": 9, "total_tokens": 84}, (84, "completion_tokens", 14)),
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


def patterns():
    """All regular expressions over foreign text."""
    for module in (metrics_log, rows, step_metrics, fields):
        yield from (value for value in vars(module).values() if isinstance(value, re.Pattern))
    yield from (form.begins for form in step_metrics.FORMS)
    for framework in step_metrics.FRAMEWORKS:
        yield from (framework.marks, framework.timers)
    yield from step_metrics.LEARNING.values()
    for row in SIGNATURES:
        yield from (re.compile(part, re.IGNORECASE) for part in (*row.patterns, row.context) if part)


MEGABYTE = 1 << 20
RUNS = ("x", " ", "1", "=", "\x1b[", "a_", "a'b': ", "- a", "np.f(")


def test_no_pattern_takes_long_over_any_text():
    """A pattern that looks at a run's letters once for each of them would take 20 s alone."""
    text = "".join(run * (MEGABYTE // len(RUNS) // len(run)) for run in RUNS)
    start = time.process_time()
    for pattern in set(patterns()):
        for _ in pattern.finditer(text.encode() if isinstance(pattern.pattern, bytes) else text):
            pass
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize("text", ["x", " ", "[", '{"a":', "a,"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.log"])
def test_a_long_word_is_answered_at_once(tmp_path, name, text):
    words = text * (MEGABYTE // 4 // len(text))
    for line in (words, json.dumps({"a": words}), f"step:1 - {words}", f"step 1: {{'a': {words}"):
        (tmp_path / name).write_text(line)
        start = time.process_time()
        with pytest.raises(TraceError):
            import_dump(tmp_path / name)
        assert time.process_time() - start < 5.0


LENGTHS = [512, 512, 512, 7, 90, 90]


@pytest.mark.parametrize("mark", [",", "\t", ";"])
@pytest.mark.parametrize("name", ["length,count", "response_tokens,frequency", "output_len,num_responses"])
def test_a_histogram_is_its_lengths(tmp_path, name, mark):
    rows = [name, "512,3", "7,1", "90,2", "33,0"]
    path = tmp_path / ("h.tsv" if mark == "\t" else "h.csv")
    path.write_text("\n".join(rows).replace(",", mark))
    check(import_dump(path), response_tokens=LENGTHS)
    column, count = name.split(",")
    records = [{column: length, count: num} for length, num in ((512, 3), (7, 1), (90, 2))]
    check(import_dump(jsonl(tmp_path / "h.jsonl", *records)), response_tokens=LENGTHS)
    many = jsonl(tmp_path / "many.jsonl", *[{column: 5, count: 10**7}] * 2)
    with refused(TraceError, naming=("20,000,000",)):
        import_dump(many)


def test_a_count_beside_prompts_is_no_histogram(tmp_path):
    trace = import_dump(jsonl(tmp_path / "a.jsonl", {"prompt_id": "p", "response_tokens": 5, "count": 3}))
    check(trace, response_tokens=[5])
    assert "not read: count" in trace.manifest.notes


COLUMNS = {"response_tokens": [5, 9], "prompt_tokens": [1, 2]}


@pytest.mark.parametrize("form", ["csv", "tsv", "jsonl", "json", "parquet", "csv.gz", "jsonl.gz"])
def test_a_name_twice_is_refused_in_every_format(tmp_path, form):
    path, (ending, *packed) = tmp_path / f"a.{form}", form.split(".")
    marks = {"csv": ",", "tsv": "\t"}
    if ending == "parquet":
        pq.write_table(pa.table([[5, 9], [6, 9]], names=["response_tokens", "response_tokens"]), path)
    elif ending in marks:
        path.write_text(marks[ending].join(["response_tokens", "response_tokens\n5", "6\n9", "9\n"]))
    else:
        row = '{"response_tokens": 5, "response_tokens": 6}'
        path.write_text(f"[{row}]" if ending == "json" else f"{row}\n{row}\n")
    if packed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    with refused(TraceError, naming=(str(path), "'response_tokens'", "twice")):
        import_dump(path)


def test_a_metric_with_two_values_in_a_line_is_unknown(tmp_path):
    lines = [
        f"step:{step} - response_length/mean:200 - response_length/max:{most} - response_length/max:900"
        for step, most in ((1, 900), (2, 300))
    ]
    (tmp_path / "a.log").write_text("\n".join(lines) + "\n")
    trace = import_dump(tmp_path / "a.log")
    assert "1 RL steps lack their longest" in trace.manifest.notes


@pytest.mark.parametrize("form", ["csv", "tsv", "jsonl", "parquet"])
def test_columns_have_a_cap_in_every_format(tmp_path, monkeypatch, form):
    for module in (rows, responses):
        monkeypatch.setattr(module, "MOST_COLUMNS", 20)
    names = {f"name {at}": at for at in range(20)} | {"response_tokens": 5}
    path = tmp_path / f"a.{form}"
    frame = pd.DataFrame([names])
    {"csv": frame.to_csv, "tsv": partial(frame.to_csv, sep="\t"), "parquet": frame.to_parquet}.get(
        form, lambda *_, **__: jsonl(path, names)
    )(path, index=False)
    with refused(TraceError, naming=("21", "20")):
        import_dump(path)


@pytest.mark.parametrize("pack", sorted(PACKERS.keys() - {"zip"}))
def test_what_is_packed_too_well_is_refused(tmp_path, monkeypatch, pack):
    monkeypatch.setattr(files, "UNPACKED_BYTES", 1000)
    for name, text in (("a.jsonl", b"[1]\n" * 500_000), ("a.log", b"x\n" * 500_000), ("a.csv", b"5\n" * 500_000)):
        (tmp_path / name).write_bytes(PACKERS[pack](text))
        with refused(TraceError, naming=(name, files.MOST_TIMES)):
            import_dump(tmp_path / name)


def test_lines_of_a_log_have_a_cap(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_log, "_MOST_LINES", 100)
    line = "step:1 - response_length/mean:200 - response_length/max:900"
    (tmp_path / "a.log").write_text("x\n" * 99 + line)
    check(import_dump(tmp_path / "a.log", responses=1), response_tokens=[200])
    (tmp_path / "a.log").write_text("x\n" * 100 + line)
    with refused(TraceError, naming=("101", "100")):
        import_dump(tmp_path / "a.log")
    (tmp_path / "a.log").write_text("x" * (2 << 20) + line)
    with refused(TraceError, naming=("1 MiB",)):
        import_dump(tmp_path / "a.log")


@pytest.mark.parametrize(
    "line",
    [
        "step:{n}/100 - response_length/mean:200 - response_length/max:900",
        "Step {n}/100: {{'completions/mean_length': 200, 'completions/max_length': 900}}",
        " 5%|x  | {n}/100 [01:10<20:00, 9.1s/it]{{'completions/mean_length': 200, 'completions/max_length': 900}}",
        "step {n}/100, response_length/mean=200 response_length/max=900",
        "global_step {n}/100: response_length/mean: 200, response_length/max: 900",
        '{{"step": "{n}/100", "response_length/mean": 200, "response_length/max": 900}}',
        '{{"step": "{n}/100", "response_tokens": 200, "finish_reason": "stop"}}',
    ],
)
def test_steps_of_so_many_are_numbered(tmp_path, line):
    path = tmp_path / ("a.jsonl" if line.startswith('{{"step') else "a.log")
    path.write_text("".join(line.format(n=n) + "\n" for n in (5, 6, 8)))
    assert import_dump(path).rl_steps == [5, 6, 8]


def turns_of(session, prompt, /, *rows, first=1, **names):
    """Records of a conversation: (prompt tokens, tokens, seconds of tools after it) of each turn."""
    names = {"session": "session_id", "turn": "turn", "tool_s": "tool_time_s"} | names
    for at, (asked, tokens, tool_s) in enumerate(rows, first):
        usage = {"prompt_tokens": asked, "completion_tokens": tokens, "total_tokens": asked + tokens}
        unit = 1000 if names["tool_s"].endswith("ms") else 1
        yield {names["session"]: session, names["turn"]: at, "task_id": prompt, names["tool_s"]: unit * tool_s, **usage}


A, B, C = [(9, 4, 2.5), (20, 7, 0.5), (40, 3, 0.0)], [(9, 6, 1.0), (18, 2, 0.0)], [(5, 8, 0.0)]


@pytest.mark.parametrize(
    "names",
    [
        {"session": "conversation_id", "turn": "turn_idx", "tool_s": "tool_latency"},
        {"session": "trajectory_id", "turn": "round", "tool_s": "tool_ms", "first": 0}, {"session": "chat", "first": 3},
        {"session": "dlg", "turn": "k"},
    ],
    ids=lambda names: names.get("session", ""),
)  # fmt: skip
@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_records_of_turns_are_one_response(tmp_path, names, form):
    rows = [*turns_of("a", "p", *A, **names), *turns_of("b", "p", *B, **names), *turns_of("c", "q", *C, **names)]
    random.Random(0).shuffle(rows)
    path = tmp_path / f"a.{form}"
    pd.DataFrame(rows).to_csv(path, index=False) if form == "csv" else jsonl(path, *rows)
    options = {"conversation_column": "dlg", "turn_column": "k"} if names.get("turn") == "k" else {}
    trace = import_dump(path, **options)
    table = trace.outcomes.merge(trace.workload, on=["rl_step", "prompt_id", "sample", "turn"])
    table = table.sort_values(["prompt_id", "sample", "turn"])
    whole = {tuple(part["response_tokens"]): part for _, part in table.groupby(["prompt_id", "sample"])}
    assert whole.keys() == {(4, 7, 3), (6, 2), (8,)}
    assert whole[4, 7, 3]["turn"].tolist() == [0, 1, 2]
    assert whole[4, 7, 3]["tool_s"].fillna(0).tolist() == [0, 2.5, 0.5]
    assert whole[4, 7, 3]["prompt_tokens"].tolist() == [9, 20, 40]
    assert whole[6, 2]["tool_s"].fillna(0).tolist() == [0, 1]
    assert [len(set(table[table["prompt_id"] == name]["sample"])) for name in ("p", "q")] == [2, 1]


def test_turns_without_a_conversation_are_responses(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", *turns_of("a", "p", *A, session="dlg"))
    trace = import_dump(path)
    assert (len(trace.outcomes), "--conversation-column" in trace.manifest.notes) == (3, True)
    assert set(import_dump(path, conversation_column="dlg").outcomes["sample"]) == {0}
    jsonl(path, *turns_of("a", "p", *A, session="dlg", turn="k"))
    with refused(TraceError, naming=("--turn-column", "k")):
        import_dump(path, conversation_column="dlg")


def test_tools_before_a_turn_stay_with_it_and_rewards_go_to_the_first(tmp_path):
    rows = [row | {"reward": None} for row in turns_of("a", "p", (9, 4, 0.0), (20, 7, 2.5), (40, 3, 0.5))]
    rows[-1]["reward"] = 0.75
    outcomes = import_dump(jsonl(tmp_path / "a.jsonl", *rows)).outcomes
    assert outcomes["tool_s"].fillna(0).tolist() == [0, 2.5, 0.5]
    assert outcomes["reward"].fillna(-1).tolist() == [0.75, -1, -1]
    with refused(TraceError, naming=("turn 2", "twice")):
        import_dump(jsonl(tmp_path / "b.jsonl", *rows, rows[1]))


@pytest.mark.parametrize(
    ("figures", "one", "other"),
    [
        ({"median": 2}, "min", "median"), ({"p50": 500, "p90": 300}, "p50", "p90"), ({"p99": 950}, "p99", "max"),
        ({"max": 100}, "mean", "max"), ({"min": 300}, "min", "mean"), ({"sum": 150}, "mean", "sum"),
    ],
)  # fmt: skip
def test_figures_of_lengths_that_exclude_each_other_are_refused(tmp_path, figures, one, other):
    stem, fine = "rollout/response_len/", {"mean": 200.5, "max": 900, "min": 3, "sum": 300}
    keys = {name: stem + name for name in (*fine, *figures, "median", "p90")} | {"sum": "rollout/total_lengths"}
    all_figures = (fine | {"median": 150, "p90": 600}, fine | figures)
    steps = [{"step": at} | {keys[name]: f for name, f in each.items()} for at, each in enumerate(all_figures)]
    trace = import_dump(jsonl(tmp_path / "a.jsonl", *steps))
    assert (trace.rl_steps, f"{keys[one]}, " in trace.manifest.notes) == ([0], True)
    with refused(TraceError, naming=(keys[one], keys[other])):
        import_dump(jsonl(tmp_path / "b.jsonl", *steps[1:]))


TEXTS = ["try " + " and ".join(str(37 * at) for at in range(num)) for num in range(3, 24, 3)]


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (lambda text: {"response": text, "output_len": len(text)}, ("output_len", 19, "characters", "response")),
        (lambda text: {"response": text, "output_len": len(text.split())}, ("output_len", 6, "words", "response")),
        (lambda text: {"response": text, "output_len": len(text) + 9}, ("output_len", 28, "bytes", "response")),
        (lambda text: {"prompt": text, "input_len": len(text), "output_len": 9}, ("input_len", 19, "prompt")),
        (lambda text: {"response": text, "output_len": len(text) // 4}, ()),
        (lambda text: {"response": text[:9], "output_len": len(text)}, ()),
        (lambda text: {"response": text, "output_len": len(text) + 9, "reasoning_tokens": len(text)}, ()),
    ],
)
def test_lengths_of_texts_in_letters_or_words_are_refused(tmp_path, change, facts):
    path = jsonl(tmp_path / "a.jsonl", *map(change, TEXTS))
    if facts:
        with refused(TraceError, naming=facts):
            import_dump(path)
    trace = import_dump(path, **({"column": "output_len"} if facts else {}))
    check(trace, response_tokens=[change(text)["output_len"] for text in TEXTS])


@pytest.mark.parametrize(("num", "turns", "is_read"), [(64, 2, True), (8, 2, False), (80, 2, False), (60, 7, True)])
def test_responses_make_up_the_tokens_of_their_step(tmp_path, num, turns, is_read):
    step = {"step": 1, "response_length/mean": 200, "prompt_length/mean": 50, "perf/total_num_tokens": 250 * 64}
    path = jsonl(tmp_path / "a.jsonl", step | {"num_samples": num, "num_turns/mean": turns})
    if is_read:
        assert import_dump(path).num_rows("outcomes") == num
        return
    with refused(TraceError, naming=("num_samples", num, "perf/total_num_tokens", 16000)):
        import_dump(path)
