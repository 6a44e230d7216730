"""`tltlab bench async`: all its engines give the same tokens, and a device waits for drafts of the host alone."""

import pytest

from bench.overlap import OURS, STOCK, bench_overlap


@pytest.mark.engine
def test_a_device_waits_for_late_drafts_alone():
    found = bench_overlap([4], rounds=2, tokens=24)
    assert found["equal"]
    assert not found["goals"]
    for row in found["rows"]:
        if "synchronous" in row["engine"]:
            assert row["waits_us"] == row["host_us"] > 0
        else:
            assert 0 <= row["waits_us"] < row["host_us"]
            assert (row["waits_us"] > 0) == (row["policy"] != "none")
    assert {row["engine"] for row in found["rows"]} > {STOCK, OURS}
