"""A real vLLM engine under a policy: what it says is the target's, what it drafts is the policy's."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from transformers import AutoModelForCausalLM

from tltlab.policies.policy import BegMabSpec, Bucket, ExploreSpec, Policy, TableRow, TableSpec, load_policy
from tltlab.runtime.engine.engine import Engine
from tltlab.runtime.engine.generation import Rollout
from tltlab.runtime.engine.vllm.plugin import speculative_sampling_is_sound, unmended_sampling
from tltlab.state import StepState
from tltlab.strategy import NO_SPECULATION, Strategy

from .asking import fixed, request, texts, timed_by_work

pytestmark = pytest.mark.engine
TEMPERATURE = 0.9
# Every pair (4, x) stands in the prompt with a follower, so whatever comes first after the last 4, a draft follows it.
PROMPT = [token for x in range(4, 24) for token in (4, x, 4 + (x * 7) % 20)] + [4]


@pytest.fixture
def engine(roomy: Engine) -> Engine:
    return roomy


def use(engine: Engine, policy: Policy) -> None:
    engine.set_policy(policy.build(np.random.default_rng(0)))


def generate(engine: Engine, num: int, tokens: int, rl_step: int = 0, temperature: float = TEMPERATURE) -> Rollout:
    asked = [request(f"p{n // 8}", n % 8, PROMPT, tokens, rl_step=rl_step, ignore_eos=False) for n in range(num)]
    return engine.generate(asked, rl_step=rl_step, temperature=temperature)


def second_token_table(model: Path) -> tuple[np.ndarray, np.ndarray]:
    """P(first token) and P(second | first) under the exact model at TEMPERATURE."""
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    vocabulary = hf.config.vocab_size
    with torch.no_grad():
        rows = torch.tensor([[*PROMPT, t] for t in range(vocabulary)])
        logits = hf(rows).logits[:, -2:].double() / TEMPERATURE
    p = torch.softmax(logits, -1).numpy()
    return p[0, 0], p[:, 1]


def chi_square_p(pairs: Counter[tuple[int, ...]], model: Path) -> float:
    """p-value of Pearson's test that (first, second) pairs follow the exact joint; rare cells are pooled."""
    first, second = second_token_table(model)
    total = sum(pairs.values())
    expected = {(a, b): total * first[a] * second[a, b] for a in range(len(first)) for b in range(len(first)) if a != 2}
    expected |= {(2,): total * first[2]}
    common = {k: e for k, e in expected.items() if e >= 5}
    statistic = sum((pairs[k] - e) ** 2 / e for k, e in common.items())
    rest = total - sum(common.values())
    statistic += (sum(n for k, n in pairs.items() if k not in common) - rest) ** 2 / rest
    return float(chi2.sf(statistic, len(common)))


def pairs_under(engine: Engine, rounds: int) -> tuple[Counter[tuple[int, ...]], int]:
    use(engine, fixed("ngram"))
    pairs: Counter[tuple[int, ...]] = Counter()
    drafted = 0
    for rl_step in range(rounds):
        # The last token before the cap is never drafted: the third lets the second be.
        rollout = generate(engine, 512, 3, rl_step)
        pairs.update(tuple(r.token_ids[:2]) for r in rollout.responses)
        drafted += sum(row["num_drafted"] for row in rollout.iterations)
    return pairs, drafted


def test_speculative_tokens_follow_the_target_and_the_stock_cpu_build_would_not(engine: Engine, random_model: Path):
    pairs, drafted = pairs_under(engine, 6)
    assert drafted > 1000, "the test needs drafts to verify"
    assert chi_square_p(pairs, random_model) > 1e-5

    with unmended_sampling(memory=5.0):
        broken, _ = pairs_under(engine, 1)
    assert chi_square_p(broken, random_model) < 1e-9, "the stock build samples right now: drop the mend"


def test_an_engine_without_the_mend_would_be_refused(engine: Engine):
    assert speculative_sampling_is_sound()
    with unmended_sampling():
        assert not speculative_sampling_is_sound()


def test_greedy_tokens_do_not_depend_on_the_depth(engine: Engine):
    answers = []
    for depth in (0, 2, 4):
        use(engine, fixed("ngram", depth) if depth else load_policy("none"))
        answers.append(texts(generate(engine, 8, 40, temperature=0.0)))
    assert answers[0] == answers[1] == answers[2]


def test_nothing_is_drafted_when_the_policy_says_no(engine: Engine):
    use(engine, load_policy("none"))
    rollout = generate(engine, 8, 30)
    assert all(row["num_drafted"] == 0 and row["next_draft_depth"] == 0 for row in rollout.iterations)


