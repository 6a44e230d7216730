"""An engine that is only recorded: whatever requests, disk and our own code do, it continues as vLLM's own.

One engine of vLLM's, as its users start it, serves all tests; each records in its own place.
"""

import errno
import json
import os
import shutil
import time
from collections import Counter

import pytest
import torch

import tltlab
from tltlab.runtime import vllm_options
from tltlab.runtime.engine import recording as recording_module
from tltlab.runtime.engine.recording import LiveRecording
from tltlab.traces.schema import Contents
from tltlab.traces.storage import is_unfinished

from ..asking import raising, said_once

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def adapter(random_model, tmp_path_factory):
    """A LoRA adapter that changes what the model says."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("adapter")
    generator = torch.Generator().manual_seed(5)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    shapes = {"A": (4, 64), "B": (64, 4)}
    save_file(
        {name.format(part): torch.randn(shape, generator=generator) for part, shape in shapes.items()},
        folder / "adapter_model.safetensors",
    )
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def llm(random_model, tmp_path_factory):
    """vLLM with its own scheduler and a suffix drafter of the user's, recorded."""
    from tltlab.runtime.engine.vllm import starting, uncompiled

    with starting(), uncompiled(True), pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        import vllm

        sizes = {"max_model_len": 128, "kv_cache_memory_bytes": 1 << 25, "max_num_seqs": 16, "max_lora_rank": 8}
        # Not vLLM's n-grams: its CPU worker starts no other engine in a process that has loaded numba for them.
        drafts = {"method": "suffix", "num_speculative_tokens": 3, "suffix_decoding_min_token_prob": 0.0}
        settings = {"dtype": "float32", "enforce_eager": True, "enable_lora": True, "generation_config": "vllm"}
        recorded = vllm_options(None, record=tmp_path_factory.mktemp("first") / "trace")
        llm = vllm.LLM(str(random_model), speculative_config=drafts, **sizes, **settings, **recorded)
        yield llm
        llm.llm_engine.engine_core.shutdown()


