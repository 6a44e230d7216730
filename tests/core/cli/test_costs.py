"""`tltlab costs`: the presets, and a cost model's predictions of iterations."""

import json

import pytest

from tltlab.cli.costs import costs
from tltlab.console import JSON, running
from tltlab.costs.load import load_costs, presets
from tltlab.strategy import NO_SPECULATION, Strategy

LINEAR = {
    "kind": "linear", "base_s": 4e-3, "per_request_s": 1e-3, "per_token_s": 0.0, "per_context_s": 0.0,
    "sd_base_s": 5e-3, "sd_idle_s": 0.0, "draft_level_s": 0.0, "draft_level_per_request_s": 0.0,
}  # fmt: skip


@pytest.fixture
def asked(capsys):
    def ask(*args, as_json=True, **options):
        token = running.set((JSON,) * as_json)
        costs(*args, **{"batch": "1,8", "context": 4096, "strategy": None, "drafter": "learned", "accept_length": None,
                        **options})  # fmt: skip
        running.reset(token)
        out = capsys.readouterr().out
        return json.loads(out) if as_json else out

    return ask


def test_without_a_name_all_presets_are_listed(asked):
    listed = {row["name"]: row for row in asked(None)["presets"]}
    assert sorted(listed) == presets()
    assert listed["h100-qwen2.5-32b-tp4"]["gpu"] == "H100"
    assert listed["h100-qwen2.5-32b-tp4-table"]["model"] == "Qwen2.5-32B"


def test_rates_are_tokens_over_the_iterations_time(tmp_path, asked):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(LINEAR))
    rows = asked(str(path), batch="6", strategy="4,1,5", accept_length=3.0)["rows"]
    assert [row["strategy"] for row in rows] == ["none", "learned:4"]
    assert [row["iteration_ms"] for row in rows] == pytest.approx([10.0, 15.0])
    assert [row["tokens_per_s_per_request"] for row in rows] == pytest.approx([100.0, 200.0])
    assert [row["tokens_per_s"] for row in rows] == pytest.approx([600.0, 1200.0])


def test_preset_is_asked_at_its_batches_and_context(asked):
    found = asked("h100-qwen2.5-32b-tp4", batch="2,32", context=1000, strategy="8,8,48", accept_length=7.2)
    model = load_costs("h100-qwen2.5-32b-tp4")
    asked_for = (NO_SPECULATION, Strategy("learned", 8, 8, 48))
    took = [model.iteration(s).seconds(b, b * 1000) for b in (2, 32) for s in asked_for]
    assert [row["iteration_ms"] for row in found["rows"]] == pytest.approx([1e3 * s for s in took])
    assert found["kv_capacity_tokens"] == model.kv_capacity_tokens
    assert found["notes"] == list(model.notes)


def test_what_lies_beyond_the_measurements_is_reported(asked):
    near, far = asked("h100-qwen2.5-32b-tp4", batch="8,1000")["rows"]
    assert near["outside"] == []
    assert near["fits_kv_cache"]
    assert set(far["outside"]) == {"batch", "context_tokens"}
    assert not far["fits_kv_cache"]
    text = asked("h100-qwen2.5-32b-tp4", batch="8,1000", as_json=False)
    assert "KV cache 873,168 tokens" in text
    assert text.splitlines()[-1].endswith("batch, context tokens, does not fit the KV cache")
