"""Requests, costs and ways to ask that the simulator's tests share."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from hypothesis import settings
from pydantic import PrivateAttr

from bench import simulator
from tests.typed import typed as typed
from tltlab.costs.linear import LinearCosts
from tltlab.policies.policy import Policy
from tltlab.policies.selector import Selector
from tltlab.policies.specs import NoneSpec
from tltlab.sim.engine.requests import Requests
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.traces.schema import KEY

FEW = settings(max_examples=settings.default.max_examples // 3)
HALF = settings(max_examples=settings.default.max_examples // 2)
"""For property tests whose examples take long."""
COSTS = simulator.COSTS.model_copy(update={"per_request_s": 1e-4, "sd_idle_s": 1e-4, "prefill_per_token_s": 1e-5})
FREE = LinearCosts.model_validate(dict.fromkeys(COSTS.model_fields_set, 0.0))
"""Nothing costs anything: what a test means to cost it names with `with_terms`."""


def with_terms(costs, **terms):
    """The cost model with other values of these fields."""
    return costs.model_copy(update=terms)


ONE_SECOND = with_terms(FREE, base_s=1.0)
"""An iteration takes a second, whatever runs."""
TINY = Path(__file__).resolve().parents[2] / "traces" / "tiny"


class Ruled(Selector):
    """Chooses by a rule, and remembers the states that it was asked in and the outcomes that it was told."""

    def __init__(self, strategies, rule, *, memoryless=False):
        self.strategies, self.rule, self.memoryless = strategies, rule, memoryless
        self.states = []
        self.outcomes = []

    def choose(self, state):
        self.states.append(state)
        return self.rule(state)

    def observe(self, choice, outcome):
        self.outcomes.append(outcome)


class Handing(Policy):
    """A policy whose selectors follow a rule; without one they choose the last strategy."""

    _make: Callable[[], Ruled] = PrivateAttr()
    _strategies: tuple[Strategy, ...] = PrivateAttr()
    _built: list[Ruled] = PrivateAttr(default_factory=list)

    def __init__(self, *strategies, rule=None, memoryless=False):
        super().__init__(selector=NoneSpec())
        self._strategies = strategies
        self._make = partial(Ruled, strategies, rule or (lambda state: strategies[-1]), memoryless=memoryless)

    @property
    def strategies(self):
        return self._strategies

    @property
    def built(self):
        return self._built

    def build(self, rng=None):
        self._built.append(self._make())
        return self._built[-1]


def up_to(most, chain, *, memoryless=True):
    """A selector that speculates with one chain while at most `most` requests run."""
    return Ruled(
        (NO_SPECULATION, chain), lambda state: chain if state.batch <= most else NO_SPECULATION, memoryless=memoryless
    )


def requests_of(lengths, prompts=20, *, cap=8192, group=1):
    """RL step 0 with responses of these lengths; `group` of them to a prompt, recorded on workers 0 and 1 in turn."""
    n = len(lengths)
    return Requests(
        rl_step=0,
        policy_version=0,
        prompts=np.broadcast_to(np.array(prompts, np.int64), n),
        caps=np.full(n, cap),
        lengths=np.array(lengths, np.int64),
        recorded_worker=np.arange(n) % 2.0,
        make_keys=lambda: [(0, f"p{i // group}", i % group, 0) for i in range(n)],
        make_rows=pd.DataFrame,
    )


def counterfactuals(keys, positions, depth, drafter="ngram"):
    """A table of what would have been accepted, of `depth` drafted tokens, at each position of each response."""
    table = pd.DataFrame(keys, columns=KEY).assign(drafter=drafter, drafter_age=0, max_depth=depth)
    return table.assign(accept_if_drafted=[np.array(p, np.uint8) for p in positions])


def with_positions(trace, positions, drafter="ngram"):
    """The trace with that table, of 8 drafted tokens."""
    return trace.replace(acceptance=counterfactuals(trace.outcomes[list(KEY)], positions, 8, drafter))


def assert_above_its_bounds(result):
    """No rollout is faster than its bound, nor the bound without moves below that with them."""
    for rollout, *bounds_s in zip(result.rollouts, *result.bounds_s(), strict=True):
        assert bounds_s[0] <= bounds_s[1] <= rollout.makespan_s * (1 + 1e-9)


def grouped(lengths, prompt_tokens):
    """A frame of lengths by RL step, four to a group; the prompt of each is a token longer than the one before."""
    rows = [
        (step, f"g{i // 4}", prompt_tokens + i, int(n))
        for step, of_step in enumerate(lengths)
        for i, n in enumerate(of_step)
    ]
    return pd.DataFrame(rows, columns=["step", "group", "prompt_len", "response_length"])


def console_line(step, metrics):
    """verl's `LocalLogger`: `concat_dict_to_str` of utils/logger/aggregate_logger.py."""
    return " - ".join([f"step:{step}", *(f"{name}:{value:.3f}" for name, value in metrics.items())])