class Recorded:
    """The engine's own scheduler, recorded to another place."""

    def __init__(self, llm, path):
        from tltlab.runtime.engine.vllm.scheduler import record_only

        self.llm, self.path = llm, path
        self.scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        if hasattr(self.scheduler, "close_recording"):
            self.scheduler.close_recording()
        config = self.scheduler.vllm_config
        config.additional_config = vllm_options(None, record=path)["additional_config"]
        record_only(self.scheduler)
        self.recording = self.scheduler.close_recording.__self__._recording
        # The recording ends with its test, and its clocks with it.
        self.hours, clock = 0.0, lambda: time.perf_counter() + 3600.0 * self.hours
        self.recording._clock = self.recording.control.tracker.clock = clock

    def answers(self, num=3, **settings):
        from vllm import SamplingParams

        more = {name: settings.pop(name) for name in ("lora_request",) if name in settings}
        params = SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "seed": 1, **settings})
        prompts = [{"prompt_token_ids": [1, 4 + n, 5, 4 + n, 5]} for n in range(num)]
        return list(self.llm.generate(prompts, params, use_tqdm=False, **more))

    def adds(self, *names):
        """vLLM's engine, with requests of six tokens that have taken a step."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        for name in names:
            engine.add_request(name, {"prompt_token_ids": [1, 9, 5]}, SamplingParams(max_tokens=6, ignore_eos=True))
        engine.step()
        return engine

    def trace(self):
        self.scheduler.close_recording()
        return tltlab.read(self.path)

    @property
    def hooked(self):
        return "schedule" in self.scheduler.__dict__


@pytest.fixture
def recorded(llm, tmp_path):
    return Recorded(llm, tmp_path / "trace")


def drain(engine, scheduler=None):
    """Step until there is no request any more."""
    while (scheduler or engine).has_unfinished_requests():
        engine.step()


def texts(answers):
    return [list(one.token_ids) for answer in answers for one in answer.outputs]


def reasons(answers):
    """As a trace has them: it knows no repetition, the engine ended it as at a stop, and an error is an abort."""
    found = [one.finish_reason for answer in answers for one in answer.outputs]
    return [{"repetition": "stop", "error": "abort"}.get(reason, reason) for reason in found]


def test_what_vllms_own_speculation_kept_is_recorded(recorded):
    from vllm.v1.core.sched.scheduler import Scheduler

    assert type(recorded.scheduler) is Scheduler
    answers = recorded.answers(4, temperature=0.0, max_tokens=40)
    assert recorded.llm.llm_engine.engine_core.engine_core.use_spec_decode
    trace = recorded.trace()
    rows = trace.iterations
    drafted = rows[rows["num_drafted"] > 0]
    assert set(drafted["drafter"]) == {"suffix"}
    assert set(drafted["draft_depth"]) == {3}
    assert [sum(kept) for kept in drafted["accepted_per_request"]] == list(drafted["num_accepted"])
    assert drafted["num_accepted"].sum() > 0
    # What is kept of a draft may reach beyond the cap.
    assert rows["num_generated"].sum() == trace.outcomes["response_tokens"].sum() == 4 * 40
    discarded = trace.outcomes["discarded_tokens"].sum()
    assert rows["num_accepted"].sum() + rows["batch"].sum() == rows["num_generated"].sum() + discarded
    assert sorted(map(list, trace.tokens["token_ids"])) == sorted(texts(answers))
    assert texts(recorded.answers(4, temperature=0.0, max_tokens=40)) == texts(answers), "unrecorded"
    assert not recorded.hooked


def structured(recorded, adapter):
    from vllm.sampling_params import StructuredOutputsParams

    # The vocabulary has no blank: vLLM itself ends what it cannot continue with as an error.
    answers = []
    for choice in (["w3", "w4"], ["w1 w2"]):
        params = StructuredOutputsParams(choice=choice)
        answers += recorded.answers(2, structured_outputs=params, ignore_eos=False)
    return reasons(answers)


def repeated(recorded, adapter):
    from vllm.sampling_params import RepetitionDetectionParams

    repeats = RepetitionDetectionParams(max_pattern_size=1, min_pattern_size=1, min_count=3)
    return reasons(recorded.answers(2, allowed_token_ids=[9], repetition_detection=repeats))


def aborted(recorded, adapter):
    engine = recorded.adds("stays", "goes")
    engine.abort_request(["goes"])
    drain(engine)
    return ["length", "abort"]


def failed(recorded, adapter):
    from vllm.v1.request import RequestStatus

    engine = recorded.adds("errs", "ends")
    # As vLLM does with a request whose keys and values cannot be loaded.
    recorded.scheduler.finish_requests(recorded.scheduler.running[0].request_id, RequestStatus.FINISHED_ERROR)
    drain(engine, recorded.scheduler)
    engine.abort_request(["errs"])
    return ["abort", "length"]


def adapted(recorded, adapter):
    from vllm.lora.request import LoRARequest

    plain = texts(recorded.answers(2, temperature=0.0))
    assert texts(recorded.answers(2, temperature=0.0, lora_request=LoRARequest("a", 1, str(adapter)))) != plain
    return ["length"] * 4


def several(recorded, adapter):
    answers = recorded.answers(2, n=3, extra_args={"tltlab": [5, "p", 0, 0]}, seed=None)
    assert len(texts(answers)) == 6
    return ["length"] * 6


def streamed(recorded, adapter):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine, pieces = recorded.llm.llm_engine, 0
    params = SamplingParams(max_tokens=6, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    engine.add_request("s", {"prompt_token_ids": [1, 9, 5]}, params)
    while engine.has_unfinished_requests():
        pieces += len(engine.step())
    assert pieces > 1
    return ["length"]


def nonsense(recorded, adapter):
    for key in ("nonsense", [3, "a"], [2**40, "a", 0, 0], [0, "\ud800", 0, 0], {"a": 1}, 7):
        recorded.answers(1, extra_args={"tltlab": key})
    return ["length"] * 6


CASES = [structured, repeated, aborted, failed, adapted, several, streamed, nonsense]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_all_kinds_of_requests_are_recorded(recorded, adapter, case, caplog):
    expected = case(recorded, adapter)
    assert not recorded.recording.ended
    assert "ends here" not in caplog.text
    trace = recorded.trace()
    outcomes = trace.outcomes
    assert sorted(outcomes["finish_reason"]) == sorted(expected)
    keys = list(zip(outcomes["rl_step"], outcomes["prompt_id"], outcomes["sample"], outcomes["turn"], strict=True))
    assert len(set(keys)) == len(keys)
    assert trace.iterations["num_generated"].sum() == outcomes["response_tokens"].sum()
    if case is several:
        assert [key[:3] for key in sorted(keys)] == [(5, "p", n) for n in range(6)]


def test_a_stop_string_ends_a_response(recorded):
    from vllm import SamplingParams

    # In the core it has ended by a token or its cap, or it is aborted; its client met the stop string before that.
    answers = recorded.answers(8, temperature=0.0, max_tokens=60)
    lasts = [f"w{one.outputs[0].token_ids[30] - 4}" for one in answers]
    params = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 60, "seed": 1}
    prompts = [{"prompt_token_ids": list(one.prompt_token_ids)} for one in answers]
    ways = ({}, {"include_stop_str_in_output": True}, {"min_tokens": 40}, {"stop_token_ids": [9]})
    for more in (*ways, {"n": 2, "temperature": 1.0}):
        each = [SamplingParams(**{**params, **more}, stop=[last, "never"]) for last in lasts]
        answers += recorded.llm.generate(prompts, each, use_tqdm=False)
    assert reasons(answers).count("stop") > 40
    answers += recorded.answers(4, stop_token_ids=list(range(4, 12)), temperature=0.0)
    trace = recorded.trace()
    rows = trace.outcomes.merge(trace.tokens)
    told = zip(rows["finish_reason"], map(list, rows["token_ids"]), strict=True)
    assert sorted(told) == sorted(zip(reasons(answers), texts(answers), strict=True))
    assert rows["discarded_tokens"].sum() > 0
    assert trace.iterations["num_generated"].sum() == rows["response_tokens"].sum()


def stops_at_a_string(recorded):
    recorded.answers(4, stop=[f"w{n}" for n in range(20)])


def is_aborted(recorded):
    recorded.adds("goes", "too").abort_request(["goes", "too"])


def is_aborted_waiting(recorded):
    from vllm import SamplingParams

    engine = recorded.llm.llm_engine
    engine.add_request("waits", {"prompt_token_ids": [1, 9, 5]}, SamplingParams(max_tokens=6))
    engine.abort_request(["waits"])


def errs(recorded):
    from vllm.v1.request import RequestStatus

    engine = recorded.adds("errs")
    recorded.scheduler.finish_requests(None, RequestStatus.FINISHED_ERROR)
    engine.abort_request(["errs"])


def is_paused(recorded):
    engine = recorded.adds("goes on")
    engine.engine_core.engine_core.pause_scheduler(mode="keep")


def falls_asleep(recorded):
    engine = recorded.adds("is aborted")
    engine.engine_core.engine_core.pause_scheduler(mode="abort")
    engine.abort_request(["is aborted"])


def is_updated(recorded):
    """A step's rest is kept, and continues with the next weights."""
    recorded.adds("goes on")


