"""Tuning a policy in simulation: what wins, on what it is judged, and when it says that tuning is not worth it."""

import itertools
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bench.simulator import COSTS, table_of
from tests.core.conftest import shared_data  # noqa: F401
from tests.refused import refused
from tltlab.acceptance.base import GeometricAcceptance
from tltlab.acceptance.load import load_acceptance
from tltlab.costs.evidence import Evidence
from tltlab.costs.load import load_costs
from tltlab.costs.noise import IterationNoise
from tltlab.errors import ConfigError
from tltlab.lengths.generate import log_normal
from tltlab.own import code_allowed
from tltlab.policies.policy import load_policy
from tltlab.sim import Scenario, simulate
from tltlab.sim.tuning.cases import ExpectedIteration, TuningCases, oracle_policy, ratio
from tltlab.sim.tuning.search import Prices
from tltlab.sim.tuning.tune import _halves, tune
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.traces.trace import read

from ..workloads import TINY, typed

TRACE = log_normal(prompts=4, group_size=4, rl_steps=4, median=60, cap=250, workers=2)
SHORT = log_normal(prompts=2, group_size=4, rl_steps=2, median=40, cap=120, workers=1)
NOISE = IterationNoise(ratios=(0.7, 0.9, 1.0, 1.4))
CPU = load_costs("traces/subset-sum-small/costs.json").model_copy(update={"noise": NOISE})
SMALL = {"costs": CPU, "acceptance": "geometric:0.7", "trials": 2, "repeats": 2, "depths": (1, 4),
                         "drafters": ("ngram",)}  # fmt: skip
WITHOUT_LUCK = SMALL | {"trials": 0, "repeats": 1}
TRACES = Path("traces").resolve()
CROWDED = COSTS.model_copy(update={"per_token_s": 2e-3, "noise": NOISE})


LEARNED = Strategy.chain("learned", 4)
LONG_CONTEXT = log_normal(prompts=1, group_size=1, rl_steps=1, median=9000, cap=9000, workers=1)
"""Of one response of 9,000 tokens at most."""
MANY_STEPS = log_normal(prompts=8, group_size=4, rl_steps=12, median=80, cap=600, workers=1)


@pytest.fixture(scope="module")
def tuned():
    return tune(TRACE, **SMALL)


def test_it_judges_on_held_out_steps(tuned):
    assert tuned.tuned_on == ((0, 2),)
    assert tuned.judged_on == ((1, 3),)
    kinds = {row.name: row.kind for row in tuned.candidates}
    assert {"none", "tuned beg-mab"} <= set(kinds)
    assert kinds["adaptive"] == "shipped"
    assert [row.makespan_s for row in tuned.candidates] == sorted(row.makespan_s for row in tuned.candidates)


def test_table_is_as_good_as_best_of_all():
    """Against every table of two rows over the same strategies, simulated, on one worker."""
    one = log_normal(prompts=4, group_size=4, rl_steps=2, median=80, cap=400, workers=1)
    options = {"costs": CROWDED, "acceptance": "geometric:0.8"}
    scenario = Scenario.of(one, rl_steps=[0], **options)
    strategies = (NO_SPECULATION, Strategy.chain("ngram", 1), Strategy.chain("ngram", 4))
    every = [table_of((1, a), (border, b)) for a, b in itertools.permutations(strategies, 2) for border in range(2, 17)]
    best = min(np.mean([r.makespan_s for r in scenario.rollouts(policy)]) for policy in every)
    searched = tune(one, **SMALL | options | {"trials": 0}).searched
    ours = min(score for name, score in searched.items() if name.startswith("table") and name.count("+:") == 2)
    # Exact for expected seconds; in a rollout requests finish within whole iterations.
    assert ours == pytest.approx(best, rel=1e-2)


def test_no_policy_beats_the_oracle_beyond_noise(tuned):
    assert all(row.regret > -0.01 for row in tuned.candidates)
    plain = next(row for row in tuned.candidates if row.name == "none")
    assert tuned.bound_s <= tuned.fixed_bound_s < tuned.oracle_s < plain.makespan_s


