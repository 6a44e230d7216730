"""A trace: what is accepted, what is refused and how it says so, and that writing is safe and deterministic."""

import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from tests.core.traces.damage import check_flips
from tests.refused import refused
from tltlab.errors import ConfigError, TraceError
from tltlab.files import read_json, sealed
from tltlab.traces import storage
from tltlab.traces.schema import KEY, TABLES, UNIQUE, Contents, Manifest
from tltlab.traces.trace import Trace, read


def full_tables():
    """Every table of the format: 2 RL steps x 2 prompts x 2 samples, response i has i + 1 tokens."""
    i = np.arange(8)
    response = {"rl_step": i // 4, "prompt_id": [f"p{k}" for k in i // 2], "sample": i % 2, "turn": 0}
    lists = [list(range(k + 1)) for k in i]
    iteration = {"rl_step": [0, 0, 1], "worker": [0, 1, 0], "iteration": 0, "draft_depth": 3, "tokens_to_verify": 4}
    given = {
        "workload": {**response, "prompt_tokens": 5, "max_response_tokens": 16},
        "outcomes": {**response, "response_tokens": i + 1, "finish_reason": "stop", "reward": i / 7, "worker": i % 2,
                     "t_submit": 0.0, "t_finish": 1.0 + i, "tool_s": np.nan},
        "tokens": {**response, "prompt_token_ids": [[1, 2, 3, 4, 5]] * 8, "token_ids": lists,
                   "logprobs": [[-0.5] * len(x) for x in lists], "token_versions": [[0] * len(x) for x in lists]},
        "iterations": {**iteration, "num_drafted": 6, "num_accepted": 4, "accepted_per_request": [[3, 1]] * 3,
                       "graph": "eager"},
        "decisions": {**iteration, "propensity": 0.5},
        "plans": {"rl_step": [0, 1], "plan": 0, "prompts": [["p0", "p1"], []], "samples": [[0, 1], []],
                  "workers": [[0, 1], []], "held": [[1], []], "generated_tokens": [[3.0, 0.5], []],
                  "switch_s": [[0.5]] * 2, "actions": [["hold"], []]},
        "acceptance": {**response, "drafter_age": 0, "max_depth": 8,
                       "accept_if_drafted": [[min(8, k) for k in x] for x in lists]},
        "steps": {"rl_step": [0, 1], "rollout_s": [4.0, 8.0], "drafter_age": [0, 1], "drift_kl": [0.01, -0.001]},
        "spans": {"rl_step": [0, 1], "kind": "decode", "detail": None},
        "spot_training": {"rl_step": [0, 0, 1], "worker": [0, 1, 1], "term": [7, 7, 8],
                          "ended": ["stopped", "killed", "failed"], "loss": [1.5, np.nan, np.nan], "yield_s": np.nan,
                          "accept": [[0.75, 0.5], [], None], "detail": [None, None, "the loss is NaN"]},
    }  # fmt: skip

    def other(field):
        return "ngram" if pa.types.is_string(field.type) else 0.5 if pa.types.is_floating(field.type) else 1

    return {
        name: pd.DataFrame({field.name: given[name].get(field.name, other(field)) for field in schema})
        for name, schema in TABLES.items()
    }


MANIFEST = Manifest(kind="recorded", name="small", num_workers=2, created="2026-01-02T03:04:05+00:00")


def full_trace():
    return Trace.from_tables(MANIFEST, full_tables())


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return full_trace().write(tmp_path_factory.mktemp("written") / "t")


@pytest.fixture
def folder(written, tmp_path):
    """A trace on disk, this test's own."""
    return Path(shutil.copytree(written, tmp_path / "t"))


def rewrite(folder, name, change):
    """Change a table's file as an outside writer would, who knows of no sums."""
    path = folder / f"{name}.parquet"
    manifest = read_json(folder / "manifest.json")
    unsealed = {key: value for key, value in manifest.items() if key not in ("parts", "sha256")}
    (folder / "manifest.json").write_text(json.dumps(unsealed))
    pq.write_table(change(pq.read_table(path)), path)


def set_cell(column, row, value):
    def change(table):
        values = table[column].to_pylist()
        values[row] = value
        return table.set_column(table.column_names.index(column), column, pa.array(values))

    return change


def test_every_table_comes_back_as_it_was_written(folder):
    trace = read(folder)
    assert trace.names == tuple(TABLES)
    assert trace.rl_steps == [0, 1]
    assert trace.manifest == MANIFEST.model_copy(update={"num_rl_steps": 2})
    for name, table in full_tables().items():
        back = trace.arrow(name)
        assert back.schema == TABLES[name]
        for column in table.columns:
            made = pa.array(table[column], from_pandas=True).cast(TABLES[name].field(column).type)
            assert back[column].to_pylist() == made.to_pylist(), column


def test_a_trace_of_required_tables_and_columns_only(tmp_path):
    tables = full_tables()
    outcomes = tables["outcomes"][[*KEY, "response_tokens", "finish_reason"]]
    made = Trace.from_tables(MANIFEST, {"workload": tables["workload"], "outcomes": outcomes})
    trace = read(made.write(tmp_path / "t"))
    assert trace.names == ("workload", "outcomes")
    assert trace.spans is None
    assert list(trace.outcomes.columns) == TABLES["outcomes"].names
    assert trace.outcomes["reward"].isna().all()


def test_pandas_alone_can_write_a_trace(tmp_path):
    """What an outsider does: int64, float64, no row groups, extra columns and files, few manifest fields, no turn."""
    folder = tmp_path / "t"
    folder.mkdir()
    (folder / "manifest.json").write_text('{"format": "tltlab-trace", "version": 1, "kind": "imported", "x": 1}')
    (folder / "README.txt").write_text("hello")
    tables = full_tables()
    tables["workload"]["color"] = "red"
    for name in ("workload", "outcomes", "tokens", "acceptance"):
        tables[name].drop(columns="turn").to_parquet(folder / f"{name}.parquet")
    trace = read(folder)
    assert (trace.outcomes["turn"] == 0).all()
    assert trace.outcomes["response_tokens"].dtype == np.int32
    assert trace.acceptance["accept_if_drafted"][7].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert "color" not in trace.workload


@pytest.mark.parametrize("template", ["part-{i}.parquet", "00{i}-x.parquet"])
def test_a_folder_of_files_is_a_table(folder, template):
    """As pyarrow and pandas write them, without checksums: types differ, RL steps are mixed, one file is empty."""
    whole = read(folder).in_memory()
    rewrite(folder, "steps", lambda table: table)
    for name in ("outcomes", "workload", "iterations"):
        table = pq.read_table(folder / f"{name}.parquet")
        (folder / f"{name}.parquet").unlink()
        ds.write_dataset(
            table.take([*range(0, len(table), 2)]), folder / name, format="parquet",
            basename_template=template, max_rows_per_group=1, min_rows_per_group=1, max_rows_per_file=2,
        )  # fmt: skip
        rest = table.take([*range(1, len(table), 2)]).to_pandas()
        rest.to_parquet(folder / name / "last-of-all-the-others.parquet", index=False)
        rest[:0].to_parquet(folder / name / "last-of-all-the-others-of-none.parquet", index=False)
    trace = read(folder)
    assert trace.rl_steps == [0, 1]
    assert [len(one.outcomes) for one in trace.iter_rl_steps()] == [4, 4]
    for name in ("outcomes", "workload", "iterations"):
        ours, theirs = (of.table(name).sort_values(list(UNIQUE[name])) for of in (trace, whole))
        pd.testing.assert_frame_equal(ours.reset_index(drop=True), theirs.reset_index(drop=True))
    file = folder / "outcomes" / template.format(i=1)
    pq.write_table(set_cell("response_tokens", 1, 99)(pq.read_table(file)), file)
    with refused(TraceError, naming=(f"outcomes/{file.name}", "row 1", "response_tokens", 99)):
        read(folder)
    file.write_bytes(file.read_bytes()[:-9])
    with refused(TraceError, naming=(f"outcomes/{file.name}",)):
        read(folder)
    whole.write(folder.parent / "whole")
    shutil.copy(folder.parent / "whole" / "outcomes.parquet", folder)
    with refused(TraceError, naming=("outcomes",)):
        read(folder)


@pytest.mark.parametrize(
    ("name", "column", "cast"),
    [
        ("outcomes", "response_tokens", pa.uint64()),
        ("outcomes", "response_tokens", pa.float64()),
        ("outcomes", "t_finish", pa.float32()),
        ("outcomes", "finish_reason", pa.dictionary(pa.int8(), pa.string())),
        ("workload", "prompt_id", pa.large_string()),
        ("workload", "rl_step", pa.dictionary(pa.int8(), pa.int64())),
        ("acceptance", "accept_if_drafted", pa.large_list(pa.int64())),
        ("tokens", "prompt_token_ids", pa.list_(pa.int64(), 5)),
        ("tokens", "logprobs", pa.list_(pa.float64())),
        ("outcomes", "tool_s", pa.null()),
    ],
)
def test_types_that_cast_without_loss_are_accepted(folder, name, column, cast):
    want = read(folder).table(name)[column]

    def change(table):
        values = table[column]
        if pa.types.is_dictionary(cast):
            values = values.cast(cast.value_type).dictionary_encode()
        else:
            values = pa.nulls(len(values)) if pa.types.is_null(cast) else values.cast(cast)
        return table.set_column(table.column_names.index(column), column, values)

    rewrite(folder, name, change)
    got = read(folder).table(name)[column]
    assert got.map(str).tolist() == want.map(str).tolist()


NAN, INF = float("nan"), float("inf")
FAULTS = [
    ("outcomes", 2, "t_submit", 99.0, "t_finish"),
    *(("outcomes", 3, "response_tokens", wrong, wrong) for wrong in (-4, 17, 2**40, 1.5)),
    ("outcomes", 3, "response_tokens", 0, "abort"),
    ("outcomes", 3, "response_tokens", None, "null"),
    ("outcomes", 3, "finish_reason", "eos", "stop, length, abort"),
    ("outcomes", 3, "prompt_id", "p9", "workload.parquet"),
    ("outcomes", 3, "sample", 0, "twice"),
    *(("outcomes", 3, "t_finish", wrong, wrong) for wrong in (NAN, INF)),
    ("outcomes", 3, "t_submit", -0.5, -0.5),
    *(("outcomes", 3, "worker", wrong, wrong) for wrong in (-1, NAN)),
    ("workload", 3, "max_response_tokens", 0, "got 0"),
    ("workload", 3, "rl_step", -1, -1),
    ("tokens", 3, "token_ids", [1, 2], "response_tokens is 4"),
    ("tokens", 3, "token_ids", [1, 2, None, 4], None),
    ("tokens", 3, "logprobs", [-0.1] * 5, "response_tokens is 4"),
    ("tokens", 3, "logprobs", [-0.1, -0.2, NAN, -0.1], NAN),
    ("tokens", 3, "token_versions", [0], "response_tokens is 4"),
    ("acceptance", 3, "accept_if_drafted", [0, 1, 2], "response_tokens is 4"),
    ("acceptance", 3, "accept_if_drafted", [0, 9, 0, 0], "max_depth 8"),
    ("acceptance", 3, "accept_if_drafted", [0, -1, 0, 0], "uint8"),
    ("acceptance", 3, "sample", 7, "outcomes.parquet"),
    ("iterations", 1, "tokens_to_verify", 0, "got 0"),
    ("iterations", 1, "worker", 0, "twice"),
    *(("decisions", 1, "propensity", wrong, wrong) for wrong in (0.0, 1.5)),
    ("steps", 1, "rl_step", 0, "twice"),
    ("steps", 1, "drift_kl", INF, INF),
    ("spot_training", 1, "worker", 0, "twice"),
    ("spot_training", 1, "members", 0, "got 0"),
    ("spot_training", 1, "ended", "tired", "stopped, killed, failed, declined"),
    *(("spot_training", 0, "accept", [0.5, wrong], wrong) for wrong in (1.5, NAN)),
]


@pytest.mark.parametrize(("name", "row", "column", "value", "fact"), FAULTS)
def test_a_fault_names_file_column_and_first_row(folder, name, row, column, value, fact):
    rewrite(folder, name, set_cell(column, row, value))
    with refused(TraceError, naming=(f"{name}.parquet", column, f"row {row}", fact)) as info:
        read(folder)
    assert "\n" not in str(info.value)


def test_a_trace_of_an_earlier_version_is_read(folder):
    (folder / "spot_training.parquet").unlink()
    rewrite(folder, "steps", lambda t: t.drop_columns(["drafter_age", "drafter_updates", "drift_kl"]))
    trace = read(folder)
    assert trace.spot_training is None
    assert trace.steps["drafter_updates"].isna().all()


@pytest.mark.parametrize(
    ("without", "valid"),
    [(None, True), ((), False), ((0,), False), ((1,), True)],
    ids=["nothing said", "all recorded", "others lack them", "this one lacks them"],
)
def test_rl_step_that_lost_its_iterations_is_refused(folder, without, valid):
    rewrite(folder, "iterations", lambda t: t.slice(0, 2))
    manifest = Contents.read(folder).manifest.model_copy(update={"without_iterations": without})
    Contents(manifest=manifest).write(folder)
    assert ("without_iterations" in (folder / "manifest.json").read_text()) == (without is not None)
    if valid:
        trace = read(folder)
        assert trace.manifest.without_iterations == without
        return
    with refused(TraceError, naming=("outcomes.parquet", "row 4", "rl_step 1", "iterations.parquet")):
        read(folder)
    with refused(TraceError, naming=("without_iterations",)):
        full_trace().replace(manifest=manifest, iterations=None)


def test_sums_of_an_earlier_version_are_checked(folder):
    contents, written = Contents.read(folder), read(folder)
    manifest = read_json(folder / "manifest.json")
    manifest = {"sums" if key == "parts" else key: value for key, value in manifest.items() if key != "sha256"}
    (folder / "manifest.json").write_text(json.dumps(sealed(manifest)))
    assert Contents.read(folder) == contents
    assert all(read(folder).arrow(name).equals(written.arrow(name)) for name in TABLES)
    tokens = folder / "tokens.parquet"
    tokens.write_bytes(tokens.read_bytes()[:-1] + b"2")
    with refused(TraceError, naming=("tokens.parquet",)):
        read(folder)


def test_an_aborted_response_may_have_no_token(folder):
    for name in ("tokens", "acceptance"):
        (folder / f"{name}.parquet").unlink()
    for column, value in (("response_tokens", 0), ("finish_reason", "abort")):
        rewrite(folder, "outcomes", set_cell(column, 0, value))
    assert read(folder).outcomes["response_tokens"][0] == 0


@pytest.mark.parametrize("name", TABLES)
def test_a_missing_or_wrong_column_is_named(folder, name):
    path = folder / f"{name}.parquet"
    rewrite(folder, name, lambda table: table)
    table = pq.read_table(path)
    for number, field in enumerate(TABLES[name]):
        pq.write_table(table.set_column(number, field.name, pa.array([True] * len(table))), path)
        with refused(TraceError, naming=(name, "parquet", field.name)):
            read(folder)
        if not field.nullable and field.name != "turn":
            pq.write_table(table.drop_columns(field.name), path)
            with refused(TraceError, naming=(name, "parquet", field.name, "missing")):
                read(folder)


@pytest.mark.parametrize("keep", [0, 100, -9])
def test_a_cut_off_file_is_named(folder, keep):
    path = folder / "outcomes.parquet"
    path.write_bytes(path.read_bytes()[:keep])
    for fact in ("sha256", "Parquet"):
        with refused(TraceError, naming=("outcomes.parquet", fact)):
            read(folder)
        Contents(manifest=MANIFEST).write(folder)


def test_text_that_is_not_utf_8_is_fault(folder):
    def change(table):
        values = [b"p\xff" if i == 3 else v.encode() for i, v in enumerate(table["prompt_id"].to_pylist())]
        broken = pa.Array.from_buffers(pa.string(), len(values), pa.array(values, pa.binary()).buffers())
        return table.set_column(table.column_names.index("prompt_id"), "prompt_id", broken)

    rewrite(folder, "workload", change)
    with refused(TraceError, naming=("prompt_id", "3", "UTF-8")):
        read(folder)


def test_no_single_bit_of_a_trace_flips_unseen(folder):
    check_flips(folder, seed=7)


def test_a_table_changed_by_hand_is_refused(folder):
    tokens = folder / "tokens.parquet"
    tokens.write_bytes((folder / "tokens.parquet").read_bytes())
    pq.write_table(pq.read_table(tokens), tokens)
    with refused(TraceError, naming=("parts", "sha256")):
        read(folder)
    rewrite(folder, "tokens", lambda table: table)
    assert read(folder).tokens is not None


GOOD = {"format": "tltlab-trace", "version": 1, "kind": "recorded"}


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("[" * 100_000, "JSON"),
        ("{", "JSON"),
        ("[]", "JSON"),
        (json.dumps(GOOD | {"format": "other"}), "other"),
        (json.dumps(GOOD | {"version": 2}), 2),
        (json.dumps(GOOD | {"version": True}), True),
        ('{"format": "tltlab-trace", "version": 1}', "kind"),
        (json.dumps(GOOD | {"kind": "dreamt"}), "kind"),
        (json.dumps(GOOD | {"num_workers": 0}), "num_workers"),
        (json.dumps(GOOD | {"created": "yesterday"}), "created"),
    ],
)
def test_a_wrong_manifest_is_named(folder, text, fact):
    (folder / "manifest.json").write_text(text)
    with refused(TraceError, naming=("manifest.json", fact)):
        read(folder)


