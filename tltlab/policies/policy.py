"""A policy as a value and a file: what `tune` writes, and what the simulator and the real run both build from."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field, NonNegativeInt, field_validator
from pydantic import model_validator as validator

from tltlab.config import Built, FiniteModel, faults_in, shown
from tltlab.drafters.budget import AcceptanceBudget, DraftBudget, LengthAwareBudget, MbaBudget, UniformBudget
from tltlab.drafters.specs import DEFAULT_DRAFTERS, Drafters, DrafterSpec, HybridSpec, OwnDrafter
from tltlab.errors import ConfigError, did_you_mean
from tltlab.files import read_json, write_json
from tltlab.own import OwnPart, named_in, parse_call
from tltlab.records import Fields, Json
from tltlab.strategy import NO_SPECULATION, Strategy

from .engines import VerificationBudget
from .selector import Selector
from .specs import (
    AnySelectorSpec,
    CustomSpec,
    FixedSpec,
)
from .wrappers import Count, ElasticActivation


class Activation(FiniteModel):
    """Settings of `ElasticActivation`."""

    kind: Literal["elastic"] = "elastic"
    max_requests: NonNegativeInt = 32
    count: Count = "running"
    hold_iterations: NonNegativeInt = 10

    def wrap(self, inner: Selector) -> Selector:
        return ElasticActivation(inner, self.max_requests, self.count, self.hold_iterations)


class UniformBudgetSpec(Built, builds=UniformBudget):
    kind: Literal["uniform"] = "uniform"


class AcceptanceBudgetSpec(Built, builds=AcceptanceBudget, init=False):
    kind: Literal["acceptance"] = "acceptance"


class LengthAwareBudgetSpec(Built, builds=LengthAwareBudget, init=False):
    kind: Literal["length-aware"] = "length-aware"


class MbaBudgetSpec(Built, builds=MbaBudget, init=False):
    kind: Literal["mba"] = "mba"


class VerificationBudgetSpec(Built, builds=VerificationBudget, init=False):
    kind: Literal["verification"] = "verification"


BudgetSpec = Annotated[
    UniformBudgetSpec | AcceptanceBudgetSpec | LengthAwareBudgetSpec | MbaBudgetSpec | VerificationBudgetSpec,
    Field(discriminator="kind"),
]


class Policy(FiniteModel):
    """A selector, when it is active, how drafts are shared out, and where it came from.

    Without a `budget` every request is drafted as the strategy sets. `drafters` are specs, or a user's classes, by the
    name that its strategies use. They add to the drafters that every engine has (`DEFAULT_DRAFTERS`).
    `provenance` records how the policy was found: trace, costs, seed, objective, interval, ...

    >>> policy = Policy(selector=FixedSpec(strategy=Strategy.chain("ngram", 4)), activation=Activation(max_requests=16))
    >>> [str(strategy) for strategy in policy.strategies]
    ['none', 'ngram:4']
    """

    format: Literal["tltlab-policy"] = "tltlab-policy"
    version: Literal[1] = 1
    selector: AnySelectorSpec
    activation: Activation | None = None
    budget: BudgetSpec | None = None
    drafters: dict[str, DrafterSpec] = Field(default={})
    provenance: Json = Field(default={})

    @field_validator("drafters", mode="before")
    @classmethod
    def _classes(cls, drafters: Any) -> Any:
        """Drafter classes stand for their names."""
        if not isinstance(drafters, Mapping):
            return drafters
        return {n: OwnDrafter.of_class(spec) if isinstance(spec, type) else spec for n, spec in drafters.items()}

    @validator(mode="after")
    def _drafters_can_serve(self) -> Policy:
        available = DEFAULT_DRAFTERS | self.drafters
        for name, spec in self.drafters.items():
            if name in ("", NO_SPECULATION.drafter):
                raise ValueError(f"drafters: {name!r} is no name for a drafter, no strategy could ask for it")
            parts = (spec.first, spec.otherwise) if isinstance(spec, HybridSpec) else ()
            if hybrids := [part for part in parts if isinstance(available.get(part), HybridSpec)]:
                raise ValueError(f"drafters.{name}: a hybrid of {hybrids[0]!r}, which is a hybrid itself")
        return self

    @property
    def registry(self) -> Drafters:
        """The standard drafters and those that the policy brings along."""
        return Drafters(self.drafters)

    def build(self, rng: np.random.Generator) -> Selector:
        """A fresh selector that draws from `rng`; build one per worker."""
        selector = self.selector.build(rng)
        selector.drafts_with(self.registry)
        return self.activation.wrap(selector) if self.activation else selector

    def build_budget(self) -> DraftBudget:
        """Return the budget that allots the drafts of an iteration."""
        budget: DraftBudget = self.budget.make() if self.budget else UniformBudget()
        budget.drafts_with(self.registry)
        return budget

    @property
    def name(self) -> str | None:
        """Drafts in short such as `ngram:4@16`, a shipped policy's name, or `module:Class`; None for other policies."""
        if isinstance(self.selector, CustomSpec):
            return self.selector.path
        if isinstance(self.selector, FixedSpec):
            text = f"{self.selector.strategy}{f'@{self.activation.max_requests}' if self.activation else ''}"
            if policy_of_drafts(text) == self:
                return text
        return next((name for name, policy in SHIPPED.items() if policy == self), None)

    @property
    def own_parts(self) -> tuple[OwnPart, ...]:
        """Classes of a user's own that the policy imports."""
        return tuple(part for part in (self.selector, *self.drafters.values()) if isinstance(part, OwnPart))

    def with_settings(self, settings: Fields, name: str = "") -> Policy:
        """The policy with other values for settings of its selector; ConfigError for one that it does not have.

        >>> load_policy("goodput").with_settings({"window": 100}).selector.window
        100
        """
        name, selector = name or f"policy {self.selector.kind}", self.selector
        if isinstance(selector, CustomSpec):
            args = {**selector.args, **settings}
            return self.model_copy(update={"selector": selector.model_copy(update={"args": args})})
        known = [field for field in type(selector).model_fields if field != "kind"]
        if unknown := [key for key in settings if key not in known]:
            near = did_you_mean(unknown[0], known)
            raise ConfigError(f"{name} has no setting {unknown[0]!r}{near}; there are {', '.join(known) or 'none'}")
        with faults_in(name):
            changed = type(selector).model_validate({**selector.model_dump(mode="json"), **settings})
        return self.model_copy(update={"selector": changed})

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """Everything the policy may choose."""
        return self.build(np.random.default_rng(0)).strategies

    def with_provenance(self, **facts: Any) -> Policy:
        """The same policy with these facts in its provenance too."""
        return self.model_copy(update={"provenance": self.provenance | facts})

    def write(self, path: str | Path) -> None:
        """Write the policy file in one move."""
        write_json(Path(path), self.model_dump(mode="json"))


