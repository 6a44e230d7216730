"""graph-memory: what plans of captured CUDA graphs take in memory and what they cost in time.

Plans: one strategy, TLT's four captured naively, the same in buckets as the released code has them, and plans chosen
exactly, by `tltlab.planning.buckets`, within several caps. Time is the objective of those: seconds of decoding at
batches up to `max_batch`, sum over b of w_b * t_s(b) / A_s, from a cost and an acceptance model and the lengths of a
trace. Memory is `tltlab.planning.graph_pool`'s, its one free parameter fitted to the first figure of TLT's Table 5
(arXiv 2511.16665) with the released code's strategies and engine; `tltlab bench accuracy` has other readings of it.

TLT's question of vLLM, like with like: chains of one model on one runner, one strategy against every strategy captured
at every batch against buckets, and the same plans on the V1 runner, where one graph serves drafts of any lengths.
All of that is predicted; what graphs take on a CUDA device is measured by `tltlab bench gpu graphs`, whose result file
may be given as `measured` and adds rows of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field

from tltlab.acceptance.base import AcceptanceModel
from tltlab.acceptance.load import load_acceptance
from tltlab.charts import COLORS, finish
from tltlab.costs.base import CostModel
from tltlab.costs.load import load_costs
from tltlab.errors import ConfigError
from tltlab.files import read_json
from tltlab.hardware import model as find_model
from tltlab.lengths.generate import generate
from tltlab.lengths.model import of_regime
from tltlab.planning.buckets import batch_times, plan_buckets
from tltlab.planning.graph_pool import CapturePlan, GraphPool, plan_bucketed, plan_naive, sglang_sizes
from tltlab.runtime.engine.graphs import chain_policies, memory_bytes, plan_graphs, vllm_pool
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.traces.trace import Trace, read

from . import Progress
from .models import Count
from .result import ExperimentResult

GIB = 2**30
Rows = tuple[tuple[int, Strategy], ...]
MEASURED_GB = {"single": 7.81, "naive": 30.39, "bucketed": 10.69}
"""TLT's Table 5: Llama-3-8B, one GPU of 4, in GiB, which SGLang logs as "GB"."""
MAX_BATCH = 32
DEFAULT = Strategy("learned", 8, 4, 48)
SHIPPED = ((1, DEFAULT), *((n, Strategy("learned", 8, 4, v)) for n, v in ((2, 32), (5, 16), (21, 8))))
"""The released code's strategies, by the batch from which each is taken."""
PROMPT_TOKENS = 2048
"""Beside the response, of the context of TLT's RL runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphMemorySettings:
    """Without `trace` lengths are drawn as in TLT's recipe for 32B: 256 prompts x 8 up to 32,768 tokens, 16 workers.

    `depths` and `verify` span the strategies that the exact search chooses from, with TLT's four and no speculation.
    `caps` is how many memory limits it gets, spaced evenly from the least to what the fastest plan takes. `measured`
    is what `tltlab bench gpu graphs --out` wrote.
    """

    trace: Path | None = None
    regime: str = "reasoning"
    prompts: Count = 256
    group_size: Count = 8
    cap: Count = 32_768
    workers: Count = 16
    rl_steps: Count = 4
    costs: str = "h100-qwen2.5-32b-tp4"
    shape: str = "Qwen2.5-32B"
    acceptance: str = "tlt-qwen2.5-32b"
    max_batch: Count = MAX_BATCH
    depths: tuple[Count, ...] = (4, 6, 8, 10)
    top_k: Count = 8
    verify: tuple[Annotated[int, Field(ge=2)], ...] = (16, 32, 48, 64)
    caps: Count = 8
    measured: Path | None = None


FAST: Mapping[str, Any] = {"prompts": 64, "rl_steps": 1, "workers": 4, "depths": (4, 8), "verify": (16, 48), "caps": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    name: str
    rows: Rows
    captured: CapturePlan
    seconds: float


def table_5_pool() -> GraphPool:
    """Llama-3-8B in a context of 8,192 tokens, with the overhead that makes one strategy take what TLT measured."""
    pool = GraphPool(
        num_layers=32, hidden_size=4096, vocab_size=128_256, context_tokens=8192, tensor_parallel=4,
        bytes_per_layer=0.0,
    )  # fmt: skip
    return pool.fitted(plan_naive([DEFAULT], MAX_BATCH, sglang_sizes(MAX_BATCH)), MEASURED_GB["single"] * GIB)


def table_5_errors() -> dict[str, float]:
    """Predicted over measured memory, less 1, of the two pools of Table 5 that nothing was fitted to."""
    pool, sizes = table_5_pool(), sglang_sizes(MAX_BATCH)
    plans = {
        "naive": plan_naive([strategy for _, strategy in SHIPPED], MAX_BATCH, sizes),
        "bucketed": plan_bucketed(SHIPPED, MAX_BATCH, sizes),
    }
    return {name: pool.memory_bytes(plan) / GIB / MEASURED_GB[name] - 1.0 for name, plan in plans.items()}


def run(settings: GraphMemorySettings, *, folder: Path, seed: int, progress: Progress) -> ExperimentResult:
    """The experiment; nothing is written to `folder`."""
    costs, acceptance = load_costs(settings.costs), load_acceptance(settings.acceptance)
    if not isinstance(acceptance, AcceptanceModel):
        raise ConfigError(f"acceptance {settings.acceptance}: take a model that treats all requests alike")
    trace = _trace(settings, seed)
    strategies = _strategies(settings)
    weights, contexts = batch_times(trace, settings.workers)
    weights = {b: w for b, w in weights.items() if b <= settings.max_batch}
    per_token_s = _seconds_per_token(strategies, costs, acceptance, contexts)
    shape = find_model(settings.shape)
    pool = table_5_pool().model_copy(
        update={
            "num_layers": shape.layers, "hidden_size": shape.hidden, "vocab_size": shape.vocab,
            "context_tokens": settings.cap + PROMPT_TOKENS, "tensor_parallel": costs.tensor_parallel,
        }
    )  # fmt: skip
    plans = _plans(settings, strategies, weights, per_token_s, pool, progress)
    least_s = min(plan.seconds for plan in plans)
    if least_s == 0:
        raise ConfigError(f"no worker spends time at a batch up to {settings.max_batch}: raise max_batch or the cap")
    num_bytes = {plan.name: pool.memory_bytes(plan.captured) for plan in plans}
    rows = [
        {
            "model": settings.shape,
            "runner": "SGLang",
            "plan": plan.name,
            "strategies": " ".join(f"{b}:{_short(s)}" for b, s in plan.rows),
            "graphs": len(plan.captured.target_graphs) + 2 * len(plan.captured.drafter_graphs),
            "predicted_gib": num_bytes[plan.name] / GIB,
            "over_single": num_bytes[plan.name] / num_bytes["single"],
            "seconds": plan.seconds,
            "over_fastest": plan.seconds / least_s - 1,
        }
        for plan in plans
    ]
    chains = list(_chains(settings, costs.tensor_parallel))
    measured = list(_gpu_rows(settings.measured)) if settings.measured is not None else []
    ours, frame = pd.DataFrame(rows), pd.DataFrame([*rows, *_table_5(), *chains, *measured])
    return ExperimentResult(
        verdict=_verdict(ours, settings) + _chains_verdict(measured or chains, predicted=not measured),
        rows=frame,
        figure=_picture(ours, settings),
        prediction=True,
        notes=tuple(_notes(settings, strategies, acceptance)),
    )


def _trace(settings: GraphMemorySettings, seed: int) -> Trace:
    if settings.trace is not None:
        return read(settings.trace)
    return generate(
        of_regime(settings.regime).with_changes(max_response_tokens=settings.cap),
        num_rl_steps=settings.rl_steps,
        prompts_per_step=settings.prompts,
        group_size=settings.group_size,
        num_workers=settings.workers,
        seed=seed,
    )


def _strategies(settings: GraphMemorySettings) -> tuple[Strategy, ...]:
    """TLT's four, every depth with every number of tokens to verify that its tree can have, and no speculation."""
    grid = [
        Strategy("learned", depth, settings.top_k, verify)
        for depth in settings.depths
        for verify in settings.verify
        if verify <= 1 + settings.top_k + (depth - 1) * settings.top_k**2
    ]
    return tuple(dict.fromkeys((*(s for _, s in SHIPPED), *grid, NO_SPECULATION)))


