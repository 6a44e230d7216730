"""The timeline: which lanes and segments are drawn, and that pictures and Perfetto files come out."""

import json
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from tests.refused import refused
from tests.traces_of_lengths import iterations, of_samples
from tltlab.errors import TraceError
from tltlab.lengths.generate import log_normal
from tltlab.report.timeline import LOOKS, timeline, to_perfetto, write_perfetto
from tltlab.sim import simulate
from tltlab.traces.lanes import aligned_offsets, lanes, median_step
from tltlab.traces.schema import Manifest
from tltlab.traces.trace import read


def recorded(num_workers=2, spans=None, iterations=None, steps=None, name="small", num_steps=1):
    """One response per worker and RL step; worker w finishes at w + 1 s plus the RL step's number."""
    step, worker = (axis.ravel() for axis in np.indices((num_steps, num_workers)))
    trace = of_samples(
        np.full_like(step, 9), 99, prompt_id=[f"p{w}" for w in worker], sample=0, rl_step=step, worker=worker,
        t_submit=0.0, t_finish=worker + 1.0 + step,
    )  # fmt: skip
    tables = {"iterations": iterations, "steps": steps}
    if spans is not None:
        tables["spans"] = pd.DataFrame(spans, columns=["lane", "kind", "t_start", "duration"]).assign(rl_step=0)
    return trace.replace(manifest=Manifest(kind="recorded", name=name, num_workers=num_workers), **tables)


def test_the_legend_tells_drafters_apart():
    spans = [(0, "worker 0", "speculative_decode", i, 1.0, detail) for i, detail in enumerate(["ngram:4", "mine:2"])]
    spans = pd.DataFrame(spans, columns=["rl_step", "lane", "kind", "t_start", "duration", "detail"])
    (legend,) = timeline(recorded(1).replace(spans=spans)).legends
    drafters = ["speculative decode (ngram)", "speculative decode (mine)"]
    assert [text.get_text() for text in legend.get_texts()][-2:] == drafters


def steps(**columns):
    return pd.DataFrame({"policy_version": 0, "t_start": 0.0} | columns)


def told(trace, rl_step=0):
    """What each lane does, from when to when."""
    found = {}
    for lane, kind, start, end in lanes(trace, rl_step).itertuples(index=False):
        found.setdefault(lane, []).append(f"{kind} {start:g}-{end:g}")
    return [f"{lane}: {', '.join(does)}" for lane, does in found.items()]


TIMES = {"worker": [0, 0, 0, 1], "t_start": [0.0, 0.5, 1.0, 0.0], "duration": [0.5, 0.5, 0.5, 2.0]}
WORKED = iterations(
    **TIMES, batch=1, num_generated=0, iteration=[0, 1, 2, 0], prefill_tokens=[7, 0, 0, 0], num_drafted=[0, 0, 0, 4],
    drafter=["none", "none", "none", "suffix"],
)  # fmt: skip
ON_0 = [("worker 0", "decode", 0.0, 0.4), ("worker 0", "decode", 0.4, 0.6), ("worker 0", "spot_train", 1.5, 0.5)]
SPANS = [*ON_0, ("worker 10", "decode", 0.0, 2.0), ("worker 1", "decode", 0.0, 2.0), ("trainer", "train", 2.0, 1.0)]
TRAINED = steps(rl_step=[0], reward_s=0.25, train_s=1.0, sync_s=0.5)
BUSY, REST = ["worker 0: decode 0-1, idle 1-2", "worker 1: decode 0-2"], ["worker 10: decode 0-2", "trainer: train 2-3"]

LANES = {
    "busy until the last response": ({}, BUSY),
    "iterations are merged": (
        {"iterations": WORKED},
        ["worker 0: prefill 0-0.5, decode 0.5-1.5, idle 1.5-2", "worker 1: speculative_decode (suffix) 0-2"],
    ),
    "spans are merged": ({"spans": SPANS}, ["worker 0: decode 0-1, idle 1-1.5, spot_train 1.5-2", BUSY[1], *REST]),
    "the trainer comes behind the rollout": (
        {"steps": TRAINED},
        [*BUSY, "trainer: reward 2-2.25, train 2.25-3.25, weight_sync 3.25-3.75"],
    ),
}


@pytest.mark.parametrize(("tables", "expected"), LANES.values(), ids=LANES)
def test_lanes_have_merged_segments_and_idle_gaps(tables, expected):
    assert told(recorded(**tables)) == expected


