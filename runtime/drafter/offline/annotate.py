"""Acceptance of learned drafters along recorded text, teacher-forced in torch.

Only leading matches count, so a chain is followed only while it repeats the recorded text. A draft model then reads
recorded tokens only: one pass over the text gives its greedy token everywhere, and the accepted length at a position is
the run of hits from there, cut at the depth. EAGLE heads, which read their own states, are followed by
`chains.kept_along`, from the states of one pass of the target.

Drafts are greedy, as vLLM's are by default. The given target counts as the one that sampled the text. For an RL step of
other weights the target's hidden states, and with them an EAGLE head's drafts, differ from those of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tltlab.arrays import Bytes
from tltlab.errors import ConfigError
from tltlab.records import frozen
from tltlab.runtime.drafter.heads.head import DrafterHead
from tltlab.runtime.drafter.heads.layouts import is_head, load_head
from tltlab.runtime.drafter.heads.target import FrozenTarget
from tltlab.traces.drafts import RecordedResponse

from .chains import CHUNK, kept_along
from .data import along, load_target


def learned_annotator(method: str, model: str, target: str | None) -> TeacherForced:
    """Return the annotator of a checkpoint folder of a `method`; "learned" detects the method.

    Methods are "draft_model", "eagle" and "eagle3". A head needs `target`, the folder of the model that it drafts for.
    Raises ConfigError.
    """
    if not model or not Path(model).is_dir():
        raise ConfigError(
            f"{model or 'an empty name'}: no such folder; a learned drafter is a folder with its checkpoint"
        )
    if method == "learned":
        method = "head" if is_head(model) else "draft_model"
    if method == "draft_model":
        drafting, _ = load_target(model)
        return TeacherForced(vocabulary=drafting.config.vocab_size, kept=partial(kept_by_model, drafting))
    if method not in ("eagle", "eagle3", "head"):
        raise ConfigError(
            f"a learned drafter of method {method!r} cannot be annotated; draft_model, eagle and eagle3 can"
        )
    if target is None:
        raise ConfigError(f"{model} is an EAGLE head: give --model, the folder of its target model")
    head = load_head(model, target=target)
    if method not in ("head", head.method):
        raise ConfigError(f"{model} holds a head of method {head.method!r}, not {method!r}")
    verifier, _ = load_target(target)
    head.to(verifier.device, verifier.dtype).eval()
    return TeacherForced(vocabulary=verifier.config.vocab_size, kept=partial(kept_by_head, head, verifier))


@frozen
class TeacherForced:
    """Annotates responses one by one, of tokens below `vocabulary`.

    `kept(prompt, response, max_depth)` are the accepted tokens of a draft at each position of a response: integers
    (response tokens). Prompt and response together have at least two tokens.
    """

    vocabulary: int
    kept: Callable[[Sequence[int], Sequence[int], int], Tensor]

    def annotate(self, responses: Sequence[RecordedResponse], max_depth: int) -> list[Bytes]:
        rows = []
        for response in responses:
            prompt, token_ids = response.prompt_token_ids, response.token_ids
            if (largest := max([*prompt, *token_ids], default=0)) >= self.vocabulary:
                raise ConfigError(
                    f"response {response.key} has token {largest}, the model's vocabulary ends at "
                    f"{self.vocabulary - 1}: this drafter is not for this trace"
                )
            row = torch.zeros(len(token_ids))
            if token_ids and len(prompt) + len(token_ids) > 1:
                with torch.inference_mode():
                    row = self.kept(prompt, token_ids, max_depth)
            rows.append(row.numpy().astype(np.uint8))
        return rows


def kept_by_model(model: Any, prompt: Sequence[int], response: Sequence[int], max_depth: int) -> Tensor:
    """`TeacherForced.kept` of a language model with the target's vocabulary."""
    text = torch.tensor([*prompt, *response], device=model.device)
    hidden = model.base_model(input_ids=text[None, :-1], use_cache=False).last_hidden_state[0]
    # There is no draft before a text's first token.
    first = max(len(prompt), 1)
    lm_head = model.get_output_embeddings()
    greedy = torch.cat([lm_head(part).argmax(-1) for part in hidden[first - 1 :].split(CHUNK)])
    hits, number = greedy == text[first:], torch.arange(len(greedy), device=text.device)
    # Position of the next miss, from each position on: hits [1, 1, 0, 1] have runs of [2, 1, 0, 1].
    misses = torch.where(hits, len(hits), number).flip(0).cummin(0).values.flip(0)
    return functional.pad((misses - number).clamp(max=max_depth), (first - len(prompt), 0)).cpu()


def kept_by_head(
    head: DrafterHead, target: Any, prompt: Sequence[int], response: Sequence[int], max_depth: int
) -> Tensor:
    """`TeacherForced.kept` of an EAGLE or EAGLE-3 head on its target.

    Drafts for token t + 1 need the target's state at t - 1, as in vLLM.
    """
    text = along(target, head.aux_layers, prompt, response)
    return kept_along(head, FrozenTarget.of(target), text, max_depth)
