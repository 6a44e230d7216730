"""The requests of one RL step, as columns: a request is an index, in workload order."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
import pandas as pd

from tltlab.arrays import Array, Flags, Floats, Ints, Words
from tltlab.costs.stages import StepWorkload
from tltlab.errors import ConfigError
from tltlab.records import Json, frozen
from tltlab.state import Key

from .random_numbers import request_seeds


@frozen
class Turns:
    """Responses with tool calls, each of several requests: a turn's tokens, a tool, the next turn behind its output.

    By request: `after` is the request of the next turn, or -1. `tool_s` are the seconds away from the engine before a
    turn, 0 for a first one. `cached_tokens` of its prompt are in the cache from the previous turn.
    `first` are the requests of first turns.
    """

    after: list[int]
    tool_s: list[float]
    cached_tokens: list[int]
    first: list[int]

    def chain(self, request: int) -> Iterator[int]:
        """A request and those of the turns after it."""
        while request >= 0:
            yield request
            request = self.after[request]


class Tools:
    """The tools that responses call between their turns; at most `limit` run at once, others wait in order."""

    def __init__(self, turns: Turns, limit: int | None):
        self.turns = turns
        self.waited_s = 0.0
        self._free_s = None if limit is None else [0.0] * limit

    def call(self, request: int, now: float) -> float:
        """Return when the tool before `request`, called now, is done; calls are in order of time. O(log limit)."""
        start_s = now
        if self._free_s is not None:
            start_s = max(now, self._free_s[0])
            heapq.heapreplace(self._free_s, start_s + self.turns.tool_s[request])
            self.waited_s += start_s - now
        return start_s + self.turns.tool_s[request]


BLOCK_TOKENS = 16
"""Tokens of a block of the KV cache, vLLM's default: only whole blocks are shared."""


