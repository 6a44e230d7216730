"""Requests of vLLM: logs with one request per line.

A line is an object whose fields are found under the names below, or an OpenAI response or batch output with its
`usage`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .length_table import PROMPT_IDS, PROMPT_TOKENS, RESPONSE_TOKENS, RL_STEPS
from .responses import Dump, ImportedResponse, finish_reason, text_id
from .rows import Row, rows_of

REQUEST = ("request_id", "custom_id", "id")
CAP = ("max_response_tokens", "max_tokens", "max_completion_tokens")
SUBMIT = ("t_submit", "start_time", "start", "arrival_time", "arrival", "submit_time", "timestamp", "queued")
FIRST_TOKEN = ("t_first_token", "first_token_time", "first_token")
TTFT = ("ttft", "time_to_first_token")
FINISH = ("t_finish", "finish_time", "finished_time", "end_time", "end", "last_token")
LATENCY = ("latency", "e2e_latency", "e2el", "e2e", "request_latency", "duration", "elapsed")
"""Times are seconds; each name is also known with `_s` and `_ts` (seconds) and `_ms` (milliseconds)."""
_UNITS = (("_ts", 1.0), ("", 1.0), ("_s", 1.0), ("_ms", 1e-3))
WORKER = ("worker", "worker_id", "dp_rank", "data_parallel_rank", "engine_index", "replica")


def read_vllm(path: Path, group_size: int = 1) -> Dump:
    """Read a log of requests. Raises TraceError.

    A log is one RL step unless its lines say theirs. Requests of one RL step with the same of PROMPT_IDS, or text in
    `prompt`, are a group; where neither is there, every `group_size` requests in a row are. A request that failed or
    made no token counts as aborted.
    """
    responses: list[ImportedResponse] = []
    for number, row in enumerate(rows_of(path)):
        responses.append(_response(_flat(row), None if group_size == 1 else number // group_size, number))
    notes = []
    if num_failed := sum(response.finish_reason == "abort" for response in responses):
        notes.append(f"{num_failed} requests failed or made no token and count as aborted")
    if num_untimed := sum(response.t_submit is None for response in responses):
        notes.append(f"{num_untimed} requests have no start time: their times are unknown")
    return Dump(responses=responses, notes=tuple(notes))


def is_request(row: Row) -> bool:
    """Whether a record has the response tokens of a request."""
    return _flat(row).find(RESPONSE_TOKENS) is not None


def is_timed(row: Row) -> bool:
    """Whether a record is a request with its prompt's length and the time in seconds at which it came."""
    names = [name + suffix for suffix, _ in _UNITS for name in SUBMIT]
    timed = any(isinstance(row.fields.get(name), int | float) for name in names)
    return timed and is_request(row) and row.find(PROMPT_TOKENS) is not None


def _flat(row: Row) -> Row:
    """A request with the fields of its `usage`, its one choice and its batch envelope beside its own."""
    fields = dict(row.fields)
    if isinstance(response := fields.get("response"), dict) and isinstance(body := response.get("body"), dict):
        fields = {**body, **fields}
    if isinstance(usage := fields.get("usage"), dict):
        fields = {**usage, **fields}
    choices = fields.get("choices")
    if isinstance(choices, list) and choices:
        if len(choices) > 1:
            row.fault("choices", f"got {len(choices)} choices and one usage; a line must be one response (n = 1)")
        if isinstance(choices[0], dict):
            fields.setdefault("finish_reason", choices[0].get("finish_reason"))
    return Row(file=row.file, place=row.place, fields=fields)


def _response(row: Row, group: int | None, number: int) -> ImportedResponse:
    failed = bool(row.fields.get("error")) or row.fields.get("success") is False
    step = row.find(RL_STEPS)
    rl_step = 0 if step is None else row.whole(step)
    tokens = 0 if failed and not row.find(RESPONSE_TOKENS) else row.whole(row.require(RESPONSE_TOKENS, "length"))
    reason = finish_reason(row, "finish_reason") if row.find(["finish_reason"]) else None
    submit, first, finish = _times(row)
    cap, worker = row.find(CAP), row.find(WORKER)
    return ImportedResponse(
        rl_step=rl_step,
        prompt_id=_prompt_id(row, rl_step, group, number),
        sample=row.whole("sample") if row.find(["sample"]) else None,
        prompt_tokens=row.whole(row.require(PROMPT_TOKENS, "prompt length")),
        response_tokens=tokens,
        place=f"{row.file}, {row.place}",
        finish_reason="abort" if failed or tokens == 0 else reason,
        max_response_tokens=None if cap is None else row.whole(cap, at_least=1),
        reward=row.number("reward"),
        worker=None if worker is None else row.whole(worker),
        t_submit=submit,
        t_first_token=first,
        t_finish=finish,
    )


def _prompt_id(row: Row, rl_step: int, group: int | None, number: int) -> str:
    if (name := row.find(PROMPT_IDS)) is not None:
        return str(row.fields[name])
    if isinstance(prompt := row.fields.get("prompt"), str):
        return text_id(prompt)
    if group is not None:
        return f"s{rl_step}-p{group}"
    name = row.find(REQUEST)
    return f"s{rl_step}-p{number}" if name is None else str(row.fields[name])


def _times(row: Row) -> tuple[float | None, float | None, float | None]:
    """Seconds of submission, first token and finish on the dump's clock; all None where the first is unknown."""
    submit = _seconds(row, SUBMIT)
    if submit is None:
        return None, None, None
    first, finish = _seconds(row, FIRST_TOKEN), _seconds(row, FINISH)
    ttft, latency = _seconds(row, TTFT), _seconds(row, LATENCY)
    first = submit + ttft if first is None and ttft is not None else first
    finish = submit + latency if finish is None and latency is not None else finish
    for name, time in (("first token", first), ("finish", finish)):
        if time is not None and time < submit:
            row.fault(name, f"got {time}, before the start {submit}")
    return submit, first, finish


def _seconds(row: Row, names: Sequence[str]) -> float | None:
    for suffix, scale in _UNITS:
        if name := row.find([n + suffix for n in names]):
            value = row.number(name)
            return None if value is None else value * scale
    return None
