"""What sits between a policy and an engine's scheduler: it asks, it shares out drafts, it keeps the book of iterations.

vLLM drafts at the end of iteration i what iteration i + 1 verifies. So the choice made in iteration i is judged by
iteration i + 1, and its time is `duration[i+1] - draft_duration[i+1] + draft_duration[i]`: `Control` keeps that
book, the policy sees only matching pairs of choice and outcome. Nothing here knows vLLM.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tltlab.drafters.base import Key
from tltlab.drafters.budget import DraftBudget, UniformBudget
from tltlab.errors import ConfigError
from tltlab.policies.policy import Policy
from tltlab.policies.replay import START, ReplayedDecisions
from tltlab.policies.selector import Selector
from tltlab.state import StepOutcome, StepState
from tltlab.strategy import NO_SPECULATION, Strategy

from .drafter_pool import DrafterPool, Response

Row = dict[str, Any]

_LATELY = 0.2
"""Weight of the newest draft in a request's `recent_acceptance`: about its last five drafts count."""


@dataclass(slots=True, kw_only=True)
class Live:
    """One request in the engine, as policies see it: it has the fields of `tltlab.state.RequestState`, always current.

    `output` grows by itself; drafters have been shown its first `shown` tokens; `drafter` made the draft in flight.
    """

    key: Key
    prompt: Sequence[int]
    output: Sequence[int]
    max_response_tokens: int
    recent_acceptance: float | None = None
    length_class: int | None = None
    shown: int = 0
    drafter: str = ""
    drafted: int = 0
    accepted: int = 0

    @property
    def prompt_id(self) -> str:
        return self.key[1]

    @property
    def generated_tokens(self) -> int:
        return len(self.output)


@dataclass(slots=True, kw_only=True)
class Scheduled:
    """What the scheduler put into an iteration; per request its id, and the tokens it verifies where it drafted."""

    request_ids: list[str]
    drafts: Mapping[str, Sequence[int]]
    waiting: int
    context_tokens: int
    prefill_tokens: int
    free_kv_tokens: int


@dataclass(frozen=True, slots=True)
class _Decision:
    """A choice in force, and the selector that made it and is told its outcome."""

    chosen: Strategy
    bucket: int | None
    propensity: float
    selector: Selector


@dataclass(slots=True)
class _Iteration:
    """An iteration in flight or over, and the choice that it verifies. Rows are made of it when the rollout is over.

    Between two forward passes, which leave nothing of this in the processor's caches, making rows takes several times
    as long.
    """

    number: int
    start: float
    batch: int
    waiting: int
    context_tokens: int
    prefill_tokens: int
    verified: Strategy
    decision: _Decision | None
    draft_s_before: float | None
    next_depth: int = 0
    drafted: Sequence[int] = ()
    accepted: Sequence[int] = ()
    num_generated: int = 0
    draft_s: float | None = 0.0
    duration_s: float = 0.0
    reward: float | None = None
    sampled: bool = False


