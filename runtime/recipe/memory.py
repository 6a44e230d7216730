"""How much GPU memory a recipe's engines, trainers and drafter need, part by part, each with its formula."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tltlab.errors import ConfigError
from tltlab.hardware import RESERVED_BYTES, Gpu, ModelShape, per_gpu_heads

from .recipe import Recipe

PROMPT_TOKENS = 1024
"""Of a prompt, where `data.max_prompt_tokens` does not limit them."""
GRAPH_BYTES = 2 << 30
"""For CUDA graphs, flat; `tltlab export-policy` predicts those of a policy."""
LOGITS = 1 << 26
"""That lie in memory at once, as in `token_logprobs`."""
_VLLM_UTILIZATION = 0.92
_CPU_KV_BYTES = 256 << 20


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


def engine_memory(recipe: Recipe, shape: ModelShape, gpu: Gpu | None, *, on_gpu: bool) -> EngineMemory:
    """Weights, KV cache and graphs. With a known GPU the KV cache is what vLLM takes: the rest of its share.

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
    running = min(_requests(recipe), rollout.vllm.get("max_num_seqs", _vllm_batch(gpu)))
    weights = shape.stored_params * value / tp
    parts = [Part(name="engine weights", num_bytes=weights, formula=f"{value} bytes x parameters / TP")]
    if on_gpu:
        parts.append(Part(name="engine runtime", num_bytes=RESERVED_BYTES, formula="flat: context, activations"))
        if not rollout.vllm.get("enforce_eager", False):
            parts.append(Part(name="CUDA graphs", num_bytes=GRAPH_BYTES, formula="flat; see tltlab export-policy"))
    if recipe.drafter is not None:
        parts.append(
            Part(
                name="drafter, serving",
                num_bytes=_head_params(shape) * value,
                formula="one decoder layer and 2 hidden x hidden (EAGLE); embedding and LM head are the target's",
            )
        )
    given = rollout.vllm.get("kv_cache_memory_bytes", None if on_gpu else _CPU_KV_BYTES)
    if given is not None:
        kv, formula = float(given), "kv_cache_memory_bytes"
    elif gpu is None:
        kv, formula = float(running * tokens * per_token), "2 x layers x KV heads x head size x tokens x requests"
    else:
        share = rollout.vllm.get("gpu_memory_utilization", _VLLM_UTILIZATION)
        kv = gpu.memory_bytes * share - sum(part.num_bytes for part in parts)
        formula = f"what gpu_memory_utilization = {share:g} leaves"
    if kv < tokens * per_token:
        raise ConfigError(
            f"an engine's KV cache has room for {max(0.0, kv) / 1e9:.2f} GB per GPU, one response of full length "
            f"({tokens} tokens) takes {tokens * per_token / 1e9:.2f} GB: raise rollout.tensor_parallel_size or "
            "rollout.vllm.gpu_memory_utilization, or lower rollout.max_response_tokens"
        )
    parts.append(Part(name="KV cache", num_bytes=kv, formula=formula))
    return EngineMemory(parts=tuple(parts), at_once=int(kv // (tokens * per_token)), running=running)


def trainer_states(recipe: Recipe, shape: ModelShape) -> tuple[Part, ...]:
    """What a rank keeps between updates: float32 weights and Adam's moments, and a reference model with KL.

    With the gradients of an update these are the 16 bytes per parameter of ZeRO (arXiv 1910.02054, section 3.1),
    shared by all ranks (its stage 3, which is FSDP2); here float32 master weights, gradients and two moments, 4 each.
    """
    share = shape.stored_params / recipe.train.ranks
    parts = [
        Part(name="master weights", num_bytes=4 * share, formula="4 bytes x parameters / ranks (ZeRO 3)"),
        Part(name="Adam moments", num_bytes=8 * share, formula="8 bytes x parameters / ranks (ZeRO 3)"),
    ]
    if recipe.train.kl_coef:
        parts.append(Part(name="reference model", num_bytes=4 * share, formula="4 bytes x parameters / ranks"))
    return tuple(parts)


def trainer_work(recipe: Recipe, shape: ModelShape, *, on_gpu: bool) -> tuple[Part, ...]:
    """What an update adds: gradients, gathered weights, activations and a chunk of logits.

    Activations are counted as in arXiv 2205.05198, section 4.1, for a gated MLP, RMSNorm in float32 and attention that
    keeps no scores; with checkpointing each layer keeps its input, and one at a time all of it.
    """
    train = recipe.train
    value = value_bytes(train.dtype, on_gpu=on_gpu)
    parts = [
        Part(name="gradients", num_bytes=4 * shape.stored_params / train.ranks, formula="4 bytes x parameters / ranks")
    ]
    if train.ranks > 1 or value == 2:
        gathered = shape.stored_params - shape.layers * shape.layer_params + 2 * shape.layer_params
        parts.append(
            Part(
                name="gathered weights",
                num_bytes=value * gathered,
                formula=f"{value} bytes x (embedding, LM head, a layer and the next) (FSDP2)",
            )
        )
    tokens = max(train.tokens_per_microbatch, context_tokens(recipe))
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = value * (4 * shape.hidden + 2 * queries + 2 * keys + 4 * shape.intermediate) + 4 * 2 * shape.hidden
    if train.activation_checkpointing:
        activations = tokens * (shape.layers * shape.hidden * value + layer)
        formula = "tokens x (layers x hidden + one layer's activations)"
    else:
        activations = tokens * shape.layers * layer
        formula = "tokens x layers x (4 hidden + 2 queries + 2 keys + 4 MLP, norms in float32)"
    parts += [
        Part(name="activations", num_bytes=activations, formula=f"{formula}, {tokens} tokens"),
        Part(
            name="logits",
            num_bytes=4 * (3 * min(tokens * shape.vocab, LOGITS) + shape.head_params),
            formula="4 bytes x (3 x the logits of a chunk + the LM head's gradient)",
        ),
    ]
    if on_gpu:
        parts.append(Part(name="trainer runtime", num_bytes=RESERVED_BYTES, formula="flat: context, workspaces"))
    return tuple(parts)


def drafter_training(recipe: Recipe, shape: ModelShape, *, on_gpu: bool) -> tuple[Part, ...]:
    """What training a drafter takes beside an engine that has nothing left to do; nothing without [drafter]."""
    if recipe.drafter is None:
        return ()
    head, frozen = _head_params(shape), shape.stored_params - shape.layers * shape.layer_params
    tokens = recipe.drafter.tokens_per_update * recipe.drafter.loss.num_unrolled
    value = value_bytes(None, on_gpu=on_gpu)
    return (
        Part(name="drafter, training", num_bytes=16 * head, formula="16 bytes x the head's parameters (ZeRO 3.1)"),
        Part(name="drafter's target", num_bytes=value * frozen, formula=f"{value} bytes x embedding and LM head"),
        Part(
            name="drafter activations",
            num_bytes=tokens * (3 * 4 * shape.vocab + 4 * (12 * shape.hidden + 4 * shape.intermediate)),
            formula="tokens x unrolled steps x (3 logits + layer), float32",
        ),
    )


def context_tokens(recipe: Recipe) -> int:
    """Tokens of the longest prompt and response."""
    tokens = (recipe.data.max_prompt_tokens or PROMPT_TOKENS) + recipe.rollout.max_response_tokens
    return min(tokens, int(recipe.rollout.vllm.get("max_model_len") or tokens))


def value_bytes(dtype: str | None, *, on_gpu: bool) -> int:
    """Bytes of a number in a dtype; None and "auto" are bfloat16 on a GPU, else float32."""
    if dtype in (None, "auto"):
        return 2 if on_gpu else 4
    return 4 if dtype == "float32" else 2


def _vllm_batch(gpu: Gpu | None) -> int:
    """vLLM 0.32's own max_num_seqs (`arg_utils`): more on GPUs of 70 GiB and up, the A100 excepted."""
    return 1024 if gpu is not None and gpu.memory_bytes >= 70 * 2**30 and gpu.name != "A100" else 256


def _requests(recipe: Recipe) -> int:
    rollout = recipe.rollout
    if rollout.partial is not None:
        return ceil(rollout.partial.concurrency / rollout.num_workers)
    return ceil(rollout.prompts_per_step * rollout.group_size / rollout.num_workers)


def _head_params(shape: ModelShape) -> int:
    return shape.layer_params + 2 * shape.hidden * shape.hidden
