"""Checks of training logs: what takes an RL step's time, and what changes over a run, by logs that are made up here."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sim.workloads import console_line
from tests.traces_of_lengths import import_dump
from tltlab.doctor.signatures import diagnose
from tltlab.stats import change_point

SOUND = {
    "response_length/mean": 1500.0, "response_length/max": 3000.0, "response_length/min": 30.0,
    "prompt_length/mean": 150.0, "perf/total_num_tokens": 1.65e6, "timing_s/gen": 70.0, "timing_s/old_log_prob": 20.0,
    "timing_s/adv": 0.5, "timing_s/update_actor": 40.0, "timing_s/update_weights": 4.0,
}  # fmt: skip
Metrics = dict[str, float]


def log(folder, metrics, steps=12):
    """A log of verl with these metrics beside those of a sound run; the whole step is the sum of its stages."""
    lines = []
    for step in range(1, steps + 1):
        values = {name: value * (1 + 0.01 * (step % 3)) for name, value in SOUND.items()} | metrics(step)
        timers = [value for name, value in values.items() if name.startswith("timing_s/") and name.count("/") == 1]
        values = {"timing_s/step": sum(timers)} | values
        lines.append(console_line(step, values))
    path = folder / "x.log"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def told(path):
    found = diagnose(path)
    return found, {finding.code: finding for finding in found.findings}


def texts(finding):
    return f"{finding.title} {finding.evidence} {finding.advice}"


def test_a_sound_log_is_accused_of_nothing(tmp_path):
    found, findings = told(log(tmp_path, lambda step: {"num_turns/mean": 2.0}))
    assert set(findings) <= {"rollout-share"}
    assert {"stage-grows", "rollout-slower", "several-turns"} <= {check.name for check in found.good}


def test_stage_is_share_of_steps_own_time(tmp_path):
    _, findings = told(log(tmp_path, lambda step: {"timing_s/adv": 1200.0}))
    finding = findings["rollout-not-bottleneck"]
    assert "advantage" in finding.title
    assert {"5%", "90%", "3%"} <= set(finding.evidence.replace(",", "").replace(":", "").split())


@pytest.mark.parametrize(
    ("metrics", "name"),
    [({"timing_s/testing": 900.0}, "timing_s/testing"), ({"timing_s/step": 1100.0}, "no timer")],
    ids=["a timer of another name", "no timer"],
)
def test_what_has_no_known_name_is_named(tmp_path, metrics, name):
    _, findings = told(log(tmp_path, lambda step: metrics))
    assert name in findings["rollout-not-bottleneck"].title
    assert any(share in findings["rollout-not-bottleneck"].evidence for share in ("87%", "88%"))


def test_a_growing_stage_is_reported_with_its_step(tmp_path):
    _, findings = told(log(tmp_path, lambda step: {"timing_s/update_weights": 4.0 if step < 5 else 400.0}))
    finding = findings["stage-grows"]
    assert (finding.severity, finding.where) == ("problem", "RL steps 5-12")
    for fact in ("Weight sync", "75%", "RL step 5", "400", "4 s", "3%"):
        assert fact in texts(finding)


def test_weight_sync_beside_rollouts_that_continue(tmp_path):
    metrics = {"fully_async/trainer/idle_ratio": 0.3, "timing_s/update_weights": 0.0}
    path = log(tmp_path, lambda step: metrics | {"timing_s/param_sync": 4.0 if step < 5 else 160.0})
    finding = told(path)[1]["stage-grows"]
    assert {"55%", "72%"} <= set(finding.evidence.replace(",", "").split()) | set(finding.title.split())
    assert "rollout_s" not in import_dump(path).table("steps").dropna(axis=1, how="all")


@pytest.mark.parametrize(
    "length", [lambda step: 1.0 if step > 8 else 2.8, lambda step: 1.6 if step > 8 else 2.8], ids=["to one", "far"]
)
def test_drafts_that_are_kept_no_more_are_problem(tmp_path, length):
    def metrics(step):
        rate = {"spec_decode/draft_acceptance_rate": 0.3 * (length(step) - 1)}
        return rate | {"spec_decode/mean_acceptance_length": length(step), "timing_s/gen": 70.0 if step < 9 else 140.0}

    found, findings = told(log(tmp_path, metrics))
    finding = findings["drafts-collapse"]
    assert (finding.severity, finding.where) == ("problem", "RL steps 9-12")
    for fact in ("RL step 9", "2.80", f"{length(9):.2f}", "140 s", "70 s"):
        assert fact in texts(finding)
    assert "drafts-lose-time" not in {check.name for check in found.good}


def test_the_accepted_share_alone_shows_a_collapse(tmp_path):
    path = log(tmp_path, lambda step: {"spec_decode/draft_acceptance_rate": 0.6 if step < 9 else 0.0})
    finding = told(path)[1]["drafts-collapse"]
    assert (finding.severity, finding.where) == ("problem", "RL steps 9-12")
    assert {"60%", "0%"} <= set(finding.evidence.split())


def test_switched_off_drafts_are_no_collapse(tmp_path):
    def metrics(step):
        on = step < 9
        return {"spec_decode/num_draft_tokens": 9e3 * on, "spec_decode/mean_acceptance_length": 2.8 if on else 1.0}

    assert "drafts-collapse" not in told(log(tmp_path, metrics))[1]


def test_one_token_a_draft_alone_is_a_hint(tmp_path):
    finding = told(log(tmp_path, lambda step: {"spec_decode/mean_acceptance_length": 2.8 if step < 9 else 1.0}))[1]
    assert finding["drafts-collapse"].severity == "hint"


def test_slower_rollouts_of_like_lengths_are_a_problem(tmp_path):
    finding = told(log(tmp_path, lambda step: {"timing_s/gen": 70.0 if step < 7 else 120.0}))[1]["rollout-slower"]
    assert (finding.severity, finding.where) == ("problem", "RL steps 7-12")
    assert all(fact in finding.evidence for fact in ("70", "120", "1.7"))


def test_longer_responses_are_no_slower_rollouts(tmp_path):
    longer = {"timing_s/gen": 140.0, "response_length/mean": 3000.0, "response_length/max": 6000.0,
              "perf/total_num_tokens": 3.15e6}  # fmt: skip
    assert "rollout-slower" not in told(log(tmp_path, lambda step: longer if step > 6 else {}))[1]


def test_turns_are_noted_in_log_and_trace(tmp_path):
    path = log(tmp_path, lambda step: {"num_turns/mean": 7.4, "timing_s/agent_loop/tool_calls/mean": 24.5})
    for run in (path, import_dump(path)):
        finding = {finding.code: finding for finding in diagnose(run).findings}["several-turns"]
        assert "7.4" in finding.evidence
        assert "24.5" in finding.evidence


def test_a_log_without_lengths_is_looked_at(tmp_path):
    lines = [
        line
        for step in range(12)
        for line in (
            f"INFO [loggers.py:257] Engine 000: Avg prompt throughput: {step}.0 tokens/s, Running: 9 reqs",
            f"INFO [metrics.py:100] SpecDecoding metrics: Mean acceptance length: {2.5 if step < 8 else 1.0:.2f}, "
            f"Accepted: 9 tokens, Drafted: 90 tokens, Avg Draft acceptance rate: {50.0 if step < 8 else 0.0}%",
        )
    ]
    path = tmp_path / "server.log"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    found, findings = told(path)
    assert findings["drafts-collapse"].severity == "problem"
    assert "report" in texts(findings["drafts-collapse"])
    assert "responses" in dict(found.not_checked)["drafts-lose-time"]


@pytest.mark.parametrize(
    ("values", "at"),
    [
        ("111999", 3),
        ("1199999", 2),
        ("999111", None),
        ("111119", None),
        ("1919191", None),
        ("1199", None),
        ("111?99", None),
    ],
    ids=["rise", "early", "fall", "one", "to and fro", "few", "unknown"],
)
def test_a_change_is_a_rise_that_stays(values, at):
    assert change_point(np.array([float(value.replace("?", "nan")) for value in values])) == at
