"""Settings of selectors as they stand in a policy file: checked when they are read, built when they are needed."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from abc import ABC, abstractmethod
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_serializer,
)
from pydantic import model_validator as validator

from tltlab.config import FiniteModel
from tltlab.costs.load import load_costs
from tltlab.errors import ConfigError
from tltlab.strategy import Strategy
from tltlab.testing import check_selector

from .bandits import EpsilonGreedy, Ucb1
from .beg_mab import BegMab
from .goodput import Goodput
from .reward import RewardKind, Statistic
from .selector import Selector
from .simple import BatchTable, Explore, Fixed, NoSpeculation


def _strategy(value: Any, build: ValidatorFunctionWrapHandler) -> Any:
    try:
        return build(value)
    except ConfigError as error:
        raise ValueError(str(error)) from error


StrategyField = Annotated[Strategy, WrapValidator(_strategy)]
Strategies = tuple[StrategyField, ...]


class Settings(FiniteModel):
    """A part of a policy file."""


class _Spec(Settings, ABC):
    """Settings of one selector. Whatever its constructor refuses is refused when the settings are read."""

    @abstractmethod
    def build(self, rng: np.random.Generator) -> Selector:
        """A fresh selector that draws from `rng`."""

    @validator(mode="after")
    def _can_be_built(self) -> _Spec:
        try:
            self.build(np.random.default_rng(0))
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self


class NoneSpec(_Spec):
    kind: Literal["none"] = "none"

    def build(self, rng: np.random.Generator) -> Selector:
        return NoSpeculation()


class FixedSpec(_Spec):
    kind: Literal["fixed"] = "fixed"
    strategy: StrategyField

    def build(self, rng: np.random.Generator) -> Selector:
        return Fixed(self.strategy)


class TableRow(Settings):
    """`strategy` from `min_batch` requests up to the next row."""

    min_batch: int
    strategy: StrategyField


class TableSpec(_Spec):
    kind: Literal["table"] = "table"
    rows: tuple[TableRow, ...]

    def build(self, rng: np.random.Generator) -> Selector:
        return BatchTable([(row.min_batch, row.strategy) for row in self.rows])


class ExploreSpec(_Spec):
    kind: Literal["explore"] = "explore"
    strategies: Strategies
    hold_iterations: int = 20

    def build(self, rng: np.random.Generator) -> Selector:
        return Explore(self.strategies, self.hold_iterations, rng=rng)


class EpsilonGreedySpec(_Spec):
    kind: Literal["epsilon-greedy"] = "epsilon-greedy"
    strategies: Strategies
    epsilon: float = 0.1
    window: int = 300
    reward: RewardKind = "paper"
    plain_rate: dict[int, float] | None = None
    statistic: Statistic = "mean"

    def build(self, rng: np.random.Generator) -> Selector:
        return EpsilonGreedy(
            self.strategies, self.epsilon, self.window, self.reward, self.plain_rate, self.statistic, rng=rng
        )


class Ucb1Spec(_Spec):
    kind: Literal["ucb1"] = "ucb1"
    strategies: Strategies
    exploration: float = 1.0
    window: int = 300
    reward: RewardKind = "paper"
    plain_rate: dict[int, float] | None = None

    def build(self, rng: np.random.Generator) -> Selector:
        return Ucb1(self.strategies, self.exploration, self.window, self.reward, self.plain_rate)


class Bucket(Settings):
    """`strategies` to choose from at batch sizes from `min_batch` up to the next bucket."""

    min_batch: int
    strategies: Strategies


class BegMabSpec(_Spec):
    """Either explicit `buckets`, or the paper's grouping: `strategies` and a threshold per tokens_to_verify."""

    kind: Literal["beg-mab"] = "beg-mab"
    buckets: tuple[Bucket, ...] = ()
    strategies: Strategies = ()
    thresholds: tuple[int, ...] = ()
    epsilon: float = 0.1
    window: int = 300
    reward: RewardKind = "paper"
    plain_rate: dict[int, float] | None = None
    statistic: Statistic = "median"
    tries: int = 1

    @model_serializer(mode="wrap")
    def _only_the_form_used(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        unused = ("strategies", "thresholds") if self.buckets else ("buckets",)
        return {name: value for name, value in dump(self).items() if name not in unused}

    def build(self, rng: np.random.Generator) -> Selector:
        if bool(self.buckets) == bool(self.strategies or self.thresholds):
            raise ConfigError("beg-mab takes either buckets, or strategies and thresholds")
        settings = (self.epsilon, self.window, self.reward, self.plain_rate, self.statistic, self.tries)
        if self.buckets:
            return BegMab([(bucket.min_batch, bucket.strategies) for bucket in self.buckets], *settings, rng=rng)
        return BegMab.from_paper(self.strategies, self.thresholds, *settings, rng=rng)


class GoodputSpec(_Spec):
    """Settings of `Goodput`. `costs` is the name of a preset, a cost model's file, or a cost model written out."""

    kind: Literal["goodput"] = "goodput"
    strategies: Strategies
    costs: str | dict[str, Any]
    window: int = 300
    epsilon: float = 0.02
    prior: float = 0.6

    def build(self, rng: np.random.Generator) -> Selector:
        return Goodput(self.strategies, load_costs(self.costs), self.window, self.epsilon, self.prior, rng=rng)


class CustomSpec(Settings):
    """A selector class of the user's own: `path` is "package.module:Class", `args` go to its constructor by name.

    The class may take `rng`, a numpy Generator, and must then draw from nothing else. Modules are looked up as usual
    and last in the current folder.
    """

    kind: Literal["custom"] = "custom"
    path: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    args: dict[str, Any] = Field(default={})

    def build(self, rng: np.random.Generator) -> Selector:
        cls = self.load()
        args = dict(self.args)
        if "rng" in inspect.signature(cls).parameters:
            args["rng"] = rng
        try:
            inspect.signature(cls).bind(**args)
        except TypeError as error:
            raise ConfigError(f"{self.path} cannot be built with args {self.args}: {error}") from error
        return cls(**args)

    def load(self) -> type[Selector]:
        """Import the class; ConfigError when there is none or it is no Selector."""
        module_name, _, name = self.path.partition(":")
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            module = importlib.import_module(module_name)
        except (ImportError, SyntaxError) as error:
            raise ConfigError(f"policy {self.path}: cannot import {module_name}: {error}") from error
        found = getattr(module, name, None)
        if found is None:
            raise ConfigError(f"policy {self.path}: {module_name} ({module.__file__}) has no {name}")
        if not (isinstance(found, type) and issubclass(found, Selector)):
            raise ConfigError(f"policy {self.path}: {name} is not a subclass of tltlab.policies.selector.Selector")
        return found

    def check(self) -> None:
        """Run the contract suite on the class; ConfigError with the first broken promise."""
        try:
            check_selector(self.build)
        except AssertionError as error:
            raise ConfigError(f"policy {self.path} breaks the contract of Selector: {error}") from error


SelectorSpec = Annotated[
    NoneSpec
    | FixedSpec
    | TableSpec
    | ExploreSpec
    | EpsilonGreedySpec
    | Ucb1Spec
    | BegMabSpec
    | GoodputSpec
    | CustomSpec,
    Field(discriminator="kind"),
]
