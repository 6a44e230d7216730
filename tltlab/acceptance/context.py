"""How a drafter's acceptance falls beyond the length at which the drafter was trained."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, PositiveFloat, SerializeAsAny, TypeAdapter, field_validator

from tltlab.arrays import Floats
from tltlab.errors import ConfigError
from tltlab.strategy import Strategy

from .base import Acceptance, AcceptanceModel, RequestArrays, Scaled, Variation, Wrapped, scaled
from .curves import Alike, SiblingAcceptance

USELESS_AT = 9.0
"""Context, in lengths at which the drafter was trained, from which on the target accepts none of its tokens."""
TRAINED_TOKENS: dict[str, int | None] = {"short": 2048, "window": None, "long": 32_768, "mtp": 131_072}
"""Lengths at which drafters are trained, by name; None for one whose acceptance does not depend on context.

- `short`: an EAGLE-3 head of today's checkpoints, trained at 2K tokens (the source of `ContextAcceptance`).
- `window`: a drafter that attends to a sliding window sees no longer context than it was trained at. Its chance is
  lower: in the same source .37 at every context, where the head with full attention has .64 at 2K.
- `long`: a drafter trained on whole responses of up to 32K tokens, such as those of the buffer with which TLT trains
  its drafter during RL (arXiv 2511.16665).
