"""The known failure signatures of a run: one table of checks, each with its evidence, test, sentence and remedy."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from tltlab.traces.trace import Trace

from . import decoding, drafting, log, stages
from .check import Check, Diagnosis, Facts, look
from .evidence import RunEvidence

_check = Check[RunEvidence]

TRAIN_OR_REPLACE = (
    "A learned drafter: train it before the run (tltlab train-drafter, drafter.checkpoint) or more within it "
    "(drafter.schedule.kind = always, drafter.max_updates); drafter.fallback serves until then. A model-free one: "
    "draft less deep, or use a learned drafter ([drafter], rollout.policy = beg-mab-learned)."
)


def unfinished(run: RunEvidence) -> Facts | None:
    """The recording was interrupted, so the trace lacks what came later."""
    return {"folder": run.unfinished.name} if run.unfinished is not None else None


def repaired(run: RunEvidence) -> Facts | None:
    """The trace was made of an interrupted recording."""
    notes = "" if run.trace is None else run.trace.manifest.notes or ""
    return {"note": notes[notes.find("repaired: ") :]} if "repaired: " in notes else None


CHECKS: tuple[Check[RunEvidence], ...] = (
    _check("deaths", log.deaths, good="nothing died or was given up").problem(
        "{title}", '{source} says "{quote}"{more}.', "{advice}", code="{code}"
    ),
    _check("interrupted", unfinished, good="the recording is whole").problem(
        "The recording was interrupted",
        "{folder} is still there: the run was stopped, or continues.",
        "Commands read it unchanged. If no run writes there any more, tltlab trace repair makes a trace of it.",
    ),
    _check("interrupted", repaired).hint(
        "The recording was interrupted",
        'The trace says "{note}".',
        "The rest of the trace is sound; leave RL steps out that lack requests.",
    ),
    _check("slower-than-plain", decoding.slower_than_plain, good="rollouts are not slower than plain decoding").problem(
        "Policy {policy} makes rollouts slower than no speculation",
        "Decoding takes {slowdown:.2f} times as long as plain decoding of the same tokens at these batches ({source}).",
        "Speculate at small batches only (activation.max_requests), draft less deep, or not at all: see tltlab tune.",
    ),
    _check("drafts-lose-time", decoding.drafts_lose_time, good="RL steps that draft are no slower per token").problem(
        "Speculation is net negative",
        "{drafted} rollouts with {accept_length:.2f} tokens per draft take {cost:.2f} times what plain ones would.",
        "Draft below a batch only (tltlab tune finds it), draft less deep, or switch it off.",
    ),
    _check("acceptance-low", drafting.acceptance_low, good="drafts are kept often enough").problem(
        "The drafts of {drafter} are kept too rarely to pay",
        "{drafter} yields {accepted:.2f} tokens per draft, the bonus token included{times}.",
        TRAIN_OR_REPLACE,
    ),
    _check("acceptance-falling", drafting.acceptance_falling, good="acceptance holds over the run").problem(
        "The acceptance of {drafter} falls during the run",
        "At like batches and depths acceptance changes by {slope:+.1%} per RL step, {total:+.0%} in all.",
        TRAIN_OR_REPLACE,
    ),
    _check("drafts-collapse", stages.drafts_collapse, good="drafts are kept as often as before").problem(
        "{title}",
        "{fall} {going_on}{rate}{times}.",
        "Outputs stay right, only time is lost. Load the drafter's weights anew after sleep, wake-up and weight sync "
        "(level-2 sleep throws them away), or switch drafting off until they are.",
    ),
    _check("large-batches", decoding.large_batches, good="no speculation at too large batches").problem(
        "Speculation stays on at batches too large for it",
        "Time against plain decoding of the same tokens ({source}): {by_batch}; {share:.0%} of the decoding time goes "
        "into drafts at larger batches than {most}.",
        "Set activation.max_requests to {most}, or give those batches a bucket with no speculation in it.",
    ),
    _check("switches-often", drafting.switching_time, good="few switches").problem(
        "Switching speculation on takes a good part of the rollout",
        "{seconds:.3g} s, {share:.0%} of the workers' busy time, went into switches.",
        "Switch once, late: a smaller activation.max_requests, a longer activation.hold_iterations.",
    ),
    _check("switches-often", drafting.switches_often, needs=("speculating",)).hint(
        "Speculation switches on and off repeatedly",
        "{flips} switches in {iterations} iterations, {rate:.0f} per 100.",
        "Use a longer activation.hold_iterations, a smaller epsilon, or no speculation as an arm only where it wins.",
    ),
    _check("canary", partial(log.canary, kind="collapsed"), good="the drafter's canary is content").problem(
        "The learned drafter collapsed",
        "{bad} of {verdicts} verdicts; the first: {first}.",
        "Check that its weights reach the engines whole and share the target's embedding and LM head; until then "
        "drafter.fallback serves. drafter.canary.collapse sets the bound.",
        code="canary-collapsed",
    ),
    _check("canary", partial(log.canary, kind="untrained")).hint(
        "The learned drafter had not learned enough to serve",
        "{bad} of {verdicts} verdicts; the first: {first}.",
        "Warm it up before the run: tltlab train-drafter, then drafter.checkpoint. The fallback served.",
        code="drafter-untrained",
    ),
    _check("drafter-never-published", drafting.never_published, good="new drafter weights went into service").problem(
        "The trained drafter never went into service",
        "In {steps} RL steps the engines stayed on the drafter they began with; training made {updates} updates.",
        "No updates: are workers ever idle before the rollout ends (tltlab timeline), and for longer than an update "
        "takes (drafter.tokens_per_update)? Else events.jsonl has the reason why its weights were refused.",
    ),
    _check("idle-fragmented", drafting.idle_fragmented, good="idle time is long enough to train in").problem(
        "Idle time comes in pieces too short to train in",
        "{periods} periods of {median_s:.2g} s (median): {setup:.0%} of the time set trainers up, {train:.0%} trained; "
        "{empty:.0%} of the periods made no update ({update}).",
        "Make updates smaller (drafter.tokens_per_update), train in fewer rollouts (drafter.schedule.kind = every) or "
        "larger groups (drafter.coordinator.min_idle_workers, late_join = false).",
    ),
    _check("waits-for-training", drafting.rollout_waits, good="no rollout waits for drafter training").problem(
        "Rollouts wait for the drafter's trainers",
        "After their last response they waited up to {seconds:.2g} s, {share:.0%} of their time, for an update to end.",
        "Make updates smaller (drafter.tokens_per_update) or give trainers more threads (drafter.threads); "
        "drafter.coordinator.yield_timeout_s bounds the wait.",
    ),
    _check("rollout-slower", stages.rollout_slower, good="rollouts of like lengths take as long as before").problem(
        "Rollouts are slower from RL step {first} on",
        "They take {took_s:.3g} s after {before_s:.3g} s, {times:.2f} times as long per token.",
        "Look at what changed there: devices, other jobs, engine settings, speculation.",
    ),
    _check("stage-grows", stages.stage_grows, good="no stage grows over the run").problem(
        "{title} takes {own:.0%} of the RL step's work from RL step {first} on",
        "It takes {took_s:.4g} of {step_s:.4g} s, {share:.0%} of the RL step{waiting}; before {took_before_s:.3g} s, "
        "{was:.0%}.",
        "Look at {remedy}, and at what changed at RL step {first}.",
    ),
    _check("several-turns", stages.several_turns, good="responses are of one turn").hint(
        "Responses are of several turns, or wait for tools",
        "{note}.",
        "Read lengths and rollout times as more than generation: speculation speeds up generation alone. Record the "
        "engine (TLTLAB_RECORD) to see that.",
    ),
    _check("rollout-not-bottleneck", decoding.not_bottleneck, good="the rollout is the bottleneck").hint(
        "The rollout is not the bottleneck, {largest} is",
        "{lead} is {share:.0%} of an RL step, {breakdown}: one twice as fast would save {gain:.0%} of it.",
        "Look at {remedy}.",
    ),
    _check("rollout-share", decoding.rollout_share, good="the rollout is less than half of the RL step").hint(
        "The rollout is {share.estimate:.0%} of the RL step",
        "The rollout takes {rollout_s:.1f} of {step_s:.1f} s, {share:.0%}: RL steps are {twice:.2f}x as fast with one "
        "twice as fast, {at_best:.1f}x at best.",
        "tltlab calibrate LOG --out costs.json, then tltlab compare LOG --costs costs.json, shows what gains most.",
    ),
    _check("waiting-queue", decoding.preemption, good="no queue and no preemption").problem(
        "Engines prefill requests again",
        "{again:.2f} tokens were prefilled for each prompt token: running requests lost their KV cache.",
        "Give the cache more room (vllm.kv_cache_memory_bytes) or run fewer at a time (vllm.max_num_seqs).",
        code="kv-preemption",
    ),
    _check("waiting-queue", decoding.waiting_queue).hint(
        "Requests wait while others run",
        "For {waiting:.0%} of the time up to {most:.0f} requests waited, with batches of up to {batch}.",
        "Raise vllm.max_num_seqs or vllm.kv_cache_memory_bytes: a long response that starts late is a tail.",
    ),
    _check("slow-worker", decoding.slow_worker, good="workers are equally fast").problem(
        "Worker {worker} is slower than the others",
        "Its iterations take {factor:.2f} times those of the other workers at like batch and depth.",
        "Look at its device and what else runs there: another process, fewer cores, a throttled GPU.",
    ),
    _check("no-graph", partial(decoding.no_graph, kinds=("eager",)), good="decoding runs in full CUDA graphs").problem(
        "Engines decode without full CUDA graphs",
        decoding.GRAPHS,
        "Leave rollout.vllm.enforce_eager and compilation_config out and rollout.graphs at planned; raise "
        "rollout.vllm.max_num_batched_tokens for batches larger than those captured.",
    ),
    _check("no-graph", partial(decoding.no_graph, kinds=("piecewise", "eager"))).hint(
        "Engines decode without full CUDA graphs",
        decoding.GRAPHS,
        "rollout.graphs = planned captures graphs for drafts of any lengths where attention takes them (Hopper); "
        "elsewhere drop model-free drafters and fallbacks, so that vLLM takes its V2 runner, or draft at one depth.",
    ),
    _check("long-starved", drafting.long_starved, good="training sees the lengths that are generated").problem(
        "Training is starved of long responses",
        "Responses trained on have {bias:.0%} of the mean length of those generated.{groups}",
        'Wait for the oldest groups (rollout.stale = "hold"), or allow older ones (staleness, partial.max_age).',
    ),
)
"""In the order in which findings are shown: what broke, what speculation does, what is around it."""


def diagnose(run: str | Path | Trace) -> Diagnosis[RunEvidence]:
    """Look for every signature in a RUN folder, a trace folder or a Trace. Raises TraceError for what is no run."""
    return examine(RunEvidence.of(run))


def examine(evidence: RunEvidence) -> Diagnosis[RunEvidence]:
    """Look for every signature in what is known of a run."""
    simulated = evidence.trace is not None and evidence.trace.manifest.kind == "simulated"
    return replace(look(CHECKS, evidence), simulated=simulated)
