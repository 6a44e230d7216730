"""The roofline: its formula, term by term, and how the presets made of it behave."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.costs.models import CONSTANTS, ROOFLINE
from tltlab.costs.load import load_costs, presets
from tltlab.costs.profiles import profiles
from tltlab.costs.scaled import ScaledCosts
from tltlab.drafters.specs import Drafters, LearnedSpec
from tltlab.strategy import NO_SPECULATION, Strategy

TREE = Strategy("learned", 8, 4, 48)
ROOFLINES = [name for name in presets() if load_costs(name).kind == "roofline"]
ROOFLINES += [f"{name}:2xH100:Qwen3-32B" for name in profiles().engines]


def by_hand(batch, context, v, depth, top_k, tp):
    """The formula of the docstring, term by term, for Qwen2.5-32B on H100."""
    weights, layer, head, hidden = 31_984_189_440, 487_587_840, 5120 * 152064, 5120
    bandwidth, flops = tp * 3.35e12, tp * 989e12

    def rounded(a, b):
        return (a**2.5 + b**2.5) ** (1 / 2.5)

    took = 1.5e-3 + 64 * 2e-5 + batch * 4e-5
    took += rounded(2 * weights / bandwidth / 0.8, 2 * weights * batch * v / flops / 0.7)
    if tp > 1:
        took += 128 * 6e-6 + 128 * 2 * (tp - 1) / tp * batch * v * hidden * 2 / 450e9 / 0.6
    took += context * rounded(262_144 / bandwidth / 0.75, 4 * 64 * 40 * 128 * v / flops / 0.7)
    if depth:
        draft = layer + head + 2 * hidden**2
        network = rounded(2 * draft / bandwidth / 0.8, 2 * draft * batch * top_k / flops / 0.7)
        took += 3e-3 + depth * (network + 3e-4 + 2e-5 * batch)
    return took


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("batch", [1, 7, 200])
def test_an_iteration_is_the_sum_of_its_terms(batch, tp):
    costs = ROOFLINE.model_copy(update={"tp": tp})
    plain, tree = costs.iteration(NO_SPECULATION), costs.iteration(TREE)
    assert plain.seconds(batch, 1e5) == pytest.approx(by_hand(batch, 1e5, 1, 0, 0, tp))
    assert tree.seconds(batch, 1e5) == pytest.approx(by_hand(batch, 1e5, 48, 8, 4, tp))


@pytest.mark.parametrize("batch", [1, 59])
def test_a_block_is_drafted_in_one_pass(batch):
    """Worked by hand: five layers on (d + 1) tokens of each request, once."""
    layer, head, hidden = 487_587_840, 5120 * 152064, 5120
    draft, tp = 5 * layer + head + 2 * hidden**2, ROOFLINE.tp
    for depth in (1, 6, 8):
        read, computed = 2 * draft / (tp * 3.35e12) / 0.8, 2 * draft * batch * (depth + 1) / (tp * 989e12) / 0.7
        network = (read**2.5 + computed**2.5) ** (1 / 2.5)
        cost = ROOFLINE.iteration(Strategy.chain("block", depth))
        assert cost.draft_s(batch) == pytest.approx(network + 4 * 2e-5 + 3e-4 + 2e-5 * batch)
    heads = Drafters({"mine": LearnedSpec(method="dflash", model="heads", layers=5)})
    assert ROOFLINE.iteration(Strategy.chain("mine", 8), drafters=heads).draft_s(batch) == cost.draft_s(batch)


def test_prompts_are_nearly_free_up_to_the_knee():
    """Worked by hand: weights of a 32B are read in 5.97 ms on 4 H100, a token is multiplied in 23.1 us."""
    sharp = CONSTANTS.model_copy(update={"knee": 4.0, "link_efficiency": 1.0, "prefill_efficiency": 0.9})
    costs = ROOFLINE.model_copy(update={"constants": sharp})
    read, token = 2 * 31_984_189_440 / (4 * 3.35e12 * 0.8), 2 * 31_984_189_440 / (4 * 989e12 * 0.7)
    bytes_s = 128 * 2 * 3 / 4 * 5120 * 2 / 450e9
    plain = costs.iteration(NO_SPECULATION)

    def by_hand(prompt):
        both, alone = ((read**4 + (token * (8 + p / 0.9)) ** 4) ** 0.25 for p in (prompt, 0.0))
        return both - alone + bytes_s * prompt

    for prompt in (16.0, 256.0, 2048.0):
        assert plain.added_s(8, prompt, costs.prefill_s(prompt)) == pytest.approx(by_hand(prompt))
    shares = [plain.added_s(8, p, 1.0) / costs.prefill_s(p) for p in (16.0, 256.0, 2048.0, 16384.0)]
    assert shares == sorted(shares)
    assert shares[1] < 0.4
    assert 0.95 < shares[-1] < 1


@given(
    st.sampled_from([*presets(), "vllm:4xH100:MiniMax-M2.5:fp8", "cpu-small"]), st.integers(1, 512),
    st.floats(1.0, 20_000.0), st.sampled_from([NO_SPECULATION, TREE]), st.floats(0.5, 2.0),
)  # fmt: skip
def test_prompts_beside_decoding_take_no_longer_than_apart(name, batch, prompt, strategy, level):
    shape = load_costs(name)
    for costs in (shape, ScaledCosts.wrapping(shape, level=level), ScaledCosts.wrapping(shape, overhead=level)):
        cost, apart = costs.iteration(strategy), costs.prefill_s(prompt)
        alone = cost.without_context_s(batch)
        together = alone + cost.added_s(batch, prompt, apart)
        assert max(alone, apart) * (1 - 1e-9) <= together <= (alone + apart) * (1 + 1e-9)


@given(
    name=st.sampled_from(ROOFLINES), batch=st.integers(1, 512), more=st.integers(1, 512), context=st.floats(0, 1e7),
    depth=st.integers(1, 16), verify=st.integers(2, 128), top_k=st.integers(2, 16),
)  # fmt: skip
def test_times_are_positive_and_grow_with_work(name, batch, more, context, depth, verify, top_k):
    costs = load_costs(name)

    def took(batch, context, depth, verify, top_k=top_k):
        # Of any width: not every depth and top_k has as many nodes.
        shape = Strategy("learned", depth, top_k, 2)
        return costs.iteration(shape, tokens_to_verify=verify).seconds(batch, context)

    base = took(batch, context, depth, verify)
    plain = costs.iteration(NO_SPECULATION).seconds(batch, context)
    assert 0 < plain < base < np.inf
    assert base < took(batch + more, context, depth, verify)
    assert base <= took(batch, context + more, depth, verify)
    assert base < took(batch, context, depth + more, verify)
    assert base < took(batch, context, depth, verify + more)
    assert base < took(batch, context, depth, verify, top_k + more)


def test_there_is_preset_for_each_gpu_and_model():
    models = ("qwen2.5-7b", "qwen2.5-32b-tp4", "llama-3.3-70b-tp4")
    assert {f"{g}-{m}" for g in ("h100", "h200", "a100") for m in models} <= set(ROOFLINES)
