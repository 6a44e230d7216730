"""Step times of a real engine as a table: what is in it, what is left out, and that costs come of it."""

import json

import pytest

from tests.refused import refused
from tltlab.calibration.costs import fit_points
from tltlab.calibration.iterations import read_step_times
from tltlab.drafters.specs import LearnedSpec
from tltlab.errors import ConfigError
from tltlab.runtime.cli.profile import _learned, profile, vllm_setting, write_table
from tltlab.runtime.engine.profile import (
    Load,
    ProfileGrid,
    graphs_for,
    start_engine,
)
from tltlab.runtime.engine.profile import profile as measure
from tltlab.strategy import NO_SPECULATION, Strategy

from .dispatching import dispatched_kinds

GRID = ProfileGrid(batches=(1, 2, 4), depths=(0, 2, 5), contexts=(16, 96), iterations=8)


def test_no_response_ends_before_the_last_timed_iteration():
    cell = Load(batch=4, depth=5, context=96)
    whole, pieces = GRID.response_tokens(cell, 4096), GRID.response_tokens(cell, 96)
    assert whole >= (5 + 1) * (3 + GRID.per_visit)
    # In pieces beside 4 * 6 tokens of decoding 384 tokens take 6 iterations, in which the first request decodes.
    assert pieces - whole == (5 + 1) * (6 - 1)


def test_a_grid_of_nothing_is_refused():
    sizes = {"batches": (1,), "depths": (0,), "contexts": (8,)}
    wrong = {"batches": (0, 1), "depths": (1, 1), "contexts": (), "iterations": 1}
    facts = {"batches": ("[0", "1]", "1"), "depths": ("depths",), "contexts": ("contexts",), "iterations": ("[1]", "2")}
    for name, value in wrong.items():
        with refused(ConfigError, naming=facts[name]):
            ProfileGrid(**(sizes | {name: value}))


def test_gpu_cells_are_timed_in_full_graphs():
    """Else a table has the cost of piecewise graphs at all depths but the deepest, which no run with a plan pays."""
    forced = graphs_for(GRID, "ngram", None)
    assert set(dispatched_kinds(forced).values()) == {"full"}
    assert {depth for _, depth in forced.may_run} == set(GRID.depths)
    few = ProfileGrid(batches=(1,), depths=(0, 2, 5), contexts=(16,))
    learned = graphs_for(few, "learned", ("learned", LearnedSpec(method="eagle", model="head")))
    assert (learned.runner, learned.networks) == ("V2", ("learned",))


def test_options_are_vllms_own_and_drafter_has_method():
    assert vllm_setting("load_format=dummy") == ("load_format", "dummy")
    assert vllm_setting("max_num_seqs=8") == ("max_num_seqs", 8)
    name, spec = _learned("learned=eagle:heads/eagle")
    assert (name, spec.method, spec.model) == ("learned", "eagle", "heads/eagle")
    for read, text, facts in (
        (_learned, "learned", ("--drafter", "NAME=METHOD:PATH")),
        (_learned, "learned=medusa:x", ("--drafter", "learned=medusa:x", "eagle")),
        (vllm_setting, "load_format", ("--vllm", "load_format", "KEY=VALUE")),
    ):
        with refused(ConfigError, naming=facts):
            read(text)


def test_an_unknown_output_is_refused_early(tmp_path):
    with refused(ConfigError):
        profile("no-such-model", out=tmp_path / "table.txt")


@pytest.fixture(scope="module")
def engine(random_model):
    # 1 KiB of cache per token: four requests of the longest context and depth come to more than there is.
    args = {"max_num_seqs": 4, "kv_cache_memory_bytes": 768 << 10, "block_size": 32}
    engine = start_engine(str(random_model), GRID, None, args)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def measured(engine):
    return measure(engine, GRID)


@pytest.mark.engine
def test_rows_match_one_cell_exactly(measured):
    decoding = measured.table[measured.table["prefill_tokens"] == 0]
    assert len(decoding) == 3 * 3 * 2 - 1
    assert (decoding["tokens_to_verify"] == decoding["draft_depth"] + 1).all()
    assert (decoding["num_samples"] == GRID.iterations).all()
    assert decoding["seconds"].min() > 0 <= decoding["spread"].min()
    # A response grows while it is timed, by no more than its cap of 66 tokens at the deepest.
    each = decoding["context_tokens"] / decoding["batch"]
    assert (each.between(17, 16 + 66) | each.between(97, 96 + 66)).all()
    assert (each > 96).sum() == len(decoding) // 2
    # Prefills are single iterations of whole prompts.
    prefill = measured.table[measured.table["prefill_tokens"] > 0]
    assert set(zip(prefill["batch"], prefill["prefill_tokens"], strict=True)) == {(1, 16), (1, 96), (2, 32), (2, 192)}
    assert (prefill["context_tokens"] == prefill["prefill_tokens"]).all()
    assert (prefill["draft_depth"] == 0).all()


@pytest.mark.engine
def test_unfitting_cells_are_left_out_with_reasons(engine, measured):
    (full,) = measured.skipped
    assert (full["batch"], full["draft_depth"], full["context"]) == (4, 5, 96)
    assert all(fact in full["why"] for fact in ("768", "kv_cache_tokens is 736"))
    long = ProfileGrid(batches=(1, 8), depths=(0,), contexts=(16, 4000), iterations=4)
    found = measure(engine, long)
    assert set(found.table["batch"]) == {1}
    why = {(c["batch"], c["context"], c["prefill"]): c["why"] for c in found.skipped}
    assert "max_num_seqs is 4" in why[8, 16, False]
    assert "max_model_len is" in why[1, 4000, False]
    with refused(ConfigError):
        measure(engine, ProfileGrid(batches=(8,), depths=(0,), contexts=(16,), iterations=4))


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["table", "linear"])
def test_costs_come_of_the_table(measured, tmp_path, kind):
    write_table(measured.table, tmp_path / "new" / "table.csv")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["table.csv"]
    costs = fit_points(read_step_times(tmp_path / "new" / "table.csv"), kind).costs
    assert costs.iteration(NO_SPECULATION).seconds(2, 100.0) > 0
    assert costs.iteration(Strategy.chain("ngram", 2)).seconds(2, 100.0) > 0
    assert costs.prefill_s(96.0) >= 0


@pytest.mark.engine
def test_command_writes_table_and_what_it_is_of(engine, random_model, tmp_path, monkeypatch, capsys, as_json):
    # The engine of the other tests, which they still need.
    monkeypatch.setattr("tltlab.runtime.engine.profile.start_engine", lambda *args: engine)
    monkeypatch.setattr(engine, "close", lambda: None)
    out = tmp_path / "table.parquet"
    profile(str(random_model), out, batches="1,2", depths="0,2", contexts="16,48", iterations=4)
    told = json.loads(capsys.readouterr().out)
    about = json.loads((tmp_path / "table.parquet.json").read_text())
    assert told == {"out": str(out), "about": str(out) + ".json", **about}
    assert about["num_cells"] == 8
    assert about["engine"]["max_num_seqs"] == 4
    assert {"model", "hardware", "versions", "skipped", "repeat_error"} <= about.keys()
    assert len(read_step_times(out)) == about["num_cells"] + about["num_prefill_rows"]
