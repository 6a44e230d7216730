"""The seam between a policy and vLLM: a scheduler that asks it before each iteration, a proposer that obeys it.

vLLM drafts at the end of iteration i what iteration i + 1 verifies. So the choice made in iteration i is judged by
iteration i + 1, and its time is `duration[i+1] - draft_duration[i+1] + draft_duration[i]`: `Control` keeps that
book, the policy sees only matching pairs of choice and outcome.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from tltlab.errors import ConfigError
from tltlab.ngram import NgramDrafter
from tltlab.selector import Selector
from tltlab.state import RequestState, StepOutcome, StepState
from tltlab.strategy import NO_SPECULATION, Strategy

Key = tuple[int, str, int, int]


class RunningRequests(Sequence[RequestState]):
    """The requests of the batch, built only when a policy looks at them."""

    def __init__(self, requests: list[Request], keys: dict[str, Key]) -> None:
        self._requests = requests
        self._keys = keys

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        request = self._requests[index]
        key = self._keys[request.request_id]
        return RequestState(
            key=key,
            prompt_id=key[1],
            generated_tokens=request.num_output_tokens,
            max_response_tokens=request.max_tokens,
        )

    def __iter__(self) -> Iterator[RequestState]:
        return (self[i] for i in range(len(self)))


class Control:
    """Asks a selector once per engine iteration, tells it the outcome, and keeps the iteration log of one engine.

    `begin(rl_step, keys)` opens a rollout, `end()` closes it and returns the rows of `iterations.parquet` and
    `decisions.parquet`. Times in them are seconds since `begin`.
    """

    def __init__(self, worker: int, max_depth: int, drafter: str) -> None:
        self.worker = worker
        self.max_depth = max_depth
        self.drafter_name = drafter
        self.selector: Selector | None = None
        self.drafter_loaded = False
        self.seconds_inside = 0.0
        self._reset(0, {})

    def set_selector(self, selector: Selector | None) -> None:
        """Use `selector` from the next rollout on, None for none. What this engine cannot run is a ConfigError."""
        strategies = selector.strategies if selector is not None else ()
        for strategy in strategies:
            self.check(strategy)
        self.selector = selector
        # A selector that does not say what it may choose may choose to speculate.
        self.drafter_loaded = selector is not None and (not strategies or any(s.speculates for s in strategies))

    def check(self, strategy: Strategy) -> None:
        """Raise ConfigError where this engine cannot run `strategy`."""
        if not strategy.speculates:
            return
        if strategy.top_k != 1:
            raise ConfigError(f"strategy {strategy}: vLLM drafts chains only, top_k must be 1")
        if strategy.drafter != self.drafter_name:
            raise ConfigError(f"strategy {strategy}: this engine has the drafter {self.drafter_name!r} only")
        if strategy.draft_depth > self.max_depth:
            raise ConfigError(
                f"strategy {strategy}: the engine was built for draft depths up to {self.max_depth}; "
                "raise rollout.max_draft_depth"
            )

    def begin(self, rl_step: int, keys: dict[str, Key], prompts: dict[str, list[int]]) -> float:
        """Open a rollout; `keys` and `prompts` are by vLLM request id. Returns its start on the monotonic clock."""
        self._reset(rl_step, keys)
        self.drafter = NgramDrafter()
        self.known_tokens = {request_id: len(tokens) for request_id, tokens in prompts.items()}
        if self.drafter_loaded:
            for request_id, key in keys.items():
                self.drafter.open(request_id, group=key[:2], tokens=prompts[request_id])
        self._origin = time.perf_counter()
        return self._origin

    def end(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Close the rollout: the rows of its iterations and its decisions."""
        self._close_iteration(time.perf_counter())
        return self.iterations, self.decisions

    def _reset(self, rl_step: int, keys: dict[str, Key]) -> None:
        self.rl_step = rl_step
        self.keys = keys
        self.iterations: list[dict[str, Any]] = []
        self.decisions: list[dict[str, Any]] = []
        self.first_token_s: dict[str, float] = {}
        self.draft_depth = 0
        self._origin = 0.0
        self._open: dict[str, Any] | None = None
        self._chosen: Strategy = NO_SPECULATION
        self._chosen_before: Strategy | None = None
        self._draft_s = 0.0
        self._draft_s_before = 0.0
        self._decision: dict[str, Any] | None = None
        self._decision_before: dict[str, Any] | None = None
        self._drafted: list[int] = []
        self._accepted: list[int] = []

    def iteration_starts(self) -> None:
        """Close the iteration before and start the clock of the next."""
        now = time.perf_counter()
        self._close_iteration(now)
        self._start = now
        self.seconds_inside += time.perf_counter() - now

    def scheduled(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Log what the iteration runs and choose what it drafts at its end."""
        entered = time.perf_counter()
        if not output.num_scheduled_tokens:
            return
        requests = [scheduler.requests[i] for i in output.num_scheduled_tokens]
        context = sum(r.num_tokens for r in requests)
        drafts = output.scheduled_spec_decode_tokens
        prefill = sum(
            _prefill_tokens(request, num, len(drafts.get(request.request_id, ())))
            for request, num in zip(requests, output.num_scheduled_tokens.values(), strict=True)
        )
        verified = self._chosen
        waiting = len(scheduler.waiting)
        self._open = {
            "rl_step": self.rl_step,
            "worker": self.worker,
            "iteration": len(self.iterations),
            "t_start": self._start - self._origin,
            "batch": len(requests),
            "num_waiting": waiting,
            "context_tokens": context,
            "prefill_tokens": prefill,
            "drafter": verified.drafter,
            "draft_depth": verified.draft_depth,
            "top_k": verified.top_k,
            "tokens_to_verify": verified.tokens_to_verify,
            "num_drafted": sum(len(d) for d in drafts.values()),
        }
        self._chosen_before, self._draft_s_before = self._chosen, self._draft_s
        self._decision_before = self._decision
        self._draft_s = 0.0
        if self.selector is not None:
            blocks = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
            self._chosen = self.selector.choose(
                StepState(
                    rl_step=self.rl_step,
                    worker=self.worker,
                    batch=len(requests),
                    waiting=waiting,
                    context_tokens=context,
                    free_kv_tokens=blocks * scheduler.block_size,
                    strategy=verified,
                    requests=RunningRequests(requests, self.keys),
                )
            )
            self.check(self._chosen)
            self._decision = {
                "bucket": self.selector.bucket_,
                "drafter": self._chosen.drafter,
                "draft_depth": self._chosen.draft_depth,
                "top_k": self._chosen.top_k,
                "tokens_to_verify": self._chosen.tokens_to_verify,
                "propensity": self.selector.propensity_,
            }
        self.draft_depth = min(self._chosen.draft_depth, max(self._chosen.tokens_to_verify - 1, 0))
        self._open["next_draft_depth"] = self._chosen.draft_depth
        self.seconds_inside += time.perf_counter() - entered

    def drafted(self, seconds: float) -> None:
        """The proposer's own report of the time it took."""
        self._draft_s = seconds

    def sampled(self, output: SchedulerOutput, tokens: dict[str, int]) -> None:
        """The iteration's result: tokens that each request got."""
        entered = time.perf_counter()
        if self._open is None:
            return
        drafts = output.scheduled_spec_decode_tokens
        accepted = [max(tokens.get(i, 0) - 1, 0) if i in drafts else 0 for i in output.num_scheduled_tokens]
        self._drafted = [len(drafts.get(i, ())) for i in output.num_scheduled_tokens]
        self._open["num_accepted"] = sum(accepted)
        self._open["num_generated"] = sum(tokens.values())
        self._open["accepted_per_request"] = accepted if self._open["draft_depth"] else None
        self._accepted = accepted
        if self._open["prefill_tokens"]:
            for request_id, count in tokens.items():
                if count and request_id not in self.first_token_s:
                    self.first_token_s[request_id] = entered - self._origin
        self.seconds_inside += time.perf_counter() - entered

    def _close_iteration(self, now: float) -> None:
        """Fix the duration of the open iteration (start to start) and tell the policy what its choice brought."""
        row = self._open
        if row is None or "num_accepted" not in row:
            return
        self._open = None
        row["duration"] = now - self._start
        row["draft_duration"] = self._draft_s
        self.iterations.append(row)
        decision = self._decision_before
        if decision is None or self.selector is None or self._chosen_before is None:
            return
        outcome = StepOutcome(
            elapsed_s=row["duration"] - self._draft_s + self._draft_s_before,
            batch=row["batch"],
            drafted=self._drafted,
            accepted=self._accepted,
            had_prefill=row["prefill_tokens"] > 0,
        )
        key = {"rl_step": self.rl_step, "worker": self.worker, "iteration": row["iteration"]}
        self.decisions.append(key | decision | {"reward": self.selector.reward(self._chosen_before, outcome)})
        self.selector.observe(self._chosen_before, outcome)


def _prefill_tokens(request: Request, num_scheduled: int, num_drafts: int) -> int:
    """Tokens of a scheduled request that are no decoding: its prompt, or after preemption prompt and output again."""
    if request.num_output_tokens == 0:
        return num_scheduled
    return max(num_scheduled - num_drafts - 1, 0)


class PolicyScheduler(Scheduler):
    """vLLM's scheduler with a `Control` attached after the engine is built; without one it is the stock scheduler."""

    control: Control | None = None

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if self.control is None:
            return super().schedule(*args, **kwargs)
        self.control.iteration_starts()
        output = super().schedule(*args, **kwargs)
        self.control.scheduled(self, output)
        output.num_spec_tokens_to_schedule = self.control.draft_depth
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        if self.control is not None:
            index = model_runner_output.req_id_to_index
            sampled = model_runner_output.sampled_token_ids
            tokens = {i: len(sampled[index[i]]) if sampled else 0 for i in scheduler_output.num_scheduled_tokens}
            self.control.sampled(scheduler_output, tokens)
        return super().update_from_output(scheduler_output, model_runner_output)


class NgramProposer:
    """vLLM's `custom_class` proposer over the core's n-gram drafter; drafts what `Control` chose, per request.

    vLLM builds it with its config alone; the engine attaches `control` and `runner` afterwards.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.control: Control | None = None
        self.runner: Any = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to load."""

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """Return the draft of each request of the batch, empty where the policy drafts nothing or nothing matches."""
        control = self.control
        if control is None or not control.drafter_loaded:
            return [[] for _ in sampled_token_ids]
        start = time.perf_counter()
        drafter, depth = control.drafter, control.draft_depth
        drafts: list[list[int]] = []
        for index, (request_id, sampled) in enumerate(
            zip(self.runner.input_batch.req_ids, sampled_token_ids, strict=True)
        ):
            known = control.known_tokens.get(request_id)
            if not sampled or known is None:
                drafts.append([])
                continue
            total = int(num_tokens_no_spec[index])
            drafter.extend(request_id, token_ids_cpu[index, known:total].tolist())
            control.known_tokens[request_id] = total
            drafts.append(drafter.propose(request_id, depth) if depth else [])
        control.drafted(time.perf_counter() - start)
        return drafts