def _seconds_per_token(
    strategies: Sequence[Strategy], costs: CostModel, acceptance: AcceptanceModel, contexts: Mapping[int, float]
) -> Callable[[Strategy, int], float]:
    """t_s(b) / A_s at the mean context that the trace has at batch b, between two of its batch sizes on a line."""
    iterations = {s: costs.iteration(s, drafter_loaded=True) for s in strategies}
    batches = np.array(sorted(contexts))
    per_request = np.array([contexts[int(b)] / b for b in batches])

    def seconds(strategy: Strategy, batch: int) -> float:
        tokens = acceptance.at(batch).tokens_per_iteration(strategy) if strategy.speculates else 1.0
        context = batch * float(np.interp(batch, batches, per_request))
        return iterations[strategy].seconds(batch, context) / tokens

    return seconds


def _plans(
    settings: GraphMemorySettings,
    strategies: Sequence[Strategy],
    weights: Mapping[int, float],
    per_token_s: Callable[[Strategy, int], float],
    pool: GraphPool,
    progress: Progress,
) -> list[_Plan]:
    top = settings.max_batch
    sizes = sglang_sizes(top)

    def fixed(name: str, rows: Rows, captured: CapturePlan, choices: Sequence[Strategy] | None = None) -> _Plan:
        """`choices` may each serve every batch; without them the row of a batch does."""
        seconds = sum(
            w * min(per_token_s(s, b) for s in (choices or [[s for start, s in rows if start <= b][-1]]))
            for b, w in weights.items()
        )
        return _Plan(name=name, rows=rows, captured=captured, seconds=seconds)

    def exact(name: str, cap_bytes: float | None) -> _Plan:
        plan = plan_buckets(
            weights, per_token_s, strategies, pool=pool, cap_bytes=cap_bytes, sizes=sizes, max_batch=top
        )
        return _Plan(name=name, rows=plan.rows, captured=plan_bucketed(plan.rows, top, sizes), seconds=plan.seconds)

    shipped = tuple((b, s) for b, s in SHIPPED if b <= top)
    four = [s for _, s in shipped]
    released = plan_bucketed(shipped, top, sizes)
    plain: Rows = ((1, NO_SPECULATION),)
    plans = [
        fixed("no speculation", plain, plan_bucketed(plain, top, sizes)),
        fixed("single", ((1, DEFAULT),), plan_naive([DEFAULT], top, sizes)),
        fixed("naive", tuple((1, s) for s in four), plan_naive(four, top, sizes), four),
        fixed("buckets as released", shipped, released),
        exact("exact, memory as released", pool.memory_bytes(released)),
        exact("exact, no cap", None),
    ]
    least, most = (pool.memory_bytes(plan.captured) for plan in (plans[0], plans[-1]))
    for cap_bytes in np.linspace(least, most, settings.caps + 1)[1:-1]:
        plans.append(exact(f"exact, {cap_bytes / GIB:.1f} GiB", float(cap_bytes)))
        progress(f"exact plan within {cap_bytes / GIB:.1f} GiB: {plans[-1].seconds:.1f} s")
    return plans


