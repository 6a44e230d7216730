"""vLLM's asynchronous scheduler under a policy: a real scheduler with real requests, and a worker that is played.

The CPU platform turns asynchronous scheduling off, so no engine runs it here.
"""

from __future__ import annotations

import copy
import pickle
import shutil
import time
from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.refused import refused
from tltlab.drafters.budget import DraftBudget
from tltlab.drafters.specs import DEFAULT_DRAFTERS, HybridSpec, LearnedSpec
from tltlab.errors import ConfigError
from tltlab.policies.bandits import Ucb1
from tltlab.policies.policy import Policy
from tltlab.policies.selector import Selector
from tltlab.policies.simple import Fixed
from tltlab.policies.specs import FixedSpec, TableRow, TableSpec
from tltlab.runtime import vllm_options
from tltlab.runtime.engine.drafter_pool import DrafterPool
from tltlab.runtime.engine.engine import Engine
from tltlab.runtime.engine.recording import LiveRecording
from tltlab.runtime.engine.vllm.options import Attachment
from tltlab.state import StepOutcome, StepState
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.traces.trace import read

pytestmark = pytest.mark.engine
LEARNED = Strategy.chain("learned", 4)
HEAD = LearnedSpec(method="draft_model", model="the/target")


@pytest.fixture
def engine(roomy: Engine) -> Engine:
    return roomy


def scheduled_by(
    cls: Any,
    engine: Engine,
    *,
    asynchronous: bool = True,
    settings: dict | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Any:
    """A scheduler for an engine like this one but for `changes`; `settings` are its `additional_config`.

    `cls` is one of ours by its name, or a class of vLLM's.
    """
    from tltlab.runtime.engine.vllm import scheduler

    core = engine.llm.llm_engine.engine_core.engine_core
    config = copy.copy(core.scheduler.vllm_config)
    for path, value in {"scheduler_config.async_scheduling": asynchronous, **(changes or {})}.items():
        part, (*parts, name) = config, path.split(".")
        for each in parts:
            setattr(part, each, copy.copy(getattr(part, each)))
            part = getattr(part, each)
        setattr(part, name, value)
    if settings is not None:
        config.additional_config = settings
    return (getattr(scheduler, cls) if isinstance(cls, str) else cls)(
        vllm_config=config,
        kv_cache_config=core.scheduler.kv_cache_config,
        structured_output_manager=core.structured_output_manager,
        block_size=core.scheduler.block_size,
        log_stats=False,
    )


class Overlapped:
    """Schedules one iteration ahead, as vLLM's engine core does; the worker keeps `kept` of the drafted tokens."""

    def __init__(self, engine: Engine, selector: Selector, budget: DraftBudget | None = None) -> None:
        self.scheduler = scheduled_by("policy_scheduler", engine)
        assert type(self.scheduler).__name__ == "AsyncPolicyScheduler"
        assert self.scheduler.control.overlapped
        self.scheduler.control.drafters = DrafterPool({"learned": HEAD}, 4)
        self.scheduler.control.set_selector(selector, budget)
        self.scheduler.control.begin(3)
        self.flight: deque = deque()

    @classmethod
    def of(cls, scheduler: Any) -> Overlapped:
        """The same with a scheduler that is there."""
        worker = cls.__new__(cls)
        worker.scheduler, worker.flight = scheduler, deque()
        return worker

    def add(self, name: str, tokens: int, *, resumable: bool = False, key: object = None) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=tokens, ignore_eos=True, extra_args={"tltlab": key or [3, name, 0, 0]})
        self.scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=[1, 5, 6],
                sampling_params=params,
                pooling_params=None,
                resumable=resumable,
            )
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
    worker = Overlapped(engine, Fixed(LEARNED), OneEach())
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


def test_an_iteration_of_what_has_ended_is_of_no_rollout(engine: Engine):
    worker = Overlapped(engine, Told())
    worker.add("a", 1)
    worker.schedule()
    worker.add("b", 2)
    worker.schedule()
    worker.finish(kept=0)
    from vllm.v1.request import RequestStatus

    worker.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    worker.scheduler.control.begin(4)
    worker.add("c", 1)
    worker.schedule()
    worker.finish(kept=0)
    worker.finish(kept=0)
    rows, _, first = worker.scheduler.control.end()
    assert [(row["rl_step"], row["iteration"], row["num_generated"]) for row in rows] == [(4, 0, 1)]
    assert [key[1] for key in first] == ["c"]


