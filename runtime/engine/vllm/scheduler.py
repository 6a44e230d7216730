"""vLLM's scheduler with a policy: `PolicyScheduler`, and `AsyncPolicyScheduler` for asynchronous scheduling.

vLLM receives `policy_scheduler` as `scheduler_cls`, which picks the one that fits the engine, and the policy in
`additional_config["tltlab"]` (see `options`). `SchedulerOutput.num_spec_tokens_to_schedule` carries the draft depth of
an iteration to the V1 and V2 model runner.

A `Watch` observes a scheduler: requests that enter and leave, iterations, accepted drafts. Where an engine is only
recorded, `record_only` wraps the methods of vLLM's own scheduler, of any class: asynchronous, for diffusion, or a
user's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import cache, partial, wraps
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import vllm
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus

from tltlab.drafters.base import Key
from tltlab.errors import ConfigError
from tltlab.files import write_json
from tltlab.runtime.engine.control import Control
from tltlab.runtime.engine.drafter_pool import Ahead
from tltlab.runtime.engine.environment import hardware
from tltlab.runtime.engine.guard import FAULTS, Guard
from tltlab.runtime.engine.recording import BRINGS_WEIGHTS, LiveRecording, Newest
from tltlab.runtime.engine.requests import LiveRequest
from tltlab.runtime.engine.stops import StopStrings
from tltlab.runtime.engine.tracker import Iteration
from tltlab.strategy import NO_SPECULATION, Strategy

from . import CALL, is_registered, missing
from .capture import NullCapture
from .late import ATTRIBUTE
from .options import Attachment, check_engine, drafts_nothing
from .runners import GRAPH_KINDS
from .runners import NoProposer as NoProposer
from .sampling import drafting_of, speculative_sampling_is_sound

logger = init_logger(__name__)

EXTRA = "tltlab"
"""Name of a request's key in `SamplingParams.extra_args`, and of an engine's settings in `additional_config`."""

NAMELESS_PER_STEP = 1024
"""Requests without keys per RL step, so that drafters drop old text where no RL step is announced."""

NOT_IN_ALL = ("_handle_stopped_request", "set_pause_state")
"""Methods of schedulers that not all versions and classes have."""

LOOK_BACK = 1024
"""Tokens at the end of a text that are searched for its stop string."""

REMEMBERED = 1 << 18
"""Number of most recent prompts whose samples are counted."""


class Watch:
    """Reports requests and iterations of one scheduler to its `Control`, and to a recording if there is one.

    A request has `entered` after vLLM's `add_request`, its turn `ended` before `_handle_stopped_request`, and it has
    `left` before `_free_request` and is `freed` after it. An iteration is `scheduled` before `_update_after_schedule`,
    in which AsyncScheduler changes requests; its output is `returned` before `update_from_output` and `applied` after
    it. Requests of pooling models are ignored. While the batch stays the same no request is read one by one, except to
    count its new tokens.
    """

    def __init__(self, scheduler, control: Control, settings: Attachment):
        self.scheduler = scheduler
        scheduler.control = control
        self.recording: LiveRecording | None = _starting_to_record().call(_recording, scheduler, control, settings)
        # False for diffusion and pooling, where an iteration does not yield one token per request.
        self._decodes = bool(getattr(scheduler, "num_sampled_tokens_per_step", 1))
        self._samples = Newest[tuple[int, str], int](REMEMBERED)
        self._least_sample = self._num_nameless = 0
        self._batch: list[str] = []
        self._goes_on = False
        self._turn: LiveRequest | None = None
        self._detokenizing = Guard("stop strings are recorded as aborts:", "the engine continues")

    @property
    def control(self) -> Control:
        control: Control = self.scheduler.control  # may be replaced
        return control

    @property
    def _open_recording(self) -> LiveRecording | None:
        return self.recording if self.recording is not None and not self.recording.ended else None

    def enters(self, request: Request) -> None:
        """Note whether a request is the next turn of a session that the scheduler has."""
        self._goes_on = request.request_id in self.scheduler.requests

    def entered(self, request: Request) -> None:
        """Add a request of the scheduler."""
        if self._goes_on or request.sampling_params is None:
            return
        key, recording = self._key_of(request), self._open_recording
        if recording is not None:
            recording.arrives(key[0] if key is not None else None)
        elif key is not None:
            self.control.advance(key[0])
        self._enter(request, key or self._new_key(request))

    def continues(self, session: Request, *_) -> None:
        """Note the end of a turn of a streaming session."""
        self._turn = self.left(session)

    def continued(self, session: Request, *_) -> None:
        """Add the next turn of a streaming session, in which the output so far is prompt."""
        if self._turn is not None:
            rl_step, prompt_id, sample, turn = self._turn.key
            self._enter(session, (rl_step, prompt_id, sample, turn + 1))

    def _enter(self, request: Request, key: Key) -> None:
        rl_step, prompt_id, sample, _ = key
        least = self._samples.get((rl_step, prompt_id), 0)
        if (oldest := self._samples.put((rl_step, prompt_id), max(least, sample + 1))) is not None:
            self._least_sample = max(self._least_sample, oldest[1])
        ids, drafting = request.prompt_token_ids, drafting_of(request.sampling_params)
        live = self.control.add(
            request.request_id,
            key,
            list(ids or ()),
            request._output_token_ids,
            request.max_tokens,
            drafting,
            embedded_tokens=request.num_prompt_tokens if ids is None else 0,
        )
        live.ends = frozenset((request.sampling_params.eos_token_id, *(request.sampling_params.stop_token_ids or ())))

    def ended(self, request: Request) -> None:
        """Note the end of a request's turn, before vLLM has it await the next one, with its own status."""
        if (live := self.control.live.get(request.request_id)) is not None:
            live.ended = str(request.get_finished_reason()), self.control.tracker.clock()

    def left(self, request: Request, *_) -> LiveRequest | None:
        """Remove and return a request that is about to be freed."""
        if (live := self.control.live.get(request.request_id)) is None:
            return None
        reason, got = request.get_finished_reason(), live.got
        if got is None and self._open_recording is not None:
            ended, end_s = live.ended or (str(reason), self.control.tracker.clock())
            if (got := self._stopped_at(request, ended == "stop")) is not None:
                live.ended = "stop", end_s
        return self.control.finish(live.name, None if reason is None else str(reason), got)

    def note_delivered(self, num_tokens: Mapping[str, int]) -> None:
        """Note how many tokens clients have of requests that they are about to abort; or `CALL`."""
        if CALL in num_tokens and (recording := self._open_recording) is not None:
            recording.called()
        for name, got in num_tokens.items():
            if (live := self.control.live.get(name)) is not None:
                live.got = got

    def _stopped_at(self, request: Request, at_token: bool) -> int | None:
        """Return `_stopped_at` by the tokenizer of vLLM's engine core; None without one, or once it has failed."""
        tokenizer = getattr(getattr(self.scheduler, "structured_output_manager", None), "tokenizer", None)
        if tokenizer is None:
            return None
        # The tokenizer may be anybody's.
        got: int | None = self._detokenizing.call(_stopped_at, request, tokenizer, at_token)
        return got

    def scheduled(self, output: SchedulerOutput) -> Iteration:
        """Return the batch of an iteration."""
        ids = list(output.num_scheduled_tokens)
        # The same list object for the same batch, by which `Control` recognises it.
        self._batch = ids = self._batch if ids == self._batch else ids
        scheduler, drafts = self.scheduler, output.scheduled_spec_decode_tokens
        undrafted = output.total_num_scheduled_tokens - sum(map(len, drafts.values()))
        # Tokens in the KV cache before the iteration; the context adds the scheduled ones.
        computed = sum(output.scheduled_cached_reqs.num_computed_tokens)
        computed += sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
        # All scheduled tokens but one per request that has output already.
        prefill = undrafted - self._decodes * len(ids)
        for i in self.control.waiting:
            prefill += i in output.num_scheduled_tokens and _has_no_output(scheduler.requests[i])
        return Iteration(
            request_ids=ids,
            drafts=drafts if self._decodes else {},  # a diffusion model's are canvases
            waiting=len(scheduler.waiting),
            context_tokens=computed + undrafted,
            prefill_tokens=prefill,
        )

    def watched(self, output: SchedulerOutput) -> None:
        """Record an iteration without a policy, whose drafts vLLM makes by its own method."""
        if not output.num_scheduled_tokens:
            return
        with self.control.inside:
            work = self.scheduled(output)
        # Versions before 0.32 always draft to the depth given at the start.
        depth = getattr(output, "num_spec_tokens_to_schedule", self.scheduler.num_spec_tokens)
        speculative = self.scheduler.vllm_config.speculative_config
        self.control.watched(work, _chain(str(speculative.method), depth) if speculative else NO_SPECULATION)

    def returned(self, output: SchedulerOutput, model_output) -> Iteration | None:
        """Process the model's output for the oldest iteration in flight and return it; None where nothing ran."""
        if not output.num_scheduled_tokens:
            return None
        work = self.control.tracker.in_flight[0]
        if (graph := getattr(model_output, "cudagraph_stats", None)) is not None:
            work.graph = GRAPH_KINDS[graph.runtime_mode], graph.num_padded_tokens
        with self.control.inside:
            counts = _counts(work.request_ids, model_output)
        return self.control.sampled(counts)

    def freed(self) -> None:
        """Note that an output was applied to requests, or one was freed: the engine may have become idle."""
        # Streaming sessions that await their next input do not run.
        if len(self.control.live) <= getattr(self.scheduler, "num_waiting_for_streaming_input", 0):
            self.control.idle()

    def drafted(self, draft_token_ids) -> None:
        """Record the time of vLLM's own drafting."""
        tracker = self.control.tracker
        tracker.drafted(tracker.clock(), getattr(draft_token_ids, "draft_s", None) or 0.0)

    def new_weights(self, method: str | None = None) -> None:
        """Note that the engine may have new weights (`LiveRecording.new_weights`), after a wait for them."""
        self.control.end_iteration()
        if method is None:
            self.control.alarm.note_event("a reset of the prefix cache")
        elif "wake" in method or BRINGS_WEIGHTS.search(method):
            self.control.alarm.note_event("a wake of the engine" if "wake" in method else f"new weights ({method})")
        if (recording := self._open_recording) is not None:
            recording.new_weights(method)

    def _key_of(self, request: Request) -> Key | None:
        """Return the request's key, None unless it is valid; requests with the same key get distinct samples."""
        params, recording = request.sampling_params, self._open_recording
        extra = (params.extra_args or {}).get(EXTRA) if params is not None else None
        if extra is None:
            return None
        try:
            rl_step, prompt_id, sample, turn = extra
            key = int(rl_step), str(prompt_id), int(sample), int(turn)
            if recording is not None and not recording.can_have(key):
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            # An exception would end the engine and all its requests.
            logger.warning("a request's %s must be [rl_step, prompt_id, sample, turn], ignored: %r", EXTRA, extra)
            return None
        if key not in self.control.by_key and (recording is None or recording.is_new(key)):
            return key
        # The `n` responses to a prompt are requests with the same key.
        return key[0], key[1], self._samples.get(key[:2], self._least_sample), key[3]

    def _new_key(self, request: Request) -> Key:
        """Return a key for a request without one: the digest of all that makes its prompt, and a running number."""
        prompt_id = _prompt_digest(request)
        self._num_nameless += 1
        if self._num_nameless > NAMELESS_PER_STEP and self._open_recording is None:
            self.control.advance(self.control.tracker.rl_step + 1)
            self._num_nameless = 1
        rl_step = self.control.tracker.rl_step
        return rl_step, prompt_id, self._samples.get((rl_step, prompt_id), self._least_sample), 0


