"""Training logs: `what-if`, `doctor`, `verify` and `compare` state one share, one acceptance, one speed-up."""

import json

import pytest

from tests.refused import refused
from tltlab.calibration.logged import LoggedDrafting
from tltlab.doctor.signatures import diagnose
from tltlab.errors import ConfigError
from tltlab.importers.sources import read
from tltlab.sim.config import SimulationConfig
from tltlab.sim.study.logged import LoggedRun
from tltlab.sim.study.sample import Scenarios
from tltlab.sim.study.what_if import what_if
from tltlab.strategy import Strategy

from ..workloads import console_line, typed

ROLLOUT_S, STEP_S = 60.0, 600.0
MEAN_SCALE = 1.05625
"""Mean over RL steps of what all figures of a log are multiplied with."""
FAST = {"systems": "verl,vllm-dynamic"}
DRAFTING = {"mean_acceptance_length": lambda step: 2.5, "draft_acceptance_rate": lambda step: 0.5}


@pytest.fixture
def log(tmp_path):
    """Make a log of verl: 10 % of its RL step is the rollout, 20 % training, the rest has no timer."""

    def make(**metrics):
        lines = []
        for step in range(1, 9):
            scale = 1 + 0.05 * (step % 3)
            values = {
                "response_length/mean": 900.0 * scale, "response_length/max": 6000.0 * scale,
                "response_length/min": 20.0, "response_length/clip_ratio": 0.0, "prompt_length/mean": 100.0,
                "perf/total_num_tokens": 128 * (900.0 * scale + 100.0), "timing_s/gen": ROLLOUT_S * scale,
                "timing_s/update_actor": 120.0 * scale, "timing_s/step": STEP_S * scale,
            }  # fmt: skip
            values |= {f"spec_decode/{name}": value(step) for name, value in metrics.items()}
            lines.append(console_line(step, values))
        path = tmp_path / "verl.log"
        path.write_text("\n".join(lines) + "\n")
        return path

    return make


def test_doctor_and_what_if_state_share_of_log(log):
    path = log()
    found = what_if(path, **FAST)
    assert (found.logged.share_of, found.running) == ("log", None)
    assert found.rollout_share == pytest.approx(0.1)
    said = next(f for f in diagnose(path).findings if f.code == "rollout-not-bottleneck").evidence
    assert "10%" in said
    assert "10 %" in found.verdict
    gained = found.best.rollout.estimate
    assert gained > 1.2
    assert found.best.rl_step is not None
    assert found.best.rl_step.estimate == pytest.approx(1 / (0.9 + 0.1 / gained), rel=1e-3)
    assert found.plain.makespan_s == pytest.approx(ROLLOUT_S * MEAN_SCALE)
    shapes = found.scenario.shapes.values()
    assert {costs.level for costs in shapes} == {found.scenario.costs.level}, "shapes to gather onto are as slow"
    assert 1.0 <= found.best.gather_gain < 3.0


def test_lengths_alone_have_the_share_of_assumed_stages():
    assert what_if([[100, 300], [50, 600]], **FAST).logged.share_of == "preset"


def test_a_drafting_log_is_its_own_baseline(log):
    path = log(**DRAFTING)
    drafting = LoggedDrafting.of(read(path))
    assert drafting is not None
    assert (drafting.strategy, drafting.mean_accept_length) == (Strategy.chain("learned", 3), pytest.approx(2.5))
    assert drafting.acceptance().tokens_per_iteration(drafting.strategy) == pytest.approx(2.5)
    found = what_if(path, **FAST)
    assert found.recorded
    assert set(found.best.by_assumption["depth"]) == {"depth 2", "depth 6"}, (
        "the log has tokens per draft and their share"
    )
    running = found.running
    assert running is not None
    # The best table is better than the log's constant depth, and by less than it is than plain decoding.
    assert 1.0 <= running.band.estimate < found.best.rollout.estimate
    assert running.rl_step is not None
    assert running.rl_step.estimate == pytest.approx(1 / (0.9 + 0.1 / running.rollout.estimate), rel=1e-3)
    keys = found.json()["running"]
    assert (keys["strategy"], keys["accept_length"]) == ("learned:3", pytest.approx(2.5))
    assert running.band.low <= running.band.estimate <= running.band.high


