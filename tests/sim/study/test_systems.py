"""Systems from the literature on one trace: each row is a simulation that could have been made by hand."""

import html
import json
import pickle
import shlex

import numpy as np
import pytest

import tltlab
from bench.simulator import COSTS
from tests.refused import refused
from tltlab.acceptance.freshness import FreshAcceptance, Freshness
from tltlab.acceptance.load import load_acceptance
from tltlab.acceptance.measured import FittedDepth, MeasuredAcceptance
from tltlab.costs.load import load_costs
from tltlab.costs.stages import InferenceCosts, RewardCosts, StageCosts, SyncCosts, TrainCosts
from tltlab.errors import ConfigError
from tltlab.lengths.generate import log_normal
from tltlab.planning.composition import EarlierEpoch, LadderStep, Regrouped, System, Truncated, one_strategy
from tltlab.planning.execution import missing_part
from tltlab.planning.rollout import Shape
from tltlab.planning.system_binding import bind
from tltlab.planning.systems import SYSTEMS
from tltlab.sim import Separate, SimulationConfig, run_steps, simulate
from tltlab.sim.placement import place
from tltlab.sim.study.compare import compare
from tltlab.sim.study.sample import Scenarios
from tltlab.sim.study.systems import on_gpus, system_cell
from tltlab.sim.workload import changed, requests_by_step

from ..workloads import TINY, typed, with_positions

STAGES = StageCosts(
    num_gpus=4, inference=InferenceCosts(per_token_s=1e-4), reward=RewardCosts(base_s=0.5),
    train=TrainCosts(per_token_s=3e-4, per_update_s=0.1), sync=SyncCosts(base_s=0.25),
)  # fmt: skip
GPU = {"costs": "h100-qwen2.5-32b-tp4", "decision_block": 16}
ALIKE = {"costs": COSTS, "acceptance": "all=geometric:0.7", "decision_block": 8}
KEYS = {
    "system", "makespan_s", "ratio", "ratio_low", "ratio_high", "speed_up", "regret", "lossless",
    "assumptions", "source", "stand_ins", "step_s", "step_ratio_low", "rollout_share",
}  # fmt: skip


@pytest.fixture(scope="module")
def trace():
    return log_normal(prompts=4, group_size=8, rl_steps=2, median=120, cap=600, workers=4)


def of_system(trace, bound, rl_steps, **settings):
    scenarios = Scenarios(trace, SimulationConfig(**settings))
    return system_cell(bound, scenarios, rl_steps).simulate(record_iterations=True)[0]


@pytest.fixture(scope="module")
def found(trace):
    return compare(trace, systems="all", stages=STAGES, **ALIKE).set_index("system")


def test_each_row_is_the_simulation_of_its_policy(trace, found):
    assert set(found.index) == set(SYSTEMS) - {"pat"}
    assert not any(found["defaults"])
    # What goes to another process is pickled.
    model = load_acceptance("all=geometric:0.7")
    sent = {n: pickle.loads(pickle.dumps(bind(s, COSTS, model))) for n, s in SYSTEMS.items()}
    plain = {
        n: s
        for n, s in SYSTEMS.items()
        if n in found.index and s.same_work and s.placement == "contiguous" and not s.max_staleness
    }
    assert len(plain) >= 10
    for name, system in plain.items():
        bound = sent[name]
        workers = 2 if name == "open-r1" else 4
        how = ALIKE | {"acceptance": bound.acceptance, "workers": workers, "admission": system.admission}
        alone = simulate(trace, bound.policy, **how)
        assert found.loc[name, "makespan_s"] == pytest.approx(alone.makespan_s, rel=1e-12)
        accept = found.loc[name, "mean_accept_length"]
        assert accept == pytest.approx(alone.summary["mean_accept_length"]) if accept == accept else "r" in name


