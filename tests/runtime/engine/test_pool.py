"""A pool of drafters without an engine: who drafts for whom, whom the canary keeps from serving, and the report."""

import json
from dataclasses import asdict

import pytest

from tests.fakes.drafting import Parrot
from tests.refused import refused
from tltlab.coordination.canary import CanaryConfig
from tltlab.drafters.ngram import NgramDrafter
from tltlab.drafters.specs import HybridSpec, LearnedSpec, NgramSpec
from tltlab.errors import ConfigError
from tltlab.policies.simple import Fixed
from tltlab.runtime.engine.control import Control
from tltlab.runtime.engine.drafter_pool import DrafterPool
from tltlab.state import DrafterState
from tltlab.strategy import Strategy

from .asking import running, scheduled
from .test_control import chain

KEY = (0, "p", 0, 0)
HEAD = LearnedSpec(method="eagle", model="a/head")
LEARNED = Strategy.chain("learned", 3)


def pool(fallback="ngram", predicted=0.9, **config):
    """A pool with a canary, and with weights of the learned drafter whose first tokens are `predicted`."""
    drafters = {"learned": HEAD.model_copy(update={"fallback": fallback}), "ngram": NgramSpec()}
    pool = DrafterPool(drafters | {"hybrid": HybridSpec(first="ngram")}, 4)
    pool.guard(CanaryConfig(min_drafts=20, **config))
    if predicted is not None:
        pool.updated([predicted])
    return pool


def verified(pool, kept, drafts=20):
    for _ in range(drafts):
        pool.observe("learned", [(KEY, 3, kept)])


def test_drafts_made_before_a_collapse_are_verified():
    """Depth, proposal and verification of one iteration are three moments; the canary may trip at any of them."""
    drafters = pool()
    control = Control(drafters)
    control.set_selector(Fixed(LEARNED))
    control.begin(0)
    text, output = [5 + n % 4 for n in range(40)], list[int]()
    live = control.add("r", KEY, [1], output, 1000)
    depths, makers, draft = [], [], []
    for n in range(24):
        control.iteration_starts()
        what = scheduled("r", drafts={"r": draft} if draft else {})
        depths.append(control.scheduled(what))
        if draft:
            makers.append(live.drafter)
        control.sampled([1])
        output += text[len(output) :][: 9 if n == 0 else 1]
        (draft,) = control.drafts(["r"], [[7, 7, 7]], 0.0)
    assert makers == ["learned"] * 20 + ["ngram"] * 3
    assert depths == [3] * 21 + [0] * 3, "the workers' last draft is made while its first one is judged"
    counts = drafters.report().positions
    assert (counts["learned"].drafted, counts["ngram"].drafted[0]) == ((20, 20, 20), 3)


def test_new_weights_restore_it_and_reset_counts():
    drafters = pool()
    verified(drafters, 0)
    assert drafters.worker_depth(LEARNED) == 0
    assert not drafters.report().serves
    drafters.updated([0.5, 0.4])
    report = drafters.report()
    assert (report.serves, report.updates, report.predicted, report.positions) == (True, 2, (0.5, 0.4), {})
    verified(drafters, 2, drafts=10)
    assert drafters.report().measured == (1.0, 1.0, 0.0)


def test_a_hybrid_has_its_networks_age():
    drafters = pool()
    drafters.begin(0)
    drafters.begin(3)
    assert drafters["hybrid"] == drafters["learned"] != drafters["ngram"] == DrafterState()


def test_without_fallback_only_model_free_drafts_remain():
    drafters = pool(fallback=None)
    hybrid = Strategy.chain("hybrid", 3)
    drafters.use([LEARNED, hybrid])
    drafters.open(running(KEY, [5, 6, 5, 6, 5, 6]))
    verified(drafters, 0)
    assert drafters.propose(LEARNED, [(KEY, 3)], [[7, 7, 7]]) == (["learned"], [[]])
    assert (drafters.worker_depth(LEARNED), drafters.worker_depth(hybrid)) == (0, 0)
    assert drafters.propose(hybrid, [(KEY, 2)], [[7, 7]]) == (["ngram"], [[5, 6]])


@pytest.mark.parametrize(
    ("on_collapse", "predicted", "complains"), [("stop", 0.9, True), ("stop", 0.02, False), ("fallback", 0.9, False)]
)
def test_only_a_stopping_collapse_is_an_error(on_collapse, predicted, complains):
    drafters = pool(on_collapse=on_collapse, predicted=predicted)
    assert drafters.complaint == ""
    verified(drafters, 0)
    assert not drafters.report().trusted
    assert bool(drafters.complaint) == complains


def test_a_verdict_names_what_happened_before():
    drafters = pool(predicted=None)
    drafters.begin(4)
    drafters.updated([0.9])
    verified(drafters, 3)
    drafters.begin(5)
    drafters.target_updated("6")
    verified(drafters, 3)
    drafters.note_wake()
    verified(drafters, 0)
    verdicts = drafters.report().verdicts
    assert [v.kind for v in verdicts] == ["fine", "fine", "collapsed"]
    for verdict, facts in zip(verdicts, (("weights", "4"), ("weights 6", "5"), ("woke", "5")), strict=True):
        assert all(fact in verdict.why for fact in facts)


