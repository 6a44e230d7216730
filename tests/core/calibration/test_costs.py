"""Calibration of every kind recovers the model of the data, has held-out errors, reports gaps and nonsense."""

import json
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.core.acceptance.counterfactuals import counterfactuals
from tests.core.costs import models
from tests.refused import refused
from tltlab.acceptance.base import GeometricAcceptance
from tltlab.acceptance.curves import SiblingAcceptance
from tltlab.acceptance.freshness import Freshness
from tltlab.acceptance.load import load_acceptance
from tltlab.calibration.acceptance import fit_kind
from tltlab.calibration.costs import fit_points, fit_trace
from tltlab.calibration.cross_validation import held_out_errors
from tltlab.calibration.iterations import checked, measured_rows, read_step_times
from tltlab.cli.calibrate import calibrate as command
from tltlab.console import JSON, running
from tltlab.costs import table
from tltlab.costs.base import Waiting
from tltlab.costs.linear import LinearCosts
from tltlab.costs.load import load_costs, load_stages
from tltlab.costs.roofline import Hardware, RooflineCosts
from tltlab.costs.scaled import scheduled
from tltlab.errors import ConfigError
from tltlab.lengths.generate import log_normal
from tltlab.policies.policy import Activation, Policy
from tltlab.policies.specs import FixedSpec
from tltlab.sim.simulate import simulate
from tltlab.state import DrafterState
from tltlab.strategy import Strategy
from tltlab.traces.trace import Trace, read

LINEAR = LinearCosts(
    base_s=3e-3, per_request_s=1e-4, per_token_s=5e-5, per_context_s=1e-8, sd_base_s=4e-4, sd_idle_s=0.0,
    draft_level_s=2e-4, draft_level_per_request_s=0.0, prefill_per_token_s=2e-5,
)  # fmt: skip
CONSTANTS = models.CONSTANTS.model_copy(update={"sd_idle_s": 0.0})
WAITING = Waiting(base_s=1.5e-3, per_request_s=2e-5, source="")
ON_H100 = {"gpu": "H100", "model": "Qwen2.5-7B", "tp": 1}
H100 = Hardware(**ON_H100)
ROOFLINE = RooflineCosts(**ON_H100, constants=CONSTANTS)
AGEING = Freshness(untrained=1.0, floor=0.5, age_steps=3.0)
SHIPPED = Path(__file__).resolve().parents[3] / "traces"
BATCHES = (1, 2, 4, 8, 16, 32, 64)
RECORDED = ((1, 4), (2, 2), (5, 4), (12, 2), (24, 0))
MEASURED = tuple(product((1, 4, 32), (0, 1, 3, 7)))


def grid(costs, depths=(0, 1, 3, 7), *, prefill=False):
    """Rows of a profiler for an engine with these costs: batch x depth of a chain x context."""
    rows = []
    for batch, depth, each, tokens in product(BATCHES, depths, (200, 4000), (0, 512) if prefill else (0,)):
        cost = costs.iteration(Strategy.chain("learned", depth))
        took = cost.seconds(batch, batch * each)
        took += cost.added_s(batch, tokens, costs.prefill_s(tokens)) if tokens else 0.0
        rows.append((batch, depth + 1, batch * each, depth, tokens, took))
    names = ["batch", "tokens_to_verify", "context_tokens", "draft_depth", "prefill_tokens", "seconds"]
    return pd.DataFrame(rows, columns=names)


