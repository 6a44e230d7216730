"""Engines that vLLM schedules asynchronously, under every kind of policy: their tokens are those without drafts."""

from contextlib import closing

import pytest

from bench.vllm.asynchronous import asynchronous
from tltlab.drafters.specs import DEFAULT_DRAFTERS, HybridSpec, LearnedSpec
from tltlab.policies.bandits import Ucb1
from tltlab.policies.policy import Policy
from tltlab.runtime.engine.engine import Engine
from tltlab.strategy import NO_SPECULATION, Strategy

from ..asking import CONTEXT, fixed, kept_and_refused, preempted_by, raising, said_once, switching, texts
from ..asking import groups_of_four as requests

pytestmark = pytest.mark.engine

ROOM = {"block_size": 32, "num_gpu_blocks_override": 14}
ARGS = {"max_model_len": CONTEXT, "max_num_seqs": 16, **ROOM}
NGRAM, SUFFIX = (Strategy.chain(name, depth) for name, depth in (("ngram", 3), ("suffix", 6)))
POLICIES = {
    "none": None, "ngram": fixed("ngram"), "suffix": fixed("suffix", 6), "mixed": switching(NGRAM, SUFFIX),
    "now and then": switching(NGRAM, hold_iterations=1),
}  # fmt: skip
WITH_HEAD = {
    "learned": fixed("learned"), "hybrid": fixed("hybrid"),
    "all": switching(*(Strategy.chain(name, 4) for name in ("learned", "hybrid", "suffix", "ngram"))),
}  # fmt: skip
KINDS = [
    {}, {"max_tokens": 9}, {"repetition_penalty": 1.4}, {"temperature": 1.0, "seed": 5}, {"stop": ["w7", "w11 w3"]},
    {"stop_token_ids": [9, 17]}, {"frequency_penalty": 0.5, "presence_penalty": 0.5}, {"logit_bias": {9: 2.0}},
    {"bad_words": ["w5", "w9 w1"]}, {"allowed_token_ids": [5, 6, 7, 8]}, {"min_tokens": 20, "stop": ["w2"]},
    {"structured_outputs": {"regex": "(w1 )*"}}, {"logprobs": 2, "max_tokens": 30}, {"ignore_eos": False},
]  # fmt: skip


def asked(kinds=KINDS):
    """What a program asks of its engine: prompts, and settings of each kind twice."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    prompts, settings = [], []
    for n, kind in enumerate([*kinds, *kinds]):
        usual = {"temperature": 0.0, "max_tokens": 50, "ignore_eos": True} | kind
        if "structured_outputs" in usual:
            usual["structured_outputs"] = StructuredOutputsParams(**usual["structured_outputs"])
        prompts.append({"prompt_token_ids": [1, *(4 + (n * k + k) % 20 for k in range(6))]})
        settings.append(SamplingParams(**usual))
    return prompts, settings


def answers(engine):
    outputs = engine.llm.generate(*asked(), use_tqdm=False)
    return [(list(each.outputs[0].token_ids), each.outputs[0].finish_reason) for each in outputs]


def drafting(model, **more):
    return Engine(str(model), max_draft_depth=6, vllm_args=ARGS, **more)


@pytest.fixture(scope="module")
def plain(random_model):
    """Greedy responses, answers to requests of every kind, and drafts, of engines that are scheduled synchronously."""
    with closing(drafting(random_model)) as engine:
        alone = texts(engine.generate(requests(12, 60), rl_step=0, temperature=0.0)), answers(engine)
        engine.set_policy(POLICIES["suffix"])
        return *alone, kept_and_refused(engine.generate(requests(4, 60), rl_step=0, temperature=0.0))


@pytest.fixture(scope="module")
def late(random_model, plain):
    """It takes drafts of the host, and preempts."""
    with asynchronous(), closing(drafting(random_model)) as engine:
        assert engine.control.overlapped
        yield engine


def check(engine, policies, plain):
    for name, policy in policies.items():
        engine.set_policy(policy)
        engine.forget()
        rollout = engine.generate(requests(12, 60), rl_step=0, temperature=0.0)
        assert texts(rollout) == plain[0], name
        kept, refused = kept_and_refused(rollout)
        assert (kept > 50) == (name != "none"), name
        assert refused >= 0, name
        assert answers(engine) == plain[1], name
        assert not engine.control.failure


def test_tokens_are_those_without_drafts(late, plain, monkeypatch):
    """Of requests of every kind, in one batch."""
    preempted = preempted_by(late, monkeypatch)
    check(late, POLICIES, plain)
    assert len(preempted) > 10


def test_as_many_drafts_are_kept(late, plain):
    late.set_policy(POLICIES["suffix"])
    late.forget()
    rollout = late.generate(requests(4, 60), rl_step=0, temperature=0.0)
    assert kept_and_refused(rollout) == plain[2]
    rows = rollout.iterations.to_pylist()
    assert sum(row["num_generated"] for row in rows) == sum(map(len, texts(rollout)))


def test_aborted_requests_come_back_with_what_they_have(late):
    late.set_policy(POLICIES["suffix"])
    both = [*requests(3, 5), *requests(4, 60, rl_step=1)]
    rollout = late.generate(both, rl_step=0, temperature=0.9, until=lambda ended: len(ended) >= 3)
    assert [r.finish_reason for r in rollout.responses] == ["length"] * 3 + ["abort"] * 4
    assert late.control.live == {}
    # Nothing is in flight between rollouts: a resume empties the prefix cache.
    assert not late.control.tracker.in_flight
    assert late.llm.reset_prefix_cache()


def test_decisions_can_be_repeated(late):
    """By an engine in the same state, whatever its times are: iterations in flight belong to their rollout."""
    late.set_policy(Policy(selector=Ucb1.Spec(strategies=(NO_SPECULATION, NGRAM, SUFFIX))))
    late.forget()
    late.generate(requests(4, 20), rl_step=0, temperature=0.9)
    state = late.snapshot()
    first, again = [], []
    for rollouts in (first, again):
        late.restore(state)
        late.replay([row for rollout in first for row in rollout.decisions.to_pylist()])
        rollouts += [late.generate(requests(8, 40, rl_step=step), rl_step=step, temperature=0.9) for step in (1, 2)]
    assert list(map(texts, again)) == list(map(texts, first))
    assert sum(map(kept_and_refused, first), ()) == sum(map(kept_and_refused, again), ())


def test_a_drafter_that_raises_ends_no_request(late, plain, monkeypatch, caplog):
    late.set_policy(POLICIES["ngram"])
    with monkeypatch.context() as patch:
        drafter = late.control.drafters._drafter("ngram")
        patch.setattr(drafter, "propose_all", raising(ValueError("no drafts today")))
        assert answers(late) == plain[1]
    assert "no drafts today" in said_once(caplog)


def test_drafts_of_host_and_device_mix(random_model, plain, late):
    late.close()
    learned = LearnedSpec(method="draft_model", model=str(random_model), fallback="suffix")
    drafters = {**DEFAULT_DRAFTERS, "learned": learned, "hybrid": HybridSpec(first="suffix", otherwise="learned")}
    with asynchronous(), closing(drafting(random_model, drafters=drafters)) as engine:
        check(engine, WITH_HEAD, plain)
