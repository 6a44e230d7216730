"""Drafters that drift under a schedule of training, and what `advise` says of a trace."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tltlab.acceptance.base import GeometricAcceptance
from tltlab.acceptance.freshness import Freshness
from tltlab.coordination.progress import SpotTraining
from tltlab.errors import ConfigError
from tltlab.lengths.generate import log_normal
from tltlab.sim.scenario import Scenario
from tltlab.sim.tuning.advice import advise
from tltlab.sim.tuning.drift import LEVELS, LevelDrift, Surface, compared, play, regimes

from ..workloads import typed

TRACES = Path(__file__).parents[3] / "traces"


def surface(**changes: float) -> Surface:
    """Rollouts that take half as long with a drafter twice as good, and 1 s longer where workers train."""
    levels = np.array(LEVELS)
    kinds = {"rollout_s": 20.0 / (0.2 + levels), "updates": 30.0 + 0 * levels, "delay_s": 1.0 + 0 * levels}
    tables = {name: (values * changes.get(name, 1.0))[:, None] for name, values in kinds.items()}
    return Surface(
        levels=levels, accept_length=1.0 + 3.0 * levels, tokens=np.array([10_000.0]), idle_share=0.2, **tables
    )


def test_a_level_falls_with_the_policys_moving_and_rises_with_updates():
    drift = LevelDrift(
        name="d", about="", freshness=Freshness(untrained=0.6, floor=0.6, updates_to_train=10, age_steps=5)
    )
    assert drift.aged(1.0, 0) == pytest.approx(0.6 + 0.4 * math.exp(-1 / 5))
    assert drift.aged(0.5, 0) == 0.5, "below the floor nothing is lost"
    assert drift.trained(0.6, 10.0) == pytest.approx(1.0 - 0.4 * math.exp(-1.0))


def test_frozen_never_trains_idle_time_always_and_the_same_seed_has_the_same_luck():
    plain = surface()
    still = regimes(30.0)[0]
    frozen, always = (play(plain, still, kind, 12, 0) for kind in ("never", "always"))
    assert (frozen.trained, always.trained) == ((), tuple(range(12)))
    assert always.step_s - 1.0 == pytest.approx(frozen.step_s * 1.02)
    again = play(plain, still, "gated", 12, 0)
    assert np.array_equal(again.step_s, play(plain, still, "gated", 12, 0).step_s)
    assert not play(surface(updates=0.0), still, "always", 12, 0).trained


def test_a_harmful_training_never_goes_through_the_gate():
    harmful = next(drift for drift in regimes(30.0) if drift.name == "harmful")
    gated = play(surface(), harmful, "gated", 30, 0)
    assert gated.trained
    assert gated.served == ()
    assert gated.levels.min() == 1.0


def test_in_every_regime_the_gate_is_at_most_a_hundredth_behind_the_better_of_always_and_never():
    found = regimes(30.0)
    assert len(found) >= 6
    over = {}
    for drift in found:
        rows = compared(surface(delay_s=0.1), [drift] * 2, 60, [0, 1]).set_index("schedule")
        over[drift.name] = rows["over_best"]["gated"]
        assert min(rows["over_best"]["frozen"], rows["over_best"]["idle time"]) == 1.0
    assert {name: ratio for name, ratio in over.items() if ratio > 1.01} == {}


def test_the_surface_is_the_simulations_own():
    trace = log_normal(rl_steps=1, prompts=4, group_size=4, cap=1024, workers=2)
    acceptance = GeometricAcceptance(alpha=0.8)
    spot = SpotTraining(start_s=0.0, samples_per_update=1)
    scenario = Scenario.of(trace, costs="h100-qwen2.5-7b", acceptance=acceptance, spot=spot)
    found = Surface.of(scenario, acceptance, "learned")
    assert (np.diff(found.rollout_s[:, 0]) <= 0).all(), "a better drafter is not slower"
    assert found.rollout_s[-1, 0] < 0.8 * found.rollout_s[0, 0]
    assert (np.diff(found.accept_length) >= 0).all()
    assert found.updates[0, 0] > 0
    assert found.at(found.rollout_s, 1.0, 7) == found.rollout_s[-1, 0]


def test_advise_tells_what_is_known_and_what_is_assumed(capsys: pytest.CaptureFixture[str]):
    code, out, _ = typed(capsys, "advise", str(TRACES / "h100-smoke"), "--rl-steps", "10", "--seeds", "2", "--json")
    assert code == 0
    found = json.loads(out)
    assert [row["name"] for row in found["schedules"]] == ["frozen", "idle time", "gated", "acceptance drops"]
    assert found["schedules"][0]["saved_s"]["estimate"] == 0.0
    assert any("spot_training.parquet" in line for line in found["known"])
    assert found["drafter"] == "learned"
    code, out, _ = typed(capsys, "advise", str(TRACES / "tiny"), "--rl-steps", "10", "--seeds", "2")
    assert code == 0
    assert "leave the drafter frozen" in out
    assert "the trace knows no learned drafter" in out.replace("\n", " ")


def test_a_file_of_freshness_is_the_drift_and_a_slowdown_may_be_said():
    kept = {"kind": "fresh", "base": {"kind": "geometric", "alpha": 0.8},
            "freshness": {"untrained": 0.5, "floor": 0.5, "updates_to_train": 1.0, "age_steps": 3.0}}  # fmt: skip
    trace = log_normal(rl_steps=1, prompts=8, group_size=8, cap=4096, workers=4)
    config = {"costs": "h100-qwen2.5-7b", "acceptance": kept, "spot": {"start_s": 0.5}}
    from tltlab.sim.config import SimulationConfig

    cheap = advise(trace, SimulationConfig(**config), slowdown=0.0, rl_steps=20, seeds=2)  # type: ignore[arg-type]
    dear = advise(trace, SimulationConfig(**config), slowdown=5.0, rl_steps=20, seeds=2)  # type: ignore[arg-type]
    assert cheap.train in ("idle time", "gated")
    assert cheap.saved_s["idle time"].low > 0 > dear.saved_s["idle time"].high
    assert "drift: the acceptance file's freshness" in cheap.known
    with pytest.raises(ConfigError, match="at least 10 RL steps"):
        advise(trace, rl_steps=3)


@pytest.mark.parametrize(
    ("args", "words"),
    [(["nowhere"], "nowhere"), (["traces/tiny", "--slowdown", "-1"], "slowdown is a share")],
)
def test_bad_input_ends_with_a_sentence(args: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    args = [str(TRACES / "tiny") if arg == "traces/tiny" else arg for arg in args]
    code, out, err = typed(capsys, "advise", *args)
    assert (code, out) == (2, "")
    assert words in err
    assert "Traceback" not in err
