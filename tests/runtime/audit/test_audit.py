"""The audit of losslessness: its statistics on made-up samples, its exact distributions, and real engines."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tltlab.errors import ConfigError, RunError
from tltlab.runtime.audit import vllm_tests
from tltlab.runtime.audit.cases import COMPOSITIONS, DEPTHS, DRAFTERS, FILTERS, TEMPERATURES, cases, covering
from tltlab.runtime.audit.exact import ExactModel, Sampling, probabilities
from tltlab.runtime.audit.models import EOS, TinyModels
from tltlab.runtime.audit.statistics import ChiSquare, cells_check, combined, pooled, ranks_check
from tltlab.runtime.audit.vllm_tests import ExpectedDifference, Outcome, differences, outcomes_of, run_vllm_tests, text
from tltlab.runtime.cli.audit import audit, vllm_settings

PROMPT = (0, 1, 2, 3, 1, 0)


@pytest.fixture(scope="session")
def exact(tiny_models: TinyModels) -> ExactModel:
    return ExactModel(tiny_models.target)


def draw(joint: dict[tuple[int, ...], float], num: int, rng: np.random.Generator) -> Counter[tuple[int, ...]]:
    counts = rng.multinomial(num, list(joint.values()))
    return Counter({cell: int(n) for cell, n in zip(joint, counts, strict=True) if n})


def test_samples_of_the_distribution_itself_fail_as_often_as_is_said(exact: ExactModel):
    joint = exact.joint(PROMPT, Sampling(temperature=1.0), 4)
    rng = np.random.default_rng(0)
    p_values = np.array([cells_check(draw(joint, 2048, rng), joint).p_value for _ in range(1500)])
    for level in (0.5, 0.1, 0.01):
        assert np.mean(p_values < level) == pytest.approx(level, abs=4 * np.sqrt(level / 1500))


def test_a_shift_of_five_percent_is_caught_and_the_stated_power_holds(exact: ExactModel):
    joint = exact.joint(PROMPT, Sampling(temperature=0.9), 3)
    rng = np.random.default_rng(1)
    half = set(list(joint)[::2])
    mass = sum(joint[cell] for cell in half)
    check = cells_check(draw(joint, 8192, rng), joint)
    assert check.detectable_tv(1e-4) < 0.05
    # The hardest kind: the same factor for every cell of one half, another for the other half.
    tv = check.detectable_tv(1e-4)
    shifted = {c: p * (1 + tv / mass if c in half else 1 - tv / (1 - mass)) for c, p in joint.items()}
    caught = [cells_check(draw(shifted, 8192, rng), joint).p_value < 1e-4 for _ in range(400)]
    assert np.mean(caught) > 0.87


def test_what_cannot_happen_fails_whatever_the_rest():
    assert cells_check({(0,): 500, (1,): 500, (2,): 1}, {(0,): 0.5, (1,): 0.5}).p_value == 0.0
    impossible = ranks_check(np.array([0, 1]), np.array([[0.5, 0.5], [1.0, 0.0]]), np.array([0, 0]))
    assert impossible.p_value == 0.0


def test_rare_cells_are_pooled_until_they_expect_five():
    assert pooled(np.array([50.0, 3.0, 2.0, 1.0])).tolist() == [1, 0, 0, 0]
    assert pooled(np.array([50.0, 30.0, 1.0])).tolist() == [1, 0, 0]
    assert pooled(np.array([50.0, 30.0])).tolist() == [1, 0]
    assert pooled(np.array([1.0, 1.0])).tolist() == [0, 0]
    # Three samples are too few to tell anything by; that is no failure.
    few = cells_check({(0,): 1, (1,): 2}, {(0,): 0.3, (1,): 0.7})
    assert (few.dof, few.p_value, few.detectable_tv(1e-3)) == (0, 1.0, 1.0)


def test_independent_checks_add_up():
    both = combined([ChiSquare(statistic=3.0, dof=2, num_samples=10), ChiSquare(statistic=4.0, dof=5, num_samples=20)])
    assert both == ChiSquare(statistic=7.0, dof=7, num_samples=30)


def token_ranks(rng: np.random.Generator, temperature: float, num: int) -> ChiSquare:
    """Ranks of `num` tokens sampled at `temperature` from random distributions, checked as if it were 1."""
    logits = -np.sort(-rng.normal(size=(num, 5)), axis=1)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    tempered = np.exp(logits / temperature)
    cumulative = np.cumsum(tempered, axis=1) / tempered.sum(1, keepdims=True)
    ranks = np.minimum((rng.random((num, 1)) > cumulative).sum(1), 4)
    return ranks_check(ranks, p, np.arange(num) % 10)


def test_ranks_fail_as_often_as_is_said_and_show_a_temperature_off_by_a_fifth():
    rng = np.random.default_rng(2)
    p_values = np.array([token_ranks(rng, 1.0, 4_000).p_value for _ in range(300)])
    assert np.mean(p_values < 0.1) == pytest.approx(0.1, abs=4 * np.sqrt(0.1 / 300))
    assert all(token_ranks(rng, 1.2, 20_000).p_value < 1e-5 for _ in range(5))


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.6), Sampling(temperature=1.3, top_p=0.9, top_k=3)])
def test_the_exact_joint_is_what_sampling_token_by_token_gives(exact: ExactModel, sampling: Sampling):
    joint = exact.joint(PROMPT, sampling, 3)
    assert sum(joint.values()) == pytest.approx(1.0)
    assert all(len(cell) == 3 or cell[-1] == EOS for cell in joint)
    drawn = Counter(map(tuple, exact.sample(PROMPT, sampling, 1024, 3, np.random.default_rng(3))))
    assert cells_check(drawn, joint).p_value > 1e-3


def test_the_exact_joint_is_the_product_of_a_generic_models_conditionals(exact: ExactModel):
    joint = exact.joint(PROMPT, Sampling(temperature=0.7), 2)
    with torch.no_grad():
        first, second = (
            torch.softmax(exact.model(torch.tensor([ids])).logits[0, -1].double() / 0.7, -1)
            for ids in (PROMPT, (*PROMPT, 2))
        )
    assert joint[2, 3] == pytest.approx(float(first[2] * second[3]), rel=1e-6)
    assert joint[EOS,] == pytest.approx(float(first[EOS]), rel=1e-6)


def test_filters_are_those_of_vllm():
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    logits = torch.randn(200, 5, generator=torch.Generator().manual_seed(0)) * 2
    for top_p, top_k in FILTERS:
        ours, sure = probabilities(logits, Sampling(temperature=0.9, top_p=top_p, top_k=top_k))
        k = torch.full((200,), top_k or 5)
        theirs = apply_top_k_top_p_pytorch((logits / 0.9).clone(), k, torch.full((200,), top_p)).softmax(-1)
        assert sure.all()
        assert ours == pytest.approx(theirs.numpy(), abs=1e-6)


def test_a_top_p_cut_that_rounding_could_move_is_not_sure():
    p = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.3, 0.2]])
    _, sure = probabilities(p.log(), Sampling(temperature=1.0, top_p=0.9))
    assert sure.tolist() == [False, True]


def test_tokens_after_a_weight_update_follow_the_new_weights_over_the_old_keys_and_values(tiny_models: TinyModels):
    before, after = ExactModel(tiny_models.target), ExactModel(tiny_models.updated)
    response = [1, 3, 0, 2, 2]
    # An update that changes nothing, and one so early that only the prompt's keys and values are old.
    same = before.logits_after_update(before, PROMPT, response, 3)
    assert same.numpy() == pytest.approx(before.logits(PROMPT, [response])[0, 3:].numpy(), abs=1e-5)
    mixed = after.logits_after_update(before, PROMPT, response, 1)
    assert np.abs(mixed.numpy() - after.logits(PROMPT, [response])[0, 1:].numpy()).max() > 0.1


def test_the_default_cases_bring_every_two_values_together():
    found = [c for c in cases(list(DRAFTERS), fast=False) if c.composition != "greedy"]
    for case in found:
        assert case.depth in DEPTHS
    assert {(c.drafter, c.composition) for c in found} == {(d, c) for d in DRAFTERS for c in COMPOSITIONS}
    assert {(c.drafter, c.depth) for c in found} == {(d, k) for d in DRAFTERS for k in DEPTHS}
    assert {(c.depth, c.sampling.temperature) for c in found} == {(k, t) for k in DEPTHS for t in TEMPERATURES}
    assert len(found) < 70
    assert covering(["ab", "xyz"], 1) == [("a", "x"), ("b", "y"), ("a", "z")]


@pytest.mark.parametrize("given", ["max_num_seqs", "=3", "speculative_config=ngram"])
def test_engine_settings_that_are_none_are_refused(given: str):
    with pytest.raises(ConfigError, match=r"--vllm"):
        vllm_settings([given])


@pytest.fixture(scope="session")
def run() -> Callable[..., tuple[int, dict]]:
    def invoke(*args: str) -> tuple[int, dict]:
        result = CliRunner().invoke(audit, [*args, "--json"])
        return result.exit_code, json.loads(result.stdout)

    return invoke


FAST = ("--fast", "--samples", "512", "--drafter", "ngram")
QUICK = ("batch", "mixed", "queue", "switching", "greedy")


@pytest.mark.engine
def test_the_engine_is_lossless(run: Callable[..., tuple[int, dict]]):
    code, found = run(*FAST)
    assert [case["reason"] for case in found["cases"]] == [None] * len(found["cases"])
    assert (code, found["passed"]) == (0, True)
    sampled = [case for case in found["cases"] if case["composition"] != "greedy"]
    assert {case["composition"] for case in sampled} <= set(COMPOSITIONS)
    for case in sampled:
        assert case["statistic"] < case["threshold"]
        assert case["num_accepted"] > 0
        assert case["logprob_error"] < 5e-5
        assert 0 < case["detectable_tv"] < 0.5


@pytest.mark.engine
def test_the_stock_cpu_sampler_is_not(run: Callable[..., tuple[int, dict]], monkeypatch: pytest.MonkeyPatch):
    # A few kinds of batches show it; one request at a time and updates take longest.
    quick = [case for case in cases(["ngram"], fast=True) if case.composition in QUICK]
    monkeypatch.setattr("tltlab.runtime.audit.run.cases", lambda drafters, fast: quick)
    code, found = run(*FAST, "--without-fix")
    assert (code, found["passed"]) == (1, False)
    # Greedy verification reads no temperature: it is right even so.
    assert {case["verdict"] for case in found["cases"] if case["temperature"] > 0} & {"failed"}


REPORT = """<testsuites><testsuite>
<testcase classname="tests.v1.core.test_x" file="tests/v1/core/test_x.py" name="test_a[1]" time="0.1"/>
<testcase file="tests/v1/core/test_x.py" name="test_b"><failure message="AssertionError: 1 != 2&#10;more"/></testcase>
<testcase file="tests/v1/core/test_x.py" name="test_c"><skipped message="no GPU"/></testcase>
<testcase classname="tests.v1.core.test_y" name="tests.v1.core.test_y"><error message="collection"/></testcase>
</testsuite></testsuites>"""


def test_vllms_own_tests_are_compared_by_name(tmp_path: Path):
    (tmp_path / "report.xml").write_text(REPORT)
    stock = outcomes_of(tmp_path / "report.xml")
    x = "tests/v1/core/test_x.py"
    assert {name: outcome.result for name, outcome in stock.items()} == {
        f"{x}::test_a[1]": "passed",
        f"{x}::test_b": "failed",
        f"{x}::test_c": "skipped",
        "tests.v1.core.test_y::tests.v1.core.test_y": "error",
    }
    assert stock[f"{x}::test_b"].message == "AssertionError: 1 != 2"
    ours = {
        **stock,
        f"{x}::test_a[1]": Outcome(result="failed", message="depths"),
        f"{x}::test_d": stock[f"{x}::test_b"],
    }
    policy = {**stock, f"{x}::test_a[1]": Outcome(result="failed")}
    known = [ExpectedDifference(tests=r"test_a\b", sides=("policy",), outcome="failed", why="it drafts")]
    found = differences({"stock": stock, "ours": ours, "policy": policy}, known)
    assert [(d.side, d.test.partition("::")[2], d.stock, d.ours, d.why) for d in found] == [
        ("ours", "test_a[1]", "passed", "failed", ""),
        ("ours", "test_d", "missing", "failed", ""),
        ("policy", "test_a[1]", "passed", "failed", "it drafts"),
    ]
    assert differences({"stock": stock, "ours": stock}, known) == []


def test_an_explanation_is_of_one_outcome_and_one_side():
    stock, ours = {"t::a": Outcome(result="passed")}, {"t::a": Outcome(result="error")}
    known = [
        ExpectedDifference(tests="a", sides=("policy",), outcome="error", why=""),
        ExpectedDifference(tests="a", sides=("ours",), outcome="failed", why="x"),
    ]
    assert [d.why for d in differences({"stock": stock, "ours": ours}, known)] == [""]


@pytest.mark.parametrize(
    ("there", "sentence"),
    [
        ((), "has no tests/conftest.py: give the folder that vLLM's sdist unpacks to"),
        (("tests/conftest.py", "pyproject.toml", "tests/v1"), "has the tests of vLLM 0.1.0, and vLLM"),
    ],
)
def test_only_tests_of_the_installed_vllm_are_run(tmp_path: Path, there: tuple[str, ...], sentence: str):
    for name in there:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "PKG-INFO").write_text("Name: vllm\nVersion: 0.1.0\n")
    with pytest.raises(ConfigError, match=sentence):
        run_vllm_tests(tmp_path, tests=["tests/v1"], progress=print)


def sdist(folder: Path, test: str) -> Path:
    """What vLLM's sdist unpacks to, with one test of ours in it."""
    (folder / "tests" / "v1").mkdir(parents=True)
    for name in ("tests/conftest.py", "pyproject.toml"):
        (folder / name).write_text("")
    (folder / "tests" / "v1" / "test_x.py").write_text(test)
    return folder


