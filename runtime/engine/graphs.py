"""A policy as vLLM's own settings: which K at which batch, and which CUDA graphs are captured for it.

vLLM's K is the draft depth of a chain, so an iteration of n requests verifies n*(K+1) tokens. As in vLLM 0.32
(`CudaGraphManager` of the V2 model runner) every capture size is rounded up to each K+1 of the schedule, so each K gets
graphs of all sizes, and a batch runs in a full graph only if the next larger captured number of tokens, of whatever K,
is one of its own K. Other batches run in piecewise graphs, which go by tokens. The V1 model runner captures full graphs
for a K that never varies, else piecewise ones only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tltlab.drafters.specs import DEFAULT_DRAFTERS, DrafterSpec, LearnedSpec, NgramSpec, SuffixSpec
from tltlab.errors import ConfigError
from tltlab.planning.graph_pool import CapturePlan, DrafterRunner, GraphPool, TargetRunner, plan_for
from tltlab.policies.policy import FixedSpec, Policy, TableRow, TableSpec
from tltlab.strategy import Strategy

GIB = 2**30
_TOKEN_BUDGET = 2048
"""vLLM's smallest default of max_num_batched_tokens, which capture sizes must not exceed."""

BatchDepth = tuple[int, int]
"""Requests in the batch, and K."""


