"""The scheduler by itself: who waits, who is prefilled and who runs, without a clock."""

from __future__ import annotations

import math

from tltlab.bench.simulator import COSTS
from tltlab.sim.engine.batch import FluidBatch
from tltlab.sim.engine.regime import Regimes
from tltlab.sim.engine.scheduler import Scheduler
from tltlab.strategy import NO_SPECULATION

from ..workloads import requests_of


def scheduler(prompts: list[int], length: int = 50, **limits: int) -> Scheduler:
    """One over requests 0, 1, ... with these prompts, all waiting."""
    requests = requests_of([length] * len(prompts), prompts)
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


def test_seats_are_given_in_order():
    it = scheduler([10, 20, 30], max_num_seqs=2)
    assert it.schedule() == 30
    assert (list(it.batch.running), list(it.waiting)) == ([0, 1], [(2, 0.0)])


def test_the_first_that_does_not_fit_holds_up_those_behind_it():
    it = scheduler([60, 60, 5], kv_capacity_tokens=100)
    it.schedule()
    assert (list(it.batch.running), [r for r, _ in it.waiting]) == ([0], [1, 2])


def test_a_lone_request_is_admitted_however_large():
    it = scheduler([500], kv_capacity_tokens=100)
    assert it.schedule() == 500
    assert not it.preempt()


def test_the_newest_goes_back_to_the_head_of_the_queue_with_what_it_generated():
    it = scheduler([30, 30, 30], kv_capacity_tokens=100)
    it.schedule()
    assert list(it.batch.running) == [0, 1, 2]
    decode(it, 3)
    assert it.schedule() == 0.0
    assert (list(it.batch.running), list(it.waiting)) == ([0, 1], [(2, 3.0)])
    # Its prompt and its three tokens do not fit beside the others, which go on alone.
    assert it.schedule() == 0.0
    assert list(it.waiting) == [(2, 3.0)]


def test_prompts_are_prefilled_in_chunks_beside_what_runs():
    it = scheduler([8, 25], max_num_batched_tokens=10)
    assert it.schedule() == 10, "a whole iteration for the first prompt, two tokens of it for the second"
    assert (it.take_joined(), it.prefill_left_tokens) == ([0], 23)
    iterations, tokens = it.chunk(tokens_to_verify=1.0, limit=math.inf)
    assert (iterations, tokens) == (2, 9)
    assert it.prefill(iterations * tokens) == 18
    assert it.take_joined() == []
    assert it.chunk(tokens_to_verify=1.0, limit=math.inf) == (1, 9)
    assert it.prefill(9) == 5
    assert it.take_joined() == [1]


def test_chunks_wait_while_what_runs_takes_all_tokens():
    it = scheduler([8, 25], max_num_batched_tokens=10)
    it.schedule()
    assert it.chunk(tokens_to_verify=12.0, limit=7) == (7, 0.0)
