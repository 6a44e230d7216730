"""Systems from the literature as compositions of the core's parts.

A composition names the drafters and strategies (`drafters`, `ladder`), the policy (`selector`, `activation`, `budget`),
where requests run (`placement`, `topology`) and the use of idle workers (`idle_use`). A row uses none of the parts that
it leaves out. `assumptions` lists choices that the paper does not state. `system_binding.bind` fits a row to the
acceptance that is known, for the simulator; `execution.engine_run` has the settings with which real engines run it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Literal

import numpy as np
from pydantic import ConfigDict

from tltlab.coordination.progress import SpotTraining
from tltlab.costs.base import CostModel
from tltlab.drafters.specs import DrafterSpec
from tltlab.errors import ConfigError
from tltlab.own import is_own
from tltlab.policies.bandits import Hedge
from tltlab.policies.policy import (
    Activation,
    BudgetSpec,
    LengthAwareBudgetSpec,
    MbaBudgetSpec,
    Policy,
    VerificationBudgetSpec,
)
from tltlab.policies.selector import SelectorSpec
from tltlab.policies.simple import AcceptLadder
from tltlab.policies.specs import (
    BegMabSpec,
    Bucket,
    FixedSpec,
    NoneSpec,
    TableRow,
    TableSpec,
    ThresholdsSpec,
)
from tltlab.records import frozen
from tltlab.strategy import NO_SPECULATION, Strategy

Shape = tuple[int, int, int]
"""Draft depth, top-k, tokens to verify."""


@frozen
class LadderStep:
    """Drafts of a system from `min_batch` running requests on: `trees` where its drafter can, else `chains`."""

    min_batch: int
    trees: tuple[Shape, ...] = ()
    chains: tuple[int, ...] = ()


def one_strategy(buckets: Sequence[Bucket]) -> SelectorSpec:
    """The first strategy of the first bucket, always; no speculation without one."""
    return FixedSpec(strategy=buckets[0].strategies[0]) if buckets else NoneSpec()


def batch_size_table(buckets: Sequence[Bucket]) -> SelectorSpec:
    """The first strategy of the bucket that holds the batch size."""
    return TableSpec(rows=tuple(TableRow(min_batch=b.min_batch, strategy=b.strategies[0]) for b in buckets))


def beg_mab(buckets: Sequence[Bucket]) -> SelectorSpec:
    """TLT's Algorithm 1 with the epsilon and window of its released code."""
    return BegMabSpec(buckets=tuple(buckets), epsilon=0.1, window=300, reward="paper")


def pass_costs(costs: CostModel) -> dict[str, float]:
    """`base_s` and `token_s` of t = base_s + token_s * n, fitted to iterations of 1 to 32 requests of 1 to 9 tokens."""
    points = []
    for depth in (0, 1, 2, 4, 8):
        strategy = Strategy.chain("suffix", depth)
        cost = costs.iteration(strategy)
        points += [(b * strategy.tokens_to_verify, cost.without_context_s(b)) for b in (1, 2, 4, 8, 16, 32)]
    tokens, seconds = np.array(points, np.float64).T
    token_s, base_s = np.polyfit(tokens, seconds, 1)
    least = 1e-6 * float(seconds.max())
    return {"base_s": max(float(base_s), least), "token_s": max(float(token_s), least)}


def length_aware(costs: CostModel) -> BudgetSpec:
    """DAS's budget with these costs."""
    return LengthAwareBudgetSpec(**pass_costs(costs))


def accept_length_ladder(buckets: Sequence[Bucket]) -> SelectorSpec:
    """The strategies of the first bucket as a ladder by accepted length."""
    return AcceptLadder.Spec(strategies=tuple(sorted(buckets[0].strategies, key=lambda s: s.draft_depth)))


def doubling(buckets: Sequence[Bucket]) -> SelectorSpec:
    """A ladder that moves after every draft: up where all of it was kept on average, else down."""
    arms = tuple(sorted(buckets[0].strategies, key=lambda s: s.draft_depth))
    return AcceptLadder.Spec(strategies=arms, ema=1.0, warmup=1, hold=1, hysteresis=0.0)


def hedge(buckets: Sequence[Bucket]) -> SelectorSpec:
    """Exponential weights over the drafters of the first bucket."""
    return Hedge.Spec(strategies=buckets[0].strategies)