def vllm_batches(max_batch: int) -> tuple[int, ...]:
    """The batch sizes that vLLM 0.32 captures for uniform decoding.

    >>> vllm_batches(20)
    (1, 2, 4, 8, 16, 20)
    """
    steps = (1, 2, 4, *range(8, 256, 8), *range(256, max_batch + 1, 16))
    return tuple(sorted({n for n in steps if n < max_batch} | {max_batch}))


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlan:
    """What vLLM is told for one policy. `may_run` and `asked` are ascending.

    `may_run` is all that the policy may choose, `asked` what graphs are asked for. `drafters` are the policy's, of
    which `networks` run on the device, and `drafts` is what vLLM's speculative_config says of them, as far as the
    policy does. `notes` say what these settings leave to the policy's own scheduler.
    """

    max_num_seqs: int
    may_run: tuple[BatchDepth, ...]
    asked: tuple[BatchDepth, ...]
    drafters: tuple[str, ...]
    networks: tuple[str, ...]
    drafts: dict[str, Any]
    notes: tuple[str, ...]

    @property
    def depths(self) -> tuple[int, ...]:
        """Every K, ascending; 0 is plain decoding."""
        return tuple(sorted({k for _, k in self.may_run}))

    @property
    def chosen_at_run_time(self) -> bool:
        """Whether some batch size has more than one K."""
        return len({batch for batch, _ in self.may_run}) < len(self.may_run)

    @property
    def schedule(self) -> tuple[tuple[int, int, int], ...]:
        """Inclusive ranges (first, last, K) of batch sizes; empty where K never varies.

        Where K is chosen at run time every K stands at one batch size, the deepest at batch 1 and the least at all that
        are left: vLLM captures graphs for what its schedule has.
        """
        if len(self.depths) == 1:
            return ()
        if self.chosen_at_run_time:
            deepest = self.depths[:0:-1]
            rest = (len(deepest) + 1, self.max_num_seqs, self.depths[0])
            return (*((n, n, k) for n, k in enumerate(deepest, start=1)), rest)
        ranges: list[tuple[int, int, int]] = []
        for batch, k in self.may_run:
            first = ranges.pop()[0] if ranges and ranges[-1][2] == k else batch
            ranges.append((first, batch, k))
        return tuple(ranges)

    @property
    def capture_sizes(self) -> tuple[int, ...]:
        """Tokens of each size to capture; strategies that share n*(K+1) share it.

        A network drafts level by level, one token per request, so where there is one n is a size too.
        """
        drafting = {n for n, k in self.asked if k and self.networks}
        return tuple(sorted(drafting | {n * (k + 1) for n, k in self.asked}))

    def settings(self) -> dict[str, Any]:
        """Arguments of `vllm.LLM`."""
        settings: dict[str, Any] = {"max_num_seqs": self.max_num_seqs}
        if self.depths[-1]:
            speculative = {**self.drafts, "num_speculative_tokens": self.depths[-1]}
            if self.schedule:
                speculative["num_speculative_tokens_per_batch_size"] = [list(row) for row in self.schedule]
            settings["speculative_config"] = speculative
        sizes = list(self.capture_sizes)
        settings["compilation_config"] = {"cudagraph_capture_sizes": sizes, "max_cudagraph_capture_size": sizes[-1]}
        return settings

    def refused(self) -> str | None:
        """Why vLLM does not take, or dies of, `settings` without this package's scheduler; None where it runs them."""
        own = "tltlab.runtime runs it in vLLM: vllm_options(policy), tltlab train"
        if not self.depths[-1]:
            return None
        if len(self.drafters) > 1:
            names = " and ".join(self.drafters)
            return f"vLLM has one drafter per engine, and the policy drafts with {names}; {own}"
        if not self.drafts:
            return (
                f"the policy does not say what its drafter {self.drafters[0]} is in vLLM's words: give it under "
                f'"drafters", with kind "learned", method and model; {own}'
            )
        if self.drafts["method"] == "suffix" and self.schedule:
            return (
                f"vLLM's suffix decoding has one K for all batches and dies of another, and the policy has "
                f"{', '.join(map(str, self.depths))}; {own}"
            )
        return None

    def full_graphs(self) -> tuple[tuple[int, int], ...]:
        """(tokens, K) of each full graph that vLLM captures for decoding under these settings, ascending."""
        rounded = {(-(-size // (k + 1)), k) for size in self.capture_sizes for k in self.depths}
        graphs = [(n * (k + 1), k) for n, k in rounded if n <= self.max_num_seqs]
        return tuple(sorted(graph for graph in graphs if graph[0] <= self.capture_sizes[-1]))

    def without_full_graph(self) -> tuple[BatchDepth, ...]:
        """What the policy may run and vLLM has no full graph for; it runs in piecewise graphs."""
        captured = set(self.full_graphs())
        tokens = sorted({size for size, _ in captured})
        padded = {(n, k): tokens[bisect_left(tokens, n * (k + 1))] for n, k in self.may_run}
        return tuple((n, k) for n, k in self.may_run if (padded[n, k], k) not in captured)

    def captured(self) -> CapturePlan:
        """The graphs as `GraphPool` counts them; piecewise ones, one per capture size, are a runner of one token."""
        full = self.full_graphs()
        batches = {k: tuple(tokens // (k + 1) for tokens, depth in full if depth == k) for k in self.depths}
        target = [TargetRunner(tokens_to_verify=k + 1, batches=own) for k, own in batches.items()]
        # Every capture size that is a batch is one of a drafter's levels.
        levels = tuple(n for n in self.capture_sizes if n <= self.max_num_seqs)
        drafter = [Strategy.chain(name, k) for name in self.networks for k in self.depths if k]
        return CapturePlan(
            target=(*target, TargetRunner(tokens_to_verify=1, batches=self.capture_sizes)),
            drafter=tuple(DrafterRunner(strategy=strategy, batches=levels) for strategy in drafter),
            max_batch=self.max_num_seqs,
        )


def plan_graphs(policy: Policy, max_batch: int, *, fill: bool = False) -> GraphPlan:
    """Settings for `policy` in an engine of at most `max_batch` running requests.

    Graphs are asked for at vLLM's own batch sizes; with `fill` at more, until all that may run has a full graph. Raises
    ConfigError for what vLLM cannot draft, and for a policy that does not say what it may choose.
    """
    if max_batch < 1:
        raise ConfigError(f"max batch is {max_batch}: an engine runs at least one request")
    strategies = policy.strategies
    if not strategies:
        raise ConfigError("the policy does not say which strategies it may choose: its selector needs `strategies`")
    for strategy in strategies:
        if strategy.top_k > 1:
            raise ConfigError(
                f"vLLM drafts chains only: strategy {strategy} is a tree (top_k {strategy.top_k}); "
                "top_k > 1 runs in the simulator"
            )
    drafters = tuple(dict.fromkeys(s.drafter for s in strategies if s.speculates))
    specs = DEFAULT_DRAFTERS | policy.drafters
    plan = GraphPlan(
        max_num_seqs=max_batch,
        may_run=_graphs(policy, max_batch, range(1, max_batch + 1)),
        asked=_graphs(policy, max_batch, vllm_batches(max_batch)),
        drafters=drafters,
        networks=tuple(name for name in drafters if not isinstance(specs.get(name), NgramSpec | SuffixSpec)),
        drafts=_method(specs[drafters[0]], max(s.draft_depth for s in strategies))
        if len(drafters) == 1 and drafters[0] in specs
        else {},
        notes=(),
    )
    if plan.chosen_at_run_time and len(plan.depths) > max_batch:
        raise ConfigError(
            f"the policy chooses among {len(plan.depths)} depths, more than the {max_batch} batch sizes that vLLM's "
            "schedule has for them: raise the largest batch"
        )
    while fill and (missing := set(plan.without_full_graph())):
        # The last of a run of missing batches serves them all, unless a new size of another K comes between.
        ends = {(n, k) for n, k in missing if (n + 1, k) not in missing}
        plan = replace(plan, asked=tuple(sorted({*plan.asked, *ends})))
    return replace(plan, notes=tuple(_notes(policy, plan)))


def chain_policies() -> dict[str, Policy]:
    """What TLT's table of graph memory asks of chains, by name: no speculation, one depth, depths by batch size."""
    rows = tuple(
        TableRow(min_batch=batch, strategy=Strategy.chain("ngram", depth)) for batch, depth in ((1, 8), (5, 4), (17, 2))
    )
    return {
        "no speculation": Policy(selector=FixedSpec(strategy=Strategy.chain("ngram", 0))),
        "one depth": Policy(selector=FixedSpec(strategy=Strategy.chain("ngram", 8))),
        "three depths by batch": Policy(selector=TableSpec(rows=rows)),
    }


def memory_bytes(pool: GraphPool, plan: GraphPlan) -> float:
    """Bytes on one GPU that the graphs of a plan take by the pool's model.

    vLLM computes the target's logits outside its graphs, and its page tables are buffers that all graphs share: neither
    counts. Its graphs share one memory pool where the model gives each runner its own, so this errs on the high side.
    """
    graphs, shared = plan.captured(), pool.model_copy(update={"page_tables": 0})
    without_logits = shared.model_copy(update={"vocab_size": 1})
    return sum(map(without_logits.target_bytes, graphs.target)) + sum(map(shared.drafter_bytes, graphs.drafter))


def check_memory(pool: GraphPool, plan: GraphPlan, cap_bytes: float) -> float:
    """`memory_bytes`; ConfigError where that is more than `cap_bytes`."""
    needed = memory_bytes(pool, plan)
    if not needed <= cap_bytes:
        full, piecewise = len(plan.full_graphs()), len(plan.capture_sizes)
        raise ConfigError(
            f"the policy's {full} full and {piecewise} piecewise graphs take {needed / GIB:.2f} GiB, more than "
            f"{cap_bytes / GIB:.2f}: give fewer depths, or fewer batch sizes (--max-batch, now {plan.max_num_seqs})"
        )
    return needed


def _graphs(policy: Policy, max_batch: int, batches: Sequence[int]) -> tuple[BatchDepth, ...]:
    graphs = plan_for(policy, max_batch, batches).target_graphs
    return tuple(sorted({(batch, tokens - 1) for batch, tokens in graphs}))


def _method(spec: DrafterSpec, deepest: int) -> dict[str, Any]:
    """A drafter in vLLM's words; empty for one that vLLM does not have."""
    if isinstance(spec, LearnedSpec):
        return spec.speculative_config
    if isinstance(spec, NgramSpec):
        return {"method": "ngram", "prompt_lookup_min": spec.min_match, "prompt_lookup_max": spec.max_match}
    if not isinstance(spec, SuffixSpec):
        return {}
    told = spec.arguments()
    return {
        "method": "suffix",
        "suffix_decoding_max_tree_depth": told["max_match"] + deepest,
        "suffix_decoding_min_token_prob": told["min_token_prob"],
        # As many tokens as matched, times this; whatever matched, all of the depth.
        "suffix_decoding_max_spec_factor": told["match_factor"] if told["length"] == "match" else float(deepest),
        # Past responses are searched unless the request alone is.
        **({"suffix_decoding_max_cached_requests": 0} if spec.scopes == ("request",) else {}),
    }


def _notes(policy: Policy, plan: GraphPlan) -> Iterator[str]:
    if plan.chosen_at_run_time:
        yield (
            "the policy chooses K at run time, which needs its own scheduler (tltlab.runtime): the schedule is there "
            "for vLLM to capture graphs of every K"
        )
    elif policy.activation and policy.activation.hold_iterations and len(plan.depths) > 1:
        yield "vLLM's schedule goes by the running batch alone: the activation's hold needs the policy's own scheduler"
    if plan.drafters and not plan.drafts:
        yield (
            f"no method is named: vLLM has one drafter per engine, and the policy's is {', '.join(plan.drafters)}, "
            "which it does not describe as one of vLLM's"
        )
    if plan.drafts.get("method") in ("ngram", "suffix"):
        yield (
            "vLLM's own n-gram drafter searches the request alone, its suffix drafter the request and all responses "
            "before it: what else the policy's drafter is set to search needs tltlab.runtime"
        )
    if plan.drafts.get("method") == "suffix":
        yield "vLLM's suffix decoding needs arctic-inference where vLLM runs"
    if plan.drafters != plan.networks or policy.budget:
        yield "drafts may differ in length between requests: an iteration in which they do has no full graph"
    if plan.drafters and (missing := plan.without_full_graph()):
        yield (
            f"{len(missing)} of {len(plan.may_run)} pairs of batch and K, the first {missing[0]}, have no full graph "
            "because the next larger one is of another K: they run in piecewise graphs (--fill captures all)"
        )
    if plan.capture_sizes[-1] > _TOKEN_BUDGET:
        yield f"max_num_batched_tokens must be at least {plan.capture_sizes[-1]}, the largest size to capture"
