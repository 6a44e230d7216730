"""The scheduler by itself: who waits, who is prefilled and who runs, without a clock."""

from __future__ import annotations

import math
from dataclasses import replace

from bench.simulator import COSTS
from tltlab.sim.engine.batch import FluidBatch
from tltlab.sim.engine.regime import Regimes
from tltlab.sim.engine.scheduler import Scheduler
from tltlab.strategy import NO_SPECULATION

from ..workloads import requests_of


def scheduler(prompts: list[int], length: int = 50, *, group: int = 1, **limits: int) -> Scheduler:
    """One over requests 0, 1, ... with these prompts, all waiting; samples of a prompt share it where there are."""
    requests = replace(requests_of([length] * len(prompts), prompts, group=group), prefix_caching=group > 1)
    made = Scheduler(prompts, FluidBatch(requests), COSTS.model_copy(update=limits))
    made.waiting.extend((i, 0.0) for i in range(len(prompts)))
    return made


def decode(it: Scheduler, iterations: int) -> None:
    regimes = Regimes([NO_SPECULATION], COSTS, None)
    it.batch.advance(regimes.at(NO_SPECULATION, len(it.batch)), iterations, math.inf)


def test_without_limits_all_are_prefilled_at_once():
    it = scheduler([10, 20, 30])
    assert it.schedule() == 60
    assert list(it.batch.running) == [0, 1, 2]
    assert it.take_joined() == [0, 1, 2]
    assert (it.num_waiting, it.take_joined(), it.is_done) == (0, [], False)


def test_the_first_that_does_not_fit_holds_up_those_behind_it():
    it = scheduler([60, 60, 5], kv_capacity_tokens=100)
    it.schedule()
    assert (list(it.batch.running), [r for r, _ in it.waiting]) == ([0], [1, 2])


def test_a_lone_request_is_admitted_however_large():
    it = scheduler([500], kv_capacity_tokens=100)
    assert it.schedule() == 500
    assert not it.preempt()


def test_a_group_s_prompt_is_prefilled_once_in_whole_blocks():
    it = scheduler([50, 50, 50, 50, 20, 20, 20, 20], group=4)
    # Three blocks of 16 of the first prompt, one of the second; the last token is always computed.
    assert it.schedule() == 50 + 3 * (50 - 48) + 20 + 3 * (20 - 16)
    exact = scheduler([48, 48], group=2)
    assert exact.schedule() == 48 + (48 - 32)


def test_a_group_s_prompt_is_held_once():
    # 50 + 1 tokens for the first, 2 + 1 for each of its siblings: a fourth prompt would need 100 more.
    alone, shared = (scheduler([50] * 4, group=group, kv_capacity_tokens=100) for group in (1, 4))
    alone.schedule()
    shared.schedule()
    assert (len(alone.batch), len(shared.batch)) == (1, 4)
    assert (alone.room_tokens, shared.room_tokens) == (49, 100 - 4 - 4 * 50 + 3 * 48)


def test_a_preempted_sample_has_its_text_prefilled_again_and_not_the_prompt():
    it = scheduler([30, 30, 30], group=3, kv_capacity_tokens=80)
    assert it.schedule() == 30 + 2 * 14
    decode(it, 8)
    assert it.schedule() == 0.0
    assert list(it.waiting) == [(2, 8.0)]
    decode(it, 42)
    assert it.schedule() == 30 + 8 - 16