def recording(costs, *, rl_steps=4, acceptance=None):
    """A simulated run: plain while the batch is large, chains in the tail, of 4 and then of 2."""
    lengths = log_normal(prompts=6, group_size=4, rl_steps=rl_steps, median=150, cap=400)
    model = acceptance or GeometricAcceptance(alpha=0.6)
    active = Activation(max_requests=12, count="running", hold_iterations=0)
    parts = []
    for step in range(rl_steps):
        chain = Strategy.chain("learned", 4 if step < rl_steps // 2 else 2)
        policy = Policy(selector=FixedSpec(strategy=chain), activation=active)
        run = simulate(
            lengths, policy, costs=costs, acceptance=model, workers=1, rl_steps=[step], mode="sampled", seed=step,
            record_iterations=True,
        )  # fmt: skip
        parts.append(run.trace)
    joined = {name: pd.concat([part.table(name) for part in parts]) for name in parts[0].names if name != "decisions"}
    return Trace.from_tables(parts[0].manifest.model_copy(update={"num_rl_steps": rl_steps}), joined)


def annotated(ages=(0, 2, 6), rl_steps=4):
    """Lengths with counterfactuals of a drafter whose chance of 0.8 halves with age, and no iterations."""
    trace = log_normal(prompts=2, group_size=2, rl_steps=rl_steps, cap=2000)
    rng, rows = np.random.default_rng(1), []
    for outcome in trace.outcomes.itertuples():
        for age in ages:
            kept = np.minimum(rng.geometric(1 - 0.8 * AGEING.level(age, 0), outcome.response_tokens) - 1, 5)
            rows.append((*outcome[1:5], "learned", age, None, 5, kept))
    return trace.replace(acceptance=counterfactuals(rows))


@pytest.fixture(scope="module")
def run():
    return recording(LINEAR)


def written(tmp_path, capsys, source, **options):
    token = running.set((JSON,))
    command(source, out=options.pop("out", tmp_path / "costs.json"), **options)
    running.reset(token)
    return json.loads(capsys.readouterr().out)


def same_times(found, truth, rel, at=RECORDED):
    for batch, depth in at:
        strategy = Strategy.chain("learned", depth)
        times = [costs.iteration(strategy).seconds(batch, 300.0 * batch) for costs in (found, truth)]
        assert times[0] == pytest.approx(times[1], rel=rel), (batch, depth)


def test_costs_are_found_in_a_recording(run):
    found = fit_trace(run, most_folds=2)
    same_times(found.costs, LINEAR, rel=1e-3)
    assert found.costs.calibrated.batch == (1, 24)
    assert found.sums["bias"].abs().max() < 0.01
    assert found.held_out_error < 1e-3


@pytest.mark.parametrize(("kind", "rel", "error"), [("linear", 1e-5, 1e-6), ("table", 0.01, 0.02)])
def test_costs_are_found_in_a_table(kind, rel, error):
    points = grid(LINEAR, prefill=True)
    found = fit_points(checked(points), kind)
    same_times(found.costs, LINEAR, rel=rel, at=MEASURED)
    assert found.held_out_error < error
    assert found.sums.empty
    assert list(found.cross_validation["fold"]) == [*(f"batch {b}" for b in BATCHES), "overall"]
    assert found.cross_validation["num"].iloc[-1] == len(points)


def waited(table, seconds, waits):
    """Rows with what waiting for the host takes in those that wait."""
    return table[seconds] + waits * (WAITING.base_s + WAITING.per_request_s * table["batch"])


@pytest.mark.parametrize("kind", ["linear", "table", "recorded"])
def test_waiting_is_told_apart_where_engines_did_and_did_not(run, kind):
    if kind == "recorded":
        table = run.table("iterations")
        waits = table["rl_step"] % 2
        durations = {"draft_duration": table["draft_duration"].where(waits > 0)}
        durations["duration"] = waited(table, "duration", waits)
        both = run.replace(iterations=table.assign(**durations))
        costs, one = fit_trace(both).costs, fit_trace(run).costs
    else:
        rows = grid(LINEAR)
        slow = rows.assign(seconds=waited(rows, "seconds", 1), scheduling="synchronous")
        fast = rows[rows["draft_depth"] == 0].assign(scheduling="asynchronous")
        costs, one = (fit_points(checked(t), kind).costs for t in (pd.concat([slow, fast]), slow))
    assert (costs.synchronous, one.synchronous, one.waiting) == (False, True, None)
    assert costs.waiting.base_s == pytest.approx(WAITING.base_s, rel=0.02)
    assert costs.waiting.per_request_s == pytest.approx(WAITING.per_request_s, rel=0.02)
    # Drafting is inside the recorded iterations that did not wait.
    same_times(costs, LINEAR, rel=0.03, at=RECORDED[-1:] if kind == "recorded" else RECORDED)
    slower, faster = (scheduled(costs, synchronous=way) for way in (True, False))
    assert faster is costs
    for batch in (1, 8):
        plain = [each.iteration(Strategy.chain("learned", 2)).seconds(batch, 0) for each in (slower, costs)]
        assert plain[0] - plain[1] == pytest.approx(costs.waiting.seconds(batch))
    again = scheduled(slower.model_copy(update={"synchronous": True}), synchronous=False)
    same_times(again, costs, rel=1e-9)


def test_a_rehearsals_steps_price_waiting():
    costs = fit_trace(read(SHIPPED / "h200-rehearsal"), most_folds=0).costs
    assert costs.synchronous
    # Stock vLLM took 1.39, 1.70 and 2.70 ms longer at batch 1, 8 and 64.
    assert [round(1e3 * costs.waiting.seconds(batch), 1) for batch in (1, 8, 64)] == [1.5, 1.6, 2.7]


def test_chains_leave_drafting_per_request_inside_verification():
    truth = LINEAR.model_copy(update={"draft_level_per_request_s": 3e-5})
    found = fit_points(checked(grid(truth))).costs
    assert found.draft_level_per_request_s == 0.0
    assert any("draft_level_per_request_s" in note for note in found.notes)
    same_times(found, truth, rel=1e-5, at=MEASURED)


def test_noise_that_falls_is_smoothed_in_a_table():
    points = grid(LINEAR)
    points = points.assign(noisy=points["seconds"] * np.random.default_rng(0).lognormal(0.0, 0.05, len(points)))
    rows = measured_rows(checked(points.assign(seconds=points["noisy"])))
    found = table.fit(rows)
    assert all(a.seconds <= b.seconds for a, b in pairwise(found.forward))
    smooth, raw = ((times / points["seconds"] - 1).abs().mean() for times in (found.predict(rows), points["noisy"]))
    assert smooth < 0.7 * raw


@pytest.mark.parametrize(("costs", "rel"), [(LINEAR, 1e-6), (ROOFLINE, 0.03)])
@pytest.mark.parametrize("batches", [(1, 4, 16, 64), (1, 2, 4, 8), (2, 8, 32, 64)])
def test_a_table_interpolates_between_depths(costs, rel, batches):
    points = checked(grid(costs, (0, 7, 15)).query("batch in @batches"))
    found = fit_points(points, "table").costs
    assert found.draft_level_s > 0
    same_times(found, costs, rel=rel, at=tuple(product(batches, (0, 1, 3, 7, 11, 15))))


def test_a_table_of_one_depth_has_no_levels():
    found = fit_points(checked(grid(LINEAR, (0, 3))), "table").costs
    assert found.sd_base_s == pytest.approx(LINEAR.sd_base_s + 3 * LINEAR.draft_level_s, rel=0.01)
    assert any("draft_level_s, draft_level_per_request_s" in note for note in found.notes)


def test_a_fold_is_predicted_by_fits_without_it(run):
    table = run.iterations
    slow = table["rl_step"] == 2
    changed = table.assign(duration=table["duration"] * np.where(slow, 2.0, 1.0))
    found = fit_trace(run.replace(iterations=changed)).cross_validation.set_index("fold")
    assert found.loc["RL step 2", "sums_bias"] == pytest.approx(-0.5, abs=0.05)
    assert found.loc["overall", "num"] == len(table)
    assert found.loc["overall", "num_sums"] == 4


def test_what_the_rest_cannot_predict_has_no_error(run):
    table = run.iterations.query("rl_step < 3")
    plain = table[(table["rl_step"] == 0) | (table["draft_depth"] == 0)]
    blind = plain.assign(next_draft_depth=None, draft_duration=None)
    found = fit_trace(run.select([0, 1, 2]).replace(iterations=blind))
    errors = found.cross_validation.set_index("fold")["mean_abs_relative_error"]
    assert errors.isna().to_dict() == {"RL step 0": True, "RL step 1": False, "RL step 2": False, "overall": False}
    assert any("RL step 0" in note for note in found.costs.notes)


def test_held_out_errors_by_hand():
    rows = [("a", 0, 0, 1.0, 1.1), ("a", 0, 0, 2.0, 1.8), ("b", 1, 0, 4.0, np.nan)]
    names = ["fold", "rl_step", "worker", "measured_s", "predicted_s"]
    found = held_out_errors(pd.DataFrame(rows, columns=names)).set_index("fold")
    assert found.loc["a", "sums_mean_abs_relative_error"] == pytest.approx(0.1 / 3)
    errors = found["mean_abs_relative_error"].to_dict()
    assert errors == pytest.approx({"a": 0.1, "b": np.nan, "overall": 0.1}, nan_ok=True)


@pytest.mark.parametrize(
    ("points", "kind", "unknown"),
    [
        (grid(LINEAR).query("batch == 8"), "linear", ("per_request_s", "prefill_per_token_s")),
        (grid(LINEAR).drop(columns="draft_depth"), "linear", ("sd_base_s", "draft_level_s")),
        (grid(LINEAR, (0,)).drop(columns="draft_depth"), "table", ("sd_base_s", "draft_level_s")),
    ],
)
def test_unidentified_terms_stay_unknown(points, kind, unknown):
    found = fit_points(checked(points), kind)
    assert [getattr(found.costs, term) for term in unknown] == [None, None]
    alone = points["batch"].nunique() == 1
    assert any(unknown[0] in note for note in found.costs.notes) == alone
    assert (found.held_out_error is None, found.cross_validation.empty) == (alone, alone)
    with refused(ConfigError, naming=unknown[:1]):
        found.costs.iteration(Strategy.chain("learned", 4))


def test_table_of_two_batch_sizes_leaves_none_out():
    found = fit_points(checked(grid(LINEAR).query("batch in (1, 8)")), "table", H100)
    assert found.costs.roofline.gpu == "H100"
    assert found.held_out_error is None
    assert any("two batch sizes" in note for note in found.costs.notes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seconds": 0.0}, ("0", "seconds")),
        ({"batch": 0}, ("0", "batch")),
        ({"batch": 1.5}, ("0", "1", "5")),
        ({"context_tokens": "many"}, ("many", "0", "context_tokens")),
    ],
)
def test_values_that_are_no_measurements_are_refused(change, said):
    with refused(ConfigError, naming=said):
        checked(grid(LINEAR).assign(**change))


