"""Tables and verdicts of the experiments, from simulations of seconds or made-up readings."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.experiments import find
from tltlab.experiments.batch_size import of_best_by_round, overall, seconds_of, table
from tltlab.experiments.batch_size import verdict as batch_verdict
from tltlab.experiments.harness import Case
from tltlab.experiments.lossless import reward_row
from tltlab.experiments.lossless import verdict as lossless_verdict
from tltlab.experiments.result import read_settings
from tltlab.experiments.staleness import FROZEN, STOPPED, Staleness, kept
from tltlab.experiments.systems import Systems, SystemsSettings, recipe_for
from tltlab.planning.execution import missing_part
from tltlab.planning.systems import SYSTEMS

TRACES = Path(__file__).parents[3] / "traces"


def under_way(name: str, *overrides: str, fast: bool = True, said: Callable[[str], None] = print) -> Any:
    kind = find(name)
    settings = read_settings(kind.Settings, kind.FAST if fast else None, overrides)
    return kind(settings, folder=Path("unused"), seed=0, progress=said)


@pytest.mark.parametrize(
    ("name", "overrides", "facts"),
    [
        ("batch-size", ["policy=fixed"], ["policy fixed"]),
        ("batch-size", ["drafter=crystal-ball"], ["'crystal-ball'", "ngram, suffix"]),
        ("staleness", ["steps=3", "stop_after=3"], ["steps=3", "stop_after=3"]),
        ("staleness", ["head=nothing"], ["nothing", "config.json"]),
        ("systems", ["only=areol"], ["'areol'", "verl"]),
    ],
)
def test_what_cannot_be_measured_is_refused_first(monkeypatch, name, overrides, facts):
    monkeypatch.chdir(TRACES.parent)
    with refused(ConfigError, naming=facts):
        under_way(name, *overrides).run()
    assert not Path("unused").exists()


# baseline


def test_tlts_settings_are_simulated_beside_its_claim():
    found = under_way("baseline", "rl_steps=2", "machines=H100").run()
    assert found.prediction
    rows = found.rows.set_index(["setting", "system"])
    settings = [f"{model} as published, H100" for model in ("7B", "32B")]
    assert found.rows["setting"].drop_duplicates().tolist() == settings
    for setting in settings:
        own = rows.loc[setting]
        assert own.loc["VeRL", "speedup"] == 1
        assert own.loc["TLT", "speedup"] > own.loc["TLT-Base", "speedup"] > 1 > own.loc["Open-R1", "speedup"]
        assert own.loc["TLT", "low"] <= own.loc["TLT", "speedup"] <= own.loc["TLT", "high"]
        assert own.loc["VeRL", "step_s"] / own.loc["TLT", "step_s"] == pytest.approx(own.loc["TLT", "speedup"])
        assert own.loc["TLT", "paper"] == "1.7-2.1"
        assert own["paper"].notna().sum() == 1
    json.dumps(found.json(), allow_nan=False)


def test_interval_that_reaches_no_time_has_no_end(monkeypatch: pytest.MonkeyPatch):
    simulated = pd.DataFrame(
        {"system": ["verl", "tlt"], "title": ["VeRL", "TLT"], "assumptions": [[], ["one"]], "step_ratio": [1.0, 0.5],
         "step_ratio_low": [1.0, 0.0], "step_ratio_high": [1.0, 0.8], "ratio_most": 1.0, "ratio_least": 1.0,
         "ratio": 1.0, "makespan_s": 1.0, "step_s": 2.0, "rollout_share": 0.5, "mean_accept_length": 2.0}
    )  # fmt: skip
    also = {"title": ["TLT-Base", "Open-R1"], "system": ["tlt-base", "open-r1"]}
    simulated = pd.concat([simulated, simulated.assign(**also)])
    monkeypatch.setattr("tltlab.experiments.baseline.compared", lambda *_: simulated)
    found = under_way("baseline", "machines=H100").run()
    assert len(found.rows) == 8
    tlt = found.rows[found.rows["system"] == "TLT"].iloc[0]
    assert (tlt["speedup"], tlt["low"]) == (2.0, 1.25)
    assert np.isnan(tlt["high"])
    assert "2.00 to 2.00 under TLT" in found.verdict
    assert any("TLT: one" in note for note in found.notes)
    assert len(found.figure.axes[0].patches) == 8


# batch-size: DEEP and SHALLOW drafts, and a bandit

PLAIN, SHALLOW, DEEP, BANDIT = "none", "ngram:2", "ngram:8", "bandit"
ARMS = [PLAIN, SHALLOW, DEEP]


def visits(batch: int, pace: dict[str, float], picked: str, rounds: int = 8) -> list[dict[str, Any]]:
    """Rounds in which each arm generates so many tokens per second, give or take one in a hundred."""
    rng = np.random.default_rng(batch)
    return [
        {"batch": batch, "arm": arm, "round": n, "seconds": 1.0, "num_tokens": each, "drafts": 10, "accepted": 20,
         "pace": np.log(each * rng.normal(1, 0.01)), "ran": Counter({picked if arm == BANDIT else arm: 10})}
        for n in range(rounds)
        for arm, each in pace.items()
    ]  # fmt: skip


def test_the_verdict_names_batches_where_drafts_pay():
    made = pd.DataFrame(
        [
            *visits(1, {PLAIN: 100, SHALLOW: 150, DEEP: 200, BANDIT: 190}, DEEP),
            *visits(8, {PLAIN: 500, SHALLOW: 600, DEEP: 400, BANDIT: 400}, DEEP),
            *visits(64, {PLAIN: 900, SHALLOW: 700, DEEP: 500, BANDIT: 900}, PLAIN),
        ]
    )
    rows = table(made, ARMS, BANDIT)
    of_best = overall(made, BANDIT)
    assert of_best[0] == pytest.approx((0.95 * 400 / 600) ** (1 / 3), rel=0.01)
    by_arm = {(row["batch"], row["arm"]): row for row in rows}
    assert by_arm[1, DEEP]["speedup"] == pytest.approx(2, rel=0.02)
    assert by_arm[1, DEEP]["low"] < 2 < by_arm[1, DEEP]["high"] * 1.02
    assert by_arm[8, SHALLOW]["best"]
    assert not by_arm[8, DEEP]["level"]
    assert by_arm[8, BANDIT]["of_best"] == pytest.approx(400 / 600, rel=0.02)
    said = batch_verdict(pd.DataFrame(rows), BANDIT, of_best)
    for fact in ("batch sizes 1, 8 (ngram:8 at 1: ", "2 of 3 batch sizes", "not at 8 (ngram:8)"):
        assert fact in said
    few = pd.DataFrame(visits(1, {PLAIN: 100, SHALLOW: 150, DEEP: 200, BANDIT: 190}, DEEP, rounds=2))
    said = batch_verdict(pd.DataFrame(table(few, ARMS, BANDIT)), BANDIT, overall(few, BANDIT))
    assert "too few rounds" in said
    slow = pd.DataFrame(visits(1, {PLAIN: 100, SHALLOW: 50, DEEP: 20, BANDIT: 19}, DEEP))
    assert "no draft" in batch_verdict(pd.DataFrame(table(slow, ARMS, BANDIT)), BANDIT, overall(slow, BANDIT))


def test_other_rounds_name_the_best_arm():
    # By chance each arm wins its own round; chosen in hindsight the bandit would look behind, yet all are alike.
    lucky = pd.DataFrame(
        [[1.1 if arm == own else 1.0 for arm in (PLAIN, DEEP, BANDIT)] for own in (PLAIN, DEEP)],
        columns=[PLAIN, DEEP, BANDIT],
    )
    assert of_best_by_round(lucky, BANDIT).tolist() == [0.0, 0.0]


def test_iteration_that_waited_for_machine_counts_little():
    row = {"drafter": "ngram", "draft_depth": 2, "top_k": 1, "tokens_to_verify": 3}
    rows = [row | {"duration": 1.0}] * 9 + [row | {"duration": 50.0}, {"draft_depth": 0, "duration": 10.0}]
    assert seconds_of(rows) == pytest.approx(9 + 3 + 10)


# staleness


def live(run: str, lengths: Any) -> list[dict[str, Any]]:
    return [{"run": run, "seed": 0, "rl_step": step, "accept_length": length} for step, length in enumerate(lengths)]


def test_a_stopped_drafters_acceptance_is_reported():
    noise = np.random.default_rng(0).normal(0, 0.005, (3, 12))
    rising = 2.0 + 0.1 * np.arange(12)
    runs = {FROZEN: np.full(12, 2.0), STOPPED: np.minimum(rising, 2.4), "adaptive": rising}
    rows = pd.DataFrame(
        [row for each, (run, lengths) in zip(noise, runs.items(), strict=True) for row in live(run, lengths + each)]
    )
    late = rows[rows["rl_step"] > 4]
    assert kept(late, STOPPED).startswith(f"{runs[STOPPED][5:].sum() / rising[5:].sum():.2f} [0.")
    assert kept(late, FROZEN).startswith(f"{2.0 * 7 / rising[5:].sum():.2f} [0.")
    assert kept(late.iloc[:0], FROZEN) == "an unknown number of"
    said = Staleness.verdict(under_way("staleness", "steps=12", "stop_after=4"), rows)
    assert "first 4 RL steps" in said
    assert "over 7 RL steps" in said
    assert "too few RL steps" not in said
    said = Staleness.verdict(under_way("staleness", "stop_after=1"), rows[rows["rl_step"] < 3])
    assert "too few RL steps" in said


# lossless


def test_reward_differs_where_its_interval_leaves_out_0():
    runs = [{"with": {"held_out": 0.5}, "without": {"held_out": each}} for each in (0.4, 0.42, 0.44)]
    # Over few prompts the chance of their samples is wide.
    for num_runs, num_prompts, said in ((3, 10, "no difference"), (3, 10_000, "different"), (1, 10_000, "unknown")):
        row = reward_row("held_out", num_prompts, runs[-num_runs:])
        assert (row["verdict"], row["samples"], row["with"]) == (said, num_runs, 0.5)
        assert row["without"] == pytest.approx(0.42 if num_runs == 3 else 0.44)


def reward(low: float, high: float, verdict: str) -> dict[str, Any]:
    return {"case": "held-out reward at the end", "verdict": verdict, "difference": (low + high) / 2,
            "low": low, "high": high, "samples": 3}  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "facts"),
    [
        ([reward(-0.02, 0.03, "no difference")], ["no difference was found: held-out", "+0.005 [-0.020, +0.030]"]),
        (
            [reward(0.01, 0.03, "different"), reward(-0.1, 0.1, "no difference")],
            ["a difference was found (1 of 2 rows)"],
        ),
        ([reward(-0.02, 0.03, "unknown")], ["nothing could be decided", "over 3 seeds"]),
    ],
)
def test_the_verdict_names_the_difference(rows, facts):
    assert all(fact in lossless_verdict(rows) for fact in facts)


# systems


def test_every_system_that_can_run_is_a_recipe(tmp_path: Path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "report.json").write_text(json.dumps({"reward": "a:b"}))
    (model / "train.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(60)))
    settings = SystemsSettings(prompts=4, group_size=4, cap=64)

    def recipe(name: str) -> Any:
        return recipe_for(settings, SYSTEMS[name], model, tmp_path / "head", tmp_path / "runs" / name, 0)

    with refused(ConfigError, naming=("open-r1", "cluster.gpus_per_node")):
        recipe("open-r1")
    recipes = {name: recipe(name) for name, s in SYSTEMS.items() if missing_part(s) is None and name != "open-r1"}
    assert len((tmp_path / "runs" / "prompts.jsonl").read_text().splitlines()) == 8
    assert recipes["copris"].rollout.partial.concurrency == 24
    kinds = {name: recipe.drafter.schedule.kind for name, recipe in recipes.items() if recipe.drafter is not None}
    static = ("vllm-dynamic", "vllm-static", "vllm-adaptive", "sglang-adaptive", "sglang-tiers", "hedgespec")
    assert kinds == {"tlt": "always"} | dict.fromkeys(static, "never")
    for name, ours in recipes.items():
        depth = max(s.draft_depth for s in ours.read_policy().strategies)
        assert (ours.rollout.system, ours.rollout.max_draft_depth, ours.checkpoint.every) == (name, depth, 0)
    assert len({recipe.rollout.model_dump_json() for recipe in recipes.values()}) == len(recipes)


def test_a_run_that_cannot_be_predicted_has_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    systems = under_way("systems")
    systems.out = systems.model = systems.head = tmp_path
    monkeypatch.setattr("tltlab.experiments.systems.recipe_for", lambda *given: None)
    monkeypatch.setattr(Systems, "_ran", lambda self, recipe, out: {"ran": True, "rollout_s": 2.0})

    def predicted(self: Systems, out: Path) -> dict[str, float]:
        if "das" in out.name:
            raise ConfigError("too few drafts")
        return {"error": 0.25, "error_at_speed": 0.125}

    monkeypatch.setattr(Systems, "_predicted", predicted)
    rows = pd.DataFrame(
        [row for name in ("verl", "das", "seer") for row in systems.measure(Case(name, "", SYSTEMS[name]))]
    )
    assert rows["ran"].tolist() == [True, True, False]
    assert ["too few drafts" in str(why) for why in rows["why_not"]] == [False, True, False]
    assert "2 systems ran" in systems.verdict(rows)
    assert "25.0% at worst (verl)" in systems.verdict(rows)
    assert "2 systems ran" in systems.verdict(rows.assign(error=np.nan))
