"""What a policy would have chosen in logged states: its probabilities over strategies.

Policies that learn nothing from rewards are followed along the logged states. A bandit's choice depends on what it has
seen, which in its own run would have been something else. So it is evaluated as it stands after learning from the RL
steps that it is not evaluated on, from their decisions made at random, so that every arm is known. It is frozen there:
the answer is about a trained bandit, not about its learning.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np

from tltlab.errors import ConfigError
from tltlab.policies.activation import ElasticActivation
from tltlab.policies.beg_mab import BegMab
from tltlab.policies.goodput import Goodput
from tltlab.policies.policy import Policy, UniformBudgetSpec
from tltlab.policies.selector import Selector
from tltlab.policies.simple import Explore
from tltlab.state import StepState
from tltlab.strategy import NO_SPECULATION, Strategy

from .decisions import Logged

Chances = dict[Strategy, float]


def chances(policy: Policy, log: Sequence[Logged], folds: Sequence[int]) -> list[Chances]:
    """pi(strategy | state) of each logged decision, in order; `folds` are as `off_policy.folds_of` gives them.

    Raises ConfigError for a policy that shares drafts out by a budget of its own, whose rewards are not in the log, and
    for selectors of other classes that are not memoryless: their chances cannot be asked for.
    """
    if policy.budget is not None and not isinstance(policy.budget, UniformBudgetSpec):
        raise ConfigError(f"a policy with the budget '{policy.budget.kind}' drafts what no logged decision did")
    by_decision: list[Chances] = [{} for _ in log]
    learns = _learns(policy.build(np.random.default_rng(0)))
    for fold in sorted(set(folds)) if learns else [-1]:
        selectors: dict[int, Selector] = {}
        taught = policy.build(np.random.default_rng(0))
        if learns:
            _teach(taught, [d for j, d in enumerate(log) if folds[j] != fold and d.at_random])
        for i, decision in enumerate(log):
            if learns and folds[i] != fold:
                continue
            worker = decision.state.worker
            if worker not in selectors:
                selectors[worker] = (
                    copy.deepcopy(taught) if learns else policy.build(np.random.default_rng([0, worker]))
                )
            by_decision[i] = _of(selectors[worker])(decision.state)
    return by_decision


def _core(selector: Selector) -> Selector:
    return selector.inner if isinstance(selector, ElasticActivation) else selector


def _learns(selector: Selector) -> bool:
    core = _core(selector)
    if core.memoryless or isinstance(core, Explore):
        return False
    if isinstance(core, BegMab | Goodput):
        return True
    raise ConfigError(
        f"{type(core).__name__} cannot be evaluated from a log: its chances depend on a history that the log does not "
        "hold; a selector that sets memoryless can"
    )


def _teach(selector: Selector, log: Sequence[Logged]) -> None:
    core = _core(selector)
    for decision in log:
        core.observe(decision.strategy, decision.outcome)


def _of(selector: Selector) -> Callable[[StepState], Chances]:
    if isinstance(selector, ElasticActivation):
        return lambda state: _activated(selector, state)
    if isinstance(selector, Explore):
        return lambda state: dict.fromkeys(selector.strategies, 1.0 / len(selector.strategies))
    if isinstance(selector, BegMab | Goodput):
        return lambda state: _epsilon_greedy(selector, state)
    return lambda state: {selector.choose(state): 1.0}


def _activated(selector: ElasticActivation, state: StepState) -> Chances:
    """The wrapper counts its holds along the logged states; the inner one is asked for all its chances."""
    selector.choose(state)
    return _of(selector.inner)(state) if selector.on_ else {NO_SPECULATION: 1.0}


def _epsilon_greedy(selector: BegMab | Goodput, state: StepState) -> Chances:
    greedy = copy.copy(selector)
    greedy.epsilon = 0.0
    best = greedy.choose(state)
    arms = selector.strategies
    if isinstance(selector, BegMab) and greedy.bucket_ is not None:
        arms = selector.arms[greedy.bucket_]
    if len(arms) == 1:
        return {best: 1.0}
    by_arm = dict.fromkeys(arms, selector.epsilon / len(arms))
    by_arm[best] += 1.0 - selector.epsilon
    return by_arm
