"""Settings of drafters and budgets that make no sense are refused, by the spec of a drafter as by the drafter."""

import math

import pytest
from pydantic import TypeAdapter, ValidationError

from tests.refused import refused
from tltlab.drafters.budget import AcceptanceBudget, LengthAwareBudget, MbaBudget, optimal_budget
from tltlab.drafters.ngram import NgramDrafter
from tltlab.drafters.specs import DrafterSpec
from tltlab.drafters.suffix import SuffixDrafter
from tltlab.errors import ConfigError
from tltlab.state import RequestState, StepState
from tltlab.strategy import Strategy

SPECS = TypeAdapter(DrafterSpec)
ONE = RequestState(key=(0, "p", 0, 0), prompt_id="p", generated_tokens=9, max_response_tokens=99, recent_acceptance=1.0)


def optimum(**wrong):
    right = {"lengths": [5.0], "reach": 0.9, "efficiency": 0.7, "base_s": 1.0, "token_s": 0.1}
    return optimal_budget(**right | wrong)


def tree(budget):
    return budget.allot(StepState(rl_step=0, batch=1, requests=[ONE]), Strategy("eagle", 8, 4, 48))


@pytest.mark.parametrize(
    ("make", "wrong", "facts"),
    [
        (AcceptanceBudget, {"min_tokens": -1}, (0,)),
        (tree, {"budget": AcceptanceBudget()}, ("tree",)),
        (tree, {"budget": LengthAwareBudget()}, ("tree",)),
        (tree, {"budget": MbaBudget()}, ("tree",)),
        (optimum, {"reach": 0.0}, ("reach",)),
        (optimum, {"lengths": []}, ()),
        (optimum, {"reach": 1.5}, ()),
        (optimum, {"reach": 1.0, "efficiency": 1.5}, (1,)),
        (optimum, {"token_s": math.nan}, ("base_s", "token_s", 0)),
    ],
)
def test_what_makes_no_sense_is_refused(make, wrong, facts):
    with refused(ConfigError, naming=facts):
        make(**wrong)


@pytest.mark.parametrize(
    ("kind", "wrong", "facts"),
    [
        ("ngram", {"min_match": 3, "max_match": 2}, (3, 2)),
        ("ngram", {"history_mib": -1}, (0,)),
        ("suffix", {"scopes": ()}, ()),
        ("suffix", {"scopes": ("group", "group")}, ("each",)),
        ("suffix", {"scopes": ("row",)}, ("request", "group", "problem", "global")),
        ("suffix", {"window": 0}, (1,)),
        ("suffix", {"min_token_prob": 1.5}, (0, 1)),
        ("suffix", {"length": "long"}, ("depth", "match", "doubling")),
        ("suffix", {"match_factor": 0.0}, (0,)),
        ("suffix", {"history_mib": 0}, (0,)),
        ("learned", {"method": "eagle", "model": ""}, ()),
        ("hybrid", {"min_expected": -1}, (0,)),
        ("ngram", {"windw": 3}, ("inputs",)),
        ("tree", {}, ("ngram", "suffix", "learned", "hybrid")),
    ],
)
def test_a_spec_refuses_what_its_drafter_would(kind, wrong, facts):
    with refused(ValidationError, naming=facts):
        SPECS.validate_python({"kind": kind} | wrong)
    drafter = {"ngram": NgramDrafter, "suffix": SuffixDrafter}.get(kind)
    if drafter and not {"windw", "length"} & wrong.keys():
        with refused(ConfigError, naming=facts):
            drafter(**wrong)
