"""Prefixes from the epoch before: what is kept, and what a later visit knows."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.runtime.rollout.prefix_reuse import keep_chances, kept_prefix

from .scripted_engines import ScriptedEngines, prompts, recipe, resumed, ways


def test_token_is_kept_by_ratio_of_its_probabilities():
    now, then = np.log([0.2, 0.5, 0.1]), np.log([0.4, 0.25, 0.5])
    for leniency, chances in ((1.0, [0.5, 1.0, 0.2]), (1.5, [0.75, 1.0, 0.3]), (1e9, [1.0, 1.0, 1.0])):
        assert keep_chances(now, then, leniency) == pytest.approx(chances)
    for num, draws in enumerate(([0.51, 0.0, 0.0], [0.49, 1.0, 0.0], [0.49, 0.99, 0.21], [0.49, 0.99, 0.19])):
        assert kept_prefix(now, then, 1.0, np.array(draws)) == num
    assert kept_prefix(np.array([-np.inf]), np.array([-1.0]), 1.0, np.array([0.0])) == 0
    assert kept_prefix(now, now, 1.0, np.full(3, np.nextafter(1, 0))) == 3


def one_group(reuse, length, **rollout):
    """Scripted engines on two workers and one prompt of two samples."""
    sizes = {"prompts_per_step": 1, "group_size": 2, "max_response_tokens": 20, "reuse": reuse}
    rollouts = ways(sizes | rollout, 1, model=Path("none"))
    return ScriptedEngines(2, length), rollouts


def scoring(logprobs):
    return lambda pairs: [logprobs(tokens) for _, tokens in pairs]


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


def test_a_resumed_run_reuses_as_the_unbroken_one(tmp_path):
    def run(rollouts, steps):
        out = []
        for rl_step in steps:
            got = rollouts.collect(engines.tools(rl_step, score=scoring(halved)))
            out.append((got.trajectories, got.requests, got.notes))
        return out

    engines, rollouts = one_group({}, lambda prompt, sample: 30 if sample else 15)
    expected = run(rollouts, range(4))
    first = one_group({}, None)[1]
    run(first, range(2))
    second = resumed(first, one_group({}, None)[1], tmp_path)
    assert run(second, range(2, 4)) == expected[2:]
