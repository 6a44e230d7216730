"""Cost tables: what lies between and beyond the knots, what a file may say, and the fits that make one."""

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tltlab.bench.engine_overhead import (
    accuracy_rows,
    fit_engine,
    read_speedups,
    shipped_table,
    speedups,
    with_speculation,
)
from tltlab.bench.published.kernels import Kernels, from_kernels, leave_one_out
from tltlab.calibration.api import calibrate
from tltlab.calibration.iterations import iterations_of, measured_rows, recorded_rows
from tltlab.calibration.measurements import checked
from tltlab.calibration.table import MeasuredTable, RecordedTable, predict_iterations
from tltlab.costs.load import load_costs
from tltlab.costs.table import Roofline, TableCosts
from tltlab.errors import ConfigError
from tltlab.hardware import gpu, model
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.traces.trace import Trace, read

TRACES = Path(__file__).resolve().parents[3] / "traces"
CHAIN = Strategy.chain("learned", 4)
TABLE = {
    "kind": "table",
    "forward": [{"tokens": m, "seconds": s} for m, s in ((2, 4e-3), (8, 5e-3), (32, 6e-3), (64, 9e-3))],
    "attention": [
        {"batch": 2, "fixed_s": 1e-3, "per_context_s": 2e-8},
        {"batch": 8, "fixed_s": 2e-3, "per_context_s": 1e-8},
    ],
    "base_s": 1e-4, "per_request_s": 1e-5, "prefill_per_token_s": 1e-5, "sd_base_s": 1e-3, "sd_idle_s": 2e-4,
    "draft_level_s": 3e-4, "draft_level_per_request_s": 1e-6,
}  # fmt: skip
COSTS = TableCosts.model_validate(TABLE)
SHAPED = {**TABLE, "roofline": {"gpu": "H100", "model": "Qwen2.5-7B", "tp": 1}}


def test_an_iteration_is_read_from_the_knots():
    for table in (TABLE, SHAPED):
        plain = load_costs(table).iteration(NO_SPECULATION)
        assert plain.without_context_s(8) == pytest.approx(5e-3 + 2e-3 + 1e-4 + 8e-5)
        assert plain.context_slope_s(8) == pytest.approx(1e-8)


def test_speculation_verifies_more_tokens_and_adds_drafting():
    cost = COSTS.iteration(Strategy("learned", 3, 2, 4))
    assert cost.draft_s(8) == pytest.approx(3 * (3e-4 + 8e-6))
    assert cost.without_context_s(8) == pytest.approx(6e-3 + 2e-3 + 1e-4 + 8e-5 + 1e-3 + cost.draft_s(8))
    idle, bare = (COSTS.iteration(NO_SPECULATION, drafter_loaded=x).seconds(2, 0) for x in (True, False))
    assert idle - bare == pytest.approx(2e-4)


def test_without_a_roofline_times_are_linear_between_and_beyond_the_knots():
    forward = COSTS.model_copy(update={"attention": COSTS.attention[:1], "base_s": 0.0, "per_request_s": 0.0})
    at = [forward.iteration(NO_SPECULATION, tokens_to_verify=m).without_context_s(1) - 1e-3 for m in (1, 20, 64, 128)]
    assert at == pytest.approx([4e-3, 5.5e-3, 9e-3, 9e-3 + 64 * 3e-3 / 32])


def test_context_costs_a_request_alike_where_the_slope_is_one():
    slopes = {**TABLE, "attention": [{"batch": b, "per_context_s": 3e-8} for b in (2, 8, 64)]}
    cost = load_costs(slopes).iteration(NO_SPECULATION)
    assert [cost.context_slope_s(b) for b in (1, 2, 5, 64, 500)] == pytest.approx([3e-8] * 5)


@given(st.floats(0.2, 1.0), st.lists(st.integers(1, 12), min_size=1, max_size=5, unique=True), st.integers(1, 8192))
def test_at_one_utilisation_a_roofline_table_is_that_roofline(used: float, powers: list[int], tokens: int):
    roofline = Roofline(gpu="H100", model="Qwen2.5-7B")
    ideal = roofline.shape()
    knots = [{"tokens": 2**p, "seconds": ideal.at(2**p) / used} for p in sorted(powers)]
    table = TableCosts.model_validate({"forward": knots, "attention": [{"batch": 1}], "roofline": roofline})
    assert table.iteration(NO_SPECULATION, tokens_to_verify=tokens).seconds(1, 0) == pytest.approx(
        ideal.at(tokens) / used
    )