def test_a_request_whose_first_token_is_on_its_way_is_not_prefilled_again(engine: Engine):
    worker = Overlapped(engine, Told())
    worker.add("a", 20)
    worker.schedule()
    worker.add("b", 20)
    worker.schedule()
    worker.finish(kept=0)
    worker.finish(kept=0)
    rows, _, _ = worker.scheduler.control.end()
    assert [row["prefill_tokens"] for row in rows] == [3, 3]


def test_without_a_policy_vllm_drafts_as_it_was_started_to_and_that_is_written_down(engine: Engine, tmp_path: Path):
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    depths = []
    for settings in ({}, vllm_options(None, record=tmp_path / "trace")["additional_config"]):
        worker = Overlapped.of(scheduled_by(AsyncScheduler, engine, settings=settings))
        worker.add("a", 40)
        worker.add("b", 40)
        outputs = [worker.schedule(), worker.schedule()]
        for kept in (0, 3, 1):
            worker.finish(kept)
            outputs.append(worker.schedule())
        depths.append(
            [(o.num_spec_tokens_to_schedule, *map(len, o.scheduled_spec_decode_tokens.values())) for o in outputs]
        )
    assert depths[0] == depths[1]
    assert depths[0][-1] == (8, 8, 8)
    while worker.flight:
        worker.finish(2)
        if worker.scheduler.has_unfinished_requests():
            worker.schedule()
    worker.scheduler.close_recording()
    rows = read(tmp_path / "trace").iterations
    assert rows is not None
    drafted = rows[rows["draft_depth"] > 0][["drafter", "draft_depth", "num_drafted", "num_accepted"]]
    assert ["draft_model", 8, 16, 4] in drafted.values.tolist()


def test_a_utility_call_puts_another_policy_in_force_while_requests_run(engine: Engine):
    from tltlab.runtime.engine.vllm.scheduler import call_control

    worker = Overlapped(engine, Told())
    worker.add("a", 40)
    outputs = [worker.schedule(), worker.schedule()]
    core = SimpleNamespace(scheduler=worker.scheduler)
    for depth in (2, 9):
        policy = Policy(selector=FixedSpec(strategy=Strategy.chain("learned", depth)), drafters={"learned": HEAD})
        with refused(ConfigError, naming=("4",)) if depth > 4 else nullcontext():
            call_control(core, pickle.dumps(("replace_policy", (policy, [1]))))
        worker.finish(0)
        outputs.append(worker.schedule())
    assert [output.num_spec_tokens_to_schedule for output in outputs] == [4, 4, 2, 2]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_scheduler_that_does_not_fit_the_engine_is_refused(engine: Engine, asynchronous: bool):
    other, fits = sorted(["AsyncPolicyScheduler", "PolicyScheduler"], reverse=asynchronous)
    with refused(ConfigError, naming=("async_scheduling=", not asynchronous, "scheduler_cls=", fits)):
        scheduled_by(other, engine, asynchronous=asynchronous)
    for cls in (fits, "policy_scheduler"):
        assert type(scheduled_by(cls, engine, asynchronous=asynchronous)).__name__ == fits


def attached(*strategies: Strategy, depth: int = 4, selector: Any = None) -> dict[str, Any]:
    """The `additional_config` of a policy over `strategies`, in an engine that has a draft model too."""
    attachment = Attachment(
        policy=Policy(
            selector=selector or TableSpec(rows=tuple(TableRow(min_batch=1, strategy=s) for s in strategies))
        ),
        drafters={**DEFAULT_DRAFTERS, "learned": HEAD, "hybrid": HybridSpec()},
        max_draft_depth=depth,
    )
    return {"tltlab": attachment.model_dump(mode="json")}


