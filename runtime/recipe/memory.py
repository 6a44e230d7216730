"""How much GPU memory a recipe's engines, trainers and drafter need, part by part, each with its formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from pydantic import ValidationError

from tltlab.errors import ConfigError
from tltlab.files import read_json
from tltlab.hardware import RESERVED_BYTES, Gpu, ModelShape, per_gpu_heads
from tltlab.hardware import model as model_by_name

from .recipe import Recipe

PROMPT_TOKENS = 1024
"""Of a prompt, where `data.max_prompt_tokens` does not limit them."""
GRAPH_BYTES = 2 << 30
"""For CUDA graphs that are not planned, flat."""
LOGITS = 1 << 26
"""That lie in memory at once, as in `token_logprobs`."""
_VLLM_UTILIZATION = 0.92
_CPU_KV_BYTES = 256 << 20

Row = tuple[str, float, str]
"""The fields of a `Part`, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something that takes memory on one GPU (without GPUs: in one process), and how its size was reckoned."""

    name: str
    num_bytes: float
    formula: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """One engine's share of one GPU. `at_once` responses of full length fit into its KV cache, of `running`."""

    parts: tuple[Part, ...]
    at_once: int
    running: int


def shape_of(model: str) -> ModelShape:
    """Read MODEL/config.json where that is a folder, else look the last part of the id up in `tltlab.hardware`.

    ConfigError for a model of neither kind, and for one that is no dense decoder.
    """
    path = Path(model) / "config.json"
    if not path.is_file():
        try:
            return model_by_name(model)
        except ConfigError as error:
            raise ConfigError(
                f"cannot tell the shape of model {model!r}: there is no {path}, and it is an {error}; download it first"
            ) from error
    config = read_json(path)
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is no model configuration: expected an object")
    if config.get("num_experts") or config.get("num_local_experts"):
        raise ConfigError(f"{path} is of a mixture of experts, and estimates are for dense models")
    try:
        heads = config["num_attention_heads"]
        return ModelShape(
            name=Path(model).resolve().name,
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        )
    except (KeyError, TypeError, ValidationError, ZeroDivisionError) as error:
        raise ConfigError(f"{path} is not of a dense decoder: {type(error).__name__}: {error}") from error


