"""What a policy writes on given prompts, on which its drafters are judged; and how far two policies are apart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from tltlab.errors import ConfigError
from tltlab.runtime.data.prompts import Prompt, load_prompts
from tltlab.runtime.drafter.heads.kinds import load_head
from tltlab.runtime.drafter.offline.data import TargetStates, Text, load_target
from tltlab.runtime.drafter.offline.evaluate import Acceptance, acceptance_along
from tltlab.runtime.models.measure import sample
from tltlab.runtime.recipe.recipe import DataConfig

MAX_BYTES = 1 << 29
"""Hidden states of one policy that are kept at a time."""


def prompts_of(model: Path, split: str, count: int, begins: str = "") -> list[Prompt]:
    """The first prompts of `train` or `heldout` in a folder of `tltlab make-model` that begin with a word.

    ConfigError where there are none.
    """
    source = model / f"{split}.jsonl"
    if not source.is_file():
        raise ConfigError(f"{source} is missing: the benchmark takes a folder that `tltlab make-model` wrote")
    found = load_prompts(str(source), DataConfig(train=str(source)), AutoTokenizer.from_pretrained(model))
    kept = [prompt for prompt in found if prompt.text.startswith(begins)][:count]
    if not kept:
        raise ConfigError(f"{source} has no prompt that begins with {begins!r}")
    return kept


def written(target: Any, prompts: Sequence[Prompt], *, max_tokens: int, seed: int) -> list[Text]:
    """One response to each prompt, sampled from a Hugging Face model at temperature 1; those of one token are left out.

    The same seed and weights give the same texts.
    """
    responses = sample(
        target, [prompt.token_ids for prompt in prompts], temperature=1.0, max_tokens=max_tokens, seed=seed
    )
    return [
        Text(prompt_token_ids=prompt.token_ids, token_ids=response.token_ids)
        for prompt, response in zip(prompts, responses, strict=True)
        if len(response.token_ids) > 1
    ]


def write_texts(path: Path, texts: Sequence[Text]) -> None:
    """Texts as a JSONL file of token ids, as `tltlab train-drafter` reads it."""
    rows = [json.dumps({"prompt": text.prompt_token_ids, "response": text.token_ids}) for text in texts]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n")


def judged(
    target: Path, heads: Sequence[Path], prompts: Sequence[Prompt], *, depth: int, max_tokens: int, seed: int
) -> list[Acceptance]:
    """How many drafts of each head the policy in `target` keeps along the responses that it now gives to `prompts`.

    All heads are judged on the same responses.
    """
    model, frozen = load_target(target)
    texts = written(model, prompts, max_tokens=max_tokens, seed=seed)
    if not texts:
        raise ConfigError(f"{target} answers every prompt in one token: there is nothing to draft")
    found = []
    for folder in heads:
        head = load_head(folder).to(model.device)
        states = TargetStates(model, head.aux_layers, MAX_BYTES)
        found.append(acceptance_along(head, frozen, (states.of(text) for text in texts), depth))
    return found


@torch.inference_mode()
def policy_kl(now: Path, start: Path, texts: Sequence[Text]) -> float:
    """KL(now || start) in nats per response token, exact over the vocabulary, on `texts` that `now` has written."""
    models = [load_target(folder)[0] for folder in (now, start)]
    total, tokens = 0.0, 0
    for text in texts:
        ids = torch.tensor([text.prompt_token_ids + text.token_ids], device=models[0].device)
        first = len(text.prompt_token_ids) - 1
        logp, other = (torch.log_softmax(model(input_ids=ids).logits[0, first:-1].float(), -1) for model in models)
        total += float((logp.exp() * (logp - other)).sum())
        tokens += len(text.token_ids)
    return total / tokens if tokens else 0.0