def test_collapsed_drafts_are_a_possible_gain(log):
    fallen = log(
        mean_acceptance_length=lambda step: 2.5 if step < 5 else 1.0,
        draft_acceptance_rate=lambda step: 0.5 if step < 5 else 0.0,
    )
    found = what_if(fallen, **FAST)
    assert found.running is not None
    assert found.running.drafting.mean_accept_length == pytest.approx(2.5)
    assert found.running.rollout.estimate > 1.3
    assert "4 of 8" in found.verdict


def test_a_draft_of_one_token_may_be_none(log):
    assert what_if(log(mean_acceptance_length=lambda step: 1.0), **FAST).running is None


def test_rollouts_drafted_as_logged_take_the_logs_seconds(log):
    path = log(**DRAFTING)
    run = LoggedRun.of(Scenarios(read(path), SimulationConfig(gpus="8xH100")))
    steps = run.scenarios.run
    assert run.seconds(steps).mean() == pytest.approx(ROLLOUT_S * MEAN_SCALE, rel=1e-6)
    assert run.stages is not None
    assert run.stages.train is not None
    assert run.stages.train.base_s == pytest.approx(540.0 * MEAN_SCALE)


def test_compare_has_the_logs_acceptance_and_stages(log, capsys):
    path = log(**DRAFTING)
    asked = ("--gpus", "8xH100", "--systems", "verl,vllm-dynamic")
    found, systems = (json.loads(typed(capsys, name, path, *asked, "--json")[1]) for name in ("what-if", "compare"))
    rows = {row["system"]: row for row in found["systems"]}
    for row in systems["rows"]:
        assert row["step_s"] == pytest.approx(rows[row["system"]]["step_s"])
        assert row["makespan_s"] == pytest.approx(rows[row["system"]]["makespan_s"])
    assert "2.50" in systems["acceptance"]


def test_verify_predicts_whole_steps_and_states_same_share(log, capsys):
    path = log()
    found = json.loads(typed(capsys, "verify", path, "--json")[1])
    assert found["rollout_share"] == pytest.approx(what_if(path, **FAST).rollout_share)
    assert found["rollout"]["num_steps"] == found["step"]["num_steps"] == 2
    for row, of_rollout in zip(found["whole_steps"], found["steps"], strict=True):
        scale = 1 + 0.05 * (row["rl_step"] % 3)
        assert row["measured_s"] == pytest.approx(STEP_S * scale)
        # All that lies during the rollout is proportional to tokens here.
        beside_s = row["predicted_s"] - of_rollout["predicted_s"]
        assert beside_s == pytest.approx((STEP_S - ROLLOUT_S) * scale, rel=0.01)
    errors = [abs(row["error"]) for row in found["whole_steps"]]
    assert found["step"]["worst_error"] == pytest.approx(max(errors))
    assert found["step"]["mean_error"] == pytest.approx(sum(errors) / 2)
    assert found["step"]["worst_error"] < 0.02
    assert "10%" in typed(capsys, "verify", path)[1]


def test_a_draft_depth_is_named_not_guessed(log, tmp_path, capsys):
    path = log(mean_acceptance_length=lambda step: 2.5)
    for name in ("what-if", "compare", "verify"):
        code, _, err = typed(capsys, name, path)
        assert (code, "--drafted" in err) == (2, True), name
    for wrong in ("none", "learned:1"):
        with refused(ConfigError, naming=(wrong,)):
            what_if(path, drafted=wrong, **FAST)
    found = what_if(read(path), drafted="learned:7", gpus="16xH200", **FAST)
    assert found.running is not None
    assert (str(found.running.drafting.strategy), found.running.drafting.depth_from) == ("learned:7", "drafted")
    assert "H200" in found.setting
    assert typed(capsys, "trace", "import", path, "--out", tmp_path / "t", "--drafted", "ngram:3")[0] == 0
    drafting = LoggedDrafting.of(read(tmp_path / "t"))
    assert drafting is not None
    assert str(drafting.strategy) == "ngram:3"
    compared = ("--policies", "none,ngram:3", "--gpus", "16xH200", "--json")
    result = json.loads(typed(capsys, "compare", tmp_path / "t", *compared)[1])
    rows = {row["policy"]: row for row in result["rows"]}
    assert result["logged_rollout_share"] == pytest.approx(0.1)
    assert "2.50" in rows["ngram:3"]["acceptance"]["ngram"]
    assert rows["ngram:3"]["ratio"] < 1.0