class Control:
    """Asks a selector once per engine iteration, tells it the outcome, and keeps the iteration log of one engine.

    `begin` opens a rollout, `end` closes it and returns the rows of `iterations.parquet` and `decisions.parquet`;
    outside of rollouts none are kept. Times in them are seconds since `begin`. Requests come with `add` and leave with
    `finish`, at any time; `speechless` are those without a token yet. With `overlapped` the engine schedules an
    iteration before it knows the last one's outcome (asynchronous scheduling): durations then run from output to output
    and drafting time is unknown. `seconds_inside` is all the time that keeping the book and deciding took so far,
    `seconds_deciding` the policy's part of it.
    """

    def __init__(self, drafters: DrafterPool, *, worker: int = 0, overlapped: bool = False) -> None:
        self.drafters = drafters
        self.worker = worker
        self.overlapped = overlapped
        self.selector: Selector | None = None
        self.budget: DraftBudget = UniformBudget()
        self.seconds_inside = 0.0
        self.seconds_deciding = 0.0
        self._replayed: tuple[int, int] = START
        self.live: dict[str, Live] = {}
        self.keys: set[Key] = set()
        self.speechless: set[str] = set()
        self._flight: deque[_Iteration] = deque()
        self._begin(0)
        self._logs = False

    def set_policy(self, policy: Policy, seed: Sequence[int]) -> None:
        """Choose by a fresh selector and budget of `policy`, drawing from a generator seeded with `seed`."""
        self.set_selector(policy.build(np.random.default_rng(list(seed))), policy.build_budget())

    def set_selector(self, selector: Selector | None, budget: DraftBudget | None = None) -> None:
        """Choose by `selector` from now on, None for plain decoding; ConfigError for what this engine cannot run."""
        running = [(live.key, live.prompt, live.output[: live.shown]) for live in self.live.values()]
        self.drafters.use([NO_SPECULATION] if selector is None else selector.strategies, running)
        self.selector = selector
        self.budget = budget or UniformBudget()
        self._shared_out = not isinstance(self.budget, UniformBudget)

    def replay(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Make the choices of these rows of `decisions` again, and after their last RL step choose by the policy."""
        inner = self.selector.inner if isinstance(self.selector, ReplayedDecisions) else self.selector
        if inner is None:
            raise ConfigError("decisions are replayed under the policy that made them, and none is set")
        self.selector = ReplayedDecisions(inner, rows, worker=self.worker)
        self.selector.go_to(self._replayed)

    def remember(self, responses: Sequence[Response]) -> None:
        """Let drafters and budget learn from responses generated elsewhere: (key, prompt, response) each."""
        self.drafters.remember(responses)
        for key, prompt, response in responses:
            live = Live(key=key, prompt=prompt, output=response, max_response_tokens=max(len(response), 1))
            self.budget.finished(live, drafted=0, accepted=0)

    def state_dict(self) -> dict[str, Any]:
        """What a rollout depends on besides requests and weights: all that policy, budget and drafters have learned."""
        selector, replayed = self.selector, self._replayed
        if isinstance(selector, ReplayedDecisions):
            selector, replayed = selector.inner, selector.place
        return copy.deepcopy(
            {
                "selector": selector.state_dict() if selector is not None else {},
                "replayed": list(replayed),
                "budget": self.budget.state_dict(),
                "drafters": self.drafters.state_dict(),
            }
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to what `state_dict` gave; nothing may be running. A replay, now or to come, goes on where it was."""
        self._replayed = tuple(state["replayed"])
        selector = self.selector
        if isinstance(selector, ReplayedDecisions):
            selector.go_to(self._replayed)
            selector = selector.inner
        if selector is not None:
            selector.load_state_dict(state["selector"])
        self.budget.load_state_dict(state["budget"])
        self.drafters.load_state_dict(state["drafters"])

    def suspend(self) -> None:
        """Decode plainly until `resume`; the policy in force neither chooses nor learns."""
        self._suspended = self.selector, self.budget
        self.set_selector(None)

    def resume(self) -> None:
        """Go back to the policy that `suspend` set aside."""
        self.set_selector(*self._suspended)

    def begin(self, rl_step: int) -> None:
        """Open a rollout: its rows start empty and its clock at 0. Requests that still run go on."""
        self._begin(rl_step)
        self.drafters.begin(rl_step)
        if isinstance(self.selector, ReplayedDecisions):
            self.selector.begin(rl_step)

    def advance(self, rl_step: int) -> None:
        """Where nobody opens rollouts: let drafters forget what only served requests of RL steps before `rl_step`."""
        if not self._logs and rl_step > self.rl_step:
            self.rl_step = rl_step
            self.drafters.begin(rl_step)

    def _begin(self, rl_step: int) -> None:
        self.rl_step = rl_step
        self._iterations: list[Row] = []
        self._decisions: list[Row] = []
        self._over: list[_Iteration] = []
        self.first_token_s: dict[Key, float] = {}
        self.origin = time.perf_counter()
        self._last = self.origin
        self._logs = True
        self._number = 0
        self._row_end_s = 0.0
        # Overlapped, an iteration of requests that have ended may still be in flight: it is of no rollout.
        self._strays = len(self._flight)
        self._open: _Iteration | None = None
        self._draft_s: float | None = 0.0
        if not self.live:
            self._nothing_chosen()

    def end(self) -> tuple[list[Row], list[Row], dict[Key, float]]:
        """Close the rollout: rows of its iterations, its decisions, and when each response's first token came."""
        entered = time.perf_counter()
        self._close(entered)
        self._logs = False
        rows = self.iterations, self.decisions, self.first_token_s
        self.seconds_inside += time.perf_counter() - entered
        return rows

    @property
    def iterations(self) -> list[Row]:
        """The rollout's rows of `iterations.parquet` so far."""
        self._make_rows()
        return self._iterations

    @property
    def decisions(self) -> list[Row]:
        """The rollout's rows of `decisions.parquet` so far: those whose outcome is known."""
        self._make_rows()
        return self._decisions

    def _make_rows(self) -> None:
        """Turn the iterations that are over into rows."""
        for it in self._over:
            ran = it.verified
            self._iterations.append(
                {
                    "rl_step": self.rl_step,
                    "worker": self.worker,
                    "iteration": it.number,
                    "t_start": it.start - self.origin,
                    "duration": it.duration_s,
                    "draft_duration": it.draft_s,
                    "batch": it.batch,
                    "num_waiting": it.waiting,
                    "context_tokens": it.context_tokens,
                    "prefill_tokens": it.prefill_tokens,
                    "drafter": ran.drafter,
                    "draft_depth": ran.draft_depth,
                    "top_k": ran.top_k,
                    "tokens_to_verify": ran.tokens_to_verify,
                    "num_drafted": sum(it.drafted),
                    "num_accepted": sum(it.accepted),
                    "num_generated": it.num_generated,
                    "accepted_per_request": it.accepted if ran.speculates else None,
                    "next_draft_depth": it.next_depth,
                }
            )
            if it.decision is not None:
                chosen = it.decision.chosen
                self._decisions.append(
                    {
                        "rl_step": self.rl_step,
                        "worker": self.worker,
                        "iteration": it.number,
                        "bucket": it.decision.bucket,
                        "drafter": chosen.drafter,
                        "draft_depth": chosen.draft_depth,
                        "top_k": chosen.top_k,
                        "tokens_to_verify": chosen.tokens_to_verify,
                        "propensity": it.decision.propensity,
                        "reward": it.reward,
                    }
                )
        self._over.clear()

    def add(self, request_id: str, key: Key, prompt: Sequence[int], output: Sequence[int], max_tokens: int) -> Live:
        """A request enters the engine; `output` is a view that grows as it generates."""
        live = self.live[request_id] = Live(key=key, prompt=prompt, output=output, max_response_tokens=max_tokens)
        self.keys.add(key)
        self.speechless.add(request_id)
        self.drafters.open(key, prompt)
        return live

    def finish(self, request_id: str) -> Live | None:
        """A request leaves, complete or aborted; what was known of it."""
        live = self.live.pop(request_id, None)
        self.speechless.discard(request_id)
        if live is not None:
            self.keys.discard(live.key)
            self.drafters.extend(live.key, live.output[live.shown :])
            self.drafters.close(live.key)
            self.budget.finished(live, drafted=live.drafted, accepted=live.accepted)
        return live

    def iteration_starts(self) -> None:
        """The scheduler is about to put an iteration together."""
        now = time.perf_counter()
        if not self.overlapped:
            self._close(now)
        self._start = now
        self.seconds_inside += time.perf_counter() - now

    def scheduled(self, what: Scheduled) -> int:
        """Log what the iteration runs and choose what it drafts at its end; the depth for the engine's workers."""
        entered = time.perf_counter()
        verified = self._chosen
        iteration = _Iteration(
            self._number,
            self._start,
            len(what.request_ids),
            what.waiting,
            what.context_tokens,
            what.prefill_tokens,
            verified,
            self._decision,
            self._draft_s,
        )
        self._number += 1
        self._flight.append(iteration)
        self._open = iteration
        self._draft_s = None if self.overlapped else 0.0
        self._decision = None
        if self.selector is not None:
            before = time.perf_counter()
            batch = [self.live[i] for i in what.request_ids]
            self._state = StepState(
                rl_step=self.rl_step,
                worker=self.worker,
                batch=len(batch),
                waiting=what.waiting,
                context_tokens=what.context_tokens,
                free_kv_tokens=what.free_kv_tokens,
                strategy=verified,
                drafters=self.drafters,
                requests=batch,
            )
            chosen = self.selector.choose(self._state)
            self.drafters.check(chosen)
            self.seconds_deciding += time.perf_counter() - before
            self._chosen = chosen
            self._decision = _Decision(chosen, self.selector.bucket_, self.selector.propensity_, self.selector)
        else:
            self._chosen = NO_SPECULATION
        iteration.next_depth = self._chosen.draft_depth
        depth = self.drafters.worker_depth(self._chosen)
        self.seconds_inside += time.perf_counter() - entered
        return depth

    def allot(self, live: Sequence[Live]) -> list[int]:
        """How many tokens the next draft of each request may have: the budget's share, never beyond its cap."""
        strategy = self._chosen
        if self._shared_out and live:
            state = replace(self._state, batch=len(live), strategy=strategy, requests=live)
            shares = self.budget.allot(state, strategy)
        else:
            shares = [min(strategy.draft_depth, strategy.tokens_to_verify - 1)] * len(live)
        # A draft is followed by one token of the target's own, so the last token is never worth drafting.
        return [max(min(n, r.max_response_tokens - len(r.output) - 1), 0) for n, r in zip(shares, live, strict=True)]

    def drafts(
        self, request_ids: Sequence[str], learned: Sequence[list[int]], learned_s: float | None
    ) -> list[list[int]]:
        """What each request is to verify next. `learned` are the workers' drafts, made in `learned_s` seconds.

        Requests that are gone or have not generated yet get nothing.
        """
        start = time.perf_counter()
        pool, strategy = self.drafters, self._chosen
        drafts: list[list[int]] = [[] for _ in request_ids]
        going = [(n, self.live[i]) for n, i in enumerate(request_ids) if i in self.live]
        if pool.feeds:
            # In order of admission, not of the engine's slots: a trace then says what a drafter knew when it drafted.
            for live in self.live.values():
                if live.shown < len(live.output):
                    pool.extend(live.key, live.output[live.shown :])
                    live.shown = len(live.output)
        if strategy.speculates:
            drafting = [(n, live) for n, live in going if live.output]
            before = time.perf_counter()
            shares = self.allot([live for _, live in drafting])
            spent = time.perf_counter() - before
            self.seconds_inside += spent
            self.seconds_deciding += spent
            for (n, live), share in zip(drafting, shares, strict=True):
                if share:
                    live.drafter, drafts[n] = pool.propose(strategy, live.key, share, learned[n])
        self._last = time.perf_counter()
        self._draft_s = self._last - start + (learned_s or 0.0)
        if self._open is not None and not self.overlapped:
            self._open.draft_s = self._draft_s
        return drafts

    def sampled(self, what: Scheduled, counts: Mapping[str, int]) -> None:
        """The oldest iteration in flight is back: `counts` are the tokens each request got, drafts kept included."""
        entered = time.perf_counter()
        iteration = self._flight.popleft()
        if what.drafts:
            self._verified(iteration, what, counts)
        else:
            iteration.drafted = iteration.accepted = [0] * iteration.batch
        if self.speechless:
            for request_id in self.speechless.intersection(what.request_ids):
                if counts[request_id]:
                    self.speechless.discard(request_id)
                    if self._logs:
                        self.first_token_s[self.live[request_id].key] = entered - self.origin
        iteration.num_generated = sum(counts.values())
        iteration.sampled = True
        self._last = time.perf_counter()
        if self.overlapped:
            iteration.start = max(iteration.start, self.origin + self._row_end_s)
            iteration.draft_s = None
            if self._strays:
                self._strays -= 1
            else:
                self._finish_row(iteration, self._last)
        self.seconds_inside += time.perf_counter() - entered

    def _verified(self, iteration: _Iteration, what: Scheduled, counts: Mapping[str, int]) -> None:
        """Count what was kept of each request's draft, and let its drafter know."""
        drafted, accepted = [0] * iteration.batch, [0] * iteration.batch
        iteration.drafted, iteration.accepted = drafted, accepted
        for n, request_id in enumerate(what.request_ids):
            num_drafted = len(what.drafts.get(request_id, ()))
            if not num_drafted:
                continue
            kept = max(counts[request_id] - 1, 0)
            drafted[n], accepted[n] = num_drafted, kept
            live = self.live.get(request_id)
            if live is None:
                continue
            live.drafted += num_drafted
            live.accepted += kept
            recent = live.recent_acceptance
            live.recent_acceptance = float(kept) if recent is None else recent + _LATELY * (kept - recent)
            self.drafters.observe(live.drafter or iteration.verified.drafter, live.key, num_drafted, kept)

    def idle(self) -> None:
        """Nothing is left to run: the last iteration is over, and what was chosen for the next one has no meaning."""
        entered = time.perf_counter()
        self._close(self._last)
        self._nothing_chosen()
        self.seconds_inside += time.perf_counter() - entered

    def _nothing_chosen(self) -> None:
        self._chosen: Strategy = NO_SPECULATION
        self._decision: _Decision | None = None

    def _close(self, now: float) -> None:
        """Fix the duration of the open iteration, start to start."""
        iteration, self._open = self._open, None
        if iteration is not None and iteration.sampled and not self.overlapped:
            self._finish_row(iteration, now)

    def _finish_row(self, iteration: _Iteration, end: float) -> None:
        iteration.duration_s = end - iteration.start
        self._row_end_s = end - self.origin
        if self._logs:
            self._over.append(iteration)
        decision = iteration.decision
        if decision is None:
            return
        before = time.perf_counter()
        drafting = 0.0 if iteration.draft_s is None else (iteration.draft_s_before or 0.0) - iteration.draft_s
        outcome = StepOutcome(
            elapsed_s=iteration.duration_s + drafting,
            batch=iteration.batch,
            drafted=iteration.drafted,
            accepted=iteration.accepted,
            had_prefill=iteration.prefill_tokens > 0,
        )
        iteration.reward = decision.selector.reward(iteration.verified, outcome)
        decision.selector.observe(iteration.verified, outcome)
        self.seconds_deciding += time.perf_counter() - before
