"""One real vLLM engine under a policy: generates requests; returns responses and one row per iteration."""

import json
import pickle
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, cast

import numpy as np
import torch

from tltlab.coordination.canary import CanaryConfig, check_chances
from tltlab.drafters.base import Drafter, Key
from tltlab.drafters.specs import DEFAULT_DRAFTERS, DrafterSpec, LearnedSpec, check_drafter, check_sampled_drafts
from tltlab.errors import ConfigError, one_line
from tltlab.hardware import available_memory
from tltlab.policies.policy import Policy
from tltlab.policies.selector import Selector
from tltlab.policies.specs import FixedSpec
from tltlab.policies.wrappers import REPLAYED
from tltlab.records import Fields, Json
from tltlab.runtime.engine.vllm import llm as adapter
from tltlab.runtime.engine.vllm import replaced
from tltlab.runtime.engine.vllm.capture import Captured, Sink
from tltlab.runtime.engine.vllm.options import Attachment, engine_settings, speculative_config
from tltlab.runtime.engine.vllm.runners import captured_graphs, held_bytes
from tltlab.strategy import NO_SPECULATION, Strategy

from .control import Control
from .drafter_pool import DrafterCollapsed, DrafterPool, DrafterReport, ResponseTokens
from .generation import (
    EngineDied,
    FollowUp,
    FollowUps,
    GenerationRequest,
    GenerationResponse,
    PolicyFailed,
    Rollout,
    Until,
)
from .graphs import CapturedGraphs, GraphPlan
from .requests import LiveRequest
from .stops import StopStrings

CAPTURE_SHARE = 0.25
"""Share of a host's free memory for the hidden states of running requests."""
UNKNOWN_MEMORY = 4 << 30
"""Free memory assumed of a host that does not report it."""

State = Json
"""Learned state, as JSON types."""

_PLAIN = Policy(selector=FixedSpec(strategy=NO_SPECULATION))


