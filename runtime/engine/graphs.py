"""A policy as vLLM's own settings: K at each batch, and the CUDA graphs that are captured for it.

vLLM's K is the draft depth of a chain, so an iteration of n requests verifies n*(K+1) tokens. The graph that it runs in
depends on the model runner. The rules were read in vLLM 0.32; tests compare them with its dispatchers:

- V2 (`CudaGraphManager`), for drafts of a network alone: every capture size is rounded up to each K+1 of the schedule,
  so each K gets graphs of all sizes. A batch runs in a full graph only if the next larger captured number of tokens,
  of any K, is one of its own K. Other batches run in piecewise graphs, which go by tokens.
- V1 (`CudagraphDispatcher`), needed for drafts made next to the scheduler. By default its full graphs are for the
  engine's deepest K alone: any other depth, *plain decoding too*, and drafts of unequal length run in piecewise graphs,
  attention launched layer by layer. A table of depths by batch size would demote all of them to piecewise graphs. With
  the setting `cudagraph_mode = "FULL"` one full graph a size serves any mix of lengths. vLLM accepts that setting where
  the attention backend does (`AttentionCGSupport.ALWAYS`: FlashAttention 3, so Hopper) and else falls back to the
  default. A drafter's network then has no graphs: vLLM captures them with piecewise ones of the target. V1 rounds sizes
  to multiples of the deepest K+1.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import numpy as np

from tltlab.drafters.specs import (
    DEFAULT_DRAFTERS,
    Drafters,
    DrafterSpec,
    HybridSpec,
    LearnedSpec,
    NgramSpec,
    SuffixSpec,
)
from tltlab.errors import ConfigError
from tltlab.policies.beg_mab import BegMab
from tltlab.policies.policy import Policy
from tltlab.policies.selector import Selector
from tltlab.policies.simple import BatchTable
from tltlab.records import Fields, Json, frozen
from tltlab.strategy import NO_SPECULATION, Strategy

GIB = 2**30
_TOKEN_BUDGET = 2048
"""vLLM's smallest default of max_num_batched_tokens, which capture sizes must not exceed."""

ANY_TOKENS = 2**31
"""No limit on the tokens that an iteration may schedule."""
GRAPH_LAYER_BYTES = 1e6
"""Bytes per layer that a graph runs, with buffers: 0.4 MB (vLLM's pull request 11349: 35 graphs of 16 layers take
0.21 GiB) to 0.85 MB (22897: 26 to 28 MiB a graph of 32 layers)."""
_SPACINGS = (1.0, 1.25, 1.5, 2.0)
"""Least ratios of neighbouring batch sizes; a plan takes the finest that its memory allows."""

BatchDepth = tuple[int, int]
"""Requests in the batch, and K."""

VLLM_NGRAM, VLLM_SUFFIX = "ngram", "suffix"
"""vLLM's methods of drafting without a network."""

Runner = Literal["V1", "V2"]
Kind = Literal["full", "piecewise", "eager"]
"""Execution of an iteration: in one graph, in graphs with attention launched between them, or without graphs."""


@frozen
class CapturedGraphs:
    """The CUDA graphs of one engine, as its model runner has them; `mode` is vLLM's, "NONE" where there are none.

    `full` has (tokens, K) of each, K None where it serves requests of any lengths. `piecewise` has the tokens of each,
    ascending. `num_bytes` is the device memory that capture took, None where it was not measured.
    """

    runner: Runner
    mode: str
    full: tuple[tuple[int, int | None], ...] = ()
    piecewise: tuple[int, ...] = ()
    num_bytes: int | None = None


def vllm_batches(max_batch: int, spacing: float = 1.0) -> tuple[int, ...]:
    """The batch sizes that vLLM 0.32 captures for uniform decoding, thinned to a ratio of at least `spacing`.

    >>> vllm_batches(64, spacing=1.5)
    (1, 2, 4, 8, 16, 24, 40, 64)
    """
    steps = (1, 2, 4, *range(8, 256, 8), *range(256, max_batch + 1, 16))
    batches: list[int] = []
    for n in steps:
        if spacing * max(batches, default=0) <= n < max_batch:
            batches.append(n)
    return (*batches, max_batch)


