"""Rollouts whose requests a planner moves between engines, by the path of partial rollouts: cut, and continued.

    call     one call of an engine lasts until it is closed; it waits where it has no requests   `PlannedRolloutWorker`
    news     tokens of its requests, and which have ended: what the planner is told
    change   between two iterations requests leave, with the tokens that they have, and others join
    gather   all calls are closed; engines sleep, those of the other shape wake and load the weights, all continue there

A request that moved continues with the random state of the engine that it is at. An engine's first call in a rollout
has the random state of one without a planner, each later one its own.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Event
from typing import Any, cast

import numpy as np
import ray

from tltlab.config import counted
from tltlab.drafters.base import Key
from tltlab.errors import RunError
from tltlab.planning.rollout import HELD, Action, Gather, Hold, Move, RolloutState, Shape
from tltlab.planning.rollout_driver import plan_row, shared_out
from tltlab.runtime.engine.generation import FollowUp, FollowUps, GenerationRequest, GenerationResponse, Rollout
from tltlab.runtime.run.rows import Shares
from tltlab.traces.schema import Row

from .collected import after, delayed, joined
from .worker import DeferredCalls, EngineWorker, WorkerLost, compact

MOST_RECORDED = 1_000_000
"""Requests in the states that are recorded of a rollout, all together: later states are left out."""
NEWS_S = 1.0
"""Most seconds between two reports of an engine."""

News = tuple[dict[Key, int], dict[Key, int]]
"""Tokens of the requests of a call that have ended, and of those that run."""


@ray.remote(concurrency_groups={"aside": 4})
class PlannedRolloutWorker(EngineWorker):
    """One engine whose requests come and go while it generates (`FollowUps`)."""

    def start(self) -> None:
        super().start()
        self._calls = DeferredCalls(busy=True)
        self._some_ended = Event()
        self._joining: list[GenerationRequest] = []
        self._closed = True

    def generate_planned(
        self, requests: list[GenerationRequest], rl_step: int, seed: list[int], history: list[Any]
    ) -> Rollout:
        """Generate these and those that join until it is closed, which cuts what still runs."""
        self._closed = False
        self._recall(history)
        return self._generate(requests, rl_step, seed, lambda ended: self._closed)

    @ray.method(concurrency_group="aside")
    def change(
        self,
        leaving: Collection[Key] = (),
        joining: Sequence[GenerationRequest] = (),
        history: Sequence[Any] = (),
        close: bool = False,
    ) -> list[GenerationResponse]:
        """Generate some no more, return what they have where they have not ended, and generate others too."""

        def changed() -> list[GenerationResponse]:
            self.engine.remember(response for visit in ray.get(list(history)) for response in visit)
            self._joining += joining
            self._closed = close
            return [] if self.engine.under_way is None else self.engine.under_way.cut(leaving)

        return [compact(response) for response in self._calls.call(changed)]

    @ray.method(concurrency_group="aside")
    def news(self) -> News:
        """Return the progress once more requests have ended, or after a while."""
        self._some_ended.wait(NEWS_S)
        self._some_ended.clear()
        calls, engine = self._calls, self.engine
        news: News = calls.call(lambda: ({}, {}) if engine.under_way is None else engine.under_way.progress())
        return news

    def _conversations(self, requests: list[GenerationRequest]) -> tuple[list[GenerationRequest], FollowUps | None]:
        return requests, self

    @property
    def pending(self) -> int:
        return not self._closed

    def ended(self, request: GenerationRequest, token_ids: Sequence[int], now_s: float) -> None:
        self._some_ended.set()

    def ready(self, now_s: Any, *, wait_for_one: bool) -> list[FollowUp]:
        self._calls.serve(lambda: wait_for_one and not self._closed and not self._joining)
        joining, self._joining = self._joining, []
        return [FollowUp(request=request, observed=[], submit_s=now_s(), tool_s=0.0) for request in joining]


class PlannedRollout:
    """One rollout. Engines have numbers: those of each shape in `pool.shapes`.

    A request is `at` an engine, or held, until its response has arrived. Where an engine fails, all requests of its
    call begin again, there, from what they had when they came.
    """

    def __init__(self, pool: Any, shares: Shares, rl_step: int, seeds: Sequence[list[int]]):
        self._pool, self._rl_step, self._seeds = pool, rl_step, seeds
        self._requests = {request.key: request for share in shares for request in share}
        # In order of admission.
        self._at = {request.key: n for n, share in enumerate(shares) for request in share}
        self._held: dict[Key, None] = {}
        self._so_far: dict[Key, GenerationResponse] = {}
        self._told: defaultdict[int, News] = defaultdict(lambda: ({}, {}))
        self._active = pool.base
        self._parts = [
            Rollout(responses=[], iterations=[], decisions=[], duration_s=0.0, recorder_s=0.0, policy_s=0.0)
            for _ in shares
        ]
        self._moves: list[tuple[float, float, int, str]] = []
        self._plans: list[Row] = []
        self._num_recorded = 0
        self._serving: set[int] = set()
        self._open: dict[int, float] = {}  # when the call of an engine began
        self._num_calls = [0] * len(seeds)
        self._closing = False
        self._news = asyncio.Event()
        self._start_s, self._busy_until_s, self._left = 0.0, 0.0, len(self._at)

    async def run(self) -> list[Rollout]:
        """Return each worker's part; a response is in that of the worker where it ended.

        What engines of another shape did is in the part of the first worker whose GPUs they have.
        """
        self._start_s = self._now_s()
        try:
            async with asyncio.TaskGroup() as group:
                await self._plan(group)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors.exceptions[0].__cause__
        if self._active != self._pool.base:
            await self._switch(self._pool.base)
        self._parts[0] = replace(self._parts[0], plans=self._plans)
        return [
            replace(part, asked=[self._requests[r.key] for r in part.responses], moves=tuple(self._moves))
            for part in self._parts
        ]

    async def _plan(self, group: asyncio.TaskGroup) -> None:
        """Keep the engines of the active shape generating, and do what the planner says, until all responses are in."""
        driver = self._pool.driver
        await self._do(driver.begin)
        while self._at or self._held:
            before, self._left = self._left, self._num_running() + len(self._held)
            if self._left < before and driver.wants(self._left):
                await self._do(driver.ask)
                continue
            if not self._num_running():
                await self._close()
                if self._held:
                    driver.note(f"{len(self._held)} requests are held though no other runs; they go on")
                    self._share_out(Gather(shape=self._active, queues=()))
                continue
            for n in {*self._pool.shapes[self._active]} - self._serving:
                self._serving.add(n)
                group.create_task(self._served(n))
            await self._news.wait()
            self._news.clear()

    def _num_running(self) -> int:
        return len(self._at) - sum(len(ended) for ended, _ in self._told.values())

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time() - self._start_s

    def _state(self) -> RolloutState:
        ended = {r.key: len(r.token_ids) for part in self._parts for r in part.responses}
        generated: dict[Key, int] = {}
        for key in (*self._at, *self._held):
            gone, running = self._told[self._at.get(key, HELD)]
            found, tokens = (ended, gone[key]) if key in gone else (generated, running.get(key, 0))
            found[key] = tokens + len(self._text(key))
        first = self._pool.shapes[self._active][0]
        asked = [self._requests[key] for key in generated]
        return RolloutState(
            now_s=self._now_s(),
            rl_step=self._rl_step,
            active=self._active,
            keys=list(generated),
            worker=np.array([self._at[key] - first if key in self._at else HELD for key in generated], np.int64),
            prompt_tokens=np.array([len(request.prompt_token_ids) for request in asked], np.float64),
            generated_tokens=np.array(list(generated.values()), np.float64),
            max_response_tokens=np.array([request.max_response_tokens for request in asked], np.float64),
            ended=ended,
            engines=self._pool.costs,
            belief=self._pool.belief,
        )

    # ---- actions ----

    async def _do(self, ask: Callable[[RolloutState], Sequence[Action]]) -> None:
        state = self._state()
        actions = ask(state)
        self._num_recorded += len(state)
        if self._num_recorded <= MOST_RECORDED:
            self._plans.append(plan_row(state, actions))
        await asyncio.gather(*(self._move(action) for action in actions if not isinstance(action, Gather)))
        for action in actions:
            if isinstance(action, Gather):
                await self._gather(action)

    async def _move(self, action: Move | Hold) -> None:
        """Bring a request to another engine, or hold it; one that has ended meanwhile is passed over."""
        key, pool = action.key, self._pool
        target = pool.shapes[self._active][action.worker] if isinstance(action, Move) else HELD
        if (source := self._at.get(key, HELD)) == target:
            return
        try:
            if source in self._open:
                if not (cut := await pool.asked(source, "change", [key])):
                    return
                later_s = cut[0].t_first_token + self._open[source]
                self._hold(key, replace(cut[0], t_first_token=later_s))
            self._hold(key)
            if target != HELD:
                known = pool.history.everything or any(key[1] == k[1] for k, n in self._at.items() if n == target)
                del self._held[key]
                self._at[key] = target
                if target in self._open:
                    request = self._request(key)
                    await pool.asked(target, "change", (), [request], [] if known else pool.history.of([request]))
        except WorkerLost as lost:
            # It begins again where it is.
            pool.driver.failed(action, lost.why)

    async def _gather(self, action: Gather) -> None:
        asked_s = self._now_s()
        await self._close()
        if left := len(self._at) + len(self._held):
            # Bringing in the calls' tokens after their last iterations is a part of what a gather takes.
            since_s, self._left = max(asked_s, self._busy_until_s), left
            await self._switch(action.shape)
            seconds = self._pool.costs[action.shape].switch_s = self._now_s() - since_s
            self._moves.append((since_s, seconds, left, str(action.shape)))
            self._share_out(action)

    def _share_out(self, action: Gather) -> None:
        queues = shared_out(action.shape, action, [*self._at, *self._held])
        self._at = {key: n for n, queue in zip(self._pool.shapes[action.shape], queues, strict=True) for key in queue}
        self._held = {}

    async def _close(self) -> None:
        """End all calls; what still runs is held, with the tokens that it has."""
        self._closing = True
        # The call of a failed engine raises why.
        closed = (self._pool.asked(n, "change", (), (), (), True) for n in self._open)
        await asyncio.gather(*closed, return_exceptions=True)
        while self._serving:
            self._news.clear()
            await self._news.wait()
        self._closing = False

    async def _switch(self, shape: Shape) -> None:
        await self._pool.hand_over(self._pool.shapes[shape])
        self._active = shape

    # ---- calls of engines ----

    async def _served(self, n: int) -> None:
        """Have engine n generate what is there, and what comes, until it is closed or fails."""
        pool, listening = self._pool, None
        try:
            await pool.bring_up(n)
            if self._closing:
                return
            self._open[n] = start_s = self._now_s()
            listening = asyncio.ensure_future(self._listen(n))
            share = [self._request(key) for key, at in self._at.items() if at == n]
            seed = [*self._seeds[n], *([self._num_calls[n]] if self._num_calls[n] else [])]
            new = await pool.asked(n, "generate_planned", share, self._rl_step, seed, pool.history.of(share))
            self._take(n, new, start_s)
        except WorkerLost as lost:
            again = counted(sum(at == n for at in self._at.values()), "request")
            pool.failed(n, lost, f", {again} reissued")
        finally:
            if listening is not None:
                listening.cancel()
            self._open.pop(n, None)
            self._told.pop(n, None)
            self._serving.remove(n)
            self._news.set()

    def _take(self, n: int, new: Rollout, start_s: float) -> None:
        """Keep what a call of engine n has returned that began at `start_s`."""
        self._num_calls[n] += 1
        lane, *others = self._pool.lanes(n)
        part = self._parts[lane]
        self._parts[lane] = both = joined(part, replace(new, responses=[]), start_s)
        for other in others:
            self._parts[other].lent.append(both.iterations.slice(len(part.iterations)))
        if len(ran := both.iterations):
            self._busy_until_s = max(self._busy_until_s, ran["t_start"][-1].as_py() + ran["duration"][-1].as_py())
        for response in delayed(new, start_s).responses:
            if response.finish_reason == "abort":
                self._hold(response.key, response)
            else:
                both.responses.append(self._continued(response))
                del self._at[response.key]

    async def _listen(self, n: int) -> None:
        # The call of a failed engine raises why.
        with suppress(RunError):
            while True:
                self._told[n] = await self._pool.asked(n, "news")
                self._news.set()

    # ---- responses in pieces ----

    def _hold(self, key: Key, piece: GenerationResponse | None = None) -> None:
        """Hold a request, which has generated another piece."""
        self._at.pop(key, None)
        self._held[key] = None
        if piece is not None and len(piece.token_ids):
            self._so_far[key] = self._continued(piece)

    def _text(self, key: Key) -> Sequence[int]:
        return self._so_far[key].token_ids if key in self._so_far else ()

    def _request(self, key: Key) -> GenerationRequest:
        """Return the request for the missing tokens, after prompt and tokens so far."""
        request, text = self._requests[key], self._text(key)
        prompt, most = [*request.prompt_token_ids, *text], request.max_response_tokens - len(text)
        return replace(request, prompt_token_ids=prompt, max_response_tokens=most)

    def _continued(self, response: GenerationResponse) -> GenerationResponse:
        """Return the response with what the request had before; it was submitted when the rollout began."""
        before, response = self._so_far.get(response.key), replace(response, t_submit=0.0, tool_s=None)
        if before is None:
            return response
        return replace(
            response,
            token_ids=after(cast(Any, before.token_ids), response.token_ids),
            logprobs=after(cast(Any, before.logprobs), response.logprobs),
            t_first_token=before.t_first_token,
        )
