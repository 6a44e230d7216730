"""Give TRL's trainer and ours the same samples; `python trl_same_samples.py RECIPE OUT < SCRIPT`, TRL importable.

SCRIPT is one for TRL and RECIPE ours for the same run. OUT becomes a JSON object: how far the weights `moved` in all RL
steps under our trainer, and how far those of both are `apart` then, as norms over all weights.
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from tltlab.files import write_json
from tltlab.runtime.models.runs import prompts_of
from tltlab.runtime.recipe.recipe import load_recipe
from tltlab.runtime.trainer.samples import Sample
from tltlab.runtime.trainer.trainer import Trainer


class SamplesGiven(GRPOTrainer):
    """TRL's trainer with responses that were drawn elsewhere: `given`, those of each RL step in turn."""

    given: Any

    def _generate_single_turn(self, prompt_ids, *_, **__):
        samples = next(self.given)
        assert [list(ids) for ids in prompt_ids] == [sample.prompt_token_ids for sample in samples]
        return [sample.token_ids for sample in samples], None


def main(recipe_file, out, script):
    recipe = load_recipe(recipe_file)
    rollout, model = recipe.rollout, Path(recipe.model)
    count = rollout.prompts_per_step * recipe.train.steps
    prompts = prompts_of(model, "train", count)
    trainer = Trainer(
        recipe.model, recipe.train, temperature=1.0, max_response_tokens=rollout.max_response_tokens, seed=0
    )
    before = trainer.weights()
    generator = torch.Generator().manual_seed(0)
    end, words = trainer.tokenizer.eos_token_id, len(trainer.tokenizer)
    steps = []
    for rl_step in range(recipe.train.steps):
        samples = []
        for group, prompt in enumerate(prompts[rl_step * rollout.prompts_per_step :][: rollout.prompts_per_step]):
            for _ in range(rollout.group_size):
                length = int(torch.randint(1, rollout.max_response_tokens + 1, (), generator=generator))
                drawn = torch.randint(end + 2, words, (length,), generator=generator).tolist()
                ids = drawn if length == rollout.max_response_tokens else [*drawn[:-1], end]
                [logprobs] = trainer.score([(prompt.token_ids, ids)])
                samples.append(
                    Sample(
                        prompt_token_ids=prompt.token_ids,
                        token_ids=ids,
                        logprobs=logprobs.tolist(),
                        reward=float(torch.randint(0, 2, (), generator=generator)),
                        group=group,
                        truncated=ids[-1] != end,
                    )
                )
        trainer.old_logprobs(samples)
        trainer.update(rl_step)
        steps.append(samples)
    ours = trainer.weights()
    rewards = iter([[sample.reward for sample in samples] for samples in steps])

    config = re.search(r"args=(GRPOConfig\(.*\n    \)),\n", script, re.DOTALL)
    assert config is not None
    args = eval(config[1], {"GRPOConfig": GRPOConfig})
    # The prompts of each RL step have to be ours.
    args.shuffle_dataset = False
    theirs = SamplesGiven(
        model=recipe.model,
        reward_funcs=lambda prompts, **_: next(rewards),
        train_dataset=Dataset.from_list([{"prompt": prompt.text} for prompt in prompts]),
        args=args,
    )
    theirs.given = iter(steps)
    theirs.train()
    after = {name: tensor.detach() for name, tensor in theirs.model.state_dict().items()}
    write_json(out, {"moved": _distance(ours, before), "apart": _distance(ours, after)})


def _distance(a, b):
    return math.sqrt(sum(float(((a[name] - b[name]).double() ** 2).sum()) for name in a))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.stdin.read())
