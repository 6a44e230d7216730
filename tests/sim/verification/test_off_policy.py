"""The off-policy estimators against the simulator, which knows the truth."""

import pytest

from tltlab.errors import ConfigError
from tltlab.policies.policy import SHIPPED
from tltlab.traces.trace import read

from .off_policy_truth import estimator_errors

TRACE = read("traces/tiny")
SIBLINGS = {"kind": "siblings", "alone": 0.2, "most": 0.8, "exponent": 1.0}


def test_the_estimates_are_near_the_truth_and_the_doubly_robust_one_nearest():
    targets = {name: SHIPPED[name] for name in ("fixed", "table")}
    errors = estimator_errors(
        TRACE, SHIPPED["explore"], targets, reward="paper", acceptance="geometric:0.6", seeds=range(4)
    )
    found = {(e.target, e.estimator): e for e in errors}
    assert len(found) == 6
    for target in targets:
        assert found[target, "dr"].rmse < 0.1
        assert found[target, "dr"].rmse < found[target, "ips"].rmse
        assert abs(found[target, "ips"].bias) < 0.25
    assert sum(e.coverage for e in errors) / len(errors) > 0.8


def test_a_log_that_is_too_one_sided_warns():
    (error, *_) = estimator_errors(
        TRACE, SHIPPED["epsilon-greedy"], {"table": SHIPPED["table"]}, acceptance="geometric:0.9", seeds=range(1)
    )
    assert error.warned == 1.0


@pytest.mark.filterwarnings("error")
def test_a_logger_without_choice_is_refused():
    with pytest.raises(ConfigError, match="chose nothing at random"):
        estimator_errors(TRACE, SHIPPED["none"], {"table": SHIPPED["table"]}, seeds=[0])


def test_acceptance_that_differs_by_request_has_no_truth_to_compare_with():
    with pytest.raises(ConfigError, match="alike for all requests"):
        estimator_errors(TRACE, SHIPPED["explore"], {"table": SHIPPED["table"]}, acceptance=SIBLINGS, seeds=[0])
