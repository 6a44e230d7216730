"""Logs of metrics: console logs, JSON, event files and counters, written here as the frameworks write them."""

import json
import numbers
from functools import partial

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refused import refused
from tltlab.errors import ConfigError, TraceError
from tltlab.importers.formats import guess, import_dump
from tltlab.importers.max_entropy import max_entropy_lengths
from tltlab.importers.metrics_log import number
from tltlab.importers.sources import read, read_lengths
from tltlab.traces.metrics import mean_accept_length, rollout_s

NUM, CAP = 64, 1024


def console_line(step, metrics):
    """verl's console logger: the step, and each number with three decimals."""
    told = [f"{key}:{value:.3f}" for key, value in metrics.items() if isinstance(value, numbers.Number)]
    return " - ".join([f"step:{step}", *told])


def lengths_of(step):
    rng = np.random.default_rng(step)
    return np.minimum(rng.lognormal(5.0, 1.0, NUM).astype(int) + 1, CAP)


def verl_metrics(step, **change):
    """What verl's trainer logs of an RL step with NUM responses, prompts of 100 tokens."""
    lengths = lengths_of(step)
    gen = 5.0 + 0.01 * lengths.max()
    return {
        "actor/pg_loss": -0.002,
        "perf/total_num_tokens": lengths.sum() + 100 * NUM,
        "perf/time_per_step": gen + 20.0,
        "critic/score/mean": 0.25,
        "response_length/mean": lengths.mean(),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        "response_length/clip_ratio": (lengths == CAP).mean(),
        "prompt_length/mean": 100.0,
        "timing_s/gen": gen,
        "timing_s/old_log_prob": 3.0,
        "timing_s/ref": 2.0,
        "timing_s/reward": 0.5,
        "timing_s/adv": 0.1,
        "timing_s/update_actor": 12.0,
        "timing_s/step": gen + 20.0,
        **change,
    }


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def verl_log(tmp_path):
    """RL steps 1 to 4 among other output, with Ray's prefix, a progress bar and colours."""
    return write(
        tmp_path / "verl.log",
        "INFO 01-02 03:04:05 [core.py:77] Initializing a V1 LLM engine",
        "(TaskRunner pid=87031) step:0 - val-core/gsm8k/acc/mean@1:0.508",
        f"(TaskRunner pid=87031) {console_line(1, verl_metrics(1))}",
        f"\x1b[36m(TaskRunner pid=87031)\x1b[0m {console_line(2, verl_metrics(2))} [repeated 2x across cluster]",
        f"Training Progress:   1%|1         | 2/58 [10:02<9:21:07, 601.2s/it]\r{console_line(3, verl_metrics(3))}",
        console_line(4, verl_metrics(4) | {"spec_decode/mean_acceptance_length": 3.25}),
    )


def test_a_console_log_of_verl_is_a_trace(verl_log):
    assert guess(verl_log) == "metrics"
    trace = import_dump(verl_log)
    assert trace.rl_steps == [1, 2, 3, 4]
    assert trace.manifest.kind == "imported"
    for step, rows in trace.outcomes.groupby("rl_step"):
        truth = lengths_of(step)
        found = rows["response_tokens"]
        assert len(found) == NUM
        assert (found.min(), found.max(), found.sum()) == (truth.min(), truth.max(), truth.sum())
        assert (rows["finish_reason"] == "length").sum() == (truth == CAP).sum()
    assert set(trace.workload["prompt_tokens"]) == {100}
    steps = trace.steps.set_index("rl_step")
    assert steps.loc[1, "rollout_s"] == pytest.approx(5.0 + 0.01 * lengths_of(1).max())
    assert steps["inference_s"].tolist() == [5.0] * 4
    assert steps["train_s"].tolist() == [12.0] * 4
    assert steps["sync_s"].isna().all()
    assert steps["step_s"].tolist() == pytest.approx((steps["rollout_s"] + 20).tolist())
    assert steps["accept_length"].isna().tolist() == [True, True, True, False]
    assert steps["t_start"].diff().dropna().tolist() == pytest.approx(steps["step_s"].tolist()[:3])
    assert rollout_s(trace)[4] == pytest.approx(5.0 + 0.01 * lengths_of(4).max())
    assert mean_accept_length(trace) is None


