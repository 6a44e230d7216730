"""What goes wrong in an engine: nothing is lost, nothing comes twice, and the message says what to do."""

from contextlib import closing
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.refused import refused
from tltlab.errors import ConfigError, RunError
from tltlab.runtime.engine.engine import Engine
from tltlab.runtime.engine.generation import EngineDied
from tltlab.runtime.engine.weights import BucketSlots
from tltlab.strategy import Strategy

from .asking import CONTEXT, fixed, raising, request, switching, texts
from .asking import groups_of_four as requests

pytestmark = pytest.mark.engine
SUFFIX = fixed("suffix", 6)
ALONE = {}
"""What requests get that run one by one and are never preempted."""


@pytest.fixture(scope="module")
def narrow(random_model):
    """An iteration of it has room for few drafts; in the end it dies."""
    room = {"max_num_seqs": 16, "max_num_batched_tokens": 48, "long_prefill_token_threshold": 16}
    engine = Engine(str(random_model), max_draft_depth=6, vllm_args={"max_model_len": CONTEXT, **room})
    yield engine
    engine.close()


@pytest.mark.parametrize("policy", [SUFFIX, switching(Strategy.chain("suffix", 6), Strategy.chain("ngram", 3))])
def test_preempted_requests_come_back_whole(cramped, policy, preempted):
    plenty = requests(12, 60)
    if not ALONE:
        cramped.set_policy(None)
        alone = [cramped.generate([one], rl_step=0, temperature=0.0).responses[0] for one in plenty]
        ALONE.update({r.key: r.token_ids for r in alone})
    cramped.set_policy(policy)
    rollout = cramped.generate(plenty, rl_step=0, temperature=0.0)
    assert preempted, "the test needs preemption"
    assert {r.key: r.token_ids for r in rollout.responses} == ALONE
    # Drafts kept beyond a cap may add to the log.
    assert sum(r["num_generated"] for r in rollout.iterations.to_pylist()) >= sum(
        len(r.token_ids) for r in rollout.responses
    )
    assert cramped.control.live == {}


def test_aborted_requests_come_back_with_what_they_have(cramped):
    cramped.set_policy(SUFFIX)
    asked = [*requests(3, 5), *requests(4, 60, rl_step=1)]
    rollout = cramped.generate(asked, rl_step=0, temperature=0.9, until=lambda ended: len(ended) >= 3)
    assert [r.key for r in rollout.responses] == [r.key for r in asked]
    assert [r.finish_reason for r in rollout.responses] == ["length"] * 3 + ["abort"] * 4
    assert all(0 < len(r.token_ids) < 60 for r in rollout.responses[3:])
    assert cramped.control.live == {}
    again = cramped.generate(requests(4, 8), rl_step=0, temperature=0.9)
    assert [len(r.token_ids) for r in again.responses] == [8] * 4


def test_response_that_reaches_end_of_context_stops_there(cramped):
    cramped.set_policy(SUFFIX)
    rollout = cramped.generate(requests(2, 500), rl_step=0, temperature=0.9)
    assert [len(r.token_ids) for r in rollout.responses] == [CONTEXT - 6] * 2
    assert [r.finish_reason for r in rollout.responses] == ["length"] * 2


BAD = {"key": (0, "bad", 0, 0)}


@pytest.mark.parametrize(
    ("bad", "facts"),
    [
        (BAD | {"prompt_token_ids": [1, *[5] * (CONTEXT - 1)]}, (CONTEXT,)),
        ({}, ()),
        (BAD | {"prompt_token_ids": [1, 999]}, ()),
        (BAD | {"max_response_tokens": 0}, (1,)),
    ],
    ids=["no room", "the same twice", "no such word", "nothing asked"],
)
def test_a_request_that_is_refused_leaves_nothing_running(cramped, bad, facts):
    fine = request("fine", 0, [1, 5], 30)
    with refused(ConfigError, naming=facts):
        cramped.generate([fine, replace(fine, **bad)], rl_step=0, temperature=0.9)
    (other,) = cramped.generate([replace(fine, max_response_tokens=4)], rl_step=0, temperature=0.9).responses
    assert len(other.token_ids) == 4
    assert cramped.control.live == {}


def test_interrupted_rollout_does_not_answer_for_next_one(cramped):
    with pytest.raises(KeyboardInterrupt):
        cramped.generate(requests(2, 30), rl_step=0, temperature=0.9, until=raising(KeyboardInterrupt()))
    again = cramped.generate(requests(2, 4), rl_step=0, temperature=0.9)
    assert [len(r.token_ids) for r in again.responses] == [4, 4]


def test_an_engine_without_drafter_refuses_drafter_weights(cramped):
    with refused(ConfigError):
        cramped.update_draft_weights([])


