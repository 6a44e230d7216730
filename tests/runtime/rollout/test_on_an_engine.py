"""Partial rollouts and reuse on a real engine: log-probs and distributions are the exact model's, whoever drew."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from tltlab.runtime.data.order import DataOrder
from tltlab.runtime.data.prompts import Prompt
from tltlab.runtime.drafter.offline.data import load_tokenizer
from tltlab.runtime.engine.engine import Engine
from tltlab.runtime.recipe.sections import EnvironmentConfig
from tltlab.runtime.rollout.collected import requests_of, turns_of
from tltlab.runtime.rollout.environments import Conversations, EnvironmentPool, stop_token_ids
from tltlab.runtime.rollout.worker import enough, packed
from tltlab.runtime.run.data import rollouts_of

from ..engine.asking import fixed
from ..small_models import loaded
from .scripted_engines import END, recipe, tools_of

pytestmark = pytest.mark.engine
TEMPERATURE = 0.9
CONCURRENCY = 8
ECHO = """
class Echo:
    stop = ("w0", "w1", "w2", "w3", "w4")

    def step(self, messages):
        return "w5 w6"
"""


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
        def score(pairs, *, distributions=False):
            rows = [self.rows(version, prompt, response) for prompt, response in pairs]
            return [
                r if distributions else r[np.arange(len(r)), list(t)] for r, (_, t) in zip(rows, pairs, strict=True)
            ]

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


def test_exact_reuse_keeps_all_of_the_same_policy(engine, versions, random_model):
    """After the policy moved, some is kept and the rest drawn anew, and every log-prob is that of the new one."""
    reusing = rollouts(4, (4, 4, 40), random_model, reuse={"residual": "exact"})
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


def test_exact_reuse_leaves_the_policys_distribution(engine, versions, random_model):
    """First and second tokens of 512 responses to one prompt, many of them kept from the policy before."""
    (prompt,) = some_prompts(1)
    reusing = rollouts(1, (1, 512, 2), random_model, reuse={"residual": "exact"})
    reusing.collect(tools(engine, versions, 0, 0))
    got = reusing.collect(tools(engine, versions, 1, 9))
    words = range(24)
    first, second = np.zeros(24), np.zeros(24)
    for t in got.trajectories:
        first[t.token_ids[0]] += 1
        second[t.token_ids[1] if len(t.token_ids) > 1 else END] += 1

    def chances(version):
        """The chi-square test's for both tokens; a response that has ended continues ending."""
        one = np.exp(versions.rows(version, prompt.token_ids, [0])[0].astype(np.float64))
        two = np.stack([np.exp(versions.rows(version, prompt.token_ids, [w, 0])[1].astype(np.float64)) for w in words])
        two[END] = np.eye(24)[END]
        return tuple(chisquare(seen, 512 * p / p.sum()).pvalue for seen, p in ((first, one), (second, one @ two)))

    assert min(chances(9)) > 1e-4
    assert min(chances(0)) < 1e-6


def test_turns_are_drawn_behind_what_tools_say(engine, versions, random_model, tmp_path):
    (tmp_path / "echoing.py").write_text(ECHO)
    config = EnvironmentConfig(path="echoing:Echo", processes=0, max_turns=4)
    pool, tokenizer = EnvironmentPool(config, [str(tmp_path)]), load_tokenizer(str(random_model))
    stops = stop_token_ids(config, [str(tmp_path)], tokenizer)
    engine.update_weights(versions[0].state_dict().items(), 0)
    plain = [request for prompt in some_prompts(6) for request in requests_of(prompt, 0, 2, 40)]
    asked = [replace(request, stop_token_ids=stops) for request in plain]
    conversations = Conversations(pool, config, tokenizer, stops, engine.max_model_len)
    rolled = engine.generate(asked, rl_step=0, temperature=TEMPERATURE, follow_ups=conversations)
    requests = [*asked, *rolled.follow_ups]
    assert [r.key for r in rolled.responses] == [r.key for r in requests]
    assert len(rolled.follow_ups) > 6
    found = {response.key: response for response in rolled.responses}
    for request in asked:
        turns = list(turns_of(request.key, found))
        assert len(turns) <= 4
        for before, after in pairwise(turns):
            assert before.token_ids[-1] in stops
            assert list(after.observed) == tokenizer.encode("w5 w6", add_special_tokens=False)
            assert after.t_submit >= before.t_finish
            assert after.tool_s is not None
        text = []
        for turn in turns:
            text += [*turn.observed, *turn.token_ids]
            rows = versions.rows(0, request.prompt_token_ids, text)[-len(turn.token_ids) :]
            assert list(turn.logprobs) == pytest.approx(rows[np.arange(len(rows)), list(turn.token_ids)], abs=1e-3)
        assert len(text) <= 40
    ran = sum(row["num_generated"] for row in rolled.iterations.to_pylist())
    assert ran >= sum(len(r.token_ids) for r in rolled.responses)