def test_commands_read_a_log_as_a_trace(verl_log, capsys):
    trace = read(verl_log)
    assert trace.rl_steps == [1, 2, 3, 4]
    assert "maximum-entropy" in trace.manifest.notes
    assert "maximum-entropy" in capsys.readouterr().err
    with refused(TraceError, naming=("JSON",)):
        read(write(verl_log.parent / "x.log", "nothing"))


def test_the_same_log_is_the_same_trace(verl_log, tmp_path):
    for name in "ab":
        import_dump(verl_log).write(tmp_path / name)
    files = [sorted(p.name for p in (tmp_path / name).iterdir()) for name in "ab"]
    assert files[0] == files[1]
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files[0])


def test_a_resumed_run_and_gaps(tmp_path):
    """Killed after RL step 4, resumed from the checkpoint of 2; the output of 6 and 7 was lost."""
    first = [console_line(s, verl_metrics(s, **{"timing_s/gen": 900.0 + s})) for s in (1, 2, 3, 4)]
    second = [console_line(s, verl_metrics(s, **{"timing_s/gen": 100.0 + s})) for s in (3, 4, 5, 8)]
    trace = import_dump(write(tmp_path / "x.log", *first, "Traceback (most recent call last):", *second))
    assert trace.rl_steps == [1, 2, 3, 4, 5, 8]
    assert trace.steps["rollout_s"].tolist() == [901, 902, 103, 104, 105, 108]
    assert "2 RL steps are logged more than once (a resumed run): the last one counts (3, 4)" in trace.manifest.notes
    assert "2 RL steps between the first and the last are not in the log" in trace.manifest.notes


def test_missing_keys_are_unknown_and_said(tmp_path):
    lines = [
        "step:1 - response_length/mean:200.000 - timing_s/gen:10.000",
        "step:2 - timing_s/gen:11.000 - timing_s/step:30.000",
        "step:3 - response_length/mean:300.000 - response_length/max:900.000 - response_length/clip_ratio:nan",
    ]
    path = write(tmp_path / "x.log", *lines)
    trace = import_dump(path, responses=32, max_response_tokens=4096, group_size=4)
    assert trace.rl_steps == [1, 3]
    assert trace.outcomes.groupby("rl_step")["response_tokens"].mean().tolist() == [200, 300]
    assert trace.outcomes["response_tokens"].max() < 4096
    assert trace.manifest.group_size == 4
    assert trace.steps["train_s"].isna().all()
    assert trace.steps["rollout_s"].isna().tolist() == [False, True]
    notes = trace.manifest.notes
    assert "1 RL steps say no mean length and are left out (2)" in notes
    assert "2 RL steps do not say how many responses they have: 32, as given" in notes
    assert "1 RL steps do not say their longest" in notes
    assert "512, a default: say --responses" in import_dump(path).manifest.notes


def test_a_step_whose_figures_contradict_each_other_is_left_out(tmp_path):
    good = "step:1 - response_length/mean:200.0 - response_length/max:900.0 - response_length/min:3.0"
    bad = "step:2 - response_length/mean:950.0 - response_length/max:900.0 - response_length/min:3.0"
    trace = import_dump(write(tmp_path / "x.log", good, bad))
    assert trace.rl_steps == [1]
    assert "RL step 2 is left out (line 2)" in trace.manifest.notes


def test_a_drafter_that_was_trained_serves_from_the_next_step_on(tmp_path):
    trained = [{}, {"timing_s/update_drafter": 2.0}, {}, {}, {"timing_s/update_drafter": 2.0}, {}]
    lines = [console_line(s, verl_metrics(s) | more) for s, more in enumerate(trained)]
    steps = import_dump(write(tmp_path / "x.log", *lines)).steps
    assert steps["drafter_version"].tolist() == [0, 0, 1, 1, 1, 2]
    assert steps["drafter_age"].tolist()[2:] == [0, 1, 2, 0]
    assert steps["drafter_age"].isna().tolist()[:2] == [True, True]


