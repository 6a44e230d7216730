"""The offline warm-up: what it reads, what it holds out, what it learns and reports, and what it refuses."""

import json
from collections import Counter
from dataclasses import asdict
from functools import cache

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from typer.testing import CliRunner

from tests.refused import refused
from tltlab.errors import InputError, RunError
from tltlab.files import read_json
from tltlab.runtime.cli.train_drafter import train_drafter as command
from tltlab.runtime.drafter.heads.kinds import new_head
from tltlab.runtime.drafter.heads.layouts import load_head
from tltlab.runtime.drafter.offline.chains import acceptance_along, kept_along
from tltlab.runtime.drafter.offline.data import (
    Epochs,
    PromptedText,
    TargetStates,
    load_target,
    read_texts,
    split_by_prompt,
)
from tltlab.runtime.drafter.offline.warm_up import train_drafter
from tltlab.runtime.recipe.drafter import LossConfig, OptimConfig, TextConfig, WarmUpConfig
from tltlab.traces.schema import Manifest
from tltlab.traces.trace import Trace

from ..drafting_text import largest_file
from .easy_target import LONG_CONTEXT, easy_target, quiet, sampled_rows, write_rows

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target(random_model, tmp_path_factory):
    return easy_target(random_model, tmp_path_factory.mktemp("easy"))


@pytest.fixture(scope="module")
def data(target, tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("data") / "responses.jsonl", sampled_rows(target, 48, 40))


def config(kind="eagle", **given):
    settings = {
        # Fewer steps than usual, of which each takes as long.
        "loss": LossConfig(kind=kind, token_weight=1.0, unroll=1 if kind == "eagle" else 2),
        "optim": OptimConfig(lr=6e-3, warmup=3),
        "updates": 20,
        "tokens_per_update": 512,
        "check_every": 5,
        "heldout": 0.2,
        "depth": 6,
    }
    return WarmUpConfig(**settings | given)


@pytest.fixture(scope="module")
def trained(target, data, tmp_path_factory):
    """Trains a head of a kind for 20 updates, once; nobody changes what is in its folder."""

    @cache
    def train(kind):
        out = tmp_path_factory.mktemp("trained") / "head"
        return out, train_drafter(target, data, out, config(kind), quiet)

    return train


@pytest.mark.parametrize("kind", ["eagle", "hass", "eagle3"])
def test_the_report_states_how_much_is_learned(trained, kind):
    out, report = trained(kind)
    before, after = report["before"], report["after"]
    assert before["accept_length"] < 1.3 < 1.8 < after["accept_length"]
    assert after["loss"] < before["loss"]
    assert after["drafts"] == 40 * report["heldout_responses"] == 40 * 10
    assert report["updates"] == 20
    assert [check["update"] for check in report["checks"]] == [5, 10, 15, 20]
    assert read_json(out / "training.json") | {"out": str(out)} == report
    assert load_head(out).method == ("eagle3" if kind == "eagle3" else "eagle")


def text_of(row):
    return PromptedText(prompt_token_ids=row["prompt"], token_ids=row["response"])


def test_the_report_holds_on_unseen_prompts(target, data, trained):
    out, report = trained("eagle")
    texts = list(map(text_of, map(json.loads, data.read_text().splitlines())))
    heldout = split_by_prompt(texts, 0.2, 0)[1]
    model, frozen = load_target(target)
    states = TargetStates(model, (), 1 << 20)
    found = acceptance_along(load_head(out), frozen, [states.of(text) for text in heldout], 6)
    assert asdict(found) == {name: report["after"][name] for name in ("accept_length", "positions", "drafts")}


def test_acceptance_is_that_of_counted_drafts(target):
    """The slow way: count, at every position, how far each draft goes."""
    model, frozen = load_target(target)
    head = new_head(target, "eagle", seed=1)
    [row] = sampled_rows(target, 1, 30)
    sequence = TargetStates(model, (), 1 << 20).of(text_of(row))
    kept = kept_along(head, frozen, sequence, 4).tolist()
    found = acceptance_along(head, frozen, [sequence], 4)
    assert found.accept_length == pytest.approx(1 + sum(kept) / len(kept))
    for step in range(4):
        reached = [k for at, k in enumerate(kept) if k >= step and at + step < len(kept)]
        expected = sum(k > step for k in reached) / len(reached) if reached else None
        assert found.positions[step] == (pytest.approx(expected) if reached else None)


