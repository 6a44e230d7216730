"""Whatever stands in a file, what reads it gives a result or a sentence: bytes of a small corpus, changed by chance.

`TLTLAB_FUZZ=100000` tries that many changed files, others in each run. What fell once is kept in `FELL`.
"""

import os
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.traces_of_lengths import import_dump
from tltlab.acceptance.load import load_acceptance
from tltlab.costs.load import load_costs, load_stages
from tltlab.errors import TltlabError
from tltlab.files import read_json
from tltlab.importers.metrics_log import records_of
from tltlab.importers.sources import read_lengths
from tltlab.importers.token_counts import CharsPerToken
from tltlab.policies.policy import load_policy
from tltlab.traces.schema import Contents

HERE = Path(__file__).parent
TINY = HERE.parents[1] / "traces" / "tiny"
EXAMPLES = max(10, int(os.environ.get("TLTLAB_FUZZ") or 0))

Edit = tuple[str, float, float, bytes]


def dump(path):
    return import_dump(path, tokens=CharsPerToken(4.0))


def recipe(path):
    return import_module("tltlab.runtime.recipe.recipe").load_recipe(path)


READERS = {
    "acceptance.json": (load_acceptance,),
    "costs.json": (load_costs, load_stages),
    "manifest.json": (lambda path: Contents.read(path.parent),),
    "policy_table.json": (lambda path: load_policy(str(path)),),
    "policy_adaptive.json": (lambda path: load_policy(str(path)),),
    "verl.jsonl": (dump, read_lengths, read_json),
    "vllm.jsonl": (import_dump, read_lengths),
    "trl.jsonl": (dump, read_lengths),
    "lengths.csv": (import_dump, read_lengths),
    "lengths.tsv": (import_dump, read_lengths),
    "lengths.json": (import_dump, read_lengths),
    "lengths.jsonl": (import_dump, read_lengths),
    "columns.json": (dump, read_lengths),
    "metrics.log": (import_dump, lambda path: list(records_of(path))),
    "verl.log": (import_dump,),
    "trl.log": (import_dump,),
    "nemo.log": (import_dump,),
    "skyrl.log": (import_dump,),
    "recipe.toml": (recipe,),
    "outcomes.parquet": (import_dump, read_lengths),
}
TOKENS = (
    b"", b"0", b"-1", b"1e999", b"9" * 400, b"NaN", b"Infinity", b"null", b"true", b"[]", b"{}", b'""', b"[" * 5000,
    b'{"a":' * 5000, b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\\ud800", b"\r", b"\n\n", b",", b'"', b"'",
    b"\xef\xbb\xbf",
)  # fmt: skip
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "double", "put"]),
        st.floats(0, 1, exclude_max=True),
        st.floats(0, 1, exclude_max=True),
        st.sampled_from(TOKENS) | st.binary(max_size=8),
    ),
    min_size=1,
    max_size=4,
)


def edited(data, edits):
    for kind, where, much, token in edits:
        at = int(where * len(data))
        to = min(at + 1 + int(much * 40), len(data))
        if kind == "flip" and data:
            data = data[:at] + bytes([data[at] ^ 1 << int(much * 8)]) + data[at + 1 :]
        elif kind == "cut":
            data = data[:at] + data[to:]
        elif kind == "double":
            data = data[:to] + data[at:to] + data[to:]
        else:
            data = data[:at] + token + data[to if much < 0.5 else at :]
    return data


def source(name):
    return (TINY if name in ("manifest.json", "outcomes.parquet") else HERE / "corpus").joinpath(name).read_bytes()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


def check(place, name, data):
    path = place / name
    path.write_bytes(data)
    for reader in READERS[name]:
        try:
            reader(path)
        except TltlabError as refused:
            sentence, code = str(refused), refused.exit_code
        else:
            continue
        assert sentence
        assert code in (1, 2)


@pytest.mark.parametrize("name", READERS)
def test_what_is_not_changed_is_read(place, name):
    (place / name).write_bytes(source(name))
    if name != "outcomes.parquet":
        READERS[name][0](place / name)


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=EXAMPLES)
@given(edits=EDITS)
def test_changed_file_is_read_or_refused_in_sentence(place, name, edits):
    check(place, name, edited(source(name), edits))


FELL = [
    ("verl.jsonl", b'{"input": "a", "output": "b", "score": ' + b"9" * 400 + b', "step": 1}'),
    ("lengths.json", b"[" * 100_000),
    ("lengths.jsonl", b'{"response_tokens": 7}\nNaN'),
    ("vllm.jsonl", b"[]"),
    ("skyrl.log", b"(entrypoint pid=42) step:1 - generate/avg_num_tokens:3" + b"8" * 80 + b".5"),
    ("verl.log", b"step:1 - perf/total_num_tokens:1e13 - response_length/mean:306.2 - prompt_length/mean:100.0"),
    ("verl.jsonl", b'{"input": "a"\n{"input": "b", "score": 1.5, "step": 1e9991}'),
    ("outcomes.parquet", (HERE / "corpus" / "fell.parquet").read_bytes()),  # it ended the process
]


@pytest.mark.parametrize(("name", "data"), FELL)
def test_what_fell_once_is_refused_in_a_sentence(place, name, data):
    check(place, name, data)
