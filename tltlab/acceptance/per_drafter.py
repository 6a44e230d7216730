"""Acceptance by drafter: a model for each name, and one for all other names where a user asks for that."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from pydantic import SerializeAsAny

from tltlab.arrays import Floats
from tltlab.drafters.specs import STANDARD, Drafters
from tltlab.errors import ConfigError
from tltlab.state import DrafterState
from tltlab.strategy import Strategy

from .base import Acceptance, AcceptanceModel, Key, RequestAcceptance, Settled, SettledModel, Variation

EVERY = "all"
"""Name under which one model is written that serves every drafter without a model of its own."""


class _Named:
    """Models by the drafter's name; `others` serves the drafters without one."""

    if TYPE_CHECKING:
        models: Mapping[str, Any]
        others: Any

    @property
    def drafters(self) -> tuple[str, ...]:
        return tuple(sorted(self.models)) if self.others is None else ()

    @property
    def every(self) -> list[Any]:
        return [model for model in (*self.models.values(), self.others) if model is not None]

    def of(self, drafter: str) -> Any:
        """The model of a drafter; ConfigError where there is none."""
        if (model := self.models.get(drafter, self.others)) is None:
            raise ConfigError(
                f"no acceptance of drafter {drafter!r} is given, only of {', '.join(self.drafters) or 'none'}: write "
                f"{drafter}=geometric:ALPHA beside it, or {EVERY}=geometric:ALPHA"
            )
        return model

    def knows(self, drafter: str, drafters: Drafters = STANDARD) -> bool:
        model = self.models.get(drafter, self.others)
        return model is not None and bool(model.knows(drafter, drafters))

    def outside(self, strategy: Strategy) -> list[str]:
        outside: list[str] = self.of(strategy.drafter).outside(strategy)
        return outside


@dataclass(frozen=True)
class PerDrafter(_Named):
    """A model for each drafter by its name; `others` serves the drafters without one (None: nothing is known of them).

    `texts` has how a user writes each model, under the same names and `EVERY`.
    """

    models: Mapping[str, Acceptance]
    others: Acceptance | None = None
    texts: Mapping[str, str] = field(default_factory=dict)

    @property
    def trained_drafter(self) -> str | None:
        return next((m.trained_drafter for m in self.every if m.trained_drafter is not None), None)

    @property
    def varies_by(self) -> Variation:
        return "nothing" if all(model.varies_by == "nothing" for model in self.every) else "request"

    def text(self, drafter: str) -> str:
        """How the drafter's model is written, its kind where nobody wrote it."""
        written = self.texts.get(drafter if drafter in self.models else EVERY)
        return written or str(getattr(self.of(drafter), "kind", "a model"))

    def __str__(self) -> str:
        names = [*self.models, *([] if self.others is None else [EVERY])]
        return ",".join(f"{name}={self.texts.get(name, '?')}" for name in names)

    def in_state(self, drafters: Mapping[str, DrafterState]) -> Settled:
        return self._settled(lambda name, model: model.in_state(drafters))

    def at_best(self, drafters: Iterable[str]) -> Settled:
        names = list(drafters)
        return self._settled(lambda name, model: model.at_best(names if name is None else [name]))

    def only(self, drafters: Iterable[str]) -> PerDrafter:
        """The models of these drafters alone."""
        names = list(drafters)
        return PerDrafter({name: self.of(name) for name in names}, None, {name: self.text(name) for name in names})

    def changed(self, change: Callable[[Acceptance], Acceptance], text: str = "") -> PerDrafter:
        """With each model replaced by what `change` makes of it, and `text` behind how it is written."""
        return PerDrafter(
            {name: change(model) for name, model in self.models.items()},
            None if self.others is None else change(self.others),
            {name: f"{written}{text}" for name, written in self.texts.items()},
        )

    def _settled(self, settle: Callable[[str | None, Acceptance], Settled]) -> Settled:
        others = None if self.others is None else settle(None, self.others)
        if others is not None and not self.models:
            return others
        return side_by_side({name: settle(name, model) for name, model in self.models.items()}, others)