def test_narrow_iteration_leaves_nothing_of_earlier_choice(narrow):
    # A prompt of 17 tokens in chunks of 16: the last one looks like decoding.
    rollout = narrow.generate(requests(2, 40, prompt_tokens=17), rl_step=0, temperature=0.9)
    assert [row["prefill_tokens"] for row in rollout.iterations.to_pylist() if row["prefill_tokens"]] == [32, 2]
    last = rollout.iterations.to_pylist()[1]
    for response in rollout.responses:
        assert last["t_start"] < response.t_first_token <= last["t_start"] + last["duration"]
    narrow.set_policy(switching(Strategy.chain("suffix", 6), Strategy.chain("ngram", 1), hold_iterations=1))
    rows = narrow.generate(requests(16, 60), rl_step=0, temperature=0.0).iterations.to_pylist()
    assert any(row["batch"] < 16 for row in rows[4:-20]), "the test needs requests that find no room"
    assert all(row["num_drafted"] <= row["batch"] * row["draft_depth"] for row in rows)


def test_a_cut_off_transfer_is_waited_for(narrow, random_model, bad):
    def said():
        return texts(narrow.generate(requests(2, 8), rl_step=0, temperature=0.0))

    narrow.set_policy(None)
    good = load_file(random_model / "model.safetensors")
    plain = said()
    with closing(BucketSlots.fit(good.values(), 64 << 10)) as slots:
        for number, bucket in enumerate(slots.filled(bad.items())):
            if number == 0:
                narrow.weights.start()
            narrow.weights.load(bucket=asdict(bucket))
            with refused(EngineDied):
                said()
            with refused(EngineDied):
                narrow.update_weights(good.items(), 2)
        assert number > 3, "the test needs several buckets"
        narrow.weights.finish("1")
        # Layers that two buckets share have what lay in the first of them before it was filled again.
        halves = said()
        narrow.update_weights(bad.items(), 2)
        assert halves == said() != plain

        narrow.update_weights(good.items(), 3)
        assert said() == plain
        buckets = slots.filled(good.items())
        narrow.weights.start()
        narrow.weights.load(bucket=asdict(next(buckets)))
        with refused(RunError, naming=("1",)):
            narrow.weights.finish("4")
        # Layers of which nothing came would be what they were.
        with refused(EngineDied, naming=("1",)):
            said()
        for bucket in buckets:
            narrow.weights.load(bucket=asdict(bucket))
        narrow.weights.finish("4")
        assert said() == plain


def test_engine_that_dies_hands_over_what_is_whole(narrow, monkeypatch):
    scheduler = narrow.llm.llm_engine.engine_core.engine_core.scheduler
    stock, iterations = scheduler.update_from_output, iter(range(100))

    def dies(*args):
        if next(iterations) == 12:
            raise MemoryError("played")
        return stock(*args)

    monkeypatch.setattr(scheduler, "update_from_output", dies)
    narrow.set_policy(None)
    with refused(EngineDied, naming=("2", "5", "MemoryError")) as caught:
        narrow.generate([*requests(3, 5), *requests(2, 60, rl_step=1)], rl_step=0, temperature=0.9)
    assert [len(r.token_ids) for r in caught.value.responses] == [5, 5, 5]
    assert caught.value.lost == [(1, "p0", 0, 0), (1, "p0", 1, 0)]


WRONG_WEIGHTS = {
    "no.such.weight": (64, ()),
    "model.layers.1.mlp.down_proj.weight": (5, ()),
    "model.layers.0.self_attn.k_proj.weight": (64, ("4096",)),
}


@pytest.mark.parametrize("name", WRONG_WEIGHTS)
def test_weights_that_are_not_models_end_engine(narrow, name):
    rows, why = WRONG_WEIGHTS[name]
    # As if it had never failed, which for loading weights is so: that only the last of these leaves under way.
    narrow._death = narrow.weights.unusable = ""
    with refused(ConfigError, naming=("none",)):
        narrow.update_weights([], 1)
    with refused(RunError, naming=why):
        narrow.update_weights([(name, torch.zeros(rows, 64))], 1)
    with refused(EngineDied, naming=("another",)):
        narrow.generate(requests(1, 2), rl_step=0, temperature=0.9)


class Settled:
    """A `vllm.LLM` as far as its configuration: more of it takes seconds to start."""

    def __init__(self, scheduler_cls, weight_transfer_config, **args):
        from vllm.engine.arg_utils import EngineArgs

        core = SimpleNamespace(shutdown=lambda: None)
        self.llm_engine = SimpleNamespace(vllm_config=EngineArgs(**args).create_engine_config(), engine_core=core)


def test_engines_that_a_policy_cannot_follow_are_refused(random_model, monkeypatch):
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        with refused(ConfigError, naming=(f"{name}=2",)):
            Engine(str(random_model), vllm_args={name: 2})
    monkeypatch.setattr("vllm.LLM", Settled)
    with refused(ConfigError):
        Engine(str(random_model), max_draft_depth=0, vllm_args={"async_scheduling": True, "max_model_len": CONTEXT})


def test_a_model_that_is_not_there_is_refused(tmp_path):
    with refused(ConfigError):
        Engine(str(tmp_path / "nothing"), max_draft_depth=0)
