"""Several drafters in one engine: what each brings, who is asked, and that a policy learns which one pays."""

from collections import Counter

import pytest

from tltlab.policies.policy import Policy
from tltlab.policies.specs import BegMabSpec, Bucket
from tltlab.strategy import NO_SPECULATION, Strategy

from .asking import fixed, request, texts, timed_by_work

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
            assert all(0 < row["draft_duration"] < row["duration"] for row in rollout.iterations.to_pylist()[2:-2])


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
        for row in roomy.generate(requests(200), rl_step=rl_step, temperature=0.0).decisions.to_pylist():
            chosen[row["drafter"]] += rl_step > 1
            if row["reward"] is not None:
                rewards.setdefault(row["drafter"], []).append(row["reward"])
    best = max(rewards, key=lambda name: sorted(rewards[name])[len(rewards[name]) // 2])
    assert rewards.keys() == {"ngram", "suffix", "none"}
    assert best == "suffix", "the test needs one arm that pays"
    assert chosen["suffix"] > 0.8 * chosen.total()
