"""Makes traces RL step by RL step, and measures what memory work on a long one takes."""

import gc
import tracemalloc

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import strategies as st

from tltlab.traces import trace as trace_module
from tltlab.traces.recorder import Recorder
from tltlab.traces.schema import Manifest
from tltlab.traces.storage import frame_to_arrow

MANIFEST = Manifest(kind="synthetic", num_workers=2)
Frames = tuple[pd.DataFrame, pd.DataFrame]


def rl_step(number, responses=4):
    """Workload and outcomes of one RL step in groups of two, with times."""
    rng = np.random.default_rng(number)
    i = np.arange(responses)
    key = pd.DataFrame({"rl_step": number, "prompt_id": [f"step{number}-p{k}" for k in i // 2], "sample": i % 2})
    tokens = rng.integers(1, 100, responses)
    workload = key.assign(turn=0, epoch=0, prompt_tokens=5, max_response_tokens=100, policy_version=number)
    outcomes = key.assign(turn=0, response_tokens=tokens, finish_reason="stop", reward=rng.random(responses))
    return workload, outcomes.assign(worker=i % 2, t_submit=0.0, t_first_token=0.1, t_finish=tokens * 0.5)


def write_steps(path, steps):
    with Recorder(path, MANIFEST) as recorder:
        for step in steps:
            for name, frame in zip(("workload", "outcomes"), step, strict=True):
                recorder.append(name, frame_to_arrow(name, frame))
            recorder.flush()
    return path


RESPONSE = st.tuples(st.integers(0, 4), st.sampled_from(["a", "b", "é"]), st.integers(0, 3), st.integers(1, 64))
responses = st.lists(RESPONSE, min_size=1, max_size=30, unique_by=lambda row: row[:3])
"""RL step, prompt, sample and length of each."""


def peak_bytes(work):
    """Most memory in use at once: Python's and numpy's at any time, Arrow's whenever rows are checked or handed out."""
    arrow, before = [0], pa.total_allocated_bytes()
    plain = trace_module.check

    def check(parts, *more):
        arrow.append(pa.total_allocated_bytes() - before)
        plain(parts, *more)

    gc.collect()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trace_module, "check", check)
        tracemalloc.start()
        for _ in work():
            arrow.append(pa.total_allocated_bytes() - before)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak + max(arrow)
