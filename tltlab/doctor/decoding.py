"""Tests on the time of rollouts: against plain decoding, across workers, in queues, in CUDA graphs, within RL steps."""

from __future__ import annotations

import numpy as np
import pandas as pd

from tltlab.calibration.stages import rollout_rows
from tltlab.stats import mean_of_few

from .check import Facts, NotChecked, rl_steps
from .evidence import ENOUGH_STEPS, RunEvidence, ratio, stage_label

UNSURE = 1.05  # fitted plain times miss held-out rollouts by up to 5 %, which an interval over RL steps does not see
LOSING_SHARE = 0.02  # share of decoding time in losing batches below which a change is not worth the trouble
HALF = 0.5  # below half of the RL step even a rollout in no time at all saves less than what stays
WAITING_SHARE = 0.2  # share of the time with a queue that is more than the end of one admission
PREFILL_AGAIN = 1.05  # prefilled over prompt tokens: prefix caching keeps it below 1, preemption brings it above
SLOW_WORKER = 1.1  # time over the other workers' at like batches: single rollouts vary by some 5 %
GRAPHLESS_SHARE = 0.05  # share of the time without graphs that is worth the memory of more of them
DRAFTED = 1.05  # tokens per draft from which an RL step of a training log counts as one that gains by drafts

GRAPHS = (
    "{piecewise:.0%} of decoding time ran in piecewise graphs and {eager:.0%} in none, most of it ({share:.0%}) at "
    "{most}; batches of {least_batch} to {most_batch}."
)


def slower_than_plain(run: RunEvidence) -> Facts | None:
    """Decoding under a policy that speculates takes longer than plain decoding of as many tokens would."""
    rows = run.decoding[run.decoding["rl_step"].isin(run.speculating["rl_step"])]
    names = rows["rl_step"].map({rl_step: policy[0] for rl_step, policy in run.policy_of_step.items()})
    slowdowns = {str(name): run.against_plain(of_policy) for name, of_policy in rows.groupby(names)}
    judged = [(slowdown.low, name, slowdown) for name, slowdown in slowdowns.items() if slowdown is not None]
    if not judged:
        raise NotChecked(f"no policy speculated in {ENOUGH_STEPS} RL steps at batches of which plain times are known")
    low, name, slowdown = max(judged, key=lambda policy: policy[0])
    if low <= UNSURE:
        return None
    _, source = run.plain
    where = rl_steps(rows.loc[names == name, "rl_step"])
    return {"policy": name, "slowdown": slowdown, "source": source, "where": where}


def large_batches(run: RunEvidence) -> Facts | None:
    """Speculation continues at batches where it loses, though it gains at smaller ones."""
    rows = run.speculating
    of_band = rows.groupby(2 ** np.log2(rows["batch"].clip(lower=1)).astype(int))
    intervals = {int(least): run.against_plain(in_band) for least, in_band in of_band}
    bands = {least: slowdown for least, slowdown in intervals.items() if slowdown is not None}
    if not bands:
        raise NotChecked(f"no batch size was both decoded plainly and speculated at in {ENOUGH_STEPS} RL steps")
    gaining = [least for least, slowdown in bands.items() if slowdown.high < 1]
    if not gaining:
        raise NotChecked("speculation certainly gains at no batch size, so no batch is too large for it")
    losing = [least for least, slowdown in bands.items() if slowdown.low > UNSURE and least > min(gaining)]
    share = rows.loc[rows["batch"] >= min(losing, default=np.inf), "duration"].sum() / run.decoding["duration"].sum()
    if not losing or share < LOSING_SHARE:
        return None
    bounds = {least: f"{least}-{2 * least - 1}" if least > 1 else "1" for least in bands}
    return {
        "by_batch": ", ".join(f"batch {bounds[least]} {slowdown:.2f}" for least, slowdown in bands.items()),
        "share": share, "most": min(losing) - 1, "source": run.plain[1], "where": f"batches from {min(losing)}",
    }  # fmt: skip


