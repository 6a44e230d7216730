"""Off-policy evaluation: what another policy would have earned, checked where the truth is known."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import pytest

from tltlab.errors import ConfigError
from tltlab.planning.decisions import Logged, logged_decisions
from tltlab.planning.off_policy import estimate, evaluate, folds_of
from tltlab.planning.targets import chances
from tltlab.policies.policy import SHIPPED, Activation, Policy
from tltlab.policies.specs import BegMabSpec, Bucket, CustomSpec, FixedSpec, TableRow, TableSpec
from tltlab.state import StepOutcome, StepState
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.traces.trace import read

SHORT, LONG = Strategy.chain("ngram", 2), Strategy.chain("ngram", 8)
ARMS = (NO_SPECULATION, SHORT, LONG)


@cache
def expected_reward(strategy, batch):
    """Deep drafts pay at small batches, shallow ones at large ones."""
    return {NO_SPECULATION: 1.0, SHORT: 1.6, LONG: 3.0 - 0.5 * math.log2(batch)}[strategy]


@cache
def tiny():
    return read("traces/tiny")


def bandit_log(seed, num_steps=20, per_step=40, chance=lambda batch: (0.5, 0.3, 0.2)):
    """A contextual bandit's log: batches at random, three arms with known chances, noisy rewards."""
    rng = np.random.default_rng(seed)
    log = []
    for step in range(num_steps):
        for _ in range(per_step):
            batch = int(rng.integers(1, 17))
            chosen = chance(batch)
            strategy = ARMS[int(np.searchsorted(np.cumsum(chosen), rng.random()))]
            log.append(
                Logged(
                    state=StepState(rl_step=step, batch=batch, context_tokens=100.0 * batch),
                    strategy=strategy,
                    propensity=chosen[ARMS.index(strategy)],
                    outcome=StepOutcome(elapsed_s=1.0, batch=batch),
                    reward=expected_reward(strategy, batch) + rng.normal(0, 0.3),
                )
            )
    return log


def deep_when_small(decision):
    return {LONG: 0.9, SHORT: 0.1} if decision.state.batch <= 4 else {SHORT: 0.8, NO_SPECULATION: 0.2}


def judged(log, target=deep_when_small):
    pi = [target(decision) for decision in log]
    truth = np.mean(
        [sum(p * expected_reward(s, d.state.batch) for s, p in of.items()) for d, of in zip(log, pi, strict=True)]
    )
    return estimate(log, pi, folds_of(log), num_resamples=400, rng=np.random.default_rng(0)), float(truth)


def test_all_estimates_are_unbiased_and_the_doubly_robust_one_is_closest():
    errors = {"ips": [], "snips": [], "dr": []}
    held = dict.fromkeys(errors, 0)
    for seed in range(40):
        found, truth = judged(bandit_log(seed))
        assert found.warnings == ()
        for name in errors:
            errors[name].append(found.estimates[name].value - truth)
            held[name] += found.estimates[name].low <= truth <= found.estimates[name].high
    assert abs(found.logged.value - truth) > 0.2, "weighing is what makes it right"
    for own in errors.values():
        # The mean error lies within four standard errors of none.
        assert abs(np.mean(own)) < 4 * np.std(own) / math.sqrt(len(own))
    spread = {name: float(np.std(own)) for name, own in errors.items()}
    assert spread["dr"] < spread["snips"] < spread["ips"]
    assert spread["dr"] < 0.6 * spread["ips"]
    assert min(held.values()) >= 34


def test_evaluating_the_logging_policy_gives_its_own_mean():
    log = bandit_log(2)
    found, _ = judged(log, lambda d: dict(zip(ARMS, (0.5, 0.3, 0.2), strict=True)))
    assert found.estimates["ips"].value == found.estimates["snips"].value == pytest.approx(found.logged.value)
    assert found.effective == pytest.approx(found.num_decisions)
    assert found.mean_weight == pytest.approx(1.0)


