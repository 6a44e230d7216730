"""Settings of policies that make no sense, and states of other policies, are refused with what is wrong."""

import math

import numpy as np
import pytest

from tests.refused import refused
from tltlab.costs.linear import LinearCosts
from tltlab.errors import ConfigError
from tltlab.policies.adaptive import Adaptive
from tltlab.policies.bandits import Hedge, Ucb1
from tltlab.policies.beg_mab import BegMab, paper_buckets
from tltlab.policies.engines import AcceptedThresholds
from tltlab.policies.goodput import Goodput
from tltlab.policies.simple import BatchTable, Explore, Fixed
from tltlab.policies.wrappers import ElasticActivation
from tltlab.strategy import NO_SPECULATION, Strategy

RNG = np.random.default_rng(0)
PLAIN, (D8, D4, D2, D1) = NO_SPECULATION, (Strategy.chain("ngram", depth) for depth in (8, 4, 2, 1))
TREES = [Strategy("learned", 8, 4, v) for v in (8, 48, 16, 32)]
COSTS = LinearCosts(**{name: 1e-3 for name in LinearCosts.model_fields if name.endswith("_s")})


def table(*min_batches):
    return BatchTable([(t, D8) for t in min_batches])


def mab(*buckets, **settings):
    return BegMab(buckets, rng=RNG, **settings)


def elastic(**settings):
    return ElasticActivation(Fixed(D4), **settings)


def adaptive(*drafters, **settings):
    return Adaptive(drafters or ("ngram",), rng=RNG, **settings)


def goodput(*strategies, costs=COSTS, **settings):
    return Goodput(strategies or (D4,), costs, rng=RNG, **settings)


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (lambda: table(), ("min_batch",)),
        (lambda: table(1, 8, 8), ("min_batch",)),
        (lambda: Explore([D8, D2, D8], rng=RNG), ("ngram:8",)),
        (lambda: Ucb1([]), ()),
        (lambda: Hedge([PLAIN, D8], rng=RNG), ("speculation",)),
        (lambda: mab(), ("buckets",)),
        (lambda: mab((1, [])), ("strategies",)),
        (lambda: mab((5, [D8]), (5, [D4])), (5,)),
        (lambda: mab((1, [D8, D8])), ("given",)),
        (lambda: mab((1, [D8]), epsilon=1.5), (0, 1, "1.5")),
        (lambda: mab((1, [D8]), tries=301), (301,)),
        (lambda: mab((1, [D8, PLAIN]), (9, [D2, D1]), reward="relative"), (9,)),
        (lambda: paper_buckets(TREES, [1, 5]), (4, 48, 32, 16, 8, 2, 1, 5)),
        (lambda: elastic(max_requests=-1), (-1, 10)),
        (lambda: AcceptedThresholds(rows=[(1, (3, 1), 0.0)]), ("ascend",)),
        (lambda: adaptive(max_depth=0), ("adaptive",)),
        (lambda: adaptive(exploration=0.6), ("adaptive",)),
        (lambda: adaptive("none"), ("each",)),
        (lambda: goodput(window=0), (1,)),
        (lambda: goodput(prior=math.nan), ("probabilities",)),
        (lambda: goodput(Strategy("eagle", 4, 2, 8)), ()),
        (lambda: goodput(costs=COSTS.model_copy(update={"per_token_s": None})), ("per_token_s",)),
        (lambda: Ucb1([D2]).load_state_dict(Ucb1([D8]).state_dict()), ("ngram:8",)),
        (lambda: mab((1, [D8, D4])).load_state_dict(mab((1, [D8, D2])).state_dict()), ("ngram:4",)),
        (lambda: adaptive().load_state_dict(adaptive("suffix").state_dict()), ("saved",)),
        (lambda: goodput(D1).load_state_dict(goodput(D8).state_dict()), ("ngram", 8)),
    ],
)
def test_what_makes_no_sense_is_refused(make, facts):
    with refused(ConfigError, naming=facts):
        make()