def test_all_rl_steps_lie_one_after_the_other():
    assert set(lanes(recorded(1, num_steps=3), "all").iloc[:, 2]) == {0.0, 1.0, 3.0}
    known = steps(rl_step=[0, 1, 2], t_start=[0.0, 10.0, 20.0])
    assert set(lanes(recorded(1, num_steps=3, steps=known), "all").iloc[:, 2]) == {0.0, 10.0, 20.0}


def test_a_trace_without_times_cannot_be_drawn():
    for asked in ({}, {"rl_step": 0}):
        with refused(TraceError):
            timeline(log_normal(prompts=2, rl_steps=1), **asked)


def test_the_picture_has_a_lane_per_worker():
    figure = timeline(recorded(4))
    above, below = figure.axes
    assert [label.get_text() for label in above.get_yticklabels()] == [f"worker {i}" for i in range(4)]
    assert "idle 38 %" in above.get_title(loc="left")
    assert "running" in below.get_ylabel()
    assert above.get_xlim() == below.get_xlim() == (0.0, 4.0)


def test_picture_is_written_and_same_each_time(tmp_path):
    spans = [("worker 0", kind, i * 0.1, 0.1) for i, kind in enumerate((*LOOKS, "unheard_of"))]
    files = [tmp_path / name / "picture.png" for name in "ab"]
    for file in files:
        timeline(recorded(2, spans=spans), out=file)
    data = [file.read_bytes() for file in files]
    assert data[0].startswith(b"\x89PNG")
    assert data[0] == data[1]


def test_rl_steps_of_two_traces_are_aligned():
    late = steps(rl_step=[0, 1, 2], t_start=[0.5, 10.0, 20.0])
    first, second = recorded(1, num_steps=3), recorded(2, num_steps=3, steps=late, name="other")
    assert aligned_offsets(first, second) == {0: 0.0, 1: 2.0, 2: 5.0}
    figure = timeline(first, compare=SimpleNamespace(trace=second), rl_step="all", title="mine")
    assert len({axes.get_xlim() for axes in figure.axes}) == 1, "they share the axis of time"
    assert figure.axes[0].get_title(loc="left").startswith("mine")
    assert figure.axes[2].get_title(loc="left").startswith("other (recorded)")
    starts = [[text.get_position()[0] for text in axes.texts] for axes in (figure.axes[1], figure.axes[3])]
    assert starts == [[0.0, 2.0, 5.0]] * 2
    assert "same place in both" in figure.axes[-1].get_xlabel()


def test_the_default_is_the_median_rl_step():
    longer, shorter = recorded(num_steps=3), recorded(num_steps=1)
    assert (median_step(longer), median_step(longer, shorter)) == (1, 0)
    assert "RL step 1" in timeline(longer).axes[0].get_title(loc="left")
    with refused(TraceError, naming=("2", "0")):
        timeline(longer, compare=shorter, rl_step=2)
    with refused(TraceError):
        timeline(longer.select([1]), compare=shorter)


def test_the_title_names_trace_and_policy():
    trace = recorded(num_steps=2, steps=steps(rl_step=[0, 1], t_start=[0.0, 2.0], policy=["none", "tuned"]))
    titles = [timeline(trace, rl_step=which).axes[0].get_title(loc="left") for which in (1, "all")]
    assert [title.split(":")[0] for title in titles] == ["small (recorded, tuned)", "small (recorded)"]
    trace = recorded(name=None)
    assert timeline(trace).axes[0].get_title(loc="left").startswith("recorded: RL step")


def test_sixty_four_workers_have_lanes_and_names():
    figure = timeline(recorded(64))
    above = figure.axes[0]
    assert [label.get_text() for label in above.get_yticklabels()] == [f"worker {i}" for i in range(0, 64, 2)]
    assert sum(len(collection.get_paths()) for collection in above.collections) == 64 + 63
    assert figure.get_size_inches()[1] < 9


@pytest.mark.parametrize(("size", "inches", "points"), [("column", (85 / 25.4, None), 8), ("talk", (40 / 3, 7.5), 16)])
@pytest.mark.parametrize("workers", [2, 12, 64])
def test_pictures_of_papers_and_talks_can_be_read(tmp_path, size, inches, points, workers):
    runs = [recorded(workers, iterations=WORKED, name=f"run {n} of a rather long name") for n in range(2)]
    figure = timeline(runs[0], compare=runs[1], size=size, out=tmp_path / "two.pdf")
    assert (tmp_path / "two.pdf").read_bytes().startswith(b"%PDF")
    width, height = figure.get_size_inches()
    assert (width, height if inches[1] else None) == inches
    texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    assert {text.get_fontsize() for text in texts} == {points}
    assert figure.get_tightbbox().x1 <= width + 0.01
    for axes in figure.axes[::2]:
        heights = [label.get_window_extent().y1 for label in axes.get_yticklabels()]
        assert all(above - below >= 0.9 * points / 72 * figure.dpi for above, below in pairwise(heights))
        idle = [part for part in axes.collections if part.get_hatch()]
        assert idle, "bubbles are hatched"


