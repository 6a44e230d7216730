"""vLLM's scheduler with a policy beside it: `PolicyScheduler`, and its twin for asynchronous scheduling.

Either is given to vLLM as `scheduler_cls`, or `policy_scheduler` for the one that fits the engine; the policy comes in
`additional_config["tltlab"]` (see `options`). The depth an iteration drafts at its end travels in
`SchedulerOutput.num_spec_tokens_to_schedule` to the V1 and V2 model runner.
"""

from __future__ import annotations

import hashlib
import pickle
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
import vllm
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request

from tltlab.drafters.base import Key
from tltlab.errors import ConfigError
from tltlab.runtime.engine.control import Live
from tltlab.runtime.engine.environment import hardware
from tltlab.runtime.engine.ledger import Scheduled
from tltlab.runtime.engine.metrics import Metrics
from tltlab.runtime.engine.recording import LiveRecording
from tltlab.runtime.engine.seat import PolicyFile
from tltlab.strategy import NO_SPECULATION, Strategy

from .capabilities import missing
from .capture import NoCapture, pause_capture, start_capture
from .dispatch import captured_graphs, kind_of
from .options import Attachment, check_engine, drafts_nothing
from .plugin import is_registered, speculative_sampling_is_sound
from .runners import NoProposer as NoProposer
from .runners import held_bytes

EXTRA = "tltlab"
"""Where a request carries its key, in `SamplingParams.extra_args`, and an engine its settings."""

NAMELESS_PER_STEP = 1024
"""Requests without keys that count as one RL step where nothing says when one begins, so that drafters can forget."""

logger = init_logger(__name__)


