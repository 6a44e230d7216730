"""Settings of a tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tltlab.errors import ConfigError
from tltlab.own import split
from tltlab.planning.graph_pool import GraphMemory
from tltlab.policies.policy import Policy, PolicySource, load_policy
from tltlab.sim.config import SimulationConfig, at_least
from tltlab.sim.scenario import policy_name

_STAGE = 10_000
"""How far apart the seeds of two stages lie."""
_REPEATS = 3
"""Seeds where RL steps are no sample."""


@dataclass(frozen=True, kw_only=True)
class TuneConfig(SimulationConfig):
    """A user's settings of a tuning, beside those of its simulations; modes are the tuning's own.

    Placement is the recorded one by default where the trace knows its workers, else contiguous. `judge_steps` are held
    out, by default every other RL step of each trace. A trace of more than 24 RL steps is tuned on 4 and judged on 8
    others, or on more until the champion's interval lies on one side of 1 or is small compared with the costs' error.
    `rl_steps` replaces this sample. A policy decides once in `decision_block` iterations, by default 1, of many
    or long responses cap / 256. Candidates: no speculation, chains of `depths` by each of
    `drafters` (default: those that the acceptance knows) always or below a threshold, exact tables of up to
    `max_buckets` rows, and BEG-MAB. `trials` trials of Optuna search BEG-MAB's settings; 0 leaves it out. Sampled times
    are means of up to `repeats` seeds, by default 3, of a sample of RL steps 1, as more RL steps narrow its intervals
    as well. `policies` are further candidates, as `load_policy` takes them. With `search`, values or `low..high` by
    setting, their settings are what the trials search, in place of the bandit's, and the best of them is the result,
    whether it is worth it or not.

    `robust` minimises the largest ratio to plain decoding over the traces and, with `cost_error` e, over costs and
    chances of drafted tokens that are off by a share of e either way. `graphs` limits policies to those whose CUDA
    graphs fit. The result does not depend on `jobs`, the processes (None: one per core).
    """

    decision_block: int | None = None  # type: ignore[assignment]
    depths: Sequence[int] = (1, 2, 4, 8)
    drafters: Sequence[str] | None = None
    judge_steps: Sequence[int] | None = None
    max_buckets: int = 4
    trials: int = 40
    repeats: int | None = None
    robust: bool = False
    cost_error: float | None = None
    graphs: GraphMemory | None = None
    policies: Sequence[PolicySource] | str = ()
    search: Mapping[str, Sequence[Any] | str] = field(default_factory=dict)
    jobs: int | None = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drafters is not None and not self.drafters:
            raise ConfigError("no drafter given: name one, such as ngram, or leave the choice to the acceptance model")
        if any(depth < 0 for depth in self.depths):
            raise ConfigError(f"depths count drafted tokens, 0 or more, got {', '.join(map(str, self.depths))}")
        if not any(self.depths):
            raise ConfigError("no depth above 0 given: name depths to try, such as 1,2,4,8")
        if self.search and not (self.policies and self.trials):
            raise ConfigError("--search tries settings of policies: name them with --policies, and 1 or more --trials")
        at_least(0, trials=self.trials)
        at_least(1, repeats=self.repeats, max_buckets=self.max_buckets, jobs=self.jobs)
        if self.cost_error is not None and not 0.0 <= self.cost_error < 1.0:
            raise ConfigError(f"the cost error is a share between 0 and 1, such as 0.2, got {self.cost_error:g}")
        if self.cost_error is not None and not self.robust:
            raise ConfigError("a cost error is what a robust policy withstands: give --robust with it")

    def named(self) -> dict[str, Policy]:
        """The further candidates by name."""
        sources = split(self.policies) if isinstance(self.policies, str) else self.policies
        return {policy_name(source): load_policy(source) for source in sources}

    def seeds(self, stage: int = 0) -> list[int]:
        """Seeds of a stage of the tuning: other ones in each, so that a policy hardly wins two stages by chance."""
        return [self.seed + k + _STAGE * stage for k in range(self.repeats or _REPEATS)]

    def holds(self, policy: Policy) -> bool:
        """Return whether the CUDA graphs of a policy fit."""
        return self.graphs is None or self.graphs.holds(policy)