def test_a_strategy_that_was_never_tried_warns():
    found, _ = judged(bandit_log(3), lambda d: {LONG: 1.0} if d.state.batch <= 8 else {SHORT: 1.0})
    assert found.warnings == ()
    unknown = Strategy.chain("suffix", 8)
    log = bandit_log(3)
    pi = [{unknown: 1.0} for _ in log]
    found = estimate(log, pi, folds_of(log), rng=np.random.default_rng(0))
    assert math.isnan(found.estimates["snips"].value)
    assert found.uncovered_share == 1.0
    assert any("never tried" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    ("log", "target", "warning"),
    [
        (bandit_log(4, chance=lambda batch: (0.98, 0.01, 0.01)), lambda d: {LONG: 1.0}, "of the policy's own"),
        (
            [replace(d, propensity=min(1.0 - 1e-3, 2 * d.propensity)) for d in bandit_log(5)],
            deep_when_small, "where 1 is due",
        ),
        (bandit_log(8, num_steps=4), deep_when_small, "interval is a hint"),
    ],
    ids=["hardly tried", "wrong propensities", "few clusters"],
)  # fmt: skip
def test_what_makes_estimates_unsure_is_warned_of(log, target, warning):
    found, _ = judged(log, target)
    assert any(warning in given for given in found.warnings)


def test_decisions_without_a_choice_are_left_out():
    log = bandit_log(6)
    forced = [replace(d, strategy=NO_SPECULATION, propensity=1.0, reward=99.0) for d in bandit_log(7)]
    found, _ = judged(log + forced)
    assert (found.num_decisions, found.num_without_choice) == (len(log), len(forced))
    with pytest.raises(ConfigError, match="nothing at random"):
        judged(forced)


def test_a_log_whose_rl_steps_repeat_their_choices_warns():
    """Chances are right, yet ten RL steps explored with one seed are one experiment."""
    once = bandit_log(8, num_steps=1)
    repeated = [replace(d, state=replace(d.state, rl_step=step)) for step in range(10) for d in once]
    found, _ = judged(repeated)
    assert any("one seed" in warning for warning in found.warnings)
    old, fresh = (read(f"traces/{name}").select(range(6)) for name in ("subset-sum-small", "gcd-small"))
    for trace, warns in ((old, True), (fresh, False), (tiny(), False)):
        found = evaluate(trace, SHIPPED["table"], num_resamples=100)
        assert any("one seed" in warning for warning in found.warnings) == warns


def test_a_table_is_followed_by_batch_and_activation_by_its_hold():
    log = bandit_log(9)
    rows = (TableRow(min_batch=1, strategy=LONG), TableRow(min_batch=5, strategy=SHORT))
    table = Policy(selector=TableSpec(rows=rows))
    folds = folds_of(log)
    assert chances(table, log, folds) == [{LONG if d.state.batch < 5 else SHORT: 1.0} for d in log]
    active = table.model_copy(update={"activation": Activation(max_requests=4, hold_iterations=0)})
    assert chances(active, log, folds) == [{LONG if d.state.batch < 5 else NO_SPECULATION: 1.0} for d in log]
    held = table.model_copy(update={"activation": Activation(max_requests=4, hold_iterations=1000)})
    engine = held.build(np.random.default_rng(0))
    asked = [engine.choose(d.state) for d in log]
    assert set(asked) == set(ARMS)
    assert [list(of) for of in chances(held, log, folds)] == [[s] for s in asked]


