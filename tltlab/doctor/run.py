"""Failure signatures of a run around speculation: where the time goes, idle workers, the machine, the trace itself."""

from __future__ import annotations

import numpy as np
import pandas as pd

from tltlab.costs.stages import STAGES
from tltlab.traces import metrics
from tltlab.traces.schema import KEY

from .evidence import ENOUGH_STEPS, RunEvidence, ratio, with_ends
from .finding import Finding, NotChecked, check, hint, problem

HALF = 0.5
"""Below half of the RL step even a rollout in no time at all saves less than what stays."""

CUT_SHARE = 0.1
"""Responses cut at the cap beyond which the tail of the lengths is what the cap makes it."""

ABORTED_SHARE = 0.05
"""Aborted responses beyond which lengths and rewards are those of a selection."""

STARVED = 0.95
"""Mean length trained on over that generated below which the policy is taught to be short."""

WAITING_SHARE = 0.2
"""Share of the time with a queue that is more than the end of one admission."""

PREFILL_SHARE = 0.3
"""Share of the busy time in prefill from which decoding, all that speculation speeds up, is no longer most of it."""

PREFILL_AGAIN = 1.05
"""Tokens prefilled over tokens of prompts: prefix caching keeps it below 1, preemption brings it above."""

UNEVEN = 1.25
"""Tokens of the fullest worker over the mean from which the split, not the longest response, makes the bubble."""

SLOW_WORKER = 1.1
"""Time of a worker over the others' at like batches: single rollouts vary by some 5 %."""

OUTSIDE_SHARE = 0.1
"""Share of the rollout after its last iteration; in runs on this project's recorder it is below 5 %."""

GRAPHLESS_SHARE = 0.05
"""Share of the time without graphs below which capturing more of them is not worth their memory."""

REPEAT_SPREAD = 0.1
"""Difference of two rollouts of the very same work beyond which policies a few per cent apart cannot be told apart."""


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


@check("cut-at-cap", good="responses end by themselves")
def cut_at_cap(evidence: RunEvidence) -> Finding | None:
    """Many responses were cut at the cap, or aborted: their true lengths are not known."""
    trace = evidence.known
    rows = trace.outcomes.merge(trace.workload[[*KEY, "epoch"]], on=list(KEY)).sort_values("rl_step", kind="stable")
    aborted_there = rows["finish_reason"] == "abort"
    if (rows.duplicated(["epoch", "prompt_id", "sample"], keep="last") & aborted_there).any():
        # What is cut at the end of an RL step goes on in a later one, as what is cut now would.
        rows = rows[~aborted_there]
    reasons = rows["finish_reason"].value_counts(normalize=True)
    cut, aborted = float(reasons.get("length", 0.0)), float(reasons.get("abort", 0.0))
    if cut < CUT_SHARE and aborted < ABORTED_SHARE:
        return None
    return hint(
        title="Many responses did not end by themselves",
        evidence=(
            f"{cut:.0%} were cut at the cap and {aborted:.0%} aborted. Their lengths are lower bounds, and what is "
            "simulated from them has the tail that the cap left."
        ),
        advice="Raise rollout.max_response_tokens if they should be finished, or keep it and read tails with care.",
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


@check("prefill-bound", good="prefill is a small part")
def prefill_bound(evidence: RunEvidence) -> Finding | None:
    """Much of the engines' time is prefill, which speculation does not speed up."""
    table = evidence.iterations
    share = table.loc[table["prefill_tokens"] > 0, "duration"].sum() / table["duration"].sum()
    if share < PREFILL_SHARE:
        return None
    tokens = table["prefill_tokens"].sum() / len(evidence.known.workload)
    return hint(
        title="Engines spend much of their time on prompts",
        evidence=f"{share:.0%} of the engines' time is in iterations with prefill, {tokens:.0f} tokens a response.",
        advice="Let samples share their prompt's cache (vllm.enable_prefix_caching); speculation cannot help here.",
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


@check("workers-uneven", good="the split is even enough")
def workers_uneven(evidence: RunEvidence) -> Finding | None:
    """The static split gives one worker much more to generate than the others."""
    outcomes = evidence.known.outcomes
    if outcomes["worker"].isna().any() or outcomes["worker"].nunique() < 2:
        raise NotChecked("responses of at least two workers are needed")
    tokens = outcomes.groupby(["rl_step", "worker"])["response_tokens"].sum().unstack(fill_value=0)
    if len(tokens) < ENOUGH_STEPS:
        raise NotChecked(f"an interval needs {ENOUGH_STEPS} RL steps")
    skew = ratio(tokens.max(axis=1).to_numpy(np.float64), tokens.mean(axis=1).to_numpy(np.float64))
    bubble = metrics.bubble_fraction(evidence.known)
    if skew.low < UNEVEN or bubble is None:
        return None
    return hint(
        title="The split gives some workers much more to do than others",
        evidence=(
            f"The fullest worker generates {skew.estimate:.2f} times the mean ({skew.low:.2f} to {skew.high:.2f}); "
            f"{bubble:.0%} of the workers' time is idle."
        ),
        advice="Spread a prompt's samples over workers: tltlab simulate --placement round_robin shows the gain.",
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


@check("time-outside", good="little time outside iterations")
def time_outside(evidence: RunEvidence) -> Finding | None:
    """A good part of the rollout's time lies after the last iteration: in starting, handing over, recording."""
    steps = evidence.known.steps
    if steps is None or steps["rollout_s"].notna().sum() < ENOUGH_STEPS:
        raise NotChecked("the rollout's own time (steps.rollout_s) is not known")
    table = evidence.iterations
    ends = (table["t_start"] + table["duration"]).groupby(table["rl_step"]).max()
    whole = steps.set_index("rl_step")["rollout_s"].dropna()
    times = pd.DataFrame({"ends": ends, "whole": whole}).dropna()
    times = times[times["whole"] > 0]
    if len(times) < ENOUGH_STEPS:
        raise NotChecked("too few RL steps tell both iterations and the rollout's time")
    share = ratio(times["ends"].clip(upper=times["whole"]).to_numpy(), times["whole"].to_numpy())
    if 1 - share.high < OUTSIDE_SHARE:
        return None
    return hint(
        title="Rollouts last longer than their iterations",
        evidence=(
            f"{1 - share.estimate:.0%} of the rollout ({1 - share.high:.0%} to {1 - share.low:.0%}) comes after the "
            "last iteration: handing requests and responses over, recording, or a worker without iterations."
        ),
        advice="Larger rollouts (rollout.prompts_per_step) bear it better; tltlab bench runtime times the recorder.",
    )


@check("noisy-machine", good="the machine repeats its times")
def noisy_machine(evidence: RunEvidence) -> Finding | None:
    """The same rollout done twice took quite different times."""
    pairs = [(float(r["rollout_s"]), float(r["repeat_s"])) for r in evidence.repeats if r.get("same_tokens", True)]
    if len(pairs) < 2:
        raise NotChecked("no rollout was done twice (rollout.repeat_every)")
    spread = float(np.median([abs(a - b) / ((a + b) / 2) for a, b in pairs]))
    if spread < REPEAT_SPREAD:
        return None
    return hint(
        title="The machine takes different times for the same work",
        evidence=f"{len(pairs)} rollouts done twice differ by {spread:.0%} in the median.",
        advice=f"Stop what else runs there, or compare over more RL steps: under {spread:.0%} nothing is sure.",
    )


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