WAITS = [stops_at_a_string, is_aborted, is_aborted_waiting, errs, is_paused, falls_asleep, is_updated]


@pytest.mark.parametrize("wait", WAITS, ids=lambda wait: wait.__name__)
def test_no_iteration_lasts_through_a_wait(recorded, wait):
    recorded.answers(2)
    engine = recorded.llm.llm_engine
    for _ in range(2):
        wait(recorded)
        recorded.hours += 1.0
        recorded.llm.reset_prefix_cache()
        engine.engine_core.engine_core.resume_scheduler()
        drain(engine)
        recorded.answers(2)
    trace = recorded.trace()
    assert trace.iterations["duration"].max() < 1800.0
    assert trace.manifest.without_iterations == ()
    assert trace.iterations["num_generated"].sum() == trace.outcomes["response_tokens"].sum()


def test_each_turn_of_session_ends_when_it_did(recorded):
    """As AsyncLLM's streams of inputs reach the scheduler."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    core = recorded.llm.llm_engine.engine_core.engine_core

    def turn(*, last=False):
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        return Request("session", [1, 9, 5], params, None, resumable=not last)

    for _ in range(3):
        recorded.scheduler.add_request(turn())
        drain(core, recorded.scheduler)
        recorded.hours += 1.0
    recorded.scheduler.add_request(turn(last=True))
    core.step()
    trace = recorded.trace()
    assert trace.outcomes[["turn", "finish_reason"]].to_numpy().tolist() == [[n, "length"] for n in range(3)]
    assert (trace.outcomes["t_finish"] - trace.outcomes["t_submit"]).max() < 1800.0
    assert trace.iterations["duration"].max() < 1800.0


def test_a_drafter_that_a_wake_breaks_is_reported(recorded, monkeypatch, capfd):
    """Its drafts are wrong from then on, and what is said stays right."""
    core = recorded.llm.llm_engine.engine_core.engine_core
    before = texts(recorded.answers(8, temperature=0.0, max_tokens=60))
    drafter = core.model_executor.driver_worker.model_runner.drafter
    stock = drafter.propose
    monkeypatch.setattr(drafter, "propose", lambda *args, **more: [[1] * len(each) for each in stock(*args, **more)])
    recorded.llm.collective_rpc("get_model")
    core.wake_up()
    recorded.llm.reset_prefix_cache()
    assert "tltlab" not in capfd.readouterr().err
    assert texts(recorded.answers(8, temperature=0.0, max_tokens=60)) == before
    (said,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("tltlab: ")]
    for fact in ("drafter suffix", "a wake of the engine", "0.000 of", "before"):
        assert fact in said
    assert recorded.recording.control.alarm.collapsed["suffix"]


def vanishes(recorded, patch):
    shutil.rmtree(recorded.path)
    return "No such file"


def is_full(recorded, patch):
    patch.setattr(os, "fsync", raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    return "No space left on device"


def has_a_bug(recorded, patch):
    patch.setattr(recorded.recording, "left", raising(KeyError("of ours")))
    return "KeyError: 'of ours'"


@pytest.mark.parametrize("trouble", [vanishes, is_full, has_a_bug], ids=lambda trouble: trouble.__name__)
def test_a_recording_in_trouble_ends_and_vllm_continues(recorded, monkeypatch, caplog, trouble):
    monkeypatch.setattr(LiveRecording, "idle_s", 0.01)
    monkeypatch.setattr(LiveRecording, "flush_s", 0.01)
    before = texts(recorded.answers(temperature=0.0))
    why = trouble(recorded, monkeypatch)
    deadline = time.monotonic() + 300
    while not recorded.recording.ended:
        assert texts(recorded.answers(temperature=0.0)) == before
        assert time.monotonic() < deadline
    monkeypatch.undo()
    assert texts(recorded.answers(temperature=0.0)) == before
    assert not recorded.hooked
    assert why in said_once(caplog)
    recorded.scheduler.close_recording()
    assert is_unfinished(recorded.path) == (trouble is not vanishes)


def test_a_busy_engine_is_recorded_continuously(recorded, monkeypatch):
    from vllm import SamplingParams

    monkeypatch.setattr(LiveRecording, "idle_s", 0.01)
    monkeypatch.setattr(LiveRecording, "flush_s", 0.02)
    monkeypatch.setattr(recording_module, "_CHUNK", 4)
    monkeypatch.setattr(recording_module, "NEWEST", 2)
    engine, number = recorded.llm.llm_engine, 0
    deadline, flushed = time.monotonic() + 300, set()
    while len(flushed) < 4:
        flushed.add(Contents.read(recorded.path).to_json())
        while len(recorded.scheduler.requests) < 2:
            number += 1
            params = SamplingParams(max_tokens=6 + number % 5, ignore_eos=True)
            engine.add_request(str(number), {"prompt_token_ids": [1, 4 + number % 9, 5]}, params)
        engine.step()
        assert time.monotonic() < deadline
    assert any(part.startswith("iterations/") for part in Contents.read(recorded.path).parts)
    tracker = recorded.recording.control.tracker
    assert len(tracker.ended) <= 6
    drain(engine)
    trace = recorded.trace()
    assert len(trace.outcomes) == number
    # Where all happen to end at once, that is a rollout.
    for _, rows in trace.iterations.groupby("rl_step"):
        assert sorted(rows["iteration"]) == list(range(len(rows))), "each once"


def test_foreign_wrappers_survive_a_recording(recorded, llm, tmp_path):
    """Another plugin's, that was there before ours and that came after it."""
    called = Counter()

    def wrap(name):
        stock = getattr(recorded.scheduler, name)

        def theirs(*args, **kwargs):
            called[name] += 1
            return stock(*args, **kwargs)

        setattr(recorded.scheduler, name, theirs)
        return theirs

    recorded.scheduler.close_recording()
    before = wrap("update_from_output")
    again = Recorded(llm, tmp_path / "again")
    after = wrap("schedule")
    again.answers(1, max_tokens=4)
    assert len(again.trace().outcomes) == 1
    called.clear()
    again.answers(1, max_tokens=4)
    assert called["update_from_output"] == called["schedule"] > 0
    assert vars(recorded.scheduler)["update_from_output"] is before
    assert vars(recorded.scheduler).pop("schedule") is after
    del recorded.scheduler.update_from_output


def test_an_unwritable_place_has_no_trace(recorded, llm, tmp_path, caplog):
    from tltlab.runtime.engine.vllm.scheduler import record_only

    recorded.scheduler.close_recording()
    (tmp_path / "file").write_text("")
    options = vllm_options(None, record=tmp_path / "file" / "trace")
    recorded.scheduler.vllm_config.additional_config = options["additional_config"]
    record_only(recorded.scheduler)
    assert not recorded.hooked
    assert "nothing is recorded" in caplog.text
    assert len(recorded.answers(1)) == 1