PolicySource = str | Path | Fields | BaseModel | Strategy | type[Selector] | Selector
"""A policy as users give it: see `load_policy`."""


def load_policy(source: PolicySource, *, held: bool = False) -> Policy:
    """Return the policy that a user means; a Policy is returned as it is.

    That is a shipped name, a policy file, drafts in short (`ngram:4` always drafts 4 tokens, `learned:8x4/48` a tree,
    `ngram:4@8` only while at most 8 requests run), "package.module:Class" or the class itself, what stands in a policy
    file or its selector, as a dict or built, or a Strategy, which is always chosen. A name or a class takes parameters
    behind it, as in `goodput(window=100)`. A class of the user's own must be one that other processes can import, and
    pass `tltlab.testing.check_selector`; a file may name one only of a module that `code_allowed` or
    `TLTLAB_ALLOW_CODE` does. With `held` any class will do, and an instance too, of which each worker gets a copy: no
    file brings such a policy back. ConfigError names everything that is wrong with a file, each fault with its place,
    on one line.

    >>> load_policy(Strategy.chain("ngram", 2)).strategies
    (Strategy(drafter='ngram', draft_depth=2, top_k=1, tokens_to_verify=3),)
    """
    if isinstance(source, Policy):
        return source
    if held and (isinstance(source, Selector) or (isinstance(source, type) and issubclass(source, Selector))):
        return Policy(selector=CustomSpec.holding(source, check=True))
    if isinstance(source, type):
        return _checked(Policy(selector=CustomSpec.of_class(source)))
    if isinstance(source, Strategy):
        return Policy(selector=FixedSpec(strategy=source))
    if isinstance(source, Mapping | BaseModel):
        whole = isinstance(source, Mapping) and "selector" in source
        with faults_in("policy", _place):
            return _checked(Policy.model_validate(source if whole else {"selector": source}))
    if not isinstance(source, str | Path):
        raise ConfigError(
            f"{shown(source)} is no policy: give a name, a file, package.module:Class, a subclass of Selector, a "
            "Policy or what stands in its file"
        )
    if isinstance(source, str) and source in SHIPPED:
        return SHIPPED[source]
    path = Path(source)
    # `os.path` takes a name that is too long for a file as none.
    if isinstance(source, str) and not os.path.isfile(path):
        if (drafts := policy_of_drafts(source)) is not None:
            return drafts
        if (own := CustomSpec.parse(source)) is not None:
            return _checked(Policy(selector=own))
        name, settings = parse_call(source)
        if settings and name in SHIPPED:
            return SHIPPED[name].with_settings(settings, name)
        if settings or ("/" not in source and not path.suffix):
            raise ConfigError(
                f"no policy named {name!r}{did_you_mean(name, SHIPPED)}; there are {', '.join(SHIPPED)}, "
                f"or give drafts such as ngram:4, a policy file or package.module:Class"
            )
    if path.suffix == ".py":
        raise ConfigError(f"{path} is a module: name the class in it, as in {path.stem}:{path.stem.title()}")
    policy = parse_policy(read_json(path), path)
    for part in policy.own_parts:
        part.refuse_unasked(path)
    return _checked(policy)