def _table_5() -> Iterator[dict[str, Any]]:
    """TLT's own figures; the single strategy is what the pool is fitted to."""
    for name, paper_gib in MEASURED_GB.items():
        yield {
            "model": "Llama-3-8B",
            "runner": "SGLang",
            "plan": f"Table 5, {name}" + (" (fitted)" if name == "single" else ""),
            "paper_gib": paper_gib,
            "over_single": paper_gib / MEASURED_GB["single"],
        }


def _chains(settings: GraphMemorySettings, tensor_parallel: int) -> Iterator[dict[str, Any]]:
    """Plans of chains on vLLM, with a learned drafter on its V2 runner, without one on its V1 runner."""
    shape = find_model(settings.shape)
    pool = vllm_pool(shape.layers, shape.hidden, shape.vocab, tensor_parallel=tensor_parallel)
    for runner, drafter in (("V2", "learned"), ("V1", "ngram")):
        plans = {
            name: plan_graphs(policy, settings.max_batch, runner="V1" if runner == "V1" else "V2", any_lengths=True)
            for name, policy in chain_policies(drafter).items()
        }
        for name, plan in plans.items():
            num_bytes = memory_bytes(pool, plan)
            yield {
                "model": settings.shape,
                "runner": f"vLLM {runner}",
                "plan": f"chains, {name}",
                "strategies": " ".join(f"K={depth}" for depth in plan.depths),
                "graphs": len(plan.full_graphs()) + len(plan.piecewise_graphs()),
                "predicted_gib": num_bytes / GIB,
                "over_single": num_bytes / memory_bytes(pool, plans["one strategy"]),
            }


def _gpu_rows(path: Path) -> Iterator[dict[str, Any]]:
    """What `tltlab bench gpu graphs` measured, engine by engine. ConfigError for a file of something else."""
    result = read_json(path)
    if not isinstance(result, dict) or result.get("part") != "graphs":
        raise ConfigError(f"{path} is not what tltlab bench gpu graphs --out writes")
    rows = [row for row in result["rows"] if row.get("memory", {}).get("measured_bytes")]
    single = {row["runner"]: row["memory"]["measured_bytes"] for row in rows if row["plan"] == "one strategy"}
    for row in rows:
        num_bytes, captured = row["memory"]["measured_bytes"], row["captured"]
        yield {
            "model": result["model"],
            "runner": f"vLLM {row['runner']}",
            "plan": f"measured, {row['graphs']}, {row['plan']}",
            "graphs": len(captured["full"]) + len(captured["piecewise"]),
            "predicted_gib": row["memory"]["predicted_bytes"] / GIB,
            "measured_gib": num_bytes / GIB,
            "over_single": num_bytes / single[row["runner"]] if row["runner"] in single else None,
        }


