"""Drafter heads: their start, what they share with a target, and how stock vLLM runs them."""

import shutil
from contextlib import closing
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.refused import refused
from tltlab.drafters.specs import LearnedSpec
from tltlab.errors import ConfigError
from tltlab.policies.simple import Fixed
from tltlab.runtime.drafter.heads.head import Eagle3Head, default_aux_layers
from tltlab.runtime.drafter.heads.kinds import fit_inputs, new_head
from tltlab.runtime.drafter.heads.layouts import load_head
from tltlab.runtime.drafter.heads.loss import drafter_loss
from tltlab.runtime.drafter.heads.target import FrozenTarget, hidden_states_of
from tltlab.runtime.drafter.offline.annotate import learned_annotator
from tltlab.runtime.drafter.offline.chains import kept_along, walk
from tltlab.runtime.drafter.offline.data import along
from tltlab.runtime.drafter.offline.export import write_checkpoint
from tltlab.runtime.drafter.sequences import pack
from tltlab.runtime.engine.engine import Engine
from tltlab.runtime.engine.generation import GenerationRequest
from tltlab.runtime.recipe.drafter import LossConfig
from tltlab.strategy import Strategy
from tltlab.traces.drafts import RecordedResponse

from ...small_models import loaded, small_shape
from .layouts_made import eagle_release, specforge, speculators

WORDS = 24
KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM, 2, False),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, 2, True),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, 4, False),
}
"""Config, model, layers, and whether embedding and LM head are one."""


@pytest.fixture(scope="module")
def targets(random_model, tmp_path_factory):
    """A random model of each kind, whose attention is weak, so that a small head can learn what it does."""
    folders = {}
    for kind, (config, model, layers, tied) in KINDS.items():
        torch.manual_seed(3)
        width = {} if kind == "qwen2" else {"head_dim": 32}
        made = model(config(**small_shape(num_hidden_layers=layers, tie_word_embeddings=tied, **width)))
        with torch.no_grad():
            for name, value in made.named_parameters():
                value.mul_(0.1 if "o_proj" in name else 4.0 if name == "lm_head.weight" else 1.0)
                if name.endswith(("k_proj.bias", "q_proj.bias")):
                    value.normal_(0.0, 0.1)
            if not tied:
                made.lm_head.weight.mul_(2.0)
        folders[kind] = tmp_path_factory.mktemp(kind)
        made.save_pretrained(folders[kind])
        for file in random_model.glob("tokenizer*"):
            shutil.copy(file, folders[kind])
    return folders


def sampled(model, head, count):
    """What the model says at temperature 1 after random prompts of 8 tokens, 72 tokens each."""
    torch.manual_seed(0)
    prompts = torch.randint(4, WORDS, (count, 8))
    texts = model.generate(prompts, max_length=72, do_sample=True, top_k=0, eos_token_id=None).tolist()
    return [along(model, head.aux_layers, text[:8], text[8:]) for text in texts]


def train(head, frozen, data, updates, **loss):
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3, betas=(0.9, 0.95))
    batch = pack(data)
    for _ in range(updates):
        optimizer.zero_grad()
        drafter_loss(head, frozen, batch, LossConfig(**loss)).loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()


# What a head shares with its target.


@pytest.mark.parametrize("kind", KINDS)
def test_embedding_and_lm_head_are_the_targets_own(kind, targets):
    model, frozen = loaded(targets[kind]), FrozenTarget.from_folder(targets[kind])
    assert torch.equal(frozen.embedding, model.get_input_embeddings().weight)
    assert torch.equal(frozen.lm_head, model.get_output_embeddings().weight)
    again = frozen.to("cpu", torch.float64)
    assert (again.lm_head is again.embedding) == KINDS[kind][3]
    assert again.lm_head.dtype == torch.float64


def test_a_target_in_several_files_is_read(targets, tmp_path):
    loaded(targets["llama"]).save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    parts, whole = FrozenTarget.from_folder(tmp_path / "parts"), FrozenTarget.from_folder(targets["llama"])
    assert torch.equal(parts.lm_head, whole.lm_head)
    shutil.copytree(targets["llama"], tmp_path / "less")
    weights = load_file(tmp_path / "less" / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "less" / "model.safetensors")
    with refused(ConfigError, naming=("lm_head",)):
        FrozenTarget.from_folder(tmp_path / "less")
    with refused(ConfigError):
        FrozenTarget.from_folder(tmp_path / "none")


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_those_that_enter_the_layers(kind, targets):
    model, tokens = loaded(targets[kind]), torch.arange(4, 20)
    hidden, aux = hidden_states_of(model, tokens, (0, 1, model.config.num_hidden_layers))
    with torch.no_grad():
        expected = model.base_model(tokens[None], output_hidden_states=True)
        entering = [expected.hidden_states[layer][0] for layer in (0, 1)]
        assert torch.allclose(aux[:, :128], torch.cat(entering, -1), atol=1e-6)
        assert torch.allclose(model.base_model.norm(aux[:, 128:]), hidden, atol=1e-5)
    assert torch.allclose(hidden, expected.last_hidden_state[0], atol=1e-6)
    assert hidden_states_of(model, tokens, ())[1] is None


@given(st.integers(1, 128))
def test_the_layers_that_eagle3_reads_are_there(num_layers):
    layers = default_aux_layers(num_layers)
    assert list(layers) == sorted(set(layers))
    assert len(layers) == min(3, num_layers + 1)
    assert 0 <= layers[0] <= layers[-1] <= num_layers


