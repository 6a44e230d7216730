"""Names of drafters are for people: renaming one changes nothing, and an unknown one is refused at once."""

import ast
from pathlib import Path

import numpy as np
import pytest

from tests.refused import refused
from tltlab.acceptance.load import load_acceptance
from tltlab.acceptance.measured import FittedDepth, MeasuredAcceptance
from tltlab.calibration.acceptance import fit_kind
from tltlab.calibration.api import calibrate
from tltlab.calibration.iterations import recorded_rows
from tltlab.costs.linear import LinearCosts
from tltlab.costs.load import load_costs
from tltlab.costs.scaled import ScaledCosts
from tltlab.drafters.specs import (
    NETWORK,
    STANDARD,
    TEXT,
    Drafters,
    HybridSpec,
    LearnedSpec,
    NgramSpec,
    SuffixSpec,
)
from tltlab.errors import ConfigError
from tltlab.policies.goodput import Goodput
from tltlab.policies.selector import as_choice
from tltlab.policies.simple import Fixed
from tltlab.state import StepState
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.testing import check_selector
from tltlab.traces.schema import Contents, Manifest
from tltlab.traces.trace import Trace, read

ROOT = Path(__file__).parents[2]
NAMES = {"ngram", "suffix", "learned", "hybrid"}
ALLOWED = {
    # What the folder of a drafter is taken for: the command's word, not a drafter's name.
    "runtime/drafter/offline/annotate.py: method == 'learned'",
}
HEAD = LearnedSpec(method="eagle", model="head")
RENAMED = [("recent", SuffixSpec(window=4), "suffix"), ("mine", NgramSpec(), "ngram"), ("mtp", HEAD, "learned")]
ROOFLINE = load_costs("h100-qwen2.5-7b")
LINEAR = LinearCosts(
    base_s=4e-3, per_request_s=0, per_token_s=1e-4, per_context_s=0, sd_base_s=1e-3, sd_idle_s=0, draft_level_s=1e-3,
    draft_level_per_request_s=0,
)  # fmt: skip


