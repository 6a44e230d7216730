"""Logs of metrics: console logs, JSON, event files and counters, written here as the frameworks write them."""

import itertools
import json
import sys
from functools import partial

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refused import refused
from tests.sim.workloads import console_line
from tests.traces_of_lengths import import_dump
from tltlab.errors import ConfigError, TraceError
from tltlab.importers.metrics_log import number
from tltlab.importers.sources import guess, read, read_lengths
from tltlab.importers.step_metrics import max_entropy_lengths
from tltlab.traces.metrics import mean_accept_length, rollout_s

NUM, CAP = 64, 1024


def lengths_of(step):
    rng = np.random.default_rng(step)
    return np.minimum(rng.lognormal(5.0, 1.0, NUM).astype(int) + 1, CAP)


def verl_metrics(step, **change):
    """What verl's trainer logs of an RL step with NUM responses, prompts of 100 tokens."""
    lengths = lengths_of(step)
    cut, gen = (lengths == CAP).mean(), 5.0 + 0.01 * lengths.max()
    timing = {"gen": gen, "old_log_prob": 3.0, "ref": 2.0, "reward": 0.5, "adv": 0.1, "update_actor": 12.0}
    responses = {"mean": lengths.mean(), "max": lengths.max(), "min": lengths.min(), "clip_ratio": cut}
    return {
        "actor/pg_loss": -0.002,
        "perf/total_num_tokens": lengths.sum() + 100 * NUM,
        "critic/score/mean": 0.25,
        **{f"response_length/{name}": value for name, value in responses.items()},
        **{f"timing_s/{name}": value for name, value in timing.items()},
        "prompt_length/mean": 100.0,
        "timing_s/step": gen + 20.0,
        "perf/time_per_step": gen + 20.0,
        **change,
    }


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def verl_line(step, **change):
    return console_line(step, verl_metrics(step, **change))


def figures(trace):
    """Of each RL step: its number, what its responses come to, and the columns of `steps`."""
    rows = trace.outcomes.assign(cut=trace.outcomes["finish_reason"] == "length").groupby("rl_step")
    tokens = rows["response_tokens"]
    found = {"size": tokens.size(), "tokens": tokens.sum(), "longest": tokens.max(), "shortest": tokens.min()}
    found = {name: column.tolist() for name, column in (found | {"cut": rows["cut"].sum()}).items()}
    return found | ({} if trace.steps is None else trace.steps.to_dict("list")) | {"rl_step": trace.rl_steps}


def check(trace, **expected):
    found = figures(trace)
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, nan_ok=True), name


VERL = {step: verl_metrics(step) for step in (1, 2, 3)}
VERL[4] = verl_metrics(4) | {"spec_decode/mean_acceptance_length": 3.25}


@pytest.fixture
def verl_log(tmp_path):
    """RL steps 1 to 4 among other output, with Ray's prefix, a progress bar and colours."""
    one, two, three, four = itertools.starmap(console_line, VERL.items())
    return write(
        tmp_path / "verl.log",
        "INFO 01-02 03:04:05 [core.py:77] Initializing a V1 LLM engine",
        "(TaskRunner pid=87031) step:0 - val-core/gsm8k/acc/mean@1:0.508",
        f"(TaskRunner pid=87031) {one}",
        f"\x1b[36m(TaskRunner pid=87031)\x1b[0m {two} [repeated 2x across cluster]",
        f"Training Progress:   1%|1         | 2/58 [10:02<9:21:07, 601.2s/it]\r{three}",
        four,
    )


def exported(path, rows):
    """A history as W&B's API gives it: `scan_history` row by row, or a DataFrame of it with its index."""
    if path.suffix == ".csv":
        pd.DataFrame(rows).to_csv(path)
        return path
    return write(path, *map(json.dumps, rows))


def verl_history(path):
    rows = [{"_step": step, "_timestamp": 1.7e9 + step, **metrics} for step, metrics in VERL.items()]
    rows.insert(2, {"_step": 2, "_timestamp": 1.7e9, "val-core/acc/mean@1": 0.5, "best": "no", "timing_s/gen": None})
    return exported(path, json.loads(json.dumps(rows, default=float)))


