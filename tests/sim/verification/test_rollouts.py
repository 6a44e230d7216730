"""Predicted against measured: on simulated recordings, where the truth is known, and on a recorded one."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import joblib
import numpy as np
import pytest
from joblib import Parallel

from bench.simulator import COSTS
from tests.refused import refused
from tltlab.drafters.specs import SYSTEM_DRAFTERS
from tltlab.errors import ConfigError
from tltlab.lengths.generate import ToolUse, generate, log_normal
from tltlab.lengths.model import REGIMES
from tltlab.policies.policy import LengthAwareBudgetSpec, Policy, load_policy
from tltlab.policies.specs import FixedSpec
from tltlab.sim import simulate
from tltlab.sim.study import jobs as side
from tltlab.sim.verification.decisions import replay_decisions
from tltlab.sim.verification.played import Session, judge
from tltlab.sim.verification.rollouts import _measured, drawn_lengths, verify
from tltlab.sim.verification.run_files import policies_in_force
from tltlab.sim.workload import requests_by_step
from tltlab.traces.metrics import rollout_s
from tltlab.traces.trace import read

from ..workloads import typed, with_terms
from .recorded import record

CHAIN = load_policy("ngram:3")
SAMPLED = {"costs": COSTS, "acceptance": "geometric:0.6", "mode": "sampled", "record_iterations": True}
GCD = Path(__file__).parents[3] / "traces" / "gcd-small"
SUBSET_SUM = GCD.with_name("subset-sum-small")


def lengths(rl_steps):
    """RL steps of 32 short responses."""
    return log_normal(prompts=8, group_size=4, rl_steps=rl_steps, median=100, sigma=0.7, cap=400, workers=2)


def with_tools(model):
    """RL steps of 24 responses that call tools."""
    tools = ToolUse(turns=3.0, tool_s=0.002, observation_tokens=20)
    return generate(model, num_rl_steps=3, prompts_per_step=6, group_size=4, num_workers=2, tools=tools)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A RUN whose recording is a simulation, plain and speculative RL steps in turn: costs and acceptance are known."""
    source = log_normal(prompts=10, group_size=4, rl_steps=6, median=200, sigma=0.7, cap=1000, workers=2)
    policies = {step: CHAIN if step % 2 else "none" for step in source.rl_steps}
    made = [simulate(source.select([step]), policy, seed=step, **SAMPLED).trace for step, policy in policies.items()]
    return record(tmp_path_factory.mktemp("run"), made, policies)


def test_a_noise_free_run_is_predicted_closely(run):
    found = verify(run, samples=4)
    assert found.rows["policy"].tolist() == ["none", "ours"] * 3
    plain = found.rows[found.rows["policy"] == "none"]
    assert plain["error"].abs().max() < 0.01
    assert found.median_error < 0.03
    assert found.worst_error < 0.12
    assert found.rows["step_time_ratio"].tolist() == pytest.approx([1.0] * 6, abs=0.02)
    assert (found.repeat_spread, found.goal) == (None, 0.05)
    # A forecast needs history.
    rows = found.rows.set_index("rl_step")
    assert np.isnan(rows.loc[0, "forecast_s"])
    assert rows.loc[4, "forecast_low_s"] <= rows.loc[4, "forecast_s"] <= rows.loc[4, "forecast_high_s"]


def test_a_step_is_never_fitted_on_itself(run):
    found = verify(run, rl_steps=[1, 3], window=3)
    assert found.rows["fitted_on"].tolist() == [[0, 2, 3], [1, 2, 4]]


def test_engine_of_few_seats_is_predicted_as_one(tmp_path):
    source = lengths(3)
    few = with_terms(COSTS, max_num_seqs=5)
    made = simulate(source, "none", costs=few, record_iterations=True).trace
    found = verify(record(tmp_path, made, "none"), samples=1)
    assert made.iterations["batch"].max() == 5
    assert found.rows["error"].abs().max() < 0.01


def test_what_budget_allotted_is_not_shared_out_again(tmp_path):
    source = lengths(4)
    budget = LengthAwareBudgetSpec(base_s=4e-3, token_s=2e-4)
    policy = Policy(selector=FixedSpec(strategy="ngram:6"), budget=budget)
    made = simulate(source, policy, **SAMPLED | {"acceptance": "geometric:0.7"}).trace
    assert verify(record(tmp_path, made, policy), samples=2).median_error < 0.09


