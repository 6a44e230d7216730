"""Partial rollouts and reuse on a real engine: log-probs are the exact model's, whoever drew."""

import numpy as np
import pytest
import torch

from tltlab.runtime.data.order import DataOrder
from tltlab.runtime.data.prompts import Prompt
from tltlab.runtime.engine.engine import Engine
from tltlab.runtime.rollout.worker import enough, packed
from tltlab.runtime.run.data import rollouts_of

from ..engine.asking import fixed
from ..small_models import loaded
from .scripted_engines import END, recipe, tools_of

pytestmark = pytest.mark.engine
TEMPERATURE = 0.9
CONCURRENCY = 8


@pytest.fixture(scope="module")
def engine(random_model):
    args = {"max_num_seqs": CONCURRENCY, "max_model_len": 128, "kv_cache_memory_bytes": 32 << 20}
    engine = Engine(str(random_model), max_draft_depth=3, vllm_args=args)
    engine.set_policy(fixed("ngram", 3))
    yield engine
    engine.close()


class Versions:
    """The exact policies: version 0 is the random model, each later one some noise away from it."""

    def __init__(self, folder):
        self.folder = folder
        self.models = {}

    def __getitem__(self, version):
        if version not in self.models:
            model = loaded(self.folder)
            noise = torch.Generator().manual_seed(version)
            with torch.no_grad():
                for weight in model.parameters() if version else ():
                    weight.add_(0.5 * weight.std() * torch.randn(weight.shape, generator=noise))
            self.models[version] = model
        return self.models[version]

    def rows(self, version, prompt, response):
        """[N, V] log-probs at the temperature of the response's N places."""
        with torch.no_grad():
            logits = self[version](torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        return torch.log_softmax(logits / TEMPERATURE, -1).numpy()

    def score(self, version):
        def score(pairs):
            rows = [self.rows(version, prompt, response) for prompt, response in pairs]
            return [r[np.arange(len(r)), list(t)] for r, (_, t) in zip(rows, pairs, strict=True)]

        return score


@pytest.fixture(scope="module")
def versions(random_model):
    return Versions(random_model)


def tools(engine, versions, rl_step, version):
    """One engine as the only worker, with the weights of `version`."""
    engine.update_weights(versions[version].state_dict().items(), version)

    def generate(shares, number, quotas):
        until = None if quotas is None else enough(shares[0], quotas[0])
        return [packed(engine.generate(shares[0], rl_step=rl_step, temperature=TEMPERATURE, until=until))]

    return tools_of(generate, rl_step, score=versions.score(version), policy_version=version)


def some_prompts(num):
    texts = [[1, *(4 + (n * 3 + i * 7) % 20 for i in range(6))] for n in range(num)]
    return [Prompt(prompt_id=f"p{n}", text="", answer="", token_ids=text) for n, text in enumerate(texts)]


def rollouts(num, sizes, model="none", **rollout):
    """On so many prompts; sizes are prompts a step, responses a prompt, and tokens a response."""
    names = ("prompts_per_step", "group_size", "max_response_tokens")
    settings = dict(zip(names, sizes, strict=True)) | {"num_workers": 1, "temperature": TEMPERATURE} | rollout
    return rollouts_of(recipe(settings, model=model), some_prompts(num), DataOrder(num, seed=0))


def test_tokens_have_logprobs_of_policy_that_drew_them(engine, versions):
    partial = rollouts(32, (2, 2, 40), partial={"concurrency": CONCURRENCY})
    spans = 0
    for rl_step in range(5):
        got = partial.collect(tools(engine, versions, rl_step, rl_step))
        assert len(got.trajectories) >= 4
        assert max(got.parts[0].iterations["batch"].to_pylist()) <= CONCURRENCY
        for t in got.trajectories:
            exact = {v: versions.rows(v, t.prompt.token_ids, t.token_ids) for v in set(t.token_versions)}
            spans += len(exact) > 1
            drawn = enumerate(zip(t.token_versions, t.token_ids, strict=True))
            expected = [exact[v][i, token] for i, (v, token) in drawn]
            assert list(t.logprobs) == pytest.approx(expected, abs=1e-3)
            assert t.truncated == (t.token_ids[-1] != END)
            assert len(t.token_ids) == 40 if t.truncated else END not in t.token_ids[:-1]
    assert spans > 1


def test_reuse_keeps_all_of_the_same_policy(engine, versions, random_model):
    """After the policy moved, some is kept and the rest drawn anew, and every log-prob is that of the new one."""
    reusing = rollouts(4, (4, 4, 40), random_model, reuse={})
    first = reusing.collect(tools(engine, versions, 0, 0))
    texts = {(t.prompt.prompt_id, t.sample): t.token_ids for t in first.trajectories}
    second = reusing.collect(tools(engine, versions, 1, 0))
    assert second.requests == [[]]
    assert {(t.prompt.prompt_id, t.sample): t.token_ids for t in second.trajectories} == texts
    third = reusing.collect(tools(engine, versions, 2, 1))
    new = sum(len(r.token_ids) for r in third.parts[0].responses)
    assert 0 < new < sum(len(t.token_ids) for t in third.trajectories)
    for t in third.trajectories:
        rows = versions.rows(1, t.prompt.token_ids, t.token_ids)
        assert list(t.logprobs) == pytest.approx(rows[np.arange(len(rows)), t.token_ids], abs=1e-3)
        assert list(t.token_versions) == [1] * len(t.token_ids)
        assert len(t.token_ids) == 40 if t.truncated else t.token_ids[-1] == END
