"""Spot training fitted to spot_training.parquet: rows of a run whose truth is known give it back, gaps are said."""

import json
from functools import cache

import numpy as np
import pandas as pd
import pytest

from tests.core.acceptance.counterfactuals import counterfactuals
from tests.refused import refused
from tltlab.acceptance.freshness import FreshAcceptance
from tltlab.acceptance.load import load_acceptance
from tltlab.calibration.idle_training import fit_spot
from tltlab.cli.calibrate import calibrate as command
from tltlab.coordination.progress import SpotTraining
from tltlab.errors import ConfigError
from tltlab.files import read_json
from tltlab.lengths.generate import log_normal
from tltlab.traces.trace import read

from ...spot_rows import frame, spot_rows

TRUTH = SpotTraining(
    samples_per_s=20, samples_per_update=4, sample_tokens=300, scaling_efficiency=0.6,
    start_s=1.5, join_s=0.4, checkpoint_every=25, checkpoint_s=0.05, yield_s=0.2,
)  # fmt: skip
"""An update of one worker takes 0.2 s."""


@cache
def run(truth=TRUTH, *, steps=8, workers=4, seed=0, **how):
    """A trace of RL steps in which workers finish between 10 and 30 s."""
    rng = np.random.default_rng(seed)
    source = log_normal(rl_steps=steps, prompts=2, group_size=2, workers=workers, seed=seed)
    rows = []
    for step in source.rl_steps:
        ends = sorted(rng.uniform(10, 30, workers))
        rows += spot_rows(truth, step, ends, ends[-1], rng, **how)
    return source.replace(spot_training=frame(rows))


@cache
def fitted():
    return fit_spot(run())


@pytest.mark.parametrize("seed", range(4))
def test_run_gives_back_what_it_was_made_with(seed):
    found = fit_spot(run(seed=seed, noise=0.2))
    model = found.model
    assert model.samples_per_s == pytest.approx(TRUTH.samples_per_s, rel=0.06)
    assert model.scaling_efficiency == pytest.approx(0.6, abs=0.1)
    for members in (1, 2, 3):
        assert model.update_s(members) == pytest.approx(TRUTH.update_s(members), rel=0.06)
    assert model.samples_per_update == 4
    assert model.update_tokens == pytest.approx(1200)
    assert (model.start_s, model.join_s) == (pytest.approx(1.5), pytest.approx(0.4))
    assert model.checkpoint_s == pytest.approx(0.05)
    assert 25 <= model.checkpoint_every <= 35
    assert 0.2 <= model.yield_s <= 0.2 + 0.05 + 0.3


NOTHING = ["setup_s", "train_s", "wait_s", "blocked_s", "updates", "tokens", "sequences", "checkpoints"]


def test_workers_that_never_trained_change_no_rate():
    table = run().spot_training
    opener = table.sort_values(["t_start", "worker"]).groupby("rl_step").head(1)
    killed = opener.assign(worker=99, ended="killed", accept=None, yield_s=None, loss=None)
    # It came first by a little, and its death ended the period.
    killed = killed.assign(t_start=killed["t_start"] - 0.01, duration=killed["duration"] + 0.01)
    declined = table.iloc[:3].assign(term=999, duration=0.0, ended="declined")
    for idle in (killed, declined):
        rows = pd.concat([idle.assign(**dict.fromkeys(NOTHING, 0)), table], ignore_index=True)
        assert fit_spot(run().replace(spot_training=rows)).model == fitted().model


def test_more_tokens_without_more_updates_are_no_efficiency():
    slow = TRUTH.model_copy(update={"scaling_efficiency": 0.0})
    assert fit_spot(run(slow)).model.scaling_efficiency == pytest.approx(0.0, abs=0.02)


def test_unidentified_constants_keep_their_default():
    default = SpotTraining()
    alone = fit_spot(run(workers=2))
    assert alone.model.scaling_efficiency == default.scaling_efficiency
    assert any("scaling_efficiency" in note for note in alone.notes)
    assert alone.model.join_s == default.join_s
    never = TRUTH.model_copy(update={"checkpoint_every": None})
    unsaved = fit_spot(run(never, workers=2, saves=False))
    assert (unsaved.model.checkpoint_s, unsaved.model.checkpoint_every) == (default.checkpoint_s, 100)
    assert {note.split()[0] for note in unsaved.notes} >= {"checkpoint_s", "checkpoint_every"}
    table = run().spot_training
    found = fit_spot(run().replace(spot_training=table.assign(yield_s=np.nan, tokens=0)))
    assert (found.model.yield_s, found.model.sample_tokens) == (default.yield_s, default.sample_tokens)


def test_waiting_for_data_is_reported():
    table = run().spot_training
    waited = table.assign(wait_s=5.0, duration=table["duration"] + 5.0)
    assert any("waiting for data" in note for note in fit_spot(run().replace(spot_training=waited)).notes)


def test_a_run_without_training_is_refused():
    idle = run().spot_training.assign(updates=0, train_s=0.0)
    without = log_normal(rl_steps=2, workers=2)
    for trace, fact in ((without, "spot_training.parquet"), (run().replace(spot_training=idle), "update")):
        with refused(ConfigError, naming=(fact,)):
            fit_spot(trace)


def test_the_command_writes_files_that_the_simulator_reads(tmp_path, capsys, as_json):
    from tltlab.sim.cli.simulate import simulate
    from tltlab.sim.config import load_spot_training
    from tltlab.sim.fits import CalibrateConfig, fit_all

    source = annotated(run(steps=4))
    source.write(tmp_path / "trace")
    spot, fresh = tmp_path / "spot.json", tmp_path / "fresh.json"
    fits = {"spot_out": spot, "acceptance": "fresh", "acceptance_out": fresh}
    command(tmp_path / "trace", **fits)
    told = json.loads(capsys.readouterr().out)
    assert told["spot"]["model"] == read_json(spot)
    assert {"rl_step", "updates", "predicted_updates", "error"} <= set(told["spot"]["residuals"][0])
    assert {"kind", "floor", "age_steps", "untrained", "updates_to_train"} == set(told["acceptance"])
    assert (told["costs"], told["out"]) == (None, None)
    assert load_spot_training(spot) == fit_spot(read(tmp_path / "trace")).model
    assert isinstance(load_acceptance(fresh), FreshAcceptance)
    text = fit_all(tmp_path / "trace", CalibrateConfig(**fits))[0].text()
    assert [fact for fact in ("samples_per_s", "age_steps") if fact not in text] == []
    files = {"acceptance": str(fresh), "spot": str(spot)}
    simulate(tmp_path / "trace", strategy="3,1,4", costs="cpu-small", **files)
    summary = json.loads(capsys.readouterr().out)
    assert summary["spot_training"]["updates"] > 0
    assert summary["mean_accept_length"] > 1.0


def annotated(trace):
    """With rows of acceptance.parquet for a drafter in service and one a training older, the older one worse."""
    rng, rows = np.random.default_rng(0), []
    for row in trace.outcomes.itertuples():
        for age in range(min(2, 1 + row.rl_step)):
            accepted = np.minimum(rng.geometric(0.35 + 0.1 * age, row.response_tokens) - 1, 4)
            rows.append((*row[1:5], "learned", age, 50 * (1 + row.rl_step - age), 4, accepted))
    return trace.replace(acceptance=counterfactuals(rows))
