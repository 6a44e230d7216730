"""The canary on real engines: broken drafter weights cost speed, never a token, and never go unnoticed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from tltlab.coordination.canary import CanaryConfig
from tltlab.drafters.base import Key
from tltlab.drafters.specs import LearnedSpec, SuffixSpec
from tltlab.errors import ConfigError, RunError
from tltlab.policies.policy import FixedSpec, Policy
from tltlab.runtime.drafter.heads.kinds import new_head
from tltlab.runtime.engine.engine import Engine, GenerationRequest, Rollout
from tltlab.strategy import Strategy

pytestmark = pytest.mark.engine
VLLM = {"max_model_len": 256, "max_num_seqs": 16, "kv_cache_memory_bytes": 32 << 20}
LEARNED = Policy(selector=FixedSpec(strategy=Strategy.chain("learned", 4)))
WATCH = CanaryConfig(min_drafts=50)
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def good(random_model: Path) -> Weights:
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float32).state_dict())


@pytest.fixture(scope="module")
def bad(good: Weights) -> Weights:
    """Weights of a drafter with a wrong LM head."""
    return {name: -value if name == "lm_head.weight" else value for name, value in good.items()}


@pytest.fixture(scope="module")
def started(random_model: Path) -> Iterator[Engine]:
    """The target is its own draft model: greedily, all it drafts is kept."""
    learned = LearnedSpec(method="draft_model", model=str(random_model), fallback="suffix")
    engine = Engine(
        str(random_model),
        drafters={"suffix": SuffixSpec(), "learned": learned},
        max_draft_depth=4,
        vllm_args=VLLM,
    )
    yield engine
    engine.close()


@pytest.fixture
def engine(started: Engine, good: Weights) -> Engine:
    """The engine with its own weights on both sides, a sound prediction, and nothing in its history."""
    started.update_weights(good.items(), 0)
    started.guard_drafter(WATCH)
    started.update_draft_weights(good.items(), [0.95] * 4)
    started.forget()
    return started


def generate(engine: Engine, policy: Policy | None = LEARNED, **more: object) -> Rollout:
    engine.set_policy(policy)
    requests = [
        GenerationRequest(key=(0, f"p{n}", 0, 0), prompt_token_ids=[1, 4 + n], max_response_tokens=100, ignore_eos=True)
        for n in range(8)
    ]
    return engine.generate(requests, rl_step=0, temperature=0.0, **more)  # type: ignore[arg-type]


def texts(rollout: Rollout) -> list[list[int]]:
    return [response.token_ids for response in rollout.responses]


@pytest.fixture(scope="module")
def plain(started: Engine, good: Weights) -> list[list[int]]:
    started.update_weights(good.items(), 0)
    return texts(generate(started, None))


def test_an_engine_core_in_its_own_process_is_watched_as_well(random_model: Path, tmp_path: Path):
    """Here with a random EAGLE head, of which training is said to have predicted much.

    The first test of the file: vLLM starts no such core while one of this process is open.
    """
    head = new_head(random_model, "eagle", seed=1)
    learned = LearnedSpec(method="eagle", model=str(head.save(tmp_path / "head")), fallback="suffix")
    engine = Engine(
        str(random_model),
        drafters={"suffix": SuffixSpec(), "learned": learned},
        max_draft_depth=4,
        own_process=True,
        vllm_args=VLLM,
    )
    try:
        expected = texts(generate(engine, None))
        engine.guard_drafter(WATCH)
        engine.update_draft_weights(head.state_dict().items(), [0.8] * 4)
        assert texts(generate(engine)) == expected
        report = engine.drafter_report()
        assert not report.serves
        assert report.verdicts[-1].kind == "collapsed"
        assert asdict(report)["positions"]["suffix"]["drafted"][0] > 0
        engine.guard_drafter(WATCH.model_copy(update={"on_collapse": "stop"}))
        engine.update_draft_weights(head.state_dict().items(), [0.8] * 4)
        with pytest.raises(RunError, match="has collapsed"):
            generate(engine)
        engine.update_draft_weights(head.state_dict().items())
        assert texts(generate(engine)) == expected
    finally:
        engine.close()


def test_a_sound_drafter_is_found_fine(engine: Engine, plain: list[list[int]]):
    assert texts(generate(engine)) == plain
    report = engine.drafter_report()
    assert [verdict.kind for verdict in report.verdicts] == ["fine"]
    assert (report.drafter, report.serves, report.age) == ("learned", True, 0)
    assert min(chance or 0 for chance in report.measured) > 0.95
    assert report.positions["learned"].drafted[0] >= report.positions["learned"].drafted[3] > 100


def test_when_it_collapses_the_fallback_serves_from_the_next_iteration_on(
    engine: Engine, bad: Weights, good: Weights, plain: list[list[int]]
):
    engine.update_draft_weights(bad.items(), [0.9] * 4)
    assert texts(generate(engine)) == plain
    report = engine.drafter_report()
    assert (report.trusted, report.serves) == (False, False)
    (verdict,) = report.verdicts[-1:]
    assert verdict.kind == "collapsed"
    assert "swap" in verdict.why
    assert report.positions["learned"].drafted[0] <= WATCH.min_drafts + 2 * 8
    assert report.positions["suffix"].drafted[0] > 100
    engine.update_draft_weights(good.items(), [0.95] * 4)
    assert texts(generate(engine)) == plain
    assert engine.drafter_report().serves


def test_a_prediction_that_is_honest_about_a_bad_drafter_does_not_trip_it(engine: Engine, bad: Weights):
    engine.update_draft_weights(bad.items(), [0.02])
    generate(engine)
    assert [verdict.kind for verdict in engine.drafter_report().verdicts][-1] == "untrained"


def test_a_drafter_that_a_target_update_leaves_behind_is_found(engine: Engine, bad: Weights):
    generate(engine)
    engine.update_weights(bad.items(), 7)
    told = generate(engine, None)
    assert texts(generate(engine)) == texts(told)
    verdict = engine.drafter_report().verdicts[-1]
    assert verdict.kind == "collapsed"
    assert verdict.why.startswith("the sync of weights 7")


def test_it_looks_again_after_a_wake(engine: Engine, plain: list[list[int]]):
    generate(engine)
    engine.sleep()
    engine.wake_up()
    assert texts(generate(engine)) == plain
    assert [v.why.startswith("the engine woke") for v in engine.drafter_report().verdicts] == [False, True]


def test_where_told_to_stop_it_stops_with_a_sentence_and_the_engine_is_none_the_worse(
    engine: Engine, bad: Weights, good: Weights, plain: list[list[int]]
):
    engine.guard_drafter(WATCH.model_copy(update={"on_collapse": "stop"}))
    engine.update_draft_weights(bad.items(), [0.9] * 4)
    said = (
        r"worker 0: the learned drafter has collapsed: 0\.\d+ of 50 first draft tokens were kept since weights of \d+ "
    )
    with pytest.raises(RunError, match=said + r"updates .* training predicted 0\.900; likely .* stale weights"):
        generate(engine)
    assert not engine.llm.llm_engine.has_unfinished_requests()
    assert engine.control.live == {}
    with pytest.raises(RunError, match="has collapsed"):
        generate(engine)
    engine.update_draft_weights(good.items(), [0.9] * 4)
    assert texts(generate(engine)) == plain


def test_weights_are_swapped_between_iterations_and_nothing_is_lost(
    engine: Engine, bad: Weights, good: Weights, plain: list[list[int]]
):
    """Bad weights after 5 iterations, good ones after 15: what is said stays, what is kept of the drafts changes."""
    iterations = 0

    def swap(ended: Sequence[Key]) -> bool:
        nonlocal iterations
        iterations += 1
        if iterations in (5, 15):
            engine.update_draft_weights((bad if iterations == 5 else good).items())
        return False

    rollout = generate(engine, until=swap)
    assert texts(rollout) == plain
    assert [response.finish_reason for response in rollout.responses] == ["length"] * 8
    kept = [row["num_accepted"] / max(row["num_drafted"], 1) for row in rollout.iterations]
    assert min(kept[2:5]) > 0.9
    assert max(kept[7:15]) < 0.5
    assert max(kept[17:]) > 0.9


def test_a_broken_prediction_swaps_nothing(engine: Engine, bad: Weights, plain: list[list[int]]):
    updates = engine.drafter_report().updates
    with pytest.raises(ConfigError, match="must be chances"):
        engine.update_draft_weights(bad.items(), [float("nan")])
    generate(engine)
    report = engine.drafter_report()
    assert (report.updates, report.trusted) == (updates, True)
    assert report.measured[0] == 1.0
