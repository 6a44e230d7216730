"""Policies rolled out on real engines, in turn, and predicted from one another."""

import contextlib
import io
import json
import math
import time

import pandas as pd
import psutil
import pytest

import tltlab
from tests.refused import refused
from tltlab.cli.verify import verify as command
from tltlab.console import JSON, running
from tltlab.errors import ConfigError
from tltlab.files import read_json
from tltlab.lengths.generate import log_normal
from tltlab.policies.policy import load_policy
from tltlab.runtime.engine.environment import run_json
from tltlab.runtime.recipe.recipe import load_recipe
from tltlab.runtime.rollout.policy_rounds import all_drafters, explore_all, run_to_verify
from tltlab.sim.verification.played import FITTED, Agreement, listed_policies

NAMES = ["none", "ngram:4@8", "beg-mab"]


@pytest.fixture(scope="module")
def run(recipe_file, tmp_path_factory):
    """A RUN of which only what it says of itself is left: its recipe, and that two RL steps were done."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(run_json(load_recipe(recipe_file))))
    log_normal(prompts=2, group_size=2, rl_steps=2, median=20, cap=48, workers=2).write(folder / "trace")
    return folder


@pytest.fixture(scope="module")
def session(one_ray, run):
    """Three policies, two rounds: the folder of what ran, and what the command printed."""
    out = run.parent / "session"
    printed = io.StringIO()
    before, children = _contents(run), _children()
    token = running.set((JSON,))
    with contextlib.redirect_stdout(printed):
        command(run, policies=",".join(NAMES), repeats=2, samples=2, out=out)
    running.reset(token)
    assert _contents(run) == before
    end = time.monotonic() + 300
    while _children() > children and time.monotonic() < end:
        time.sleep(0.1)
    assert _children() <= children
    return out, json.loads(printed.getvalue())


def _contents(folder):
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _children():
    """Kinds of processes below this one that serve engines."""
    names = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            names.add(child.name())
    return {name for name in names if name.startswith(("ray", "raylet", "gcs_server"))}


@pytest.mark.engine
def test_policies_of_a_round_share_prompts(session):
    out, found = session
    trace = tltlab.read(out)
    assert len(trace.rl_steps) == 2 * (len(NAMES) + 1)
    names = trace.steps.set_index("rl_step")["policy"]
    number = names.groupby(names).cumcount()
    assert sorted(names[number == 0]) == sorted([*NAMES, "explore"])
    rounds = []
    for _, steps in number.groupby(number):
        columns = ["prompt_id", "sample", "prompt_token_ids"]
        tokens = [trace.select([step]).table("tokens")[columns] for step in steps.index]
        assert len({part.to_json() for part in tokens}) == 1
        rounds.append(frozenset(tokens[0]["prompt_id"]))
    assert rounds[0].isdisjoint(rounds[1])
    assert {row["round"] for row in found["rounds"]} == {0, 1}


@pytest.mark.engine
def test_rollouts_have_policies_and_common_random_numbers(session):
    trace = tltlab.read(session[0])
    names = trace.steps.set_index("rl_step")["policy"]
    depths = trace.iterations.groupby("rl_step")["draft_depth"].agg(set)
    for name, expected in {"none": {0}, "ngram:4@8": {0, 4}}.items():
        assert all(depths[step] == expected for step in names.index[names == name])
    tables = trace.table("tokens").set_index(["rl_step", "prompt_id", "sample"])["token_ids"].map(list)
    first = {name: tables[int(names.index[names == name][0])] for name in NAMES}
    # 16 requests on two workers: while all run, both decode plainly, from the same random state.
    begins = [tokens.map(lambda ids: ids[:1]).to_json() for name, tokens in first.items() if name != "beg-mab"]
    assert begins[0] == begins[1]


@pytest.mark.engine
def test_session_is_run_that_other_commands_read(session):
    out, found = session
    assert read_json(out / "summary.json") == found
    repeats = read_json(out / "repeats.json")["repeats"]
    assert len(repeats) == 4
    assert repeats[0]["same_tokens"]
    again = read_json(out / "policies.json")["policies"]
    assert [entry["rl_step"] for entry in again] == list(range(8))
    assert tltlab.read(out).outcomes["reward"].isna().all()
    assert run_to_verify(out).num_rl_steps == 8


@pytest.mark.engine
def test_the_command_states_how_each_policy_was_predicted(session):
    found = session[1]
    assert {row["policy"] for row in found["policies"]} == set(NAMES)
    for row in found["policies"]:
        assert row["low"] <= row["measured_s"] <= row["high"]
        assert row["error"] == pytest.approx(row["predicted_s"] / row["measured_s"] - 1)
        # Of milliseconds on a shared machine: how large it is belongs to an experiment.
        assert -1 < row["error"] < math.inf
    assert {"median_error", "worst_error", "repeat_spread", "num_pairs", "kendall_tau"} <= set(found)
    assert found["met"] == (found["median_error"] <= found["goal"])
    assert {"tltlab", "torch", "ray"} <= set(found["versions"])


def rollouts_of(seconds, **known):
    """Rollouts of policies, round by round, simulated 10 % too long on a machine that was 10 % faster."""
    rows = []
    for name, times in seconds.items():
        drafters = ["learned", "ngram"] if name == "fast" else []
        of_name = {"policy": name, "drafters": drafters, "acceptance": dict.fromkeys(drafters, FITTED)}
        for number, played_s in enumerate(times):
            of_rollout = of_name | {"rl_step": len(rows), "seed": number}
            rows.append(of_rollout | {"backend": "played", "makespan_s": played_s})
            rows += [
                of_rollout | {"backend": "simulated", "makespan_s": played_s * s, "speed": 0.9} for s in (1.0, 1.2)
            ]
    return Agreement.of(pd.DataFrame(rows), **known)


def test_what_rollouts_come_to_is_arithmetic():
    seconds = {"slow": [2.0, 2.2, 2.1], "fast": [1.0, 1.1, 1.05], "middle": [1.5, 1.6, 1.7]}
    found = rollouts_of(seconds, repeat_spread=0.08, repeat_bias=0.0)
    assert found.rows["policy"].tolist() == ["fast", "middle", "slow"]
    rows = found.json()["policies"]
    assert rows[0]["acceptance"] == dict.fromkeys(rows[0]["drafters"], FITTED) != {}
    assert FITTED in found.text()
    assert found.median_error == pytest.approx(0.1)
    assert found.rows["error_at_speed"].tolist() == pytest.approx([-0.01] * 3)
    assert (found.num_pairs, found.kendall_tau, found.goal) == (3, 1.0, 0.08)
    assert "goal of 8.0% is missed" in found.text()


def test_one_round_has_no_intervals_and_reports_it():
    found = rollouts_of({"a": [1.0], "b": [2.0]})
    assert (found.kendall_tau, found.json()["policies"][0]["low"]) == (None, None)
    assert (found.num_pairs, "--repeats" in found.text()) == (0, True)


def test_policies_have_short_names(tmp_path):
    listed_policies("none,table")["table"].write(tmp_path / "mine.json")
    found = listed_policies(f"none, ngram:4, ngram:4@8, {tmp_path / 'mine.json'}")
    assert list(found) == ["none", "ngram:4", "ngram:4@8", "mine"]
    assert found["ngram:4@8"].activation.max_requests == 8
    assert len(listed_policies("default")) >= 8
    (tmp_path / "other").mkdir()
    listed_policies("none,goodput")["goodput"].write(tmp_path / "other" / "mine.json")
    mine, other = str(tmp_path / "mine.json"), str(tmp_path / "other" / "mine.json")
    assert list(listed_policies(f"default,{mine},{other}"))[-2:] == ["mine", other]
    assert len(explore_all(found).strategies) == len({s for p in found.values() for s in p.strategies})


LISTS = {
    "none": "",
    "none,table,none": "none",
    "none,explore": "always",
    "none,tabel": "tabel",
    "none,ngram:0": "ngram:0",
    "none,ngram:4@0": "ngram:4@0",
    "default,none": "none",
}
"""Lists of policies that make no sense, and what a refusal names."""


@pytest.mark.parametrize("policies", LISTS)
def test_a_list_of_policies_without_sense_is_refused(policies):
    with refused(ConfigError, naming=(LISTS[policies],)):
        listed_policies(policies)


def test_drafters_that_cannot_be_are_refused(run):
    told = run_to_verify(run)
    assert told.num_rl_steps == 2
    for policies, fact in (
        ({"tree": load_policy("ngram:3x2/6")}, "tree"),
        (listed_policies("das,suffix:4"), "suffix"),
        (listed_policies("none,ngram:99999999999999999999"), "99999999999999999999"),
    ):
        with refused(ConfigError, naming=(fact,)):
            all_drafters(told, policies)


def test_what_cannot_run_is_refused_before_engine_starts(run, tmp_path):
    for folder, options, fact in (
        (run, {"policies": "none,table", "out": run}, run),
        (tmp_path, {"policies": "none,table"}, "run.json"),
        (run, {"repeats": 2}, "--policies"),
        (run, {"policies": "none,table", "window": 4}, "--window"),
    ):
        with refused(ConfigError, naming=(fact,)):
            command(folder, **options)