def drafts_lose_time(run: RunEvidence) -> Facts | None:
    """Rollouts that speculate take longer for their lengths than those that do not: speculation is net negative."""
    rows = timed_steps(run)
    # One token per draft is what drafts yield of which none is kept: neither.
    drafted, plain = rows[rows["accept_length"] >= DRAFTED], rows[rows["accept_length"].isna()]
    if min(len(drafted), len(plain)) < ENOUGH_STEPS:
        raise NotChecked(f"RL steps with and without speculation, {ENOUGH_STEPS} of each, are needed")
    terms = ["longest", "tokens"] if len(plain) >= 4 else ["tokens"]
    # Fit the seconds of plain rollouts to their lengths, with relative errors.
    x, y = plain[terms].to_numpy(np.float64), plain["rollout_s"].to_numpy(np.float64)
    coefficients = np.linalg.lstsq(x / y[:, None], np.ones(len(y)), rcond=None)[0]
    expected = drafted[terms].to_numpy(np.float64) @ coefficients
    if (expected <= 0).any():
        raise NotChecked("plain rollouts do not determine the time per length")
    off = float(np.sqrt(np.mean((x @ coefficients / y - 1) ** 2)))
    cost = mean_of_few((drafted["rollout_s"] / expected).to_numpy(), least_error=off / np.sqrt(len(plain)))
    facts = {"drafted": len(drafted), "accept_length": drafted["accept_length"].mean(), "cost": cost}
    return facts | {"where": rl_steps(drafted["rl_step"])} if cost.low > 1.0 else None


def timed_steps(run: RunEvidence) -> pd.DataFrame:
    """RL steps with a rollout time and an accept length: these, longest response and tokens."""
    steps = run.steps
    if "accept_length" not in steps:
        raise NotChecked("the RL steps have no tokens per draft (a training log may)")
    timed = steps[steps["rollout_s"] > 0].assign(accept_length=steps["accept_length"].astype(np.float64))
    lengths = run.known.outcomes.groupby("rl_step")["response_tokens"].agg(longest="max", tokens="sum")
    rows = timed.merge(lengths, left_on="rl_step", right_index=True).reset_index(drop=True)
    if rows.empty:
        raise NotChecked("no RL step has a rollout time")
    return rows


def not_bottleneck(run: RunEvidence) -> Facts | None:
    """The rollout, or waiting for it, is less than half of an RL step: speeding it up cannot help much."""
    rows, part = rollout_rows(run.stages)
    if len(rows) < ENOUGH_STEPS:
        raise NotChecked(f"the times of the stages (steps) are known of fewer than {ENOUGH_STEPS} RL steps")
    others = rows.drop(columns=[part, "step"]).fillna(0.0)
    if not others.to_numpy().any():
        raise NotChecked("only the rollout's time is known, not that of the stages behind it (simulate: --stages)")
    share = ratio(rows[part], rows["step"])
    if share.high >= HALF:
        return None
    parts = others.sum().sort_values(ascending=False) / rows["step"].sum()
    breakdown = ", ".join(
        f"{stage_label(str(name))} {of_step:.0%}" for name, of_step in parts.items() if of_step >= 0.01
    )
    largest = str(parts.index[0])
    lead = "The rollout" if part == "rollout" else "Waiting for rollouts"
    facts = {"largest": stage_label(largest), "remedy": run.remedy(largest), "breakdown": breakdown, "lead": lead}
    return facts | {"share": share, "gain": share.estimate / 2}


def rollout_share(run: RunEvidence) -> Facts | None:
    """The rollout is most of an RL step: how much faster the step can get at best."""
    timed = (run.steps if run.log is None else run.log).reindex(columns=["rl_step", "step_s"]).dropna()
    rows, part = rollout_rows(run.stages)
    rows = rows[rows.index.isin(timed["rl_step"])]
    if len(rows) < ENOUGH_STEPS:
        few = f"fewer than {ENOUGH_STEPS} RL steps time rollout and whole RL step (a training log does)"
        raise NotChecked(run.complaint or few)
    share = ratio(rows[part], rows["step"])
    if share.low < HALF:
        return None
    gains = {"twice": 1 / (1 - share.estimate / 2), "at_best": 1 / max(1 - share.estimate, 1e-3)}
    return gains | {"share": share, "rollout_s": rows[part].median(), "step_s": rows["step"].median()}


