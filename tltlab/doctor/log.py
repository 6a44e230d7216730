"""Tests on the words of a run, in events.jsonl and log files: why an engine died, and the drafter's canary."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from tltlab.errors import one_line

from .check import Facts, NotChecked, rl_steps
from .evidence import RunEvidence

QUOTE_LETTERS = 240
LINES_BEFORE = 40  # lines before an error that belong to it: a traceback through vLLM has some 30


class Signature(NamedTuple):
    """Log message of a known failure in engines, Ray or the system.

    A line fits `pattern`; it, or a line just before it, fits `beside`. Case does not count.
    """

    code: str
    title: str
    advice: str
    pattern: str
    beside: str = ""


SIGNATURES = (
    Signature(
        "capture-out-of-memory",
        "The GPU ran out of memory while CUDA graphs were captured",
        "Capture less: fewer strategies in the policy, a smaller activation.max_requests, vllm.max_num_seqs or "
        "rollout.graph_gib; or leave more room with a lower vllm.gpu_memory_utilization.",
        r"out of memory(?! occurred when warming up)",
        r"captur|cuda ?_?graph",
    ),
    Signature(
        "no-room-for-kv-cache",
        "The engine finds no room for its KV cache",
        "Raise vllm.gpu_memory_utilization or end other programs on the GPU; on a CPU set vllm.kv_cache_memory_bytes "
        "(256 MiB is plenty for small models). Or lower vllm.max_model_len.",
        r"No available memory for the cache blocks|available KV cache memory \(|needed for the largest|"
        r"is less than desired (GPU|CPU) memory utilization",
    ),
    Signature(
        "out-of-memory",
        "Memory ran out",
        "Fewer workers (rollout.num_workers), a smaller vllm.kv_cache_memory_bytes, vllm.max_num_seqs or "
        "vllm.gpu_memory_utilization, smaller train.tokens_per_microbatch, train.sequence_parallel for long responses.",
        r"out of memory|OutOfMemoryError|cannot allocate memory|bad_alloc|running low on memory|exit code 137",
    ),
    Signature(
        "engine-died",
        "An engine died",
        "The cause stands above this line in the engine's own output: start it with VLLM_LOGGING_LEVEL=INFO.",
        r"the engine lost \d+ of|EngineDeadError|EngineCore encountered|Engine core initialization failed|"
        r"EngineCore failed to start",
    ),
    Signature(
        "drafter-not-in-service",
        "The trained drafter does not serve",
        "The sentence gives the reason; the previous drafter serves on. Where the policy never drafts with it, set "
        "rollout.policy to one with its strategies, such as beg-mab-learned, or leave [drafter] out.",
        r"it is trained and not used|the drafter is not trained any more|does not go into service",
    ),
    Signature(
        "run-stopped",
        "The run stopped with an error",
        "tltlab COMMAND --debug shows where; Ray's logs (/tmp/ray/session_latest/logs) and the kernel's (dmesg, for "
        "memory) show why a process died.",
        r"^the run stopped: (?!.*KeyboardInterrupt)|an actor (died|failed)|ActorDiedError|RayActorError|"
        r"No space left on device|Disk quota exceeded|Too many open files|Address already in use|EADDRINUSE|"
        r"operator torchvision::\w+ does not exist|libtorch\w*\.so[^\n]*undefined symbol",
    ),
)
"""From the particular to the general: a line counts for the first that fits it."""


class _Line(NamedTuple):
    text: str
    source: str
    before: str = ""
    rl_step: int | None = None


def deaths(run: RunEvidence) -> list[Facts]:
    """Each known cause of death of the run, or of one of its engines, and what became of its drafter."""
    if not run.events and not run.logs:
        raise NotChecked("the run has neither events.jsonl nor *.log files")
    by_signature: dict[Signature, list[_Line]] = {signature: [] for signature in SIGNATURES}
    for line in _lines(run):
        if signature := next((signature for signature in SIGNATURES if _fits(line, signature)), None):
            by_signature[signature].append(line)
    found = []
    for signature, (first, *others) in ((signature, lines) for signature, lines in by_signature.items() if lines):
        quote = one_line(first.text)
        quote = quote if len(quote) <= QUOTE_LETTERS else quote[: QUOTE_LETTERS - 3] + "..."
        more = f" (and {len(others)} more like it)" if others else ""
        steps = [line.rl_step for line in (first, *others) if line.rl_step is not None]
        facts: Facts = {"source": first.source, "quote": quote, "more": more}
        found.append(facts | signature._asdict() | {"where": rl_steps(steps) if steps else None})
    return found


def _fits(line: _Line, signature: Signature) -> bool:
    if not re.search(signature.pattern, line.text, re.IGNORECASE):
        return False
    return bool(re.search(signature.beside, line.before + line.text, re.IGNORECASE))


def _lines(run: RunEvidence) -> Iterator[_Line]:
    for event in run.events:
        rl_step = rl_step if isinstance(rl_step := event.get("rl_step"), int) else None
        yield _Line(str(event.get("event", "")), "events.jsonl", rl_step=rl_step)
    for name, text in run.logs.items():
        lines = text.splitlines()
        for number, line in enumerate(lines):
            yield _Line(line, name, before="\n".join(lines[max(0, number - LINES_BEFORE) : number]))


def canary(run: RunEvidence, kind: str) -> Facts | None:
    """The canary's verdict on the learned drafter was `kind`: "collapsed", or "untrained"."""
    verdicts = [(event, event["verdict"]) for event in run.happened if isinstance(event.get("verdict"), dict)]
    if not verdicts:
        raise NotChecked("no canary spoke: the run has no learned drafter, or it drafted too little to judge")
    if not (bad := [event for event, verdict in verdicts if verdict.get("kind") == kind]):
        return None
    facts = {"bad": len(bad), "verdicts": len(verdicts), "first": bad[0]["event"]}
    return facts | {"where": rl_steps(event["rl_step"] for event in bad)}
