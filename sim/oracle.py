"""The simulation's slow, independent oracle: every iteration and every request one at a time, no closed form, no SimPy.

It exists to check the engine: same semantics, written as directly as the text of the command line has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tltlab.cost import CostModel
from tltlab.selector import Selector
from tltlab.state import StepState
from tltlab.strategy import NO_SPECULATION

from .regime import Regime, Regimes
from .requests import Requests

Gain = Callable[[int, float, int, Regime], float]
"""Tokens that a request gets: (request, tokens generated, its speculative iterations so far, regime)."""


@dataclass(slots=True)
class _Running:
    request: int
    prompt_tokens: int
    length: int
    generated: float = 0.0
    num_speculative: int = 0

    @property
    def context_tokens(self) -> float:
        return self.prompt_tokens + self.generated


def expected(request: int, generated: float, num_speculative: int, regime: Regime) -> float:
    """The gain of fluid mode."""
    return regime.tokens


def finish_times(
    requests: Requests,
    queue: Sequence[int],
    selector: Selector,
    regimes: Regimes,
    costs: CostModel,
    *,
    gain: Gain = expected,
) -> dict[int, float]:
    """Finish time of each request of one worker, whose selector is asked before every iteration."""
    waiting = [_Running(r, requests.prompt_tokens[r], requests.response_tokens[r]) for r in queue]
    running: list[_Running] = []
    finished: dict[int, float] = {}
    now = 0.0
    strategy = NO_SPECULATION
    while waiting or running:
        preempted = False
        while len(running) > 1 and not _fits(running, costs):
            waiting.insert(0, running.pop())
            preempted = True
        while waiting and not preempted and _admissible([*running, waiting[0]], costs):
            new = waiting.pop(0)
            running.append(new)
            now += costs.prefill_s(new.context_tokens)
        strategy = selector.choose(
            StepState(
                rl_step=requests.rl_step,
                batch=len(running),
                waiting=len(waiting),
                context_tokens=sum(r.context_tokens for r in running),
                strategy=strategy,
            )
        )
        regime = regimes.at(strategy, len(running))
        now += regime.cost.seconds(len(running), sum(r.context_tokens for r in running))
        for r in running:
            r.generated += gain(r.request, r.generated, r.num_speculative, regime)
            r.num_speculative += strategy.speculates
            if r.generated >= r.length - 1e-6:
                finished[r.request] = now
        running = [r for r in running if r.request not in finished]
    return finished


def _fits(running: list[_Running], costs: CostModel) -> bool:
    """Whether the contexts and one more token each fit; the rounding of expected tokens is forgiven."""
    needed = sum(r.context_tokens + 1 for r in running)
    return costs.kv_capacity_tokens is None or needed <= costs.kv_capacity_tokens + 1e-6


def _admissible(running: list[_Running], costs: CostModel) -> bool:
    if costs.max_num_seqs is not None and len(running) > costs.max_num_seqs:
        return False
    return len(running) == 1 or _fits(running, costs)