def _prompt_digest(request: Request) -> str:
    """Return the digest of a request's token ids, and of its embeddings, images, adapter and cache salt."""
    digest = hashlib.blake2b(",".join(map(str, request.prompt_token_ids or ())).encode(), digest_size=8)
    if (embeds := getattr(request, "prompt_embeds", None)) is not None:
        digest.update(embeds.detach().cpu().contiguous().view(torch.uint8).numpy())
    adapter, salt = request.lora_request, request.cache_salt
    names = [*(feature.identifier for feature in request.mm_features or ()), adapter and adapter.lora_name, salt]
    if any(names):
        digest.update(repr(names).encode())
    return digest.hexdigest()


def _recording(scheduler, control: Control, settings: Attachment) -> LiveRecording | None:
    """Return the recording that the settings request; log an error and return None where it cannot begin."""
    if settings.record is None:
        return None
    labels = {"model": scheduler.vllm_config.model_config.model, "engine": f"vllm {vllm.__version__}"}
    recording = LiveRecording.numbered(
        settings.record, control, hardware=hardware(), rl_step_ends=settings.rl_step_ends, **labels
    )
    if settings.policy is not None:
        policy = {"rl_step": 0, "name": control.policy_name, "policy": settings.policy.model_dump(mode="json")}
        of_run = {"seed": settings.seed, "policies": [policy]}
        recording.guard.call(write_json, recording.path / "policies.json", of_run)
    if recording.path != Path(settings.record):
        logger.warning("%s is taken, so this engine records to %s", settings.record, recording.path)
    return recording