def test_where_utilisation_rises_towards_the_ridge_times_do_not_dip():
    ideal = Roofline(gpu="H100", model="Qwen2.5-7B").shape()
    knots = [{"tokens": 64, "seconds": ideal.at(64) / 0.5}, {"tokens": 512, "seconds": ideal.at(512) / 0.9}]
    cost = load_costs({**SHAPED, "forward": knots}).iteration
    times = [cost(NO_SPECULATION, tokens_to_verify=m).without_context_s(1) for m in range(64, 513, 16)]
    assert all(a <= b for a, b in pairwise(times))
    assert ideal.at(160) / 0.7 < ideal.at(64) / 0.5  # Utilisation alone would dip.


def test_the_ideal_reads_the_weights_or_multiplies_by_them():
    ideal = Roofline(gpu="H100", model="Qwen2.5-32B", tp=4).shape()
    weights, device = model("Qwen2.5-32B").weight_params, gpu("H100")
    assert ideal.at(1) == pytest.approx(2 * weights / 4 / device.hbm_bytes_per_s, rel=1e-3)
    assert ideal.at(8192) == pytest.approx(8192 * 2 * weights / 4 / device.peak_flops, rel=1e-3)


def test_graphs_pad_the_tokens():
    costs = COSTS.model_copy(update={"graph_sizes": (8, 32)})
    assert costs.iteration(NO_SPECULATION, tokens_to_verify=5).without_context_s(2) == pytest.approx(
        6e-3 + 1e-3 + 1e-4 + 2e-5
    )


growing = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5).map(lambda steps: np.cumsum(steps) + 1e-3)


@st.composite
def tables(draw: st.DrawFn) -> TableCosts:
    seconds, fixed, context = (draw(growing) for _ in range(3))
    at = sorted(draw(st.lists(st.integers(1, 2000), min_size=len(seconds), max_size=len(seconds), unique=True)))
    batches = sorted(
        draw(st.lists(st.integers(1, 300), min_size=1, max_size=min(len(fixed), len(context)), unique=True))
    )
    terms = {
        "forward": [{"tokens": m, "seconds": s} for m, s in zip(at, seconds, strict=False)],
        "attention": [
            {"batch": b, "fixed_s": f, "per_context_s": c / b}
            for b, f, c in zip(batches, fixed, context, strict=False)
        ],
        "roofline": draw(st.sampled_from([None, {"gpu": "A100", "model": "Llama-3.3-70B", "tp": 4}])),
    }  # fmt: skip
    return TableCosts.model_validate({**TABLE, **terms})


@settings(max_examples=60)
@given(tables(), st.integers(1, 400), st.integers(2, 60), st.integers(1, 8), st.floats(0, 1e5))
def test_times_grow_with_everything(costs: TableCosts, batch: int, verify: int, depth: int, each: float):
    def took(b: int, v: int, d: int, context: float) -> float:
        return costs.iteration(Strategy("learned", d, 64, v)).seconds(b, b * context)

    here = took(batch, verify, depth, each)
    assert math.isfinite(here)
    assert here > 0
    slack = 1e-9 * here
    for more in ((batch + 1, verify, depth, each), (batch, verify + 1, depth, each),
                 (batch, verify, depth + 1, each), (batch, verify, depth, each + 100.0)):  # fmt: skip
        assert took(*more) >= here - slack
    assert here >= costs.iteration(NO_SPECULATION).seconds(batch, batch * each) - slack


