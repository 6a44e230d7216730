"""What goes through a scheduler of vLLM's, taken down beside it: requests that come and go, iterations, drafts kept.

`Watch` is called by a `PolicyScheduler`, or, where an engine is only recorded, around the methods of vLLM's own
scheduler, of whatever class it is (`record_only`): asynchronous, for diffusion, or somebody's.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Any

import vllm
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from tltlab.drafters.base import Key
from tltlab.runtime.engine.control import Control, Live
from tltlab.runtime.engine.environment import hardware
from tltlab.runtime.engine.ledger import Scheduled
from tltlab.runtime.engine.recording import LiveRecording
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.traces.recording import recording_of

from .options import Attachment
from .runners import kind_of

EXTRA = "tltlab"
"""Where a request carries its key, in `SamplingParams.extra_args`, and an engine its settings."""

NAMELESS_PER_STEP = 1024
"""Requests without keys that count as one RL step where nothing says when one begins, so that drafters can forget."""

WATCHED = (
    "add_request", "_update_request_as_session", "schedule", "_update_after_schedule", "update_from_output",
    "update_draft_token_ids", "_free_request", "reset_prefix_cache",
)  # fmt: skip
"""The methods of a scheduler that is only recorded which are wrapped."""

REMEMBERED = 1 << 18
"""Prompts of which the samples are counted, the newest ones."""

logger = init_logger(__name__)


class Watch:
    """Follows the requests and iterations of one scheduler for its `Control`, and for a recording where there is one.

    A request has come once vLLM's `add_request` is over, and leaves before `_free_request`; an iteration is scheduled
    before `_update_after_schedule`, which AsyncScheduler changes requests in, and back before `update_from_output`, at
    whose end it has `landed`. Requests of pooling models are not followed. No request is looked at one by one where the
    batch is the last one, but for the tokens each got.
    """

    def __init__(self, scheduler: Any, control: Control, settings: Attachment) -> None:
        self.scheduler = scheduler
        scheduler.control = control
        self.recording = _recording(scheduler, control, settings)
        # Whether a request gets a token of each iteration, drafts aside: with diffusion and pooling it does not.
        self._decodes = bool(getattr(scheduler, "num_sampled_tokens_per_step", 1))
        self._samples: dict[tuple[int, str], int] = {}
        self._least_sample = self._num_nameless = 0
        self._in_flight: deque[Scheduled] = deque()
        self._batch: list[str] = []

    @property
    def control(self) -> Control:
        # The scheduler may be given another one.
        control: Control = self.scheduler.control
        return control

    @property
    def _open_recording(self) -> LiveRecording | None:
        return self.recording if self.recording is not None and not self.recording.ended else None

    def came(self, request: Request) -> Live | None:
        """A request is in the scheduler."""
        if request.sampling_params is None:
            return None
        key, recording = self._key_of(request), self._open_recording
        if recording is not None:
            recording.arrives(key[0] if key is not None else None)
        elif key is not None:
            self.control.advance(key[0])
        return self._enter(request, key or self._new_key(request))

    def continues(self, session: Request, before: Live | None) -> Live | None:
        """A streaming session goes on after what has `left`: the output so far is prompt, and this its next turn."""
        if before is None:
            return None
        rl_step, prompt_id, sample, turn = before.key
        return self._enter(session, (rl_step, prompt_id, sample, turn + 1))

    def _enter(self, request: Request, key: Key) -> Live:
        rl_step, prompt_id, sample, _ = key
        least = self._samples.pop((rl_step, prompt_id), 0)
        self._samples[rl_step, prompt_id] = max(least, sample + 1)
        if len(self._samples) > REMEMBERED:
            self._least_sample = max(self._least_sample, self._samples.pop(next(iter(self._samples))))
        prompt = list(request.prompt_token_ids or ())
        live = self.control.add(request.request_id, key, prompt, request._output_token_ids, request.max_tokens)
        if (recording := self._open_recording) is not None:
            recording.arrived(live)
        return live

    def left(self, request: Request) -> Live | None:
        """A request is about to be freed; what was known of it."""
        live = self.control.finish(request.request_id)
        if live is not None and (recording := self._open_recording) is not None:
            reason = request.get_finished_reason()
            recording.left(live, None if reason is None else str(reason))
        return live

    def scheduled(self, output: SchedulerOutput) -> Scheduled:
        """An iteration is put together."""
        ids = list(output.num_scheduled_tokens)
        # The same list where it is the same batch: by that others know.
        self._batch = ids = self._batch if ids == self._batch else ids
        scheduler, drafts = self.scheduler, output.scheduled_spec_decode_tokens
        undrafted = output.total_num_scheduled_tokens - sum(map(len, drafts.values()))
        # What is in the KV cache before the iteration; what is scheduled comes to that.
        computed = sum(output.scheduled_cached_reqs.num_computed_tokens)
        computed += sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
        # All but a token each, and of those that have no token yet that one too.
        prefill = undrafted - self._decodes * len(ids)
        for i in self.control.speechless:
            prefill += i in output.num_scheduled_tokens and _awaits_its_first(scheduler.requests[i])
        work = Scheduled(
            request_ids=ids,
            # A diffusion model's are canvases.
            drafts=drafts if self._decodes else {},
            waiting=len(scheduler.waiting),
            context_tokens=computed + undrafted,
            prefill_tokens=prefill,
        )
        self._in_flight.append(work)
        return work

    def watched(self, work: Scheduled, depth: int) -> None:
        """Nobody of ours chooses what this iteration drafts: vLLM does, by its own method and `depth` tokens deep."""
        speculative = self.scheduler.vllm_config.speculative_config
        self.control.watched(work, _chain(str(speculative.method), depth) if speculative else NO_SPECULATION)

    def back(self, output: SchedulerOutput, model_output: Any) -> Scheduled | None:
        """The oldest iteration in flight is back, with what the model made of it; None where nothing ran."""
        if not output.num_scheduled_tokens:
            return None
        work = self._in_flight.popleft()
        if (graph := getattr(model_output, "cudagraph_stats", None)) is not None:
            work.graph = kind_of(graph.runtime_mode), graph.num_padded_tokens
        with self.control.inside:
            counts = _counts(work.request_ids, model_output)
        self.control.sampled(work, counts)
        return work

    def landed(self) -> None:
        """What came of it has reached the requests."""
        recording = self._open_recording
        if not self.scheduler.requests:
            self.control.idle()
            if recording is not None:
                recording.idle()
        elif recording is not None:
            recording.iterated()

    def drafted(self, draft_token_ids: Any) -> None:
        """vLLM has drafted by itself."""
        ledger = self.control.ledger
        ledger.drafted(ledger.clock(), getattr(draft_token_ids, "draft_s", None) or 0.0)

    def new_weights(self, method: str | None = None) -> None:
        """The engine may have new weights, see `LiveRecording.new_weights`."""
        if (recording := self._open_recording) is not None:
            recording.new_weights(method)

    def _key_of(self, request: Request) -> Key | None:
        """The key that came with the request, None unless it is one; of those that share it the samples differ."""
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
            # Raising here would end the engine, and with it everybody's requests.
            logger.warning("a request's %s must be [rl_step, prompt_id, sample, turn], ignored: %r", EXTRA, extra)
            return None
        if key not in self.control.keys and (recording is None or recording.is_new(key)):
            return key
        # `n` responses to a prompt are requests with one key.
        return key[0], key[1], self._samples.get(key[:2], self._least_sample), key[3]

    def _new_key(self, request: Request) -> Key:
        """A key for a request that has none: its prompt's digest and a running number."""
        tokens = ",".join(map(str, request.prompt_token_ids or ()))
        prompt_id = hashlib.blake2b(tokens.encode(), digest_size=8).hexdigest()
        self._num_nameless += 1
        if self._num_nameless > NAMELESS_PER_STEP and self._open_recording is None:
            self.control.advance(self.control.ledger.rl_step + 1)
            self._num_nameless = 1
        rl_step = self.control.ledger.rl_step
        return rl_step, prompt_id, self._samples.get((rl_step, prompt_id), self._least_sample), 0