def verl_events(folder):
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    for step, metrics in VERL.items():
        for tag, value in metrics.items():
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=float(value))])
            writer.add_event(Event(step=step, summary=summary, wall_time=1.0))
    writer.close()
    return folder


@pytest.mark.parametrize("name", ["verl.log", "history.csv", "history.jsonl", "events"])
def test_verls_metrics_are_a_trace_wherever_logged(verl_log, tmp_path, name):
    kept = verl_events if name == "events" else verl_history
    path = verl_log if name == "verl.log" else kept(tmp_path / name)
    assert guess(path) == "metrics"
    trace = import_dump(path)
    truth = [lengths_of(step) for step in VERL]
    longest = np.array([lengths.max() for lengths in truth])
    check(
        trace,
        rl_step=list(VERL),
        size=[NUM] * 4,
        tokens=[lengths.sum() for lengths in truth],
        longest=longest,
        shortest=[lengths.min() for lengths in truth],
        cut=[(lengths == CAP).sum() for lengths in truth],
        rollout_s=5.0 + 0.01 * longest,
        inference_s=[5.0] * 4,
        train_s=[12.0] * 4,
        sync_s=[np.nan] * 4,
        step_s=25.0 + 0.01 * longest,
        accept_length=[np.nan] * 3 + [3.25],
    )
    assert trace.manifest.kind == "imported"
    assert set(trace.workload["prompt_tokens"]) == {100}
    assert trace.steps["t_start"].diff().tolist()[1:] == pytest.approx(trace.steps["step_s"].tolist()[:3])
    assert rollout_s(trace)[4] == pytest.approx(5.0 + 0.01 * longest[3])
    assert mean_accept_length(trace) is None


def test_commands_read_a_log_as_the_same_trace(verl_log, capsys):
    trace = read(verl_log)
    assert trace.outcomes.equals(import_dump(verl_log).outcomes)
    assert "maximum-entropy" in trace.manifest.notes
    assert "maximum-entropy" in capsys.readouterr().err


def test_the_last_run_of_an_rl_step_counts(tmp_path):
    """Killed after RL step 4, resumed from the checkpoint of 2; the output of 6 and 7 was lost."""
    first = [verl_line(s, **{"timing_s/gen": 900.0 + s}) for s in (1, 2, 3, 4)]
    second = [verl_line(s, **{"timing_s/gen": 100.0 + s}) for s in (3, 4, 5, 8)]
    trace = import_dump(write(tmp_path / "x.log", *first, "Traceback (most recent call last):", *second))
    check(trace, rl_step=[1, 2, 3, 4, 5, 8], rollout_s=[901, 902, 103, 104, 105, 108])
    assert "2 RL steps are logged more than once" in trace.manifest.notes
    assert "(3, 4)" in trace.manifest.notes
    assert "2 RL steps between" in trace.manifest.notes


def test_missing_keys_are_unknown_and_noted(tmp_path):
    lines = [
        "step:1 - response_length/mean:200.000 - timing_s/gen:10.000",
        "step:2 - timing_s/gen:11.000 - timing_s/step:30.000",
        "step:3 - response_length/mean:300.000 - response_length/max:900.000 - response_length/clip_ratio:nan",
    ]
    path = write(tmp_path / "x.log", *lines)
    trace = import_dump(path, responses=32, max_response_tokens=4096, group_size=4)
    check(trace, rl_step=[1, 3], tokens=[6400, 9600], train_s=[np.nan] * 2, rollout_s=[10.0, np.nan])
    assert trace.outcomes["response_tokens"].max() < 4096
    assert trace.manifest.group_size == 4
    for facts in ("1 RL steps have no mean", "(2)", "2 RL steps lack the number", "32", "1 RL steps lack their"):
        assert facts in trace.manifest.notes
    assert "512, a default: set --responses" in import_dump(path).manifest.notes