def test_a_dip_within_noise_is_lifted_and_a_deeper_one_is_named():
    knots = [{"tokens": 8, "seconds": 1.0}, {"tokens": 16, "seconds": 0.97}]
    lifted = load_costs({**TABLE, "forward": knots})
    assert isinstance(lifted, TableCosts)
    assert [k.seconds for k in lifted.forward] == [1.0, 1.0]
    with pytest.raises(ConfigError, match=r"tokens = 16: seconds falls to 0.9 from 1"):
        load_costs({**TABLE, "forward": [knots[0], {"tokens": 16, "seconds": 0.9}]})
    falling = [{"batch": 1, "per_context_s": 1e-8}, {"batch": 2, "per_context_s": 1e-9}]
    with pytest.raises(ConfigError, match="batch = 2"):
        load_costs({**TABLE, "attention": falling})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"forward": [{"tokens": 8, "seconds": -1e-3}]}, "forward.0.seconds"),
        ({"forward": [{"tokens": 0, "seconds": 1e-3}]}, "forward.0.tokens"),
        ({"forward": []}, "forward"),
        ({"attention": [{"batch": 4, "fixed_s": float("nan")}]}, "attention.0.fixed_s"),
        ({"forward": [{"tokens": 8, "seconds": 1.0}, {"tokens": 8, "seconds": 1.0}]}, "ascending"),
        ({"roofline": {"gpu": "H900", "model": "Qwen2.5-7B"}}, "H900"),
        ({"roofline": {"gpu": "H100", "model": "GPT-9"}}, "GPT-9"),
        ({"forwards": []}, "forwards"),
    ],
)
def test_a_bad_file_is_refused_and_the_place_named(change: dict[str, object], named: str):
    with pytest.raises(ConfigError, match=named):
        load_costs({**TABLE, **change})


def test_what_was_not_measured_is_named_when_it_is_needed():
    costs = COSTS.model_copy(update={"sd_base_s": None, "prefill_per_token_s": None})
    with pytest.raises(ConfigError, match="sd_base_s"):
        costs.iteration(CHAIN)
    with pytest.raises(ConfigError, match="prefill_per_token_s"):
        costs.prefill_s(10)


def test_a_file_reads_back_as_it_was_written(tmp_path: Path):
    dipping = TableCosts.model_validate(
        {**SHAPED, "attention": [{"batch": b, "fixed_s": 1e-3, "per_context_s": 0.98 / b} for b in (3, 7, 11, 13)]}
    )
    for costs in (COSTS, dipping, TableCosts.model_validate(SHAPED)):
        assert load_costs(costs.write(tmp_path / "costs.json")) == costs


def test_a_question_beyond_the_knots_is_said_to_be_one():
    assert COSTS.calibrated is not None
    assert COSTS.calibrated.outside(batch=4, verified_tokens=20, context_tokens=1e9) == []
    assert COSTS.calibrated.outside(batch=9, verified_tokens=100, context_tokens=0) == ["batch", "verified_tokens"]


def from_measurements(points: pd.DataFrame) -> MeasuredTable:
    return MeasuredTable().fit(measured_rows(checked(points)))


def from_trace(trace: Trace, rl_steps: list[int] | None = None) -> TableCosts:
    chosen = trace if rl_steps is None else trace.select(rl_steps)
    return RecordedTable().fit(recorded_rows(iterations_of(chosen), chosen.steps)).costs_


def measured(noise: float = 0.0, drafts: bool = False) -> pd.DataFrame:
    """Times of a device that is known: 5 ms, 20 us a token, 30 us a request, 10 ns a token of context."""
    rng = np.random.default_rng(0)
    rows = []
    for batch in (1, 2, 4, 8, 16, 32):
        for verify in (1, 2, 4, 8):
            for each in (100, 1000, 5000):
                for depth in (0, 2, 6) if drafts else (0,):
                    context = batch * each
                    seconds = 5e-3 + 2e-5 * batch * verify + 3e-5 * batch + 1e-8 * context
                    seconds += (1e-3 + depth * (4e-4 + 2e-6 * batch)) if depth else 0.0
                    rows.append((batch, verify, context, seconds * rng.lognormal(0.0, noise), depth))
    frame = pd.DataFrame(rows, columns=["batch", "tokens_to_verify", "context_tokens", "seconds", "draft_depth"])
    return frame if drafts else frame.drop(columns="draft_depth")


def test_measurements_of_a_known_device_are_reproduced_and_left_out_batches_predicted():
    found = from_measurements(measured())
    assert found.residuals_["error"].abs().max() < 1e-3
    # Leaving out the largest batch leaves its attention to be extended, exactly here: the device is linear.
    assert found.residuals_["held_out_error"].abs().mean() < 0.02
    cost = found.costs_.iteration(NO_SPECULATION, tokens_to_verify=3.0)
    assert cost.seconds(12, 12 * 700) == pytest.approx(5e-3 + 2e-5 * 36 + 3e-5 * 12 + 1e-8 * 12 * 700, rel=0.01)
    assert found.costs_.calibrated is not None
    assert found.costs_.calibrated.batch == (1, 32)


