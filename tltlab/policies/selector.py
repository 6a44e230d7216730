"""The contract between a policy and its caller, an engine or the simulator: ask with `choose`, tell with `observe`.

The loop belongs to the caller. A selector holds no clock and no global random state: randomness comes from the
generator it is built with. Constructors only check and store their arguments; learned state ends in an underscore.
"""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import SerializerFunctionWrapHandler, ValidatorFunctionWrapHandler, WrapValidator, model_serializer

from tltlab.config import Built, FiniteModel
from tltlab.drafters.specs import Drafters
from tltlab.errors import ConfigError
from tltlab.state import StepOutcome, StepState
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

    @model_serializer(mode="wrap")
    def _without_what_is_not_used(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if value not in ((), [])}


def as_tuples(rows: Iterable[FiniteModel]) -> list[tuple[Any, ...]]:
    """Values of the rows of a file, which are objects there and tuples for constructors."""
    return [tuple(value for _, value in row) for row in rows]


class Selector(ABC):
    """Chooses a strategy for each decode iteration. One method is enough for a policy of your own.

    >>> class Halving(Selector):
    ...     strategies = (NO_SPECULATION, Strategy.chain("ngram", 4))
    ...     def choose(self, state):
    ...         return self.strategies[state.batch <= 8]

    `strategies` lists everything `choose` may return: engines size their buffers by it. `memoryless` promises that
    `choose` depends on nothing but `batch` and `waiting` and that `observe` does nothing; the simulator then asks once
    per change of these. `propensity_` is the probability that the last choice had, `bucket_` the bucket it fell in.
    `steady_` promises it of the last choice alone: the next ones are the same until one of `batch`, `waiting` and
    `rl_step` changes, whether it is asked for them or not.

    A class declared with a kind, as in `class Fixed(Selector, kind="fixed")`, has a `Spec`: the model of its settings
    in policy files, made of the constructor's signature. Files know those listed in `specs.SELECTORS`.
    """

    Spec: ClassVar[type[SelectorSpec]]
    strategies: tuple[Strategy, ...] = ()
    memoryless: bool = False
    propensity_: float = 1.0
    bucket_: int | None = None
    steady_: bool = False

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
    def choose(self, state: StepState) -> Strategy:
        """Return the strategy for the next iteration, one of `strategies`."""

    def drafts_with(self, drafters: Drafters) -> None:  # noqa: B027
        """Learn what the run's drafters are, before the first choice."""

    def observe(self, strategy: Strategy, outcome: StepOutcome) -> None:  # noqa: B027
        """Learn from an iteration that ran under `strategy`."""

    def learns_from(self, strategy: Strategy) -> bool:
        """Whether `observe` and `reward` do anything with an outcome of `strategy` as things stand."""
        return True

    def reward(self, strategy: Strategy, outcome: StepOutcome) -> float | None:
        """The reward this selector would learn from, None if it learns nothing. Recorded in decisions.parquet."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Everything learned, as JSON types."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Take back what `state_dict` gave."""


def rng_state(rng: np.random.Generator) -> dict[str, Any]:
    """The generator's position as JSON types, for `Selector.state_dict`."""
    return {key: _plain(value) for key, value in rng.bit_generator.state.items()}


def set_rng_state(rng: np.random.Generator, state: dict[str, Any]) -> None:
    """Move `rng` to a position that `rng_state` gave; both must be of one kind (PCG64, ...)."""
    rng.bit_generator.state = state


def refuse_other_arms(saved: list[Any], arms: list[Any]) -> None:
    """ConfigError where a saved state is that of other arms."""
    if saved != arms:
        raise ConfigError(f"the saved state has the arms {saved}, this policy has {arms}")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