def test_report_is_json_with_and_without_learned_drafter():
    drafters = pool()
    verified(drafters, 1)
    row = json.loads(json.dumps(asdict(drafters.report())))
    assert row["positions"]["learned"] == {"drafted": [20, 20, 20], "tried": [20, 20, 0], "kept": [20, 0, 0]}
    assert row["measured"] == [1.0, 0.0, None]
    assert row["verdicts"][0]["kind"] == "fine"
    none = DrafterPool({"ngram": NgramSpec()}, 4)
    none.target_updated("1")
    none.observe("ngram", [(KEY, 2, 1)])
    report = none.report()
    assert (report.drafter, report.serves, list(report.positions)) == ("", False, ["ngram"])


def test_a_restored_state_includes_the_canary():
    drafters = pool()
    before = drafters.state_dict()
    verified(drafters, 0)
    assert not drafters.report().trusted
    drafters.load_state_dict(before)
    assert drafters.report().trusted
    drafters.updated([0.6])
    drafters.load_state_dict(before)
    assert drafters.report().predicted == (0.6,)


@pytest.mark.parametrize("spec", [HEAD.model_copy(update={"trained": False}), HEAD.model_copy(update={"max_age": 0})])
def test_an_absent_or_stale_drafter_is_replaced(spec):
    spec = spec.model_copy(update={"fallback": "parrot"})
    pool = DrafterPool({"learned": spec, "parrot": Parrot()}, 8)
    pool.use([chain(3, "learned")])
    if spec.max_age is not None:
        pool.updated()
        pool.begin(1)
        assert pool["learned"].age == 0
        pool.begin(2)
    pool.open(running(KEY, [1]))
    assert pool.worker_depth(chain(3, "learned")) == 0
    assert pool.propose(chain(3, "learned"), [(KEY, 3)], [[]]) == (["parrot"], [[1, 1, 1]])
    pool.updated()
    assert pool.worker_depth(chain(3, "learned")) == 3
    assert pool.propose(chain(3, "learned"), [(KEY, 2)], [[5, 6, 7]]) == (["learned"], [[5, 6]])


@pytest.mark.parametrize(("expected", "drafter"), [(3.0, "parrot"), (1.5, "learned")])
def test_a_hybrid_takes_the_more_promising_drafter(expected, drafter):
    hybrid = HybridSpec(first="parrot", otherwise="learned", min_expected=1.0)
    pool = DrafterPool({"learned": HEAD, "parrot": Parrot(expected), "hybrid": hybrid}, 8)
    strategy = chain(4, "hybrid")
    pool.use([strategy])
    pool.open(running(KEY, [1]))
    pool.observe("learned", [(KEY, 4, 2)])
    assert pool.worker_depth(strategy) == 4
    assert pool.propose(strategy, [(KEY, 4)], [[5, 6, 7, 8]])[0][0] == drafter


@pytest.mark.parametrize(
    ("drafters", "facts"),
    [
        ({"a": HEAD, "b": HEAD}, ("a", "b")),
        ({"h": HybridSpec(first="suffix", otherwise="learned")}, ("drafter h", "'suffix'")),
        (
            {"learned": HEAD, "suffix": NgramSpec(), "h": HybridSpec(first="learned", otherwise="suffix")},
            ("'learned'",),
        ),
        ({"learned": HEAD.model_copy(update={"fallback": "nobody"})}, ("drafter learned", "'nobody'")),
    ],
)
def test_drafters_that_cannot_live_together_are_refused(drafters, facts):
    with refused(ConfigError, naming=facts):
        DrafterPool(drafters, 4)


def test_same_rollout_again_and_evaluation_age_no_drafter():
    pool = DrafterPool({"learned": HEAD}, 4)
    pool.updated()
    for rl_step in (0, -1, 0, 1):
        pool.begin(rl_step)
    assert pool["learned"].age == 1


def test_on_device_drafts_exclude_model_free_drafters():
    stood_in_for = HEAD.model_copy(update={"fallback": "ngram"})
    for learned, without in ((HEAD, "ngram"), (stood_in_for, "learned")):
        pool = DrafterPool({"learned": learned, "ngram": NgramSpec()}, 4, on_host=False)
        with refused(ConfigError):
            pool.use([chain(2, without)])
    DrafterPool({"learned": HEAD, "ngram": NgramSpec()}, 4, on_host=False).use([chain(2, "learned")])


def test_a_users_network_drafts_beside_the_scheduler():
    class Net(NgramDrafter):
        has_network = True

    pool = DrafterPool({"net": Net()}, 4)
    assert (pool.registry["net"].has_network, pool.registry["net"].made_by) == (True, "engine")
    assert pool.model_free([Strategy.chain("net", 2)]) == ("net",)
    assert pool.worker_depth(Strategy.chain("net", 2)) == 0
