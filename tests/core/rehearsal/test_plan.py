"""The plan of a rehearsal, made before any engine starts."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tltlab
from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.rehearsal.plan import TINY, plan_of, shares
from tltlab.rehearsal.settings import RehearsalConfig
from tltlab.runtime.rollout.played import STOCK, requests_of

TINY_TRACE = Path(__file__).parents[3] / "traces" / "tiny"


@pytest.fixture(scope="module")
def trace():
    return tltlab.read(TINY_TRACE)


def planned(trace, **options):
    chosen = {"policies": "stock,none,ngram:4", "acceptance": "all=geometric:0.7", "responses": 6, "cap": 40}
    model = options.pop("model", "tiny-shape")
    return plan_of(trace, model, RehearsalConfig(**chosen | options))


@given(responses=st.integers(1, 40), cap=st.integers(1, 5000), workers=st.integers(1, 3))
def test_lengths_are_scaled_quantiles(trace, responses, cap, workers):
    by_worker, _, _ = shares(trace, RehearsalConfig(workers=workers, responses=responses, cap=cap))
    assert [len(share) for share in by_worker] == [responses] * workers
    lengths = sorted(length for share in by_worker for length in share)
    assert lengths[-1] == cap
    recorded = trace.select(trace.rl_steps[:1]).outcomes["response_tokens"].to_numpy()
    n = responses * workers
    quantiles = np.quantile(recorded, [(i + 0.5) / n for i in range(n)])
    np.testing.assert_allclose(lengths, np.maximum(1, quantiles * cap / quantiles[-1]), atol=0.51)


def test_lengths_are_the_traces_own_by_default(trace):
    (share,), prompt_tokens, about = shares(trace, RehearsalConfig(rl_step=1))
    step = trace.select([1])
    assert max(share) == step.outcomes["response_tokens"].max()
    assert prompt_tokens == max(8, round(step.workload["prompt_tokens"].median()))
    assert f"{len(share)} responses" in about


def test_rates_are_chances_up_to_each_token(trace):
    plan = planned(trace, policies="stock,none,ngram:3", acceptance="ngram=geometric:0.5")
    assert plan.rates == {STOCK: (), "none": (), "ngram:3": pytest.approx((0.5, 0.25, 0.125))}
    assert (plan.learned, list(plan.granted)) == ([], ["ngram"])


def test_rates_may_be_given_token_by_token(trace):
    plan = planned(trace, policies="stock,none,ngram:2,ngram:3", acceptance="0.8/0.6/0.5/0.2")
    assert plan.rates["ngram:3"] == pytest.approx((0.8, 0.6, 0.5))


def test_drafters_that_are_not_named_keep_their_acceptance(trace):
    policies = "ngram:1,suffix:1,learned:1"
    plan = planned(trace, policies=policies, acceptance="suffix=0.9")
    assert {name: rates[0] for name, rates in plan.rates.items() if rates} == pytest.approx(
        {"ngram:1": 0.42, "suffix:1": 0.9, "learned:1": 0.7}
    )
    assert plan.granted["suffix"] == "0.9"


def test_a_drafter_with_a_network_is_a_head(trace):
    plan = planned(trace, policies="learned:2,ngram:4", acceptance="learned=geometric:0.8,ngram=geometric:0.4")
    assert (plan.learned, list(plan.granted)) == (["learned"], ["learned", "ngram"])
    assert plan.rates["learned:2"] == pytest.approx((0.8, 0.64))


def test_every_policy_meets_the_same_requests(trace):
    plan = planned(trace, rounds=3)
    assert [v.rl_step for v in plan.visits] == list(range(9))
    for number in range(3):
        of_round = [v for v in plan.visits if v.round == number]
        assert {v.policy for v in of_round} == set(plan.policies)
        asked = [
            [(r.prompt_token_ids, r.max_response_tokens) for r in requests_of(plan, 0, v, list(plan.lengths[0]))]
            for v in of_round
        ]
        assert asked[0] == asked[1] == asked[2]


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"policies": "beg-mab-suffix,learned:2", "acceptance": "geometric:0.7"}, ("learned", "suffix")),
        (
            {"policies": "beg-mab-learned", "acceptance": "learned=geometric:0.8"},
            ("beg-mab-learned", "learned", "suffix"),
        ),
        ({"acceptance": "ngram=seer-siblings"}, ("ngram:4", "drafter", "ngram", "request")),
        ({"acceptance": "geometric:1.5"}, ("1.5",)),
        ({"acceptance": "0.5/0.6/0.4/0.1"}, ("0.5/0.6/0.4/0.1",)),
        ({"acceptance": "1.2/0.6/0.4/0.1"}, ("1.2/0.6/0.4/0.1",)),
        ({"acceptance": "nan/0.6/0.4/0.1"}, ("nan/0.6/0.4/0.1",)),
        ({"policies": "none,learned:8x4/48"}, ("learned:8x4/48",)),
        ({"policies": "none,typo:4"}, ("typo", "ngram")),
        ({"policies": "stock,stock"}, (STOCK,)),
        ({"rl_step": 99}, (99,)),
        ({"gpus": 64}, (64,)),
        ({"model": "Llama-3.3-70B"}, ("Llama-3.3-70B", "missing")),
        ({"model": "Qwen3-30B-A3B"}, ("Qwen3-30B-A3B", "config.json")),
        ({"model": "nope"}, ("nope", "Qwen2.5-7B")),
    ],
)
def test_what_cannot_be_played_is_refused(trace, options, facts):
    with refused(ConfigError, naming=facts):
        planned(trace, **options)


def test_a_model_may_be_a_config_file(trace, tmp_path):
    config = planned(trace).config
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = planned(trace, model=str(tmp_path))
    assert plan.config == config
    assert plan.kv_token_bytes == TINY.kv_bytes_per_token
