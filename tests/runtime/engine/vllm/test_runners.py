"""What an engine built for drafts does in iterations without any: as one without speculation. And what comes after."""

from collections import Counter

import pytest

from tests.fakes.drafting import Script
from tltlab.runtime.engine.vllm import runners
from tltlab.strategy import NO_SPECULATION, Strategy

from ..asking import kept_and_refused, raising, request, requests, said_once, switching, texts

pytestmark = pytest.mark.engine


def executor_and_runner(engine):
    executor = engine.llm.llm_engine.engine_core.engine_core.model_executor
    return executor, executor.driver_worker.worker.model_runner


@pytest.fixture
def called(cramped, monkeypatch):
    """How often the engine called what only speculation needs, and how often its sampler alone."""
    executor, runner = executor_and_runner(cramped)
    counts = Counter()

    def count(owner, name, label):
        stock = getattr(owner, name)

        def counted(*args, **kwargs):
            counts[label] += 1
            return stock(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(runner.rejection_sampler, "forward", "rejection sampler")
    count(runner, "propose_draft_token_ids", "proposer")
    count(runner, "_calc_spec_decode_metadata", "gathering")
    count(executor, "take_draft_token_ids", "asking")
    count(runner.sampler, "forward", "sampler")
    return counts


def test_off_means_off(cramped, called):
    cramped.set_policy(None)
    rows = cramped.generate(requests(4, 30), rl_step=0, temperature=1.0).iterations.to_pylist()
    assert called == {"sampler": len(rows)}


def test_only_iterations_that_verify_drafts_pay_for_them(cramped, called):
    cramped.set_policy(switching(Strategy.chain("ngram", 4)))
    rows = cramped.generate(requests(4, 60), rl_step=0, temperature=0.3).iterations.to_pylist()
    verifying = sum(row["num_drafted"] > 0 for row in rows)
    assert 0 < verifying < len(rows)
    assert called["rejection sampler"] == called["gathering"] == called["proposer"] == verifying
    assert called["sampler"] == len(rows)
    assert called["asking"] == 0


def off_then_on(off):
    """No drafts for `off` iterations, then as deep as it goes for 10, again and again."""
    return Script(*([NO_SPECULATION] * off + [Strategy.chain("learned", 4)] * 10) * 99)


@pytest.fixture
def attentive(roomy, good):
    """The roomy engine with weights that attend to more than the last token, in target and draft model."""
    weights = {name: value * 30 if "v_proj" in name else value for name, value in good.items()}
    for number, given in enumerate((weights, good), start=1):
        roomy.update_weights(given.items(), number)
        roomy.update_draft_weights(given.items())
        if given is weights:
            yield roomy


def refused(engine, *, off, rl_step, prompt_tokens=3, first=0):
    """The share of drafts refused; greedily a drafter that is the target itself has none.

    Prompts differ by `first`: blocks of the cache are used again, and would else hold just what is missing.
    """
    prompts = [([1, 4 + first + n, 5 + first, 7, 6 + n] * 40)[:prompt_tokens] for n in range(4)]
    asked = [request(f"p{n}", 0, prompt, 100 - n, rl_step=rl_step) for n, prompt in enumerate(prompts)]
    engine.set_policy(off_then_on(off))
    kept, lost = kept_and_refused(engine.generate(asked, rl_step=rl_step, temperature=0.0))
    assert kept
    return lost / (kept + lost)


def test_draft_model_is_as_good_after_rest(attentive, monkeypatch):
    _, runner = executor_and_runner(attentive)
    passes = []
    forward = runner.drafter.model.forward
    monkeypatch.setattr(runner.drafter.model, "forward", lambda *a, **k: (passes.append(1), forward(*a, **k))[1])
    attentive.set_policy(None)
    attentive.generate(requests(4, 30), rl_step=0, temperature=1.0)
    assert passes == []
    attentive.llm.reset_prefix_cache()
    always = refused(attentive, off=0, rl_step=1)
    assert refused(attentive, off=30, rl_step=2, first=4) <= always + 0.01
    monkeypatch.setattr(type(runner.tltlab_skipping), "catch_up", lambda *args: None)
    assert refused(attentive, off=30, rl_step=3, first=8) > always + 0.2


def test_it_tracks_the_cache_while_skipped(attentive):
    attentive.llm.reset_prefix_cache()
    always = refused(attentive, off=0, rl_step=0, prompt_tokens=150)
    attentive.llm.reset_prefix_cache()
    refused(attentive, off=20, rl_step=1, prompt_tokens=150)
    assert refused(attentive, off=0, rl_step=2, prompt_tokens=150) <= always + 0.01


def test_it_catches_up_in_fitting_passes(attentive, monkeypatch):
    _, runner = executor_and_runner(attentive)
    attentive.llm.reset_prefix_cache()
    always = refused(attentive, off=0, rl_step=0)
    monkeypatch.setattr(runner.drafter, "max_num_tokens", 50)
    assert refused(attentive, off=30, rl_step=1, first=4) <= always + 0.01


@pytest.fixture
def runner(roomy):
    """The roomy engine's, which is as it was afterwards."""
    _, runner = executor_and_runner(roomy)
    yield runner
    for name in ("tltlab_guard", "tltlab_skipping", "tltlab_stopwatch"):
        vars(runner).pop(name, None)
    roomy.llm.reset_prefix_cache()


@pytest.mark.parametrize(
    "part",
    [
        "_skipping_of", "SkippedDrafting.update_requests", "SkippedDrafting.skips", "SkippedDrafting.note_missed",
        "SkippedDrafting.catch_up", "_has_drafts",
        "_DeviceStopwatch.start", "_DeviceStopwatch.stop", "_DeviceStopwatch.read", "_time_speculator",
    ],
)  # fmt: skip
def test_runner_errors_are_reported_once(roomy, runner, part, monkeypatch, caplog):
    roomy.set_policy(None)
    plain = roomy.generate(requests(3, 40), rl_step=0, temperature=0.0)
    roomy.set_policy(off_then_on(6))
    *owner, name = part.split(".")
    # In the middle: a draft model has rested already, and is behind.
    times = iter(range(100))
    where = getattr(runners, owner[0]) if owner else runners
    stock = getattr(where, name)
    raises = raising(LookupError("a bug of ours"))
    monkeypatch.setattr(where, name, lambda *args: stock(*args) if next(times) < 3 else raises())
    drafted = roomy.generate(requests(3, 40, rl_step=1), rl_step=1, temperature=0.0)
    assert texts(drafted) == texts(plain)
    assert sum(row["num_drafted"] for row in drafted.iterations.to_pylist()) > 0
    assert runner.tltlab_guard.failure
    assert "LookupError: a bug of ours" in said_once(caplog, "tltlab raised")
