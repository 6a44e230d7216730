"""Responses as dumps of other programs know them, and the trace tables they make."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import pandas as pd

from tltlab.errors import TraceError

from .length_table import PROMPT_TOKENS, RESPONSE_TOKENS, tables_of_lengths
from .rows import Row
from .token_counts import TokenCounter

STOPPED = {"stop", "eos", "eos_token", "stop_sequence", "end_turn", "tool_calls", "function_call"}
CUT = {"length", "max_tokens", "max_length"}
ABORTED = {"abort", "aborted", "cancelled", "canceled", "error", "timeout"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportedResponse:
    """One response; None is unknown. `place` is where the dump has it, times are seconds on the dump's own clock."""

    rl_step: int
    prompt_id: str
    prompt_tokens: int
    response_tokens: int
    place: str
    sample: int | None = None
    finish_reason: str | None = None
    max_response_tokens: int | None = None
    reward: float | None = None
    worker: int | None = None
    t_submit: float | None = None
    t_first_token: float | None = None
    t_finish: float | None = None


@dataclass(frozen=True, kw_only=True)
class Dump:
    """What a dump was read as: its responses, and what had to be assumed.

    `exact` says that lengths are those the engine counted, not counts of the text.
    """

    responses: Sequence[ImportedResponse]
    notes: tuple[str, ...]
    exact: bool = True


def text_id(text: str) -> str:
    """A name for a prompt that is the same in every RL step and does not hold its text: 16 hexadecimal digits."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def finish_reason(row: Row, field: str) -> str:
    """The trace's word for a program's finish reason."""
    reason = row.fields[field]
    for words, name in ((STOPPED, "stop"), (CUT, "length"), (ABORTED, "abort")):
        if isinstance(reason, str) and reason in words:
            return name
    return row.fault(field, f"got {reason!r}, known are: {', '.join(sorted(STOPPED | CUT | ABORTED))}")


def has_lengths(rows: Sequence[Row]) -> bool:
    """Whether all rows say their lengths in tokens."""
    return all(row.find(PROMPT_TOKENS) and row.find(RESPONSE_TOKENS) for row in rows)


def responses_of_texts(
    rows: Sequence[Row],
    prompt: str,
    response: str,
    tokens: TokenCounter,
    rl_steps: Iterable[int],
    reward: Callable[[Row], float | None],
) -> list[ImportedResponse]:
    """The responses of rows with the text fields `prompt` and `response`; lengths are the rows', or counted."""
    if has_lengths(rows):
        before = [row.whole(row.require(PROMPT_TOKENS, "")) for row in rows]
        after = [row.whole(row.require(RESPONSE_TOKENS, ""), at_least=1) for row in rows]
    else:
        prompts = list(dict.fromkeys(row.text(prompt) for row in rows))
        count_of = dict(zip(prompts, tokens.count(prompts), strict=True))
        before = [count_of[row.text(prompt)] for row in rows]
        after = [max(1, length) for length in tokens.count([row.text(response) for row in rows])]
    return [
        ImportedResponse(
            rl_step=rl_step,
            prompt_id=text_id(row.text(prompt)),
            prompt_tokens=prompt_tokens,
            response_tokens=response_tokens,
            place=f"{row.file}, {row.place}",
            finish_reason=finish_reason(row, "finish_reason") if row.find(["finish_reason"]) else None,
            reward=reward(row),
        )
        for row, rl_step, prompt_tokens, response_tokens in zip(rows, rl_steps, before, after, strict=False)
    ]


def tables_of_responses(
    dump: Dump, max_response_tokens: int | None = None
) -> tuple[dict[str, pd.DataFrame], tuple[str, ...]]:
    """Workload and outcomes of a dump's responses, and all notes on what was assumed.

    Samples of a prompt are numbered in the dump's order. `epoch` counts the earlier RL steps with the same prompt.
    With `max_response_tokens` a response that long was cut ("length"); a longer one is a TraceError, or cut to it where
    lengths are counts of text. Without, the longest response is the cap. Times count from the first submission of the
    RL step; a response without one has no times.
    """
    names = [field.name for field in fields(ImportedResponse)]
    frame = pd.DataFrame({name: [getattr(r, name) for r in dump.responses] for name in names})
    frame = frame.sort_values("rl_step", kind="stable", ignore_index=True)
    notes = list(dump.notes)
    lengths = frame["response_tokens"].to_numpy()
    known_cap = max_response_tokens is not None
    cap = int(max(1, lengths.max())) if max_response_tokens is None else max_response_tokens
    caps = np.full(len(frame), cap)
    if frame["max_response_tokens"].notna().all():
        known_cap, caps = True, frame["max_response_tokens"].to_numpy(np.int64)
    if not known_cap:
        notes.append(f"the cap is unknown: the longest response ({cap} tokens) is taken for it")
    if dump.exact and (over := lengths > caps).any():
        row = int(np.argmax(over))
        raise TraceError(
            f"{frame['place'][row]}: the response has {lengths[row]} tokens, its maximum was said to be {caps[row]}"
        )
    reason = frame["finish_reason"].to_numpy(object)
    if num_unknown := int((unknown := pd.isna(reason)).sum()):
        rule = "as cut where they reach the cap, else as finished" if known_cap else "as finished"
        notes.append(f"{num_unknown} responses do not say how they ended: they count {rule}")
    if frame["sample"].isna().any():
        frame["sample"] = frame.groupby(["rl_step", "prompt_id"], sort=False).cumcount()
    key, cut = frame[["rl_step", "prompt_id", "sample"]], (lengths >= caps) & known_cap
    tables = tables_of_lengths(key, np.minimum(lengths, caps), frame["prompt_tokens"], caps, cut)
    times = ["t_submit", "t_first_token", "t_finish"]
    outcomes = tables["outcomes"].join(frame[["reward", "worker", *times]].astype(np.float64))
    outcomes[times] = outcomes[times].sub(outcomes.groupby("rl_step")["t_submit"].transform("min"), axis=0)
    outcomes.loc[outcomes["t_submit"].isna(), times] = np.nan
    outcomes["finish_reason"] = outcomes["finish_reason"].where(unknown, reason)
    return tables | {"outcomes": outcomes}, tuple(notes)


def group_size_of(workload: pd.DataFrame) -> int | None:
    """Samples per prompt, where all groups have as many."""
    sizes = workload.groupby(["rl_step", "prompt_id"], sort=False).size().unique()
    return int(sizes[0]) if len(sizes) == 1 else None
