"""Requests of vLLM: results of `vllm bench serve --save-detailed`, and logs with one request per line.

The result is one JSON object with lists per request (vLLM 0.32: `input_lens`, `output_lens`, `start_times`, `ttfts`,
`itls`, `latencies`, `errors`); `--append-result` writes one such object per line. A request line is an object whose
fields are found under the names below, or an OpenAI response or batch output with its `usage`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tltlab.traces.csv import PROMPT_IDS, PROMPT_TOKENS, RESPONSE_TOKENS, RL_STEPS

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

BENCH_LISTS = {
    "input_lens": "prompt_tokens", "output_lens": "response_tokens", "start_times": "start_time", "ttfts": "ttft",
    "itls": "itl", "latencies": "latency", "errors": "error",
}  # fmt: skip


def read_vllm(path: Path, group_size: int = 1) -> Dump:
    """Read a benchmark result or a log of requests. Raises TraceError.

    Each appended benchmark result is an RL step; a log is one unless its lines say theirs. Requests of one RL step
    with the same of PROMPT_IDS, or text in `prompt`, are a group; where neither is there, every `group_size` requests
    in a row are. A request that failed or made no token counts as aborted.
    """
    responses: list[ImportedResponse] = []
    num_results = num_failed = num_untimed = 0
    model: str | None = None
    for record in rows_of(path):
        if is_bench_result(record):
            requests, own_step, first = list(_requests_of_result(record)), num_results, 0
            num_results += 1
            model = name if isinstance(name := record.fields.get("model_id"), str) else model
        else:
            requests, own_step, first = [_flat(record)], 0, len(responses)
        for number, row in enumerate(requests, start=first):
            responses.append(_response(row, own_step, None if group_size == 1 else number // group_size, number))
            num_failed += responses[-1].finish_reason == "abort"
            num_untimed += responses[-1].t_submit is None
    notes = []
    if num_results > 1:
        notes.append(f"each of the {num_results} appended results counts as an RL step")
    if num_failed:
        notes.append(f"{num_failed} requests failed or made no token and count as aborted")
    if num_untimed:
        notes.append(f"{num_untimed} requests have no start time: their times are unknown")
    return Dump(responses=responses, notes=tuple(notes), model=model)


def is_bench_result(row: Row) -> bool:
    """Whether a record is a result of `vllm bench serve`, detailed or not."""
    return isinstance(row.fields.get("output_lens"), list) or {"total_output_tokens", "completed"} <= set(row.fields)


def is_request(row: Row) -> bool:
    """Whether a record has the response tokens of a request."""
    return is_bench_result(row) or _flat(row).find(RESPONSE_TOKENS) is not None


def is_timed(row: Row) -> bool:
    """Whether a record is a request with its prompt's length and the time in seconds at which it came."""
    names = [name + suffix for suffix, _ in _UNITS for name in SUBMIT]
    timed = any(isinstance(row.fields.get(name), int | float) for name in names)
    return timed and is_request(row) and row.find(PROMPT_TOKENS) is not None


def _requests_of_result(result: Row) -> Iterator[Row]:
    lists = {name: values for name in BENCH_LISTS if isinstance(values := result.fields.get(name), list)}
    for name in ("input_lens", "output_lens"):
        if name not in lists:
            result.fault(name, "it is not there: run the benchmark with --save-detailed")
    num = len(lists["output_lens"])
    for name, values in lists.items():
        if len(values) != num:
            result.fault(name, f"it has {len(values)} entries, output_lens has {num}")
    for number in range(num):
        fields = {BENCH_LISTS[name]: values[number] for name, values in lists.items()}
        yield Row(file=result.file, place=f"{result.place}, request {number}", fields=fields)


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


def _response(row: Row, own_step: int, group: int | None, number: int) -> ImportedResponse:
    failed = bool(row.fields.get("error")) or row.fields.get("success") is False
    step = row.find(RL_STEPS)
    rl_step = own_step if step is None else row.whole(step)
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
    between = row.fields.get("itl")
    if latency is None and ttft is not None and isinstance(between, list):
        gaps = [gap for gap in between if isinstance(gap, int | float)]
        if len(gaps) < len(between):
            row.fault("itl", "wanted a list of numbers")
        latency = ttft + sum(gaps)
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