def side_by_side(models: Mapping[str, Settled], others: Settled | None = None) -> AlikeByDrafter | RequestsByDrafter:
    """One settled model of several by drafter; ConfigError for acceptance that is replayed."""
    every = [*models.values(), *([] if others is None else [others])]
    if not all(isinstance(model, SettledModel) for model in every):
        raise ConfigError("drafters side by side need models, not acceptance that is replayed")
    alike = all(isinstance(model, AcceptanceModel) for model in every)
    values = {"models": dict(models), "others": others}
    return AlikeByDrafter.model_validate(values) if alike else RequestsByDrafter.model_validate(values)


class _ByDrafter(_Named, SettledModel):
    """Answers of the model that a strategy's drafter has."""

    models: dict[str, SerializeAsAny[SettledModel]]
    others: SerializeAsAny[SettledModel] | None = None

    def check(self, strategy: Strategy) -> None:
        self.of(strategy.drafter).check(strategy)

    def num_drafted(self, strategy: Strategy) -> float:
        return float(self.of(strategy.drafter).num_drafted(strategy))

    def levels(self, drafter: str, keys: Sequence[Key], seed: int) -> Floats:
        levels: Floats = self.of(drafter).levels(drafter, keys, seed)
        return levels

    def survival(self, strategy: Strategy, levels: Floats, generated_tokens: Floats, num_siblings: Floats) -> Floats:
        survival: Floats = self.of(strategy.drafter).survival(strategy, levels, generated_tokens, num_siblings)
        return survival

    def best_survival(
        self, strategy: Strategy, levels: Floats, generated_tokens: Floats, num_siblings: Floats
    ) -> Floats:
        best: Floats = self.of(strategy.drafter).best_survival(strategy, levels, generated_tokens, num_siblings)
        return best

    def most_tokens(self, strategy: Strategy, levels: Floats, num_tokens: Floats, num_siblings: Floats) -> Floats:
        most: Floats = self.of(strategy.drafter).most_tokens(strategy, levels, num_tokens, num_siblings)
        return most

    def scaled(self, drafter: str, ratio: float) -> Any:
        """The model in which each token of one drafter has its chance multiplied by `ratio`, at most 1."""
        models = self.models | {drafter: self.of(drafter).scaled(drafter, ratio)}
        return self.model_copy(update={"models": models})

    def at(self, batch: int) -> Self:
        parts: list[Any] = [*self.models.values(), self.others]
        now = [None if part is None else part.at(batch) for part in parts]
        if all(a is b for a, b in zip(parts, now, strict=True)):
            return self
        # One object per batch size: callers remember models by identity.
        key = tuple(map(id, now))
        if key not in self._at_batches:
            models = dict(zip(self.models, now, strict=False))
            self._at_batches[key] = self.model_copy(update={"models": models, "others": now[-1]})
        return self._at_batches[key]

    @cached_property
    def _at_batches(self) -> dict[tuple[int, ...], Self]:
        return {}


class AlikeByDrafter(_ByDrafter, AcceptanceModel):
    """Drafters whose models all treat requests alike."""

    def distribution(self, strategy: Strategy) -> Floats:
        distribution: Floats = self.of(strategy.drafter).distribution(strategy)
        return distribution

    def tokens_per_iteration(self, strategy: Strategy) -> float:
        return float(self.of(strategy.drafter).tokens_per_iteration(strategy))


class RequestsByDrafter(_ByDrafter, RequestAcceptance):
    """Drafters of which one at least tells requests apart."""

    @property
    def steady(self) -> bool:
        return all(part.steady for part in self.every)


def refuse_one_for_several(
    model: Acceptance | None, text: str | None, names: Collection[str], drafters: Drafters = STANDARD
) -> None:
    """ConfigError where one model, written as `text`, would serve drafters with a network and drafters without one.

    A model that names its drafters is not meant, nor one that was given for all of them.
    """
    inner: Any = model
    while (base := getattr(inner, "base", None)) is not None:
        inner = base
    if model is None or model.drafters or isinstance(inner, PerDrafter | _ByDrafter):
        return
    served = sorted(name for name in names if model.knows(name, drafters))
    if len({drafters[name].has_network for name in served}) > 1:
        each = ",".join(f"{name}={text}" for name in served)
        raise ConfigError(
            f"acceptance {text} would serve drafters of different kinds, {', '.join(served)}: write one for each, "
            f"such as {each}, or {EVERY}={text}"
        )
