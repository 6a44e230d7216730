"""`tltlab trace ...` and `tltlab timeline` as a user types them, and traces from CSV files of lengths."""

import json

import numpy as np
import pandas as pd
import pytest

from tests.refused import refused
from tests.traces_of_lengths import import_dump, iterations
from tltlab.errors import TraceError
from tltlab.importers.sources import read
from tltlab.lengths.generate import log_normal
from tltlab.traces.metrics import rollout_s
from tltlab.traces.recorder import Recorder
from tltlab.traces.schema import Manifest
from tltlab.traces.split import split_at_gaps
from tltlab.traces.trace import Trace


@pytest.fixture
def timed(tmp_path):
    """A small trace with times, on disk."""
    trace = log_normal(prompts=4, group_size=2, rl_steps=2, median=50, workers=2)
    outcomes = trace.outcomes
    outcomes = outcomes.assign(
        worker=outcomes.index % 2, t_submit=0.0, t_finish=outcomes["response_tokens"] / 100, reward=0.5
    )
    return trace.replace(outcomes=outcomes).write(tmp_path / "timed")


def csv(tmp_path, text):
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "rl_steps"),
    [
        ("310\n4096\n95\n", [0]),
        ("length\n310\n4096\n95\n\n", [0]),
        ("id,response_tokens\n1,310\n2,4096\n3,95\n", [0]),
        ("\ufefftokens\r\n310\r\n4096.0\r\n 95 \r\n", [0]),
        ("step;length\n3;310\n3;4096\n4;95\n", [3, 4]),
        ("step\tlength\n3\t310\n3\t4096\n4\t95\n", [3, 4]),
        ("step,iteration,length\n0,0,310\n1,1,4096\n1,1,95\n", [0, 1]),
        ("rl_step,step,length\n0,5,310\n1,5,4096\n1,5,95\n", [0, 1]),
    ],
)
def test_a_csv_of_lengths_is_a_trace(tmp_path, text, rl_steps):
    trace = read(csv(tmp_path, text))
    assert trace.outcomes["response_tokens"].tolist() == [310, 4096, 95]
    assert (trace.manifest.kind, trace.manifest.max_response_tokens) == ("imported", 4096)
    assert trace.rl_steps == rl_steps


def test_known_columns_of_a_csv_are_used(tmp_path):
    text = "rl_step,prompt_id,prompt_tokens,length\n4,a,7,1\n0,a,7,1\n0,a,7,2\n1,b,8,3\n"
    trace = import_dump(csv(tmp_path, text))
    assert trace.workload["epoch"].tolist() == [0, 0, 0, 1]
    trace = trace.select([0, 1])
    assert trace.outcomes["sample"].tolist() == [0, 1, 0]
    assert trace.workload["prompt_tokens"].tolist() == [7, 7, 8]


@pytest.mark.parametrize("name", ["step", "Step", "global_step", "Training Step", "train-step", "iteration"])
def test_rl_step_of_csv_has_other_names(command, tmp_path, name):
    path = csv(tmp_path, f"{name},output_tokens,reward\n7,1,0.5\n7,2,0.5\n9,3,1\n")
    # First: what was read is said once of a file.
    code, out, err = command("trace", "describe", path, "--json")
    assert (code, len(json.loads(out)["rl_steps"])) == (0, 2)
    assert f"response_tokens from output_tokens, rl_step from {name}, reward" in err
    assert read(path).rl_steps == [7, 9]
    assert import_dump(path, group_size=2).outcomes["prompt_id"].tolist() == ["p0", "p0", "p1"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", ("empty",)),
        ("length\n", ("rows",)),
        ("length\n0\n\n0\n", ("no",)),
        ("3\n2.5\n", ("2", "5")),
        ("length\n3\nnan\n", ("nan", "3")),
        ("length\n3\n9\n", ("3", "9", "8")),
        ("a,310\nb,4096\n", ("--column",)),
        ("step\n1\n2\n", ("--column",)),
        ("length,tokens\n1,2\n", ()),
        ("step,length\n0.5,3\n", ("2", "0", "5")),
        ("rl_step,prompt_id,sample,length\n0,a,0,1\n0,a,0,2\n", ("there",)),
        ("1,2\n1,2,3,4\n", ("CSV",)),
    ],
)
def test_a_faulty_csv_is_refused_with_its_line(tmp_path, text, says):
    with refused(TraceError, naming=says):
        import_dump(csv(tmp_path, text), max_response_tokens=8)


def test_describe_shows_times_where_they_are_known(command, timed):
    described = json.loads(command("trace", "describe", timed, "--json")[1])
    assert 0 < described["lengths_known"]["history"]["coverage"] <= 1
    row = described["rl_steps"][0]
    assert row["rollout_s"] == row["max_tokens"] / 100
    assert 0 < row["bubble_fraction"] < 1