def test_remembering_drafters_are_fitted_on_equally_new_prompts(tmp_path):
    source = lengths(6)
    epoch = (source.workload["rl_step"] >= 3).astype(np.int32)
    source = source.replace(workload=source.workload.assign(epoch=epoch))
    worst = {}
    for name in ("das", "seer"):
        policy = Policy(selector=FixedSpec(strategy="suffix:4"), drafters={"suffix": SYSTEM_DRAFTERS[name]})
        made = [
            simulate(source.select(steps), policy, **SAMPLED | {"acceptance": f"geometric:{kept}"}).trace
            for steps, kept in (([0, 1, 2], 0.1), ([3, 4, 5], 0.8))
        ]
        worst[name] = verify(record(tmp_path / name, made, policy), rl_steps=[0, 5], samples=2).worst_error
    # A tree of the group alone starts anew in every RL step: whatever made them differ, it was not their prompts.
    assert worst["das"] < 0.1 < worst["seer"]


def test_turns_return_and_prefixes_match_prefill(tmp_path):
    source = with_tools(REGIMES["base-rl"].with_changes(median=60.0, sigma=0.4, max_response_tokens=200))
    found = {}
    for prefix in ("kept", "recomputed"):
        made = simulate(source, "none", costs=COSTS, prefix=prefix, record_iterations=True).trace
        # Of a tool that answered at once, and requests that the engine took long to take.
        outcomes = made.outcomes.assign(tool_s=made.outcomes["tool_s"].where(made.outcomes["turn"] == 0, 1e-6))
        found[prefix] = verify(record(tmp_path / prefix, made, "none", outcomes=outcomes), samples=1)
        assert found[prefix].rows["error"].abs().max() < 0.03, prefix
    assert found["kept"].rows["measured_s"].sum() < found["recomputed"].rows["measured_s"].sum()


@pytest.mark.parametrize("slower", [(1.6, 1.6), (0.4, 1.0), (1.0, 0.4)], ids=["all", "one", "the-other"])
def test_step_is_predicted_at_its_machine_s_speed(run, tmp_path, slower):
    trace = read(run / "trace")
    iterations, steps = trace.iterations, trace.steps

    def longest_s():
        return iterations[iterations["rl_step"] == 2].groupby("worker")["duration"].sum().max()

    factor, before_s = (
        iterations["worker"].map(dict(enumerate(slower))).where(iterations["rl_step"] == 2, 1.0),
        longest_s(),
    )
    for name in ("duration", "draft_duration", "t_start"):
        iterations[name] = iterations[name] * factor
    ratio = longest_s() / before_s
    steps["rollout_s"] = steps["rollout_s"] * steps["rl_step"].map({2: ratio}).fillna(1.0)
    policies = {step: CHAIN if step % 2 else "none" for step in trace.rl_steps}
    found = verify(record(tmp_path, trace, policies, iterations=iterations, steps=steps), rl_steps=[2])
    assert found.rows["step_time_ratio"].tolist() == pytest.approx([ratio], rel=0.05)
    assert found.median_error_at_step_time < 0.05
    if ratio > 1.5:
        assert found.median_error > 0.3
        assert found.rows["error"].abs().max() > 10 * float(found.worst_step.split("%")[0]) / 100


def test_rollout_run_twice_shows_noise_from_bias(run, tmp_path):
    twice = [(0, 0.9, True), (2, 0.93, True), (4, 0.81, True), (5, 9.0, False)]
    rows = [{"rl_step": s, "rollout_s": 1.0, "repeat_s": repeat_s, "same_tokens": same} for s, repeat_s, same in twice]
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "repeats.json").write_text(json.dumps({"repeats": rows}))
    found = verify(tmp_path / "run", rl_steps=[0])
    assert found.repeat_bias == pytest.approx(-0.1)
    assert found.repeat_spread == pytest.approx(0.03 / 0.9)
    assert f"{found.repeat_spread:.1%}" in found.text()


def test_drawn_lengths_come_from_history_and_respect_cap():
    trace = read(GCD)
    (step,), history = requests_by_step(trace, [5]), trace.select([0, 1])
    low = replace(step, caps=np.full(len(step), 100))
    drawn, cut = (next(drawn_lengths(s, history, np.random.default_rng(0), "kept")).lengths for s in (step, low))
    assert set(drawn) <= set(history.outcomes["response_tokens"])
    assert len(drawn) == len(step)
    assert cut.tolist() == np.minimum(drawn, 100).tolist() != drawn.tolist()
    turns = with_tools(REGIMES["base-rl"])
    (step,) = requests_by_step(turns, [1])
    again = next(drawn_lengths(step, turns.select([0]), np.random.default_rng(0), "kept"))
    before, after = np.array([(at, then) for at, then in enumerate(again.turns.after) if then >= 0]).T
    cached = np.minimum((again.prompts + again.lengths)[before], again.prompts[after])
    assert np.array(again.turns.cached_tokens)[after].tolist() == cached.tolist()


