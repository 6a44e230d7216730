"""What is counted of iterations and how Prometheus reads it, and a policy that takes another one's place."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.refused import refused
from tltlab.costs.linear import LinearCosts
from tltlab.drafters.specs import SuffixSpec
from tltlab.errors import ConfigError
from tltlab.policies.policy import load_policy
from tltlab.runtime.engine.control import Control
from tltlab.runtime.engine.drafter_pool import DrafterPool
from tltlab.runtime.engine.metrics import Collector, Tally
from tltlab.runtime.engine.tracker import Iteration
from tltlab.state import Choice
from tltlab.strategy import NO_SPECULATION, Strategy

from .asking import raising

NGRAM = Strategy.chain("ngram", 3)


def iteration(strategy, duration_s, *drafts, batch=2, prefill=0):
    """One that is over; `drafts` are the tokens drafted and kept of each request."""
    counts = {"waiting": 0, "context_tokens": 10, "prefill_tokens": prefill}
    over = Iteration(request_ids=["r"] * batch, drafts={}, **counts, verified=Choice(strategy), decided=True)
    over.drafted, over.accepted = [each[0] for each in drafts], [each[1] for each in drafts]
    over.num_generated = batch + sum(over.accepted)
    over.duration_s = duration_s
    return over


def tally(*iterations):
    counted = Tally()
    for each in iterations:
        counted.add(each)
    return counted


def test_iterations_by_arm_are_compared_with_plain():
    counted = tally(
        iteration(NGRAM, 9.0, (3, 3), (3, 3)),  # nothing to compare it with yet
        iteration(NO_SPECULATION, 2.0),
        iteration(NO_SPECULATION, 7.0, prefill=5),  # not of decoding alone
        iteration(NGRAM, 3.0, (3, 2), (0, 0)),  # 4 tokens, which plain decoding has in 4 s
        iteration(NGRAM, 5.0, (2, 0), (3, 1)),  # 3 tokens: 3 s
    )
    names = ("iterations_total", "iteration_seconds_total", "generated_tokens_total")
    assert [counted.counts[name, "none"] for name in names] == [2, 9.0, 4]
    assert [counted.counts[name, "ngram:3"] for name in names] == [3, 17.0, 15]
    gained = {key: number for key, number in counted.counts.items() if key[0] == "gained_seconds"}
    assert gained == {("gained_seconds", "ngram:3", "measured"): pytest.approx(1.0 - 2.0)}
    for kind, by_position in {"draft": [5, 5, 4], "accepted": [4, 3, 2]}.items():
        name = f"{kind}_tokens_per_position_total"
        assert [counted.counts[name, "ngram:3", position] for position in "012"] == by_position


def test_a_cost_model_gives_plain_decoding_time():
    costs = LinearCosts(base_s=1.0, per_request_s=0.5, per_context_s=0.1)  # 3 s for 2 requests of 10 tokens
    counted = Tally(costs)
    counted.add(iteration(NGRAM, 4.0, (3, 2), (3, 0)))  # 4 tokens: 6 s
    counted.add(iteration(NGRAM, 4.0, (3, 2), (3, 0), prefill=5))
    assert counted.counts["gained_seconds", "ngram:3", "costs"] == pytest.approx(2.0)


def test_counting_ends_with_the_first_error(caplog):
    counted = Tally(LinearCosts(base_s=1.0, per_request_s=0.5, per_context_s=0.1))
    counted.add(iteration(NO_SPECULATION, 2.0))
    before = counted.counts["iterations_total", "none"]
    for _ in range(2):
        counted.add(iteration(NGRAM, 1.0, (3, 2), batch=0))
        assert counted.counts["iterations_total", "none"] == before
    (record,) = caplog.records
    assert "ZeroDivisionError" in record.getMessage()


def test_what_is_held_does_not_grow_with_iterations():
    counted = tally(*[iteration(NGRAM, 1.0, (3, 1), (3, 1))] * 10_000)
    assert len(counted._uncounted) < 256
    assert counted.counts["iterations_total", "ngram:3"] == 10_000
    assert len(counted.counts) == 3 + 3 + 1


def shown(*asks):
    """What a scrape gives: by name, and label values in the order of the labels' names, the numbers."""
    collector = Collector()
    collector.asks += asks
    registry = CollectorRegistry()
    registry.register(collector)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    samples = [sample for family in families for sample in family.samples]
    return {" ".join([s.name, *(s.labels[label] for label in sorted(s.labels))]): s.value for s in samples}


def test_scrape_leaves_out_engines_that_cannot_be_asked():
    counts = tally(iteration(NO_SPECULATION, 2.0), iteration(NGRAM, 3.0, (3, 2), (3, 0))).counts
    metrics = {("policy_info", "fixed", "ab12", ""): 1, **counts}
    found = shown(raising(TimeoutError()), lambda: [(("m", "0"), metrics), (("m", "1"), metrics)])
    assert found["tltlab:policy_info ab12 1  m fixed"] == 1
    assert found["tltlab:iterations_total none 0 m"] == 1
    assert found["tltlab:accepted_tokens_per_position_total ngram:3 0 m 1"] == 1
    assert found["tltlab:draft_tokens_per_position_total ngram:3 0 m 2"] == 2
    assert found["tltlab:gained_seconds ngram:3 measured 0 m"] == pytest.approx(1.0)
    assert shown() == {}


@pytest.fixture
def control():
    control = Control(DrafterPool(None, 8))
    control.set_policy(load_policy("beg-mab"), (0, 0, 0))
    return control


def test_another_policy_takes_place_of_one_in_force(control):
    for name, strategies in (("fixed", ["ngram:4"]), ("none", ["none"])):
        control.set_policy(load_policy(name), (0, 0, 1))
        assert [str(s) for s in control.driver.selector.strategies] == strategies
        assert [key[1] for key in control.metrics() if key[0] == "policy_info"] == [name]


@pytest.mark.parametrize(("policy", "facts"), [("ngram:9", ("ngram:9", 8)), ("eagle:2", ("eagle:2", "ngram"))])
def test_an_impossible_policy_changes_nothing(policy, facts, control):
    before = control.metrics()
    with refused(ConfigError, naming=facts):
        control.set_policy(load_policy(policy), (0, 0, 2))
    assert control.metrics() == before


def test_drafter_that_cannot_be_built_leaves_policy(control, monkeypatch):
    before = control.driver.selector
    monkeypatch.setattr(SuffixSpec, "build", raising(ConfigError("no library")))
    with refused(ConfigError, naming=("library",)):
        control.set_policy(load_policy("beg-mab-suffix"), (0,))
    assert control.driver.selector is before
    assert control.drafters.feeds
