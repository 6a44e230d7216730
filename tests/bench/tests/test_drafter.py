"""The benchmark of the adaptive drafter: figures from made-up traces, parts that need no engine, its command."""

import math

import numpy as np
import pytest

from bench import adaptive as runs
from bench import app as bench
from bench.adaptive import PARTS, BenchSizes, live_drafts
from bench.harness import changed
from bench.idle import by_position
from tests.refused import refused
from tests.sim.workloads import typed
from tltlab.errors import ConfigError
from tltlab.runtime.drafter.offline.data import load_target
from tltlab.runtime.drafter.offline.runs import (
    AcceptedDrafts,
    annotated_drafts,
    last_third,
)
from tltlab.runtime.models.runs import prompts_of, recipe_of, sample_texts
from tltlab.runtime.recipe.sections import DataConfig
from tltlab.stats import mean_of_few

from .made_traces import trace_of


def iteration(rl_step, accepted, *, drafted=None, worker=0, **more):
    depth = more.get("draft_depth", 4)
    return {
        "rl_step": rl_step, "worker": worker, "drafter": "learned", "draft_depth": depth, "batch": len(accepted),
        "num_drafted": depth * len(accepted) if drafted is None else drafted, "num_accepted": sum(accepted),
        "accepted_per_request": accepted, "top_k": 1, "tokens_to_verify": depth + 1, "num_generated": 9,
        "duration": 0.1, **more,
    }  # fmt: skip


def test_live_drafts_are_learned_and_of_full_depth():
    rows = [
        iteration(0, [4, 0, 1]),
        iteration(0, [2, 2], drafted=5),
        iteration(0, [4, 4], drafter="suffix"),
        iteration(0, [], drafted=0, drafter=None, draft_depth=0),
        iteration(1, [3]),
    ]
    found = live_drafts(trace_of(iterations=[{"iteration": n, **row} for n, row in enumerate(rows)]), "learned")
    assert found == [
        AcceptedDrafts(rl_step=0, drafts=3, kept=(2, 1, 1, 1)),
        AcceptedDrafts(rl_step=1, drafts=1, kept=(1, 1, 1, 0)),
    ]
    assert found[0].accept_length == pytest.approx(1 + 5 / 3)


def test_a_position_counts_if_earlier_ones_were_accepted():
    steps = [AcceptedDrafts(rl_step=0, drafts=4, kept=(3, 1, 0)), AcceptedDrafts(rl_step=1, drafts=2, kept=(1, 1, 0))]
    assert by_position(steps) == [pytest.approx(4 / 6), pytest.approx(2 / 4), 0.0]
    assert by_position([AcceptedDrafts(rl_step=0, drafts=2, kept=(0, 0))]) == [0.0, None]


def annotation(rl_step, updates, kept, **more):
    return {
        "rl_step": rl_step, "prompt_id": "p", "sample": 0, "turn": 0, "drafter": "learned", "drafter_age": 9 - updates,
        "drafter_updates": updates, "max_depth": 2, "accept_if_drafted": kept, **more,
    }  # fmt: skip


def test_first_and_newest_drafter_are_compared_where_verified():
    rows = [
        annotation(0, 0, [2, 1, 2, 0, 0, 0]),
        annotation(0, 3, [0, 2, 0, 0, 2, 0]),
        annotation(0, 5, [0, 2, 2, 2, 2, 0]),
        annotation(1, 0, [1] * 6),
        annotation(1, 3, [1] * 6),
    ]
    # The first token comes with the prompt: the initial drafter is verified at 1, 3, 4, 5; the newest at 1, 4.
    # The prompt of RL step 1 is the first one's again.
    trace = trace_of(acceptance=rows)
    assert annotated_drafts(trace) == [
        (AcceptedDrafts(rl_step=0, drafts=4, kept=(1, 0)), AcceptedDrafts(rl_step=0, drafts=2, kept=(2, 2)))
    ]
    assert annotated_drafts(trace, ["p"]) == []


def test_ratios_use_rl_steps_of_both_runs():
    adaptive = [AcceptedDrafts(rl_step=n, drafts=10, kept=(10 + n, 5)) for n in range(4)]
    frozen = [AcceptedDrafts(rl_step=n, drafts=20, kept=(10, 10)) for n in range(2, 9)]
    found = runs.length_ratio(adaptive, frozen, np.random.default_rng(0))
    assert found is not None
    assert found.estimate == pytest.approx((2.7 + 2.8) / (2 + 2))
    assert runs.length_ratio(adaptive[:1], frozen, np.random.default_rng(0)) is None
    assert last_third(range(12)) == [8, 9, 10, 11]
    assert last_third([7]) == [7]


def test_a_slow_first_case_does_not_widen_intervals():
    noise = [0.01, -0.01, 0.02, -0.02]
    found = runs.mean_over_orders(([0.03 + 0.2 + n for n in noise], [0.03 - 0.2 + n for n in noise]))
    assert found.estimate == pytest.approx(0.03)
    # The least-squares fit of the mean and the order's effect, by hand: 8 values, 6 degrees of freedom.
    error = math.sqrt(2 * sum(n**2 for n in noise) / 6 / 8)
    assert found.high - found.estimate == pytest.approx(2.4469 * error, rel=1e-4)
    assert math.isnan(runs.mean_over_orders(([0.1], [])).high)
    assert runs.mean_over_orders(([], [1.0, 2.0, 3.0])).low == pytest.approx(mean_of_few([1.0, 2.0, 3.0]).low)


def test_texts_are_the_same_for_the_same_seed(random_model):
    prompts = prompts_of(random_model, "heldout", 4)
    assert len(prompts) == 4
    target, _ = load_target(random_model)
    first, again, other = (sample_texts(target, prompts, max_tokens=12, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert all(1 < len(text.token_ids) <= 12 for text in first)


def test_the_command_knows_every_part(capsys):
    assert set(bench.DRAFTER_PARTS) == set(PARTS)
    code, _, said = typed(capsys, "bench", "drafter", "--parts", "adaptive,speed")
    assert (code, "speed" in said) == (2, True)


def test_given_sizes_change_the_recipes(random_model, tmp_path):
    sizes = changed(BenchSizes(), steps=3, workers=5)
    assert (sizes.steps, sizes.workers, sizes.model) == (3, 5, "small")
    with refused(ConfigError, naming=("report.json",)):
        recipe_of(random_model, sizes, seed=0, drafter=None)
    model = tmp_path / "model"
    model.mkdir()
    (model / "report.json").write_text('{"reward": "tltlab.runtime.models.tasks:gcd_reward"}')
    plain = recipe_of(model, sizes, seed=4, drafter=None)
    assert (plain.rollout.policy, plain.seed) == ("none", 4)
    assert plain.data == DataConfig(train=str(model / "train.jsonl"), heldout=str(model / "heldout.jsonl"))
