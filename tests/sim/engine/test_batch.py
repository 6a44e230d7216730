"""One batch, whatever its source of gains: what was drafted for each request, and expected gains by a single clock."""

import numpy as np
import pytest

from tltlab.acceptance.base import ConstantAcceptance
from tltlab.acceptance.replay import TraceAcceptance
from tltlab.sim.engine.batch import Batch, Expected, FluidBatch
from tltlab.sim.engine.by_request import Drawn, Rates, Replayed
from tltlab.sim.engine.regime import Regimes
from tltlab.state import recent_acceptance
from tltlab.strategy import NO_SPECULATION, Strategy

from ..workloads import COSTS, counterfactuals, requests_of

DEEP, SHALLOW = Strategy.chain("ngram", 4), Strategy.chain("ngram", 1)
TWO_KEPT = ConstantAcceptance(tokens=3.0)
"""Of a deep draft two tokens, of a shallow one its only token."""
INF = np.inf


def replayed(requests, *, positions):
    """A batch in which the recorded acceptance of each request goes through `positions` again and again."""
    rows = [np.resize(positions, n) for n in requests.response_tokens]
    return Batch(requests, Replayed(requests, TraceAcceptance(counterfactuals(requests.keys, rows, 4))))


SOURCES = {
    "fluid, one clock": FluidBatch,
    "fluid": lambda requests: Batch(requests, Expected()),
    "sampled": lambda requests: Batch(requests, Drawn(requests, 3)),
    "replayed": lambda requests: replayed(requests, positions=[2]),
    "by request": Rates(model=TWO_KEPT, costs=COSTS),
    "by request, sampled": Rates(model=TWO_KEPT, costs=COSTS, sampled=True),
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_counts_drafts_as_an_engine_does(source):
    regimes = Regimes((NO_SPECULATION, DEEP, SHALLOW), COSTS, TWO_KEPT)
    plain, deep, shallow = (regimes.at(strategy, 1) for strategy in regimes.strategies)
    batch = SOURCES[source](requests_of([500, 500]))
    batch.admit((0, 0.0))
    batch.advance(plain, 3, INF)
    assert batch.request_state(0).recent_acceptance is None
    batch.advance(deep, 4, INF)
    batch.admit((1, 0.0))
    batch.advance(shallow, 2, INF)
    # The newest draft weighs 0.2, the first one sets it: 1 + (2 - 1) * 0.8^2, and 1.
    assert batch.drafts(0) == pytest.approx((1.64, 4 * 4 + 2, 4 * 2 + 2))
    assert batch.drafts(1) == pytest.approx((1.0, 2, 2))
    newest, generated = batch.preempt()
    batch.advance(deep, 1, INF)
    batch.admit((newest, generated))
    batch.advance(plain, 5, INF)
    batch.advance(deep, 1, INF)
    assert batch.drafts(0) == pytest.approx((2 + (1.64 - 2) * 0.64, 18 + 8, 10 + 4))
    assert batch.drafts(1) == pytest.approx((2 + (1 - 2) * 0.8, 2 + 4, 2 + 2))
    assert batch.request_state(1).recent_acceptance == pytest.approx(1.2)


def test_drafts_known_one_by_one_are_averaged_so():
    batch = replayed(requests_of([400]), positions=[0, 3, 1, 4, 2, 1, 2])
    batch.admit((0, 0.0))
    macro = batch.advance(Regimes((DEEP,), COSTS, TWO_KEPT).at(DEEP, 1), 9, INF)
    kept = [tokens - 1 for tokens in macro.gains[0].tolist()]
    recent = None
    for accepted in kept:
        recent = recent_acceptance(recent, accepted)
    assert len(set(kept)) > 2
    assert batch.drafts(0) == pytest.approx((recent, 9 * 4, sum(kept)))