def _recording(scheduler: Any, control: Control, settings: Attachment) -> LiveRecording | None:
    """The recording that the settings ask for; where it cannot begin that is said, and the engine goes on without."""
    if settings.record is None:
        return None
    labels = {"model": scheduler.vllm_config.model_config.model, "engine": f"vllm {vllm.__version__}"}
    # One that a killed engine has left, or another one's, stays as it is.
    numbered = settings.numbered or recording_of(Path(settings.record)).exists()
    try:
        begin = LiveRecording.numbered if numbered else LiveRecording
        recording = begin(settings.record, control, hardware=hardware(), **labels)
        if recording.path != Path(settings.record):
            logger.warning("%s is taken, so this engine records to %s", settings.record, recording.path)
        return recording
    except Exception as error:  # the engine is the user's
        logger.error("%s: %s; the engine goes on, and nothing is recorded", type(error).__name__, error)
        return None


def record_only(scheduler: Any) -> None:
    """Have what goes through a scheduler recorded, where its engine's settings ask for that and for no policy.

    vLLM's class stays as it is, and so do all that its methods get and give: those of this one scheduler are wrapped.
    When the recording ends, by itself or by an error of ours, they are vLLM's own again.
    """
    if hasattr(scheduler, "close_recording"):
        return
    try:
        settings = Attachment.of_engine(scheduler.vllm_config)
        if settings.record is None or settings.policy is not None:
            return
        if scheduler.vllm_config.model_config.runner_type == "pooling":
            logger.warning("the engine pools and generates nothing: nothing is recorded")
            return
        several = scheduler.vllm_config.parallel_config.pipeline_parallel_size > 1
        control = settings.control(overlapped=several or bool(scheduler.scheduler_config.async_scheduling))
        watch = Watch(scheduler, control, settings)
        if watch.recording is not None:
            _RecordOnly(watch, watch.recording).begin()
    except Exception as error:  # the engine is the user's
        logger.error("%s: %s; the engine goes on, and nothing is recorded", type(error).__name__, error)


