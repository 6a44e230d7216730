"""What engines ship: SGLang's thresholds on accepted tokens, vLLM's table over context lengths."""

import pytest

from tltlab.policies.engines import AcceptedThresholds, ContextTable
from tltlab.state import StepOutcome, StepState
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.testing import check_selector


def depth_after(policy: AcceptedThresholds, accepted: float, times: int, batch: int = 2) -> int:
    """The depth that a policy arrives at when drafts are kept to at most `accepted` tokens."""
    for _ in range(times):
        strategy = policy.choose(StepState(rl_step=0, batch=batch))
        kept = (min(accepted, strategy.draft_depth),) * batch if strategy.speculates else ()
        policy.observe(strategy, StepOutcome(elapsed_s=0.01, batch=batch, accepted=kept))
    return policy.choose(StepState(rl_step=0, batch=batch)).draft_depth


def test_they_keep_the_contract_of_selectors():
    check_selector(lambda rng: AcceptedThresholds("learned"))
    check_selector(lambda rng: ContextTable([(1, Strategy.chain("ngram", 4)), (500, NO_SPECULATION)]))


@pytest.mark.parametrize(("accepted", "batch", "depth"), [(7, 2, 7), (0, 2, 1), (2, 2, 3), (7, 64, 0)])
def test_thresholds_follow_what_is_kept_in_small_batches(accepted: float, batch: int, depth: int):
    assert depth_after(AcceptedThresholds(), accepted, 200, batch) == depth


def test_thresholds_wait_for_the_warm_up():
    policy = AcceptedThresholds()
    first = policy.choose(StepState(rl_step=0, batch=2)).draft_depth
    assert depth_after(policy, 0, 14) == first
    assert depth_after(policy, 0, 1) < first


def test_a_context_table_goes_by_the_mean_context_of_a_request():
    table = ContextTable([(1, Strategy.chain("ngram", 4)), (1000, NO_SPECULATION)])
    chosen = [table.choose(StepState(rl_step=0, batch=4, context_tokens=t)).draft_depth for t in (3996.0, 4000.0)]
    assert chosen == [4, 0]
