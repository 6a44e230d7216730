"""Systems from the literature: what each row of the table is, and how it is fitted to the acceptance that is known."""

from dataclasses import replace

import numpy as np
import pytest

from tests.refused import refused
from tltlab.acceptance.base import GeometricAcceptance, RequestArrays
from tltlab.acceptance.freshness import FreshAcceptance
from tltlab.acceptance.load import load_acceptance
from tltlab.acceptance.measured import FittedDepth, MeasuredAcceptance
from tltlab.acceptance.per_drafter import PerDrafter
from tltlab.costs.base import CostModel
from tltlab.costs.linear import LinearCosts
from tltlab.costs.load import load_costs
from tltlab.costs.scaled import ScaledCosts
from tltlab.errors import ConfigError
from tltlab.planning.claims import CLAIMS
from tltlab.planning.composition import LadderStep, System, length_aware
from tltlab.planning.dispatch import stage_left
from tltlab.planning.system_binding import bind, bind_assuming
from tltlab.planning.systems import SYSTEMS, find_systems
from tltlab.policies.policy import Activation, load_policy
from tltlab.policies.specs import FixedSpec
from tltlab.state import DrafterState
from tltlab.strategy import NO_SPECULATION, Strategy

COSTS = LinearCosts(
    base_s=4e-3, per_request_s=0.0, per_token_s=1e-4, per_context_s=2e-8, sd_base_s=0.0, sd_idle_s=0.0,
    draft_level_s=3e-4, draft_level_per_request_s=0.0, prefill_per_token_s=1e-6,
)  # fmt: skip
TREES = load_acceptance("tlt-qwen2.5-32b")
SIBLINGS = load_acceptance("seer-siblings")


def measured(*drafters, depth=8):
    """Chains of these drafters, each token kept or not by the throw of a coin, up to `depth`."""
    kept = [0.5 ** min(i + 1, depth) for i in range(depth + 1)]
    known = FittedDepth(accepted=tuple(kept), drafted=float(depth))
    return MeasuredAcceptance.at_any_batch({name: {depth: known} for name in drafters})


def test_every_system_is_unique_and_sourced():
    assert len(SYSTEMS) >= 20
    for name, system in SYSTEMS.items():
        assert system.name == name
        assert all((system.title, system.source, system.algorithm, system.exact, system.assumptions)), name
    assert set(CLAIMS) <= set(SYSTEMS)
    for claim in CLAIMS.values():
        assert 1.0 <= claim.least <= claim.most
        assert all((claim.baseline, claim.setting, claim.source))
    unnamed = dict.fromkeys(("name", "title", "source", "algorithm"), "") | {"exact": (), "assumptions": ()}
    assert len({repr(replace(system, **unnamed)) for system in SYSTEMS.values()}) == len(SYSTEMS)


@pytest.mark.parametrize(
    ("ends", "tokens", "free", "left"),
    [
        pytest.param([4.0, 10.0], [100, 100], [4.0, 10.0], 2.0, id="half is done on a worker free from 4 s on"),
        pytest.param([1.0, 9.0], [99, 1], [1.0, 9.0], 0.04, id="all ended long ago but one token"),
        pytest.param([4.0, 6.0], [100, 100], [4.0, 6.0], 3.0, id="half of its work is done when it ends"),
        pytest.param([5.0, 5.0], [10, 10], [5.0, 5.0], 4.0, id="nothing is done"),
        pytest.param([], [], [0.0], 0.0, id="nothing is to do"),
    ],
)
def test_fused_stage_waits_for_responses_and_free_workers(ends, tokens, free, left):
    assert stage_left(ends, tokens, free, 4.0) == pytest.approx(left)


def test_what_changes_tokens_is_not_called_lossless():
    assert {name for name, system in SYSTEMS.items() if not system.lossless} >= {"spec-rl"}
    assert {name for name, system in SYSTEMS.items() if not system.on_policy} >= {"rhymerl", "streamrl-async"}
    assert all(system.on_policy for system in SYSTEMS.values() if not system.max_staleness and not system.admission)


def test_earlier_responses_count_as_finished_siblings():
    found = bind(SYSTEMS["histospec"], COSTS, SIBLINGS)
    nobody = np.zeros(1)
    assert found.acceptance.alpha(nobody, nobody) == pytest.approx(SIBLINGS.alpha(nobody + 16, nobody))
    assert any("earlier epoch" in note for note in found.assumptions)


