"""The roofline's fit to measurements of several kinds, made from known constants, and what it refuses."""

import numpy as np
import pandas as pd
import pytest

from bench.presets.fit import fit, predict
from bench.presets.measurements import COLUMNS, from_speedups, from_tpot, from_waves
from tests.core.costs.models import CONSTANTS as TRUE
from tests.core.costs.models import ROOFLINE as COSTS
from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.strategy import NO_SPECULATION, Strategy

TREE = Strategy("learned", 8, 4, 48)


def iterations(rng, tps=(2, 4), num=300):
    """Measured iterations, made from COSTS, with 3 % noise and one row in 50 three times as long."""
    tables = []
    for tp in tps:
        costs = COSTS.model_copy(update={"tp": tp})
        depth = rng.integers(0, 9, num)
        batch, prefill = rng.integers(1, 129, num), rng.integers(0, 2, num) * rng.integers(0, 4096, num)
        context = batch * rng.integers(100, 16000, num)
        took = []
        for b, s, d, p in zip(batch.tolist(), context.tolist(), depth.tolist(), prefill.tolist(), strict=True):
            cost = costs.iteration(Strategy.chain("learned", d))
            took.append(cost.seconds(b, s) + (cost.added_s(b, p, costs.prefill_s(p)) if p else 0.0))
        slow = np.where(rng.random(num) < 0.02, 3.0, 1.0)
        columns = {"batch": batch, "draft_depth": depth, "context_tokens": context / batch}
        columns |= {"prefill_tokens": prefill, "measured": took * slow * np.exp(rng.normal(0, 0.03, num))}
        table = pd.DataFrame(columns).assign(
            kind="iteration", source=f"tp {tp}", gpu="H100", model="Qwen2.5-32B", tp=tp, top_k=1, draft_levels=depth,
            tokens_to_verify=1 + depth,
        )  # fmt: skip
        tables.append(table.reindex(columns=COLUMNS).assign(clean=took, tp_fold=tp))
    return pd.concat(tables, ignore_index=True)


def test_fit_finds_times_behind_noise_and_outliers():
    rows = iterations(np.random.default_rng(0))
    found = fit(rows, ["tp_fold"])
    error = found.predictions["predicted"] / found.predictions["clean"] - 1
    assert np.abs(error).mean() < 0.01
    assert abs(found.constants.kv_efficiency - TRUE.kv_efficiency) < 0.05
    assert found.calibrated.batch == (rows["batch"].min(), rows["batch"].max())
    assert found.calibrated.outside(batch=500, verified_tokens=500, context_tokens=1e6) == ["batch"]
    assert list(found.cross_validation["left_out"]) == [2, 4]
    again = fit(rows, ["tp_fold"])
    assert again.constants == found.constants
    assert again.notes == found.notes


def test_a_fit_of_plain_decoding_leaves_speculation_unknown():
    rows = iterations(np.random.default_rng(1), num=60)
    found = fit(rows[rows["draft_depth"] == 0])
    assert found.constants.sd_base_s is None
    with refused(ConfigError, naming=("sd_base_s",)):
        COSTS.model_copy(update={"constants": found.constants}).iteration(TREE)


def test_constant_that_data_do_not_show_is_named():
    one_gpu = fit(iterations(np.random.default_rng(2), tps=(1,), num=60))
    held = next(note for note in one_gpu.notes if note.startswith("not identified"))
    assert "allreduce_s" in held
    assert "link_efficiency" in held
    assert "kv_efficiency" not in held


def test_speedups_without_context_get_a_fitted_one():
    depth, verify, batch = (a.ravel() for a in np.meshgrid([4, 8, 16], [16, 64, 128], [1, 4, 32]))
    tree = [
        COSTS.iteration(Strategy("learned", int(d), 8, int(v))).seconds(int(b), 6000.0 * b)
        for d, v, b in zip(depth, verify, batch, strict=True)
    ]
    plain = np.array([COSTS.iteration(NO_SPECULATION).seconds(int(b), 6000.0 * b) for b in batch])
    cells = {"gpu": "H100", "model": "Qwen2.5-32B", "tp": 4, "batch_size": batch, "draft_depth": depth, "topk": 8}
    cells |= {"tokens_to_verify": verify, "accept_length": 5.0, "speedup": 5.0 * plain / np.array(tree)}
    rows = from_speedups(pd.DataFrame(cells), "table")
    assert predict(TRUE, rows, 6000.0) == pytest.approx(rows["measured"])
    found = fit(pd.concat([rows, iterations(np.random.default_rng(3), num=60)], ignore_index=True))
    assert found.context_tokens == pytest.approx(6000, rel=0.3)
    assert found.predictions.query("source == 'table'")["error"].abs().mean() < 0.01
    with refused(ConfigError, naming=("context_tokens",)):
        predict(TRUE, rows)


def served_one_by_one(batch, isl, osl):
    """Time per output token of a closed loop, request by request: each finished one is replaced, its prefill first."""
    plain, rest = COSTS.iteration(NO_SPECULATION), np.linspace(1, osl, batch).astype(int)
    done = osl - rest
    now, started, spans = 0.0, np.full(batch, np.nan), []
    for _ in range(20 * osl):
        now += plain.seconds(batch, float((isl + done).sum()))
        done += 1
        for i in np.flatnonzero(done >= osl):
            spans.append((now - started[i]) / osl)
            done[i], started[i] = 0, now
            now += COSTS.prefill_s(isl)
            started[i] = now
    return float(np.nanmean(spans[2 * batch :]))


@pytest.mark.parametrize(("batch", "isl", "osl"), [(8, 1024, 128), (32, 1024, 512), (16, 4096, 256)])
def test_loaded_server_time_agrees_with_single_requests(batch, isl, osl):
    table = pd.DataFrame({"gpu": ["H100"], "model": "Qwen2.5-32B", "tp": 4, "concurrency": batch, "isl": isl})
    rows = from_tpot(table.assign(osl=osl, tpot_s=1.0), "server")
    assert predict(TRUE, rows)[0] == pytest.approx(served_one_by_one(batch, isl, osl), rel=0.03)


def test_simultaneous_requests_wait_for_later_prefills():
    table = pd.DataFrame({"gpu": ["H100"], "model": "Qwen2.5-32B", "tp": 4, "concurrency": 16, "isl": 1000, "osl": 100})
    prefills = 16 * COSTS.prefill_s(1000)
    rows = from_waves(table.assign(tpot_s=1.0, ttft_s=prefills / 2), "server")
    step = COSTS.iteration(NO_SPECULATION).seconds(16, 16 * 1050.0)
    assert predict(TRUE, rows)[0] == pytest.approx(step + prefills / 2 / 100)


def test_measurements_that_make_no_sense_are_refused():
    table = pd.DataFrame({"gpu": ["H100"], "model": "Qwen2.5-32B", "tp": 4, "concurrency": 8, "isl": 100, "osl": 100})
    with refused(ConfigError, naming=("tpot_s",)):
        from_tpot(table, "server")
    with refused(ConfigError, naming=("0",)):
        from_tpot(table.assign(tpot_s=0.0), "server")
    rows = from_tpot(table.assign(tpot_s=0.01), "server")
    for wrong in (rows.iloc[:0], rows.assign(fold="all")):
        with refused(ConfigError):
            fit(wrong, ["fold"])
    with refused(ConfigError, naming=("GPU",)):
        fit(rows.assign(gpu="H900"))
