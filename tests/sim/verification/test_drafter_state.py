"""`verify` on a run that trains its drafter: acceptance by the drafter's state."""

import numpy as np
import pandas as pd
import pytest

from bench.simulator import COSTS
from tltlab.acceptance.base import GeometricAcceptance
from tltlab.acceptance.freshness import FreshAcceptance, Freshness
from tltlab.coordination.progress import SpotTraining
from tltlab.lengths.generate import log_normal
from tltlab.policies.policy import load_policy
from tltlab.sim import simulate
from tltlab.sim.verification.rollouts import RecordedRun, verify
from tltlab.traces.trace import read

from ...spot_rows import frame, spot_rows
from .recorded import record

CHAIN = load_policy("learned:3")
QUICK = SpotTraining(
    samples_per_s=400, samples_per_update=4, sample_tokens=100, scaling_efficiency=0.5,
    start_s=0.05, join_s=0.02, checkpoint_every=10, checkpoint_s=0.005,
)  # fmt: skip
"""An update of one worker takes 10 ms; the rollouts below leave workers idle for a second or more."""
FADES = Freshness(untrained=0.5, updates_to_train=60.0, floor=0.3, age_steps=6.0)
WORKERS, STEPS, DEPTH = 4, 6, 3
TRAINED = tuple(step % 3 != 2 for step in range(STEPS))
"""The schedule leaves out every third RL step."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A RUN whose rollouts are simulations with the drafter's true state, each followed by planted training rows."""
    source = log_normal(prompts=8, group_size=4, rl_steps=STEPS, median=250, sigma=0.8, cap=1500, workers=WORKERS)
    truth = FreshAcceptance(base=GeometricAcceptance(alpha=0.8), freshness=FADES)
    rng = np.random.default_rng(0)
    simulations, steps, training, acceptance = [], [], [], []
    age, updates = 0, 0
    published = [(0, 0)]
    for step in source.rl_steps:
        level = FADES.level(age, updates)
        made = simulate(
            source.select([step]),
            CHAIN,
            costs=COSTS,
            acceptance=GeometricAcceptance(alpha=0.8 * level),
            mode="sampled",
            seed=step,
            record_iterations=True,
        ).trace
        simulations.append(made)
        steps.append(made.steps.assign(drafter_age=age, drafter_updates=updates))
        for response in made.outcomes.head(12).itertuples():
            for since, done in published[-3:]:
                chance = truth.base.alpha * FADES.level(step - since, done)
                kept = np.minimum(rng.geometric(1 - chance, int(response.response_tokens)) - 1, DEPTH)
                acceptance.append(
                    {
                        "rl_step": step, "prompt_id": response.prompt_id, "sample": response.sample, "turn": 0,
                        "drafter": "learned", "drafter_age": step - since, "drafter_updates": done, "max_depth": DEPTH,
                        "accept_if_drafted": kept.tolist(),
                    }
                )  # fmt: skip
        # When each worker had nothing left.
        rows = made.iterations
        ends = (rows["t_start"] + rows["duration"]).groupby(rows["worker"]).max().tolist()
        rows = spot_rows(QUICK, step, ends, max(ends), rng, noise=0.1) if TRAINED[step] else []
        training += rows
        gained = max((row["updates"] for row in rows), default=0)
        age, updates = (0 if gained else age + 1), updates + gained
        if gained:
            published.append((step + 1, updates))
    return record(
        tmp_path_factory.mktemp("run"), simulations, CHAIN, steps=pd.concat(steps, ignore_index=True),
        acceptance=pd.DataFrame(acceptance), spot_training=frame(training),
    )  # fmt: skip


@pytest.fixture(scope="module")
def found(run):
    return verify(run, samples=2)


def test_acceptance_follows_the_drafter_s_state(run, found, tmp_path):
    """The first steps' drafter is untrained: rates of its neighbours, taken as they are, would be too fast."""
    first = found.rows.set_index("rl_step").loc[0]
    read(run).replace(acceptance=None).write(tmp_path / "trace")
    (tmp_path / "policies.json").write_text((run / "policies.json").read_text())
    blind = verify(tmp_path, rl_steps=[0], samples=4).rows.iloc[0]
    assert abs(first["error"]) < 0.06
    assert blind["error"] < -0.08
    assert found.median_error < 0.05


def test_every_step_must_show_the_drafter_s_state(run):
    trace = read(run)
    steps = trace.steps
    steps["drafter_age"] = steps["drafter_age"].where(steps["rl_step"] != 3)
    partly = RecordedRun(trace=trace.replace(steps=steps))
    assert 3 not in partly.drafters
    base = GeometricAcceptance(alpha=0.5)
    assert partly.acceptance(base, 3, [0, 1], trace.rl_steps) is base  # type: ignore[arg-type]