@frozen
class Residents:
    """Requests that run on several workers: a row for each worker, by tokens lacked, the fewest first, flush right.

    So n - c requests are there while column c of n is the next to end; what stands before a shorter row is not
    `present`. `remaining` tokens are lacked; `context_sums` are tokens that are there, from a column to the last.
    First each worker prefills `to_prefill` tokens.
    """

    requests: Ints
    remaining: Floats
    context_sums: Floats
    present: Flags
    to_prefill: Floats

    @classmethod
    def of(cls, rows: Sequence[Ints], remaining: Array, context: Array, to_prefill: Sequence[float]) -> Residents:
        """The requests of each worker; `remaining` and `context` are by request of the rollout."""
        n = max(map(len, rows), default=0)
        requests, present = np.zeros((len(rows), n), np.int64), np.zeros((len(rows), n), dtype=bool)
        for w, row in enumerate(rows):
            requests[w, n - len(row) :] = row[np.argsort(remaining[row], kind="stable")]
            present[w, n - len(row) :] = True
        lacks, contexts = (np.where(present, values[requests], 0.0) for values in (remaining, context))
        return cls(
            requests=requests, remaining=lacks, context_sums=np.cumsum(contexts[:, ::-1], axis=1)[:, ::-1],
            present=present, to_prefill=np.array(to_prefill),
        )  # fmt: skip

    def but_last(self, count: int) -> Residents:
        """Return all but the `count` of each worker that lack most; the context of those counts all the same."""
        columns = slice(self.remaining.shape[1] - count)
        return Residents(
            requests=self.requests[:, columns], remaining=self.remaining[:, columns],
            context_sums=self.context_sums[:, columns], present=self.present[:, columns], to_prefill=self.to_prefill,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Requests:
    """One RL step's workload with what became of it, as arrays by request. `recorded_worker` is nan where unknown.

    A request is a response, or a turn of one: then `turns` has the order of turns. With `prefix_caching` the
    samples of a group on one worker share their prompt's keys and values. `make_keys` and `make_rows` return the key of
    each, and a table with a row for each, when they are first needed: most simulations need neither. `kept` tokens of a
    response are from an earlier epoch, part of its prompt here and not of its length.
    """

    rl_step: int
    policy_version: int
    prompts: Ints
    caps: Ints
    lengths: Ints
    recorded_worker: Floats
    make_keys: Callable[[], list[Key]]
    make_rows: Callable[[], pd.DataFrame]
    turns: Turns | None = None
    prefix_caching: bool = False
    kept: Ints | None = None
    _seeds: dict[int, Words] = field(default_factory=dict, init=False)
    _work: dict[int, StepWorkload] = field(default_factory=dict, init=False)
    _placed: list[tuple[list[list[int]], Ints, Residents]] = field(default_factory=list, init=False)

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def keys(self) -> list[Key]:
        """The trace's key of each."""
        return self.make_keys()

    @property
    def rows(self) -> pd.DataFrame:
        """Columns of the trace's workload and outcomes."""
        return self.make_rows()

    def work(self, num_updates: int) -> StepWorkload:
        """Return the work of the stages after the rollout."""
        if num_updates not in self._work:
            self._work[num_updates] = StepWorkload.of_rows(self.rows, num_updates=num_updates)
        return self._work[num_updates]

    @cached_property
    def prompt_tokens(self) -> list[int]:
        """`prompts` as a list."""
        return list(self.prompts.tolist())

    @cached_property
    def max_response_tokens(self) -> list[int]:
        """`caps` as a list."""
        return list(self.caps.tolist())

    @cached_property
    def response_tokens(self) -> list[int]:
        """`lengths` as a list."""
        return list(self.lengths.tolist())

    @property
    def trained_tokens(self) -> Ints:
        """Tokens of each response that the RL step trains on."""
        return self.lengths if self.kept is None else self.lengths + self.kept

    def __getstate__(self) -> Json:
        """Other processes receive keys and rows in place of what they are made from, which is a whole trace."""
        made = {"make_keys": partial(list, self.keys), "make_rows": partial(pd.DataFrame, self.rows)}
        return vars(self) | made

    @cached_property
    def uncached(self) -> Ints:
        """Tokens of each prompt that neither a turn before it nor another sample of its group can have in the cache."""
        cached = 0 if self.turns is None else np.array(self.turns.cached_tokens, np.int64)
        uncached: Ints = self.prompts - np.maximum(self.shared, cached)
        return uncached

    def _to_prefill(self, requests: Ints) -> float:
        """Tokens to prefill where all of these are admitted at once to a worker that has none of their prompts."""
        if not self.prefix_caching:
            return float(self.prompts[requests].sum())
        shared = self.shared[requests]
        _, first = np.unique(self.groups[requests], return_index=True)
        return float(self.prompts[requests].sum() - shared.sum() + shared[first].sum())

    def seeds(self, seed: int) -> Words:
        """The `request_seeds` of all of them: a hash each, calculated once for all workers and policies."""
        if seed not in self._seeds:
            self._seeds[seed] = request_seeds(seed, self.keys)
        return self._seeds[seed]

    def placed(self, queues: list[list[int]]) -> tuple[Ints, Residents]:
        """The worker of each request, and all that have tokens as they begin: worked out once for all policies."""
        if not (self._placed and self._placed[0][0] is queues):
            worker_of, arrays = np.zeros(len(self), np.int64), [np.array(queue, np.int64) for queue in queues]
            for worker, queue in enumerate(arrays):
                worker_of[queue] = worker
            rows = [queue[self.lengths[queue] > 0] for queue in arrays]
            residents = Residents.of(rows, self.lengths, self.prompts, [self._to_prefill(row) for row in rows])
            self._placed[:] = [(queues, worker_of, residents)]
        return self._placed[0][1:]

    @cached_property
    def chains(self) -> list[list[int]]:
        """The requests of each response: one for each of its turns."""
        turns = self.turns
        return [[i] for i in range(len(self))] if turns is None else [list(turns.chain(i)) for i in turns.first]

    def whole(self) -> Requests:
        """A request for each response: its first turn's, with the tokens of all its turns."""
        if self.turns is None:
            return self
        first = self.turns.first
        return replace(
            self,
            prompts=self.prompts[first],
            caps=self.caps[first],
            lengths=np.array([self.lengths[chain].sum() for chain in self.chains], np.int64),
            recorded_worker=self.recorded_worker[first],
            make_keys=lambda: [self.keys[i] for i in first],
            make_rows=lambda: self.rows.iloc[first],
            turns=None,
        )

    @cached_property
    def groups(self) -> Ints:
        """The number of each request's group: samples of one prompt in one RL step."""
        number: dict[tuple[int, str], int] = {}
        return np.array([number.setdefault(key[:2], len(number)) for key in self.keys], np.int64)

    @cached_property
    def shared(self) -> Ints:
        """Tokens of each prompt that another sample of its group has in the cache: whole blocks, never the last token.

        The samples of a group share its shortest prompt; in a continued response its own text follows. Zeros without
        prefix caching, and for a sample that is alone.
        """
        if not self.prefix_caching or not len(self):
            return np.zeros(len(self), np.int64)
        shortest = np.full(int(self.groups.max()) + 1, np.iinfo(np.int64).max)
        np.minimum.at(shortest, self.groups, self.prompts)
        common: Ints = np.maximum(shortest - 1, 0) // BLOCK_TOKENS * BLOCK_TOKENS
        return np.where(np.bincount(self.groups)[self.groups] > 1, common[self.groups], 0)


def check_fits(requests: Requests, capacity: int | None) -> None:
    """ConfigError when a single response is larger than the KV cache: it could never finish."""
    if capacity is None:
        return
    needed = requests.prompts + requests.lengths
    if len(over := np.flatnonzero(needed > capacity)):
        i = int(over[0])
        raise ConfigError(
            f"kv_capacity_tokens = {capacity} is too small: response {requests.keys[i]} alone needs {int(needed[i])}, "
            f"{requests.prompt_tokens[i]} of them for its prompt"
        )


def of_responses(step: Requests, responses: Sequence[tuple[Requests, Sequence[int], Key]]) -> Requests:
    """An RL step of responses from anywhere: where each is from, the requests of its turns there, and its new key."""
    each = [(source, i) for source, chain, _ in responses for i in chain]
    keys = [(step.rl_step, key[1], key[2], source.keys[i][3]) for source, chain, key in responses for i in chain]
    turns = None
    if any(source.turns is not None for source, _ in each):
        ends = np.cumsum([len(chain) for _, chain, _ in responses]).tolist()
        last = set(ends)
        turns = turns_of(each, [-1 if at in last else at for at in range(1, len(each) + 1)], [0, *ends[:-1]])
    return replace(
        step,
        prompts=np.array([source.prompts[i] for source, i in each], np.int64),
        caps=np.array([source.caps[i] for source, i in each], np.int64),
        lengths=np.array([source.lengths[i] for source, i in each], np.int64),
        recorded_worker=np.full(len(each), np.nan),
        make_keys=partial(list, keys),
        make_rows=partial(_rows_from, each, keys, step),
        turns=turns,
        kept=None if step.kept is None else np.array([0 if s.kept is None else s.kept[i] for s, i in each], np.int64),
    )


def _rows_from(each: Sequence[tuple[Requests, int]], keys: Sequence[Key], step: Requests) -> pd.DataFrame:
    """The rows of requests from anywhere, under new keys."""
    places: dict[int, list[int]] = {}
    for at, (source, _) in enumerate(each):
        places.setdefault(id(source), []).append(at)
    parts = [each[slots[0]][0].rows.iloc[[each[at][1] for at in slots]].set_axis(slots) for slots in places.values()]
    rows = (pd.concat(parts).sort_index() if parts else step.rows.iloc[:0]).assign(
        rl_step=step.rl_step, prompt_id=[key[1] for key in keys], sample=[key[2] for key in keys]
    )
    return rows.reset_index(drop=True)


def turns_of(
    each: Sequence[tuple[Requests, int]], after: list[int], first: list[int], going_on: Collection[int] = ()
) -> Turns:
    """Turns of requests from anywhere; before those `going_on` no tool runs, and nothing of them is in the cache."""
    origins = [(None if at in going_on else source.turns, i) for at, (source, i) in enumerate(each)]
    return Turns(
        after=after,
        tool_s=[0.0 if turns is None else turns.tool_s[i] for turns, i in origins],
        cached_tokens=[0 if turns is None else turns.cached_tokens[i] for turns, i in origins],
        first=first,
    )
