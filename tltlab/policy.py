"""A policy as a value and a file: what `tune` writes, and what the simulator and the real run both build from."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_serializer,
)
from pydantic import model_validator as validator

from .activation import Count, ElasticActivation
from .bandits import EpsilonGreedy, Ucb1
from .beg_mab import BegMab
from .budget import AcceptanceBudget, DraftBudget, UniformBudget
from .cli import read_json, write_json
from .complaints import faults
from .errors import ConfigError
from .reward import RewardKind, Statistic
from .selector import Selector
from .selectors import BatchTable, Explore, Fixed, NoSpeculation
from .strategy import NO_SPECULATION, Strategy
from .testing import check_selector


def _strategy(value: Any, build: ValidatorFunctionWrapHandler) -> Any:
    try:
        return build(value)
    except ConfigError as error:
        raise ValueError(str(error)) from error


StrategyField = Annotated[Strategy, WrapValidator(_strategy)]
Strategies = tuple[StrategyField, ...]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class _Spec(_Model, ABC):
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


class TableRow(_Model):
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


class Bucket(_Model):
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

    @model_serializer(mode="wrap")
    def _only_the_form_used(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        unused = ("strategies", "thresholds") if self.buckets else ("buckets",)
        return {name: value for name, value in dump(self).items() if name not in unused}

    def build(self, rng: np.random.Generator) -> Selector:
        if bool(self.buckets) == bool(self.strategies or self.thresholds):
            raise ConfigError("beg-mab takes either buckets, or strategies and thresholds")
        settings = (self.epsilon, self.window, self.reward, self.plain_rate)
        if self.buckets:
            return BegMab([(bucket.min_batch, bucket.strategies) for bucket in self.buckets], *settings, rng=rng)
        return BegMab.from_paper(self.strategies, self.thresholds, *settings, rng=rng)


class CustomSpec(_Model):
    """A selector class of the user's own: `path` is "package.module:Class", `args` go to its constructor by name.

    The class may take `rng`, a numpy Generator, and must then draw from nothing else. Modules are looked up as usual
    and last in the current folder.
    """

    kind: Literal["custom"] = "custom"
    path: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    args: dict[str, Any] = {}

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
            raise ConfigError(f"policy {self.path}: {name} is not a subclass of tltlab.selector.Selector")
        return found

    def check(self) -> None:
        """Run the contract suite on the class; ConfigError with the first broken promise."""
        try:
            check_selector(self.build)
        except AssertionError as error:
            raise ConfigError(f"policy {self.path} breaks the contract of Selector: {error}") from error


SelectorSpec = Annotated[
    NoneSpec | FixedSpec | TableSpec | ExploreSpec | EpsilonGreedySpec | Ucb1Spec | BegMabSpec | CustomSpec,
    Field(discriminator="kind"),
]


class Activation(_Model):
    """Settings of `ElasticActivation`."""

    kind: Literal["elastic"] = "elastic"
    max_requests: int = Field(default=32, ge=0)
    count: Count = "running"
    hold_iterations: int = Field(default=10, ge=0)

    def wrap(self, inner: Selector) -> Selector:
        return ElasticActivation(inner, self.max_requests, self.count, self.hold_iterations)


class UniformBudgetSpec(_Model):
    """Every request is drafted what the strategy says."""

    kind: Literal["uniform"] = "uniform"

    def build(self) -> DraftBudget:
        return UniformBudget()


class AcceptanceBudgetSpec(_Model):
    """Settings of `AcceptanceBudget`."""

    kind: Literal["acceptance"] = "acceptance"
    min_tokens: int = Field(default=1, ge=0)
    max_draft_tokens: int | None = Field(default=None, ge=0)
    prior: float = Field(default=1.0, ge=0)

    def build(self) -> DraftBudget:
        return AcceptanceBudget(self.min_tokens, self.max_draft_tokens, self.prior)


BudgetSpec = Annotated[UniformBudgetSpec | AcceptanceBudgetSpec, Field(discriminator="kind")]


class Policy(_Model):
    """A selector, when it is active, how drafts are shared out, and where it came from.

    Without a `budget` every request is drafted what the strategy says. `provenance` says how the policy was found:
    trace, costs, seed, objective, interval, ...

    >>> policy = Policy(selector=FixedSpec(strategy=Strategy.chain("ngram", 4)), activation=Activation(max_requests=16))
    >>> [str(strategy) for strategy in policy.strategies]
    ['none', 'ngram:4']
    """

    format: Literal["tltlab-policy"] = "tltlab-policy"
    version: Literal[1] = 1
    selector: SelectorSpec
    activation: Activation | None = None
    budget: BudgetSpec | None = None
    provenance: dict[str, Any] = {}

    def build(self, rng: np.random.Generator) -> Selector:
        """A fresh selector that draws from `rng`; build one per worker."""
        selector = self.selector.build(rng)
        return self.activation.wrap(selector) if self.activation else selector

    def build_budget(self) -> DraftBudget:
        """What shares out the drafts of an iteration."""
        return self.budget.build() if self.budget else UniformBudget()

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """Everything the policy may choose."""
        return self.build(np.random.default_rng(0)).strategies

    def write(self, path: str | Path) -> None:
        """Write the policy file in one move."""
        write_json(Path(path), self.model_dump(mode="json"))


def load_policy(source: str | Path | Policy) -> Policy:
    """Return the policy behind a shipped name, a policy file or "package.module:Class"; a Policy is returned as it is.

    A class of the user's own is imported and must pass `tltlab.testing.check_selector`. ConfigError names everything
    that is wrong with a file, each fault with its place, on one line.
    """
    if isinstance(source, Policy):
        return source
    if isinstance(source, str) and source in SHIPPED:
        return SHIPPED[source]
    path = Path(source)
    if isinstance(source, str) and not path.is_file():
        if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", source):
            return _checked(Policy(selector=CustomSpec(path=source)))
        if "/" not in source and not path.suffix:
            raise ConfigError(
                f"no policy named {source!r}; there are {', '.join(SHIPPED)}, "
                f"or give a policy file or package.module:Class"
            )
    return _checked(_parse(path, read_json(path)))


def _checked(policy: Policy) -> Policy:
    if isinstance(policy.selector, CustomSpec):
        policy.selector.check()
    return policy


def _parse(path: Path, value: Any) -> Policy:
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: a policy file holds one JSON object, got {type(value).__name__}")
    try:
        # Defaults are for Python; a file must say what it is.
        return Policy.model_validate({"format": None, "version": None, **value})
    except ValidationError as error:
        raise ConfigError(f"{path}: {faults(error, _place)}") from error


def _place(loc: tuple[int | str, ...]) -> str:
    # Inside the union pydantic's place goes on with the kind; the file has no such level.
    parts = [str(part) for i, part in enumerate(loc) if not (i == 1 and loc[0] in ("selector", "budget"))]
    return ".".join(parts) or "policy"


def _chains(*depths: int) -> Strategies:
    return tuple(Strategy.chain("ngram", depth) for depth in depths)


_TABLE = zip((1, 5, 17, 33), (*_chains(8, 4, 2), NO_SPECULATION), strict=True)
_BUCKETS = zip((1, 5, 17), (_chains(8, 4, 2, 0), _chains(4, 2, 1, 0), _chains(2, 1, 0)), strict=True)

# The bandits learn from relative rewards: within a rollout the batch only falls, so tokens per second would favour
# whatever arm ran early. UCB1's textbook exploration of 1 keeps trying arms that are clearly worse; 0.1 is calmer.
SHIPPED: dict[str, Policy] = {
    "none": Policy(selector=NoneSpec()),
    "fixed": Policy(selector=FixedSpec(strategy=Strategy.chain("ngram", 4))),
    "table": Policy(selector=TableSpec(rows=tuple(TableRow(min_batch=b, strategy=s) for b, s in _TABLE))),
    "epsilon-greedy": Policy(
        selector=EpsilonGreedySpec(strategies=_chains(0, 1, 2, 4, 8), reward="relative"),
        activation=Activation(),
    ),
    "ucb1": Policy(
        selector=Ucb1Spec(strategies=_chains(0, 1, 2, 4, 8), exploration=0.1, reward="relative"),
        activation=Activation(),
    ),
    "beg-mab": Policy(
        selector=BegMabSpec(
            buckets=tuple(Bucket(min_batch=b, strategies=s) for b, s in _BUCKETS),
            reward="relative",
        ),
        activation=Activation(),
    ),
    "explore": Policy(selector=ExploreSpec(strategies=_chains(0, 1, 2, 4, 8), hold_iterations=10)),
}
