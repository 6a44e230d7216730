"""What training logs tell of an engine: a console log as verl writes it, of simulated rollouts, and others."""

import json

import numpy as np
import pytest

from tests.refused import refused
from tltlab.cli.calibrate import calibrate
from tltlab.costs.linear import LinearCosts
from tltlab.costs.load import load_costs
from tltlab.costs.scaled import ScaledCosts
from tltlab.doctor.signatures import diagnose
from tltlab.errors import ConfigError
from tltlab.importers.sources import read
from tltlab.sim.simulate import simulate
from tltlab.sim.verification.training_log import fit_log, is_log, verify_log
from tltlab.strategy import NO_SPECULATION, Strategy

from ..workloads import console_line

ENGINE = "vllm:H100:Llama-3.1-8B"
NUM, CAP, WORKERS, LEVEL, OUTSIDE_S = 128, 4096, 4, 1.2, 5.0


def lengths_of(step):
    """Their tail grows and shrinks, so that the longest says something."""
    rng = np.random.default_rng(step)
    return np.minimum(rng.exponential(150.0 * (1 + step % 5), NUM).astype(int) + 1, CAP)


@pytest.fixture(scope="module")
def metrics_of():
    """RL steps of an engine at 1.2 times the profile's level, 5 s beside, and 2 % of noise."""
    found = {}
    for step in range(1, 25):
        lengths = lengths_of(step)
        decoding_s = simulate([lengths.tolist()], "none", costs=ENGINE, workers=WORKERS).makespan_s
        gen = (LEVEL * decoding_s + OUTSIDE_S) * np.exp(np.random.default_rng([9, step]).normal(0.0, 0.02))
        found[step] = {
            "response_length/mean": lengths.mean(),
            "response_length/max": lengths.max(),
            "response_length/min": lengths.min(),
            "response_length/clip_ratio": (lengths == CAP).mean(),
            "prompt_length/mean": 0.0,
            "perf/total_num_tokens": int(lengths.sum()),
            "timing_s/gen": gen,
            "timing_s/update_actor": 10.0,
            "timing_s/step": gen + 12.0,
        }
    return found


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def trace_of(folder, metrics):
    """What is read of a console log of these RL steps."""
    return read(write(folder / "x.log", *(console_line(step, row) for step, row in metrics.items())))


@pytest.fixture
def log(tmp_path, metrics_of):
    return write(tmp_path / "verl.log", "INFO starting", *(console_line(s, m) for s, m in metrics_of.items()))


def test_level_and_time_outside_are_distinguished(log):
    found = fit_log(read(log), ENGINE, WORKERS)
    assert found.terms["level"] == pytest.approx(LEVEL, rel=0.08)
    assert found.terms["outside_s"] == pytest.approx(OUTSIDE_S, rel=0.3)
    assert found.median_error < 0.04
    assert found.constant_error > 5 * found.median_error
    assert isinstance(found.costs, ScaledCosts)
    assert found.costs.evidence.left_out["RL steps"][1] < 0.1


def test_without_times_of_rollouts_rl_steps_are_predicted(tmp_path, metrics_of):
    """As in TRL's logs."""
    keys = {"mean": "mean_length", "min": "min_length", "max": "max_length", "clip_ratio": "clipped_ratio"}
    rows = [
        {f"completions/{name}": float(m[f"response_length/{of}"]) for of, name in keys.items()}
        | {"step": step, "step_time": m["timing_s/step"], "num_tokens": 1e5 * step}
        for step, m in list(metrics_of.items())[:16]
    ]
    trace = read(write(tmp_path / "trl.jsonl", *map(json.dumps, rows)))
    found, later = fit_log(trace, workers=WORKERS), verify_log(trace, workers=WORKERS)
    assert found.median_error < 0.06 < found.constant_error
    assert "16 RL steps" in found.text()
    assert later.json()["median_error"] < 0.05


def test_without_costs_fitted_linear_costs_predict_well(log):
    found = fit_log(read(log), workers=WORKERS)
    assert isinstance(found.costs, LinearCosts)
    assert found.costs.base_s > 0
    assert found.median_error < 0.06
    assert found.accept_length is None
    with refused(ConfigError, naming=("sd_base_s",)):
        found.costs.iteration(Strategy.chain("learned", 3))


