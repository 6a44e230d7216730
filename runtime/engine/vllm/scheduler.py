"""vLLM's scheduler with a policy: `PolicyScheduler`, and `AsyncPolicyScheduler` for asynchronous scheduling.

vLLM receives either as `scheduler_cls`, or `policy_scheduler` for the one that fits the engine, and the policy in
`additional_config["tltlab"]` (see `options`). `SchedulerOutput.num_spec_tokens_to_schedule` carries the draft depth of
an iteration to the V1 and V2 model runner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request

from tltlab.errors import ConfigError
from tltlab.runtime.engine.generation import LiveRequest, describe_exception

from . import is_registered
from .capture import NullCapture
from .options import Attachment, check_engine, drafts_nothing
from .runners import NoProposer as NoProposer
from .sampling import speculative_sampling_is_sound
from .watch import Watch

logger = init_logger(__name__)


def policy_scheduler(vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> PolicyScheduler:
    """Create the scheduler that fits the engine's `async_scheduling`, as resolved by vLLM."""
    cls = AsyncPolicyScheduler if vllm_config.scheduler_config.async_scheduling else PolicyScheduler
    return cls(vllm_config, *args, **kwargs)


class PolicyScheduler(Scheduler):
    """Scheduler that has a policy choose before each iteration and trims or replaces drafts after it.

    ConfigError without a policy, where engine and scheduler differ in asynchronous scheduling, and by `check_engine`.
    """

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        settings = Attachment.of_engine(vllm_config)
        check_engine(vllm_config, settings, plugged_in=is_registered(), sound=speculative_sampling_is_sound())
        if settings.policy is None:
            raise ConfigError(
                f"{type(self).__name__} has no policy to follow in this engine: leave scheduler_cls out (record= needs "
                "none), or pass all options of vllm_options"
            )
        self._check_class(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)
        overlapped = isinstance(self, AsyncScheduler)
        # The V2 runner verifies the drafts it keeps on the device, not the tokens that the scheduler names.
        beside = not overlapped and not (self.num_spec_tokens and self.use_v2_model_runner)
        self.control = settings.control(overlapped=overlapped, beside=beside)
        # With a table of depths in force vLLM does not pad new requests with placeholder drafts.
        if self.num_spec_tokens:
            self._draft_at_most(self.num_spec_tokens)
        self.drafts_here_alone = drafts_nothing(vllm_config.speculative_config)
        self.watch = Watch(self, self.control, settings)
        self.capture: NullCapture = NullCapture()
        self.given_up = False
        # State of the last iteration: the workers' draft depth and seconds, and the requests still without a draft.
        self._worker_depth = 0
        self._draft_s: float | None = None
        self._due_ids: list[str] | None = None
        self._has_drafts = False

    def _draft_at_most(self, depth: int) -> None:
        self.dynamic_sd_lookup = [depth] * (self.max_num_running_reqs + 1)

    def _guarded(self, part: Callable[..., Any], *args: Any) -> Any:
        """Call `part`; after the first exception disable all such calls and return None.

        The engine then decodes plainly, so that its requests complete. The recording so far is kept.
        """
        if self.given_up:
            return None
        try:
            return part(*args)
        except Exception as error:
            self.given_up = True
            failure = f"tltlab raised {describe_exception(error)}"
            logger.error("%s; the engine continues without a policy, a recording or a capture", failure)
            self.control.failure = self.control.failure or failure
            self._worker_depth, self._due_ids = 0, None
            if self.num_spec_tokens:
                self._draft_at_most(0)
            with suppress(Exception):
                self.capture.stop()
            if self.watch.recording is not None:
                with suppress(Exception):
                    self.watch.recording.give_up(error)
            return None

    def _check_class(self, config: VllmConfig) -> None:
        overlapped = isinstance(self, AsyncScheduler)
        if overlapped != bool(config.scheduler_config.async_scheduling):
            # vLLM would not draft at all, or verify stale drafts.
            own, twin = type(self).__name__, (PolicyScheduler if overlapped else AsyncPolicyScheduler).__name__
            raise ConfigError(
                f"asynchronous scheduling is {'off (on a CPU it always is)' if overlapped else 'on'} in this engine, "
                f"and {own} is for engines where it is {'on' if overlapped else 'off'}: pass "
                f"async_scheduling={overlapped}, or scheduler_cls={__name__}.{twin}, or let "
                f"{__name__}.policy_scheduler choose"
            )

    def add_request(self, request: Request) -> None:
        continues = request.request_id in self.requests
        super().add_request(request)
        if not continues:
            self._guarded(self._enter, self.watch.entered, request)

    def _enter(self, watch: Callable[..., LiveRequest | None], request: Request, *before: LiveRequest | None) -> None:
        if (live := watch(request, *before)) is not None:
            self.capture.enter(request.request_id, live)
            if live.drafting == "none beside":
                for running in self.running:
                    running.spec_token_ids = []

    def _update_request_as_session(self, session: Request, update: Any) -> None:
        # The next input of a streaming session: output so far becomes prompt, and the input starts a turn.
        before = self._guarded(self.watch.left, session)
        super()._update_request_as_session(session, update)
        self._guarded(self._enter, self.watch.continued, session, before)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if self._due_ids is not None and self.requests:
            # As late as possible: the engine returns the last tokens first, and ended requests get no draft.
            self._set_drafts(self._guarded(self._draft, self._due_ids, (), self._draft_s))
        self._guarded(self.control.iteration_starts)
        return super().schedule(*args, **kwargs)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        # The last call of schedule(): the batch is final, and AsyncScheduler plans drafts by the depth set here.
        if scheduler_output.num_scheduled_tokens:
            self._guarded(self._note_iteration, scheduler_output)
            scheduler_output.num_spec_tokens_to_schedule = self._worker_depth
        super()._update_after_schedule(scheduler_output)

    def _note_iteration(self, scheduler_output: SchedulerOutput) -> None:
        with self.control.inside:
            work = self.watch.scheduled(scheduler_output)
        self._worker_depth = self.control.scheduled(work)
        self.capture.scheduled(scheduler_output)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        self._guarded(self._note_output, scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._guarded(self.watch.applied)
        if not self.requests:
            self._due_ids = None
        return outputs

    def _note_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> None:
        if (work := self.watch.returned(scheduler_output, model_runner_output)) is None:
            return
        self.capture.landed()
        if self._beside and (self._has_drafts or self.control.tracker.in_force.strategy.speculates):
            self._due_ids = work.request_ids

    @property
    def _beside(self) -> bool:
        """True if drafts are made or trimmed here after an iteration's output."""
        return bool(self.num_spec_tokens) and not self.control.overlapped

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        draft_s = getattr(draft_token_ids, "draft_s", None)
        if self._worker_depth:
            workers = draft_token_ids.draft_token_ids
            self._set_drafts(self._guarded(self._draft, draft_token_ids.req_ids, workers, draft_s))
        elif self._due_ids is not None:
            self._draft_s = draft_s
        elif draft_s and self._beside:
            self._guarded(self.watch.drafted, draft_token_ids)

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

    def _handle_stopped_request(self, request: Request) -> bool:
        self._guarded(self.watch.ended, request)
        return bool(super()._handle_stopped_request(request))

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._guarded(self._leave, request)
        freed = super()._free_request(request, *args, **kwargs)
        self._guarded(self.watch.freed)
        if not self.requests:
            self._due_ids = None
            self._guarded(self.capture.idle)
        return freed

    def set_pause_state(self, *args: Any, **kwargs: Any) -> None:
        self._guarded(self.control.end_iteration)
        super().set_pause_state(*args, **kwargs)

    def _leave(self, request: Request) -> None:
        if (live := self.watch.left(request)) is not None:
            self.capture.leave(request.request_id, live, str(request.get_finished_reason()))

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        self.new_weights()
        return bool(super().reset_prefix_cache(*args, **kwargs))

    def new_weights(self, method: str | None = None) -> None:
        """Note possible new weights: the prefix cache was reset, or a `method` was called on all workers."""
        self._guarded(self.watch.new_weights, method)

    def note_delivered(self, num_tokens: Mapping[str, int]) -> None:
        """Note how many tokens clients have of requests that they are about to abort."""
        self._guarded(self.watch.note_delivered, num_tokens)

    def close_recording(self) -> None:
        """End the recording and turn it into a trace."""
        if self.watch.recording is not None:
            self.watch.recording.close()


class AsyncPolicyScheduler(PolicyScheduler, AsyncScheduler):
    """`PolicyScheduler` for asynchronous scheduling: an iteration is scheduled before the last one's output.

    Drafts stay on the device, so only a learned drafter serves; budgets trim the placeholders of its drafts.
    """

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        if self._worker_depth and not self.control.drafts_fit:
            self._guarded(self._trim, scheduler_output)

    def _trim(self, scheduler_output: SchedulerOutput) -> None:
        drafting = [
            r for r in map(self.requests.__getitem__, scheduler_output.num_scheduled_tokens) if r.spec_token_ids
        ]
        for request, share in zip(drafting, self.control.allot([r.request_id for r in drafting]), strict=True):
            if share < len(request.spec_token_ids):
                request.spec_token_ids = request.spec_token_ids[:share]  # a copy: all requests share the list
