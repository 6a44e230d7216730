"""Traces larger than memory: written and read RL step by RL step, in memory that does not grow with their length."""

import json

import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.refused import refused
from tests.traces_of_lengths import iterations
from tltlab.errors import TraceError
from tltlab.traces import metrics, storage
from tltlab.traces import trace as trace_module
from tltlab.traces.metrics import count, describe
from tltlab.traces.schema import Contents
from tltlab.traces.trace import Trace, read

from .streams import MANIFEST, peak_bytes, responses, rl_step, write_steps


def written(path, num_rl_steps):
    return whole(num_rl_steps).write(path)


def whole(num_rl_steps):
    """The same trace, made in memory in one piece."""
    steps = [rl_step(number) for number in range(num_rl_steps)]
    workload, outcomes = (pd.concat(frames, ignore_index=True) for frames in zip(*steps, strict=True))
    return Trace.from_tables(MANIFEST, {"workload": workload, "outcomes": outcomes})


@pytest.fixture
def tiny_chunks(monkeypatch):
    """Reads everything in several parts."""
    monkeypatch.setattr(trace_module, "CHUNK_BYTES", 700)


def test_trace_written_by_rl_steps_is_that_written_in_one_piece(tmp_path, tiny_chunks):
    trace, expected = read(write_steps(tmp_path / "t", map(rl_step, range(5)))), whole(5)
    steps = list(trace.iter_rl_steps())
    assert trace.manifest == expected.manifest
    assert [(step.rl_steps, step.manifest.num_rl_steps) for step in steps] == [([number], 1) for number in range(5)]
    for name in ("workload", "outcomes"):
        pd.testing.assert_frame_equal(trace.table(name), expected.table(name))
        for number, step in enumerate(steps):
            pd.testing.assert_frame_equal(step.table(name), expected.table(name, rl_step=number))


def test_small_pieces_share_a_row_group(tmp_path, monkeypatch):
    for limit, expected in ((10**6, [[0, 1, 2, 3, 4]]), (500, [[0, 1], [2, 3], [4]]), (1, [[0], [1], [2], [3], [4]])):
        monkeypatch.setattr(storage, "GROUP_BYTES", limit)
        with storage.table_writer(tmp_path / "t.parquet", "outcomes") as writer:
            for number in range(5):
                writer.append(whole(5).select([number]).arrow("outcomes"))
        file = pq.ParquetFile(tmp_path / "t.parquet")
        groups = [file.read_row_group(i, ["rl_step"])["rl_step"].to_pylist() for i in range(file.num_row_groups)]
        assert [sorted(set(group)) for group in groups] == expected


def test_a_trace_without_rl_steps_is_one(tmp_path):
    trace = read(write_steps(tmp_path / "t", []))
    assert (trace.rl_steps, trace.manifest.num_rl_steps) == ([], 0)
    assert list(trace.iter_rl_steps()) == []
    assert count(trace)["num_tokens"] == 0


@settings(max_examples=15, deadline=None)
@given(rows=responses, group_rows=st.integers(1, 50), chunk_bytes=st.sampled_from([1, 300, 1 << 20]))
def test_any_order_of_row_groups_is_read(rows, group_rows, chunk_bytes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    key = pd.DataFrame([row[:3] for row in rows], columns=["rl_step", "prompt_id", "sample"])
    outcomes = key.assign(response_tokens=[row[3] for row in rows], finish_reason="stop")
    workload = key.assign(epoch=0, prompt_tokens=1, max_response_tokens=64, policy_version=0).iloc[::-1]
    workload.to_parquet(folder / "workload.parquet", row_group_size=group_rows, index=False)
    outcomes.to_parquet(folder / "outcomes.parquet", row_group_size=max(1, group_rows // 2), index=False)
    (folder / "manifest.json").write_text(json.dumps({"format": "tltlab-trace", "version": 1, "kind": "imported"}))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trace_module, "CHUNK_BYTES", chunk_bytes)
        trace = read(folder)
        assert read(trace.write(folder / "again")).outcomes.equals(trace.outcomes)
        found = {one.rl_steps[0]: (one.workload, one.outcomes) for one in trace.iter_rl_steps()}
        counts = count(trace)
    assert trace.outcomes.equals(pd.concat([made for _, made in found.values()], ignore_index=True))
    assert list(found) == sorted(set(key["rl_step"]))
    for number, expected in outcomes.groupby("rl_step"):
        asked, made = found[number]
        assert made["response_tokens"].tolist() == expected["response_tokens"].tolist()
        assert made["prompt_id"].tolist() == expected["prompt_id"].tolist()
        assert asked["sample"].tolist() == expected["sample"].tolist()[::-1]
    assert counts["num_responses"] == len(rows)
    assert counts["num_tokens"] == outcomes["response_tokens"].sum()


def test_metrics_do_not_depend_on_the_reader(tmp_path, tiny_chunks):
    streamed, memory = read(written(tmp_path / "t", 7)), whole(7)
    assert len(list(streamed.parts())) > 3
    assert len(list(memory.parts())) == 1
    described, expected = describe(streamed), describe(memory)
    assert described.pop("prompt_share") == pytest.approx(expected.pop("prompt_share"), rel=1e-12)
    assert described == expected
    assert metrics.summary(streamed) == metrics.summary(memory)
    assert metrics.length_percentiles(streamed) == metrics.length_percentiles(memory)
    assert metrics.num_workers(streamed) == 2


def test_rows_outside_the_rl_steps_count_once(tmp_path, monkeypatch):
    table = iterations(rl_step=[0, 1, 9], batch=[1, 2, 4], draft_depth=3, num_accepted=3)
    trace = whole(2).replace(iterations=table)
    expected = metrics.mean_accept_length(trace)
    assert expected == 1 + 9 / 7
    path = trace.write(tmp_path / "t")
    monkeypatch.setattr(trace_module, "CHUNK_BYTES", 1)
    assert metrics.mean_accept_length(read(path)) == expected


def test_fault_in_last_rl_step_is_found(tmp_path, tiny_chunks):
    path = written(tmp_path / "t", 6)
    table = pq.read_table(path / "outcomes.parquet").to_pandas()
    table.loc[23, ["prompt_id", "sample"]] = table.loc[22, ["prompt_id", "sample"]]
    table.to_parquet(path / "outcomes.parquet", index=False)
    Contents(manifest=MANIFEST).write(path)
    with refused(TraceError, naming=("23",)):
        read(path)


def test_memory_is_few_chunks_however_many_rl_steps(tmp_path, monkeypatch):
    """28 RL steps of a quarter of a chunk each; to load the trace takes more, so the test would see that."""
    chunk, path = 1 << 19, tmp_path / "t"
    monkeypatch.setattr(trace_module, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(storage, "GROUP_BYTES", chunk // 2)

    def work():
        if way == "write":
            yield write_steps(path, (rl_step(number, 1024) for number in range(28)))
        elif way == "iterate":
            for one in read(path).iter_rl_steps():
                yield one.workload, one.outcomes
        elif way == "load":
            yield (trace := read(path)).outcomes, trace.workload
        else:
            yield count(read(path)) if way == "validate" else describe(read(path))

    for way in ("write", "iterate", "validate", "describe", "load"):
        peak = peak_bytes(work)
        assert peak > 8 * chunk if way == "load" else peak < 4 * chunk, way
