"""Iterations as policies see them: the state, the choice, and the outcome."""

import numpy as np

from tltlab.policies.driver import PolicyDriver
from tltlab.policies.selector import chosen
from tltlab.state import Choice, StepOutcome, StepState


def at(batch, rl_step=0, **fields):
    return StepState(rl_step=rl_step, batch=batch, **fields)


def pick(selector, batch, rl_step=0, **fields):
    """The strategy that is chosen in this state."""
    return chosen(selector, at(batch, rl_step, **fields)).strategy


def teach(selector, strategy, outcome):
    """Deliver the outcome of a strategy that was certain to be chosen."""
    selector.observe(Choice(strategy), outcome)


def ran(strategy, batch, elapsed_s, accepted=0.0, **fields):
    """An iteration in which each request kept `accepted` tokens of its draft."""
    num = batch if strategy.speculates else 0
    drafted, taken = (strategy.draft_depth,) * num, (accepted,) * num
    return StepOutcome(elapsed_s=elapsed_s, batch=batch, drafted=drafted, accepted=taken, **fields)


def play(selector, rate, num, batches=(4,), noise=0.0, kept=None, delay=0):
    """What is chosen in `num` iterations, where strategy s keeps kept[s] tokens of a draft, by default none.

    With no drafts kept, it generates rate[s] tokens a second. Outcomes come `delay` choices late.
    """
    picks, rng, driver = [], np.random.default_rng(1), PolicyDriver(selector, delay=delay)
    for i in range(num):
        batch = batches[i % len(batches)]
        choice = driver.ask(at(batch))
        picks.append(strategy := choice.strategy)
        seconds = batch / (rate[strategy] * rng.uniform(1 - noise, 1 + noise))
        driver.tell(choice, ran(strategy, batch, seconds, (kept or {}).get(strategy, 0.0)))
    return picks
