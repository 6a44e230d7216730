"""GRPO runs on small models: sizes, prompts and recipes, and the initial drafter."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tltlab.config import counted
from tltlab.coordination.schedule import Kind, ScheduleConfig
from tltlab.errors import ConfigError
from tltlab.files import read_json, write_file
from tltlab.records import Json, frozen
from tltlab.runtime.data.prompts import Prompt, read_prompts
from tltlab.runtime.drafter.offline.data import PromptedText, load_target
from tltlab.runtime.drafter.offline.warm_up import train_drafter
from tltlab.runtime.recipe.drafter import DrafterConfig, LossConfig, OptimConfig, TextConfig, WarmUpConfig
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.recipe.sections import DataConfig, EvalConfig, RolloutConfig, TrainConfig

from .measure import sample

DRAFTER = "learned"
LOSS = LossConfig(token_weight=1.0)
OPTIM = OptimConfig(lr=3e-3)
"""Heads of models this small learn faster with a heavier cross-entropy and larger steps than the defaults."""
CHECK_EVERY = 10

Progress = Callable[[str], None]


@frozen
class Sizes:
    """Sizes of runs on a small model.

    `model` is a size of `tltlab make-model`. `warm_up_length` is the accept length, bonus included, at which a
    drafter's warm-up ends, after `warm_up_updates` at the latest. `tokens_per_update` is for a trainer beside a
    rollout, which finishes the update under way before it yields.
    """

    model: str = "small"
    workers: int = 4
    prompts_per_step: int = 24
    group_size: int = 8
    max_response_tokens: int = 768
    draft_depth: int = 4
    tokens_per_update: int = 1024
    steps: int = 12
    warm_up_texts: int = 256
    warm_up_length: float = 2.1
    warm_up_updates: int = 400
    heldout: int = 512

    @property
    def drafting(self) -> Json:
        """Settings of rollouts with drafts of one depth throughout."""
        return {"policy": f"{DRAFTER}:{self.draft_depth}", "max_draft_depth": self.draft_depth}


def prompts_of(model: Path, split: str, count: int) -> list[Prompt]:
    """Return the first prompts of `train` or `heldout` in a folder of `tltlab make-model`.

    ConfigError where there are none.
    """
    source = model / f"{split}.jsonl"
    if not source.is_file():
        raise ConfigError(f"{source} is missing: the benchmark needs a folder of `tltlab make-model`")
    prompts, _ = read_prompts(str(source), DataConfig(train=str(source)), AutoTokenizer.from_pretrained(model))
    return prompts[:count]


def sample_texts(target: Any, prompts: Sequence[Prompt], *, max_tokens: int, seed: int) -> list[PromptedText]:
    """Sample one response to each prompt from a Hugging Face model at temperature 1; omit those of one token.

    The same seed and weights give the same texts.
    """
    responses = sample(
        target, [prompt.token_ids for prompt in prompts], temperature=1.0, max_tokens=max_tokens, seed=seed
    )
    return [
        PromptedText(prompt_token_ids=prompt.token_ids, token_ids=response)
        for prompt, response in zip(prompts, responses, strict=True)
        if len(response) > 1
    ]


def warmed_up(model: Path, out: Path, sizes: Sizes, progress: Progress) -> Path:
    """Return the folder `out` with a head trained for the model as it is; train it first where it is missing."""
    if (out / "config.json").is_file():
        return out
    prompts = prompts_of(model, "train", sizes.warm_up_texts)
    target, _ = load_target(model)
    texts = sample_texts(target, prompts, max_tokens=sizes.max_response_tokens, seed=0)
    data = out.with_name(f"{out.name}-texts.jsonl")
    rows = [json.dumps({"prompt": text.prompt_token_ids, "response": text.token_ids}) for text in texts]
    write_file(data, "\n".join(rows) + "\n")
    config = WarmUpConfig(
        loss=LOSS,
        texts=TextConfig(max_response_tokens=sizes.max_response_tokens),
        updates=sizes.warm_up_updates,
        until_accept_length=sizes.warm_up_length,
        check_every=CHECK_EVERY,
        depth=sizes.draft_depth,
    )
    report = train_drafter(model, data, out, config, progress)
    progress(
        f"{counted(report['updates'], 'update')} of warm-up to accept length {report['after']['accept_length']:.2f}"
    )
    return out


def trained_beside(head: Path, sizes: Sizes, kind: Kind = "always") -> DrafterConfig:
    """Return a drafter that starts as the head in a folder; idle workers train it, by default in every rollout.

    Every drafter that served is annotated, for comparisons of the first one with any later one.
    """
    return DrafterConfig(
        name=DRAFTER,
        checkpoint=str(head),
        loss=LOSS,
        optim=OPTIM,
        schedule=ScheduleConfig(kind=kind),
        tokens_per_update=sizes.tokens_per_update,
        ages=sizes.steps,
    )


def recipe_of(
    model: Path,
    sizes: Sizes,
    *,
    seed: int,
    drafter: DrafterConfig | None,
    train: Path | None = None,
    **rollout: Any,
) -> Recipe:
    """Return a recipe of a run on a folder of `tltlab make-model`; `train` replaces its prompts.

    `rollout` are further settings of its rollouts.
    """
    report = read_json(model / "report.json")
    if not isinstance(report, Mapping) or "reward" not in report:
        raise ConfigError(f"{model / 'report.json'} names no reward: the benchmark takes a folder of tltlab make-model")
    return Recipe(
        model=str(model),
        reward=report["reward"],
        data=DataConfig(train=str(train or model / "train.jsonl"), heldout=str(model / "heldout.jsonl")),
        rollout=RolloutConfig(
            num_workers=sizes.workers,
            prompts_per_step=sizes.prompts_per_step,
            group_size=sizes.group_size,
            max_response_tokens=sizes.max_response_tokens,
            vllm={"max_num_seqs": max(sizes.prompts_per_step * sizes.group_size // sizes.workers, 1) + 1},
            **rollout,
        ),
        train=TrainConfig(steps=sizes.steps),
        drafter=drafter,
        eval=EvalConfig(num_prompts=sizes.heldout),
        seed=seed,
    )
