"""Checkpoints of random heads in the layouts of EAGLE's releases, SpecForge and speculators, made without our code."""

import json
from functools import partial

import torch
from safetensors.torch import load_file, save_file

NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
LAYERS = "eagle_aux_hidden_state_layer_ids"


def _shape(target):
    """What a released config says of its layer, in the way of transformers 4."""
    theirs = json.loads((target / "config.json").read_text())
    # vLLM's attention on a CPU knows heads of 32 and more.
    heads = 4 if theirs["hidden_size"] < 64 else 2
    return {
        "hidden_act": "silu",
        "hidden_size": theirs["hidden_size"],
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "num_hidden_layers": 1,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.28.1",
        "use_cache": True,
        "vocab_size": theirs["vocab_size"],
    }


def _layer(prefix, shape, width, biases=""):
    """Names and shapes of a decoder layer whose attention reads `width`, with biases of those projections."""
    hidden, mlp = shape["hidden_size"], shape["intermediate_size"]
    head = hidden // shape["num_attention_heads"]
    out = {"q": shape["num_attention_heads"] * head, "k": shape["num_key_value_heads"] * head}
    out |= {"v": out["k"], "o": hidden}
    return {
        **{f"{prefix}self_attn.{p}_proj.weight": (out[p], width) for p in "qkv"},
        f"{prefix}self_attn.o_proj.weight": (hidden, out["q"]),
        **{f"{prefix}self_attn.{p}_proj.bias": (out[p],) for p in biases},
        **{f"{prefix}mlp.{p}_proj.weight": (mlp, hidden) for p in ("gate", "up")},
        f"{prefix}mlp.down_proj.weight": (hidden, mlp),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
    }


def _drawn(shapes):
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator) * 0.25 + (1.0 if "norm" in name else 0.0)
        for name, shape in shapes.items()
    }


def _written(folder, config, weights):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")


def eagle_release(folder, target, *, fc_bias=False, qkv_bias=False):
    """EAGLE's release of an EAGLE head, in a pickle as most of them: weights by the names there, and no flags."""
    shape = _shape(target)
    hidden = shape["hidden_size"]
    shapes = {"fc.weight": (hidden, 2 * hidden)}
    if fc_bias:
        shapes["fc.bias"] = (hidden,)
    weights = _drawn(shapes | _layer("layers.0.", shape, hidden, "qkv" if qkv_bias else ""))
    weights["embed_tokens.weight"] = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    folder.mkdir(parents=True)
    # Silent on biases of fc, which means that there are some: vicuna's.
    config = shape | {"architectures": ["LlamaForCausalLM"]} | ({} if fc_bias else {"bias": False})
    (folder / "config.json").write_text(json.dumps(config | ({"qkv_bias": True} if qkv_bias else {})))
    torch.save(weights, folder / "pytorch_model.bin")
    return weights, {}


def _eagle3(
    prefix,
    shape,
    flags,
    draft_vocabulary,
    *,
    biases="",
    qwen3=False,
):
    hidden, vocabulary = shape["hidden_size"], shape["vocab_size"]
    drafted = list(range(vocabulary)) if draft_vocabulary is None else list(draft_vocabulary)
    shapes = _layer(prefix, shape, 2 * hidden, biases) | {
        "fc.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (len(drafted), hidden),
        f"{prefix}hidden_norm.weight": (hidden,),
        f"{prefix}input_layernorm.weight": (hidden,),
    }
    if flags.get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * hidden,)
    if flags.get("fc_norm"):
        shapes |= {f"fc_norm.{n}.weight": (hidden,) for n in range(3)}
    if qwen3:
        size = hidden // shape["num_attention_heads"]
        shapes |= {f"{prefix}self_attn.{part}_norm.weight": (size,) for part in "qk"}
    weights = _drawn(shapes)
    if draft_vocabulary is not None:
        weights["d2t"] = torch.tensor(drafted) - torch.arange(len(drafted))
        weights["t2d"] = torch.tensor([token in drafted for token in range(vocabulary)])
    return weights


def specforge(
    folder,
    target,
    flags=None,
    *,
    draft_vocabulary=(1, 4, 5, 6, 9, 12),
    bias=False,
):
    """SpecForge's and EAGLE's EAGLE-3 heads, without an embedding: weights by the names there, and flags."""
    shape, flags = _shape(target), dict(flags or {})
    weights = _eagle3("midlayer.", shape, flags, draft_vocabulary, biases="qkv" if bias else "")
    config = shape | flags | {"architectures": ["LlamaForCausalLMEagle3"], "attention_bias": bias}
    _written(folder, config | {"draft_vocab_size": len(weights["lm_head.weight"])}, weights)
    return weights, flags


def speculators(
    folder,
    target,
    flags=None,
    *,
    draft_vocabulary=(0, 2, 3, 7, 8, 11, 12),
    qwen3=False,
    layers=(1, 3, 5),
):
    """The format of speculators 0.3 and later, with the target's embedding: weights by the names there, and flags."""
    shape, flags = _shape(target), dict.fromkeys(NORMS, False) | dict(flags or {})
    weights = _eagle3("layers.0.", shape, flags, draft_vocabulary, qwen3=qwen3)
    weights["embed_tokens.weight"] = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    head_dim = shape["hidden_size"] // shape["num_attention_heads"]
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "somebody/target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": shape | {"head_dim": head_dim, "model_type": "qwen3" if qwen3 else "llama"},
        "draft_vocab_size": len(weights["lm_head.weight"]),
        "target_hidden_size": None,
        LAYERS: list(layers),
        **flags,
    }
    _written(folder, config, weights)
    return weights, flags


SPECFORGE = {
    "specforge": specforge,
    "specforge-bias": partial(specforge, bias=True),
    "specforge-3.1": partial(specforge, flags={"fc_norm": True, "norm_output": True}),
    "specforge-whole": partial(specforge, draft_vocabulary=None),
}
SPECULATORS = {
    "speculators": partial(speculators, flags={"norm_before_residual": True}),
    "speculators-gpt-oss": partial(speculators, flags={"norm_before_fc": True}),
    "speculators-qwen3": partial(speculators, qwen3=True),
}