- `mtp`: a module trained together with the target, up to 128K tokens as DeepSeek-V3 (arXiv 2412.19437); an assumption.
"""
_HELD = 16, 128
"""Chances are held for a 16th of the trained length in iterations, at most 128: a chance loses some 3 % meanwhile."""
_K = 1024
_WRITTEN = re.compile(r"(.+)@([\w.]+)", re.DOTALL)
_LENGTH = re.compile(r"(\d+(?:\.\d+)?)([kK]?)")
_BASE: TypeAdapter[Alike | SiblingAcceptance] = TypeAdapter(
    Annotated[Alike | SiblingAcceptance, Field(discriminator="kind")]
)


class ContextAcceptance(Wrapped, AcceptanceModel):
    """Any model as it holds at a context c, tokens of prompt and response, for a drafter trained at `trained_tokens` T.

    The chance of each drafted token, given those before it, is that of `base` times

        share(c) = 1 for c <= T,      max(0, (9 T - c) / (8 T)) beyond.

    So `base` describes the drafter within the length at which it was trained, and c and T are in tokens. `names` are
    the drafters that this holds for, () for all. T None is a drafter whose acceptance does not depend on context.

    Source: accept lengths of an EAGLE-3 head of Qwen3-8B trained at 2K tokens, 2.30 / 2.04 / 1.69 / 1.09 at a context
    of 2K / 4K / 8K / 16K (vllm-project/speculators, PR 684), taken as chains of depth 3: chances .635 / .557 / .427 /
    .083, a straight line that reaches 0 at 18.3K. With a chance of .64 at 2K the model gives 2.31 / 2.05 / 1.62 / 1.09.
    Only one trained length is published: that the line scales with it is an assumption.

    >>> from .base import GeometricAcceptance
    >>> head = ContextAcceptance(base=GeometricAcceptance(alpha=0.64), trained_tokens=2048)
    >>> [round(head.at_context(k * 1024).tokens_per_iteration(Strategy.chain("learned", 3)), 2) for k in (1, 2, 8, 18)]
    [2.31, 2.31, 1.62, 1.0]
    """

    kind: Literal["context"] = "context"
    base: SerializeAsAny[AcceptanceModel]
    trained_tokens: PositiveFloat | None
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @field_validator("base", mode="before")
    @classmethod
    def _load_base(cls, base: Any) -> Any:
        model = _BASE.validate_python(base) if isinstance(base, dict) else base
        if isinstance(model, ContextAcceptance):
            raise ValueError("base: one length at which the drafter was trained is enough")
        return model

    def with_parts(self, parts: Sequence[Acceptance]) -> ContextAcceptance:
        return ContextAcceptance.model_validate({**dict(self), "base": parts[0]})

    @property
    def varies_by(self) -> Variation:  # type: ignore[override]
        return self.base.varies_by if self.trained_tokens is None else "request"

    @property
    def refresh_iterations(self) -> int:
        if self.trained_tokens is None or self.base.varies_by == "request":
            return self.base.refresh_iterations
        share, most = _HELD
        return max(self.base.refresh_iterations, min(most, int(self.trained_tokens / share)))

    def at_context(self, context_tokens: float) -> Acceptance:
        if self.trained_tokens is None:
            return self.base
        return Scaled(self.base, self.names, float(self.share(np.array(context_tokens))))

    def within(self, context_tokens: float) -> Acceptance:
        beyond = self.trained_tokens is not None and context_tokens > self.trained_tokens
        return self if beyond else self.base

    def share(self, context_tokens: Floats) -> Floats:
        """Chance of a drafted token over that within the trained length, 1 to 0."""
        if self.trained_tokens is None:
            return np.ones_like(context_tokens, np.float64)
        return np.clip((USELESS_AT - context_tokens / self.trained_tokens) / (USELESS_AT - 1.0), 0.0, 1.0)

    def survival(self, strategy: Strategy, requests: RequestArrays) -> Floats:
        survival = self.base.survival(strategy, requests)
        if self.trained_tokens is None or (self.names and strategy.drafter not in self.names):
            return survival
        return scaled(survival, self.share(requests.context_tokens)[:, None])

    def most_tokens(self, strategy: Strategy, requests: RequestArrays) -> Floats:
        # The base is monotone in progress and the share falls with it: their product may peak between the ends.
        shortest = float(np.min(requests.prompt_tokens, initial=np.inf))
        return self.at_context(shortest if np.isfinite(shortest) else 0.0).most_tokens(strategy, requests)


def split_trained(text: str) -> tuple[str, float | None] | None:
    """The model and the trained length in `geometric:0.7@2k`, `learned.json@window`; None for text without a length.

    Raises ConfigError for a length that is neither a number of tokens (k: 1024 of them) nor a name.

    >>> split_trained("geometric:0.7@2k"), split_trained("0.6@long"), split_trained("0.6@window")
    (('geometric:0.7', 2048.0), ('0.6', 32768), ('0.6', None))
    """
    if not (parts := _WRITTEN.fullmatch(text)):
        return None
    model, written = parts.groups()
    if written in TRAINED_TOKENS:
        return model, TRAINED_TOKENS[written]
    if (length := _LENGTH.fullmatch(written)) is None or not float(length[1]):
        raise ConfigError(
            f"acceptance {text}: @{written} is no length at which a drafter was trained: give tokens, such as 2048 or "
            f"2k, or {', '.join(TRAINED_TOKENS)}"
        )
    return model, float(length[1]) * (_K if length[2] else 1)


def trained_text(trained_tokens: float | None) -> str:
    """How a user writes a trained length.

    >>> trained_text(2048.0), trained_text(1500.0), trained_text(None)
    ('2k', '1500', 'window')
    """
    if trained_tokens is None:
        return "window"
    return f"{trained_tokens / _K:g}k" if trained_tokens % _K == 0 else f"{trained_tokens:g}"


def trained_at(model: Acceptance, trained_tokens: float | None, text: str) -> Acceptance:
    """The model with acceptance by context; within freshness, which holds around it.

    Raises ConfigError for acceptance that is replayed or by drafter, and for a model with a trained length.
    """
    if not isinstance(model, AcceptanceModel):
        raise ConfigError(f"acceptance {text}: a trained length is for one drafter, as in learned=geometric:ALPHA@2k")
    if isinstance(model, ContextAcceptance):
        known = trained_text(model.trained_tokens)
        raise ConfigError(f"acceptance {text}: the model has a trained length already, {known}: leave out the other")
    if isinstance(model, Wrapped) and model.trained_drafter is not None:
        return model.with_parts([trained_at(part, trained_tokens, text) for part in model.parts])
    return ContextAcceptance(base=model, trained_tokens=trained_tokens)