def test_noise_that_falls_is_smoothed_and_the_table_says_so():
    noisy = from_measurements(measured(noise=0.05))
    assert all(a.seconds <= b.seconds for a, b in pairwise(noisy.costs_.forward))
    assert any("fall where tokens grow" in note for note in noisy.costs_.notes)
    truth = measured()["seconds"].to_numpy()
    smooth = np.abs(noisy.residuals_["predicted_s"] / truth - 1).mean()
    raw = np.abs(noisy.residuals_["seconds"] / truth - 1).mean()
    assert smooth < 0.7 * raw


def test_drafting_is_told_from_verifying():
    costs = from_measurements(measured(drafts=True)).costs_
    cost = costs.iteration(Strategy("learned", 4, 2, 4))
    assert cost.draft_s(8) == pytest.approx(4 * (4e-4 + 1.6e-5), rel=0.01)
    assert from_measurements(measured()).costs_.sd_base_s is None


@pytest.mark.parametrize(
    ("points", "named"),
    [
        (measured().drop(columns="context_tokens"), "context_tokens"),
        (measured().assign(seconds=-1.0), "seconds"),
        (measured().assign(batch=0), "batch"),
        (measured().query("context_tokens == batch * 100"), "two or more"),
        (measured()[:0], "no rows"),
    ],
)
def test_measurements_that_are_none_are_refused(points: pd.DataFrame, named: str):
    with pytest.raises(ConfigError, match=named):
        from_measurements(points)


def write_kernels(folder: Path, utilisation: float = 0.5) -> Kernels:
    """Tables of a GPU that always reaches the same share of the roofline, and reads keys at 1 us per 1,000 tokens."""
    device = gpu("H100")
    axes = [2**e for e in (0, 3, 6, 8, 10, 12)], [2**e for e in (5, 10, 13, 16)]
    grid = [(m, n, k) for m in axes[0] for n in axes[1] for k in axes[1]]
    gemm = pd.DataFrame(grid, columns=["m", "n", "k"]).assign(gpu="h100")
    m, n, k = (gemm[c].to_numpy(float) for c in "mnk")
    moved, compute = 2 * (m * k + k * n + m * n) / device.hbm_bytes_per_s, 2 * m * n * k / device.peak_flops
    gemm["latency_ms"] = 1e3 * (moved**4 + compute**4) ** 0.25 / utilisation
    cells = [(b, h, kv, s) for b in (1, 8, 64) for h, kv in ((24, 4), (32, 4)) for s in (255, 1023, 4095, 16383)]
    attention = pd.DataFrame(cells, columns=["batch_size", "num_heads", "num_key_value_heads", "step"])
    attention["latency_ms"] = 0.01 + 1e-6 * attention["batch_size"] * attention["step"]
    reduce = pd.DataFrame({"num_gpus": 4, "message_size": [1024, 2048], "latency_ms": [0.01, 0.02]})
    gemm.to_parquet(folder / "gemm_bf16.parquet")
    attention.assign(gpu="h100").to_parquet(folder / "decode_attention_bf16.parquet")
    reduce.assign(gpu="h100", kernel_source="vLLM_custom_graph").to_parquet(folder / "allreduce_bf16.parquet")
    return Kernels.read(folder, "H100")


def test_kernels_between_their_grid_follow_the_roofline(tmp_path: Path):
    kernels = write_kernels(tmp_path)
    products = ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944))
    for tokens in (1.0, 100.0, 3000.0):
        layer = sum(float(kernels.ideal_gemm_s(np.asarray(tokens), n, k)) / 0.5 for n, k in products)
        assert kernels.layers_s(model("Qwen2.5-7B"), 1, tokens) == pytest.approx(28 * layer)
    assert kernels.all_reduce_s(4, [1024, 1536, 4096]) == pytest.approx([1e-5, 1.5e-5, 4e-5])
    assert kernels.all_reduce_s(1, 1024) == 0


def test_attention_is_interpolated_between_batches_contexts_and_heads(tmp_path: Path):
    kernels = write_kernels(tmp_path)
    for batch, past in ((1, 255), (5, 3000), (64, 16383), (64, 50000)):
        expected = 28 * (1e-5 + 1e-9 * batch * past)
        assert kernels.attention_s(model("Qwen2.5-7B"), 1, batch, past) == pytest.approx(expected)