def _starting_to_record() -> Guard:
    return Guard("a recording cannot begin:", "the engine continues, and nothing is recorded")


def record_only(scheduler) -> None:
    """Record a scheduler if its engine's settings request a recording and no policy.

    Methods of this one object are wrapped; vLLM's class, arguments and results stay unchanged. When the recording
    ends, also by an error in it, the methods are vLLM's own again.
    """
    if not hasattr(scheduler, "close_recording"):
        _starting_to_record().call(_record_only, scheduler)


def _record_only(scheduler) -> None:
    settings = Attachment.of_engine(scheduler.vllm_config)
    if settings.record is None or settings.policy is not None:
        return
    if scheduler.vllm_config.model_config.runner_type == "pooling":
        logger.warning("the engine pools and generates nothing: nothing is recorded")
        return
    several = scheduler.vllm_config.parallel_config.pipeline_parallel_size > 1
    control = settings.control(overlapped=several or bool(scheduler.scheduler_config.async_scheduling))
    watch = Watch(scheduler, control, settings)
    if (recording := watch.recording) is not None:
        hooks = _Hooks(watch, recording.guard, recording)
        hooks.wrap(_around_requests(watch) | _around_iterations(watch))
        scheduler.close_recording = hooks.close


_Around = dict[str, tuple[Callable[..., object], Callable[..., object] | None]]
"""By method of a scheduler, calls before and after it, with its arguments."""


