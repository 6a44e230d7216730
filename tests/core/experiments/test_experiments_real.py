"""The experiments staleness, batch-size and lossless: their figures from made-up rows, and each by its command."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
pytest.importorskip("tltlab.runtime")

from tltlab.errors import ConfigError
from tltlab.experiments import batch_size, lossless, staleness
from tltlab.experiments.batch_size import BatchSizeSettings, Visit, _seconds
from tltlab.experiments.result import read_settings
from tltlab.experiments.staleness import StalenessSettings
from tltlab.runtime.audit.cases import cases
from tltlab.strategy import NO_SPECULATION, Strategy

from ..conftest import Command

DEEP, SHALLOW = Strategy.chain("ngram", 8), Strategy.chain("ngram", 2)


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of our own that was hardly trained: it answers anything, to the cap."""
    from tltlab.runtime.models.make import Size, make_model

    folder = tmp_path_factory.mktemp("model") / "subset-sum"
    size = Size(hidden=64, layers=1, mlp=64, steps=40, measured_prompts=2, samples_per_prompt=2)
    make_model(folder, size=size, task="subset-sum", seed=0, progress=print)
    return folder


def told(command: Command, out: Path, *args: str) -> dict:
    code, printed, _ = command("experiment", *args, "--fast", "--out", out, "--json")
    assert code == 0
    # Whatever engines print to stdout would be before the object, and break who reads it.
    found = json.loads(printed)
    assert not found["prediction"]
    assert found["verdict"].startswith("measured here, ")
    assert sorted(path.name for path in out.iterdir()) == [args[0]]
    assert sorted(path.name for path in (out / args[0]).iterdir()) == ["picture.png", "result.json", "table.csv"]
    assert (out / args[0] / "picture.png").stat().st_size > 5000
    return found


@pytest.mark.engine
def test_forced_batches_run_every_arm_and_what_the_bandit_picks(small_model: Path, tmp_path: Path, command):
    found = told(command, tmp_path, "batch-size", "--model", str(small_model), "batches=1,6", "depths=8", "rounds=1")
    rows = found["rows"]
    for batch in (1, 6):
        here = {row["arm"]: row for row in rows if row["batch"] == batch}
        assert {"none", "ngram:8", "ngram:4", "ngram:2", "beg-mab"} <= set(here)
        assert all(row["tokens_per_s"] > 0 for row in here.values())
        assert here["none"]["speedup"] == pytest.approx(1)
        assert sum(row["share"] for row in here.values() if row["share"] is not None) == pytest.approx(1)
        assert [row["best"] for row in here.values()].count(True) == 1
        assert here["beg-mab"]["of_best"] > 0
    # From batch 5 on the shipped bandit has no arm of depth 8.
    assert next(row for row in rows if row["batch"] == 6 and row["arm"] == "ngram:8")["share"] == 0
    assert "too few rounds to tell" in found["verdict"]


@pytest.mark.engine
@pytest.mark.usefixtures("one_ray")
def test_a_drafter_that_is_left_alone_ages_and_learns_no_more(small_model: Path, tmp_path: Path, command, monkeypatch):
    asked: dict[str, tuple[int, object]] = {}
    run = staleness._run

    def only_the_stopped_one(settings, work, out, seed, stop, progress):
        """The other runs differ in when training stops alone: its trace stands for theirs."""
        if not asked:
            asked["trace"] = (1, run(settings, work, out, seed, 1, progress))
        asked[out.name] = (stop, None)
        return asked["trace"][1]

    monkeypatch.setattr(staleness, "_run", only_the_stopped_one)
    found = told(
        command, tmp_path, "staleness", "--model", str(small_model), "prompts=4", "cap=48", "warm_up_updates=5",
        "warm_up_length=1.01", "tokens_per_update=128",
    )  # fmt: skip
    assert {name: stop for name, (stop, _) in asked.items()} == {
        "trace": 1, "frozen-0": 0, "stopped-0": 1, "adaptive-0": 3,
    }  # fmt: skip
    live = {(row["run"], row["rl_step"]): row for row in found["rows"]}
    assert [name for name, step in live if step == 2] == ["frozen", "stopped", "adaptive"]
    assert live["stopped", 0]["drafter_updates"] == 0
    trained = live["stopped", 1]["drafter_updates"]
    assert live["stopped", 2]["drafter_updates"] == trained
    assert live["stopped", 2]["drafter_age"] == live["stopped", 1]["drafter_age"] + 1
    assert all(1 <= row["accept_length"] <= 5 for row in found["rows"])