BY_MODEL, BY_TEXT = attached(LEARNED), attached(Strategy.chain("ngram", 4))
LEARNS = attached(selector=Ucb1.Spec(strategies=(NO_SPECULATION, LEARNED)))
RANKS = {"parallel_config.distributed_executor_backend": "external_launcher", "parallel_config.world_size": 2}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "several batches": ({"parallel_config.pipeline_parallel_size": 2}, BY_TEXT, "pass pipeline_parallel_size=1"),
    "replicas in step": ({"parallel_config.data_parallel_size": 2}, BY_MODEL, "pass data_parallel_size=1"),
    "a scheduler per rank": (RANKS, LEARNS, "pass distributed_executor_backend='mp', or a policy of kind none, fixed"),
    "too deep": ({}, attached(LEARNED, depth=9), "drafts of 8: pass .* with num_speculative_tokens=9"),
    "no drafts": ({"speculative_config": None}, BY_TEXT, "drafts of 0: pass the speculative_config of vllm_options"),
    "no draft model": ({"speculative_config.model": "x.NoProposer"}, BY_MODEL, "pass speculative_config={'method'"),
    "one depth": ({"speculative_config.method": "suffix"}, BY_MODEL, "drafts at one depth only .* pass the spec"),
    "two that decide": (
        {"speculative_config.enable_adaptive_verification": True}, BY_MODEL, "pass enable_adaptive_verification=False"
    ),
    "a hybrid of samples": (
        {"speculative_config.draft_sample_method": "probabilistic"}, BY_MODEL, 'leave out draft_sample_method "probab'
    ),
    "pooling": ({"model_config.runner_type": "pooling"}, BY_MODEL, "a pooling model .* leave the policy out"),
    "diffusion": ({"model_config.is_diffusion": True}, BY_MODEL, "a diffusion model has no drafts"),
    "model-free and asynchronous": ({"scheduler_config.async_scheduling": True}, BY_TEXT, "leave async_scheduling off"),
    "no policy": ({}, {"tltlab": {"record": "trace"}}, "has no policy to follow .* leave scheduler_cls out"),
    "no such setting": ({}, {"tltlab": {"polcy": None}}, r"additional_config\['tltlab'\]: polcy: Extra inputs"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_an_engine_cannot_run_is_refused_with_what_to_pass(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, case: str
):
    monkeypatch.setenv("RANK", "1")
    changes, settings, sentence = REFUSED[case]
    with pytest.raises(ConfigError, match=sentence):
        scheduled_by("policy_scheduler", engine, asynchronous=False, settings=settings, changes=changes)


def test_model_free_drafts_are_refused_where_drafts_stay_on_the_device(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    from vllm import envs

    # vLLM keeps what its variables were when an engine started.
    monkeypatch.setitem(vars(envs), "VLLM_USE_V2_MODEL_RUNNER", True)
    with refused(ConfigError, naming=("VLLM_USE_V2_MODEL_RUNNER=0",)):
        scheduled_by("policy_scheduler", engine, asynchronous=False, settings=BY_TEXT)


def test_without_our_plugin_or_its_mend_nothing_starts(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    from tltlab.runtime.engine.vllm import scheduler
    from tltlab.runtime.engine.vllm.sampling import unmended_sampling

    with unmended_sampling(), refused(ConfigError, naming=("speculative_config",)):
        scheduled_by("PolicyScheduler", engine, asynchronous=False, settings={})
    monkeypatch.setattr(scheduler, "is_registered", lambda: False)
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with refused(ConfigError, naming=("VLLM_PLUGINS=other", "VLLM_PLUGINS=other,tltlab")):
        scheduled_by("PolicyScheduler", engine, asynchronous=False, settings={})


@pytest.mark.parametrize("asynchronous", [True, False])
def test_canvases_are_recorded_over_vllms_own_scheduler(engine: Engine, asynchronous: bool, tmp_path: Path):
    from vllm.config import DiffusionConfig
    from vllm.v1.core.sched.diffusion_scheduler import DiffusionAsyncScheduler, DiffusionScheduler

    canvases = {
        "model_config.is_diffusion": True,
        "speculative_config": None,
        "diffusion_config": DiffusionConfig(canvas_length=4),
    }
    settings = vllm_options(None, record=tmp_path / "trace")["additional_config"]
    stock = DiffusionAsyncScheduler if asynchronous else DiffusionScheduler
    scheduler = scheduled_by(stock, engine, asynchronous=asynchronous, settings=settings, changes=canvases)
    assert type(scheduler) is stock
    assert isinstance(scheduler.close_recording.__self__._recording, LiveRecording)
    scheduler.close_recording()


def test_each_input_of_a_streaming_session_is_a_turn(engine: Engine):
    worker = Overlapped(engine, Told())
    worker.add("a", 2, resumable=True)
    for _ in range(2):
        worker.schedule()
        worker.finish(kept=0)
    (before,) = worker.scheduler.control.live.values()
    assert (before.key, len(before.output)) == ((3, "a", 0, 0), 2)
    worker.add("a", 4, resumable=True)
    (after,) = worker.scheduler.control.live.values()
    assert (after.key, list(after.output), after.max_response_tokens) == ((3, "a", 0, 1), [], 4)
    # One of the two tokens has been computed and stays; then the new input.
    assert list(after.prompt) == [1, 5, 6, 9, 1, 5, 6]
    worker.schedule()
    worker.finish(kept=0)
    assert len(after.output) == 1


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(
    "part",
    [
        "watch.came", "control.iteration_starts", "watch.scheduled", "control.scheduled", "control.allot",
        "control.drafts", "watch.back", "watch.landed", "watch.left", "capture.leave",
    ],
)  # fmt: skip
def test_whatever_of_ours_raises_is_said_once_and_the_engine_goes_on_without_drafts(
    engine: Engine, part: str, asynchronous: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    from vllm.v1.outputs import DraftTokenIds

    if part == ("control.drafts" if asynchronous else "control.allot"):
        pytest.skip("not called")
    scheduler = scheduled_by("policy_scheduler", engine, asynchronous=asynchronous)
    worker = Overlapped.of(scheduler)
    scheduler.control.drafters = DrafterPool({"learned": HEAD}, 4)
    scheduler.control.set_selector(Fixed(LEARNED), OneEach())
    owner, name = part.split(".")

    def raises(*args: object) -> None:
        raise LookupError("a bug of ours")

    worker.add("a", 11)
    monkeypatch.setattr(getattr(scheduler, owner), name, raises)
    worker.add("b", 7)
    requests = dict(scheduler.requests)
    depths = []
    while scheduler.has_unfinished_requests():
        output: Any = worker.schedule()
        if output.num_scheduled_tokens:
            depths.append(output.num_spec_tokens_to_schedule)
        if asynchronous and len(worker.flight) < 2:
            continue
        ids = list(worker.flight[0].num_scheduled_tokens)
        worker.finish(kept=2)
        if not asynchronous and output.num_spec_tokens_to_schedule:
            scheduler.update_draft_token_ids(DraftTokenIds(ids, [[9] * 4 for _ in ids]))
    while worker.flight:
        worker.finish(kept=2)
    assert [len(requests[i].output_token_ids) for i in "ab"] == [11, 7]
    assert scheduler.given_up
    assert depths[-1] == 0 or part in ("watch.left", "watch.landed", "capture.leave")
    (said,) = [record.getMessage() for record in caplog.records if "the engine goes on" in record.getMessage()]
    assert "LookupError: a bug of ours" in said
    assert "test_scheduler.py, line" in said
    assert scheduler.control.failure in said


def test_a_recording_that_vanishes_beside_a_policy_is_said_once_and_the_policy_goes_on(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(LiveRecording, "idle_s", 0.01)
    monkeypatch.setattr(LiveRecording, "flush_s", 0.01)
    recorded = {"tltlab": BY_MODEL["tltlab"] | {"record": str(tmp_path / "trace")}}
    worker = Overlapped.of(scheduled_by("policy_scheduler", engine, settings=recorded))
    recording = worker.scheduler.watch.recording
    shutil.rmtree(tmp_path / "trace.recording")
    number, deadline = 0, time.monotonic() + 300
    while not recording.ended or worker.flight:
        if not recording.ended and not worker.scheduler.requests:
            number += 1
            worker.add(str(number), 5)
        if worker.scheduler.has_unfinished_requests():
            worker.schedule()
        worker.finish(kept=2)
        assert time.monotonic() < deadline
    worker.add("after", 9)
    request = worker.scheduler.requests["after"]
    drafted = [worker.schedule(), worker.schedule()][1].scheduled_spec_decode_tokens
    assert len(drafted["after"]) == 4
    while worker.flight:
        worker.finish(kept=4)
        if worker.scheduler.has_unfinished_requests():
            worker.schedule()
    assert len(request.output_token_ids) == 9
    assert not worker.scheduler.given_up
    worker.scheduler.close_recording()
    (said,) = [record.getMessage() for record in caplog.records if "the engine goes on" in record.getMessage()]
    assert "No such file" in said
    assert list(tmp_path.iterdir()) == []


def test_nameless_requests_of_a_server_let_drafters_forget_in_time(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    from tltlab.runtime.engine.vllm import watch

    monkeypatch.setattr(watch, "NAMELESS_PER_STEP", 3)
    worker = Overlapped(engine, Told())
    worker.scheduler.control.end()
    for n in range(7):
        worker.add(str(n), 2, key="none")
    assert [live.key[0] for live in worker.scheduler.control.live.values()] == [3, 3, 3, 4, 4, 4, 5]
