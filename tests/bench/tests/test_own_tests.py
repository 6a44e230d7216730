"""vLLM's own tests, run with ours in vLLM's place: outcomes are compared by name, and what differs is explained."""

import json
import os

import pytest
from typer.testing import CliRunner

from bench.app import app
from bench.vllm import own_tests
from bench.vllm.own_tests import ExpectedDifference, Outcome, differences, outcomes_of, run_vllm_tests, text
from tests.refused import refused
from tltlab.errors import ConfigError


def run(*args):
    result = CliRunner().invoke(app, ["vllm-tests", *args, "--json"])
    return result.exit_code, json.loads(result.stdout)


REPORT = """<testsuites><testsuite>
<testcase classname="tests.v1.core.test_x" file="tests/v1/core/test_x.py" name="test_a[1]" time="0.1"/>
<testcase file="tests/v1/core/test_x.py" name="test_b"><failure message="AssertionError: 1 != 2&#10;more"/></testcase>
<testcase file="tests/v1/core/test_x.py" name="test_c"><skipped message="no GPU"/></testcase>
<testcase classname="tests.v1.core.test_y" name="tests.v1.core.test_y"><error message="collection"/></testcase>
</testsuite></testsuites>"""


def test_vllms_own_tests_are_compared_by_name(tmp_path):
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
        f"{x}::test_a[1]": Outcome("failed", "depths"),
        f"{x}::test_d": stock[f"{x}::test_b"],
    }
    policy = {**stock, f"{x}::test_a[1]": Outcome("failed")}
    known = [ExpectedDifference(tests=r"test_a\b", sides=("policy",), outcome="failed", why="it drafts")]
    found = differences({"stock": stock, "ours": ours, "policy": policy}, known)
    assert [(d.side, d.test.partition("::")[2], d.stock, d.ours, d.why) for d in found] == [
        ("ours", "test_a[1]", "passed", "failed", ""),
        ("ours", "test_d", "missing", "failed", ""),
        ("policy", "test_a[1]", "passed", "failed", "it drafts"),
    ]
    assert differences({"stock": stock, "ours": stock}, known) == []


@pytest.mark.parametrize(
    ("there", "sentence"),
    [
        ((), ("tests/conftest",)),
        (("tests/conftest.py", "pyproject.toml", "tests/v1"), ("0", "1")),
    ],
)
def test_only_tests_of_the_installed_vllm_are_run(tmp_path, there, sentence):
    for name in there:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "PKG-INFO").write_text("Name: vllm\nVersion: 0.1.0\n")
    with refused(ConfigError, naming=sentence):
        run_vllm_tests(tmp_path, tests=["tests/v1"], progress=print)


def sdist(folder, test):
    """Files of vLLM's sdist, with one test of tltlab."""
    (folder / "tests" / "v1").mkdir(parents=True)
    for name in ("tests/conftest.py", "pyproject.toml"):
        (folder / name).write_text("")
    (folder / "tests" / "v1" / "test_x.py").write_text(test)
    return folder


@pytest.mark.engine
def test_failures_on_every_side_are_no_difference(tmp_path, monkeypatch):
    """Such as one that asks for a GPU, or for a model that is not here. With a policy, our side is all that it is."""
    monkeypatch.setattr(own_tests, "SIDES", {side: own_tests.SIDES[side] for side in ("stock", "policy")})
    source = sdist(tmp_path, "import sys\ndef test_a():\n    assert 'vllm' not in sys.modules\n")
    code, report = run(str(source), "--test", "tests/v1")
    assert (code, report["passed"], report["differences"]) == (0, True, [])
    assert [counts["failed"] for counts in report["counts"].values()] == [1, 1]
    assert "none of these tests passes here with vLLM as it is" in text(report)


SDIST = os.environ.get("TLTLAB_VLLM_TESTS", "")


@pytest.mark.engine
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not SDIST, reason="TLTLAB_VLLM_TESTS names no folder with vLLM's sdist")
def test_vllms_own_tests_come_out_alike():
    code, report = run(SDIST, "--test", "tests/v1/core/test_async_scheduler.py")
    assert code == 0, text(report)
    assert report["counts"]["stock"]["passed"] > 10
