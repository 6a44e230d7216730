"""The trained length of a drafter, found in drafts and in recordings, or left out where these do not tell one."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from tltlab.acceptance.base import RequestArrays
from tltlab.acceptance.context import ContextAcceptance, fit_trained_length
from tltlab.acceptance.load import load_acceptance
from tltlab.acceptance.measured import MeasuredAcceptance
from tltlab.calibration.acceptance import fit_kind
from tltlab.lengths.generate import log_normal
from tltlab.policies.policy import Policy
from tltlab.policies.specs import FixedSpec
from tltlab.sim import simulate
from tltlab.strategy import Strategy
from tltlab.traces.schema import KEY

DEPTH = 4


def drafts_of(text, *, spread=0.0, num=40, longest=12_000, seed=0):
    """Drafts of responses whose lengths differ, behind prompts of 100 tokens, as the model's chances have them."""
    rng, model = np.random.default_rng(seed), load_acceptance(text)
    strategy, parts = Strategy.chain("learned", DEPTH), []
    for response in range(num):
        at, level = 0, float(np.exp(spread * rng.standard_normal()))
        positions, accepted = [], []
        while at < longest * (response + 1) / num:
            now = RequestArrays(np.zeros(1), np.array([float(at)]), np.zeros(1), 100.0)
            kept = np.minimum(1.0, model.survival(strategy, now)[0] * level)
            positions.append(at)
            accepted.append(int((rng.random() < kept).sum()))
            at += 20 * (accepted[-1] + 1)  # Drafts further apart than in a recording: as telling, and fewer.
        columns = {"drafter": "learned", "reach": DEPTH, "generated_tokens": positions, "accepted": accepted}
        parts.append(pd.DataFrame(columns).assign(**dict(zip(KEY, (0, f"p{response}", 0, 0), strict=True))))
    return pd.concat(parts, ignore_index=True)


def fitted(drafts):
    return fit_trained_length(
        response=drafts.groupby(list(KEY)).ngroup().to_numpy(),
        context_tokens=100.0 + drafts["generated_tokens"].to_numpy(),
        reach=drafts["reach"].to_numpy(),
        accepted=drafts["accepted"].to_numpy(),
    )


@pytest.mark.parametrize("trained", [700, 2000, 5000])
@pytest.mark.parametrize("spread", [0.0, 0.1])
def test_the_trained_length_of_drafts_is_found(trained, spread):
    drafts = drafts_of(f"0.8/0.5/0.3/0.2@{trained}", spread=spread)
    found = fitted(drafts)
    assert found is not None
    assert found.trained_tokens == pytest.approx(trained, rel=0.15)
    assert found.low <= found.trained_tokens <= found.high
    if not spread:
        assert found.low <= trained <= found.high
        assert found.chances[:2] == pytest.approx([0.8, 0.625], abs=0.03)


@pytest.mark.parametrize("text", ["0.7", "0.7@11000"])
@pytest.mark.parametrize("spread", [0.0, 0.2])
def test_no_length_is_found_where_nothing_falls(text, spread):
    for seed in range(3):
        drafts = drafts_of(text, spread=spread, seed=seed)
        assert fitted(drafts) is None


def test_a_few_responses_tell_nothing():
    drafts = drafts_of("0.8@700", num=5)
    assert fitted(drafts) is None


def recorded(acceptance, drafter="learned"):
    """A simulated recording of long responses."""
    lengths = log_normal(prompts=8, group_size=4, rl_steps=1, median=1500, cap=10_000, workers=1)
    policy = Policy(selector=FixedSpec(strategy=Strategy.chain(drafter, DEPTH)))
    run = simulate(lengths, policy, acceptance=acceptance, workers=1, mode="sampled", record_iterations=True)
    assert run.trace is not None
    return run.trace


def test_a_recording_tells_its_drafters_trained_length():
    fit = fit_kind(recorded("learned=0.7@1k"))
    assert isinstance(fit.model, ContextAcceptance)
    assert fit.model.trained_tokens == pytest.approx(1024, rel=0.1)
    assert any(f"{fit.model.trained_tokens:g} tokens" in note for note in fit.notes)
    chain = Strategy.chain("learned", DEPTH)
    tokens = [fit.model.at(batch).at_context(500.0).tokens_per_iteration(chain) for batch in (1, 30)]
    assert tokens == pytest.approx([load_acceptance("0.7").tokens_per_iteration(chain)] * 2, rel=0.02)
    assert load_acceptance(fit.model.model_dump(mode="json")) == fit.model


@pytest.mark.parametrize(("acceptance", "drafter"), [("learned=0.7", "learned"), ("ngram=0.7@1k", "ngram")])
def test_a_recording_without_one_keeps_its_measurement(acceptance, drafter):
    fit = fit_kind(recorded(acceptance, drafter))
    assert isinstance(fit.model, MeasuredAcceptance)
    assert not any("context" in note for note in fit.notes)
