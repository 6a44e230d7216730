"""Cost of a run's driver, against scripted engines: bytes and rows that go with tokens, not objects or workers."""

import json
import pickle
import sys
from dataclasses import replace

import pytest

from bench.train.driver import PARTS, measured, text
from fakes.scripted import DriverCase, ScriptedWorker
from tests.sim.workloads import typed
from tltlab.runtime.engine.generation import GenerationRequest
from tltlab.runtime.rollout.worker import packed

SMALL = DriverCase(workers=2, responses=32, tokens=600, group_size=8, ranks=4, reward_processes=0, rl_steps=1)


@pytest.fixture(scope="module")
def cases():
    return [measured(replace(SMALL, workers=workers)) for workers in (2, 6)]


def test_traffic_grows_with_tokens_not_with_workers(cases):
    few, many = ({name: n / case["tokens"] for name, n in case["bytes"].items()} for case in cases)
    for name in ("worker.generate returns", "ray.put", "rewards"):
        assert few[name] == pytest.approx(many[name], rel=0.15), name
    # 8 bytes of tokens and log-probs; rows of 900 iterations and 32 responses come on top.
    assert 8 < few["worker.generate returns"] < 24
    assert sum(few.values()) < 45


def test_a_rank_is_sent_its_own_samples(cases):
    for case in cases:
        num = case["workers"] * SMALL.responses
        assert num / SMALL.ranks * 0.8 < case["rank_samples"] < num / SMALL.ranks * 1.2
        # All ranks together, whose number it would be times this otherwise; besides tokens 0.2 kB per sample and rank.
        assert case["bytes"]["ray.put"] < 9 * case["tokens"] + num * (4 * 256 + 200 * SMALL.ranks)


def test_the_driver_makes_no_object_per_token():
    requests = [
        GenerationRequest(key=(0, "p", n, 0), prompt_token_ids=[1, 2], max_response_tokens=2000) for n in range(32)
    ]
    rollout = packed(ScriptedWorker(0, SMALL, 1000).generate(requests, 0))
    body = pickle.dumps(rollout, protocol=5)
    before = sys.getallocatedblocks()
    received = pickle.loads(body)
    made = sys.getallocatedblocks() - before
    assert sum(len(r.token_ids) for r in received.responses) > 19_000
    assert len(received.iterations) == 900
    assert made < 1500
    assert received == rollout


def test_the_command_prints_seconds_and_bytes_by_part(capsys):
    code, out, _ = typed(capsys, "bench", "driver", "--fast", "--workers", 2, "--reward-processes", 0, "--json")
    assert code == 0
    found = json.loads(out)
    (case,) = found["cases"]
    assert case["workers"] == 2
    assert {"rollouts", "rewards", "trace rows", "figures"} <= set(case["seconds"])
    assert case["driver_s"] == pytest.approx(sum(case["seconds"].values()))
    assert "seconds of the driver" in text(found)


def test_the_hosts_time_is_told_by_part(capsys):
    code, out, _ = typed(capsys, "bench", "train", "--host", "--fast", "--json")
    assert code == 0
    rows = json.loads(out)["rows"]
    assert len(rows) == 2 * len(PARTS)
    assert all(row["ms"] == pytest.approx(512 * row["ms_each"]) and row["ms"] > 0 for row in rows)