def policy_of_drafts(text: str) -> Policy | None:
    """The policy that `ngram:4`, `ngram:4@8` or `learned:8x4/48` stands for; None for another text."""
    drafts = re.fullmatch(r"([\w-]+:[1-9]\d*(?:x[1-9]\d*)?(?:/[1-9]\d*)?)(?:@([1-9]\d*))?", text)
    if drafts is None:
        return None
    activation = Activation(max_requests=int(drafts[2])) if drafts[2] else None
    return Policy(selector=FixedSpec(strategy=Strategy.parse(drafts[1])), activation=activation)


def _checked(policy: Policy) -> Policy:
    for part in policy.own_parts:
        part.check()
    return policy


def parse_policy(value: Any, path: Path, part: str = "") -> Policy:
    """A policy that stands as JSON in the file `path`, or in a `part` of it. ConfigError names all that is wrong.

    Files that it names are looked up in the folder of `path` first.
    """
    origin = f"{path}: {part}" if part else str(path)
    if not isinstance(value, dict):
        raise ConfigError(f"{origin}: a policy file holds one JSON object, got {type(value).__name__}")
    with named_in(path), faults_in(origin, _place):
        # Defaults are for Python; a file must state its format and version.
        return Policy.model_validate({"format": None, "version": None, **value}, context={"folder": path.parent})


def _place(loc: tuple[int | str, ...]) -> str:
    # Inside a union pydantic's location also has the kind; the file has no such level.
    kind_at = {"selector": 1, "budget": 1, "drafters": 2}.get(str(loc[0])) if loc else None
    parts = [str(part) for i, part in enumerate(loc) if i != kind_at]
    return ".".join(parts) or "policy"


EXPLORE = "explore"
"""Name of the shipped policy that tries everything, and of the one on which `tltlab verify --policies` calibrates."""

_ROWS = tomllib.loads(files("tltlab.policies").joinpath("shipped.toml").read_text("utf-8"))
SHIPPED = {name: Policy.model_validate(row) for name, row in _ROWS.items()}
