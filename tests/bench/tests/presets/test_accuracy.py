"""The table "predicted against measured": every reading is in it, and nothing is cut."""

from pathlib import Path

from bench.harness import shown
from bench.presets.accuracy import COLUMNS, TEXT, graph_pool_rows, rows, summary
from bench.presets.graph_readings import READINGS


def test_every_reading_of_the_graph_pool_is_shown_with_why():
    found = graph_pool_rows()
    assert len(found) == 3 * len(READINGS)
    for reading in READINGS:
        mine = found[found["what"].str.endswith(f": {reading.name}")]
        assert len(mine) == 3
        assert reading.why in mine["note"].iloc[0]


def test_every_row_is_shown_whole(shared_data: Path):
    found = rows(shared_data, left_out=False)
    assert list(found.columns) == COLUMNS
    assert (found["mean_abs_error"] <= found["max_abs_error"]).all()
    assert (found["note"].str.len() > 0).all()
    assert found[found["model"] == "table"]["what"].is_unique
    for name in ("roofline", "table"):
        assert set(found[found["model"] == name]["used_for_fit"]) == {True, False}
    words = shown({"rows": found.to_dict("records")}, TEXT)
    for row in found.itertuples():
        assert row.source in words
        assert row.what in words
    assert all(reading.why in words for reading in READINGS)
    screen = summary(found).splitlines()
    assert len(screen) < 40
    engines = found[found["pooled"].eq(True)]
    assert sum(any(line.startswith(f"{e} ") for e in engines["source"]) for line in screen) == len(engines)
    assert engines["n_points"].sum() == found[found["pooled"].eq(False)]["n_points"].sum()
