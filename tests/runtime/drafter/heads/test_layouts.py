"""Heads in the layouts that people have: what is read is what their own programs compute, and can be written."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, silu
from transformers import LlamaConfig

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.files import read_json
from tltlab.runtime.drafter.heads.head import Eagle3Head
from tltlab.runtime.drafter.heads.layouts import is_head, load_head
from tltlab.runtime.drafter.heads.target import FrozenTarget
from tltlab.runtime.drafter.training import HeadTraining
from tltlab.runtime.recipe.drafter import LossConfig, OptimConfig

from ..small_heads import HIDDEN, VOCABULARY, made_sequence, one_pass
from .layouts_made import SPECFORGE, SPECULATORS, eagle_release, specforge, speculators

ROWS = 7


@pytest.fixture
def target(tmp_path):
    """A target of six layers: its config, embedding and LM head."""
    generator = torch.Generator().manual_seed(1)
    LlamaConfig(
        hidden_size=HIDDEN, vocab_size=VOCABULARY, num_hidden_layers=6, num_attention_heads=4, head_dim=8
    ).save_pretrained(tmp_path / "target")
    names = ("model.embed_tokens.weight", "lm_head.weight")
    weights = {name: torch.randn(VOCABULARY, HIDDEN, generator=generator) for name in names}
    save_file(weights, tmp_path / "target" / "model.safetensors")
    return tmp_path / "target"


def norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def attention(w, layer, x):
    """Causal attention of four heads on two of keys, with rotary positions from 0, one row and one head at a time."""

    def project(part):
        name = f"{layer}self_attn.{part}_proj"
        return linear(x, w[f"{name}.weight"], w.get(f"{name}.bias")).view(len(x), -1, 8)

    def rotated(heads, part):
        if f"{layer}self_attn.{part}_norm.weight" in w:
            heads = norm(heads, w[f"{layer}self_attn.{part}_norm.weight"])
        angles = torch.arange(len(x))[:, None] / 10000.0 ** (torch.arange(0, 8, 2) / 8)
        cos, sin = (torch.cat([f(angles)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))
        return heads * cos + torch.cat([-heads[..., 4:], heads[..., :4]], -1) * sin

    q, k, v = rotated(project("q"), "q"), rotated(project("k"), "k"), project("v")
    out = torch.zeros(len(x), 4, 8)
    for row in range(len(x)):
        for head in range(4):
            scores = torch.softmax(k[: row + 1, head // 2] @ q[row, head] / 8**0.5, 0)
            out[row, head] = scores @ v[: row + 1, head // 2]
    return linear(out.flatten(1), w[f"{layer}self_attn.o_proj.weight"], w.get(f"{layer}self_attn.o_proj.bias"))


def mlp(w, layer, x):
    gate, up = (linear(x, w[f"{layer}mlp.{part}_proj.weight"]) for part in ("gate", "up"))
    return linear(silu(gate) * up, w[f"{layer}mlp.down_proj.weight"])


def as_eagle_does(w, embedded, hidden):
    """The states that EAGLE's `cnets1.Model` makes of embeddings and states (T, H)."""
    x = linear(torch.cat([embedded, hidden], -1), w["fc.weight"], w.get("fc.bias"))
    x = x + attention(w, "layers.0.", x)
    return x + mlp(w, "layers.0.", norm(x, w["layers.0.post_attention_layernorm.weight"]))


def as_eagle3_does(w, layer, flags, embedded, aux):
    """Logits (T, D) and states (T, H) of the first step, as vLLM's `llama_eagle3` has them."""
    if flags.get("norm_before_fc"):
        aux = norm(aux, w["input_norm.weight"])
    if flags.get("fc_norm"):
        aux = torch.cat([norm(part, w[f"fc_norm.{n}.weight"]) for n, part in enumerate(aux.chunk(3, -1))], -1)
    states = linear(aux, w["fc.weight"])
    normed = norm(states, w[f"{layer}hidden_norm.weight"])
    residual = normed if flags.get("norm_before_residual") else states
    x = torch.cat([norm(embedded, w[f"{layer}input_layernorm.weight"]), normed], -1)
    x = residual + attention(w, layer, x)
    x = x + mlp(w, layer, norm(x, w[f"{layer}post_attention_layernorm.weight"]))
    features = norm(x, w["norm.weight"])
    return linear(features, w["lm_head.weight"]), features if flags.get("norm_output") else x