def test_a_table_of_kernels_is_their_sum(tmp_path: Path):
    kernels, shape = write_kernels(tmp_path), model("Qwen2.5-7B")
    costs = from_kernels(kernels, "Qwen2.5-7B", 1)
    cost = costs.iteration(NO_SPECULATION)
    for batch in (1, 8, 64):
        summed = kernels.forward_s(shape, 1, batch) + kernels.attention_s(shape, 1, batch, 2000)
        assert cost.seconds(batch, batch * 2000) == pytest.approx(float(summed), rel=1e-3)
    assert costs.kv_capacity_tokens
    assert costs.notes
    assert costs.sd_base_s is None


def test_kernels_that_were_not_measured_are_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"gemm_bf16\.parquet"):
        Kernels.read(tmp_path, "H100")
    kernels = write_kernels(tmp_path)
    with pytest.raises(ConfigError, match="no H200"):
        Kernels.read(tmp_path, "H200")
    with pytest.raises(ConfigError, match="KV heads"):
        from_kernels(kernels, "Qwen2.5-32B", 4)
    with pytest.raises(ConfigError, match="tp 3"):
        from_kernels(kernels, "Qwen2.5-7B", 3)


def recorded(costs: TableCosts, outliers: bool = False) -> Trace:
    """A trace whose iterations took what `costs` says; one in a hundred took ten times as long."""
    rng = np.random.default_rng(0)
    whole = read(TRACES / "tiny")
    rows = []
    for i in range(3000):
        batch, depth = int(rng.integers(1, 64)), int(rng.choice([0, 4]))
        strategy = CHAIN if depth else NO_SPECULATION
        cost, context, prefill = costs.iteration(strategy), batch * int(rng.integers(50, 4000)), 500 * (i % 50 == 0)
        slow = 10.0 if outliers and i % 100 == 7 else 1.0
        rows.append(
            {
                "rl_step": whole.rl_steps[0], "worker": i % 2, "iteration": i, "t_start": float(i),
                "duration": slow * (cost.seconds(batch, context) + costs.prefill_s(prefill)),
                "draft_duration": slow * cost.draft_s(batch), "batch": batch, "context_tokens": context,
                "prefill_tokens": prefill, "drafter": strategy.drafter, "draft_depth": depth, "top_k": strategy.top_k,
                "tokens_to_verify": depth + 1, "num_drafted": batch * depth, "num_accepted": 0, "num_generated": batch,
                "next_draft_depth": depth,
            }
        )  # fmt: skip
    return whole.replace(iterations=pd.DataFrame(rows))


def test_a_trace_of_known_times_gives_them_back():
    knee = {
        **TABLE,
        "forward": [{"tokens": m, "seconds": s} for m, s in ((1, 4e-3), (64, 4e-3), (256, 9e-3), (315, 12e-3))],
        "attention": [{"batch": 1, "per_context_s": 2e-8}],
        "per_request_s": 0.0, "sd_idle_s": 0.0,
    }  # fmt: skip
    truth = TableCosts.model_validate(knee)
    trace = recorded(truth)
    found = from_trace(trace)
    plain, chain = (found.iteration(s) for s in (NO_SPECULATION, CHAIN))
    for batch in (4, 16, 50):
        assert plain.seconds(batch, 4e4) == pytest.approx(truth.iteration(NO_SPECULATION).seconds(batch, 4e4), rel=0.03)
        assert chain.seconds(batch, 4e4) == pytest.approx(truth.iteration(CHAIN).seconds(batch, 4e4), rel=0.03)
        assert chain.draft_s(batch) <= truth.iteration(CHAIN).draft_s(batch) + 1e-3
    assert found.prefill_s(1.0) == pytest.approx(1e-5, rel=0.1)
    rows = recorded_rows(trace.iterations)
    sums = rows.sums(predict_iterations(found, rows))
    assert len(sums) == 2
    assert sums["bias"].abs().max() < 0.01


def test_outliers_move_the_level_and_not_the_shape():
    found = from_trace(recorded(COSTS, outliers=True))
    shares = [found.iteration(s).seconds(b, 4e4) / COSTS.iteration(s).seconds(b, 4e4)
              for s in (NO_SPECULATION, CHAIN) for b in (8, 16, 32)]  # fmt: skip
    assert max(shares) / min(shares) < 1.06
    assert np.mean(shares) == pytest.approx(1.09, abs=0.04)


