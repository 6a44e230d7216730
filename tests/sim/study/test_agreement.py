"""One question has one answer, whichever of compare, what-if, tune and simulate it is put to."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.simulator import COSTS, example_bandit
from tests.refused import refused
from tltlab import ConfigError, Strategy, compare, load_policy, read, simulate, tune, what_if
from tltlab.acceptance.load import DEFAULTS
from tltlab.policies.policy import Activation, Policy
from tltlab.policies.specs import FixedSpec
from tltlab.sim.placement import EXPECTED
from tltlab.sim.scenario import Scenario
from tltlab.sim.tuning.cases import TuningCases, mean_s

from ..workloads import grouped

RNG = np.random.default_rng(0)
LENGTHS = np.minimum(RNG.lognormal(4, 1, (4, 24)).astype(int) + 1, 500)
FRAME = grouped(LENGTHS, 30)
GPUS = {"gpus": "2xH100", "model": "Qwen2.5-7B"}
MACHINES = [GPUS, {"gpus": "4xH200", "model": "Llama-3.3-70B"}, {"costs": COSTS, "workers": 3}]
QUICK = {"trials": 0, "repeats": 1}
SAME = {"rel": 1e-12, "abs": 0.0}


def acceptances():
    """Return acceptance by drafter: given for some drafters or all of them, or the default."""
    chances = st.sampled_from(["0.3", "0.7", "0.9", "constant:2.5", "0.8/0.5/0.3"])
    some = st.dictionaries(st.sampled_from(sorted(DEFAULTS)), chances, min_size=1)
    named = some.map(lambda models: ",".join(f"{name}={model}" for name, model in models.items()))
    return st.one_of(st.just("default"), named, st.sampled_from(["all=0.6", "learned=0.8@1k,ngram=0.4"]))


def policy_of(name, found):
    """Return the candidate of that name, from what `tune` states about it."""
    tables = {str(table["table"]): {"kind": "table", "rows": table["rows"]} for table in found.buckets}
    tables |= {f"tuned {found.tuned}": found.trials[0].policy} if found.trials else {}
    drafts, _, threshold = name.removeprefix("fixed ").partition(" up to ")
    if threshold:
        active = Activation(max_requests=int(threshold.partition(" ")[0]), hold_iterations=0)
        return Policy(selector=FixedSpec(strategy=Strategy.parse(drafts)), activation=active)
    if name == "adaptive":
        every = [Strategy.parse(other[6:]) for other in found.searched if other.startswith("fixed ")]
        deepest = max(chain.draft_depth for chain in every)
        return {"kind": name, "drafters": list(dict.fromkeys(s.drafter for s in every)), "max_depth": deepest}
    return tables.get(name, drafts.removeprefix("shipped "))


def rows_of(found):
    return {row["policy"]: row for row in found.to_dict("records")}


def check_tuned(found, asked, repeats=1):
    """Compare the candidates under the seeds that they are judged under: times, ratios and regret are the same."""
    policies = {row.name: policy_of(row.name, found) for row in found.candidates}
    rows = rows_of(
        compare(
            FRAME, policies, mode="sampled", seed=20_000, repeats=repeats, rl_steps=found.judged_on[0],
            decision_block=found.policy.provenance["decision_block"], baseline=found.best_fixed, **asked,
        )
    )  # fmt: skip
    for row in found.candidates:
        assert row.makespan_s == pytest.approx(rows[row.name]["makespan_s"], **SAME), row.name
        assert row.ratio == pytest.approx(rows[row.name]["ratio"], **SAME), row.name
        assert row.regret == pytest.approx(rows[row.name]["regret"], rel=1e-9), row.name
        assert (row.drafters, row.acceptance) == (rows[row.name]["drafters"], rows[row.name]["acceptance"])


@settings(max_examples=6)
@given(
    machine=st.sampled_from(MACHINES),
    acceptance=acceptances(),
    placement=st.sampled_from([None, "contiguous", "round_robin", "longest_first", EXPECTED]),
)
@example(machine=GPUS, acceptance=None, placement=None)
def test_every_question_has_one_answer(machine, acceptance, placement):
    asked = machine | {"acceptance": acceptance, "placement": placement}
    tuned = tune(FRAME, **asked, **QUICK)
    answered = what_if(FRAME, **asked, rl_steps=tuned.tuned_on[0], systems="verl")
    assert [answer.trained for answer in answered.answers] == [False, True]
    found = {answer.drafter: answer.policy for answer in answered.answers}
    rows = rows_of(compare(FRAME, {"none": "none", **found}, **asked, rl_steps=tuned.tuned_on[0]))
    elsewhere = placement if placement == EXPECTED else None
    placed = rows_of(compare(FRAME, found, **asked | {"placement": EXPECTED}, rl_steps=tuned.tuned_on[0]))
    for answer in answered.answers:
        row = rows[answer.drafter]
        assert row["speed_up"] == pytest.approx(answer.rollout.estimate, **SAME)
        assert answer.band.estimate == pytest.approx(answer.rollout.estimate, **SAME)
        assert (answer.rl_step is None) == ("costs" in machine)
        if answer.rl_step is not None:
            assert row["step_speed_up"] == pytest.approx(answer.rl_step.estimate, **SAME)
        gain = row["makespan_s"] / placed[answer.drafter]["makespan_s"]
        assert answer.placement_gain == pytest.approx(gain, **SAME)
        assert elsewhere is None or gain == 1.0
        assert answer.acceptance == row["acceptance"] or not row["drafters"]
        # Tune has searched the same drafters, depths and tables.
        table = [f"{each.min_batch}+:{each.strategy}" for each in answer.rows]
        (name,) = {"table " + " ".join(table)} if len(table) > 1 else {alone(answer.rows[0].strategy)}
        assert name in tuned.searched
        plain_s, own_s = rows["none"]["makespan_s"], row["makespan_s"]
        assert tuned.searched[name] / tuned.searched["none"] == pytest.approx(own_s / plain_s, **SAME)
    assert all(row["regret"] > -1e-9 for row in (*rows.values(), *placed.values()))
    check_tuned(tuned, asked)


def alone(strategy):
    return f"fixed {strategy}" if strategy.speculates else "none"


def test_bandits_of_tune_are_rows_of_compare():
    asked = {"costs": COSTS, "workers": 2, "acceptance": "all=0.7"}
    found = tune(FRAME, **asked, trials=2, repeats=2, drafters=["ngram"], placement="round_robin")
    assert {"tuned beg-mab", "adaptive"} <= {row.name for row in found.candidates}
    check_tuned(found, asked | {"placement": "round_robin"}, repeats=2)


def test_regret_does_not_depend_on_the_rows_beside():
    trace = read(FRAME)
    asked = {"costs": COSTS, "workers": 2, "acceptance": "learned=0.8,ngram=0.4", "decision_block": 4}
    policies = {"none": "none", "deep": "learned:12", "text": "ngram:3", "bandit": example_bandit()}
    together = rows_of(compare(trace, policies, **asked))
    cases = TuningCases(scenarios=(Scenario.of(trace, **asked),))
    seconds = cases.makespans({n: load_policy(p) for n, p in policies.items()}, mode="fluid", seeds=[0])
    for name, policy in policies.items():
        regret = together[name]["regret"]
        assert regret >= 0
        assert rows_of(compare(trace, {name: policy}, **asked))[name]["regret"] == regret
        assert simulate(trace, policy, **asked).summary["regret"] == pytest.approx(regret, rel=1e-12)
        bound_s = cases.bounds_s(load_policy(policy))[0].mean()
        assert mean_s(seconds[name]) / bound_s - 1 == pytest.approx(regret, rel=1e-12)
    # A chain that the acceptance does not name by itself counts for its own row alone.
    systems = compare(trace, systems="verl,vllm-dynamic", **asked).set_index("system")["regret"]
    assert systems["verl"] == together["none"]["regret"]


def test_refusals_name_policy_and_drafter():
    recent = {"selector": {"kind": "fixed", "strategy": "recent:4"}, "drafters": {"recent": {"kind": "suffix"}}}
    with refused(ConfigError, naming=("policy mine", "'recent'")):
        compare(FRAME, {"mine": recent}, costs=COSTS, workers=2, acceptance="learned=0.7")