def test_a_table_that_lacks_something_is_refused(tmp_path):
    grid(LINEAR).drop(columns="seconds").to_csv(tmp_path / "t.csv", index=False)
    with refused(ConfigError, naming=("tokens_to_verify",)):
        read_step_times(tmp_path / "t.csv")
    with refused(ConfigError, naming=("rows",)):
        checked(grid(LINEAR).iloc[:0])
    with refused(ConfigError, naming=("context_tokens",)):
        fit_points(checked(grid(LINEAR).query("context_tokens == batch * 200")), "table")
    (tmp_path / "t.parquet").write_text("no parquet")
    with refused(ConfigError, naming=("t.parquet",)):
        read_step_times(tmp_path / "t.parquet")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"gpu": "H100", "tp": 1}, ("--model",)),
        (ON_H100 | {"gpu": "V1"}, ("V1", "H100, H200, A100")),
        (ON_H100 | {"tp": 0}, ("tp",)),
        (ON_H100, ("linear",)),
        ({"kind": "cubic"}, ("cubic",)),
        ({"kind": "roofline"}, ("table",)),
        ({"kind": "table"}, ("measured iterations", "linear")),
    ],
)
def test_hardware_is_known_and_whole(tmp_path, run, options, named):
    run.write(tmp_path / "trace")
    with refused(ConfigError, naming=named):
        command(tmp_path / "trace", out=tmp_path / "costs.json", **options)
    assert not (tmp_path / "costs.json").exists()


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_the_command_reads_a_table(tmp_path, capsys, suffix):
    points, path = grid(ROOFLINE).query("batch in (1, 8, 64)").assign(rl_step=0), tmp_path / f"profile.{suffix}"
    points.to_csv(path, index=False) if suffix == "csv" else points.to_parquet(path)
    shown = written(tmp_path, capsys, path, kind="table", gpu="H100", model="Qwen2.5-7B", tp=1, rl_steps="0")
    assert (shown["kind"], shown["acceptance"], shown["sums"]) == ("table", None, [])
    assert shown["cross_validation"][-1]["fold"] == "overall"
    assert shown["cross_validation"][-1]["num_sums"] is None
    same_times(
        load_costs(tmp_path / "costs.json"), ROOFLINE, rel=0.04, at=[at for at in MEASURED if at[0] in (1, 8, 64)]
    )
    grid(ROOFLINE).to_csv(tmp_path / "no-steps.csv", index=False)
    with refused(ConfigError, naming=("rl_step",)):
        command(tmp_path / "no-steps.csv", out=tmp_path / "again.json", rl_steps="0")
    for options in ({"acceptance_out": tmp_path / "a.json"}, {"stages_out": tmp_path / "s.json"}, {"rl_steps": "7"}):
        with refused(ConfigError):
            command(path, out=tmp_path / "again.json", **options)


