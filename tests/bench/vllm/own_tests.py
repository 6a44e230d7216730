"""vLLM's own tests of scheduling and rejection sampling, run with vLLM as it is and with ours in its place.

The tests are those of the installed version, from an sdist that the user has: none of their code is here. Each side is
its own process, and a test that comes out otherwise than in vLLM as it is must stand in `EXPECTED`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple
from xml.etree import ElementTree

from bench.harness import Progress, Table, Text, shown
from tltlab.errors import ConfigError, RunError
from tltlab.runtime.engine.vllm import installed_vllm

TESTS = (
    "tests/v1/core/test_scheduler.py",
    "tests/v1/core/test_async_scheduler.py",
    "tests/v1/spec_decode",
    "tests/v1/sample/test_rejection_sampler.py",
)
"""Tests that are run by default."""

Side = Literal["stock", "ours", "policy"]
"""vLLM as it is; with our plugin; and with our schedulers, under a policy that drafts as deep as the engine can."""

SIDES: Mapping[Side, str] = {
    "stock": "vLLM as it is",
    "ours": "our plugin, without a policy",
    "policy": "ours, with a policy that always drafts",
}
SIDE = "TLTLAB_VLLM_TESTS_SIDE"
RESULTS = ("passed", "failed", "error", "skipped")


class ExpectedDifference(NamedTuple):
    """Tests whose names the regular expression `tests` finds come out as `outcome` on `sides`, because of `why`."""

    tests: str
    why: str
    sides: tuple[Side, ...] = ("policy",)
    outcome: str = "failed"


EXPECTED = (
    ExpectedDifference(
        r"::test_abort_request_when_structured_output_fsm_cannot_advance$",
        "the test makes a scheduler without calling its constructor, so ours has none of its attributes",
    ),
    ExpectedDifference(
        r"::test_(sync_)?diffusion_|::test_pooling_|::test_async_scheduling_pp_",
        "a policy refuses diffusion and pooling models and pipeline parallelism, in a sentence; record= does not",
    ),
    ExpectedDifference(
        r"::test_spec_decode_padding_",
        "under a policy vLLM pads no first decode step with placeholder drafts: the policy chooses who drafts",
    ),
)
"""Every difference that is known, the first that fits counts."""


class Outcome(NamedTuple):
    """Result of a test, one of `RESULTS`, and the first line of its message."""

    result: str
    message: str = ""


class Difference(NamedTuple):
    """A test that comes out otherwise on a `side` than in vLLM as it is; `why` is "" where nobody knows."""

    side: Side
    test: str
    stock: str
    ours: str
    why: str
    message: str


def differences(
    outcomes: Mapping[Side, Mapping[str, Outcome]], expected: Sequence[ExpectedDifference] = EXPECTED
) -> list[Difference]:
    """Tests that differ from the side "stock", and those expected to differ that do not, in order.

    >>> stock, ours = {"t::a": Outcome("failed")}, {"t::a": Outcome("passed")}
    >>> [d.ours for d in differences({"stock": stock, "ours": ours}, ())]
    ['passed']
    """
    stock = outcomes["stock"]
    different = []
    for side, results in outcomes.items():
        for test in dict.fromkeys((*stock, *results)):
            before, after = (each.get(test, Outcome("missing")) for each in (stock, results))
            if before.result != after.result:
                of = (e for e in expected if side in e.sides and e.outcome == after.result and re.search(e.tests, test))
                why = next((e.why for e in of), "")
                different.append(Difference(side, test, before.result, after.result, why, after.message))
    return different


def run_vllm_tests(
    source: Path, *, tests: Sequence[str] = TESTS, limit_s: float = 1800.0, progress: Progress
) -> dict[str, Any]:
    """Run `tests` of the sdist unpacked at `source` on every side and compare; each side may take `limit_s` seconds.

    ConfigError for a folder without the tests of the vLLM that is installed, RunError where pytest cannot run them.
    """
    _check(source, tests)
    outcomes: dict[Side, dict[str, Outcome]] = {}
    seconds: dict[Side, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        # Without the sources next to them: what is installed is tested.
        for name in ("tests", "pyproject.toml"):
            (place / name).symlink_to((source / name).resolve())
        stand_in_for_hub(place / "hub")
        for side, name in SIDES.items():
            progress(f"{name} ...")
            started = time.perf_counter()
            outcomes[side] = _run(place, side, tests, limit_s)
            seconds[side] = time.perf_counter() - started
            progress(f"{name}: {_tally(outcomes[side])}, {seconds[side]:.0f} s")
    different = differences(outcomes)
    return {
        "passed": all(difference.why for difference in different),
        "vllm": installed_vllm(),
        "tests": list(tests),
        "counts": {side: _tally(results) for side, results in outcomes.items()},
        "seconds": seconds,
        "differences": [difference._asdict() for difference in different],
    }


def _check(source: Path, tests: Sequence[str]) -> None:
    missing = [name for name in ("tests/conftest.py", "pyproject.toml", *tests) if not (source / name).exists()]
    if missing:
        raise ConfigError(
            f"{source} has no {missing[0]}: give the folder that vLLM's sdist unpacks to "
            f"(pip download --no-deps --no-binary :all: vllm=={installed_vllm()})"
        )
    info = source / "PKG-INFO"
    stated = re.search(r"^Version: (\S+)", info.read_text(), re.MULTILINE) if info.is_file() else None
    if stated is not None and stated[1].split("+")[0] != installed_vllm().split("+")[0]:
        raise ConfigError(f"{source} has the tests of vLLM {stated[1]}, and vLLM {installed_vllm()} is installed")


def _run(place: Path, side: Side, tests: Sequence[str], limit_s: float) -> dict[str, Outcome]:
    report = place / f"{side}.xml"
    environment = os.environ | {
        "HF_HOME": str(place),
        "HF_HUB_CACHE": str(place / "hub"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "VLLM_PLUGINS": "" if side == "stock" else "tltlab",
        SIDE: side,
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", __name__, f"--junitxml={report}"]
    try:
        ended = subprocess.run(
            [*command, "--continue-on-collection-errors", "-o", "junit_family=xunit1", *tests],
            cwd=place, env=environment, capture_output=True, text=True, timeout=limit_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise RunError(f"{SIDES[side]}: vLLM's tests took more than {limit_s:.0f} s") from None
    outcomes = outcomes_of(report) if report.is_file() else {}
    # Tests may all fail, as long as they do on every side; what pytest cannot even begin tells nothing of vLLM.
    if ended.returncode not in (0, 1) or all(outcome.result == "error" for outcome in outcomes.values()):
        lines = [line for line in (ended.stdout + ended.stderr).splitlines() if line.strip()]
        error = next((line for line in reversed(lines) if re.match(r"E? *\w*Error", line)), lines[-1] if lines else "")
        raise RunError(f"{SIDES[side]}: pytest could not run vLLM's tests; it says: {error[:300]}")
    return outcomes


def stand_in_for_hub(hub: Path) -> None:
    """Write what vLLM's tests of scheduling ask Hugging Face's hub for: a default OPT with next to no weights."""
    # The process of a side, which imports this module, need not wait for these.
    import torch
    from safetensors.torch import save_file
    from transformers import OPTConfig

    from tltlab.runtime.audit.models import save_tokenizer

    place = hub / "models--facebook--opt-125m"
    snapshot = place / "snapshots" / "0"
    OPTConfig(architectures=["OPTForCausalLM"]).save_pretrained(snapshot)
    save_file({"lm_head.weight": torch.zeros(1)}, snapshot / "model.safetensors")
    save_tokenizer(snapshot)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0")


def outcomes_of(report: Path) -> dict[str, Outcome]:
    """How each test of a JUnit report came out, by "file::name"."""
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        result, message = "passed", ""
        for kind, name in (("error", "error"), ("failure", "failed"), ("skipped", "skipped")):
            if (element := case.find(kind)) is not None:
                result, message = name, (element.get("message") or "").strip().partition("\n")[0][:200]
        file = case.get("file") or case.get("classname") or ""
        outcomes[f"{file}::{case.get('name')}"] = Outcome(result, message)
    return outcomes


def pytest_configure() -> None:
    """As a plugin of pytest, in the process of a side: put ours in the place of vLLM's."""
    from vllm.transformers_utils import repo_utils

    # It would ask the hub for a file that is not there, wait for two seconds and ask again.
    repo_utils.with_retry.__defaults__ = (1, 0, ())
    side = os.environ.get(SIDE, "stock")
    if side != "stock":
        # It imports torch, and more.
        from tltlab.runtime.engine.vllm.plugin import register

        register()
    if side == "policy":
        in_place_of_vllms()