def _chains_verdict(rows: Sequence[Mapping[str, Any]], *, predicted: bool) -> str:
    """One strategy, every strategy apart and buckets on the V2 runner."""
    of_v2 = {str(row["plan"]).split(", ")[-1]: row for row in rows if row["runner"] == "vLLM V2"}
    if not {"one strategy", "every strategy apart", "bucketed"} <= of_v2.keys():
        return ""
    gib = {name: row["predicted_gib"] if predicted else row["measured_gib"] for name, row in of_v2.items()}
    base = gib["one strategy"]
    return (
        f" Chains on vLLM's V2 runner, {'predicted' if predicted else 'measured'}: one strategy {base:.2f} GiB, every "
        f"strategy apart {gib['every strategy apart']:.2f} ({gib['every strategy apart'] / base:.1f} times), bucketed "
        f"{gib['bucketed']:.2f} ({gib['bucketed'] / base:.1f}); TLT: 1, "
        f"{MEASURED_GB['naive'] / MEASURED_GB['single']:.1f} and "
        f"{MEASURED_GB['bucketed'] / MEASURED_GB['single']:.1f}."
    )


def _short(strategy: Strategy) -> str:
    """As TLT writes strategies: depth_topK_verify."""
    if not strategy.speculates:
        return "plain"
    return f"{strategy.draft_depth}_{strategy.top_k}_{strategy.tokens_to_verify}"


def _verdict(rows: pd.DataFrame, settings: GraphMemorySettings) -> str:
    by = rows.set_index("plan")
    naive, released, equal, free = (
        by.loc[name] for name in ("naive", "buckets as released", "exact, memory as released", "exact, no cap")
    )
    return (
        f"Predicted for {settings.shape}: buckets as released take {released.predicted_gib:.1f} GiB against "
        f"{naive.predicted_gib:.1f} captured naively ({naive.predicted_gib / released.predicted_gib:.1f} times; "
        f"TLT's Table 5 has {MEASURED_GB['naive'] / MEASURED_GB['bucketed']:.1f}), and buckets "
        f"and strategies chosen exactly within the same memory take {equal.seconds:.0f} worker-seconds of decoding at "
        f"batches up to {settings.max_batch} against {released.seconds:.0f} "
        f"({1 - equal.seconds / released.seconds:.1%} less); with {free.predicted_gib:.1f} GiB "
        f"the fastest plan takes {free.seconds:.0f}."
    )


def _notes(settings: GraphMemorySettings, strategies: Sequence[Strategy], acceptance: AcceptanceModel) -> Iterator[str]:
    yield (
        "seconds: worker-seconds of decoding per RL step at batches up to max_batch, mean over RL steps; larger "
        "batches decode plainly and are in no plan"
    )
    errors = table_5_errors()
    yield (
        "predicted_gib: an overhead per layer, fitted to one strategy of TLT's Table 5, is carried over from "
        f"Llama-3-8B; on Table 5 itself it errs by {errors['naive']:+.0%} for naive capture and "
        f"{errors['bucketed']:+.0%} for buckets; `tltlab bench accuracy` shows what other readings of it give"
    )
    outside = [_short(s) for s in strategies if s.speculates and acceptance.outside(s)]
    if outside:
        yield f"acceptance of {', '.join(outside)} is an extrapolation of {settings.acceptance}"
    if settings.measured is None:
        yield "nothing was captured, all figures are predicted; `tltlab bench gpu graphs` measures on a CUDA device"


def _picture(rows: pd.DataFrame, settings: GraphMemorySettings) -> Figure:
    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.subplots()
    exact = rows[rows["plan"].str.startswith("exact")].sort_values("predicted_gib")
    axes.plot(
        exact["predicted_gib"], exact["seconds"], color=COLORS[0], marker="o", markersize=4, linewidth=1.4,
        drawstyle="steps-post", label="chosen exactly, by memory cap",
    )  # fmt: skip
    named = rows[~rows["plan"].str.startswith("exact")].to_dict("records")
    for marker, color, row in zip("Xs^D", (COLORS[7], *COLORS[1:4]), named, strict=True):
        axes.plot(
            [row["predicted_gib"]], [row["seconds"]], marker=marker, color=color, markersize=8, linestyle="none",
            label=str(row["plan"]),
        )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_xscale("log")
    axes.set_xticks([0.5, 1, 2, 5, 10, 20, 50], labels=["0.5", "1", "2", "5", "10", "20", "50"])
    axes.minorticks_off()
    finish(
        axes,
        title=f"Memory of CUDA graphs against decoding time, {settings.shape} (prediction)",
        xlabel="CUDA graphs, GiB a GPU (predicted)",
        ylabel=f"worker-seconds at batches up to {settings.max_batch}",
        grid="both",
    )
    axes.legend(fontsize=8, frameon=False)
    return figure
