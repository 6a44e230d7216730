"""The scheduler of a worker, without a clock: requests wait, are prefilled and run as in vLLM.

A round: preempt the newest while the next iteration does not fit, otherwise admit waiting requests in order while they
fit. An iteration fits while the contexts plus one token per resident fit into the KV cache (drafted tokens are not
counted). A preempted request goes to the head of the queue and has its prompt and generated tokens prefilled again:
all of them, or with prefix caching those whose room others have taken since.

Where the cost model limits the tokens of an iteration (`max_num_batched_tokens`), prompts are prefilled in chunks.
Running requests have priority; the remaining tokens go to admitted prompts in order. A request decodes from the
iteration after its prompt is complete. Its KV space is taken at admission.

With prefix caching (`Requests.prefix_caching`) what a group's samples share of their prompt is prefilled by the first
of them on a worker, and held once while any of them is there. The prompt is assumed to stay in the cache from then on.
The cache of a preempted request is kept while nothing else needs the room, and freed from its end.
"""

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tltlab.costs.base import CostModel

from .batch import TOLERANCE_TOKENS, Batch


@dataclass(slots=True)
class Prefill:
    """An admitted request: `tokens` of its prompt and of its text before a preemption; `left_tokens` are to come."""

    request: int
    tokens: float
    left_tokens: float


