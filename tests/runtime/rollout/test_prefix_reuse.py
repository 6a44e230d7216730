"""Prefixes from the epoch before: what is kept, that the residual makes it exact, and what a later visit knows."""

import json
import shutil
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chisquare

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.runtime.rollout.collected import save_ragged
from tltlab.runtime.rollout.prefix_reuse import (
    EARLIER_FILE,
    end_tokens,
    keep_chances,
    kept_prefix,
    residual,
)

from .scripted_engines import END, ScriptedEngines, prompts, recipe, response, resumed, rolled, tools_of, ways

Tokens = tuple[int, ...]
CAP = 3


class ToyPolicy:
    """A policy over `num_words` words, END (2) among them, for responses of up to 3 tokens: log-probs [V] by prefix."""

    def __init__(self, seed, num_words):
        rng = np.random.default_rng(seed)
        self.num_words = num_words
        self.rows = {
            prefix: np.log(rng.dirichlet(np.full(num_words, 2.0)))
            for length in range(CAP)
            for prefix in product(range(num_words), repeat=length)
        }
        self.sums = {prefix: np.exp(row).cumsum() for prefix, row in self.rows.items()}

    def responses(self):
        """Every whole response and its probability."""
        return self.continuations((), 1.0)

    def continuations(self, prefix, chance):
        if len(prefix) == CAP or prefix[-1:] == (END,):
            return {prefix: chance}
        out = {}
        for token in range(self.num_words):
            out |= self.continuations((*prefix, token), chance * float(np.exp(self.rows[prefix][token])))
        return out

    def scored(self, tokens):
        return np.stack([self.rows[tokens[:i]] for i in range(len(tokens))])


def test_token_is_kept_by_ratio_of_its_probabilities():
    now, then = np.log([0.2, 0.5, 0.1]), np.log([0.4, 0.25, 0.5])
    for leniency, chances in ((1.0, [0.5, 1.0, 0.2]), (1.5, [0.75, 1.0, 0.3]), (1e9, [1.0, 1.0, 1.0])):
        assert keep_chances(now, then, leniency) == pytest.approx(chances)
    for num, draws in enumerate(([0.51, 0.0, 0.0], [0.49, 1.0, 0.0], [0.49, 0.99, 0.21], [0.49, 0.99, 0.19])):
        assert kept_prefix(now, then, 1.0, np.array(draws)) == num
    assert kept_prefix(np.array([-np.inf]), np.array([-1.0]), 1.0, np.array([0.0])) == 0
    assert kept_prefix(now, now, 1.0, np.full(3, np.nextafter(1, 0))) == 3


def test_residual_is_what_policy_before_gave_too_little():
    now, then = np.log([0.5, 0.3, 0.2]), np.log([0.2, 0.2, 0.6])
    assert residual(now, then) == pytest.approx([0.75, 0.25, 0.0])
    assert residual(now, now) == pytest.approx([0.5, 0.3, 0.2])
    assert residual(now.astype(np.float32), then.astype(np.float32)).sum() == pytest.approx(1.0, abs=1e-15)


