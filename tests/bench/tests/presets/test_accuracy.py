"""The table "predicted against measured": nothing is cut."""

from pathlib import Path

from bench.harness import shown
from bench.presets import server
from bench.presets.accuracy import COLUMNS, TEXT, rows, summary


def test_every_row_is_shown_whole(shared_data: Path):
    found = rows(shared_data, left_out=False)
    assert list(found.columns) == COLUMNS
    assert (found["mean_abs_error"] <= found["max_abs_error"]).all()
    assert (found["note"].str.len() > 0).all()
    assert set(found[found["model"] == "roofline"]["used_for_fit"]) == {True, False}
    words = shown({"rows": found.to_dict("records")}, TEXT)
    for row in found.itertuples():
        assert row.source in words
        assert row.what in words
    engines = found[found["pooled"].eq(True)]
    assert set(engines.index) < set(summary(found).index)
    assert len(summary(found)) < 40
    assert engines["n_points"].sum() == found[found["pooled"].eq(False)]["n_points"].sum()


def test_prefixes_in_cache_bring_crowded_server_nearer(shared_data: Path):
    again, kept, *_ = server.rows(shared_data).itertuples()
    tokens = [int(row.note.split()[-3]) for row in (again, kept)]
    assert 257_239 < tokens[1] < tokens[0] - 50_000
    assert kept.max_abs_error < again.max_abs_error - 0.03
    assert kept.max_abs_error < 0.12


def test_gpu_time_is_predicted_without_the_host_s(shared_data: Path):
    *_, whole, on_gpu = server.rows(shared_data).itertuples()
    assert whole.mean_abs_error > 0.06
    assert on_gpu.mean_abs_error < 0.05
