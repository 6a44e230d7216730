"""Stage costs: what they count, where they come from, and how well they fit a recorded run."""

from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refused import refused
from tests.traces_of_lengths import of_samples
from tltlab.calibration.stages import fit_stages, workloads
from tltlab.costs.load import load_stages
from tltlab.costs.stages import InferenceCosts, RewardCosts, StageCosts, StepWorkload, SyncCosts, TrainCosts
from tltlab.errors import ConfigError, TraceError
from tltlab.traces.trace import read

TRACES = Path(__file__).resolve().parents[3] / "traces"
PRESETS = TRACES.parent / "tltlab" / "costs" / "stage_presets"


H100 = {"kind": "roofline", "gpu": "H100", "model": "Qwen2.5-7B", "num_gpus": 8}


def roofline(**fields):
    return load_stages(H100 | fields)


H100_7B = roofline()


def recorded(costs, *, rl_steps=12, noise=0.0, rewards=True):
    """A run whose stages took what `costs` say, times lognormal noise; half of the groups have equal rewards."""
    rng = np.random.default_rng(0)
    n, rows = 16, []
    for step in range(rl_steps):
        length = rng.integers(10, 100 * (1 + step % 5), n)
        differ = rng.random(4).repeat(4) < 0.5
        reward = np.where(differ, np.arange(n) % 2, 1.0) if rewards else np.full(n, np.nan)
        rows += [(step, f"p{i // 4}", i % 4, length[i], reward[i]) for i in range(n)]
    rl_step, prompts, sample, lengths, rewarded = map(list, zip(*rows, strict=True))
    trace = of_samples(
        lengths, 1000, prompt_id=prompts, sample=sample, rl_step=rl_step, prompt_tokens=20, reward=rewarded
    )
    steps = []
    for step, w in workloads(trace).items():
        seconds = {"inference_s": costs.inference.seconds(w), "train_s": costs.train.seconds(w), "sync_s": 0.25}
        noisy = {name: s * np.exp(noise * rng.standard_normal()) for name, s in seconds.items()}
        steps.append({"rl_step": step, "t_start": 0.0, "policy_version": step, "rollout_s": 1.0, **noisy})
    return trace.replace(steps=pd.DataFrame(steps))


def work_of(prompt_tokens, response_tokens, num_updates=1, **columns):
    rows = {"prompt_tokens": prompt_tokens, "response_tokens": response_tokens} | columns
    return StepWorkload.of_rows(pd.DataFrame(rows), num_updates=num_updates)


def test_a_workload_counts_tokens_and_attended_pairs():
    work = work_of([2, 4], [8, 16])
    assert (work.num_responses, work.num_response_tokens, work.num_tokens) == (2, 24, 30)
    assert work.num_pairs == (10**2 + 20**2) / 2


@pytest.mark.parametrize(("rewards", "informative"), [([1, 1, 0, 1], [4, 8]), ([1, None, 1, 1], [1, 2])])
def test_groups_with_equal_rewards_teach_nothing(rewards, informative):
    work = work_of([0] * 4, [1, 2, 4, 8], prompt_id=["a", "a", "b", "b"], reward=rewards)
    assert work.num_tokens == 15
    assert work.informative_tokens == sum(informative)
    assert work.informative_pairs == sum(n**2 for n in informative) / 2


def test_stages_are_linear_in_their_work():
    work = work_of([0, 0], [10, 20], num_updates=3)
    assert InferenceCosts(base_s=1, per_token_s=0.1, per_pair_s=0.01).seconds(work) == pytest.approx(1 + 3 + 2.5)
    assert TrainCosts(base_s=1, per_token_s=1, per_update_s=10).seconds(work) == 1 + 30 + 30
    assert SyncCosts(base_s=0.5, num_bytes=14e9, bytes_per_s=7e9).seconds() == 2.5
    assert RewardCosts(per_response_s=4, per_token_s=0.1).seconds(np.array([10.0, 1.0]), np.array([10, 20])) == 8 + 3


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(1, 50)), min_size=1, max_size=12),
    st.floats(0, 2), st.floats(0, 0.1),
)  # fmt: skip
def test_overlapped_grading_is_a_queue(responses, per_response_s, per_token_s):
    finish, tokens = np.array([f for f, _ in responses]), np.array([n for _, n in responses])
    now = 0.0
    for i in np.argsort(finish, kind="stable"):
        now = max(now, finish[i]) + per_response_s + per_token_s * tokens[i]
    terms = {"per_response_s": per_response_s, "per_token_s": per_token_s}
    overlapped = RewardCosts(when="overlapped", **terms).seconds(finish, tokens)
    assert overlapped == pytest.approx(now - finish.max(), abs=1e-9)
    assert overlapped <= RewardCosts(**terms).seconds(finish, tokens) + 1e-9


def test_roofline_counts_two_flops_per_weight_and_token():
    work = work_of([0], [1000])
    costs = roofline(mfu_inference=0.5, mfu_train=0.5, recompute=False)
    forward = (2 * 7.07e9 * 1000 + 4 * 28 * 3584 * 1000**2 / 2) / (8 * 989e12 * 0.5)
    assert costs.inference.seconds(work) == pytest.approx(forward, rel=1e-3)
    assert costs.train.seconds(work) - costs.train.per_update_s == pytest.approx(3 * forward, rel=1e-3)