def trl_lines(count, **columns):
    """Lines of TRL's console, with the value of each column in each RL step."""
    fixed = {"completions/mean_length": 500.0, "completions/max_length": 900.0}
    return [str(fixed | {key: values[at] for key, values in columns.items()}) for at in range(count)]


def test_tokens_of_the_run_so_far_bound_the_responses(tmp_path):
    path = write(tmp_path / "x.log", *trl_lines(4, num_tokens=[9000.0, 17_100.0, 25_200.0, 33_300.0]))
    trace = import_dump(path)
    check(trace, tokens=[8000] * 4)
    assert trace.num_rows("outcomes") == 4 * 16
    assert "at most" in trace.manifest.notes
    assert import_dump(path, responses=12).num_rows("outcomes") == 4 * 12
    with refused(TraceError, naming=("17", "16", "num_tokens")):
        import_dump(path, responses=17)


def test_a_second_run_in_a_log_is_chosen_or_refused(tmp_path):
    first, second = (
        trl_lines(3, epoch=[0.1, 0.2, 0.3], **{"completions/mean_length": [m] * 3}) for m in (300.0, 600.0)
    )
    path = write(tmp_path / "x.log", *first, "OutOfMemoryError", *second)
    with refused(TraceError, naming=("2 runs", "line 5", "--run")):
        import_dump(path)
    with refused(TraceError, naming=("2 runs", "--run")):
        import_dump(path, run=3)
    for run, mean in ((1, 300), (2, 600)):
        check(import_dump(path, run=run, responses=4), rl_step=[1, 2, 3], tokens=[4 * mean] * 3)
    numbered = [verl_line(step) for step in (1, 2, 3, 1, 2)]
    path = write(tmp_path / "y.log", *numbered)
    with refused(TraceError, naming=("2 runs", "line 4")):
        import_dump(path)
    check(import_dump(path, run=2), rl_step=[1, 2])


def test_a_run_that_was_resumed_is_one_run(tmp_path):
    lengths = {"completions/mean_length": [300.0, 301.0, 302.0, 401.0, 402.0, 403.0]}
    path = write(tmp_path / "x.log", *trl_lines(6, epoch=[0.1, 0.2, 0.3, 0.2, 0.3, 0.4], **lengths))
    trace = import_dump(path, responses=8)
    check(trace, tokens=[8 * 300, 8 * 401, 8 * 402, 8 * 403])
    assert "2 records were logged again" in trace.manifest.notes


def test_aborted_responses_have_no_tokens(tmp_path):
    line = (
        "step:{} - response_length/mean:600.0 - response_length/max:8192.0 - response_length/min:0.0 - "
        "response_length/clip_ratio:0.02 - response_length_non_aborted/min:40.0 - response/aborted_ratio:0.25 - "
        "prompt_length/mean:200.0 - perf/total_num_tokens:409600"
    )
    outcomes = import_dump(write(tmp_path / "x.log", *(line.format(step) for step in (1, 2)))).outcomes
    empty = outcomes["response_tokens"] == 0
    assert (len(outcomes), empty.sum()) == (1024, 256)
    assert set(outcomes["finish_reason"][empty]) == {"abort"}
    assert outcomes["response_tokens"][~empty].mean() == pytest.approx(800, abs=0.5)
    assert outcomes["response_tokens"][~empty].min() == 40
    assert (outcomes["finish_reason"] == "length").sum() == 2 * 10


def test_contradicting_figures_leave_out_their_step(tmp_path):
    lines = [
        f"step:{step} - response_length/mean:{mean} - response_length/max:900.0 - response_length/min:3.0"
        for step, mean in ((1, 200.0), (2, 950.0))
    ]
    trace = import_dump(write(tmp_path / "x.log", *lines))
    assert trace.rl_steps == [1]
    assert "RL step 2 is left out (line 2)" in trace.manifest.notes


