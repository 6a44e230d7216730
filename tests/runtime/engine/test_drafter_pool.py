"""Several drafters in one engine: what each brings, and who is asked."""

import pytest

from .asking import fixed, request, texts

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
