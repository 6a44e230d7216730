"""The experiment policies: regimes in phases, the best fixed strategy in hindsight, and what the verdict says."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bench.runtime.figures import ModeRollout, summarise
from tltlab.errors import ConfigError
from tltlab.experiments import policies
from tltlab.experiments.policies import (
    ADAPTIVE,
    ORACLE,
    SOURCES,
    PoliciesSettings,
    by_part,
    judged,
    measured_rows,
    measured_verdict,
    repairs,
    run,
    verdict,
)
from tltlab.experiments.regimes import PARTS, LastingPolicy, PolicyRegime, best_fixed, regimes
from tltlab.policies.policy import load_policy

TRACES = Path(__file__).parents[3] / "traces"


@pytest.fixture(scope="module")
def found() -> dict[str, PolicyRegime]:
    return {regime.name: regime for regime in regimes(TRACES, 2)}


@pytest.fixture(scope="module")
def of_tiny(found: dict[str, PolicyRegime]) -> dict[str, dict]:
    return {row["policy"]: row for row in judged(found["tiny"], [0])}


def test_there_are_at_least_twelve_regimes_and_those_that_change_have_phases(found: dict[str, PolicyRegime]):
    assert len(found) >= 12
    assert {"tiny", "gcd-small", "subset-sum-small", "h100-smoke"} <= set(found)
    for name in ("drafter improves", "drafter goes stale", "machine slows down"):
        assert len(found[name].phases) == 2
    wrong = found["costs wrong, dearer"]
    strategy = wrong.strategies[4]
    true, told = (costs.iteration(strategy).seconds(4, 0.0) for costs in (wrong.phases[0].costs, wrong.file_costs))
    assert true == pytest.approx(1.3 * told)


def test_selectors_live_through_all_phases():
    lasting = LastingPolicy(load_policy("adaptive"), 2)
    built = [lasting.build(np.random.default_rng(i)) for i in range(4)]
    assert built[0] is built[2]
    assert built[1] is built[3]
    assert built[0] is not built[1]


def test_every_policy_is_held_against_the_best_fixed_strategy(found: dict[str, PolicyRegime], of_tiny):
    tiny, rows = found["tiny"], of_tiny
    assert set(rows) == set(SOURCES)
    best, seconds = best_fixed(tiny, [0])
    fixed = {s: tiny.seconds(load_policy(s), 0).sum() for s in tiny.strategies}
    assert fixed[best] == min(fixed.values())
    assert rows["none"]["ratio"] == pytest.approx(fixed[tiny.strategies[0]] / seconds[0].sum())
    assert rows[ORACLE]["over_oracle"] == pytest.approx(1.0)
    assert rows[ADAPTIVE]["ratio_low"] <= rows[ADAPTIVE]["ratio"] <= rows[ADAPTIVE]["ratio_high"]


@pytest.mark.parametrize(("ratios", "words"), [((0.9, 1.01), "it clears"), ((0.9, 1.03), "does not clear")])
def test_the_verdict_goes_by_the_worst_regime_and_names_who_is_better(ratios: tuple[float, float], words: str):
    rows = [
        {"regime": f"r{i}", "policy": name, "ratio": ratio - less, "over_oracle": 1.01}
        for i, ratio in enumerate(ratios)
        for name, less in ((ADAPTIVE, 0.0), ("goodput", 0.05))
    ]
    text = verdict(pd.DataFrame(rows))
    assert words in text
    assert "(r1)" in text
    assert "better on average: goodput" in text


def test_nobody_is_better_than_itself_however_sums_are_rounded():
    for ratios in np.random.default_rng(0).uniform(0.9, 1.1, (50, 3)):
        rows = [{"regime": str(r), "policy": ADAPTIVE, "ratio": r, "over_oracle": 1.0} for r in ratios]
        assert "no other is better on average" in verdict(pd.DataFrame(rows))


def test_the_parts_of_a_rollout_add_up_to_all_of_it(found: dict[str, PolicyRegime]):
    tiny = found["tiny"]
    rows = by_part(tiny, [ADAPTIVE, "none"], 0)
    assert set(rows["part"]) == set(PARTS)
    decoding = {name: part["seconds"].sum() for name, part in rows.groupby("policy")}
    took = tiny.seconds(load_policy("none"), 0).sum()
    assert 0.5 * took < decoding["none"] <= took, "one worker decodes but while it prefills"
    oracle = sum(tiny.seconds_by_part(None, 0).values())
    for name, part in rows.groupby("policy"):
        assert part["lost"].sum() == pytest.approx(decoding[name] / oracle - 1.0)


def test_a_whole_run_has_every_policy_in_each_regime_that_was_asked_for(found, of_tiny, tmp_path: Path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(policies, "regimes", lambda *asked: tuple(found.values()))
    as_of_tiny = [*of_tiny.values()]
    monkeypatch.setattr(policies, "judged", lambda regime, seeds: [r | {"regime": regime.name} for r in as_of_tiny])
    settings = PoliciesSettings(only=("tiny", "gcd-small"), traces=TRACES, rl_steps=1, seeds=1)
    result = run(settings, folder=tmp_path, seed=0, progress=said.append)
    assert set(zip(result.rows["regime"], result.rows["policy"], strict=True)) == {
        (regime, policy) for regime in settings.only for policy in SOURCES
    }
    assert result.prediction
    assert "over 2 regimes" in result.verdict
    assert [line.split(":")[0] for line in said] == ["gcd-small", "gcd-small", "tiny", "tiny"]
    with pytest.raises(ConfigError, match="name models to measure on"):
        run(PoliciesSettings(simulated=False), folder=tmp_path, seed=0, progress=print)
    with pytest.raises(ConfigError, match="no regime named 'tinny'"):
        run(PoliciesSettings(only=("tinny",), traces=TRACES, rl_steps=1), folder=tmp_path, seed=0, progress=print)


def test_what_was_measured_is_held_against_the_best_fixed_depth():
    took = {
        "stock": ("stock", 2.0),
        "suffix 4": ("static", 1.0),
        "suffix 8": ("static", 1.25),
        ADAPTIVE: (ADAPTIVE, 0.9),
    }
    rollouts = [
        ModeRollout(
            mode=mode, kind=kind, epoch=1, round=n, num_responses=4, seconds=seconds * (1 + n / 50), num_tokens=100,
            plain_s=2.0, tail_seconds=0.5, tail_tokens=20, tail_plain_s=1.0, num_pairs=0, num_accepted=0,
            recorder_s=0.0, policy_s=0.0, drafting_s=0.0, processor_s=seconds**2,
        )
        for mode, (kind, seconds) in took.items()
        for n in range(1, 4)
    ]  # fmt: skip
    result = summarise(rollouts)
    found = pd.DataFrame(measured_rows("small", result)).set_index("policy")
    assert set(found["best_fixed"]) == {"suffix 4"}
    assert found["ratio"].to_dict() == pytest.approx({"stock": 2.0, "suffix 4": 1.0, "suffix 8": 1.25, ADAPTIVE: 0.9})
    assert found["ratio_low"][ADAPTIVE] == pytest.approx(0.9)
    said = measured_verdict(found.reset_index())
    assert "0.900 [0.900, 0.900] on small, epoch 1 (48 under stock, 96 under suffix 4, 107 under adaptive" in said
    counted = pd.DataFrame(measured_rows("small", result, "processor")).set_index("policy")
    assert counted["ratio"][ADAPTIVE] == pytest.approx(0.81)
    uncounted = summarise([replace(rollout, processor_s=0.0) for rollout in rollouts])
    assert not measured_rows("small", uncounted, "processor"), "no time was counted by that clock"


def test_each_repair_of_the_bandit_has_an_effect_of_its_own():
    ratios = {
        "beg-mab published": 1.2, "beg-mab, several arms": 1.0, "beg-mab, arms and means": 0.9,
        "beg-mab, arms and relative": 1.1, "beg-mab, arms and bands": 1.0, "beg-mab, all repairs": 0.6,
    }  # fmt: skip
    said = repairs(pd.DataFrame([{"policy": name, "ratio": ratio} for name, ratio in ratios.items()]))
    assert "several arms for one a bucket -16.7%" in said
    assert "means for medians -10.0%" in said
    assert "relative rewards +10.0%" in said
    assert "narrow buckets +0.0%" in said
    assert "all -50.0%" in said
