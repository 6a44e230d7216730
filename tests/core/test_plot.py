"""The timeline: which lanes and segments are drawn, and that pictures and Perfetto files come out."""

import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from tltlab.errors import ConfigError, TraceError
from tltlab.generate import log_normal
from tltlab.lanes import lanes, median_step
from tltlab.perfetto import to_perfetto, write_perfetto
from tltlab.plot import timeline
from tltlab.schema import SPAN_KINDS, Manifest
from tltlab.trace import Trace


def recorded(num_workers=2, spans=None, iterations=None, steps=None, name="small", num_steps=1):
    """One response per worker and RL step; worker w finishes at w + 1 s plus the RL step's number."""
    step, worker = (axis.ravel() for axis in np.indices((num_steps, num_workers)))
    key = pd.DataFrame({"rl_step": step, "prompt_id": [f"p{w}" for w in worker], "sample": 0})
    workload = key.assign(epoch=0, prompt_tokens=1, max_response_tokens=99, policy_version=0)
    outcomes = key.assign(
        response_tokens=9, finish_reason="stop", worker=worker, t_submit=0.0, t_finish=worker + 1.0 + step
    )
    tables = {"workload": workload, "outcomes": outcomes, "iterations": iterations, "steps": steps}
    if spans is not None:
        tables["spans"] = pd.DataFrame(spans, columns=["lane", "kind", "t_start", "duration"]).assign(rl_step=0)
    return Trace.from_tables(Manifest(kind="recorded", name=name, num_workers=num_workers), tables)


def rows(trace, rl_step=0):
    return [tuple(row) for row in lanes(trace, rl_step).itertuples(index=False)]


def test_without_spans_a_worker_is_busy_until_its_last_response():
    assert rows(recorded()) == [
        ("worker 0", "decode", 0.0, 1.0),
        ("worker 0", "idle", 1.0, 2.0),
        ("worker 1", "decode", 0.0, 2.0),
    ]


def test_iterations_become_merged_segments_of_what_they_did():
    table = pd.DataFrame(
        {"rl_step": 0, "worker": [0, 0, 0, 1], "iteration": [0, 1, 2, 0], "t_start": [0.0, 0.5, 1.0, 0.0],
         "duration": [0.5, 0.5, 0.5, 2.0], "batch": 1, "context_tokens": 1, "prefill_tokens": [7, 0, 0, 0],
         "draft_depth": 0, "top_k": 0, "tokens_to_verify": 1, "num_drafted": [0, 0, 0, 4], "num_accepted": 0,
         "num_generated": [0, 1, 1, 1]}
    )  # fmt: skip
    assert rows(recorded(iterations=table)) == [
        ("worker 0", "prefill", 0.0, 0.5),
        ("worker 0", "decode", 0.5, 1.5),
        ("worker 0", "idle", 1.5, 2.0),
        ("worker 1", "speculative_decode", 0.0, 2.0),
    ]


def test_spans_are_merged_and_gaps_are_idle():
    spans = [
        ("worker 0", "decode", 0.0, 0.4),
        ("worker 0", "decode", 0.4, 0.6),
        ("worker 0", "spot_train", 1.5, 0.5),
        ("worker 10", "decode", 0.0, 2.0),
        ("worker 1", "decode", 0.0, 2.0),
        ("trainer", "train", 2.0, 1.0),
    ]
    assert rows(recorded(spans=spans)) == [
        ("worker 0", "decode", 0.0, 1.0),
        ("worker 0", "idle", 1.0, 1.5),
        ("worker 0", "spot_train", 1.5, 2.0),
        ("worker 1", "decode", 0.0, 2.0),
        ("worker 10", "decode", 0.0, 2.0),
        ("trainer", "train", 2.0, 3.0),
    ]


def test_the_trainers_lane_comes_from_steps_behind_the_rollout():
    steps = pd.DataFrame(
        {"rl_step": [0], "t_start": 0.0, "policy_version": 0, "reward_s": 0.25, "train_s": 1.0, "sync_s": 0.5}
    )
    assert [row for row in rows(recorded(steps=steps)) if row[0] == "trainer"] == [
        ("trainer", "reward", 2.0, 2.25),
        ("trainer", "train", 2.25, 3.25),
        ("trainer", "weight_sync", 3.25, 3.75),
    ]


