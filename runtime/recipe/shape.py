"""Sizes of a recipe that follow from its model's shape and its own counts."""

from __future__ import annotations

from math import ceil

from tltlab.costs.profiles import find_model
from tltlab.errors import ConfigError
from tltlab.hardware import Gpu, ModelShape

from .recipe import Recipe

PROMPT_TOKENS = 1024
"""Of a prompt, where `data.max_prompt_tokens` does not limit them."""


def shape_of(model: str) -> ModelShape:
    """Return the shape of a dense decoder, a folder or a name of `tltlab.hardware`; ConfigError for any other model."""
    try:
        shape = find_model(model)
    except (ConfigError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"cannot tell the shape of model {model!r}: {error}; download it first") from error
    if shape.experts:
        raise ConfigError(f"{model} is a mixture of experts, and estimates are for dense models")
    return shape


def context_tokens(recipe: Recipe) -> int:
    """Tokens of the longest prompt and response."""
    tokens = (recipe.data.max_prompt_tokens or PROMPT_TOKENS) + recipe.rollout.max_response_tokens
    return min(tokens, int(recipe.rollout.vllm.get("max_model_len") or tokens))


def vllm_batch(gpu: Gpu | None) -> int:
    """vLLM 0.32's own max_num_seqs (`arg_utils`): more on GPUs of 70 GiB and up, the A100 excepted."""
    return 1024 if gpu is not None and gpu.memory_bytes >= 70 * 2**30 and gpu.name != "A100" else 256


def requests_per_engine(recipe: Recipe) -> int:
    """Responses of one rollout that an engine has to generate."""
    rollout = recipe.rollout
    total = rollout.prompts_per_step * rollout.group_size if rollout.partial is None else rollout.partial.concurrency
    return ceil(total / rollout.num_workers)
