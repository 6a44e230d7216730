"""What engines ship: SGLang's thresholds on accepted tokens."""

import pytest

from tltlab.policies.engines import AcceptedThresholds
from tltlab.testing import check_selector

from .iterations import pick, ran, teach


def depth_after(policy, accepted, times, batch=2):
    """The depth that a policy arrives at when drafts are kept to at most `accepted` tokens."""
    for _ in range(times):
        strategy = pick(policy, batch)
        teach(policy, strategy, ran(strategy, batch, 0.01, min(accepted, strategy.draft_depth)))
    return pick(policy, batch).draft_depth


def test_they_meet_the_contract_of_selectors():
    check_selector(lambda rng: AcceptedThresholds("learned"))


@pytest.mark.parametrize(("accepted", "batch", "depth"), [(7, 2, 7), (0, 2, 1), (2, 2, 3), (7, 64, 0)])
def test_thresholds_follow_what_is_kept_in_small_batches(accepted, batch, depth):
    assert depth_after(AcceptedThresholds(), accepted, 200, batch) == depth


def test_thresholds_wait_for_the_warm_up():
    policy = AcceptedThresholds()
    first = pick(policy, 2).draft_depth
    assert depth_after(policy, 0, 14) == first
    assert depth_after(policy, 0, 1) < first


def test_thresholds_count_outcomes_of_their_depth_only():
    policy = AcceptedThresholds()
    before = policy.state_dict()
    late = next(s for s in policy.strategies if s.speculates and s != pick(policy, 2))
    teach(policy, late, ran(late, 2, 0.01))
    assert policy.state_dict() == before