def test_the_oracle_picks_the_least_seconds_per_token():
    scenario = Scenario.of(read("traces/subset-sum-small"), rl_steps=[0], decision_block=2)
    strategies = [Strategy.chain("ngram", depth) for depth in (1, 2, 4, 8)]
    oracle, known = oracle_policy(scenario, strategies), ExpectedIteration(scenario, strategies)
    for rollout in scenario.rollouts(oracle):
        for c in (log.columns for log in rollout.logs):
            # A first iteration verifies no draft.
            for regime, batch, context in list(zip(c.regime, c.batch, c.context_tokens.tolist(), strict=True))[1:]:
                prices = [known.seconds_per_token(s, batch, context) for s in known.strategies]
                assert known.seconds_per_token(regime.strategy, batch, context) == pytest.approx(min(prices))


def test_tokens_are_priced_at_context_of_batch():
    known = ExpectedIteration(Scenario.of(LONG_CONTEXT, costs=COSTS, acceptance="learned=0.8@1k"), [LEARNED])
    for context, chance in ((0, 0.8), (1024, 0.8), (5 * 1024, 0.4), (20_000, 0.0)):
        tokens = GeometricAcceptance(alpha=chance).tokens_per_iteration(LEARNED)
        assert known.tokens(LEARNED, 3, 3.0 * context) == pytest.approx(tokens)
        assert known.tokens(NO_SPECULATION, 3, 3.0 * context) == 1.0


def test_oracle_stops_drafting_where_contexts_are_too_long():
    scenario = Scenario.of(LONG_CONTEXT, costs=COSTS, acceptance="learned=0.8@512", decision_block=8)
    (rollout,) = scenario.rollouts(oracle_policy(scenario, [LEARNED]))
    (log,) = rollout.logs
    drafts = [regime.strategy.speculates for regime in log.columns.regime[1:]]
    contexts = log.columns.context_tokens[1:]
    assert all(contexts[i] < contexts[j] for i, drafted in enumerate(drafts) if drafted
               for j, other in enumerate(drafts) if not other)  # fmt: skip
    always, never = (scenario.rollouts(load_policy(policy))[0].makespan_s for policy in (LEARNED, "none"))
    assert rollout.makespan_s < min(always, never)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("none", {"acceptance": "geometric:0.02", "repeats": 1}), ("fixed", {"acceptance": "constant:2", "costs": COSTS})],
    ids=["speculation never pays", "one depth is right at every batch"],
)
def test_where_nothing_is_gained_the_simplest_policy_wins(kind, options):
    found = tune(TRACE, **SMALL | options)
    assert not found.worth_it
    assert found.policy.selector.kind == kind


def test_where_the_batch_decides_tuning_is_worth_it():
    known = Evidence(engine="mine", left_out={"a": (0.01, 0.02), "a, speculating": (0.005, 0.01)})
    sure = CROWDED.model_copy(update={"evidence": known})
    found = tune(MANY_STEPS, **WITHOUT_LUCK | {"acceptance": "geometric:0.8", "costs": sure})
    assert found.worth_it
    assert found.bands[found.best_fixed].low > 1.0
    assert found.policy.provenance["interval"][1] < 1.0
    assert found.policy.selector.kind == "table" or found.policy.activation is not None


def test_a_gain_within_cost_error_is_not_recommended():
    """The same RL steps agree on the gain; costs without evidence do not."""
    found = tune(MANY_STEPS, **WITHOUT_LUCK | {"acceptance": "geometric:0.8", "costs": CROWDED})
    row = next(row for row in found.candidates if row.name == found.champion)
    assert row.ratio_high < 1.0, "of draws alone it is clear"
    band = found.json()["band"][found.best_fixed]
    assert band["low"] < 1.0 < band["mean"] < band["high"]
    shares = {name: part["share"] for name, part in band["parts"].items()}
    assert max(shares, key=lambda name: shares[name]) == "costs"
    assert sum(shares.values()) == pytest.approx(1.0)
    assert not found.worth_it


@pytest.mark.parametrize("published", [False, True])
def test_the_best_depth_of_a_block_is_interior(published, request):
    lengths, best = (1.8, 2.5, 2.9, 2.6), 3
    if published:
        table = pd.read_csv(request.getfixturevalue("shared_data") / "accept_length_by_depth_block_drafter.csv")
        lengths, best = tuple(table.sort_values("k")["accept_length"]), 6
    one = log_normal(prompts=2, group_size=1, rl_steps=2, median=60, cap=250, workers=2)
    settings = WITHOUT_LUCK | {"depths": range(1, len(lengths) + 1), "drafters": ("block",)}
    settings |= {"costs": "vllm:H100:Qwen2.5-7B", "acceptance": f"block=lengths:{'/'.join(map(str, lengths))}"}
    assert tune(one, **settings).policy.strategies == (Strategy.chain("block", best),)


