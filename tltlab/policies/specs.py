"""Settings of selectors as they stand in a policy file: checked when they are read, built when they are needed."""

from collections.abc import Callable
from copy import deepcopy
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, Union

import numpy as np
from pydantic import Field, PrivateAttr

from tltlab.own import OwnPart, build_own

from .adaptive import Adaptive
from .bandits import EpsilonGreedy, Hedge, Ucb1
from .beg_mab import BegMab
from .beg_mab import Bucket as Bucket
from .engines import AcceptedThresholds
from .goodput import Goodput
from .selector import Selector, SelectorSpec
from .simple import AcceptLadder, BatchTable, Explore, Fixed, NoSpeculation
from .simple import TableRow as TableRow

SELECTORS: tuple[type[Selector], ...] = (
    NoSpeculation, Fixed, BatchTable, AcceptLadder, Explore, EpsilonGreedy, Ucb1, Hedge, BegMab, Goodput, Adaptive,
    AcceptedThresholds,
)  # fmt: skip
"""Selectors that policy files know by their kind."""

NoneSpec = NoSpeculation.Spec
FixedSpec = Fixed.Spec
TableSpec = BatchTable.Spec
ExploreSpec = Explore.Spec
BegMabSpec = BegMab.Spec
AdaptiveSpec = Adaptive.Spec
ThresholdsSpec = AcceptedThresholds.Spec


class CustomSpec(OwnPart):
    """A selector class of the user's own.

    The class may take `rng`, a numpy Generator, and must then draw from nothing else.
    """

    base = Selector
    part = "policy"
    contract = "check_selector"
    # The drafters that there are become known where the policy runs.
    contract_args: ClassVar = {"drafters": None}

    _held: Callable[..., Selector] | Selector | None = PrivateAttr(None)

    @classmethod
    def holding(cls, source: Callable[..., Selector] | Selector, *, check: bool = False) -> Self:
        """The spec of a class or function that builds selectors, or of one to copy; no file brings it back.

        Its contract is checked where `check` is set: ConfigError names the first broken promise.
        """
        own: Any = type(source) if isinstance(source, Selector) else source
        spec = cls.model_construct(path=f"{own.__module__}:{own.__qualname__}")
        spec._held = source
        if check:
            cls.check_contract(spec.build, own.__name__)
        return spec

    def build(self, rng: np.random.Generator) -> Selector:
        held: Any = self._held
        if isinstance(held, Selector):
            return deepcopy(held)
        selector: Selector = self.make(rng) if held is None else build_own(held, {}, self.name, rng)
        return selector


if TYPE_CHECKING:
    AnySelectorSpec = SelectorSpec | CustomSpec
else:
    AnySelectorSpec = Annotated[Union[(*(cls.Spec for cls in SELECTORS), CustomSpec)], Field(discriminator="kind")]
