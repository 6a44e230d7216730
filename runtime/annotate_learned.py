"""What learned drafters would have had accepted along recorded text, teacher-forced in torch.

Only leading matches count, so a chain is followed only while it repeats the recorded text. A draft model then sees
nothing but recorded tokens: one pass over the text tells its greedy token everywhere, and the accepted length at a
position is the run of hits from there, cut at the depth. An EAGLE head feeds on its own hidden states instead of the
target's from the second drafted token on: depth d takes a d-th pass, over the positions that are still matching.

Drafts are greedy, as vLLM's are by default. Text is taken to be sampled by the target that is given; for an RL step of
other weights the target's hidden states, and with them an EAGLE head's drafts, are not those of the run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from tltlab.errors import ConfigError
from tltlab.token_times import RecordedResponse

from .eagle import EagleHead, is_eagle_head

CHUNK = 256
"""Positions handled at a time: bounds the memory of logits and attention scores."""

Kept = npt.NDArray[np.uint8]


def learned_annotator(method: str, model: str, target: str | None) -> TeacherForced:
    """The annotator of a checkpoint folder; `method` is "draft_model", "eagle", or "learned": what the folder holds.

    An EAGLE head needs `target`, the folder of the model that it drafts for. Raises ConfigError.
    """
    if not model or not Path(model).is_dir():
        raise ConfigError(
            f"{model or 'an empty name'}: no such folder; a learned drafter is a folder with its checkpoint"
        )
    if method == "learned":
        method = "eagle" if is_eagle_head(model) else "draft_model"
    if method == "draft_model":
        return DraftModel(_language_model(model))
    if method != "eagle":
        raise ConfigError(f"a learned drafter of method {method!r} cannot be annotated; draft_model and eagle can")
    if target is None:
        raise ConfigError(f"{model} is an EAGLE head: give --model, the folder of its target model")
    return Eagle(EagleHead.load(model), _language_model(target))


class TeacherForced(ABC):
    """Annotates responses one by one; subclasses say what is kept along one text."""

    vocabulary: int

    def annotate(self, responses: Sequence[RecordedResponse], max_depth: int) -> list[Kept]:
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
        """Of text (T), the tokens kept of a draft at each position from `start` on: (T - start) integers."""


class DraftModel(TeacherForced):
    """A language model of the target's vocabulary."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.vocabulary = model.config.vocab_size

    def kept(self, text: Tensor, start: int, max_depth: int) -> Tensor:
        if len(text) < 2:
            return torch.zeros(len(text) - start)
        text = text.to(self.model.device)
        hidden = self.model.base_model(input_ids=text[None, :-1], use_cache=False).last_hidden_state[0]
        # Nothing can be drafted before a text's first token.
        first = max(start, 1)
        hits = _greedy(self.model.get_output_embeddings(), hidden[first - 1 :]) == text[first:]
        return functional.pad(_runs(hits).clamp(max=max_depth), (first - start, 0)).cpu()


