"""Several drafters in one engine: what each brings, who is asked, and that a policy learns which one pays."""

from collections import Counter

import pytest

from tltlab.policies.policy import Activation, LengthAwareBudgetSpec, Policy
from tltlab.policies.specs import BegMabSpec, Bucket
from tltlab.strategy import NO_SPECULATION, Strategy

from .asking import accept_length, fixed, request, texts, timed_by_work

pytestmark = pytest.mark.engine


def requests(tokens):
    return [request(f"p{n}", 0, [1, 4 + n, 5, 6], tokens) for n in range(6)]


def greedy(engine, policy, tokens=60):
    engine.set_policy(policy)
    return engine.generate(requests(tokens), rl_step=0, temperature=0.0)


def test_every_drafter_leaves_greedy_tokens_as_they_are(roomy):
    """Times are told apart; how small they are `tltlab bench seam` and `runtime` tell: of one rollout it is chance."""
    plain = texts(greedy(roomy, None))
    for name, depth in (("ngram", 2), ("ngram", 4), ("suffix", 4), ("learned", 4), ("hybrid", 4)):
        roomy.forget()
        rollout = greedy(roomy, fixed(name, depth))
        assert texts(rollout) == plain, name
        assert min(rollout.recorder_s, rollout.policy_s, rollout.drafting_s) > 0
        assert rollout.recorder_s + rollout.policy_s + rollout.drafting_s < rollout.duration_s
        if name == "learned":
            assert all(0 < row["draft_duration"] < row["duration"] for row in rollout.iterations[2:-2])


def test_a_bandits_choice_follows_the_better_arm(roomy, monkeypatch):
    timed_by_work(roomy.control.tracker, monkeypatch)
    arms = (Strategy.chain("ngram", 2), Strategy.chain("suffix", 4), NO_SPECULATION)
    policy = Policy(selector=BegMabSpec(buckets=(Bucket(min_batch=1, strategies=arms),), epsilon=0.05))
    plain = greedy(roomy, None, tokens=200)
    roomy.set_policy(policy)
    roomy.remember([((0, r.key[1], 7, 0), [1, 4 + n, 5, 6], r.token_ids) for n, r in enumerate(plain.responses)])
    chosen = Counter()
    rewards = {}
    for rl_step in range(1, 4):
        for row in roomy.generate(requests(200), rl_step=rl_step, temperature=0.0).decisions:
            chosen[row["drafter"]] += rl_step > 1
            if row["reward"] is not None:
                rewards.setdefault(row["drafter"], []).append(row["reward"])
    best = max(rewards, key=lambda name: sorted(rewards[name])[len(rewards[name]) // 2])
    assert rewards.keys() == {"ngram", "suffix", "none"}
    assert best == "suffix", "the test needs one arm that pays"
    assert chosen["suffix"] > 0.8 * chosen.total()


def test_activation_comes_on_in_the_tail_without_prefills(roomy):
    policy = fixed("learned").model_copy(update={"activation": Activation(max_requests=3, hold_iterations=2)})
    roomy.set_policy(policy)
    asked = [request(f"p{n}", 0, [1, 4 + n], 10 * n) for n in range(1, 9)]
    rows = roomy.generate(asked, rl_step=0, temperature=0.0).iterations
    assert all(row["num_drafted"] == 0 for row in rows if row["batch"] > 4)
    assert any(row["num_drafted"] for row in rows if row["batch"] <= 3)
    assert sum(row["prefill_tokens"] for row in rows) == 16


def test_a_length_aware_budget_drafts_for_long_requests(roomy):
    policy = fixed("learned", 6).model_copy(update={"budget": LengthAwareBudgetSpec(base_s=1e-2, token_s=1e-4)})
    roomy.set_policy(policy)
    asked = [request(f"p{n}", 0, [1, 4 + n], 20 + 80 * (n % 2)) for n in range(8)]
    for rl_step in range(3):
        rollout = roomy.generate(asked, rl_step=rl_step, temperature=0.0)
    rows = [row["accepted_per_request"] for row in rollout.iterations if row["batch"] == 8]
    short, long = (sum(sum(kept[n::2]) for kept in rows if kept is not None) for n in range(2))
    assert long > 2 * short


def test_new_weights_change_drafts_alone(roomy, good, bad):
    before = roomy.control.drafters["learned"].updates
    plain = texts(greedy(roomy, None))
    roomy.update_draft_weights(bad.items())
    worse = greedy(roomy, fixed("learned"))
    roomy.update_draft_weights(good.items())
    assert texts(worse) == plain
    assert accept_length(worse) < 2
    assert accept_length(greedy(roomy, fixed("learned"))) > 4.5
    assert roomy.control.drafters["learned"].updates == before + 2
