"""What a dry run says: memory, and what it refuses; sums worked out by hand."""

import json
import re
from dataclasses import asdict

import pytest

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.hardware import gpu
from tltlab.runtime.recipe.dry_run import plan_of
from tltlab.runtime.recipe.engines import start_timeout_s
from tltlab.runtime.recipe.gpus import weight_transport
from tltlab.runtime.recipe.recipe import Recipe


def recipe(model="Qwen/Qwen2.5-7B", **sections):
    fields = {"model": model, "reward": "parity:reward", "data": {"train": "t.jsonl", "max_prompt_tokens": 1024}}
    return Recipe.model_validate(fields | sections)


def parts(plan, phase, where=None):
    """Bytes of the parts at a place, by default the first that has this phase."""
    found = next(found for found in plan.memory if found.phase == phase and where in (None, found.where))
    return {part.name: part.num_bytes for part in found.parts}


RANK_GPU, HOST = "a trainer rank's GPU", "the driver's host"


def of_a_rank(max_response_tokens=3072, **train):
    """What a trainer rank's GPU holds as it trains, beside one worker's on a node of eight."""
    rollout = {"num_workers": 1, "max_response_tokens": max_response_tokens}
    plan = plan_of(recipe(rollout=rollout, train=train, cluster={"gpus_per_node": 8, "gpu": "H100"}))
    return parts(plan, "training", RANK_GPU)


@pytest.mark.parametrize(
    ("sections", "way"),
    [
        ({}, "host"),
        ({"cluster": {"placement": "colocated"}}, "host"),
        ({"cluster": {"placement": "colocated", "gpus_per_node": 2}, "train": {"ranks": 2}}, "ipc"),
        ({"rollout": {"gpus_per_worker": 0.3}, "train": {"gpus": 0.4}, "cluster": {"gpus_per_node": 1}}, "ipc"),
        # Two shares of a GPU may be of two.
        ({"rollout": {"gpus_per_worker": 0.3}, "train": {"gpus": 0.4}, "cluster": {"gpus_per_node": 2}}, "host"),
        ({"cluster": {"gpus_per_node": 3}}, "nccl"),
        ({"cluster": {"gpus_per_node": 3, "weights": "host"}}, "host"),
        ({"cluster": {"gpus_per_node": 3}, "train": {"backend": "gloo"}}, "host"),
    ],
)
def test_weights_go_the_shortest_way(sections, way):
    assert weight_transport(recipe(**sections)) == way


def test_a_trainer_needs_16_bytes_per_parameter():
    shape = {"layers": 28, "hidden": 3584, "mlp": 18944, "queries": 3584, "keys": 512, "vocab": 152064}
    embedding = shape["vocab"] * shape["hidden"]
    layer = shape["hidden"] * (2 * shape["queries"] + 2 * shape["keys"] + 3 * shape["mlp"])
    params = shape["layers"] * layer + 2 * embedding
    assert plan_of(recipe()).num_params == params
    training = of_a_rank(ranks=2, tokens_per_microbatch=8192)
    assert sum(training[name] for name in ("master weights", "Adam moments", "gradients")) == pytest.approx(8 * params)
    assert training["gathered weights"] == pytest.approx(2 * (2 * embedding + 2 * layer))
    per_token = 2 * (4 * 3584 + 2 * 3584 + 2 * 512 + 4 * 18944) + 8 * 3584
    assert training["activations"] == pytest.approx(8192 * 28 * per_token)
    assert "reference model" not in training
    assert of_a_rank(ranks=2, kl_coef=0.1)["reference model"] == pytest.approx(2 * params)