def _around_requests(watch: Watch) -> _Around:
    """Calls that report requests, pauses and new weights to `watch`."""
    return {
        "add_request": (watch.enters, lambda request: watch.entered(request)),
        "_update_request_as_session": (watch.continues, watch.continued),
        "_handle_stopped_request": (lambda request: watch.ended(request), None),
        "_free_request": (lambda request, *_: watch.left(request), lambda *_: watch.freed()),
        "set_pause_state": (lambda *_: watch.control.end_iteration(), None),
        "reset_prefix_cache": (lambda *_: watch.new_weights(), None),
    }


def _around_iterations(watch: Watch) -> _Around:
    """Calls that report iterations of an engine without a policy to `watch`."""
    return {
        "schedule": (lambda *_: watch.control.iteration_starts(), None),
        "_update_after_schedule": (watch.watched, None),
        "update_from_output": (watch.returned, lambda *_: watch.freed()),
        "update_draft_token_ids": (watch.drafted, None),
    }


class _Hooks:
    """Calls around methods of one scheduler object, through `guard`.

    With a `recording` the methods are unwrapped when that ends, also by an error in it.
    """

    def __init__(self, watch: Watch, guard: Guard, recording: LiveRecording | None = None):
        self._watch, self._scheduler = watch, watch.scheduler
        self._guard, self._recording = guard, recording
        # By method: the object's own attribute before, None for its class's method, and the wrapper.
        self._wrapped: dict[str, tuple[Any, Any]] = {}

    def wrap(self, around: _Around) -> None:
        """Wrap the methods; where that fails all are restored."""
        for name, calls in around.items():
            if name not in NOT_IN_ALL or hasattr(self._scheduler, name):
                self._guarded(partial(self._wrap, name, *calls), ())
        self._scheduler.new_weights = lambda method: self._guarded(self._watch.new_weights, (method,))
        self._scheduler.note_delivered = lambda num_tokens: self._guarded(self._watch.note_delivered, (num_tokens,))

    def close(self) -> None:
        """Unwrap the methods and end the recording."""
        self._unwrap()
        if self._recording is not None:
            self._recording.close()
        self._scheduler.__dict__.pop("close_recording", None)

    def _wrap(self, name: str, before: Callable[..., object], after: Callable[..., object] | None) -> None:
        previous, stock = vars(self._scheduler).get(name), getattr(self._scheduler, name)

        @wraps(stock)
        def method(*args, **kwargs):
            self._guarded(before, args)
            result = stock(*args, **kwargs)
            if after is not None:
                self._guarded(after, args)
            return result

        self._wrapped[name] = previous, method
        setattr(self._scheduler, name, method)

    def _guarded(self, part: Callable[..., object], args: tuple[Any, ...]) -> None:
        if self._recording is None or not self._recording.ended:
            self._guard.call(part, *args)
        if self._recording is not None and self._recording.ended:
            self._unwrap()

    def _unwrap(self) -> None:
        """Remove the wrappers; one that other code has wrapped since stays, and only forwards."""
        attributes = vars(self._scheduler)
        for name, (previous, method) in self._wrapped.items():
            if attributes.get(name) is method:
                if previous is None:
                    del attributes[name]
                else:
                    attributes[name] = previous
        self._wrapped.clear()
        attributes.pop("new_weights", None)
        attributes.pop("note_delivered", None)