@pytest.mark.engine
@pytest.mark.usefixtures("one_ray")
def test_rewards_and_tokens_are_held_against_plain_decoding(small_model: Path, tmp_path: Path, command, monkeypatch):
    run = lossless.rewards_of_run

    def plain_decoding_is_known(recipe, out, steps, progress):
        if out.name.startswith("without"):
            assert recipe.drafter is None
            assert recipe.rollout.policy == "none"
            return {"held_out": 0.25, "trained": 0.5}, [0.5] * steps
        assert recipe.drafter is not None
        return run(recipe, out, steps, progress)

    monkeypatch.setattr(lossless, "rewards_of_run", plain_decoding_is_known)
    # The audit's own tests run all of its cases.
    few = [case for case in cases(["ngram"], fast=True) if case.composition in ("batch", "queue", "greedy")]
    monkeypatch.setattr("tltlab.runtime.audit.run.cases", lambda drafters, fast: few)
    found = told(
        command, tmp_path, "lossless", "--model", str(small_model), "prompts=4", "cap=32", "warm_up_updates=5",
        "warm_up_length=1.01", "heldout=4", "seeds=1", "steps=1",
    )  # fmt: skip
    rewards = [row for row in found["rows"] if row["kind"] == "reward"]
    assert [row["case"] for row in rewards] == ["held-out reward at the end", "mean reward over the RL steps"]
    for row, without in zip(rewards, (0.25, 0.5), strict=True):
        assert row["difference"] == pytest.approx(row["with"] - without)
        assert row["verdict"] == "unknown"
    assert found["verdict"].count("(no interval) over 1 seeds") == 2
    tokens = [row for row in found["rows"] if row["kind"] == "tokens"]
    assert len(tokens) == len(few) == 4
    assert {row["verdict"] for row in tokens} == {"no difference"}
    assert "in 4 of 4 audited cases" in found["verdict"]


def visits(batch: int, pace: dict[Strategy | None, float], picked: Strategy, rounds: int = 8) -> list[Visit]:
    """Rounds in which each arm generates so many tokens per second, give or take one in a hundred."""
    rng = np.random.default_rng(batch)
    return [
        Visit(
            batch=batch, arm=arm, round=n, seconds=1 / (each * rng.normal(1, 0.01)), num_tokens=1, drafts=10,
            accepted=20, ran={picked if arm is None else arm: 10}, past_end=0, generated=1,
        )
        for n in range(rounds)
        for arm, each in pace.items()
    ]  # fmt: skip


def test_the_verdict_says_where_drafts_stop_paying_and_what_the_bandit_loses():
    made = [
        *visits(1, {NO_SPECULATION: 100, SHALLOW: 150, DEEP: 200, None: 190}, DEEP),
        *visits(8, {NO_SPECULATION: 500, SHALLOW: 600, DEEP: 400, None: 400}, DEEP),
        *visits(64, {NO_SPECULATION: 900, SHALLOW: 700, DEEP: 500, None: 900}, NO_SPECULATION),
    ]
    rows = batch_size.table(made, "bandit")
    said = batch_size.verdict(rows, "bandit", batch_size.overall(made))
    assert "drafts pay at batch sizes 1 and 8 (ngram:8 at 1: " in said
    assert "no gain was shown from 64 on" in said
    assert "best one at 2 of 3 batch sizes, not at 8 (ngram:8)" in said
    assert batch_size.overall(made)[0] == pytest.approx((0.95 * 400 / 600) ** (1 / 3), rel=0.01)
    by_arm = {(row["batch"], row["arm"]): row for row in rows}
    assert by_arm[1, "ngram:8"]["speedup"] == pytest.approx(2, rel=0.02)
    assert by_arm[1, "ngram:8"]["low"] < 2 < by_arm[1, "ngram:8"]["high"] * 1.02
    assert by_arm[8, "ngram:2"]["best"]
    assert not by_arm[8, "ngram:8"]["level"]
    assert by_arm[8, "bandit"]["of_best"] == pytest.approx(400 / 600, rel=0.02)


def test_the_best_arm_of_a_round_is_the_one_that_the_other_rounds_name():
    # By luck each arm wins its own round; chosen in hindsight the bandit would look behind, yet all are alike.
    lucky = [
        Visit(batch=1, arm=arm, round=n, seconds=1.0, num_tokens=110 if arm is own else 100, drafts=0, accepted=0,
              ran={NO_SPECULATION: 1}, past_end=0, generated=1)
        for n, own in enumerate((NO_SPECULATION, DEEP))
        for arm in (NO_SPECULATION, DEEP, None)
    ]  # fmt: skip
    assert batch_size.of_best_by_round(lucky, 1) == [0.0, 0.0]


def test_an_iteration_that_waited_for_the_machine_counts_little():
    row = {"drafter": "ngram", "draft_depth": 2, "top_k": 1, "tokens_to_verify": 3}
    plain = {"draft_depth": 0}
    rows = [row | {"duration": 1.0}] * 9 + [row | {"duration": 50.0}, plain | {"duration": 10.0}]
    assert _seconds(rows) == pytest.approx(9 + 3 + 10)