def test_all_rl_steps_lie_one_after_the_other():
    starts = {row[2] for row in rows(recorded(1, num_steps=3), "all")}
    assert starts == {0.0, 1.0, 3.0}
    steps = pd.DataFrame({"rl_step": [0, 1, 2], "t_start": [0.0, 10.0, 20.0], "policy_version": 0})
    assert {row[2] for row in rows(recorded(1, num_steps=3, steps=steps), "all")} == {0.0, 10.0, 20.0}


def test_the_default_is_the_rl_step_of_median_rollout_time():
    assert median_step(recorded(num_steps=3)) == 1
    assert "RL step 1" in timeline(recorded(num_steps=3)).axes[0].get_title(loc="left")


def test_a_trace_without_times_cannot_be_drawn():
    with pytest.raises(TraceError, match="simulate it first"):
        timeline(log_normal(prompts=2, rl_steps=1))
    with pytest.raises(TraceError, match="simulate the trace first"):
        timeline(log_normal(prompts=2, rl_steps=1), rl_step=0)


def test_the_picture_has_a_lane_per_worker_and_says_how_much_is_bubble():
    figure = timeline(recorded(4))
    above, below = figure.axes
    assert [label.get_text() for label in above.get_yticklabels()] == [f"worker {i}" for i in range(4)]
    assert "bubble 38 %" in above.get_title(loc="left")
    assert "running" in below.get_ylabel()
    assert above.get_xlim() == below.get_xlim() == (0.0, 4.0)


def test_two_traces_share_the_time_axis():
    figure = timeline(recorded(2), compare=SimpleNamespace(trace=recorded(4, name="other")), title="mine")
    assert len(figure.axes) == 4
    assert {axes.get_xlim() for axes in figure.axes} == {(0.0, 4.0)}
    assert figure.axes[0].get_title(loc="left").startswith("mine")
    assert figure.axes[2].get_title(loc="left").startswith("other (recorded)")


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_the_picture_is_written_and_the_same_each_time(tmp_path, suffix, magic):
    spans = [("worker 0", kind, i * 0.1, 0.1) for i, kind in enumerate((*SPAN_KINDS, "unheard_of"))]
    files = [tmp_path / name / f"picture{suffix}" for name in "ab"]
    for file in files:
        timeline(recorded(2, spans=spans), out=file)
    data = [file.read_bytes() for file in files]
    assert data[0].startswith(magic)
    assert data[0] == data[1]


def test_another_format_is_refused():
    with pytest.raises(ConfigError, match=r"\.png or \.svg"):
        timeline(recorded(), out="picture.gif")


def test_perfetto_has_named_tracks_slices_in_microseconds_and_a_counter():
    events = to_perfetto(SimpleNamespace(trace=recorded()))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(names.values()) == {"RL steps", "worker 0", "worker 1"}
    slices = [(names[e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert slices == [
        ("RL steps", "rollout 0", 0.0, 2e6),
        ("worker 0", "decode", 0.0, 1e6),
        ("worker 0", "idle", 1e6, 1e6),
        ("worker 1", "decode", 0.0, 2e6),
    ]
    counter = [(e["ts"], e["args"]["running"]) for e in events if e["ph"] == "C"]
    assert counter == [(0.0, 2), (1e6, 1), (2e6, 0)]


def test_two_traces_in_a_perfetto_file_are_two_processes(tmp_path):
    path = write_perfetto(tmp_path / "new" / "t.json", recorded(), recorded(name="other"))
    events = json.loads(path.read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["small", "other"]
    assert {e["pid"] for e in events} == {1, 2}


def test_iterations_are_slices_with_arguments():
    table = pd.DataFrame(
        {"rl_step": 0, "worker": [0], "iteration": 0, "t_start": 0.5, "duration": 0.25, "batch": 3, "context_tokens": 1,
         "prefill_tokens": 0, "draft_depth": 4, "top_k": 1, "tokens_to_verify": 5, "num_drafted": 12,
         "num_accepted": 6, "num_generated": 9}
    )  # fmt: skip
    found = [e for e in to_perfetto(recorded(iterations=table))["traceEvents"] if e["name"] == "iteration"]
    assert [(e["ts"], e["dur"], e["args"]["batch"], e["args"]["num_accepted"]) for e in found] == [(5e5, 2.5e5, 3, 6)]
    json.dumps(found)