@pytest.mark.parametrize(
    "figures",
    [
        lambda run, jobs: verify(run, samples=1, jobs=jobs).json(),
        lambda run, jobs: judge(run, samples=1, jobs=jobs).json()["rounds"],
        lambda run, jobs: replay_decisions(SUBSET_SUM, jobs=jobs).json(),
    ],
    ids=["rl-steps", "policies", "decisions"],
)
def test_processes_change_no_figure(tmp_path, monkeypatch, figures):
    source = log_normal(prompts=4, group_size=4, rl_steps=6, median=60, sigma=0.7, cap=200, workers=2)
    policies = dict(enumerate(["none", "ngram:2", "ngram:4"] * 2))
    made = [simulate(source.select([step]), policy, seed=step, **SAMPLED).trace for step, policy in policies.items()]
    run = record(tmp_path, made, policies)
    began = []
    monkeypatch.setattr(joblib, "Parallel", lambda **given: began.append(given["n_jobs"]) or Parallel(**given))
    monkeypatch.setattr(side, "ALONE_S", 0.0)
    alone = figures(run, 1)
    assert began == []
    assert figures(run, 2) == alone
    assert began == [2]


def test_a_session_is_rows_and_cells_of_one_study(run):
    trace = read(run)
    session = Session(trace=trace, forces=policies_in_force(trace), samples=2, seed=7)
    played = session.played()
    assert played["seed"].tolist() == [0, 0, 1, 1, 2, 2]
    assert played["makespan_s"].tolist() == list(rollout_s(trace).values())
    cells = [(cell.scenario.steps[0].rl_step, cell.scenario.seed) for cell in session.predictions("none")]
    assert cells == [(0, 7), (0, 8), (2, 7), (2, 8), (4, 7), (4, 8)]


@pytest.mark.parametrize("num", [1, 2])
def test_few_rl_steps_are_predicted_from_parts_of_themselves(num, tmp_path):
    made = simulate(lengths(num), CHAIN, **SAMPLED).trace
    found = verify(record(tmp_path / "few", made, CHAIN), samples=1)
    assert found.rows["rl_step"].tolist() == list(range(num))
    assert found.rows["measured_s"].tolist() == list(rollout_s(made).values())
    assert found.median_error < 0.1
    assert (found.rows["forecast_s"] / found.rows["measured_s"] - 1).abs().max() < 0.7
    assert "half of its prompts" in found.json()["note"]
    assert found.json()["note"] in found.text()
    made = simulate(log_normal(prompts=1, group_size=2, rl_steps=1, workers=1), CHAIN, **SAMPLED).trace
    with refused(ConfigError, naming=("1 prompts",)):
        verify(record(tmp_path / "fewer", made, CHAIN))


def test_runs_that_cannot_be_verified_are_refused(run, tmp_path):
    with refused(ConfigError, naming=("iterations",)):
        verify(log_normal(rl_steps=3, workers=2).write(tmp_path / "lengths"))
    with refused(ConfigError, naming=("9",)):
        verify(run, rl_steps=[9])
    read(run / "trace").write(tmp_path / "bare")
    with refused(ConfigError, naming=("ours", "1")):
        policies_in_force(read(tmp_path / "bare"))


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("policies.json", "{", ("JSON",)),
        ("policies.json", "[]", ("policies",)),
        ("policies.json", '{"seed": -3, "policies": []}', ("seed",)),
        ("policies.json", '{"seed": 0, "policies": []}', ()),
        ("repeats.json", '{"repeats": [{"rl_step": 0}]}', ("0", "rollout_s")),
    ],
)
def test_a_garbled_file_of_the_run_is_named(run, tmp_path, file, text, complaint):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / file).write_text(text)
    with refused(ConfigError, naming=complaint):
        verify(tmp_path / "run", rl_steps=[2], samples=1)


def test_costs_are_looked_for_beside_the_run(run, tmp_path, monkeypatch):
    read(run / "trace").write(tmp_path / "runs" / "first" / "trace")
    selector = {"kind": "goodput", "strategies": ["ngram:4"], "costs": "costs.json"}
    policy = {"format": "tltlab-policy", "version": 1, "selector": selector}
    told = {"seed": 0, "policies": [{"rl_step": 0, "name": "goodput", "policy": policy}]}
    (tmp_path / "runs" / "first" / "policies.json").write_text(json.dumps(told))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with refused(ConfigError, naming=("costs.json",)):
        policies_in_force(read(tmp_path / "runs" / "first"))
    COSTS.write(tmp_path / "costs.json")
    assert policies_in_force(read(tmp_path / "runs" / "first"))[2].policy.strategies[-1].draft_depth == 4