def rows(target):
    """Embeddings (T, H), hidden states, aux states, and what is the target's."""
    frozen, sequence = FrozenTarget.from_folder(target), made_sequence(ROWS)
    return frozen.embedding[sequence.token_ids[1:]], sequence.hidden, sequence.aux, frozen


def states_of(head, target):
    frozen, sequence = FrozenTarget.from_folder(target), made_sequence(ROWS)
    with torch.no_grad():
        return one_pass(head, frozen, sequence.token_ids[1:], head.first_states(sequence.hidden, sequence.aux))


@pytest.mark.parametrize("fc_bias", [False, True], ids=["llama3", "vicuna"])
@pytest.mark.parametrize("qkv_bias", [False, True], ids=["llama", "qwen2"])
def test_an_eagle_release_drafts_as_eagles_own_code(target, tmp_path, fc_bias, qkv_bias):
    weights, _ = eagle_release(tmp_path / "head", target, fc_bias=fc_bias, qkv_bias=qkv_bias)
    head = load_head(tmp_path / "head", target=target)
    theirs = read_json(tmp_path / "head" / "config.json")
    embedded, hidden, _, _ = rows(target)
    expected = as_eagle_does(weights, embedded, hidden)
    assert torch.allclose(states_of(head, target), expected, atol=2e-5)
    assert is_head(tmp_path / "head")
    again = load_head(head.save(tmp_path / "again"))
    assert torch.equal(states_of(again, target), states_of(head, target))
    assert (again.config.max_position_embeddings, theirs["max_position_embeddings"]) == (2048, 64)
    # What vLLM's class knows: biases of attention, or none at all.
    config = read_json(tmp_path / "again" / "config.json")
    names = [name for name in load_file(tmp_path / "again" / "model.safetensors") if name.endswith("bias")]
    assert config["attention_bias"] == (fc_bias or qkv_bias)
    assert names == ([f"layers.0.self_attn.{part}_proj.bias" for part in "koqv"] if fc_bias or qkv_bias else [])
    assert "bias" not in config
    assert "qkv_bias" not in config


@pytest.mark.parametrize("layout", [*SPECFORGE, *SPECULATORS])
def test_an_eagle3_head_drafts_as_in_vllm(target, tmp_path, layout):
    weights, flags = (SPECFORGE | SPECULATORS)[layout](tmp_path / "head", target)
    head = load_head(tmp_path / "head", target=target)
    assert isinstance(head, Eagle3Head)
    embedded, _, aux, frozen = rows(target)
    layer = "midlayer." if layout in SPECFORGE else "layers.0."
    logits, states = as_eagle3_does(weights, layer, flags, embedded, aux)
    found = states_of(head, target)
    assert torch.allclose(found, states, atol=2e-5)
    with torch.no_grad():
        assert torch.allclose(head.logits(found, frozen), logits, atol=1e-4)
    tokens = logits.argmax(-1)
    if "d2t" in weights:
        tokens = tokens + weights["d2t"][tokens]
    assert torch.equal(head.likeliest(head.logits(found, frozen)), tokens)

    again = load_head(head.save(tmp_path / "speculators"), target=target)
    config = read_json(tmp_path / "speculators" / "config.json")
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(target)
    saved = load_file(tmp_path / "speculators" / "model.safetensors")
    assert all(torch.equal(saved[name], weights[name]) for name in weights if name in ("d2t", "t2d", "lm_head.weight"))
    assert "embed_tokens.weight" not in saved
    assert isinstance(again, Eagle3Head)
    assert torch.equal(states_of(again, target), found)
    assert (again.aux_layers, again.norms) == (head.aux_layers, head.norms)