def test_numbers_come_in_many_shapes():
    shapes = ["12.5ms", "np.float64(3.5)", "1,024", "61.0%", "2.5 min", "7.250s (45.0%)", "-1e-3", " 4"]
    assert [number(text) for text in shapes] == pytest.approx([0.0125, 3.5, 1024, 0.61, 150, 7.25, -1e-3, 4])
    assert [number(text) for text in ("nan", "inf", "-inf", "", "true")] == [None] * 5


def test_trl_prints_dictionaries(tmp_path):
    line = (
        "{{'loss': -0.0295, 'grad_norm': nan, 'num_tokens': 85727.0, 'completions/mean_length': {}, "
        "'completions/min_length': 212.0, 'completions/max_length': 574.0, 'completions/clipped_ratio': 0.25, "
        "'reward': 0.45, 'step_time': 35.5, 'epoch': 0.66}}"
    )
    quoted = "{'loss': '0.1', 'completions/mean_length': '400.5', 'completions/max_length': '512', 'step_time': '30'}"
    path = write(tmp_path / "trl.log", "  3%|3   | 2/60 [00:26<04:07]", line.format(441.75), line.format(350), quoted)
    trace = import_dump(path, responses=16)
    assert trace.rl_steps == [1, 2, 3]
    assert trace.outcomes.groupby("rl_step")["response_tokens"].sum().tolist() == [441.75 * 16, 5600, 6408]
    assert trace.outcomes.groupby("rl_step")["response_tokens"].max().tolist() == [574, 574, 512]
    assert (trace.outcomes["finish_reason"] == "length").sum() == 8
    assert trace.steps["step_s"].tolist() == [35.5, 35.5, 30]
    assert "they are counted from 1" in trace.manifest.notes


def test_a_trainers_state_and_json_lines_are_read(tmp_path):
    logs = [{"step": s, "completions/mean_length": 100.0 + s, "completions/max_length": 300.0} for s in (5, 10)]
    state = tmp_path / "trainer_state.json"
    state.write_text(json.dumps({"best_metric": None, "log_history": [*logs, {"eval_loss": 1.0, "step": 10}]}))
    lines = write(tmp_path / "m.jsonl", *(json.dumps({"step": s["step"], "data": s}) for s in logs))
    for path in (state, lines):
        trace = import_dump(path, responses=8)
        assert trace.rl_steps == [5, 10]
        assert trace.outcomes.groupby("rl_step")["response_tokens"].sum().tolist() == [840, 880]


def test_a_file_of_metrics_is_no_table_of_lengths(tmp_path):
    """`num_tokens` of TRL, which counts all tokens so far, once passed for a response's length."""
    logs = [{"step": s, "num_tokens": 1e5 * s, "completions/mean_length": 100.0, "step_time": 9.0} for s in (1, 2)]
    path = write(tmp_path / "trl.jsonl", *map(json.dumps, logs))
    assert guess(path) == "metrics"
    assert import_dump(path, responses=8).outcomes["response_tokens"].sum() == 1600


def exported(path, rows):
    """A history as W&B's API gives it: `scan_history` row by row, or a DataFrame of it with its index."""
    if path.suffix == ".csv":
        pd.DataFrame(rows).to_csv(path)
        return path
    return write(path, *map(json.dumps, rows))