@pytest.mark.parametrize(
    ("kind", "overrides", "said"),
    [
        (BatchSizeSettings, ["policy=fixed"], "it has nothing to pick"),
        (BatchSizeSettings, ["drafter=crystal-ball"], "there are: ngram, suffix"),
        (StalenessSettings, ["steps=3", "stop_after=3"], "none is left without training"),
        (StalenessSettings, ["head=nothing"], "is no folder of `tltlab train-drafter`"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_model_is_made(tmp_path: Path, kind, overrides, said: str):
    module = batch_size if kind is BatchSizeSettings else staleness
    with pytest.raises(ConfigError, match=said):
        module.run(read_settings(kind, module.FAST, overrides), folder=tmp_path, seed=0, progress=print)
    assert not any(tmp_path.iterdir())


def live(run: str, lengths: list[float]) -> list[dict]:
    return [
        {"run": run, "seed": 0, "rl_step": step, "drafter_age": 0, "drafter_updates": 1, "accept_length": length,
         "drafts": 3000, "target_moved": 0.002}
        for step, length in enumerate(lengths)
    ]  # fmt: skip


def test_what_a_drafter_that_was_left_alone_keeps_is_told_over_the_rl_steps_after_that():
    noise = np.random.default_rng(0).normal(0, 0.005, (3, 12))
    rising = 2.0 + 0.1 * np.arange(12)
    stopped = np.minimum(rising, 2.4)
    runs = {"frozen": np.full(12, 2.0), "stopped": stopped, "adaptive": rising}
    rows = [row for each, (run, lengths) in zip(noise, runs.items(), strict=True) for row in live(run, lengths + each)]
    found = staleness.summary(rows, 4, np.random.default_rng(0))
    assert found.num_steps == 7
    assert found.stopped is not None
    assert found.frozen is not None
    assert found.stopped.estimate == pytest.approx(stopped[5:].sum() / rising[5:].sum(), rel=0.01)
    assert found.frozen.estimate == pytest.approx(2.0 * 7 / rising[5:].sum(), rel=0.01)
    assert found.frozen.high < found.stopped.low < found.stopped.high < 1
    said = staleness.verdict(found, 4)
    assert "trained in its first 4 RL steps and then left alone keeps 0.8" in said
    assert "over 7 RL steps after that (never trained 0.7" in said


def test_few_rl_steps_are_said_to_tell_little():
    rows = [row for run in ("frozen", "stopped", "adaptive") for row in live(run, [2.0, 2.1, 2.2])]
    said = staleness.verdict(staleness.summary(rows, 1, np.random.default_rng(0)), 1)
    assert "though so few RL steps tell little" in said


def test_a_reward_differs_where_its_interval_leaves_out_0():
    runs = [{"with": {"held_out": 0.5}, "without": {"held_out": each}} for each in (0.4, 0.42, 0.44)]
    for low, high, verdict in ((-0.02, 0.18, "no difference"), (0.02, 0.14, "different")):
        row = lossless.reward_row("held_out", {"estimate": 0.08, "low": low, "high": high}, runs)
        assert (row["verdict"], row["samples"], row["with"]) == (verdict, 3, 0.5)
        assert row["without"] == pytest.approx(0.42)


def reward(low: float, high: float, verdict: str) -> dict:
    return {"kind": "reward", "case": "held-out reward at the end", "verdict": verdict, "difference": (low + high) / 2,
            "low": low, "high": high, "samples": 3}  # fmt: skip


def case(verdict: str, name: str = "ngram, depth 1") -> dict:
    return {"kind": "tokens", "case": name, "verdict": verdict, "detectable": 0.04}


def test_without_rewards_the_picture_has_the_audited_cases_p_values():
    rows = [case("no difference", name) | {"p_value": p} for name, p in (("a", 0.4), ("b", None), ("c", 0.01))]
    axes = lossless._picture(lossless._NO_CURVES, rows).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [0.4, 0.01]
    assert lossless._picture(lossless._NO_CURVES, []).axes


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([reward(-0.02, 0.03, "no difference"), case("no difference")], "no difference was found: held-out"),
        ([reward(0.01, 0.03, "different"), case("no difference")], "a difference was found (1 of 2 rows)"),
        ([reward(-0.02, 0.03, "no difference"), case("different")], "in 0 of 1 audited cases, not in ngram, depth 1"),
        (
            [reward(-0.02, 0.03, "no difference"), case("not tested")],
            "in 0 of 1 audited cases, not tested in ngram, depth 1",
        ),
        ([reward(-0.02, 0.03, "no difference")], "+0.005 [-0.020, +0.030] over 3 seeds."),
        ([case("no difference")], "(a total variation of 0.04 would have been seen in each that is sampled)"),
    ],
)
def test_the_verdict_says_what_differs_or_how_much_would_have_been_seen(rows: list[dict], said: str):
    assert said in lossless.verdict(rows)
