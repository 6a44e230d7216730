"""Costs of every kind: the linear formula, files and what they refuse, and what was not measured."""

import numpy as np
import pytest

from tests.core.costs.models import CHAIN, CONSTANTS, LINEAR, ROOFLINE, SHAPED, TABLE, TABLED
from tests.refused import refused
from tltlab.costs.base import padded
from tltlab.costs.load import load_costs, presets
from tltlab.costs.roofline import RooflineCosts
from tltlab.costs.table import TableCosts
from tltlab.errors import ConfigError
from tltlab.hardware import gpu, model
from tltlab.strategy import NO_SPECULATION, Strategy

OWN_GPU = gpu("H100").model_copy(update={"name": "mine", "hbm_bytes_per_s": 1e12})
DIPPING = [{"batch": b, "fixed_s": 1e-3, "per_context_s": 0.98 / b} for b in (3, 7, 11, 13)]


def test_linear_iterations_are_the_sum_of_their_terms():
    plain, chain, fewer = (
        LINEAR.iteration(strategy, tokens_to_verify=verify)
        for strategy, verify in ((NO_SPECULATION, None), (CHAIN, None), (CHAIN, 2.5))
    )
    assert plain.seconds(batch=8, context_tokens=1000) == pytest.approx(4e-3 + 8 * 1e-4 + 8 * 2e-5 + 1000 * 1e-8)
    assert chain.draft_s(8) == pytest.approx(4 * (3e-4 + 8 * 1e-5))
    verify_s = 4e-3 + 8 * 1e-4 + 8 * 5 * 2e-5 + 1000 * 1e-8 + 1e-3
    assert chain.seconds(8, 1000) == pytest.approx(verify_s + chain.draft_s(8))
    assert chain.seconds(8, 0) - fewer.seconds(8, 0) == pytest.approx(8 * 2.5 * 2e-5)


def test_graphs_pad_up_to_the_next_size_alone():
    assert [padded(tokens, (1, 8, 16)) for tokens in (1, 5, 8, 8 + 1e-12, 15, 17)] == [1, 8, 8, 8, 16, 17]
    for costs in (LINEAR, TABLED, ROOFLINE):
        in_graphs = costs.model_copy(update={"graph_sizes": (8, 32)})
        for batch, tokens, size in ((2, 5, 16), (1, 7, 8), (1, 40, 40)):
            own, whole = (
                one.iteration(NO_SPECULATION, tokens_to_verify=verify).without_context_s(batch)
                for one, verify in ((in_graphs, tokens), (costs, size))
            )
            assert own == pytest.approx(whole)


@pytest.mark.parametrize("costs", [LINEAR, TABLED, ROOFLINE], ids=lambda costs: costs.kind)
def test_missing_term_is_named_once_it_is_needed(costs):
    loaded, bare = (costs.iteration(NO_SPECULATION, drafter_loaded=x).seconds(2, 0) for x in (True, False))
    idle_s = costs.constants.sd_idle_s if isinstance(costs, RooflineCosts) else costs.sd_idle_s
    assert loaded - bare == pytest.approx(idle_s)
    unknown = {"sd_base_s": None, "sd_idle_s": None}
    if isinstance(costs, RooflineCosts):
        lacking = costs.model_copy(update={"constants": costs.constants.model_copy(update=unknown)})
    else:
        lacking = costs.model_copy(update=unknown | {"prefill_per_token_s": None})
        with refused(ConfigError, naming=("prefill_per_token_s",)):
            lacking.prefill_s(10)
    lacking.iteration(NO_SPECULATION)
    with refused(ConfigError, naming=("sd_base_s",)):
        lacking.iteration(CHAIN)
    with refused(ConfigError, naming=("sd_idle_s",)):
        lacking.iteration(NO_SPECULATION, drafter_loaded=True)
    if costs.kind == "linear":
        with refused(ConfigError, naming=("per_token_s",)):
            costs.model_copy(update={"per_token_s": None}).iteration(CHAIN)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        *(({"kind": "linear", "base_s": wrong}, ("base_s",)) for wrong in (-1e-3, np.nan, np.inf, "fast")),
        ({"kind": "linear", "bas_s": 1e-3}, ("bas_s",)),
        ({**TABLE, "forward": [{"tokens": 8, "seconds": -1e-3}]}, ("0",)),
        ({**TABLE, "forward": []}, ("forward",)),
        ({**TABLE, "attention": [{"batch": 4, "fixed_s": np.nan}]}, ("0", "fixed_s")),
        ({**TABLE, "forward": [{"tokens": 8, "seconds": 1.0}] * 2}, ("ascending",)),
        ({**TABLE, "forward": [{"tokens": 8, "seconds": 1.0}, {"tokens": 16, "seconds": 0.9}]}, ("16", "0", "9", "1")),
        ({**TABLE, "attention": [{"batch": b, "per_context_s": 1e-7 / b**2} for b in (1, 2)]}, ("2",)),
        (ROOFLINE.model_dump() | {"constants": CONSTANTS.model_dump() | {"memory_efficiency": 1.2}},
         ("memory_efficiency",)),
        ("no-such-preset", ("cpu-small",)),
        ("vllm:H100", ("ENGINE:GPUS:MODEL",)),
        ("vllm:H100:Llama-3.1-8B:fp3", ("fp3", "bf16", "fp8")),
        ("vlm:H100:Llama-3.1-8B", ("ENGINE:GPUS:MODEL",)),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_named(value, named):
    with refused(ConfigError, naming=named):
        load_costs(value)


@pytest.mark.parametrize(
    "costs",
    [
        LINEAR,
        TABLED,
        TableCosts.model_validate(SHAPED),
        TableCosts.model_validate({**SHAPED, "attention": DIPPING}),
        ROOFLINE,
        RooflineCosts(gpu=OWN_GPU, model=model("Qwen2.5-7B"), tp=1, constants=CONSTANTS),
        load_costs("vllm:4xH100:MiniMax-M2.5:fp8"),
    ],
)
def test_a_file_gives_back_what_was_written(costs, tmp_path):
    assert load_costs(costs.write(tmp_path / "costs.json")) == costs


def test_a_changed_file_is_refused(tmp_path):
    path = LINEAR.write(tmp_path / "costs.json")
    data = path.read_bytes()
    for text, named in ((data.replace(b"0.004", b"0.005"), ("costs.json", "JSON", "sha256")), (b"{", ("JSON",))):
        path.write_bytes(text)
        with refused(ConfigError, naming=named):
            load_costs(path)


def test_presets_are_complete_and_name_their_source():
    assert "cpu-small" in presets()
    for name in presets():
        preset = load_costs(name)
        preset.iteration(CHAIN)
        preset.iteration(NO_SPECULATION, drafter_loaded=True)
        assert preset.notes


def test_a_model_free_drafter_has_no_network():
    for costs in (load_costs("h100-qwen2.5-32b-tp4-table"), ROOFLINE):
        free, learned = (costs.iteration(Strategy.chain(name, 4)) for name in ("ngram", "learned"))
        assert free.draft_s(8) == 0.0 < learned.draft_s(8)
        assert learned.seconds(8, 1e4) == pytest.approx(free.seconds(8, 1e4) + learned.draft_s(8))
    # A fit to a trace has the levels of the drafter that was recorded.
    assert TABLED.iteration(Strategy.chain("ngram", 4)).draft_s(8) == TABLED.iteration(CHAIN).draft_s(8)