@pytest.mark.parametrize("name", ["history.csv", "history.jsonl"])
def test_an_exported_history_of_verl_in_wandb_is_a_trace(tmp_path, name):
    rows = [{"_step": s, "_timestamp": 1.7e9 + s, **verl_metrics(s)} for s in (1, 2, 3)]
    rows.insert(2, {"_step": 2, "_timestamp": 1.7e9, "val-core/acc/mean@1": 0.5, "best": "no", "timing_s/gen": None})
    path = exported(tmp_path / name, json.loads(json.dumps(rows, default=float)))
    assert guess(path) == "metrics"
    trace = import_dump(path)
    assert trace.rl_steps == [1, 2, 3]
    assert trace.steps["rollout_s"].tolist() == pytest.approx([verl_metrics(s)["timing_s/gen"] for s in (1, 2, 3)])
    lengths = trace.outcomes.groupby("rl_step")["response_tokens"]
    assert lengths.sum().tolist() == pytest.approx([lengths_of(s).sum() for s in (1, 2, 3)], abs=2)
    assert lengths.max().tolist() == [lengths_of(s).max() for s in (1, 2, 3)]


@pytest.mark.parametrize("name", ["history.csv", "history.jsonl"])
def test_calls_that_trl_times_apart_belong_to_the_next_rl_step(tmp_path, name):
    call = "profiling/Time taken: GRPOTrainer.vLLM.generate"
    rows = []
    for step in (1, 2, 3):
        rows += [{"_step": 3 * step + n, "train/global_step": step - 1, call: 2.0 * step} for n in (0, 1)]
        rows.append({"_step": 3 * step + 2, "train/global_step": step, "train/completions/mean_length": 50.0})
    trace = import_dump(exported(tmp_path / name, rows), responses=4)
    assert trace.rl_steps == [1, 2, 3]
    assert trace.steps["rollout_s"].tolist() == [4.0, 8.0, 12.0]


def test_a_file_in_the_format_of_wandb_is_refused_with_what_to_export(tmp_path):
    path = tmp_path / "wandb" / "offline-run-20260101-abc" / "run-abc.wandb"
    path.parent.mkdir(parents=True)
    path.write_bytes(b":W&B\xe1\xbe\x00")
    for attempt in (
        partial(import_dump, path), partial(import_dump, path, form="metrics"), partial(read, path),
        partial(import_dump, tmp_path), partial(read, tmp_path / "wandb"), partial(read_lengths, path),
    ):  # fmt: skip
        with pytest.raises(TraceError) as refused:
            attempt()
        assert str(path) in str(refused.value)
        assert "scan_history" in str(refused.value)


def test_skyrl_logs_are_read(tmp_path):
    metrics = {
        "generate/avg_num_tokens": 321.5, "generate/min_num_tokens": 4, "generate/max_num_tokens": 1024,
        "timing/generate": 152.0, "timing/step": 246.8, "timing/fwd_logprobs_values_reward": 20.0,
        "timing/policy_train": 60.0, "timing/sync_weights": 5.0, "trainer/global_step": 7,
    }  # fmt: skip
    trace = import_dump(write(tmp_path / "sky.jsonl", json.dumps(metrics), json.dumps(metrics)), responses=10)
    assert trace.rl_steps == [7]
    assert trace.outcomes["response_tokens"].sum() == 3215
    stages = trace.steps[["rollout_s", "inference_s", "train_s", "sync_s", "step_s"]]
    assert stages.iloc[0].tolist() == [152.0, 20.0, 60.0, 5.0, 246.8]


def test_nemo_rl_logs_are_read(tmp_path):
    console = write(
        tmp_path / "ray-driver.log",
        "========================= Step 3/1000 =========================",
        "▶ Generating responses for batch of size 8...",
        "📊 Training Results:",
        "  • Mean Generation Length: 325.5000",
        "  • Total step time: 61.20s",
        "  • generation: 40.10s (65.5%)",
        "  • policy_training: 12.00s (19.6%)",
    )
    stored = tmp_path / "metrics.json"
    values = {
        "train/mean_gen_tokens_per_sample": 325.5, "train/global_valid_seqs": 16.0,
        "timing/train/total_step_time": 61.2, "timing/train/generation": 40.1, "timing/train/policy_training": 12.0,
        "validation/accuracy": 0.2,
    }  # fmt: skip
    stored.write_text(json.dumps({key: {"3": value} for key, value in values.items()}))
    for path in (console, stored):
        trace = import_dump(path)
        assert trace.rl_steps == [3]
        assert trace.outcomes["response_tokens"].mean() == 325.5
        assert trace.steps[["rollout_s", "train_s", "step_s"]].iloc[0].tolist() == [40.1, 12.0, 61.2]
    assert len(trace.outcomes) == 16


