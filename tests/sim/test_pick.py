"""Picking a policy by simulation, with and without a limit on CUDA-graph memory."""

from __future__ import annotations

import pytest

from tltlab.acceptance import GeometricAcceptance
from tltlab.errors import ConfigError
from tltlab.generate import log_normal
from tltlab.graph_pool import GraphPool, plan_for, sglang_sizes
from tltlab.sim.bench import COSTS
from tltlab.sim.pick import GraphMemory, pick

TRACE = log_normal(prompts=6, group_size=4, rl_steps=1, median=200, cap=1500, workers=2)
OPTIONS = {"drafter": "learned", "placement": "contiguous", "mode": "fluid", "thresholds": (4,), "depths": (0, 2, 6)}
POOL = GraphPool(
    num_layers=32, hidden_size=4096, vocab_size=128_256, context_tokens=8192, bytes_per_layer=2**20, tensor_parallel=1
)


def room(gigabytes: float) -> GraphMemory:
    return GraphMemory(pool=POOL, cap_bytes=gigabytes * 2**30, max_batch=32, sizes=sglang_sizes(32))


def test_the_fastest_comes_first_and_beats_plain_decoding():
    found = pick(TRACE, COSTS, GeometricAcceptance(alpha=0.8), **OPTIONS)
    assert [c.makespan_s for c in found] == sorted(c.makespan_s for c in found)
    assert found[0].makespan_s < next(c for c in found if c.name == "none").makespan_s


def test_graph_memory_leaves_candidates_out():
    every = pick(TRACE, COSTS, GeometricAcceptance(alpha=0.8), **OPTIONS)
    sizes = {c.name: POOL.memory_bytes(plan_for(c.policy, 32, sglang_sizes(32))) / 2**30 for c in every}
    cap = sorted(sizes.values())[len(sizes) // 2]
    fitting = pick(TRACE, COSTS, GeometricAcceptance(alpha=0.8), **OPTIONS, graphs=room(cap))
    assert {c.name for c in fitting} == {name for name, size in sizes.items() if size <= cap}
    assert 0 < len(fitting) < len(every)
    with pytest.raises(ConfigError, match="no candidate's CUDA graphs fit"):
        pick(TRACE, COSTS, GeometricAcceptance(alpha=0.8), **OPTIONS, graphs=room(0.0))
