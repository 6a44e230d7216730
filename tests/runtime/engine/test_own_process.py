"""An engine whose core runs in another process: the same policy, the same rows, and its death in one line."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.refused import refused
from tltlab.coordination.canary import CanaryConfig
from tltlab.drafters.base import Key
from tltlab.drafters.specs import DEFAULT_DRAFTERS, LearnedSpec
from tltlab.errors import ConfigError, RunError
from tltlab.policies.policy import Policy
from tltlab.policies.simple import NoSpeculation
from tltlab.policies.specs import BegMabSpec, Bucket
from tltlab.runtime.drafter.sequences import TrainingSequence
from tltlab.runtime.engine.engine import Engine
from tltlab.runtime.engine.generation import EngineDied, Rollout
from tltlab.strategy import NO_SPECULATION, Strategy

from .asking import changed, fixed, groups_of_four, kept_and_refused, request, requests, settings, texts
from .vllm.test_capture import Files, check, load

pytestmark = pytest.mark.engine
ARMS = (Strategy.chain("suffix", 4), Strategy.chain("learned", 2), NO_SPECULATION)
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def engine(random_model: Path) -> Iterator[Engine]:
    before = settings()
    learned = LearnedSpec(method="draft_model", model=str(random_model), fallback="suffix")
    drafters = {**DEFAULT_DRAFTERS, "learned": learned}
    args = {"max_model_len": 256, "max_num_seqs": 32, "kv_cache_memory_bytes": 32 << 20}
    engine = Engine(str(random_model), drafters=drafters, max_draft_depth=4, own_process=True, vllm_args=args)
    assert changed(before) == []
    yield engine
    engine.close()
    assert changed(before) == []


def generate(engine: Engine, rl_step: int = 0, temperature: float = 0.0) -> Rollout:
    return engine.generate(requests(4, 60, rl_step=rl_step), rl_step=rl_step, temperature=temperature)


def test_a_policy_chooses_there_and_the_rows_come_back(engine: Engine):
    engine.set_policy(Policy(selector=BegMabSpec(buckets=(Bucket(min_batch=1, strategies=ARMS),))))
    rollout = generate(engine, temperature=0.9)
    assert {row["drafter"] for row in rollout.decisions} == {"suffix", "learned", "none"}
    assert sum(row["num_generated"] for row in rollout.iterations) >= 4 * 60
    for before, after in pairwise(rollout.iterations):
        assert after["draft_depth"] == before["next_draft_depth"]
    drafted = [row for row in rollout.iterations if row["next_draft_depth"] and row["batch"] == 4]
    assert all(row["draft_duration"] > 0 for row in drafted)


def test_history_and_weights_reach_it(engine: Engine, good: Weights, bad: Weights):
    engine.set_policy(None)
    plain = texts(generate(engine))
    engine.forget()
    engine.set_policy(fixed("suffix"))
    engine.remember([((0, f"p{n}", 9, 0), [1, 4 + n, 5], text) for n, text in enumerate(plain)])
    followed = generate(engine, rl_step=1)
    assert texts(followed) == plain
    kept, refused = kept_and_refused(followed)
    assert kept > 9 * refused
    engine.update_weights(bad.items(), 1)
    assert texts(generate(engine, rl_step=2)) != plain
    engine.update_weights(good.items(), 2)
    assert texts(generate(engine, rl_step=3)) == plain


def test_its_learned_drafter_is_watched_as_well(engine: Engine, good: Weights, bad: Weights):
    watch = CanaryConfig(min_drafts=50)
    expected = texts(generate(engine))
    engine.set_policy(fixed("learned"))
    engine.guard_drafter(watch)
    engine.update_draft_weights(bad.items(), [0.8] * 4)
    assert texts(generate(engine)) == expected
    report = engine.drafter_report()
    assert not report.serves
    assert report.verdicts[-1].kind == "collapsed"
    assert asdict(report)["positions"]["suffix"]["drafted"][0] > 0
    engine.guard_drafter(watch.model_copy(update={"on_collapse": "stop"}))
    engine.update_draft_weights(bad.items(), [0.8] * 4)
    with refused(RunError, naming=("collapsed",)):
        generate(engine)
    engine.update_draft_weights(good.items())
    assert texts(generate(engine)) == expected


def test_evaluation_leaves_the_policy_alone(engine: Engine):
    engine.set_policy(fixed("learned", 2))
    asked = [request("e", 0, [1, 4, 5], 20)]
    assert not any(row["num_drafted"] for row in engine.evaluate(asked, temperature=0.9).iterations)
    assert any(row["num_drafted"] for row in generate(engine).iterations)


def test_its_hidden_states_are_taken_there(engine: Engine, random_model: Path, tmp_path: Path):
    files, asked = Files(tmp_path), groups_of_four(8, 30, 40)
    engine.set_policy(fixed("suffix"))
    engine.capture(files, max_bytes=1 << 20)
    rollout = engine.generate(asked, rl_step=1, temperature=1.0)
    check(files.read(), rollout, asked, load(random_model))
    with engine.uncaptured():
        generate(engine, rl_step=1)
    engine.capture(None)
    generate(engine, rl_step=1)
    assert files.read() == []
    assert (engine.captured.sequences, engine.captured.failure) == (8, "")


def test_what_cannot_travel_is_refused(engine: Engine):
    for asked in (
        lambda: engine.capture(lambda sequence: None),
        lambda: engine.set_policy(NoSpeculation()),
        engine.snapshot,
        lambda: engine.control,
    ):
        with refused(ConfigError):
            asked()


def test_its_randomness_can_be_reseeded_and_what_it_learned_carried_over(engine: Engine):
    engine.set_policy(fixed("suffix"))
    state = engine.state_dict()
    drawn = []
    for seed in (7, 8, 7):
        engine.load_state_dict(state)
        assert engine.state_dict() == state
        engine.reseed([seed, 1])
        drawn.append(texts(engine.generate([request("p", 0, [1, 4], 40)], rl_step=1, temperature=1.0)))
    assert drawn[0] == drawn[2] != drawn[1]


def hangs_at_the_long_one(sequence: TrainingSequence) -> None:
    """Else the engine core may be done, and have said so, before the killer's process gets a processor."""
    core = os.getppid()
    while sequence.key[1] == "l" and os.getppid() == core:
        time.sleep(0.05)


def test_a_killed_engine_core_hands_over_what_had_come_back(engine: Engine):
    """The last test of the file: the engine is gone after it."""
    engine.capture(hangs_at_the_long_one)
    (process,) = engine.llm.llm_engine.engine_core.resources.engine_manager.processes
    short, long = request("s", 0, [1, 4], 3), request("l", 0, [1, 5], 240)
    engine.set_policy(None)

    def killed(ended: Sequence[Key]) -> bool:
        if ended:
            os.kill(process.pid, signal.SIGKILL)
        return False

    with refused(EngineDied, naming=("1", "2")) as caught:
        engine.generate([short, long], rl_step=5, temperature=0.9, until=killed)
    assert [len(r.token_ids) for r in caught.value.responses] == [3]
    assert caught.value.lost == [long.key]