@pytest.mark.parametrize(("siblings", "tokens"), [(0, 1.70), (1, 2.04), (5, 2.32), (15, 2.53)])
def test_seers_accepted_length_by_number_of_siblings(siblings, tokens):
    """Its table of linear drafts, which the shipped curve is fitted to."""
    nobody = np.zeros(1)
    survival = SIBLINGS.survival(Strategy.chain("suffix", 8), RequestArrays(nobody, nobody + siblings))
    assert 1 + survival.sum() == pytest.approx(tokens, abs=0.03)


def test_a_block_is_drafted_in_one_pass():
    costs = COSTS.model_copy(update={"draft_level_s": 0.0})
    four, eight = Strategy.chain("learned", 4), Strategy.chain("learned", 8)
    plain = COSTS.iteration(NO_SPECULATION).seconds(4, 0)
    chain, block = (ScaledCosts.wrapping(costs, pass_share=0.25, block=block) for block in (False, True))
    for strategy, passes in ((four, 4), (eight, 8)):
        verified = costs.iteration(strategy).seconds(4, 0)
        assert chain.iteration(strategy).seconds(4, 0) == pytest.approx(verified + 0.25 * passes * plain)
        assert block.iteration(strategy).seconds(4, 0) == pytest.approx(verified + 0.25 * plain)


def test_tlt_on_a_gpu_is_its_released_configuration():
    found = bind(SYSTEMS["tlt"], COSTS, TREES)
    buckets = found.policy.selector.buckets
    assert [bucket.min_batch for bucket in buckets] == [1, 2, 5, 21]
    assert [bucket.strategies[0].tokens_to_verify for bucket in buckets] == [48, 32, 16, 8]
    assert all(s.drafter == "learned" and s.top_k == 4 for bucket in buckets for s in bucket.strategies)
    assert found.policy.activation == Activation(max_requests=32, count="running", hold_iterations=10)
    assert isinstance(found.acceptance, FreshAcceptance)
    assert found.spot is not None
    assert any("extrapolated for learned:8x4/8" in note for note in found.assumptions)


def test_a_static_drafter_is_not_trained():
    tlt, static = (bind(SYSTEMS[name], COSTS, TREES) for name in ("tlt", "vllm-dynamic"))
    assert tlt.acceptance == static.acceptance
    assert static.spot is None
    assert static.policy.selector.build(np.random.default_rng(0)).strategies == (
        *(Strategy.chain("learned", d) for d in (8, 4, 2)),
        NO_SPECULATION,
    )


def test_concurrent_drafters_have_separate_acceptance():
    found = bind(SYSTEMS["hedgespec"], COSTS, load_acceptance({"learned": TREES, "suffix": SIBLINGS}))
    learned, text = (Strategy.chain(name, 4) for name in ("learned", "suffix"))
    assert found.policy.strategies == (learned, text)
    model = found.acceptance.in_state(dict.fromkeys(("learned", "suffix"), DrafterState()))
    expected = {learned: FreshAcceptance(base=TREES).in_state({}).curve(learned), text: 0.41591936 ** np.arange(1, 5)}
    for strategy, survival in expected.items():
        assert model.curve(strategy) == pytest.approx(survival)
    assert not found.defaults
    assumed = bind_assuming(SYSTEMS["hedgespec"], COSTS, TREES)
    assert assumed.acceptance == found.acceptance
    assert assumed.defaults == ("acceptance of all drafters is not known: the default seer-siblings is taken",)
    learned = bind_assuming(SYSTEMS["hedgespec"], COSTS, load_acceptance("learned=geometric:0.7"))
    assert learned.acceptance.models == {
        name: GeometricAcceptance(alpha=a) for name, a in (("learned", 0.7), ("suffix", 0.42))
    }
    assert bind(SYSTEMS["hedgespec"], COSTS, GeometricAcceptance(alpha=0.5)).acceptance == GeometricAcceptance(
        alpha=0.5
    )
    with refused(ConfigError):
        bind(SYSTEMS["hedgespec"], COSTS, TREES)


@pytest.mark.parametrize("name", ["verl", "open-r1"])
def test_systems_without_speculation_ask_for_no_acceptance(name):
    found = bind(SYSTEMS[name], COSTS, None)
    assert (found.policy.strategies, found.acceptance) == ((NO_SPECULATION,), None)


