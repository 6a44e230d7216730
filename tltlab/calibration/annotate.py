"""Accepted lengths of drafters at each position of recorded text, by replay: the rows of acceptance.parquet.

A greedy draft x is accepted with the target's probability of x, which is the probability that the recorded token is x.
The number of leading drafted tokens equal to the recorded ones is therefore an exact sample of the accepted tokens,
without the bonus token. It holds at any temperature, for the policy that sampled the text.

An engine drafts at the borders of its iterations; here every position has a draft. Between the tokens of one
iteration it is made before later requests of the batch got theirs. Drafts have the depth that is asked for: a shorter
draft of an n-gram or learned drafter is the longer one cut, while a suffix drafter may follow another match then.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

import numpy as np
import pandas as pd
import pyarrow as pa

from tltlab.arrays import Bytes
from tltlab.drafters.base import Drafter
from tltlab.errors import ConfigError
from tltlab.records import Json
from tltlab.traces.drafts import RecordedResponse, recorded_responses, walked_drafts
from tltlab.traces.schema import TABLES, UNIQUE
from tltlab.traces.trace import Trace

MAX_DEPTH = 255
"""Accepted lengths are stored in a byte."""


class DraftedBy(NamedTuple):
    """A drafter as acceptance.parquet names it: `age` in RL steps since its last update, 0 for what never ages."""

    drafter: str
    age: int = 0


class Annotator(Protocol):
    """Something that drafts along recorded text."""

    def annotate(self, responses: Sequence[RecordedResponse], max_depth: int) -> list[Bytes]:
        """Drafted tokens kept at each position of each response of one RL step; RL steps come in order."""


class ReplayedDrafter:
    """A model-free drafter that receives the recorded text in the order in which it came.

    As in the runtime each worker has its own, which sees its own responses as they grow and the other workers' when
    the RL step is over; where workers are unknown there is one. Tokens of the same time are all received before any
    draft at their end. `observe` is called as in a run that drafts `max_depth` tokens in every iteration.
    """

    def __init__(self, build: Callable[[], Drafter]):
        self._build = build
        self._drafters: dict[int | None, Drafter] = {}

    def annotate(self, responses: Sequence[RecordedResponse], max_depth: int) -> list[Bytes]:
        accepted = [np.zeros(len(r.token_ids), np.uint8) for r in responses]
        workers = {r.worker: [n for n, s in enumerate(responses) if s.worker == r.worker] for r in responses}
        for worker, indices in workers.items():
            drafter = self._drafters.setdefault(worker, self._build())
            drafter.begin(responses[indices[0]].key[0])
            _replay(drafter, [responses[n] for n in indices], [accepted[n] for n in indices], max_depth)
        by_end = sorted(responses, key=lambda r: r.times_s[-1] if len(r.times_s) else r.opened_s)
        for worker, drafter in self._drafters.items():
            for r in by_end:
                if r.worker != worker:
                    drafter.remember(r.key, r.prompt_token_ids, r.token_ids)
        return accepted


def annotate(
    trace: Trace, annotators: Mapping[DraftedBy, Annotator], max_depth: int
) -> Iterator[tuple[Trace, pa.Table]]:
    """Each RL step of a trace, and its rows of acceptance.parquet by these drafters; `drafter_updates` is unknown.

    Responses without recorded tokens have no rows. Raises ConfigError for a depth that a byte does not hold.
    """
    if not 1 <= max_depth <= MAX_DEPTH:
        raise ConfigError(f"max depth is {max_depth}: give 1 to {MAX_DEPTH} tokens")
    for step in trace.iter_rl_steps():
        responses = recorded_responses(step)
        parts = [TABLES["acceptance"].empty_table()]
        for drafter, annotator in annotators.items():
            parts.append(_rows(drafter, responses, annotator.annotate(responses, max_depth), max_depth))
        yield step, pa.concat_tables(parts)


def merged(old: pa.Table | None, new: pa.Table) -> pa.Table:
    """Rows of acceptance.parquet with new ones added; a row of the same response, drafter and age is replaced."""
    if old is None:
        return new
    keys, replaced = (pd.MultiIndex.from_frame(t.select(UNIQUE["acceptance"]).to_pandas()) for t in (old, new))
    return pa.concat_tables([old.filter(pa.array(~keys.isin(replaced), pa.bool_())), new])


class AcceptedLengths:
    """Gathers, per drafter, age and depth, the drafts that a run would make and the tokens kept of them."""

    def __init__(self, depths: tuple[int, ...]):
        self.depths = depths
        self._sums: dict[tuple[str, int], dict[int, tuple[int, int]]] = {}

    def add(self, acceptance: pa.Table) -> None:
        """Add rows of acceptance.parquet, all at least as deep as `depths`."""
        for (drafter, age), rows in acceptance.to_pandas().groupby(["drafter", "drafter_age"], sort=True):
            sums = self._sums.setdefault((str(drafter), int(age)), dict.fromkeys(self.depths, (0, 0)))
            for depth in self.depths:
                drafts = walked_drafts(rows, depth)
                num, accepted = sums[depth]
                sums[depth] = num + len(drafts), accepted + int(drafts["accepted"].sum())

    def result(self) -> list[Json]:
        """Per drafter and age: the mean accepted length by depth, in tokens per draft, bonus token included."""
        return [
            {
                "drafter": drafter,
                "drafter_age": age,
                "accepted_length": {str(d): 1.0 + kept / num if num else None for d, (num, kept) in sums.items()},
            }
            for (drafter, age), sums in sorted(self._sums.items())
        ]


def _rows(
    drafter: DraftedBy, responses: Sequence[RecordedResponse], accepted: Sequence[Bytes], max_depth: int
) -> pa.Table:
    num, keys = len(responses), list(zip(*(r.key for r in responses), strict=True)) or [()] * 4
    columns = [*keys, [drafter.drafter] * num, [drafter.age] * num, [None] * num, [max_depth] * num, list(accepted)]
    schema = TABLES["acceptance"]
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)


def _replay(drafter: Drafter, responses: Sequence[RecordedResponse], counts: Sequence[Bytes], max_depth: int) -> None:
    """Fill `counts` with what `drafter` has accepted at each position."""
    texts = [r.token_ids for r in responses]
    # Position at which the draft that a run would have made is verified, its length and what was kept of it.
    pending = [(0, 0, 0)] * len(responses)

    def draft(request: int, at: int) -> None:
        key = responses[request].key
        due, drafted, accepted = pending[request]
        if at == due and drafted:
            drafter.observe(key, drafted, accepted)
        tokens = drafter.propose(key, max_depth).tokens
        num_accepted = num_equal(tokens, texts[request], at)
        counts[request][at] = num_accepted
        if at == due:
            pending[request] = at + num_accepted + 1, len(tokens), num_accepted

    waiting = sorted(range(len(responses)), key=lambda n: responses[n].opened_s)[::-1]
    for time_s, arrived in _arrivals(responses):
        while waiting and responses[waiting[-1]].opened_s <= time_s:
            r = responses[waiting.pop()]
            drafter.open(r.key, r.prompt_token_ids)
            if not r.token_ids:
                drafter.close(r.key)
        for request, first, _ in arrived:
            if first == 0:
                draft(request, 0)
        for request, first, end in arrived:
            for at in range(first, end):
                if at > first:
                    draft(request, at)
                drafter.extend(responses[request].key, [texts[request][at]])
        for request, _, end in arrived:
            if end < len(texts[request]):
                draft(request, end)
            else:
                drafter.close(responses[request].key)


def num_equal(draft: Sequence[int], text: Sequence[int], at: int) -> int:
    """How many leading tokens of `draft` are what `text` continues with at position `at`.

    >>> num_equal([5, 6, 9], [4, 5, 6, 7], at=1)
    2
    """
    count = 0
    for drafted, recorded in zip(draft, text[at : at + len(draft)], strict=False):
        if drafted != recorded:
            break
        count += 1
    return count


def _arrivals(responses: Sequence[RecordedResponse]) -> Iterator[tuple[float, list[tuple[int, int, int]]]]:
    """Tokens in order of time, as (time, [(response, first position, end), ...]); what comes at once is one item.

    In an item come first the responses that end with it, as in the runtime.
    """
    lengths = [len(r.token_ids) for r in responses]
    request = np.repeat(np.arange(len(responses)), lengths)
    at = np.concatenate([np.arange(0), *(np.arange(n) for n in lengths)])
    time = np.concatenate([np.zeros(0), *(r.times_s for r in responses)])
    starts = np.flatnonzero((np.diff(request, prepend=-1) != 0) | (np.diff(time, prepend=np.nan) != 0))
    request, time, first = request[starts], time[starts], at[starts]
    end = first + np.diff(np.append(starts, len(at)))
    goes_on = end < np.asarray(lengths, np.int64)[request]
    order = np.lexsort((request, goes_on, time))
    events = zip(time[order].tolist(), request[order].tolist(), first[order].tolist(), end[order].tolist(), strict=True)
    for time_s, group in groupby(events, key=lambda event: event[0]):
        yield time_s, [event[1:] for event in group]