def marginal(costs: CostModel) -> BudgetSpec:
    """Seer's budget with the same fit of the costs as DAS's."""
    return MbaBudgetSpec(**pass_costs(costs))


def throughput_budget(costs: CostModel) -> BudgetSpec:
    """vLLM's budget of tokens to verify with these costs, or a line through those of a class of one's own."""
    if not is_own(costs):
        with suppress(ConfigError):
            return VerificationBudgetSpec(costs=costs.model_dump(mode="json", exclude={"evidence", "notes", "noise"}))
    line = pass_costs(costs)
    zeros = ("per_request_s", "per_context_s", "sd_base_s", "draft_level_s", "draft_level_per_request_s")
    terms = dict.fromkeys(zeros, 0.0) | {"base_s": line["base_s"], "per_token_s": line["token_s"]}
    return VerificationBudgetSpec(costs={"kind": "linear", **terms})


def accepted_thresholds(buckets: Sequence[Bucket]) -> SelectorSpec:
    """SGLang's steps by accepted tokens in each range of batch sizes; ranges that always draft go down later."""
    rows = []
    for bucket in buckets:
        depths = tuple(sorted(strategy.draft_depth for strategy in bucket.strategies))
        rows.append((bucket.min_batch, depths, -0.25 if depths[0] else 0.0))
    drafter = next(s.drafter for bucket in buckets for s in bucket.strategies if s.speculates)
    return ThresholdsSpec(drafter=drafter, rows=tuple(rows))


@frozen
class EarlierEpoch:
    """Every prompt was visited an epoch before; up to the first token that is not kept, its response is a prefix.

    The prefix is prefilled, only the rest is generated. Engines keep a token with min(1, `leniency` pi_now / pi_then);
    the simulator with chance `keep`. The first after the prefix is drawn by `residual`: as any other ("none"), or from
    the residual distribution ("exact"), which no engine here does.
    """

    keep: float
    leniency: float = 1.0
    residual: Literal["none", "exact"] = "none"


@frozen
class Truncated:
    """Responses end at `share` of their cap."""

    share: float


@frozen
class Regrouped:
    """As many responses in all, of `factor` times as many samples for each of `factor` times fewer prompts."""

    factor: int


Workload = EarlierEpoch | Truncated | Regrouped
"""Changes that a system makes to its responses."""


@frozen
class Admission:
    """Which responses an RL step begins, when it ends, and what becomes of those that it leaves.

    A step that trains P prompts of G samples (N = P * G) begins ceil(`issue` * P) of them with ceil(`samples` * G)
    samples each, or keeps `concurrency` * N responses in flight, the next beginning when one ends. It ends with P
    complete prompts, or, by `unit` "response", with N responses. What is left continues in the next step before
    anything new begins ("resume", its prefix prefilled again under the new weights), or begins anew ("restart") in a
    long round of its own once there are P such prompts. With `staleness` eta AReaL's bound limits what may begin; with
    `max_age` a prompt of which a response was begun more than so many RL steps ago is dropped with all that it has.
    """

    issue: float = 1.0
    samples: float = 1.0
    concurrency: float | None = None
    unit: Literal["group", "response"] = "group"
    leftover: Literal["resume", "restart"] = "resume"
    staleness: int | None = None
    max_age: int | None = None


def asynchronous(staleness: int, *, stale: str = "hold", concurrency: float = 1.0) -> Admission | None:
    """Engines that continue from RL step to RL step, with `concurrency` times what a step trains under way.

    `stale` selects what `staleness` bounds: with "drop" the updates since the first response of a group was begun, and
    groups that are older are dropped; with "hold" how many responses may be begun, as in AReaL, which holds others back
    and drops none, however old. None, which is synchronous, for a bound of 0. Raises ConfigError.
    """
    if stale not in ("hold", "drop"):
        raise ConfigError(f"stale is {stale!r}: there are hold and drop")
    if staleness < 0:
        raise ConfigError(f"the staleness bound counts updates, got {staleness}: give 0 (synchronous) or more")
    if not 0 < concurrency < math.inf:
        raise ConfigError(f"concurrency is a share of what an RL step trains, got {concurrency}: give more than 0")
    if staleness == 0:
        return None
    return Admission(
        concurrency=concurrency,
        staleness=staleness if stale == "hold" else None,
        max_age=staleness if stale == "drop" else None,
    )


