"""Pick a policy for a trace by simulating candidates on it: plain, fixed depths, elastic depths, a table, a bandit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tltlab.acceptance import AcceptanceModel
from tltlab.cost import CostModel
from tltlab.errors import ConfigError
from tltlab.graph_pool import GraphPool, plan_for
from tltlab.policy import Activation, BegMabSpec, Bucket, FixedSpec, Policy, TableRow, TableSpec, load_policy
from tltlab.strategy import Strategy
from tltlab.trace import Trace

from .regime import Regimes
from .replay import simulate

DEPTHS = (0, 1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A policy and its mean simulated rollout seconds per RL step."""

    name: str
    policy: Policy
    makespan_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphMemory:
    """Room for captured CUDA graphs: the engine's pool, what it captures, and how many bytes may go into it."""

    pool: GraphPool
    cap_bytes: float
    max_batch: int
    sizes: tuple[int, ...]

    def holds(self, policy: Policy) -> bool:
        """Whether the graphs of a policy fit."""
        return self.pool.fits(plan_for(policy, self.max_batch, self.sizes), self.cap_bytes)


def pick(
    trace: Trace,
    costs: CostModel,
    acceptance: AcceptanceModel,
    *,
    depths: Sequence[int] = DEPTHS,
    drafter: str = "ngram",
    thresholds: Sequence[int] = (4, 8, 16, 32),
    placement: str = "recorded",
    mode: str = "sampled",
    seed: int = 0,
    graphs: GraphMemory | None = None,
) -> list[Candidate]:
    """Return all candidates, the fastest first. Chains of `drafter` with `depths` tokens; common random numbers.

    `graphs` leaves out policies whose CUDA graphs take more than there is; ConfigError where none is left.
    """
    chains = [Strategy.chain(drafter, depth) for depth in depths if depth]
    table = best_table(trace, costs, acceptance, [Strategy.chain(drafter, depth) for depth in depths])
    policies = {"none": load_policy("none"), "table": Policy(selector=table), "beg-mab": bandit_around(table, chains)}
    for strategy in chains:
        policies[f"fixed {strategy}"] = Policy(selector=FixedSpec(strategy=strategy))
        for threshold in thresholds:
            policies[f"{strategy} up to {threshold} requests"] = Policy(
                selector=FixedSpec(strategy=strategy), activation=Activation(max_requests=threshold, hold_iterations=0)
            )
    if graphs is not None:
        policies = {name: policy for name, policy in policies.items() if graphs.holds(policy)}
        if not policies:
            raise ConfigError(
                f"no candidate's CUDA graphs fit into {graphs.cap_bytes:.4g} bytes, not even plain decoding's"
            )
    candidates = [
        Candidate(
            name=name,
            policy=policy,
            makespan_s=simulate(
                trace, policy, costs=costs, acceptance=acceptance, placement=placement, mode=mode, seed=seed
            ).summary["makespan_s"],
        )
        for name, policy in policies.items()
    ]
    return sorted(candidates, key=lambda c: c.makespan_s)


def best_table(
    trace: Trace, costs: CostModel, acceptance: AcceptanceModel, strategies: Sequence[Strategy]
) -> TableSpec:
    """For each batch size the strategy with the least expected seconds per token, equal neighbours merged.

    Contexts are taken at the trace's mean prompt and half its mean response.
    """
    workload, outcomes = trace.workload, trace.outcomes
    context = float(workload["prompt_tokens"].mean() + outcomes["response_tokens"].mean() / 2)
    largest = int(outcomes.groupby(["rl_step", "worker"], dropna=False).size().max())
    regimes = Regimes(strategies, costs, acceptance)

    def per_token_s(strategy: Strategy, batch: int) -> float:
        regime = regimes.at(strategy, batch)
        return regime.cost.seconds(batch, batch * context) / regime.tokens

    rows: list[TableRow] = []
    for batch in range(1, largest + 1):
        best = min(strategies, key=lambda strategy: per_token_s(strategy, batch))
        if not rows or rows[-1].strategy != best:
            rows.append(TableRow(min_batch=batch, strategy=best))
    return TableSpec(rows=tuple(rows))


def bandit_around(table: TableSpec, chains: Sequence[Strategy]) -> Policy:
    """BEG-MAB over the table's ranges: each bucket holds the table's choice and that choice's neighbours in depth."""
    arms = sorted({*chains, *(row.strategy for row in table.rows)}, key=lambda s: s.draft_depth)
    buckets = []
    for row in table.rows:
        at = arms.index(row.strategy)
        near = [arms[i] for i in (at, at - 1, at + 1) if 0 <= i < len(arms)]
        buckets.append(Bucket(min_batch=row.min_batch, strategies=tuple(near)))
    return Policy(selector=BegMabSpec(buckets=tuple(buckets)))
