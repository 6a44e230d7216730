"""Failure signatures that a run tells in words: events.jsonl and log files. What an engine died of, and the canary."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tltlab.errors import one_line

from .evidence import RunEvidence
from .finding import Finding, NotChecked, check, hint, problem, span

SENTENCE_LETTERS = 240

LINES_BEFORE = 40
"""Lines before an error that belong to it: a traceback through vLLM has some 30."""


@dataclass(frozen=True, kw_only=True)
class _Sentence:
    """A sentence of the run: its text, where it stands, the lines before it, and the RL step where that is known."""

    text: str
    source: str
    before: str = ""
    rl_step: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Signature:
    """What engines, Ray and the system say when something known goes wrong.

    The sentence fits `pattern`; it, or what was said just before it, fits `beside`. Case does not count.
    """

    code: str
    pattern: str
    beside: str = ""
    title: str
    advice: str

    def fits(self, sentence: _Sentence) -> bool:
        if not re.search(self.pattern, sentence.text, re.IGNORECASE):
            return False
        return bool(re.search(self.beside, sentence.before + sentence.text, re.IGNORECASE))


SIGNATURES: tuple[_Signature, ...] = (
    _Signature(
        code="capture-out-of-memory",
        pattern=r"out of memory(?! occurred when warming up)",
        beside=r"captur|cuda ?_?graph",
        title="The GPU ran out of memory while CUDA graphs were captured",
        advice="Capture less: fewer strategies in the policy, a smaller activation.max_requests or vllm.max_num_seqs, "
        "fewer vllm.compilation_config.cudagraph_capture_sizes, a smaller rollout.graph_gib; or leave more room with a "
        "lower vllm.gpu_memory_utilization.",
    ),
    _Signature(
        code="no-room-for-kv-cache",
        pattern=r"No available memory for the cache blocks|available KV cache memory \(|needed for the largest|"
        r"is less than desired (GPU|CPU) memory utilization",
        title="The engine finds no room for its KV cache",
        advice="On a GPU: vllm.gpu_memory_utilization, or end what else holds its memory. On a CPU: set "
        "vllm.kv_cache_memory_bytes (256 MiB is plenty for small models). Or a smaller vllm.max_model_len.",
    ),
    _Signature(
        code="out-of-memory",
        pattern=r"out of memory|OutOfMemoryError|cannot allocate memory|bad_alloc|running low on memory|"
        r"exit code 137",
        title="Memory ran out",
        advice="Fewer workers (rollout.num_workers), a smaller vllm.kv_cache_memory_bytes, vllm.max_num_seqs or "
        "vllm.gpu_memory_utilization, smaller train.tokens_per_microbatch, train.sequence_parallel for long responses.",
    ),
    _Signature(
        code="engine-died",
        pattern=r"the engine lost \d+ of|EngineDeadError|EngineCore encountered|Engine core initialization failed|"
        r"EngineCore failed to start",
        title="An engine died",
        advice="The cause stands above this line in the engine's own output: start it with VLLM_LOGGING_LEVEL=INFO.",
    ),
    _Signature(
        code="drafter-not-in-service",
        pattern=r"it is trained and serves nobody|the drafter is not trained any more|does not go into service",
        title="The trained drafter does not serve",
        advice="The sentence says why; what served before goes on. Where the policy never drafts with it, set "
        "rollout.policy to one with its strategies, such as beg-mab-learned, or leave [drafter] out.",
    ),
    _Signature(
        code="run-stopped",
        pattern=r"^the run stopped: (?!.*KeyboardInterrupt)|an actor (died|failed)|ActorDiedError|RayActorError|"
        r"No space left on device|Disk quota exceeded|Too many open files|Address already in use|EADDRINUSE|"
        r"operator torchvision::\w+ does not exist|libtorch\w*\.so[^\n]*undefined symbol",
        title="The run stopped with an error",
        advice="The sentence says what it was; tltlab COMMAND --debug shows where, Ray's logs "
        "(/tmp/ray/session_latest/logs) and the kernel's (dmesg, for memory) what a process died of.",
    ),
)
"""From the particular to the general: a sentence counts for the first that fits it."""


@check("deaths", good="nothing died or was given up")
def deaths(evidence: RunEvidence) -> list[Finding]:
    """What the run, or one of its engines, died of, one finding for each cause, and what became of its drafter."""
    if not evidence.events and not evidence.logs:
        raise NotChecked("the run has neither events.jsonl nor *.log files")
    by_code: dict[str, list[_Sentence]] = {}
    for sentence in _sentences(evidence):
        if signature := next((s for s in SIGNATURES if s.fits(sentence)), None):
            by_code.setdefault(signature.code, []).append(sentence)
    findings = []
    for signature in SIGNATURES:
        if sentences := by_code.get(signature.code):
            first = sentences[0]
            quote = one_line(first.text)
            quote = quote if len(quote) <= SENTENCE_LETTERS else quote[: SENTENCE_LETTERS - 3] + "..."
            more = f" (and {len(sentences) - 1} more like it)" if len(sentences) > 1 else ""
            rl_steps = [sentence.rl_step for sentence in sentences if sentence.rl_step is not None]
            findings.append(
                problem(
                    code=signature.code,
                    title=signature.title,
                    evidence=f'{first.source} says "{quote}"{more}.',
                    advice=signature.advice,
                    where=f"RL steps {span(rl_steps)}" if rl_steps else None,
                )
            )
    return findings


@check("canary", good="the drafter's canary is content")
def canary(evidence: RunEvidence) -> Finding | None:
    """The learned drafter collapsed, or never learned, and something else served in its place."""
    if not evidence.events:
        raise NotChecked("the run has no events.jsonl")
    verdicts = [(event, event["verdict"]) for event in evidence.events if isinstance(event.get("verdict"), dict)]
    if not verdicts:
        raise NotChecked("no canary spoke: the run has no learned drafter, or it drafted too little to judge")
    collapsed, untrained = (
        [event for event, verdict in verdicts if verdict.get("kind") == kind] for kind in ("collapsed", "untrained")
    )
    if not (bad := collapsed or untrained):
        return None
    summary = f"{len(bad)} of {len(verdicts)} verdicts; the first: {bad[0]['event']}."
    rl_steps = f"RL steps {span([int(event['rl_step']) for event in bad])}"
    if collapsed:
        return problem(
            code="canary-collapsed",
            title="The learned drafter collapsed",
            evidence=summary,
            advice=(
                "Check that its weights reach the engines whole and share the target's embedding and LM head; "
                "until then drafter.fallback serves. drafter.canary.collapse sets the bound."
            ),
            where=rl_steps,
        )
    return hint(
        code="drafter-untrained",
        title="The learned drafter had not learned enough to serve",
        evidence=summary,
        advice="Warm it up before the run: tltlab train-drafter, then drafter.checkpoint. The fallback served.",
        where=rl_steps,
    )


def _sentences(evidence: RunEvidence) -> Iterator[_Sentence]:
    for event in evidence.events:
        rl_step = rl_step if isinstance(rl_step := event.get("rl_step"), int) else None
        yield _Sentence(text=str(event.get("event", "")), source="events.jsonl", rl_step=rl_step)
    for name, text in evidence.logs.items():
        lines = text.splitlines()
        for number, line in enumerate(lines):
            yield _Sentence(text=line, source=name, before="\n".join(lines[max(0, number - LINES_BEFORE) : number]))
