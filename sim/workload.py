"""The RL steps of a trace as the simulator's requests, and what systems change about them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
import pandas as pd
import pyarrow as pa

from tltlab.arrays import Floats, Ints
from tltlab.errors import ConfigError
from tltlab.planning.composition import EarlierEpoch, Regrouped, Truncated, Workload
from tltlab.sim.engine.random_numbers import request_seeds, uniforms
from tltlab.sim.engine.requests import Requests, Turns, of_responses
from tltlab.state import Key
from tltlab.traces.schema import KEY
from tltlab.traces.trace import Trace

Prefix = Literal["kept", "recomputed"]


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
    recorded = trace.rl_steps
    chosen = recorded if rl_steps is None else sorted(set(rl_steps))
    if missing := [s for s in chosen if s not in recorded]:
        span = f"{recorded[0]}..{recorded[-1]}" if recorded else "none"
        raise ConfigError(f"the trace has no rl_step {missing[0]}; its RL steps are {span}")
    if not chosen:
        raise ConfigError("no RL step to simulate: the selection is empty")
    joined = _joined(trace if chosen == recorded else trace.select(chosen))
    if max_response_tokens is not None:
        joined = _first_turns(joined, max_response_tokens)
    steps = _by_step(joined, chosen, max_response_tokens)
    if not _whole_numbers(joined, "turn").any():
        return list(steps)
    return [replace(step, turns=_turns(step, prefix, tool_s)) for step in steps]


def _joined(trace: Trace) -> pa.Table:
    """Rows of workload and outcomes that belong together, in the workload's order; they have it both, as a rule."""
    workload, outcomes = (table for table in map(trace.arrow, ("workload", "outcomes")) if table is not None)
    if not all(workload[name].equals(outcomes[name]) for name in KEY):
        left, right = (
            table.select(list(KEY)).to_pandas().assign(**{name: np.arange(len(table))})
            for name, table in (("of_workload", workload), ("of_outcomes", outcomes))
        )
        both = left.merge(right, on=list(KEY), how="inner", sort=False)
        workload = workload.take(both["of_workload"].to_numpy())
        outcomes = outcomes.take(both["of_outcomes"].to_numpy())
    for name in outcomes.column_names:
        if name not in workload.column_names:
            workload = workload.append_column(name, outcomes[name])
    return workload


def _whole_numbers(joined: pa.Table, name: str) -> Ints:
    return np.asarray(joined[name].to_numpy(), np.int64)


def _first_turns(joined: pa.Table, cap: int) -> pa.Table:
    """Without the turns after the first of a response that is longer than `cap` tokens."""
    turns = _whole_numbers(joined, "turn")
    if not turns.any():
        return joined
    keys = joined.select(list(KEY[:3])).to_pandas()
    longer = _whole_numbers(joined, "response_tokens") > cap
    ends = keys[longer].assign(last=turns[longer]).groupby(list(KEY[:3]))["last"].min()
    return joined.filter(~(turns > keys.join(ends, on=list(KEY[:3]))["last"].to_numpy()))


def _by_step(joined: pa.Table, rl_steps: Sequence[int], cap: int | None) -> Iterator[Requests]:
    """Yield the requests of each of these RL steps, cut at `cap` tokens. ConfigError for one without a row."""
    names = ("rl_step", "prompt_tokens", "max_response_tokens", "response_tokens", "policy_version")
    rl_step, prompts, caps, lengths, version = map(partial(_whole_numbers, joined), names)
    order = np.argsort(rl_step, kind="stable")
    ends = np.searchsorted(rl_step[order], [[step, step + 1] for step in rl_steps])
    if cap is not None:
        caps, lengths = np.minimum(caps, cap), np.minimum(lengths, cap)
    workers = np.full(len(rl_step), np.nan)
    if "worker" in joined.column_names:
        workers = np.asarray(joined["worker"].to_numpy(), np.float64)
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
            make_keys=partial(_keys, joined, at),
            make_rows=partial(_rows, joined, at, cap),
        )


def _keys(joined: pa.Table, at: Ints) -> list[Key]:
    columns = (joined[name].take(at).to_pylist() for name in KEY)
    return list(zip(*columns, strict=True))


def _rows(joined: pa.Table, at: Ints, cap: int | None) -> pd.DataFrame:
    rows = joined.take(at).to_pandas()
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
    draws = uniforms(request_seeds(seed, keys), np.full(len(keys), _APART), 1)[:, 0]
    if isinstance(workload, EarlierEpoch):
        return _after_prefix(requests, workload.keep, draws)
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
            source[n] = first[int(draws[n] * len(first))] if group is not first else n
    return of_responses(requests, [(requests, chains[m], (keys[m][0], keys[m][1], n, 0)) for n, m in enumerate(source)])


def _shorter(caps: Ints, share: float) -> Ints:
    shorter: Ints = np.maximum(1, (caps * share).astype(np.int64))
    return shorter


def _after_prefix(requests: Requests, keep: float, draws: Floats) -> Requests:
    """Each response without its first tokens, up to the first that is not kept: they are part of a prompt."""
    with np.errstate(divide="ignore"):
        runs = np.floor(np.log1p(-draws) / np.log(keep)) if keep < 1 else np.full(len(draws), np.inf)
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
    """The requests of a trace with other response lengths; `rows` stay unchanged."""
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