def test_rollouts_alone_have_no_trainer():
    known = steps(rl_step=[0, 1], t_start=[0.0, 9.0], rollout_s=[1.0, 2.0], train_s=5.0)
    trace = recorded(1, num_steps=2, steps=known)
    assert set(lanes(trace, "all")["lane"]) == {"worker 0", "trainer"}
    figure = timeline(trace, rl_step="all", rollout_only=True)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["worker 0"]
    assert figure.axes[0].get_xlim() == (0.0, 3.0)


@pytest.mark.parametrize(
    "meet",
    [
        ("prefill", "decode", "speculative_decode", "switch", "idle", "spot_train", "weight_sync"),
        ("inference", "reward", "train", "weight_sync", "checkpoint", "idle"),
    ],
)
def test_adjacent_kinds_differ_in_grey(meet):
    figure = timeline(recorded(1, spans=[("worker 0", kind, i * 1.0, 1.0) for i, kind in enumerate(meet)]))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    grey = np.asarray(canvas.buffer_rgba())[::-1, :, :3] @ [0.299, 0.587, 0.114] / 255
    drawn = []
    for i in range(len(meet)):
        (x0, x1), (y1, y0) = figure.axes[0].transData.transform([(i + 0.2, -0.35), (i + 0.8, 0.35)]).astype(int).T
        drawn.append(grey[y0:y1, x0:x1].mean())  # with its hatch, as an eye sees it from afar
    apart = np.abs(np.subtract.outer(drawn, drawn))[~np.eye(len(meet), dtype=bool)]
    assert apart.min() > 0.06


def test_perfetto_has_tracks_slices_and_a_counter():
    events = to_perfetto(recorded())["traceEvents"]
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


def test_two_traces_are_two_perfetto_processes(tmp_path):
    late = steps(rl_step=[0, 1], t_start=[0.5, 10.0])
    second = SimpleNamespace(trace=recorded(3, num_steps=2, steps=late, name="other"))
    path = write_perfetto(tmp_path / "new" / "t.json", recorded(num_steps=2), second)
    events = json.loads(path.read_text())["traceEvents"]
    names = [(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"]
    assert names == [(1, "small (recorded)"), (2, "other (recorded)")]
    rollouts = [(e["pid"], e["ts"]) for e in events if e["name"].startswith("rollout ")]
    assert rollouts == [(1, 0.0), (1, 3e6), (2, 0.0), (2, 3e6)]


@pytest.mark.parametrize("kind", ["recorded", "simulated"])
def test_perfetto_files_keep_to_the_trace_event_format(tmp_path, kind):
    trace = read("traces/tiny")
    trace = trace if kind == "recorded" else simulate(trace, "fixed", workers=3, spot="tlt")
    whole = json.loads(write_perfetto(tmp_path / "t.json", trace).read_text())
    assert set(whole) == {"displayTimeUnit", "traceEvents"}
    needed = {"M": {"args"}, "X": {"ts", "dur", "cat"}, "C": {"ts", "args"}}
    named = {(e["pid"], e["tid"]) for e in whole["traceEvents"] if e["name"] == "thread_name"}
    slices = {}
    for event in whole["traceEvents"]:
        assert {"ph", "pid", "name", *needed[event["ph"]]} <= set(event)
        assert event.get("ts", 0.0) >= 0
        if event["ph"] == "M":
            assert event["name"] in {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert (event["pid"], event["tid"]) in named
            slices.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for of_track in slices.values():  # Perfetto drops slices that overlap without one holding the other
        ordered = sorted(of_track)
        assert all(b[0] >= a[1] - 1.0 or b[1] <= a[1] + 1.0 for a, b in pairwise(ordered))
    if kind == "recorded":
        told = set().union(*(e.get("args", {}) for e in whole["traceEvents"]))
        assert {"batch", "drafter", "draft_depth", "top_k", "tokens_to_verify"} <= told


def test_iterations_are_slices_with_arguments():
    table = iterations(t_start=[0.5], duration=0.25, batch=3, draft_depth=4, num_accepted=6)
    found = [e for e in to_perfetto(recorded(iterations=table))["traceEvents"] if e["name"] == "iteration"]
    assert [(e["ts"], e["dur"], e["args"]["batch"], e["args"]["num_accepted"]) for e in found] == [(5e5, 2.5e5, 3, 6)]
    json.dumps(found)
