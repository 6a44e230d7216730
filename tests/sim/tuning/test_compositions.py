"""A search over compositions of systems' parts: it chooses on half of the RL steps and judges on the others."""

import json

import pytest

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.lengths.generate import log_normal
from tltlab.sim.study.systems import compare_systems
from tltlab.sim.config import SimulationConfig
from tltlab.sim.tuning.compositions import compositions, search_systems

from ..workloads import COSTS, TINY, typed


def test_a_search_judges_on_other_rl_steps():
    trace = log_normal(prompts=4, group_size=4, rl_steps=3, median=100, cap=400, workers=2)
    settings = {"costs": COSTS, "acceptance": "all=geometric:0.7", "ranges": False, "decision_block": 16}
    config = SimulationConfig(costs=COSTS, acceptance="all=geometric:0.7", decision_block=16)
    found = search_systems(trace, config, finalists=2)
    tried = list(compositions())
    assert found.attrs["searched"] == len(tried) == len({system.name for system in tried})
    assert found.attrs["chosen_on"] == [0, 2]
    first = compare_systems(trace, tried, rl_steps=[0, 2], **settings)
    names = [name for name in first["system"] if name != "verl"][:2]
    assert sorted(found["system"]) == sorted(["verl", *names])
    judged = compare_systems(trace, [s for s in tried if s.name in ("verl", *names)], rl_steps=[1], **settings)
    assert found["makespan_s"].tolist() == judged["makespan_s"].tolist()
    assert all(system.lossless and system.on_policy for system in tried)
    with refused(ConfigError):
        search_systems(log_normal(prompts=2, group_size=2, rl_steps=1, workers=2))


def test_the_command_searches(capsys: pytest.CaptureFixture[str]):
    options = "--search --rl-steps 0:2 --no-ranges --decision-block 32 --json"
    code, shown, _ = typed(capsys, "compare", TINY, *options.split())
    told = json.loads(shown)
    assert code == 0
    assert (told["chosen_on"], told["num_rl_steps"], len(told["systems"])) == ([0], 1, 6)
