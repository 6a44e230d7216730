"""The requests of one RL step, as columns: a request is an index, in workload order."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa

from tltlab.acceptance.base import Acceptance, Key
from tltlab.arrays import Array, Flags, Floats, Ints, Words
from tltlab.errors import ConfigError
from tltlab.planning.composition import EarlierEpoch, Regrouped, Truncated, Workload
from tltlab.traces.schema import KEY
from tltlab.traces.trace import Trace

from .random_numbers import request_seeds, uniforms

Prefix = Literal["kept", "recomputed"]


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Responses with tool calls, each of several requests: a turn's tokens, a tool, the next turn behind its output.

    By request: `after` is the request of the next turn, -1 where there is none, `tool_s` the seconds away from the
    engine before it, 0 for a first turn, and `cached_tokens` what of its prompt is in the cache from the turn before.
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

    def __init__(self, turns: Turns, limit: int | None) -> None:
        self.turns = turns
        self.waited_s = 0.0
        self._free_s = None if limit is None else [0.0] * limit

    def call(self, request: int, now: float) -> float:
        """When the tool before `request`, called now, is done; calls come in the order of time. O(log limit)."""
        start_s = now
        if self._free_s is not None:
            start_s = max(now, self._free_s[0])
            heapq.heapreplace(self._free_s, start_s + self.turns.tool_s[request])
            self.waited_s += start_s - now
        return start_s + self.turns.tool_s[request]


BLOCK_TOKENS = 16
"""Tokens of a block of the KV cache, vLLM's default: only whole blocks are shared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Residents:
    """Requests that run on several workers: a row for each worker, who lacks least comes first, all flush right.

    So n - c requests are there while column c of n is the next to end; what stands before a shorter row is not
    `present`. `remaining` tokens are lacked, `context` is there, summed from a column to the last in `context_sums`.
    First each worker prefills `to_prefill` tokens.
    """

    requests: Ints
    remaining: Floats
    context: Floats
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
            requests=requests, remaining=lacks, context=contexts, context_sums=suffix_sums(contexts), present=present,
            to_prefill=np.array(to_prefill),
        )  # fmt: skip

    def but_last(self, count: int) -> Residents:
        """Without the `count` of each worker that lack most, whose context is held all the same."""
        columns = slice(self.remaining.shape[1] - count)
        return Residents(
            requests=self.requests[:, columns], remaining=self.remaining[:, columns], context=self.context[:, columns],
            context_sums=self.context_sums[:, columns], present=self.present[:, columns], to_prefill=self.to_prefill,
        )  # fmt: skip


def suffix_sums(values: Floats) -> Floats:
    """The sum of each row from each column to the last."""
    return np.cumsum(values[:, ::-1], axis=1)[:, ::-1]


