"""What a drafter learns from: a response's text and the target's hidden states along it, never padded."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from tltlab.drafters.base import Key


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSequence:
    """A stretch of one request, prompt and response, with the states of the pass that generated or scored it.

    `token_ids` (N + 1) and `hidden` (N, H): row t is the target's last hidden state, after its final norm, at the
    position of token t; the last token was sampled and never read, so it has none. `aux` (N, A H) are the hidden states
    that enter A of the target's layers, side by side, for EAGLE-3. `first_position` is the position of token 0 in its
    request, above 0 where a cached prefix was not computed again; the first `prompt_tokens` tokens are the prompt's.
    """

    key: Key
    token_ids: Tensor
    hidden: Tensor
    aux: Tensor | None = None
    first_position: int = 0
    prompt_tokens: int = 0

    def __post_init__(self) -> None:
        rows = len(self.token_ids) - 1
        assert rows >= 0
        assert len(self.hidden) == rows
        assert self.aux is None or len(self.aux) == rows

    @property
    def rl_step(self) -> int:
        return self.key[0]

    @property
    def num_rows(self) -> int:
        """N, the tokens with a hidden state."""
        return len(self.hidden)

    @property
    def teaches(self) -> bool:
        """Whether a drafter learns anything from it: two states, and a token of the response after them."""
        return self.num_rows >= max(2, self.prompt_tokens)

    @property
    def nbytes(self) -> int:
        """What it takes on the host."""
        tensors = [self.token_ids, self.hidden] + ([] if self.aux is None else [self.aux])
        return sum(t.numel() * t.element_size() for t in tensors)

    def stretch(self, start: int, rows: int) -> TrainingSequence:
        """`rows` rows from row `start` on: a view."""
        stop = start + rows
        return replace(
            self,
            token_ids=self.token_ids[start : stop + 1],
            hidden=self.hidden[start:stop],
            aux=None if self.aux is None else self.aux[start:stop],
            first_position=self.first_position + start,
            prompt_tokens=max(0, self.prompt_tokens - start),
        )

    def on_host(self) -> TrainingSequence:
        """The same on the host, with no more memory behind it than it shows."""
        aux = None if self.aux is None else _own(self.aux)
        return replace(self, token_ids=_own(self.token_ids), hidden=_own(self.hidden), aux=aux)


def _own(tensor: Tensor) -> Tensor:
    host = tensor.detach().cpu()
    return host if host.untyped_storage().nbytes() == host.numel() * host.element_size() else host.clone()
