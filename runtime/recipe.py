"""What a training run is told: people write it as TOML, `key=value` overrides a field by its dotted name."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tltlab.drafters import DrafterSpec
from tltlab.errors import ConfigError

from .drafter_recipe import DrafterConfig


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DataConfig(_Section):
    """Prompts and answers: a JSONL or Parquet file, or a Hugging Face dataset (folder or id)."""

    train: str
    heldout: str | None = None
    prompt_column: str = "prompt"
    answer_column: str = "answer"
    chat: bool = False


class RolloutConfig(_Section):
    """`num_workers` engines share each step's prompts_per_step x group_size responses, split in order.

    `drafters` add to those of the policy, or replace them by name. Every `repeat_every`-th rollout runs a second time,
    to no other end than to see how far the machine's time varies on the very same work (`repeats.json`); 0 is never.
    """

    num_workers: int = Field(2, ge=1)
    prompts_per_step: int = Field(24, ge=1)
    group_size: int = Field(8, ge=2)
    temperature: float = Field(1.0, gt=0)
    max_response_tokens: int = Field(768, ge=1)
    max_draft_depth: int = Field(8, ge=0)
    policy: str = "none"
    drafters: dict[str, DrafterSpec] = {}
    repeat_every: int = Field(0, ge=0)
    gpus_per_worker: float = Field(0.0, ge=0)
    vllm: dict[str, Any] = {}


class TrainConfig(_Section):
    """GRPO. `minibatches` optimizer steps per RL step; the clip range is [1 - clip_low, 1 + clip_high]."""

    steps: int = Field(12, ge=1)
    lr: float = Field(5e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = Field(0.0, ge=0)
    minibatches: int = Field(2, ge=1)
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.28, gt=0)
    kl_coef: float = Field(0.0, ge=0)
    scale_by_std: bool = True
    max_grad_norm: float = Field(1.0, gt=0)
    tokens_per_microbatch: int = Field(8192, ge=1)
    threads: int = Field(1, ge=1)
    gpus: float = Field(0.0, ge=0)


class EvalConfig(_Section):
    """Held-out reward before the first and after the last step: one response per prompt, at the rollout temperature."""

    num_prompts: int = Field(256, ge=0)


class Recipe(_Section):
    """A whole run. `model` is a Hugging Face folder or id; `reward` is `package.module:function`,
    called as reward(prompt, response, answer) -> float. Without `drafter` none is trained."""

    model: str
    reward: str
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    drafter: DrafterConfig | None = None
    eval: EvalConfig = EvalConfig()
    seed: int = 0


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a TOML recipe and apply `section.key=value` overrides; ConfigError lists every fault with its path."""
    try:
        fields = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read recipe {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"recipe {path} is not TOML: {error}") from error
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"override {override!r} is not key=value, for example train.steps=4")
        section = fields
        *parents, leaf = name.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise ConfigError(f"override {override!r}: {parent} is not a section of the recipe")
        section[leaf] = _value(text)
    try:
        return Recipe.model_validate(fields)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError(f"recipe {path}: {faults}") from error


def _value(text: str) -> Any:
    """An override's value as JSON where it is JSON (numbers, lists, true), else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