def test_predictions_of_iterations_are_the_models_own():
    table = recorded(COSTS).iterations
    assert table is not None
    assert predict_iterations(COSTS, recorded_rows(table[:200])) == pytest.approx(
        table["duration"][:200] + np.where(table["draft_depth"][:200] > 0, 0.0, 2e-4)
    )


def test_a_trace_without_iterations_makes_no_table():
    with pytest.raises(ConfigError, match=r"iterations\.parquet"):
        from_trace(read(TRACES / "tiny").replace(iterations=None))


def test_on_recorded_rollouts_a_table_predicts_others_about_as_well_as_the_linear_model():
    trace = read(TRACES / "subset-sum-small")
    errors = {"table": [], "linear": []}
    for first in (0, 1):
        fit_on, others = trace.rl_steps[first::2], trace.rl_steps[1 - first :: 2]
        for name, costs in (("table", from_trace(trace, fit_on)), ("linear", calibrate(trace, fit_on).costs)):
            rows = recorded_rows(trace.select(others).iterations)
            errors[name] += rows.sums(predict_iterations(costs, rows))["bias"].abs().tolist()
    assert np.mean(errors["table"]) < 1.05 * np.mean(errors["linear"])


@pytest.mark.parametrize(
    ("gpu_name", "model_name", "tp", "published"),
    [
        ("H100", "Qwen2.5-7B", 1, (5.14, 5.65, 5.67, 5.59, 5.88, 6.39, 6.53, 9.81, 18.8, 38.0)),
        ("H200", "Qwen2.5-7B", 1, (3.89, 4.30, 4.31, 4.36, 4.46, 5.40, 5.57, 9.29, 18.3, 40.0)),
        ("H100", "Qwen2.5-32B", 4, (6.74, 7.42, 7.91, 8.45, 8.73, 10.1, 10.6, 15.9, 28.5, 54.9)),
        ("H200", "Qwen2.5-32B", 4, (5.54, 5.77, 6.14, 6.49, 7.16, 8.19, 9.24, 15.5, 27.8, 55.7)),
        ("H100", "Llama-3.3-70B", 4, (13.1, 14.3, 14.5, 15.1, 16.6, 18.2, 19.7, 31.2, 58.4, 115)),
        ("H200", "Llama-3.3-70B", 4, (10.5, 10.5, 11.2, 11.7, 13.0, 16.1, 17.9, 30.4, 58.7, 116)),
    ],
)
def test_sums_of_measured_kernels(
    shared_data: Path, gpu_name: str, model_name: str, tp: int, published: tuple[float, ...]
):
    """Milliseconds of a forward pass without attention, against sums made independently of the same tables."""
    tokens = (1, 16, 32, 64, 128, 192, 256, 512, 1024, 2048)
    summed = 1e3 * Kernels.read(shared_data, gpu_name).forward_s(model(model_name), tp, tokens)
    off = np.abs(summed / published - 1)
    assert off.mean() < 0.015
    assert off.max() < 0.045


@pytest.mark.parametrize("gpu_name", ["H100", "H200", "A100"])
def test_utilisation_predicts_products_over_gaps_and_beyond_the_grid_better_than_time(shared_data: Path, gpu_name: str):
    errors = leave_one_out(Kernels.read(shared_data, gpu_name)).set_index(["kernel", "grid", "method"])
    median = errors["median_abs_error"]
    assert median["gemm", "powers of four", "utilisation"] < 0.9 * median["gemm", "powers of four", "time"]
    assert median["gemm", "beyond", "utilisation"] < 0.5 * median["gemm", "beyond", "time"]
    assert median["gemm", "whole", "utilisation"] < 0.05
    assert median["attention", "whole", "time"] < min(0.02, median["attention", "whole", "utilisation"])