class Scheduler:
    """A worker's requests: `waiting` with their generated tokens, `prefilling`, and the residents of `batch`.

    `joined` lists the requests that have entered the batch since `take_joined`. `cached_tokens` of prompts to come are
    in the KV cache, by request, those that came there first first: they stay while there is room, and need no prefill.
    """

    def __init__(self, prompt_tokens: Sequence[int], batch: Batch, costs: CostModel):
        self.batch = batch
        self.waiting: deque[tuple[int, float]] = deque()
        self.prefilling: deque[Prefill] = deque()
        self.joined: list[int] = []
        self.cached_tokens: dict[int, float] = {}
        self.kv_capacity_tokens: float = costs.kv_capacity_tokens or math.inf
        self.max_num_seqs: float = costs.max_num_seqs or math.inf
        self.max_num_batched_tokens: float = costs.max_num_batched_tokens or math.inf
        self._prompt_tokens = prompt_tokens
        self._prefix_caching = batch.requests.prefix_caching
        self._cached_groups: set[int] = set()
        """Groups whose prompt has been prefilled here."""

    @property
    def num_waiting(self) -> int:
        """Requests that do not decode yet."""
        return len(self.waiting) + len(self.prefilling)

    @property
    def is_done(self) -> bool:
        """True if no request is left."""
        return not (self.waiting or self.prefilling or len(self.batch) or self.batch.num_held)

    @property
    def room_tokens(self) -> float:
        """Tokens that the contexts may still grow by before the next iteration no longer fits."""
        if self.kv_capacity_tokens == math.inf:
            return math.inf
        taken_tokens = sum(prefill.tokens + 1 for prefill in self.prefilling) if self.prefilling else 0
        if self._prefix_caching:
            requests, holders = self.batch.requests, self._holders
            of_group = dict(zip(requests.groups[holders].tolist(), requests.shared[holders].tolist(), strict=True))
            taken_tokens -= int(requests.shared[holders].sum()) - sum(of_group.values())
        return self.kv_capacity_tokens - len(self.batch) - self.batch.context_tokens - taken_tokens

    @property
    def prefill_left_tokens(self) -> float:
        """Tokens of admitted requests that are still to be prefilled."""
        return sum(prefill.left_tokens for prefill in self.prefilling)

    def schedule(self) -> float:
        """Preempt or admit, and prefill what comes before the next iteration; returns the tokens of that.

        With nothing to decode, whole iterations go to the prompts until one of them is done.
        """
        if self.kv_capacity_tokens < math.inf and self.preempt():
            return 0.0
        if not (self.waiting or self.prefilling or self.cached_tokens):
            return 0.0
        if (tokens := self.admit_all()) is not None:
            return tokens
        self.admit()
        if not len(self.batch) and self.prefilling:
            limit = self.max_num_batched_tokens
            return self.prefill(max(1, math.ceil(self.prefilling[0].left_tokens / limit)) * limit)
        return self.prefill(math.inf) if self.max_num_batched_tokens == math.inf else 0.0

    def can_fit(self, room_tokens: float) -> bool:
        """True if the next iteration fits with this room, up to the rounding of expected tokens."""
        return room_tokens >= -TOLERANCE_TOKENS

    def preempt(self) -> bool:
        """Put the newest back to the head of the queue until the next iteration fits; whether any had to go."""
        preempted = False
        while len(self.batch) and len(self.batch) + len(self.prefilling) > 1 and not self.can_fit(self.room_tokens):
            if self.prefilling:
                newest = self.prefilling.pop()
                request, generated = newest.request, newest.tokens - self._prompt_tokens[newest.request]
                computed = newest.tokens - newest.left_tokens
            else:
                request, generated = self.batch.preempt()
                # The last token that it was given has not been computed yet.
                computed = self._prompt_tokens[request] + generated - 1
            self.waiting.appendleft((request, generated))
            if self._prefix_caching:
                self.cached_tokens[request] = computed
            preempted = True
        return preempted

    def admit_all(self) -> float | None:
        """Move the whole queue into an empty batch and return the tokens to prefill; None unless all of it fits."""
        waiting = self.waiting
        if len(self.batch) or self.prefilling or self.cached_tokens or self._prefix_caching or self.batch.num_held:
            return None
        if self.max_num_batched_tokens < math.inf or len(waiting) > self.max_num_seqs:
            return None
        tokens = sum(self._prompt_tokens[request] + generated for request, generated in waiting)
        if not self.can_fit(self.kv_capacity_tokens - tokens - len(waiting)):
            return None
        self.joined += [request for request, _ in waiting]
        self.batch.admit(*waiting)
        waiting.clear()
        return tokens

    def admit(self) -> None:
        """Take waiting requests into prefill, in order, while they fit; the first always does."""
        room_tokens, requests, prefilling = self.room_tokens, self.batch.requests, self.prefilling
        running = len(self.batch) + self.batch.num_held
        groups = set(requests.groups[self._holders].tolist()) if self._prefix_caching else set()
        while self.waiting and running + len(prefilling) < self.max_num_seqs:
            request, generated = self.waiting[0]
            tokens = self._prompt_tokens[request] + generated
            room_tokens -= tokens + 1
            if self._prefix_caching and int(requests.groups[request]) in groups:
                room_tokens += int(requests.shared[request])
            if (running or prefilling) and not self.can_fit(room_tokens):
                break
            self.waiting.popleft()
            reused = 0.0
            if self._prefix_caching or self.cached_tokens:
                reused = max(self._reused(request), self.cached_tokens.pop(request, 0.0))
            prefilling.append(Prefill(request, tokens, tokens - reused))
            if self._prefix_caching:
                groups.add(int(requests.groups[request]))
        if self.cached_tokens:
            self.evict(self.room_tokens)

    def evict(self, room_tokens: float) -> None:
        """Forget ends of what was kept longest until the rest fits into the room that contexts leave."""
        excess = sum(self.cached_tokens.values()) - max(0.0, room_tokens)
        while excess > 0:
            oldest = next(iter(self.cached_tokens))
            kept = self.cached_tokens[oldest] - excess
            excess = -kept
            if kept > 0:
                self.cached_tokens[oldest] = kept
            else:
                del self.cached_tokens[oldest]

    def _reused(self, request: int) -> int:
        """Tokens of its prompt that need no prefill; from now on those of its group have them too."""
        if not self._prefix_caching:
            return 0
        group = int(self.batch.requests.groups[request])
        if group not in self._cached_groups:
            self._cached_groups.add(group)
            return 0
        return int(self.batch.requests.shared[request])

    @property
    def _holders(self) -> list[int]:
        """Requests that hold room in the KV cache."""
        return [*self.batch.running, *(prefill.request for prefill in self.prefilling)]

    def prefill(self, tokens: float) -> float:
        """Spend up to `tokens` on the admitted requests in order, done ones join the batch; returns what was spent."""
        spent, done = 0.0, []
        while self.prefilling:
            first = self.prefilling[0]
            used = min(first.left_tokens, tokens - spent)
            spent += used
            if used < first.left_tokens - TOLERANCE_TOKENS:
                first.left_tokens -= used
                break
            self.prefilling.popleft()
            done.append((first.request, first.tokens - self._prompt_tokens[first.request]))
            self.joined.append(first.request)
        if done:
            self.batch.admit(*done)
        return spent

    def chunk(self, tokens_to_verify: float, limit: float) -> tuple[float, float]:
        """Iterations until a prompt may be done, at most `limit`, and the prompts' tokens in each of them."""
        if not self.prefilling:
            return limit, 0.0
        tokens = max(0.0, self.max_num_batched_tokens - len(self.batch) * tokens_to_verify)
        if self.kv_capacity_tokens < math.inf and len(self.batch) == 1:
            limit = 1  # A lone request always fits, but not beside prompts that hold room.
        left_tokens = self.prefilling[0].left_tokens
        if tokens == 0.0:
            return (limit if left_tokens > 0 else min(limit, 1.0)), 0.0
        return min(limit, max(1.0, (left_tokens + TOLERANCE_TOKENS) // tokens)), tokens

    def take(self, requests: Collection[int]) -> list[tuple[int, float]]:
        """Remove requests, running, waiting or prefilling; return each with its generated tokens."""
        taken = [each for each in self.unfinished() if each[0] in requests]
        for request in set(self.batch.running) & set(requests):
            self.batch.remove(request)
        self.waiting = deque(each for each in self.waiting if each[0] not in requests)
        self.prefilling = deque(each for each in self.prefilling if each.request not in requests)
        for request in requests:
            self.cached_tokens.pop(request, None)
        return taken

    def unfinished(self) -> list[tuple[int, float]]:
        """Requests that run, wait or are prefilled, with what each has generated."""
        prefilled = [(p.request, p.tokens - self._prompt_tokens[p.request]) for p in self.prefilling]
        return [*((r, self.batch.generated(r)) for r in self.batch.running), *self.waiting, *prefilled]

    def take_joined(self) -> list[int]:
        """Requests that entered the batch since the last call."""
        joined, self.joined = self.joined, []
        return joined