def preemption(run: RunEvidence) -> Facts | None:
    """Requests were thrown out of the KV cache and prefilled again."""
    if run.iterations["num_waiting"].isna().all():
        raise NotChecked("the trace has no number of waiting requests (iterations.num_waiting)")
    again = run.iterations["prefill_tokens"].sum() / max(int(run.known.workload["prompt_tokens"].sum()), 1)
    return {"again": again} if again > PREFILL_AGAIN else None


def waiting_queue(run: RunEvidence) -> Facts | None:
    """Requests wait for a place."""
    table = run.iterations
    waiting = table.loc[table["num_waiting"].fillna(0) > 0, "duration"].sum() / table["duration"].sum()
    facts = {"waiting": waiting, "most": table["num_waiting"].max(), "batch": table["batch"].max()}
    return facts if waiting >= WAITING_SHARE else None


def slow_worker(run: RunEvidence) -> Facts | None:
    """One worker takes longer than the others for like iterations."""
    table = run.iterations
    table = table[(table["prefill_tokens"] == 0) & (table["batch"] > 0)]
    if table["worker"].nunique() < 2:
        raise NotChecked("iterations of at least two workers are needed")
    table = table.assign(size=np.log2(table["batch"]).astype(int))
    # Against the other workers' mean in the same RL step, at like depth and batch.
    cell = ["rl_step", "draft_depth", "size"]
    all_workers, own = table.groupby(cell)["duration"], table.groupby([*cell, "worker"])["duration"]
    num_others = all_workers.transform("size") - own.transform("size")
    usual = (all_workers.transform("sum") - own.transform("sum")) / num_others.where(num_others > 0)
    rows = table.assign(usual=usual)[usual.notna()]
    if rows["rl_step"].nunique() < ENOUGH_STEPS:
        raise NotChecked(f"workers ran at like batch and depth in fewer than {ENOUGH_STEPS} RL steps")
    for worker, of_worker in rows.groupby("worker"):
        sums = of_worker.groupby("rl_step")[["duration", "usual"]].sum()
        if len(sums) < ENOUGH_STEPS:
            continue
        factor = ratio(sums["duration"], sums["usual"])
        if factor.low > SLOW_WORKER:
            return {"worker": worker, "factor": factor, "where": f"worker {worker}"}
    return None


def no_graph(run: RunEvidence, kinds: tuple[str, ...]) -> Facts | None:
    """On a GPU, decoding runs in `kinds` of CUDA graph: piecewise ones, or none ("eager")."""
    hardware = run.known.manifest.hardware
    if hardware is None or "CPU" in hardware:
        raise NotChecked("the hardware is not known" if hardware is None else "CUDA graphs exist on GPUs only")
    table = run.decoding[run.decoding["graph"].notna()]
    if table.empty:
        raise NotChecked("the trace has no CUDA graphs of iterations (graph in iterations.parquet)")
    shares = {kind: table.loc[table["graph"] == kind, "duration"].sum() for kind in ("piecewise", "eager")}
    shares = {kind: seconds / table["duration"].sum() for kind, seconds in shares.items()}
    if sum(shares[kind] for kind in kinds) < GRAPHLESS_SHARE:
        return None
    lacking = table[table["graph"] != "full"]
    by_depth = lacking.groupby("draft_depth")["duration"].sum()
    most = f"draft depth {by_depth.idxmax()}" if by_depth.idxmax() else "plain decoding"
    facts = {"most": most, "share": by_depth.max() / by_depth.sum()}
    return facts | shares | {"least_batch": lacking["batch"].min(), "most_batch": lacking["batch"].max()}
