"""`tltlab bench seam`: its rows come from a real scheduler, and what is bounded in them is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import seam
from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.runtime.engine.tracker import Iteration
from tltlab.runtime.engine.vllm import starting


def test_case_that_there_is_not_is_one_sentence():
    with refused(ConfigError, naming=("nothing",)):
        seam.bench_seam(["nothing"])


@pytest.mark.engine
def test_every_kind_of_case_runs_with_vllm():
    cases = ["none", "record", "capture", "fixed", "beg-mab-suffix", "beg-mab-learned", "das"]  # deeper after shallow
    found = seam.bench_seam(cases, [8], iterations=20)
    rows = {(row["policy"], row["batch"], row["drafting"]): row for row in found["rows"]}
    assert {policy for policy, _, _ in rows} == set(cases)
    assert {(policy, drafting) for policy, _, drafting in rows} >= {
        ("none", False), ("beg-mab-suffix", True), ("fixed", True), ("das", True), ("beg-mab-learned", True),
    }  # fmt: skip
    for (policy, _, drafting), row in rows.items():
        assert (row["drafted"] > 0) == drafting
        if policy != "beg-mab-learned":
            assert (row["lookup_us"] > 0) == drafting
            assert (row["beyond_us"] != 0) == drafting
        assert row["vllm_us"] > 0
        assert row["us_per_iteration"] >= row["parts"]["schedule"] > 0
        assert (row["parts"]["capture"] > 0) == (policy == "capture")
    assert rows["fixed", 8, True]["accepted"] > 0


@pytest.mark.engine
def test_the_context_is_that_of_the_current_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(seam, "RESPONSE_TOKENS", 40)
    monkeypatch.setattr(seam, "PROMPT_TOKENS", 8)
    policy = seam._policy("fixed", drafting=True)
    assert policy is not None
    with starting():
        played = seam._played(seam._world(tmp_path, 8), "fixed", policy, 8)
        control, contexts = played.control, []
        scheduled = control.scheduled

        def check(what: Iteration) -> int:
            live = [control.live[name] for name in what.request_ids]
            contexts.append((what.context_tokens, sum(len(one.prompt) + len(one.output) for one in live)))
            return int(scheduled(what))

        monkeypatch.setattr(control, "scheduled", check)
        for _ in range(60):
            played.iterate()
    assert [told for told, _ in contexts] == [true for _, true in contexts]
    assert len({true for _, true in contexts}) > 10
    assert int(next(reversed(control.live))) > 2 * 8, "requests came and went"
