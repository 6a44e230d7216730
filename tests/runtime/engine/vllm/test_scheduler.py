"""vLLM's asynchronous scheduler under a policy: a real scheduler with real requests, and a worker that is played.

The CPU platform turns asynchronous scheduling off, so no engine runs it here.
"""

import copy
import shutil
import time
from collections import deque
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest

from tests.fakes.drafting import Script
from tests.refused import refused
from tests.runtime.stock_sampling import unfixed_sampling
from tltlab.drafters.budget import DraftBudget
from tltlab.drafters.specs import DEFAULT_DRAFTERS, HybridSpec, LearnedSpec
from tltlab.errors import ConfigError
from tltlab.policies.bandits import Ucb1
from tltlab.policies.policy import Policy
from tltlab.policies.simple import Fixed
from tltlab.runtime import vllm_options
from tltlab.runtime.engine.drafter_pool import DrafterPool
from tltlab.runtime.engine.recording import LiveRecording
from tltlab.runtime.engine.vllm.options import Attachment
from tltlab.state import NO_CHOICE
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.traces.trace import read

from ..asking import fixed, raising, rows_of, said_once

pytestmark = pytest.mark.engine
LEARNED = Strategy.chain("learned", 4)
HEAD = LearnedSpec(method="draft_model", model="the/target")


