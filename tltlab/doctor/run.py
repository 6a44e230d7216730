"""Failure signatures of a run around speculation: where the time goes, what training gets, queues, workers, graphs."""

from __future__ import annotations

import numpy as np
import pandas as pd

from tltlab.costs.stages import STAGES

from .evidence import ENOUGH_STEPS, RunEvidence, ratio, with_ends
from .finding import Finding, NotChecked, check, hint, problem

HALF = 0.5
"""Below half of the RL step even a rollout in no time at all saves less than what stays."""

STARVED = 0.95
"""Mean length trained on over that generated below which the policy is taught to be short."""

WAITING_SHARE = 0.2
"""Share of the time with a queue that is more than the end of one admission."""

PREFILL_AGAIN = 1.05
"""Tokens prefilled over tokens of prompts: prefix caching keeps it below 1, preemption brings it above."""

SLOW_WORKER = 1.1
"""Time of a worker over the others' at like batches: single rollouts vary by some 5 %."""

GRAPHLESS_SHARE = 0.05
"""Share of the time without graphs below which capturing more of them is not worth their memory."""


@check("rollout-not-bottleneck", good="the rollout is the bottleneck")
def rollout_not_bottleneck(evidence: RunEvidence) -> Finding | None:
    """The rollout is less than half of an RL step, so speeding it up cannot help much."""
    steps = evidence.known.steps
    if steps is None or steps["rollout_s"].notna().sum() < ENOUGH_STEPS:
        raise NotChecked(f"the times of the stages (steps) are known of fewer than {ENOUGH_STEPS} RL steps")
    rows = steps[steps["rollout_s"].notna()]
    stages = rows[list(STAGES)].fillna(0.0)
    if not stages.to_numpy().any():
        raise NotChecked("only the rollout's time is known, not that of the stages behind it (simulate: --stages)")
    whole = rows["rollout_s"] + stages.sum(axis=1)
    share = ratio(rows["rollout_s"].to_numpy(), whole.to_numpy())
    if share.high >= HALF:
        return None
    parts = (stages.sum() / whole.sum()).sort_values(ascending=False)
    largest = str(parts.index[0]).removesuffix("_s")
    breakdown = ", ".join(f"{str(name).removesuffix('_s')} {part:.0%}" for name, part in parts.items() if part >= 0.01)
    remedy = {
        "train": "train.minibatches, train.tokens_per_microbatch, train.threads, or more devices for training",
        "inference": "train.tokens_per_microbatch and train.threads: log-probs are computed by the trainer",
        "reward": "the reward function: run it in parallel, or cheaper",
        "sync": "how weights reach the engines",
    }[largest]
    return hint(
        title=f"The rollout is not the bottleneck, {largest} is",
        evidence=(
            f"The rollout is {share.estimate:.0%} of an RL step ({share.low:.0%} to {share.high:.0%}), {breakdown}: "
            f"a rollout twice as fast would shorten the RL step by {share.estimate / 2:.0%}."
        ),
        advice=f"Look at {remedy}.",
    )


@check("long-starved", good="training sees the lengths that are generated")
def long_starved(evidence: RunEvidence) -> Finding | None:
    """Groups dropped for their age leave training with shorter responses than were generated."""
    steps = evidence.known.steps
    rows = None if steps is None else steps[steps["length_bias"].notna()]
    if rows is None or rows.empty:
        raise NotChecked("RL steps are apart, or the trace does not tell what was dropped (steps.length_bias)")
    bias, dropped = float(rows["length_bias"].iloc[-1]), rows["dropped_groups"].iloc[-1]
    if bias >= STARVED:
        return None
    groups = "" if pd.isna(dropped) else f" {dropped:.0f} groups were dropped for their age."
    return problem(
        title="Training is starved of long responses",
        evidence=f"Responses trained on have {bias:.0%} of the mean length of those generated.{groups}",
        advice=(
            'Let RL steps wait for the oldest groups (rollout.stale = "hold"), or allow older ones (rollout.staleness, '
            "rollout.partial.max_age)."
        ),
    )


@check("waiting-queue", good="no queue and no preemption")
def waiting_queue(evidence: RunEvidence) -> Finding | None:
    """Requests wait for a place, or were thrown out of the KV cache and prefilled again."""
    table = evidence.iterations
    if table["num_waiting"].isna().all():
        raise NotChecked("the trace does not say how many requests waited (iterations.num_waiting)")
    waiting = table.loc[table["num_waiting"].fillna(0) > 0, "duration"].sum() / table["duration"].sum()
    again = table["prefill_tokens"].sum() / max(int(evidence.known.workload["prompt_tokens"].sum()), 1)
    if again > PREFILL_AGAIN:
        return problem(
            code="kv-preemption",
            title="Engines prefill requests again",
            evidence=f"{again:.2f} tokens were prefilled for each prompt token: running requests lost their KV cache.",
            advice="Give the cache more room (vllm.kv_cache_memory_bytes) or run fewer at a time (vllm.max_num_seqs).",
        )
    if waiting < WAITING_SHARE:
        return None
    return hint(
        title="Requests wait while others run",
        evidence=(
            f"During {waiting:.0%} of the time requests waited for a place, up to {table['num_waiting'].max():.0f} at "
            f"once, with batches of up to {table['batch'].max()}."
        ),
        advice="Raise vllm.max_num_seqs or vllm.kv_cache_memory_bytes: a long response that starts late is a tail.",
    )


