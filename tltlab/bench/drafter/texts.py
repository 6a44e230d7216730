"""How a policy keeps the drafts of given heads along what it now writes; and how far two policies are apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from tltlab.errors import ConfigError
from tltlab.runtime.data.prompts import Prompt
from tltlab.runtime.drafter.heads.kinds import load_head
from tltlab.runtime.drafter.offline.data import TargetStates, Text, load_target
from tltlab.runtime.drafter.offline.evaluate import Acceptance, acceptance_along
from tltlab.runtime.models.runs import written

MAX_BYTES = 1 << 29
"""Hidden states of one policy that are kept at a time."""


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