def pytest_collection_modifyitems(items: Sequence[Any]) -> None:
    """A scheduler leaves nothing behind that would take a second to clean up after each test."""
    for item in items:
        if "tests/v1/core/" in item.nodeid:
            item.add_marker("skip_global_cleanup")


def in_place_of_vllms() -> None:
    """Put our schedulers where vLLM's modules have theirs, for as long as this process lives.

    Each of them has a policy that always drafts as deep as its engine can.
    """
    from vllm.v1.core.sched import async_scheduler, scheduler

    from tltlab.drafters.specs import LearnedSpec
    from tltlab.policies.policy import load_policy
    from tltlab.runtime.engine.vllm import scheduler as ours
    from tltlab.runtime.engine.vllm.options import Attachment
    from tltlab.strategy import NO_SPECULATION, Strategy

    with suppress(ImportError):
        # Where there are some: these stay over vLLM's own.
        import_module("vllm.v1.core.sched.diffusion_scheduler")

    class Always(Attachment):
        """Whatever the configuration says."""

        @classmethod
        def of_engine(cls, config: Any) -> Attachment:
            depth = config.num_speculative_tokens if config.speculative_config is not None else 0
            strategy = Strategy.chain("learned", depth) if depth else NO_SPECULATION
            learned = LearnedSpec(method="draft_model", model="of/the-engine")
            return Attachment(policy=load_policy(strategy), drafters={"learned": learned}, max_draft_depth=depth)

    vars(ours).update(Attachment=Always)
    # The tests ask for a class by name, and a CPU's configuration says that scheduling is synchronous.
    ours.PolicyScheduler._check_class = lambda self, config: None  # type: ignore[method-assign]
    scheduler.Scheduler, async_scheduler.AsyncScheduler = ours.PolicyScheduler, ours.AsyncPolicyScheduler