def test_a_step_without_a_rollout_time_is_named(run, tmp_path):
    trace = read(run / "trace")
    steps = trace.steps.assign(rollout_s=lambda rows: rows["rollout_s"].where(rows["rl_step"] != 3))
    (tmp_path / "policies.json").write_text((run / "policies.json").read_text())
    # Then it took from the first request to the last response's end, where these are known.
    trace.replace(steps=steps).write(tmp_path / "trace")
    assert list(_measured(read(tmp_path))) == trace.rl_steps
    ends = trace.outcomes["t_finish"].where(trace.outcomes["rl_step"] != 3)
    trace.replace(steps=steps, outcomes=trace.outcomes.assign(t_finish=ends)).write(tmp_path / "trace")
    with refused(ConfigError, naming=("3", "rollout_s")):
        verify(tmp_path)


def test_a_run_without_policy_and_speculation_ran_none(run):
    trace = read(run / "trace")
    unnamed = trace.replace(steps=trace.steps.assign(policy=None))
    with refused(ConfigError):
        policies_in_force(unnamed)
    plain = trace.iterations.assign(draft_depth=0, top_k=0, tokens_to_verify=1, drafter=None, num_drafted=0)
    assert {force.name for force in policies_in_force(unnamed.replace(iterations=plain)).values()} == {"none"}


def test_named_policy_is_set_when_its_name_appears(run, tmp_path):
    trace = read(run / "trace")
    names = ["ngram:4", "ngram:4", "explore", "explore", "none", "none"]
    trace.replace(steps=trace.steps.assign(policy=names)).write(tmp_path / "named")
    found = policies_in_force(read(tmp_path / "named"))
    assert [found[step].since for step in range(6)] == [0, 0, 2, 2, 4, 4]
    assert found[0].policy.name == "ngram:4"


OWN = """
from pathlib import Path
from tltlab.policies.selector import Selector
from tltlab.strategy import Strategy

Path(__file__).with_name("imported").touch()

class Mine(Selector):
    strategies = (Strategy.chain("ngram", 3),)
    memoryless = True

    def choose(self, state):
        return self.strategies[0]
"""


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """Makes a small RUN whose policies.json names a class; the current folder has the module `own_policy`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_policy", raising=False)
    (tmp_path / "own_policy.py").write_text(OWN)

    def make(path):
        source = log_normal(prompts=3, group_size=2, rl_steps=4, median=40, cap=100, workers=1)
        path_of_run = record(tmp_path / "run", simulate(source, CHAIN, **SAMPLED).trace, CHAIN)
        told = json.loads((path_of_run / "policies.json").read_text())
        told["policies"][0]["policy"]["selector"] = {"kind": "custom", "path": path, "args": {}}
        (path_of_run / "policies.json").write_text(json.dumps(told))
        return path_of_run

    return make


def test_run_s_class_is_imported_only_when_allowed(foreign, capsys, tmp_path):
    path, before = foreign("own_policy:Mine"), list(sys.path)
    code, out, err = typed(capsys, "verify", path, "--json")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert {"own_policy:Mine,", "own_policy"} <= set(err.split())
    assert typed(capsys, "verify", path, "--allow-code", "own_polic")[0] == 2

    code, out, _ = typed(capsys, "report", path, "--json")
    assert "--allow-code own_policy" in json.loads(out)["left_out"]["Predicted against measured"]
    assert code == typed(capsys, "doctor", path)[0] == typed(capsys, "simulate", path, "--costs", "cpu-small")[0] == 0
    assert not (tmp_path / "imported").exists()

    code, out, _ = typed(capsys, "verify", path, "--allow-code", "own_policy", "--rl-steps", "3", "--json")
    assert (code, json.loads(out)["steps"][0]["rl_step"]) == (0, 3)
    assert (tmp_path / "imported").exists()
    assert sys.path == before


def test_module_of_python_is_never_imported_for_policy(foreign, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "this", raising=False)
    path = foreign("this:Zen")
    code, out, err = typed(capsys, "verify", path, "--allow-code", "this")
    assert (code, out) == (2, "")
    assert "this:Zen" in err
    assert typed(capsys, "simulate", path, "--policy", "this:Zen")[0] == 2
    assert "this" not in sys.modules
