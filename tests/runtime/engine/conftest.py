"""Two engines that many tests share, since starting one is what costs: a roomy one, and one that is short of memory.

vLLM takes down what all engines of a process share when one of them closes, and starts no engine core in another
process while one is open here. So tests of the same engine run in a row, and it is closed after the last of them.
"""

import pytest

from tltlab.coordination.canary import CanaryConfig
from tltlab.drafters.specs import DEFAULT_DRAFTERS, HybridSpec, LearnedSpec
from tltlab.runtime.engine.engine import Engine

from ..small_models import loaded
from .asking import BLOCK, CONTEXT, preempted_by

SHARED = ("roomy", "cramped")
_open = {}


def _shared_by(item):
    return next((name for name in SHARED if name in getattr(item, "fixturenames", ())), None)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: (*SHARED, None).index(_shared_by(item)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    yield
    if (name := _shared_by(item)) in _open and _shared_by(nextitem) != name:
        _open.pop(name).close()


def _shared(name, model, **arguments):
    """The shared engine, without a policy, with nothing in its history, and the same randomness for every test."""
    if name not in _open:
        _open[name] = Engine(str(model), **arguments)
    engine = _open[name]
    engine.set_policy(None)
    engine.guard_drafter(CanaryConfig())
    engine.forget()
    engine.reseed([7])
    return engine


@pytest.fixture
def roomy(random_model):
    """The target is its own draft model: greedily, every one of its drafts is kept."""
    learned = LearnedSpec(method="draft_model", model=str(random_model), fallback="suffix")
    hybrid = HybridSpec(first="suffix", otherwise="learned")
    drafters = {**DEFAULT_DRAFTERS, "learned": learned, "hybrid": hybrid}
    args = {"max_num_seqs": 512, "max_model_len": 256}
    return _shared("roomy", random_model, drafters=drafters, max_draft_depth=8, vllm_args=args)


@pytest.fixture
def cramped(random_model):
    """It shares prefixes, prefills in chunks, and its KV cache holds few requests, so that it preempts."""
    room = {"block_size": BLOCK, "num_gpu_blocks_override": 14, "max_num_batched_tokens": 40}
    args = {"max_model_len": CONTEXT, "max_num_seqs": 16, **room}
    return _shared("cramped", random_model, max_draft_depth=6, vllm_args=args)


@pytest.fixture
def preempted(cramped, monkeypatch):
    """The requests that the cramped engine preempts."""
    return preempted_by(cramped, monkeypatch)


@pytest.fixture(scope="module")
def good(random_model):
    """The random model's weights."""
    return dict(loaded(random_model).state_dict())


@pytest.fixture(scope="module")
def bad(good):
    """The same with a wrong LM head."""
    return {name: -value if name == "lm_head.weight" else value for name, value in good.items()}
