"""What an engine built for drafts does in iterations that have none: what an engine without speculation does."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tltlab.runtime.engine.engine import Engine
from tltlab.strategy import Strategy

from ..asking import fixed, requests, switching

pytestmark = pytest.mark.engine


@pytest.fixture
def called(cramped: Engine, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the engine called what only speculation needs, and how often its sampler alone."""
    core = cramped.llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str, label: str) -> None:
        stock = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[label] += 1
            return stock(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(runner.rejection_sampler, "forward", "rejection sampler")
    count(runner, "propose_draft_token_ids", "proposer")
    count(runner, "_calc_spec_decode_metadata", "gathering")
    count(core.model_executor, "take_draft_token_ids", "asking")
    count(runner.sampler, "forward", "sampler")
    return counts


def test_off_means_off(cramped: Engine, called: Counter[str]):
    cramped.set_policy(None)
    rows = cramped.generate(requests(4, 30), rl_step=0, temperature=1.0).iterations
    assert called == {"sampler": len(rows)}


def test_only_iterations_that_verify_drafts_pay_for_them(cramped: Engine, called: Counter[str]):
    cramped.set_policy(switching(Strategy.chain("ngram", 4)))
    rows = cramped.generate(requests(4, 60), rl_step=0, temperature=0.3).iterations
    verifying = sum(row["num_drafted"] > 0 for row in rows)
    assert 0 < verifying < len(rows)
    assert called["rejection sampler"] == called["gathering"] == called["proposer"] == verifying
    assert called["sampler"] == len(rows)
    assert called["asking"] == 0


def test_greedy_tokens_are_the_same_with_drafts_in_some_iterations(cramped: Engine):
    cramped.set_policy(None)
    plain = cramped.generate(requests(6, 60), rl_step=0, temperature=0.0)
    for policy in (fixed("suffix"), switching(Strategy.chain("suffix", 4), hold_iterations=1)):
        cramped.set_policy(policy)
        drafted = cramped.generate(requests(6, 60), rl_step=1, temperature=0.0)
        assert [r.token_ids for r in drafted.responses] == [r.token_ids for r in plain.responses]
        assert sum(row["num_accepted"] for row in drafted.iterations) > 0
