"""The budget of DAS: the optimum against a grid and against its conditions, the printed equations, and the rounding."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tltlab.drafters.budget import LengthAwareBudget, optimal_budget
from tltlab.state import RequestState, StepState
from tltlab.strategy import Strategy

from ...contracts import check_budget

DEEP = Strategy.chain("suffix", 8)
BASE_S, TOKEN_S = 9.5e-3, 5e-5


# The optimum


@given(
    st.lists(st.tuples(st.floats(1, 1e4), st.floats(0.05, 1), st.floats(0.05, 1)), min_size=1, max_size=12),
    st.floats(1e-4, 0.1),
)
def test_the_optimum_keeps_the_conditions_of_karush_kuhn_and_tucker(requests, token_s):
    """Multipliers of l_i - A_i(p_i) <= N: the marginal cost token_s / A_i'(p_i) of those on the line; they sum to 1."""
    lengths, reach, efficiency = (np.array(column) for column in zip(*requests, strict=True))
    passes, drafts = optimal_budget(lengths, reach, efficiency, 1.0, token_s)
    needed = lengths * (1 - reach * (1 - np.exp(-efficiency * drafts / lengths)))
    assert (drafts >= 0).all()
    assert (needed <= passes * (1 + 1e-6)).all()
    on_line = drafts > 0
    np.testing.assert_allclose(needed[on_line], passes, rtol=1e-6)

    def price(at):
        """What one pass less costs at N = `at`: drafts, minus the passes of the target that they replace."""
        late = lengths > at
        left = (reach - 1 + at / lengths)[late]
        return token_s * float((1 / (efficiency[late] * left)).sum())

    lowest = float(((1 - reach) * lengths).max())
    below, above = passes - 1e-6 * lengths.max(), passes * (1 + 1e-6)
    assert below <= lowest or price(below) > 1 - 1e-3
    assert price(above) <= 1 + 1e-3


def test_bounds_on_a_pass_move_the_finish_line():
    free, drafts = optimal_budget([100.0, 4000.0], 0.9, 0.7, BASE_S, TOKEN_S)
    assert drafts[1] / free > 8
    bound, drafts = optimal_budget([100.0, 4000.0], 0.9, 0.7, BASE_S, TOKEN_S, most_per_pass=8)
    assert bound > free
    assert drafts[1] / bound == pytest.approx(8)
    bound, drafts = optimal_budget([3000.0, 4000.0], 0.9, 0.7, BASE_S, TOKEN_S, most_in_all=8)
    assert drafts.sum() / bound == pytest.approx(8)


# The budget


def request(prompt, generated, sample=0):
    key = (0, prompt, sample, 0)
    return RequestState(key=key, prompt_id=prompt, generated_tokens=generated, max_response_tokens=8192)


def state(*requests):
    return StepState(rl_step=0, batch=len(requests), requests=requests)


def taught(**settings):
    """It has seen short, middling and long prompts, four responses of each."""
    budget = LengthAwareBudget(**settings)
    for sample in range(4):
        for prompt, tokens in (("short", 50), ("middle", 400), ("long", 4000)):
            budget.finished(request(prompt, tokens, sample), drafted=0, accepted=0)
    return budget


@pytest.mark.parametrize("factory", [LengthAwareBudget, lambda: LengthAwareBudget(token_s=5e-4)])
def test_it_keeps_the_contract(factory):
    check_budget(factory)


def test_long_requests_and_those_that_outgrew_their_class_are_drafted():
    unknown = state(request("a", 9), request("b", 9))
    assert LengthAwareBudget().allot(unknown, Strategy("suffix", 8, 1, 5)) == [4, 4], "nothing is known yet"
    assert taught().allot(state(request("short", 10), request("long", 10), request("middle", 10)), DEEP) == [0, 8, 0]
    grown = taught().allot(state(request("short", 500), request("long", 3900)), DEEP)
    assert grown[0] >= 6
    assert grown[1] == 0
    short = [request("short", 5, n) for n in range(3)]
    trimmed = taught().allot(state(*short, request("long", 5)), Strategy("suffix", 8, 1, 4))
    assert trimmed[:3] == [0, 0, 0]
    assert trimmed[3] >= 7


def test_rounding_keeps_mean_and_sum(monkeypatch):
    monkeypatch.setattr("tltlab.drafters.budget._REPLAN_EVERY", 10**9)
    budget = taught(token_s=5e-4)
    given_ = []
    for generated in range(0, 3000, 3):
        given_.append(budget.allot(state(*[request("long", generated, n) for n in range(5)]), DEEP))
    (ends,) = budget.plans_.values()
    shares = np.diff(ends, prepend=0.0)
    assert 0.1 < shares[0] % 1 < 0.9
    np.testing.assert_allclose(np.mean(given_, axis=0), shares, atol=0.01)
    sums = np.sum(given_, axis=1)
    assert sums.max() - sums.min() <= 1


@pytest.mark.parametrize(
    ("drafted", "accepted", "efficiency"),
    [(900, round(900 * (1 - math.exp(-0.27))), pytest.approx(0.3, rel=0.05)), (950, 950, pytest.approx(1 / 0.9))],
    ids=["what was kept", "no more than can be"],
)
def test_it_learns_how_much_of_its_drafts_is_kept(drafted, accepted, efficiency):
    budget = LengthAwareBudget()
    assert budget.efficiency == pytest.approx(0.7)
    for n in range(500):
        budget.finished(request("p", 1000, n), drafted=drafted, accepted=accepted)
    assert budget.efficiency == efficiency
    assert budget.allot(state(request("p", 5)), DEEP)[0] <= 8
