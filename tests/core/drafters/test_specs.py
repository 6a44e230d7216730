import subprocess
import sys

import pytest

from tltlab.drafters.base import Draft
from tltlab.drafters.specs import SYSTEM_DRAFTERS, HybridSpec, NgramSpec, SuffixSpec


@pytest.mark.parametrize(
    "spec",
    [
        NgramSpec(min_match=1, max_match=3, history_mib=7.0),
        SuffixSpec(
            scopes=("group", "request"), window=7, max_match=9, max_draft=5, min_match=3, min_token_prob=0.25,
            length="match", match_factor=1.5, live=False,
        ),
    ],
)  # fmt: skip
def test_every_setting_of_a_spec_reaches_the_drafter(spec):
    if spec.kind == "suffix":
        pytest.importorskip("arctic_inference")
    drafter, settings = spec.make(), spec.model_dump(exclude={"kind"})
    assert {name: getattr(drafter, name) for name in settings} == settings


def test_a_suffix_spec_is_read_without_its_library():
    code = """
import sys
sys.modules["arctic_inference"] = None
from tltlab.drafters.specs import SYSTEM_DRAFTERS, SuffixSpec
from tltlab.errors import ConfigError
try:
    SuffixSpec().make()
except ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'tltlab[suffix]'" in done.stdout


def drafts_of(name, earlier, sibling):
    """What a system's drafter proposes after "1 2": an earlier RL step had `earlier`, a running sibling `sibling`."""
    drafter = SYSTEM_DRAFTERS[name].make()
    drafter.remember((0, "p", 0, 0), [], earlier)
    drafter.begin(1)
    drafter.open((1, "p", 0, 0), [])
    drafter.extend((1, "p", 0, 0), sibling)
    drafter.open((1, "p", 1, 0), [])
    drafter.extend((1, "p", 1, 0), [1, 2])
    return drafter.propose((1, "p", 1, 0), 1).tokens


@pytest.mark.parametrize(
    ("name", "uses_siblings", "uses_history"),
    [
        ("tlt-base", True, False),
        ("seer", True, False),
        ("das", True, True),
        ("srt", True, True),
        ("histospec", False, True),
        ("suffix-decoding", True, True),
    ],
)
def test_systems_differ_in_what_they_search(name, uses_siblings, uses_history):
    pytest.importorskip("arctic_inference")
    assert drafts_of(name, [0], [1, 2, 3]) == [3] * uses_siblings
    assert drafts_of(name, [1, 2, 3], [0]) == [3] * uses_history


def test_a_hybrid_takes_promising_model_free_drafts():
    hybrid = HybridSpec(min_expected=1.5)
    assert hybrid.choose(Draft([1, 2], 1.8), other_expected=1.7)
    assert hybrid.choose(Draft([1, 2], 1.5), other_expected=1.5)
    assert not hybrid.choose(Draft([1, 2], 1.8), other_expected=1.9)
    assert not hybrid.choose(Draft([1, 2], 1.4), other_expected=0.0)
    assert not HybridSpec(min_expected=0).choose(Draft([], 0.0), other_expected=0.0)
