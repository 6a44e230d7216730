"""Reading measurements: what a file must hold, and whose requests fit in memory."""

import pandas as pd
import pytest

from bench.presets.measurements import fits_kv_cache, measured_table
from tests.refused import refused
from tltlab.errors import ConfigError


def test_a_table_is_read_from_csv_and_parquet(tmp_path):
    table = pd.DataFrame({"gpu": ["H100"], "ms": [1.5]})
    table.to_csv(tmp_path / "a.csv", index=False)
    table.to_parquet(tmp_path / "a.parquet")
    for name in ("a.csv", "a.parquet"):
        assert measured_table(tmp_path / name, ("ms",), ("gpu",)).equals(table)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", b"ms,gpu\n", ("a.csv",)),
        ("a.csv", b"a,b\n1,2\n", ("a.csv",)),
        ("a.csv", b"ms,gpu\nfast,H100\n", ("fast", "a.csv")),
        ("none.csv", None, ("no none.csv",)),
        ("a.csv", b"\xff\xfe\x00\x01", ("a.csv",)),
        ("a.csv", b'ms,gpu\n1,"H100\n', ("a.csv",)),
        ("a.parquet", b"junk", ("a.parquet",)),
    ],
)
def test_a_file_that_is_no_table_is_named(tmp_path, name, content, says):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with refused(ConfigError, naming=says):
        measured_table(tmp_path / name, ("ms",), ("gpu",))


def test_requests_fit_up_to_capacity_of_kv_cache():
    # 873,168 tokens on four H100.
    asked = pd.DataFrame({"concurrency": [213, 214], "isl": 4000, "osl": 96})
    assert fits_kv_cache(asked.assign(gpu="H100", model="Qwen2.5-32B", tp=4)).tolist() == [True, False]