def scrape(requests, tokens, drafts, accepted):
    bounds = {"200.0": requests // 2, "500.0": requests, "+Inf": requests}
    return [
        "# HELP vllm:generation_tokens_total x",
        f'vllm:request_generation_tokens_sum{{engine="0",model_name="m"}} {tokens}',
        f'vllm:request_generation_tokens_count{{engine="0",model_name="m"}} {requests}',
        *(f'vllm:request_generation_tokens_bucket{{engine="0",le="{le}"}} {num}' for le, num in bounds.items()),
        f'vllm:request_success_total{{engine="0",finished_reason="length"}} {requests // 4}',
        f'vllm:request_success_total{{engine="0",finished_reason="stop"}} {requests - requests // 4}',
        f'vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}',
        f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}',
    ]


def test_scrapes_of_vllms_counters_end_rl_steps(tmp_path):
    path = write(tmp_path / "metrics.prom", *scrape(8, 1600, 100, 200), *scrape(24, 4800, 300, 500))
    trace = import_dump(path)
    by_step = trace.outcomes.groupby("rl_step")["response_tokens"]
    assert by_step.agg(["size", "sum"]).values.tolist() == [[8, 1600], [16, 3200]]
    assert trace.steps["accept_length"].tolist() == pytest.approx([3.0, 2.5])
    assert (trace.outcomes["finish_reason"] == "length").groupby(trace.outcomes["rl_step"]).sum().tolist() == [2, 4]


def test_event_files_of_tensorboard_are_read(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path / "tb"))
    for step in (1, 2):
        for tag, value in verl_metrics(step).items():
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=float(value))])
            writer.add_event(Event(step=step, summary=summary, wall_time=1.0))
    writer.close()
    assert guess(tmp_path / "tb") == "metrics"
    trace = import_dump(tmp_path / "tb")
    assert trace.rl_steps == [1, 2]
    tokens = trace.outcomes.groupby("rl_step")["response_tokens"].sum()
    assert tokens.tolist() == [lengths_of(1).sum(), lengths_of(2).sum()]
    assert trace.steps["inference_s"].tolist() == [5.0, 5.0]


def test_event_files_without_their_reader_are_refused_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "events.out.tfevents.1.host").write_bytes(b"")
    monkeypatch.setitem(__import__("sys").modules, "tensorboard.backend.event_processing.event_file_loader", None)
    with refused(ConfigError):
        import_dump(tmp_path, form="metrics")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("no metrics here", ("JSON",)),
        ("step:1 - timing_s/gen:3.0", ()),
        ("step:1 - response_length/mean:950.0 - response_length/max:900.0", ("1",)),
    ],
)
def test_a_log_that_tells_nothing_is_refused(tmp_path, text, says):
    with refused(TraceError, naming=says):
        import_dump(write(tmp_path / "x.log", text))


@given(data=st.data())
def test_any_lengths_come_back_with_their_mean_extremes_and_cut_share(data):
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


def test_figures_that_contradict_each_other_have_no_lengths():
    for options in ({"mean": 5.0, "least": 6, "most": 9}, {"mean": 10.0, "most": 9}, {"mean": 1.0, "most": 9}):
        with refused(ValueError, naming=("mean",)):
            max_entropy_lengths(4, **options)


@pytest.fixture
def importing(command):
    return partial(command, "trace", "import")


def test_the_command_takes_a_log(importing, verl_log, tmp_path):
    code, out, err = importing(verl_log, "--out", tmp_path / "t", "--workers", 2, "--json")
    assert code == 0
    assert json.loads(out)["tables"] == ["workload", "outcomes", "steps"]
    assert "assumed: lengths are not measured" in err
    assert read(tmp_path / "t").steps["rollout_s"].notna().all()
    assert importing(verl_log, "--out", tmp_path / "t", "--responses", 8, "--format", "csv")[0] == 2