def test_kernels_and_four_terms_give_the_time_per_token_of_a_tensor_parallelism_left_out(shared_data: Path):
    found = fit_engine(shared_data)
    points = found.points[found.points["fits_memory"]]
    folds = (points["held_out_s"] / points["seconds"] - 1).abs().groupby(points["tp"]).mean()
    assert len(points) == 85
    assert list(folds.index) == [2, 4, 8]
    assert folds.max() < 0.045
    assert folds.mean() < 0.04
    kernels = from_kernels(Kernels.read(shared_data, "H100"), "Qwen3-32B", 4)
    within = found.engine.on(kernels).iteration(NO_SPECULATION).seconds(16, 16 * 2000)
    bare = kernels.iteration(NO_SPECULATION).seconds(16, 16 * 2000)
    assert within == pytest.approx(found.engine.kernels * bare + found.engine.base_s + 16 * found.engine.per_request_s)


def test_three_drafting_terms_explain_speed_ups_they_were_not_fitted_to(shared_data: Path):
    cells = read_speedups(shared_data)
    first = cells["table"] == "fig13"
    assert (first.sum(), (~first).sum()) == (36, 16)
    table = fit_engine(shared_data).engine.on(from_kernels(Kernels.read(shared_data, "H100"), "Qwen2.5-32B", 4))
    off = (speedups(with_speculation(table, cells[first]), cells) / cells["speedup"] - 1).abs()
    assert off[first].mean() < 0.03
    assert off[~first].mean() < 0.1


def test_the_shipped_table_is_what_the_measurements_give(shared_data: Path):
    shipped = json.loads(load_costs("h100-qwen2.5-32b-tp4-table").model_dump_json())
    anew = json.loads(shipped_table(shared_data).model_dump_json())
    assert shipped.keys() == anew.keys()
    for name, value in anew.items():
        if name in ("forward", "attention"):
            assert pd.DataFrame(shipped[name]).to_numpy() == pytest.approx(pd.DataFrame(value).to_numpy(), rel=1e-3)
        elif isinstance(value, float):
            assert shipped[name] == pytest.approx(value, rel=1e-3), name


def test_the_shipped_table_says_where_it_comes_from_and_what_it_covers():
    costs = load_costs("h100-qwen2.5-32b-tp4-table")
    assert isinstance(costs, TableCosts)
    assert "Apache-2.0" in " ".join(costs.notes)
    assert costs.calibrated is not None
    assert costs.calibrated.outside(batch=32, verified_tokens=2048, context_tokens=1e5) == []
    assert costs.calibrated.outside(batch=600, verified_tokens=2048, context_tokens=1e7) == ["batch", "context_tokens"]
    assert costs.iteration(CHAIN).seconds(1, 2000) > costs.iteration(NO_SPECULATION).seconds(1, 2000) > 5e-3


def test_accuracy_rows_have_the_columns_of_the_report(shared_data: Path):
    rows = accuracy_rows(shared_data)
    assert list(rows) == ["source", "what", "n_points", "used_for_fit", "mean_abs_error", "max_abs_error", "note"]
    assert rows["what"].is_unique
    assert (rows["mean_abs_error"] <= rows["max_abs_error"]).all()
    assert set(rows["used_for_fit"]) == {True, False}


def test_measurements_that_are_not_there_are_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"decode_tpot_h100\.csv"):
        fit_engine(tmp_path)
    with pytest.raises(ConfigError, match=r"tlt_sd_tables\.csv"):
        read_speedups(tmp_path)


def test_where_levels_are_a_networks_a_model_free_drafter_has_none():
    table = load_costs("h100-qwen2.5-32b-tp4-table")
    ngram, learned = (table.iteration(Strategy.chain(name, 4)) for name in ("ngram", "learned"))
    assert ngram.draft_s(8) == 0.0
    assert learned.seconds(8, 1e4) == pytest.approx(ngram.seconds(8, 1e4) + learned.draft_s(8))
    assert learned.draft_s(8) > 0
    # A fit to a trace has the levels of the drafter that was recorded.
    assert COSTS.iteration(Strategy.chain("ngram", 4)).draft_s(8) == COSTS.iteration(CHAIN).draft_s(8)


def test_both_presets_of_one_server_switch_alike_and_say_their_context():
    table, roofline = load_costs("h100-qwen2.5-32b-tp4-table"), load_costs("h100-qwen2.5-32b-tp4")
    assert table.switch_s == roofline.switch_s == 1.4
    for costs, context in ((table, "assume 2048 tokens"), (roofline, "assume 16384 tokens")):
        assert any(context in note for note in costs.notes)
        assert any("switch_s lies between" in note for note in costs.notes)
