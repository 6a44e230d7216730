"""Control between a policy and an engine's scheduler, independent of vLLM.

A scheduler calls `Control`, which holds requests and drafters, the policy in a `PolicyDriver` and iterations in a
`IterationTracker`. Order of the calls of one iteration:

    iteration_starts   the previous iteration ends: its outcome goes to the policy
    scheduled          the batch and the choice that it verifies are known; choose for the next iteration
    sampled            output: accepted tokens go to requests, drafters and the tracker
    drafts             drafts for the next iteration, by the choice made in `scheduled`

Under asynchronous scheduling an iteration is `scheduled` before the one before it is `sampled`, and `late_drafts`, in
place of `drafts`, come between the two.
"""

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import pyarrow as pa

from tltlab.coordination.canary import Alarm
from tltlab.drafters.base import Key
from tltlab.drafters.budget import DraftBudget, UniformBudget
from tltlab.policies.driver import PolicyDriver, refuse_needs
from tltlab.policies.policy import Policy
from tltlab.policies.selector import Selector
from tltlab.records import Json
from tltlab.state import Choice, RequestState, StepOutcome, StepState, recent_acceptance
from tltlab.strategy import NO_SPECULATION, Strategy

from .drafter_pool import Ahead, DrafterPool, ResponseTokens
from .guard import Guard, notify
from .requests import BatchRequests, Drafting, LiveRequest, Observer
from .tracker import Clock, Iteration, IterationTracker, SampledTokens, Stopwatch

_DraftOrders = tuple[list[int], list[LiveRequest], list[tuple[Key, int]]]
"""Positions in the batch, requests at these positions, and (key, draft tokens) of each."""


