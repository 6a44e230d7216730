"""`tltlab bench commands`: which figures there are, not how large they are."""

import json
import math

import pytest

from bench import commands
from tests.refused import refused
from tests.sim.workloads import typed
from tltlab.errors import ConfigError

pytestmark = pytest.mark.usefixtures("as_json")
FIGURES = ("wall_s", "cpu_s", "peak_bytes")


def test_commands_are_measured_against_floor_and_base(capsys):
    asked = ("--rounds", 1, "--only", "timeline", "--sizes", "tiny,1,3", "--json")
    code, out, _ = typed(capsys, "bench", "commands", *asked)
    assert code == 0
    found = json.loads(out)
    rows = {(row["command"], row["input"]): row for row in found["rows"]}
    bases = {("trace describe", size) for size in ("tiny", "1", "3")}
    assert set(rows) == {("--help", None), ("timeline", "tiny"), *bases}
    for case, row in rows.items():
        assert all(row[figure] > 0 for figure in FIGURES)
        assert (row["over_base"] is None) == (case[0] == "--help")
        assert row["more_than_s"] is None
        assert row["peak_bytes"] >= rows["--help", None]["peak_bytes"] > 1 << 20
    drawn, base = rows["timeline", "tiny"], rows["trace describe", "tiny"]
    assert drawn["over_base"]["ratio"] == pytest.approx(drawn["wall_s"] / base["wall_s"])
    (grown,) = found["growth"]
    few, many = (rows["trace describe", size]["wall_s"] for size in ("1", "3"))
    assert (grown["command"], grown["from"], grown["to"]) == ("trace describe", 1, 3)
    assert grown["wall"] == pytest.approx(math.log(many / few) / math.log(3))
    assert [(left["command"], left["input"]) for left in found["left_out"]] == [("timeline", "1"), ("timeline", "3")]
    assert "time ~ n^" in commands.text(found)


@pytest.mark.parametrize(
    ("sizes", "only", "naming"),
    [(["tiny"], ["simluate"], ("--only", "simluate", "simulate")), (["tyni"], [], ("--sizes", "tyni", "tiny"))],
)
def test_an_unknown_command_or_size_is_refused(sizes, only, naming):
    with refused(ConfigError, naming=naming):
        commands.bench_commands(sizes, only)