class _RecordOnly:
    """The wrapped methods of a scheduler that is only recorded, until the recording ends or `close_recording`."""

    def __init__(self, watch: Watch, recording: LiveRecording) -> None:
        self._watch, self._recording, self._scheduler = watch, recording, watch.scheduler
        self._goes_on = False
        self._turn: Live | None = None
        # Of each method what stood for it in the scheduler itself, None for its class's, and what does now.
        self._wrapped: dict[str, tuple[Any, Any]] = {}

    def begin(self) -> None:
        """Wrap them; where that fails the recording ends and they are as they were."""
        watch = self._watch
        around: dict[str, tuple[Callable[..., object], Callable[..., object] | None]] = {
            "add_request": (self._before_add, self._after_add),
            "_update_request_as_session": (self._before_turn, lambda session, *_: watch.continues(session, self._turn)),
            "schedule": (lambda *_: watch.control.iteration_starts(), None),
            "_update_after_schedule": (self._note_iteration, None),
            "update_from_output": (watch.back, lambda *_: watch.landed()),
            "update_draft_token_ids": (watch.drafted, None),
            "_free_request": (lambda request, *_: watch.left(request), None),
            "reset_prefix_cache": (lambda *_: watch.new_weights(), None),
        }
        try:
            for name in WATCHED:
                self._wrap(name, *around[name])
        except Exception as error:
            self._recording.give_up(error)
            self._unwrap()
        self._scheduler.close_recording = self._close
        self._scheduler.new_weights = lambda method: self._take_down(watch.new_weights, (method,))

    def _close(self) -> None:
        self._unwrap()
        self._recording.close()
        self._scheduler.__dict__.pop("close_recording", None)

    def _before_add(self, request: Request) -> None:
        self._goes_on = request.request_id in self._scheduler.requests

    def _after_add(self, request: Request) -> None:
        if not self._goes_on:
            self._watch.came(request)

    def _before_turn(self, session: Request, *_: Any) -> None:
        self._turn = self._watch.left(session)

    def _note_iteration(self, output: SchedulerOutput) -> None:
        if output.num_scheduled_tokens:
            with self._watch.control.inside:
                work = self._watch.scheduled(output)
            # Versions before 0.32 draft as deep as they were started to.
            depth = getattr(output, "num_spec_tokens_to_schedule", self._scheduler.num_spec_tokens)
            self._watch.watched(work, depth)

    def _wrap(self, name: str, before: Callable[..., object], after: Callable[..., object] | None) -> None:
        previous, stock = vars(self._scheduler).get(name), getattr(self._scheduler, name)

        @wraps(stock)
        def method(*args: Any, **kwargs: Any) -> Any:
            self._take_down(before, args)
            result = stock(*args, **kwargs)
            if after is not None:
                self._take_down(after, args)
            return result

        self._wrapped[name] = previous, method
        setattr(self._scheduler, name, method)

    def _take_down(self, part: Callable[..., object], args: tuple[Any, ...]) -> None:
        if self._recording.ended:
            self._unwrap()
            return
        try:
            part(*args)
        except Exception as error:  # whatever it is, others are being served
            self._recording.give_up(error)
            self._unwrap()

    def _unwrap(self) -> None:
        """Take ours away. Where others have wrapped it since it stays, and passes on."""
        attributes = vars(self._scheduler)
        for name, (previous, method) in self._wrapped.items():
            if attributes.get(name) is method:
                if previous is None:
                    del attributes[name]
                else:
                    attributes[name] = previous
        self._wrapped.clear()
        attributes.pop("new_weights", None)


_chain = cache(Strategy.chain)


def _counts(request_ids: Sequence[str], output: Any) -> list[int]:
    """The tokens that each request got, in their order: the runner's is most often the same."""
    sampled = output.sampled_token_ids
    if not sampled:
        return [0] * len(request_ids)
    if output.req_ids == request_ids:
        return list(map(len, sampled))
    index = output.req_id_to_index
    return [len(sampled[index[i]]) for i in request_ids]


def _awaits_its_first(request: Request) -> bool:
    """Whether none of its tokens has been sampled or is being; then nothing that it has scheduled is decoding."""
    return bool(request.num_output_tokens + request.num_output_placeholders == 0)
