"""The waterfall: from the clairvoyant bound to the makespan in steps that each are one change."""

from pathlib import Path

import numpy as np
import pytest

import tltlab
from tests.refused import refused
from tltlab.errors import TltlabError
from tltlab.report.parts import waterfall_part
from tltlab.sim.scenario import Scenario
from tltlab.sim.study.waterfall import STEPS, waterfall
from tltlab.traces.trace import read

from ...traces_of_lengths import of_lengths

TRACES = Path(__file__).parents[3] / "traces"
LENGTHS, RECORDED = TRACES / "base-rl-16k", TRACES / "subset-sum-small"
ON_H100 = {"costs": "h100-qwen2.5-7b", "rl_steps": [0]}


def seconds(found):
    return dict(found.steps)


@pytest.fixture(scope="module")
def played():
    return waterfall(TRACES / "h200-rehearsal")


def test_steps_of_a_recorded_run_add_up_to_what_was_measured(played):
    measured = read(TRACES / "h200-rehearsal").steps.set_index("rl_step")["rollout_s"]
    of_step = played.table.drop(columns="policy").set_index("rl_step").sum(axis=1)
    assert of_step.tolist() == pytest.approx(measured.tolist(), rel=1e-12)
    assert played.makespan_s == pytest.approx(measured.mean(), rel=1e-12)
    assert played.measured
    assert [name for name, _ in played.steps] == [name for name in STEPS if name in seconds(played)]


def test_a_rollout_on_one_gpu_loses_to_scheduling_and_drain(played):
    """The golden figures of a shipped trace: stock vLLM scheduled asynchronously is 27 % faster there."""
    of = {name: seconds(each) for name, each in played.by_policy().items()}
    assert {name: round(value, 1) for name, value in of["adaptive"].items()} == {
        "bound": 4.0, "drafting": 0.0, "synchronous tax": 1.0, "drain": 1.3, "choice of depth": 0.1, "noise": 0.1,
        "unexplained": -0.2,
    }  # fmt: skip
    assert of["none"]["choice of depth"] > 5 > 1 > of["ngram:4"]["choice of depth"] > of["adaptive"]["choice of depth"]
    assert "placement" not in of["none"], "there is one worker"


def test_what_no_policy_can_avoid_is_never_negative(played):
    for found in (played, waterfall(TRACES / "tiny"), waterfall(LENGTHS, "table", **ON_H100,
                                                                  acceptance="ngram=0.6,learned=0.7")):  # fmt: skip
        inevitable = [name for name in ("bound", "drafting", "synchronous tax", "drain") if name in found.table]
        assert (found.table[inevitable] >= 0).all(axis=None)


def test_simulated_steps_lead_from_the_bound_to_what_simulate_says():
    asked = ON_H100 | {"acceptance": "ngram=geometric:0.6", "placement": "round_robin"}
    found, result = waterfall(LENGTHS, "table", **asked), tltlab.simulate(
        LENGTHS, "table", **asked
    )  # fmt: skip
    of = seconds(found)
    assert not found.measured
    assert found.makespan_s == pytest.approx(result.makespan_s, rel=1e-12)
    assert of["bound"] + of.get("drafting", 0.0) == pytest.approx(result.summary["lower_bound_s"], rel=1e-9)
    assert of.keys() == {"bound", "drafting", "drain", "placement", "choice of depth", "switches"}
    assert "placement" not in seconds(waterfall(LENGTHS, "table", **asked | {"placement": "longest_first"}))