def test_a_system_that_gathers_needs_another_shape(trace, capsys):
    few = {"rl_steps": [0], "costs": COSTS}
    with refused(ConfigError, naming=("pat", "shape")):
        compare(trace, systems="verl,pat", **few)
    _, shown, _ = typed(capsys, "compare", TINY, "--systems", "all", "--rl-steps", "0:1")
    assert "left out: pat: no other shape" in shown
    assert typed(capsys, "simulate", TINY, "--system", "pat")[0] == 2
    fast = COSTS.model_copy(update={name: getattr(COSTS, name) / 3 for name in ("base_s", "per_token_s")})
    rows = compare(trace, systems="verl,pat", shapes={Shape.of("1x4"): fast}, gather_s=0.0, **few).set_index("system")
    assert rows.loc["pat", "speed_up"] > 1.1
    assert rows.loc["pat", "regret"] >= 0


def test_other_figures_are_those_of_the_simulated_trace(trace, found):
    alone = simulate(trace, "none", costs=COSTS, workers=4).summary
    verl = found.loc["verl"]
    assert verl["bubble_fraction"] == pytest.approx(alone["bubble_fraction"])
    assert verl["wasted_share"] == verl["off_policy_share"] == 0.0
    assert verl["tokens_per_s_ratio"] == 1.0
    april = found.loc["april"]
    # It trains on other responses than the trace's step has.
    assert april["tokens_per_s_ratio"] == pytest.approx(april["tokens_per_s"] / verl["tokens_per_s"])
    assert april["tokens_per_s_ratio"] != pytest.approx(1.0 / april["ratio"])
    assert 0.0 < april["off_policy_share"] < 1.0
    # Nowhere that an RL step trains on all that it began; who carries responses over comes near it in a short run.
    assert (found.loc[[name for name in found.index if SYSTEMS[name].admission is None], "length_bias"] == 1).all()
    assert 0.5 < found.loc["copris", "length_bias"] < 1.5
    assert found.loc["copris", "length_bias"] != 1.0


def test_claims_stand_beside_figures_of_their_own_kind(found):
    assert found.loc["verl", "claim"] is None
    tlt = found.loc["tlt"]
    assert tlt["claim"]["speed_up"] == pytest.approx(1 / tlt["step_ratio"])
    assert tlt["claim"]["interval"] == pytest.approx((1 / tlt["step_ratio_high"], 1 / tlt["step_ratio_low"]))
    assert found.loc["seer", "claim"]["speed_up"] == found.loc["seer", "tokens_per_s_ratio"]
    assert found.loc["das", "claim"]["speed_up"] == pytest.approx(1 / found.loc["das", "ratio"])


def test_stages_depend_on_fusion_and_gpus(trace, found):
    fused, plain, split = (found.loc[name] for name in ("rlhfuse", "verl", "open-r1"))
    assert plain["step_s"] == run_steps(simulate(trace, "none", costs=COSTS, workers=4), STAGES).step_s
    # At most the log-probs of all tokens are saved; the rollout is the same.
    assert fused["makespan_s"] == plain["makespan_s"]
    most = 1e-4 * (trace.outcomes["response_tokens"].sum() / 2 + 32 * 400)
    assert plain["step_s"] - most < fused["step_s"] < plain["step_s"]
    twice = StageCosts(
        num_gpus=2, inference=InferenceCosts(per_token_s=2e-4), reward=RewardCosts(base_s=0.5),
        train=TrainCosts(per_token_s=6e-4, per_update_s=0.2), sync=SyncCosts(base_s=0.25),
    )  # fmt: skip
    assert on_gpus(STAGES, 2) == twice
    expected = run_steps(simulate(trace, "none", costs=COSTS, workers=2), twice, topology=Separate(train_gpus=2))
    assert split["step_s"] == pytest.approx(expected.step_s, rel=1e-12)
    assert expected.num_gpus == 4
    assert split["step_s"] > plain["step_s"]
    with refused(ConfigError, naming=(8, 4, 1)):
        compare(trace, systems="open-r1", costs=COSTS, stages=STAGES.model_copy(update={"num_gpus": 8}), workers=4)


@pytest.mark.parametrize("acceptance", ["all=geometric:0.7", "learned=geometric:0.7,all=seer-siblings"])
def test_no_system_beats_the_clairvoyant_bound(trace, acceptance):
    table = compare(trace, systems="all", **ALIKE | {"acceptance": acceptance, "rl_steps": [0]}).set_index("system")
    without = {name for name, system in SYSTEMS.items() if system.budget is not None or not system.same_work}
    assert set(table.index[table["regret"].isna()]) == without
    table = table.drop(list(without))
    assert (table["regret"].astype(float) >= 0).all()