def test_a_token_trains_the_experts_that_it_takes():
    dense, experts = (roofline(model=name).train for name in ("Llama-3.1-8B", "Qwen3-30B-A3B"))
    assert experts.per_token_s / dense.per_token_s == pytest.approx(3.04 / 7.5, rel=0.01)
    # All of them are updated.
    assert experts.per_update_s / dense.per_update_s == pytest.approx(30.53 / 8.03, rel=0.01)


def test_recomputation_and_a_reference_cost_a_forward_each():
    plain = roofline(recompute=False)
    twice = roofline(inference_passes=2)
    assert twice.train.per_token_s / plain.train.per_token_s == pytest.approx(4 / 3)
    assert twice.inference.per_token_s / plain.inference.per_token_s == pytest.approx(2)


@pytest.mark.parametrize("name", sorted(path.stem for path in PRESETS.glob("*.json")))
def test_presets_state_where_they_are_from(name):
    assert load_stages(name).provenance


@pytest.mark.parametrize(
    ("costs", "named"),
    [
        ({"train": {"per_token_s": -1e-6}}, ("per_token_s",)),
        ({"reward": {"when": "never"}}, ("reward",)),
        ({"traning": {}}, ("traning",)),
        (H100 | {"num_gpus": 0}, ("num_gpus",)),
        (H100 | {"mfu_train": 1.5}, ("mfu_train",)),
        ("no-such-preset", ("h100x8-qwen2", "5-7b")),
    ],
)
def test_wrong_costs_are_named(costs, named):
    with refused(ConfigError, naming=named):
        load_stages(costs)


def test_fit_finds_costs_that_made_times(tmp_path):
    truth = StageCosts(
        inference=InferenceCosts(per_token_s=1e-3, base_s=2.0),
        train=TrainCosts(per_token_s=3e-3, base_s=0.5, trains="informative"),
    )
    found = fit_stages(recorded(truth))
    costs = found.costs
    assert (costs.inference.per_token_s, costs.inference.base_s) == pytest.approx((1e-3, 2.0), rel=1e-3)
    assert (costs.train.trains, costs.train.per_token_s) == ("informative", pytest.approx(3e-3, rel=1e-3))
    assert costs.sync.seconds() == pytest.approx(0.25)
    assert found.residuals.set_index("stage").loc["all", "worst_error"] < 1e-3
    assert costs.reward is None, "a stage that was not timed is unknown"
    for each in (costs, H100_7B):
        assert load_stages(each.write(tmp_path / "stages.json")) == each


def test_pairs_are_fitted_where_they_show():
    inference = InferenceCosts(per_token_s=1e-3, base_s=1.0, per_pair_s=1e-5)
    found = fit_stages(recorded(StageCosts(inference=inference, train=TrainCosts(base_s=1)), rl_steps=10)).costs
    assert found.inference.per_pair_s == pytest.approx(1e-5, rel=0.02)
    assert found.train.per_pair_s == 0


def test_the_residuals_are_those_of_left_out_steps():
    truth = StageCosts(inference=InferenceCosts(base_s=1.0), train=TrainCosts(per_token_s=1e-3))
    found = fit_stages(recorded(truth, noise=0.1, rewards=False))
    errors = found.residuals.set_index("stage")["mean_error"]
    assert 0.03 < errors["train_s"] < 0.2
    assert "train_s" in found.table()


def test_one_rl_step_gives_costs_without_error():
    truth = StageCosts(inference=InferenceCosts(base_s=1.0), train=TrainCosts(base_s=1.0))
    found = fit_stages(recorded(truth, rl_steps=1))
    assert found.costs.inference.base_s == 0
    assert found.costs.inference.per_token_s > 0
    assert found.residuals["mean_error"].isna().all()


def test_rows_without_stages_are_refused():
    trace = recorded(StageCosts(), rl_steps=2)
    untimed = trace.steps.assign(inference_s=None, train_s=None, sync_s=None)
    for steps, fact in ((None, "steps.parquet"), (untimed, "stage")):
        with refused(TraceError, naming=(fact,)):
            fit_stages(trace.replace(steps=steps))
    with refused(ConfigError, naming=("responses",)):
        work_of([], [])


@cache
def fit_shipped(name):
    if not (TRACES / name).is_dir():
        pytest.skip(f"no traces/{name} here: it is not part of the source distribution")
    return fit_stages(read(TRACES / name))


@pytest.mark.parametrize(("name", "limit"), [("subset-sum-small", 0.11), ("gcd-small", 0.14)])
def test_recorded_runs_are_predicted_better_than_by_constant(name, limit):
    found = fit_shipped(name)
    rows = found.residuals.set_index("stage")
    assert found.costs.train.trains == "informative"
    assert rows.loc["all", "mean_error"] < limit
    assert rows.loc["all", "mean_error"] < 0.7 * rows.loc["all", "constant_error"]
    assert rows.loc["train_s", "mean_error"] < 0.7 * rows.loc["train_s", "constant_error"]


def test_the_cpu_preset_is_what_its_trace_gives():
    preset, fitted = (
        (costs.train.per_token_s, costs.train.base_s, costs.inference.per_token_s, costs.sync.seconds())
        for costs in (load_stages("cpu-small"), fit_shipped("subset-sum-small").costs)
    )
    assert preset == pytest.approx(fitted, rel=1e-2)