def test_training_stops_at_an_accept_length(target, data, tmp_path):
    report = train_drafter(target, data, tmp_path / "head", config(until_accept_length=1.5, updates=400), quiet)
    assert report["updates"] < 400
    lengths = [check["accept_length"] for check in report["checks"]]
    assert all(length < 1.5 for length in lengths[:-1])
    assert lengths[-1] >= 1.5
    # Another training continues there: it has nothing to do.
    settings = config(until_accept_length=1.5, head=str(tmp_path / "head"))
    more = train_drafter(target, data, tmp_path / "more", settings, quiet)
    assert more["updates"] == 0
    assert more["before"] == more["after"] == report["after"]
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("head", "more")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_states_that_do_not_fit_are_computed_again(target, data, tmp_path):
    kept = train_drafter(target, data, tmp_path / "kept", config(updates=4), quiet)
    again = train_drafter(target, data, tmp_path / "again", config(updates=4, memory_gb=5e-5), quiet)
    assert again["target_tokens"] > 2 * kept["target_tokens"] == 2 * 48 * 45
    assert again["after"] == kept["after"]


def test_an_epoch_uses_each_text_once(target):
    model, _ = load_target(target)
    texts = [PromptedText(prompt_token_ids=[4] * n, token_ids=[5] * 10) for n in range(2, 10)]
    epochs = Epochs(texts, TargetStates(model, (), 1 << 20), np.random.default_rng(0))
    lengths = []
    while len(lengths) < len(texts):
        drawn = epochs.take(40)
        assert sum(sequence.num_rows for sequence in drawn) <= 40
        lengths += [sequence.num_rows for sequence in drawn]
    assert sorted(lengths) == [text.num_tokens - 1 for text in texts]
    [cut] = Epochs([texts[-1]], TargetStates(model, (), 0), np.random.default_rng(0)).take(5)
    assert cut.num_rows == 5 >= cut.prompt_tokens