def test_repeats_are_averaged_seed_by_seed(trace):
    some = ALIKE | {"mode": "sampled"}
    both = compare(trace, systems="verl,das", repeats=2, seed=5, **some).set_index("system")
    each = [compare(trace, systems="verl,das", seed=s, **some).set_index("system")["makespan_s"] for s in (5, 6)]
    assert both["makespan_s"].to_numpy() == pytest.approx(((each[0] + each[1]) / 2)[both.index].to_numpy())
    assert each[0]["das"] != each[1]["das"]


@pytest.mark.parametrize("mode", ["fluid", "sampled"])
def test_hedge_follows_the_better_drafter_whichever_it_is(trace, mode):
    """One keeps four of five tokens, the other one in ten: from the few first choices on it drafts with the one."""

    def model(learned, text):
        def known(share):
            accepted = np.diff([0.0, *(1 - share ** np.arange(1, 5)), 1.0])
            return FittedDepth(accepted=tuple(accepted), drafted=4)

        return MeasuredAcceptance.at_any_batch({"learned": {4: known(learned)}, "suffix": {4: known(text)}})

    for better, chances in (("learned", (0.8, 0.1)), ("suffix", (0.1, 0.8))):
        bound = bind(SYSTEMS["hedgespec"], COSTS, model(*chances))
        result = of_system(trace, bound, [0, 1], costs=COSTS, mode=mode)
        drafters = result.trace.decisions["drafter"]
        assert (drafters == better).mean() > 0.85
        assert (drafters == better)[:40].mean() < 1.0 or len(set(drafters)) == 2


def test_idle_training_gains_by_freshness():
    """A drafter that accepts nothing untrained, everything trained: the first RL step without it, the others with."""
    long = log_normal(prompts=8, group_size=4, rl_steps=3, median=2000, cap=16000, workers=4)
    full = MeasuredAcceptance.at_any_batch({"learned": {4: FittedDepth(accepted=(0, 0, 0, 0, 1), drafted=4)}})
    model = FreshAcceptance(base=full, freshness=Freshness(untrained=0.0, floor=0.0, updates_to_train=0.1))
    mine = System(
        name="mine", title="Mine", source="this test", drafters=("learned",), selector=one_strategy,
        ladder=(LadderStep(min_batch=1, chains=(4,)),), idle_use=SYSTEMS["tlt"].idle_use,
    )  # fmt: skip
    costs = load_costs("h100-qwen2.5-7b")
    bound = bind(mine, costs, model)
    spans = [r.makespan_s for r in of_system(long, bound, range(3), costs=costs).rollouts]
    useless, perfect = (
        [r.makespan_s for r in simulate(long, bound.policy, costs=costs, acceptance=f"constant:{a}").rollouts]
        for a in (1, 5)
    )
    assert spans == pytest.approx([useless[0], *perfect[1:]], rel=1e-6)
    table = compare(long, systems=[SYSTEMS["verl"], mine], costs=costs, acceptance=model).set_index("system")
    assert table.loc["mine", "makespan_s"] == pytest.approx(np.mean(spans))


def test_a_missing_acceptance_takes_a_marked_default(trace):
    some = {"acceptance": "tlt-qwen2.5-32b", **GPU}
    rows = compare(trace, systems="verl,tlt,tlt-base,das", **some).set_index("system")
    marked = [bool(rows.loc[name, "defaults"]) for name in ("verl", "tlt", "tlt-base", "das")]
    assert marked == [False, False, True, True]
    assert "seer-siblings" in rows.loc["das", "defaults"][0]
    given = compare(trace, systems="das", **some | {"acceptance": "learned=tlt-qwen2.5-32b,all=seer-siblings"})
    assert rows.loc["das", "makespan_s"] == given.loc[0, "makespan_s"]