def scheduled_by(cls, engine, asynchronous=True, settings=None, changes=None):
    """A scheduler for an engine like this one except `changes`; `settings` are its `additional_config`.

    `cls` is one of tltlab by its name, or a class of vLLM's.
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
    rest = {name: getattr(core.scheduler, name) for name in ("kv_cache_config", "block_size")}
    rest |= {"structured_output_manager": core.structured_output_manager, "log_stats": False}
    return (getattr(scheduler, cls) if isinstance(cls, str) else cls)(vllm_config=config, **rest)


class Overlapped:
    """Schedules one iteration ahead, as vLLM's engine core does; the worker keeps `kept` of the drafted tokens."""

    def __init__(self, scheduler):
        self.scheduler, self.flight = scheduler, deque[Any]()

    @classmethod
    def of(cls, engine, selector=None, budget=None):
        """In its RL step 3; every third choice drafts nothing, unless a selector says otherwise."""
        scheduler = scheduled_by("policy_scheduler", engine)
        assert type(scheduler).__name__ == "AsyncPolicyScheduler"
        assert scheduler.control.overlapped
        scheduler.control.drafters = DrafterPool({"learned": HEAD}, 4)
        scheduler.control.set_selector(selector or Script(*[LEARNED, LEARNED, NO_SPECULATION] * 99), budget)
        scheduler.control.begin(3)
        return cls(scheduler)

    def add(self, tokens, *names, resumable=False, key=None, **more):
        """Requests of so many tokens each, with `more` sampling parameters."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        for name in names:
            named = {"tltlab": key or [3, name, 0, 0]}
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, extra_args=named, **more)
            asked = {"sampling_params": params, "pooling_params": None, "resumable": resumable}
            self.scheduler.add_request(Request(request_id=name, prompt_token_ids=[1, 5, 6], **asked))

    def schedule(self):
        self.flight.append(self.scheduler.schedule())
        return self.flight[-1]

    def finish(self, kept=0):
        from vllm.v1.outputs import ModelRunnerOutput

        output = self.flight.popleft()
        ids = list(output.num_scheduled_tokens)
        drafted = [len(output.scheduled_spec_decode_tokens.get(i, ())) for i in ids]
        sampled = [[9] * (min(kept, d) + 1) for d in drafted]
        places = {name: n for n, name in enumerate(ids)}
        self.scheduler.update_from_output(
            output, ModelRunnerOutput(req_ids=ids, req_id_to_index=places, sampled_token_ids=sampled)
        )

    def goes_on(self, *kept):
        """Two iterations begin, and another where one has ended."""
        outputs = [self.schedule(), self.schedule()]
        for each in kept:
            self.finish(each)
            outputs.append(self.schedule())
        return outputs

    def ends(self, kept):
        """Whatever is under way is done."""
        while self.flight:
            self.finish(kept)
            if self.scheduler.has_unfinished_requests():
                self.schedule()


class OneEach(DraftBudget):
    def allot(self, state, strategy):
        return list(range(state.batch))


def test_the_depth_of_the_next_iteration_is_chosen_before_this_ones_tokens_are_known(roomy):
    worker = Overlapped.of(roomy)
    worker.add(40, "a", "b")
    outputs = worker.goes_on(0, 3, 1, 0, 2)
    depths = [o.num_spec_tokens_to_schedule for o in outputs]
    assert depths == [4, 4, 0, 4, 4, 0, 4]
    for before, after in zip(depths, outputs[1:], strict=False):
        drafts = after.scheduled_spec_decode_tokens
        assert [len(drafts.get(i, ())) for i in after.num_scheduled_tokens] == [before] * 2
    rows, _ = rows_of(worker.scheduler.control)
    assert [row["draft_depth"] for row in rows] == [0, 4, 4, 0, 4]
    assert [row["num_accepted"] for row in rows] == [0, 6, 2, 0, 4]
    outcomes = worker.scheduler.control.driver.selector.outcomes
    assert outcomes == [(4, [3, 3]), (4, [1, 1]), (0, []), (4, [2, 2])]
    assert all(row["draft_duration"] is None for row in rows)
    assert all(b["t_start"] >= a["t_start"] + a["duration"] for a, b in pairwise(rows))


def test_a_budget_trims_each_requests_placeholders(roomy):
    worker = Overlapped.of(roomy, Fixed(LEARNED), OneEach())
    worker.add(40, *"abc")
    _, after = worker.goes_on()
    assert [len(after.scheduled_spec_decode_tokens.get(i, ())) for i in "abc"] == [0, 1, 2]


def test_placeholders_are_of_requests_that_may_have_drafts(roomy):
    worker = Overlapped.of(roomy, Fixed(LEARNED))
    worker.add(40, "a")
    worker.add(40, "b", min_p=0.1)
    worker.add(40, "c", seed=5)
    drafts = worker.goes_on(2)[-1].scheduled_spec_decode_tokens
    assert [len(drafts.get(i, ())) for i in "abc"] == [4, 0, 0]
    # Nobody has any as soon as this one is there.
    worker.add(3, "d", logprob_token_ids=[5])
    assert not worker.schedule().scheduled_spec_decode_tokens
    assert not worker.schedule().scheduled_spec_decode_tokens
    worker.ends(kept=2)
    assert worker.scheduler.control.live == {}


def test_an_iteration_of_what_has_ended_is_of_no_rollout(roomy):
    from vllm.v1.request import RequestStatus

    worker = Overlapped.of(roomy)
    worker.add(1, "a")
    worker.schedule()
    worker.add(2, "b")
    worker.schedule()
    worker.finish()
    worker.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    worker.scheduler.control.begin(4)
    worker.add(1, "c")
    worker.schedule()
    worker.finish()
    worker.finish()
    rows, _ = rows_of(worker.scheduler.control)
    assert [(row["rl_step"], row["iteration"], row["num_generated"]) for row in rows] == [(4, 0, 1)]


def test_a_request_whose_first_token_is_on_its_way_is_not_prefilled_again(roomy):
    worker = Overlapped.of(roomy)
    for name in "ab":
        worker.add(20, name)
        worker.schedule()
    worker.finish()
    worker.finish()
    rows, _ = rows_of(worker.scheduler.control)
    assert [row["prefill_tokens"] for row in rows] == [3, 3]


def test_without_a_policy_vllms_own_drafts_are_recorded(roomy, tmp_path):
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    depths = []
    for settings in ({}, vllm_options(None, record=tmp_path / "trace")["additional_config"]):
        worker = Overlapped(scheduled_by(AsyncScheduler, roomy, settings=settings))
        worker.add(40, "a", "b")
        drafts = [(o.num_spec_tokens_to_schedule, o.scheduled_spec_decode_tokens) for o in worker.goes_on(0, 3, 1)]
        depths.append([(depth, *map(len, tokens.values())) for depth, tokens in drafts])
    assert depths[0] == depths[1]
    assert depths[0][-1] == (8, 8, 8)
    worker.ends(2)
    worker.scheduler.close_recording()
    rows = read(tmp_path / "trace").iterations
    drafted = rows[rows["draft_depth"] > 0][["drafter", "draft_depth", "num_drafted", "num_accepted"]]
    assert ["draft_model", 8, 16, 4] in drafted.values.tolist()


def test_another_policy_is_set_while_requests_run(roomy):
    worker = Overlapped.of(roomy)
    worker.add(40, "a")
    outputs = worker.goes_on()
    for depth in (2, 9):
        policy = fixed("learned", depth).model_copy(update={"drafters": {"learned": HEAD}})
        with refused(ConfigError, naming=("4",)) if depth > 4 else nullcontext():
            worker.scheduler.control.set_policy(policy, [1])
        worker.finish()
        outputs.append(worker.schedule())
    assert [output.num_spec_tokens_to_schedule for output in outputs] == [4, 4, 2, 2]


def attached(policy, depth=4):
    """The `additional_config` of a policy in an engine that has a draft model too."""
    drafters = {**DEFAULT_DRAFTERS, "learned": HEAD, "hybrid": HybridSpec()}
    return {"tltlab": Attachment(policy=policy, drafters=drafters, max_draft_depth=depth).model_dump(mode="json")}


BY_MODEL, BY_TEXT = attached(fixed("learned")), attached(fixed("ngram"))
LEARNS = attached(Policy(selector=Ucb1.Spec(strategies=(NO_SPECULATION, LEARNED))))
RANKS = {"parallel_config.distributed_executor_backend": "external_launcher", "parallel_config.world_size": 2}
DRAFTS = "speculative_config"
REFUSED = [
    ({"parallel_config.pipeline_parallel_size": 2}, BY_TEXT, ("pipeline_parallel_size=1",)),
    ({"parallel_config.data_parallel_size": 2}, BY_MODEL, ("data_parallel_size=1",)),
    (RANKS, LEARNS, ("distributed_executor_backend='mp'", "none, fixed")),
    ({}, attached(fixed("learned"), depth=9), (8, "num_speculative_tokens=9")),
    ({DRAFTS: None}, BY_TEXT, (0, DRAFTS)),
    ({f"{DRAFTS}.model": "x.NoProposer"}, BY_MODEL, ("speculative_config={'method'",)),
    ({f"{DRAFTS}.method": "suffix"}, BY_MODEL, ("one depth", DRAFTS)),
    ({f"{DRAFTS}.method": "ngram_gpu"}, BY_MODEL, ("'ngram'", "VLLM_USE_V2_MODEL_RUNNER=1")),
    ({f"{DRAFTS}.enable_adaptive_verification": True}, BY_MODEL, ("enable_adaptive_verification=False",)),
    ({"model_config.runner_type": "pooling"}, BY_MODEL, ("pooling",)),
    ({"model_config.is_diffusion": True}, BY_MODEL, ("diffusion",)),
    ({}, {"tltlab": {"record": "trace"}}, ("scheduler_cls",)),
    ({}, {"tltlab": {"polcy": None}}, ("additional_config['tltlab']", "polcy")),
]


@pytest.mark.parametrize("case", REFUSED, ids=[str(facts) for *_, facts in REFUSED])
def test_what_an_engine_cannot_run_is_refused(roomy, monkeypatch, case):
    changes, settings, facts = case
    monkeypatch.setenv("RANK", "1")
    with refused(ConfigError, naming=facts):
        scheduled_by("policy_scheduler", roomy, asynchronous=False, settings=settings, changes=changes)


def test_the_v2_runner_takes_no_model_free_drafts(roomy, monkeypatch):
    from vllm import envs

    # vLLM keeps what its variables were when an roomy started.
    monkeypatch.setitem(vars(envs), "VLLM_USE_V2_MODEL_RUNNER", True)
    with refused(ConfigError, naming=("VLLM_USE_V2_MODEL_RUNNER=0",)):
        scheduled_by("policy_scheduler", roomy, asynchronous=False, settings=BY_TEXT)


def test_without_our_plugin_or_its_mend_nothing_starts(roomy, monkeypatch):
    from tltlab.runtime.engine.vllm import scheduler

    with unfixed_sampling(), refused(ConfigError, naming=("speculative_config",)):
        scheduled_by("PolicyScheduler", roomy, asynchronous=False, settings={})
    monkeypatch.setattr(scheduler, "is_registered", lambda: False)
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with refused(ConfigError, naming=("VLLM_PLUGINS=other", "VLLM_PLUGINS=other,tltlab")):
        scheduled_by("PolicyScheduler", roomy, asynchronous=False, settings={})


@pytest.mark.parametrize("asynchronous", [True, False])
def test_canvases_are_recorded_over_vllms_own_scheduler(roomy, asynchronous, tmp_path):
    from vllm.config import DiffusionConfig
    from vllm.v1.core.sched.diffusion_scheduler import DiffusionAsyncScheduler, DiffusionScheduler

    canvases = {"model_config.is_diffusion": True, DRAFTS: None, "diffusion_config": DiffusionConfig(canvas_length=4)}
    settings = vllm_options(None, record=tmp_path / "trace")["additional_config"]
    stock = DiffusionAsyncScheduler if asynchronous else DiffusionScheduler
    scheduler = scheduled_by(stock, roomy, asynchronous=asynchronous, settings=settings, changes=canvases)
    assert type(scheduler) is stock
    assert isinstance(scheduler.close_recording.__self__._recording, LiveRecording)
    scheduler.close_recording()


def test_each_input_of_a_streaming_session_is_a_turn(roomy):
    worker = Overlapped.of(roomy)
    worker.add(2, "a", resumable=True)
    for _ in range(2):
        worker.schedule()
        worker.finish()
    (before,) = worker.scheduler.control.live.values()
    assert (before.key, len(before.output)) == ((3, "a", 0, 0), 2)
    worker.add(4, "a", resumable=True)
    (after,) = worker.scheduler.control.live.values()
    assert (after.key, list(after.output), after.max_response_tokens) == ((3, "a", 0, 1), [], 4)
    # One of the two tokens has been computed and stays; then the new input.
    assert list(after.prompt) == [1, 5, 6, 9, 1, 5, 6]
    worker.schedule()
    worker.finish()
    assert len(after.output) == 1


def test_an_abort_leaves_a_policys_engine_idle(roomy, tmp_path):
    from vllm.v1.request import RequestStatus

    settings = {"tltlab": LEARNS["tltlab"] | {"record": str(tmp_path / "trace")}}
    worker = Overlapped(scheduled_by("policy_scheduler", roomy, asynchronous=False, settings=settings))
    hours, tracker = 0.0, worker.scheduler.control.tracker
    tracker.clock = lambda: time.perf_counter() + 3600.0 * hours
    for name in "abc":
        worker.add(40, name, key="none")
        for _ in range(6):
            worker.schedule()
            worker.finish()
        worker.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        assert tracker.in_force is NO_CHOICE
        hours += 1.0
    worker.scheduler.close_recording()
    trace = read(tmp_path / "trace")
    assert trace.iterations["duration"].max() < 1800.0
    assert trace.iterations["num_generated"].sum() == trace.outcomes["response_tokens"].sum() == 18
    assert trace.decisions["reward"].notna().any()


@pytest.mark.parametrize("policy", [True, False], ids=["with a policy", "record only"])
def test_what_is_in_flight_when_requests_end_is_nobodys(roomy, tmp_path, policy):
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.request import RequestStatus

    settings = vllm_options(None, record=tmp_path / "trace")["additional_config"]
    if policy:
        settings["tltlab"] = BY_MODEL["tltlab"] | {"record": str(tmp_path / "trace")}
    worker = Overlapped(scheduled_by("policy_scheduler" if policy else AsyncScheduler, roomy, settings=settings))
    hours, tracker = 0.0, worker.scheduler.control.tracker
    tracker.clock = lambda: time.perf_counter() + 3600.0 * hours
    worker.add(40, "a", "b", key="none")
    worker.goes_on(0, 2)
    # In the one iteration that follows, and in the one that is under way.
    worker.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    worker.goes_on(2)
    worker.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    hours += 1.0
    worker.add(5, "c", key="none")
    worker.ends(0)
    worker.scheduler.close_recording()
    trace = read(tmp_path / "trace")
    assert trace.iterations["duration"].max() < 1800.0
    assert sorted(trace.outcomes["finish_reason"]) == ["abort", "abort", "length"]
    assert (trace.outcomes["discarded_tokens"] > 0).any()
    assert trace.iterations["num_generated"].sum() == trace.outcomes["response_tokens"].sum()
    drafted = trace.iterations[trace.iterations["num_drafted"] > 0]
    assert (drafted["num_accepted"] > 0).any()


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(
    "part",
    [
        "watch.entered", "control.iteration_starts", "watch.scheduled", "control.scheduled", "control.allot",
        "control.drafts", "watch.returned", "watch.freed", "watch.left", "capture.left",
    ],
)  # fmt: skip
def test_what_raises_is_said_once_and_the_engine_goes_on(roomy, part, asynchronous, monkeypatch, caplog):
    from vllm.v1.outputs import DraftTokenIds

    if part == ("control.drafts" if asynchronous else "control.allot"):
        pytest.skip("not called")
    scheduler = scheduled_by("policy_scheduler", roomy, asynchronous=asynchronous)
    worker = Overlapped(scheduler)
    scheduler.control.drafters = DrafterPool({"learned": HEAD}, 4)
    scheduler.control.set_selector(Fixed(LEARNED), OneEach())
    owner, name = part.split(".")
    scheduler.control.observers += (scheduler.capture,)
    worker.add(11, "a")
    monkeypatch.setattr(getattr(scheduler, owner), name, raising(LookupError("a bug of ours")))
    worker.add(7, "b")
    requests = dict(scheduler.requests)
    depths = []
    while scheduler.has_unfinished_requests():
        output = worker.schedule()
        if output.num_scheduled_tokens:
            depths.append(output.num_spec_tokens_to_schedule)
        if asynchronous and len(worker.flight) < 2:
            continue
        ids = list(worker.flight[0].num_scheduled_tokens)
        worker.finish(kept=2)
        if not asynchronous and output.num_spec_tokens_to_schedule:
            scheduler.update_draft_token_ids(DraftTokenIds(ids, [[9] * 4 for _ in ids]))
    worker.ends(kept=2)
    assert [len(requests[i].output_token_ids) for i in "ab"] == [11, 7]
    assert scheduler.guard.failure
    assert depths[-1] == 0 or part in ("watch.left", "watch.freed", "capture.left")
    facts = ("LookupError: a bug of ours", "asking.py, line", scheduler.control.failure)
    assert all(fact in said_once(caplog) for fact in facts)


def test_a_policy_goes_on_when_its_recording_vanishes(roomy, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(LiveRecording, "idle_s", 0.01)
    monkeypatch.setattr(LiveRecording, "flush_s", 0.01)
    recorded = {"tltlab": BY_MODEL["tltlab"] | {"record": str(tmp_path / "trace")}}
    worker = Overlapped(scheduled_by("policy_scheduler", roomy, settings=recorded))
    recording = worker.scheduler.watch.recording
    shutil.rmtree(tmp_path / "trace")
    number, deadline = 0, time.monotonic() + 300
    while not recording.ended or worker.flight:
        if not recording.ended and not worker.scheduler.requests:
            number += 1
            worker.add(5, str(number))
        if worker.scheduler.has_unfinished_requests():
            worker.schedule()
        worker.finish(kept=2)
        assert time.monotonic() < deadline
    worker.add(9, "after")
    request = worker.scheduler.requests["after"]
    _, drafted = worker.goes_on()
    assert len(drafted.scheduled_spec_decode_tokens["after"]) == 4
    worker.ends(kept=4)
    assert len(request.output_token_ids) == 9
    assert not worker.scheduler.guard.failure
    worker.scheduler.close_recording()
    assert "No such file" in said_once(caplog)
    assert list(tmp_path.iterdir()) == []


def test_nameless_requests_of_a_server_let_drafters_forget_in_time(roomy, monkeypatch):
    from tltlab.runtime.engine.vllm import scheduler

    monkeypatch.setattr(scheduler, "NAMELESS_PER_STEP", 3)
    worker = Overlapped.of(roomy)
    worker.scheduler.control.end()
    worker.add(2, *map(str, range(7)), key="none")
    assert [live.key[0] for live in worker.scheduler.control.live.values()] == [3, 3, 3, 4, 4, 4, 5]
