"""Sizes of a recipe that follow from its model's shape and its own counts."""

from __future__ import annotations

from math import ceil
from pathlib import Path

from tltlab.errors import ConfigError
from tltlab.files import read_json
from tltlab.hardware import Gpu, ModelShape
from tltlab.hardware import model as model_by_name

from .recipe import Recipe

PROMPT_TOKENS = 1024
"""Of a prompt, where `data.max_prompt_tokens` does not limit them."""


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
    try:
        shape = ModelShape.from_config(config, Path(model).resolve().name)
    except (ConfigError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"{path} is not of a dense decoder: {type(error).__name__}: {error}") from error
    if shape.experts:
        raise ConfigError(f"{path} is of a mixture of experts, and estimates are for dense models")
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