def test_replayed_acceptance_serves_where_every_response_has_it(trace):
    replayed = with_positions(trace, [[2] * n for n in trace.outcomes["response_tokens"]], "suffix")
    some = {"costs": COSTS, "rl_steps": [0], "decision_block": 8}
    whole = compare(replayed, systems="all", **some)
    assert set(whole["system"]) == set(SYSTEMS) - {"pat"}
    das = whole.set_index("system").loc["das"]
    assert "acceptance.parquet" in das["defaults"][0]
    assert das["mean_accept_length"] <= 3.0
    assert whole.set_index("system").loc["vllm-dynamic", "mean_accept_length"] == pytest.approx(3.0, rel=0.02)
    assert (whole["regret"].dropna() >= 0).all()
    table = replayed.acceptance
    part = compare(trace.replace(acceptance=table.iloc[1:]), systems="vllm-dynamic,tlt,das", **some)
    assert part.set_index("system").loc["vllm-dynamic", "mean_accept_length"] == pytest.approx(3.0, rel=0.02)
    assert all("acceptance.parquet" in part.set_index("system").loc[name, "defaults"][0] for name in ("tlt", "das"))


def test_responses_of_earlier_epoch_leave_rest_to_generate(trace):
    """What is kept is a geometric run of tokens, at most the whole response; the context is the same."""
    step = requests_by_step(trace)[0]
    nothing, all_of_it, half = (changed(step, EarlierEpoch(keep=keep), 0) for keep in (0.0, 1.0, 0.99))
    assert nothing.response_tokens == step.response_tokens
    assert sum(all_of_it.response_tokens) == 0
    assert (half.prompts + half.lengths == step.prompts + step.lengths).all()
    expected = np.mean([(0.99 - 0.99 ** (n + 1)) / 0.01 for n in step.response_tokens])
    kept = step.lengths - half.lengths
    assert abs(kept.mean() - expected) < 4 * kept.std() / np.sqrt(len(kept))


def test_truncation_and_regrouping_keep_the_number_of_responses(trace):
    step = requests_by_step(trace)[0]
    short = changed(step, Truncated(share=0.25), 0)
    assert short.response_tokens == [min(n, 150) for n in step.response_tokens]
    wide = changed(step, Regrouped(factor=2), 0)
    assert len(wide) == len(step)
    assert len(set(wide.keys)) == len(step)
    assert [key[1] for key in wide.keys].count(step.keys[0][1]) == 16
    own = {(key[1], tokens) for key, tokens in zip(step.keys, step.response_tokens, strict=True)}
    assert {(key[1], tokens) for key, tokens in zip(wide.keys, wide.response_tokens, strict=True)} <= own


@pytest.mark.parametrize("placement", ["two_pools", "rank_groups"])
def test_placement_by_expected_length_beats_the_static_split(placement):
    long = log_normal(prompts=32, group_size=8, rl_steps=1, median=2000, cap=32000, workers=8)
    step = requests_by_step(long)[0]
    queues = place(step, 8, placement, COSTS)
    assert sorted(i for queue in queues for i in queue) == list(range(len(step)))
    assert all(queues)
    split, static = (simulate(long, "none", costs=COSTS, placement=p).makespan_s for p in (placement, "contiguous"))
    assert split < static


def test_one_worker_cannot_be_split(trace):
    rows = compare(trace, systems="verl,open-r1", costs=COSTS, workers=1).set_index("system")
    assert rows.loc["open-r1", "defaults"]
    assert rows.loc["open-r1", "makespan_s"] == rows.loc["verl", "makespan_s"]