class Eagle(TeacherForced):
    """An EAGLE head on its target; drafts for token t + 1 need the target's hidden state at t - 1, as in vLLM."""

    def __init__(self, head: EagleHead, target: Any) -> None:
        if head.config.hidden_size != target.config.hidden_size:
            raise ConfigError(
                f"the EAGLE head is for a target of hidden size {head.config.hidden_size}, "
                f"the model has {target.config.hidden_size}"
            )
        self.head = head.to(target.device, target.dtype).eval()
        self.target = target
        self.vocabulary = target.config.vocab_size

    def kept(self, text: Tensor, start: int, max_depth: int) -> Tensor:
        text = text.to(self.target.device)
        kept = torch.zeros(len(text) - start, dtype=torch.long, device=text.device)
        if len(text) < 3:
            return kept.cpu()
        hidden = self.target.base_model(input_ids=text[None, :-2], use_cache=False).last_hidden_state
        embedded = self.target.get_input_embeddings()(text)
        # Input t is (token t + 1, hidden state t), its draft is for token t + 2.
        x = self.head.inputs(embedded[None, 1:-1], hidden)
        q, k, v = self.head.layer.self_attn.project(
            x, self.head.rotation(torch.arange(x.shape[1], device=x.device)[None])
        )
        first = max(start - 2, 0)
        for begin in range(first, x.shape[1], CHUNK):
            at = torch.arange(begin, min(begin + CHUNK, x.shape[1]), device=text.device)
            kept[at + 2 - start] = self._chains(text, embedded, (x, q, k, v), at, max_depth)
        return kept.cpu()

    def _chains(
        self, text: Tensor, embedded: Tensor, base: tuple[Tensor, Tensor, Tensor, Tensor], at: Tensor, max_depth: int
    ) -> Tensor:
        """Tokens kept of the chains whose first draft is that of the inputs `at` (A): (A) integers.

        `base` are the inputs, queries, keys and values of the pass over the text. A chain sees the keys up to its own
        input, and its own later ones.
        """
        layer, lm_head = self.head.layer, self.target.get_output_embeddings()
        x, q, keys, values = base
        length = x.shape[1]
        kept, alive = torch.zeros_like(at), torch.arange(len(at), device=at.device)
        x, q = x[0, at][:, None], q[0, :, at].transpose(0, 1)[:, :, None]
        own_k = own_v = keys.new_zeros(len(at), keys.shape[1], 0, keys.shape[3])
        for step in range(max_depth):
            seen = torch.arange(length, device=at.device) <= at[alive, None]
            out = layer.finish(x, _two_part_attention(q, keys[0], values[0], seen, own_k, own_v))
            hit = _greedy(lm_head, out[:, 0]) == text[at[alive] + 2 + step]
            alive, out, own_k, own_v = alive[hit], out[hit], own_k[hit], own_v[hit]
            kept[alive] += 1
            goes_on = at[alive] + 3 + step < len(text)
            alive, out, own_k, own_v = alive[goes_on], out[goes_on], own_k[goes_on], own_v[goes_on]
            if not len(alive):
                break
            x = self.head.inputs(embedded[at[alive] + 2 + step][:, None], out)
            q, k, v = layer.self_attn.project(x, self.head.rotation((at[alive] + 1 + step)[:, None]))
            own_k, own_v = torch.cat([own_k, k], 2), torch.cat([own_v, v], 2)
        return kept


def _two_part_attention(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, own_k: Tensor, own_v: Tensor) -> Tensor:
    """Attention of A queries (A, heads, 1, D) over shared keys (KV heads, T, D) and own ones (A, KV heads, S, D).

    `seen` (A, T) says which of the shared keys a query may see. Returns (A, heads, 1, D).
    """
    num_kv, width = keys.shape[0], q.shape[-1]
    grouped = q[:, :, 0].unflatten(1, (num_kv, -1))  # (A, KV heads, heads per KV head, D)
    shared = torch.einsum("akgd,ktd->akgt", grouped, keys).masked_fill(~seen[:, None, None], -torch.inf)
    own = torch.einsum("akgd,aksd->akgs", grouped, own_k)
    weights = torch.softmax(torch.cat([shared, own], -1) / width**0.5, -1)
    length = keys.shape[1]
    mixed = torch.einsum("akgt,ktd->akgd", weights[..., :length], values)
    mixed = mixed + torch.einsum("akgs,aksd->akgd", weights[..., length:], own_v)
    return mixed.flatten(1, 2)[:, :, None]


def _greedy(lm_head: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """The likeliest token after each hidden state (N, H): (N) token ids."""
    return torch.cat([lm_head(part).argmax(-1) for part in hidden.split(CHUNK)])


def _runs(hits: Tensor) -> Tensor:
    """Of (N) booleans, how many in a row are true from each on: [1, 1, 0, 1] is [2, 1, 0, 1]."""
    number = torch.arange(len(hits), device=hits.device)
    misses = torch.where(hits, len(hits), number)
    return misses.flip(0).cummin(0).values.flip(0) - number


def _language_model(folder: str) -> Any:
    disable_progress_bar()
    cuda = torch.cuda.is_available()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if cuda else torch.float32)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: no language model there: {' '.join(str(error).split())[:300]}") from error
    return model.to("cuda" if cuda else "cpu").eval()