class Engine:
    """A vLLM engine under a policy; it owns threads and memory and must be closed.

    `drafters` have the names that strategies use, at most one of them learned; by default `ngram` and `suffix`. The
    engine is built for drafts up to `max_draft_depth`, with 0 for no speculation. The engine seeds and uses this
    process's random generators. `graphs` are the CUDA graphs to capture, None for vLLM's own choice. `vllm_args` have
    vLLM's own names and override the defaults. Scheduling is asynchronous where vLLM allows it (not on a CPU), and
    synchronous with `async_scheduling=False`.
    """

    def __init__(
        self,
        model: str,
        *,
        worker: int = 0,
        drafters: Mapping[str, DrafterSpec | Drafter] | None = None,
        max_draft_depth: int = 8,
        seed: int = 0,
        graphs: GraphPlan | None = None,
        vllm_args: Fields | None = None,
    ):
        self.worker = worker
        self.seed = seed
        self.max_draft_depth = max_draft_depth
        self.drafters = dict(DEFAULT_DRAFTERS if drafters is None else drafters)
        self._pool = DrafterPool(self.drafters, max_draft_depth)
        for name, spec in self.drafters.items():
            if isinstance(spec, LearnedSpec):
                check_drafter(model, name, spec)
        check_sampled_drafts(self.drafters, (vllm_args or {}).get("speculative_config"))
        traits = self._pool.registry
        on_host = max_draft_depth > 0 and any(traits[name].made_by == "engine" for name in self.drafters)
        attachment = Attachment(
            policy=_PLAIN,
            drafters={},
            max_draft_depth=max_draft_depth,
            worker=worker,
            seed=seed,
            host_drafts=on_host,
        )
        self._death = ""
        self._canary_stops = False
        self.under_way: UnderWay | None = None
        self.llm, takes_drafts = adapter.start(
            model,
            attachment=attachment.model_dump(mode="json"),
            planned=engine_settings(speculative_config(self.drafters, max_draft_depth), graphs),
            on_host=on_host,
            seed=seed,
            vllm_args=vllm_args or {},
        )
        scheduler = adapter.scheduler_of(self.llm)
        scheduler.control = Control(self._pool, worker=worker, overlapped=scheduler.control.overlapped)
        self._pool.on_host = takes_drafts
        self.weights = adapter.WeightUpdates(self.llm)

    @property
    def control(self) -> Control:
        """The control next to the scheduler."""
        return cast(Control, adapter.scheduler_of(self.llm).control)

    def set_policy(self, policy: Policy | Selector | None, seed: Sequence[int] | None = None) -> None:
        """Choose by `policy` from the next iteration on, None for plain decoding.

        A `Policy` is built afresh, with a generator seeded with `seed`; a `Selector` is used as it is. ConfigError
        where it may choose a strategy that the engine cannot run; the previous policy stays active.
        """
        for strategy in policy.strategies if policy is not None else ():
            self._pool.check(strategy)
        if isinstance(policy, Policy):
            self.control.set_policy(policy, [self.seed, self.worker] if seed is None else list(seed))
        else:
            self.control.set_selector(policy)

    def stop_at(self, strings: Sequence[str], tokenizer: Any, most: int) -> None:
        """End later responses, of up to `most` tokens in all, where their text has one of these (`StopStrings`)."""
        adapter.scheduler_of(self.llm).stop_at(StopStrings(strings, tokenizer, most))

    def warm_up(self, temperature: float) -> None:
        """Run plain and speculative iterations once, so that no rollout pays for first iterations; sets no policy."""
        first = GenerationRequest(key=(-1, "warm-up", 0, 0), prompt_token_ids=[1, 2] * 4, max_response_tokens=8)
        requests = [replace(first, key=(-1, "warm-up", n, 0)) for n in range(4)]
        serving = [name for name in self.drafters if self.max_draft_depth and self._pool.runs(name)]
        for strategy in (NO_SPECULATION, *(Strategy.chain(name, self.max_draft_depth) for name in serving)):
            self.set_policy(Policy(selector=FixedSpec(strategy=strategy)))
            with self.uncaptured():
                self.generate(requests, rl_step=-1, temperature=temperature)
        self.forget()
        self.llm.reset_prefix_cache()
        self.set_policy(None)

    def evaluate(
        self, requests: Sequence[GenerationRequest], *, temperature: float, follow_ups: FollowUps | None = None
    ) -> Rollout:
        """Generate without speculation and uncaptured; the active policy neither chooses nor learns."""
        policy = self.control.driver.selector, self.control.driver.budget
        self.control.set_selector(None)
        try:
            with self.uncaptured():
                return self.generate(requests, rl_step=-1, temperature=temperature, follow_ups=follow_ups)
        finally:
            self.control.set_selector(*policy)

    def capture(self, sink: Sink | None, *, max_bytes: int | None = None) -> None:
        """Pass each later response that ends by itself to `sink`, with the next iteration; None stops the capture.

        A `TrainingSequence` has the hidden states of the passes that generated it, in the engine's dtype, on the host:
        those of the last layer after the final norm and those that vLLM hands an EAGLE-3 drafter. It begins where a
        cached prefix ends. Aborted responses and those of `evaluate` and `warm_up` are not captured.

        Running requests hold at most `max_bytes`, by default `CAPTURE_SHARE` of the host's free memory. Beyond that,
        requests likely to be in the tail are kept (`captured` counts the others). With tensor parallelism the sink is
        pickled and runs in the process of the model's rank 0; ConfigError for a sink that cannot be pickled. An
        exception in the sink ends the capture, not the rollout.
        """
        adapter.start_capture(self.llm, sink, capture_room() if max_bytes is None else max_bytes)

    @property
    def captured(self) -> Captured:
        """Counts since `capture` was last given a sink; empty without a sink."""
        return cast(Captured, adapter.scheduler_of(self.llm).capture.captured)

    @contextmanager
    def uncaptured(self) -> Iterator[None]:
        """Capture no new requests within the block: for rollouts that must not reach the sink."""
        capture = adapter.scheduler_of(self.llm).capture
        with replaced(capture, "paused", True):
            yield

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        *,
        rl_step: int,
        temperature: float,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        until: Until | None = None,
        follow_ups: FollowUps | None = None,
    ) -> Rollout:
        """Generate every request to its end; top_k 0 and min_p 0 keep the whole vocabulary.

        `until` is called after each iteration with the keys of ended responses, in that order. Once it returns True the
        others are aborted and returned with the tokens they have. `follow_ups` receives every ended response and
        returns the requests to generate next; the call ends when neither requests nor follow-ups are left. A call that
        was interrupted leaves nothing behind.

        ConfigError for a prompt that leaves no room, two requests of one key and arguments that vLLM refuses.
        EngineDied, with the complete responses, when the engine fails or loses a request, and at every later call.
        DrafterCollapsed when the drafter's canary stops the run, until there are new draft weights. PolicyFailed when
        the policy raises.
        """
        self._check(requests)
        defaults = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
        settings = [adapter.sampling_params(request, defaults) for request in requests]
        before = self.control.seconds
        self.control.begin(rl_step)
        rollout = self.under_way = UnderWay(self, rl_step, defaults)
        failure: Exception | None = None
        tables: tuple[Any, Any] = (None, None)
        try:
            for request, params in zip(requests, settings, strict=True):
                rollout.ask(request, params)
            with adapter.running(self.llm):
                while rollout.goes_on(follow_ups) and not self.control.failure:
                    rollout.take(self._step(), follow_ups)
                    if follow_ups is not None and follow_ups.pending:
                        rollout.follow_up(follow_ups)
                    self._check_canary()
                    if until is not None and until(rollout.ended):
                        rollout.stop()
                adapter.land(self.llm)
            tables = self.control.end()
            self._check_canary()
            if failed := self.control.failure:
                raise PolicyFailed(f"worker {self.worker}: {failed}")
        except (DrafterCollapsed, PolicyFailed):
            adapter.abort(self.llm)
            raise
        except ConfigError:
            raise
        except Exception as error:  # an engine may fail in any way; complete responses are handed over
            failure = error
        finally:
            self.under_way = None
        duration_s = rollout.now_s()
        rollout.raise_losses(failure)
        inside_s, deciding_s, drafting_s = np.subtract(self.control.seconds, before).tolist()
        return Rollout(
            responses=rollout.responses,
            iterations=tables[0],
            decisions=tables[1],
            duration_s=duration_s,
            recorder_s=inside_s - deciding_s,
            policy_s=deciding_s,
            drafting_s=drafting_s,
            follow_ups=[asked.request for asked in rollout.asked.values() if asked.turn is not None],
        )

    def _check_canary(self) -> None:
        """Raise DrafterCollapsed where the canary stops the run."""
        if self._canary_stops and (complaint := self.control.drafters.complaint):
            raise DrafterCollapsed(f"worker {self.worker}: {complaint}")

    def _step(self) -> list[Any]:
        """Run an iteration where a request is left; return vLLM's outputs of requests that have ended."""
        engine = self.llm.llm_engine
        if not engine.has_unfinished_requests():
            return []
        try:
            return [output for output in engine.step() if output.finished]
        except Exception as error:
            self._death = f"it failed with {type(error).__name__}: {one_line(error)[:200]}"
            raise

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its response together."""
        return int(self.llm.llm_engine.vllm_config.model_config.max_model_len)

    def _check(self, requests: Sequence[GenerationRequest]) -> None:
        """Raise ConfigError for requests that do not fit, and where the engine cannot generate; abort what runs."""
        room = self.max_model_len
        for request in requests:
            if not 0 < len(request.prompt_token_ids) < room:
                raise ConfigError(
                    f"request {request.key}: a prompt of {len(request.prompt_token_ids)} tokens does not fit the "
                    f"engine's context of {room}, which must hold it and at least one token more"
                )
        if len({request.key for request in requests}) < len(requests):
            raise ConfigError("two requests of one rollout have the same key (rl_step, prompt_id, sample, turn)")
        try:
            self.check_alive()
        except EngineDied as error:
            raise EngineDied(str(error), [], [r.key for r in requests]) from None
        self._check_canary()
        if self.llm.llm_engine.has_unfinished_requests():
            adapter.abort(self.llm)

    def remember(self, responses: Iterable[ResponseTokens]) -> None:
        """Add responses generated elsewhere or earlier to the drafters in use: (key, prompt ids, response ids) each."""
        self.control.remember(list(responses))

    def recall(self, responses: Iterable[ResponseTokens]) -> None:
        """Replace the drafters' history by (key, prompt ids, response ids) each; nothing may be running."""
        self.control.drafters.recall(list(responses))

    def learn_lengths(self, lengths: Iterable[tuple[Key, int]]) -> None:
        """Deliver the lengths of other engines' responses to the draft budget: (key, tokens) each."""
        self.control.learn_lengths(list(lengths))

    def forget(self) -> None:
        """Clear the history of all model-free drafters."""
        self.control.drafters.forget()

    def reseed(self, seed: Sequence[int]) -> None:
        """Derive everything random in the engine's processes, this one included, from `seed`, ints of at least 0."""
        adapter.reseed(self.llm, [int(part) for part in seed])

    def replay(self, rows: Sequence[Fields]) -> None:
        """Repeat the choices of `rows`, this worker's `decisions` of a trace, then choose by the policy.

        Tokens are the same where policy, seeds, requests, weights, and the state of drafters and budget are the same.
        ConfigError where the policy never makes such choices; a rollout that deviates from the rows ends in a RunError.
        """
        self.control.driver.replay([{name: row[name] for name in REPLAYED} for row in rows])

    def state_dict(self, *, history: bool = True) -> State:
        """Return the learned state of policy, budget and drafters as JSON types; of a learned drafter its acceptance.

        Without `history` the state has no responses and stays small in a long run: call `recall` after loading it.
        """
        return cast(State, json.loads(json.dumps(self.control.state_dict(history), allow_nan=False)))

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict` and clear the prefix cache; nothing may be running.

        Set the policy and load draft weights first. Two engines behave alike only once both have loaded the state:
        suffix trees order equally frequent continuations by arrival of their texts.
        """
        self.control.load_state_dict(_copied(state))
        self.llm.reset_prefix_cache()

    def snapshot(self) -> tuple[Any, State]:
        """Return the state that a rollout depends on besides requests and weights: random state and learned state.

        Nothing may be running.
        """
        return adapter.rng_state(), _copied(self.control.state_dict())

    def restore(self, state: tuple[Any, State]) -> None:
        """Restore a `snapshot` and clear the prefix cache."""
        adapter.set_rng_state(state[0])
        self.load_state_dict(state[1])

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Load the trainer's weights through vLLM's weight-update calls and drop cached prefixes of the old ones.

        Running requests keep their keys and values, and their prefixes may stay cached until they end. ConfigError for
        no weights; RunError, and a dead engine, where names or shapes are not the model's.
        """
        self.check_alive()
        self.weights.load_all(weights, str(version))
        self.target_updated(version)

    def target_updated(self, version: int) -> None:
        """Notify the drafters of new target weights, loaded through `weights`."""
        self.control.drafters.target_updated(str(version))

    def update_draft_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        predicted: Sequence[float] | None = None,
        updates: int | None = None,
    ) -> None:
        """Load new weights into the learned drafter, between iterations; requests may run.

        `predicted` are the acceptance rates by draft position, given that all tokens before were accepted, as training
        measured them at the rollout's temperature; the canary compares with them. `updates` are the optimizer updates
        that made the weights, by default one more than the last. ConfigError, with the old weights in place, where the
        engine has no learned drafter or `predicted` are no probabilities.
        """
        if self._pool.learned is None:
            raise ConfigError("this engine has no learned drafter to update; name one in `drafters`")
        chances = [float(chance) for chance in predicted or ()]
        check_chances(chances)
        self.check_alive()
        self.weights.load_all(weights, "", draft=True)
        self.control.drafters.updated(chances, updates)

    def guard_drafter(self, config: CanaryConfig) -> None:
        """Monitor the learned drafter by `config` from now on; earlier predictions and observations are dropped."""
        self._canary_stops = config.on_collapse == "stop"
        self.control.drafters.guard(config)

    def drafter_report(self) -> DrafterReport:
        """Return the state of the drafters and the findings of the canary."""
        return self.control.drafters.report()

    def held_bytes(self) -> dict[str, int]:
        """Bytes that the engine holds, by the names of a dry run; weights and caches are those of each device."""
        host = {"captured states": self.captured.peak_bytes, "drafter history": self.control.drafters.memory_bytes}
        return cast(dict[str, int], adapter.on_rank_0(self.llm, held_bytes)) | host

    def captured_graphs(self) -> CapturedGraphs:
        """The CUDA graphs that vLLM captured when the engine started."""
        return cast(CapturedGraphs, adapter.on_rank_0(self.llm, captured_graphs))

    def sleep(self, level: int = 1) -> None:
        """Release the engine's memory until `wake_up`, as `vllm.LLM.sleep` does; nothing may be running.

        Level 1 keeps the weights on the host. Level 2 drops them, and new ones must be loaded after `wake_up`.
        """
        self.llm.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Restore the memory, all or that of "weights" or "kv_cache"; the canary then checks the drafter anew."""
        self.llm.wake_up(None if tags is None else list(tags))
        self.control.drafters.note_wake()

    def check_alive(self) -> None:
        """Raise EngineDied for an engine that failed or has only a part of its weights."""
        if why := self._death or self.weights.unusable:
            raise EngineDied(f"close this engine and start another: {why}")

    def close(self) -> None:
        """Release the engine's memory, threads and processes."""
        self.llm.llm_engine.engine_core.shutdown()


@dataclass(slots=True)
class _Asked:
    """A request of a rollout, its record, and once it has ended vLLM's output; `turn` if it continues a response."""

    request: GenerationRequest
    turn: FollowUp | None
    live: LiveRequest | None = None
    output: Any = None
    finish_s: float = 0.0


class UnderWay:
    """The requests of a rollout by name, and the keys of those that have `ended`, in that order."""

    def __init__(self, engine: Engine, rl_step: int, defaults: Mapping[str, float]):
        self.asked: dict[str, _Asked] = {}
        self.ended: list[Key] = []
        self._engine, self._rl_step, self._defaults = engine, rl_step, defaults
        self._start = engine.control.tracker.origin
        self._numbers = count()

    def now_s(self) -> float:
        """Seconds since the rollout began."""
        return time.perf_counter() - self._start

    def ask(self, request: GenerationRequest, params: Any, turn: FollowUp | None = None) -> None:
        """Hand a request to vLLM."""
        name = f"{self._rl_step}.{next(self._numbers)}"
        asked = self.asked[name] = _Asked(request, turn)
        adapter.add_request(self._engine.llm, name, request, params, self._engine.weights.adapter)
        asked.live = self._engine.control.by_key.get(request.key)

    def goes_on(self, follow_ups: FollowUps | None) -> bool:
        """Return True while a request runs, or a tool call from which another one follows."""
        waits = follow_ups is not None and bool(follow_ups.pending)
        return waits or bool(self._engine.llm.llm_engine.has_unfinished_requests())

    def take(self, outputs: Sequence[Any], follow_ups: FollowUps | None) -> None:
        """Process outputs of requests that have ended."""
        for output in outputs:
            asked = self.asked[output.request_id]
            asked.output, asked.finish_s = output.outputs[0], self.now_s()
            self.ended.append(asked.request.key)
            if follow_ups is not None:
                follow_ups.ended(asked.request, asked.output.token_ids, asked.finish_s)

    def follow_up(self, follow_ups: FollowUps) -> None:
        """Ask for the turns that may begin; wait for one where nothing else runs."""
        if idle := not self._engine.llm.llm_engine.has_unfinished_requests():
            adapter.land(self._engine.llm)
        for turn in follow_ups.ready(self.now_s, wait_for_one=idle):
            self.ask(turn.request, adapter.sampling_params(turn.request, self._defaults), turn)

    def stop(self) -> None:
        """Abort the requests that still run, and keep what they have."""
        stop_s = self.now_s()
        for name, output in adapter.abort(self._engine.llm).items():
            self.asked[name].output, self.asked[name].finish_s = output, stop_s

    def cut(self, keys: Collection[Key]) -> list[GenerationResponse]:
        """Take those of `keys` that still run out of the rollout; return what they have, with finish_reason "abort"."""
        names = {name for name, asked in self.asked.items() if asked.request.key in keys}
        outputs, now_s = adapter.abort(self._engine.llm, names), self.now_s()
        cut = [replace(self.asked.pop(name), output=output, finish_s=now_s) for name, output in outputs.items()]
        return [self._response(asked) for asked in cut]

    def progress(self) -> tuple[dict[Key, int], dict[Key, int]]:
        """Return the tokens by key of the requests that have ended, and of those that run."""
        found: tuple[dict[Key, int], dict[Key, int]] = {}, {}
        for asked in self.asked.values():
            found[asked.output is None][asked.request.key] = len(asked.live.output) if asked.live else 0
        return found

    @property
    def responses(self) -> list[GenerationResponse]:
        """The responses that are complete, in the order in which they were asked for."""
        return [self._response(asked) for asked in self.asked.values() if asked.output is not None]

    def _response(self, asked: _Asked) -> GenerationResponse:
        first_s = asked.live.first_token_s if asked.live is not None else None
        t_first_token = asked.finish_s if first_s is None else first_s - self._engine.control.tracker.origin
        return adapter.response(asked.request, asked.output, asked.finish_s, t_first_token, asked.turn)

    def raise_losses(self, failure: Exception | None) -> None:
        """Raise EngineDied where the engine failed or a request has no output."""
        lost = [asked.request.key for asked in self.asked.values() if asked.output is None]
        if failure is not None or lost:
            why = f": {type(failure).__name__}: {failure}" if failure is not None else ""
            message = f"the engine lost {len(lost)} of {len(self.asked)} responses, the first with key {lost[:1]}{why}"
            raise EngineDied(message, self.responses, lost) from failure


def _copied(state: State) -> State:
    """Return a copy of a state, which shares nothing with the live one."""
    return cast(State, pickle.loads(pickle.dumps(state)))


def capture_room(engines: int = 1) -> int:
    """Bytes of running requests' hidden states that each of a machine's engines may hold: `CAPTURE_SHARE` in all."""
    return int(CAPTURE_SHARE * (available_memory() or UNKNOWN_MEMORY) / engines)