def _tally(results: Mapping[str, Outcome]) -> dict[str, int]:
    names = [outcome.result for outcome in results.values()]
    return {name: names.count(name) for name in RESULTS}


TEXT: Text = (
    Table(
        "counts",
        "side: {name}; passed: {passed}; failed: {failed}; error: {error}; skipped: {skipped}",
    ),
    Table(
        "different",
        "differs: {test}; tests: {tests}; side: {side}; stock: {stock}; ours: {ours}; why: {why}; message: {message}",
        left=7,
    ),
    "vLLM {vllm}: {passed:every difference is explained|DIFFERENCES ARE UNEXPLAINED}",
)


def text(report: Mapping[str, Any]) -> str:
    """The report as tables; what is explained alike on a side is one row."""
    different: dict[Any, dict[str, Any]] = {}
    for each in report["differences"]:
        first = different.setdefault((each["side"], each["why"] or each["test"]), {**each, "tests": 0})
        first |= {"why": each["why"] or "UNEXPLAINED", "tests": first["tests"] + 1}
    lines = [shown({**report, "different": list(different.values())}, TEXT)]
    if not report["counts"]["stock"]["passed"]:
        lines.append("none of these tests passes here with vLLM as it is, so that ours differs in nothing says little")
    return "\n".join(lines)
