"""Settings of selectors as they stand in a policy file: checked when they are read, built when they are needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Union

import numpy as np
from pydantic import Field

from tltlab.own import OwnPart

from .adaptive import Adaptive
from .bandits import EpsilonGreedy, Hedge, Ucb1
from .beg_mab import BegMab
from .beg_mab import Bucket as Bucket
from .goodput import Goodput
from .selector import Selector, SelectorSpec
from .simple import AcceptLadder, BatchTable, Explore, Fixed, NoSpeculation
from .simple import TableRow as TableRow

SELECTORS: tuple[type[Selector], ...] = (
    NoSpeculation, Fixed, BatchTable, AcceptLadder, Explore, EpsilonGreedy, Ucb1, Hedge, BegMab, Goodput, Adaptive,
)  # fmt: skip
"""Selectors that policy files know by their kind."""

NoneSpec = NoSpeculation.Spec
FixedSpec = Fixed.Spec
TableSpec = BatchTable.Spec
ExploreSpec = Explore.Spec
BegMabSpec = BegMab.Spec
AdaptiveSpec = Adaptive.Spec


class CustomSpec(OwnPart):
    """A selector class of the user's own.

    The class may take `rng`, a numpy Generator, and must then draw from nothing else.
    """

    base = Selector
    part = "policy"
    contract = "check_selector"
    # The drafters that there are become known where the policy runs.
    contract_args: ClassVar = {"drafters": None}

    def build(self, rng: np.random.Generator) -> Selector:
        selector: Selector = self.make(rng)
        return selector


if TYPE_CHECKING:
    AnySelectorSpec = SelectorSpec | CustomSpec
else:
    AnySelectorSpec = Annotated[Union[(*(cls.Spec for cls in SELECTORS), CustomSpec)], Field(discriminator="kind")]
