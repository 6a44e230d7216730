"""What `make test-gpu` asks of a GPU, most risk first; without one every test is skipped for the same one reason."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ORDER = ("test_trainer_cuda", "test_engine_cuda", "test_smoke")
"""Of modules: attention and losses; capture, weights, swap, graphs and seam; one step of a recipe."""


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    first = {name: place for place, name in enumerate(ORDER)}
    mine = sorted(
        (item for item in items if item.path.parent == here), key=lambda item: first.get(item.path.stem, len(ORDER))
    )
    items[:] = [*(item for item in items if item.path.parent != here), *mine]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    # Before their own marks are looked at, and not in a fixture: so all tests share one line of the summary.
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch sees none")


@pytest.fixture(scope="session")
def vllm_on_cuda():
    if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("ray") is None:
        pytest.skip("needs vLLM and Ray: pip install 'tltlab[runtime]'")
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        pytest.skip("needs a CUDA build of vLLM, this one is for " + current_platform.device_name)


@pytest.fixture(scope="session")
def model(vllm_on_cuda, tmp_path_factory):
    """A small model made here, with its prompts."""
    folder = tmp_path_factory.mktemp("models") / "small"
    run_tltlab("make-model", "--size", "small", "--out", str(folder))
    return folder


def run_tltlab(*arguments):
    subprocess.run([sys.executable, "-m", "tltlab", *arguments], check=True, timeout=600)
