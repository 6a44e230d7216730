"""vLLM's asynchronous scheduler under a policy: a real scheduler with real requests, and a worker that is played.

The CPU platform turns asynchronous scheduling off, so no engine runs it here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tltlab.budget import DraftBudget
from tltlab.drafters import LearnedSpec
from tltlab.policy import FixedSpec, Policy
from tltlab.runtime.engine import Engine
from tltlab.selector import Selector
from tltlab.state import StepOutcome, StepState
from tltlab.strategy import NO_SPECULATION, Strategy

pytestmark = pytest.mark.engine
LEARNED = Strategy.chain("learned", 4)


@pytest.fixture(scope="module")
def engine(random_model: Path) -> Iterator[Engine]:
    engine = Engine(
        str(random_model),
        drafters={"learned": LearnedSpec(method="draft_model", model=str(random_model))},
        max_draft_depth=4,
        vllm_args={"max_model_len": 128, "kv_cache_memory_bytes": 32 << 20},
    )
    yield engine
    engine.close()


class Overlapped:
    """Schedules one iteration ahead, as vLLM's engine core does; the worker keeps `kept` of the drafted tokens."""

    def __init__(self, engine: Engine, selector: Selector, budget: DraftBudget | None = None) -> None:
        from tltlab.runtime.control import Control
        from tltlab.runtime.vllm_adapter.scheduler import AsyncPolicyScheduler

        core = engine.llm.llm_engine.engine_core.engine_core
        stock = core.scheduler
        self.scheduler = AsyncPolicyScheduler(
            vllm_config=stock.vllm_config,
            kv_cache_config=stock.kv_cache_config,
            structured_output_manager=core.structured_output_manager,
            block_size=stock.block_size,
            log_stats=False,
        )
        assert isinstance(self.scheduler.control, Control)
        assert self.scheduler.control.overlapped
        self.scheduler.control.drafters = engine._pool
        self.scheduler.control.set_selector(selector, budget)
        self.flight: deque = deque()

    def add(self, name: str, tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=tokens, ignore_eos=True, extra_args={"tltlab": [3, name, 0, 0]})
        self.scheduler.add_request(
            Request(request_id=name, prompt_token_ids=[1, 5, 6], sampling_params=params, pooling_params=None)
        )

    def schedule(self) -> object:
        output = self.scheduler.schedule()
        self.flight.append(output)
        return output

    def finish(self, kept: int) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        output = self.flight.popleft()
        ids = list(output.num_scheduled_tokens)
        drafted = [len(output.scheduled_spec_decode_tokens.get(i, ())) for i in ids]
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={name: n for n, name in enumerate(ids)},
                sampled_token_ids=[[9] * (min(kept, d) + 1) for d in drafted],
            ),
        )


class Told(Selector):
    strategies = (NO_SPECULATION, LEARNED)

    def __init__(self) -> None:
        self.told: list[tuple[Strategy, StepOutcome]] = []
        self.turn = 0

    def choose(self, state: StepState) -> Strategy:
        self.turn += 1
        return LEARNED if self.turn % 3 else NO_SPECULATION

    def observe(self, strategy: Strategy, outcome: StepOutcome) -> None:
        self.told.append((strategy, outcome))


class OneEach(DraftBudget):
    def allot(self, state: StepState, strategy: Strategy) -> list[int]:
        return list(range(state.batch))


def test_the_depth_of_the_next_iteration_is_chosen_before_this_ones_tokens_are_known(engine: Engine):
    selector = Told()
    worker = Overlapped(engine, selector)
    worker.add("a", 40)
    worker.add("b", 40)
    outputs = [worker.schedule(), worker.schedule()]
    for kept in (0, 3, 1, 0, 2):
        worker.finish(kept)
        outputs.append(worker.schedule())
    depths = [o.num_spec_tokens_to_schedule for o in outputs]
    assert depths == [4, 4, 0, 4, 4, 0, 4]
    for before, after in zip(depths, outputs[1:], strict=False):
        drafts = after.scheduled_spec_decode_tokens
        assert [len(drafts.get(i, ())) for i in after.num_scheduled_tokens] == [before] * 2
    rows, _, _ = worker.scheduler.control.end()
    assert [row["draft_depth"] for row in rows] == [0, 4, 4, 0, 4]
    assert [row["num_accepted"] for row in rows] == [0, 6, 2, 0, 4]
    assert [(s.draft_depth, list(o.accepted)) for s, o in selector.told] == [
        (4, [3, 3]),
        (4, [1, 1]),
        (0, [0, 0]),
        (4, [2, 2]),
    ]
    assert all(row["draft_duration"] is None for row in rows)
    assert all(b["t_start"] >= a["t_start"] + a["duration"] for a, b in pairwise(rows))


def test_a_budget_trims_each_requests_placeholders(engine: Engine):
    worker = Overlapped(engine, Policy(selector=FixedSpec(strategy=LEARNED)).build(None), OneEach())  # type: ignore[arg-type]
    for name in "abc":
        worker.add(name, 40)
    worker.schedule()
    after = worker.schedule()
    assert [len(after.scheduled_spec_decode_tokens.get(i, ())) for i in "abc"] == [0, 1, 2]


def test_every_token_is_counted_once_and_nothing_stays(engine: Engine):
    worker = Overlapped(engine, Told())
    worker.add("a", 11)
    worker.add("b", 7)
    requests = dict(worker.scheduler.requests)
    worker.schedule()
    while worker.flight:
        if worker.scheduler.has_unfinished_requests():
            worker.schedule()
        worker.finish(kept=2)
    assert [len(requests[i].output_token_ids) for i in "ab"] == [11, 7]
    assert worker.scheduler.control.live == {}
