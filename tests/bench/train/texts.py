"""Input of the same GRPO run: a recipe for tltlab, and a script for TRL's GRPOTrainer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

TRL_BATCH = 8
"""Responses of one forward pass: TRL's default `per_device_train_batch_size`, and the number of its generations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoJob:
    """The run that both do: model folder of `tltlab make-model`, its reward by import path, and how much of it.

    `cores` CPU cores are shared by engines and trainer, which do not work at the same time.
    """

    model: Path
    reward: str
    steps: int
    prompts_per_step: int
    group_size: int
    max_response_tokens: int
    cores: int
    policy: str = "none"
    seed: int = 0

    @property
    def responses(self) -> int:
        """Responses of an RL step."""
        return self.prompts_per_step * self.group_size


def recipe_text(setting: GrpoJob) -> str:
    """The recipe for `tltlab train`; what it leaves out has the same value in TRL's script, or none there."""
    # An engine built to speculate takes a fifth longer also where its policy never does.
    no_drafts = "max_draft_depth = 0\n" if setting.policy == "none" else ""
    return f"""model = {_quoted(setting.model)}
reward = {_quoted(setting.reward)}
seed = {setting.seed}
[data]
train = {_quoted(setting.model / "train.jsonl")}
[rollout]
num_workers = {setting.cores}
prompts_per_step = {setting.prompts_per_step}
group_size = {setting.group_size}
max_response_tokens = {setting.max_response_tokens}
policy = {_quoted(setting.policy)}
{no_drafts}[train]
steps = {setting.steps}
lr = 5e-4
betas = [0.9, 0.99]
clip_high = 0.28
minibatches = 1
dtype = "float32"
threads = {setting.cores}
[eval]
num_prompts = 0
"""


def script_text(setting: GrpoJob, out: Path, *, vllm: bool) -> str:
    """The script for TRL 1.16, as its documentation begins one; the policy is saved to `out`.

    Settings stand in it where TRL's default would learn otherwise than the recipe does, or for logging. The same
    samples then move the weights alike up to 1e-4, which TRL adds to standard deviations; in its vLLM mode TRL tells
    vLLM no dtype, which then samples from a float32 model in bfloat16. Both take one optimizer step because with
    several TRL divides each one's loss by a share of all tokens of the RL step, `tltlab train` by its mini-batch's.
    """
    module, _, function = setting.reward.partition(":")
    mode = """        use_vllm=True,
        vllm_mode="colocate",
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=2.0,
"""
    return f"""from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from {module} import {function}


def reward(prompts, completions, answer, **columns):
    return [{function}(*row) for row in zip(prompts, completions, answer, strict=True)]


trainer = GRPOTrainer(
    model={_quoted(setting.model)},
    reward_funcs=reward,
    train_dataset=load_dataset("json", data_files={_quoted(setting.model / "train.jsonl")}, split="train"),
    args=GRPOConfig(
        output_dir={_quoted(out)},
        max_steps={setting.steps},
        learning_rate=5e-4,
        lr_scheduler_type="constant",
        adam_beta2=0.99,
        epsilon_high=0.28,
        bf16=False,
        num_generations={setting.group_size},
        gradient_accumulation_steps={setting.responses // TRL_BATCH},
        max_completion_length={setting.max_response_tokens},
{mode if vllm else ""}        logging_steps=1,
        report_to="none",
        save_strategy="no",
        seed={setting.seed},
    ),
)
trainer.train()
trainer.save_model()
"""


def written_lines(text: str) -> int:
    """Lines that a user writes: neither blank nor only a comment.

    >>> written_lines("# a\\n\\n  # b\\nc = 1  # d\\n[e]\\n")
    2
    """
    lines = (line.strip() for line in text.splitlines())
    return sum(bool(line) and not line.startswith("#") for line in lines)


def _quoted(value: object) -> str:
    return json.dumps(str(value))
