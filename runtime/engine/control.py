"""What sits between a policy and an engine's scheduler: it asks the policy, shares out drafts and tells the outcomes.

`Control` is what a scheduler calls: it knows the requests and the drafters, has the policy in a `PolicyDriver` and the
iterations in a `Ledger`. Nothing here knows vLLM. In an iteration, in order:

    iteration_starts   the iteration before is over: its outcome goes to the policy
    scheduled          the batch is known: which choice it verifies, and the choice for the next iteration
    sampled            tokens are back: how many of each draft were kept
    drafts             drafts for the next iteration, by the choice made in `scheduled`
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from typing import Any, cast

import numpy as np

from tltlab.drafters.base import Key
from tltlab.drafters.budget import DraftBudget, UniformBudget
from tltlab.errors import ConfigError
from tltlab.policies.driver import PolicyDriver, refuse_needs
from tltlab.policies.policy import Policy
from tltlab.policies.selector import Selector
from tltlab.state import Choice, RequestState, StepOutcome, StepState, recent_acceptance
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.traces.rows import Row

from .drafter_pool import DrafterPool, ResponseTokens
from .failures import what_was_raised
from .ledger import Clock, Iteration, Ledger, Scheduled, Stopwatch
from .metrics import Samples, Tally

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Live:
    """One request in the engine, as policies see it: it has the fields of `tltlab.state.RequestState`, always current.

    `output` grows by itself; `drafter` made the draft in flight.
    """

    key: Key
    prompt: Sequence[int]
    output: Sequence[int]
    max_response_tokens: int
    recent_acceptance: float | None = None
    drafter: str = ""
    drafted: int = 0
    accepted: int = 0

    @property
    def prompt_id(self) -> str:
        return self.key[1]

    @property
    def generated_tokens(self) -> int:
        return len(self.output)


_DraftOrders = tuple[list[int], list[Live], list[tuple[Key, int]]]
"""The places of requests in a batch, they, and the depth for each key."""


def _room(live: Live) -> int:
    """How many tokens a request may be drafted: the target adds one itself, so the last is not worth drafting."""
    return max(live.max_response_tokens - len(live.output) - 1, 0)


class _BatchRequests(Sequence[Live]):
    """The requests of an iteration, looked up when a policy first reads them: most never do."""

    def __init__(self, ids: Sequence[str], live: Mapping[str, Live]) -> None:
        self._ids, self._live = ids, live

    @cached_property
    def _requests(self) -> list[Live]:
        return [self._live[i] for i in self._ids if i in self._live]

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, index: Any) -> Any:
        return self._requests[index]

    def __iter__(self) -> Iterator[Live]:
        return iter(self._requests)


class Control:
    """Asks a policy once per engine iteration, shares out its drafts, and has the outcome told to it.

    Requests come with `add` and leave with `finish`, at any time; `speechless` are those without a token yet. `begin`
    opens a rollout, `end` closes it and returns its rows (`Ledger`). An iteration calls `iteration_starts`,
    `scheduled`, `sampled` and, where drafts are made beside the scheduler, `drafts`: O(batch), but requests are looked
    at one by one only where there are drafts or the policy reads them. Where the engine has no policy `watched` stands
    for `scheduled`. `inside` runs while the ledger is kept, `deciding` while the policy chooses, shares out or learns.

    A policy that raises is logged once and asked no more: the engine decodes plainly, and `failure` has the sentence
    until another policy is set. A `tally` counts iterations for `metrics`.
    """

    def __init__(
        self,
        drafters: DrafterPool,
        *,
        worker: int = 0,
        overlapped: bool = False,
        clock: Clock = time.perf_counter,
        tally: Tally | None = None,
    ) -> None:
        self.drafters = drafters
        self.overlapped = overlapped
        self.driver = PolicyDriver(worker=worker)
        self.deciding = Stopwatch(clock)
        self._tally = tally or Tally()
        self.ledger = Ledger(self._tell, worker=worker, overlapped=overlapped, clock=clock, over=self._tally.add)
        self._policy: Policy | None = None
        self.inside = Stopwatch(clock)
        self.drafting = Stopwatch(clock)
        self.failure = ""
        self.live: dict[str, Live] = {}
        self.keys: set[Key] = set()
        self.speechless: set[str] = set()
        self._turn = 0
        # No request has room for fewer tokens than this, its last one left out.
        self._least_room = 0
        # The last batch, if all of it has generated: places and requests.
        self._batch_places: tuple[Sequence[str], list[int], list[Live]] | None = None

    def set_policy(self, policy: Policy, seed: Sequence[int]) -> None:
        """Choose by a fresh selector and budget of `policy`, drawing from a generator seeded with `seed`."""
        self.set_selector(policy.build(np.random.default_rng(list(seed))), policy.build_budget())
        self._policy = policy

    def replace_policy(self, policy: Policy, seed: Sequence[int]) -> None:
        """The same while requests run. ConfigError, and the policy in force stays, for what this engine cannot run."""
        for name, spec in policy.drafters.items():
            if self.drafters.specs.get(name) != spec:
                raise ConfigError(
                    f"drafter {name} is not set so in this engine, and drafters are there from its start: leave it out "
                    "of the policy, or start the engine with this one"
                )
        self.set_policy(policy, seed)

    def set_selector(self, selector: Selector | None, budget: DraftBudget | None = None) -> None:
        """Choose by `selector` from now on, None for plain decoding; ConfigError for what this engine cannot run."""
        self.drafters.use([NO_SPECULATION] if selector is None else selector.strategies)
        if selector is not None:
            selector.drafts_with(self.drafters.registry)
            refuse_needs(selector)
        self.driver.take(selector, budget)
        self.failure = ""

    def suspend(self) -> None:
        """Decode plainly until `resume`; the policy in force neither chooses nor learns."""
        self._suspended_policy = self.driver.selector, self.driver.budget
        self.set_selector(None)

    def resume(self) -> None:
        """Go back to the policy that `suspend` set aside."""
        self.set_selector(*self._suspended_policy)

    def remember(self, responses: Sequence[ResponseTokens]) -> None:
        """Let drafters and budget learn from responses generated elsewhere: (key, prompt, response) each."""
        self.drafters.remember(responses)
        self.learn_lengths([(key, len(response)) for key, _, response in responses])

    def learn_lengths(self, lengths: Sequence[tuple[Key, int]]) -> None:
        """Let the budget learn how many tokens responses that were generated elsewhere have."""
        for key, num_tokens in lengths:
            live = Live(key=key, prompt=(), output=range(num_tokens), max_response_tokens=max(num_tokens, 1))
            self._tell_budget(live)

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Seconds spent inside in all, of these deciding, and, beside them, feeding drafters and looking up."""
        return self.inside.seconds, self.deciding.seconds, self.drafting.seconds

    def metrics(self) -> Samples:
        """What iterations did by arm since the start, and the policy in force, by `metrics.FAMILIES`."""
        selector = digest = ""
        if self._policy is not None:
            selector = self._policy.selector.kind
            digest = hashlib.sha256(self._policy.model_dump_json().encode()).hexdigest()[:8]
        return {("policy_info", selector, digest, self.failure): 1, **self._tally.counts}

    def state_dict(self, history: bool = True) -> dict[str, Any]:
        """What a rollout depends on besides requests and weights: all that policy, budget and drafters have learned.

        It may share lists with what goes on learning. Without `history` it has no texts: they are to be recalled.
        """
        return {**self.driver.state_dict(), "drafters": self.drafters.state_dict(history)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to what `state_dict` gave; nothing may be running. A replay, now or to come, goes on where it was."""
        self.driver.load_state_dict(state)
        self.drafters.load_state_dict(state["drafters"])

    def begin(self, rl_step: int) -> None:
        """Open a rollout: its rows start empty and its clock at 0. Requests that still run go on."""
        self.ledger.begin(rl_step)
        if not self.live:
            self.ledger.clear()
            self.driver.forget()
        self.drafters.begin(rl_step)
        self.driver.begin(rl_step)

    def end(self) -> tuple[list[Row], list[Row], dict[Key, float]]:
        """Close the rollout: rows of its iterations, its decisions, and when each response's first token came."""
        with self.inside:
            self.ledger.end()
            return self.ledger.iterations, self.ledger.decisions, self.ledger.first_token_s

    def advance(self, rl_step: int) -> None:
        """Where nobody opens rollouts: let drafters forget what only served requests of RL steps before `rl_step`."""
        if not self.ledger.is_open and rl_step > self.ledger.rl_step:
            self.ledger.rl_step = rl_step
            self.drafters.begin(rl_step)

    def add(self, request_id: str, key: Key, prompt: Sequence[int], output: Sequence[int], max_tokens: int) -> Live:
        """A request enters the engine; `output` is a view that grows as it generates."""
        live = self.live[request_id] = Live(key=key, prompt=prompt, output=output, max_response_tokens=max_tokens)
        self._least_room = min(self._least_room, _room(live))
        self._batch_places = None
        self.keys.add(key)
        self.speechless.add(request_id)
        self.drafters.open(key, prompt, output)
        return live

    def finish(self, request_id: str) -> Live | None:
        """A request leaves, complete or aborted; what was known of it."""
        live = self.live.pop(request_id, None)
        self._batch_places = None
        self.speechless.discard(request_id)
        if live is not None:
            self.keys.discard(live.key)
            self.drafters.close(live.key)
            self._tell_budget(live)
        return live

    def _tell_budget(self, live: Live) -> None:
        """Let the budget learn how a request did that has ended."""
        try:
            self.driver.finished(cast(RequestState, live), drafted=live.drafted, accepted=live.accepted)
        except Exception as error:  # the budget may be anybody's code
            self._give_up(error)

    def iteration_starts(self) -> None:
        """The scheduler is about to put an iteration together."""
        self._turn += 1
        self._least_room -= self.drafters.max_depth + 1
        with self.inside:
            self.ledger.start()

    def scheduled(self, work: Scheduled) -> int:
        """Choose what the iteration drafts at its end; the depth for the engine's workers."""
        with self.inside:
            self._work, self._verified = work, self.ledger.schedule(work)
            if self.driver.selector is None:
                return 0
            choice = self.driver.again(len(work.request_ids), work.waiting, self.ledger.rl_step)
            if choice is None:
                choice = self._ask(work.request_ids)
            if choice is None:
                return 0
            self.ledger.choose(choice)
            return self.drafters.worker_depth(choice.strategy)

    def _ask(self, request_ids: Sequence[str]) -> Choice | None:
        """Ask the policy; None where it raises."""
        try:
            with self.deciding:
                choice = self.driver.ask(self._state(request_ids))
                self.drafters.check(choice.strategy)
        except Exception as error:  # the policy may be anybody's code
            self._give_up(error)
            return None
        return choice

    def _tell(self, choice: Choice, outcome: StepOutcome, iteration: Iteration) -> None:
        if self.failure:
            return
        try:
            with self.deciding:
                self.driver.tell(choice, outcome, iteration.rewarded)
        except Exception as error:  # the policy may be anybody's code
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Decode plainly from now on: the policy may be anybody's, and requests are being served."""
        if not self.failure:
            failure = f"the policy raised {what_was_raised(error)}"
            logger.error("%s; the engine goes on without speculation", failure)
            self.set_selector(None)
            self.failure = failure

    def watched(self, work: Scheduled, strategy: Strategy) -> None:
        """Take down an iteration that nobody of ours chooses for: at its end the engine drafts by `strategy`."""
        with self.inside:
            self.ledger.schedule(work)
            self.ledger.choose(Choice(strategy, learns=False), decided=False)

    def _state(self, request_ids: Sequence[str]) -> StepState:
        """What a policy sees of the iteration that was scheduled last."""
        work = self._work
        return StepState(
            rl_step=self.ledger.rl_step,
            worker=self.ledger.worker,
            batch=len(request_ids),
            waiting=work.waiting,
            context_tokens=work.context_tokens,
            strategy=self._verified,
            drafters=self.drafters,
            requests=cast(Sequence[RequestState], _BatchRequests(request_ids, self.live)),
        )

    @property
    def roomy(self) -> bool:
        """Whether, for all that is known, each next draft may have all tokens of the strategy: then none is trimmed."""
        deepest = self.ledger.in_force.strategy.reach
        return self._least_room >= deepest and isinstance(self.driver.budget, UniformBudget)

    def allot(self, request_ids: Sequence[str]) -> list[int]:
        """How many tokens the next draft of each request may have: its share, and never beyond what it may generate."""
        with self.inside:
            lives = [self.live[i] for i in request_ids]
            with self.deciding:
                shares = self._shares(self.ledger.in_force.strategy, lives)
            # Of all: who is not asked for now may be in a moment. A batch may be under way, of which nobody knows yet.
            self._least_room = min(map(_room, self.live.values()), default=0) - self.drafters.max_depth - 1
            return [min(share, _room(live)) for share, live in zip(shares, lives, strict=True)]

    def _shares(self, strategy: Strategy, lives: Sequence[Live]) -> list[int]:
        """How many tokens the next draft of each request gets of the budget."""
        if isinstance(self.driver.budget, UniformBudget) or not lives:
            return [strategy.reach] * len(lives)
        requests = cast(Sequence[RequestState], lives)
        state = replace(self._state(()), batch=len(lives), strategy=strategy, requests=requests)
        try:
            return self.driver.shares(state, strategy)
        except Exception as error:
            self._give_up(error)
            return [0] * len(lives)

    def drafts(
        self, request_ids: Sequence[str], learned: Sequence[list[int]], learned_s: float | None
    ) -> list[list[int]]:
        """What each request is to verify next, [] where nothing is drafted, as for those that are gone or have no token
        yet.

        `learned` are the workers' drafts, made in `learned_s` seconds, or empty where they made none.
        """
        since_s, late_s = self.ledger.clock(), 0.0
        strategy = self.ledger.in_force.strategy
        drafts: list[list[int]] = []
        if strategy.speculates:
            # In order of admission, not of the engine's slots: a trace then says what a drafter knew when it drafted.
            with self.drafting:
                late_s = self.drafters.feed(strategy, self._turn, self.ledger.clock)
            if self.drafters.behind(strategy):
                # What is kept of drafts that were made without all of the text says little of the choice.
                self.ledger.in_force = replace(self.ledger.in_force, learns=False)
            with self.inside:
                places, lives, depths = self._draft_orders(request_ids, strategy)
            with self.drafting:
                proposals = self.drafters.propose(
                    strategy, depths, [learned[n] for n in places] if learned else [[]] * len(depths)
                )
            drafts = [[] for _ in request_ids]
            for n, live, (drafter, draft) in zip(places, lives, proposals, strict=True):
                live.drafter, drafts[n] = drafter, draft
        self.ledger.drafted(since_s, learned_s or 0.0, late_s)
        return drafts

    def _draft_orders(self, request_ids: Sequence[str], strategy: Strategy) -> _DraftOrders:
        """Who is to be drafted for, and how deep."""
        if self._batch_places is not None and self._batch_places[0] is request_ids:
            _, places, lives = self._batch_places
        else:
            places, lives = [], []
            for n, live in enumerate(map(self.live.get, request_ids)):
                if live is not None and live.output:
                    places.append(n)
                    lives.append(live)
            # Until a request comes or goes.
            self._batch_places = (request_ids, places, lives) if len(lives) == len(request_ids) else None
        rooms = [live.max_response_tokens - len(live.output) - 1 for live in lives]
        with self.deciding:
            shares = self._shares(strategy, lives)
        shares = [share if share < room else max(room, 0) for share, room in zip(shares, rooms, strict=True)]
        if not all(shares):
            places, lives = list(compress(places, shares)), list(compress(lives, shares))
            shares = [share for share in shares if share]
        return places, lives, [(live.key, share) for live, share in zip(lives, shares, strict=True)]

    def sampled(self, work: Scheduled, counts: Sequence[int]) -> None:
        """The oldest iteration in flight is back: `counts` are the tokens each request got, drafts kept included."""
        with self.inside:
            if self.speechless:
                for request_id, count in zip(work.request_ids, counts, strict=True):
                    if count and request_id in self.speechless:
                        self.speechless.discard(request_id)
                        self.ledger.first_token(self.live[request_id].key)
            iteration = self.ledger.verified(work, counts)
            if work.drafts:
                self._learn(work.request_ids, iteration)
            self.ledger.sampled(iteration)

    def _learn(self, request_ids: Sequence[str], iteration: Iteration) -> None:
        """Count what was kept of each request's draft, and let its drafter know."""
        drafter = iteration.verified.strategy.drafter
        verified: defaultdict[str, list[tuple[Key, int, int]]] = defaultdict(list)
        for request_id, drafted, kept in zip(request_ids, iteration.drafted, iteration.accepted, strict=True):
            if not drafted or (live := self.live.get(request_id)) is None:
                continue
            live.drafted += drafted
            live.accepted += kept
            live.recent_acceptance = recent_acceptance(live.recent_acceptance, float(kept))
            verified[live.drafter or drafter].append((live.key, drafted, kept))
        for name, drafts in verified.items():
            self.drafters.observe(name, drafts)

    def idle(self) -> None:
        """Nothing is left to run: the last iteration is over, and what was chosen for the next one has no meaning."""
        with self.inside:
            self.ledger.pause()
            self.driver.idle()
