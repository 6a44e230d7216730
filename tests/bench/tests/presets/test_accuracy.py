"""The table "predicted against measured": nothing is cut."""

from bench.presets import server


def test_prefixes_in_cache_bring_crowded_server_nearer(shared_data):
    again, kept, *_ = server.rows(shared_data).itertuples()
    tokens = [int(row.note.split()[-3]) for row in (again, kept)]
    assert 257_239 < tokens[1] < tokens[0] - 50_000
    assert kept.max_abs_error < again.max_abs_error - 0.03
    assert kept.max_abs_error < 0.12


def test_gpu_time_is_predicted_without_the_host_s(shared_data):
    *_, whole, on_gpu = server.rows(shared_data).itertuples()
    assert whole.mean_abs_error > 0.06
    assert on_gpu.mean_abs_error < 0.06