@pytest.mark.parametrize("name", ["workload.parquet", "outcomes.parquet", "manifest.json"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    for place in (folder, folder / name):
        with refused(TraceError, naming=(name,)):
            read(place)


def test_a_run_folder_means_its_trace(folder, tmp_path):
    (tmp_path / "run").mkdir()
    os.rename(folder, tmp_path / "run" / "trace")
    assert read(tmp_path / "run").path == tmp_path / "run" / "trace"


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"outcomes": lambda t: t["outcomes"].assign(response_tokens=[1, 2, 3, 4, 5, -1, 7, 8])},
         ("response_tokens", "row 5", "rl_step 1", "p2")),
        ({"outcome": lambda t: t["outcomes"]}, ("outcome",)),
        ({"workload": None}, ("workload",)),
        ({"workload": lambda t: t["workload"].assign(prompt_tokens=[1, "x", 2, 3, 4, 5, 6, 7])}, ("prompt_tokens",)),
    ],
)  # fmt: skip
def test_tables_in_memory_are_checked_too(change, facts):
    tables = full_tables()
    tables |= {name: made and made(tables) for name, made in change.items()}
    with refused(TraceError, naming=facts):
        Trace.from_tables(MANIFEST, {name: table for name, table in tables.items() if table is not None})


@pytest.mark.parametrize("from_disk", [True, False])
def test_select_keeps_some_rl_steps_of_every_table(folder, from_disk):
    trace = read(folder) if from_disk else full_trace()
    part = trace.select([1])
    assert part.rl_steps == [1]
    assert part.manifest.num_rl_steps == 1
    for name in TABLES:
        assert set(part.table(name)["rl_step"]) == {1}
        assert len(part.table(name)) + len(trace.select([0]).table(name)) == len(trace.table(name))
    assert part.table("outcomes", rl_step=0).empty
    assert trace.table("outcomes", rl_step=1)["prompt_id"].tolist() == ["p2", "p2", "p3", "p3"]
    assert trace.table("steps", rl_step=1)["rollout_s"].tolist() == [8.0]
    assert read(part.write(folder.parent / "one")).rl_steps == [1]
    with refused(TraceError, naming=("rl_step", "7", "0", "1")):
        trace.select([7])


