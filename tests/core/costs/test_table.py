"""Cost tables: what lies between and beyond the knots, what a file may say, and the fits that make one."""

import math
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.costs.models import CHAIN, SHAPED, TABLE
from tests.core.costs.models import TABLED as COSTS
from tests.traces_of_lengths import iterations
from tltlab.calibration.iterations import recorded_rows
from tltlab.costs.load import load_costs
from tltlab.costs.roofline import Hardware
from tltlab.costs.table import IdealForward, TableCosts
from tltlab.hardware import gpu, model
from tltlab.strategy import NO_SPECULATION, Strategy


def test_speculation_verifies_more_tokens_and_adds_drafting():
    cost = COSTS.iteration(Strategy("learned", 3, 2, 4))
    assert cost.draft_s(8) == pytest.approx(3 * (3e-4 + 8e-6))
    assert cost.without_context_s(8) == pytest.approx(6e-3 + 2e-3 + 1e-4 + 8e-5 + 1e-3 + cost.draft_s(8))


def test_without_a_roofline_times_are_linear():
    forward = COSTS.model_copy(update={"attention": COSTS.attention[:1], "base_s": 0.0, "per_request_s": 0.0})
    at = [forward.iteration(NO_SPECULATION, tokens_to_verify=m).without_context_s(1) - 1e-3 for m in (1, 20, 64, 128)]
    assert at == pytest.approx([4e-3, 5.5e-3, 9e-3, 9e-3 + 64 * 3e-3 / 32])


def test_context_costs_follow_the_slope():
    slopes = {**TABLE, "attention": [{"batch": b, "per_context_s": 3e-8} for b in (2, 8, 64)]}
    cost = load_costs(slopes).iteration(NO_SPECULATION)
    assert [cost.context_slope_s(b) for b in (1, 2, 5, 64, 500)] == pytest.approx([3e-8] * 5)


@given(st.floats(0.2, 1.0), st.lists(st.integers(1, 12), min_size=1, max_size=5, unique=True), st.integers(1, 8192))
def test_at_one_utilisation_roofline_table_is_that_roofline(used, powers, tokens):
    roofline = Hardware(gpu="H100", model="Qwen2.5-7B")
    ideal = IdealForward.of(roofline)
    knots = [{"tokens": 2**p, "seconds": ideal.at(2**p) / used} for p in sorted(powers)]
    table = TableCosts.model_validate({"forward": knots, "attention": [{"batch": 1}], "roofline": roofline})
    cost = table.iteration(NO_SPECULATION, tokens_to_verify=tokens)
    assert cost.seconds(1, 0) == pytest.approx(ideal.at(tokens) / used)


def test_times_do_not_dip_where_utilisation_rises():
    ideal = IdealForward.of(Hardware(gpu="H100", model="Qwen2.5-7B"))
    knots = [{"tokens": 64, "seconds": ideal.at(64) / 0.5}, {"tokens": 512, "seconds": ideal.at(512) / 0.9}]
    cost = load_costs({**SHAPED, "forward": knots}).iteration
    times = [cost(NO_SPECULATION, tokens_to_verify=m).without_context_s(1) for m in range(64, 513, 16)]
    assert all(a <= b for a, b in pairwise(times))
    assert ideal.at(160) / 0.7 < ideal.at(64) / 0.5  # Utilisation alone would dip.


def test_ideal_reads_weights_or_multiplies_by_them():
    ideal = IdealForward.of(Hardware(gpu="H100", model="Qwen2.5-32B", tp=4))
    weights, device = model("Qwen2.5-32B").weight_params, gpu("H100")
    assert ideal.at(1) == pytest.approx(2 * weights / 4 / device.hbm_bytes_per_s, rel=1e-3)
    assert ideal.at(8192) == pytest.approx(8192 * 2 * weights / 4 / device.peak_flops, rel=1e-3)


growing = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5).map(lambda steps: np.cumsum(steps) + 1e-3)


@st.composite
def tables(draw):
    seconds, fixed, context = (draw(growing) for _ in range(3))
    at = sorted(draw(st.lists(st.integers(1, 2000), min_size=len(seconds), max_size=len(seconds), unique=True)))
    few = {"min_size": 1, "max_size": min(len(fixed), len(context)), "unique": True}
    batches = sorted(draw(st.lists(st.integers(1, 300), **few)))
    terms = {
        "forward": [{"tokens": m, "seconds": s} for m, s in zip(at, seconds, strict=False)],
        "attention": [
            {"batch": b, "fixed_s": f, "per_context_s": c / b}
            for b, f, c in zip(batches, fixed, context, strict=False)
        ],
        "roofline": draw(st.sampled_from([None, {"gpu": "A100", "model": "Llama-3.3-70B", "tp": 4}])),
    }  # fmt: skip
    return TableCosts.model_validate({**TABLE, **terms})


@given(tables(), st.integers(1, 400), st.integers(2, 60), st.integers(1, 8), st.floats(0, 1e5))
def test_times_grow_with_everything(costs, batch, verify, depth, each):
    def took(b, v, d, context):
        return costs.iteration(Strategy("learned", d, 64, v)).seconds(b, b * context)

    here = took(batch, verify, depth, each)
    assert 0 < here < math.inf
    slack = 1e-9 * here
    for more in ((batch + 1, verify, depth, each), (batch, verify + 1, depth, each),
                 (batch, verify, depth + 1, each), (batch, verify, depth, each + 100.0)):  # fmt: skip
        assert took(*more) >= here - slack
    assert here >= costs.iteration(NO_SPECULATION).seconds(batch, batch * each) - slack


def test_a_dip_within_noise_is_lifted():
    lifted = load_costs({**TABLE, "forward": [{"tokens": 8, "seconds": 1.0}, {"tokens": 16, "seconds": 0.97}]})
    assert [k.seconds for k in lifted.forward] == [1.0, 1.0]


def test_predictions_of_iterations_are_the_models_own():
    rng, rows = np.random.default_rng(0), []
    for i in range(200):
        batch, strategy = int(rng.integers(1, 64)), (NO_SPECULATION, CHAIN)[rng.integers(2)]
        cost, context, prefill = COSTS.iteration(strategy), batch * int(rng.integers(50, 4000)), 500 * (i % 50 == 0)
        took = cost.seconds(batch, context) + COSTS.prefill_s(prefill)
        depth = strategy.draft_depth
        rows.append((i % 2, took, cost.draft_s(batch), batch, context, prefill, strategy.drafter, depth, depth))
    names = "worker duration draft_duration batch context_tokens prefill_tokens drafter draft_depth next_draft_depth"
    table = iterations(**pd.DataFrame(rows, columns=names.split()))
    idle_s = np.where(table["draft_depth"] > 0, 0.0, 2e-4)
    assert COSTS.predict(recorded_rows(table)) == pytest.approx(table["duration"] + idle_s)


def test_a_table_states_what_lies_beyond_its_knots():
    shipped = load_costs("h100-qwen2.5-32b-tp4-table")
    assert "Apache-2.0" in " ".join(shipped.notes)
    assert shipped.iteration(CHAIN).seconds(1, 2000) > shipped.iteration(NO_SPECULATION).seconds(1, 2000) > 5e-3
    for costs, batch, tokens, context, beyond in (
        (COSTS, 4, 20, 1e9, []),
        (COSTS, 9, 100, 0, ["batch", "verified_tokens"]),
        (shipped, 32, 2048, 1e5, []),
        (shipped, 600, 2048, 1e7, ["batch", "context_tokens"]),
    ):
        assert costs.calibrated.outside(batch=batch, verified_tokens=tokens, context_tokens=context) == beyond