def test_texts_are_drawn_at_random_and_none_twice(target, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": [4 + n, 5], "response": [6]} for n in range(20)])
    seen = Counter()
    for seed in range(200):
        texts = read_texts(path, TextConfig(responses=5), None, np.random.default_rng(seed))
        firsts = [text.prompt_token_ids[0] for text in texts]
        assert firsts == sorted(set(firsts))
        assert len(firsts) == 5
        seen.update(firsts)
    assert len(seen) == 20
    assert all(25 <= count <= 80 for count in seen.values())


def test_no_held_out_prompt_is_trained_on():
    texts = [PromptedText(prompt_token_ids=[n % 7, 1], token_ids=[n]) for n in range(40)]
    trained, heldout = split_by_prompt(texts, 0.3, np.random.default_rng(0))
    assert len(trained) + len(heldout) == 40
    sides = [{tuple(text.prompt_token_ids) for text in side} for side in (trained, heldout)]
    assert not sides[0] & sides[1]
    assert len(sides[1]) == 2


def test_texts_come_from_traces_and_files(target, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(target)
    rows = [{"prompt": "w1 w2", "response": "w3 w4 w5"}, {"prompt": "w2 w2", "response": "w6"}]
    path = tmp_path / "text.jsonl"
    write_rows(path, rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "text.parquet")
    eos = tokenizer.eos_token_id
    expected = [([5, 6], [7, 8, 9, eos]), ([6, 6], [10, eos])]
    key = {"rl_step": [0, 0], "prompt_id": ["a", "b"], "sample": [0, 0], "turn": [0, 0]}
    Trace.from_tables(
        Manifest(kind="recorded"),
        {
            "workload": pd.DataFrame(
                {**key, "epoch": 0, "prompt_tokens": 2, "max_response_tokens": 9, "policy_version": 0}
            ),
            "outcomes": pd.DataFrame({**key, "response_tokens": [4, 2], "finish_reason": ["stop", "stop"]}),
            "tokens": pd.DataFrame(
                {**key, "prompt_token_ids": [e[0] for e in expected], "token_ids": [e[1] for e in expected]}
            ),
        },
    ).write(tmp_path / "trace")
    for source in (path, tmp_path / "text.parquet", tmp_path / "trace"):
        texts = read_texts(source, TextConfig(), tokenizer, np.random.default_rng(0))
        assert [(text.prompt_token_ids, text.token_ids) for text in texts] == expected
    path.write_text(json.dumps({"prompt": "w1 \ud83d", "response": "\udcff w3"}))
    (cut,) = read_texts(path, TextConfig(), tokenizer, np.random.default_rng(0))
    assert (cut.prompt_token_ids, cut.token_ids) == ([5, 3], [3, 7, eos]), "half a surrogate pair is an unknown word"
    write_rows(path, rows)
    short = read_texts(path, TextConfig(max_response_tokens=2, responses=1), tokenizer, np.random.default_rng(0))
    assert [len(text.token_ids) for text in short] == [2]


@pytest.mark.engine
def test_the_command_answers_prompts_and_reports(random_model, tmp_path, as_json):
    (tmp_path / "target").mkdir()
    target = easy_target(random_model, tmp_path / "target", LONG_CONTEXT)
    app = typer.Typer()
    app.command()(command)
    options = ["--updates", "5", "--tokens-per-update", "256", "--max-response-tokens", "24"]
    arguments = [str(target), str(target / "train.jsonl"), "--out", str(tmp_path / "head"), *options]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["responses"] == 32
    assert report["updates"] == 5
    assert report["tokens"] > 0
    assert sorted(path.name for path in (tmp_path / "head").iterdir()) == [
        "config.json",
        "model.safetensors",
        "training.json",
    ]


def test_what_fails_leaves_nothing_behind(target, random_model, data, tmp_path):
    def stop(message):
        if message.startswith("update 2"):
            raise KeyboardInterrupt

    out = tmp_path / "heads" / "new"
    with pytest.raises(KeyboardInterrupt):
        train_drafter(target, data, out, config(check_every=1), stop)
    with largest_file(1 << 16), refused(RunError):
        train_drafter(target, data, out, config(updates=1), quiet)
    (tmp_path / "broken").mkdir()
    broken = easy_target(random_model, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with refused(RunError, naming=("NaN",)):
        train_drafter(broken, data, out, config(), quiet)
    assert list((tmp_path / "heads").iterdir()) == []


def test_wrong_input_is_refused_and_nothing_is_written(target, data, tmp_path):
    for method in ("eagle", "eagle3"):
        new_head(target, method, 0).save(tmp_path / method)
    for name in ("narrow", "full"):
        (tmp_path / name).mkdir()
    shape = read_json(target / "config.json")
    (tmp_path / "narrow" / "config.json").write_text(json.dumps(shape | {"hidden_size": 32}))
    new_head(tmp_path / "narrow", "eagle", 0).save(tmp_path / "small")
    (tmp_path / "full" / "precious.txt").write_text("mine")
    words = tmp_path / "words.jsonl"
    words.write_text('{"prompt": "w1 w2", "response": "w3"}\n')
    out = tmp_path / "out"
    cases = [
        (tmp_path / "nowhere", data, out, config(), ("nowhere",)),
        (target, tmp_path / "nowhere.jsonl", out, config(), ("nowhere.jsonl",)),
        (target, target, out, config(), (target,)),
        (target, words, out, config(texts=TextConfig(chat=True)), ("chat template",)),
        (target, data, out, config(head=str(tmp_path / "eagle3")), ("an eagle3", "eagle heads")),
        (target, data, out, config(head=str(tmp_path / "small")), ("hidden_size", 32)),
        (target, data, out, config("eagle3", head=str(tmp_path / "eagle")), ("an eagle", "eagle3 heads")),
        (target, data, out, config(head=str(tmp_path / "nowhere")), ("nowhere",)),
        (target, data, tmp_path / "full", config(), (tmp_path / "full",)),
    ]
    last = '{"prompt": [5], "response": [7]}\n'
    for number, (text, naming) in enumerate(
        [
            ("", (tmp_path / "0.jsonl",)),
            ("{", ("line 1", "JSON")),
            ('{"prompt": [4, 5], "response": [6]}\n{"prompt": [4, 5]}\n', ("row 1", "response")),
            ('{"prompt": [{"role": "user", "content": "w1"}], "response": [6]}\n', ("token ids",)),
            ('{"prompt": [4, -1], "response": [6]}\n' + last, (-1,)),
            ('{"prompt": [4, 5], "response": [999]}\n' + last, (999, 0, 23)),
            ('{"prompt": [4], "response": [6]}\n' + last, ("2 texts",)),
            ('{"prompt": [4, 5], "response": [6]}\n' * 3, ("one prompt",)),
            ('{"question": "w1"}\n', ("'prompt'", "question")),
        ]
    ):
        (tmp_path / f"{number}.jsonl").write_text(text)
        cases.append((target, tmp_path / f"{number}.jsonl", out, config(), naming))
    for model, source, where, settings, naming in cases:
        with refused(InputError, naming=naming) as caught:
            train_drafter(model, source, where, settings, quiet)
        assert caught.value.exit_code == 2
        assert "\n" not in str(caught.value)
    assert not out.exists()
    assert not list(tmp_path.glob(".*"))
