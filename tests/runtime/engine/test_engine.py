"""A real vLLM engine under a policy: what it says is the target's, what it drafts is the policy's."""

from itertools import pairwise

import numpy as np
import pytest

from tltlab.runtime.audit.exact import ExactModel, Sampling, probabilities
from tltlab.runtime.ray.scratch import scratch_folder

from .asking import fixed, request, timed_by_work

pytestmark = pytest.mark.engine
TEMPERATURE = 0.9
SAMPLING = Sampling(temperature=TEMPERATURE)
# Every pair (4, x) stands in the prompt with a follower, so whatever comes first after the last 4, a draft follows it.
PROMPT = [token for x in range(4, 24) for token in (4, x, 4 + (x * 7) % 20)] + [4]


def generate(engine, num, tokens, rl_step=0, temperature=TEMPERATURE):
    asked = [request(f"p{n // 8}", n % 8, PROMPT, tokens, rl_step=rl_step, ignore_eos=False) for n in range(num)]
    return engine.generate(asked, rl_step=rl_step, temperature=temperature)


@pytest.fixture(scope="module")
def exact(random_model):
    return ExactModel(random_model)


def test_durations_and_counts_add_up(roomy, monkeypatch):
    roomy.set_policy(fixed("ngram", 2))
    rollout = generate(roomy, 24, 50)
    assert 0 < sum(row["duration"] for row in rollout.iterations.to_pylist()) < rollout.duration_s
    timed_by_work(roomy.control.tracker, monkeypatch)
    rows = generate(roomy, 24, 50).iterations.to_pylist()
    for row in rows:
        assert row["duration"] == pytest.approx(1e-2 + 1e-4 * (row["batch"] + row["num_drafted"]))
    for before, after in pairwise(rows):
        assert after["t_start"] == pytest.approx(before["t_start"] + before["duration"])
    rows = rollout.iterations.to_pylist()
    generated = sum(row["num_generated"] for row in rows)
    assert generated >= sum(len(r.token_ids) for r in rollout.responses)
    assert rows[0]["prefill_tokens"] > 0
    assert rows[0]["context_tokens"] == 24 * len(PROMPT)
    for row in rows:
        if row["accepted_per_request"] is not None:
            assert len(row["accepted_per_request"]) == row["batch"]
            assert sum(row["accepted_per_request"]) == row["num_accepted"] <= row["num_drafted"]


def test_logprobs_are_those_of_model_at_sampling_temperature(roomy, exact):
    roomy.set_policy(fixed("ngram"))
    for response in generate(roomy, 4, 20).responses:
        p, _ = probabilities(exact.logits(PROMPT, [response.token_ids])[0], SAMPLING)
        logprobs = np.log(p[np.arange(len(p)), response.token_ids])
        assert np.array(response.logprobs) == pytest.approx(logprobs, abs=2e-5)


def test_an_engines_files_go_with_its_process(roomy):
    """A killed process's scratch folder is swept; its file in the temporary folder would stay for ever."""
    assert list(scratch_folder().glob("vllm_dist_*"))