@frozen
class GraphPlan:
    """Settings of vLLM for one policy. `may_run` and `asked` are ascending.

    `may_run` is all that the policy may choose, `asked` the graphs to capture. `drafters` are the policy's, `networks`
    those of them that run on the device, `drafts` their part of vLLM's speculative_config. The engine is built for
    drafts of up to `deepest` tokens, `uneven` where drafts of one iteration may differ in length. With `any_lengths`,
    on the V1 runner alone, one full graph serves requests of any lengths. `max_tokens` is the most an iteration may
    schedule.
    """

    max_num_seqs: int
    may_run: tuple[BatchDepth, ...]
    asked: tuple[BatchDepth, ...]
    drafters: tuple[str, ...]
    networks: tuple[str, ...]
    drafts: Json
    deepest: int
    runner: Runner = "V2"
    uneven: bool = False
    any_lengths: bool = False
    max_tokens: int = ANY_TOKENS

    @property
    def depths(self) -> tuple[int, ...]:
        """Every K, ascending; 0 is plain decoding."""
        return tuple(sorted({k for _, k in self.may_run}))

    @property
    def chosen_at_run_time(self) -> bool:
        """True if some batch size has more than one K."""
        return len({batch for batch, _ in self.may_run}) < len(self.may_run)

    @property
    def schedule(self) -> tuple[tuple[int, int, int], ...]:
        """Inclusive ranges (first, last, K) of batch sizes; empty where K never varies.

        Where K is chosen at run time every K has one batch size, the deepest at batch 1 and the least at all that are
        left: vLLM captures graphs for the rows of its schedule.
        """
        if self.depths == (self.deepest,):
            return ()
        if self.chosen_at_run_time:
            deepest = self.depths[:0:-1]
            last = (len(deepest) + 1, self.max_num_seqs, self.depths[0])
            return (*((n, n, k) for n, k in enumerate(deepest, start=1)), last)
        ranges: list[tuple[int, int, int]] = []
        for batch, k in self.may_run:
            first = ranges.pop()[0] if ranges and ranges[-1][2] == k else batch
            ranges.append((first, batch, k))
        return tuple(ranges)

    @property
    def capture_sizes(self) -> tuple[int, ...]:
        """Tokens of each size to capture; strategies of equal n*(K+1) share a size.

        A network drafts level by level, one token per request, so with a network n is a size too.
        """
        drafting = {n for n, k in self.asked if k and self.networks}
        sizes = drafting | {n * (k + 1) for n, k in self.asked}
        if self.runner == "V1":
            # Rounded here, as vLLM would drop a largest size that is no multiple.
            longest = self.deepest + 1
            sizes = {-(-size // longest) * longest for size in sizes}
        return tuple(sorted(size for size in sizes if size <= self.max_tokens))

    def settings(self) -> Json:
        """Arguments of stock `vllm.LLM`."""
        drafts = {**self.drafts, "num_speculative_tokens": self.deepest} if self.depths[-1] else None
        settings = {"max_num_seqs": self.max_num_seqs, **self.engine_settings(drafts)}
        settings["compilation_config"]["max_cudagraph_capture_size"] = self.capture_sizes[-1]
        return settings

    def refused(self) -> str | None:
        """Why vLLM refuses or fails with `settings` without this package's scheduler; None where it runs them."""
        depths, reason = ", ".join(map(str, self.depths)), None
        if not self.depths[-1]:
            return None
        if len(self.drafters) > 1:
            reason = f"vLLM has one drafter per engine, and the policy drafts with {' and '.join(self.drafters)}"
        elif not self.drafts:
            reason = (
                f"the policy does not describe its drafter {self.drafters[0]} in vLLM's terms, or it is not "
                'trained yet: describe it under "drafters", with kind "learned", method and model'
            )
        elif self.drafts.get("method") == VLLM_SUFFIX and self.schedule:
            reason = (
                f"vLLM's suffix decoding has one K for all batches and fails with another, and the policy has {depths}"
            )
        elif self.chosen_at_run_time:
            # vLLM would accept the schedule, and draft deepest at batch 1, hardly at all beyond a few requests.
            reason = (
                f"the policy chooses among K = {depths} while it runs, and vLLM goes by the batch size alone, as a "
                "table does"
            )
        return reason and f"{reason}; tltlab.runtime runs it in vLLM: vllm_options(policy), tltlab train"

    def full_graphs(self) -> tuple[tuple[int, int | None], ...]:
        """(tokens, K) of each full graph that vLLM captures for decoding under these settings, ascending.

        K is None where the graph serves requests of any lengths.
        """
        sizes = self.capture_sizes
        if self.any_lengths:
            return tuple((size, None) for size in sizes)
        depths = (self.deepest,) if self.runner == "V1" else self.depths
        rounded = {(-(-size // (k + 1)), k) for size in sizes for k in depths}
        graphs = [(n * (k + 1), k) for n, k in rounded if n <= self.max_num_seqs]
        return tuple(sorted(graph for graph in graphs if graph[0] <= sizes[-1]))

    def piecewise_graphs(self) -> tuple[int, ...]:
        """Tokens of each piecewise graph, ascending."""
        return () if self.any_lengths else self.capture_sizes

    def kinds(self) -> dict[BatchDepth, Kind]:
        """Return the kind of graph for each batch size and K that the policy may run, with drafts of equal length."""
        full = set(self.full_graphs())
        # The V1 runner pads to the next size, the V2 runner to the next full graph of any K.
        tokens = list(self.capture_sizes) if self.runner == "V1" else sorted({size for size, _ in full})
        kinds: dict[BatchDepth, Kind] = {}
        for n, k in self.may_run:
            at = bisect_left(tokens, n * (k + 1))
            if at < len(tokens) and not full.isdisjoint({(tokens[at], k), (tokens[at], None)}):
                kinds[n, k] = "full"
            else:
                kinds[n, k] = "piecewise" if n * (k + 1) <= max(self.piecewise_graphs(), default=0) else "eager"
        return kinds

    def without_full_graph(self) -> tuple[BatchDepth, ...]:
        """Return the batch sizes and K that the policy may run and vLLM has no full graph for."""
        return tuple(pair for pair, kind in self.kinds().items() if kind != "full")

    def notes(self) -> Iterator[str]:
        """Describe the runner, the depths and the number of graphs; then what may run without a full graph, and why."""
        yield (
            f"{self.runner} runner, K in {', '.join(map(str, self.depths))}; {len(self.full_graphs())} full and "
            f"{len(self.piecewise_graphs())} piecewise graphs of up to {self.capture_sizes[-1]} tokens"
        )
        if self.uneven and not self.any_lengths:
            yield "drafts may differ in length between requests: an iteration in which they do has no full graph"
        if self.drafters and (missing := self.without_full_graph()):
            reason = "the next larger one is of another K (--fill captures all)"
            if self.runner == "V1":
                reason = f"the V1 runner has them for K = {self.deepest} alone, and adaptivity costs that much"
                if self.any_lengths:
                    reason = f"they are of more than {self.capture_sizes[-1]} tokens"
            yield (
                f"{len(missing)} of {len(self.may_run)} pairs of batch and K, the first {missing[0]}, run without a "
                f"full graph: {reason}"
            )
        if self.any_lengths:
            yield (
                "full graphs for requests of any lengths need FlashAttention 3 (Hopper): with other attention vLLM "
                f"falls back to full graphs for K = {self.deepest} alone"
            )

    def engine_settings(self, speculative: Fields | None) -> Json:
        """Arguments of `vllm.LLM` for tltlab's engine that drafts by `speculative`, itself one of them.

        The largest size is left to vLLM, which drops sizes that one iteration may not schedule.
        """
        settings: Json = {}
        if speculative is not None:
            settings["speculative_config"] = speculative = dict(speculative)
            if self.any_lengths and self.networks:
                # The graphs would not be captured at the start, and vLLM fails when it captures them later.
                speculative["enforce_eager"] = True
            if self.runner == "V2" and self.schedule:
                speculative["num_speculative_tokens_per_batch_size"] = [list(row) for row in self.schedule]
        settings["compilation_config"] = {"cudagraph_capture_sizes": list(self.capture_sizes)}
        if self.any_lengths:
            settings["compilation_config"]["cudagraph_mode"] = "FULL"
        return settings


def plan_graphs(
    policy: Policy,
    max_batch: int,
    *,
    drafters: Mapping[str, DrafterSpec] = {},
    fill: bool = False,
    runner: Runner = "V2",
    any_lengths: bool = False,
    plain: bool = False,
    deepest: int | None = None,
    spacing: float = 1.0,
    max_tokens: int = ANY_TOKENS,
) -> GraphPlan:
    """Settings for `policy` in an engine of at most `max_batch` running requests.

    Graphs are captured at vLLM's own batch sizes, thinned to a ratio of `spacing`. With `fill`, for the V2 runner,
    sizes are added until all that may run has a full graph. `plain` adds plain decoding at all sizes. `deepest` is by
    default the policy's deepest draft. `drafters` are those of the engine beside the policy's. For `any_lengths`, which
    the V2 runner ignores, and `max_tokens` see `GraphPlan`. ConfigError for drafts that vLLM cannot make, for an
    unknown drafter, and for a policy without a list of strategies.
    """
    if max_batch < 1:
        raise ConfigError(f"max batch is {max_batch}: an engine runs at least one request")
    strategies = policy.strategies
    if not strategies:
        raise ConfigError("the policy has no list of strategies it may choose: its selector needs `strategies`")
    for strategy in strategies:
        if strategy.top_k > 1:
            raise ConfigError(
                f"vLLM drafts chains only: strategy {strategy} is a tree (top_k {strategy.top_k}); "
                "top_k > 1 runs in the simulator"
            )
    specs: dict[str, DrafterSpec] = {**DEFAULT_DRAFTERS, **policy.drafters, **drafters}
    registry = Drafters(specs)
    registry.check(strategies)
    named = dict.fromkeys(s.drafter for s in strategies if s.speculates)
    used = tuple(dict.fromkeys(part for name in named for part in parts_of(specs, name)))
    batches = vllm_batches(max_batch, spacing)
    plan = GraphPlan(
        max_num_seqs=max_batch,
        may_run=_graphs(policy, max_batch, range(1, max_batch + 1), plain=plain),
        asked=_graphs(policy, max_batch, batches, plain=plain),
        drafters=used,
        networks=tuple(name for name in used if registry[name].made_by == "workers"),
        drafts=_method(specs.get(used[0]), max(s.draft_depth for s in strategies)) if len(used) == 1 else {},
        deepest=max((s.draft_depth for s in strategies), default=0) if deepest is None else deepest,
        runner=runner,
        uneven=bool(policy.budget) or not all(registry[name].made_by == "workers" for name in used),
        any_lengths=any_lengths and runner == "V1",
        max_tokens=max_tokens,
    )
    if runner == "V2" and plan.chosen_at_run_time and len(plan.depths) > max_batch:
        raise ConfigError(
            f"the policy chooses among {len(plan.depths)} depths, more than the {max_batch} batch sizes that vLLM's "
            "schedule has for them: raise the largest batch"
        )
    while fill and runner == "V2" and (missing := set(plan.without_full_graph())):
        # The last of a run of missing batches serves them all, unless a new size of another K falls between.
        ends = {(n, k) for n, k in missing if (n + 1, k) not in missing}
        if ends <= set(plan.asked):
            # Beyond what an iteration may schedule.
            break
        plan = replace(plan, asked=tuple(sorted({*plan.asked, *ends})))
    return plan


def fitting_plan(plan: Callable[..., GraphPlan], num_layers: int, vocab_size: int, cap_bytes: float) -> GraphPlan:
    """Return the plan that leaves least without a full graph and fits `cap_bytes`, over spacings and `fill`.

    Among equals it has the finest batch sizes. ConfigError where none fits.
    """
    plans = [plan(spacing=spacing, fill=fill) for fill in (True, False) for spacing in _SPACINGS]
    took = [memory_bytes(each, num_layers, vocab_size) for each in plans]
    fitting = [each for each, num_bytes in zip(plans, took, strict=True) if num_bytes <= cap_bytes]
    if not fitting:
        raise ConfigError(
            f"the policy's graphs take {took[-1] / GIB:.2f} GiB, more than {cap_bytes / GIB:.2f}: give fewer depths, "
            f"or a smaller largest batch than {plans[-1].max_num_seqs}"
        )
    return min(fitting, key=lambda each: len(each.without_full_graph()))


def memory_bytes(plan: GraphPlan, num_layers: int, vocab_size: int) -> float:
    """Estimate, from above, the bytes on one GPU that the graphs of a plan take for a model of so many layers.

    vLLM computes the target's logits outside its graphs. A drafter of one layer has two graphs per level and batch
    size, with the logits of two tokens per request in bf16 and fp32, and the softmax in fp32.
    """
    num_graphs = len(plan.full_graphs()) + len(plan.piecewise_graphs())
    # Every capture size that is a batch is one of a drafter's levels. On V1 one graph per size is for all depths and
    # levels; there are none together with full graphs of any lengths.
    levels = [n for n in plan.capture_sizes if n <= plan.max_num_seqs]
    depths = [k for k in plan.depths if k] if plan.runner == "V2" else [] if plan.any_lengths else [1]
    logits = 16.0 * vocab_size * max(levels, default=0)
    drafting = sum(2 * k * len(levels) * GRAPH_LAYER_BYTES + logits for k in depths)
    return num_graphs * (num_layers + 1) * GRAPH_LAYER_BYTES + len(plan.networks) * drafting


def _graphs(policy: Policy, max_batch: int, batches: Sequence[int], *, plain: bool) -> tuple[BatchDepth, ...]:
    """Return each strategy's K at the `batches` at which the policy may choose it, and at the largest of these.

    A table's rows and BEG-MAB's buckets, with all their arms, have their own batches; what other selectors may choose
    is asked at every batch. Speculation goes up to the activation's `max_requests`. Plain decoding is asked beyond
    that, where a policy chooses it, and everywhere where the activation counts the remaining requests, or for `plain`.
    Iterations in which a hold keeps the other side of the threshold run without a graph.
    """
    activation = policy.activation
    last = min(activation.max_requests, max_batch) if activation else max_batch
    rows = [row for row in _rows(policy.selector.build(np.random.default_rng(0))) if row[0] <= last]
    if activation and activation.count == "remaining":
        rows += [(start, NO_SPECULATION) for start, _ in rows]
    if last < max_batch:
        rows.append((last + 1, NO_SPECULATION))
    starts = sorted({start for start, _ in rows})
    ends = dict(pairwise([*starts, max_batch + 1]))
    graphs = {(batch, 0) for batch in batches} if plain else set()
    for start, strategy in rows:
        # Batches below the first row use the first.
        low, high = 1 if start == starts[0] else start, ends[start] - 1
        graphs |= {(batch, strategy.draft_depth) for batch in (*batches, high) if low <= batch <= high}
    return tuple(sorted(graphs))


def _rows(selector: Selector) -> list[tuple[int, Strategy]]:
    """(least batch, strategy) of all that a selector may choose; the first bucket holds all batches below it."""
    starts: tuple[int, ...] = (1,)
    arms: tuple[tuple[Strategy, ...], ...] = (tuple(selector.strategies),)
    if isinstance(selector, BatchTable):
        starts, arms = selector.thresholds, tuple((strategy,) for strategy in selector.rows)
    elif isinstance(selector, BegMab):
        starts, arms = selector.thresholds, selector.arms
    return [(start, arm) for start, bucket in zip((1, *starts[1:]), arms, strict=True) for arm in bucket]


def parts_of(specs: Mapping[str, DrafterSpec], name: str) -> tuple[str, ...]:
    """Return the drafters that drafter `name` uses: the two of a hybrid, else itself."""
    spec = specs.get(name)
    return (spec.first, spec.otherwise) if isinstance(spec, HybridSpec) else (name,)


def _method(spec: DrafterSpec | None, deepest: int) -> Json:
    """Return a drafter in vLLM's terms; empty for one that vLLM does not have."""
    if isinstance(spec, LearnedSpec):
        return spec.speculative_config if spec.trained else {}
    if isinstance(spec, NgramSpec):
        return {"method": VLLM_NGRAM, "prompt_lookup_min": spec.min_match, "prompt_lookup_max": spec.max_match}
    if not isinstance(spec, SuffixSpec):
        return {}
    settings, factor = spec.arguments(), float(deepest)
    if settings["length"] == "match":
        # As many tokens as matched, times this factor; else the full depth, independent of the match.
        factor = settings["match_factor"]
    return {
        "method": VLLM_SUFFIX,
        "suffix_decoding_max_tree_depth": settings["max_match"] + deepest,
        "suffix_decoding_min_token_prob": settings["min_token_prob"],
        "suffix_decoding_max_spec_factor": factor,
        # Past responses are searched unless the request alone is.
        **({"suffix_decoding_max_cached_requests": 0} if spec.scopes == ("request",) else {}),
    }


def differences(policy: Policy, plan: GraphPlan) -> Iterator[str]:
    """Describe what stock vLLM, which runs the plan's `settings`, does otherwise than the policy."""
    if policy.activation and policy.activation.hold_iterations and len(plan.depths) > 1:
        yield "vLLM's schedule goes by the running batch alone: the activation's hold needs the policy's own scheduler"
    if policy.budget is not None and policy.budget.kind != "uniform":
        yield "vLLM drafts K tokens for each request: the policy's budget needs tltlab.runtime"
    specs = [policy.drafters.get(name) for name in plan.networks]
    if any(isinstance(spec, LearnedSpec) and (spec.fallback, spec.max_age) != (None, None) for spec in specs):
        yield "vLLM's drafter serves at any age: the fallback needs tltlab.runtime"
    if plan.drafts.get("method") in (VLLM_NGRAM, VLLM_SUFFIX):
        yield (
            "vLLM's own n-gram drafter searches the request alone, its suffix drafter the request and all responses "
            "before it: what else the policy's drafter is set to search needs tltlab.runtime"
        )
    if plan.drafts.get("method") == VLLM_SUFFIX:
        yield "vLLM's suffix decoding needs arctic-inference where vLLM runs"
    if plan.capture_sizes[-1] > _TOKEN_BUDGET and plan.max_tokens == ANY_TOKENS:
        yield f"max_num_batched_tokens must be at least {plan.capture_sizes[-1]}, the largest size to capture"
