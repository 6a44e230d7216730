"""graph-memory: what plans of captured CUDA graphs take in memory and what they cost in time.

Plans: one strategy, TLT's four captured naively, the same in buckets as the released code has them, and plans chosen
exactly, by `tltlab.planning.buckets`, within several caps, for the least time: seconds of decoding at batches up to
`max_batch`, sum over b of w_b * t_s(b) / A_s. Memory is `tltlab.planning.graph_pool`'s, its one free parameter fitted
to the first figure of TLT's Table 5 (arXiv 2511.16665). All of that is predicted; `measured`, a result file of `tltlab
bench gpu graphs`, adds rows of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field

from tltlab.acceptance.load import load_acceptance
from tltlab.charts import lines
from tltlab.costs.load import load_costs
from tltlab.errors import ConfigError
from tltlab.files import read_json
from tltlab.hardware import model as find_model
from tltlab.lengths.generate import generate
from tltlab.lengths.model import of_regime
from tltlab.planning.buckets import batch_times, plan_buckets
from tltlab.planning.graph_pool import GraphPool, plan_bucketed, plan_naive, sglang_sizes
from tltlab.runtime.engine.graphs import chain_policies, memory_bytes, plan_graphs, vllm_pool
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.traces.trace import Trace, read

from .harness import Case, Experiment, Row
from .models import Count

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


class GraphMemory(Experiment[GraphMemorySettings]):
    """Cases are plans; one that is chosen exactly is given its cap in bytes, None for none."""

    Settings = GraphMemorySettings
    FAST: ClassVar = {"prompts": 64, "rl_steps": 1, "workers": 4, "depths": (4, 8), "verify": (16, 48), "caps": 4}
    prediction = True

    def cases(self) -> Iterator[Case]:
        settings, top = self.settings, self.settings.max_batch
        self.costs, acceptance = load_costs(settings.costs), load_acceptance(settings.acceptance)
        if acceptance.varies_by != "nothing":
            raise ConfigError(f"acceptance {settings.acceptance}: take a model that treats all requests alike")
        self.acceptance, self.sizes = acceptance, sglang_sizes(top)
        weights, contexts = batch_times(self._trace(), settings.workers)
        self.weights = {b: w for b, w in weights.items() if b <= top}
        if not any(self.weights.values()):
            raise ConfigError(f"no worker spends time at a batch up to {top}: raise max_batch or the cap")
        self.contexts = {b: tokens / b for b, tokens in sorted(contexts.items())}
        # A tree has top_k tokens at its first level and top_k of each of these at every later one.
        top_k = settings.top_k
        grid = [
            Strategy("learned", depth, top_k, verify)
            for depth, verify in product(settings.depths, settings.verify)
            if verify <= 1 + top_k + (depth - 1) * top_k**2
        ]
        self.strategies = tuple(dict.fromkeys((*(s for _, s in SHIPPED), *grid, NO_SPECULATION)))
        self.iterations = {s: self.costs.iteration(s, drafter_loaded=True) for s in self.strategies}
        shape = find_model(settings.shape)
        changes = {
            "num_layers": shape.layers, "hidden_size": shape.hidden, "vocab_size": shape.vocab,
            "context_tokens": settings.cap + PROMPT_TOKENS, "tensor_parallel": self.costs.tensor_parallel,
        }  # fmt: skip
        self.pool = table_5_pool().model_copy(update=changes)
        shipped: Rows = tuple((b, s) for b, s in SHIPPED if b <= top)
        four, plain = [s for _, s in shipped], plan_bucketed(((1, NO_SPECULATION),), top, self.sizes)
        released = plan_bucketed(shipped, top, self.sizes)
        as_it_is = "a plan as it is"
        yield Case("no speculation", as_it_is, (((1, NO_SPECULATION),), plain))
        yield Case("single", as_it_is, (((1, DEFAULT),), plan_naive([DEFAULT], top, self.sizes)))
        yield Case("naive", as_it_is, (tuple((1, s) for s in four), plan_naive(four, top, self.sizes)))
        yield Case("buckets as released", as_it_is, (shipped, released))
        yield Case("exact, memory as released", "the fastest plan within that", self.pool.memory_bytes(released))
        yield Case("exact, no cap", "the fastest plan", None)
        for cap in np.linspace(self.pool.memory_bytes(plain), self.most, settings.caps + 1)[1:-1].tolist():
            yield Case(f"exact, {cap / GIB:.1f} GiB", "the fastest plan within that", cap)

    def _trace(self) -> Trace:
        settings = self.settings
        if settings.trace is not None:
            return read(settings.trace)
        return generate(
            of_regime(settings.regime).with_changes(max_response_tokens=settings.cap),
            num_rl_steps=settings.rl_steps,
            prompts_per_step=settings.prompts,
            group_size=settings.group_size,
            num_workers=settings.workers,
            seed=self.seed,
        )

    def per_token_s(self, strategy: Strategy, batch: int) -> float:
        """t_s(b) / A_s at the mean context that the trace has at batch b, between two of its batch sizes on a line."""
        tokens = self.acceptance.at(batch).tokens_per_iteration(strategy) if strategy.speculates else 1.0
        context = batch * float(np.interp(batch, [*self.contexts], [*self.contexts.values()]))
        return self.iterations[strategy].seconds(batch, context) / tokens

    def measure(self, case: Case) -> list[Row]:
        if isinstance(case.given, tuple):
            rows, captured = case.given
            seconds = 0.0
            for batch, weight in self.weights.items():
                start = max(start for start, _ in rows if start <= batch)
                seconds += weight * min(self.per_token_s(s, batch) for row_start, s in rows if row_start == start)
        else:
            plan = plan_buckets(
                self.weights, self.per_token_s, self.strategies, pool=self.pool, cap_bytes=case.given, sizes=self.sizes,
                max_batch=self.settings.max_batch,
            )  # fmt: skip
            rows, seconds = plan.rows, plan.seconds
            captured = plan_bucketed(rows, self.settings.max_batch, self.sizes)
        num_bytes = self.pool.memory_bytes(captured)
        if case.given is None:
            self.most = num_bytes
        row = _row(self.settings.shape, "SGLang", case.name, num_bytes)
        row["strategies"] = " ".join(f"{b}:{_short(s)}" for b, s in rows)
        row["graphs"] = len(captured.target_graphs) + 2 * len(captured.drafter_graphs)
        return [row | {"seconds": seconds}]

    def table(self, readings: Sequence[Row]) -> list[Row]:
        least_s = min(row["seconds"] for row in readings)
        ours = [row | {"over_fastest": row["seconds"] / least_s - 1} for row in readings]
        names = {name: f"Table 5, {name}" + (" (fitted)" if name == "single" else "") for name in MEASURED_GB}
        paper = [
            {"model": "Llama-3-8B", "runner": "SGLang", "plan": names[name], "paper_gib": paper_gib}
            for name, paper_gib in MEASURED_GB.items()
        ]
        chains = list(chain_rows(self.settings, self.costs.tensor_parallel))
        measured = [] if self.settings.measured is None else gpu_rows(self.settings.measured)
        return [*over(ours, "single"), *over(paper, names["single"], "paper_gib"), *chains, *measured]

    def verdict(self, rows: pd.DataFrame) -> str:
        by = rows.set_index("plan")
        plans = ("naive", "buckets as released", "exact, memory as released", "exact, no cap")
        naive, released, equal, free = (by.loc[name] for name in plans)
        return (
            f"Predicted for {self.settings.shape}: buckets as released take {released.predicted_gib:.1f} GiB against "
            f"{naive.predicted_gib:.1f} captured naively ({naive.predicted_gib / released.predicted_gib:.1f} times; "
            f"TLT's Table 5 has {MEASURED_GB['naive'] / MEASURED_GB['bucketed']:.1f}), and plans chosen exactly within "
            f"the same memory take {equal.seconds:.0f} worker-seconds against {released.seconds:.0f} "
            f"({1 - equal.seconds / released.seconds:.1%} less); the fastest plan, of {free.predicted_gib:.1f} GiB, "
            f"takes {free.seconds:.0f}."
        )

    def picture(self, rows: pd.DataFrame) -> Figure:
        ours = rows[rows["seconds"].notna()].sort_values("predicted_gib")
        series = ours["plan"].where(~ours["plan"].str.startswith("exact"), "chosen exactly")
        return lines(
            {name: (of["predicted_gib"], of["seconds"]) for name, of in ours.groupby(series)},
            xlabel="CUDA graphs, GiB a GPU (predicted)", ylabel="worker-seconds",
            title=f"Memory of CUDA graphs against decoding time, {self.settings.shape} (prediction)",
        )  # fmt: skip

    def notes(self, rows: pd.DataFrame) -> Iterable[str]:
        errors = table_5_errors()
        outside = [_short(s) for s in self.strategies if s.speculates and self.acceptance.outside(s)]
        return (
            "seconds: worker-seconds of decoding per RL step at batches up to max_batch, mean over RL steps; larger "
            "batches decode plainly and are in no plan",
            "predicted_gib: an overhead per layer, fitted to one strategy of TLT's Table 5, is carried over from "
            f"Llama-3-8B; on Table 5 itself it errs by {errors['naive']:+.0%} for naive capture and "
            f"{errors['bucketed']:+.0%} for buckets; `tltlab bench gpu graphs` measures on a CUDA device",
            f"acceptance extrapolated from {self.settings.acceptance}: {', '.join(outside) or '-'}",
        )


def _row(model: str, runner: str, plan: str, num_bytes: float) -> Row:
    return {"model": model, "runner": runner, "plan": plan, "predicted_gib": num_bytes / GIB}


def over(rows: Sequence[Row], single: str, column: str = "predicted_gib") -> list[Row]:
    """The rows of one runner with their memory over that of the first plan whose name ends in `single`, or None."""
    base = next((row[column] for row in rows if row["plan"].endswith(single)), None)
    return [row | {"over_single": None if base is None else row[column] / base} for row in rows]


def chain_rows(settings: GraphMemorySettings, tensor_parallel: int) -> Iterator[Row]:
    """Plans of chains on vLLM, with a learned drafter on its V2 runner, without one on its V1 runner."""
    shape = find_model(settings.shape)
    pool = vllm_pool(shape.layers, shape.hidden, shape.vocab, tensor_parallel=tensor_parallel)
    runners: tuple[tuple[Literal["V1", "V2"], str], ...] = (("V2", "learned"), ("V1", "ngram"))
    for runner, drafter in runners:
        rows = []
        for name, policy in chain_policies(drafter).items():
            plan = plan_graphs(policy, settings.max_batch, runner=runner, any_lengths=True)
            row = _row(settings.shape, f"vLLM {runner}", f"chains, {name}", memory_bytes(pool, plan))
            row["strategies"] = " ".join(f"K={depth}" for depth in plan.depths)
            rows.append(row | {"graphs": len(plan.full_graphs()) + len(plan.piecewise_graphs())})
        yield from over(rows, "chains, one strategy")


def gpu_rows(path: Path) -> list[Row]:
    """What `tltlab bench gpu graphs` measured, engine by engine. ConfigError for a file of something else."""
    result: Any = read_json(path)
    if not isinstance(result, Mapping) or result.get("part") != "graphs":
        raise ConfigError(f"{path} is not what tltlab bench gpu graphs --out writes")
    rows: dict[str, list[Row]] = {}
    for found in result["rows"]:
        memory, name = found.get("memory", {}), f"measured, {found.get('graphs')}, {found['plan']}"
        if memory.get("measured_bytes"):
            row = _row(result["model"], f"vLLM {found['runner']}", name, memory["predicted_bytes"])
            row["graphs"] = len(found["captured"]["full"]) + len(found["captured"]["piecewise"])
            row["measured_gib"] = memory["measured_bytes"] / GIB
            rows.setdefault(row["runner"], []).append(row)
    return [row for of in rows.values() for row in over(of, "one strategy", "measured_gib")]


def _short(strategy: Strategy) -> str:
    """As TLT writes strategies: depth_topK_verify."""
    if not strategy.speculates:
        return "plain"
    return f"{strategy.draft_depth}_{strategy.top_k}_{strategy.tokens_to_verify}"
