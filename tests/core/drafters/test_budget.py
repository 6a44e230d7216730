"""Budgets: who is drafted how much, against brute force, and the contract for budgets of one's own."""

from itertools import count, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refused import refused
from tltlab.costs.linear import LinearCosts
from tltlab.drafters.budget import AcceptanceBudget, MbaBudget, UniformBudget, share_out
from tltlab.policies.engines import VerificationBudget
from tltlab.policies.policy import AcceptanceBudgetSpec, Policy, load_policy
from tltlab.policies.specs import FixedSpec
from tltlab.state import RequestState, StepState
from tltlab.strategy import Strategy

from ...contracts import check_budget

TRIMMED = Strategy("ngram", 8, 1, 5)


def state(*recent):
    requests = [
        RequestState(key=(0, "p", i, 0), prompt_id="p", generated_tokens=9, max_response_tokens=99, recent_acceptance=a)
        for i, a in enumerate(recent)
    ]
    return StepState(rl_step=0, batch=len(requests), requests=requests)


def kept(chances, tokens):
    return sum(sum(c**i for i in range(1, n + 1)) for c, n in zip(chances, tokens, strict=True))


BLOCK7 = Strategy.chain("block", 7)
CROWDED = LinearCosts(
    base_s=4e-3, per_request_s=0.0, per_token_s=2e-4, per_context_s=0.0, sd_base_s=0.0, draft_level_s=1e-3,
    draft_level_per_request_s=0.0,
)  # fmt: skip
SHIPPED = [UniformBudget, AcceptanceBudget, lambda: AcceptanceBudget(0, 10), lambda: VerificationBudget(CROWDED)]


@pytest.mark.parametrize("factory", SHIPPED)
def test_shipped_budgets_meet_the_contract(factory):
    check_budget(factory)


@given(st.lists(st.floats(0, 9), min_size=1, max_size=4), st.integers(1, 4))
def test_no_other_verification_yields_more_per_second(accepted, depth):
    """Against every allotment that gives each request a token or nobody any; drafting is paid either way."""
    strategy, batch = Strategy.chain("learned", depth), len(accepted)
    chances = [a / (a + 1) for a in accepted]

    def rate(tokens):
        return (batch + kept(chances, tokens)) / (4e-3 + 2e-4 * (batch + sum(tokens)) + 1e-3 * depth)

    best = max(map(rate, [(0,) * batch, *product(range(1, depth + 1), repeat=batch)]))
    allotted = VerificationBudget(CROWDED).allot(state(*accepted), strategy)
    assert rate(tuple(allotted)) == pytest.approx(best)


def test_verification_shrinks_as_batch_grows_and_looks_again():
    budget = VerificationBudget(CROWDED)
    share = [np.mean(budget.allot(state(*[1.0] * batch), BLOCK7)) for batch in (1, 16, 64)]
    assert share == sorted(share, reverse=True)
    budget, dead = VerificationBudget(CROWDED), state(*[0.0] * 64)
    assert [sum(budget.allot(dead, BLOCK7)) for _ in range(32)] == [*[0] * 15, 64] * 2


def test_one_lost_draft_ends_no_marginal_benefits():
    budget, chain = MbaBudget(base_s=4e-3, token_s=6e-5), Strategy.chain("suffix", 8)
    assert sum(budget.allot(state(0.0, *[None] * 7), chain)) >= 8
    assert budget.allot(state(*[0.0] * 8), chain) == [0] * 8


@given(st.lists(st.floats(0, 1), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 17))
def test_no_other_way_to_share_out_keeps_more(chances, depth, total):
    given_ = share_out(np.array(chances), depth, total)
    assert sum(given_) == min(total, depth * len(chances))
    assert max(given_) <= depth
    everything = (t for t in product(range(depth + 1), repeat=len(chances)) if sum(t) <= total)
    best = max(kept(chances, t) for t in everything)
    assert kept(chances, given_) == pytest.approx(best)


SHARES = {
    "drafts go where they are likely to be kept": ({}, (3.0, 0.1), TRIMMED, [7, 1]),
    "or nowhere else": ({"min_tokens": 0}, (3.0, 0.0), TRIMMED, [8, 0]),
    "equal requests get equal shares": ({}, (1.0, 1.0, 1.0), TRIMMED, [4, 4, 4]),
    "what is left goes in order": ({"max_draft_tokens": 8}, (1.0, 1.0, 1.0), TRIMMED, [3, 3, 2]),
    "so does what is too little": ({"max_draft_tokens": 2}, (1.0, 1.0, 1.0), TRIMMED, [1, 1, 0]),
    "never drafted for counts as the others do": ({}, (2.0, None, 2.0), TRIMMED, [4, 4, 4]),
    "nobody was drafted for": ({}, (None, None), TRIMMED, [4, 4]),
    "a whole chain leaves nothing to share out": ({}, (3.0, 0.1), Strategy.chain("ngram", 4), [4, 4]),
}


@pytest.mark.parametrize(("budget", "recent", "strategy", "allotted"), SHARES.values(), ids=SHARES)
def test_acceptance_shares_drafts_out(budget, recent, strategy, allotted):
    assert AcceptanceBudget(**budget).allot(state(*recent), strategy) == allotted


def test_a_policy_carries_its_budget(tmp_path):
    policy = Policy(selector=FixedSpec(strategy=TRIMMED), budget=AcceptanceBudgetSpec(max_draft_tokens=64))
    policy.write(tmp_path / "policy.json")
    budget = load_policy(tmp_path / "policy.json").build_budget()
    assert isinstance(budget, AcceptanceBudget)
    assert budget.max_draft_tokens == 64
    assert isinstance(load_policy("fixed").build_budget(), UniformBudget)


CALLS = count()


class Broken(UniformBudget):
    """Halves its drafts after every other request that it hears of, and keeps the contract except `kind`."""

    def __init__(self, kind):
        self.kind, self.heard = kind, 0

    def allot(self, state, strategy):
        right = [n // (self.heard % 2 + 1) for n in super().allot(state, strategy)]
        wrong = {
            "floats": [float(n) for n in right],
            "too deep": [n + 9 for n in right],
            "below 0": [-n for n in right],
            "below 0 later": [-n if self.heard else n for n in right],
            "more than is verified": [strategy.draft_depth] * state.batch,
            "one is missing": right[1:],
            "by chance": [n * (next(CALLS) // 5 % 2) for n in right],
        }
        return wrong.get(self.kind, right)

    def finished(self, request, *, drafted, accepted):
        assert 0 <= accepted <= drafted
        self.heard += 1

    def state_dict(self):
        kept = {"a tuple": (self.heard,), "an array": np.int64(self.heard)}.get(self.kind, self.heard)
        return {} if self.kind == "no state" else {"heard": kept}

    def load_state_dict(self, state):
        if self.kind != "deaf":
            self.heard = state.get("heard", self.heard)


FAULTS = {
    "floats": "",
    "more than is verified": "",
    "one is missing": "numbers",
    "by chance": "differs",
    "too deep": "outside",
    "below 0": "outside",
    "below 0 later": "outside",
    "no state": "",
    "a tuple": "JSON",
    "an array": "JSON",
    "deaf": "",
}


@pytest.mark.parametrize(("kind", "fact"), FAULTS.items())
def test_the_contract_check_finds_what_is_broken(kind, fact):
    check_budget(lambda: Broken("right"))
    with refused(AssertionError, naming=(fact,)):
        check_budget(lambda: Broken(kind))
