"""The runtime benchmark: what is measured of a rollout, how modes are compared and judged, and a small run of it."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from bench.runtime import run
from bench.runtime.figures import ModeRollout, PlainSteps, summarise
from bench.runtime.run import bench_runtime, measured, modes, text
from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.runtime.engine.generation import GenerationResponse, Rollout


def row(mode, kind, seconds, tail_seconds, *, epoch=1, round=1):
    return ModeRollout(
        mode=mode, kind=kind, epoch=epoch, round=round, num_responses=16, seconds=seconds, num_tokens=1000,
        plain_s=1.0, tail_seconds=tail_seconds, tail_tokens=60, tail_plain_s=0.5, num_pairs=10,
        num_accepted=25, recorder_s=0.01 * seconds, policy_s=0.0, drafting_s=0.0,
    )  # fmt: skip


def rollout(lengths, finishes, iterations):
    responses = [
        GenerationResponse(
            key=(0, "p", n, 0), token_ids=[5] * length, logprobs=[], finish_reason="stop", t_first_token=0, t_finish=end
        )
        for n, (length, end) in enumerate(zip(lengths, finishes, strict=True))
    ]
    return Rollout(
        responses=responses,
        iterations=pa.Table.from_pylist(iterations),
        decisions=pa.table({}),
        duration_s=max(finishes) + 0.5,
        recorder_s=0.1,
        policy_s=0.2,
    )


def iteration(t_start, generated, drafted, accepted):
    return {
        "t_start": t_start, "num_generated": generated, "num_drafted": drafted, "num_accepted": sum(accepted),
        "accepted_per_request": accepted,
    }  # fmt: skip


PLAIN = PlainSteps(
    [{"iteration": 0, "batch": 16, "duration": 0.3, "prefill_tokens": 99}]
    + [{"iteration": 1, "batch": batch, "duration": 0.01 + 0.01 * batch, "prefill_tokens": 0} for batch in range(1, 17)]
)


def test_plain_decoding_takes_a_step_per_token():
    assert PLAIN.seconds([2, 2, 5]) == pytest.approx(0.3 + 2 * 0.04 + 3 * 0.02)
    assert PLAIN.seconds([2, 2, 5], beyond=2) == pytest.approx(3 * 0.02)
    assert PLAIN.seconds([2, 2, 5], beyond=5) == 0.0


def test_tail_begins_when_fewer_than_eighth_run():
    rows = [iteration(0.0, 16, 0, []), iteration(1.0, 30, 64, [1] * 14 + [0, 0]), iteration(4.0, 5, 8, [4])]
    # 16 responses: the tail begins at the 15th finish, when one is left.
    ran = rollout([2] * 14 + [10, 40], [2.0] * 14 + [4.0, 6.0], rows)
    found = measured(ran, PLAIN, mode=modes()[1], epoch=2, round_=3)
    assert (found.mode, found.kind, found.epoch, found.round) == ("off", "off", 2, 3)
    assert (found.seconds, found.num_tokens) == (6.5, 78)
    assert found.plain_s == pytest.approx(0.3 + 2 * 0.17 + 8 * 0.03 + 30 * 0.02)
    assert (found.tail_seconds, found.tail_tokens) == (2.5, 5)
    assert found.tail_plain_s == pytest.approx(30 * 0.02)
    assert (found.num_pairs, found.num_accepted) == (17, 18)


def judged(adaptive_s, adaptive_tail_s, static_s):
    rows = []
    for epoch in (1, 2):
        for n in (1, 2, 3):
            busy = 1 + 0.1 * n
            rows += [
                row("off", "off", 2.0 * busy, 1.0 * busy, epoch=epoch, round=n),
                row("suffix 4", "static", static_s * busy**2, 0.5, epoch=epoch, round=n),
                row("suffix 8", "static", 3.0, 2.0, epoch=epoch, round=n),
                row("bandit", "adaptive", adaptive_s * busy, adaptive_tail_s * busy, epoch=epoch, round=n),
            ]
    return {(goal["goal"], goal["epoch"]): goal["met"] for goal in summarise(rows)["goals"]}


def test_goals_need_the_ratio_and_certainty():
    best = "times the best static, suffix 4"
    good = judged(adaptive_s=1.0, adaptive_tail_s=0.5, static_s=1.2)
    assert all(good.values())
    assert set(good) == {
        ("times plain decoding in the tail", 2), ("times plain decoding", 2), ("never slower", 1),
        ("never slower", 2), (best, 1), (best, 2),
    }  # fmt: skip
    slow_tail = judged(adaptive_s=1.0, adaptive_tail_s=0.6, static_s=1.2)
    assert [goal for goal, met in slow_tail.items() if not met] == [("times plain decoding in the tail", 2)]
    assert not judged(adaptive_s=2.1, adaptive_tail_s=0.5, static_s=2.2)["never slower", 1]
    # The static one is faster in two rounds of three, by less than the rounds differ; then surely.
    assert judged(adaptive_s=1.2, adaptive_tail_s=0.5, static_s=1.0)[best, 1]
    assert not judged(adaptive_s=1.4, adaptive_tail_s=0.5, static_s=1.0)[best, 1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"rounds": 0}, ("1",)), ({"prompts": 33}, ("32",)), ({"draft": Path("nowhere")}, ("config",))],
)
def test_wrong_settings_are_named_before_an_engine_starts(random_model, wrong, message):
    with refused(ConfigError, naming=message):
        bench_runtime(random_model, progress=lambda said: None, **wrong)


@pytest.mark.engine
def test_every_mode_runs_in_every_epoch_and_round(random_model, monkeypatch):
    monkeypatch.setattr(run, "BLOCK_S", 0.02)
    monkeypatch.setattr(run, "OFF_TOKENS", 16)
    found = bench_runtime(
        random_model, prompts=3, group_size=4, rounds=1, epochs=2, max_response_tokens=48, off_batches=(1, 4),
        progress=lambda said: None,
    )  # fmt: skip
    names = [mode.name for mode in modes()]
    assert [(m["mode"], m["epoch"]) for m in found["modes"]] == [(name, epoch) for epoch in (1, 2) for name in names]
    assert len(found["rows"]) == 2 * 2 * len(names)
    for m in found["modes"]:
        assert 0 < m["tail_seconds"] < m["seconds"]
        assert (m["recorder_share"] > 0) == (m["mode"] != "stock")
        assert (m["drafting_share"] > 0) >= (m["mode"] == "suffix 8")
    assert all(row["num_pairs"] == 0 for row in found["rows"] if row["kind"] in ("stock", "off"))
    assert [(row["batch"], row["drafters"]) for row in found["off"]] == [(1, "model-free"), (4, "model-free")]
    assert all(row["num_pairs"] > 0 for row in found["rows"] if row["mode"] == "suffix 8")
    assert text(found).count("epoch") > 4
    json.dumps(found, allow_nan=False)
