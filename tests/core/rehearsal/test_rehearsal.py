"""Rehearsals on real engines of a two-layer shape."""

import json
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import torch

import tltlab
from bench import gpu
from bench.harness import quiet
from tests.core.rehearsal.test_plan import TINY_TRACE, planned
from tests.refused import refused
from tltlab.cli.app import main
from tltlab.errors import ConfigError, RunError
from tltlab.files import read_json
from tltlab.rehearsal.result import judged
from tltlab.rehearsal.run import rehearse
from tltlab.runtime.rollout.played import STOCK, played, read_plan

pytestmark = pytest.mark.timeout(1800)
ROUNDS, DEPTH, BATCHES = 3, 4, [1, 2]
POLICIES = gpu.QUICK.split(",")
QUICK = ["gpu", "quick", "tiny-shape", "--minutes", "60", "--batches", "1,2", "--rounds", str(ROUNDS)]
ARGUMENTS = [
    "rehearse", str(gpu.TRACE), "--model", "tiny-shape", "--policies", gpu.QUICK, "--responses", "8", "--cap", "128",
    "--rounds", str(ROUNDS), "--json",
]  # fmt: skip


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of a `bench gpu quick` killed behind our engine's first rollout, and how many it had played."""
    file = tmp_path_factory.mktemp("rehearsal") / "quick.json"
    out = file.with_suffix("") / "tiny-shape"
    process = subprocess.Popen([sys.executable, "-m", "tltlab", "bench", *QUICK, "--out", str(file)])
    end = time.monotonic() + 900
    while not any(row["engine"] == "ours" and row["row"] == "rollout" for row in played(out)):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)
    family = [process, *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        member.kill()
    process.wait()
    with (out / "engine-ours-0.jsonl").open("a") as torn:
        torn.write('{"row": "rollout", "wor')
    return out, sum(row["row"] == "rollout" for row in played(out))


@pytest.fixture(scope="module")
def out(killed):
    """The same, gone on with to its end."""
    file = killed[0].parent.with_suffix(".json")
    gpu.bench_quick(["tiny-shape"], batches=BATCHES, rounds=ROUNDS, minutes=60, out=file, progress=quiet)
    return killed[0]


@pytest.mark.engine
def test_what_was_played_stands_when_killed(killed, out):
    rollouts = [row for row in played(out) if row["row"] == "rollout"]
    assert killed[1] >= ROUNDS + 1
    assert sorted(row["rl_step"] for row in rollouts) == list(range(len(POLICIES) * ROUNDS))
    starts = [row["engine"] for row in played(out) if row["row"] == "started"]
    assert starts == ["ours", "ours", STOCK]


@pytest.mark.engine
def test_quick_has_plain_steps_of_both_engines(out):
    quick = read_json(out.parent.with_suffix(".json"))
    steps = {(row["engine"], row["batch"]) for row in quick["rows"] if row["row"] == "plain step"}
    assert steps == {(engine, batch) for engine in (STOCK, "ours") for batch in BATCHES}
    assert {row["policy"] for row in quick["rows"] if row["row"] == "rollout"} == set(POLICIES)
    (sentence,) = quick["sentences"]
    assert sentence.startswith("tiny-shape: ")
    assert sentence in gpu.show(quick)


@pytest.mark.engine
def test_lengths_are_forced_and_drafts_accepted_at_rates(out):
    trace = tltlab.read(out)
    lengths = sorted(read_plan(out).lengths[0])
    for _, step in trace.outcomes.groupby("rl_step"):
        assert sorted(step["response_tokens"]) == lengths
    iterations, steps = trace.iterations, trace.steps
    assert iterations is not None
    assert steps is not None
    deep = iterations[iterations["rl_step"].isin(steps.loc[steps["policy"] == "ngram:4", "rl_step"])]
    # The last drafts of a response are cut by its cap.
    kept = np.array(
        [k for row in deep[deep["num_drafted"] == DEPTH * deep["batch"]]["accepted_per_request"] for k in row]
    )
    assert kept.mean() == pytest.approx(sum(0.7**i for i in range(1, DEPTH + 1)), abs=4 * 1.6 / len(kept) ** 0.5)
    with pytest.raises(SystemExit) as ended:
        main(["trace", "validate", str(out / "trace")])
    assert not ended.value.code


@pytest.mark.engine
def test_measured_stands_beside_predicted(out, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*ARGUMENTS, "--out", str(out)])
    assert not ended.value.code
    shown = json.loads(capsys.readouterr().out)
    assert shown == read_json(out / "summary.json") | {"out": str(out)}
    rows = {row["policy"]: row for row in shown["policies"]}
    assert list(rows) == POLICIES
    for name, row in rows.items():
        took = [each["seconds"] for each in played(out) if each.get("policy") == name]
        assert row["measured_s"] == pytest.approx(np.mean(took))
        assert row["shipped_s"] is None
        assert (row["predicted_s"] is None) == bool(row["why_not"])
    drafts = rows["ngram:4"]
    assert drafts["error"] == pytest.approx(drafts["predicted_s"] / drafts["measured_s"] - 1)
    assert shown["over"] == STOCK
    assert shown["speedup"]["estimate"] == pytest.approx(rows[STOCK]["measured_s"] / rows[shown["best"]]["measured_s"])
    assert (out / "picture.png").stat().st_size > 10_000


@pytest.mark.engine
def test_another_rehearsal_does_not_mix_with_it(out):
    with refused(ConfigError, naming=(out, "--out")):
        rehearse(planned(tltlab.read(TINY_TRACE)), out)


def test_what_does_not_fit_is_reported(tmp_path):
    plan, said = planned(tltlab.read(TINY_TRACE)), []
    rehearse(plan, tmp_path / "out", minutes=0.01, report=said.append)
    assert len(said) == 1
    assert all(name in said[0] for name in plan.policies)
    with refused(RunError, naming=(tmp_path / "out",)):
        judged(plan, tmp_path / "out")


def test_synthetic_rejection_keeps_what_the_rates_say():
    from tltlab.runtime.engine.vllm.sampling import _rejection_sample

    counts, most = [3, 0, 2] * 4000, 3
    drafts = torch.arange(sum(counts), dtype=torch.int32) + 10
    drafts[4::5] = -1  # padding, which is never kept
    bonus, stock = torch.full((len(counts), 1), 7), torch.full((len(counts), most + 1), 5, dtype=torch.int32)
    stock[:, 1:] = -1
    torch.manual_seed(0)
    arguments = (drafts, counts, most, torch.tensor(counts).cumsum(0), None, torch.empty(0), bonus, None)
    same = _rejection_sample(lambda *_: stock, *arguments)
    assert same is stock
    tokens = _rejection_sample(
        lambda *_: stock, *arguments, synthetic_mode=True, synthetic_conditional_rates=torch.tensor([0.8, 0.5, 0.0])
    )
    long, none, padded = tokens[0::3], tokens[1::3], tokens[2::3]
    first = drafts.reshape(-1, 5)
    kept = (long >= 10).sum(1).numpy()
    assert np.bincount(kept, minlength=4) / len(kept) == pytest.approx([0.2, 0.4, 0.4, 0.0], abs=0.03)
    assert (long[kept > 0, 0] == first[kept > 0, 0]).all()
    assert (long[np.arange(len(kept)), kept] == 5).all()
    assert (none[:, 0] == 7).all()
    assert (none[:, 1:] == -1).all()
    assert (padded[:, 1] <= 7).all()
    assert ((padded >= 10).sum(1) <= 1).all()
