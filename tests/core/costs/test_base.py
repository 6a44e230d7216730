"""The linear cost model: its formula, its file, and what it refuses."""

from pathlib import Path

import pytest

from tests.refused import refused
from tltlab.costs.base import LinearCosts, padded
from tltlab.costs.load import load_costs, presets
from tltlab.errors import ConfigError
from tltlab.strategy import NO_SPECULATION, Strategy

COSTS = LinearCosts(
    base_s=4e-3, per_request_s=1e-4, per_token_s=2e-5, per_context_s=1e-8, sd_base_s=1e-3, sd_idle_s=5e-4,
    draft_level_s=3e-4, draft_level_per_request_s=1e-5, prefill_per_token_s=1e-5,
)  # fmt: skip
CHAIN = Strategy.chain("learned", 4)


def test_plain_iteration():
    took = COSTS.iteration(NO_SPECULATION).seconds(batch=8, context_tokens=1000)
    assert took == pytest.approx(4e-3 + 8 * 1e-4 + 8 * 2e-5 + 1000 * 1e-8)


def test_speculative_iteration_verifies_and_drafts():
    cost = COSTS.iteration(CHAIN)
    verify = 4e-3 + 8 * 1e-4 + 8 * 5 * 2e-5 + 1000 * 1e-8 + 1e-3
    draft = 4 * (3e-4 + 8 * 1e-5)
    assert cost.draft_s(8) == pytest.approx(draft)
    assert cost.seconds(8, 1000) == pytest.approx(verify + draft)


def test_a_drafter_that_returns_less_is_verified_faster():
    cost = COSTS.iteration(CHAIN, tokens_to_verify=2.5)
    assert COSTS.iteration(CHAIN).seconds(8, 0) - cost.seconds(8, 0) == pytest.approx(8 * 2.5 * 2e-5)


def test_a_loaded_drafter_costs_in_plain_decoding_too():
    loaded, bare = (COSTS.iteration(NO_SPECULATION, drafter_loaded=x).seconds(1, 0) for x in (True, False))
    assert loaded - bare == pytest.approx(5e-4)


def test_graphs_pad_tokens_up_to_the_next_size_and_not_beyond_the_largest():
    assert [padded(tokens, (1, 8, 16)) for tokens in (1, 5, 8, 8 + 1e-12, 15, 17)] == [1, 8, 8, 8, 16, 17]


def test_a_term_that_is_needed_and_missing_is_named():
    costs = COSTS.model_copy(update={"per_token_s": None, "sd_idle_s": None})
    costs.iteration(NO_SPECULATION)
    with refused(ConfigError, naming=("per_token_s",)):
        costs.iteration(CHAIN)
    with refused(ConfigError, naming=("sd_idle_s",)):
        costs.iteration(NO_SPECULATION, drafter_loaded=True)


@pytest.mark.parametrize(
    ("term", "value"),
    [*(("base_s", wrong) for wrong in (-1e-3, float("nan"), float("inf"), "fast")), ("bas_s", 1e-3)],
)
def test_a_term_is_a_time_of_a_known_name(term: str, value: object):
    with pytest.raises(ConfigError, match=term):
        load_costs({"kind": "linear", term: value})


def test_a_file_reads_back_and_with_any_bit_changed_it_is_refused_or_the_same(tmp_path: Path):
    path = COSTS.write(tmp_path / "costs.json")
    assert load_costs(path) == COSTS
    data = path.read_bytes()
    num_refused = 0
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
        try:
            assert load_costs(path) == COSTS
        except ConfigError:
            num_refused += 1
    assert num_refused > len(data) // 2
    path.write_bytes(data.replace(b"0.004", b"0.005"))
    with refused(ConfigError, naming=("costs.json", "JSON", "sha256")):
        load_costs(path)


def test_presets_are_complete_and_say_where_they_come_from():
    assert "cpu-small" in presets()
    for name in presets():
        preset = load_costs(name)
        preset.iteration(CHAIN)
        preset.iteration(NO_SPECULATION, drafter_loaded=True)
        assert preset.notes


def test_a_missing_file_names_the_presets(tmp_path: Path):
    with refused(ConfigError, naming=("cpu-small",)):
        load_costs("no-such-preset")
    (tmp_path / "broken.json").write_text("{")
    with refused(ConfigError, naming=("JSON",)):
        load_costs(tmp_path / "broken.json")
