"""Acceptance that differs by request: levels, siblings; what drafts a recording holds, and fits to them."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tltlab
from tests.core.acceptance.counterfactuals import counterfactuals
from tests.fakes.curves import CurveAcceptance
from tests.refused import refused
from tests.traces_of_lengths import iterations, of_samples
from tltlab.acceptance.base import RequestArrays
from tltlab.acceptance.curves import SiblingAcceptance, fit_siblings
from tltlab.errors import ConfigError, TraceError
from tltlab.strategy import Strategy
from tltlab.traces.drafts import recorded_drafts, walked_drafts
from tltlab.traces.schema import KEY

CHAIN = Strategy.chain("ngram", 4)
SIBLINGS = SiblingAcceptance(drafter="ngram", alone=0.3, most=0.8, exponent=0.7, own_tokens=200)
TRACES = Path(__file__).parents[3] / "traces"


def survival(model, strategy=CHAIN, generated=0.0, siblings=0.0):
    return model.survival(strategy, RequestArrays(*(np.array([x], float) for x in (generated, siblings))))[0]


def test_siblings_help_and_so_does_own_text():
    model = SIBLINGS
    assert survival(model)[0] == pytest.approx(0.3)
    assert survival(model, siblings=1)[0] == pytest.approx(survival(model, generated=200)[0])
    assert survival(model, siblings=1e9)[0] == pytest.approx(0.8, abs=1e-5)
    deaf = model.model_copy(update={"own_tokens": None})
    assert survival(deaf, generated=1e5)[0] == pytest.approx(0.3)


@given(st.floats(1, 5000), st.floats(0, 1))
def test_no_state_beats_most_request_can_get(length, share):
    for model in (SIBLINGS, CurveAcceptance(keep_logits=(0.0, 0.5), drift=-0.5)):
        (most,) = model.most_tokens(CHAIN, RequestArrays(*(np.array([x]) for x in (length, 7.0))))
        assert 1 + survival(model, generated=length * share, siblings=7 * share).sum() <= most + 1e-12


@pytest.mark.parametrize(
    ("model", "strategy", "fact"),
    [
        (SIBLINGS, Strategy("ngram", 4, 2, 8), "tree"),
        (SIBLINGS, Strategy.chain("other", 2), "other"),
    ],
)
def test_chains_of_known_drafters_alone_are_accepted(model, strategy, fact):
    with refused(ConfigError, naming=(fact,)):
        survival(model, strategy)


def recorded(row):
    return counterfactuals([(0, "p", 0, 0, "ngram", 0, None, 8, row)])


def test_a_walk_goes_from_draft_to_draft():
    drafts = walked_drafts(recorded([2, 1, 0, 5, 0, 0, 0, 0, 0, 1]), depth=4)
    assert drafts["generated_tokens"].tolist() == [0, 3, 8, 9]
    assert drafts["accepted"].tolist() == [2, 4, 0, 1]
    assert drafts["reach"].unique().tolist() == [4]


def test_a_walk_refuses_what_was_not_recorded():
    for depth, most in ((9, 8), (0, 1)):
        with refused(ConfigError, naming=(most,)):
            walked_drafts(recorded([1]), depth)


def recording(accepted, batch, lengths):
    ends = [float(sum(b > len(lengths) - 1 - rank for b in batch)) for rank in range(len(lengths))]
    order = np.argsort(np.argsort(lengths, kind="stable"), kind="stable")
    depths = [0 if a is None else 3 for a in accepted]
    prefills = [10] + [0] * (len(batch) - 1)
    trace = of_samples(lengths, 99, worker=0, t_submit=0.0, t_finish=[ends[rank] for rank in order])
    return trace.replace(
        iterations=iterations(batch=batch, prefill_tokens=prefills, draft_depth=depths, accepted_per_request=accepted)
    )


def test_a_recording_attributes_drafts_to_requests():
    # Three responses of 2, 4 and 9 tokens; the first is over after two iterations, the second after three.
    trace = recording([None, [0, 1, 2], [1, 3], None], [3, 3, 2, 1], [2, 4, 9])
    drafts, notes = recorded_drafts(trace)
    assert notes == []
    assert drafts["sample"].tolist() == [0, 1, 2, 1, 2]
    assert drafts["generated_tokens"].tolist() == [1, 1, 1, 3, 4]
    assert drafts["accepted"].tolist() == [0, 1, 2, 1, 3]
    assert drafts["num_siblings"].tolist() == [0, 0, 0, 1, 1]


def test_requests_run_until_their_clients_abort_them():
    whole = recording([None, [0, 1, 2], [1, 3], [0]], [3, 3, 2, 1], [2, 4, 10])
    # The last iteration came behind a stop string, and so did a token of another response.
    outcomes = whole.outcomes.assign(response_tokens=[2, 3, 9], discarded_tokens=[0, 1, 1])
    table = whole.iterations.assign(num_generated=[3, 6, 5, 0])
    drafts, notes = recorded_drafts(whole.replace(outcomes=outcomes, iterations=table))
    pd.testing.assert_frame_equal(drafts, recorded_drafts(whole)[0])
    assert len(drafts) == 6
    assert notes == []


def test_a_contradictory_recording_attributes_nothing():
    # Its batches do not follow from its lengths; then it accepts more than was drafted.
    drafts, notes = recorded_drafts(recording([None, [0, 1]], [3, 2], [2, 4, 9]))
    assert len(drafts) == 0
    assert "1 of 1 workers" in notes[0]
    with refused(TraceError, naming=("4", "[0", "3]")):
        recorded_drafts(recording([None, [0, 4, 0]], [3, 3], [3, 9, 9]))


@pytest.mark.parametrize("name", ["subset-sum-small", "gcd-small", "tiny"])
def test_every_shipped_recording_is_attributed(name):
    trace = tltlab.read(TRACES / name)
    drafts, notes = recorded_drafts(trace)
    assert notes == []
    speculative = trace.iterations[trace.iterations["draft_depth"] > 0]
    assert drafts["accepted"].sum() == speculative["num_accepted"].sum()


def drawn(model, num_requests, num_drafts, seed=0, depth=4):
    """Drafts of responses that follow a model exactly."""
    rng = np.random.default_rng(seed)
    keys = [(0, f"p{i}", 0, 0) for i in range(num_requests)]
    siblings = rng.integers(0, 8, num_requests)
    at, rows = np.zeros(num_requests), []
    for _ in range(num_drafts):
        kept = model.survival(Strategy.chain("ngram", depth), RequestArrays(at, siblings))
        accepted = (rng.random((num_requests, 1)) < kept).sum(axis=1)
        columns = {"drafter": "ngram", "reach": depth, "generated_tokens": at.astype(int), "accepted": accepted}
        rows.append(pd.DataFrame(keys, columns=list(KEY)).assign(**columns, num_siblings=siblings))
        at = at + accepted + 1
    return pd.concat(rows, ignore_index=True)


def fitted(drafts):
    names = ("num_siblings", "generated_tokens", "reach", "accepted")
    return fit_siblings("ngram", **{name: drafts[name].to_numpy() for name in names})


def test_fit_finds_siblings_that_made_drafts():
    truth = SiblingAcceptance(alone=0.25, most=0.8, exponent=0.8)
    model = fitted(drawn(truth, 300, 40))
    for n in (0.0, 1.0, 3.0, 7.0):
        found, true = (one.alpha(np.array([n]), np.zeros(1)) for one in (model, truth))
        assert found == pytest.approx(true, abs=0.04)


def test_fits_refuse_too_little():
    with refused(ConfigError, naming=("10", "32")):
        fitted(drawn(SIBLINGS, 4, 20).head(10))