@dataclass(frozen=True, kw_only=True)
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
    _seeds: dict[int, Words] = field(default_factory=dict, init=False, repr=False, compare=False)
    _levels: dict[tuple[str, int], tuple[Acceptance, Floats]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _placed: list[tuple[list[list[int]], Ints, Residents]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

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

    def __getstate__(self) -> dict[str, Any]:
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

    def levels(self, model: Acceptance, drafter: str, seed: int) -> Floats:
        """The level that a model draws for each, drawn once as long as the model stays the same."""
        entry = self._levels.get((drafter, seed))
        if entry is None or entry[0] is not model:
            entry = self._levels[drafter, seed] = model, model.levels(drafter, self.keys, seed)
        return entry[1]

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

        The shortest prompt of a group is what its samples have in common: a response that goes on has its own text
        behind it. Zeros without prefix caching, and for a sample that is alone.
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


def requests_by_step(
    trace: Trace,
    rl_steps: Sequence[int] | None = None,
    max_response_tokens: int | None = None,
    *,
    prefix: str = "kept",
    tool_s: float | None = None,
) -> list[Requests]:
    """Workload joined with outcomes, per RL step in ascending order; ConfigError for steps that are not there.

    `max_response_tokens` cuts longer responses, as a run with that cap would have; a turn that is cut is the last. The
    `prefix` of each further turn stays in the cache or is computed again, and `tool_s` is the time of tools without a
    time in the trace. ConfigError for turns that do not follow each other, and for such tools where it is None.
    """
    if max_response_tokens is not None and max_response_tokens < 1:
        raise ConfigError(f"max_response_tokens must be at least 1, got {max_response_tokens}")
    recorded = trace.rl_steps
    chosen = recorded if rl_steps is None else sorted(set(rl_steps))
    if missing := [s for s in chosen if s not in recorded]:
        span = f"{recorded[0]}..{recorded[-1]}" if recorded else "none"
        raise ConfigError(f"the trace has no rl_step {missing[0]}; its RL steps are {span}")
    if not chosen:
        raise ConfigError("no RL step to simulate: the selection is empty")
    joined = _Joined.of(trace if chosen == recorded else trace.select(chosen))
    if max_response_tokens is not None:
        joined = joined.first_turns(max_response_tokens)
    steps = joined.requests(chosen, max_response_tokens)
    if not joined.column("turn").any():
        return list(steps)
    return [replace(step, turns=_turns(step, prefix, tool_s)) for step in steps]


@dataclass(frozen=True, kw_only=True)
class _Joined:
    """Rows of workload and outcomes that belong together, in the workload's order: row `workload[i]` of the one table
    and row `outcomes[i]` of the other."""

    tables: tuple[pa.Table, pa.Table]
    workload: Ints
    outcomes: Ints

    @classmethod
    def of(cls, trace: Trace) -> _Joined:
        """Join the tables of a trace; they are in the same order as a rule."""
        tables = [trace.arrow(name) for name in ("workload", "outcomes")]
        workload, outcomes = (table for table in tables if table is not None)
        if all(workload[name].equals(outcomes[name]) for name in KEY):
            at = np.arange(len(workload))
            return cls(tables=(workload, outcomes), workload=at, outcomes=at)
        left, right = (
            table.select(list(KEY)).to_pandas().assign(**{name: np.arange(len(table))})
            for name, table in (("of_workload", workload), ("of_outcomes", outcomes))
        )
        both = left.merge(right, on=list(KEY), how="inner", sort=False)
        return cls(
            tables=(workload, outcomes),
            workload=both["of_workload"].to_numpy(),
            outcomes=both["of_outcomes"].to_numpy(),
        )

    def first_turns(self, cap: int) -> _Joined:
        """Without the turns after the first of a response that is longer than `cap` tokens."""
        turns = self.column("turn")
        if not (turns > 0).any():
            return self
        keys = self.tables[0].select(list(KEY[:3])).take(self.workload).to_pandas()
        longer = self.column("response_tokens") > cap
        ends = keys[longer].assign(last=turns[longer]).groupby(list(KEY[:3]))["last"].min()
        kept = ~(turns > keys.join(ends, on=list(KEY[:3]))["last"].to_numpy())
        return replace(self, workload=self.workload[kept], outcomes=self.outcomes[kept])

    def column(self, name: str) -> Ints:
        """A column of whole numbers."""
        table, at = self._place(name)
        return np.asarray(table[name].to_numpy(), np.int64)[at]

    def _place(self, name: str) -> tuple[pa.Table, Ints]:
        workload, outcomes = self.tables
        return (workload, self.workload) if name in workload.column_names else (outcomes, self.outcomes)

    def requests(self, rl_steps: Sequence[int], cap: int | None) -> Iterator[Requests]:
        """Yield the requests of each of these RL steps, cut at `cap` tokens. ConfigError for one without a row."""
        rl_step = self.column("rl_step")
        order = np.argsort(rl_step, kind="stable")
        ends = np.searchsorted(rl_step[order], [[step, step + 1] for step in rl_steps])
        names = ("prompt_tokens", "max_response_tokens", "response_tokens", "policy_version")
        prompts, caps, lengths, version = map(self.column, names)
        if cap is not None:
            caps, lengths = np.minimum(caps, cap), np.minimum(lengths, cap)
        workers = np.full(len(rl_step), np.nan)
        if "worker" in self.tables[1].column_names:
            workers = np.asarray(self.tables[1]["worker"].to_numpy(), np.float64)[self.outcomes]
        for step, (first, last) in zip(rl_steps, ends.tolist(), strict=True):
            if first == last:
                raise ConfigError(f"rl_step {step} has no outcomes to replay")
            at = order[first:last]
            yield Requests(
                rl_step=int(step),
                policy_version=int(version[at[0]]),
                prompts=prompts[at],
                caps=caps[at],
                lengths=lengths[at],
                recorded_worker=workers[at],
                make_keys=partial(self._keys, at),
                make_rows=partial(self._rows, at, cap),
            )

    def _keys(self, at: Ints) -> list[Key]:
        columns = (self.tables[0][name].take(self.workload[at]).to_pylist() for name in KEY)
        return list(zip(*columns, strict=True))

    def _rows(self, at: Ints, cap: int | None) -> pd.DataFrame:
        workload, outcomes = self.tables
        others = [name for name in outcomes.column_names if name not in KEY]
        parts = [workload.take(self.workload[at]), outcomes.select(others).take(self.outcomes[at])]
        rows = pd.concat([part.to_pandas() for part in parts], axis=1)
        return rows if cap is None else cut(rows, cap)


def changed(requests: Requests, workload: Workload | None, seed: int) -> Requests:
    """The requests as a system that changes them has them; what it draws is a hash of (seed, key).

    A turn that is cut short is the last; what is kept of an earlier epoch covers whole turns and their tools, then a
    part of one.
    """
    if workload is None:
        return requests
    if isinstance(workload, Truncated):
        caps = _shorter(requests.caps, workload.share)
        if requests.turns is not None:
            over = requests.lengths > caps
            ends = [[n for n, i in enumerate(chain, 1) if over[i]][:1] or [len(chain)] for chain in requests.chains]
            chains = [chain[:end] for chain, (end,) in zip(requests.chains, ends, strict=True)]
            requests = of_responses(requests, [(requests, chain, requests.keys[chain[0]]) for chain in chains])
            caps = _shorter(requests.caps, workload.share)
        lengths, whole = np.minimum(requests.lengths, caps), requests
        return replace(
            requests,
            caps=caps,
            lengths=lengths,
            make_rows=lambda: whole.rows.assign(response_tokens=lengths, max_response_tokens=caps),
        )
    chains = requests.chains
    keys = [requests.keys[chain[0]] for chain in chains]
    luck = uniforms(request_seeds(seed, keys), np.full(len(keys), _APART), 1)[:, 0]
    if isinstance(workload, EarlierEpoch):
        return _after_prefix(requests, workload.keep, luck)
    assert isinstance(workload, Regrouped)
    members: dict[str, list[int]] = {}
    for n, key in enumerate(keys):
        members.setdefault(key[1], []).append(n)
    groups = list(members.values())
    # Every factor-th prompt stands for those up to the next one: samples of its own responses, drawn again.
    source = list(range(len(chains)))
    for at, group in enumerate(groups):
        first = groups[at - at % workload.factor]
        for n in group:
            source[n] = first[int(luck[n] * len(first))] if group is not first else n
    return of_responses(requests, [(requests, chains[m], (keys[m][0], keys[m][1], n, 0)) for n, m in enumerate(source)])


def _shorter(caps: Ints, share: float) -> Ints:
    shorter: Ints = np.maximum(1, (caps * share).astype(np.int64))
    return shorter


def _after_prefix(requests: Requests, keep: float, luck: Floats) -> Requests:
    """Each response without its first tokens, up to the first that is not kept: they are part of a prompt."""
    with np.errstate(divide="ignore"):
        runs = np.floor(np.log1p(-luck) / np.log(keep)) if keep < 1 else np.full(len(luck), np.inf)
    prompts, lengths, turns = list(requests.prompt_tokens), list(requests.response_tokens), requests.turns
    first: list[int] = []
    tool_s, cached = ([], []) if turns is None else (list(turns.tool_s), list(turns.cached_tokens))
    for chain, run in zip(requests.chains, runs.tolist(), strict=True):
        for i in chain:
            prefix_tokens = int(min(run, lengths[i]))
            run, prompts[i], lengths[i] = run - prefix_tokens, prompts[i] + prefix_tokens, lengths[i] - prefix_tokens
            if turns is not None:
                # Its tool need not run again, and nothing of it is in this engine's cache.
                tool_s[i], cached[i] = 0.0, 0
            if lengths[i]:
                break
        first.append(i)
    if turns is not None:
        turns = replace(turns, tool_s=tool_s, cached_tokens=cached, first=first)
    left = np.array(lengths, np.int64)
    return replace(
        requests, prompts=np.array(prompts, np.int64), lengths=left, kept=requests.lengths - left, turns=turns
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


_APART = 1 << 40
"""Where these draws begin in a request's: no iteration comes so far."""


def cut(rows: pd.DataFrame, max_response_tokens: int) -> pd.DataFrame:
    """Responses under a lower cap: longer ones end there, with finish reason "length"."""
    longer = rows["response_tokens"] > max_response_tokens
    return rows.assign(
        response_tokens=rows["response_tokens"].clip(upper=max_response_tokens),
        max_response_tokens=rows["max_response_tokens"].clip(upper=max_response_tokens),
        finish_reason=rows["finish_reason"].astype(object).where(~longer, "length"),
    )


def with_lengths(requests: Requests, lengths: list[int], prefix: str) -> Requests:
    """The requests of a trace with other response lengths; `rows` stay as they are."""
    requests = replace(requests, lengths=np.array(lengths, np.int64))
    return replace(requests, turns=_turns(requests, prefix, None))


def _turns(requests: Requests, prefix: str, tool_s: float | None) -> Turns | None:
    """Which requests follow each other; None where every response has one turn. A turn without tokens is the last."""
    keys = requests.keys
    if not any(key[3] for key in keys):
        return None
    rows = requests.rows
    at = {key: i for i, key in enumerate(keys)}
    columns = {name: rows[name].tolist() if name in rows else [None] * len(rows) for name in _TOOL_TIMES}
    after, seconds, cached = [-1] * len(keys), [0.0] * len(keys), [0] * len(keys)
    for i, key in enumerate(keys):
        if not key[3]:
            continue
        name = f"turn {key[3]} of prompt {key[1]!r}, sample {key[2]}, RL step {key[0]}"
        before = at.get((*key[:3], key[3] - 1))
        if before is None:
            raise ConfigError(f"{name}: there is no turn {key[3] - 1} before it; turns are numbered 0, 1, 2 ...")
        times = [columns["tool_s"][i], columns["t_submit"][i], columns["t_finish"][before]]
        away, submitted, finished = (None if value is None or pd.isna(value) else float(value) for value in times)
        if away is None and submitted is not None and finished is not None:
            away = submitted - finished
            if away < 0:
                raise ConfigError(
                    f"{name}: it began at {submitted:g} s, before the turn before it ended, at {finished:g} s"
                )
        away = tool_s if away is None else away
        if away is None:
            raise ConfigError(f"{name}: how long its tool took is not known: fill in tool_s, or give --tool-seconds")
        seconds[i] = away
        if requests.response_tokens[before] and requests.response_tokens[i]:
            after[before] = i
            context_tokens = requests.prompt_tokens[before] + requests.response_tokens[before]
            cached[i] = min(context_tokens, requests.prompt_tokens[i]) if prefix == "kept" else 0
    return Turns(
        after=after, tool_s=seconds, cached_tokens=cached, first=[i for i, key in enumerate(keys) if not key[3]]
    )


_TOOL_TIMES = ("tool_s", "t_submit", "t_finish")