class Control:
    """Calls a policy once per engine iteration, allots drafts and delivers outcomes; knows where each request is.

    `add` and `finish` report requests at any time. Requests are in `live` by name and in `by_key`, those without output
    also in `waiting`. One that finishes while an iteration of it is in flight is `departing` until that has its output.
    `observers` are told of all that: a recording and a capture.

    `begin` opens a rollout, `end` closes it and returns its rows (`IterationTracker`). An iteration calls
    `iteration_starts`, `scheduled`, `sampled` and, if drafts are made next to the scheduler, `drafts`, each O(batch);
    requests are read one by one only for drafts or a policy that reads them. Without a policy
    `watched` replaces `scheduled`. The stopwatch `inside` covers all work here except drafting, `deciding` the policy

    An exception in the policy is logged and disables it: the engine decodes plainly, and `failure` has the message
    until another policy is set.
    """

    def __init__(
        self,
        drafters: DrafterPool,
        *,
        worker: int = 0,
        overlapped: bool = False,
        clock: Clock = time.perf_counter,
    ):
        self.drafters = drafters
        self.overlapped = overlapped
        self.driver = PolicyDriver(worker=worker)
        self.deciding = Stopwatch(clock)
        self.tracker = IterationTracker(self._deliver, worker=worker, overlapped=overlapped, clock=clock)
        self._policy: Policy | None = None
        self.inside = Stopwatch(clock)
        self.drafting = Stopwatch(clock)
        self.guard = Guard("the policy raised", "the engine continues without speculation", self._decode_plainly)
        self.live: dict[str, LiveRequest] = {}
        self.by_key: dict[Key, LiveRequest] = {}
        self.waiting: dict[str, LiveRequest] = {}
        self.departing: dict[str, LiveRequest] = {}
        self.observers: tuple[Observer, ...] = ()
        # Number of requests that allow no drafts for any request in the batch.
        self.draftless = 0
        self._turn = 0
        self._sampled = SampledTokens()
        self.alarm = Alarm(notify)

    def set_policy(self, policy: Policy, seed: Sequence[int]) -> None:
        """Use a fresh selector and budget of `policy`, with a generator seeded by `seed`."""
        self.set_selector(policy.build(np.random.default_rng(list(seed))), policy.build_budget())
        self._policy = policy

    def set_selector(self, selector: Selector | None, budget: DraftBudget | None = None) -> None:
        """Use `selector` from now on, None for plain decoding; ConfigError if this engine cannot run it."""
        if selector is None:
            self._decode_plainly()
        else:
            self.drafters.use(selector.strategies, self.live.values())
            selector.drafts_with(self.drafters.registry)
            refuse_needs(selector)
            self.driver.take(selector, budget)
        self.guard.failure = ""

    @property
    def failure(self) -> str:
        """The exception in the policy, or around it, since it was set; empty for none."""
        return self.guard.failure

    def _decode_plainly(self) -> None:
        """Draft nothing more, so that running requests complete."""
        self.drafters.use([NO_SPECULATION], self.live.values())
        self.driver.take(None)

    def remember(self, responses: Sequence[ResponseTokens]) -> None:
        """Add responses of other workers, (key, prompt, response) each, to drafters and budget."""
        self.drafters.remember(responses)
        self.learn_lengths([(key, len(response)) for key, _, response in responses])

    def learn_lengths(self, lengths: Sequence[tuple[Key, int]]) -> None:
        """Deliver the lengths of other workers' responses to the budget."""
        for key, num_tokens in lengths:
            cap = max(num_tokens, 1)
            self._notify_budget(
                LiveRequest(name="", key=key, prompt=(), output=range(num_tokens), max_response_tokens=cap)
            )

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Total seconds `inside`, those `deciding` among them, and seconds `drafting`, which are not."""
        return self.inside.seconds, self.deciding.seconds, self.drafting.seconds

    @property
    def policy_name(self) -> str | None:
        """The policy's name, else its selector's kind and a digest; None without a policy."""
        if self._policy is None:
            return None
        return self._policy.name or f"{self._policy.selector.kind} {_digest(self._policy)}"

    def state_dict(self, history: bool = True) -> Json:
        """Return the learned state of policy, budget and drafters, from which a rollout can be repeated.

        The state may share lists with the live state. Without `history` it has no texts, which the caller must recall.
        """
        return {**self.driver.state_dict(), "drafters": self.drafters.state_dict(history)}

    def load_state_dict(self, state: Json) -> None:
        """Restore the result of `state_dict`, with no request running; a replay resumes at its position."""
        self.driver.load_state_dict(state)
        self.drafters.load_state_dict(state["drafters"])

    def begin(self, rl_step: int) -> None:
        """Open a rollout with no rows and time 0. Running requests continue."""
        self.tracker.begin(rl_step)
        if not self.live:
            self.tracker.drop_in_flight()
            self.tracker.clear()
            self.driver.forget()
        self.drafters.begin(rl_step)
        self.driver.begin(rl_step)

    def end(self) -> tuple[pa.Table, pa.Table]:
        """Close the rollout; return its tables of iterations and decisions."""
        with self.inside:
            self.tracker.end()
            return self.tracker.drain().tables()

    def advance(self, rl_step: int) -> None:
        """Outside of rollouts, let drafters drop state of RL steps before `rl_step`."""
        if not self.tracker.is_open and rl_step > self.tracker.rl_step:
            self.tracker.rl_step = rl_step
            self.drafters.begin(rl_step)

    def add(
        self,
        name: str,
        key: Key,
        prompt: Sequence[int],
        output: Sequence[int],
        max_tokens: int,
        drafting: Drafting = "any",
        embedded_tokens: int = 0,
    ) -> LiveRequest:
        """Add a request that enters the engine; `output` is a live view of its tokens."""
        if not self.live:
            # The last iteration in flight of requests that are gone is not counted: it may have waited for this one.
            self.land(list(self.departing))
            self.tracker.drop_in_flight()
        live = LiveRequest(
            name=name,
            key=key,
            prompt=prompt,
            embedded_tokens=embedded_tokens,
            output=output,
            max_response_tokens=max_tokens,
            drafting=drafting,
            arrived_s=self.tracker.clock(),
        )
        self.live[name] = self.by_key[key] = self.waiting[name] = live
        self.draftless += drafting == "none beside"
        self.drafters.open(live)
        for observer in self.observers:
            observer.arrived(live)
        return live

    def _drafts_for(self, live: LiveRequest) -> bool:
        return not self.draftless and live.drafting == "any"

    def _room(self, live: LiveRequest) -> int:
        """Most tokens worth drafting for a request: verification adds one token of its own."""
        return max(live.max_response_tokens - len(live.output) - 1, 0) if self._drafts_for(live) else 0

    def finish(self, name: str, reason: str | None = None, got: int | None = None) -> LiveRequest | None:
        """Remove and return a request that leaves the engine, complete or aborted, for vLLM's `reason`.

        Its client `got` its first tokens, by default all of them.
        """
        self.settle()
        live = self.live.pop(name, None)
        if live is None:
            return None
        self.by_key.pop(live.key, None)
        self.waiting.pop(name, None)
        self.draftless -= live.drafting == "none beside"
        self.drafters.close(live)
        self._notify_budget(live)
        live.kept = len(live.output) if got is None else min(got, len(live.output))
        for observer in self.observers:
            observer.left(live, reason)
        self.departing[name] = live
        if not any(name in iteration.request_ids for iteration in self.tracker.in_flight):
            self.land([name])
        return live

    def land(self, names: Iterable[str]) -> None:
        """Note that requests in `departing` are in no iteration in flight any more."""
        self.settle()
        for name in names:
            live = self.departing.pop(name)
            self._sampled.subtract(name, live.computed - (live.kept or 0))
            for observer in self.observers:
                observer.landed(live)

    def _notify_budget(self, live: LiveRequest) -> None:
        request = cast(RequestState, live)
        self.guard.call(lambda: self.driver.finished(request, drafted=live.drafted, accepted=live.accepted))

    def iteration_starts(self) -> None:
        """Note that the scheduler begins to assemble an iteration, which ends the previous one."""
        self._turn += 1
        with self.inside:
            self.tracker.start()

    def scheduled(self, work: Iteration) -> int:
        """Choose the strategy of the drafts at the iteration's end; return the draft depth for the engine's workers."""
        with self.inside:
            self._work, self._verified = work, self.tracker.schedule(work)
            if self.driver.selector is None:
                return 0
            choice = self.driver.again(len(work.request_ids), work.waiting, self.tracker.rl_step)
            if choice is None and (choice := self.guard.call(self._choose, work.request_ids)) is None:
                return 0
            self.tracker.choose(choice)
            return self.drafters.worker_depth(choice.strategy)

    def _choose(self, request_ids: Sequence[str]) -> Choice:
        with self.deciding:
            choice = self.driver.ask(self._state(request_ids))
            self.drafters.check(choice.strategy)
            return choice

    def _deliver(self, choice: Choice, outcome: StepOutcome, iteration: Iteration) -> None:
        with self.deciding:
            self.guard.call(self.driver.tell, choice, outcome, iteration.rewarded)

    def watched(self, work: Iteration, strategy: Strategy) -> None:
        """Record an iteration without a policy, at the end of which the engine itself drafts by `strategy`."""
        with self.inside:
            self.tracker.schedule(work)
            self.tracker.choose(Choice(strategy, learns=False), decided=False)

    def _state(self, request_ids: Sequence[str]) -> StepState:
        """State of the iteration that was scheduled last, for the policy."""
        work = self._work
        return StepState(
            rl_step=self.tracker.rl_step,
            worker=self.tracker.worker,
            batch=len(request_ids),
            waiting=work.waiting,
            context_tokens=work.context_tokens,
            strategy=self._verified,
            drafters=self.drafters,
            requests=cast(Sequence[RequestState], BatchRequests(request_ids, self.live)),
        )

    @property
    def reserved_depth(self) -> int:
        """Most tokens of a draft by the active strategy, made here or in the engine's workers."""
        strategy = self.tracker.in_force.strategy
        return strategy.reach if self.drafters.asks_host(strategy) else self.drafters.worker_depth(strategy)

    def allot(self, request_ids: Sequence[str]) -> list[int]:
        """Allot tokens to the next draft of each request: its share of the budget, within its length limit."""
        with self.inside:
            lives = [self.live[i] for i in request_ids]
            with self.deciding:
                shares = self._shares(self.tracker.in_force.strategy, lives)
            return [min(share, self._room(live)) for share, live in zip(shares, lives, strict=True)]

    def _shares(self, strategy: Strategy, lives: Sequence[LiveRequest]) -> list[int]:
        if isinstance(self.driver.budget, UniformBudget) or not lives:
            return [strategy.reach] * len(lives)
        requests = cast(Sequence[RequestState], lives)
        state = replace(self._state(()), batch=len(lives), strategy=strategy, requests=requests)
        shares: list[int] = self.guard.call(self.driver.shares, state, strategy, otherwise=[0] * len(lives))
        return shares

    def drafts(
        self, request_ids: Sequence[str], learned: Sequence[list[int]], learned_s: float | None
    ) -> list[list[int]]:
        """Return the next draft of each request, [] for one that is gone or has no token yet; [] if nothing drafts.

        `learned` are the workers' drafts, made in `learned_s` seconds, or empty.
        """
        since_s, late_s = self.tracker.clock(), 0.0
        strategy = self.tracker.in_force.strategy
        drafts: list[list[int]] = []
        if strategy.speculates:
            # In order of admission, not of slots, so that a trace determines the drafters' text at each draft.
            with self.drafting:
                late_s = self.drafters.feed(strategy, self._turn, self.tracker.clock, self.live.values())
            if self.drafters.behind(strategy):
                # Drafts made without the latest text are no evidence about the choice.
                self.tracker.in_force = replace(self.tracker.in_force, learns=False)
            with self.inside:
                places, lives, depths = self._draft_orders(request_ids, strategy)
            with self.drafting:
                names, drafts = self.drafters.propose(
                    strategy, depths, [learned[n] for n in places] if learned else [[]] * len(depths)
                )
            for live, name in zip(lives, names, strict=True):
                live.drafter = name
            if len(places) < len(request_ids):
                made = dict(zip(places, drafts, strict=True))
                drafts = [made.get(n) or [] for n in range(len(request_ids))]
        self.tracker.drafted(since_s, learned_s or 0.0, late_s)
        return drafts

    def late_drafts(self, wait: Callable[[], Ahead], places: Mapping[str, list[int]]) -> dict[str, list[int]]:
        """Return drafts for the iteration scheduled last, no longer than the `places` for them.

        `wait` returns requests that have such places, and tokens of the iteration before that are in no output yet;
        none that end with these. A draft that the workers have made is [-1, ...]; there is none where they make all.
        """
        iteration = self.tracker.in_flight[-1]
        strategy = iteration.verified.strategy
        if not self.drafters.asks_host(strategy):
            return {}
        with self.drafting:
            self.drafters.feed(strategy, self._turn, self.tracker.clock, self.live.values())
            if self.drafters.behind(strategy):
                iteration.verified = replace(iteration.verified, learns=False)
        ahead = wait()
        with self.drafting:
            # From here on the device waits.
            self.drafters.show(strategy, ahead)
            depths: list[tuple[Key, int]] = []
            names: list[str] = []
            for live, tokens in ahead:
                room = live.max_response_tokens - len(live.output) - len(tokens) - 1
                if (depth := min(len(places[live.name]), room)) > 0:
                    depths.append((live.key, depth))
                    names.append(live.name)
            makers, made = self.drafters.propose(strategy, depths, [[-1] * depth for _, depth in depths])
        drafts: dict[str, list[int]] = {}
        for name, draft in zip(names, made, strict=True):
            if draft:
                # Those of the workers fill their places.
                drafts[name] = draft if draft[0] >= 0 else places[name]
        iteration.drafts, iteration.drafters = drafts, dict(zip(names, makers, strict=True))
        return drafts

    def _draft_orders(self, request_ids: Sequence[str], strategy: Strategy) -> _DraftOrders:
        """Requests to draft for, and the tokens allotted to each."""
        found = enumerate(map(self.live.get, request_ids))
        asked = [(n, live) for n, live in found if live is not None and live.output and self._drafts_for(live)]
        with self.deciding:
            shares = self._shares(strategy, [live for _, live in asked])
        places: list[int] = []
        lives: list[LiveRequest] = []
        depths: list[tuple[Key, int]] = []
        for (n, live), share in zip(asked, shares, strict=True):
            if depth := min(share, self._room(live)):
                places.append(n)
                lives.append(live)
                depths.append((live.key, depth))
        return places, lives, depths

    def sampled(self, counts: Sequence[int]) -> Iteration:
        """Process and return the oldest iteration in flight: each request's new tokens, accepted ones included."""
        with self.inside:
            counted, oldest = not self.tracker.drops_next, self.tracker.in_flight[0]
            if self.departing:
                # What follows the end of a response is no evidence about drafts.
                oldest.drafts = {name: each for name, each in oldest.drafts.items() if name not in self.departing}
            iteration = self.tracker.verified(counts)
            if self.waiting:
                now_s = self.tracker.clock()
                for name, count in zip(iteration.request_ids, counts, strict=True):
                    if count and (live := self.waiting.pop(name, None)) is not None:
                        live.first_token_s = now_s
            if counted:
                self._sampled.add(iteration, counts)
            if iteration.drafts:
                self._learn(iteration)
                # Not kept until the rollout ends.
                iteration.drafts = {}
            self.tracker.sampled(iteration)
        for observer in self.observers:
            observer.returned()
        if self.departing:
            flying = self.tracker.in_flight
            self.land(self.departing.keys() - set().union(*(each.request_ids for each in flying)))
        return iteration

    def settle(self) -> None:
        """Add the tokens sampled so far to `computed` of their requests."""
        for name, num_tokens in self._sampled.drain():
            if (live := self.live.get(name) or self.departing.get(name)) is not None:
                live.computed += num_tokens

    def _learn(self, iteration: Iteration) -> None:
        """Add the accepted tokens of each draft to its request, and deliver them to its drafter."""
        drafter = iteration.verified.strategy.drafter
        verified: defaultdict[str, list[tuple[Key, int, int]]] = defaultdict(list)
        for name, drafted, accepted in zip(iteration.request_ids, iteration.drafted, iteration.accepted, strict=True):
            if not drafted or (live := self.live.get(name)) is None:
                continue
            live.drafted += drafted
            live.accepted += accepted
            live.recent_acceptance = recent_acceptance(live.recent_acceptance, float(accepted))
            verified[iteration.drafters.get(name) or live.drafter or drafter].append((live.key, drafted, accepted))
        for name, drafts in verified.items():
            self.drafters.observe(name, drafts)
            # Where training predicted an acceptance, the canary compares with that.
            if name != self.drafters.learned or not self.drafters.canary.predicted:
                self.alarm.observe(name, [each[1:] for each in drafts], has_network=self.drafters.has_network(name))

    def end_iteration(self) -> None:
        """End the last iteration at its own end: the engine waits, with requests that continue later."""
        with self.inside:
            self.tracker.end_iteration()

    def idle(self) -> None:
        """End the last iteration, with no request left, and drop the choice for the next one."""
        with self.inside:
            self.tracker.pause()
            self.alarm.idle()
            self.driver.idle()
        for observer in self.observers:
            observer.idle()


def _digest(policy: Policy) -> str:
    return hashlib.sha256(policy.model_dump_json().encode()).hexdigest()[:8]
