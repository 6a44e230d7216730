"""An engine that continues like another: reseeded randomness, restored state, replayed choices."""

import itertools
import json

import pytest

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.policies.policy import Policy
from tltlab.policies.specs import BegMabSpec, Bucket, ExploreSpec
from tltlab.runtime.engine.engine import Engine
from tltlab.runtime.engine.generation import PolicyFailed
from tltlab.strategy import NO_SPECULATION, Strategy

from .asking import fixed, request

SUFFIX = fixed("suffix")
ARMS = (Strategy.chain("suffix", 4), Strategy.chain("ngram", 2), NO_SPECULATION)
ADAPTIVE = {
    "explore": Policy(selector=ExploreSpec(strategies=ARMS, hold_iterations=2)),
    "beg-mab": Policy(selector=BegMabSpec(buckets=(Bucket(min_batch=1, strategies=ARMS),))),
}


@pytest.fixture(scope="module")
def engines(random_model):
    """Two engines of the same weights, with their own seeds."""
    args = {"max_model_len": 128, "max_num_seqs": 32, "kv_cache_memory_bytes": 32 << 20}
    made = [Engine(str(random_model), max_draft_depth=4, seed=seed, vllm_args=args) for seed in range(2)]
    yield made
    for engine in made:
        engine.close()


def generate(engine, rl_step, *, prompts=3, tokens=28, **more):
    slots = itertools.product(range(prompts), range(4))
    rest = {"rl_step": rl_step, "ignore_eos": False}
    asked = [request(f"p{n}", k, [1, 4 + n, 5], tokens + n, **rest) for n, k in slots]
    return engine.generate(asked, rl_step=rl_step, temperature=1.0, **more)


def texts(rollout):
    return [(response.token_ids, response.logprobs) for response in rollout.responses]


def choices(rollout):
    names = ("iteration", "drafter", "draft_depth", "tokens_to_verify", "propensity", "bucket")
    return [tuple(row[name] for name in names) for row in rollout.decisions.to_pylist()]


@pytest.mark.engine
def test_engines_continue_alike_from_state_and_seed(engines):
    for number, engine in enumerate(engines):
        engine.set_policy(SUFFIX)
        for rl_step in range(number + 1):
            generate(engine, rl_step, prompts=2 + number)
    one = engines[0]
    state = one.state_dict()
    assert json.loads(json.dumps(state, allow_nan=False)) == state
    went_on = []
    for engine in engines:
        engine.load_state_dict(state)
        assert engine.state_dict() == state
        found = []
        for rl_step in (1, 2):
            engine.reseed([7, 0, rl_step, 0])
            rollout = generate(engine, rl_step)
            found.append((texts(rollout), [row["num_drafted"] for row in rollout.iterations.to_pylist()]))
        assert sum(found[1][1]) > 20
        went_on.append((found, engine.state_dict()["drafters"]))
    assert went_on[0] == went_on[1]
    one.load_state_dict(state)
    one.reseed([7, 0, 1, 1])
    assert texts(generate(one, 1)) != went_on[0][0][0][0]


def afresh(engines, kind):
    """They have forgotten everything, and are under the same policy."""
    for engine in engines:
        engine.forget()
        engine.set_policy(ADAPTIVE[kind], seed=[3])
    return engines


def answer(engine, seed, *, num=3, saved=False):
    """Up to three rollouts, the last two of one RL step; with `saved` the engine loads its own state before each."""
    rollouts = []
    for number, rl_step in enumerate((0, 1, 1)[:num]):
        if saved:
            engine.load_state_dict(engine.state_dict())
        engine.reseed([seed, rl_step, number])
        rollouts.append(generate(engine, rl_step, tokens=20 + 5 * number))
    return rollouts


def decisions(rollouts):
    """Rows as a trace has them: iterations of the rollouts of one RL step are counted on."""
    rows, before = [], 0
    for number, rollout in enumerate(rollouts):
        before = before if number == 2 else 0
        rows += [row | {"iteration": row["iteration"] + before} for row in rollout.decisions.to_pylist()]
        before += len(rollout.iterations.to_pylist())
    return rows


@pytest.mark.engine
@pytest.mark.parametrize("kind", ADAPTIVE)
def test_decisions_repeat_an_adaptive_run_exactly(engines, kind):
    first, other = afresh(engines, kind)
    once = answer(first, 5)
    rows = decisions(once)
    assert {row["drafter"] for row in rows} == {"suffix", "ngram", "none"}
    other.replay(rows)
    other.evaluate([request("e", 0, [1, 9], 9, rl_step=-1)], temperature=1.0)
    again = answer(other, 5)
    for of in (texts, choices):
        assert list(map(of, again)) == list(map(of, once))
    # After the last RL step of the rows the policy chooses, and draws what it would have drawn.
    assert other.state_dict()["selector"]["rng"] == first.state_dict()["selector"]["rng"]
    other.reseed([1])
    assert generate(other, 2).decisions.to_pylist()


@pytest.mark.engine
def test_a_restored_replay_continues_within_an_rl_step(engines):
    first, second = afresh(engines, "explore")
    once = answer(first, 5, saved=True)
    second.replay(decisions(once))
    answer(second, 5, num=2, saved=True)
    state = second.state_dict()
    both = [lambda: second.replay(decisions(once)), lambda: second.load_state_dict(state)]
    for in_order in (both, both[::-1]):
        second.set_policy(ADAPTIVE["explore"], seed=[9])
        for does in in_order:
            does()
        second.reseed([5, 1, 2])
        again = generate(second, 1, tokens=30)
        assert choices(again) == choices(once[2])
        assert texts(again) == texts(once[2])


@pytest.mark.engine
def test_a_replay_that_does_not_fit_states_where(engines):
    first, second = engines
    first.set_policy(ADAPTIVE["explore"], seed=[3])
    rows = generate(first, 0).decisions.to_pylist()
    for other in (SUFFIX, None):
        second.set_policy(other)
        with refused(ConfigError):
            second.replay(rows)
    second.set_policy(ADAPTIVE["explore"], seed=[3])
    second.replay([row for row in rows if row["iteration"] != 5])
    for _ in range(2):
        with refused(PolicyFailed, naming=("0", "5", "wrappers.py")):
            generate(second, 0)
    second.set_policy(None)
    assert [len(response.token_ids) for response in generate(second, 0).responses]
