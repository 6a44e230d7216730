"""Calibration recovers its inputs, sums are unbiased under heavy-tailed noise, gaps are reported."""

from functools import cache

import numpy as np
import pandas as pd
import pytest

from tests.refused import refused
from tests.traces_of_lengths import iterations
from tltlab.calibration.api import calibrate
from tltlab.calibration.costs import fit_trace
from tltlab.calibration.iterations import recorded_rows
from tltlab.costs.linear import FAR_TOKENS, LinearCosts
from tltlab.errors import ConfigError
from tltlab.lengths.generate import log_normal
from tltlab.strategy import Strategy
from tltlab.traces.schema import Manifest
from tltlab.traces.trace import Trace

TRUTH = LinearCosts(
    base_s=3.5e-3, per_request_s=1.2e-4, per_token_s=1.1e-4, per_context_s=1e-8, sd_base_s=2e-4, sd_idle_s=0.0,
    draft_level_s=1e-4, draft_level_per_request_s=3e-5, prefill_per_token_s=1e-4,
)  # fmt: skip


@cache
def rollout(depths=(0, 1, 2, 4), *, n=1000, steps=2, seed=0, noise="none", truth=TRUTH, most=32):
    """A made-up recording: the batch decays from `most` to 1, 20 iterations share a depth, times are by `truth`."""
    rng = np.random.default_rng(seed)
    parts = []
    for step in range(steps):
        batch = np.maximum(1, np.round(most * np.exp(-4 * np.arange(n) / n))).astype(int)
        asked = np.repeat(rng.choice(depths, n // 20 + 2), 20)[: n + 1]
        depth, following = asked[:-1], asked[1:]
        accepted = [np.minimum(rng.geometric(0.4, b) - 1, d).astype(int) for b, d in zip(batch, depth, strict=True)]
        drafted = np.array([rng.binomial(b, 0.8) * d for b, d in zip(batch, depth, strict=True)])
        prefill = np.where(np.arange(n) % 400 == 0, 640, 0)
        context = batch * (100 + np.arange(n))
        t = truth
        verify = t.base_s + t.per_request_s * batch + t.per_context_s * context
        near, far = np.minimum(batch + drafted, FAR_TOKENS), np.maximum(batch + drafted - FAR_TOKENS, 0)
        verify += t.per_token_s * near + (t.per_token_s if t.far_token_s is None else t.far_token_s) * far
        verify += t.sd_base_s * (depth > 0) + t.prefill_per_token_s * prefill
        draft = following * (t.draft_level_s + t.draft_level_per_request_s * batch)
        draft += t.draft_per_request_s * batch * (following > 0)
        if noise != "none":
            usual = np.exp(rng.normal(0, 0.08, n))
            busy = np.where(rng.random(n) < 0.01, 2 + 5 * rng.pareto(1.5, n), 1) if noise == "outliers" else 1
            verify, draft = verify * usual * busy, draft * usual
        parts.append(iterations(
            rl_step=step, duration=verify + draft, draft_duration=draft, batch=batch, context_tokens=context,
            prefill_tokens=prefill, draft_depth=depth, num_drafted=drafted, accepted_per_request=accepted,
            next_draft_depth=following,
        ))  # fmt: skip
    lengths = log_normal(prompts=1, group_size=1, rl_steps=steps)
    tables = {"workload": lengths.workload, "outcomes": lengths.outcomes, "iterations": pd.concat(parts)}
    return Trace.from_tables(Manifest(kind="recorded", num_workers=1), tables)


@cache
def fitted():
    return calibrate(rollout())


def same_terms(found, truth, rel=1e-6):
    for term, value in truth.model_dump(exclude_none=True).items():
        if term.endswith("_s"):
            assert getattr(found, term) == pytest.approx(value, rel=rel, abs=1e-9), term


def test_without_noise_the_costs_are_found():
    same_terms(fitted().costs, TRUTH)


def test_search_per_request_differs_from_levels():
    truth = TRUTH.model_copy(update={"draft_per_request_s": 4e-5})
    costs = calibrate(rollout(truth=truth)).costs
    same_terms(costs, truth, rel=1e-4)
    for depth in (1, 4):
        own, known = (c.iteration(Strategy.chain("ngram", depth)) for c in (costs, truth))
        assert own.draft_s(20) == pytest.approx(known.draft_s(20), rel=1e-4)
        assert known.draft_s(20) - TRUTH.iteration(Strategy.chain("ngram", depth)).draft_s(20) == pytest.approx(8e-4)
    noisy = calibrate(rollout(truth=truth, noise="usual", steps=4)).costs
    assert noisy.draft_per_request_s == pytest.approx(4e-5, rel=0.2)


def test_many_tokens_at_once_may_take_less_each():
    truth = TRUTH.model_copy(update={"far_token_s": 6e-5})
    trace = rollout((0, 1, 2, 4, 8), n=1500, truth=truth, most=96)
    costs = calibrate(trace).costs
    assert costs.per_token_s == pytest.approx(1.1e-4, rel=1e-3)
    assert costs.far_token_s == pytest.approx(6e-5, rel=1e-3)
    seconds = costs.identified_s(recorded_rows(trace.iterations))
    assert seconds == pytest.approx(trace.iterations["duration"].to_numpy(), rel=1e-3)
    deep = Strategy.chain("ngram", 8)
    tokens = 96 * 9
    more_s = 1.1e-4 * FAR_TOKENS + 6e-5 * (tokens - FAR_TOKENS) - 1.1e-4 * tokens
    assert truth.iteration(deep).seconds(96, 0) - TRUTH.iteration(deep).seconds(96, 0) == pytest.approx(more_s)
    assert fitted().costs.far_token_s is None, "too few iterations of many tokens tell nothing of them"


def test_drafts_of_one_depth_hide_the_search():
    truth = TRUTH.model_copy(update={"draft_per_request_s": 4e-5})
    found = calibrate(rollout((0, 2), truth=truth))
    costs = found.costs
    assert costs.draft_per_request_s == 0.0
    assert costs.draft_level_per_request_s == pytest.approx(TRUTH.draft_level_per_request_s + 4e-5 / 2, rel=1e-4)
    assert any("drafts of one depth only" in note for note in found.notes)


def test_sums_are_unbiased_under_heavy_tailed_noise():
    for seed in range(3):
        found = fit_trace(rollout(seed=seed, noise="outliers"), most_folds=0)
        assert found.sums["predicted_s"].sum() == pytest.approx(found.sums["measured_s"].sum(), rel=1e-6)
        regimes = found.residuals.set_index("regime")
        assert abs(regimes.loc["plain", "bias"]) < 0.1
        assert abs(regimes.loc["speculative", "bias"]) < 0.1


def test_outliers_do_not_bend_the_shape():
    quiet, noisy = (calibrate(rollout(seed=5, noise=noise)).costs for noise in ("usual", "outliers"))
    ratio = {t: getattr(noisy, t) / getattr(quiet, t) for t in ("base_s", "per_request_s", "per_token_s")}
    # Outliers raise the level of all terms alike.
    assert max(ratio.values()) / min(ratio.values()) < 1.1


def test_plain_trace_leaves_terms_of_speculation_unknown():
    found = calibrate(rollout((0,)))
    assert found.acceptance is None
    assert found.costs.per_request_s == pytest.approx(TRUTH.per_request_s + TRUTH.per_token_s)
    for term in ("per_token_s", "sd_base_s", "sd_idle_s", "draft_level_s", "draft_level_per_request_s"):
        assert getattr(found.costs, term) is None
    assert any("per_token_s is inside per_request_s" in note for note in found.notes)


def test_drafting_time_not_recorded_stays_in_other_terms():
    trace = rollout((0, 2))
    unknown = trace.replace(iterations=trace.iterations.assign(draft_duration=None))
    found = calibrate(unknown)
    assert (found.costs.draft_level_s, found.costs.draft_level_per_request_s) == (0.0, 0.0)
    assert any("not recorded apart" in note for note in found.notes)
    assert abs(fit_trace(unknown, most_folds=0).sums["bias"]).max() < 0.02


def test_an_idle_drafters_recorded_time_is_measured():
    table = rollout((0, 2)).iterations
    idle_s = 5e-4 * (table["next_draft_depth"] == 0)
    table = table.assign(draft_duration=table["draft_duration"] + idle_s, duration=table["duration"] + idle_s)
    assert calibrate(rollout((0, 2)).replace(iterations=table)).costs.sd_idle_s == pytest.approx(5e-4)


def test_an_idle_drafter_is_found_beside_steps_without():
    trace = rollout((0, 2))
    table = trace.iterations
    bare = rollout((0,), steps=3, seed=1).iterations.query("rl_step == 2").assign(rl_step=1)
    loaded = table.query("rl_step == 0")
    loaded = loaded.assign(duration=loaded["duration"] + 5e-4 * (loaded["draft_depth"] == 0))
    found = calibrate(trace.replace(iterations=pd.concat([loaded, bare])))
    assert found.costs.sd_idle_s == pytest.approx(5e-4, rel=1e-3)
    assert found.costs.base_s == pytest.approx(TRUTH.base_s, rel=1e-3)


def test_acceptance_is_counted_per_drafter_and_depth():
    model = fitted().acceptance
    assert sorted(model.at(1).bands[0].drafters_by_depth["ngram"]) == [1, 2, 4]
    cell = model.at(8).bands[0].drafters_by_depth["ngram"][4]
    assert cell.accepted[0] == pytest.approx(0.4, abs=0.03)
    assert cell.drafted == pytest.approx(3.2, abs=0.1)


def test_acceptance_of_large_and_small_batches_differs():
    trace = rollout((0, 4))
    table = trace.iterations
    small = table["batch"] <= 4
    lists = [a if keep else np.zeros_like(a) for a, keep in zip(table["accepted_per_request"], small, strict=True)]
    totals = [int(np.sum(a)) for a in lists]
    changed = trace.replace(iterations=table.assign(accepted_per_request=lists, num_accepted=totals))
    few, many = (calibrate(changed).acceptance.at(n).tokens_per_iteration(Strategy.chain("ngram", 4)) for n in (2, 20))
    assert few > 2
    assert many == 1


def test_acceptance_from_totals_keeps_the_mean():
    trace = rollout((2,))
    bare = trace.replace(iterations=trace.iterations.assign(accepted_per_request=None))
    full, totals = (calibrate(t).acceptance for t in (trace, bare))
    means = [m.at(1).bands[0].drafters_by_depth["ngram"][2].accepted @ np.arange(3) for m in (full, totals)]
    assert means[0] == pytest.approx(means[1], abs=1e-6)


def test_a_trace_without_iterations_cannot_be_calibrated():
    with refused(ConfigError, naming=("iterations",)):
        calibrate(log_normal(prompts=2))
