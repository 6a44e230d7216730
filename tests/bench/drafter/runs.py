"""What parts of the drafter's benchmark share: GRPO runs, and heads judged along what policies write."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tltlab.errors import ConfigError, RunError
from tltlab.runtime.data.prompts import Prompt
from tltlab.runtime.drafter.heads.kinds import load_head
from tltlab.runtime.drafter.offline.chains import ChainAcceptance, acceptance_along
from tltlab.runtime.drafter.offline.data import PromptedText, TargetStates, load_target
from tltlab.runtime.models.runs import Progress, Sizes, sample_texts
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.run.grpo import GrpoRun
from tltlab.traces.trace import Trace, read


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSizes(Sizes):
    """How much of everything.

    RL steps of the runs: `steps` frozen and adaptive, over `seeds` seeds, `pairs` of coordination, `reward_steps` with
    and without everything, over `reward_seeds` seeds. `texts`: fresh responses on which drafters are judged. `updates`:
    of each recipe.
    """

    seeds: int = 1
    texts: int = 96
    updates: int = 200
    pairs: int = 16
    reward_steps: int = 8
    reward_seeds: int = 3
    checkpoint_megabytes: int = 240
    rounds: int = 8


FAST = BenchSizes(
    model="tiny",
    prompts_per_step=6,
    group_size=4,
    max_response_tokens=128,
    steps=4,
    warm_up_texts=48,
    warm_up_length=1.5,
    warm_up_updates=60,
    texts=16,
    tokens_per_update=512,
    updates=8,
    pairs=3,
    reward_steps=2,
    reward_seeds=2,
    heldout=32,
    checkpoint_megabytes=20,
    rounds=2,
)


def sizes_of(*, fast: bool, **changed: Any) -> BenchSizes:
    """The sizes of a full or of a fast benchmark, changed where a value is not None."""
    changes = {name: value for name, value in changed.items() if value is not None}
    return replace(FAST if fast else BenchSizes(), **changes)


def run_steps(
    recipe: Recipe, out: Path, steps: int, progress: Progress, *, keep: bool = False, kind: type[GrpoRun] = GrpoRun
) -> Trace:
    """Run RL steps into the folder `out`. Returns the trace; the policy is saved at the end.

    `keep`: policy and drafter after each step are kept too, in the folders of `kept_folders`.
    """
    with kind(recipe, out) as run:
        for number in range(steps):
            progress(str(run.step()))
            if keep or number == steps - 1:
                saved = run.save()
            if keep:
                target, head = kept_folders(out, number + 1)
                shutil.copytree(saved, target)
                shutil.copytree(out / "drafter" / "final", head)
    trace = read(out / "trace")
    if trace.steps is None:
        raise RunError(f"{out}: the run recorded no RL step")
    return trace


def kept_folders(out: Path, step: int) -> tuple[Path, Path]:
    """Where `run_steps` keeps the policy and the drafter after so many RL steps."""
    return out / "kept" / str(step) / "policy", out / "kept" / str(step) / "drafter"


MAX_BYTES = 1 << 29
"""Hidden states of one policy that are kept at a time."""


def judged(
    target: Path, heads: Sequence[Path], prompts: Sequence[Prompt], sizes: BenchSizes, *, seed: int
) -> list[ChainAcceptance]:
    """How many drafts of each head the policy in `target` keeps along the responses that it now gives to `prompts`.

    All heads are judged on the same responses.
    """
    model, frozen = load_target(target)
    texts = sample_texts(model, prompts, max_tokens=sizes.max_response_tokens, seed=seed)
    if not texts:
        raise ConfigError(f"{target} answers every prompt in one token: there is nothing to draft")
    acceptances = []
    for folder in heads:
        head = load_head(folder).to(model.device)
        states = TargetStates(model, head.aux_layers, MAX_BYTES)
        acceptances.append(acceptance_along(head, frozen, (states.of(text) for text in texts), sizes.draft_depth))
    return acceptances


@torch.inference_mode()
def policy_kl(now: Path, start: Path, texts: Sequence[PromptedText]) -> float:
    """KL(now || start) in nats per response token, exact over the vocabulary, on `texts` that `now` has written."""
    models = [load_target(folder)[0] for folder in (now, start)]
    total, tokens = 0.0, 0
    for text in texts:
        ids = torch.tensor([text.prompt_token_ids + text.token_ids], device=models[0].device)
        first = len(text.prompt_token_ids) - 1
        logp, start_logp = (torch.log_softmax(model(input_ids=ids).logits[0, first:-1].float(), -1) for model in models)
        total += float((logp.exp() * (logp - start_logp)).sum())
        tokens += len(text.token_ids)
    return total / tokens if tokens else 0.0
