"""What an engine built for drafts does in iterations without any: as one without speculation. And what comes after."""

from collections import Counter

import pytest

from tltlab.runtime.engine.vllm import runners
from tltlab.strategy import Strategy

from ..asking import raising, requests, said_once, switching, texts

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


@pytest.fixture
def runner(roomy):
    """The roomy engine's, which is as it was afterwards."""
    _, runner = executor_and_runner(roomy)
    yield runner
    for name in ("tltlab_guard", "tltlab_stopwatch"):
        vars(runner).pop(name, None)
    roomy.llm.reset_prefix_cache()


@pytest.mark.parametrize(
    "part",
    [
        "_begins_plain", "_ends_plain", "_has_drafts",
        "_DeviceStopwatch.start", "_DeviceStopwatch.stop", "_DeviceStopwatch.read", "_time_speculator",
    ],
)  # fmt: skip
def test_runner_errors_are_reported_once(roomy, runner, part, monkeypatch, caplog):
    roomy.set_policy(None)
    plain = roomy.generate(requests(3, 40), rl_step=0, temperature=0.0)
    roomy.set_policy(switching(Strategy.chain("learned", 4), hold_iterations=6))
    *owner, name = part.split(".")
    # In the middle.
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
