"""The metrics on traces small enough to check by hand, and against slow definitions on random ones."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.refused import refused
from tests.traces_of_lengths import iterations, of_samples
from tltlab.errors import TraceError
from tltlab.lengths.generate import log_normal
from tltlab.traces import metrics
from tltlab.traces.schema import Manifest


def rollout(finish, *, workers=None, tokens=None, submit=0.0, prompts=None, rl_step=0, num_workers=None, **tables):
    """A trace of one response per entry of `finish`."""
    num = len(finish)
    trace = of_samples(
        tokens or [1] * num, 10**6, prompt_id=prompts or [f"p{i}" for i in range(num)], rl_step=rl_step,
        worker=workers, t_submit=submit, t_finish=finish,
    )  # fmt: skip
    return trace.replace(manifest=Manifest(kind="recorded", num_workers=num_workers), **tables)


MEASURED = pd.DataFrame({"rl_step": [0], "t_start": 0.0, "rollout_s": 6.0, "policy_version": 0})


@pytest.mark.parametrize(
    ("metric", "trace", "value"),
    [
        (metrics.rollout_s, rollout([2.0, 5.0], submit=[0.5, 1.0]), {0: 4.5}),
        (metrics.rollout_s, rollout([2.0, 5.0], steps=MEASURED), {0: 6.0}),
        (metrics.makespan_s, rollout([3.0, 4.0, 5.0, 6.0], rl_step=[0, 0, 1, 1]), 5.0),
        (metrics.length_percentiles, rollout([1.0] * 3, tokens=[1, 2, 3]), pytest.approx([2.0, 2.9, 3.0])),
        (metrics.bubble_fraction, rollout([5.0, 10.0]), None),
        # Of 8, one running is not fewer than an eighth.
        (metrics.tail_fraction, rollout([1.0] * 7 + [10.0]), 0.0),
    ],
)
def test_a_metric_by_hand(metric, trace, value):
    assert metric(trace) == value


def test_spans_state_when_a_worker_was_busy():
    """Spot training is still bubble."""
    rows = [
        ("worker 0", "decode", 0.0, 2.0),
        ("worker 0", "speculative_decode", 1.0, 3.0),
        ("worker 0", "spot_train", 4.0, 6.0),
        ("worker 1", "decode", 2.0, 8.0),
        ("trainer", "train", 0.0, 20.0),
    ]
    spans = pd.DataFrame(rows, columns=["lane", "kind", "t_start", "duration"]).assign(rl_step=0)
    trace = rollout([4.0, 10.0], workers=[0, 1], num_workers=2, spans=spans)
    assert metrics.bubble_fraction(trace) == pytest.approx((6 + 2) / 20)
    assert metrics.bubble_fraction(trace, idle=True) == pytest.approx((0 + 2) / 20), "who trains is not idle"


def test_accept_length_counts_bonus_tokens_of_drafted_iterations():
    kept = [[3, 1], None, [2, 0]]
    table = iterations(batch=[2, 8, 4], draft_depth=[3, 0, 3], accepted_per_request=kept)
    assert metrics.mean_accept_length(rollout([1.0], iterations=table)) == 1 + 6 / 4
    unknown = table.assign(accepted_per_request=None)
    assert metrics.mean_accept_length(rollout([1.0], iterations=unknown)) == 1 + 6 / 6
    assert metrics.mean_accept_length(rollout([1.0], iterations=table.iloc[[1]])) is None
    assert metrics.mean_accept_length(rollout([1.0])) is None


def test_a_trace_without_times_has_no_running_requests():
    assert metrics.tail_window(rollout([4.0] * 15 + [10.0]), 0) == (4.0, 10.0)
    with refused(TraceError, naming=("simulate",)):
        metrics.running_requests(rollout([np.nan, np.nan]), 0)


@pytest.mark.parametrize(
    ("tokens", "share"),
    [([2, 2, 8, 8], 1.0), ([2, 8, 2, 8], 0.0), ([2, 8, 4, 64], 0.0), ([2, 4, 32, 64], (16 - 0.5) / (16 + 0.5))],
)
def test_prompt_share_by_hand(tokens, share):
    """Logs (base 2) {1, 3} and {2, 6}: MSB = 4, MSW = (2 + 8) / 2 = 5, below 0; {1, 2} and {5, 6}: 16, 0.5."""
    trace = rollout([1.0] * 4, tokens=tokens, prompts=["a", "a", "b", "b"])
    assert metrics.prompt_share(trace) == pytest.approx(share)
    assert metrics.prompt_share(rollout([1.0] * 4, tokens=tokens)) is None


def test_drift_is_no_prompt_share():
    tokens = [2, 8, 2, 8, 2000, 8000, 2000, 8000]
    steps, groups = [0] * 4 + [1] * 4, ["a", "a", "b", "b"] * 2
    assert metrics.prompt_share(rollout([1.0] * 8, tokens=tokens, prompts=groups, rl_step=steps)) == 0.0


def test_summary_has_null_for_unknown():
    known = metrics.summary(rollout([5.0, 10.0], workers=[0, 1], tokens=[30, 70]))
    assert known == {
        "makespan_s": 10.0, "makespan_s_per_step": [10.0], "tokens_per_s": 10.0, "num_responses": 2, "num_tokens": 100,
        "bubble_fraction": 0.25, "tail_fraction": 0.0,
    }  # fmt: skip
    unknown = metrics.summary(log_normal(prompts=2, rl_steps=1))
    assert {key for key, value in unknown.items() if value is not None} == {
        "num_responses", "num_tokens", "makespan_s_per_step"
    }  # fmt: skip
    assert unknown["makespan_s_per_step"] == [None]


def test_per_step_rows_agree_with_metrics():
    trace = rollout([3.0, 4.0, 5.0, 6.0], rl_step=[0, 0, 1, 1], workers=[0, 1, 0, 1])
    rows = metrics.per_step(trace)
    assert [row["rollout_s"] for row in rows] == [4.0, 6.0]
    assert rows[1]["bubble_fraction"] == metrics.bubble_fraction(trace.select([1]))


responses = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=24
)  # worker, submit, duration in quarters of a second


@settings(max_examples=40, deadline=None)
@given(rows=responses)
def test_bubble_tail_and_running_agree_with_slow_definitions(rows):
    """An oracle that looks at every quarter second."""
    submit = [s / 4 for _, s, _ in rows]
    finish = [(s + d) / 4 for _, s, d in rows]
    trace = rollout(finish, submit=submit, workers=[row[0] for row in rows], num_workers=3)
    ticks = [t / 4 for t in range(int(4 * min(submit)), int(4 * max(finish)))]
    idle = sum(
        1 for t in ticks for w in range(3) if not any(rows[i][0] == w and finish[i] > t for i in range(len(rows)))
    )
    assert metrics.bubble_fraction(trace) == pytest.approx(idle / (3 * len(ticks)))
    tail = sum(1 for t in ticks if sum(f > t for f in finish) < len(rows) / 8)
    assert metrics.tail_fraction(trace) == pytest.approx(tail / len(ticks))
    times, counts = metrics.running_requests(trace, 0)
    for t in ticks:
        at = np.searchsorted(times, t, side="right") - 1
        assert counts[at] == sum(s <= t < f for s, f in zip(submit, finish, strict=True))
