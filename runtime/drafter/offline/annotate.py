"""Acceptance of learned drafters along recorded text, teacher-forced in torch.

Only leading matches count, so a chain is followed only while it repeats the recorded text. A draft model then reads
recorded tokens only: one pass over the text gives its greedy token everywhere, and the accepted length at a position is
the run of hits from there, cut at the depth. EAGLE heads, which read their own states, are followed by
`chains.kept_along`, from the states of one pass of the target.

Drafts are greedy, as vLLM's are by default. The given target counts as the one that sampled the text. For an RL step of
other weights the target's hidden states, and with them an EAGLE head's drafts, differ from those of the run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tltlab.arrays import Bytes
from tltlab.errors import ConfigError
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
        return DraftModel(load_target(model)[0])
    if method not in ("eagle", "eagle3", "head"):
        raise ConfigError(
            f"a learned drafter of method {method!r} cannot be annotated; draft_model, eagle and eagle3 can"
        )
    if target is None:
        raise ConfigError(f"{model} is an EAGLE head: give --model, the folder of its target model")
    head = load_head(model, target=target)
    if method not in ("head", head.method):
        raise ConfigError(f"{model} holds a head of method {head.method!r}, not {method!r}")
    return Eagle(head, load_target(target)[0])


class TeacherForced(ABC):
    """Annotates responses one by one; subclasses define `kept` along one text."""

    vocabulary: int

    def annotate(self, responses: Sequence[RecordedResponse], max_depth: int) -> list[Bytes]:
        kept = []
        for response in responses:
            text = response.prompt_token_ids + response.token_ids
            if max(text, default=0) >= self.vocabulary:
                raise ConfigError(
                    f"response {response.key} has token {max(text)}, the model's vocabulary ends at "
                    f"{self.vocabulary - 1}: this drafter is not for this trace"
                )
            start = len(response.prompt_token_ids)
            with torch.inference_mode():
                row = self.kept(torch.tensor(text), start, max_depth) if response.token_ids else torch.zeros(0)
            kept.append(row.numpy().astype(np.uint8))
        return kept

    @abstractmethod
    def kept(self, text: Tensor, start: int, max_depth: int) -> Tensor:
        """Return the accepted tokens of a draft at each position of text (T) from `start` on: (T - start) integers."""


class DraftModel(TeacherForced):
    """A language model with the target's vocabulary as drafter."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.vocabulary = model.config.vocab_size

    def kept(self, text: Tensor, start: int, max_depth: int) -> Tensor:
        if len(text) < 2:
            return torch.zeros(len(text) - start)
        text = text.to(self.model.device)
        hidden = self.model.base_model(input_ids=text[None, :-1], use_cache=False).last_hidden_state[0]
        # There is no draft before a text's first token.
        first = max(start, 1)
        lm_head = self.model.get_output_embeddings()
        greedy = torch.cat([lm_head(part).argmax(-1) for part in hidden[first - 1 :].split(CHUNK)])
        hits, number = greedy == text[first:], torch.arange(len(greedy), device=text.device)
        # Position of the next miss, from each position on: hits [1, 1, 0, 1] have runs of [2, 1, 0, 1].
        misses = torch.where(hits, len(hits), number).flip(0).cummin(0).values.flip(0)
        return functional.pad((misses - number).clamp(max=max_depth), (first - start, 0)).cpu()


class Eagle(TeacherForced):
    """An EAGLE or EAGLE-3 head on its target; drafts for token t + 1 need the target's state at t - 1, as in vLLM."""

    def __init__(self, head: DrafterHead, target: Any) -> None:
        if head.config.hidden_size != target.config.hidden_size:
            raise ConfigError(
                f"the EAGLE head is for a target of hidden size {head.config.hidden_size}, "
                f"the model has {target.config.hidden_size}"
            )
        self.head = head.to(target.device, target.dtype).eval()
        self.target = target
        self.frozen = FrozenTarget.of(target)
        self.vocabulary = target.config.vocab_size

    def kept(self, text: Tensor, start: int, max_depth: int) -> Tensor:
        if len(text) < 3:
            return torch.zeros(len(text) - start, dtype=torch.uint8)
        prompt, response = text[:start].tolist(), text[start:].tolist()
        return kept_along(self.head, self.frozen, along(self.target, self.head.aux_layers, prompt, response), max_depth)