def test_costs_of_a_log_simulate_its_rollouts(log, tmp_path, capsys, as_json):
    out = tmp_path / "costs.json"
    calibrate(log, out=out, log_costs=ENGINE, workers=WORKERS, stages_out=tmp_path / "stages.json")
    told = json.loads(capsys.readouterr().out)
    assert (told["kind"], told["log"]["num_steps"]) == ("log", 24)
    train = told["stages"]["costs"]["train"]
    assert {row["stage"]: row["num_steps"] for row in told["stages"]["held_out"]}["train_s"] == 24
    assert train["base_s"] + train["per_token_s"] * 50_000 == pytest.approx(10.0, rel=0.05)
    costs = load_costs(str(out))
    result = simulate(log, "none", costs=str(out), workers=WORKERS)
    assert result.makespan_s == pytest.approx(read(log).steps["rollout_s"].mean(), rel=0.03)
    assert result.summary["lower_bound_s"] <= result.makespan_s
    assert result.trace.iterations is None
    shape, chain = load_costs(ENGINE), Strategy.chain("learned", 3)
    for strategy in (NO_SPECULATION, chain):
        seconds = [one.iteration(strategy).seconds(8, 4000.0) for one in (costs, shape)]
        assert seconds[0] == pytest.approx(costs.level * seconds[1])


def test_intervals_of_later_rl_steps_hold(log):
    found = verify_log(read(log), costs=ENGINE, workers=WORKERS).json()
    assert found["num_steps"] == 18
    assert found["median_error"] < 0.05
    assert found["worst_error"] < 0.15
    assert found["coverage"] >= 0.8
    assert found["forecast_coverage"] >= 0.85
    assert found["constant_median_error"] > 3 * found["median_error"]
    assert all(row["low_s"] < row["predicted_s"] < row["high_s"] for row in found["steps"])


def test_what_comes_later_in_log_changes_no_prediction(tmp_path, metrics_of):
    whole, part = (
        verify_log(trace_of(tmp_path, dict(list(metrics_of.items())[:last])), workers=WORKERS).rows for last in (14, 10)
    )
    assert 0 < len(part) < len(whole)
    assert whole.iloc[: len(part)].equals(part)


def test_gaps_and_missing_keys_are_borne(tmp_path, metrics_of):
    """RL step 12 was lost, 14 has no time, 15 no longest response."""
    kept = {s: dict(metrics_of[s]) for s in range(1, 21) if s != 12}
    del kept[14]["timing_s/gen"], kept[15]["response_length/max"]
    trace = trace_of(tmp_path, kept)
    assert is_log(trace)
    found = verify_log(trace, workers=WORKERS).rows
    assert found["rl_step"].tolist() == [7, 8, 9, 10, 11, 13, 15, 16, 17, 18, 19, 20]
    assert found["error"].abs().median() < 0.08


def test_too_little_of_a_log_is_refused(tmp_path, metrics_of, log):
    with refused(ConfigError, naming=("7",)):
        verify_log(trace_of(tmp_path, {step: metrics_of[step] for step in (1, 2, 3, 4)}))
    with refused(ConfigError, naming=("2",)):
        fit_log(trace_of(tmp_path, {step: metrics_of[step] for step in (1, 2)}))
    with refused(ConfigError, naming=("--workers",)):
        fit_log(read(log), ENGINE)
    with refused(ConfigError, naming=("--log-costs",)):
        calibrate(log, out=tmp_path / "costs.json", kind="table")
    with refused(ConfigError, naming=("iterations", "--out")):
        calibrate(log, out=tmp_path / "costs.json", spot_out=tmp_path / "spot.json")


def test_speculation_is_part_of_what_a_log_identifies(tmp_path, metrics_of):
    spec = {s: m | {"spec_decode/mean_acceptance_length": 2.0 + s % 2} for s, m in metrics_of.items()}
    found = fit_log(trace_of(tmp_path, spec), workers=WORKERS)
    assert found.accept_length == pytest.approx(2.5)
    assert found.accept_spread == pytest.approx(0.5)


@pytest.mark.parametrize(("times", "where"), [(1.4, "RL steps 13-24"), (0.7, None)])
def test_the_doctor_states_whether_drafts_lose_time(tmp_path, metrics_of, times, where):
    rows = {
        step: row | {"spec_decode/mean_acceptance_length": 2.0, "timing_s/gen": times * row["timing_s/gen"]}
        for step, row in metrics_of.items()
        if step > 12
    }
    told = diagnose(trace_of(tmp_path, metrics_of | rows))
    found = {finding.code: finding for finding in told.findings}
    if where:
        assert found["drafts-lose-time"].where == where
    else:
        assert "drafts-lose-time" in {check.name for check in told.good}
