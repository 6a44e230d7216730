"""Iterations as policies see them: before one is decided, and after it ran."""

import numpy as np

from tltlab.policies.selector import Selector
from tltlab.state import StepOutcome, StepState
from tltlab.strategy import Strategy


def at(batch: int, rl_step: int = 0, **fields: object) -> StepState:
    return StepState(rl_step=rl_step, batch=batch, **fields)


def ran(strategy: Strategy, batch: int, elapsed_s: float, accepted: float = 0.0, **fields: object) -> StepOutcome:
    """An iteration in which each request kept `accepted` tokens of its draft."""
    num = batch if strategy.speculates else 0
    drafted, taken = (strategy.draft_depth,) * num, (accepted,) * num
    return StepOutcome(elapsed_s=elapsed_s, batch=batch, drafted=drafted, accepted=taken, **fields)


def play(selector: Selector, rate: dict[Strategy, float], num: int, batches=(4,), noise: float = 0.0) -> list[Strategy]:
    """What is chosen in `num` iterations that keep no drafts, in which strategy s generates rate[s] tokens a second."""
    picks, luck = [], np.random.default_rng(1)
    for i in range(num):
        batch = batches[i % len(batches)]
        strategy = selector.choose(at(batch))
        picks.append(strategy)
        seconds = batch / (rate[strategy] * luck.uniform(1 - noise, 1 + noise))
        selector.observe(strategy, ran(strategy, batch, seconds))
    return picks