def test_a_gain_over_slow_drafts_is_not_recommended():
    """The table is sure to beat the best fixed draft, which may be slower than plain decoding."""
    known = Evidence(engine="mine", left_out={"a": (0.01, 0.02), "a, speculating": (0.1, 0.27)})
    unsure = COSTS.model_copy(update={"noise": NOISE, "evidence": known, "per_token_s": 1e-4})
    found = tune(MANY_STEPS, **WITHOUT_LUCK | {"acceptance": "geometric:0.6", "costs": unsure})
    assert found.bands["none"].loses
    assert not found.bands[found.best_fixed].loses
    assert not found.worth_it
    assert found.name == found.champion, "better than the best fixed draft all the same"


def test_a_gain_by_chance_is_not_recommended():
    """Two ratios below 1 are what a bootstrap of two steps always lies between."""
    found = tune(read(TINY), trials=0, repeats=1, seed=1)
    assert found.judged_on == ((1, 3),)
    table = next(row for row in found.candidates if row.kind == "table")
    assert table.ratio < 1.0
    assert table.ratio_high > 1.0
    assert not found.worth_it
    assert found.policy.selector.kind == "fixed"


@pytest.mark.parametrize("num_steps", [2, 4, 8])
def test_intervals_hold_the_truth_as_often_as_stated(num_steps):
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(1000):
        level = np.exp(0.3 * rng.standard_normal(num_steps))
        own, other = ([level * np.exp(0.1 * rng.standard_normal(num_steps))] for _ in range(2))
        found = ratio(own, other, seed=0)
        held += found.low <= 1.0 <= found.high
    assert 0.925 <= held / 1000 <= 0.975


def test_one_held_out_step_gives_no_interval():
    found = tune(TRACE, **WITHOUT_LUCK, rl_steps=[0, 3])
    assert not found.worth_it
    assert all(row.ratio_low is None for row in found.candidates)
    json.dumps(found.json(), allow_nan=False)


def test_processes_do_not_change_the_result(tuned, monkeypatch):
    monkeypatch.setattr("tltlab.sim.study.jobs.ALONE_S", 0.0)
    again = tune(TRACE, **SMALL, jobs=2)
    assert again.json() | {"wall_s": 0} == tuned.json() | {"wall_s": 0}
    assert again.trials == tuned.trials


LONG = log_normal(prompts=1, group_size=4, rl_steps=40, median=20, cap=60, workers=1)


@pytest.mark.parametrize(
    ("options", "tuned_on", "judged_on"),
    [
        ({}, [5, 15, 25, 35], 8),
        ({"rl_steps": range(8)}, [0, 2, 4, 6], 4),
    ],
)
def test_long_runs_are_tuned_on_a_sample(options, tuned_on, judged_on):
    found = tune(LONG, **WITHOUT_LUCK | {"acceptance": "geometric:0.05"}, **options)
    (tuned,), (judged,) = found.tuned_on, found.judged_on
    assert (list(tuned), len(judged) >= judged_on) == (tuned_on, True)
    assert not set(tuned) & set(judged)
    assert found.policy.provenance["num_rl_steps"] == [40]
    if not options:
        assert max(b - a for a, b in itertools.pairwise(judged)) <= 10, "spread over the run"


def test_decisions_are_apart_where_responses_are_long():
    cap = log_normal(prompts=1, group_size=2, rl_steps=2, median=40, cap=5120, workers=1)
    for asked, used in (({}, 20), ({"decision_block": 1}, 1)):
        assert tune(cap, **WITHOUT_LUCK | {"depths": (1,)}, **asked).policy.provenance["decision_block"] == used


def test_the_shipped_settings_are_tried_first():
    found = tune(SHORT, **SMALL | {"trials": 1})
    settings = found.trials[0].settings
    assert (settings["epsilon"], settings["window"], settings["reward"]) == (0.1, 300, "relative")
    assert found.policy.provenance["trials"] == 1


def test_several_traces_count_together():
    found = tune([TRACE, SHORT], **WITHOUT_LUCK)
    assert (found.tuned_on, len(found.policy.provenance["trace"])) == (((0, 2), (0,)), 2)