def test_a_bandit_is_judged_as_it_learned_from_the_other_rl_steps():
    # A plain iteration takes 1 s; SHORT is fast at large batches, LONG at small ones.
    log = [
        replace(
            d,
            outcome=StepOutcome(
                elapsed_s=1.0 / (1.0 if d.strategy == NO_SPECULATION else expected_reward(d.strategy, d.state.batch)),
                batch=d.state.batch,
            ),
        )
        for d in bandit_log(10)
    ]
    buckets = (Bucket(min_batch=1, strategies=ARMS), Bucket(min_batch=8, strategies=ARMS))
    bandit = Policy(selector=BegMabSpec(buckets=buckets, reward="paper", epsilon=0.3))
    found = chances(bandit, log, folds_of(log))
    assert all(sum(of.values()) == pytest.approx(1.0) for of in found)
    assert all(min(of.values()) == pytest.approx(0.1) for of in found)
    best = {d.state.batch >= 8: max(of, key=of.get) for d, of in zip(log, found, strict=True)}
    assert best == {False: LONG, True: SHORT}


def test_what_a_log_cannot_judge_is_refused():
    trace = tiny()
    with pytest.raises(ConfigError, match="budget"):
        evaluate(trace, SHIPPED["das"])
    with pytest.raises(ConfigError, match="memoryless"):
        evaluate(trace, Policy(selector=CustomSpec(path=f"{__name__}:Alternating")))
    with pytest.raises(ConfigError, match="no decisions"):
        evaluate(trace.replace(decisions=None), SHIPPED["table"])


class Alternating(type(FixedSpec(strategy=SHORT).build(np.random.default_rng(0)))):
    """A selector with a history of its own."""

    memoryless = False

    def __init__(self):
        super().__init__(SHORT)


def test_a_recorded_decision_has_the_time_of_its_own_drafts():
    trace = tiny()
    log, _ = logged_decisions(trace, "paper")
    iterations = trace.iterations.set_index(["rl_step", "worker", "iteration"])
    for row, decision in zip(trace.decisions.to_dict("records")[:50], log, strict=False):
        place = (row["rl_step"], row["worker"])
        own, before = iterations.loc[(*place, row["iteration"])], iterations.loc[(*place, row["iteration"] - 1)]
        assert decision.outcome.elapsed_s == pytest.approx(
            own["duration"] - own["draft_duration"] + before["draft_duration"]
        )
        assert decision.state.batch == before["batch"]
        assert decision.reward == pytest.approx(own["num_generated"] / decision.outcome.elapsed_s)


def test_a_policy_held_against_its_own_recorded_log_has_no_warning():
    """Recorded chances are rounded to single precision, so weights are 1 up to that."""
    found = evaluate(tiny(), SHIPPED["explore"], num_resamples=100)
    assert found.mean_weight != 1.0
    assert found.mean_weight == pytest.approx(1.0)
    assert found.warnings == ()


def test_a_rollout_begins_without_a_strategy_in_force():
    log, _ = logged_decisions(tiny())
    before = {}
    for decision in log:
        place = (decision.state.rl_step, decision.state.worker)
        assert decision.state.strategy == before.get(place, NO_SPECULATION)
        before[place] = decision.strategy
    assert len(before) == 8


def test_plain_decoding_is_once_as_fast_as_itself():
    found = evaluate(tiny(), SHIPPED["none"], num_resamples=200)
    assert found.estimates["snips"].value == pytest.approx(1.0, abs=0.1)
    assert found.estimates["snips"].low < 1.0 < found.estimates["snips"].high


def test_one_decision_for_several_iterations_is_their_mean():
    trace = tiny()
    decisions = trace.decisions
    thinned = trace.replace(decisions=decisions[decisions["iteration"] % 2 == 1].reset_index(drop=True))
    log, _ = logged_decisions(thinned, "paper")
    table = trace.iterations[lambda t: (t["rl_step"] == 0) & (t["worker"] == 0)].reset_index(drop=True)
    seconds = table["duration"] - table["draft_duration"] + table["draft_duration"].shift(fill_value=0.0)
    assert log[0].outcome.elapsed_s == pytest.approx(seconds[1:3].mean())
    assert sum(log[0].outcome.accepted) == pytest.approx(table["num_accepted"][1:3].mean())
    assert isinstance(decisions, pd.DataFrame)
