"""Sizes of a recipe that follow from its model's shape and its own counts."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import Any

from tltlab.costs.profiles import find_model
from tltlab.errors import ConfigError
from tltlab.files import read_object
from tltlab.hardware import Gpu, ModelShape

from .recipe import Recipe

PROMPT_TOKENS = 1024
"""Tokens of a prompt, where `data.max_prompt_tokens` does not limit them."""


def shape_of(model: str) -> ModelShape:
    """Return the shape of a dense decoder, a folder or a name of `tltlab.hardware`; ConfigError for any other model."""
    try:
        shape = find_model(model)
    except (ConfigError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"unknown shape of model {model!r}: {error}; download it first") from error
    if shape.experts:
        raise ConfigError(f"{model} is a mixture of experts, and estimates are for dense models")
    return shape


def context_tokens(recipe: Recipe) -> int:
    """Return the tokens of the longest prompt and response."""
    tokens = (recipe.data.max_prompt_tokens or PROMPT_TOKENS) + recipe.rollout.max_response_tokens
    return min(tokens, int(recipe.rollout.vllm.get("max_model_len") or tokens))


def engine_context(recipe: Recipe) -> int | None:
    """Return an engine's limit of tokens in a prompt and its response, or a bound above; None where unknown."""
    return int(recipe.rollout.vllm.get("max_model_len") or 0) or model_context(recipe.model)


def model_context(model: str) -> int | None:
    """Return the tokens of the longest context, as vLLM reads it from the model's files; None where unknown.

    Releases of vLLM differ in scaled rotary embeddings: the result is the longest context of any of them.
    """
    config = config_of(model)
    config |= config.get("text_config") or {}
    positions, rope = config.get("max_position_embeddings"), config.get("rope_parameters") or config.get("rope_scaling")
    if type(positions) is not int:
        return None
    most = config_of(model, "tokenizer_config.json").get("model_max_length")
    factor = rope.get("factor") if isinstance(rope, dict) else None
    return ceil(min(positions, most if isinstance(most, int) else positions) * max(float(factor or 1), 1.0))


def config_of(model: str, name: str = "config.json") -> dict[str, Any]:
    """Read a JSON object of a model's folder, or of a model in the Hugging Face cache; empty where there is none."""
    if Path(model).is_dir():
        return read_object(Path(model) / name)
    # Imported here: slow, and most models are folders.
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, name)
    except HFValidationError:  # a path
        return {}
    return read_object(Path(cached)) if isinstance(cached, str) else {}


def vllm_batch(gpu: Gpu | None) -> int:
    """Return vLLM 0.32's default max_num_seqs (`arg_utils`): more on GPUs of 70 GiB and up, the A100 excepted."""
    return 1024 if gpu is not None and gpu.memory_bytes >= 70 * 2**30 and gpu.name != "A100" else 256


def requests_per_engine(recipe: Recipe) -> int:
    """Return the number of responses of one rollout that an engine has to generate."""
    rollout = recipe.rollout
    total = rollout.prompts_per_step * rollout.group_size if rollout.partial is None else rollout.partial.concurrency
    return ceil(total / rollout.num_workers)