@frozen
class SharedBuffer:
    """All requests of an RL step wait in one buffer, from which a worker takes the next as soon as it has room.

    Sample 0 of each group goes first, as a probe; then the sample of the group with the largest estimate, which is its
    longest finished sample (its cap before any has finished). There is room where the prompt and
    `chunk_tokens` of the response, or all that it may have, fit beside what is reserved so.
    """

    chunk_tokens: int = 8192


@frozen
class System:
    """One system. `lossless`: every token is drawn from the current policy, as without the system.

    `on_policy`: all trained tokens are from the weights that the step began with. `algorithm` is the equation or
    algorithm of the `source`, `exact` what of it is simulated as published. `draft_pass_share` is what a draft's pass
    takes of the target's own, for each token or once for a block (`block_drafts`). `online_updates` train the drafter
    in every RL step during the rollout; `history` references to retrieve from are there before a group's first finish.

    `drafters` are names in order of preference, "learned" for one with a network; a system runs with those whose
    acceptance is known, or with all of them `together`. `fused`: workers that have ended their rollout begin with the
    log-probs of what has ended. `generating_share` of the workers' GPUs generate; where it is below 1 the rest trains
    (`topology` "separate"), group by group as they finish where training is `streamed`. `specs` are drafters that
    differ from an engine's own of that name. `planner` is the name of the one that moves requests between engines.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    title: str
    source: str
    drafters: tuple[str, ...] = ()
    ladder: tuple[LadderStep, ...] = ()
    selector: Callable[[Sequence[Bucket]], SelectorSpec] = one_strategy
    activation: Activation | None = None
    budget: Callable[[CostModel], BudgetSpec] | None = None
    specs: tuple[tuple[str, DrafterSpec], ...] = ()
    idle_use: SpotTraining | None = None
    placement: Literal["contiguous", "round_robin", "least_loaded", "longest_expected", "two_pools", "rank_groups"] = (
        "contiguous"
    )
    planner: str | None = None
    topology: Literal["colocated", "separate"] = "colocated"
    generating_share: float = 1.0
    lossless: bool = True
    on_policy: bool = True
    algorithm: str = ""
    exact: tuple[str, ...] = ()
    draft_pass_share: float | None = None
    block_drafts: bool = False
    online_updates: int = 0
    history: int = 0
    workload: Workload | None = None
    admission: Admission | SharedBuffer | None = None
    fused: bool = False
    together: bool = False
    streamed: bool = False
    max_staleness: int = 0
    assumptions: tuple[str, ...] = ()

    def policy(self, arms: Callable[[LadderStep], Iterable[Strategy]], costs: CostModel | None) -> Policy:
        """Return the policy of the system that drafts `arms` on each rung of its ladder.

        `costs` are what a budget is made from; a system without one takes None.
        """
        buckets = [Bucket(min_batch=r.min_batch, strategies=tuple(dict.fromkeys(arms(r)))) for r in self.ladder]
        drafting = {arm.drafter for bucket in buckets for arm in bucket.strategies}
        assert costs is not None or self.budget is None, "a budget is made from costs"
        return Policy(
            selector=self.selector(buckets),
            activation=self.activation,
            budget=None if self.budget is None or costs is None else self.budget(costs),
            drafters={name: spec for name, spec in self.specs if name in drafting},
            provenance={"system": self.name, "source": self.source},
        )

    @property
    def same_work(self) -> bool:
        """Return whether the system generates the trace's own responses at the model's own costs, so a bound holds."""
        same = self.admission is None or isinstance(self.admission, SharedBuffer)
        return self.workload is None and same and self.draft_pass_share is None


def strategies(ladder_step: LadderStep, drafter: str, *, trees: bool) -> tuple[Strategy, ...]:
    """Strategies of a rung for a drafter; no speculation where the rung has none."""
    if trees and ladder_step.trees:
        return tuple(Strategy(drafter, *shape) for shape in ladder_step.trees)
    return tuple(Strategy.chain(drafter, depth) for depth in ladder_step.chains) or (NO_SPECULATION,)