def test_the_command_on_a_recorded_run(tmp_path, capsys):
    stages = tmp_path / "stages.json"
    shown = written(tmp_path, capsys, SHIPPED / "tiny", acceptance="siblings", stages_out=stages)
    assert {"costs", "residuals", "sums", "notes", "out", "acceptance_out"} < set(shown)
    assert {"kind", "cross_validation", "held_out_error", "acceptance", "stages", "stages_out"} < set(shown)
    assert {"fold", "num", "mean_abs_relative_error"} < set(shown["cross_validation"][0])
    assert len(shown["cross_validation"]) == 4 + 1
    assert shown["acceptance"] == {"kind": "siblings"}
    assert load_acceptance(tmp_path / "acceptance.json").drafters == ("ngram",)
    assert load_stages(stages).train is not None
    assert [row["stage"] for row in shown["stages"]["held_out"]][-1] == "all"


def chain_tokens(alpha, depth):
    return GeometricAcceptance(alpha=alpha).tokens_per_iteration(Strategy.chain("learned", depth))


def test_acceptance_of_a_recording_is_found(run):
    tokens = fit_kind(run).model.at(4).tokens_per_iteration(Strategy.chain("learned", 4))
    # A response's last draft is cut where it ends, which 1 in 30 drafts of so short responses are.
    assert tokens == pytest.approx(chain_tokens(0.6, 4), rel=0.05)
    # So is that which grows with siblings.
    truth = SiblingAcceptance(drafter="learned", alone=0.1, most=0.9, exponent=1.0)
    found = fit_kind(recording(LINEAR, acceptance=truth), "siblings")
    assert found.model.alpha(np.array([3.0]), np.zeros(1)) == pytest.approx(truth.alpha(3.0, 0.0), abs=0.05)


