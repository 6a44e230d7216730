"""Acceptance by drafter: a model for each name, and one for all other names where a user asks for that."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tltlab.drafters.specs import STANDARD, Drafters
from tltlab.errors import ConfigError
from tltlab.strategy import Strategy

from .base import Acceptance, Variation, Wrapped

EVERY = "all"
"""Name under which one model is written that serves every drafter without its own model."""


@dataclass(frozen=True)
class PerDrafter(Wrapped):
    """A model for each drafter by its name; `others` serves the drafters without one (None: nothing is known of them).

    `texts` has how a user writes each model, under the same names and `EVERY`. Raises ConfigError for acceptance that
    is replayed.
    """

    models: Mapping[str, Acceptance]
    others: Acceptance | None = None
    texts: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(part.varies_by == "position" for part in self.parts):
            raise ConfigError("drafters side by side need models, not acceptance that is replayed")

    @property
    def parts(self) -> tuple[Acceptance, ...]:
        return (*self.models.values(), *(() if self.others is None else (self.others,)))

    def of(self, drafter: str) -> Acceptance:
        """The model of a drafter; ConfigError where there is none."""
        if (model := self.models.get(drafter, self.others)) is None:
            raise ConfigError(
                f"no acceptance of drafter {drafter!r} is given, only of {', '.join(self.drafters) or 'none'}: write "
                f"{drafter}=geometric:ALPHA beside it, or {EVERY}=geometric:ALPHA"
            )
        return model

    def with_parts(self, parts: Sequence[Acceptance]) -> PerDrafter:
        others = None if self.others is None else parts[-1]
        return replace(self, models=dict(zip(self.models, parts, strict=False)), others=others)

    @property
    def varies_by(self) -> Variation:
        return "nothing" if all(part.varies_by == "nothing" for part in self.parts) else "request"

    @property
    def drafters(self) -> tuple[str, ...]:
        return tuple(sorted(self.models)) if self.others is None else ()

    def knows(self, drafter: str, drafters: Drafters = STANDARD) -> bool:
        model = self.models.get(drafter, self.others)
        return model is not None and model.knows(drafter, drafters)

    def by_batch(self, drafter: str) -> tuple[Acceptance, ...]:
        return self.of(drafter).by_batch(drafter)

    def tokens_per_iteration(self, strategy: Strategy) -> float:
        own = self.of(strategy.drafter).tokens_per_iteration(strategy)
        return own if self.varies_by == "nothing" else math.nan

    def text(self, drafter: str) -> str:
        """The text of the drafter's model, or its kind if it has none."""
        written = self.texts.get(drafter if drafter in self.models else EVERY)
        return written or str(getattr(self.of(drafter), "kind", "a model"))

    def __str__(self) -> str:
        names = [*self.models, *([] if self.others is None else [EVERY])]
        return ",".join(f"{name}={self.texts.get(name, '?')}" for name in names)

    def only(self, drafters: Iterable[str]) -> PerDrafter:
        """The models of these drafters alone."""
        names = list(drafters)
        return PerDrafter({name: self.of(name) for name in names}, None, {name: self.text(name) for name in names})

    def changed(self, change: Callable[[Acceptance], Acceptance], text: str = "") -> PerDrafter:
        """Apply `change` to each model and append `text` to how it is written; itself where nothing changes."""
        model = self._with_parts([change(part) for part in self.parts])
        texts = {name: f"{written}{text}" for name, written in self.texts.items()}
        return replace(model, texts=texts) if text else model


def refuse_one_for_several(
    model: Acceptance | None, text: str | None, names: Collection[str], drafters: Drafters = STANDARD
) -> None:
    """ConfigError where one model, written as `text`, would serve drafters with a network and drafters without one.

    A model that names its drafters is not meant, nor one that was given for all of them.
    """
    inner = model
    while isinstance(inner, Wrapped) and not isinstance(inner, PerDrafter):
        inner = inner.base
    if model is None or model.drafters or isinstance(inner, PerDrafter):
        return
    served = sorted(name for name in names if model.knows(name, drafters))
    if len({drafters[name].has_network for name in served}) > 1:
        each = ",".join(f"{name}={text}" for name in served)
        raise ConfigError(
            f"acceptance {text} would serve drafters of different kinds, {', '.join(served)}: write one for each, "
            f"such as {each}, or {EVERY}={text}"
        )