def test_each_step_is_what_its_one_change_adds():
    fresh = {"kind": "fresh", "base": {"kind": "geometric", "alpha": 0.7}, "drafter": "learned"}
    noisy = Scenario.of(RECORDED, rl_steps=[0]).costs
    terms = {"sd_base_s": 1e-4, "sd_idle_s": 1e-4, "draft_level_s": 1e-3, "draft_level_per_request_s": 1e-5}
    costs = noisy.model_copy(update=terms | {"switch_s": 0.02, "per_token_s": 1e-5})
    asked = {"costs": costs, "acceptance": fresh, "rl_steps": [4, 5], "mode": "sampled"}
    of = seconds(waterfall(RECORDED, "learned:4@8", **asked))
    assert {"drafting", "acceptance lost to age", "switches", "noise"} <= of.keys()
    assert of["acceptance lost to age"] > 0
    assert of["switches"] == pytest.approx(0.02), "the worker that ends last drafts once fewer are left"
    assert noisy.noise is not None
    dearer = costs.model_copy(update={"draft_level_s": 2e-3})
    assert seconds(waterfall(RECORDED, "learned:4@8", **asked | {"costs": dearer}))["drafting"] > (1.3 * of["drafting"])


def test_a_drafter_of_another_kind_is_a_step_of_its_own():
    asked = ON_H100 | {"acceptance": "learned=0.8,ngram=0.3"}
    of = seconds(waterfall(LENGTHS, "ngram:2", **asked))
    assert of["choice of drafter"] > of["choice of depth"] > 0
    assert "choice of drafter" not in seconds(waterfall(LENGTHS, "none", **asked))


def test_a_budget_and_whole_tokens_are_no_obstacle(monkeypatch):
    from tltlab.policies.simple import Fixed

    asked = {"rl_steps": [0], "acceptance": "all=0.5"}
    assert waterfall(TRACES / "tiny", "das", **asked).makespan_s > 0
    monkeypatch.setattr(Fixed, "needs", frozenset({"whole_tokens"}))
    assert waterfall(TRACES / "tiny", "ngram:2", mode="sampled", **asked).makespan_s > 0


def test_the_result_is_a_frame_a_picture_and_html(played, tmp_path):
    frame = played.to_frame()
    assert frame.columns.tolist() == ["name", "seconds", "share", "until_s", "what"]
    assert frame["share"].sum() == pytest.approx(1)
    assert frame["until_s"].iloc[-1] == pytest.approx(played.makespan_s)
    assert frame["what"].notna().all()
    html = played._repr_html_()
    assert "data:image/" in html
    assert "synchronous tax" in html
    for width_in in (6.2, 3.35):
        figure = played.plot(width_in)
        (axes,) = figure.axes
        names = [label.get_text() for label in axes.get_yticklabels()]
        assert names == [*frame["name"], "measured"]
        colors = [bar.get_facecolor() for bar in axes.patches]
        assert colors[-1] not in colors[:-1], "what is measured has a colour of its own"
        ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
        assert np.allclose(ends[:-1], frame["until_s"])
        figure.draw_without_rendering()
        window = figure.get_window_extent()
        for text in [*axes.texts, *axes.get_yticklabels(), axes.title]:
            box = text.get_window_extent()
            assert window.x0 <= box.x0
            assert box.x1 <= window.x1, text.get_text()


def test_wrong_input_is_refused_in_a_line():
    for wrong, asked, facts in (
        (TRACES / "tiny", {"polices": "none"}, ["polices", "waterfall"]),
        (TRACES / "tiny", {"rl_steps": [9]}, ["9"]),
        (of_lengths([], workers=1), {}, ["no responses"]),
        (TRACES / "h100-smoke", {}, ["ngram", "learned"]),
    ):
        with refused(TltlabError, naming=facts):
            waterfall(wrong, **asked)


def test_a_report_has_the_waterfall_of_each_policy():
    trace = read(TRACES / "h200-rehearsal")
    pictures, table = waterfall_part(trace, compute=True).blocks
    assert pictures.names == ("none", "ngram:4", "adaptive")
    assert "synchronous tax 0.973 s" in pictures.pictures[-1].alt
    assert [row[0] for row in table.rows][:3] == ["bound", "drafting", "synchronous tax"]
    assert "--no-verify" in waterfall_part(trace, compute=False).reason
    assert "recorded" in waterfall_part(read(LENGTHS), compute=True).reason