def test_prices_weigh_batches_by_time_spent_at_them():
    one = Scenario.of(TRACE, costs=CPU, rl_steps=[0])
    plain, prices = one.rollouts(load_policy("none"))[0], Prices.of([one], [])
    decoding_s = sum(float(log.columns.seconds.sum()) for log in plain.logs)
    weights_s = sum(prices.seconds[NO_SPECULATION, batch] for batch in range(1, prices.max_batch + 1))
    assert weights_s == pytest.approx(decoding_s, rel=1e-3)


def test_one_rl_step_is_tuned_on_half_of_its_prompts():
    lone = log_normal(prompts=4, group_size=2, rl_steps=1, median=90, cap=200, workers=1)
    found = tune(lone, **SMALL)
    assert (found.tuned_on, found.judged_on) == (((0,),), ((1,),))
    assert not found.worth_it
    assert any("half of its prompts" in note for note in found.notes)
    halves = _halves(lone)
    texts = [set(part.outcomes["response_tokens"]) for part in halves.iter_rl_steps()]
    assert len(halves.outcomes) == 16
    assert texts[0] | texts[1] == set(lone.outcomes["response_tokens"])


@pytest.mark.parametrize(
    ("trace", "options", "what"),
    [
        (log_normal(prompts=1, group_size=1, rl_steps=1, median=90, cap=200, workers=1), {}, ()),
        (TRACE, {"depths": [-1]}, ("depths",)),
        (TRACE, {"depths": [0]}, ("0",)),
        (TRACE, {"drafters": []}, ()),
        (TRACE, {"acceptance": None}, ("--acceptance", "TLTLAB_POLICY=explore", "tltlab trace annotate")),
        (TRACE, {"trials": -1}, ("trials",)),
    ],
)
def test_what_cannot_be_tuned_is_refused(trace, options, what):
    with refused(ConfigError, naming=what):
        tune(trace, **SMALL | options)


OWN = """
from tltlab import NO_SPECULATION, Selector, Strategy

class Border(Selector):
    strategies = (NO_SPECULATION, Strategy.chain("ngram", 4))

    def __init__(self, few=1, deep=True):
        self.few, self.deep = few, deep

    def choose(self, state):
        return self.strategies[self.deep and state.batch <= self.few]
"""


@pytest.fixture
def border(tmp_path, monkeypatch):
    """A user's own policy, which speculates up to a border."""
    name = f"border_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return f"{name}:Border"


def test_settings_of_own_policy_are_searched_and_written(border, tmp_path):
    settings = SMALL | {"trials": 20, "repeats": 1, "depths": (4,), "policies": f"{border}(few=9)"}
    settings |= {"search": {"few": "0..6", "deep": (False, True)}}
    found = tune(SHORT, **settings)
    every = {tuple(trial.settings.values()): trial.score for trial in found.trials}
    assert every.keys() == {(few, deep) for few in range(7) for deep in (False, True)}, "all of them are few enough"
    best = min(every, key=lambda key: every[key])
    assert found.trials[0].score == every[best] < every[0, True]
    assert found.policy.selector.args == found.trials[0].settings
    assert {"none", "fixed ngram:4"} <= {row.name for row in found.candidates}
    found.policy.write(tmp_path / "policy.json")
    with code_allowed([border.partition(":")[0]]):
        assert load_policy(tmp_path / "policy.json") == found.policy
    assert tune(SHORT, **settings).trials == found.trials


def test_own_classes_are_candidates(border):
    settings = WITHOUT_LUCK | {"depths": (1,), "policies": [border, "goodput(window=10)"]}
    rows = {row.name: row.kind for row in tune(SHORT, **settings).candidates}
    assert (rows[border], rows["goodput(window=10)"]) == ("own", "own")


def test_drafters_that_a_candidate_brings_are_tuned_over():
    recent = {"selector": {"kind": "fixed", "strategy": "recent:4"}, "drafters": {"recent": {"kind": "suffix"}}}
    settings = WITHOUT_LUCK | {"depths": (1, 4), "drafters": ("recent",)}
    with refused(ConfigError, naming=("recent",)):
        tune(SHORT, **settings)
    found = tune(SHORT, **settings, policies=[recent])
    assert "fixed recent:4" in found.searched
    assert found.name != "none"
    assert found.policy.drafters == load_policy(recent).drafters, "the file says what the drafter is"