def test_an_iteration_verifies_what_the_one_before_it_chose(engine: Engine):
    arms = (NO_SPECULATION, Strategy.chain("ngram", 4))
    use(engine, Policy(selector=ExploreSpec(strategies=arms, hold_iterations=3)))
    rows = generate(engine, 16, 60).iterations
    assert len({row["draft_depth"] for row in rows}) == 2
    for before, after in pairwise(rows):
        assert after["draft_depth"] == before["next_draft_depth"]
        assert after["num_drafted"] <= after["batch"] * before["next_draft_depth"]


def test_decisions_are_rewarded_by_the_iteration_that_verified_them(engine: Engine):
    arms = (Strategy.chain("ngram", 4), Strategy.chain("ngram", 2), NO_SPECULATION)
    use(engine, Policy(selector=BegMabSpec(buckets=(Bucket(min_batch=1, strategies=arms),), reward="paper")))
    rollout = generate(engine, 16, 60)
    by_number = {row["iteration"]: row for row in rollout.iterations}
    for decision in rollout.decisions:
        row = by_number[decision["iteration"]]
        assert (decision["drafter"], decision["draft_depth"]) == (row["drafter"], row["draft_depth"])
        assert 0 < decision["propensity"] <= 1
        if decision["reward"] is not None and not row["prefill_tokens"]:
            before = by_number[row["iteration"] - 1]
            elapsed = row["duration"] - row["draft_duration"] + before["draft_duration"]
            assert decision["reward"] == pytest.approx((row["num_accepted"] + row["batch"]) / elapsed)


def test_durations_add_up_to_the_rollout_and_counts_to_its_tokens(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    use(engine, fixed("ngram", 2))
    rollout = generate(engine, 24, 50)
    assert 0 < sum(row["duration"] for row in rollout.iterations) < rollout.duration_s
    timed_by_work(engine.control.ledger, monkeypatch)
    rows = generate(engine, 24, 50).iterations
    for row in rows:
        assert row["duration"] == pytest.approx(1e-2 + 1e-4 * (row["batch"] + row["num_drafted"]))
    for before, after in pairwise(rows):
        assert after["t_start"] == pytest.approx(before["t_start"] + before["duration"])
    rows = rollout.iterations
    generated = sum(row["num_generated"] for row in rows)
    assert generated >= sum(len(r.token_ids) for r in rollout.responses)
    assert rows[0]["prefill_tokens"] > 0
    assert rows[0]["context_tokens"] == 24 * len(PROMPT)
    for row in rows:
        if row["accepted_per_request"] is not None:
            assert len(row["accepted_per_request"]) == row["batch"]
            assert sum(row["accepted_per_request"]) == row["num_accepted"] <= row["num_drafted"]


def test_logprobs_are_those_of_the_model_at_the_sampling_temperature(engine: Engine, random_model: Path):
    use(engine, fixed("ngram"))
    hf = AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float32).eval()
    for response in generate(engine, 4, 20).responses:
        ids = torch.tensor([[*PROMPT, *response.token_ids]])
        with torch.no_grad():
            logp = torch.log_softmax(hf(ids).logits[0, len(PROMPT) - 1 : -1] / TEMPERATURE, -1)
        exact = logp.gather(1, ids[0, len(PROMPT) :, None])[:, 0]
        assert torch.tensor(response.logprobs) == pytest.approx(exact.numpy(), abs=2e-5)


def test_a_policy_file_decides_in_the_engine_as_it_does_on_paper(engine: Engine, tmp_path: Path):
    rows = (TableRow(min_batch=1, strategy=Strategy.chain("ngram", 4)), TableRow(min_batch=5, strategy=NO_SPECULATION))
    Policy(selector=TableSpec(rows=rows)).write(tmp_path / "policy.json")
    policy = load_policy(tmp_path / "policy.json")
    use(engine, policy)
    on_paper = policy.build(np.random.default_rng(0))
    asked = [request("p", n, PROMPT, 5 * n, ignore_eos=False) for n in range(1, 10)]
    for row in engine.generate(asked, rl_step=0, temperature=TEMPERATURE).iterations:
        chosen = on_paper.choose(StepState(rl_step=0, batch=row["batch"], waiting=row["num_waiting"]))
        assert row["next_draft_depth"] == chosen.draft_depth


def test_new_weights_are_the_ones_that_sample(
    engine: Engine, good: dict[str, torch.Tensor], bad: dict[str, torch.Tensor]
):
    before = texts(generate(engine, 2, 20, temperature=0.0))
    engine.update_weights(bad.items(), 1)
    after = texts(generate(engine, 2, 20, temperature=0.0))
    engine.update_weights(good.items(), 2)
    assert after != before
    assert texts(generate(engine, 2, 20, temperature=0.0)) == before
