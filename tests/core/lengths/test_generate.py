"""Drawing synthetic traces from a model of lengths, and fitting that model to a trace."""

import json
import math
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refused import refused
from tests.traces_of_lengths import of_samples
from tltlab.errors import ConfigError
from tltlab.lengths.fit import fit_lengths, pareto_tail, shape_of, with_tail_drawn
from tltlab.lengths.generate import generate, generate_steps
from tltlab.lengths.model import REGIMES, LengthModel, ParetoTail
from tltlab.traces import metrics
from tltlab.traces.trace import Trace, read

TRACES = Path(__file__).resolve().parents[3] / "traces"
HEAVY = LengthModel(
    quantiles=((0.1, 150), (0.5, 500), (0.9, 1100), (0.99, 4000)), prompt_share=0.3, max_response_tokens=16384
)
SHIPPED = {
    "base-rl-16k": "--regime base-rl --rl-steps 8 --prompts 64 --group-size 8 --num-prompts 256 --cap 16384"
    " --median-growth 0.02 --tail-growth 0.02 --workers 8",
    "reasoning-32k": "--regime reasoning --rl-steps 8 --prompts 64 --group-size 8 --num-prompts 256 --cap 32768"
    " --median 6000 --median-growth 0.02 --tail-growth 0.01 --workers 8",
}


@pytest.fixture
def run(command):
    return partial(command, "trace", "generate")


def lognormal(median, sigma, share, cap=10**9, **fields):
    model = LengthModel(quantiles=((0.5, median), (0.9, median * 2)), prompt_share=share, max_response_tokens=cap)
    return model.with_changes(sigma=sigma, **fields)


def draw(model, steps=1, prompts=500, group=8, **options):
    return generate(model, num_rl_steps=steps, prompts_per_step=prompts, group_size=group, **options)


def group_means(trace):
    """Mean log length of each prompt in each epoch, one column per epoch, relative to its RL step."""
    rows = trace.outcomes.assign(y=np.log(trace.outcomes["response_tokens"]), epoch=trace.workload["epoch"])
    rows["y"] -= rows.groupby("rl_step")["y"].transform("mean")
    return rows.groupby(["prompt_id", "epoch"])["y"].mean().unstack()


# The model


def test_quantiles_of_the_model_are_those_given():
    assert [round(HEAVY.quantile(p), 6) for p in (0.1, 0.5, 0.9, 0.99)] == [150, 500, 1100, 4000]
    # Two are a log-normal.
    two = lognormal(800, 1.2, 0.5)
    found = [two.quantile(0.975), two.quantile(0.001)]
    assert found == pytest.approx([800 * math.exp(1.2 * z) for z in (1.959964, -3.090232)], rel=1e-6)


def test_growth_moves_the_median_and_tail():
    model = HEAVY.with_changes(median_growth=0.02, tail_growth=0.03)
    assert model.quantile(0.5, 50) == pytest.approx(500 * 1.02**50)
    spread = [model.quantile(p, 10) / model.quantile(0.5, 10) for p in (0.9, 0.1)]
    assert spread == pytest.approx([(1100 / 500) ** (1.03**10), 150 / 500])
    masses = [model.cap_mass(step) for step in (0, 25, 50, 100)]
    assert masses == sorted(masses)
    assert masses[0] < 0.001 < 0.2 < masses[-1]


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        *(({"quantiles": wrong}, "") for wrong in (((0.5, 100), (0.4, 200)), ((0.5, 100), (1.0, 200)))),
        ({"quantiles": ((0.5, 100), (0.9, 50))}, "fall"),
        ({"quantiles": ((0.5, 0), (0.9, 50))}, "0"),
        *(({"prompt_share": wrong}, "prompt_share") for wrong in (1.1, math.nan)),
        ({"max_response_tokens": 0}, "max_response_tokens"),
        ({"median_growth": -1.0}, "median_growth"),
        ({"prompt_memory": -0.1}, "prompt_memory"),
        *(({"median": wrong}, wrong) for wrong in (0.0, math.inf)),
        ({"sigma": -0.1}, "-0.1"),
    ],
)
def test_a_wrong_field_is_named(change, fact):
    with refused(ConfigError, naming=(fact,)):
        HEAVY.with_changes(**change)


