"""The scheduler by itself where samples share a prompt; all else is held by the oracle in `test_worker`."""

from dataclasses import replace

from bench.simulator import COSTS
from tltlab.sim.engine.batch import FluidBatch
from tltlab.sim.engine.scheduler import Scheduler

from ..workloads import requests_of


def scheduler(prompts, length=50, *, group=1, **limits):
    """One over requests 0, 1, ... with these prompts, all waiting; samples of a prompt share it where there are."""
    requests = replace(requests_of([length] * len(prompts), prompts, group=group), prefix_caching=group > 1)
    made = Scheduler(prompts, FluidBatch(requests), COSTS.model_copy(update=limits))
    made.waiting.extend((i, 0.0) for i in range(len(prompts)))
    return made


def test_a_group_prompt_is_prefilled_once():
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