def engine_memory(
    recipe: Recipe, shape: ModelShape, gpu: Gpu | None, *, on_gpu: bool, graph_bytes: float | None = None
) -> EngineMemory:
    """Weights, KV cache and graphs. With a known GPU the KV cache is what vLLM takes: the rest of its share.

    `graph_bytes` are those of planned CUDA graphs; None where none are planned.

    ConfigError where tensor parallelism does not divide the heads, or no response of full length fits.
    """
    rollout, tp = recipe.rollout, recipe.rollout.tensor_parallel_size
    try:
        _, kv_heads = per_gpu_heads(shape, tp)
    except ConfigError as error:
        raise ConfigError(f"rollout.tensor_parallel_size: {error}") from error
    value = value_bytes(rollout.vllm.get("dtype"), on_gpu=on_gpu)
    per_token = 2 * shape.layers * kv_heads * shape.head_dim * value
    tokens = context_tokens(recipe)
    running = min(requests_per_engine(recipe), rollout.vllm.get("max_num_seqs", vllm_batch(gpu)))
    parts: list[Row] = [("engine weights", shape.stored_params * value / tp, f"{value} bytes x parameters / TP")]
    if on_gpu:
        parts.append(("engine runtime", RESERVED_BYTES, "flat: context, activations"))
    if on_gpu and not rollout.vllm.get("enforce_eager", False):
        planned = "planned: graphs x layers x 1 MB, and buffers"
        parts.append(
            ("CUDA graphs", GRAPH_BYTES, "flat") if graph_bytes is None else ("CUDA graphs", graph_bytes, planned)
        )
    if recipe.drafter is not None:
        formula = "one decoder layer and 2 hidden x hidden (EAGLE); embedding and LM head are the target's"
        parts.append(("drafter, serving", _head_params(shape) * value, formula))
    kv_bytes = rollout.vllm.get("kv_cache_memory_bytes", None if on_gpu else _CPU_KV_BYTES)
    if kv_bytes is not None:
        kv, formula = float(kv_bytes), "kv_cache_memory_bytes"
    elif gpu is None:
        kv, formula = float(running * tokens * per_token), "2 x layers x KV heads x head size x tokens x requests"
    else:
        share = rollout.vllm.get("gpu_memory_utilization", _VLLM_UTILIZATION)
        kv = gpu.memory_bytes * share - sum(num_bytes for _, num_bytes, _ in parts)
        formula = f"what gpu_memory_utilization = {share:g} leaves"
    if kv < tokens * per_token:
        raise ConfigError(
            f"an engine's KV cache has room for {max(0.0, kv) / 1e9:.2f} GB per GPU, one response of full length "
            f"({tokens} tokens) takes {tokens * per_token / 1e9:.2f} GB: raise rollout.tensor_parallel_size or "
            "rollout.vllm.gpu_memory_utilization, or lower rollout.max_response_tokens"
        )
    parts.append(("KV cache", kv, formula))
    return EngineMemory(parts=_parts(parts), at_once=int(kv // (tokens * per_token)), running=running)


def trainer_states(recipe: Recipe, shape: ModelShape) -> tuple[Part, ...]:
    """What a rank keeps between updates: float32 weights and Adam's moments, and a reference model with KL.

    With the gradients of an update these are the 16 bytes per parameter of ZeRO (arXiv 1910.02054, section 3.1),
    shared by all ranks (its stage 3, which is FSDP2); here float32 master weights, gradients and two moments, 4 each.
    """
    share = shape.stored_params / recipe.train.ranks
    parts: list[Row] = [
        ("master weights", 4 * share, "4 bytes x parameters / ranks (ZeRO 3)"),
        ("Adam moments", 8 * share, "8 bytes x parameters / ranks (ZeRO 3)"),
    ]
    if recipe.train.kl_coef:
        parts.append(("reference model", 4 * share, "4 bytes x parameters / ranks"))
    return _parts(parts)


def trainer_work(recipe: Recipe, shape: ModelShape, *, on_gpu: bool) -> tuple[Part, ...]:
    """What an update adds: gradients, gathered weights, activations and a chunk of logits.

    Activations are counted as in arXiv 2205.05198, section 4.1, for a gated MLP, RMSNorm in float32 and attention that
    keeps no scores; with checkpointing each layer keeps its input, and one at a time all of it. Ranks that share
    sequences have that share of their tokens.
    """
    train = recipe.train
    value = value_bytes(train.dtype, on_gpu=on_gpu)
    parts: list[Row] = [("gradients", 4 * shape.stored_params / train.ranks, "4 bytes x parameters / ranks")]
    if train.ranks > 1 or value == 2:
        gathered = shape.stored_params - shape.layers * shape.layer_params + 2 * shape.layer_params
        formula = f"{value} bytes x (embedding, LM head, a layer and the next) (FSDP2)"
        parts.append(("gathered weights", value * gathered, formula))
    tokens = ceil(max(train.tokens_per_microbatch, context_tokens(recipe)) / train.sequence_parallel)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = value * (4 * shape.hidden + 2 * queries + 2 * keys + 4 * shape.intermediate) + 4 * 2 * shape.hidden
    if train.activation_checkpointing:
        activations = tokens * (shape.layers * shape.hidden * value + layer)
        formula = "tokens x (layers x hidden + one layer's activations)"
    else:
        activations = tokens * shape.layers * layer
        formula = "tokens x layers x (4 hidden + 2 queries + 2 keys + 4 MLP, norms in float32)"
    parts.append(("activations", activations, f"{formula}, {tokens} tokens"))
    logits = 4 * (3 * min(tokens * shape.vocab, LOGITS) + shape.head_params)
    parts.append(("logits", logits, "4 bytes x (3 x the logits of a chunk + the LM head's gradient)"))
    if on_gpu:
        parts.append(("trainer runtime", RESERVED_BYTES, "flat: context, workspaces"))
    return _parts(parts)


def drafter_training(recipe: Recipe, shape: ModelShape, *, on_gpu: bool) -> tuple[Part, ...]:
    """What training a drafter takes beside an engine that has nothing left to do; nothing without [drafter]."""
    if recipe.drafter is None:
        return ()
    frozen = shape.stored_params - shape.layers * shape.layer_params
    tokens = recipe.drafter.tokens_per_update * recipe.drafter.loss.num_unrolled
    value = value_bytes(None, on_gpu=on_gpu)
    activations = tokens * (3 * 4 * shape.vocab + 4 * (12 * shape.hidden + 4 * shape.intermediate))
    return _parts(
        [
            ("drafter, training", 16 * _head_params(shape), "16 bytes x the head's parameters (ZeRO 3.1)"),
            ("drafter's target", value * frozen, f"{value} bytes x embedding and LM head"),
            ("drafter activations", activations, "tokens x unrolled steps x (3 logits + layer), float32"),
        ]
    )


def _parts(rows: Sequence[Row]) -> tuple[Part, ...]:
    return tuple(Part(name=name, num_bytes=num_bytes, formula=formula) for name, num_bytes, formula in rows)


def context_tokens(recipe: Recipe) -> int:
    """Tokens of the longest prompt and response."""
    tokens = (recipe.data.max_prompt_tokens or PROMPT_TOKENS) + recipe.rollout.max_response_tokens
    return min(tokens, int(recipe.rollout.vllm.get("max_model_len") or tokens))


def value_bytes(dtype: str | None, *, on_gpu: bool) -> int:
    """Bytes of a number in a dtype; None and "auto" are bfloat16 on a GPU, else float32."""
    if dtype in (None, "auto"):
        return 2 if on_gpu else 4
    return 4 if dtype == "float32" else 2


def vllm_batch(gpu: Gpu | None) -> int:
    """vLLM 0.32's own max_num_seqs (`arg_utils`): more on GPUs of 70 GiB and up, the A100 excepted."""
    return 1024 if gpu is not None and gpu.memory_bytes >= 70 * 2**30 and gpu.name != "A100" else 256


def requests_per_engine(recipe: Recipe) -> int:
    """Responses of one rollout that an engine has to generate."""
    rollout = recipe.rollout
    if rollout.partial is not None:
        return ceil(rollout.partial.concurrency / rollout.num_workers)
    return ceil(rollout.prompts_per_step * rollout.group_size / rollout.num_workers)


def _head_params(shape: ModelShape) -> int:
    return shape.layer_params + 2 * shape.hidden * shape.hidden