class ToyTools:
    """An engine that samples from a toy policy, and a trainer that scores with it."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.num_generated = 0

    def __call__(self, rl_step, policy):
        self.policy = policy
        return tools_of(self.generate, rl_step, score=self.score)

    def score(self, pairs, *, distributions=False):
        rows = [self.policy.scored(tuple(tokens)) for _, tokens in pairs]
        return [
            (r if distributions else r[np.arange(len(tokens)), tokens]).astype(np.float32)
            for r, (_, tokens) in zip(rows, pairs, strict=True)
        ]

    def generate(self, shares, number, quotas):
        responses = []
        for request in shares[0]:
            prefix = tuple(request.prompt_token_ids[3:])
            tokens, logprobs = prefix, []
            while len(tokens) < CAP and tokens[-1:] != (END,):
                row, sums = self.policy.rows[tokens], self.policy.sums[tokens]
                tokens += (min(int(sums.searchsorted(self.rng.random())), len(row) - 1),)
                logprobs.append(float(row[tokens[-1]]))
            assert len(prefix) < len(tokens) <= len(prefix) + request.max_response_tokens
            self.num_generated += len(tokens) - len(prefix)
            new, why = list(tokens[len(prefix) :]), "stop" if tokens[-1] == END else "length"
            responses.append(response(request.key, new, logprobs=logprobs, finish_reason=why))
        return [rolled(responses)]


def reusing(model, num_prompts, reuse, **rollout):
    sizes = {"prompts_per_step": num_prompts, "group_size": 8, "max_response_tokens": CAP}
    return ways(sizes | rollout | {"reuse": reuse}, num_prompts, model=model)


def test_reuse_draws_from_the_active_policy(random_model):
    """Policies alternate, so each visit reuses what another drew, and nobody can tell."""
    policies = ToyPolicy(0, 4), ToyPolicy(1, 4)
    rollouts = reusing(random_model, 10, {"residual": "exact"}, group_size=200)
    tools = ToyTools(5)
    counts = Counter[Tokens](), Counter[Tokens]()
    num_tokens = 0
    for rl_step in range(5):
        for t in rollouts.collect(tools(rl_step, policies[rl_step % 2])).trajectories:
            num_tokens += len(t.token_ids)
            counts[rl_step % 2][tuple(t.token_ids)] += bool(rl_step)
            expected = policies[rl_step % 2].scored(tuple(t.token_ids))[np.arange(len(t.token_ids)), t.token_ids]
            assert np.abs(np.array(t.logprobs) - expected).max() < 1e-5
            assert list(t.token_versions) == [rl_step] * len(t.token_ids)
            assert t.truncated == (t.token_ids[-1] != END)
    for policy, seen in zip(policies, counts, strict=True):
        true = policy.responses()
        assert set(seen) <= set(true)
        expected = [chance * seen.total() for chance in true.values()]
        assert chisquare([seen[r] for r in true], expected).pvalue > 1e-3
    assert tools.num_generated < 0.7 * num_tokens


def one_group(reuse, length, **rollout):
    """Scripted engines on two workers and one prompt of two samples."""
    rollouts = reusing(Path("none"), 1, reuse, group_size=2, max_response_tokens=20, **rollout)
    return ScriptedEngines(2, length), rollouts


def scoring(logprobs):
    return lambda pairs, distributions=False: [logprobs(tokens) for _, tokens in pairs]


def test_an_engine_continues_behind_the_last_token_kept():
    """Sample 0 keeps all and needs no engine; sample 1 loses its fifth token, and the engine gets what is before."""
    engines, rollouts = one_group({}, lambda prompt, sample: 30 if sample else 6)
    first = rollouts.collect(engines.tools(0))
    assert [(len(t.token_ids), t.truncated) for t in first.trajectories] == [(6, False), (20, True)]

    def then_but_fifth(tokens):
        logprobs = np.array([-(i / 100) for i in range(len(tokens))])
        return logprobs - 50.0 * ((np.arange(len(tokens)) == 4) & (len(tokens) == 20))

    second = rollouts.collect(engines.tools(1, score=scoring(then_but_fifth)))
    (request,) = [r for share in second.requests for r in share]
    assert request.key == (1, "p0", 1, 0)
    assert request.prompt_token_ids == [*prompts(1)[0].token_ids, *first.trajectories[1].token_ids[:4]]
    assert request.max_response_tokens == 16
    assert [t.token_ids for t in second.trajectories] == [t.token_ids for t in first.trajectories]
    expected = [-(i / 100) for i in range(4)] + [-(1 + i / 100) for i in range(4, 20)]
    assert list(second.trajectories[1].logprobs) == pytest.approx(expected, rel=1e-6)
    assert [t.truncated for t in second.trajectories] == [False, True]
    assert all(list(t.token_versions) == [1] * len(t.token_ids) for t in second.trajectories)
    assert "10 of 26 tokens" in second.notes[0]
    assert "1 of 2 responses" in second.notes[0]
    assert set(second.rewards) == {(1, "p0", 0, 0), (1, "p0", 1, 0)}
    assert [len(group) for group in second.groups] == [2]


def test_empty_states_restore_and_caps_are_checked(tmp_path):
    engines, rollouts = one_group({}, lambda prompt, sample: 6)
    for nothing in (json.loads(json.dumps(rollouts.state_dict(tmp_path))), {}):
        rollouts.load_state_dict(nothing, tmp_path)
        assert len(rollouts.collect(engines.tools(0)).trajectories) == 2
    state = rollouts.state_dict(tmp_path)
    rollouts.recipe = recipe({"max_response_tokens": 5, "reuse": {}})
    with refused(ConfigError, naming=("6", "5")):
        rollouts.load_state_dict(state, tmp_path)


def halved(tokens):
    """Every token is half as likely as when the scripted engine drew it under version 0."""
    return np.array([-(i / 100) for i in range(len(tokens))]) + np.log(0.5)


def test_leniency_keeps_more_and_draws_differ():
    kept, cuts = [], []
    for leniency in (1.0, 1.6, 1e9):
        for rl_step in range(1, 4):
            engines, rollouts = one_group({"leniency": leniency}, lambda prompt, sample: 15)
            rollouts.collect(engines.tools(0))
            got = rollouts.collect(engines.tools(rl_step, score=scoring(halved)))
            cuts.append([20 - r.max_response_tokens for share in got.requests for r in share])
        kept.append(sum(cut for of_step in cuts[-3:] for cut in of_step))
    assert got.requests == [[], []], "all is kept"
    assert kept[0] < kept[1]
    assert len({cut for of_step in cuts for cut in of_step}) > 2, cuts
    assert any(a != b for a, b in cuts[:6])


def certain(token):
    """[V]: all but 1e-9 on `token`."""
    row = np.full(128, np.log(1e-9 / 127), np.float32)
    row[token] = 0.0
    return row


@pytest.mark.parametrize(("drawn", "place", "whole"), [(END, 3, True), (20, 3, False), (20, 19, True), (END, 19, True)])
def test_a_residual_token_may_end_the_response(random_model, tmp_path, drawn, place, whole):
    """The active policy wants `drawn` at `place` of a response of 20 tokens, the cap: END and the cap end it."""
    tokens = [4 + i % 10 for i in range(20)]
    rollouts = reusing(random_model, 1, {"residual": "exact"}, group_size=2, max_response_tokens=20)
    earlier = np.stack([certain(token) for token in tokens])
    columns = {"token_ids": np.array(tokens, np.int32), "logprobs": np.zeros(20, np.float32), "rows": earlier}
    save_ragged(tmp_path / EARLIER_FILE, **{name: [values] * 2 for name, values in columns.items()})
    rollouts.load_state_dict({"earlier": [["p0", sample, True] for sample in range(2)]}, tmp_path)

    def score(pairs, *, distributions=False):
        assert distributions
        return [np.stack([certain(drawn if i == place else t) for i, t in enumerate(ids)]) for _, ids in pairs]

    got = rollouts.collect(ScriptedEngines(2, lambda prompt, sample: 6).tools(1, score=score))
    goes_on = [] if whole else [104, END]
    for t in got.trajectories:
        assert list(t.token_ids) == [*tokens[:place], drawn, *goes_on]
        assert list(t.logprobs[: place + 1]) == [0.0] * (place + 1)
        assert t.truncated == (drawn == 20 and place == 19)
    assert [len(share) for share in got.requests] == ([0, 0] if whole else [1, 1])


@pytest.mark.parametrize("kind", ["none", "exact"])
def test_a_resumed_run_reuses_as_the_unbroken_one(random_model, tmp_path, kind):
    policies = ToyPolicy(0, 4), ToyPolicy(1, 4)

    def run(rollouts, steps):
        out = []
        for rl_step in steps:
            got = rollouts.collect(ToyTools(rl_step)(rl_step, policies[rl_step % 2]))
            out.append((got.trajectories, got.requests, got.notes))
        return out

    expected = run(reusing(random_model, 3, {"residual": kind}), range(4))
    first = reusing(random_model, 3, {"residual": kind})
    run(first, range(2))
    second = resumed(first, reusing(random_model, 3, {"residual": kind}), tmp_path)
    assert run(second, range(2, 4)) == expected[2:]
    if kind == "none":
        with refused(ConfigError):
            resumed(first, reusing(random_model, 3, {"residual": "exact"}), tmp_path)


def test_exact_refuses_what_it_cannot_keep(random_model):
    with refused(ConfigError, naming=("24", "78,643,200", "7.0", "GiB")):
        reusing(random_model, 200, {"residual": "exact"}, group_size=512, max_response_tokens=768)
    with refused(ConfigError, naming=("distribution",)):
        ways({"reuse": {"residual": "exact"}, "top_k": 5}, 2, {"correction": "none"}, random_model)


def test_end_tokens_come_from_tokenizer_and_configuration(random_model, tmp_path):
    assert end_tokens(str(random_model)) == {END}
    folder = tmp_path / "model"
    shutil.copytree(random_model, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert end_tokens(str(folder)) == {END, 7, 9}