# A start from scratch.


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_makes_the_same_head(method, kind, targets):
    first, again, other = (new_head(targets[kind], method, seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])


def test_a_fitted_start_is_worth_many_updates(targets):
    folder = targets["llama"]
    model, frozen = loaded(folder), FrozenTarget.from_folder(folder)
    heads = {name: new_head(folder, "eagle", 0) for name in ("fitted", "new", "random")}
    torch.manual_seed(0)
    with torch.no_grad():
        for value in heads["random"].parameters():
            if value.dim() == 2:
                value.normal_(0.0, 0.02)
    data = sampled(model, heads["new"], 12)
    held = pack(data[8:])
    fit_inputs(heads["fitted"], frozen, pack(data[:8]))

    def measured():
        with torch.no_grad():
            return {name: drafter_loss(head, frozen, held, LossConfig()) for name, head in heads.items()}

    before = measured()
    for head in heads.values():
        train(head, frozen, data[:8], 15)
    after = measured()
    for found in (before, after):
        assert found["fitted"].loss < after["random"].loss
        assert found["fitted"].accept[0] > after["random"].accept[0]
    assert after["fitted"].loss < after["new"].loss


# In stock vLLM.


def drafting(target, drafters, depth):
    """An engine that drafts with the learned one of its drafters, and closes."""
    args = {"max_num_seqs": 8, "max_model_len": 128, "kv_cache_memory_bytes": 32 << 20}
    engine = Engine(str(target), drafters=drafters, max_draft_depth=depth, vllm_args=args)
    engine.set_policy(Fixed(Strategy.chain("learned", depth)))
    return closing(engine)


def accepted(engine, prompt):
    """The greedy response to a prompt, and what was accepted of each draft for it."""
    request = GenerationRequest(key=(0, "p", 0, 0), prompt_token_ids=prompt, max_response_tokens=60, ignore_eos=True)
    rollout = engine.generate([request], rl_step=0, temperature=0.0)
    drafted = [row for row in rollout.iterations.to_pylist() if row["num_drafted"]]
    return rollout.responses[0].token_ids, [row["accepted_per_request"][0] for row in drafted]


def borne_out(drafts, kept):
    """Whether an engine accepted of each draft what is `kept` here at each position.

    The last draft may reach beyond the response's end, where the text does not tell.
    """
    expected = [kept[at] for at in walk(kept)]
    return drafts[:-1] == expected[: len(drafts) - 1] and len(expected) - 1 <= len(drafts) <= len(expected)


LAYOUTS = {
    "llama": partial(specforge, draft_vocabulary=list(range(4, 22)), bias=True),
    "qwen2": partial(eagle_release, fc_bias=True, qkv_bias=True),
    "qwen3": partial(
        speculators,
        flags={"norm_before_residual": True, "fc_norm": True, "norm_output": True},
        draft_vocabulary=None,
        qwen3=True,
        layers=(1, 2, 4),
    ),
}
"""Of the head for each kind of target, as others make them."""


@pytest.mark.engine
@pytest.mark.parametrize("kind", KINDS)
def test_vllm_accepts_of_others_heads_what_is_foretold(kind, targets, tmp_path):
    depth, folder = 4, targets[kind]
    model, frozen = loaded(folder), FrozenTarget.from_folder(folder)
    LAYOUTS[kind](tmp_path / "theirs", folder)
    head = load_head(tmp_path / "theirs", target=folder)
    method = head.method
    fresh = tmp_path / "fresh"
    write_checkpoint(head, frozen, folder, fresh, "eagle" if kind == "qwen3" else "speculators")
    if isinstance(head, Eagle3Head) and head.lm_head is not None:
        # A start that can be trained in seconds.
        with torch.no_grad():
            head.lm_head.weight.copy_(frozen.lm_head if head.draft_ids is None else frozen.lm_head[head.draft_ids])
    data = sampled(model, head, 16)
    fit_inputs(head, frozen, pack(data))
    train(head, frozen, data, 40, kind="eagle3" if method == "eagle3" else "hass", unroll=2, token_weight=1.0)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(4, WORDS, 12).tolist() for _ in range(6)]
    with drafting(folder, {"learned": LearnedSpec(method=method, model=str(fresh))}, depth) as engine:
        untrained = [accepted(engine, prompt) for prompt in prompts]
        engine.update_draft_weights(head.serving_weights().items())
        trained = [accepted(engine, prompt) for prompt in prompts]
    assert [response for response, _ in trained] == [response for response, _ in untrained]
    for drafter, found in ((load_head(fresh, target=folder), untrained), (head, trained)):
        for prompt, (response, drafts) in zip(prompts, found, strict=True):
            sequence = along(model, drafter.aux_layers, prompt, response)
            assert borne_out(drafts, kept_along(drafter, frozen, sequence, depth).tolist())
    before, after = (sum(sum(drafts) for _, drafts in found) for found in (untrained, trained))
    assert after > before + 20
    if method == "eagle":
        annotator = learned_annotator("learned", str(head.save(tmp_path / "head")), str(folder))
        recorded = RecordedResponse(
            key=(0, "p", 0, 0), worker=0, prompt_token_ids=prompts[0], token_ids=trained[0][0], opened_s=0.0,
            times_s=np.arange(60.0),
        )  # fmt: skip
        (row,) = annotator.annotate([recorded], depth)
        assert borne_out(trained[0][1], row.tolist())