@pytest.mark.parametrize(
    ("search", "facts"),
    [
        (["few=3"], ("--search few=3",)),
        (["few=9..1"], ("--search few=9..1",)),
        (["few=a..b"], ("few=a..b",)),
        (["few"], ("--search few",)),
        (["few=1..3", "few=2..4"], ("--search few=2..4",)),
        (["fw=1..3"], ("fw", "few")),
    ],
)
def test_a_search_that_makes_no_sense_is_refused(border, tmp_path, capsys, search, facts):
    options = [part for text in search for part in ("--search", text)]
    code, _, said = typed(capsys, "tune", TRACES / "tiny", "--out", "p.json", "--policies", border, *options)
    assert (code, [fact for fact in facts if fact not in said]) == (2, []), said
    with refused(ConfigError, naming=("--policies",)):
        tune(SHORT, **SMALL, search={"few": (1, 2)})


def test_depths_without_acceptance_are_left_out():
    fitted = load_acceptance("traces/tiny/acceptance.json")
    found = tune(TRACE, **SMALL | {"acceptance": fitted, "depths": (4, 64), "trials": 0, "repeats": 1})
    assert any("ngram:64" in note for note in found.notes)
    assert not any("ngram:64" in name for name in found.searched)
    assert "fixed ngram:4" in found.searched


def test_the_command_refuses_before_it_works(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    new = ("--out", tmp_path / "new" / "p.json")
    for options, said in (
        (("--out", tmp_path), str(tmp_path)),
        (("--out", tmp_path / "file" / "policy.json"), "file"),
        ((*new, "--depths", "deep"), "--depths"),
    ):
        code, _, told = typed(capsys, "tune", TINY, *options)
        assert (code, said in told) == (2, True), options
    assert not (tmp_path / "new").exists()


def test_interrupted_tuning_finds_what_it_would_have_found(tmp_path):
    journal, settings = tmp_path / "new" / "policy.json.trials", SMALL | {"trials": 9, "repeats": 1, "depths": (4,)}
    whole = tune(SHORT, **settings)

    def interrupted(trial):
        heard.extend([trial] * trial.startswith("trial "))
        if len(heard) == 6:
            raise KeyboardInterrupt

    heard = []
    with pytest.raises(KeyboardInterrupt):
        tune(SHORT, **settings, journal=journal, on_stage=interrupted)
    with journal.open("a") as file:
        file.write('["half')
    scored = []
    makespans = TuningCases.makespans

    def counted(self, policies, **options):
        scored.append(len(policies))
        return makespans(self, policies, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TuningCases, "makespans", counted)
        resumed = tune(SHORT, **settings, journal=journal)
        again, scored[:] = sum(scored), []
        tune(SHORT, **settings)
    assert resumed.trials == whole.trials
    assert resumed.candidates == whole.candidates
    assert 6 <= sum(scored) - again <= 8
    assert [trial.number for trial in sorted(whole.trials, key=lambda t: t.number)] == list(range(9))
    with refused(ConfigError):
        tune(SHORT, **settings | {"acceptance": "geometric:0.6"}, journal=journal)


def test_the_command_resumes_and_writes_policy(tmp_path, capsys):
    out, journal = tmp_path / "policy.json", tmp_path / "policy.json.trials"
    args = ("tune", TINY, "--out", out, "--trials", 2, "--repeats", 1, "--depths", 4)
    journal.write_text("another\n")
    for options, message in (((), "--resume"), (("--resume",), "--out")):
        code, _, told = typed(capsys, *args, *options)
        assert (code, message in told) == (2, True)
    journal.unlink()
    code, shown, _ = typed(capsys, *args, "--resume", "--json")
    told = json.loads(shown)
    assert code == 0
    assert {
        "policy",
        "name",
        "worth_it",
        "buckets",
        "placement_gain",
        "bound_s",
        "fixed_bound_s",
        "tuned_on",
        "judged_on",
        "trials",
        "wall_s",
    } <= set(told)
    assert {"makespan_s", "ratio", "ratio_low", "ratio_high", "regret", "acceptance"} <= set(told["candidates"][0])
    policy = load_policy(out)
    assert policy.provenance["trials"] == 2
    assert told["verdict"].startswith(policy.provenance["verdict"])
    assert str(out) in told["verdict"].splitlines()[2]
    assert simulate(read(TINY), out, placement="recorded").makespan_s > 0
    assert not journal.exists()