def test_all_of_somebody_elses_head_is_trained(target, tmp_path):
    specforge(tmp_path / "head", target, bias=True)
    head = load_head(tmp_path / "head", target=target)
    loss = LossConfig(kind="eagle3", unroll=2)
    training = HeadTraining(head, FrozenTarget.from_folder(target), loss, OptimConfig())
    before = head.serving_weights()
    report = training.update([made_sequence(20, seed=n) for n in range(4)])
    assert report.tokens
    moved = {name for name, value in head.state_dict().items() if not torch.equal(value, before[name])}
    # Keys' bias moves all scores of a query alike, so its gradient is rounding; d2t and t2d are no weights.
    fixed = {"d2t", "t2d", "layers.0.self_attn.k_proj.bias"}
    assert moved | fixed == set(before)
    assert not moved & {"d2t", "t2d"}


def test_a_whole_lm_head_may_be_the_targets(target, tmp_path):
    speculators(tmp_path / "own", target, draft_vocabulary=None)
    theirs = load_file(target / "model.safetensors")["lm_head.weight"]
    for name, lm_head, shared in (("own", None, False), ("same", theirs, True)):
        if lm_head is not None:
            shutil.copytree(tmp_path / "own", tmp_path / name)
            weights = load_file(tmp_path / name / "model.safetensors")
            save_file(weights | {"lm_head.weight": lm_head}, tmp_path / name / "model.safetensors")
        head = load_head(tmp_path / name, target=target)
        assert isinstance(head, Eagle3Head)
        assert (head.lm_head is None) == shared
        assert head.draft_ids is None
        assert torch.equal(head.output_weight(FrozenTarget.from_folder(target)), theirs) == shared


def test_the_hubs_cache_is_looked_into(target, tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / "models--somebody--EAGLE3-tiny"
    specforge(repository / "snapshots" / "a1b2", target)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a1b2")
    found = load_head("somebody/EAGLE3-tiny", target=target)
    there = load_head(repository / "snapshots" / "a1b2", target=target)
    assert torch.equal(states_of(found, target), states_of(there, target))
    with refused(ConfigError):
        load_head("nobody/nothing")


def test_what_cannot_be_trained_is_refused(target, tmp_path):
    folder = tmp_path / "head"
    weights, _ = specforge(folder, target)
    config = read_json(folder / "config.json")
    layers = "eagle_aux_hidden_state_layer_ids"
    whole = torch.zeros(VOCABULARY, HIDDEN)
    cases = [
        ({layers: [3, 2, 1]}, {}, (layers,)),
        ({"eagle_config": {"use_aux_hidden_state": False}}, {}, ("inner layers",)),
        ({"target_hidden_size": 2 * HIDDEN}, {}, ("width",)),
        ({"layer_types": ["sliding_attention"]}, {}, ("sliding",)),
        ({"num_hidden_layers": 2}, {}, (2,)),
        ({"speculators_model_type": "dflash"}, {}, ("'dflash'",)),
        ({"speculators_model_type": "eagle3", "transformer_layer_config": 3}, {}, ("config.json",)),
        ({"norm_before_fc": True}, {}, ("input_norm.weight",)),
        ({layers: [0, 2]}, {}, ("fc.weight",)),
        ({}, {"d2t": weights["d2t"] + VOCABULARY}, (VOCABULARY,)),
        ({}, {"embed_tokens.weight": whole}, ("embedding",)),
        ({}, {"midlayer.extra.weight": whole}, ("layers.0.extra.weight",)),
    ]
    for changes, others, facts in cases:
        (folder / "config.json").write_text(json.dumps(config | changes))
        save_file(weights | others, folder / "model.safetensors")
        with refused(ConfigError, naming=facts) as caught:
            load_head(folder, target=target)
        assert "\n" not in str(caught.value)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    for other in (folder, tmp_path):
        with refused(ConfigError):
            load_head(other)
    with refused(ConfigError, naming=("EAGLE",)):
        load_head(target)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"no pickle")
    with refused(ConfigError):
        load_head(folder, target=target)
