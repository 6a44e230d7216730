"""The benchmark of decisions: which figures there are, not how large they are."""

import json

from typer.testing import CliRunner

from bench import policies
from bench.app import app
from bench.policies import BATCHES
from tltlab.policies.policy import SHIPPED


def test_shipped_policies_are_timed_at_all_batches(monkeypatch):
    monkeypatch.setattr(policies, "_WARM_UP", 5)
    found = CliRunner().invoke(app, ["policy", "--calls", "100", "--rounds", "1", "--json"])
    assert found.exit_code == 0
    rows = {(row["policy"], row["batch"]): row for row in json.loads(found.stdout)["rows"]}
    assert set(rows) == {(name, batch) for name in SHIPPED for batch in BATCHES}
    for (name, _), row in rows.items():
        assert 0 < row["decide_us"]["median"] <= row["decide_us"]["p99"]
        assert (row["allot_us"] is not None) == (name == "das")
        assert row["within_20_us"] == (row["mean_us"] <= 20)
