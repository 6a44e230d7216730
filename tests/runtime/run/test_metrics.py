"""The figures of an RL step, from rows as a run makes them."""

import math
from itertools import combinations

import numpy as np
import pytest

from tltlab.runtime.engine.generation import GenerationRequest
from tltlab.runtime.recipe.sections import EvalConfig
from tltlab.runtime.run.rows import StepReport, heldout_figures, step_metrics, step_rows

from ..rollout.scripted_engines import response, rolled

LENGTHS = [[4, 8], [16, 2]]
"""Response tokens of the two samples of prompts p0, on worker 0, and p1, on worker 1."""


def report(**fields):
    settings = {
        "rl_step": 3, "policy": "none", "reward_mean": 0.5, "num_tokens": 30, "rollout_s": 10.0, "reward_s": 0.5,
        "inference_s": 1.0, "train_s": 2.0, "sync_s": 0.5, "recorder_s": 0.07,
        "metrics": {"mismatch_kl": 0.001, "mismatch_abs": 0.02, "loss": -0.1, "drift_kl": 0.01},
    }  # fmt: skip
    return StepReport(**settings | fields)


def iteration(worker, number, t_start, duration, accepted):
    speculates = accepted is not None
    return {
        "rl_step": 3, "worker": worker, "iteration": number, "t_start": t_start, "duration": duration, "batch": 2,
        "context_tokens": 20, "prefill_tokens": 0, "draft_depth": 4 if speculates else 0,
        "top_k": 1 if speculates else 0, "tokens_to_verify": 5 if speculates else 1,
        "drafter": "ngram" if speculates else None, "num_drafted": 8 if speculates else 0,
        "num_accepted": sum(accepted or []), "num_generated": 2 + sum(accepted or []),
        "accepted_per_request": accepted,
    }  # fmt: skip


def rows_of(step, *, speculates=False, drafter=None):
    """Worker 0 decodes for 5 s of the rollout's 10, worker 1 for all of it."""
    keys = [(3, f"p{n}", sample, 0) for n in range(2) for sample in range(2)]
    requests = [GenerationRequest(key=key, prompt_token_ids=[1, 2, 3], max_response_tokens=16) for key in keys]
    parts = []
    for n, busy in enumerate((5.0, 10.0)):
        responses = [
            response(
                (3, f"p{n}", sample, 0),
                list(range(length)),
                finish_reason="length" if length == 16 else "stop",
                t_finish=busy * (sample + 1) / 2,
            )
            for sample, length in enumerate(LENGTHS[n])
        ]
        iterations = [iteration(n, 0, 0.0, busy, [3, 1] if speculates else None)]
        parts.append(rolled(responses, busy, iterations=iterations))
    rewards = dict(zip(keys, [1.0, 0.0, 1.0, 1.0], strict=True))
    given = {"rewards": rewards, "epochs": dict.fromkeys(keys, 0), "policy_version": 3, "t_start": 1.0}
    return step_rows(step, [requests[:2], requests[2:]], parts, **given, drafter=drafter or {})


def test_a_steps_figures_are_those_of_its_rows():
    found = step_metrics(report(), rows_of(report()))
    lengths = [4, 8, 16, 2]
    expected = {"rollout/bubble_fraction": 0.25, "rollout/tokens_per_s": 3.0, "recorder/share": 0.07 / 14}
    expected |= {"length/mean": 7.5, "length/max": 16, "length/truncated_fraction": 0.25}
    expected |= {f"length/p{p}": np.percentile(lengths, p) for p in (50, 90, 99)}
    expected |= {"reward/mean": 0.5, "reward/std": np.std([1, 0, 1, 1])}
    expected |= {"time/rollout_s": 10.0, "time/train_s": 2.0, "time/step_s": 14.0}
    expected |= {"mismatch/kl": 0.001, "mismatch/abs": 0.02, "train/loss": -0.1, "train/drift_kl": 0.01}
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_speculation_has_an_accept_length():
    found = step_metrics(report(), rows_of(report(), speculates=True))
    assert found["rollout/mean_accept_length"] == pytest.approx(3.0)
    assert found["rollout/tail_fraction"] == 0.0


def test_a_step_without_requests_has_figures():
    """As where every response is known from an epoch before."""
    idle, given = rolled([]), {"policy_version": 3, "t_start": 1.0, "drafter": {}}
    rows = step_rows(report(), [], [idle, idle], rewards={}, epochs={}, **given)
    found = step_metrics(report(), rows)
    assert (found["reward/mean"], found["time/step_s"]) == (0.5, 14.0)
    assert not any(name.startswith(("rollout/", "length/")) for name in found)