def policy_scheduler(vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> PolicyScheduler:
    """The scheduler for an engine that schedules asynchronously or not, as vLLM has settled it in its configuration."""
    cls = AsyncPolicyScheduler if vllm_config.scheduler_config.async_scheduling else PolicyScheduler
    return cls(vllm_config, *args, **kwargs)


class PolicyScheduler(Scheduler):
    """Asks the policy before each iteration, trims or replaces the drafts after it.

    Without a policy it only takes down what happens: vLLM drafts as it was started to. ConfigError where the engine
    schedules asynchronously and the scheduler does not, or the other way round, and for all that `check_engine` knows.
    """

    def __new__(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> PolicyScheduler:
        """For a diffusion model one over vLLM's own scheduler of canvases."""
        diffuses = getattr(vllm_config.model_config, "is_diffusion", False)
        made: PolicyScheduler = super().__new__(_over_canvases(cls) if diffuses else cls)
        return made

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        attachment = Attachment.of_engine(vllm_config)
        check_engine(vllm_config, attachment, plugged_in=is_registered(), sound=speculative_sampling_is_sound())
        self._check_class(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)
        # Whether a request gets a token of each iteration, drafts aside: with diffusion and pooling it does not.
        self._samples = bool(getattr(self, "num_sampled_tokens_per_step", 1))
        # Or several batches are under way, without a policy then.
        overlapped = isinstance(self, AsyncScheduler) or self.use_pp
        # The V2 runner verifies the drafts it keeps on the device, whatever tokens the scheduler names.
        beside = not overlapped and not (self.num_spec_tokens and self.use_v2_model_runner)
        self.control = attachment.control(overlapped=overlapped, beside=beside)
        # With a table of depths in force vLLM does not pad new requests with placeholder drafts.
        if self.num_spec_tokens and self.control.steers:
            self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)
        self.drafts_here_alone = drafts_nothing(vllm_config.speculative_config)
        self.recording: LiveRecording | None = None
        if attachment.record is not None:
            model, engine = self.vllm_config.model_config.model, f"vllm {vllm.__version__}"
            begin = LiveRecording.numbered if attachment.numbered else LiveRecording
            self.recording = begin(attachment.record, self.control, model=model, hardware=hardware(), engine=engine)
        self.policy_file: PolicyFile | None = None
        if attachment.reload is not None and attachment.policy is not None:
            self.policy_file = PolicyFile(attachment.reload, attachment.policy)
            self._seed = attachment.seed, attachment.worker
        self.capture: NoCapture = NoCapture()
        self._anonymous: Counter[tuple[int, str]] = Counter()
        self._in_flight: deque[Scheduled] = deque()
        # Of the last iteration: how deep the workers drafted, in which time, and the requests that have no draft yet.
        self._worker_depth = 0
        self._draft_s: float | None = None
        self._due: list[str] | None = None
        self._drafted = False
        self._batch: list[str] = []
        self._context_tokens = 0
        # Of the batch: who is in it, the tokens of those that have left it since, and whether it was all that runs.
        self._members: set[str] = set()
        self._left: dict[str, int] = {}
        self._whole = False

    def _check_class(self, config: VllmConfig) -> None:
        """Raise ConfigError where another of the schedulers here is the engine's."""
        overlapped = isinstance(self, AsyncScheduler)
        if overlapped != bool(config.scheduler_config.async_scheduling):
            # vLLM would not draft at all, or with what it drafted an iteration before.
            ours, twin = type(self).__name__, (PolicyScheduler if overlapped else AsyncPolicyScheduler).__name__
            raise ConfigError(
                f"asynchronous scheduling is {'off (on a CPU it always is)' if overlapped else 'on'} in this engine, "
                f"and {ours} is for engines where it is {'on' if overlapped else 'off'}: pass "
                f"async_scheduling={overlapped}, or scheduler_cls={__name__}.{twin}, or let "
                f"{__name__}.policy_scheduler choose"
            )

    def add_request(self, request: Request) -> None:
        known = request.request_id in self.requests
        super().add_request(request)
        if known:
            return
        given = self._given_key(request)
        self._record(lambda recording: recording.arrives(given[0] if given is not None else None))
        if self.recording is None:
            if given is not None:
                self.control.advance(given[0])
        elif given is not None and not self.recording.is_new(given):
            given = None
        self._enter(request, given or self._new_key(request))

    def _enter(self, request: Request, key: Key) -> None:
        prompt, output = list(request.prompt_token_ids or ()), request._output_token_ids
        live = self.control.add(request.request_id, key, prompt, output, request.max_tokens)
        self.capture.enter(request.request_id, live)
        self._record(lambda recording: recording.arrived(live))

    def _leave(self, request: Request) -> Live | None:
        live = self.control.finish(request.request_id)
        if request.request_id in self._members:
            self._members.discard(request.request_id)
            self._left[request.request_id] = len(request._all_token_ids)
        if live is not None:
            reason = request.get_finished_reason()
            self._record(lambda recording: recording.left(live, None if reason is None else str(reason)))
        return live

    def _record(self, take_down: Callable[[LiveRecording], object]) -> None:
        """Have the recording, where there is one, take something down. Where it cannot, it ends and not the engine."""
        if self.recording is None:
            return
        try:
            take_down(self.recording)
        except Exception as error:  # whatever it is, others are being served
            recording, self.recording = self.recording, None
            logger.error(
                "the recording %s ends here, and the engine goes on: %s: %s; what is durable becomes a trace with "
                "'tltlab trace repair %s'",
                *(recording.path, type(error).__name__, error, recording.path),
            )
            recording.give_up(error)

    def _update_request_as_session(self, session: Request, update: Any) -> None:
        # A streaming session's next input: the output so far becomes prompt, and the request a turn of its own.
        live = self._leave(session)
        super()._update_request_as_session(session, update)
        assert live is not None
        self._batch = []
        rl_step, prompt_id, sample, turn = live.key
        self._enter(session, (rl_step, prompt_id, sample, turn + 1))

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if self._due is not None and self.requests:
            # Not before: the engine hands out the last iteration's tokens meanwhile, and what has ended gets no draft.
            self._draft(self._due, (), self._draft_s)
        if self.policy_file is not None and self.policy_file.waiting is not None:
            self.take_policy()
        self.control.iteration_starts()
        return super().schedule(*args, **kwargs)

    def take_policy(self) -> None:
        """Have the policy in force that waits in its file, if one does."""
        if self.policy_file is not None:
            self.policy_file.take(lambda policy, number: self.control.replace_policy(policy, (*self._seed, number)))

    def metrics(self) -> Metrics:
        """What the policy did until now, for `Collector`."""
        # An idle engine schedules nothing.
        self.take_policy()
        return self.control.metrics(self.policy_file.changes if self.policy_file is not None else {})

    def shutdown(self) -> None:
        if self.policy_file is not None:
            self.policy_file.close()
        super().shutdown()

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        # The last thing schedule() does: what runs is settled, and AsyncScheduler plans drafts by what is set here.
        if scheduler_output.num_scheduled_tokens:
            with self.control.inside:
                what = self._scheduled(scheduler_output)
            self._in_flight.append(what)
            if self.control.steers:
                self._worker_depth = self.control.scheduled(what)
                scheduler_output.num_spec_tokens_to_schedule = self._worker_depth
            else:
                self.control.watched(what, self._of_vllm(scheduler_output.num_spec_tokens_to_schedule))
            self.capture.scheduled(scheduler_output)
        super()._update_after_schedule(scheduler_output)

    def _of_vllm(self, depth: int) -> Strategy:
        """What vLLM drafts by itself: by the name of its method, as deep as it was started to or its own table says."""
        speculative = self.vllm_config.speculative_config
        return Strategy.chain(str(speculative.method), depth) if speculative and depth else NO_SPECULATION

    def _scheduled(self, output: SchedulerOutput) -> Scheduled:
        ids = list(output.num_scheduled_tokens)
        if ids == self._batch:
            ids = self._batch
        else:
            self._join(ids, output)
        drafts = output.scheduled_spec_decode_tokens
        # All but a token each and its draft, and of those that have no token yet that one too.
        prefill = output.total_num_scheduled_tokens - self._samples * len(ids) - sum(map(len, drafts.values()))
        for i in self.control.speechless:
            prefill += i in output.num_scheduled_tokens and _awaits_its_first(self.requests[i])
        return Scheduled(
            request_ids=ids,
            # A diffusion model's are canvases.
            drafts=drafts if self._samples else {},
            waiting=len(self.waiting),
            context_tokens=self._context_tokens,
            prefill_tokens=prefill,
            free_kv_tokens=self.kv_cache_manager.block_pool.get_num_free_blocks() * self.block_size,
        )

    def _join(self, ids: list[str], output: SchedulerOutput) -> None:
        """The batch is another one: count its tokens, all or where that suffices those that came and those that left.

        Counting all takes long: each request's list lies elsewhere in memory.
        """
        joined = [new.req_id for new in output.scheduled_new_reqs]
        whole = len(ids) == len(self.running)
        # Then nobody was put back or left out, neither then nor now.
        known = self._batch and self._whole and whole and len(self._batch) - len(self._left) + len(joined) == len(ids)
        self._batch, self._whole = ids, whole
        if known and not output.scheduled_cached_reqs.resumed_req_ids:
            self._members.update(joined)
            self._context_tokens += self._count(joined) - sum(self._left.values())
        else:
            self._members = set(ids)
            self._context_tokens = self._count(ids)
        self._left.clear()

    def _count(self, ids: Sequence[str]) -> int:
        """Tokens of these requests, prompts and what they have generated."""
        return sum(map(len, map(_all_tokens, map(self.requests.__getitem__, ids))))

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        drafts: Mapping[str, Sequence[int]] = {}
        if scheduler_output.num_scheduled_tokens:
            what = self._in_flight.popleft()
            drafts = what.drafts
            if (ran := model_runner_output.cudagraph_stats) is not None:
                what.graph = kind_of(ran.runtime_mode), ran.num_padded_tokens
            with self.control.inside:
                counts = _counts(what.request_ids, model_runner_output)
                if what.request_ids is self._batch and not self._left:
                    self._context_tokens += sum(counts)
                else:
                    # Another batch has been put together before this one's tokens were known, or some are for nobody.
                    self._batch = []
            self.control.sampled(what, counts)
            self.capture.landed()
            if self._beside and (self._drafted or self.control.ledger.in_force.strategy.speculates):
                self._due = what.request_ids
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if drafts and self._left and not self._left.keys().isdisjoint(drafts):
            # Who ends in the middle of a draft does not get all that was kept of it.
            self._batch = []
        if not self.requests:
            self.control.idle()
            self._due = None
            self._record(LiveRecording.flush)
        return outputs

    @property
    def _beside(self) -> bool:
        """Whether drafts are made here, or cut here, once an iteration's tokens are known."""
        return bool(self.num_spec_tokens) and self.control.steers and not self.control.overlapped

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        draft_s = getattr(draft_token_ids, "draft_s", None)
        if not self.control.steers:
            self.control.ledger.drafted(self.control.ledger.clock(), draft_s or 0.0)
            super().update_draft_token_ids(draft_token_ids)
        elif self._worker_depth:
            self._draft(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, draft_s)
        elif self._due is not None:
            self._draft_s = draft_s
        elif draft_s and self._beside:
            self.control.ledger.drafted(self.control.ledger.clock(), draft_s)

    def _draft(self, ids: list[str], of_workers: Sequence[list[int]], draft_s: float | None) -> None:
        """Give the last iteration's requests their next drafts. Those `of_workers` were made in `draft_s` seconds."""
        self._due, self._draft_s = None, None
        drafts = self.control.drafts(ids, of_workers, draft_s)
        before, self._drafted = self._drafted, any(drafts)
        if not self._drafted and not before:
            # Nobody has a draft, and nobody gets one.
            return
        super().update_draft_token_ids(DraftTokenIds(ids, drafts or [[] for _ in ids]))
        if len(self.running) > len(ids):
            # What had no room in this iteration would else be verified with the draft of an earlier choice.
            here = set(ids)
            for request in self.running:
                if request.spec_token_ids and request.request_id not in here:
                    request.spec_token_ids = []

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        live = self._leave(request)
        if live is not None:
            self.capture.leave(request.request_id, live, str(request.get_finished_reason()))
        freed = super()._free_request(request, *args, **kwargs)
        if not self.requests:
            self.capture.idle()
        return freed

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        if self.recording is not None:
            # Trainers do this after each weight update, of which a scheduler hears nothing else.
            self.recording.policy_version += 1
        return bool(super().reset_prefix_cache(*args, **kwargs))

    def close_recording(self) -> None:
        """Turn what was recorded into a trace; nothing is recorded after."""
        self._record(LiveRecording.close)
        self.recording = None

    def _given_key(self, request: Request) -> Key | None:
        """The key that came with the request, unless it is none or one that runs has it already."""
        params = request.sampling_params
        given = (params.extra_args or {}).get(EXTRA) if params is not None else None
        if given is None:
            return None
        try:
            rl_step, prompt_id, sample, turn = given
            key = int(rl_step), str(prompt_id), int(sample), int(turn)
            if self.recording is not None and not self.recording.can_have(key):
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            # Raising here would end the engine, and with it everybody's requests.
            logger.warning("a request's %s must be [rl_step, prompt_id, sample, turn], ignored: %r", EXTRA, given)
            return None
        return None if key in self.control.keys else key

    def _new_key(self, request: Request) -> Key:
        """A key for a request that has none: its prompt's digest and a running number."""
        tokens = ",".join(map(str, request.prompt_token_ids or ()))
        prompt_id = hashlib.blake2b(tokens.encode(), digest_size=8).hexdigest()
        before = self.control.ledger.rl_step
        if self.recording is None and self._anonymous.total() >= NAMELESS_PER_STEP:
            self.control.advance(before + 1)
        rl_step = self.control.ledger.rl_step
        if rl_step != before:
            self._anonymous.clear()
        self._anonymous[rl_step, prompt_id] += 1
        return rl_step, prompt_id, self._anonymous[rl_step, prompt_id] - 1, 0


class AsyncPolicyScheduler(PolicyScheduler, AsyncScheduler):
    """The same for asynchronous scheduling: an iteration is put together before the last one's tokens are known.

    Drafts stay on the device, so only a learned drafter serves; budgets trim the placeholders that stand for them.
    """

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        if not self._worker_depth or self.control.roomy:
            return
        drafting = [
            r for r in map(self.requests.__getitem__, scheduler_output.num_scheduled_tokens) if r.spec_token_ids
        ]
        for request, share in zip(drafting, self.control.allot([r.request_id for r in drafting]), strict=True):
            if share < len(request.spec_token_ids):
                # The placeholders are one list for all.
                request.spec_token_ids = request.spec_token_ids[:share]


def _over_canvases(cls: type[PolicyScheduler]) -> type[PolicyScheduler]:
    """The same class over vLLM's scheduler for diffusion models, where this vLLM has one: see `check_engine`."""
    if missing("diffusion models"):
        return cls
    from vllm.v1.core.sched import diffusion_scheduler as diffusion

    overlapped = issubclass(cls, AsyncScheduler)
    stock = diffusion.DiffusionAsyncScheduler if overlapped else diffusion.DiffusionScheduler
    return cls if issubclass(cls, stock) else type(f"Diffusion{cls.__name__}", (cls, stock), {})


_all_tokens = attrgetter("_all_token_ids")


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


def call_control(core: Any, message: bytes) -> bytes:
    """Carry out a pickled (name, args) on an engine core; the pickled result.

    It is one of `_COMMANDS`, or names what the `Control` beside the scheduler has: "begin", "drafters.forget".
    """
    name, args = pickle.loads(message)
    if name in _COMMANDS:
        return pickle.dumps(_COMMANDS[name](core, *args))
    found = attrgetter(name)(core.scheduler.control)
    return pickle.dumps(found(*args) if callable(found) else found)


def _reseed(core: Any, seed: Sequence[int]) -> None:
    """Have all random states of the core's process and of its workers', one or several, follow from `seed`."""
    _seed_process(None, list(seed))
    # Tensor-parallel ranks draw the same tokens, so all get the same seed.
    core.model_executor.collective_rpc(_seed_process, args=(list(seed),))


def _seed_process(worker: Any, seed: list[int]) -> None:
    """The V1 runner draws from its device's generator, the V2 runner takes seeds from numpy."""
    for_torch, for_numpy, for_python = np.random.SeedSequence(seed).generate_state(3, np.uint64).tolist()
    torch.manual_seed(for_torch % 2**63)
    np.random.seed(for_numpy % 2**32)
    random.seed(for_python)


def _rng_state(core: Any) -> Any:
    """What tokens are drawn from: the V1 runner draws on its device, the V2 runner takes seeds from numpy."""
    return torch.get_rng_state(), torch.cuda.get_rng_state_all(), np.random.get_state()


def _set_rng_state(core: Any, state: Any) -> None:
    cpu, cuda, numpy = state
    torch.set_rng_state(cpu)
    torch.cuda.set_rng_state_all(cuda)
    np.random.set_state(numpy)


_COMMANDS: Mapping[str, Callable[..., Any]] = {
    "reseed": _reseed,
    "rng_state": _rng_state,
    "set_rng_state": _set_rng_state,
    "held_bytes": lambda core: core.model_executor.collective_rpc(held_bytes)[0],
    "capture": start_capture,
    "captured": lambda core: core.scheduler.capture.captured,
    "metrics": lambda core: core.scheduler.metrics(),
    "pause_capture": pause_capture,
    # Ranks capture the same graphs.
    "captured_graphs": lambda core: core.model_executor.collective_rpc(captured_graphs)[0],
}
