"""The audit of losslessness: its statistics on made-up samples, its exact distributions, and real engines."""

import json
from collections import Counter
from contextlib import nullcontext
from itertools import product

import numpy as np
import pytest
import torch
from typer import Typer
from typer.testing import CliRunner

from bench.vllm.asynchronous import asynchronous
from tests.refused import refused
from tests.runtime.stock_sampling import unfixed_sampling
from tltlab.console import JSON, running
from tltlab.errors import ConfigError
from tltlab.runtime.audit.exact import ExactModel, Sampling, probabilities
from tltlab.runtime.audit.models import EOS
from tltlab.runtime.audit.run import (
    COMPOSITIONS,
    DEPTHS,
    DRAFTERS,
    FILTERS,
    TEMPERATURES,
    ChiSquare,
    cases,
    cells_check,
    combined,
    covering,
    ranks_check,
    rounds,
    run_plan,
)
from tltlab.runtime.cli.audit import audit, vllm_settings
from tltlab.runtime.models.measure import sample

PROMPT = (0, 1, 2, 3, 1, 0)


@pytest.fixture(scope="session")
def exact(tiny_models):
    return ExactModel(tiny_models.target)


def draw(joint, num, rng):
    counts = rng.multinomial(num, list(joint.values()))
    return Counter({cell: int(n) for cell, n in zip(joint, counts, strict=True) if n})


def test_samples_of_the_distribution_fail_as_stated(exact):
    joint = exact.joint(PROMPT, Sampling(temperature=1.0), 4)
    rng = np.random.default_rng(0)
    p_values = np.array([cells_check(draw(joint, 2048, rng), joint).p_value for _ in range(1500)])
    for level in (0.5, 0.1, 0.01):
        assert np.mean(p_values < level) == pytest.approx(level, abs=4 * np.sqrt(level / 1500))


def test_a_shift_of_five_percent_is_caught(exact):
    joint = exact.joint(PROMPT, Sampling(temperature=0.9), 3)
    rng = np.random.default_rng(1)
    half = set(list(joint)[::2])
    mass = sum(joint[cell] for cell in half)
    check = cells_check(draw(joint, 8192, rng), joint)
    assert check.detectable_tv(1e-4) < 0.05
    # The hardest kind: the same factor for every cell of one half, another for the other half.
    tv = check.detectable_tv(1e-4)
    shifted = {c: p * (1 + tv / mass if c in half else 1 - tv / (1 - mass)) for c, p in joint.items()}
    caught = [cells_check(draw(shifted, 8192, rng), joint).p_value < 1e-4 for _ in range(400)]
    assert np.mean(caught) > 0.87


def test_what_cannot_happen_fails_whatever_the_rest():
    assert cells_check({(0,): 500, (1,): 500, (2,): 1}, {(0,): 0.5, (1,): 0.5}).p_value == 0.0
    impossible = ranks_check(np.array([0, 1]), np.array([[0.5, 0.5], [1.0, 0.0]]), np.array([0, 0]))
    assert impossible.p_value == 0.0


def test_three_samples_are_too_few_to_fail():
    few = cells_check({(0,): 1, (1,): 2}, {(0,): 0.3, (1,): 0.7})
    assert (few.dof, few.p_value, few.detectable_tv(1e-3)) == (0, 1.0, 1.0)


def test_independent_checks_add_up():
    parts = [ChiSquare(statistic=s, dof=d, num_samples=n) for s, d, n in ((3.0, 2, 10), (4.0, 5, 20))]
    assert combined(parts) == ChiSquare(statistic=7.0, dof=7, num_samples=30)


def token_ranks(rng, temperature, num):
    """Ranks of `num` tokens sampled at `temperature` from random distributions, checked as if it were 1."""
    logits = -np.sort(-rng.normal(size=(num, 5)), axis=1)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    tempered = np.exp(logits / temperature)
    cumulative = np.cumsum(tempered, axis=1) / tempered.sum(1, keepdims=True)
    ranks = np.minimum((rng.random((num, 1)) > cumulative).sum(1), 4)
    return ranks_check(ranks, p, np.arange(num) % 10)


def test_ranks_show_a_temperature_off_by_a_fifth():
    rng = np.random.default_rng(2)
    p_values = np.array([token_ranks(rng, 1.0, 4_000).p_value for _ in range(300)])
    assert np.mean(p_values < 0.1) == pytest.approx(0.1, abs=4 * np.sqrt(0.1 / 300))
    assert all(token_ranks(rng, 1.2, 20_000).p_value < 1e-5 for _ in range(5))


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.6), Sampling(temperature=1.3, top_p=0.9, top_k=3)])
def test_the_exact_joint_is_what_sampling_gives(exact, sampling):
    joint = exact.joint(PROMPT, sampling, 3)
    assert sum(joint.values()) == pytest.approx(1.0)
    assert all(len(cell) == 3 or cell[-1] == EOS for cell in joint)
    if sampling.top_p == 1.0:
        drawn = sample(exact.model, [PROMPT] * 1024, temperature=sampling.temperature, max_tokens=3, seed=3)
        assert cells_check(Counter(map(tuple, drawn)), joint).p_value > 1e-3