@pytest.mark.engine
def test_tests_that_fail_on_every_side_are_no_difference_and_no_error(
    tmp_path: Path, run: Callable[..., tuple[int, dict]], monkeypatch: pytest.MonkeyPatch
):
    """Such as one that asks for a GPU, or for a model that is not here. With a policy, our side is all that it is."""
    monkeypatch.setattr(vllm_tests, "SIDES", {side: vllm_tests.SIDES[side] for side in ("stock", "policy")})
    source = sdist(tmp_path, "import sys\ndef test_a():\n    assert 'vllm' not in sys.modules\n")
    code, report = run("vllm-tests", str(source), "--test", "tests/v1")
    assert (code, report["passed"], report["differences"]) == (0, True, [])
    assert [counts["failed"] for counts in report["counts"].values()] == [1, 1]
    assert "none of these tests passes here with vLLM as it is" in text(report)


def test_tests_that_cannot_be_collected_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = sdist(tmp_path / "sdist", "import no_such_module_anywhere\n")
    # Importing vLLM takes seconds: the side's process has as little of it as it needs.
    for name, source_text in (
        ("__init__", ""),
        ("transformers_utils/repo_utils", "def with_retry(a=2, b=2, c=()): ..."),
    ):
        (tmp_path / "vllm" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "vllm" / f"{name}.py").write_text(source_text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"])))
    with pytest.raises(RunError, match=r"vLLM as it is: pytest could not run .*: .*no_such_module_anywhere"):
        run_vllm_tests(source, tests=["tests/v1"], progress=print)


SDIST = os.environ.get("TLTLAB_VLLM_TESTS", "")


@pytest.mark.engine
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not SDIST, reason="TLTLAB_VLLM_TESTS names no folder with vLLM's sdist")
def test_vllms_own_tests_come_out_alike(run: Callable[..., tuple[int, dict]]):
    code, report = run("vllm-tests", SDIST, "--test", "tests/v1/core/test_async_scheduler.py")
    assert code == 0, text(report)
    assert report["counts"]["stock"]["passed"] > 10
