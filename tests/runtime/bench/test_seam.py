"""`tltlab bench seam`: its rows come from a real scheduler, and what is bounded in them is counted."""

from __future__ import annotations

import pytest

from tltlab.bench import seam
from tltlab.errors import ConfigError


def row(policy: str, batch: int, us: float, *, drafting: bool = False, lookup_us: float = 0.0) -> dict:
    return {
        "policy": policy, "batch": batch, "drafting": drafting, "us_per_iteration": us, "p99_us": 2 * us,
        "lookup_us": lookup_us, "insert_us": 0.0,
    }  # fmt: skip


def test_goals_are_of_none_of_policies_that_are_off_and_of_what_drafting_takes_beyond_its_index():
    rows = [
        row("none", 256, 61.0),
        row("record", 256, 59.0),
        row("none", 8, 500.0),
        row("beg-mab-suffix", 512, 299.0),
        row("beg-mab-suffix", 128, 900.0, drafting=True, lookup_us=600.0),
        row("beg-mab-suffix", 128, 900.0, drafting=True, lookup_us=100.0),
    ]
    found = seam.goals(rows)
    assert [(goal["policy"], goal["batch"], goal["met"]) for goal in found] == [
        ("none", 256, False),
        ("record", 256, True),
        ("beg-mab-suffix", 512, True),
        ("beg-mab-suffix", 128, True),
        ("beg-mab-suffix", 128, False),
    ]
    text = seam.text({"rows": rows, "goals": found})
    assert "61 (122)" in text
    assert "MISSED none, off, batch 256: 61.0 us, at most 60" in text


def test_a_case_that_there_is_not_is_one_sentence():
    with pytest.raises(ConfigError, match="no case 'nothing' of bench seam; there are: none, fixed"):
        seam.bench_seam(["nothing"])


@pytest.mark.engine
def test_every_kind_of_case_runs_beside_vllms_scheduler_and_drafts_when_it_is_to():
    cases = ["none", "record", "capture", "beg-mab-suffix", "fixed", "beg-mab-learned", "das"]
    found = seam.bench_seam(cases, [2, 8], iterations=30)
    rows = {(row["policy"], row["batch"], row["drafting"]): row for row in found["rows"]}
    assert {policy for policy, _, _ in rows} == set(cases)
    assert {(policy, drafting) for policy, _, drafting in rows} >= {
        ("none", False), ("beg-mab-suffix", True), ("fixed", True), ("das", True), ("beg-mab-learned", True),
    }  # fmt: skip
    for (policy, _, drafting), row in rows.items():
        assert (row["drafted"] > 0) == drafting
        if policy != "beg-mab-learned":
            assert (row["lookup_us"] > 0) == drafting
        assert row["vllm_us"] > 0
        assert row["us_per_iteration"] > row["parts"]["schedule"] > 0
        assert (row["parts"]["capture"] > 0) == (policy == "capture")
    assert rows["fixed", 8, True]["accepted"] > 0