def test_the_exact_joint_is_the_product_of_conditionals(exact):
    joint = exact.joint(PROMPT, Sampling(temperature=0.7), 2)
    with torch.no_grad():
        first, second = (
            torch.softmax(exact.model(torch.tensor([ids])).logits[0, -1].double() / 0.7, -1)
            for ids in (PROMPT, (*PROMPT, 2))
        )
    assert joint[2, 3] == pytest.approx(float(first[2] * second[3]), rel=1e-6)
    assert joint[EOS,] == pytest.approx(float(first[EOS]), rel=1e-6)


def test_filters_are_those_of_vllm():
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    logits = torch.randn(200, 5, generator=torch.Generator().manual_seed(0)) * 2
    for top_p, top_k in FILTERS:
        ours, sure = probabilities(logits, Sampling(temperature=0.9, top_p=top_p, top_k=top_k))
        k = torch.full((200,), top_k or 5)
        theirs = apply_top_k_top_p_pytorch((logits / 0.9).clone(), k, torch.full((200,), top_p)).softmax(-1)
        assert sure.all()
        assert ours == pytest.approx(theirs.numpy(), abs=1e-6)


def test_a_cut_near_rounding_is_not_sure():
    p = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.3, 0.2]])
    _, sure = probabilities(p.log(), Sampling(temperature=1.0, top_p=0.9))
    assert sure.tolist() == [False, True]


def test_new_weights_go_over_old_keys_and_values(tiny_models):
    before, after = ExactModel(tiny_models.target), ExactModel(tiny_models.updated)
    response = [1, 3, 0, 2, 2]
    # An update that changes nothing, and one so early that only the prompt's keys and values are old.
    same = before.logits_after_update(before, PROMPT, response, 3)
    assert same.numpy() == pytest.approx(before.logits(PROMPT, [response])[0, 3:].numpy(), abs=1e-5)
    mixed = after.logits_after_update(before, PROMPT, response, 1)
    assert np.abs(mixed.numpy() - after.logits(PROMPT, [response])[0, 1:].numpy()).max() > 0.1


def test_the_default_cases_bring_every_two_values_together():
    found = [c for c in cases(list(DRAFTERS), fast=False) if c.composition != "greedy"]
    assert {(c.drafter, c.composition) for c in found} == {*product(DRAFTERS, COMPOSITIONS)}
    assert {(c.drafter, c.depth) for c in found} == {*product(DRAFTERS, DEPTHS)}
    assert {(c.depth, c.sampling.temperature) for c in found} == {*product(DEPTHS, TEMPERATURES)}
    assert len(found) < 70
    assert covering(["ab", "xyz"], 1) == [("a", "x"), ("b", "y"), ("a", "z")]


@pytest.mark.parametrize("given", ["max_num_seqs", "=3", "speculative_config=ngram"])
def test_engine_settings_that_are_none_are_refused(given):
    with refused(ConfigError, naming=("--vllm",)):
        vllm_settings([given])


def run(*args):
    app = Typer()
    app.command()(audit)
    token = running.set((JSON,))
    result = CliRunner().invoke(app, args)
    running.reset(token)
    return result.exit_code, json.loads(result.stdout)


FAST = ("--fast", "--samples", "512", "--drafter", "ngram")
QUICK = ("batch", "mixed", "queue", "switching", "greedy")


@pytest.mark.engine
@pytest.mark.parametrize("scheduling", [nullcontext, asynchronous])
def test_the_engine_is_lossless(scheduling, monkeypatch):
    # One request at a time takes longer than all else together; a third of them are enough to compare.
    monkeypatch.setattr("tltlab.runtime.audit.run.rounds", lambda *asked: rounds(*asked)[:96])
    with scheduling():
        code, found = run(*FAST, "--vllm", f"async_scheduling={json.dumps(scheduling is asynchronous)}")
    assert [case["reason"] for case in found["cases"]] == [None] * len(found["cases"])
    assert (code, found["passed"]) == (0, True)
    sampled = [case for case in found["cases"] if case["composition"] != "greedy"]
    assert {case["composition"] for case in sampled} <= set(COMPOSITIONS)
    for case in sampled:
        assert case["statistic"] < case["threshold"]
        assert case["num_accepted"] > 0
        assert case["logprob_error"] < 5e-5
        assert 0 < case["detectable_tv"] < 0.5


@pytest.mark.engine
def test_the_stock_cpu_sampler_is_not(monkeypatch):
    # A few kinds of batches show it; one request at a time and updates take longest.
    quick = [case for case in cases(["ngram"], fast=True) if case.composition in QUICK]
    monkeypatch.setattr("tltlab.runtime.audit.run.cases", lambda drafters, fast: quick)

    def unfixed(*plan):
        with unfixed_sampling():
            yield from run_plan(*plan)

    monkeypatch.setattr("tltlab.runtime.audit.run.run_plan", unfixed)
    code, found = run(*FAST)
    assert (code, found["passed"]) == (1, False)
    # Greedy verification reads no temperature: it is right even so.
    assert {case["verdict"] for case in found["cases"] if case["temperature"] > 0} & {"failed"}
