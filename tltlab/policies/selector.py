"""The contract between a policy and its caller, `PolicyDriver`: `choose` a strategy, `observe` its outcome.

The loop belongs to the caller, the simulator's worker or an engine's control. A selector holds no clock and no global
random state: randomness comes from the generator it is built with. Constructors only check and store their arguments;
learned state ends in an underscore.
"""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import (
    SerializerFunctionWrapHandler,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_serializer,
    model_validator,
)

from tltlab.config import Built, FiniteModel
from tltlab.drafters.specs import Drafters
from tltlab.errors import ConfigError
from tltlab.records import Json
from tltlab.state import Choice, StepOutcome, StepState
from tltlab.strategy import Strategy


def _strategy(value: Any, build: ValidatorFunctionWrapHandler) -> Any:
    try:
        return build(Strategy.parse(value) if isinstance(value, str) else value)
    except ConfigError as error:
        raise ValueError(str(error)) from error


StrategyField = Annotated[Strategy, WrapValidator(_strategy)]
"""A strategy, which a file may write as `str` does."""


class SelectorSpec(Built, init=False):
    """Settings of a selector as they stand in a policy file."""

    kind: str

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def build(self, rng: np.random.Generator) -> Selector:
        """A fresh selector that draws from `rng`."""
        selector: Selector = self.make(rng)
        return selector

    def check(self) -> None:
        self.build(np.random.default_rng(0))

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_files(cls, values: Any) -> Any:
        """Take files of earlier releases, which state that `plain_rate` is not set."""
        if isinstance(values, dict) and values.get("plain_rate", 0) is None:
            return {name: value for name, value in values.items() if name != "plain_rate"}
        return values

    @model_serializer(mode="wrap")
    def _without_unused(self, dump: SerializerFunctionWrapHandler) -> Json:
        return {name: value for name, value in dump(self).items() if value not in ((), [])}


def as_tuples(rows: Iterable[FiniteModel]) -> list[tuple[Any, ...]]:
    """Values of the rows of a file, which are objects there and tuples for constructors."""
    return [tuple(value for _, value in row) for row in rows]


WHOLE_TOKENS = "whole_tokens"
"""A need: outcomes count whole tokens. Expected values, as of the simulator's fluid mode, do not serve."""


class Selector(ABC):
    """Chooses a strategy for each decode iteration. One method is enough for a policy of your own.

    >>> class Halving(Selector):
    ...     strategies = (NO_SPECULATION, Strategy.chain("ngram", 4))
    ...     def choose(self, state):
    ...         return self.strategies[state.batch <= 8]

    `choose` returns a strategy, or a `Choice` with the probability and the bucket in which it was chosen.
    Outcomes come late: an engine drafts at the end of one iteration what the next one verifies, so at least one more
    choice is made before `observe` receives the outcome of this one, and some outcomes never come. Whatever an outcome
    needs of its choice belongs into the `Choice`.

    `strategies` lists everything `choose` may return: engines size their buffers by it. `memoryless` promises that
    `choose` depends on nothing but `batch` and `waiting` and that `observe` does nothing; the caller then asks once
    per change of these. `needs` names what the policy cannot do without (`WHOLE_TOKENS`): callers that lack it refuse
    the policy before anything starts. `state_names` are the attributes that a saved state holds, JSON types all; where
    they are `by_arm`, the state of a policy with other arms is refused.

    A class declared with a kind, as in `class Fixed(Selector, kind="fixed")`, has a `Spec`: the model of its settings
    in policy files, made of the constructor's signature. Files know those listed in `specs.SELECTORS`.
    """

    Spec: ClassVar[type[SelectorSpec]]
    strategies: tuple[Strategy, ...] = ()
    memoryless: bool = False
    needs: frozenset[str] = frozenset()
    state_names: ClassVar[tuple[str, ...]] = ()
    by_arm: ClassVar[bool] = False
    rng: np.random.Generator

    def __init_subclass__(cls, kind: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if kind:
            content = {
                "__module__": cls.__module__,
                "__qualname__": f"{cls.__qualname__}.Spec",
                "__doc__": f"Settings of `{cls.__name__}`.",
                "__annotations__": {"kind": Literal[kind]},
                "kind": kind,
            }
            cls.Spec = types.new_class(
                f"{cls.__name__}.Spec", (SelectorSpec,), {"builds": cls}, lambda namespace: namespace.update(content)
            )

    @abstractmethod
    def choose(self, state: StepState) -> Strategy | Choice:
        """Return what the next iteration is to verify, one of `strategies`."""

    def drafts_with(self, drafters: Drafters) -> None:  # noqa: B027
        """Learn what the run's drafters are, before the first choice."""

    def observe(self, choice: Choice, outcome: StepOutcome) -> None:  # noqa: B027
        """Learn from the iteration that verified what `choice` drafted."""

    def reward(self, choice: Choice, outcome: StepOutcome) -> float | None:
        """Reward that `observe` would learn from, None for none. Recorded in decisions.parquet."""
        return None

    @property
    def arm_names(self) -> list[Any]:
        """Names of the arms that learned state belongs to, where it is `by_arm`."""
        return [str(strategy) for strategy in self.strategies]

    def state_dict(self) -> Json:
        """Everything learned, as JSON types: the attributes `state_names`, and the position of a generator `rng`."""
        state = {name.rstrip("_"): deepcopy(getattr(self, name)) for name in self.state_names}
        if self.by_arm:
            state["arms"] = self.arm_names
        if isinstance(rng := getattr(self, "rng", None), np.random.Generator):
            state["rng"] = {key: _plain(value) for key, value in rng.bit_generator.state.items()}
        return state

    def load_state_dict(self, state: Json) -> None:
        """Take back what `state_dict` gave; ConfigError for that of other arms."""
        if self.by_arm and state.get("arms", self.arm_names) != self.arm_names:
            raise ConfigError(f"the saved state has the arms {state['arms']}, this policy has {self.arm_names}")
        for name in self.state_names:
            setattr(self, name, deepcopy(state[name.rstrip("_")]))
        if "rng" in state:
            self.rng.bit_generator.state = state["rng"]


def as_choice(selector: Selector, answer: Strategy | Choice) -> Choice:
    """The choice that `choose` means: a bare strategy is certain.

    A memoryless selector learns nothing from its choices, and they stay: at every batch if it has a single strategy.
    """
    memoryless = selector.memoryless
    if not isinstance(answer, Choice):
        alone = memoryless and len(selector.strategies) == 1
        return Choice(answer, learns=not memoryless, stays=memoryless, least_batch=0 if alone else None)
    return replace(answer, learns=False, stays=True) if memoryless and (answer.learns or not answer.stays) else answer


def chosen(selector: Selector, state: StepState) -> Choice:
    """Ask a selector for a choice."""
    return as_choice(selector, selector.choose(state))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