def _stopped_at(request: Request, tokenizer, at_token: bool) -> int | None:
    """Number of tokens that the client got of a request with stop strings; None where it met none of them.

    Clients look for stop strings and abort the request in the engine core, which may have computed more, or ended it
    meanwhile, `at_token`: at an EOS or stop token. vLLM's own detokenizer decides; it takes about 1 us a token.
    """
    params, output = request.sampling_params, request._output_token_ids
    if params is None or not params.stop or not output:
        return None
    cut = max(len(output) - LOOK_BACK, 0)
    params = copy(params)
    params.min_tokens = max(params.min_tokens - cut, 0)
    prompt = request.prompt_token_ids
    text = SimpleNamespace(
        request_id=request.request_id,
        prompt_token_ids=[*(prompt or ()), *output[:cut]] if cut else prompt,
        prompt_embeds=None if cut else getattr(request, "prompt_embeds", None),
        sampling_params=params,
    )
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, cast(EngineCoreRequest, text))
    stopped = detokenizer.update(list(output[cut:]), at_token)
    return cut + detokenizer.num_output_tokens() if stopped else None


_chain = cache(Strategy.chain)


def _counts(request_ids: Sequence[str], output) -> list[int]:
    """Return the number of new tokens of each request, in the order of `request_ids`, usually the runner's too."""
    sampled = output.sampled_token_ids
    if not sampled:
        return [0] * len(request_ids)
    if output.req_ids == request_ids:
        return list(map(len, sampled))
    index = output.req_id_to_index
    return [len(sampled[index[i]]) for i in request_ids]


