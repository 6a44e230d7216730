"""Where prompts and answers come from, what becomes of chats, and what is said when a file is wrong."""

import json
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.runtime.data.prompts import read_prompts
from tltlab.runtime.recipe.sections import DataConfig

ROWS = [{"prompt": "a bb", "answer": "1"}, {"prompt": "ccc", "answer": "2"}]
CHAT = (
    "{% for m in messages %}{{ m.role }} : {{ m.content }} ; {% endfor %}"
    "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{% if add_generation_prompt %}assistant :{% endif %}"
)


class Words:
    """A tokenizer that counts letters."""

    def __call__(self, text):
        return {"input_ids": [len(word) for word in text.split()]}


@pytest.fixture(scope="module")
def chat_tokenizer():
    """A word-level tokenizer with a chat template, made here."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "system", "user", "assistant", ":", ";", "be", "kind", "a", "bb", "hello"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", chat_template=CHAT)


def stored(folder, kind, rows):
    """These rows as a file or a folder of this kind."""
    path = folder / f"data.{kind}"
    if kind == "folder":
        path.mkdir()
        Path(stored(path, "jsonl", rows)).rename(path / "train.jsonl")
    elif kind in ("saved", "splits"):
        saved = pytest.importorskip("datasets").Dataset.from_list(rows)
        (saved if kind == "saved" else sys.modules["datasets"].DatasetDict({"train": saved})).save_to_disk(str(path))
    elif kind in ("parquet", "csv"):
        getattr(pd.DataFrame(rows), f"to_{kind}")(path, index=False)
    else:
        path.write_text(json.dumps(rows) if kind == "json" else "".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def loaded(path, rows, tokenizer=None, **config):
    """Prompts of a JSONL file of `rows`."""
    return read_prompts(stored(path, "jsonl", rows), DataConfig(train="x", **config), tokenizer or Words())[0]


@pytest.fixture(autouse=True)
def cached_here(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv", "json", "saved", "splits", "folder"])
def test_prompts_come_from_files_and_from_folders(tmp_path, kind):
    prompts, _ = read_prompts(stored(tmp_path, kind, ROWS), DataConfig(train="x"), Words())
    assert [(p.prompt_id, p.text, p.answer, p.token_ids) for p in prompts] == [
        ("0", "a bb", "1", [1, 2]),
        ("1", "ccc", "2", [3]),
    ]


def test_a_split_is_one_of_a_folders(tmp_path):
    import datasets

    (tmp_path / "files").mkdir()
    for split, row in zip(("train", "test"), ROWS, strict=True):
        Path(stored(tmp_path, "jsonl", [row])).rename(tmp_path / "files" / f"{split}.jsonl")
    parts = {split: datasets.Dataset.from_list([row]) for split, row in zip(("train", "test"), ROWS, strict=True)}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    config = DataConfig(train="x")
    for folder in (str(tmp_path / "files"), str(tmp_path / "saved")):
        assert [p.answer for p in read_prompts(folder, config, Words())[0]] == ["1"]
        assert [p.answer for p in read_prompts(folder, config, Words(), split="test")[0]] == ["2"]
        with refused(ConfigError, naming=("train",)):
            read_prompts(folder, config, Words(), split="validation")


def test_a_dataset_that_cannot_be_fetched_is_named(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with refused(ConfigError, naming=("nobody/nothing", "HF_HUB_OFFLINE")):
        read_prompts("nobody/nothing", DataConfig(train="x", subset="main"), Words())


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])
def test_a_dotted_column_is_a_structs_field(tmp_path, kind):
    rows = [{"extra": {"q": {"text": "a bb"}}, "reward_model": {"ground_truth": 7, "style": "rule"}}]
    source = stored(tmp_path, kind, rows)
    names = {"prompt_column": "extra.q.text", "answer_column": "reward_model.ground_truth"}
    ((prompt,), _) = read_prompts(source, DataConfig(train="x", **names), Words())
    assert (prompt.text, prompt.answer) == ("a bb", "7")
    assert loaded(tmp_path, [{"prompt": "a", "a.b": "1"}], answer_column="a.b")[0].answer == "1", "or a name with a dot"
    with refused(ConfigError, naming=("reward_model", "ground_truth")):
        missing = names | {"answer_column": "reward_model.truth"}
        read_prompts(stored(tmp_path, "jsonl", rows), DataConfig(train="x", **missing), Words())


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("5 + 5\n#### 10", "5 + 5\n#### 10"),
        (42, "42"),
        (0.5, "0.5"),
        (["1", "é"], '["1", "é"]'),
        ({"n": 1}, '{"n": 1}'),
    ],
)
def test_an_answer_becomes_text(tmp_path, answer, text):
    assert loaded(tmp_path, [{"prompt": "a", "answer": answer}])[0].answer == text


def test_a_chat_template_wraps_prompt_and_system(tmp_path, chat_tokenizer):
    plain, told = (
        loaded(tmp_path, ROWS[:1], chat_tokenizer, chat=True, system=system)[0] for system in (None, "be kind")
    )
    assert chat_tokenizer.decode(plain.token_ids) == "user : a bb ; assistant :"
    assert chat_tokenizer.decode(told.token_ids) == "system : be kind ; user : a bb ; assistant :"
    assert plain.text == told.text == "a bb"
    chat_tokenizer.chat_template = CHAT + "{% if kind is defined and not kind %} be{% endif %}"
    unkind = loaded(tmp_path, ROWS[:1], chat_tokenizer, chat=True, chat_template_kwargs={"kind": False})[0]
    chat_tokenizer.chat_template = CHAT
    assert chat_tokenizer.decode(unkind.token_ids) == "user : a bb ; assistant : be"


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])
def test_a_list_of_messages_is_a_chat(tmp_path, chat_tokenizer, kind):
    said = [("system", "be kind"), ("user", "hello"), ("assistant", "bb"), ("user", "a")]
    rows = [{"prompt": [{"role": role, "content": content} for role, content in said], "answer": "1"}]
    source = stored(tmp_path, kind, rows)
    ((prompt,), _) = read_prompts(source, DataConfig(train="x", chat=True, system="unused"), chat_tokenizer)
    whole = "system : be kind ; user : hello ; assistant : bb ; user : a ; assistant :"
    assert chat_tokenizer.decode(prompt.token_ids) == whole
    assert prompt.text == "a"
    with refused(ConfigError, naming=("data.chat",)):
        read_prompts(source, DataConfig(train="x"), chat_tokenizer)


@pytest.mark.parametrize(
    "prompt",
    [
        ["hello"],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "system", "content": "be kind"}],
        [{"role": "tool", "content": "a"}, {"role": "user", "content": "a"}],
        {"role": "user"},
        [{"role": "user", "content": None}],
        [{"role": "user", "content": ["a"]}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": "\ud800"}],
        [{"role": "user", "content": "a", "name": "\ud800"}],
        [{"role": "user"}],
    ],
    ids=str,
)
def test_a_prompt_that_is_no_chat_is_refused(tmp_path, chat_tokenizer, prompt):
    with refused(ConfigError, naming=("data.jsonl", "line 1", "prompt")):
        loaded(tmp_path, [{"prompt": prompt, "answer": "1"}], chat_tokenizer, chat=True)


def test_a_chat_needs_a_template(tmp_path):
    for settings in ({"chat": True}, {"system": "be kind"}):
        with refused(ConfigError, naming=("data.chat",)):
            loaded(tmp_path, ROWS, **settings)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("prompt", "a \ud800"), ("prompt_id", "a \ud800"), ("answer", "a \ud800"), ("answer", ["1", {"x": "\udc00"}]),
        ("prompt", ""), ("prompt", " \n"), ("answer", float("nan")), ("prompt", float("nan")), ("prompt", 7),
    ],
    ids=["half in prompt", "half in id", "half in answer", "half in list", "empty", "blank", "no answer", "nan", "7"],
)  # fmt: skip
def test_what_is_no_text_is_refused(tmp_path, column, value):
    rows = [{"prompt_id": "a", "prompt": "a", "answer": "1"}, {"prompt_id": "b", "prompt": "a", "answer": "1"}]
    rows[1][column] = value
    with refused(ConfigError, naming=("data.jsonl", "line 2", column)):
        loaded(tmp_path, rows)


def test_bytes_are_no_text(tmp_path):
    for column in ("prompt", "answer"):
        with refused(ConfigError, naming=("row 0", column, "bytes")):
            read_prompts(stored(tmp_path, "parquet", [ROWS[0] | {column: b"\xff"}]), DataConfig(train="x"), Words())


@pytest.mark.parametrize(
    "template",
    ["{{ messages[0]['content'] + 1 }}", "{{ '\ud83d' }}", "{{ 1 // 0 }}", "{{ messages[7].content.x }}", "{% if %}"],
    ids=["type", "half", "zero", "undefined", "syntax"],
)
def test_a_template_that_fails_is_refused(tmp_path, chat_tokenizer, monkeypatch, template):
    monkeypatch.setattr(chat_tokenizer, "chat_template", template)
    with refused(ConfigError, naming=("line 1", "chat template")):
        loaded(tmp_path, ROWS, chat_tokenizer, chat=True)


def test_too_long_prompts_are_counted(tmp_path):
    source = stored(tmp_path, "jsonl", ROWS)
    prompts, num_dropped = read_prompts(source, DataConfig(train="x", max_prompt_tokens=1), Words())
    assert ([p.prompt_id for p in prompts], num_dropped) == (["1"], 1)
    assert read_prompts(source, DataConfig(train="x"), Words())[1] == 0
    with refused(ConfigError, naming=("1", "2")):
        loaded(tmp_path, ROWS[:1], max_prompt_tokens=1)


@pytest.mark.parametrize(("most", "room", "num"), [(None, 3, 2), (1, 2, 1), (None, None, 2)])
def test_prompts_that_fit_the_context_are_taken(tmp_path, most, room, num):
    source = stored(tmp_path, "jsonl", ROWS)
    assert len(read_prompts(source, DataConfig(train="x", max_prompt_tokens=most), Words(), room=room)[0]) == num


def test_prompt_without_room_for_response_is_refused(tmp_path):
    source = stored(tmp_path, "jsonl", [ROWS[1], *({**ROWS[0], "prompt_id": name} for name in "ab")])
    for most in (None, 2):
        with refused(ConfigError, naming=("data.jsonl", "line 2", "2 tokens", "1 others", "data.max_prompt_tokens")):
            read_prompts(source, DataConfig(train="x", max_prompt_tokens=most), Words(), room=2)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ('{"prompt": "a"}\n', ("answer", "1")),
        ('{"prompt": "a", "answer": "1"}\n\n{"prompt": "a", "answer": null}\n', ("answer", "3")),
        ('{"prompt": "a", "answer": "1"}\n{\n', ("2", "JSON")),
        ("[1]\n", ("1", "JSON")),
        ("", ("rows",)),
        ('{"prompt": "a", "answer": "1", "prompt_id": "x"}\n' * 2, ("x", "1", "2")),
    ],
)
def test_a_broken_data_file_is_refused(tmp_path, text, facts):
    (tmp_path / "data.jsonl").write_text(text)
    with refused(ConfigError, naming=facts):
        read_prompts(str(tmp_path / "data.jsonl"), DataConfig(train="x"), Words())


@pytest.mark.parametrize("name", ["bad.jsonl", "bad.parquet", "none.jsonl", "none.parquet", "none.csv"])
def test_an_unreadable_file_is_named(tmp_path, name):
    for suffix in ("jsonl", "parquet"):
        (tmp_path / f"bad.{suffix}").write_bytes(b"\xff\xfe\x00 no text")
    with refused(ConfigError, naming=(name,)):
        read_prompts(str(tmp_path / name), DataConfig(train="x"), Words())