def compared(source):
    """Comparisons with a drafter's name in a piece of source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = (part for side in (node.left, *node.comparators) for part in ast.walk(side))
            if NAMES & {part.value for part in sides if isinstance(part, ast.Constant)}:
                yield ast.unparse(node)


def test_no_code_compares_the_name_of_a_drafter():
    samples = ("d == 'ngram'", "d in ('ngram', x)", "'suffix' in names", "d not in frozenset({'learned'})")
    assert [list(compared(sample)) for sample in samples] == [[sample] for sample in samples]
    files = [p for part in ("tltlab", "sim", "runtime", "tests/bench") for p in sorted((ROOT / part).rglob("*.py"))]
    files = [p for p in files if p.relative_to(ROOT).parts[:3] != ("tests", "bench", "tests")]
    found = {f"{p.relative_to(ROOT)}: {text}" for p in files for text in compared(p.read_text())}
    assert found == ALLOWED


@pytest.mark.parametrize(("name", "spec", "standard"), RENAMED)
def test_a_renamed_drafter_costs_the_same(name, spec, standard):
    drafters = Drafters({name: spec})
    own, known = Strategy.chain(name, 4), Strategy.chain(standard, 4)
    for costs in (ROOFLINE, LINEAR, ScaledCosts.wrapping(ROOFLINE, overhead=0.5)):
        assert costs.iteration(own, drafters=drafters) == costs.iteration(known)
    chosen = []
    for strategy, registry in ((own, drafters), (known, STANDARD)):
        goodput = Goodput([strategy], ROOFLINE, epsilon=0.0, rng=np.random.default_rng(0))
        goodput.drafts_with(registry)
        states = [StepState(rl_step=0, batch=b) for b in (1, 16, 256, 1024)]
        chosen.append([as_choice(goodput, goodput.choose(state)).strategy.speculates for state in states])
    assert chosen[0] == chosen[1]


def renamed(trace, old, name, **manifest):
    """The trace with a drafter of another name."""
    tables = {}
    for at in ("workload", "outcomes", "iterations", "steps", "acceptance"):
        table = trace.table(at)
        named = table is not None and "drafter" in table
        tables[at] = table.assign(drafter=table["drafter"].replace(old, name)) if named else table
    return Trace.from_tables(trace.manifest.model_copy(update=manifest), tables)


@pytest.mark.parametrize(
    ("folder", "old", "traits"), [("tiny", "ngram", TEXT), ("h100-smoke", "learned", NETWORK)], ids=["text", "network"]
)
def test_a_trace_states_what_its_drafters_are(folder, old, traits, tmp_path):
    trace = read(ROOT / "traces" / folder)
    other = renamed(trace, old, "mine", drafters={"mine": traits})
    other.write(tmp_path / "mine")
    other = read(tmp_path / "mine")
    assert other.drafters["mine"] == traits
    rows = [recorded_rows(t.iterations, t.steps) for t in (trace, other)]
    known, own = calibrate(trace), calibrate(other)
    seconds = [fit.costs.identified_s(each) for fit, each in zip((known, own), rows, strict=True)]
    assert seconds[0] == pytest.approx(seconds[1])
    mine = own.acceptance
    assert mine is not None
    assert known.acceptance is not None
    assert mine.copies["mine"] is not traits.has_network
    assert other.drafters.own == {"mine": traits} == other.manifest.drafters
    for depth in known.acceptance.bands[0].drafters_by_depth[old]:
        for batch in (1, 100):
            curves = [m.at(batch).curve(Strategy.chain(n, depth)) for m, n in ((mine, "mine"), (known.acceptance, old))]
            assert curves[0].tolist() == curves[1].tolist()
    if not traits.has_network:
        fits = [fit_kind(t, "siblings").model for t in (trace, other)]
        assert fits[0].model_copy(update={"drafter": "mine"}) == fits[1]
    unset = renamed(trace, old, "mine")
    for fit in (calibrate, fit_kind):
        with refused(ConfigError, naming=("'mine'", "drafters", "manifest.json")):
            fit(unset)


def test_a_fitted_file_marks_copying_drafters():
    depth = FittedDepth(accepted=(0.6, 0.0, 0.0, 0.0, 0.4), drafted=4.0)
    deeper = Strategy.chain("mine", 6)
    copies = MeasuredAcceptance.at_any_batch({"mine": {4: depth}}, copies={"mine": True})
    standard = MeasuredAcceptance.at_any_batch({"suffix": {4: depth}})
    assert copies.curve(deeper).tolist() == standard.curve(Strategy.chain("suffix", 6)).tolist()
    assert copies.outside(deeper) == ["draft_depth"]
    network = MeasuredAcceptance.at_any_batch({"mine": {4: depth}}, copies={"mine": False})
    assert network.curve(Strategy.chain("mine", 2)).tolist() == pytest.approx([0.4, 0.4])
    with refused(ConfigError, naming=(17, "'mine'")):
        network.curve(Strategy.chain("mine", 17))
    with refused(ConfigError, naming=("copies", "'mine'")):
        load_acceptance({"kind": "by-batch", "bands": [{"max_batch": None, "drafters": {"mine": {4: depth}}}]})


def test_unknown_drafters_and_trees_of_text_are_refused():
    drafters = Drafters({"recent": SuffixSpec(), "both": HybridSpec(first="recent", otherwise="learned")})
    drafters.check(
        [NO_SPECULATION, Strategy.chain("both", 2), Strategy("learned", 2, 2, 7), Strategy.chain("recent", 2)]
    )
    assert (drafters["both"].has_network, drafters["both"].made_by) == (True, "workers")
    for strategy, naming in (
        (Strategy.chain("ngarm", 4), ("'ngarm'", "'ngram'")),
        (Strategy.chain("resent", 4), ("'resent'", "'recent'")),
        (Strategy("suffix", 2, 2, 7), ("'suffix'", "top_k", 2)),
        (Strategy("both", 2, 2, 7), ("'both'", 2)),
    ):
        with refused(ConfigError, naming=naming):
            drafters.check([NO_SPECULATION, strategy])
        with refused(AssertionError, naming=naming[:1]):
            check_selector(Fixed(strategy))
    check_selector(Fixed(Strategy.chain("recent", 4)), drafters)


def test_manifest_without_own_drafters_does_not_name_them():
    manifest = Manifest(kind="recorded")
    assert "drafters" not in Contents(manifest=manifest).to_json()
    described = manifest.model_copy(update={"drafters": {"mtp": NETWORK}})
    assert '"has_network": true' in Contents(manifest=described).to_json()