def _has_no_output(request: Request) -> bool:
    """True if no token has been sampled or is in flight: all its scheduled tokens are prefill."""
    return bool(request.num_output_tokens + request.num_output_placeholders == 0)


def policy_scheduler(vllm_config: VllmConfig, *args, **kwargs) -> PolicyScheduler:
    """Create the scheduler that fits the engine's `async_scheduling`, as resolved by vLLM."""
    cls = AsyncPolicyScheduler if vllm_config.scheduler_config.async_scheduling else PolicyScheduler
    return cls(vllm_config, *args, **kwargs)


class PolicyScheduler(Scheduler):
    """Scheduler that has a policy choose before each iteration and trims or replaces drafts after it.

    ConfigError without a policy, and by `check_engine`.
    """

    def __init__(self, vllm_config: VllmConfig, *args, **kwargs):
        begins, continues = "tltlab raised", "the engine continues without a policy, a recording or a capture"
        self.guard = Guard(begins, continues, self._give_up)
        super().__init__(vllm_config, *args, **kwargs)
        overlapped = isinstance(self, AsyncScheduler)
        # The V2 runner verifies the drafts it keeps on the device, not the tokens that the scheduler names.
        on_host = not (self.num_spec_tokens and self.use_v2_model_runner)
        on_host = on_host and not (overlapped and missing("late drafts"))
        settings = Attachment()
        try:
            settings = Attachment.of_engine(vllm_config)
            check_engine(vllm_config, settings, plugged_in=is_registered(), sound=speculative_sampling_is_sound())
            if settings.policy is None:
                raise ConfigError(
                    f"{type(self).__name__} has no policy to follow in this engine: leave scheduler_cls out (record= "
                    "needs none), or pass all options of vllm_options"
                )
            self.control = settings.control(overlapped=overlapped, on_host=on_host)
        except FAULTS as error:
            if isinstance(error, ConfigError):
                raise
            settings = settings.model_copy(update={"policy": None})
            self.control = settings.control(overlapped=overlapped, on_host=on_host)
            self.control.guard.fail(error)
        # With a table of depths in force vLLM does not pad new requests with placeholder drafts.
        self._draft_at_most(self.num_spec_tokens)
        self.drafts_here_alone = drafts_nothing(vllm_config.speculative_config)
        self.watch = Watch(self, self.control, settings)
        _Hooks(self.watch, self.guard).wrap(_around_requests(self.watch))
        self.capture: NullCapture = NullCapture()
        # State of the last iteration: the workers' draft depth and seconds, places for the drafts of asynchronous
        # scheduling, and the requests still without a draft.
        self._worker_depth = self._num_places = 0
        self._draft_s: float | None = None
        self._due_ids: list[str] | None = None
        self._has_drafts = False

    def _draft_at_most(self, depth: int) -> None:
        if self.num_spec_tokens:
            self.dynamic_sd_lookup = [depth] * (self.max_num_running_reqs + 1)

    def _give_up(self) -> None:
        """Decode plainly, so that requests complete, and keep the recording so far."""
        self.control.guard.failure = self.control.guard.failure or self.guard.failure
        self._worker_depth, self._num_places, self._due_ids = 0, 0, None
        self._draft_at_most(0)
        with suppress(*FAULTS):
            self.capture.stop()
        if self.watch.recording is not None:
            self.watch.recording.give_up()

    def schedule(self, *args, **kwargs) -> SchedulerOutput:
        if self.control.draftless:
            for request in self.running:
                request.spec_token_ids = []
        if self._due_ids is not None and not self.requests.keys().isdisjoint(self._due_ids):
            # As late as possible: the engine returns the last tokens first, and ended requests get no draft.
            self._set_drafts(self.guard.call(self._draft, self._due_ids, (), self._draft_s))
        self.guard.call(self.control.iteration_starts)
        return super().schedule(*args, **kwargs)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        # The last call of schedule(): the batch is final, and AsyncScheduler plans drafts by the depth set here.
        if scheduler_output.num_scheduled_tokens:
            self.guard.call(self._note_iteration, scheduler_output)
            scheduler_output.num_spec_tokens_to_schedule = self._num_places
        super()._update_after_schedule(scheduler_output)
        if scheduler_output.num_scheduled_tokens:
            scheduler_output.num_spec_tokens_to_schedule = self._worker_depth

    def _note_iteration(self, scheduler_output: SchedulerOutput) -> None:
        with self.control.inside:
            work = self.watch.scheduled(scheduler_output)
        self._worker_depth = self.control.scheduled(work)
        self._num_places = self.control.reserved_depth if self.num_spec_tokens else 0
        self.capture.scheduled(scheduler_output)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output):
        self.guard.call(self._note_output, scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.guard.call(self.watch.freed)
        return outputs

    def _note_output(self, scheduler_output: SchedulerOutput, model_runner_output) -> None:
        if (work := self.watch.returned(scheduler_output, model_runner_output)) is None:
            return
        if self._drafts_on_host and (self._has_drafts or self.control.tracker.in_force.strategy.speculates):
            self._due_ids = work.request_ids

    @property
    def _drafts_on_host(self) -> bool:
        """True if drafts are made or trimmed here after an iteration's output."""
        return bool(self.num_spec_tokens) and not self.control.overlapped

    def update_draft_token_ids(self, draft_token_ids) -> None:
        draft_s = getattr(draft_token_ids, "draft_s", None)
        if self._worker_depth:
            workers = draft_token_ids.draft_token_ids
            self._set_drafts(self.guard.call(self._draft, draft_token_ids.req_ids, workers, draft_s))
        elif self._due_ids is not None:
            self._draft_s = draft_s
        elif draft_s and self._drafts_on_host:
            self.guard.call(self.watch.drafted, draft_token_ids)

    def _draft(self, ids: list[str], of_workers: Sequence[list[int]], draft_s: float | None) -> DraftTokenIds | None:
        """Return drafts for the last iteration's requests, those `of_workers` made in `draft_s` seconds.

        None where neither this iteration nor the last has any.
        """
        self._due_ids, self._draft_s = None, None
        drafts = self.control.drafts(ids, of_workers, draft_s)
        before, self._has_drafts = self._has_drafts, any(drafts)
        if not self._has_drafts and not before:
            return None
        return DraftTokenIds(ids, drafts or [[] for _ in ids])

    def _set_drafts(self, drafts: DraftTokenIds | None) -> None:
        if drafts is None:
            return
        super().update_draft_token_ids(drafts)
        if len(self.running) > len(drafts.req_ids):
            # Requests outside of the last batch must not verify drafts of an earlier choice.
            drafted_ids = set(drafts.req_ids)
            for request in self.running:
                if request.spec_token_ids and request.request_id not in drafted_ids:
                    request.spec_token_ids = []

    _stops: StopStrings | None = None

    def stop_at(self, stops: StopStrings) -> None:
        """End later responses where their text has one of these."""
        self._stops = stops
        # Here vLLM cuts tokens behind an EOS token, so that drafts change no response. It is called for each request.
        self._update_request_with_output = self._stopped

    def _stopped(self, request: Request, new_token_ids: list[int], *args, **kwargs) -> tuple[list[int], bool]:
        assert self._stops is not None
        num = self.guard.call(self._stops.completed, request, new_token_ids)
        if num:
            del new_token_ids[num:]
        new_token_ids, stopped = super()._update_request_with_output(request, new_token_ids, *args, **kwargs)
        if num and len(new_token_ids) == num:
            request.status, stopped = RequestStatus.FINISHED_STOPPED, True
        return new_token_ids, stopped

    def close_recording(self) -> None:
        """End the recording and turn it into a trace."""
        if self.watch.recording is not None:
            self.watch.recording.close()


class AsyncPolicyScheduler(PolicyScheduler, AsyncScheduler):
    """`PolicyScheduler` for asynchronous scheduling: an iteration is scheduled before the last one's output.

    Places for drafts are reserved, which budgets trim. A learned drafter's drafts stay on the device; those of the host
    come late, while the runner prepares its inputs (`late`).
    """

    _queue: Sequence[tuple[Any, ...]] = ()

    def draft_late(self, core) -> None:
        """Draft for iterations of this engine core: its runner asks, or the executor of workers in other processes."""
        self._queue = () if core.batch_queue is None else core.batch_queue
        runner = getattr(getattr(core.model_executor, "driver_worker", None), "model_runner", None)
        if runner is None:
            stock = core.model_executor.execute_model

            def execute_model(scheduler_output: SchedulerOutput, *args, **kwargs):
                self._make_late_drafts(scheduler_output)
                return stock(scheduler_output, *args, **kwargs)

            core.model_executor.execute_model = execute_model
        elif (late := getattr(runner, ATTRIBUTE, None)) is not None:
            late.ask = self._make_late_drafts

    def _make_late_drafts(self, scheduler_output: SchedulerOutput) -> None:
        if scheduler_output.scheduled_spec_decode_tokens:
            self.guard.call(self._fill, scheduler_output.scheduled_spec_decode_tokens)

    def _fill(self, places: dict[str, list[int]]) -> None:
        """Name the drafts of the iteration scheduled last in its `places`."""
        made = self.control.late_drafts(partial(self._ahead, places), places)
        for name, draft in made.items():
            places[name] = draft + [-1] * (len(places[name]) - len(draft))

    def _ahead(self, names: Container[str]) -> Ahead:
        """Wait for the iteration before the last; return its tokens of requests among `names` that go on after them."""
        output = self._queue[0][0].result() if self._queue else None
        sampled, index = (output.sampled_token_ids, output.req_id_to_index) if output is not None else ([], {})
        ahead: list[tuple[LiveRequest, list[int]]] = []
        for live in self.control.live.values():
            if live.name not in names:
                continue
            new = sampled[index[live.name]] if sampled and live.name in index else []
            ends = not live.ends.isdisjoint(new)
            if not ends and (self._stops is None or not self._stops.completed(self.requests[live.name], new)):
                ahead.append((live, new))
        return ahead

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput):
        # Drafts of the host were made before the tokens in front of them had reached the grammar.
        drafts = scheduler_output.scheduled_spec_decode_tokens
        if scheduler_output.has_structured_output_requests and drafts:
            own = {name: list(takewhile((0).__le__, draft)) for name, draft in drafts.items() if draft[0] >= 0}
            self.update_draft_token_ids_in_output(DraftTokenIds(list(own), list(own.values())), scheduler_output)
        return super().get_grammar_bitmask(scheduler_output)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        if self._num_places:
            self.guard.call(self._trim, scheduler_output)

    def _trim(self, scheduler_output: SchedulerOutput) -> None:
        drafting = [
            r for r in map(self.requests.__getitem__, scheduler_output.num_scheduled_tokens) if r.spec_token_ids
        ]
        for request, share in zip(drafting, self.control.allot([r.request_id for r in drafting]), strict=True):
            if share < len(request.spec_token_ids):
                request.spec_token_ids = request.spec_token_ids[:share]  # a copy: all requests share the list