def test_workers_without_drafts_are_no_obstacle():
    trace = recording(LINEAR, rl_steps=2)
    plain = trace.iterations["rl_step"] == 1
    table = trace.iterations.assign(draft_depth=trace.iterations["draft_depth"].where(~plain, 0))
    assert fit_kind(trace.replace(iterations=table), "siblings").model.drafters == ("learned",)


def test_acceptance_parquet_alone_suffices(tmp_path, capsys):
    annotated().write(tmp_path / "trace")
    with refused(ConfigError, naming=("--out",)):
        command(tmp_path / "trace", out=tmp_path / "costs.json")
    shown = written(tmp_path, capsys, tmp_path / "trace", out=None, acceptance_out=tmp_path / "a.json")
    assert (shown["costs"], shown["out"]) == (None, None)
    model = load_acceptance(tmp_path / "a.json").at(1)
    assert model.tokens_per_iteration(Strategy.chain("learned", 5)) == pytest.approx(chain_tokens(0.8, 5), rel=0.03)


def test_several_ages_identify_ageing():
    model = fit_kind(annotated(), "fresh").model
    for age in (0, 6):
        tokens = model.at_freshness(DrafterState(age=age)).at(1).tokens_per_iteration(Strategy.chain("learned", 5))
        assert tokens == pytest.approx(chain_tokens(0.8 * AGEING.level(age, 0), 5), rel=0.05)


def test_unidentified_acceptance_is_refused(tmp_path, run):
    for trace, kind, named in (
        (run, "fresh", "acceptance.parquet"),
        (annotated(ages=(0,)), "fresh", "one age"),
        (annotated(), "siblings", "drafts"),
        (log_normal(prompts=2), "siblings", "drafts"),
        (run, "magic", "magic"),
    ):
        with refused(ConfigError, naming=(named,)):
            fit_kind(trace, kind)
    log_normal(prompts=2).write(tmp_path / "lengths")
    for out, options in ((None, {"acceptance_out": tmp_path / "a.json"}), (tmp_path / "costs.json", {})):
        with refused(ConfigError):
            command(tmp_path / "lengths", out=out, **options)


def test_the_same_trace_gives_the_same_files(tmp_path, capsys):
    for name in ("one", "two"):
        options = {"out": tmp_path / name / "costs.json", "acceptance": "siblings", "rl_steps": ":2"}
        shown = written(tmp_path, capsys, SHIPPED / "tiny", **options)
        assert (shown["stages"], shown["stages_out"]) == (None, None), "stages are not written unless asked"
    files = {name: {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("one", "two")}
    assert files["one"] == files["two"]
    assert sorted(files["one"]) == ["acceptance.json", "costs.json"]


def test_costs_hold_on_unseen_steps_of_a_run():
    trace = read(SHIPPED / "subset-sum-small")
    found = fit_trace(trace).cross_validation
    assert (len(found), found["num"].iloc[-1]) == (9, len(trace.iterations))
    assert found["mean_abs_relative_error"].iloc[-1] < 0.25