def test_a_file_that_is_no_model_is_refused(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text('{"kind": "linear"}')
    with refused(ConfigError, naming=("costs.json",)):
        LengthModel.load(path)


# Drawing


@pytest.mark.parametrize("model", [HEAVY, *REGIMES.values()], ids=["heavy", *REGIMES])
def test_drawn_lengths_have_the_models_quantiles(model):
    model = model.with_changes(max_response_tokens=int(model.quantile(0.93)))
    lengths = draw(model, prompts=20_000, group=2).outcomes
    for p in (0.1, 0.5, 0.9):
        assert np.quantile(lengths["response_tokens"], p) == pytest.approx(model.quantile(p), rel=0.08)
    assert (lengths["finish_reason"] == "length").mean() == pytest.approx(0.07, abs=0.006)
    assert model.cap_mass() == pytest.approx(0.07, abs=0.001)


@pytest.mark.parametrize("num_prompts", [None, 12])
def test_a_longer_trace_begins_with_a_shorter_one(num_prompts):
    short, long = (draw(HEAVY, steps=n, prompts=5, num_prompts=num_prompts) for n in (4, 7))
    assert long.select(range(4)).outcomes.equals(short.outcomes)
    assert not draw(HEAVY, steps=4, prompts=5, num_prompts=num_prompts, seed=1).outcomes.equals(short.outcomes)


def test_rl_steps_come_one_by_one():
    endless = generate_steps(HEAVY, num_rl_steps=10**9, prompts_per_step=2, group_size=3)
    workload, outcomes = next(islice(endless, 2, None))
    assert workload["rl_step"].unique().tolist() == [2]
    assert len(outcomes) == 6


@given(
    steps=st.integers(1, 5), prompts=st.integers(1, 6), group=st.sampled_from([1, 2, 64]), cap=st.integers(1, 3000),
    growth=st.floats(-0.5, 3.0), tail=st.floats(-0.5, 3.0), share=st.floats(0, 1), more=st.integers(-1, 5),
)  # fmt: skip
def test_every_draw_is_a_valid_trace(steps, prompts, group, cap, growth, tail, share, more):
    model = HEAVY.with_changes(
        max_response_tokens=cap, median_growth=growth, tail_growth=tail, prompt_share=share, prompt_tokens_sigma=1.0
    )
    trace = draw(model, steps, prompts, group, num_prompts=None if more < 0 else prompts + more)
    outcomes = trace.outcomes
    assert len(outcomes) == steps * prompts * group
    assert outcomes["response_tokens"].between(1, cap).all()
    assert (outcomes["response_tokens"][outcomes["finish_reason"] == "length"] == cap).all()


def test_prompts_come_back_once_an_epoch():
    workload = draw(HEAVY.with_changes(prompt_tokens_sigma=0.5), steps=6, prompts=4, group=2, num_prompts=9).workload
    per_epoch = workload[workload["sample"] == 0].groupby("epoch")["prompt_id"].agg(list)
    assert [(len(ids), len(set(ids))) for ids in per_epoch] == [(8, 8)] * 3
    assert per_epoch[0] != per_epoch[1]
    assert (workload.groupby("prompt_id")["prompt_tokens"].nunique() == 1).all()
    assert workload["prompt_tokens"].nunique() > 5


def test_history_predicts_lengths_that_prompts_decide():
    means = {name: group_means(draw(model, 12, 100, num_prompts=400)) for name, model in REGIMES.items()}
    next_epoch, later = (means["reasoning"][0].corr(means["reasoning"][epoch]) for epoch in (1, 2))
    assert next_epoch > max(0.75, later)
    assert abs(means["base-rl"][0].corr(means["base-rl"][1])) < 0.4


@pytest.mark.parametrize(
    ("option", "wrong"),
    [
        *((option, 0) for option in ("num_rl_steps", "prompts_per_step", "num_workers")),
        *((option, -1) for option in ("group_size", "seed")),
        ("num_prompts", 3),
    ],
)
def test_a_wrong_number_is_named(option, wrong):
    with refused(ConfigError, naming=(wrong,)):
        generate(HEAVY, **({"num_rl_steps": 1, "prompts_per_step": 4, "group_size": 2} | {option: wrong}))


# Fitting


@pytest.mark.parametrize("share", [0.05, 0.9])
def test_a_fit_returns_what_was_drawn(share):
    model = HEAVY.with_changes(
        prompt_share=share, max_response_tokens=1500, prompt_tokens_median=200, prompt_tokens_sigma=0.4
    )
    found = fit_lengths(draw(model, steps=2, prompts=2000))
    assert found.prompt_share == pytest.approx(share, abs=0.025)
    assert found.max_response_tokens == 1500
    assert found.cap_mass() == pytest.approx(model.cap_mass(), abs=0.01)
    for p in (0.2, 0.5, 0.8, 0.9):
        assert found.quantile(p) == pytest.approx(model.quantile(p), rel=0.07)
    assert found.prompt_tokens_median == pytest.approx(200, rel=0.05)
    assert found.prompt_tokens_sigma == pytest.approx(0.4, abs=0.02)
    assert found.median_growth == 0


def test_a_fit_returns_the_drift():
    model = HEAVY.with_changes(median_growth=0.02, max_response_tokens=4000)
    found = fit_lengths(draw(model, steps=60, prompts=40))
    assert found.median_growth == pytest.approx(0.02, abs=0.004)
    assert found.quantile(0.5) == pytest.approx(500, rel=0.1)
    assert found.cap_mass(59) == pytest.approx(model.cap_mass(59), rel=0.25)


def test_drift_that_may_be_chance_is_noted():
    found = fit_lengths(draw(HEAVY, steps=8, prompts=20))
    assert found.median_growth == 0
    assert any("growth of the median" in note for note in found.notes)


@pytest.mark.parametrize(("share", "cap", "least"), [(0.8, 2500, 0.35), (0.1, 4000, 0.15)])
def test_what_the_cap_cuts_is_extrapolated(share, cap, least):
    model = lognormal(2000, 0.85, share, cap=cap)
    found = fit_lengths(draw(model, prompts=3000))
    assert found.cap_mass() > least
    assert found.prompt_share == pytest.approx(share, abs=0.02)
    whole = found.with_changes(max_response_tokens=10**6)
    assert whole.quantile(0.95) == pytest.approx(model.quantile(0.95), rel=0.12)


def test_an_aborted_response_is_a_lower_bound():
    model = lognormal(2000, 0.8, 0.1)
    trace = draw(model, prompts=1500)
    outcomes = trace.outcomes
    stopped = np.random.default_rng(1).exponential(4000, len(outcomes)).astype(int)
    aborted = stopped < outcomes["response_tokens"]
    outcomes["response_tokens"] = np.where(aborted, stopped, outcomes["response_tokens"])
    outcomes["finish_reason"] = np.where(aborted, "abort", "stop")
    found = fit_lengths(trace.replace(outcomes=outcomes))
    assert aborted.mean() > 0.3
    assert outcomes["response_tokens"].median() < 1600
    assert found.quantile(0.5) == pytest.approx(2000, rel=0.06)
    assert found.quantile(0.75) == pytest.approx(model.quantile(0.75), rel=0.08)


def test_lengths_that_are_all_same_can_be_fitted():
    prompts = np.repeat(np.arange(10).astype(str), 4)
    trace = of_samples(np.full(40, 70), 100, prompt_id=prompts, sample=list(range(4)) * 10)
    again = draw(fit_lengths(trace, prompt_share=0.5), prompts=4)
    assert (again.outcomes["response_tokens"] == 70).all()


def test_too_little_to_fit_is_reported():
    all_cut, one = draw(HEAVY.with_changes(max_response_tokens=2), prompts=4), draw(HEAVY, prompts=1)
    empty = Trace.from_tables(one.manifest, {n: one.table(n).iloc[:0] for n in ("workload", "outcomes")})
    for use, trace in ((fit_lengths, all_cut), (fit_lengths, empty), (shape_of, empty)):
        with refused(ConfigError):
            use(trace)


# The longest responses


def with_tail(scale, shape):
    return HEAVY.model_copy(update={"tail": ParetoTail(scale=scale, shape=shape)})


def test_beyond_the_last_quantile_lengths_follow_the_tail():
    model = with_tail(1500.0, 0.3)
    assert [model.quantile(p) for p in (0.1, 0.5, 0.9, 0.99)] == [HEAVY.quantile(p) for p in (0.1, 0.5, 0.9, 0.99)]
    # One in ten of those beyond .99, and one in a thousand.
    for share in (0.1, 0.001):
        assert model.quantile(1 - 0.01 * share) == pytest.approx(4000 + 1500 / 0.3 * (share**-0.3 - 1), rel=1e-6)
    assert with_tail(500.0, -0.5).quantile(1 - 1e-14) == pytest.approx(4000 + 500 / 0.5, rel=1e-3)
    assert with_tail(500.0, 0.0).quantile(0.999) == pytest.approx(4000 + 500 * math.log(10))
    # It scales with the median, and goes with another sigma.
    assert model.with_changes(median=1000).quantile(0.9999) == pytest.approx(2 * model.quantile(0.9999))
    assert model.with_changes(sigma=1.0).tail is None


@pytest.mark.parametrize("shape", [-0.2, 0.0, 0.35])
def test_peaks_over_a_threshold_fit_the_tail(shape):
    rng, scale = np.random.default_rng(3), 900.0
    rarity = rng.exponential(size=4000)
    tokens = 2000 + (scale * rarity if shape == 0 else scale / shape * np.expm1(shape * rarity))
    body = rng.uniform(100, 2000, size=36_000)
    for cap in (math.inf, float(np.quantile(tokens, 0.9))):
        everything = np.concatenate([body, np.minimum(tokens, cap)])
        found = pareto_tail(everything, everything >= cap, 2000.0)
        assert found.shape == pytest.approx(shape, abs=3 * found.shape_error + 0.02)
        # The mean excess is what says how far a rollout's last response goes.
        assert found.scale / (1 - found.shape) == pytest.approx(scale / (1 - shape), rel=0.2)


def test_a_fitted_tail_is_a_family_that_ends_at_twice_the_longest_seen():
    seen = draw(HEAVY, prompts=700)
    longest = int(seen.outcomes["response_tokens"].max())
    model = fit_lengths(seen)
    assert f"none above {2 * longest}, twice the longest" in " ".join(model.notes)
    heavy = {"tail": model.tail.model_copy(update={"shape": 0.9}), "max_response_tokens": 10**6}
    drawn = draw(model.model_copy(update=heavy), prompts=3000).outcomes["response_tokens"].max()
    assert 1.5 * longest < drawn <= 2 * longest
    rng = np.random.default_rng(0)
    assert np.std([model.drawn(rng).tail.shape for _ in range(500)]) == pytest.approx(model.tail.shape_error, rel=0.1)
    assert (unbounded := with_tail(1500.0, 0.3)).drawn(rng) is unbounded
    tokens = seen.outcomes["response_tokens"].to_numpy(float)
    anew = with_tail_drawn(tokens, np.zeros(len(tokens), bool), rng)
    assert (anew != tokens).sum() == 3
    assert np.sort(tokens)[-4] < anew[anew != tokens].min() <= anew.max() <= 2 * longest


def test_too_few_long_responses_have_no_tail():
    tokens = np.random.default_rng(0).lognormal(6, 1, size=400)
    assert pareto_tail(tokens, np.zeros(400, bool), 2000.0) is None
    cut = np.minimum(np.random.default_rng(0).lognormal(6, 1, size=4000), 500.0)
    assert pareto_tail(cut, cut >= 500.0, 500.0) is None
    for prompts, none in ((30, True), (700, False)):
        model = fit_lengths(draw(HEAVY, prompts=prompts))
        assert (model.tail is None) == none
        assert any("Pareto tail" in note for note in model.notes) != none


# Measured data


def measured(shared_data):
    """(name, trace) of each measured set of lengths: RL rollouts, reasoning models, production."""
    rollouts = pd.read_parquet(shared_data / "rl_rollout_lengths.parquet")
    for name, g in rollouts.groupby("workload"):
        cap = 16000 if "video" in name else 20480
        yield name, of_samples(
            g["response_tokens"], cap, prompt_id=g["prompt_id"].to_numpy(), sample=g["sample"].to_numpy(),
            rl_step=g["step"].to_numpy(), prompt_tokens=g["prompt_tokens"],
        )  # fmt: skip
    models = pd.read_csv(shared_data / "reasoning_lengths_by_model.csv").query("tokens_completion > 0")
    for name, g in models.groupby("model_name"):
        ids = {"prompt_id": g["prompt_id"].to_numpy(), "sample": g["run_number"].to_numpy()}
        yield name, of_samples(g["tokens_completion"], int(g["max_tokens"].max()), **ids)
    pdf = pd.read_csv(shared_data / "deepseek_r1_output_tokens_pdf.csv.gz")
    ranks = np.searchsorted(pdf["prob"].cumsum(), (np.arange(20_000) + 0.5) / 20_000)
    lengths = pdf["output_tokens"].to_numpy()[np.minimum(ranks, len(pdf) - 1)]
    yield "production", of_samples(lengths, 32768, prompt_id=np.arange(20_000).astype(str), sample=0)


def test_the_longest_unseen_lie_within_the_tail(shared_data):
    rows = pd.read_parquet(shared_data / "rl_rollout_lengths.parquet").query("workload == 'dapo_qwen2.5_32b_math_A'")
    steps = sorted(rows["step"].unique())
    seen, unseen = rows[rows["step"].isin(steps[::2])], rows[rows["step"].isin(steps[1::2])]
    ids = {"prompt_id": seen["prompt_id"].to_numpy(), "sample": seen["sample"].to_numpy()}
    model = fit_lengths(of_samples(seen["response_tokens"], 20480, rl_step=seen["step"].to_numpy(), **ids))
    straight = model.model_copy(update={"tail": None})

    def longest(of):
        drawn = draw(of, steps=60, prompts=64).outcomes
        return drawn.groupby("rl_step")["response_tokens"].max().quantile([0.05, 0.95]).tolist()

    measured = unseen.groupby("step")["response_tokens"].max()
    (low, high), (_, straight_high) = longest(model), longest(straight)
    assert measured.between(low, high).all()
    assert straight_high < measured.max()


def test_drawn_lengths_are_like_measured_ones(shared_data):
    for name, trace in measured(shared_data):
        size = shape_of(trace)[0]["group_size"]
        model = fit_lengths(trace, prompt_share=None if size > 1 else 0.9)
        again = draw(model, prompts=2500, group=size, seed=7)
        # A model answered 19 prompts, so its quantiles lie on few, wide steps.
        many = len(trace.outcomes) > 1000
        for level, off in ((50, 0.06), (75, 0.06), (90, 0.06), *([(99, 0.1)] if many else [])):
            now, was = (metrics.length_percentiles(each, [level]) for each in (again, trace))
            assert now == pytest.approx(was, rel=off if many else 0.15), (name, level)
        now, was = ((each.outcomes["finish_reason"] == "length").mean() for each in (again, trace))
        assert now == pytest.approx(was, abs=0.02), name
        if size > 1:
            assert metrics.prompt_share(again) == pytest.approx(metrics.prompt_share(trace), abs=0.03), name


# The command and the traces it made


def test_command_writes_valid_trace_and_its_model(run, tmp_path):
    out = tmp_path / "t"
    shape = ("--rl-steps", 3, "--prompts", 8, "--workers", 2)
    code, text, _ = run("--regime", "reasoning", *shape, "--out", out, "--json")
    assert code == 0
    result = json.loads(text)
    trace = read(out)
    assert result["num_responses"] == len(trace.outcomes) == 3 * 8 * 8
    assert result["num_tokens"] == metrics.num_tokens(trace)
    assert (trace.manifest.kind, trace.manifest.num_workers, trace.manifest.group_size) == ("synthetic", 2, 8)
    assert LengthModel.load(out / "lengths.json") == REGIMES["reasoning"]
    assert metrics.prompt_share(trace) > 0.7


def test_like_a_trace_takes_its_lengths_and_shape(run, tmp_path):
    source = draw(HEAVY.with_changes(prompt_share=0.6), steps=3, prompts=50, group=6, num_workers=5)
    source.write(tmp_path / "source")
    assert run("--like", tmp_path / "source", "--out", tmp_path / "t")[0] == 0
    trace = read(tmp_path / "t")
    assert list(shape_of(trace)[0].values()) == list(shape_of(source)[0].values()) == [3, 50, 6]
    assert trace.outcomes["response_tokens"].median() == pytest.approx(
        source.outcomes["response_tokens"].median(), 0.25
    )
    assert trace.manifest.num_workers == 5


def test_a_traces_model_draws_it_again(run, tmp_path):
    args = ["--rl-steps", 2, "--prompts", 5, "--median", 300, "--seed", 4]
    assert run(*args, "--out", tmp_path / "one")[0] == 0
    again = ["--like", tmp_path / "one" / "lengths.json", "--rl-steps", 2, "--prompts", 5, "--seed", 4]
    assert run(*again, "--out", tmp_path / "two")[0] == 0
    assert read(tmp_path / "one").outcomes.equals(read(tmp_path / "two").outcomes)
    assert any("median 300" in note for note in LengthModel.load(tmp_path / "one" / "lengths.json").notes)


def test_like_a_csv_needs_the_prompt_share(run, tmp_path):
    csv = tmp_path / "lengths.csv"
    csv.write_text("\n".join(str(20 + 7 * i) for i in range(60)))
    assert run("--like", csv, "--out", tmp_path / "t")[0] == 2
    code, text, _ = run("--like", csv, "--prompt-share", 0.9, "--group-size", 4, "--out", tmp_path / "t", "--json")
    assert code == 0
    assert json.loads(text)["num_responses"] == 240


@pytest.mark.parametrize(
    ("args", "facts"),
    [
        (["--prompts", 0], ["prompts", "0"]),
        (["--prompt-share", 2], ["prompt_share"]),
        (["--regime", "chat"], ["chat", *REGIMES]),
        (["--regime", "reasoning", "--like", TRACES / "tiny"], ["--regime", "--like"]),
        (["--like", "nowhere"], ["nowhere"]),
        (["--like", "nowhere.json"], ["nowhere.json"]),
    ],
)
def test_a_wrong_option_writes_nothing(run, tmp_path, args, facts):
    code, out, err = run(*args, "--out", tmp_path / "t")
    assert (code, out, [fact for fact in facts if fact not in err]) == (2, "", [])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_not_overwritten(run, tmp_path):
    assert run("--prompts", 2, "--out", tmp_path / "t")[0] == 0
    assert run("--prompts", 3, "--out", tmp_path / "t")[0] == 2
    assert read(tmp_path / "t").workload["prompt_id"].nunique() == 8


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_trace_is_what_its_command_makes(run, tmp_path, name):
    assert run(*SHIPPED[name].split(), "--out", tmp_path / name)[0] == 0
    made, shipped = read(tmp_path / name), read(TRACES / name)
    assert made.workload.equals(shipped.workload)
    assert made.outcomes.equals(shipped.outcomes)
    assert made.manifest == shipped.manifest
