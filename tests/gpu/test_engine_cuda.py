"""Engines on a CUDA device under replayed graphs: what is captured of them, weights, swaps, graphs and the seam."""

from contextlib import closing

import pytest
import torch

from tltlab.drafters.specs import LearnedSpec
from tltlab.policies.policy import Policy
from tltlab.policies.specs import ExploreSpec
from tltlab.runtime.engine.engine import Engine
from tltlab.runtime.engine.graphs import GIB, plan_graphs
from tltlab.strategy import NO_SPECULATION, Strategy

from ..runtime.engine.asking import fixed, request, texts

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.usefixtures("vllm_on_cuda")]

BATCH = 16
ARGUMENTS = {
    "max_model_len": 512, "max_num_seqs": BATCH, "gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": GIB,
}  # fmt: skip


def exploring(drafter, *depths):
    chains = (Strategy.chain(drafter, depth) for depth in depths)
    return Policy(selector=ExploreSpec(strategies=(NO_SPECULATION, *chains)))


SUFFIX, LEARNED = exploring("suffix", 2, 6), exploring("learned", 1, 4)


@pytest.fixture(scope="module")
def v1(model):
    """Model-free drafts of any lengths, on vLLM's V1 runner."""
    plan = plan_graphs(SUFFIX, BATCH, runner="V1", any_lengths=True)
    sleeps = ARGUMENTS | {"enable_sleep_mode": True}
    with closing(Engine(str(model), max_draft_depth=6, graphs=plan, vllm_args=sleeps)) as engine:
        yield engine


@pytest.fixture(scope="module")
def v2(model):
    """A drafter that is the target itself, on vLLM's V2 runner: all of its drafts are kept."""
    drafters = {"learned": LearnedSpec(method="draft_model", model=str(model))}
    plan = plan_graphs(LEARNED.model_copy(update={"drafters": drafters}), BATCH, fill=True)
    made = Engine(str(model), drafters=drafters, max_draft_depth=4, graphs=plan, vllm_args=ARGUMENTS)
    with closing(made) as engine:
        yield engine


@pytest.fixture(params=["v1", "v2"])
def engine(request):
    return request.getfixturevalue(request.param)


def generate(engine, policy=None):
    """Two responses to each of three prompts."""
    engine.set_policy(policy)
    engine.llm.reset_prefix_cache()
    prompts = [[1, 4 + n, 5, 6, 4 + n, 5] for n in range(3)]
    asked = [request(f"p{n // 2}", n % 2, prompts[n // 2], 48 - n) for n in range(6)]
    return engine.generate(asked, rl_step=0, temperature=0.0)


def policy_of(engine):
    return LEARNED if "learned" in engine.drafters else SUFFIX


def decoding(rollout):
    return [dict(row) for row in rollout.iterations.to_pylist() if not row["prefill_tokens"]]


def weights_of(model):
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).state_dict())


def negated(weights):
    return {name: -value if name.endswith("norm.weight") else value for name, value in weights.items()}


def test_drafters_would_learn_from_wrong_states(engine, monkeypatch):
    """Every captured row is, bit by bit, one that the engine computed logits from, where it computed them."""
    model = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model
    compute = model.compute_logits
    seen = set()

    def watched(hidden, *args, **kwargs):
        seen.update(row.numpy().tobytes() for row in hidden.detach().view(torch.int16).cpu())
        return compute(hidden, *args, **kwargs)

    monkeypatch.setattr(model, "compute_logits", watched)
    captured = []
    engine.capture(captured.append)
    rollout = generate(engine, policy_of(engine))
    engine.capture(None)
    assert len(captured) == len(rollout.responses)
    # The rows of a prompt but its last are never sampled from.
    rows = [row for s in captured for row in s.hidden[max(s.prompt_tokens - 1, 0) :]]
    wrong = sum(row.contiguous().view(torch.int16).numpy().tobytes() not in seen for row in rows)
    assert not wrong, f"{wrong} of {len(rows)} captured rows were never sampled from"
    assert len(seen) > len(rows) / 2, "the test needs rows that differ"


def test_speculation_would_change_what_is_reported(engine):
    plain, drafted = generate(engine), generate(engine, policy_of(engine))
    assert sum(row["num_accepted"] for row in drafted.iterations.to_pylist()) > 0
    # Two tokens may be as likely as each other in bfloat16: then the texts part, and say nothing after that.
    same = [a == b for a, b in zip(texts(plain), texts(drafted), strict=True)]
    assert sum(same) >= 0.8 * len(same)


def test_engines_would_continue_with_old_weights(engine, model):
    plain, weights = texts(generate(engine)), weights_of(model)
    engine.update_weights(negated(weights).items(), 1)
    assert texts(generate(engine)) != plain
    engine.update_weights(weights.items(), 2)
    assert texts(generate(engine)) == plain


def test_colocated_engines_would_wake_with_other_weights(v1, model):
    plain, awake = texts(generate(v1)), torch.cuda.mem_get_info()[0]
    v1.sleep()
    assert torch.cuda.mem_get_info()[0] > awake + GIB / 2
    v1.wake_up()
    assert texts(generate(v1)) == plain
    # Nothing is kept on the host, and new weights come before there is a cache again.
    v1.sleep(2)
    v1.wake_up(["weights"])
    v1.update_weights(weights_of(model).items(), 1)
    v1.wake_up(["kv_cache"])
    assert texts(generate(v1)) == plain


def test_drafters_would_draft_with_old_weights_after_swap(v2, model):
    """Drafts are all kept while the drafter is the target, few once it is another, all again when it is put back."""
    deep, weights = fixed("learned", 4), weights_of(model)

    def kept():
        rows = generate(v2, deep).iterations.to_pylist()
        return sum(row["num_accepted"] for row in rows) / sum(row["num_drafted"] for row in rows)

    assert kept() > 0.9
    v2.update_draft_weights(negated(weights).items())
    assert kept() < 0.5
    v2.update_draft_weights(weights.items())
    assert kept() > 0.9


def test_planned_graphs_would_take_more_than_predicted(engine, model):
    from tltlab.costs.profiles import find_model
    from tltlab.runtime.engine.graphs import memory_bytes

    captured = engine.captured_graphs()
    policy = policy_of(engine).model_copy(update={"drafters": engine.drafters})
    plan = plan_graphs(policy, BATCH, runner=captured.runner, any_lengths=True, fill=True)
    assert captured.num_bytes is not None
    shape = find_model(str(model))
    assert captured.num_bytes < memory_bytes(plan, shape.layers, shape.vocab)
    assert captured.full == plan.full_graphs()
    assert captured.piecewise == plan.piecewise_graphs()


def test_a_depth_would_run_without_a_full_graph(engine):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("full graphs for drafts of any lengths need FlashAttention 3 (Hopper)")
    rows = decoding(generate(engine)) + decoding(generate(engine, policy_of(engine)))
    assert len({row["draft_depth"] for row in rows}) > 2
    assert {row["graph"] for row in rows} == {"full"}
