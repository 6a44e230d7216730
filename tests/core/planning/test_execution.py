"""Which systems of the literature engines here can execute, and with which settings: read off their values alone."""

from dataclasses import replace

import pytest

from tests.refused import refused
from tltlab.coordination.progress import SpotTraining
from tltlab.costs.load import load_costs
from tltlab.drafters.specs import LearnedSpec
from tltlab.errors import ConfigError
from tltlab.planning.composition import Admission, LadderStep, Regrouped, SharedBuffer, System, Truncated
from tltlab.planning.execution import engine_run, missing_part, network_drafter
from tltlab.planning.systems import SYSTEMS

COSTS = load_costs("cpu-small")
RUN = {
    "verl": {},
    "open-r1": {"own_gpus": True},
    "tlt": {"drafts_by_network": True, "trains_drafter": True},
    "tlt-base": {},
    "das": {},
    "vllm-dynamic": {"drafts_by_network": True},
    "vllm-static": {"drafts_by_network": True},
    "vllm-adaptive": {"drafts_by_network": True},
    "sglang-adaptive": {"drafts_by_network": True},
    "sglang-tiers": {"drafts_by_network": True},
    "hedgespec": {"drafts_by_network": True},
    "seer-drafts": {},
    "histospec": {},
    "april": {"admission": SYSTEMS["april"].admission},
    "copris": {"admission": Admission(concurrency=1.5)},
    "rollpacker": {"admission": SYSTEMS["rollpacker"].admission},
    "spec-rl": {"workload": SYSTEMS["spec-rl"].workload},
    "dler": {"workload": Truncated(share=0.125)},
    "brorl": {"workload": Regrouped(factor=4)},
    "pat": {"planner": "gather"},
    "seer": {"planner": "buffer"},
    "rhymerl": {"one_step_off": True, "placement": "rank_groups"},
    "streamrl": {"own_gpus": True, "placement": "two_pools"},
    "streamrl-async": {"one_step_off": True, "placement": "two_pools"},
    "one-step-off": {"one_step_off": True},
    "areal": {"staleness": 4},
}
"""By system the settings that are not off."""
LACK = {
    "dvi": ("first layers", "while its engine decodes"),
    "diffuspec": ("block in one pass",),
    "rlhfuse": ("log-probs",),
    "spec-rl-exact": ("old distribution",),
}
"""By system what is said of the parts that no engine has."""


def test_every_row_runs_or_names_missing_parts():
    assert RUN.keys() | LACK.keys() == SYSTEMS.keys()
    assert {name for name, system in SYSTEMS.items() if missing_part(system) is None} == RUN.keys()


@pytest.mark.parametrize("name", LACK)
def test_a_missing_part_is_named(name):
    with refused(ConfigError, naming=(name, *LACK[name])):
        engine_run(SYSTEMS[name], COSTS)


@pytest.mark.parametrize("name", RUN)
def test_a_row_is_executed_by_its_values(name):
    run, system = engine_run(SYSTEMS[name], COSTS, head="eagle"), SYSTEMS[name]
    off = engine_run(SYSTEMS["verl"], COSTS)
    assert replace(run, policy=off.policy, notes=()) == replace(off, **RUN[name])
    drafting = {s.drafter for s in run.policy.strategies if s.speculates}
    assert drafting == {"eagle" if drafter == "learned" else drafter for drafter in system.drafters}
    assert all(s.top_k <= 1 for s in run.policy.strategies), "vLLM verifies chains alone"
    assert (run.policy.budget is None) == (system.budget is None)
    assert dict(run.policy.drafters) == dict(system.specs)
    assert run.policy.provenance["system"] == name


@pytest.mark.parametrize(
    ("changes", "runs"),
    [
        ({"admission": Admission(issue=2.0, max_age=3)}, {"admission": Admission(issue=2.0, max_age=3)}),
        ({"admission": Admission()}, {}),
        ({"admission": SharedBuffer()}, {"planner": "buffer"}),
        ({"placement": "recorded"}, None),
        ({"idle_use": SpotTraining()}, {"trains_drafter": True}),
        ({"name": "seer"}, {}),
    ],
)
def test_an_own_system_is_judged_by_parts(changes, runs):
    own = System(
        name="own", title="Own", source="this test", drafters=("head",), ladder=(LadderStep(min_batch=1, chains=(3,)),),
        specs=(("head", LearnedSpec(method="eagle", model="folder")),),
    )  # fmt: skip
    assert network_drafter(own)
    changed = replace(own, **changes)
    assert (missing_part(changed) is None) == (runs is not None)
    if runs is not None:
        run, plain = engine_run(changed, None), engine_run(own, None)
        assert replace(run, policy=plain.policy, notes=()) == replace(plain, **runs)


def test_what_engines_leave_out_is_a_note():
    (of_lengths, of_trainer) = engine_run(SYSTEMS["streamrl"], None).notes
    assert "epoch before" in of_lengths
    assert "no trainer here begins during it" in of_trainer


def test_trees_become_chains_with_a_note():
    run = engine_run(SYSTEMS["tlt"], COSTS)
    assert [str(s) for s in run.policy.selector.buckets[0].strategies] == [
        "learned:8",
        "learned:4",
        "ngram:8",
        "ngram:4",
    ]
    assert any("vLLM" in note for note in run.notes)