def test_a_trained_drafter_serves_from_the_next_step(tmp_path):
    trained = [{}, {"timing_s/update_drafter": 2.0}, {}, {}, {"timing_s/update_drafter": 2.0}, {}]
    lines = [verl_line(step, **more) for step, more in enumerate(trained)]
    trace = import_dump(write(tmp_path / "x.log", *lines))
    check(trace, drafter_version=[0, 0, 1, 1, 1, 2], drafter_age=[np.nan, np.nan, 0, 1, 2, 0])


def test_numbers_come_in_many_shapes():
    shapes = ["12.5ms", "np.float64(3.5)", "1,024", "61.0%", "2.5 min", "7.250s (45.0%)", "-1e-3", " 4"]
    assert [number(text) for text in shapes] == pytest.approx([0.0125, 3.5, 1024, 0.61, 150, 7.25, -1e-3, 4])
    assert [number(text) for text in ("nan", "inf", "-inf", "", "true")] == [None] * 5


@pytest.mark.parametrize("name", ["history.csv", "history.jsonl"])
def test_calls_timed_apart_belong_to_the_next_step(tmp_path, name):
    call = "profiling/Time taken: GRPOTrainer.vLLM.generate"
    rows = []
    for step in (1, 2, 3):
        rows += [{"_step": 3 * step + n, "train/global_step": step - 1, call: 2.0 * step} for n in (0, 1)]
        rows.append({"_step": 3 * step + 2, "train/global_step": step, "train/completions/mean_length": 50.0})
    check(import_dump(exported(tmp_path / name, rows), responses=4), rl_step=[1, 2, 3], rollout_s=[4.0, 8.0, 12.0])


def test_torn_row_of_table_is_left_out(tmp_path):
    path = verl_history(tmp_path / "history.csv")
    whole = path.read_text()
    path.write_text(whole[:-30])
    trace = import_dump(path)
    assert trace.rl_steps == [1, 2, 3]
    assert "cut off" in trace.manifest.notes
    path.write_text(whole.replace("\n1,", "\n1,2,3\n", 1))
    with refused(TraceError, naming=("line 3", "cells")):
        import_dump(path)


def test_wandbs_own_format_is_refused(tmp_path):
    path = tmp_path / "wandb" / "offline-run-20260101-abc" / "run-abc.wandb"
    path.parent.mkdir(parents=True)
    path.write_bytes(b":W&B\xe1\xbe\x00")
    for attempt in (
        partial(import_dump, path), partial(import_dump, path, form="metrics"), partial(read, path),
        partial(import_dump, tmp_path), partial(read, tmp_path / "wandb"), partial(read_lengths, path),
    ):  # fmt: skip
        with refused(TraceError, naming=(path, "scan_history")):
            attempt()


def completions(step, mean, **more):
    return {"step": step, "completions/mean_length": mean, **more}


TRL = {
    "loss": -0.0295, "grad_norm": float("nan"), "num_tokens": 85727.0, "completions/mean_length": 441.75,
    "completions/min_length": 212.0, "completions/max_length": 574.0, "completions/clipped_ratio": 0.25,
    "reward": 0.45, "step_time": 35.5, "epoch": 0.66,
}  # fmt: skip
TRL_QUOTED = {"loss": "0.1", "completions/mean_length": "400.5", "completions/max_length": "512", "step_time": "30"}
TRAINER = [completions(step, 100.0 + step, **{"completions/max_length": 300.0}) for step in (5, 10)]
TRL_LINES = ["  3%|3   | 2/60 [00:26<04:07]", *map(str, (TRL, TRL | {"completions/mean_length": 350}, TRL_QUOTED))]
TRL_STEPS = {"longest": [574, 574, 512], "cut": [2, 2, 0], "step_s": [35.5, 35.5, 30]}
STATE = {"best_metric": None, "log_history": [*TRAINER, {"eval_loss": 1.0, "step": 10}]}
# A count of all tokens so far is no length of a response.
SO_FAR = [completions(step, 100.0, num_tokens=1e5 * step, step_time=9.0) for step in (1, 2)]