@pytest.mark.parametrize(
    ("model", "learned", "ngram", "suffix"),
    [
        (TREES, True, False, False),
        (load_acceptance("tlt-qwen2.5-32b-fresh"), True, False, False),
        (SIBLINGS, False, True, True),
        (GeometricAcceptance(alpha=0.5), True, True, True),
        (measured("ngram"), False, True, False),
        (FreshAcceptance(base=measured("learned", "suffix")), True, False, True),
    ],
)
def test_a_model_knows_only_its_drafters(model, learned, ngram, suffix):
    assert [model.knows(name) for name in ("learned", "ngram", "suffix")] == [learned, ngram, suffix]


def test_trees_do_not_describe_text_drafters():
    for name in ("tlt-base", "das"):
        with refused(ConfigError, naming=("model-free", "seer-siblings")):
            bind(SYSTEMS[name], COSTS, TREES)
        bound = bind(SYSTEMS[name], COSTS, load_acceptance({"learned": TREES, "all": SIBLINGS}))
        assert [*bound.acceptance.models.values()] == [SIBLINGS]


def test_a_drafters_own_model_is_used():
    by_drafter = load_acceptance("learned=geometric:0.9,all=geometric:0.4")
    for name, drafter in (("tlt", "learned"), ("tlt-base", "ngram")):
        bound = bind(SYSTEMS[name], COSTS, by_drafter)
        assert {s.drafter for s in bound.policy.strategies if s.speculates} == {drafter}
        assert not bound.stand_ins
    by_default = bind(SYSTEMS["tlt"], COSTS, load_acceptance("ngram=geometric:0.4"))
    assert {s.drafter for s in by_default.policy.strategies if s.speculates} == {"learned"}
    assert not by_default.stand_ins


@pytest.mark.parametrize("name", ["tlt", "rhymerl"])
def test_models_by_drafter_change_like_single_ones(name):
    """A tree's curve becomes one by age and training, and siblings know an earlier epoch."""
    bound = bind(SYSTEMS[name], COSTS, load_acceptance("learned=tlt-qwen2.5-32b,all=seer-siblings"))
    (model,) = bound.acceptance.models.values()
    if name == "tlt":
        assert isinstance(model, FreshAcceptance)
        assert (bound.acceptance.trained_drafter, bound.spot is not None) == ("learned", True)
    else:
        assert model.alone > SIBLINGS.alone
        assert (bound.acceptance.trained_drafter, bound.spot) == (None, None)


BOTH = FreshAcceptance(base=measured("ngram", "learned"))


@pytest.mark.parametrize(
    ("name", "acceptance", "first", "drafters", "is_trained", "stand_ins"),
    [
        ("tlt-base", measured("ngram"), ["ngram:8", "ngram:4"], ["ngram"], False, []),
        ("tlt", measured("ngram"), ["ngram:8", "ngram:4"], ["ngram"], False, ["model-free drafter throughout"]),
        ("tlt", BOTH, ["learned:8", "learned:4", "ngram:8", "ngram:4"], ["ngram"], True, []),
        ("das", measured("ngram"), ["ngram:8"], [], False, ["'suffix' is not known: 'ngram'"]),
    ],
)
def test_what_stands_in_for_an_unknown_drafter(name, acceptance, first, drafters, is_trained, stand_ins):
    found = bind(SYSTEMS[name], COSTS, acceptance)
    assert [str(s) for s in found.policy.strategies if s.speculates][: len(first)] == first
    assert list(found.policy.drafters) == drafters
    assert (found.spot is not None) == is_trained
    assert all(expected in said for expected, said in zip(stand_ins, found.stand_ins, strict=True))
    assert set(found.stand_ins) <= set(found.assumptions)


@pytest.fixture
def as_measured(monkeypatch):
    """Copies are not extrapolated to deeper drafts."""
    monkeypatch.setattr("tltlab.acceptance.measured.FARTHEST", 1)


@pytest.mark.usefixtures("as_measured")
def test_strategies_that_were_never_measured_are_left_out():
    tlt = bind(SYSTEMS["tlt-base"], COSTS, measured("ngram", depth=4))
    assert [[s.draft_depth for s in b.strategies] for b in tlt.policy.selector.buckets] == [[4], [3], [4, 2], [2, 1]]
    das = bind(SYSTEMS["das"], COSTS, measured("suffix", depth=4))
    assert das.policy.selector == FixedSpec(strategy=Strategy.chain("suffix", 4))
    assert das.assumptions[-1] == "deeper drafts are not covered by the acceptance: suffix:4 instead"
    nothing = MeasuredAcceptance.at_any_batch({"suffix": {}})
    with refused(ConfigError, naming=("suffix",)):
        bind(SYSTEMS["das"], COSTS, nothing)


