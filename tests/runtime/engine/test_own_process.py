"""An engine whose core runs in another process: the same policy, the same rows, and its death in one line."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from tltlab.drafters.base import Key
from tltlab.drafters.specs import DEFAULT_DRAFTERS, LearnedSpec
from tltlab.errors import ConfigError
from tltlab.policies.policy import BegMabSpec, Bucket, FixedSpec, Policy
from tltlab.policies.simple import NoSpeculation
from tltlab.runtime.engine.engine import Engine, EngineDied, GenerationRequest, Rollout
from tltlab.strategy import NO_SPECULATION, Strategy

pytestmark = pytest.mark.engine
ARMS = (Strategy.chain("suffix", 4), Strategy.chain("learned", 2), NO_SPECULATION)


@pytest.fixture(scope="module")
def engine(random_model: Path) -> Iterator[Engine]:
    engine = Engine(
        str(random_model),
        drafters={**DEFAULT_DRAFTERS, "learned": LearnedSpec(method="draft_model", model=str(random_model))},
        max_draft_depth=4,
        own_process=True,
        vllm_args={"max_model_len": 256, "max_num_seqs": 32, "kv_cache_memory_bytes": 32 << 20},
    )
    yield engine
    engine.close()


def generate(engine: Engine, tokens: int = 60, rl_step: int = 0, temperature: float = 0.0, **more: object) -> Rollout:
    requests = [
        GenerationRequest(
            key=(rl_step, f"p{n}", 0, 0), prompt_token_ids=[1, 4 + n, 5], max_response_tokens=tokens, ignore_eos=True
        )
        for n in range(4)
    ]
    return engine.generate(requests, rl_step=rl_step, temperature=temperature, **more)  # type: ignore[arg-type]


def texts(rollout: Rollout) -> list[list[int]]:
    return [response.token_ids for response in rollout.responses]


def test_a_policy_chooses_there_and_the_rows_come_back(engine: Engine):
    engine.set_policy(Policy(selector=BegMabSpec(buckets=(Bucket(min_batch=1, strategies=ARMS),))))
    rollout = generate(engine, temperature=0.9)
    assert {row["drafter"] for row in rollout.decisions} == {"suffix", "learned", "none"}
    assert sum(row["num_generated"] for row in rollout.iterations) >= 4 * 60
    for before, after in pairwise(rollout.iterations):
        assert after["draft_depth"] == before["next_draft_depth"]
    drafted = [row for row in rollout.iterations if row["next_draft_depth"] and row["batch"] == 4]
    assert all(row["draft_duration"] > 0 for row in drafted)


def test_history_and_weights_reach_it(engine: Engine, random_model: Path):
    from transformers import AutoModelForCausalLM

    engine.set_policy(None)
    plain = texts(generate(engine))
    engine.forget()
    engine.set_policy(Policy(selector=FixedSpec(strategy=ARMS[0])))
    engine.remember([((0, f"p{n}", 9, 0), [1, 4 + n, 5], text) for n, text in enumerate(plain)])
    followed = generate(engine, rl_step=1)
    assert texts(followed) == plain
    assert sum(row["num_accepted"] for row in followed.iterations) > 0.9 * sum(
        row["num_drafted"] for row in followed.iterations
    )
    weights = AutoModelForCausalLM.from_pretrained(random_model, dtype="float32").state_dict()
    engine.update_weights(((k, -v if k == "lm_head.weight" else v) for k, v in weights.items()), 1)
    assert texts(generate(engine, rl_step=2)) != plain
    engine.update_weights(weights.items(), 2)
    assert texts(generate(engine, rl_step=3)) == plain
    engine.update_draft_weights(weights.items())


def test_evaluation_leaves_the_policy_alone(engine: Engine):
    engine.set_policy(Policy(selector=FixedSpec(strategy=ARMS[1])))
    request = GenerationRequest(key=(0, "e", 0, 0), prompt_token_ids=[1, 4, 5], max_response_tokens=20)
    assert not any(row["num_drafted"] for row in engine.evaluate([request], temperature=0.9).iterations)
    assert any(row["num_drafted"] for row in generate(engine).iterations)


def test_what_cannot_travel_is_refused(engine: Engine):
    with pytest.raises(ConfigError, match="takes a Policy"):
        engine.set_policy(NoSpeculation())
    with pytest.raises(ConfigError, match="no snapshots"):
        engine.snapshot()
    with pytest.raises(ConfigError, match="in another process"):
        _ = engine.control


def test_its_randomness_can_be_reseeded_and_what_it_learned_carried_over(engine: Engine):
    engine.set_policy(Policy(selector=FixedSpec(strategy=ARMS[0])))
    request = GenerationRequest(key=(1, "p", 0, 0), prompt_token_ids=[1, 4], max_response_tokens=40, ignore_eos=True)
    state = engine.state_dict()
    drawn = []
    for seed in (7, 8, 7):
        engine.load_state_dict(state)
        assert engine.state_dict() == state
        engine.reseed([seed, 1])
        drawn.append(texts(engine.generate([request], rl_step=1, temperature=1.0)))
    assert drawn[0] == drawn[2] != drawn[1]


def test_a_killed_engine_core_hands_over_what_had_come_back(engine: Engine):
    """The last test of the file: the engine is gone after it."""
    (process,) = engine.llm.llm_engine.engine_core.resources.engine_manager.processes
    short = GenerationRequest(key=(5, "s", 0, 0), prompt_token_ids=[1, 4], max_response_tokens=3, ignore_eos=True)
    long = GenerationRequest(key=(5, "l", 0, 0), prompt_token_ids=[1, 5], max_response_tokens=240, ignore_eos=True)
    engine.set_policy(None)

    def killed(ended: Sequence[Key]) -> bool:
        if ended:
            os.kill(process.pid, signal.SIGKILL)
        return False

    with pytest.raises(EngineDied, match="lost 1 of 2 responses") as caught:
        engine.generate([short, long], rl_step=5, temperature=0.9, until=killed)
    assert [len(r.token_ids) for r in caught.value.responses] == [3]
    assert caught.value.lost == [long.key]