@pytest.mark.parametrize(
    ("name", "lines", "expected"),
    [
        ("trl.log", TRL_LINES, TRL_STEPS | {"rl_step": [1, 2, 3], "tokens": [3534, 2800, 3204]}),
        ("trl.jsonl", [*map(json.dumps, SO_FAR)], {"rl_step": [1, 2], "tokens": [800, 800]}),
        ("trainer_state.json", [json.dumps(STATE)], {"rl_step": [5, 10], "tokens": [840, 880]}),
        (
            "verl.jsonl",
            [json.dumps({"step": s["step"], "data": s}) for s in TRAINER],
            {"rl_step": [5, 10], "tokens": [840, 880]},
        ),
    ],
)
def test_metrics_are_read_as_each_framework_logs_them(tmp_path, name, lines, expected):
    path = write(tmp_path / name, *lines)
    assert guess(path) == "metrics"
    check(import_dump(path, responses=8), **expected)


def test_event_files_need_their_reader(tmp_path, monkeypatch):
    (tmp_path / "events.out.tfevents.1.host").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_file_loader", None)
    with refused(ConfigError, naming=("tensorboard",)):
        import_dump(tmp_path, form="metrics")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("no metrics here", ("JSON",)),
        ("step:1 - timing_s/gen:3.0", ()),
        ("step:1 - response_length/mean:950.0 - response_length/max:900.0", ("1",)),
    ],
)
def test_a_log_without_data_is_refused(tmp_path, text, says):
    with refused(TraceError, naming=says):
        import_dump(write(tmp_path / "x.log", text))


@given(data=st.data())
def test_any_lengths_keep_mean_extremes_and_cut_share(data):
    cap = data.draw(st.integers(1, 5000))
    truth = np.array(data.draw(st.lists(st.integers(1, cap), min_size=1, max_size=60)))
    cut = float((truth == cap).mean())
    found = max_entropy_lengths(
        len(truth), mean=float(truth.mean()), least=int(truth.min()), most=int(truth.max()), cut=cut, cap=cap
    )
    assert len(found) == len(truth)
    assert (found.min(), found.max(), found.sum()) == (truth.min(), truth.max(), truth.sum())
    assert (found == cap).sum() == (truth == cap).sum()


def test_without_a_longest_lengths_are_exponential():
    found = max_entropy_lengths(10_000, mean=500.0)
    assert found.sum() == 5_000_000
    assert np.median(found) == pytest.approx(500 * np.log(2), rel=0.01)


def test_the_command_takes_a_log(command, verl_log, tmp_path):
    importing = partial(command, "trace", "import", verl_log, "--out", tmp_path / "t")
    code, out, err = importing("--workers", 2, "--json")
    assert code == 0
    assert json.loads(out)["tables"] == ["workload", "outcomes", "steps"]
    assert "assumed" in err
    assert read(tmp_path / "t").steps["rollout_s"].notna().all()
    assert importing("--responses", 8, "--format", "csv")[0] == 2


def test_a_scrape_of_metrics_is_refused(tmp_path):
    lines = ["# HELP vllm:generation_tokens_total x", 'vllm:request_generation_tokens_sum{engine="0"} 1600']
    for name in ("vllm.prom", "server.log"):
        with refused(TraceError, naming=(name, "/metrics", "TLTLAB_RECORD")):
            import_dump(write(tmp_path / name, *lines))


def test_a_logs_strategy_comes_from_its_option(command, verl_log, tmp_path):
    importing = partial(command, "trace", "import", verl_log, "--out", tmp_path / "t", "--drafted")
    assert importing("learned:7")[0] == 0
    manifest = read(tmp_path / "t").manifest
    assert (manifest.drafting, manifest.model, manifest.hardware, manifest.num_workers) == ("learned:7", *[None] * 3)
    for wrong in ("none", "learned", "learned:-1"):
        code, _, err = importing(wrong)
        assert (code, err.count("\n")) == (2, 1)
        assert wrong in err
    (tmp_path / "lengths.csv").write_text("5\n9\n")
    for path in (tmp_path / "lengths.csv", write(tmp_path / "x.log", verl_line(1))):
        with refused(ConfigError, naming=("drafted",)):
            import_dump(path, drafted="learned:7")
