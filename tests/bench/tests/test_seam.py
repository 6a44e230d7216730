"""`tltlab bench seam`: its rows come from a real scheduler, and what is bounded in them is counted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from bench import seam
from tests.refused import refused
from tltlab.drafters.base import Key
from tltlab.drafters.ngram import NgramDrafter
from tltlab.errors import ConfigError
from tltlab.policies.simple import Fixed
from tltlab.runtime.engine.tracker import Scheduled
from tltlab.runtime.engine.vllm import starting
from tltlab.strategy import Strategy


def row(policy: str, batch: int, us: float, *, drafting: bool = False, beyond_us: float = 0.0) -> dict:
    return {
        "policy": policy, "batch": batch, "drafting": drafting, "us_per_iteration": us, "p99_us": 2 * us,
        "beyond_us": beyond_us,
    }  # fmt: skip


def test_goals_cover_idle_policies_and_drafting_overhead():
    rows = [
        row("none", 256, 61.0),
        row("record", 256, 59.0),
        row("none", 8, 500.0),
        row("beg-mab-suffix", 512, 299.0),
        row("beg-mab-suffix", 128, 900.0, drafting=True, beyond_us=300.0),
        row("beg-mab-suffix", 128, 900.0, drafting=True, beyond_us=800.0),
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
    assert "MISSED  none, off, batch 256: 61.0 us, at most 60" in text


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
def test_overhead_is_compared_with_the_index_by_strategy():
    from bench.vllm.played import _beyond_us

    def rows(strategy: str, plain_us: list[float], index_us: list[float]) -> list[dict]:
        taken = [{"us": {"drafts": us, "vllm": 99.0}, "index_us": {}} for us in plain_us]
        taken += [{"us": {"drafts": 1.0}, "index_us": {"lookup": us, "insert": 1.0}} for us in index_us]
        return [row | {"strategy": strategy} for row in taken]

    deep, shallow = rows("deep", [50, 40, 900, 45, 60], [29, 9, 700]), rows("shallow", [20], [4, 4])
    assert _beyond_us(deep)["beyond_us"] == 50 - 30
    assert _beyond_us([*deep, *shallow])["beyond_us"] == pytest.approx((5 * 20 + 15) / 6)
    assert _beyond_us([*deep, *rows("never timed alone", [1000], [])])["beyond_us"] == 20
    assert _beyond_us(rows("none", [7], []))["beyond_us"] == 0


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

        def check(what: Scheduled) -> int:
            live = [control.live[name] for name in what.request_ids]
            contexts.append((what.context_tokens, sum(len(one.prompt) + len(one.output) for one in live)))
            return int(scheduled(what))

        monkeypatch.setattr(control, "scheduled", check)
        for _ in range(60):
            played.iterate()
    assert [told for told, _ in contexts] == [true for _, true in contexts]
    assert len({true for _, true in contexts}) > 10
    assert int(next(reversed(control.live))) > 2 * 8, "requests came and went"


@pytest.mark.engine
def test_while_off_drafters_and_vllm_receive_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from vllm.v1.core.sched.scheduler import Scheduler

    given = []
    told: list[tuple[str, int]] = []
    give, extend = Scheduler.update_draft_token_ids, NgramDrafter.extend

    def noting(self: Scheduler, drafts: object) -> None:
        given.append(drafts)
        give(self, drafts)

    def listening(self: NgramDrafter, key: Key, tokens: Sequence[int]) -> None:
        told.append((key[1], len(tokens)))
        extend(self, key, tokens)

    monkeypatch.setattr(Scheduler, "update_draft_token_ids", noting)
    monkeypatch.setattr(NgramDrafter, "extend", listening)
    policy = seam._policy("fixed", drafting=False)
    assert policy is not None
    with starting():
        played = seam._played(seam._world(tmp_path, 4), "fixed", policy, 4)
        for _ in range(50):
            played.iterate()
        assert given == []
        assert told == [("p0", 64)] * 4, "prompts alone"
        told.clear()
        played.control.set_selector(Fixed(Strategy.chain("ngram", 4)))
        for _ in range(2):
            played.iterate()
    assert len(told) == 4, "each request once, with all that it has generated"
    assert min(length for _, length in told) > 50
    assert len(given) == 1