def test_unknown_figures_are_left_out():
    step = report(metrics={"mismatch_kl": math.nan, "loss": math.inf, "drift_kl": 0.0})
    found = step_metrics(step, rows_of(step))
    assert found.keys().isdisjoint({"rollout/mean_accept_length", "drafter/age", "mismatch/kl", "train/loss"})
    assert all(isinstance(value, float) and math.isfinite(value) for value in found.values())


def test_drafter_age_and_step_time_are_figures():
    step = report(step_s=20.0, record_s=0.13)
    rows = rows_of(step, drafter={"steps": [{"drafter_version": 2, "drafter_age": 1, "drafter_updates": 40}]})
    found = step_metrics(step, rows)
    assert (found["drafter/age"], found["drafter/updates"]) == (1, 40)
    assert found["time/step_s"] == 20.0
    assert found["recorder/share"] == pytest.approx(0.2 / 20)


def test_a_cut_response_has_no_length():
    rows = rows_of(report())
    rows["outcomes"][2] |= {"finish_reason": "abort", "reward": None}
    found = step_metrics(report(), rows)
    assert (found["length/max"], found["length/truncated_fraction"]) == (8, 0)
    assert found["rollout/tokens_per_s"] == pytest.approx(3.0)


def test_a_worker_without_requests_is_bubble():
    rows = rows_of(report())
    rows["outcomes"] = [row | {"worker": 0} for row in rows["outcomes"]]
    rows["iterations"] = [row for row in rows["iterations"].to_pylist() if row["worker"] == 0]
    rows["spans"] = [row | {"kind": "idle"} if row["lane"] == "worker 1" else row for row in rows["spans"]]
    assert step_metrics(report(), rows)["rollout/bubble_fraction"] == pytest.approx(0.75)


def test_shares_of_graphs_are_reported_where_known():
    rows = rows_of(report())
    assert not any(name.startswith("graphs/") for name in step_metrics(report(), rows))
    ran_in = [
        {**row, "graph": kind} for row, kind in zip(rows["iterations"].to_pylist(), ("full", "piecewise"), strict=True)
    ]
    found = step_metrics(report(), {**rows, "iterations": ran_in})
    assert [found[f"graphs/{kind}"] for kind in ("full", "piecewise", "eager")] == [0.5, 0.5, 0.0]


def test_spans_name_strategies_terms_and_idle_time():
    kinds = [("none", 0), ("ngram", 4), ("ngram", 4), ("ngram", 2), ("none", 0)]
    made = [
        iteration(0, n, float(n), 1.0, [3, 1] if depth else None)
        | {"prefill_tokens": 6 * (n == 0), "draft_depth": depth, "tokens_to_verify": depth + 1, "drafter": drafter}
        for n, (drafter, depth) in enumerate(kinds)
    ]
    training = [
        {"worker": 0, "t_start": t_start, "duration": 1.0, "term": term} for t_start, term in ((7.0, 5), (4.5, 4))
    ]
    given = {"policy_version": 3, "t_start": 0.0, "drafter": {"spot_training": training}}
    rows = step_rows(report(), [], [rolled([], 5.0, iterations=made)], rewards={}, epochs={}, **given)
    names = ("kind", "t_start", "duration", "batch", "detail")
    assert [tuple(row[name] for name in names) for row in rows["spans"] if row["lane"] == "worker 0"] == [
        ("prefill", 0.0, 1.0, 2, None),
        ("speculative_decode", 1.0, 2.0, 2, "ngram:4"),
        ("speculative_decode", 3.0, 1.0, 2, "ngram:2"),
        ("decode", 4.0, 1.0, 2, None),
        ("spot_train", 5.0, 0.5, 0, "term 4"),
        ("idle", 5.5, 1.5, 0, None),
        ("spot_train", 7.0, 1.0, 0, "term 5"),
        ("idle", 8.0, 2.0, 0, None),
    ]


def test_pass_at_k_is_a_mean_over_all_choices():
    rewards = np.random.default_rng(0).choice([-1.0, 0.0, 0.5, 1.0], (6, 5))
    expected = {
        f"reward/heldout/math/pass@{k}": np.mean([max(few) > 0.5 for row in rewards for few in combinations(row, k)])
        for k in (1, 2, 5)
    }
    expected["reward/heldout/math"] = rewards.mean()
    config = EvalConfig(samples=5, pass_at=(1, 2, 5), pass_above=0.5)
    assert heldout_figures("math", rewards.flatten().tolist(), config) == pytest.approx(expected)