@pytest.mark.usefixtures("as_measured")
def test_depth_must_be_known_at_every_batch_size():
    deep, shallow = (measured("ngram", depth=d).bands[0].drafters_by_depth for d in (8, 4))
    bands = MeasuredAcceptance.model_validate(
        {"bands": [{"max_batch": 5, "drafters": deep}, {"max_batch": None, "drafters": shallow}]}
    )
    found = bind(SYSTEMS["tlt-base"], COSTS, bands)
    assert max(s.draft_depth for s in found.policy.strategies) == 4


def test_a_systems_policy_is_a_policy_file(tmp_path):
    for system in SYSTEMS.values():
        policy = bind(system, COSTS, GeometricAcceptance(alpha=0.6)).policy
        policy.write(tmp_path / f"{system.name}.json")
        assert load_policy(tmp_path / f"{system.name}.json") == policy
        assert policy.provenance["system"] == system.name


def test_a_new_system_is_one_more_row():
    ladder = (LadderStep(min_batch=1, chains=(3,)),)
    mine = System(name="mine", title="Mine", source="this test", drafters=("suffix",), ladder=ladder, lossless=False)
    assert find_systems(["verl", mine]) == (SYSTEMS["verl"], mine)
    found = bind(mine, COSTS, GeometricAcceptance(alpha=0.6))
    assert found.policy.selector == FixedSpec(strategy=Strategy.chain("suffix", 3))


@pytest.mark.parametrize("names", ["", "verl,verl", "verl,nobody"])
def test_systems_are_asked_for_by_their_names(names):
    with refused(ConfigError, naming=("system",)):
        find_systems(names)
    assert [s.name for s in find_systems("all")] == list(SYSTEMS)


def test_das_knows_what_pass_and_token_cost():
    budget = length_aware(COSTS.model_copy(update={"draft_level_s": 0.0}))
    assert (budget.base_s, budget.token_s) == (pytest.approx(4e-3), pytest.approx(1e-4))


def test_concurrent_drafters_differ_at_every_batch():
    good, bad = measured("learned"), MeasuredAcceptance.at_any_batch(
        {"learned": {8: FittedDepth(accepted=(1.0, *[0.0] * 8), drafted=8.0)}}
    )  # fmt: skip
    bands = MeasuredAcceptance.model_validate(
        {"bands": [{"max_batch": 3, "drafters": bad.bands[0].drafters_by_depth},
                   {"max_batch": None, "drafters": good.bands[0].drafters_by_depth}]}
    )  # fmt: skip
    both, nobody = PerDrafter({"learned": bands, "ngram": SIBLINGS}), RequestArrays.zeros(2)
    chain, text = Strategy.chain("learned", 8), Strategy.chain("ngram", 4)
    for batch, model in ((3, bad), (4, good)):
        assert both.at(batch).survival(chain, nobody)[1] == pytest.approx(model.curve(chain))
    assert both.most_tokens(chain, nobody)[0] == pytest.approx(1.0 + good.curve(chain).sum())
    some = RequestArrays(np.zeros(2), np.array([0.0, 3.0]))
    assert both.survival(text, some) == pytest.approx(SIBLINGS.survival(text, some))


class OwnLine(CostModel):
    """Costs of a user's own, which no file but their class's brings back."""

    def iteration(self, strategy, **options):
        return COSTS.iteration(strategy, **options)

    def prefill_s(self, tokens):
        return COSTS.prefill_s(tokens)


def test_verification_goes_by_any_costs():
    budget = SYSTEMS["vllm-adaptive"].budget
    assert budget is not None
    roofline = load_costs("vllm:H100:Qwen2.5-7B")
    kept = load_costs(budget(roofline).costs)
    assert kept.iteration(NO_SPECULATION).seconds(8, 1e4) == roofline.iteration(NO_SPECULATION).seconds(8, 1e4)
    line, fit = budget(OwnLine()).costs, length_aware(OwnLine())
    assert (line["base_s"], line["per_token_s"]) == (fit.base_s, fit.token_s)