def test_the_command_prints_and_writes_one_object(tmp_path, capsys):
    out = tmp_path / "systems.json"
    options = ("--systems", "all", "--stages", "cpu-small", "--rl-steps", "0:2")
    code, shown, _ = typed(capsys, "compare", TINY, *options, "--out", out, "--json")
    result = json.loads(shown)
    assert code == 0
    assert json.loads(out.read_text()) == result
    assert (result["baseline"], result["failed"], result["figures"]) == ("verl", {}, "simulated")
    rows = {row["system"]: row for row in result["rows"]}
    assert (set(rows), list(result["left_out"])) == (set(SYSTEMS) - {"pat"}, ["pat"])
    for row in rows.values():
        assert set(row) >= KEYS
        assert row["speed_up_low"] == pytest.approx(1 / row["ratio_high"])
        assert row["lossless"] is SYSTEMS[row["system"]].lossless
        assert row["on_policy"] is SYSTEMS[row["system"]].on_policy
        assert row["runs_here"] == (missing_part(SYSTEMS[row["system"]]) or True)
    assert rows["das"]["regret"] is None
    assert rows["tlt"]["regret"] > 0
    assert "ngram" in rows["das"]["stand_ins"][0]
    _, shown, _ = typed(capsys, "compare", TINY, "--systems", "verl,tlt-base", "--rl-steps", "0:1", "--json")
    assert [row["ratio_low"] for row in json.loads(shown)["rows"]] == [None, None], "of one RL step there is none"


@pytest.mark.parametrize(
    "argv",
    [
        ["compare", "--systems", "verl,nobody"],
        ["compare", "--systems", "all", "--gpus-per-worker", "2"],
        ["compare", "--systems", "all", "--stages", "h100x64-qwen2.5-32b"],
        ["compare", "--systems", "all", "--acceptance", "ngram=nothing.json"],
        ["simulate", "--system", "nobody"],
        ["simulate", "--system", "tlt", "--policy", "table"],
        ["simulate", "--system", "tlt", "--stages", "cpu-small", "--topology", "separate"],
    ],
)
def test_what_does_not_fit_together_is_refused(argv, capsys):
    command, *options = argv
    code, shown, said = typed(capsys, command, TINY, *options)
    assert code == 2
    assert not shown
    assert len(said.splitlines()) == 1


def test_one_system_is_simulated_as_a_policy_is(tmp_path, capsys):
    plain = json.loads(typed(capsys, "simulate", TINY, "--policy", "none", "--json")[1])
    verl = json.loads(typed(capsys, "simulate", TINY, "--system", "verl", "--json")[1])
    assert set(verl) - set(plain) == {"system", "assumptions"}
    apart = {"wall_s", "speedup"}
    assert {key: verl[key] for key in plain.keys() - apart} == {key: plain[key] for key in plain.keys() - apart}
    on = ("--acceptance", "learned=0.7,ngram=0.4,suffix=0.5", "--stages", "cpu-small", "--json")
    names = ("verl", "tlt-base", "vllm-dynamic", "april", "das", "open-r1")
    rows = json.loads(typed(capsys, "compare", TINY, "--systems", ",".join(names), *on)[1])["rows"]
    for row in rows:
        alone = json.loads(typed(capsys, "simulate", TINY, "--system", row["system"], *on)[1])
        for name in ("makespan_s", "step_s", "regret", "bubble_fraction", "rollout_share"):
            assert alone[name] == (row[name] and pytest.approx(row[name], rel=1e-12)), (row["system"], name)
    argv = ["--system", "open-r1", "--stages", "cpu-small", "--out", tmp_path / "sim", "--json"]
    split = json.loads(typed(capsys, "simulate", TINY, *argv)[1])
    assert (split["topology"], split["num_gpus"]) == ("separate", 2)
    assert tltlab.read(tmp_path / "sim").manifest.num_workers == 1


@pytest.mark.parametrize("option", [["--systems", "verl,tlt-base"], ["--policies", "none, table"]])
def test_comparison_and_its_report_state_what_made_it(option, tmp_path, capsys):
    out = tmp_path / "compared.json"
    argv = ["compare", str(TINY), *option, "--costs", "cpu-small", "--out", str(out)]
    typed(capsys, *argv)
    written = json.loads(out.read_text())
    assert written["command"] == shlex.join(["tltlab", *argv])
    assert {"tltlab", "numpy", "simpy"} <= set(written["versions"])
    assert written["baseline"] == option[1].split(",")[0]
    assert (written["trace"], written["costs"]) == (tltlab.read(TINY).manifest.name, "cpu-small")
    page = tmp_path / "page.html"
    assert typed(capsys, "report", str(out), "--out", str(page))[0] == 0
    assert html.escape(written["command"]) in page.read_text().replace("&#34;", "&quot;").replace("&#39;", "&#x27;")
