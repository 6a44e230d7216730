"""Runs that learn nothing, in logs of strangers and in traces: the doctor says so first."""

import numpy as np
import pytest

from tests.refused import refused
from tests.traces_of_lengths import of_samples
from tltlab.doctor.evidence import NotChecked, RunEvidence
from tltlab.doctor.signatures import CHECKS, examine

TRL = {"completions/mean_length": 200.0, "completions/max_length": 256.0, "step_time": 9.0}
FINE = {
    "reward": lambda at: 0.3 + at / 100, "grad_norm": lambda at: 0.2, "frac_reward_zero_std": lambda at: 0.4,
    "entropy": lambda at: 0.4, "kl": lambda at: 0.01 * at, "completions/clipped_ratio": lambda at: 0.1,
    "sampling/sampling_logp_difference/mean": lambda at: 0.01,
}  # fmt: skip


def looked_at(tmp_path, **changes):
    """What the check finds in a log of TRL with these figures by RL step; None leaves one out."""
    figures = {name: of for name, of in (FINE | changes).items() if of is not None}
    lines = [str(TRL | {name: of(at) for name, of in figures.items()} | {"epoch": at / 10}) for at in range(12)]
    (tmp_path / "a.log").write_text("\n".join(lines) + "\n")
    return look(RunEvidence.of(tmp_path / "a.log"))


def look(evidence):
    assert CHECKS[0].name == "learns"
    return list(CHECKS[0].test(evidence))


@pytest.mark.parametrize(
    ("name", "figure", "facts"),
    [
        ("completions/clipped_ratio", lambda at: 1.0, ("100%", "cap", "lower bounds")),
        ("frac_reward_zero_std", lambda at: 1.0, ("100%", "advantage")),
        ("grad_norm", lambda at: 0.0, ("gradient", "0")),
        ("reward", lambda at: 0.5, ("reward", "0.5")),
        ("entropy", lambda at: 0.4 * 0.5**at, ("entropy",)),
        ("kl", lambda at: 0.01 * 3**at, ("divergence",)),
        ("sampling/sampling_logp_difference/mean", lambda at: 0.4, ("0.4",)),
    ],
)
def test_a_log_that_shows_no_learning_is_a_problem(tmp_path, name, figure, facts):
    assert looked_at(tmp_path) == []
    (finding,) = looked_at(tmp_path, **{name: figure})
    text = f"{finding.evidence} {finding.advice}"
    severity = "hint" if name == "reward" else "problem"
    assert (finding.severity, [fact for fact in facts if fact not in text]) == (severity, [])


def test_a_log_without_rewards_is_not_judged(tmp_path):
    with refused(NotChecked, naming=("rewards",)):
        looked_at(tmp_path, **dict.fromkeys(FINE.keys() - {"completions/clipped_ratio"}))


@pytest.mark.parametrize(("lengths", "rewards", "facts"), [
    ([9] * 8, [0.0] * 8, ("100% of the responses", "100% of the groups", "reward is 0")),
    ([9, 3] * 4, [1.0] * 4 + [0.0] * 4, ("100% of the groups",)),
    ([9, 3] * 4, [1.0, 0.0] * 4, ("the reward is 0.5",)),
    ([9, 3] * 4, None, ()),
])  # fmt: skip
def test_a_run_that_learns_nothing_is_a_problem(lengths, rewards, facts):
    steps = np.repeat(range(4), 8)
    prompts = [f"p{at // 4}" for at in range(8)] * 4
    more = {} if rewards is None else {"reward": rewards * 4}
    trace = of_samples(lengths * 4, 9, prompt_id=prompts, sample=list(range(4)) * 8, rl_step=steps, **more)
    if not facts:
        with refused(NotChecked):
            look(RunEvidence.of(trace))
        return
    first = examine(RunEvidence.of(trace)).findings[0]
    assert (first.code, [fact for fact in facts if fact not in first.evidence]) == ("learns", [])