def test_an_rl_steps_row_group_alone_is_read(folder, monkeypatch):
    trace, groups = read(folder), []
    original = pq.ParquetFile.read_row_groups
    monkeypatch.setattr(
        pq.ParquetFile, "read_row_groups", lambda file, at, **rest: groups.append(at) or original(file, at, **rest)
    )
    for name in TABLES:
        trace.table(name, rl_step=1)
    assert groups == [[1]] * len(TABLES)


def test_changing_returned_frame_does_not_change_trace():
    trace = full_trace()
    frame = trace.outcomes
    frame["new"] = 1
    frame.loc[0, "response_tokens"] = 99
    assert "new" not in trace.outcomes
    assert trace.outcomes["response_tokens"][0] == 1


def test_same_tables_give_the_same_bytes(folder, tmp_path):
    again = read(folder).write(tmp_path / "again")
    for path in folder.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name


def test_replace_adds_and_removes_tables():
    trace = full_trace()
    assert "acceptance" not in trace.replace(acceptance=None).names
    with refused(TraceError, naming=("accept_if_drafted",)):
        trace.replace(acceptance=trace.acceptance.assign(max_depth=1))


def test_foreign_files_stay_where_a_trace_is_replaced(folder):
    (folder / "LICENSE").write_text("CC0")
    tables = {name: full_tables()[name] for name in ("workload", "outcomes")}
    Trace.from_tables(MANIFEST, tables).write(folder)
    assert {p.name for p in folder.iterdir()} == {"LICENSE", "manifest.json", "outcomes.parquet", "workload.parquet"}
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_what_is_not_a_trace_is_not_replaced(tmp_path):
    trace = full_trace()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("x")
    for name in ("notes", "file"):
        with refused(ConfigError, naming=("another",)):
            trace.write(tmp_path / name)
    assert (tmp_path / "notes" / "thesis.tex").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    assert read(trace.write(tmp_path / "empty")).rl_steps == [0, 1]


def test_killed_writer_leaves_old_trace_or_none(folder, tmp_path, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    table_writer = storage.table_writer

    def dying(path, name, group_bytes):
        if name == "tokens":
            os.kill(os.getpid(), signal.SIGKILL)
        return table_writer(path, name, group_bytes)

    monkeypatch.setattr(storage, "table_writer", dying)
    for target in (folder, tmp_path / "new"):
        writer = multiprocessing.get_context("fork").Process(target=read(folder).write, args=(target,))
        writer.start()
        writer.join()
        assert writer.exitcode == -signal.SIGKILL
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert not (tmp_path / "new").exists()