@check("slow-worker", good="workers are equally fast")
def slow_worker(evidence: RunEvidence) -> Finding | None:
    """One worker takes longer than the others for like iterations."""
    table = evidence.iterations
    table = table[(table["prefill_tokens"] == 0) & (table["batch"] > 0)]
    if table["worker"].nunique() < 2:
        raise NotChecked("iterations of at least two workers are needed")
    cell = [table["rl_step"], table["draft_depth"], np.log2(table["batch"]).astype(int)]
    rows = pd.DataFrame({"s": table["rl_step"], "w": table["worker"], "took": table["duration"]})
    # Against the other workers' mean in the same RL step, at like depth and batch.
    groups = rows.groupby(cell)["took"]
    by_worker = rows.groupby([*cell, table["worker"]])["took"]
    num_others = groups.transform("size") - by_worker.transform("size")
    rows["usual"] = (groups.transform("sum") - by_worker.transform("sum")) / num_others.where(num_others > 0)
    rows = rows.dropna()
    if rows["s"].nunique() < ENOUGH_STEPS:
        raise NotChecked(f"workers ran at like batch and depth in fewer than {ENOUGH_STEPS} RL steps")
    for worker, of_worker in rows.groupby("w"):
        sums = of_worker.groupby("s")[["took", "usual"]].sum()
        if len(sums) < ENOUGH_STEPS:
            continue
        factor = ratio(sums["took"].to_numpy(), sums["usual"].to_numpy())
        if factor.low > SLOW_WORKER:
            return problem(
                title=f"Worker {worker} is slower than the others",
                evidence=f"Its iterations take {with_ends(factor)} times those of the other workers at like batch and "
                "depth.",
                advice="Look at its device and what else runs there: another process, fewer cores, a throttled GPU.",
                where=f"worker {worker}",
            )
    return None


@check("interrupted", good="the recording is whole")
def interrupted(evidence: RunEvidence) -> Finding | None:
    """The recording was interrupted, so the trace lacks what came later."""
    notes = "" if evidence.trace is None else evidence.trace.manifest.notes or ""
    at = notes.find("repaired: ")
    if evidence.unfinished is None and at < 0:
        return None
    if evidence.unfinished is not None:
        sentence = f"{evidence.unfinished.name} is still there: the run was stopped, or goes on."
        advice = "Commands read it as it is. If no run writes there any more, tltlab trace repair makes a trace of it."
    else:
        sentence = f'The trace says "{notes[at:]}".'
        advice = "Nothing is wrong with what is there; RL steps of which requests are missing are best left out."
    return (problem if evidence.unfinished is not None else hint)("The recording was interrupted", sentence, advice)


@check("no-graph", good="decoding runs in full CUDA graphs")
def no_graph(evidence: RunEvidence) -> Finding | None:
    """On a GPU, decoding runs in piecewise CUDA graphs, or in none."""
    hardware = None if evidence.trace is None else evidence.trace.manifest.hardware
    if hardware is None or "CPU" in hardware:
        raise NotChecked("the hardware is not known" if hardware is None else "CUDA graphs exist on GPUs only")
    table = evidence.decoding
    table = table[table["graph"].notna()]
    if table.empty:
        raise NotChecked("the trace does not say what iterations ran in (graph in iterations.parquet)")
    shares = table.groupby("graph")["duration"].sum() / table["duration"].sum()
    piecewise, eager = (float(shares.get(kind, 0.0)) for kind in ("piecewise", "eager"))
    if piecewise + eager < GRAPHLESS_SHARE:
        return None
    lacking = table[table["graph"] != "full"]
    by_depth = lacking.groupby("draft_depth")["duration"].sum()
    depth = by_depth.idxmax()
    most = f"draft depth {depth}" if depth else "plain decoding"
    return (problem if eager >= GRAPHLESS_SHARE else hint)(
        title="Engines decode without full CUDA graphs",
        evidence=(
            f"{piecewise:.0%} of decoding time ran in piecewise graphs and {eager:.0%} in none, most of it "
            f"({by_depth.max() / lacking['duration'].sum():.0%}) at {most}; batches of {lacking['batch'].min()} to "
            f"{lacking['batch'].max()}."
        ),
        advice=(
            "Leave rollout.vllm.enforce_eager and compilation_config out and rollout.graphs at planned; larger batches "
            "than graphs were captured for need rollout.vllm.max_num_batched_tokens."
            if eager >= GRAPHLESS_SHARE
            else "rollout.graphs = planned captures graphs for drafts of any lengths where attention takes them "
            "(Hopper); elsewhere drop model-free drafters and fallbacks, so that vLLM takes its V2 runner, or draft at "
            "one depth."
        ),
    )