def test_repair_on_the_command_line(command, tmp_path):
    recorder = Recorder(tmp_path / "t", Manifest(kind="recorded"))
    row = {"rl_step": 0, "prompt_id": "p", "sample": 0, "turn": 0}
    recorder.append(
        "workload", [{**row, "epoch": 0, "prompt_tokens": 1, "max_response_tokens": 9, "policy_version": 0}]
    )
    recorder.append("outcomes", [{**row, "response_tokens": 3, "finish_reason": "stop", "worker": 0}])
    recorder.flush()
    recorder._lock.close()
    code, out, err = command("trace", "validate", tmp_path / "t")
    assert (code, "unfinished: the recording was interrupted" in err) == (0, True)
    assert "1 responses" in out
    code, out, _ = command("trace", "repair", tmp_path / "t", "--json")
    assert code == 0
    assert json.loads(out)["notes"].startswith("repaired: ")
    assert read(tmp_path / "t").rl_steps == [0]


@pytest.mark.parametrize(("suffix", "rl_step"), [(".png", "all"), (".svg", "0"), (".json", "1")])
def test_timeline_writes_what_its_suffix_states(command, timed, tmp_path, suffix, rl_step):
    out = tmp_path / f"timeline{suffix}"
    asked = ("timeline", timed, "--out", out, "--rl-step", rl_step)
    code, text, _ = command(*asked, "--compare", timed, "--json")
    assert (code, json.loads(text)["out"]) == (0, str(out))
    assert out.stat().st_size > 500


def test_an_empty_trace_can_be_described(command, tmp_path):
    frame = log_normal(prompts=1, rl_steps=1)
    empty = Trace.from_tables(
        Manifest(kind="recorded"), {"workload": frame.workload.iloc[:0], "outcomes": frame.outcomes.iloc[:0]}
    )
    code, out, _ = command("trace", "describe", empty.write(tmp_path / "t"))
    assert code == 0
    assert "0 rows" in out


def test_a_recording_of_one_rl_step_is_split_at_its_gaps(command, tmp_path):
    trace = log_normal(prompts=4, group_size=2, rl_steps=1, median=50, cap=90, workers=2)
    # Three batches, of 4, 2 and 2 responses, the second of them of the first one's prompts.
    batch, lasts_s = np.array([0, 0, 0, 0, 1, 1, 2, 2]), np.array([2.0, 1.0, 2.0, 2.0, 1.0, 0.5, 3.0, 4.0])
    begins_s = np.array([0.0, 0.0, 0.5, 0.5, 3.0, 3.0, 4.5, 4.5])
    keys = {"prompt_id": list("ccddccef"), "sample": [0, 1, 0, 1, 2, 3, 0, 0]}
    times = {"worker": 0, "t_submit": begins_s, "t_finish": begins_s + lasts_s}
    made = iterations(batch=[2] * 9).assign(t_start=[0.0, 0.5, 1.0, 3.0, 3.5, 4.5, 5.0, 6.0, 7.0])
    steps = pd.DataFrame({"rl_step": [0], "t_start": [7.0], "policy_version": 0, "policy": "none", "rollout_s": 8.5})
    trace = trace.replace(
        workload=trace.workload.assign(**keys),
        outcomes=trace.outcomes.assign(**keys, **times),
        iterations=made,
        steps=steps,
    )
    path = trace.write(tmp_path / "one")
    for ends, wanted in ((["", 3], batch), (["", 2], batch > 0), (["-gap", 0.7], batch > 0), (["-gap", 0.1], batch)):
        command("trace", "import", path, "--out", tmp_path / "split", f"--split{ends[0]}", ends[1])
        found = read(tmp_path / "split")
        assert found.outcomes["rl_step"].tolist() == wanted.astype(int).tolist()
    assert found.outcomes["t_submit"].tolist() == [0.0, 0.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0]
    assert found.workload["epoch"].tolist() == [0, 0, 0, 0, 1, 1, 0, 0]
    assert found.iterations.groupby("rl_step")["t_start"].agg(list).tolist() == [
        [0.0, 0.5, 1.0],
        [0.0, 0.5],
        [0.0, 0.5, 1.5, 2.5],
    ]
    assert found.steps["t_start"].tolist() == [7.0, 10.0, 11.5]
    assert list(rollout_s(found).values()) == [2.5, 1.0, 4.0]
    for source, num, gap_s, what in ((trace, 4, 0, "2 gaps"), (trace, None, 2, "0 gaps"), (found, 2, 0, "there are 3")):
        with refused(TraceError, naming=(what,)):
            split_at_gaps(source, num, gap_s)
