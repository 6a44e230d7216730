"""The JSON part of a checkpoint, and events of a run on a disk that fills up."""

import json
import math
import resource
from dataclasses import asdict

from tests.refused import refused
from tltlab.costs.load import load_costs
from tltlab.errors import ConfigError
from tltlab.policies.policy import Policy
from tltlab.policies.specs import CustomSpec, NoneSpec
from tltlab.runtime.run.rows import StepReport
from tltlab.runtime.run.state import RunEvents, RunState, read_state, write_state
from tltlab.strategy import Strategy

from ..small_models import small_recipe

RECIPE = small_recipe()


def test_a_damaged_state_is_refused(tmp_path):
    state = RunState(rl_step=1)
    state.in_force(Policy(selector=NoneSpec()))
    write_state(tmp_path, state, {"recipe_policy": state.policies[0]["policy"]}, [{}, {}], RECIPE)
    read_state(tmp_path, RECIPE)
    whole = (tmp_path / "state.json").read_text()
    fields = json.loads(whole)
    damaged = [(whole.replace('"kind": "none"', '"kind": "nine"'), "nine")]
    for lacks in ("model", "rl_step", "policies", "reports"):
        damaged.append((json.dumps({name: value for name, value in fields.items() if name != lacks}), lacks))
    for text, fact in damaged:
        (tmp_path / "state.json").write_text(text)
        with refused(ConfigError, naming=("state.json", fact)) as caught:
            read_state(tmp_path, RECIPE)
        assert "\n" not in str(caught.value)


def test_costs_named_by_older_runs_are_found(tmp_path):
    load_costs("cpu-small").write(tmp_path / "costs.json")
    selector = {"kind": "goodput", "strategies": [asdict(Strategy.chain("ngram", 4))], "costs": "costs.json"}
    policy = {"format": "tltlab-policy", "version": 1, "selector": selector}
    state = RunState(rl_step=1, policies=[{"rl_step": 0, "name": "goodput", "policy": policy}])
    folder = tmp_path / "runs" / "first" / "checkpoints" / "step-1"
    folder.mkdir(parents=True)
    write_state(folder, state, {"recipe_policy": policy}, [{}, {}], RECIPE)
    state, parts = read_state(folder, RECIPE)
    assert state.policies[-1]["policy"] == parts["recipe_policy"]
    assert load_costs(parts["recipe_policy"]["selector"]["costs"]) == load_costs("cpu-small")


def test_an_unknown_figure_comes_back_from_json(tmp_path):
    metrics = {"drift_kl": math.nan, "lr": 1.0}
    report = StepReport(rl_step=0, policy="none", reward_mean=math.nan, num_tokens=3, rollout_s=0.5, metrics=metrics)
    state = RunState(rl_step=1, policy_version=1, reports=[report])
    write_state(tmp_path, state, {"order": {"taken": 3}}, [{}, {}], RECIPE)
    json.loads((tmp_path / "state.json").read_text(), parse_constant=lambda name: 1 / 0)
    read, parts = read_state(tmp_path, RECIPE)
    (again,) = read.reports
    assert math.isnan(again.reward_mean)
    assert math.isnan(again.metrics["drift_kl"])
    assert again.metrics["lr"] == 1.0
    assert (read.rl_step, read.policies, parts["order"]) == (1, [], {"taken": 3})


def test_a_full_disk_costs_whole_lines(tmp_path):
    events, limits = RunEvents(tmp_path / "events.jsonl"), resource.getrlimit(resource.RLIMIT_FSIZE)
    events.note("before")
    for room in (10, 0):
        resource.setrlimit(resource.RLIMIT_FSIZE, (events.path.stat().st_size + room, limits[1]))
        try:
            events.note("lost")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    events.note("after", worker=1)
    found = [json.loads(line) for line in events.path.read_text().splitlines()]
    assert [row["event"] for row in found] == ["before", "after"]
    assert events.take() == ["before", "lost", "lost", "after"]


def test_a_states_class_is_not_imported_unasked(tmp_path):
    state = RunState(rl_step=1)
    state.in_force(Policy(selector=CustomSpec(path="theirs:Choice")))
    write_state(tmp_path, state, {}, [{}, {}], RECIPE)
    with refused(ConfigError, naming=("state.json", "theirs:Choice", "rollout.allow_code")):
        read_state(tmp_path, RECIPE)
    for trusted in ({"policy": "theirs:Choice"}, {"allow_code": ["theirs"]}):
        assert read_state(tmp_path, small_recipe(rollout=trusted))[0].policy_name == "theirs:Choice"