def test_the_kv_cache_is_what_is_left():
    rollout = {"num_workers": 1, "tensor_parallel_size": 4, "max_response_tokens": 31744}
    vllm = {"vllm": {"gpu_memory_utilization": 0.4}}
    plan = plan_of(recipe(rollout=rollout | vllm, cluster={"gpus_per_node": 5, "gpu": "H100"}))
    weights = 2 * plan.num_params / 4
    rollout = parts(plan, "rollout")
    # Logits of 1024 requests in several copies take more than a layer of 8192 tokens.
    activations = 14 * 1024 * 152064
    assert activations > 2 * 8192 * (3 * 18944 / 4 + 4 * 3584)
    assert rollout["engine activations"] == activations
    kv = 0.4 * gpu("H100").memory_bytes - weights - 1e9 - activations - rollout["CUDA graphs"]
    assert rollout["KV cache"] == pytest.approx(kv)
    # 4 KV heads of 128 over 4 GPUs: one each, keys and values in two bytes.
    held = int(kv // (32768 * 28 * 2 * 128 * 2))
    assert any({str(held), "192"} <= set(re.findall(r"\d+", note)) for note in plan.notes)


def test_colocated_only_fits_while_the_other_one_sleeps():
    def plan(**more):
        rollout = {"num_workers": 8, "vllm": {"gpu_memory_utilization": 0.9}}
        train = {"ranks": 8, "activation_checkpointing": True, **more}
        cluster = {"placement": "colocated", "gpus_per_node": 8, "gpu": "H100"}
        return plan_of(recipe(rollout=rollout, train=train, cluster=cluster))

    assert plan().fits is False
    assert plan(offload=True).fits is True
    assert "KV cache" not in parts(plan(), "training"), "the engine sleeps while trainers train"
    asleep = parts(plan(offload=True), "training", HOST)["engine asleep"]
    assert asleep == pytest.approx(8 * 2 * plan().num_params), "at level 1 its weights are kept on the host"
    offloaded = parts(plan(offload=True), "rollout", HOST)
    assert offloaded["master weights"] + offloaded["Adam moments"] == pytest.approx(12 * plan().num_params)


def test_what_fits_without_a_margin_is_warned_of():
    def of(tokens):
        rollout = {"num_workers": 1, "max_response_tokens": 3072}
        train = {"ranks": 2, "activation_checkpointing": True, "tokens_per_microbatch": tokens}
        return plan_of(recipe(rollout=rollout, train=train, cluster={"gpus_per_node": 3, "gpu": "H100"}))

    enough, tight, little = map(of, (8192, 20480, 65536))
    assert (enough.fits, tight.fits, little.fits) == (True, False, False)
    assert (enough.tight, little.tight) == (None, None)
    assert f"on {RANK_GPU} in training" in tight.tight
    assert [line for line in tight.text().splitlines() if "10%" in line and tight.tight in line]


@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_a_drafter_is_counted_beside_every_engine(placement):
    def with_drafter(**vllm):
        rollout = {"num_workers": 4, "policy": "beg-mab-learned", "max_response_tokens": 3072, "vllm": vllm}
        return plan_of(
            recipe(
                rollout=rollout,
                train={"ranks": 4, "offload": placement == "colocated", "activation_checkpointing": True},
                cluster={"placement": placement, "gpus_per_node": 4 if placement == "colocated" else 8, "gpu": "H100"},
                drafter={"ages": 3, "buffer": {"max_bytes": 1 << 30}},
            )
        )

    plan = with_drafter(gpu_memory_utilization=0.7)
    # A decoder layer, what joins two hidden states, and a norm.
    head = 3584 * (2 * 3584 + 2 * 512 + 3 * 18944) + 2 * 3584**2 + 3584
    weights = {"drafter, training": 16, "drafter, kept state": 12, "drafter, heads served": 4 * 4}
    for phase in ("rollout", "idle training", "training", "sync"):
        found = parts(plan, phase)
        assert {name: found[name] / head for name in weights} == pytest.approx(weights), phase
        assert found["drafter's target"] == 2 * 2 * 152064 * 3584
        assert ("drafter activations" in found) == (phase == "idle training")
        assert ("drafter, serving" in found) == (placement == "separate" or phase != "training")
    rollout = parts(plan, "rollout")
    assert rollout["KV cache, drafter"] == pytest.approx(rollout["KV cache"] / 28), "one more layer's keys and values"
    host = parts(plan, "rollout", HOST)
    # On one node, four of each.
    assert host["captured states"] == pytest.approx(4 * 48 * 4096 * 2 * 3584)
    assert host["drafter buffer"] == pytest.approx(4 * 2**30)
    assert host["drafter checkpoint"] == pytest.approx(4 * 12 * head)
    assert plan.fits
    assert not with_drafter().fits, "vLLM takes 0.92 of a GPU for itself"


@pytest.mark.parametrize(
    ("minibatches", "facts"),
    [(7, ("128", "2 have 19", "5 have 18", "8")), (8, None), (1, None), (300, ("only 128",))],
    ids=["uneven", "even", "one", "more"],
)
def test_minibatches_that_do_not_divide_are_warned_of(random_model, minibatches, facts):
    sections = {"rollout": {"prompts_per_step": 16, "group_size": 8}, "train": {"minibatches": minibatches}}
    notes = [note for note in plan_of(recipe(model=str(random_model), **sections)).notes if "train.minibatches" in note]
    assert len(notes) == (facts is not None)
    assert all(fact in note for note in notes for fact in facts or ())


@pytest.mark.parametrize(
    ("sections", "facts"),
    [
        ({"train": {"steps": 3, "minibatches": 2, "warmup_steps": 7}}, ("train.warmup_steps = 7", " 6 ")),
        ({"train": {"correction": "none"}, "rollout": {"top_p": 0.9}}, ("rollout.top_p = 0.9", "nothing corrects")),
        ({"rollout": {"top_p": 0.9}}, ("rollout.top_p = 0.9", "importance weights are biased")),
    ],
)
def test_settings_without_effect_are_said(random_model, sections, facts):
    notes = plan_of(recipe(model=str(random_model), **sections)).notes
    assert any(all(fact in note for fact in facts) for note in notes)


def test_a_plan_is_json(random_model):
    plan = plan_of(recipe(model=str(random_model)))
    found = json.loads(json.dumps(asdict(plan), allow_nan=False))
    assert found["fits"] is None
    assert found["num_params"] == 2 * (64 * (4 * 64 + 3 * 128)) + 2 * 24 * 64
    assert found["memory"][0]["total_bytes"] == pytest.approx(sum(p["num_bytes"] for p in found["memory"][0]["parts"]))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": "someone/unheard-of"}, ('someone/unheard-of',)),
        ({"cluster": {"gpus_per_node": 3, "weights": "ipc"}}, ("ipc", "GPU")),
        ({"cluster": {"weights": "nccl"}}, ("nccl",)),
        ({"cluster": {"gpu": "H100"}}, ('GPU',)),
        ({"cluster": {"gpu": "H1", "gpus_per_node": 8}}, ('H1', 'GPU')),
        ({"rollout": {"tensor_parallel_size": 3, "num_workers": 1}, "cluster": {"gpus_per_node": 8}},
         ('tensor_parallel_size', '3', '28')),
        ({"rollout": {"tensor_parallel_size": 8}, "cluster": {"gpus_per_node": 4, "num_nodes": 8}},
         ()),
        ({"rollout": {"tensor_parallel_size": 4, "num_workers": 3}, "cluster": {"gpus_per_node": 6, "num_nodes": 2}},
         ('12', '1')),
        ({"rollout": {"tensor_parallel_size": 4, "num_workers": 2}, "cluster": {"gpus_per_node": 7, "num_nodes": 2},
          "train": {"ranks": 7}}, ('8', '7')),
        ({"rollout": {"tensor_parallel_size": 4, "num_workers": 3}, "cluster": {"gpus_per_node": 7, "num_nodes": 2}},
         ('2', '7')),
        ({"rollout": {"tensor_parallel_size": 2, "gpus_per_worker": 0.5}}, ()),
        ({"rollout": {"gpus_per_worker": 2}}, ('tensor_parallel_size',)),
        ({"rollout": {"gpus_per_worker": 1.5}}, ()),
        ({"cluster": {"placement": "colocated", "gpus_per_node": 8}, "train": {"ranks": 2}}, ()),
        ({"cluster": {"placement": "colocated", "gpus_per_node": 2}, "train": {"gpus": 0.5}}, ()),
        ({"rollout": {"max_response_tokens": 2_000_000}, "cluster": {"gpus_per_node": 8, "gpu": "H100"}},
         ()),
    ],
)  # fmt: skip
def test_what_does_not_add_up_is_refused(sections, said):
    with refused(ConfigError, naming=said):
        plan_of(recipe(**sections))


def test_a_larger_model_may_take_longer_to_start():
    models = ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-32B", "someone/unheard-of")
    small, large, unknown = (start_timeout_s(recipe(model)) for model in models)
    assert unknown == 600 < small < 620 < 1200 < large < 1400
    assert start_timeout_s(recipe("Qwen/Qwen2.5-32B", faults={"start_timeout_s": 5})) == 5
